//! The operator's operands leave when their labels are paused; here they are waited for, in the documented order.

use std::time::Duration;

use crate::cluster::Cluster;
use crate::failure::Failure;
use crate::labels::{self, Batch, PREFIX};
use crate::pods::{self, OnNode};
use crate::stop::Stop;
use crate::wait::{Audience, Look, Looker, Wait};

/// How often the pods of an operand are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// How long an operand may take to leave.
const LEAVES_WITHIN: Duration = Duration::from_mins(5);

/// Operands that are always looked for, by the value of `app` on their pods. The validator's pods are the DRA validator's too.
const ALWAYS: [&str; 8] = [
    "nvidia-operator-validator",
    "nvidia-container-toolkit-daemonset",
    "nvidia-device-plugin-daemonset",
    "gpu-feature-discovery",
    "nvidia-dcgm-exporter",
    "nvidia-dcgm",
    "nvidia-dcgm-exporter-dra",
    "nvidia-dcgm-dra",
];
/// Operands that are looked for where they are deployed: label, `app`.
const WHERE_DEPLOYED: [(&str, &str); 4] = [
    ("mig-manager", "nvidia-mig-manager"),
    ("sandbox-validator", "nvidia-sandbox-validator"),
    ("sandbox-device-plugin", "nvidia-sandbox-device-plugin-daemonset"),
    ("vgpu-device-manager", "nvidia-vgpu-device-manager"),
];
/// Operands whose pods have no name that is known here: they are found by the label that places them.
const FOUND_BY_LABEL: [&str; 2] = ["client", "nvsm"];
/// The operator's own DRA kubelet plugin.
const DRA_PLUGIN: &str = "nvidia-dra-driver-kubelet-plugin";

/// Waits until the operands of a batch have left the node.
pub(crate) async fn gone(
    told: Audience<'_>,
    stop: &Stop,
    namespace: &str,
    batch: Batch,
    custom: Option<&str>,
) -> Result<(), Failure> {
    let node_labels = &told.node.labels;
    let deployed = |name: &str| labels::is_deployed(node_labels, &format!("{PREFIX}{name}"));
    let (apps, by_label): (Vec<&str>, Vec<String>) = match batch {
        Batch::First => {
            let more = WHERE_DEPLOYED.iter().filter(|(label, _)| deployed(label)).map(|(_, app)| *app);
            let others = FOUND_BY_LABEL.iter().filter(|label| deployed(label));
            (
                ALWAYS.into_iter().chain(more).collect(),
                others.map(|label| format!("{PREFIX}{label}")).collect(),
            )
        }
        Batch::Client => (vec![], labels::keys(batch, custom)),
        Batch::Plugin | Batch::Last => {
            let dra = labels::is_deployed(node_labels, labels::DRA_DRIVER).then_some(DRA_PLUGIN);
            let custom = custom.filter(|key| batch == Batch::Last && labels::is_deployed(node_labels, key));
            (dra.into_iter().collect(), custom.into_iter().map(str::to_owned).collect())
        }
    };
    for app in apps {
        app_gone(told, stop, namespace, app).await?;
    }
    if by_label.is_empty() { Ok(()) } else { placed_gone(told, stop, &by_label).await }
}

async fn app_gone(told: Audience<'_>, stop: &Stop, namespace: &str, app: &str) -> Result<(), Failure> {
    let (what, label) = (format!("the pods of {app} to leave"), format!("app={app}"));
    let wait = Wait { what: &what, every: LOOK_EVERY, limit: Some(LEAVES_WITHIN) };
    wait.until(stop, told, OfApp { cluster: told.cluster, namespace, label: &label }).await
}

/// The pods with a label, in one namespace.
struct OfApp<'a> {
    cluster: &'a Cluster,
    namespace: &'a str,
    label: &'a str,
}

impl Looker for OfApp<'_> {
    async fn look(&mut self) -> Result<Look, Failure> {
        let pods = self.cluster.pods(Some((self.namespace, self.label))).await?;
        Ok(still_there(pods.into_iter().map(OnNode::read)))
    }
}

/// DaemonSets' pods that one of these labels places, in any namespace.
async fn placed_gone(told: Audience<'_>, stop: &Stop, keys: &[String]) -> Result<(), Failure> {
    let what = format!("the pods that {} places to leave", keys.join(" and "));
    let wait = Wait { what: &what, every: LOOK_EVERY, limit: Some(LEAVES_WITHIN) };
    wait.until(stop, told, PlacedBy { cluster: told.cluster, keys }).await
}

/// DaemonSets' pods that labels of the node place.
struct PlacedBy<'a> {
    cluster: &'a Cluster,
    keys: &'a [String],
}

impl Looker for PlacedBy<'_> {
    async fn look(&mut self) -> Result<Look, Failure> {
        let pods = on_node(self.cluster).await?;
        Ok(still_there(pods.into_iter().filter(|pod| pod.is_placed_by(self.keys))))
    }
}

/// All pods on the node.
pub(crate) async fn on_node(cluster: &Cluster) -> Result<Vec<OnNode>, Failure> {
    Ok(cluster.pods(None).await?.into_iter().map(OnNode::read).collect())
}

fn still_there(pods: impl Iterator<Item = OnNode>) -> Look {
    let left: Vec<OnNode> = pods.filter(|on_node| !on_node.pod.is_finished()).collect();
    let left: Vec<_> = left.iter().map(|on_node| &on_node.pod).collect();
    if left.is_empty() { Look::Done } else { Look::Missing(format!("{} still there", pods::names(&left))) }
}
