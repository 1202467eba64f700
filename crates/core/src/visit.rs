//! The visit record: what pitcrew keeps on a node while it owns it, in one annotation.
//!
//! It is written in the same PATCH as the state label and the cordon, so a crash between two writes loses nothing:
//! whoever leads next reads it and goes on. During a visit the record is the truth and the label its mirror.

use std::collections::BTreeMap;
use std::fmt;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use crate::contract::State;
use crate::gate::Numbers;
use crate::names::{DriverName, GateName, ObjectName, RevisionHash, Uid};
use crate::snapshot::{Node, Pod};

/// The format that this program writes. It reads no other: a newer one belongs to a newer pitcrew.
const FORMAT: u32 = 1;

/// A visit: the time in which pitcrew owns a node, from cordon to release.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Visit {
    /// The format of the record.
    v: u32,
    /// The rollout that it belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollout: Option<String>,
    /// Since when.
    pub since: Timestamp,
    /// The node came up with a driver whose stage is not open: it was taken out to be proven.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub early: bool,
    /// What was set on the node and is put back at the end.
    #[serde(default)]
    pub holds: Holds,
    /// What the node had when the visit began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<Before>,
    /// The walk of each driver.
    pub drivers: BTreeMap<DriverName, Walk>,
}

/// What a node had before its driver was touched, and must have again.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Before {
    /// The DaemonSets of the driver's clients.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub clients: Vec<ObjectName>,
    /// Devices that it offered.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub devices: u32,
}

/// What was set on the node for the visit.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Holds {
    /// We cordoned it. `false`: somebody else had, and the cordon is theirs to lift.
    #[serde(default)]
    pub cordon: bool,
    /// Annotations that we set, and what they were before.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, Option<String>>,
}

impl Holds {
    /// The cordon alone.
    pub fn only_cordon() -> Self {
        Self { cordon: true, annotations: BTreeMap::new() }
    }
}

/// A clock that was set back during a pause must not take time away from a limit.
fn passed(since: Timestamp, now: Timestamp) -> SignedDuration {
    now.duration_since(since).max(SignedDuration::ZERO)
}

/// One driver's walk within a visit.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Walk {
    /// Where it stands.
    pub state: State,
    /// Since when.
    pub since: Timestamp,
    /// How much of that time was paused.
    #[serde(default, skip_serializing_if = "Pause::is_none")]
    pub paused: Pause,
    /// The revision that it walks to.
    pub target: RevisionHash,
    /// How often a person or a new version started it again.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub attempts: u32,
    /// A person asked for this try.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub by_hand: bool,
    /// The driver pod of a failed attempt: replaced by the next one even if its revision is right.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replace: Option<Uid>,
    /// How often pods that use the device were back when it was time to restart the driver.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub came_back: u32,
    /// When somebody's uncordon was undone: until then, anything could be put on the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recordoned: Option<Timestamp>,
    /// The driver pod whose trouble was told in an event: once each.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub told: Option<Uid>,
    /// What gates have said, by their names.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub gates: Gates,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<Failure>,
}

/// What gates have said on one node, by their names.
pub type Gates = BTreeMap<GateName, GateNote>;

/// What one gate has said on a node.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GateNote {
    /// What it measured before the driver was restarted, as far as that is compared later. `None`: nobody asked it, since
    /// the node had no driver that worked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<Numbers>,
    /// The driver that it let pass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passed: Option<String>,
    /// How long that took …
    #[serde(default, skip_serializing_if = "is_zero_seconds")]
    pub seconds: i64,
    /// … and when it was known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<Timestamp>,
}

/// Time that does not count against a deadline.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Pause {
    /// Paused since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
    /// Seconds of earlier pauses in this state.
    #[serde(default, skip_serializing_if = "is_zero_seconds")]
    pub seconds: i64,
}

impl Pause {
    fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

/// Why a walk failed, and with which driver pod.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Failure {
    /// The cause.
    #[serde(flatten)]
    pub cause: Cause,
    /// The driver pod at that time: a person who replaces it wants another look.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<Uid>,
}

/// Causes of failure. Each has its sentence, here and nowhere else.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "cause", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Cause {
    /// Pods that may not be evicted.
    PodsCannotLeave {
        /// Which, and why.
        #[serde(flatten)]
        found: Finding,
    },
    /// Pods did not leave in time.
    PodsDidNotLeave {
        /// Which.
        #[serde(flatten)]
        found: Finding,
        /// The limit.
        seconds: i64,
    },
    /// The new driver pod did not become ready in time.
    DriverNotReady {
        /// What its containers say.
        #[serde(flatten)]
        found: Finding,
        /// The limit.
        seconds: i64,
    },
    /// A client of the driver did not come back in time.
    ClientNotBack {
        /// Its DaemonSet.
        client: ObjectName,
        /// What was the matter with it.
        #[serde(flatten)]
        found: Finding,
        /// The limit.
        seconds: i64,
    },
    /// A gate says no, or could not be asked.
    Gate {
        /// Which.
        gate: GateName,
        /// What it says.
        #[serde(flatten)]
        found: Finding,
        /// It could not judge, so it says nothing about the driver.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        unjudged: bool,
        /// The end of its log.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        log: String,
    },
    /// Only a reboot brings the driver back, and there was none in time.
    NeedsReboot {
        /// What the driver manager says.
        #[serde(flatten)]
        found: Finding,
        /// The limit.
        seconds: i64,
    },
    /// Validation did not pass in time.
    NotValidated {
        /// What was missing.
        #[serde(flatten)]
        found: Finding,
        /// The limit.
        seconds: i64,
    },
}

impl Cause {
    /// What was found.
    pub fn found(&self) -> &Finding {
        match self {
            Cause::PodsCannotLeave { found }
            | Cause::PodsDidNotLeave { found, .. }
            | Cause::DriverNotReady { found, .. }
            | Cause::ClientNotBack { found, .. }
            | Cause::Gate { found, .. }
            | Cause::NeedsReboot { found, .. }
            | Cause::NotValidated { found, .. } => found,
        }
    }

    /// It says nothing about the new driver: that never came to run, or nobody could judge it. A version that was never tried is
    /// not a bad one.
    pub fn is_blameless(&self) -> bool {
        match self {
            Cause::PodsCannotLeave { .. } | Cause::PodsDidNotLeave { .. } | Cause::NeedsReboot { .. } => true,
            Cause::Gate { unjudged, .. } => *unjudged,
            Cause::DriverNotReady { .. } | Cause::ClientNotBack { .. } | Cause::NotValidated { .. } => false,
        }
    }

    /// The end of the log of what failed, if it left one.
    pub fn log(&self) -> Option<&str> {
        match self {
            Cause::Gate { log, .. } => Some(log.as_str()).filter(|log| !log.is_empty()),
            _ => None,
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cause::PodsCannotLeave { found } => write!(f, "pods cannot be evicted: {found}"),
            Cause::PodsDidNotLeave { found, seconds } => {
                write!(f, "pods did not leave within {seconds} s: {found}")
            }
            Cause::DriverNotReady { found, seconds } => {
                write!(f, "driver pod not ready after {seconds} s: {found}")
            }
            Cause::ClientNotBack { client, found, seconds } => {
                write!(f, "driver client daemonset/{client} not back after {seconds} s: {found}")
            }
            Cause::Gate { gate, found, .. } => write!(f, "gate {gate} {found}"),
            Cause::NeedsReboot { found, seconds } => {
                write!(f, "needs a reboot and had none in {seconds} s: {found}")
            }
            Cause::NotValidated { found, seconds } => write!(f, "not validated after {seconds} s: {found}"),
        }
    }
}

/// What stands in a node's way: a sentence, the pod that it is about, and the option that would help.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Finding {
    /// The sentence. It names the pod too.
    pub what: String,
    /// The pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub about: Option<ObjectName>,
    /// What would allow to take it off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remedy: Option<Remedy>,
}

/// Options of the policy that allow to evict more pods.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Remedy {
    /// `force`: pods that nobody makes again.
    Force,
    /// `deleteEmptyDir`: pods whose data is lost.
    DeleteEmptyDir,
}

impl Remedy {
    /// The option's name in a policy.
    pub fn option(self) -> &'static str {
        match self {
            Remedy::Force => "force",
            Remedy::DeleteEmptyDir => "deleteEmptyDir",
        }
    }
}

impl Finding {
    /// About no pod.
    pub fn plain(what: impl Into<String>) -> Self {
        Self { what: what.into(), about: None, remedy: None }
    }

    /// About a pod, which the sentence names.
    pub fn about(pod: &ObjectName, what: String) -> Self {
        Self { what, about: Some(pod.clone()), remedy: None }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

/// What stays on a node of its last visit.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LastVisit {
    /// The rollout that it belonged to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollout: Option<String>,
    /// When it began, if it went through in one go: where somebody had to try again, that tells how long people took.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub began: Option<Timestamp>,
    /// When it ended.
    pub ended: Timestamp,
    /// The node had come up with a driver whose stage was not open.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub early: bool,
    /// The rollout in which each driver was last brought up, …
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub rollouts: BTreeMap<DriverName, String>,
    /// … and what gates said of it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub gates: BTreeMap<DriverName, Gates>,
    /// The driver pods that it ended with; after a boot during a bake, as they were when they were ready again.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub pods: BTreeMap<DriverName, DriverPod>,
    /// It was left cordoned, because somebody else's cordon was on it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cordoned: bool,
}

/// A driver pod, and how often its container had started again: what comes on top of that, nobody asked for.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DriverPod {
    /// Which pod.
    pub uid: Uid,
    /// How often.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub restarts: u32,
    /// As its container ran then: another one since the same boot has started again by itself.
    #[serde(default)]
    pub incarnation: u64,
    /// The boot of its node: a driver that started again since another one was told to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot: Option<String>,
}

impl DriverPod {
    /// A driver pod as it is now.
    pub fn of(pod: &Pod, node: &Node) -> Self {
        let boot = Some(node.boot_id.to_string()).filter(|boot| !boot.is_empty());
        Self { uid: pod.uid.clone(), restarts: pod.restarts, incarnation: pod.incarnation, boot }
    }

    /// The node has not been booted since.
    pub fn is_same_boot(&self, node: &Node) -> bool {
        node.boot_id.is_empty() || self.boot.as_deref() == Some(&*node.boot_id)
    }
}

impl LastVisit {
    /// The rollout in which a driver was last brought up on the node.
    pub fn rollout_of(&self, driver: &DriverName) -> Option<&str> {
        self.rollouts.get(driver).map(String::as_str)
    }

    /// How long it took, if it tells how long a visit takes.
    pub fn took(&self) -> Option<SignedDuration> {
        // Nobody was asked to leave, and no driver was restarted.
        let began = self.began.filter(|_| !self.early)?;
        Some(self.ended.duration_since(began))
    }

    /// The annotation's text.
    pub fn to_text(&self) -> String {
        // Plain values: serialising them cannot fail.
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// A visit annotation that this program cannot read.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Unreadable {
    /// Somebody edited it, or it was cut.
    #[error("it is not a visit record: {0}")]
    Malformed(String),
    /// Written by a newer pitcrew.
    #[error("it has format {0}, this pitcrew reads format {FORMAT}")]
    Format(u32),
}

impl Visit {
    /// A visit that begins now with one driver's walk.
    pub fn begin(
        rollout: Option<String>,
        now: Timestamp,
        holds: Holds,
        driver: DriverName,
        walk: Walk,
    ) -> Self {
        Self {
            v: FORMAT,
            rollout,
            since: now,
            early: false,
            holds,
            before: None,
            drivers: BTreeMap::from([(driver, walk)]),
        }
    }

    /// Whether something that was made then was there when the visit began. The API counts in whole seconds.
    pub fn found(&self, created: Timestamp) -> bool {
        created <= self.since
    }

    /// Reads the annotation.
    pub fn parse(text: &str) -> Result<Self, Unreadable> {
        #[derive(Deserialize)]
        struct Envelope {
            v: u32,
        }
        let malformed = |e: serde_json::Error| Unreadable::Malformed(e.to_string());
        let Envelope { v } = serde_json::from_str(text).map_err(malformed)?;
        if v != FORMAT {
            return Err(Unreadable::Format(v));
        }
        serde_json::from_str(text).map_err(malformed)
    }

    /// The annotation's text.
    pub fn to_text(&self) -> String {
        // A map with string keys and plain values: serialising it cannot fail.
        serde_json::to_string(self).unwrap_or_default()
    }
}

impl Walk {
    /// A walk that enters `state` now.
    pub fn begin(state: State, now: Timestamp, target: RevisionHash) -> Self {
        Self {
            state,
            since: now,
            paused: Pause::default(),
            target,
            attempts: 0,
            by_hand: false,
            replace: None,
            came_back: 0,
            recordoned: None,
            told: None,
            gates: Gates::new(),
            failure: None,
        }
    }

    /// The same walk, one state on.
    #[must_use]
    pub fn enter(&self, state: State, now: Timestamp) -> Self {
        Self { state, since: now, paused: Pause::default(), failure: None, ..self.clone() }
    }

    /// The same walk from its beginning, to `target`, because a person or a new version asks for it.
    #[must_use]
    pub fn retry(&self, now: Timestamp, target: RevisionHash) -> Self {
        // A second retry before the restart must not forget the pod that the first one was about.
        let replace = self.failure.as_ref().and_then(|f| f.pod.clone()).or_else(|| self.replace.clone());
        Self {
            attempts: self.attempts.saturating_add(1),
            replace,
            // What was measured before the visit is still what was before the visit.
            gates: self.gates.clone(),
            ..Self::begin(State::UpgradeRequired, now, target)
        }
    }

    /// The same walk, failed.
    #[must_use]
    pub fn fail(&self, now: Timestamp, failure: Failure) -> Self {
        Self { failure: Some(failure), ..self.enter(State::UpgradeFailed, now) }
    }

    /// When a limit on the present state runs out. Paused time does not count.
    pub fn deadline(&self, limit: SignedDuration, now: Timestamp) -> Timestamp {
        let paused_now = self.paused.since.map_or(SignedDuration::ZERO, |since| passed(since, now));
        // People edit annotations, and a limit may be as long as its field: no sum here may overflow.
        let paused = paused_now.saturating_add(SignedDuration::from_secs(self.paused.seconds));
        self.since.saturating_add(limit.saturating_add(paused)).unwrap_or(Timestamp::MAX)
    }

    /// The same walk with the pause beginning or ending now; `None` if it already is so.
    pub fn with_pause(&self, paused: bool, now: Timestamp) -> Option<Self> {
        let pause = match (paused, self.paused.since) {
            (true, None) => Pause { since: Some(now), ..self.paused },
            (false, Some(since)) => {
                let seconds = self.paused.seconds.saturating_add(passed(since, now).as_secs());
                Pause { since: None, seconds }
            }
            _ => return None,
        };
        Some(Self { paused: pause, ..self.clone() })
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it with a reference")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it with a reference")]
fn is_zero_seconds(number: &i64) -> bool {
    *number == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    #[test]
    fn the_record_reads_back_and_stays_small() {
        let now = at("2026-01-01T00:00:00Z");
        let mut walk = Walk::begin(State::UpgradeFailed, now, "6b7f".into());
        let pod = ObjectName::new("gpu-operator", "validator-x");
        let found = Finding::about(&pod, format!("pod {pod} is not ready"));
        let cause = Cause::NotValidated { found, seconds: 600 };
        walk.failure = Some(Failure { cause, pod: Some("uid-1".into()) });
        let visit = Visit::begin(Some("gpu-1".into()), now, Holds::only_cordon(), "gpu".into(), walk);
        let text = visit.to_text();
        assert_eq!(Visit::parse(&text), Ok(visit));
        assert!(text.len() < 500, "{text}");
    }

    #[test]
    fn foreign_texts_are_refused_not_guessed() {
        assert!(matches!(Visit::parse("yes"), Err(Unreadable::Malformed(_))));
        assert!(matches!(Visit::parse("{}"), Err(Unreadable::Malformed(_))));
        assert_eq!(Visit::parse(r#"{"v":2,"new":"things"}"#), Err(Unreadable::Format(2)));
    }

    #[test]
    fn the_last_visit_is_read_also_if_nobody_wrote_down_when_it_began() {
        let last: LastVisit = serde_json::from_str(r#"{"ended":"2026-01-01T00:10:00Z"}"#).unwrap();
        assert_eq!(last.took(), None);
        let last = LastVisit { began: Some(at("2026-01-01T00:00:00Z")), ..last };
        assert_eq!(serde_json::from_str::<LastVisit>(&last.to_text()).unwrap(), last);
        assert_eq!(last.took(), Some(SignedDuration::from_mins(10)));
        let early = LastVisit { early: true, ..last };
        assert_eq!(early.took(), None, "a node that was only proven");
    }

    #[test]
    fn deadlines_do_not_run_while_paused() {
        let walk = Walk::begin(State::ValidationRequired, at("2026-01-01T00:00:00Z"), "6b7f".into());
        let limit = SignedDuration::from_mins(10);
        let paused = walk.with_pause(true, at("2026-01-01T00:04:00Z")).unwrap();
        assert_eq!(paused.deadline(limit, at("2026-01-01T05:04:00Z")), at("2026-01-01T05:10:00Z"));
        let resumed = paused.with_pause(false, at("2026-01-01T05:04:00Z")).unwrap();
        assert_eq!(resumed.deadline(limit, at("2026-01-01T05:05:00Z")), at("2026-01-01T05:10:00Z"));
        assert_eq!(resumed.with_pause(false, at("2026-01-01T05:05:00Z")), None);
        // A clock that was set back meanwhile takes no time away.
        let set_back = at("2026-01-01T00:01:00Z");
        assert_eq!(paused.deadline(limit, set_back), at("2026-01-01T00:10:00Z"));
        let resumed = paused.with_pause(false, set_back).unwrap();
        assert_eq!(resumed.deadline(limit, set_back), at("2026-01-01T00:10:00Z"));
    }
}
