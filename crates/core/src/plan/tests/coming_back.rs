//! Restart and validation: nothing goes back into service unproven, and nothing waits for ever.

use jiff::SignedDuration;
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
    let again = ["wait-for-jobs-required", "pod-deletion-required", "pod-restart-required"];
    assert_eq!(fleet.states_of("n")[..3], again);
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
    assert_eq!(after_so_many(2).verdict("n").state, State::WaitForJobsRequired);
    assert_eq!(
        after_so_many(3).why("n"),
        "pods cannot be evicted: pod work/intruder is there after pods were evicted 3 times; \
         whatever places it there ignores the cordon"
    );
}

/// A node that is being emptied for two minutes, and a pod that came after so many seconds of that.
fn newcomer(after_seconds: i64, change: impl FnOnce(&mut Fleet)) -> Fleet {
    let spec = node("n").outdated().at(State::PodDeletionRequired);
    let mut fleet = Fleet::new().with(spec.pod(pod("train").label("app", "web"))).budget("web", 0);
    let since = fleet.snapshot.nodes["n"].visit.as_ref().unwrap().as_ref().unwrap().drivers["gpu"].since;
    fleet.snapshot.now = since + SignedDuration::from_secs(120);
    fleet.put(&"n".into(), pod("newcomer"));
    fleet.work_mut("n", "newcomer").created = since + SignedDuration::from_secs(after_seconds);
    change(&mut fleet);
    fleet.step();
    fleet
}

#[test]
fn a_pod_that_is_put_on_a_node_that_is_being_emptied_ends_the_attempt() {
    let late = newcomer(31, |_| {});
    assert_eq!(
        late.why("n"),
        "pods cannot be evicted: pod work/newcomer was put on the node while it was being emptied; \
         whatever places it there ignores the cordon"
    );
    for (why, fleet) in [
        ("it was on its way when the node was cordoned", newcomer(29, |_| {})),
        ("it does not use the device", newcomer(31, |f| f.work_mut("n", "newcomer").resources.clear())),
        (
            "it came while somebody had uncordoned the node",
            newcomer(31, |fleet| {
                let now = fleet.snapshot.now;
                let mut visit = fleet.snapshot.nodes["n"].visit.clone().unwrap().unwrap();
                visit.drivers.get_mut("gpu").unwrap().recordoned = Some(now);
                fleet.set_record("n", &visit.to_text());
            }),
        ),
    ] {
        assert_eq!(fleet.verdict("n").state, State::PodDeletionRequired, "{why}");
    }
}

#[test]
fn a_driver_pod_that_a_person_replaced_may_load_on_an_empty_failed_node() {
    let failed = || node("n").at(State::UpgradeFailed).annotation(&keys("gpu").safe_load, "true");
    let released = |spec, by_hand: bool| {
        let mut fleet = Fleet::new().with(spec);
        let driver = fleet.driver_mut("n");
        (driver.ready, driver.started) = (false, None);
        if by_hand {
            driver.uid = "by-hand".into();
        }
        fleet.settle();
        fleet.told("-driver-wait-for-safe-load").len()
    };
    assert_eq!(released(failed(), true), 1);
    assert_eq!(released(failed(), false), 0, "it is the one that failed");
    assert_eq!(released(failed().pod(pod("train")), true), 0, "somebody uses the device");
}

#[test]
fn a_driver_that_asks_to_load_under_work_makes_the_node_be_emptied_first() {
    let asks = node("n").at(State::PodRestartRequired).annotation(&keys("gpu").safe_load, "true");
    let mut fleet = Fleet::new().with(asks.pod(pod("train")));
    let driver = fleet.driver_mut("n");
    (driver.ready, driver.started) = (false, None);
    fleet.settle();
    let told: Vec<&str> = fleet.told("n ").into_iter().filter(|line| !line.contains("->")).collect();
    assert_eq!(told, ["n evict work/train", "n annotate -driver-wait-for-safe-load"]);
}

#[test]
fn a_node_without_a_driver_is_loaded_whatever_became_of_the_rollout() {
    let asks =
        |name: &str| node(name).labelled(State::UpgradeRequired).annotation(&keys("gpu").safe_load, "true");
    let limits = json!({
        "driver": {"name": "gpu"}, "limits": {"failureThreshold": 0}, "upgradePolicy": {"maxUnavailable": "100%"},
    });
    let mut fleet = Fleet::without_policy().driver_policy("gpu", limits);
    fleet = fleet.with(node("broken").at(State::UpgradeFailed)).with(asks("n"));
    let driver = fleet.driver_mut("n");
    (driver.ready, driver.started) = (false, None);
    fleet.step();
    assert_eq!(fleet.verdict("n").state, State::CordonRequired, "{}", fleet.why("n"));
}

#[test]
fn a_node_that_was_away_for_long_gets_its_whole_time_for_the_new_driver() {
    let mut fleet = Fleet::new().with(node("n").outdated().at(State::PodRestartRequired).not_ready());
    fleet.wait(1700);
    fleet.settle();
    assert_eq!(fleet.why("n"), "node is not Ready, so no driver could start on it");
    fleet.node_mut("n").ready = true;
    fleet.step();
    assert_eq!(fleet.told("restart"), [""; 0], "the clock is set first");
    fleet.step();
    assert_eq!(fleet.told("restart").len(), 1);
    let since = fleet.verdict("n").since.unwrap();
    assert!(fleet.snapshot.now.duration_since(since) < SignedDuration::from_secs(5), "{since}");
}

#[test]
fn a_new_driver_that_was_never_proved_is_not_given_back_as_the_old_one() {
    let emptied = node("n").at(State::PodDeletionRequired).pod(pod("train").label("app", "web"));
    let released = |created| {
        let limits =
            json!({"driver": {"name": "gpu"}, "limits": {"onBlocked": "Release", "blockedAfter": "5s"}});
        let mut fleet = Fleet::without_policy().driver_policy("gpu", limits).budget("web", 0);
        fleet = fleet.with(emptied.clone().outdated());
        fleet.driver_mut("n").created = created;
        fleet.settle();
        fleet.verdict("n").state == State::UpgradeRequired
    };
    assert!(released(after(-7200)));
    assert!(!released(after(0)), "it was put there during the visit");
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
