//! The differences that are meant, each with its reason. `docs/conformance.md` tells them to people.

use crate::call::Call;
use crate::side::Answer;
use serde_json::Value;

/// Fields that a real server fills in, with the value that it fills in. Nothing in pitcrew or its cluster reads
/// them, and the embedded server would carry them through every copy of every pod and node.
const FILLED_IN: &[(&str, &str)] = &[
    ("imagePullPolicy", r#""IfNotPresent""#),
    ("resources", "{}"),
    ("terminationMessagePath", r#""/dev/termination-log""#),
    ("terminationMessagePolicy", r#""File""#),
    ("enableServiceLinks", "true"),
    ("preemptionPolicy", r#""PreemptLowerPriority""#),
    ("priority", "0"),
    ("securityContext", "{}"),
    ("qosClass", r#""BestEffort""#),
    (
        "tolerations",
        r#"[{"effect":"NoExecute","key":"node.kubernetes.io/not-ready","operator":"Exists","tolerationSeconds":300},{"effect":"NoExecute","key":"node.kubernetes.io/unreachable","operator":"Exists","tolerationSeconds":300}]"#,
    ),
    ("daemonEndpoints", r#"{"kubeletEndpoint":{"Port":0}}"#),
    (
        "nodeInfo",
        r#"{"architecture":"","bootID":"","containerRuntimeVersion":"","kernelVersion":"","kubeProxyVersion":"","kubeletVersion":"","machineID":"","operatingSystem":"","osImage":"","systemUUID":""}"#,
    ),
];

/// Takes out of both answers what is not compared.
pub(crate) fn leave_out(call: &Call, real: &mut Answer, embedded: &mut Answer) {
    for answer in [&mut *real, &mut *embedded] {
        cut_go_values(&mut answer.body);
    }
    if is_unreadable(&real.body) && embedded.body["reason"] == real.body["reason"] {
        for answer in [&mut *real, &mut *embedded] {
            answer.body["message"] = "a body that cannot be read".into();
        }
    }
    for answer in [real, embedded] {
        if call.method == "DELETE" && call.option("dryRun") == "All" && answer.body["kind"] != "Status" {
            // What was not written has a version all the same, and it is not the object's.
            answer.body["metadata"]["resourceVersion"] = "none".into();
        }
        strip(&mut answer.body);
        sort_causes(&mut answer.body);
        bare_items(&mut answer.body);
        plain_bookmarks(&mut answer.body);
        unnamed_writers(&mut answer.body);
    }
}

/// What apply got instead of the right type is printed as Go prints it.
fn cut_go_values(body: &mut Value) {
    let message = body.get("message").and_then(Value::as_str).unwrap_or_default();
    if let Some((before, _)) =
        message.split_once(", got ").filter(|_| message.starts_with("failed to create typed"))
    {
        body["message"] = before.into();
    }
}

/// A body that is not what the path asks for: refused by both, in the words of Go's decoder by one.
fn is_unreadable(body: &Value) -> bool {
    let message = body.get("message").and_then(Value::as_str).unwrap_or_default();
    ["couldn't get version/kind", "cannot be handled as a", "cannot unmarshal"]
        .iter()
        .any(|words| message.contains(words))
}

/// Several faults come in the order of Go's maps, which is none, and some twice; where a message repeats the field's
/// path, it may be the last part only. So the causes are compared, and not the sentence made of them.
fn sort_causes(body: &mut Value) {
    let Some(causes) = body.pointer_mut("/details/causes").and_then(Value::as_array_mut) else { return };
    let are_conflicts = causes.iter().all(|cause| cause["reason"] == "FieldManagerConflict");
    let are_several_conflicts = are_conflicts && causes.len() > 1;
    for cause in causes.iter_mut() {
        let message = cause["message"].as_str().unwrap_or_default();
        // What else changed in a pod is shown as a diff of Go structs.
        if let Some((why, _)) = message.split_once("\n@@") {
            cause["message"] = why.into();
            continue;
        }
        if let Some((before, behind)) = message.split_once(" in body") {
            let start = before.rfind(' ').map_or(0, |at| at + 1);
            cause["message"] = format!("{}it{behind}", &before[..start]).into();
        }
    }
    causes.sort_by_key(ToString::to_string);
    causes.dedup();
    if body["reason"] == "Invalid" || are_several_conflicts {
        body["message"] = "as in the causes".into();
    }
}

/// A real server's bookmark is an empty object of the kind, with Go's zero values; and it sends one more when a
/// watch is about to end.
fn plain_bookmarks(body: &mut Value) {
    let Some(events) = body.as_array_mut() else { return };
    events.retain(|event| {
        event["type"] != "BOOKMARK" || event["object"]["metadata"]["annotations"].is_object()
    });
    for event in events.iter_mut().filter(|event| event["type"] == "BOOKMARK") {
        if let Some(object) = event["object"].as_object_mut() {
            object.retain(|name, _| matches!(name.as_str(), "apiVersion" | "kind" | "metadata"));
        }
    }
}

/// Who wrote a field before the object was first applied is not kept, so a conflict does not name them.
fn unnamed_writers(body: &mut Value) {
    let rename = |value: &mut Value| {
        if let Value::String(text) = value {
            for writer in ["\"before-first-apply\"", "\"tester\" with subresource \"status\"", "\"tester\""] {
                *text = text.replace(&format!("conflict with {writer}"), "conflict with a writer");
                *text = text.replace(&format!("conflicts with {writer}"), "conflicts with a writer");
            }
        }
    };
    if body.get("reason").is_some_and(|reason| reason == "Conflict") {
        rename(&mut body["message"]);
        let causes = body.pointer_mut("/details/causes").and_then(Value::as_array_mut);
        causes.into_iter().flatten().for_each(|cause| rename(&mut cause["message"]));
    }
}

fn strip(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            // Who owns which field is kept, and told by conflicts, but not shown.
            fields.remove("managedFields");
            // A relic of extensions/v1beta1 that DaemonSets still carry.
            fields.remove("deprecated.daemonset.template.generation");
            fields.retain(|name, value| !is_filled_in(name, value));
            // Go writes null where there is no time; to every client that is the same as nothing.
            fields.retain(|name, value| !value.is_null() || name == "items");
            fields.values_mut().for_each(strip);
            fields.retain(|name, value| {
                name != "annotations" || *value != Value::Object(serde_json::Map::new())
            });
        }
        Value::Array(items) => items.iter_mut().for_each(strip),
        _ => {}
    }
}

fn is_filled_in(name: &str, value: &Value) -> bool {
    let default = FILLED_IN.iter().find(|(field, _)| *field == name).map(|(_, default)| default);
    default
        .is_some_and(|default| serde_json::from_str::<Value>(default).is_ok_and(|default| default == *value))
}

/// The items of a list of built-in kinds do not say what they are; embedded ones do, because one serialisation
/// of an object serves every reply.
fn bare_items(body: &mut Value) {
    let items = body.get_mut("items").and_then(Value::as_array_mut);
    for item in items.into_iter().flatten().filter_map(Value::as_object_mut) {
        item.remove("apiVersion");
        item.remove("kind");
    }
}
