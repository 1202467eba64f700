//! The scheduler: binds pods to nodes that are ready, allowed and have room. Always the same choice for the same
//! cluster: fewest unwelcome taints, then fewest devices in use, then fewest pods, then name.
//!
//! A pod that fits nowhere is only tried again on nodes that got better, so a full fleet stays cheap.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, Pod, PodCondition, PodSpec, PodStatus, Taint};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::cache::{Change, Key};
use super::clock::Clock;
use super::manager::Manager;
use super::object::{is_finished, is_terminating, node_of, pinned_to, pod_condition};
use super::placement::{is_rival, rivals, selects, taints, tolerates, tolerates_all};
use super::quantity::milli;
use super::way::Way;
use super::world::World;
use super::write::{Fold, Holds, Write};

type Amounts = BTreeMap<String, i64>;

/// What is on the nodes, and what waits for one.
#[derive(Debug, Default)]
pub(super) struct Scheduler {
    nodes: BTreeMap<String, Room>,
    /// The nodes from best to worst for a pod that tolerates nothing: the first that fits is its node.
    order: BTreeSet<Place>,
    pending: BTreeSet<Key>,
    /// Pending pods that have not been tried on every node yet.
    untried: BTreeSet<Key>,
    /// Nodes that may take what they could not take before.
    better: BTreeSet<String>,
}

/// Closed to the intolerant, unwelcome taints, devices in use, pods, name.
type Place = (bool, usize, i64, i64, String);

/// A node's offer and load.
#[derive(Debug, Default)]
struct Room {
    node: Option<Arc<Node>>,
    open: bool,
    taints: Vec<Taint>,
    offered: Amounts,
    used: Amounts,
    /// Devices in use, of whatever kind.
    devices: i64,
    pods: i64,
}

impl Scheduler {
    /// Returns whether there may be something to bind.
    pub(super) fn note_pod(&mut self, change: &Change<Pod>) -> bool {
        let (old, new) = (change.old.as_deref().and_then(load), change.new.as_deref().and_then(load));
        if old.map(|(node, _)| node) != new.map(|(node, _)| node) {
            if let Some((node, spec)) = old {
                self.count(node, spec, -1);
                self.better.insert(node.to_owned());
            }
            if let Some((node, spec)) = new {
                self.count(node, spec, 1);
            }
        }
        let waits = change
            .new
            .as_deref()
            .is_some_and(|pod| node_of(pod).is_none() && !is_terminating(pod) && !is_finished(pod));
        if !waits {
            self.pending.remove(&change.key);
            self.untried.remove(&change.key);
        } else if self.pending.insert(change.key.clone()) {
            self.untried.insert(change.key.clone());
        }
        !self.untried.is_empty() || !self.pending.is_empty() && !self.better.is_empty()
    }

    /// Returns whether there may be something to bind.
    pub(super) fn note_node(&mut self, change: &Change<Node>) -> bool {
        let name = &change.key.name;
        self.leave_order(name);
        let room = self.nodes.entry(name.clone()).or_default();
        room.node.clone_from(&change.new);
        room.open = change.new.as_deref().is_some_and(is_open);
        room.taints = change.new.as_deref().map(taints).unwrap_or_default();
        room.offered = change.new.as_deref().map(offered).unwrap_or_default();
        if room.node.is_none() && room.pods == 0 {
            self.nodes.remove(name);
        }
        self.join_order(name);
        self.better.insert(name.clone());
        !self.pending.is_empty()
    }

    fn leave_order(&mut self, node: &str) {
        if let Some(place) = self.nodes.get(node).map(|room| room.place(node)) {
            self.order.remove(&place);
        }
    }

    fn join_order(&mut self, node: &str) {
        self.order.extend(self.nodes.get(node).map(|room| room.place(node)));
    }

    fn count(&mut self, node: &str, spec: &PodSpec, sign: i64) {
        self.leave_order(node);
        let room = self.nodes.entry(node.to_owned()).or_default();
        room.pods += sign;
        for (resource, amount) in requests(spec) {
            if resource.contains('/') {
                room.devices += sign * amount;
            }
            *room.used.entry(resource).or_default() += sign * amount;
        }
        self.join_order(node);
    }

    /// Finds a node for every pod that can have one.
    pub(super) fn look(&mut self, way: &Way, world: &World, clock: &Clock) -> Vec<Write<Manager>> {
        let untried = std::mem::take(&mut self.untried);
        let better = std::mem::take(&mut self.better);
        let mut writes = Vec::new();
        // Placed in this round; counted for good when the bindings' answers come back.
        let mut assumed: Vec<(String, Arc<Pod>)> = Vec::new();
        for key in self.pending.clone() {
            let Some(pod) = world.pods.cache.get(&key) else { continue };
            let Some(spec) = &pod.spec else { continue };
            let among = if untried.contains(&key) { None } else { Some(&better) };
            let avoid = rivals_of(pod, spec, world, &assumed);
            if let Some(node) = self.choose(spec, among, &avoid) {
                self.count(&node, spec, 1);
                // Until the binding is known to have worked.
                self.untried.insert(key.clone());
                writes.push(bind(way, pod, key, node.clone()));
                assumed.push((node, pod.clone()));
            } else if pod_condition(pod, "PodScheduled").is_none() {
                writes.push(Write::status(way, pod.as_ref(), &unschedulable(pod, clock)));
            }
        }
        for (node, pod) in &assumed {
            pod.spec.iter().for_each(|spec| self.count(node, spec, -1));
        }
        writes
    }

    fn choose(
        &self,
        spec: &PodSpec,
        among: Option<&BTreeSet<String>>,
        avoid: &BTreeSet<String>,
    ) -> Option<String> {
        let wanted = requests(spec);
        let fits = |(name, room): &(&String, &Room)| !avoid.contains(*name) && room.takes(spec, &wanted);
        let best = |(name, room)| (Room::rank(room, spec), name);
        if let Some(only) = pinned_to(spec) {
            let there = self.nodes.get_key_value(only).filter(|place| fits(place));
            return there.map(|(name, _)| name.clone());
        }
        let among = among.map(|names| names.iter().filter_map(|name| self.nodes.get_key_value(name)));
        let chosen = match among {
            Some(nodes) => nodes.filter(fits).map(best).min().map(|(_, name)| name),
            None if tolerates_nothing(spec) => {
                let places = self.order.iter().filter_map(|(.., name)| self.nodes.get_key_value(name));
                places.into_iter().find(fits).map(|(name, _)| name)
            }
            None => self.nodes.iter().filter(fits).map(best).min().map(|(_, name)| name),
        };
        chosen.cloned()
    }
}

impl Room {
    fn takes(&self, spec: &PodSpec, wanted: &Amounts) -> bool {
        let Some(node) = self.node.as_ref().filter(|_| self.open) else { return false };
        let room_for_one = self.offered.get("pods").is_none_or(|pods| self.pods * 1000 < *pods);
        let fits = wanted.iter().all(|(resource, amount)| {
            let offered = self.offered.get(resource).copied().unwrap_or(0);
            *amount == 0 || self.used.get(resource).copied().unwrap_or(0) + amount <= offered
        });
        room_for_one
            && fits
            && tolerates_all(spec, &self.taints, &["NoSchedule", "NoExecute"])
            && selects(spec, node)
    }

    fn rank(&self, spec: &PodSpec) -> (usize, i64, i64) {
        let unwelcome = |taint: &&Taint| taint.effect == "PreferNoSchedule" && !tolerates(spec, taint);
        (self.taints.iter().filter(unwelcome).count(), self.devices, self.pods)
    }

    fn place(&self, name: &str) -> Place {
        let soft = self.taints.iter().filter(|taint| taint.effect == "PreferNoSchedule").count();
        (!self.open || soft < self.taints.len(), soft, self.devices, self.pods, name.to_owned())
    }
}

/// The nodes with pods beside which `pod` must not be, those placed in this round included.
fn rivals_of(pod: &Pod, spec: &PodSpec, world: &World, assumed: &[(String, Arc<Pod>)]) -> BTreeSet<String> {
    let rivals = rivals(spec);
    if rivals.is_empty() {
        return BTreeSet::new();
    }
    let is_rival = |other: &Pod| {
        other.metadata.namespace == pod.metadata.namespace && is_rival(&rivals, other) && !is_finished(other)
    };
    let bound = world.pods.cache.iter().filter_map(|(_, other)| Some((node_of(other)?, other)));
    let placed = assumed.iter().map(|(node, other)| (node.as_str(), other));
    bound.chain(placed).filter(|(_, other)| is_rival(other)).map(|(node, _)| node.to_owned()).collect()
}

/// True of most pods. What every pod gets for dead nodes has to do with staying, not with going there.
fn tolerates_nothing(spec: &PodSpec) -> bool {
    spec.tolerations.iter().flatten().all(|toleration| toleration.effect.as_deref() == Some("NoExecute"))
}

/// Ready. A cordon counts as a taint, because some pods tolerate it.
fn is_open(node: &Node) -> bool {
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions.into_iter().flatten().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

fn offered(node: &Node) -> Amounts {
    let status = node.status.as_ref();
    let amounts = status.and_then(|status| status.allocatable.as_ref().or(status.capacity.as_ref()));
    amounts.into_iter().flatten().map(|(resource, quantity)| (resource.clone(), milli(quantity))).collect()
}

/// A pod that takes room on a node. Terminating pods do, until they are gone.
fn load(pod: &Pod) -> Option<(&str, &PodSpec)> {
    if is_finished(pod) {
        return None;
    }
    Some((node_of(pod)?, pod.spec.as_ref()?))
}

fn requests(spec: &PodSpec) -> Amounts {
    let mut total = Amounts::new();
    for container in &spec.containers {
        let resources = container.resources.as_ref();
        // For devices the limit is the request.
        let limits = resources.and_then(|resources| resources.limits.as_ref());
        let requests = resources.and_then(|resources| resources.requests.as_ref());
        let mut wanted: BTreeMap<&String, &Quantity> = limits.into_iter().flatten().collect();
        wanted.extend(requests.into_iter().flatten());
        for (resource, quantity) in wanted {
            *total.entry(resource.clone()).or_default() += milli(quantity);
        }
    }
    total
}

fn bind(way: &Way, pod: &Pod, key: Key, node: String) -> Write<Manager> {
    let (way, uid) = (way.clone(), pod.metadata.uid.clone());
    Write::new(async move {
        way.bind(&key, uid.as_deref(), &node).await?;
        let fold: Fold<Manager> = Box::new(move |manager| {
            let pods = <Manager as Holds<Pod>>::cache(manager);
            pods.adjust(&key, |pod| pod.spec.get_or_insert_default().node_name = Some(node));
        });
        Ok(fold)
    })
}

fn unschedulable(pod: &Pod, clock: &Clock) -> PodStatus {
    let condition = PodCondition {
        type_: "PodScheduled".into(),
        status: "False".into(),
        reason: Some("Unschedulable".into()),
        message: Some("no node is ready, allowed and has room".into()),
        last_transition_time: Some(clock.now()),
        ..PodCondition::default()
    };
    let mut conditions = pod.status.as_ref().and_then(|status| status.conditions.clone()).unwrap_or_default();
    conditions.push(condition);
    PodStatus { phase: Some("Pending".into()), conditions: Some(conditions), ..PodStatus::default() }
}
