//! Custom resources: registration and schemas.

use super::*;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};

fn definition() -> Value {
    let spec = json!({"type": "object", "required": ["driver"], "properties": {
        "driver": {"type": "object", "required": ["name"], "properties": {
            "name": {"type": "string", "minLength": 1, "pattern": "^[a-z]+$"},
            "domain": {"type": "string", "default": "nvidia.com"}}},
        "mode": {"type": "string", "enum": ["Auto", "Guest"], "default": "Auto"},
        "maxParallel": {"type": "integer", "minimum": 0.0, "maximum": 10, "default": 1},
        "maxUnavailable": {"x-kubernetes-int-or-string": true},
        "limits": {"type": "object", "default": {}, "properties": {"ready": {"type": "string", "default": "30m"}}},
        "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": true},
        "selector": {"type": "object", "additionalProperties": {"type": "string"}},
        "stages": {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"],
            "items": {"type": "object", "properties": {"name": {"type": "string"}, "count": {"type": "integer", "default": 1}}}}}});
    let status = json!({"type": "object", "properties": {"phase": {"type": "string"}}});
    let schema =
        json!({"type": "object", "required": ["spec"], "properties": {"spec": spec, "status": status}});
    let version = |name: &str, storage: bool| {
        json!({"name": name, "served": true, "storage": storage,
        "schema": {"openAPIV3Schema": schema}, "subresources": {"status": {}}})
    };
    json!({"metadata": {"name": "policies.pitcrew.dev"}, "spec": {"group": "pitcrew.dev", "scope": "Cluster",
        "names": {"plural": "policies", "singular": "policy", "kind": "Policy", "shortNames": ["pol"]},
        "versions": [version("v1alpha1", true), version("v1", false)]}})
}

fn policies(client: &Client, version: &str) -> Api<DynamicObject> {
    let gvk = GroupVersionKind::gvk("pitcrew.dev", version, "Policy");
    Api::all_with(client.clone(), &ApiResource::from_gvk_with_plural(&gvk, "policies"))
}

async fn installed(client: &Client) -> Api<DynamicObject> {
    create::<CustomResourceDefinition>(&all(client), definition()).await;
    policies(client, "v1alpha1")
}

async fn try_create(policies: &Api<DynamicObject>, spec: Value) -> kube::Result<DynamicObject> {
    let policy = json!({"apiVersion": "pitcrew.dev/v1alpha1", "kind": "Policy", "metadata": {"name": "gpu"}, "spec": spec});
    policies.create(&PostParams::default(), &from(policy)).await
}

#[tokio::test(start_paused = true)]
async fn a_definition_makes_a_resource_and_its_removal_ends_it() {
    let client = server().client();
    let not_yet = policies(&client, "v1alpha1");
    assert_eq!(refusal(not_yet.list(&ListParams::default()).await).message, "404 page not found");
    let policies = installed(&client).await;
    let crd = all::<CustomResourceDefinition>(&client).get("policies.pitcrew.dev").await.unwrap();
    let conditions = crd.status.unwrap().conditions.unwrap();
    assert!(conditions.iter().all(|condition| condition.status == "True") && conditions.len() == 2);
    try_create(&policies, json!({"driver": {"name": "gpu"}})).await.unwrap();
    all::<CustomResourceDefinition>(&client)
        .delete("policies.pitcrew.dev", &DeleteParams::default())
        .await
        .unwrap();
    assert_eq!(refusal(policies.get("gpu").await).code, 404);
}

#[tokio::test(start_paused = true)]
async fn unknown_fields_are_dropped_and_defaults_filled_in() {
    let client = server().client();
    let spec = json!({"driver": {"name": "gpu", "nonsense": 1}, "free": {"any": {"thing": 1}}, "stages": [{"name": "canary"}],
        "selector": {"a/b": "c"}, "nonsense": true});
    let policy = try_create(&installed(&client).await, spec).await.unwrap();
    assert_eq!(
        policy.data["spec"],
        json!({
        "driver": {"name": "gpu", "domain": "nvidia.com"}, "mode": "Auto", "maxParallel": 1, "limits": {"ready": "30m"},
        "free": {"any": {"thing": 1}}, "stages": [{"name": "canary", "count": 1}], "selector": {"a/b": "c"}})
    );
}

#[tokio::test(start_paused = true)]
async fn wrong_values_are_refused_with_a_sentence() {
    let client = server().client();
    let policies = installed(&client).await;
    let ok = json!({"name": "gpu"});
    let cases = [
        (json!({}), "spec.driver: Required value"),
        (json!({"driver": {}}), "spec.driver.name: Required value"),
        (
            json!({"driver": {"name": "GPU"}}),
            "spec.driver.name: Invalid value: \"GPU\": spec.driver.name in body should match '^[a-z]+$'",
        ),
        (
            json!({"driver": ok, "mode": "Boss"}),
            "spec.mode: Unsupported value: \"Boss\": supported values: \"Auto\", \"Guest\"",
        ),
        (
            json!({"driver": ok, "maxParallel": -1}),
            "spec.maxParallel: Invalid value: -1: spec.maxParallel in body should be greater than or equal to 0",
        ),
        (
            json!({"driver": ok, "maxParallel": 11}),
            "spec.maxParallel: Invalid value: 11: spec.maxParallel in body should be less than or equal to 10",
        ),
        (
            json!({"driver": ok, "maxParallel": "1"}),
            "spec.maxParallel: Invalid value: \"string\": spec.maxParallel in body must be of type integer: \"string\"",
        ),
        (
            json!({"driver": ok, "maxUnavailable": true}),
            "spec.maxUnavailable: Invalid value: \"boolean\": spec.maxUnavailable in body must be of type integer,string: \"boolean\"",
        ),
    ];
    for (spec, sentence) in cases {
        let status = refusal(try_create(&policies, spec).await);
        assert_eq!((status.code, &*status.reason), (422, "Invalid"));
        assert_eq!(status.message, format!("Policy.pitcrew.dev \"gpu\" is invalid: {sentence}"));
    }
    let status = refusal(try_create(&policies, json!({"driver": {}, "mode": "Boss"})).await);
    assert_eq!(status.details.unwrap().causes.len(), 2);
    for fine in [json!("25%"), json!(3)] {
        try_create(&policies, json!({"driver": ok, "maxUnavailable": fine})).await.unwrap();
        policies.delete("gpu", &DeleteParams::default()).await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn strict_validation_names_the_unknown_field() {
    let client = server().client();
    let policies = installed(&client).await;
    try_create(&policies, json!({"driver": {"name": "gpu"}})).await.unwrap();
    let strict = PatchParams {
        field_validation: Some(kube::api::ValidationDirective::Strict),
        ..PatchParams::default()
    };
    let status =
        refusal(policies.patch("gpu", &strict, &Patch::Merge(json!({"spec": {"driver": {"x": 1}}}))).await);
    assert_eq!(status.code, 400);
    assert!(
        status.message.ends_with("strict decoding error: unknown field \"spec.driver.x\""),
        "{}",
        status.message
    );
}

#[tokio::test(start_paused = true)]
async fn every_served_version_shows_the_same_object() {
    let client = server().client();
    try_create(&installed(&client).await, json!({"driver": {"name": "gpu"}})).await.unwrap();
    let policy = policies(&client, "v1").get("gpu").await.unwrap();
    assert_eq!(policy.types.unwrap().api_version, "pitcrew.dev/v1");
    assert_eq!(refusal(policies(&client, "v2").get("gpu").await).code, 404);
}

#[tokio::test(start_paused = true)]
async fn a_custom_status_has_its_own_door_and_no_generation() {
    let client = server().client();
    let policies = installed(&client).await;
    try_create(&policies, json!({"driver": {"name": "gpu"}})).await.unwrap();
    let policy = merge_status(
        &policies,
        "gpu",
        json!({"status": {"phase": "x", "junk": 1}, "spec": {"mode": "Guest"}}),
    )
    .await;
    assert_eq!(
        (policy.data["status"].clone(), policy.data["spec"]["mode"].clone()),
        (json!({"phase": "x"}), json!("Auto"))
    );
    assert_eq!(policy.metadata.generation, Some(1));
    let policy = merge(&policies, "gpu", json!({"spec": {"mode": "Guest"}, "status": null})).await.unwrap();
    assert_eq!((policy.metadata.generation, policy.data["status"]["phase"].as_str()), (Some(2), Some("x")));
}

#[tokio::test(start_paused = true)]
async fn custom_resources_have_no_strategic_patch_and_no_blind_replace() {
    let client = server().client();
    let policies = installed(&client).await;
    let mut policy = try_create(&policies, json!({"driver": {"name": "gpu"}})).await.unwrap();
    let patch = Patch::Strategic(json!({"spec": {"mode": "Guest"}}));
    assert_eq!(refusal(policies.patch("gpu", &PatchParams::default(), &patch).await).code, 415);
    policy.metadata.resource_version = None;
    let status = refusal(policies.replace("gpu", &PostParams::default(), &policy).await);
    assert!(
        status
            .message
            .contains("metadata.resourceVersion: Invalid value: 0: must be specified for an update")
    );
}

#[tokio::test(start_paused = true)]
async fn apply_merges_custom_lists_by_their_schema() {
    let client = server().client();
    let policies = installed(&client).await;
    let config = |stage: &str| {
        Patch::Apply(
            json!({"apiVersion": "pitcrew.dev/v1alpha1", "kind": "Policy", "metadata": {"name": "gpu"},
        "spec": {"driver": {"name": "gpu"}, "stages": [{"name": stage}]}}),
        )
    };
    policies.patch("gpu", &PatchParams::apply("one"), &config("canary")).await.unwrap();
    let policy = policies.patch("gpu", &PatchParams::apply("two"), &config("rest")).await.unwrap();
    assert_eq!(
        policy.data["spec"]["stages"],
        json!([{"name": "canary", "count": 1}, {"name": "rest", "count": 1}])
    );
}
