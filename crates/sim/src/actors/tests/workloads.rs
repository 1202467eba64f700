//! Deployments, scheduler, budgets, Jobs, stateful sets, garbage.

use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;

use super::*;
use crate::actors::{JobRule, Nodes, STOP_SECONDS};
use crate::fleet::Workload;

fn fleet(nodes: usize, workloads: Vec<Workload>) -> Fleet {
    Fleet::new(nodes).with_workloads(workloads)
}

#[tokio::test(start_paused = true)]
async fn an_evicted_pod_comes_back_on_another_node() {
    let cluster =
        Cluster::of(&fleet(3, vec![Workload::new("llm", "chat", 2, 4)]), Behaviour::default()).await;
    let pod = cluster.pods("app=chat").await.remove(0);
    let node = node_of(&pod).unwrap().to_owned();
    cluster.patch_node(&node, json!({"spec": {"unschedulable": true}})).await;
    assert_eq!(cluster.evict(&pod).await, Ok(()));
    seconds(3).await;
    let pods = cluster.pods("app=chat").await;
    assert_eq!(pods.len(), 2);
    assert!(pods.iter().all(is_ready) && !nodes_of(&pods).contains(&node.as_str()), "{:?}", nodes_of(&pods));
    assert_eq!(cluster.deployment("llm", "chat").await.status.unwrap().ready_replicas, Some(2));
}

#[tokio::test(start_paused = true)]
async fn the_scheduler_counts_gpus_and_waits_for_room() {
    let cluster = Cluster::of(&fleet(2, vec![Workload::new("llm", "big", 2, 8)]), Behaviour::default()).await;
    let waiting: Pod = cluster.create("llm", gpu_pod("waits", 1)).await;
    seconds(5).await;
    let waits: Pod = cluster.get("llm", "waits").await;
    assert_eq!(node_of(&waits), None);
    let scheduled = super::super::object::pod_condition(&waits, "PodScheduled").unwrap();
    assert_eq!(scheduled.reason.as_deref(), Some("Unschedulable"));
    let scale = json!({"spec": {"replicas": 1}});
    let api: Api<Deployment> = Api::namespaced(cluster.client.clone(), "llm");
    api.patch("big", &PatchParams::default(), &Patch::Merge(scale)).await.unwrap();
    seconds(5).await;
    let placed: Pod = cluster.get("llm", "waits").await;
    assert!(is_ready(&placed) && placed.uid() == waiting.uid());
}

#[tokio::test(start_paused = true)]
async fn a_cordon_is_respected_and_a_soft_taint_avoided() {
    let cluster = Cluster::of(&fleet(3, Vec::new()), Behaviour::default()).await;
    cluster.create::<Pod>("default", gpu_pod("zero", 1)).await;
    cluster.patch_node("gpu-02", json!({"spec": {"unschedulable": true}})).await;
    let soft = json!([{"key": "pitcrew.dev/pending", "effect": "PreferNoSchedule"}]);
    cluster.patch_node("gpu-03", json!({"spec": {"taints": soft}})).await;
    for name in ["a", "b"] {
        cluster.create::<Pod>("default", gpu_pod(name, 4)).await;
    }
    seconds(5).await;
    let node = async |name| node_of(&cluster.get::<Pod>("default", name).await).map(str::to_owned);
    // The second does not fit beside the first two on gpu-01 and takes the unwelcome node, never the cordoned one.
    assert_eq!(node("a").await.as_deref(), Some("gpu-01"));
    assert_eq!(node("b").await.as_deref(), Some("gpu-03"));
}

fn gpu_pod(name: &str, gpus: u32) -> Value {
    let limits = json!({"nvidia.com/gpu": gpus.to_string()});
    json!({"metadata": {"name": name}, "spec": {"containers": [{"name": "main", "image": "x", "resources": {"limits": limits}}]}})
}

#[tokio::test(start_paused = true)]
async fn a_budget_follows_its_pods() {
    let chat = Workload::new("llm", "chat", 3, 1).with_budget(json!({"maxUnavailable": 1}));
    let cluster = Cluster::of(&fleet(3, vec![chat]), Behaviour::default()).await;
    let allowed = async || {
        let budget: PodDisruptionBudget = cluster.get("llm", "chat").await;
        let status = budget.status.unwrap();
        (status.expected_pods, status.current_healthy, status.desired_healthy, status.disruptions_allowed)
    };
    seconds(1).await;
    assert_eq!(allowed().await, (Some(3), Some(3), Some(2), Some(1)));
    let pods = cluster.pods("app=chat").await;
    assert_eq!(cluster.evict(&pods[0]).await, Ok(()));
    assert_eq!(cluster.evict(&pods[1]).await, Err(429));
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(allowed().await, (Some(3), Some(2), Some(2), Some(0)));
    seconds(2).await;
    assert_eq!(allowed().await, (Some(3), Some(3), Some(2), Some(1)));
}

#[tokio::test(start_paused = true)]
async fn a_pod_stops_in_its_own_time_but_not_beyond_its_grace() {
    let mut slow = Workload::new("llm", "slow", 1, 1);
    slow.annotations.push((STOP_SECONDS.into(), "20".into()));
    let mut stubborn = slow.clone();
    (stubborn.name, stubborn.grace_seconds) = ("stubborn".into(), 5);
    let cluster = Cluster::of(&fleet(2, vec![slow, stubborn]), Behaviour::default()).await;
    let (slow, stubborn) =
        (cluster.pods("app=slow").await.remove(0), cluster.pods("app=stubborn").await.remove(0));
    cluster.delete(&slow).await;
    cluster.delete(&stubborn).await;
    let alive = async |pod: &Pod| {
        let api: Api<Pod> = Api::namespaced(cluster.client.clone(), "llm");
        api.get_opt(&pod.name_any()).await.unwrap().is_some()
    };
    seconds(4).await;
    assert_eq!((alive(&slow).await, alive(&stubborn).await), (true, true));
    seconds(2).await;
    assert_eq!((alive(&slow).await, alive(&stubborn).await), (true, false));
    seconds(15).await;
    assert!(!alive(&slow).await);
}

fn job(name: &str, backoff_limit: u32) -> Value {
    let pod = json!({"restartPolicy": "Never", "containers": [{"name": "main", "image": "gate"}]});
    json!({"metadata": {"name": name}, "spec": {"backoffLimit": backoff_limit, "template": {"spec": pod}}})
}

fn condition(job: &Job) -> Option<String> {
    job.status.as_ref()?.conditions.as_ref()?.last().map(|condition| condition.type_.clone())
}

#[tokio::test(start_paused = true)]
async fn a_job_completes_and_a_broken_one_fails_after_its_retries() {
    let mut behaviour = Behaviour::default();
    behaviour.jobs.push(JobRule {
        prefix: "broken".into(),
        nodes: Nodes::All,
        run: Duration::from_secs(2),
        exit_code: 3,
        message: "ECC errors".into(),
    });
    let cluster = Cluster::of(&fleet(2, Vec::new()), behaviour).await;
    cluster.create::<Job>("default", job("smoke", 0)).await;
    cluster.create::<Job>("default", job("broken", 1)).await;
    seconds(5).await;
    let smoke: Job = cluster.get("default", "smoke").await;
    assert_eq!(condition(&smoke).as_deref(), Some("Complete"));
    assert_eq!(smoke.status.unwrap().succeeded, Some(1));
    assert_eq!(condition(&cluster.get("default", "broken").await), None);
    seconds(20).await;
    let broken: Job = cluster.get("default", "broken").await;
    assert_eq!(condition(&broken).as_deref(), Some("Failed"));
    assert_eq!(broken.status.unwrap().failed, Some(2));
    let pod = cluster.pods("job-name=broken").await.remove(0);
    let ended = pod.status.unwrap().container_statuses.unwrap().remove(0).state.unwrap().terminated.unwrap();
    assert_eq!((ended.exit_code, ended.message.as_deref()), (3, Some("ECC errors")));
}

#[tokio::test(start_paused = true)]
async fn a_stateful_set_keeps_names_and_waits_for_the_old_pod_to_go() {
    let cluster = Cluster::of(&fleet(2, Vec::new()), Behaviour::default()).await;
    let template = json!({"metadata": {"labels": {"app": "db"}}, "spec": {"containers": [{"name": "db", "image": "db:1"}]}});
    let spec = json!({"replicas": 2, "serviceName": "db", "selector": {"matchLabels": {"app": "db"}}, "template": template});
    cluster.create::<StatefulSet>("default", json!({"metadata": {"name": "db"}, "spec": spec})).await;
    seconds(5).await;
    let names = async || {
        let mut names: Vec<_> =
            cluster.pods("app=db").await.iter().map(|pod| (pod.name_any(), is_ready(pod))).collect();
        names.sort();
        names
    };
    assert_eq!(names().await, [("db-0".into(), true), ("db-1".into(), true)]);
    let first: Pod = cluster.get("default", "db-0").await;
    cluster.delete(&first).await;
    seconds(5).await;
    assert_eq!(names().await, [("db-0".into(), true), ("db-1".into(), true)]);
    assert_ne!(cluster.get::<Pod>("default", "db-0").await.uid(), first.uid());
}

#[tokio::test(start_paused = true)]
async fn dependents_go_with_their_owner_and_pods_with_their_node() {
    let chat = Workload::new("llm", "chat", 2, 1);
    let cluster = Cluster::of(&fleet(2, vec![chat]), Behaviour::default()).await;
    let api: Api<Deployment> = Api::namespaced(cluster.client.clone(), "llm");
    api.delete("chat", &DeleteParams::default()).await.unwrap();
    seconds(5).await;
    assert!(cluster.pods("app=chat").await.is_empty());
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    nodes.delete("gpu-02", &DeleteParams::default()).await.unwrap();
    seconds(30).await;
    assert_eq!(cluster.drivers().await.len(), 2);
    seconds(30).await;
    assert_eq!(nodes_of(&cluster.drivers().await), ["gpu-01"]);
    assert_eq!(cluster.driver_set().await.status.unwrap().desired_number_scheduled, 1);
}

#[tokio::test(start_paused = true)]
async fn a_new_template_rolls_a_deployment_over() {
    let cluster =
        Cluster::of(&fleet(2, vec![Workload::new("llm", "chat", 2, 1)]), Behaviour::default()).await;
    let before = cluster.pods("app=chat").await;
    let image = json!([{"name": "main", "image": "registry.example/chat:2"}]);
    let api: Api<Deployment> = Api::namespaced(cluster.client.clone(), "llm");
    let patch = json!({"spec": {"template": {"spec": {"containers": image}}}});
    api.patch("chat", &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
    seconds(5).await;
    let after = cluster.pods("app=chat").await;
    assert_eq!(after.len(), 2);
    assert!(after.iter().all(|pod| is_ready(pod) && before.iter().all(|old| old.uid() != pod.uid())));
}
