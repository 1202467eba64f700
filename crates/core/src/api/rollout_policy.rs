//! `spec.rollout` of a DriverPolicy: how a new version reaches the pool, part by part.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    BlackoutSpec, GateSpec, MatrixSpec, OnFailure, PrometheusSpec, QuerySpec, TopologySpec, WindowSpec,
};

// Amounts in a list have no rules with sentences: the API server takes their texts for as long as a whole request, and
// refuses the definition because of what checking 16 of them could cost.
const PERCENT: &str = "^(100|[0-9]{1,2})%$";
const AT_LEAST_ONE_PERCENT: &str = "^(100|[1-9][0-9]?)%$";

/// How a new version reaches the pool.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = ("self.stages.all(stage, self.stages.exists_one(other, other.name == stage.name))", "rollout.stages: each stage needs a name of its own"),
    validation = ("self.gates.all(gate, self.gates.exists_one(other, other.name == gate.name))", "rollout.gates: each gate needs a name of its own"),
    validation = ("has(self.prometheus) || !self.stages.exists(stage, has(stage.bake) && has(stage.bake.queries) && size(stage.bake.queries) > 0)", "rollout.prometheus.url is missing: a bake with queries has to know which Prometheus to ask")
)]
pub struct RolloutPolicySpec {
    /// The parts of the pool, in their order. A node belongs to the first that matches; whoever matches none goes last,
    /// in a stage called fleet. Empty: one stage; or, if nodes are labelled gpu-canary=true, those first.
    #[serde(default)]
    #[schemars(length(max = 16))]
    pub stages: Vec<StageSpec>,
    /// Checks that must pass before a node, or a stage, goes on: in this order, one after the other.
    #[serde(default)]
    #[schemars(length(max = 16))]
    pub gates: Vec<GateSpec>,
    /// What happens when a stage fails. Not set: Rollback in a pool with stages, Pause in one without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_failure: Option<OnFailure>,
    /// How many rollouts that are over are kept.
    #[serde(default = "default_history")]
    #[x_kube(validation = ("self >= 1", "rollout.historyLimit must be 1 or more"))]
    pub history_limit: u32,
    /// Whether nodes that are still to be upgraded get a `PreferNoSchedule` taint while others of their stage move, so that
    /// evicted pods land where they can stay.
    #[serde(default = "default_prefer_upgraded")]
    pub prefer_upgraded_nodes: bool,
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
    /// The version matrix that the pool is held against. Not set: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub matrix: Option<MatrixSpec>,
    /// The Prometheus that bakes ask. Not set: none, and no bake may have queries.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prometheus: Option<PrometheusSpec>,
}

impl Default for RolloutPolicySpec {
    fn default() -> Self {
        Self {
            stages: Vec::new(),
            gates: Vec::new(),
            on_failure: None,
            history_limit: default_history(),
            prefer_upgraded_nodes: default_prefer_upgraded(),
            windows: Vec::new(),
            blackouts: Vec::new(),
            topology: TopologySpec::default(),
            matrix: None,
            prometheus: None,
        }
    }
}

/// A part of the pool that goes together.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = ("!(has(self.count) && size(self.nodeSelector) > 0)", "a stage has a nodeSelector or a count, not both")
)]
pub struct StageSpec {
    /// Its name.
    #[schemars(length(min = 1, max = 63))]
    #[x_kube(validation = ("self.matches('^[a-z0-9]([a-z0-9-]*[a-z0-9])?$')", "a stage's name must be lower-case letters, digits and dashes, such as canary"))]
    pub name: String,
    /// Nodes with these labels.
    #[serde(default)]
    #[schemars(length(max = 16))]
    pub node_selector: BTreeMap<String, String>,
    /// So many of the nodes that are left: a number, or a percentage of the pool that rounds up; the first by name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("pattern" = AT_LEAST_ONE_PERCENT, "minimum" = 1))]
    pub count: Option<IntOrString>,
    /// How many of its nodes are upgraded at the same time; within the limit of the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = ("self >= 1", "a stage's maxParallelUpgrades must be 1 or more"))]
    pub max_parallel_upgrades: Option<u32>,
    /// How many of its nodes may be out at the same time; within the limit of the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("pattern" = AT_LEAST_ONE_PERCENT, "minimum" = 1))]
    pub max_unavailable: Option<IntOrString>,
    /// One node first, then two, four, eight at a time, as long as none fails.
    #[serde(default)]
    pub ramp: bool,
    /// More failed nodes than this fail the stage: a number, or a percentage of the stage that rounds up. Not set: 0
    /// for a stage that others wait for, `limits.failureThreshold` for the last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("pattern" = PERCENT, "minimum" = 0))]
    pub failure_threshold: Option<IntOrString>,
    /// How long its nodes are watched at work before the next stage opens. Not set: 48h for the first of several stages,
    /// no time for the others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bake: Option<BakeSpec>,
    /// Who opens the next stage.
    #[serde(default)]
    pub promotion: Promotion,
}

/// How long the nodes of a stage are watched at work, and what must be seen in that time.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = ("!has(self.queries) || self.queries.all(query, self.queries.exists_one(other, other.name == query.name))", "bake.queries: each query needs a name of its own")
)]
pub struct BakeSpec {
    /// How long.
    #[serde(default = "default_bake")]
    #[schemars(length(max = 20))]
    #[x_kube(validation = ("self.matches('^([0-9]+(d|h|m|s))+$')", "bake.duration must be a duration such as 48h"))]
    pub duration: String,
    /// More restarts of driver containers than this fail the stage.
    #[serde(default)]
    pub max_driver_restarts: u32,
    /// Hours of real work on its devices, devices times hours, without which the bake goes on.
    #[serde(default)]
    pub min_device_hours: u32,
    /// Pods that started on its devices, without which the bake goes on.
    #[serde(default)]
    pub min_job_starts: u32,
    /// What Prometheus is asked at every look. A value out of its bounds fails the stage; without an answer that time does
    /// not count.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8))]
    pub queries: Vec<QuerySpec>,
}

impl Default for BakeSpec {
    fn default() -> Self {
        Self {
            duration: default_bake(),
            max_driver_restarts: 0,
            min_device_hours: 0,
            min_job_starts: 0,
            queries: Vec::new(),
        }
    }
}

/// Who opens the next stage.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema)]
pub enum Promotion {
    /// It opens when this one has passed.
    #[default]
    Auto,
    /// A person does, with `pitcrew promote`.
    Manual,
}

fn default_history() -> u32 {
    10
}

fn default_prefer_upgraded() -> bool {
    true
}

fn default_bake() -> String {
    "48h".to_owned()
}
