//! Whose policy rules, and what freezes a pool.

use serde_json::{Value, json};

use super::fixture::*;
use crate::action::Action;
use crate::contract::State;
use crate::plan::PoolStatus;
use crate::reason::Kind;

/// Why the first pool is frozen; and that nothing but a complaint or a policy's status comes of it.
fn frozen(fleet: &Fleet) -> String {
    let plan = fleet.plan();
    let only_words =
        |action: &Action| matches!(action, Action::Complain { .. } | Action::PolicyStatus { .. });
    assert!(plan.actions.iter().all(only_words), "{:#?}", plan.actions);
    for verdict in plan.pools[0].nodes.values() {
        assert_eq!(verdict.reason.code(), "pool-frozen");
        assert_eq!(verdict.reason.kind(), Kind::Blocked);
    }
    match plan.pools[0].status.clone() {
        PoolStatus::Frozen(why) => why,
        other => panic!("{other:?}"),
    }
}

fn busy_fleet() -> Fleet {
    Fleet::new()
        .with(node("a").outdated().at(State::PodDeletionRequired).pod(pod("train")))
        .with(node("b").outdated().at(State::UpgradeRequired))
}

#[test]
fn a_live_gpu_operator_freezes_everything() {
    let mut fleet = busy_fleet();
    fleet.snapshot.gpu_operator.deployments.insert("gpu-operator/gpu-operator".into());
    assert_eq!(
        frozen(&fleet),
        "a GPU Operator is live (gpu-operator/gpu-operator) and its upgrade controller may act on these nodes; pitcrew does nothing until it is gone"
    );
    fleet.snapshot.gpu_operator.deployments.clear();
    assert_eq!(fleet.pool().status, PoolStatus::Active);
}

#[test]
fn a_lease_that_expires_is_waited_for() {
    let mut fleet = busy_fleet();
    fleet.snapshot.gpu_operator.lease = Some(("gpu-operator-0".into(), after(15)));
    assert!(frozen(&fleet).contains("(gpu-operator-0)"));
    assert_eq!(fleet.plan().wake_at, Some(after(15)));
    fleet.wait(15);
    assert_eq!(fleet.pool().status, PoolStatus::Active);
    fleet.play();
    assert_eq!(fleet.verdict("b").state, State::UpgradeDone);
}

#[test]
fn a_bad_value_in_a_cluster_policy_freezes_the_pool_with_a_sentence() {
    let sentence = |options: Value| frozen(&busy_fleet().policy(options));
    assert_eq!(
        sentence(json!({"maxUnavailable": "5"})),
        "clusterpolicy/cluster-policy: maxUnavailable \"5\" is neither a number nor a percentage (maxUnavailable). The pool is frozen until it is mended; nothing was changed."
    );
    for (options, words) in [
        (json!({"maxUnavailable": "abc"}), "maxUnavailable \"abc\" is neither"),
        (json!({"maxUnavailable": -1}), "maxUnavailable \"-1\" is neither"),
        (json!({"maxParallelUpgrades": -2}), "maxParallelUpgrades -2 is not 0 or more"),
        (json!({"maxParallelUpgrades": "two"}), "invalid type: string \"two\""),
        (
            json!({"drain": {"enable": true, "timeoutSeconds": -1}}),
            "-1 seconds is not 0 or more (drain.timeoutSeconds)",
        ),
        (json!({"waitForCompletion": {"podSelector": "a b"}}), "\"a b\" is not a label selector term"),
    ] {
        let sentence = sentence(options);
        assert!(sentence.contains(words), "{sentence}");
    }
}

#[test]
fn a_mended_value_is_taken_up() {
    let mut fleet = busy_fleet().policy(json!({"maxUnavailable": "5"}));
    frozen(&fleet);
    fleet.set_policy(json!({"maxUnavailable": 5}));
    fleet.play();
    assert_eq!(fleet.verdict("b").state, State::UpgradeDone);
}

#[test]
fn a_complaint_is_told_to_the_object_that_causes_it() {
    let fleet = busy_fleet().policy(json!({"maxUnavailable": "abc"}));
    let [Action::Complain { source, message }] = &fleet.plan().actions[..] else { panic!() };
    assert_eq!(source.to_string(), "clusterpolicy/cluster-policy");
    assert!(message.contains("abc"));

    let spec = json!({"driver": {"name": "gpu"}, "limits": {"driverReady": "soon", "validation": "10m"}});
    let fleet = Fleet::without_policy().driver_policy("gpu", spec).with(node("n"));
    assert_eq!(
        fleet.decisions(),
        [
            "policy gpu ready=false: driverpolicy/gpu: \"soon\" is not a duration such as 30m or 2h (spec.limits.driverReady). The pool is frozen until it is mended; nothing was changed."
        ]
    );
}

#[test]
fn a_rolling_daemon_set_is_not_managed() {
    let mut fleet = busy_fleet();
    fleet.daemon_set_mut().on_delete = false;
    assert_eq!(
        frozen(&fleet),
        "daemonset/gpu-operator/nvidia-driver-daemonset has updateStrategy RollingUpdate, so Kubernetes replaces driver pods under running work; set it to OnDelete"
    );
}

#[test]
fn a_selector_that_matches_nothing_is_named() {
    let spec = json!({"driver": {"name": "gpu", "daemonSets": {"selector": "app=typo"}}});
    let fleet = Fleet::without_policy().driver_policy("gpu", spec).with(node("n").outdated());
    assert_eq!(
        frozen(&fleet),
        "driverpolicy/gpu: no DaemonSet in namespace gpu-operator matches app=typo; nothing to upgrade"
    );
}

#[test]
fn modes_that_need_a_gpu_operator_say_so() {
    for mode in ["Guest", "TakeOver"] {
        let spec = json!({"driver": {"name": "gpu"}, "mode": mode});
        let fleet = Fleet::without_policy().driver_policy("gpu", spec).with(node("n").outdated());
        assert_eq!(
            frozen(&fleet),
            format!(
                "driverpolicy/gpu: mode {mode} needs a live GPU Operator, and there is none; use Auto or Standalone (spec.mode)"
            )
        );
    }
}

#[test]
fn two_policies_on_one_node_stop_that_node_only() {
    let policy = |labels: Value| json!({"driver": {"name": "gpu"}, "nodeSelector": labels});
    let mut fleet = Fleet::without_policy()
        .driver_policy("all", policy(json!({})))
        .driver_policy("special", policy(json!({"special": "true"})))
        .with(node("both").outdated().label("special", "true"))
        .with(node("one").outdated());
    fleet.play();
    assert_eq!(
        fleet.why("both"),
        "claimed by more than one policy (driverpolicy/all, driverpolicy/special); make their nodeSelectors disjoint"
    );
    assert_eq!(fleet.told("both ->"), [""; 0]);
    assert_eq!(fleet.verdict("one").state, State::UpgradeDone);
    assert!(fleet.told("one ->").len() > 5);
}

#[test]
fn a_lagging_daemon_set_controller_is_waited_for() {
    let mut fleet = Fleet::new().with(node("n").outdated());
    fleet.daemon_set_mut().generation = 3;
    fleet.play();
    assert_eq!(fleet.told("n "), [""; 0]);
    assert_eq!(
        fleet.why("n"),
        "daemonset/gpu-operator/nvidia-driver-daemonset has a new template that its controller has not taken up yet"
    );
    assert_eq!(fleet.pool().target.len(), 0);
    fleet.daemon_set_mut().observed_generation = 3;
    fleet.play();
    assert_eq!(fleet.verdict("n").state, State::UpgradeDone);
}

#[test]
fn nodes_that_no_driver_is_meant_for_are_left_alone() {
    let mut fleet = Fleet::new().with(node("n"));
    fleet.node_mut("n").set_label("gpu", None);
    fleet.remove_pods("n", |pod| pod.name.name.contains("driver"));
    assert_eq!(fleet.pool().nodes.len(), 0);
}

#[test]
fn a_node_is_told_once_that_a_controller_looks_after_it() {
    let mut fleet = Fleet::new().with(node("n"));
    fleet.node_mut("n").annotations.clear();
    assert_eq!(
        fleet.decisions(),
        ["n annotate +nvidia.com/gpu-driver-upgrade-enabled".replace("nvidia.com/", "")]
    );
    fleet.settle();
    assert_eq!(fleet.snapshot.nodes["n"].annotations[&keys("gpu").enabled], "true");
    assert_eq!(fleet.decisions(), [""; 0]);
}
