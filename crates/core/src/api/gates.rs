//! Gates as a policy states them: checks that run as Jobs on the node under test, or at the end of a stage.
//!
//! A gate is a preset or a pod template, with bounds on the numbers that it reports. Every list and every text has a
//! largest size: the API server estimates what a rule costs at most, and refuses a definition that costs too much.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::KubeSchema;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A check that must pass before a node, or a stage, goes on.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = ("has(self.preset) != has(self.template)", "a gate is either a preset or a template: set exactly one of the two"),
    validation = ("!has(self.image) || has(self.preset)", "image is for presets: a template names its own images"),
    validation = ("!has(self.nodes) || self.nodes == 1 || (has(self.runs) && self.runs == 'Stage') || (has(self.preset) && self.preset == 'distributed-training')", "nodes is for gates at the end of a stage: set runs: Stage"),
    validation = ("!has(self.stages) || size(self.stages) == 0 || (has(self.runs) && self.runs == 'Stage') || (has(self.preset) && self.preset == 'distributed-training')", "stages is for gates at the end of a stage: set runs: Stage"),
    validation = ("!has(self.preset) || self.preset != 'distributed-training' || ((!has(self.runs) || self.runs == 'Stage') && (!has(self.nodes) || self.nodes >= 2))", "distributed-training runs at the end of a stage, on two nodes or more"),
    validation = ("!(has(self.runs) && self.runs == 'Stage') && !(has(self.preset) && self.preset == 'distributed-training') || !((has(self.before) && self.before) || (has(self.preset) && self.preset in ['ecc-errors', 'rdma-health']) || (has(self.bounds) && self.bounds.exists(b, has(b.maxIncrease) || has(b.maxDecrease))))", "a gate at the end of a stage has no sample from before the visit: let a gate that compares with one run on nodes"),
    validation = ("!has(self.before) || self.before || !((has(self.preset) && self.preset in ['ecc-errors', 'rdma-health']) || (has(self.bounds) && self.bounds.exists(b, has(b.maxIncrease) || has(b.maxDecrease))))", "this gate compares with a sample from before the visit: leave out before: false"),
)]
pub struct GateSpec {
    /// Its name, for people and in the names of its Jobs.
    #[schemars(length(max = 24))]
    #[x_kube(validation = ("self.matches('^[a-z0-9]([a-z0-9-]*[a-z0-9])?$')", "a gate's name must be lower-case letters, digits and dashes, at most 24, such as smoke-training"))]
    pub name: String,
    /// A check that pitcrew brings along.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preset: Option<Preset>,
    /// A check of your own: a pod template. Where it runs, restart policy and environment are added to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "pod_template")]
    pub template: Option<Value>,
    /// Another image for the preset, such as a copy in your own registry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 512))]
    pub image: Option<String>,
    /// On every node during its validation, or once when all nodes of a stage are done. Not set: on every node,
    /// but for distributed-training.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runs: Option<Runs>,
    /// On how many nodes of a stage, at the same time. Not set: one, and two for distributed-training.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 64))]
    pub nodes: Option<u32>,
    /// At the end of which stages, by their names. Empty: of each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub stages: Vec<String>,
    /// How many GPUs it asks for on each node. Not set: what the preset needs, none for a template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 64))]
    pub gpus: Option<u32>,
    /// What else its (first) container asks for. With a device in the limits, no GPU is added.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<GateResourcesSpec>,
    /// How long one try may take, from the moment when the node takes it up; at most a day.
    #[serde(default = "default_gate_timeout")]
    #[schemars(length(max = 20))]
    #[x_kube(validation = ("self.matches('^([0-9]{1,6}(d|h|m|s))+$') && self.matches('[1-9]')", "a gate's timeout must be a duration such as 10m, more than 0"))]
    pub timeout: String,
    /// How often it is tried again when it fails.
    #[serde(default = "default_gate_retries")]
    #[schemars(range(max = 5))]
    pub retries: u32,
    /// Whether it also runs before the driver is restarted, for bounds to compare with. Not set: if it has to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<bool>,
    /// What the numbers that it reports must be. A bound on a field that the preset bounds takes that one's place.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub bounds: Vec<BoundSpec>,
    /// How often it is repeated during a bake; `0s` is never. Not set: every hour if it needs no device, else never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 20))]
    #[x_kube(validation = ("self.matches('^([0-9]{1,6}(d|h|m|s))+$')", "repeatEvery must be a duration such as 6h, or 0s for never"))]
    pub repeat_every: Option<String>,
}

/// Checks that pitcrew brings along.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Preset {
    /// A small network learns on the GPU.
    SmokeTraining,
    /// A small network answers on the GPU as it does on the CPU.
    SmokeInference,
    /// The RDMA ports that were up before are up again.
    RdmaHealth,
    /// No more memory errors than before.
    EccErrors,
    /// All GPUs of the node talk to each other.
    MultiGpu,
    /// A small network learns on several nodes together.
    DistributedTraining,
    /// The node runs the driver that it should.
    DriverVersion,
}

/// When a gate runs.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema)]
pub enum Runs {
    /// On every node, during its validation.
    #[default]
    Node,
    /// Once, when all nodes of a stage are done.
    Stage,
}

/// What a gate's container asks for, as in a pod.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GateResourcesSpec {
    /// At most so much.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub limits: BTreeMap<String, IntOrString>,
    /// At least so much.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub requests: BTreeMap<String, IntOrString>,
}

/// What one number of a gate's JSON output must be.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = ("has(self.min) || has(self.max) || has(self.maxIncrease) || has(self.maxDecrease)", "a bound needs at least one of min, max, maxIncrease and maxDecrease"),
    validation = ("!has(self.min) || !has(self.max) || self.min <= self.max", "a bound's min must not be above its max"),
)]
pub struct BoundSpec {
    /// The number: a JSON pointer such as `/gpu/0/errors`, or names with dots such as `gpu.0.errors`.
    #[schemars(length(min = 1, max = 128))]
    pub field: String,
    /// At least.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min: Option<f64>,
    /// At most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<f64>,
    /// At most so much more than before the driver was restarted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = ("self >= 0.0", "maxIncrease must be 0 or more"))]
    pub max_increase: Option<f64>,
    /// At most so much less than before the driver was restarted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = ("self >= 0.0", "maxDecrease must be 0 or more"))]
    pub max_decrease: Option<f64>,
}

/// Any object: the API server judges it when the Job is made.
fn pod_template(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "object", "x-kubernetes-preserve-unknown-fields": true})
}

fn default_gate_timeout() -> String {
    "10m".to_owned()
}
fn default_gate_retries() -> u32 {
    1
}

impl Default for GateSpec {
    /// No check at all: for callers that name what they set.
    fn default() -> Self {
        Self {
            name: String::new(),
            preset: None,
            template: None,
            image: None,
            runs: None,
            nodes: None,
            stages: Vec::new(),
            gpus: None,
            resources: None,
            timeout: default_gate_timeout(),
            retries: default_gate_retries(),
            before: None,
            bounds: Vec::new(),
            repeat_every: None,
        }
    }
}

impl GateSpec {
    /// The preset, under its own name.
    pub fn preset(preset: Preset) -> Self {
        Self { name: preset.as_str().to_owned(), preset: Some(preset), ..Self::default() }
    }
}

impl Preset {
    /// Every preset, in the order in which the manual lists them.
    pub const ALL: [Preset; 7] = [
        Preset::SmokeTraining,
        Preset::SmokeInference,
        Preset::RdmaHealth,
        Preset::EccErrors,
        Preset::MultiGpu,
        Preset::DistributedTraining,
        Preset::DriverVersion,
    ];

    /// As policies name it.
    pub fn as_str(self) -> &'static str {
        match self {
            Preset::SmokeTraining => "smoke-training",
            Preset::SmokeInference => "smoke-inference",
            Preset::RdmaHealth => "rdma-health",
            Preset::EccErrors => "ecc-errors",
            Preset::MultiGpu => "multi-gpu",
            Preset::DistributedTraining => "distributed-training",
            Preset::DriverVersion => "driver-version",
        }
    }
}

#[cfg(test)]
mod tests {
    use kube::CustomResource;
    use kube::core::CustomResourceExt;

    use super::*;

    /// Gates on their own, as the API server would get them inside of a policy.
    #[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug)]
    #[kube(group = "pitcrew.dev", version = "v1", kind = "Gates")]
    struct GatesSpec {
        #[schemars(length(max = 16))]
        gates: Vec<GateSpec>,
    }

    #[test]
    fn the_schema_changes_only_on_purpose() {
        let crd = serde_json::to_value(Gates::crd()).unwrap();
        let spec = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/gates";
        insta::assert_json_snapshot!(crd.pointer(spec).unwrap());
    }

    #[test]
    fn every_list_and_every_text_that_a_rule_reads_has_a_largest_size() {
        let crd = serde_json::to_value(Gates::crd()).unwrap();
        let mut open = Vec::new();
        unlimited(
            &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"],
            "",
            &mut open,
        );
        assert!(open.is_empty(), "{open:?}");
    }

    fn unlimited(schema: &Value, path: &str, open: &mut Vec<String>) {
        let ruled = schema.get("x-kubernetes-validations").is_some();
        let named = schema.get("enum").is_some();
        if schema["type"] == "array" && schema.get("maxItems").is_none()
            || schema["type"] == "string" && ruled && !named && schema.get("maxLength").is_none()
        {
            open.push(path.to_owned());
        }
        for (name, inner) in schema["properties"].as_object().into_iter().flatten() {
            unlimited(inner, &format!("{path}.{name}"), open);
        }
        if schema["items"].is_object() {
            unlimited(&schema["items"], &format!("{path}[]"), open);
        }
    }

    #[test]
    fn presets_are_named_as_they_are_written() {
        for preset in Preset::ALL {
            assert_eq!(serde_json::to_value(preset).unwrap(), preset.as_str());
        }
    }
}
