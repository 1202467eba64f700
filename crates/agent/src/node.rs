//! The agent's own node: what it reads of it, and what it writes.
//!
//! Every write is a merge patch of what changes, pinned to the version that was read: whoever else wrote meanwhile is seen
//! before anything is decided.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node as ApiNode;
use pitcrew_core::contract::{
    AGENT_CORDON_ANNOTATION, DEFAULT_LABEL_DOMAIN, GPU_DRIVER, HOST_DRIVER_ANNOTATION, KEEP_CORDONED_LABEL,
    Keys, NEEDS_REBOOT_ANNOTATION, State, VISIT_ANNOTATION, nvsentinel,
};
use pitcrew_core::driver_manager::{CordonRecord, NeedsReboot};
use pitcrew_core::selector::Labels;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// A node, as far as an agent reads it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    /// Its UID.
    pub uid: String,
    /// The version that was read.
    pub version: String,
    /// Its labels.
    pub labels: Labels,
    /// Its annotations.
    pub annotations: BTreeMap<String, String>,
    /// It takes no new work.
    pub unschedulable: bool,
}

impl From<ApiNode> for Node {
    fn from(node: ApiNode) -> Self {
        let ApiNode { metadata, spec, status: _ } = node;
        Self {
            uid: metadata.uid.unwrap_or_default(),
            version: metadata.resource_version.unwrap_or_default(),
            labels: metadata.labels.unwrap_or_default(),
            annotations: metadata.annotations.unwrap_or_default(),
            unschedulable: spec.and_then(|spec| spec.unschedulable).unwrap_or(false),
        }
    }
}

/// What the driver label said before a driver was found on the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BeforeHostDriver {
    /// Its value; absent if there was no label.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<String>,
}

impl Node {
    /// The agent itself has cordoned it.
    pub fn is_cordoned_by_agent(&self) -> bool {
        self.annotations.contains_key(AGENT_CORDON_ANNOTATION)
    }

    /// An upgrade controller looks after the node.
    pub fn is_managed(&self) -> bool {
        self.annotations.get(&keys().enabled).is_some_and(|value| value == "true")
    }

    /// … and has it in hand: it takes a cordon that it found for its own, and relies on it. A failed node is out until a
    /// person comes.
    fn is_in_hand(&self) -> bool {
        let state = self.labels.get(&keys().state).map_or("", String::as_str);
        let at_rest = State::UpgradeRequired.as_str() == state || State::UpgradeDone.as_str() == state;
        self.is_managed() && !state.is_empty() && !at_rest
    }

    /// Why only a reboot helps, if that was in this boot.
    pub fn needs_reboot(&self, boot: &str) -> Option<NeedsReboot> {
        let text = self.annotations.get(NEEDS_REBOOT_ANNOTATION)?;
        let record: NeedsReboot = serde_json::from_str(text).ok()?;
        (record.boot == boot).then_some(record)
    }

    /// Its label says that it has a driver of its own, …
    pub fn says_pre_installed(&self) -> bool {
        self.labels.get(crate::labels::DRIVER).is_some_and(|value| value == PRE_INSTALLED)
    }

    /// … and what it said before, if it is the agent that wrote it.
    pub fn before_host_driver(&self) -> Option<BeforeHostDriver> {
        serde_json::from_str(self.annotations.get(HOST_DRIVER_ANNOTATION)?).ok()
    }

    /// A person's own words about a reboot, which no program takes back: what is no record of the agents.
    pub fn has_words_about_reboot(&self) -> bool {
        let text = self.annotations.get(NEEDS_REBOOT_ANNOTATION);
        text.is_some_and(|text| serde_json::from_str::<NeedsReboot>(text).is_err())
    }

    /// What keeps the agent from giving the node back although the cordon is its own; `None`: nothing.
    pub fn kept_out_by(&self) -> Option<&'static str> {
        let quarantined =
            self.annotations.keys().any(|key| key.starts_with(nvsentinel::QUARANTINE_ANNOTATIONS));
        let kept = self.labels.get(KEEP_CORDONED_LABEL).is_some_and(|value| value == "true");
        match () {
            () if kept => Some("label pitcrew.dev/keep-cordoned=true"),
            () if quarantined => Some("NVSentinel, which has quarantined it"),
            () if self.annotations.contains_key(VISIT_ANNOTATION) => {
                Some("pitcrew's controller, which visits it")
            }
            () if self.is_in_hand() => Some("the upgrade controller, which is at work on it"),
            () if self.has_words_about_reboot() => {
                Some("a person's words in annotation pitcrew.dev/needs-reboot")
            }
            () => None,
        }
    }
}

/// What upgrade controllers write on nodes.
fn keys() -> Keys {
    Keys::new(&GPU_DRIVER.into(), DEFAULT_LABEL_DOMAIN)
}

/// What is written in one patch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// Labels to set, or with `None` to remove.
    pub labels: BTreeMap<String, Option<String>>,
    /// Annotations to set, or with `None` to remove.
    pub annotations: BTreeMap<String, Option<String>>,
    /// To cordon, or to lift the cordon.
    pub unschedulable: Option<bool>,
}

impl Change {
    /// Sets these labels.
    #[must_use]
    pub fn with_labels(mut self, labels: BTreeMap<String, String>) -> Self {
        self.labels.extend(labels.into_iter().map(|(key, value)| (key, Some(value))));
        self
    }

    /// Sets or removes a label.
    #[must_use]
    pub fn with_label(mut self, key: &str, value: Option<String>) -> Self {
        self.labels.insert(key.to_owned(), value);
        self
    }

    /// Sets or removes an annotation.
    #[must_use]
    pub fn with_annotation(mut self, key: &str, value: Option<String>) -> Self {
        self.annotations.insert(key.to_owned(), value);
        self
    }

    /// What is left to write on `node`: what is so already is not written.
    #[must_use]
    pub fn on(mut self, node: &Node) -> Option<Self> {
        self.labels.retain(|key, value| node.labels.get(key) != value.as_ref());
        self.annotations.retain(|key, value| node.annotations.get(key) != value.as_ref());
        self.unschedulable = self.unschedulable.filter(|wanted| *wanted != node.unschedulable);
        (self != Self::default()).then_some(self)
    }

    /// The merge patch, pinned to a version.
    pub fn body(&self, version: &str) -> Value {
        let mut metadata = Map::from_iter([("resourceVersion".to_owned(), json!(version))]);
        for (name, changes) in [("labels", &self.labels), ("annotations", &self.annotations)] {
            if !changes.is_empty() {
                metadata.insert(name.to_owned(), json!(changes));
            }
        }
        let mut body = json!({"metadata": metadata});
        if let Some(unschedulable) = self.unschedulable {
            // Nobody writes `false`: a node that takes work has no such field.
            body["spec"] = json!({"unschedulable": unschedulable.then_some(true)});
        }
        body
    }
}

/// Cordons a node that is not cordoned, and says in the same patch whose cordon it is. A cordon that is there stays whose
/// it was.
pub fn cordon(node: &Node, now: Timestamp) -> Change {
    if node.unschedulable {
        return Change::default();
    }
    let record = serde_json::to_string(&CordonRecord { since: now }).ok();
    let change = Change { unschedulable: Some(true), ..Change::default() };
    change.with_annotation(AGENT_CORDON_ANNOTATION, record)
}

/// Lifts the cordon if it is the agent's own and nothing else keeps the node out. Somebody who has lifted it already has
/// left only the record.
pub fn uncordon(node: &Node) -> Change {
    if !node.is_cordoned_by_agent() || node.kept_out_by().is_some() {
        return Change::default();
    }
    let change = Change { unschedulable: Some(false), ..Change::default() };
    change.with_annotation(AGENT_CORDON_ANNOTATION, None)
}

/// Drops the record of a cordon that somebody has lifted: with it, the next cordon would look like the agent's own.
pub fn without_stale_record(node: &Node) -> Change {
    let stale = node.is_cordoned_by_agent() && !node.unschedulable;
    let change = Change::default();
    if stale { change.with_annotation(AGENT_CORDON_ANNOTATION, None) } else { change }
}

/// Takes back what the agent said about a reboot that is no longer needed.
pub fn reboot_is_over(node: &Node, change: Change) -> Change {
    if node.has_words_about_reboot() {
        return change;
    }
    change.with_annotation(NEEDS_REBOOT_ANNOTATION, None)
}

/// Why only a reboot helps, if the start that has seen it was killed before it could say it.
const SEEN_EARLIER: &str =
    "only part of the driver could be unloaded (by an earlier start); the node needs a reboot";

/// Says that only a reboot helps, and keeps the node out until then. Where a person says so already their words stay: they
/// hold the node longer than the agent's, which end with the boot. `why` is what this start has seen of it; without that,
/// what an earlier one has seen stays.
pub fn needs_reboot(node: &Node, boot: &str, why: Option<&str>, now: Timestamp) -> Change {
    let before = node.needs_reboot(boot);
    // Said once: the time is that of the first finding.
    let since = before.as_ref().and_then(|record| record.since).unwrap_or(now);
    let before = before.map_or_else(|| SEEN_EARLIER.to_owned(), |record| record.why);
    let why = why.map_or(before, str::to_owned);
    let record = NeedsReboot { boot: boot.to_owned(), since: Some(since), why };
    let change = cordon(node, now);
    if node.has_words_about_reboot() {
        return change;
    }
    change.with_annotation(NEEDS_REBOOT_ANNOTATION, serde_json::to_string(&record).ok())
}

/// The value that the documented programs know for nodes with a driver of their own.
const PRE_INSTALLED: &str = "pre-installed";

/// Says that the node has a driver of its own, and remembers what was said before.
pub fn has_host_driver(node: &Node) -> Change {
    if node.says_pre_installed() {
        return Change::default();
    }
    let before = node.labels.get(crate::labels::DRIVER).cloned();
    let record = serde_json::to_string(&BeforeHostDriver { before }).ok();
    Change::default()
        .with_label(crate::labels::DRIVER, Some(PRE_INSTALLED.to_owned()))
        .with_annotation(HOST_DRIVER_ANNOTATION, record)
}

/// The node has no driver of its own any more: the label goes back to what it was. One that somebody else wrote is theirs.
pub fn has_no_host_driver(node: &Node) -> Change {
    let change = Change::default().with_annotation(HOST_DRIVER_ANNOTATION, None);
    if !node.says_pre_installed() {
        return change;
    }
    match node.before_host_driver() {
        Some(BeforeHostDriver { before }) => change.with_label(crate::labels::DRIVER, before),
        None => Change::default(),
    }
}

#[cfg(test)]
mod tests;
