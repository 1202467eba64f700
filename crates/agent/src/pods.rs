//! The pods on the node, in the planner's own terms: who uses the device and who may be evicted is decided by the same
//! code as in the controller.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, Pod as ApiPod, PodSpec, PodStatus};
use kube::core::Selector;
use pitcrew_core::api::TimeoutAction;
use pitcrew_core::names::ObjectName;
use pitcrew_core::plan::{leaves_in_drain, undeletable, uses_device};
use pitcrew_core::policy::{Devices, Pattern, Removal};
use pitcrew_core::selector::Labels;
use pitcrew_core::snapshot::{Claim, Owner, OwnerKind, Phase, Pod};
use serde_json::Value;

use crate::labels::{self, Batch};

/// By this annotation the kubelet marks the pods of its own files.
const MIRROR_ANNOTATION: &str = "kubernetes.io/config.mirror";
/// The DRA drivers of NVIDIA's devices: GPUs, …
const GPU_CLAIMS: &str = "gpu.nvidia.com";
/// … and channels between them.
const DOMAIN_CLAIMS: &str = "compute-domain.nvidia.com";

/// Claims by name, as far as they were looked up.
pub(crate) type Claims = BTreeMap<ObjectName, Claim>;

/// What counts as using a GPU.
pub(crate) fn devices() -> Devices {
    Devices {
        resources: ["nvidia.com/gpu*", "nvidia.com/mig-*"].map(|text| Pattern(text.to_owned())).to_vec(),
        claim_drivers: [GPU_CLAIMS, DOMAIN_CLAIMS].map(str::to_owned).to_vec(),
        ..Devices::default()
    }
}

/// A compute domain's own daemon, which cannot be evicted and leaves when whoever is in the domain has.
pub(crate) fn serves_a_domain(pod: &Pod, claims: &Claims) -> bool {
    let devices = Devices { claim_drivers: vec![GPU_CLAIMS.to_owned()], ..devices() };
    pod.is_daemon() && !uses_device(&devices, pod, claims)
}

/// A pod on the node.
#[derive(Clone, Debug)]
pub(crate) struct OnNode {
    /// As the planner knows it.
    pub(crate) pod: Pod,
    /// Its own node selector.
    pub(crate) selector: Labels,
}

impl OnNode {
    /// Reads what matters of a pod.
    pub(crate) fn read(pod: ApiPod) -> Self {
        let ApiPod { metadata, spec, status } = pod;
        let (spec, status) = (spec.unwrap_or_default(), status.unwrap_or_default());
        let name = ObjectName {
            namespace: metadata.namespace.as_deref().unwrap_or_default().into(),
            name: metadata.name.as_deref().unwrap_or_default().into(),
        };
        let uid = metadata.uid.as_deref().unwrap_or_default().into();
        let node = spec.node_name.as_deref().unwrap_or_default().into();
        let owners = metadata.owner_references.unwrap_or_default();
        let annotations = metadata.annotations.unwrap_or_default();
        let pod = Pod {
            labels: metadata.labels.unwrap_or_default(),
            owner: owners.into_iter().find(|owner| owner.controller == Some(true)).map(|owner| Owner {
                kind: OwnerKind::of(&owner.kind),
                name: owner.name.as_str().into(),
                uid: owner.uid.as_str().into(),
            }),
            phase: phase(status.phase.as_deref().unwrap_or_default()),
            deleting: metadata.deletion_timestamp.map(|time| time.0),
            created: metadata.creation_timestamp.map_or(Timestamp::UNIX_EPOCH, |time| time.0),
            resources: resources(&spec),
            claims: claims(&spec, &status),
            empty_dir: spec.volumes.iter().flatten().any(|volume| volume.empty_dir.is_some()),
            mirror: annotations.contains_key(MIRROR_ANNOTATION),
            // Nothing that is decided here depends on the version of a pod: it is named by its UID.
            ..Pod::ready(name, uid, 0.into(), node)
        };
        Self { pod, selector: spec.node_selector.unwrap_or_default() }
    }

    /// A DaemonSet puts it where one of these labels is, so it leaves when the label does.
    pub(crate) fn is_placed_by(&self, keys: &[String]) -> bool {
        self.pod.is_daemon() && keys.iter().any(|key| self.selector.contains_key(key))
    }
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

/// Resources with a domain that any container asks for; init containers and sidecars are containers too.
fn resources(spec: &PodSpec) -> Vec<(Box<str>, u32)> {
    let asked = |container: &Container| {
        let resources = container.resources.clone().unwrap_or_default();
        let both = [resources.limits, resources.requests];
        both.into_iter().flatten().flatten().collect::<Vec<_>>()
    };
    let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let amounts = containers.flat_map(asked).filter(|(name, _)| name.contains('/'));
    // What is no plain number is some.
    let amounts = amounts.map(|(name, amount)| (name, amount.0.parse().unwrap_or(1)));
    let mut most: BTreeMap<String, u32> = BTreeMap::new();
    for (name, amount) in amounts {
        let known = most.entry(name).or_default();
        *known = amount.max(*known);
    }
    let some = most.into_iter().filter(|(_, amount)| *amount > 0);
    some.map(|(name, amount)| (name.into_boxed_str(), amount)).collect()
}

/// The claims that a pod uses, by name; the names of those made for it are in its status.
fn claims(spec: &PodSpec, status: &PodStatus) -> Vec<Box<str>> {
    let made = |name: &str| {
        let mut known = status.resource_claim_statuses.iter().flatten();
        known.find(|claim| claim.name == name).and_then(|claim| claim.resource_claim_name.clone())
    };
    let used = spec.resource_claims.iter().flatten();
    let names = used.filter_map(|claim| claim.resource_claim_name.clone().or_else(|| made(&claim.name)));
    names.map(String::into_boxed_str).collect()
}

/// The drivers that a claim's devices come from. Devices for administration do not keep a driver busy, but their claims
/// have to be given back all the same.
pub(crate) fn claim(data: &Value, with_administration: bool) -> Claim {
    let results = data.pointer("/status/allocation/devices/results").and_then(Value::as_array);
    let counts = |result: &&Value| with_administration || result["adminAccess"] != Value::Bool(true);
    let drivers = results.into_iter().flatten().filter(counts).filter_map(|result| result["driver"].as_str());
    Claim { drivers: drivers.map(str::to_owned).collect() }
}

/// Who is asked to leave, and what may be done for it.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each answers a question of its own")]
pub(crate) struct Leave {
    /// Everybody that a drain takes off, or only who uses the device.
    pub(crate) whole_node: bool,
    /// Which pods a drain takes off.
    pub(crate) selector: Selector,
    /// Also pods that nobody makes again.
    pub(crate) force: bool,
    /// Also pods with emptyDir volumes.
    pub(crate) delete_empty_dir: bool,
    /// The label that a user names for clients of other installations.
    pub(crate) custom_label: Option<String>,
    /// Also who has devices for administration only: the plugin leaves that has to give their claims back.
    pub(crate) administrators: bool,
}

impl Leave {
    /// The pods that have to leave, or the sentence that says why that cannot be.
    pub(crate) fn leaving<'a>(&self, pods: &'a [OnNode], claims: &Claims) -> Result<Vec<&'a Pod>, String> {
        let devices = devices();
        let custom = self.custom_label.as_deref();
        let by_label: Vec<String> =
            [Batch::First, Batch::Last].into_iter().flat_map(|batch| labels::keys(batch, custom)).collect();
        let uses = |on_node: &OnNode| {
            uses_device(&devices, &on_node.pod, claims)
                && !on_node.is_placed_by(&by_label)
                && !serves_a_domain(&on_node.pod, claims)
        };
        let concerned = |on_node: &&OnNode| {
            if self.whole_node { leaves_in_drain(&self.selector, &on_node.pod) } else { uses(on_node) }
        };
        // Without this look everybody else would be evicted for a driver that stays busy, at every start again.
        let stays =
            |on_node: &&OnNode| uses(on_node) && on_node.pod.deleting.is_none() && !concerned(on_node);
        if let Some(OnNode { pod, .. }) = pods.iter().find(stays) {
            return Err(format!("pod {} uses the device and is left out of the drain", pod.name));
        }
        let leaving: Vec<&Pod> = pods.iter().filter(concerned).map(|on_node| &on_node.pod).collect();
        let removal = Removal {
            force: self.force,
            delete_empty_dir: self.delete_empty_dir,
            timeout: None,
            timeout_action: TimeoutAction::Fail,
        };
        match undeletable(leaving.iter().copied(), removal) {
            Some(finding) => Err(finding.what),
            None => Ok(leaving),
        }
    }
}

/// The pods whose claims come from one of NVIDIA's drivers.
pub(crate) fn claim_holders<'a>(pods: &'a [OnNode], claims: &Claims) -> Vec<&'a Pod> {
    let devices = Devices { resources: vec![], ..devices() };
    pods.iter().map(|on_node| &on_node.pod).filter(|pod| uses_device(&devices, pod, claims)).collect()
}

/// Names, for a sentence.
pub(crate) fn names(pods: &[&Pod]) -> String {
    let names: Vec<String> = pods.iter().map(|pod| format!("pod {}", pod.name)).collect();
    names.join(", ")
}

#[cfg(test)]
mod tests;
