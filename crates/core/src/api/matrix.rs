//! The version matrix in a policy: which one a pool is held against, and what came of it.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::contract::MATRIX_KEY;

/// The version matrix that a pool is held against. It is in the ConfigMap gpu-version-matrix of pitcrew's own namespace.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct MatrixSpec {
    /// The key of the ConfigMap under which the file is.
    #[serde(default = "default_key")]
    #[schemars(length(max = 253))]
    #[x_kube(validation = ("self.matches('^[-._a-zA-Z0-9]+$')", "rollout.matrix.key must be a key of a ConfigMap, such as gpu-version-matrix.yaml"))]
    pub key: String,
    /// No node starts towards a driver version that the matrix does not list. Off: that is only told.
    #[serde(default)]
    pub enforce: bool,
}

/// What the controller makes of a pool's version matrix.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MatrixStatus {
    /// When this was said. Drift changes with every node, and is said once a minute at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<Time>,
    /// The matrix lists the driver version that is wanted.
    #[serde(default)]
    pub listed: bool,
    /// Where it lists that, or why nobody can say that it does.
    #[serde(default)]
    pub message: String,
    /// What runs otherwise than the matrix states, a sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub drift: Vec<String>,
    /// Fields that the matrix states and the controller does not see in this cluster.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_observed: Vec<String>,
    /// What a person should do about the matrix.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reminder: Option<String>,
}

fn default_key() -> String {
    MATRIX_KEY.to_owned()
}
