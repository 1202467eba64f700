//! Stages: a new version reaches a canary first, is watched at work, and only then goes to the others.

use std::time::Duration;

use futures::FutureExt;
use k8s_openapi::api::core::v1::Pod;
use pitcrew_core::api::RolloutPhase;
use pitcrew_core::contract::{CANARY_LABEL, State};
use serde_json::{Value, json};

use super::reported::{broken, embedded};
use super::rollbacks::word;
use super::{NEW, OLD, fleet, in_service, scenario};
use crate::actors::{Fault, NAMESPACE, Nodes};
use crate::fleet::Fleet;
use crate::scenario::{Outcome, Scenario, Stage, must};

pub(super) const CANARY: &str = "gpu-02";
/// Longer than that nobody works on a driver that is not proven.
const CORDONED_WITHIN: Duration = Duration::from_secs(5);

pub(super) fn all() -> Vec<Scenario> {
    vec![
        Scenario {
            policy: Some(staged(&json!({"bake": {"duration": "3s"}}))),
            ..scenario("a-canary-goes-first-and-opens-the-fleet", labelled(), |s| opens(s).boxed())
        },
        Scenario {
            behaviour: broken(Nodes::Named(CANARY.to_owned()), Fault::CrashLoop),
            policy: Some(left_to_people(&json!({"bake": {"duration": "3s"}}))),
            ..scenario("a-canary-that-fails-stops-everything", labelled(), |s| halts(s).boxed())
        },
        Scenario {
            behaviour: broken(Nodes::Named(CANARY.to_owned()), Fault::CrashLoop),
            policy: Some(staged(&json!({"bake": {"duration": "3s"}}))),
            ..scenario("a-canary-that-fails-is-taken-back", labelled(), |s| fails(s).boxed())
        },
        Scenario {
            policy: Some(staged(&json!({"bake": {"duration": "10m"}}))),
            ..scenario("a-version-that-breaks-in-the-bake-is-taken-back", labelled(), |s| breaks(s).boxed())
        },
        Scenario {
            policy: Some(half_of_them()),
            ..scenario("a-person-takes-a-version-back-half-way", labelled(), |s| half_way(s).boxed())
        },
        Scenario {
            policy: Some(staged(&json!({"bake": {"duration": "0s"}, "promotion": "Manual"}))),
            ..scenario("a-person-opens-the-next-stage", labelled(), |s| approved(s).boxed())
        },
        Scenario {
            policy: Some(staged(&json!({"bake": {"duration": "10m"}}))),
            ..scenario("a-node-that-comes-up-before-its-stage-is-proven", labelled(), |s| early(s).boxed())
        },
        Scenario {
            policy: Some(staged(&json!({"bake": {"duration": "10m"}}))),
            ..scenario("a-node-that-joins-before-its-stage-is-proven", labelled(), |s| joins(s).boxed())
        },
        embedded(&[], "the-documented-label-bakes-for-two-days", labelled(), |s| two_days(s).boxed()),
    ]
}

/// Four nodes without limits; the second carries the documented label.
pub(super) fn labelled() -> Fleet {
    let limits = json!({"autoUpgrade": true, "maxParallelUpgrades": 0, "maxUnavailable": "100%"});
    fleet(4).with_upgrade_policy(limits).with_label(CANARY, CANARY_LABEL, "true")
}

/// A DriverPolicy with a stage for the canaries, which says this too.
pub(super) fn staged(more: &Value) -> Value {
    let mut canary = json!({"name": "canary", "nodeSelector": {CANARY_LABEL: "true"}});
    json_patch::merge(&mut canary, more);
    json!({
        "driver": {"name": "gpu", "validator": {"selector": "app=nvidia-operator-validator"}},
        "limits": {"driverReady": "5s"},
        "rollout": {"stages": [canary]},
    })
}

/// The same, where nobody but a person takes a version back.
fn left_to_people(more: &Value) -> Value {
    let mut policy = staged(more);
    policy["rollout"]["onFailure"] = json!("Pause");
    policy
}

/// Two nodes first, and then a person's word.
fn half_of_them() -> Value {
    let mut policy = staged(&json!({}));
    let half = json!({"name": "half", "count": 2, "bake": {"duration": "0s"}, "promotion": "Manual"});
    policy["rollout"]["stages"] = json!([half]);
    policy
}

/// The version before is the target again, and every node runs it and is in service.
pub(super) async fn taken_back(stage: &mut Stage) -> Outcome {
    stage.until_rollout("gpu-1", RolloutPhase::RolledBack).await?;
    stage.until_rollout("gpu-2", RolloutPhase::Done).await?;
    stage.until_done().await?;
    for (node, version) in stage.driver_versions().await? {
        must(version == OLD, || format!("{node} runs {version}"))?;
    }
    in_service(stage)
}

/// Nobody but the canary has been touched.
pub(super) fn others_untouched(stage: &Stage) -> Outcome {
    for (node, path) in stage.trace().states.iter().filter(|(node, _)| *node != CANARY) {
        let touched = path.iter().any(|state| state.in_flight());
        must(!touched, || format!("{node} went {path:?}"))?;
    }
    Ok(())
}

async fn canary_ends(stage: &mut Stage, end: State) -> Outcome {
    stage.set_version(NEW).await?;
    stage.until("the others are due", |scene| scene.state("gpu-01") == State::UpgradeRequired).await?;
    stage.until("the canary has come to its end", |scene| scene.state(CANARY) == end).await?;
    stage.until_reason("gpu-01", "stage").await?;
    others_untouched(stage)
}

/// Whoever leads after the canary goes on with what the one before saw.
async fn opens(stage: &mut Stage) -> Outcome {
    canary_ends(stage, State::UpgradeDone).await?;
    stage.kill_controller().await;
    stage.start_controller();
    stage.until_done().await?;
    stage.until_rollout("gpu-1", RolloutPhase::Done).await?;
    in_service(stage)
}

async fn halts(stage: &mut Stage) -> Outcome {
    canary_ends(stage, State::UpgradeFailed).await?;
    stage.until_rollout("gpu-1", RolloutPhase::Halted).await?;
    stage.stands_still_for(Duration::from_secs(3)).await?;
    others_untouched(stage)
}

async fn fails(stage: &mut Stage) -> Outcome {
    stage.set_version(NEW).await?;
    taken_back(stage).await?;
    others_untouched(stage)
}

async fn breaks(stage: &mut Stage) -> Outcome {
    canary_ends(stage, State::UpgradeDone).await?;
    stage.until_rollout("gpu-1", RolloutPhase::Baking).await?;
    stage.behaviour().restart_driver(CANARY);
    stage.kill_controller().await;
    stage.start_controller();
    taken_back(stage).await?;
    others_untouched(stage)
}

/// Whoever leads then goes on with it.
async fn half_way(stage: &mut Stage) -> Outcome {
    stage.set_version(NEW).await?;
    stage.until_rollout("gpu-1", RolloutPhase::AwaitingApproval).await?;
    stage.patch_rollout("gpu-1", word()).await?;
    stage.kill_controller().await;
    stage.start_controller();
    taken_back(stage).await
}

async fn approved(stage: &mut Stage) -> Outcome {
    canary_ends(stage, State::UpgradeDone).await?;
    stage.until_rollout("gpu-1", RolloutPhase::AwaitingApproval).await?;
    stage.stands_still_for(Duration::from_secs(3)).await?;
    others_untouched(stage)?;
    let promotion = json!({"stage": "canary", "by": "mei", "at": "2026-01-01T00:00:00Z"});
    stage.patch_rollout("gpu-1", json!({"spec": {"promotions": [promotion]}})).await?;
    stage.until_done().await?;
    in_service(stage)
}

/// Somebody deletes a driver pod: its DaemonSet makes another one, of the new version.
async fn early(stage: &mut Stage) -> Outcome {
    canary_ends(stage, State::UpgradeDone).await?;
    stage.until_rollout("gpu-1", RolloutPhase::Baking).await?;
    let pod = stage.driver_pod("gpu-01").await?;
    stage.delete::<Pod>(NAMESPACE, &pod).await?;
    taken_out_and_proven(stage, "gpu-01").await
}

/// A machine joins: its first driver is of the new version.
async fn joins(stage: &mut Stage) -> Outcome {
    canary_ends(stage, State::UpgradeDone).await?;
    stage.until_rollout("gpu-1", RolloutPhase::Baking).await?;
    stage.join("gpu-05").await?;
    taken_out_and_proven(stage, "gpu-05").await
}

/// It has come to the new version by itself: no more than five seconds without a cordon, then the way of a canary.
async fn taken_out_and_proven(stage: &mut Stage, node: &str) -> Outcome {
    let ready = stage.until_driver_ready(node, NEW).await?;
    stage.until_cordoned(node, ready, CORDONED_WITHIN).await?;
    stage.until("it is proven", |scene| scene.state(node) == State::UpgradeDone).await?;
    stage.until("it takes work again", |scene| !scene.cordoned.contains(node)).await?;
    let warnings = stage.warnings(node).await?.join("\n");
    must(warnings.contains("before stage fleet is open"), || warnings)?;
    stage.stands_still_for(Duration::from_secs(3)).await?;
    let path = stage.trace().states.get(node).cloned().unwrap_or_default();
    must(!path.contains(&State::CordonRequired), || format!("it started: {path:?}"))
}

async fn two_days(stage: &mut Stage) -> Outcome {
    canary_ends(stage, State::UpgradeDone).await?;
    stage.until_rollout("cluster-policy-1", RolloutPhase::Baking).await?;
    stage.stands_still_for(Duration::from_hours(47)).await?;
    others_untouched(stage)?;
    tokio::time::sleep(Duration::from_hours(2)).await;
    stage.until_done().await?;
    in_service(stage)
}
