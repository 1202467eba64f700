//! What the driver manager says on its node: only a reboot helps, or the cordon is its own.

use serde_json::json;

use super::fixture::*;
use crate::api::{RolloutPhase, RolloutStatus, StagePhase};
use crate::contract::{
    AGENT_CORDON_ANNOTATION, KEEP_CORDONED_LABEL, NEEDS_REBOOT_ANNOTATION, State, nvsentinel,
};
use crate::reason::{Foreign, Reason};

const HOUR: i64 = 3600;
const RECORD: &str = r#"{"boot":"boot-1","since":"2026-01-01T11:00:00Z","why":"half of it is gone"}"#;

fn needs_reboot(spec: NodeSpec) -> NodeSpec {
    spec.annotation(NEEDS_REBOOT_ANNOTATION, RECORD)
}

fn cordoned_by_agent(spec: NodeSpec) -> NodeSpec {
    spec.cordoned().annotation(AGENT_CORDON_ANNOTATION, r#"{"since":"2026-01-01T11:00:00Z"}"#)
}

fn annotate(fleet: &mut Fleet, key: &str, value: Option<&str>) {
    let node = fleet.node_mut("n");
    match value {
        Some(value) => drop(node.annotations.insert(key.to_owned(), value.to_owned())),
        None => drop(node.annotations.remove(key)),
    }
    node.read_annotations();
}

fn has(fleet: &Fleet, key: &str) -> bool {
    fleet.snapshot.nodes["n"].annotations.contains_key(key)
}

#[test]
fn a_node_that_needs_a_reboot_is_not_given_back_and_goes_on_after_it() {
    for state in [State::PodRestartRequired, State::ValidationRequired, State::UncordonRequired] {
        // Its driver pod may still look ready.
        let mut fleet = Fleet::new().with(needs_reboot(node("n").at(state)));
        fleet.settle();
        assert_eq!(fleet.why("n"), "needs a reboot, says its driver manager: half of it is gone", "{state}");
        assert!(fleet.plan().wake_at.is_some(), "{state}: it does not wait for ever");
        annotate(&mut fleet, NEEDS_REBOOT_ANNOTATION, None);
        fleet.play();
        assert_eq!(fleet.verdict("n").state, State::UpgradeDone, "{state}");
        assert!(!fleet.snapshot.nodes["n"].unschedulable, "{state}");
    }
}

#[test]
fn whoever_boots_a_node_after_its_time_was_over_need_not_tell_anybody() {
    for state in [State::PodRestartRequired, State::ValidationRequired] {
        let mut fleet = Fleet::new().with(needs_reboot(node("n").at(state)));
        fleet.play();
        assert_eq!(fleet.verdict("n").state, State::UpgradeFailed, "{state}");
        assert!(fleet.why("n").starts_with("needs a reboot and had none in "), "{}", fleet.why("n"));
        assert_eq!(fleet.told("-cordon"), [""; 0]);
        fleet.wait(86_400);
        assert_eq!(fleet.decisions(), [""; 0], "{state}: it stays failed");
        // Nobody removes the record: a driver manager that knows nothing of it has come up since.
        fleet.node_mut("n").boot_id = "boot-2".into();
        fleet.play();
        assert_eq!(fleet.verdict("n").state, State::UpgradeDone, "{state}");
        assert!(!fleet.snapshot.nodes["n"].unschedulable, "{state}");
        assert!(!has(&fleet, NEEDS_REBOOT_ANNOTATION), "{state}: of an earlier boot");
    }
}

#[test]
fn a_failure_of_another_kind_is_not_mended_by_a_boot() {
    let mut fleet = Fleet::new().with(node("n").at(State::UpgradeFailed));
    fleet.node_mut("n").boot_id = "boot-2".into();
    fleet.play();
    assert_eq!(fleet.verdict("n").state, State::UpgradeFailed);
}

#[test]
fn a_node_that_needs_a_reboot_is_not_started_and_takes_no_slot() {
    let mut fleet = Fleet::new().with(needs_reboot(node("n").outdated())).with(node("o").outdated());
    fleet.settle();
    assert_eq!(fleet.verdict("n").state, State::UpgradeRequired);
    assert!(matches!(fleet.reason("n"), Reason::NeedsReboot { until: None, .. }), "{}", fleet.why("n"));
    assert_eq!(fleet.verdict("o").state, State::UpgradeDone);
    fleet.node_mut("n").boot_id = "boot-2".into();
    fleet.play();
    assert_eq!(fleet.verdict("n").state, State::UpgradeDone);
}

#[test]
fn a_node_in_service_that_needs_a_reboot_says_so_and_is_left_alone() {
    let mut fleet = Fleet::new().with(needs_reboot(node("n")));
    fleet.driver_mut("n").ready = false;
    fleet.play();
    assert_eq!(fleet.why("n"), "needs a reboot, says its driver manager: half of it is gone");
    assert_eq!(fleet.states_of("n"), [""; 0]);
}

#[test]
fn a_node_with_half_a_driver_is_not_given_back_when_its_rollout_is_aborted() {
    let aborted = |spec: NodeSpec| {
        let mut fleet = Fleet::new().with(spec.outdated().at(State::DrainRequired).pod(pod("train")));
        fleet.abort_rollouts();
        fleet.decisions()
    };
    assert!(aborted(node("n"))[0].starts_with("n -> upgrade-required -cordon"), "else it is");
    assert!(!aborted(needs_reboot(node("n"))).iter().any(|line| line.contains("-cordon")));
}

#[test]
fn any_words_in_the_annotation_hold_a_node_back() {
    let wish = node("n").at(State::UncordonRequired).annotation(NEEDS_REBOOT_ANNOTATION, "flashed");
    let mut fleet = Fleet::new().with(wish);
    fleet.node_mut("n").boot_id = "boot-7".into();
    fleet.settle();
    assert_eq!(fleet.why("n"), "needs a reboot, says its driver manager: flashed");
    assert!(fleet.snapshot.nodes["n"].unschedulable);
}

#[test]
fn a_cordon_of_the_driver_manager_is_taken_over_and_lifted_with_the_visit() {
    let mut fleet = Fleet::new().with(cordoned_by_agent(node("n").outdated()));
    fleet.play();
    assert_eq!(fleet.verdict("n").state, State::UpgradeDone);
    assert!(!fleet.snapshot.nodes["n"].unschedulable);
    assert!(!has(&fleet, AGENT_CORDON_ANNOTATION));
    let end = fleet.told("-> upgrade-done");
    assert!(end[0].contains("-cordon") && end[0].contains("-driver-manager-cordon"), "in one write: {end:?}");
}

#[test]
fn a_cordon_that_the_driver_manager_sets_during_a_visit_is_lifted_with_it_too() {
    let found = node("n").at(State::ValidationRequired).visit(|visit| visit.holds.cordon = false);
    let mut fleet = Fleet::new().with(cordoned_by_agent(found.clone()));
    fleet.play();
    assert!(!fleet.snapshot.nodes["n"].unschedulable && !has(&fleet, AGENT_CORDON_ANNOTATION));
    let mut somebodys = Fleet::new().with(found);
    somebodys.play();
    assert!(somebodys.snapshot.nodes["n"].unschedulable, "somebody else's stays");
}

#[test]
fn whoever_else_keeps_a_node_cordoned_keeps_the_driver_managers_cordon_too() {
    let keep = |spec: NodeSpec| spec.label(KEEP_CORDONED_LABEL, "true");
    let mut fleet = Fleet::new().with(keep(cordoned_by_agent(node("n").outdated())));
    fleet.play();
    assert_eq!(fleet.verdict("n").state, State::UpgradeDone);
    assert!(fleet.snapshot.nodes["n"].unschedulable && has(&fleet, AGENT_CORDON_ANNOTATION));
    let quarantined = |spec: NodeSpec| spec.annotation(nvsentinel::CORDONED_ANNOTATION, "True");
    let mut fleet =
        Fleet::new().with(quarantined(cordoned_by_agent(node("n").at(State::UncordonRequired)).cordoned()));
    fleet.play();
    assert!(fleet.snapshot.nodes["n"].unschedulable && has(&fleet, AGENT_CORDON_ANNOTATION));
}

#[test]
fn outside_of_a_visit_the_cordon_stays_until_the_driver_is_up() {
    let mut fleet = Fleet::new().with(cordoned_by_agent(node("n"))).with(node("o").outdated());
    fleet.set_policy(json!({"maxUnavailable": 1}));
    fleet.driver_mut("n").ready = false;
    fleet.settle();
    assert_eq!(
        fleet.why("o"),
        "next slot; 1 of at most 1 nodes are out (maxUnavailable), n by its driver manager"
    );
    assert_eq!(fleet.pool().ledger.foreign, [Foreign { node: "n".into(), by_driver_manager: true }]);
    assert!(fleet.snapshot.nodes["n"].unschedulable && has(&fleet, AGENT_CORDON_ANNOTATION));
    // A start that was called off before it had a record is no visit either.
    let mut fleet =
        Fleet::new().with(cordoned_by_agent(node("n").outdated().labelled(State::CordonRequired)));
    fleet.abort_rollouts();
    fleet.settle();
    assert_eq!(fleet.verdict("n").state, State::UpgradeRequired);
    assert!(fleet.snapshot.nodes["n"].unschedulable && has(&fleet, AGENT_CORDON_ANNOTATION));
}

#[test]
fn what_is_said_of_a_cordon_that_a_person_lifted_is_forgotten_before_the_next_one() {
    let record = r#"{"since":"2026-01-01T11:00:00Z"}"#;
    let mut fleet = Fleet::new().with(node("n").annotation(AGENT_CORDON_ANNOTATION, record));
    fleet.settle();
    assert!(!has(&fleet, AGENT_CORDON_ANNOTATION));
    assert_eq!(fleet.decisions(), [""; 0], "once");
}

#[test]
fn a_node_of_an_atom_that_waits_for_a_reboot_does_not_hold_up_the_others() {
    let rack = |spec: NodeSpec| spec.label("rack", "r");
    let failed = rack(needs_reboot(node("n").outdated().at(State::UpgradeFailed)));
    let policy = json!({
        "driver": {"name": "gpu"},
        "upgradePolicy": {"maxParallelUpgrades": 0, "maxUnavailable": "100%"},
        "rollout": {"topology": {"atom": "rack"}},
    });
    let fleet = Fleet::without_policy().driver_policy("gpu", policy);
    let mut fleet = fleet.with(failed).with(rack(node("o").outdated()));
    fleet.set_label("n", "upgrade-required");
    fleet.play();
    assert_eq!(fleet.verdict("o").state, State::UpgradeDone, "{}", fleet.why("o"));
}

/// The new driver never came to run: that is no word about the version, and none for it either.
#[test]
fn a_canary_that_needs_a_reboot_neither_condemns_the_version_nor_lets_it_pass() {
    let canary = needs_reboot(node("n").at(State::PodRestartRequired)).label("gpu-canary", "true");
    let mut fleet = Fleet::new().with(canary).with(node("o").outdated());
    fleet.live(HOUR);
    assert_eq!(fleet.verdict("n").state, State::UpgradeFailed);
    let stage = rollout(&fleet).stages[0].clone();
    assert_eq!((rollout(&fleet).phase, stage.phase), (RolloutPhase::Running, StagePhase::Moving));
    insta::assert_snapshot!(stage.message.unwrap(), @"1 of its 1 nodes failed before this version could be judged on them; mend and retry them");
    assert_eq!(fleet.states_of("o"), ["upgrade-required"]);
    fleet.node_mut("n").boot_id = "boot-2".into();
    fleet.live(HOUR);
    assert_eq!(rollout(&fleet).stages[0].phase, StagePhase::Baking);
}

/// Whatever it is that leaves half a driver behind: it would on the next one too.
#[test]
fn a_canary_that_needs_a_reboot_holds_up_the_others_of_its_stage() {
    let canary = |spec: NodeSpec| spec.label("gpu-canary", "true");
    let half = canary(needs_reboot(node("n").at(State::PodRestartRequired)));
    let mut fleet = Fleet::new().with(half).with(canary(node("o").outdated()));
    fleet.live(HOUR);
    assert_eq!(fleet.verdict("n").state, State::UpgradeFailed);
    insta::assert_snapshot!(fleet.why("o"), @"1 nodes of stage canary failed and at most 0 may; no more of it are started");
    fleet.node_mut("n").boot_id = "boot-2".into();
    fleet.live(HOUR);
    assert_eq!(fleet.verdict("o").state, State::UpgradeDone);
}

/// One failed by the version, one by half a driver; the first is mended.
#[test]
fn a_stage_that_failed_goes_on_waiting_for_a_reboot_alone() {
    let canary = |spec: NodeSpec| spec.label("gpu-canary", "true");
    let policy = json!({"driver": {"name": "gpu"}, "rollout": {"onFailure": "Pause"}});
    let fleet = Fleet::without_policy().driver_policy("gpu", policy);
    let half = canary(needs_reboot(node("n").at(State::PodRestartRequired)));
    let mut fleet = fleet.with(half).with(canary(node("o").at(State::UpgradeFailed)));
    fleet.live(HOUR);
    assert_eq!(rollout(&fleet).stages[0].phase, StagePhase::Failed);
    fleet.set_label("o", "upgrade-required");
    fleet.live(HOUR);
    assert_eq!(fleet.verdict("o").state, State::UpgradeDone, "{}", fleet.why("o"));
    assert_eq!(rollout(&fleet).stages[0].phase, StagePhase::Moving);
}

#[test]
fn nodes_that_need_a_reboot_stop_new_starts_but_take_no_version_back() {
    let policy = json!({
        "driver": {"name": "gpu"},
        "limits": {"failureThreshold": 0},
        "rollout": {"onFailure": "Rollback"},
    });
    let fleet = Fleet::without_policy().driver_policy("gpu", policy);
    let half = needs_reboot(node("n").at(State::PodRestartRequired));
    let mut fleet = fleet.with(half).with(node("o").outdated());
    fleet.live(HOUR);
    assert_eq!(fleet.verdict("n").state, State::UpgradeFailed);
    assert!(matches!(fleet.reason("o"), Reason::TooManyFailed { .. }), "{}", fleet.why("o"));
    assert!(rollout(&fleet).rollback.is_none());
}

/// Half a driver, outside of any visit; a reboot; and nothing in the driver pod that gives the node back.
#[test]
fn a_node_that_its_driver_manager_left_cordoned_is_proven_and_given_back_when_its_driver_is_up() {
    let mut fleet = Fleet::new().with(needs_reboot(cordoned_by_agent(node("n"))));
    fleet.driver_mut("n").ready = false;
    fleet.play();
    assert_eq!(fleet.states_of("n"), [""; 0]);
    fleet.node_mut("n").boot_id = "boot-2".into();
    fleet.driver_mut("n").ready = true;
    fleet.play();
    assert_eq!(
        fleet.states_of("n"),
        ["pod-restart-required", "validation-required", "uncordon-required", "upgrade-done"]
    );
    assert!(!fleet.snapshot.nodes["n"].unschedulable);
    assert!(!has(&fleet, AGENT_CORDON_ANNOTATION) && !has(&fleet, NEEDS_REBOOT_ANNOTATION));
}

#[test]
fn who_wants_a_node_left_alone_keeps_the_driver_managers_cordon_on_it() {
    let skip = keys("gpu").skip;
    let cordoned = || cordoned_by_agent(node("n"));
    // NVSentinel is not looked for here, and has it all the same.
    let quarantined = cordoned().annotation(nvsentinel::CORDON_BEFORE_ANNOTATION, "True");
    for (case, spec) in [
        ("skipped", cordoned().label(&skip, "true")),
        ("kept", cordoned().label(KEEP_CORDONED_LABEL, "true")),
        ("in quarantine", quarantined),
    ] {
        let mut fleet = Fleet::new().with(spec);
        fleet.play();
        assert_eq!(fleet.states_of("n"), [""; 0], "{case}");
        assert!(fleet.snapshot.nodes["n"].unschedulable, "{case}");
    }
}

#[test]
fn nobody_is_proven_after_an_abort_or_by_what_was_seen_before_the_cordon() {
    let due = node("o").outdated().at(State::UpgradeRequired);
    let mut aborted = Fleet::new().with(cordoned_by_agent(node("n"))).with(due);
    aborted.abort_rollouts();
    aborted.settle();
    assert_eq!(aborted.states_of("n"), [""; 0], "aborted");
    let mut stale = Fleet::new().with(cordoned_by_agent(node("n")));
    stale.driver_mut("n").ready_since = Some(after(-7200));
    stale.play();
    assert_eq!(stale.states_of("n"), [""; 0], "ready before the cordon");
    stale.driver_mut("n").ready_since = Some(after(-5));
    stale.play();
    assert!(!stale.snapshot.nodes["n"].unschedulable);
}

/// A rollout that nothing is brought by would ask gates and watch a stage.
#[test]
fn a_node_that_is_only_proven_makes_no_rollout() {
    let mut fleet = Fleet::new().with(cordoned_by_agent(node("n")));
    fleet.play();
    assert!(!fleet.snapshot.nodes["n"].unschedulable);
    assert!(fleet.snapshot.rollouts.is_empty(), "{:?}", fleet.snapshot.rollouts.keys());
    let last = fleet.snapshot.nodes["n"].last_visit.as_ref().unwrap();
    assert_eq!(last.rollout_of(&"gpu".into()), None);
}

#[test]
fn what_a_person_lifted_is_forgotten_in_every_state() {
    for state in [State::Unknown, State::UpgradeRequired, State::UpgradeDone, State::UpgradeFailed] {
        let lifted = node("n").outdated().skipped().labelled(state);
        let mut fleet = Fleet::new().with(lifted.annotation(AGENT_CORDON_ANNOTATION, "{}"));
        fleet.settle();
        assert!(!has(&fleet, AGENT_CORDON_ANNOTATION), "{state}");
    }
}

fn rollout(fleet: &Fleet) -> &RolloutStatus {
    let (_, rollout) = fleet.snapshot.rollouts.last_key_value().unwrap();
    rollout.status.as_ref().unwrap()
}
