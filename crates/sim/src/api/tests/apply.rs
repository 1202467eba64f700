//! Server-side apply.

use super::*;

fn labels(labels: &Value) -> Patch<Value> {
    Patch::Apply(json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "a", "labels": labels}}))
}

async fn apply(nodes: &Api<Node>, manager: &str, config: Value) -> kube::Result<Node> {
    nodes.patch("a", &PatchParams::apply(manager), &labels(&config)).await
}

#[tokio::test(start_paused = true)]
async fn applying_what_is_not_there_creates_it() {
    let client = server().client();
    let node = apply(&all(&client), "one", json!({"x": "1"})).await.unwrap();
    assert_eq!(node.labels()["x"], "1");
    assert!(node.metadata.uid.is_some());
}

#[tokio::test(start_paused = true)]
async fn another_managers_field_is_a_conflict_until_forced() {
    let client = server().client();
    let nodes = all::<Node>(&client);
    apply(&nodes, "one", json!({"x": "1"})).await.unwrap();
    let status = refusal(apply(&nodes, "two", json!({"x": "2"})).await);
    assert_eq!((status.code, &*status.reason), (409, "Conflict"));
    assert_eq!(status.message, "Apply failed with 1 conflict: conflict with \"one\": .metadata.labels.x");
    nodes.patch("a", &PatchParams::apply("two").force(), &labels(&json!({"x": "2"}))).await.unwrap();
    let node = apply(&nodes, "one", json!({})).await.unwrap();
    assert_eq!(node.labels()["x"], "2", "a lost field is not removed with the rest");
}

#[tokio::test(start_paused = true)]
async fn a_field_no_longer_mentioned_is_removed() {
    let client = server().client();
    let nodes = all::<Node>(&client);
    apply(&nodes, "one", json!({"x": "1", "y": "1"})).await.unwrap();
    apply(&nodes, "two", json!({"y": "1"})).await.unwrap();
    let node = apply(&nodes, "one", json!({})).await.unwrap();
    assert_eq!(node.labels().keys().collect::<Vec<_>>(), ["y"], "two still wants y");
}

#[tokio::test(start_paused = true)]
async fn an_ordinary_write_takes_the_fields_that_it_changes() {
    let client = server().client();
    let nodes = all::<Node>(&client);
    apply(&nodes, "one", json!({"x": "1", "y": "1"})).await.unwrap();
    let editor = PatchParams { field_manager: Some("editor".into()), ..PatchParams::default() };
    nodes.patch("a", &editor, &Patch::Merge(json!({"metadata": {"labels": {"x": "2"}}}))).await.unwrap();
    let status = refusal(apply(&nodes, "one", json!({"x": "1", "y": "1"})).await);
    assert!(
        status.message.contains("conflict with \"editor\" using v1: .metadata.labels.x"),
        "{}",
        status.message
    );
    assert!(apply(&nodes, "one", json!({"y": "1"})).await.unwrap().labels().contains_key("x"));
}

#[tokio::test(start_paused = true)]
async fn an_object_that_was_never_applied_belongs_to_its_writers() {
    let client = server().client();
    add_node(&client, "a").await;
    let nodes = all::<Node>(&client);
    assert!(
        apply(&nodes, "one", json!({"gpu": "h100", "new": "1"})).await.is_ok(),
        "equal values are shared"
    );
    assert_eq!(why(apply(&nodes, "two", json!({"gpu": "b200"})).await), (409, "Conflict".into()));
}

#[tokio::test(start_paused = true)]
async fn keyed_lists_are_owned_item_by_item() {
    let client = server().client();
    let pods = here::<Pod>(&client);
    let config = |names: &[&str]| {
        let containers: Vec<Value> = names.iter().map(|name| json!({"name": name, "image": "i"})).collect();
        Patch::Apply(
            json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": containers}}),
        )
    };
    let apply = async |manager: &str, names: &[&str]| {
        let pod = pods.patch("p", &PatchParams::apply(manager), &config(names)).await.unwrap();
        pod.spec.unwrap().containers.into_iter().map(|container| container.name).collect::<Vec<_>>()
    };
    assert_eq!(apply("one", &["a", "b"]).await, ["a", "b"]);
    assert_eq!(apply("two", &["c"]).await, ["a", "b", "c"]);
    assert_eq!(apply("one", &["a"]).await, ["a", "c"]);
}

#[tokio::test(start_paused = true)]
async fn apply_honours_a_resource_version() {
    let client = server().client();
    add_node(&client, "a").await;
    let stale = Patch::Apply(
        json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "a", "resourceVersion": "1"}}),
    );
    let result = all::<Node>(&client).patch("a", &PatchParams::apply("one"), &stale).await;
    assert_eq!(why(result), (409, "Conflict".into()));
}
