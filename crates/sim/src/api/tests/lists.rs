//! Lists and gets.

use super::*;
use kube::core::PartialObjectMeta;

async fn names(nodes: &Api<Node>, params: &ListParams) -> Vec<String> {
    nodes.list(params).await.unwrap().iter().map(ResourceExt::name_any).collect()
}

async fn three_nodes(client: &Client) -> Api<Node> {
    for name in ["c", "a", "b"] {
        add_node(client, name).await;
    }
    all(client)
}

#[tokio::test(start_paused = true)]
async fn a_list_is_ordered_and_selected() {
    let client = server().client();
    let nodes = three_nodes(&client).await;
    merge(&nodes, "b", json!({"metadata": {"labels": {"gpu": "b200"}}})).await.unwrap();
    assert_eq!(names(&nodes, &ListParams::default()).await, ["a", "b", "c"]);
    assert_eq!(names(&nodes, &ListParams::default().labels("gpu=h100")).await, ["a", "c"]);
    assert_eq!(names(&nodes, &ListParams::default().fields("metadata.name=b")).await, ["b"]);
}

#[tokio::test(start_paused = true)]
async fn a_namespace_lists_only_its_own() {
    let client = server().client();
    for space in ["x", "xy", "w"] {
        create(&Api::<ConfigMap>::namespaced(client.clone(), space), json!({"metadata": {"name": "m"}}))
            .await;
    }
    let list = Api::<ConfigMap>::namespaced(client.clone(), "x").list(&ListParams::default()).await.unwrap();
    assert_eq!(list.items.len(), 1);
    assert_eq!(all::<ConfigMap>(&client).list(&ListParams::default()).await.unwrap().items.len(), 3);
}

#[tokio::test(start_paused = true)]
async fn pages_agree_with_each_other_while_others_write() {
    let client = server().client();
    let nodes = three_nodes(&client).await;
    let first = nodes.list(&ListParams::default().limit(1)).await.unwrap();
    assert_eq!(first.metadata.remaining_item_count, Some(2));
    nodes.delete("b", &DeleteParams::default()).await.unwrap();
    add_node(&client, "bb").await;
    let token = first.metadata.continue_.unwrap();
    let rest = nodes.list(&ListParams::default().continue_token(&token)).await.unwrap();
    assert_eq!(rest.iter().map(ResourceExt::name_any).collect::<Vec<_>>(), ["b", "c"]);
    assert_eq!(rest.metadata.resource_version, first.metadata.resource_version);
}

#[tokio::test(start_paused = true)]
async fn a_page_from_before_the_compaction_is_gone() {
    let server = server();
    let nodes = three_nodes(&server.client()).await;
    let first = nodes.list(&ListParams::default().limit(1)).await.unwrap();
    add_node(&server.client(), "d").await;
    server.compact();
    let token = first.metadata.continue_.unwrap();
    assert_eq!(why(nodes.list(&ListParams::default().continue_token(&token)).await), (410, "Expired".into()));
}

#[tokio::test(start_paused = true)]
async fn an_exact_version_shows_the_past_and_a_future_one_times_out() {
    let client = server().client();
    let nodes = three_nodes(&client).await;
    let list = async |query: &str| {
        let request = http::Request::get(format!("/api/v1/nodes?{query}")).body(vec![]).unwrap();
        client.request::<kube::core::ObjectList<Node>>(request).await
    };
    let past = list("resourceVersion=3&resourceVersionMatch=Exact").await.unwrap();
    assert_eq!(past.iter().map(ResourceExt::name_any).collect::<Vec<_>>(), ["a", "c"]);
    assert_eq!(list("resourceVersion=3&resourceVersionMatch=NotOlderThan").await.unwrap().items.len(), 3);
    assert_eq!(refusal(list("resourceVersion=99").await).code, 504);
    drop(nodes);
}

#[tokio::test(start_paused = true)]
async fn metadata_alone_can_be_asked_for() {
    let client = server().client();
    three_nodes(&client).await;
    let metas = all::<PartialObjectMeta<Node>>(&client);
    assert_eq!(metas.list(&ListParams::default()).await.unwrap().items.len(), 3);
    assert_eq!(metas.get("a").await.unwrap().labels()["gpu"], "h100");
}

#[tokio::test(start_paused = true)]
async fn what_is_not_there_is_not_found() {
    let client = server().client();
    let status = refusal(here::<DaemonSet>(&client).get("d").await);
    assert_eq!((status.code, &*status.message), (404, "daemonsets.apps \"d\" not found"));
    let unknown = Api::<k8s_openapi::api::storage::v1::StorageClass>::all(client);
    let status = refusal(unknown.get("s").await);
    assert_eq!((status.code, &*status.message), (404, "404 page not found"));
}
