//! How a pool moves from one version to the next: when, and who goes together.

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use super::{BlackoutSpec, TopologySpec, WindowSpec};

/// How a pool moves from one version to the next.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct RolloutPolicySpec {
    /// When nodes may start. Empty: at any time.
    #[serde(default)]
    #[schemars(length(max = 16))]
    pub windows: Vec<WindowSpec>,
    /// Dates on which nothing starts, whatever the windows say.
    #[serde(default)]
    #[schemars(length(max = 64))]
    pub blackouts: Vec<BlackoutSpec>,
    /// Which nodes go together, and which do not.
    #[serde(default)]
    pub topology: TopologySpec,
}
