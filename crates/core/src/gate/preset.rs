//! The checks that pitcrew brings along: one table. `docs/gates.md` shows it to people, and a test holds it to that.

use serde_json::{Value, json};

use super::bound::Bound;
use crate::api::Preset;

/// What the documents use for their smoke tests.
const PYTORCH: &str = "nvcr.io/nvidia/pytorch:24.03-py3";
/// `sh`, `awk`, `sed`, `chroot`: the programs of the node itself do the work.
const SHELL: &str = "busybox:1.37";
/// Where the gates over several nodes meet; torch's own default.
pub(super) const RANK0_PORT: u16 = 29500;
/// The node's file system, read-only: its driver, its `/proc` and its `/sys`.
pub(super) const HOST: &str = "/host";

const NVIDIA_SMI: &str = include_str!("presets/nvidia_smi.sh");

/// How many GPUs a gate asks for on each node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gpus {
    /// None: it runs whether they are in use or not.
    None,
    /// So many.
    Count(u32),
    /// All that the node offers.
    All,
}

/// One preset.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PresetRow {
    /// Which.
    pub preset: Preset,
    /// The image, if the policy names none.
    pub image: &'static str,
    /// What it asks for, if the policy does not say.
    pub gpus: Gpus,
    /// When it passes, for people.
    pub passes: &'static str,
    /// When its sample from before is taken, for people.
    pub before: Option<&'static str>,
    /// What its numbers must be.
    pub bounds: &'static [Bound],
    program: Program,
}

/// How a preset runs.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Program {
    /// A Python program.
    Python(&'static str),
    /// A Python program, started by a shell script once for each GPU.
    Torchrun { shell: &'static str, python: &'static str, host_network: bool },
    /// Shell scripts on the node's file system.
    OnHost(&'static [&'static str]),
}

/// A sample is taken between cordon and restart.
const BEFORE: &str =
    "after the node is cordoned and before its driver is restarted; the restart waits for it";

/// A healthy GPU corrects a single bit now and then; a hundred in the minutes of a visit is no longer now and then.
const CORRECTED_MAX: f64 = 100.0;

/// Every preset, in the order of [`Preset::ALL`].
pub static PRESETS: [PresetRow; 7] = [
    PresetRow {
        preset: Preset::SmokeTraining,
        image: PYTORCH,
        gpus: Gpus::Count(1),
        passes: "50 steps of forward, backward and optimizer on each GPU it gets: every loss is finite, the last is \
                 below the first",
        before: None,
        bounds: &[],
        program: Program::Python(include_str!("presets/smoke_training.py")),
    },
    PresetRow {
        preset: Preset::SmokeInference,
        image: PYTORCH,
        gpus: Gpus::Count(1),
        passes: "a network answers on each GPU it gets as it does on the CPU, within 0.001",
        before: None,
        bounds: &[],
        program: Program::Python(include_str!("presets/smoke_inference.py")),
    },
    PresetRow {
        preset: Preset::RdmaHealth,
        image: SHELL,
        gpus: Gpus::None,
        passes: "at least one RDMA port is ACTIVE with physical state LinkUp; `active` and `gbps` (their rates, \
                 summed) are not below those of the sample from before",
        before: Some(BEFORE),
        bounds: &[Bound::no_less_than_before("active"), Bound::no_less_than_before("gbps")],
        program: Program::OnHost(&[include_str!("presets/rdma_health.sh")]),
    },
    PresetRow {
        preset: Preset::EccErrors,
        image: SHELL,
        gpus: Gpus::None,
        passes: "aggregate counters of all GPUs, summed: `uncorrected` has not grown, `corrected` by at most 100; \
                 `gpus` and `withEcc` have not shrunk. A GPU without ECC (N/A) counts in `gpus` only",
        before: Some(BEFORE),
        bounds: &[
            Bound::no_more_than_before("uncorrected", 0.0),
            Bound::no_more_than_before("corrected", CORRECTED_MAX),
            Bound::no_less_than_before("gpus"),
            Bound::no_less_than_before("withEcc"),
        ],
        program: Program::OnHost(&[NVIDIA_SMI, include_str!("presets/ecc_errors.sh")]),
    },
    PresetRow {
        preset: Preset::MultiGpu,
        image: PYTORCH,
        gpus: Gpus::All,
        passes: "torch sees as many GPUs as it asked for, and ten NCCL all-reduces of 256 MiB over them give the right \
                 sum on each",
        before: None,
        bounds: &[],
        program: Program::Torchrun {
            shell: include_str!("presets/on_one_node.sh"),
            python: include_str!("presets/all_reduce.py"),
            host_network: false,
        },
    },
    PresetRow {
        preset: Preset::DistributedTraining,
        image: PYTORCH,
        gpus: Gpus::All,
        passes: "50 steps of data-parallel training over all GPUs of two nodes or more: every loss is finite and \
                 falls, and all ranks end with the same weights",
        before: None,
        bounds: &[],
        program: Program::Torchrun {
            shell: include_str!("presets/on_all_nodes.sh"),
            python: include_str!("presets/distributed_training.py"),
            host_network: true,
        },
    },
    PresetRow {
        preset: Preset::DriverVersion,
        image: SHELL,
        gpus: Gpus::None,
        passes: "`nvidia-smi` names the target version for every GPU, and so do `/proc/driver/nvidia/version` and \
                 `/sys/module/nvidia/version` where they are visible",
        before: None,
        bounds: &[],
        program: Program::OnHost(&[NVIDIA_SMI, include_str!("presets/driver_version.sh")]),
    },
];

/// The row of a preset.
pub(super) fn row(preset: Preset) -> &'static PresetRow {
    &PRESETS[preset as usize]
}

impl PresetRow {
    /// The pod's spec, without what every gate gets.
    pub(super) fn pod(&self, image: &str) -> Value {
        let container = match self.program {
            Program::Python(python) => json!({"command": ["python3", "-c", python]}),
            Program::Torchrun { shell, python, .. } => json!({
                "command": ["sh", "-c", shell],
                "env": [{"name": "PITCREW_SCRIPT", "value": python}],
            }),
            // The node's driver root can be entered only by a privileged container.
            Program::OnHost(scripts) => json!({
                "command": ["sh", "-c", scripts.concat()],
                "securityContext": {"privileged": true},
            }),
        };
        let mut pod = json!({
            "automountServiceAccountToken": false,
            "enableServiceLinks": false,
            "containers": [container],
        });
        let (volume, mount) = self.volume();
        pod["containers"][0]["name"] = json!("gate");
        pod["containers"][0]["image"] = json!(image);
        pod["containers"][0]["volumeMounts"] = json!([mount]);
        pod["volumes"] = json!([volume]);
        if let Program::Torchrun { host_network: true, .. } = self.program {
            pod["hostNetwork"] = json!(true);
            pod["dnsPolicy"] = json!("ClusterFirstWithHostNet");
        }
        pod
    }

    fn volume(&self) -> (Value, Value) {
        match self.program {
            // The driver's root is mounted on the node later than this pod may start.
            Program::OnHost(_) => (
                json!({"name": "host", "hostPath": {"path": "/", "type": "Directory"}}),
                json!({"name": "host", "mountPath": HOST, "readOnly": true, "mountPropagation": "HostToContainer"}),
            ),
            // NCCL and data loaders share more memory than the 64 MiB that containers get.
            Program::Python(_) | Program::Torchrun { .. } => (
                json!({"name": "shared-memory", "emptyDir": {"medium": "Memory"}}),
                json!({"name": "shared-memory", "mountPath": "/dev/shm"}),
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_has_its_row() {
        for preset in Preset::ALL {
            assert_eq!(row(preset).preset, preset);
            assert_eq!(row(preset).before.is_some(), row(preset).bounds.iter().any(Bound::compares));
        }
    }

    #[test]
    fn the_manual_shows_every_row() {
        let manual = include_str!("../../../../docs/gates.md");
        for row in &PRESETS {
            let gpus = match row.gpus {
                Gpus::None => "none".to_owned(),
                Gpus::Count(count) => count.to_string(),
                Gpus::All => "all of the node".to_owned(),
            };
            let before = row.before.unwrap_or("none is taken");
            let line = format!(
                "| `{}` | `{}` | {gpus} | {} | {before} |",
                row.preset.as_str(),
                row.image,
                row.passes
            );
            assert!(manual.contains(&line), "docs/gates.md lacks\n{line}");
        }
    }
}
