//! The controller is killed at every one of its writes, in every scenario: once before the write is made, once after.
//! Whoever starts next must bring the story to the same end.
//!
//! In an ordinary test run only some points of the long stories are tried. `PITCREW_SWEEP=all` tries all of them.

use std::sync::atomic::Ordering;

use libtest_mimic::{Arguments, Failed, Trial};
use pitcrew_sim::cluster::Cluster;
use pitcrew_sim::scenario::{Broken, End, Stage, play_to_the_end};
use pitcrew_sim::scenarios;

const SEED: u64 = 7;
/// So many points of each story, evenly spread, if not all are asked for.
const POINTS: u64 = 6;

fn main() {
    let arguments = Arguments::from_args();
    let all = std::env::var("PITCREW_SWEEP").is_ok_and(|value| value == "all");
    let trials = scenarios::all().into_iter().enumerate().map(|(index, scenario)| {
        Trial::test(format!("killed at any write: {}", scenario.name), move || sweep(index, all))
    });
    libtest_mimic::run(&arguments, trials.collect()).exit();
}

fn sweep(index: usize, all: bool) -> Result<(), Failed> {
    let (reference, writes) = run(index, u64::MAX, false).map_err(|broken| broken.to_string())?;
    let stride = if all { 1 } else { (writes / POINTS).max(1) };
    let mut differences = Vec::new();
    let mut runs = 0;
    for point in (1..=writes).step_by(usize::try_from(stride)?) {
        for made in [false, true] {
            runs += 1;
            let place = format!("write {point} of {writes}, {}", if made { "made" } else { "not made" });
            match run(index, point, made) {
                Ok((end, _)) if end == reference => {}
                Ok((end, _)) => differences.push(format!("{place}: ended as {end:#?}")),
                Err(broken) => differences.push(format!("{place}: {broken}")),
            }
        }
    }
    if all {
        println!("{runs} runs, {} differences", differences.len());
    }
    match differences.first() {
        None => Ok(()),
        Some(first) => {
            Err(format!("{} of {runs} runs differ. {first}\nreference: {reference:#?}", differences.len())
                .into())
        }
    }
}

/// Plays one scenario and kills the controller at one of its writes.
fn run(index: usize, point: u64, made: bool) -> Result<(End, u64), Broken> {
    let broken = |error: String| Broken(error);
    let scenario =
        scenarios::all().into_iter().nth(index).ok_or_else(|| broken("no such scenario".to_owned()))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.map_err(|error| broken(error.to_string()))?.block_on(async {
        let cluster = Cluster::embedded(&scenario.fleet, SEED, scenario.behaviour.clone()).await;
        let cluster = cluster.map_err(|error| broken(error.to_string()))?;
        let mut writes = None;
        let crash = |stage: &Stage| writes = Some(stage.crash_at(point, made));
        let end = play_to_the_end(&scenario, cluster, crash).await?;
        Ok((end, writes.map_or(0, |writes| writes.load(Ordering::Relaxed))))
    })
}
