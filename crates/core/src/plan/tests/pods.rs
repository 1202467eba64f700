//! Who is asked to leave, when, and what happens if they do not.

use serde_json::json;

use super::fixture::*;
use crate::contract::State;
use crate::names::ObjectName;
use crate::reason::{Kind, Reason};
use crate::snapshot::{Object, Pending, SetbackKind};

fn emptying(name: &str) -> NodeSpec {
    node(name).outdated().at(State::PodDeletionRequired)
}

fn evictions(fleet: &Fleet) -> Vec<String> {
    fleet.decisions().into_iter().filter(|line| line.contains(" evict ")).collect()
}

#[test]
fn a_budget_that_allows_one_is_not_spent_by_two_nodes() {
    let mut fleet = Fleet::new()
        .budget("web", 1)
        .with(emptying("gpu-1").pod(pod("web-1").label("app", "web")))
        .with(emptying("gpu-2").pod(pod("web-2").label("app", "web")));
    assert_eq!(evictions(&fleet), ["gpu-1 evict work/web-1"]);
    assert_eq!(
        fleet.why("gpu-2"),
        "pod work/web-2 cannot leave: poddisruptionbudget/work/web wants 2 healthy pods and has 3"
    );
    assert_eq!(fleet.reason("gpu-2").kind(), Kind::Blocked);
    fleet.play();
    assert_eq!(fleet.told("evict"), ["gpu-1 evict work/web-1", "gpu-2 evict work/web-2"]);
}

#[test]
fn a_budget_counts_only_pods_of_its_own_namespace_and_labels() {
    let fleet = Fleet::new().budget("web", 0).with(emptying("n").pod(pod("train").label("app", "train")));
    assert_eq!(evictions(&fleet), ["n evict work/train"]);
}

#[test]
fn a_budget_whose_status_is_behind_its_spec_allows_nothing() {
    let mut fleet = Fleet::new().budget("web", 1).with(emptying("n").pod(pod("web-1").label("app", "web")));
    fleet.snapshot.budgets.get_mut(&ObjectName::new("work", "web")).unwrap().current = false;
    assert_eq!(evictions(&fleet), [""; 0]);
}

#[test]
fn a_pod_that_is_not_ready_may_be_asked_whatever_the_budget_says() {
    let mut fleet = Fleet::new().budget("web", 0).with(emptying("n").pod(pod("web-1").label("app", "web")));
    assert_eq!(evictions(&fleet), [""; 0]);
    fleet.work_mut("n", "web-1").ready = false;
    assert_eq!(evictions(&fleet), ["n evict work/web-1"]);
}

#[test]
fn an_eviction_under_way_has_spent_its_budget_and_is_not_repeated() {
    let mut fleet = Fleet::new()
        .budget("web", 1)
        .with(emptying("gpu-1").pod(pod("web-1").label("app", "web")))
        .with(emptying("gpu-2").pod(pod("web-2").label("app", "web")));
    let pending = Pending { moving_to: None, on_node: Some("gpu-1".into()) };
    fleet.snapshot.in_flight.insert(Object::Pod(ObjectName::new("work", "web-1")), pending);
    assert_eq!(evictions(&fleet), [""; 0]);
}

#[test]
fn an_accepted_eviction_is_trusted_for_a_while_then_asked_again() {
    let mut fleet = Fleet::new().with(emptying("n").pod(pod("train")));
    let uid = fleet.work_mut("n", "train").uid.clone();
    fleet.snapshot.leaving.insert(uid, after(0));
    assert_eq!(evictions(&fleet), [""; 0]);
    assert_eq!(fleet.why("n"), "evicting pod work/train");
    assert_eq!(fleet.plan().wake_at, Some(after(60)));
    fleet.wait(60);
    assert_eq!(evictions(&fleet), ["n evict work/train"]);
}

#[test]
fn a_refused_eviction_waits_for_its_turn_and_others_do_not() {
    let mut fleet = Fleet::new().with(emptying("n").pod(pod("a")).pod(pod("b")));
    fleet.setback(Object::Pod(ObjectName::new("work", "a")), SetbackKind::Refused, after(4));
    assert_eq!(evictions(&fleet), ["n evict work/b"]);
    assert_eq!(fleet.plan().wake_at, Some(after(4)));
    fleet.wait(4);
    assert_eq!(evictions(&fleet), ["n evict work/a", "n evict work/b"]);
}

#[test]
fn a_node_that_cannot_be_emptied_is_not_touched() {
    for (culprit, words) in [
        (
            pod("notebook").bare(),
            "cannot be emptied: pod work/notebook has no controller that would make it again (set force)",
        ),
        (
            pod("scratch").with_empty_dir(),
            "cannot be emptied: pod work/scratch has emptyDir data (set deleteEmptyDir)",
        ),
        (
            pod("agent").of_daemon_set(),
            "cannot be emptied: pod work/agent belongs to a DaemonSet, which would put it back at once",
        ),
    ] {
        let mut fleet =
            Fleet::new().with(node("a").outdated().pod(culprit).pod(pod("train"))).with(node("b").outdated());
        fleet.play();
        assert_eq!(fleet.why("a"), words);
        assert_eq!(fleet.states_of("a"), ["upgrade-required"]);
        assert!(!fleet.snapshot.nodes["a"].unschedulable);
        assert_eq!(fleet.verdict("b").state, State::UpgradeDone, "others go on");
        assert_eq!(fleet.told("evict"), [""; 0]);
    }
}

#[test]
fn with_a_drain_that_may_force_it_the_node_is_drained() {
    let drain = json!({"drain": {"enable": true, "force": true, "deleteEmptyDir": true}});
    let mut fleet = Fleet::new()
        .policy(drain)
        .with(node("n").outdated().pod(pod("notebook").bare().with_empty_dir()).pod(pod("web").gpus(0)));
    fleet.play();
    assert_eq!(fleet.verdict("n").state, State::UpgradeDone);
    assert!(fleet.states_of("n").contains(&"drain-required".to_owned()));
    assert_eq!(fleet.told("evict"), ["n evict work/notebook", "n evict work/web"]);
}

#[test]
fn a_drain_that_could_not_empty_the_node_either_is_not_begun() {
    for (culprit, words) in [
        (
            pod("notebook").bare(),
            "cannot be emptied: pod work/notebook has no controller that would make it again (set force)",
        ),
        (
            pod("agent").of_daemon_set(),
            "cannot be emptied: pod work/agent uses the device and is left out of the drain",
        ),
        (
            pod("pinned").bare().label(&keys("gpu").drain_skip, "true"),
            "cannot be emptied: pod work/pinned uses the device and is left out of the drain",
        ),
    ] {
        let mut fleet =
            Fleet::new().policy(json!({"drain": {"enable": true}})).with(node("n").outdated().pod(culprit));
        fleet.play();
        assert_eq!(fleet.why("n"), words);
        assert_eq!(fleet.states_of("n"), ["upgrade-required"]);
    }
}

#[test]
fn a_drain_that_leaves_a_device_user_behind_fails_instead_of_going_round_in_circles() {
    let pinned = pod("pinned").bare().label(&keys("gpu").drain_skip, "true");
    let mut fleet = Fleet::new().policy(json!({"drain": {"enable": true}})).with(emptying("n").pod(pinned));
    fleet.play();
    assert_eq!(fleet.states_of("n"), ["drain-required", "upgrade-failed"]);
    assert_eq!(
        fleet.why("n"),
        "pods cannot be evicted: pod work/pinned uses the device and is left out of the drain"
    );
}

#[test]
fn pods_that_did_not_leave_in_time_fail_the_node() {
    let mut fleet = Fleet::new().budget("web", 0).with(emptying("n").pod(pod("web-1").label("app", "web")));
    assert_eq!(fleet.plan().wake_at, Some(after(240)), "five minutes from a minute ago");
    fleet.play();
    assert_eq!(fleet.verdict("n").state, State::UpgradeFailed);
    assert_eq!(fleet.why("n"), "pods did not leave within 300 s: pod work/web-1");
    assert_eq!(fleet.told("Warning").len(), 1);
    assert_eq!(fleet.told("evict"), [""; 0]);
}

#[test]
fn who_asks_for_it_has_them_deleted_past_their_budget_at_the_timeout_and_not_before() {
    let insistent = json!({"gpuPodDeletion": {"timeoutAction": "Delete"}});
    let mut fleet = Fleet::new()
        .policy(insistent)
        .budget("web", 0)
        .with(emptying("n").pod(pod("web-1").label("app", "web")));
    assert_eq!(fleet.decisions().iter().filter(|line| line.contains("web-1")).count(), 0);
    fleet.play();
    assert_eq!(fleet.told("web-1"), ["n delete work/web-1 (TimedOut)"]);
    assert_eq!(fleet.verdict("n").state, State::UpgradeDone);
}

#[test]
fn a_deletion_that_is_refused_after_the_deadline_is_tried_again() {
    let insistent = json!({"gpuPodDeletion": {"timeoutAction": "Delete"}});
    let mut fleet = Fleet::new()
        .policy(insistent)
        .budget("web", 0)
        .with(emptying("n").pod(pod("web-1").label("app", "web")));
    fleet.wait(301);
    assert!(fleet.decisions().contains(&"n delete work/web-1 (TimedOut)".to_owned()));
    let again = fleet.snapshot.now + jiff::SignedDuration::from_secs(4);
    fleet.setback(Object::Pod(ObjectName::new("work", "web-1")), SetbackKind::Refused, again);
    assert_eq!(fleet.plan().wake_at, Some(again));
}

#[test]
fn without_a_timeout_pods_are_waited_for_as_long_as_it_takes() {
    let patient = json!({"gpuPodDeletion": {"timeoutSeconds": 0}});
    let mut fleet = Fleet::new()
        .policy(patient)
        .budget("web", 0)
        .with(emptying("n").pod(pod("web-1").label("app", "web")));
    fleet.wait(30 * 86_400);
    assert_eq!(fleet.plan().wake_at, None);
    assert!(matches!(fleet.reason("n"), Reason::BudgetBlocks { until: None, .. }));
}

#[test]
fn the_longest_timeout_that_fits_the_field_is_no_problem() {
    let options = json!({"gpuPodDeletion": {"timeoutSeconds": i64::MAX}});
    let mut fleet = Fleet::new()
        .policy(options)
        .budget("web", 0)
        .with(emptying("n").pod(pod("web-1").label("app", "web")).walk(|walk| walk.paused.seconds = 5));
    fleet.settle();
    assert_eq!(fleet.verdict("n").state, State::PodDeletionRequired);
    assert_eq!(fleet.reason("n").until(), Some(jiff::Timestamp::MAX));
}

#[test]
fn a_job_that_ends_lets_the_node_go_on() {
    let wait = json!({"waitForCompletion": {"podSelector": "job=train"}});
    let mut fleet =
        Fleet::new().policy(wait).with(node("n").outdated().pod(pod("epoch").label("job", "train")));
    fleet.play();
    assert_eq!(fleet.verdict("n").state, State::WaitForJobsRequired);
    assert_eq!(fleet.why("n"), "waits for pod work/epoch to complete");
    assert!(fleet.snapshot.nodes["n"].unschedulable, "nothing new lands there meanwhile");
    fleet.work_mut("n", "epoch").phase = crate::snapshot::Phase::Succeeded;
    fleet.play();
    assert_eq!(fleet.verdict("n").state, State::UpgradeDone);
    assert_eq!(fleet.told("evict"), [""; 0]);
}
