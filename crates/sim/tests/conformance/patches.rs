//! Patches of every dialect.

use crate::call::{Body, Call};
use crate::generate::name;
use crate::kinds::{self, Kind};
use fastrand::Rng;
use serde_json::{Value, json};

pub(crate) fn patch(chance: &mut Rng, kind: &Kind) -> Call {
    let name = name(chance);
    let status = kind.has_status && chance.u8(..3) == 0;
    let path = kind.path(name) + if status { "/status" } else { "" };
    let call = Call::new("PATCH", path);
    let edit = |chance: &mut Rng| if status { kind.status_edit(chance) } else { kind.edit(chance) };
    match chance.u8(..10) {
        0..3 => {
            let mut edit = edit(chance);
            if chance.u8(..8) == 0 {
                // How a client says which object it means.
                let uid = if chance.bool() {
                    format!("<uid:{}>", kind.key(name))
                } else {
                    "22222222-0000-4000-8000-000000000000".to_owned()
                };
                edit = kinds::meta_edit(chance);
                json_patch::merge(&mut edit, &json!({"metadata": {"uid": uid}}));
            }
            if chance.u8(..4) == 0 {
                let version = if chance.bool() { "rv" } else { "old" };
                json_patch::merge(
                    &mut edit,
                    &json!({"metadata": {"resourceVersion": format!("<{version}:{}>", kind.key(name))}}),
                );
            }
            Call { content_type: "application/merge-patch+json", ..call }.sending(Body::Json(edit))
        }
        3..5 => {
            let body = if chance.bool() { edit(chance) } else { strategic(chance, kind, status) };
            Call { content_type: "application/strategic-merge-patch+json", ..call }.sending(Body::Json(body))
        }
        5..7 => Call { content_type: "application/json-patch+json", ..call }
            .sending(Body::Json(operations(chance, kind, name))),
        7 if chance.u8(..4) == 0 => {
            Call { content_type: "application/wrong+json", ..call }.sending(Body::Json(json!({})))
        }
        // Who wrote a zero into these statuses is not kept.
        _ if status && matches!(kind.kind, "DaemonSet" | "Deployment" | "PodDisruptionBudget" | "Node") => {
            Call { content_type: "application/merge-patch+json", ..call }.sending(Body::Json(edit(chance)))
        }
        _ => apply(chance, kind, name, status, call),
    }
}

/// Patches that only the strategic dialect understands.
fn strategic(chance: &mut Rng, kind: &Kind, status: bool) -> Value {
    let finalizers = [
        json!({"metadata": {"finalizers": ["example.com/other"]}}),
        json!({"metadata": {"$deleteFromPrimitiveList/finalizers": ["example.com/hold"]}}),
        json!({"metadata": {"labels": {"$patch": "replace", "app": "x", "run": "<run>"}}}),
    ];
    let own = match (kind.kind, status) {
        ("Pod", true) => vec![
            json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}}),
            json!({"status": {"conditions": [{"type": "example.com/gate", "status": "False", "reason": "Test"}]}}),
            json!({"status": {"conditions": [{"type": "Ready", "$patch": "delete"}]}}),
        ],
        ("Pod", false) => vec![json!({"spec": {"containers": [{"name": "main", "image": "image:2"}]}})],
        ("Node", true) => vec![
            json!({"status": {"conditions": [{"type": "Ready", "status": "False"}]}}),
            json!({"status": {"conditions": [{"type": "GpuHealthy", "status": "True", "reason": "Test"}]}}),
            json!({"status": {"conditions": [{"type": "Ready", "$patch": "delete"}]}}),
            json!({"status": {"addresses": [{"type": "InternalIP", "address": "10.0.0.1"}]}}),
        ],
        ("Node", false) => vec![
            json!({"spec": {"taints": [{"key": "other", "effect": "NoExecute"}]}}),
            json!({"spec": {"taints": [{"$patch": "replace"}, {"key": "k", "effect": "NoSchedule"}]}}),
        ],
        ("DaemonSet" | "Deployment", false) => vec![
            json!({"spec": {"template": {"spec": {"containers": [{"name": "main", "image": "image:2"}]}}}}),
            json!({"spec": {"template": {"spec": {"containers": [{"name": "side", "image": "image:1"}]}}}}),
            json!({"spec": {"template": {"spec": {"containers": [{"name": "side", "$patch": "delete"}]}}}}),
            json!({"spec": {"template": {"spec": {"containers": [{"name": "main", "env": [{"name": "A", "value": "1"}]}]}}}}),
            json!({"spec": {"template": {"spec": {"containers": [{"name": "main", "env": [{"name": "B", "value": "2"}]}]}}}}),
            json!({"spec": {"template": {"spec": {"tolerations": [{"operator": "Exists"}]}}}}),
            json!({"spec": {"template": {"spec": {"tolerations": [{"operator": "Exists"}, {"key": "k"}]}}}}),
        ],
        _ => Vec::new(),
    };
    let all: Vec<Value> = own.iter().cloned().chain(finalizers).collect();
    if !own.is_empty() && chance.u8(..3) > 0 {
        kinds::one_of(&own, chance)
    } else {
        kinds::one_of(&all, chance)
    }
}

fn operations(chance: &mut Rng, kind: &Kind, name: &str) -> Value {
    let key = kind.key(name);
    let choices = [
        json!([{"op": "add", "path": "/metadata/labels/more", "value": "a"}]),
        json!([{"op": "remove", "path": "/metadata/labels/more"}]),
        json!([{"op": "replace", "path": "/metadata/labels/app", "value": "y"}]),
        json!([{"op": "test", "path": "/metadata/labels/app", "value": "x"}, {"op": "replace", "path": "/metadata/labels/app", "value": "y"}]),
        json!([{"op": "test", "path": "/metadata/resourceVersion", "value": format!("<rv:{key}>")}, {"op": "add", "path": "/metadata/labels/more", "value": "b"}]),
        json!([{"op": "test", "path": "/metadata/resourceVersion", "value": format!("<old:{key}>")}, {"op": "add", "path": "/metadata/labels/more", "value": "c"}]),
        json!([{"op": "replace", "path": "/metadata/uid", "value": "22222222-0000-4000-8000-000000000000"}]),
        json!([{"op": "remove", "path": "/metadata/finalizers"}]),
        json!([{"op": "add", "path": "/metadata/finalizers/-", "value": "example.com/third"}]),
        json!([{"op": "add", "path": "/metadata/annotations", "value": {"note": "c"}}]),
        json!([{"op": "add", "path": "/spec/unknown/deep", "value": 1}]),
        json!([]),
        json!({"op": "wrong"}),
        json!([{"op": "copy", "from": "/metadata/name", "path": "/metadata/labels/copy"}]),
        json!([{"op": "move", "from": "/metadata/labels/more", "path": "/metadata/labels/moved"}]),
    ];
    kinds::one_of(&choices, chance)
}

fn apply(chance: &mut Rng, kind: &Kind, name: &str, status: bool, call: Call) -> Call {
    let mut config = kind.config(chance, status);
    if chance.u8(..20) > 0 {
        config["metadata"]["name"] = kind.name(name).into();
    }
    let manager = ["m1", "m1", "m2"][chance.usize(..3)];
    let mut call = Call { content_type: "application/apply-patch+yaml", ..call }.sending(Body::Json(config));
    if chance.u8(..20) > 0 {
        call = call.with("fieldManager", manager);
    }
    if chance.bool() {
        call = call.with("force", "true");
    }
    call
}
