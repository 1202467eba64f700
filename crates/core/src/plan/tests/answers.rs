//! Every reason has an answer: who is responsible, what happens next, what a person can do.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde_json::{Value, json};

use super::fixture::*;
use crate::clients::ClientKind;
use crate::contract::{
    AGENT_CORDON_ANNOTATION, HEALTH_HOLD_ANNOTATION, MATRIX_KEY, NEEDS_REBOOT_ANNOTATION, State, nvsentinel,
};
use crate::health::{HealthHold, Owner, Shield};
use crate::matrix::Files;
use crate::names::{NodeName, ObjectName};
use crate::policy;
use crate::reason::{About, Motion, Reason, advice, culprits, next};
use crate::snapshot::{NvSentinel, Object, SetbackKind};
use crate::visit::{Cause, Failure, Finding};

/// A fleet of one node `n`, and what is special about it.
type Case = (&'static str, Fleet);

/// What a driver manager says of a driver that it could unload only in part.
const HALF: &str = r#"{"boot":"boot-1","why":"half of it is gone"}"#;

fn required() -> NodeSpec {
    node("n").outdated().labelled(State::UpgradeRequired)
}

fn at(state: State) -> NodeSpec {
    node("n").outdated().at(state)
}

fn but(mut fleet: Fleet, change: impl FnOnce(&mut Fleet)) -> Fleet {
    change(&mut fleet);
    fleet
}

fn kept() -> NodeSpec {
    let hold = HealthHold {
        owner: Owner::Visit,
        shield: Shield::Quarantine,
        since: after(-60),
        until: None,
        before: None,
    };
    let failed = node("n").at(State::UpgradeFailed).label(nvsentinel::OPT_OUT_LABEL, "false");
    failed.annotation(HEALTH_HOLD_ANNOTATION, &hold.to_text())
}

fn not_ready(fleet: &mut Fleet) {
    let driver = fleet.driver_mut("n");
    (driver.ready, driver.started) = (false, None);
}

fn no_driver_pod(fleet: &mut Fleet) {
    fleet.remove_pods("n", |pod| pod.name.name.contains("driver"));
}

fn on_the_way_back() -> Case {
    let mut fleet = Fleet::new().with(node("n").outdated().skipped()).with(node("m").outdated());
    fleet.settle();
    fleet.node_mut("n").set_label(&keys("gpu").skip, None);
    super::rollbacks::say(&mut fleet, "cluster-policy-1", false);
    fleet.renders = Some("old-again");
    fleet.live(3600);
    ("left alone on the way back", fleet)
}

fn left_behind() -> Case {
    let only_two = Fleet::new().with(node("m").outdated()).with(node("n").outdated().skipped());
    let mut fleet = only_two.with(node("o").outdated());
    fleet.settle();
    fleet.publish("gpu", 9, "newer");
    fleet.daemon_set_mut().driver_version = Some("570.86.15".parse().unwrap());
    fleet.crashes_on.insert("m".to_owned());
    fleet.live(3600);
    super::rollbacks::say(&mut fleet, "cluster-policy-2", false);
    fleet.node_mut("n").set_label(&keys("gpu").skip, None);
    fleet.live(3600);
    ("left alone by a way back that is not over", fleet)
}

#[expect(clippy::too_many_lines, reason = "a table")]
fn before_a_visit() -> Vec<Case> {
    let only = |node| Fleet::new().with(node);
    let claim = json!({"driver": {"name": "gpu"}});
    vec![
        ("up to date", only(node("n"))),
        ("driver pod not ready", but(only(node("n")), not_ready)),
        ("about to start", only(required())),
        ("new template not taken up", but(only(required()), |f| f.daemon_set_mut().observed_generation = 1)),
        ("no driver pod", but(only(required()), no_driver_pod)),
        (
            "no driver pod, and none is meant for it",
            but(only(node("n").at(State::PodRestartRequired)), |f| {
                no_driver_pod(f);
                f.node_mut("n").set_label("gpu", None);
            }),
        ),
        ("no slot, parallel", only(required()).with(node("m").outdated().at(State::DrainRequired))),
        ("no slot, cordoned elsewhere", only(required()).with(node("m").cordoned())),
        ("no slot, not ready elsewhere", only(required()).with(node("m").not_ready())),
        ("no slot for all that go together", in_racks(2).with(walking("x"))),
        ("an atom is held", in_racks(2).with(rack("z").pod(pod("shell").bare()))),
        ("an atom is held for a moment", in_racks(2).with(node("z").outdated().label("rack", "r"))),
        ("an atom is too large in parallel", in_racks(1)),
        ("an atom is too large to be out", but(in_racks(0), |f| max_unavailable(f, 1))),
        ("a group is full", in_zones(json!({"spread": {"label": "rack", "max": 1}}))),
        (
            "an atom is too large for its group",
            in_zones(json!({"atom": "gpu", "spread": {"label": "rack", "max": 1}})),
        ),
        ("a window opens later", windows(json!({"windows": [{"start": "22:00", "duration": "4h"}]}))),
        (
            "a window closes soon",
            windows(
                json!({"windows": [{"start": "12:00", "duration": "20m"}, {"start": "22:00", "duration": "4h"}]}),
            ),
        ),
        ("no window is long enough", windows(json!({"windows": [{"start": "22:00", "duration": "10m"}]}))),
        ("no version matrix", in_matrix(None)),
        ("not in the version matrix", in_matrix(Some("versions: {current: {driver: '560.35.03'}}"))),
        (
            "no version to look for",
            but(in_matrix(Some(MATRIX)), |f| f.daemon_set_mut().driver_version = None),
        ),
        ("skipped", only(required().skipped())),
        (
            "a stale client in service",
            but(only(node("n")), |f| f.put_client("n", "dcgm", Some(ClientKind::Operand), after(-9000))),
        ),
        ("node not Ready", only(required().not_ready())),
        ("node needs a reboot", only(required().annotation(NEEDS_REBOOT_ANNOTATION, HALF))),
        (
            "no slot, cordoned by a driver manager elsewhere",
            but(only(required()).with(node("m").cordoned().annotation(AGENT_CORDON_ANNOTATION, "{}")), |f| {
                f.driver_mut("m").ready = false;
            }),
        ),
        ("somebody wants a reboot", only(required().annotation(NEEDS_REBOOT_ANNOTATION, "flashed"))),
        (
            "in quarantine",
            but(only(required().label(nvsentinel::STATE_LABEL, "draining")), |f| sentinel(f, false)),
        ),
        ("the breaker has tripped", but(only(required()), |f| sentinel(f, true))),
        ("pod without controller", only(required().pod(pod("shell").bare()))),
        ("pod with emptyDir", only(required().pod(pod("scratch").with_empty_dir()))),
        ("pod of another DaemonSet", only(required().pod(pod("exporter").of_daemon_set()))),
        (
            "a budget never allows it",
            only(required().pod(pod("chat").label("app", "chat"))).budget("chat", 0),
        ),
        (
            "aborted",
            but(only(required()), |f| {
                f.settle();
                f.set_label("n", "upgrade-required");
                f.snapshot.nodes.get_mut("n").unwrap().visit = None;
                f.driver_mut("n").revision = Some(OLD.into());
                f.snapshot.rollouts.values_mut().for_each(|rollout| rollout.spec.abort = true);
            }),
        ),
        (
            "too many failed",
            only(required())
                .policy(json!({"maxUnavailable": "100%"}))
                .with(node("a").at(State::UpgradeFailed))
                .with(node("b").at(State::UpgradeFailed)),
        ),
        ("paused", only(required()).policy(json!({"autoUpgrade": false}))),
        ("bad policy", only(required()).policy(json!({"maxUnavailable": "abc"}))),
        ("RollingUpdate", but(only(required()), |f| f.daemon_set_mut().on_delete = false)),
        (
            "a live GPU Operator",
            but(only(required()), |f| {
                f.snapshot.gpu_operator.deployments.insert("deployment/gpu-operator/gpu-operator".into());
            }),
        ),
        ("two policies", only(required()).driver_policy("a", claim.clone()).driver_policy("b", claim)),
        ("unknown label", only(node("n").label(&keys("gpu").state, "upgrade-maybe"))),
        ("failed without a record", only(node("n").labelled(State::UpgradeFailed))),
        (
            "the API refused",
            but(only(required()), |f| {
                f.setback(Object::Node("n".into()), SetbackKind::Error("forbidden".into()), after(9));
            }),
        ),
        (
            "a conflict",
            but(only(required()), |f| f.setback(Object::Node("n".into()), SetbackKind::Stale, after(5))),
        ),
    ]
}

/// A DriverPolicy that says this about rollouts.
#[expect(clippy::needless_pass_by_value, reason = "values are written at the call")]
fn moving_by(options: Value, rollout: Value) -> Fleet {
    let spec = json!({"driver": {"name": "gpu"}, "upgradePolicy": options, "rollout": rollout});
    Fleet::without_policy().driver_policy("gpu", spec)
}

fn rack(name: &str) -> NodeSpec {
    node(name).outdated().labelled(State::UpgradeRequired).label("rack", "r")
}

fn walking(name: &str) -> NodeSpec {
    node(name).outdated().at(State::DrainRequired)
}

/// Two nodes that start together.
fn in_racks(parallel: u32) -> Fleet {
    let options = json!({"maxParallelUpgrades": parallel, "maxUnavailable": "100%"});
    moving_by(options, json!({"topology": {"atom": "rack"}})).with(rack("n")).with(rack("o"))
}

fn max_unavailable(fleet: &mut Fleet, nodes: i32) {
    let policy = fleet.snapshot.sources.driver_policies.get_mut("gpu").unwrap();
    policy.upgrade_policy.max_unavailable = Some(IntOrString::Int(nodes));
}

/// Two nodes of one group.
#[expect(clippy::needless_pass_by_value, reason = "values are written at the call")]
fn in_zones(topology: Value) -> Fleet {
    let options = json!({"maxParallelUpgrades": 0, "maxUnavailable": "100%"});
    moving_by(options, json!({"topology": topology})).with(rack("n")).with(rack("m"))
}

const MATRIX: &str = "versions: {current: {driver: '565.57.01'}}";

/// An enforced matrix.
fn in_matrix(text: Option<&str>) -> Fleet {
    let mut fleet = moving_by(json!({}), json!({"matrix": {"enforce": true}})).with(required());
    fleet.snapshot.matrices = text.map(|text| Files::read([(MATRIX_KEY, text)].into_iter()));
    fleet
}

fn windows(rollout: Value) -> Fleet {
    moving_by(json!({}), rollout).with(required())
}

fn during_a_visit() -> Vec<Case> {
    let only = |node| Fleet::new().with(node);
    let job = || at(State::WaitForJobsRequired).pod(pod("train").label("job", "a"));
    let wait = |seconds| json!({"waitForCompletion": {"podSelector": "job", "timeoutSeconds": seconds}});
    let off = || at(State::PodDeletionRequired);
    let chat = || pod("chat-6d4-x").label("app", "chat").label("pod-template-hash", "6d4");
    let restart = || node("n").at(State::PodRestartRequired);
    let validate = || node("n").at(State::ValidationRequired);
    vec![
        (
            "a client is stale",
            but(only(validate()), |f| f.put_client("n", "dcgm", Some(ClientKind::Operand), after(-9000))),
        ),
        ("a job runs", only(job()).policy(wait(0))),
        ("a job runs, for a time", only(job()).policy(wait(600))),
        ("pods leave", only(off().pod(pod("a").leaving()).pod(pod("b").leaving()))),
        (
            "pods leave, drain comes next",
            only(off().pod(pod("a").leaving())).policy(json!({"drain": {"enable": true}})),
        ),
        (
            "pods leave, or are deleted",
            only(off().pod(pod("a").leaving()))
                .policy(json!({"gpuPodDeletion": {"timeoutAction": "Delete"}})),
        ),
        (
            "pods leave, however long it takes",
            only(off().pod(pod("a").leaving())).policy(json!({"gpuPodDeletion": {"timeoutSeconds": 0}})),
        ),
        (
            "a budget blocks",
            but(only(off().pod(chat())).budget("chat", 0), |f| {
                let pod = f.work_mut("n", "chat-6d4-x");
                if let Some(owner) = &mut pod.owner {
                    owner.name = "chat-6d4".into();
                }
            }),
        ),
        ("a pod is stuck", but(only(off().pod(pod("a").leaving())), |f| f.wait(61))),
        (
            "work is saved",
            only(at(State::WaitForJobsRequired).pod(pod("train").label("job", "a")))
                .policy(json!({"checkpoint": {"podSelector": "job"}})),
        ),
        (
            "old driver pod stops",
            but(only(restart().outdated()), |f| f.driver_mut("n").deleting = Some(after(30))),
        ),
        ("new driver pod starts", but(only(restart()), not_ready)),
        (
            "new driver pod is missing",
            but(only(restart()), |f| f.remove_pods("n", |p| p.name.name.contains("driver"))),
        ),
        ("validator not ready", but(only(validate()), |f| f.validator_mut("n").ready = false)),
        (
            "no validator",
            but(only(validate()), |f| f.remove_pods("n", |p| p.name.name.contains("validator"))),
        ),
        (
            "work is on the device that a gate needs",
            moving_by(json!({}), json!({"gates": [{"name": "smoke", "preset": "smoke-training"}]}))
                .with(validate().visit(|visit| visit.early = true).pod(pod("train"))),
        ),
        ("half a driver", but(only(restart().annotation(NEEDS_REBOOT_ANNOTATION, HALF)), not_ready)),
        (
            "somebody wants a reboot on a visit",
            only(restart().annotation(NEEDS_REBOOT_ANNOTATION, "flashed")),
        ),
        (
            "half a driver for too long",
            but(only(restart().annotation(NEEDS_REBOOT_ANNOTATION, HALF)), |f| {
                not_ready(f);
                f.play();
            }),
        ),
        ("failed", but(only(node("n").at(State::UpgradeFailed)), not_ready)),
        ("failed, a budget still blocks", failed_by_budget()),
        ("failed, kept from NVSentinel", only(kept())),
        ("somebody set the label", only(restart().label(&keys("gpu").state, "upgrade-done"))),
        ("unreadable record", but(only(restart()), |f| f.set_record("n", "yes"))),
    ]
}

fn sentinel(fleet: &mut Fleet, tripped: bool) {
    fleet.snapshot.nvsentinel = Some(NvSentinel { tripped });
}

fn failed_by_budget() -> Fleet {
    let failed = node("n").at(State::UpgradeFailed).pod(pod("chat").label("app", "chat")).walk(|walk| {
        let cause = Cause::PodsDidNotLeave {
            found: Finding::about(&ObjectName::new("work", "chat"), "pod work/chat".into()),
            seconds: 300,
        };
        walk.failure = Some(Failure { cause, pod: None });
    });
    but(Fleet::new().with(failed).budget("chat", 0), not_ready)
}

fn two_drivers() -> Case {
    let ofed = json!({"driver": {"name": "ofed", "daemonSets": {"selector": "app=ofed"}}});
    let fleet = Fleet::without_policy().daemon_set("ofed", "ofed");
    let fleet = fleet.driver_policy("gpu", json!({"driver": {"name": "gpu"}})).driver_policy("ofed", ofed);
    let walking = at(State::DrainRequired).visit(|visit| {
        let walk = visit.drivers.remove("gpu").unwrap();
        visit.drivers.insert("ofed".into(), walk);
    });
    ("another driver first", fleet.with(walking.labelled(State::UpgradeRequired)))
}

/// The answer about node `n` in its first pool, as text; also the reason's code.
fn answer((situation, fleet): &Case) -> (String, &'static str) {
    let (snapshot, plan) = (&fleet.snapshot, crate::plan::plan(&fleet.snapshot));
    let pools = policy::resolve(&snapshot.sources, snapshot.daemon_sets.values(), &snapshot.namespace);
    let (pool, planned) = (&pools[0], &plan.pools[0]);
    let name = NodeName::from("n");
    // A policy that cannot be read has no nodes; what it says of them is tested all the same.
    let frozen = crate::plan::Verdict {
        state: State::UpgradeRequired,
        reason: Reason::PoolFrozen { why: format!("{:?}", planned.status) },
        since: None,
        in_sync: false,
    };
    let verdict = planned.nodes.get(&name).unwrap_or(&frozen);
    let about = About { snapshot, pool, plan: planned, node: &name, verdict, many_drivers: pools.len() > 1 };
    let mut text = format!("{situation}: {}\n", verdict.reason);
    let things: Vec<String> = culprits(&about).iter().map(ToString::to_string).collect();
    let _ = writeln!(text, "    {:?}, {}", verdict.reason.motion(), things.join(", "));
    if let Some(next) = next(&about) {
        let at = next.at.map(|at| format!("at {at}: ")).unwrap_or_default();
        let _ = writeln!(text, "    {at}{}", next.what);
    }
    for advice in advice(&about) {
        let but = advice.but.map(|but| format!("  ({but})")).unwrap_or_default();
        let _ = writeln!(text, "    - {}: {}{but}", advice.what, advice.command);
    }
    assert!(
        verdict.reason.motion() == Motion::Done || !things.is_empty(),
        "{situation}: nobody is responsible"
    );
    (text, verdict.reason.code())
}

#[test]
fn every_reason_has_an_answer() {
    let cases: Vec<Case> = before_a_visit()
        .into_iter()
        .chain(during_a_visit())
        .chain([two_drivers(), on_the_way_back(), left_behind()])
        .collect();
    let (texts, codes): (Vec<String>, BTreeSet<&str>) = cases.iter().map(answer).unzip();
    insta::assert_snapshot!(texts.concat());
    let all = [
        "up-to-date",
        "same-version",
        "left-alone",
        "driver-not-ready",
        "moving",
        "revision-pending",
        "no-driver-pod",
        "no-slot",
        "window-closed",
        "atom-waits",
        "atom-too-large",
        "spread-full",
        "not-in-matrix",
        "skipped",
        "other-driver",
        "node-not-ready",
        "needs-reboot",
        "quarantined",
        "breaker-tripped",
        "waiting-for-jobs",
        "checkpointing",
        "budget-never",
        "pod-stuck",
        "too-many-failed",
        "aborted",
        "pods-leaving",
        "budget-blocks",
        "cannot-be-emptied",
        "driver-stopping",
        "driver-starting",
        "clients-come-back",
        "clients-stale",
        "validating",
        "paused",
        "failed",
        "pool-frozen",
        "two-policies",
        "unknown-label",
        "label-changed",
        "visit-unreadable",
        "api-error",
        "conflict",
    ];
    assert_eq!(codes, BTreeSet::from(all));
}
