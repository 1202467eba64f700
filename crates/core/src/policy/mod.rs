//! What the user wants, resolved: one [`Policy`] per pool, every value known and every unit parsed.
//!
//! In: the policy objects as the cluster has them ([`Sources`](crate::snapshot::Sources)). Out: pools that can be
//! followed, and for the others a sentence that says what to mend. See [`resolve`].

mod amount;
mod parse;
mod resolve;
mod rules;
mod stages;
#[cfg(test)]
mod tests;
mod topology;
mod values;
mod windows;

use std::collections::BTreeMap;
use std::fmt;

use jiff::SignedDuration;
use kube::core::{Selector, SelectorExt};
use serde_json::{Map, Value};

pub use amount::{Amount, BadAmount};
pub(crate) use parse::{duration, problem};
pub use resolve::{ClusterPolicyFacts, resolve};
pub use stages::{Bake, CANARY_STAGE, Pick, RolloutRules, Stage};
pub use topology::{Gang, Spread, Topology};

use crate::api::{EffectiveValue, Mode, NvSentinelMode, OnBlocked, Refresh, TimeoutAction};
use crate::contract::Keys;
use crate::names::{DriverName, PoolName};
use crate::selector::Labels;
use crate::snapshot::Pod;
use crate::windows::Windows;

/// The object that states a policy, printed as `kind/name`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Source {
    /// Ours.
    DriverPolicy(String),
    /// The GPU Operator's.
    ClusterPolicy(String),
    /// The GPU Operator's, one per part of the fleet.
    NvidiaDriver(String),
    /// The Network Operator's.
    NicClusterPolicy(String),
}

impl Source {
    /// The object's name.
    pub fn name(&self) -> &str {
        match self {
            Source::DriverPolicy(name)
            | Source::ClusterPolicy(name)
            | Source::NvidiaDriver(name)
            | Source::NicClusterPolicy(name) => name,
        }
    }
    /// Its kind and API version, for events about it.
    pub fn kind(&self) -> (&'static str, &'static str) {
        match self {
            Source::DriverPolicy(_) => ("DriverPolicy", "pitcrew.dev/v1alpha1"),
            Source::ClusterPolicy(_) => ("ClusterPolicy", "nvidia.com/v1"),
            Source::NvidiaDriver(_) => ("NVIDIADriver", "nvidia.com/v1alpha1"),
            Source::NicClusterPolicy(_) => ("NicClusterPolicy", "mellanox.com/v1alpha1"),
        }
    }
    /// Where its upgrade options are, for a person who looks for them.
    pub fn options_field(&self) -> &'static str {
        match self {
            Source::ClusterPolicy(_) => "spec.driver.upgradePolicy",
            Source::NicClusterPolicy(_) => "spec.ofedDriver.upgradePolicy",
            Source::DriverPolicy(_) | Source::NvidiaDriver(_) => "spec.upgradePolicy",
        }
    }
    /// Where its driver version is.
    pub fn version_field(&self) -> &'static str {
        match self {
            Source::ClusterPolicy(_) => "spec.driver.version",
            Source::NicClusterPolicy(_) => "spec.ofedDriver.version",
            Source::DriverPolicy(_) | Source::NvidiaDriver(_) => "spec.version",
        }
    }
    /// The merge patch that changes these of its upgrade options and nothing else.
    pub fn options_patch(&self, options: Value) -> Value {
        let path = self.options_field().split('.').rev();
        path.fold(options, |inner, field| Value::Object(Map::from_iter([(field.to_owned(), inner)])))
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.kind().0.to_lowercase(), self.name())
    }
}

/// One pool and what is wanted of it.
#[derive(Clone, Debug)]
pub struct Pool {
    /// Named after its source.
    pub name: PoolName,
    /// Who states the policy.
    pub source: Source,
    /// The driver; known even if the rest cannot be read, so that the pool's nodes can be told.
    pub driver: DriverName,
    /// The policy, or why there is none.
    pub policy: Result<Policy, Problem>,
}

/// Why a policy cannot be followed: what, where, what to do.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{what} ({field}). The pool is frozen until it is mended; nothing was changed.")]
pub struct Problem {
    /// What is wrong.
    pub what: String,
    /// The field to mend.
    pub field: String,
}

/// A policy with every value known.
#[derive(Clone, Debug)]
pub struct Policy {
    /// The driver's name.
    pub driver: DriverName,
    /// Its labels and annotations.
    pub keys: Keys,
    /// The namespace of its DaemonSets.
    pub namespace: String,
    /// The labels of its DaemonSets and driver pods.
    pub daemon_sets: Selector,
    /// The same, as it was written: for sentences.
    pub daemon_sets_text: String,
    /// Only DaemonSets of this NVIDIADriver.
    pub rendered_by: Option<String>,
    /// What keeps the device busy: its users must leave before the driver restarts.
    pub devices: Devices,
    /// The validator pods, if any.
    pub validator: Option<Selector>,
    /// The pool's nodes.
    pub node_selector: Labels,
    /// How to live with a GPU Operator.
    pub mode: Mode,
    /// Off pauses.
    pub auto_upgrade: bool,
    /// 0: no limit of its own.
    pub max_parallel: u32,
    /// Of the nodes that should run the driver.
    pub max_unavailable: Amount,
    /// Pods that may complete first.
    pub wait: Wait,
    /// Pods that are asked to save their work first.
    pub checkpoint: Option<Checkpoint>,
    /// How device users are taken off.
    pub removal: Removal,
    /// Whether and how the node is drained.
    pub drain: Option<Drain>,
    /// How long things may take.
    pub limits: Limits,
    /// How the node is shared with health systems.
    pub health: Health,
    /// What happens to the driver's clients.
    pub clients: Clients,
    /// How a new version reaches the pool.
    pub rollout: RolloutRules,
    /// When nodes may start.
    pub windows: Windows,
    /// Which nodes go together, and which do not.
    pub topology: Topology,
    /// Each value and where it comes from.
    pub effective: BTreeMap<String, EffectiveValue>,
}

impl Policy {
    /// Whether a node with these labels can belong to the pool.
    pub fn selects(&self, labels: &Labels) -> bool {
        self.node_selector.iter().all(|(k, v)| labels.get(k) == Some(v))
    }
    /// Whether an object of the driver's namespace with these labels is one of its DaemonSets or pods.
    pub fn is_driver(&self, namespace: &str, labels: &Labels) -> bool {
        namespace == self.namespace && self.daemon_sets.matches(labels)
    }
}

/// A resource name, or a beginning with `*`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pattern(pub String);

impl Pattern {
    /// Whether `resource` fits.
    pub fn matches(&self, resource: &str) -> bool {
        match self.0.strip_suffix('*') {
            Some(beginning) => resource.starts_with(beginning),
            None => resource == self.0,
        }
    }

    /// Whether `path` is this one, or below it.
    pub fn matches_path(&self, path: &str) -> bool {
        let below = || path.strip_prefix(self.0.as_str()).is_some_and(|rest| rest.starts_with('/'));
        self.matches(path) || below()
    }
}

/// How a pod may use the device.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Devices {
    /// By asking for one of these resources.
    pub resources: Vec<Pattern>,
    /// By a resource claim (DRA) that one of these drivers has allocated.
    pub claim_drivers: Vec<String>,
    /// By running in one of these runtime classes.
    pub runtime_classes: Vec<String>,
    /// By mounting one of these paths of the node, or something below it.
    pub host_paths: Vec<Pattern>,
}

impl Devices {
    /// Nobody can be said to use the device.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether the pod's own words say that it uses the device. Claims are looked up elsewhere.
    pub fn asked_for_by(&self, pod: &Pod) -> bool {
        let resource = |name: &str| self.resources.iter().any(|pattern| pattern.matches(name));
        let path = |path: &str| self.host_paths.iter().any(|pattern| pattern.matches_path(path));
        pod.resources.iter().any(|(name, _)| resource(name))
            || pod.runtime_class.as_deref().is_some_and(|c| self.runtime_classes.iter().any(|r| r == c))
            || pod.host_paths.iter().any(|mounted| path(mounted))
    }
}

/// Pods that may complete before the node is touched.
#[derive(Clone, Debug)]
pub struct Wait {
    /// Which; `None` waits for none.
    pub selector: Option<Selector>,
    /// `None`: for ever.
    pub timeout: Option<SignedDuration>,
}

/// Pods that are asked to save their work before they are evicted.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// Which.
    pub selector: Selector,
    /// How long they get.
    pub timeout: SignedDuration,
}

/// How pods are taken off a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Removal {
    /// Also pods without a controller.
    pub force: bool,
    /// Also pods with emptyDir volumes.
    pub delete_empty_dir: bool,
    /// `None`: for ever.
    pub timeout: Option<SignedDuration>,
    /// What then.
    pub timeout_action: TimeoutAction,
}

/// How a node is drained.
#[derive(Clone, Debug)]
pub struct Drain {
    /// Which pods.
    pub selector: Selector,
    /// How.
    pub removal: Removal,
}

/// How long things may take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// From restart to ready.
    pub driver_ready: SignedDuration,
    /// From ready to validated.
    pub validation: SignedDuration,
    /// More failed nodes than this stop new starts.
    pub failure_threshold: Amount,
    /// What happens to a node whose pods cannot leave …
    pub on_blocked: OnBlocked,
    /// … for so long.
    pub blocked_after: SignedDuration,
}

/// How a node is shared with health systems.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Health {
    /// Whether and how nodes are kept from NVSentinel.
    pub nvsentinel: NvSentinelMode,
    /// Conditions that must not be True when a node is given back.
    pub conditions: Vec<String>,
    /// How long a node is watched after its visit.
    pub watch_after: SignedDuration,
}

/// What happens to the driver's clients.
#[derive(Clone, Debug)]
pub struct Clients {
    /// When stale ones are replaced.
    pub refresh: Refresh,
    /// How long each may take to come back.
    pub timeout: SignedDuration,
    /// Those of NVIDIA's GPU driver count.
    pub nvidia: bool,
    /// Those that the policy adds.
    pub extra: Vec<ExtraClient>,
}

/// A client that a policy adds.
#[derive(Clone, Debug)]
pub struct ExtraClient {
    /// Which pods.
    pub selector: Selector,
    /// Only there; empty: everywhere.
    pub namespaces: Vec<String>,
    /// Who has a lower number comes back first.
    pub order: u32,
    /// It waits for the driver's files before it starts.
    pub gated: bool,
    /// The node fails without it.
    pub required: bool,
    /// How long it may take.
    pub timeout: SignedDuration,
}

impl ExtraClient {
    /// Whether pods of this namespace with these labels are some of them.
    pub fn selects(&self, namespace: &str, labels: &Labels) -> bool {
        let here = self.namespaces.is_empty() || self.namespaces.iter().any(|name| name == namespace);
        here && self.selector.matches(labels)
    }
}
