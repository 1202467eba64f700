//! The way back in a pool with several DaemonSets, one for each kernel: some of them change, others do not.

use serde_json::json;

use super::fixture::*;
use super::rollbacks::{nodes, phases, say, touched};
use crate::api::RolloutPhase;
use crate::policy::Source;
use crate::snapshot::{Object, SetbackKind};
use crate::version::DriverVersion;

const CANARY: &str = "gpu-3";
/// The second DaemonSet.
const OTHER: &str = "gpu-other";

/// Who says which version a DaemonSet has.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Renderer {
    Nobody,
    /// An object for each.
    Operator,
}

/// A pool with two DaemonSets: `gpu` changes from the old to the new version on four nodes, of which one goes first. The other
/// one, of this name, is meant for kernel b.
fn two_sets(name: &str) -> Fleet {
    let policy = json!({
        "driver": {"name": "gpu", "daemonSets": {"namespace": NAMESPACE, "selector": "driver"}},
        "upgradePolicy": {"maxParallelUpgrades": 0, "maxUnavailable": "100%"},
        "rollout": {"stages": [{"name": "canary", "nodeSelector": {"first": "yes"}, "bake": {"duration": "1h"}}]},
    });
    let mut fleet = Fleet::without_policy().driver_policy("gpu", policy).daemon_set(OTHER, name);
    for (driver, kernel) in [("gpu", "a"), (OTHER, "b")] {
        let set = fleet.label_daemon_sets(driver, "driver");
        set.node_selector.insert("kernel".to_owned(), kernel.to_owned());
    }
    let mut fleet =
        (1..=4).fold(fleet, |fleet, n| fleet.with(node(&format!("gpu-{n}")).label("kernel", "a").outdated()));
    fleet.node_mut(CANARY).set_label("first", Some("yes"));
    fleet
}

/// Two nodes of the other kernel run this revision, which stays the newest of theirs.
fn beside_an_unchanged(name: &str, revision: &'static str, renderer: Renderer) -> Fleet {
    let mut fleet = two_sets(name);
    fleet.publish(OTHER, 3, revision);
    let version = if revision == OLD { "560.35.03" } else { "565.57.01" };
    fleet.daemon_set_of(OTHER).driver_version = Some(version.parse().unwrap());
    let runs = |node: NodeSpec| if revision == OLD { node.outdated() } else { node };
    let mut fleet =
        (5..=6).fold(fleet, |fleet, n| fleet.with(runs(node(&format!("gpu-{n}")).label("kernel", "b"))));
    if renderer == Renderer::Operator {
        for (driver, source, version) in [("gpu", "a", "565.57.01"), (OTHER, "b", version)] {
            fleet.daemon_set_of(driver).rendered_by = Some(Source::NvidiaDriver(source.to_owned()));
            fleet.snapshot.sources.nvidia_driver_versions.insert(source.to_owned(), version.to_owned());
        }
    }
    fleet
}

/// Somebody asks for a version of the DaemonSet that changes.
fn ask(fleet: &mut Fleet, renderer: Renderer, number: i64, hash: &str, version: &str) {
    fleet.publish("gpu", number, hash);
    fleet.daemon_set_mut().driver_version = Some(version.parse::<DriverVersion>().unwrap());
    if renderer == Renderer::Operator {
        fleet.snapshot.sources.nvidia_driver_versions.insert("a".to_owned(), version.to_owned());
    }
}

/// So many nodes are done with this revision.
fn done(fleet: &Fleet, revision: &str) -> usize {
    nodes(fleet).iter().take(4).filter(|node| node.ends_with(&format!("upgrade-done {revision}"))).count()
}

#[test]
fn a_daemon_set_that_does_not_change_is_no_part_of_the_way_back() {
    for renderer in [Renderer::Nobody, Renderer::Operator] {
        for (name, revision) in [("a-first", OLD), ("a-first", NEW), ("z-last", OLD), ("z-last", NEW)] {
            let told = format!("{renderer:?} {name} {revision}");
            let mut fleet = beside_an_unchanged(name, revision, renderer);
            fleet.crashes_on.insert(CANARY.to_owned());
            fleet.live(3 * 3600);
            assert_eq!(phases(&fleet), [RolloutPhase::RolledBack, RolloutPhase::Done], "{told}");
            assert_eq!(fleet.snapshot.rollouts["gpu-2"].spec.rollback_of.as_deref(), Some("gpu-1"), "{told}");
            assert_eq!(done(&fleet, OLD), 4, "{told}: {}", fleet.screen());

            // The next version is no part of it either.
            fleet.crashes_on.clear();
            ask(&mut fleet, renderer, 20, "newer", "570.86.15");
            fleet.live(3 * 3600);
            assert_eq!(done(&fleet, "newer"), 4, "{told}: {}", fleet.screen());
            assert_eq!(fleet.snapshot.rollouts["gpu-3"].spec.rollback_of, None, "{told}");

            // What went wrong stays condemned until a person clears it, whatever its template.
            for hash in [NEW, "new-again"] {
                let number = fleet.snapshot.revisions.values().map(|r| r.number).max().unwrap() + 1;
                ask(&mut fleet, renderer, number, hash, "565.57.01");
                fleet.live(3 * 3600);
                assert_eq!(done(&fleet, hash), 0, "{told}: {}", fleet.screen());
                assert!(fleet.why("gpu-1").starts_with("this version went wrong in rollout gpu-1"), "{told}");
            }
            say(&mut fleet, "gpu-1", true);
            fleet.live(3 * 3600);
            assert_eq!(done(&fleet, "new-again"), 4, "{told}: {}", fleet.screen());
            let others = (5..=6).map(|n| format!("gpu-{n}"));
            assert_eq!(others.filter(|node| touched(&fleet, node)).count(), 0, "{told}");
        }
    }
}

#[test]
fn each_object_gets_back_the_version_that_it_had() {
    let mut fleet = beside_an_unchanged("z-last", OLD, Renderer::Operator);
    // The other kernel changes too, from another version.
    let revision = |fleet: &mut Fleet, hash: &str, version: &str| {
        let found = fleet
            .snapshot
            .revisions
            .values_mut()
            .find(|r| r.owner.as_str().contains(OTHER) && r.hash.as_str() == hash);
        found.unwrap().driver_version = Some(version.parse().unwrap());
    };
    fleet.publish(OTHER, 9, NEW);
    fleet.daemon_set_of(OTHER).driver_version = Some("565.57.01".parse().unwrap());
    fleet.snapshot.sources.nvidia_driver_versions.insert("b".to_owned(), "565.57.01".to_owned());
    revision(&mut fleet, OLD, "550.54.14");
    fleet.live(1800);
    say(&mut fleet, "gpu-1", false);
    fleet.live(60);
    let versions = &fleet.snapshot.sources.nvidia_driver_versions;
    assert_eq!((versions["a"].as_str(), versions["b"].as_str()), ("560.35.03", "550.54.14"));
}

/// One of two DaemonSets is back, the other one could not be written yet, and a GPU Operator shows up for a moment.
#[test]
fn a_version_that_is_back_in_a_part_of_the_pool_is_put_back_in_the_rest_after_a_freeze() {
    let mut fleet = beside_an_unchanged("z-last", OLD, Renderer::Nobody);
    fleet.publish(OTHER, 9, NEW);
    fleet.daemon_set_of(OTHER).driver_version = Some("565.57.01".parse().unwrap());
    fleet.live(1800);
    let refused = Object::DaemonSet(fleet.daemon_set_of(OTHER).name.clone());
    let later = fleet.snapshot.now + jiff::SignedDuration::from_mins(5);
    fleet.setback(refused.clone(), SetbackKind::Error("no".into()), later);
    say(&mut fleet, "gpu-1", false);
    while fleet.told("daemonset -> old").is_empty() {
        fleet.step();
    }
    fleet.snapshot.gpu_operator.deployments.insert("gpu-operator".into());
    fleet.step();
    assert_eq!(phases(&fleet), [RolloutPhase::Frozen]);
    fleet.snapshot.gpu_operator.deployments.clear();
    fleet.snapshot.setbacks.remove(&refused);
    fleet.live(3 * 3600);
    assert_eq!(fleet.told("z-last -> old").len(), 1, "{}", fleet.story.join("\n"));
    assert_eq!(phases(&fleet), [RolloutPhase::RolledBack, RolloutPhase::Done]);
    assert!(nodes(&fleet).iter().all(|node| node.ends_with("upgrade-done old")), "{}", fleet.screen());
}

#[test]
fn a_daemon_set_without_any_pod_goes_back_with_the_others() {
    let mut fleet = two_sets("a-first");
    fleet.live(3 * 3600);
    assert_eq!((done(&fleet, NEW), phases(&fleet)), (4, vec![RolloutPhase::Done]));
    for driver in ["gpu", OTHER] {
        fleet.publish(driver, 20, "newer");
    }
    fleet.live(1800);
    say(&mut fleet, "gpu-2", false);
    fleet.live(3600);
    assert_eq!(done(&fleet, NEW), 4, "{}", fleet.screen());
    let target = &fleet.snapshot.rollouts["gpu-3"].spec.target;
    assert_eq!(target.values().map(String::as_str).collect::<Vec<_>>(), [NEW, NEW]);
}

/// Only the DaemonSet of kernel a changes, to a version that is newer still; then it is taken back.
fn taken_back_again(fleet: &mut Fleet) {
    fleet.live(3 * 3600);
    ask(fleet, Renderer::Nobody, 20, "newer", "570.86.15");
    fleet.live(1800);
    say(fleet, "gpu-2", false);
    fleet.live(3 * 3600);
}

#[test]
fn a_straggler_does_not_make_a_change_of_what_was_rolled_out_before() {
    let mut fleet = beside_an_unchanged("z-last", NEW, Renderer::Nobody)
        .with(node("gpu-7").label("kernel", "b").outdated().skipped());
    taken_back_again(&mut fleet);
    let previous = fleet.snapshot.rollouts["gpu-2"].spec.previous.clone().unwrap();
    assert_eq!(previous.target.keys().collect::<Vec<_>>(), ["nvidia-driver-daemonset"]);
    assert_eq!(done(&fleet, NEW), 4, "{}", fleet.screen());
    let others = (5..=7).map(|n| format!("gpu-{n}"));
    assert_eq!(others.filter(|node| touched(&fleet, node)).count(), 0);
}

/// Kernel a has the version on most nodes, and then the driver of kernel b is rendered again: that ends nothing for kernel a.
#[test]
fn a_change_of_one_daemon_set_does_not_forget_where_another_one_came_from() {
    let mut fleet = beside_an_unchanged("z-last", NEW, Renderer::Nobody);
    fleet.live(1800);
    fleet.snapshot.rollouts.get_mut("gpu-1").unwrap().spec.promotions.push(crate::api::StagePromotion {
        stage: "canary".into(),
        by: "mei".into(),
        at: crate::api::stamp(fleet.snapshot.now),
        skip_bake: true,
    });
    fleet.node_mut("gpu-4").set_label(&keys("gpu").skip, Some("true"));
    while done(&fleet, NEW) < 3 {
        fleet.step();
    }
    fleet.publish(OTHER, 30, "new-again");
    fleet.live(60);
    let previous = fleet.snapshot.rollouts["gpu-2"].spec.previous.clone().unwrap();
    assert_eq!(previous.target.values().collect::<Vec<_>>(), [OLD, NEW]);
    assert_eq!(previous.version.as_deref(), Some("560.35.03"));
}

#[test]
fn the_version_before_is_what_most_nodes_ran() {
    let mut fleet = beside_an_unchanged("a-first", NEW, Renderer::Nobody);
    for (driver, number) in [("gpu", 20), (OTHER, 21)] {
        fleet.publish(driver, number, "newer");
        fleet.daemon_set_of(driver).driver_version = Some("570.86.15".parse().unwrap());
    }
    fleet.live(600);
    let spec = &fleet.snapshot.rollouts["gpu-1"].spec;
    assert_eq!(spec.previous.as_ref().unwrap().version.as_deref(), Some("560.35.03"));
    assert_eq!(spec.version.as_deref(), Some("570.86.15"));
}

#[test]
fn an_unchanged_daemon_set_that_is_rendered_again_does_not_stop_the_way_back() {
    // Right after somebody has taken the version back, or when it has been put back.
    for seconds in [0, 2, 60] {
        // It ran the version that went wrong elsewhere all the time.
        let mut fleet = beside_an_unchanged("z-last", NEW, Renderer::Nobody);
        let version = "565.57.01".parse::<DriverVersion>().unwrap();
        for revision in fleet.snapshot.revisions.values_mut() {
            let unchanged = revision.owner.as_str().contains(OTHER) && revision.hash.as_str() == NEW;
            revision.driver_version = Some(version.clone()).filter(|_| unchanged);
        }
        fleet.live(1800);
        say(&mut fleet, "gpu-1", false);
        fleet.live(seconds);
        fleet.publish(OTHER, 30, "rendered-again");
        fleet.live(3 * 3600);
        assert_eq!(done(&fleet, OLD), 4, "{seconds}: {}", fleet.screen());
        assert_eq!(fleet.snapshot.rollouts["gpu-2"].spec.rollback_of.as_deref(), Some("gpu-1"));
    }
}
