//! NVIDIA's ClusterPolicy, NVIDIADriver and NicClusterPolicy, as far as they are read.
//!
//! Their specs arrive as plain JSON and are taken apart one field at a time by the policy resolver: these objects
//! have no guard of ours, and one bad value must freeze one pool, not break the watch of all of them.

use kube::CustomResource;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The GPU Operator's cluster-wide configuration.
#[derive(CustomResource, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[kube(
    group = "nvidia.com",
    version = "v1",
    kind = "ClusterPolicy",
    plural = "clusterpolicies",
    schema = "disabled"
)]
#[serde(rename_all = "camelCase")]
pub struct ClusterPolicySpec {
    /// The driver's part.
    #[serde(default)]
    pub driver: Value,
    /// Sandboxed workloads (virtual machines), which pitcrew does not manage.
    #[serde(default)]
    pub sandbox_workloads: Value,
}

/// One driver for one part of the fleet.
#[derive(CustomResource, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[kube(
    group = "nvidia.com",
    version = "v1alpha1",
    kind = "NVIDIADriver",
    plural = "nvidiadrivers",
    schema = "disabled"
)]
#[serde(rename_all = "camelCase")]
pub struct NVIDIADriverSpec {
    /// The driver.
    #[serde(default)]
    pub version: String,
    /// The upgrade options.
    #[serde(default)]
    pub upgrade_policy: Value,
}

/// The Network Operator's cluster-wide configuration.
#[derive(CustomResource, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[kube(
    group = "mellanox.com",
    version = "v1alpha1",
    kind = "NicClusterPolicy",
    plural = "nicclusterpolicies",
    schema = "disabled"
)]
#[serde(rename_all = "camelCase")]
pub struct NicClusterPolicySpec {
    /// The driver's part.
    #[serde(default)]
    pub ofed_driver: Value,
}
