//! Operator, DaemonSets, kubelets.

use k8s_openapi::api::core::v1::ContainerStatus;

use super::*;
use crate::actors::{Fault, Nodes};

fn bare(nodes: usize) -> Fleet {
    Fleet::new(nodes).with_workloads(Vec::new())
}

fn container(pod: &Pod) -> ContainerStatus {
    pod.status.as_ref().and_then(|status| status.container_statuses.clone()).unwrap().remove(0)
}

fn waiting_reason(pod: &Pod) -> Option<String> {
    container(pod).state?.waiting?.reason
}

#[tokio::test(start_paused = true)]
async fn a_fleet_comes_up_with_one_driver_and_one_validator_per_node() {
    let cluster = Cluster::of(&bare(3), Behaviour::default()).await;
    assert_eq!(nodes_of(&cluster.drivers().await), ["gpu-01", "gpu-02", "gpu-03"]);
    seconds(1).await;
    let status = cluster.driver_set().await.status.unwrap();
    assert_eq!(
        (status.desired_number_scheduled, status.number_ready, status.updated_number_scheduled),
        (3, 3, Some(3))
    );
    assert_eq!(status.observed_generation, cluster.driver_set().await.metadata.generation);
    assert_eq!(cluster.revisions().await.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn on_delete_keeps_old_pods_and_replaces_a_deleted_one_by_the_new_revision() {
    let cluster = Cluster::of(&bare(3), Behaviour::default()).await;
    let before = cluster.drivers().await;
    cluster.set_version("550.54.15").await;
    seconds(5).await;
    let revisions = cluster.revisions().await;
    assert_eq!(revisions.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(
        cluster.drivers().await.iter().map(ResourceExt::uid).collect::<Vec<_>>(),
        before.iter().map(ResourceExt::uid).collect::<Vec<_>>()
    );

    cluster.patch_node("gpu-02", json!({"spec": {"unschedulable": true}})).await;
    cluster.delete(&before[1]).await;
    seconds(5).await;
    let after = cluster.drivers().await;
    let hashes: Vec<_> = after.iter().map(hash).collect();
    assert_eq!(hashes, [revisions[0].1.clone(), revisions[1].1.clone(), revisions[0].1.clone()]);
    assert!(is_ready(&after[1]));
    let image = after[1].spec.as_ref().unwrap().containers[0].image.clone();
    assert_eq!(image.as_deref(), Some("nvcr.io/nvidia/driver:550.54.15-ubuntu22.04"));
    assert_eq!(cluster.driver_set().await.status.unwrap().updated_number_scheduled, Some(1));
}

#[tokio::test(start_paused = true)]
async fn going_back_to_an_old_template_raises_its_revision_again() {
    let cluster = Cluster::of(&bare(2), Behaviour::default()).await;
    let first = cluster.revisions().await[0].1.clone();
    cluster.set_version("550.54.15").await;
    seconds(2).await;
    cluster.set_version("535.104.05").await;
    seconds(2).await;
    let revisions = cluster.revisions().await;
    assert_eq!(revisions.len(), 2);
    assert_eq!(revisions[1], (3, first));
    assert_eq!(cluster.driver_set().await.status.unwrap().updated_number_scheduled, Some(2));
}

#[tokio::test(start_paused = true)]
async fn a_validator_starts_anew_when_the_driver_does() {
    let cluster = Cluster::of(&bare(1), Behaviour::default()).await;
    seconds(3).await;
    let before = container(&cluster.validator("gpu-01").await);
    cluster.delete(&cluster.drivers().await[0]).await;
    tokio::time::sleep(Duration::from_millis(400)).await;
    assert!(!is_ready(&cluster.validator("gpu-01").await));
    seconds(5).await;
    let (validator, driver) = (cluster.validator("gpu-01").await, cluster.drivers().await.remove(0));
    assert!(is_ready(&validator) && is_ready(&driver));
    let started = |status: ContainerStatus| status.state.unwrap().running.unwrap().started_at.unwrap().0;
    assert!(started(container(&validator)) > started(before));
    assert!(started(container(&validator)) >= started(container(&driver)));
    assert_eq!(container(&validator).restart_count, 1);
}

#[tokio::test(start_paused = true)]
async fn a_crashing_driver_backs_off_as_kubelets_do_and_recovers_when_mended() {
    let behaviour =
        Behaviour::default().with_fault(Nodes::Named("gpu-01".into()), "550.54.15", Fault::CrashLoop);
    let cluster = Cluster::of(&bare(2), behaviour).await;
    cluster.set_version("550.54.15").await;
    seconds(1).await;
    for pod in cluster.drivers().await {
        cluster.delete(&pod).await;
    }
    seconds(5).await;
    let pods = cluster.drivers().await;
    assert_eq!(waiting_reason(&pods[0]).as_deref(), Some("CrashLoopBackOff"));
    assert_eq!((container(&pods[0]).restart_count, is_ready(&pods[1])), (0, true));
    seconds(100).await;
    // Restarts after 10, 20 and 40 s; the next comes after 80 s more.
    assert_eq!(container(&cluster.drivers().await[0]).restart_count, 3);
    assert!(!is_ready(&cluster.validator("gpu-01").await));
    cluster.actors.behaviour().change(|behaviour| behaviour.drivers.clear());
    seconds(300).await;
    assert!(is_ready(&cluster.drivers().await[0]));
    assert!(is_ready(&cluster.validator("gpu-01").await));
}

#[tokio::test(start_paused = true)]
async fn a_missing_image_and_a_hang_are_not_ready_each_in_its_way() {
    let behaviour = Behaviour::default()
        .with_fault(Nodes::Named("gpu-01".into()), "550.54.15", Fault::ImageMissing)
        .with_fault(Nodes::Named("gpu-02".into()), "550.54.15", Fault::Hang);
    let cluster = Cluster::of(&bare(2), behaviour).await;
    cluster.set_version("550.54.15").await;
    seconds(1).await;
    for pod in cluster.drivers().await {
        cluster.delete(&pod).await;
    }
    seconds(3600).await;
    let pods = cluster.drivers().await;
    assert_eq!(waiting_reason(&pods[0]).as_deref(), Some("ImagePullBackOff"));
    assert_eq!(pods[0].status.as_ref().unwrap().phase.as_deref(), Some("Pending"));
    assert_eq!(pods[1].status.as_ref().unwrap().phase.as_deref(), Some("Running"));
    assert!(!is_ready(&pods[1]) && !is_ready(&pods[0]));
    cluster.actors.behaviour().change(|behaviour| behaviour.drivers.clear());
    seconds(400).await;
    assert!(cluster.drivers().await.iter().all(is_ready));
}

#[tokio::test(start_paused = true)]
async fn a_dead_kubelet_means_not_ready_and_nothing_happens_there() {
    let cluster = Cluster::of(&bare(2), Behaviour::default()).await;
    cluster.actors.behaviour().change(|behaviour| behaviour.down.extend(["gpu-01".to_owned()]));
    seconds(1).await;
    let ready = |node: &Node| {
        let conditions = node.status.as_ref().unwrap().conditions.clone().unwrap();
        conditions.into_iter().find(|condition| condition.type_ == "Ready").unwrap().status
    };
    assert_eq!(ready(&cluster.get::<Node>("", "gpu-01").await), "Unknown");
    cluster.delete(&cluster.drivers().await[0]).await;
    seconds(600).await;
    assert!(cluster.drivers().await[0].metadata.deletion_timestamp.is_some());
    cluster.actors.behaviour().change(|behaviour| behaviour.down.clear());
    seconds(10).await;
    assert_eq!(ready(&cluster.get::<Node>("", "gpu-01").await), "True");
    assert!(cluster.drivers().await.iter().all(is_ready));
}

#[tokio::test(start_paused = true)]
async fn a_node_that_loses_its_deploy_label_loses_its_driver() {
    let cluster = Cluster::of(&bare(2), Behaviour::default()).await;
    cluster
        .patch_node("gpu-01", json!({"metadata": {"labels": {"nvidia.com/gpu.deploy.driver": null}}}))
        .await;
    seconds(5).await;
    assert_eq!(nodes_of(&cluster.drivers().await), ["gpu-02"]);
    assert_eq!(cluster.driver_set().await.status.unwrap().desired_number_scheduled, 1);
}

#[tokio::test(start_paused = true)]
async fn an_nvidia_driver_gets_a_daemon_set_and_its_nodes() {
    let cluster = Cluster::of(&bare(2).with_label("gpu-02", "pool", "h100"), Behaviour::default()).await;
    let kind = crate::actors::operator::nvidia_driver_kind();
    let api: Api<DynamicObject> = Api::all_with(cluster.client.clone(), &kind);
    let spec = json!({"spec": {"version": "550.54.15", "nodeSelector": {"pool": "h100"}}});
    api.create(&PostParams::default(), &DynamicObject::new("h100", &kind).data(spec)).await.unwrap();
    seconds(5).await;
    let sets: Api<DaemonSet> = Api::namespaced(cluster.client.clone(), NAMESPACE);
    let sets =
        sets.list(&ListParams::default().labels("app.kubernetes.io/component=nvidia-driver")).await.unwrap();
    assert_eq!(sets.items.len(), 2);
    let pods = cluster.drivers().await;
    let new: Vec<_> = pods.iter().filter(|pod| pod.name_any().starts_with("nvidia-gpu-driver")).collect();
    assert_eq!(new.iter().filter_map(|pod| node_of(pod)).collect::<Vec<_>>(), ["gpu-02"]);
}
