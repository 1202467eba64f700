//! When anybody may start.

use std::collections::BTreeMap;

use jiff::SignedDuration;
use serde_json::{Value, json};

use super::fixture::*;
use crate::contract::{LAST_VISIT_ANNOTATION, State};
use crate::reason::Reason;
use crate::visit::LastVisit;

/// A fleet of outdated nodes under a DriverPolicy with these windows and blackouts. Stories begin on a Thursday at noon.
#[expect(clippy::needless_pass_by_value, reason = "values are written at the call")]
fn fleet(nodes: usize, rollout: Value) -> Fleet {
    let policy = json!({
        "driver": {"name": "gpu"},
        "upgradePolicy": {"maxParallelUpgrades": 0, "maxUnavailable": "100%"},
        "rollout": rollout,
    });
    let fleet = Fleet::without_policy().driver_policy("gpu", policy);
    fleet.nodes(nodes, |n| n.outdated().at(State::UpgradeRequired))
}

fn window(start: &str, duration: &str) -> Value {
    json!({"windows": [{"start": start, "duration": duration}]})
}

fn starts(fleet: &Fleet) -> Vec<String> {
    let start = |line: String| Some(line.strip_suffix(" -> cordon-required")?.to_owned());
    fleet.decisions().into_iter().filter_map(start).collect()
}

/// A node that is done, after a visit of so many minutes.
fn visited(name: &str, minutes: i64) -> NodeSpec {
    let ended = after(-86_400);
    let began = Some(ended - SignedDuration::from_mins(minutes));
    let last = LastVisit {
        rollout: None,
        began,
        ended,
        early: false,
        rollouts: BTreeMap::new(),
        gates: BTreeMap::new(),
        pods: BTreeMap::new(),
        cordoned: false,
    };
    node(name).annotation(LAST_VISIT_ANNOTATION, &last.to_text())
}

#[test]
fn nothing_starts_before_the_window_opens_and_the_plan_wakes_then() {
    let mut fleet = fleet(2, window("22:00", "4h"));
    assert_eq!(starts(&fleet), [""; 0]);
    assert_eq!(fleet.why("gpu-1"), "waits for its window");
    assert_eq!(fleet.plan().wake_at, Some(after(10 * 3600)));
    fleet.wait(10 * 3600);
    assert_eq!(starts(&fleet), ["gpu-1", "gpu-2"]);
}

#[test]
fn nothing_starts_that_would_not_end_in_time() {
    let mut fleet = fleet(1, window("11:00", "2h"));
    assert_eq!(starts(&fleet), ["gpu-1"], "half an hour is expected, an hour is left");
    fleet.wait(30 * 60);
    assert_eq!(starts(&fleet), ["gpu-1"]);
    fleet.wait(1);
    assert_eq!(starts(&fleet), [""; 0]);
    assert_eq!(
        fleet.why("gpu-1"),
        "the window closes before a visit would end, which takes about 30 min; waits for the next one"
    );
    assert_eq!(fleet.plan().wake_at, Some(after(23 * 3600)));
}

#[test]
fn what_is_expected_is_what_visits_of_this_fleet_took() {
    let slow = |minutes| {
        (1..=3).fold(fleet(1, window("11:00", "2h")), |fleet, i| {
            fleet.with(visited(&format!("done-{i}"), minutes))
        })
    };
    assert_eq!(starts(&slow(60)), ["gpu-1"]);
    let fleet = slow(61);
    assert_eq!(starts(&fleet), [""; 0]);
    assert!(fleet.why("gpu-1").contains("about 61 min"), "{}", fleet.why("gpu-1"));
    // Nodes that came up by themselves and were only proven say nothing.
    let mut early = slow(61);
    for i in 4..40 {
        early = early.with(visited(&format!("done-{i}"), 1));
        let node = early.node_mut(&format!("done-{i}"));
        node.last_visit.as_mut().unwrap().early = true;
    }
    assert_eq!(starts(&early), [""; 0]);
    let never = slow(121);
    assert_eq!(
        never.why("gpu-1"),
        "no window of the next 400 days is long enough for a visit, which takes about 121 min"
    );
    assert_eq!(never.plan().wake_at, None);
}

#[test]
fn a_visit_writes_down_how_long_it_took_unless_it_had_to_be_tried_again() {
    for (attempts, told) in [(0, true), (1, false)] {
        let walking = node("gpu-1").at(State::UncordonRequired).walk(|walk| walk.attempts = attempts);
        let mut fleet = Fleet::new().with(walking);
        fleet.settle();
        let last = fleet.snapshot.nodes["gpu-1"].last_visit.clone().unwrap();
        let took = last.ended.duration_since(after(-120));
        assert_eq!(last.took(), told.then_some(took));
    }
}

#[test]
fn a_node_without_any_driver_starts_at_any_time() {
    let waits = node("new").at(State::UpgradeRequired).annotation(&keys("gpu").safe_load, "true");
    let mut fleet = fleet(1, window("22:00", "4h")).with(waits);
    fleet.driver_mut("new").ready = false;
    assert_eq!(starts(&fleet), ["new"]);
}

#[test]
fn a_visit_that_is_under_way_goes_on_after_the_window_closed() {
    let under_way = node("gpu-1").outdated().at(State::WaitForJobsRequired);
    let mut fleet = fleet(0, window("22:00", "4h")).with(under_way);
    fleet.play();
    assert_eq!(fleet.verdict("gpu-1").state, State::UpgradeDone);
    assert!(fleet.snapshot.now < after(10 * 3600), "it waits for no window");
}

/// Its label is there, and whoever wrote it was away until the window had closed.
#[test]
fn a_node_that_was_told_to_start_and_not_taken_waits_for_the_next_window() {
    let told = node("gpu-1").outdated().at(State::CordonRequired).pod(pod("train"));
    let mut fleet = fleet(0, window("22:00", "4h")).with(told);
    fleet.step();
    fleet.settle();
    assert!(matches!(fleet.reason("gpu-1"), Reason::WindowClosed { .. }), "{}", fleet.screen());
    assert!(!fleet.node_mut("gpu-1").unschedulable);
    assert_eq!(fleet.told("gpu-1 evict"), [""; 0]);
    assert_eq!(fleet.told("Given back before anything was done").len(), 1);
    fleet.snapshot.now = after(10 * 3600);
    fleet.play();
    assert_eq!(fleet.verdict("gpu-1").state, State::UpgradeDone);
}

#[test]
fn a_node_that_was_told_to_start_and_not_taken_is_not_taken_when_its_window_is_too_short_by_now() {
    let told = node("gpu-1").outdated().at(State::CordonRequired).pod(pod("train"));
    let mut fleet = fleet(0, window("11:00", "70m")).with(told);
    fleet.step();
    fleet.settle();
    assert!(matches!(fleet.reason("gpu-1"), Reason::WindowClosed { .. }), "{}", fleet.screen());
    assert!(!fleet.node_mut("gpu-1").unschedulable);
}

#[test]
fn an_atom_that_has_begun_is_not_split_by_the_end_of_its_window() {
    let rack = |n: NodeSpec, state| n.outdated().at(state).label("rack", "r1");
    let mut rollout = window("22:00", "4h");
    rollout["topology"] = json!({"atom": "rack"});
    let fleet = fleet(0, rollout).with(rack(node("gpu-1"), State::WaitForJobsRequired));
    let mut fleet = fleet.with(rack(node("gpu-2"), State::CordonRequired));
    fleet.play();
    for node in ["gpu-1", "gpu-2"] {
        assert_eq!(fleet.verdict(node).state, State::UpgradeDone, "{}", fleet.screen());
    }
    assert!(fleet.snapshot.now < after(10 * 3600), "neither waits for a window");
}

#[test]
fn a_node_without_any_driver_is_taken_at_any_time() {
    let waits = node("new").at(State::CordonRequired).annotation(&keys("gpu").safe_load, "true");
    let mut fleet = fleet(0, window("22:00", "4h")).with(waits);
    fleet.driver_mut("new").ready = false;
    fleet.step();
    assert!(fleet.node_mut("new").unschedulable, "{}", fleet.screen());
}

#[test]
fn on_a_blackout_date_nothing_starts() {
    let mut fleet = fleet(1, json!({"blackouts": [{"from": "2026-01-01"}]}));
    assert_eq!(fleet.why("gpu-1"), "waits for its window");
    assert_eq!(fleet.plan().wake_at, Some(after(12 * 3600)));
    fleet.play();
    assert_eq!(fleet.verdict("gpu-1").state, State::UpgradeDone);
    let for_good = fleet_in_the_dark();
    assert!(matches!(for_good.reason("gpu-1"), Reason::WindowClosed { opens: None, .. }));
    assert_eq!(for_good.plan().wake_at, None);
}

fn fleet_in_the_dark() -> Fleet {
    fleet(1, json!({"blackouts": [{"from": "2025-01-01", "until": "9999-12-31"}]}))
}

#[test]
fn what_keeps_a_node_from_starting_anyway_is_told_before_the_window_opens() {
    let fleet = fleet(0, window("22:00", "4h"))
        .with(node("n").outdated().at(State::UpgradeRequired).pod(pod("shell").bare()));
    assert!(fleet.why("n").starts_with("cannot be emptied"), "{}", fleet.why("n"));
}

#[test]
fn the_end_of_a_window_wakes_those_who_wait_in_it() {
    let policy = json!({"driver": {"name": "gpu"}, "rollout": window("11:00", "4h")});
    let fleet = Fleet::without_policy()
        .driver_policy("gpu", policy)
        .nodes(2, |n| n.outdated().at(State::UpgradeRequired));
    assert_eq!(starts(&fleet), ["gpu-1"]);
    assert_eq!(fleet.plan().wake_at, Some(after(3 * 3600)));
}

#[test]
fn a_zone_that_nobody_knows_freezes_the_pool_with_a_sentence() {
    let fleet =
        fleet(1, json!({"windows": [{"start": "22:00", "duration": "4h", "timeZone": "Europe/Berlni"}]}));
    let told = fleet.decisions();
    assert_eq!(
        told,
        [
            "policy gpu ready=false: driverpolicy/gpu: \"Europe/Berlni\" is not a time zone that is known here; did you mean Europe/Berlin? (spec.rollout.windows[0].timeZone). The pool is frozen until it is mended; nothing was changed."
        ]
    );
}
