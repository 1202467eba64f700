//! Policies: where they come from, how many there are, what they say about failures and about work that is worth saving.

use std::time::Duration;

use futures::FutureExt;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{Patch, PatchParams};
use kube::core::DynamicObject;
use kube::{Api, ResourceExt};
use pitcrew_core::contract::{CHECKPOINT_REQUESTED_ANNOTATION, CHECKPOINTED_ANNOTATION, State};
use serde_json::{Value, json};

use super::reported::{TEAM, broken, embedded, embedded_api, limits, spread};
use super::{NEW, NEWER, fleet, in_service, scenario, whole_walks};
use crate::actors::{Fault, KERNEL, NAMESPACE, Nodes, nvidia_driver_kind};
use crate::fleet::{Fleet, Workload};
use crate::scenario::{Outcome, Scenario, Stage, must};

const OLD: &str = "535.104.05";

pub(super) fn all() -> Vec<Scenario> {
    vec![
        Scenario {
            shows: &["W21"],
            ..scenario("one-daemonset-for-each-kernel", precompiled(), |s| each_kernel(s).boxed())
        },
        scenario("two-nvidiadrivers", two_drivers(), |s| one_paused(s).boxed()),
        Scenario {
            shows: &["W27"],
            ..scenario("one-bad-nvidiadriver", two_drivers(), |s| one_bad(s).boxed())
        },
        Scenario {
            behaviour: broken(Nodes::All, Fault::CrashLoop),
            policy: Some(limits(&json!({"driverReady": "3s", "failureThreshold": 1}))),
            ..embedded(&["W20"], "failures-stop-new-starts", spread(4, 4), |s| too_many_failed(s).boxed())
        },
        Scenario {
            policy: Some(json!({
                "driver": {"name": "gpu"},
                "upgradePolicy": {"checkpoint": {"podSelector": "app=train", "timeoutSeconds": 60}},
            })),
            ..scenario("work-is-saved-before-it-leaves", training(), |s| checkpoint(s).boxed())
        },
        Scenario {
            shows: &["W7"],
            policy: Some(limits(&json!({"driverReady": "5s"}))),
            ..scenario("unscheduled-ds-pod", spread(2, 2), |s| unscheduled(s).boxed())
        },
        embedded(&[], "slurm-keeps-allocating", spread(1, 1), |s| comes_back(s).boxed()),
        embedded(&["W25"], "claim-of-a-device", forced(), |s| claim(s).boxed()),
        scenario("limits-edited-midway", spread(6, 1), |s| edited(s).boxed()),
    ]
}

/// Two kernels, two nodes each.
pub(super) fn precompiled() -> Fleet {
    let kernels =
        [("gpu-01", "5.15.0-84"), ("gpu-02", "5.15.0-84"), ("gpu-03", "6.8.0-31"), ("gpu-04", "6.8.0-31")];
    let fleet = spread(4, 2).with_driver_options(json!({"usePrecompiled": true}));
    kernels.into_iter().fold(fleet, |fleet, (node, kernel)| fleet.with_label(node, KERNEL, kernel))
}

/// Two nodes of driver `a100` and two of the default driver. Neither has a policy: upgrades are on.
fn two_drivers() -> Fleet {
    let a100 = json!({"version": OLD, "nodeSelector": {"pool": "a100"}});
    let fleet = fleet(4).with_label("gpu-01", "pool", "a100").with_label("gpu-02", "pool", "a100");
    fleet
        .with_nvidia_driver("a100", a100)
        .with_nvidia_driver("others", json!({"version": OLD, "default": true}))
}

fn training() -> Fleet {
    spread(2, 1).with_workloads(vec![Workload::new(TEAM, "train", 1, 8)]).with_grace_seconds(1)
}

/// Bare pods may be taken off.
fn forced() -> Fleet {
    let policy = json!({"autoUpgrade": true, "maxUnavailable": 1, "podDeletion": {"force": true}});
    fleet(1).with_upgrade_policy(policy)
}

pub(super) async fn patch_driver(stage: &Stage, name: &str, spec: Value) -> Outcome {
    let api: Api<DynamicObject> = Api::all_with(stage.cluster().admin.clone(), &nvidia_driver_kind());
    api.patch(name, &PatchParams::default(), &Patch::Merge(json!({"spec": spec}))).await?;
    Ok(())
}

async fn set_both_versions(stage: &Stage) -> Outcome {
    patch_driver(stage, "a100", json!({"version": NEW})).await?;
    patch_driver(stage, "others", json!({"version": NEW})).await
}

/// The nodes of the default driver are done, and those of `a100` have not moved.
async fn others_first(stage: &mut Stage) -> Outcome {
    stage.until("one of the others is on its way", |scene| !scene.visited.is_empty()).await?;
    let both = |scene: &crate::scenario::Scene, state| {
        ["gpu-03", "gpu-04"].iter().all(|node| scene.state(node) == state)
    };
    stage
        .until("the others are done", |scene| scene.visited.is_empty() && both(scene, State::UpgradeDone))
        .await?;
    let versions: Vec<String> = stage.driver_versions().await?.into_values().collect();
    must(versions == [OLD, OLD, NEW, NEW], || format!("drivers are {versions:?}"))
}

async fn each_kernel(stage: &mut Stage) -> Outcome {
    stage.set_version(NEW).await?;
    stage.until("a node is on its way", |scene| !scene.visited.is_empty()).await?;
    stage.until_done().await?;
    let versions = stage.driver_versions().await?;
    must(versions.values().all(|version| version == NEW), || format!("{versions:?}"))?;
    whole_walks(stage, &stage.trace())
}

async fn one_paused(stage: &mut Stage) -> Outcome {
    patch_driver(stage, "a100", json!({"upgradePolicy": {"autoUpgrade": false}})).await?;
    set_both_versions(stage).await?;
    others_first(stage).await?;
    stage.until_reason("gpu-01", "paused").await?;
    patch_driver(stage, "a100", json!({"upgradePolicy": {"autoUpgrade": true}})).await?;
    stage.until("a100 is on its way", |scene| !scene.visited.is_empty()).await?;
    stage.until_done().await?;
    in_service(stage)
}

async fn one_bad(stage: &mut Stage) -> Outcome {
    patch_driver(stage, "a100", json!({"upgradePolicy": {"maxUnavailable": "many"}})).await?;
    set_both_versions(stage).await?;
    others_first(stage).await?;
    patch_driver(stage, "a100", json!({"upgradePolicy": {"maxUnavailable": "50%"}})).await?;
    stage.until("a100 is on its way", |scene| !scene.visited.is_empty()).await?;
    stage.until_done().await?;
    in_service(stage)
}

async fn too_many_failed(stage: &mut Stage) -> Outcome {
    stage.set_version(NEW).await?;
    stage.until("two failed", |scene| scene.count(State::UpgradeFailed) == 2).await?;
    stage.until_reason("gpu-03", "no more are started").await?;
    stage.stands_still_for(Duration::from_secs(5)).await?;
    must(stage.scene().cordoned.len() == 2, || format!("{:?}", stage.scene().cordoned))?;
    stage.set_version(NEWER).await?;
    stage.until("they set out again", |scene| scene.count(State::UpgradeFailed) < 2).await?;
    stage.until_done().await?;
    in_service(stage)
}

/// The pod stays until it says that its work is saved.
async fn checkpoint(stage: &mut Stage) -> Outcome {
    let pod = stage.until_pod(TEAM, "train").await?;
    stage.set_version(NEW).await?;
    let node = stage.pods(TEAM).await?.first().map(|(_, node, _)| node.clone()).unwrap_or_default();
    stage.until_reason(&node, "to save its work").await?;
    let api = Api::<Pod>::namespaced(stage.cluster().admin.clone(), TEAM);
    let asked = async || {
        let pod = api.get(&pod).await?;
        Ok(pod.annotations().contains_key(CHECKPOINT_REQUESTED_ANNOTATION).then_some(()))
    };
    stage.poll("the pod is asked", asked).await?;
    must(stage.scene().state(&node) == State::WaitForJobsRequired, || "it did not wait".to_owned())?;
    let saved = json!({"metadata": {"annotations": {CHECKPOINTED_ANNOTATION: "step-4711"}}});
    stage.patch::<Pod>(TEAM, &pod, saved).await?;
    stage.until_done().await?;
    let now = stage.until_pod(TEAM, "train").await?;
    must(now != pod, || "the pod was never taken off".to_owned())?;
    in_service(stage)
}

/// There is no room for the driver pod: that is told, and the other node goes on.
async fn unscheduled(stage: &mut Stage) -> Outcome {
    let room = async |stage: &Stage, pods: &str| -> Outcome {
        let api = Api::<Node>::all(stage.cluster().admin.clone());
        let patch = Patch::Merge(json!({"status": {"allocatable": {"pods": pods}}}));
        api.patch_status("gpu-01", &PatchParams::default(), &patch).await?;
        Ok(())
    };
    room(stage, "0").await?;
    stage.set_version(NEW).await?;
    stage.until_reason("gpu-01", "Unschedulable").await?;
    stage
        .until("gpu-01 failed, gpu-02 is done", |scene| {
            scene.state("gpu-01") == State::UpgradeFailed
                && scene.state("gpu-02") == State::UpgradeDone
                && scene.visited.len() == 1
        })
        .await?;
    let warnings = stage.warnings("gpu-01").await?;
    // Told at once, or, by a controller that died at that moment, when it becomes a failure.
    must(warnings.iter().any(|text| text.contains("pod Unschedulable")), || format!("{warnings:?}"))?;
    // A pod that was never placed is replaced by a new version like any other.
    stage.set_version(NEWER).await?;
    stage.until_reason("gpu-01", "Unschedulable").await?;
    room(stage, "110").await?;
    stage.until("it is on its way", |scene| scene.state("gpu-01") != State::UpgradeFailed).await?;
    stage.until_done().await?;
    let versions = stage.driver_versions().await?;
    must(versions.values().all(|version| version == NEWER), || format!("{versions:?}"))?;
    in_service(stage)
}

/// Something puts work on the node whatever the cordon says. That is not chased for ever.
async fn comes_back(stage: &mut Stage) -> Outcome {
    let pod = json!({
        "terminationGracePeriodSeconds": 1,
        "tolerations": [{"operator": "Exists"}],
        "containers": [{"name": "main", "image": "m:1", "resources": {"limits": {"nvidia.com/gpu": "1"}}}],
    });
    let spec = json!({
        "replicas": 1, "selector": {"matchLabels": {"app": "slurmd"}},
        "template": {"metadata": {"labels": {"app": "slurmd"}}, "spec": pod},
    });
    stage.create::<Deployment>(NAMESPACE, json!({"metadata": {"name": "slurmd"}, "spec": spec})).await?;
    stage.until_pod(NAMESPACE, "slurmd").await?;
    let server = embedded_api(stage)?;
    let before = server.counts().of("create", "pods/eviction");
    stage.set_version(NEW).await?;
    stage.until("the node fails", |scene| scene.state("gpu-01") == State::UpgradeFailed).await?;
    stage.until_reason("gpu-01", "was put on the node while it was being emptied").await?;
    let evicted = server.counts().of("create", "pods/eviction") - before;
    must((1..=20).contains(&evicted), || format!("evicted {evicted} times"))?;
    stage.patch::<Deployment>(NAMESPACE, "slurmd", json!({"spec": {"replicas": 0}})).await?;
    stage.label("gpu-01", super::STATE_LABEL, Some("upgrade-required")).await?;
    stage.until_done().await?;
    in_service(stage)
}

/// A pod that has its device through a claim is a user like any other; one that only looks (adminAccess) is not.
async fn claim(stage: &mut Stage) -> Outcome {
    for (name, admin) in [("holder", false), ("looker", true)] {
        let result = json!({"request": "r", "driver": "gpu.nvidia.com", "pool": "gpu-01", "device": "gpu-0", "adminAccess": admin});
        let status = json!({"allocation": {"devices": {"results": [result]}}});
        let claim = json!({"metadata": {"name": name}, "spec": {"devices": {}}});
        stage.create::<ResourceClaim>(TEAM, claim).await?;
        let api = Api::<ResourceClaim>::namespaced(stage.cluster().admin.clone(), TEAM);
        let patch = Patch::Merge(json!({"status": status}));
        api.patch_status(name, &PatchParams::default(), &patch).await?;
        let pod = json!({
            "nodeName": "gpu-01",
            "resourceClaims": [{"name": "gpu", "resourceClaimName": name}],
            "containers": [{"name": "main", "image": "m:1"}],
        });
        stage.create::<Pod>(TEAM, json!({"metadata": {"name": name}, "spec": pod})).await?;
        stage.until_pod(TEAM, name).await?;
    }
    stage.set_version(NEW).await?;
    stage.until("the node is on its way", |scene| !scene.visited.is_empty()).await?;
    stage.until_done().await?;
    let left: Vec<String> = stage.pods(TEAM).await?.into_iter().map(|(name, ..)| name).collect();
    must(left == ["looker"], || format!("left on the node: {left:?}"))?;
    whole_walks(stage, &stage.trace())
}

/// More may go as soon as the policy says so; fewer as well.
async fn edited(stage: &mut Stage) -> Outcome {
    stage.behaviour().change(|behaviour| behaviour.timing.driver_start = Duration::from_secs(2));
    stage.set_version(NEW).await?;
    stage.until("the first is on its way", |scene| scene.visited.len() == 1).await?;
    stage.set_upgrade_policy(json!({"maxParallelUpgrades": 3, "maxUnavailable": "50%"})).await?;
    stage.until("three are on their way", |scene| scene.visited.len() == 3).await?;
    stage.set_upgrade_policy(json!({"maxParallelUpgrades": 0, "maxUnavailable": 0})).await?;
    stage.until("those under way are brought to the end", |scene| scene.visited.is_empty()).await?;
    stage.stands_still_for(Duration::from_secs(2)).await?;
    stage.set_upgrade_policy(json!({"maxUnavailable": 1})).await?;
    stage.until_done().await?;
    let most = stage.trace().most_out;
    must(most == 3, || format!("{most} nodes were out at once"))?;
    whole_walks(stage, &stage.trace())
}
