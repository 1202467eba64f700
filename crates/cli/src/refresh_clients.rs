//! `pitcrew refresh-clients`: the driver's stale clients are replaced node by node, as each node's driver is ready. For
//! clusters that are driven by Helm or GitOps alone; the staleness test is the controller's.
//!
//! ```text
//!  progress.rs   what is said about each node, line by line, and at the end
//!  tests.rs
//! ```
//!
//! Exit codes: 0 all are fresh, or there is positively nothing to do; 1 the time is over, or the API refused; 2 what is
//! asked for does not make sense.

mod progress;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use anyhow::{anyhow, bail};
use futures::stream::{self, StreamExt};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, Preconditions};
use pitcrew_controller::{Watch, sentence};
use pitcrew_core::action::PodRef;
use pitcrew_core::names::{NodeName, ObjectName, Uid};
use pitcrew_core::plan::{NodeClients, Outcome, client_survey};
use pitcrew_core::snapshot::Snapshot;

use crate::connect::{Connection, Session};
use crate::terminal::Output;
use progress::Progress;

/// Each holds one seat of the API server.
const DELETES_IN_FLIGHT_MAX: usize = 8;
/// What could not be deleted is tried again after so long.
const RETRY: SignedDuration = SignedDuration::from_secs(5);
/// Nodes on which the operator is to install a driver.
const DEPLOY_DRIVER_LABEL: &str = "nvidia.com/gpu.deploy.driver";

/// What `pitcrew refresh-clients` takes.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    nodes: Nodes,
    /// How long to wait for drivers and clients that are on their way
    #[arg(long, value_name = "DURATION", default_value = "45m", value_parser = positive)]
    deadline: SignedDuration,
    /// All must be fresh for so long: an operator takes a moment to act on a new version
    #[arg(long, value_name = "DURATION", default_value = "20s")]
    settle: SignedDuration,
    /// Say what would be replaced, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Another form of output, at the end
    #[arg(short, long)]
    output: Option<Output>,
    #[command(flatten)]
    connection: Connection,
}

#[derive(clap::Args)]
#[group(required = true, multiple = false)]
struct Nodes {
    /// A node; may be given more than once
    #[arg(long = "node", value_name = "NODE")]
    named: Vec<String>,
    /// All nodes whose driver is installed by an operator
    #[arg(long)]
    all_nodes: bool,
}

fn positive(text: &str) -> Result<SignedDuration, String> {
    let duration: SignedDuration = text.parse().map_err(|_| "expected a duration such as 45m".to_owned())?;
    if duration.is_positive() { Ok(duration) } else { Err("it must be more than nothing".to_owned()) }
}

/// What is asked for does not make sense: nothing was done.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Senseless(String);

/// Replaces stale clients until all are fresh.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let outcome = Session::run(&args.connection, async |session| {
        let (mut out, live) = (std::io::stdout(), std::io::stdout().is_terminal());
        refresh(&session, args, live, &mut out).await
    });
    match outcome {
        Err(error) if error.is::<Senseless>() => {
            crate::words::failure(&error);
            Ok(ExitCode::from(2))
        }
        outcome => outcome,
    }
}

async fn refresh(
    session: &Session,
    args: &Args,
    live: bool,
    out: &mut impl Write,
) -> anyhow::Result<ExitCode> {
    let mut watch = Watch::clients(&session.client, &session.namespace, session.clock).await?;
    let deadline = session.clock.now().saturating_add(args.deadline)?;
    let quiet = args.output.is_some();
    let mut progress = Progress::new(session.zone.clone(), live && !quiet, quiet);
    let mut work = Work::default();
    let mut calm_since: Option<Timestamp> = None;
    loop {
        let now = watch.snapshot().now;
        let nodes = work.survey(watch.snapshot(), &args.nodes)?;
        if let Some(nothing) = nothing_to_do(watch.snapshot(), &nodes)? {
            progress.end(&[], Some(nothing), &work, args.output, out)?;
            return Ok(ExitCode::SUCCESS);
        }
        if args.dry_run {
            Progress::would(&nodes, args.output, out)?;
            return Ok(ExitCode::SUCCESS);
        }
        progress.tell(&nodes, now, deadline, out)?;
        let wake_at = work.replace(session, &nodes, now).await?;
        if !nodes.iter().all(is_settled) {
            calm_since = None;
        }
        let calm_until = nodes.iter().all(is_settled).then(|| *calm_since.get_or_insert(now));
        let calm_until = calm_until.map(|since| since.saturating_add(args.settle)).transpose()?;
        if calm_until.is_some_and(|until| until <= now) {
            progress.end(&nodes, None, &work, args.output, out)?;
            return Ok(ExitCode::SUCCESS);
        }
        if now >= deadline {
            progress.end(&nodes, None, &work, args.output, out)?;
            bail!("{}", late(&nodes, args.deadline));
        }
        if let Some(trouble) = watch.trouble() {
            progress.trouble(trouble, out)?;
        }
        let wake_at = [wake_at, calm_until, Some(deadline)].into_iter().flatten().min();
        watch.changed(wake_at).await;
    }
}

fn is_settled(node: &NodeClients) -> bool {
    matches!(node.outcome, Outcome::Fresh | Outcome::LeftAlone(_))
}

/// The sentence for a time that is over: how many, the first few, and why.
fn late(nodes: &[NodeClients], deadline: SignedDuration) -> String {
    let open: Vec<&NodeClients> = nodes.iter().filter(|node| !is_settled(node)).collect();
    let first = open.iter().take(3).map(|node| match &node.outcome {
        Outcome::Waits(why) => format!("{}: {why}", node.node),
        _ => format!("{}: stale clients could not be replaced", node.node),
    });
    let first: Vec<String> = first.collect();
    let more = open.len().saturating_sub(first.len());
    let more = if more > 0 { format!("; and {more} more") } else { String::new() };
    format!("not fresh after {deadline:#}: {}{more}", first.join("; "))
}

/// Whether it is certain that there is nothing to do, and why. What merely cannot be seen is an error.
fn nothing_to_do(snapshot: &Snapshot, nodes: &[NodeClients]) -> anyhow::Result<Option<String>> {
    if !nodes.is_empty() {
        let nobody = nodes.iter().all(|node| node.outcome == Outcome::Fresh && node.clients.is_empty());
        return Ok(nobody.then(|| "there are no driver clients on these nodes".to_owned()));
    }
    let managed = snapshot
        .nodes
        .iter()
        .find(|(_, node)| node.labels().get(DEPLOY_DRIVER_LABEL).is_some_and(|value| value == "true"));
    match managed {
        None => Ok(Some("no node has a driver that an operator installs".to_owned())),
        Some((node, _)) => Err(anyhow!(
            "node {node} is labelled {DEPLOY_DRIVER_LABEL}=true, but no ClusterPolicy, NVIDIADriver or DriverPolicy \
             with a driver DaemonSet is there; install the operator first, or remove the label"
        )),
    }
}

/// What was done so far.
#[derive(Default)]
struct Work {
    /// DaemonSets whose pods were deleted on a node, so that they are missed until they are back.
    replaced: BTreeMap<NodeName, BTreeSet<ObjectName>>,
    /// Pods that were told to go, and those that could not be: when to try again.
    asked: BTreeMap<Uid, Option<Timestamp>>,
    /// How many pods were deleted.
    deleted: usize,
}

impl Work {
    /// The nodes that are asked for.
    fn survey(&self, snapshot: &Snapshot, wanted: &Nodes) -> anyhow::Result<Vec<NodeClients>> {
        let all = client_survey(snapshot, &self.replaced);
        let all = all.map_err(|(source, problem)| Senseless(format!("{source}: {problem}")))?;
        if wanted.all_nodes {
            return Ok(all);
        }
        for name in &wanted.named {
            if !snapshot.nodes.contains_key(name.as_str()) {
                bail!(Senseless(format!("there is no node {name} (kubectl get nodes lists them)")));
            }
        }
        Ok(all
            .into_iter()
            .filter(|node| wanted.named.iter().any(|name| *name == *node.node.as_str()))
            .collect())
    }

    /// Deletes what is stale and next. When to look again, if something could not be deleted.
    async fn replace(
        &mut self,
        session: &Session,
        nodes: &[NodeClients],
        now: Timestamp,
    ) -> anyhow::Result<Option<Timestamp>> {
        let may = |pod: &PodRef| match self.asked.get(&pod.uid) {
            None => true,
            Some(again) => again.is_some_and(|again| again <= now),
        };
        let stale = nodes.iter().flat_map(|node| match &node.outcome {
            Outcome::Replace(pods) => pods.as_slice(),
            _ => &[],
        });
        let stale: Vec<PodRef> = stale.map(|(pod, _)| pod).filter(|pod| may(pod)).cloned().collect();
        let calls = stale.into_iter().map(async |pod| (delete(session, &pod).await, pod));
        let answers: Vec<_> = stream::iter(calls).buffer_unordered(DELETES_IN_FLIGHT_MAX).collect().await;
        for (answer, pod) in answers {
            match answer {
                Ok(()) => {
                    self.deleted += 1;
                    self.asked.insert(pod.uid, None);
                    self.miss(nodes, &pod.node, &pod.name);
                }
                // Somebody else was quicker: the watch will tell.
                Err(kube::Error::Api(status)) if status.code == 404 || status.code == 409 => {
                    self.asked.insert(pod.uid, None);
                    self.miss(nodes, &pod.node, &pod.name);
                }
                Err(error @ kube::Error::Api(_)) if is_forbidden(&error) => {
                    bail!("cannot delete pod {}: {}", pod.name, sentence(&error));
                }
                Err(_) => drop(self.asked.insert(pod.uid, now.saturating_add(RETRY).ok())),
            }
        }
        Ok(self.asked.values().flatten().filter(|at| **at > now).min().copied())
    }

    /// From now on the client's next pod is waited for.
    fn miss(&mut self, nodes: &[NodeClients], node: &NodeName, pod: &ObjectName) {
        let clients = nodes.iter().filter(|n| n.node == *node).flat_map(|n| &n.clients);
        let daemon_sets =
            clients.filter(|client| client.pod.as_ref() == Some(pod)).map(|c| c.daemon_set.clone());
        self.replaced.entry(node.clone()).or_default().extend(daemon_sets);
    }
}

fn is_forbidden(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 403 || status.code == 401)
}

async fn delete(session: &Session, pod: &PodRef) -> kube::Result<()> {
    let preconditions = Preconditions { uid: Some(pod.uid.to_string()), resource_version: None };
    let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
    let api = Api::<Pod>::namespaced(session.client.clone(), &pod.name.namespace);
    api.delete(&pod.name.name, &params).await.map(drop)
}
