//! The whole: installing twice, repeatability, and what a large fleet costs.

use super::*;

/// Replaces every driver pod, a tenth of the fleet at a time, with the nodes cordoned and emptied as in an upgrade.
async fn upgrade(cluster: &Cluster, nodes: &[String]) {
    cluster.set_version("550.54.15").await;
    seconds(1).await;
    for batch in nodes.chunks(nodes.len().div_ceil(10)) {
        for node in batch {
            cluster.patch_node(node, json!({"spec": {"unschedulable": true}})).await;
        }
        for pod in cluster
            .pods("")
            .await
            .iter()
            .filter(|pod| node_of(pod).is_some_and(|node| batch.iter().any(|name| name == node)))
        {
            match pod.namespace().as_deref() == Some(NAMESPACE) {
                true if pod.name_any().starts_with("nvidia-driver") => cluster.delete(pod).await,
                true => {}
                false => {
                    while cluster.evict(pod).await == Err(429) {
                        seconds(1).await;
                    }
                }
            }
        }
        seconds(5).await;
        for node in batch {
            cluster.patch_node(node, json!({"spec": {"unschedulable": null}})).await;
        }
    }
    seconds(5).await;
}

async fn upgraded(nodes: usize) -> (Vec<String>, crate::api::Counts) {
    let fleet = Fleet::new(nodes);
    let cluster = Cluster::of(&fleet, Behaviour::default()).await;
    fleet.install(&cluster.client).await.unwrap();
    upgrade(&cluster, &fleet.node_names().collect::<Vec<_>>()).await;
    let newest = cluster.revisions().await.pop().unwrap().1;
    let drivers = cluster.drivers().await;
    assert_eq!(drivers.iter().filter(|pod| hash(pod) == newest && is_ready(pod)).count(), nodes);
    fleet.wait_ready(&cluster.client).await;
    let pods = cluster.pods("").await;
    let trace = pods.iter().map(|pod| format!("{} {:?}", describe(pod), pod.status)).collect();
    (trace, cluster.server.counts())
}

#[tokio::test(start_paused = true)]
async fn two_runs_from_one_seed_are_the_same() {
    let (first, first_requests) = upgraded(12).await;
    let (second, second_requests) = upgraded(12).await;
    assert_eq!(first, second);
    assert_eq!(first_requests, second_requests);
}

#[tokio::test(start_paused = true)]
async fn a_settled_cluster_is_quiet() {
    let cluster = Cluster::of(&Fleet::new(6), Behaviour::default()).await;
    seconds(5).await;
    let before = cluster.server.counts();
    seconds(1800).await;
    let after = cluster.server.counts();
    assert_eq!(before.by_request, after.by_request);
}
