//! The same promises for a real cluster: over the audit log of its API server.
//!
//! A line of the log is a request, whose it was, and, at the level `RequestResponse`, what came of it. In the order of
//! their versions these are the changes of the cluster as the embedded API tells them, authors and all; a watch would not
//! say who deleted a pod.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use serde::Deserialize;
use serde_json::{Value, json};

use super::promises::{Step, take_up};
use super::record::Violation;
use super::world::{By, Change, Request, World};

/// What others did may be known so much later.
const LAG: SignedDuration = SignedDuration::from_secs(2);

/// What came of a look through a log.
#[derive(Debug, Default)]
pub struct Audit {
    /// Changes of ours.
    pub ours: u64,
    /// The promises that they broke.
    pub broken: Vec<Violation>,
}

/// Checks the changes of an audit log that `is_ours` says pitcrew made, by the name of the user.
pub fn audit(log: &str, is_ours: impl Fn(&str) -> bool) -> Audit {
    // A line may be cut off in the middle: the last one, while the log is written.
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Line>(line).ok());
    let mut lines: Vec<Line> = lines.filter(Line::is_change).collect();
    lines.sort_by_key(|line| line.at);
    // Evictions and bindings are answered without the pod: they come after what was answered before them.
    let mut highest = 0;
    for line in &mut lines {
        let version = line.response["metadata"]["resourceVersion"].as_str();
        line.order = version.and_then(|version| version.parse().ok()).unwrap_or(highest);
        highest = highest.max(line.order);
    }
    lines.sort_by_key(|line| line.order);
    let mut cluster = Cluster::default();
    cluster.world.lag = LAG;
    for line in &lines {
        cluster.take_up(line, is_ours(&line.user.username));
    }
    cluster.audit
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Line {
    stage: String,
    #[serde(rename = "stageTimestamp")]
    at: Timestamp,
    verb: String,
    user: User,
    object_ref: Option<Reference>,
    #[serde(default)]
    response_status: Value,
    #[serde(default, rename = "requestObject")]
    request: Value,
    #[serde(default, rename = "responseObject")]
    response: Value,
    #[serde(skip)]
    order: u64,
}

#[derive(Deserialize)]
struct User {
    username: String,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Reference {
    api_group: String,
    resource: String,
    subresource: String,
    namespace: String,
    name: String,
}

impl Line {
    /// A write that was made, or may have been.
    fn is_change(&self) -> bool {
        let writes = matches!(self.verb.as_str(), "create" | "update" | "patch" | "delete");
        let refused = self.code().is_some_and(|code| (400..500).contains(&code));
        self.stage == "ResponseComplete" && writes && !refused && self.object_ref.is_some()
    }

    fn code(&self) -> Option<u64> {
        self.response_status["code"].as_u64()
    }

    /// What came of it: whoever did not wait for the answer, or is left out by the log's policy, leaves that open.
    fn is_known(&self) -> bool {
        self.code().is_some_and(|code| (200..300).contains(&code)) && !self.response.is_null()
    }
}

/// Namespace and name, under `pods` or `daemonsets.apps`.
type Place = (String, String, String);

#[derive(Default)]
struct Cluster {
    world: World,
    objects: BTreeMap<Place, Value>,
    audit: Audit,
}

impl Cluster {
    fn take_up(&mut self, line: &Line, ours: bool) {
        let Some(Reference { api_group, resource, subresource, namespace, .. }) = &line.object_ref else {
            return;
        };
        let dot = if api_group.is_empty() { "" } else { "." };
        let place = (format!("{resource}{dot}{api_group}"), namespace.clone(), name(line));
        let before = self.objects.remove(&place);
        if !line.is_known() {
            self.forget(line.at, &place);
            return;
        }
        let after = after(line, before);
        let slash = if subresource.is_empty() { "" } else { "/" };
        let (asked, body) = (format!("{resource}{slash}{subresource}"), line.request.to_string());
        let change = Change {
            at: line.at,
            by: if ours { By::Us } else { By::Others },
            request: Some(Request { verb: &line.verb, resource: &asked, body: body.as_bytes() }),
            resource: &place.0,
            namespace: &place.1,
            name: &place.2,
            after: after.as_ref(),
        };
        self.audit.ours += u64::from(ours);
        let broken = take_up(&mut self.world, &change, |step, broken| {
            let node = match step {
                Step::Node(name, ..) => Some((*name).to_owned()),
                Step::Pod(before, _) => before.map(|pod| pod.node.clone()),
                Step::Rollout(..) | Step::Version(..) => None,
            };
            broken.map(|(promise, what)| Violation { promise, node, what, at: change.at })
        });
        // What is promised about rollouts is told by their statuses, and a log does not keep their order with all else.
        let told = |broken: &Violation| {
            !matches!(broken.promise.code(), "S5" | "S7" | "S15" | "S16" | "S17" | "S18" | "S19")
        };
        self.audit.broken.extend(broken.flatten().filter(told));
        if let Some(after) = after {
            self.objects.insert(place, after);
        }
    }

    /// Until it is seen again.
    fn forget(&mut self, at: Timestamp, (resource, namespace, name): &Place) {
        let (by, request, after) = (By::Others, None, None);
        self.world.fold(&Change { at, by, request, resource, namespace, name, after });
    }
}

/// The server may have chosen it.
fn name(line: &Line) -> String {
    let named = line.object_ref.as_ref().map(|reference| reference.name.clone()).unwrap_or_default();
    match line.response["metadata"]["name"].as_str() {
        Some(chosen) if named.is_empty() => chosen.to_owned(),
        _ => named,
    }
}

/// What a request left behind; `None`: nothing.
fn after(line: &Line, before: Option<Value>) -> Option<Value> {
    let subresource = line.object_ref.as_ref().map(|reference| reference.subresource.as_str());
    match (line.verb.as_str(), subresource) {
        ("create", Some("eviction")) => {
            let mut pod = before?;
            pod["metadata"]["deletionTimestamp"] = json!(line.at);
            Some(pod)
        }
        ("create", Some("binding")) => {
            let mut pod = before?;
            pod["spec"]["nodeName"] = line.request["target"]["name"].clone();
            Some(pod)
        }
        ("delete", _) => Some(line.response.clone()).filter(stays),
        _ => Some(line.response.clone()),
    }
}

/// Told to go, and not gone yet.
fn stays(answer: &Value) -> bool {
    let meta = &answer["metadata"];
    let finalizers = meta["finalizers"].as_array().is_some_and(|finalizers| !finalizers.is_empty());
    let grace = meta["deletionGracePeriodSeconds"].as_i64().unwrap_or(0);
    answer["kind"] != "Status" && meta["deletionTimestamp"].is_string() && (finalizers || grace > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(seconds: u32, user: &str, verb: &str, what: &Value, request: &Value, response: &Value) -> String {
        json!({
            "stage": "ResponseComplete", "stageTimestamp": format!("2026-01-01T00:00:{seconds:02}.5Z"), "verb": verb,
            "user": {"username": user}, "objectRef": what, "responseStatus": {"code": 200},
            "requestObject": request, "responseObject": response,
        })
        .to_string()
    }

    fn work(version: &str, deletion: &Value) -> Value {
        let metadata = json!({"name": "work", "uid": "1", "resourceVersion": version,
            "deletionTimestamp": deletion, "deletionGracePeriodSeconds": 30});
        json!({"metadata": metadata, "spec": {"nodeName": "a"}})
    }

    #[test]
    fn whoever_takes_a_pod_off_a_node_that_is_not_ours_is_found_by_name() {
        let pod = json!({"resource": "pods", "namespace": "team", "name": "work"});
        let node = json!({"resource": "nodes", "name": "a"});
        let pinned = json!({"preconditions": {"uid": "1"}});
        let node_object = json!({"metadata": {"name": "a", "uid": "2", "resourceVersion": "4"}});
        let story = |deleter: &str| {
            // In the order in which they were answered, which is not the order in which they were done.
            [
                line(50, deleter, "delete", &pod, &pinned, &work("9", &json!("2026-01-01T00:00:50Z"))),
                line(2, "scheduler", "create", &pod, &Value::Null, &work("5", &Value::Null)),
                line(3, "admin", "create", &node, &Value::Null, &node_object),
                line(
                    4,
                    "operator",
                    "patch",
                    &json!({"resource": "x", "name": "y"}),
                    &Value::Null,
                    &Value::Null,
                ),
                "{\"cut off".to_owned(),
            ]
            .join("\n")
        };
        let found = audit(&story("pitcrew"), |user| user == "pitcrew");
        let codes: Vec<_> =
            found.broken.iter().map(|broken| (broken.promise.code(), broken.node.clone())).collect();
        assert_eq!((found.ours, codes), (1, vec![("S1", Some("a".to_owned()))]));
        assert!(audit(&story("somebody"), |user| user == "pitcrew").broken.is_empty());
    }
}
