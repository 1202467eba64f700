//! Whether a pod may be on a node: selectors, required affinity, taints, pods that it keeps away from. Shared by scheduler and DaemonSets.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Node, NodeSelectorRequirement, NodeSelectorTerm, Pod, PodAffinityTerm, PodSpec, Taint, Toleration,
};
use kube::ResourceExt;
use kube::core::{Selector, SelectorExt};

const HOSTNAME: &str = "kubernetes.io/hostname";
pub(super) const UNSCHEDULABLE: &str = "node.kubernetes.io/unschedulable";

/// nodeSelector and required node affinity.
pub(super) fn selects(spec: &PodSpec, node: &Node) -> bool {
    let labels = node.labels();
    let selected = spec.node_selector.iter().flatten().all(|(key, value)| labels.get(key) == Some(value));
    selected && affinity_allows(spec, node)
}

fn affinity_allows(spec: &PodSpec, node: &Node) -> bool {
    let required = spec
        .affinity
        .as_ref()
        .and_then(|affinity| affinity.node_affinity.as_ref())
        .and_then(|affinity| affinity.required_during_scheduling_ignored_during_execution.as_ref());
    required.is_none_or(|required| required.node_selector_terms.iter().any(|term| term_matches(term, node)))
}

fn term_matches(term: &NodeSelectorTerm, node: &Node) -> bool {
    let by_label = term.match_expressions.iter().flatten();
    let by_field = term.match_fields.iter().flatten();
    if by_label.clone().next().is_none() && by_field.clone().next().is_none() {
        return false;
    }
    let name = BTreeMap::from([("metadata.name".to_owned(), node.name_any())]);
    by_label.clone().all(|requirement| requirement_met(requirement, node.labels()))
        && by_field.clone().all(|requirement| requirement_met(requirement, &name))
}

fn requirement_met(requirement: &NodeSelectorRequirement, values: &BTreeMap<String, String>) -> bool {
    let value = values.get(&requirement.key);
    let listed = requirement.values.as_deref().unwrap_or_default();
    let number = || value?.parse::<i64>().ok().zip(listed.first()?.parse::<i64>().ok());
    match requirement.operator.as_str() {
        "In" => value.is_some_and(|value| listed.contains(value)),
        "NotIn" => value.is_none_or(|value| !listed.contains(value)),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => number().is_some_and(|(value, bound)| value > bound),
        "Lt" => number().is_some_and(|(value, bound)| value < bound),
        _ => false,
    }
}

/// The pods beside which a pod must not be: those of its namespace that these select. Only nodes are told apart, not
/// wider domains.
pub(super) fn rivals(spec: &PodSpec) -> Vec<Selector> {
    let affinity = spec.affinity.as_ref().and_then(|affinity| affinity.pod_anti_affinity.as_ref());
    let required =
        affinity.and_then(|affinity| affinity.required_during_scheduling_ignored_during_execution.as_ref());
    let by_node = |term: &&PodAffinityTerm| term.topology_key == HOSTNAME;
    let selector = |term: &PodAffinityTerm| Selector::try_from(term.label_selector.clone()?).ok();
    required.into_iter().flatten().filter(by_node).filter_map(selector).collect()
}

pub(super) fn is_rival(rivals: &[Selector], other: &Pod) -> bool {
    rivals.iter().any(|selector| selector.matches(other.labels()))
}

/// The node's taints, with the one that a cordon stands for: the node controller may not have written it yet.
pub(super) fn taints(node: &Node) -> Vec<Taint> {
    let spec = node.spec.as_ref();
    let mut taints = spec.and_then(|spec| spec.taints.clone()).unwrap_or_default();
    let cordoned = spec.and_then(|spec| spec.unschedulable).unwrap_or(false);
    if cordoned && !taints.iter().any(|taint| taint.key == UNSCHEDULABLE) {
        taints.push(Taint { key: UNSCHEDULABLE.into(), effect: "NoSchedule".into(), ..Taint::default() });
    }
    taints
}

pub(super) fn tolerates(spec: &PodSpec, taint: &Taint) -> bool {
    spec.tolerations.iter().flatten().any(|toleration| toleration_covers(toleration, taint))
}

fn toleration_covers(toleration: &Toleration, taint: &Taint) -> bool {
    let effect = toleration.effect.as_deref().unwrap_or_default();
    let key = toleration.key.as_deref().unwrap_or_default();
    if !effect.is_empty() && effect != taint.effect || !key.is_empty() && key != taint.key {
        return false;
    }
    match toleration.operator.as_deref().unwrap_or("Equal") {
        "Exists" => true,
        _ => toleration.value.as_deref().unwrap_or_default() == taint.value.as_deref().unwrap_or_default(),
    }
}

/// Whether every taint with one of these effects is tolerated.
pub(super) fn tolerates_all(spec: &PodSpec, taints: &[Taint], effects: &[&str]) -> bool {
    taints.iter().filter(|taint| effects.contains(&taint.effect.as_str())).all(|taint| tolerates(spec, taint))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn spec(spec: serde_json::Value) -> PodSpec {
        serde_json::from_value(spec).expect("pod spec")
    }

    fn node(spec: &serde_json::Value) -> Node {
        let labels = json!({"pool": "a100", "rank": "7"});
        serde_json::from_value(json!({"metadata": {"name": "gpu-01", "labels": labels}, "spec": spec}))
            .expect("node")
    }

    #[test]
    fn affinity_is_read_like_the_scheduler_reads_it() {
        let cases = [
            (json!({"matchExpressions": [{"key": "pool", "operator": "In", "values": ["a100"]}]}), true),
            (json!({"matchExpressions": [{"key": "pool", "operator": "NotIn", "values": ["a100"]}]}), false),
            (json!({"matchExpressions": [{"key": "zone", "operator": "DoesNotExist"}]}), true),
            (json!({"matchExpressions": [{"key": "rank", "operator": "Gt", "values": ["6"]}]}), true),
            (
                json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["gpu-02"]}]}),
                false,
            ),
            (
                json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["gpu-01"]}]}),
                true,
            ),
            (json!({}), false),
        ];
        for (term, allowed) in cases {
            let required = json!({"nodeSelectorTerms": [term]});
            let affinity =
                json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}});
            let spec = spec(json!({"containers": [], "affinity": affinity}));
            assert_eq!(selects(&spec, &node(&json!({}))), allowed, "{term}");
        }
    }

    #[test]
    fn a_cordon_is_a_taint_even_before_the_taint_is_written() {
        let cordoned = taints(&node(&json!({"unschedulable": true})));
        assert!(!tolerates_all(&spec(json!({"containers": []})), &cordoned, &["NoSchedule"]));
        let tolerant =
            json!({"containers": [], "tolerations": [{"key": UNSCHEDULABLE, "operator": "Exists"}]});
        assert!(tolerates_all(&spec(tolerant), &cordoned, &["NoSchedule"]));
    }
}
