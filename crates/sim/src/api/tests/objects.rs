//! Create and update.

use super::*;

#[tokio::test(start_paused = true)]
async fn a_new_object_gets_what_only_the_server_sets() {
    let client = server().client();
    sleep(Duration::from_millis(1500)).await;
    let set = create::<ReplicaSet>(
        &here(&client),
        json!({"metadata": {"name": "a", "uid": "mine", "generation": 7},
        "spec": {"selector": {}}}),
    )
    .await;
    assert_eq!(set.metadata.creation_timestamp.unwrap().0.to_string(), "2026-01-01T00:00:01Z");
    assert_eq!(set.metadata.uid.unwrap().len(), 36);
    assert_eq!((set.metadata.generation, set.metadata.namespace.as_deref()), (Some(1), Some("default")));
    assert_eq!(set.metadata.resource_version.as_deref(), Some("2"));
}

#[tokio::test(start_paused = true)]
async fn a_name_can_be_taken_once() {
    let client = server().client();
    add_node(&client, "a").await;
    let again = from(json!({"metadata": {"name": "a"}}));
    let status = refusal(all::<Node>(&client).create(&PostParams::default(), &again).await);
    assert_eq!(
        (status.code, &*status.reason, &*status.message),
        (409, "AlreadyExists", "nodes \"a\" already exists")
    );
}

#[tokio::test(start_paused = true)]
async fn generated_names_and_uids_are_the_same_in_every_run() {
    let mut runs = Vec::new();
    for _ in 0..2 {
        let maps = here::<ConfigMap>(&server().client());
        let mut run = Vec::new();
        for _ in 0..3 {
            let map = create(&maps, json!({"metadata": {"generateName": "map-"}})).await;
            run.push((map.name_any(), map.metadata.uid));
        }
        runs.push(run);
    }
    assert_eq!(runs[0], runs[1]);
    assert!(runs[0][0].0.starts_with("map-") && runs[0][0].0.len() == 9);
    assert_ne!(runs[0][0], runs[0][1]);
}

#[tokio::test(start_paused = true)]
async fn an_object_without_a_name_is_refused() {
    let client = server().client();
    let status = refusal(here::<ConfigMap>(&client).create(&PostParams::default(), &from(json!({}))).await);
    assert_eq!(status.code, 422);
    assert_eq!(
        status.message,
        "ConfigMap \"\" is invalid: metadata.name: Required value: name or generateName is required"
    );
}

#[tokio::test(start_paused = true)]
async fn a_body_that_contradicts_its_path_is_refused() {
    let client = server().client();
    let elsewhere = from(json!({"metadata": {"name": "a", "namespace": "other"}}));
    assert_eq!(
        refusal(here::<ConfigMap>(&client).create(&PostParams::default(), &elsewhere).await).code,
        400
    );
}

#[tokio::test(start_paused = true)]
async fn a_write_that_changes_nothing_keeps_the_version() {
    let client = server().client();
    add_node(&client, "a").await;
    let nodes = all::<Node>(&client);
    let first = merge(&nodes, "a", json!({"spec": {"unschedulable": true}})).await.unwrap();
    let second = merge(&nodes, "a", json!({"spec": {"unschedulable": true}})).await.unwrap();
    assert_eq!(first.resource_version(), second.resource_version());
}

#[tokio::test(start_paused = true)]
async fn a_stale_replace_is_a_conflict() {
    let client = server().client();
    let mut stale = add_node(&client, "a").await;
    let nodes = all::<Node>(&client);
    merge(&nodes, "a", json!({"metadata": {"labels": {"z": "1"}}})).await.unwrap();
    stale.labels_mut().insert("w".into(), "1".into());
    let status = refusal(nodes.replace("a", &PostParams::default(), &stale).await);
    assert_eq!((status.code, &*status.reason), (409, "Conflict"));
    assert_eq!(
        status.message,
        "Operation cannot be fulfilled on nodes \"a\": the object has been modified; please apply your changes to the latest version and try again"
    );
    stale.metadata.resource_version = None;
    assert!(
        nodes.replace("a", &PostParams::default(), &stale).await.is_ok(),
        "nodes may be replaced unconditionally"
    );
}

#[tokio::test(start_paused = true)]
async fn a_patch_with_a_stale_version_is_a_conflict() {
    let client = server().client();
    let seen = add_node(&client, "a").await.resource_version().unwrap();
    let nodes = all::<Node>(&client);
    let cordon = json!({"metadata": {"resourceVersion": seen}, "spec": {"unschedulable": true}});
    assert!(merge(&nodes, "a", cordon.clone()).await.is_ok());
    assert_eq!(why(merge(&nodes, "a", cordon).await), (409, "Conflict".into()));
}

#[tokio::test(start_paused = true)]
async fn status_and_the_rest_have_separate_doors() {
    let client = server().client();
    add_node(&client, "a").await;
    let nodes = all::<Node>(&client);
    let both = json!({"status": {"phase": "x"}, "spec": {"unschedulable": true}});
    let node = merge(&nodes, "a", both.clone()).await.unwrap();
    assert_eq!((node.spec.unwrap().unschedulable, node.status.unwrap().phase), (Some(true), None));
    let both = json!({"status": {"phase": "x"}, "spec": {"unschedulable": false}, "metadata": {"labels": {"new": "1"}}});
    let node = merge_status(&nodes, "a", both).await;
    assert_eq!(node.spec.unwrap().unschedulable, Some(true));
    assert_eq!(node.status.unwrap().phase.as_deref(), Some("x"));
    assert!(node.metadata.labels.unwrap().contains_key("new"), "the metadata of built-in kinds has no door");
}

#[tokio::test(start_paused = true)]
async fn generation_counts_what_is_wanted_and_not_what_is() {
    let client = server().client();
    let sets = here::<DaemonSet>(&client);
    create(&sets, json!({"metadata": {"name": "d"}, "spec": {"selector": {}, "template": {}}})).await;
    let labelled = merge(&sets, "d", json!({"metadata": {"labels": {"a": "1"}}})).await.unwrap();
    assert_eq!(labelled.metadata.generation, Some(1));
    let reported = merge_status(&sets, "d", json!({"status": {"observedGeneration": 1}})).await;
    assert_eq!(reported.metadata.generation, Some(1));
    let changed = merge(&sets, "d", json!({"spec": {"minReadySeconds": 5}})).await.unwrap();
    assert_eq!(changed.metadata.generation, Some(2));
    assert_eq!(add_node(&client, "a").await.metadata.generation, None, "nodes have no generation");
}

#[tokio::test(start_paused = true)]
async fn server_fields_cannot_be_patched() {
    let client = server().client();
    let before = add_node(&client, "a").await;
    let patch = json!({"metadata": {"generation": 9, "creationTimestamp": null, "labels": {"a": "1"}}});
    let after = merge(&all::<Node>(&client), "a", patch).await.unwrap();
    assert_eq!(after.metadata.creation_timestamp, before.metadata.creation_timestamp);
    assert_eq!(after.metadata.generation, before.metadata.generation);
    let other = merge(&all::<Node>(&client), "a", json!({"metadata": {"uid": "other"}})).await;
    assert_eq!(why(other), (422, "Invalid".into()));
}

#[tokio::test(start_paused = true)]
async fn built_in_kinds_get_the_defaults_that_clients_rely_on() {
    let client = server().client();
    let pod = add_pod(&client, "p", None).await;
    let spec = pod.spec.unwrap();
    assert_eq!(
        (spec.termination_grace_period_seconds, spec.restart_policy.as_deref()),
        (Some(30), Some("Always"))
    );
    assert_eq!(pod.status.unwrap().phase.as_deref(), Some("Pending"));
    let set = create(
        &here::<DaemonSet>(&client),
        json!({"metadata": {"name": "d"}, "spec": {"selector": {}, "template": {}}}),
    )
    .await;
    assert_eq!(serde_json::to_value(&set).unwrap()["spec"]["updateStrategy"]["type"], "RollingUpdate");
    let set =
        create(&here::<ReplicaSet>(&client), json!({"metadata": {"name": "r"}, "spec": {"selector": {}}}))
            .await;
    assert_eq!(serde_json::to_value(&set).unwrap()["spec"]["replicas"], 1);
    let space = json!({"metadata": {"name": "n"}});
    let space = create(&all::<k8s_openapi::api::core::v1::Namespace>(&client), space).await;
    assert_eq!(space.status.unwrap().phase.as_deref(), Some("Active"));
}

#[tokio::test(start_paused = true)]
async fn a_status_sent_on_create_is_dropped_except_a_nodes() {
    let client = server().client();
    let set = json!({"metadata": {"name": "r"}, "spec": {"selector": {}}, "status": {"replicas": 3}});
    let status = create::<ReplicaSet>(&here(&client), set).await.status;
    assert_eq!(status.map(|status| status.replicas), Some(0));
    let node = json!({"metadata": {"name": "n"}, "status": {"phase": "x"}});
    assert!(create::<Node>(&all(&client), node).await.status.is_some());
}

#[tokio::test(start_paused = true)]
async fn a_dry_run_answers_and_stores_nothing() {
    let client = server().client();
    let nodes = all::<Node>(&client);
    let dry = PostParams { dry_run: true, ..Default::default() };
    let node = nodes.create(&dry, &from(json!({"metadata": {"name": "a"}}))).await.unwrap();
    assert!(node.metadata.uid.is_some());
    assert!(nodes.get_opt("a").await.unwrap().is_none());
}
