//! Taking a node and giving it back. What a visit sets on a node is a hold: it is written down with what was there
//! before, and put back only if it is still as we left it.

use std::collections::BTreeMap;

use super::members::{Early, Freshness, Member};
use super::patch::{base_patch, go, warning};
use super::pool::View;
use super::walk::{Decision, revision_pending};
use super::{clients, gates, health};
use crate::action::{Action, NodePatch};
use crate::contract::{
    AGENT_CORDON_ANNOTATION, GPU_DRIVER, KEEP_CORDONED_LABEL, NEEDS_REBOOT_ANNOTATION, RELEASED_ANNOTATION,
    SCALE_DOWN_HOLDS, State, VISIT_ANNOTATION,
};
use crate::health::cordoned_by_nvsentinel;
use crate::matrix::Unlisted;
use crate::reason::Reason;
use crate::snapshot::Node;
use crate::visit::{Before, Holds, Visit, Walk};

/// `cordon-required`: ONE patch: cordon, holds, visit record.
pub(super) fn cordon(view: &View<'_>, member: &Member<'_>, visit: Option<(&Visit, &Walk)>) -> Decision {
    let now = view.snapshot.now;
    let Some(target) = member.target else { return Decision::stay(revision_pending(member)) };
    // What only restarts in place disturbs nobody on the device.
    let to = if member.restarts_in_place() { State::PodRestartRequired } else { State::WaitForJobsRequired };
    let mut patch = base_patch(view, member, to);
    let holds = take(view, member.node, visit.map(|(visit, _)| &visit.holds), &mut patch);
    let pending = &view.policy.keys.pending;
    if member.node.has_taint(pending) {
        // Closed to all work, it need not be unwelcome too.
        patch.taints = Some(member.node.taints_with(pending, false));
    }
    health::hold(view, member.node, &mut patch);
    let walk = match visit {
        Some((_, walk)) => Walk { target: target.clone(), ..walk.enter(to, now) },
        None => Walk::begin(to, now, target.clone()),
    };
    // Who asks for an upgrade of what is up to date wants a new driver pod all the same.
    let replace = member.pod.filter(|_| member.requested).map(|pod| pod.uid.clone()).or(walk.replace.clone());
    let walk = Walk { replace, ..walk };
    let since = visit.map_or(now, |(visit, _)| visit.since);
    let now = clients::before(view, member);
    let before = match visit.and_then(|(visit, _)| visit.before.clone()) {
        // What was there before the first attempt counts. Who retries a node whose driver is ready takes it with the
        // devices that it has.
        Some(Before { clients, devices }) => {
            let accepted = now.map(|now| now.devices).filter(|_| member.driver_ready);
            Some(Before { clients, devices: accepted.map_or(devices, |accepted| devices.min(accepted)) })
        }
        None => now,
    };
    let mut visit = Visit::begin(view.rollout.clone(), since, holds, view.policy.driver.clone(), walk);
    visit.before = before;
    patch.annotations.set(VISIT_ANNOTATION, Some(visit.to_text()));
    for done_with in [view.policy.keys.requested.as_str(), RELEASED_ANNOTATION] {
        if member.node.annotations.contains_key(done_with) {
            patch.annotations.set(done_with, None);
        }
    }
    Decision::act(Reason::Moving { to }, Action::PatchNode(patch))
}

/// A node that came up with the new driver by itself: ONE patch takes it out, and it is proven like a canary. Work that is
/// on it stays.
pub(super) fn take_in(view: &View<'_>, member: &Member<'_>, early: &Early) -> Decision {
    let now = view.snapshot.now;
    let Some(target) = member.target else { return Decision::stay(revision_pending(member)) };
    let to = State::PodRestartRequired;
    let mut patch = base_patch(view, member, to);
    let holds = take(view, member.node, None, &mut patch);
    health::hold(view, member.node, &mut patch);
    let walk = Walk::begin(to, now, target.clone());
    let rollout = view.rollout_of_visits(true);
    let mut visit = Visit::begin(rollout, now, holds, view.policy.driver.clone(), walk);
    visit.early = true;
    visit.before = clients::before(view, member);
    patch.annotations.set(VISIT_ANNOTATION, Some(visit.to_text()));
    let came = match early {
        Early::Stage(stage) => format!("came up with the new driver before stage {stage} is open"),
        Early::TakenBack => "came up with a version that was taken back and is there still".to_owned(),
        Early::Gates => "came up with the new driver by itself, past its gates".to_owned(),
        Early::DriverManager => "was cordoned by its driver manager, and its driver is up".to_owned(),
    };
    let message = format!("The node {came}; it is cordoned and proven like a canary");
    patch.event = Some(warning(view, message));
    Decision::act(Reason::Moving { to }, Action::PatchNode(patch))
}

/// Sets what a visit holds, and says what was there before.
fn take(view: &View<'_>, node: &Node, held: Option<&Holds>, patch: &mut NodePatch) -> Holds {
    let mut holds = held.cloned().unwrap_or_default();
    if !node.unschedulable {
        patch.unschedulable = Some(true);
        holds.cordon = true;
    }
    // The driver manager's own `finish` leaves a node on a visit alone: whoever ends the visit lifts that cordon too.
    holds.cordon |= adopts(view, node);
    for (key, value) in SCALE_DOWN_HOLDS {
        let before = node.annotations.get(key);
        if before.map(String::as_str) == Some(value) {
            continue;
        }
        patch.annotations.set(key, Some(value.to_owned()));
        holds.annotations.entry(key.to_owned()).or_insert_with(|| before.cloned());
    }
    holds
}

/// The cordon is the driver manager's, and whoever visits the node for that driver has to lift it.
fn adopts(view: &View<'_>, node: &Node) -> bool {
    view.policy.driver.as_str() == GPU_DRIVER && node.is_cordoned_by_driver_manager()
}

/// Undoes what a visit holds, where it is still as we left it, and drops the record.
fn put_back(view: &View<'_>, node: &Node, holds: &Holds, patch: &mut NodePatch) {
    let kept = node.labels().get(KEEP_CORDONED_LABEL).is_some_and(|v| v == "true");
    // A cordon that NVSentinel has made its own is not ours to lift any more.
    let adopted = node.visit.is_some() && adopts(view, node);
    // For another driver it stays, whatever was there before.
    let foreign = node.is_cordoned_by_driver_manager() && !adopts(view, node);
    let ours = (holds.cordon || adopted) && !kept && !foreign && !cordoned_by_nvsentinel(node);
    patch.unschedulable = (ours && node.unschedulable).then_some(false);
    // What is said of a cordon that is gone, or of an earlier boot, would be taken for news the next time.
    let said = [(AGENT_CORDON_ANNOTATION, ours), (NEEDS_REBOOT_ANNOTATION, node.needs_reboot().is_none())];
    for (key, _) in said.into_iter().filter(|(key, over)| *over && node.annotations.contains_key(*key)) {
        patch.annotations.set(key, None);
    }
    for (key, value) in SCALE_DOWN_HOLDS {
        if let Some(before) = holds.annotations.get(key)
            && node.annotations.get(key).map(String::as_str) == Some(value)
        {
            patch.annotations.set(key, before.clone());
        }
    }
    health::release(node, patch);
    patch.annotations.set(VISIT_ANNOTATION, None);
}

/// A person uncordoned a node in the middle of its visit. Work would land on a node without a driver.
pub(super) fn cordon_again(view: &View<'_>, member: &Member<'_>, visit: &Visit, walk: &Walk) -> Decision {
    let message = "The node was uncordoned during its driver upgrade; cordoned again".to_owned();
    let mut visit = visit.clone();
    visit.holds.cordon = true;
    let again = Walk { recordoned: Some(view.snapshot.now), ..walk.clone() };
    visit.drivers.insert(view.policy.driver.clone(), again);
    let mut patch = base_patch(view, member, walk.state);
    patch.to = None;
    patch.unschedulable = Some(true);
    patch.annotations.set(VISIT_ANNOTATION, Some(visit.to_text()));
    patch.event = Some(warning(view, message));
    Decision::act(Reason::Writing, Action::PatchNode(patch))
}

/// `uncordon-required`: ONE patch: undo what is ours, drop the record.
pub(super) fn release(view: &View<'_>, member: &Member<'_>, visit: &Visit, walk: &Walk) -> Decision {
    let fit = member.sync == Freshness::InSync && member.driver_ready && member.node.ready;
    let proven = gates::unproven(view, member, walk).is_none();
    if !fit || !proven || member.waits_for_load || clients::fell_behind(view, member) {
        // It was fine a moment ago. Nothing goes back into service on that; and whoever listened again must not now.
        let back = State::ValidationRequired;
        let mut decision = go(view, member, back, Some(walk.enter(back, view.snapshot.now)));
        if let Some(Action::PatchNode(patch)) = decision.actions.first_mut() {
            health::hold(view, member.node, patch);
        }
        return decision;
    }
    if let Some(decision) = health::listen_again(view, member, visit, walk) {
        return decision;
    }
    if let Some(found) = health::objection(view, member, visit, walk) {
        return health::wait(view, member, walk, found);
    }
    let mut patch = base_patch(view, member, State::UpgradeDone);
    put_back(view, member.node, &visit.holds, &mut patch);
    health::sign(view, member, visit, &mut patch);
    Decision::act(Reason::Moving { to: State::UpgradeDone }, Action::PatchNode(patch))
}

/// Why a node is given back before its driver was touched.
pub(super) enum GivenBack<'a> {
    /// Its pods could not leave, and the policy says `onBlocked: Release`. It tries again after the others.
    Blocked(&'a Reason),
    /// The rollout was aborted.
    Aborted,
    /// It set out for a version that was taken back, and the way back leaves it alone.
    LeftAlone,
    /// The version is not in the matrix, or not any more.
    Unlisted(&'a Unlisted),
    /// It had been told to start, and the window has closed before anything was done.
    TooLate,
}

/// Gives a node back with its old driver: ONE patch. It waits for a slot again.
pub(super) fn give_back(
    view: &View<'_>,
    member: &Member<'_>,
    holds: &Holds,
    why: &GivenBack<'_>,
) -> Decision {
    let to = State::UpgradeRequired;
    let mut patch = base_patch(view, member, to);
    put_back(view, member.node, holds, &mut patch);
    let message = match why {
        GivenBack::Blocked(reason) => {
            patch.annotations.set(RELEASED_ANNOTATION, Some(view.snapshot.now.to_string()));
            format!("Given back with its old driver: {reason}. It is tried again after the others")
        }
        GivenBack::Unlisted(unlisted) => format!("Given back with its old driver: {unlisted}"),
        GivenBack::TooLate => {
            "Given back before anything was done: its window has closed meanwhile, and it waits for the next one"
                .to_owned()
        }
        GivenBack::LeftAlone => "Given back with its old driver: the way back leaves it alone".to_owned(),
        GivenBack::Aborted => "Given back with its old driver: the rollout was aborted".to_owned(),
    };
    patch.event = Some(warning(view, message));
    Decision::act(Reason::Moving { to }, Action::PatchNode(patch))
}

/// The holds of a node that has none.
pub(super) const NO_HOLDS: Holds = Holds { cordon: false, annotations: BTreeMap::new() };
