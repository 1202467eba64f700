//! Custom resource definitions: accepted at once.
//!
//! A real server takes a moment to establish a definition; here it is served as soon as it is stored, and its
//! conditions say so.

use super::store::Store;
use serde_json::{Value, json};

/// Writes the status that clients wait for.
pub(super) fn establish(store: &Store, definition: &mut Value) {
    let now = store.clock.stamp();
    let condition = |kind: &str, reason: &str, message: &str| json!({"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": now});
    let stored = definition["spec"]["versions"].as_array().into_iter().flatten();
    let stored: Vec<Value> =
        stored.filter(|version| version["storage"] == true).map(|version| version["name"].clone()).collect();
    definition["status"] = json!({
        "acceptedNames": definition["spec"]["names"],
        "storedVersions": stored,
        "conditions": [
            condition("NamesAccepted", "NoConflicts", "no conflicts found"),
            condition("Established", "InitialNamesAccepted", "the initial names have been accepted"),
        ],
    });
}
