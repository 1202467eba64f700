//! Requests to the embedded API: whatever is sent is answered; who is refused, or only tries (`dryRun`), has changed nothing;
//! and afterwards lists, single objects, field selectors and the watch log tell the same story.
//!
//! The input is a list of requests: `method`, `path` (with its query), `type` (of the body), `body`.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use futures::{FutureExt as _, StreamExt as _};
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt as _;
use kube::Client;
use kube::client::Body;
use pitcrew_sim::api::ApiServer;
use serde_json::{Value, json};
use tokio::runtime::{Builder, Runtime};

/// Longer stories find nothing that these do not.
const REQUESTS_MAX: usize = 12;

thread_local! {
    /// Time stands still unless somebody waits, so every run of an input is the same.
    static RUNTIME: RefCell<Runtime> = RefCell::new(
        Builder::new_current_thread().enable_time().start_paused(true).build().expect("a runtime"),
    );
}

pub(crate) fn run(input: &str) {
    let Ok(Value::Array(requests)) = serde_json::from_str(input) else { return };
    RUNTIME.with_borrow(|runtime| runtime.block_on(story(&requests)));
}

async fn story(requests: &[Value]) {
    let server = ApiServer::new("2026-01-01T00:00:00Z".parse().expect("a time"));
    let client = server.client();
    furnish(&client).await;
    let mut before = version(&client).await;
    for request in requests.iter().take(REQUESTS_MAX) {
        // Of a deletion with a body only the body says whether it is meant, as with a real server.
        let has_body = !request["body"].is_null();
        let Some(request) = build(request) else { continue };
        let what = format!("{request:?}");
        // Several objects at once are refused one by one, as by a real server.
        let is_collection = request.method() == "DELETE";
        // An eviction takes from the budget before it is known whether the pod may go, as with a real server.
        let spends = u64::from(request.uri().path().ends_with("/eviction"));
        let mut options = request.uri().query().unwrap_or_default().split('&');
        let tries = options.any(|option| option == "dryRun=All") && !(is_collection && has_body);
        let code = send(&client, request).await.unwrap_or_else(|| panic!("no answer to {what}"));
        let refused = (code.is_client_error() || code.is_server_error()) && !is_collection;
        let after = version(&client).await;
        if tries || refused {
            let may_change = if tries { 0 } else { spends };
            assert!(after <= before + may_change, "{what} was answered with {code} and changed something");
        }
        before = after;
    }
    tells_one_story(&client).await;
}

/// Something to work with: a node, pods, a budget, a definition and an object of it.
async fn furnish(client: &Client) {
    let meta = |name: &str| json!({"name": name, "labels": {"app": "web"}});
    let definition = json!({"metadata": {"name": "things.x.io"}, "spec": {"group": "x.io", "scope": "Namespaced",
        "names": {"kind": "Thing", "plural": "things"}, "versions": [{"name": "v1", "served": true, "storage": true,
        "subresources": {"status": {}}, "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": {
        "type": "object", "properties": {"size": {"type": "integer", "minimum": 1, "default": 3},
        "parts": {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"],
        "items": {"type": "object", "properties": {"name": {"type": "string"}}}}}}}}}}]}});
    let all = [
        ("/api/v1/nodes", json!({"metadata": meta("n")})),
        ("/api/v1/namespaces/d/pods", json!({"metadata": meta("p"), "spec": {"nodeName": "n"}})),
        ("/apis/apps/v1/namespaces/d/daemonsets", json!({"metadata": meta("s"), "spec": {"selector": {}}})),
        (
            "/apis/policy/v1/namespaces/d/poddisruptionbudgets",
            json!({"metadata": meta("b"), "spec": {"selector": {"matchLabels": {"app": "web"}}}}),
        ),
        ("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition),
        ("/apis/x.io/v1/namespaces/d/things", json!({"metadata": meta("t"), "spec": {}})),
    ];
    for (path, body) in all {
        let request = build(&json!({"method": "POST", "path": path, "body": body})).expect("a request");
        assert_eq!(send(client, request).await, Some(StatusCode::CREATED), "{path}");
    }
    // Only a pod that runs is under its budget.
    let status = json!({"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}});
    let merge = "application/merge-patch+json";
    let runs = json!({"method": "PATCH", "path": "/api/v1/namespaces/d/pods/p/status", "type": merge, "body": status});
    assert_eq!(send(client, build(&runs).expect("a request")).await, Some(StatusCode::OK));
}

fn build(request: &Value) -> Option<Request<Body>> {
    let text = |field: &str, default: &'static str| request[field].as_str().unwrap_or(default).to_owned();
    let body = match &request["body"] {
        Value::Null => String::new(),
        // A text is sent as it is: it need not be JSON.
        Value::String(text) => text.clone(),
        body => body.to_string(),
    };
    let builder = Request::builder().method(text("method", "GET").as_str()).uri(text("path", "/"));
    let builder = builder.header("content-type", text("type", "application/json"));
    builder.header("accept", text("accept", "application/json")).body(body.into_bytes().into()).ok()
}

/// The code of the answer; `None`: there was none.
async fn send(client: &Client, request: Request<Body>) -> Option<StatusCode> {
    let response: Response<Body> = client.send(request).await.ok()?;
    Some(response.status())
}

async fn get(client: &Client, path: &str) -> Value {
    let request = Request::get(path).body(Body::empty()).expect("a request");
    let response = client.send(request).await.unwrap_or_else(|error| panic!("GET {path}: {error}"));
    let code = response.status();
    let body = response.into_body().collect().await.expect("a body").to_bytes();
    assert_eq!(code, StatusCode::OK, "GET {path}: {}", String::from_utf8_lossy(&body));
    serde_json::from_slice(&body).unwrap_or_else(|error| panic!("GET {path} is no JSON: {error}"))
}

/// The version of the whole store: every write counts it up.
async fn version(client: &Client) -> u64 {
    let list = get(client, "/api/v1/nodes?limit=1").await;
    list["metadata"]["resourceVersion"].as_str().and_then(|text| text.parse().ok()).expect("a version")
}

async fn tells_one_story(client: &Client) {
    let now = version(client).await;
    let mut uids = BTreeSet::new();
    for path in
        ["/api/v1/nodes", "/api/v1/pods", "/apis/apps/v1/daemonsets", "/apis/policy/v1/poddisruptionbudgets"]
    {
        let listed = items(&get(client, path).await);
        for object in listed.values() {
            let meta = &object["metadata"];
            assert!(meta["name"].is_string() && meta["creationTimestamp"].is_string(), "{object}");
            let version = meta["resourceVersion"].as_str().and_then(|text| text.parse::<u64>().ok());
            assert!(version.is_some_and(|version| version <= now), "{object}");
            assert!(meta["uid"].as_str().is_some_and(|uid| uids.insert(uid.to_owned())), "{object}");
        }
        assert_eq!(
            watched(client, path).await,
            listed,
            "the watch of {path} tells another story than its list"
        );
    }
    let pods = items(&get(client, "/api/v1/pods").await);
    let on_node = items(&get(client, "/api/v1/pods?fieldSelector=spec.nodeName%3Dn").await);
    let expected =
        pods.into_iter().filter(|(_, pod)| pod["spec"]["nodeName"] == "n").collect::<BTreeMap<_, _>>();
    assert_eq!(on_node, expected, "pods by node");
}

fn items(list: &Value) -> BTreeMap<String, Value> {
    let mut found = BTreeMap::new();
    for item in list["items"].as_array().into_iter().flatten() {
        let before = found.insert(key(item), item.clone());
        assert!(before.is_none(), "{} is listed twice", key(item));
    }
    found
}

fn key(object: &Value) -> String {
    format!("{} {}", object["metadata"]["namespace"], object["metadata"]["name"])
}

/// What is there according to everything that a watch tells from the beginning.
async fn watched(client: &Client, path: &str) -> BTreeMap<String, Value> {
    let request = Request::get(format!("{path}?watch=true&resourceVersion=1")).body(Body::empty());
    let response = client.send(request.expect("a request")).await.expect("an answer");
    let mut frames = response.into_body().into_data_stream();
    let (mut text, mut objects) = (Vec::new(), BTreeMap::new());
    // All that is known comes at once; then it waits for news.
    while let Some(Some(Ok(frame))) = frames.next().now_or_never() {
        text.extend_from_slice(&frame);
    }
    for event in serde_json::Deserializer::from_slice(&text).into_iter::<Value>() {
        let event = event.expect("an event");
        match event["type"].as_str() {
            Some("ADDED" | "MODIFIED") => {
                drop(objects.insert(key(&event["object"]), event["object"].clone()));
            }
            Some("DELETED") => drop(objects.remove(&key(&event["object"]))),
            _ => panic!("{event}"),
        }
    }
    objects
}
