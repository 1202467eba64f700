//! What people run on a fleet: Deployments and StatefulSets that want GPUs, some of them under a budget.

use serde_json::{Map, Value, json};

/// A number of like pods that use GPUs.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    /// Where.
    pub namespace: String,
    /// The Deployment's or StatefulSet's name; the pods have it as label `app`.
    pub name: String,
    /// How many pods.
    pub replicas: u32,
    /// How many GPUs each.
    pub gpus: u32,
    /// How long a pod may take to stop.
    pub grace_seconds: u32,
    /// The PodDisruptionBudget's spec without its selector, such as `{"maxUnavailable": 1}`.
    pub budget: Option<Value>,
    /// Annotations of the pods, such as `sim.pitcrew.dev/stop-seconds`.
    pub annotations: Vec<(String, String)>,
    /// A StatefulSet: a pod that goes comes back under its own name.
    pub stateful: bool,
}

impl Workload {
    /// A Deployment without a budget, with the usual grace period.
    pub fn new(namespace: &str, name: &str, replicas: u32, gpus: u32) -> Self {
        Self {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            replicas,
            gpus,
            grace_seconds: 30,
            budget: None,
            annotations: Vec::new(),
            stateful: false,
        }
    }

    /// With a PodDisruptionBudget.
    #[must_use]
    pub fn with_budget(mut self, budget: Value) -> Self {
        self.budget = Some(budget);
        self
    }
}

/// Three pods on two nodes and under half of the GPUs, so that a quarter of the nodes may go: chat and embedding
/// services under budgets, training and notebooks without.
pub(super) fn usual_workloads(nodes: usize) -> Vec<Workload> {
    let mut left = u32::try_from(nodes.saturating_mul(3) / 2).unwrap_or(u32::MAX);
    let mut workloads = Vec::new();
    for number in 1.. {
        if left == 0 {
            break;
        }
        let shapes = [
            Workload::new("llm", &format!("chat-{number}"), 4, 1).with_budget(json!({"maxUnavailable": 1})),
            Workload::new("llm", &format!("embed-{number}"), 3, 2)
                .with_budget(json!({"minAvailable": "50%"})),
            Workload::new("research", &format!("train-{number}"), 2, 4),
            Workload::new("research", &format!("notebook-{number}"), 3, 1),
        ];
        for mut workload in shapes {
            workload.replicas = workload.replicas.min(left);
            left -= workload.replicas;
            workloads.extend((workload.replicas > 0).then_some(workload));
        }
    }
    workloads
}

/// The Deployment, or the StatefulSet, which says the same.
pub(super) fn controller(workload: &Workload) -> Value {
    let Workload { namespace, name, replicas, gpus, grace_seconds, annotations, .. } = workload;
    let annotations: Map<String, Value> =
        annotations.iter().map(|(key, value)| (key.clone(), json!(value))).collect();
    let container = json!({
        "name": "main", "image": format!("registry.example/{name}:1"),
        "resources": {"limits": {"nvidia.com/gpu": gpus.to_string()}, "requests": {"nvidia.com/gpu": gpus.to_string()}},
    });
    json!({
        "metadata": {"namespace": namespace, "name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": name}},
            "template": {
                "metadata": {"labels": {"app": name}, "annotations": annotations},
                "spec": {"terminationGracePeriodSeconds": grace_seconds, "containers": [container]},
            },
        },
    })
}

pub(super) fn budget(workload: &Workload) -> Option<Value> {
    let mut spec = workload.budget.clone()?;
    spec["selector"] = json!({"matchLabels": {"app": workload.name}});
    Some(json!({"metadata": {"namespace": workload.namespace, "name": workload.name}, "spec": spec}))
}

#[cfg(test)]
mod tests {
    use crate::fleet::Fleet;

    #[test]
    fn the_usual_workloads_leave_room_for_a_quarter_of_the_nodes_to_go() {
        for nodes in [2, 10, 101, 1000] {
            let fleet = Fleet::new(nodes);
            let pods: u32 = fleet.workloads.iter().map(|workload| workload.replicas).sum();
            let gpus: u32 = fleet.workloads.iter().map(|workload| workload.replicas * workload.gpus).sum();
            assert_eq!(usize::try_from(pods).unwrap(), nodes * 3 / 2);
            assert!(usize::try_from(gpus).unwrap() <= nodes * 4, "{gpus} GPUs on {nodes} nodes");
        }
    }
}
