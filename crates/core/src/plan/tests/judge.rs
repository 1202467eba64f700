//! What every pass over any fleet is held against, counted and looked up apart from the planner.

use proptest::prelude::*;

use super::fixture::*;
use super::sketch::{Rule, Sketch};
use crate::action::{Action, NodePatch, Transition};
use crate::contract::State;
use crate::names::{DriverName, NodeName};
use crate::plan::{Plan, PoolPlan};
use crate::policy;
use crate::reason::{About, Kind, Motion, advice, culprits, next};
use crate::snapshot::{Node, Object, Snapshot};
use crate::visit::{Visit, Walk};

/// One pass, held against the limits and the table. Tells whether there was anything to do.
pub(super) fn checked_step(sketch: &Sketch, fleet: &mut Fleet) -> Result<bool, TestCaseError> {
    let (before, plan) = (fleet.snapshot.clone(), fleet.plan());
    within_limits(sketch, &before, &plan)?;
    together_and_in_time(sketch, &before, &plan)?;
    for action in &plan.actions {
        if let Action::PatchNode(patch) = action {
            moves_as_documented(&before.nodes[&patch.node], patch)?;
        }
    }
    let busy = fleet.step();
    for (name, node) in &before.nodes {
        keeps_its_beginning(node, &fleet.snapshot.nodes[name])?;
    }
    Ok(busy)
}

fn moves_as_documented(node: &Node, patch: &NodePatch) -> Result<(), TestCaseError> {
    let Some(transition) = &patch.to else { return Ok(()) };
    let (from, to) = (transition.from, transition.to);
    let walk = walk(node, &transition.driver);
    let label = node.mark(&keys(transition.driver.as_str()).state).unwrap_or_default();
    let asked = walk.is_some() && label == State::UpgradeRequired.as_str() && to == State::UpgradeRequired;
    // A label without a record is followed from the cordon on; a record with a state that no visit has was made by hand.
    let anew = walk.is_none() && from.in_flight() && to == State::CordonRequired;
    let by_hand = walk.is_some() && !from.in_flight() && to == State::ValidationRequired;
    // What a driver manager has taken out is only proven.
    let proven = node.is_cordoned_by_driver_manager() && to == State::PodRestartRequired;
    prop_assert!(
        is_documented(from, to) || asked || anew || by_hand || (walk.is_none() && proven),
        "{} goes from {} to {}",
        patch.node,
        from,
        to
    );
    Ok(())
}

fn visit(node: &Node) -> Option<&Visit> {
    node.visit.as_ref()?.as_ref().ok()
}

fn walk<'a>(node: &'a Node, driver: &DriverName) -> Option<&'a Walk> {
    visit(node)?.drivers.get(driver)
}

/// As long as a visit lasts, its beginning stays what it is and attempts only become more; what it holds stays held.
fn keeps_its_beginning(before: &Node, after: &Node) -> Result<(), TestCaseError> {
    let (Some(old), Some(new)) = (visit(before), visit(after)) else { return Ok(()) };
    prop_assert_eq!(old.since, new.since);
    prop_assert!(new.holds.cordon || !old.holds.cordon);
    for (driver, walk) in &new.drivers {
        let Some(earlier) = old.drivers.get(driver) else { continue };
        prop_assert!(walk.attempts >= earlier.attempts, "{:?} after {:?}", walk, earlier);
        prop_assert!(walk.since >= earlier.since, "{:?} after {:?}", walk, earlier);
        let anew = walk.state == State::UpgradeRequired && earlier.state != State::UpgradeRequired;
        prop_assert_eq!(walk.attempts > earlier.attempts, anew, "only a new attempt counts as one");
    }
    Ok(())
}

/// Starts of each pool, counted from labels, records and writes under way, and not from the ledger.
pub(super) fn within_limits(sketch: &Sketch, facts: &Snapshot, plan: &Plan) -> Result<(), TestCaseError> {
    for pool in &plan.pools {
        let starts: Vec<&NodeName> = starts(pool, plan).collect();
        if sketch.rule == Rule::Rivals {
            prop_assert_eq!(starts.len(), 0, "nobody knows whose nodes these are");
        }
        if starts.is_empty() {
            continue;
        }
        let moves = |name: &NodeName| is_moving(facts, pool, name);
        let moving = pool.nodes.keys().filter(|name| moves(name)).count();
        let is_out = |name: &&NodeName| facts.nodes[*name].is_out() || moves(name);
        let out = pool.nodes.keys().filter(is_out).count();
        let newly_out = starts.iter().filter(|name| !is_out(name)).count();
        let limit = sketch.unavailable.of(pool.nodes.len());
        prop_assert!(sketch.parallel == 0 || moving + starts.len() <= sketch.parallel as usize);
        prop_assert!(newly_out == 0 || out + newly_out <= limit, "{} + {} of {}", out, newly_out, limit);
        prop_assert!(limit > 0, "0 is a brake");
        if let Some(max) = sketch.topology.spread.filter(|_| sketch.says_more()) {
            let half = |name: &NodeName| facts.nodes[name].labels().get("half");
            for start in starts.iter().filter(|name| !is_out(name)) {
                let same = |name: &&&NodeName| half(name) == half(start);
                let out = pool.nodes.keys().filter(is_out).filter(|name| same(&name)).count();
                let newly_out = starts.iter().filter(|name| !is_out(name)).filter(same).count();
                prop_assert!(out + newly_out <= max as usize, "{} + {} of {}", out, newly_out, max);
            }
        }
        prop_assert!(starts.iter().all(|name| !moves(name)));
    }
    Ok(())
}

/// Of an atom all nodes start that have to, or none, unless it is under way; and nothing starts in a closed window. Read off
/// labels and pods.
pub(super) fn together_and_in_time(
    sketch: &Sketch,
    facts: &Snapshot,
    plan: &Plan,
) -> Result<(), TestCaseError> {
    for pool in plan.pools.iter().filter(|_| sketch.says_more()) {
        let starts: Vec<&NodeName> = starts(pool, plan).collect();
        let load = &keys(pool.driver.as_str()).safe_load;
        let loads = |name: &NodeName| facts.nodes[name].annotations.contains_key(load);
        let on_time = sketch.opens_at(facts.now);
        for name in starts.iter().filter(|name| !loads(name)) {
            prop_assert!(on_time, "{} starts at {}", name, facts.now);
        }
        if !sketch.topology.atoms {
            continue;
        }
        let rack = |name: &NodeName| facts.nodes[name].labels().get("rack");
        // Whoever has failed and is out goes back without the others, and they go without it.
        let again = |name: &NodeName| {
            let tried = walk(&facts.nodes[name], &pool.driver).is_some_and(|walk| walk.attempts > 0);
            let moves = is_moving(facts, pool, name);
            tried && (facts.nodes[name].unschedulable || !facts.nodes[name].ready || moves)
        };
        for name in starts.iter().filter(|name| rack(name).is_some() && !loads(name) && !again(name)) {
            let mut others = pool.nodes.iter().filter(|(other, _)| rack(other) == rack(name));
            let under_way = |other: &NodeName| is_moving(facts, pool, other) && !again(other);
            if pool.nodes.keys().any(|other| rack(other) == rack(name) && under_way(other)) {
                continue;
            }
            let skip = &keys(pool.driver.as_str()).skip;
            let stays = others.find(|(other, verdict)| {
                let due = !verdict.in_sync && verdict.state == State::UpgradeRequired;
                let goes = facts.nodes[*other].mark(skip).is_none() && !again(other);
                due && goes && !starts.contains(other)
            });
            prop_assert!(stays.is_none(), "{} starts, {} does not", name, stays.unwrap().0);
        }
    }
    Ok(())
}

fn starts<'a>(pool: &'a PoolPlan, plan: &'a Plan) -> impl Iterator<Item = &'a NodeName> {
    plan.actions.iter().filter_map(|action| match action {
        Action::PatchNode(patch) if patch.pool == pool.name => {
            let start = |to: &&Transition| to.to == State::CordonRequired && !to.from.in_flight();
            patch.to.as_ref().filter(start).map(|_| &patch.node)
        }
        _ => None,
    })
}

fn is_moving(facts: &Snapshot, pool: &PoolPlan, name: &NodeName) -> bool {
    let node = &facts.nodes[name];
    let label = node.mark(&keys(pool.driver.as_str()).state).and_then(|label| label.parse::<State>().ok());
    let sent = facts.in_flight.get(&Object::Node(name.clone())).and_then(|pending| pending.moving_to.clone());
    let sent = sent.filter(|(driver, _)| *driver == pool.driver).map(|(_, state)| state);
    let stands = walk(node, &pool.driver).map(|walk| walk.state).or(label);
    [stands, sent].into_iter().flatten().any(State::in_flight)
}

/// Every reason has its words; whoever is not done has somebody responsible and something that comes next, and where only a
/// person helps, there is something to do.
pub(super) fn explains(facts: &Snapshot, plan: &Plan) -> Result<(), TestCaseError> {
    let pools = policy::resolve(&facts.sources, facts.daemon_sets.values(), &facts.namespace);
    for (pool, planned) in pools.iter().zip(&plan.pools) {
        for (node, verdict) in &planned.nodes {
            let about = About { snapshot: facts, pool, plan: planned, node, verdict, many_drivers: false };
            let reason = &verdict.reason;
            let done = reason.kind() == Kind::Done;
            prop_assert!(!reason.to_string().is_empty() && !reason.code().is_empty());
            prop_assert_eq!(culprits(&about).is_empty(), done, "who is responsible for {}: {}", node, reason);
            prop_assert_eq!(next(&about).is_none(), done, "what is next for {}: {}", node, reason);
            let helpless = reason.motion() == Motion::NeedsAPerson && advice(&about).is_empty();
            prop_assert!(!helpless, "what can be done about {}: {}", node, reason);
        }
    }
    Ok(())
}

/// Whether a walk may go from one state to another in one write, by the table of `docs/walk.md`.
fn is_documented(from: State, to: State) -> bool {
    use State::{
        CordonRequired as Cordon, DrainRequired as Drain, PodDeletionRequired as PodDeletion,
        PodRestartRequired as PodRestart, UncordonRequired as Uncordon, Unknown, UpgradeDone as Done,
        UpgradeFailed as Failed, UpgradeRequired as Required, ValidationRequired as Validation,
        WaitForJobsRequired as WaitForJobs,
    };
    let ways: &[State] = match from {
        Unknown => &[Required, Done],
        Done => &[Required],
        Required => &[Cordon, Done],
        Cordon => &[WaitForJobs, PodRestart],
        WaitForJobs => &[PodDeletion, Drain, PodRestart],
        PodDeletion => &[PodRestart, Drain, Failed],
        Drain => &[PodRestart, PodDeletion, Failed],
        PodRestart => &[Validation, WaitForJobs, Failed],
        Validation => &[Uncordon, PodRestart, Failed],
        Uncordon => &[Done, Validation, Failed],
        Failed => &[Required, Validation],
    };
    // Before the driver is touched the way back is open: the version was taken back, or the node is given back.
    ways.contains(&to) || (from.before_restart() && matches!(to, Validation | Required))
}
