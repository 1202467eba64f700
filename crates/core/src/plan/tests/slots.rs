//! Who may start, and when: the ledger through the whole planner.

use serde_json::{Value, json};

use super::fixture::*;
use crate::contract::State;
use crate::names::NodeName;
use crate::snapshot::{Object, Pending, SetbackKind};

/// The nodes that start now.
fn starts(fleet: &Fleet) -> Vec<String> {
    let start = |line: String| Some(line.strip_suffix(" -> cordon-required")?.to_owned());
    fleet.decisions().into_iter().filter_map(start).collect()
}

fn outdated(count: usize, options: Value) -> Fleet {
    Fleet::new().policy(options).nodes(count, |n| n.outdated().at(State::UpgradeRequired))
}

#[test]
fn by_default_one_node_starts() {
    let fleet = outdated(3, json!({}));
    insta::assert_snapshot!(fleet.screen(), @r"
    gpu-1 upgrade-required | moves on to cordon-required
    gpu-2 upgrade-required | next slot; maxParallelUpgrades is 1
    gpu-3 upgrade-required | waits for a slot, 1 before it; maxParallelUpgrades is 1
    ");
    assert_eq!(starts(&fleet), ["gpu-1"]);
}

#[test]
fn max_unavailable_binds_when_it_is_the_smaller() {
    let fleet = outdated(8, json!({"maxParallelUpgrades": 5, "maxUnavailable": "25%"}));
    assert_eq!(starts(&fleet), ["gpu-1", "gpu-2"]);
    assert_eq!(fleet.why("gpu-3"), "next slot; 2 of at most 2 nodes are out (maxUnavailable)");
}

#[test]
fn no_limit_of_its_own_still_obeys_max_unavailable() {
    assert_eq!(starts(&outdated(5, json!({"maxParallelUpgrades": 0, "maxUnavailable": "50%"}))).len(), 3);
    assert_eq!(starts(&outdated(5, json!({"maxParallelUpgrades": 0, "maxUnavailable": "100%"}))).len(), 5);
    assert_eq!(starts(&outdated(5, json!({"maxParallelUpgrades": 0, "maxUnavailable": 0}))), [""; 0]);
}

#[test]
fn nodes_that_others_took_out_count_and_are_named() {
    let fleet = outdated(3, json!({"maxParallelUpgrades": 0, "maxUnavailable": 2}))
        .with(node("broken").not_ready())
        .with(node("parked").cordoned());
    assert_eq!(starts(&fleet), [""; 0]);
    assert_eq!(
        fleet.why("gpu-1"),
        "next slot; 2 of at most 2 nodes are out (maxUnavailable), broken not by us"
    );
    let ledger = fleet.pool().ledger;
    let foreign: Vec<&str> = ledger.foreign.iter().map(|foreign| foreign.node.as_str()).collect();
    assert_eq!(foreign, ["broken", "parked"]);
    assert_eq!((ledger.total, ledger.moving, ledger.out, ledger.free()), (5, 0, 2, 0));
}

#[test]
fn a_node_that_is_out_already_costs_nothing_more_but_takes_its_turn() {
    let fleet = outdated(1, json!({"maxParallelUpgrades": 2, "maxUnavailable": 1}))
        .with(node("parked").outdated().at(State::UpgradeRequired).cordoned());
    assert_eq!(starts(&fleet), ["parked"]);
    assert_eq!(
        fleet.why("gpu-1"),
        "next slot; 1 of at most 1 nodes are out (maxUnavailable), parked not by us"
    );

    let one_at_a_time = outdated(0, json!({"maxUnavailable": "100%"}))
        .nodes(3, |n| n.outdated().at(State::UpgradeRequired).cordoned());
    assert_eq!(starts(&one_at_a_time), ["gpu-1"]);
}

#[test]
fn failed_nodes_count_as_out_but_not_as_moving() {
    let fleet = outdated(4, json!({"maxParallelUpgrades": 1, "maxUnavailable": 2}))
        .with(node("bad").at(State::UpgradeFailed));
    assert_eq!(starts(&fleet), ["gpu-1"]);
    let full = outdated(4, json!({"maxParallelUpgrades": 1, "maxUnavailable": 1}))
        .with(node("bad").at(State::UpgradeFailed));
    assert_eq!(starts(&full), [""; 0]);
    assert_eq!(full.pool().ledger.foreign, [], "a failed node is out by our own doing");
}

#[test]
fn a_start_that_is_being_written_holds_its_slot() {
    let mut fleet = outdated(2, json!({}));
    let pending = Pending { moving_to: Some(("gpu".into(), State::CordonRequired)), on_node: None };
    fleet.snapshot.in_flight.insert(Object::Node("gpu-1".into()), pending);
    assert_eq!(starts(&fleet), [""; 0]);
    assert_eq!(fleet.why("gpu-1"), "moves on to cordon-required");
}

/// Found by the simulation (seed 45594): its labels were lost while its start was being written, and another node got its place.
#[test]
fn a_start_that_is_being_written_holds_its_slot_also_on_a_node_that_leaves_the_fleet() {
    let mut fleet = outdated(2, json!({}));
    fleet.node_mut("gpu-1").set_label("gpu", None);
    fleet.remove_pods("gpu-1", |_| true);
    assert_eq!(starts(&fleet), ["gpu-2"], "it is none of the fleet");
    let pending = Pending { moving_to: Some(("gpu".into(), State::CordonRequired)), on_node: None };
    fleet.snapshot.in_flight.insert(Object::Node("gpu-1".into()), pending);
    assert_eq!(starts(&fleet), [""; 0]);
}

#[test]
fn a_start_with_unknown_outcome_holds_its_slot_until_it_was_read() {
    let mut fleet = outdated(2, json!({}));
    fleet.setback(Object::Node("gpu-1".into()), SetbackKind::Stale, after(5));
    assert_eq!(starts(&fleet), [""; 0]);
    assert_eq!(fleet.plan().wake_at, Some(after(5)));
    fleet.wait(5);
    assert_eq!(
        fleet.decisions(),
        [
            "gpu-1 read",
            "gpu-2 annotate +pending",
            "rollout cluster-policy-1 begins: {\"nvidia-driver-daemonset\": \"new\"}"
        ]
    );
}

#[test]
fn a_node_that_cannot_be_written_does_not_keep_the_slot_from_others() {
    let mut fleet = outdated(2, json!({}));
    fleet.setback(
        Object::Node("gpu-1".into()),
        SetbackKind::Error("admission webhook says no".into()),
        after(30),
    );
    assert_eq!(starts(&fleet), ["gpu-2"]);
    assert_eq!(fleet.why("gpu-1"), "the Kubernetes API refused a write: admission webhook says no");
    assert_eq!(fleet.plan().wake_at, Some(after(30)));
    fleet.wait(30);
    assert_eq!(starts(&fleet), ["gpu-1"]);
}

#[test]
fn order_is_broken_first_then_cheapest_then_by_name_and_the_own_node_last() {
    let mut fleet = outdated(4, json!({"maxParallelUpgrades": 0, "maxUnavailable": "100%"}));
    fleet.snapshot.own_node = Some("gpu-1".into());
    fleet.put(&"gpu-2".into(), pod("big").gpus(8));
    fleet.put(&"gpu-3".into(), pod("small").gpus(1));
    fleet.driver_mut("gpu-4").ready = false;
    let granted = fleet.pool().ledger.granted;
    assert_eq!(granted, ["gpu-4", "gpu-3", "gpu-2", "gpu-1"].map(NodeName::from));
}

#[test]
fn skipped_nodes_are_never_touched_and_others_pass_them() {
    let mut fleet = outdated(2, json!({})).with(node("a").outdated().at(State::UpgradeRequired).skipped());
    fleet.play();
    assert_eq!(fleet.verdict("a").state, State::UpgradeRequired);
    assert_eq!(fleet.why("a"), "left out by label nvidia.com/gpu-driver-upgrade.skip=true");
    assert_eq!(fleet.verdict("gpu-2").state, State::UpgradeDone);
    assert_eq!(fleet.states_of("a"), [""; 0]);
    fleet.node_mut("a").set_label(&keys("gpu").skip, None);
    fleet.play();
    assert_eq!(fleet.verdict("a").state, State::UpgradeDone);
}

#[test]
fn a_whole_fleet_walks_one_after_the_other() {
    let mut fleet = Fleet::new().nodes(3, |n| n.labelled(State::Unknown).outdated().pod(pod("web").gpus(0)));
    fleet.put(&"gpu-2".into(), pod("train"));
    fleet.play();
    let walk = [
        "upgrade-required",
        "cordon-required",
        "wait-for-jobs-required",
        "pod-deletion-required",
        "pod-restart-required",
        "validation-required",
        "uncordon-required",
        "upgrade-done",
    ];
    for name in ["gpu-1", "gpu-2", "gpu-3"] {
        assert_eq!(fleet.states_of(name), walk, "{name}");
        assert!(!fleet.snapshot.nodes[name].unschedulable);
        assert_eq!(fleet.snapshot.nodes[name].visit, None);
    }
    let order: Vec<&str> = fleet.told("-> cordon-required").iter().map(|line| &line[..5]).collect();
    assert_eq!(order, ["gpu-1", "gpu-3", "gpu-2"], "the node with work on it goes last");
    assert_eq!(fleet.told("evict"), ["gpu-2 evict work/train"], "pods that do not use the device stay");
}

/// Found by the simulation (seed 5876): the answer to a start was lost, another node came to stand before it in the line,
/// and both were out.
#[test]
fn a_node_that_may_have_started_keeps_its_slot() {
    let mut fleet = outdated(3, json!({"maxParallelUpgrades": 0, "maxUnavailable": 1}));
    fleet.setback(Object::Node("gpu-2".into()), SetbackKind::Stale, after(5));
    assert_eq!(starts(&fleet), [""; 0]);
    assert_eq!(fleet.why("gpu-1"), "next slot; 1 of at most 1 nodes are out (maxUnavailable)");
    fleet.snapshot.setbacks.clear();
    assert_eq!(starts(&fleet), ["gpu-1"]);
}

/// Found by the simulation (seeds 9489 and 13807): a person lifted the cordon under which a node had failed, and it was
/// cordoned again by the same plan that gave its place to another one.
#[test]
fn a_failed_node_that_is_cordoned_again_keeps_its_place() {
    let mut fleet = outdated(2, json!({"maxParallelUpgrades": 0, "maxUnavailable": 1}))
        .with(node("bad").at(State::UpgradeFailed).uncordoned());
    assert_eq!(starts(&fleet), ["gpu-1"], "our own cordon: somebody wants it in service");
    if let Some(Ok(visit)) = &mut fleet.node_mut("bad").visit {
        visit.holds.cordon = false;
    }
    assert_eq!(starts(&fleet), [""; 0]);
    let pending = Pending { moving_to: None, on_node: Some("bad".into()) };
    fleet.snapshot.in_flight.insert(Object::Node("bad".into()), pending);
    assert_eq!(starts(&fleet), [""; 0], "and while that is written");
}
