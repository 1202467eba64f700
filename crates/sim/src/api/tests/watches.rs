//! Watches, mostly through kube's own watcher.

use super::*;
use futures::{Stream, StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::core::v1::Node;
use kube::api::{WatchEvent, WatchParams};
use kube::runtime::watcher::{self, watcher};
use std::pin::pin;

fn line(event: WatchEvent<Node>) -> String {
    match event {
        WatchEvent::Added(node) => format!("added {}", node.name_any()),
        WatchEvent::Modified(node) => format!("modified {}", node.name_any()),
        WatchEvent::Deleted(node) => {
            format!("deleted {} at {}", node.name_any(), node.resource_version().unwrap())
        }
        WatchEvent::Bookmark(mark) => format!("bookmark {}", mark.metadata.resource_version),
        WatchEvent::Error(status) => format!("error {}", status.code),
    }
}

/// Everything that a watch says until it ends.
async fn hear(nodes: &Api<Node>, params: &WatchParams, from: &str) -> Vec<String> {
    let events = nodes.watch(params, from).await.unwrap();
    events.map_ok(line).try_collect().await.unwrap()
}

fn brief() -> WatchParams {
    WatchParams::default().timeout(1).disable_bookmarks()
}

#[tokio::test(start_paused = true)]
async fn a_watch_tells_what_happened_after_its_version() {
    let client = server().client();
    let nodes = all::<Node>(&client);
    let seen = add_node(&client, "a").await.resource_version().unwrap();
    merge(&nodes, "a", json!({"spec": {"unschedulable": true}})).await.unwrap();
    add_node(&client, "b").await;
    nodes.delete("a", &DeleteParams::default()).await.unwrap();
    assert_eq!(hear(&nodes, &brief(), &seen).await, ["modified a", "added b", "deleted a at 5"]);
    assert_eq!(hear(&nodes, &brief(), "0").await, ["added b"], "version 0 starts with what there is");
}

#[tokio::test(start_paused = true)]
async fn entering_and_leaving_a_selector_is_added_and_deleted() {
    let client = server().client();
    let nodes = all::<Node>(&client);
    let seen = add_node(&client, "a").await.resource_version().unwrap();
    for draining in [json!("1"), json!("2"), Value::Null] {
        merge(&nodes, "a", json!({"metadata": {"labels": {"draining": draining}}})).await.unwrap();
    }
    assert_eq!(hear(&nodes, &brief().labels("!draining"), &seen).await, ["deleted a at 3", "added a"]);
    assert_eq!(
        hear(&nodes, &brief().labels("draining"), &seen).await,
        ["added a", "modified a", "deleted a at 5"]
    );
    assert_eq!(hear(&nodes, &brief().fields("metadata.name=b"), &seen).await, [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn old_history_is_as_good_as_new() {
    let client = server().client();
    let nodes = all::<Node>(&client);
    let seen = add_node(&client, "a").await.resource_version().unwrap();
    for round in 0..600 {
        merge(&nodes, "a", json!({"metadata": {"labels": {"even": (round % 2 == 0).to_string()}}}))
            .await
            .unwrap();
    }
    let heard = hear(&nodes, &brief().labels("even=true"), &seen).await;
    assert_eq!(heard.len(), 600);
    assert_eq!(heard[..3], ["added a", "deleted a at 4", "added a"]);
}

#[tokio::test(start_paused = true)]
async fn a_watch_of_one_namespace_hears_nothing_of_others() {
    let client = server().client();
    for space in ["x", "y"] {
        create(&Api::<ConfigMap>::namespaced(client.clone(), space), json!({"metadata": {"name": space}}))
            .await;
    }
    let maps = Api::<ConfigMap>::namespaced(client, "y");
    let events: Vec<_> = maps.watch(&brief(), "1").await.unwrap().try_collect().await.unwrap();
    assert!(matches!(&events[..], [WatchEvent::Added(map)] if map.name_any() == "y"));
}

#[tokio::test(start_paused = true)]
async fn bookmarks_carry_the_newest_version_of_anything() {
    let client = server().client();
    let nodes = all::<Node>(&client);
    create(&here::<ConfigMap>(&client), json!({"metadata": {"name": "m"}})).await;
    let heard = hear(&nodes, &WatchParams::default().timeout(150), "1").await;
    assert_eq!(heard, ["bookmark 2", "bookmark 2"]);
}

#[tokio::test(start_paused = true)]
async fn a_version_from_before_the_compaction_is_gone() {
    let server = server();
    let client = server.client();
    let seen = add_node(&client, "a").await.resource_version().unwrap();
    add_node(&client, "b").await;
    server.compact();
    let nodes = all::<Node>(&client);
    assert_eq!(hear(&nodes, &brief(), &seen).await, ["error 410"]);
    assert_eq!(hear(&nodes, &brief(), "3").await, [""; 0], "the newest version is still good");
}

#[tokio::test(start_paused = true)]
async fn a_sleeping_watch_is_woken_by_its_own_changes() {
    let server = server();
    let client = server.client();
    let nodes = all::<Node>(&client);
    let mut events = pin!(nodes.watch(&brief().timeout(3600), "1").await.unwrap());
    let writer = client.clone();
    tokio::spawn(async move {
        sleep(Duration::from_secs(5)).await;
        create(&here::<ConfigMap>(&writer), json!({"metadata": {"name": "m"}})).await;
        add_node(&writer, "a").await;
    });
    let event = events.try_next().await.unwrap().unwrap();
    assert_eq!((line(event), server.now().to_string()), ("added a".into(), "2026-01-01T00:00:05Z".into()));
}

/// Names that kube's watcher knows of when its first listing is done.
async fn first_listing(client: &Client, config: watcher::Config) -> Vec<String> {
    let mut events = pin!(watcher(all::<Node>(client), config));
    let mut names = Vec::new();
    loop {
        match events.try_next().await.unwrap().unwrap() {
            watcher::Event::InitApply(node) => names.push(node.name_any()),
            watcher::Event::InitDone => return names,
            _ => {}
        }
    }
}

#[tokio::test(start_paused = true)]
async fn kubes_watcher_lists_in_every_mode() {
    let client = server().client();
    for name in ["a", "b", "c"] {
        add_node(&client, name).await;
    }
    let modes = [
        watcher::Config::default(),
        watcher::Config::default().page_size(2),
        watcher::Config::default().streaming_lists(),
        watcher::Config::default().any_semantic(),
    ];
    for mode in modes {
        assert_eq!(first_listing(&client, mode.clone()).await, ["a", "b", "c"], "{mode:?}");
    }
}

async fn next_name(
    events: &mut (impl Stream<Item = watcher::Result<watcher::Event<Node>>> + Unpin),
) -> String {
    loop {
        if let Ok(watcher::Event::Apply(node) | watcher::Event::InitApply(node)) =
            events.next().await.unwrap()
        {
            return node.name_any();
        }
    }
}

#[tokio::test(start_paused = true)]
async fn kubes_watcher_survives_two_days_and_a_compaction() {
    let server = server();
    let client = server.client();
    add_node(&client, "a").await;
    let mut events = pin!(watcher(all::<Node>(&client), watcher::Config::default()));
    assert_eq!(next_name(&mut events).await, "a");
    let (writer, cluster) = (client.clone(), server.clone());
    tokio::spawn(async move {
        sleep(Duration::from_hours(47)).await;
        add_node(&writer, "late").await;
        sleep(Duration::from_hours(1)).await;
        add_node(&writer, "lost").await;
        cluster.compact();
    });
    assert_eq!(next_name(&mut events).await, "late");
    assert_eq!(next_name(&mut events).await, "a", "a relist");
    assert_eq!(server.now().to_string(), "2026-01-03T00:00:00Z");
}

/// A bookmark instead of the end would say that the watch had told everything up to then.
#[tokio::test(start_paused = true)]
async fn a_watch_that_is_cut_ends_at_once_and_says_no_bookmark() {
    let server = server();
    let client = server.client();
    let nodes = all::<Node>(&client);
    let seen = add_node(&client, "a").await.resource_version().unwrap();
    let mut events = pin!(nodes.watch(&WatchParams::default(), &seen).await.unwrap());
    assert!(futures::poll!(events.next()).is_pending());
    server.lines().cut("user");
    assert!(matches!(futures::poll!(events.next()), std::task::Poll::Ready(None)));
}
