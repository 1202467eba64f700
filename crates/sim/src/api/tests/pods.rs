//! What only pods have: grace, eviction, binding.

use super::*;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::EvictParams;

#[tokio::test(start_paused = true)]
async fn a_bound_pod_goes_when_its_kubelet_says_so() {
    let client = server().client();
    add_pod(&client, "p", Some("n")).await;
    let pods = here::<Pod>(&client);
    pods.delete("p", &DeleteParams::default()).await.unwrap();
    let pod = pods.get("p").await.unwrap();
    assert_eq!(pod.metadata.deletion_timestamp.unwrap().0.to_string(), "2026-01-01T00:00:30Z");
    assert_eq!(pod.metadata.deletion_grace_period_seconds, Some(30));
    pods.delete("p", &DeleteParams::default().grace_period(0)).await.unwrap();
    assert!(pods.get_opt("p").await.unwrap().is_none());
}

#[tokio::test(start_paused = true)]
async fn a_second_delete_can_only_shorten_the_grace() {
    let client = server().client();
    add_pod(&client, "p", Some("n")).await;
    let pods = here::<Pod>(&client);
    for (asked, left) in [(20, 20), (60, 20), (5, 5)] {
        pods.delete("p", &DeleteParams::default().grace_period(asked)).await.unwrap();
        assert_eq!(pods.get("p").await.unwrap().metadata.deletion_grace_period_seconds, Some(left));
    }
    let due = pods.get("p").await.unwrap().metadata.deletion_timestamp.unwrap();
    assert_eq!(due.0.to_string(), "2026-01-01T00:00:05Z");
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_nobody_runs_is_deleted_at_once() {
    let client = server().client();
    let pods = here::<Pod>(&client);
    add_pod(&client, "unbound", None).await;
    add_pod(&client, "finished", Some("n")).await;
    merge_status(&pods, "finished", json!({"status": {"phase": "Succeeded"}})).await;
    for name in ["unbound", "finished"] {
        pods.delete(name, &DeleteParams::default()).await.unwrap();
        assert!(pods.get_opt(name).await.unwrap().is_none(), "{name}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_pod_is_bound_once() {
    let client = server().client();
    add_pod(&client, "p", None).await;
    let bind = async |node: &str| {
        let binding =
            json!({"metadata": {"name": "p"}, "target": {"apiVersion": "v1", "kind": "Node", "name": node}});
        here::<Pod>(&client)
            .create_subresource::<_, Status>("binding", "p", &PostParams::default(), &binding)
            .await
    };
    bind("n").await.unwrap();
    let pod = here::<Pod>(&client).get("p").await.unwrap();
    assert_eq!(pod.spec.unwrap().node_name.as_deref(), Some("n"));
    let condition = pod.status.unwrap().conditions.unwrap().remove(0);
    assert_eq!((condition.type_.as_str(), condition.status.as_str()), ("PodScheduled", "True"));
    assert_eq!(why(bind("m").await), (409, "Conflict".into()));
}

/// A running pod, and a budget over it.
async fn guarded(client: &Client, ready: bool, status: Value) -> (Api<Pod>, Api<PodDisruptionBudget>) {
    let (pods, budgets) = (here::<Pod>(client), here::<PodDisruptionBudget>(client));
    add_pod(client, "p", Some("n")).await;
    let ready = if ready { "True" } else { "False" };
    merge_status(
        &pods,
        "p",
        json!({"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": ready}]}}),
    )
    .await;
    add_budget(&budgets, "b", status).await;
    (pods, budgets)
}

async fn add_budget(budgets: &Api<PodDisruptionBudget>, name: &str, status: Value) {
    create(
        budgets,
        json!({"metadata": {"name": name}, "spec": {"selector": {"matchLabels": {"app": "web"}}}}),
    )
    .await;
    merge_status(budgets, name, json!({"status": status})).await;
}

fn budget(allowed: i32, healthy: i32, desired: i32) -> Value {
    json!({"observedGeneration": 1, "disruptionsAllowed": allowed, "currentHealthy": healthy, "desiredHealthy": desired,
        "expectedPods": healthy})
}

#[tokio::test(start_paused = true)]
async fn an_exhausted_budget_refuses_the_eviction() {
    let client = server().client();
    let (pods, _) = guarded(&client, true, budget(0, 1, 1)).await;
    let status = refusal(pods.evict("p", &EvictParams::default()).await);
    assert_eq!((status.code, &*status.reason), (429, "TooManyRequests"));
    assert_eq!(status.message, "Cannot evict pod as it would violate the pod's disruption budget.");
    let cause = &status.details.unwrap().causes[0];
    assert_eq!(cause.reason, "DisruptionBudget");
    assert_eq!(cause.message, "The disruption budget b needs 1 healthy pods and has 1 currently");
}

#[tokio::test(start_paused = true)]
async fn an_eviction_takes_one_disruption_and_deletes_with_grace() {
    let client = server().client();
    let (pods, budgets) = guarded(&client, true, budget(1, 2, 1)).await;
    pods.evict("p", &EvictParams::default()).await.unwrap();
    assert!(pods.get("p").await.unwrap().metadata.deletion_timestamp.is_some());
    let status = budgets.get("b").await.unwrap().status.unwrap();
    assert_eq!(status.disruptions_allowed, Some(0));
    assert!(status.disrupted_pods.unwrap().contains_key("p"));
    assert!(pods.evict("p", &EvictParams::default()).await.is_ok(), "a pod on its way needs no budget");
}

#[tokio::test(start_paused = true)]
async fn a_budget_that_the_controller_has_not_seen_refuses() {
    let client = server().client();
    let (pods, _) = guarded(
        &client,
        true,
        json!({"disruptionsAllowed": 1, "currentHealthy": 1, "desiredHealthy": 0, "expectedPods": 1}),
    )
    .await;
    let status = refusal(pods.evict("p", &EvictParams::default()).await);
    let details = status.details.unwrap();
    assert_eq!((status.code, details.retry_after_seconds), (429, 10));
}

#[tokio::test(start_paused = true)]
async fn two_budgets_over_one_pod_are_an_error() {
    let client = server().client();
    let (pods, budgets) = guarded(&client, true, budget(1, 2, 1)).await;
    add_budget(&budgets, "c", budget(1, 2, 1)).await;
    assert_eq!(why(pods.evict("p", &EvictParams::default()).await), (500, String::new()));
}

#[tokio::test(start_paused = true)]
async fn an_unhealthy_pod_may_go_when_the_budget_is_met_without_it() {
    let client = server().client();
    let (pods, budgets) = guarded(&client, false, budget(0, 1, 1)).await;
    pods.evict("p", &EvictParams::default()).await.unwrap();
    assert_eq!(budgets.get("b").await.unwrap().status.unwrap().disrupted_pods, None);

    let client = server().client();
    let (pods, budgets) = guarded(&client, false, budget(0, 0, 1)).await;
    assert_eq!(refusal(pods.evict("p", &EvictParams::default()).await).code, 429);
    merge(&budgets, "b", json!({"spec": {"unhealthyPodEvictionPolicy": "AlwaysAllow"}})).await.unwrap();
    pods.evict("p", &EvictParams::default()).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_pending_pod_needs_no_budget() {
    let client = server().client();
    let (pods, _) = guarded(&client, true, budget(0, 1, 1)).await;
    add_pod(&client, "waiting", None).await;
    pods.evict("waiting", &EvictParams::default()).await.unwrap();
    assert!(pods.get_opt("waiting").await.unwrap().is_none());
}

#[tokio::test(start_paused = true)]
async fn an_eviction_by_the_wrong_uid_is_refused_after_the_budget_was_asked() {
    let client = server().client();
    let (pods, budgets) = guarded(&client, true, budget(1, 2, 1)).await;
    let eviction = json!({"metadata": {"name": "p"}, "deleteOptions": {"preconditions": {"uid": "other"}}});
    let result =
        pods.create_subresource::<_, Status>("eviction", "p", &PostParams::default(), &eviction).await;
    assert_eq!(why(result), (409, "Conflict".into()));
    // As in a real server: its disruption controller gives it back in time.
    assert_eq!(budgets.get("b").await.unwrap().status.unwrap().disruptions_allowed, Some(0));
}

/// kube 5.0 sends `delete_options`, which no API server reads: an eviction by UID needs its own body.
#[tokio::test(start_paused = true)]
async fn kubes_evict_loses_its_preconditions() {
    let client = server().client();
    let (pods, _) = guarded(&client, true, budget(1, 2, 1)).await;
    let by_uid =
        EvictParams { delete_options: Some(delete_if(Some("other"), None)), ..EvictParams::default() };
    assert!(pods.evict("p", &by_uid).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_field_of_a_node_is_asked_for_one_value_only() {
    let client = server().client();
    let spec = |terms: &[&[&str]]| {
        let term = |names: &&[&str]| json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": names}]});
        let required = json!({"nodeSelectorTerms": terms.iter().map(term).collect::<Vec<_>>()});
        let affinity = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}});
        json!({"containers": [{"name": "c", "image": "i"}], "restartPolicy": "Never", "affinity": affinity})
    };
    let job = |spec: &Value| json!({"metadata": {"name": "j"}, "spec": {"template": {"spec": spec}}});
    let jobs = here::<Job>(&client);
    let two = jobs.create(&PostParams::default(), &from(job(&spec(&[&["a"], &["b", "c"]])))).await;
    assert_eq!(
        refusal(two).message,
        "Job.batch \"j\" is invalid: spec.template.spec.affinity.nodeAffinity.\
         requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[1].matchFields[0].values: Required value: \
         must be only one value when `operator` is 'In' or 'NotIn' for node field selector"
    );
    create(&jobs, job(&spec(&[&["a"], &["b"]]))).await;
}
