//! Garbage: dependents whose owner is gone, and pods on nodes that are gone.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::apps::v1::{DaemonSet, Deployment, ReplicaSet, StatefulSet};
use k8s_openapi::api::batch::v1::Job;
use kube::Resource;
use tokio::time::Instant;

use super::cache::{Cache, Key};
use super::manager::{Manager, Task};
use super::object::{controller_of, is_terminating};
use super::queue::Queue;
use super::way::Way;
use super::world::World;
use super::write::{Fold, Holds, Kind, Write};

/// The real pod collector's quarantine: the node may only have been re-registered.
const ORPHAN_QUARANTINE: Duration = Duration::from_secs(40);

/// Owners known to be gone, and owners that nobody has seen yet.
#[derive(Debug, Default)]
pub(super) struct Collector {
    gone: BTreeSet<String>,
    doubted: BTreeMap<String, (String, Key)>,
    confirmed: Vec<String>,
}

impl Collector {
    /// An owner was there and is not any more.
    pub(super) fn note_gone(&mut self, uid: String, queue: &mut Queue<Task>) {
        self.gone.insert(uid.clone());
        queue.add(Task::Collect(uid));
    }

    /// A dependent has come up whose owner may have gone before we looked.
    pub(super) fn note_dependent<K: Resource>(
        &mut self,
        world: &World,
        dependent: &K,
        queue: &mut Queue<Task>,
    ) {
        let Some(owner) = controller_of(dependent) else { return };
        let key = Key::new(dependent.meta().namespace.clone().unwrap_or_default(), owner.name.as_str());
        if !knows(world, &owner.kind, &key, &owner.uid) {
            self.doubted.insert(owner.uid.clone(), (owner.kind.clone(), key));
            queue.add(Task::Collect(owner.uid.clone()));
        }
    }

    /// Owners that turned out to be gone since the last call.
    pub(super) fn take_confirmed(&mut self) -> Vec<String> {
        std::mem::take(&mut self.confirmed)
    }

    pub(super) fn look(&mut self, way: &Way, world: &World, uid: &str) -> Vec<Write<Manager>> {
        if self.gone.contains(uid) {
            return dependents(way, world, uid);
        }
        let Some((kind, key)) = self.doubted.remove(uid) else { return Vec::new() };
        let uid = uid.to_owned();
        match kind.as_str() {
            "DaemonSet" => vec![confirm::<DaemonSet>(way, key, uid)],
            "Deployment" => vec![confirm::<Deployment>(way, key, uid)],
            "ReplicaSet" => vec![confirm::<ReplicaSet>(way, key, uid)],
            "StatefulSet" => vec![confirm::<StatefulSet>(way, key, uid)],
            "Job" => vec![confirm::<Job>(way, key, uid)],
            _ => Vec::new(),
        }
    }
}

/// A node is gone, or a pod names one that never was.
pub(super) fn note_orphan(node: &str, queue: &mut Queue<Task>) {
    queue.add_at(Task::CollectNode(node.to_owned()), Instant::now() + ORPHAN_QUARANTINE);
}

/// Pods of a node that did not come back are removed without waiting for a kubelet.
pub(super) fn look_node(way: &Way, world: &World, node: &str) -> Vec<Write<Manager>> {
    if world.node(node).is_some() {
        return Vec::new();
    }
    world.pods_on(node).map(|pod| Write::delete(way, pod.as_ref(), Some(0))).collect()
}

fn knows(world: &World, kind: &str, key: &Key, uid: &str) -> bool {
    fn has<K: Resource>(cache: &Cache<K>, key: &Key, uid: &str) -> bool {
        cache.get(key).is_some_and(|owner| owner.meta().uid.as_deref() == Some(uid))
    }
    match kind {
        "DaemonSet" => has(&world.daemon_sets.cache, key, uid),
        "Deployment" => has(&world.deployments.cache, key, uid),
        "ReplicaSet" => has(&world.replica_sets.cache, key, uid),
        "StatefulSet" => has(&world.stateful_sets.cache, key, uid),
        "Job" => has(&world.jobs.cache, key, uid),
        // Not ours to judge: custom resources are not watched here.
        _ => true,
    }
}

/// Asks the API itself: a watch that lags must not cost a running pod its life.
fn confirm<K: Kind>(way: &Way, key: Key, uid: String) -> Write<Manager> {
    let way = way.clone();
    Write::new(async move {
        let api = K::api(&way.client(), &key.namespace);
        let owner = api.get_opt(&key.name).await?;
        let gone = owner.is_none_or(|owner| owner.meta().uid.as_deref() != Some(uid.as_str()));
        let fold: Fold<Manager> = Box::new(move |manager| {
            if gone {
                manager.collector.gone.insert(uid.clone());
                manager.collector.confirmed.push(uid);
            }
        });
        Ok(fold)
    })
}

fn dependents(way: &Way, world: &World, uid: &str) -> Vec<Write<Manager>> {
    fn doomed<'a, K: Kind>(
        way: &'a Way,
        cache: &'a Cache<K>,
        keys: impl Iterator<Item = &'a Key> + 'a,
    ) -> impl Iterator<Item = Write<Manager>> + 'a
    where
        Manager: Holds<K>,
    {
        keys.filter_map(|key| cache.get(key))
            .filter(|object| !is_terminating(object.as_ref()))
            .map(|object| Write::delete(way, object.as_ref(), None))
    }
    let mut writes: Vec<_> = doomed(way, &world.pods.cache, world.pods_of.get(uid)).collect();
    writes.extend(doomed(way, &world.replica_sets.cache, world.replica_sets_of.get(uid)));
    writes.extend(doomed(way, &world.revisions.cache, world.revisions_of.get(uid)));
    writes.extend(doomed(way, &world.jobs.cache, world.jobs_of.get(uid)));
    writes
}
