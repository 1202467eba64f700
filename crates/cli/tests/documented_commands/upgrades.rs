//! Upgrade, monitor, pause, skip, retry: each by the documented command, each with its documented effect.

use std::collections::BTreeSet;

use libtest_mimic::Failed;
use pitcrew_core::contract::{State, metric};
use pitcrew_sim::actors::{Fault, Nodes};
use pitcrew_sim::scenario::WHOLE_WALK;

use crate::controller::Controller;
use crate::stage::{DOCUMENTED, Outcome, PATCH, Stage, all_done, must};

const EVENTS: &str = "kubectl get events --sort-by='.lastTimestamp' | grep GPUDriverUpgrade";
const RETRY: &str =
    "kubectl label node <node-name>  nvidia.com/gpu-driver-upgrade-state=upgrade-required --overwrite";
const NODES: [&str; 3] = ["gpu-01", "gpu-02", "gpu-03"];

/// The whole page: patch, monitor, metrics, events, log.
pub(crate) fn upgrade(stage: &mut Stage) -> Outcome {
    let controller = Controller::start(stage)?;
    stage.until_known()?;
    stage.sh("kubectl delete events --all")?;

    let said = stage.sh(PATCH)?;
    must(said == "clusterpolicy.nvidia.com/cluster-policy patched\n", || format!("kubectl said {said}"))?;
    controller.until_metric(metric::IN_PROGRESS, 1.0)?;
    check_metrics(&controller, &[(metric::AVAILABLE, 0.0), (metric::AUTO_UPGRADE_ENABLED, 1.0)])?;
    let mut seen = BTreeSet::new();
    crate::stage::until("every node is upgrade-done again", || {
        let states = stage.states()?;
        seen.extend(states.values().cloned());
        Ok((seen.len() > 1 && all_done(&states)).then_some(()))
    })?;
    stage.until_upgraded(DOCUMENTED)?;
    must(seen.contains(State::UpgradeRequired.as_str()), || format!("no node was seen waiting: {seen:?}"))?;
    let in_between = seen.iter().filter_map(|state| state.parse().ok()).any(State::in_flight);
    must(in_between, || format!("no node was seen on its way: {seen:?}"))?;

    let finished = [
        (metric::AUTO_UPGRADE_ENABLED, 1.0),
        (metric::DRIVER_AUTO_UPGRADE_ENABLED, 1.0),
        (metric::IN_PROGRESS, 0.0),
        (metric::DONE, 3.0),
        (metric::FAILED, 0.0),
        (metric::AVAILABLE, 1.0),
        (metric::PENDING, 0.0),
    ];
    check_metrics(&controller, &finished)?;
    check_events(stage)?;
    let log = controller.log()?;
    let decisions: Vec<&str> = log.lines().filter(|line| line.contains("controllers.Upgrade")).collect();
    let told = NODES.iter().all(|node| decisions.iter().any(|line| line.contains(node)));
    must(told, || format!("`grep controllers.Upgrade` does not tell of every node:\n{log}"))
}

fn check_metrics(controller: &Controller, expected: &[(&str, f64)]) -> Outcome {
    for (name, value) in expected {
        controller.until_metric(name, *value)?;
    }
    Ok(())
}

/// The documented command shows each node's true path. Events are written in the background: the last may be late.
fn check_events(stage: &Stage) -> Outcome {
    let walk: Vec<&str> = WHOLE_WALK.iter().map(|state| state.as_str()).collect();
    let count = NODES.len() * walk.len();
    let table = crate::stage::until("all events are written", || {
        let table = stage.sh(EVENTS)?;
        Ok((table.lines().count() >= count).then_some(table))
    })?;
    for node in NODES {
        let of_node = table.lines().filter(|line| line.contains(&format!("node/{node} ")));
        let states: Vec<&str> =
            of_node.filter_map(|line| line.split_once('[')?.1.split_once(']')).map(|(s, _)| s).collect();
        must(states == walk, || format!("the events of {node} say {states:?}:\n{table}"))?;
    }
    Ok(())
}

/// The switch of the documents stops everything where it is; nothing is lost.
pub(crate) fn pause_and_resume(stage: &mut Stage) -> Outcome {
    let controller = Controller::start(stage)?;
    stage.until_known()?;
    let version = stage.patch_version()?;
    stage.until_states("a driver restarts", |states| {
        states.values().any(|state| state == "pod-restart-required")
    })?;
    stage.patch_option("autoUpgrade", "false")?;
    controller.until_metric(metric::AUTO_UPGRADE_ENABLED, 0.0)?;
    let paused = stage.until_states("a node is half-way", |states| !all_done(states))?;

    // The driver that was restarted comes up meanwhile; the node stays where it is all the same.
    std::thread::sleep(std::time::Duration::from_secs(4));
    let still = stage.stands_still()?;
    must(still == paused, || format!("nodes moved in the pause: {paused:?} became {still:?}"))?;
    let records =
        stage.sh(r"kubectl get nodes -ojsonpath='{.items[*].metadata.annotations.pitcrew\.dev/visit}'")?;
    must(!records.is_empty(), || "the record of the visit is lost".to_owned())?;

    stage.patch_option("autoUpgrade", "true")?;
    stage.until_upgraded(&version)?;
    controller.until_metric(metric::AUTO_UPGRADE_ENABLED, 1.0)
}

/// The documented label leaves a node out for as long as it is there.
pub(crate) fn skip(stage: &mut Stage) -> Outcome {
    let _controller = Controller::start(stage)?;
    stage.until_known()?;
    stage.sh("kubectl label node gpu-02 nvidia.com/gpu-driver-upgrade.skip=true")?;
    let before = stage.drivers()?;
    let version = stage.patch_version()?;
    stage.until_states("the others are done", |states| {
        states
            .iter()
            .all(|(node, state)| state == if node == "gpu-02" { "upgrade-required" } else { "upgrade-done" })
    })?;
    stage.stands_still()?;
    let after = stage.drivers()?;
    must(before["gpu-02"] == after["gpu-02"], || "the driver of the skipped node was replaced".to_owned())?;

    stage.sh("kubectl label node gpu-02 nvidia.com/gpu-driver-upgrade.skip-")?;
    stage.until_upgraded(&version)
}

/// A driver that cannot start fails its node, which stays out until a person sets the documented label.
pub(crate) fn retry(stage: &mut Stage) -> Outcome {
    let (controller, version) = one_fails(stage)?;
    let failed = stage.until_states("one node failed and the others are done", |states| {
        states
            .iter()
            .all(|(node, state)| state == if node == "gpu-02" { "upgrade-failed" } else { "upgrade-done" })
    });
    failed.map_err(|failed| with_log(&failed, &controller))?;
    controller.until_metric(metric::FAILED, 1.0)?;
    let cordoned = stage.sh("kubectl get node gpu-02 -ojsonpath='{.spec.unschedulable}'")?;
    must(cordoned == "true", || "the failed node is in service".to_owned())?;
    let warnings = stage.sh(&format!("{EVENTS} | grep Warning"))?;
    let named = warnings.contains("[upgrade-failed]") && warnings.contains("node/gpu-02");
    must(named, || format!("no Warning names the failed node: {warnings}"))?;
    stage.stands_still()?;

    stage.behaviour().change(|behaviour| behaviour.drivers.clear());
    stage.sh(&RETRY.replace("<node-name>", "gpu-02"))?;
    stage.until_upgraded(&version).map_err(|failed| with_log(&failed, &controller))?;
    controller.until_metric(metric::FAILED, 0.0)?;
    stage.sh("kubectl delete driverpolicy gpu").map(drop)
}

/// A controller, and a version that cannot start on `gpu-02`, which fails after six seconds.
pub(crate) fn one_fails(stage: &mut Stage) -> Result<(Controller, String), Failed> {
    let spec = r#"{
        "driver": {"name": "gpu", "validator": {"selector": "app=nvidia-operator-validator"}},
        "upgradePolicy": {"maxParallelUpgrades": 1, "maxUnavailable": "100%"},
        "limits": {"driverReady": "6s"}
    }"#;
    stage.apply_policy("gpu", spec)?;
    let controller = Controller::start(stage)?;
    stage.until_known()?;
    let version = stage.new_version();
    stage.behaviour().change(|behaviour| {
        *behaviour =
            behaviour.clone().with_fault(Nodes::Named("gpu-02".to_owned()), &version, Fault::CrashLoop);
    });
    stage.set_version(&version)?;
    Ok((controller, version))
}

fn with_log(failed: &Failed, controller: &Controller) -> Failed {
    format!("{}\n{}", failed.message().unwrap_or_default(), controller.log().unwrap_or_default()).into()
}
