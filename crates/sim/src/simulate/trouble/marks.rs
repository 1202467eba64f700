//! What people and other programs write on nodes and policies: cordons, labels, quarantines, limits, pauses and aborts.

use k8s_openapi::api::core::v1::Node;
use kube::api::{ListParams, Patch};
use kube::{Api, ResourceExt};
use pitcrew_core::api::{DriverPolicy, Rollout};
use pitcrew_core::contract::{State, nvsentinel};
use serde_json::{Value, json};

use super::super::fault::Fault;
use super::{Hands, chosen, ignore_missing, keys, params};
use crate::actors::{DEPLOY_DRIVER, quarantined_by_us, released};

/// A taint that no driver tolerates. Nobody else taints nodes here.
const TAINT: &str = "sim.pitcrew.dev/maintenance";

impl Hands<'_> {
    /// Changes the upgrade options, wherever they are stated: of one pool, or of all.
    pub(super) async fn set_options(&self, options: &Value, whom: Option<u32>) -> kube::Result<()> {
        if self.case.policy.is_none() {
            let patch = json!({"spec": {"driver": {"upgradePolicy": options}}});
            return self.cluster.patch_cluster_policy(patch).await;
        }
        let policies: Vec<&str> = self.case.policies().map(|(name, _)| name).collect();
        let one = whom.and_then(|whom| chosen(&policies, whom >> 16).copied());
        for name in policies.iter().filter(|name| one.is_none_or(|one| one == **name)) {
            self.set_options_of(name, options).await?;
        }
        Ok(())
    }

    async fn set_options_of(&self, policy: &str, options: &Value) -> kube::Result<()> {
        let api = Api::<DriverPolicy>::all(self.cluster.admin.clone());
        let patch = Patch::Merge(json!({"spec": {"upgradePolicy": options}}));
        ignore_missing(api.patch(policy, &params(), &patch).await)
    }

    /// All options are what they were.
    pub(super) async fn reset_options(&self) -> kube::Result<()> {
        if self.case.policy.is_none() {
            return self.set_options(&self.case.fleet.upgrade_policy, None).await;
        }
        for (name, spec) in self.case.policies() {
            self.set_options_of(name, &spec["upgradePolicy"]).await?;
        }
        Ok(())
    }

    pub(super) async fn abort(&self, abort: bool) -> kube::Result<()> {
        let api = Api::<Rollout>::all(self.cluster.admin.clone());
        for rollout in api.list(&ListParams::default()).await? {
            let patch = Patch::Merge(json!({"spec": {"abort": abort}}));
            ignore_missing(api.patch(&rollout.name_any(), &params(), &patch).await)?;
        }
        Ok(())
    }

    pub(super) async fn patch_node(&self, node: &str, patch: Value) -> kube::Result<()> {
        ignore_missing(self.nodes().patch(node, &params(), &Patch::Merge(patch)).await)
    }

    pub(super) async fn mark(&self, fault: Fault, whom: u32) -> kube::Result<Option<String>> {
        let nodes = self.nodes().list(&ListParams::default()).await?.items;
        let Some(node) = chosen(&nodes, whom) else { return Ok(None) };
        let patch = match fault {
            Fault::Cordon => json!({"spec": {"unschedulable": true}}),
            Fault::Uncordon => json!({"spec": {"unschedulable": null}}),
            Fault::Skip => json!({"metadata": {"labels": {keys().skip: "true"}}}),
            Fault::Quarantine => quarantined_by_us(node),
            Fault::Unlabel => json!({"metadata": {"labels": {DEPLOY_DRIVER: null}}}),
            Fault::Taint => {
                // Some let what runs there stay.
                let effect = if whom.is_multiple_of(3) { "NoExecute" } else { "NoSchedule" };
                json!({"spec": {"taints": [{"key": TAINT, "effect": effect}]}})
            }
            _ => json!({"metadata": {"labels": {keys().state: some_state(whom)}}}),
        };
        self.patch_node(&node.name_any(), patch).await?;
        Ok(Some(node.name_any()))
    }

    pub(super) async fn unskip(&self) -> kube::Result<()> {
        for node in self.nodes().list(&ListParams::default()).await? {
            if node.labels().contains_key(&keys().skip) {
                let patch = json!({"metadata": {"labels": {keys().skip: null}}});
                self.patch_node(&node.name_any(), patch).await?;
            }
        }
        Ok(())
    }

    /// Every node is to have a driver again.
    pub(super) async fn label_again(&self) -> kube::Result<()> {
        for node in self.nodes().list(&ListParams::default()).await? {
            if !node.labels().contains_key(DEPLOY_DRIVER) {
                let patch = json!({"metadata": {"labels": {DEPLOY_DRIVER: "true"}}});
                self.patch_node(&node.name_any(), patch).await?;
            }
        }
        Ok(())
    }

    pub(super) async fn untaint(&self) -> kube::Result<()> {
        let ours = |node: &Node| {
            let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_ref());
            taints.into_iter().flatten().any(|taint| taint.key == TAINT)
        };
        for node in self.nodes().list(&ListParams::default()).await?.items.iter().filter(|node| ours(node)) {
            self.patch_node(&node.name_any(), json!({"spec": {"taints": null}})).await?;
        }
        Ok(())
    }

    pub(super) async fn release(&self, node: Option<String>) -> kube::Result<()> {
        let Some(node) = node else { return Ok(()) };
        match self.nodes().get_opt(&node).await? {
            Some(found) if found.annotations().contains_key(nvsentinel::QUARANTINE_ANNOTATIONS) => {
                self.patch_node(&node, released(&found)).await
            }
            _ => Ok(()),
        }
    }

    pub(super) async fn wipe(&self) -> kube::Result<()> {
        for node in self.nodes().list(&ListParams::default()).await? {
            let patch = json!({"metadata": {"labels": {keys().state: null}}});
            self.patch_node(&node.name_any(), patch).await?;
        }
        Ok(())
    }

    /// Labels that people set during a visit keep pitcrew's hands off, and quarantines end with their cause: whoever set
    /// them takes them back.
    pub(super) async fn relabel_foreign(&self) -> kube::Result<()> {
        for node in self.nodes().list(&ListParams::default()).await? {
            let name = node.name_any();
            if node.annotations().contains_key(nvsentinel::QUARANTINE_ANNOTATIONS) {
                self.patch_node(&name, released(&node)).await?;
            }
            if self.case.has(Fault::Relabel) {
                self.patch_node(&name, json!({"metadata": {"labels": {keys().state: null}}})).await?;
            }
        }
        Ok(())
    }
}

pub(super) fn limits(whom: u32) -> Value {
    let unavailable = [json!(0), json!(1), json!("30%"), json!("100%"), json!("nonsense")];
    let parallel = (whom >> 8) % 4;
    json!({"maxUnavailable": unavailable[whom as usize % unavailable.len()], "maxParallelUpgrades": parallel})
}

/// A documented state, none, or nonsense.
fn some_state(whom: u32) -> Value {
    match (whom >> 8) % 13 {
        12 => json!("upgrade-maybe"),
        11 => Value::Null,
        index => match State::ALL.get(index as usize) {
            Some(State::Unknown) | None => json!("upgrade-required"),
            Some(state) => json!(state.as_str()),
        },
    }
}
