//! Whose cordon it is, who gives the node back and when, and what SIGTERM undoes.

use std::time::Duration;

use kube::ResourceExt as _;
use pitcrew_agent::failure::{TERMINATED, TIMED_OUT};
use pitcrew_sim::api::Fault;
use serde_json::json;

use crate::stage::{self, Stage, early};
use crate::{OURS, with_driver};

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
async fn a_cordon_that_somebody_else_sets_in_the_same_moment_is_theirs() {
    let stage = early(Stage::new(with_driver()).await);
    // Between the look and the patch: the first patch of the spec meets a version that is newer.
    let admin = stage.admin.clone();
    let done = std::sync::atomic::AtomicBool::new(false);
    stage.api.on_request(move |request| {
        let patch = request.user == "agent" && request.verb == "patch" && request.resource == "nodes";
        if patch && !done.swap(true, std::sync::atomic::Ordering::Relaxed) {
            let admin = admin.clone();
            tokio::spawn(async move {
                let api = kube::Api::<k8s_openapi::api::core::v1::Node>::all(admin);
                let patch = kube::api::Patch::Merge(json!({"spec": {"unschedulable": true}}));
                api.patch(stage::NODE, &kube::api::PatchParams::default(), &patch).await.unwrap();
            });
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
    stage.annotate(OURS, Some("{\"since\":\"2026-01-01T00:00:00Z\"}")).await;
    stage.uninstall().await.unwrap();
    assert!(!stage.node().await.annotations().contains_key(OURS), "the record was stale");
    assert!(!stage.is_cordoned().await, "and the agent's own cordon is lifted with its own record");
}
