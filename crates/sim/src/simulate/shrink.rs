//! A failing case made smaller: fewer faults, fewer nodes, less time, and still the same promise broken.

use super::case::{Case, Wish};
use super::promises::Promise;
use super::run::{Run, RunError, run};

/// So many runs are enough to try.
const RUNS_MAX: usize = 200;

/// The smallest case found in which the same promise is broken.
pub fn shrink(seed: u64, wish: &Wish, promise: Promise) -> Result<(Wish, Run), RunError> {
    let case = Case::new(seed, wish);
    let mut found = Wish { faults: Some(case.faults.clone()), nodes: Some(case.fleet.nodes), ..wish.clone() };
    let mut tries = Tries { seed, promise, left: RUNS_MAX };
    let mut best = run(&Case::new(seed, &found), false)?;
    if best.violation.as_ref().is_none_or(|violation| violation.promise != promise) {
        // Naming what was drawn changed nothing, unless the case cannot be named: then it stays as it was.
        (found, best) = (wish.clone(), run(&case, false)?);
        return Ok((found, best));
    }
    loop {
        let mut smaller = false;
        for candidate in candidates(&found) {
            if let Some(run) = tries.play(&candidate)? {
                (found, best, smaller) = (candidate, run, true);
                break;
            }
        }
        if !smaller || tries.left == 0 {
            return Ok((found, best));
        }
    }
}

struct Tries {
    seed: u64,
    promise: Promise,
    left: usize,
}

impl Tries {
    /// The run, if it still breaks the promise.
    fn play(&mut self, wish: &Wish) -> Result<Option<Run>, RunError> {
        if self.left == 0 {
            return Ok(None);
        }
        self.left -= 1;
        let run = run(&Case::new(self.seed, wish), false)?;
        let same = run.violation.as_ref().is_some_and(|violation| violation.promise == self.promise);
        Ok(same.then_some(run))
    }
}

/// A little less of each thing, the largest steps first.
fn candidates(wish: &Wish) -> Vec<Wish> {
    let faults = wish.faults.clone().unwrap_or_default();
    let mut all = Vec::new();
    if !wish.plain {
        all.push(Wish { plain: true, ..wish.clone() });
    }
    if faults.len() > 3 {
        let half = faults.len() / 2;
        let (first, second) = (faults.iter().take(half).copied(), faults.iter().skip(half).copied());
        all.extend(
            [first.collect(), second.collect()].map(|faults| Wish { faults: Some(faults), ..wish.clone() }),
        );
    }
    let nodes = wish.nodes.unwrap_or(1);
    let fewer = [nodes / 2, nodes.saturating_sub(1)].into_iter().filter(|fewer| (1..nodes).contains(fewer));
    all.extend(fewer.map(|nodes| Wish { nodes: Some(nodes), ..wish.clone() }));
    for fault in &faults {
        let without = faults.iter().filter(|other| *other != fault).copied().collect();
        all.push(Wish { faults: Some(without), ..wish.clone() });
    }
    all
}
