//! One node, one state: where it goes next, and if it does not, why not.
//!
//! [`decide`] first looks at what forbids any step (a write under way, a setback, a pause, a label nobody knows),
//! then at the state. Each transition is one write that carries label, cordon and visit record together.

use jiff::{SignedDuration, Timestamp};

use super::cordon::{GivenBack, NO_HOLDS, cordon, cordon_again, give_back, release, take_in};
use super::ledger::Ledger;
use super::members::{Freshness, Member, Standing, Start, label_state};
use super::patch::{base_patch, go, record_patch, rewrite};
use super::pool::View;
use super::removal::BudgetBook;
use super::start::other_driver;
use super::{PoolStatus, bake, gates, health, leaving, reboot, restart, steady, validation};
use crate::action::{Action, Changes, NodePatch};
use crate::contract::{AGENT_CORDON_ANNOTATION, State};
use crate::matrix::Unlisted;
use crate::names::RevisionHash;
use crate::policy::Policy;
use crate::reason::Reason;
use crate::snapshot::{Object, SetbackKind};
use crate::visit::{Cause, Failure, Visit, Walk};

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

    /// The node would stand elsewhere.
    fn moves(&self) -> bool {
        self.actions.iter().any(|action| matches!(action, Action::PatchNode(NodePatch { to: Some(_), .. })))
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
        return stand_still(member, Reason::PoolFrozen { why: why.clone() });
    }
    if let Some(pools) = claimed_by {
        return Decision::stay(Reason::TwoPolicies { pools: pools.clone() });
    }
    if let Some(wait) = unfinished_business(view, member) {
        return wait;
    }
    let decision = match &member.standing {
        Standing::Held(reason, _) => Decision::stay(Reason::clone(reason)),
        // What somebody asked for a limited time ends at that time, pause or not.
        _ if *status == PoolStatus::Paused => {
            health::leaked(view, member).unwrap_or_else(|| pause(view, member))
        }
        Standing::Label(state) => steer_work(view, member, outside_visit(view, member, *state, ledger)),
        Standing::Visit(visit, walk) => during_visit(view, member, visit, walk, ledger, budgets),
    };
    if decision.moves() && pods_are_asked(view, member) { Decision::stay(Reason::Writing) } else { decision }
}

/// A pod of this node was asked to leave, and nobody has answered. It is asked because of where the node stands, and may
/// hear of it only after the node has moved on, or was given back. An answer takes no longer than a call and its turn.
fn pods_are_asked(view: &View<'_>, member: &Member<'_>) -> bool {
    let mut under_way = view.snapshot.in_flight.iter();
    under_way.any(|(object, pending)| {
        matches!(object, Object::Pod(_)) && pending.on_node.as_ref() == Some(member.name)
    })
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
    let Standing::Visit(visit, walk) = member.standing else { return stand_still(member, Reason::Paused) };
    match walk.with_pause(true, view.snapshot.now) {
        Some(walk) if walk.state.in_flight() => {
            // The note and nothing else: a label that a person sets at this moment is theirs.
            let note = NodePatch { labels: Changes::default(), ..record_patch(view, member, visit, walk) };
            Decision::act(Reason::Paused, Action::PatchNode(note))
        }
        _ => stand_still(member, Reason::Paused),
    }
}

/// The pool stands still as a whole. A node that failed before says why it failed: that outlasts any pause.
fn stand_still(member: &Member<'_>, reason: Reason) -> Decision {
    let failure = member.walk().filter(|walk| walk.state == State::UpgradeFailed);
    let failure = failure.and_then(|walk| walk.failure.as_ref());
    Decision::stay(failure.map_or(reason, |failure| Reason::Failed { cause: failure.cause.clone() }))
}

/// A node that is still to go is unwelcome to work, as long as others of its stage move. Told in the write that moves it,
/// or in one of its own.
fn steer_work(view: &View<'_>, member: &Member<'_>, mut decision: Decision) -> Decision {
    let next = decision.actions.iter().find_map(|action| match action {
        Action::PatchNode(patch) => patch.to.as_ref().map(|to| to.to),
        _ => None,
    });
    let skipped = member.node.mark(&view.policy.keys.skip) == Some("true");
    let due = next.unwrap_or(member.state()) == State::UpgradeRequired && !skipped;
    let key = &view.policy.keys.pending;
    let may_start = member.stage_moves && !member.left_alone && view.unlisted(member).is_none();
    let in_hours = view.is_at_work(|| member.node.has_taint(key));
    let pending = due && may_start && in_hours && view.steers_work() && !member.restarts_in_place();
    // The cordon closes the node to all work, and takes the taint with it.
    if pending == member.node.has_taint(key) || next == Some(State::CordonRequired) {
        return decision;
    }
    let taints = Some(member.node.taints_with(key, pending));
    match decision.actions.first_mut() {
        Some(Action::PatchNode(patch)) => patch.taints = taints,
        Some(_) => {}
        None => {
            let nothing = base_patch(view, member, member.state());
            let labels = Changes::default();
            let patch = NodePatch { labels, taints, to: None, event: None, ..nothing };
            decision.actions.push(Action::PatchNode(patch));
        }
    }
    decision
}

fn outside_visit(view: &View<'_>, member: &Member<'_>, state: State, ledger: &Ledger) -> Decision {
    if let Some(decision) = health::leaked(view, member) {
        return decision;
    }
    // What the driver manager said of a cordon that a person has lifted would pass for the truth about that person's next one.
    if member.node.has_record_of_a_lifted_cordon() {
        let mut patch = quiet_patch(view, member, state);
        patch.annotations.set(AGENT_CORDON_ANNOTATION, None);
        return Decision::act(Reason::Writing, Action::PatchNode(patch));
    }
    if let Start::Early(early) = &member.start {
        return take_in(view, member, early);
    }
    match state {
        State::Unknown | State::UpgradeDone => compare(view, member, state),
        State::UpgradeRequired => {
            if in_service_and_current(member) && !member.unproven {
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
        // Without a driver it may start all the same: given back, it would start and be given back for ever.
        State::CordonRequired
            if let Some(why) = called_off(view, member).filter(|_| !member.needs_driver()) =>
        {
            give_back(view, member, &NO_HOLDS, &why)
        }
        State::CordonRequired if let Some(unlisted) = struck_off(view, member) => {
            give_back(view, member, &NO_HOLDS, &GivenBack::Unlisted(unlisted))
        }
        // It was told to start and nobody came: nothing was done to it yet, and by now that would be out of hours.
        State::CordonRequired if !view.opening.is_open() && !member.needs_driver() && !member.atom_moves => {
            give_back(view, member, &NO_HOLDS, &GivenBack::TooLate)
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
        // It is not done before its gates say so, and there is no room to ask them now.
        Freshness::InSync if member.unproven => go(view, member, State::UpgradeRequired, None),
        Freshness::InSync | Freshness::Orphaned if member.driver_ready && state == State::Unknown => {
            go(view, member, State::UpgradeDone, None)
        }
        Freshness::InSync | Freshness::Orphaned if member.driver_ready => {
            let left = || steady::in_service(view, member).filter(|_| member.announced);
            bake::note_boot(view, member).or_else(left).unwrap_or_else(|| announce_ourselves(view, member))
        }
        Freshness::InSync | Freshness::Orphaned if let Some(reason) = reboot::refuses(member) => {
            Decision::stay(reason)
        }
        Freshness::InSync | Freshness::Orphaned => {
            let pod = member.pod.map(|pod| (pod.name.clone(), restart::says(pod)));
            pod.map_or_else(
                || Decision::stay(revision_pending(member)),
                |(pod, says)| Decision::stay(Reason::DriverNotReady { pod, says }),
            )
        }
        Freshness::Unknown => match (member.pod, member.daemon_set) {
            (None, Some(ds)) => {
                Decision::stay(Reason::NoDriverPod { daemon_set: Some(ds.name.clone()), until: None })
            }
            _ => Decision::stay(revision_pending(member)),
        },
    }
}

pub(super) fn revision_pending(member: &Member<'_>) -> Reason {
    let daemon_set = member.daemon_set.map(|ds| ds.name.clone());
    daemon_set.map_or(Reason::NoDriverPod { daemon_set: None, until: None }, |daemon_set| {
        Reason::RevisionPending { daemon_set }
    })
}

fn in_service_and_current(member: &Member<'_>) -> bool {
    member.sync == Freshness::InSync && member.driver_ready && !member.asked_for
}

/// Without an operator that says so, driver-managers must learn from us that a controller looks after the node.
fn announce_ourselves(view: &View<'_>, member: &Member<'_>) -> Decision {
    let reason = member.spared().map_or(Reason::UpToDate, |version| Reason::SameVersion { version });
    if member.announced {
        return Decision::stay(reason);
    }
    Decision::act(reason, Action::PatchNode(quiet_patch(view, member, State::UpgradeDone)))
}

/// A write that moves the node nowhere.
fn quiet_patch(view: &View<'_>, member: &Member<'_>, state: State) -> NodePatch {
    let labels = Changes::default();
    NodePatch { to: None, event: None, labels, ..base_patch(view, member, state) }
}

/// `upgrade-required`: through the ledger and no other way.
fn start(view: &View<'_>, member: &Member<'_>, ledger: &Ledger) -> Decision {
    let (ahead, together, limit) = match &member.start {
        Start::Granted => {
            let next = member.walk().map(|walk| walk.enter(State::CordonRequired, view.snapshot.now));
            return go(view, member, State::CordonRequired, next);
        }
        Start::No(reason) => return Decision::stay(Reason::clone(reason)),
        Start::Waits { ahead, together, limit } => (*ahead, *together, limit.clone()),
        Start::NotDue | Start::Early(_) => (ledger.waiting, 1, None),
    };
    let limit = limit.unwrap_or_else(|| ledger.binding());
    Decision::stay(Reason::NoSlot { limit, ahead, together })
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
    if has_lost_its_cordon(member) {
        return cordon_again(view, member, visit, walk);
    }
    if let Some(decision) = health::hold_again(view, member, visit, walk) {
        return decision;
    }
    if let Some(decision) = turn_back(view, member, visit, walk) {
        return decision;
    }
    match walk.state {
        State::UpgradeRequired => start(view, member, ledger),
        State::CordonRequired => cordon(view, member, Some((visit, walk))),
        State::WaitForJobsRequired => leaving::wait_for_jobs(view, member, walk),
        State::PodDeletionRequired => leaving::take_pods_off(view, member, (visit, walk), budgets),
        State::DrainRequired => leaving::drain(view, member, (visit, walk), budgets),
        State::PodRestartRequired => restart::step(view, member, walk),
        State::ValidationRequired => validation::step(view, member, (visit, walk)),
        State::UncordonRequired => release(view, member, visit, walk),
        State::UpgradeFailed => failed(view, member, walk),
        // A visit ends with the write that says done; a record that says otherwise was made by hand.
        State::Unknown | State::UpgradeDone => {
            go(view, member, State::ValidationRequired, Some(walk.enter(State::ValidationRequired, now)))
        }
    }
}

/// Before the driver is touched: nothing has to be emptied for a rollout that was called off, or for a version that was taken back.
fn turn_back(view: &View<'_>, member: &Member<'_>, visit: &Visit, walk: &Walk) -> Option<Decision> {
    if !walk.state.before_restart() {
        return None;
    }
    if let Some(why) = called_off(view, member).filter(|_| member.has_its_old_driver()) {
        return Some(give_back(view, member, &visit.holds, &why));
    }
    if let Some(unlisted) = struck_off(view, member).filter(|_| member.has_its_old_driver()) {
        return Some(give_back(view, member, &visit.holds, &GivenBack::Unlisted(unlisted)));
    }
    if member.has_its_new_driver() {
        let next = State::ValidationRequired;
        return Some(go(view, member, next, Some(walk.enter(next, view.snapshot.now))));
    }
    None
}

/// Why nothing has to be done to a node that was told to start.
fn called_off(view: &View<'_>, member: &Member<'_>) -> Option<GivenBack<'static>> {
    let left_alone = || member.left_alone.then_some(GivenBack::LeftAlone);
    if view.is_called_off() { Some(GivenBack::Aborted) } else { left_alone() }
}

/// The matrix was read and does not list the version: it was struck off after the start, or another one came meanwhile. A
/// matrix that cannot be read stops nobody half-way.
fn struck_off<'v>(view: &'v View<'_>, member: &Member<'_>) -> Option<&'v Unlisted> {
    view.unlisted(member).map(AsRef::as_ref).filter(|unlisted| unlisted.is_certain())
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
    let again = Walk { by_hand: true, ..walk.retry(view.snapshot.now, target) };
    go(view, member, State::UpgradeRequired, Some(again))
}

/// `upgrade-failed`: sticky. Only a new version, a person's new driver pod or a reboot that it needed moves it; the label does
/// so elsewhere.
fn failed(view: &View<'_>, member: &Member<'_>, walk: &Walk) -> Decision {
    let now = view.snapshot.now;
    if member.target.is_some_and(|target| *target != walk.target) {
        // What is wanted now is what it has had all the time: it failed before anybody touched that.
        let untouched = member.sync == Freshness::InSync && member.driver_ready && member.found_its_driver();
        let again = walk.retry(now, target_of(member, walk).clone());
        let replace = again.replace.clone().filter(|_| !untouched);
        return go(view, member, State::UpgradeRequired, Some(Walk { replace, ..again }));
    }
    let Some(failure) = &walk.failure else { return Decision::stay(Reason::FailedWithoutRecord) };
    let cared_for = is_cared_for(member, failure);
    if cared_for && member.sync == Freshness::InSync && member.driver_ready {
        let next = State::ValidationRequired;
        return go(view, member, next, Some(walk.enter(next, now)));
    }
    let reason = Reason::Failed { cause: failure.cause.clone() };
    // Whoever replaces the driver pod of an empty node by hand, or boots it, must not wait for us.
    if cared_for
        && member.waits_for_load
        && member.sync == Freshness::InSync
        && view.users(member).next().is_none()
        && gates::at_work(view, member).is_none()
    {
        return Decision::act(reason, restart::release_safe_load(view, member));
    }
    Decision::stay(reason)
}

/// Somebody has replaced the driver pod; or the reboot that it needed is over, or needed no more.
fn is_cared_for(member: &Member<'_>, failure: &Failure) -> bool {
    let rebooted = matches!(failure.cause, Cause::NeedsReboot { .. }) && member.node.needs_reboot().is_none();
    rebooted || member.pod.is_some_and(|pod| Some(&pod.uid) != failure.pod.as_ref())
}

/// A failed node that was mended goes on without having to start: it takes a slot in this pass.
pub(super) fn is_mended(policy: &Policy, member: &Member<'_>) -> bool {
    let failed = member.walk().filter(|walk| walk.state == State::UpgradeFailed);
    let failure = failed.and_then(|walk| walk.failure.as_ref());
    failure.is_some_and(|failure| is_cared_for(member, failure))
        && (member.sync, member.driver_ready) == (Freshness::InSync, true)
        && label_state(policy, member.node) == Ok(State::UpgradeFailed)
}

/// It is in service for the moment and is about to be cordoned again: nobody gets its place meanwhile.
pub(super) fn has_lost_its_cordon(member: &Member<'_>) -> bool {
    let Standing::Visit(visit, walk) = member.standing else { return false };
    // Whoever lifts the cordon of a failed node knows what it does; whoever lifts another one that was on it does not.
    let lost_another = walk.state == State::UpgradeFailed && !visit.holds.cordon;
    let needs_cordon = lost_another || (walk.state.in_flight() && walk.state > State::CordonRequired);
    needs_cordon && !member.node.unschedulable
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

/// The revision that a walk goes to now: the newest, or the one it set out for while the newest is not known.
pub(super) fn target_of<'a>(member: &Member<'a>, walk: &'a Walk) -> &'a RevisionHash {
    member.target.unwrap_or(&walk.target)
}
