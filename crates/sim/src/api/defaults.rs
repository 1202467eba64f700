//! What a real server fills in for the built-in kinds, as far as clients of this cluster rely on it.
//!
//! In comes a new object of a built-in kind, out goes the same object with the fields that nobody has to write.
//! Custom resources get theirs from their schema (`schema.rs`).

use serde_json::{Value, json};

/// Sets the defaults of a spec. Runs on every write, so that a field cannot be un-defaulted.
pub(super) fn fill_spec(kind: &str, object: &mut Value) {
    match kind {
        "Pod" => fill_pod(object, &["spec"]),
        "DaemonSet" => {
            fill(object, &["spec", "updateStrategy", "type"], json!("RollingUpdate"));
            fill(object, &["spec", "revisionHistoryLimit"], json!(10));
            fill_pod(object, &["spec", "template", "spec"]);
            if object["spec"]["updateStrategy"]["type"] == "RollingUpdate" {
                fill(
                    object,
                    &["spec", "updateStrategy", "rollingUpdate"],
                    json!({"maxSurge": 0, "maxUnavailable": 1}),
                );
            }
        }
        "Deployment" => {
            fill(object, &["spec", "replicas"], json!(1));
            fill(object, &["spec", "revisionHistoryLimit"], json!(10));
            fill(object, &["spec", "progressDeadlineSeconds"], json!(600));
            fill(object, &["spec", "strategy", "type"], json!("RollingUpdate"));
            fill_pod(object, &["spec", "template", "spec"]);
            if object["spec"]["strategy"]["type"] == "RollingUpdate" {
                fill(
                    object,
                    &["spec", "strategy", "rollingUpdate"],
                    json!({"maxSurge": "25%", "maxUnavailable": "25%"}),
                );
            }
        }
        "ReplicaSet" => fill(object, &["spec", "replicas"], json!(1)),
        "ResourceClaim" => {
            let requests = object.pointer_mut("/spec/devices/requests").and_then(Value::as_array_mut);
            for request in requests.into_iter().flatten().filter(|request| request["exactly"].is_object()) {
                fill(request, &["exactly", "allocationMode"], json!("ExactCount"));
                if request["exactly"]["allocationMode"] == "ExactCount" {
                    fill(request, &["exactly", "count"], json!(1));
                }
            }
        }
        "StatefulSet" => {
            fill(object, &["spec", "replicas"], json!(1));
            fill(object, &["spec", "podManagementPolicy"], json!("OrderedReady"));
            fill(object, &["spec", "updateStrategy", "type"], json!("RollingUpdate"));
        }
        "Job" => {
            fill(object, &["spec", "parallelism"], json!(1));
            fill(object, &["spec", "completions"], json!(1));
            fill(object, &["spec", "backoffLimit"], json!(6));
        }
        _ => {}
    }
}

/// Fields that Go always writes, whether there is something to say or not. Runs on every write.
pub(super) fn fill_zeros(kind: &str, object: &mut Value) {
    let status: &[&str] = match kind {
        "PodDisruptionBudget" => &["currentHealthy", "desiredHealthy", "disruptionsAllowed", "expectedPods"],
        "DaemonSet" => {
            &["currentNumberScheduled", "desiredNumberScheduled", "numberMisscheduled", "numberReady"]
        }
        "ReplicaSet" => &["replicas"],
        "StatefulSet" => &["availableReplicas", "replicas"],
        _ => &[],
    };
    for field in status {
        fill(object, &["status", field], json!(0));
    }
    match kind {
        "Deployment" | "Job" | "ResourceClaim" => fill(object, &["status"], json!({})),
        "Node" => {
            fill(object, &["spec"], json!({}));
            drop_value(&mut object["spec"], "unschedulable", &json!(false));
            drop_value(&mut object["spec"], "taints", &json!([]));
            fill(object, &["status"], json!({}));
            drop_value(&mut object["status"], "conditions", &json!([]));
            // What a kubelet does not keep for itself is there for pods.
            let capacity = object["status"]["capacity"].clone();
            if capacity.is_object() {
                fill(object, &["status", "allocatable"], capacity);
            }
        }
        "Pod" => drop_value(&mut object["status"], "conditions", &json!([])),
        "Namespace" => {
            claim_namespace(object);
            fill(object, &["status", "phase"], json!("Active"));
        }
        "Event" => {
            fill(object, &["reportingComponent"], json!(""));
            fill(object, &["reportingInstance"], json!(""));
            fill(object, &["source"], json!({}));
        }
        "Lease" => fill(object, &["spec"], json!({})),
        "PodDisruptionBudget" => {
            fill(object, &["spec"], json!({}));
            drop_value(&mut object["status"], "observedGeneration", &json!(0));
        }
        "ConfigMap" => drop_value(object, "data", &json!({})),
        _ => {}
    }
}

fn fill_pod(object: &mut Value, spec: &[&str]) {
    let defaults = [
        ("restartPolicy", json!("Always")),
        ("terminationGracePeriodSeconds", json!(30)),
        ("schedulerName", json!("default-scheduler")),
        ("dnsPolicy", json!("ClusterFirst")),
    ];
    for (field, default) in defaults {
        fill(object, &[spec, &[field]].concat(), default);
    }
}

/// What a namespace carries: the finalizer of its controller, and its name as a label.
fn claim_namespace(namespace: &mut Value) {
    let name = namespace["metadata"]["name"].clone();
    fill(namespace, &["metadata", "labels", "kubernetes.io/metadata.name"], name);
    fill(namespace, &["spec", "finalizers"], json!(["kubernetes"]));
}

/// The status a new object starts with. Most kinds start without one, whatever the client sent; a kubelet that
/// registers its node is the exception.
pub(super) fn initial_status(kind: &str, sent: Value) -> Value {
    match kind {
        "Node" => sent,
        "Pod" => json!({"phase": "Pending"}),
        "Namespace" => json!({"phase": "Active"}),
        _ => Value::Null,
    }
}

/// Go's `omitempty`: a field that says nothing is not written.
fn drop_value(object: &mut Value, field: &str, nothing: &Value) {
    if let Some(object) = object.as_object_mut().filter(|object| object.get(field) == Some(nothing)) {
        object.remove(field);
    }
}

/// Steps into missing objects, and leaves alone what has an unexpected type.
fn fill(object: &mut Value, path: &[&str], default: Value) {
    let mut field = object;
    for step in path {
        if field.is_null() {
            *field = json!({});
        }
        let Some(map) = field.as_object_mut() else { return };
        field = map.entry(*step).or_insert(Value::Null);
    }
    if field.is_null() {
        *field = default;
    }
}
