//! Gates: checks that run as Jobs on the node under test. Policy in, a Job out; the Job's facts in, a verdict out.
//!
//! ```text
//!   GateSpec ──▶ Gate::read ──▶ Gate ──▶ manifest() ──▶ the Job
//!                                 │                        │ watched
//!                                 └──▶ verdict() ◀── GateJob (what its conditions and its pods tell)
//! ```
//!
//! | file | the one thing in it |
//! |---|---|
//! | `preset.rs` | the checks that pitcrew brings along: one table |
//! | `run.rs` | what a Job is for: recorded on it, and its name |
//! | `manifest.rs` | the Job |
//! | `facts.rs` | what a Job and its pods tell |
//! | `bound.rs` | numbers, and what they must be |
//! | `verdict.rs` | passed, failed, or not to be judged |
//!
//! When a gate runs and what its verdict does to a node is the planner's to say, not said here.

mod bound;
mod facts;
mod manifest;
mod preset;
mod run;
mod verdict;

use std::collections::{BTreeMap, BTreeSet};

use jiff::SignedDuration;
use k8s_openapi::api::core::v1::PodTemplateSpec;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde_json::Value;

pub use bound::{Bound, Missed, Numbers};
pub use facts::{GateJob, GatePod, JobEnd, JobFacts, Obstacle, Outcome, PODS_LAG, PodState};
pub use manifest::{KEPT, Order, Place, manifest};
pub use preset::{Gpus, PRESETS, PresetRow};
pub use run::{GateRun, Sample};
pub use verdict::{LOG_TAIL_BYTES, Verdict, Why, judge, verdict};

use crate::api::{GateResourcesSpec, GateSpec, Preset, Runs};
use crate::contract::GATE_LABEL;
use crate::names::GateName;
use crate::policy::{Problem, duration, problem};
use crate::selector::Labels;

/// A gate says by this exit code that it cannot judge (`EX_TEMPFAIL`).
pub const CANNOT_JUDGE_EXIT: i32 = 75;
/// A pod's deadline is a 32-bit number of seconds, and a node that is out for longer than a day is out for good.
const TIMEOUT_MAX: SignedDuration = SignedDuration::from_hours(24);
/// More often than that, a gate would be at work more than at rest.
const REPEAT_MIN: SignedDuration = SignedDuration::from_mins(5);
/// Often enough to find a fault within a shift, rare enough for a fleet: 24 Jobs per node and day.
const REPEAT_DEFAULT: SignedDuration = SignedDuration::from_hours(1);
/// Nodes of a gate that is called distributed and does not say how many.
const DISTRIBUTED_NODES: u32 = 2;

/// A gate with every value known.
#[derive(Clone, Debug, PartialEq)]
pub struct Gate {
    /// Its name.
    pub name: GateName,
    /// What runs.
    pub check: Check,
    /// On how many nodes at the end of a stage; `None`: on every node, during its validation.
    pub stage_nodes: Option<u32>,
    /// At the end of which stages, by their names. Empty: of each.
    pub stages: Vec<String>,
    /// How many GPUs it asks for on each node.
    pub gpus: Gpus,
    /// What else its first container asks for.
    pub resources: Resources,
    /// How long one try may take, from the moment when the node takes it up.
    pub timeout: SignedDuration,
    /// How often it is tried again when it fails.
    pub retries: u32,
    /// It also runs before the driver is restarted.
    pub before: bool,
    /// What its numbers must be.
    pub bounds: Vec<Bound>,
    /// How often it is repeated during a bake; `None`: never.
    pub repeat: Option<SignedDuration>,
}

/// What runs.
#[derive(Clone, Debug, PartialEq)]
pub enum Check {
    /// A check that pitcrew brings along.
    Preset {
        /// Which.
        preset: Preset,
        /// In which image.
        image: String,
    },
    /// The user's own pod template.
    Template(Value),
}

/// Quantities by resource name, as in a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    /// At most so much.
    pub limits: BTreeMap<String, String>,
    /// At least so much.
    pub requests: BTreeMap<String, String>,
}

/// Whether a pod with these labels is a gate's. It may use the device, and holds no node: it is ours.
pub fn is_gate_pod(labels: &Labels) -> bool {
    labels.contains_key(GATE_LABEL)
}

impl Gate {
    /// Reads what a policy states. Admission has refused most of what is refused here, but not what is in a template.
    pub fn read(spec: &GateSpec) -> Result<Self, Problem> {
        let field = |name: &str| format!("gates[{}].{name}", spec.name);
        if !is_name(&spec.name) {
            let what = "a gate's name must be lower-case letters, digits and dashes, at most 24";
            return Err(problem(what, field("name")));
        }
        let check = read_check(spec, &field)?;
        let row = spec.preset.map(preset::row);
        let stage_nodes = read_nodes(spec, &field)?;
        if stage_nodes.is_none() && !spec.stages.is_empty() {
            return Err(problem("stages is for gates with runs: Stage", field("stages")));
        }
        let bounds = bound::read(&spec.bounds, row.map_or(&[], |row| row.bounds), &field("bounds"))?;
        let compares = bounds.iter().any(Bound::compares);
        let before = spec.before.unwrap_or(compares);
        if compares && (!before || stage_nodes.is_some()) {
            let what = "it compares with a sample from before the visit, which this gate does not take";
            let name = if before { "runs" } else { "before" };
            return Err(problem(what, field(name)));
        }
        let resources = read_resources(spec.resources.as_ref(), &field)?;
        let gpus = match (spec.gpus, row) {
            (Some(0), _) | (None, None) => Gpus::None,
            (Some(count), _) => Gpus::Count(count),
            (None, Some(_)) if resources.has_devices() => Gpus::None,
            (None, Some(row)) => row.gpus,
        };
        let timeout = duration(&spec.timeout, &field("timeout"))?.min(TIMEOUT_MAX);
        if timeout.is_zero() {
            return Err(problem("0 is no timeout: how long may one try take?", field("timeout")));
        }
        let asked = spec.repeat_every.as_ref();
        let asked = asked.map(|text| duration(text, &field("repeatEvery"))).transpose()?;
        let mut gate = Self {
            name: spec.name.as_str().into(),
            check,
            stage_nodes,
            stages: spec.stages.clone(),
            gpus,
            resources,
            timeout,
            retries: spec.retries,
            before: before && stage_nodes.is_none(),
            bounds,
            repeat: None,
        };
        gate.repeat = match asked {
            Some(every) => (!every.is_zero()).then(|| every.max(REPEAT_MIN)),
            None => (!gate.needs_device()).then_some(REPEAT_DEFAULT),
        };
        Ok(gate)
    }

    /// All gates of a policy. Their names tell them apart, in results and in the names of Jobs.
    pub fn read_all(specs: &[GateSpec]) -> Result<Vec<Self>, Problem> {
        let mut names = BTreeSet::new();
        if let Some(twice) = specs.iter().find(|spec| !names.insert(spec.name.as_str())) {
            let what = format!("two gates are called {}", twice.name);
            return Err(problem(what, format!("gates[{}].name", twice.name)));
        }
        specs.iter().map(Self::read).collect()
    }

    /// It waits until a device of its node is free. Only gates that do not are repeated during a bake unasked.
    pub fn needs_device(&self) -> bool {
        let in_template = match &self.check {
            Check::Template(template) => asks_for_device(template),
            Check::Preset { .. } => false,
        };
        self.gpus != Gpus::None || self.resources.has_devices() || in_template
    }

    /// It runs on every node, during its validation.
    pub fn is_for_nodes(&self) -> bool {
        self.stage_nodes.is_none()
    }

    /// It runs at the end of this stage, on so many nodes.
    pub fn at_end_of(&self, stage: &str) -> Option<u32> {
        let named = self.stages.is_empty() || self.stages.iter().any(|name| name == stage);
        self.stage_nodes.filter(|_| named)
    }

    /// After that, one Job of it is over, whatever comes.
    pub fn longest(&self) -> SignedDuration {
        manifest::job_deadline(self).saturating_add(PODS_LAG)
    }

    /// The same without what it compares, for a node of which nothing is known from before.
    #[must_use]
    pub fn without_comparison(&self) -> Self {
        let alone = |bound: &Bound| Bound { max_increase: None, max_decrease: None, ..bound.clone() };
        Self { bounds: self.bounds.iter().map(alone).collect(), ..self.clone() }
    }

    /// Those numbers that are compared later.
    pub fn compared(&self, mut numbers: Numbers) -> Numbers {
        let compares = |field: &str| self.bounds.iter().any(|bound| bound.compares() && bound.field == field);
        numbers.retain(|field, _| compares(field));
        numbers
    }

    /// How often a Job of it may be made for one purpose, not counting those that could not be judged. Pods that wait
    /// for each other cannot be tried again one by one, so a gate over several nodes is tried again as a whole.
    pub fn attempts(&self) -> u32 {
        if self.is_joint() { self.retries + 1 } else { 1 }
    }

    /// How often the Job itself tries again.
    fn job_retries(&self) -> u32 {
        if self.is_joint() { 0 } else { self.retries }
    }

    fn is_joint(&self) -> bool {
        self.stage_nodes.is_some_and(|nodes| nodes > 1)
    }
}

impl Resources {
    /// A device is among them: extended resources have a domain in their names.
    fn has_devices(&self) -> bool {
        self.limits.keys().chain(self.requests.keys()).any(|name| name.contains('/'))
    }
}

/// As Job names and labels allow it, with room for what is added.
fn is_name(name: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=24).contains(&name.len())
        && name.bytes().all(inner)
        && !name.starts_with('-')
        && !name.ends_with('-')
}

fn read_check(spec: &GateSpec, field: &impl Fn(&str) -> String) -> Result<Check, Problem> {
    match (spec.preset, &spec.template) {
        (Some(preset), None) => {
            let image = spec.image.clone().unwrap_or_else(|| preset::row(preset).image.to_owned());
            Ok(Check::Preset { preset, image })
        }
        (None, Some(_)) if spec.image.is_some() => {
            Err(problem("image is for presets: a template names its own images", field("image")))
        }
        (None, Some(template)) => read_template(template, field),
        _ => Err(problem("set exactly one of preset and template", field("preset"))),
    }
}

fn read_template(template: &Value, field: &impl Fn(&str) -> String) -> Result<Check, Problem> {
    let read: PodTemplateSpec = serde_json::from_value(template.clone())
        .map_err(|error| problem(format!("it is no pod template: {error}"), field("template")))?;
    let spec = read.spec.unwrap_or_default();
    if spec.containers.is_empty() {
        return Err(problem(
            "a pod template needs at least one container",
            field("template.spec.containers"),
        ));
    }
    if spec.node_name.is_some() {
        let what = "leave out nodeName: the gate is brought to the node under test, past its cordon";
        return Err(problem(what, field("template.spec.nodeName")));
    }
    Ok(Check::Template(template.clone()))
}

fn read_nodes(spec: &GateSpec, field: &impl Fn(&str) -> String) -> Result<Option<u32>, Problem> {
    let distributed = spec.preset == Some(Preset::DistributedTraining);
    let runs = spec.runs.unwrap_or(if distributed { Runs::Stage } else { Runs::Node });
    match (runs, spec.nodes) {
        (Runs::Node, _) if distributed => {
            Err(problem("distributed-training runs at the end of a stage", field("runs")))
        }
        (Runs::Node, None | Some(1)) => Ok(None),
        (Runs::Node, Some(_)) => Err(problem("several nodes are for gates with runs: Stage", field("nodes"))),
        (Runs::Stage, Some(nodes)) if nodes < if distributed { DISTRIBUTED_NODES } else { 1 } => {
            Err(problem(format!("{nodes} nodes are too few"), field("nodes")))
        }
        (Runs::Stage, nodes) => Ok(Some(nodes.unwrap_or(if distributed { DISTRIBUTED_NODES } else { 1 }))),
    }
}

fn read_resources(
    spec: Option<&GateResourcesSpec>,
    field: &impl Fn(&str) -> String,
) -> Result<Resources, Problem> {
    let read = |amounts: &BTreeMap<String, IntOrString>, part: &str| {
        let one = |(name, amount): (&String, &IntOrString)| {
            let text = match amount {
                IntOrString::Int(number) => number.to_string(),
                IntOrString::String(text) => text.clone(),
            };
            if !is_quantity(&text) {
                let what = format!("\"{text}\" is not an amount such as 2, 500m or 16Gi");
                return Err(problem(what, field(&format!("resources.{part}.{name}"))));
            }
            Ok((name.clone(), text))
        };
        amounts.iter().map(one).collect::<Result<BTreeMap<_, _>, _>>()
    };
    let Some(spec) = spec else { return Ok(Resources::default()) };
    Ok(Resources { limits: read(&spec.limits, "limits")?, requests: read(&spec.requests, "requests")? })
}

/// Digits, perhaps with a point, and a unit.
fn is_quantity(text: &str) -> bool {
    const UNITS: [&str; 14] = ["", "m", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    let end = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    number.parse::<f64>().is_ok() && UNITS.contains(&unit)
}

/// Any container of a pod template asks for an extended resource, or the pod claims a device.
fn asks_for_device(template: &Value) -> bool {
    let named = |resources: &Value| {
        let parts = ["limits", "requests"].iter().filter_map(|part| resources[*part].as_object());
        parts.flat_map(serde_json::Map::keys).any(|name| name.contains('/'))
    };
    let spec = &template["spec"];
    let containers = ["containers", "initContainers"].iter().filter_map(|list| spec[*list].as_array());
    let claims = spec["resourceClaims"].as_array().is_some_and(|claims| !claims.is_empty());
    claims || containers.flatten().any(|container| named(&container["resources"]))
}

#[cfg(test)]
#[expect(clippy::needless_pass_by_value, reason = "stories read better without ampersands")]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::api::BoundSpec;

    fn template(spec: Value) -> GateSpec {
        let mut pod = json!({"containers": [{"name": "check", "image": "example/check:1"}]});
        pod.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
        GateSpec { name: "own".into(), template: Some(json!({"spec": pod})), ..GateSpec::default() }
    }

    #[test]
    fn every_preset_is_ready_to_use() {
        for preset in Preset::ALL {
            let gate = Gate::read(&GateSpec::preset(preset)).unwrap();
            assert_eq!(gate.timeout, SignedDuration::from_mins(10), "{preset:?}");
            assert_eq!(gate.before, gate.bounds.iter().any(Bound::compares), "{preset:?}");
        }
    }

    #[test]
    fn only_gates_that_need_no_device_repeat_unasked() {
        let repeat = |spec: GateSpec| Gate::read(&spec).unwrap().repeat;
        assert_eq!(repeat(GateSpec::preset(Preset::EccErrors)), Some(REPEAT_DEFAULT));
        assert_eq!(repeat(GateSpec::preset(Preset::SmokeTraining)), None);
        let asked = |every: &str| GateSpec {
            repeat_every: Some(every.into()),
            ..GateSpec::preset(Preset::SmokeTraining)
        };
        assert_eq!(repeat(asked("6h")), Some(SignedDuration::from_hours(6)));
        assert_eq!(repeat(asked("1s")), Some(REPEAT_MIN));
        assert_eq!(repeat(asked("0s")), None);
        assert_eq!(repeat(template(json!({}))), Some(REPEAT_DEFAULT));
        assert_eq!(repeat(template(json!({"resourceClaims": [{"name": "gpu"}]}))), None);
        let limits = json!([{"name": "a", "resources": {"limits": {"nvidia.com/mig-1g.10gb": 1}}}]);
        assert_eq!(repeat(template(json!({"initContainers": limits}))), None);
    }

    #[test]
    fn devices_in_the_resources_take_the_place_of_the_presets_gpus() {
        let slice = BTreeMap::from([("nvidia.com/mig-1g.10gb".to_owned(), IntOrString::Int(1))]);
        let resources = GateResourcesSpec { limits: slice, ..GateResourcesSpec::default() };
        let spec = GateSpec { resources: Some(resources), ..GateSpec::preset(Preset::SmokeTraining) };
        let gate = Gate::read(&spec).unwrap();
        assert_eq!(gate.gpus, Gpus::None);
        assert!(gate.needs_device());
    }

    #[test]
    fn a_gate_over_several_nodes_is_tried_again_as_a_whole() {
        let gate = Gate::read(&GateSpec::preset(Preset::DistributedTraining)).unwrap();
        assert_eq!((gate.stage_nodes, gate.job_retries(), gate.attempts()), (Some(2), 0, 2));
        let gate = Gate::read(&GateSpec::preset(Preset::DriverVersion)).unwrap();
        assert_eq!((gate.stage_nodes, gate.job_retries(), gate.attempts()), (None, 1, 1));
    }

    #[test]
    fn what_cannot_be_followed_is_refused_with_the_field_to_mend() {
        let preset = |preset| GateSpec::preset(preset);
        let bound = |field: &str| BoundSpec { field: field.into(), max: Some(1.0), ..BoundSpec::default() };
        let compare = BoundSpec { max: None, max_increase: Some(0.0), ..bound("errors") };
        let amount = BTreeMap::from([("cpu".to_owned(), IntOrString::String("many".into()))]);
        let amounts = GateResourcesSpec { limits: amount, ..GateResourcesSpec::default() };
        let cases = [
            (GateSpec { name: "Own".into(), ..template(json!({})) }, "name"),
            (GateSpec { name: "x".repeat(25), ..template(json!({})) }, "name"),
            (GateSpec { name: "none".into(), ..GateSpec::default() }, "preset"),
            (GateSpec { preset: Some(Preset::MultiGpu), ..template(json!({})) }, "preset"),
            (GateSpec { image: Some("example/a".into()), ..template(json!({})) }, "image"),
            (template(json!({"containers": []})), "template.spec.containers"),
            (template(json!({"affinity": "here"})), "template"),
            (template(json!({"nodeName": "gpu-01"})), "template.spec.nodeName"),
            (GateSpec { nodes: Some(2), ..preset(Preset::SmokeTraining) }, "nodes"),
            (GateSpec { nodes: Some(1), ..preset(Preset::DistributedTraining) }, "nodes"),
            (GateSpec { runs: Some(Runs::Node), ..preset(Preset::DistributedTraining) }, "runs"),
            (GateSpec { stages: vec!["canary".into()], ..preset(Preset::EccErrors) }, "stages"),
            (GateSpec { runs: Some(Runs::Stage), ..preset(Preset::EccErrors) }, "runs"),
            (GateSpec { before: Some(false), ..preset(Preset::EccErrors) }, "before"),
            (GateSpec { before: Some(false), bounds: vec![compare], ..template(json!({})) }, "before"),
            (
                GateSpec { bounds: vec![BoundSpec { max: None, ..bound("a") }], ..template(json!({})) },
                "bounds",
            ),
            (GateSpec { bounds: vec![bound("")], ..template(json!({})) }, "bounds"),
            (GateSpec { timeout: "soon".into(), ..template(json!({})) }, "timeout"),
            (GateSpec { timeout: "0s".into(), ..template(json!({})) }, "timeout"),
            (GateSpec { resources: Some(amounts), ..template(json!({})) }, "resources.limits.cpu"),
        ];
        for (spec, field) in cases {
            let found = Gate::read(&spec).unwrap_err();
            assert_eq!(found.field, format!("gates[{}].{field}", spec.name), "{found}");
        }
        let twice = [preset(Preset::EccErrors), preset(Preset::EccErrors)];
        assert_eq!(Gate::read_all(&twice).unwrap_err().what, "two gates are called ecc-errors");
    }
}
