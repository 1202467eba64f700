//! The way back: what a rollout came from, who wants that back, and how far it is.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How many decisions a rollout's status lists.
pub const TIMELINE_MAX: usize = 40;

/// What most nodes ran when a rollout began: where a rollback goes.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Previous {
    /// Each DaemonSet's template revision.
    pub target: BTreeMap<String, String>,
    /// The driver version, where the image's tag tells it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
}

/// What a person said.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Word {
    /// Who.
    #[schemars(length(max = 253))]
    pub by: String,
    /// When.
    pub at: Time,
    /// Why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub why: Option<String>,
}

/// A version that is taken back.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RollbackStatus {
    /// Since when.
    pub since: Time,
    /// Who decided it.
    pub by: String,
    /// Why.
    pub why: String,
    /// How often the version was put back: somebody may set it again.
    pub tries: u32,
    /// What a person has to do, where pitcrew must not or cannot put the version back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

impl RollbackStatus {
    /// What there is to say about it.
    pub fn says(&self) -> String {
        let what = self.message.as_ref().map(|what| format!("; {what}")).unwrap_or_default();
        format!("taken back by {}: {}{what}", self.by, self.why)
    }
}

/// One decision in the life of a rollout.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TimelineEntry {
    /// When.
    pub at: Time,
    /// What, and why.
    pub what: String,
    /// Who decided it.
    pub by: String,
}

/// What happens when a stage fails.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, JsonSchema)]
pub enum OnFailure {
    /// The version before is put back, and nodes that were upgraded go back to it.
    Rollback,
    /// Nothing starts any more until a person decides.
    Pause,
}
