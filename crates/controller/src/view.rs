//! How API objects become facts. What cannot be read is told by name and left out; it never stops the others.

use k8s_openapi::api::apps::v1::DaemonSet as ApiDaemonSet;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::core::{DynamicObject, Selector};
use pitcrew_core::api::{ClusterPolicy, Rollout as ApiRollout};
use pitcrew_core::clients::{ClientKind, fnv};
use pitcrew_core::contract::{
    ARGO_INSTANCE_LABEL, ARGO_TRACKING_ANNOTATION, CHECKPOINT_REQUESTED_ANNOTATION, CHECKPOINTED_ANNOTATION,
    CONFIG_DIGEST_ENV, FLUX_NAME_LABELS, REVISION_LABEL, TIMEOUT_ACTION_ANNOTATION, nvsentinel,
};
use pitcrew_core::matrix::{Files, Release};
use pitcrew_core::names::{NodeName, ObjectName, ResourceVersion, Uid};
use pitcrew_core::policy::{ClusterPolicyFacts, Source};
use pitcrew_core::selector::Labels;
use pitcrew_core::snapshot::{
    Budget, Claim, Condition, DaemonSet, Node, NvSentinel, Owner, OwnerKind, Phase, Pod, Rollout, Slice,
    TemplateRevision, Trouble,
};
use pitcrew_core::version::DriverVersion;
use serde_json::Value;

use crate::wire;

const MIRROR_ANNOTATION: &str = "kubernetes.io/config.mirror";

/// An object without the identity that the API gives to every object.
#[derive(Debug, thiserror::Error)]
#[error("an object came without {0}")]
pub(crate) struct Incomplete(&'static str);

/// Name, UID and version of any object.
pub(crate) struct Identity {
    pub(crate) name: String,
    pub(crate) namespace: String,
    pub(crate) uid: Uid,
    pub(crate) version: ResourceVersion,
}

pub(crate) fn identity(meta: &ObjectMeta) -> Result<Identity, Incomplete> {
    let version = meta.resource_version.as_deref().and_then(ResourceVersion::parse);
    Ok(Identity {
        name: meta.name.clone().ok_or(Incomplete("a name"))?,
        namespace: meta.namespace.clone().unwrap_or_default(),
        uid: meta.uid.as_deref().map(Uid::from).ok_or(Incomplete("a uid"))?,
        version: version.ok_or(Incomplete("a resourceVersion"))?,
    })
}

fn object_name(meta: &ObjectMeta) -> ObjectName {
    ObjectName::new(meta.namespace.as_deref().unwrap_or_default(), meta.name.as_deref().unwrap_or_default())
}

pub(crate) fn node(object: wire::Node) -> Result<(NodeName, Node), Incomplete> {
    let Identity { name, uid, version, .. } = identity(&object.metadata)?;
    let (labels, annotations) = (object.metadata.labels, object.metadata.annotations);
    let mut node = Node::new(uid, version, labels.unwrap_or_default(), annotations.unwrap_or_default());
    node.unschedulable = object.spec.unschedulable;
    node.ready = is_true(&object.status.conditions, "Ready");
    let repaired = [nvsentinel::REMEDIATION_TAINT, nvsentinel::REMEDIATION_TAINT_TOO];
    let repairs = |taint: &Value| taint["key"].as_str().is_some_and(|key| repaired.contains(&key));
    node.remediated = object.spec.taints.iter().any(repairs);
    node.taints = object.spec.taints;
    node.allocatable = extended(object.status.allocatable.iter());
    let addresses = &object.status.addresses;
    let internal = addresses.iter().find(|address| address.kind == "InternalIP");
    node.address = internal.map(|address| address.address.as_str().into());
    node.boot_id = object.status.node_info.boot_id.as_str().into();
    node.conditions =
        object.status.conditions.iter().filter(|c| !is_kubelets(&c.kind)).map(condition).collect();
    Ok((name.into(), node))
}

/// Conditions that the kubelet and the network set: their heartbeats would be news all the time.
fn is_kubelets(kind: &str) -> bool {
    matches!(kind, "Ready" | "MemoryPressure" | "DiskPressure" | "PIDPressure" | "NetworkUnavailable")
}

fn condition(condition: &wire::Condition) -> Condition {
    Condition {
        kind: condition.kind.as_str().into(),
        holds: condition.status == "True",
        heartbeat: condition.last_heartbeat_time.as_ref().map(|time| time.0),
    }
}

/// NVSentinel's circuit breaker.
pub(crate) fn nvsentinel(breaker: &ConfigMap) -> NvSentinel {
    let status = breaker.data.as_ref().and_then(|data| data.get("status"));
    NvSentinel { tripped: status.is_some_and(|status| status == nvsentinel::TRIPPED) }
}

/// The version matrices in our ConfigMap.
pub(crate) fn matrices(object: &ConfigMap) -> Files {
    let files = object.data.iter().flatten();
    Files::read(files.map(|(key, text)| (key.as_str(), text.as_str())))
}

/// The version that an operator's Deployment is labelled with: by its chart, or by OLM with the bundle it came from.
pub(crate) fn operator_version(labels: Option<&Labels>) -> Option<Release> {
    let label = |key: &str| labels.and_then(|labels| labels.get(key));
    let bundle = label("olm.owner").and_then(|name| Release::from_bundle(name));
    bundle.or_else(|| label("app.kubernetes.io/version").map(|version| Release::new(version)))
}

pub(crate) fn pod(object: wire::Pod) -> Result<Pod, Incomplete> {
    let wire::Pod { mut metadata, spec, status } = object;
    let Identity { uid, version, .. } = identity(&metadata)?;
    let annotations = metadata.annotations.take().unwrap_or_default();
    let annotation = |key: &str| annotations.get(key).map(String::as_str);
    let owner = controller(metadata.owner_references.as_deref()).map(owner);
    let labels = metadata.labels.take().unwrap_or_default();
    let first = spec.containers.first().map(|c| c.name.as_str()).unwrap_or_default();
    let main = status.container_statuses.iter().find(|container| container.name == first);
    let ready = condition_of(&status.conditions, "Ready").filter(|c| c.status == "True");
    Ok(Pod {
        name: object_name(&metadata),
        uid,
        version,
        node: meant_for(&metadata, &spec).into(),
        client: owner.as_ref().and_then(|owner| client(&labels, owner, &spec)),
        owner,
        revision: Pod::read_revision(&labels),
        labels,
        phase: phase(&status.phase),
        ready: status.phase == "Running" && ready.is_some(),
        ready_since: ready.and_then(|condition| condition.last_transition_time.as_ref()).map(|time| time.0),
        deleting: metadata.deletion_timestamp.as_ref().map(|time| time.0),
        created: metadata.creation_timestamp.as_ref().map_or(jiff::Timestamp::UNIX_EPOCH, |time| time.0),
        started: main.and_then(started),
        oldest_started: status.container_statuses.iter().filter_map(started).min(),
        incarnation: main.map_or(0, |container| fnv(0, &container.container_id)),
        restarts: main.map_or(0, |container| container.restart_count),
        resources: extended_resources(&spec),
        claims: claims(&spec, &status),
        runtime_class: spec.runtime_class_name.as_deref().map(Into::into),
        host_paths: host_paths(&spec),
        finalizer: finalizer(&metadata).filter(|_| metadata.deletion_timestamp.is_some()),
        checkpoint_requested: annotation(CHECKPOINT_REQUESTED_ANNOTATION).and_then(|at| at.parse().ok()),
        checkpointed: annotation(CHECKPOINTED_ANNOTATION).is_some_and(|v| !v.is_empty()),
        empty_dir: spec.volumes.iter().any(|volume| volume.empty_dir.is_some()),
        mirror: annotation(MIRROR_ANNOTATION).is_some(),
        initializing: initializing(&status),
        trouble: trouble(&status),
        digest: digest(&spec),
        image: spec.containers.first().map(|c| c.image.as_str()).unwrap_or_default().into(),
    })
}

/// The node that a pod is on; or, if the scheduler has not placed it, the one that its DaemonSet made it for.
fn meant_for<'a>(metadata: &ObjectMeta, spec: &'a wire::PodSpec) -> &'a str {
    let of_daemon_set =
        || controller(metadata.owner_references.as_deref()).is_some_and(|owner| owner.kind == "DaemonSet");
    if !spec.node_name.is_empty() || !of_daemon_set() {
        return &spec.node_name;
    }
    let required = spec.affinity.as_ref().and_then(|affinity| {
        affinity.node_affinity.as_ref()?.required_during_scheduling_ignored_during_execution.as_ref()
    });
    let terms = required.map(|required| required.node_selector_terms.as_slice()).unwrap_or_default();
    let mut fields = terms.iter().flat_map(|term| term.match_fields.iter().flatten());
    let by_name = fields.find(|field| field.key == "metadata.name" && field.operator == "In");
    by_name.and_then(|field| field.values.as_ref()?.first()).map(String::as_str).unwrap_or_default()
}

/// The names of the claims that a pod uses. Those made for the pod are named in its status.
fn claims(spec: &wire::PodSpec, status: &wire::PodStatus) -> Vec<Box<str>> {
    let generated = |name: &str| {
        let found = status.resource_claim_statuses.iter().find(|claim| claim.name == name);
        found.and_then(|claim| claim.resource_claim_name.as_deref())
    };
    let names = spec.resource_claims.iter();
    let names = names.filter_map(|c| c.resource_claim_name.as_deref().or_else(|| generated(&c.name)));
    names.map(Into::into).collect()
}

fn host_paths(spec: &wire::PodSpec) -> Vec<Box<str>> {
    let paths = spec.volumes.iter().filter_map(|volume| volume.host_path.as_ref());
    paths.map(|path| path.path.as_str().into()).collect()
}

fn finalizer(metadata: &ObjectMeta) -> Option<Box<str>> {
    metadata.finalizers.as_ref()?.first().map(|finalizer| finalizer.as_str().into())
}

/// What a resource claim is allocated from, whatever version of the API it came in.
pub(crate) fn claim(object: &DynamicObject) -> Claim {
    let results = object.data.pointer("/status/allocation/devices/results").and_then(Value::as_array);
    let for_use = |result: &&Value| result["adminAccess"] != Value::Bool(true);
    let drivers = results.into_iter().flatten().filter(for_use).filter_map(|r| r["driver"].as_str());
    Claim { drivers: drivers.map(str::to_owned).collect() }
}

fn is_true(conditions: &[wire::Condition], kind: &str) -> bool {
    condition_of(conditions, kind).is_some_and(|condition| condition.status == "True")
}

fn condition_of<'a>(conditions: &'a [wire::Condition], kind: &str) -> Option<&'a wire::Condition> {
    conditions.iter().find(|condition| condition.kind == kind)
}

fn phase(text: &str) -> Phase {
    match text {
        "Pending" | "" => Phase::Pending,
        "Running" => Phase::Running,
        "Succeeded" => Phase::Succeeded,
        "Failed" => Phase::Failed,
        _ => Phase::Unknown,
    }
}

fn controller(references: Option<&[OwnerReference]>) -> Option<&OwnerReference> {
    references?.iter().find(|reference| reference.controller == Some(true))
}

fn owner(reference: &OwnerReference) -> Owner {
    Owner {
        kind: OwnerKind::of(&reference.kind),
        name: reference.name.as_str().into(),
        uid: reference.uid.as_str().into(),
    }
}

/// When a container started, if it runs.
fn started(container: &wire::ContainerStatus) -> Option<jiff::Timestamp> {
    container.state.running.as_ref()?.started_at.as_ref().map(|time| time.0)
}

/// What a DaemonSet's pod is to the driver.
fn client(labels: &Labels, owner: &Owner, spec: &wire::PodSpec) -> Option<ClientKind> {
    let containers: Vec<&str> = spec.containers.iter().map(|c| c.name.as_str()).collect();
    let daemon = owner.kind == OwnerKind::DaemonSet;
    daemon.then(|| ClientKind::of(labels, &owner.name, &containers)).flatten()
}

/// A ResourceSlice of one node; `None` for devices that belong to no node.
pub(crate) fn slice(object: &DynamicObject) -> Option<Slice> {
    let spec = &object.data["spec"];
    let pool = &spec["pool"];
    let devices = spec["devices"].as_array().into_iter().flatten();
    let version = |device: &Value| {
        // Before v1beta2 the attributes were one level deeper.
        let attributes = device.get("attributes").or_else(|| device.pointer("/basic/attributes"))?;
        attributes.pointer("/driverVersion/version")?.as_str()?.parse().ok()
    };
    Some(Slice {
        node: spec["nodeName"].as_str().filter(|name| !name.is_empty())?.into(),
        pool: pool["name"].as_str().unwrap_or_default().into(),
        generation: pool["generation"].as_i64().unwrap_or_default(),
        count: pool["resourceSliceCount"].as_i64().unwrap_or(1),
        versions: devices.filter_map(version).collect(),
    })
}

/// Resources beyond CPU, memory and the like: their names have a domain. Init containers and sidecars count too.
fn extended_resources(spec: &wire::PodSpec) -> Vec<(Box<str>, u32)> {
    let containers = spec.containers.iter().chain(&spec.init_containers);
    extended(containers.flat_map(|c| c.resources.limits.iter().chain(&c.resources.requests)))
}

fn extended<'a>(asked: impl Iterator<Item = (&'a String, &'a IntOrString)>) -> Vec<(Box<str>, u32)> {
    let mut resources: Vec<(Box<str>, u32)> = Vec::new();
    for (name, amount) in asked.filter(|(name, _)| name.contains('/')) {
        let amount = match amount {
            IntOrString::Int(n) => u32::try_from(*n).unwrap_or(0),
            IntOrString::String(text) => text.parse().unwrap_or(1),
        };
        match resources.iter_mut().find(|(known, _)| known.as_ref() == name) {
            Some((_, known)) => *known = (*known).max(amount),
            None if amount > 0 => resources.push((name.as_str().into(), amount)),
            None => {}
        }
    }
    resources
}

/// Enough for a sentence; a node's reason is no log.
const LAST_WORDS_MAX: usize = 300;

/// What the first container says that is not on its ordinary way up.
fn trouble(status: &wire::PodStatus) -> Option<Trouble> {
    let unplaced = status.conditions.iter().find(|c| c.kind == "PodScheduled" && c.status == "False");
    if let Some(condition) = unplaced {
        let (reason, message) = (condition.reason.as_str().into(), condition.message.as_str().into());
        return Some(Trouble { container: "pod".into(), reason, message, restarts: 0 });
    }
    let containers = status.init_container_statuses.iter().chain(&status.container_statuses);
    containers.into_iter().find_map(|container| {
        let (reason, message) = match (&container.state.waiting, &container.state.terminated) {
            (Some(waiting), _)
                if !matches!(waiting.reason.as_str(), "" | "ContainerCreating" | "PodInitializing") =>
            {
                // How it ended tells more than that it is started again later.
                let crashed = container.last_state.terminated.as_ref();
                let crashed = crashed.filter(|_| waiting.reason == "CrashLoopBackOff").and_then(last_words);
                (waiting.reason.as_str(), crashed.unwrap_or(&waiting.message))
            }
            (_, Some(end)) if end.exit_code != 0 => {
                (end.reason.as_str(), last_words(end).unwrap_or_default())
            }
            _ => return None,
        };
        Some(Trouble {
            container: container.name.as_str().into(),
            reason: reason.into(),
            message: message.into(),
            restarts: container.restart_count,
        })
    })
}

/// The last line that a container left behind.
fn last_words(end: &wire::Terminated) -> Option<&str> {
    let line = end.message.lines().rev().map(str::trim).find(|line| !line.is_empty())?;
    Some(line.char_indices().nth(LAST_WORDS_MAX).map_or(line, |(end, _)| &line[..end]))
}

/// The init container that runs before the others can start. Sidecars run along with them.
fn initializing(status: &wire::PodStatus) -> Option<Box<str>> {
    let begun = status.container_statuses.iter().any(|container| container.state.waiting.is_none());
    let mut running = status.init_container_statuses.iter().filter(|c| c.state.running.is_some());
    running.next_back().filter(|_| !begun).map(|container| container.name.as_str().into())
}

fn digest(spec: &wire::PodSpec) -> Option<Box<str>> {
    let env = spec.containers.iter().chain(&spec.init_containers).flat_map(|c| &c.env);
    env.into_iter().find(|e| e.name == CONFIG_DIGEST_ENV)?.value.as_deref().map(Into::into)
}

pub(crate) fn daemon_set(object: &ApiDaemonSet) -> Result<DaemonSet, Incomplete> {
    let Identity { uid, .. } = identity(&object.metadata)?;
    let template = object.spec.template.spec.as_ref();
    let containers = template.map(|spec| spec.containers.as_slice()).unwrap_or_default();
    let env = containers.iter().flat_map(|c| c.env.iter().flatten());
    let strategy = object.spec.update_strategy.as_ref().and_then(|s| s.type_.as_deref());
    let pod_labels =
        object.spec.template.metadata.as_ref().and_then(|m| m.labels.clone()).unwrap_or_default();
    let names: Vec<&str> = containers.iter().map(|container| container.name.as_str()).collect();
    let name = object_name(&object.metadata);
    Ok(DaemonSet {
        client: ClientKind::of(&pod_labels, &name.name, &names),
        pod_labels,
        name,
        uid,
        labels: object.metadata.labels.clone().unwrap_or_default(),
        generation: object.metadata.generation.unwrap_or_default(),
        observed_generation: object.status.as_ref().and_then(|s| s.observed_generation).unwrap_or_default(),
        on_delete: strategy == Some("OnDelete"),
        node_selector: template.and_then(|spec| spec.node_selector.clone()).unwrap_or_default(),
        rendered_by: controller(object.metadata.owner_references.as_deref()).and_then(renderer),
        digest: env
            .into_iter()
            .find(|e| e.name == CONFIG_DIGEST_ENV)
            .and_then(|e| e.value.as_deref())
            .map(Into::into),
        manager: manager(&object.metadata).map(Into::into),
        driver_version: containers.iter().find_map(|c| DriverVersion::from_image(c.image.as_deref()?)),
    })
}

/// The GitOps system that keeps an object as it is, by the marks that it leaves on it. Argo CD can also mark by the label
/// `app.kubernetes.io/instance` alone; so does every Helm chart, and nobody knows whose that is. Whoever keeps such an object
/// as it is sets the version again, and is known by that.
pub(crate) fn manager(meta: &ObjectMeta) -> Option<String> {
    let annotation = |key: &str| meta.annotations.as_ref().and_then(|annotations| annotations.get(key));
    let label = |key: &str| meta.labels.as_ref()?.get(key).filter(|value| !value.is_empty());
    let argo = annotation(ARGO_TRACKING_ANNOTATION).and_then(|id| argo_application(id, meta));
    let argo = argo.or_else(|| label(ARGO_INSTANCE_LABEL).map(String::as_str));
    if let Some(application) = argo {
        return Some(format!("Argo CD (application {application})"));
    }
    let flux = |(kind, key): &(&str, &str)| label(key).map(|name| format!("Flux ({kind} {name})"));
    FLUX_NAME_LABELS.iter().find_map(flux)
}

/// The application in a tracking id. An id that names another object was copied from there, and Argo CD leaves such an
/// object alone.
fn argo_application<'a>(id: &'a str, meta: &ObjectMeta) -> Option<&'a str> {
    let (application, object) = id.split_once(':')?;
    let name = object.rsplit_once('/').map(|(_, name)| name);
    Some(application).filter(|application| !application.is_empty() && name == meta.name.as_deref())
}

fn renderer(reference: &OwnerReference) -> Option<Source> {
    match reference.kind.as_str() {
        "ClusterPolicy" => Some(Source::ClusterPolicy(reference.name.clone())),
        "NVIDIADriver" => Some(Source::NvidiaDriver(reference.name.clone())),
        "NicClusterPolicy" => Some(Source::NicClusterPolicy(reference.name.clone())),
        _ => None,
    }
}

/// `None`: not a DaemonSet's.
pub(crate) fn revision(object: &wire::Revision) -> Option<TemplateRevision> {
    let owner = controller(object.metadata.owner_references.as_deref()).filter(|o| o.kind == "DaemonSet")?;
    let hash = object.metadata.labels.as_ref().and_then(|labels| labels.get(REVISION_LABEL)).cloned();
    let from_name =
        || object.metadata.name.as_deref()?.strip_prefix(&owner.name)?.strip_prefix('-').map(str::to_owned);
    let hash = hash.or_else(from_name)?;
    let containers =
        || object.data["spec"]["template"]["spec"]["containers"].as_array().into_iter().flatten();
    let mut env = containers().flat_map(|container| container["env"].as_array().into_iter().flatten());
    let digest = env.find(|env| env["name"] == CONFIG_DIGEST_ENV).and_then(|env| env["value"].as_str());
    Some(TemplateRevision {
        owner: owner.uid.as_str().into(),
        number: object.revision,
        created: object.metadata.creation_timestamp.as_ref().map(|t| t.0).unwrap_or_default(),
        hash: hash.into(),
        digest: digest.map(Into::into),
        driver_version: containers().find_map(|c| DriverVersion::from_image(c["image"].as_str()?)),
    })
}

pub(crate) fn budget(object: &PodDisruptionBudget) -> Budget {
    let spec = object.spec.clone().unwrap_or_default();
    let status = object.status.clone().unwrap_or_default();
    Budget {
        // A selector that cannot be read selects nothing here; the API still refuses what it has to.
        selector: spec.selector.and_then(|selector| Selector::try_from(selector).ok()),
        allowed: status.disruptions_allowed.unwrap_or_default(),
        healthy: status.current_healthy.unwrap_or_default(),
        desired: status.desired_healthy.unwrap_or_default(),
        expected: status.expected_pods.unwrap_or_default(),
        current: status.observed_generation == object.metadata.generation,
    }
}

pub(crate) fn cluster_policy(object: &ClusterPolicy) -> ClusterPolicyFacts {
    let annotations = object.metadata.annotations.as_ref();
    ClusterPolicyFacts {
        created: object.metadata.creation_timestamp.as_ref().map(|t| t.0).unwrap_or_default(),
        driver: object.spec.driver.clone(),
        sandbox: object.spec.sandbox_workloads.pointer("/enabled").and_then(Value::as_bool).unwrap_or(false),
        timeout_action: annotations.and_then(|a| a.get(TIMEOUT_ACTION_ANNOTATION)).cloned(),
    }
}

pub(crate) fn rollout(object: ApiRollout) -> Result<(String, Rollout), Incomplete> {
    let Identity { name, version, .. } = identity(&object.metadata)?;
    Ok((name, Rollout { version, spec: object.spec, status: object.status, said_at: None }))
}

#[cfg(test)]
mod tests;
