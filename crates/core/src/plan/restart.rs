//! `pod-restart-required`: the old driver pod goes, the new one comes up, within `limits.driverReady`.

use jiff::{SignedDuration, Timestamp};

use super::members::{Freshness, Member, Standing};
use super::patch::{base_patch, go, record_patch, rewrite, warning};
use super::pool::View;
use super::removal::pod_ref;
use super::walk::{self, Decision, deadline, fail, ran_out};
use super::{gates, reboot};
use crate::action::{Action, Changes, NodePatch, RestartDriver, Users};
use crate::contract::State;
use crate::reason::Reason;
use crate::snapshot::{Object, Phase, Pod, Trouble};
use crate::visit::{Cause, Finding, Walk};

/// The old pod is deleted as soon as a node is at its restart. If that took longer, the time for the new one begins anew.
const DELAY_MAX: SignedDuration = SignedDuration::from_mins(2);
/// Work that came back so often will come back again.
const CAME_BACK_MAX: u32 = 3;

pub(super) fn step(view: &View<'_>, member: &Member<'_>, walk: &Walk) -> Decision {
    let until = deadline(view, walk, view.policy.limits.driver_ready);
    let failed = |found: Finding| not_ready(view, member, walk, found);
    let Some(pod) = member.pod else {
        // A label that was lost for a moment takes the DaemonSet along, and brings it back.
        let daemon_set = member.daemon_set.map(|ds| ds.name.clone());
        return if ran_out(view, until) {
            failed(Finding::plain("no DaemonSet made a driver pod for this node"))
        } else {
            Decision::stay(Reason::NoDriverPod { daemon_set, until: Some(until) })
        };
    };
    if pod.deleting.is_some() {
        if ran_out(view, until) {
            return failed(Finding::about(&pod.name, format!("the old pod {} does not stop", pod.name)));
        }
        return Decision::stay(Reason::DriverStopping { pod: pod.name.clone(), until });
    }
    let sync = member.sync;
    // A failed attempt's pod is replaced even if its revision is right: that is what a retry is for.
    let retried = walk.replace.as_ref() == Some(&pod.uid);
    if sync == Freshness::InSync && member.driver_ready && !retried && !member.waits_for_load {
        let next = State::ValidationRequired;
        let target = walk::target_of(member, walk).clone();
        return go(view, member, next, Some(Walk { target, ..walk.enter(next, view.snapshot.now) }));
    }
    let starting = Reason::DriverStarting { pod: pod.name.clone(), says: says(pod), until };
    if member.waits_for_load && sync == Freshness::InSync && !retried && !ran_out(view, until) {
        return match (view.users(member).next(), gates::at_work(view, member)) {
            (Some(user), _) => empty_again(view, member, walk, user),
            // Its own deadline ends it.
            (None, Some(_)) => Decision::stay(starting),
            (None, None) => Decision::act(starting, release_safe_load(view, member)),
        };
    }
    let left_alone = member.spared().is_some() && !member.driver_ready;
    if matches!(sync, Freshness::Outdated | Freshness::Orphaned) || retried || left_alone {
        return restart(view, member, walk, pod, until);
    }
    if let Some(decision) = reboot::wait(view, member, walk, view.policy.limits.driver_ready) {
        return decision;
    }
    if ran_out(view, until) {
        return failed(Finding::about(&pod.name, format!("pod {}: {}", pod.name, says(pod))));
    }
    tell_of_trouble(view, member, walk, pod, &starting).unwrap_or_else(|| Decision::stay(starting))
}

fn not_ready(view: &View<'_>, member: &Member<'_>, walk: &Walk, mut found: Finding) -> Decision {
    let seconds = view.policy.limits.driver_ready.as_secs();
    if !member.node.ready {
        found.what.push_str("; the node is not Ready");
    }
    fail(view, member, walk, Cause::DriverNotReady { found, seconds })
}

/// A driver pod that will hardly come up by itself is told of at once, in an event: people wait for the deadline else.
fn tell_of_trouble(
    view: &View<'_>,
    member: &Member<'_>,
    walk: &Walk,
    pod: &Pod,
    reason: &Reason,
) -> Option<Decision> {
    let Standing::Visit(visit, _) = member.standing else { return None };
    let told = walk.told.as_ref() == Some(&pod.uid);
    if told || pod.trouble.as_ref().is_none_or(|trouble| !trouble.is_serious()) {
        return None;
    }
    let mut patch = record_patch(view, member, visit, Walk { told: Some(pod.uid.clone()), ..walk.clone() });
    patch.labels = Changes::default();
    let message = format!("Driver pod {} does not come up: {}", pod.name, says(pod));
    patch.event = Some(warning(view, message));
    Some(Decision::act(reason.clone(), Action::PatchNode(patch)))
}

/// Deletes the driver pod, unless something holds the device again or the last attempt has to cool off.
fn restart(view: &View<'_>, member: &Member<'_>, walk: &Walk, pod: &Pod, until: Timestamp) -> Decision {
    let snapshot = view.snapshot;
    let reason = Reason::DriverStopping { pod: pod.name.clone(), until };
    let object = Object::Pod(pod.name.clone());
    if let Some(decision) = keep(view, member, walk, pod, until) {
        return decision;
    }
    let in_place = member.restarts_in_place();
    if let Some(user) = view.users(member).next().filter(|_| !in_place) {
        return empty_again(view, member, walk, user);
    }
    if !member.node.ready {
        // Nobody would stop the old pod or start the new one.
        let still = || Finding::about(&pod.name, format!("the old pod {} is still there", pod.name));
        let wait = Reason::NodeNotReady { until: Some(until) };
        return if ran_out(view, until) {
            not_ready(view, member, walk, still())
        } else {
            Decision::stay(wait)
        };
    }
    if let Some(decision) = after_gates(view, member, walk, pod, until) {
        return decision;
    }
    if snapshot.is_busy(&object) {
        return Decision::stay(reason);
    }
    if let Some(setback) = snapshot.setbacks.get(&object).filter(|setback| setback.retry_at > snapshot.now) {
        if ran_out(view, until) {
            let what = format!("the old pod {} cannot be deleted", pod.name);
            return not_ready(view, member, walk, Finding::about(&pod.name, what));
        }
        return Decision { wake_at: Some(setback.retry_at.min(until)), ..Decision::stay(reason) };
    }
    let waited = ran_out(view, walk.deadline(DELAY_MAX, snapshot.now));
    if let (true, None, Standing::Visit(visit, _)) =
        (waited, snapshot.setbacks.get(&object), &member.standing)
    {
        // The node was not Ready for long, or nobody led: the new driver gets its whole time all the same.
        let again = walk.enter(State::PodRestartRequired, snapshot.now);
        return Decision::act(reason, rewrite(view, member, visit, again));
    }
    let restart = RestartDriver {
        driver: view.policy.driver.clone(),
        pod: pod_ref(pod),
        node_uid: member.node.uid.clone(),
        in_place,
        users: users(view, member),
    };
    Decision::act(reason, Action::RestartDriver(restart))
}

/// The rollout was called off, or leaves it alone, and nobody has told the old driver to go yet: it stays, and the node is given back from where
/// that is still possible. A deletion without an answer may have happened.
fn keep(view: &View<'_>, member: &Member<'_>, walk: &Walk, pod: &Pod, until: Timestamp) -> Option<Decision> {
    let object = Object::Pod(pod.name.clone());
    let told = view.snapshot.is_busy(&object) || view.snapshot.setbacks.contains_key(&object);
    let called_off = view.is_called_off() || member.left_alone;
    if !called_off || member.sync != Freshness::Outdated || told {
        return None;
    }
    if member.has_its_old_driver() {
        // Work would disturb a gate that takes its sample.
        return Some(gate_at_work(view, member, until).unwrap_or_else(|| {
            let back = State::WaitForJobsRequired;
            go(view, member, back, Some(walk.enter(back, view.snapshot.now)))
        }));
    }
    let in_trouble = pod.trouble.as_ref().is_some_and(Trouble::is_serious);
    let comes_up = member.is_untouched() && !pod.ready && !in_trouble && !member.waits_for_load;
    if !member.node.ready || !comes_up {
        return None;
    }
    // After a boot, perhaps: then it is as good as it was.
    Some(if ran_out(view, until) {
        let what = format!("the old pod {}: {}", pod.name, says(pod));
        not_ready(view, member, walk, Finding::about(&pod.name, what))
    } else {
        Decision::stay(Reason::DriverStarting { pod: pod.name.clone(), says: says(pod), until })
    })
}

/// Gates measure what they compare with later; none of them may be at work when the driver goes.
fn after_gates(
    view: &View<'_>,
    member: &Member<'_>,
    walk: &Walk,
    pod: &Pod,
    until: Timestamp,
) -> Option<Decision> {
    let Standing::Visit(visit, _) = member.standing else { return None };
    if let Some(decision) = gates::sample_before(view, member, (visit, walk), pod) {
        return Some(decision);
    }
    gate_at_work(view, member, until)
}

fn gate_at_work(view: &View<'_>, member: &Member<'_>, until: Timestamp) -> Option<Decision> {
    let gate = gates::at_work(view, member)?;
    let found = Finding::about(&gate.name, format!("pod {} of a gate is still at work", gate.name));
    Some(Decision::stay(Reason::Validating { found, until: Some(until) }))
}

/// Something uses the device: what tolerates the cordon came back, or it never had to leave because the driver was
/// restarted in place. It has to leave like the others did, but not for ever.
fn empty_again(view: &View<'_>, member: &Member<'_>, walk: &Walk, user: &Pod) -> Decision {
    if walk.came_back >= CAME_BACK_MAX {
        let what = format!(
            "pod {} is there after pods were evicted {} times; whatever places it there ignores the cordon",
            user.name, walk.came_back
        );
        let found = Finding::about(&user.name, what);
        return fail(view, member, walk, Cause::PodsCannotLeave { found });
    }
    let back = State::WaitForJobsRequired;
    let walk = Walk { came_back: walk.came_back + 1, ..walk.enter(back, view.snapshot.now) };
    go(view, member, back, Some(walk))
}

/// Pods with resource claims that are not claims of the device: the last look sees pods, not claims.
fn users(view: &View<'_>, member: &Member<'_>) -> Users {
    let with_claims = member.pods().filter(|pod| !pod.claims.is_empty());
    let claims = &view.snapshot.claims;
    let harmless = with_claims.filter(|pod| !super::uses_device(&view.policy.devices, pod, claims));
    let harmless = harmless.map(|pod| pod.uid.clone());
    Users { devices: view.policy.devices.clone(), harmless: harmless.collect() }
}

/// The driver pod's init container waits for this annotation to go before it loads the driver.
pub(super) fn release_safe_load(view: &View<'_>, member: &Member<'_>) -> Action {
    let unless_used = Some(Box::new(users(view, member)));
    let annotations = Changes::from((view.policy.keys.safe_load.as_str(), None));
    let nothing = base_patch(view, member, member.state());
    let labels = Changes::default();
    Action::PatchNode(NodePatch { annotations, labels, to: None, event: None, unless_used, ..nothing })
}

/// What a driver pod's containers say, in a few words.
pub(super) fn says(pod: &Pod) -> String {
    match &pod.trouble {
        Some(trouble) if trouble.message.is_empty() => {
            format!("{} {} after {} restarts", trouble.container, trouble.reason, trouble.restarts)
        }
        Some(trouble) => format!("{} {}: {}", trouble.container, trouble.reason, trouble.message),
        None if pod.ready => "ready".to_owned(),
        None if let Some(init) = &pod.initializing => format!("init container {init} is at work"),
        None if pod.phase == Phase::Running => "running, not ready yet".to_owned(),
        None => "containers are being created".to_owned(),
    }
}
