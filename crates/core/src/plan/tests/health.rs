//! The hand-shake with NVSentinel.

use jiff::SignedDuration;
use serde_json::json;

use super::fixture::*;
use crate::contract::{HEALTH_HOLD_ANNOTATION, LAST_VISIT_ANNOTATION, State, nvsentinel};
use crate::health::{HealthHold, Owner, Shield};
use crate::snapshot::{Condition, NvSentinel};

/// A fleet with NVSentinel in the cluster.
fn watched(spec: NodeSpec) -> Fleet {
    let mut fleet = Fleet::new().with(spec);
    fleet.snapshot.nvsentinel = Some(NvSentinel { tripped: false });
    fleet
}

fn label<'a>(fleet: &'a Fleet, key: &str) -> Option<&'a str> {
    fleet.snapshot.nodes["n"].labels().get(key).map(String::as_str)
}

fn held(owner: Owner, until: Option<i64>) -> String {
    let until = until.map(after);
    let hold = HealthHold { owner, shield: Shield::Quarantine, before: None, since: after(-300), until };
    hold.to_text()
}

fn condition(fleet: &mut Fleet, holds: bool, seconds: i64) {
    let heartbeat = Some(after(seconds));
    let condition = Condition { kind: nvsentinel::DCGM_CONDITION.into(), holds, heartbeat };
    fleet.node_mut("n").conditions = vec![condition];
}

#[test]
fn a_node_is_opted_out_by_the_write_that_cordons_and_in_by_the_one_that_ends_the_visit() {
    let mut fleet = watched(node("n").outdated().label(nvsentinel::OPT_OUT_LABEL, "true"));
    while !fleet.snapshot.nodes["n"].unschedulable {
        assert!(fleet.step(), "it was never cordoned");
    }
    assert_eq!(label(&fleet, nvsentinel::OPT_OUT_LABEL), Some("false"));
    assert!(fleet.snapshot.nodes["n"].annotations.contains_key(HEALTH_HOLD_ANNOTATION));
    fleet.play();
    assert_eq!(fleet.verdict("n").state, State::UpgradeDone);
    assert_eq!(label(&fleet, nvsentinel::OPT_OUT_LABEL), Some("true"), "what was there before is back");
    let annotations = &fleet.snapshot.nodes["n"].annotations;
    assert!(
        !annotations.contains_key(HEALTH_HOLD_ANNOTATION) && annotations.contains_key(LAST_VISIT_ANNOTATION)
    );
}

#[test]
fn without_nvsentinel_nothing_is_labelled() {
    let mut fleet = Fleet::new().with(node("n").outdated());
    fleet.play();
    assert_eq!(fleet.told(nvsentinel::OPT_OUT_LABEL), [""; 0]);
    assert_eq!(fleet.verdict("n").state, State::UpgradeDone);
}

#[test]
fn a_node_is_given_back_when_its_conditions_are_clear_and_fresh() {
    let released = |holds: bool, heartbeat: i64| {
        let mut fleet = watched(node("n").at(State::UncordonRequired));
        let driver = fleet.driver_mut("n");
        (driver.started, driver.ready_since) = (Some(after(-100)), Some(after(-80)));
        fleet.validator_mut("n").started = Some(after(-90));
        condition(&mut fleet, holds, heartbeat);
        fleet.step();
        fleet.verdict("n").state == State::UpgradeDone
    };
    assert!(released(false, -50));
    assert!(!released(true, -50), "it is unhealthy");
    assert!(!released(false, -90), "nobody has looked since the driver is ready");
}

#[test]
fn a_cordon_of_nvsentinel_is_not_lifted() {
    let mut fleet =
        watched(node("n").at(State::UncordonRequired).annotation(nvsentinel::CORDONED_ANNOTATION, "True"));
    fleet.settle();
    assert!(fleet.snapshot.nodes["n"].unschedulable);
    assert_eq!(fleet.why("n"), "NVSentinel has cordoned the node; that is not ours to lift");
}

#[test]
fn opt_outs_that_nobody_is_responsible_for_are_lifted() {
    let lifted = |text: String, ready: bool| {
        let spec = node("n").labelled(State::UpgradeDone).label(nvsentinel::OPT_OUT_LABEL, "false");
        let mut fleet = watched(spec.annotation(HEALTH_HOLD_ANNOTATION, &text));
        fleet.driver_mut("n").ready = ready;
        fleet.settle();
        label(&fleet, nvsentinel::OPT_OUT_LABEL).is_none()
    };
    assert!(lifted(held(Owner::Visit, None), true), "its visit is gone");
    assert!(!lifted(held(Owner::Visit, None), false), "its driver is on its way up");
    assert!(lifted(held(Owner::Person("ann".into()), Some(-1)), true), "its time is over");
    assert!(!lifted(held(Owner::Person("ann".into()), Some(600)), true), "its time is not over");
}

#[test]
fn a_hold_ends_at_its_time_in_a_paused_pool_too() {
    let spec = node("n").labelled(State::UpgradeDone).label(nvsentinel::OPT_OUT_LABEL, "false");
    let spec = spec.annotation(HEALTH_HOLD_ANNOTATION, &held(Owner::Person("ann".into()), Some(-1)));
    let mut fleet = Fleet::new().policy(json!({"autoUpgrade": false})).with(spec);
    fleet.settle();
    assert_eq!(label(&fleet, nvsentinel::OPT_OUT_LABEL), None);
    assert_eq!(fleet.why("n"), "paused: autoUpgrade is false");
}

#[test]
fn a_node_in_quarantine_for_want_of_a_driver_gets_its_driver() {
    let waits = node("n").labelled(State::UpgradeRequired).label(nvsentinel::STATE_LABEL, "quarantined");
    let mut fleet = watched(waits.annotation(&keys("gpu").safe_load, "true"));
    let driver = fleet.driver_mut("n");
    (driver.ready, driver.started) = (false, None);
    fleet.step();
    assert_eq!(fleet.verdict("n").state, State::CordonRequired, "{}", fleet.why("n"));
}

#[test]
fn what_happens_soon_after_a_visit_is_told_in_the_rollout() {
    let mut fleet = watched(node("n").outdated());
    fleet.play();
    assert_eq!(fleet.snapshot.rollouts["cluster-policy-1"].status.as_ref().unwrap().relapses.len(), 0);
    fleet.node_mut("n").ready = false;
    fleet.settle();
    let status = fleet.snapshot.rollouts["cluster-policy-1"].status.clone().unwrap();
    let told: Vec<(&str, &str)> =
        status.relapses.iter().map(|r| (r.node.as_str(), r.cause.as_str())).collect();
    assert_eq!(told, [("n", "is not Ready")]);
    fleet.settle();
    assert_eq!(fleet.snapshot.rollouts["cluster-policy-1"].status, Some(status), "once");
}

#[test]
fn a_breaker_that_trips_soon_after_a_visit_is_told_in_the_rollout() {
    let mut fleet = watched(node("n").outdated());
    fleet.play();
    fleet.snapshot.nvsentinel = Some(NvSentinel { tripped: true });
    fleet.settle();
    let status = fleet.snapshot.rollouts["cluster-policy-1"].status.clone().unwrap();
    let told: Vec<&str> = status.relapses.iter().map(|relapse| relapse.cause.as_str()).collect();
    assert_eq!(told, ["is in service while NVSentinel's circuit breaker is tripped"]);
}

#[test]
fn a_node_that_goes_back_to_validation_is_kept_from_nvsentinel_again() {
    let spec = json!({"driver": {"name": "gpu"}, "health": {"nvsentinel": "Everything"}});
    let mut fleet =
        Fleet::without_policy().driver_policy("gpu", spec).with(node("n").at(State::UncordonRequired));
    fleet.snapshot.nvsentinel = Some(NvSentinel { tripped: false });
    fleet.driver_mut("n").ready = false;
    fleet.step();
    assert_eq!(fleet.verdict("n").state, State::ValidationRequired);
    assert_eq!(label(&fleet, nvsentinel::MANAGED_LABEL), Some("false"));
    let driver = fleet.driver_mut("n");
    (driver.ready, driver.started) = (true, Some(after(-7200)));
    fleet.play();
    assert_eq!(label(&fleet, nvsentinel::MANAGED_LABEL), None);
    assert_eq!(fleet.verdict("n").state, State::UpgradeDone);
}

#[test]
fn long_after_a_visit_nobody_is_blamed() {
    let mut fleet = watched(node("n").outdated());
    fleet.play();
    fleet.snapshot.now += SignedDuration::from_mins(11);
    fleet.node_mut("n").ready = false;
    fleet.settle();
    assert_eq!(fleet.snapshot.rollouts["cluster-policy-1"].status.as_ref().unwrap().relapses.len(), 0);
}

#[test]
fn nothing_starts_while_the_breaker_is_tripped() {
    let mut fleet = watched(node("n").outdated().labelled(State::UpgradeRequired));
    fleet.snapshot.nvsentinel = Some(NvSentinel { tripped: true });
    fleet.settle();
    assert_eq!(fleet.verdict("n").state, State::UpgradeRequired);
    assert!(fleet.why("n").contains("circuit breaker has tripped"));
    let off = json!({"driver": {"name": "gpu"}, "health": {"nvsentinel": "Off"}});
    let mut fleet = Fleet::without_policy().driver_policy("gpu", off).with(node("n").outdated());
    fleet.snapshot.nvsentinel = Some(NvSentinel { tripped: true });
    fleet.play();
    assert_eq!(fleet.verdict("n").state, State::UpgradeDone);
}
