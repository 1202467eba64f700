//! What is known of the cluster, change by change: the few facts that the promises are about.
//!
//! It is folded from API objects alone, so it can be fed by the embedded API as it writes or by the watches of a real
//! cluster. It shares no code with the planner.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use pitcrew_core::api::Refresh;
use pitcrew_core::contract::{
    HEALTH_HOLD_ANNOTATION, KEEP_CORDONED_LABEL, SCALE_DOWN_HOLDS, State, VISIT_ANNOTATION, nvsentinel,
};
use pitcrew_core::policy::Amount;
use pitcrew_core::visit::Visit;
use serde_json::Value;

use crate::actors::{DEPLOY_DRIVER, DRIVER_COMPONENT, GPU, NAMESPACE, VALIDATOR_APP};

const STATE_LABEL: &str = "nvidia.com/gpu-driver-upgrade-state";
const SKIP_LABEL: &str = "nvidia.com/gpu-driver-upgrade.skip";

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

/// A node.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "facts that have nothing to do with each other")]
pub struct Node {
    /// Its UID.
    pub uid: String,
    /// Since when there is a node of that name and UID.
    pub since: Timestamp,
    /// What its label says.
    pub label: State,
    /// The record of the visit.
    pub visit: Option<Visit>,
    /// It takes no new pods.
    pub cordoned: bool,
    /// Somebody else cordoned it while it was not ours.
    pub foreign_cordon: bool,
    /// Somebody else lifted our cordon.
    pub opened_by_others: bool,
    /// A person wants it to stay cordoned.
    pub keep_cordoned: bool,
    /// Its kubelet is well.
    pub ready: bool,
    /// Since when it has been cordoned or not ready.
    pub out_since: Option<Timestamp>,
    /// Since when it has been as cordoned, or not, as it is.
    pub cordon_since: Timestamp,
    /// It is to be left out.
    pub skipped: bool,
    /// Since when it has a slot that others gave it, by its label.
    pub adopted_since: Option<Timestamp>,
    /// It is to run the driver.
    pub member: bool,
    /// A label keeps NVSentinel off it.
    pub shielded: bool,
    /// There is a record of that.
    pub shield_recorded: bool,
    /// It is in quarantine.
    pub quarantined: bool,
    /// Autoscalers are kept off it.
    pub held: bool,
}

impl Node {
    /// Where it stands: by the record, or else by the label.
    pub fn state(&self) -> State {
        self.recorded().unwrap_or(self.label)
    }

    /// Where the record says that it stands.
    pub fn recorded(&self) -> Option<State> {
        self.visit.as_ref()?.drivers.get("gpu").map(|walk| walk.state)
    }

    /// It has a slot. Before the cordon only the label says so, and a node that another controller left on its way is
    /// taken over with its slot.
    pub fn walks(&self) -> bool {
        self.state().in_flight()
    }

    /// Our cordon is on it.
    pub fn cordoned_by_us(&self) -> bool {
        self.cordoned && self.visit.as_ref().is_some_and(|visit| visit.holds.cordon)
    }

    fn read(object: &Value, before: Option<&Node>, change: &Change<'_>) -> Self {
        let (meta, spec) = (&object["metadata"], &object["spec"]);
        let label = |key: &str| meta["labels"][key].as_str();
        let annotation = |key: &str| meta["annotations"][key].as_str();
        let uid = text(&meta["uid"]);
        let before = before.filter(|before| before.uid == uid);
        let cordoned = spec["unschedulable"].as_bool() == Some(true);
        let conditions = object["status"]["conditions"].as_array().into_iter().flatten();
        let ready = conditions.into_iter().any(|c| c["type"] == "Ready" && c["status"] == "True");
        let visit = annotation(VISIT_ANNOTATION).and_then(|record| Visit::parse(record).ok());
        let newly = cordoned && !before.is_some_and(|before| before.cordoned);
        // A cordon in place of ours cannot be told from it. On a visit that found the node cordoned there is none of
        // ours, until it is cordoned again: whoever does that keeps it.
        let ours = before.and_then(|before| before.visit.as_ref()).is_some_and(|visit| visit.holds.cordon);
        let foreign_cordon = cordoned
            && if newly {
                change.by == By::Others && !ours
            } else {
                before.is_some_and(|b| b.foreign_cordon)
            };
        let opened_by_others = !cordoned
            && match before {
                Some(before) if before.cordoned => before.cordoned_by_us() && change.by == By::Others,
                Some(before) => before.opened_by_others,
                None => false,
            };
        let out = cordoned || !ready;
        let out_since = before.and_then(|before| before.out_since).or(Some(change.at)).filter(|_| out);
        let cordon_since =
            before.filter(|before| before.cordoned == cordoned).map_or(change.at, |b| b.cordon_since);
        let labelled: State = label(STATE_LABEL).and_then(|state| state.parse().ok()).unwrap_or_default();
        let adopted_since = match before {
            _ if !labelled.in_flight() => None,
            Some(before) if before.walks() => before.adopted_since,
            _ => (change.by == By::Others).then_some(change.at),
        };
        let opted_out = |key: &str| label(key) == Some("false");
        Self {
            since: before.map_or(change.at, |before| before.since),
            uid,
            label: labelled,
            visit,
            cordoned,
            foreign_cordon,
            opened_by_others,
            keep_cordoned: label(KEEP_CORDONED_LABEL) == Some("true"),
            ready,
            out_since,
            cordon_since,
            skipped: label(SKIP_LABEL) == Some("true"),
            adopted_since,
            member: label(DEPLOY_DRIVER) == Some("true"),
            shielded: opted_out(nvsentinel::OPT_OUT_LABEL) || opted_out(nvsentinel::MANAGED_LABEL),
            shield_recorded: annotation(HEALTH_HOLD_ANNOTATION).is_some(),
            quarantined: annotation(nvsentinel::QUARANTINE_ANNOTATIONS).is_some(),
            held: SCALE_DOWN_HOLDS.iter().any(|(key, _)| annotation(key).is_some()),
        }
    }
}

/// What a pod is for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Role {
    /// It brings the driver.
    Driver,
    /// It proves the driver.
    Validator,
    /// Another DaemonSet's.
    Daemon,
    /// People's work.
    Work,
}

/// A pod.
#[derive(Clone, Debug, PartialEq)]
pub struct Pod {
    /// Its UID.
    pub uid: String,
    /// Its node.
    pub node: String,
    /// What it is for.
    pub role: Role,
    /// It uses the device, or will.
    pub uses_device: bool,
    /// Since when it is on its node.
    pub bound_since: Option<Timestamp>,
    /// It was told to go.
    pub deleting: bool,
    /// It is ready.
    pub ready: bool,
    /// When it was last seen ready.
    pub ready_last: Option<Timestamp>,
    /// The first container's image.
    pub image: String,
}

impl Pod {
    fn read(object: &Value, before: Option<&Pod>, change: &Change<'_>) -> Self {
        let (meta, spec, status) = (&object["metadata"], &object["spec"], &object["status"]);
        let uid = text(&meta["uid"]);
        let before = before.filter(|before| before.uid == uid);
        let label = |key: &str| meta["labels"][key].as_str();
        let daemon =
            meta["ownerReferences"].as_array().into_iter().flatten().any(|o| o["kind"] == "DaemonSet");
        let ours = change.namespace == NAMESPACE;
        let role = if ours && label("app.kubernetes.io/component") == Some(DRIVER_COMPONENT) {
            Role::Driver
        } else if ours && label("app") == Some(VALIDATOR_APP) {
            Role::Validator
        } else if daemon {
            Role::Daemon
        } else {
            Role::Work
        };
        let over = matches!(status["phase"].as_str(), Some("Succeeded" | "Failed"));
        let containers = |list: &str| spec[list].as_array().into_iter().flatten();
        let wants = |container: &Value| {
            !container["resources"]["limits"][GPU].is_null()
                || !container["resources"]["requests"][GPU].is_null()
        };
        let node = text(&spec["nodeName"]);
        let conditions = status["conditions"].as_array().into_iter().flatten();
        let ready = conditions.into_iter().any(|c| c["type"] == "Ready" && c["status"] == "True");
        let bound = before.and_then(|before| before.bound_since).or(Some(change.at));
        let ready_last = match before {
            Some(before) if before.ready => Some(change.at),
            Some(before) => before.ready_last,
            None => None,
        };
        Self {
            uid,
            role,
            uses_device: !over && containers("containers").chain(containers("initContainers")).any(wants),
            bound_since: bound.filter(|_| !node.is_empty()),
            node,
            deleting: meta["deletionTimestamp"].is_string(),
            ready,
            ready_last: if ready { Some(change.at) } else { ready_last },
            image: text(&spec["containers"][0]["image"]),
        }
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// What the policy allows.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "facts that have nothing to do with each other")]
pub struct Rules {
    /// It is in force since then.
    pub since: Timestamp,
    /// Nodes may be upgraded.
    pub auto_upgrade: bool,
    /// So many at once; 0 is no limit.
    pub max_parallel: u64,
    /// So many out at once.
    pub max_unavailable: Amount,
    /// Pods that do not leave in time may be deleted past their budgets.
    pub may_delete: bool,
    /// Stale clients may be replaced on nodes in service.
    pub refresh_always: bool,
    /// The operator's validators have to prove a driver before a node goes on.
    pub validates: bool,
}

impl Rules {
    fn read(spec: &Value, upgrade: &Value, since: Timestamp) -> Option<Self> {
        let unavailable = match &upgrade["maxUnavailable"] {
            Value::Null => serde_json::json!("25%"),
            given => given.clone(),
        };
        let unavailable = serde_json::from_value(unavailable).ok()?;
        let deletes = |field: &str| upgrade[field]["timeoutAction"] == "Delete";
        Some(Self {
            since,
            auto_upgrade: upgrade["autoUpgrade"].as_bool().unwrap_or(true),
            max_parallel: upgrade["maxParallelUpgrades"].as_u64().unwrap_or(1),
            max_unavailable: Amount::try_from(&unavailable).ok()?,
            may_delete: deletes("podDeletion") || deletes("gpuPodDeletion") || deletes("drain"),
            refresh_always: serde_json::from_value(spec["clients"]["refresh"].clone())
                .is_ok_and(|refresh: Refresh| refresh == Refresh::Always),
            validates: spec.is_null()
                || spec["driver"]["validator"]["selector"] == "app=nvidia-operator-validator",
        })
    }
}

/// Namespace and name.
pub type Key = (String, String);

/// The cluster, as far as the promises are about it.
#[derive(Clone, Debug, Default)]
pub struct World {
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
    /// The rollouts by their numbers: the version, and since when it is aborted.
    rollouts: BTreeMap<u32, (String, Option<Timestamp>)>,
    /// When nodes left lately.
    left: Vec<Timestamp>,
    /// When a pod of this role that is gone was last ready on a node.
    gone_ready: BTreeMap<(String, Role), Timestamp>,
    /// NVSentinel's circuit breaker is open.
    pub breaker_tripped: bool,
    /// What others did less than this long ago may not be known yet.
    pub lag: SignedDuration,
    /// The same between a last look and the write that follows it.
    pub lag_of_looks: SignedDuration,
}

impl World {
    /// Takes up a change.
    pub fn fold(&mut self, change: &Change<'_>) {
        let key = || (change.namespace.to_owned(), change.name.to_owned());
        match (change.resource, change.after) {
            ("nodes", Some(object)) => {
                let node = Node::read(object, self.nodes.get(change.name), change);
                self.nodes.insert(change.name.to_owned(), node);
            }
            ("nodes", None) => {
                self.nodes.remove(change.name);
                self.left.push(change.at);
            }
            ("pods", Some(object)) => {
                let pod = Pod::read(object, self.pods.get(&key()), change);
                self.pods.insert(key(), pod);
            }
            ("pods", None) => {
                let gone = self.pods.remove(&key());
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
                self.rule(change.at);
            }
            ("rollouts.pitcrew.dev", Some(object)) => {
                let number = change.name.rsplit_once('-').and_then(|(_, number)| number.parse().ok());
                let (version, since) = self.rollouts.entry(number.unwrap_or_default()).or_default();
                *version = text(&object["spec"]["version"]);
                *since = since.or(Some(change.at)).filter(|_| object["spec"]["abort"] == true);
            }
            ("configmaps", Some(object)) if change.name == nvsentinel::BREAKER => {
                self.breaker_tripped = object["data"]["status"] == nvsentinel::TRIPPED;
            }
            _ => {}
        }
    }

    fn rule(&mut self, at: Timestamp) {
        let mut upgrade = self.inherited.clone();
        if let Some(own) = self.policy.get("upgradePolicy") {
            json_patch::merge(&mut upgrade, own);
        }
        let Some(rules) = Rules::read(&self.policy, &upgrade, at) else { return };
        let same = |last: &Rules| Rules { since: at, ..last.clone() } == rules;
        if !self.rules.last().is_some_and(same) {
            self.rules.push(rules);
        }
    }

    /// Since when the rollout of what is asked for is aborted.
    pub fn aborted_since(&self) -> Option<Timestamp> {
        let (version, since) = self.rollouts.last_key_value()?.1;
        since.filter(|_| *version == self.target)
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

    /// Nodes that are to run the driver, with those that left only lately.
    pub fn members_at(&self, now: Timestamp) -> usize {
        let members = self.nodes.values().filter(|node| node.member).count();
        members + self.left.iter().filter(|left| **left >= before(now, self.lag)).count()
    }
}

/// So long before.
pub fn before(now: Timestamp, time: SignedDuration) -> Timestamp {
    now.checked_sub(time).unwrap_or(Timestamp::MIN)
}
