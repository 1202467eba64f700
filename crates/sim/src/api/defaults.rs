//! What a real server fills in for the built-in kinds, as far as clients of this cluster rely on it.
//!
//! In comes a new object of a built-in kind, out goes the same object with the fields that nobody has to write.
//! Custom resources get theirs from their schema (`schema.rs`).

use serde_json::{Value, json};

/// Sets the defaults of a spec. Runs on every write, so that a field cannot be un-defaulted.
pub(super) fn fill_spec(kind: &str, object: &mut Value) {
    match kind {
        "Pod" => fill_pod(&mut object["spec"]),
        "DaemonSet" => {
            fill(object, &["spec", "updateStrategy", "type"], json!("RollingUpdate"));
            fill(object, &["spec", "revisionHistoryLimit"], json!(10));
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
            fill(object, &["spec", "strategy", "type"], json!("RollingUpdate"));
        }
        "ReplicaSet" => fill(object, &["spec", "replicas"], json!(1)),
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

fn fill_pod(spec: &mut Value) {
    fill(spec, &["restartPolicy"], json!("Always"));
    fill(spec, &["terminationGracePeriodSeconds"], json!(30));
    fill(spec, &["schedulerName"], json!("default-scheduler"));
    fill(spec, &["dnsPolicy"], json!("ClusterFirst"));
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
