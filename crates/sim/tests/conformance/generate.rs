//! A sequence of calls out of a seed.
//!
//! Most calls of a sequence are about one or two kinds and three names, so that they meet: conflicts, objects
//! that wait for their finalizer, writes that change nothing. It begins with its namespace and ends with watches
//! over everything that happened.

use crate::call::{Body, Call};
use crate::kinds::{self, KINDS, Kind};
use crate::patches::patch;
use fastrand::Rng;
use serde_json::{Value, json};

const NAMES: [&str; 3] = ["a", "b", "c"];

const METADATA: &str = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";
const METADATA_LIST: &str = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";

/// The calls of one seed.
pub(crate) fn sequence(seed: u64) -> Vec<Call> {
    let mut chance = Rng::with_seed(seed);
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "<ns>"}});
    let mut calls = vec![Call::new("POST", "/api/v1/namespaces").sending(Body::Json(namespace))];
    let kinds = choose_kinds(&mut chance);
    if kinds.iter().any(|kind| kind.plural == "poddisruptionbudgets") && kinds[0].plural == "pods" {
        guard(&mut chance, &mut calls);
    }
    let count = chance.usize(8..=18);
    for index in 1..=count {
        let kind = kinds[chance.usize(..kinds.len())];
        // First something has to be there.
        let call = if index < 3 { create(&mut chance, kind, index) } else { any(&mut chance, kind, index) };
        calls.push(call);
    }
    for kind in distinct(&kinds) {
        calls.push(watch(&mut chance, kind));
    }
    calls
}

/// Pods that a budget guards: two on a node, ready or not, and a budget whose status allows some to go.
fn guard(chance: &mut Rng, calls: &mut Vec<Call>) {
    let (pods, budgets) = (kinds::named("pods"), kinds::named("poddisruptionbudgets"));
    let create = |kind: &Kind, name: &str, mut body: Value| {
        body["metadata"]["name"] = name.into();
        body["metadata"]["labels"]["app"] = "x".into();
        Call::new("POST", kind.collection()).sending(Body::Json(body))
    };
    let report = |kind: &Kind, name: &str, status: Value| {
        let call = Call::new("PATCH", kind.path(name) + "/status");
        Call { content_type: "application/merge-patch+json", ..call }.sending(Body::Json(status))
    };
    for name in ["a", "b"] {
        calls.push(create(pods, name, pods.body(chance)));
        let ready = if chance.u8(..4) > 0 { "True" } else { "False" };
        let conditions =
            json!([{"type": "Ready", "status": ready, "lastTransitionTime": "2025-01-02T03:04:05Z"}]);
        calls.push(report(pods, name, json!({"status": {"phase": "Running", "conditions": conditions}})));
    }
    let mut budget = budgets.body(chance);
    budget["spec"]["selector"] = json!({"matchLabels": {"app": "x"}});
    calls.push(create(budgets, "a", budget));
    let observed = chance.u8(..4).min(1);
    let (allowed, healthy, desired) = (chance.u8(0..3), chance.u8(0..3), chance.u8(0..3));
    let status = json!({"observedGeneration": observed, "disruptionsAllowed": allowed, "currentHealthy": healthy, "desiredHealthy": desired, "expectedPods": 3});
    calls.push(report(budgets, "a", json!({"status": status})));
}

fn choose_kinds(chance: &mut Rng) -> Vec<&'static Kind> {
    if chance.u8(..6) == 0 {
        // Evictions need pods and their budgets.
        let (pods, budgets) = (kinds::named("pods"), kinds::named("poddisruptionbudgets"));
        return vec![pods, pods, budgets];
    }
    let first = choose_kind(chance);
    let second = choose_kind(chance);
    vec![first, first, first, second]
}

fn choose_kind(chance: &mut Rng) -> &'static Kind {
    let total: usize = KINDS.iter().map(|kind| kind.weight).sum();
    let mut at = chance.usize(..total);
    for kind in KINDS {
        if at < kind.weight {
            return kind;
        }
        at -= kind.weight;
    }
    &KINDS[0]
}

fn distinct(kinds: &[&'static Kind]) -> Vec<&'static Kind> {
    let mut found: Vec<&'static Kind> = Vec::new();
    for kind in kinds {
        if found.iter().all(|known| known.plural != kind.plural) {
            found.push(kind);
        }
    }
    found
}

fn any(chance: &mut Rng, kind: &'static Kind, index: usize) -> Call {
    let mut call = match chance.u8(..100) {
        0..18 => create(chance, kind, index),
        18..26 => get(chance, kind),
        26..38 => replace(chance, kind),
        38..60 => patch(chance, kind),
        60..72 => delete(chance, kind),
        72..86 => list(chance, kind),
        86..89 => delete_collection(chance, kind),
        89..93 => unknown(chance, kind),
        _ if kind.plural == "pods" => act_on_pod(chance, kind),
        _ => patch(chance, kind),
    };
    if kind.plural == "pods" && chance.u8(..4) == 0 {
        call = act_on_pod(chance, kind);
    }
    if call.method != "GET" && call.option("dryRun").is_empty() && chance.u8(..14) == 0 {
        call = call.with("dryRun", "All");
    }
    call
}

pub(crate) fn name(chance: &mut Rng) -> &'static str {
    NAMES[chance.usize(..NAMES.len())]
}

fn create(chance: &mut Rng, kind: &Kind, index: usize) -> Call {
    let mut body = kind.body(chance);
    let call = Call::new("POST", kind.collection());
    match chance.u8(..30) {
        0..4 => body["metadata"]["generateName"] = kind.name(&format!("drawn{index}-")).into(),
        4 => return call.sending(Body::Raw("{\"kind\":")),
        5 => return call.sending(Body::Json(json!([]))),
        // Without any name.
        6 => {}
        7 if !kind.is_custom() => {
            body["metadata"]["name"] = kind.name(name(chance)).into();
            body["kind"] = "Secret".into();
        }
        8 => {
            body["metadata"]["name"] = kind.name(name(chance)).into();
            body["metadata"]["resourceVersion"] = "999999999".into();
        }
        9 if kind.namespaced => {
            body["metadata"]["name"] = kind.name(name(chance)).into();
            body["metadata"]["namespace"] = "elsewhere".into();
        }
        10 => body["metadata"]["name"] = kind.name("Wrong_Name").into(),
        11 => {
            body["metadata"]["name"] = kind.name(name(chance)).into();
            body["metadata"]["uid"] = "11111111-0000-4000-8000-000000000000".into();
            body["metadata"]["generation"] = json!(9);
        }
        _ => body["metadata"]["name"] = kind.name(name(chance)).into(),
    }
    call.sending(Body::Json(body))
}

fn get(chance: &mut Rng, kind: &Kind) -> Call {
    let mut call = Call::new("GET", kind.path(name(chance)));
    match chance.u8(..8) {
        0 => call.accept = METADATA,
        1 if kind.has_status => call.path.push_str("/status"),
        2 => call = call.with("resourceVersion", "<seen>"),
        _ => {}
    }
    call
}

fn replace(chance: &mut Rng, kind: &Kind) -> Call {
    let name = name(chance);
    let mut base = kind.body(chance);
    base["metadata"]["name"] = kind.name(name).into();
    let status = kind.has_status && chance.u8(..3) == 0;
    let mut edit = if status { kind.status_edit(chance) } else { kind.edit(chance) };
    let version = match chance.u8(..10) {
        0..2 => Value::Null,
        2 => json!(format!("<old:{}>", kind.key(name))),
        3 => json!("not-a-number"),
        _ => json!(format!("<rv:{}>", kind.key(name))),
    };
    if !edit["metadata"].is_object() {
        edit["metadata"] = json!({});
    }
    edit["metadata"]["resourceVersion"] = version;
    match chance.u8(..20) {
        0 => edit["metadata"]["uid"] = "11111111-0000-4000-8000-000000000000".into(),
        1 => edit["metadata"]["uid"] = Value::Null,
        2 => edit["metadata"]["name"] = "other".into(),
        3 if !kind.is_custom() => edit["kind"] = "Secret".into(),
        _ => {}
    }
    let path = kind.path(name) + if status { "/status" } else { "" };
    Call::new("PUT", path).sending(Body::Edited { base, edit })
}

fn delete(chance: &mut Rng, kind: &Kind) -> Call {
    let name = name(chance);
    // Without a namespace controller a deleted namespace would stay for ever.
    if kind.plural == "namespaces" {
        return get(chance, kind);
    }
    let call = Call::new("DELETE", kind.path(name));
    let options = delete_options(chance, kind, name);
    if options == json!({}) { call } else { call.sending(Body::Json(options)) }
}

fn delete_options(chance: &mut Rng, kind: &Kind, name: &str) -> Value {
    let key = kind.key(name);
    match chance.u8(..12) {
        0 => json!({"gracePeriodSeconds": 0}),
        1 => json!({"gracePeriodSeconds": 10}),
        2 => json!({"preconditions": {"uid": format!("<uid:{key}>")}}),
        3 => json!({"preconditions": {"uid": "33333333-0000-4000-8000-000000000000"}}),
        4 => json!({"preconditions": {"resourceVersion": format!("<rv:{key}>")}}),
        5 => json!({"preconditions": {"resourceVersion": format!("<old:{key}>")}}),
        6 => json!({"propagationPolicy": "Background"}),
        7 => json!({"gracePeriodSeconds": 2, "kind": "DeleteOptions", "apiVersion": "v1"}),
        _ => json!({}),
    }
}

fn delete_collection(chance: &mut Rng, kind: &Kind) -> Call {
    if kind.plural == "namespaces" {
        return list(chance, kind);
    }
    let selector = if chance.bool() { "run=<run>" } else { "run=<run>,app=y" };
    Call::new("DELETE", kind.collection()).with("labelSelector", selector)
}

/// A selector that is not only of this run would show what others do.
fn label_selector(chance: &mut Rng, kind: &Kind) -> String {
    let terms = [
        "",
        "app=x",
        "app!=x",
        "app in (x, y)",
        "app notin (x)",
        "more",
        "!more",
        "app=y,more=a",
        "app==x",
        "app=",
        "a b",
    ];
    let term = terms[chance.usize(..terms.len())];
    match (kind.namespaced, term) {
        (true, term) => term.to_owned(),
        (false, "") => "run=<run>".to_owned(),
        (false, term) => format!("run=<run>,{term}"),
    }
}

fn list(chance: &mut Rng, kind: &Kind) -> Call {
    let mut call = Call::new("GET", kind.collection());
    let labels = label_selector(chance, kind);
    if !labels.is_empty() {
        call = call.with("labelSelector", labels);
    }
    if chance.u8(..3) == 0 {
        let name = name(chance);
        call = call.with("fieldSelector", kind.field_selector(chance, name));
    }
    match chance.u8(..10) {
        // Pages over the whole cluster would end where others write.
        0..2 if kind.namespaced => call = call.with("limit", chance.u8(1..3).to_string()),
        2 if kind.namespaced => {
            return Call::new("GET", kind.collection()).with("limit", "1").with("continue", "<continue>");
        }
        3 => call = call.with("resourceVersion", "<seen>"),
        4 => call = call.with("resourceVersion", "<seen>").with("resourceVersionMatch", "NotOlderThan"),
        5 => call = call.with("resourceVersion", "<seen>").with("resourceVersionMatch", "Exact"),
        6 => call = call.with("resourceVersion", "<start>").with("resourceVersionMatch", "Exact"),
        _ => {}
    }
    if chance.u8(..8) == 0 {
        call.accept = METADATA_LIST;
    }
    call
}

/// Doors that are not there.
fn unknown(chance: &mut Rng, kind: &Kind) -> Call {
    let path = kind.path(name(chance));
    match chance.u8(..8) {
        0 => Call::new("GET", format!("{path}/nothing")),
        1 => Call::new("GET", format!("{}/nothings", kind.root)),
        2 => Call::new("GET", "/apis/nothing.example.com/v1/things"),
        3 => Call::new("POST", path).sending(Body::Json(kind.body(chance))),
        4 => Call::new("PUT", kind.collection()).sending(Body::Json(kind.body(chance))),
        5 => Call::new("DELETE", format!("{path}/status")),
        6 => Call::new("GET", kind.root.replace("v1", "v9") + "/" + kind.plural),
        _ => Call::new("POST", format!("{path}/status")).sending(Body::Json(kind.body(chance))),
    }
}

/// Eviction and binding.
fn act_on_pod(chance: &mut Rng, pods: &Kind) -> Call {
    let name = name(chance);
    if chance.u8(..4) == 0 {
        let mut binding = json!({"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": {"kind": "Node", "name": "node-1"}});
        if chance.u8(..8) == 0 {
            binding["target"] = json!({});
        }
        return Call::new("POST", pods.path(name) + "/binding").sending(Body::Json(binding));
    }
    let mut eviction = json!({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}});
    let options = delete_options(chance, pods, name);
    if options != json!({}) {
        eviction["deleteOptions"] = options;
    }
    match chance.u8(..10) {
        0 => eviction["metadata"]["name"] = "other".into(),
        1 => eviction["deleteOptions"]["dryRun"] = json!(["All"]),
        _ => {}
    }
    Call::new("POST", pods.path(name) + "/eviction").sending(Body::Json(eviction))
}

/// Everything that happened, as a watch tells it.
fn watch(chance: &mut Rng, kind: &Kind) -> Call {
    let mut call = Call::new("GET", kind.collection()).with("watch", "true").with("timeoutSeconds", "1");
    let labels = if chance.bool() { label_selector(chance, kind) } else { String::new() };
    if !labels.is_empty() && !labels.contains("a b") {
        call = call.with("labelSelector", labels);
    } else if !kind.namespaced {
        call = call.with("labelSelector", "run=<run>");
    }
    if chance.u8(..3) == 0 {
        let name = name(chance);
        call = call.with("fieldSelector", kind.field_selector(chance, name));
    }
    if chance.u8(..8) == 0 {
        call.accept = METADATA;
    }
    match chance.u8(..6) {
        0 => call
            .with("sendInitialEvents", "true")
            .with("resourceVersionMatch", "NotOlderThan")
            .with("allowWatchBookmarks", "true")
            .with("resourceVersion", "<seen>"),
        _ => call.with("resourceVersion", "<start>"),
    }
}
