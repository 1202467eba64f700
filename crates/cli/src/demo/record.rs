//! What passed so far: the controller shows each pass, and this remembers what one pass alone does not tell.
//!
//! It is called for every pass, so it looks at each node once and copies nothing that has not changed.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use jiff::Timestamp;
use pitcrew_core::api::StagePhase;
use pitcrew_core::contract::State;
use pitcrew_core::names::NodeName;
use pitcrew_core::plan::{Ledger, Plan, PoolPlan, Verdict};
use pitcrew_core::reason::Kind;
use pitcrew_core::snapshot::Snapshot;
use pitcrew_core::version::DriverVersion;

use crate::text::{clock, count};

/// More than any terminal shows.
const RECENT_MAX: usize = 64;

/// Where a node is, as far as progress goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// On the new version, in service.
    Done,
    /// Between slot and release.
    Moving,
    /// Not begun.
    Waiting,
    /// It went wrong.
    Failed,
}

/// How many nodes are where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tally {
    pub(super) done: usize,
    pub(super) moving: usize,
    pub(super) waiting: usize,
    pub(super) failed: usize,
}

impl Tally {
    /// All nodes.
    pub(super) fn total(self) -> usize {
        self.done + self.moving + self.waiting + self.failed
    }

    /// Nothing more will happen by itself.
    pub(super) fn is_over(self) -> bool {
        self.total() > 0 && self.done + self.failed == self.total()
    }

    fn add(&mut self, place: Place) {
        match place {
            Place::Done => self.done += 1,
            Place::Moving => self.moving += 1,
            Place::Waiting => self.waiting += 1,
            Place::Failed => self.failed += 1,
        }
    }
}

/// A node went from one state to another.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Transition {
    /// Seconds since the version was changed.
    pub(super) at: i64,
    /// The node.
    pub(super) node: NodeName,
    /// Where it is now.
    pub(super) to: State,
    /// A few words about it.
    pub(super) words: String,
}

impl Transition {
    /// Passed through within a moment, or by all nodes at once: not worth a line where lines are few.
    fn is_minor(&self) -> bool {
        matches!(self.to, State::UpgradeRequired | State::WaitForJobsRequired | State::UncordonRequired)
    }
}

/// Something was decided about a rollout.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Decision {
    /// Seconds since the version was changed.
    pub(super) at: i64,
    /// What, and why.
    pub(super) what: String,
}

/// How long visits took, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Visits {
    pub(super) number: u32,
    pub(super) min: f64,
    pub(super) max: f64,
    sum: f64,
}

impl Visits {
    fn add(&mut self, seconds: f64) {
        self.min = if self.number == 0 { seconds } else { self.min.min(seconds) };
        self.max = self.max.max(seconds);
        self.sum += seconds;
        self.number += 1;
    }

    /// The mean, if there was any.
    pub(super) fn mean(&self) -> Option<f64> {
        (self.number > 0).then(|| self.sum / f64::from(self.number))
    }
}

/// What is remembered of a node.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    /// Its state.
    pub(super) state: State,
    /// Since when it is in that state.
    pub(super) since: Timestamp,
    /// Since when it is on a visit.
    pub(super) visit: Option<Timestamp>,
}

/// What passed so far.
#[derive(Debug)]
pub(super) struct Record {
    /// The version to which the nodes go.
    pub(super) target: DriverVersion,
    /// When that version was asked for.
    pub(super) began: Timestamp,
    pub(super) nodes: BTreeMap<NodeName, Seen>,
    pub(super) recent: VecDeque<Transition>,
    pub(super) visits: Visits,
    pub(super) tally: Tally,
    /// The nodes that were ever on a visit.
    pub(super) visited: BTreeSet<NodeName>,
    /// A stage is watched at work, and nothing moves.
    pub(super) is_quiet: bool,
    /// Where nodes go if the target is taken back.
    back_to: Option<DriverVersion>,
    /// The target was asked for by everybody who has to know.
    met_target: bool,
    /// How many decisions of each rollout were told.
    told: BTreeMap<String, usize>,
}

impl Record {
    /// Nothing yet; every node should come to `target`.
    pub(super) fn begin(target: DriverVersion, now: Timestamp) -> Self {
        Self {
            target,
            began: now,
            nodes: BTreeMap::new(),
            recent: VecDeque::new(),
            visits: Visits::default(),
            tally: Tally::default(),
            visited: BTreeSet::new(),
            is_quiet: false,
            back_to: None,
            met_target: false,
            told: BTreeMap::new(),
        }
    }

    /// It ends on this version, which may be the one before.
    pub(super) fn ending_on(self, version: DriverVersion) -> Self {
        Self { back_to: Some(version).filter(|version| *version != self.target), ..self }
    }

    /// What was decided since the last time.
    pub(super) fn news(&mut self, snapshot: &Snapshot) -> Vec<Decision> {
        let mut news = Vec::new();
        // A decision of this pass: the API keeps whole seconds, and would have it before what led to it.
        for (name, rollout) in &snapshot.rollouts {
            let timeline =
                rollout.status.as_ref().map(|status| status.timeline.as_slice()).unwrap_or_default();
            let told = self.told.entry(name.clone()).or_default();
            news.extend(timeline.iter().skip(*told).map(|entry| Decision {
                at: snapshot.now.duration_since(self.began).as_secs(),
                what: entry.what.clone(),
            }));
            *told = timeline.len();
        }
        news
    }

    /// A version that was taken back is not the target any more.
    fn follow(&mut self, pool: &PoolPlan) {
        self.met_target |= pool.version.as_ref() == Some(&self.target);
        if self.met_target
            && let Some(version) = self.back_to.take_if(|version| pool.version.as_ref() == Some(version))
        {
            self.target = version;
        }
    }

    /// Takes in one pass; `moved` hears of each transition.
    pub(super) fn see(&mut self, snapshot: &Snapshot, plan: &Plan, mut moved: impl FnMut(&Transition)) {
        let Some(pool) = plan.pools.first() else { return };
        if !self.nodes.keys().eq(pool.nodes.keys()) {
            self.meet(pool.nodes.iter(), snapshot.now);
        }
        self.follow(pool);
        let on_target = pool.version.as_ref() == Some(&self.target);
        let mut tally = Tally::default();
        for ((name, verdict), seen) in pool.nodes.iter().zip(self.nodes.values_mut()) {
            tally.add(place(verdict, on_target));
            if verdict.state == seen.state {
                continue;
            }
            let before = *seen;
            seen.enter(verdict, name, snapshot);
            if verdict.state == State::CordonRequired {
                self.visited.insert(name.clone());
            }
            if verdict.state == State::UpgradeDone
                && let Some(visit) = before.visit
            {
                self.visits.add(snapshot.now.duration_since(visit).as_secs_f64());
            }
            let words = words(&before, verdict, name, snapshot, &pool.ledger);
            let at = snapshot.now.duration_since(self.began).as_secs();
            let transition = Transition { at, node: name.clone(), to: verdict.state, words };
            moved(&transition);
            if !transition.is_minor() {
                self.recent.truncate(RECENT_MAX - 1);
                self.recent.push_front(transition);
            }
        }
        self.tally = tally;
        let bakes = pool.stages.iter().any(|stage| stage.phase == StagePhase::Baking);
        self.is_quiet = bakes && tally.moving == 0;
    }

    /// The nodes are others than before: those that are new begin now, in the state they have.
    fn meet<'a>(&mut self, nodes: impl Iterator<Item = (&'a NodeName, &'a Verdict)>, now: Timestamp) {
        let mut known = std::mem::take(&mut self.nodes);
        self.nodes = nodes
            .map(|(name, verdict)| {
                let fresh = Seen { state: verdict.state, since: now, visit: None };
                (name.clone(), known.remove(name).unwrap_or(fresh))
            })
            .collect();
    }
}

impl Seen {
    fn enter(&mut self, verdict: &Verdict, name: &NodeName, snapshot: &Snapshot) {
        let on_record = || {
            let visit = snapshot.nodes.get(name).and_then(|node| node.visit.as_ref());
            visit.and_then(|visit| visit.as_ref().ok()).map_or(snapshot.now, |visit| visit.since)
        };
        self.visit = match verdict.state {
            State::UpgradeDone => None,
            state if state.in_flight() => Some(self.visit.unwrap_or_else(on_record)),
            _ => self.visit,
        };
        self.state = verdict.state;
        self.since = verdict.since.unwrap_or(snapshot.now);
    }
}

/// Where a node is, as far as progress goes.
pub(super) fn place(verdict: &Verdict, on_target: bool) -> Place {
    match verdict.state {
        State::UpgradeFailed => Place::Failed,
        State::UpgradeDone if on_target && verdict.in_sync && verdict.reason.kind() == Kind::Done => {
            Place::Done
        }
        state if state.in_flight() => Place::Moving,
        _ => Place::Waiting,
    }
}

/// A few words about a transition: what was reached, and how long it took.
fn words(before: &Seen, verdict: &Verdict, name: &NodeName, snapshot: &Snapshot, ledger: &Ledger) -> String {
    let took = snapshot.now.duration_since(before.since).as_secs();
    match verdict.state {
        State::CordonRequired => match ledger.max_parallel {
            Some(limit) => format!("slot {} of {limit}", ledger.moving),
            None => format!("{} out", count(ledger.out as u64, "node")),
        },
        State::WaitForJobsRequired => "cordoned".to_owned(),
        State::PodDeletionRequired => {
            let uses_gpu = snapshot.pods_on(name).filter(|pod| !pod.is_daemon() && !pod.resources.is_empty());
            match uses_gpu.filter(|pod| !pod.is_finished()).count() {
                0 => "no pods to move".to_owned(),
                pods => format!("{} to move", count(pods as u64, "pod")),
            }
        }
        State::PodRestartRequired if before.state == State::PodDeletionRequired && took > 0 => {
            format!("empty after {}", clock(took))
        }
        State::PodRestartRequired => "driver is replaced".to_owned(),
        State::ValidationRequired => format!("driver ready after {}", clock(took)),
        State::UncordonRequired => format!("validated after {}", clock(took)),
        State::UpgradeDone => match before.visit {
            Some(visit) => format!("visit {}", clock(snapshot.now.duration_since(visit).as_secs())),
            None => String::new(),
        },
        State::UpgradeFailed => verdict.reason.to_string(),
        State::UpgradeRequired => "driver is outdated".to_owned(),
        State::DrainRequired | State::Unknown => String::new(),
    }
}
