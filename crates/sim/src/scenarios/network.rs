//! The Network Operator beside the GPU's: its policy rules another driver, and is watched from the moment it is defined.

use futures::FutureExt;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use pitcrew_core::api::NicClusterPolicy;
use serde_json::json;

use super::reported::spread;
use super::{NEW, in_service, scenario};
use crate::scenario::{Outcome, Scenario, Stage};

pub(super) fn all() -> Vec<Scenario> {
    vec![scenario("the-network-operator-moves-in", spread(2, 1), |s| moves_in(s).boxed())]
}

/// A NicClusterPolicy without network drivers to rule holds nobody up.
async fn moves_in(stage: &mut Stage) -> Outcome {
    let schema = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
    let version = json!({
        "name": "v1alpha1", "served": true, "storage": true, "schema": {"openAPIV3Schema": schema},
    });
    let definition = json!({
        "metadata": {"name": "nicclusterpolicies.mellanox.com"},
        "spec": {
            "group": "mellanox.com",
            "scope": "Cluster",
            "names": {
                "plural": "nicclusterpolicies", "singular": "nicclusterpolicy",
                "kind": "NicClusterPolicy", "listKind": "NicClusterPolicyList",
            },
            "versions": [version],
        },
    });
    stage.create::<CustomResourceDefinition>("", definition).await?;
    let policy = || {
        let options = json!({"upgradePolicy": {"autoUpgrade": true}});
        json!({"metadata": {"name": "nic-cluster-policy"}, "spec": {"ofedDriver": options}})
    };
    // A definition is served a moment after it is there.
    let made = async || Ok(stage.create::<NicClusterPolicy>("", policy()).await.ok());
    stage.poll("NicClusterPolicies are served", made).await?;
    stage.set_version(NEW).await?;
    stage.until_done().await?;
    in_service(stage)
}
