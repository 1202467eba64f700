//! What people get wrong: each mistake has a sentence, does no harm, and is over when it is mended.

use crate::controller::Controller;
use crate::stage::{Outcome, Stage, must, policy, until};

/// Refused by the API server itself, before the controller sees them.
pub(crate) fn bad_driver_policies(stage: &mut Stage) -> Outcome {
    let bad = [
        (
            r#"{"driver": {"name": "gpu"}, "upgradePolicy": {"maxUnavailable": "abc"}}"#,
            "maxUnavailable must be a number of nodes (0 or more) or a percentage from 0% to 100%",
        ),
        (
            r#"{"driver": {"name": "gpu"}, "upgradePolicy": {"maxParallelUpgrades": -1}}"#,
            "maxParallelUpgrades must be 0 (no limit of its own) or more",
        ),
        (
            r#"{"driver": {"name": "ofed"}}"#,
            "daemonSets.selector is required for a driver other than gpu: name the label of its DaemonSets",
        ),
        (
            r#"{"driver": {"name": "gpu"}, "limits": {"driverReady": "soon"}}"#,
            "limits.driverReady must be a duration such as 30m or 2h",
        ),
    ];
    for (spec, sentence) in bad {
        let output = stage.apply(&policy("bad", spec))?;
        let said = String::from_utf8_lossy(&output.stderr);
        must(!output.status.success(), || format!("{spec} was accepted"))?;
        must(said.contains(sentence), || format!("{spec} was refused, but without \"{sentence}\": {said}"))?;
    }
    let created = stage.sh("kubectl get driverpolicies -o name")?;
    must(created.is_empty(), || format!("created all the same: {created}"))
}

/// A ClusterPolicy has no such guard: its pool freezes, and an Event on it says why.
pub(crate) fn bad_cluster_policy(stage: &mut Stage) -> Outcome {
    let controller = Controller::start(stage)?;
    stage.until_known()?;
    stage.patch_option("maxUnavailable", r#""abc""#)?;
    let event = until_cluster_policy_event(stage, "maxUnavailable")?;
    must(event.contains("abc"), || format!("the Event does not name the value: {event}"))?;
    let version = stage.patch_version()?;
    let states = stage.stands_still()?;
    must(crate::stage::all_done(&states), || format!("nodes were touched: {states:?}"))?;
    controller.until_it_says("maxUnavailable")?;

    stage.patch_option("maxUnavailable", r#""25%""#)?;
    stage.until_upgraded(&version)?;
    // The same mistake again is a new one to the person who makes it, and `describe` is where they look.
    stage.sh("kubectl delete events --all")?;
    stage.patch_option("maxUnavailable", r#""abc""#)?;
    let told = until_cluster_policy_event(stage, "maxUnavailable").and_then(|_| {
        let described = stage.sh("kubectl describe clusterpolicy cluster-policy")?;
        must(described.contains("DriverUpgradeFrozen"), || {
            format!("describe does not show the Event: {described}")
        })
    });
    stage.patch_option("maxUnavailable", r#""25%""#)?;
    stage.stands_still()?;
    told
}

/// Waits for a Warning on the ClusterPolicy that contains `what`.
pub(crate) fn until_cluster_policy_event(stage: &Stage, what: &str) -> Result<String, libtest_mimic::Failed> {
    let messages = "kubectl get events --field-selector involvedObject.kind=ClusterPolicy,type=Warning \
         -ojsonpath='{range .items[*]}{.message}{\"\\n\"}{end}'";
    until(&format!("an Event on the ClusterPolicy says \"{what}\""), || {
        Ok(stage.sh(messages)?.lines().find(|message| message.contains(what)).map(str::to_owned))
    })
}

/// Nobody can tell which of them is meant.
pub(crate) fn two_policies(stage: &mut Stage) -> Outcome {
    let controller = Controller::start(stage)?;
    stage.until_known()?;
    stage.apply_policy("one", r#"{"driver": {"name": "gpu"}}"#)?;
    stage.apply_policy("other", r#"{"driver": {"name": "gpu"}}"#)?;
    controller.until_it_says("claimed by more than one policy")?;
    let version = stage.patch_version()?;
    let states = stage.stands_still()?;
    must(crate::stage::all_done(&states), || format!("nodes were touched: {states:?}"))?;
    let told = until_status(stage, "one", "other").and_then(|()| until_status(stage, "other", "one"));

    stage.sh("kubectl delete driverpolicy other")?;
    stage.until_upgraded(&version)?;
    stage.sh("kubectl delete driverpolicy one")?;
    told
}

/// Waits until the status of a policy says something.
fn until_status(stage: &Stage, name: &str, what: &str) -> Outcome {
    let mut last = String::new();
    let said = until(&format!("the status of driverpolicy/{name} says \"{what}\""), || {
        last = stage.sh(&format!("kubectl get driverpolicy {name} -ojsonpath='{{.status.message}}'"))?;
        Ok(last.contains(what).then_some(()))
    });
    said.map_err(|failed| format!("{}; it says \"{last}\"", failed.message().unwrap_or_default()).into())
}

/// A selector with a slip in it.
pub(crate) fn no_daemon_set(stage: &mut Stage) -> Outcome {
    let _controller = Controller::start(stage)?;
    stage.until_known()?;
    stage.apply_policy(
        "gpu",
        r#"{"driver": {"name": "gpu", "daemonSets": {"selector": "app=nvidia-drivr"}}}"#,
    )?;
    until_status(stage, "gpu", "no DaemonSet in namespace gpu-operator matches app=nvidia-drivr")?;
    let ready = stage.sh("kubectl get driverpolicy gpu -ojsonpath='{.status.ready}'")?;
    must(ready == "false", || format!("it says that it is in force: {ready}"))?;
    stage.stands_still()?;
    stage.sh("kubectl delete driverpolicy gpu").map(drop)
}

/// A label that nobody knows may be somebody's plan: hands off, and say so.
pub(crate) fn unknown_label(stage: &mut Stage) -> Outcome {
    let controller = Controller::start(stage)?;
    stage.until_known()?;
    let before = stage.drivers()?;
    stage.sh("kubectl label node gpu-03 nvidia.com/gpu-driver-upgrade-state=upgrade-maybe --overwrite")?;
    controller.until_it_says(r#"has the unknown value "upgrade-maybe""#)?;
    let version = stage.patch_version()?;
    // The others were done before, too: only their drivers tell.
    until("the others run the new version", || {
        let drivers = stage.drivers()?;
        let current = drivers.iter().filter(|(_, driver)| driver.contains(&format!(":{version}-")));
        Ok((current.map(|(node, _)| node.as_str()).eq(["gpu-01", "gpu-02"])).then_some(()))
    })?;
    stage.until_states("the others are done", |states| {
        states
            .iter()
            .all(|(node, state)| state == if node == "gpu-03" { "upgrade-maybe" } else { "upgrade-done" })
    })?;
    stage.stands_still()?;
    must(before["gpu-03"] == stage.drivers()?["gpu-03"], || "its driver was replaced".to_owned())?;

    stage.sh("kubectl label node gpu-03 nvidia.com/gpu-driver-upgrade-state-")?;
    stage.until_upgraded(&version)
}
