//! What is in the cluster to begin with: GPU nodes, the operator's CRDs and policy, and people's workloads.
//!
//! A `Fleet` is a plain description with good defaults; `install` creates it through any `kube::Client` (twice does
//! no harm), `wait_ready` waits until everything in it runs.

mod create;
mod workload;

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::apps::v1::{DaemonSet, Deployment, StatefulSet};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Node, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::core::DynamicObject;
use kube::runtime::wait::{await_condition, conditions};
use kube::{Api, Client, ResourceExt};
use pitcrew_core::contract::nvsentinel;
use serde_json::{Map, Value, json};

use crate::actors::{
    DEPLOY_DRA, DEPLOY_DRIVER, DEPLOY_VALIDATOR, DRIVER_COMPONENT, Dra, DraIdentity, GPU, GPU_PRESENT,
    Informer, NAMESPACE, OPERANDS, VALIDATOR_APP, changed, cluster_policy_kind, crds, is_plugin, is_ready,
    nvidia_driver_kind,
};

use create::{create, create_all, described, in_parallel};
use workload::{budget, controller, usual_workloads};

pub use workload::Workload;

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
    /// Whether the operator's operands that use the driver run too.
    pub clients: bool,
    /// The DRA plugin, if there is one.
    pub dra: Option<Dra>,
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
            clients: false,
            dra: None,
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

    /// With the operator's operands that use the driver: toolkit, device plugin, DCGM and its exporter, feature
    /// discovery. A node then offers GPUs only while its device plugin is Ready.
    #[must_use]
    pub fn with_clients(mut self) -> Self {
        self.clients = true;
        self
    }

    /// With a DRA plugin: a `DraIdentity`, or a `Dra` with more to say.
    #[must_use]
    pub fn with_dra(mut self, dra: impl Into<Dra>) -> Self {
        self.dra = Some(dra.into());
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
        let plugin = self.dra.map(|dra| dra.identity.namespace());
        let namespaces = namespaces
            .into_iter()
            .chain([NAMESPACE])
            .chain(sentinel)
            .chain(plugin)
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
        if let Some(dra) = self.dra {
            let plugins = described::<DaemonSet>("DaemonSet", [dra.object()].into_iter())?;
            create_all(&Api::namespaced(client.clone(), dra.identity.namespace()), plugins).await?;
        }
        self.install_workloads(client).await
    }

    async fn install_workloads(&self, client: &Client) -> Result<(), Error> {
        let (stateful, stateless): (Vec<_>, Vec<_>) =
            self.workloads.iter().partition(|workload| workload.stateful);
        let deployments = described::<Deployment>("Deployment", stateless.into_iter().map(controller))?;
        let sets = described::<StatefulSet>("StatefulSet", stateful.into_iter().map(controller))?;
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
        .await?;
        let api = |namespace: String| Api::namespaced(client.clone(), &namespace);
        let creates = sets.into_iter().map(|set| (set.namespace().unwrap_or_default(), set));
        in_parallel(creates.map(async |(namespace, set)| create("StatefulSet", &api(namespace), set).await))
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
        if self.clients {
            labels.extend(OPERANDS.iter().map(|operand| (operand.deploy.to_owned(), json!("true"))));
        }
        if self.dra.is_some_and(|dra| dra.identity == DraIdentity::Operator) {
            labels.insert(DEPLOY_DRA.into(), json!("true"));
        }
        for (_, key, value) in self.labels.iter().filter(|(node, ..)| node == name) {
            labels.insert(key.clone(), json!(value));
        }
        let gpus = self.gpus_per_node.to_string();
        let capacity = json!({"cpu": "128", "memory": "1Ti", "pods": "110", GPU: gpus});
        let mut offer = capacity.clone();
        if self.clients {
            // Not before the device plugin is there.
            offer[GPU] = json!("0");
        }
        let ready = json!({"type": "Ready", "status": "True", "reason": "KubeletReady"});
        json!({
            "metadata": {"name": name, "labels": labels},
            "status": {"capacity": capacity, "allocatable": offer, "conditions": [ready], "nodeInfo": node_info()},
        })
    }

    fn policy(&self) -> Value {
        let mut driver = json!({
            "enabled": true, "repository": "nvcr.io/nvidia", "image": "driver", "version": self.driver_version,
            "upgradePolicy": self.upgrade_policy, "useNvidiaDriverCRD": !self.nvidia_drivers.is_empty(),
        });
        json_patch::merge(&mut driver, &self.driver);
        let mut policy = json!({
            "driver": driver,
            "validator": {"enabled": self.validators},
            "daemonsets": {"updateStrategy": "RollingUpdate"},
        });
        for operand in OPERANDS.iter().filter(|_| self.clients) {
            policy[operand.field] = json!({"enabled": true});
        }
        policy
    }

    /// Waits, by a watch, until every driver, validator, client and workload pod is Ready.
    pub async fn wait_ready(&self, client: &Client) {
        let replicas: u32 = self.workloads.iter().map(|workload| workload.replicas).sum();
        let operands = if self.clients { OPERANDS.len() } else { 0 };
        let per_node = 1 + usize::from(self.validators) + operands + usize::from(self.dra.is_some());
        let wanted = self.nodes * per_node + usize::try_from(replicas).unwrap_or(usize::MAX);
        let mut pods = Informer::<Pod>::new(&client.clone().into());
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
        if is_plugin(pod) {
            return true;
        }
        if pod.namespace().as_deref() == Some(NAMESPACE) {
            return label("app.kubernetes.io/component") == Some(DRIVER_COMPONENT)
                || label("app") == Some(VALIDATOR_APP)
                || OPERANDS.iter().any(|operand| label("app") == Some(operand.app));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_as_wide_as_the_fleet() {
        assert_eq!(Fleet::new(3).node_names().collect::<Vec<_>>(), ["gpu-01", "gpu-02", "gpu-03"]);
        assert_eq!(Fleet::new(1000).node_names().next().as_deref(), Some("gpu-0001"));
    }
}
