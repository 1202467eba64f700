//! People's work: pods that do not stop or come unasked, replicas that come and go, budgets that allow nothing.

use k8s_openapi::api::apps::v1::{Deployment, StatefulSet};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{DeleteParams, ListParams, Patch, PostParams};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

use super::{Hands, chosen, ignore_missing, params};
use crate::actors::GPU;
use crate::fleet::Workload;

/// A foreign finalizer: what it is on does not go.
const STUCK: &str = "sim.pitcrew.dev/stuck";
/// What pods that nobody scheduled are called.
const LATECOMER: &str = "late-";
/// What budgets are called that are one too many.
const SECOND: &str = "second-";

/// A pod that takes a device of a node without asking the scheduler.
pub(in super::super) async fn put_on(client: kube::Client, node: &str, called: &str) -> kube::Result<Pod> {
    let container = json!({"name": "main", "image": "late", "resources": {"limits": {GPU: "1"}}});
    let spec = json!({"nodeName": node, "containers": [container]});
    let meta = json!({"name": format!("{LATECOMER}{called}"), "namespace": "team"});
    let pod = serde_json::from_value(json!({"metadata": meta, "spec": spec}));
    let pod = pod.map_err(kube::Error::SerdeError)?;
    Api::namespaced(client, "team").create(&PostParams::default(), &pod).await
}

impl Hands<'_> {
    pub(super) fn team(&self) -> Api<Pod> {
        Api::namespaced(self.cluster.admin.clone(), "team")
    }

    pub(super) async fn hold_pod(&self, whom: u32) -> kube::Result<()> {
        let pods = self.team().list(&ListParams::default()).await?.items;
        let Some(pod) = chosen(&pods, whom).filter(|pod| pod.metadata.deletion_timestamp.is_none()) else {
            return Ok(());
        };
        let patch = Patch::Merge(json!({"metadata": {"finalizers": [STUCK]}}));
        ignore_missing(self.team().patch(&pod.name_any(), &params(), &patch).await)
    }

    pub(super) async fn free_pods(&self) -> kube::Result<()> {
        for pod in self.team().list(&ListParams::default()).await? {
            if pod.finalizers().iter().any(|finalizer| finalizer == STUCK) {
                let patch = Patch::Merge(json!({"metadata": {"finalizers": null}}));
                ignore_missing(self.team().patch(&pod.name_any(), &params(), &patch).await)?;
            }
        }
        Ok(())
    }

    /// On a node that is being upgraded, if there is one.
    pub(super) async fn put_latecomer(&self, whom: u32) -> kube::Result<()> {
        let Some(node) = self.node_at_work(whom).await? else { return Ok(()) };
        ignore_missing(put_on(self.cluster.admin.clone(), &node, &whom.to_string()).await)
    }

    pub(super) async fn remove_latecomers(&self) -> kube::Result<()> {
        for pod in self.team().list(&ListParams::default()).await? {
            if pod.name_any().starts_with(LATECOMER) {
                ignore_missing(self.team().delete(&pod.name_any(), &DeleteParams::default()).await)?;
            }
        }
        Ok(())
    }

    pub(super) async fn scale(&self, whom: u32) -> kube::Result<()> {
        let Some(workload) = chosen(&self.case.fleet.workloads, whom) else { return Ok(()) };
        self.set_replicas(workload, (whom >> 8) % (workload.replicas + 1)).await
    }

    pub(super) async fn scale_back(&self) -> kube::Result<()> {
        for workload in &self.case.fleet.workloads {
            self.set_replicas(workload, workload.replicas).await?;
        }
        Ok(())
    }

    async fn set_replicas(&self, workload: &Workload, replicas: u32) -> kube::Result<()> {
        let (admin, namespace) = (self.cluster.admin.clone(), workload.namespace.as_str());
        let patch = Patch::Merge(json!({"spec": {"replicas": replicas}}));
        if workload.stateful {
            let api = Api::<StatefulSet>::namespaced(admin, namespace);
            return ignore_missing(api.patch(&workload.name, &params(), &patch).await);
        }
        let api = Api::<Deployment>::namespaced(admin, namespace);
        ignore_missing(api.patch(&workload.name, &params(), &patch).await)
    }

    fn budgets(&self) -> Api<PodDisruptionBudget> {
        Api::namespaced(self.cluster.admin.clone(), "team")
    }

    /// Two people who do not know of each other put the same work under a budget.
    pub(super) async fn double_budgets(&self, whom: u32) -> kube::Result<()> {
        let Some(workload) = chosen(&self.case.fleet.workloads, whom) else { return Ok(()) };
        for person in ["ann", "bob"] {
            let name = format!("{SECOND}{person}-{}", workload.name);
            let spec = json!({"maxUnavailable": 1, "selector": {"matchLabels": {"app": workload.name}}});
            let budget = serde_json::from_value(json!({"metadata": {"name": name}, "spec": spec}));
            let budget = budget.map_err(kube::Error::SerdeError)?;
            ignore_missing(self.budgets().create(&PostParams::default(), &budget).await)?;
        }
        Ok(())
    }

    /// They talk to each other.
    pub(super) async fn single_budgets(&self) -> kube::Result<()> {
        for budget in self.budgets().list(&ListParams::default()).await? {
            if budget.name_any().starts_with(SECOND) {
                ignore_missing(self.budgets().delete(&budget.name_any(), &DeleteParams::default()).await)?;
            }
        }
        Ok(())
    }

    /// One budget allows nothing, or all are as they were.
    pub(super) async fn set_budgets(&self, tight: Option<u32>) -> kube::Result<()> {
        let with: Vec<_> = self.case.fleet.workloads.iter().filter(|work| work.budget.is_some()).collect();
        let tight = tight.and_then(|whom| chosen(&with, whom)).map(|workload| workload.name.clone());
        for workload in with {
            let spec = match &tight {
                Some(name) if *name == workload.name => {
                    json!({"minAvailable": workload.replicas, "maxUnavailable": null})
                }
                Some(_) => continue,
                None => {
                    let mut spec = json!({"minAvailable": null, "maxUnavailable": null});
                    json_patch::merge(&mut spec, workload.budget.as_ref().unwrap_or(&Value::Null));
                    spec
                }
            };
            let api = Api::<PodDisruptionBudget>::namespaced(self.cluster.admin.clone(), &workload.namespace);
            ignore_missing(api.patch(&workload.name, &params(), &Patch::Merge(json!({"spec": spec}))).await)?;
        }
        Ok(())
    }
}
