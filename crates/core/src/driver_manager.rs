//! What the driver manager writes on its own node, for whoever looks after the node: a cordon that is its own, and a driver
//! that only a reboot brings back. The agent writes these records, the controller reads them.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// The record of a cordon that is the driver manager's own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CordonRecord {
    /// Since when.
    pub since: Timestamp,
}

/// Why only a reboot helps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NeedsReboot {
    /// The boot in which it came about; in another one it is over.
    pub boot: String,
    /// Since when, if whoever wrote it said so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
    /// The sentence.
    pub why: String,
}

impl NeedsReboot {
    /// Reads a record. Whatever else stands there is somebody's wish for a reboot, and none of a certain boot.
    pub fn read(text: &str) -> Self {
        let plain = |_| Self { boot: String::new(), since: None, why: text.to_owned() };
        serde_json::from_str(text).unwrap_or_else(plain)
    }

    /// It is about this boot, as far as both are known.
    pub fn is_of(&self, boot: &str) -> bool {
        self.boot.is_empty() || boot.is_empty() || self.boot == boot
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reboot_ends_what_needed_one() {
        let record = NeedsReboot::read(r#"{"boot":"a","since":"2026-01-01T12:00:00Z","why":"half"}"#);
        assert_eq!((record.why.as_str(), record.since.is_some()), ("half", true));
        assert!(record.is_of("a") && record.is_of("") && !record.is_of("b"));
    }

    #[test]
    fn what_is_no_record_is_a_wish_all_the_same() {
        let record = NeedsReboot::read("firmware was flashed");
        assert_eq!(record.why, "firmware was flashed");
        assert!(record.is_of("a"));
    }
}
