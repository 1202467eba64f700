//! Stories through the embedded API: what each actor does in a small cluster, on virtual time.

mod clients;
mod dra;
mod fleet;
mod gates;
mod platform;
mod workloads;

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{ControllerRevision, DaemonSet, Deployment};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{DeleteParams, EvictParams, ListParams, Patch, PatchParams, PostParams};
use kube::core::DynamicObject;
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};

use super::object::{is_ready, node_of};
use super::{Actors, Behaviour, NAMESPACE, cluster_policy_kind};
use crate::api::ApiServer;
use crate::fleet::Fleet;

struct Cluster {
    client: Client,
    server: ApiServer,
    actors: Actors,
}

impl Cluster {
    fn new(behaviour: Behaviour) -> Self {
        let epoch = "2026-03-01T08:00:00Z".parse::<Timestamp>().unwrap();
        let server = ApiServer::new(epoch);
        let actors = Actors::embedded(&server, epoch, 7, behaviour);
        Self { client: server.client_as("test"), server, actors }
    }

    /// A cluster with a fleet that has settled.
    async fn of(fleet: &Fleet, behaviour: Behaviour) -> Self {
        let cluster = Self::new(behaviour);
        fleet.install(&cluster.client).await.unwrap();
        let ready = timeout(Duration::from_mins(10), fleet.wait_ready(&cluster.client)).await;
        let pods = cluster.pods("").await;
        assert!(
            ready.is_ok(),
            "the fleet is not ready: {:#?}",
            pods.iter().map(describe).collect::<Vec<_>>()
        );
        cluster
    }

    async fn pods(&self, labels: &str) -> Vec<Pod> {
        let pods: Api<Pod> = Api::all(self.client.clone());
        let mut pods = pods.list(&ListParams::default().labels(labels)).await.unwrap().items;
        pods.sort_by_key(|pod| (node_of(pod).map(str::to_owned), pod.name_any()));
        pods
    }

    /// The driver pods, in the order of their nodes.
    async fn drivers(&self) -> Vec<Pod> {
        self.pods("app.kubernetes.io/component=nvidia-driver").await
    }

    async fn validator(&self, node: &str) -> Pod {
        let pods = self.pods("app=nvidia-operator-validator").await;
        pods.into_iter().find(|pod| node_of(pod) == Some(node)).expect("a validator")
    }

    async fn driver_set(&self) -> DaemonSet {
        Api::namespaced(self.client.clone(), NAMESPACE).get("nvidia-driver-daemonset").await.unwrap()
    }

    async fn revisions(&self) -> Vec<(i64, String)> {
        let api: Api<ControllerRevision> = Api::namespaced(self.client.clone(), NAMESPACE);
        let all = api.list(&ListParams::default().labels("app=nvidia-driver-daemonset")).await.unwrap();
        let mut all: Vec<_> = all
            .items
            .iter()
            .map(|found| (found.revision.unwrap_or(0), super::revision::hash_of(found)))
            .collect();
        all.sort();
        all
    }

    async fn set_version(&self, version: &str) {
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &cluster_policy_kind());
        let patch = json!([{"op": "replace", "path": "/spec/driver/version", "value": version}]);
        let patch: json_patch::Patch = serde_json::from_value(patch).unwrap();
        api.patch("cluster-policy", &PatchParams::default(), &Patch::Json::<()>(patch)).await.unwrap();
    }

    async fn patch_node(&self, name: &str, patch: Value) {
        let nodes: Api<Node> = Api::all(self.client.clone());
        nodes.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
    }

    async fn evict(&self, pod: &Pod) -> Result<(), u16> {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &pod.namespace().unwrap_or_default());
        match api.evict(&pod.name_any(), &EvictParams::default()).await {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(status)) => Err(status.code),
            Err(error) => panic!("{error}"),
        }
    }

    async fn delete(&self, pod: &Pod) {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &pod.namespace().unwrap_or_default());
        api.delete(&pod.name_any(), &DeleteParams::default()).await.unwrap();
    }

    async fn create<K>(&self, namespace: &str, object: Value) -> K
    where
        K: super::write::Kind,
    {
        let object: K = serde_json::from_value(object).unwrap();
        K::api(&self.client, namespace).create(&PostParams::default(), &object).await.unwrap()
    }

    async fn get<K: super::write::Kind>(&self, namespace: &str, name: &str) -> K {
        K::api(&self.client, namespace).get(name).await.unwrap()
    }

    async fn deployment(&self, namespace: &str, name: &str) -> Deployment {
        self.get(namespace, name).await
    }
}

async fn seconds(seconds: u64) {
    sleep(Duration::from_secs(seconds)).await;
}

fn describe(pod: &Pod) -> String {
    let node = node_of(pod).unwrap_or("-");
    let phase = super::object::phase(pod);
    format!(
        "{}/{} on {node}: {phase}, ready {}",
        pod.namespace().unwrap_or_default(),
        pod.name_any(),
        is_ready(pod)
    )
}

fn hash(pod: &Pod) -> String {
    pod.labels().get("controller-revision-hash").cloned().unwrap_or_default()
}

fn nodes_of(pods: &[Pod]) -> Vec<&str> {
    pods.iter().filter_map(node_of).collect()
}
