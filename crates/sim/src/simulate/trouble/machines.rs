//! Machines that go down, boot, go and come, and what breaks on them: drivers, their clients, gates.

use std::time::Duration;

use fastrand::Rng;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{DeleteParams, ListParams, Patch, PostParams};
use kube::{Api, ResourceExt};
use serde_json::json;

use super::super::case::TO;
use super::super::fault::Fault;
use super::{Hands, chosen, ignore_missing, params};
use crate::actors::{
    ClientFault, DRIVER_COMPONENT, DriverFault, Fault as Broken, GateOutcome, GateRule, NAMESPACE, Nodes,
    OPERANDS,
};

/// So many pods a node takes when it has no room, …
const FULL: &str = "0";
/// … and otherwise.
const EMPTY: &str = "110";

/// How a driver can be broken.
pub(in super::super) fn driver_fault(rng: &mut Rng) -> Broken {
    [Broken::CrashLoop, Broken::ImageMissing, Broken::Hang][rng.usize(..3)]
}

impl Hands<'_> {
    pub(super) async fn node(&self, whom: u32) -> kube::Result<Option<String>> {
        let nodes = self.nodes().list(&ListParams::default()).await?.items;
        Ok(chosen(&nodes, whom).map(ResourceExt::name_any))
    }

    /// A node that is being upgraded, if there is one.
    pub(super) async fn node_at_work(&self, whom: u32) -> kube::Result<Option<String>> {
        let mut nodes = self.nodes().list(&ListParams::default()).await?.items;
        let is_closed = |node: &Node| node.spec.as_ref().is_some_and(|spec| spec.unschedulable == Some(true));
        if nodes.iter().any(is_closed) {
            nodes.retain(is_closed);
        }
        Ok(chosen(&nodes, whom).map(ResourceExt::name_any))
    }

    pub(super) async fn break_machine(&self, fault: Fault, whom: u32) -> kube::Result<Option<String>> {
        let Some(node) = self.node(whom).await? else { return Ok(None) };
        let named = || Nodes::Named(node.clone());
        let broken = |fault| DriverFault { nodes: named(), version: Some(TO.to_owned()), fault };
        self.behave(|behaviour| match fault {
            Fault::NotReady | Fault::Reboot => drop(behaviour.down.insert(node.clone())),
            Fault::Flap => *behaviour.driver_restarts.entry(node.clone()).or_default() += 1,
            Fault::Unproven => drop(behaviour.unproven.insert(node.clone())),
            Fault::CrashLoop => behaviour.drivers.push(broken(Broken::CrashLoop)),
            Fault::ImageMissing => behaviour.drivers.push(broken(Broken::ImageMissing)),
            Fault::Hang => behaviour.drivers.push(broken(Broken::Hang)),
            Fault::GateBlind => {
                let (nodes, outcome) = (named(), GateOutcome::ImageMissing);
                behaviour.gates.push(GateRule { gate: None, nodes, version: None, outcome });
            }
            _ => {
                let operand = &OPERANDS[whom as usize % OPERANDS.len()];
                let client = operand.app.to_owned();
                behaviour.clients.push(ClientFault { client, nodes: named(), fault: Broken::Hang });
            }
        });
        Ok(Some(node))
    }

    /// One of the driver's clients is broken on some nodes from now on.
    pub(super) fn lose_client(&self, whom: u32) {
        let client = OPERANDS[whom as usize % OPERANDS.len()].app.to_owned();
        let fault = driver_fault(&mut Rng::with_seed(u64::from(whom)));
        let rule = ClientFault { client, nodes: Nodes::OneIn(6), fault };
        self.behave(|behaviour| behaviour.clients.push(rule));
    }

    /// A node, one that is being upgraded if there is one, takes no pods any more.
    pub(super) async fn fill(&self, whom: u32) -> kube::Result<Option<String>> {
        let Some(node) = self.node_at_work(whom).await? else { return Ok(None) };
        self.set_room(&node, FULL).await?;
        Ok(Some(node))
    }

    /// All nodes take as many pods as ever.
    pub(super) async fn make_room(&self) -> kube::Result<()> {
        let is_full = |node: &Node| {
            let offered = node.status.as_ref().and_then(|status| status.allocatable.as_ref()?.get("pods"));
            offered.is_some_and(|pods| pods.0 == FULL)
        };
        for node in self.nodes().list(&ListParams::default()).await?.items.iter().filter(|node| is_full(node))
        {
            self.set_room(&node.name_any(), EMPTY).await?;
        }
        Ok(())
    }

    async fn set_room(&self, node: &str, pods: &str) -> kube::Result<()> {
        let patch = Patch::Merge(json!({"status": {"allocatable": {"pods": pods}}}));
        ignore_missing(self.nodes().patch_status(node, &params(), &patch).await)
    }

    pub(super) async fn move_machine(&mut self, fault: Fault, whom: u32) -> kube::Result<Option<String>> {
        if fault == Fault::Join {
            *self.joined += 1;
            self.join(&format!("gpu-new-{}", self.joined)).await?;
            return Ok(None);
        }
        let Some(node) = self.node(whom).await? else { return Ok(None) };
        ignore_missing(self.nodes().delete(&node, &DeleteParams::default()).await)?;
        if fault == Fault::Replace {
            tokio::time::sleep(Duration::from_millis(u64::from(whom % 2000))).await;
            self.join(&node).await?;
        }
        Ok(Some(node))
    }

    pub(super) async fn join(&self, name: &str) -> kube::Result<()> {
        let node = serde_json::from_value(self.case.fleet.node(name)).map_err(kube::Error::SerdeError)?;
        ignore_missing(self.nodes().create(&PostParams::default(), &node).await)
    }

    pub(super) async fn drivers(&self) -> kube::Result<Vec<Pod>> {
        let selector = format!("app.kubernetes.io/component={DRIVER_COMPONENT}");
        let pods = Api::<Pod>::namespaced(self.cluster.admin.clone(), NAMESPACE);
        Ok(pods.list(&ListParams::default().labels(&selector)).await?.items)
    }

    pub(super) async fn delete_driver(&self, whom: u32) -> kube::Result<()> {
        let pods = self.drivers().await?;
        let Some(pod) = chosen(&pods, whom) else { return Ok(()) };
        let api = Api::<Pod>::namespaced(self.cluster.admin.clone(), NAMESPACE);
        ignore_missing(api.delete(&pod.name_any(), &DeleteParams::default()).await)
    }
}

/// Nobody mends a version.
pub(super) fn is_for_good(rule: &DriverFault) -> bool {
    matches!(rule.nodes, Nodes::OneIn(_) | Nodes::All)
}

/// Nobody mends what a gate found either.
pub(super) fn is_no(rule: &GateRule) -> bool {
    matches!(rule.outcome, GateOutcome::Fails { .. })
}

/// Nobody mends a client that is lost.
pub(super) fn is_lost(rule: &ClientFault) -> bool {
    matches!(rule.nodes, Nodes::OneIn(_))
}
