//! How things stand, in words: what is wrong first, and a fleet that is well in one line.

use std::fmt::Write as _;

use pitcrew_core::api::{BakeStatus, StagePhase, StageStatus};
use pitcrew_core::contract::State;
use pitcrew_core::reason::Kind;

use super::report::{ControllerReport, Foreign, Limits, NodeReport, Phase, PoolReport, Report};
use crate::reading::NO_POLICY;
use crate::style::Style;
use crate::text::{count, grouped, ranges};
use crate::times::Times;

/// Rows of one kind that are shown; `-o json` has them all.
const ROWS_MAX: usize = 12;
/// A list of names is cut at this length.
const NAMES_WIDTH: usize = 60;
/// Rows stand under their heading.
const INDENT: usize = 2;

/// The code of the reason of nodes whose version is not in the matrix: one sentence is true for all of them.
const NOT_IN_MATRIX: &str = "not-in-matrix";

/// What text is made with.
pub(crate) struct Pen {
    pub(crate) style: Style,
    pub(crate) times: Times,
}

/// The whole report.
pub(crate) fn text(report: &Report, pen: &Pen) -> String {
    let mut text = controller(&report.controller, report.done, pen);
    for (place, pool) in report.pools.iter().enumerate() {
        // One line each needs no space between.
        if place > 0 && !(is_quiet(pool) && is_quiet(&report.pools[place - 1])) {
            text.push('\n');
        }
        text += &self::pool(pool, report.controller.running, pen);
    }
    if report.pools.is_empty() {
        let mut sentence = NO_POLICY.to_owned();
        sentence.replace_range(..1, "N");
        text += &pen.style.fold("", &format!("{sentence}."), 0);
    }
    text
}

/// Without a controller nothing moves, and no reason below would say so.
fn controller(controller: &ControllerReport, done: bool, pen: &Pen) -> String {
    if controller.running {
        return String::new();
    }
    let kind = if done { Kind::Waiting } else { Kind::Blocked };
    let lead = format!("{} ", pen.style.glyph(kind));
    let sentence =
        format!("No controller is running, so nothing moves: {}.", absence(controller, &pen.times));
    pen.style.fold(&lead, &format!("{sentence} Start one with: pitcrew controller"), INDENT) + "\n"
}

/// What the Lease says of a controller that does not lead.
pub(crate) fn absence(controller: &ControllerReport, times: &Times) -> String {
    let lease = &controller.lease;
    match (&controller.holder, controller.last_renewed) {
        (Some(holder), Some(at)) => format!("Lease {lease} was last renewed {} by {holder}", times.both(at)),
        (None, Some(at)) => format!("Lease {lease} was given back, last renewed {}", times.both(at)),
        _ => format!("there is no Lease {lease}"),
    }
}

fn is_quiet(pool: &PoolReport) -> bool {
    pool.phase == Phase::Done && pool.foreign.is_empty()
}

fn pool(pool: &PoolReport, running: bool, pen: &Pen) -> String {
    let mut text = heading(pool, running, pen);
    if let Some(message) = &pool.message {
        text += &pen.style.fold(&format!("  {} ", pen.style.glyph(Kind::Blocked)), message, INDENT + 2);
    }
    if is_quiet(pool) {
        return text + &matrix(pool, pen);
    }
    text += &pen.style.fold("  ", &pen.style.dim(&origin(pool, &pen.times)), INDENT);
    if pool.phase != Phase::Frozen && pool.counts.total > 0 {
        text += &pen.style.fold("  ", &limits(&pool.limits), INDENT);
    }
    text += &stages(pool, pen);
    if let Some(back) = pool.rollout.as_ref().and_then(|rollout| rollout.rollback.as_ref()) {
        text += &pen.style.fold(&format!("  {} ", pen.style.glyph(Kind::Failed)), back, INDENT + 2);
    }
    if pool.phase == Phase::Paused {
        let resume = format!("autoUpgrade is false; go on with: pitcrew resume {}", pool.name);
        text += &pen.style.fold(&format!("  {} ", pen.style.glyph(Kind::Paused)), &resume, INDENT + 2);
    }
    text += &matrix(pool, pen);
    if !running || pool.phase == Phase::Paused {
        text += &left_to_people(pool, pen);
    }
    text += &foreign(&pool.foreign, pen);
    text + &rows(pool, pen)
}

/// What the version matrix and the cluster disagree about, and what a person should do about it; nothing, if all is well.
fn matrix(pool: &PoolReport, pen: &Pen) -> String {
    let Some(matrix) = &pool.matrix else { return String::new() };
    let lead = format!("  {} ", pen.style.glyph(Kind::Blocked));
    let refused = pool.nodes.iter().any(|node| node.reason == NOT_IN_MATRIX);
    // Whoever waits because of it says so below.
    let unlisted = (!matrix.listed && !refused).then(|| matrix.message.clone());
    let drift = (!matrix.drift.is_empty()).then(|| format!("version matrix, {}", matrix.drift.join("; ")));
    let sentences = [unlisted, drift, matrix.reminder.clone()].into_iter().flatten();
    sentences.map(|sentence| pen.style.fold(&lead, &sentence, INDENT + 2)).collect()
}

/// Where nobody replaces driver pods, a new template changes nothing by itself: which pods stay, until somebody deletes them.
fn left_to_people(pool: &PoolReport, pen: &Pen) -> String {
    let outdated = pool.nodes.iter().filter_map(|node| Some((&node.node, node.outdated_pod.as_ref()?)));
    let outdated: Vec<_> = outdated.collect();
    if outdated.is_empty() {
        return String::new();
    }
    let sentence = format!(
        "OnDelete: nothing changes on {} until somebody deletes the driver pod there, which is of an earlier template",
        nodes(outdated.len())
    );
    let mut text = pen.style.fold(&format!("  {} ", pen.style.glyph(Kind::Waiting)), &sentence, INDENT + 2);
    let widest = outdated.iter().take(ROWS_MAX).map(|(node, _)| node.len()).max().unwrap_or_default();
    for (node, pod) in outdated.iter().take(ROWS_MAX) {
        let _ = writeln!(text, "      {node:<widest$}  pod/{pod}");
    }
    text + &more(outdated.len(), pen)
}

fn heading(pool: &PoolReport, running: bool, pen: &Pen) -> String {
    let (kind, words) = match pool.phase {
        Phase::Done if pool.counts.total == 0 => {
            (Kind::Done, "no node runs this driver, nothing to do".to_owned())
        }
        Phase::Done => (Kind::Done, format!("{} done, nothing to do", nodes(pool.counts.total))),
        Phase::Frozen => (Kind::Blocked, "frozen".to_owned()),
        Phase::Paused => (Kind::Paused, format!("paused, {}", tally(pool))),
        Phase::Failed => (Kind::Failed, tally(pool)),
        Phase::Running => (if running { Kind::Moving } else { Kind::Blocked }, tally(pool)),
    };
    let driver = pen.style.bold(&pool.driver);
    let origin = if is_quiet(pool) { pen.style.dim(&format!("  ({})", pool.policy)) } else { String::new() };
    let words = pen.style.paint(kind, &words);
    let versions = versions(pool);
    let gap = if versions.is_empty() { "" } else { "  " };
    let lead = format!("{driver}  {versions}{gap}{} ", pen.style.glyph(kind));
    pen.style.fold(&lead, &format!("{words}{origin}"), INDENT)
}

fn nodes(number: usize) -> String {
    count(u64::try_from(number).unwrap_or(u64::MAX), "node")
}

/// `560.35.03 → 565.57.01`, as far as it is known.
pub(crate) fn versions(pool: &PoolReport) -> String {
    let to = pool.versions.to.as_deref().unwrap_or_default();
    match &pool.versions.from[..] {
        [] if pool.versions.new_configuration => format!("{to} (new configuration)"),
        [] => to.to_owned(),
        from => format!("{} → {}", from.join(", "), if to.is_empty() { "?" } else { to }),
    }
}

/// `13 of 24 nodes done, 3 moving, 8 waiting`.
pub(crate) fn tally(pool: &PoolReport) -> String {
    let counts = &pool.counts;
    let mut text = format!("{} of {} done", grouped(counts.done), nodes(counts.total));
    let rest = [
        (counts.failed, "failed"),
        (counts.blocked, "blocked"),
        (counts.moving, "moving"),
        (counts.waiting, "waiting"),
        (counts.paused, if pool.phase == Phase::Paused { "standing still" } else { "left out" }),
    ];
    for (number, what) in rest.into_iter().filter(|(number, _)| *number > 0) {
        let _ = write!(text, ", {} {what}", grouped(number));
    }
    text
}

fn origin(pool: &PoolReport, times: &Times) -> String {
    let Some(rollout) = &pool.rollout else { return pool.policy.clone() };
    let aborted = if rollout.aborted { ", aborted" } else { "" };
    let since = rollout.started_at.map(|at| format!(" since {} ({})", times.at(at), times.span(at)));
    let since = since.filter(|_| rollout.finished_at.is_none()).unwrap_or_default();
    let back = rollout.rollback_of.as_ref().map(|of| format!(", the way back from {of}")).unwrap_or_default();
    format!("{}, rollout {}{since}{back}{aborted}", pool.policy, rollout.name)
}

/// One line for each stage: how many, and what it is doing.
fn stages(pool: &PoolReport, pen: &Pen) -> String {
    let widest = pool.stages.iter().map(|stage| stage.name.len()).max().unwrap_or_default();
    let mut text = String::new();
    for stage in &pool.stages {
        let StageStatus { name, phase, total, done, bake, message, .. } = stage;
        let (kind, mut words) = match phase {
            StagePhase::Waiting => (Kind::Waiting, "waits for the stages before it".to_owned()),
            StagePhase::Moving => (Kind::Moving, "under way".to_owned()),
            StagePhase::Proving => (Kind::Moving, "asks its gates".to_owned()),
            StagePhase::Baking => (Kind::Moving, baking(bake.as_ref())),
            StagePhase::AwaitingApproval => (Kind::Blocked, "done".to_owned()),
            StagePhase::Passed => (Kind::Done, "passed".to_owned()),
            StagePhase::Failed | StagePhase::Spoiled => (Kind::Failed, "failed".to_owned()),
        };
        if let Some(message) = message {
            let _ = write!(words, ": {message}");
        }
        if *phase == StagePhase::AwaitingApproval
            && let Some(rollout) = &pool.rollout
        {
            let _ = write!(words, " (pitcrew promote {})", rollout.name);
        }
        let lead = format!("  {} {name:<widest$}  {done}/{total}  ", pen.style.glyph(kind));
        text += &pen.style.fold(&lead, &pen.style.paint(kind, &words), INDENT + 4);
    }
    text
}

/// `baking, 31 h 20 m of 48 h, xid-errors 0`.
pub(crate) fn baking(bake: Option<&BakeStatus>) -> String {
    let span = |seconds: i64| {
        let (hours, minutes) = (seconds / 3600, seconds % 3600 / 60);
        match (hours, minutes) {
            (0, _) if seconds < 60 => format!("{seconds} s"),
            (0, minutes) => format!("{minutes} m"),
            (hours, 0) => format!("{hours} h"),
            (hours, minutes) => format!("{hours} h {minutes} m"),
        }
    };
    bake.map_or_else(
        || "baking".to_owned(),
        |bake| {
            let asked = bake.queries.iter().filter_map(|query| Some((&query.name, query.value?)));
            let time = format!("baking, {} of {}", span(bake.seconds), span(bake.needed_seconds));
            let said = asked.map(|(name, value)| format!("{name} {}", rounded(value)));
            [time].into_iter().chain(said).collect::<Vec<_>>().join(", ")
        },
    )
}

/// What comes after the fourth digit is nothing to read.
fn rounded(value: f64) -> f64 {
    if value.abs() < 1e9 { (value * 1e4).round() / 1e4 } else { value }
}

fn limits(limits: &Limits) -> String {
    let binds = |name| if limits.binding == Some(name) { ", binds" } else { "" };
    let written = limits.max_unavailable.as_deref().unwrap_or_default();
    let out = format!(
        "out {} of at most {} (maxUnavailable {written}{})",
        limits.out,
        limits.max_out,
        binds("maxUnavailable")
    );
    let moving = limits.max_parallel_upgrades.map(|most| {
        format!(
            ", moving {} of at most {most} (maxParallelUpgrades{})",
            limits.moving,
            binds("maxParallelUpgrades")
        )
    });
    out + &moving.unwrap_or_default()
}

fn foreign(foreign: &[Foreign], pen: &Pen) -> String {
    let mut text = String::new();
    let lead = format!("  {} ", pen.style.glyph(Kind::Blocked));
    for Foreign { node, cordoned, ready, by_driver_manager } in foreign.iter().take(ROWS_MAX) {
        let what = match (cordoned, ready) {
            (true, true) => "cordoned",
            (true, false) => "cordoned and not Ready",
            _ => "not Ready",
        };
        let who = if *by_driver_manager { " by its driver manager" } else { ", not by pitcrew" };
        let sentence = format!("{node} is {what}{who}; it counts against maxUnavailable");
        text += &pen.style.fold(&lead, &sentence, INDENT + 2);
    }
    text + &more(foreign.len(), pen)
}

/// How many rows are not shown.
fn more(rows: usize, pen: &Pen) -> String {
    match rows.saturating_sub(ROWS_MAX) {
        0 => String::new(),
        rest => pen.style.dim(&format!("    … and {rest} more (-o json lists all)\n")),
    }
}

fn rows(pool: &PoolReport, pen: &Pen) -> String {
    let of = |kind: Kind| pool.nodes.iter().filter(move |node| node.kind == kind);
    let mut text = String::new();
    for kind in [Kind::Failed, Kind::Blocked] {
        // What the whole pool stands still for is said once, above or below.
        let once = |node: &&NodeReport| matches!(node.reason, "pool-frozen" | NOT_IN_MATRIX);
        let nodes: Vec<&NodeReport> = of(kind).filter(|node| !once(node)).collect();
        nodes.iter().take(ROWS_MAX).for_each(|node| text += &trouble(node, pen));
        text += &more(nodes.len(), pen);
    }
    let standing = of(Kind::Paused).chain(of(Kind::Blocked)).filter(|node| node.state.in_flight());
    let standing = standing.filter(|node| matches!(node.reason, "paused" | "pool-frozen"));
    let moving: Vec<&NodeReport> = of(Kind::Moving).chain(standing).collect();
    let widest = moving.iter().take(ROWS_MAX).map(|node| node.node.len()).max().unwrap_or_default();
    moving.iter().take(ROWS_MAX).for_each(|node| text += &on_its_way(node, widest, pen));
    text += &more(moving.len(), pen);
    text + &queues(pool, pen)
}

/// A node in trouble: where, why, and the command that says more.
fn trouble(node: &NodeReport, pen: &Pen) -> String {
    let NodeReport { node: name, state, kind, message, since, .. } = node;
    let since = since.map(|since| format!(" for {}", pen.times.span(since))).unwrap_or_default();
    let lead = format!("  {} {}  ", pen.style.glyph(*kind), pen.style.paint(*kind, name));
    let mut text = pen.style.fold(&lead, &format!("{state}{since}"), INDENT + 2);
    text += &pen.style.fold("      ", message, 6);
    text + &format!("      {}\n", pen.style.dim(&format!("pitcrew explain node/{name}")))
}

fn on_its_way(node: &NodeReport, widest: usize, pen: &Pen) -> String {
    let NodeReport { node: name, state, kind, message, since, .. } = node;
    let since = since.map(|since| pen.times.span(since)).unwrap_or_default();
    let lead = format!("  {} {name:<widest$}  {state:<22}  {since:<9}  ", pen.style.glyph(*kind));
    // In a pause, nodes half-way stand still for one and the same cause.
    let message = if matches!(node.reason, "paused" | "pool-frozen") { "stands still" } else { message };
    pen.style.fold(&lead, message, INDENT + 4)
}

/// Nodes that wait for one and the same thing, or were left out: one line each.
fn queues(pool: &PoolReport, pen: &Pen) -> String {
    let names: Vec<&String> = pool.nodes.iter().map(|node| &node.node).collect();
    let mut groups: Vec<(Kind, Queue, Vec<usize>)> = Vec::new();
    for (place, node) in pool.nodes.iter().enumerate() {
        let Some(queue) = queue(node) else { continue };
        match groups.iter_mut().find(|(_, known, _)| *known == queue) {
            Some((_, _, places)) => places.push(place),
            None => groups.push((node.kind, queue, vec![place])),
        }
    }
    let mut text = String::new();
    for (kind, Queue { one, many, what }, places) in groups.iter().take(ROWS_MAX) {
        let who = ranges(&names, places, NAMES_WIDTH);
        let verb = if places.len() == 1 { one } else { many };
        let lead = format!("  {} ", pen.style.glyph(*kind));
        text += &pen.style.fold(&lead, &format!("{} {verb}{what} {who}", nodes(places.len())), INDENT + 2);
    }
    text + &more(groups.len(), pen)
}

/// What nodes wait for: the verb for one and for many, and the rest of the sentence.
#[derive(PartialEq)]
struct Queue {
    one: &'static str,
    many: &'static str,
    what: String,
}

fn queue(node: &NodeReport) -> Option<Queue> {
    let queue = |one, many, what: &str| Some(Queue { one, many, what: what.to_owned() });
    let on_its_way = node.state.in_flight();
    match (node.kind, node.reason) {
        (Kind::Waiting, "no-slot") => queue("waits", "wait", " for a slot"),
        (Kind::Waiting, "moving") if node.state == State::Unknown => {
            queue("has", "have", " not been looked at yet")
        }
        (Kind::Waiting, "moving") => match node.message.strip_prefix("moves on to ") {
            Some(state) => queue("is", "are", &format!(" due for {state}")),
            None => queue("is", "are", &format!(" {}", node.message)),
        },
        (Kind::Waiting, _) | (Kind::Blocked, NOT_IN_MATRIX) => {
            queue("waits", "wait", &format!(": {}", node.message))
        }
        (Kind::Paused, "paused") if !on_its_way => queue("waits", "wait", " for the end of the pause"),
        (Kind::Paused, "skipped") => queue("is", "are", &format!(" {}", node.message)),
        (Kind::Blocked, "pool-frozen") if !on_its_way => queue("stands", "stand", " still"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_bake_shows_its_time_and_the_last_value_of_each_query() {
        let at = "2026-01-01T00:00:00Z";
        let queries = json!([
            {"name": "xid-errors", "value": 0},
            {"name": "silent", "message": "there is no such series"},
            {"name": "ratio", "value": 0.300_04},
        ]);
        let bake = json!({"since": at, "lookedAt": at, "seconds": 112_800, "neededSeconds": 172_800, "queries": queries});
        let bake: BakeStatus = serde_json::from_value(bake).unwrap();
        assert_eq!(baking(Some(&bake)), "baking, 31 h 20 m of 48 h, xid-errors 0, ratio 0.3");
    }
}
