//! The hand-shake with NVSentinel: a node on a visit is opted out of it, by the write that cordons, and opted in again by
//! the write that ends the visit. A node that it has quarantined is not started, and not given back over its head.

use std::collections::BTreeMap;

use jiff::Timestamp;

use super::members::{Member, Standing};
use super::patch::{base_patch, record_patch, warning};
use super::pool::View;
use super::walk::{Decision, deadline, fail, ran_out};
use crate::action::{Action, Changes, NodePatch};
use crate::api::NvSentinelMode;
use crate::contract::{HEALTH_HOLD_ANNOTATION, LAST_VISIT_ANNOTATION, nvsentinel};
use crate::health::{HealthHold, OPTED_OUT, Owner, Shield, cordoned_by_nvsentinel, quarantine};
use crate::names::DriverName;
use crate::reason::Reason;
use crate::snapshot::{Node, Pod};
use crate::visit::{Cause, DriverPod, Finding, Gates, LastVisit, Visit, Walk};

/// By which label nodes are opted out; `None`: not at all.
fn shield(view: &View<'_>) -> Option<Shield> {
    match view.policy.health.nvsentinel {
        NvSentinelMode::Off => None,
        NvSentinelMode::Auto => view.snapshot.nvsentinel.map(|_| Shield::Quarantine),
        NvSentinelMode::Quarantine => Some(Shield::Quarantine),
        NvSentinelMode::Everything => Some(Shield::Everything),
    }
}

/// Why a node that could start does not, as long as a health system is at it.
pub(super) fn refuses(view: &View<'_>, member: &Member<'_>) -> Option<Reason> {
    shield(view)?;
    // It is in quarantine because it has no driver: refusing would keep it there for good.
    if member.needs_driver() {
        return None;
    }
    let node = member.node;
    if view.snapshot.nvsentinel.is_some_and(|nvsentinel| nvsentinel.tripped) {
        return Some(Reason::BreakerTripped);
    }
    if let Some(what) = quarantine(node) {
        return Some(Reason::Quarantined { what });
    }
    // Somebody else has said that the node is theirs, unless it is a hold of ours.
    let managed = node.labels().get(nvsentinel::MANAGED_LABEL).is_some_and(|value| value == OPTED_OUT);
    let ours = node.health_hold.as_ref().is_some_and(|hold| hold.shield == Shield::Everything);
    let what = || format!("somebody else looks after it (label {}={OPTED_OUT})", nvsentinel::MANAGED_LABEL);
    (managed && !ours).then(|| Reason::Quarantined { what: what() })
}

/// Opts a node out, in the write that takes it. An opt-out that is there already is left as it is.
pub(super) fn hold(view: &View<'_>, node: &Node, patch: &mut NodePatch) {
    let Some(shield) = shield(view) else { return };
    let before = node.labels().get(shield.label());
    if before.is_some_and(|value| value == OPTED_OUT) {
        return;
    }
    let hold = HealthHold {
        owner: Owner::Visit,
        shield,
        before: before.cloned(),
        since: view.snapshot.now,
        until: None,
    };
    patch.labels.set(shield.label(), Some(OPTED_OUT.to_owned()));
    patch.annotations.set(HEALTH_HOLD_ANNOTATION, Some(hold.to_text()));
}

/// Opts a node in again, if it was a visit that opted it out and the label is still as it was left.
pub(super) fn release(node: &Node, patch: &mut NodePatch) {
    if let Some(hold) = node.health_hold.as_ref().filter(|hold| hold.owner == Owner::Visit) {
        lift(node, hold, patch);
    }
}

/// Takes a hold back.
fn lift(node: &Node, hold: &HealthHold, patch: &mut NodePatch) {
    if hold.stands(node) {
        patch.labels.set(hold.shield.label(), hold.before.clone());
    }
    patch.annotations.set(HEALTH_HOLD_ANNOTATION, None);
}

/// Somebody opted the node in during its visit: out again, with a Warning.
pub(super) fn hold_again(
    view: &View<'_>,
    member: &Member<'_>,
    visit: &Visit,
    walk: &Walk,
) -> Option<Decision> {
    let node = member.node;
    let hold = node.health_hold.as_ref().filter(|hold| hold.owner == Owner::Visit && !hold.stands(node))?;
    let label = hold.shield.label();
    let mut patch = record_patch(view, member, visit, walk.clone());
    patch.labels.set(label, Some(OPTED_OUT.to_owned()));
    let message = format!(
        "The node was given back to NVSentinel during its driver upgrade; set {label}={OPTED_OUT} again"
    );
    patch.event = Some(warning(view, message));
    Some(Decision::act(Reason::Writing, Action::PatchNode(patch)))
}

/// What health systems still have against a node that is to be given back.
pub(super) fn objection(view: &View<'_>, member: &Member<'_>, visit: &Visit, walk: &Walk) -> Option<Finding> {
    let node = member.node;
    // A look from before the driver came up, or from before anybody listened again, says nothing.
    let driver = member.pod.and_then(|pod| pod.ready_since.max(pod.started)).unwrap_or(visit.since);
    let listens = view.policy.health.nvsentinel == NvSentinelMode::Everything;
    let since = if listens { walk.since.max(driver) } else { driver };
    if cordoned_by_nvsentinel(node) {
        return Some(Finding::plain("NVSentinel has cordoned the node; that is not ours to lift"));
    }
    // The operator's pods on this node all depend on the driver.
    let operand = |pod: &&Pod| *pod.name.namespace == *view.policy.namespace && pod.is_daemon();
    let broken = |pod: &&Pod| !pod.ready && !pod.is_finished();
    if let Some(pod) = member.pods().filter(operand).find(broken) {
        return Some(Finding::about(&pod.name, format!("pod {} is not ready yet", pod.name)));
    }
    let watched = shield(view).is_some();
    for name in &view.policy.health.conditions {
        // A condition that was never set has nothing to say.
        let Some(condition) = node.conditions.iter().find(|condition| *condition.kind == **name) else {
            continue;
        };
        if condition.holds {
            return Some(Finding::plain(format!("node condition {name} is True")));
        }
        // Both are counted in whole seconds: a look in the second in which the driver was ready is one at that driver.
        if watched && condition.heartbeat.is_none_or(|heartbeat| heartbeat < since) {
            return Some(Finding::plain(format!(
                "node condition {name} has not been looked at since the driver is ready"
            )));
        }
    }
    None
}

/// Waits for them, for as long as validation may take.
pub(super) fn wait(view: &View<'_>, member: &Member<'_>, walk: &Walk, found: Finding) -> Decision {
    let limit = view.policy.limits.validation;
    let until = deadline(view, walk, limit);
    if ran_out(view, until) {
        return fail(view, member, walk, Cause::NotValidated { found, seconds: limit.as_secs() });
    }
    Decision::stay(Reason::Validating { found, until: Some(until) })
}

/// The stronger opt-out silences the conditions, so it is lifted while the node is still cordoned; then they are awaited.
pub(super) fn listen_again(
    view: &View<'_>,
    member: &Member<'_>,
    visit: &Visit,
    walk: &Walk,
) -> Option<Decision> {
    let hold = member.node.health_hold.as_ref()?;
    if hold.owner != Owner::Visit || hold.shield != Shield::Everything {
        return None;
    }
    let mut patch = record_patch(view, member, visit, walk.enter(walk.state, view.snapshot.now));
    lift(member.node, hold, &mut patch);
    Some(Decision::act(Reason::Writing, Action::PatchNode(patch)))
}

/// An opt-out that nobody is responsible for any more: its visit is gone, or its time is over.
pub(super) fn leaked(view: &View<'_>, member: &Member<'_>) -> Option<Decision> {
    let node = member.node;
    let over = |hold: &&HealthHold| hold_ends(view, member, hold) <= view.snapshot.now;
    let hold = node.health_hold.as_ref().filter(over)?;
    let mut patch = base_patch(view, member, member.state());
    (patch.to, patch.labels) = (None, Changes::default());
    lift(node, hold, &mut patch);
    let message = match &hold.owner {
        Owner::Visit => {
            "Given back to NVSentinel: the driver upgrade that had opted it out is gone".to_owned()
        }
        Owner::Person(name) => {
            format!("Given back to NVSentinel: the time that {name} had asked for is over")
        }
    };
    patch.event = Some(warning(view, message));
    Some(Decision::act(Reason::Writing, Action::PatchNode(patch)))
}

/// When a hold has to be looked at again.
pub(super) fn hold_wakes(view: &View<'_>, member: &Member<'_>) -> Option<Timestamp> {
    let hold = member.node.health_hold.as_ref()?;
    Some(hold_ends(view, member, hold)).filter(|at| *at > view.snapshot.now && *at < Timestamp::MAX)
}

/// When a hold ends that nobody releases.
fn hold_ends(view: &View<'_>, member: &Member<'_>, hold: &HealthHold) -> Timestamp {
    match hold.owner {
        // The driver may be away.
        _ if member.node.visit.is_some() => Timestamp::MAX,
        // A driver that is still on its way up would be taken for a broken machine.
        Owner::Visit if member.driver_ready => hold.since,
        Owner::Visit => hold.since.saturating_add(view.policy.limits.driver_ready).unwrap_or(Timestamp::MAX),
        Owner::Person(_) => hold.until.unwrap_or(Timestamp::MAX),
    }
}

/// Leaves word of the visit on the node: whatever happens to it soon after is told of in the rollout.
pub(super) fn sign(view: &View<'_>, member: &Member<'_>, visit: &Visit, patch: &mut NodePatch) {
    let node = member.node;
    let cordoned = node.unschedulable && patch.unschedulable != Some(false);
    let in_one_go = visit.drivers.values().all(|walk| walk.attempts == 0);
    let (rollouts, gates) = known_after(node, visit);
    let mut pods = node.last_visit.as_ref().map(|last| last.pods.clone()).unwrap_or_default();
    let pod = member.pod.map(|pod| DriverPod::of(pod, node));
    pods.extend(pod.map(|pod| (view.policy.driver.clone(), pod)));
    let last = LastVisit {
        rollout: visit.rollout.clone(),
        began: in_one_go.then_some(visit.since),
        ended: view.snapshot.now,
        early: visit.early,
        rollouts,
        gates,
        pods,
        cordoned,
    };
    patch.annotations.set(LAST_VISIT_ANNOTATION, Some(last.to_text()));
}

/// What is known of each driver after this visit. What other visits found out about other drivers stays; and what was
/// measured before the first visit of a rollout is what later ones are compared with.
fn known_after(node: &Node, visit: &Visit) -> (BTreeMap<DriverName, String>, BTreeMap<DriverName, Gates>) {
    let last = node.last_visit.as_ref();
    let (mut rollouts, mut gates) =
        last.map(|last| (last.rollouts.clone(), last.gates.clone())).unwrap_or_default();
    for (driver, walk) in &visit.drivers {
        let same = visit.rollout.is_some() && rollouts.get(driver) == visit.rollout.as_ref();
        let before = gates.remove(driver).filter(|_| same).unwrap_or_default();
        let mut now = walk.gates.clone();
        for (gate, note) in before.into_iter().filter(|(_, note)| note.before.is_some()) {
            now.entry(gate).or_default().before = note.before;
        }
        if !now.is_empty() {
            gates.insert(driver.clone(), now);
        }
        rollouts.extend(visit.rollout.clone().map(|rollout| (driver.clone(), rollout)));
    }
    (rollouts, gates)
}

/// What has happened to a node soon after it was given back.
pub(super) fn relapse(view: &View<'_>, member: &Member<'_>) -> Option<(String, String)> {
    if !matches!(member.standing, Standing::Label(_)) {
        return None;
    }
    let node = member.node;
    let last = node.last_visit.as_ref()?;
    let watched_until = last.ended.saturating_add(view.policy.health.watch_after).unwrap_or(Timestamp::MAX);
    if view.snapshot.now >= watched_until {
        return None;
    }
    let raised = |name: &&String| node.conditions.iter().any(|c| *c.kind == ***name && c.holds);
    let tripped =
        shield(view).is_some() && view.snapshot.nvsentinel.is_some_and(|nvsentinel| nvsentinel.tripped);
    let raised = view.policy.health.conditions.iter().find(raised);
    let what = match raised {
        _ if !node.ready => "is not Ready".to_owned(),
        _ if cordoned_by_nvsentinel(node) => "was cordoned by NVSentinel".to_owned(),
        _ if node.unschedulable && !last.cordoned => "was cordoned".to_owned(),
        Some(condition) => format!("has condition {condition}"),
        None if tripped => "is in service while NVSentinel's circuit breaker is tripped".to_owned(),
        None => return None,
    };
    Some((last.rollout.clone()?, what))
}
