//! A health system on the same nodes: NVSentinel takes a driver that is away for a broken machine, unless it is told.

use std::time::Duration;

use futures::FutureExt;
use k8s_openapi::api::core::v1::{ConfigMap, Node};
use kube::api::ListParams;
use kube::{Api, ResourceExt};
use pitcrew_core::contract::{HEALTH_HOLD_ANNOTATION, State, VISIT_ANNOTATION, nvsentinel};
use serde_json::{Value, json};

use super::reported::{embedded, spread};
use super::{NEW, fleet, in_service, scenario, whole_walks};
use crate::fleet::Fleet;
use crate::scenario::{Outcome, Scenario, Stage, must};

/// Longer than NVSentinel takes to miss DCGM.
const AWAY: Duration = Duration::from_secs(8);

pub(super) fn all() -> Vec<Scenario> {
    vec![
        Scenario {
            policy: Some(health(&json!({"nvsentinel": "Off"}))),
            ..embedded(&[], "without-a-hand-shake-the-breaker-trips", all_at_once(16), |s| breaker(s).boxed())
        },
        scenario("nvsentinel-breaker-and-replay", all_at_once(16), |s| hand_shake(s).boxed()),
        Scenario {
            policy: Some(health(&json!({"nvsentinel": "Everything"}))),
            ..scenario("nvsentinel-switched-off-and-on-again", watched(1), |s| switched_off(s).boxed())
        },
        scenario("a-quarantined-node-is-not-started", watched(2), |s| quarantined(s).boxed()),
        scenario("an-opt-out-of-somebody-else-stays", watched(1), |s| somebody_elses(s).boxed()),
        scenario("an-opt-out-removed-midway-is-set-again", watched(1), |s| removed_midway(s).boxed()),
        scenario("a-leaked-opt-out-is-found", watched(1), |s| leaked(s).boxed()),
        scenario("no-starts-while-the-breaker-is-tripped", watched(2), |s| tripped(s).boxed()),
    ]
}

fn watched(nodes: usize) -> Fleet {
    spread(nodes, 1).with_nvsentinel()
}

fn all_at_once(nodes: usize) -> Fleet {
    let policy = json!({"autoUpgrade": true, "maxParallelUpgrades": 0, "maxUnavailable": "100%"});
    fleet(nodes).with_upgrade_policy(policy).with_nvsentinel()
}

fn health(health: &Value) -> Value {
    json!({
        "driver": {"name": "gpu", "validator": {"selector": "app=nvidia-operator-validator"}},
        "health": health,
    })
}

async fn upgrade(stage: &mut Stage) -> Outcome {
    stage.behaviour().change(|behaviour| behaviour.timing.driver_start = AWAY);
    stage.set_version(NEW).await?;
    stage.until("a node is on its way", |scene| !scene.visited.is_empty()).await
}

async fn is_tripped(stage: &Stage) -> Result<bool, crate::scenario::Broken> {
    let api = Api::<ConfigMap>::namespaced(stage.cluster().admin.clone(), nvsentinel::NAMESPACE);
    let data = api.get(nvsentinel::BREAKER).await?.data.unwrap_or_default();
    Ok(data.get("status").is_some_and(|status| status == nvsentinel::TRIPPED))
}

/// Nobody is opted out, and nobody holds anything.
async fn nothing_left(stage: &Stage) -> Outcome {
    for node in Api::<Node>::all(stage.cluster().admin.clone()).list(&ListParams::default()).await? {
        let name = node.name_any();
        let labels = [nvsentinel::OPT_OUT_LABEL, nvsentinel::MANAGED_LABEL, nvsentinel::STATE_LABEL];
        let label = labels.into_iter().find(|label| node.labels().contains_key(*label));
        must(label.is_none(), || format!("{name} has label {label:?}"))?;
        let held = node.annotations().contains_key(HEALTH_HOLD_ANNOTATION);
        must(!held, || format!("{name} still has a health hold"))?;
    }
    in_service(stage)
}

/// What the runbook warns of, with nobody who follows it.
async fn breaker(stage: &mut Stage) -> Outcome {
    upgrade(stage).await?;
    let trips = async || Ok(is_tripped(stage).await?.then_some(()));
    stage.poll("the breaker trips", trips).await?;
    // Marks of the quarantine are left behind, and closing the breaker brings the queued events, and trips it again.
    let nodes = Api::<Node>::all(stage.cluster().admin.clone()).list(&ListParams::default()).await?;
    let left = nodes.iter().filter(|node| node.labels().contains_key(nvsentinel::STATE_LABEL)).count();
    must(left >= 8, || format!("only {left} nodes are in quarantine"))?;
    let closed = json!({"data": {"status": "CLOSED"}});
    stage.patch::<ConfigMap>(nvsentinel::NAMESPACE, nvsentinel::BREAKER, closed).await?;
    stage.poll("it trips again", trips).await
}

async fn hand_shake(stage: &mut Stage) -> Outcome {
    upgrade(stage).await?;
    stage.until_done().await?;
    must(!is_tripped(stage).await?, || "the breaker tripped".to_owned())?;
    nothing_left(stage).await?;
    whole_walks(stage, &stage.trace())
}

async fn switched_off(stage: &mut Stage) -> Outcome {
    upgrade(stage).await?;
    stage.until_done().await?;
    nothing_left(stage).await?;
    whole_walks(stage, &stage.trace())
}

async fn quarantined(stage: &mut Stage) -> Outcome {
    let mark = |state: Option<&str>| json!({"metadata": {"labels": {nvsentinel::STATE_LABEL: state}}});
    stage.patch_node("gpu-01", mark(Some("draining"))).await?;
    upgrade(stage).await?;
    stage
        .until("the other is done", |scene| {
            scene.state("gpu-02") == State::UpgradeDone && scene.visited.is_empty()
        })
        .await?;
    stage.until_reason("gpu-01", "NVSentinel has it in state draining").await?;
    must(stage.scene().cordoned.is_empty(), || "it was cordoned".to_owned())?;
    stage.patch_node("gpu-01", mark(None)).await?;
    stage.until_done().await?;
    nothing_left(stage).await
}

/// Somebody follows the runbook.
async fn somebody_elses(stage: &mut Stage) -> Outcome {
    stage.label("gpu-01", nvsentinel::OPT_OUT_LABEL, Some("false")).await?;
    upgrade(stage).await?;
    stage.until_done().await?;
    let node = Api::<Node>::all(stage.cluster().admin.clone()).get("gpu-01").await?;
    let kept = node.labels().get(nvsentinel::OPT_OUT_LABEL).cloned();
    must(kept.as_deref() == Some("false"), || format!("their opt-out became {kept:?}"))?;
    whole_walks(stage, &stage.trace())
}

async fn removed_midway(stage: &mut Stage) -> Outcome {
    upgrade(stage).await?;
    stage.until("the driver restarts", |scene| scene.state("gpu-01") == State::PodRestartRequired).await?;
    stage.label("gpu-01", nvsentinel::OPT_OUT_LABEL, None).await?;
    let api = Api::<Node>::all(stage.cluster().admin.clone());
    let again = async || {
        let labels = api.get("gpu-01").await?.metadata.labels.unwrap_or_default();
        Ok(labels.get(nvsentinel::OPT_OUT_LABEL).filter(|value| *value == "false").map(drop))
    };
    stage.poll("it is opted out again", again).await?;
    stage.until_done().await?;
    nothing_left(stage).await?;
    whole_walks(stage, &stage.trace())
}

/// Somebody gives a visit up by removing its record; the opt-out does not outlive it.
async fn leaked(stage: &mut Stage) -> Outcome {
    upgrade(stage).await?;
    stage.until("the driver restarts", |scene| scene.state("gpu-01") == State::PodRestartRequired).await?;
    stage.kill_controller().await;
    let gone = json!({"metadata": {"annotations": {VISIT_ANNOTATION: null}, "labels": {super::STATE_LABEL: null}}, "spec": {"unschedulable": null}});
    stage.patch_node("gpu-01", gone).await?;
    stage.start_controller();
    stage.until_done().await?;
    nothing_left(stage).await
}

async fn tripped(stage: &mut Stage) -> Outcome {
    let set = |status: &str| json!({"data": {"status": status}});
    stage.patch::<ConfigMap>(nvsentinel::NAMESPACE, nvsentinel::BREAKER, set(nvsentinel::TRIPPED)).await?;
    stage.set_version(NEW).await?;
    for node in ["gpu-01", "gpu-02"] {
        stage.until_reason(node, "circuit breaker has tripped").await?;
    }
    stage.until("both are due", |scene| scene.all(State::UpgradeRequired)).await?;
    stage.stands_still_for(Duration::from_secs(3)).await?;
    must(stage.scene().cordoned.is_empty(), || "a node was taken out".to_owned())?;
    stage.patch::<ConfigMap>(nvsentinel::NAMESPACE, nvsentinel::BREAKER, set("CLOSED")).await?;
    stage.until("a node is on its way", |scene| !scene.visited.is_empty()).await?;
    stage.until_done().await?;
    nothing_left(stage).await
}
