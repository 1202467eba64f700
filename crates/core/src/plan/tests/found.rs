//! What the properties have found, each as small as it became.

use serde_json::json;

use super::fixture::*;
use crate::contract::State;
use crate::names::ObjectName;
use crate::reason::Reason;
use crate::snapshot::{Object, Pending};

#[test]
fn a_node_without_a_driver_starts_once_although_the_rollout_was_aborted() {
    for ready in [true, false] {
        let mut fleet = Fleet::new()
            .with(node("n").labelled(State::UpgradeRequired).annotation(&keys("gpu").safe_load, "true"));
        fleet.driver_mut("n").ready = ready;
        fleet.abort_rollouts();
        fleet.settle();
        assert_eq!(fleet.told("-> cordon-required").len(), 1, "{}", fleet.story.join("\n"));
        assert_eq!(fleet.told("aborted").len(), 0);
    }
}

#[test]
fn a_node_that_was_given_back_because_of_a_budget_waits_for_it_even_if_pods_would_be_deleted_later() {
    let spec = json!({
        "driver": {"name": "gpu"},
        "upgradePolicy": {"gpuPodDeletion": {"timeoutAction": "Delete"}},
        "limits": {"onBlocked": "Release", "blockedAfter": "1m"},
    });
    let mut fleet = Fleet::without_policy()
        .driver_policy("gpu", spec)
        .with(node("n").outdated().pod(pod("web").label("app", "web")))
        .budget("web", 0);
    fleet.play();
    assert_eq!(fleet.told("-> cordon-required").len(), 1);
    assert!(!fleet.snapshot.nodes["n"].unschedulable);
    assert!(fleet.why("n").contains("poddisruptionbudget/work/web"), "{}", fleet.why("n"));
    fleet.change_budgets(|budgets| budgets.values_mut().for_each(|budget| budget.allowed = 1));
    fleet.play();
    assert_eq!(fleet.verdict("n").state, State::UpgradeDone);
}

#[test]
fn policies_of_two_operators_under_one_name_have_one_rollout_each() {
    let mut fleet = Fleet::new().daemon_set("ofed", "mofed");
    fleet.label_daemon_sets("ofed", "nvidia.com/ofed-driver");
    let ofed = json!({"upgradePolicy": {"autoUpgrade": true, "drain": {"enable": true}}});
    fleet.snapshot.sources.nic_cluster_policies.insert(POOL.to_owned(), ofed);
    let mut fleet = fleet.nodes(4, NodeSpec::outdated);
    fleet.play();
    let rollouts: Vec<&String> = fleet.snapshot.rollouts.keys().collect();
    assert_eq!(rollouts, ["cluster-policy-1", "cluster-policy-ofed-1"]);
    assert!(fleet.plan().pools.iter().flat_map(|pool| pool.nodes.values()).all(|v| v.in_sync));
}

#[test]
fn a_node_does_not_move_on_while_a_pod_of_it_is_being_asked_to_leave() {
    let mut fleet = Fleet::new().with(node("n").outdated().at(State::PodDeletionRequired).pod(pod("train")));
    fleet.abort_rollouts();
    let object = Object::Pod(ObjectName::new("work", "train"));
    let pending = Pending { moving_to: None, on_node: Some("n".into()) };
    fleet.snapshot.in_flight.insert(object.clone(), pending);
    assert!(fleet.plan().actions.iter().all(|action| action.node().is_none()));
    assert_eq!(fleet.verdict("n").reason, Reason::Writing);
    fleet.snapshot.in_flight.remove(&object);
    fleet.play();
    assert_eq!(fleet.verdict("n").state, State::UpgradeRequired);
    assert_eq!(fleet.told("evict"), [""; 0]);
}
