//! Small bodies of each kind, and edits for both of their doors.

use crate::kinds::{Kind, label, meta_edit, one_of, word};
use fastrand::Rng;
use serde_json::{Value, json};

impl Kind {
    /// A whole object without its name.
    pub(crate) fn body(&self, chance: &mut Rng) -> Value {
        let mut body = match self.kind {
            "Pod" => pod(chance),
            "Node" => {
                json!({"spec": maybe(chance, json!({"unschedulable": true})), "status": {"conditions": [ready(chance)], "capacity": {"cpu": "4"}}})
            }
            "ConfigMap" => json!({"data": {"key": word(chance)}}),
            "DaemonSet" => {
                json!({"spec": {"selector": {"matchLabels": {"app": "x"}}, "template": template(chance)}})
            }
            "Deployment" => {
                json!({"spec": {"replicas": chance.u8(0..3), "selector": {"matchLabels": {"app": "x"}}, "template": template(chance)}})
            }
            "ControllerRevision" => json!({"revision": chance.u8(1..4), "data": {"spec": {"word": "a"}}}),
            "PodDisruptionBudget" => {
                json!({"spec": {"minAvailable": chance.u8(0..3), "selector": {"matchLabels": {"app": label(chance)}}}})
            }
            "Lease" => {
                json!({"spec": {"holderIdentity": word(chance), "leaseDurationSeconds": 15, "renewTime": "2025-01-02T03:04:05.000000Z"}})
            }
            "Event" => {
                json!({"involvedObject": {"kind": "Pod", "namespace": "<ns>", "name": word(chance)}, "reason": "Tested", "message": word(chance), "type": "Normal", "count": chance.u8(1..3),
                "firstTimestamp": "2025-01-02T03:04:05Z", "lastTimestamp": "2025-01-02T03:04:05Z", "source": {"component": "tester"}})
            }
            "ResourceClaim" => {
                json!({"spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.example.com"}}]}}})
            }
            "ResourceSlice" => {
                json!({"spec": {"driver": "gpu.example.com", "nodeName": "node-1", "pool": {"name": "pool", "generation": 1, "resourceSliceCount": 1},
                "devices": [{"name": "gpu-0"}]}})
            }
            "DriverPolicy" => policy(chance),
            "Rollout" => {
                json!({"spec": {"policy": "DriverPolicy/gpu", "driver": "gpu", "target": {"ns/ds": word(chance)}, "abort": chance.bool()}})
            }
            _ => json!({}),
        };
        body["apiVersion"] = self.api_version().into();
        body["kind"] = self.kind.into();
        body["metadata"] = json!({"labels": {"run": "<run>", "app": label(chance)}});
        if chance.u8(..5) == 0 {
            body["metadata"]["finalizers"] = json!(["example.com/hold"]);
        }
        if chance.u8(..6) == 0 {
            body["metadata"]["annotations"] = json!({"note": word(chance)});
        }
        if chance.u8(..6) == 0 && self.kind == "Pod" {
            body["status"] = json!({"phase": "Running"});
        }
        body
    }

    /// A merge patch of what the main door may change.
    pub(crate) fn edit(&self, chance: &mut Rng) -> Value {
        if chance.u8(..3) == 0 {
            return meta_edit(chance);
        }
        match self.kind {
            "Pod" => one_of(
                &[
                    json!({"spec": {"activeDeadlineSeconds": 100}}),
                    json!({"status": {"phase": "Failed"}}),
                    json!({"metadata": {"labels": {"app": "y"}}}),
                ],
                chance,
            ),
            "Node" => one_of(
                &[
                    json!({"spec": {"unschedulable": true}}),
                    json!({"spec": {"unschedulable": null}}),
                    json!({"spec": {"unschedulable": false}}),
                    json!({"spec": {"taints": [{"key": "k", "value": "v", "effect": "NoSchedule"}]}}),
                    json!({"spec": {"taints": null}}),
                    json!({"status": {"capacity": {"cpu": "8"}}}),
                ],
                chance,
            ),
            "ConfigMap" => one_of(
                &[
                    json!({"data": {"key": "a"}}),
                    json!({"data": {"key": "b", "more": "c"}}),
                    json!({"data": null}),
                    json!({"data": {"key": null}}),
                ],
                chance,
            ),
            "DaemonSet" => one_of(
                &[
                    json!({"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 5}}}}),
                    json!({"spec": {"updateStrategy": {"type": "OnDelete", "rollingUpdate": null}}}),
                    json!({"spec": {"minReadySeconds": 3}}),
                    json!({"status": {"numberReady": 3}}),
                    json!({"spec": {"template": {"metadata": {"annotations": {"note": word(chance)}}}}}),
                ],
                chance,
            ),
            "Deployment" => one_of(
                &[
                    json!({"spec": {"replicas": chance.u8(0..3)}}),
                    json!({"spec": {"replicas": null}}),
                    json!({"spec": {"paused": true}}),
                    json!({"spec": {"template": {"metadata": {"annotations": {"note": word(chance)}}}}}),
                ],
                chance,
            ),
            "ControllerRevision" => json!({"revision": chance.u8(1..4)}),
            "PodDisruptionBudget" => one_of(
                &[
                    json!({"spec": {"minAvailable": chance.u8(0..3)}}),
                    json!({"status": {"disruptionsAllowed": 5}}),
                    json!({"spec": {"unhealthyPodEvictionPolicy": "AlwaysAllow"}}),
                    json!({"spec": {"selector": {"matchLabels": {"app": label(chance)}}}}),
                ],
                chance,
            ),
            "Lease" => one_of(
                &[
                    json!({"spec": {"holderIdentity": word(chance)}}),
                    json!({"spec": {"renewTime": "2025-02-02T03:04:05.000000Z"}}),
                    json!({"spec": {"leaseTransitions": chance.u8(0..3)}}),
                ],
                chance,
            ),
            "Event" => json!({"count": chance.u8(1..4)}),
            "ResourceSlice" => json!({"spec": {"pool": {"generation": chance.u8(1..4)}}}),
            "DriverPolicy" => policy_edit(chance),
            "Rollout" => rollout_edit(chance),
            _ => meta_edit(chance),
        }
    }

    /// A merge patch for the status door; some of it is not its to change.
    pub(crate) fn status_edit(&self, chance: &mut Rng) -> Value {
        if chance.u8(..6) == 0 {
            return if self.is_custom() {
                json!({"spec": {"abort": true, "mode": "Guest"}})
            } else {
                self.edit(chance)
            };
        }
        match self.kind {
            "Pod" => {
                let ready = json!({"type": "Ready", "status": if chance.bool() { "True" } else { "False" }, "lastTransitionTime": "2025-01-02T03:04:05Z"});
                let phase = ["Running", "Running", "Succeeded", "Failed"][chance.usize(..4)];
                one_of(
                    &[
                        json!({"status": {"phase": phase}}),
                        json!({"status": {"phase": "Running", "conditions": [ready]}}),
                        json!({"status": {"message": "a"}}),
                    ],
                    chance,
                )
            }
            "Node" => one_of(
                &[
                    json!({"status": {"conditions": [ready(chance)]}}),
                    json!({"status": {"capacity": {"cpu": "8"}, "allocatable": {"cpu": "7"}}}),
                    json!({"status": {"capacity": null}}),
                ],
                chance,
            ),
            "DaemonSet" => {
                json!({"status": {"observedGeneration": 1, "desiredNumberScheduled": chance.u8(0..3), "numberReady": 0, "currentNumberScheduled": 1, "numberMisscheduled": 0}})
            }
            "Deployment" => json!({"status": {"replicas": chance.u8(1..3), "observedGeneration": 1}}),
            "PodDisruptionBudget" => {
                json!({"status": {"observedGeneration": chance.u8(0..3), "disruptionsAllowed": chance.u8(0..3), "currentHealthy": chance.u8(0..3), "desiredHealthy": chance.u8(0..3), "expectedPods": 3}})
            }
            "DriverPolicy" => one_of(
                &[
                    json!({"status": {"ready": true, "message": word(chance)}}),
                    json!({"status": {"observedGeneration": "one"}}),
                    json!({"status": null}),
                    json!({"status": {"effective": {"mode": {"from": "default", "value": "Auto"}}}}),
                    json!({"status": {"effective": {"mode": {"from": "default"}}}}),
                    json!({"status": {}}),
                    json!({"status": {"unknown": true}}),
                ],
                chance,
            ),
            "Rollout" => one_of(
                &[
                    json!({"status": {"phase": "Running", "total": 3, "done": chance.u8(0..3), "failed": 0, "moving": 1, "waiting": 1, "unavailable": 1}}),
                    json!({"status": {"phase": "Running"}}),
                    json!({"status": {"phase": "Wrong", "total": 3, "done": 0, "failed": 0, "moving": 1, "waiting": 1, "unavailable": 1}}),
                    json!({"status": {"done": -1}}),
                    json!({"status": {"finishedAt": "2025-01-02T03:04:05Z"}}),
                    json!({"status": {"finishedAt": "soon"}}),
                ],
                chance,
            ),
            "Namespace" => json!({"status": {"conditions": null}}),
            _ => json!({"status": {}}),
        }
    }
}

fn pod(chance: &mut Rng) -> Value {
    let mut spec = json!({"containers": [{"name": "main", "image": "image:1"}]});
    if chance.bool() {
        spec["nodeName"] = format!("node-{}", chance.u8(1..3)).into();
    }
    if chance.u8(..3) == 0 {
        spec["terminationGracePeriodSeconds"] = json!(chance.u8(0..2) * 5);
    }
    json!({"spec": spec})
}

fn template(chance: &mut Rng) -> Value {
    json!({"metadata": {"labels": {"app": "x"}}, "spec": {"containers": [{"name": "main", "image": format!("image:{}", chance.u8(1..3))}]}})
}

fn policy(chance: &mut Rng) -> Value {
    let mut spec = json!({"driver": {"name": "gpu"}});
    let extra = one_of(
        &[
            json!({}),
            json!({"mode": "Guest"}),
            json!({"limits": {"driverReady": "1h"}}),
            json!({"driver": {"daemonSets": {}}}),
            json!({"driver": {"devices": {"resources": ["a"]}}}),
            json!({"clients": {"extra": [{"selector": "app=x"}]}}),
            json!({"unknown": {"a": 1}}),
            json!({"health": {"conditions": []}}),
            json!({"upgradePolicy": {"autoUpgrade": null, "drain": {"enable": true}}}),
        ],
        chance,
    );
    json_patch::merge(&mut spec, &extra);
    json!({"spec": spec})
}

fn ready(chance: &mut Rng) -> Value {
    json!({"type": "Ready", "status": if chance.bool() { "True" } else { "False" }, "lastHeartbeatTime": "2025-01-02T03:04:05Z", "lastTransitionTime": "2025-01-02T03:04:05Z"})
}

fn maybe(chance: &mut Rng, value: Value) -> Value {
    if chance.u8(..4) == 0 { value } else { json!({}) }
}

/// Right and wrong ones: a custom resource is validated.
fn policy_edit(chance: &mut Rng) -> Value {
    one_of(
        &[
            json!({"spec": {"mode": "Guest"}}),
            json!({"spec": {"mode": "Wrong"}}),
            json!({"spec": {"upgradePolicy": {"maxParallelUpgrades": chance.u8(0..3)}}}),
            json!({"spec": {"limits": null}}),
            json!({"spec": {"limits": {"driverReady": "5m"}}}),
            json!({"spec": {"unknown": 1}}),
            json!({"spec": {"driver": {"name": 7}}}),
            json!({"spec": {"driver": null}}),
            json!({"spec": {"nodeSelector": {"pool": word(chance)}}}),
            json!({"status": {"ready": true}}),
            json!({"spec": {"clients": {"extra": [{"selector": "app=x"}]}}}),
            json!({"spec": {"clients": {"extra": [{"order": 1}]}}}),
            json!({"spec": {"upgradePolicy": {"maxUnavailable": "30%"}}}),
            json!({"spec": {"upgradePolicy": {"drain": {"enable": true, "timeoutSeconds": null}}}}),
        ],
        chance,
    )
}

fn rollout_edit(chance: &mut Rng) -> Value {
    one_of(
        &[
            json!({"spec": {"abort": true}}),
            json!({"spec": {"abort": false}}),
            json!({"spec": {"version": word(chance)}}),
            json!({"spec": {"version": null}}),
            json!({"spec": {"target": null}}),
            json!({"spec": {"target": {"ns/ds": 5}}}),
            json!({"spec": {"abort": "yes"}}),
        ],
        chance,
    )
}
