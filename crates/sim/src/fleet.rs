//! What is in the cluster to begin with: GPU nodes, the operator's CRDs and policy, and people's workloads.
//!
//! A `Fleet` is a plain description with good defaults; `install` creates it through any `kube::Client` (twice does
//! no harm), `wait_ready` waits until everything in it runs.

mod workload;

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::Arc;

use futures::stream::{self, StreamExt, TryStreamExt};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Node, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::PostParams;
use kube::core::DynamicObject;
use kube::runtime::wait::{await_condition, conditions};
use kube::{Api, Client, Resource, ResourceExt};
use pitcrew_core::contract::nvsentinel;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use crate::actors::{
    DEPLOY_DRIVER, DEPLOY_VALIDATOR, DRIVER_COMPONENT, GPU_PRESENT, Informer, NAMESPACE, VALIDATOR_APP,
    changed, cluster_policy_kind, crds, is_ready, nvidia_driver_kind,
};

use workload::{budget, deployment, usual_workloads};

pub use workload::Workload;

/// Enough to install a thousand nodes in a moment, few enough for a small API server.
const CREATES_IN_FLIGHT_MAX: usize = 32;

/// Why a fleet could not be installed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The API refused an object.
    #[error("create {kind} {name}")]
    Create {
        /// The object's kind.
        kind: &'static str,
        /// The object's name.
        name: String,
        /// What the API said.
        source: kube::Error,
    },
    /// The description does not make a valid object.
    #[error("describe {kind}")]
    Describe {
        /// The object's kind.
        kind: &'static str,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// A CRD was accepted but is not served.
    #[error("wait until {name} is served")]
    Serve {
        /// The CRD.
        name: String,
        /// What went wrong.
        source: kube::runtime::wait::Error,
    },
}

/// A simulated GPU cluster, described.
#[derive(Clone, Debug, PartialEq)]
pub struct Fleet {
    /// How many nodes; they are called `gpu-01`, `gpu-02`, …
    pub nodes: usize,
    /// Devices per node.
    pub gpus_per_node: u32,
    /// The driver that runs to begin with.
    pub driver_version: String,
    /// `spec.driver.upgradePolicy` of the ClusterPolicy.
    pub upgrade_policy: Value,
    /// Whether the operator's validators run.
    pub validators: bool,
    /// More of the ClusterPolicy's `spec.driver`.
    pub driver: Value,
    /// NVIDIADrivers by name; then the ClusterPolicy leaves the drivers to them.
    pub nvidia_drivers: Vec<(String, Value)>,
    /// Whether NVSentinel looks after the nodes too.
    pub nvsentinel: bool,
    /// What people run.
    pub workloads: Vec<Workload>,
    /// More labels for single nodes: name, key, value.
    pub labels: Vec<(String, String, String)>,
}

impl Fleet {
    /// `nodes` nodes with eight GPUs, validators, and about three pods on every two nodes.
    pub fn new(nodes: usize) -> Self {
        Self {
            nodes,
            gpus_per_node: 8,
            driver_version: "535.104.05".into(),
            upgrade_policy: json!({
                "autoUpgrade": true, "maxParallelUpgrades": 1, "maxUnavailable": "25%",
                "podDeletion": {"force": false, "timeoutSeconds": 300, "deleteEmptyDir": false},
                "waitForCompletion": {"timeoutSeconds": 0},
                "drain": {"enable": false, "force": false, "timeoutSeconds": 300, "deleteEmptyDir": false},
            }),
            validators: true,
            driver: json!({}),
            nvidia_drivers: Vec::new(),
            nvsentinel: false,
            workloads: usual_workloads(nodes),
            labels: Vec::new(),
        }
    }

    /// Other workloads, or none.
    #[must_use]
    pub fn with_workloads(mut self, workloads: Vec<Workload>) -> Self {
        self.workloads = workloads;
        self
    }

    /// Another driver to begin with.
    #[must_use]
    pub fn with_driver(mut self, version: &str) -> Self {
        version.clone_into(&mut self.driver_version);
        self
    }

    /// Another upgrade policy.
    #[must_use]
    pub fn with_upgrade_policy(mut self, policy: Value) -> Self {
        self.upgrade_policy = policy;
        self
    }

    /// More of the ClusterPolicy's `spec.driver`.
    #[must_use]
    pub fn with_driver_options(mut self, options: Value) -> Self {
        self.driver = options;
        self
    }

    /// One more NVIDIADriver.
    #[must_use]
    pub fn with_nvidia_driver(mut self, name: &str, spec: Value) -> Self {
        self.nvidia_drivers.push((name.to_owned(), spec));
        self
    }

    /// With NVSentinel.
    #[must_use]
    pub fn with_nvsentinel(mut self) -> Self {
        self.nvsentinel = true;
        self
    }

    /// No validators.
    #[must_use]
    pub fn without_validators(mut self) -> Self {
        self.validators = false;
        self
    }

    /// The same grace period for every workload.
    #[must_use]
    pub fn with_grace_seconds(mut self, seconds: u32) -> Self {
        self.workloads.iter_mut().for_each(|workload| workload.grace_seconds = seconds);
        self
    }

    /// One more label on one node.
    #[must_use]
    pub fn with_label(mut self, node: &str, key: &str, value: &str) -> Self {
        self.labels.push((node.to_owned(), key.to_owned(), value.to_owned()));
        self
    }

    /// The nodes' names, in order.
    pub fn node_names(&self) -> impl Iterator<Item = String> + use<> {
        let width = self.nodes.to_string().len().max(2);
        (1..=self.nodes).map(move |number| format!("gpu-{number:0width$}"))
    }

    /// Creates everything; what is there already stays as it is.
    pub async fn install(&self, client: &Client) -> Result<(), Error> {
        let crds: Api<CustomResourceDefinition> = Api::all(client.clone());
        create_all(&crds, crds::all()).await?;
        for definition in crds::all() {
            let name = definition.name_any();
            let served = await_condition(crds.clone(), &name, conditions::is_crd_established());
            served.await.map_err(|source| Error::Serve { name: name.clone(), source })?;
        }
        let namespaces: BTreeSet<&str> =
            self.workloads.iter().map(|workload| workload.namespace.as_str()).collect();
        let sentinel = self.nvsentinel.then_some(nvsentinel::NAMESPACE);
        let namespaces = namespaces
            .into_iter()
            .chain([NAMESPACE])
            .chain(sentinel)
            .map(|name| json!({"metadata": {"name": name}}));
        create_all(&Api::all(client.clone()), described::<Namespace>("Namespace", namespaces)?).await?;
        let nodes = described::<Node>("Node", self.node_names().map(|name| self.node(&name)))?;
        create_all(&Api::all(client.clone()), nodes).await?;
        let policy =
            DynamicObject::new("cluster-policy", &cluster_policy_kind()).data(json!({"spec": self.policy()}));
        let policies: Api<DynamicObject> = Api::all_with(client.clone(), &cluster_policy_kind());
        create("ClusterPolicy", &policies, policy).await?;
        let drivers: Api<DynamicObject> = Api::all_with(client.clone(), &nvidia_driver_kind());
        for (name, spec) in &self.nvidia_drivers {
            let driver = DynamicObject::new(name, &nvidia_driver_kind()).data(json!({"spec": spec}));
            create("NVIDIADriver", &drivers, driver).await?;
        }
        if self.nvsentinel {
            let breaker = json!({"metadata": {"name": nvsentinel::BREAKER}, "data": {"status": "CLOSED", "cursor": "RESUME"}});
            let breaker = described::<ConfigMap>("ConfigMap", [breaker].into_iter())?;
            create_all(&Api::namespaced(client.clone(), nvsentinel::NAMESPACE), breaker).await?;
        }
        self.install_workloads(client).await
    }

    async fn install_workloads(&self, client: &Client) -> Result<(), Error> {
        let deployments = described::<Deployment>("Deployment", self.workloads.iter().map(deployment))?;
        let budgets = described::<PodDisruptionBudget>(
            "PodDisruptionBudget",
            self.workloads.iter().filter_map(budget),
        )?;
        let api = |namespace: String| Api::namespaced(client.clone(), &namespace);
        let creates = budgets.into_iter().map(|budget| (budget.namespace().unwrap_or_default(), budget));
        in_parallel(
            creates.map(async |(namespace, budget)| {
                create("PodDisruptionBudget", &api(namespace), budget).await
            }),
        )
        .await?;
        let api = |namespace: String| Api::namespaced(client.clone(), &namespace);
        let creates = deployments
            .into_iter()
            .map(|deployment| (deployment.namespace().unwrap_or_default(), deployment));
        in_parallel(
            creates
                .map(async |(namespace, deployment)| create("Deployment", &api(namespace), deployment).await),
        )
        .await
    }

    /// A node of the fleet, as its kubelet would register it.
    pub(crate) fn node(&self, name: &str) -> Value {
        let mut labels = Map::new();
        labels.insert("kubernetes.io/hostname".into(), json!(name));
        labels.insert("kubernetes.io/os".into(), json!("linux"));
        labels.insert(GPU_PRESENT.into(), json!("true"));
        labels.insert(DEPLOY_DRIVER.into(), json!("true"));
        if self.validators {
            labels.insert(DEPLOY_VALIDATOR.into(), json!("true"));
        }
        for (_, key, value) in self.labels.iter().filter(|(node, ..)| node == name) {
            labels.insert(key.clone(), json!(value));
        }
        let gpus = self.gpus_per_node.to_string();
        let offer = json!({"cpu": "128", "memory": "1Ti", "pods": "110", "nvidia.com/gpu": gpus});
        let ready = json!({"type": "Ready", "status": "True", "reason": "KubeletReady"});
        json!({
            "metadata": {"name": name, "labels": labels},
            "status": {"capacity": offer, "allocatable": offer, "conditions": [ready], "nodeInfo": node_info()},
        })
    }

    fn policy(&self) -> Value {
        let mut driver = json!({
            "enabled": true, "repository": "nvcr.io/nvidia", "image": "driver", "version": self.driver_version,
            "upgradePolicy": self.upgrade_policy, "useNvidiaDriverCRD": !self.nvidia_drivers.is_empty(),
        });
        json_patch::merge(&mut driver, &self.driver);
        json!({
            "driver": driver,
            "validator": {"enabled": self.validators},
            "daemonsets": {"updateStrategy": "RollingUpdate"},
        })
    }

    /// Waits, by a watch, until every driver, validator and workload pod is Ready.
    pub async fn wait_ready(&self, client: &Client) {
        let replicas: u32 = self.workloads.iter().map(|workload| workload.replicas).sum();
        let wanted =
            self.nodes * (1 + usize::from(self.validators)) + usize::try_from(replicas).unwrap_or(usize::MAX);
        let mut pods = Informer::<Pod>::new(Api::all(client.clone()));
        let mut ready = BTreeSet::new();
        while ready.len() < wanted {
            changed(&mut [&mut pods]).await;
            for change in pods.cache.take_changes() {
                match change.new.filter(|pod| self.counts(pod) && is_ready(pod)) {
                    Some(_) => drop(ready.insert(change.key)),
                    None => drop(ready.remove(&change.key)),
                }
            }
        }
    }

    fn counts(&self, pod: &Arc<Pod>) -> bool {
        let label = |key: &str| pod.labels().get(key).map(String::as_str);
        if pod.metadata.deletion_timestamp.is_some() {
            return false;
        }
        if pod.namespace().as_deref() == Some(NAMESPACE) {
            return label("app.kubernetes.io/component") == Some(DRIVER_COMPONENT)
                || label("app") == Some(VALIDATOR_APP);
        }
        let (namespace, app) = (pod.namespace().unwrap_or_default(), label("app").unwrap_or_default());
        self.workloads.iter().any(|workload| workload.namespace == namespace && workload.name == app)
    }
}

/// Required by the API, read by nobody here.
fn node_info() -> Value {
    json!({
        "architecture": "amd64", "bootID": "", "containerRuntimeVersion": "sim://1", "kernelVersion": "5.15.0-sim",
        "kubeProxyVersion": "", "kubeletVersion": "v1.36.3", "machineID": "", "operatingSystem": "linux",
        "osImage": "Ubuntu 22.04", "systemUUID": "",
    })
}

fn described<K: DeserializeOwned>(
    kind: &'static str,
    objects: impl Iterator<Item = Value>,
) -> Result<Vec<K>, Error> {
    let object = |value| serde_json::from_value(value).map_err(|source| Error::Describe { kind, source });
    objects.map(object).collect()
}

async fn create_all<K>(api: &Api<K>, objects: Vec<K>) -> Result<(), Error>
where
    K: Resource<DynamicType = ()> + Clone + Debug + Serialize + DeserializeOwned + k8s_openapi::Resource,
{
    in_parallel(objects.into_iter().map(|object| create(<K as k8s_openapi::Resource>::KIND, api, object)))
        .await
}

async fn in_parallel(
    creates: impl Iterator<Item = impl Future<Output = Result<(), Error>>>,
) -> Result<(), Error> {
    stream::iter(creates).buffered(CREATES_IN_FLIGHT_MAX).try_collect().await
}

async fn create<K>(kind: &'static str, api: &Api<K>, object: K) -> Result<(), Error>
where
    K: Resource + Clone + Debug + Serialize + DeserializeOwned,
{
    match api.create(&PostParams::default(), &object).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
        Err(source) => Err(Error::Create { kind, name: object.name_any(), source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_as_wide_as_the_fleet() {
        assert_eq!(Fleet::new(3).node_names().collect::<Vec<_>>(), ["gpu-01", "gpu-02", "gpu-03"]);
        assert_eq!(Fleet::new(1000).node_names().next().as_deref(), Some("gpu-0001"));
    }
}
