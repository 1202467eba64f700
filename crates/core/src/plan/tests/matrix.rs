//! The version matrix: who does not start because of it, and what is told about it.

use serde_json::{Value, json};

use super::fixture::*;
use crate::api::{DriverPolicyStatus, MatrixStatus, Word, stamp};
use crate::check::{Promise, violations};
use crate::contract::{CUDA_LABEL, MATRIX_KEY, State};
use crate::matrix::{Files, Release};
use crate::plan::plan;

const BOTH: &str = "
versions:
  current: {driver: '560.35.03', cuda: '12.6', gpu_operator: v24.9.0, openshift: 4.16.23, status: production}
  canary: {driver: '565.57.01', cuda: '12.8', gpu_operator: v24.12.0, status: testing}
";
const OLD_ONLY: &str = "
versions:
  current: {driver: '560.35.03'}
";
const PROMOTED: &str = "
versions:
  current: {driver: '565.57.01', cuda: '12.8'}
  canary: {driver: '565.57.01', cuda: '12.8', status: promoted}
";

/// Outdated nodes (560.35.03, to 565.57.01) under a DriverPolicy with this matrix.
#[expect(clippy::needless_pass_by_value, reason = "values are written at the call")]
fn fleet(nodes: usize, matrix: Value) -> Fleet {
    let policy = json!({
        "driver": {"name": "gpu"},
        "upgradePolicy": {"maxParallelUpgrades": 0, "maxUnavailable": "100%"},
        "rollout": {"matrix": matrix},
    });
    let fleet = Fleet::without_policy().driver_policy("gpu", policy);
    fleet.nodes(nodes, |n| n.outdated().at(State::UpgradeRequired))
}

fn enforced(nodes: usize, text: &str) -> Fleet {
    with_file(fleet(nodes, json!({"enforce": true})), text)
}

fn with_file(mut fleet: Fleet, text: &str) -> Fleet {
    put_file(&mut fleet, text);
    fleet
}

fn put_file(fleet: &mut Fleet, text: &str) {
    fleet.snapshot.matrices = Some(Files::read([(MATRIX_KEY, text)].into_iter()));
}

fn starts(fleet: &Fleet) -> Vec<String> {
    let start = |line: String| Some(line.strip_suffix(" -> cordon-required")?.to_owned());
    fleet.decisions().into_iter().filter_map(start).collect()
}

fn said(fleet: &Fleet) -> MatrixStatus {
    fleet.pool().matrix.unwrap()
}

#[test]
fn only_a_version_that_is_listed_starts() {
    assert_eq!(starts(&enforced(2, BOTH)), ["gpu-1", "gpu-2"]);
    let place = "configmap/gpu-operator/gpu-version-matrix";
    let end = "nothing starts without that (rollout.matrix.enforce)";
    let mut missing = fleet(1, json!({"enforce": true}));
    let mut untagged = enforced(1, BOTH);
    untagged.daemon_set_mut().driver_version = None;
    let other_key = with_file(fleet(1, json!({"enforce": true, "key": "lab.yaml"})), BOTH);
    for (situation, refused, why) in [
        (
            "another version",
            enforced(1, OLD_ONLY),
            format!("driver 565.57.01 is not in the version matrix ({place}, key {MATRIX_KEY}), which lists 560.35.03"),
        ),
        (
            "no driver in it",
            enforced(1, "versions: {current: {cuda: '12.6'}}"),
            format!("driver 565.57.01 is not in the version matrix ({place}, key {MATRIX_KEY}), which lists no driver"),
        ),
        ("no ConfigMap", missing.clone(), format!("there is no version matrix: {place} is missing")),
        ("no such key", other_key, format!("there is no version matrix: {place} has no key lab.yaml")),
        (
            "no matrix",
            enforced(1, "versions:"),
            format!(
                "the version matrix ({place}, key {MATRIX_KEY}) cannot be read: versions (line 1) has nothing under it that \
                 reads \"name: value\"; write the entries \"current:\" and \"canary:\" there, indented by two spaces"
            ),
        ),
        (
            "no version",
            untagged,
            "the image of daemonset/gpu-operator/nvidia-driver-daemonset has no version in its tag, so nobody can say \
             whether the version matrix lists it"
                .to_owned(),
        ),
    ] {
        assert_eq!(starts(&refused), [""; 0], "{situation}");
        assert_eq!(refused.why("gpu-1"), format!("{why}; {end}"), "{situation}");
        let told = said(&refused);
        assert!(!told.listed, "{situation}");
        assert_eq!(told.message, why, "{situation}");
    }
    put_file(&mut missing, BOTH);
    assert_eq!(starts(&missing), ["gpu-1"], "as soon as it is there");
}

#[test]
fn without_enforce_nothing_is_refused_only_told() {
    let told = with_file(fleet(1, json!({})), OLD_ONLY);
    assert_eq!(starts(&told), ["gpu-1"]);
    assert!(!said(&told).listed);
    assert!(said(&told).message.starts_with("driver 565.57.01 is not in the version matrix"));
    assert_eq!(starts(&fleet(1, json!({}))), ["gpu-1"], "no ConfigMap");
    assert_eq!(Fleet::new().with(node("n")).pool().matrix, None, "nobody asked");
}

#[test]
fn a_node_without_any_driver_starts_whatever_the_matrix_says() {
    let mut fleet = enforced(1, OLD_ONLY);
    fleet.driver_mut("gpu-1").revision = Some(NEW.into());
    fleet.node_mut("gpu-1").annotations.insert(keys("gpu").safe_load, "pod".to_owned());
    assert_eq!(starts(&fleet), ["gpu-1"]);
}

#[test]
fn a_way_back_is_never_refused() {
    let mut fleet = enforced(3, BOTH);
    fleet.play();
    assert_eq!(fleet.snapshot.rollouts.len(), 1);
    // The version before is struck off, and then the one that runs is taken back.
    put_file(&mut fleet, "versions: {current: {driver: '565.57.01'}}");
    let word = Word { by: "mei".into(), at: stamp(fleet.snapshot.now), why: None };
    fleet.snapshot.rollouts.get_mut("gpu-1").unwrap().spec.rollback = Some(word);
    fleet.live(3600);
    let back = fleet.snapshot.pods.values().flat_map(std::collections::BTreeMap::values);
    let back = back.filter(|pod| pod.revision.as_ref().is_some_and(|hash| hash.as_str() == OLD));
    assert_eq!(back.count(), 3, "{}", fleet.screen());
    let reminder = said(&fleet).reminder.unwrap();
    assert_eq!(
        reminder,
        "driver 565.57.01 was taken back, and the matrix has it as current: pitcrew matrix rollback --commit"
    );
    put_file(&mut fleet, BOTH);
    assert_eq!(said(&fleet).reminder, None, "it is only on trial: there is nothing to revert");
}

#[test]
fn a_version_that_is_struck_off_turns_back_who_has_its_old_driver() {
    let mut fleet =
        enforced(0, BOTH).with(node("n").outdated().at(State::PodDeletionRequired).pod(pod("job")));
    assert!(fleet.why("n").starts_with("evicting"), "{}", fleet.why("n"));
    put_file(&mut fleet, "versions: {current: {driver: no-version}}");
    assert!(fleet.why("n").starts_with("evicting"), "what cannot be read says nothing: {}", fleet.why("n"));
    put_file(&mut fleet, OLD_ONLY);
    fleet.settle();
    assert!(!fleet.snapshot.nodes["n"].unschedulable, "{}", fleet.screen());
    assert!(
        fleet.why("n").starts_with("driver 565.57.01 is not in the version matrix"),
        "{}",
        fleet.why("n")
    );
    put_file(&mut fleet, BOTH);
    fleet.play();
    assert_eq!(fleet.verdict("n").state, State::UpgradeDone);
}

#[test]
fn a_start_towards_what_is_not_listed_breaks_a_promise() {
    let good = enforced(1, BOTH);
    let bold = plan(&good.snapshot);
    let judged = |fleet: &Fleet| {
        let found = violations(&fleet.snapshot, &bold);
        found.into_iter().map(|violation| violation.promise).collect::<Vec<_>>()
    };
    assert_eq!(judged(&good), []);
    assert_eq!(judged(&enforced(1, OLD_ONLY)), [Promise::OnlyListed]);
    assert_eq!(judged(&enforced(1, "nothing")), [Promise::OnlyListed]);
    assert_eq!(judged(&fleet(1, json!({"enforce": true}))), [Promise::OnlyListed]);
    assert_eq!(judged(&with_file(fleet(1, json!({})), OLD_ONLY)), []);
    let mut untagged = enforced(1, BOTH);
    untagged.daemon_set_mut().driver_version = None;
    assert_eq!(judged(&untagged), [Promise::OnlyListed]);
}

#[test]
fn drift_is_told_entry_by_entry() {
    let mut fleet = with_file(fleet(4, json!({})), BOTH);
    let show = |fleet: &Fleet| {
        let told = said(fleet);
        let lines = [told.message].into_iter().chain(told.drift);
        let lines = lines.chain([format!("not observed: {}", told.not_observed.join(", "))]);
        lines.collect::<Vec<_>>().join("\n")
    };
    insta::assert_snapshot!(show(&fleet), @r"
    driver 565.57.01 is listed (canary)
    not observed: gpu_operator, cuda, openshift
    ");
    for (node, image, cuda) in
        [("gpu-1", "565.57.01", "12.8"), ("gpu-2", "565.57.01", "12.6"), ("gpu-3", "550.54.15", "12.4")]
    {
        fleet.driver_mut(node).image = format!("nvcr.io/nvidia/driver:{image}-ubuntu22.04").into();
        fleet.node_mut(node).set_label(CUDA_LABEL, Some(cuda));
    }
    fleet.snapshot.gpu_operator.versions.insert("deployment/a/b".to_owned(), Release::new("v24.12.0"));
    insta::assert_snapshot!(show(&fleet), @r"
    driver 565.57.01 is listed (canary)
    canary: cuda is 12.6 on 1 node, not 12.8
    current: driver is 550.54.15 on 1 node, not 560.35.03
    current: cuda is 12.4 on 1 node, not 12.6
    not observed: openshift
    ");
    fleet.snapshot.gpu_operator.versions.insert("deployment/a/b".to_owned(), Release::new("v23.1.0"));
    assert!(show(&fleet).contains("canary: gpu_operator is v23.1.0, not v24.12.0"), "{}", show(&fleet));
}

#[test]
fn a_promotion_that_nobody_has_committed_is_reminded_of() {
    let mut fleet = enforced(2, BOTH);
    assert_eq!(said(&fleet).reminder, None);
    fleet.play();
    assert_eq!(
        said(&fleet).reminder.as_deref(),
        Some(
            "driver 565.57.01 is on every node, and the matrix has it as canary: pitcrew matrix promote --commit"
        )
    );
    put_file(&mut fleet, PROMOTED);
    assert_eq!(said(&fleet).reminder, None);
}

#[test]
fn what_the_matrix_says_is_written_at_a_measured_pace() {
    let mut fleet = with_file(fleet(3, json!({})), PROMOTED);
    let told = |fleet: &Fleet| -> DriverPolicyStatus {
        fleet.snapshot.sources.driver_policy_status["gpu"].1.clone()
    };
    fleet.step();
    let first = told(&fleet).matrix.unwrap();
    assert_eq!(first.drift, ["current: driver is 560.35.03 on 3 nodes, not 565.57.01"]);
    fleet.driver_mut("gpu-1").image = "nvcr.io/nvidia/driver:550.54.15".into();
    fleet.step();
    assert_eq!(told(&fleet).matrix.unwrap(), first, "a moment later");
    fleet.wait(60);
    fleet.step();
    let later = told(&fleet).matrix.unwrap();
    assert_ne!((&later.drift, &later.at), (&first.drift, &first.at));
}

#[test]
fn a_rollout_that_does_not_start_says_why() {
    let mut fleet = enforced(1, OLD_ONLY);
    fleet.settle();
    let message = fleet.snapshot.rollouts["gpu-1"].status.as_ref().unwrap().message.clone();
    assert!(message.unwrap().starts_with("driver 565.57.01 is not in the version matrix"));
}
