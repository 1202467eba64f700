//! Small questions that several actors ask about Kubernetes objects.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Pod, PodCondition, PodSpec, PodTemplateSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use kube::{Resource, ResourceExt};

/// Names a revision of a pod template, on DaemonSet and `StatefulSet` pods.
pub(crate) const REVISION_HASH: &str = "controller-revision-hash";

pub(crate) fn pod_condition<'a>(pod: &'a Pod, kind: &str) -> Option<&'a PodCondition> {
    pod.status.as_ref()?.conditions.as_ref()?.iter().find(|condition| condition.type_ == kind)
}

pub(crate) fn is_ready(pod: &Pod) -> bool {
    pod_condition(pod, "Ready").is_some_and(|condition| condition.status == "True")
}

pub(crate) fn is_terminating<K: Resource>(object: &K) -> bool {
    object.meta().deletion_timestamp.is_some()
}

pub(crate) fn phase(pod: &Pod) -> &str {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or("Pending")
}

/// Succeeded or Failed: its containers will not run again.
pub(crate) fn is_finished(pod: &Pod) -> bool {
    matches!(phase(pod), "Succeeded" | "Failed")
}

/// Counts as a replica: neither finished nor on its way out.
pub(crate) fn is_active(pod: &Pod) -> bool {
    !is_finished(pod) && !is_terminating(pod)
}

/// The node that a pod is on, or the one that its DaemonSet made it for.
pub(super) fn meant_for(pod: &Pod) -> Option<&str> {
    node_of(pod).or_else(|| pinned_to(pod.spec.as_ref()?))
}

/// The node that a DaemonSet's pod is pinned to, or a gate's.
pub(super) fn pinned_to(spec: &PodSpec) -> Option<&str> {
    let affinity = spec.affinity.as_ref()?.node_affinity.as_ref()?;
    let required = affinity.required_during_scheduling_ignored_during_execution.as_ref()?;
    let [term] = required.node_selector_terms.as_slice() else { return None };
    let [field] = term.match_fields.as_deref()? else { return None };
    let by_name = field.key == "metadata.name" && field.operator == "In";
    let [node] = field.values.as_deref()? else { return None };
    by_name.then_some(node.as_str())
}

/// The node a pod is bound to.
pub(crate) fn node_of(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref().filter(|node| !node.is_empty())
}

/// The owner that manages an object, if one does.
pub(crate) fn controller_of<K: Resource>(object: &K) -> Option<&OwnerReference> {
    object.meta().owner_references.as_ref()?.iter().find(|owner| owner.controller == Some(true))
}

pub(crate) fn controller_uid<K: Resource>(object: &K) -> Option<&str> {
    controller_of(object).map(|owner| owner.uid.as_str())
}

/// A value of `labels`, or of annotations.
pub(crate) fn value<'a>(map: Option<&'a BTreeMap<String, String>>, key: &str) -> Option<&'a str> {
    map?.get(key).map(String::as_str)
}

/// A pod as a controller makes it: the template, a generated name, an owner.
pub(crate) fn pod_of<O>(owner: &O, template: &PodTemplateSpec) -> Pod
where
    O: Resource<DynamicType = ()>,
{
    let from = template.metadata.clone().unwrap_or_default();
    let metadata = ObjectMeta {
        generate_name: Some(format!("{}-", owner.name_any())),
        namespace: owner.namespace(),
        labels: from.labels,
        annotations: from.annotations,
        finalizers: from.finalizers,
        owner_references: owner.controller_owner_ref(&()).map(|reference| vec![reference]),
        ..ObjectMeta::default()
    };
    Pod { metadata, spec: template.spec.clone(), status: None }
}

/// Seconds between two Kubernetes times; 0 if they are the wrong way round.
pub(crate) fn seconds_between(earlier: &Time, later: &Time) -> u64 {
    u64::try_from(later.0.as_second() - earlier.0.as_second()).unwrap_or(0)
}

/// FNV-1a: names that depend on content must be the same in every process.
pub(crate) fn fnv(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

/// A hash in the alphabet Kubernetes uses for names, which spells no words.
pub(crate) fn hash_name(content: &impl serde::Serialize) -> String {
    const ALPHABET: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
    // Through Value, whose objects are sorted.
    let json = serde_json::to_value(content).map(|value| value.to_string()).unwrap_or_default();
    fnv(json.as_bytes())
        .to_string()
        .bytes()
        .map(|byte| char::from(ALPHABET[usize::from(byte) % ALPHABET.len()]))
        .collect()
}
