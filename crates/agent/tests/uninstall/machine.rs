//! Modules, mounts, devices, and the drivers of others.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use kube::ResourceExt as _;
use pitcrew_agent::Failure;
use pitcrew_agent::failure::{FAILED, NEEDS_REBOOT, TERMINATED, TIMED_OUT};
use pitcrew_agent::fake::{Death, HostDriver, Machine};
use pitcrew_agent::host::PciDevice;
use pitcrew_agent::labels::{DRA_DRIVER, PAUSED};
use pitcrew_core::contract::NEEDS_REBOOT_ANNOTATION;
use pitcrew_core::driver_manager::NeedsReboot;
use serde_json::json;

use crate::stage::{Kill, NAMESPACE, Stage};
use crate::{wants, with_driver};

/// The agent has paused this label, whatever became of it.
fn was_paused(stage: &Stage, label: &str) -> bool {
    stage.trace.lock().unwrap().contains(&format!("  {label} = \"{PAUSED}\""))
}

#[tokio::test(start_paused = true)]
async fn a_busy_module_leaves_everything_as_it_was_and_its_holder_is_named() {
    let stage = Stage::new(with_driver()).await;
    stage.host.change(|machine| machine.open(4242, "python3", "/dev/nvidia-uvm", &["nvidia_uvm"]));
    let before = stage.host.machine();
    let failure = stage.uninstall().await.unwrap_err();
    assert_eq!(failure.exit_code(), FAILED);
    let text = failure.sentence();
    assert!(text.contains("module nvidia_uvm has 1 reference"), "{text}");
    assert!(text.contains("process 4242 (python3) has /dev/nvidia-uvm open"), "{text}");
    assert_eq!(stage.host.machine(), before, "nothing was removed");
    assert!(!stage.is_cordoned().await, "its own cordon, and the driver is as it was");
    assert!(stage.paused().await.is_empty());
    assert!(stage.events().await.iter().any(|event| event.starts_with("! ") && event.contains("python3")));
}

#[tokio::test(start_paused = true)]
async fn whoever_keeps_a_module_by_device_files_in_other_places_is_named_too() {
    for (module, command, file) in [
        ("gdrdrv", "gdrcopy_sanity", "/dev/gdrdrv"),
        ("nvidia_drm", "Xorg", "/dev/dri/card1"),
        ("nvidia_peermem", "ib_write_bw", "/dev/infiniband/uverbs0"),
        ("nvidia_fs", "gdsio", "/dev/nvidia-fs0"),
    ] {
        let stage = Stage::new(with_driver()).await;
        stage.host.change(|machine| {
            machine.load(module, Some("nvidia"));
            machine.open(7, command, file, &[module]);
        });
        let text = stage.uninstall().await.unwrap_err().sentence();
        assert!(text.contains(&format!("process 7 ({command}) has {file} open")), "{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn processes_that_may_not_be_looked_at_are_counted_and_not_taken_for_nobody() {
    let stage = Stage::new(with_driver()).await;
    stage.host.change(|machine| {
        machine.open(7, "python3", "/somewhere/else", &["nvidia"]);
        machine.hidden = 2;
    });
    let text = stage.uninstall().await.unwrap_err().sentence();
    assert!(text.contains("2 processes that may have it open could not be looked at"), "{text}");
    assert!(!text.contains("no process with an open"), "{text}");
}

#[tokio::test(start_paused = true)]
async fn gdrdrv_pins_the_module_and_goes_first() {
    let stage = Stage::new(with_driver()).await;
    stage.host.change(|machine| machine.load("gdrdrv", Some("nvidia")));
    stage.uninstall().await.unwrap();
    assert!(stage.host.machine().modules.is_empty());
}

#[tokio::test(start_paused = true)]
async fn half_a_driver_needs_a_reboot_and_keeps_the_node_out() {
    let mut stage = Stage::new(with_driver()).await;
    wants(&mut stage, "old-but-forced");
    stage.host.change(|machine| machine.grabbed = Some(("nvidia_uvm".to_owned(), "nvidia".to_owned())));
    for _ in 0..2 {
        let failure = stage.uninstall().await.unwrap_err();
        assert_eq!(failure.exit_code(), NEEDS_REBOOT, "{}", failure.sentence());
        assert!(stage.is_cordoned().await);
        assert_eq!(stage.paused().await.len(), 3, "operands stay away from half a driver");
        assert!(stage.node().await.annotations().contains_key("pitcrew.dev/needs-reboot"));
    }
    assert!(stage.events().await.iter().any(|event| event.contains("needs a reboot")));
    // Nor is it called fine because the configuration is the same.
    wants(&mut stage, "old");
    assert_eq!(stage.uninstall().await.unwrap_err().exit_code(), NEEDS_REBOOT);
    // After the reboot nothing is loaded, and /run is empty.
    stage.host.change(|machine| {
        *machine = Machine::default();
        machine.file("/proc/sys/kernel/random/boot_id", "boot-2");
    });
    stage.uninstall().await.unwrap();
    assert!(stage.paused().await.is_empty());
    assert!(!stage.node().await.annotations().contains_key("pitcrew.dev/needs-reboot"));
    assert!(stage.is_cordoned().await);
    stage.load_new_driver();
    stage.finish(Duration::from_mins(1)).await.unwrap();
    assert!(!stage.is_cordoned().await);
}

#[tokio::test(start_paused = true)]
async fn why_half_a_driver_needs_a_reboot_outlives_starts_that_fail_for_something_else() {
    let stage = Stage::new(with_driver()).await;
    stage.host.change(|machine| machine.grabbed = Some(("nvidia_uvm".to_owned(), "nvidia".to_owned())));
    let first = stage.uninstall().await.unwrap_err().sentence();
    let why = async || {
        let node = stage.node().await;
        let record: NeedsReboot = serde_json::from_str(&node.annotations()[NEEDS_REBOOT_ANNOTATION]).unwrap();
        record.why
    };
    assert_eq!(why().await, first);
    // Told to end while something is waited for, …
    let spec = json!({"ownedBy": "DaemonSet"});
    stage.pod(NAMESPACE, "stuck", json!({"labels": {"app": "nvidia-dcgm-exporter"}}), spec).await;
    let stopped = stage.uninstall_told_after(Duration::from_secs(20)).await.unwrap_err();
    assert_eq!((stopped.exit_code(), why().await), (TERMINATED, first.clone()));
    // … a pod that does not leave, and a host that does not answer.
    for hangs in [false, true] {
        if hangs {
            stage.host.change(|machine| machine.host_driver = HostDriver::Hangs);
        }
        let failure = stage.uninstall().await.unwrap_err();
        assert_eq!((failure.exit_code(), why().await), (NEEDS_REBOOT, first.clone()));
        let other = if hangs {
            "nvidia-smi of the host did not answer"
        } else {
            "pod gpu-operator/stuck still there"
        };
        let text = failure.sentence();
        assert!(text.starts_with("only part of the driver") && text.contains(other), "{text}");
        assert!(stage.is_cordoned().await && stage.paused().await.len() == 3);
    }
    // Who was killed before it could say it has left the note: the next start says it, whatever that one fails for.
    stage.annotate(NEEDS_REBOOT_ANNOTATION, None).await;
    assert_eq!(stage.uninstall().await.unwrap_err().exit_code(), NEEDS_REBOOT);
    assert!(why().await.starts_with("only part of the driver could be unloaded"), "{}", why().await);
}

#[tokio::test(start_paused = true)]
async fn half_a_driver_whose_note_is_gone_is_still_half_a_driver_in_the_same_boot() {
    const NOTE: &str = "/run/nvidia/pitcrew-unload.json";
    for note in [None, Some(""), Some("{\"boot\":\"boot-1\",\"sta")] {
        let mut stage = Stage::new(with_driver()).await;
        wants(&mut stage, "new");
        stage.host.change(|machine| machine.grabbed = Some(("nvidia_uvm".to_owned(), "nvidia".to_owned())));
        assert_eq!(stage.uninstall().await.unwrap_err().exit_code(), NEEDS_REBOOT);
        // Somebody tidies up `/run/nvidia`, or spoils what is there.
        stage.host.change(|machine| {
            machine.files.remove("/run/nvidia/nvidia-driver.state");
            machine.files.remove(NOTE);
            if let Some(text) = note {
                machine.file(NOTE, text);
            }
        });
        let failure = stage.uninstall().await.unwrap_err();
        assert_eq!(failure.exit_code(), NEEDS_REBOOT, "{note:?}: {}", failure.sentence());
        assert!(stage.is_cordoned().await && stage.paused().await.len() == 3, "{note:?}");
        assert!(stage.node().await.annotations().contains_key(NEEDS_REBOOT_ANNOTATION), "{note:?}");
        // Nor does what looks like a driver that is up give the node back.
        stage.host.change(|machine| {
            machine.mounts.push("/run/nvidia/driver".to_owned());
            machine.file("/run/nvidia/validations/.driver-ctr-ready", "");
        });
        let failure = stage.finish(Duration::from_mins(1)).await.unwrap_err();
        assert!(failure.sentence().contains("half of the old one"), "{note:?}: {}", failure.sentence());
        assert!(stage.is_cordoned().await, "{note:?}");
        // Its holder ends: the unload goes on to its end, and the record goes with it.
        stage.host.change(|machine| machine.processes.clear());
        stage.uninstall().await.unwrap();
        assert!(!stage.node().await.annotations().contains_key(NEEDS_REBOOT_ANNOTATION), "{note:?}");
        stage.load_new_driver();
        stage.finish(Duration::from_mins(1)).await.unwrap();
        assert!(!stage.is_cordoned().await, "{note:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn half_a_driver_that_a_killed_start_left_keeps_the_node_out_at_once() {
    // Nobody evicts pods, so nobody has cordoned the node either.
    let mut stage = Stage::new(with_driver()).await;
    stage.settings.evict = false;
    let at = call(&stage, "remove module nvidia_uvm").await;
    stage.plan(Kill::Host(Death { at, after: true }));
    assert!(stage.until_killed(stage.uninstall()).await.is_none());
    assert!(!stage.is_cordoned().await);
    // The next start has hardly begun.
    stage.host.dies(None);
    stage.host.change(|machine| machine.host_driver = HostDriver::Hangs);
    let begun = tokio::time::timeout(Duration::from_secs(1), stage.uninstall()).await;
    assert!(begun.is_err() && stage.is_cordoned().await);
    let node = stage.node().await;
    let record: NeedsReboot = serde_json::from_str(&node.annotations()[NEEDS_REBOOT_ANNOTATION]).unwrap();
    assert_eq!(record.boot, "boot-1");
    // It goes on where the first one was killed.
    stage.host.change(|machine| machine.host_driver = HostDriver::Absent);
    stage.uninstall().await.unwrap();
    assert!(stage.host.machine().modules.is_empty());
    assert!(!stage.node().await.annotations().contains_key(NEEDS_REBOOT_ANNOTATION));
    stage.load_new_driver();
    stage.finish(Duration::from_mins(1)).await.unwrap();
    assert!(!stage.is_cordoned().await);
}

#[tokio::test(start_paused = true)]
async fn half_a_driver_whose_holder_leaves_is_unloaded_after_all() {
    let stage = Stage::new(with_driver()).await;
    stage.host.change(|machine| machine.grabbed = Some(("nvidia_uvm".to_owned(), "nvidia".to_owned())));
    assert_eq!(stage.uninstall().await.unwrap_err().exit_code(), NEEDS_REBOOT);
    stage.host.change(|machine| machine.processes.clear());
    stage.uninstall().await.unwrap();
    assert!(stage.host.machine().modules.is_empty());
    assert!(!stage.node().await.annotations().contains_key("pitcrew.dev/needs-reboot"));
}

#[tokio::test(start_paused = true)]
async fn a_module_that_somebody_else_removes_in_the_same_moment_is_removed() {
    for module in ["nvidia_drm", "nvidia_uvm", "nvidia"] {
        let stage = Stage::new(with_driver()).await;
        stage.host.change(|machine| machine.vanishing = Some(module.to_owned()));
        stage.uninstall().await.unwrap();
        assert!(stage.host.machine().modules.is_empty(), "{module}");
        assert!(stage.is_cordoned().await, "{module}: its driver is gone");
    }
    let stage = Stage::new(Machine::default()).await;
    stage.host.change(|machine| {
        machine.load("nouveau", None);
        machine.vanishing = Some("nouveau".to_owned());
    });
    stage.uninstall().await.unwrap();
}

/// Another program's driver, with other modules.
fn another_driver() -> Machine {
    let mut machine = Machine::default();
    machine.load("nvidia", None);
    machine.load("nvidia_uvm", Some("nvidia"));
    machine
}

#[tokio::test(start_paused = true)]
async fn another_driver_that_is_loaded_after_an_unload_is_not_the_rest_of_the_one_before() {
    for killed in [false, true] {
        let stage = Stage::new(with_driver()).await;
        // What comes after the unload fails again and again, …
        stage.host.change(|machine| {
            machine.failing.insert("list PCI devices".to_owned());
        });
        if killed {
            // … or the last start was killed before it could note that everything is gone.
            let at = call(&stage, "remove module nvidia").await;
            stage.plan(Kill::Host(Death { at, after: true }));
            assert!(stage.until_killed(stage.uninstall()).await.is_none());
            assert!(stage.host.machine().modules.is_empty());
            stage.host.dies(None);
        }
        let failure = stage.uninstall().await.unwrap_err();
        assert!(failure.sentence().starts_with("list PCI devices"), "{}", failure.sentence());
        // … until somebody puts NVIDIA's program in its place, which loads a driver, and ours comes back.
        stage.host.change(|machine| {
            machine.modules = another_driver().modules;
            machine.open(7, "python3", "/dev/nvidia0", &["nvidia"]);
        });
        let failure = stage.uninstall().await.unwrap_err();
        assert_eq!(failure.exit_code(), FAILED, "{}", failure.sentence());
        assert!(failure.sentence().contains("nothing of it was"), "{}", failure.sentence());
        assert!(stage.paused().await.is_empty());
        assert!(!stage.node().await.annotations().contains_key(NEEDS_REBOOT_ANNOTATION));
    }
}

/// Which call to the machine this one is, counted from the beginning.
async fn call(stage: &Stage, call: &str) -> usize {
    let mut other = Stage::new(stage.host.machine()).await;
    other.settings = stage.settings.clone();
    let _ = other.uninstall().await;
    other.host.calls().iter().position(|made| made == call).unwrap() + 1
}

#[tokio::test(start_paused = true)]
async fn stacked_mounts_are_all_detached() {
    let stage = Stage::new(with_driver()).await;
    stage.host.change(|machine| {
        for mount in [
            "/run/nvidia/driver",
            "/run/nvidia/driver",
            "/run/nvidia/driver/proc",
            "/run/nvidia/driver-other",
        ] {
            machine.mounts.push(mount.to_owned());
        }
    });
    stage.uninstall().await.unwrap();
    assert_eq!(stage.host.machine().mounts, ["/", "/run", "/run/nvidia/driver-other"]);
}

#[tokio::test(start_paused = true)]
async fn what_somebody_else_unmounts_in_the_same_moment_is_unmounted() {
    let stage = Stage::new(with_driver()).await;
    stage.host.change(|machine| machine.unmounted = Some("/run/nvidia/driver".to_owned()));
    stage.uninstall().await.unwrap();
    assert_eq!(stage.host.machine().mounts, ["/", "/run"]);
}

#[tokio::test(start_paused = true)]
async fn a_root_directory_with_hundreds_of_mounts_below_it_is_detached_at_once() {
    let stage = Stage::new(with_driver()).await;
    stage.host.change(|machine| {
        machine.mounts.extend((0..300).map(|number| format!("/run/nvidia/driver/sub/{number}")));
    });
    stage.uninstall().await.unwrap();
    assert_eq!(stage.host.machine().mounts, ["/", "/run"]);
    let unmounted = stage.host.calls().iter().filter(|call| call.starts_with("unmount")).count();
    assert_eq!(unmounted, 1);
    // Nor does it matter whether the directory itself is one.
    stage.host.change(|machine| machine.mounts.push("/run/nvidia/driver/sub".to_owned()));
    stage.uninstall().await.unwrap();
    assert_eq!(stage.host.machine().mounts, ["/", "/run"]);
}

#[tokio::test(start_paused = true)]
async fn what_was_paused_comes_back_if_the_root_directory_cannot_be_cleared() {
    let clearing = [
        "remove /run/nvidia/validations/.driver-ctr-ready",
        "read mounts",
        "unmount /run/nvidia/driver",
        "remove /run/nvidia/nvidia-driver.pid",
    ];
    // The driver is replaced, or it stays; its root directory is made anew in both cases.
    for (call, wanted) in clearing.into_iter().flat_map(|call| [(call, "new"), (call, "old")]) {
        let mut stage = Stage::new(with_driver()).await;
        stage.label(DRA_DRIVER, Some("true")).await;
        wants(&mut stage, wanted);
        stage.host.change(|machine| {
            machine.failing.insert(call.to_owned());
        });
        let failure = stage.uninstall().await.unwrap_err();
        assert!(failure.sentence().starts_with(call), "{}", failure.sentence());
        assert!(was_paused(&stage, DRA_DRIVER) && stage.paused().await.is_empty(), "{call}");
        assert_eq!(stage.is_cordoned().await, wanted == "new", "{call}: out only without its driver");
        stage.host.change(|machine| machine.failing.clear());
        stage.uninstall().await.unwrap();
        assert_eq!(stage.host.machine().mounts, ["/", "/run"]);
    }
}

#[tokio::test(start_paused = true)]
async fn the_word_of_the_last_driver_container_does_not_pass_for_the_next_ones() {
    // The last one was killed and could not take back that it was up.
    let mut machine = with_driver();
    machine.file("/run/nvidia/validations/.driver-ctr-ready", "");
    let stage = Stage::new(machine).await;
    stage.uninstall().await.unwrap();
    stage.host.change(|machine| machine.install("new"));
    let failure = stage.finish(Duration::from_mins(1)).await.unwrap_err();
    assert!(failure.sentence().contains(".driver-ctr-ready is not there"), "{}", failure.sentence());
    assert!(stage.is_cordoned().await, "it is not up yet");
    stage.load_new_driver();
    stage.finish(Duration::from_mins(1)).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn mofed_is_waited_for_with_a_deadline_and_the_node_is_not_left_paused() {
    let mut stage = without_mofed().await;
    stage.settings.mofed_limit = Some(Duration::from_mins(2));
    let failure = stage.uninstall().await.unwrap_err();
    assert_eq!(failure.exit_code(), TIMED_OUT);
    assert!(failure.sentence().contains("/run/mellanox/drivers/.driver-ready is not there"));
    assert!(stage.paused().await.is_empty());
    assert!(stage.is_cordoned().await, "its driver is gone");
    stage.host.change(|machine| machine.file("/run/mellanox/drivers/.driver-ready", ""));
    stage.uninstall().await.unwrap();
}

/// A machine whose network card needs MOFED, which is not there.
async fn without_mofed() -> Stage {
    let mut stage = Stage::new(with_driver()).await;
    stage.settings.rdma = true;
    let card = PciDevice { address: "0000:81:00.0".to_owned(), vendor: 0x15b3, ..PciDevice::default() };
    stage.host.change(|machine| machine.devices.push(card));
    stage
}

#[tokio::test(start_paused = true)]
async fn a_long_wait_is_told_of_again_before_its_event_is_gone() {
    let mut stage = without_mofed().await;
    stage.settings.mofed_limit = None;
    let waits = tokio::time::timeout(Duration::from_mins(40), stage.uninstall()).await;
    assert!(waits.is_err(), "for ever");
    let told = async |what: &str| stage.events().await.iter().filter(|event| event.contains(what)).count();
    assert_eq!(told("waits for MOFED").await, 3, "after half a minute, and every 15 min");
    // What is missing becomes something else.
    let comes = async {
        tokio::time::sleep(Duration::from_mins(5)).await;
        stage.host.change(|machine| machine.install("new"));
    };
    let finished = tokio::join!(stage.finish(Duration::from_mins(10)), comes).0;
    assert_eq!(finished.unwrap_err().exit_code(), TIMED_OUT);
    assert_eq!(told("waits for the new driver: it is not loaded").await, 1);
    assert_eq!(told("waits for the new driver: /run/nvidia/validations/.driver-ctr-ready").await, 1);
}

#[tokio::test(start_paused = true)]
async fn sigterm_while_mofed_is_waited_for_puts_back_what_was_paused() {
    let stage = without_mofed().await;
    let before = stage.node().await.labels().clone();
    let failure = stage.uninstall_told_after(Duration::from_mins(1)).await.unwrap_err();
    assert_eq!(failure.exit_code(), TERMINATED, "{}", failure.sentence());
    assert!(stage.events().await.iter().any(|event| event.contains("waits for MOFED")), "it was there");
    assert!(was_paused(&stage, "nvidia.com/gpu.deploy.dcgm"));
    assert_eq!(*stage.node().await.labels(), before);
    assert!(stage.is_cordoned().await, "its driver is gone");
}

#[tokio::test(start_paused = true)]
async fn the_hosts_mofed_is_told_by_the_modules_whole_name() {
    let mut stage = without_mofed().await;
    stage.settings.host_mofed = true;
    stage.host.change(|machine| machine.load("mlx5_core_lookalike", None));
    assert_eq!(stage.uninstall().await.unwrap_err().exit_code(), TIMED_OUT);
    // Who waits for ever sees it come, however late.
    stage.settings.mofed_limit = None;
    let comes = async {
        tokio::time::sleep(Duration::from_hours(2)).await;
        stage.host.change(|machine| machine.load("mlx5_core", None));
    };
    tokio::join!(stage.uninstall(), comes).0.unwrap();
}

#[tokio::test(start_paused = true)]
async fn nouveau_is_removed_before_the_operands_come_back() {
    for (busy, loaded) in [(false, with_driver()), (false, Machine::default()), (true, Machine::default())] {
        let stage = Stage::new(loaded).await;
        stage.label(DRA_DRIVER, Some("true")).await;
        stage.host.change(|machine| {
            machine.load("nouveau", None);
            if busy {
                machine.open(3, "Xorg", "/dev/dri/card0", &["nouveau"]);
            }
        });
        // What the machine is like when the node is written for the last time, which brings the operands back.
        let (host, at_the_end) = (stage.host.clone(), Arc::new(Mutex::new(None)));
        let last = at_the_end.clone();
        stage.api.on_request(move |request| {
            if request.user == "agent" && request.verb == "patch" {
                *last.lock().unwrap() = Some(host.machine().modules.contains_key("nouveau"));
            }
            None
        });
        let result = stage.uninstall().await;
        assert_eq!(result.is_err(), busy);
        assert_eq!(*at_the_end.lock().unwrap(), Some(busy));
        assert!(was_paused(&stage, DRA_DRIVER) && stage.paused().await.is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn a_driver_on_the_host_is_told_by_a_label_and_there_is_a_way_back() {
    let stage =
        Stage::new(Machine { host_driver: HostDriver::Version("535.1".to_owned()), ..with_driver() }).await;
    let failure = stage.uninstall().await.unwrap_err();
    assert!(failure.sentence().contains("driver 535.1 installed"), "{}", failure.sentence());
    assert_eq!(stage.node().await.labels()["nvidia.com/gpu.deploy.driver"], "pre-installed");
    assert_eq!(stage.host.machine().modules.len(), 4);
    // Who cannot ask does not know, and does not say that it is gone.
    let question = "run nvidia-smi --query-gpu=driver_version --format=csv,noheader in /host";
    stage.host.change(|machine| {
        machine.failing.insert(question.to_owned());
    });
    assert!(stage.uninstall().await.unwrap_err().sentence().starts_with(question));
    assert_eq!(stage.node().await.labels()["nvidia.com/gpu.deploy.driver"], "pre-installed");
    stage.host.change(|machine| machine.failing.clear());
    stage.host.change(|machine| machine.host_driver = HostDriver::Absent);
    stage.uninstall().await.unwrap();
    assert_eq!(stage.node().await.labels()["nvidia.com/gpu.deploy.driver"], "true");
    assert!(!stage.node().await.annotations().contains_key("pitcrew.dev/host-driver"));
}

#[tokio::test(start_paused = true)]
async fn a_driver_on_the_host_that_hangs_does_not_hang_the_agent() {
    let stage = Stage::new(Machine { host_driver: HostDriver::Hangs, ..with_driver() }).await;
    let failure = tokio::time::timeout(Duration::from_mins(2), stage.uninstall()).await.unwrap().unwrap_err();
    assert!(failure.sentence().contains("did not answer"), "{}", failure.sentence());
    assert_eq!(stage.host.machine().modules.len(), 4);
    assert_eq!(stage.node().await.labels()["nvidia.com/gpu.deploy.driver"], "true");
}

/// Plays `uninstall_driver` where the host's `nvidia-smi` ends like this, and no container says that the driver is its own.
async fn where_nvidia_smi_ends(code: Option<i32>, output: &str) -> (Stage, Result<(), Failure>) {
    let host_driver = HostDriver::Ends(code, output.to_owned());
    let mut machine = Machine { host_driver, ..with_driver() };
    machine.files.remove("/run/nvidia/nvidia-driver.state");
    let stage = Stage::new(machine).await;
    let result = stage.uninstall().await;
    (stage, result)
}

#[tokio::test(start_paused = true)]
async fn a_host_whose_nvidia_smi_fails_is_not_one_without_a_driver() {
    for (code, words) in [
        (Some(15), "nvidia-smi of the host ended with exit code 15 (a GPU has fallen off the bus): whether"),
        (Some(18), "ended with exit code 18 (its library is of another version"),
        (Some(14), "ended with exit code 14 (a GPU's infoROM is corrupt) without a version"),
        (Some(255), "ended with exit code 255: whether the host has a driver of its own cannot be said"),
        (None, "was ended by a signal"),
    ] {
        let (stage, result) = where_nvidia_smi_ends(code, "").await;
        let failure = result.unwrap_err();
        assert_eq!(failure.exit_code(), FAILED);
        assert!(failure.sentence().contains(words), "{}", failure.sentence());
        assert_eq!(stage.host.machine().modules.len(), 4, "{code:?}: it may be the host's own");
        assert_eq!(stage.node().await.labels()["nvidia.com/gpu.deploy.driver"], "true", "{code:?}");
    }
    // Who says that no driver is loaded, or has nothing to ask one with, has said it.
    for code in [9, 12] {
        let (stage, result) = where_nvidia_smi_ends(Some(code), "NVIDIA-SMI has failed\n").await;
        result.unwrap();
        assert!(stage.host.machine().modules.is_empty(), "{code}");
    }
    // And a GPU that complains has a driver all the same.
    let (stage, result) = where_nvidia_smi_ends(Some(14), "WARNING: infoROM is corrupted\n535.1\n").await;
    let failure = result.unwrap_err();
    assert!(failure.sentence().contains("driver 535.1 installed"), "{}", failure.sentence());
    assert_eq!(stage.node().await.labels()["nvidia.com/gpu.deploy.driver"], "pre-installed");
}

/// Of another version than the container's driver that is loaded.
#[tokio::test(start_paused = true)]
async fn tools_that_were_left_on_a_host_do_not_stop_the_agent() {
    let host_driver = HostDriver::Ends(Some(18), "Driver/library version mismatch\n".to_owned());
    let stage = Stage::new(Machine { host_driver, ..with_driver() }).await;
    stage.uninstall().await.unwrap();
    assert!(stage.host.machine().modules.is_empty());
    assert_eq!(stage.node().await.labels()["nvidia.com/gpu.deploy.driver"], "true");
}

#[tokio::test(start_paused = true)]
async fn devices_of_virtual_machines_come_back_and_others_are_left_alone() {
    let device = |address: &str, driver: &str| PciDevice {
        address: address.to_owned(),
        vendor: 0x10de,
        class: 0x03_0200,
        driver: Some(driver.to_owned()),
        ..PciDevice::default()
    };
    let stage = Stage::new(Machine::default()).await;
    stage.label(DRA_DRIVER, Some("true")).await;
    stage.host.change(|machine| {
        machine.devices =
            vec![device("a", "vfio-pci"), device("b", "other"), device("c", "nvgrace_gpu_vfio_pci")];
    });
    stage.uninstall().await.unwrap();
    let drivers: Vec<Option<String>> =
        stage.host.machine().devices.into_iter().map(|device| device.driver).collect();
    assert_eq!(drivers, [None, Some("other".to_owned()), None]);
    // A device that does not let go is told of, and the operands come back all the same.
    stage.forget();
    stage.host.change(|machine| {
        machine.devices = vec![device("a", "vfio-pci")];
        machine.failing.insert("write /sys/bus/pci/devices/a/driver_override".to_owned());
    });
    let failure = stage.uninstall().await.unwrap_err();
    assert!(failure.sentence().contains("take a back from vfio-pci"), "{}", failure.sentence());
    assert!(was_paused(&stage, DRA_DRIVER) && stage.paused().await.is_empty());
}
