//! What the control plane's controllers see: one set of watches for all of them, as in kube-controller-manager.

use std::sync::Arc;

use k8s_openapi::api::apps::v1::{ControllerRevision, DaemonSet, Deployment, ReplicaSet, StatefulSet};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;

use super::cache::{Change, Index, Informer, Key, Source};
use super::object::{controller_uid, meant_for};
use super::way::Way;

/// Shared caches and indexes.
pub(super) struct World {
    pub(super) nodes: Informer<Node>,
    pub(super) daemon_sets: Informer<DaemonSet>,
    pub(super) revisions: Informer<ControllerRevision>,
    pub(super) deployments: Informer<Deployment>,
    pub(super) replica_sets: Informer<ReplicaSet>,
    pub(super) stateful_sets: Informer<StatefulSet>,
    pub(super) jobs: Informer<Job>,
    pub(super) budgets: Informer<PodDisruptionBudget>,
    pub(super) pods: Informer<Pod>,
    /// By the UID of the controlling owner.
    pub(super) pods_of: Index,
    pub(super) revisions_of: Index,
    pub(super) replica_sets_of: Index,
    pub(super) jobs_of: Index,
    /// By node name.
    pub(super) pods_on: Index,
}

impl World {
    pub(super) fn new(way: &Way) -> Self {
        Self {
            nodes: Informer::new(way),
            daemon_sets: Informer::new(way),
            revisions: Informer::new(way),
            deployments: Informer::new(way),
            replica_sets: Informer::new(way),
            stateful_sets: Informer::new(way),
            jobs: Informer::new(way),
            budgets: Informer::new(way),
            pods: Informer::new(way),
            pods_of: Index::default(),
            revisions_of: Index::default(),
            replica_sets_of: Index::default(),
            jobs_of: Index::default(),
            pods_on: Index::default(),
        }
    }

    /// Owners come before what they own, so that a pod's owner is known when the pod is looked at.
    pub(super) fn sources(&mut self) -> Vec<&mut dyn Source> {
        vec![
            &mut self.nodes,
            &mut self.daemon_sets,
            &mut self.deployments,
            &mut self.stateful_sets,
            &mut self.jobs,
            &mut self.replica_sets,
            &mut self.revisions,
            &mut self.budgets,
            &mut self.pods,
        ]
    }

    /// Keeps the indexes in step with a pod.
    pub(super) fn index_pod(&mut self, change: &Change<Pod>) {
        let (old, new) = (change.old.as_deref(), change.new.as_deref());
        self.pods_of.shift(&change.key, old.and_then(controller_uid), new.and_then(controller_uid));
        self.pods_on.shift(&change.key, old.and_then(meant_for), new.and_then(meant_for));
    }

    /// The pods that `owner` controls.
    pub(super) fn pods_of(&self, owner: Option<&str>) -> impl Iterator<Item = &Arc<Pod>> {
        self.pods_of.get(owner.unwrap_or_default()).filter_map(|key| self.pods.cache.get(key))
    }

    /// The pods bound to a node.
    pub(super) fn pods_on(&self, node: &str) -> impl Iterator<Item = &Arc<Pod>> {
        self.pods_on.get(node).filter_map(|key| self.pods.cache.get(key))
    }

    pub(super) fn node(&self, name: &str) -> Option<&Arc<Node>> {
        self.nodes.cache.get(&Key::new("", name))
    }
}
