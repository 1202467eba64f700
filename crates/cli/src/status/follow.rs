//! `--watch` and `--wait`: the report again after each change. The API is watched, never polled.

use std::collections::BTreeMap;
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::anyhow;
use jiff::{SignedDuration, Timestamp};
use pitcrew_controller::Watch;
use pitcrew_core::reason::Kind;

use super::report::{NodeReport, Phase, PoolReport, Report};
use super::text::{absence, tally, text, versions};
use super::{nothing_to_wait_for, pen, print};
use crate::connect::Session;
use crate::reading::Reading;
use crate::style::Style;
use crate::terminal::Output;
use crate::times::Times;

/// On a screen, times tick.
const TICK: SignedDuration = SignedDuration::from_secs(1);
/// Beyond this many nodes, a line for each of them is more than anybody reads: one per so many percent.
const NODES_EACH_MAX: usize = 50;
const STEP_PERCENT: usize = 5;
/// Names in a last sentence.
const NAMES_MAX: usize = 3;

/// Where to start on a screen, and how to clear what was there before.
const HOME: &str = "\x1b[H";
const CLEAR_LINE: &str = "\x1b[K";
const CLEAR_REST: &str = "\x1b[J";
const CLEAR_ALL: &str = "\x1b[2J";

/// The report, and when to look again although nothing has changed.
fn report(watch: &Watch) -> (Report, Option<Timestamp>) {
    let reading = Reading::of(watch.snapshot(), watch.leader());
    (Report::of(&reading), reading.plan.wake_at)
}

/// Shows the report until everything is done: redrawn on a screen, else one block per change.
pub(super) async fn watch(
    session: &Session,
    style: Style,
    live: bool,
    out: &mut impl Write,
) -> anyhow::Result<ExitCode> {
    let mut watch = session.watch().await?;
    let mut shown: Option<Report> = None;
    if live {
        write!(out, "{CLEAR_ALL}")?;
    }
    loop {
        let (now, wake_at) = report(&watch);
        let mut block = text(&now, &pen(session, &now, style));
        if let Some(trouble) = watch.trouble() {
            block +=
                &style.fold(&style.glyph(Kind::Blocked), &format!(" what is shown may be old: {trouble}"), 2);
        }
        // Between two passes only the moment changes.
        let same = |before: &Report| Report { at: now.at, ..before.clone() } == now;
        if live {
            draw(&block, out)?;
        } else if !shown.as_ref().is_some_and(same) {
            let gap = if shown.is_some() { "\n" } else { "" };
            write!(out, "{gap}{}\n{block}", pen(session, &now, style).times.clock())?;
        }
        out.flush()?;
        if now.done {
            return Ok(ExitCode::SUCCESS);
        }
        let tick = live.then(|| now.at.saturating_add(TICK).unwrap_or(now.at));
        watch.changed([wake_at, tick].into_iter().flatten().min()).await;
        shown = Some(now);
    }
}

/// Draws over what was there. What does not fit is left out at the end, or the screen would roll.
fn draw(block: &str, out: &mut impl Write) -> std::io::Result<()> {
    let rows = ratatui::crossterm::terminal::size().map_or(usize::MAX, |(_, rows)| usize::from(rows));
    let room = rows.saturating_sub(1);
    write!(out, "{HOME}")?;
    for line in block.lines().take(room) {
        writeln!(out, "{line}{CLEAR_LINE}")?;
    }
    write!(out, "{CLEAR_REST}")
}

/// Waits until every node is done, with one line per change. Ends with a sentence if that cannot come, or in time.
pub(super) async fn wait(
    session: &Session,
    patience: Duration,
    output: Option<Output>,
    out: &mut impl Write,
) -> anyhow::Result<ExitCode> {
    let mut watch = session.watch().await?;
    let mut lines = Lines::default();
    let began = session.clock.now();
    let patience = SignedDuration::try_from(patience).unwrap_or(SignedDuration::MAX);
    let deadline = began.saturating_add(patience).unwrap_or(Timestamp::MAX);
    loop {
        let (now, wake_at) = report(&watch);
        if output.is_none() {
            let times = Times { now: now.at, zone: session.zone.clone() };
            lines.news(&now).iter().try_for_each(|line| writeln!(out, "{} {line}", times.clock()))?;
            out.flush()?;
        }
        let verdict = outcome(&now)
            .or_else(|| (now.at >= deadline).then(|| Err(timed_out(&now, &watch, session, patience))));
        if let Some(verdict) = verdict {
            if output.is_some() {
                out.write_all(print(session, &now, output, Style::default())?.as_bytes())?;
            }
            return verdict.map(|()| ExitCode::SUCCESS);
        }
        let wake_at = [wake_at, lines.due()].into_iter().flatten().fold(deadline, Timestamp::min);
        watch.changed(Some(wake_at)).await;
    }
}

/// Whether there is an end: a good one, or one that only a person can change.
fn outcome(report: &Report) -> Option<anyhow::Result<()>> {
    if report.pools.is_empty() {
        return Some(Err(nothing_to_wait_for()));
    }
    if let Some(frozen) = report.pools.iter().find(|pool| pool.phase == Phase::Frozen) {
        let why = frozen.message.as_deref().unwrap_or_default();
        return Some(Err(anyhow!("driver {} is frozen: {why}", frozen.driver)));
    }
    let failed = nodes(report, |node| node.kind == Kind::Failed);
    if let [(_, first), ..] = failed[..] {
        let who = names(&failed);
        return Some(Err(anyhow!("{who} failed: {} (pitcrew explain node/{})", first.message, first.node)));
    }
    if report.done {
        return Some(Ok(()));
    }
    let left = nodes(report, |node| node.kind != Kind::Done);
    let rendered = report.pools.iter().all(|pool| pool.message.is_none());
    let stale = |node: &NodeReport| node.reason == "clients-stale" && node.kind == Kind::Blocked;
    if rendered
        && left.iter().all(|(_, node)| stale(node))
        && let [(_, first), ..] = left[..]
    {
        let who = names(&left);
        return Some(Err(anyhow!(
            "every node has its driver, but on {who} a client is stale: {} (pitcrew explain node/{})",
            first.message,
            first.node
        )));
    }
    if rendered && left.iter().all(|(_, node)| node.reason == "skipped") {
        let (are, their) = if left.len() == 1 { ("is", "its") } else { ("are", "their") };
        let who = names(&left);
        return Some(Err(anyhow!(
            "{who} {are} not done, and left out by {their} skip label; all others are done"
        )));
    }
    None
}

fn nodes(report: &Report, which: impl Fn(&NodeReport) -> bool) -> Vec<(&PoolReport, &NodeReport)> {
    let all = report.pools.iter().flat_map(|pool| pool.nodes.iter().map(move |node| (pool, node)));
    all.filter(|(_, node)| which(node)).collect()
}

fn names(nodes: &[(&PoolReport, &NodeReport)]) -> String {
    let named: Vec<&str> = nodes.iter().take(NAMES_MAX).map(|(_, node)| node.node.as_str()).collect();
    match nodes.len().saturating_sub(NAMES_MAX) {
        0 => named.join(", "),
        rest => format!("{} and {rest} more", named.join(", ")),
    }
}

/// What was missing when the time was up: the most hopeless first.
fn timed_out(report: &Report, watch: &Watch, session: &Session, patience: SignedDuration) -> anyhow::Error {
    let times = Times { now: report.at, zone: session.zone.clone() };
    let left = nodes(report, |node| node.kind != Kind::Done);
    // Who waits for a slot waits for somebody who moves; that one tells more.
    let weight = |kind: Kind| if kind == Kind::Waiting { Kind::Done } else { kind };
    let worst = left.iter().rev().max_by_key(|(_, node)| weight(node.kind));
    let why = match (watch.trouble(), worst) {
        (Some(trouble), _) => format!("the cluster does not answer: {trouble}"),
        _ if !report.controller.running => {
            format!("no controller is running ({})", absence(&report.controller, &times))
        }
        (None, Some((_, node))) => format!("{} is {}: {}", node.node, node.state, node.message),
        (None, None) => report.pools.iter().find_map(|pool| pool.message.clone()).unwrap_or_default(),
    };
    anyhow!(
        "timed out after {patience:#}: {} not done; {why}",
        match left.len() {
            1 => "1 node is".to_owned(),
            many => format!("{many} nodes are"),
        }
    )
}

/// Budgets close for moments while pods move; only what lasts is told.
const BLOCKED_FOR: SignedDuration = SignedDuration::from_secs(10);

/// A node in trouble: since when that has been seen, and whether it was told.
struct Trouble {
    reason: &'static str,
    due: Timestamp,
    told: bool,
}

/// What has been said so far.
#[derive(Default)]
struct Lines {
    /// Where each pool was when it was last told of.
    pools: BTreeMap<String, Step>,
    /// Nodes in trouble.
    troubles: BTreeMap<(String, String), Trouble>,
    absent: bool,
}

impl Lines {
    /// What is new since the last time.
    fn news(&mut self, report: &Report) -> Vec<String> {
        let mut news = Vec::new();
        let absent = !report.controller.running;
        if std::mem::replace(&mut self.absent, absent) != absent {
            news.push(
                if absent { "no controller is running, nothing moves" } else { "a controller runs" }
                    .to_owned(),
            );
        }
        for pool in &report.pools {
            news.extend(self.troubles(pool, report.at));
            let step = Step::of(pool);
            if self.pools.get(&pool.name) != Some(&step) {
                self.pools.insert(pool.name.clone(), step);
                news.push(line(pool));
            }
        }
        news
    }

    fn troubles(&mut self, pool: &PoolReport, now: Timestamp) -> Vec<String> {
        let mut news = Vec::new();
        for node in &pool.nodes {
            let key = (pool.name.clone(), node.node.clone());
            let wait = match node.kind {
                Kind::Failed => SignedDuration::ZERO,
                Kind::Blocked if node.reason != "pool-frozen" => BLOCKED_FOR,
                _ => {
                    self.troubles.remove(&key);
                    continue;
                }
            };
            let due = now.saturating_add(wait).unwrap_or(now);
            let new = || Trouble { reason: node.reason, due, told: false };
            let trouble = self.troubles.entry(key).or_insert_with(new);
            if trouble.reason != node.reason {
                *trouble = new();
            }
            if !trouble.told && trouble.due <= now {
                trouble.told = true;
                news.push(format!("{} {} {}: {}", pool.driver, node.node, node.state, node.message));
            }
        }
        news
    }

    /// When there will be something to tell if nothing changes.
    fn due(&self) -> Option<Timestamp> {
        self.troubles.values().filter(|trouble| !trouble.told).map(|trouble| trouble.due).min()
    }
}

fn line(pool: &PoolReport) -> String {
    let versions = versions(pool);
    let phase = match pool.phase {
        Phase::Paused => "paused, ",
        Phase::Frozen => "frozen, ",
        _ => "",
    };
    let message = pool.message.as_ref().map(|message| format!(" ({message})")).unwrap_or_default();
    format!("{} {versions}: {phase}{}{message}", pool.driver, tally(pool))
}

/// What makes a pool worth another line: nodes done (in steps, in a big fleet), failed ones, another phase.
#[derive(PartialEq)]
struct Step {
    done: usize,
    failed: usize,
    phase: Phase,
    message: bool,
}

impl Step {
    fn of(pool: &PoolReport) -> Self {
        let counts = &pool.counts;
        let big = counts.total > NODES_EACH_MAX;
        let done = if big { counts.done * 100 / counts.total / STEP_PERCENT } else { counts.done };
        Self { done, failed: counts.failed, phase: pool.phase, message: pool.message.is_some() }
    }
}
