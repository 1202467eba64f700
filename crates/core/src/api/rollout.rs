//! `Rollout`: one move of a pool to one target revision. Made by the controller, kept as history.
//!
//! Its status holds aggregates only; per-node facts stay on the nodes, so its size does not grow with the fleet.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::rollback::{Previous, RollbackStatus, TimelineEntry, Word};
use super::stage::{GateStatus, StagePromotion, StageStatus};

/// How many failures a rollout's status lists; the nodes themselves keep all of them.
pub const ROLLOUT_FAILURES_MAX: usize = 20;

/// One move of a pool to one target.
#[expect(clippy::duplicated_attributes, reason = "the columns of one table share their types")]
#[derive(CustomResource, Serialize, Deserialize, Clone, Debug, PartialEq, JsonSchema)]
#[kube(
    group = "pitcrew.dev",
    version = "v1alpha1",
    kind = "Rollout",
    status = "RolloutStatus",
    derive = "PartialEq",
    printcolumn(name = "Policy", json_path = ".spec.policy", type_ = "string"),
    printcolumn(name = "Version", json_path = ".spec.version", type_ = "string"),
    printcolumn(name = "Phase", json_path = ".status.phase", type_ = "string"),
    printcolumn(name = "Stage", json_path = ".status.stage", type_ = "string"),
    printcolumn(name = "Done", json_path = ".status.done", type_ = "integer"),
    printcolumn(name = "Total", json_path = ".status.total", type_ = "integer"),
    printcolumn(name = "Failed", json_path = ".status.failed", type_ = "integer"),
    printcolumn(name = "Age", json_path = ".metadata.creationTimestamp", type_ = "date")
)]
#[serde(rename_all = "camelCase")]
pub struct RolloutSpec {
    /// The object that states the policy: a DriverPolicy, ClusterPolicy or NVIDIADriver.
    pub policy: String,
    /// The driver.
    pub driver: String,
    /// The driver version, where the image's tag tells it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// The target: each DaemonSet's newest template revision when the rollout began.
    pub target: BTreeMap<String, String>,
    /// No new starts; nodes that still have their old driver are given back, the others finish.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub abort: bool,
    /// Stages that a person has opened the way for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub promotions: Vec<StagePromotion>,
    /// What most nodes ran when it began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub previous: Option<Previous>,
    /// The rollout whose version this one takes back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollback_of: Option<String>,
    /// A person wants the version before back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollback: Option<Word>,
    /// A person says that a version which failed may be tried again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cleared: Option<Word>,
}

impl RolloutSpec {
    /// A move of the pool of `policy` to `target`.
    pub fn new(policy: &str, driver: &str, target: BTreeMap<String, String>) -> Self {
        Self {
            policy: policy.to_owned(),
            driver: driver.to_owned(),
            version: None,
            target,
            abort: false,
            promotions: Vec::new(),
            previous: None,
            rollback_of: None,
            rollback: None,
            cleared: None,
        }
    }
}

/// How far it is.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RolloutStatus {
    /// What it is doing.
    pub phase: RolloutPhase,
    /// Nodes that should run the driver.
    pub total: u32,
    /// Nodes on the target and in service.
    pub done: u32,
    /// Nodes on their walk.
    pub moving: u32,
    /// Nodes that wait for their turn.
    pub waiting: u32,
    /// Nodes that failed and stay cordoned.
    pub failed: u32,
    /// Nodes out of service, by whatever cause.
    pub unavailable: u32,
    /// The stage that is open and not over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stage: Option<String>,
    /// How far each stage is; none if the pool goes as one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<StageStatus>,
    /// What gates have said in a pool that goes as one; otherwise each stage has it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gates: Vec<GateStatus>,
    /// When the first node was found outdated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_at: Option<Time>,
    /// When the last node was done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finished_at: Option<Time>,
    /// The newest failures.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failures: Vec<RolloutFailure>,
    /// Nodes to which something happened soon after they were given back.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub relapses: Vec<RolloutFailure>,
    /// Nodes that came up with the new driver by themselves and were taken out for it, the first by name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub early: Vec<String>,
    /// Why it does not go on, if it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Its version is taken back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollback: Option<RollbackStatus>,
    /// What was decided, the newest last.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub timeline: Vec<TimelineEntry>,
}

/// What a rollout is doing.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema)]
pub enum RolloutPhase {
    /// Nodes are moving or waiting for their turn.
    #[default]
    Running,
    /// The nodes of a stage are watched at work before the next one opens.
    Baking,
    /// A person has to open the next stage.
    AwaitingApproval,
    /// A stage has failed: nothing new starts.
    Halted,
    /// The version before is put back where it came from.
    RollingBack,
    /// The version before is the target again; another rollout brings nodes back to it.
    RolledBack,
    /// The policy says `autoUpgrade: false`.
    Paused,
    /// The policy cannot be followed; its status or the events say why.
    Frozen,
    /// Every node is done.
    Done,
    /// Every node is done or failed, and at least one failed.
    Failed,
    /// A newer target took its place.
    Superseded,
    /// Somebody aborted it, and no node is on its walk any more.
    Aborted,
}

/// One failed node.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RolloutFailure {
    /// The node.
    pub node: String,
    /// When it failed.
    pub at: Time,
    /// Why, in a sentence.
    pub cause: String,
    /// The end of the log of what failed, if it left one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log: Option<String>,
}

impl RolloutFailure {
    /// A failure at `at`.
    pub fn new(node: &str, at: Timestamp, cause: String) -> Self {
        Self { node: node.to_owned(), at: stamp(at), cause, log: None }
    }
}

/// A time as the API keeps it, in whole seconds: what is said again must be equal to what was said before.
pub fn stamp(at: Timestamp) -> Time {
    Time(Timestamp::from_second(at.as_second()).unwrap_or(at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_said_is_read_back_as_it_was() -> serde_json::Result<()> {
        let at = Timestamp::UNIX_EPOCH + jiff::SignedDuration::from_millis(1638);
        let said = RolloutFailure::new("gpu-01", at, "validation".into());
        let read: RolloutFailure = serde_json::from_str(&serde_json::to_string(&said)?)?;
        assert_eq!(read, said);
        Ok(())
    }
}
