//! The programs of the presets, run as a node would run them: the very command of the Job, with `nvidia-smi`, `torch`
//! and `/sys` replaced by small fakes: what they exit with, what they report and what they say.
#![expect(clippy::unwrap_used, reason = "a bench that cannot be set up is a failed test")]

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use pitcrew_core::api::{GateSpec, Preset};
use pitcrew_core::gate::{Gate, Order, Place, Sample, manifest};
use pitcrew_core::names::{DriverName, NodeName};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A node to run a preset on.
struct Bench {
    directory: TempDir,
    environment: BTreeMap<String, String>,
}

/// How a program ended.
#[derive(Debug)]
struct End {
    code: Option<i32>,
    report: Option<Value>,
    told: String,
}

impl Bench {
    fn new() -> Self {
        let bench = Self { directory: TempDir::new().unwrap(), environment: BTreeMap::new() };
        fs::create_dir_all(bench.path("bin")).unwrap();
        bench.with("PITCREW_TARGET_VERSION", "565.57.01")
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.directory.path().join(name)
    }

    fn with(mut self, name: &str, value: &str) -> Self {
        self.environment.insert(name.to_owned(), value.to_owned());
        self
    }

    /// A file of the node.
    fn file(self, name: &str, content: &str) -> Self {
        let path = self.path("host").join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
        self
    }

    /// A program in the container's path.
    fn program(self, name: &str, script: &str) -> Self {
        let path = self.path("bin").join(name);
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        self
    }

    /// `nvidia-smi` answers `rows` to the query for `field`, and nothing to any other.
    fn smi(self, field: &str, rows: &str) -> Self {
        let script =
            format!("case \"$*\" in *{field}*noheader*) cat <<'ROWS'\n{rows}\nROWS\n;; *) exit 2 ;; esac");
        self.program("nvidia-smi", &script)
    }

    fn run(&self, preset: Preset) -> End {
        let nodes = ["gpu-01", "gpu-02"].map(NodeName::from);
        let count = if preset == Preset::DistributedTraining { 2 } else { 1 };
        let places: Vec<_> = nodes[..count]
            .iter()
            .map(|node| Place { node, gpus: 8, address: Some("10.0.0.1"), taints: &[] })
            .collect();
        let driver = DriverName::from("gpu");
        let order = Order {
            namespace: "gpu-operator",
            driver: &driver,
            rollout: "gpu-7",
            stage: None,
            places: &places,
            sample: Sample::After,
            attempt: 1,
            subject: "7d9f",
            kept: pitcrew_core::gate::KEPT,
            version: None,
            previous: None,
        };
        let job = manifest(&Gate::read(&GateSpec::preset(preset)).unwrap(), &order);
        self.run_container(&job["spec"]["template"]["spec"]["containers"][0])
    }

    fn run_container(&self, container: &Value) -> End {
        let words: Vec<_> = container["command"].as_array().unwrap().iter().map(text).collect();
        let report = self.path("termination-log");
        let mut command = Command::new(words[0]);
        command.args(&words[1..]);
        for variable in container["env"].as_array().unwrap() {
            command.env(text(&variable["name"]), variable["value"].as_str().unwrap_or("gpu-01"));
        }
        let path = format!("{}:{}", self.path("bin").display(), std::env::var("PATH").unwrap());
        command.env("PATH", path).env("PITCREW_HOST", self.path("host")).env("PITCREW_OUTPUT", &report);
        command.env("PYTHONPATH", self.path("python")).envs(&self.environment);
        let Output { status, stdout, stderr } = command.output().unwrap();
        End {
            code: status.code(),
            told: String::from_utf8_lossy(&[stdout, stderr].concat()).into_owned(),
            report: fs::read_to_string(report)
                .ok()
                .map(|text| serde_json::from_str(&text).unwrap_or(json!(text))),
        }
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

const ECC: &str = "ecc.errors.corrected.aggregate.total,ecc.errors.uncorrected.aggregate.total";
const VERSION: &str = "driver_version";

#[test]
fn ecc_errors_are_summed_over_all_gpus() {
    let end = Bench::new().smi(ECC, "12, 0\n3, 1\n0, 0").run(Preset::EccErrors);
    assert_eq!(end.code, Some(0), "{end:?}");
    assert_eq!(end.report, Some(json!({"gpus": 3, "withEcc": 3, "corrected": 15, "uncorrected": 1})));
}

#[test]
fn gpus_without_ecc_are_counted_and_their_errors_are_not() {
    let end = Bench::new().smi(ECC, "[N/A], [N/A]\nN/A, N/A\n[Not Supported], [Not Supported]\n5, 0");
    let end = end.run(Preset::EccErrors);
    assert_eq!(
        end.report,
        Some(json!({"gpus": 4, "withEcc": 1, "corrected": 5, "uncorrected": 0})),
        "{end:?}"
    );
}

#[test]
fn ecc_answers_that_are_no_counts_fail_with_a_sentence_and_no_report() {
    let lost = Bench::new().smi(ECC, "1, 0\n[Unknown Error], [Unknown Error]").run(Preset::EccErrors);
    assert_eq!((lost.code, &lost.report), (Some(1), &None), "{lost:?}");
    assert!(lost.told.contains("GPU 1 answers \"[Unknown Error], [Unknown Error]\""), "{lost:?}");
    let none = Bench::new().smi(ECC, "").run(Preset::EccErrors);
    assert!(none.code == Some(1) && none.told.contains("lists no GPU"), "{none:?}");
    let broken =
        "echo 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'; exit 9";
    let broken = Bench::new().program("nvidia-smi", broken).run(Preset::EccErrors);
    assert_eq!((broken.code, broken.report), (Some(9), None));
}

#[test]
fn the_drivers_own_nvidia_smi_is_used_where_there_is_one() {
    // The fake chroot knows only that root; the image's own nvidia-smi would give another answer.
    let chroot = r#"case "$1" in */run/nvidia/driver) shift; exec "$@" ;; *) exit 1 ;; esac"#;
    let bench = Bench::new().file("run/nvidia/driver/marker", "").program("chroot", chroot);
    let end = bench.smi(VERSION, "565.57.01").run(Preset::DriverVersion);
    assert_eq!(end.code, Some(0), "{end:?}");
    let elsewhere = Bench::new().file("marker", "").program("chroot", "exit 1").smi(VERSION, "565.57.01");
    assert_eq!(elsewhere.run(Preset::DriverVersion).code, Some(0));
}

#[test]
fn every_gpu_and_the_kernel_module_must_be_of_the_target_version() {
    const OPEN: &str = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  565.57.01  Release Build  (dvs-builder)\n\
                        GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n";
    let node = |gpus: &str, procfs: &str, sysfs: &str| {
        let bench = Bench::new().smi(VERSION, gpus);
        let bench = bench.file("proc/driver/nvidia/version", procfs);
        bench.file("sys/module/nvidia/version", sysfs).run(Preset::DriverVersion)
    };
    let end = node("565.57.01\n565.57.01", OPEN, "565.57.01\n");
    assert_eq!((end.code, &end.report), (Some(0), &Some(json!({"gpus": 2}))), "{end:?}");
    let old = OPEN
        .replace("Open Kernel Module for x86_64", "x86_64 Kernel Module")
        .replace("565.57.01", "535.104.05");
    for (end, told) in [
        (node("565.57.01\n535.104.05", OPEN, "565.57.01"), "driver of GPU 1 is 535.104.05, not 565.57.01"),
        (node("565.57.01", &old, "565.57.01"), "/proc/driver/nvidia/version is 535.104.05, not 565.57.01"),
        (node("565.57.01", OPEN, "535.104.05"), "/sys/module/nvidia/version is 535.104.05, not 565.57.01"),
        (node("", OPEN, "565.57.01"), "nvidia-smi lists no GPU"),
    ] {
        assert_eq!((end.code, &end.report), (Some(1), &None), "{end:?}");
        assert!(end.told.contains(told), "{end:?}");
    }
}

#[test]
fn versions_are_compared_as_numbers() {
    let end = |target: &str, runs: &str| {
        let bench = Bench::new().with("PITCREW_TARGET_VERSION", target).smi(VERSION, runs);
        bench.run(Preset::DriverVersion).code
    };
    assert_eq!(end("535.104.5", "535.104.05"), Some(0));
    assert_eq!(end("550.142", "550.142.0"), Some(0));
    assert_eq!(end("550.142.00", "550.142"), Some(0));
    assert_eq!(end("550.10", "550.1"), Some(1));
    assert_eq!(end("550.100", "550.10"), Some(1));
    assert_eq!(end("", "550.10"), Some(75));
}

#[test]
fn other_drivers_tell_by_their_kernel_module() {
    let nic = || Bench::new().with("PITCREW_DRIVER", "ofed").with("PITCREW_TARGET_VERSION", "24.10-1.1.4");
    let right = nic().file("sys/module/mlx5_core/version", "24.10-1.1.4\n").run(Preset::DriverVersion);
    assert_eq!(right.code, Some(0), "{right:?}");
    let old = nic().file("sys/module/mlx5_core/version", "24.07-0.6.1\n").run(Preset::DriverVersion);
    assert_eq!(old.code, Some(1));
    let none = nic().run(Preset::DriverVersion);
    assert!(none.code == Some(1) && none.told.contains("mlx5_core is not loaded"), "{none:?}");
}

fn port(bench: Bench, device: &str, state: &str, physical: &str, rate: &str) -> Bench {
    let file = |name: &str| format!("sys/class/infiniband/{device}/ports/1/{name}");
    bench.file(&file("state"), state).file(&file("phys_state"), physical).file(&file("rate"), rate)
}

#[test]
fn rdma_ports_that_are_up_are_counted_with_their_rates() {
    let bench = port(Bench::new(), "mlx5_0", "4: ACTIVE\n", "5: LinkUp\n", "400 Gb/sec (4X NDR)\n");
    let bench = port(bench, "mlx5_1", "4: ACTIVE\n", "5: LinkUp\n", "2.5 Gb/sec (1X SDR)\n");
    let bench = port(bench, "mlx5_2", "1: DOWN\n", "3: Disabled\n", "10 Gb/sec (4X SDR)\n");
    let bench = port(bench, "mlx5_3", "2: INIT\n", "5: LinkUp\n", "400 Gb/sec (4X NDR)\n");
    let end = bench.run(Preset::RdmaHealth);
    assert_eq!(
        (end.code, &end.report),
        (Some(0), &Some(json!({"ports": 4, "active": 2, "gbps": 402}))),
        "{end:?}"
    );
    assert!(
        end.told.contains("mlx5_0/ports/1: state 4: ACTIVE, physical state 5: LinkUp, rate 400"),
        "{end:?}"
    );
}

#[test]
fn a_node_without_rdma_fails_after_and_is_a_sample_before() {
    let down = || port(Bench::new(), "mlx5_0", "1: DOWN", "2: Polling", "10 Gb/sec");
    let end = down().run(Preset::RdmaHealth);
    assert_eq!((end.code, &end.report), (Some(1), &None), "{end:?}");
    assert!(end.told.contains("none of 1 RDMA ports is ACTIVE with its link up"), "{end:?}");
    let before = down().with("PITCREW_SAMPLE", "Before").run(Preset::RdmaHealth);
    assert_eq!((before.code, before.report), (Some(0), Some(json!({"ports": 1, "active": 0, "gbps": 0}))));
    assert_eq!(Bench::new().run(Preset::RdmaHealth).code, Some(1));
}

/// A torch whose losses are as told, and which can do everything else.
const TORCH: &str = r#"
import os, sys
from unittest.mock import MagicMock

class Torch(MagicMock):
    __path__ = []

torch = Torch()
torch.cuda.device_count.return_value = int(os.environ.get("FAKE_GPUS", "2"))
falling = [2.0 - step / 100 for step in range(50)]
losses = {
    "falling": falling * 8,
    "rising": falling[::-1],
    "nan": falling[:3] + [float("nan")],
}[os.environ.get("FAKE_LOSSES", "falling")]
torch.nn.functional.cross_entropy.return_value.item.side_effect = losses
torch.allclose.return_value = os.environ.get("FAKE_ANSWERS", "right") == "right"
dist = torch.distributed
dist.get_rank.return_value = int(os.environ.get("RANK", "0"))
dist.get_world_size.return_value = 2
equal = torch.empty.return_value.__eq__
torch.empty.return_value.__eq__ = lambda self, other: torch.sums
torch.sums.all.return_value.item.return_value = os.environ.get("FAKE_SUMS", "right") == "right"
weights = MagicMock()
weights.__radd__ = lambda self, other: self
weights.__add__ = lambda self, other: self
low, high = MagicMock(), MagicMock()
low.item.return_value, high.item.return_value = 1.0, float(os.environ.get("FAKE_WEIGHT", "1.0"))
weights.clone.side_effect = [low, high]
parameter = MagicMock()
parameter.detach.return_value.double.return_value.sum.return_value = weights
torch.nn.parallel.DistributedDataParallel.return_value.parameters.return_value = [parameter, parameter]
sys.modules["torch"], sys.modules["torch.distributed"] = torch, dist
"#;

/// `None` where there is no Python to run it with.
fn with_torch() -> Option<Bench> {
    if Command::new("python3").arg("--version").output().is_err() {
        eprintln!("no python3 here: the programs of this preset are not run");
        return None;
    }
    let bench = Bench::new();
    fs::create_dir_all(bench.path("python")).unwrap();
    fs::write(bench.path("python").join("torch.py"), TORCH).unwrap();
    let torchrun = r#"echo "torchrun $*"; for script; do :; done; LOCAL_RANK=0 exec python3 "$script""#;
    Some(bench.program("torchrun", torchrun))
}

#[test]
fn smoke_training_wants_a_loss_that_falls() {
    let Some(bench) = with_torch() else { return };
    let end = bench.run(Preset::SmokeTraining);
    let report = end.report.clone().unwrap_or_default();
    assert_eq!((end.code, &report["gpus"], &report["loss"]), (Some(0), &json!(2), &json!(1.51)), "{end:?}");
    for (losses, told) in [
        ("rising", "GPU 0: the loss went from 1.5100 to 2.0000 in 50 steps and should fall"),
        ("nan", "GPU 0: the loss is nan after 4 steps"),
    ] {
        let end = with_torch().unwrap().with("FAKE_LOSSES", losses).run(Preset::SmokeTraining);
        assert!(end.code == Some(1) && end.report.is_none() && end.told.contains(told), "{end:?}");
    }
    let none = with_torch().unwrap().with("FAKE_GPUS", "0").run(Preset::SmokeTraining);
    assert!(none.code == Some(1) && none.told.contains("torch sees no GPU"), "{none:?}");
}

#[test]
fn smoke_inference_wants_the_cpus_answers() {
    let Some(bench) = with_torch() else { return };
    let end = bench.run(Preset::SmokeInference);
    assert!(end.code == Some(0) && end.report.as_ref().is_some_and(|r| r["gpus"] == 2), "{end:?}");
    let wrong = with_torch().unwrap().with("FAKE_ANSWERS", "wrong").run(Preset::SmokeInference);
    assert!(
        wrong.code == Some(1) && wrong.told.contains("GPU 0 gives other answers than the CPU"),
        "{wrong:?}"
    );
}

#[test]
fn multi_gpu_wants_all_gpus_and_the_right_sum() {
    let Some(bench) = with_torch() else { return };
    let end = bench.with("FAKE_GPUS", "8").run(Preset::MultiGpu);
    assert!(end.code == Some(0) && end.report.as_ref().is_some_and(|r| r["gpus"] == 2), "{end:?}");
    assert!(end.told.contains("torchrun --standalone --nproc_per_node=gpu "), "{end:?}");
    let fewer = with_torch().unwrap().with("FAKE_GPUS", "7").run(Preset::MultiGpu);
    assert_eq!((fewer.code, fewer.report), (Some(1), Some(json!("torch sees 7 GPUs and should see 8"))));
    let wrong = with_torch().unwrap().with("FAKE_GPUS", "8").with("FAKE_SUMS", "wrong").run(Preset::MultiGpu);
    assert_eq!((wrong.code, wrong.report), (Some(1), Some(json!("GPU 0: the sum in round 1 is wrong"))));
}

#[test]
fn distributed_training_finds_its_rank_and_wants_equal_weights() {
    let Some(bench) = with_torch() else { return };
    let end = bench.with("PITCREW_NODE", "gpu-02").with("RANK", "1").run(Preset::DistributedTraining);
    assert!(end.code == Some(0) && end.report.as_ref().is_some_and(|r| r["gpus"] == 2), "{end:?}");
    let call =
        "torchrun --nnodes=2 --node_rank=1 --master_addr=10.0.0.1 --master_port=29500 --nproc_per_node=gpu ";
    assert!(end.told.contains(call), "{end:?}");
    let apart = with_torch().unwrap().with("FAKE_WEIGHT", "1.5").run(Preset::DistributedTraining);
    let told = "the ranks do not agree on the weights: their sums are from 1.0 to 1.5";
    assert_eq!((apart.code, apart.report), (Some(1), Some(json!(told))));
    let rising = with_torch().unwrap().with("FAKE_LOSSES", "rising").run(Preset::DistributedTraining);
    assert_eq!(rising.code, Some(1));
    let lost = with_torch().unwrap().with("PITCREW_NODE", "gpu-09").run(Preset::DistributedTraining);
    assert_eq!(lost.code, Some(75));
    let nowhere = with_torch().unwrap().with("PITCREW_RANK0_ADDRESS", "").run(Preset::DistributedTraining);
    assert_eq!(nowhere.code, Some(75));
}

#[test]
fn every_program_is_small_enough_for_a_pod() {
    // Arguments and environment of a process share this limit for one string.
    const ARGUMENT_MAX: u64 = 128 * 1024;
    let programs = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/gate/presets");
    for program in fs::read_dir(programs).unwrap() {
        assert!(program.unwrap().metadata().unwrap().len() < ARGUMENT_MAX / 8);
    }
}
