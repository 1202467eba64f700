//! What the properties have found, each as small as it became.

use serde_json::json;

use super::fixture::*;
use crate::contract::{RELEASED_ANNOTATION, State};
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

#[test]
fn a_node_whose_first_pod_would_come_back_to_it_is_not_emptied_again_and_again() {
    let spec = json!({"driver": {"name": "gpu"}, "limits": {"onBlocked": "Release", "blockedAfter": "1m"}});
    let mut fleet = Fleet::without_policy()
        .driver_policy("gpu", spec)
        .with(
            node("n")
                .outdated()
                .annotation(RELEASED_ANNOTATION, &after(0).to_string())
                .pod(pod("web-1").label("app", "web"))
                .pod(pod("web-2").label("app", "web")),
        )
        .budget("web", 1);
    for _ in 0..3 {
        fleet.step();
    }
    assert_eq!(fleet.told("evict"), [""; 0]);
    assert!(matches!(fleet.verdict("n").reason, Reason::BudgetBlocks { until: Some(_), .. }));
    // Nobody can know whether there is another place for it by now: after a while it is tried.
    fleet.wait(600);
    fleet.step();
    fleet.step();
    assert_eq!(fleet.told("-> cordon-required").len(), 1, "{}", fleet.screen());
}

#[test]
fn a_failed_node_that_was_mended_takes_the_slot_that_another_one_would_have_got() {
    let options = json!({"maxParallelUpgrades": 1, "maxUnavailable": "100%"});
    let mut fleet = Fleet::new()
        .policy(options)
        .with(node("bad").at(State::UpgradeFailed))
        .with(node("next").outdated().labelled(State::UpgradeRequired));
    let driver = fleet.driver_mut("bad");
    (driver.uid, driver.ready) = ("another".into(), true);
    fleet.step();
    assert_eq!(fleet.verdict("bad").state, State::ValidationRequired, "{}", fleet.screen());
    assert_eq!(fleet.told("next -> cordon-required").len(), 0);
}

#[test]
fn a_failed_node_stays_out_of_service_when_the_cordon_of_somebody_else_is_lifted() {
    let failed = || node("n").at(State::UpgradeFailed);
    let mut fleet = Fleet::new().with(failed());
    fleet.snapshot.nodes.get_mut("n").unwrap().unschedulable = false;
    fleet.play();
    assert!(!fleet.snapshot.nodes["n"].unschedulable, "our own: somebody wants it so");
    let mut fleet = Fleet::new().with(failed());
    let node = fleet.snapshot.nodes.get_mut("n").unwrap();
    node.unschedulable = false;
    if let Some(Ok(visit)) = &mut node.visit {
        visit.holds.cordon = false;
    }
    fleet.play();
    assert!(fleet.snapshot.nodes["n"].unschedulable);
}
