//! The way back, from wherever a version may come: an operator's objects, or a template that nobody renders.

use std::time::Duration;

use futures::FutureExt;
use k8s_openapi::api::apps::v1::DaemonSet;
use kube::Api;
use kube::api::ListParams;
use pitcrew_core::api::{ClusterPolicy, DriverPolicy, Rollout, RolloutPhase};
use pitcrew_core::contract::{ARGO_TRACKING_ANNOTATION, State};
use serde_json::{Value, json};

use super::policies::{patch_driver, precompiled};
use super::reported::{broken, embedded, spread};
use super::stages::{CANARY, labelled, others_untouched, staged, taken_back};
use super::{NEW, NEWER, OLD, SKIP_LABEL, fleet, in_service, scenario};
use crate::actors::{Fault, GPU_PRESENT, NAMESPACE, Nodes};
use crate::fleet::Fleet;
use crate::scenario::{Outcome, Scenario, Scene, Stage, must};

const DRIVER: &str = "fpga-driver";
const ALL: &str = "all";

pub(super) fn all() -> Vec<Scenario> {
    vec![
        scenario("an-nvidiadriver-gets-its-version-back", one_driver(), |s| nvidia_driver(s).boxed()),
        scenario("nodes-with-the-version-before-are-left-alone", one_driver(), |s| spared(s).boxed()),
        Scenario {
            behaviour: broken(Nodes::Named(CANARY.to_owned()), Fault::CrashLoop),
            policy: Some(staged(&json!({"bake": {"duration": "3s"}}))),
            ..scenario("a-version-that-git-keeps-is-left-to-people", labelled(), |s| git_keeps(s).boxed())
        },
        embedded(&[], "a-version-for-two-kernels-is-taken-back", precompiled(), |s| two_kernels(s).boxed()),
        embedded(&[], "a-template-that-nobody-renders-is-put-back", spread(2, 1), |s| template(s).boxed()),
        Scenario {
            policy: Some(json!({"driver": {"name": "gpu"}, "rollout": {"historyLimit": 1}})),
            ..scenario("old-rollouts-are-forgotten", spread(1, 1), |s| forgotten(s).boxed())
        },
    ]
}

/// What `pitcrew rollback` writes.
pub(super) fn word() -> Value {
    json!({"spec": {"rollback": {"by": "mei", "at": "2026-01-01T00:00:00Z", "why": "jobs are slow"}}})
}

async fn take_back(stage: &Stage, rollout: &str, way_back: &str) -> Outcome {
    stage.patch_rollout(rollout, word()).await?;
    stage.until_rollout(rollout, RolloutPhase::RolledBack).await?;
    stage.until_rollout(way_back, RolloutPhase::Done).await
}

/// Two nodes of one NVIDIADriver.
fn one_driver() -> Fleet {
    fleet(2).with_nvidia_driver(ALL, json!({"version": OLD, "default": true}))
}

async fn nvidia_driver(stage: &mut Stage) -> Outcome {
    patch_driver(stage, ALL, json!({"version": NEW})).await?;
    stage.until_rollout("all-1", RolloutPhase::Done).await?;
    take_back(stage, "all-1", "all-2").await?;
    stage.until_done().await?;
    let versions: Vec<String> = stage.driver_versions().await?.into_values().collect();
    must(versions == [OLD, OLD], || format!("drivers are {versions:?}"))?;
    in_service(stage)
}

/// Somebody changed more than the version: what comes back is another template with the driver that a node has.
async fn spared(stage: &mut Stage) -> Outcome {
    let before = stage.driver_pod("gpu-02").await?;
    stage.label("gpu-02", SKIP_LABEL, Some("true")).await?;
    patch_driver(stage, ALL, json!({"version": NEW, "labels": {"team": "ml"}})).await?;
    let one_of_two = |scene: &Scene| {
        scene.state("gpu-01") == State::UpgradeDone && scene.state("gpu-02") == State::UpgradeRequired
    };
    stage.until("the other is on its way", |scene| scene.visited.contains("gpu-01")).await?;
    stage.until("one node is upgraded", one_of_two).await?;
    take_back(stage, "all-1", "all-2").await?;
    stage.label("gpu-02", SKIP_LABEL, None).await?;
    stage.until_done().await?;
    let versions: Vec<String> = stage.driver_versions().await?.into_values().collect();
    must(versions == [OLD, OLD], || format!("drivers are {versions:?}"))?;
    stage.until_reason("gpu-02", "is left alone on the way back").await?;
    let after = stage.driver_pod("gpu-02").await?;
    must(before == after, || format!("the driver pod of gpu-02 was {before} and is {after}"))
}

/// Argo CD has the ClusterPolicy from Git and would undo what is written into it: a person sets the version back there.
async fn git_keeps(stage: &mut Stage) -> Outcome {
    let id = "gpu-stack:nvidia.com/ClusterPolicy:/cluster-policy";
    let marks = json!({
        "labels": {"app.kubernetes.io/instance": "gpu-stack"},
        "annotations": {ARGO_TRACKING_ANNOTATION: id},
    });
    stage.cluster().patch_cluster_policy(json!({"metadata": marks})).await?;
    stage.set_version(NEW).await?;
    stage.until_rollout("gpu-1", RolloutPhase::Halted).await?;
    let rollouts = Api::<Rollout>::all(stage.cluster().admin.clone());
    let says = async || {
        let message = rollouts.get("gpu-1").await?.status.and_then(|status| status.message);
        Ok(message.filter(|message| message.contains("Argo CD")))
    };
    let message = stage.poll("its message names Argo CD", says).await?;
    let owner = "clusterpolicy/cluster-policy is managed by Argo CD (application gpu-stack)";
    let todo = format!("set spec.driver.version of clusterpolicy/cluster-policy back to {OLD} there");
    must(message.contains(owner) && message.contains(&todo), || message.clone())?;
    stage.stands_still_for(Duration::from_secs(3)).await?;
    let policy = Api::<ClusterPolicy>::all(stage.cluster().admin.clone()).get("cluster-policy").await?;
    let version = &policy.spec.driver["version"];
    must(version == NEW, || format!("the version was set to {version}"))?;
    stage.set_version(OLD).await?;
    taken_back(stage).await?;
    others_untouched(stage)
}

/// Two DaemonSets are rendered from one version, one after the other: that is one way back.
async fn two_kernels(stage: &mut Stage) -> Outcome {
    stage.set_version(NEW).await?;
    stage.until_rollout("cluster-policy-1", RolloutPhase::Done).await?;
    take_back(stage, "cluster-policy-1", "cluster-policy-2").await?;
    stage.until_done().await?;
    let versions = stage.driver_versions().await?;
    must(versions.values().all(|version| version == OLD), || format!("{versions:?}"))?;
    let rollouts = Api::<Rollout>::all(stage.cluster().admin.clone()).list(&ListParams::default()).await?;
    must(rollouts.items.len() == 2, || format!("{} rollouts", rollouts.items.len()))
}

/// A driver of another kind, whose DaemonSet is written by hand.
async fn template(stage: &mut Stage) -> Outcome {
    let labels = json!({"app": DRIVER});
    let spec = json!({
        "selector": {"matchLabels": labels},
        "updateStrategy": {"type": "OnDelete"},
        "template": {"metadata": {"labels": labels}, "spec": template_spec("1.0.0")},
    });
    stage
        .create::<DaemonSet>(NAMESPACE, json!({"metadata": {"name": DRIVER, "labels": labels}, "spec": spec}))
        .await?;
    stage.until_pod(NAMESPACE, DRIVER).await?;
    let policy = json!({
        "driver": {"name": "fpga", "daemonSets": {"namespace": NAMESPACE, "selector": format!("app={DRIVER}")}},
    });
    stage.create::<DriverPolicy>("", json!({"metadata": {"name": "fpga"}, "spec": policy})).await?;
    for (version, rollout) in [("2.0.0", "fpga-1"), ("3.0.0", "fpga-2")] {
        let change = json!({"spec": {"template": {"spec": template_spec(version)}}});
        stage.patch::<DaemonSet>(NAMESPACE, DRIVER, change).await?;
        stage.until_rollout(rollout, RolloutPhase::Done).await?;
    }
    take_back(stage, "fpga-2", "fpga-3").await?;
    let spec = Api::<DaemonSet>::namespaced(stage.cluster().admin.clone(), NAMESPACE)
        .get(DRIVER)
        .await?
        .spec
        .template
        .spec;
    let image = spec.and_then(|spec| spec.containers.into_iter().next()).and_then(|main| main.image);
    must(image.as_deref() == Some("example.com/driver:2.0.0"), || format!("the template says {image:?}"))
}

async fn forgotten(stage: &mut Stage) -> Outcome {
    for (version, rollout) in [(NEW, "gpu-1"), (NEWER, "gpu-2")] {
        stage.set_version(version).await?;
        stage.until_rollout(rollout, RolloutPhase::Done).await?;
    }
    let rollouts = Api::<Rollout>::all(stage.cluster().admin.clone());
    let gone = async || Ok(rollouts.get_opt("gpu-1").await?.is_none().then_some(()));
    stage.poll("the first rollout is forgotten", gone).await
}

fn template_spec(version: &str) -> Value {
    let image = format!("example.com/driver:{version}");
    json!({"nodeSelector": {GPU_PRESENT: "true"}, "containers": [{"name": "driver", "image": image}]})
}
