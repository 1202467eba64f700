//! `StatefulSet`s: numbered pods; a successor comes only when its predecessor of the same name is gone.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::apps::v1::{StatefulSet, StatefulSetStatus};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;

use super::cache::Key;
use super::manager::Manager;
use super::object::{
    REVISION_HASH, hash_name, is_active, is_finished, is_ready, is_terminating, pod_of, value,
};
use super::way::Way;
use super::world::World;
use super::write::Write;

/// Creates what is missing in order, removes what is too much from the top, replaces outdated pods one by one.
pub(super) fn look(way: &Way, world: &World, key: &Key) -> Vec<Write<Manager>> {
    let Some(set) = world.stateful_sets.cache.get(key).filter(|set| !is_terminating(set.as_ref())) else {
        return Vec::new();
    };
    let spec = &set.spec;
    let hash = hash_name(&spec.template);
    let wanted = spec.replicas.unwrap_or(1);
    let pods: BTreeMap<i32, &Arc<Pod>> = world
        .pods_of(set.metadata.uid.as_deref())
        .filter_map(|pod| Some((ordinal(set, pod)?, pod)))
        .collect();
    let mut writes = steps(way, set, &pods, wanted, &hash);
    let status = status(set, &pods, &hash);
    if set.status.as_ref() != Some(&status) {
        writes.push(Write::status(way, set.as_ref(), &status));
    }
    writes
}

fn steps(
    way: &Way,
    set: &StatefulSet,
    pods: &BTreeMap<i32, &Arc<Pod>>,
    wanted: i32,
    hash: &str,
) -> Vec<Write<Manager>> {
    let spec = &set.spec;
    let parallel = spec.pod_management_policy.as_deref() == Some("Parallel");
    let mut writes = Vec::new();
    for number in 0..wanted {
        let waits = match pods.get(&number) {
            None => {
                writes.push(Write::create(way, new_pod(set, number, hash)));
                true
            }
            Some(pod) if is_finished(pod) && !is_terminating(pod.as_ref()) => {
                writes.push(Write::delete(way, pod.as_ref(), None));
                true
            }
            Some(pod) => !is_active(pod) || !is_ready(pod),
        };
        if waits && !parallel {
            return writes;
        }
    }
    let leaving = pods.iter().rev().find(|(number, pod)| **number >= wanted && !is_terminating(pod.as_ref()));
    let on_delete =
        spec.update_strategy.as_ref().and_then(|strategy| strategy.type_.as_deref()) == Some("OnDelete");
    let outdated =
        pods.iter().rev().find(|(_, pod)| is_active(pod) && revision(pod) != Some(hash) && !on_delete);
    let next = if writes.is_empty() { leaving.or(outdated) } else { None };
    writes.extend(next.map(|(_, pod)| Write::delete(way, pod.as_ref(), None)));
    writes
}

fn ordinal(set: &StatefulSet, pod: &Pod) -> Option<i32> {
    pod.metadata.name.as_deref()?.strip_prefix(&set.name_any())?.strip_prefix('-')?.parse().ok()
}

fn revision(pod: &Pod) -> Option<&str> {
    value(pod.metadata.labels.as_ref(), REVISION_HASH)
}

fn new_pod(set: &StatefulSet, number: i32, hash: &str) -> Pod {
    let mut pod = pod_of(set, &set.spec.template);
    let name = format!("{}-{number}", set.name_any());
    let labels = pod.metadata.labels.get_or_insert_default();
    labels.insert(REVISION_HASH.into(), hash.to_owned());
    labels.insert("statefulset.kubernetes.io/pod-name".into(), name.clone());
    labels.insert("apps.kubernetes.io/pod-index".into(), number.to_string());
    pod.metadata.generate_name = None;
    if let Some(spec) = &mut pod.spec {
        spec.hostname = Some(name.clone());
    }
    pod.metadata.name = Some(name);
    pod
}

fn status(set: &StatefulSet, pods: &BTreeMap<i32, &Arc<Pod>>, hash: &str) -> StatefulSetStatus {
    let count = |test: &dyn Fn(&Pod) -> bool| {
        i32::try_from(pods.values().filter(|pod| is_active(pod) && test(pod)).count()).unwrap_or(i32::MAX)
    };
    let ready = count(&is_ready);
    let updated = count(&|pod| revision(pod) == Some(hash));
    StatefulSetStatus {
        replicas: count(&|_| true),
        ready_replicas: Some(ready),
        available_replicas: Some(ready),
        current_replicas: Some(updated),
        updated_replicas: Some(updated),
        update_revision: Some(hash.to_owned()),
        current_revision: Some(hash.to_owned()),
        observed_generation: set.metadata.generation,
        ..StatefulSetStatus::default()
    }
}
