//! What is said about the pool as a whole, and how often.

use serde_json::json;

use super::fixture::*;
use crate::api::RolloutPhase;
use crate::contract::State;
use crate::snapshot::{Object, SetbackKind};

fn phase(fleet: &Fleet, name: &str) -> RolloutPhase {
    fleet.snapshot.rollouts[name].status.as_ref().unwrap().phase
}

#[test]
fn a_rollout_is_made_once_and_told_to_its_end() {
    let mut fleet = Fleet::new().nodes(2, NodeSpec::outdated);
    fleet.play();
    assert_eq!(
        fleet.told("begins"),
        ["rollout cluster-policy-1 begins: {\"nvidia-driver-daemonset\": \"new\"}"]
    );
    let rollout = &fleet.snapshot.rollouts["cluster-policy-1"];
    assert_eq!(rollout.spec.version.as_deref(), Some("565.57.01"));
    let status = rollout.status.as_ref().unwrap();
    assert_eq!((status.phase, status.done, status.total, status.failed), (RolloutPhase::Done, 2, 2, 0));
    assert!(status.started_at < status.finished_at);
    fleet.wait(86_400);
    assert_eq!(fleet.decisions(), [""; 0], "what is done is said once");
}

#[test]
fn visits_name_their_rollout_from_the_beginning() {
    let mut fleet = Fleet::new().with(node("n").outdated().pod(pod("train").leaving()));
    fleet.settle();
    let visit = fleet.snapshot.nodes["n"].visit.clone().unwrap().unwrap();
    assert_eq!(visit.rollout.as_deref(), Some("cluster-policy-1"));
    assert!(fleet.snapshot.rollouts.contains_key("cluster-policy-1"));
}

#[test]
fn without_anything_to_do_there_is_no_rollout() {
    let mut fleet = Fleet::new().nodes(3, |n| n);
    fleet.play();
    assert!(fleet.snapshot.rollouts.is_empty());
}

#[test]
fn a_newer_target_takes_its_place() {
    let mut fleet = Fleet::new().nodes(2, |n| n.outdated().pod(pod("train").leaving()));
    fleet.settle();
    assert_eq!(phase(&fleet, "cluster-policy-1"), RolloutPhase::Running);
    fleet.publish("gpu", 3, "newer");
    for name in ["gpu-1", "gpu-2"] {
        fleet.remove_pods(name, |pod| pod.deleting.is_some());
    }
    fleet.play();
    assert_eq!(phase(&fleet, "cluster-policy-1"), RolloutPhase::Superseded);
    assert_eq!(phase(&fleet, "cluster-policy-2"), RolloutPhase::Done);
    assert_eq!(fleet.told("begins").len(), 2);
    assert_eq!(fleet.told("Superseded").len(), 1);
}

#[test]
fn a_frozen_pool_says_so_in_its_rollout_and_goes_on_when_it_thaws() {
    let mut fleet = Fleet::new().nodes(2, |n| n.outdated().pod(pod("train").leaving()));
    fleet.settle();
    fleet.snapshot.gpu_operator.deployments.insert("deployment/gpu-operator".to_owned());
    fleet.settle();
    assert_eq!(phase(&fleet, "cluster-policy-1"), RolloutPhase::Frozen);
    assert_eq!(fleet.told("Frozen").len(), 1, "it is said once");
    fleet.snapshot.gpu_operator.deployments.clear();
    fleet.settle();
    assert_eq!(phase(&fleet, "cluster-policy-1"), RolloutPhase::Running);
}

#[test]
fn a_target_that_is_taken_back_ends_its_rollout() {
    let mut fleet = Fleet::new().nodes(3, |n| n.outdated().skipped());
    fleet.settle();
    assert_eq!(phase(&fleet, "cluster-policy-1"), RolloutPhase::Running);
    fleet.publish("gpu", 3, OLD);
    fleet.play();
    assert_eq!(fleet.pool().nodes.values().filter(|v| v.state == State::UpgradeDone).count(), 3);
    assert_eq!(phase(&fleet, "cluster-policy-1"), RolloutPhase::Superseded);
    assert_eq!(fleet.snapshot.rollouts.len(), 1, "nobody has to move, so nothing new begins");
}

#[test]
fn progress_is_told_at_its_pace_and_the_end_at_once() {
    let mut fleet = Fleet::new().nodes(4, |n| n.outdated().at(State::UpgradeRequired));
    let mut told = vec![];
    for _ in 0..80 {
        let before = fleet.told("rollout").len();
        fleet.step();
        if fleet.told("rollout").len() > before {
            told.push(fleet.snapshot.now);
        }
        if fleet.plan().actions.is_empty() && fleet.plan().wake_at.is_none() {
            break;
        }
    }
    let lines = fleet.told("rollout cluster-policy-1");
    assert!(lines.last().unwrap().contains("Done: 4/4"), "{lines:#?}");
    let on_the_way = &told[1..told.len() - 1];
    assert!(on_the_way.windows(2).all(|w| w[1].duration_since(w[0]).as_secs() >= 10), "{told:?}");
    assert!(lines.len() >= 4, "{lines:#?}");
}

#[test]
fn what_is_held_back_is_told_later() {
    let mut fleet = Fleet::new().nodes(2, |n| n.outdated().pod(pod("train").leaving()));
    fleet.settle();
    fleet.snapshot.rollouts.get_mut("cluster-policy-1").unwrap().said_at = Some(fleet.snapshot.now);
    fleet.node_mut("gpu-2").ready = false;
    let due = fleet.snapshot.now + jiff::SignedDuration::from_secs(10);
    assert_eq!(fleet.decisions(), [""; 0]);
    assert_eq!(fleet.plan().wake_at, Some(due));
    fleet.snapshot.now = due;
    assert_eq!(fleet.decisions().len(), 1);
}

#[test]
fn a_rollout_with_a_failed_node_ends_as_failed_and_names_it() {
    let mut fleet = Fleet::new().policy(json!({"maxUnavailable": "100%"})).nodes(2, NodeSpec::outdated);
    fleet.crashes_on.insert("gpu-1".into());
    fleet.play();
    let status = fleet.snapshot.rollouts["cluster-policy-1"].status.clone().unwrap();
    assert_eq!(
        (status.phase, status.done, status.failed, status.unavailable),
        (RolloutPhase::Failed, 1, 1, 1)
    );
    assert_eq!(status.failures.len(), 1);
    assert_eq!(status.failures[0].node, "gpu-1");
    assert!(status.failures[0].cause.contains("CrashLoopBackOff"));
}

#[test]
fn the_list_of_failures_is_short_and_the_newest() {
    let mut fleet = Fleet::new().nodes(3, NodeSpec::outdated);
    fleet = (0..30).fold(fleet, |fleet, i| {
        fleet.with(node(&format!("bad-{i:02}")).at(State::UpgradeFailed).walk(|w| w.since = after(-i)))
    });
    fleet.settle();
    let failures = fleet.snapshot.rollouts["cluster-policy-1"].status.clone().unwrap().failures;
    assert_eq!(failures.len(), 20);
    assert_eq!((failures[0].node.as_str(), failures[19].node.as_str()), ("bad-00", "bad-19"));
}

#[test]
fn a_pause_shows_in_the_rollout() {
    let mut fleet = Fleet::new().nodes(2, |n| n.outdated().pod(pod("train").leaving()));
    fleet.settle();
    fleet.set_policy(json!({"autoUpgrade": false}));
    fleet.play();
    assert_eq!(phase(&fleet, "cluster-policy-1"), RolloutPhase::Paused);
}

#[test]
fn a_rollout_that_cannot_be_written_waits_for_its_turn() {
    let mut fleet = Fleet::new().with(node("n").outdated().at(State::UpgradeRequired).skipped());
    let object = Object::Rollout("cluster-policy-1".into());
    fleet.setback(object, SetbackKind::Error("quota".into()), after(7));
    assert_eq!(fleet.decisions(), [""; 0]);
    assert_eq!(fleet.plan().wake_at, Some(after(7)));
}

#[test]
fn a_driver_policy_gets_its_answer_once() {
    let mut fleet =
        Fleet::without_policy().driver_policy("gpu", json!({"driver": {"name": "gpu"}})).with(node("n"));
    fleet.play();
    assert_eq!(fleet.told("policy"), ["policy gpu ready=true: in force"]);
    let status = &fleet.snapshot.sources.driver_policy_status["gpu"].1;
    assert_eq!(status.observed_generation, 1);
    assert_eq!(status.effective["maxUnavailable"].value, "25%");
}

/// The news of a revision came before that of its DaemonSet, whose old version went into the rollout, and whose old
/// digest made it look as if nothing new were installed.
#[test]
fn a_revision_that_comes_before_its_template_is_waited_for() {
    let mut fleet = Fleet::new().nodes(2, |n| n);
    fleet.play();
    fleet.publish("gpu", 3, "newer");
    let newest = fleet.snapshot.revisions.values_mut().max_by_key(|revision| revision.number).unwrap();
    newest.driver_version = Some("570.86.15".parse().unwrap());
    fleet.settle();
    assert!(fleet.snapshot.rollouts.is_empty());
    assert!(
        matches!(fleet.reason("gpu-1"), crate::reason::Reason::RevisionPending { .. }),
        "{}",
        fleet.why("gpu-1")
    );
    fleet.daemon_set_mut().driver_version = Some("570.86.15".parse().unwrap());
    fleet.play();
    let rollout = &fleet.snapshot.rollouts["cluster-policy-1"];
    assert_eq!(rollout.spec.version.as_deref(), Some("570.86.15"));
    assert_eq!(phase(&fleet, "cluster-policy-1"), RolloutPhase::Done);
}
