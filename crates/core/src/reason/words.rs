//! The one sentence of each reason: for the status line, the event, the log and the screen.

use std::fmt;

use jiff::{SignedDuration, Timestamp};

use super::{Foreign, Limit, Narrow, Reason};
use crate::api::StagePhase;
use crate::contract::nvsentinel;
use crate::names::{NodeName, ObjectName};
use crate::windows::LOOK_AHEAD_DAYS;

impl fmt::Display for Reason {
    #[expect(clippy::too_many_lines, reason = "one line for each reason")]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::UpToDate => f.write_str("driver up to date and ready"),
            Reason::SameVersion { version } => {
                write!(
                    f,
                    "has {version} already, from an earlier template, and is left alone on the way back"
                )
            }
            Reason::DriverNotReady { pod, says } => write!(f, "driver pod {pod} is not ready: {says}"),
            Reason::Moving { to } => write!(f, "moves on to {to}"),
            Reason::Writing => f.write_str("being written"),
            Reason::RevisionPending { daemon_set } => {
                write!(
                    f,
                    "daemonset/{daemon_set} has a new template that its controller has not taken up yet"
                )
            }
            Reason::NoDriverPod { daemon_set: Some(daemon_set), .. } => {
                write!(f, "no driver pod on this node; daemonset/{daemon_set} should make one")
            }
            Reason::NoDriverPod { daemon_set: None, .. } => f.write_str(
                "no driver pod on this node, and no DaemonSet of this driver is meant for it any more",
            ),
            Reason::NoSlot { limit, ahead, together } => no_slot(f, limit, *ahead, *together),
            Reason::WindowClosed { opens, needs, closes } => {
                f.write_str(&window_closed(*opens, *needs, *closes))
            }
            Reason::AtomWaits { atom, node, why } => {
                write!(f, "nodes with {atom} start together, and {node} does not: {why}")
            }
            Reason::AtomTooLarge { atom, nodes, narrow, limit } => write!(
                f,
                "{nodes} nodes with {atom} start together, and {narrow} allows {limit}: it must be at least {nodes}"
            ),
            Reason::SpreadFull { group, max, out } => {
                let out = who_is(out);
                write!(f, "at most {max} of the nodes with {group} may be out (topology.spread), and {out}")
            }
            Reason::Skipped { label } => write!(f, "left out by label {label}=true"),
            Reason::OtherDriver { driver } => write!(f, "driver {driver} is upgraded on this node first"),
            Reason::NodeNotReady { .. } => f.write_str("node is not Ready, so no driver could start on it"),
            Reason::NeedsReboot { why, .. } => write!(f, "needs a reboot, says its driver manager: {why}"),
            Reason::Quarantined { what } => f.write_str(what),
            Reason::BreakerTripped => write!(
                f,
                "NVSentinel's circuit breaker has tripped (configmap/{}/{}); no more nodes are taken out",
                nvsentinel::NAMESPACE,
                nvsentinel::BREAKER
            ),
            Reason::WaitingForJobs { pods, .. } => write!(f, "waits for {} to complete", list(pods)),
            Reason::Checkpointing { pods, .. } => {
                let whose = if pods.len() == 1 { "its" } else { "their" };
                write!(f, "waits for {} to save {whose} work", list(pods))
            }
            Reason::PodsLeaving { pods, .. } => write!(f, "evicting {}", list(pods)),
            Reason::BudgetBlocks { budget, pod, healthy: (healthy, desired), .. } => write!(
                f,
                "pod {pod} cannot leave: poddisruptionbudget/{budget} wants {desired} healthy pod{} and has {healthy}",
                if *desired == 1 { "" } else { "s" }
            ),
            Reason::BudgetNever { budget, pod, pods: (expected, desired) } => write!(
                f,
                "pod {pod} could never leave: poddisruptionbudget/{budget} wants {desired} of its {} healthy; \
                 scale the workload or change the budget",
                count(*expected, "pod")
            ),
            Reason::PodStuck { pod, why, .. } => write!(f, "pod {pod} is stuck in Terminating: {why}"),
            Reason::TooManyFailed { stage: None, failed, limit } => write!(
                f,
                "{failed} nodes failed and at most {limit} may (limits.failureThreshold); no more are started"
            ),
            Reason::TooManyFailed { stage: Some(stage), failed, limit } => write!(
                f,
                "{failed} nodes of stage {stage} failed and at most {limit} may; no more of it are started"
            ),
            Reason::StageClosed { stage, before, phase, why } => {
                let why = why.as_ref().map(|why| format!("; {why}")).unwrap_or_default();
                write!(f, "stage {stage} is not open yet: stage {before} {}{why}", doing(*phase))
            }
            Reason::StageFailed { stage, why } => {
                write!(f, "stage {stage} has failed, so nothing new starts: {why}")
            }
            Reason::Condemned { rollout, why } => {
                write!(f, "this version went wrong in rollout {rollout} and is not tried again: {why}")
            }
            Reason::LeftAlone { rollout } => {
                write!(f, "left alone by rollout {rollout}, the way back from a version that it never had")
            }
            Reason::NotInMatrix { unlisted } => {
                write!(f, "{unlisted}; nothing starts without that (rollout.matrix.enforce)")
            }
            Reason::Aborted { rollout } => write!(f, "rollout {rollout} was aborted"),
            Reason::CannotBeEmptied { found } => write!(f, "cannot be emptied: {found}"),
            Reason::DriverStopping { pod, .. } => write!(f, "old driver pod {pod} is stopping"),
            Reason::DriverStarting { pod, says, .. } => write!(f, "driver pod {pod} starts: {says}"),
            Reason::ClientsComeBack { found, .. }
            | Reason::ClientsStale { found, .. }
            | Reason::Validating { found, .. } => found.fmt(f),
            Reason::Paused => f.write_str("paused: autoUpgrade is false"),
            Reason::Failed { cause } => cause.fmt(f),
            Reason::FailedWithoutRecord => f.write_str(
                "labelled upgrade-failed with no record of why; label it upgrade-required to try again",
            ),
            Reason::PoolFrozen { why } => f.write_str(why),
            Reason::TwoPolicies { pools } => {
                write!(
                    f,
                    "claimed by more than one policy ({}); make their nodeSelectors disjoint",
                    pools.join(", ")
                )
            }
            Reason::UnknownLabel { label, value } => {
                write!(
                    f,
                    "label {label} has the unknown value \"{value}\"; remove it to have the node looked at again"
                )
            }
            Reason::LabelChanged { label, record } => write!(
                f,
                "somebody set the state label to {label} during a visit that is at {record}; remove the label to go on, or set it to upgrade-required to start again"
            ),
            Reason::VisitUnreadable { why } => {
                write!(f, "the visit record on the node cannot be read: {why}")
            }
            Reason::ApiError { what, .. } => write!(f, "the Kubernetes API refused a write: {what}"),
            Reason::Conflict => f.write_str("changed by somebody else at the same moment; looks again"),
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Limit::MaxParallelUpgrades(limit) => write!(f, "maxParallelUpgrades is {limit}"),
            Limit::Stage { stage, limit, moving: true } => {
                write!(f, "stage {stage} upgrades {limit} at a time")
            }
            Limit::Stage { stage, limit, moving: false } => {
                write!(f, "stage {stage} may have {limit} out at a time")
            }
            Limit::MaxUnavailable { limit, out, foreign: None } => {
                write!(f, "{out} of at most {limit} nodes are out (maxUnavailable)")
            }
            Limit::MaxUnavailable { limit, out, foreign: Some(Foreign { node, by_driver_manager }) } => {
                let who = if *by_driver_manager { "by its driver manager" } else { "not by us" };
                write!(f, "{out} of at most {limit} nodes are out (maxUnavailable), {node} {who}")
            }
        }
    }
}

impl fmt::Display for Narrow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Narrow::MaxParallelUpgrades => "maxParallelUpgrades",
            Narrow::MaxUnavailable => "maxUnavailable",
            Narrow::SpreadMax => "topology.spread.max",
        })
    }
}

fn no_slot(f: &mut fmt::Formatter<'_>, limit: &Limit, ahead: usize, together: usize) -> fmt::Result {
    match (ahead, together) {
        (0, 1) => write!(f, "next slot; {limit}"),
        (0, _) => write!(f, "next {together} slots, for nodes that go together; {limit}"),
        (_, 1) => write!(f, "waits for a slot, {ahead} before it; {limit}"),
        _ => {
            write!(f, "waits for {together} slots, for nodes that go together, {ahead} before it; {limit}")
        }
    }
}

fn window_closed(opens: Option<Timestamp>, needs: SignedDuration, closes: Option<Timestamp>) -> String {
    let needs = about(needs);
    match (opens, closes) {
        (None, _) => format!(
            "no window of the next {LOOK_AHEAD_DAYS} days is long enough for a visit, which takes about {needs}"
        ),
        (_, Some(_)) => format!(
            "the window closes before a visit would end, which takes about {needs}; waits for the next one"
        ),
        _ => "waits for its window".to_owned(),
    }
}

/// A time in whole minutes, of which nobody starts one in vain.
fn about(time: SignedDuration) -> String {
    format!("{} min", (time.as_secs() + 59) / 60)
}

/// Names the first nodes and counts the rest.
fn who_is(nodes: &[NodeName]) -> String {
    match nodes {
        [] => "none is".to_owned(),
        [one] => format!("{one} is"),
        [first, second] => format!("{first} and {second} are"),
        [first, rest @ ..] => format!("{first} and {} more are", rest.len()),
    }
}

/// What a stage is doing that others wait for.
fn doing(phase: StagePhase) -> &'static str {
    match phase {
        StagePhase::Proving => "asks its gates",
        StagePhase::Baking => "is watched at work",
        StagePhase::AwaitingApproval => "waits for a person's word",
        _ => "comes first",
    }
}

fn count(number: i32, what: &str) -> String {
    if number == 1 { format!("1 {what}") } else { format!("{number} {what}s") }
}

/// Names the first pods and counts the rest: sentences stay short on full nodes.
pub(crate) fn list(pods: &[ObjectName]) -> String {
    match pods {
        [] => "no pods".to_owned(),
        [one] => format!("pod {one}"),
        [first, rest @ ..] => format!("{} pods: {first} and {} more", pods.len(), rest.len()),
    }
}
