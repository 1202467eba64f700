//! The API's rules, each by a short story through a real client.

mod apply;
mod custom;
mod deletion;
mod lists;
mod objects;
mod patches;
mod pods;
mod server;
mod slices;
mod watches;

use super::{ApiServer, Fault};
use k8s_openapi::api::apps::v1::{DaemonSet, ReplicaSet};
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions};
use kube::core::{NamespaceResourceScope, Status};
use kube::{Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::fmt::Debug;
use std::time::Duration;
use tokio::time::sleep;

/// An empty cluster at New Year.
fn server() -> ApiServer {
    ApiServer::new("2026-01-01T00:00:00Z".parse().unwrap())
}

fn from<K: DeserializeOwned>(value: Value) -> K {
    serde_json::from_value(value).unwrap()
}

fn all<K: Resource<DynamicType = ()>>(client: &Client) -> Api<K> {
    Api::all(client.clone())
}

fn here<K: Resource<DynamicType = (), Scope = NamespaceResourceScope>>(client: &Client) -> Api<K> {
    Api::default_namespaced(client.clone())
}

async fn create<K>(api: &Api<K>, value: Value) -> K
where
    K: Clone + Debug + serde::Serialize + DeserializeOwned,
{
    api.create(&PostParams::default(), &from(value)).await.unwrap()
}

async fn merge<K>(api: &Api<K>, name: &str, patch: Value) -> kube::Result<K>
where
    K: Clone + Debug + DeserializeOwned,
{
    api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await
}

async fn merge_status<K>(api: &Api<K>, name: &str, patch: Value) -> K
where
    K: Clone + Debug + DeserializeOwned,
{
    api.patch_status(name, &PatchParams::default(), &Patch::Merge(patch)).await.unwrap()
}

async fn add_node(client: &Client, name: &str) -> Node {
    create(&all(client), json!({"metadata": {"name": name, "labels": {"gpu": "h100"}}, "spec": {}})).await
}

async fn add_pod(client: &Client, name: &str, node: Option<&str>) -> Pod {
    let mut spec = json!({"containers": [{"name": "c", "image": "i"}]});
    if let Some(node) = node {
        spec["nodeName"] = node.into();
    }
    create(&here(client), json!({"metadata": {"name": name, "labels": {"app": "web"}}, "spec": spec})).await
}

/// A delete of exactly this object, at this version.
fn delete_if(uid: Option<&str>, version: Option<&str>) -> DeleteParams {
    let resource_version = version.map(str::to_owned);
    DeleteParams::default().preconditions(Preconditions { uid: uid.map(str::to_owned), resource_version })
}

/// The status that a request was refused with.
fn refusal<T: Debug>(result: kube::Result<T>) -> Status {
    match result.unwrap_err() {
        kube::Error::Api(status) => *status,
        other => panic!("{other}"),
    }
}

/// Code and reason.
fn why<T: Debug>(result: kube::Result<T>) -> (u16, String) {
    let status = refusal(result);
    (status.code, status.reason)
}
