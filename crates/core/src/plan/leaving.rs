//! The states in which work leaves the node: waiting for jobs, taking device users off, draining.

use jiff::{SignedDuration, Timestamp};
use kube::core::{Selector, SelectorExt};

use super::cordon::{GivenBack, give_back};
use super::members::Member;
use super::patch::go;
use super::pool::View;
use super::removal::{self, BudgetBook, Progress, Span};
use super::walk::{Decision, deadline, fail, ran_out};
use crate::action::Action;
use crate::api::OnBlocked;
use crate::contract::State;
use crate::gate::is_gate_pod;
use crate::policy::{Drain, Removal};
use crate::reason::Reason;
use crate::snapshot::Pod;
use crate::visit::{Cause, Finding, Visit, Walk};

/// A pod may have been on its way to the node when it was cordoned. Who comes later ignores the cordon.
const NEWCOMERS: SignedDuration = SignedDuration::from_secs(30);

/// `wait-for-jobs-required`: selected pods may complete first.
pub(super) fn wait_for_jobs(view: &View<'_>, member: &Member<'_>, walk: &Walk) -> Decision {
    let View { snapshot, policy, .. } = view;
    // Without a device that pods ask for there is nobody to evict one by one: draining is the way.
    let next = match (policy.devices.is_empty(), &policy.drain) {
        (false, _) => State::PodDeletionRequired,
        (true, Some(_)) => State::DrainRequired,
        (true, None) => State::PodRestartRequired,
    };
    let on = || {
        let further = || go(view, member, next, Some(walk.enter(next, snapshot.now)));
        checkpoint(view, member, walk).unwrap_or_else(further)
    };
    let Some(selector) = &policy.wait.selector else { return on() };
    let running: Vec<_> = member
        .pods()
        .filter(|pod| !pod.is_finished() && selector.matches(&pod.labels))
        .map(|pod| pod.name.clone())
        .collect();
    let until = policy.wait.timeout.map(|timeout| deadline(view, walk, timeout));
    match (running.is_empty(), until) {
        (true, _) => on(),
        (false, Some(until)) if ran_out(view, until) => on(),
        (false, until) => Decision::stay(Reason::WaitingForJobs { pods: running, until }),
    }
}

/// Asks pods to save their work, and waits until they have or their time is over. The time is written on each pod, so
/// whoever leads next goes on with it.
fn checkpoint(view: &View<'_>, member: &Member<'_>, walk: &Walk) -> Option<Decision> {
    let checkpoint = view.policy.checkpoint.as_ref()?;
    let now = view.snapshot.now;
    let until = now.saturating_add(checkpoint.timeout).unwrap_or(Timestamp::MAX);
    let concerned = |pod: &&Pod| match &view.policy.drain {
        Some(drain) if view.policy.devices.is_empty() => is_drained(drain, pod),
        _ => view.uses_device(pod),
    };
    let selected = member.pods().filter(concerned).filter(|pod| {
        pod.deleting.is_none() && !pod.is_finished() && checkpoint.selector.matches(&pod.labels)
    });
    let (mut waiting, mut actions, mut last) = (Vec::new(), Vec::new(), None);
    for pod in selected {
        // A request from an earlier visit, and the answer to it, are about an older state of the work.
        let asked = pod.checkpoint_requested.filter(|until| *until >= walk.since);
        let until = match asked {
            Some(_) if pod.checkpointed => continue,
            Some(until) if until <= now => continue,
            Some(until) => until,
            None => {
                if removal::may_be_asked(view.snapshot, pod) {
                    actions.push(Action::AskCheckpoint(removal::pod_ref(pod), until));
                }
                until
            }
        };
        last = last.max(Some(until));
        waiting.push(pod.name.clone());
    }
    let reason = Reason::Checkpointing { pods: waiting, until: last? };
    Some(Decision { actions, ..Decision::stay(reason) })
}

/// `pod-deletion-required`: pods that use the device leave.
pub(super) fn take_pods_off(
    view: &View<'_>,
    member: &Member<'_>,
    (visit, walk): (&Visit, &Walk),
    budgets: &mut BudgetBook<'_>,
) -> Decision {
    let users: Vec<&Pod> = view.users(member).collect();
    let fallback = view.policy.drain.as_ref().map(|_| State::DrainRequired);
    let job = Job { pods: &users, removal: view.policy.removal, fallback };
    remove(view, member, (visit, walk), &job, budgets)
}

/// `drain-required`: all pods leave but those of DaemonSets and those that the policy leaves out.
pub(super) fn drain(
    view: &View<'_>,
    member: &Member<'_>,
    (visit, walk): (&Visit, &Walk),
    budgets: &mut BudgetBook<'_>,
) -> Decision {
    let Some(drain) = &view.policy.drain else {
        // The policy changed its mind: what is left of the users is for the state before.
        let next = State::PodDeletionRequired;
        return go(view, member, next, Some(walk.enter(next, view.snapshot.now)));
    };
    // Without this look the node would go round: drained, not free for the restart, back to the eviction, drained, …
    if let Some(found) = left_behind(view, member, drain) {
        return fail(view, member, walk, Cause::PodsCannotLeave { found });
    }
    let pods: Vec<&Pod> = drained(member, drain).collect();
    remove(view, member, (visit, walk), &Job { pods: &pods, removal: drain.removal, fallback: None }, budgets)
}

/// What a drain could not take off either.
pub(super) fn undrainable(view: &View<'_>, member: &Member<'_>, drain: &Drain) -> Option<Finding> {
    left_behind(view, member, drain).or_else(|| removal::undeletable(drained(member, drain), drain.removal))
}

/// The pods that a drain takes off.
pub(super) fn drained<'a>(member: &Member<'a>, drain: &'a Drain) -> impl Iterator<Item = &'a Pod> {
    member.pods().filter(|pod| is_drained(drain, pod))
}

fn is_drained(drain: &Drain, pod: &Pod) -> bool {
    leaves_in_drain(&drain.selector, pod)
}

/// Whether a drain with this selector takes a pod off.
pub fn leaves_in_drain(selector: &Selector, pod: &Pod) -> bool {
    let stays = pod.is_daemon() || pod.mirror || pod.is_finished() || is_gate_pod(&pod.labels);
    !stays && selector.matches(&pod.labels)
}

/// A pod that uses the device and that a drain does not touch: the driver could never restart.
fn left_behind(view: &View<'_>, member: &Member<'_>, drain: &Drain) -> Option<Finding> {
    let left = view.users(member).find(|pod| pod.deleting.is_none() && !is_drained(drain, pod))?;
    let what = format!("pod {} uses the device and is left out of the drain", left.name);
    Some(Finding::about(&left.name, what))
}

/// Pods that have to leave, and how.
struct Job<'a> {
    pods: &'a [&'a Pod],
    removal: Removal,
    /// Where the node goes if they do not; without it, it fails.
    fallback: Option<State>,
}

fn remove(
    view: &View<'_>,
    member: &Member<'_>,
    (visit, walk): (&Visit, &Walk),
    job: &Job<'_>,
    budgets: &mut BudgetBook<'_>,
) -> Decision {
    let now = view.snapshot.now;
    let give_up = |cause: Cause| match job.fallback {
        Some(state) => go(view, member, state, Some(walk.enter(state, now))),
        None => fail(view, member, walk, cause),
    };
    let Job { pods, removal, .. } = job;
    if let Some(found) = keeps_coming(view, walk, pods) {
        return fail(view, member, walk, Cause::PodsCannotLeave { found });
    }
    let until = removal.timeout.map(|timeout| deadline(view, walk, timeout));
    let span = Span { since: walk.since, until, ran_out: until.is_some_and(|until| ran_out(view, until)) };
    match removal::progress(view.snapshot, member.node.ready, pods, *removal, span, budgets) {
        Progress::Gone => {
            let next = State::PodRestartRequired;
            go(view, member, next, Some(walk.enter(next, now)))
        }
        Progress::Cannot { found } => give_up(Cause::PodsCannotLeave { found }),
        Progress::TimedOut { found } => {
            give_up(Cause::PodsDidNotLeave { found, seconds: removal.timeout.map_or(0, |t| t.as_secs()) })
        }
        Progress::Leaving { reason, actions, retry_at } => {
            blocked_for_long(view, member, (visit, walk), &reason).unwrap_or_else(|patience| {
                // A deadline that has passed must not hide the time at which something is tried again.
                let times = [reason.until(), retry_at, patience].into_iter().flatten();
                let wake_at = times.filter(|at| *at > now).min();
                Decision { reason, actions, wake_at }
            })
        }
    }
}

/// A pod that was put on the node long after evictions began: others will follow it, however many are evicted.
fn keeps_coming(view: &View<'_>, walk: &Walk, pods: &[&Pod]) -> Option<Finding> {
    let cordoned = walk.recordoned.unwrap_or(Timestamp::MIN);
    let expected =
        deadline(view, walk, NEWCOMERS).max(cordoned.saturating_add(NEWCOMERS).unwrap_or(cordoned));
    // A drain does not chase pods that have nothing to do with the device, unless nobody knows who has.
    let concerned = |pod: &Pod| view.policy.devices.is_empty() || view.uses_device(pod);
    // What a DaemonSet puts back has its own sentence.
    let newcomer = |pod: &&&Pod| pod.deleting.is_none() && !pod.is_daemon() && pod.created > expected;
    let newcomer = pods.iter().filter(newcomer).find(|pod| concerned(pod))?;
    let what = format!(
        "pod {} was put on the node while it was being emptied; whatever places it there ignores the cordon",
        newcomer.name
    );
    Some(Finding::about(&newcomer.name, what))
}

/// What the policy says about a node whose pods cannot leave; else when that will be asked again.
fn blocked_for_long(
    view: &View<'_>,
    member: &Member<'_>,
    (visit, walk): (&Visit, &Walk),
    reason: &Reason,
) -> Result<Decision, Option<Timestamp>> {
    let limits = &view.policy.limits;
    let blocked = matches!(reason, Reason::BudgetBlocks { .. } | Reason::PodStuck { .. });
    let waits = match limits.on_blocked {
        OnBlocked::Wait => true,
        // A node whose driver is broken is of no use to anybody: it stays out.
        OnBlocked::Release => !member.has_its_old_driver(),
        OnBlocked::Fail => false,
    };
    if !blocked || waits {
        return Err(None);
    }
    let until = deadline(view, walk, limits.blocked_after);
    if !ran_out(view, until) {
        return Err(Some(until));
    }
    let seconds = limits.blocked_after.as_secs();
    Ok(match limits.on_blocked {
        OnBlocked::Fail => {
            let found = Finding { about: reason.pod().cloned(), ..Finding::plain(reason.to_string()) };
            fail(view, member, walk, Cause::PodsDidNotLeave { found, seconds })
        }
        _ => give_back(view, member, &visit.holds, &GivenBack::Blocked(reason)),
    })
}
