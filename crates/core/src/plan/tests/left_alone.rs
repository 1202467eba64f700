//! A version fails while the one before it is still on its way: the way back leads into the middle of a rollout, and moves nobody
//! past its stages.

use serde_json::{Value, json};

use super::fixture::*;
use super::rollbacks::{CANARY, fleet, nodes, phases, say, status, touched};
use crate::api::RolloutPhase;
use crate::contract::State;
use crate::reason::Reason;
use crate::snapshot::Rollout;

const HOUR: i64 = 3600;

/// Six nodes, of which a canary and so many others have a new version, which is watched on these for a day; gpu-6 comes last.
fn half_way(others: u32, more: &Value) -> Fleet {
    let mut rollout = json!({"stages": [
        {"name": "canary", "nodeSelector": {"first": "yes"}, "bake": {"duration": "1h"}},
        {"name": "some", "count": others, "bake": {"duration": "24h"}},
    ]});
    rollout.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let mut fleet = fleet(&rollout);
    fleet.live(3 * HOUR);
    assert_eq!(phases(&fleet), [RolloutPhase::Baking]);
    fleet
}

/// Passes, and time in between, until it is so.
fn until(fleet: &mut Fleet, is_so: impl Fn(&Fleet) -> bool) {
    for _ in 0..500 {
        if is_so(fleet) {
            return;
        }
        if !fleet.step() {
            fleet.snapshot.now = fleet.plan().wake_at.unwrap_or(fleet.snapshot.now).max(fleet.snapshot.now);
        }
    }
    panic!("it never is:\n{}\n{}", fleet.screen(), fleet.story.join("\n"));
}

fn next_version(fleet: &mut Fleet) {
    fleet.publish("gpu", 20, "newer");
    fleet.daemon_set_mut().driver_version = Some("570.86.15".parse().unwrap());
}

/// The next version fails on its canary, and nodes are about to go back.
fn next_version_fails(fleet: &mut Fleet) {
    next_version(fleet);
    fleet.crashes_on.insert(CANARY.to_owned());
    until(fleet, |fleet| fleet.snapshot.rollouts.get("gpu-2").is_some_and(Rollout::is_taken_back));
    fleet.crashes_on.clear();
}

/// Of those that the first version has not reached, or has.
fn with(fleet: &Fleet, revision: &str) -> Vec<String> {
    let of = |node: &String| node.ends_with(&format!(" {revision}"));
    nodes(fleet).into_iter().filter(of).map(|node| node.split(' ').next().unwrap().to_owned()).collect()
}

#[test]
fn a_way_back_into_the_middle_of_a_rollout_moves_nobody_past_its_stages() {
    let mut fleet = half_way(4, &json!({}));
    next_version_fails(&mut fleet);
    until(&mut fleet, |fleet| {
        assert_eq!(with(fleet, OLD), ["gpu-6"], "{}", fleet.screen());
        fleet.verdict(CANARY).state == State::UpgradeDone
    });
    fleet.live(HOUR / 2);
    assert!(!touched(&fleet, "gpu-6"));
    let expected =
        [RolloutPhase::Superseded, RolloutPhase::RolledBack, RolloutPhase::Done, RolloutPhase::Baking];
    assert_eq!(phases(&fleet), expected, "{}", fleet.story.join("\n"));
}

#[test]
fn who_was_left_alone_goes_on_by_the_stages() {
    let mut fleet = half_way(4, &json!({}));
    next_version_fails(&mut fleet);
    fleet.live(20 * HOUR);
    assert!(matches!(fleet.reason("gpu-6"), Reason::StageClosed { .. }), "{}", fleet.screen());
    let goes_on = fleet.snapshot.rollouts["gpu-4"].spec.clone();
    let previous = goes_on.previous.unwrap();
    assert_eq!((goes_on.version.as_deref(), goes_on.rollback_of), (Some("565.57.01"), None));
    assert_eq!(previous.version.as_deref(), Some("560.35.03"));
    fleet.live(10 * HOUR);
    assert_eq!(with(&fleet, NEW).len(), 6, "{}", fleet.screen());
    assert_eq!(phases(&fleet).last(), Some(&RolloutPhase::Done));
    assert_eq!(fleet.snapshot.rollouts.len(), 4);
}

/// Most nodes still had the version before, so that is what comes back.
#[test]
fn few_that_were_ahead_of_the_others_stay_so_until_all_are_back() {
    let mut fleet = half_way(1, &json!({}));
    next_version_fails(&mut fleet);
    until(&mut fleet, |fleet| {
        assert_eq!(with(fleet, NEW), ["gpu-1"], "{}", fleet.screen());
        fleet.verdict(CANARY).state == State::UpgradeDone
    });
    fleet.live(HOUR / 2);
    assert_eq!(with(&fleet, NEW), ["gpu-1"], "{}", fleet.screen());
    fleet.live(48 * HOUR);
    assert_eq!(with(&fleet, OLD).len(), 6, "{}", fleet.screen());
    assert_eq!(phases(&fleet).last(), Some(&RolloutPhase::Done));
}

#[test]
fn who_fails_on_the_way_back_holds_up_the_others_and_takes_nothing_back() {
    let mut fleet = half_way(4, &json!({}));
    next_version_fails(&mut fleet);
    fleet.broken.insert(CANARY.to_owned());
    fleet.live(48 * HOUR);
    assert_eq!(fleet.verdict(CANARY).state, State::UpgradeFailed);
    insta::assert_snapshot!(
        fleet.why("gpu-6"),
        @"left alone by rollout gpu-3, the way back from a version that it never had"
    );
    assert_eq!((fleet.snapshot.rollouts.len(), status(&fleet, "gpu-3").phase), (3, RolloutPhase::Failed));
    fleet.node_mut(CANARY).set_label(&keys("gpu").skip, Some("true"));
    fleet.live(60);
    assert_eq!(fleet.snapshot.rollouts.len(), 4, "a person leaves it out");
}

/// A person takes the version back and sets the one before, all in the moment in which a node sets out.
#[test]
fn who_was_told_to_start_is_given_back_as_it_was() {
    let mut fleet = half_way(4, &json!({}));
    fleet.node_mut("gpu-6").set_label("first", Some("yes"));
    next_version(&mut fleet);
    until(&mut fleet, |fleet| fleet.verdict("gpu-6").state == State::WaitForJobsRequired);
    say(&mut fleet, "gpu-2", false);
    fleet.publish("gpu", 30, NEW);
    fleet.daemon_set_mut().driver_version = Some("565.57.01".parse().unwrap());
    fleet.step();
    let given_back = "Given back with its old driver: the way back leaves it alone";
    assert_eq!(fleet.told(given_back).len(), 1, "{}", fleet.story.join("\n"));
    assert!(!fleet.node_mut("gpu-6").unschedulable);
}

#[test]
fn an_atom_does_not_wait_for_whom_the_way_back_leaves_alone() {
    let mut fleet = half_way(4, &json!({"topology": {"atom": "rack"}}));
    next_version_fails(&mut fleet);
    for node in [CANARY, "gpu-6"] {
        fleet.node_mut(node).set_label("rack", Some("r1"));
    }
    fleet.live(HOUR / 2);
    assert_eq!(
        (fleet.verdict(CANARY).state, with(&fleet, OLD)),
        (State::UpgradeDone, vec!["gpu-6".to_owned()])
    );
}
