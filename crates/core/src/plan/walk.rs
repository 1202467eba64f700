//! One node, one state: where it goes next, and if it does not, why not.
//!
//! [`decide`] first looks at what forbids any step (a write under way, a setback, a pause, a label nobody knows),
//! then at the state. Each transition is one write that carries label, cordon and visit record together.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use kube::core::SelectorExt;

use super::ledger::Ledger;
use super::pool::{Freshness, Member, Standing, Start, View, label_state};
use super::removal::{self, BudgetBook, Progress};
use super::{PoolStatus, restart, validation};
use crate::action::{Action, Changes, Event, NodePatch, Transition};
use crate::contract::{KEEP_CORDONED_LABEL, State, VISIT_ANNOTATION, transition_message};
use crate::names::{DriverName, RevisionHash};
use crate::policy::{Drain, Policy, Removal};
use crate::reason::Reason;
use crate::snapshot::{Pod, SetbackKind};
use crate::visit::{Cause, Failure, Holds, Visit, Walk};

/// A new leader gets this long to try for itself before deadlines fire that ran out while nobody led.
const NEW_LEADER_GRACE: SignedDuration = SignedDuration::from_secs(10);

/// What the planner makes of one node.
pub(super) struct Decision {
    pub(super) reason: Reason,
    pub(super) actions: Vec<Action>,
    pub(super) wake_at: Option<Timestamp>,
}

impl Decision {
    /// Nothing to do; the reason says until when.
    pub(super) fn stay(reason: Reason) -> Self {
        let wake_at = reason.until();
        Self { reason, actions: Vec::new(), wake_at }
    }

    pub(super) fn act(reason: Reason, action: Action) -> Self {
        Self { actions: vec![action], ..Self::stay(reason) }
    }
}

/// Decides what happens to one node.
pub(super) fn decide(
    view: &View<'_>,
    member: &Member<'_>,
    ledger: &Ledger,
    status: &PoolStatus,
    claimed_by: Option<&Vec<String>>,
    budgets: &mut BudgetBook<'_>,
) -> Decision {
    if let PoolStatus::Frozen(why) = status {
        return Decision::stay(Reason::PoolFrozen { why: why.clone() });
    }
    if let Some(pools) = claimed_by {
        return Decision::stay(Reason::TwoPolicies { pools: pools.clone() });
    }
    if let Some(wait) = unfinished_business(view, member) {
        return wait;
    }
    match &member.standing {
        Standing::Held(reason, _) => Decision::stay(Reason::clone(reason)),
        _ if *status == PoolStatus::Paused => pause(view, member),
        Standing::Label(state) => outside_visit(view, member, *state, ledger),
        Standing::Visit(visit, walk) => during_visit(view, member, visit, walk, ledger, budgets),
    }
}

/// A write under way, or one that went wrong: nothing new is decided on facts that may be old.
fn unfinished_business(view: &View<'_>, member: &Member<'_>) -> Option<Decision> {
    let snapshot = view.snapshot;
    if let Some(pending) = member.pending {
        let to = pending.moving_to.as_ref().map(|(_, to)| *to);
        return Some(Decision::stay(to.map_or(Reason::Writing, |to| Reason::Moving { to })));
    }
    let setback = member.setback?;
    match &setback.kind {
        SetbackKind::Stale | SetbackKind::Refused if member.node.version > setback.seen => None,
        SetbackKind::Stale | SetbackKind::Refused if setback.retry_at <= snapshot.now => {
            Some(Decision::act(Reason::Conflict, Action::ReadNode(member.name.clone())))
        }
        SetbackKind::Stale | SetbackKind::Refused => {
            Some(Decision { wake_at: Some(setback.retry_at), ..Decision::stay(Reason::Conflict) })
        }
        SetbackKind::Error(_) if setback.retry_at <= snapshot.now => None,
        SetbackKind::Error(what) => {
            Some(Decision::stay(Reason::ApiError { what: what.clone(), retry_at: setback.retry_at }))
        }
    }
}

/// Everything stays as it is. Nodes on a visit note when the pause began, so that their deadlines stop.
fn pause(view: &View<'_>, member: &Member<'_>) -> Decision {
    let Standing::Visit(visit, walk) = member.standing else { return Decision::stay(Reason::Paused) };
    match walk.with_pause(true, view.snapshot.now) {
        Some(walk) if walk.state.in_flight() => {
            // The note and nothing else: a label that a person sets at this moment is theirs.
            let note = NodePatch { labels: Changes::default(), ..record_patch(view, member, visit, walk) };
            Decision::act(Reason::Paused, Action::PatchNode(note))
        }
        _ => Decision::stay(Reason::Paused),
    }
}

/// Whether a node could start if it had a slot; if not, why not.
pub(super) fn may_start(view: &View<'_>, member: &Member<'_>) -> Result<(), Reason> {
    let policy = view.policy;
    if member.state() != State::UpgradeRequired {
        return Err(Reason::UpToDate);
    }
    if let Some(other) = other_driver(view, member) {
        return Err(Reason::OtherDriver { driver: other });
    }
    if member.node.mark(&policy.keys.skip) == Some("true") {
        return Err(Reason::Skipped { label: policy.keys.skip.clone() });
    }
    let Some(daemon_set) = member.daemon_set.filter(|_| member.target.is_some()) else {
        return Err(revision_pending(member));
    };
    if member.pod.is_none() {
        return Err(Reason::NoDriverPod { daemon_set: daemon_set.name.clone(), until: None });
    }
    if !member.node.ready {
        return Err(Reason::NodeNotReady);
    }
    // A node that cannot be emptied is better left alone and at work.
    let users = member.pods().filter(|pod| removal::uses_device(&policy.devices, pod));
    let culprit = match (removal::undeletable(users, policy.removal), &policy.drain) {
        (Some(_), Some(drain)) => undrainable(view, member, drain),
        (None, Some(drain)) if policy.devices.is_empty() => undrainable(view, member, drain),
        (culprit, _) => culprit,
    };
    culprit.map_or(Ok(()), |what| Err(Reason::CannotBeEmptied { what }))
}

/// What a drain could not take off either.
fn undrainable(view: &View<'_>, member: &Member<'_>, drain: &Drain) -> Option<String> {
    left_behind(view, member, drain).or_else(|| removal::undeletable(drained(member, drain), drain.removal))
}

/// The pods that a drain takes off.
fn drained<'a>(member: &Member<'a>, drain: &'a Drain) -> impl Iterator<Item = &'a Pod> {
    member.pods().filter(|pod| is_drained(drain, pod))
}

fn is_drained(drain: &Drain, pod: &Pod) -> bool {
    !pod.is_daemon() && !pod.mirror && !pod.is_finished() && drain.selector.matches(&pod.labels)
}

/// A pod that uses the device and that a drain does not touch: the driver could never restart.
fn left_behind(view: &View<'_>, member: &Member<'_>, drain: &Drain) -> Option<String> {
    let mut users = member.pods().filter(|pod| removal::uses_device(&view.policy.devices, pod));
    let left = users.find(|pod| pod.deleting.is_none() && !is_drained(drain, pod))?;
    Some(format!("pod {} uses the device and is left out of the drain", left.name))
}

/// Another driver whose walk on this node is not over.
fn other_driver(view: &View<'_>, member: &Member<'_>) -> Option<DriverName> {
    if let Some(Ok(visit)) = &member.node.visit {
        return visit.drivers.keys().find(|driver| **driver != view.policy.driver).cloned();
    }
    // A start that has no record yet. If both have started, the first by name goes first.
    let started = |rival: &&&Policy| label_state(rival, member.node).is_ok_and(State::in_flight);
    let both = member.state().in_flight();
    let rivals = view.rivals.iter().filter(|rival| rival.selects(member.node.labels()));
    let mut first = rivals.filter(|rival| !both || rival.driver < view.policy.driver);
    first.find(started).map(|rival| rival.driver.clone())
}

fn outside_visit(view: &View<'_>, member: &Member<'_>, state: State, ledger: &Ledger) -> Decision {
    match state {
        State::Unknown | State::UpgradeDone => compare(view, member, state),
        State::UpgradeRequired => {
            if in_service_and_current(member) {
                return go(view, member, State::UpgradeDone, None);
            }
            start(view, member, ledger)
        }
        State::UpgradeFailed => Decision::stay(Reason::FailedWithoutRecord),
        in_flight
            if in_flight.in_flight()
                && let Some(driver) = other_driver(view, member) =>
        {
            Decision::stay(Reason::OtherDriver { driver })
        }
        State::CordonRequired => cordon(view, member, None),
        // The label says that somebody was at work here, but no record says what was done to the node.
        // From the cordon on, everything is safe to do again.
        _ => go(view, member, State::CordonRequired, None),
    }
}

/// `unknown` and `upgrade-done`: is the driver what it should be?
fn compare(view: &View<'_>, member: &Member<'_>, state: State) -> Decision {
    match member.sync {
        Freshness::Outdated => go(view, member, State::UpgradeRequired, None),
        Freshness::InSync | Freshness::Orphaned if member.asked_for => {
            go(view, member, State::UpgradeRequired, None)
        }
        Freshness::InSync | Freshness::Orphaned if member.driver_ready && state == State::Unknown => {
            go(view, member, State::UpgradeDone, None)
        }
        Freshness::InSync | Freshness::Orphaned if member.driver_ready => announce_ourselves(view, member),
        Freshness::InSync | Freshness::Orphaned => {
            let pod = member.pod.map(|pod| (pod.name.clone(), restart::says(pod)));
            pod.map_or_else(
                || Decision::stay(revision_pending(member)),
                |(pod, says)| Decision::stay(Reason::DriverNotReady { pod, says }),
            )
        }
        Freshness::Unknown => match (member.pod, member.daemon_set) {
            (None, Some(ds)) => {
                Decision::stay(Reason::NoDriverPod { daemon_set: ds.name.clone(), until: None })
            }
            _ => Decision::stay(revision_pending(member)),
        },
    }
}

fn revision_pending(member: &Member<'_>) -> Reason {
    let daemon_set = member.daemon_set.map(|ds| ds.name.clone());
    daemon_set.map_or(
        Reason::PoolFrozen { why: "no DaemonSet of this driver is meant for this node any more".to_owned() },
        |daemon_set| Reason::RevisionPending { daemon_set },
    )
}

fn in_service_and_current(member: &Member<'_>) -> bool {
    member.sync == Freshness::InSync && member.driver_ready && !member.asked_for
}

/// Without an operator that says so, driver-managers must learn from us that a controller looks after the node.
fn announce_ourselves(view: &View<'_>, member: &Member<'_>) -> Decision {
    if member.announced {
        return Decision::stay(Reason::UpToDate);
    }
    let patch = NodePatch {
        to: None,
        event: None,
        labels: Changes::default(),
        ..base_patch(view, member, State::UpgradeDone)
    };
    Decision::act(Reason::UpToDate, Action::PatchNode(patch))
}

/// `upgrade-required`: through the ledger and no other way.
fn start(view: &View<'_>, member: &Member<'_>, ledger: &Ledger) -> Decision {
    let ahead = match &member.start {
        Start::Granted => {
            let next = member.walk().map(|walk| walk.enter(State::CordonRequired, view.snapshot.now));
            return go(view, member, State::CordonRequired, next);
        }
        Start::No(reason) => return Decision::stay(Reason::clone(reason)),
        Start::Waits { ahead } => *ahead,
        Start::NotDue => ledger.waiting,
    };
    Decision::stay(Reason::NoSlot { limit: ledger.binding(), ahead })
}

/// `cordon-required`: ONE patch: cordon, holds, visit record.
fn cordon(view: &View<'_>, member: &Member<'_>, visit: Option<(&Visit, &Walk)>) -> Decision {
    let now = view.snapshot.now;
    let Some(target) = member.target else { return Decision::stay(revision_pending(member)) };
    let to = State::WaitForJobsRequired;
    let taken = !member.node.unschedulable;
    let visit = if let Some((visit, walk)) = visit {
        let holds = Holds { cordon: visit.holds.cordon || taken };
        let walk = Walk { target: target.clone(), ..walk.enter(to, now) };
        let drivers = BTreeMap::from([(view.policy.driver.clone(), walk)]);
        let mut visit = visit.clone();
        (visit.holds, visit.drivers, visit.rollout) = (holds, drivers, view.rollout.clone());
        visit
    } else {
        let walk = Walk::begin(to, now, target.clone());
        Visit::begin(view.rollout.clone(), now, Holds { cordon: taken }, view.policy.driver.clone(), walk)
    };
    let mut patch = base_patch(view, member, to);
    patch.unschedulable = taken.then_some(true);
    patch.annotations.set(VISIT_ANNOTATION, Some(visit.to_text()));
    if member.node.annotations.contains_key(&view.policy.keys.requested) {
        patch.annotations.set(&view.policy.keys.requested, None);
    }
    Decision::act(Reason::Moving { to }, Action::PatchNode(patch))
}

fn during_visit(
    view: &View<'_>,
    member: &Member<'_>,
    visit: &Visit,
    walk: &Walk,
    ledger: &Ledger,
    budgets: &mut BudgetBook<'_>,
) -> Decision {
    let now = view.snapshot.now;
    if let Some(decision) = mind_the_label(view, member, visit, walk) {
        return decision;
    }
    if let Some(walk) = walk.with_pause(false, now) {
        return Decision::act(Reason::Moving { to: walk.state }, rewrite(view, member, visit, walk));
    }
    if walk.state.in_flight() && walk.state > State::CordonRequired && !member.node.unschedulable {
        return cordon_again(view, member, visit, walk);
    }
    match walk.state {
        State::UpgradeRequired => start(view, member, ledger),
        State::CordonRequired => cordon(view, member, Some((visit, walk))),
        State::WaitForJobsRequired => wait_for_jobs(view, member, walk),
        State::PodDeletionRequired => take_pods_off(view, member, walk, view.policy.removal, budgets),
        State::DrainRequired => drain(view, member, walk, budgets),
        State::PodRestartRequired => restart::step(view, member, walk),
        State::ValidationRequired => validation::step(view, member, walk),
        State::UncordonRequired => release(view, member, visit, walk),
        State::UpgradeFailed => failed(view, member, walk),
        // A visit ends with the write that says done; a record that says otherwise was made by hand.
        State::Unknown | State::UpgradeDone => {
            go(view, member, State::ValidationRequired, Some(walk.enter(State::ValidationRequired, now)))
        }
    }
}

/// The label mirrors the record. Gone: written again. `upgrade-required`: a person's retry. Anything else: hands off.
fn mind_the_label(view: &View<'_>, member: &Member<'_>, visit: &Visit, walk: &Walk) -> Option<Decision> {
    match label_state(view.policy, member.node) {
        Err(reason) => Some(Decision::stay(reason)),
        Ok(label) if label == walk.state => None,
        Ok(State::Unknown) => {
            Some(Decision::act(Reason::Writing, rewrite(view, member, visit, walk.clone())))
        }
        Ok(State::UpgradeRequired) => Some(retry(view, member, walk)),
        Ok(label) => Some(Decision::stay(Reason::LabelChanged { label, record: walk.state })),
    }
}

fn retry(view: &View<'_>, member: &Member<'_>, walk: &Walk) -> Decision {
    let target = target_of(member, walk).clone();
    go(view, member, State::UpgradeRequired, Some(walk.retry(view.snapshot.now, target)))
}

/// A person uncordoned a node in the middle of its visit. Work would land on a node without a driver.
fn cordon_again(view: &View<'_>, member: &Member<'_>, visit: &Visit, walk: &Walk) -> Decision {
    let message = "The node was uncordoned during its driver upgrade; cordoned again".to_owned();
    let mut visit = visit.clone();
    visit.holds.cordon = true;
    let mut patch = base_patch(view, member, walk.state);
    patch.to = None;
    patch.unschedulable = Some(true);
    patch.annotations.set(VISIT_ANNOTATION, Some(visit.to_text()));
    patch.event = Some(Event { warning: true, reason: view.policy.keys.event_reason.clone(), message });
    Decision::act(Reason::Writing, Action::PatchNode(patch))
}

fn wait_for_jobs(view: &View<'_>, member: &Member<'_>, walk: &Walk) -> Decision {
    let View { snapshot, policy, .. } = view;
    // Without a device that pods ask for there is nobody to evict one by one: draining is the way.
    let next = match (policy.devices.is_empty(), &policy.drain) {
        (false, _) => State::PodDeletionRequired,
        (true, Some(_)) => State::DrainRequired,
        (true, None) => State::PodRestartRequired,
    };
    let on = || go(view, member, next, Some(walk.enter(next, snapshot.now)));
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

/// `pod-deletion-required`: pods that use the device leave.
fn take_pods_off(
    view: &View<'_>,
    member: &Member<'_>,
    walk: &Walk,
    removal: Removal,
    budgets: &mut BudgetBook<'_>,
) -> Decision {
    let users = member.pods().filter(|p| removal::uses_device(&view.policy.devices, p));
    let users: Vec<&Pod> = users.collect();
    let fallback = if view.policy.drain.is_some() { Some(State::DrainRequired) } else { None };
    remove(view, member, walk, &users, removal, fallback, budgets)
}

/// `drain-required`: all pods leave but those of DaemonSets and those that the policy leaves out.
fn drain(view: &View<'_>, member: &Member<'_>, walk: &Walk, budgets: &mut BudgetBook<'_>) -> Decision {
    let Some(drain) = &view.policy.drain else {
        // The policy changed its mind: what is left of the users is for the state before.
        let next = State::PodDeletionRequired;
        return go(view, member, next, Some(walk.enter(next, view.snapshot.now)));
    };
    // Without this look the node would go round: drained, not free for the restart, back to the eviction, drained, …
    if let Some(what) = left_behind(view, member, drain) {
        return fail(view, member, walk, Cause::PodsCannotLeave { what });
    }
    let pods: Vec<&Pod> = drained(member, drain).collect();
    remove(view, member, walk, &pods, drain.removal, None, budgets)
}

fn remove(
    view: &View<'_>,
    member: &Member<'_>,
    walk: &Walk,
    pods: &[&Pod],
    removal: Removal,
    fallback: Option<State>,
    budgets: &mut BudgetBook<'_>,
) -> Decision {
    let now = view.snapshot.now;
    let give_up = |cause: Cause| match fallback {
        Some(state) => go(view, member, state, Some(walk.enter(state, now))),
        None => fail(view, member, walk, cause),
    };
    let until = removal.timeout.map(|timeout| deadline(view, walk, timeout));
    let ran_out = until.is_some_and(|until| ran_out(view, until));
    match removal::progress(view.snapshot, pods, removal, until, ran_out, budgets) {
        Progress::Gone => {
            let next = State::PodRestartRequired;
            go(view, member, next, Some(walk.enter(next, now)))
        }
        Progress::Cannot { what } => give_up(Cause::PodsCannotLeave { what }),
        Progress::TimedOut { what } => {
            give_up(Cause::PodsDidNotLeave { what, seconds: removal.timeout.map_or(0, |t| t.as_secs()) })
        }
        Progress::Leaving { reason, actions, retry_at } => {
            let wake_at = [reason.until(), retry_at].into_iter().flatten().min();
            Decision { reason, actions, wake_at }
        }
    }
}

/// `uncordon-required`: ONE patch: undo what is ours, drop the record.
fn release(view: &View<'_>, member: &Member<'_>, visit: &Visit, walk: &Walk) -> Decision {
    if member.sync != Freshness::InSync || !member.driver_ready {
        // It was fine a moment ago. Nothing goes back into service on that.
        let back = State::ValidationRequired;
        return go(view, member, back, Some(walk.enter(back, view.snapshot.now)));
    }
    let kept = member.node.labels().get(KEEP_CORDONED_LABEL).is_some_and(|v| v == "true");
    let mut patch = base_patch(view, member, State::UpgradeDone);
    patch.unschedulable = (visit.holds.cordon && !kept && member.node.unschedulable).then_some(false);
    patch.annotations.set(VISIT_ANNOTATION, None);
    Decision::act(Reason::Moving { to: State::UpgradeDone }, Action::PatchNode(patch))
}

/// `upgrade-failed`: sticky. Only a new version or a person's new driver pod moves it; the label does so elsewhere.
fn failed(view: &View<'_>, member: &Member<'_>, walk: &Walk) -> Decision {
    let now = view.snapshot.now;
    if member.target.is_some_and(|target| *target != walk.target) {
        return retry(view, member, walk);
    }
    let Some(failure) = &walk.failure else { return Decision::stay(Reason::FailedWithoutRecord) };
    let replaced = member.pod.is_some_and(|pod| Some(&pod.uid) != failure.pod.as_ref());
    if replaced && member.sync == Freshness::InSync && member.driver_ready {
        let next = State::ValidationRequired;
        return go(view, member, next, Some(walk.enter(next, now)));
    }
    Decision::stay(Reason::Failed { cause: failure.cause.clone() })
}

/// When a limit on the present state runs out. A new leader gets to try for itself first.
pub(super) fn deadline(view: &View<'_>, walk: &Walk, limit: SignedDuration) -> Timestamp {
    let tried = view.snapshot.leading_since.saturating_add(NEW_LEADER_GRACE).unwrap_or(Timestamp::MAX);
    walk.deadline(limit, view.snapshot.now).max(tried)
}

/// Whether a deadline fires.
pub(super) fn ran_out(view: &View<'_>, deadline: Timestamp) -> bool {
    view.snapshot.now >= deadline
}

/// The walk ends here until somebody comes: cause on the node, in an event, in the rollout.
pub(super) fn fail(view: &View<'_>, member: &Member<'_>, walk: &Walk, cause: Cause) -> Decision {
    let pod = member.pod.map(|pod| pod.uid.clone());
    // Only a version that comes after the failure is a reason to try again.
    let target = target_of(member, walk).clone();
    let next = Walk { target, ..walk.fail(view.snapshot.now, Failure { cause, pod }) };
    go(view, member, State::UpgradeFailed, Some(next))
}

/// The one write of a transition.
pub(super) fn go(view: &View<'_>, member: &Member<'_>, to: State, walk: Option<Walk>) -> Decision {
    let mut patch = base_patch(view, member, to);
    if let Some(walk) = walk {
        if let (Some(failure), Some(event)) = (&walk.failure, &mut patch.event) {
            event.warning = true;
            event.message = format!("{}. Cause: {}", event.message, failure.cause);
        }
        if let Standing::Visit(visit, _) = member.standing {
            patch.annotations.set(VISIT_ANNOTATION, Some(with_walk(view, visit, walk).to_text()));
        }
    }
    Decision::act(Reason::Moving { to }, Action::PatchNode(patch))
}

/// Writes record and label again, without a transition.
fn rewrite(view: &View<'_>, member: &Member<'_>, visit: &Visit, walk: Walk) -> Action {
    Action::PatchNode(record_patch(view, member, visit, walk))
}

fn record_patch(view: &View<'_>, member: &Member<'_>, visit: &Visit, walk: Walk) -> NodePatch {
    let mut patch = base_patch(view, member, walk.state);
    (patch.to, patch.event) = (None, None);
    patch.annotations.set(VISIT_ANNOTATION, Some(with_walk(view, visit, walk).to_text()));
    patch
}

fn with_walk(view: &View<'_>, visit: &Visit, walk: Walk) -> Visit {
    let mut visit = visit.clone();
    visit.drivers.insert(view.policy.driver.clone(), walk);
    visit
}

/// A patch that moves the state label, with everything that goes with it in any state.
fn base_patch(view: &View<'_>, member: &Member<'_>, to: State) -> NodePatch {
    let keys = &view.policy.keys;
    let mut annotations = Changes::default();
    if !member.announced {
        annotations.set(&keys.enabled, Some("true".to_owned()));
    }
    NodePatch {
        node: member.name.clone(),
        pool: view.pool.name.clone(),
        seen: member.node.version,
        labels: Changes::from((keys.state.as_str(), Some(to.as_str().to_owned()))),
        annotations,
        unschedulable: None,
        to: Some(Transition { driver: view.policy.driver.clone(), from: member.state(), to }),
        event: Some(Event {
            warning: false,
            reason: keys.event_reason.clone(),
            message: transition_message(to),
        }),
    }
}

/// The revision that a walk goes to now: the newest, or the one it set out for while the newest is not known.
pub(super) fn target_of<'a>(member: &Member<'a>, walk: &'a Walk) -> &'a RevisionHash {
    member.target.unwrap_or(&walk.target)
}
