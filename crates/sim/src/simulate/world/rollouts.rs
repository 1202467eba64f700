//! Rollouts and their stages, as far as the promises are about them.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use serde_json::Value;

use super::objects::text;

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
    /// Since when a person has cleared it.
    pub cleared_since: Option<Timestamp>,
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

    /// Since when it has been watched, the last time.
    pub fn baking_since(&self) -> Option<Timestamp> {
        self.baking_since
    }

    /// It went wrong.
    pub fn is_bad(&self) -> bool {
        matches!(self.phase.as_str(), "Failed" | "Spoiled")
    }

    pub(super) fn read(said: &Value, before: Option<&StageSeen>, at: Timestamp) -> Self {
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

    /// A person has cleared it.
    pub fn is_cleared(&self) -> bool {
        self.cleared_since.is_some()
    }

    /// It went wrong and was cleared: what it was for begins anew.
    pub(super) fn is_spent(&self) -> bool {
        self.is_cleared() && (self.back_since.is_some() || self.bad_since().is_some())
    }

    pub(super) fn read(object: &Value, before: Option<&Rollout>, at: Timestamp) -> Self {
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
            cleared_since: since(!spec["cleared"].is_null(), |known| known.cleared_since),
            promoted: promotions().map(|promotion| text(&promotion["stage"])).collect(),
            skip_bake: promotions()
                .filter(|promotion| promotion["skipBake"] == true)
                .map(|promotion| text(&promotion["stage"]))
                .collect(),
            stages: stages.collect(),
        }
    }
}
