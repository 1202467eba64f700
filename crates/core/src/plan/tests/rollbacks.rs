//! The way back: a version that went wrong is put back where it came from, and does not start again by itself.

use serde_json::json;

use super::fixture::*;
use crate::api::{RolloutPhase, RolloutStatus, Word, stamp};
use crate::contract::State;
use crate::gate::{PodState, Sample};
use crate::policy::Source;
use crate::snapshot::{Object, SetbackKind};

pub(super) const CANARY: &str = "gpu-3";

/// Six nodes on the old version, of which one goes first and is watched for an hour; nobody limits them otherwise.
pub(super) fn fleet(more: &serde_json::Value) -> Fleet {
    let mut rollout =
        json!({"stages": [{"name": "canary", "nodeSelector": {"first": "yes"}, "bake": {"duration": "1h"}}]});
    for (field, value) in more.as_object().into_iter().flatten() {
        rollout[field] = value.clone();
    }
    let spec = json!({
        "driver": {"name": "gpu"},
        "upgradePolicy": {"maxParallelUpgrades": 0, "maxUnavailable": "100%"},
        "rollout": rollout,
    });
    let mut fleet = Fleet::without_policy().driver_policy("gpu", spec).nodes(6, NodeSpec::outdated);
    fleet.node_mut(CANARY).set_label("first", Some("yes"));
    fleet
}

fn bad_canary(more: &serde_json::Value) -> Fleet {
    let mut fleet = fleet(more);
    fleet.crashes_on.insert(CANARY.to_owned());
    fleet
}

pub(super) fn status<'a>(fleet: &'a Fleet, rollout: &str) -> &'a RolloutStatus {
    fleet.snapshot.rollouts[rollout].status.as_ref().unwrap()
}

pub(super) fn phases(fleet: &Fleet) -> Vec<RolloutPhase> {
    fleet.snapshot.rollouts.keys().map(|name| status(fleet, name).phase).collect()
}

/// Each node's state and the revision of its driver.
pub(super) fn nodes(fleet: &Fleet) -> Vec<String> {
    let verdicts = fleet.pool().nodes.into_iter();
    let pod = |node: &str| {
        fleet.snapshot.pods[node].values().find(|pod| pod.revision.is_some()).unwrap().revision.clone()
    };
    verdicts.map(|(node, v)| format!("{node} {} {}", v.state, pod(node.as_str()).unwrap())).collect()
}

fn all_back(fleet: &Fleet) {
    let wrong: Vec<String> =
        nodes(fleet).into_iter().filter(|node| !node.ends_with("upgrade-done old")).collect();
    assert_eq!(wrong, Vec::<String>::new(), "{}", fleet.screen());
}

pub(super) fn say(fleet: &mut Fleet, rollout: &str, cleared: bool) {
    let word = Word { by: "mei".into(), at: stamp(fleet.snapshot.now), why: Some("jobs are slow".into()) };
    let spec = &mut fleet.snapshot.rollouts.get_mut(rollout).unwrap().spec;
    if cleared { spec.cleared = Some(word) } else { spec.rollback = Some(word) }
}

pub(super) fn touched(fleet: &Fleet, node: &str) -> bool {
    fleet.states_of(node).iter().any(|state| state == "cordon-required")
}

#[test]
fn a_canary_that_fails_is_brought_back_and_nobody_else_is_touched() {
    let mut fleet = bad_canary(&json!({}));
    fleet.live(3 * 3600);
    all_back(&fleet);
    assert_eq!(phases(&fleet), [RolloutPhase::RolledBack, RolloutPhase::Done]);
    assert_eq!(fleet.snapshot.rollouts["gpu-2"].spec.rollback_of.as_deref(), Some("gpu-1"));
    let others: Vec<String> =
        (1..=6).map(|n| format!("gpu-{n}")).filter(|n| n != CANARY && touched(&fleet, n)).collect();
    assert_eq!(others, Vec::<String>::new());
    let timeline: Vec<String> =
        status(&fleet, "gpu-1").timeline.iter().map(|e| format!("{}: {}", e.by, e.what)).collect();
    insta::assert_snapshot!(timeline.join("\n"), @r"
    pitcrew: from 560.35.03 to 565.57.01
    pitcrew: stage canary begins
    pitcrew: stage canary has failed: 1 of its 1 nodes failed, and at most 0 may
    pitcrew: the version is put back: stage canary failed: 1 of its 1 nodes failed, and at most 0 may
    pitcrew: the version before is the target again
    ");
}

#[test]
fn a_version_that_breaks_in_the_bake_is_taken_back() {
    let mut fleet = fleet(&json!({}));
    fleet.live(1800);
    let now = fleet.snapshot.now;
    let driver = fleet.driver_mut(CANARY);
    (driver.restarts, driver.started) = (1, Some(now));
    fleet.live(3600);
    all_back(&fleet);
    assert_eq!(phases(&fleet), [RolloutPhase::RolledBack, RolloutPhase::Done]);
}

#[test]
fn a_condemned_version_does_not_start_again_until_a_person_clears_it() {
    let mut fleet = bad_canary(&json!({}));
    fleet.live(3 * 3600);
    fleet.publish("gpu", 9, NEW);
    fleet.live(24 * 3600);
    assert_eq!(nodes(&fleet).iter().filter(|node| node.ends_with("upgrade-required old")).count(), 6);
    insta::assert_snapshot!(
        fleet.why("gpu-1"),
        @"this version went wrong in rollout gpu-1 and is not tried again: stage canary failed: 1 of its 1 nodes failed, and at most 0 may"
    );
    assert_eq!(fleet.snapshot.rollouts.len(), 2);
    fleet.crashes_on.clear();
    say(&mut fleet, "gpu-1", true);
    fleet.live(3 * 3600);
    assert_eq!(nodes(&fleet).iter().filter(|node| node.ends_with("upgrade-done new")).count(), 6);
    assert_eq!(fleet.snapshot.rollouts.len(), 3);
}

#[test]
fn a_person_takes_a_version_back_half_way_through_the_fleet() {
    let mut fleet = fleet(&json!({"stages": [{"name": "all", "maxParallelUpgrades": 1}]}));
    while nodes(&fleet).iter().filter(|node| node.ends_with(" new")).count() < 3 {
        fleet.step();
    }
    say(&mut fleet, "gpu-1", false);
    fleet.live(3600);
    all_back(&fleet);
    assert_eq!(phases(&fleet), [RolloutPhase::RolledBack, RolloutPhase::Done]);
    assert!(!touched(&fleet, "gpu-6"));
    let back = status(&fleet, "gpu-1").rollback.as_ref().unwrap();
    assert_eq!((back.by.as_str(), back.why.as_str()), ("mei", "jobs are slow"));
}

#[test]
fn a_rollout_that_is_done_is_taken_back_too() {
    let mut fleet = fleet(&json!({}));
    fleet.live(3 * 3600);
    assert_eq!(phases(&fleet), [RolloutPhase::Done]);
    say(&mut fleet, "gpu-1", false);
    fleet.live(3600);
    all_back(&fleet);
}

#[test]
fn the_policy_may_leave_the_decision_to_a_person() {
    let mut fleet = bad_canary(&json!({"onFailure": "Pause"}));
    fleet.live(3 * 3600);
    assert_eq!(phases(&fleet), [RolloutPhase::Halted]);
    assert_eq!(fleet.verdict(CANARY).state, State::UpgradeFailed);
    assert_eq!(fleet.told("->").iter().filter(|line| line.contains("daemonset ->")).count(), 0);
    say(&mut fleet, "gpu-1", false);
    fleet.live(3600);
    all_back(&fleet);
}

/// Somebody edits an environment variable of its DaemonSet while its canary has failed, and nobody takes anything back.
#[test]
fn a_version_that_failed_and_is_rendered_anew_waits_for_a_person() {
    let mut fleet = bad_canary(&json!({"onFailure": "Pause"}));
    fleet.live(3 * 3600);
    assert_eq!(phases(&fleet), [RolloutPhase::Halted]);
    fleet.publish("gpu", 20, "new-with-options");
    fleet.live(3 * 3600);
    assert_eq!(phases(&fleet), [RolloutPhase::Halted]);
    assert_eq!(fleet.states_of(CANARY).iter().filter(|state| *state == "cordon-required").count(), 1);
    assert!(fleet.why("gpu-1").starts_with("this version went wrong in rollout gpu-1"), "{}", fleet.screen());
    // A person may still take it back, or let it begin anew.
    let mut taken_back = fleet.clone();
    say(&mut taken_back, "gpu-1", false);
    taken_back.live(3600);
    all_back(&taken_back);
    fleet.crashes_on.clear();
    say(&mut fleet, "gpu-1", true);
    fleet.live(3 * 3600);
    let moved = nodes(&fleet).iter().filter(|node| node.ends_with("upgrade-done new-with-options")).count();
    assert_eq!(moved, 6, "{}", fleet.screen());
}

#[test]
fn what_somebody_else_manages_is_not_written_and_the_status_says_what_to_do() {
    let mut fleet = bad_canary(&json!({}));
    fleet.daemon_set_mut().manager = Some("Argo CD (application gpu)".into());
    fleet.live(3 * 3600);
    assert_eq!(phases(&fleet), [RolloutPhase::Halted]);
    insta::assert_snapshot!(
        status(&fleet, "gpu-1").message.as_ref().unwrap(),
        @"taken back by pitcrew: stage canary failed: 1 of its 1 nodes failed, and at most 0 may; daemonset/gpu-operator/nvidia-driver-daemonset is managed by Argo CD (application gpu), which would undo any change here; put its earlier template back there"
    );
    // Whoever puts it back has done what was asked for.
    fleet.publish("gpu", 9, OLD);
    fleet.live(3600);
    all_back(&fleet);
    assert_eq!(phases(&fleet), [RolloutPhase::RolledBack, RolloutPhase::Done]);
}

#[test]
fn the_object_that_an_operator_renders_from_gets_its_version_back() {
    let mut fleet = bad_canary(&json!({}));
    let source = Source::ClusterPolicy("cluster-policy".to_owned());
    let facts =
        crate::policy::ClusterPolicyFacts { driver: json!({"version": "565.57.01"}), ..Default::default() };
    fleet.snapshot.sources.cluster_policies.insert("cluster-policy".to_owned(), facts);
    fleet.daemon_set_mut().rendered_by = Some(source.clone());
    fleet.live(3 * 3600);
    all_back(&fleet);
    assert_eq!(fleet.snapshot.sources.version_of(&source), Some("560.35.03"));
}

/// An operator that renders its objects otherwise by now: the version that comes back has another template.
fn rendered_anew() -> Fleet {
    let mut fleet = bad_canary(&json!({}));
    fleet.renders = Some("old-again");
    fleet.live(3 * 3600);
    fleet
}

#[test]
fn nodes_that_have_the_version_before_are_left_alone_whatever_their_template() {
    let fleet = rendered_anew();
    let expected: Vec<String> = (1..=6).map(|n| format!("gpu-{n} upgrade-done old")).collect();
    let expected: Vec<String> = expected
        .into_iter()
        .map(|node| if node.starts_with(CANARY) { node + "-again" } else { node })
        .collect();
    assert_eq!(nodes(&fleet), expected, "{}", fleet.screen());
    assert_eq!(phases(&fleet), [RolloutPhase::RolledBack, RolloutPhase::Done]);
    assert_eq!((1..=6).filter(|n| touched(&fleet, &format!("gpu-{n}"))).count(), 1);
}

#[test]
fn a_person_may_ask_for_the_newest_template_where_it_was_left_alone() {
    let mut fleet = rendered_anew();
    let key = "nvidia.com/gpu-driver-upgrade-requested".to_owned();
    fleet.node_mut("gpu-1").annotations.insert(key, "true".to_owned());
    fleet.live(3600);
    assert_eq!(nodes(&fleet)[0], "gpu-1 upgrade-done old-again", "{}", fleet.screen());
}

/// A template of the same version went wrong, and the next one mends it: that is no way back for those who never had it.
#[test]
fn a_template_that_mends_one_that_went_wrong_reaches_every_node() {
    let mut fleet = bad_canary(&json!({}));
    fleet.daemon_set_mut().driver_version = Some("560.35.03".parse().unwrap());
    fleet.daemon_set_mut().manager = Some("Argo CD (application gpu)".into());
    fleet.live(3 * 3600);
    fleet.crashes_on.clear();
    fleet.publish("gpu", 20, "old-with-options");
    fleet.live(24 * 3600);
    let moved = nodes(&fleet).iter().filter(|node| node.ends_with("upgrade-done old-with-options")).count();
    assert_eq!(moved, 6, "{}", fleet.screen());
}

/// Nobody had started; a new template of the same version comes later, and is rolled out like any other.
#[test]
fn what_comes_after_a_way_back_is_no_way_back() {
    let mut fleet = fleet(&json!({}));
    fleet.node_mut(CANARY).ready = false;
    fleet.live(60);
    say(&mut fleet, "gpu-1", false);
    fleet.live(3600);
    assert_eq!(phases(&fleet), [RolloutPhase::RolledBack, RolloutPhase::Done]);
    fleet.node_mut(CANARY).ready = true;
    fleet.publish("gpu", 20, "old-with-options");
    fleet.live(24 * 3600);
    let moved = nodes(&fleet).iter().filter(|node| node.ends_with("upgrade-done old-with-options")).count();
    assert_eq!(moved, 6, "{}", fleet.screen());
}

/// A template of the same version was half rolled out when a version came that went wrong: the other half still needs it.
#[test]
fn a_template_that_was_on_its_way_before_still_reaches_every_node() {
    let mut fleet = fleet(&json!({"stages": [{"name": "all", "maxParallelUpgrades": 1}]}));
    fleet.publish("gpu", 20, "old-with-options");
    fleet.daemon_set_mut().driver_version = Some("560.35.03".parse().unwrap());
    while nodes(&fleet).iter().filter(|node| node.ends_with(" old-with-options")).count() < 3 {
        fleet.step();
    }
    fleet.publish("gpu", 21, NEW);
    fleet.daemon_set_mut().driver_version = Some("565.57.01".parse().unwrap());
    while !nodes(&fleet).iter().any(|node| node.ends_with(" new")) {
        fleet.step();
    }
    fleet.renders = Some("old-with-options");
    let newest = fleet.snapshot.rollouts.keys().next_back().unwrap().clone();
    say(&mut fleet, &newest, false);
    fleet.live(3 * 3600);
    let moved = nodes(&fleet).iter().filter(|node| node.ends_with("upgrade-done old-with-options")).count();
    assert_eq!(moved, 6, "{}", fleet.screen());
}

#[test]
fn a_driver_that_would_be_left_alone_but_is_not_ready_is_replaced_in_its_visit() {
    let mut fleet = fleet(&json!({"stages": [{"name": "all", "maxParallelUpgrades": 1}]}));
    while !nodes(&fleet).iter().any(|node| node.ends_with(" new")) {
        fleet.step();
    }
    let broken = nodes(&fleet).iter().find(|node| node.ends_with("upgrade-required old")).unwrap().clone();
    let broken = broken.split(' ').next().unwrap().to_owned();
    fleet.driver_mut(&broken).ready = false;
    fleet.renders = Some("old-again");
    say(&mut fleet, "gpu-1", false);
    fleet.live(3 * 3600);
    assert!(nodes(&fleet).contains(&format!("{broken} upgrade-done old-again")), "{}", fleet.screen());
}

#[test]
fn what_a_bad_rollout_brought_goes_even_if_its_version_is_the_same() {
    let mut fleet = fleet(&json!({}));
    fleet.live(1800);
    let image = fleet.driver_mut("gpu-1").image.clone();
    fleet.driver_mut(CANARY).image = image;
    say(&mut fleet, "gpu-1", false);
    fleet.live(3600);
    all_back(&fleet);
}

#[test]
fn a_version_that_is_set_again_each_time_is_left_to_whoever_does_that() {
    let mut fleet = bad_canary(&json!({}));
    // Their way back is slow: until then somebody sets the version again and again.
    for _ in 0..400 {
        if !fleet.step() {
            fleet.snapshot.now = fleet.plan().wake_at.unwrap_or(fleet.snapshot.now).max(fleet.snapshot.now);
        }
        let newest = fleet.snapshot.revisions.values().max_by_key(|revision| revision.number).unwrap();
        if newest.hash.as_str() == OLD && fleet.snapshot.rollouts.contains_key("gpu-2") {
            let number = newest.number + 1;
            fleet.publish("gpu", number, NEW);
        }
    }
    let said = status(&fleet, "gpu-1");
    assert_eq!(said.phase, RolloutPhase::Halted, "{}", fleet.story.join("\n"));
    insta::assert_snapshot!(
        said.message.as_ref().unwrap(),
        @"taken back by pitcrew: stage canary failed: 1 of its 1 nodes failed, and at most 0 may; somebody sets the version again each time it is put back; set it back there"
    );
    let puts = fleet.story.iter().filter(|line| line.ends_with("daemonset -> old")).count();
    assert_eq!(puts, 2, "{}", fleet.story.join("\n"));
}

#[test]
fn in_a_pool_without_stages_too_many_failures_take_a_version_back_if_the_policy_says_so() {
    let spec = |on_failure: &str| {
        json!({
            "driver": {"name": "gpu"},
            "upgradePolicy": {"maxParallelUpgrades": 1, "maxUnavailable": "100%"},
            "limits": {"failureThreshold": 1},
            "rollout": {"onFailure": on_failure},
        })
    };
    for (on_failure, end) in [("Rollback", true), ("Pause", false)] {
        let mut fleet =
            Fleet::without_policy().driver_policy("gpu", spec(on_failure)).nodes(6, NodeSpec::outdated);
        fleet.crashes_on.extend(["gpu-1".to_owned(), "gpu-2".to_owned()]);
        fleet.live(6 * 3600);
        let back = nodes(&fleet).iter().all(|node| node.ends_with("upgrade-done old"));
        assert_eq!(back, end, "{on_failure}: {}", fleet.screen());
    }
}

#[test]
fn one_bad_node_out_of_many_condemns_nothing() {
    let spec = json!({
        "driver": {"name": "gpu"},
        "upgradePolicy": {"maxParallelUpgrades": 0, "maxUnavailable": "100%"},
        "limits": {"failureThreshold": 1},
        "rollout": {"stages": [{"name": "all"}]},
    });
    let mut fleet = Fleet::without_policy().driver_policy("gpu", spec).nodes(6, NodeSpec::outdated);
    fleet.crashes_on.insert("gpu-1".to_owned());
    fleet.live(3 * 3600);
    assert_eq!(phases(&fleet), [RolloutPhase::Failed]);
    assert_eq!(fleet.verdict("gpu-1").state, State::UpgradeFailed);
    assert_eq!(nodes(&fleet).iter().filter(|node| node.ends_with("upgrade-done new")).count(), 5);
}

#[test]
fn old_rollouts_are_forgotten_but_not_what_went_wrong() {
    let mut fleet = bad_canary(&json!({"historyLimit": 2}));
    fleet.live(3 * 3600);
    fleet.crashes_on.clear();
    for (number, hash) in [(10, "c"), (11, "d"), (12, "e"), (13, "f")] {
        fleet.publish("gpu", number, hash);
        fleet.live(3 * 3600);
    }
    let kept: Vec<&String> = fleet.snapshot.rollouts.keys().collect();
    assert_eq!(kept, ["gpu-1", "gpu-5", "gpu-6"]);
}

#[test]
fn a_paused_pool_puts_nothing_back() {
    let mut fleet = fleet(&json!({}));
    fleet.live(600);
    fleet.pause(true);
    say(&mut fleet, "gpu-1", false);
    fleet.live(3600);
    assert_eq!(fleet.story.iter().filter(|line| line.ends_with("daemonset -> old")).count(), 0);
    fleet.pause(false);
    fleet.live(3600);
    all_back(&fleet);
}

#[test]
fn who_fails_on_the_way_back_stays_failed_and_keeps_nobody_on_the_bad_version() {
    let spec = json!({
        "driver": {"name": "gpu"},
        "upgradePolicy": {"maxParallelUpgrades": 1, "maxUnavailable": "100%"},
        "limits": {"failureThreshold": 1},
    });
    let mut fleet = Fleet::without_policy().driver_policy("gpu", spec).nodes(6, NodeSpec::outdated);
    fleet.live(3 * 3600);
    assert_eq!(phases(&fleet), [RolloutPhase::Done]);
    // The version has broken three machines: no driver comes up there any more.
    fleet.broken.extend((1..=3).map(|n| format!("gpu-{n}")));
    say(&mut fleet, "gpu-1", false);
    fleet.live(10 * 3600);
    let states: Vec<String> = nodes(&fleet);
    assert_eq!(states.iter().filter(|node| node.ends_with("upgrade-done old")).count(), 3, "{states:?}");
    assert_eq!(states.iter().filter(|node| node.ends_with("upgrade-failed old")).count(), 3, "{states:?}");
    assert!((1..=3).all(|n| fleet.node_mut(&format!("gpu-{n}")).unschedulable));
}

#[test]
fn a_change_that_is_not_of_the_version_is_put_back_by_a_person() {
    let mut fleet = bad_canary(&json!({}));
    let source = Source::ClusterPolicy("cluster-policy".to_owned());
    let facts =
        crate::policy::ClusterPolicyFacts { driver: json!({"version": "560.35.03"}), ..Default::default() };
    fleet.snapshot.sources.cluster_policies.insert("cluster-policy".to_owned(), facts);
    fleet.daemon_set_mut().rendered_by = Some(source.clone());
    fleet.daemon_set_mut().driver_version = Some("560.35.03".parse().unwrap());
    fleet.live(3600);
    assert_eq!(phases(&fleet), [RolloutPhase::Halted]);
    let message = status(&fleet, "gpu-1").message.clone().unwrap();
    assert!(message.ends_with("is not its spec.driver.version; put it back there"), "{message}");
}

/// Its driver pod was lost, and the DaemonSet makes one of what it has at that time.
fn comes_up_with(fleet: &mut Fleet, node: &str, revision: &str, uid: &str) {
    comes_up(fleet, node);
    let driver = fleet.driver_mut(node);
    (driver.revision, driver.uid) = (Some(revision.into()), uid.into());
    driver.image =
        format!("nvcr.io/nvidia/driver:{}", if revision == OLD { "560.35.03" } else { "565.57.01" }).into();
}

fn taken_in(fleet: &Fleet, node: &str) -> usize {
    fleet.told(&format!("{node} -> pod-restart-required +cordon")).len()
}

#[test]
fn a_node_that_comes_up_with_a_version_that_nobody_could_put_back_is_taken_out_and_proven() {
    let mut fleet = bad_canary(&json!({}));
    fleet.daemon_set_mut().manager = Some("Argo CD (application gpu)".into());
    fleet.live(3 * 3600);
    assert_eq!(phases(&fleet), [RolloutPhase::Halted]);
    comes_up(&mut fleet, "gpu-1");
    fleet.step();
    assert!(fleet.node_mut("gpu-1").unschedulable, "{}", fleet.screen());
    assert_eq!(
        fleet
            .told("Warning \"The node came up with a version that was taken back and is there still; it is cordoned and proven like a canary\"")
            .len(),
        1
    );
    fleet.live(24 * 3600);
    assert_eq!((fleet.verdict("gpu-1").state, taken_in(&fleet, "gpu-1")), (State::UpgradeDone, 1));
    assert!(!fleet.node_mut("gpu-1").unschedulable);
    assert_eq!(status(&fleet, "gpu-1").early, ["gpu-1"]);
    assert_eq!(fleet.told("gpu-1 evict"), [""; 0]);
}

/// No rollout begins for it.
#[test]
fn a_node_that_comes_up_with_a_condemned_version_that_was_set_again_is_proven_once() {
    let mut fleet = bad_canary(&json!({}));
    fleet.live(3 * 3600);
    fleet.publish("gpu", 9, NEW);
    fleet.daemon_set_mut().driver_version = Some("565.57.01".parse().unwrap());
    fleet.live(3600);
    comes_up(&mut fleet, "gpu-1");
    fleet.step();
    assert!(fleet.node_mut("gpu-1").unschedulable, "{}", fleet.screen());
    fleet.live(24 * 3600);
    assert_eq!((fleet.verdict("gpu-1").state, taken_in(&fleet, "gpu-1")), (State::UpgradeDone, 1));
    assert_eq!(fleet.snapshot.rollouts.len(), 2);
}

#[test]
fn a_called_off_rollout_takes_nobody_in() {
    let mut fleet = fleet(&json!({}));
    fleet.live(1800);
    fleet.snapshot.rollouts.get_mut("gpu-1").unwrap().spec.abort = true;
    comes_up(&mut fleet, "gpu-1");
    fleet.live(3600);
    assert_eq!(taken_in(&fleet, "gpu-1"), 0, "{}", fleet.screen());
}

#[test]
fn a_node_that_comes_back_by_itself_does_not_get_past_its_gates_unless_it_was_never_away() {
    let smoke = json!([{"name": "smoke", "preset": "smoke-training"}]);
    let mut fleet = fleet(&json!({"gates": smoke}));
    fleet.live(1800);
    // These two cannot start on their way, there or back.
    for node in [CANARY, "gpu-1"] {
        fleet.put(&node.into(), pod("shell").bare());
    }
    say(&mut fleet, "gpu-1", false);
    fleet.live(3600);
    assert_eq!(fleet.verdict(CANARY).state, State::UpgradeRequired, "{}", fleet.screen());
    for node in [CANARY, "gpu-1"] {
        fleet.remove_pods(node, |pod| &*pod.name.name == "shell");
        comes_up_with(&mut fleet, node, OLD, &format!("uid-came-back-{node}"));
    }
    fleet.live(3600);
    all_back(&fleet);
    let asked = |fleet: &Fleet, node: &str| fleet.told(&format!("{node} gate smoke After")).len();
    assert_eq!((asked(&fleet, CANARY), asked(&fleet, "gpu-1")), (2, 0), "{:#?}", fleet.told("gate"));
    assert_eq!(taken_in(&fleet, "gpu-1"), 0);
}

/// All nodes have a version that is taken back, and cannot be put back: somebody else owns it.
fn stuck_on_a_bad_version() -> Fleet {
    let mut fleet = fleet(&json!({}));
    fleet.live(3 * 3600);
    assert_eq!(phases(&fleet), [RolloutPhase::Done]);
    fleet.daemon_set_mut().manager = Some("Argo CD (application gpu)".into());
    say(&mut fleet, "gpu-1", false);
    fleet.live(3600);
    assert_eq!(phases(&fleet), [RolloutPhase::Halted]);
    fleet
}

/// Another version comes than the one before, and fails on its canary.
fn next_version_fails(fleet: &mut Fleet) {
    fleet.daemon_set_mut().manager = None;
    fleet.crashes_on.insert(CANARY.to_owned());
    let number = fleet.snapshot.revisions.values().map(|revision| revision.number).max().unwrap() + 1;
    fleet.publish("gpu", number, "newer");
    fleet.daemon_set_mut().driver_version = Some("570.86.15".parse().unwrap());
    fleet.live(3 * 3600);
}

#[test]
fn a_version_that_went_wrong_is_never_what_another_one_is_rolled_back_to() {
    let mut fleet = stuck_on_a_bad_version();
    next_version_fails(&mut fleet);
    let previous = fleet.snapshot.rollouts["gpu-2"].spec.previous.clone().unwrap();
    assert_eq!(previous.version.as_deref(), Some("560.35.03"));
    assert_eq!(previous.target.values().collect::<Vec<_>>(), [OLD]);
    all_back(&fleet);
    assert_eq!(phases(&fleet), [RolloutPhase::Superseded, RolloutPhase::RolledBack, RolloutPhase::Done]);
    assert_eq!(fleet.snapshot.rollouts["gpu-3"].spec.rollback_of.as_deref(), Some("gpu-2"));
}

/// Most nodes still have the version that went wrong when somebody loses patience and sets the next one.
#[test]
fn a_version_that_comes_in_the_middle_of_a_way_back_goes_back_to_where_that_one_led() {
    let mut fleet = fleet(&json!({}));
    fleet.live(3 * 3600);
    let slow = json!({"maxParallelUpgrades": 1});
    let spec = fleet.snapshot.sources.driver_policies.get_mut("gpu").unwrap();
    spec.upgrade_policy = serde_json::from_value(slow).unwrap();
    say(&mut fleet, "gpu-1", false);
    while !nodes(&fleet).iter().any(|node| node.ends_with("upgrade-done old")) {
        fleet.step();
    }
    next_version_fails(&mut fleet);
    assert_eq!(
        fleet.snapshot.rollouts["gpu-3"].spec.previous.as_ref().unwrap().target.values().next().unwrap(),
        OLD
    );
    fleet.live(3 * 3600);
    all_back(&fleet);
}

/// The one before went wrong as well, and what ran before that is not known.
#[test]
fn where_nothing_good_ran_before_a_person_says_where_to_go_back_to() {
    let mut fleet = stuck_on_a_bad_version();
    fleet.snapshot.rollouts.get_mut("gpu-1").unwrap().spec.previous = None;
    next_version_fails(&mut fleet);
    assert_eq!(phases(&fleet)[1], RolloutPhase::Halted);
    let message = status(&fleet, "gpu-2").message.clone().unwrap();
    assert!(
        message.ends_with("what ran before is not known; set the driver version back by hand"),
        "{message}"
    );
    assert!(nodes(&fleet).iter().filter(|node| node.ends_with("upgrade-required new")).count() == 5);
}

/// More than half of the fleet has the version when an edit of its object renders it anew; then it goes wrong.
#[test]
fn a_version_that_is_rendered_anew_half_way_still_goes_back_to_the_one_before() {
    let mut fleet = fleet(&json!({"stages": [{"name": "all", "maxParallelUpgrades": 1}]}));
    let source = Source::ClusterPolicy("cluster-policy".to_owned());
    let facts =
        crate::policy::ClusterPolicyFacts { driver: json!({"version": "565.57.01"}), ..Default::default() };
    fleet.snapshot.sources.cluster_policies.insert("cluster-policy".to_owned(), facts);
    fleet.daemon_set_mut().rendered_by = Some(source.clone());
    while nodes(&fleet).iter().filter(|node| node.ends_with("upgrade-done new")).count() < 4 {
        fleet.step();
    }
    fleet.publish("gpu", 20, "new-with-options");
    fleet.live(60);
    let previous = fleet.snapshot.rollouts["gpu-2"].spec.previous.clone().unwrap();
    assert_eq!(previous.version.as_deref(), Some("560.35.03"));
    say(&mut fleet, "gpu-2", false);
    fleet.live(3 * 3600);
    all_back(&fleet);
    assert_eq!(fleet.snapshot.sources.version_of(&source), Some("560.35.03"));
    // Neither rendering of it starts again.
    for (number, hash) in [(30, NEW), (31, "new-again")] {
        fleet.publish("gpu", number, hash);
        fleet.daemon_set_mut().driver_version = Some("565.57.01".parse().unwrap());
        fleet.live(60);
        assert!(fleet.why("gpu-1").starts_with("this version went wrong in rollout gpu-2"), "{hash}");
    }
}

/// Every node was done with the first rendering: that is a version to go back to.
#[test]
fn a_version_that_was_rolled_out_is_what_its_next_rendering_comes_from() {
    let mut fleet = fleet(&json!({}));
    fleet.live(3 * 3600);
    assert_eq!(phases(&fleet), [RolloutPhase::Done]);
    fleet.publish("gpu", 20, "new-with-options");
    fleet.live(60);
    let previous = fleet.snapshot.rollouts["gpu-2"].spec.previous.clone().unwrap();
    assert_eq!(previous.target.values().collect::<Vec<_>>(), [NEW]);
}

/// Its pods did not leave, so nobody ever touched its driver; and they would not leave now either.
#[test]
fn a_node_that_failed_before_its_driver_was_touched_is_not_emptied_on_the_way_back() {
    let mut fleet = fleet(&json!({"onFailure": "Pause"})).budget("web", 1);
    let policy = fleet.snapshot.sources.driver_policies.get_mut("gpu").unwrap();
    policy.upgrade_policy =
        serde_json::from_value(json!({"gpuPodDeletion": {"timeoutSeconds": 60}})).unwrap();
    fleet.put(&CANARY.into(), pod("web-1").label("app", "web"));
    while fleet.verdict(CANARY).state != State::WaitForJobsRequired {
        fleet.step();
    }
    fleet.change_budgets(|budgets| {
        for budget in budgets.values_mut() {
            (budget.allowed, budget.desired) = (0, 3);
        }
    });
    fleet.live(600);
    assert_eq!(fleet.verdict(CANARY).state, State::UpgradeFailed, "{}", fleet.screen());
    let driver = fleet.driver_mut(CANARY).uid.clone();
    say(&mut fleet, "gpu-1", false);
    fleet.live(3600);
    all_back(&fleet);
    assert_eq!(fleet.driver_mut(CANARY).uid, driver, "it has the driver that it had");
    assert_eq!(fleet.told("evict"), [""; 0]);
    assert!(!fleet.node_mut(CANARY).unschedulable);
}

/// All nodes are at their restart, and their gate takes its sample from before: nobody has touched a driver yet.
fn about_to_restart() -> Fleet {
    let gates = json!([{"name": "ecc-errors", "preset": "ecc-errors"}]);
    let mut fleet = fleet(&json!({"gates": gates, "stages": [{"name": "all"}]}));
    fleet.gates.push(("ecc-errors", Sample::Before, PodState::Open { waits: None }));
    fleet.live(30);
    let waits =
        |fleet: &Fleet| nodes(fleet).iter().filter(|node| node.ends_with("pod-restart-required old")).count();
    assert_eq!(waits(&fleet), 6, "{}", fleet.screen());
    fleet
}

/// The sample is there after a while.
fn sample_is_taken(fleet: &mut Fleet) {
    fleet.gates.clear();
    fleet.forget_jobs();
    fleet.live(3600);
}

fn given_back(fleet: &Fleet) {
    assert_eq!(fleet.told("restart gpu-operator"), [""; 0]);
    let waiting = nodes(fleet).into_iter().filter(|node| node.ends_with("upgrade-required old"));
    assert_eq!(waiting.count(), 6, "{}", fleet.screen());
    assert!(fleet.snapshot.nodes.values().all(|node| !node.unschedulable && node.visit.is_none()));
}

#[test]
fn a_driver_that_was_not_told_to_go_yet_is_not_replaced_by_a_version_that_is_taken_back() {
    let mut fleet = about_to_restart();
    fleet.daemon_set_mut().manager = Some("Argo CD (application gpu)".into());
    say(&mut fleet, "gpu-1", false);
    sample_is_taken(&mut fleet);
    given_back(&fleet);
    assert_eq!(phases(&fleet), [RolloutPhase::Halted]);
}

#[test]
fn nor_by_one_whose_rollout_is_aborted() {
    let mut fleet = about_to_restart();
    fleet.snapshot.rollouts.get_mut("gpu-1").unwrap().spec.abort = true;
    sample_is_taken(&mut fleet);
    given_back(&fleet);
    assert_eq!(phases(&fleet), [RolloutPhase::Aborted]);
}

/// The machine boots in that moment: its old driver is not ready for a while, and comes back.
#[test]
fn nor_while_it_comes_up_after_a_boot() {
    let mut fleet = about_to_restart();
    fleet.node_mut("gpu-1").ready = false;
    fleet.driver_mut("gpu-1").ready = false;
    fleet.snapshot.rollouts.get_mut("gpu-1").unwrap().spec.abort = true;
    fleet.live(60);
    fleet.node_mut("gpu-1").ready = true;
    fleet.live(60);
    assert_eq!(fleet.verdict("gpu-1").state, State::PodRestartRequired, "{}", fleet.screen());
    fleet.driver_mut("gpu-1").ready = true;
    sample_is_taken(&mut fleet);
    given_back(&fleet);
}

#[test]
fn a_driver_that_may_have_been_told_to_go_goes() {
    let mut fleet = about_to_restart();
    let pod = fleet.driver_mut("gpu-1").name.clone();
    let retry_at = fleet.snapshot.now;
    fleet.setback(Object::Pod(pod), SetbackKind::Error("no answer".into()), retry_at);
    fleet.snapshot.rollouts.get_mut("gpu-1").unwrap().spec.abort = true;
    sample_is_taken(&mut fleet);
    assert_eq!(nodes(&fleet)[0], "gpu-1 upgrade-done new", "{}", fleet.screen());
    assert_eq!(nodes(&fleet)[1], "gpu-2 upgrade-required old");
}
