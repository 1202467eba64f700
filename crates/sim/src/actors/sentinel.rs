//! NVSentinel, as much of it as an upgrade meets. Works as soon as its circuit breaker's ConfigMap is there.
//!
//! A driver that is away takes DCGM with it. That becomes a node condition, and an event: the node is quarantined, with a
//! cordon, unless its label says otherwise at the moment at which the event is processed. Too many quarantines trip the
//! breaker; then events only queue up, healthy ones too, until a person closes it, and are all processed then.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use k8s_openapi::api::core::v1::{ConfigMap, Node, NodeCondition, Pod};
use kube::ResourceExt;
use pitcrew_core::contract::nvsentinel;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::cache::{Cache, Index, Informer, Key, Source};
use super::clock::Clock;
use super::drive::Actor;
use super::object::{is_ready, is_terminating, node_of, value};
use super::operator::{DRIVER_COMPONENT, GPU_PRESENT};
use super::queue::Queue;
use super::way::{Part, Way};
use super::write::{Holds, Write};

/// DCGM is missed after so long.
const MISSED_AFTER: Duration = Duration::from_secs(5);
/// Conditions are looked at again, whatever they say.
const HEARTBEAT: Duration = Duration::from_secs(10);
/// So many nodes, of all with GPUs, …
const BREAKER_PERCENT: usize = 50;
/// … in so long.
const BREAKER_WINDOW: Duration = Duration::from_mins(5);

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Task {
    /// Look at a node's DCGM.
    Check(String),
    /// Write its condition again.
    Heartbeat(String),
    /// Process events.
    Events,
}

/// A health event.
#[derive(Clone, Debug)]
struct Event {
    node: String,
    healthy: bool,
}

pub(super) struct Sentinel {
    way: Way,
    clock: Clock,
    nodes: Informer<Node>,
    pods: Informer<Pod>,
    breaker: Informer<ConfigMap>,
    drivers_on: Index,
    /// Nodes on which DCGM has ever been.
    seen: BTreeSet<String>,
    /// Since when DCGM is away, and whether that was told.
    away: BTreeMap<String, (Instant, bool)>,
    events: VecDeque<Event>,
    /// When nodes were quarantined.
    quarantines: BTreeMap<String, Instant>,
}

impl Sentinel {
    pub(super) fn new(way: Way, clock: Clock) -> Self {
        let breaker = Part { namespace: nvsentinel::NAMESPACE, name: nvsentinel::BREAKER };
        Self {
            nodes: Informer::new(&way),
            pods: Informer::new(&way),
            breaker: Informer::of_part(&way, breaker),
            clock,
            way,
            drivers_on: Index::default(),
            seen: BTreeSet::new(),
            away: BTreeMap::new(),
            events: VecDeque::new(),
            quarantines: BTreeMap::new(),
        }
    }

    fn breaker(&self) -> Option<&ConfigMap> {
        self.breaker.cache.get(&Key::new(nvsentinel::NAMESPACE, nvsentinel::BREAKER)).map(AsRef::as_ref)
    }

    fn has_dcgm(&self, node: &str) -> bool {
        let mut drivers = self.drivers_on.get(node).filter_map(|key| self.pods.cache.get(key));
        drivers.any(|pod| is_ready(pod) && !is_terminating(pod.as_ref()))
    }

    /// Tells of a change, after a while if it is one for the worse.
    fn check(&mut self, name: &str, queue: &mut Queue<Task>) -> Vec<Write<Self>> {
        let now = Instant::now();
        if self.has_dcgm(name) {
            self.seen.insert(name.to_owned());
            let Some((_, true)) = self.away.remove(name) else { return Vec::new() };
            return self.tell(name, true, queue);
        }
        if !self.seen.contains(name) {
            return Vec::new();
        }
        let (since, told) = *self.away.entry(name.to_owned()).or_insert((now, false));
        if told {
            return Vec::new();
        }
        if now < since + MISSED_AFTER {
            queue.add_at(Task::Check(name.to_owned()), since + MISSED_AFTER);
            return Vec::new();
        }
        self.away.insert(name.to_owned(), (since, true));
        self.tell(name, false, queue)
    }

    fn tell(&mut self, name: &str, healthy: bool, queue: &mut Queue<Task>) -> Vec<Write<Self>> {
        // Where everything is switched off, nothing is published at all.
        let Some(node) = self.node(name).filter(|node| !is_out(node, nvsentinel::MANAGED_LABEL)) else {
            return Vec::new();
        };
        let write = self.condition(node, healthy);
        self.events.push_back(Event { node: name.to_owned(), healthy });
        queue.add(Task::Events);
        vec![write]
    }

    fn node(&self, name: &str) -> Option<&Node> {
        self.nodes.cache.get(&Key::new("", name)).map(AsRef::as_ref)
    }

    fn condition(&self, node: &Node, healthy: bool) -> Write<Self> {
        let now = Some(self.clock.now());
        let kind = nvsentinel::DCGM_CONDITION;
        let condition = NodeCondition {
            type_: kind.to_owned(),
            status: if healthy { "False" } else { "True" }.to_owned(),
            reason: Some(format!("{kind}Is{}Healthy", if healthy { "" } else { "Not" })),
            last_heartbeat_time: now.clone(),
            last_transition_time: now,
            ..NodeCondition::default()
        };
        Write::merge_status(&self.way, node, &json!({"conditions": [condition]}))
    }

    /// Writes a node's condition again, as long as it has one.
    fn beat(&self, name: &str, queue: &mut Queue<Task>) -> Vec<Write<Self>> {
        queue.add_at(Task::Heartbeat(name.to_owned()), Instant::now() + HEARTBEAT);
        let Some(node) = self.node(name).filter(|node| !is_out(node, nvsentinel::MANAGED_LABEL)) else {
            return Vec::new();
        };
        let healthy = !self.away.get(name).is_some_and(|(_, told)| *told);
        vec![self.condition(node, healthy)]
    }

    /// Processes events in their order, until one changes a node: what comes next may be about the same one. Nothing more
    /// once the breaker has tripped.
    fn process(&mut self) -> Vec<Write<Self>> {
        let mut writes = Vec::new();
        let Some(breaker) = self.breaker().cloned() else {
            self.events.clear();
            return writes;
        };
        if tripped(&breaker) {
            return writes;
        }
        while let Some(event) = self.events.pop_front() {
            let Some(node) = self.node(&event.node).cloned() else { continue };
            let quarantined = node.annotations().contains_key(nvsentinel::QUARANTINE_ANNOTATIONS);
            if event.healthy && quarantined {
                writes.push(Write::patch(&self.way, &node, released(&node)));
                break;
            } else if !event.healthy && !quarantined && !opted_out(&node) {
                self.quarantines.insert(event.node, Instant::now());
                writes.push(Write::patch(&self.way, &node, quarantined_by_us(&node)));
                if self.is_too_many() {
                    let tripped = json!({"data": {"status": nvsentinel::TRIPPED}});
                    writes.push(Write::patch(&self.way, &breaker, tripped));
                }
                break;
            }
        }
        writes
    }

    fn is_too_many(&mut self) -> bool {
        let now = Instant::now();
        self.quarantines.retain(|_, at| now < *at + BREAKER_WINDOW);
        let gpu = |node: &Node| value(node.metadata.labels.as_ref(), GPU_PRESENT) == Some("true");
        let all = self.nodes.cache.iter().filter(|(_, node)| gpu(node)).count();
        self.quarantines.len() >= (all * BREAKER_PERCENT).div_ceil(100)
    }
}

fn tripped(breaker: &ConfigMap) -> bool {
    breaker.data.as_ref().and_then(|data| data.get("status")).is_some_and(|s| s == nvsentinel::TRIPPED)
}

fn is_out(node: &Node, label: &str) -> bool {
    value(node.metadata.labels.as_ref(), label) == Some("false")
}

fn opted_out(node: &Node) -> bool {
    is_out(node, nvsentinel::OPT_OUT_LABEL) || is_out(node, nvsentinel::MANAGED_LABEL)
}

pub(crate) fn quarantined_by_us(node: &Node) -> Value {
    let before = node.spec.as_ref().and_then(|spec| spec.unschedulable).unwrap_or(false);
    let event = json!([{"checkName": nvsentinel::DCGM_CONDITION}]).to_string();
    let cordon = if before { nvsentinel::CORDON_BEFORE_ANNOTATION } else { nvsentinel::CORDONED_ANNOTATION };
    json!({
        "metadata": {
            "annotations": {nvsentinel::QUARANTINE_ANNOTATIONS: event, cordon: "True"},
            "labels": {nvsentinel::STATE_LABEL: "quarantined"},
        },
        "spec": {"unschedulable": true},
    })
}

pub(crate) fn released(node: &Node) -> Value {
    let ours = node.annotations().contains_key(nvsentinel::CORDONED_ANNOTATION);
    let annotations = json!({
        nvsentinel::QUARANTINE_ANNOTATIONS: null,
        nvsentinel::CORDONED_ANNOTATION: null,
        nvsentinel::CORDON_BEFORE_ANNOTATION: null,
    });
    let mut patch =
        json!({"metadata": {"annotations": annotations, "labels": {nvsentinel::STATE_LABEL: null}}});
    if ours {
        patch["spec"] = json!({"unschedulable": null});
    }
    patch
}

impl Actor for Sentinel {
    type Task = Task;

    fn sources(&mut self) -> Vec<&mut dyn Source> {
        vec![&mut self.nodes, &mut self.pods, &mut self.breaker]
    }

    fn route(&mut self, queue: &mut Queue<Task>) {
        for change in self.nodes.cache.take_changes() {
            if !self.events.is_empty() {
                queue.add(Task::Events);
            }
            if change.old.is_none() {
                queue.add(Task::Check(change.key.name.clone()));
                queue.add(Task::Heartbeat(change.key.name));
            }
        }
        for change in self.pods.cache.take_changes() {
            let driver = |pod: &&Pod| {
                value(pod.metadata.labels.as_ref(), "app.kubernetes.io/component") == Some(DRIVER_COMPONENT)
            };
            let place = |pod: Option<&Pod>| pod.filter(driver).and_then(node_of).map(str::to_owned);
            let (old, new) = (place(change.old.as_deref()), place(change.new.as_deref()));
            self.drivers_on.shift(&change.key, old.as_deref(), new.as_deref());
            for node in [old, new].into_iter().flatten() {
                queue.add(Task::Check(node));
            }
        }
        if !self.breaker.cache.take_changes().is_empty() {
            queue.add(Task::Events);
        }
    }

    fn look(&mut self, task: &Task, queue: &mut Queue<Task>) -> Vec<Write<Self>> {
        if self.breaker().is_none() {
            return Vec::new();
        }
        match task {
            Task::Check(node) => self.check(node, queue),
            Task::Heartbeat(node) => self.beat(node, queue),
            Task::Events => self.process(),
        }
    }
}

impl Holds<Node> for Sentinel {
    fn cache(&mut self) -> &mut Cache<Node> {
        &mut self.nodes.cache
    }
}

impl Holds<Pod> for Sentinel {
    fn cache(&mut self) -> &mut Cache<Pod> {
        &mut self.pods.cache
    }
}

impl Holds<ConfigMap> for Sentinel {
    fn cache(&mut self) -> &mut Cache<ConfigMap> {
        &mut self.breaker.cache
    }
}
