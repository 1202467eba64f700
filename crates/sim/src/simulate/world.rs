//! What is known of the cluster, change by change: the few facts that the promises are about.
//!
//! It is folded from API objects alone, so it can be fed by the embedded API as it writes or by the watches of a real
//! cluster. It shares no code with the planner.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use pitcrew_core::api::Refresh;
use pitcrew_core::contract::{
    CANARY_LABEL, HEALTH_HOLD_ANNOTATION, KEEP_CORDONED_LABEL, LAST_VISIT_ANNOTATION, MATRIX_CONFIG_MAP,
    SCALE_DOWN_HOLDS, State, VISIT_ANNOTATION, nvsentinel,
};
use pitcrew_core::policy::Amount;
use pitcrew_core::version::DriverVersion;
use pitcrew_core::visit::Visit;
use serde_json::Value;

use super::moves::Moves;
use super::proofs::Proofs;
use crate::actors::{DEPLOY_DRIVER, DRIVER_COMPONENT, GPU, NAMESPACE, VALIDATOR_APP};

const STATE_LABEL: &str = "nvidia.com/gpu-driver-upgrade-state";
const SKIP_LABEL: &str = "nvidia.com/gpu-driver-upgrade.skip";
const SAFE_LOAD_ANNOTATION: &str = "nvidia.com/gpu-driver-upgrade.driver-wait-for-safe-load";
/// Labels by which nodes belong to racks and zones begin with it.
const PLACES: &str = "sim.pitcrew.dev/";

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
    /// It was cordoned before that, and stays so after it.
    pub quarantined_cordoned: bool,
    /// Autoscalers are kept off it.
    pub held: bool,
    /// Its driver waits to be loaded.
    pub loads: bool,
    /// A visit of it has ended.
    pub was_visited: bool,
    /// The labels by which it belongs to a stage, an atom or a group.
    pub marks: BTreeMap<String, String>,
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
        let labels = meta["labels"].as_object().into_iter().flatten();
        let marks = labels.filter(|(key, _)| *key == CANARY_LABEL || key.starts_with(PLACES));
        Self {
            loads: annotation(SAFE_LOAD_ANNOTATION).is_some_and(|value| !value.is_empty()),
            was_visited: annotation(LAST_VISIT_ANNOTATION).is_some(),
            marks: marks.map(|(key, value)| (key.clone(), text(value))).collect(),
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
            quarantined_cordoned: annotation(nvsentinel::CORDON_BEFORE_ANNOTATION).is_some(),
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

/// A rollout, as the API tells it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rollout {
    /// The version that it brings.
    pub version: String,
    /// What ran before, as it says.
    pub previous: Option<String>,
    /// It brings nodes back.
    pub goes_back: bool,
    /// What it is doing.
    pub phase: String,
    /// Since when somebody wants it aborted.
    pub aborted_since: Option<Timestamp>,
    /// Since when it is to be taken back: somebody said so, or we did.
    pub back_since: Option<Timestamp>,
    /// A person has to put the version back, or to decide.
    pub needs_a_person: bool,
    /// A person has cleared it.
    pub cleared: bool,
    /// Stages that a person has promoted …
    pub promoted: BTreeSet<String>,
    /// … whatever was seen of them.
    pub skip_bake: BTreeSet<String>,
    /// How far its stages are.
    pub stages: BTreeMap<String, StageSeen>,
}

/// How far a stage is.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StageSeen {
    /// What it is doing.
    pub phase: String,
    /// Since when.
    since: Timestamp,
    /// Since when it has been watched, the last time, …
    baking_since: Option<Timestamp>,
    /// … and until when, if that is over.
    baking_until: Option<Timestamp>,
    /// What is missing.
    pub message: Option<String>,
}

impl StageSeen {
    /// For so many seconds it was watched.
    pub fn watched(&self, now: Timestamp) -> i64 {
        let until = self.baking_until.unwrap_or(now);
        self.baking_since.map_or(0, |since| until.duration_since(since).as_secs())
    }

    /// It went wrong.
    pub fn is_bad(&self) -> bool {
        matches!(self.phase.as_str(), "Failed" | "Spoiled")
    }

    fn read(said: &Value, before: Option<&StageSeen>, at: Timestamp) -> Self {
        let (phase, message) = (text(&said["phase"]), said["message"].as_str().map(str::to_owned));
        let mut stage = match before {
            Some(before) if before.phase == phase => return Self { message, ..before.clone() },
            Some(before) => before.clone(),
            None => Self::default(),
        };
        if phase == "Baking" {
            (stage.baking_since, stage.baking_until) = (Some(at), None);
        } else if stage.phase == "Baking" {
            stage.baking_until = Some(at);
        }
        Self { phase, since: at, message, ..stage }
    }
}

impl Rollout {
    /// Since when a stage of it has failed.
    pub fn bad_since(&self) -> Option<Timestamp> {
        self.stages.values().filter(|stage| stage.is_bad()).map(|stage| stage.since).min()
    }

    /// A stage of it is watched at work, as long as nothing else has taken its place.
    pub fn bakes(&self) -> bool {
        let over = matches!(self.phase.as_str(), "Superseded" | "RolledBack");
        !over && self.stages.values().any(|stage| stage.phase == "Baking")
    }

    /// Stages at whose ends gates are asked, as long as nothing else has taken its place.
    pub fn proves(&self) -> impl Iterator<Item = &str> {
        let over = matches!(self.phase.as_str(), "Superseded" | "RolledBack" | "RollingBack" | "Halted");
        let proves = self.stages.iter().filter(move |(_, stage)| !over && stage.phase == "Proving");
        proves.map(|(name, _)| name.as_str())
    }

    /// It went wrong and was cleared: what it was for begins anew.
    fn is_spent(&self) -> bool {
        self.cleared && (self.back_since.is_some() || self.bad_since().is_some())
    }

    fn read(object: &Value, before: Option<&Rollout>, at: Timestamp) -> Self {
        let (spec, status) = (&object["spec"], &object["status"]);
        let since = |is: bool, known: fn(&Rollout) -> Option<Timestamp>| {
            is.then(|| before.and_then(known).unwrap_or(at))
        };
        let promotions = || spec["promotions"].as_array().into_iter().flatten();
        let stages = status["stages"].as_array().into_iter().flatten().map(|said| {
            let name = text(&said["name"]);
            let known = before.and_then(|before| before.stages.get(&name));
            let stage = StageSeen::read(said, known, at);
            (name, stage)
        });
        Self {
            version: text(&spec["version"]),
            previous: spec["previous"]["version"].as_str().map(str::to_owned),
            goes_back: spec["rollbackOf"].is_string(),
            phase: text(&status["phase"]),
            aborted_since: since(spec["abort"] == true, |known| known.aborted_since),
            back_since: since(!spec["rollback"].is_null() || !status["rollback"].is_null(), |known| {
                known.back_since
            }),
            needs_a_person: status["rollback"]["message"].is_string(),
            cleared: !spec["cleared"].is_null(),
            promoted: promotions().map(|promotion| text(&promotion["stage"])).collect(),
            skip_bake: promotions()
                .filter(|promotion| promotion["skipBake"] == true)
                .map(|promotion| text(&promotion["stage"]))
                .collect(),
            stages: stages.collect(),
        }
    }
}

/// What a node was like, from a moment on.
#[derive(Clone, Debug, PartialEq)]
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
    /// The versions that the driver's DaemonSet asked for, each since when.
    rendered: Vec<(Timestamp, String)>,
    /// The rollouts by their numbers.
    pub rollouts: BTreeMap<u32, Rollout>,
    /// How the policy wants a version to reach the fleet.
    pub moves: Moves,
    /// What gates have said, and what the matrix lists.
    pub proofs: Proofs,
    /// The stage of each node, by what was known since then.
    assigned: Vec<(Timestamp, BTreeMap<String, usize>)>,
    /// What nodes were like lately.
    past: BTreeMap<String, Vec<Seen>>,
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
    /// Clocks may be wrong by so much.
    pub clock_off: SignedDuration,
}

impl World {
    /// Takes up a change.
    pub fn fold(&mut self, change: &Change<'_>) {
        let key = || (change.namespace.to_owned(), change.name.to_owned());
        match (change.resource, change.after) {
            ("nodes", Some(object)) => {
                let node = Node::read(object, self.nodes.get(change.name), change);
                self.nodes.insert(change.name.to_owned(), node);
                self.assign(change.at);
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
                    self.remember(&node, change.at);
                }
            }
            ("pods", None) => {
                let gone = self.pods.remove(&key());
                if let Some(pod) = gone.as_ref().filter(|pod| pod.role == Role::Driver) {
                    self.remember(&pod.node, change.at);
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
                let image = object["spec"]["template"]["spec"]["containers"][0]["image"].as_str();
                let version = image.and_then(version_of).unwrap_or_default();
                if self.rendered.last().is_none_or(|(_, last)| *last != version) {
                    self.rendered.push((change.at, version));
                }
            }
            (ROLLOUTS, Some(object)) => {
                let number = number_of(change.name);
                let rollout = Rollout::read(object, self.rollouts.get(&number), change.at);
                self.rollouts.insert(number, rollout);
            }
            ("jobs.batch", Some(object)) => self.proofs.note_job(change.name, object),
            ("configmaps", object) if change.name == MATRIX_CONFIG_MAP => {
                self.proofs.note_matrix(change.at, object);
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
        let speaks = |rollout: &&Rollout| rollout.version == version && !rollout.cleared;
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
        known.filter_map(|(_, of)| of.get(node).copied())
    }

    /// The stage that a node is of now.
    pub fn stage_of(&self, node: &str) -> Option<usize> {
        self.assigned.last().and_then(|(_, of)| of.get(node).copied())
    }

    fn assign(&mut self, at: Timestamp) {
        if self.moves.stages.is_empty() {
            return;
        }
        let members: Vec<_> = self.nodes.iter().filter(|(_, node)| node.member).collect();
        let of = self.moves.assign(members.into_iter().map(|(name, node)| (name.as_str(), &node.marks)));
        if self.assigned.last().is_none_or(|(_, last)| *last != of) {
            self.assigned.push((at, of));
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
        self.left.iter().filter(|left| **left >= before(now, self.lag)).count()
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
        members + self.left_lately(now)
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

fn version_of(image: &str) -> Option<String> {
    DriverVersion::from_image(image).map(|version| version.to_string())
}
