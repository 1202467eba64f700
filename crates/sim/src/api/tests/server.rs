//! The server as a whole: counts, faults, discovery.

use super::*;
use http::StatusCode;
use kube::discovery::{Discovery, Scope, verbs};

#[tokio::test(start_paused = true)]
async fn requests_are_counted_as_the_audit_log_names_them() {
    let server = server();
    let client = server.client_as("kubelet");
    add_node(&client, "a").await;
    merge_status(&all::<Node>(&client), "a", json!({"status": {"phase": "x"}})).await;
    add_pod(&client, "p", None).await;
    here::<Pod>(&client).evict("p", &kube::api::EvictParams::default()).await.unwrap();
    all::<Node>(&server.client()).list(&ListParams::default()).await.unwrap();
    let counts = server.counts();
    let lines: Vec<String> = counts
        .by_request
        .iter()
        .map(|((user, verb, resource), n)| format!("{user} {verb} {resource} {n}"))
        .collect();
    assert_eq!(
        lines,
        [
            "kubelet create nodes 1",
            "kubelet create pods 1",
            "kubelet create pods/eviction 1",
            "kubelet patch nodes/status 1",
            "user list nodes 1"
        ]
    );
    assert_eq!((counts.total(), counts.by_user("kubelet"), counts.of("list", "nodes")), (5, 4, 1));
}

#[tokio::test(start_paused = true)]
async fn a_fault_can_refuse_lose_or_delay_a_request() {
    let server = server();
    let client = server.client();
    let nodes = all::<Node>(&client);
    server
        .on_request(|info| (info.verb == "create").then_some(Fault::Status(StatusCode::SERVICE_UNAVAILABLE)));
    let node = from(json!({"metadata": {"name": "a"}}));
    assert_eq!(refusal(nodes.create(&PostParams::default(), &node).await).code, 503);
    server.on_request(|info| (info.verb == "create").then_some(Fault::LostReply));
    assert!(nodes.create(&PostParams::default(), &node).await.is_err());
    server.on_request(|_| Some(Fault::Delay(Duration::from_secs(3))));
    assert!(nodes.get("a").await.is_ok(), "the lost reply was to a request that was served");
    assert_eq!(server.now().to_string(), "2026-01-01T00:00:03Z");
}

#[tokio::test(start_paused = true)]
async fn kubes_discovery_finds_kinds_verbs_and_scopes() {
    let client = server().client();
    assert_eq!(client.apiserver_version().await.unwrap().minor, "37");
    let discovery = Discovery::new(client).run().await.unwrap();
    let find = |group: &str, kind: &str| {
        let group = discovery.get(group).unwrap();
        group.recommended_kind(kind).unwrap()
    };
    let (resource, capabilities) = find("", "Pod");
    assert_eq!((resource.plural.as_str(), capabilities.scope), ("pods", Scope::Namespaced));
    assert!(capabilities.subresources.iter().any(|(resource, _)| resource.plural == "eviction"));
    let (resource, capabilities) = find("apiextensions.k8s.io", "CustomResourceDefinition");
    assert_eq!(
        (resource.api_version.as_str(), capabilities.scope),
        ("apiextensions.k8s.io/v1", Scope::Cluster)
    );
    assert!(capabilities.operations.iter().any(|verb| verb == verbs::WATCH));
}
