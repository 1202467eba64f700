//! Stages: who goes first, what opens the next one, and what a bake sees.

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::fixture::*;
use crate::api::{RolloutPhase, StagePhase, StagePromotion, StageStatus, stamp};
use crate::contract::{LAST_VISIT_ANNOTATION, State};
use crate::reason::Reason;
use crate::snapshot::{Condition, Phase};

const HOUR: i64 = 3600;

/// Four outdated nodes, of which `gpu-3` carries the documented label.
fn labelled() -> Fleet {
    let outdated = |n: NodeSpec| n.outdated();
    Fleet::new()
        .nodes(2, outdated)
        .with(node("gpu-3").outdated().label("gpu-canary", "true"))
        .with(node("gpu-4").outdated())
}

/// The same, where nobody but a person takes a version back.
fn labelled_and_watched() -> Fleet {
    let spec = json!({
        "driver": {"name": "gpu", "validator": {"selector": "app=nvidia-operator-validator"}},
        "rollout": {"onFailure": "Pause"},
    });
    let outdated = |n: NodeSpec| n.outdated();
    let fleet = Fleet::without_policy().driver_policy("gpu", spec).nodes(2, outdated);
    fleet.with(node("gpu-3").outdated().label("gpu-canary", "true")).with(node("gpu-4").outdated())
}

/// Six outdated nodes under a DriverPolicy with these stages; nobody limits them otherwise.
fn staged(stages: &Value) -> Fleet {
    rolled_out(&json!({ "stages": stages }))
}

/// The same, where nobody but a person takes a version back.
fn staged_and_watched(stages: &Value) -> Fleet {
    rolled_out(&json!({ "stages": stages, "onFailure": "Pause" }))
}

fn rolled_out(rollout: &Value) -> Fleet {
    let spec = json!({
        "driver": {"name": "gpu"},
        "upgradePolicy": {"maxParallelUpgrades": 0, "maxUnavailable": "100%"},
        "rollout": rollout,
    });
    Fleet::without_policy().driver_policy("gpu", spec).nodes(6, NodeSpec::outdated)
}

fn stages(fleet: &Fleet) -> Vec<StageStatus> {
    let (_, rollout) = fleet.snapshot.rollouts.last_key_value().unwrap();
    rollout.status.as_ref().unwrap().stages.clone()
}

fn phases(fleet: &Fleet) -> Vec<(String, StagePhase)> {
    stages(fleet).into_iter().map(|stage| (stage.name, stage.phase)).collect()
}

fn phase(fleet: &Fleet) -> RolloutPhase {
    let (_, rollout) = fleet.snapshot.rollouts.last_key_value().unwrap();
    rollout.status.as_ref().unwrap().phase
}

fn done(fleet: &Fleet) -> Vec<String> {
    let nodes = fleet.pool().nodes;
    let done = nodes.into_iter().filter(|(_, v)| v.state == State::UpgradeDone);
    done.map(|(name, _)| name.to_string()).collect()
}

fn promote(fleet: &mut Fleet, stage: &str, skip_bake: bool) {
    let at = stamp(fleet.snapshot.now);
    let (_, rollout) = fleet.snapshot.rollouts.iter_mut().next_back().unwrap();
    rollout.spec.promotions.push(StagePromotion { stage: stage.into(), by: "mei".into(), at, skip_bake });
}

#[test]
fn the_documented_label_makes_a_canary_that_bakes_for_two_days() {
    let mut fleet = labelled();
    fleet.live(HOUR);
    assert_eq!(done(&fleet), ["gpu-3"]);
    assert_eq!(phase(&fleet), RolloutPhase::Baking);
    insta::assert_snapshot!(fleet.why("gpu-1"), @"stage fleet is not open yet: stage canary is watched at work");
    fleet.live(46 * HOUR);
    assert_eq!(done(&fleet), ["gpu-3"]);
    fleet.live(3 * HOUR);
    assert_eq!(done(&fleet).len(), 4);
    assert_eq!(phase(&fleet), RolloutPhase::Done);
    let all_passed = stages(&fleet).iter().all(|stage| stage.phase == StagePhase::Passed);
    assert!(all_passed, "{:?}", phases(&fleet));
}

#[test]
fn without_label_and_stages_the_pool_goes_as_one() {
    let mut fleet = Fleet::new().nodes(3, NodeSpec::outdated);
    fleet.play();
    assert_eq!(done(&fleet).len(), 3);
    assert_eq!(stages(&fleet), []);
}

#[test]
fn a_canary_that_loses_its_label_does_not_open_the_fleet() {
    let mut fleet = labelled();
    fleet.step();
    fleet.step();
    fleet.live(60);
    fleet.node_mut("gpu-3").set_label("gpu-canary", None);
    fleet.live(100 * HOUR);
    assert_eq!(done(&fleet), ["gpu-3"]);
    let message = stages(&fleet)[0].message.clone().unwrap();
    insta::assert_snapshot!(message, @"no node of the pool belongs to stage canary; label one");
    insta::assert_snapshot!(fleet.why("gpu-1"), @"stage fleet is not open yet: stage canary is watched at work; no node of the pool belongs to stage canary; label one");
}

#[test]
fn nodes_belong_to_the_first_stage_that_takes_them_and_the_rest_goes_last() {
    let mut fleet = staged(&json!([
        {"name": "one", "count": 1, "bake": {"duration": "1h"}},
        {"name": "some", "count": "50%", "bake": {"duration": "1h"}},
    ]));
    fleet.live(60);
    assert_eq!(done(&fleet), ["gpu-1"]);
    fleet.live(HOUR + 120);
    assert_eq!(done(&fleet), ["gpu-1", "gpu-2", "gpu-3", "gpu-4"]);
    fleet.live(HOUR + 120);
    assert_eq!(done(&fleet).len(), 6);
    assert_eq!(phase(&fleet), RolloutPhase::Done);
}

#[test]
fn a_stage_without_a_node_opens_nothing() {
    let mut fleet = staged(&json!([{"name": "canary", "nodeSelector": {"rack": "none"}}]));
    fleet.live(100 * HOUR);
    assert_eq!(done(&fleet), [""; 0]);
    let message = stages(&fleet)[0].message.clone().unwrap();
    insta::assert_snapshot!(message, @"no node of the pool belongs to stage canary; label one");
}

#[test]
fn a_failed_canary_stops_everything_and_nobody_else_is_touched() {
    let mut fleet = labelled_and_watched();
    fleet.crashes_on.insert("gpu-3".to_owned());
    fleet.live(HOUR);
    assert_eq!(phase(&fleet), RolloutPhase::Halted);
    insta::assert_snapshot!(
        fleet.why("gpu-1"),
        @"stage canary has failed, so nothing new starts: 1 of its 1 nodes failed, and at most 0 may"
    );
    fleet.live(100 * HOUR);
    for untouched in ["gpu-1", "gpu-2", "gpu-4"] {
        assert_eq!(fleet.states_of(untouched), ["upgrade-required"], "{untouched}");
    }
}

#[test]
fn a_canary_that_is_mended_goes_on() {
    let mut fleet = labelled_and_watched();
    fleet.crashes_on.insert("gpu-3".to_owned());
    fleet.live(HOUR);
    fleet.crashes_on.clear();
    fleet.set_label("gpu-3", "upgrade-required");
    fleet.live(HOUR);
    assert_eq!(phase(&fleet), RolloutPhase::Baking);
    fleet.live(49 * HOUR);
    assert_eq!(done(&fleet).len(), 4);
}

#[test]
fn nodes_that_are_left_out_do_not_hold_their_stage_up() {
    let mut fleet = labelled().with(node("gpu-5").outdated().label("gpu-canary", "true").skipped());
    fleet.live(50 * HOUR);
    assert_eq!(done(&fleet), ["gpu-1", "gpu-2", "gpu-3", "gpu-4"]);
}

const ALL_SKIPPED: &str =
    "no node of stage canary is done, so nothing is known of this version: all of them are skipped";

#[test]
fn a_labelled_stage_whose_nodes_are_all_skipped_says_so() {
    let mut fleet = labelled();
    fleet.node_mut("gpu-3").set_label(&keys("gpu").skip, Some("true"));
    fleet.live(100 * HOUR);
    assert_eq!((done(&fleet), stages(&fleet)[0].message.as_deref()), (vec![], Some(ALL_SKIPPED)));
}

#[test]
fn a_stage_that_is_meant_for_nobody_holds_nobody_up() {
    let mut fleet = staged(&json!([{"name": "none", "count": 0, "bake": {"duration": "0s"}}]));
    fleet.live(HOUR);
    assert_eq!(done(&fleet).len(), 6, "{}", fleet.screen());
}

#[test]
fn a_failed_node_that_is_skipped_does_not_fail_its_stage_any_more() {
    let spec = json!({
        "driver": {"name": "gpu"},
        "upgradePolicy": {"maxParallelUpgrades": 0, "maxUnavailable": "100%"},
        "rollout": {"stages": [{"name": "canary", "count": 2, "bake": {"duration": "1h"}}], "onFailure": "Pause"},
        "limits": {"failureThreshold": "100%"},
    });
    let mut fleet = Fleet::without_policy().driver_policy("gpu", spec).nodes(6, NodeSpec::outdated);
    fleet.crashes_on.insert("gpu-1".to_owned());
    fleet.live(3 * HOUR);
    assert_eq!((phases(&fleet)[0].1, done(&fleet).len()), (StagePhase::Failed, 1));
    fleet.node_mut("gpu-1").set_label(&keys("gpu").skip, Some("true"));
    fleet.live(3 * HOUR);
    assert_eq!(done(&fleet).len(), 5, "{}", fleet.screen());
    assert!(fleet.node_mut("gpu-1").unschedulable, "it stays out");
}

#[test]
fn a_stage_whose_nodes_are_all_skipped_opens_nothing() {
    let canary = |more: Value| {
        let mut stage = json!({"name": "canary", "count": 1});
        stage.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let mut fleet = staged(&json!([stage]));
        fleet.node_mut("gpu-1").set_label(&keys("gpu").skip, Some("true"));
        fleet
    };
    for more in [json!({"bake": {"duration": "1h"}}), json!({"bake": {"duration": "0s"}})] {
        let mut fleet = canary(more);
        fleet.live(100 * HOUR);
        assert_eq!(done(&fleet), [""; 0]);
        assert_eq!(stages(&fleet)[0].phase, StagePhase::Moving);
        assert_eq!(stages(&fleet)[0].message.as_deref(), Some(ALL_SKIPPED));
        // A person may take it upon themselves, or let the node go.
        let mut taken = fleet.clone();
        promote(&mut taken, "canary", true);
        taken.live(HOUR);
        assert_eq!(done(&taken).len(), 5);
        fleet.node_mut("gpu-1").set_label(&keys("gpu").skip, None);
        fleet.live(2 * HOUR);
        assert_eq!(done(&fleet).len(), 6);
    }
}

#[test]
fn a_stage_whose_nodes_have_all_failed_opens_nothing_however_many_may() {
    let mut fleet =
        staged(&json!([{"name": "canary", "count": 1, "bake": {"duration": "1h"}, "failureThreshold": 1}]));
    fleet.crashes_on.insert("gpu-1".to_owned());
    fleet.live(100 * HOUR);
    assert_eq!(done(&fleet), [""; 0]);
    let message = stages(&fleet)[0].message.clone().unwrap();
    insta::assert_snapshot!(message, @"no node of stage canary is done, so nothing is known of this version: 1 failed; retry one");
    fleet.crashes_on.clear();
    fleet.set_label("gpu-1", "upgrade-required");
    fleet.live(3 * HOUR);
    assert_eq!(done(&fleet).len(), 6);
}

#[test]
fn stages_for_which_no_node_is_left_hold_nobody_up() {
    let mut fleet = staged(&json!([
        {"name": "all", "count": 6, "bake": {"duration": "1h"}},
        {"name": "more", "count": 2, "bake": {"duration": "1h"}},
    ]));
    fleet.live(3 * HOUR);
    assert_eq!(phase(&fleet), RolloutPhase::Done);
}

#[test]
fn a_condition_in_the_bake_spoils_it() {
    let mut fleet = labelled_and_watched();
    fleet.live(HOUR);
    let heartbeat = Some(fleet.snapshot.now);
    let condition = Condition { kind: "GpuDcgmConnectivityFailure".into(), holds: true, heartbeat };
    fleet.node_mut("gpu-3").conditions.push(condition);
    fleet.live(1);
    assert_eq!(stages(&fleet)[0].phase, StagePhase::Spoiled);
    fleet.node_mut("gpu-3").conditions.clear();
    fleet.live(100 * HOUR);
    assert_eq!(done(&fleet), ["gpu-3"], "what was seen was seen");
    insta::assert_snapshot!(
        fleet.why("gpu-1"),
        @"stage canary has failed, so nothing new starts: node gpu-3 has the condition GpuDcgmConnectivityFailure"
    );
}

/// Monitors that write a condition only when it changes say nothing more while it stands.
#[test]
fn a_condition_that_came_before_the_bake_began_spoils_it_too() {
    let two = |n: NodeSpec| n.outdated().label("gpu-canary", "true");
    let mut fleet = labelled_and_watched().with(two(node("gpu-5")));
    while fleet.node_mut("gpu-3").last_visit.is_none() {
        assert!(fleet.step());
    }
    let heartbeat = Some(fleet.snapshot.now - SignedDuration::from_secs(1));
    let condition = Condition { kind: "GpuDcgmConnectivityFailure".into(), holds: true, heartbeat };
    fleet.node_mut("gpu-3").conditions.push(condition);
    fleet.live(HOUR);
    assert_eq!(fleet.verdict("gpu-5").state, State::UpgradeDone, "{}", fleet.screen());
    assert_eq!(stages(&fleet)[0].phase, StagePhase::Spoiled, "{:?}", stages(&fleet)[0]);
}

#[test]
fn a_stage_that_waits_for_a_word_is_still_watched() {
    let canary = json!({"name": "canary", "count": 1, "bake": {"duration": "1h"}, "promotion": "Manual"});
    let mut fleet = staged_and_watched(&json!([canary]));
    fleet.live(3 * HOUR);
    assert_eq!(phases(&fleet)[0].1, StagePhase::AwaitingApproval);
    restarts(&mut fleet, "gpu-1", 1);
    fleet.live(1);
    assert_eq!(phases(&fleet)[0].1, StagePhase::Spoiled);
    promote(&mut fleet, "canary", false);
    fleet.live(HOUR);
    assert_eq!(done(&fleet), ["gpu-1"], "the word came too late");
}

/// What stands in its way was there before the new version was.
#[test]
fn a_canary_whose_pods_do_not_leave_condemns_no_version() {
    let spec = json!({
        "driver": {"name": "gpu"},
        "upgradePolicy": {"gpuPodDeletion": {"timeoutSeconds": 60}},
    });
    let canary = node("gpu-1").outdated().at(State::PodDeletionRequired).label("gpu-canary", "true");
    let canary = canary.pod(pod("web-1").label("app", "web"));
    let fleet = Fleet::without_policy().driver_policy("gpu", spec).budget("web", 0);
    let mut fleet = fleet.with(canary).with(node("gpu-2").outdated());
    fleet.live(HOUR);
    assert_eq!(fleet.verdict("gpu-1").state, State::UpgradeFailed, "{}", fleet.screen());
    assert_eq!((phase(&fleet), phases(&fleet)[0].1), (RolloutPhase::Running, StagePhase::Moving));
    insta::assert_snapshot!(fleet.why("gpu-2"), @"stage fleet is not open yet: stage canary comes first; 1 of its 1 nodes failed before this version could be judged on them; mend and retry them");
    fleet.remove_pods("gpu-1", |pod| &*pod.name.name == "web-1");
    fleet.set_label("gpu-1", "upgrade-required");
    fleet.live(HOUR);
    assert_eq!(phase(&fleet), RolloutPhase::Baking);
}

#[test]
fn a_node_that_joins_does_not_take_the_place_of_one_that_is_watched() {
    let canary = json!([{"name": "canary", "count": 1, "bake": {"duration": "48h"}}]);
    let mut fleet = staged_and_watched(&canary);
    fleet.live(47 * HOUR);
    assert_eq!(done(&fleet), ["gpu-1"]);
    let mut fleet = fleet.with(node("gpu-0"));
    fleet.live(60);
    assert_eq!(stages(&fleet)[0].total, 1);
    restarts(&mut fleet, "gpu-1", 1);
    fleet.live(1);
    assert_eq!(phases(&fleet)[0].1, StagePhase::Spoiled, "gpu-1 is the canary still");
}

/// Without any driver it is visited whatever stage is open.
#[test]
fn a_node_that_is_brought_its_driver_does_not_take_the_place_of_one_that_is_watched() {
    let canary = json!([{"name": "canary", "count": 1, "bake": {"duration": "48h"}}]);
    let mut fleet = staged_and_watched(&canary);
    fleet.live(47 * HOUR);
    let joins = node("gpu-0").annotation(&keys("gpu").safe_load, "true");
    let mut fleet = fleet.with(joins);
    fleet.driver_mut("gpu-0").ready = false;
    fleet.live(60);
    fleet.driver_mut("gpu-0").ready = true;
    fleet.live(60);
    assert!(fleet.node_mut("gpu-0").last_visit.is_some(), "{}", fleet.screen());
    restarts(&mut fleet, "gpu-1", 1);
    fleet.live(1);
    assert_eq!(phases(&fleet)[0].1, StagePhase::Spoiled, "gpu-1 is the canary still");
}

/// Nobody knows what the new driver is like.
#[test]
fn a_canary_whose_old_driver_pod_does_not_go_condemns_no_version() {
    let mut fleet = labelled();
    while fleet.verdict("gpu-3").state != State::PodRestartRequired {
        assert!(fleet.step());
    }
    fleet.node_mut("gpu-3").ready = false;
    fleet.live(HOUR);
    assert_eq!(fleet.verdict("gpu-3").state, State::UpgradeFailed, "{}", fleet.screen());
    assert_eq!((phase(&fleet), phases(&fleet)[0].1), (RolloutPhase::Running, StagePhase::Moving));
}

#[test]
fn a_driver_that_restarts_by_itself_spoils_the_bake_and_a_boot_does_not() {
    let mut fleet = labelled_and_watched();
    fleet.live(HOUR);
    let now = fleet.snapshot.now;
    let restart = |fleet: &mut Fleet| {
        let driver = fleet.driver_mut("gpu-3");
        (driver.restarts, driver.started) = (1, Some(now));
    };
    let mut booted = fleet.clone();
    restart(&mut fleet);
    fleet.live(1);
    assert_eq!(stages(&fleet)[0].phase, StagePhase::Spoiled);
    boots(&mut booted, "gpu-3");
    restart(&mut booted);
    booted.live(1);
    assert_eq!(stages(&booted)[0].phase, StagePhase::Baking);
}

/// The node was in one boot when it was given back, and is in another now.
fn boots(fleet: &mut Fleet, node: &str) {
    let node = fleet.node_mut(node);
    node.boot_id = "another".into();
    let last = node.last_visit.as_mut().unwrap();
    last.pods.values_mut().for_each(|pod| pod.boot = Some("the first".to_owned()));
    node.annotations.insert(LAST_VISIT_ANNOTATION.to_owned(), last.to_text());
}

fn restarts(fleet: &mut Fleet, node: &str, times: u32) {
    let driver = fleet.driver_mut(node);
    (driver.restarts, driver.incarnation) = (driver.restarts + times, driver.incarnation + u64::from(times));
}

#[test]
fn after_a_boot_a_driver_is_watched_again_from_when_it_is_up() {
    let mut fleet = labelled_and_watched();
    fleet.live(HOUR);
    boots(&mut fleet, "gpu-3");
    fleet.live(HOUR);
    assert_eq!(
        fleet.told("gpu-3 annotate +last-visit"),
        [""; 0],
        "what is told of the pod is from before the boot"
    );
    fleet.driver_mut("gpu-3").ready = false;
    restarts(&mut fleet, "gpu-3", 2);
    fleet.live(HOUR);
    assert_eq!(stages(&fleet)[0].phase, StagePhase::Baking);
    assert_eq!(fleet.told("gpu-3 annotate +last-visit"), [""; 0], "it is not up yet");
    fleet.driver_mut("gpu-3").ready = true;
    fleet.live(HOUR);
    assert_eq!(fleet.told("gpu-3 annotate +last-visit").len(), 1);
    assert_eq!(stages(&fleet)[0].phase, StagePhase::Baking);
    restarts(&mut fleet, "gpu-3", 1);
    fleet.live(1);
    assert_eq!(stages(&fleet)[0].phase, StagePhase::Spoiled);
}

#[test]
fn restarts_are_counted_and_not_the_nodes_that_they_happen_on() {
    let canary = json!({"name": "canary", "count": 2, "bake": {"duration": "48h", "maxDriverRestarts": 2}});
    let spec = json!({
        "driver": {"name": "gpu"},
        "upgradePolicy": {"maxParallelUpgrades": 0, "maxUnavailable": "100%"},
        "rollout": {"stages": [canary], "onFailure": "Pause"},
    });
    let mut fleet = Fleet::without_policy().driver_policy("gpu", spec).nodes(4, NodeSpec::outdated);
    fleet.live(HOUR);
    restarts(&mut fleet, "gpu-1", 1);
    restarts(&mut fleet, "gpu-2", 1);
    fleet.live(HOUR);
    assert_eq!(stages(&fleet)[0].phase, StagePhase::Baking);
    restarts(&mut fleet, "gpu-2", 1);
    fleet.live(1);
    let canary = stages(&fleet)[0].clone();
    assert_eq!(canary.phase, StagePhase::Spoiled);
    insta::assert_snapshot!(canary.message.unwrap(), @"drivers restarted by themselves 3 times, on 2 of its nodes (the first is gpu-1), and may 2 times");
}

#[test]
fn a_restart_counts_on_a_node_whose_clock_is_slow() {
    let mut fleet = labelled_and_watched();
    fleet.live(HOUR);
    let slow = fleet.snapshot.now - SignedDuration::from_hours(2);
    let driver = fleet.driver_mut("gpu-3");
    (driver.restarts, driver.started) = (1, Some(slow));
    fleet.live(1);
    assert_eq!(stages(&fleet)[0].phase, StagePhase::Spoiled);
}

/// The driver pod of a node is another one than before, made at this time, and has restarted once.
fn replace_and_restart(fleet: &mut Fleet, node: &str, created: Timestamp) {
    let driver = fleet.driver_mut(node);
    (driver.uid, driver.restarts) = ("another".into(), 1);
    (driver.created, driver.started) = (created, Some(created));
}

#[test]
fn a_restart_counts_of_a_pod_that_came_after_the_visit_although_our_clock_is_fast() {
    let mut fleet = labelled_and_watched();
    fleet.live(HOUR);
    let earlier = fleet.snapshot.now - SignedDuration::from_hours(2);
    replace_and_restart(&mut fleet, "gpu-3", earlier);
    fleet.live(1);
    assert_eq!(stages(&fleet)[0].phase, StagePhase::Spoiled);
}

/// Its canary, `gpu-3`, is watched; another rollout visited it last, and it was booted since then.
fn visited_by_another_and_booted() -> Fleet {
    let mut fleet = labelled_and_watched();
    fleet.live(HOUR);
    boots(&mut fleet, "gpu-3");
    let node = fleet.node_mut("gpu-3");
    let last = node.last_visit.as_mut().unwrap();
    last.rollouts.insert("gpu".into(), "gpu-0".to_owned());
    node.annotations.insert(LAST_VISIT_ANNOTATION.to_owned(), last.to_text());
    fleet
}

#[test]
fn a_boot_since_a_visit_of_another_rollout_hides_no_restart_of_another_pod() {
    let mut fleet = visited_by_another_and_booted();
    let now = fleet.snapshot.now;
    replace_and_restart(&mut fleet, "gpu-3", now);
    fleet.live(1);
    assert_eq!(stages(&fleet)[0].phase, StagePhase::Spoiled);
}

#[test]
fn a_boot_of_a_node_that_another_rollout_visited_last_is_no_restart_of_its_driver() {
    let mut fleet = visited_by_another_and_booted();
    let now = fleet.snapshot.now;
    replace_and_restart(&mut fleet, "gpu-3", now - SignedDuration::from_hours(2));
    fleet.driver_mut("gpu-3").started = Some(now);
    fleet.live(1);
    assert_eq!(stages(&fleet)[0].phase, StagePhase::Baking);
}

#[test]
fn a_node_that_booted_since_a_visit_of_another_rollout_is_watched_all_the_same() {
    let mut fleet = visited_by_another_and_booted();
    let earlier = fleet.snapshot.now - SignedDuration::from_hours(2);
    replace_and_restart(&mut fleet, "gpu-3", earlier);
    fleet.live(HOUR);
    assert_eq!(stages(&fleet)[0].phase, StagePhase::Baking);
    restarts(&mut fleet, "gpu-3", 1);
    fleet.live(1);
    assert_eq!(stages(&fleet)[0].phase, StagePhase::Spoiled);
}

#[test]
fn what_restarts_during_a_visit_inside_of_a_bake_does_not_count() {
    let mut fleet = labelled_and_watched();
    fleet.live(HOUR);
    let key = keys("gpu").requested;
    fleet.node_mut("gpu-3").annotations.insert(key, "true".to_owned());
    while fleet.verdict("gpu-3").state != State::ValidationRequired {
        assert!(fleet.step());
    }
    restarts(&mut fleet, "gpu-3", 1);
    assert_ne!(fleet.plan().pools[0].nodes["gpu-3"].state, State::UpgradeDone);
    fleet.live(HOUR);
    assert_eq!(stages(&fleet)[0].phase, StagePhase::Baking);
}

#[test]
fn time_in_which_nobody_looked_does_not_count() {
    let mut fleet = labelled();
    fleet.live(10 * HOUR);
    fleet.wait(40 * HOUR);
    fleet.live(HOUR);
    assert_eq!(phase(&fleet), RolloutPhase::Baking, "a clock that jumps, a controller that was away");
    fleet.live(37 * HOUR);
    assert_eq!(done(&fleet).len(), 4);
}

#[test]
fn time_in_which_a_node_is_down_does_not_count() {
    let mut fleet = labelled();
    fleet.live(HOUR);
    fleet.node_mut("gpu-3").ready = false;
    fleet.live(60 * HOUR);
    assert_eq!(phase(&fleet), RolloutPhase::Baking);
    let message = stages(&fleet)[0].message.clone().unwrap();
    insta::assert_snapshot!(message, @"node gpu-3 is not Ready; that time does not count");
    fleet.node_mut("gpu-3").ready = true;
    fleet.live(49 * HOUR);
    assert_eq!(done(&fleet).len(), 4);
}

/// What happens between two looks counts too: nobody can say what else happened in that time.
#[test]
fn a_moment_in_which_a_node_is_down_takes_the_time_until_the_next_look() {
    let mut fleet = labelled();
    fleet.live(HOUR + 300);
    let before = stages(&fleet)[0].bake.clone().unwrap();
    fleet.node_mut("gpu-3").ready = false;
    fleet.live(1);
    fleet.node_mut("gpu-3").ready = true;
    fleet.live(HOUR);
    let since = stages(&fleet)[0].bake.clone().unwrap();
    let watched = since.looked_at.0.duration_since(before.looked_at.0).as_secs();
    assert_eq!(watched - (since.seconds - before.seconds), 600, "{before:?} {since:?}");
}

#[test]
fn work_that_starts_again_and_again_is_no_start_of_work() {
    let canary = json!({"name": "canary", "count": 1, "bake": {"duration": "2h", "minJobStarts": 2}});
    let mut fleet = staged(&json!([canary]));
    fleet.live(HOUR);
    fleet.put(&"gpu-1".into(), pod("train").gpus(1));
    for restarts in 0..9 {
        let now = fleet.snapshot.now;
        let train = fleet.work_mut("gpu-1", "train");
        (train.restarts, train.started) = (restarts, Some(now + SignedDuration::from_secs(1)));
        fleet.live(20 * 60);
    }
    assert_eq!(stages(&fleet)[0].bake.as_ref().unwrap().job_starts, 1);
    // One that did what it had to between two looks.
    let now = fleet.snapshot.now;
    fleet.put(&"gpu-1".into(), pod("short").gpus(1).phase(Phase::Succeeded).created(now));
    fleet.live(HOUR);
    assert_eq!(done(&fleet).len(), 6);
}

/// Nobody is asked about a rollout that was called off, so the time counted for a bake that nobody watched.
#[test]
fn the_time_in_which_a_rollout_is_called_off_is_no_bake() {
    let mut fleet = staged(&json!([{"name": "canary", "count": 1, "bake": {"duration": "10h"}}]));
    fleet.live(HOUR);
    assert_eq!(phases(&fleet)[0].1, StagePhase::Baking);
    let call_off = |fleet: &mut Fleet, abort: bool| {
        fleet.snapshot.rollouts.values_mut().for_each(|rollout| rollout.spec.abort = abort);
        fleet.live(20 * HOUR * i64::from(abort));
    };
    call_off(&mut fleet, true);
    let stage = &stages(&fleet)[0];
    assert_eq!(stage.phase, StagePhase::Baking);
    insta::assert_snapshot!(
        stage.message.clone().unwrap(),
        @"the rollout was called off: its nodes are not watched, and that time does not count"
    );
    call_off(&mut fleet, false);
    fleet.live(8 * HOUR);
    assert_eq!(done(&fleet), ["gpu-1"], "{:?}", stages(&fleet)[0]);
    fleet.live(2 * HOUR);
    assert_eq!(done(&fleet).len(), 6);
}

/// A node that failed with the version before is out, and would be in service with one that nobody has proven yet.
#[test]
fn a_new_version_heals_failed_nodes_when_their_stage_is_open() {
    let canary = json!({"name": "canary", "nodeSelector": {"first": "yes"}, "bake": {"duration": "10h"}});
    let failed = |name: &str| {
        let mut node = node(name).at(State::UpgradeFailed);
        node = if name == "first" { node.label("first", "yes") } else { node };
        node
    };
    let mut fleet = staged(&json!([canary])).with(failed("first")).with(failed("other"));
    for name in ["first", "other"] {
        fleet.break_driver(name);
    }
    fleet.publish("gpu", 3, "newer");
    fleet.live(HOUR);
    assert_eq!(fleet.verdict("first").state, State::UpgradeDone, "{}", fleet.screen());
    assert_eq!(fleet.verdict("other").state, State::UpgradeRequired);
    insta::assert_snapshot!(fleet.why("other"), @"stage fleet is not open yet: stage canary is watched at work");
    assert!(fleet.node_mut("other").unschedulable, "it waits as it was");
    // A person may have a reason.
    let mut asked = fleet.clone();
    asked.set_label("other", "upgrade-failed");
    asked.live(1);
    fleet.live(20 * HOUR);
    assert_eq!(fleet.verdict("other").state, State::UpgradeDone, "{}", fleet.screen());
}

#[test]
fn too_little_work_makes_a_bake_longer() {
    let mut fleet = staged(&json!([
        {"name": "canary", "count": 1, "bake": {"duration": "2h", "minDeviceHours": 4, "minJobStarts": 1}},
    ]));
    fleet.live(5 * HOUR);
    assert_eq!(phase(&fleet), RolloutPhase::Baking);
    let message = stages(&fleet)[0].message.clone().unwrap();
    insta::assert_snapshot!(message, @"0 of 4 device hours of work seen");
    fleet.put(&"gpu-1".into(), pod("train").gpus(4));
    fleet.work_mut("gpu-1", "train").started = Some(fleet.snapshot.now + SignedDuration::from_secs(1));
    fleet.live(30 * 60);
    assert_eq!(phase(&fleet), RolloutPhase::Baking);
    fleet.live(HOUR);
    assert_eq!(done(&fleet).len(), 6);
}

#[test]
fn a_person_opens_the_next_stage_where_the_policy_says_so() {
    let mut fleet = staged(&json!([
        {"name": "canary", "count": 1, "bake": {"duration": "0s"}, "promotion": "Manual"},
    ]));
    fleet.live(100 * HOUR);
    assert_eq!((phase(&fleet), done(&fleet).len()), (RolloutPhase::AwaitingApproval, 1));
    promote(&mut fleet, "canary", false);
    fleet.live(HOUR);
    assert_eq!((phase(&fleet), done(&fleet).len()), (RolloutPhase::Done, 6));
}

#[test]
fn a_person_may_cut_a_bake_short() {
    let mut fleet = labelled();
    fleet.live(HOUR);
    promote(&mut fleet, "canary", true);
    fleet.live(HOUR);
    assert_eq!(phase(&fleet), RolloutPhase::Done);
}

#[test]
fn a_stage_that_ramps_up_takes_one_then_two_then_four() {
    let mut fleet = staged(&json!([{"name": "all", "ramp": true}]));
    let most = waves(&mut fleet);
    assert_eq!(done(&fleet).len(), 6);
    assert_eq!(most, [1, 2, 3], "six nodes are one, two, and the three that are left");
}

/// How many nodes were on their way at the same time, as it grew and fell.
fn waves(fleet: &mut Fleet) -> Vec<usize> {
    let mut waves = vec![];
    for _ in 0..200 {
        fleet.step();
        let moving = fleet.pool().nodes.values().filter(|v| v.state.in_flight()).count();
        if waves.last() != Some(&moving) && moving > 0 {
            waves.push(moving);
        }
    }
    waves
}

#[test]
fn a_ramp_splits_a_job_that_runs_on_all_nodes_and_no_atom() {
    let ramps = |topology: &Value| {
        let spec = json!({
            "driver": {"name": "gpu"},
            "upgradePolicy": {
                "maxParallelUpgrades": 0, "maxUnavailable": "100%", "gpuPodDeletion": {"force": true},
            },
            "rollout": {"stages": [{"name": "all", "ramp": true}], "topology": topology},
        });
        let fleet = Fleet::without_policy().driver_policy("gpu", spec);
        (1..=6).fold(fleet, |fleet, i| {
            let work = pod(&format!("train-{i}")).of_job("train");
            fleet.with(node(&format!("gpu-{i}")).outdated().label("rack", ["a", "b"][i % 2]).pod(work))
        })
    };
    assert_eq!(waves(&mut ramps(&json!({}))), [1, 2, 3]);
    assert_eq!(waves(&mut ramps(&json!({"atom": "rack"}))), [3], "one rack after the other");
}

#[test]
fn a_stage_has_limits_of_its_own_within_those_of_the_pool() {
    let mut fleet = staged(&json!([{"name": "all", "maxParallelUpgrades": 2}]));
    fleet.settle();
    fleet.step();
    for _ in 0..100 {
        fleet.step();
        assert!(fleet.pool().nodes.values().filter(|v| v.state.in_flight()).count() <= 2);
    }
    assert_eq!(done(&fleet).len(), 6);
}

#[test]
fn a_paused_pool_opens_nothing() {
    let mut fleet = labelled();
    fleet.live(HOUR);
    fleet.pause(true);
    fleet.live(100 * HOUR);
    assert_eq!(stages(&fleet)[0].phase, StagePhase::Baking);
    fleet.pause(false);
    fleet.live(49 * HOUR);
    assert_eq!(done(&fleet).len(), 4);
}

#[test]
fn a_node_without_any_driver_does_not_wait_for_its_stage() {
    let mut fleet = labelled();
    fleet.live(HOUR);
    let waits = keys("gpu").safe_load;
    fleet = fleet.with(node("gpu-5").labelled(State::Unknown).annotation(&waits, "true"));
    fleet.live(HOUR);
    assert!(!matches!(fleet.reason("gpu-5"), Reason::StageClosed { .. }), "{}", fleet.why("gpu-5"));
    assert_eq!(done(&fleet), ["gpu-3", "gpu-5"]);
}

#[test]
fn a_node_that_comes_up_with_the_new_driver_before_its_stage_is_open_is_taken_out_and_proven() {
    let mut fleet = labelled();
    fleet.live(HOUR);
    assert_eq!(done(&fleet), ["gpu-3"]);
    // Somebody has deleted its driver pod.
    comes_up(&mut fleet, "gpu-1");
    fleet.step();
    let node = fleet.node_mut("gpu-1");
    assert!(node.unschedulable);
    assert_eq!(fleet.verdict("gpu-1").state, State::PodRestartRequired);
    assert_eq!(fleet.told("gpu-1 -> pod-restart-required +cordon").len(), 1);
    fleet.live(60);
    assert_eq!(done(&fleet), ["gpu-1", "gpu-3"]);
    assert!(!fleet.node_mut("gpu-1").unschedulable);
    assert_eq!(fleet.told("-> cordon-required"), ["gpu-3 -> cordon-required"]);
    let (_, rollout) = fleet.snapshot.rollouts.last_key_value().unwrap();
    assert_eq!(rollout.status.as_ref().unwrap().early, ["gpu-1"]);
}

#[test]
fn a_driver_that_came_while_nobody_looked_is_new_too() {
    let mut fleet = labelled();
    fleet.live(60 * HOUR);
    assert_eq!(phase(&fleet), RolloutPhase::Done);
    // A new template comes and a driver pod is lost before anybody leads again.
    fleet.publish("gpu", 3, "newer");
    comes_up(&mut fleet, "gpu-1");
    fleet.driver_mut("gpu-1").revision = Some("newer".into());
    fleet.wait(HOUR);
    fleet.live(60);
    assert_eq!(fleet.told("gpu-1 -> pod-restart-required +cordon").len(), 1);
    fleet.live(HOUR);
    let (_, rollout) = fleet.snapshot.rollouts.last_key_value().unwrap();
    assert_eq!(rollout.status.as_ref().unwrap().early, ["gpu-1"]);
}

#[test]
fn a_driver_that_is_older_than_the_rollout_is_nothing_new() {
    let mut fleet = labelled();
    fleet.driver_mut("gpu-1").revision = Some(NEW.into());
    fleet.live(HOUR);
    assert_eq!(fleet.told("gpu-1 -> pod-restart-required"), [""; 0]);
}

/// Nodes that are unwelcome to work.
fn pending(fleet: &Fleet) -> Vec<&str> {
    let nodes = fleet.snapshot.nodes.iter();
    nodes
        .filter(|(_, node)| node.has_taint("pitcrew.dev/gpu-upgrade-pending"))
        .map(|(n, _)| n.as_str())
        .collect()
}

#[test]
fn nodes_that_are_still_to_go_are_unwelcome_while_others_of_their_stage_move() {
    let mut fleet = Fleet::new().nodes(3, NodeSpec::outdated);
    let rack = json!({"key": "rack", "value": "7", "effect": "NoSchedule"});
    fleet.node_mut("gpu-3").taints.push(rack.clone());
    fleet.step();
    assert_eq!(pending(&fleet), ["gpu-1", "gpu-2", "gpu-3"]);
    assert_eq!(fleet.told("+pending").len(), 3, "in the write that says that they are due");
    fleet.step();
    fleet.step();
    assert_eq!(pending(&fleet), ["gpu-2", "gpu-3"], "the cordon takes it away");
    assert_eq!(fleet.told("gpu-1 -> wait-for-jobs-required +cordon -pending").len(), 1);
    fleet.play();
    assert_eq!(pending(&fleet), [""; 0]);
    assert_eq!(fleet.node_mut("gpu-3").taints, [rack]);
}

#[test]
fn nobody_is_unwelcome_during_a_bake_or_after_an_abort() {
    let mut fleet = labelled();
    fleet.live(HOUR);
    assert_eq!((phase(&fleet), pending(&fleet)), (RolloutPhase::Baking, vec![]));
    let mut fleet = Fleet::new().nodes(3, NodeSpec::outdated);
    fleet.step();
    fleet.step();
    fleet.abort_rollouts();
    fleet.play();
    assert_eq!(pending(&fleet), [""; 0]);
}

#[test]
fn who_becomes_a_canary_during_the_bake_and_cannot_start_is_not_unwelcome() {
    let mut fleet = labelled().with(node("gpu-5").outdated().pod(pod("shell").bare()));
    fleet.live(HOUR);
    assert_eq!(phase(&fleet), RolloutPhase::Baking);
    fleet.node_mut("gpu-5").set_label("gpu-canary", Some("true"));
    fleet.live(HOUR);
    assert!(matches!(fleet.reason("gpu-5"), Reason::CannotBeEmptied { .. }), "{}", fleet.why("gpu-5"));
    assert_eq!((phase(&fleet), pending(&fleet)), (RolloutPhase::Baking, vec![]));
}

#[test]
fn nobody_is_unwelcome_while_a_person_has_to_open_the_next_stage() {
    let mut fleet = staged(&json!([
        {"name": "canary", "count": 1, "bake": {"duration": "0s"}, "promotion": "Manual"},
    ]));
    fleet.live(HOUR);
    // It comes before all others by its name, and takes the canary's place.
    fleet = fleet.with(node("a").outdated().pod(pod("shell").bare()));
    fleet.live(HOUR);
    assert_eq!((phase(&fleet), pending(&fleet)), (RolloutPhase::AwaitingApproval, vec![]));
}

#[test]
fn nodes_are_unwelcome_only_while_a_window_is_open() {
    let spec = json!({
        "driver": {"name": "gpu"},
        "rollout": {"windows": [{"start": "22:00", "duration": "40m"}]},
    });
    let mut fleet = Fleet::without_policy().driver_policy("gpu", spec).nodes(3, NodeSpec::outdated);
    fleet.put(&"gpu-3".into(), pod("shell").bare());
    fleet.live(HOUR);
    assert_eq!(pending(&fleet), [""; 0], "the window opens tonight");
    fleet.snapshot.now = after(10 * HOUR);
    fleet.step();
    fleet.step();
    assert_eq!(pending(&fleet), ["gpu-2", "gpu-3"]);
    fleet.live(20 * 60);
    assert_eq!(done(&fleet), ["gpu-1", "gpu-2"]);
    assert_eq!(pending(&fleet), ["gpu-3"], "nothing starts any more, but what has begun goes on");
    fleet.live(20 * 60);
    assert_eq!(pending(&fleet), [""; 0]);
}

#[test]
fn whoever_does_not_want_it_gets_no_taint() {
    let spec = json!({"driver": {"name": "gpu"}, "rollout": {"preferUpgradedNodes": false}});
    let mut fleet = Fleet::without_policy().driver_policy("gpu", spec).nodes(3, NodeSpec::outdated);
    fleet.play();
    assert_eq!(done(&fleet).len(), 3);
    assert_eq!(fleet.told("pending"), [""; 0]);
}

#[test]
fn stages_that_come_about_after_the_end_take_nobody_out() {
    let mut fleet = Fleet::new().nodes(3, NodeSpec::outdated);
    fleet.play();
    fleet.wait(HOUR);
    // Somebody has replaced a driver pod since, and now labels a canary for the next version.
    comes_up(&mut fleet, "gpu-1");
    fleet.node_mut("gpu-1").last_visit = None;
    fleet.node_mut("gpu-1").annotations.remove(LAST_VISIT_ANNOTATION);
    fleet.node_mut("gpu-3").set_label("gpu-canary", Some("true"));
    fleet.live(HOUR);
    assert_eq!((done(&fleet).len(), phase(&fleet)), (3, RolloutPhase::Done));
    assert_eq!(fleet.told("gpu-1 -> pod-restart-required").len(), 1, "in the first rollout");
}

#[test]
fn early_nodes_are_taken_out_as_far_as_there_is_room_and_only_if_nobody_leaves_them_out() {
    let limits = json!({"maxParallelUpgrades": 0, "maxUnavailable": 1});
    let mut fleet = Fleet::new().policy(limits).nodes(5, NodeSpec::outdated);
    fleet.node_mut("gpu-5").set_label("gpu-canary", Some("true"));
    fleet.node_mut("gpu-4").set_label(&keys("gpu").skip, Some("true"));
    fleet.live(HOUR);
    for node in ["gpu-1", "gpu-2", "gpu-3", "gpu-4"] {
        comes_up(&mut fleet, node);
    }
    let out = |fleet: &Fleet| fleet.snapshot.nodes.values().filter(|node| node.unschedulable).count();
    fleet.step();
    assert_eq!(out(&fleet), 1, "at once");
    assert!(!fleet.node_mut("gpu-2").unschedulable && !fleet.node_mut("gpu-3").unschedulable, "these wait");
    while fleet.step() {
        assert!(out(&fleet) <= 1, "one after the other: {:#?}", fleet.story);
    }
    fleet.live(HOUR);
    assert_eq!(fleet.told("-> pod-restart-required +cordon").len(), 3);
    assert_eq!(fleet.told("gpu-4 -> pod-restart-required"), [""; 0]);
}

#[test]
fn an_early_node_waits_while_others_use_up_what_may_be_out_and_goes_when_they_are_back() {
    let limits = json!({"maxParallelUpgrades": 0, "maxUnavailable": 1});
    let mut fleet = Fleet::new().policy(limits).nodes(4, NodeSpec::outdated);
    fleet.node_mut("gpu-4").set_label("gpu-canary", Some("true"));
    fleet.live(HOUR);
    fleet.node_mut("gpu-3").unschedulable = true;
    comes_up(&mut fleet, "gpu-1");
    fleet.live(HOUR);
    assert!(!fleet.node_mut("gpu-1").unschedulable);
    assert_eq!(fleet.told("gpu-1 -> pod-restart-required"), [""; 0]);
    fleet.node_mut("gpu-3").unschedulable = false;
    fleet.step();
    assert!(fleet.node_mut("gpu-1").unschedulable, "in the first pass");
    // A node that is out anyway costs nothing, and does not wait.
    fleet.live(60);
    (fleet.node_mut("gpu-2").unschedulable, fleet.node_mut("gpu-3").unschedulable) = (true, true);
    comes_up(&mut fleet, "gpu-2");
    fleet.step();
    assert_eq!(fleet.told("gpu-2 -> pod-restart-required").len(), 1);
}
