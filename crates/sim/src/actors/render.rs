//! The operator's DaemonSets, from a ClusterPolicy or an NVIDIADriver. Values in, objects out.

use std::collections::BTreeSet;

use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::core::DynamicObject;
use serde_json::{Value, json};

use super::clients;
use super::object::{fnv, hash_name};
use super::operator::{
    DEPLOY_DRIVER, DEPLOY_VALIDATOR, DRIVER_APP, DRIVER_COMPONENT, DRIVER_OWNER, KERNEL, LAST_APPLIED,
    NAMESPACE, VALIDATOR_APP,
};

/// What every node image of the simulated fleet runs.
const OS_TAG: &str = "ubuntu22.04";
const MANAGER_IMAGE: &str = "nvcr.io/nvidia/cloud-native/k8s-driver-manager:v0.8.0";
const SAFE_LOAD_IMAGE: &str = "ghcr.io/mellanox/network-operator-init-container:v0.0.3";
pub(super) const VALIDATOR_IMAGE: &str = "nvcr.io/nvidia/cloud-native/gpu-operator-validator:v25.3.0";

/// The init container that makes the node ready for another driver.
pub(super) const MANAGER_CONTAINER: &str = "k8s-driver-manager";
/// The init container that waits for a safe moment to load the driver.
pub(super) const SAFE_LOAD_CONTAINER: &str = "network-operator-init-container";
/// The ConfigMap that tells it by which annotation to ask.
pub const SAFE_LOAD_CONFIG: &str = "ofed-init-container-config";

/// What a ClusterPolicy asks for, on nodes with these kernels.
pub(super) fn of_cluster_policy(policy: &DynamicObject, kernels: &BTreeSet<String>) -> Vec<DaemonSet> {
    let spec = &policy.data["spec"];
    let owner = owner("nvidia.com/v1", "ClusterPolicy", policy);
    let driver = &spec["driver"];
    let own_driver =
        driver["enabled"] != false && driver["useNvidiaDriverCRD"] != true && driver["version"].is_string();
    let mut sets = Vec::new();
    let extra = &spec["daemonsets"]["labels"];
    let driver_set = |name: &str, selector: Value| {
        let place = Place { name, app: DRIVER_APP, node_selector: &selector };
        driver_set(&place, driver, extra, &owner)
    };
    if own_driver && driver["usePrecompiled"] == true {
        // One for each kernel, all under one label.
        sets.extend(kernels.iter().filter_map(|kernel| {
            let name = format!("{DRIVER_APP}-{kernel}-{OS_TAG}");
            driver_set(&name, json!({DEPLOY_DRIVER: "true", KERNEL: kernel}))
        }));
    } else if own_driver {
        sets.extend(driver_set(DRIVER_APP, json!({DEPLOY_DRIVER: "true"})));
    }
    if spec["validator"]["enabled"] != false {
        sets.extend(validator_set(&owner));
    }
    sets.extend(clients::sets(spec, &owner));
    sets
}

/// What an NVIDIADriver asks for.
pub(super) fn of_nvidia_driver(driver: &DynamicObject) -> Option<DaemonSet> {
    let owner = owner("nvidia.com/v1alpha1", "NVIDIADriver", driver);
    let name = format!("nvidia-gpu-driver-{}-{}", OS_TAG.replace('.', ""), hash_name(&owner.uid));
    let selector = json!({DEPLOY_DRIVER: "true", DRIVER_OWNER: owner.name});
    let spec = &driver.data["spec"];
    let place = Place { name: &name, app: &name, node_selector: &selector };
    driver_set(&place, spec, &spec["labels"], &owner)
}

/// A driver DaemonSet's name, its `app` label, and the nodes that it is for.
struct Place<'a> {
    name: &'a str,
    app: &'a str,
    node_selector: &'a Value,
}

fn owner(api_version: &str, kind: &str, object: &DynamicObject) -> OwnerReference {
    OwnerReference {
        api_version: api_version.into(),
        kind: kind.into(),
        name: object.metadata.name.clone().unwrap_or_default(),
        uid: object.metadata.uid.clone().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}

fn driver_set(
    place: &Place<'_>,
    driver: &Value,
    extra_labels: &Value,
    owner: &OwnerReference,
) -> Option<DaemonSet> {
    let Place { name, app, node_selector } = place;
    let version = driver["version"].as_str()?;
    let repository = driver["repository"].as_str().unwrap_or("nvcr.io/nvidia");
    let image = format!("{repository}/{}:{version}-{OS_TAG}", driver["image"].as_str().unwrap_or("driver"));
    let env = list(&driver["env"]);
    let manager_env = list(&driver["manager"]["env"]);
    // Decimal FNV-32a, as the operator writes it: equal digests mean that nothing needs to be installed anew.
    let installed = json!([image, env, MANAGER_IMAGE, manager_env, driver["kernelModuleType"]]);
    let digest =
        json!({"name": "DRIVER_CONFIG_DIGEST", "value": fnv(installed.to_string().as_bytes()).to_string()});
    let labels = json!({"app": app, "app.kubernetes.io/component": DRIVER_COMPONENT});
    let mut init =
        vec![json!({"name": MANAGER_CONTAINER, "image": MANAGER_IMAGE, "env": with(manager_env, &digest)})];
    if driver["safeLoad"] == true {
        let field = |path: &str| json!({"fieldRef": {"fieldPath": path}});
        init.push(json!({
            "name": SAFE_LOAD_CONTAINER,
            "image": SAFE_LOAD_IMAGE,
            "args": [format!("--configmap-namespace={NAMESPACE}"), format!("--configmap-name={SAFE_LOAD_CONFIG}")],
            "env": [
                {"name": "NODE_NAME", "valueFrom": field("spec.nodeName")},
                {"name": "POD_UID", "valueFrom": field("metadata.uid")},
            ],
        }));
    }
    let pod = json!({
        "serviceAccountName": "nvidia-driver",
        "nodeSelector": node_selector,
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "priorityClassName": "system-node-critical",
        "initContainers": init,
        "containers": [{"name": "nvidia-driver-ctr", "image": image, "env": with(env, &digest)}],
    });
    let mut set = daemon_set(name, &labels, "OnDelete", &pod, owner)?;
    label_pods(&mut set, extra_labels);
    Some(set)
}

/// Labels that people add to all pods change the template, but nothing that is installed.
fn label_pods(set: &mut DaemonSet, extra: &Value) {
    let extra = extra.as_object().into_iter().flatten();
    let extra = extra.filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned())));
    let extra: Vec<(String, String)> = extra.collect();
    if extra.is_empty() {
        return;
    }
    let template = set.spec.template.metadata.get_or_insert_default();
    template.labels.get_or_insert_default().extend(extra);
    let applied = hash_name(&json!(set.spec));
    set.metadata.annotations.get_or_insert_default().insert(LAST_APPLIED.to_owned(), applied);
}

fn validator_set(owner: &OwnerReference) -> Option<DaemonSet> {
    let pod = json!({
        "serviceAccountName": "nvidia-operator-validator",
        "nodeSelector": {DEPLOY_VALIDATOR: "true"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "priorityClassName": "system-node-critical",
        "containers": [{"name": "nvidia-operator-validator", "image": VALIDATOR_IMAGE}],
    });
    daemon_set(VALIDATOR_APP, &json!({"app": VALIDATOR_APP}), "RollingUpdate", &pod, owner)
}

pub(super) fn daemon_set(
    name: &str,
    labels: &Value,
    strategy: &str,
    pod: &Value,
    owner: &OwnerReference,
) -> Option<DaemonSet> {
    let spec = json!({
        "selector": {"matchLabels": {"app": labels["app"]}},
        "updateStrategy": {"type": strategy},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    });
    let metadata = json!({
        "name": name,
        "namespace": NAMESPACE,
        "labels": labels,
        "annotations": {LAST_APPLIED: hash_name(&spec)},
        "ownerReferences": [owner],
    });
    serde_json::from_value(json!({"metadata": metadata, "spec": spec})).ok()
}

fn list(value: &Value) -> Vec<Value> {
    value.as_array().cloned().unwrap_or_default()
}

fn with(mut env: Vec<Value>, extra: &Value) -> Vec<Value> {
    env.push(extra.clone());
    env
}

#[cfg(test)]
mod tests {
    use kube::core::{ApiResource, GroupVersionKind};

    use super::*;

    fn policy(spec: &Value) -> DynamicObject {
        let kind = ApiResource::from_gvk(&GroupVersionKind::gvk("nvidia.com", "v1", "ClusterPolicy"));
        DynamicObject::new("cluster-policy", &kind).data(json!({"spec": spec}))
    }

    fn digest(sets: &[DaemonSet]) -> Option<String> {
        let pod = sets.first()?.spec.template.spec.as_ref()?;
        pod.containers.first()?.env.as_ref()?.last()?.value.clone()
    }

    #[test]
    fn the_version_decides_image_and_digest() {
        let none = BTreeSet::new();
        let of = |version: &str| of_cluster_policy(&policy(&json!({"driver": {"version": version}})), &none);
        let sets = of("535.104.05");
        let names: Vec<_> = sets.iter().map(|set| set.metadata.name.as_deref().unwrap_or_default()).collect();
        assert_eq!(names, ["nvidia-driver-daemonset", "nvidia-operator-validator"]);
        let pod = sets[0].spec.template.spec.as_ref().expect("pod");
        assert_eq!(pod.containers[0].image.as_deref(), Some("nvcr.io/nvidia/driver:535.104.05-ubuntu22.04"));
        assert_ne!(digest(&sets), digest(&of("550.54.15")));
        assert_eq!(digest(&sets), digest(&of("535.104.05")));
    }

    #[test]
    fn the_policy_can_leave_drivers_to_the_other_resource() {
        let spec = json!({"driver": {"version": "1", "useNvidiaDriverCRD": true}});
        assert_eq!(of_cluster_policy(&policy(&spec), &BTreeSet::new()).len(), 1);
    }

    #[test]
    fn precompiled_drivers_are_one_for_each_kernel() {
        let spec =
            json!({"driver": {"version": "1", "usePrecompiled": true}, "validator": {"enabled": false}});
        let kernels = BTreeSet::from(["5.15.0-84".to_owned(), "6.8.0-31".to_owned()]);
        let sets = of_cluster_policy(&policy(&spec), &kernels);
        assert_eq!(sets.len(), 2);
        let app = |set: &DaemonSet| set.spec.selector.match_labels.clone();
        assert_eq!(app(&sets[0]), app(&sets[1]));
    }
}
