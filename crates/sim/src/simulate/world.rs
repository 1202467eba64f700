//! What is known of the cluster, change by change: the few facts that the promises are about.
//!
//! It is folded from API objects alone, so it can be fed by the embedded API as it writes or by the watches of a real
//! cluster. It shares no code with the planner.

mod objects;
mod rollouts;

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use pitcrew_core::contract::{MATRIX_CONFIG_MAP, State, nvsentinel};
use pitcrew_core::version::DriverVersion;
use serde_json::Value;

pub use self::objects::{Leaving, Node, Pod, Role, Rules};
pub use self::rollouts::{Rollout, StageSeen};

use self::objects::text;
use super::moves::Moves;
use super::proofs::Proofs;
use crate::actors::DRIVER_COMPONENT;

/// The resource of rollouts.
pub const ROLLOUTS: &str = "rollouts.pitcrew.dev";

/// Who made a change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum By {
    /// pitcrew.
    Us,
    /// Anybody else.
    Others,
}

/// One change of one object.
#[derive(Clone, Copy, Debug)]
pub struct Change<'a> {
    /// When.
    pub at: Timestamp,
    /// Who.
    pub by: By,
    /// What was asked for, where that is known.
    pub request: Option<Request<'a>>,
    /// `nodes`, `daemonsets.apps`.
    pub resource: &'a str,
    /// Its namespace, empty for cluster-scoped ones.
    pub namespace: &'a str,
    /// Its name.
    pub name: &'a str,
    /// What it is now; `None`: gone.
    pub after: Option<&'a Value>,
}

/// What was asked of the API.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The verb, as in the audit log.
    pub verb: &'a str,
    /// Resource and subresource, as in the audit log.
    pub resource: &'a str,
    /// The body.
    pub body: &'a [u8],
}

/// What a node was like, from a moment on.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "facts that have nothing to do with each other")]
pub struct Seen {
    since: Timestamp,
    /// Where it stood.
    pub state: State,
    /// It was to be left out.
    pub skipped: bool,
    /// Its kubelet was well.
    pub ready: bool,
    /// Its driver waited to be loaded.
    pub loads: bool,
    /// It was out, and tried again.
    pub again: bool,
    /// The version of its driver pod, if it had one.
    pub driver: Option<String>,
}

impl Seen {
    /// Its driver pod was of this version.
    pub fn runs(&self, version: &str) -> bool {
        self.driver.as_deref() == Some(version)
    }
}

/// Namespace and name.
pub type Key = (String, String);

/// A part of the fleet that has a policy of its own.
#[derive(Clone, Debug, PartialEq)]
pub struct Pool {
    /// The name of its policy, with which the names of its rollouts begin.
    pub name: String,
    /// Its nodes have this value of the label [`POOL`].
    pub label: String,
}

/// The stage of each node: where stages are counted out, those come first that the newest rollout has begun with …
#[derive(Clone, Debug, PartialEq)]
struct Assigned {
    of: BTreeMap<String, usize>,
    /// … or, if nobody knows of it yet or it is over, the names alone.
    by_name: BTreeMap<String, usize>,
}

/// What one pass sends arrives in any order: each call has 5 s, and waits for its turn.
pub const CALLS: SignedDuration = SignedDuration::from_secs(10);

/// The label by which nodes belong to pools, where there is more than one.
pub const POOL: &str = "sim.pitcrew.dev/pool";

/// The cluster, as far as the promises are about it; where it has several pools, one of them.
#[derive(Clone, Debug, Default)]
pub struct World {
    /// The pool; none if the fleet is one.
    pub pool: Option<Pool>,
    /// The nodes.
    pub nodes: BTreeMap<String, Node>,
    /// The pods.
    pub pods: BTreeMap<Key, Pod>,
    /// The policy, and those before it that somebody may still go by.
    pub rules: Vec<Rules>,
    /// What a DriverPolicy states of it, …
    policy: Value,
    /// … and what the ClusterPolicy says where that is silent.
    inherited: Value,
    /// The driver that is asked for.
    pub target: String,
    /// The versions that the driver's DaemonSet asked for, each since when.
    rendered: Vec<(Timestamp, String)>,
    /// The rollouts by their numbers.
    pub rollouts: BTreeMap<u32, Rollout>,
    /// How the policy wants a version to reach the fleet.
    pub moves: Moves,
    /// What gates have said, and what the matrix lists.
    pub proofs: Proofs,
    /// The stage of each node, by what was known since then.
    assigned: Vec<(Timestamp, Assigned)>,
    /// What nodes were like lately.
    past: BTreeMap<String, Vec<Seen>>,
    /// When the last way back gave way to something else.
    pub went_back_until: Option<Timestamp>,
    /// When nodes left lately, or were not to run the driver any more.
    left: Vec<Timestamp>,
    /// When a pod of this role that is gone was last ready on a node.
    gone_ready: BTreeMap<(String, Role), Timestamp>,
    /// Since when NVSentinel's circuit breaker is open.
    pub tripped_since: Option<Timestamp>,
    /// What others did less than this long ago may not be known yet.
    pub lag: SignedDuration,
    /// The same between a last look and the write that follows it.
    pub lag_of_looks: SignedDuration,
    /// Clocks may be wrong by so much.
    pub clock_off: SignedDuration,
}

impl World {
    /// Takes up a change.
    pub fn fold(&mut self, change: &Change<'_>) {
        if self.is_elsewhere(change) {
            return;
        }
        let key = || (change.namespace.to_owned(), change.name.to_owned());
        match (change.resource, change.after) {
            ("nodes", Some(object)) => {
                let before = self.nodes.get(change.name);
                let was_member = before.is_some_and(|before| before.member);
                let node = Node::read(object, before, change);
                self.nodes.insert(change.name.to_owned(), node);
                self.enlist(change.name, was_member, change.at);
                self.remember(change.name, change.at);
            }
            ("nodes", None) => {
                self.nodes.remove(change.name);
                self.left.push(change.at);
                self.past.remove(change.name);
                self.assign(change.at);
            }
            ("pods", Some(object)) => {
                let pod = Pod::read(object, self.pods.get(&key()), change);
                let (role, node) = (pod.role, pod.node.clone());
                self.pods.insert(key(), pod);
                if role == Role::Driver {
                    self.note_driver(&node, change.at);
                }
            }
            ("pods", None) => {
                let gone = self.pods.remove(&key());
                if let Some(pod) = gone.as_ref().filter(|pod| pod.role == Role::Driver) {
                    self.note_driver(&pod.node, change.at);
                }
                let ready = gone.and_then(|pod| {
                    let last = if pod.ready { Some(change.at) } else { pod.ready_last };
                    Some(((pod.node, pod.role), last?))
                });
                self.gone_ready.extend(ready);
            }
            ("clusterpolicies.nvidia.com", Some(object)) => {
                let driver = &object["spec"]["driver"];
                self.target = text(&driver["version"]);
                self.inherited = driver["upgradePolicy"].clone();
                self.rule(change.at);
            }
            ("driverpolicies.pitcrew.dev", Some(object)) => {
                self.policy = object["spec"].clone();
                self.moves = Moves::read(&self.policy);
                self.assign(change.at);
                let nodes: Vec<String> = self.nodes.keys().cloned().collect();
                for node in &nodes {
                    self.remember(node, change.at);
                }
                self.rule(change.at);
            }
            ("daemonsets.apps", Some(object)) if is_driver(object) => {
                let version = version_in(object);
                if self.rendered.last().is_none_or(|(_, last)| *last != version) {
                    self.rendered.push((change.at, version));
                }
            }
            (ROLLOUTS, Some(object)) => {
                let number = number_of(change.name);
                if self.newest().is_some_and(|newest| newest.goes_back)
                    && !self.rollouts.contains_key(&number)
                {
                    self.went_back_until = Some(change.at);
                }
                let rollout = Rollout::read(object, self.rollouts.get(&number), change.at);
                self.rollouts.insert(number, rollout);
                self.assign(change.at);
            }
            ("jobs.batch", Some(object)) => self.proofs.note_job(change.name, object),
            ("configmaps", object) if change.name == MATRIX_CONFIG_MAP => {
                self.proofs.note_matrix(change.at, object);
            }
            ("configmaps", Some(object)) if change.name == nvsentinel::BREAKER => {
                let tripped = object["data"]["status"] == nvsentinel::TRIPPED;
                self.tripped_since = self.tripped_since.or(Some(change.at)).filter(|_| tripped);
            }
            _ => {}
        }
    }

    /// It is of another pool. Pods may come to any of them.
    pub fn is_elsewhere(&self, change: &Change<'_>) -> bool {
        let Some(Pool { name, label }) = &self.pool else { return false };
        match (change.resource, change.after) {
            ("nodes", Some(node)) => node["metadata"]["labels"][POOL] != *label,
            ("nodes", None) => !self.nodes.contains_key(change.name),
            ("driverpolicies.pitcrew.dev", _) => change.name != name,
            (ROLLOUTS, _) => change.name.rsplit_once('-').is_none_or(|(pool, _)| pool != name),
            _ => false,
        }
    }

    /// Whatever is done to pods on this node is done for this pool, as far as it can be told.
    pub fn has_node(&self, node: &str) -> bool {
        self.pool.is_none() || self.nodes.contains_key(node)
    }

    fn rule(&mut self, at: Timestamp) {
        let mut upgrade = self.inherited.clone();
        if let Some(own) = self.policy.get("upgradePolicy") {
            json_patch::merge(&mut upgrade, own);
        }
        // A policy that cannot be read is none to act by.
        let frozen = || Some(Rules { since: at, auto_upgrade: false, ..self.rules.last()?.clone() });
        let Some(rules) = Rules::read(&self.policy, &upgrade, at).or_else(frozen) else { return };
        let same = |last: &Rules| Rules { since: at, ..last.clone() } == rules;
        if !self.rules.last().is_some_and(same) {
            self.rules.push(rules);
        }
    }

    /// The version that objects of this kind ask for.
    pub fn version_said_by(&self, resource: &str) -> Option<&str> {
        match resource {
            "clusterpolicies.nvidia.com" => Some(&self.target),
            "daemonsets.apps" => self.rendered.last().map(|(_, version)| version.as_str()),
            _ => None,
        }
    }

    /// Since when the rollout of what is asked for is aborted.
    pub fn aborted_since(&self) -> Option<Timestamp> {
        let newest = self.newest()?;
        newest.aborted_since.filter(|_| newest.version == self.target)
    }

    /// A rollout by its name.
    pub fn rollout(&self, name: &str) -> Option<&Rollout> {
        self.rollouts.get(&number_of(name))
    }

    /// The newest rollout.
    pub fn newest(&self) -> Option<&Rollout> {
        self.rollouts.last_key_value().map(|(_, rollout)| rollout)
    }

    /// The rollout under way to a version.
    pub fn rollout_of(&self, version: &str) -> Option<&Rollout> {
        self.newest().filter(|newest| newest.version == version && !newest.is_spent())
    }

    /// Nodes go back to this version, all of them and not by stages.
    pub fn goes_back_to(&self, version: &str) -> bool {
        let begins =
            |newest: &Rollout| newest.back_since.is_some() && newest.previous.as_deref() == Some(version);
        match self.rollout_of(version) {
            Some(rollout) => rollout.goes_back,
            None => self.newest().is_some_and(begins),
        }
    }

    /// The first stage that has not passed on the way to a version: it is open, and so are those before it.
    pub fn frontier(&self, version: &str) -> usize {
        let Some(rollout) = self.rollout_of(version) else { return 0 };
        let passed = |name: &str| rollout.stages.get(name).is_some_and(|stage| stage.phase == "Passed");
        self.moves.stages.iter().take_while(|stage| passed(&stage.name)).count()
    }

    /// Since when a version is to be taken back, if nobody has cleared it.
    pub fn taken_back(&self, version: &str) -> Option<Timestamp> {
        let speaks = |rollout: &&Rollout| rollout.version == version && !rollout.is_cleared();
        self.rollouts.values().filter(speaks).filter_map(|rollout| rollout.back_since).min()
    }

    /// The versions that may be taken for the wanted one now. Where DaemonSets are not told of, the one asked for.
    pub fn wanted_at(&self, now: Timestamp) -> impl Iterator<Item = &str> {
        let known_since = before(now, self.lag);
        let mut ended = self.rendered.iter().skip(1).map(|(next, _)| *next).chain([Timestamp::MAX]);
        let rendered =
            self.rendered.iter().filter(move |_| ended.next().is_some_and(|end| end >= known_since));
        let asked = (self.rendered.is_empty() && !self.target.is_empty()).then_some(self.target.as_str());
        rendered.map(|(_, version)| version.as_str()).chain(asked)
    }

    /// The stages that a node may be taken to be of now.
    pub fn stages_at<'a>(&'a self, node: &'a str, now: Timestamp) -> impl Iterator<Item = usize> + 'a {
        let known_since = before(now, self.lag);
        let mut ended = self.assigned.iter().skip(1).map(|(next, _)| *next).chain([Timestamp::MAX]);
        let known = self.assigned.iter().filter(move |_| ended.next().is_some_and(|end| end >= known_since));
        known.flat_map(|(_, known)| [&known.of, &known.by_name]).filter_map(|of| of.get(node).copied())
    }

    /// The stage that a node is of now.
    pub fn stage_of(&self, node: &str) -> Option<usize> {
        self.assigned.last().and_then(|(_, known)| known.of.get(node).copied())
    }

    fn note_driver(&mut self, node: &str, at: Timestamp) {
        let was_member = self.nodes.get(node).is_some_and(|node| node.member);
        self.enlist(node, was_member, at);
        self.remember(node, at);
    }

    /// Whether a node belongs to the fleet now. One that is not to run the driver any more does so until its driver pod is gone.
    fn enlist(&mut self, name: &str, was_member: bool, at: Timestamp) {
        let wanted = self.nodes.get(name).is_some_and(|node| node.wanted);
        let member = wanted || self.pods_on(name).any(|(_, pod)| pod.role == Role::Driver);
        let Some(node) = self.nodes.get_mut(name) else { return };
        node.member = member;
        if was_member && !member {
            node.left_fleet = Some(at);
            self.left.push(at);
        }
        self.assign(at);
    }

    fn assign(&mut self, at: Timestamp) {
        if self.moves.stages.is_empty() {
            return;
        }
        let members = || self.nodes.iter().filter(|(_, node)| node.member);
        let newest = self.rollouts.last_key_value().map(|(number, _)| *number);
        let begun = |node: &Node| {
            let begun = node.begun.as_ref().filter(|(rollout, _)| Some(number_of(rollout)) == newest);
            begun.map_or(Timestamp::MAX, |(_, at)| *at)
        };
        let mut in_order: Vec<_> = members().collect();
        in_order.sort_by_key(|(_, node)| begun(node));
        let assign = |nodes: Vec<(&String, &Node)>| {
            self.moves.assign(nodes.into_iter().map(|(name, node)| (name.as_str(), &node.marks)))
        };
        let by_name = assign(members().collect());
        let known = Assigned { of: assign(in_order), by_name };
        if self.assigned.last().is_none_or(|(_, last)| *last != known) {
            self.assigned.push((at, known));
        }
    }

    /// Notes what a node is like, and forgets what nobody can take for true any more.
    fn remember(&mut self, name: &str, at: Timestamp) {
        let Some(node) = self.nodes.get(name) else { return };
        if self.moves.stages.is_empty() && self.moves.atom.is_none() {
            return;
        }
        // One that goes may overlap with its successor: the one that stays counts.
        let drivers = || self.pods_on(name).filter(|(_, pod)| pod.role == Role::Driver).map(|(_, pod)| pod);
        let driver = drivers().find(|pod| !pod.deleting).or_else(|| drivers().next());
        let seen = Seen {
            since: at,
            state: node.state(),
            skipped: node.skipped,
            ready: node.ready,
            loads: node.loads,
            again: node.is_out_again(),
            driver: driver.and_then(|pod| version_of(&pod.image)),
        };
        let known_since = before(at, self.lag);
        let past = self.past.entry(name.to_owned()).or_default();
        if past.last().is_none_or(|last| Seen { since: at, ..last.clone() } != seen) {
            past.push(seen);
        }
        let old = past.iter().skip(1).take_while(|next| next.since < known_since).count();
        past.drain(..old);
    }

    fn known_of<'a>(&'a self, node: &str, now: Timestamp) -> impl Iterator<Item = &'a Seen> {
        let known_since = before(now, self.lag);
        let past = self.past.get(node).map(Vec::as_slice).unwrap_or_default();
        let mut ended = past.iter().skip(1).map(|next| next.since).chain([Timestamp::MAX]);
        past.iter().filter(move |_| ended.next().is_some_and(|end| end >= known_since))
    }

    /// A node is like this, or was a moment ago.
    pub fn lately(&self, node: &str, now: Timestamp, is: impl Fn(&Seen) -> bool) -> bool {
        self.known_of(node, now).any(is)
    }

    /// A node is like this, and was a moment ago.
    pub fn always(&self, node: &str, now: Timestamp, is: impl Fn(&Seen) -> bool) -> bool {
        self.known_of(node, now).all(is)
    }

    /// A bake may be shorter by what a clock that jumps adds to it: each jump no more than two looks, of twenty.
    pub fn least_bake(&self, seconds: i64) -> i64 {
        if self.clock_off.is_zero() { seconds } else { seconds / 2 }
    }

    /// So many nodes left only lately.
    pub fn left_lately(&self, now: Timestamp) -> usize {
        self.left_since(before(now, self.lag))
    }

    fn left_since(&self, since: Timestamp) -> usize {
        self.left.iter().filter(|left| **left >= since).count()
    }

    /// The policies that may be known now: the newest, and those that it replaced only lately.
    pub fn rules_at(&self, now: Timestamp) -> impl Iterator<Item = &Rules> {
        let known_since = before(now, self.lag);
        let mut ended = self.rules.iter().skip(1).map(|next| next.since).chain([Timestamp::MAX]);
        self.rules.iter().filter(move |_| ended.next().is_some_and(|end| end >= known_since))
    }

    /// The pods on a node.
    pub fn pods_on<'a>(&'a self, node: &'a str) -> impl Iterator<Item = (&'a Key, &'a Pod)> {
        self.pods.iter().filter(move |(_, pod)| pod.node == node)
    }

    /// A pod of this role was ready on the node a moment ago: it is there, or has gone since then.
    pub fn was_ready(&self, node: &str, role: Role, at: Timestamp) -> bool {
        let since = before(at, self.lag);
        let here = |(_, pod): (&Key, &Pod)| pod.role == role && (pod.ready || pod.ready_last >= Some(since));
        let gone = || self.gone_ready.get(&(node.to_owned(), role)).is_some_and(|last| *last >= since);
        self.pods_on(node).any(here) || gone()
    }

    /// Driver pods that are not ready.
    pub fn drivers_down(&self) -> BTreeSet<Key> {
        let down = self.pods.iter().filter(|(_, pod)| pod.role == Role::Driver && !pod.ready);
        down.map(|(key, _)| key.clone()).collect()
    }

    /// Nodes that are to run the driver, with those that left while a start was on its way (seed 45594).
    pub fn members_at(&self, now: Timestamp) -> usize {
        let members = self.nodes.values().filter(|node| node.member).count();
        members + self.left_since(before(now, self.lag.max(CALLS)))
    }
}

/// So long before.
pub fn before(now: Timestamp, time: SignedDuration) -> Timestamp {
    now.checked_sub(time).unwrap_or(Timestamp::MIN)
}

/// The number of a rollout, by its name.
fn number_of(rollout: &str) -> u32 {
    rollout.rsplit_once('-').and_then(|(_, number)| number.parse().ok()).unwrap_or_default()
}

fn is_driver(daemon_set: &Value) -> bool {
    let labels = &daemon_set["spec"]["template"]["metadata"]["labels"];
    labels["app.kubernetes.io/component"] == DRIVER_COMPONENT
}

fn version_in(daemon_set: &Value) -> String {
    let image = daemon_set["spec"]["template"]["spec"]["containers"][0]["image"].as_str();
    image.and_then(version_of).unwrap_or_default()
}

fn version_of(image: &str) -> Option<String> {
    DriverVersion::from_image(image).map(|version| version.to_string())
}
