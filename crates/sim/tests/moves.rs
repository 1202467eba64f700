//! How often an upgrade of a whole fleet disturbs the work on it, held against upgrading nodes in their order.

#![expect(clippy::unwrap_used, reason = "tests end where something is not as it should be")]

use std::time::Duration;

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::Client;
use kube::api::{Api, EvictParams, ListParams, Patch, PatchParams, PostParams};
use pitcrew_sim::actors::{Behaviour, JobRule, Nodes};
use pitcrew_sim::cluster::Cluster;
use pitcrew_sim::fleet::{Fleet, Workload};
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};

const NEW: &str = "565.57.01";
const STATE: &str = "nvidia.com/gpu-driver-upgrade-state";
const WORK: &str = "llm";

/// Half of the devices are in use, and so many nodes are upgraded at a time.
fn half_busy(nodes: u32, at_a_time: u32) -> Fleet {
    let fleet = Fleet::new(nodes as usize).with_workloads(vec![Workload::new(WORK, "serve", nodes * 4, 1)]);
    limited(fleet, &json!(at_a_time)).with_grace_seconds(1)
}

fn limited(fleet: Fleet, unavailable: &Value) -> Fleet {
    let parallel = unavailable.as_u64().unwrap_or(0);
    fleet.with_upgrade_policy(json!({
        "autoUpgrade": true, "maxParallelUpgrades": parallel, "maxUnavailable": unavailable,
        "podDeletion": {"timeoutSeconds": 300},
    }))
}

async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let comes_true = async {
        while !holds().await {
            sleep(Duration::from_millis(100)).await;
        }
    };
    assert!(timeout(Duration::from_hours(6), comes_true).await.is_ok(), "in vain: {what}");
}

async fn all_done(cluster: &Cluster) {
    let nodes = Api::<Node>::all(cluster.admin.clone());
    until("every node is done", async || {
        let nodes = nodes.list(&ListParams::default()).await.unwrap();
        let state = |node: &Node| node.metadata.labels.as_ref()?.get(STATE).cloned();
        nodes.iter().all(|node| state(node).as_deref() == Some("upgrade-done"))
    })
    .await;
}

/// Upgrades the whole fleet with pitcrew. How many evictions it took.
async fn upgrade(cluster: &Cluster) -> u64 {
    let controller = cluster.new_controller("one");
    tokio::spawn(async move { controller.run(std::future::pending()).await.unwrap() });
    all_done(cluster).await;
    cluster.set_driver_version(NEW).await.unwrap();
    sleep(Duration::from_secs(1)).await;
    all_done(cluster).await;
    let counts = cluster.api.as_ref().unwrap().counts().by_request;
    let evictions = counts.iter().filter(|((user, verb, resource), _)| {
        user == "pitcrew" && *verb == "create" && resource == "pods/eviction"
    });
    evictions.map(|(_, count)| count).sum()
}

fn on(node: &str) -> ListParams {
    ListParams::default().fields(&format!("spec.nodeName={node}"))
}

async fn cordon(client: &Client, node: &str, cordoned: bool) {
    let patch = json!({"spec": {"unschedulable": cordoned}});
    let nodes = Api::<Node>::all(client.clone());
    nodes.patch(node, &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
}

/// What an upgrade by the order of names does to work: nodes are emptied so many at a time and come back, and nothing tells
/// the scheduler where work could stay. How many evictions it took.
async fn in_order(cluster: &Cluster, fleet: &Fleet, at_a_time: usize, pods: usize) -> u64 {
    let (client, mut evictions) = (&cluster.admin, 0);
    let work = Api::<Pod>::namespaced(client.clone(), WORK);
    let is_ready = |pod: &Pod| {
        let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
        let ready = conditions.into_iter().flatten().any(|c| c.type_ == "Ready" && c.status == "True");
        ready && pod.metadata.deletion_timestamp.is_none()
    };
    let all_ready = async || {
        let all = work.list(&ListParams::default()).await.unwrap();
        all.iter().filter(|pod| is_ready(pod)).count() == pods
    };
    let names: Vec<String> = fleet.node_names().collect();
    for wave in names.chunks(at_a_time) {
        for node in wave {
            cordon(client, node, true).await;
        }
        for node in wave {
            for pod in work.list(&on(node)).await.unwrap() {
                let name = pod.metadata.name.unwrap();
                work.evict(&name, &EvictParams::default()).await.unwrap();
                evictions += 1;
            }
        }
        sleep(Duration::from_secs(5)).await;
        until("all pods are back", all_ready).await;
        for node in wave {
            cordon(client, node, false).await;
        }
    }
    evictions
}

#[tokio::test(start_paused = true)]
async fn a_pod_moves_once() {
    let (nodes, at_a_time) = (64, 4);
    let pods = f64::from(nodes) * 4.0;
    let fleet = half_busy(nodes, at_a_time);
    let cluster = Cluster::embedded(&fleet, 3, Behaviour::default()).await.unwrap();
    let ours = upgrade(&cluster).await;
    let cluster = Cluster::embedded(&fleet, 3, Behaviour::default()).await.unwrap();
    let theirs = in_order(&cluster, &fleet, at_a_time as usize, nodes as usize * 4).await;
    #[expect(clippy::cast_precision_loss, reason = "a few hundred")]
    let (ours, theirs) = (ours as f64 / pods, theirs as f64 / pods);
    println!("evictions for each pod: {ours:.2}; in the order of names and without a taint: {theirs:.2}");
    assert!(ours <= 1.1, "{ours:.2} evictions for each pod");
    // The embedded scheduler fills the emptiest nodes first, which are those that are done: so that is as good here.
    assert!(theirs >= 1.0, "in the order of names: {theirs:.2}");
}

#[tokio::test(start_paused = true)]
async fn a_job_on_half_of_the_fleet_is_interrupted_once() {
    let fleet = limited(Fleet::new(128).with_workloads(Vec::new()), &json!("50%")).with_grace_seconds(1);
    let behaviour = Behaviour {
        jobs: vec![JobRule {
            prefix: "gang".to_owned(),
            nodes: Nodes::All,
            run: Duration::from_hours(1000),
            exit_code: 0,
            message: String::new(),
        }],
        ..Behaviour::default()
    };
    let cluster = Cluster::embedded(&fleet, 3, behaviour).await.unwrap();
    let pod = json!({"restartPolicy": "Never", "containers": [{
        "name": "train", "image": "example/train:1", "resources": {"limits": {"nvidia.com/gpu": "8"}},
    }]});
    let spec = json!({"parallelism": 64, "completions": 64, "backoffLimit": 1000, "template": {"spec": pod}});
    let jobs = Api::<Job>::namespaced(cluster.admin.clone(), "default");
    let job: Job = serde_json::from_value(json!({"metadata": {"name": "gang"}, "spec": spec})).unwrap();
    jobs.create(&PostParams::default(), &job).await.unwrap();
    let running = Api::<Pod>::namespaced(cluster.admin.clone(), "default");
    let by_job = ListParams::default().labels("job-name=gang");
    until("all of it runs", async || {
        let pods = running.list(&by_job).await.unwrap();
        pods.iter()
            .filter(|pod| pod.status.as_ref().is_some_and(|s| s.phase.as_deref() == Some("Running")))
            .count()
            == 64
    })
    .await;
    // Each of its pods leaves once, so all of them leave in one wave, to where they can stay.
    assert_eq!(upgrade(&cluster).await, 64);
}
