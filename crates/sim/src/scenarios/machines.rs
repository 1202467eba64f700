//! Machines: they join, leave, boot, die and come back, at every state of the walk; and drivers that ask before they load.

use std::time::Duration;

use futures::FutureExt;
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::ListParams;
use pitcrew_core::api::RolloutPhase;
use pitcrew_core::contract::State;
use serde_json::json;

use super::reported::{TEAM, broken, embedded, limits, spread};
use super::{NEW, NEWER, STATE_LABEL, fleet, in_service, scenario, whole_walks};
use crate::actors::{Behaviour, Fault, Nodes, Timing};
use crate::fleet::{Fleet, Workload};
use crate::scenario::{Outcome, Scenario, Stage, must};

/// Slow enough for a machine to break down at every state.
const SLOW: Duration = Duration::from_secs(4);
/// The states in which a node can be met on its way.
const ON_THE_WAY: [State; 4] = [
    State::WaitForJobsRequired,
    State::PodDeletionRequired,
    State::PodRestartRequired,
    State::ValidationRequired,
];

pub(super) fn all() -> Vec<Scenario> {
    vec![
        scenario("safe-load-on-an-empty-node", one_with_work(), |s| safe_load(s).boxed()),
        scenario("safe-load-of-a-node-that-joins", fleet(1), |s| joins(s).boxed()),
        scenario("safe-load-after-a-reboot", one_with_work(), |s| loads_after_reboot(s).boxed()),
        Scenario {
            behaviour: slow(),
            ..embedded(&[], "reboot-at-every-state", one_with_work(), |s| rebooted(s).boxed())
        },
        Scenario {
            behaviour: slow(),
            ..embedded(&[], "not-ready-at-every-state", one_with_work(), |s| not_ready(s).boxed())
        },
        embedded(&[], "replaced-under-its-old-name", spread(3, 1), |s| replaced(s).boxed()),
        Scenario {
            behaviour: slow(),
            ..embedded(&["W6"], "label-wiped-at-every-state", one_with_work(), |s| wiped(s).boxed())
        },
        scenario("taints-and-labels-of-others-stay", fleet(1), |s| marks_of_others(s).boxed()),
        scenario("a-node-joins-midway", spread(3, 1), |s| joins_midway(s).boxed()),
        Scenario {
            own_node: Some("gpu-01"),
            ..scenario("reboot-of-own-node", spread(3, 1), |s| own_node_last(s).boxed())
        },
        Scenario {
            behaviour: broken(Nodes::OneIn(6), Fault::CrashLoop),
            policy: Some(limits(&json!({"driverReady": "5s", "failureThreshold": "100%"}))),
            ..embedded(&["W9"], "one-in-six-init", spread(14, 14), |s| one_in_six(s).boxed())
        },
    ]
}

fn slow() -> Behaviour {
    let timing = Timing {
        driver_start: SLOW,
        driver_stop: SLOW,
        validator_start: SLOW,
        workload_stop: SLOW,
        ..Timing::default()
    };
    Behaviour::default().with_timing(timing)
}

/// One node with a job that is given some time, and may take its time to leave.
fn one_with_work() -> Fleet {
    let work = Workload::new(TEAM, "job", 1, 1);
    let wait = json!({"podSelector": "app=job", "timeoutSeconds": 2});
    let policy = json!({"autoUpgrade": true, "maxUnavailable": 1, "waitForCompletion": wait});
    Fleet::new(1).with_workloads(vec![work]).with_upgrade_policy(policy)
}

/// The new version's pods ask before they load.
async fn upgrade_with_safe_load(stage: &mut Stage) -> Outcome {
    let patch = json!({"spec": {"driver": {"version": NEW, "safeLoad": true}}});
    stage.cluster().patch_cluster_policy(patch).await?;
    stage.until("the node is on its way", |scene| !scene.visited.is_empty()).await?;
    stage.until_done().await
}

/// Every driver asked, and nobody waits any more.
async fn nobody_waits(stage: &Stage) -> Outcome {
    let scene = stage.scene();
    must(scene.asked.iter().eq(scene.states.keys()), || format!("asked: {:?}", scene.asked))?;
    for node in Api::<Node>::all(stage.cluster().admin.clone()).list(&ListParams::default()).await? {
        let waits =
            node.metadata.annotations.into_iter().flatten().find(|(key, _)| key.contains("safe-load"));
        must(waits.is_none(), || format!("{waits:?} was left behind"))?;
    }
    in_service(stage)
}

async fn safe_load(stage: &mut Stage) -> Outcome {
    upgrade_with_safe_load(stage).await?;
    whole_walks(stage, &stage.trace())?;
    nobody_waits(stage).await
}

async fn joins(stage: &mut Stage) -> Outcome {
    upgrade_with_safe_load(stage).await?;
    stage.join("gpu-02").await?;
    stage.until("the new node is on its way", |scene| scene.visited.contains("gpu-02")).await?;
    stage.until_done().await?;
    nobody_waits(stage).await
}

async fn loads_after_reboot(stage: &mut Stage) -> Outcome {
    upgrade_with_safe_load(stage).await?;
    let before = stage.driver_pod("gpu-01").await?;
    stage.reboot("gpu-01", Duration::from_secs(1)).await;
    stage.until("the node is on its way again", |scene| !scene.visited.is_empty()).await?;
    stage.until_done().await?;
    let after = stage.driver_pod("gpu-01").await?;
    must(before == after, || format!("{before} only had to load, but became {after}"))?;
    nobody_waits(stage).await
}

/// Upgrades once for each state, and does something when the node is there.
async fn at_every_state(
    stage: &mut Stage,
    mut meddle: impl AsyncFnMut(&mut Stage, State) -> Outcome,
) -> Outcome {
    for (index, state) in ON_THE_WAY.into_iter().enumerate() {
        let version = format!("{NEW}{index}");
        stage.set_version(&version).await?;
        stage.until(&format!("it is at {state}"), |scene| scene.state("gpu-01") == state).await?;
        meddle(stage, state).await?;
        stage.until("it is on its way", |scene| !scene.all(State::UpgradeDone)).await?;
        stage.until_done().await?;
        let versions = stage.driver_versions().await?;
        must(versions.values().all(|is| *is == version), || format!("at {state}: {versions:?}"))?;
        in_service(stage)?;
        stage.until_pods_ready(TEAM, 1).await?;
        // A rollout is over when that is written down; a new version before that supersedes it.
        let rollout = format!("cluster-policy-{}", index + 1);
        stage.until_rollout(&rollout, RolloutPhase::Done).await?;
    }
    Ok(())
}

async fn rebooted(stage: &mut Stage) -> Outcome {
    at_every_state(stage, async |stage, _| {
        stage.reboot("gpu-01", Duration::from_secs(20)).await;
        Ok(())
    })
    .await
}

/// Nothing goes back into service on a machine that does not answer, whatever its last words were.
async fn not_ready(stage: &mut Stage) -> Outcome {
    at_every_state(stage, async |stage, state| {
        stage.set_down("gpu-01", true);
        tokio::time::sleep(Duration::from_secs(50)).await;
        must(stage.scene().cordoned.contains("gpu-01"), || format!("given back at {state}"))?;
        stage.set_down("gpu-01", false);
        Ok(())
    })
    .await
}

async fn replaced(stage: &mut Stage) -> Outcome {
    stage.behaviour().change(|behaviour| behaviour.timing.driver_start = Duration::from_secs(2));
    stage.set_version(NEW).await?;
    stage.until("its driver restarts", |scene| scene.state("gpu-02") == State::PodRestartRequired).await?;
    stage.leave("gpu-02").await?;
    stage.join("gpu-02").await?;
    stage.until("it is known again", |scene| scene.states.len() == 3).await?;
    stage.until_done().await?;
    let versions = stage.driver_versions().await?;
    must(versions.len() == 3 && versions.values().all(|is| is == NEW), || format!("{versions:?}"))?;
    in_service(stage)
}

async fn wiped(stage: &mut Stage) -> Outcome {
    at_every_state(stage, async |stage, _| stage.label("gpu-01", STATE_LABEL, None).await).await
}

async fn marks_of_others(stage: &mut Stage) -> Outcome {
    stage.behaviour().change(|behaviour| behaviour.timing.driver_start = Duration::from_secs(2));
    stage.set_version(NEW).await?;
    stage.until("the driver restarts", |scene| scene.state("gpu-01") == State::PodRestartRequired).await?;
    let taint = json!({"key": "rack.example/maintenance", "value": "soon", "effect": "PreferNoSchedule"});
    let marks = json!({"labels": {"rack.example/row": "7"}, "annotations": {"rack.example/note": "fan"}});
    stage.patch_node("gpu-01", json!({"metadata": marks, "spec": {"taints": [taint]}})).await?;
    stage.until_done().await?;
    let node = Api::<Node>::all(stage.cluster().admin.clone()).get("gpu-01").await?;
    let kept = (
        node.metadata.labels.is_some_and(|labels| labels.contains_key("rack.example/row")),
        node.metadata.annotations.is_some_and(|notes| notes.contains_key("rack.example/note")),
        node.spec.and_then(|spec| spec.taints).into_iter().flatten().any(|t| t.key.starts_with("rack")),
    );
    must(kept == (true, true, true), || format!("label, annotation and taint: {kept:?}"))?;
    whole_walks(stage, &stage.trace())
}

async fn joins_midway(stage: &mut Stage) -> Outcome {
    stage.behaviour().change(|behaviour| behaviour.timing.driver_start = Duration::from_secs(1));
    stage.set_version(NEW).await?;
    stage.until("the first is on its way", |scene| !scene.visited.is_empty()).await?;
    stage.join("gpu-04").await?;
    stage
        .until("all four are done", |scene| scene.states.len() == 4 && scene.all(State::UpgradeDone))
        .await?;
    // It came with the new driver: there was nothing to upgrade on it.
    let path = stage.trace().states.get("gpu-04").cloned().unwrap_or_default();
    must(path == [State::Unknown, State::UpgradeDone], || format!("gpu-04 went {path:?}"))?;
    in_service(stage)
}

/// The machine under the controller goes when all others are done.
async fn own_node_last(stage: &mut Stage) -> Outcome {
    stage.set_version(NEW).await?;
    stage.until("gpu-01 is on its way", |scene| scene.visited.contains("gpu-01")).await?;
    let versions = stage.driver_versions().await?;
    let others = versions.iter().filter(|(node, _)| *node != "gpu-01");
    must(others.clone().all(|(_, version)| version == NEW), || {
        format!("gpu-01 went before others: {versions:?}")
    })?;
    stage.until_done().await?;
    whole_walks(stage, &stage.trace())
}

async fn one_in_six(stage: &mut Stage) -> Outcome {
    stage.set_version(NEW).await?;
    stage.until("the nodes set out", |scene| !scene.visited.is_empty()).await?;
    let settled = |states: (usize, usize)| states.0 + states.1 == 14;
    let count =
        |scene: &crate::scenario::Scene| (scene.count(State::UpgradeDone), scene.count(State::UpgradeFailed));
    stage.until("each is done or failed", |scene| settled(count(scene))).await?;
    let (done, failed) = count(&stage.scene());
    must(failed > 0 && done > failed, || format!("{done} done, {failed} failed"))?;
    must(stage.scene().cordoned.len() == failed, || "a failed node is in service".to_owned())?;
    stage.set_version(NEWER).await?;
    stage.until("the others set out", |scene| scene.count(State::UpgradeDone) < done).await?;
    stage.until_done().await?;
    in_service(stage)
}
