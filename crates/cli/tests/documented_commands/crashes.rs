//! `kill -9` at random moments, and a driver that is dead on arrival.

use std::thread::sleep;
use std::time::Duration;

use pitcrew_sim::actors::{Fault, Nodes};
use tokio::time::Instant;

use crate::controller::Controller;
use crate::stage::{Outcome, Stage, must, until};

/// So many controllers die on the way.
const KILLS: u32 = 10;
/// Each of them lives so long at most after it has begun to work.
const LIFE_MAX_MILLIS: u64 = 1500;
/// How long a dead driver pod may go unnoticed.
const TOLD_WITHIN: Duration = Duration::from_mins(1);

/// Wherever the process dies, whoever comes next brings the fleet to the same end.
pub(crate) fn killed_at_random(stage: &mut Stage) -> Outcome {
    let mut chance = fastrand::Rng::with_seed(fastrand::u64(..));
    let seed = chance.get_seed();
    let controller = Controller::start(stage)?;
    stage.until_known()?;
    let before = stage.drivers()?;
    let version = stage.patch_version()?;
    controller.kill();
    for _ in 1..KILLS {
        // As if its time had run out: waiting for that is another test's matter.
        stage.sh("kubectl -n gpu-operator delete lease pitcrew-controller --ignore-not-found")?;
        let controller = Controller::start(stage)?;
        sleep(Duration::from_millis(chance.u64(0..LIFE_MAX_MILLIS)));
        controller.kill();
    }
    stage.sh("kubectl -n gpu-operator delete lease pitcrew-controller --ignore-not-found")?;
    let last = Controller::start(stage)?;
    if let Err(failed) = stage.until_upgraded(&version) {
        let (said, log) = (stage.sh("pitcrew status")?, last.log()?);
        let why = failed.message().unwrap_or_default();
        return Err(format!("seed {seed}: {why}\n{said}\n{log}").into());
    }
    let left =
        stage.sh(r"kubectl get nodes -ojsonpath='{.items[*].metadata.annotations.pitcrew\.dev/visit}'")?;
    must(left.is_empty(), || format!("seed {seed}: a visit record was left behind: {left}"))?;
    let after = stage.drivers()?;
    must(before.iter().all(|(node, driver)| after.get(node) != Some(driver)), || {
        format!("seed {seed}: a driver was not replaced: {before:?}, {after:?}")
    })
}

/// The image is not there: `explain` and an Event say so long before any deadline.
pub(crate) fn dead_driver(stage: &mut Stage) -> Outcome {
    let _controller = Controller::start(stage)?;
    stage.until_known()?;
    let version = stage.new_version();
    stage.behaviour().change(|behaviour| {
        *behaviour = behaviour.clone().with_fault(Nodes::All, &version, Fault::ImageMissing);
    });
    stage.set_version(&version)?;
    let dead = until("a driver is to come up", || {
        let states = stage.states()?;
        Ok(states.into_iter().find(|(_, state)| state == "pod-restart-required").map(|(node, _)| node))
    })?;
    let since = Instant::now();
    until("explain names the cause", || {
        Ok(stage.sh(&format!("pitcrew explain {dead}"))?.contains("ImagePullBackOff").then_some(()))
    })?;
    until("an Event names the cause", || {
        let warnings = "kubectl get events --field-selector type=Warning -ojsonpath='{.items[*].message}'";
        Ok(stage.sh(warnings)?.contains("nvidia-driver-ctr ImagePullBackOff").then_some(()))
    })?;
    must(since.elapsed() < TOLD_WITHIN, || format!("told only after {:?}", since.elapsed()))?;
    stage.behaviour().change(|behaviour| behaviour.drivers.clear());
    stage.until_upgraded(&version)
}
