//! The operator's CRDs: small, but with the real names, schemas and defaults of what an upgrade reads.
//!
//! As in the real ones, `drain`, `podDeletion` and `waitForCompletion` have no default as a whole: an absent one
//! stays absent. Everything else in `spec` is kept as it comes.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde_json::{Value, json};

/// ClusterPolicy and NVIDIADriver.
pub(crate) fn all() -> Vec<CustomResourceDefinition> {
    let cluster_policy = json!({
        "names": {"plural": "clusterpolicies", "singular": "clusterpolicy", "kind": "ClusterPolicy", "listKind": "ClusterPolicyList"},
        "version": "v1",
        "spec": {"driver": open(&json!({
            "enabled": {"type": "boolean"},
            "version": {"type": "string"},
            "upgradePolicy": upgrade_policy(false),
        }))},
    });
    let nvidia_driver = json!({
        "names": {
            "plural": "nvidiadrivers", "singular": "nvidiadriver", "kind": "NVIDIADriver", "listKind": "NVIDIADriverList",
            "shortNames": ["nvd", "nvdriver", "nvdrivers"],
        },
        "version": "v1alpha1",
        "spec": {
            "default": {"type": "boolean"},
            "driverType": {"type": "string", "default": "gpu", "enum": ["gpu", "vgpu", "vgpu-host-manager"]},
            "version": {"type": "string"},
            "nodeSelector": {"type": "object", "additionalProperties": {"type": "string"}},
            "upgradePolicy": upgrade_policy(true),
        },
    });
    [cluster_policy, nvidia_driver].iter().filter_map(definition).collect()
}

fn definition(parts: &Value) -> Option<CustomResourceDefinition> {
    let plural = parts["names"]["plural"].as_str()?;
    let schema = json!({
        "type": "object",
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": open(&parts["spec"]),
            "status": open(&json!({})),
        },
    });
    let definition = json!({
        "metadata": {"name": format!("{plural}.nvidia.com")},
        "spec": {
            "group": "nvidia.com",
            "scope": "Cluster",
            "names": parts["names"],
            "versions": [{
                "name": parts["version"], "served": true, "storage": true,
                "schema": {"openAPIV3Schema": schema},
                "subresources": {"status": {}},
            }],
        },
    });
    serde_json::from_value(definition).ok()
}

/// An object that keeps fields it does not know.
fn open(properties: &Value) -> Value {
    json!({"type": "object", "properties": properties, "x-kubernetes-preserve-unknown-fields": true})
}

fn upgrade_policy(auto_upgrade: bool) -> Value {
    let boolean = json!({"type": "boolean", "default": false});
    let seconds = |default: u32| json!({"type": "integer", "minimum": 0, "default": default});
    let text = json!({"type": "string", "default": ""});
    json!({"type": "object", "properties": {
        "autoUpgrade": {"type": "boolean", "default": auto_upgrade},
        "maxParallelUpgrades": {"type": "integer", "minimum": 0, "default": 1},
        "maxUnavailable": {"anyOf": [{"type": "integer"}, {"type": "string"}], "default": "25%", "x-kubernetes-int-or-string": true},
        "waitForCompletion": {"type": "object", "properties": {
            "podSelector": {"type": "string"}, "timeoutSeconds": seconds(0),
        }},
        "podDeletion": {"type": "object", "properties": {
            "force": boolean, "timeoutSeconds": seconds(300), "deleteEmptyDir": boolean,
        }},
        "drain": {"type": "object", "properties": {
            "enable": boolean, "force": boolean, "podSelector": text, "timeoutSeconds": seconds(300), "deleteEmptyDir": boolean,
        }},
    }})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_definitions_are_well_formed() {
        let names: Vec<_> = all().into_iter().filter_map(|definition| definition.metadata.name).collect();
        assert_eq!(names, ["clusterpolicies.nvidia.com", "nvidiadrivers.nvidia.com"]);
    }
}
