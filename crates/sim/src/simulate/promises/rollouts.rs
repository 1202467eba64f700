//! The promises about how a version reaches the fleet: by stages, in windows, whole atoms at a time, and never one that
//! was taken back.

use std::collections::BTreeSet;

use jiff::{SignedDuration, Timestamp};
use pitcrew_core::contract::State;

use super::super::moves::Stage;
use super::super::world::{By, CALLS, Change, Node, Role, Rollout, Seen, World, before};
use super::{ROUNDED, Step, is_new, out_and_moving, we_write};

/// A visit is expected to take so long, in seconds, while nobody knows better; less what a call may take.
const VISIT_EXPECTED: i64 = 30 * 60 - 15;
/// From so many visits on somebody knows better.
const VISITS_KNOWN: usize = 3;
/// A machine is down for so long at most when it boots, and its driver restarts after that.
const BOOT: SignedDuration = SignedDuration::from_mins(5);

/// The node that our write starts, as it was before. One whose driver waits to be loaded is brought it, whatever was said
/// about upgrades.
fn we_start<'a>(change: &Change<'_>, step: &Step<'a>) -> Option<(&'a str, &'a Node)> {
    let (name, node, after) = we_write(change, step)?;
    (!node.walks() && after.state() == State::CordonRequired && !node.loads).then_some((name, node))
}

/// What we said a moment ago may cross what was sent with it.
fn known(world: &World, change: &Change<'_>) -> Timestamp {
    before(change.at, world.lag.max(CALLS))
}

pub(super) fn in_open_stages(world: &World, change: &Change<'_>, step: &Step<'_>) -> Option<String> {
    if let Step::Rollout(name, old, Some(new)) = step {
        return passes_when_done(world, change, name, (*old, new));
    }
    let (name, node) = we_start(change, step)?;
    if world.moves.stages.is_empty() || node.is_asked_for() {
        return None;
    }
    let stages: BTreeSet<usize> = world.stages_at(name, change.at).collect();
    let versions: Vec<&str> = world.wanted_at(change.at).collect();
    // A start on the way back may be under way when that ends (seed 1410).
    let went_back = world.went_back_until.is_some_and(|until| until >= known(world, change));
    if went_back || versions.iter().any(|version| world.goes_back_to(version)) {
        return None;
    }
    let open = |version: &&str| stages.iter().any(|stage| *stage <= world.frontier(version));
    if !versions.iter().any(open) {
        let stage = stages.first().and_then(|stage| world.moves.stages.get(*stage));
        let stage = stage.map_or("of nobody", |stage| stage.name.as_str());
        return Some(format!("it started before its stage, {stage}, was open"));
    }
    let is_bad = |version: &&str| {
        let since = world.rollout_of(version).and_then(Rollout::bad_since);
        since.is_some_and(|since| since < known(world, change))
    };
    versions.iter().all(is_bad).then(|| "it started after a stage had failed".to_owned())
}

/// A stage passes, or waits for a person's word, when its nodes are done and were watched for long enough.
fn passes_when_done(
    world: &World,
    change: &Change<'_>,
    rollout: &str,
    (old, new): (Option<&Rollout>, &Rollout),
) -> Option<String> {
    let phase = |rollout: Option<&Rollout>, stage: &str| {
        rollout.and_then(|rollout| rollout.stages.get(stage)).map(|stage| stage.phase.clone())
    };
    // A rollout that is over, with everybody or with nobody left (seed 49668), has nothing to wait for.
    if change.by != By::Us || old.is_some_and(|old| old.phase == "Done") {
        return None;
    }
    world.moves.stages.iter().enumerate().find_map(|(place, stage)| {
        let name = stage.name.as_str();
        let (was, is) = (phase(old, name).unwrap_or_default(), phase(Some(new), name)?);
        let skips = new.skip_bake.contains(name);
        if is != was && is == "Passed" && stage.manual && !skips && !new.promoted.contains(name) {
            return Some(format!("stage {name} passed without a person's word"));
        }
        let is_over = |phase: &str| matches!(phase, "Passed" | "AwaitingApproval");
        if is_over(&was) || !is_over(&is) {
            return None;
        }
        let watched = new.stages[name].watched(change.at);
        // It is watched from the decision on; that is seen when it is written, where calls are slow much later (seed 3392).
        let unseen = ROUNDED + world.lag_of_looks.as_secs();
        if !skips && watched < world.least_bake(stage.bake) - unseen {
            return Some(format!("stage {name} was watched for {watched} s and not for {} s", stage.bake));
        }
        let since = new.stages[name].baking_since().filter(|_| !skips);
        if let Some(what) = since.and_then(|since| out_of_bounds(world, change, stage, since)) {
            return Some(format!("stage {name} was over, and {what}"));
        }
        if let Some(what) = since.and_then(|since| restarted(world, change, (rollout, place), since)) {
            return Some(format!("stage {name} was over, and {what}"));
        }
        unfinished(world, change, place, new).map(|what| format!("stage {name} was over, and {what}"))
    })
}

/// What Prometheus said while a stage was watched does not let it pass. What it said last may cross what was decided.
fn out_of_bounds(world: &World, change: &Change<'_>, stage: &Stage, since: Timestamp) -> Option<String> {
    let heard = || world.proofs.heard(since);
    stage.queries.iter().find_map(|(query, max)| {
        let missed = heard().find(|(at, value)| value > max && *at < known(world, change));
        match missed {
            Some((at, value)) => Some(format!("query {query} said {value} at {at}")),
            None if heard().any(|(_, value)| value <= *max) => None,
            None => Some(format!("query {query} was never in its bounds")),
        }
    })
}

/// More drivers of a stage than may have restarted by themselves while it was watched. Only those count that everybody could
/// know of: they are still there, and their nodes are in the stage, in service, and have not booted.
fn restarted(
    world: &World,
    change: &Change<'_>,
    (rollout, stage): (&str, usize),
    since: Timestamp,
) -> Option<String> {
    let counts = |(name, node): &(&String, &Node)| {
        let is_in = world.stages_at(name, change.at).all(|of| of == stage);
        let stays = |seen: &Seen| seen.state == State::UpgradeDone && !seen.skipped;
        let booted = node.booted.is_some_and(|booted| booted >= before(since, BOOT));
        node.member && is_in && !booted && world.always(name, change.at, stays)
    };
    let restarts_on = |(name, node): (&String, &Node)| {
        // Of a node that this rollout did not visit only clocks say what was before.
        let known_pod = node.last_rollout.as_deref() == Some(rollout);
        let off = if known_pod { SignedDuration::ZERO } else { world.clock_off };
        let since = since.saturating_add(off).unwrap_or(since);
        let in_time =
            |at: &&Timestamp| **at >= since && Some(**at) >= node.done_since && **at < known(world, change);
        let drivers = world.pods_on(name).map(|(_, pod)| pod);
        let drivers = drivers.filter(|pod| pod.role == Role::Driver && !pod.deleting);
        drivers.map(|pod| pod.restarted.iter().filter(in_time).count() as u64).sum::<u64>()
    };
    let restarts = world.nodes.iter().filter(counts).map(restarts_on).sum::<u64>();
    let may = world.moves.stages[stage].may_restart;
    (restarts > may).then(|| format!("drivers of it had restarted {restarts} times, of {may} at most"))
}

/// What is missing in a stage, as far as it can be told: who may be in another stage does not count.
fn unfinished(world: &World, change: &Change<'_>, stage: usize, rollout: &Rollout) -> Option<String> {
    let rules = &world.moves.stages[stage];
    let is_in = |name: &str| world.stages_at(name, change.at).all(|of| of == stage);
    let nodes = world.nodes.iter().filter(|(name, node)| node.member && is_in(name));
    let (mut total, mut failed) = (0, 0);
    let done = |seen: &Seen| seen.state == State::UpgradeDone && seen.runs(&rollout.version);
    for (name, node) in nodes.filter(|(_, node)| !is_new(world, change, Some(node))) {
        total += 1;
        let left_out = |seen: &Seen| seen.skipped && !seen.state.in_flight();
        if world.lately(name, change.at, |seen| done(seen) || left_out(seen)) {
            continue;
        }
        if !world.lately(name, change.at, |seen| seen.state == State::UpgradeFailed) {
            return Some(format!("node {name} is in {}", node.state()));
        }
        // One that has just got there, or just left it, may not count.
        failed += usize::from(world.always(name, change.at, |seen| seen.state == State::UpgradeFailed));
    }
    let skips = rollout.skip_bake.contains(&rules.name);
    let waited_for = rules.bake > 0 || stage + 1 < world.moves.stages.len();
    let may_be_in = |name: &str| world.stages_at(name, change.at).any(|of| of == stage);
    let proves = |name: &String| may_be_in(name) && world.lately(name, change.at, done);
    if !skips && waited_for && total > 0 && !world.nodes.keys().any(proves) {
        return Some("none of its nodes is done".to_owned());
    }
    (!skips && failed > rules.may_fail.of(total)).then(|| format!("{failed} of its {total} nodes failed"))
}

/// S7: a node is given back, and a stage is over, only when its gates have passed.
pub(super) fn gates_passed(world: &World, change: &Change<'_>, step: &Step<'_>) -> Option<String> {
    if let Step::Rollout(name, old, Some(new)) = step {
        return stage_is_proven(world, change, name, *old, new);
    }
    let (name, node, after) = we_write(change, step)?;
    let given_back = node.visit.is_some() && after.visit.is_none() && after.state() == State::UpgradeDone;
    let drivers = world.pods_on(name).map(|(_, pod)| pod);
    let since =
        drivers.filter(|pod| pod.role == Role::Driver && !pod.deleting).find_map(|pod| pod.bound_since);
    // One that was replaced a moment ago may not be known yet.
    let since = since.filter(|since| given_back && *since < before(change.at, world.lag))?;
    let mut gates = world.moves.gates.iter().filter(|gate| !gate.at_stage_ends);
    let missing = gates.find(|gate| !world.proofs.node_passed(&gate.name, name, since))?;
    Some(format!("it was given back, and gate {} has not passed", missing.name))
}

fn stage_is_proven(
    world: &World,
    change: &Change<'_>,
    rollout: &str,
    old: Option<&Rollout>,
    new: &Rollout,
) -> Option<String> {
    let proven = |rollout: &Rollout, stage: &str| {
        let phase = rollout.stages.get(stage).map(|stage| stage.phase.as_str());
        matches!(phase, Some("Baking" | "AwaitingApproval" | "Passed"))
    };
    let gates = || world.moves.gates.iter().filter(|gate| gate.at_stage_ends);
    world.moves.stages.iter().enumerate().find_map(|(place, stage)| {
        let name = stage.name.as_str();
        let begins = proven(new, name) && !old.is_some_and(|old| proven(old, name));
        if !begins || new.skip_bake.contains(name) || !has_nodes(world, change, place) {
            return None;
        }
        let missing = gates().find(|gate| !world.proofs.stage_passed(&gate.name, rollout, name))?;
        Some(format!("stage {name} went on, and gate {} has not passed", missing.name))
    })
}

/// Somebody is in a stage for sure, and has been for a while: without nodes there is nothing to prove.
fn has_nodes(world: &World, change: &Change<'_>, stage: usize) -> bool {
    let is_in = |name: &str| world.stages_at(name, change.at).all(|of| of == stage);
    let stays = |name: &str| world.always(name, change.at, |seen| !seen.skipped);
    let mut nodes = world.nodes.iter().filter(|(name, node)| node.member && is_in(name) && stays(name));
    nodes.any(|(_, node)| !is_new(world, change, Some(node)))
}

/// S18: nothing starts towards a version that an enforced matrix does not list.
pub(super) fn only_listed(world: &World, change: &Change<'_>, step: &Step<'_>) -> Option<String> {
    we_start(change, step)?;
    if !world.moves.only_listed {
        return None;
    }
    let lag = world.lag.max(CALLS);
    let fine = |version: &str| world.goes_back_to(version) || world.proofs.lists(version, change.at, lag);
    let mut versions = world.wanted_at(change.at).peekable();
    versions.peek()?;
    (!versions.any(fine)).then(|| "it started towards a version that the matrix does not list".to_owned())
}

/// S19: the version that is asked for is changed only to take one back.
pub(super) fn only_takes_back(world: &World, change: &Change<'_>, step: &Step<'_>) -> Option<String> {
    let Step::Version(was, is) = step else { return None };
    let asks = |rollout: &Rollout| {
        // Somebody may clear it while the write is on its way (seed 7092).
        let cleared = rollout.cleared_since.is_some_and(|since| since < known(world, change));
        let back = rollout.back_since.is_some() && !cleared;
        back && rollout.version == *was && rollout.previous.as_deref() == Some(*is)
    };
    let fine = was == is || world.rollouts.values().any(asks);
    (!fine).then(|| format!("{is} was asked for in place of {was}, which nobody takes back"))
}

pub(super) fn in_windows(world: &World, change: &Change<'_>, step: &Step<'_>) -> Option<String> {
    we_start(change, step)?;
    if !world.moves.has_windows() {
        return None;
    }
    let known = world.nodes.values().filter(|node| node.was_visited).count();
    let needs = if known < VISITS_KNOWN && world.left_lately(change.at) == 0 { VISIT_EXPECTED } else { 0 };
    let (early, late) = (world.clock_off + CALLS, world.clock_off);
    let open = |seconds: i64| {
        let at = change.at.checked_add(SignedDuration::from_secs(seconds)).unwrap_or(change.at);
        world.moves.stays_open(at, needs)
    };
    let fine = (-early.as_secs()..=late.as_secs()).step_by(5).any(open) || open(0);
    (!fine).then(|| match needs {
        0 => "it started, and no window was open".to_owned(),
        _ => "it started, and its window would close before it is done".to_owned(),
    })
}

pub(super) fn not_taken_back(world: &World, change: &Change<'_>, step: &Step<'_>) -> Option<String> {
    we_start(change, step)?;
    let since = known(world, change);
    let condemned = |version: &str| world.taken_back(version).is_some_and(|at| at < since);
    let mut versions = world.wanted_at(change.at).peekable();
    versions.peek()?;
    versions.all(condemned).then(|| "it started towards a version that was taken back".to_owned())
}

pub(super) fn whole_atoms(world: &World, change: &Change<'_>, step: &Step<'_>) -> Option<String> {
    let (name, node) = we_start(change, step)?;
    let label = world.moves.atom.as_deref()?;
    let atom = node.marks.get(label)?;
    if node.is_out_again() {
        return None;
    }
    let others = || {
        let same = |other: &Node| other.member && other.marks.get(label) == Some(atom);
        world.nodes.iter().filter(move |(other, node)| *other != name && same(node))
    };
    // What is begun is finished, whoever of it cannot.
    if others().any(|(_, other)| other.walks() && !other.is_retried()) {
        return None;
    }
    let stays = |seen: &Seen| {
        let current = world.wanted_at(change.at).any(|version| seen.runs(version));
        let failed = seen.state == State::UpgradeFailed || seen.state.in_flight();
        failed || current || seen.skipped || seen.loads || seen.again || seen.driver.is_none()
    };
    let could = |seen: &Seen| seen.state == State::UpgradeRequired && seen.ready;
    let mut together = BTreeSet::from([name]);
    for (other, found) in others().filter(|(_, other)| !is_new(world, change, Some(other))) {
        if !world.lately(other, change.at, |seen| stays(seen) || could(seen)) {
            let state = found.state();
            return Some(format!("it started without {other}, which is in {state} and of the same atom"));
        }
        if world.always(other, change.at, |seen| could(seen) && !stays(seen)) {
            together.insert(other);
        }
    }
    room_for(world, change, &together)
}

/// All of an atom start, or none does: there must be room for all.
fn room_for(world: &World, change: &Change<'_>, together: &BTreeSet<&str>) -> Option<String> {
    let (out, moving) = out_and_moving(world, change, |name| together.contains(name));
    // The one that has started is out by now, and was not a moment ago.
    let goes_out = |name: &&&str| world.nodes.get(**name).is_some_and(|node| node.out_since.is_none());
    let new = together.iter().filter(goes_out).count();
    let members = world.members_at(change.at);
    let fits = world.rules_at(change.at).any(|rules| {
        let parallel = rules.max_parallel == 0 || moving + together.len() as u64 <= rules.max_parallel;
        parallel && (new == 0 || out + new <= rules.max_unavailable.of(members))
    });
    (!fits).then(|| {
        format!(
            "its atom started, and has no room: {} nodes, {moving} others move, {out} are out",
            together.len()
        )
    })
}

/// S3 too: a group of nodes, and a stage, have limits of their own.
pub(super) fn within_groups(world: &World, change: &Change<'_>, step: &Step<'_>) -> Option<String> {
    let (name, node) = we_start(change, step)?;
    spread_is_full(world, change, name, node).or_else(|| stage_is_full(world, change, name))
}

fn spread_is_full(world: &World, change: &Change<'_>, name: &str, node: &Node) -> Option<String> {
    let (label, max) = world.moves.spread.as_ref()?;
    let group = node.marks.get(label).filter(|_| node.out_since.is_none())?;
    let is_in = |other: &str| world.nodes.get(other).is_some_and(|node| node.marks.get(label) == Some(group));
    let total = world.nodes.iter().filter(|(other, node)| node.member && is_in(other)).count();
    let max = max.of(total + world.left_lately(change.at));
    let (out, _) = out_and_moving(world, change, |other| other == name || !is_in(other));
    (out + 1 > max).then(|| format!("it started with {out} nodes of {label}={group} out, of {max} at most"))
}

fn stage_is_full(world: &World, change: &Change<'_>, name: &str) -> Option<String> {
    // Where nobody can tell its stage, nobody can tell its limits.
    let mut stages = world.stages_at(name, change.at);
    let stage = stages.next()?;
    let by_stages = !world.wanted_at(change.at).any(|version| world.goes_back_to(version));
    let rules = world.moves.stages.get(stage).filter(|_| stages.all(|other| other == stage) && by_stages)?;
    let limit = rules.max_parallel?;
    let is_in = |other: &str| world.stages_at(other, change.at).all(|of| of == stage);
    let (_, moving) = out_and_moving(world, change, |other| other == name || !is_in(other));
    (moving + 1 > limit)
        .then(|| format!("it started as number {} of stage {}, of {limit} at most", moving + 1, rules.name))
}
