//! Gates: a node, or a stage, goes on when real work has proven the driver, and not before.

use std::collections::BTreeSet;
use std::time::Duration;

use futures::FutureExt;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::ListParams;
use pitcrew_core::api::{GateWhen, Rollout, RolloutPhase};
use pitcrew_core::contract::{GATE_LABEL, State};
use serde_json::{Value, json};

use super::reported::embedded;
use super::stages::{CANARY, labelled, others_untouched, staged, taken_back};
use super::{NEW, fleet, in_service, scenario};
use crate::actors::{Behaviour, GateOutcome, GateRule, NAMESPACE, Nodes};
use crate::scenario::{Outcome, Scenario, Stage, must};

pub(super) fn all() -> Vec<Scenario> {
    vec![
        Scenario {
            policy: Some(gated(&json!([
                {"name": "version", "preset": "driver-version"},
                {"name": "ecc", "preset": "ecc-errors"},
            ]))),
            ..scenario("every-node-is-proven-by-its-gates", fleet(2), |s| proven(s).boxed())
        },
        Scenario {
            behaviour: refuses("smoke", GateOutcome::failure("loss is nan")),
            policy: Some(canary(&json!([{"name": "smoke", "preset": "driver-version", "retries": 0}]))),
            ..scenario("a-canary-whose-gate-fails-is-taken-back", labelled(), |s| fails(s).boxed())
        },
        Scenario {
            policy: Some(canary(&json!([
                {"name": "joint", "preset": "driver-version", "runs": "Stage", "stages": ["canary"]},
            ]))),
            ..scenario("a-gate-at-the-end-of-a-stage-opens-the-next", labelled(), |s| ends(s).boxed())
        },
        Scenario {
            policy: Some(gated(&json!([{"name": "joint", "preset": "distributed-training"}]))),
            ..scenario("a-gate-over-two-nodes-proves-a-fleet", fleet(2), |s| joint(s).boxed())
        },
        Scenario {
            policy: Some(baking()),
            ..embedded(&[], "a-gate-that-fails-in-the-bake-spoils-it", labelled(), |s| spoils(s).boxed())
        },
        Scenario {
            behaviour: refuses("smoke", GateOutcome::ImageMissing),
            policy: Some(gated(&json!([{"name": "smoke", "preset": "driver-version", "timeout": "1m"}]))),
            ..embedded(&[], "a-gate-that-cannot-judge-lets-nobody-pass", fleet(1), |s| unjudged(s).boxed())
        },
    ]
}

fn gated(gates: &Value) -> Value {
    json!({"driver": {"name": "gpu"}, "rollout": {"gates": gates}})
}

/// The canary first, without a bake.
fn canary(gates: &Value) -> Value {
    let mut policy = staged(&json!({"bake": {"duration": "0s"}}));
    policy["rollout"]["gates"] = gates.clone();
    policy
}

fn baking() -> Value {
    let mut policy = staged(&json!({"bake": {"duration": "12h"}}));
    policy["rollout"]["gates"] = json!([{"name": "ecc", "preset": "ecc-errors"}]);
    policy
}

/// A gate that says this of the new version.
fn refuses(gate: &str, outcome: GateOutcome) -> Behaviour {
    let (gate, version) = (Some(gate.to_owned()), Some(NEW.to_owned()));
    Behaviour::default().with_gate_rule(GateRule { gate, nodes: Nodes::All, version, outcome })
}

async fn jobs(stage: &Stage) -> Result<Vec<Job>, crate::scenario::Broken> {
    let api = Api::<Job>::namespaced(stage.cluster().admin.clone(), NAMESPACE);
    Ok(api.list(&ListParams::default().labels(GATE_LABEL)).await?.items)
}

async fn rollout(stage: &Stage, name: &str) -> Result<Rollout, crate::scenario::Broken> {
    Ok(Api::<Rollout>::all(stage.cluster().admin.clone()).get(name).await?)
}

/// A controller that missed the end of a Job waits until that must be over, and asks again.
async fn until_jobs_must_be_over(stage: &Stage) {
    if stage.is_blinded() {
        tokio::time::sleep(Duration::from_hours(2)).await;
    }
}

/// Two gates, of which one looks at each node before its restart too.
async fn proven(stage: &mut Stage) -> Outcome {
    stage.set_version(NEW).await?;
    until_jobs_must_be_over(stage).await;
    stage.until_rollout("gpu-1", RolloutPhase::Done).await?;
    let jobs = jobs(stage).await?.len();
    must(jobs == 6 || stage.is_blinded(), || format!("{jobs} jobs were made for two nodes"))?;
    in_service(stage)
}

async fn fails(stage: &mut Stage) -> Outcome {
    stage.set_version(NEW).await?;
    stage.until("the canary has failed", |scene| scene.state(CANARY) == State::UpgradeFailed).await?;
    let told = async || {
        let warnings = stage.warnings(CANARY).await?;
        let told =
            |warning: &String| warning.contains("gate smoke failed") && warning.contains("loss is nan");
        Ok(warnings.iter().any(told).then_some(()))
    };
    stage.poll("an event tells of the gate and of its log", told).await?;
    // Whoever leads then goes on with it.
    stage.kill_controller().await;
    stage.start_controller();
    until_jobs_must_be_over(stage).await;
    taken_back(stage).await?;
    others_untouched(stage)
}

async fn ends(stage: &mut Stage) -> Outcome {
    stage.set_version(NEW).await?;
    until_jobs_must_be_over(stage).await;
    stage.until_rollout("gpu-1", RolloutPhase::Done).await?;
    let stages = rollout(stage, "gpu-1").await?.status.unwrap_or_default().stages;
    let said = stages.iter().flat_map(|stage| &stage.gates).filter(|gate| gate.when == GateWhen::Stage);
    let passed: Vec<u32> = said.map(|gate| gate.passed).collect();
    must(passed == [1], || format!("the gate passed {passed:?} times"))?;
    in_service(stage)
}

/// One Job, one pod on each of two nodes at the same time; the rollout is not done before it.
async fn joint(stage: &mut Stage) -> Outcome {
    stage.set_version(NEW).await?;
    until_jobs_must_be_over(stage).await;
    stage.until_rollout("gpu-1", RolloutPhase::Done).await?;
    let jobs: Vec<Option<i32>> =
        jobs(stage).await?.iter().map(|job| job.spec.as_ref()?.parallelism).collect();
    must(jobs == [Some(2)] || stage.is_blinded(), || format!("jobs were made with {jobs:?} pods"))?;
    let pods = Api::<Pod>::namespaced(stage.cluster().admin.clone(), NAMESPACE);
    let pods = pods.list(&ListParams::default().labels(GATE_LABEL)).await?;
    let nodes: BTreeSet<&str> =
        pods.iter().filter_map(|pod| pod.spec.as_ref()?.node_name.as_deref()).collect();
    // Of one that ended hours ago nothing is left.
    let both = nodes.into_iter().eq(["gpu-01", "gpu-02"]);
    must(both || stage.is_blinded(), || "its pods were not on both nodes".to_owned())?;
    let stages = rollout(stage, "gpu-1").await?.status.unwrap_or_default().stages;
    let said: Vec<(GateWhen, u32)> =
        stages.iter().flat_map(|stage| &stage.gates).map(|gate| (gate.when, gate.passed)).collect();
    must(said == [(GateWhen::Stage, 1)], || format!("the gate said {said:?}"))?;
    in_service(stage)
}

async fn spoils(stage: &mut Stage) -> Outcome {
    stage.set_version(NEW).await?;
    stage.until_rollout("gpu-1", RolloutPhase::Baking).await?;
    stage.stands_still_for(Duration::from_mins(150)).await?;
    let report = json!({"gpus": 8, "withEcc": 8, "corrected": 0, "uncorrected": 3});
    stage.behaviour().change(|behaviour| {
        let nodes = Nodes::Named(CANARY.to_owned());
        *behaviour = behaviour.clone().with_gate("ecc", nodes, GateOutcome::Passes { report });
    });
    // Until it is asked again.
    tokio::time::sleep(Duration::from_hours(1)).await;
    until_jobs_must_be_over(stage).await;
    taken_back(stage).await?;
    others_untouched(stage)
}

async fn unjudged(stage: &mut Stage) -> Outcome {
    stage.set_version(NEW).await?;
    stage.until_reason("gpu-01", "did not start").await?;
    tokio::time::sleep(Duration::from_mins(30)).await;
    stage.until("the node has failed", |scene| scene.state("gpu-01") == State::UpgradeFailed).await?;
    stage.until_reason("gpu-01", "could not judge").await?;
    let jobs = jobs(stage).await?.len();
    must(jobs == 3 || stage.is_blinded(), || format!("it was asked {jobs} times"))
}
