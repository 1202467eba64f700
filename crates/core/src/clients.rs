//! Driver clients: DaemonSet pods that keep a handle on the driver, such as the DRA kubelet plugin or DCGM. One that
//! started before the driver which runs now holds on to something that is gone.
//!
//! In: a pod's labels, its DaemonSet and the start times that one kubelet wrote. Out: what kind of client it is, and
//! whether it is stale. Staleness is computed from start times, never remembered.

use std::fmt;

use jiff::{SignedDuration, Timestamp};

use crate::names::ObjectName;
use crate::selector::Labels;
use crate::snapshot::{Node, Pod};

/// A node selector key by which third parties ask to be stopped and started with the driver.
pub const DEPLOY_CLIENT_LABEL: &str = "nvidia.com/gpu.deploy.client";

/// In what a driver-manager writes into an operand's label while it keeps the operand off the node.
pub const PAUSED_VALUE: &str = "paused-for-";

/// The clients that are known without being named in a policy, in the order in which they come back.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum ClientKind {
    /// NVIDIA's DRA kubelet plugin.
    DraPlugin {
        /// It offers GPUs, and not only compute domains.
        gpus: bool,
    },
    /// The container toolkit, which all other operands wait for.
    Toolkit,
    /// The device plugin, without which the node offers nothing.
    DevicePlugin,
    /// Another operand of the GPU Operator.
    Operand,
}

/// Operands by their `app` label. Some have a twin for clusters that use DRA.
const OPERANDS: [(&str, ClientKind); 7] = [
    ("nvidia-container-toolkit-daemonset", ClientKind::Toolkit),
    ("nvidia-device-plugin-daemonset", ClientKind::DevicePlugin),
    ("nvidia-device-plugin-mps-control-daemon", ClientKind::Operand),
    ("gpu-feature-discovery", ClientKind::Operand),
    ("nvidia-dcgm", ClientKind::Operand),
    ("nvidia-dcgm-exporter", ClientKind::Operand),
    ("nvidia-mig-manager", ClientKind::Operand),
];

/// Names under which the DRA driver is installed: by NVIDIA's chart, by the community's, by the GPU Operator.
const DRA_NAMES: [&str; 3] = ["nvidia-dra-driver-gpu", "dra-driver-nvidia-gpu", "nvidia-dra-driver"];
const DRA_OPERATOR_APP: &str = "nvidia-dra-driver-kubelet-plugin";
const DRA_COMPONENT: &str = "kubelet-plugin";
/// Containers of the plugin: each may be left out.
const DRA_GPUS_CONTAINER: &str = "gpus";
const DRA_DOMAINS_CONTAINER: &str = "compute-domains";

impl ClientKind {
    /// What a pod of the DaemonSet `owner` is.
    pub fn of(labels: &Labels, owner: &str, containers: &[&str]) -> Option<Self> {
        if is_dra_plugin(labels, owner, containers) {
            let only_domains =
                containers.contains(&DRA_DOMAINS_CONTAINER) && !containers.contains(&DRA_GPUS_CONTAINER);
            return Some(ClientKind::DraPlugin { gpus: !only_domains });
        }
        let app = labels.get("app")?;
        let app = app.strip_suffix("-dra").unwrap_or(app);
        OPERANDS.iter().find(|(name, _)| *name == app).map(|(_, kind)| *kind)
    }

    /// Who has a lower number comes back first and is waited for.
    pub fn order(self) -> u32 {
        match self {
            ClientKind::DraPlugin { .. } => 0,
            ClientKind::Toolkit => 1,
            ClientKind::DevicePlugin | ClientKind::Operand => 2,
        }
    }
}

fn is_dra_plugin(labels: &Labels, owner: &str, containers: &[&str]) -> bool {
    let label = |key: &str| labels.get(key).map(String::as_str);
    let name = label("app.kubernetes.io/name").unwrap_or_default();
    let by_operator = label("app") == Some(DRA_OPERATOR_APP);
    let component = |name: &str| label(&format!("{name}-component")) == Some(DRA_COMPONENT);
    // The community's chart names the label after itself, also under another name; others might do the same.
    let ours = |container: &&str| [DRA_GPUS_CONTAINER, DRA_DOMAINS_CONTAINER].contains(container);
    let renamed = || component(name) && containers.iter().any(ours);
    // Where the chart's selector labels are overridden, only names are left.
    let by_name = || owner.ends_with("-kubelet-plugin") && DRA_NAMES.contains(&name);
    by_operator || DRA_NAMES.iter().any(|name| component(name)) || renamed() || by_name()
}

/// One life of a node's driver: from one start of its container to the next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Epoch {
    /// Differs from that of any other life.
    pub id: u64,
    /// When the driver container started.
    pub loaded: Timestamp,
    /// When the driver was ready for the first time, as far as that can be told.
    pub ready: Timestamp,
}

impl Epoch {
    /// The epoch of a driver that is ready; `None` for one that is not. A driver that was ready only after `limit` was
    /// ready before: its Ready condition came and went.
    pub fn of(driver: &Pod, node: &Node, limit: SignedDuration) -> Option<Self> {
        let loaded = driver.started.filter(|_| driver.ready && driver.deleting.is_none())?;
        let latest = loaded.saturating_add(limit).unwrap_or(Timestamp::MAX);
        let ready = driver.ready_since.unwrap_or(loaded).min(latest);
        let revision = driver.revision.as_ref().map(ToString::to_string).unwrap_or_default();
        let parts = [driver.uid.as_str(), &node.boot_id, &revision];
        let id = parts.iter().fold(driver.incarnation, |id, part| fnv(id, part));
        Some(Self { id, loaded, ready })
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.id)
    }
}

/// FNV-1a: the same on every machine and in every version.
pub fn fnv(seed: u64, text: &str) -> u64 {
    let seed = if seed == 0 { 0xcbf2_9ce4_8422_2325 } else { seed };
    text.bytes()
        .chain([0xff])
        .fold(seed, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Why a client has to be replaced.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Stale {
    /// It started before the driver that runs now.
    OlderThanDriver {
        /// When its oldest container started.
        started: Timestamp,
        /// When the driver it would have to be younger than was there.
        driver: Timestamp,
    },
    /// Its DaemonSet replaces nobody by itself (OnDelete) and has a newer template.
    PendingRevision {
        /// The DaemonSet.
        daemon_set: ObjectName,
    },
}

impl Stale {
    /// A short name for machines.
    pub fn code(&self) -> &'static str {
        match self {
            Stale::OlderThanDriver { .. } => "older-than-driver",
            Stale::PendingRevision { .. } => "pending-revision",
        }
    }
}

impl fmt::Display for Stale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Stale::OlderThanDriver { started, driver } => {
                write!(f, "it started at {started}, before the driver ({driver})")
            }
            Stale::PendingRevision { daemon_set } => {
                write!(f, "it would come back from a newer template of daemonset/{daemon_set} (OnDelete)")
            }
        }
    }
}

/// Whether a client holds on to a driver that is gone. Whoever waits for the driver's files before it starts (`gated`)
/// may do so in the very second in which the driver container starts; all others start after the driver is ready.
pub fn older_than_driver(client: &Pod, gated: bool, epoch: Epoch) -> Option<Stale> {
    let started = client.oldest_started?;
    let (driver, stale) =
        if gated { (epoch.loaded, started < epoch.loaded) } else { (epoch.ready, started <= epoch.ready) };
    stale.then_some(Stale::OlderThanDriver { started, driver })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn the_dra_plugin_is_found_under_all_its_names() {
        let both = ["compute-domains", "gpus"];
        let plugin = |pairs: &[(&str, &str)], owner: &str| ClientKind::of(&labels(pairs), owner, &both);
        let found = Some(ClientKind::DraPlugin { gpus: true });
        let name = "app.kubernetes.io/name";
        let nvidia = [(name, "mine"), ("nvidia-dra-driver-gpu-component", "kubelet-plugin")];
        assert_eq!(plugin(&nvidia, "mine-kubelet-plugin"), found, "NVIDIA's chart, renamed");
        let sigs = [(name, "dra-driver-nvidia-gpu"), ("dra-driver-nvidia-gpu-component", "kubelet-plugin")];
        assert_eq!(plugin(&sigs, "x"), found, "the community's chart");
        let renamed = [(name, "mine"), ("mine-component", "kubelet-plugin")];
        assert_eq!(plugin(&renamed, "mine-kubelet-plugin"), found, "the community's chart, renamed");
        let others = ClientKind::of(&labels(&renamed), "mine-kubelet-plugin", &["plugin"]);
        assert_eq!(others, None, "another vendor's");
        assert_eq!(plugin(&[("app", "nvidia-dra-driver-kubelet-plugin")], "x"), found, "the operator's");
        let overridden = [(name, "nvidia-dra-driver-gpu")];
        assert_eq!(plugin(&overridden, "nvidia-dra-driver-gpu-kubelet-plugin"), found, "by names alone");
        assert_eq!(plugin(&overridden, "nvidia-dra-driver-gpu-controller"), None, "the chart's controller");
    }

    #[test]
    fn a_plugin_without_the_gpus_container_offers_no_gpus() {
        let labels = labels(&[("app", "nvidia-dra-driver-kubelet-plugin")]);
        let kind = |containers: &[&str]| ClientKind::of(&labels, "x", containers);
        assert_eq!(kind(&["compute-domains"]), Some(ClientKind::DraPlugin { gpus: false }));
        assert_eq!(kind(&["plugin"]), Some(ClientKind::DraPlugin { gpus: true }));
    }

    #[test]
    fn operands_are_known_by_their_app_label() {
        let kind = |app: &str| ClientKind::of(&labels(&[("app", app)]), "x", &[]);
        assert_eq!(kind("nvidia-container-toolkit-daemonset"), Some(ClientKind::Toolkit));
        assert_eq!(kind("nvidia-dcgm-exporter-dra"), Some(ClientKind::Operand));
        assert_eq!(kind("nvidia-operator-validator"), None);
        assert!(ClientKind::DraPlugin { gpus: true }.order() < ClientKind::Toolkit.order());
    }

    #[test]
    fn only_who_waits_for_the_driver_may_start_in_its_second() {
        let at = |second| Timestamp::from_second(second).unwrap();
        let epoch = Epoch { id: 1, loaded: at(100), ready: at(130) };
        let client = |second| {
            let name = ObjectName::new("gpu-operator", "dcgm-x");
            Pod { oldest_started: Some(at(second)), ..Pod::ready(name, "u".into(), 1.into(), "n".into()) }
        };
        let stale = |second, gated| older_than_driver(&client(second), gated, epoch).is_some();
        assert_eq!([99, 100, 129].map(|second| stale(second, true)), [true, false, false]);
        assert_eq!([99, 130, 131].map(|second| stale(second, false)), [true, true, false]);
        let coming = Pod { oldest_started: None, ..client(0) };
        assert_eq!(older_than_driver(&coming, true, epoch), None, "nothing of it runs yet");
    }
}
