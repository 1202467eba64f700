//! Bad plans, made by hand: each breaks one promise, and is caught breaking it.

use serde_json::json;

use super::fixture::*;
use crate::action::{Action, Changes, DeleteWhy, NodePatch, PodRef, RestartDriver, Transition, Users};
use crate::check::{Promise, violations};
use crate::contract::{AGENT_CORDON_ANNOTATION, NEEDS_REBOOT_ANNOTATION, State, VISIT_ANNOTATION};
use crate::names::ObjectName;
use crate::plan::{Plan, plan};
use crate::policy::{Devices, Pattern};
use crate::snapshot::{Object, SetbackKind};

/// What a fleet's own plan breaks, with its actions replaced by these.
fn broken(fleet: &Fleet, actions: Vec<Action>) -> Vec<(Promise, String, usize)> {
    let plan = Plan { actions, ..plan(&fleet.snapshot) };
    let found = violations(&fleet.snapshot, &plan);
    found.into_iter().map(|v| (v.promise, v.node.to_string(), v.action)).collect()
}

fn pod_ref(node: &str, name: &ObjectName) -> PodRef {
    PodRef { name: name.clone(), uid: "uid".into(), node: node.into() }
}

fn evict(node: &str) -> Action {
    Action::Evict(pod_ref(node, &ObjectName::new("work", "train")))
}

fn restart(node: &str) -> Action {
    let pod = pod_ref(node, &ObjectName::new(NAMESPACE, &format!("gpu-driver-{node}")));
    let devices = Devices { resources: vec![Pattern("nvidia.com/gpu*".into())], ..Devices::default() };
    Action::RestartDriver(RestartDriver {
        driver: "gpu".into(),
        pod,
        node_uid: "uid".into(),
        in_place: false,
        users: Users { devices, harmless: vec![] },
    })
}

fn patch(node: &str, from: State, to: State) -> NodePatch {
    NodePatch {
        node: node.into(),
        pool: POOL.into(),
        seen: 1.into(),
        labels: Changes::from((keys("gpu").state.as_str(), Some(to.as_str().to_owned()))),
        annotations: Changes::default(),
        unschedulable: None,
        taints: None,
        to: Some(Transition { driver: "gpu".into(), from, to }),
        event: None,
        unless_used: None,
    }
}

fn start(node: &str) -> Action {
    Action::PatchNode(patch(node, State::UpgradeRequired, State::CordonRequired))
}

fn uncordon(node: &str) -> Action {
    let patch = patch(node, State::UncordonRequired, State::UpgradeDone);
    Action::PatchNode(NodePatch { unschedulable: Some(false), ..patch })
}

#[test]
fn pods_are_taken_off_only_nodes_that_are_ours_and_cordoned() {
    let with_pod = |node: NodeSpec| Fleet::new().with(node.outdated().pod(pod("train")));
    let ours = with_pod(node("n").at(State::PodDeletionRequired));
    assert_eq!(broken(&ours, vec![evict("n")]), []);
    let bad = [(Promise::OnlyOwnNodes, "n".to_owned(), 0)];
    assert_eq!(broken(&with_pod(node("n").at(State::UpgradeRequired)), vec![evict("n")]), bad, "no visit");
    assert_eq!(broken(&with_pod(node("n").cordoned()), vec![evict("n")]), bad, "somebody else's cordon");
    assert_eq!(
        broken(&with_pod(node("n").at(State::DrainRequired).uncordoned()), vec![evict("n")]),
        bad,
        "uncordoned"
    );
    let delete = Action::Delete(pod_ref("n", &ObjectName::new("work", "train")), DeleteWhy::TimedOut);
    assert_eq!(broken(&with_pod(node("n")), vec![delete]), bad);
    assert_eq!(broken(&Fleet::new().with(node("n").outdated()), vec![restart("n")]), bad);
}

#[test]
fn nothing_is_done_to_nodes_of_no_pool() {
    let mut fleet =
        Fleet::new().with(node("ours").outdated().at(State::PodDeletionRequired)).with(node("db"));
    fleet.node_mut("db").set_label("gpu", None);
    fleet.remove_pods("db", |_| true);
    let bad = [(Promise::OnlyOwnNodes, "db".to_owned(), 0)];
    assert_eq!(broken(&fleet, vec![evict("db")]), bad);
    assert_eq!(broken(&fleet, vec![start("db")]), bad);
    assert_eq!(broken(&fleet, vec![restart("gone")]), [(Promise::OnlyOwnNodes, "gone".to_owned(), 0)]);
    let foreign_pool =
        NodePatch { pool: "nobody".into(), ..patch("ours", State::Unknown, State::UpgradeDone) };
    assert_eq!(
        broken(&fleet, vec![Action::PatchNode(foreign_pool)]),
        [(Promise::OnlyOwnNodes, "ours".to_owned(), 0)]
    );
}

#[test]
fn only_our_own_cordon_is_lifted_and_only_after_validation() {
    let bad = [(Promise::OnlyOwnCordon, "n".to_owned(), 0)];
    let fleet = |node: NodeSpec| Fleet::new().with(node);
    assert_eq!(broken(&fleet(node("n").at(State::UncordonRequired)), vec![uncordon("n")]), []);
    let foreign = node("n").at(State::UncordonRequired).visit(|visit| visit.holds.cordon = false);
    assert_eq!(broken(&fleet(foreign), vec![uncordon("n")]), bad, "somebody else's cordon");
    assert_eq!(broken(&fleet(node("n").cordoned()), vec![uncordon("n")]), bad, "no visit");
    let manager = |spec: NodeSpec| spec.annotation(AGENT_CORDON_ANNOTATION, "{}");
    let adopted = node("n").at(State::UncordonRequired).visit(|visit| visit.holds.cordon = false);
    assert_eq!(broken(&fleet(manager(adopted)), vec![uncordon("n")]), [], "the driver manager's");
    assert_eq!(broken(&fleet(manager(node("n").cordoned())), vec![uncordon("n")]), bad, "for finish to lift");
    let half = node("n").at(State::UncordonRequired).annotation(NEEDS_REBOOT_ANNOTATION, "half");
    assert_eq!(broken(&fleet(half), vec![uncordon("n")]), bad, "it needs a reboot");
    for state in [State::PodRestartRequired, State::ValidationRequired, State::UpgradeFailed] {
        assert_eq!(broken(&fleet(node("n").at(state)), vec![uncordon("n")]), bad, "{state}");
    }
}

#[test]
fn no_start_exceeds_either_limit() {
    let fleet = |options| Fleet::new().policy(options).nodes(4, |n| n.outdated().at(State::UpgradeRequired));
    let starts = || vec![start("gpu-1"), start("gpu-2"), start("gpu-3")];
    let too_many = |nodes: &[usize]| -> Vec<_> {
        nodes.iter().map(|i| (Promise::WithinLimits, format!("gpu-{i}"), i - 1)).collect()
    };
    assert_eq!(broken(&fleet(json!({"maxParallelUpgrades": 3, "maxUnavailable": 3})), starts()), []);
    assert_eq!(
        broken(&fleet(json!({"maxParallelUpgrades": 2, "maxUnavailable": 3})), starts()),
        too_many(&[3])
    );
    assert_eq!(
        broken(&fleet(json!({"maxParallelUpgrades": 0, "maxUnavailable": 1})), starts()),
        too_many(&[2, 3])
    );
    assert_eq!(broken(&fleet(json!({"maxUnavailable": 0})), vec![start("gpu-1")]), too_many(&[1]));

    let moving = |state| {
        Fleet::new()
            .policy(json!({"maxUnavailable": "100%"}))
            .with(node("gpu-1").outdated().at(State::UpgradeRequired))
            .with(node("other").outdated().at(state))
    };
    assert_eq!(broken(&moving(State::ValidationRequired), vec![start("gpu-1")]), too_many(&[1]), "recorded");
    assert_eq!(broken(&moving(State::CordonRequired), vec![start("gpu-1")]), too_many(&[1]), "labelled");
    assert_eq!(broken(&moving(State::UpgradeFailed), vec![start("gpu-1")]), [], "failed nodes do not move");
}

#[test]
fn nodes_that_others_took_out_leave_less_room() {
    let fleet = Fleet::new()
        .policy(json!({"maxParallelUpgrades": 0, "maxUnavailable": 1}))
        .nodes(2, |n| n.outdated().at(State::UpgradeRequired))
        .with(node("down").not_ready());
    assert_eq!(broken(&fleet, vec![start("gpu-1")]), [(Promise::WithinLimits, "gpu-1".to_owned(), 0)]);
}

#[test]
fn no_driver_restarts_under_running_work() {
    let at_restart = || node("n").outdated().at(State::PodRestartRequired);
    assert_eq!(broken(&Fleet::new().with(at_restart()), vec![restart("n")]), []);
    let bad = [(Promise::NobodyOnTheDevice, "n".to_owned(), 0)];
    assert_eq!(broken(&Fleet::new().with(at_restart().pod(pod("train"))), vec![restart("n")]), bad);
    assert_eq!(broken(&Fleet::new().with(at_restart().pod(pod("train").leaving())), vec![restart("n")]), bad);
    let finished = pod("train").phase(crate::snapshot::Phase::Succeeded);
    assert_eq!(broken(&Fleet::new().with(at_restart().pod(finished)), vec![restart("n")]), []);
}

#[test]
fn a_paused_pool_only_notes_its_pause() {
    let fleet = Fleet::new()
        .policy(json!({"autoUpgrade": false}))
        .with(node("n").outdated().at(State::PodDeletionRequired).pod(pod("train")));
    let bad = [(Promise::StandsStill, "n".to_owned(), 0)];
    assert_eq!(broken(&fleet, vec![evict("n")]), bad);
    let moved = patch("n", State::PodDeletionRequired, State::DrainRequired);
    assert_eq!(broken(&fleet, vec![Action::PatchNode(moved.clone())]), bad);
    let note = NodePatch {
        to: None,
        labels: Changes::default(),
        annotations: Changes::from((VISIT_ANNOTATION, Some("{}".to_owned()))),
        ..moved
    };
    assert_eq!(broken(&fleet, vec![Action::PatchNode(note.clone())]), []);
    let cordon = NodePatch { unschedulable: Some(true), ..note.clone() };
    assert_eq!(broken(&fleet, vec![Action::PatchNode(cordon)]), bad);
    let label = NodePatch { labels: Changes::from((keys("gpu").state.as_str(), None)), ..note.clone() };
    assert_eq!(broken(&fleet, vec![Action::PatchNode(label)]), bad);
    let wipe = NodePatch { annotations: Changes::from((VISIT_ANNOTATION, None)), ..note };
    assert_eq!(broken(&fleet, vec![Action::PatchNode(wipe)]), bad);
}

#[test]
fn a_frozen_pool_does_not_even_do_that() {
    let mut fleet = Fleet::new().with(node("n").outdated().at(State::PodDeletionRequired));
    fleet.snapshot.gpu_operator.deployments.insert("gpu-operator".into());
    let note = NodePatch {
        to: None,
        labels: Changes::default(),
        annotations: Changes::from((VISIT_ANNOTATION, Some("{}".to_owned()))),
        ..patch("n", State::PodDeletionRequired, State::PodDeletionRequired)
    };
    assert_eq!(broken(&fleet, vec![Action::PatchNode(note)]), [(Promise::StandsStill, "n".to_owned(), 0)]);
}

#[test]
fn every_promise_has_its_number_and_its_words() {
    let all = [
        Promise::OnlyOwnNodes,
        Promise::OnlyOwnCordon,
        Promise::WithinLimits,
        Promise::NobodyOnTheDevice,
        Promise::StandsStill,
    ];
    let numbers: Vec<String> =
        all.iter().map(|p| p.to_string().split(' ').next().unwrap().to_owned()).collect();
    assert_eq!(numbers, ["S1", "S2", "S3", "S4", "S9"]);
}

#[test]
fn a_driver_that_waits_is_not_loaded_under_work() {
    let lift = |node: &str| {
        let patch = patch(node, State::PodRestartRequired, State::PodRestartRequired);
        let annotations = Changes::from((keys("gpu").safe_load.as_str(), None));
        Action::PatchNode(NodePatch { labels: Changes::default(), annotations, to: None, ..patch })
    };
    let at_restart = |name: &str| node(name).at(State::PodRestartRequired);
    let fleet = Fleet::new().with(at_restart("busy").pod(pod("train"))).with(at_restart("empty"));
    let found = broken(&fleet, vec![lift("busy"), lift("empty")]);
    assert_eq!(found, [(Promise::NobodyOnTheDevice, "busy".to_owned(), 0)]);
}

#[test]
fn a_node_whose_driver_was_replaced_is_not_given_back_unproven() {
    let give_back = |node: &str| {
        let patch = patch(node, State::PodDeletionRequired, State::UpgradeRequired);
        Action::PatchNode(NodePatch { unschedulable: Some(false), ..patch })
    };
    let emptied = |name: &str| node(name).at(State::PodDeletionRequired);
    let mut fleet = Fleet::new().with(emptied("new")).with(emptied("old"));
    fleet.driver_mut("new").created = fleet.snapshot.now;
    let found = broken(&fleet, vec![give_back("new"), give_back("old")]);
    assert_eq!(found, [(Promise::OnlyOwnCordon, "new".to_owned(), 0)]);
}

/// A fleet whose DriverPolicy says this about rollouts; its pool has the name that the bad plans use.
#[expect(clippy::needless_pass_by_value, reason = "values are written at the call")]
fn under(rollout: serde_json::Value) -> Fleet {
    let options = json!({"maxParallelUpgrades": 0, "maxUnavailable": "100%"});
    let spec = json!({"driver": {"name": "gpu"}, "upgradePolicy": options, "rollout": rollout});
    Fleet::without_policy().driver_policy(POOL, spec)
}

#[test]
fn no_part_of_an_atom_starts() {
    let rack = |node: NodeSpec| node.label("rack", "r");
    let due = |name: &str| rack(node(name).outdated().at(State::UpgradeRequired));
    let fleet = || under(json!({"topology": {"atom": "rack"}})).with(due("a")).with(due("b"));
    assert_eq!(broken(&fleet(), vec![start("a"), start("b")]), []);
    let bad = [(Promise::WholeAtoms, "a".to_owned(), 0)];
    assert_eq!(broken(&fleet(), vec![start("a")]), bad);
    assert_eq!(broken(&fleet().with(rack(node("c").outdated())), vec![start("a"), start("b")]).len(), 2);
    for apart in [
        rack(node("c")),
        rack(node("c").outdated().skipped()),
        rack(node("c").outdated().at(State::UpgradeFailed)),
        node("c").outdated(),
    ] {
        assert_eq!(broken(&fleet().with(apart), vec![start("a"), start("b")]), []);
    }
    let under_way = rack(node("c").outdated().at(State::DrainRequired));
    assert_eq!(broken(&fleet().with(under_way), vec![start("a")]), [], "what is begun is finished");
    let loads = rack(node("c").at(State::UpgradeRequired).annotation(&keys("gpu").safe_load, "true"));
    assert_eq!(broken(&fleet().with(loads), vec![start("c")]), [], "it has no driver at all");
}

#[test]
fn nothing_starts_outside_of_a_window() {
    let due = || node("n").outdated().at(State::UpgradeRequired);
    let fleet = |start: &str| under(json!({"windows": [{"start": start, "duration": "1h"}]})).with(due());
    assert_eq!(broken(&fleet("12:00"), vec![start("n")]), []);
    assert_eq!(broken(&fleet("13:00"), vec![start("n")]), [(Promise::InWindows, "n".to_owned(), 0)]);
    let loads = node("m").at(State::UpgradeRequired).annotation(&keys("gpu").safe_load, "true");
    assert_eq!(broken(&fleet("13:00").with(loads), vec![start("m")]), []);
    let told = node("t").outdated().at(State::CordonRequired);
    let take = || {
        let annotations = Changes::from((VISIT_ANNOTATION, Some("{}".to_owned())));
        let patch = patch("t", State::CordonRequired, State::WaitForJobsRequired);
        vec![Action::PatchNode(NodePatch { annotations, unschedulable: Some(true), ..patch })]
    };
    assert_eq!(broken(&fleet("12:00").with(told.clone()), take()), []);
    let late = [(Promise::InWindows, "t".to_owned(), 0)];
    assert_eq!(broken(&fleet("13:00").with(told), take()), late, "whenever it was told to");
}

#[test]
fn nothing_starts_before_its_stage_is_open_or_on_a_version_that_was_taken_back() {
    let due = |name: &str| node(name).outdated().at(State::UpgradeRequired);
    let stages = json!([{"name": "canary", "nodeSelector": {"first": "yes"}}]);
    let mut fleet =
        under(json!({"stages": stages})).with(due("a").label("first", "yes")).with(due("b")).with(due("c"));
    let early = |name: &str| vec![(Promise::InOpenStages, name.to_owned(), 0)];
    assert_eq!(broken(&fleet, vec![start("a")]), []);
    assert_eq!(broken(&fleet, vec![start("b")]), early("b"));
    fleet.settle();
    let name = fleet.snapshot.rollouts.keys().next().unwrap().clone();
    assert_eq!(broken(&fleet, vec![start("b")]), early("b"), "the canary is watched at work");
    let rollout = |fleet: &mut Fleet, change: &dyn Fn(&mut crate::snapshot::Rollout)| {
        change(fleet.snapshot.rollouts.get_mut(&name).unwrap());
    };
    let mut open = fleet.clone();
    rollout(&mut open, &|rollout| {
        rollout.status.as_mut().unwrap().stages[0].phase = crate::api::StagePhase::Passed;
    });
    assert_eq!(broken(&open, vec![start("b")]), []);
    rollout(&mut open, &|rollout| {
        let at = crate::api::stamp(noon());
        rollout.spec.rollback = Some(crate::api::Word { by: "mei".into(), at, why: None });
    });
    assert_eq!(broken(&open, vec![start("b")]), [(Promise::NotTakenBack, "b".to_owned(), 0)]);
}

#[test]
fn the_documented_label_is_a_stage_too() {
    let due = |name: &str| node(name).outdated().at(State::UpgradeRequired);
    let mut fleet = Fleet::new().with(due("a").label("gpu-canary", "true")).with(due("b"));
    assert_eq!(broken(&fleet, vec![start("a")]), []);
    assert_eq!(broken(&fleet, vec![start("b")]), [(Promise::InOpenStages, "b".to_owned(), 0)]);
    fleet.node_mut("b").set_label("gpu-canary", Some("true"));
    assert_eq!(broken(&fleet, vec![start("b")]), []);
}

#[test]
fn no_start_takes_more_of_a_group_out_than_agreed() {
    let zoned = |name: &str| node(name).outdated().at(State::UpgradeRequired).label("zone", "z");
    let fleet = || {
        under(json!({"topology": {"spread": {"label": "zone", "max": 1}}})).with(zoned("a")).with(zoned("b"))
    };
    assert_eq!(broken(&fleet(), vec![start("a")]), []);
    let bad = |name: &str, place| [(Promise::WithinLimits, name.to_owned(), place)];
    assert_eq!(broken(&fleet(), vec![start("a"), start("b")]), bad("b", 1));
    assert_eq!(broken(&fleet().with(zoned("c").not_ready()), vec![start("a")]), bad("a", 0));
    assert_eq!(
        broken(&fleet().with(node("c").cordoned()), vec![start("a")]),
        [],
        "of another group, or of none"
    );
    assert_eq!(broken(&fleet().with(zoned("c").cordoned()), vec![start("c")]), [], "it is out already");
}

#[test]
fn the_old_driver_is_not_replaced_by_a_version_that_was_taken_back() {
    let mut fleet = under(json!({})).with(node("n").outdated().at(State::PodRestartRequired));
    fleet.driver_mut("n").uid = "uid".into();
    fleet.abort_rollouts();
    assert_eq!(broken(&fleet, vec![restart("n")]), [], "nobody has taken it back");
    let rollout = fleet.snapshot.rollouts.values_mut().next().unwrap();
    let at = crate::api::stamp(noon());
    rollout.spec.rollback = Some(crate::api::Word { by: "mei".into(), at, why: None });
    let bad = [(Promise::NotTakenBack, "n".to_owned(), 0)];
    assert_eq!(broken(&fleet, vec![restart("n")]), bad);
    let mut gone = fleet.clone();
    gone.driver_mut("n").ready = false;
    assert_eq!(broken(&gone, vec![restart("n")]), [], "it does not work");
    let mut told = fleet.clone();
    let pod = told.driver_mut("n").name.clone();
    told.setback(Object::Pod(pod), SetbackKind::Error("no answer".into()), after(5));
    assert_eq!(broken(&told, vec![restart("n")]), [], "it may have been told to go already");
    fleet.driver_mut("n").created = fleet.snapshot.now;
    assert_eq!(broken(&fleet, vec![restart("n")]), [], "it came in this visit");
}
