//! What a recorder sees of the nodes: as they are now, and each one's way through the states.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::time::Duration;

use futures::stream::StreamExt;
use k8s_openapi::api::core::v1::Node;
use kube::runtime::watcher;
use kube::{Api, ResourceExt};
use pitcrew_core::contract::{State, VISIT_ANNOTATION};
use tokio::sync::watch;
use tokio::time::Instant;

use super::STATE_LABEL;

/// What was seen of the nodes from the first change of version on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// Each node's states, in order, without repetitions.
    pub states: BTreeMap<String, Vec<State>>,
    /// The most nodes that were cordoned at the same time.
    pub most_out: usize,
    /// The most nodes that were on a visit at the same time.
    pub most_visited: usize,
}

impl Trace {
    /// As text, for people and snapshots: the nodes with the same path together.
    pub fn text(&self) -> String {
        let mut paths: BTreeMap<Vec<State>, BTreeSet<&str>> = BTreeMap::new();
        for (node, path) in &self.states {
            paths.entry(path.clone()).or_default().insert(node);
        }
        let mut text = String::new();
        for (path, nodes) in paths {
            let nodes: Vec<&str> = nodes.into_iter().collect();
            let path: Vec<String> = path.iter().map(ToString::to_string).collect();
            let _ = writeln!(text, "{}: {}", nodes.join(" "), path.join(" > "));
        }
        text
    }
}

/// The nodes as the recorder last saw them.
#[derive(Clone, Debug, Default)]
pub struct Scene {
    /// Each node's state.
    pub states: BTreeMap<String, State>,
    /// Cordoned nodes.
    pub cordoned: BTreeSet<String>,
    /// When each node was last seen to become so.
    pub cordoned_at: BTreeMap<String, Instant>,
    /// Every set of nodes that were cordoned at the same time.
    pub together: BTreeSet<BTreeSet<String>>,
    /// Nodes with a visit record.
    pub visited: BTreeSet<String>,
    /// Nodes on which a driver has ever asked whether it may be loaded.
    pub asked: BTreeSet<String>,
    trace: Trace,
    pub(super) recording: bool,
}

impl Scene {
    /// The state of a node.
    pub fn state(&self, node: &str) -> State {
        self.states.get(node).copied().unwrap_or_default()
    }
    /// How many nodes are in a state.
    pub fn count(&self, state: State) -> usize {
        self.states.values().filter(|s| **s == state).count()
    }
    /// Whether every node is in one of these.
    pub fn all(&self, state: State) -> bool {
        !self.states.is_empty() && self.count(state) == self.states.len()
    }

    /// What was recorded.
    pub fn into_trace(self) -> Trace {
        self.trace
    }

    fn see(&mut self, node: &Node) {
        let name = node.name_any();
        let label = node.labels().get(STATE_LABEL).map_or("", String::as_str);
        let state = label.parse().unwrap_or_default();
        let cordoned = node.spec.as_ref().and_then(|s| s.unschedulable).unwrap_or(false);
        let visited = node.annotations().contains_key(VISIT_ANNOTATION);
        if cordoned && !self.cordoned.contains(&name) {
            self.cordoned_at.insert(name.clone(), Instant::now());
        }
        set(&mut self.cordoned, &name, cordoned);
        set(&mut self.visited, &name, visited);
        if node.annotations().keys().any(|key| key.ends_with("driver-wait-for-safe-load")) {
            self.asked.insert(name.clone());
        }
        let before = self.states.insert(name.clone(), state);
        if self.recording {
            self.together.insert(self.cordoned.clone());
            self.trace.most_out = self.trace.most_out.max(self.cordoned.len());
            self.trace.most_visited = self.trace.most_visited.max(self.visited.len());
            if before != Some(state) {
                self.trace.states.entry(name).or_default().push(state);
            }
        }
    }
}

fn set(names: &mut BTreeSet<String>, name: &str, present: bool) {
    if present {
        names.insert(name.to_owned());
    } else {
        names.remove(name);
    }
}

/// Watches the nodes and writes down what it sees.
pub(super) async fn record(nodes: Api<Node>, scene: watch::Sender<Scene>) {
    let mut events = watcher(nodes, watcher::Config::default()).boxed();
    while let Some(event) = events.next().await {
        match event {
            Ok(watcher::Event::Apply(node) | watcher::Event::InitApply(node)) => {
                scene.send_modify(|scene| scene.see(&node));
            }
            Ok(watcher::Event::Delete(node)) => scene.send_modify(|scene| {
                let name = node.name_any();
                scene.states.remove(&name);
                scene.cordoned.remove(&name);
                scene.visited.remove(&name);
            }),
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(%error, "the recorder's watch broke");
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        }
    }
}
