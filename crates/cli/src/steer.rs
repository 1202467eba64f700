//! `pitcrew pause`, `resume`, `skip`, `retry`, `abort`, `promote`, `rollback`, `clear`: a person's hand on the wheel, by the documented fields and labels.
//!
//! ```text
//!  switch.rs   pause and resume: autoUpgrade, where the policy says it
//!  nodes.rs    skip and retry: the documented labels of a node
//!  abort.rs    a rollout
//!  promote.rs  a stage of it
//!  rollback.rs its version: taken back, or tried again
//!  health_hold.rs   NVSentinel's hands off nodes, for work of one's own
//! ```
//!
//! Each decides on one look what to change, all of it before the first write, and pins what it saw; if somebody writes
//! in between, it looks again. The controller does the rest.

mod abort;
mod health_hold;
mod nodes;
mod promote;
mod rollback;
mod switch;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::fmt;
use std::io::Write;
use std::process::ExitCode;

use anyhow::{anyhow, bail};
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::{Patch, PatchParams};
use pitcrew_controller::{Look, sentence};
use pitcrew_core::api::{ClusterPolicy, DriverPolicy, NVIDIADriver, NicClusterPolicy, Rollout};
use pitcrew_core::contract::COMPONENT;
use pitcrew_core::policy::Source;
use serde_json::Value;

use crate::connect::{Connection, Session};

/// A node or rollout that is written more often than this between look and write is not ours to fight for.
const LOOKS_MAX: usize = 5;

/// How often nodes are looked at that are to be given back.
const RELEASE_LOOK: std::time::Duration = std::time::Duration::from_secs(2);

/// What every command that writes takes.
#[derive(clap::Args)]
pub(crate) struct Common {
    #[command(flatten)]
    connection: Connection,
    /// Ask the cluster whether it would work, and change nothing
    #[arg(long)]
    dry_run: bool,
}

/// What `pitcrew pause` and `pitcrew resume` take.
#[derive(clap::Args)]
pub(crate) struct SwitchArgs {
    /// The policy, as NAME or kind/NAME; not needed if there is only one
    #[arg(value_name = "POLICY")]
    policy: Option<String>,
    #[command(flatten)]
    common: Common,
}

/// What `pitcrew skip` takes.
#[derive(clap::Args)]
pub(crate) struct SkipArgs {
    /// The nodes
    #[arg(value_name = "NODE", required = true)]
    nodes: Vec<String>,
    /// Let them take part again
    #[arg(long)]
    undo: bool,
    /// Only this driver [default: every driver that is looked after on the node]
    #[arg(long, value_name = "NAME")]
    driver: Option<String>,
    #[command(flatten)]
    common: Common,
}

/// What `pitcrew retry` takes.
#[derive(clap::Args)]
pub(crate) struct RetryArgs {
    /// The nodes; each must have failed
    #[arg(value_name = "NODE", required = true)]
    nodes: Vec<String>,
    /// Only this driver [default: every driver that failed on the node]
    #[arg(long, value_name = "NAME")]
    driver: Option<String>,
    #[command(flatten)]
    common: Common,
}

/// What `pitcrew abort` takes.
#[derive(clap::Args)]
pub(crate) struct AbortArgs {
    /// The rollout; not needed if only one is under way
    #[arg(value_name = "ROLLOUT")]
    rollout: Option<String>,
    /// Take an abort back: the rollout goes on
    #[arg(long)]
    undo: bool,
    #[command(flatten)]
    common: Common,
}

/// What `pitcrew promote` takes.
#[derive(clap::Args)]
pub(crate) struct PromoteArgs {
    /// The rollout; not needed if only one has stages
    #[arg(value_name = "ROLLOUT")]
    rollout: Option<String>,
    /// The stage that has done enough [default: the one that is open]
    #[arg(long, value_name = "NAME")]
    stage: Option<String>,
    /// Do not wait for the rest of its bake, or promote it in spite of what was seen in it
    #[arg(long)]
    skip_bake: bool,
    /// In whose name
    #[arg(long, value_name = "NAME", env = "USER", default_value = "somebody")]
    by: String,
    #[command(flatten)]
    common: Common,
}

/// What `pitcrew rollback` and `pitcrew clear` take.
#[derive(clap::Args)]
pub(crate) struct VersionArgs {
    /// The rollout; not needed if only one can be meant
    #[arg(value_name = "ROLLOUT")]
    rollout: Option<String>,
    /// Why, for those who read it later
    #[arg(long, value_name = "TEXT")]
    why: Option<String>,
    /// In whose name
    #[arg(long, value_name = "NAME", env = "USER", default_value = "somebody")]
    by: String,
    #[command(flatten)]
    common: Common,
}

impl VersionArgs {
    fn wish(&self) -> rollback::Wish<'_> {
        rollback::Wish { rollout: self.rollout.as_deref(), by: &self.by, why: self.why.as_deref() }
    }
}

/// What `pitcrew health-hold` takes.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct HealthHoldArgs {
    #[command(subcommand)]
    action: Option<HealthHoldAction>,
    #[command(flatten)]
    hold: Option<HoldArgs>,
}

#[derive(clap::Subcommand)]
enum HealthHoldAction {
    /// Give nodes back as soon as they are well
    Release(ReleaseArgs),
}

#[derive(clap::Args)]
struct HoldArgs {
    #[command(flatten)]
    target: health_hold::Target,
    /// How long at most: after that the controller gives the nodes back by itself
    #[arg(long = "for", value_name = "DURATION", default_value = "2h")]
    lasts: jiff::SignedDuration,
    /// In whose name
    #[arg(long, value_name = "NAME", env = "USER", default_value = "somebody")]
    owner: String,
    #[command(flatten)]
    common: Common,
}

#[derive(clap::Args)]
struct ReleaseArgs {
    #[command(flatten)]
    target: health_hold::Target,
    /// How long to wait for nodes that are not well yet
    #[arg(long, value_name = "DURATION", default_value = "10m")]
    timeout: jiff::SignedDuration,
    #[command(flatten)]
    common: Common,
}

/// Keeps NVSentinel off nodes, or gives them back.
pub(crate) fn health_hold(args: &HealthHoldArgs) -> anyhow::Result<ExitCode> {
    match (&args.action, &args.hold) {
        (Some(HealthHoldAction::Release(args)), _) => {
            Session::run(&args.common.connection, async |session| {
                release(&session, args, &mut std::io::stdout()).await
            })
        }
        (None, Some(args)) => {
            run(&args.common, |look| health_hold::hold(look, &args.target, &args.owner, args.lasts))
        }
        (None, None) => bail!("name the nodes: --node NODE, --selector SELECTOR or --all"),
    }
}

/// Gives each node back when it is well, until all are or the time is over.
async fn release(session: &Session, args: &ReleaseArgs, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let deadline = session.clock.now().checked_add(args.timeout)?;
    let mut told = Vec::new();
    loop {
        let target = &args.target;
        let decide = |look: &Look| Ok(health_hold::release(look, target)?.steps);
        carry_out(session, args.common.dry_run, decide, out).await?;
        let waiting = health_hold::release(&session.look().await?, target)?.waiting;
        if waiting.is_empty() || args.common.dry_run {
            return Ok(ExitCode::SUCCESS);
        }
        if session.clock.now() >= deadline {
            bail!("not given back, because not well: {}", waiting.join("; "));
        }
        if waiting != told {
            writeln!(out, "waits for {}", waiting.join("; "))?;
            told = waiting;
        }
        tokio::time::sleep(RELEASE_LOOK).await;
    }
}

/// Stops everything where it is.
pub(crate) fn pause(args: &SwitchArgs) -> anyhow::Result<ExitCode> {
    run(&args.common, |look| switch::decide(look, args.policy.as_deref(), false))
}

/// Goes on from there.
pub(crate) fn resume(args: &SwitchArgs) -> anyhow::Result<ExitCode> {
    run(&args.common, |look| switch::decide(look, args.policy.as_deref(), true))
}

/// Leaves nodes out, or lets them take part again.
pub(crate) fn skip(args: &SkipArgs) -> anyhow::Result<ExitCode> {
    run(&args.common, |look| nodes::skip(look, &args.nodes, args.driver.as_deref(), args.undo))
}

/// Starts failed nodes again.
pub(crate) fn retry(args: &RetryArgs) -> anyhow::Result<ExitCode> {
    run(&args.common, |look| nodes::retry(look, &args.nodes, args.driver.as_deref()))
}

/// Ends a rollout, or lets it go on.
pub(crate) fn abort(args: &AbortArgs) -> anyhow::Result<ExitCode> {
    run(&args.common, |look| abort::decide(look, args.rollout.as_deref(), args.undo))
}

/// Lets the next stage begin.
pub(crate) fn promote(args: &PromoteArgs) -> anyhow::Result<ExitCode> {
    let PromoteArgs { rollout, stage, skip_bake, by, common } = args;
    let wish =
        promote::Wish { rollout: rollout.as_deref(), stage: stage.as_deref(), by, skip_bake: *skip_bake };
    run(common, |look| promote::decide(look, &wish, look.snapshot.now))
}

/// Takes a version back.
pub(crate) fn rollback(args: &VersionArgs) -> anyhow::Result<ExitCode> {
    run(&args.common, |look| rollback::take_back(look, &args.wish(), look.snapshot.now))
}

/// Lets a version that went wrong be tried again.
pub(crate) fn clear(args: &VersionArgs) -> anyhow::Result<ExitCode> {
    run(&args.common, |look| rollback::clear(look, &args.wish(), look.snapshot.now))
}

/// One object and what is to become of it.
#[derive(Clone, Debug, PartialEq)]
struct Step {
    object: Object,
    /// The merge patch; `None` if the object is so already.
    patch: Option<Value>,
    /// What is said when it is done.
    says: String,
}

/// What can be steered.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Object {
    Node(String),
    Policy(Source),
    Rollout(String),
}

impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Object::Node(name) => write!(f, "node/{name}"),
            Object::Policy(source) => source.fmt(f),
            Object::Rollout(name) => write!(f, "rollout/{name}"),
        }
    }
}

fn run(common: &Common, decide: impl Fn(&Look) -> anyhow::Result<Vec<Step>>) -> anyhow::Result<ExitCode> {
    let out = &mut std::io::stdout();
    Session::run(&common.connection, async |session| carry_out(&session, common.dry_run, decide, out).await)
}

/// Looks, decides, writes; after a conflict, again. One line for each object.
async fn carry_out(
    session: &Session,
    dry_run: bool,
    decide: impl Fn(&Look) -> anyhow::Result<Vec<Step>>,
    out: &mut impl Write,
) -> anyhow::Result<ExitCode> {
    let mut handled: BTreeSet<Object> = BTreeSet::new();
    for _ in 0..LOOKS_MAX {
        let mut conflict = false;
        for step in decide(&session.look().await?)? {
            if handled.contains(&step.object) {
                continue;
            }
            match send(session, dry_run, &step).await? {
                Sent::Done => {
                    let note =
                        if dry_run && step.patch.is_some() { "(dry run, nothing was changed) " } else { "" };
                    writeln!(out, "{note}{}", step.says)?;
                    handled.insert(step.object);
                }
                Sent::Conflict => conflict = true,
            }
        }
        if !conflict {
            return Ok(ExitCode::SUCCESS);
        }
    }
    bail!("somebody else writes to it all the time; try again")
}

enum Sent {
    Done,
    /// Somebody wrote to the object after we had looked.
    Conflict,
}

async fn send(session: &Session, dry_run: bool, step: &Step) -> anyhow::Result<Sent> {
    let Some(patch) = &step.patch else { return Ok(Sent::Done) };
    let params = PatchParams { dry_run, field_manager: Some(COMPONENT.to_owned()), ..PatchParams::default() };
    let (client, patch) = (session.client.clone(), Patch::Merge(patch));
    let sent = match &step.object {
        Object::Node(name) => Api::<Node>::all(client).patch(name, &params, &patch).await.map(drop),
        Object::Rollout(name) => Api::<Rollout>::all(client).patch(name, &params, &patch).await.map(drop),
        Object::Policy(Source::DriverPolicy(name)) => {
            Api::<DriverPolicy>::all(client).patch(name, &params, &patch).await.map(drop)
        }
        Object::Policy(Source::ClusterPolicy(name)) => {
            Api::<ClusterPolicy>::all(client).patch(name, &params, &patch).await.map(drop)
        }
        Object::Policy(Source::NvidiaDriver(name)) => {
            Api::<NVIDIADriver>::all(client).patch(name, &params, &patch).await.map(drop)
        }
        Object::Policy(Source::NicClusterPolicy(name)) => {
            Api::<NicClusterPolicy>::all(client).patch(name, &params, &patch).await.map(drop)
        }
    };
    match sent {
        Ok(()) => Ok(Sent::Done),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(Sent::Conflict),
        Err(error) => Err(anyhow!("cannot patch {}: {}", step.object, sentence(&error))),
    }
}
