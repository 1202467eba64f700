//! Restart and validation: nothing goes back into service unproven, and nothing waits for ever.

use serde_json::json;

use super::fixture::*;
use crate::contract::State;
use crate::names::ObjectName;
use crate::snapshot::{Object, SetbackKind};

#[test]
fn a_missing_validator_is_named_then_fails_the_node_and_stays_failed() {
    let mut fleet = Fleet::new().with(node("n").at(State::ValidationRequired));
    fleet.remove_pods("n", |pod| pod.name.name.starts_with("validator"));
    assert_eq!(fleet.why("n"), "no validator pod (app=nvidia-operator-validator) on this node");
    assert_eq!(fleet.plan().wake_at, Some(after(540)));
    fleet.play();
    assert_eq!(
        fleet.why("n"),
        "not validated after 600 s: no validator pod (app=nvidia-operator-validator) on this node"
    );
    assert!(fleet.snapshot.nodes["n"].unschedulable);
    fleet.wait(86_400);
    assert_eq!(fleet.decisions(), [""; 0], "it stays failed");
}

#[test]
fn a_failed_validation_never_uncordons_even_if_the_validator_comes_too_late() {
    let mut fleet = Fleet::new().with(node("n").at(State::ValidationRequired));
    fleet.validator_mut("n").ready = false;
    fleet.play();
    assert_eq!(fleet.verdict("n").state, State::UpgradeFailed);
    fleet.validator_mut("n").ready = true;
    fleet.play();
    assert_eq!(fleet.verdict("n").state, State::UpgradeFailed);
    assert!(fleet.snapshot.nodes["n"].unschedulable);
}

#[test]
fn a_second_version_during_validation_restarts_the_driver_once_more() {
    let mut fleet = Fleet::new().with(node("n").at(State::ValidationRequired));
    fleet.validator_mut("n").ready = false;
    fleet.settle();
    fleet.publish("gpu", 3, "newer");
    fleet.validator_mut("n").ready = true;
    fleet.play();
    assert_eq!(
        fleet.states_of("n"),
        ["pod-restart-required", "validation-required", "uncordon-required", "upgrade-done"]
    );
    assert_eq!(fleet.driver_mut("n").revision, Some("newer".into()));
    assert_eq!(fleet.told("n restart").len(), 1);
}

#[test]
fn a_version_that_is_not_taken_up_yet_holds_the_release_back() {
    let mut fleet = Fleet::new().with(node("n").at(State::UncordonRequired));
    fleet.daemon_set_mut().generation = 3;
    fleet.settle();
    assert_eq!(fleet.verdict("n").state, State::ValidationRequired);
    assert!(fleet.snapshot.nodes["n"].unschedulable);
    fleet.daemon_set_mut().observed_generation = 3;
    fleet.play();
    assert_eq!(fleet.verdict("n").state, State::UpgradeDone);
}

#[test]
fn a_validator_that_cannot_be_deleted_is_not_hammered() {
    let mut fleet = Fleet::new().with(node("n").at(State::ValidationRequired));
    fleet.driver_mut("n").started = Some(after(-30));
    let validator = Object::Pod(ObjectName::new(NAMESPACE, "validator-n"));
    fleet.setback(validator, SetbackKind::Error("no".into()), after(8));
    let deletes =
        |fleet: &Fleet| fleet.decisions().into_iter().filter(|line| line.contains("delete")).count();
    assert_eq!(deletes(&fleet), 0);
    assert_eq!(fleet.plan().wake_at, Some(after(8)));
    fleet.wait(8);
    assert_eq!(deletes(&fleet), 1);
}

#[test]
fn a_driver_pod_that_cannot_be_deleted_is_not_hammered_and_fails_at_the_limit() {
    let mut fleet = Fleet::new().with(node("n").outdated().at(State::PodRestartRequired));
    let driver = Object::Pod(ObjectName::new(NAMESPACE, "gpu-driver-n"));
    fleet.setback(driver.clone(), SetbackKind::Error("no".into()), after(8));
    assert_eq!(fleet.decisions().iter().filter(|line| line.contains("restart g")).count(), 0);
    assert_eq!(fleet.plan().wake_at, Some(after(8)));
    fleet.wait(1740);
    fleet.setback(driver, SetbackKind::Error("no".into()), after(1800));
    fleet.step();
    assert_eq!(
        fleet.why("n"),
        "driver pod not ready after 1800 s: the old pod gpu-operator/gpu-driver-n cannot be deleted"
    );
}

#[test]
fn a_driver_without_validator_needs_none() {
    let spec = json!({"driver": {"name": "gpu"}});
    let mut fleet = Fleet::without_policy().driver_policy("gpu", spec).with(node("n").outdated());
    fleet.remove_pods("n", |pod| pod.name.name.starts_with("validator"));
    fleet.play();
    assert_eq!(fleet.verdict("n").state, State::UpgradeDone);
}

#[test]
fn a_driver_that_waits_for_a_safe_load_is_released_on_an_empty_node() {
    let mut fleet = Fleet::new().with(node("n").annotation(&keys("gpu").safe_load, "true").pod(pod("train")));
    let driver = fleet.driver_mut("n");
    (driver.ready, driver.started) = (false, None);
    fleet.settle();
    assert_eq!(fleet.verdict("n").state, State::PodRestartRequired);
    assert_eq!(fleet.told("evict"), ["n evict work/train"]);
    assert_eq!(fleet.told("-driver-wait-for-safe-load"), ["n annotate -driver-wait-for-safe-load"]);
    assert_eq!(fleet.told("restart g"), [""; 0], "the pod is new already, it only waits");
    let driver = fleet.driver_mut("n");
    (driver.ready, driver.started) = (true, Some(after(100)));
    fleet.play();
    assert_eq!(fleet.verdict("n").state, State::UpgradeDone);
}

#[test]
fn work_that_tolerates_the_cordon_has_to_leave_before_the_restart() {
    let mut fleet =
        Fleet::new().with(node("n").outdated().at(State::PodRestartRequired).pod(pod("intruder")));
    fleet.play();
    assert_eq!(fleet.states_of("n")[..2], ["pod-deletion-required", "pod-restart-required"]);
    assert_eq!(fleet.told("evict"), ["n evict work/intruder"]);
    assert_eq!(fleet.verdict("n").state, State::UpgradeDone);
}

#[test]
fn work_that_keeps_coming_back_is_not_chased_for_ever() {
    let after_so_many = |times: u32| {
        let restart = node("n").outdated().at(State::PodRestartRequired).walk(|walk| walk.came_back = times);
        let mut fleet = Fleet::new().with(restart.pod(pod("intruder")));
        fleet.step();
        fleet
    };
    assert_eq!(after_so_many(2).verdict("n").state, State::PodDeletionRequired);
    assert_eq!(
        after_so_many(3).why("n"),
        "pods cannot be evicted: pod work/intruder is there after pods were evicted 4 times; \
         whatever places it there ignores the cordon"
    );
}

#[test]
fn a_pod_that_is_put_on_a_node_that_is_being_emptied_ends_the_attempt() {
    let mut fleet = Fleet::new().with(node("n").outdated().at(State::PodDeletionRequired).pod(pod("train")));
    fleet.wait(31);
    fleet.put(&"n".into(), pod("intruder"));
    fleet.work_mut("n", "intruder").created = fleet.snapshot.now;
    fleet.step();
    assert_eq!(
        fleet.why("n"),
        "pods cannot be evicted: pod work/intruder was put on the node while it was being emptied; \
         whatever places it there ignores the cordon"
    );
}

#[test]
fn a_driver_pod_that_a_person_replaced_may_load_on_an_empty_failed_node() {
    let failed = || node("n").at(State::UpgradeFailed).annotation(&keys("gpu").safe_load, "true");
    let released = |spec| {
        let mut fleet = Fleet::new().with(spec);
        let driver = fleet.driver_mut("n");
        (driver.ready, driver.started, driver.uid) = (false, None, "by-hand".into());
        fleet.settle();
        fleet.told("-driver-wait-for-safe-load").len()
    };
    assert_eq!(released(failed()), 1);
    assert_eq!(released(failed().pod(pod("train"))), 0, "somebody uses the device");
}

#[test]
fn the_controllers_own_node_waits_for_others_that_are_only_about_to_be_told() {
    let mut fleet = Fleet::new()
        .policy(json!({"maxParallelUpgrades": 1, "maxUnavailable": "100%"}))
        .with(node("a").outdated().labelled(State::UpgradeRequired))
        .with(node("b").outdated().labelled(State::UpgradeDone));
    fleet.snapshot.own_node = Some("a".into());
    fleet.step();
    assert_eq!(
        (fleet.verdict("a").state, fleet.verdict("b").state),
        (State::UpgradeRequired, State::UpgradeRequired)
    );
    fleet.step();
    assert_eq!(fleet.verdict("b").state, State::CordonRequired);
}
