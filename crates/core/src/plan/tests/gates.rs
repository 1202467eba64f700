//! Gates: what is asked when, and what comes of what they say.

use serde_json::{Value, json};

use super::fixture::*;
use crate::api::{GateStatus, GateWhen, RolloutPhase, RolloutStatus, StagePhase};
use crate::check::{Promise, violations};
use crate::contract::State;
use crate::gate::{JobEnd, Obstacle, Outcome, PodState, Sample};
use crate::plan::PoolStatus;
use crate::reason::Reason;
use crate::snapshot::Condition;
use crate::visit::Cause;

/// Two outdated nodes under a DriverPolicy with these gates.
fn gated(gates: &Value) -> Fleet {
    let rollout = json!({"gates": gates});
    Fleet::without_policy().driver_policy("gpu", policy(&rollout)).nodes(2, NodeSpec::outdated)
}

/// The first of four nodes is a stage of its own.
fn staged(gates: &Value, bake: &str) -> Fleet {
    let canary = json!({"name": "canary", "count": 1, "bake": {"duration": bake}});
    let rollout = json!({"gates": gates, "stages": [canary], "onFailure": "Pause"});
    Fleet::without_policy().driver_policy("gpu", policy(&rollout)).nodes(4, NodeSpec::outdated)
}

fn policy(rollout: &Value) -> Value {
    json!({
        "driver": {"name": "gpu"},
        "upgradePolicy": {"maxParallelUpgrades": 0, "maxUnavailable": "100%"},
        "rollout": rollout,
    })
}

fn ecc() -> Value {
    json!([{"name": "ecc-errors", "preset": "ecc-errors"}])
}

fn exits(code: i32, message: &str) -> PodState {
    PodState::Failed { at: None, how: Outcome::Exited { code, message: message.into() } }
}

fn reports(message: &str) -> PodState {
    PodState::Succeeded { message: message.into() }
}

fn cause(fleet: &Fleet, node: &str) -> Cause {
    match fleet.reason(node) {
        Reason::Failed { cause } => cause,
        other => panic!("{node}: {other}"),
    }
}

fn status(fleet: &Fleet) -> RolloutStatus {
    let (_, rollout) = fleet.snapshot.rollouts.last_key_value().unwrap();
    rollout.status.clone().unwrap()
}

fn said(fleet: &Fleet, when: GateWhen) -> Vec<GateStatus> {
    let stages = status(fleet).stages;
    stages.into_iter().flat_map(|stage| stage.gates).filter(|gate| gate.when == when).collect()
}

#[test]
fn a_node_is_measured_before_its_restart_and_proven_after_it() {
    let mut fleet = gated(&ecc());
    fleet.play();
    let story = fleet.told("gpu-1 ");
    let place = |words: &str| story.iter().position(|line| line.contains(words)).unwrap();
    let (before, restart) = (place("gate ecc-errors Before 1"), place("gpu-1 restart"));
    let (after, done) = (place("gate ecc-errors After 1"), place("-> upgrade-done"));
    assert!(before < restart && restart < after && after < done, "{story:#?}");
    let last = fleet.node_mut("gpu-1").last_visit.clone().unwrap();
    let note = last.gates.values().next().unwrap().values().next().unwrap().clone();
    assert_eq!(note.before.unwrap().get("gpus").map(ToString::to_string).as_deref(), Some("8"));
    assert!(note.passed.is_some());
}

#[test]
fn gates_are_asked_one_after_the_other_in_the_order_of_the_policy() {
    let gates = json!([
        {"name": "version", "preset": "driver-version"},
        {"name": "smoke", "preset": "smoke-training"},
    ]);
    let mut fleet = gated(&gates);
    fleet.gates.push(("version", Sample::After, PodState::Open { waits: None }));
    fleet.settle();
    assert_eq!(fleet.told("gpu-1 gate smoke"), [""; 0]);
    insta::assert_snapshot!(fleet.why("gpu-1"), @"gate version: job gpu-operator/gate-version-b213ccbbdbaa70c8-a1 is at work");
    fleet.gates.clear();
    fleet.forget_jobs();
    fleet.play();
    assert_eq!(fleet.told("gpu-1 gate smoke").len(), 1);
    assert_eq!(fleet.verdict("gpu-1").state, State::UpgradeDone);
}

#[test]
fn a_gate_that_says_no_fails_the_node_with_its_words_and_its_log() {
    let mut fleet = gated(&json!([{"name": "smoke", "preset": "smoke-training"}]));
    fleet.gates.push(("smoke", Sample::After, exits(3, "loss is nan")));
    fleet.play();
    assert_eq!(fleet.verdict("gpu-1").state, State::UpgradeFailed);
    let cause = cause(&fleet, "gpu-1");
    insta::assert_snapshot!(cause, @"gate smoke failed after 0s: exit code 3");
    assert_eq!(cause.log(), Some("loss is nan"));
    assert_eq!(fleet.told("Its log ends with: loss is nan").len(), 2);
    let failure = &status(&fleet).failures[0];
    assert_eq!(failure.log.as_deref(), Some("loss is nan"));
    // Whoever tries again gets another driver pod, and another verdict.
    fleet.gates.clear();
    fleet.set_label("gpu-1", "upgrade-required");
    fleet.play();
    assert_eq!(fleet.verdict("gpu-1").state, State::UpgradeDone);
}

#[test]
fn a_pool_without_stages_says_what_its_gates_have_said() {
    let gates = json!([
        {"name": "version", "preset": "driver-version"},
        {"name": "smoke", "preset": "smoke-training", "retries": 0},
    ]);
    let rollout = json!({"gates": gates, "onFailure": "Pause"});
    let mut fleet =
        Fleet::without_policy().driver_policy("gpu", policy(&rollout)).nodes(5, NodeSpec::outdated);
    fleet.crashes_on.insert("gpu-5".to_owned());
    fleet.play();
    let said = status(&fleet);
    assert!(said.stages.is_empty());
    let [version, smoke] = &said.gates[..] else { panic!("{:?}", said.gates) };
    assert_eq!((version.name.as_str(), version.when, version.passed), ("version", GateWhen::Node, 4));
    assert_eq!((smoke.passed, smoke.failed, smoke.last_seconds), (4, 0, Some(0)));
    assert!(smoke.last_at > version.last_at && version.last_at > said.started_at, "{:?}", said.gates);
    let before = (said.gates, fleet.snapshot.now);
    // A pause changes nothing about it, and another version begins anew.
    fleet.pause(true);
    fleet.play();
    assert_eq!(status(&fleet).gates, before.0);
    fleet.pause(false);
    fleet.gates.push(("smoke", Sample::After, exits(3, "loss is nan")));
    fleet.publish("gpu", 3, "newer");
    fleet.crashes_on.clear();
    fleet.play();
    let said = status(&fleet);
    let [version, smoke] = &said.gates[..] else { panic!("{:?}", said.gates) };
    assert_eq!((version.passed, version.failed), (5, 0));
    assert_eq!((smoke.passed, smoke.failed, smoke.last_seconds), (0, 5, None));
    assert!(smoke.last_at.as_ref().is_some_and(|at| at.0 >= before.1));
    assert_eq!(smoke.log.as_deref(), Some("loss is nan"));
    insta::assert_snapshot!(smoke.message.clone().unwrap(), @"gpu-5: failed after 0s: exit code 3");
}

#[test]
fn what_was_before_the_visit_is_compared_with_also_after_a_retry() {
    let mut fleet = gated(&ecc());
    let worse = r#"{"gpus": 8, "withEcc": 8, "corrected": 0, "uncorrected": 1}"#;
    fleet.gates.push(("ecc-errors", Sample::After, reports(worse)));
    fleet.play();
    let sentence = cause(&fleet, "gpu-1").to_string();
    insta::assert_snapshot!(sentence, @"gate ecc-errors failed after 0s: uncorrected was 0 before and is 1; it may grow by 0");
    fleet.set_label("gpu-1", "upgrade-required");
    fleet.play();
    assert_eq!(fleet.told("gpu-1 gate ecc-errors Before").len(), 1);
    assert_eq!(fleet.verdict("gpu-1").state, State::UpgradeFailed);
}

#[test]
fn without_a_sample_a_driver_is_not_taken_away() {
    let mut fleet = gated(&ecc());
    fleet.gates.push(("ecc-errors", Sample::Before, exits(9, "no nvidia-smi")));
    fleet.play();
    assert_eq!(fleet.told("gpu-1 restart"), [""; 0]);
    insta::assert_snapshot!(cause(&fleet, "gpu-1"), @"gate ecc-errors took no sample before the driver's restart: it failed after 0s: exit code 9");
}

#[test]
fn a_driver_that_does_not_work_is_nothing_to_compare_with() {
    let mut fleet = gated(&ecc());
    fleet.driver_mut("gpu-1").ready = false;
    fleet.play();
    assert_eq!(fleet.told("gpu-1 gate ecc-errors Before"), [""; 0]);
    assert_eq!(fleet.verdict("gpu-1").state, State::UpgradeDone);
}

#[test]
fn a_gate_that_cannot_judge_is_asked_three_times_and_never_passes() {
    let mut fleet = gated(&json!([{"name": "smoke", "preset": "smoke-training"}]));
    let gone = Outcome::NotRun(Obstacle::Disrupted { says: "Preempted".into() });
    fleet.gates.push(("smoke", Sample::After, PodState::Failed { at: None, how: gone }));
    fleet.play();
    assert_eq!(fleet.told("gpu-1 gate smoke").len(), 3);
    insta::assert_snapshot!(cause(&fleet, "gpu-1"), @"gate smoke could not judge: its pod was taken away: Preempted");
}

#[test]
fn a_job_that_nobody_ends_does_not_hold_a_node_for_ever() {
    let mut fleet = gated(&json!([{"name": "smoke", "preset": "smoke-training"}]));
    fleet.gates.push(("smoke", Sample::After, PodState::Open { waits: None }));
    fleet.play();
    insta::assert_snapshot!(cause(&fleet, "gpu-1"), @"gate smoke could not judge: its container did not start: its job does not end");
}

#[test]
fn a_driver_that_starts_again_is_proven_again() {
    let mut fleet = gated(&json!([{"name": "smoke", "preset": "smoke-training"}]));
    let at_end = |fleet: &Fleet| fleet.verdict("gpu-1").state == State::UncordonRequired;
    assert!((0..40).any(|_| {
        fleet.step();
        at_end(&fleet)
    }));
    fleet.driver_mut("gpu-1").incarnation += 1;
    fleet.play();
    assert_eq!(fleet.told("gpu-1 gate smoke").len(), 2);
    assert_eq!(fleet.verdict("gpu-1").state, State::UpgradeDone);
}

#[test]
fn giving_back_a_node_that_no_gate_let_pass_is_a_broken_promise() {
    let mut fleet = gated(&json!([{"name": "smoke", "preset": "smoke-training"}]));
    let ends = |fleet: &Fleet| fleet.decisions().iter().any(|line| line.contains("gpu-1 -> upgrade-done"));
    assert!((0..40).any(|_| {
        fleet.step();
        ends(&fleet)
    }));
    let plan = fleet.plan();
    assert_eq!(violations(&fleet.snapshot, &plan), []);
    fleet.driver_mut("gpu-1").incarnation += 1;
    let found = violations(&fleet.snapshot, &plan);
    assert!(found.iter().any(|violation| violation.promise == Promise::GatesPassed), "{found:?}");
}

#[test]
fn a_stage_is_not_over_before_the_gates_at_its_end_have_passed() {
    let gates = json!([{"name": "smoke", "preset": "smoke-training", "runs": "Stage", "stages": ["canary"]}]);
    let mut fleet = staged(&gates, "0s");
    fleet.gates.push(("smoke", Sample::After, PodState::Open { waits: None }));
    fleet.live(60);
    let canary = status(&fleet).stages[0].clone();
    assert_eq!((canary.phase, fleet.verdict("gpu-2").state), (StagePhase::Proving, State::UpgradeRequired));
    assert!(canary.message.unwrap().starts_with("gate smoke: job gpu-operator/gate-smoke-"));
    insta::assert_snapshot!(fleet.why("gpu-2"), @"stage fleet is not open yet: stage canary asks its gates; gate smoke: job gpu-operator/gate-smoke-71fa4db6a8793b6f-a1 is at work");
    fleet.gates.clear();
    fleet.forget_jobs();
    fleet.play();
    assert_eq!(status(&fleet).phase, RolloutPhase::Done);
    let [smoke] = &said(&fleet, GateWhen::Stage)[..] else { panic!("{:?}", status(&fleet).stages) };
    assert_eq!((smoke.passed, smoke.failed), (1, 0));
}

#[test]
fn a_gate_that_says_no_at_the_end_of_a_stage_stops_everything() {
    let gates = json!([{"name": "smoke", "preset": "smoke-training", "runs": "Stage"}]);
    let mut fleet = staged(&gates, "0s");
    fleet.gates.push(("smoke", Sample::After, exits(3, "loss is nan")));
    fleet.live(60);
    let canary = status(&fleet).stages[0].clone();
    assert_eq!(canary.phase, StagePhase::Spoiled);
    insta::assert_snapshot!(canary.message.unwrap(), @"gate smoke failed after 0s: exit code 3");
    assert_eq!(canary.gates[0].log.as_deref(), Some("loss is nan"));
    assert_eq!(fleet.verdict("gpu-2").state, State::UpgradeRequired);
}

#[test]
fn a_gate_over_several_nodes_waits_for_them_and_is_tried_again_as_a_whole() {
    let gates = json!([{"name": "joint", "preset": "distributed-training", "retries": 1}]);
    let mut fleet = staged(&gates, "0s");
    fleet.live(60);
    let message = status(&fleet).stages[0].message.clone().unwrap();
    insta::assert_snapshot!(message, @"gate joint needs 2 nodes in service; the stage has 1");
    // In a pool without stages it runs once, at the end.
    let mut fleet = gated(&gates);
    fleet.gates.push(("joint", Sample::After, exits(1, "NCCL error")));
    fleet.live(60);
    let both = [1, 2].map(|attempt| format!("gpu-1 gpu-2 gate joint After {attempt} for stage fleet"));
    assert_eq!(fleet.told("gate joint"), both);
    let said = fleet.snapshot.rollouts["gpu-1"].status.clone().unwrap();
    assert_eq!(said.stages[0].phase, StagePhase::Spoiled);
}

#[test]
fn nobody_is_asked_where_nothing_has_begun() {
    let rollout = json!({"gates": [{"name": "joint", "preset": "distributed-training"}]});
    let mut fleet = Fleet::without_policy().driver_policy("gpu", policy(&rollout)).nodes(2, |node| node);
    fleet.live(3 * 3600);
    assert_eq!(fleet.told("gate joint"), [""; 0]);
}

#[test]
fn a_bake_repeats_the_gates_that_need_no_device_and_counts_what_they_say() {
    let gates = json!([
        {"name": "ecc-errors", "preset": "ecc-errors"},
        {"name": "smoke", "preset": "smoke-training"},
    ]);
    let mut fleet = staged(&gates, "4h");
    fleet.live(3 * 3600 + 1200);
    assert_eq!(status(&fleet).phase, RolloutPhase::Baking);
    assert_eq!(fleet.told("gpu-1 gate ecc-errors After 1 for stage canary").len(), 3);
    assert_eq!(fleet.told("gate smoke After 1 for stage"), [""; 0]);
    let [ecc] = &said(&fleet, GateWhen::Bake)[..] else { panic!("{:?}", status(&fleet).stages) };
    assert_eq!((ecc.passed, ecc.failed, ecc.unjudged), (3, 0, 0));
    fleet.live(2 * 3600);
    assert_eq!(fleet.verdict("gpu-4").state, State::UpgradeDone);
}

#[test]
fn a_gate_that_says_no_in_a_bake_spoils_it() {
    let mut fleet = staged(&ecc(), "48h");
    fleet.live(3600);
    let worse = r#"{"gpus": 7, "withEcc": 7, "corrected": 0, "uncorrected": 0}"#;
    fleet.gates.push(("ecc-errors", Sample::After, reports(worse)));
    fleet.live(2 * 3600);
    let canary = status(&fleet).stages[0].clone();
    assert_eq!(canary.phase, StagePhase::Spoiled);
    let sentence =
        "gate ecc-errors on node gpu-1 failed after 0s: gpus was 8 before and is 7; it may shrink by 0";
    assert_eq!(canary.message.as_deref(), Some(sentence));
}

#[test]
fn what_a_bake_cannot_judge_makes_it_longer() {
    let mut fleet = staged(&ecc(), "4h");
    fleet.live(1800);
    let full = Outcome::NotRun(Obstacle::NotStarted { says: "ErrImagePull".into() });
    fleet.gates.push(("ecc-errors", Sample::After, PodState::Failed { at: None, how: full }));
    fleet.live(8 * 3600);
    let canary = status(&fleet).stages[0].clone();
    assert_eq!(canary.phase, StagePhase::Baking);
    assert!(canary.bake.unwrap().seconds < 2 * 3600);
    insta::assert_snapshot!(canary.message.unwrap(), @"gate ecc-errors on node gpu-1 could not judge: its container did not start: ErrImagePull; time counts again when it has passed");
    fleet.gates.clear();
    fleet.live(5 * 3600);
    assert_eq!(fleet.verdict("gpu-4").state, State::UpgradeDone);
}

#[test]
fn gates_that_nobody_can_follow_freeze_the_pool_with_a_sentence() {
    let fleet = staged(
        &json!([{"name": "smoke", "preset": "smoke-training", "runs": "Stage", "stages": ["half"]}]),
        "0s",
    );
    let PoolStatus::Frozen(why) = fleet.pool().status else { panic!("it moves") };
    insta::assert_snapshot!(why, @"driverpolicy/gpu: there is no stage half (spec.rollout.gates[smoke].stages). The pool is frozen until it is mended; nothing was changed.");
}

#[test]
fn a_canary_that_loses_its_label_opens_nothing_also_where_a_stage_is_proven() {
    let rollout = json!({"gates": [{"name": "smoke", "preset": "smoke-training", "runs": "Stage"}]});
    let mut fleet =
        Fleet::without_policy().driver_policy("gpu", policy(&rollout)).nodes(3, NodeSpec::outdated);
    fleet.node_mut("gpu-1").set_label("gpu-canary", Some("true"));
    fleet.live(3600);
    fleet.node_mut("gpu-1").set_label("gpu-canary", None);
    fleet.live(60 * 3600);
    assert_eq!(fleet.verdict("gpu-2").state, State::UpgradeRequired);
}

#[test]
fn a_stage_of_nobody_has_nothing_to_prove() {
    let all = json!({"name": "all", "count": 2, "bake": {"duration": "0s"}});
    let gates = json!([{"name": "joint", "preset": "distributed-training"}]);
    let rollout = json!({"gates": gates, "stages": [all]});
    let mut fleet =
        Fleet::without_policy().driver_policy("gpu", policy(&rollout)).nodes(2, NodeSpec::outdated);
    fleet.play();
    assert_eq!(status(&fleet).phase, RolloutPhase::Done);
}

#[test]
fn a_round_that_takes_long_is_waited_for_and_listened_to() {
    let gates = json!([{"name": "ecc-errors", "preset": "ecc-errors", "repeatEvery": "5m"}]);
    let mut fleet = staged(&gates, "48h");
    fleet.live(200);
    fleet.gates.push(("ecc-errors", Sample::After, PodState::Open { waits: None }));
    fleet.live(20 * 60);
    assert_eq!(fleet.told("gpu-1 gate ecc-errors After 1 for stage canary").len(), 1);
    let end = fleet.snapshot.now;
    let (name, job) = fleet.snapshot.gate_jobs.iter_mut().find(|(_, job)| job.end.is_none()).unwrap();
    job.end = Some((end, JobEnd::Failed));
    let pod =
        fleet.snapshot.gate_pods.values_mut().find(|pod| pod.name.name.starts_with(&*name.name)).unwrap();
    pod.state = exits(1, "hangs");
    fleet.live(60);
    let canary = status(&fleet).stages[0].clone();
    assert_eq!(canary.phase, StagePhase::Spoiled);
    let said: Vec<_> = canary.gates.iter().filter(|gate| gate.when == GateWhen::Bake).collect();
    assert_eq!((said[0].failed, said[0].log.as_deref()), (1, Some("hangs")));
}

#[test]
fn a_gate_that_was_asked_is_listened_to_whatever_becomes_of_its_nodes() {
    let gates = json!([{"name": "smoke", "preset": "smoke-training", "runs": "Stage", "retries": 0}]);
    let mut fleet = gated(&gates);
    fleet.gates.push(("smoke", Sample::After, PodState::Open { waits: None }));
    fleet.live(60);
    fleet.node_mut("gpu-1").unschedulable = true;
    fleet.gates.clear();
    fleet.live(60);
    assert_eq!(fleet.told("gate smoke").len(), 1);
    let end = fleet.snapshot.now;
    fleet.snapshot.gate_jobs.values_mut().for_each(|job| job.end = Some((end, JobEnd::Failed)));
    fleet.snapshot.gate_pods.values_mut().for_each(|pod| pod.state = exits(1, "XID 79"));
    fleet.live(60);
    let said = fleet.snapshot.rollouts["gpu-1"].status.clone().unwrap();
    assert_eq!(said.stages[0].phase, StagePhase::Spoiled);
}

fn smoke() -> Value {
    json!([{"name": "smoke", "preset": "smoke-training"}])
}

#[test]
fn a_canary_that_comes_up_with_the_new_driver_by_itself_does_not_get_past_its_gates() {
    let canary = json!({"name": "canary", "count": 1, "bake": {"duration": "1h"}});
    let windows = json!([{"start": "22:00", "duration": "4h"}]);
    let rollout = json!({"gates": smoke(), "stages": [canary], "windows": windows, "onFailure": "Pause"});
    let mut fleet =
        Fleet::without_policy().driver_policy("gpu", policy(&rollout)).nodes(3, NodeSpec::outdated);
    fleet.live(60);
    assert!(matches!(fleet.reason("gpu-1"), Reason::WindowClosed { .. }));
    fleet.gates.push(("smoke", Sample::After, PodState::Open { waits: None }));
    comes_up(&mut fleet, "gpu-1");
    fleet.step();
    assert!(fleet.node_mut("gpu-1").unschedulable, "at once, window or not");
    let warning = "The node came up with the new driver by itself, past its gates; it is cordoned and proven like a canary";
    assert_eq!(fleet.told(warning).len(), 1);
    fleet.live(60);
    assert_eq!(status(&fleet).stages[0].phase, StagePhase::Moving, "it is not done");
    fleet.gates.clear();
    fleet.forget_jobs();
    fleet.live(60);
    assert_eq!(fleet.verdict("gpu-1").state, State::UpgradeDone);
    assert!(!fleet.node_mut("gpu-1").unschedulable);
    let said = status(&fleet);
    assert_eq!((said.stages[0].phase, said.early), (StagePhase::Baking, vec!["gpu-1".to_owned()]));
    assert_eq!(said.stages[0].gates[0].passed, 1);
}

#[test]
fn a_canary_that_came_by_itself_and_fails_its_gate_stops_everything() {
    let mut fleet = staged(&smoke(), "1h");
    fleet.node_mut("gpu-1").ready = false;
    fleet.live(60);
    fleet.node_mut("gpu-1").ready = true;
    fleet.gates.push(("smoke", Sample::After, exits(3, "loss is nan")));
    comes_up(&mut fleet, "gpu-1");
    fleet.live(60);
    assert_eq!(fleet.told("gpu-1 restart"), [""; 0]);
    assert_eq!(status(&fleet).stages[0].phase, StagePhase::Failed);
    assert_eq!(fleet.verdict("gpu-2").state, State::UpgradeRequired);
}

/// Nobody was asked to leave, so nobody knows how long it takes: a time would be a lie.
#[test]
fn who_came_by_itself_with_work_on_it_is_told_no_time_by_which_it_fails() {
    let mut fleet = staged(&smoke(), "1h");
    fleet.node_mut("gpu-1").ready = false;
    fleet.live(60);
    fleet.node_mut("gpu-1").ready = true;
    fleet.put(&"gpu-1".into(), pod("train"));
    comes_up(&mut fleet, "gpu-1");
    fleet.live(10 * 3600);
    insta::assert_snapshot!(fleet.why("gpu-1"), @"gate smoke waits until pod work/train has left the device");
    assert_eq!(fleet.reason("gpu-1").until(), None);
    // Its Job has all of its time, whatever the node has waited before.
    fleet.remove_pods("gpu-1", |pod| &*pod.name.name == "train");
    fleet.gates.push(("smoke", Sample::After, PodState::Open { waits: None }));
    fleet.settle();
    assert!(fleet.reason("gpu-1").until() > Some(fleet.snapshot.now));
    fleet.gates.clear();
    fleet.forget_jobs();
    fleet.live(60);
    assert_eq!(fleet.verdict("gpu-1").state, State::UpgradeDone);
}

#[test]
fn in_a_pool_without_stages_too_nobody_gets_past_the_gates() {
    let mut fleet = gated(&smoke()).with(node("gpu-3").outdated().pod(pod("shell").bare()));
    fleet.live(60);
    assert_eq!(fleet.verdict("gpu-3").state, State::UpgradeRequired);
    fleet.remove_pods("gpu-3", |pod| pod.name.name.as_ref() == "shell");
    comes_up(&mut fleet, "gpu-3");
    fleet.play();
    assert_eq!(fleet.told("gpu-3 gate smoke After").len(), 1);
    assert_eq!(status(&fleet).phase, RolloutPhase::Done);
    // Whoever joins when all is over joins a fleet, and not its upgrade.
    fleet = fleet.with(node("gpu-4").labelled(State::Unknown));
    let now = fleet.snapshot.now;
    (fleet.driver_mut("gpu-4").created, fleet.driver_mut("gpu-4").ready) = (now, false);
    fleet.live(60);
    assert_eq!(status(&fleet).phase, RolloutPhase::Running);
    fleet.driver_mut("gpu-4").ready = true;
    fleet.live(60);
    assert_eq!(fleet.told("gpu-4 gate"), [""; 0]);
    assert_eq!(status(&fleet).phase, RolloutPhase::Done);
}

#[test]
fn who_came_by_itself_is_not_done_while_there_is_no_room_to_ask_its_gates() {
    let rollout = json!({"gates": smoke()});
    let mut policy = policy(&rollout);
    policy["upgradePolicy"]["maxUnavailable"] = json!(1);
    let mut fleet = Fleet::without_policy().driver_policy("gpu", policy).nodes(3, NodeSpec::outdated);
    fleet.gates.push(("smoke", Sample::After, PodState::Open { waits: None }));
    fleet.live(60);
    assert!(fleet.node_mut("gpu-1").unschedulable);
    comes_up(&mut fleet, "gpu-2");
    fleet.live(60);
    assert_eq!(fleet.verdict("gpu-2").state, State::UpgradeRequired);
    insta::assert_snapshot!(fleet.why("gpu-2"), @"next slot; 1 of at most 1 nodes are out (maxUnavailable)");
    fleet.gates.clear();
    fleet.forget_jobs();
    fleet.play();
    assert_eq!(fleet.told("gpu-2 gate smoke After").len(), 1);
    assert_eq!(fleet.told("gpu-2 -> cordon-required"), [""; 0]);
}

#[test]
fn who_came_by_itself_and_is_not_ready_waits_until_it_is() {
    let mut fleet = staged(&smoke(), "1h");
    fleet.node_mut("gpu-1").ready = false;
    fleet.live(60);
    comes_up(&mut fleet, "gpu-1");
    fleet.live(10 * 3600);
    assert_eq!(fleet.told("gpu-1 -> pod-restart-required"), [""; 0]);
    assert_eq!(status(&fleet).phase, RolloutPhase::Running, "nothing is known of the version");
    fleet.node_mut("gpu-1").ready = true;
    fleet.live(3600);
    assert_eq!(fleet.told("gpu-1 gate smoke After").len(), 1, "{}", fleet.screen());
}

#[test]
fn who_is_skipped_is_left_alone_and_proves_nothing() {
    let mut fleet = staged(&smoke(), "1h");
    fleet.node_mut("gpu-1").set_label(&keys("gpu").skip, Some("true"));
    fleet.live(60);
    comes_up(&mut fleet, "gpu-1");
    fleet.live(10 * 3600);
    assert_eq!(fleet.told("gpu-1 -> pod-restart-required"), [""; 0]);
    assert_eq!(fleet.verdict("gpu-2").state, State::UpgradeRequired);
}

#[test]
fn what_a_gate_says_at_the_end_of_a_stage_is_told_once_on_its_nodes() {
    let gates = json!([{"name": "joint", "preset": "distributed-training", "retries": 0}]);
    let mut fleet = gated(&gates);
    fleet.live(3600);
    for node in ["gpu-1", "gpu-2"] {
        let told = format!("{node} Normal \"Gate joint passed in 0s at the end of stage fleet\"");
        assert_eq!(fleet.told(&told).len(), 1);
    }
    let mut fleet = gated(&gates);
    fleet.gates.push(("joint", Sample::After, exits(1, "NCCL error")));
    fleet.live(3600);
    let told = "gpu-2 Warning \"Gate joint at the end of stage fleet failed after 0s: exit code 1. Its log ends with: NCCL error\"";
    assert_eq!(fleet.told(told).len(), 1);
}

#[test]
fn what_a_gate_says_in_a_bake_is_told_once_on_its_node() {
    let mut fleet = staged(&ecc(), "48h");
    fleet.live(2 * 3600 + 1200);
    let passed = "gpu-1 Normal \"Gate ecc-errors passed in 0s in the bake of stage canary\"";
    assert_eq!(fleet.told(passed).len(), 2);
    fleet.gates.push(("ecc-errors", Sample::After, exits(1, "no nvidia-smi")));
    fleet.live(2 * 3600);
    let failed = "gpu-1 Warning \"In the bake of stage canary, gate ecc-errors on node gpu-1 failed after 0s: exit code 1. Its log ends with: no nvidia-smi\"";
    assert_eq!(fleet.told(failed).len(), 1);
}

/// Not judged: nothing goes on because of it, and no version is condemned.
#[test]
fn a_canary_whose_gate_cannot_judge_condemns_no_version() {
    let gates = json!([{"name": "smoke", "preset": "smoke-training", "retries": 0}]);
    let canary = json!({"name": "canary", "count": 1, "bake": {"duration": "1h"}});
    let rollout = json!({"gates": gates, "stages": [canary]});
    let mut fleet =
        Fleet::without_policy().driver_policy("gpu", policy(&rollout)).nodes(4, NodeSpec::outdated);
    let blind = || {
        let says = "ImagePullBackOff".into();
        PodState::Failed { at: None, how: Outcome::NotRun(Obstacle::NotStarted { says }) }
    };
    fleet.gates.push(("smoke", Sample::After, blind()));
    fleet.live(2 * 3600);
    assert_eq!(fleet.verdict("gpu-1").state, State::UpgradeFailed, "{}", fleet.screen());
    assert!(matches!(cause(&fleet, "gpu-1"), Cause::Gate { unjudged: true, .. }));
    assert_eq!((status(&fleet).phase, status(&fleet).rollback), (RolloutPhase::Running, None));
    fleet.gates.clear();
    fleet.forget_jobs();
    fleet.set_label("gpu-1", "upgrade-required");
    fleet.live(4 * 3600);
    assert_eq!(status(&fleet).phase, RolloutPhase::Done);
}

/// The Job says that it is complete, and somebody has deleted its pods before anybody saw what they report.
fn lives_without_pods(fleet: &mut Fleet, seconds: i64) {
    for _ in 0..seconds {
        fleet.step();
        fleet.snapshot.gate_pods.clear();
    }
}

#[test]
fn lost_numbers_are_no_bad_numbers_and_condemn_no_version() {
    let bounds = json!([{"field": "gpus", "min": 8}]);
    let gates = json!([{"name": "smoke", "preset": "smoke-training", "retries": 0, "bounds": bounds}]);
    let canary = json!({"name": "canary", "count": 1, "bake": {"duration": "1h"}});
    let rollout = json!({"gates": gates, "stages": [canary]});
    let mut fleet =
        Fleet::without_policy().driver_policy("gpu", policy(&rollout)).nodes(4, NodeSpec::outdated);
    lives_without_pods(&mut fleet, 200);
    assert_eq!(fleet.told("gpu-1 gate smoke After").len(), 3);
    insta::assert_snapshot!(cause(&fleet, "gpu-1"), @"gate smoke could not judge: its Job ended and no pod is left that could tell how");
    assert_eq!((status(&fleet).phase, status(&fleet).rollback), (RolloutPhase::Running, None));
}

#[test]
fn a_sample_that_was_lost_is_taken_again() {
    let mut fleet = gated(&ecc());
    lives_without_pods(&mut fleet, 20);
    assert_eq!(fleet.told("gpu-1 gate ecc-errors Before").len(), 1);
    fleet.live(3600);
    assert_eq!(fleet.told("gpu-1 gate ecc-errors Before").len(), 2);
    assert_eq!(fleet.verdict("gpu-1").state, State::UpgradeDone);
}

/// Two nodes that cannot start for now, in one zone of which one node may be out.
fn zoned(more: &Value) -> Fleet {
    let mut rollout = json!({"gates": smoke()});
    for (field, value) in more.as_object().unwrap() {
        rollout[field] = value.clone();
    }
    let stuck = |name: &str| node(name).outdated().label("zone", "a").pod(pod("shell").bare());
    let mut fleet = Fleet::without_policy()
        .driver_policy("gpu", policy(&rollout))
        .with(stuck("a-1"))
        .with(stuck("a-2"))
        .with(node("b-1"));
    fleet.live(60);
    for node in ["a-1", "a-2"] {
        fleet.remove_pods(node, |pod| &*pod.name.name == "shell");
    }
    comes_up(&mut fleet, "a-1");
    fleet
}

/// Both are found in the same pass, by whoever leads then.
#[test]
fn who_came_by_itself_takes_its_place_in_its_group_before_others_start() {
    let mut fleet = zoned(&json!({"topology": {"spread": {"label": "zone", "max": 1}}}));
    insta::assert_snapshot!(fleet.why("a-2"), @"at most 1 of the nodes with zone=a may be out (topology.spread), and a-1 is");
    fleet.step();
    let out = |fleet: &Fleet| fleet.snapshot.nodes.values().filter(|node| node.unschedulable).count();
    assert_eq!((out(&fleet), fleet.told("a-2 -> cordon-required").len()), (1, 0));
    fleet.play();
    assert_eq!(fleet.verdict("a-2").state, State::UpgradeDone);
}

#[test]
fn who_came_by_itself_takes_its_place_in_its_stage_before_others_start() {
    for limit in ["maxParallelUpgrades", "maxUnavailable"] {
        let mut stage = json!({"name": "all"});
        stage[limit] = json!(1);
        let mut fleet = zoned(&json!({"stages": [stage]}));
        fleet.step();
        assert_eq!(fleet.told("a-1 -> pod-restart-required +cordon").len(), 1, "{limit}");
        assert_eq!(fleet.told("a-2 -> cordon-required"), [""; 0], "{limit}");
        fleet.play();
        assert_eq!(fleet.verdict("a-2").state, State::UpgradeDone);
    }
}

/// The Job of the bake before is there still, and is about a driver that is gone.
#[test]
fn a_bake_that_begins_again_asks_its_gates_again() {
    let gates = json!([{"name": "ecc-errors", "preset": "ecc-errors", "repeatEvery": "24h"}]);
    let mut fleet = staged(&gates, "30h");
    fleet.live(25 * 3600);
    let asked = |fleet: &Fleet| fleet.told("gpu-1 gate ecc-errors After 1 for stage canary").len();
    assert_eq!(asked(&fleet), 1);
    let key = keys("gpu").requested;
    fleet.node_mut("gpu-1").annotations.insert(key, "true".to_owned());
    fleet.crashes_on.insert("gpu-1".to_owned());
    fleet.live(3600);
    assert_eq!(status(&fleet).stages[0].phase, StagePhase::Failed);
    fleet.crashes_on.clear();
    fleet.set_label("gpu-1", "upgrade-required");
    fleet.live(20 * 3600);
    assert_eq!((status(&fleet).phase, asked(&fleet)), (RolloutPhase::Baking, 1));
    fleet.live(12 * 3600);
    assert_eq!((status(&fleet).phase, asked(&fleet)), (RolloutPhase::Done, 2));
}

/// Whoever could not be judged holds the stage up, and hides nothing of the others.
#[test]
fn a_stage_that_is_held_up_in_its_bake_is_still_watched() {
    let gates = json!([{"name": "smoke", "preset": "smoke-training", "retries": 0}]);
    for promotion in ["Auto", "Manual"] {
        let bake = if promotion == "Auto" { "48h" } else { "1h" };
        let canary =
            json!({"name": "canary", "count": 2, "bake": {"duration": bake}, "promotion": promotion});
        let rollout = json!({"gates": gates, "stages": [canary], "onFailure": "Pause"});
        let mut fleet =
            Fleet::without_policy().driver_policy("gpu", policy(&rollout)).nodes(4, NodeSpec::outdated);
        fleet.live(2 * 3600);
        let says = "ImagePullBackOff".into();
        let blind = PodState::Failed { at: None, how: Outcome::NotRun(Obstacle::NotStarted { says }) };
        fleet.gates.push(("smoke", Sample::After, blind));
        let key = keys("gpu").requested;
        fleet.node_mut("gpu-1").annotations.insert(key, "true".to_owned());
        fleet.live(3600);
        assert_eq!(fleet.verdict("gpu-1").state, State::UpgradeFailed, "{}", fleet.screen());
        let message = status(&fleet).stages[0].message.clone().unwrap();
        assert!(message.starts_with("1 of its 2 nodes failed before"), "{message}");
        let heartbeat = Some(fleet.snapshot.now);
        let condition = Condition { kind: "GpuDcgmConnectivityFailure".into(), holds: true, heartbeat };
        fleet.node_mut("gpu-2").conditions.push(condition);
        fleet.live(1);
        fleet.node_mut("gpu-2").conditions.clear();
        fleet.live(60);
        assert_eq!(status(&fleet).stages[0].phase, StagePhase::Spoiled, "{promotion}");
    }
}

/// Both were proven together, then one of them got another driver: what was said is about one that is gone.
#[test]
fn a_stage_that_moves_again_asks_the_gates_at_its_end_again() {
    let gates = json!([{"name": "joint", "preset": "distributed-training", "retries": 0}]);
    let canary = json!({"name": "canary", "count": 2, "bake": {"duration": "48h"}});
    let rollout = json!({"gates": gates, "stages": [canary], "onFailure": "Pause"});
    for job_is_gone in [false, true] {
        let mut fleet =
            Fleet::without_policy().driver_policy("gpu", policy(&rollout)).nodes(4, NodeSpec::outdated);
        fleet.live(60);
        assert_eq!(
            (status(&fleet).phase, said(&fleet, GateWhen::Stage)[0].passed),
            (RolloutPhase::Baking, 1)
        );
        let key = keys("gpu").requested;
        fleet.node_mut("gpu-2").annotations.insert(key, "true".to_owned());
        fleet.crashes_on.insert("gpu-2".to_owned());
        fleet.live(3600);
        assert_eq!(status(&fleet).stages[0].phase, StagePhase::Failed);
        assert!(said(&fleet, GateWhen::Stage).is_empty());
        if job_is_gone {
            fleet.forget_jobs();
        }
        fleet.crashes_on.clear();
        fleet.gates.push(("joint", Sample::After, exits(1, "NCCL error")));
        fleet.set_label("gpu-2", "upgrade-required");
        fleet.live(3600);
        assert_eq!(fleet.told("gpu-1 gpu-2 gate joint After 1 for stage canary").len(), 2);
        assert_eq!(status(&fleet).stages[0].phase, StagePhase::Spoiled);
    }
}

/// The stage moves for a moment, and the drivers that are looked at stay as they are.
#[test]
fn a_gate_at_work_at_the_end_of_a_stage_is_listened_to_also_when_a_node_joins() {
    let mut fleet = gated(&json!([{"name": "joint", "preset": "distributed-training"}]));
    fleet.gates.push(("joint", Sample::After, PodState::Open { waits: None }));
    fleet.live(60);
    fleet = fleet.with(node("gpu-0").labelled(State::Unknown));
    let now = fleet.snapshot.now;
    (fleet.driver_mut("gpu-0").created, fleet.driver_mut("gpu-0").ready) = (now, false);
    fleet.live(60);
    assert_eq!(status(&fleet).stages[0].phase, StagePhase::Moving);
    fleet.driver_mut("gpu-0").ready = true;
    fleet.live(60);
    assert_eq!(status(&fleet).stages[0].phase, StagePhase::Proving);
    let end = fleet.snapshot.now;
    fleet.snapshot.gate_jobs.values_mut().for_each(|job| job.end = Some((end, JobEnd::Complete)));
    fleet.snapshot.gate_pods.values_mut().for_each(|pod| pod.state = reports("{}"));
    fleet.live(60);
    assert_eq!((status(&fleet).phase, fleet.told("gate joint").len()), (RolloutPhase::Done, 1));
}

/// Work waits for nobody, and nobody takes it off for a gate.
#[test]
fn a_gate_at_the_end_of_a_stage_goes_where_nobody_uses_the_device() {
    let gates = json!([{"name": "joint", "preset": "distributed-training"}]);
    let rollout = json!({"gates": gates});
    let mut fleet =
        Fleet::without_policy().driver_policy("gpu", policy(&rollout)).nodes(5, NodeSpec::outdated);
    let ends = |fleet: &Fleet| fleet.snapshot.nodes.keys().all(|n| fleet.verdict(n.as_str()).in_sync);
    assert!((0..60).any(|_| {
        fleet.step();
        ends(&fleet)
    }));
    for node in ["gpu-1", "gpu-3", "gpu-4"] {
        fleet.put(&node.into(), pod(&format!("train-{node}")));
    }
    let stuck = Obstacle::NotScheduled { says: "0/5 nodes".into() };
    fleet.gates.push(("joint", Sample::After, PodState::Failed { at: None, how: Outcome::NotRun(stuck) }));
    fleet.settle();
    let tries = [1, 2, 3].map(|attempt| format!("gpu-2 gpu-5 gate joint After {attempt} for stage fleet"));
    assert_eq!(fleet.told("gate joint"), tries);
}

#[test]
fn a_gate_that_got_no_place_looks_for_other_nodes_and_counts_its_tries() {
    let gates = json!([{"name": "smoke", "preset": "smoke-training", "runs": "Stage"}]);
    let mut fleet = gated(&gates);
    fleet.gates.push(("smoke", Sample::After, PodState::Open { waits: None }));
    fleet.live(60);
    assert_eq!(fleet.told("gate smoke"), ["gpu-1 gate smoke After 1 for stage fleet"]);
    fleet.put(&"gpu-1".into(), pod("train"));
    fleet.live(3600);
    let tries = [("gpu-1", 1), ("gpu-2", 2), ("gpu-2", 3)];
    let tries = tries.map(|(node, attempt)| format!("{node} gate smoke After {attempt} for stage fleet"));
    assert_eq!(fleet.told("gate smoke"), tries);
}
