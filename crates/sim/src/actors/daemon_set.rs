//! DaemonSets: one pod on every node that the template selects, cordoned or not.
//!
//! Works node by node: a change of one pod or one node costs one look at that node, and the counts in the status
//! are kept as sums. Pods are bound at creation; the real controller leaves that to the scheduler by an affinity,
//! which the pods carry here too.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::apps::v1::{ControllerRevision, DaemonSet, DaemonSetStatus};
use k8s_openapi::api::core::v1::{Node, Pod, Toleration};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::ResourceExt;
use serde_json::json;
use tokio::time::Instant;

use super::cache::Key;
use super::manager::{Manager, STATUS_DELAY, Task};
use super::object::{REVISION_HASH, controller_uid, is_ready, is_terminating, phase, pod_of, value};
use super::placement::{UNSCHEDULABLE, selects, taints, tolerates_all};
use super::queue::Queue;
use super::revision::{self, Step};
use super::way::Way;
use super::world::World;
use super::write::Write;

/// What the controller knows of each DaemonSet between looks.
#[derive(Debug, Default)]
pub(super) struct DaemonSets {
    sets: BTreeMap<Key, Set>,
}

#[derive(Debug, Default)]
struct Set {
    uid: Option<String>,
    /// The newest revision, and the generation it was found for.
    hash: String,
    observed: i64,
    slots: BTreeMap<String, Slot>,
    totals: Totals,
}

/// One node, as it counts in the status.
#[expect(clippy::struct_excessive_bools, reason = "each is one of the status' counts")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Slot {
    desired: bool,
    current: bool,
    updated: bool,
    ready: bool,
    misplaced: bool,
}

#[derive(Debug, Default)]
struct Totals {
    desired: i32,
    current: i32,
    updated: i32,
    ready: i32,
    misplaced: i32,
}

impl Totals {
    fn count(&mut self, slot: Slot, sign: i32) {
        let Slot { desired, current, updated, ready, misplaced } = slot;
        self.desired += sign * i32::from(desired);
        self.current += sign * i32::from(current);
        self.updated += sign * i32::from(updated);
        self.ready += sign * i32::from(ready);
        self.misplaced += sign * i32::from(misplaced);
    }
}

impl Set {
    fn put(&mut self, node: &str, slot: Slot) -> bool {
        let old = if slot == Slot::default() {
            self.slots.remove(node)
        } else {
            self.slots.insert(node.to_owned(), slot)
        };
        let old = old.unwrap_or_default();
        self.totals.count(old, -1);
        self.totals.count(slot, 1);
        old != slot
    }
}

impl DaemonSets {
    /// The template may have changed: find or make its revision, then look at every node.
    pub(super) fn look(
        &mut self,
        way: &Way,
        world: &World,
        key: &Key,
        queue: &mut Queue<Task>,
    ) -> Vec<Write<Manager>> {
        let Some(set) = world.daemon_sets.cache.get(key).filter(|set| !is_terminating(set.as_ref())) else {
            self.sets.remove(key);
            return Vec::new();
        };
        let known: Vec<Arc<ControllerRevision>> = world
            .revisions_of
            .get(set.metadata.uid.as_deref().unwrap_or_default())
            .filter_map(|key| world.revisions.cache.get(key).cloned())
            .collect();
        let hash = match revision::step(set, &known) {
            Step::Current(hash) => hash,
            Step::Renumber(revision, number) => {
                return vec![Write::patch(way, revision.as_ref(), json!({"revision": number}))];
            }
            Step::Create(revision) => return vec![Write::create(way, *revision)],
        };
        let state = self.sets.entry(key.clone()).or_default();
        let generation = set.metadata.generation.unwrap_or(0);
        if state.uid != set.metadata.uid {
            *state = Set { uid: set.metadata.uid.clone(), ..Set::default() };
        }
        let moved = state.hash != hash || state.observed != generation;
        (state.hash, state.observed) = (hash, generation);
        if !moved {
            return Vec::new();
        }
        for (node, _) in world.nodes.cache.iter() {
            queue.add(Task::DaemonNode(key.clone(), node.name.clone()));
        }
        queue.add(Task::DaemonStatus(key.clone()));
        let mut used: BTreeSet<String> =
            world.pods_of(set.metadata.uid.as_deref()).filter_map(|pod| hash_label(pod)).collect();
        used.insert(state.hash.clone());
        let spare = revision::surplus(set, &known, &used);
        spare.iter().map(|revision| Write::delete(way, revision.as_ref(), None)).collect()
    }

    /// One node of one DaemonSet: count it, and create or delete its pod.
    pub(super) fn look_node(
        &mut self,
        way: &Way,
        world: &World,
        (key, node_name): (&Key, &str),
        now: Instant,
        queue: &mut Queue<Task>,
    ) -> Vec<Write<Manager>> {
        let Some(set) = world.daemon_sets.cache.get(key) else { return Vec::new() };
        let Some(state) = self.sets.get_mut(key).filter(|state| state.uid == set.metadata.uid) else {
            return Vec::new();
        };
        let uid = set.metadata.uid.as_deref();
        let owned = |pod: &&Arc<Pod>| controller_uid(pod.as_ref()) == uid;
        let pods: Vec<&Arc<Pod>> = world.pods_on(node_name).filter(owned).collect();
        let node = world.node(node_name).map(AsRef::as_ref);
        let (run, stay) = node.map_or((false, false), |node| belongs(set, node));
        let kept = kept(&pods);
        let slot = slot(kept, run, &state.hash);
        if state.put(node_name, slot) {
            queue.add_at(Task::DaemonStatus(key.clone()), now + STATUS_DELAY);
        }
        if rolling(set).is_some() && state.totals.updated < state.totals.current {
            queue.add(Task::DaemonRoll(key.clone()));
        }
        if run && pods.is_empty() {
            return vec![Write::create(way, new_pod(set, &state.hash, node_name))];
        }
        let leaves = |pod: &&&Arc<Pod>| {
            let surplus = !stay || kept.is_none_or(|kept| kept.metadata.uid != pod.metadata.uid);
            !is_terminating(pod.as_ref()) && node.is_some() && surplus
        };
        pods.iter().filter(leaves).map(|pod| Write::delete(way, pod.as_ref(), None)).collect()
    }

    /// `RollingUpdate`: replaces outdated pods, never more at once than may be unavailable.
    pub(super) fn roll(&mut self, way: &Way, world: &World, key: &Key) -> Vec<Write<Manager>> {
        let Some(set) = world.daemon_sets.cache.get(key) else { return Vec::new() };
        let Some(state) = self.sets.get(key) else { return Vec::new() };
        let Some(limit) = rolling(set) else { return Vec::new() };
        let limit = scaled(limit, state.totals.desired).max(1);
        let unavailable = state.slots.values().filter(|slot| slot.desired && !slot.ready).count();
        let mut free = usize::try_from(limit).unwrap_or(1).saturating_sub(unavailable);
        let uid = set.metadata.uid.as_deref();
        let mut writes = Vec::new();
        for (node, _) in state.slots.iter().filter(|(_, slot)| slot.current && !slot.updated) {
            let mut pods = world.pods_on(node).filter(|pod| controller_uid(pod.as_ref()) == uid);
            let Some(pod) = pods.find(|pod| !is_terminating(pod.as_ref())) else { continue };
            if is_ready(pod) {
                if free == 0 {
                    continue;
                }
                free -= 1;
            }
            writes.push(Write::delete(way, pod.as_ref(), None));
        }
        writes
    }

    /// Writes the counts if they differ from what is there.
    pub(super) fn status(&mut self, way: &Way, world: &World, key: &Key) -> Vec<Write<Manager>> {
        let Some(set) = world.daemon_sets.cache.get(key) else { return Vec::new() };
        let Some(state) = self.sets.get(key).filter(|state| state.uid == set.metadata.uid) else {
            return Vec::new();
        };
        let Totals { desired, current, updated, ready, misplaced } = state.totals;
        let status = DaemonSetStatus {
            current_number_scheduled: current,
            desired_number_scheduled: desired,
            number_misscheduled: misplaced,
            number_ready: ready,
            number_available: Some(ready),
            number_unavailable: Some(desired - ready),
            updated_number_scheduled: Some(updated),
            observed_generation: Some(state.observed),
            ..DaemonSetStatus::default()
        };
        if set.status.as_ref() == Some(&status) {
            return Vec::new();
        }
        vec![Write::status(way, set.as_ref(), &status)]
    }
}

/// Whether a pod should be started on the node, and whether one that is there may stay.
fn belongs(set: &DaemonSet, node: &Node) -> (bool, bool) {
    let Some(mut spec) = set.spec.template.spec.clone() else { return (false, false) };
    if !selects(&spec, node) {
        return (false, false);
    }
    spec.tolerations.get_or_insert_default().extend(tolerations());
    let taints = taints(node);
    (
        tolerates_all(&spec, &taints, &["NoSchedule", "NoExecute"]),
        tolerates_all(&spec, &taints, &["NoExecute"]),
    )
}

/// What every DaemonSet pod tolerates.
fn tolerations() -> impl Iterator<Item = Toleration> {
    let all = [
        ("node.kubernetes.io/not-ready", "NoExecute"),
        ("node.kubernetes.io/unreachable", "NoExecute"),
        ("node.kubernetes.io/disk-pressure", "NoSchedule"),
        ("node.kubernetes.io/memory-pressure", "NoSchedule"),
        ("node.kubernetes.io/pid-pressure", "NoSchedule"),
        (UNSCHEDULABLE, "NoSchedule"),
    ];
    all.into_iter().map(|(key, effect)| Toleration {
        key: Some(key.into()),
        effect: Some(effect.into()),
        operator: Some("Exists".into()),
        ..Toleration::default()
    })
}

fn new_pod(set: &DaemonSet, hash: &str, node: &str) -> Pod {
    let mut pod = pod_of(set, &set.spec.template);
    pod.metadata.labels.get_or_insert_default().insert(REVISION_HASH.into(), hash.to_owned());
    if let Some(spec) = &mut pod.spec {
        spec.tolerations.get_or_insert_default().extend(tolerations());
        let pinned = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
            {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
        ]}}});
        spec.affinity = serde_json::from_value(pinned).ok();
    }
    pod
}

/// Of several pods on a node the oldest stays; a finished one never does.
fn kept<'a>(pods: &[&'a Arc<Pod>]) -> Option<&'a Arc<Pod>> {
    let running = pods
        .iter()
        .filter(|pod| !is_terminating(pod.as_ref()) && !matches!(phase(pod), "Failed" | "Succeeded"));
    running.min_by_key(|pod| (pod.metadata.creation_timestamp.clone(), pod.name_any())).copied()
}

fn slot(kept: Option<&Arc<Pod>>, desired: bool, hash: &str) -> Slot {
    Slot {
        desired,
        current: desired && kept.is_some(),
        updated: desired && kept.is_some_and(|pod| hash_label(pod).as_deref() == Some(hash)),
        ready: desired && kept.is_some_and(|pod| is_ready(pod)),
        misplaced: !desired && kept.is_some(),
    }
}

fn hash_label(pod: &Pod) -> Option<String> {
    value(pod.metadata.labels.as_ref(), REVISION_HASH).map(str::to_owned)
}

/// How many may be unavailable in a rolling update; `None` for `OnDelete`.
fn rolling(set: &DaemonSet) -> Option<IntOrString> {
    let strategy = set.spec.update_strategy.clone().unwrap_or_default();
    if strategy.type_.as_deref() == Some("OnDelete") {
        return None;
    }
    Some(strategy.rolling_update.and_then(|rolling| rolling.max_unavailable).unwrap_or(IntOrString::Int(1)))
}

/// A number, or a percentage of `total`, rounded up.
pub(super) fn scaled(value: IntOrString, total: i32) -> i32 {
    match value {
        IntOrString::Int(number) => number,
        IntOrString::String(percent) => {
            let percent: i64 = percent.trim_end_matches('%').parse().unwrap_or(0);
            i32::try_from((percent * i64::from(total) + 99).div_euclid(100)).unwrap_or(total)
        }
    }
}
