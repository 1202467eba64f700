//! What a gate's Job is for: recorded on the Job and its pods as one annotation, and told apart by its name.

use serde::{Deserialize, Serialize};

use crate::clients::fnv;
use crate::names::{GateName, NodeName};

/// Whether a sample was taken before the driver was restarted or after.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Sample {
    /// Before: nobody judges it, others are compared with it.
    Before,
    /// After: the gate itself.
    After,
}

/// What a gate's Job is for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GateRun {
    /// The gate.
    pub gate: GateName,
    /// The rollout.
    pub rollout: String,
    /// The stage at whose end it runs; `None`: during a node's visit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stage: Option<String>,
    /// The nodes under test, in the order of their ranks. During a visit it is one.
    pub nodes: Vec<NodeName>,
    /// Before or after the restart.
    pub sample: Sample,
    /// 1 for the first Job of its kind.
    pub attempt: u32,
    /// What is looked at: which driver of a node, or which round of a bake.
    pub subject: String,
}

impl GateRun {
    /// The Job's name: the same for the same run, another for any other. With the number of a pod behind it, it is still
    /// a DNS label.
    pub fn job_name(&self) -> String {
        let Self { gate, rollout, stage, nodes, sample, attempt, subject } = self;
        let (prefix, sample) = match sample {
            Sample::Before => ("b", "before"),
            Sample::After => ("a", "after"),
        };
        let stage = stage.as_deref().unwrap_or_default();
        let parts = [rollout.as_str(), stage, sample, subject];
        let nodes = nodes.iter().map(NodeName::as_str);
        let id = parts.into_iter().chain(nodes).fold(fnv(0, gate.as_str()), fnv);
        format!("gate-{gate}-{id:016x}-{prefix}{attempt}")
    }

    /// The nodes under test, as a label's value.
    pub(super) fn nodes_label(&self) -> String {
        format!("{:016x}", self.nodes.iter().map(NodeName::as_str).fold(0, fnv))
    }

    /// The rollout, as a label's value.
    pub(super) fn rollout_label(&self) -> String {
        rollout_label(&self.rollout)
    }
}

/// A rollout's name as a label's value: itself, or a hash if it is too long.
fn rollout_label(rollout: &str) -> String {
    let inner = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
    if rollout.len() <= 63 && rollout.bytes().all(inner) {
        rollout.to_owned()
    } else {
        format!("{:016x}", fnv(0, rollout))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run() -> GateRun {
        GateRun {
            gate: "smoke-training".into(),
            rollout: "gpu-7".into(),
            stage: None,
            nodes: vec!["gpu-01".into()],
            sample: Sample::After,
            attempt: 1,
            subject: "7d9f".into(),
        }
    }

    #[test]
    fn a_job_is_named_after_all_that_tells_it_apart() {
        let first = run().job_name();
        assert_eq!(first, run().job_name());
        let others = [
            GateRun { gate: "smoke".into(), ..run() },
            GateRun { rollout: "gpu-8".into(), ..run() },
            GateRun { stage: Some("canary".into()), ..run() },
            GateRun { nodes: vec!["gpu-02".into()], ..run() },
            GateRun { nodes: vec!["gpu-01".into(), "gpu-02".into()], ..run() },
            GateRun { sample: Sample::Before, ..run() },
            GateRun { attempt: 2, ..run() },
            GateRun { subject: "8e0a".into(), ..run() },
        ];
        for other in others {
            assert_ne!(other.job_name(), first, "{other:?}");
        }
    }

    #[test]
    fn names_are_dns_labels_however_long_the_nodes_are() {
        let long = format!("node.{}.example.com", "x".repeat(200));
        let run = GateRun {
            gate: "x".repeat(24).as_str().into(),
            rollout: "p".repeat(200),
            nodes: vec![long.into()],
            attempt: u32::MAX,
            ..run()
        };
        let label =
            |text: &str| text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
        // 63, and three for the number of a pod.
        assert!(run.job_name().len() <= 60 && label(&run.job_name()), "{}", run.job_name());
        assert!(label(&run.nodes_label()) && label(&run.rollout_label()));
        assert_eq!(rollout_label("gpu-7"), "gpu-7");
    }
}
