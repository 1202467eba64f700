//! Each promise, kept and broken.

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::*;
use crate::simulate::world::Request;

const NOW: Timestamp = Timestamp::constant(1_767_225_600, 0);

/// A cluster of two nodes with a driver each, and a policy.
struct Scene {
    world: World,
    now: Timestamp,
}

impl Scene {
    fn new(upgrade_policy: &Value) -> Self {
        let mut world = World::default();
        world.lag = SignedDuration::from_secs(2);
        let mut scene = Self { world, now: NOW };
        let policy = json!({"spec": {"upgradePolicy": upgrade_policy}});
        scene.fold("driverpolicies.pitcrew.dev", "gpu", &policy);
        for node in ["a", "b"] {
            scene.fold("nodes", node, &node_in("upgrade-required", false, None));
            scene.fold("pods", &format!("driver-{node}"), &pod(node, "driver"));
        }
        scene.later(60);
        scene
    }

    fn fold(&mut self, resource: &str, name: &str, object: &Value) {
        self.fold_by(By::Others, resource, name, object);
    }

    fn fold_by(&mut self, by: By, resource: &str, name: &str, object: &Value) {
        let namespace = if resource == "pods" { "gpu-operator" } else { "" };
        let change =
            Change { at: self.now, by, request: None, resource, namespace, name, after: Some(object) };
        self.world.fold(&change);
    }

    fn later(&mut self, seconds: i64) {
        self.now += SignedDuration::from_secs(seconds);
    }

    /// The promises that our write breaks.
    fn we_write(
        &mut self,
        resource: &str,
        name: &str,
        after: Option<&Value>,
        request: (&str, &str, &Value),
    ) -> Vec<&'static str> {
        let namespace = if resource == "pods" { "gpu-operator" } else { "" };
        let body = request.2.to_string();
        let asked = Request { verb: request.0, resource: request.1, body: body.as_bytes() };
        let (at, by, request) = (self.now, By::Us, Some(asked));
        let change = Change { at, by, request, resource, namespace, name, after };
        let key = (namespace.to_owned(), name.to_owned());
        let (node, pod) = (self.world.nodes.get(name).cloned(), self.world.pods.get(&key).cloned());
        self.world.fold(&change);
        let step = if resource == "nodes" {
            Step::Node(name, node.as_ref(), self.world.nodes.get(name))
        } else {
            Step::Pod(pod.as_ref(), self.world.pods.get(&key))
        };
        let broken = SAFETY.iter().filter(|(_, check)| check(&self.world, &change, &step).is_some());
        broken.map(|(promise, _)| promise.code()).collect()
    }

    fn we_patch_node(&mut self, name: &str, after: &Value) -> Vec<&'static str> {
        self.we_write(
            "nodes",
            name,
            Some(after),
            ("patch", "nodes", &json!({"metadata": {"resourceVersion": "7"}})),
        )
    }

    fn we_delete(&mut self, pod: &str, how: &str) -> Vec<&'static str> {
        let key = ("gpu-operator".to_owned(), pod.to_owned());
        let (node, role) = (self.world.pods[&key].node.clone(), pod.split('-').next().unwrap_or_default());
        let mut after = self::pod(&node, role);
        after["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        let uid = json!({"preconditions": {"uid": "x"}});
        let (verb, body) =
            if how == "pods" { ("delete", uid) } else { ("create", json!({"deleteOptions": uid})) };
        self.we_write("pods", pod, Some(&after), (verb, how, &body))
    }
}

fn node_in(state: &str, cordoned: bool, visit: Option<bool>) -> Value {
    let mut node = json!({
        "metadata": {"uid": "n", "labels": {
            "nvidia.com/gpu-driver-upgrade-state": state, "nvidia.com/gpu.deploy.driver": "true",
        }, "annotations": {}},
        "spec": {"unschedulable": cordoned},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    });
    if let Some(our_cordon) = visit {
        let walk = json!({"state": state, "since": "2026-01-01T00:00:00Z", "target": "1", "attempts": 0});
        let record = json!({"v": 1, "since": "2026-01-01T00:00:00Z", "holds": {"cordon": our_cordon}, "drivers": {"gpu": walk}});
        node["metadata"]["annotations"]["pitcrew.dev/visit"] = json!(record.to_string());
    }
    node
}

fn pod(node: &str, role: &str) -> Value {
    let labels = match role {
        "driver" => json!({"app.kubernetes.io/component": "nvidia-driver"}),
        "validator" => json!({"app": "nvidia-operator-validator"}),
        _ => json!({}),
    };
    let kind = if role == "work" { "ReplicaSet" } else { "DaemonSet" };
    let limits = if role == "work" { json!({"nvidia.com/gpu": "1"}) } else { json!({}) };
    json!({
        "metadata": {"uid": role, "labels": labels, "ownerReferences": [{"kind": kind}]},
        "spec": {"nodeName": node, "containers": [{"image": "driver:1", "resources": {"limits": limits}}]},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    })
}

fn one_at_a_time() -> Value {
    json!({"autoUpgrade": true, "maxParallelUpgrades": 1, "maxUnavailable": 1})
}

#[test]
fn an_ordinary_start_breaks_nothing() {
    let mut scene = Scene::new(&one_at_a_time());
    assert!(scene.we_patch_node("a", &node_in("cordon-required", false, None)).is_empty());
    let cordoned = node_in("wait-for-jobs-required", true, Some(true));
    assert!(scene.we_patch_node("a", &cordoned).is_empty());
}

#[test]
fn a_second_start_is_one_too_many() {
    let mut scene = Scene::new(&one_at_a_time());
    scene.we_patch_node("a", &node_in("cordon-required", false, None));
    assert_eq!(scene.we_patch_node("b", &node_in("cordon-required", false, None)), ["S3"]);
}

#[test]
fn a_node_that_somebody_else_took_out_counts_once_it_must_be_known() {
    for (seconds, expected) in [(0, &[][..]), (10, &["S3"][..])] {
        let mut scene = Scene::new(&json!({"maxParallelUpgrades": 0, "maxUnavailable": 1}));
        scene.fold("nodes", "b", &node_in("upgrade-required", true, None));
        scene.later(seconds);
        assert_eq!(scene.we_patch_node("a", &node_in("cordon-required", false, None)), expected);
    }
}

#[test]
fn pods_leave_only_nodes_that_are_ours_and_cordoned() {
    let mut scene = Scene::new(&one_at_a_time());
    scene.fold("pods", "work-1", &pod("a", "work"));
    assert_eq!(scene.we_delete("work-1", "pods/eviction"), ["S1", "S12"]);
    let mut scene = Scene::new(&one_at_a_time());
    scene.fold("pods", "work-1", &pod("a", "work"));
    scene.fold("nodes", "a", &node_in("pod-deletion-required", true, Some(true)));
    assert!(scene.we_delete("work-1", "pods/eviction").is_empty());
}

#[test]
fn budgets_are_bypassed_only_where_the_policy_says_so() {
    for (action, expected) in [("Fail", &["S8"][..]), ("Delete", &[][..])] {
        let mut scene = Scene::new(&json!({"maxUnavailable": 1, "podDeletion": {"timeoutAction": action}}));
        scene.fold("pods", "work-1", &pod("a", "work"));
        scene.fold("nodes", "a", &node_in("pod-deletion-required", true, Some(true)));
        assert_eq!(scene.we_delete("work-1", "pods"), expected);
    }
}

#[test]
fn a_driver_restarts_only_when_nobody_uses_the_device() {
    let mut scene = Scene::new(&one_at_a_time());
    scene.fold("nodes", "a", &node_in("pod-restart-required", true, Some(true)));
    scene.fold("pods", "work-1", &pod("a", "work"));
    scene.later(1);
    assert_eq!(scene.we_delete("driver-a", "pods"), ["S4"]);
}

#[test]
fn only_our_own_cordon_is_lifted_and_only_at_the_end() {
    let done = node_in("upgrade-done", false, None);
    for (state, ours, expected) in [
        ("uncordon-required", true, &[][..]),
        ("uncordon-required", false, &["S2"][..]),
        ("validation-required", true, &["S2", "S13"][..]),
    ] {
        let mut scene = Scene::new(&one_at_a_time());
        scene.fold_by(
            if ours { By::Us } else { By::Others },
            "nodes",
            "a",
            &node_in(state, true, Some(ours)),
        );
        assert_eq!(scene.we_patch_node("a", &done), expected, "{state} {ours}");
    }
}

#[test]
fn a_cordon_is_somebody_elses_on_a_visit_that_has_none() {
    for ours in [true, false] {
        let mut scene = Scene::new(&one_at_a_time());
        for cordoned in [true, false, true] {
            scene.fold("nodes", "a", &node_in("validation-required", cordoned, Some(ours)));
        }
        assert_eq!(scene.world.nodes["a"].foreign_cordon, !ours);
    }
}

#[test]
fn a_node_is_given_back_only_with_a_driver_that_is_ready() {
    let mut scene = Scene::new(&one_at_a_time());
    scene.fold_by(By::Us, "nodes", "a", &node_in("uncordon-required", true, Some(true)));
    let mut broken = pod("a", "driver");
    broken["status"]["conditions"][0]["status"] = json!("False");
    scene.fold("pods", "driver-a", &broken);
    scene.later(10);
    assert_eq!(scene.we_patch_node("a", &node_in("upgrade-done", false, None)), ["S2"]);
}

#[test]
fn only_a_driver_that_is_ready_is_validated() {
    let mut scene = Scene::new(&one_at_a_time());
    scene.fold_by(By::Us, "nodes", "a", &node_in("pod-restart-required", true, Some(true)));
    let validated = node_in("validation-required", true, Some(true));
    assert!(scene.we_patch_node("a", &validated).is_empty());
    scene.fold_by(By::Us, "nodes", "a", &node_in("pod-restart-required", true, Some(true)));
    let mut broken = pod("a", "driver");
    broken["status"]["conditions"][0]["status"] = json!("False");
    scene.fold("pods", "driver-a", &broken);
    scene.later(10);
    assert_eq!(scene.we_patch_node("a", &validated), ["S2"]);
}

#[test]
fn a_pause_is_obeyed() {
    let mut scene = Scene::new(&one_at_a_time());
    let paused = json!({"spec": {"upgradePolicy": {"autoUpgrade": false, "maxUnavailable": 1}}});
    scene.fold("driverpolicies.pitcrew.dev", "gpu", &paused);
    scene.later(10);
    assert_eq!(scene.we_patch_node("a", &node_in("cordon-required", false, None)), ["S9"]);
}

#[test]
fn an_aborted_rollout_starts_nothing() {
    let mut scene = Scene::new(&one_at_a_time());
    scene.fold("rollouts.pitcrew.dev", "gpu-1", &json!({"spec": {"abort": true}}));
    scene.later(10);
    assert_eq!(scene.we_patch_node("a", &node_in("cordon-required", false, None)), ["S9"]);
}

#[test]
fn nodes_to_be_skipped_are_left_alone() {
    let mut scene = Scene::new(&one_at_a_time());
    let mut skipped = node_in("upgrade-required", false, None);
    skipped["metadata"]["labels"]["nvidia.com/gpu-driver-upgrade.skip"] = json!("true");
    scene.fold("nodes", "a", &skipped);
    let mut started = node_in("cordon-required", false, None);
    started["metadata"]["labels"]["nvidia.com/gpu-driver-upgrade.skip"] = json!("true");
    assert_eq!(scene.we_patch_node("a", &started), ["S10"]);
}

#[test]
fn a_write_that_is_not_pinned_is_found() {
    let mut scene = Scene::new(&one_at_a_time());
    let start = node_in("cordon-required", false, None);
    let broken = scene.we_write("nodes", "a", Some(&start), ("patch", "nodes", &json!({})));
    assert_eq!(broken, ["S11"]);
}

#[test]
fn a_shield_without_a_record_is_found() {
    let mut scene = Scene::new(&one_at_a_time());
    let mut shielded = node_in("upgrade-required", false, None);
    shielded["metadata"]["labels"]["k8saas.nvidia.com/ManagedByNVSentinel"] = json!("false");
    assert_eq!(scene.we_patch_node("a", &shielded), ["S6"]);
}
