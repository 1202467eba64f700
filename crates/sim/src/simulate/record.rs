//! What a run leaves behind: the cluster as the promises see it, what happened, and the first promise that was broken.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use pitcrew_core::contract::State;
use pitcrew_core::plan::Plan;
use pitcrew_core::reason::Reason;
use pitcrew_core::snapshot::Snapshot;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::controllers::is_ours;
use super::fault::Fault;
use super::promises::{Promise, Step, take_up};
use super::world::{By, Change, Key, Request, Rollout, World};
use crate::api::Written;

/// A node may be on its way for so long without anything being seen of it.
const MOVING_MAX: Duration = Duration::from_mins(1);
/// Without a pass for so long, there was no leader.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// A promise that was broken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Which.
    pub promise: Promise,
    /// On which node, if it is about one.
    pub node: Option<String>,
    /// What happened.
    pub what: String,
    /// When, in virtual time.
    pub at: Timestamp,
}

/// One line of the trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// When.
    pub at: Timestamp,
    /// The node that it is about, if it is about one.
    pub node: Option<String>,
    /// Who did what.
    pub text: String,
}

/// What the newest plan says of a node.
#[derive(Clone, Debug)]
pub(super) struct Verdict {
    pub(super) state: State,
    pub(super) reason: Reason,
    /// Since when it has said that, by a clock that is right.
    since: Instant,
}

/// States of nodes, and what hit them there.
pub type Coverage = BTreeSet<(State, Fault)>;

/// Everything that is written down.
#[derive(Default)]
pub(super) struct Book {
    /// The cluster as each of its pools has to do with it.
    pub(super) worlds: Vec<World>,
    pub(super) verdicts: BTreeMap<String, Verdict>,
    pub(super) violation: Option<Violation>,
    pub(super) hash: u64,
    pub(super) changes: u64,
    /// Passes of the planner.
    pub(super) passes: u64,
    last_pass: Option<Instant>,
    pub(super) faults: BTreeMap<Fault, u64>,
    pub(super) coverage: Coverage,
    /// Transitions that we made, each with how often.
    pub(super) transitions: BTreeMap<(State, State), u64>,
    /// What rollouts came to, each with how often.
    pub(super) rollouts: BTreeMap<&'static str, u64>,
    pub(super) trace: Option<Vec<Entry>>,
}

/// A handle to it.
#[derive(Clone, Default)]
pub(super) struct Record {
    book: Arc<Mutex<Book>>,
    broken: Arc<Notify>,
}

impl Record {
    pub(super) fn new(worlds: Vec<World>, keep_trace: bool) -> Self {
        let book = Book { worlds, trace: keep_trace.then(Vec::new), ..Book::default() };
        Self { book: Arc::new(Mutex::new(book)), broken: Arc::default() }
    }

    pub(super) fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Resolves when a promise is broken.
    pub(super) async fn until_broken(&self) {
        self.broken.notified().await;
    }

    /// A change as the API stores it.
    pub(super) fn written(&self, at: Timestamp, written: &Written<'_>) {
        let mut book = self.book();
        let ours = is_ours(&written.request.user);
        let request =
            Request { verb: written.request.verb, resource: &written.request.resource, body: written.body };
        let change = Change {
            at,
            by: if ours { By::Us } else { By::Others },
            request: Some(request),
            resource: written.resource,
            namespace: written.namespace,
            name: written.name,
            after: written.after,
        };
        book.changes += 1;
        book.hash(at, written);
        book.see(&change, &written.request.user);
        if book.violation.is_some() {
            self.broken.notify_one();
        }
    }

    /// A pass of the controller that leads.
    pub(super) fn pass(&self, snapshot: &Snapshot, plan: &Plan) {
        let mut book = self.book();
        book.pass(snapshot.now, plan);
        if book.violation.is_some() {
            self.broken.notify_one();
        }
    }

    /// The program itself failed.
    pub(super) fn broken(&self, what: &str) {
        self.break_promise(Promise::StaysAlive, None, what.to_owned(), Timestamp::default());
    }

    pub(super) fn break_promise(&self, promise: Promise, node: Option<String>, what: String, at: Timestamp) {
        self.book().break_promise(promise, node, what, at);
        self.broken.notify_one();
    }

    /// A fault happened.
    pub(super) fn count(&self, fault: Fault) {
        *self.book().faults.entry(fault).or_default() += 1;
    }

    /// A fault hit a request about a node, or everybody.
    pub(super) fn hit(&self, fault: Fault, node: Option<&str>) {
        self.count(fault);
        let mut book = self.book();
        let state = |node: &str| book.node(node).map(super::world::Node::state);
        let states: BTreeSet<State> = match node {
            Some(node) => state(node).into_iter().collect(),
            None => book.nodes().map(super::world::Node::state).collect(),
        };
        book.coverage.extend(states.into_iter().map(|state| (state, fault)));
    }

    /// Something that is not a change of an object.
    pub(super) fn note(&self, at: Timestamp, text: impl fmt::Display) {
        let mut book = self.book();
        if let Some(trace) = &mut book.trace {
            trace.push(Entry { at, node: None, text: text.to_string() });
        }
    }
}

impl Book {
    fn see(&mut self, change: &Change<'_>, user: &str) {
        let Book { worlds, trace, transitions, rollouts, .. } = self;
        let mut seen = None;
        for world in worlds {
            let broken = take_up(world, change, |step, broken| {
                if let Step::Node(_, Some(old), Some(new)) = step
                    && change.by == By::Us
                    && old.state() != new.state()
                {
                    *transitions.entry((old.state(), new.state())).or_default() += 1;
                }
                if let Step::Rollout(_, old, Some(new)) = step {
                    milestones(*old, new).for_each(|what| *rollouts.entry(what).or_default() += 1);
                }
                let (node, text) = described(change, step);
                if let (Some(trace), Some(text)) = (trace.as_mut(), text) {
                    let entry = Entry { at: change.at, node: node.clone(), text: format!("{user}: {text}") };
                    // A pod may have to do with every pool.
                    if trace.last() != Some(&entry) {
                        trace.push(entry);
                    }
                }
                broken.map(|(promise, what)| (promise, node, what))
            });
            seen = match (seen, broken) {
                (Some(Some(first)), _) => Some(Some(first)),
                (seen, None) => seen,
                (_, broken) => broken,
            };
        }
        match seen {
            Some(Some((promise, node, what))) => self.break_promise(promise, node, what, change.at),
            Some(None) => {}
            None => {
                let told = change.by == By::Us && !is_chatter(change.resource);
                if let Some(trace) = self.trace.as_mut().filter(|_| told) {
                    let text = format!("{user}: writes {} {}", change.resource, change.name);
                    trace.push(Entry { at: change.at, node: None, text });
                }
            }
        }
    }

    fn break_promise(&mut self, promise: Promise, node: Option<String>, what: String, at: Timestamp) {
        // The first one tells; what follows may follow from it.
        self.violation.get_or_insert(Violation { promise, node, what, at });
    }

    fn hash(&mut self, at: Timestamp, written: &Written<'_>) {
        let mut hash = self.hash;
        let mut mix = |bytes: &[u8]| {
            let (words, rest) = bytes.as_chunks::<8>();
            let mut last = [0; 8];
            last[..rest.len()].copy_from_slice(rest);
            let last = (!rest.is_empty()).then_some(&last);
            for word in words.iter().chain(last) {
                hash = (hash.rotate_left(5) ^ u64::from_le_bytes(*word)).wrapping_mul(0x517c_c1b7_2722_0a95);
            }
        };
        mix(&at.as_millisecond().to_le_bytes());
        mix(written.request.user.as_bytes());
        mix(written.resource.as_bytes());
        mix(written.name.as_bytes());
        mix(written.json.map_or(b"gone", |json| json));
        self.hash = hash;
    }

    fn pass(&mut self, now: Timestamp, plan: &Plan) {
        self.passes += 1;
        // While nobody leads, nobody says anything.
        let silence = self.last_pass.replace(Instant::now()).is_some_and(|last| last.elapsed() > SILENCE_MAX);
        if silence {
            self.verdicts.values_mut().for_each(|verdict| verdict.since = Instant::now());
        }
        // A policy that cannot be read has no nodes, and nobody says anything about them until it is mended.
        let spoken_of = plan.pools.iter().map(|pool| pool.nodes.len()).sum::<usize>();
        if spoken_of < self.verdicts.len() {
            let named = |name: &str| plan.pools.iter().any(|pool| pool.nodes.contains_key(name));
            self.verdicts.retain(|name, _| named(name));
        }
        for (name, verdict) in plan.pools.iter().flat_map(|pool| &pool.nodes) {
            let known = self.verdicts.get_mut(name.as_str());
            let same = |known: &&mut Verdict| {
                known.state == verdict.state && known.reason.code() == verdict.reason.code()
            };
            if let Some(known) = known.filter(same) {
                if known.reason != verdict.reason {
                    known.reason = verdict.reason.clone();
                }
                let silent = matches!(verdict.reason, Reason::Moving { .. } | Reason::Writing);
                let stands = known.since.elapsed() > MOVING_MAX;
                if silent && stands && self.violation.is_none() {
                    let what = format!("it stands in {} and says only \"{}\"", verdict.state, verdict.reason);
                    self.break_promise(Promise::SaysWhy, Some(name.to_string()), what, now);
                }
                continue;
            }
            let verdict =
                Verdict { state: verdict.state, reason: verdict.reason.clone(), since: Instant::now() };
            self.verdicts.insert(name.to_string(), verdict);
        }
    }

    /// A node, in whichever pool it is.
    pub(super) fn node(&self, name: &str) -> Option<&super::world::Node> {
        self.worlds.iter().find_map(|world| world.nodes.get(name))
    }

    /// All nodes.
    pub(super) fn nodes(&self) -> impl Iterator<Item = &super::world::Node> {
        self.worlds.iter().flat_map(|world| world.nodes.values())
    }

    /// A pod, on whichever node it is.
    pub(super) fn pod(&self, key: &Key) -> Option<&super::world::Pod> {
        self.worlds.iter().find_map(|world| world.pods.get(key))
    }

    /// Driver pods that are not ready.
    pub(super) fn drivers_down(&self) -> BTreeSet<Key> {
        self.worlds.iter().flat_map(World::drivers_down).collect()
    }

    /// Nodes that NVSentinel has.
    pub(super) fn quarantined(&self) -> BTreeSet<String> {
        let nodes = self.worlds.iter().flat_map(|world| &world.nodes);
        nodes.filter(|(_, node)| node.quarantined).map(|(name, _)| name.clone()).collect()
    }

    /// A stage of a newest rollout is watched at work.
    pub(super) fn bakes(&self) -> bool {
        self.worlds.iter().filter_map(World::newest).any(Rollout::bakes)
    }

    /// The nodes that wait, each with its reason.
    pub(super) fn reason(&self, node: &str) -> Option<&Reason> {
        self.verdicts.get(node).map(|verdict| &verdict.reason)
    }
}

/// Leases are renewed for ever, and Events are written once more after a while.
fn is_chatter(resource: &str) -> bool {
    matches!(resource, "leases.coordination.k8s.io" | "events")
}

/// A change in a few words, if it is one that people look for.
fn described(change: &Change<'_>, step: &Step<'_>) -> (Option<String>, Option<String>) {
    match step {
        Step::Node(name, old, new) => (Some((*name).to_owned()), node_words(name, *old, *new)),
        Step::Pod(old, new) => {
            let node = new.or(*old).map(|pod| pod.node.clone()).filter(|node| !node.is_empty());
            let words = pod_words(*old, *new).map(|words| match &node {
                Some(node) => format!("pod {} on {node} {words}", change.name),
                None => format!("pod {} {words}", change.name),
            });
            (node, words)
        }
        Step::Rollout(name, old, new) => {
            let words = new.and_then(|new| rollout_words(*old, new));
            (None, words.map(|words| format!("rollout {name} {words}")))
        }
        Step::Version(was, is) => {
            (None, (was != is).then(|| format!("{} asks for {is} instead of {was}", change.resource)))
        }
    }
}

/// What a rollout has just come to.
fn milestones(old: Option<&Rollout>, new: &Rollout) -> impl Iterator<Item = &'static str> {
    let was = old.map(|old| old.phase.as_str()).unwrap_or_default();
    let back = (was != new.phase && new.phase == "RolledBack").then_some("versions put back");
    let stages = new.stages.iter().filter_map(move |(name, stage)| {
        let before = old.and_then(|old| old.stages.get(name)).map(|stage| stage.phase.as_str());
        match stage.phase.as_str() {
            phase if before == Some(phase) => None,
            "Baking" => Some("stages watched"),
            "AwaitingApproval" => Some("stages up for approval"),
            "Passed" => Some("stages passed"),
            "Failed" => Some("stages failed"),
            "Spoiled" => Some("stages spoiled"),
            _ => None,
        }
    });
    stages.chain(back)
}

fn rollout_words(old: Option<&Rollout>, new: &Rollout) -> Option<String> {
    let Some(old) = old else { return Some(format!("to {} is made", new.version)) };
    let mut words = Vec::new();
    if old.phase != new.phase {
        words.push(format!("{} > {}", old.phase, new.phase));
    }
    for (name, stage) in &new.stages {
        let was = old.stages.get(name).map(|stage| stage.phase.as_str()).unwrap_or_default();
        if was != stage.phase {
            words.push(format!("{name} {was} > {}", stage.phase));
        }
    }
    for (was, is, what) in [
        (old.back_since.is_some(), new.back_since.is_some(), "is to be taken back"),
        (old.is_cleared(), new.is_cleared(), "is cleared"),
        (old.aborted_since.is_some(), new.aborted_since.is_some(), "is aborted"),
        (false, old.promoted != new.promoted, "is promoted"),
    ] {
        if was != is {
            words.push(if is { what.to_owned() } else { format!("{what} no more") });
        }
    }
    (!words.is_empty()).then(|| words.join(", "))
}

fn node_words(
    name: &str,
    old: Option<&super::world::Node>,
    new: Option<&super::world::Node>,
) -> Option<String> {
    let (old, new) = match (old, new) {
        (Some(old), Some(new)) => (old, new),
        (None, Some(_)) => return Some(format!("node {name} joins")),
        (_, None) => return Some(format!("node {name} is gone")),
    };
    let mut words = Vec::new();
    if old.state() != new.state() {
        words.push(format!("{} > {}", old.state(), new.state()));
    }
    if old.label != new.label && new.label != new.state() {
        words.push(format!("label {}", new.label));
    }
    for (was, is, yes, no) in [
        (old.cordoned, new.cordoned, "cordoned", "uncordoned"),
        (old.ready, new.ready, "Ready", "not Ready"),
        (old.shielded, new.shielded, "kept from NVSentinel", "NVSentinel may come back"),
        (old.skipped, new.skipped, "to be skipped", "not to be skipped"),
        (old.quarantined, new.quarantined, "in quarantine", "out of quarantine"),
    ] {
        if was != is {
            words.push(if is { yes } else { no }.to_owned());
        }
    }
    (!words.is_empty()).then(|| format!("node {name} {}", words.join(", ")))
}

fn pod_words(old: Option<&super::world::Pod>, new: Option<&super::world::Pod>) -> Option<String> {
    let (old, new) = match (old, new) {
        (Some(old), Some(new)) => (old, new),
        (None, Some(_)) => return Some("is made".to_owned()),
        (_, None) => return Some("is gone".to_owned()),
    };
    if !old.deleting && new.deleting {
        return Some("is told to go".to_owned());
    }
    match (old.ready, new.ready) {
        (false, true) => Some("is Ready".to_owned()),
        (true, false) => Some("is not Ready".to_owned()),
        _ if old.node != new.node => Some("is bound".to_owned()),
        _ => None,
    }
}
