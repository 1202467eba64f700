//! The Job of a gate: a preset's pod or the user's template, brought to the node under test and past its cordon.
//!
//! It goes there by node affinity, not by `nodeName`: so the scheduler still counts devices. Its pods carry our label,
//! since they may use the device and must not be taken for work that holds the node. What ends a try is the deadline of
//! its pod, which stays and tells; the Job's own deadline is later and only for pods that never got a place.

use jiff::SignedDuration;
use serde_json::{Value, json};

use super::preset::{self, Gpus, HOST, RANK0_PORT};
use super::{Check, Gate, GateRun, Resources, Sample};
use crate::contract::{
    GATE_LABEL, GATE_NODE_LABEL, GATE_RUN_ANNOTATION, GPU_RESOURCE, ROLLOUT_LABEL, UNSCHEDULABLE_TAINT,
};
use crate::names::{DriverName, NodeName};
use crate::version::DriverVersion;

/// What a pod may need to get a place, on top of its timeout: devices that are just becoming free, and the Job
/// controller's own wait before it tries again.
const START_ALLOWANCE: SignedDuration = SignedDuration::from_mins(2);
/// Long enough to look at a log, short enough that a fleet's finished pods do not pile up.
pub const KEPT: SignedDuration = SignedDuration::from_hours(1);

/// Taints by which Kubernetes itself says what a node cannot do.
const KUBERNETES_TAINTS: &str = "node.kubernetes.io/";

/// A node under test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place<'a> {
    /// Its name.
    pub node: &'a NodeName,
    /// How many GPUs it offers.
    pub gpus: u32,
    /// Its internal address: the first node's is where gates over several nodes meet.
    pub address: Option<&'a str>,
    /// Its taints, as the API has them.
    pub taints: &'a [Value],
}

/// What a Job is asked for.
#[derive(Clone, Debug)]
pub struct Order<'a> {
    /// Where the Job lives.
    pub namespace: &'a str,
    /// The driver under test.
    pub driver: &'a DriverName,
    /// The rollout.
    pub rollout: &'a str,
    /// The stage, for a gate at its end.
    pub stage: Option<&'a str>,
    /// The nodes under test, at least one.
    pub places: &'a [Place<'a>],
    /// Before or after the restart.
    pub sample: Sample,
    /// 1 for the first.
    pub attempt: u32,
    /// What is looked at: which driver of a node, or which round of a bake.
    pub subject: &'a str,
    /// How long the Job stays after its end.
    pub kept: SignedDuration,
    /// The driver version that they are moved to, where it is known …
    pub version: Option<&'a DriverVersion>,
    /// … and the one that they come from.
    pub previous: Option<&'a DriverVersion>,
}

impl Order<'_> {
    /// What is recorded on the Job.
    pub fn run(&self, gate: &Gate) -> GateRun {
        GateRun {
            gate: gate.name.clone(),
            rollout: self.rollout.to_owned(),
            stage: self.stage.map(str::to_owned),
            nodes: self.places.iter().map(|place| place.node.clone()).collect(),
            sample: self.sample,
            attempt: self.attempt,
            subject: self.subject.to_owned(),
        }
    }

    fn nodes(&self) -> Vec<&str> {
        self.places.iter().map(|place| place.node.as_str()).collect()
    }
}

/// The Job.
pub fn manifest(gate: &Gate, order: &Order<'_>) -> Value {
    let run = order.run(gate);
    let marks = json!({
        "labels": {
            GATE_LABEL: gate.name.as_str(),
            ROLLOUT_LABEL: run.rollout_label(),
            GATE_NODE_LABEL: run.nodes_label(),
        },
        "annotations": {GATE_RUN_ANNOTATION: record(&run)},
    });
    let mut job = json!({
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": marks,
        "spec": {
            "backoffLimit": gate.job_retries(),
            "activeDeadlineSeconds": job_deadline(gate).as_secs(),
            "ttlSecondsAfterFinished": order.kept.as_secs(),
            "completions": order.places.len(),
            "parallelism": order.places.len(),
            "template": pod_template(gate, order, &marks),
        },
    });
    job["metadata"]["name"] = json!(run.job_name());
    job["metadata"]["namespace"] = json!(order.namespace);
    job
}

/// Later than the last try's.
pub(super) fn job_deadline(gate: &Gate) -> SignedDuration {
    let tries = i32::try_from(gate.job_retries() + 1).unwrap_or(i32::MAX);
    (gate.timeout + START_ALLOWANCE).saturating_mul(tries)
}

fn record(run: &GateRun) -> Value {
    json!(serde_json::to_string(run).unwrap_or_default())
}

fn pod_template(gate: &Gate, order: &Order<'_>, marks: &Value) -> Value {
    let mut template = match &gate.check {
        Check::Preset { preset, image } => json!({"spec": preset::row(*preset).pod(image)}),
        Check::Template(template) => template.clone(),
    };
    for part in ["labels", "annotations"] {
        let ours = marks[part].as_object().cloned().unwrap_or_default();
        extend(&mut template["metadata"][part], ours);
    }
    let spec = &mut template["spec"];
    spec["restartPolicy"] = json!("Never");
    spec["activeDeadlineSeconds"] = json!(gate.timeout.as_secs());
    pin(&mut spec["affinity"]["nodeAffinity"], &order.nodes());
    if order.places.len() > 1 {
        keep_apart(&mut spec["affinity"]["podAntiAffinity"], &marks["labels"]);
    }
    append(&mut spec["tolerations"], tolerations(order));
    let gpus = gpus(gate, order);
    let environment = environment(order, gpus);
    for part in ["initContainers", "containers"] {
        // Only where there is one: an empty list is a change too.
        for container in spec.get_mut(part).and_then(Value::as_array_mut).into_iter().flatten() {
            // Ours come first, so that others can be made of them.
            let own = container["env"].as_array().cloned().unwrap_or_default();
            container["env"] = environment.iter().cloned().chain(own).collect();
            let policy = &mut container["terminationMessagePolicy"];
            if policy.is_null() {
                // The kubelet puts the end of a failing container's log into the pod's status.
                *policy = json!("FallbackToLogsOnError");
            }
        }
    }
    ask_for(&mut spec["containers"][0]["resources"], &gate.resources, gpus);
    template
}

/// The nodes under test are chosen already, so their pods pass the cordon and whatever keeps other work from them. A taint
/// of Kubernetes itself says that a node cannot run any pod.
fn tolerations(order: &Order<'_>) -> Vec<Value> {
    let mut all = vec![
        json!({"key": UNSCHEDULABLE_TAINT, "operator": "Exists", "effect": "NoSchedule"}),
        json!({"key": GPU_RESOURCE, "operator": "Exists"}),
    ];
    for taint in order.places.iter().flat_map(|place| place.taints) {
        let key = taint["key"].as_str().unwrap_or_default();
        let keeps_off = matches!(taint["effect"].as_str(), Some("NoSchedule" | "NoExecute"));
        let toleration = json!({"key": key, "operator": "Exists", "effect": taint["effect"]});
        let known = key.is_empty() || key == GPU_RESOURCE || key.starts_with(KUBERNETES_TAINTS);
        if keeps_off && !known && !all.contains(&toleration) {
            all.push(toleration);
        }
    }
    all
}

/// How many GPUs each pod asks for. A node that offers none right now is asked for one, and the pod waits for it.
fn gpus(gate: &Gate, order: &Order<'_>) -> u32 {
    let fewest = order.places.iter().map(|place| place.gpus).min();
    match gate.gpus {
        Gpus::None => 0,
        Gpus::Count(count) => count,
        Gpus::All => fewest.unwrap_or(0).max(1),
    }
}

fn ask_for(resources: &mut Value, wanted: &Resources, gpus: u32) {
    for (part, amounts) in [("limits", &wanted.limits), ("requests", &wanted.requests)] {
        if !amounts.is_empty() {
            let amounts = amounts.iter().map(|(name, amount)| (name.clone(), json!(amount)));
            extend(&mut resources[part], amounts);
        }
    }
    if gpus > 0 {
        extend(&mut resources["limits"], [(GPU_RESOURCE.to_owned(), json!(gpus.to_string()))]);
    }
}

/// Adds the nodes to the terms, any of which is enough for the scheduler. A field may be asked for one value only, so each
/// term is there once for each node.
fn pin(affinity: &mut Value, nodes: &[&str]) {
    let terms = &mut affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"];
    let own = terms.as_array().filter(|own| !own.is_empty()).cloned().unwrap_or_else(|| vec![json!({})]);
    let on = |term: &Value, node: &str| {
        let mut term = term.clone();
        let field = json!({"key": "metadata.name", "operator": "In", "values": [node]});
        append(&mut term["matchFields"], [field]);
        term
    };
    *terms = own.iter().flat_map(|term| nodes.iter().map(move |node| on(term, node))).collect();
}

/// One pod on each node.
fn keep_apart(affinity: &mut Value, labels: &Value) {
    let term = json!({
        "labelSelector": {"matchLabels": labels},
        "topologyKey": "kubernetes.io/hostname",
    });
    append(&mut affinity["requiredDuringSchedulingIgnoredDuringExecution"], [term]);
}

fn environment(order: &Order<'_>, gpus: u32) -> Vec<Value> {
    let version = |version: Option<&DriverVersion>| version.map(ToString::to_string).unwrap_or_default();
    let first = order.places.first().and_then(|place| place.address).unwrap_or_default();
    let texts = [
        ("PITCREW_NODES", order.nodes().join(",")),
        ("PITCREW_DRIVER", order.driver.to_string()),
        ("PITCREW_ROLLOUT", order.rollout.to_owned()),
        ("PITCREW_TARGET_VERSION", version(order.version)),
        ("PITCREW_PREVIOUS_VERSION", version(order.previous)),
        ("PITCREW_SAMPLE", format!("{:?}", order.sample)),
        ("PITCREW_GPUS", gpus.to_string()),
        ("PITCREW_RANK0_ADDRESS", first.to_owned()),
        ("PITCREW_RANK0_PORT", RANK0_PORT.to_string()),
        ("PITCREW_HOST", HOST.to_owned()),
        ("PITCREW_OUTPUT", "/dev/termination-log".to_owned()),
    ];
    // Pods of one Job share one template: which node it is, each learns from the kubelet.
    let node = json!({"name": "PITCREW_NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}});
    let texts = texts.into_iter().map(|(name, value)| json!({"name": name, "value": value}));
    [node].into_iter().chain(texts).collect()
}

/// Adds to an object, which may not be there yet.
fn extend(object: &mut Value, more: impl IntoIterator<Item = (String, Value)>) {
    if object.is_null() {
        *object = json!({});
    }
    if let Some(object) = object.as_object_mut() {
        object.extend(more);
    }
}

/// Adds to a list, which may not be there yet.
fn append(list: &mut Value, more: impl IntoIterator<Item = Value>) {
    if list.is_null() {
        *list = json!([]);
    }
    if let Some(list) = list.as_array_mut() {
        list.extend(more);
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::batch::v1::Job;

    use super::*;
    use crate::api::{GateResourcesSpec, GateSpec, Preset};

    fn order<'a>(driver: &'a DriverName, places: &'a [Place<'a>]) -> Order<'a> {
        Order {
            namespace: "gpu-operator",
            driver,
            rollout: "gpu-7",
            stage: None,
            places,
            sample: Sample::After,
            attempt: 1,
            subject: "7d9f",
            kept: KEPT,
            version: None,
            previous: None,
        }
    }

    fn job(spec: &GateSpec, nodes: &[&str]) -> Value {
        let nodes: Vec<NodeName> = nodes.iter().map(|node| NodeName::from(*node)).collect();
        let place = |node| Place { node, gpus: 8, address: Some("10.0.0.1"), taints: &[] };
        let places: Vec<_> = nodes.iter().map(place).collect();
        let (version, previous) = ("565.57.01".parse().unwrap(), "535.104.05".parse().unwrap());
        let driver = "gpu".into();
        let order = Order { version: Some(&version), previous: Some(&previous), ..order(&driver, &places) };
        manifest(&Gate::read(spec).unwrap(), &order)
    }

    #[test]
    fn the_jobs_of_presets_change_only_on_purpose() {
        for (preset, nodes) in
            [(Preset::EccErrors, &["gpu-01"][..]), (Preset::DistributedTraining, &["gpu-01", "gpu-02"][..])]
        {
            let mut job = job(&GateSpec::preset(preset), nodes);
            // The programs have their own files and tests.
            let container = &mut job["spec"]["template"]["spec"]["containers"][0];
            container["command"][2] = json!("[the script]");
            for variable in container["env"].as_array_mut().unwrap() {
                if variable["name"] == "PITCREW_SCRIPT" {
                    variable["value"] = json!("[the program]");
                }
            }
            insta::assert_json_snapshot!(preset.as_str(), job);
        }
    }

    #[test]
    fn every_job_is_one_that_kubernetes_reads() {
        for preset in Preset::ALL {
            let job: Job = serde_json::from_value(job(&GateSpec::preset(preset), &["gpu-01"])).unwrap();
            let (pod, spec) = (job.spec.as_ref().unwrap().template.clone(), job.spec.unwrap());
            let pod = pod.spec.unwrap();
            assert_eq!(pod.node_name, None);
            assert_eq!(pod.restart_policy.as_deref(), Some("Never"));
            assert!(spec.active_deadline_seconds > pod.active_deadline_seconds, "{preset:?}");
            let policy = pod.containers[0].termination_message_policy.as_deref();
            assert_eq!(policy, Some("FallbackToLogsOnError"));
        }
    }

    #[test]
    fn a_template_keeps_what_is_its_own() {
        let term = json!({"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]});
        let required = json!({"nodeSelectorTerms": [term]});
        let template = json!({
            "metadata": {"labels": {"team": "ml"}},
            "spec": {
                "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}},
                "tolerations": [{"key": "team", "operator": "Exists"}],
                "restartPolicy": "OnFailure",
                "containers": [
                    {"name": "a", "image": "a:1", "env": [{"name": "A", "value": "1"}],
                     "terminationMessagePolicy": "File", "resources": {"requests": {"cpu": "1"}}},
                    {"name": "b", "image": "b:1"},
                ],
            },
        });
        let memory = [("memory".to_owned(), "1Gi".to_owned())];
        let memory = memory.map(|(name, amount)| {
            (name, k8s_openapi::apimachinery::pkg::util::intstr::IntOrString::String(amount))
        });
        let resources = GateResourcesSpec { limits: memory.into(), ..GateResourcesSpec::default() };
        let spec = GateSpec {
            name: "own".into(),
            template: Some(template),
            gpus: Some(2),
            resources: Some(resources),
            ..GateSpec::default()
        };
        let job = job(&spec, &["gpu-01"]);
        let pod = &job["spec"]["template"];
        assert_eq!(pod["metadata"]["labels"]["team"], "ml");
        assert_eq!(pod["metadata"]["labels"][GATE_LABEL], "own");
        let spec = &pod["spec"];
        assert_eq!(spec["restartPolicy"], "Never");
        let term = &spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
            [0];
        assert_eq!(term["matchExpressions"][0]["key"], "zone");
        assert_eq!(term["matchFields"][0]["values"], json!(["gpu-01"]));
        assert_eq!(spec["tolerations"].as_array().unwrap().len(), 3);
        let [first, second] = [0, 1].map(|index| &spec["containers"][index]);
        assert_eq!(first["terminationMessagePolicy"], "File");
        assert_eq!(first["env"].as_array().unwrap().last(), Some(&json!({"name": "A", "value": "1"})));
        let wanted = json!({"requests": {"cpu": "1"}, "limits": {"memory": "1Gi", GPU_RESOURCE: "2"}});
        assert_eq!(first["resources"], wanted);
        assert_eq!(second["terminationMessagePolicy"], "FallbackToLogsOnError");
        assert_eq!(second["env"][0]["name"], "PITCREW_NODE");
        assert!(second.get("resources").is_none() && spec.get("initContainers").is_none());
    }

    #[test]
    fn of_several_nodes_each_has_terms_of_its_own() {
        let zones = ["a", "b"]
            .map(|zone| json!({"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]}));
        let mut affinity =
            json!({"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": zones}});
        pin(&mut affinity, &["gpu-01", "gpu-02"]);
        let terms = &affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"];
        let told = |term: &Value| {
            let [field] = term["matchFields"].as_array().unwrap().as_slice() else { panic!("{term}") };
            // The API server takes no more than one.
            let [node] = field["values"].as_array().unwrap().as_slice() else { panic!("{term}") };
            format!("{}{}", term["matchExpressions"][0]["values"][0], node).replace('"', "")
        };
        let told: Vec<String> = terms.as_array().unwrap().iter().map(told).collect();
        assert_eq!(told, ["agpu-01", "agpu-02", "bgpu-01", "bgpu-02"]);
    }

    #[test]
    fn its_pods_pass_what_keeps_other_work_from_their_nodes() {
        let (driver, node) = ("gpu".into(), NodeName::from("gpu-01"));
        let taint = |key: &str, effect: &str| json!({"key": key, "value": "x", "effect": effect});
        let taints = [
            taint("sku", "NoSchedule"),
            taint("later", "PreferNoSchedule"),
            taint("node.kubernetes.io/unreachable", "NoExecute"),
        ];
        let places = [Place { node: &node, gpus: 8, address: None, taints: &taints }];
        let job = manifest(
            &Gate::read(&GateSpec::preset(Preset::SmokeTraining)).unwrap(),
            &order(&driver, &places),
        );
        let tolerations = job["spec"]["template"]["spec"]["tolerations"].as_array().unwrap().clone();
        let keys: Vec<&str> =
            tolerations.iter().filter_map(|toleration| toleration["key"].as_str()).collect();
        assert_eq!(keys, ["node.kubernetes.io/unschedulable", "nvidia.com/gpu", "sku"]);
    }

    #[test]
    fn all_gpus_are_those_that_every_node_has() {
        let (driver, nodes) = ("gpu".into(), ["gpu-01", "gpu-02"].map(NodeName::from));
        let gpus = |counts: [u32; 2]| {
            let place = |(node, gpus)| Place { node, gpus, address: None, taints: &[] };
            let places: Vec<_> = nodes.iter().zip(counts).map(place).collect();
            let gate = Gate::read(&GateSpec::preset(Preset::DistributedTraining)).unwrap();
            let job = manifest(&gate, &order(&driver, &places));
            job["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"][GPU_RESOURCE].clone()
        };
        assert_eq!(gpus([8, 8]), "8");
        assert_eq!(gpus([8, 7]), "7");
        assert_eq!(gpus([8, 0]), "1");
    }
}
