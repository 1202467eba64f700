//! Each promise, kept and broken.

use jiff::{SignedDuration, Timestamp};
use pitcrew_core::contract::nvsentinel;
use serde_json::{Value, json};

use super::*;
use crate::simulate::world::{POOL, Pool, Request};

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
fn what_is_done_in_another_pool_is_not_judged_by_this_ones_policy() {
    let mut scene = Scene::new(&one_at_a_time());
    scene.world.pool = Some(Pool { name: "gpu".into(), label: "gpu".into() });
    let of_pool = |pool: &str, cordoned: bool| {
        let mut node = node_in("cordon-required", cordoned, None);
        node["metadata"]["labels"][POOL] = json!(pool);
        node
    };
    let paused = json!({"spec": {"upgradePolicy": {"autoUpgrade": false}}});
    scene.fold("driverpolicies.pitcrew.dev", "other", &paused);
    scene.fold("nodes", "c", &of_pool("other", true));
    scene.fold("pods", "driver-c", &pod("c", "driver"));
    assert!(
        scene.we_patch_node("a", &of_pool("gpu", false)).is_empty(),
        "node c is out, and not of this pool"
    );
    assert_eq!(scene.we_patch_node("b", &of_pool("gpu", false)), ["S3"]);
    for (node, expected) in [("c", None), ("b", Some("S1"))] {
        let mut gone = pod(node, "driver");
        gone["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        let (at, name) = (scene.now, format!("driver-{node}"));
        let (resource, namespace, after) = ("pods", "gpu-operator", Some(&gone));
        let change = Change { at, by: By::Us, request: None, resource, namespace, name: &name, after };
        let broken =
            take_up(&mut scene.world, &change, |_, broken| broken.map(|(promise, _)| promise.code()));
        assert_eq!(broken, Some(expected), "{node}");
    }
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
    for (action, state, seconds, expected) in [
        ("Fail", "pod-deletion-required", 300, &["S8"][..]),
        ("Delete", "pod-deletion-required", 200, &["S8"][..]),
        ("Delete", "pod-deletion-required", 300, &[][..]),
        ("Delete", "drain-required", 300, &["S8"][..]),
    ] {
        let mut scene = Scene::new(&json!({"maxUnavailable": 1, "podDeletion": {"timeoutAction": action}}));
        scene.fold("pods", "work-1", &pod("a", "work"));
        scene.fold("nodes", "a", &node_in(state, true, Some(true)));
        scene.later(seconds);
        assert_eq!(scene.we_delete("work-1", "pods"), expected, "{action} in {state} after {seconds} s");
    }
}

/// On a visit, and failed for this.
fn failed(failure: &Value) -> Value {
    let mut node = node_in("upgrade-failed", true, Some(true));
    let record = &mut node["metadata"]["annotations"]["pitcrew.dev/visit"];
    let mut visit: Value = serde_json::from_str(record.as_str().unwrap()).unwrap();
    visit["drivers"]["gpu"]["failure"] = failure.clone();
    *record = json!(visit.to_string());
    node
}

#[test]
fn who_has_too_little_time_fails_when_it_is_over() {
    let not_ready = json!({"cause": "driverNotReady", "what": "it hangs", "seconds": 1800});
    let not_gone = json!({"cause": "podsDidNotLeave", "what": "it stays", "seconds": 300});
    for (state, failure, seconds, expected) in [
        ("pod-restart-required", &not_ready, 600, &["S20"][..]),
        ("pod-restart-required", &not_ready, 1800, &[][..]),
        ("pod-deletion-required", &not_gone, 100, &["S20"][..]),
        ("pod-deletion-required", &not_gone, 300, &[][..]),
    ] {
        let mut scene = Scene::new(&one_at_a_time());
        scene.fold("nodes", "a", &node_in(state, true, Some(true)));
        scene.later(seconds - 60);
        assert_eq!(scene.we_patch_node("a", &failed(failure)), expected, "{state} after {seconds} s");
    }
}

#[test]
fn a_node_that_a_health_system_has_is_not_taken_from_it() {
    let quarantined = |state: &str| {
        let mut node = node_in(state, false, None);
        node["metadata"]["annotations"][nvsentinel::QUARANTINE_ANNOTATIONS] = json!("{}");
        node
    };
    let mut scene = Scene::new(&one_at_a_time());
    scene.fold("nodes", "a", &quarantined("upgrade-required"));
    assert_eq!(scene.we_patch_node("a", &quarantined("cordon-required")), ["S10"]);
    for (seconds, expected) in [(1, &[][..]), (30, &["S10"][..])] {
        let mut scene = Scene::new(&one_at_a_time());
        let tripped = json!({"data": {"status": nvsentinel::TRIPPED}});
        scene.fold("configmaps", nvsentinel::BREAKER, &tripped);
        scene.later(seconds);
        assert_eq!(scene.we_patch_node("a", &node_in("cordon-required", false, None)), expected);
    }
}

#[test]
fn the_version_that_is_asked_for_is_changed_only_to_take_one_back() {
    let taken_back = json!({"spec": {"version": "2.0.0", "previous": {"version": "1.0.0"}, "rollback": {}}});
    let running = json!({"spec": {"version": "2.0.0", "previous": {"version": "1.0.0"}}});
    for (rollout, version, expected) in
        [(&running, "1.0.0", Some("S19")), (&taken_back, "1.0.0", None), (&taken_back, "0.9.0", Some("S19"))]
    {
        let mut scene = on_the_way(&json!({}));
        let asked = |version: &str| json!({"spec": {"driver": {"version": version}}});
        scene.fold("clusterpolicies.nvidia.com", "cluster-policy", &asked("2.0.0"));
        scene.fold("rollouts.pitcrew.dev", "gpu-1", rollout);
        let (at, after) = (scene.now, asked(version));
        let (resource, name) = ("clusterpolicies.nvidia.com", "cluster-policy");
        let change =
            Change { at, by: By::Us, request: None, resource, namespace: "", name, after: Some(&after) };
        let broken =
            take_up(&mut scene.world, &change, |_, broken| broken.map(|(promise, _)| promise.code()));
        assert_eq!(broken, Some(expected), "to {version}");
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
fn a_node_goes_on_to_its_restart_only_when_its_pods_were_told_to_leave() {
    let restart = node_in("pod-restart-required", true, Some(true));
    let mut leaving = pod("a", "work");
    leaving["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    let mut gate = pod("a", "work");
    gate["metadata"]["labels"] = json!({"pitcrew.dev/gate": "smoke"});
    for (pod, seconds, expected) in [
        (pod("a", "work"), 10, &["S4"][..]),
        (pod("a", "work"), 1, &[][..]),
        (pod("b", "work"), 10, &[][..]),
        (leaving, 10, &[][..]),
        (gate, 10, &[][..]),
    ] {
        for state in ["pod-deletion-required", "drain-required"] {
            let mut scene = Scene::new(&one_at_a_time());
            scene.fold("nodes", "a", &node_in(state, true, Some(true)));
            scene.fold("pods", "work-1", &pod);
            scene.later(seconds);
            assert_eq!(scene.we_patch_node("a", &restart), expected, "{state} {pod}");
        }
    }
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

/// A policy that says this of its rollouts, the version that it asks for, and nodes that run an older one.
fn on_the_way(rollout: &Value) -> Scene {
    let mut scene = Scene::new(&json!({"maxParallelUpgrades": 0, "maxUnavailable": "100%"}));
    let upgrade = json!({"maxParallelUpgrades": 0, "maxUnavailable": "100%"});
    let policy = json!({"spec": {"upgradePolicy": upgrade, "rollout": rollout}});
    scene.fold("driverpolicies.pitcrew.dev", "gpu", &policy);
    let template = json!({
        "metadata": {"labels": {"app.kubernetes.io/component": "nvidia-driver"}},
        "spec": {"containers": [{"image": "driver:2.0.0-ubuntu22.04"}]},
    });
    scene.fold("daemonsets.apps", "driver", &json!({"spec": {"template": template}}));
    for (node, mark) in [("a", "true"), ("b", "false")] {
        scene.fold("nodes", node, &marked("upgrade-required", mark));
    }
    scene.later(60);
    scene
}

/// A node with the labels of a stage and of an atom.
fn marked(state: &str, canary: &str) -> Value {
    let mut node = node_in(state, false, None);
    node["metadata"]["labels"]["gpu-canary"] = json!(canary);
    node["metadata"]["labels"]["sim.pitcrew.dev/rack"] = json!("r0");
    node["metadata"]["labels"]["sim.pitcrew.dev/zone"] = json!("z0");
    node
}

fn rollout(phase: &str, more: &Value) -> Value {
    let stages = json!([{"name": "canary", "phase": phase}, {"name": "fleet", "phase": "Waiting"}]);
    let mut rollout = json!({"spec": {"version": "2.0.0"}, "status": {"phase": "Running", "stages": stages}});
    json_patch::merge(&mut rollout, more);
    rollout
}

fn canary_first(bake: &str) -> Value {
    let canary =
        json!({"name": "canary", "nodeSelector": {"gpu-canary": "true"}, "bake": {"duration": bake}});
    json!({"stages": [canary]})
}

#[test]
fn a_node_starts_when_its_stage_is_open() {
    for (phase, expected) in [("Moving", &["S16"][..]), ("Baking", &["S16"][..]), ("Passed", &[][..])] {
        let mut scene = on_the_way(&canary_first("0s"));
        scene.fold_by(By::Us, "rollouts.pitcrew.dev", "gpu-1", &rollout(phase, &json!({})));
        assert_eq!(scene.we_patch_node("b", &marked("cordon-required", "false")), expected, "{phase}");
        assert!(scene.we_patch_node("a", &marked("cordon-required", "true")).is_empty(), "{phase}");
    }
}

#[test]
fn nothing_starts_after_a_stage_has_failed_or_its_version_was_taken_back() {
    let word = json!({"by": "mei"});
    for (phase, more, seconds, expected) in [
        ("Failed", json!({}), 1, &[][..]),
        ("Failed", json!({}), 60, &["S16"][..]),
        ("Moving", json!({"spec": {"rollback": word}}), 60, &["S17"][..]),
        ("Moving", json!({"spec": {"rollback": word, "cleared": word}}), 60, &[][..]),
    ] {
        let mut scene = on_the_way(&canary_first("0s"));
        scene.fold("rollouts.pitcrew.dev", "gpu-1", &rollout(phase, &more));
        scene.later(seconds);
        assert_eq!(scene.we_patch_node("a", &marked("cordon-required", "true")), expected, "{phase} {more}");
    }
}

impl Scene {
    /// The promises that are broken when we say this of a rollout.
    fn we_say(&mut self, said: &Value) -> Vec<&'static str> {
        let before = self.world.rollout("gpu-1").cloned();
        let change = Change {
            at: self.now,
            by: By::Us,
            request: None,
            resource: ROLLOUTS,
            namespace: "",
            name: "gpu-1",
            after: Some(said),
        };
        self.world.fold(&change);
        let step = Step::Rollout("gpu-1", before.as_ref(), self.world.rollout("gpu-1"));
        let broken = SAFETY.iter().filter(|(_, check)| check(&self.world, &change, &step).is_some());
        broken.map(|(promise, _)| promise.code()).collect()
    }
}

#[test]
fn a_stage_passes_when_its_nodes_are_done_and_were_watched_for_long_enough() {
    for (state, version, minutes, expected) in [
        ("upgrade-done", "2.0.0", 5, &[][..]),
        ("upgrade-done", "2.0.0", 4, &["S16"][..]),
        ("upgrade-done", "1.0.0", 5, &["S16"][..]),
        ("validation-required", "2.0.0", 5, &["S16"][..]),
        ("upgrade-failed", "2.0.0", 5, &["S16"][..]),
    ] {
        let mut scene = on_the_way(&canary_first("5m"));
        scene.fold("nodes", "a", &marked(state, "true"));
        let mut driver = pod("a", "driver");
        driver["spec"]["containers"][0]["image"] = json!(format!("driver:{version}-ubuntu22.04"));
        scene.fold("pods", "driver-a", &driver);
        assert!(scene.we_say(&rollout("Moving", &json!({}))).is_empty());
        assert!(scene.we_say(&rollout("Baking", &json!({}))).is_empty());
        scene.later(minutes * 60);
        assert_eq!(scene.we_say(&rollout("Passed", &json!({}))), expected, "{state} {version} {minutes}");
    }
}

/// The driver of node a, after so many restarts.
fn restarted(times: u32) -> Value {
    let mut driver = pod("a", "driver");
    driver["spec"]["containers"][0]["image"] = json!("driver:2.0.0-ubuntu22.04");
    driver["status"]["containerStatuses"] = json!([{"restartCount": times}]);
    driver
}

#[test]
fn a_stage_does_not_pass_if_its_drivers_restarted_more_often_than_they_may() {
    let booted = |node: &mut Value, boot: &str| node["status"]["nodeInfo"] = json!({"bootID": boot});
    for (may, times, boots, seconds_before, expected) in [
        (0, 0, false, 100, &[][..]),
        (0, 1, false, 100, &["S16"][..]),
        (1, 1, false, 100, &[][..]),
        (1, 2, false, 100, &["S16"][..]),
        (0, 1, true, 100, &[][..]),
        // That may not be known yet.
        (0, 1, false, 1, &[][..]),
    ] {
        let mut stages = canary_first("5m");
        stages["stages"][0]["bake"]["maxDriverRestarts"] = json!(may);
        let mut scene = on_the_way(&stages);
        let mut node = marked("upgrade-done", "true");
        booted(&mut node, "one");
        scene.fold("nodes", "a", &node);
        // What happened before the bake does not count.
        scene.fold("pods", "driver-a", &restarted(3));
        scene.later(600);
        assert!(scene.we_say(&rollout("Baking", &json!({}))).is_empty());
        scene.later(300 - seconds_before);
        booted(&mut node, if boots { "two" } else { "one" });
        scene.fold("nodes", "a", &node);
        scene.fold("pods", "driver-a", &restarted(3 + times));
        scene.later(seconds_before);
        let broken = scene.we_say(&rollout("Passed", &json!({})));
        assert_eq!(broken, expected, "{times} of {may}, {seconds_before} s ago, booted: {boots}");
    }
}

#[test]
fn restarts_during_a_visit_inside_of_a_bake_are_what_the_visit_is_for() {
    for (state, expected) in [("upgrade-done", &["S16"][..]), ("validation-required", &[][..])] {
        let mut scene = on_the_way(&canary_first("5m"));
        scene.fold("nodes", "a", &marked("upgrade-done", "true"));
        scene.fold("pods", "driver-a", &restarted(0));
        assert!(scene.we_say(&rollout("Baking", &json!({}))).is_empty());
        scene.later(100);
        scene.fold("nodes", "a", &marked(state, "true"));
        scene.fold("pods", "driver-a", &restarted(1));
        scene.later(100);
        scene.fold("nodes", "a", &marked("upgrade-done", "true"));
        scene.later(100);
        assert_eq!(scene.we_say(&rollout("Passed", &json!({}))), expected, "{state}");
    }
}

#[test]
fn a_node_that_is_not_to_run_the_driver_counts_until_its_driver_pod_is_gone() {
    let mut scene = Scene::new(&one_at_a_time());
    let mut unlabelled = node_in("upgrade-required", false, None);
    unlabelled["metadata"]["labels"]["nvidia.com/gpu.deploy.driver"] = json!("false");
    scene.fold("nodes", "a", &unlabelled);
    assert!(scene.world.nodes["a"].member);
    let (at, by, request) = (scene.now, By::Others, None);
    let (resource, namespace, name) = ("pods", "gpu-operator", "driver-a");
    scene.world.fold(&Change { at, by, request, resource, namespace, name, after: None });
    assert!(!scene.world.nodes["a"].member);
    assert_eq!(scene.world.members_at(scene.now), 2, "somebody may not know it yet");
}

#[test]
fn a_stage_that_waits_for_a_person_passes_with_a_word() {
    for (word, expected) in
        [(json!({}), &["S16"][..]), (json!({"promotions": [{"stage": "canary"}]}), &[][..])]
    {
        let mut stages = canary_first("0s");
        stages["stages"][0]["promotion"] = json!("Manual");
        let mut scene = on_the_way(&stages);
        scene.fold("nodes", "a", &marked("upgrade-done", "true"));
        let mut driver = pod("a", "driver");
        driver["spec"]["containers"][0]["image"] = json!("driver:2.0.0-ubuntu22.04");
        scene.fold("pods", "driver-a", &driver);
        assert!(scene.we_say(&rollout("AwaitingApproval", &json!({}))).is_empty());
        assert_eq!(scene.we_say(&rollout("Passed", &json!({ "spec": word }))), expected);
    }
}

#[test]
fn a_node_starts_in_a_window_that_is_long_enough() {
    // It is one minute past midnight.
    for (start, duration, expected) in
        [("00:00", "1h", &[][..]), ("00:10", "1h", &["S15"][..]), ("00:00", "20m", &["S15"][..])]
    {
        let mut scene = on_the_way(&json!({"windows": [{"start": start, "duration": duration}]}));
        let broken = scene.we_patch_node("a", &marked("cordon-required", "true"));
        assert_eq!(broken, expected, "{start} {duration}");
    }
}

#[test]
fn an_atom_starts_whole() {
    let atoms = json!({"topology": {"atom": "sim.pitcrew.dev/rack"}});
    for (state, expected) in
        [("upgrade-required", &[][..]), ("upgrade-done", &["S5"][..]), ("upgrade-failed", &[][..])]
    {
        let mut scene = on_the_way(&atoms);
        let mut driver = pod("b", "driver");
        driver["spec"]["containers"][0]["image"] = json!("driver:1.0.0-ubuntu22.04");
        scene.fold("pods", "driver-b", &driver);
        scene.fold("nodes", "b", &marked(state, "false"));
        scene.later(10);
        assert_eq!(scene.we_patch_node("a", &marked("cordon-required", "true")), expected, "{state}");
    }
    // There is room for one of two.
    let mut scene = on_the_way(&atoms);
    let mut driver = pod("b", "driver");
    driver["spec"]["containers"][0]["image"] = json!("driver:1.0.0-ubuntu22.04");
    scene.fold("pods", "driver-b", &driver);
    let policy = json!({"spec": {"upgradePolicy": one_at_a_time(), "rollout": atoms}});
    scene.fold("driverpolicies.pitcrew.dev", "gpu", &policy);
    scene.later(10);
    assert_eq!(scene.we_patch_node("a", &marked("cordon-required", "true")), ["S5"]);
}

/// On a visit, cordoned, and tried for the second time.
fn tried_again(state: &str) -> Value {
    let mut node = node_in(state, true, Some(true));
    let record = node["metadata"]["annotations"]["pitcrew.dev/visit"].to_string();
    let record: String = serde_json::from_str(&record.replace(r#"attempts\":0"#, r#"attempts\":1"#)).unwrap();
    node["metadata"]["annotations"]["pitcrew.dev/visit"] = json!(record);
    node["metadata"]["labels"]["sim.pitcrew.dev/rack"] = json!("r0");
    node
}

#[test]
fn a_node_of_an_atom_that_is_out_and_tried_again_goes_by_itself() {
    let mut scene = on_the_way(&json!({}));
    let atoms = json!({"topology": {"atom": "sim.pitcrew.dev/rack"}});
    let policy = json!({"spec": {"upgradePolicy": one_at_a_time(), "rollout": atoms}});
    scene.fold("driverpolicies.pitcrew.dev", "gpu", &policy);
    let mut driver = pod("b", "driver");
    driver["spec"]["containers"][0]["image"] = json!("driver:1.0.0-ubuntu22.04");
    scene.fold("pods", "driver-b", &driver);
    scene.fold_by(By::Us, "nodes", "a", &tried_again("upgrade-required"));
    scene.later(10);
    assert_eq!(scene.we_patch_node("a", &tried_again("cordon-required")), [""; 0]);
}

#[test]
fn a_group_and_a_stage_have_limits_of_their_own() {
    let spread = json!({"topology": {"spread": {"label": "sim.pitcrew.dev/zone", "max": 1}}});
    let stage = json!({"stages": [{"name": "canary", "count": 2, "maxParallelUpgrades": 1}]});
    for limits in [spread, stage] {
        let mut scene = on_the_way(&limits);
        assert!(scene.we_patch_node("a", &marked("cordon-required", "true")).is_empty());
        assert_eq!(scene.we_patch_node("b", &marked("cordon-required", "false")), ["S3"], "{limits}");
    }
}
