//! Every scenario with the controller disturbed at one point, and then at the next: killed at each of its writes, once
//! before the write is made and once after; blind for two seconds from each change of what it watches; the same, and what
//! changed meanwhile is only found in a new list. It must come to the same end as undisturbed.
//!
//! In an ordinary test run only some points of each story are tried. `PITCREW_SWEEP=all` tries all of them.

use std::sync::atomic::Ordering;

use libtest_mimic::{Arguments, Failed, Trial};
use pitcrew_sim::cluster::Cluster;
use pitcrew_sim::scenario::{Broken, Disturbance, End, Stage, play_to_the_end};
use pitcrew_sim::scenarios;

const SEED: u64 = 7;
/// So many points of each story, evenly spread, if not all are asked for.
const POINTS: u64 = 6;

/// Stories that look at single moments, or whose deadlines are a few seconds: a controller that is blind for two of them
/// may rightly be elsewhere.
const MOMENTARY: [&str; 8] = [
    "a skipped node is left out until its label goes",
    "a pause keeps everything and a resume goes on",
    "bad-max-unavailable",
    "two-nvidiadrivers",
    "one-bad-nvidiadriver",
    "failures-stop-new-starts",
    "slurm-keeps-allocating",
    "one-restart-of-the-plugin-when-the-first-node-is-ready-is-too-early",
];

fn main() {
    let arguments = Arguments::from_args();
    let all = std::env::var("PITCREW_SWEEP").is_ok_and(|value| value == "all");
    let mut trials = Vec::new();
    for (index, scenario) in scenarios::all().into_iter().enumerate() {
        for (what, disturbances) in [
            (
                "killed at any write",
                &[Disturbance::Killed { made: false }, Disturbance::Killed { made: true }][..],
            ),
            ("any change is seen late", &[Disturbance::SeesLate]),
            ("any change is missed", &[Disturbance::Misses]),
        ] {
            if disturbances.len() == 1 && MOMENTARY.contains(&scenario.name) {
                continue;
            }
            let sweep = move || sweep(index, disturbances, all);
            trials.push(Trial::test(format!("{what}: {}", scenario.name), sweep));
        }
    }
    libtest_mimic::run(&arguments, trials).exit();
}

fn sweep(index: usize, disturbances: &[Disturbance], all: bool) -> Result<(), Failed> {
    let mut differences = Vec::new();
    let mut runs = 0;
    let mut reference = None;
    for disturbance in disturbances {
        let (end, points) = run(index, *disturbance, u64::MAX)?;
        let expected = reference.get_or_insert(end);
        let stride = if all { 1 } else { (points / POINTS).max(1) };
        for point in (1..=points).step_by(usize::try_from(stride)?) {
            runs += 1;
            let place = format!("{disturbance:?} at {point} of {points}");
            match run(index, *disturbance, point) {
                Ok((end, _)) if end == *expected => {}
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

/// Plays one scenario and disturbs the controller at one point.
fn run(index: usize, disturbance: Disturbance, point: u64) -> Result<(End, u64), Broken> {
    let broken = |error: String| Broken(error);
    let scenario =
        scenarios::all().into_iter().nth(index).ok_or_else(|| broken("no such scenario".to_owned()))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.map_err(|error| broken(error.to_string()))?.block_on(async {
        let cluster = Cluster::embedded(&scenario.fleet, SEED, scenario.behaviour.clone()).await;
        let cluster = cluster.map_err(|error| broken(error.to_string()))?;
        let mut points = None;
        let disturb = |stage: &Stage| points = Some(stage.disturb(disturbance, point));
        let mut end = play_to_the_end(&scenario, cluster, disturb).await?;
        if !matches!(disturbance, Disturbance::Killed { .. }) {
            // Whether a version had failed or was replaced before that is a matter of seconds.
            end.rollouts.clear();
        }
        Ok((end, points.map_or(0, |points| points.load(Ordering::Relaxed))))
    })
}
