//! The pool as a whole: its rollout, its policy's status, its complaints.
//!
//! A rollout begins when a node has to move to a target that the newest rollout does not have. Progress is told at a
//! measured pace, so that the number of writes does not grow with the fleet.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};

use super::origin::{self, Origin};
use super::pool::daemon_sets;
use super::rollback::{self, Wanted};
use super::{Plan, PoolPlan, PoolStatus, Verdict, fit, timeline};
use crate::action::{Action, Event};
use crate::api::{
    DriverPolicyStatus, ROLLOUT_FAILURES_MAX, RollbackStatus, RolloutFailure, RolloutPhase, RolloutSpec,
    RolloutStatus, StagePhase, StageStatus, TIMELINE_MAX, stamp,
};
use crate::contract::State;
use crate::names::{NodeName, RevisionHash};
use crate::policy::{Pool, Source};
use crate::reason::Reason;
use crate::snapshot::{Object, Rollout, Snapshot};

/// Progress is told at most this often; the beginning and the end at once.
const PACE: SignedDuration = SignedDuration::from_secs(10);

/// Drift is told at most this often.
const DRIFT_PACE: SignedDuration = SignedDuration::from_mins(1);

/// The rollout that visits of this pool belong to: the newest if it has this target, else the one to come.
pub(super) fn current(
    snapshot: &Snapshot,
    pool: &Pool,
    target: &BTreeMap<String, RevisionHash>,
) -> Option<String> {
    match newest(snapshot, pool) {
        Some((number, rollout)) if is_current(rollout, target) => Some(name(pool, number)),
        newest => (!target.is_empty()).then(|| name(pool, newest.map_or(1, |(number, _)| number + 1))),
    }
}

/// The newest rollout of a pool, with its name.
pub fn newest_rollout<'a>(snapshot: &'a Snapshot, pool: &'a Pool) -> Option<(String, &'a Rollout)> {
    newest(snapshot, pool).map(|(number, rollout)| (name(pool, number), rollout))
}

pub(super) fn name(pool: &Pool, number: u32) -> String {
    format!("{}-{number}", pool.name)
}

pub(super) fn newest<'a>(snapshot: &'a Snapshot, pool: &'a Pool) -> Option<(u32, &'a Rollout)> {
    rollouts(snapshot, pool).max_by_key(|(number, _)| *number)
}

pub(super) fn rollouts<'a>(
    snapshot: &'a Snapshot,
    pool: &'a Pool,
) -> impl Iterator<Item = (u32, &'a Rollout)> {
    let of_pool = |rollout: &Rollout| rollout.spec.policy == pool.name.as_str();
    let numbered = snapshot.rollouts.iter().filter(move |(_, rollout)| of_pool(rollout));
    numbered.filter_map(|(name, rollout)| Some((number(pool, name)?, rollout)))
}

/// The number of a rollout of this pool, by its name.
pub(super) fn number(pool: &Pool, rollout: &str) -> Option<u32> {
    rollout.strip_prefix(pool.name.as_str())?.strip_prefix('-')?.parse().ok()
}

pub(super) fn has_target(rollout: &Rollout, target: &BTreeMap<String, RevisionHash>) -> bool {
    rollout
        .spec
        .target
        .iter()
        .map(|(k, v)| (k.as_str(), v.as_str()))
        .eq(target.iter().map(|(k, v)| (k.as_str(), v.as_str())))
}

/// It is the one under way: a rollout that went wrong and was cleared begins anew, as another.
fn is_current(rollout: &Rollout, target: &BTreeMap<String, RevisionHash>) -> bool {
    has_target(rollout, target) && !rollback::is_spent(rollout)
}

/// Says what there is to say about a pool.
pub(super) fn report(snapshot: &Snapshot, pool: &Pool, done: &PoolPlan, plan: &mut Plan) {
    policy_status(snapshot, pool, done, plan);
    let newest = newest(snapshot, pool);
    if let (PoolStatus::Frozen(_), Some((number, rollout))) = (&done.status, newest) {
        freeze(snapshot, &name(pool, number), rollout, plan);
    }
    if done.target.is_empty() || matches!(done.status, PoolStatus::Frozen(_)) {
        return;
    }
    let Ok(policy) = &pool.policy else { return };
    let wanted = Wanted::of(&done.target, &daemon_sets(snapshot, policy));
    let current = newest.filter(|(_, rollout)| is_current(rollout, &done.target));
    let condemned = rollback::condemned(snapshot, pool, &wanted);
    let goes_back_from = rollback::way_back_of(snapshot, pool, current.map(|(_, rollout)| rollout), &wanted);
    let others = rollouts(snapshot, pool).filter(|(number, _)| current.is_none_or(|(now, _)| *number != now));
    for (older, rollout) in others {
        let name = name(pool, older);
        if condemned.is_some_and(|(number, _)| number == older) {
            set_again(snapshot, pool, done, &name, rollout, plan);
        } else {
            let goes_back = goes_back_from.as_ref() == Some(&name);
            supersede(snapshot, &name, rollout, goes_back, plan);
        }
    }
    forget(snapshot, pool, plan);
    let Some((number, rollout)) = current else {
        // A node that finds itself up to date again does not have to move.
        let waits = |v: &Verdict| {
            v.state == State::UpgradeRequired && v.reason != Reason::Moving { to: State::UpgradeDone }
        };
        let has_to_move = |v: &Verdict| waits(v) || v.state.in_flight();
        let may = done.status == PoolStatus::Active && condemned.is_none();
        // Nothing new comes to a node that is only proven.
        let visit = |name: &NodeName| snapshot.nodes.get(name)?.visit.as_ref()?.as_ref().ok();
        let only_proven =
            |(name, v): (&NodeName, &Verdict)| v.in_sync && visit(name).is_some_and(|visit| visit.early);
        let moves = |(name, v): (&NodeName, &Verdict)| has_to_move(v) && !only_proven((name, v));
        // A way back is written down even if no node has to go it: what comes after it is no way back any more.
        if may && (done.nodes.iter().any(moves) || goes_back_from.is_some()) {
            create(snapshot, pool, done, &wanted, newest.map_or(1, |(number, _)| number + 1), plan);
        }
        return;
    };
    progress(snapshot, pool, &name(pool, number), rollout, done, plan);
    let goes_back = |said: &RolloutStatus| said.phase == RolloutPhase::RollingBack;
    if done.status == PoolStatus::Active && rollout.status.as_ref().is_some_and(goes_back) {
        rollback::carry_out(snapshot, pool, rollout, &done.target, plan);
    }
    if done.goes_on && done.status == PoolStatus::Active && rollout.status.is_some() {
        create(snapshot, pool, done, &wanted, number + 1, plan);
    }
    relapses(snapshot, done, plan);
}

fn create(
    snapshot: &Snapshot,
    pool: &Pool,
    done: &PoolPlan,
    wanted: &Wanted<'_>,
    number: u32,
    plan: &mut Plan,
) {
    let new = name(pool, number);
    if !may_write(snapshot, &Object::Rollout(new.clone()), plan) {
        return;
    }
    let target = done.target.iter().map(|(ds, hash)| (ds.clone(), hash.to_string())).collect();
    let taken_back = rollback::taken_back(snapshot, pool, wanted);
    // The way back has no way back.
    let origin = origin::origin(snapshot, pool, wanted).filter(|_| taken_back.is_none());
    let (previous, version) = match origin {
        Some(Origin { previous, version }) => (Some(previous), version),
        None => (None, done.version.clone()),
    };
    let spec = RolloutSpec {
        version: version.map(|version| version.to_string()),
        previous,
        rollback_of: taken_back.map(|number| name(pool, number)),
        ..RolloutSpec::new(pool.name.as_str(), done.driver.as_str(), target)
    };
    plan.actions.push(Action::CreateRollout { name: new, spec });
}

/// A version that was put back is wanted again, by somebody else; or it is back in a part of the DaemonSets only.
fn set_again(
    snapshot: &Snapshot,
    pool: &Pool,
    done: &PoolPlan,
    name: &str,
    rollout: &Rollout,
    plan: &mut Plan,
) {
    let Some(said) = rollout.status.as_ref().filter(|_| done.status == PoolStatus::Active) else { return };
    let back = match (said.phase, &said.rollback) {
        // Whatever held the pool up in the middle of it does not any more.
        (RolloutPhase::RollingBack | RolloutPhase::Halted | RolloutPhase::Frozen, Some(back)) => {
            rollback::carry_out(snapshot, pool, rollout, &done.target, plan);
            Some(rollback::judge(snapshot, pool, rollout, &done.target, back.clone()))
        }
        // Something else of the pool was rendered anew before anybody could begin.
        (_, None) if is_newest(snapshot, pool, name) => rollback::review(snapshot, pool, rollout, done),
        // Whoever sets it again after all nodes are back finds it condemned, and that is all.
        _ if is_being_taken_back(snapshot, pool, name) => rollback::set_again(snapshot, rollout),
        _ => None,
    };
    let Some(back) = back else { return };
    let phase = if back.message.is_some() { RolloutPhase::Halted } else { RolloutPhase::RollingBack };
    let status = RolloutStatus { phase, message: Some(back.says()), rollback: Some(back), ..said.clone() };
    if *said != status && may_write(snapshot, &Object::Rollout(name.to_owned()), plan) {
        plan.actions.push(say(
            snapshot,
            name,
            with_timeline(Some(said), status, rollout, snapshot.now),
            Vec::new(),
        ));
    }
}

fn is_newest(snapshot: &Snapshot, pool: &Pool, rollout: &str) -> bool {
    newest(snapshot, pool).is_some_and(|(number, _)| name(pool, number) == rollout)
}

fn is_being_taken_back(snapshot: &Snapshot, pool: &Pool, rollout: &str) -> bool {
    let newest = newest(snapshot, pool).map(|(_, newest)| newest);
    let way_back = newest.filter(|newest| newest.spec.rollback_of.as_deref() == Some(rollout));
    way_back.is_some_and(|back| !back.status.as_ref().is_some_and(is_over))
}

/// Old rollouts beyond the policy's limit, one at a time. What went wrong is remembered until a person clears it.
fn forget(snapshot: &Snapshot, pool: &Pool, plan: &mut Plan) {
    let Ok(policy) = &pool.policy else { return };
    let mut over: Vec<(u32, &Rollout)> = rollouts(snapshot, pool)
        .filter(|(_, rollout)| rollout.status.as_ref().is_some_and(is_over))
        .filter(|(_, rollout)| rollback::is_forgivable(rollout))
        .collect();
    over.sort_by_key(|(number, _)| std::cmp::Reverse(*number));
    let Some((number, rollout)) = over.into_iter().nth(policy.rollout.history_limit as usize) else { return };
    let name = name(pool, number);
    if may_write(snapshot, &Object::Rollout(name.clone()), plan) {
        plan.actions.push(Action::DeleteRollout { name, seen: rollout.version });
    }
}

/// A rollout that is under way says that it stands still; the policy's status or an event says why.
fn freeze(snapshot: &Snapshot, name: &str, rollout: &Rollout, plan: &mut Plan) {
    let Some(said) = rollout.status.as_ref().filter(|said| !is_over(said)) else { return };
    if said.phase != RolloutPhase::Frozen && may_write(snapshot, &Object::Rollout(name.to_owned()), plan) {
        let status = RolloutStatus { phase: RolloutPhase::Frozen, ..said.clone() };
        plan.actions.push(say(snapshot, name, status, Vec::new()));
    }
}

fn is_over(status: &RolloutStatus) -> bool {
    use RolloutPhase::{Aborted, Done, Failed, RolledBack, Superseded};
    matches!(status.phase, Done | Failed | Superseded | Aborted | RolledBack)
}

/// Another target took its place: the version before, or one that nobody has had yet.
fn supersede(snapshot: &Snapshot, name: &str, rollout: &Rollout, goes_back: bool, plan: &mut Plan) {
    if rollout.status.as_ref().is_some_and(is_over)
        || !may_write(snapshot, &Object::Rollout(name.to_owned()), plan)
    {
        return;
    }
    let said = rollout.status.clone().unwrap_or_default();
    let phase = if said.rollback.is_some() && goes_back {
        RolloutPhase::RolledBack
    } else {
        RolloutPhase::Superseded
    };
    let finished_at = Some(stamp(snapshot.now));
    // What stood in the way does not any more.
    let rollback = said.rollback.clone().map(|back| RollbackStatus { message: None, ..back });
    let status = RolloutStatus { phase, finished_at, rollback, message: None, ..said };
    let status = with_timeline(rollout.status.as_ref(), status, rollout, snapshot.now);
    plan.actions.push(say(snapshot, name, status, Vec::new()));
}

fn progress(
    snapshot: &Snapshot,
    pool: &Pool,
    name: &str,
    rollout: &Rollout,
    done: &PoolPlan,
    plan: &mut Plan,
) {
    let said = rollout.status.as_ref();
    let status = status(snapshot, pool, done, rollout);
    let status = with_timeline(said, status, rollout, snapshot.now);
    let settled = said.is_some_and(|s| s.phase == RolloutPhase::Done) && status.phase == RolloutPhase::Done;
    if settled || said == Some(&status) {
        return;
    }
    // What was said in the future was said by a clock that was wrong.
    let said_at = rollout.said_at.filter(|at| *at <= snapshot.now);
    let due = said_at.and_then(|at| at.checked_add(PACE).ok());
    match due {
        // The end is told at once, the way there at its pace.
        Some(due) if due > snapshot.now && said.is_some_and(|said| is_as_far(said, &status)) => {
            plan.wake(due);
        }
        _ if may_write(snapshot, &Object::Rollout(name.to_owned()), plan) => {
            plan.actions.push(say(snapshot, name, status, done.events.clone()));
        }
        _ => {}
    }
}

fn say(snapshot: &Snapshot, name: &str, status: RolloutStatus, events: Vec<(NodeName, Event)>) -> Action {
    let seen = snapshot.rollouts.get(name).map(|rollout| rollout.version).unwrap_or_default();
    Action::RolloutStatus { name: name.to_owned(), seen, status, events }
}

/// Only numbers have changed since then.
fn is_as_far(said: &RolloutStatus, now: &RolloutStatus) -> bool {
    let phases = |status: &RolloutStatus| -> Vec<_> {
        status.stages.iter().map(|stage| (stage.name.clone(), stage.phase)).collect()
    };
    said.phase == now.phase && phases(said) == phases(now) && said.rollback == now.rollback
}

/// Adds what was decided since `said`.
fn with_timeline(
    said: Option<&RolloutStatus>,
    mut status: RolloutStatus,
    rollout: &Rollout,
    now: Timestamp,
) -> RolloutStatus {
    let mut news = timeline::news(said, &status, rollout, now);
    for entry in &mut news {
        fit::shorten(&mut entry.what);
    }
    status.timeline.extend(news);
    let surplus = status.timeline.len().saturating_sub(TIMELINE_MAX);
    if surplus > 0 {
        // The beginning stays: it says what it was about.
        status.timeline.drain(1..=surplus);
    }
    // What was said had room.
    if said != Some(&status) {
        fit::fit(&mut status);
    }
    status
}

/// What the stages make of a rollout that is neither over nor held up.
fn staged(stages: &[StageStatus]) -> Option<RolloutPhase> {
    let open = stages.iter().find(|stage| stage.phase != StagePhase::Passed)?;
    Some(match open.phase {
        StagePhase::Failed | StagePhase::Spoiled => RolloutPhase::Halted,
        StagePhase::Baking => RolloutPhase::Baking,
        StagePhase::AwaitingApproval => RolloutPhase::AwaitingApproval,
        StagePhase::Waiting | StagePhase::Moving | StagePhase::Proving | StagePhase::Passed => {
            RolloutPhase::Running
        }
    })
}

fn status(snapshot: &Snapshot, pool: &Pool, done: &PoolPlan, rollout: &Rollout) -> RolloutStatus {
    let (said, aborted) = (rollout.status.as_ref(), rollout.spec.abort);
    let rollback = match done.status {
        PoolStatus::Active => rollback::review(snapshot, pool, rollout, done),
        _ => said.and_then(|said| said.rollback.clone()),
    };
    let count = |is: &dyn Fn(&Verdict) -> bool| {
        let nodes = done.nodes.values().filter(|v| is(v)).count();
        u32::try_from(nodes).unwrap_or(u32::MAX)
    };
    // Who is taken out now is not done, whatever its label still says.
    let sets_out = |verdict: &Verdict| {
        verdict.state == State::UpgradeDone
            && matches!(verdict.reason, Reason::Moving { to } if to.in_flight())
    };
    let moving = count(&|v| v.state.in_flight() || sets_out(v));
    let finished = count(&|v| v.state == State::UpgradeDone && !sets_out(v));
    let failed = count(&|v| v.state == State::UpgradeFailed);
    let waiting = count(&|v| matches!(v.state, State::UpgradeRequired | State::Unknown));
    let left_alone = count(&|v| matches!(v.reason, Reason::LeftAlone { .. }));
    let staged = staged(&done.stages);
    let phase = match (&done.status, moving + waiting - left_alone, failed) {
        _ if rollback.as_ref().is_some_and(|back| back.message.is_some()) => RolloutPhase::Halted,
        _ if rollback.is_some() => RolloutPhase::RollingBack,
        (_, 0, 0) if staged.is_none() => RolloutPhase::Done,
        (_, 0, _) if staged.is_none() => RolloutPhase::Failed,
        _ if aborted && moving == 0 => RolloutPhase::Aborted,
        (PoolStatus::Paused, ..) => RolloutPhase::Paused,
        _ => staged.unwrap_or_default(),
    };
    let open = done.stages.iter().find(|stage| stage.phase != StagePhase::Passed);
    let over = matches!(phase, RolloutPhase::Done | RolloutPhase::Failed | RolloutPhase::Aborted);
    let stopped = done.ledger.failed > done.ledger.max_failed && waiting > 0;
    let mut status = RolloutStatus {
        phase,
        total: count(&|_| true),
        done: finished,
        moving,
        waiting,
        failed,
        unavailable: u32::try_from(done.ledger.out).unwrap_or(u32::MAX),
        stage: open.map(|stage| stage.name.clone()),
        stages: done.stages.clone(),
        gates: done.gates.clone(),
        started_at: said.and_then(|s| s.started_at.clone()).or(Some(stamp(snapshot.now))),
        finished_at: over.then(|| said.and_then(|s| s.finished_at.clone()).unwrap_or(stamp(snapshot.now))),
        failures: failures(done),
        early: done.early.clone(),
        relapses: said.map(|said| said.relapses.clone()).unwrap_or_default(),
        timeline: said.map(|said| said.timeline.clone()).unwrap_or_default(),
        message: rollback
            .as_ref()
            .map(RollbackStatus::says)
            .or_else(|| open.and_then(|stage| stage.message.clone()))
            .or_else(|| {
                let (failed, limit) = (done.ledger.failed, done.ledger.max_failed);
                stopped.then(|| Reason::TooManyFailed { stage: None, failed, limit }.to_string())
            })
            .or_else(|| unlisted(done)),
        rollback,
    };
    fit::shorten_all(&mut status);
    status
}

/// Nodes do not start because their version is not in the matrix.
fn unlisted(done: &PoolPlan) -> Option<String> {
    let mut reasons = done.nodes.values().map(|verdict| &verdict.reason);
    reasons.find(|reason| matches!(reason, Reason::NotInMatrix { .. })).map(ToString::to_string)
}

/// What happened to nodes soon after they were given back is told in their rollout, once for each node.
fn relapses(snapshot: &Snapshot, done: &PoolPlan, plan: &mut Plan) {
    let mut by_rollout: BTreeMap<&str, Vec<RolloutFailure>> = BTreeMap::new();
    for (node, (rollout, what)) in &done.relapses {
        let told = snapshot.rollouts.get(rollout).and_then(|rollout| rollout.status.as_ref());
        let Some(told) = told else { continue };
        let known = told.relapses.iter().any(|relapse| relapse.node == node.as_str());
        let new = by_rollout.entry(rollout).or_default();
        if !known && told.relapses.len() + new.len() < ROLLOUT_FAILURES_MAX {
            new.push(RolloutFailure::new(node.as_str(), snapshot.now, what.clone()));
        }
    }
    for (name, new) in by_rollout.into_iter().filter(|(_, new)| !new.is_empty()) {
        let object = Object::Rollout(name.to_owned());
        let Some(said) = snapshot.rollouts.get(name).and_then(|rollout| rollout.status.clone()) else {
            continue;
        };
        let written = plan.actions.iter().any(|action| action.object().as_ref() == Some(&object));
        if !written && may_write(snapshot, &object, plan) {
            let mut status = said;
            status.relapses.extend(new);
            fit::fit(&mut status);
            plan.actions.push(say(snapshot, name, status, Vec::new()));
        }
    }
}

fn failures(done: &PoolPlan) -> Vec<RolloutFailure> {
    let mut failures: Vec<(Timestamp, RolloutFailure)> = done
        .nodes
        .iter()
        .filter_map(|(node, verdict)| match (&verdict.reason, verdict.since) {
            (Reason::Failed { cause }, Some(at)) => {
                let failure = RolloutFailure::new(node.as_str(), at, cause.to_string());
                Some((at, RolloutFailure { log: cause.log().map(str::to_owned), ..failure }))
            }
            _ => None,
        })
        .collect();
    failures.sort_by_key(|(at, _)| std::cmp::Reverse(*at));
    failures.into_iter().take(ROLLOUT_FAILURES_MAX).map(|(_, failure)| failure).collect()
}

/// A DriverPolicy gets its answer in its status; other people's objects get an event if they are not followed.
fn policy_status(snapshot: &Snapshot, pool: &Pool, done: &PoolPlan, plan: &mut Plan) {
    let contested = done.nodes.values().find(|verdict| matches!(verdict.reason, Reason::TwoPolicies { .. }));
    let (ready, message) = match (&done.status, contested) {
        (PoolStatus::Frozen(why), _) => (false, why.clone()),
        (_, Some(verdict)) => (false, format!("nodes are {}", verdict.reason)),
        (PoolStatus::Paused, None) => (true, "paused: autoUpgrade is false".to_owned()),
        (PoolStatus::Active, None) => (true, "in force".to_owned()),
    };
    let Source::DriverPolicy(name) = &pool.source else {
        if !ready {
            plan.actions.push(Action::Complain { source: pool.source.clone(), message });
        }
        return;
    };
    let Some((generation, said)) = snapshot.sources.driver_policy_status.get(name) else { return };
    let effective = pool.policy.as_ref().map(|p| p.effective.clone()).unwrap_or_default();
    let matrix = done.matrix.clone();
    let status = DriverPolicyStatus { observed_generation: *generation, ready, message, effective, matrix };
    let status = match pace(snapshot.now, said, status) {
        Ok(status) => status,
        Err(due) => {
            plan.wake(due);
            return;
        }
    };
    if *said != status && may_write(snapshot, &Object::DriverPolicy(name.clone()), plan) {
        plan.actions.push(Action::PolicyStatus { name: name.clone(), status });
    }
}

/// Drift changes with every node that comes, goes or is done: told at once, that would be a write for each. If nothing else
/// is new, says when it is due.
fn pace(
    now: Timestamp,
    said: &DriverPolicyStatus,
    mut status: DriverPolicyStatus,
) -> Result<DriverPolicyStatus, Timestamp> {
    let at = said.matrix.as_ref().and_then(|matrix| matrix.at.clone());
    if let Some(matrix) = &mut status.matrix {
        matrix.at.clone_from(&at);
    }
    if *said == status {
        return Ok(status);
    }
    let mut all_else = status.clone();
    if let (Some(new), Some(old)) = (&mut all_else.matrix, &said.matrix) {
        new.drift.clone_from(&old.drift);
        new.not_observed.clone_from(&old.not_observed);
    }
    // A clock that was ahead does not keep what it said.
    let due = at.filter(|at| at.0 <= now).and_then(|at| at.0.checked_add(DRIFT_PACE).ok());
    if let Some(due) = due.filter(|due| *due > now && all_else == *said) {
        return Err(due);
    }
    if let Some(matrix) = &mut status.matrix {
        matrix.at = Some(stamp(now));
    }
    Ok(status)
}

/// Nothing under way for this object, and no setback that has to cool off.
pub(super) fn may_write(snapshot: &Snapshot, object: &Object, plan: &mut Plan) -> bool {
    if snapshot.is_busy(object) {
        return false;
    }
    match snapshot.setbacks.get(object) {
        Some(setback) if setback.retry_at > snapshot.now => {
            plan.wake(setback.retry_at);
            false
        }
        _ => true,
    }
}
