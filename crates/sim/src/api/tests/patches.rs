//! The patch dialects that do not track ownership.

use super::*;

async fn strategic(nodes: &Api<Node>, patch: Value) -> Node {
    nodes.patch("a", &PatchParams::default(), &Patch::Strategic(patch)).await.unwrap()
}

async fn json_patch(nodes: &Api<Node>, operations: Value) -> kube::Result<Node> {
    nodes.patch("a", &PatchParams::default(), &Patch::Json::<()>(from(operations))).await
}

#[tokio::test(start_paused = true)]
async fn a_merge_patch_removes_with_null_and_replaces_lists() {
    let client = server().client();
    add_node(&client, "a").await;
    let nodes = all::<Node>(&client);
    let taint = |key: &str| json!([{"key": key, "effect": "NoSchedule"}]);
    merge(&nodes, "a", json!({"spec": {"taints": taint("one")}})).await.unwrap();
    let node =
        merge(&nodes, "a", json!({"spec": {"taints": taint("two")}, "metadata": {"labels": {"gpu": null}}}))
            .await
            .unwrap();
    assert_eq!(node.spec.unwrap().taints.unwrap()[0].key, "two");
    assert_eq!(node.metadata.labels, None);
}

#[tokio::test(start_paused = true)]
async fn a_json_patch_tests_before_it_writes() {
    let client = server().client();
    add_node(&client, "a").await;
    let nodes = all::<Node>(&client);
    let test = |value: &str| {
        json!([{"op": "test", "path": "/metadata/labels/gpu", "value": value},
        {"op": "add", "path": "/metadata/labels/seen", "value": "yes"}])
    };
    assert_eq!(why(json_patch(&nodes, test("wrong")).await), (422, "Invalid".into()));
    assert_eq!(json_patch(&nodes, test("h100")).await.unwrap().labels()["seen"], "yes");
}

#[tokio::test(start_paused = true)]
async fn a_strategic_patch_merges_keyed_lists_and_replaces_taints() {
    let client = server().client();
    add_node(&client, "a").await;
    let nodes = all::<Node>(&client);
    let condition = |kind: &str| json!({"status": {"conditions": [{"type": kind, "status": "True"}]}});
    for kind in ["Ready", "DiskPressure"] {
        let patch = Patch::Strategic(condition(kind));
        nodes.patch_status("a", &PatchParams::default(), &patch).await.unwrap();
    }
    assert_eq!(nodes.get("a").await.unwrap().status.unwrap().conditions.unwrap().len(), 2);
    strategic(&nodes, json!({"spec": {"taints": [{"key": "k1", "effect": "NoSchedule"}]}})).await;
    let node = strategic(&nodes, json!({"spec": {"taints": [{"key": "k2", "effect": "NoSchedule"}]}})).await;
    assert_eq!(node.spec.unwrap().taints.unwrap().len(), 1, "taints are atomic");
}

#[tokio::test(start_paused = true)]
async fn strategic_directives_are_obeyed() {
    let client = server().client();
    add_pod(&client, "p", None).await;
    let pods = here::<Pod>(&client);
    let patch = async |patch: Value| {
        pods.patch("p", &PatchParams::default(), &Patch::Strategic(patch)).await.unwrap()
    };
    patch(json!({"metadata": {"finalizers": ["a/x"]}})).await;
    let pod = patch(json!({"metadata": {"finalizers": ["a/y"]}})).await;
    assert_eq!(pod.finalizers(), ["a/y", "a/x"]);
    let pod = patch(json!({"metadata": {"$deleteFromPrimitiveList/finalizers": ["a/x"]}})).await;
    assert_eq!(pod.finalizers(), ["a/y"]);
    let pod = patch(json!({"metadata": {"labels": {"$patch": "replace", "only": "1"}}})).await;
    assert_eq!(pod.labels().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_patch_of_nothing_is_not_found() {
    let client = server().client();
    let status = refusal(merge(&all::<Node>(&client), "a", json!({})).await);
    assert_eq!((status.code, &*status.message), (404, "nodes \"a\" not found"));
}
