//! A GPU operator, as much of it as an upgrade meets: renders ClusterPolicy and NVIDIADrivers into DaemonSets and
//! tells each node which NVIDIADriver it belongs to. Runs in the embedded cluster and on a real control plane.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use serde_json::{Value, json};

use super::cache::{Cache, Informer, Key, Source};
use super::drive::Actor;
use super::object::{controller_of, value};
use super::queue::Queue;
use super::render::{of_cluster_policy, of_nvidia_driver};
use super::way::{Part, Way};
use super::write::{Holds, Write};

/// Where the operator's DaemonSets are.
pub const NAMESPACE: &str = "gpu-operator";
/// The value of `app` on driver pods.
pub const DRIVER_APP: &str = "nvidia-driver-daemonset";
/// The value of `app.kubernetes.io/component` on driver pods.
pub const DRIVER_COMPONENT: &str = "nvidia-driver";
/// The value of `app` on validator pods.
pub const VALIDATOR_APP: &str = "nvidia-operator-validator";
/// On nodes that get a driver pod.
pub const DEPLOY_DRIVER: &str = "nvidia.com/gpu.deploy.driver";
/// On nodes that get a validator pod.
pub const DEPLOY_VALIDATOR: &str = "nvidia.com/gpu.deploy.operator-validator";
/// On nodes with GPUs.
pub const GPU_PRESENT: &str = "nvidia.com/gpu.present";
/// A node's kernel, for which precompiled drivers are made.
pub const KERNEL: &str = "feature.node.kubernetes.io/kernel-version.full";
/// Names a node's NVIDIADriver.
pub(super) const DRIVER_OWNER: &str = "nvidia.com/gpu-operator.driver.owner";
/// A hash of what was rendered; the operator writes again only when it differs.
pub(super) const LAST_APPLIED: &str = "nvidia.com/last-applied-hash";

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Task {
    Render,
    /// Which NVIDIADriver a node belongs to.
    Claim(String),
}

pub(super) struct Operator {
    way: Way,
    policies: Informer<DynamicObject>,
    drivers: Informer<DynamicObject>,
    daemon_sets: Informer<DaemonSet>,
    nodes: Informer<Node>,
}

pub(crate) fn cluster_policy_kind() -> ApiResource {
    ApiResource::from_gvk_with_plural(
        &GroupVersionKind::gvk("nvidia.com", "v1", "ClusterPolicy"),
        "clusterpolicies",
    )
}

pub(crate) fn nvidia_driver_kind() -> ApiResource {
    ApiResource::from_gvk_with_plural(
        &GroupVersionKind::gvk("nvidia.com", "v1alpha1", "NVIDIADriver"),
        "nvidiadrivers",
    )
}

impl Operator {
    pub(super) fn new(way: Way) -> Self {
        Self {
            policies: Informer::of_kind(&way, &cluster_policy_kind(), Part::default()),
            drivers: Informer::of_kind(&way, &nvidia_driver_kind(), Part::default()),
            daemon_sets: Informer::of_part(&way, Part { namespace: NAMESPACE, ..Part::default() }),
            nodes: Informer::new(&way),
            way,
        }
    }

    fn render(&self) -> Vec<Write<Self>> {
        let kernels = self.kernels();
        let policies = self.policies.cache.iter().flat_map(|(_, policy)| of_cluster_policy(policy, &kernels));
        let drivers = self.drivers.cache.iter().filter_map(|(_, driver)| of_nvidia_driver(driver));
        let wanted: BTreeMap<Key, DaemonSet> =
            policies.chain(drivers).map(|set| (Key::of(&set), set)).collect();
        let surplus =
            self.daemon_sets.cache.iter().filter(|(key, set)| is_ours(set) && !wanted.contains_key(key));
        let deletes: Vec<_> = surplus.map(|(_, set)| Write::delete(&self.way, set.as_ref(), None)).collect();
        wanted.into_values().filter_map(|set| self.ensure(set)).chain(deletes).collect()
    }

    fn kernels(&self) -> BTreeSet<String> {
        let nodes = self.nodes.cache.iter();
        nodes.filter_map(|(_, node)| kernel(Some(node)).map(str::to_owned)).collect()
    }

    fn ensure(&self, wanted: DaemonSet) -> Option<Write<Self>> {
        let Some(found) = self.daemon_sets.cache.get(&Key::of(&wanted)) else {
            return Some(Write::create(&self.way, wanted));
        };
        let hash =
            |set: &DaemonSet| value(set.metadata.annotations.as_ref(), LAST_APPLIED).map(str::to_owned);
        let same_owner = controller_of(found.as_ref()) == controller_of(&wanted);
        if hash(found) == hash(&wanted) && same_owner {
            return None;
        }
        let mut next = DaemonSet::clone(found);
        let annotations = next.metadata.annotations.get_or_insert_default();
        annotations.extend(wanted.metadata.annotations.into_iter().flatten());
        next.metadata.labels = wanted.metadata.labels;
        next.metadata.owner_references = wanted.metadata.owner_references;
        next.spec = wanted.spec;
        Some(Write::replace(&self.way, next))
    }

    fn claim(&self, name: &str) -> Option<Write<Self>> {
        let node = self.nodes.cache.get(&Key::new("", name))?;
        let owner = self.owner(node);
        let known = value(node.metadata.labels.as_ref(), DRIVER_OWNER).map(str::to_owned);
        if owner == known {
            return None;
        }
        Some(Write::patch(&self.way, node.as_ref(), json!({"metadata": {"labels": {DRIVER_OWNER: owner}}})))
    }

    /// The one NVIDIADriver that selects a GPU node, or the default one.
    fn owner(&self, node: &Node) -> Option<String> {
        if value(node.metadata.labels.as_ref(), GPU_PRESENT) != Some("true") {
            return None;
        }
        let (default, others): (Vec<_>, Vec<_>) = self
            .drivers
            .cache
            .iter()
            .map(|(_, driver)| driver)
            .partition(|driver| driver.data["spec"]["default"] == true);
        let mut claims =
            others.into_iter().filter(|driver| selects(&driver.data["spec"]["nodeSelector"], node));
        match (claims.next(), claims.next()) {
            // Two that claim one node are a conflict: the operator gives it to neither.
            (Some(_), Some(_)) => None,
            (Some(driver), None) => Some(driver.name_any()),
            (None, _) => default.first().map(|driver| driver.name_any()),
        }
    }
}

fn kernel(node: Option<&Node>) -> Option<&str> {
    value(node?.metadata.labels.as_ref(), KERNEL)
}

fn is_ours(set: &DaemonSet) -> bool {
    controller_of(set).is_some_and(|owner| matches!(owner.kind.as_str(), "ClusterPolicy" | "NVIDIADriver"))
}

fn selects(selector: &Value, node: &Node) -> bool {
    let labels = node.labels();
    selector
        .as_object()
        .into_iter()
        .flatten()
        .all(|(key, value)| labels.get(key).map(String::as_str) == value.as_str())
}

impl Actor for Operator {
    type Task = Task;

    fn sources(&mut self) -> Vec<&mut dyn Source> {
        vec![&mut self.policies, &mut self.drivers, &mut self.daemon_sets, &mut self.nodes]
    }

    fn route(&mut self, queue: &mut Queue<Task>) {
        let asked = !self.policies.cache.take_changes().is_empty();
        let drivers = !self.drivers.cache.take_changes().is_empty();
        // Counts in a status are none of the operator's business.
        let meddled = self.daemon_sets.cache.take_changes().iter().any(super::manager::spec_changed);
        let nodes = self.nodes.cache.take_changes();
        let kernels = nodes.iter().any(|node| kernel(node.old.as_deref()) != kernel(node.new.as_deref()));
        if asked || drivers || meddled || kernels {
            queue.add(Task::Render);
        }
        if drivers {
            self.nodes.cache.iter().for_each(|(key, _)| queue.add(Task::Claim(key.name.clone())));
        }
        let labels = |node: Option<&Node>| node.and_then(|node| node.metadata.labels.clone());
        for change in
            nodes.into_iter().filter(|change| labels(change.old.as_deref()) != labels(change.new.as_deref()))
        {
            queue.add(Task::Claim(change.key.name));
        }
    }

    fn look(&mut self, task: &Task, _queue: &mut Queue<Task>) -> Vec<Write<Self>> {
        match task {
            Task::Render => self.render(),
            Task::Claim(node) => self.claim(node).into_iter().collect(),
        }
    }
}

impl Holds<DaemonSet> for Operator {
    fn cache(&mut self) -> &mut Cache<DaemonSet> {
        &mut self.daemon_sets.cache
    }
}

impl Holds<Node> for Operator {
    fn cache(&mut self) -> &mut Cache<Node> {
        &mut self.nodes.cache
    }
}
