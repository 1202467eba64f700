//! The safety promises, each a small function over one change and the cluster around it.
//!
//! They judge what pitcrew did, by what it could know: what others did a moment ago counts only after
//! [`World::lag`]. The numbers are those of `docs/promises.md`.

mod rollouts;
#[cfg(test)]
mod tests;

use std::fmt;

use jiff::Timestamp;
use pitcrew_core::contract::State;
use pitcrew_core::names::Uid;
use pitcrew_core::visit::{Cause, Walk};
use serde_json::Value;

use super::case::is_of;
use super::world::{By, CALLS, Change, Leaving, Node, Pod, ROLLOUTS, Role, Rollout, Rules, World, before};

/// A promise.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Promise {
    /// S1.
    OnlyOwnNodes,
    /// S2.
    OnlyOwnCordon,
    /// S2 too.
    OnlyProven,
    /// S3.
    WithinLimits,
    /// S4.
    NobodyOnTheDevice,
    /// S5.
    WholeAtoms,
    /// S6.
    NoLeakedHold,
    /// S7.
    GatesPassed,
    /// S8.
    BudgetsHold,
    /// S9.
    StandsStill,
    /// S10.
    OnlyPlannedNodes,
    /// S11.
    NoStaleWrite,
    /// S12.
    RecordedFirst,
    /// The walk of `docs/walk.md`.
    DocumentedWalk,
    /// S14.
    OneAtATime,
    /// S15.
    InWindows,
    /// S16.
    InOpenStages,
    /// S17.
    NotTakenBack,
    /// S18.
    OnlyListed,
    /// S19.
    OnlyTakesBack,
    /// S20.
    FailsInTime,
    /// L1, L2 and L4.
    ComesToAnEnd,
    /// L3.
    ComesToRest,
    /// L5.
    SaysWhy,
    /// L6.
    GoesBack,
    /// The planner itself: production drops such a plan, and goes on.
    PlansKeepThem,
    /// The program itself.
    StaysAlive,
}

impl Promise {
    /// Its number.
    pub fn code(self) -> &'static str {
        match self {
            Promise::OnlyOwnNodes => "S1",
            Promise::OnlyOwnCordon | Promise::OnlyProven => "S2",
            Promise::WithinLimits => "S3",
            Promise::NobodyOnTheDevice => "S4",
            Promise::WholeAtoms => "S5",
            Promise::NoLeakedHold => "S6",
            Promise::GatesPassed => "S7",
            Promise::BudgetsHold => "S8",
            Promise::StandsStill => "S9",
            Promise::OnlyPlannedNodes => "S10",
            Promise::NoStaleWrite => "S11",
            Promise::RecordedFirst => "S12",
            Promise::DocumentedWalk => "S13",
            Promise::OneAtATime => "S14",
            Promise::InWindows => "S15",
            Promise::InOpenStages => "S16",
            Promise::NotTakenBack => "S17",
            Promise::OnlyListed => "S18",
            Promise::OnlyTakesBack => "S19",
            Promise::FailsInTime => "S20",
            Promise::ComesToAnEnd => "L1",
            Promise::ComesToRest => "L3",
            Promise::SaysWhy => "L5",
            Promise::GoesBack => "L6",
            Promise::PlansKeepThem => "S0",
            Promise::StaysAlive => "L0",
        }
    }
}

impl fmt::Display for Promise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = match self {
            Promise::OnlyOwnNodes => "pods are taken off only nodes that are ours and cordoned",
            Promise::OnlyOwnCordon => "only our own cordon is lifted",
            Promise::OnlyProven => "a node is given back only with a driver that has proved itself",
            Promise::WithinLimits => "no start takes out more nodes than agreed",
            Promise::NobodyOnTheDevice => "a driver restarts only when nobody uses the device",
            Promise::WholeAtoms => "an atom starts whole or not at all",
            Promise::NoLeakedHold => "health systems are kept off a node only with a record of it",
            Promise::GatesPassed => {
                "a node is given back, and a stage is over, only when its gates have passed"
            }
            Promise::BudgetsHold => "budgets are bypassed only where the policy says so",
            Promise::StandsStill => "a pause and an abort are obeyed at once",
            Promise::OnlyPlannedNodes => "nodes outside of the plan are not touched",
            Promise::NoStaleWrite => "every write is pinned to what was seen",
            Promise::RecordedFirst => "every action is in the record before it is done",
            Promise::DocumentedWalk => "nodes walk as documented",
            Promise::OneAtATime => "an object is written by one action at a time",
            Promise::InWindows => "nothing starts outside of a window",
            Promise::InOpenStages => {
                "nothing starts before its stage is open, and a stage passes only when it is done"
            }
            Promise::NotTakenBack => "nothing starts towards a version that was taken back",
            Promise::OnlyListed => "nothing starts towards a version that an enforced matrix does not list",
            Promise::OnlyTakesBack => "the version that is asked for is changed only to take one back",
            Promise::FailsInTime => "no node fails for want of time before its time is over",
            Promise::ComesToAnEnd => "every node comes to an end once faults stop",
            Promise::ComesToRest => "then nothing is written any more",
            Promise::SaysWhy => "a node that stands still has a reason",
            Promise::GoesBack => "a version that is taken back is put back, and leaves every node",
            Promise::PlansKeepThem => "no plan would break a promise",
            Promise::StaysAlive => "the controller does not end by itself",
        };
        write!(f, "{} {words}", self.code())
    }
}

/// One change, with what it was before.
pub enum Step<'a> {
    /// Of a node.
    Node(&'a str, Option<&'a Node>, Option<&'a Node>),
    /// Of a pod.
    Pod(Option<&'a Pod>, Option<&'a Pod>),
    /// Of a rollout.
    Rollout(&'a str, Option<&'a Rollout>, Option<&'a Rollout>),
    /// Of the version that is asked for, where that is said.
    Version(&'a str, &'a str),
}

/// Times are told in whole seconds, at both ends.
const ROUNDED: i64 = 2;

/// Says what is wrong, if anything.
type Check = fn(&World, &Change<'_>, &Step<'_>) -> Option<String>;

/// All of them.
pub const SAFETY: [(Promise, Check); 24] = [
    (Promise::OnlyOwnNodes, only_own_nodes),
    (Promise::OnlyOwnCordon, only_own_cordon),
    (Promise::OnlyProven, only_proven),
    (Promise::OnlyProven, only_ready_goes_on),
    (Promise::WithinLimits, within_limits),
    (Promise::WithinLimits, rollouts::within_groups),
    (Promise::NobodyOnTheDevice, nobody_on_the_device),
    (Promise::NobodyOnTheDevice, emptied_before_the_restart),
    (Promise::WholeAtoms, rollouts::whole_atoms),
    (Promise::NoLeakedHold, no_leaked_hold),
    (Promise::GatesPassed, rollouts::gates_passed),
    (Promise::BudgetsHold, budgets_hold),
    (Promise::StandsStill, stands_still),
    (Promise::OnlyPlannedNodes, only_planned_nodes),
    (Promise::OnlyPlannedNodes, nobody_elses_node),
    (Promise::NoStaleWrite, no_stale_write),
    (Promise::RecordedFirst, recorded_first),
    (Promise::DocumentedWalk, documented_walk),
    (Promise::InWindows, rollouts::in_windows),
    (Promise::InOpenStages, rollouts::in_open_stages),
    (Promise::NotTakenBack, rollouts::not_taken_back),
    (Promise::OnlyListed, rollouts::only_listed),
    (Promise::OnlyTakesBack, rollouts::only_takes_back),
    (Promise::FailsInTime, fails_in_time),
];

/// Takes up a change. `then` gets what it changed, and the promise that it breaks; it is not called for what no promise
/// is about.
pub(super) fn take_up<T>(
    world: &mut World,
    change: &Change<'_>,
    then: impl FnOnce(&Step<'_>, Option<(Promise, String)>) -> T,
) -> Option<T> {
    if world.is_elsewhere(change) {
        return None;
    }
    let key = (change.namespace.to_owned(), change.name.to_owned());
    let is_node = change.resource == "nodes";
    let old_node = world.nodes.get(change.name).filter(|_| is_node).cloned();
    let old_pod = world.pods.get(&key).filter(|_| !is_node).cloned();
    let old_rollout = world.rollout(change.name).filter(|_| change.resource == ROLLOUTS).cloned();
    let said = |world: &World| world.version_said_by(change.resource).map(str::to_owned);
    let was_said = said(world);
    world.fold(change);
    let is_said = said(world);
    let step = match change.resource {
        "nodes" => Step::Node(change.name, old_node.as_ref(), world.nodes.get(change.name)),
        "pods" => Step::Pod(old_pod.as_ref(), world.pods.get(&key)),
        ROLLOUTS => Step::Rollout(change.name, old_rollout.as_ref(), world.rollout(change.name)),
        _ => Step::Version(was_said.as_deref()?, is_said.as_deref()?),
    };
    let is_here = match &step {
        Step::Pod(old, new) => new.or(*old).is_some_and(|pod| world.has_node(&pod.node)),
        // Two pools have one source.
        Step::Version(..) => world.pool.is_none(),
        Step::Node(..) | Step::Rollout(..) => true,
    };
    let mut checks = SAFETY.iter().filter(|_| change.by == By::Us && is_here);
    let broken = checks.find_map(|(promise, check)| Some((*promise, check(world, change, &step)?)));
    Some(then(&step, broken))
}

/// It failed, and has another driver pod since then, or needed no more than a boot.
fn is_mended(world: &World, name: &str, node: &Node) -> bool {
    let failed = node.walk().filter(|walk| walk.state == State::UpgradeFailed);
    let failure = failed.and_then(|walk| walk.failure.as_ref());
    let mut drivers = world.pods_on(name).filter(|(_, pod)| pod.role == Role::Driver && !pod.deleting);
    failure.is_some_and(|failure| {
        let pod = failure.pod.as_ref().map(Uid::as_str);
        matches!(failure.cause, Cause::NeedsReboot { .. })
            || drivers.all(|(_, driver)| pod != Some(&driver.uid))
    })
}

/// The node and the pod of a deletion that we asked for.
fn our_deletion<'a>(
    world: &'a World,
    change: &Change<'_>,
    step: &Step<'a>,
) -> Option<(&'a Pod, Option<&'a Node>)> {
    let Step::Pod(Some(pod), after) = step else { return None };
    let told = !pod.deleting && after.is_none_or(|after| after.deleting);
    (change.by == By::Us && told).then(|| (*pod, world.nodes.get(&pod.node)))
}

fn we_uncordon<'a>(change: &Change<'_>, step: &Step<'a>) -> Option<&'a Node> {
    let Step::Node(_, Some(node), Some(after)) = step else { return None };
    (change.by == By::Us && node.cordoned && !after.cordoned).then_some(*node)
}

/// The node before and after our write.
fn we_write<'a>(change: &Change<'_>, step: &Step<'a>) -> Option<(&'a str, &'a Node, &'a Node)> {
    let Step::Node(name, Some(node), Some(after)) = step else { return None };
    (change.by == By::Us).then_some((*name, *node, *after))
}

/// A driver's client on a node in service may be replaced, where the policy says so.
fn is_refresh(world: &World, change: &Change<'_>, pod: &Pod, node: Option<&Node>) -> bool {
    let in_service = node.is_none_or(|node| node.visit.is_none());
    pod.role == Role::Daemon && in_service && world.rules_at(change.at).any(|rules| rules.refresh_always)
}

/// The machine was replaced a moment ago, and its pods go by the name.
fn is_new(world: &World, change: &Change<'_>, node: Option<&Node>) -> bool {
    node.is_none_or(|node| node.since >= before(change.at, world.lag))
}

fn only_own_nodes(world: &World, change: &Change<'_>, step: &Step<'_>) -> Option<String> {
    let (pod, node) = our_deletion(world, change, step)?;
    let ours = node.is_some_and(|node| node.visit.is_some() && node.cordoned);
    // A person may have uncordoned it a moment ago; the record is ours alone.
    let lately = |node: &Node| node.visit.is_some() && node.cordon_since >= before(change.at, world.lag);
    let fine = ours
        || node.is_some_and(lately)
        || is_new(world, change, node)
        || is_refresh(world, change, pod, node);
    (!fine).then(|| {
        format!("pod {} was told to leave {}, which is not ours and cordoned", change.name, pod.node)
    })
}

fn only_own_cordon(_: &World, change: &Change<'_>, step: &Step<'_>) -> Option<String> {
    let node = we_uncordon(change, step)?;
    let (ours, at_the_end) = (node.cordoned_by_us() && !node.foreign_cordon, may_be_given_back(node));
    (!ours || !at_the_end).then(|| {
        format!("the cordon was lifted in {} ({})", node.state(), if ours { "ours" } else { "not ours" })
    })
}

/// It was proven, or nobody has touched its driver.
fn may_be_given_back(node: &Node) -> bool {
    let state = node.state();
    state == State::UncordonRequired || (state.before_restart() && !node.is_retried())
}

/// Its driver was ready when we last could know, and is of no other pod since.
fn only_proven(world: &World, change: &Change<'_>, step: &Step<'_>) -> Option<String> {
    let node = we_uncordon(change, step).filter(|node| node.state() == State::UncordonRequired)?;
    let Step::Node(name, ..) = step else { return None };
    debug_assert!(node.visit.is_some());
    match () {
        // That stands on the node itself, and the write is pinned to it.
        () if !node.ready => Some("it was given back, and is not Ready".to_owned()),
        () if !world.was_ready(name, Role::Driver, change.at) => {
            Some("it was given back, and its driver is not ready".to_owned())
        }
        () if broken(world, name, Role::Validator, change.at) => {
            Some("it was given back, and its validator is not ready".to_owned())
        }
        () => None,
    }
}

/// Nobody looks at a driver that is not even up, and nobody goes on that has not been looked at.
fn only_ready_goes_on(world: &World, change: &Change<'_>, step: &Step<'_>) -> Option<String> {
    let (name, node, after) = we_write(change, step)?;
    let validated = || world.rules_at(change.at).all(|rules| rules.validates);
    let (role, whose) = match (node.recorded()?, after.recorded()?) {
        (State::PodRestartRequired, State::ValidationRequired) => (Role::Driver, "driver"),
        // Where validators are to look, a node without one is not proven.
        (State::ValidationRequired, State::UncordonRequired) if validated() => (Role::Validator, "validator"),
        _ => return None,
    };
    let to = after.state();
    (!world.was_ready(name, role, change.at))
        .then(|| format!("it went on to {to}, and its {whose} is not ready"))
}

/// There is such a pod on the node, and none is ready or was a moment ago.
fn broken(world: &World, node: &str, role: Role, at: Timestamp) -> bool {
    world.pods_on(node).any(|(_, pod)| pod.role == role) && !world.was_ready(node, role, at)
}

fn within_limits(world: &World, change: &Change<'_>, step: &Step<'_>) -> Option<String> {
    let (name, node, after) = we_write(change, step)?;
    if node.walks() || after.state() != State::CordonRequired {
        return None;
    }
    let (out, others) = out_and_moving(world, change, |other| other == name);
    let moving = others + 1;
    let was_in = node.out_since.is_none();
    let members = world.members_at(change.at);
    let allows = |parallel: u64, limit: usize| {
        (parallel == 0 || moving <= parallel) && limit > 0 && (!was_in || out < limit)
    };
    let fine =
        world.rules_at(change.at).any(|rules| allows(rules.max_parallel, rules.max_unavailable.of(members)));
    let rules = world.rules.last()?;
    (!fine).then(|| {
        format!(
            "it started as number {moving} (maxParallelUpgrades {}), with {out} of {members} nodes out (maxUnavailable {})",
            rules.max_parallel, rules.max_unavailable
        )
    })
}

/// The nodes that are out, and those on their walk, as far as that must be known; without some.
fn out_and_moving(world: &World, change: &Change<'_>, but: impl Fn(&str) -> bool) -> (usize, u64) {
    let known = |since: Option<Timestamp>| since.is_some_and(|since| since < before(change.at, world.lag));
    let sent = before(change.at, world.lag.max(CALLS));
    let others = world.nodes.iter().filter(|(other, node)| node.member && !but(other));
    let (mut out, mut moving) = (0, 0);
    for (_, other) in others {
        // What we did is known at once; what others did, a moment later. A node that was out when it started was taken
        // out by others.
        let adopted = other.adopted_since.is_some() && !known(other.adopted_since);
        // Who needed no slot may cross starts that are on their way: a node that came up with a driver before its stage, and
        // is only out because of that; and one that had failed and was mended (seed 15449).
        let no_slot = other.slotless_since.is_some_and(|since| since >= sent);
        let early = no_slot && other.visit.as_ref().is_some_and(|visit| visit.early);
        let walks = other.walks() && !adopted && !no_slot;
        let ours = other.cordoned_by_us() && other.adopted_since.is_none() && !early;
        moving += u64::from(walks);
        out += usize::from((walks && !other.foreign_cordon) || ours || known(other.out_since));
    }
    (out, moving)
}

fn nobody_on_the_device(world: &World, change: &Change<'_>, step: &Step<'_>) -> Option<String> {
    let (driver, node) = our_deletion(world, change, step).filter(|(pod, _)| pod.role == Role::Driver)?;
    // What is installed stays the same; or it is another machine's by now.
    if is_of(&driver.image, &world.target) || is_new(world, change, node) {
        return None;
    }
    let since = before(change.at, world.lag_of_looks);
    let holds = |pod: &Pod| pod.uses_device && pod.bound_since.is_some_and(|bound| bound < since);
    let ((_, holder), _) = world.pods_on(&driver.node).find(|(_, pod)| holds(pod))?;
    Some(format!("the driver of {} was restarted under {holder}", driver.node))
}

/// A node goes on to its restart only when those who use the device have left it, or have at least been told to.
fn emptied_before_the_restart(world: &World, change: &Change<'_>, step: &Step<'_>) -> Option<String> {
    let (name, node, after) = we_write(change, step)?;
    let empties = matches!(node.recorded()?, State::PodDeletionRequired | State::DrainRequired);
    if !empties || after.recorded()? != State::PodRestartRequired || is_new(world, change, Some(node)) {
        return None;
    }
    let known = before(change.at, world.lag);
    let stays = |pod: &Pod| {
        let works = pod.role == Role::Work && pod.uses_device;
        works && !pod.deleting && pod.bound_since.is_some_and(|bound| bound < known)
    };
    let ((_, pod), _) = world.pods_on(name).find(|(_, pod)| stays(pod))?;
    Some(format!("it went on to its restart, and {pod} was not told to leave"))
}

fn no_leaked_hold(_: &World, change: &Change<'_>, step: &Step<'_>) -> Option<String> {
    let (_, node, after) = we_write(change, step)?;
    let leaked = after.shielded && !after.shield_recorded && (node.shield_recorded || !node.shielded);
    leaked.then(|| "NVSentinel is kept off it, and nothing says by whom".to_owned())
}

fn budgets_hold(world: &World, change: &Change<'_>, step: &Step<'_>) -> Option<String> {
    let (pod, node) =
        our_deletion(world, change, step).filter(|(pod, _)| matches!(pod.role, Role::Work | Role::Gate))?;
    if change.request.is_none_or(|request| request.resource == "pods/eviction") {
        return None;
    }
    let walk = node.and_then(Node::walk);
    let is_time = |leaving: &Leaving| {
        let in_time = walk.is_some_and(|walk| stands_for(world, change, walk) >= leaving.lasts());
        // Of a machine that went a moment ago nobody knows how long it stood (seed 6954).
        leaving.deletes && (in_time || is_new(world, change, node))
    };
    let drains = walk.is_some_and(|walk| walk.state == State::DrainRequired);
    let allowed =
        world.rules_at(change.at).any(|rules| is_time(if drains { &rules.drain } else { &rules.pods }));
    (!allowed).then(|| format!("pod {} on {} was deleted past its budgets", change.name, pod.node))
}

/// So many seconds at most a walk has been where it stands, by whatever clock.
fn stands_for(world: &World, change: &Change<'_>, walk: &Walk) -> i64 {
    (change.at.duration_since(walk.since) + world.clock_off).as_secs() + ROUNDED
}

/// Who has too little time fails when it is over, and not before.
fn fails_in_time(world: &World, change: &Change<'_>, step: &Step<'_>) -> Option<String> {
    let (_, node, after) = we_write(change, step)?;
    let (walk, failed) = (node.walk()?, after.walk()?);
    if walk.state == State::UpgradeFailed || failed.state != State::UpgradeFailed {
        return None;
    }
    let least = |rules: &Rules, cause: &Cause| match cause {
        Cause::DriverNotReady { .. } => rules.driver_ready,
        Cause::NeedsReboot { .. } => rules.driver_ready.min(rules.validation),
        Cause::NotValidated { .. } => rules.validation,
        Cause::PodsDidNotLeave { .. } => rules.pods.lasts().min(rules.drain.lasts()).min(rules.blocked_after),
        // These ask for no time, or have another one.
        Cause::PodsCannotLeave { .. } | Cause::ClientNotBack { .. } | Cause::Gate { .. } => 0,
    };
    let cause = &failed.failure.as_ref()?.cause;
    let stood = stands_for(world, change, walk);
    let fine = world.rules_at(change.at).any(|rules| stood >= least(rules, cause));
    (!fine).then(|| format!("it failed in {} after {stood} s at most: {cause}", walk.state))
}

fn stands_still(world: &World, change: &Change<'_>, step: &Step<'_>) -> Option<String> {
    let acts = match step {
        Step::Node(_, Some(node), Some(after)) => {
            node.state() != after.state() || node.cordoned != after.cordoned
        }
        Step::Node(..) | Step::Rollout(..) => false,
        Step::Version(was, is) => was != is,
        Step::Pod(..) => our_deletion(world, change, step).is_some(),
    };
    if change.by != By::Us || !acts {
        return None;
    }
    if world.rules_at(change.at).all(|rules| !rules.auto_upgrade) {
        return Some("something was done although the policy says autoUpgrade: false".to_owned());
    }
    let aborted = world.aborted_since()?;
    // A failed node that somebody has mended is only proven.
    let starts = |(name, node, after): (&str, &Node, &Node)| {
        let proven = after.state() == State::ValidationRequired && is_mended(world, name, node);
        !node.walks() && after.walks() && !proven && !node.loads
    };
    if we_write(change, step).is_some_and(starts) && aborted < before(change.at, world.lag) {
        return Some("it started although its rollout is aborted".to_owned());
    }
    let (pod, node) = our_deletion(world, change, step).filter(|(pod, _)| pod.role == Role::Work)?;
    let known = before(change.at, world.lag.max(CALLS));
    let stays = |pod: &Pod| {
        let old = !pod.deleting && !is_of(&pod.image, &world.target);
        pod.role == Role::Driver && old && pod.ready && pod.ready_since.is_some_and(|since| since < known)
    };
    let may_go_back = node.is_some_and(|node| !node.is_retried() && node.since < known)
        && world.pods_on(&pod.node).any(|(_, pod)| stays(pod));
    (may_go_back && aborted < known)
        .then(|| format!("pod {} was told to leave, and the rollout is aborted", change.name))
}

/// A node that NVSentinel has is not taken from it, and none is while it has stopped itself.
fn nobody_elses_node(world: &World, change: &Change<'_>, step: &Step<'_>) -> Option<String> {
    let (_, node, after) = we_write(change, step)?;
    let starts = !node.walks() && after.state() == State::CordonRequired && !node.loads;
    if !starts || !world.rules_at(change.at).all(|rules| rules.minds_nvsentinel) {
        return None;
    }
    if node.quarantined {
        return Some("it was started although NVSentinel has it in quarantine".to_owned());
    }
    let tripped = world.tripped_since.is_some_and(|since| since < before(change.at, world.lag.max(CALLS)));
    tripped.then(|| "it was started although NVSentinel's breaker is open".to_owned())
}

fn only_planned_nodes(world: &World, change: &Change<'_>, step: &Step<'_>) -> Option<String> {
    let (_, node, after) = we_write(change, step)?;
    let takes = node.visit.is_none() && after.visit.is_some();
    let is_known = |left: Timestamp| left < before(change.at, world.lag.max(CALLS));
    let has_left = !node.member && node.left_fleet.is_none_or(is_known);
    // The write was pinned to the node as it was, mark and all: there is nothing that we could not know.
    let starts = node.visit.is_none() && !node.walks() && after.walks() && !node.loads;
    match (node.member, node.skipped) {
        (false, _) if takes && has_left => Some("it was taken although it has no driver".to_owned()),
        (true, true) if starts => Some("it was started although it is to be skipped".to_owned()),
        _ => None,
    }
}

fn no_stale_write(_: &World, change: &Change<'_>, step: &Step<'_>) -> Option<String> {
    let request = change.request.filter(|_| change.by == By::Us)?;
    let body: Value = serde_json::from_slice(request.body).unwrap_or_default();
    let pinned = match (step, request.resource) {
        (Step::Node(..), _) => body["metadata"]["resourceVersion"].is_string(),
        (Step::Pod(..), "pods/eviction") => body["deleteOptions"]["preconditions"]["uid"].is_string(),
        (Step::Pod(..), _) if request.verb == "delete" => body["preconditions"]["uid"].is_string(),
        _ => true,
    };
    (!pinned).then(|| {
        format!("{} {} {} is not pinned to what was seen", request.verb, request.resource, change.name)
    })
}

fn recorded_first(world: &World, change: &Change<'_>, step: &Step<'_>) -> Option<String> {
    let (pod, node) = our_deletion(world, change, step)?;
    let state = node.map(Node::state).unwrap_or_default();
    let fine = match pod.role {
        _ if is_new(world, change, node) => true,
        Role::Driver => state == State::PodRestartRequired,
        Role::Work | Role::Gate => matches!(state, State::PodDeletionRequired | State::DrainRequired),
        Role::Validator => state == State::ValidationRequired,
        Role::Daemon => {
            matches!(state, State::DrainRequired | State::PodRestartRequired | State::ValidationRequired)
                || is_refresh(world, change, pod, node)
        }
    };
    (!fine).then(|| format!("pod {} was told to leave {} in {state}", change.name, pod.node))
}

fn documented_walk(_: &World, change: &Change<'_>, step: &Step<'_>) -> Option<String> {
    let (_, node, after) = we_write(change, step)?;
    // What people write on a node that is not on a visit is no place on the walk: it starts from the beginning.
    let from = match (node.recorded(), node.label) {
        (Some(recorded), _) => recorded,
        (None, label) if label.in_flight() && label != State::CordonRequired => State::UpgradeRequired,
        (None, label) => label,
    };
    let to = after.state();
    // Whoever sets the label to upgrade-required wants the walk to start again.
    let asked = node.label == State::UpgradeRequired && to == State::UpgradeRequired;
    // A node that came up with a driver whose stage is not open is only proven.
    let early = node.visit.is_none() && after.visit.as_ref().is_some_and(|visit| visit.early);
    let fine = asked || is_documented(from, to) || (early && to == State::PodRestartRequired);
    (from != to && !fine).then(|| format!("it went from {from} to {to}"))
}

/// The edges of `docs/walk.md`.
pub fn is_documented(from: State, to: State) -> bool {
    use State::{
        CordonRequired, DrainRequired, PodDeletionRequired, PodRestartRequired, UncordonRequired, Unknown,
        UpgradeDone, UpgradeFailed, UpgradeRequired, ValidationRequired, WaitForJobsRequired,
    };
    let next: &[State] = match from {
        Unknown | UpgradeDone => &[UpgradeDone, UpgradeRequired],
        UpgradeRequired => &[CordonRequired, UpgradeDone],
        CordonRequired => {
            &[WaitForJobsRequired, PodRestartRequired, ValidationRequired, UpgradeRequired, UpgradeDone]
        }
        WaitForJobsRequired => &[
            PodDeletionRequired,
            DrainRequired,
            PodRestartRequired,
            ValidationRequired,
            UpgradeRequired,
            UpgradeDone,
        ],
        PodDeletionRequired => &[
            PodRestartRequired,
            DrainRequired,
            ValidationRequired,
            UpgradeFailed,
            UpgradeRequired,
            UpgradeDone,
        ],
        DrainRequired => {
            &[PodRestartRequired, ValidationRequired, UpgradeFailed, UpgradeRequired, UpgradeDone]
        }
        PodRestartRequired => &[ValidationRequired, UpgradeFailed, WaitForJobsRequired],
        ValidationRequired => &[UncordonRequired, PodRestartRequired, UpgradeFailed],
        UncordonRequired => &[UpgradeDone, ValidationRequired, UpgradeFailed],
        UpgradeFailed => &[UpgradeRequired, CordonRequired, ValidationRequired],
    };
    next.contains(&to)
}
