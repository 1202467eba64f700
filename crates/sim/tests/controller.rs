//! The controller in the embedded cluster: what it asks of the API, and what it makes of an API that misbehaves.

#![expect(clippy::unwrap_used, reason = "tests end where something is not as it should be")]

use std::collections::BTreeMap;
use std::time::Duration;

use http::StatusCode;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Event, Node, Pod};
use kube::ResourceExt;
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::wait::await_condition;
use pitcrew_controller::Clock;
use pitcrew_controller::lease::Elector;
use pitcrew_core::api::{Rollout, RolloutPhase};
use pitcrew_sim::actors::Behaviour;
use pitcrew_sim::api::{ApiServer, Fault};
use pitcrew_sim::cluster::{Cluster, controller};
use pitcrew_sim::fleet::{Fleet, Workload};
use serde_json::json;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

const NEW: &str = "565.57.01";
const STATE: &str = "nvidia.com/gpu-driver-upgrade-state";

/// All nodes may go at once, so no budget could ever be kept: three pods on two nodes, without budgets.
fn fleet(nodes: usize) -> Fleet {
    let pods = u32::try_from(nodes * 3 / 2).unwrap();
    let fleet = Fleet::new(nodes).with_workloads(vec![Workload::new("llm", "serve", pods, 1)]);
    fleet.with_grace_seconds(1).with_upgrade_policy(json!({
        "autoUpgrade": true, "maxParallelUpgrades": 0, "maxUnavailable": "100%", "podDeletion": {"timeoutSeconds": 300},
    }))
}

async fn cluster(fleet: &Fleet) -> (Cluster, ApiServer, JoinHandle<()>) {
    let cluster = Cluster::embedded(fleet, 3, Behaviour::default()).await.unwrap();
    let controller = start(&cluster, "one");
    all_are(&cluster, "upgrade-done").await;
    let api = cluster.api.clone().unwrap();
    (cluster, api, controller)
}

fn start(cluster: &Cluster, identity: &str) -> JoinHandle<()> {
    let controller = cluster.new_controller(identity);
    tokio::spawn(async move { controller.run(std::future::pending()).await.unwrap() })
}

async fn states(cluster: &Cluster) -> BTreeMap<String, String> {
    let nodes = Api::<Node>::all(cluster.admin.clone()).list(&ListParams::default()).await.unwrap();
    let state =
        |node: &Node| node.metadata.labels.as_ref().and_then(|l| l.get(STATE)).cloned().unwrap_or_default();
    nodes.iter().map(|node| (node.metadata.name.clone().unwrap(), state(node))).collect()
}

async fn all_are(cluster: &Cluster, state: &str) {
    let all = async {
        while !states(cluster).await.values().all(|s| s == state) {
            sleep(Duration::from_millis(100)).await;
        }
    };
    let came_true = timeout(Duration::from_mins(10), all).await.is_ok();
    assert!(came_true, "not all {state}: {:?}", states(cluster).await);
}

async fn upgrade(cluster: &Cluster) {
    cluster.set_driver_version(NEW).await.unwrap();
    sleep(Duration::from_secs(1)).await;
    all_are(cluster, "upgrade-done").await;
}

/// Requests of the controller by verb and resource, its Lease apart.
fn asked(api: &ApiServer) -> BTreeMap<(&'static str, String), u64> {
    let counts = api.counts().by_request.into_iter();
    counts
        .filter(|((user, _, resource), _)| user == "pitcrew" && resource != "leases")
        .map(|((_, verb, resource), count)| ((verb, resource), count))
        .collect()
}

fn since(
    before: &BTreeMap<(&'static str, String), u64>,
    after: BTreeMap<(&'static str, String), u64>,
) -> BTreeMap<(&'static str, String), u64> {
    let new =
        after.into_iter().map(|(key, count)| (key.clone(), count - before.get(&key).copied().unwrap_or(0)));
    new.filter(|(_, count)| *count > 0).collect()
}

#[tokio::test(start_paused = true)]
async fn an_idle_controller_asks_for_nothing_but_its_lease() {
    let (_cluster, api, _controller) = cluster(&fleet(5)).await;
    sleep(Duration::from_secs(5)).await;
    let before = asked(&api);
    // Shorter than the time after which watches are renewed.
    sleep(Duration::from_secs(200)).await;
    assert_eq!(since(&before, asked(&api)), BTreeMap::new());
}

#[tokio::test(start_paused = true)]
async fn an_upgrade_costs_at_most_20_writes_and_3_reads_a_node() {
    let (cluster, api, _controller) = cluster(&fleet(20)).await;
    let before = asked(&api);
    upgrade(&cluster).await;
    let requests = since(&before, asked(&api));
    let count = |verbs: &[&str]| {
        requests.iter().filter(|((verb, _), _)| verbs.contains(verb)).map(|(_, n)| n).sum::<u64>()
    };
    assert!(count(&["create", "update", "patch", "delete"]) <= 20 * 20, "{requests:?}");
    assert!(count(&["get", "list"]) <= 3 * 20, "{requests:?}");
    assert_eq!(requests.get(&("delete", "pods".to_owned())), Some(&20), "{requests:?}");
}

#[tokio::test(start_paused = true)]
async fn a_rollout_tells_the_story() {
    let (cluster, _api, _controller) = cluster(&fleet(4)).await;
    upgrade(&cluster).await;
    sleep(Duration::from_secs(5)).await;
    let rollout = Api::<Rollout>::all(cluster.admin.clone()).get("cluster-policy-1").await.unwrap();
    let status = rollout.status.unwrap();
    assert_eq!((status.phase, status.total, status.done, status.failed), (RolloutPhase::Done, 4, 4, 0));
    assert_eq!(rollout.spec.version.as_deref(), Some(NEW));
    assert!(status.finished_at.is_some());
}

#[tokio::test(start_paused = true)]
async fn events_of_a_node_sort_into_the_true_sequence() {
    let (cluster, _api, _controller) = cluster(&fleet(3)).await;
    upgrade(&cluster).await;
    sleep(Duration::from_secs(1)).await;
    let events = Api::<Event>::namespaced(cluster.admin.clone(), "default")
        .list(&ListParams::default())
        .await
        .unwrap();
    let of_node = events.iter().filter(|e| e.involved_object.name.as_deref() == Some("gpu-02"));
    let states: Vec<String> = of_node
        .filter(|e| e.reason.as_deref() == Some("GPUDriverUpgrade"))
        .filter_map(|e| Some(e.message.as_ref()?.split_once('[')?.1.trim_end_matches(']').to_owned()))
        .collect();
    assert_eq!(
        states,
        [
            "upgrade-done",
            "upgrade-required",
            "cordon-required",
            "wait-for-jobs-required",
            "pod-deletion-required",
            "pod-restart-required",
            "validation-required",
            "uncordon-required",
            "upgrade-done"
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn an_error_stays_with_its_node() {
    let (cluster, api, _controller) = cluster(&fleet(4)).await;
    api.on_request(|request| {
        let refused = request.user == "pitcrew" && request.verb == "patch" && request.name == "gpu-02";
        refused.then_some(Fault::Status(StatusCode::FORBIDDEN))
    });
    cluster.set_driver_version(NEW).await.unwrap();
    sleep(Duration::from_mins(1)).await;
    let states = states(&cluster).await;
    assert_eq!(
        states.values().filter(|s| *s == "upgrade-done").count(),
        4,
        "gpu-02 keeps its old label: {states:?}"
    );
    api.on_request(|_| None);
    sleep(Duration::from_mins(1)).await;
    all_are(&cluster, "upgrade-done").await;
    let nodes = Api::<Node>::all(cluster.admin.clone()).list(&ListParams::default()).await.unwrap();
    assert!(nodes.iter().all(|n| n.spec.as_ref().unwrap().unschedulable != Some(true)));
}

#[tokio::test(start_paused = true)]
async fn lost_answers_conflicts_and_errors_only_cost_time() {
    let (cluster, api, _controller) = cluster(&fleet(6)).await;
    let mut rng = fastrand::Rng::with_seed(11);
    api.on_request(move |request| {
        if request.user != "pitcrew" || request.verb == "watch" || request.resource == "leases" {
            return None;
        }
        match rng.u32(0..10) {
            0 => Some(Fault::LostReply),
            1 => Some(Fault::Status(StatusCode::CONFLICT)),
            2 => Some(Fault::Status(StatusCode::INTERNAL_SERVER_ERROR)),
            3 => Some(Fault::Status(StatusCode::TOO_MANY_REQUESTS)),
            4 => Some(Fault::Delay(Duration::from_secs(7))),
            _ => None,
        }
    });
    upgrade(&cluster).await;
    let nodes = Api::<Node>::all(cluster.admin.clone()).list(&ListParams::default()).await.unwrap();
    assert!(nodes.iter().all(|n| n.spec.as_ref().unwrap().unschedulable != Some(true)));
}

#[tokio::test(start_paused = true)]
async fn a_cut_watch_and_a_compaction_are_survived() {
    let (cluster, api, _controller) = cluster(&fleet(6)).await;
    cluster.set_driver_version(NEW).await.unwrap();
    for _ in 0..10 {
        sleep(Duration::from_millis(300)).await;
        api.compact();
    }
    all_are(&cluster, "upgrade-done").await;
}

#[tokio::test(start_paused = true)]
async fn with_a_live_gpu_operator_nothing_is_written_but_the_reason() {
    let fleet = fleet(3);
    let (cluster, api, _controller) = cluster(&fleet).await;
    let deployments = Api::<Deployment>::namespaced(cluster.admin.clone(), "gpu-operator");
    let operator = json!({
        "metadata": {"name": "gpu-operator", "labels": {"app.kubernetes.io/component": "gpu-operator"}},
        "spec": {"replicas": 0, "selector": {"matchLabels": {"app": "gpu-operator"}},
                 "template": {"metadata": {"labels": {"app": "gpu-operator"}}, "spec": {"containers": [{"name": "c"}]}}},
    });
    deployments.create(&PostParams::default(), &serde_json::from_value(operator).unwrap()).await.unwrap();
    sleep(Duration::from_secs(1)).await;
    let live = Patch::Merge(json!({"status": {"availableReplicas": 1, "replicas": 1}}));
    deployments.patch_status("gpu-operator", &PatchParams::default(), &live).await.unwrap();
    sleep(Duration::from_millis(50)).await;
    let before = asked(&api);
    cluster.set_driver_version(NEW).await.unwrap();
    sleep(Duration::from_secs(1)).await;
    let written = since(&before, asked(&api));
    assert!(written.keys().all(|(_, resource)| resource == "events"), "{written:?}");
    assert!(states(&cluster).await.values().all(|s| s == "upgrade-done"));
    let events = Api::<Event>::namespaced(cluster.admin.clone(), "default")
        .list(&ListParams::default())
        .await
        .unwrap();
    let said = |e: &Event| e.message.as_deref().is_some_and(|m| m.contains("a GPU Operator is live"));
    assert!(events.iter().any(said));
}

#[tokio::test(start_paused = true)]
async fn when_the_leader_dies_another_takes_over_and_never_two_lead() {
    let fleet = fleet(6);
    let (cluster, _api, first) = cluster(&fleet).await;
    let second = start(&cluster, "two");
    cluster.set_driver_version(NEW).await.unwrap();
    sleep(Duration::from_millis(1500)).await;
    first.abort();
    let began = Instant::now();
    let leases = Api::<Lease>::namespaced(cluster.admin.clone(), "gpu-operator");
    let taken = |lease: Option<&Lease>| {
        lease.and_then(|l| l.spec.as_ref()).is_some_and(|s| s.holder_identity.as_deref() == Some("two"))
    };
    timeout(Duration::from_mins(1), await_condition(leases, "pitcrew-controller", taken))
        .await
        .unwrap()
        .unwrap();
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    all_are(&cluster, "upgrade-done").await;
    second.abort();
}

/// Names of nodes that are cordoned.
async fn cordoned(cluster: &Cluster) -> Vec<String> {
    let nodes = Api::<Node>::all(cluster.admin.clone()).list(&ListParams::default()).await.unwrap();
    let is_closed = |node: &&Node| node.spec.as_ref().is_some_and(|spec| spec.unschedulable == Some(true));
    nodes.iter().filter(is_closed).map(ResourceExt::name_any).collect()
}

/// Its watch of the nodes stands still, which nobody can tell from a fleet in which nothing happens.
#[tokio::test(start_paused = true)]
async fn a_new_leader_counts_the_nodes_that_have_started() {
    let fleet = fleet(3).with_upgrade_policy(json!({
        "autoUpgrade": true, "maxParallelUpgrades": 0, "maxUnavailable": 0,
        "waitForCompletion": {"podSelector": "app=serve"},
    }));
    let (cluster, api, first) = cluster(&fleet).await;
    let second = controller(api.client_as("two"), Clock::starting_at(api.now()), "two", None);
    let second = tokio::spawn(async move { second.run(std::future::pending()).await.unwrap() });
    cluster.set_driver_version(NEW).await.unwrap();
    all_are(&cluster, "upgrade-required").await;
    sleep(Duration::from_secs(1)).await;
    api.lines().stall("two", "nodes", Instant::now() + Duration::from_hours(1));
    let one = json!({"spec": {"driver": {"upgradePolicy": {"maxUnavailable": 1}}}});
    cluster.patch_cluster_policy(one).await.unwrap();
    sleep(Duration::from_secs(1)).await;
    first.abort();
    let started = cordoned(&cluster).await;
    assert_eq!(started.len(), 1);
    // With so much work on it, others would come first.
    let container = json!({"name": "main", "image": "big", "resources": {"limits": {"nvidia.com/gpu": "4"}}});
    let pod =
        json!({"metadata": {"name": "big"}, "spec": {"nodeName": started[0], "containers": [container]}});
    let pods = Api::<Pod>::namespaced(cluster.admin.clone(), "llm");
    pods.create(&PostParams::default(), &serde_json::from_value(pod).unwrap()).await.unwrap();
    sleep(Duration::from_mins(1)).await;
    assert_eq!(cordoned(&cluster).await, started);
    second.abort();
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_cannot_renew_stands_down_before_anybody_else_may_lead() {
    let api = ApiServer::new("2026-01-01T00:00:00Z".parse().unwrap());
    let clock = Clock::starting_at(api.now());
    let elect = |id: &str| {
        let (leading, leads) = watch::channel(false);
        let leases = Api::<Lease>::namespaced(api.client_as(id), "default");
        tokio::spawn(Elector::new(leases, "test", id, clock.clone()).run(leading));
        leads
    };
    let (mut a, mut b) = (elect("a"), elect("b"));
    a.wait_for(|leads| *leads).await.unwrap();
    api.on_request(|request| (request.user == "a").then_some(Fault::Status(StatusCode::SERVICE_UNAVAILABLE)));
    a.wait_for(|leads| !*leads).await.unwrap();
    assert!(!*b.borrow());
    b.wait_for(|leads| *leads).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_controller_that_is_told_to_stop_gives_its_lease_back() {
    let cluster = Cluster::embedded(&fleet(1), 3, Behaviour::default()).await.unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let controller = cluster.new_controller("one");
    let run = tokio::spawn(controller.run(async { drop(stopped.await) }));
    all_are(&cluster, "upgrade-done").await;
    stop.send(()).unwrap();
    run.await.unwrap().unwrap();
    let lease = Api::<Lease>::namespaced(cluster.admin.clone(), "gpu-operator")
        .get("pitcrew-controller")
        .await
        .unwrap();
    assert_eq!(lease.spec.unwrap().holder_identity.as_deref(), Some(""));
}

#[tokio::test(start_paused = true)]
async fn one_seed_is_one_run_event_for_event() {
    let mut runs = Vec::new();
    for _ in 0..2 {
        let (cluster, api, _controller) = cluster(&fleet(12)).await;
        upgrade(&cluster).await;
        let events = Api::<Event>::namespaced(cluster.admin.clone(), "default")
            .list(&ListParams::default())
            .await
            .unwrap();
        let events: Vec<String> =
            events.iter().map(|e| format!("{:?} {:?}", e.metadata.name, e.message)).collect();
        runs.push((events, api.counts()));
    }
    assert_eq!(runs[0], runs[1]);
}
