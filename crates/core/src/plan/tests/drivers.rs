//! Two drivers on one node: one after the other, never both at once.

use serde_json::json;

use super::fixture::*;
use crate::contract::State;
use crate::snapshot::{Object, Pending};

fn two_drivers() -> Fleet {
    let ofed = json!({"driver": {"name": "ofed", "daemonSets": {"selector": "app=mofed"}}, "upgradePolicy": {"maxUnavailable": "100%"}});
    let gpu = json!({"driver": {"name": "gpu"}, "upgradePolicy": {"maxUnavailable": "100%"}});
    Fleet::without_policy().daemon_set("ofed", "mofed").driver_policy("gpu", gpu).driver_policy("ofed", ofed)
}

fn both_due(name: &str) -> NodeSpec {
    node(name).outdated().labelled(State::UpgradeRequired).label(&keys("ofed").state, "upgrade-required")
}

#[test]
fn they_go_one_after_the_other() {
    let mut fleet = two_drivers().with(both_due("n"));
    fleet.play();
    let cordons = fleet.told("+cordon");
    assert_eq!(cordons.len(), 2);
    assert_eq!(
        fleet.told("restart "),
        ["n restart gpu-operator/gpu-driver-n", "n restart gpu-operator/ofed-driver-n"]
    );
    let node = &fleet.snapshot.nodes["n"];
    assert_eq!(node.labels()[&keys("gpu").state], "upgrade-done");
    assert_eq!(node.labels()[&keys("ofed").state], "upgrade-done");
    assert!(!node.unschedulable);
    assert_eq!(node.visit, None);
    let first_is_over = fleet.story.iter().position(|line| line.contains("-cordon")).unwrap();
    let second_begins = fleet.story.iter().rposition(|line| line.contains("+cordon")).unwrap();
    assert!(first_is_over < second_begins, "{:#?}", fleet.story);
}

#[test]
fn the_one_that_waits_says_for_whom() {
    let mut fleet = two_drivers().with(both_due("n").pod(pod("train").leaving()));
    fleet.settle();
    let plan = fleet.plan();
    let reasons: Vec<String> = plan.pools.iter().map(|pool| pool.nodes["n"].reason.to_string()).collect();
    assert_eq!(reasons, ["evicting pod work/train", "driver gpu is upgraded on this node first"]);
}

#[test]
fn a_start_that_has_no_record_yet_is_respected_too() {
    let fleet = two_drivers().with(both_due("n").labelled(State::CordonRequired));
    let decisions = fleet.decisions();
    let about_node: Vec<_> = decisions.iter().filter(|line| line.starts_with("n ")).collect();
    assert_eq!(
        about_node,
        ["n -> wait-for-jobs-required +cordon +scale-down-disabled +do-not-disrupt +visit"]
    );
    assert_eq!(
        fleet.plan().pools[1].nodes["n"].reason.to_string(),
        "driver gpu is upgraded on this node first"
    );
}

#[test]
fn a_visit_is_never_overwritten_by_the_other_driver() {
    let walking = node("n").outdated().at(State::PodDeletionRequired).pod(pod("train").leaving());
    for label in State::ALL.into_iter().filter(|state| *state != State::Unknown) {
        let mut fleet = two_drivers().with(walking.clone().label(&keys("ofed").state, label.as_str()));
        let before = fleet.snapshot.nodes["n"].visit.clone();
        fleet.settle();
        assert_eq!(fleet.snapshot.nodes["n"].visit, before, "ofed {label}");
    }
}

#[test]
fn both_in_the_middle_without_a_record_sort_themselves_out() {
    let stuck =
        node("n").outdated().labelled(State::PodRestartRequired).label(&keys("ofed").state, "drain-required");
    let mut fleet = two_drivers().with(stuck);
    fleet.play();
    assert_eq!(fleet.snapshot.nodes["n"].labels()[&keys("gpu").state], "upgrade-done");
    assert_eq!(fleet.snapshot.nodes["n"].labels()[&keys("ofed").state], "upgrade-done");
    assert_eq!(fleet.told("+cordon").len(), 2);
}

#[test]
fn each_counts_its_own_writes_under_way() {
    let mut fleet = two_drivers().with(both_due("a")).with(
        node("b").outdated().label(&keys("ofed").state, "upgrade-required").labelled(State::UpgradeDone),
    );
    let pending = Pending { moving_to: Some(("gpu".into(), State::CordonRequired)), on_node: None };
    fleet.snapshot.in_flight.insert(Object::Node("a".into()), pending);
    let plan = fleet.plan();
    assert_eq!((plan.pools[0].ledger.moving, plan.pools[1].ledger.moving), (1, 0));
}

#[test]
fn a_driver_without_devices_empties_nothing_unless_drained() {
    let options = |drain: bool| json!({"driver": {"name": "ofed", "daemonSets": {"selector": "app=mofed"}}, "upgradePolicy": {"drain": {"enable": drain}}});
    let fleet = |drain| {
        Fleet::without_policy()
            .daemon_set("ofed", "mofed")
            .driver_policy("ofed", options(drain))
            .with(node("n").outdated().pod(pod("train")))
    };
    let mut plain = fleet(false);
    plain.play();
    assert_eq!(
        plain.states_of("n")[2..5],
        ["wait-for-jobs-required", "pod-restart-required", "validation-required"]
    );
    assert_eq!(plain.told("evict"), [""; 0]);
    let mut drained = fleet(true);
    drained.play();
    assert_eq!(
        drained.states_of("n")[2..5],
        ["wait-for-jobs-required", "drain-required", "pod-restart-required"]
    );
    assert_eq!(drained.told("evict"), ["n evict work/train"]);
}
