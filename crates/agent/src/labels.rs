//! The operator's operands are switched by node labels: what is paused, and how it is put back.
//!
//! The paused value says what was there before, so whoever finds it can put it back; that is also how NVIDIA's driver
//! manager and the operator read it. What is absent or empty is not written at all: it keeps nothing on the node.

use std::collections::BTreeMap;

use pitcrew_core::selector::Labels;

/// What every operand label begins with.
pub const PREFIX: &str = "nvidia.com/gpu.deploy.";
/// The mark of a paused operand.
pub const PAUSED: &str = "paused-for-driver-upgrade";
/// The longest value that a label may have.
const VALUE_LENGTH_MAX: usize = 63;

/// Paused before anybody is asked to leave.
const FIRST: [&str; 15] = [
    "operator-validator",
    "container-toolkit",
    "device-plugin",
    "gpu-feature-discovery",
    "dcgm-exporter",
    "dcgm",
    "nvsm",
    "sandbox-validator",
    "sandbox-device-plugin",
    "vgpu-device-manager",
    "dra-validator",
    "dcgm-dra",
    "dcgm-exporter-dra",
    "mig-manager",
    "client",
];

/// The label of the DRA kubelet plugin, which gives claims back and so has to leave last.
pub const DRA_DRIVER: &str = "nvidia.com/gpu.deploy.dra-driver";
/// The label of other people's GPU clients.
pub const CLIENT: &str = "nvidia.com/gpu.deploy.client";
/// The label that places the driver itself.
pub const DRIVER: &str = "nvidia.com/gpu.deploy.driver";

/// When an operand is paused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Batch {
    /// Before pods are evicted.
    First,
    /// The label that a user names, if a pod that it places holds a resource claim: it is a client's, and no plugin's.
    Client,
    /// After everybody who holds a resource claim has left.
    Last,
    /// The same without the label that a user names.
    Plugin,
}

/// The labels of a batch. The label that a user names belongs to the last one: it is there for DRA plugins of other
/// installations.
pub fn keys(batch: Batch, custom: Option<&str>) -> Vec<String> {
    match batch {
        Batch::First => FIRST.iter().map(|name| format!("{PREFIX}{name}")).collect(),
        Batch::Client => custom.into_iter().map(str::to_owned).collect(),
        Batch::Plugin => vec![DRA_DRIVER.to_owned()],
        Batch::Last => [Some(DRA_DRIVER), custom].into_iter().flatten().map(str::to_owned).collect(),
    }
}

/// A label whose value leaves no room for the mark.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "label {key}={value} cannot be paused: with \"_{PAUSED}\" its value would be longer than a label may be"
)]
pub struct TooLong {
    /// The label.
    pub key: String,
    /// Its value.
    pub value: String,
}

/// The labels that have to be written to pause a batch.
pub fn pause(
    labels: &Labels,
    batch: Batch,
    custom: Option<&str>,
) -> Result<BTreeMap<String, String>, TooLong> {
    let mut changes = BTreeMap::new();
    for key in keys(batch, custom) {
        let Some(value) = labels.get(&key).and_then(|value| paused(value)) else { continue };
        if value.len() > VALUE_LENGTH_MAX {
            return Err(TooLong { value: labels.get(&key).cloned().unwrap_or_default(), key });
        }
        changes.insert(key, value);
    }
    Ok(changes)
}

/// The labels that have to be written to put everything back.
pub fn restore(labels: &Labels, custom: Option<&str>) -> BTreeMap<String, String> {
    let keys = keys(Batch::First, custom).into_iter().chain(keys(Batch::Last, custom));
    keys.filter_map(|key| Some((restored(labels.get(&key)?)?, key)))
        .map(|(value, key)| (key, value))
        .collect()
}

/// An operand is deployed here, paused or not.
pub fn is_deployed(labels: &Labels, key: &str) -> bool {
    labels.get(key).is_some_and(|value| !value.is_empty() && value != "false")
}

/// The value that pauses an operand; `None` if there is nothing to pause.
fn paused(value: &str) -> Option<String> {
    match value {
        "" | "false" => None,
        value if value.contains(PAUSED) => None,
        "true" => Some(PAUSED.to_owned()),
        other => Some(format!("{other}_{PAUSED}")),
    }
}

/// The value from before a pause; `None` if it is not paused.
fn restored(value: &str) -> Option<String> {
    if value == PAUSED {
        return Some("true".to_owned());
    }
    if let Some(before) = value.strip_suffix(PAUSED).and_then(|before| before.strip_suffix('_')) {
        return Some(before.to_owned());
    }
    // Not ours: somebody else's way of writing the mark, as the documented program reads it.
    let stripped = value.contains(PAUSED).then(|| value.replace(PAUSED, ""))?;
    Some(stripped.trim_matches('_').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn paused_values_are_the_documented_ones() {
        for (before, after) in [
            ("", None),
            ("false", None),
            ("true", Some("paused-for-driver-upgrade")),
            ("paused-for-driver-upgrade", None),
            ("custom_paused-for-driver-upgrade", None),
            ("custom", Some("custom_paused-for-driver-upgrade")),
        ] {
            assert_eq!(paused(before).as_deref(), after, "{before}");
        }
    }

    #[test]
    fn every_value_comes_back_as_it_was() {
        for value in ["true", "custom", "a_b", "TRUE", "0", "x.y-z"] {
            let paused = paused(value).unwrap();
            assert_eq!(restored(&paused).as_deref(), Some(value));
        }
        for value in ["", "false", "true", "custom"] {
            assert_eq!(restored(value), None, "not paused: {value}");
        }
        assert_eq!(restored("paused-for-driver-upgrade_v").as_deref(), Some("v"));
    }

    #[test]
    fn an_absent_label_stays_absent_and_an_empty_one_empty() {
        let before = labels(&[("nvidia.com/gpu.deploy.dcgm", ""), ("nvidia.com/gpu.deploy.nvsm", "false")]);
        assert_eq!(pause(&before, Batch::First, None), Ok(BTreeMap::new()));
        assert_eq!(restore(&before, None), BTreeMap::new());
    }

    #[test]
    fn a_pause_and_its_end_leave_the_labels_as_they_were() {
        let before = labels(&[
            ("nvidia.com/gpu.deploy.device-plugin", "true"),
            ("nvidia.com/gpu.deploy.dcgm", "custom"),
            ("nvidia.com/gpu.deploy.dra-driver", "true"),
            ("example.com/gpu-client", "yes"),
            ("nvidia.com/gpu.deploy.driver", "true"),
        ]);
        let custom = Some("example.com/gpu-client");
        let mut after = before.clone();
        for batch in [Batch::First, Batch::Last] {
            after.extend(pause(&after, batch, custom).unwrap());
        }
        assert_eq!(after["nvidia.com/gpu.deploy.driver"], "true");
        assert_eq!(after.values().filter(|value| value.contains(PAUSED)).count(), 4);
        after.extend(restore(&after, custom));
        assert_eq!(after, before);
    }

    #[test]
    fn plugins_of_other_installations_leave_in_the_last_batch() {
        let custom = Some("nvidia.com/dra-kubelet-plugin");
        assert!(!keys(Batch::First, custom).contains(&"nvidia.com/dra-kubelet-plugin".to_owned()));
        assert_eq!(keys(Batch::Last, custom), [DRA_DRIVER, "nvidia.com/dra-kubelet-plugin"]);
    }

    #[test]
    fn a_value_without_room_for_the_mark_is_named() {
        let long = "a".repeat(40);
        let labels = labels(&[("nvidia.com/gpu.deploy.dcgm", &long)]);
        let refused = pause(&labels, Batch::First, None).unwrap_err();
        assert_eq!(refused.key, "nvidia.com/gpu.deploy.dcgm");
    }
}
