//! Nodes, pods and policies, as far as the promises are about them.

use std::collections::BTreeMap;

use jiff::Timestamp;
use pitcrew_core::api::Refresh;
use pitcrew_core::contract::{
    AGENT_CORDON_ANNOTATION, CANARY_LABEL, GATE_LABEL, HEALTH_HOLD_ANNOTATION, KEEP_CORDONED_LABEL,
    LAST_VISIT_ANNOTATION, SCALE_DOWN_HOLDS, State, VISIT_ANNOTATION, nvsentinel,
};
use pitcrew_core::policy::Amount;
use pitcrew_core::visit::{Visit, Walk};
use serde_json::Value;

use super::super::moves::seconds;
use super::{By, Change};
use crate::actors::{DEPLOY_DRIVER, DRIVER_COMPONENT, GPU, NAMESPACE, VALIDATOR_APP};

const STATE_LABEL: &str = "nvidia.com/gpu-driver-upgrade-state";
const SKIP_LABEL: &str = "nvidia.com/gpu-driver-upgrade.skip";
const SAFE_LOAD_ANNOTATION: &str = "nvidia.com/gpu-driver-upgrade.driver-wait-for-safe-load";
/// As documented.
const LEAVE_SECONDS: i64 = 300;
/// Labels by which nodes belong to racks and zones begin with it.
const PLACES: &str = "sim.pitcrew.dev/";

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
    /// Since when it walks, if it needed no slot for that: it is only proven, or it had failed and was mended.
    pub slotless_since: Option<Timestamp>,
    /// It is to run the driver, or on a visit for it.
    pub(super) wanted: bool,
    /// That, or a driver pod is on it all the same.
    pub member: bool,
    /// Since when it has been done.
    pub done_since: Option<Timestamp>,
    /// A label keeps NVSentinel off it.
    pub shielded: bool,
    /// There is a record of that.
    pub shield_recorded: bool,
    /// It is in quarantine.
    pub quarantined: bool,
    /// It was cordoned before that, and stays so after it.
    pub quarantined_cordoned: bool,
    /// When it was last of the fleet, if it is not any more.
    pub left_fleet: Option<Timestamp>,
    /// Autoscalers are kept off it.
    pub held: bool,
    /// Its driver waits to be loaded.
    pub loads: bool,
    /// A visit of it has ended.
    pub was_visited: bool,
    /// The rollout of the last one.
    pub last_rollout: Option<String>,
    /// The rollout that has begun with it, or been through with it last, and when, if that was not because it came early.
    pub begun: Option<(String, Timestamp)>,
    /// When it was last told to have booted.
    pub booted: Option<Timestamp>,
    boot: String,
    /// The labels by which it belongs to a stage, an atom or a group.
    pub marks: BTreeMap<String, String>,
}

impl Node {
    /// Where it stands: by the record, or else by the label.
    pub fn state(&self) -> State {
        self.recorded().unwrap_or(self.label)
    }

    /// Its walk, if it is on a visit.
    pub fn walk(&self) -> Option<&Walk> {
        self.visit.as_ref()?.drivers.get("gpu")
    }

    /// Where the record says that it stands.
    pub fn recorded(&self) -> Option<State> {
        self.walk().map(|walk| walk.state)
    }

    /// It has a slot. Before the cordon only the label says so, and a node that another controller left on its way is
    /// taken over with its slot.
    pub fn walks(&self) -> bool {
        self.state().in_flight()
    }

    /// It was tried before, by whomever.
    pub fn is_retried(&self) -> bool {
        self.walk().is_some_and(|walk| walk.attempts > 0)
    }

    /// A person asked for this try.
    pub fn is_asked_for(&self) -> bool {
        self.walk().is_some_and(|walk| walk.by_hand)
    }

    /// That, and it is out, or on its way.
    pub fn is_out_again(&self) -> bool {
        self.is_retried() && (self.out_since.is_some() || self.walks())
    }

    /// Our cordon is on it.
    pub fn cordoned_by_us(&self) -> bool {
        self.cordoned && self.visit.as_ref().is_some_and(|visit| visit.holds.cordon)
    }

    /// It walks, and did not before, and nobody had to give it a slot.
    fn needs_no_slot(&self, before: Option<&Node>) -> bool {
        let had_failed = before.is_some_and(|before| before.state() == State::UpgradeFailed);
        let mended = had_failed && self.state() == State::ValidationRequired;
        let proven = self.visit.as_ref().is_some_and(|visit| visit.early);
        mended || (proven && self.state() != State::CordonRequired)
    }

    pub(super) fn read(object: &Value, before: Option<&Node>, change: &Change<'_>) -> Self {
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
        // The driver manager's own cordon goes to whoever visits the node.
        let foreign_cordon = cordoned
            && annotation(AGENT_CORDON_ANNOTATION).is_none()
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
        let wanted = label(DEPLOY_DRIVER) == Some("true") || visit.is_some();
        let boot = text(&object["status"]["nodeInfo"]["bootID"]);
        let booted = match before {
            Some(before) if before.boot == boot => before.booted,
            Some(_) => Some(change.at),
            None => None,
        };
        let last_visit = annotation(LAST_VISIT_ANNOTATION);
        let node = Self {
            loads: annotation(SAFE_LOAD_ANNOTATION).is_some_and(|value| !value.is_empty()),
            was_visited: last_visit.is_some(),
            begun: begun(visit.as_ref(), last_visit),
            last_rollout: last_visit.and_then(last_rollout),
            marks: marks.map(|(key, value)| (key.clone(), text(value))).collect(),
            booted,
            boot,
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
            wanted,
            member: wanted,
            left_fleet: before.and_then(|before| before.left_fleet),
            done_since: None,
            slotless_since: None,
            shielded: opted_out(nvsentinel::OPT_OUT_LABEL) || opted_out(nvsentinel::MANAGED_LABEL),
            shield_recorded: annotation(HEALTH_HOLD_ANNOTATION).is_some(),
            quarantined: annotation(nvsentinel::QUARANTINE_ANNOTATIONS).is_some(),
            quarantined_cordoned: annotation(nvsentinel::CORDON_BEFORE_ANNOTATION).is_some(),
            held: SCALE_DOWN_HOLDS.iter().any(|(key, _)| annotation(key).is_some()),
        };
        let done = node.state() == State::UpgradeDone;
        let known = before.and_then(|before| before.done_since);
        let slotless_since = match before {
            _ if !node.walks() => None,
            Some(before) if before.walks() => before.slotless_since,
            _ => node.needs_no_slot(before).then_some(change.at),
        };
        Self { done_since: done.then(|| known.unwrap_or(change.at)), slotless_since, ..node }
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
    /// It proves a driver, for us.
    Gate,
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
    /// Since when it is ready, …
    pub ready_since: Option<Timestamp>,
    /// … and when it was last seen so.
    pub ready_last: Option<Timestamp>,
    /// The first container's image.
    pub image: String,
    /// How often that container was restarted, …
    restarts: i64,
    /// … and when that was told.
    pub restarted: Vec<Timestamp>,
}

impl Pod {
    pub(super) fn read(object: &Value, before: Option<&Pod>, change: &Change<'_>) -> Self {
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
        } else if label(GATE_LABEL).is_some() {
            Role::Gate
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
        let restarts = status["containerStatuses"][0]["restartCount"].as_i64().unwrap_or_default();
        let known = before.map_or(0, |before| before.restarts);
        let mut restarted = before.map(|before| before.restarted.clone()).unwrap_or_default();
        restarted.extend((known..restarts).map(|_| change.at));
        Self {
            restarts,
            restarted,
            uid,
            role,
            uses_device: !over && containers("containers").chain(containers("initContainers")).any(wants),
            bound_since: bound.filter(|_| !node.is_empty()),
            node,
            deleting: meta["deletionTimestamp"].is_string(),
            ready,
            ready_since: before.and_then(|before| before.ready_since).or(Some(change.at)).filter(|_| ready),
            ready_last: if ready { Some(change.at) } else { ready_last },
            image: text(&spec["containers"][0]["image"]),
        }
    }
}

/// The rollout in which the driver was last brought up.
fn last_rollout(record: &str) -> Option<String> {
    let record: Value = serde_json::from_str(record).ok()?;
    record["rollouts"]["gpu"].as_str().map(str::to_owned)
}

fn begun(visit: Option<&Visit>, last_visit: Option<&str>) -> Option<(String, Timestamp)> {
    if let Some(visit) = visit {
        return visit.rollout.clone().filter(|_| !visit.early).map(|rollout| (rollout, visit.since));
    }
    let record: Value = serde_json::from_str(last_visit?).ok()?;
    let ended = record["ended"].as_str()?.parse().ok()?;
    last_rollout(last_visit?).filter(|_| record["early"] != true).map(|rollout| (rollout, ended))
}

/// The text of a value, if it is one.
pub(super) fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// How pods leave a node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Leaving {
    /// They have so many seconds, 0 for ever.
    pub seconds: i64,
    /// Then they may be deleted past their budgets.
    pub deletes: bool,
}

impl Leaving {
    fn read(said: &Value) -> Self {
        let seconds = said["timeoutSeconds"].as_i64().unwrap_or(LEAVE_SECONDS);
        Self { seconds, deletes: said["timeoutAction"] == "Delete" }
    }

    /// For so many seconds.
    pub fn lasts(&self) -> i64 {
        if self.seconds == 0 { i64::MAX } else { self.seconds }
    }
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
    /// How pods that use the device leave, …
    pub pods: Leaving,
    /// … and how others do.
    pub drain: Leaving,
    /// A node whose pods cannot leave is given up after so many seconds, if at all.
    pub blocked_after: i64,
    /// A driver has so many seconds to come up, …
    pub driver_ready: i64,
    /// … and to prove itself.
    pub validation: i64,
    /// A node that NVSentinel has is not taken from it.
    pub minds_nvsentinel: bool,
    /// Stale clients may be replaced on nodes in service.
    pub refresh_always: bool,
    /// The operator's validators have to prove a driver before a node goes on.
    pub validates: bool,
}

impl Rules {
    pub(super) fn read(spec: &Value, upgrade: &Value, since: Timestamp) -> Option<Self> {
        let unavailable = match &upgrade["maxUnavailable"] {
            Value::Null => serde_json::json!("25%"),
            given => given.clone(),
        };
        let unavailable = serde_json::from_value(unavailable).ok()?;
        let pods = upgrade.get("podDeletion").unwrap_or(&upgrade["gpuPodDeletion"]);
        let limit = |field: &str, default: &str| seconds(spec["limits"][field].as_str().unwrap_or(default));
        Some(Self {
            since,
            pods: Leaving::read(pods),
            drain: Leaving::read(&upgrade["drain"]),
            blocked_after: limit("blockedAfter", "2h"),
            driver_ready: limit("driverReady", "30m"),
            validation: limit("validation", "10m"),
            minds_nvsentinel: spec["health"]["nvsentinel"] != "Off",
            auto_upgrade: upgrade["autoUpgrade"].as_bool().unwrap_or(true),
            max_parallel: upgrade["maxParallelUpgrades"].as_u64().unwrap_or(1),
            max_unavailable: Amount::try_from(&unavailable).ok()?,
            refresh_always: serde_json::from_value(spec["clients"]["refresh"].clone())
                .is_ok_and(|refresh: Refresh| refresh == Refresh::Always),
            validates: spec.is_null()
                || spec["driver"]["validator"]["selector"] == "app=nvidia-operator-validator",
        })
    }
}
