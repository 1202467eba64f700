//! Health systems: what NVSentinel writes on a node, and the hold by which pitcrew keeps its hands off it.
//!
//! While a driver is away, DCGM is too, and NVSentinel would take the node for a broken one. The hold is a label that it
//! honours, and an annotation that says who set it, what was there before and until when: so it is undone by whoever
//! finds it, even if nothing else is left of the visit that set it.

use std::fmt;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::contract::nvsentinel;
use crate::snapshot::Node;

/// The label's value by which a node is left alone.
pub const OPTED_OUT: &str = "false";

/// By which label a node is opted out.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Shield {
    /// No new quarantine; conditions are still written.
    Quarantine,
    /// Nothing at all happens to the node; conditions are not written either.
    Everything,
}

impl Shield {
    /// Both.
    pub const ALL: [Shield; 2] = [Shield::Quarantine, Shield::Everything];

    /// The label.
    pub fn label(self) -> &'static str {
        match self {
            Shield::Quarantine => nvsentinel::OPT_OUT_LABEL,
            Shield::Everything => nvsentinel::MANAGED_LABEL,
        }
    }
}

/// Who keeps health systems off a node, and what was there before.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HealthHold {
    /// A visit, or a person's `pitcrew health-hold`.
    pub owner: Owner,
    /// By which label.
    pub shield: Shield,
    /// The label's value before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<String>,
    /// Since when.
    pub since: Timestamp,
    /// When it ends by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<Timestamp>,
}

/// Who holds.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Owner {
    /// A driver's visit: over with it.
    Visit,
    /// A person, for work of their own.
    Person(String),
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Owner::Visit => f.write_str("a driver upgrade"),
            Owner::Person(name) => f.write_str(name),
        }
    }
}

impl HealthHold {
    /// The annotation's text.
    pub fn to_text(&self) -> String {
        // Plain values: serialising them cannot fail.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Whether the label is still as the hold left it.
    pub fn stands(&self, node: &Node) -> bool {
        node.labels().get(self.shield.label()).is_some_and(|value| value == OPTED_OUT)
    }
}

/// What NVSentinel has done to a node, in words; `None` if it has left it alone.
pub fn quarantine(node: &Node) -> Option<String> {
    if let Some(state) = node.labels().get(nvsentinel::STATE_LABEL).filter(|state| !state.is_empty()) {
        return Some(format!("NVSentinel has it in state {state}"));
    }
    let quarantined = |key: &&String| key.starts_with(nvsentinel::QUARANTINE_ANNOTATIONS);
    if let Some(mark) = node.annotations.keys().find(quarantined) {
        return Some(format!("NVSentinel has quarantined it (annotation {mark})"));
    }
    node.remediated.then(|| format!("somebody else repairs it (taint {})", nvsentinel::REMEDIATION_TAINT))
}

/// Whether the cordon on a node is NVSentinel's, or also NVSentinel's.
pub fn cordoned_by_nvsentinel(node: &Node) -> bool {
    node.annotations.contains_key(nvsentinel::CORDONED_ANNOTATION)
}
