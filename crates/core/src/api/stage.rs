//! How far the stages of a rollout are. Written before it is acted upon: a stage opens when the API says that the one
//! before it has passed, whoever leads by then.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// One stage of a rollout.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct StageStatus {
    /// Its name.
    pub name: String,
    /// What it is doing.
    pub phase: StagePhase,
    /// Since when.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Time>,
    /// Its nodes; those that are left out do not count.
    pub total: u32,
    /// Those on the target and in service.
    pub done: u32,
    /// Those that failed and stay cordoned.
    pub failed: u32,
    /// What gates have said.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gates: Vec<GateStatus>,
    /// What was seen of its nodes at work.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bake: Option<BakeStatus>,
    /// Why it does not go on, or why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// What a stage is doing.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema)]
pub enum StagePhase {
    /// The stages before it come first.
    #[default]
    Waiting,
    /// Its nodes are upgraded.
    Moving,
    /// Its nodes are done, and the gates at its end are asked.
    Proving,
    /// Its nodes are watched at work.
    Baking,
    /// A person has to say that the next one may begin.
    AwaitingApproval,
    /// The next one may begin.
    Passed,
    /// Too many of its nodes failed.
    Failed,
    /// Its nodes did not stand the test of work.
    Spoiled,
}

impl StagePhase {
    /// It went wrong.
    pub fn is_bad(self) -> bool {
        matches!(self, StagePhase::Failed | StagePhase::Spoiled)
    }
}

/// What a gate has said in a stage, or in a pool without stages.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GateStatus {
    /// Its name.
    pub name: String,
    /// When it was asked.
    pub when: GateWhen,
    /// How often it passed.
    pub passed: u32,
    /// How often it failed.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub failed: u32,
    /// How often it could not judge.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub unjudged: u32,
    /// The longest that it took to pass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub longest_seconds: Option<i64>,
    /// When it last said something …
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_at: Option<Time>,
    /// … and how long that took, if it passed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_seconds: Option<i64>,
    /// What it said when it last did not pass …
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// … and the end of its log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log: Option<String>,
}

/// When a gate is asked.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, JsonSchema)]
pub enum GateWhen {
    /// During the validation of each node.
    Node,
    /// At the end of a stage.
    Stage,
    /// Again and again while the stage bakes.
    Bake,
}

impl GateStatus {
    /// A gate that has said nothing yet.
    pub fn new(name: &str, when: GateWhen) -> Self {
        Self {
            name: name.to_owned(),
            when,
            passed: 0,
            failed: 0,
            unjudged: 0,
            longest_seconds: None,
            last_at: None,
            last_seconds: None,
            message: None,
            log: None,
        }
    }

    /// It is about this gate at this time.
    pub fn is_of(&self, name: &str, when: GateWhen) -> bool {
        self.name == name && self.when == when
    }

    /// It passed once more.
    pub fn pass(&mut self, at: Option<Time>, seconds: i64) {
        self.passed = self.passed.saturating_add(1);
        self.longest_seconds = self.longest_seconds.max(Some(seconds));
        if self.is_news(at) {
            self.last_seconds = Some(seconds);
        }
    }

    /// It failed once more.
    pub fn fail(&mut self, at: Option<Time>, why: String, log: &str) {
        self.failed = self.failed.saturating_add(1);
        if self.is_news(at) || self.message.is_none() {
            self.last_seconds = None;
            self.message = Some(why);
            self.log = Some(log.to_owned()).filter(|log| !log.is_empty());
        }
    }

    /// Once more it could not judge.
    pub fn unjudge(&mut self, at: Option<Time>, why: String) {
        self.unjudged = self.unjudged.saturating_add(1);
        if self.is_news(at) || self.message.is_none() {
            self.last_seconds = None;
            self.message = Some(why);
        }
    }

    /// Nothing that is known was said later. Nodes tell in the order of their names.
    fn is_news(&mut self, at: Option<Time>) -> bool {
        let is_news = at >= self.last_at;
        if is_news {
            self.last_at = at;
        }
        is_news
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it with a reference")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// What was seen of a stage's nodes at work. Only time in which somebody looked, and could judge, counts.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BakeStatus {
    /// Since when they are watched.
    pub since: Time,
    /// When they were last looked at.
    pub looked_at: Time,
    /// At that look, or at a moment since, they could not all be judged: the time until the next look does not count.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unjudged: bool,
    /// How much of the time since then counts, in seconds.
    pub seconds: i64,
    /// How much of it is needed.
    pub needed_seconds: i64,
    /// Devices at work, times seconds.
    #[serde(default)]
    pub device_seconds: i64,
    /// Pods that started on the devices.
    #[serde(default)]
    pub job_starts: u32,
    /// What Prometheus said at the last look.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub queries: Vec<QueryStatus>,
}

/// What a query said at the last look.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct QueryStatus {
    /// Its name.
    pub name: String,
    /// Of its values the one that is nearest to its bound, or farthest beyond it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<f64>,
    /// Why there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// A person's word that the stage after this one may begin.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct StagePromotion {
    /// The stage that has done enough.
    #[schemars(length(max = 63))]
    pub stage: String,
    /// Who said so.
    #[schemars(length(max = 253))]
    pub by: String,
    /// When.
    pub at: Time,
    /// Without waiting for the rest of its bake, or in spite of what was seen in it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub skip_bake: bool,
}
