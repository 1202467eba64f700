//! What people do to labels, cordons and switches while pitcrew is at work.

use jiff::SignedDuration;
use serde_json::json;

use super::fixture::*;
use crate::action::Action;
use crate::contract::{KEEP_CORDONED_LABEL, State, VISIT_ANNOTATION};
use crate::plan::PoolStatus;
use crate::reason::Kind;
use crate::visit::Visit;

fn visit(fleet: &Fleet, name: &str) -> Visit {
    fleet.snapshot.nodes[name].visit.clone().unwrap().unwrap()
}

#[test]
fn a_pause_keeps_everything_and_writes_only_the_pause_note() {
    for state in State::ALL {
        let before = Fleet::new().with(node("n").outdated().at(state).pod(pod("train")));
        let mut fleet = before.clone().policy(json!({"autoUpgrade": false}));
        fleet.settle();
        let (now, then) = (&fleet.snapshot.nodes["n"], &before.snapshot.nodes["n"]);
        assert_eq!(now.labels(), then.labels(), "{state}");
        assert_eq!(now.unschedulable, then.unschedulable, "{state}");
        assert_eq!(fleet.snapshot.pods, before.snapshot.pods, "{state}");
        // A failure outlasts the pause, so that is what people have to know.
        let why = match state {
            State::UpgradeFailed => "driver pod not ready after 1800 s: driver CrashLoopBackOff",
            _ => "paused: autoUpgrade is false",
        };
        assert_eq!((fleet.why("n").as_str(), fleet.verdict("n").state), (why, state));
        assert_eq!(fleet.pool().status, PoolStatus::Paused);
        let on_its_way = state.in_flight() && state != State::CordonRequired;
        let notes = if on_its_way { vec!["n annotate +visit"] } else { vec![] };
        assert_eq!(fleet.told("n "), notes, "{state}");
    }
}

#[test]
fn the_pause_note_does_not_wipe_out_what_a_person_wrote_at_that_moment() {
    let mut fleet = Fleet::new()
        .policy(json!({"autoUpgrade": false}))
        .with(node("n").outdated().at(State::DrainRequired));
    fleet.set_label("n", "upgrade-required");
    fleet.settle();
    assert_eq!(fleet.snapshot.nodes["n"].labels()[&keys("gpu").state], "upgrade-required");
}

#[test]
fn deadlines_do_not_run_while_paused_and_the_walk_goes_on_where_it_was() {
    let mut fleet = Fleet::new().with(node("n").at(State::ValidationRequired));
    fleet.validator_mut("n").ready = false;
    assert_eq!(fleet.reason("n").until(), Some(after(540)), "ten minutes from a minute ago");
    fleet.set_policy(json!({"autoUpgrade": false}));
    fleet.settle();
    fleet.wait(36_000);
    assert_eq!(fleet.decisions(), [""; 0]);
    assert_eq!(fleet.plan().wake_at, None, "nothing happens by itself while paused");

    fleet.set_policy(json!({"autoUpgrade": true}));
    fleet.settle();
    assert_eq!(fleet.verdict("n").state, State::ValidationRequired);
    let left = fleet.reason("n").until().unwrap().duration_since(fleet.snapshot.now);
    assert!((530..=540).contains(&left.as_secs()), "{left:?}");
    fleet.play();
    assert_eq!(fleet.verdict("n").state, State::UpgradeFailed, "the deadline is only put off");
}

#[test]
fn nothing_starts_while_paused() {
    let mut fleet = Fleet::new().policy(json!({"autoUpgrade": false})).nodes(2, NodeSpec::outdated);
    fleet.play();
    assert_eq!(fleet.story, [""; 0]);
    assert_eq!(fleet.pool().ledger.granted.len(), 0);
}

#[test]
fn a_failed_node_is_retried_by_its_label_and_the_crashed_driver_pod_is_replaced() {
    let mut fleet = Fleet::new().with(node("n").outdated().at(State::PodRestartRequired));
    fleet.crashes_on.insert("n".into());
    fleet.play();
    assert_eq!(
        fleet.why("n"),
        "driver pod not ready after 1800 s: pod gpu-operator/gpu-driver-n: driver CrashLoopBackOff after 3 restarts"
    );
    assert!(fleet.snapshot.nodes["n"].unschedulable, "it stays cordoned");
    let crashed = fleet.driver_mut("n").uid.clone();

    fleet.crashes_on.clear();
    fleet.set_label("n", "upgrade-required");
    fleet.step();
    assert_eq!(visit(&fleet, "n").drivers["gpu"].attempts, 1);
    fleet.play();
    assert_eq!(fleet.verdict("n").state, State::UpgradeDone);
    assert_ne!(fleet.driver_mut("n").uid, crashed);
    assert!(!fleet.snapshot.nodes["n"].unschedulable, "our cordon is lifted");
    assert_eq!(fleet.told("n restart").len(), 2);
}

#[test]
fn a_retry_replaces_the_driver_pod_even_if_it_looks_well() {
    let mut fleet = Fleet::new().with(node("n").at(State::UpgradeFailed));
    fleet.set_label("n", "upgrade-required");
    fleet.play();
    assert_eq!(fleet.told("n restart"), ["n restart gpu-operator/gpu-driver-n"]);
    assert_eq!(fleet.verdict("n").state, State::UpgradeDone);
}

#[test]
fn a_second_retry_before_the_restart_still_replaces_the_crashed_pod() {
    let mut fleet = Fleet::new().with(node("n").at(State::UpgradeFailed));
    fleet.set_label("n", "upgrade-required");
    fleet.step();
    fleet.step();
    assert_eq!(fleet.verdict("n").state, State::CordonRequired);
    fleet.set_label("n", "upgrade-required");
    fleet.play();
    assert_eq!(fleet.told("n restart"), ["n restart gpu-operator/gpu-driver-n"]);
    assert_eq!(fleet.verdict("n").state, State::UpgradeDone);
}

#[test]
fn a_retry_needs_a_slot_like_any_start() {
    let mut fleet = Fleet::new()
        .with(node("bad").at(State::UpgradeFailed))
        .with(node("busy").outdated().at(State::PodRestartRequired))
        .policy(json!({"maxUnavailable": "100%"}));
    fleet.set_label("bad", "upgrade-required");
    fleet.driver_mut("busy").deleting = Some(after(30));
    fleet.settle();
    assert_eq!(fleet.verdict("bad").state, State::UpgradeRequired);
    assert_eq!(fleet.why("bad"), "next slot; maxParallelUpgrades is 1");
    assert!(fleet.snapshot.nodes["bad"].unschedulable, "it waits cordoned, as it was");
}

#[test]
fn a_new_version_heals_failed_nodes() {
    let mut fleet =
        Fleet::new().nodes(2, |n| n.at(State::UpgradeFailed)).policy(json!({"maxUnavailable": "100%"}));
    for name in ["gpu-1", "gpu-2"] {
        fleet.driver_mut(name).ready = false;
    }
    fleet.play();
    assert_eq!(fleet.story, [""; 0], "failed is sticky");
    fleet.publish("gpu", 3, "newer");
    fleet.play();
    for name in ["gpu-1", "gpu-2"] {
        assert_eq!(fleet.verdict(name).state, State::UpgradeDone);
        assert_eq!(fleet.driver_mut(name).revision, Some("newer".into()));
    }
}

#[test]
fn a_version_that_came_before_the_failure_is_no_reason_to_try_again() {
    let mut fleet = Fleet::new().with(node("n").outdated().at(State::PodRestartRequired));
    fleet.crashes_on.insert("n".into());
    fleet.publish("gpu", 3, "newer");
    fleet.play();
    assert_eq!(fleet.verdict("n").state, State::UpgradeFailed);
    assert_eq!(fleet.states_of("n"), ["upgrade-failed"], "it failed with the newest version, once");
}

#[test]
fn a_driver_pod_that_a_person_replaced_gets_another_look() {
    let mut fleet = Fleet::new().with(node("n").at(State::UpgradeFailed));
    fleet.driver_mut("n").ready = false;
    fleet.settle();
    assert_eq!(fleet.verdict("n").state, State::UpgradeFailed);
    let pod = fleet.driver_mut("n");
    (pod.uid, pod.ready, pod.started) = ("by-hand".into(), true, Some(after(0)));
    fleet.play();
    assert_eq!(fleet.states_of("n"), ["validation-required", "uncordon-required", "upgrade-done"]);
    assert_eq!(
        fleet.told("delete"),
        ["n delete gpu-operator/validator-n (StaleValidator)"],
        "the old proof does not count"
    );
}

#[test]
fn a_label_that_is_removed_during_a_visit_is_written_again() {
    let mut fleet =
        Fleet::new().with(node("n").outdated().at(State::PodDeletionRequired).pod(pod("train").leaving()));
    fleet.set_label("n", "");
    assert_eq!(fleet.decisions()[0], "n write again +visit");
    fleet.settle();
    assert_eq!(fleet.snapshot.nodes["n"].labels()[&keys("gpu").state], "pod-deletion-required");
    assert_eq!(fleet.states_of("n"), [""; 0]);
}

#[test]
fn a_label_that_is_set_to_something_else_during_a_visit_means_hands_off() {
    for state in ["upgrade-done", "drain-required", "upgrade-failed"] {
        let mut fleet =
            Fleet::new().with(node("n").outdated().at(State::PodDeletionRequired).pod(pod("train")));
        fleet.set_label("n", state);
        fleet.play();
        assert_eq!(fleet.told("n "), [""; 0]);
        assert_eq!(
            fleet.why("n"),
            format!(
                "somebody set the state label to {state} during a visit that is at pod-deletion-required; remove the label to go on, or set it to upgrade-required to start again"
            )
        );
        assert_eq!(fleet.reason("n").kind(), Kind::Blocked);
        fleet.set_label("n", "");
        fleet.play();
        assert_eq!(fleet.verdict("n").state, State::UpgradeDone, "removing the label is enough to go on");
    }
}

#[test]
fn an_unknown_label_value_is_left_alone_and_named() {
    for spec in [node("n").outdated(), node("n").outdated().at(State::PodRestartRequired)] {
        let mut fleet = Fleet::new().with(spec);
        fleet.set_label("n", "upgrade-please");
        fleet.play();
        assert_eq!(fleet.told("n "), [""; 0]);
        assert_eq!(
            fleet.why("n"),
            "label nvidia.com/gpu-driver-upgrade-state has the unknown value \"upgrade-please\"; remove it to have the node looked at again"
        );
    }
}

#[test]
fn an_unreadable_record_is_left_alone_and_named() {
    let mut fleet = Fleet::new().with(node("n").outdated().at(State::PodRestartRequired));
    fleet.set_record("n", r#"{"v":9}"#);
    fleet.play();
    assert_eq!(fleet.told("n "), [""; 0]);
    assert_eq!(
        fleet.why("n"),
        "the visit record on the node cannot be read: it has format 9, this pitcrew reads format 1"
    );
    assert_eq!(fleet.verdict("n").state, State::PodRestartRequired, "the label still tells where it was");
}

#[test]
fn a_node_with_an_unreadable_record_keeps_its_slot() {
    let mut fleet = Fleet::new()
        .policy(json!({"maxUnavailable": "100%"}))
        .with(node("n").outdated().at(State::PodRestartRequired))
        .with(node("other").outdated().at(State::UpgradeRequired));
    fleet.set_record("n", "scribble");
    fleet.settle();
    assert_eq!(fleet.told("-> cordon-required"), [""; 0]);
    assert_eq!(fleet.why("other"), "next slot; maxParallelUpgrades is 1");
}

#[test]
fn a_person_who_uncordons_during_a_visit_is_warned_and_the_node_cordoned_again() {
    for state in State::ALL.into_iter().filter(|s| s.in_flight() && *s != State::CordonRequired) {
        let fleet =
            Fleet::new().with(node("n").outdated().at(state).uncordoned().visit(|v| v.holds.cordon = false));
        let warning = "The node was uncordoned during its driver upgrade; cordoned again";
        assert_eq!(
            fleet.decisions()[0],
            format!("n write again +cordon +visit Warning \"{warning}\""),
            "{state}"
        );
        let mut played = fleet.clone();
        played.step();
        assert!(visit(&played, "n").holds.cordon, "this cordon is ours, so we lift it");
        assert_eq!(visit(&played, "n").drivers["gpu"].state, state);
    }
}

#[test]
fn an_admins_cordon_from_before_survives_the_upgrade() {
    let mut fleet = Fleet::new().with(node("n").outdated().labelled(State::UpgradeDone).cordoned());
    fleet.play();
    assert_eq!(fleet.verdict("n").state, State::UpgradeDone);
    assert!(fleet.snapshot.nodes["n"].unschedulable);
    assert_eq!(fleet.told("-cordon"), [""; 0]);
}

#[test]
fn a_node_that_shall_stay_cordoned_stays_cordoned() {
    let mut fleet = Fleet::new().with(node("n").outdated().label(KEEP_CORDONED_LABEL, "true"));
    fleet.play();
    assert_eq!(fleet.verdict("n").state, State::UpgradeDone);
    assert!(fleet.snapshot.nodes["n"].unschedulable);
    assert!(
        !fleet.snapshot.nodes["n"].annotations.contains_key(VISIT_ANNOTATION),
        "the visit is over all the same"
    );
}

#[test]
fn a_label_in_the_middle_of_the_walk_without_a_record_starts_again_at_the_cordon() {
    for state in State::ALL.into_iter().filter(|s| s.in_flight() && *s != State::CordonRequired) {
        let mut fleet = Fleet::new().with(node("n").outdated().labelled(state));
        fleet.play();
        assert_eq!(fleet.states_of("n")[..2], ["cordon-required", "wait-for-jobs-required"], "{state}");
        assert_eq!(fleet.verdict("n").state, State::UpgradeDone, "{state}");
    }
}

#[test]
fn the_request_annotation_is_used_up_by_the_visit() {
    let mut fleet = Fleet::new().with(node("n").annotation(&keys("gpu").requested, "true"));
    fleet.play();
    assert_eq!(fleet.verdict("n").state, State::UpgradeDone);
    assert!(!fleet.snapshot.nodes["n"].annotations.contains_key(&keys("gpu").requested));
    assert_eq!(fleet.told("-> cordon-required").len(), 1);
}

#[test]
fn a_record_with_absurd_numbers_does_not_stop_the_planner() {
    let mut fleet = Fleet::new().with(node("n").at(State::ValidationRequired).walk(|walk| {
        walk.paused.seconds = i64::MAX;
        walk.paused.since = Some(after(-60));
        walk.attempts = u32::MAX;
    }));
    fleet.validator_mut("n").ready = false;
    fleet.step();
    assert_eq!(fleet.verdict("n").state, State::ValidationRequired);
    fleet.set_label("n", "upgrade-required");
    assert_eq!(fleet.decisions()[0], "n -> upgrade-required +visit");
}

#[test]
fn a_new_leader_tries_for_itself_before_old_deadlines_fire() {
    let mut fleet = Fleet::new().with(node("n").at(State::ValidationRequired));
    fleet.validator_mut("n").ready = false;
    fleet.wait(86_400);
    fleet.snapshot.leading_since = fleet.snapshot.now;
    let plan = fleet.plan();
    assert!(!plan.actions.iter().any(|action| matches!(action, Action::PatchNode(_))));
    let grace_ends = fleet.snapshot.now + SignedDuration::from_secs(10);
    assert_eq!(plan.wake_at, Some(grace_ends), "and it is not woken in vain before");
    fleet.snapshot.now = grace_ends;
    assert!(fleet.decisions()[0].starts_with("n -> upgrade-failed"));
}
