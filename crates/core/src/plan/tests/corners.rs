//! Who uses the device, what can never leave, what is given back, and what restarts in place.

use serde_json::json;

use super::fixture::*;
use crate::action::Action;
use crate::api::RolloutPhase;
use crate::contract::{RELEASED_ANNOTATION, SCALE_DOWN_HOLDS, State};
use crate::names::{NodeName, ObjectName};
use crate::reason::Kind;
use crate::snapshot::{Claim, Trouble};

/// A pool whose policy is ours, with these limits.
fn limited(limits: &serde_json::Value) -> Fleet {
    let driver = json!({"name": "gpu", "validator": {"selector": "app=nvidia-operator-validator"}});
    let upgrade = json!({"gpuPodDeletion": {"timeoutSeconds": 0}, "maxUnavailable": "100%"});
    Fleet::without_policy()
        .driver_policy("gpu", json!({"driver": driver, "limits": limits, "upgradePolicy": upgrade}))
}

fn emptying(name: &str) -> NodeSpec {
    node(name).outdated().at(State::PodDeletionRequired)
}

fn claimed(driver: &str) -> Claim {
    Claim { drivers: [driver.to_owned()].into() }
}

#[test]
fn a_claim_of_the_devices_driver_makes_a_user() {
    let mut fleet = Fleet::new().with(emptying("n").pod(pod("train").claim("gpus")));
    let name = ObjectName::new("work", "gpus");
    assert_eq!(fleet.why("n"), "evicting pod work/train", "a claim that is not known yet counts");
    fleet.snapshot.claims.insert(name.clone(), claimed("gpu.nvidia.com"));
    assert_eq!(fleet.why("n"), "evicting pod work/train");
    fleet.snapshot.claims.insert(name.clone(), claimed("nic.example.com"));
    assert_eq!(fleet.why("n"), "moves on to pod-restart-required");
    fleet.snapshot.claims.insert(name, Claim::default());
    assert_eq!(
        fleet.why("n"),
        "moves on to pod-restart-required",
        "for administration only, or not allocated"
    );
}

#[test]
fn the_last_look_knows_which_claims_are_harmless() {
    let mut fleet =
        Fleet::new().with(node("n").outdated().at(State::PodRestartRequired).pod(pod("nic").claim("nic")));
    fleet.snapshot.claims.insert(ObjectName::new("work", "nic"), claimed("nic.example.com"));
    let plan = fleet.plan();
    let restart = plan.actions.iter().find_map(|action| match action {
        Action::RestartDriver(restart) => Some(restart),
        _ => None,
    });
    assert_eq!(restart.unwrap().users.harmless, ["uid-nic".into()]);
}

#[test]
fn runtime_class_and_host_path_make_users_where_the_policy_says_so() {
    let work = |fleet: Fleet| {
        fleet
            .with(emptying("class").pod(pod("a").runtime_class("nvidia")))
            .with(emptying("path").pod(pod("b").host_path("/dev/nvidia0")))
            .with(emptying("below").pod(pod("c").host_path("/run/nvidia/driver")))
            .with(emptying("beside").pod(pod("d").host_path("/run/nvidia-fs")))
    };
    let strict = json!({
        "driver": {"name": "gpu", "devices": {"runtimeClasses": ["nvidia"], "hostPaths": ["/dev/nvidia*", "/run/nvidia"]}},
    });
    let fleet = work(Fleet::without_policy().driver_policy("gpu", strict));
    for (name, why) in [
        ("class", "evicting pod work/a"),
        ("path", "evicting pod work/b"),
        ("below", "evicting pod work/c"),
        ("beside", "moves on to pod-restart-required"),
    ] {
        assert_eq!(fleet.why(name), why, "{name}");
    }
    let fleet = work(Fleet::new());
    for name in ["class", "path", "below", "beside"] {
        assert_eq!(fleet.why(name), "moves on to pod-restart-required", "{name}");
    }
}

#[test]
fn a_budget_that_can_never_allow_it_is_named_before_the_cordon() {
    let mut fleet =
        Fleet::new().budget("web", 0).with(node("n").outdated().pod(pod("web-1").label("app", "web")));
    fleet.play();
    assert_eq!(fleet.verdict("n").state, State::UpgradeRequired);
    assert!(!fleet.snapshot.nodes["n"].unschedulable);
    assert_eq!(
        fleet.why("n"),
        "pod work/web-1 could never leave: poddisruptionbudget/work/web wants 3 of its 3 pods healthy; scale the workload or change the budget"
    );
    assert_eq!(fleet.reason("n").kind(), Kind::Blocked);
    // Somebody scales the workload.
    fleet.change_budgets(|budgets| {
        budgets.get_mut(&ObjectName::new("work", "web")).unwrap().expected = 4;
    });
    assert_eq!(fleet.why("n"), "moves on to cordon-required");
}

#[test]
fn two_budgets_on_one_pod_are_named_before_the_cordon() {
    let mut fleet =
        Fleet::new().budget("web", 1).with(node("n").outdated().pod(pod("w").label("app", "web")));
    fleet.change_budgets(|budgets| {
        let twin = budgets[&ObjectName::new("work", "web")].clone();
        budgets.insert(ObjectName::new("work", "zone"), twin);
    });
    fleet.settle();
    assert_eq!(
        fleet.why("n"),
        "cannot be emptied: pod work/w is under two PodDisruptionBudgets (work/web and work/zone), which the Eviction API refuses"
    );
    assert!(!fleet.snapshot.nodes["n"].unschedulable);
}

#[test]
fn who_deletes_at_the_timeout_starts_past_a_budget_that_never_allows() {
    let options = json!({"podDeletion": {"timeoutSeconds": 60}});
    let mut fleet = Fleet::new()
        .policy(options)
        .budget("web", 0)
        .with(node("n").outdated().pod(pod("web-1").label("app", "web")));
    let policy = fleet.snapshot.sources.cluster_policies.values_mut().next().unwrap();
    policy.timeout_action = Some("Delete".to_owned());
    fleet.play();
    assert_eq!(fleet.verdict("n").state, State::UpgradeDone);
    assert_eq!(fleet.told("delete work/web-1").len(), 1);
}

#[test]
fn a_blocked_node_waits_is_released_or_fails_as_the_policy_says() {
    let blocked = |limits| {
        limited(&limits)
            .budget("web", 0)
            .with(emptying("n").pod(pod("web-1").label("app", "web")))
            .with(node("other").outdated().at(State::UpgradeRequired))
    };
    let mut waits = blocked(json!({"onBlocked": "Wait", "blockedAfter": "1h"}));
    waits.play();
    assert_eq!(waits.verdict("n").state, State::PodDeletionRequired);

    let mut fails = blocked(json!({"onBlocked": "Fail", "blockedAfter": "1h"}));
    fails.play();
    assert_eq!(fails.verdict("n").state, State::UpgradeFailed);
    assert!(fails.why("n").starts_with("pods did not leave within 3600 s: pod work/web-1 cannot leave"));

    let mut released = blocked(json!({"onBlocked": "Release", "blockedAfter": "1h"}));
    released.play();
    let node = &released.snapshot.nodes["n"];
    assert_eq!(released.verdict("n").state, State::UpgradeRequired);
    assert!(!node.unschedulable && node.visit.is_none(), "given back as it was");
    assert!(node.annotations.contains_key(RELEASED_ANNOTATION));
    assert_eq!(released.verdict("other").state, State::UpgradeDone, "the others went on");
    assert_eq!(released.told("Given back").len(), 1);
}

#[test]
fn a_node_with_a_broken_driver_is_never_given_back() {
    let mut fleet = limited(&json!({"onBlocked": "Release", "blockedAfter": "1h"}))
        .budget("web", 0)
        .with(emptying("n").walk(|walk| walk.attempts = 1).pod(pod("web-1").label("app", "web")));
    fleet.play();
    assert_eq!(fleet.verdict("n").state, State::PodDeletionRequired);
    assert!(fleet.snapshot.nodes["n"].unschedulable);
}

#[test]
fn a_released_node_is_tried_again_after_the_others_once_its_budget_allows_it() {
    let limits = json!({"onBlocked": "Release", "blockedAfter": "1h"});
    let mut fleet = limited(&limits).budget("web", 1).with(
        node("a")
            .outdated()
            .pod(pod("w").label("app", "web"))
            .annotation(RELEASED_ANNOTATION, "2026-01-01T00:00:00Z"),
    );
    let allow = |fleet: &mut Fleet, allowed| {
        fleet.change_budgets(|budgets| budgets.values_mut().for_each(|budget| budget.allowed = allowed));
    };
    allow(&mut fleet, 0);
    fleet.settle();
    assert_eq!(
        fleet.why("a"),
        "pod work/w cannot leave: poddisruptionbudget/work/web wants 2 healthy pods and has 3"
    );
    allow(&mut fleet, 1);
    let mut fleet = fleet.with(node("b").outdated().at(State::UpgradeRequired));
    assert_eq!(fleet.pool().ledger.granted, [NodeName::from("b")], "those that were never tried go first");
    fleet.play();
    assert_eq!(fleet.verdict("a").state, State::UpgradeDone);
    assert!(!fleet.snapshot.nodes["a"].annotations.contains_key(RELEASED_ANNOTATION));
}

#[test]
fn too_many_failures_stop_new_starts_and_a_retry_still_goes() {
    let mut fleet =
        limited(&json!({"failureThreshold": 1, "driverReady": "5m"})).nodes(6, NodeSpec::outdated);
    fleet.crashes_on = ["gpu-1", "gpu-2", "gpu-3"].map(str::to_owned).into();
    fleet.play();
    let failed = fleet.pool().nodes.values().filter(|v| v.state == State::UpgradeFailed).count();
    assert_eq!(failed, 2, "{}", fleet.screen());
    assert_eq!(
        fleet.why("gpu-6"),
        "2 nodes failed and at most 1 may (limits.failureThreshold); no more are started"
    );
    let status = fleet.snapshot.rollouts["gpu-1"].status.clone().unwrap();
    assert_eq!(status.phase, RolloutPhase::Running);
    assert!(status.message.unwrap().contains("failureThreshold"));
    fleet.crashes_on.clear();
    fleet.set_label("gpu-1", "upgrade-required");
    fleet.play();
    assert!(fleet.pool().nodes.values().filter(|v| v.state == State::UpgradeDone).count() >= 4);
}

#[test]
fn a_change_that_installs_nothing_restarts_the_driver_in_place() {
    let mut fleet = Fleet::new().with(node("n").outdated().pod(pod("train")));
    fleet.daemon_set_mut().digest = Some("same".into());
    fleet.driver_mut("n").digest = Some("same".into());
    fleet.play();
    assert_eq!(
        fleet.states_of("n"),
        [
            "upgrade-required",
            "cordon-required",
            "pod-restart-required",
            "validation-required",
            "uncordon-required",
            "upgrade-done"
        ]
    );
    assert_eq!(fleet.told("evict"), [""; 0], "work on the device goes on");
    assert!(fleet.snapshot.pods["n"].contains_key(&ObjectName::new("work", "train")));
}

#[test]
fn a_digest_that_changes_on_the_way_makes_it_a_full_walk() {
    let mut fleet = Fleet::new().with(node("n").outdated().at(State::PodRestartRequired).pod(pod("train")));
    fleet.daemon_set_mut().digest = Some("new".into());
    fleet.driver_mut("n").digest = Some("old".into());
    fleet.play();
    assert_eq!(fleet.told("evict").len(), 1);
    for (pod, template) in [("", ""), ("a", "b")] {
        let mut fleet = Fleet::new().with(node("n").outdated().pod(super::fixture::pod("train")));
        fleet.daemon_set_mut().digest = Some(template.into());
        fleet.driver_mut("n").digest = Some(pod.into());
        fleet.play();
        assert_eq!(fleet.told("evict").len(), 1, "{pod:?} {template:?}");
    }
}

#[test]
fn a_visit_holds_off_scale_down_and_puts_back_what_was_there() {
    let [(autoscaler, _), (karpenter, _)] = SCALE_DOWN_HOLDS;
    let mut fleet = Fleet::new().with(
        node("n")
            .outdated()
            .annotation(autoscaler, "false")
            .annotation(karpenter, "true")
            .pod(pod("t").leaving()),
    );
    fleet.settle();
    let annotations = &fleet.snapshot.nodes["n"].annotations;
    assert_eq!((annotations[autoscaler].as_str(), annotations[karpenter].as_str()), ("true", "true"));
    fleet.remove_pods("n", |pod| pod.deleting.is_some());
    fleet.play();
    let annotations = &fleet.snapshot.nodes["n"].annotations;
    assert_eq!(annotations[autoscaler], "false", "what was there before comes back");
    assert_eq!(annotations[karpenter], "true", "what was somebody else's stays");
}

#[test]
fn a_hold_that_somebody_changed_during_the_visit_is_theirs() {
    let [(autoscaler, _), (karpenter, _)] = SCALE_DOWN_HOLDS;
    let mut fleet = Fleet::new().with(node("n").outdated().pod(pod("t").leaving()));
    fleet.settle();
    fleet.node_mut("n").annotations.insert(autoscaler.to_owned(), "never".to_owned());
    fleet.remove_pods("n", |pod| pod.deleting.is_some());
    fleet.play();
    let annotations = &fleet.snapshot.nodes["n"].annotations;
    assert_eq!(annotations[autoscaler], "never");
    assert!(!annotations.contains_key(karpenter));
}

#[test]
fn an_abort_gives_back_what_was_not_touched_and_lets_the_rest_finish() {
    let options = json!({"maxParallelUpgrades": 0, "maxUnavailable": "100%"});
    let mut fleet = Fleet::new()
        .policy(options)
        .with(node("early").outdated().pod(pod("train").leaving()))
        .with(node("late").outdated())
        .with(node("waiting").outdated().skipped());
    for _ in 0..6 {
        fleet.step();
    }
    assert_eq!(fleet.verdict("early").state, State::PodDeletionRequired);
    assert!(fleet.verdict("late").state > State::DrainRequired, "{}", fleet.screen());
    fleet.snapshot.rollouts.get_mut("cluster-policy-1").unwrap().spec.abort = true;
    fleet.play();
    assert_eq!(fleet.verdict("early").state, State::UpgradeRequired);
    assert_eq!(fleet.why("early"), "rollout cluster-policy-1 was aborted");
    assert!(!fleet.snapshot.nodes["early"].unschedulable);
    assert!(fleet.snapshot.nodes["early"].visit.is_none());
    assert_eq!(fleet.verdict("late").state, State::UpgradeDone);
    assert_eq!(
        fleet.snapshot.rollouts["cluster-policy-1"].status.as_ref().unwrap().phase,
        RolloutPhase::Aborted
    );
    // Taken back, it goes on where it stood.
    fleet.snapshot.rollouts.get_mut("cluster-policy-1").unwrap().spec.abort = false;
    fleet.remove_pods("early", |pod| pod.deleting.is_some());
    fleet.play();
    assert_eq!(fleet.verdict("early").state, State::UpgradeDone);
}

#[test]
fn a_version_that_is_taken_back_before_the_restart_empties_no_node() {
    let mut fleet = Fleet::new().with(emptying("n").pod(pod("train")));
    fleet.publish("gpu", 3, OLD);
    fleet.play();
    assert_eq!(fleet.told("evict"), [""; 0]);
    assert_eq!(fleet.verdict("n").state, State::UpgradeDone);
    assert!(!fleet.snapshot.nodes["n"].unschedulable);
}

#[test]
fn a_requested_upgrade_replaces_the_driver_pod_even_if_it_is_up_to_date() {
    let mut fleet = Fleet::new().with(node("n").annotation(&keys("gpu").requested, "true").pod(pod("train")));
    let before = fleet.driver_mut("n").uid.clone();
    fleet.play();
    assert_eq!(fleet.verdict("n").state, State::UpgradeDone);
    assert_ne!(fleet.driver_mut("n").uid, before);
    assert_eq!(fleet.told("evict").len(), 1);
}

#[test]
fn a_driver_that_waits_to_be_loaded_is_not_left_out_by_the_skip_label() {
    let mut fleet = Fleet::new().with(node("n").skipped().annotation(&keys("gpu").safe_load, "init-1"));
    fleet.driver_mut("n").ready = false;
    fleet.step();
    fleet.step();
    assert_eq!(fleet.verdict("n").state, State::CordonRequired, "{}", fleet.screen());
}

#[test]
fn a_node_that_leaves_the_pool_in_the_middle_of_its_visit_is_brought_to_the_end() {
    let spec = json!({"driver": {"name": "gpu"}, "nodeSelector": {"pool": "a"}});
    let mut fleet = Fleet::without_policy()
        .driver_policy("gpu", spec)
        .with(node("n").outdated().label("pool", "a").pod(pod("train").leaving()));
    fleet.settle();
    fleet.node_mut("n").set_label("pool", Some("b"));
    assert_eq!(fleet.verdict("n").state, State::PodDeletionRequired);
    fleet.remove_pods("n", |pod| pod.deleting.is_some());
    fleet.play();
    assert!(!fleet.pool().nodes.contains_key("n"), "and then it is gone");
    assert!(!fleet.snapshot.nodes["n"].unschedulable);
}

#[test]
fn a_pod_that_does_not_stop_is_named_with_what_keeps_it() {
    let stuck = |spec: PodSpec, ready: bool| {
        let mut fleet = limited(&json!({})).with(emptying("n").pod(spec));
        fleet.node_mut("n").ready = ready;
        assert_eq!(fleet.why("n"), "evicting pod work/t");
        fleet.wait(61);
        fleet.why("n")
    };
    let text = |why: &str| format!("pod work/t is stuck in Terminating: {why}");
    assert_eq!(stuck(pod("t").leaving(), true), text("its containers do not stop"));
    assert_eq!(stuck(pod("t").leaving(), false), text("the node's kubelet does not answer"));
    assert_eq!(
        stuck(pod("t").leaving().finalizer("example.com/snapshot"), true),
        text("finalizer example.com/snapshot is not removed")
    );
}

#[test]
fn a_driver_pod_that_does_not_come_up_is_told_of_once_at_once() {
    let mut fleet = Fleet::new().with(node("n").at(State::PodRestartRequired));
    let driver = fleet.driver_mut("n");
    driver.ready = false;
    driver.trouble = Some(Trouble {
        container: "nvidia-driver-ctr".into(),
        reason: "ImagePullBackOff".into(),
        message: "Back-off pulling image \"nvcr.io/nvidia/driver:999\"".into(),
        restarts: 0,
    });
    fleet.settle();
    assert_eq!(
        fleet.told("Warning"),
        [
            "n annotate +visit Warning \"Driver pod gpu-operator/gpu-driver-n does not come up: nvidia-driver-ctr ImagePullBackOff: Back-off pulling image \"nvcr.io/nvidia/driver:999\"\""
        ]
    );
    assert_eq!(fleet.verdict("n").state, State::PodRestartRequired);
}

#[test]
fn selected_pods_are_asked_to_save_their_work_before_they_are_evicted() {
    let options = json!({"checkpoint": {"podSelector": "app=train", "timeoutSeconds": 600}});
    let fleet = Fleet::new().policy(options).with(
        node("n")
            .outdated()
            .pod(pod("train-0").label("app", "train"))
            .pod(pod("train-1").label("app", "train"))
            .pod(pod("serve").label("app", "serve")),
    );
    let mut saved = fleet.clone();
    saved.settle();
    assert_eq!(saved.why("n"), "waits for 2 pods: work/train-0 and 1 more to save their work");
    assert_eq!(saved.told("ask").len(), 2, "each is asked once");
    for name in ["train-0", "train-1"] {
        saved.work_mut("n", name).checkpointed = true;
    }
    saved.settle();
    assert_eq!(saved.told("evict").len(), 3);

    let mut silent = fleet;
    silent.settle();
    let asked_at = silent.snapshot.now;
    silent.play();
    assert_eq!(silent.verdict("n").state, State::UpgradeDone, "who does not answer is evicted all the same");
    assert!(silent.snapshot.now.duration_since(asked_at).as_secs() >= 600);
}

#[test]
fn an_answer_to_an_earlier_request_does_not_count() {
    let options = json!({"checkpoint": {"podSelector": "app=train"}});
    let mut fleet =
        Fleet::new().policy(options).with(node("n").outdated().pod(pod("t").label("app", "train")));
    let work = fleet.work_mut("n", "t");
    (work.checkpoint_requested, work.checkpointed) = (Some(after(-86_400)), true);
    fleet.settle();
    assert_eq!(fleet.told("ask").len(), 1);
    assert_eq!(fleet.why("n"), "waits for pod work/t to save its work");
}

#[test]
fn a_nic_cluster_policy_rules_the_ofed_driver_beside_the_gpu_driver() {
    let mut fleet = Fleet::new().daemon_set("ofed", "mofed");
    for ds in fleet.snapshot.daemon_sets.values_mut().filter(|ds| ds.name.name.as_ref() == "mofed") {
        ds.labels.insert("nvidia.com/ofed-driver".to_owned(), String::new());
    }
    let ofed = json!({"upgradePolicy": {"autoUpgrade": true, "safeLoad": true, "drain": {"enable": true}}});
    fleet.snapshot.sources.nic_cluster_policies.insert("nic-cluster-policy".to_owned(), ofed);
    let mut fleet = fleet.with(node("n").outdated().pod(pod("train")));
    fleet.play();
    assert_eq!(fleet.plan().pools.len(), 2);
    let labels = fleet.snapshot.nodes["n"].labels();
    assert_eq!(labels[&keys("ofed").state], "upgrade-done");
    assert_eq!(labels[&keys("gpu").state], "upgrade-done");
    assert_eq!(fleet.told("-> drain-required").len(), 1, "without device patterns draining is the way");
}
