//! What is shown of one moment: plain data, from a snapshot, its plan and the record of what came before.
//!
//! Moments stay moments here; drawing turns them into "for 0:21", so a screen ticks on between two passes.

use jiff::{SignedDuration, Timestamp};
use pitcrew_core::api::StagePhase;
use pitcrew_core::contract::State;
use pitcrew_core::names::NodeName;
use pitcrew_core::plan::{Ledger, Plan, PoolPlan, Verdict};
use pitcrew_core::reason::Kind;
use pitcrew_core::snapshot::Snapshot;
use pitcrew_core::version::DriverVersion;

use super::record::{Place, Record, Tally, Transition, place};
use crate::status::baking;

/// More rows than any terminal has; a fleet may have more nodes in trouble.
const ROWS_MAX: usize = 60;

/// One moment of an upgrade.
#[derive(Clone, Debug)]
pub(super) struct View {
    /// When the version was changed.
    pub(super) began: Timestamp,
    /// When it will all be done, judged by the visits so far.
    pub(super) ends: Option<Timestamp>,
    /// Every node is where it will stay.
    pub(super) is_over: bool,
    /// How many nodes are where.
    pub(super) tally: Tally,
    /// The limits and how much of them is used.
    pub(super) slots: Slots,
    /// The nodes' names, in order; groups refer to them by place.
    pub(super) names: Vec<NodeName>,
    /// Where each of them is.
    pub(super) places: Vec<Place>,
    /// Nodes in trouble first, then those on their way.
    pub(super) rows: Vec<Row>,
    /// How many more of those there are.
    pub(super) more_rows: usize,
    /// The next ones in the queue.
    pub(super) next: Vec<Row>,
    /// All that wait, in the order of the queue; `next` is about the first of them.
    pub(super) waiting: Vec<usize>,
    /// All that are done.
    pub(super) done: Vec<usize>,
    /// What the rollout is about now.
    pub(super) headline: Option<String>,
    /// What happened last, newest first.
    pub(super) recent: Vec<Transition>,
}

/// The limits and how much of them is used.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Slots {
    /// Nodes out of service now.
    pub(super) out: usize,
    /// `maxUnavailable` as written, and in nodes.
    pub(super) max_unavailable: (String, usize),
    /// `maxParallelUpgrades`, if it is a limit.
    pub(super) max_parallel: Option<u32>,
}

impl Slots {
    fn of(ledger: &Ledger) -> Self {
        let written = ledger.max_unavailable.map(|amount| amount.to_string()).unwrap_or_default();
        Self {
            out: ledger.out,
            max_unavailable: (written, ledger.max_out),
            max_parallel: ledger.max_parallel,
        }
    }

    /// The smaller of both limits.
    pub(super) fn at_most(&self) -> usize {
        self.max_parallel.map_or(usize::MAX, |limit| limit as usize).min(self.max_unavailable.1)
    }
}

/// A node that is worth a line.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Row {
    pub(super) kind: Kind,
    pub(super) node: NodeName,
    pub(super) state: State,
    /// Since when it is in that state.
    pub(super) since: Timestamp,
    /// Since when it is on a visit.
    pub(super) visit: Option<Timestamp>,
    /// The version of its driver pod.
    pub(super) driver: String,
    /// Why it is where it is.
    pub(super) why: String,
}

impl View {
    /// The view of one pass; `None` before there is a pool.
    pub(super) fn of(record: &Record, snapshot: &Snapshot, plan: &Plan) -> Option<Self> {
        let pool = plan.pools.first()?;
        let on_target = pool.version.as_ref() == Some(&record.target);
        let places: Vec<Place> = pool.nodes.values().map(|verdict| place(verdict, on_target)).collect();
        let names: Vec<NodeName> = pool.nodes.keys().cloned().collect();
        let waits =
            |verdict: &Verdict, place| place == Place::Waiting && verdict.reason.kind() <= Kind::Waiting;
        let (mut rows, mut waiting, mut done) = (Vec::new(), Vec::new(), Vec::new());
        for (index, (verdict, place)) in pool.nodes.values().zip(&places).enumerate() {
            match place {
                Place::Done => done.push(index),
                _ if waits(verdict, *place) => waiting.push(index),
                _ => rows.push((std::cmp::Reverse(verdict.reason.kind().max(Kind::Waiting)), index)),
            }
        }
        // Trouble first. A node on its way may wait for a moment: that must not change its place in the table.
        rows.sort_unstable();
        waiting.sort_by_cached_key(|index| {
            pool.nodes.get(&names[*index]).and_then(|verdict| verdict.reason.ahead()).unwrap_or(usize::MAX)
        });
        let more_rows = rows.len().saturating_sub(ROWS_MAX);
        let row = |index: usize| Row::of(record, snapshot, pool, &names[index]);
        Some(Self {
            began: record.began,
            ends: ends(record, pool, snapshot.now),
            is_over: record.tally.is_over(),
            tally: record.tally,
            slots: Slots::of(&pool.ledger),
            rows: rows.iter().take(ROWS_MAX).filter_map(|(_, index)| row(*index)).collect(),
            more_rows,
            next: waiting.iter().take(ROWS_MAX).filter_map(|index| row(*index)).collect(),
            waiting,
            done,
            headline: headline(snapshot, pool),
            recent: record.recent.iter().cloned().collect(),
            names,
            places,
        })
    }
}

/// A version that is taken back, or the stage that is open.
fn headline(snapshot: &Snapshot, pool: &PoolPlan) -> Option<String> {
    let of_pool = snapshot.rollouts.values().filter(|rollout| rollout.spec.policy == pool.name.as_str());
    let newest = of_pool.max_by_key(|rollout| rollout.version)?;
    if let Some(back) = newest.status.as_ref().and_then(|status| status.rollback.as_ref()) {
        return Some(back.says());
    }
    if let Some(earlier) = &newest.spec.rollback_of {
        let version = newest.spec.version.as_deref().unwrap_or("the version before");
        return Some(format!("back to {version}, because of rollout {earlier}"));
    }
    let stage = pool.stages.iter().find(|stage| stage.phase != StagePhase::Passed)?;
    let doing = match stage.phase {
        StagePhase::Baking => baking(stage.bake.as_ref()),
        StagePhase::Failed | StagePhase::Spoiled => "failed".to_owned(),
        _ => "under way".to_owned(),
    };
    Some(format!("stage {}: {doing}", stage.name))
}

impl Row {
    fn of(record: &Record, snapshot: &Snapshot, pool: &PoolPlan, name: &NodeName) -> Option<Self> {
        let (verdict, seen) = (pool.nodes.get(name)?, record.nodes.get(name)?);
        let is_driver = |owner: &pitcrew_core::snapshot::Owner| {
            snapshot.daemon_sets.get(&owner.uid).is_some_and(|set| set.driver_version.is_some())
        };
        let driver = snapshot
            .pods_on(name)
            .find(|pod| pod.owner.as_ref().is_some_and(is_driver))
            .and_then(|pod| DriverVersion::from_image(&pod.image));
        Some(Self {
            kind: verdict.reason.kind(),
            node: name.clone(),
            state: verdict.state,
            since: verdict.since.unwrap_or(seen.since),
            visit: seen.visit,
            driver: driver.map(|version| version.to_string()).unwrap_or_default(),
            why: verdict.reason.to_string(),
        })
    }
}

/// When it will all be done if visits go on as they went: what is left of them, shared among the slots.
fn ends(record: &Record, pool: &PoolPlan, now: Timestamp) -> Option<Timestamp> {
    if record.is_quiet {
        return None; // how long a bake takes is not for visits to tell
    }
    let mean = record.visits.mean()?;
    let under_way = record.nodes.values().filter_map(|seen| seen.visit);
    let left_of = |since: Timestamp| (mean - now.duration_since(since).as_secs_f64()).max(0.0);
    let left: Vec<f64> = under_way.map(left_of).collect();
    #[expect(clippy::cast_precision_loss, reason = "numbers of nodes")]
    let (waiting, slots) = (record.tally.waiting as f64, Slots::of(&pool.ledger).at_most().max(1) as f64);
    // The last visits do not share slots: the longest of them is a lower bound.
    let longest = left.iter().copied().fold(if waiting > 0.0 { mean } else { 0.0 }, f64::max);
    let seconds = ((waiting * mean + left.iter().sum::<f64>()) / slots).max(longest);
    now.checked_add(SignedDuration::try_from_secs_f64(seconds).ok()?).ok()
}
