//! Which nodes go together, and which do not.

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::KubeSchema;
use serde::{Deserialize, Serialize};

/// Which nodes go together, and which do not.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct TopologySpec {
    /// A node label. Nodes with one value of it (an NVLink domain, a rack) start in one wave or not at all, and have to fit the limits as one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 317))]
    #[x_kube(validation = ("self.matches('^([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$')", "topology.atom must be a label key such as nvidia.com/gpu.clique"))]
    pub atom: Option<String>,
    /// At most so many nodes of one group are out at a time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spread: Option<SpreadSpec>,
    /// Nodes of one job that runs on several nodes go together, so that it is interrupted once.
    #[serde(default)]
    pub gang: GangSpec,
}

/// At most so many nodes of one group are out at a time.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct SpreadSpec {
    /// The node label whose values are the groups.
    #[schemars(length(max = 317))]
    #[x_kube(validation = ("self.matches('^([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$')", "topology.spread.label must be a label key such as topology.kubernetes.io/zone"))]
    pub label: String,
    /// How many nodes of one group may be out, by whatever cause: a number, or a percentage of the group that rounds up.
    #[x_kube(validation = ("type(self) == int ? int(self) >= 1 : string(self).matches('^(100|[1-9][0-9]?)%$')", "topology.spread.max must be a number of nodes (1 or more) or a percentage from 1% to 100%"))]
    pub max: IntOrString,
}

/// Whether nodes of one job go together, and how such a job is known.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct GangSpec {
    /// Off: each node goes by itself.
    #[serde(default = "default_true")]
    pub enabled: bool,
    /// A pod label: pods of one namespace with one value of it are one job. Not set: pods that one Job, JobSet, MPIJob or the like controls.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 317))]
    #[x_kube(validation = ("self.matches('^([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$')", "topology.gang.label must be a label key such as training.kubeflow.org/job-name"))]
    pub label: Option<String>,
}

impl Default for GangSpec {
    fn default() -> Self {
        Self { enabled: default_true(), label: None }
    }
}

fn default_true() -> bool {
    true
}
