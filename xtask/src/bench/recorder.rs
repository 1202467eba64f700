//! The nodes as a watch sees them: when each was cordoned, when it was done, how many were out at once.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result};
use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Node;
use kube::runtime::watcher;
use kube::{Api, Client, ResourceExt as _};
use pitcrew_core::contract::{State, VISIT_ANNOTATION};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

/// The label that everything is about.
pub(super) const STATE_LABEL: &str = "nvidia.com/gpu-driver-upgrade-state";

/// A watch that breaks is taken up again after this.
const AGAIN_AFTER: Duration = Duration::from_millis(200);

/// One node since the recorder was told to begin.
#[derive(Clone, Debug, Default)]
struct Progress {
    state: String,
    cordoned: bool,
    /// It was seen in another state than `upgrade-done`.
    set_out: bool,
    cordoned_at: Option<Instant>,
    done_at: Option<Instant>,
}

/// What was seen since the recorder was told to begin.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    nodes: BTreeMap<String, Progress>,
    /// The most nodes that were cordoned at the same time.
    pub(super) most_out: usize,
    records: usize,
    record_bytes: usize,
}

impl Seen {
    /// Whether all of `count` nodes carry the label `upgrade-done`.
    fn settled(&self, count: usize) -> bool {
        let done = |node: &&Progress| node.state == State::UpgradeDone.as_str();
        self.nodes.values().filter(done).count() == count && self.nodes.len() == count
    }

    /// How many nodes set out and came back.
    pub(super) fn done(&self) -> usize {
        self.nodes.values().filter(|node| node.done_at.is_some()).count()
    }

    /// From cordon to done, in order of length.
    pub(super) fn visits(&self) -> Vec<Duration> {
        let visit = |node: &Progress| Some(node.done_at?.duration_since(node.cordoned_at?));
        let mut visits: Vec<_> = self.nodes.values().filter_map(visit).collect();
        visits.sort();
        visits
    }

    /// The mean length of a visit record, for patches of the same size.
    pub(super) fn record_bytes(&self) -> usize {
        self.record_bytes.checked_div(self.records).unwrap_or_default()
    }

    /// The nodes in words, for an error.
    pub(super) fn states(&self) -> String {
        let mut counts = BTreeMap::<&str, usize>::new();
        for node in self.nodes.values() {
            *counts.entry(node.state.as_str()).or_default() += 1;
        }
        let counts: Vec<_> = counts.into_iter().map(|(state, count)| format!("{count} {state}")).collect();
        counts.join(", ")
    }

    fn see(&mut self, node: &Node, now: Instant) {
        let progress = self.nodes.entry(node.name_any()).or_default();
        progress.state = node.labels().get(STATE_LABEL).cloned().unwrap_or_default();
        progress.cordoned = node.spec.as_ref().and_then(|spec| spec.unschedulable).unwrap_or(false);
        if progress.cordoned {
            progress.cordoned_at.get_or_insert(now);
        }
        if progress.state != State::UpgradeDone.as_str() {
            progress.set_out = true;
        } else if progress.set_out {
            progress.done_at.get_or_insert(now);
        }
        if let Some(record) = node.annotations().get(VISIT_ANNOTATION) {
            self.records += 1;
            self.record_bytes += record.len();
        }
        self.most_out = self.most_out.max(self.nodes.values().filter(|node| node.cordoned).count());
    }

    /// Forgets the past; where the nodes stand stays known.
    fn begin(&mut self) {
        let nodes =
            std::mem::take(&mut self.nodes).into_iter().map(|(name, Progress { state, cordoned, .. })| {
                (name, Progress { state, cordoned, ..Progress::default() })
            });
        *self = Seen { nodes: nodes.collect(), ..Seen::default() };
    }
}

/// A watch of all nodes. It ends when this is dropped.
pub(super) struct Recorder {
    seen: watch::Sender<Seen>,
    task: JoinHandle<()>,
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Recorder {
    pub(super) fn start(client: Client) -> Recorder {
        let seen = watch::Sender::new(Seen::default());
        let task = tokio::spawn(record(Api::all(client), seen.clone()));
        Recorder { seen, task }
    }

    /// Counts from here.
    pub(super) fn begin(&self) {
        self.seen.send_modify(Seen::begin);
    }

    pub(super) fn seen(&self) -> Seen {
        self.seen.borrow().clone()
    }

    /// Waits until all of `count` nodes are labelled `upgrade-done`, whatever they were before.
    pub(super) async fn settled(&self, count: usize, limit: Duration) -> Result<()> {
        self.until(limit, |seen| seen.settled(count)).await
    }

    /// Waits until `count` nodes have set out and come back.
    pub(super) async fn done(&self, count: usize, limit: Duration) -> Result<()> {
        self.until(limit, |seen| seen.done() >= count).await
    }

    async fn until(&self, limit: Duration, holds: impl Fn(&Seen) -> bool) -> Result<()> {
        let mut seen = self.seen.subscribe();
        let reached = timeout(limit, seen.wait_for(|seen| holds(seen))).await.map(drop);
        let states = || format!("after {} s the nodes are: {}", limit.as_secs(), self.seen().states());
        reached.with_context(states)
    }
}

async fn record(nodes: Api<Node>, seen: watch::Sender<Seen>) {
    let mut events = watcher(nodes, watcher::Config::default()).boxed();
    while let Some(event) = events.next().await {
        match event {
            Ok(watcher::Event::Apply(node) | watcher::Event::InitApply(node)) => {
                let now = Instant::now();
                seen.send_modify(|seen| seen.see(&node, now));
            }
            Ok(_) => {}
            Err(_) => tokio::time::sleep(AGAIN_AFTER).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn node(name: &str, state: State, cordoned: bool) -> Node {
        serde_json::from_value(json!({
            "metadata": {"name": name, "labels": {STATE_LABEL: state.as_str()}},
            "spec": {"unschedulable": cordoned},
        }))
        .unwrap()
    }

    #[tokio::test]
    async fn a_node_is_done_when_it_has_set_out_and_come_back() {
        let (mut seen, at) = (Seen::default(), |seconds| Instant::now() + Duration::from_secs(seconds));
        let start = at(0);
        seen.see(&node("a", State::UpgradeDone, false), start);
        seen.begin();
        assert!(seen.settled(1) && seen.done() == 0);

        seen.see(&node("a", State::UpgradeRequired, false), start + Duration::from_secs(1));
        seen.see(&node("a", State::WaitForJobsRequired, true), start + Duration::from_secs(2));
        assert!(!seen.settled(1) && seen.most_out == 1);
        seen.see(&node("a", State::UpgradeDone, false), start + Duration::from_secs(5));
        assert_eq!((seen.done(), seen.visits()), (1, vec![Duration::from_secs(3)]));
    }
}
