//! Many runs on all cores, and what they come to together.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pitcrew_core::contract::State;

use super::case::{Case, Wish};
use super::fault::Fault;
use super::record::Coverage;
use super::run::{Run, RunError, run};

/// What many runs come to.
#[derive(Clone, Debug, Default)]
pub struct Total {
    /// Runs.
    pub runs: u64,
    /// Those in which a promise was broken, by their seeds.
    pub broken: BTreeMap<u64, Run>,
    /// Nodes times the time that they were simulated, in hours.
    pub node_hours: f64,
    /// Nodes of all runs together.
    pub nodes: u64,
    /// Changes of API objects, each checked against every promise.
    pub changes: u64,
    /// How often each fault happened.
    pub faults: BTreeMap<Fault, u64>,
    /// Which faults met nodes in which states.
    pub coverage: Coverage,
    /// How often each transition was made.
    pub transitions: BTreeMap<(State, State), u64>,
    /// How versions reached the fleets, and what rollouts came to.
    pub rollouts: BTreeMap<&'static str, u64>,
    /// Over all runs, in whatever order they ended: the same for the same seeds and commit.
    pub hash: u64,
}

impl Total {
    fn add(&mut self, run: Run) {
        self.runs += 1;
        self.nodes += run.nodes as u64;
        self.node_hours += node_hours(run.nodes, run.time);
        self.changes += run.changes;
        self.hash = self.hash.wrapping_add(run.hash.rotate_left((run.seed % 64) as u32));
        for (fault, count) in &run.faults {
            *self.faults.entry(*fault).or_default() += count;
        }
        for (transition, count) in &run.transitions {
            *self.transitions.entry(*transition).or_default() += count;
        }
        for (what, count) in &run.rollouts {
            *self.rollouts.entry(what).or_default() += count;
        }
        self.coverage.extend(run.coverage.iter().copied());
        if run.violation.is_some() {
            self.broken.insert(run.seed, run);
        }
    }

    /// Pairs of a state and a fault that can meet: every fault, wherever a node can be.
    pub fn pairs() -> impl Iterator<Item = (State, Fault)> {
        let faults = || Fault::ALL.iter().copied().filter(|fault| !fault.is_standing());
        State::ALL.into_iter().flat_map(move |state| faults().map(move |fault| (state, fault)))
    }
}

fn node_hours(nodes: usize, time: Duration) -> f64 {
    time.as_secs_f64() / 3600.0 * f64::from(u32::try_from(nodes).unwrap_or(u32::MAX))
}

/// Plays all seeds on `threads` threads; `after_each` hears of each and says whether to go on.
pub fn run_all(
    seeds: Range<u64>,
    wish: &Wish,
    threads: usize,
    after_each: impl Fn(&Total) -> bool + Sync,
) -> Result<Total, RunError> {
    let next = AtomicU64::new(seeds.start);
    let total = Mutex::new(Total::default());
    let work = || -> Result<(), RunError> {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end {
                return Ok(());
            }
            let run = run(&Case::new(seed, wish), false)?;
            let mut total = total.lock().unwrap_or_else(PoisonError::into_inner);
            total.add(run);
            if !after_each(&total) {
                next.store(seeds.end, Ordering::Relaxed);
            }
        }
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().unwrap_or(Err(RunError::Panicked)))
    })?;
    Ok(total.into_inner().unwrap_or_else(PoisonError::into_inner))
}
