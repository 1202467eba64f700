//! `DriverPolicy`: what the user wants of one driver on one part of the fleet.
//!
//! Every field but `driver` is optional. What is not set under `upgradePolicy` is inherited from the ClusterPolicy
//! or NVIDIADriver that renders the DaemonSet, so those fields have no schema default; all others do.
//! Bad values are refused at admission by the schema and its CEL rules, with a sentence.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::matrix::MatrixStatus;
use super::rollout_policy::RolloutPolicySpec;
use crate::contract::{DEFAULT_LABEL_DOMAIN, DEFAULT_NAMESPACE, nvsentinel};

/// How one driver is upgraded on the nodes of one pool.
#[expect(clippy::duplicated_attributes, reason = "the columns of one table share their types")]
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[kube(
    group = "pitcrew.dev",
    version = "v1alpha1",
    kind = "DriverPolicy",
    plural = "driverpolicies",
    shortname = "dp",
    status = "DriverPolicyStatus",
    derive = "PartialEq",
    printcolumn(name = "Driver", json_path = ".spec.driver.name", type_ = "string"),
    printcolumn(name = "Ready", json_path = ".status.ready", type_ = "boolean"),
    printcolumn(name = "Message", json_path = ".status.message", type_ = "string"),
    printcolumn(name = "Age", json_path = ".metadata.creationTimestamp", type_ = "date")
)]
#[serde(rename_all = "camelCase")]
pub struct DriverPolicySpec {
    /// The driver, its DaemonSets and who uses it.
    pub driver: DriverSpec,
    /// The pool: nodes with these labels. Empty: all nodes that should run the driver.
    #[serde(default)]
    pub node_selector: BTreeMap<String, String>,
    /// How pitcrew lives with a GPU Operator in the same cluster.
    #[serde(default)]
    pub mode: Mode,
    /// The documented upgrade options. What is not set is inherited from the object that renders the DaemonSet.
    #[serde(default)]
    pub upgrade_policy: UpgradePolicySpec,
    /// How long things may take, and what happens then.
    #[serde(default)]
    pub limits: LimitsSpec,
    /// How pitcrew shares a node with health systems.
    #[serde(default)]
    pub health: HealthSpec,
    /// What happens to pods that keep a handle on the driver.
    #[serde(default)]
    pub clients: ClientsSpec,
    /// How a new version reaches the pool, part by part.
    #[serde(default)]
    pub rollout: RolloutPolicySpec,
}

/// The driver: its name, its DaemonSets, who uses it, who validates it.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = ("self.name == 'gpu' || (has(self.daemonSets) && has(self.daemonSets.selector))", "daemonSets.selector is required for a driver other than gpu: name the label of its DaemonSets"),
)]
pub struct DriverSpec {
    /// The driver's name in every label and annotation: gpu, ofed, amdgpu, …
    #[x_kube(validation = ("self.matches('^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$')", "driver.name must be lower-case letters, digits and dashes, at most 32, such as gpu or ofed"))]
    pub name: String,
    /// The domain of the state and skip labels.
    #[serde(default = "default_label_domain")]
    #[x_kube(validation = ("self.matches('^[a-z0-9]([a-z0-9.-]{0,200}[a-z0-9])?$')", "driver.labelDomain must be a DNS name such as nvidia.com"))]
    pub label_domain: String,
    /// Where the driver's DaemonSets are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub daemon_sets: Option<DaemonSetsSpec>,
    /// How pods ask for the device. Not set: NVIDIA's resources for gpu, none for others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub devices: Option<DevicesSpec>,
    /// The pods that prove a new driver on their node. Not set: nothing to wait for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validator: Option<ValidatorSpec>,
}

/// Where the driver's DaemonSets are.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DaemonSetsSpec {
    /// Their namespace.
    #[serde(default = "default_namespace")]
    pub namespace: String,
    /// The label selector that finds them and their pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<String>,
}

/// How pods ask for the device.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DevicesSpec {
    /// Extended resource names; a trailing `*` matches any ending.
    #[serde(default)]
    pub resources: Vec<String>,
    /// DRA drivers: pods with a claim that one of them has allocated use the device.
    #[serde(default)]
    pub claim_drivers: Vec<String>,
    /// Runtime classes: pods in one of them use the device, whether they ask for it or not.
    #[serde(default)]
    pub runtime_classes: Vec<String>,
    /// Paths of the node such as `/dev/nvidia*`: pods that mount one, or something below it, use the device.
    #[serde(default)]
    pub host_paths: Vec<String>,
}

/// The pods that prove a new driver.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ValidatorSpec {
    /// The label selector that finds them, in any namespace.
    pub selector: String,
}

/// How pitcrew lives with a GPU Operator in the same cluster.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema)]
pub enum Mode {
    /// Looks for a live GPU Operator and chooses.
    #[default]
    Auto,
    /// No NVIDIA upgrade controller in this cluster.
    Standalone,
    /// A GPU Operator keeps `autoUpgrade: true`; pitcrew upgrades its nodes as a guest.
    Guest,
    /// NVIDIA's controller is switched off; the DriverPolicy rules.
    TakeOver,
}

/// The documented upgrade options, with their documented names.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = ("!(has(self.gpuPodDeletion) && has(self.podDeletion))", "gpuPodDeletion and podDeletion are two names of one field: set one of them"))]
pub struct UpgradePolicySpec {
    /// Off pauses everything and keeps everything where it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_upgrade: Option<bool>,
    /// How many nodes are upgraded at the same time; 0 sets no limit of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = ("self >= 0", "maxParallelUpgrades must be 0 (no limit of its own) or more"))]
    pub max_parallel_upgrades: Option<i64>,
    /// How many nodes may be out at the same time, by whatever cause: a number, or a percentage that rounds up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = ("type(self) == int ? int(self) >= 0 : string(self).matches('^(100|[0-9]{1,2})%$')", "maxUnavailable must be a number of nodes (0 or more) or a percentage from 0% to 100%"))]
    pub max_unavailable: Option<IntOrString>,
    /// Pods that may complete before the node is touched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_for_completion: Option<WaitForCompletionSpec>,
    /// Pods that are asked to save their work before they are evicted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<CheckpointSpec>,
    /// How pods that use the device are taken off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_pod_deletion: Option<PodDeletionSpec>,
    /// Another name of `gpuPodDeletion`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_deletion: Option<PodDeletionSpec>,
    /// Draining the whole node, if taking the device users off was not enough.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain: Option<DrainSpec>,
}

/// Pods that may complete before the node is touched.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct WaitForCompletionSpec {
    /// Which pods; empty waits for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_selector: Option<String>,
    /// How long; 0 is for ever.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = ("self >= 0", "waitForCompletion.timeoutSeconds must be 0 (no limit) or more"))]
    pub timeout_seconds: Option<i64>,
}

/// Pods that are asked to save their work before they are evicted: the annotation `pitcrew.dev/checkpoint-requested`
/// is set on them, and `pitcrew.dev/checkpointed` awaited.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct CheckpointSpec {
    /// Which pods; empty asks none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_selector: Option<String>,
    /// How long they get; then they are evicted all the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = ("self > 0", "checkpoint.timeoutSeconds must be more than 0"))]
    pub timeout_seconds: Option<i64>,
}

/// How pods that use the device are taken off.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct PodDeletionSpec {
    /// Also pods without a controller that would make them again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub force: Option<bool>,
    /// How long; 0 is for ever.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = ("self >= 0", "gpuPodDeletion.timeoutSeconds must be 0 (no limit) or more"))]
    pub timeout_seconds: Option<i64>,
    /// Also pods with emptyDir volumes, whose data is lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delete_empty_dir: Option<bool>,
    /// What happens to pods that did not leave in time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_action: Option<TimeoutAction>,
}

/// Draining the whole node.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct DrainSpec {
    /// Whether draining is allowed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enable: Option<bool>,
    /// Also pods without a controller that would make them again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub force: Option<bool>,
    /// Which pods; empty drains all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_selector: Option<String>,
    /// How long; 0 is for ever.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = ("self >= 0", "drain.timeoutSeconds must be 0 (no limit) or more"))]
    pub timeout_seconds: Option<i64>,
    /// Also pods with emptyDir volumes, whose data is lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delete_empty_dir: Option<bool>,
    /// What happens to pods that did not leave in time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_action: Option<TimeoutAction>,
}

/// What happens to pods that did not leave in time.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema)]
pub enum TimeoutAction {
    /// The node goes on to a drain if that is enabled, else it fails.
    #[default]
    Fail,
    /// The pods are deleted with their own grace period, past their budgets.
    Delete,
}

/// How long things may take, and what happens then.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct LimitsSpec {
    /// From the restart of the driver pod to its being ready.
    #[serde(default = "default_driver_ready")]
    #[x_kube(validation = ("self.matches('^([0-9]+(d|h|m|s))+$')", "limits.driverReady must be a duration such as 30m or 2h"))]
    pub driver_ready: String,
    /// From the ready driver to the end of all validation.
    #[serde(default = "default_validation")]
    #[x_kube(validation = ("self.matches('^([0-9]+(d|h|m|s))+$')", "limits.validation must be a duration such as 10m"))]
    pub validation: String,
    /// More failed nodes than this stop new starts: a number, or a percentage of the pool that rounds up.
    #[serde(default = "default_failure_threshold")]
    #[x_kube(validation = ("type(self) == int ? int(self) >= 0 : string(self).matches('^(100|[0-9]{1,2})%$')", "limits.failureThreshold must be a number of nodes (0 or more) or a percentage from 0% to 100%"))]
    pub failure_threshold: IntOrString,
    /// What happens to a node whose pods cannot leave.
    #[serde(default)]
    pub on_blocked: OnBlocked,
    /// How long a node may be blocked before that happens.
    #[serde(default = "default_blocked_after")]
    #[x_kube(validation = ("self.matches('^([0-9]+(d|h|m|s))+$')", "limits.blockedAfter must be a duration such as 2h"))]
    pub blocked_after: String,
}

/// What happens to a node whose pods cannot leave.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema)]
pub enum OnBlocked {
    /// Nothing: it stays cordoned and waits, as long as the removal's own limit allows.
    #[default]
    Wait,
    /// It is given back with its old driver and tried again after the others.
    Release,
    /// It fails.
    Fail,
}

impl Default for LimitsSpec {
    fn default() -> Self {
        Self {
            driver_ready: default_driver_ready(),
            validation: default_validation(),
            failure_threshold: default_failure_threshold(),
            on_blocked: OnBlocked::default(),
            blocked_after: default_blocked_after(),
        }
    }
}

/// How pitcrew shares a node with health systems.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct HealthSpec {
    /// Whether and how nodes are kept from NVSentinel during their visit.
    #[serde(default)]
    pub nvsentinel: NvSentinelMode,
    /// Node conditions that must not be True when a node is given back.
    #[serde(default = "default_conditions")]
    pub conditions: Vec<String>,
    /// How long a node is watched after its visit: what happens to it in that time is told in the rollout.
    #[serde(default = "default_watch_after")]
    #[x_kube(validation = ("self.matches('^([0-9]+(d|h|m|s))+$')", "health.watchAfter must be a duration such as 10m"))]
    pub watch_after: String,
}

/// Whether and how nodes are kept from NVSentinel during their visit.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema)]
pub enum NvSentinelMode {
    /// As `Quarantine`, if NVSentinel is in the cluster.
    #[default]
    Auto,
    /// By the label `k8saas.nvidia.com/ManagedByNVSentinel=false`: no new quarantine, conditions are still written.
    Quarantine,
    /// By the label `nvsentinel.dgxc.nvidia.com/managed=false`: conditions are not written either, so it is removed before
    /// the node is given back.
    Everything,
    /// Not at all.
    Off,
}

impl Default for HealthSpec {
    fn default() -> Self {
        Self {
            nvsentinel: NvSentinelMode::default(),
            conditions: default_conditions(),
            watch_after: default_watch_after(),
        }
    }
}

/// What happens to pods that keep a handle on the driver: the DRA kubelet plugin, the operator's operands, others.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct ClientsSpec {
    /// When stale ones are replaced.
    #[serde(default)]
    pub refresh: Refresh,
    /// How long each may take to come back.
    #[serde(default = "default_client_timeout")]
    #[x_kube(validation = ("self.matches('^([0-9]+(d|h|m|s))+$')", "clients.timeout must be a duration such as 5m"))]
    pub timeout: String,
    /// Clients that pitcrew does not know by itself.
    #[serde(default)]
    #[schemars(length(max = 32))]
    pub extra: Vec<ExtraClientSpec>,
}

/// When stale clients are replaced.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema)]
pub enum Refresh {
    /// During a visit, before validation.
    #[default]
    Visit,
    /// Also when a driver restarted outside of any visit, a few nodes at a time.
    Always,
    /// Never, and nobody waits for them.
    Off,
}

/// A client that pitcrew does not know by itself. Only pods of DaemonSets are touched.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct ExtraClientSpec {
    /// The label selector that finds its pods.
    #[schemars(length(max = 1000))]
    #[x_kube(validation = ("self.size() > 0", "clients.extra.selector must not be empty: it would select every pod"))]
    pub selector: String,
    /// Only in these namespaces. Empty: in all.
    #[serde(default)]
    #[schemars(length(max = 32))]
    pub namespaces: Vec<String>,
    /// Who has a lower number comes back first. The DRA kubelet plugin has 0, the container toolkit 1, other operands 2.
    #[serde(default = "default_client_order")]
    pub order: u32,
    /// It waits for the driver's files before it starts, as the operator's operands do.
    #[serde(default)]
    pub waits_for_driver: bool,
    /// The node fails if it does not come back. Otherwise it goes on without it.
    #[serde(default = "default_true")]
    pub required: bool,
    /// How long it may take to come back. Not set: as the others.
    #[schemars(length(max = 20))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = ("self.matches('^([0-9]+(d|h|m|s))+$')", "clients.extra.timeout must be a duration such as 5m"))]
    pub timeout: Option<String>,
}

impl Default for ClientsSpec {
    fn default() -> Self {
        Self { refresh: Refresh::default(), timeout: default_client_timeout(), extra: Vec::new() }
    }
}

/// What the controller makes of a policy.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DriverPolicyStatus {
    /// The generation that this status speaks of.
    #[serde(default)]
    pub observed_generation: i64,
    /// Whether the policy is in force.
    #[serde(default)]
    pub ready: bool,
    /// What is wrong, or what is going on, in a sentence.
    #[serde(default)]
    pub message: String,
    /// Every value in force, and where it comes from.
    #[serde(default)]
    pub effective: BTreeMap<String, EffectiveValue>,
    /// What the version matrix says, if the policy names one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub matrix: Option<MatrixStatus>,
}

/// A value in force, and where it comes from.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq, JsonSchema)]
pub struct EffectiveValue {
    /// The value.
    pub value: String,
    /// The object that says so, or `default`.
    pub from: String,
}

fn default_label_domain() -> String {
    DEFAULT_LABEL_DOMAIN.to_owned()
}
fn default_driver_ready() -> String {
    "30m".to_owned()
}
fn default_validation() -> String {
    "10m".to_owned()
}
fn default_failure_threshold() -> IntOrString {
    IntOrString::String("20%".to_owned())
}
fn default_conditions() -> Vec<String> {
    vec![nvsentinel::DCGM_CONDITION.to_owned()]
}
fn default_watch_after() -> String {
    "10m".to_owned()
}
fn default_client_timeout() -> String {
    "5m".to_owned()
}
fn default_client_order() -> u32 {
    10
}
fn default_true() -> bool {
    true
}
fn default_blocked_after() -> String {
    "2h".to_owned()
}
fn default_namespace() -> String {
    DEFAULT_NAMESPACE.to_owned()
}
