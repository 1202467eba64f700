//! Machines that go down, boot, go and come, and what breaks on them: drivers, their clients, gates.

use std::time::Duration;

use fastrand::Rng;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, ResourceExt};

use super::super::case::TO;
use super::super::fault::Fault;
use super::{Hands, chosen, ignore_missing};
use crate::actors::{
    ClientFault, DRIVER_COMPONENT, DriverFault, Fault as Broken, GateOutcome, GateRule, NAMESPACE, Nodes, OPERANDS,
};

/// How a driver can be broken.
pub(in super::super) fn driver_fault(rng: &mut Rng) -> Broken {
    [Broken::CrashLoop, Broken::ImageMissing, Broken::Hang][rng.usize(..3)]
}

impl Hands<'_> {
    pub(super) async fn node(&self, whom: u32) -> kube::Result<Option<String>> {
        let nodes = self.nodes().list(&ListParams::default()).await?.items;
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
