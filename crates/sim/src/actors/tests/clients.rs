//! The driver's clients: when they start, who restarts them, and what a node offers meanwhile.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::*;
use crate::actors::object::{pod_condition, seconds_between};
use crate::actors::{DraIdentity, Fault, Nodes, OPERANDS, Timing};

/// Seconds matter in here, so things take as long as on real machines.
fn slow() -> Behaviour {
    Behaviour::default().with_timing(Timing::real())
}

fn fleet() -> Fleet {
    Fleet::new(1).with_workloads(Vec::new()).with_clients()
}

pub(super) struct Main {
    pub(super) started: Option<Time>,
    pub(super) id: Option<String>,
    pub(super) restarts: i32,
}

/// A pod's first main container.
pub(super) fn main_of(pod: &Pod) -> Main {
    let statuses = pod.status.as_ref().and_then(|status| status.container_statuses.clone());
    let first = statuses.unwrap_or_default().into_iter().next().unwrap_or_default();
    let started = first.state.and_then(|state| state.running).and_then(|running| running.started_at);
    Main { started, id: first.container_id, restarts: first.restart_count }
}

/// Since when a pod is Ready.
fn ready_since(pod: &Pod) -> Option<Time> {
    pod_condition(pod, "Ready").filter(|ready| ready.status == "True")?.last_transition_time.clone()
}

impl Cluster {
    async fn operands(&self) -> Vec<Pod> {
        let ours = |pod: &Pod| {
            OPERANDS.iter().any(|operand| pod.labels().get("app").is_some_and(|app| app == operand.app))
        };
        self.pods("").await.into_iter().filter(ours).collect()
    }

    pub(super) async fn driver(&self) -> Pod {
        self.drivers().await.remove(0)
    }

    /// Replaces the node's driver pod by one of another version, as an upgrade does.
    pub(super) async fn upgrade_driver(&self, version: &str) {
        self.set_version(version).await;
        seconds(1).await;
        self.delete(&self.driver().await).await;
        seconds(300).await;
        assert!(is_ready(&self.driver().await));
        // Everything is looked at once more: what stays stale does so for good.
        self.actors.behaviour().change(|_| {});
        seconds(1).await;
    }

    async fn gpus(&self, node: &str) -> String {
        let status = self.get::<Node>("", node).await.status.unwrap();
        assert_eq!(status.capacity.unwrap()["nvidia.com/gpu"].0, "8");
        status.allocatable.unwrap()["nvidia.com/gpu"].0.clone()
    }
}

fn uids(pods: &[Pod]) -> Vec<Option<String>> {
    pods.iter().map(ResourceExt::uid).collect()
}

#[tokio::test(start_paused = true)]
async fn clients_are_there_early_and_start_when_the_driver_is_ready() {
    let cluster = Cluster::new(slow());
    fleet().install(&cluster.client).await.unwrap();
    seconds(60).await;
    assert!(!is_ready(&cluster.driver().await));
    let waiting = cluster.operands().await;
    assert_eq!(waiting.len(), OPERANDS.len());
    for pod in &waiting {
        let status = pod.status.as_ref().unwrap();
        let init = &status.init_container_statuses.as_ref().unwrap()[0];
        assert!(init.state.as_ref().unwrap().running.is_some(), "{}", describe(pod));
        assert_eq!((status.phase.as_deref(), main_of(pod).started), (Some("Pending"), None));
    }
    seconds(240).await;
    let (driver, clients) = (cluster.driver().await, cluster.operands().await);
    assert_eq!(uids(&clients), uids(&waiting));
    for pod in &clients {
        assert!(is_ready(pod) && main_of(pod).started >= ready_since(&driver), "{}", describe(pod));
    }
}

#[tokio::test(start_paused = true)]
async fn clients_run_under_their_true_names_where_nodes_are_labelled_for_them() {
    let cluster = Cluster::of(&fleet(), Behaviour::default()).await;
    let sets: Api<DaemonSet> = Api::namespaced(cluster.client.clone(), NAMESPACE);
    for operand in &OPERANDS {
        let set = sets.get(operand.app).await.unwrap();
        assert_eq!(set.labels()["app"], operand.app);
        let label = json!({"metadata": {"labels": {operand.deploy: "false"}}});
        cluster.patch_node("gpu-01", label).await;
    }
    seconds(5).await;
    assert!(cluster.operands().await.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_node_offers_gpus_only_while_its_device_plugin_is_ready() {
    let cluster = Cluster::new(slow());
    fleet().install(&cluster.client).await.unwrap();
    seconds(60).await;
    assert_eq!(cluster.gpus("gpu-01").await, "0");
    fleet().wait_ready(&cluster.client).await;
    seconds(1).await;
    assert_eq!(cluster.gpus("gpu-01").await, "8");
    let plugin = cluster.pods("app=nvidia-device-plugin-daemonset").await.remove(0);
    cluster.delete(&plugin).await;
    seconds(1).await;
    assert_eq!(cluster.gpus("gpu-01").await, "0");
    seconds(120).await;
    assert_eq!(cluster.gpus("gpu-01").await, "8");
}

#[tokio::test(start_paused = true)]
async fn without_a_driver_manager_nobody_restarts_clients() {
    let cluster = Cluster::of(&fleet(), slow()).await;
    let before = cluster.operands().await;
    cluster.upgrade_driver("550.54.15").await;
    let (driver, after) = (cluster.driver().await, cluster.operands().await);
    assert_eq!(uids(&after), uids(&before));
    for (old, new) in before.iter().zip(&after) {
        assert_eq!(main_of(new).id, main_of(old).id);
        assert!(is_ready(new) && main_of(new).started < main_of(&driver).started);
    }
}

#[tokio::test(start_paused = true)]
async fn the_driver_manager_restarts_the_operators_clients_and_nobody_elses_plugin() {
    let fleet = fleet().with_dra(DraIdentity::NvidiaChart);
    let cluster = Cluster::of(&fleet, slow().with_driver_manager()).await;
    let (before, validator) = (cluster.operands().await, cluster.validator("gpu-01").await);
    let plugin = cluster.plugin().await;
    cluster.set_version("550.54.15").await;
    seconds(1).await;
    cluster.delete(&cluster.driver().await).await;
    seconds(60).await;
    // They are back, and wait.
    let waiting = cluster.operands().await;
    assert!(waiting.iter().all(|pod| main_of(pod).started.is_none() && !uids(&before).contains(&pod.uid())));
    assert_eq!(cluster.gpus("gpu-01").await, "0");
    seconds(240).await;
    let (driver, after) = (cluster.driver().await, cluster.operands().await);
    assert_eq!(uids(&after), uids(&waiting));
    assert!(after.iter().all(|pod| is_ready(pod) && main_of(pod).started >= ready_since(&driver)));
    assert_ne!(cluster.validator("gpu-01").await.uid(), validator.uid());
    assert_eq!(cluster.gpus("gpu-01").await, "8");
    assert_eq!((cluster.plugin().await.uid(), main_of(&cluster.plugin().await).restarts), (plugin.uid(), 0));
}

#[tokio::test(start_paused = true)]
async fn the_driver_manager_restarts_the_operators_own_plugin() {
    let fleet = fleet().with_dra(DraIdentity::Operator);
    let cluster = Cluster::of(&fleet, slow().with_driver_manager()).await;
    let plugin = cluster.plugin().await;
    cluster.upgrade_driver("550.54.15").await;
    assert_ne!(cluster.plugin().await.uid(), plugin.uid());
}

#[tokio::test(start_paused = true)]
async fn the_driver_manager_loads_nothing_before_the_clients_are_gone() {
    let mut behaviour = slow().with_driver_manager();
    behaviour.timing.workload_stop = Duration::from_mins(5);
    let cluster = Cluster::of(&fleet(), behaviour).await;
    let before = cluster.operands().await;
    cluster.delete(&cluster.driver().await).await;
    // Their grace period is 30 s.
    seconds(100).await;
    let gone = cluster.operands().await.iter().all(|pod| !uids(&before).contains(&pod.uid()));
    assert!(gone && main_of(&cluster.driver().await).started.is_some());
    let driver = cluster.driver().await;
    let (created, started) = (driver.creation_timestamp().unwrap(), main_of(&driver).started.unwrap());
    let waited = seconds_between(&created, &started);
    assert!(waited >= 50, "the driver's container started after {waited} s");
}

#[tokio::test(start_paused = true)]
async fn a_driver_that_restarts_in_place_is_another_container_of_the_same_pod() {
    let cluster = Cluster::of(&fleet(), slow().with_driver_manager()).await;
    let (before, clients) = (cluster.driver().await, cluster.operands().await);
    seconds(10).await;
    cluster.actors.behaviour().restart_driver("gpu-01");
    seconds(2).await;
    let after = cluster.driver().await;
    assert!(!is_ready(&after));
    assert_eq!((after.uid(), main_of(&after).restarts), (before.uid(), 1));
    assert_ne!(main_of(&after).id, main_of(&before).id);
    assert!(main_of(&after).started > main_of(&before).started);
    let status = after.status.unwrap().container_statuses.unwrap().remove(0);
    let ended = status.last_state.unwrap().terminated.unwrap();
    assert_eq!((ended.started_at, ended.exit_code), (main_of(&before).started, 1));
    seconds(300).await;
    assert!(is_ready(&cluster.driver().await));
    assert_eq!(main_of(&cluster.driver().await).restarts, 1);
    // No init container ran, so nobody was removed.
    assert_eq!(uids(&cluster.operands().await), uids(&clients));
    assert!(cluster.operands().await.iter().all(|pod| main_of(pod).restarts == 0));
}

#[tokio::test(start_paused = true)]
async fn after_a_boot_clients_start_when_the_driver_is_ready_again() {
    let cluster = Cluster::of(&fleet(), slow().with_driver_manager()).await;
    let before = cluster.operands().await;
    seconds(10).await;
    cluster.actors.behaviour().change(|behaviour| *behaviour.boots.entry("gpu-01".into()).or_default() += 1);
    seconds(60).await;
    assert!(!is_ready(&cluster.driver().await));
    assert!(cluster.operands().await.iter().all(|pod| main_of(pod).started.is_none() && !is_ready(pod)));
    assert_eq!(cluster.gpus("gpu-01").await, "0");
    seconds(240).await;
    let (driver, after) = (cluster.driver().await, cluster.operands().await);
    assert_eq!(uids(&after), uids(&before));
    for pod in &after {
        assert!(is_ready(pod) && main_of(pod).started >= ready_since(&driver), "{}", describe(pod));
        assert_eq!(main_of(pod).restarts, 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_can_hang_or_crash_on_some_nodes() {
    let fleet = Fleet::new(2).with_workloads(Vec::new()).with_clients();
    let behaviour = Behaviour::default()
        .with_client_fault("nvidia-dcgm", Nodes::Named("gpu-01".into()), Fault::Hang)
        .with_client_fault("gpu-feature-discovery", Nodes::Named("gpu-02".into()), Fault::CrashLoop);
    let cluster = Cluster::new(behaviour);
    fleet.install(&cluster.client).await.unwrap();
    seconds(100).await;
    let unready = |pods: Vec<Pod>| pods.into_iter().filter(|pod| !is_ready(pod));
    let broken: Vec<_> = unready(cluster.operands().await)
        .map(|pod| {
            (pod.labels()["app"].clone(), node_of(&pod).unwrap().to_owned(), main_of(&pod).restarts > 1)
        })
        .collect();
    let wanted = [("nvidia-dcgm", "gpu-01", false), ("gpu-feature-discovery", "gpu-02", true)];
    assert_eq!(broken, wanted.map(|(app, node, restarts)| (app.to_owned(), node.to_owned(), restarts)));
    cluster.actors.behaviour().change(|behaviour| behaviour.clients.clear());
    seconds(400).await;
    assert_eq!(unready(cluster.operands().await).count(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_settled_cluster_with_clients_is_quiet() {
    let fleet = Fleet::new(3).with_clients().with_dra(DraIdentity::SigsChart);
    let cluster = Cluster::of(&fleet, Behaviour::default()).await;
    seconds(60).await;
    let before = cluster.server.counts();
    seconds(1800).await;
    assert_eq!(before.by_request, cluster.server.counts().by_request);
}
