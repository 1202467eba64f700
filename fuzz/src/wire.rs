//! What the controller reads from the API, as a reader of it does: objects of every kind become facts or are left out, and
//! the plan from these facts keeps every promise.
//!
//! The input is an object with the items of each list, by resource (`nodes`, `pods`, `daemonsets`, …). Items need not be
//! objects of that kind: then the look fails with an error, and nothing worse.

use std::cell::RefCell;
use std::convert::Infallible;

use http::{Request, Response, StatusCode};
use kube::Client;
use kube::client::Body;
use pitcrew_controller::{Clock, look};
use serde_json::{Map, Value, json};
use tokio::runtime::{Builder, Runtime};

use crate::world;

thread_local! {
    static RUNTIME: RefCell<Runtime> = RefCell::new(
        Builder::new_current_thread().enable_time().start_paused(true).build().expect("a runtime"),
    );
}

pub(crate) fn run(input: &str) {
    let Ok(Value::Object(lists)) = serde_json::from_str(input) else { return };
    RUNTIME.with_borrow(|runtime| runtime.block_on(see(lists)));
}

async fn see(lists: Map<String, Value>) {
    let serve = move |request: Request<Body>| {
        let response = answer(&lists, request.uri().path());
        async move { Ok::<_, Infallible>(response) }
    };
    let client = Client::new(tower::service_fn(serve), "default");
    let clock = Clock::starting_at("2026-01-01T12:00:00Z".parse().expect("a time"));
    let Ok(seen) = look(&client, "gpu-operator", clock).await else { return };
    let _ = seen.leader.leads(seen.snapshot.now);
    world::judge(&seen.snapshot);
}

fn answer(lists: &Map<String, Value>, path: &str) -> Response<Body> {
    if path.trim_end_matches('/') == "/apis" {
        let version = json!({"groupVersion": "resource.k8s.io/v1", "version": "v1"});
        let group = json!({"name": "resource.k8s.io", "versions": [version], "preferredVersion": version});
        return reply(
            StatusCode::OK,
            &json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]}),
        );
    }
    let resource = path.rsplit('/').next().unwrap_or_default();
    match lists.get(resource) {
        Some(Value::Array(items)) => {
            let items = items.iter().enumerate().map(|(number, item)| identified(item, number));
            let items: Vec<Value> = items.collect();
            reply(
                StatusCode::OK,
                &json!({"kind": "List", "apiVersion": "v1", "metadata": {}, "items": items}),
            )
        }
        // Whatever somebody puts between us and the API may say.
        Some(other) => reply(StatusCode::OK, other),
        None => {
            let status = json!({"kind": "Status", "status": "Failure", "reason": "NotFound", "message": "", "code": 404});
            reply(StatusCode::NOT_FOUND, &status)
        }
    }
}

fn reply(code: StatusCode, body: &Value) -> Response<Body> {
    let mut response = Response::new(Body::from(body.to_string().into_bytes()));
    *response.status_mut() = code;
    response
}

/// Every object of the API has a name, a UID and a version; without them it is ignored, and nothing would be tried.
fn identified(item: &Value, number: usize) -> Value {
    let mut item = item.clone();
    if let Some(meta) = item.get_mut("metadata").and_then(Value::as_object_mut) {
        for field in ["name", "uid"] {
            meta.entry(field).or_insert_with(|| format!("{field}-{number}").into());
        }
        meta.entry("resourceVersion").or_insert_with(|| number.to_string().into());
    }
    item
}
