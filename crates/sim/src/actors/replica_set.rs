//! `ReplicaSet`s: keep a number of pods alive. A pod on its way out is replaced at once.

use std::sync::Arc;

use k8s_openapi::api::apps::v1::{ReplicaSet, ReplicaSetStatus};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;

use super::cache::Key;
use super::manager::Manager;
use super::object::{is_active, is_ready, is_terminating, node_of, phase, pod_of};
use super::way::Way;
use super::world::World;
use super::write::Write;

/// Creates missing pods, deletes surplus ones.
pub(super) fn look(way: &Way, world: &World, key: &Key) -> Vec<Write<Manager>> {
    let Some(set) = world.replica_sets.cache.get(key).filter(|set| !is_terminating(set.as_ref())) else {
        return Vec::new();
    };
    let Some(template) = &set.spec.template else { return Vec::new() };
    let mut pods = active(world, set);
    let wanted = usize::try_from(replicas(set)).unwrap_or(0);
    if pods.len() <= wanted {
        return (pods.len()..wanted).map(|_| Write::create(way, pod_of(set.as_ref(), template))).collect();
    }
    pods.sort_by_key(|pod| cost(pod));
    let surplus = pods.len() - wanted;
    pods.into_iter().take(surplus).map(|pod| Write::delete(way, pod.as_ref(), None)).collect()
}

/// Writes the counts if they differ from what is there.
pub(super) fn status(way: &Way, world: &World, key: &Key) -> Vec<Write<Manager>> {
    let Some(set) = world.replica_sets.cache.get(key) else { return Vec::new() };
    let pods = active(world, set);
    let count = |pods: usize| i32::try_from(pods).unwrap_or(i32::MAX);
    let ready = count(pods.iter().filter(|pod| is_ready(pod)).count());
    let status = ReplicaSetStatus {
        replicas: count(pods.len()),
        fully_labeled_replicas: Some(count(pods.len())),
        ready_replicas: Some(ready),
        available_replicas: Some(ready),
        observed_generation: set.metadata.generation,
        ..ReplicaSetStatus::default()
    };
    if set.status.as_ref() == Some(&status) {
        return Vec::new();
    }
    vec![Write::status(way, set.as_ref(), &status)]
}

pub(super) fn replicas(set: &ReplicaSet) -> i32 {
    set.spec.replicas.unwrap_or(1)
}

fn active<'a>(world: &'a World, set: &ReplicaSet) -> Vec<&'a Arc<Pod>> {
    world.pods_of(set.metadata.uid.as_deref()).filter(|pod| is_active(pod)).collect()
}

/// Who goes first when there are too many: not placed, not running, not ready, youngest.
fn cost(pod: &Pod) -> impl Ord + use<> {
    let created = pod.metadata.creation_timestamp.as_ref().map(|time| time.0);
    (
        node_of(pod).is_some(),
        phase(pod) == "Running",
        is_ready(pod),
        std::cmp::Reverse(created),
        pod.name_any(),
    )
}
