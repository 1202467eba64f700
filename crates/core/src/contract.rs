//! The contract with the cluster: every name that other programs and people see, once.
//!
//! The names are those of NVIDIA's documents, so dashboards, scripts and runbooks go on working. `<d>` in a key
//! is the driver's name, the domain is configurable for the keys that pitcrew itself writes.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::names::DriverName;

/// The domain of the documented labels.
pub const DEFAULT_LABEL_DOMAIN: &str = "nvidia.com";
/// The visit record on a node: JSON, one annotation, the truth while pitcrew owns the node.
pub const VISIT_ANNOTATION: &str = "pitcrew.dev/visit";
/// Pod annotation, written by pitcrew: save your work, you have until this moment.
pub const CHECKPOINT_REQUESTED_ANNOTATION: &str = "pitcrew.dev/checkpoint-requested";
/// Pod annotation, written by the workload: it is saved.
pub const CHECKPOINTED_ANNOTATION: &str = "pitcrew.dev/checkpointed";
/// Node annotation: given back with its old driver because its pods could not leave, and when.
pub const RELEASED_ANNOTATION: &str = "pitcrew.dev/released";
/// Node annotation: who keeps health systems off the node, since when, and what was there before.
pub const HEALTH_HOLD_ANNOTATION: &str = "pitcrew.dev/health-hold";
/// Node annotation, written by the driver manager on a node: the cordon is its own, and since when.
pub const AGENT_CORDON_ANNOTATION: &str = "pitcrew.dev/driver-manager-cordon";
/// Node annotation, written by the driver manager: only a reboot brings the node's driver back, and why.
pub const NEEDS_REBOOT_ANNOTATION: &str = "pitcrew.dev/needs-reboot";
/// Node annotation, written by the driver manager when it finds a driver on the host: what the label said before.
pub const HOST_DRIVER_ANNOTATION: &str = "pitcrew.dev/host-driver";
/// Node annotation: the last visit, by which rollout, and when it ended.
pub const LAST_VISIT_ANNOTATION: &str = "pitcrew.dev/last-visit";
/// Nodes with this label and the value `true` get a new version first: the documented canary label.
pub const CANARY_LABEL: &str = "gpu-canary";
/// A person's wish that a node stays cordoned after its visit.
pub const KEEP_CORDONED_LABEL: &str = "pitcrew.dev/keep-cordoned";
/// On a ClusterPolicy: what to do with pods that did not leave in time, `Fail` or `Delete`.
pub const TIMEOUT_ACTION_ANNOTATION: &str = "pitcrew.dev/timeout-action";
/// Label of a gate's Job and pods: the gate's name. Pods that carry it are ours, whatever they ask for.
pub const GATE_LABEL: &str = "pitcrew.dev/gate";
/// Label of a gate's Job and pods: a hash of the nodes under test, whose names may be too long for a label.
pub const GATE_NODE_LABEL: &str = "pitcrew.dev/gate-node";
/// Label of a gate's Job and pods: the rollout, or a hash of its name where that is no label.
pub const ROLLOUT_LABEL: &str = "pitcrew.dev/rollout";
/// Annotation of a gate's Job and pods: what it is for (JSON), with all names in full.
pub const GATE_RUN_ANNOTATION: &str = "pitcrew.dev/gate-run";
/// The taint that a cordon stands for.
pub const UNSCHEDULABLE_TAINT: &str = "node.kubernetes.io/unschedulable";
/// The driver that ClusterPolicy and NVIDIADriver speak of, and the driver manager loads.
pub const GPU_DRIVER: &str = "gpu";
/// NVIDIA's name of a whole GPU as a resource, and the key of the taint that keeps other work off GPU nodes.
pub const GPU_RESOURCE: &str = "nvidia.com/gpu";
/// The label by which DaemonSet pods tell which template they were made from.
pub const REVISION_LABEL: &str = "controller-revision-hash";
/// In a driver container's environment: a digest of everything that matters to the installed driver.
pub const CONFIG_DIGEST_ENV: &str = "DRIVER_CONFIG_DIGEST";
/// Events on cluster-scoped objects live here.
pub const EVENT_NAMESPACE: &str = "default";
/// How pitcrew names itself as a source of events and as a field manager.
pub const COMPONENT: &str = "pitcrew";
/// The tag of decision log lines, the one that the documents tell people to grep for.
pub const LOG_TARGET: &str = "controllers.Upgrade";
/// The Lease of pitcrew's leader.
pub const LEASE_NAME: &str = "pitcrew-controller";
/// The Lease that a running GPU Operator holds.
pub const GPU_OPERATOR_LEASE: &str = "53822513.nvidia.com";
/// The ConfigMap of the version matrix, in pitcrew's own namespace.
pub const MATRIX_CONFIG_MAP: &str = "gpu-version-matrix";
/// The key of the matrix in it, if the policy does not say: the name of the documented file.
pub const MATRIX_KEY: &str = "gpu-version-matrix.yaml";
/// Node label of GPU Feature Discovery: the CUDA version that the loaded driver offers.
pub const CUDA_LABEL: &str = "nvidia.com/cuda.runtime-version.full";
/// Node label of GPU Feature Discovery: the version of the loaded driver.
pub const DRIVER_VERSION_LABEL: &str = "nvidia.com/cuda.driver-version.full";
/// The label of a GPU Operator's Deployment.
pub const GPU_OPERATOR_SELECTOR: &str = "app.kubernetes.io/component=gpu-operator";
/// Which NVIDIADriver a node belongs to.
pub const DRIVER_OWNER_LABEL: &str = "nvidia.com/gpu-operator.driver.owner";
/// Where the driver DaemonSets are when nobody says otherwise.
pub const DEFAULT_NAMESPACE: &str = "gpu-operator";

/// What NVSentinel reads from nodes, and what it writes.
pub mod nvsentinel {
    /// Node label: `false` means no new quarantine. Its conditions are still written.
    pub const OPT_OUT_LABEL: &str = "k8saas.nvidia.com/ManagedByNVSentinel";
    /// Node label: `false` means that nothing at all is done, conditions included.
    pub const MANAGED_LABEL: &str = "nvsentinel.dgxc.nvidia.com/managed";
    /// Node label: how far a quarantine is.
    pub const STATE_LABEL: &str = "dgxc.nvidia.com/nvsentinel-state";
    /// How the annotations of a quarantine begin.
    pub const QUARANTINE_ANNOTATIONS: &str = "quarantineHealthEvent";
    /// The one that says that the cordon is its own.
    pub const CORDONED_ANNOTATION: &str = "quarantineHealthEventIsCordoned";
    /// The one that says that somebody else had cordoned the node before.
    pub const CORDON_BEFORE_ANNOTATION: &str = "quarantineHealthEventCordonPreExisting";
    /// Node taint: somebody else repairs the node. Documents have it under `nvsentinel.nvidia.com` too.
    pub const REMEDIATION_TAINT: &str = "nvsentinel.dgxc.nvidia.com/external-remediation";
    /// The same, as documents spell it.
    pub const REMEDIATION_TAINT_TOO: &str = "nvsentinel.nvidia.com/external-remediation";
    /// Where it runs.
    pub const NAMESPACE: &str = "nvsentinel";
    /// The ConfigMap of its circuit breaker.
    pub const BREAKER: &str = "circuit-breaker";
    /// The value of `data.status` at which it does nothing any more.
    pub const TRIPPED: &str = "TRIPPED";
    /// The node condition that a driver upgrade raises.
    pub const DCGM_CONDITION: &str = "GpuDcgmConnectivityFailure";
}

/// Metric names. The first group is NVIDIA's, the second our own.
pub mod metric {
    /// 1 if driver auto upgrade is enabled; 0 if not (as documented).
    pub const AUTO_UPGRADE_ENABLED: &str = "gpu_operator_auto_upgrade_enabled";
    /// The same, as NVIDIA's code spells it.
    pub const DRIVER_AUTO_UPGRADE_ENABLED: &str = "gpu_operator_driver_auto_upgrade_enabled";
    /// Nodes on which a driver pod is being upgraded.
    pub const IN_PROGRESS: &str = "gpu_operator_nodes_upgrades_in_progress";
    /// Nodes whose driver pod is up to date.
    pub const DONE: &str = "gpu_operator_nodes_upgrades_done";
    /// Nodes whose upgrade failed.
    pub const FAILED: &str = "gpu_operator_nodes_upgrades_failed";
    /// Nodes on which an upgrade can start now.
    pub const AVAILABLE: &str = "gpu_operator_nodes_upgrades_available";
    /// Nodes whose upgrade is pending.
    pub const PENDING: &str = "gpu_operator_nodes_upgrades_pending";

    /// Nodes by driver and state.
    pub const NODES: &str = "pitcrew_nodes";
    /// Nodes by driver and reason.
    pub const NODES_BY_REASON: &str = "pitcrew_nodes_by_reason";
    /// Seconds from cordon to release.
    pub const VISIT_SECONDS: &str = "pitcrew_visit_seconds";
    /// Seconds that nodes spent in a state, by state.
    pub const STATE_SECONDS: &str = "pitcrew_state_seconds";
    /// Evictions by result.
    pub const EVICTIONS: &str = "pitcrew_evictions";
    /// Requests to the Kubernetes API by verb, resource and result.
    pub const API_REQUESTS: &str = "pitcrew_api_requests";
    /// Seconds that one planning pass takes.
    pub const PLAN_SECONDS: &str = "pitcrew_plan_seconds";
    /// Nodes for which no reason could be given. Anything but 0 is a bug.
    pub const EXPLAIN_UNKNOWN: &str = "pitcrew_explain_unknown";
    /// Actions that were dropped because they would have broken a promise. Anything but 0 is a bug.
    pub const VIOLATIONS: &str = "pitcrew_violations";
    /// 1 on the replica that leads.
    pub const LEADER: &str = "pitcrew_leader";
    /// Nodes that are kept from NVSentinel, by whom.
    pub const HEALTH_HOLDS: &str = "pitcrew_health_holds";
    /// Since when the oldest of them is, as a Unix time: an age that grows without being written.
    pub const HEALTH_HOLD_OLDEST: &str = "pitcrew_health_hold_oldest_timestamp_seconds";
    /// 1 if the pool is frozen (bad policy, a live GPU Operator, …).
    pub const POOL_FROZEN: &str = "pitcrew_pool_frozen";
}

/// Where a node stands on its walk: the values of the state label.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// No label, or an empty one: not looked at yet.
    #[default]
    Unknown,
    /// The driver pod is not up to date. Nothing happens here but waiting for a slot.
    UpgradeRequired,
    /// A slot is taken; the node is about to be cordoned.
    CordonRequired,
    /// Selected pods are given time to complete.
    WaitForJobsRequired,
    /// Pods that use the device are evicted.
    PodDeletionRequired,
    /// The node is drained, if eviction was not enough and the policy allows it.
    DrainRequired,
    /// The driver pod is replaced.
    PodRestartRequired,
    /// The new driver has to prove itself.
    ValidationRequired,
    /// The node is about to be given back.
    UncordonRequired,
    /// The driver pod is up to date and running.
    UpgradeDone,
    /// Something went wrong; the node stays cordoned until a person or a new version comes.
    UpgradeFailed,
}

impl State {
    /// Every state, in the order of the walk.
    pub const ALL: [State; 11] = [
        State::Unknown,
        State::UpgradeRequired,
        State::CordonRequired,
        State::WaitForJobsRequired,
        State::PodDeletionRequired,
        State::DrainRequired,
        State::PodRestartRequired,
        State::ValidationRequired,
        State::UncordonRequired,
        State::UpgradeDone,
        State::UpgradeFailed,
    ];

    /// The label's value; empty for unknown.
    pub fn as_str(self) -> &'static str {
        match self {
            State::Unknown => "",
            State::UpgradeRequired => "upgrade-required",
            State::CordonRequired => "cordon-required",
            State::WaitForJobsRequired => "wait-for-jobs-required",
            State::PodDeletionRequired => "pod-deletion-required",
            State::DrainRequired => "drain-required",
            State::PodRestartRequired => "pod-restart-required",
            State::ValidationRequired => "validation-required",
            State::UncordonRequired => "uncordon-required",
            State::UpgradeDone => "upgrade-done",
            State::UpgradeFailed => "upgrade-failed",
        }
    }

    /// On a visit, and the driver has not been touched yet.
    pub fn before_restart(self) -> bool {
        matches!(
            self,
            State::CordonRequired
                | State::WaitForJobsRequired
                | State::PodDeletionRequired
                | State::DrainRequired
        )
    }

    /// Between the slot and the release: the node counts against `maxParallelUpgrades`.
    pub fn in_flight(self) -> bool {
        matches!(
            self,
            State::CordonRequired
                | State::WaitForJobsRequired
                | State::PodDeletionRequired
                | State::DrainRequired
                | State::PodRestartRequired
                | State::ValidationRequired
                | State::UncordonRequired
        )
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            State::Unknown => "unknown",
            known => known.as_str(),
        })
    }
}

/// A state label whose value is none of the documented ones.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("\"{0}\" is not a driver upgrade state")]
pub struct UnknownState(pub String);

impl FromStr for State {
    type Err = UnknownState;
    fn from_str(text: &str) -> Result<Self, UnknownState> {
        State::ALL.into_iter().find(|s| s.as_str() == text).ok_or_else(|| UnknownState(text.to_owned()))
    }
}

/// The keys for one driver.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Keys {
    /// Node label: the state.
    pub state: String,
    /// Node label: `true` leaves the node out.
    pub skip: String,
    /// Pod label: `true` leaves the pod out of a drain.
    pub drain_skip: String,
    /// Node annotation, written by the driver pod's init container: it waits for a safe moment to load.
    pub safe_load: String,
    /// Node annotation, written by people and programs: upgrade this node although it is up to date.
    pub requested: String,
    /// Node annotation: an upgrade controller looks after this node, so driver-managers stay passive.
    pub enabled: String,
    /// Taint of nodes that are still to be upgraded, effect `PreferNoSchedule`: work that leaves one node should not have
    /// to leave the next one too.
    pub pending: String,
    /// Reason of the events on the node.
    pub event_reason: String,
}

impl Keys {
    /// The keys for driver `name`, with pitcrew's own labels under `domain`.
    pub fn new(name: &DriverName, domain: &str) -> Self {
        let own = |suffix: &str| format!("{domain}/{name}-driver-upgrade{suffix}");
        // Other programs write or read these under NVIDIA's domain, whatever domain we are told to use.
        let shared = |suffix: &str| format!("{DEFAULT_LABEL_DOMAIN}/{name}-driver-upgrade{suffix}");
        Self {
            state: own("-state"),
            skip: own(".skip"),
            drain_skip: shared("-drain.skip"),
            safe_load: shared(".driver-wait-for-safe-load"),
            requested: shared("-requested"),
            enabled: shared("-enabled"),
            pending: format!("pitcrew.dev/{name}-upgrade-pending"),
            event_reason: format!("{}DriverUpgrade", name.as_str().to_uppercase()),
        }
    }
}

/// An emptied node is not a spare node: autoscalers leave nodes with these annotations alone.
pub const SCALE_DOWN_HOLDS: [(&str, &str); 2] = [
    ("cluster-autoscaler.kubernetes.io/scale-down-disabled", "true"),
    ("karpenter.sh/do-not-disrupt", "true"),
];

/// What Argo CD writes on objects of an application: `<application>:<group>/<kind>:<namespace>/<name>`.
pub const ARGO_TRACKING_ANNOTATION: &str = "argocd.argoproj.io/tracking-id";
/// The same in its older way, as a label with the application's name.
pub const ARGO_INSTANCE_LABEL: &str = "argocd.argoproj.io/instance";
/// What Flux writes on objects, by the kind of its own object.
pub const FLUX_NAME_LABELS: [(&str, &str); 2] =
    [("kustomization", "kustomize.toolkit.fluxcd.io/name"), ("helmrelease", "helm.toolkit.fluxcd.io/name")];

/// The annotations that pitcrew reads from nodes, and the labels that it looks for in every pass.
pub fn is_relevant(key: &str) -> bool {
    key == CANARY_LABEL
        || key.starts_with("pitcrew.dev/")
        || key.contains("-driver-upgrade")
        || key.starts_with(nvsentinel::QUARANTINE_ANNOTATIONS)
        || SCALE_DOWN_HOLDS.iter().any(|(hold, _)| *hold == key)
}

/// The message of the event that announces a transition, word for word as documented.
pub fn transition_message(state: State) -> String {
    format!("Successfully updated node state label to [{}]", state.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_the_documented_ones() {
        let keys = Keys::new(&"gpu".into(), DEFAULT_LABEL_DOMAIN);
        assert_eq!(keys.state, "nvidia.com/gpu-driver-upgrade-state");
        assert_eq!(keys.skip, "nvidia.com/gpu-driver-upgrade.skip");
        assert_eq!(keys.drain_skip, "nvidia.com/gpu-driver-upgrade-drain.skip");
        assert_eq!(keys.safe_load, "nvidia.com/gpu-driver-upgrade.driver-wait-for-safe-load");
        assert_eq!(keys.requested, "nvidia.com/gpu-driver-upgrade-requested");
        assert_eq!(keys.enabled, "nvidia.com/gpu-driver-upgrade-enabled");
        assert_eq!(keys.event_reason, "GPUDriverUpgrade");
    }

    #[test]
    fn another_domain_moves_only_what_pitcrew_writes() {
        let keys = Keys::new(&"ofed".into(), "example.com");
        assert_eq!(keys.state, "example.com/ofed-driver-upgrade-state");
        assert_eq!(keys.requested, "nvidia.com/ofed-driver-upgrade-requested");
        assert_eq!(keys.event_reason, "OFEDDriverUpgrade");
    }

    #[test]
    fn every_state_reads_back() {
        for state in State::ALL {
            assert_eq!(state.as_str().parse(), Ok(state));
        }
        assert!("upgrade-maybe".parse::<State>().is_err());
    }
}
