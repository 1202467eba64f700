//! How often an upgrade of a whole fleet disturbs the work on it, held against upgrading nodes in their order.

#![expect(clippy::unwrap_used, reason = "tests end where something is not as it should be")]

use std::pin::pin;
use std::time::Duration;

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::Client;
use kube::api::{Api, EvictParams, ListParams, Patch, PatchParams, PostParams};
use pitcrew_core::api::DriverPolicy;
use pitcrew_sim::actors::{Behaviour, JobRule, Nodes, Timing};
use pitcrew_sim::cluster::Cluster;
use pitcrew_sim::fleet::{Fleet, Workload};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout};

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

/// So many pods of a namespace are at work.
async fn at_work(work: &Api<Pod>) -> usize {
    let is_ready = |pod: &Pod| {
        let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
        let ready = conditions.into_iter().flatten().any(|c| c.type_ == "Ready" && c.status == "True");
        ready && pod.metadata.deletion_timestamp.is_none()
    };
    work.list(&ListParams::default()).await.unwrap().iter().filter(|pod| is_ready(pod)).count()
}

/// What an upgrade by the order of names does to work: nodes are emptied so many at a time and come back, and nothing tells
/// the scheduler where work could stay. How many evictions it took.
async fn in_order(cluster: &Cluster, fleet: &Fleet, at_a_time: usize, work: &Api<Pod>, pods: usize) -> u64 {
    let (client, mut evictions) = (&cluster.admin, 0);
    let all_ready = async || at_work(work).await == pods;
    let names: Vec<String> = fleet.node_names().collect();
    for wave in names.chunks(at_a_time) {
        for node in wave {
            cordon(client, node, true).await;
        }
        for node in wave {
            let is_over =
                |pod: &Pod| pod.status.as_ref().is_some_and(|s| s.phase.as_deref() == Some("Failed"));
            for pod in work.list(&on(node)).await.unwrap().into_iter().filter(|pod| !is_over(pod)) {
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
    let work = Api::namespaced(cluster.admin.clone(), WORK);
    let theirs = in_order(&cluster, &fleet, at_a_time as usize, &work, nodes as usize * 4).await;
    #[expect(clippy::cast_precision_loss, reason = "a few hundred")]
    let (ours, theirs) = (ours as f64 / pods, theirs as f64 / pods);
    println!("evictions for each pod: {ours:.2}; in the order of names and without a taint: {theirs:.2}");
    assert!(ours <= 1.1, "{ours:.2} evictions for each pod");
    // The embedded scheduler fills the emptiest nodes first, which are those that are done: so that is as good here.
    assert!(theirs >= 1.0, "in the order of names: {theirs:.2}");
}

/// The nodes of the job, of which each takes a whole node.
const GANG: usize = 64;

/// A fleet of which a job takes half, all of it at work.
async fn with_a_gang() -> (Fleet, Cluster, Api<Pod>) {
    let fleet = limited(Fleet::new(2 * GANG).with_workloads(Vec::new()), &json!("50%")).with_grace_seconds(1);
    let behaviour = Behaviour {
        jobs: vec![JobRule {
            prefix: "gang".to_owned(),
            nodes: Nodes::All,
            run: Duration::from_hours(1000),
            exit_code: 0,
            message: String::new(),
        }],
        // No two nodes take the same time: their places become free one by one.
        timing: Timing { driver_start: Duration::from_mins(1), jitter: 0.5, ..Timing::default() },
        ..Behaviour::default()
    };
    let cluster = Cluster::embedded(&fleet, 3, behaviour).await.unwrap();
    let pod = json!({"restartPolicy": "Never", "containers": [{
        "name": "train", "image": "example/train:1", "resources": {"limits": {"nvidia.com/gpu": "8"}},
    }]});
    let spec =
        json!({"parallelism": GANG, "completions": GANG, "backoffLimit": 1000, "template": {"spec": pod}});
    let jobs = Api::<Job>::namespaced(cluster.admin.clone(), "default");
    let job: Job = serde_json::from_value(json!({"metadata": {"name": "gang"}, "spec": spec})).unwrap();
    jobs.create(&PostParams::default(), &job).await.unwrap();
    let work = Api::namespaced(cluster.admin.clone(), "default");
    until("all of it is at work", async || at_work(&work).await == GANG).await;
    (fleet, cluster, work)
}

/// What an upgrade did to the job.
#[derive(Debug)]
struct Harm {
    /// How often not all of it was at work any more, …
    interruptions: usize,
    /// … and for how long together.
    lost: Duration,
    evictions: u64,
}

async fn harm(work: &Api<Pod>, upgrade: impl Future<Output = u64>) -> Harm {
    let (mut interruptions, mut lost, mut whole) = (0, Duration::ZERO, true);
    let mut upgrade = pin!(upgrade);
    loop {
        let looked = Instant::now();
        let ended = timeout(Duration::from_millis(100), &mut upgrade).await;
        if let Ok(evictions) = ended {
            return Harm { interruptions, lost, evictions };
        }
        let now = at_work(work).await == GANG;
        interruptions += usize::from(whole && !now);
        lost += if now { Duration::ZERO } else { looked.elapsed() };
        whole = now;
    }
}

#[tokio::test(start_paused = true)]
async fn a_job_on_half_of_the_fleet_is_interrupted_once() {
    let (_, cluster, work) = with_a_gang().await;
    let ours = harm(&work, upgrade(&cluster)).await;

    let (_, cluster, work) = with_a_gang().await;
    let alone = json!({"driver": {"name": "gpu"}, "rollout": {"topology": {"gang": {"enabled": false}}}});
    let policy = DriverPolicy::new("gpu", serde_json::from_value(alone).unwrap());
    Api::all(cluster.admin.clone()).create(&PostParams::default(), &policy).await.unwrap();
    let apart = harm(&work, upgrade(&cluster)).await;

    let (fleet, cluster, work) = with_a_gang().await;
    let by_names = harm(&work, in_order(&cluster, &fleet, GANG, &work, GANG)).await;
    println!("together {ours:?}; each node by itself {apart:?}; by names {by_names:?}");
    // Each of its pods leaves once, all of them in one wave, to where they can stay.
    assert_eq!((ours.interruptions, ours.evictions), (1, GANG as u64));
    assert!(apart.lost > ours.lost * 2, "it costs to let nodes go by themselves: {apart:?}");
    assert!(by_names.interruptions > 1 && by_names.evictions > ours.evictions, "{by_names:?}");
}
