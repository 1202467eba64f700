//! What a person, a machine or another program does to the cluster in a scenario.

use std::fmt::Debug;
use std::time::Duration;

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::Node;
use kube::api::{DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::{Api, Resource};
use pitcrew_core::api::Rollout;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::stage::Stage;
use super::{Broken, Outcome};

impl Stage {
    /// Changes the driver version in the ClusterPolicy.
    pub async fn set_version(&self, version: &str) -> Outcome {
        Ok(self.cluster.set_driver_version(version).await?)
    }

    /// Merges into `spec.driver.upgradePolicy` of the ClusterPolicy.
    pub async fn set_upgrade_policy(&self, patch: Value) -> Outcome {
        Ok(self.cluster.patch_cluster_policy(json!({"spec": {"driver": {"upgradePolicy": patch}}})).await?)
    }

    /// Sets or removes a label on a node.
    pub async fn label(&self, node: &str, key: &str, value: Option<&str>) -> Outcome {
        self.patch_node(node, json!({"metadata": {"labels": {key: value}}})).await
    }

    /// Merges into a node.
    pub async fn patch_node(&self, node: &str, patch: Value) -> Outcome {
        let api = Api::<Node>::all(self.cluster.admin.clone());
        api.patch(node, &PatchParams::default(), &Patch::Merge(patch)).await?;
        Ok(())
    }

    /// Creates an object from its manifest, `namespace` empty for cluster-scoped ones.
    pub async fn create<K>(&self, namespace: &str, manifest: Value) -> Outcome
    where
        K: Resource<DynamicType = ()> + DeserializeOwned + Serialize + Clone + Debug,
    {
        let object: K = serde_json::from_value(manifest).map_err(|e| Broken(e.to_string()))?;
        let client = self.cluster.admin.clone();
        let kind = kube::core::ApiResource::erase::<K>(&());
        let body = serde_json::to_value(&object).map_err(|e| Broken(e.to_string()))?;
        let object: DynamicObject = serde_json::from_value(body).map_err(|e| Broken(e.to_string()))?;
        let api: Api<DynamicObject> = match namespace {
            "" => Api::all_with(client, &kind),
            namespace => Api::namespaced_with(client, namespace, &kind),
        };
        api.create(&PostParams::default(), &object).await?;
        Ok(())
    }

    /// Merges into an object of a namespace.
    pub async fn patch<K>(&self, namespace: &str, name: &str, patch: Value) -> Outcome
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + DeserializeOwned + Clone + Debug,
    {
        let api = Api::<K>::namespaced(self.cluster.admin.clone(), namespace);
        api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await?;
        Ok(())
    }

    /// Deletes an object of a namespace.
    pub async fn delete<K>(&self, namespace: &str, name: &str) -> Outcome
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + DeserializeOwned + Clone + Debug,
    {
        let api = Api::<K>::namespaced(self.cluster.admin.clone(), namespace);
        api.delete(name, &DeleteParams::default()).await?;
        Ok(())
    }

    /// Merges into a rollout, once it is there.
    pub async fn patch_rollout(&self, name: &str, patch: Value) -> Outcome {
        let api = Api::<Rollout>::all(self.cluster.admin.clone());
        let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
        let patched = async || match api.patch(name, &params, &patch).await {
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
            answer => Ok(Some(answer.map(drop)?)),
        };
        self.poll(&format!("rollout {name} is there"), patched).await
    }

    /// A node of the fleet joins, or comes back as a new machine under its old name.
    pub async fn join(&self, name: &str) -> Outcome {
        self.create::<Node>("", self.fleet.node(name)).await
    }

    /// A node is taken out of the cluster.
    pub async fn leave(&self, name: &str) -> Outcome {
        let api = Api::<Node>::all(self.cluster.admin.clone());
        api.delete(name, &DeleteParams::default()).await?;
        Ok(())
    }

    /// A node's kubelet is dead, or alive again.
    pub fn set_down(&self, node: &str, down: bool) {
        self.behaviour().change(|behaviour| {
            if down {
                behaviour.down.insert(node.to_owned());
            } else {
                behaviour.down.remove(node);
            }
        });
    }

    /// A machine boots; everything on it starts again.
    pub async fn reboot(&self, node: &str, takes: Duration) {
        self.set_down(node, true);
        tokio::time::sleep(takes).await;
        self.behaviour().change(|behaviour| *behaviour.boots.entry(node.to_owned()).or_default() += 1);
        self.set_down(node, false);
    }
}
