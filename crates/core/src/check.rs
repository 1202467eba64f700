//! The safety promises as code, written apart from the planner.
//!
//! They judge what we are about to do, not the world: a rack that fails beside us is not our violation. They run in
//! tests, in simulation and in production; an action that breaks one is dropped, and its pool with it for that pass.
//! They look things up for themselves and share no decision with the planner.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use jiff::SignedDuration;

use crate::action::{Action, DeleteWhy, NodePatch, PodRef, RestartDriver};
use crate::api::{Previous, Refresh, RolloutPhase, StagePhase};
use crate::contract::{
    AGENT_CORDON_ANNOTATION, CANARY_LABEL, GPU_DRIVER, HEALTH_HOLD_ANNOTATION, State, VISIT_ANNOTATION,
};
use crate::health::Shield;
use crate::names::{GateName, NodeName, PoolName, RevisionHash};
use crate::plan::{Plan, PoolPlan, PoolStatus, uses_device};
use crate::policy::{self, CANARY_STAGE, Pick, Policy, Pool, Stage};
use crate::snapshot::{DaemonSet, Node, Object, Pod, Rollout, SetbackKind, Snapshot};
use crate::version::DriverVersion;
use crate::visit::{Visit, Walk};

/// A promise that an action would break.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Violation {
    /// Which promise.
    pub promise: Promise,
    /// The pool.
    pub pool: PoolName,
    /// The node.
    pub node: NodeName,
    /// The action's place in the plan.
    pub action: usize,
}

/// The promises (the numbers are those of `docs/promises.md`).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Promise {
    /// S1: pods are taken off only nodes that we own and that are cordoned; stale driver clients apart.
    OnlyOwnNodes,
    /// S2: only our own cordon is lifted, or the driver manager's on a visit of ours; only after validation, and never on a
    /// node that needs a reboot.
    OnlyOwnCordon,
    /// S3: no start takes more nodes out than agreed.
    WithinLimits,
    /// S4: a driver restarts only when nobody uses the device.
    NobodyOnTheDevice,
    /// S5: an atom starts whole or not at all.
    WholeAtoms,
    /// S9: a paused or frozen pool does nothing.
    StandsStill,
    /// S15: nothing starts outside of a window.
    InWindows,
    /// S16: nothing starts before its stage is open.
    InOpenStages,
    /// S17: nothing starts towards a version that was taken back.
    NotTakenBack,
    /// S7: a node is given back with a new driver only when all gates have let this very driver pass.
    GatesPassed,
    /// S18: nothing starts towards a version that an enforced matrix does not list.
    OnlyListed,
}

impl fmt::Display for Promise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Promise::OnlyOwnNodes => "S1 never take pods off a node that is not ours and cordoned",
            Promise::OnlyOwnCordon => "S2 never lift a cordon that is not ours, or before validation",
            Promise::WithinLimits => "S3 never take out more nodes than agreed",
            Promise::NobodyOnTheDevice => "S4 never restart a driver under running work",
            Promise::WholeAtoms => "S5 never start a part of an atom",
            Promise::StandsStill => "S9 never act in a paused or frozen pool",
            Promise::InWindows => "S15 never start outside of a window",
            Promise::InOpenStages => "S16 never start a node before its stage is open",
            Promise::NotTakenBack => "S17 never start towards a version that was taken back",
            Promise::GatesPassed => "S7 never give a node back before its gates have passed",
            Promise::OnlyListed => "S18 never start towards a version that an enforced matrix does not list",
        })
    }
}

/// The promises that `plan` would break.
pub fn violations(snapshot: &Snapshot, plan: &Plan) -> Vec<Violation> {
    // All promises are about nodes, and most passes want nothing of any.
    if plan.actions.iter().all(|action| action.node().is_none()) {
        return Vec::new();
    }
    let pools = policy::resolve(&snapshot.sources, snapshot.daemon_sets.values(), &snapshot.namespace);
    let mut found = Vec::new();
    let mut claimed = BTreeSet::new();
    for done in &plan.pools {
        let policy = pools
            .iter()
            .find(|pool| pool.name == done.name)
            .and_then(|pool: &Pool| pool.policy.as_ref().ok());
        let mine = plan
            .actions
            .iter()
            .enumerate()
            .filter(|(_, action)| action.node().is_some_and(|n| done.nodes.contains_key(n)));
        let mine: Vec<(usize, &Action)> =
            mine.filter(|(_, action)| belongs(action, done, snapshot)).collect();
        claimed.extend(mine.iter().map(|(i, _)| *i));
        let mut report = |promise, broken: Vec<(usize, NodeName)>| {
            found.extend(broken.into_iter().map(|(action, node)| Violation {
                promise,
                pool: done.name.clone(),
                node,
                action,
            }));
        };
        report(Promise::OnlyOwnNodes, foreign_nodes(snapshot, policy, &mine));
        report(Promise::StandsStill, restless(done, &mine));
        if let Some(policy) = policy {
            report(Promise::OnlyOwnCordon, foreign_cordons(snapshot, policy, &mine));
            report(Promise::WithinLimits, beyond_limits(snapshot, policy, done, &mine));
            report(Promise::WithinLimits, beyond_spread(snapshot, policy, done, &mine));
            report(Promise::NobodyOnTheDevice, under_work(snapshot, policy, &mine));
            report(Promise::WholeAtoms, parts_of_atoms(snapshot, policy, done, &mine));
            report(Promise::InWindows, out_of_hours(snapshot, policy, done, &mine));
            report(Promise::InOpenStages, before_their_stage(snapshot, policy, done, &mine));
            report(Promise::NotTakenBack, taken_back(snapshot, policy, done, &mine));
            report(Promise::GatesPassed, before_its_gates(snapshot, policy, &mine));
            report(Promise::OnlyListed, not_listed(snapshot, policy, done, &mine));
        }
    }
    found.extend(on_nobodys_behalf(plan, &claimed));
    found
}

/// Actions on nodes of no pool, or in the name of a pool that does not have the node.
fn on_nobodys_behalf(plan: &Plan, claimed: &BTreeSet<usize>) -> Vec<Violation> {
    let stray = plan.actions.iter().enumerate().filter(|(i, _)| !claimed.contains(i));
    let violation = |(action, stray): (usize, &Action)| {
        let pool = match stray {
            Action::ReadNode(_) => return None,
            Action::PatchNode(patch) => patch.pool.clone(),
            _ => "none".into(),
        };
        let node = stray.node()?.clone();
        Some(Violation { promise: Promise::OnlyOwnNodes, pool, node, action })
    };
    stray.filter_map(violation).collect()
}

/// An action on a node that several drivers share belongs to the pool that made it.
fn belongs(action: &Action, done: &PoolPlan, snapshot: &Snapshot) -> bool {
    match action {
        Action::PatchNode(patch) => patch.pool == done.name,
        Action::RestartDriver(restart) => restart.driver == done.driver,
        Action::AskCheckpoint(pod, _) | Action::Evict(pod) | Action::Delete(pod, _) => {
            visit(snapshot, &pod.node).is_none_or(|visit| visit.drivers.contains_key(&done.driver))
        }
        _ => false,
    }
}

fn visit<'a>(snapshot: &'a Snapshot, node: &NodeName) -> Option<&'a Visit> {
    snapshot.nodes.get(node)?.visit.as_ref()?.as_ref().ok()
}

type Broken = Vec<(usize, NodeName)>;

fn foreign_nodes(snapshot: &Snapshot, policy: Option<&Policy>, mine: &[(usize, &Action)]) -> Broken {
    let touches_pods = |action: &Action| {
        matches!(
            action,
            Action::AskCheckpoint(..) | Action::Evict(_) | Action::Delete(..) | Action::RestartDriver(_)
        )
    };
    let ours = |node: &NodeName| {
        visit(snapshot, node).is_some() && snapshot.nodes.get(node).is_some_and(|n| n.unschedulable)
    };
    // A client that its DaemonSet makes again may be replaced under running work, where the policy says so.
    let always = policy.is_some_and(|policy| policy.clients.refresh == Refresh::Always);
    let is_driver = |pod: &Pod| policy.is_some_and(|p| p.is_driver(&pod.name.namespace, &pod.labels));
    let replaceable = |pod: &PodRef| {
        let driver = snapshot.pods_on(&pod.node).find(|pod| is_driver(pod) && pod.deleting.is_none());
        let ready = driver.and_then(|driver| driver.ready_since.max(driver.started));
        let pod = snapshot.pods.get(&pod.node).and_then(|pods| pods.get(&pod.name));
        let stale = |pod: &Pod| pod.is_daemon() && !is_driver(pod) && pod.oldest_started <= ready;
        always && pod.is_some_and(stale)
    };
    let is_refresh =
        |action: &Action| matches!(action, Action::Delete(pod, DeleteWhy::StaleClient) if replaceable(pod));
    let broken = mine.iter().filter(|(_, action)| touches_pods(action) && !is_refresh(action));
    broken
        .filter_map(|(i, action)| action.node().filter(|node| !ours(node)).map(|node| (*i, node.clone())))
        .collect()
}

fn foreign_cordons(snapshot: &Snapshot, policy: &Policy, mine: &[(usize, &Action)]) -> Broken {
    let may_lift = |node: &NodeName| {
        let visit = visit(snapshot, node);
        // Validated, or given back before its driver was touched, in this attempt or an earlier one.
        let drivers =
            || snapshot.pods_on(node).filter(|pod| policy.is_driver(&pod.name.namespace, &pod.labels));
        let untouched = |visit: &Visit, walk: &Walk| {
            walk.state.before_restart()
                && walk.attempts == 0
                && drivers().all(|pod| pod.deleting.is_some() || visit.found(pod.created))
        };
        let may = |v: &Visit, walk: &Walk| walk.state == State::UncordonRequired || untouched(v, walk);
        let at_the_end = |v: &Visit| v.drivers.get(&policy.driver).is_some_and(|walk| may(v, walk));
        let facts = snapshot.nodes.get(node);
        let managed = policy.driver.as_str() == GPU_DRIVER;
        let adopted =
            managed && facts.is_some_and(|node| node.annotations.contains_key(AGENT_CORDON_ANNOTATION));
        let whole = facts.is_some_and(|node| node.needs_reboot().is_none());
        visit.is_some_and(|v| (v.holds.cordon || adopted) && whole && at_the_end(v))
    };
    let lifts = patches(mine).filter(|(_, patch)| patch.unschedulable == Some(false));
    lifts.filter(|(_, patch)| !may_lift(&patch.node)).map(|(i, patch)| (i, patch.node.clone())).collect()
}

fn restless(done: &PoolPlan, mine: &[(usize, &Action)]) -> Broken {
    if done.status == PoolStatus::Active {
        return Vec::new();
    }
    let frozen = matches!(done.status, PoolStatus::Frozen(_));
    // A pause may be noted in the record of a node that is on a visit, and a hold may end: state and cordon stay as they
    // are.
    let only_notes = |patch: &NodePatch| {
        let keeps_place = patch.to.is_none() && patch.unschedulable.is_none();
        let noted = patch.labels.is_empty() && patch.annotations.get(VISIT_ANNOTATION).flatten().is_some();
        let ends_hold = patch.annotations.get(HEALTH_HOLD_ANNOTATION) == Some(None)
            && patch.labels.iter().all(|(key, _)| Shield::ALL.iter().any(|shield| shield.label() == key));
        !frozen && keeps_place && (noted || ends_hold)
    };
    mine.iter()
        .filter(|(_, action)| !matches!(action, Action::PatchNode(patch) if only_notes(patch)))
        .filter_map(|(i, action)| action.node().map(|node| (*i, node.clone())))
        .collect()
}

/// Starts (the transitions into `cordon-required`) that exceed either limit, counted afresh.
fn beyond_limits(snapshot: &Snapshot, policy: &Policy, done: &PoolPlan, mine: &[(usize, &Action)]) -> Broken {
    let starts: Vec<(usize, &NodePatch)> = starts(mine).collect();
    if starts.is_empty() {
        return Vec::new();
    }
    let walking = |name: &NodeName, node: &Node| is_walking(snapshot, policy, name, node);
    let (mut total, mut moving, mut out) = (0, 0, 0);
    for (name, node) in members(snapshot, done) {
        let walking = walking(name, node);
        total += 1;
        moving += usize::from(walking);
        out += usize::from(walking || node.is_out() || comes_back_out(policy, node));
    }
    let limit = policy.max_unavailable.of(total);
    let mut started = BTreeSet::new();
    let mut broken = Vec::new();
    for (i, patch) in starts {
        let (name, was_in) = match snapshot.nodes.get_key_value(&patch.node) {
            Some((name, node)) => (name, !node.is_out() && !walking(name, node)),
            None => (&patch.node, true),
        };
        moving += 1;
        let newly_out = started.insert(name) && was_in;
        out += usize::from(newly_out);
        let too_many_moving = policy.max_parallel > 0 && moving > policy.max_parallel as usize;
        if too_many_moving || limit == 0 || (newly_out && out > limit) {
            broken.push((i, patch.node.clone()));
        }
    }
    broken
}

/// Starts that take more nodes of one group out than the policy allows, counted afresh.
fn beyond_spread(snapshot: &Snapshot, policy: &Policy, done: &PoolPlan, mine: &[(usize, &Action)]) -> Broken {
    let Some(spread) = &policy.topology.spread else { return Vec::new() };
    let group = |node: &'_ Node| node.labels().get(&spread.label).filter(|value| !value.is_empty()).cloned();
    let is_out = |name: &NodeName, node: &Node| {
        node.is_out() || comes_back_out(policy, node) || is_walking(snapshot, policy, name, node)
    };
    let mut groups: BTreeMap<String, (usize, usize)> = BTreeMap::new();
    for (name, node) in members(snapshot, done) {
        if let Some(group) = group(node) {
            let (total, out) = groups.entry(group).or_default();
            (*total, *out) = (*total + 1, *out + usize::from(is_out(name, node)));
        }
    }
    let mut broken = Vec::new();
    for (i, patch) in starts(mine) {
        let Some(node) = snapshot.nodes.get(&patch.node).filter(|node| !is_out(&patch.node, node)) else {
            continue;
        };
        if let Some((total, out)) = group(node).and_then(|group| groups.get_mut(&group)) {
            *out += 1;
            if *out > spread.max.of(*total) {
                broken.push((i, patch.node.clone()));
            }
        }
    }
    broken
}

/// Starts of some nodes of an atom, while others of it are out of date, not left out, and stay where they are. An atom
/// that is on its walk already may be finished.
fn parts_of_atoms(
    snapshot: &Snapshot,
    policy: &Policy,
    done: &PoolPlan,
    mine: &[(usize, &Action)],
) -> Broken {
    let Some(label) = &policy.topology.atom else { return Vec::new() };
    let starts: Vec<(usize, &NodeName)> = starts(mine).map(|(i, patch)| (i, &patch.node)).collect();
    if starts.is_empty() {
        return Vec::new();
    }
    let atom =
        |name: &NodeName| snapshot.nodes.get(name)?.labels().get(label).filter(|atom| !atom.is_empty());
    let has_to_go = |name: &NodeName, node: &Node| {
        let skipped = node.mark(&policy.keys.skip) == Some("true");
        !skipped
            && !has_failed(policy, node)
            && !node.is_out_again(&policy.driver)
            && driver_is_current(snapshot, policy, done, name) == Some(false)
            && !is_left_alone(snapshot, policy, done, name)
    };
    let started: BTreeSet<&NodeName> = starts.iter().map(|(_, name)| *name).collect();
    let (mut under_way, mut torn) = (BTreeSet::new(), BTreeSet::new());
    for (name, node) in members(snapshot, done) {
        let Some(atom) = atom(name) else { continue };
        if is_walking(snapshot, policy, name, node) {
            under_way.extend(Some(atom).filter(|_| !node.is_out_again(&policy.driver)));
        } else if !started.contains(name) && has_to_go(name, node) {
            torn.insert(atom);
        }
    }
    let again =
        |name: &NodeName| snapshot.nodes.get(name).is_some_and(|node| node.is_out_again(&policy.driver));
    let is_part = |name: &NodeName| {
        atom(name).is_some_and(|atom| torn.contains(atom) && !under_way.contains(atom))
            && !again(name)
            && !only_loads(snapshot, policy, done, name)
    };
    starts.into_iter().filter(|(_, name)| is_part(name)).map(|(i, name)| (i, name.clone())).collect()
}

/// Starts while no window is open, and cordons of nodes that were only told to start. A node without any driver starts at any
/// time.
fn out_of_hours(snapshot: &Snapshot, policy: &Policy, done: &PoolPlan, mine: &[(usize, &Action)]) -> Broken {
    if policy.windows.at(snapshot.now, SignedDuration::ZERO).is_open() {
        return Vec::new();
    }
    // Whoever wrote that label, and whenever.
    let begins = |patch: &NodePatch| {
        let told = patch.to.as_ref().is_some_and(|to| to.from == State::CordonRequired);
        let recorded = patch.annotations.get(VISIT_ANNOTATION).flatten().is_some();
        told && recorded && visit(snapshot, &patch.node).is_none()
    };
    // An atom that has begun is not split by the hour.
    let atom = |node: &Node| policy.topology.atom_of(node.labels()).map(str::to_owned);
    let moving = snapshot
        .nodes
        .values()
        .filter(|node| node.walk_of(&policy.driver).is_some_and(|walk| walk.state.in_flight()));
    let moving: BTreeSet<String> = moving.filter_map(atom).collect();
    let follows =
        |name: &NodeName| snapshot.nodes.get(name).and_then(atom).is_some_and(|atom| moving.contains(&atom));
    let begun = patches(mine).filter(|(_, patch)| begins(patch) && !follows(&patch.node));
    let late = starts(mine).chain(begun);
    let late = late.filter(|(_, patch)| !only_loads(snapshot, policy, done, &patch.node));
    late.map(|(i, patch)| (i, patch.node.clone())).collect()
}

/// The rollouts of a pool by their numbers.
fn rollouts<'a>(snapshot: &'a Snapshot, done: &PoolPlan) -> BTreeMap<u32, &'a Rollout> {
    let mine = snapshot.rollouts.iter().filter(|(_, rollout)| rollout.spec.policy == done.name.as_str());
    mine.filter_map(|(name, rollout)| Some((name.rsplit_once('-')?.1.parse().ok()?, rollout))).collect()
}

/// The newest rollout of this target that nobody has cleared, as the API has it.
fn rollout<'a>(snapshot: &'a Snapshot, done: &PoolPlan) -> Option<&'a Rollout> {
    let mut newest_first = rollouts(snapshot, done).into_values().rev();
    newest_first.find(|rollout| rollout.spec.cleared.is_none() && is_target(&rollout.spec.target, done))
}

fn is_target(recorded: &BTreeMap<String, String>, done: &PoolPlan) -> bool {
    let target = done.target.iter().map(|(set, hash)| (set.as_str(), hash.as_str()));
    recorded.iter().map(|(set, hash)| (set.as_str(), hash.as_str())).eq(target)
}

/// Nodes go back to what ran before a version that was taken back: by no stages. A DaemonSet that the rollout did not
/// change is not in what ran before.
fn goes_back(snapshot: &Snapshot, done: &PoolPlan) -> bool {
    // The one under way says so itself, whatever became of the rollout that went wrong.
    let newest = rollouts(snapshot, done).into_values().next_back();
    let spent = |rollout: &&Rollout| rollout.spec.cleared.is_some() && rollout.went_wrong();
    if let Some(newest) = newest.filter(|newest| is_target(&newest.spec.target, done) && !spent(newest)) {
        return newest.spec.rollback_of.is_some();
    }
    let has_version = |set: &str, hash: Option<&String>, previous: &Previous| {
        let mut sets = snapshot.daemon_sets.values().filter(|known| &*known.name.name == set);
        sets.any(|known| {
            let mut own = snapshot.revisions.values().filter(|revision| revision.owner == known.uid);
            let own = own.find(|revision| Some(revision.hash.as_str()) == hash.map(String::as_str));
            let own = own.and_then(|revision| revision.driver_version.clone());
            let others = || previous.version.as_ref().and_then(|version| version.parse().ok());
            let before = own.or_else(others);
            before.is_some() && before == known.driver_version
        })
    };
    let brings_back = |rollout: &Rollout| {
        let Some(previous) = &rollout.spec.previous else { return false };
        done.target.iter().all(|(set, hash)| {
            let before = previous.target.get(set).or_else(|| rollout.spec.target.get(set));
            before.is_some_and(|before| before == hash.as_str()) || has_version(set, before, previous)
        })
    };
    rollouts(snapshot, done).into_values().any(|rollout| rollout.is_taken_back() && brings_back(rollout))
}

/// Starts of nodes without the labels of any stage that is open. Where stages are counted out, only a person could tell.
/// A node without any driver, and one that a person tries again, start whatever their stage. On the way back no stage is open,
/// and those start that have to go back.
fn before_their_stage(
    snapshot: &Snapshot,
    policy: &Policy,
    done: &PoolPlan,
    mine: &[(usize, &Action)],
) -> Broken {
    if goes_back(snapshot, done) {
        let starts = starts(mine).map(|(i, patch)| (i, patch.node.clone()));
        return starts.filter(|(_, name)| is_left_alone(snapshot, policy, done, name)).collect();
    }
    let said = rollout(snapshot, done).and_then(|rollout| rollout.status.as_ref());
    // Stages that were thought of later are for the next version.
    if said.is_some_and(|status| status.phase == RolloutPhase::Done) {
        return Vec::new();
    }
    let said = said.map(|status| status.stages.as_slice()).unwrap_or_default();
    let has_passed =
        |stage: &&Stage| said.iter().any(|said| said.name == stage.name && said.phase == StagePhase::Passed);
    let stages = &policy.rollout.stages;
    let passed = stages.iter().take_while(has_passed).count();
    let open = stages.iter().take(passed + 1);
    let takes = |stage: &Stage, node: &Node| match &stage.pick {
        Pick::Labelled(labels) => labels.iter().all(|(key, value)| node.labels().get(key) == Some(value)),
        Pick::First(_) | Pick::Rest => true,
    };
    // Without stages the documented label makes one.
    let is_canary = |node: &Node| node.mark(CANARY_LABEL) == Some("true");
    let canaries = stages.is_empty() && members(snapshot, done).any(|(_, node)| is_canary(node));
    let tried = said.iter().any(|said| said.name == CANARY_STAGE && said.phase == StagePhase::Passed);
    let is_open = |node: &Node| {
        let of_the_label = stages.is_empty() && (!canaries || tried || is_canary(node));
        of_the_label || open.clone().any(|stage| takes(stage, node))
    };
    let by_hand = |node: &Node| node.walk_of(&policy.driver).is_some_and(|walk| walk.by_hand);
    let early = |name: &NodeName| {
        let node = snapshot.nodes.get(name).filter(|node| !by_hand(node));
        node.is_some_and(|node| !is_open(node))
    };
    let early = starts(mine).filter(|(_, patch)| early(&patch.node));
    let early = early.filter(|(_, patch)| !only_loads(snapshot, policy, done, &patch.node));
    early.map(|(i, patch)| (i, patch.node.clone())).collect()
}

/// Starts towards a target that somebody has taken back, and restarts of drivers of before it that were left alone so far. A node
/// without any driver is brought one.
fn taken_back(snapshot: &Snapshot, policy: &Policy, done: &PoolPlan, mine: &[(usize, &Action)]) -> Broken {
    if !rollout(snapshot, done).is_some_and(Rollout::is_taken_back) {
        return Vec::new();
    }
    let starts = starts(mine).filter(|(_, patch)| !only_loads(snapshot, policy, done, &patch.node));
    let starts = starts.map(|(i, patch)| (i, patch.node.clone()));
    let restarts = mine.iter().filter_map(|(i, action)| match action {
        Action::RestartDriver(restart) if takes_old_driver(snapshot, policy, done, restart) => {
            Some((*i, restart.pod.node.clone()))
        }
        _ => None,
    });
    starts.chain(restarts).collect()
}

/// The driver of before works, was there when the visit began, and nobody may have told it to go.
fn takes_old_driver(snapshot: &Snapshot, policy: &Policy, done: &PoolPlan, restart: &RestartDriver) -> bool {
    let (name, pod) = (&restart.pod.node, &restart.pod);
    let Some(visit) = visit(snapshot, name) else { return false };
    let first = visit.drivers.get(&policy.driver).is_some_and(|walk| walk.attempts == 0);
    let told = snapshot.setbacks.contains_key(&Object::Pod(pod.name.clone()));
    let whole = snapshot.nodes.get(name).is_some_and(|node| node.needs_reboot().is_none());
    let works = |pod: &Pod| pod.ready && pod.deleting.is_none() && visit.found(pod.created);
    let stands = snapshot.pods_on(name).find(|known| known.uid == pod.uid).is_some_and(works);
    first && !told && whole && stands && driver_is_current(snapshot, policy, done, name) == Some(false)
}

/// Ends of visits with a driver that some gate has not let pass: by what the visit says, of the pod that runs now.
fn before_its_gates(snapshot: &Snapshot, policy: &Policy, mine: &[(usize, &Action)]) -> Broken {
    let wanted: Vec<_> = policy.rollout.gates.iter().filter(|gate| gate.stage_nodes.is_none()).collect();
    let ends = patches(mine).filter(|(_, patch)| {
        let to = patch.to.as_ref();
        to.is_some_and(|t| t.to == State::UpgradeDone && t.from == State::UncordonRequired)
    });
    let proven = |node: &NodeName| {
        let walk = visit(snapshot, node).and_then(|visit| visit.drivers.get(&policy.driver));
        let driver =
            |pod: &&Pod| policy.is_driver(&pod.name.namespace, &pod.labels) && pod.deleting.is_none();
        let pod = snapshot.pods_on(node).find(driver);
        let runs = pod.map(|pod| format!("{}/{:x}", pod.uid, pod.incarnation));
        let passed = |gate: &GateName| walk.and_then(|walk| walk.gates.get(gate)?.passed.clone());
        wanted.iter().all(|gate| runs.is_some() && passed(&gate.name) == runs)
    };
    ends.filter(|(_, patch)| !proven(&patch.node)).map(|(i, patch)| (i, patch.node.clone())).collect()
}

/// Starts towards a version that no entry of an enforced matrix lists, a matrix that is not there or cannot be read
/// included. A node without any driver is brought one, and the way back is always open.
fn not_listed(snapshot: &Snapshot, policy: &Policy, done: &PoolPlan, mine: &[(usize, &Action)]) -> Broken {
    let Some(key) = policy.rollout.matrix.as_ref().filter(|m| m.enforce).map(|m| m.key.as_str()) else {
        return Vec::new();
    };
    if goes_back(snapshot, done) {
        return Vec::new();
    }
    let matrix = snapshot.matrices.as_ref().and_then(|files| files.get(key)?.ok());
    let is_listed = |set: &DaemonSet| {
        let version = set.driver_version.as_ref();
        let mut entries = matrix.into_iter().flat_map(|matrix| matrix.entries.values());
        version.is_some() && entries.any(|entry| entry.driver.as_ref() == version)
    };
    let listed = |name: &NodeName| driver_sets(snapshot, policy, name).into_iter().any(is_listed);
    let starts = starts(mine).filter(|(_, patch)| !listed(&patch.node));
    let starts = starts.filter(|(_, patch)| !only_loads(snapshot, policy, done, &patch.node));
    starts.map(|(i, patch)| (i, patch.node.clone())).collect()
}

fn has_failed(policy: &Policy, node: &Node) -> bool {
    let recorded = node.walk_of(&policy.driver).map(|walk| walk.state);
    let labelled = || node.mark(&policy.keys.state).and_then(|value| value.parse::<State>().ok());
    recorded.or_else(labelled) == Some(State::UpgradeFailed)
}

/// It failed under somebody else's cordon, and is cordoned again if that was lifted: no place of it becomes free.
fn comes_back_out(policy: &Policy, node: &Node) -> bool {
    let visit = node.visit.as_ref().and_then(|visit| visit.as_ref().ok());
    visit.is_some_and(|visit| !visit.holds.cordon) && has_failed(policy, node)
}

/// The wanted driver is there and waits to be loaded: the node has none.
fn only_loads(snapshot: &Snapshot, policy: &Policy, done: &PoolPlan, name: &NodeName) -> bool {
    let waits = |node: &Node| node.annotations.get(&policy.keys.safe_load).is_some_and(|v| !v.is_empty());
    snapshot.nodes.get(name).is_some_and(waits)
        && driver_is_current(snapshot, policy, done, name) == Some(true)
}

/// The DaemonSets that make the node's driver pods; if it has none of them, those that are meant for it.
fn driver_sets<'a>(snapshot: &'a Snapshot, policy: &Policy, name: &NodeName) -> Vec<&'a DaemonSet> {
    let Some(node) = snapshot.nodes.get(name) else { return Vec::new() };
    let sets = snapshot.daemon_sets.values().filter(|ds| policy.is_driver(&ds.name.namespace, &ds.labels));
    let owns = |set: &DaemonSet| {
        let mut owners = snapshot.pods_on(name).filter_map(|pod| pod.owner.as_ref());
        owners.any(|owner| owner.uid == set.uid)
    };
    let is_meant = |set: &DaemonSet| set.node_selector.iter().all(|(k, v)| node.labels().get(k) == Some(v));
    let (making, others): (Vec<_>, Vec<_>) = sets.partition(|set| owns(set));
    if making.is_empty() { others.into_iter().filter(|set| is_meant(set)).collect() } else { making }
}

/// Whether the node's driver pod is of the newest template, or, on the way back, of the wanted version, unless a rollout
/// brought it that went wrong; `None` if nobody can tell.
fn driver_is_current(snapshot: &Snapshot, policy: &Policy, done: &PoolPlan, name: &NodeName) -> Option<bool> {
    let driver = |pod: &&Pod| policy.is_driver(&pod.name.namespace, &pod.labels) && pod.deleting.is_none();
    let pod = snapshot.pods_on(name).find(driver)?;
    let daemon_set = snapshot.daemon_sets.get(&pod.owner.as_ref()?.uid)?;
    let revisions = snapshot.revisions.values().filter(|revision| revision.owner == daemon_set.uid);
    let newest = revisions.max_by_key(|revision| revision.number)?;
    let known = daemon_set.observed_generation == daemon_set.generation;
    let has_to_go = |rollout: &Rollout| {
        let name = daemon_set.name.name.as_ref();
        let target = rollout.spec.target.get(name).map(String::as_str);
        let of = |hash: &RevisionHash| target == Some(hash.as_str());
        let brought =
            rollout.spec.previous.as_ref().is_none_or(|previous| previous.target.contains_key(name));
        let bad = brought && rollout.went_wrong() && rollout.spec.cleared.is_none();
        (bad && pod.revision.as_ref().is_some_and(of))
            || (rollout.spec.rollback_of.is_none() && of(&newest.hash))
    };
    let spared = || {
        let version = DriverVersion::from_image(&pod.image);
        goes_back(snapshot, done)
            && version.is_some_and(|version| daemon_set.driver_version.as_ref() == Some(&version))
            && !rollouts(snapshot, done).into_values().any(has_to_go)
    };
    known.then(|| pod.revision.as_ref() == Some(&newest.hash) || spared())
}

/// On the way back: its driver is of another version than the wanted one, and no rollout that went wrong has asked for that.
fn is_left_alone(snapshot: &Snapshot, policy: &Policy, done: &PoolPlan, name: &NodeName) -> bool {
    let tried = snapshot.nodes.get(name).and_then(|node| node.walk_of(&policy.driver)).is_some();
    let driver = |pod: &&Pod| policy.is_driver(&pod.name.namespace, &pod.labels) && pod.deleting.is_none();
    let Some(pod) = snapshot.pods_on(name).find(driver).filter(|_| !tried) else { return false };
    let Some(daemon_set) = pod.owner.as_ref().and_then(|owner| snapshot.daemon_sets.get(&owner.uid)) else {
        return false;
    };
    let version = DriverVersion::from_image(&pod.image);
    let asked_for = |rollout: &Rollout| {
        let hash = rollout.spec.target.get(&*daemon_set.name.name);
        let brings = rollout.spec.version.as_ref().and_then(|version| version.parse().ok());
        pod.revision.as_ref().is_none_or(|own| hash.is_some_and(|hash| hash == own.as_str()))
            || (brings.is_some() && brings == version)
    };
    let wrong = rollouts(snapshot, done).into_values().filter(|rollout| rollout.went_wrong());
    let other =
        version.is_some() && daemon_set.driver_version.is_some() && version != daemon_set.driver_version;
    // Where nobody knows any more what they come back from, all of them do.
    let known = |bad: &String| snapshot.rollouts.contains_key(bad);
    let newest = rollouts(snapshot, done).into_values().next_back();
    let known = newest.is_some_and(|newest| newest.spec.rollback_of.as_ref().is_none_or(known));
    let outdated = || driver_is_current(snapshot, policy, done, name) == Some(false);
    goes_back(snapshot, done) && known && other && !wrong.into_iter().any(asked_for) && outdated()
}

/// Between slot and release, as far as the record, the label or a write under way says so. A write whose outcome is not
/// known may have been a start.
fn is_walking(snapshot: &Snapshot, policy: &Policy, name: &NodeName, node: &Node) -> bool {
    let visit = node.visit.as_ref().and_then(|visit| visit.as_ref().ok());
    let recorded = visit.and_then(|visit| visit.drivers.get(&policy.driver)).map(|walk| walk.state);
    let labelled = || node.mark(&policy.keys.state).and_then(|value| value.parse::<State>().ok());
    let sent = || {
        let pending = snapshot.in_flight.get(&Object::Node(name.clone()))?;
        pending.moving_to.as_ref().filter(|(driver, _)| *driver == policy.driver).map(|(_, state)| *state)
    };
    let unknown = || {
        let setback = snapshot.setbacks.get(&Object::Node(name.clone()));
        setback.is_some_and(|s| s.kind == SetbackKind::Stale && s.seen >= node.version)
    };
    let walks = |state: Option<State>| state.is_some_and(State::in_flight);
    let stands = recorded.or_else(labelled);
    walks(stands)
        || (!snapshot.in_flight.is_empty() && walks(sent()))
        || (!snapshot.setbacks.is_empty() && stands == Some(State::UpgradeRequired) && unknown())
}

/// The pool's nodes. Both maps are in order of names, so one walk over them is enough.
fn members<'a>(snapshot: &'a Snapshot, done: &'a PoolPlan) -> impl Iterator<Item = (&'a NodeName, &'a Node)> {
    let mut mine = done.nodes.keys().peekable();
    snapshot.nodes.iter().filter(move |(name, _)| {
        while mine.next_if(|member| *member < *name).is_some() {}
        mine.next_if(|member| *member == *name).is_some()
    })
}

fn under_work(snapshot: &Snapshot, policy: &Policy, mine: &[(usize, &Action)]) -> Broken {
    let uses = |pod: &Pod| uses_device(&policy.devices, pod, &snapshot.claims);
    let busy = |node: &NodeName| snapshot.pods_on(node).any(uses);
    let restarts = mine.iter().filter(|(_, action)| match action {
        Action::RestartDriver(restart) => !stays_installed(snapshot, restart),
        Action::PatchNode(patch) => patch.annotations.get(&policy.keys.safe_load) == Some(None),
        _ => false,
    });
    restarts
        .filter_map(|(i, action)| action.node().filter(|node| busy(node)).map(|node| (*i, node.clone())))
        .collect()
}

/// The pod and the template that replaces it install the same driver.
fn stays_installed(snapshot: &Snapshot, restart: &RestartDriver) -> bool {
    let pod = snapshot.pods_on(&restart.pod.node).find(|pod| pod.uid == restart.pod.uid);
    let template = pod.and_then(|pod| snapshot.daemon_sets.get(&pod.owner.as_ref()?.uid));
    let digests = pod.and_then(|pod| pod.digest.as_deref()).zip(template.and_then(|ds| ds.digest.as_deref()));
    restart.in_place && digests.is_some_and(|(old, new)| !old.is_empty() && old == new)
}

/// Writes that take a node out: into `cordon-required`.
fn starts<'a>(mine: &'a [(usize, &'a Action)]) -> impl Iterator<Item = (usize, &'a NodePatch)> {
    let is_start = |patch: &NodePatch| {
        patch.to.as_ref().is_some_and(|t| t.to == State::CordonRequired && !t.from.in_flight())
    };
    patches(mine).filter(move |(_, patch)| is_start(patch))
}

fn patches<'a>(mine: &'a [(usize, &'a Action)]) -> impl Iterator<Item = (usize, &'a NodePatch)> {
    mine.iter().filter_map(|(i, action)| match action {
        Action::PatchNode(patch) => Some((*i, patch)),
        _ => None,
    })
}
