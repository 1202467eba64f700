//! Deletion of anything but a pod.

use super::*;

fn owned(name: &str, owner: &ConfigMap) -> Value {
    let reference = json!({"apiVersion": "v1", "kind": "ConfigMap", "name": owner.name_any(), "uid": owner.uid().unwrap()});
    json!({"metadata": {"name": name, "ownerReferences": [reference]}})
}

async fn exists(maps: &Api<ConfigMap>, name: &str) -> bool {
    maps.get_opt(name).await.unwrap().is_some()
}

#[tokio::test(start_paused = true)]
async fn a_delete_answers_with_what_was_deleted() {
    let client = server().client();
    add_node(&client, "a").await;
    let nodes = all::<Node>(&client);
    let status = nodes.delete("a", &DeleteParams::default()).await.unwrap().right().unwrap();
    assert_eq!(status.status.unwrap(), kube::core::response::StatusSummary::Success);
    assert_eq!(why(nodes.delete("a", &DeleteParams::default()).await), (404, "NotFound".into()));
}

#[tokio::test(start_paused = true)]
async fn preconditions_protect_the_successor() {
    let client = server().client();
    let first = add_node(&client, "a").await;
    let nodes = all::<Node>(&client);
    nodes.delete("a", &DeleteParams::default()).await.unwrap();
    let second = add_node(&client, "a").await;
    let by_uid = |node: &Node| delete_if(node.uid().as_deref(), None);
    let status = refusal(nodes.delete("a", &by_uid(&first)).await);
    assert!(status.message.contains("does not match the UID in record"), "{}", status.message);
    assert_eq!(why(nodes.delete("a", &delete_if(None, Some("1"))).await), (409, "Conflict".into()));
    assert!(nodes.delete("a", &by_uid(&second)).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_finalizer_holds_the_object_until_it_is_removed() {
    let client = server().client();
    let maps = here::<ConfigMap>(&client);
    create(&maps, json!({"metadata": {"name": "m", "finalizers": ["a/x"]}})).await;
    maps.delete("m", &DeleteParams::default()).await.unwrap();
    assert!(maps.get("m").await.unwrap().metadata.deletion_timestamp.is_some());
    merge(&maps, "m", json!({"metadata": {"finalizers": null}})).await.unwrap();
    assert!(!exists(&maps, "m").await);
}

#[tokio::test(start_paused = true)]
async fn in_the_background_dependents_are_left_to_the_collector() {
    let client = server().client();
    let maps = here::<ConfigMap>(&client);
    let owner = create(&maps, json!({"metadata": {"name": "owner"}})).await;
    create(&maps, owned("child", &owner)).await;
    maps.delete("owner", &DeleteParams::default()).await.unwrap();
    assert_eq!(maps.get("child").await.unwrap().owner_references().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn orphaned_dependents_lose_the_reference() {
    let client = server().client();
    let maps = here::<ConfigMap>(&client);
    let owner = create(&maps, json!({"metadata": {"name": "owner"}})).await;
    create(&maps, owned("child", &owner)).await;
    maps.delete("owner", &DeleteParams::orphan()).await.unwrap();
    assert!(maps.get("child").await.unwrap().owner_references().is_empty());
}

#[tokio::test(start_paused = true)]
async fn in_the_foreground_the_owner_waits_for_the_last_dependent() {
    let client = server().client();
    let maps = here::<ConfigMap>(&client);
    let owner = create(&maps, json!({"metadata": {"name": "owner"}})).await;
    create(&maps, owned("quick", &owner)).await;
    let mut slow = owned("slow", &owner);
    slow["metadata"]["finalizers"] = json!(["a/x"]);
    create(&maps, slow).await;
    maps.delete("owner", &DeleteParams::foreground()).await.unwrap();
    assert!(!exists(&maps, "quick").await && exists(&maps, "owner").await);
    merge(&maps, "slow", json!({"metadata": {"finalizers": null}})).await.unwrap();
    assert!(!exists(&maps, "owner").await);
}

#[tokio::test(start_paused = true)]
async fn a_collection_is_deleted_by_selector() {
    let client = server().client();
    let maps = here::<ConfigMap>(&client);
    for (name, app) in [("a", "x"), ("b", "x"), ("c", "y")] {
        create(&maps, json!({"metadata": {"name": name, "labels": {"app": app}}})).await;
    }
    maps.delete_collection(&DeleteParams::default(), &ListParams::default().labels("app=x")).await.unwrap();
    let left = maps.list(&ListParams::default()).await.unwrap();
    assert_eq!(left.iter().map(ResourceExt::name_any).collect::<Vec<_>>(), ["c"]);
}
