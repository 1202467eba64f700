//! What happens next, and whether it happens by itself.

use jiff::Timestamp;

use super::about::About;
use super::{Kind, Reason, Remedy};
use crate::api::{OnBlocked, TimeoutAction};
use crate::contract::State;
use crate::policy::{Policy, Removal};
use crate::snapshot::Node;
use crate::visit::Cause;

/// Whether a node goes on by itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Motion {
    /// There is nowhere to go.
    Done,
    /// It goes on, or waits for its turn.
    ByItself,
    /// Something outside holds it up; it goes on as soon as that is gone.
    HeldUp,
    /// Only a person moves it.
    NeedsAPerson,
}

/// What happens next.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Next {
    /// When, if it is a matter of time.
    pub at: Option<Timestamp>,
    /// What, in a sentence without its first capital.
    pub what: String,
}

impl Reason {
    /// Whether a node with this reason goes on by itself.
    pub fn motion(&self) -> Motion {
        match self {
            Reason::DriverNotReady { .. }
            | Reason::NodeNotReady { .. }
            | Reason::NeedsReboot { .. }
            | Reason::Quarantined { .. }
            | Reason::BreakerTripped
            | Reason::BudgetBlocks { .. }
            | Reason::BudgetNever { .. }
            | Reason::PodStuck { .. }
            | Reason::CannotBeEmptied { .. }
            | Reason::NotInMatrix { .. }
            | Reason::PoolFrozen { .. } => Motion::HeldUp,
            Reason::AtomWaits { why, .. } => match why.motion() {
                Motion::Done => Motion::ByItself,
                motion => motion,
            },
            reason => match reason.kind() {
                Kind::Done => Motion::Done,
                Kind::Moving | Kind::Waiting => Motion::ByItself,
                Kind::Paused | Kind::Blocked | Kind::Failed => Motion::NeedsAPerson,
            },
        }
    }
}

/// What happens next to a node; nothing, if it is done.
pub fn next(about: &About<'_>) -> Option<Next> {
    let what = match about.reason() {
        Reason::UpToDate => return None,
        Reason::SameVersion { .. } => "the next rollout brings it the newest template too".to_owned(),
        Reason::DriverNotReady { .. } => {
            "the node counts as done again when the pod is ready; it is not restarted by itself".to_owned()
        }
        Reason::Moving { to } => format!("the controller moves it on to {to}"),
        Reason::Writing => "the controller goes on when its write is answered".to_owned(),
        Reason::RevisionPending { .. } => "goes on when its controller has taken the template up".to_owned(),
        Reason::NoDriverPod { until: None, .. } => "goes on when the pod is there".to_owned(),
        Reason::NoSlot { ahead: 0, together: 2.., .. } => {
            "all of them start when there are slots for all".to_owned()
        }
        Reason::NoSlot { ahead: 0, .. } => "starts with the next free slot".to_owned(),
        Reason::NoSlot { ahead, .. } => {
            format!("starts when a slot is free and the {ahead} before it have started")
        }
        Reason::WindowClosed { opens: Some(_), .. } => {
            "starts when the window opens and it has a slot".to_owned()
        }
        Reason::WindowClosed { opens: None, .. } => {
            "nothing until a window is longer, or another date is free".to_owned()
        }
        Reason::AtomWaits { node, .. } => {
            format!("all of them start when {node} can, or when it is left out")
        }
        Reason::AtomTooLarge { narrow, nodes, .. } => {
            format!("all of them start when {narrow} is {nodes} or more")
        }
        Reason::SpreadFull { .. } => "starts when enough of them are back in service".to_owned(),
        Reason::Skipped { .. } => "nothing, as long as the label is there".to_owned(),
        Reason::OtherDriver { driver } => format!("starts when driver {driver} is done on this node"),
        Reason::NodeNotReady { until: None } => "starts when the node is Ready and has a slot".to_owned(),
        Reason::NeedsReboot { until, .. } => rebooted(about, *until),
        Reason::Quarantined { .. } => "starts when the health system has released it".to_owned(),
        Reason::BreakerTripped => {
            "starts when the breaker is closed again; pitcrew never closes it".to_owned()
        }
        Reason::WaitingForJobs { until: None, .. } => {
            "waits as long as they take (waitForCompletion.timeoutSeconds is 0)".to_owned()
        }
        Reason::WaitingForJobs { until: Some(_), .. } => {
            "goes on whether they have completed or not".to_owned()
        }
        Reason::Checkpointing { .. } => "evicts them, whether they have answered or not".to_owned(),
        // Before the cordon there is no deadline, and nothing happens to the node.
        Reason::BudgetBlocks { until: None, .. } if about.verdict.state == State::UpgradeRequired => {
            "starts when the budget allows it; it was given back once because of it".to_owned()
        }
        Reason::BudgetNever { .. } => "starts when the workload is scaled or the budget changed".to_owned(),
        Reason::StageClosed { before, .. } => format!("starts when stage {before} has passed"),
        Reason::StageFailed { .. } => {
            "stays as it is, with its old driver, until a person or a rollback decides".to_owned()
        }
        Reason::Condemned { .. } => {
            "stays as it is until another version is set, or a person clears this one".to_owned()
        }
        Reason::LeftAlone { .. } => {
            "goes on by its stage, in a rollout of its own, when all others are back or skipped".to_owned()
        }
        Reason::NotInMatrix { .. } => {
            "starts when the matrix lists this version, or another version is set".to_owned()
        }
        Reason::TooManyFailed { .. } => {
            "starts when failed nodes are mended or retried, and done, or the limit is raised".to_owned()
        }
        Reason::Aborted { .. } => "nothing until the abort is taken back, or a new version comes".to_owned(),
        Reason::PodsLeaving { until, .. }
        | Reason::PodStuck { until, .. }
        | Reason::BudgetBlocks { until, .. } => blocked(about).unwrap_or_else(|| removal(about, *until)),
        Reason::CannotBeEmptied { .. } => {
            "starts when that pod has gone, or the policy allows to evict it".to_owned()
        }
        Reason::Validating { until: None, .. } => {
            "goes on when it has left the device; nobody evicts it, and nothing limits that time".to_owned()
        }
        Reason::NoDriverPod { until: Some(_), .. }
        | Reason::NodeNotReady { until: Some(_) }
        | Reason::DriverStopping { .. }
        | Reason::DriverStarting { .. }
        | Reason::ClientsComeBack { .. }
        | Reason::Validating { .. } => failed(),
        Reason::ClientsStale { remedy: Remedy::ItSelf, .. } => {
            "it is deleted and comes back with the driver that runs now (clients.refresh: Always)".to_owned()
        }
        Reason::ClientsStale { .. } => {
            "nothing by itself; what asks this client for the device may fail until it is replaced".to_owned()
        }
        Reason::Paused => "goes on from here when it is resumed; no deadline runs until then".to_owned(),
        Reason::Failed { cause } => cared_for(about, cause),
        Reason::FailedWithoutRecord => "stays as it is until it is retried".to_owned(),
        Reason::PoolFrozen { .. } => "goes on by itself when that is mended".to_owned(),
        Reason::TwoPolicies { .. } => "goes on when only one policy claims it".to_owned(),
        Reason::UnknownLabel { .. } | Reason::LabelChanged { .. } => {
            "nothing until the label is mended".to_owned()
        }
        Reason::VisitUnreadable { .. } => "nothing until the record can be read or is removed".to_owned(),
        Reason::ApiError { .. } => "it is tried again".to_owned(),
        Reason::Conflict => "it is looked at again when its newer version arrives".to_owned(),
    };
    Some(Next { at: about.reason().until(), what })
}

/// A node whose driver only a reboot brings back.
fn rebooted(about: &About<'_>, until: Option<Timestamp>) -> String {
    let node = about.snapshot.nodes.get(about.node);
    // Nobody knows in which boot plain words were written.
    let plain = node.and_then(Node::needs_reboot).is_some_and(|record| record.boot.is_empty());
    match until {
        None if plain => "goes on when somebody removes its annotation pitcrew.dev/needs-reboot",
        Some(_) if plain => {
            "if nobody has removed its annotation pitcrew.dev/needs-reboot by then, the node fails (upgrade-failed)"
        }
        None => "goes on when it was rebooted, or whatever holds the driver has ended; until then it is not given back",
        Some(_) => {
            "if neither a reboot nor the end of what holds the driver has helped by then, the node fails \
             (upgrade-failed); it goes on when one of them has"
        }
    }
    .to_owned()
}

/// A failed node waits for somebody.
fn cared_for(about: &About<'_>, cause: &Cause) -> String {
    let held = about.snapshot.nodes.get(about.node).is_some_and(|node| node.health_hold.is_some());
    let kept = if held { ", and kept from NVSentinel," } else { "" };
    let rebooted = matches!(cause, Cause::NeedsReboot { .. });
    let rebooted = if rebooted { "it was rebooted and its driver is ready, " } else { "" };
    format!(
        "stays cordoned{kept} until {rebooted}it is retried, its driver pod is replaced, or a new version comes"
    )
}

fn failed() -> String {
    "if nothing has changed by then, the node fails (upgrade-failed) and stays cordoned".to_owned()
}

/// What the policy says about a node whose pods cannot leave, if that comes first.
fn blocked(about: &About<'_>) -> Option<String> {
    let limits = &about.policy()?.limits;
    let after = limits.blocked_after.as_secs() / 60;
    let sooner =
        removal_of(about.policy()?, about.verdict.state).timeout.is_none_or(|t| t > limits.blocked_after);
    let cannot = !matches!(about.reason(), Reason::PodsLeaving { .. });
    (sooner && cannot).then_some(())?;
    match limits.on_blocked {
        OnBlocked::Wait => None,
        OnBlocked::Release => Some(format!(
            "after {after} min of this the node is given back with its old driver (onBlocked: Release)"
        )),
        OnBlocked::Fail => Some(format!("after {after} min of this the node fails (onBlocked: Fail)")),
    }
}

/// What happens to pods that do not leave in time.
fn removal(about: &About<'_>, until: Option<Timestamp>) -> String {
    if until.is_none() {
        return "goes on when they have left; nothing limits that time (timeoutSeconds is 0)".to_owned();
    }
    let Some(policy) = about.policy() else { return failed() };
    let state = about.verdict.state;
    match (removal_of(policy, state).timeout_action, &policy.drain) {
        (TimeoutAction::Delete, _) => {
            "what has not left by then is deleted past its budgets (timeoutAction: Delete)".to_owned()
        }
        (TimeoutAction::Fail, Some(_)) if state == State::PodDeletionRequired => {
            "if they have not left by then, the node goes on to drain-required".to_owned()
        }
        (TimeoutAction::Fail, _) => failed(),
    }
}

/// How pods are taken off in a state.
pub(super) fn removal_of(policy: &Policy, state: State) -> Removal {
    match &policy.drain {
        Some(drain) if state == State::DrainRequired => drain.removal,
        _ => policy.removal,
    }
}
