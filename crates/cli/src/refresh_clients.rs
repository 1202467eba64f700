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
use std::time::Duration;

use anyhow::bail;
use futures::stream::{self, StreamExt};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, Preconditions};
use pitcrew_controller::{Watch, sentence};
use pitcrew_core::action::PodRef;
use pitcrew_core::names::{NodeName, ObjectName, Uid};
use pitcrew_core::plan::{NodeClients, Outcome, client_survey};
use pitcrew_core::snapshot::Snapshot;
use serde_json::Value;

use crate::connect::{Connection, Session};
use crate::terminal::Output;
use progress::Progress;

/// Each holds one seat of the API server.
const DELETES_IN_FLIGHT_MAX: usize = 8;
/// As long as the controller gives a call.
const CALL: Duration = Duration::from_secs(5);
/// What could not be deleted is tried again after so long.
const RETRY: SignedDuration = SignedDuration::from_secs(5);
/// Nodes on which the operator is to install a driver.
const DEPLOY_DRIVER_LABEL: &str = "nvidia.com/gpu.deploy.driver";

const NO_DRIVER: &str = "no node has a driver that an operator installs";
const NO_DRIVER_HERE: &str = "no operator installs a driver on it";

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
    let mut watch = Watch::clients(&session.client, &session.namespace, session.clock.clone()).await?;
    let deadline = session.clock.now().saturating_add(args.deadline)?;
    let quiet = args.output.is_some();
    let mut progress = Progress::new(session.zone.clone(), live && !quiet, quiet);
    let mut work = Work::default();
    let mut calm_since: Option<Timestamp> = None;
    must_exist(watch.snapshot(), &args.nodes)?;
    loop {
        let now = watch.snapshot().now;
        let nodes = work.survey(watch.snapshot(), &args.nodes)?;
        if args.dry_run {
            Progress::would(&nodes, args.output, out)?;
            return Ok(ExitCode::SUCCESS);
        }
        progress.tell(&nodes, now, deadline, out)?;
        let retry_at = work.replace(session, &nodes, now).await;
        // What is known through a broken connection is no calm.
        let calm = nodes.iter().all(is_settled) && watch.trouble().is_none();
        calm_since = if calm { calm_since.or(Some(now)) } else { None };
        let calm_until = calm_since.map(|since| since.saturating_add(args.settle)).transpose()?;
        if calm_until.is_some_and(|until| until <= now) {
            progress.end(&nodes, nothing_to_do(watch.snapshot(), &nodes), &work, args.output, out)?;
            return undecided(&nodes);
        }
        if now >= deadline {
            progress.end(&nodes, None, &work, args.output, out)?;
            bail!("{}", late(&nodes, args.deadline));
        }
        if let Some(trouble) = watch.trouble() {
            progress.trouble(trouble, out)?;
        }
        let known = nodes.iter().filter_map(|node| node.wake_at);
        watch.changed(known.chain(retry_at).chain(calm_until).chain([deadline]).min()).await;
    }
}

/// The end is a good one unless something is left that only a person can decide.
fn undecided(nodes: &[NodeClients]) -> anyhow::Result<ExitCode> {
    let open: Vec<String> = nodes
        .iter()
        .filter_map(|node| match &node.outcome {
            Outcome::NeedsPerson(why) => Some(format!("{}: {why}", node.node)),
            _ => None,
        })
        .collect();
    match open.as_slice() {
        [] => Ok(ExitCode::SUCCESS),
        some => bail!("not fresh, and for a person to decide: {}", some.join("; ")),
    }
}

fn is_settled(node: &NodeClients) -> bool {
    matches!(node.outcome, Outcome::Fresh | Outcome::LeftAlone(_) | Outcome::NeedsPerson(_))
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

/// Whether there was nothing to do, and why. Only what is certain counts: this is asked when all has been calm.
fn nothing_to_do(snapshot: &Snapshot, nodes: &[NodeClients]) -> Option<String> {
    if !nodes.is_empty() {
        let nobody = nodes.iter().all(|node| node.outcome == Outcome::Fresh && node.clients.is_empty());
        return nobody.then(|| "there are no driver clients on these nodes".to_owned());
    }
    let by_host = is_host_managed(snapshot);
    let why = if by_host {
        "the operator does not install the driver (driver.enabled is false)"
    } else {
        NO_DRIVER
    };
    Some(why.to_owned())
}

/// The operator labels every GPU node, also if it leaves the driver to the machine image.
fn is_host_managed(snapshot: &Snapshot) -> bool {
    let policies = &snapshot.sources.cluster_policies;
    let off = |driver: &Value| driver["enabled"] == false && driver["useNvidiaDriverCRD"] != true;
    !policies.is_empty() && policies.values().all(|policy| off(&policy.driver))
}

/// What was done so far.
#[derive(Default)]
struct Work {
    /// DaemonSets whose pods were deleted on a node, so that they are missed until they are back.
    replaced: BTreeMap<NodeName, BTreeSet<ObjectName>>,
    /// Pods that were told to go, and those that could not be: when to try again.
    asked: BTreeMap<Uid, Option<Timestamp>>,
    /// Pods that the API lets us not delete, and what it says.
    refused: BTreeMap<Uid, String>,
    /// How many pods were deleted.
    deleted: usize,
}

impl Work {
    /// The nodes that are asked for, those included that should have a driver and are in nobody's care yet.
    fn survey(&self, snapshot: &Snapshot, wanted: &Nodes) -> Result<Vec<NodeClients>, Senseless> {
        let all = client_survey(snapshot, &self.replaced);
        let mut all = all.map_err(|(source, problem)| Senseless(format!("{source}: {problem}")))?;
        let known: BTreeSet<NodeName> = all.iter().map(|node| node.node.clone()).collect();
        let strangers = snapshot.nodes.keys().filter(|name| !known.contains(*name));
        all.extend(strangers.filter_map(|name| stranger(snapshot, name, wanted)));
        all.retain(|node| wanted.all_nodes || wanted.named.iter().any(|name| *name == *node.node.as_str()));
        for node in &mut all {
            self.tell_refused(node);
        }
        Ok(all)
    }

    /// What the API lets nobody delete is for a person.
    fn tell_refused(&self, node: &mut NodeClients) {
        let Outcome::Replace(pods) = &mut node.outcome else { return };
        let refused = pods.iter().find_map(|(pod, _)| Some((pod.name.clone(), self.refused.get(&pod.uid)?)));
        let refused = refused.map(|(pod, why)| format!("cannot delete pod {pod}: {why}"));
        pods.retain(|(pod, _)| !self.refused.contains_key(&pod.uid));
        if let Some(why) = refused.filter(|_| pods.is_empty()) {
            node.outcome = Outcome::NeedsPerson(why);
        }
    }

    /// Deletes what is stale and next. When to look again, if something could not be deleted.
    async fn replace(
        &mut self,
        session: &Session,
        nodes: &[NodeClients],
        now: Timestamp,
    ) -> Option<Timestamp> {
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
                Err(error) if is_forbidden(&error) => {
                    self.refused.insert(pod.uid, sentence(&error));
                }
                Err(_) => drop(self.asked.insert(pod.uid, now.saturating_add(RETRY).ok())),
            }
        }
        self.asked.values().flatten().filter(|at| **at > now).min().copied()
    }

    /// From now on the client's next pod is waited for.
    fn miss(&mut self, nodes: &[NodeClients], node: &NodeName, pod: &ObjectName) {
        let clients = nodes.iter().filter(|n| n.node == *node).flat_map(|n| &n.clients);
        let daemon_sets =
            clients.filter(|client| client.pod.as_ref() == Some(pod)).map(|c| c.daemon_set.clone());
        self.replaced.entry(node.clone()).or_default().extend(daemon_sets);
    }
}

/// Nodes that are asked for by name must be there to begin with. They may leave later.
fn must_exist(snapshot: &Snapshot, wanted: &Nodes) -> Result<(), Senseless> {
    match wanted.named.iter().find(|name| !snapshot.nodes.contains_key(name.as_str())) {
        Some(name) => Err(Senseless(format!("there is no node {name} (kubectl get nodes lists them)"))),
        None => Ok(()),
    }
}

/// A node that is in no pool: one that should have a driver is waited for, one that is named and should not is left alone.
fn stranger(snapshot: &Snapshot, name: &NodeName, wanted: &Nodes) -> Option<NodeClients> {
    let label = snapshot.nodes.get(name)?.labels().get(DEPLOY_DRIVER_LABEL);
    let managed = label.is_some_and(|value| value == "true") && !is_host_managed(snapshot);
    let outcome = match managed {
        true => Outcome::Waits(format!(
            "labelled {DEPLOY_DRIVER_LABEL}=true, but no driver DaemonSet is meant for it yet"
        )),
        false if wanted.all_nodes => return None,
        false => Outcome::LeftAlone(NO_DRIVER_HERE.to_owned()),
    };
    let (node, pool) = (name.clone(), "none".into());
    Some(NodeClients { node, pool, epoch: None, clients: vec![], outcome, wake_at: None })
}

fn is_forbidden(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 403 || status.code == 401)
}

/// A call that takes longer has an unknown outcome: the watch tells, and it is tried again.
async fn delete(session: &Session, pod: &PodRef) -> kube::Result<()> {
    let preconditions = Preconditions { uid: Some(pod.uid.to_string()), resource_version: None };
    let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
    let api = Api::<Pod>::namespaced(session.client.clone(), &pod.name.namespace);
    let answer = tokio::time::timeout(CALL, api.delete(&pod.name.name, &params)).await;
    answer.map_err(|late| kube::Error::Service(late.into()))?.map(drop)
}
