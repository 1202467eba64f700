//! The operator's operands that use the driver: what they are called, where they run, how they are rendered.
//!
//! Each waits in an init container until the node's driver is ready; from then on nothing but a restart makes it
//! see another driver.

use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::ResourceExt;
use serde_json::{Value, json};

use super::dra::OPERATOR_PLUGIN;
use super::object::value;
use super::operator::{NAMESPACE, VALIDATOR_APP};
use super::render::{VALIDATOR_IMAGE, daemon_set};

/// What nodes offer through the device plugin.
pub(crate) const GPU: &str = "nvidia.com/gpu";
/// The value of `app` on device plugin pods.
const DEVICE_PLUGIN: &str = "nvidia-device-plugin-daemonset";
const DEPLOY_DEVICE_PLUGIN: &str = "nvidia.com/gpu.deploy.device-plugin";

/// One of the operator's DaemonSets.
#[derive(Clone, Copy, Debug)]
pub struct Operand {
    /// The DaemonSet's name, and its pods' label `app`.
    pub app: &'static str,
    /// Its part of the ClusterPolicy's spec.
    pub field: &'static str,
    /// On nodes that get a pod of it.
    pub deploy: &'static str,
    gate: &'static str,
    container: &'static str,
    image: &'static str,
}

/// The operands that use the driver.
#[rustfmt::skip] // a table
pub const OPERANDS: [Operand; 5] = {
    const DRIVER: &str = "driver-validation";
    const TOOLKIT: &str = "toolkit-validation";
    [
        Operand { app: "nvidia-container-toolkit-daemonset", field: "toolkit", deploy: "nvidia.com/gpu.deploy.container-toolkit", gate: DRIVER, container: "nvidia-container-toolkit-ctr", image: "nvcr.io/nvidia/k8s/container-toolkit:v1.17.5-ubuntu20.04" },
        Operand { app: DEVICE_PLUGIN, field: "devicePlugin", deploy: DEPLOY_DEVICE_PLUGIN, gate: TOOLKIT, container: "nvidia-device-plugin", image: "nvcr.io/nvidia/k8s-device-plugin:v0.17.1" },
        Operand { app: "nvidia-dcgm", field: "dcgm", deploy: "nvidia.com/gpu.deploy.dcgm", gate: TOOLKIT, container: "nvidia-dcgm-ctr", image: "nvcr.io/nvidia/cloud-native/dcgm:4.1.1-2-ubuntu22.04" },
        Operand { app: "nvidia-dcgm-exporter", field: "dcgmExporter", deploy: "nvidia.com/gpu.deploy.dcgm-exporter", gate: TOOLKIT, container: "nvidia-dcgm-exporter", image: "nvcr.io/nvidia/k8s/dcgm-exporter:4.1.1-4.0.4-ubuntu22.04" },
        Operand { app: "gpu-feature-discovery", field: "gfd", deploy: "nvidia.com/gpu.deploy.gpu-feature-discovery", gate: TOOLKIT, container: "gpu-feature-discovery", image: "nvcr.io/nvidia/k8s-device-plugin:v0.17.1" },
    ]
};

/// The DaemonSets of the operands that a ClusterPolicy's spec names. An operand that is not named is off, unlike in
/// the real operator: most simulated fleets are about drivers alone.
pub(super) fn sets(spec: &Value, owner: &OwnerReference) -> Vec<DaemonSet> {
    let wanted = OPERANDS.iter().filter(|operand| spec[operand.field]["enabled"] == true);
    wanted.filter_map(|operand| set(operand, owner)).collect()
}

fn set(operand: &Operand, owner: &OwnerReference) -> Option<DaemonSet> {
    let Operand { app, deploy, gate, container, image, .. } = operand;
    let pod = json!({
        "serviceAccountName": app,
        "nodeSelector": {*deploy: "true"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "priorityClassName": "system-node-critical",
        "initContainers": [{"name": gate, "image": VALIDATOR_IMAGE}],
        "containers": [{"name": container, "image": image}],
    });
    daemon_set(app, &json!({"app": app}), "RollingUpdate", &pod, owner)
}

/// Whether the driver-manager removes a pod of its node before a new driver is loaded: all operands that use the
/// driver, the operator's own DRA plugin among them, and the validator. It does not know of anybody else's plugin.
pub(super) fn is_operand(pod: &Pod) -> bool {
    let Some(app) = value(pod.metadata.labels.as_ref(), "app") else { return false };
    let known = OPERANDS.iter().map(|operand| operand.app).chain([VALIDATOR_APP, OPERATOR_PLUGIN]);
    pod.namespace().as_deref() == Some(NAMESPACE) && known.into_iter().any(|known| known == app)
}

pub(super) fn is_device_plugin(pod: &Pod) -> bool {
    value(pod.metadata.labels.as_ref(), "app") == Some(DEVICE_PLUGIN)
}

/// Whether a pod has devices of the device plugin.
pub(super) fn asks_for_gpu(pod: &Pod) -> bool {
    let containers = pod.spec.as_ref().map(|spec| spec.containers.as_slice()).unwrap_or_default();
    let limits = containers.iter().filter_map(|container| container.resources.as_ref()?.limits.as_ref());
    limits.into_iter().any(|limits| limits.contains_key(GPU))
}

/// What the node should offer, if that is not what it offers: all its GPUs while its device plugin is Ready, none
/// otherwise. `None` too where no device plugin belongs.
pub(super) fn offer(node: &Node, plugin_ready: bool) -> Option<Quantity> {
    value(node.metadata.labels.as_ref(), DEPLOY_DEVICE_PLUGIN).filter(|value| !value.is_empty())?;
    let status = node.status.as_ref()?;
    let all = status.capacity.as_ref()?.get(GPU)?;
    let wanted = if plugin_ready { all.clone() } else { Quantity("0".into()) };
    let offered = status.allocatable.as_ref().and_then(|offered| offered.get(GPU));
    (offered != Some(&wanted)).then_some(wanted)
}
