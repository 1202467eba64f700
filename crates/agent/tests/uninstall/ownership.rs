//! Whose cordon it is, who gives the node back and when, and what SIGTERM undoes.

use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, ResourceExt as _};
use pitcrew_agent::failure::{NEEDS_REBOOT, TERMINATED, TIMED_OUT};
use pitcrew_agent::fake::HostDriver;
use pitcrew_agent::stop::Stopper;
use pitcrew_agent::uninstall::uninstall;
use pitcrew_core::contract::NEEDS_REBOOT_ANNOTATION;
use pitcrew_sim::api::Fault;
use serde_json::{Value, json};

use crate::stage::{NODE, Stage, early};
use crate::{OURS, with_driver};

/// Somebody else writes on the node.
async fn patched(admin: Client, patch: Value) {
    let api = Api::<Node>::all(admin);
    api.patch(NODE, &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
}

async fn cordon(admin: Client) {
    patched(admin, json!({"spec": {"unschedulable": true}})).await;
}

#[tokio::test(start_paused = true)]
async fn the_node_stays_cordoned_until_the_new_driver_is_up() {
    let stage = Stage::new(with_driver()).await;
    stage.uninstall().await.unwrap();
    assert!(stage.is_cordoned().await);
    let failure = stage.finish(Duration::from_mins(1)).await.unwrap_err();
    assert_eq!(failure.exit_code(), TIMED_OUT);
    assert!(stage.is_cordoned().await, "there is no driver");
    stage.load_new_driver();
    stage.finish(Duration::from_mins(1)).await.unwrap();
    assert!(!stage.is_cordoned().await);
    assert!(!stage.node().await.annotations().contains_key(OURS));
    assert!(stage.events().await.iter().any(|event| event.contains("given the node back")));
}

#[tokio::test(start_paused = true)]
async fn the_documented_early_uncordon_is_there_for_who_wants_it() {
    let stage = early(Stage::new(with_driver()).await);
    stage.uninstall().await.unwrap();
    assert!(!stage.is_cordoned().await);
    assert!(!stage.node().await.annotations().contains_key(OURS));
}

#[tokio::test(start_paused = true)]
async fn a_foreign_cordon_is_never_lifted() {
    for failing in [false, true] {
        let stage = early(Stage::new(with_driver()).await);
        stage.patch(json!({"spec": {"unschedulable": true}})).await;
        if failing {
            stage.host.change(|machine| machine.open(7, "python3", "/dev/nvidia0", &["nvidia"]));
        }
        assert_eq!(stage.uninstall().await.is_err(), failing);
        assert!(stage.is_cordoned().await);
        stage.load_new_driver();
        stage.finish(Duration::from_mins(1)).await.unwrap();
        assert!(stage.is_cordoned().await);
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_that_nvsentinel_took_meanwhile_is_not_given_back() {
    let stage = Stage::new(with_driver()).await;
    stage.uninstall().await.unwrap();
    stage.load_new_driver();
    stage.annotate("quarantineHealthEventCordonPreExisting", Some("True")).await;
    assert_eq!(stage.finish(Duration::from_mins(1)).await.unwrap_err().exit_code(), TIMED_OUT);
    assert!(stage.is_cordoned().await);
    stage.annotate("quarantineHealthEventCordonPreExisting", None).await;
    stage.finish(Duration::from_mins(1)).await.unwrap();
    assert!(!stage.is_cordoned().await);
}

#[tokio::test(start_paused = true)]
async fn a_cordon_that_an_upgrade_controller_relies_on_is_not_lifted() {
    const STATE: &str = "nvidia.com/gpu-driver-upgrade-state";
    let stage = Stage::new(with_driver()).await;
    stage.budget("research", "train", 0).await;
    let killed = tokio::time::timeout(Duration::from_secs(20), stage.uninstall()).await;
    assert!(killed.is_err() && stage.is_cordoned().await);
    // NVIDIA's upgrades are switched on. Their controller finds the node cordoned, and begins to drain it.
    stage.annotate("nvidia.com/gpu-driver-upgrade-enabled", Some("true")).await;
    stage.label(STATE, Some("drain-required")).await;
    stage.host.change(|machine| machine.open(7, "python3", "/dev/nvidia0", &["nvidia"]));
    stage.uninstall().await.unwrap_err();
    assert!(stage.is_cordoned().await && stage.paused().await.is_empty());
    stage.host.change(|machine| machine.processes.clear());
    stage.label(STATE, Some("pod-restart-required")).await;
    stage.uninstall().await.unwrap();
    stage.load_new_driver();
    let failure = stage.finish(Duration::from_mins(1)).await.unwrap_err();
    assert!(failure.sentence().contains("kept out by the upgrade controller"), "{}", failure.sentence());
    assert!(stage.is_cordoned().await);
    stage.label(STATE, Some("upgrade-done")).await;
    stage.finish(Duration::from_mins(1)).await.unwrap();
    assert!(!stage.is_cordoned().await);
}

#[tokio::test(start_paused = true)]
async fn sigterm_before_the_driver_is_touched_restores_everything() {
    let stage = Stage::new(with_driver()).await;
    stage.budget("research", "train", 0).await;
    let (node, machine) = (stage.node().await, stage.host.machine());
    // While operands leave, and while a budget keeps a pod.
    for seconds in [0, 1, 3, 20, 90] {
        let failure = stage.uninstall_told_after(Duration::from_secs(seconds)).await.unwrap_err();
        assert_eq!(failure.exit_code(), TERMINATED, "after {seconds} s: {}", failure.sentence());
        let after = stage.node().await;
        assert_eq!(after.labels(), node.labels(), "after {seconds} s");
        assert_eq!(after.annotations(), node.annotations(), "after {seconds} s");
        assert_eq!(after.spec, node.spec, "after {seconds} s");
        assert_eq!(stage.host.machine(), machine);
    }
}

#[tokio::test(start_paused = true)]
async fn sigterm_restores_what_an_earlier_start_paused_before_it_was_killed() {
    // Told to end before its first call, and while the host's driver does not answer.
    for (after, host_driver) in [(0, HostDriver::Absent), (5, HostDriver::Hangs)] {
        let stage = Stage::new(with_driver()).await;
        let before = stage.node().await;
        stage.budget("research", "train", 0).await;
        let killed = tokio::time::timeout(Duration::from_secs(20), stage.uninstall()).await;
        assert!(killed.is_err() && stage.is_cordoned().await && !stage.paused().await.is_empty());
        stage.host.change(|machine| machine.host_driver = host_driver);
        let (stopper, stop) = Stopper::new();
        if after == 0 {
            stopper.stop();
        }
        let tell = async {
            tokio::time::sleep(Duration::from_secs(after)).await;
            stopper.stop();
        };
        let began = tokio::time::Instant::now();
        let agent = stage.agent(stop);
        let failure = tokio::join!(uninstall(&agent), tell).0.unwrap_err();
        assert_eq!(failure.exit_code(), TERMINATED, "{}", failure.sentence());
        assert!(began.elapsed() < Duration::from_secs(30), "SIGKILL comes then");
        let after = stage.node().await;
        assert_eq!(after.labels(), before.labels());
        assert_eq!(after.annotations(), before.annotations());
        assert_eq!(after.spec, before.spec);
    }
}

#[tokio::test(start_paused = true)]
async fn a_machine_that_cannot_be_read_is_told_of_and_the_node_is_left_as_it_is() {
    let stage = Stage::new(with_driver()).await;
    stage.budget("research", "train", 0).await;
    let killed = tokio::time::timeout(Duration::from_secs(20), stage.uninstall()).await;
    assert!(killed.is_err());
    let before = stage.node().await;
    stage.host.change(|machine| machine.no_proc = true);
    stage.uninstall().await.unwrap_err();
    assert_eq!(stage.node().await, before, "there may be half a driver");
    let events = stage.events().await;
    assert!(events.iter().any(|event| event.contains("failed: read /proc/modules")), "{events:?}");
}

#[tokio::test(start_paused = true)]
async fn a_cordon_that_somebody_else_sets_in_the_same_moment_is_theirs() {
    let stage = early(Stage::new(with_driver()).await);
    // Between the look and the patch: the first patch of the spec meets a version that is newer.
    let admin = stage.admin.clone();
    let done = std::sync::atomic::AtomicBool::new(false);
    stage.api.on_request(move |request| {
        let patch = request.user == "agent" && request.verb == "patch" && request.resource == "nodes";
        if patch && !done.swap(true, std::sync::atomic::Ordering::Relaxed) {
            tokio::spawn(cordon(admin.clone()));
            return Some(Fault::Delay(Duration::from_millis(100)));
        }
        None
    });
    stage.uninstall().await.unwrap();
    assert!(stage.is_cordoned().await);
    assert!(!stage.node().await.annotations().contains_key(OURS));
}

#[tokio::test(start_paused = true)]
async fn a_cordon_that_a_person_lifted_and_another_set_again_is_not_the_agents() {
    let stage = early(Stage::new(with_driver()).await);
    // The agent's own cordon was lifted by hand, and only its record was left.
    stage.annotate(OURS, Some("{\"since\":\"2026-01-01T00:00:00Z\"}")).await;
    // Somebody cordons the node while the operands leave.
    let admin = stage.admin.clone();
    let mut done = false;
    stage.api.on_request(move |request| {
        if request.user == "agent" && request.verb == "list" && !std::mem::replace(&mut done, true) {
            tokio::spawn(cordon(admin.clone()));
        }
        None
    });
    stage.uninstall().await.unwrap();
    assert!(stage.is_cordoned().await, "it is theirs");
    assert!(!stage.node().await.annotations().contains_key(OURS), "and the record was stale");
}

/// A person lifts the agent's cordon; a minute later somebody else cordons the node.
async fn lifted_and_cordoned_again(admin: Client) {
    patched(admin.clone(), json!({"spec": {"unschedulable": null}})).await;
    tokio::time::sleep(Duration::from_mins(1)).await;
    cordon(admin).await;
}

#[tokio::test(start_paused = true)]
async fn a_cordon_that_changes_hands_while_pods_leave_is_not_the_agents() {
    let stage = early(Stage::new(with_driver()).await);
    stage.budget("research", "train", 0).await;
    let changes_hands = async {
        tokio::time::sleep(Duration::from_mins(1)).await;
        lifted_and_cordoned_again(stage.admin.clone()).await;
        stage.admin_delete("research", "train").await;
    };
    tokio::join!(stage.uninstall(), changes_hands).0.unwrap();
    assert!(stage.is_cordoned().await, "it is theirs");
    assert!(!stage.node().await.annotations().contains_key(OURS));
}

#[tokio::test(start_paused = true)]
async fn a_cordon_that_changes_hands_while_the_driver_comes_up_is_not_the_agents() {
    let stage = Stage::new(with_driver()).await;
    stage.uninstall().await.unwrap();
    let changes_hands = async {
        tokio::time::sleep(Duration::from_mins(1)).await;
        lifted_and_cordoned_again(stage.admin.clone()).await;
        stage.load_new_driver();
    };
    tokio::join!(stage.finish(Duration::from_mins(5)), changes_hands).0.unwrap();
    assert!(stage.is_cordoned().await, "it is theirs");
    assert!(!stage.node().await.annotations().contains_key(OURS));
}

#[tokio::test(start_paused = true)]
async fn a_node_that_nvsentinel_takes_in_the_same_moment_is_not_given_back() {
    const QUARANTINE: &str = "quarantineHealthEventIsCordoned";
    let stage = Stage::new(with_driver()).await;
    stage.uninstall().await.unwrap();
    stage.load_new_driver();
    let admin = stage.admin.clone();
    let mut done = false;
    stage.api.on_request(move |request| {
        let patch = request.user == "agent" && request.verb == "patch" && request.resource == "nodes";
        if !patch || std::mem::replace(&mut done, true) {
            return None;
        }
        tokio::spawn(patched(admin.clone(), json!({"metadata": {"annotations": {QUARANTINE: "True"}}})));
        Some(Fault::Delay(Duration::from_millis(100)))
    });
    let failure = stage.finish(Duration::from_mins(1)).await.unwrap_err();
    assert!(failure.sentence().contains("kept out by NVSentinel"), "{}", failure.sentence());
    assert!(stage.is_cordoned().await);
    stage.annotate(QUARANTINE, None).await;
    stage.finish(Duration::from_mins(1)).await.unwrap();
    assert!(!stage.is_cordoned().await);
}

#[tokio::test(start_paused = true)]
async fn a_persons_words_about_a_reboot_outlive_every_program_and_hold_the_node() {
    const WORDS: &str = "firmware was flashed";
    let stage = Stage::new(with_driver()).await;
    stage.annotate(NEEDS_REBOOT_ANNOTATION, Some(WORDS)).await;
    let said = async || stage.node().await.annotations().get(NEEDS_REBOOT_ANNOTATION).cloned();
    // A failure, …
    stage.host.change(|machine| machine.open(7, "python3", "/dev/nvidia0", &["nvidia"]));
    stage.uninstall().await.unwrap_err();
    assert_eq!(said().await.as_deref(), Some(WORDS));
    // … half a driver, which an Event tells of, …
    stage.host.change(|machine| {
        machine.processes.clear();
        machine.grabbed = Some(("nvidia_uvm".to_owned(), "nvidia".to_owned()));
    });
    assert_eq!(stage.uninstall().await.unwrap_err().exit_code(), NEEDS_REBOOT);
    assert_eq!(said().await.as_deref(), Some(WORDS));
    assert!(stage.is_cordoned().await);
    assert!(stage.events().await.iter().any(|event| event.contains("only part of the driver")));
    // … an unload, and a new driver.
    stage.host.change(|machine| machine.processes.clear());
    stage.uninstall().await.unwrap();
    stage.load_new_driver();
    let failure = stage.finish(Duration::from_mins(1)).await.unwrap_err();
    assert!(failure.sentence().contains("kept out by a person's words"), "{}", failure.sentence());
    assert_eq!(said().await.as_deref(), Some(WORDS));
    stage.annotate(NEEDS_REBOOT_ANNOTATION, None).await;
    stage.finish(Duration::from_mins(1)).await.unwrap();
    assert!(!stage.is_cordoned().await);
}

#[tokio::test(start_paused = true)]
async fn a_node_that_a_person_gave_back_is_given_back_again_after_a_failure() {
    let stage = Stage::new(with_driver()).await;
    stage.uninstall().await.unwrap();
    stage.load_new_driver();
    stage.patch(json!({"spec": {"unschedulable": null}})).await;
    stage.host.change(|machine| machine.open(7, "python3", "/dev/nvidia0", &["nvidia"]));
    for _ in 0..2 {
        stage.uninstall().await.unwrap_err();
        assert!(!stage.is_cordoned().await, "the new driver is whole");
        assert!(!stage.node().await.annotations().contains_key(OURS));
    }
}
