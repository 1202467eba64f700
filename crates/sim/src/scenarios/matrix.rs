//! The version matrix: what nobody has listed does not start.

use std::time::Duration;

use futures::FutureExt;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use pitcrew_core::api::{DriverPolicy, MatrixStatus, RolloutPhase};
use pitcrew_core::contract::{MATRIX_CONFIG_MAP, MATRIX_KEY};
use serde_json::{Value, json};

use super::reported::{embedded, spread};
use super::{NEW, NEWER, OLD, in_service, scenario, whole_walks};
use crate::actors::NAMESPACE;
use crate::scenario::{Outcome, Scenario, Stage, must};

pub(super) fn all() -> Vec<Scenario> {
    let policy = || Some(json!({"driver": {"name": "gpu"}, "rollout": {"matrix": {"enforce": true}}}));
    vec![
        Scenario {
            policy: policy(),
            ..scenario("a-version-that-nobody-listed-does-not-start", spread(2, 1), |s| listed(s).boxed())
        },
        Scenario {
            policy: policy(),
            ..embedded(&[], "a-way-back-is-open-whatever-the-matrix-says", spread(2, 1), |s| {
                way_back(s).boxed()
            })
        },
    ]
}

/// The file, with these drivers.
fn file(current: &str, canary: &str) -> Value {
    let text = format!(
        "versions:\n  current:\n    driver: \"{current}\"\n  canary:\n    driver: \"{canary}\"\n    status: testing\n"
    );
    json!({"data": {MATRIX_KEY: text}})
}

async fn create_matrix(stage: &Stage, mut file: Value) -> Outcome {
    file["metadata"] = json!({"name": MATRIX_CONFIG_MAP});
    stage.create::<ConfigMap>(NAMESPACE, file).await
}

async fn until_told(stage: &Stage, what: &str, is_told: impl Fn(&MatrixStatus) -> bool) -> Outcome {
    let policies = Api::<DriverPolicy>::all(stage.cluster().admin.clone());
    let told = async || {
        let matrix = policies.get("gpu").await?.status.and_then(|status| status.matrix);
        Ok(matrix.filter(&is_told).map(drop))
    };
    stage.poll(what, told).await
}

/// Nothing starts while there is no matrix, or one without the version; as soon as somebody lists it, the rollout goes. Then
/// the policy reminds of the commit.
async fn listed(stage: &mut Stage) -> Outcome {
    stage.set_version(NEW).await?;
    stage.until_reason("gpu-01", "there is no version matrix").await?;
    create_matrix(stage, file(OLD, NEWER)).await?;
    stage.until_reason("gpu-01", "driver 565.57.01 is not in the version matrix").await?;
    stage.stands_still_for(Duration::from_secs(2)).await?;
    must(stage.scene().cordoned.is_empty(), || "a node is cordoned".to_owned())?;
    stage.patch::<ConfigMap>(NAMESPACE, MATRIX_CONFIG_MAP, file(OLD, NEW)).await?;
    stage.until("a node is on its way", |scene| !scene.visited.is_empty()).await?;
    stage.until_done().await?;
    let reminds = |told: &MatrixStatus| {
        told.listed && told.reminder.as_deref().is_some_and(|what| what.contains("pitcrew matrix promote"))
    };
    until_told(stage, "the policy reminds of the promotion", reminds).await?;
    stage.patch::<ConfigMap>(NAMESPACE, MATRIX_CONFIG_MAP, file(NEW, NEW)).await?;
    until_told(stage, "the promotion is seen", |told| told.reminder.is_none()).await?;
    whole_walks(stage, &stage.trace())
}

/// The matrix is promoted at once, so that it does not list the version before; that one is put back all the same.
async fn way_back(stage: &mut Stage) -> Outcome {
    create_matrix(stage, file(OLD, NEW)).await?;
    stage.set_version(NEW).await?;
    stage.until_rollout("gpu-1", RolloutPhase::Done).await?;
    stage.patch::<ConfigMap>(NAMESPACE, MATRIX_CONFIG_MAP, file(NEW, NEW)).await?;
    stage.patch_rollout("gpu-1", super::rollbacks::word()).await?;
    stage.until_rollout("gpu-2", RolloutPhase::Done).await?;
    let reminds = |told: &MatrixStatus| {
        told.reminder.as_deref().is_some_and(|what| what.contains("pitcrew matrix rollback"))
    };
    until_told(stage, "the policy reminds of the revert", reminds).await?;
    let versions: Vec<String> = stage.driver_versions().await?.into_values().collect();
    must(versions == [OLD, OLD], || format!("drivers are {versions:?}"))?;
    in_service(stage)
}
