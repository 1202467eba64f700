//! The facts of one moment, as small ordered structs: all that the planner may know.
//!
//! The controller folds watch events into these; tests build them by hand. Every fact is here because a step of
//! the plan, a reason or a screen reads it.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use kube::core::Selector;
use serde_json::Value;

use crate::api::{DriverPolicySpec, DriverPolicyStatus, RolloutSpec, RolloutStatus};
use crate::clients::ClientKind;
use crate::contract::{
    HEALTH_HOLD_ANNOTATION, LAST_VISIT_ANNOTATION, REVISION_LABEL, State, VISIT_ANNOTATION, is_relevant,
};
use crate::health::HealthHold;
use crate::names::{DriverName, NodeName, ObjectName, ResourceVersion, RevisionHash, Uid};
use crate::policy::{ClusterPolicyFacts, Source};
use crate::selector::Labels;
use crate::version::DriverVersion;
use crate::visit::{LastVisit, Unreadable, Visit};

/// The facts of one moment.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// The moment.
    pub now: Timestamp,
    /// Where driver DaemonSets are when the policy does not say.
    pub namespace: String,
    /// All nodes.
    pub nodes: BTreeMap<NodeName, Node>,
    /// Pods that are bound to a node, by node.
    pub pods: BTreeMap<NodeName, BTreeMap<ObjectName, Pod>>,
    /// DaemonSets, by UID.
    pub daemon_sets: BTreeMap<Uid, DaemonSet>,
    /// Template revisions, by UID of the revision object.
    pub revisions: BTreeMap<Uid, TemplateRevision>,
    /// PodDisruptionBudgets.
    pub budgets: BTreeMap<ObjectName, Budget>,
    /// Resource claims (DRA).
    pub claims: BTreeMap<ObjectName, Claim>,
    /// What NVIDIA's DRA driver offers, by name; `None`: nobody can tell.
    pub slices: Option<BTreeMap<Box<str>, Slice>>,
    /// Policy objects.
    pub sources: Sources,
    /// Rollouts so far.
    pub rollouts: BTreeMap<String, Rollout>,
    /// Signs of a GPU Operator.
    pub gpu_operator: GpuOperator,
    /// NVSentinel, if it is there.
    pub nvsentinel: Option<NvSentinel>,
    /// What was sent and has not been answered yet.
    pub in_flight: BTreeMap<Object, Pending>,
    /// What went wrong with an object, and when it may be tried again.
    pub setbacks: BTreeMap<Object, Setback>,
    /// Evictions that were accepted and whose deletion has not been seen yet.
    pub leaving: BTreeMap<Uid, Timestamp>,
    /// Driver clients are looked after, if the policy says so.
    pub refreshes_clients: bool,
    /// The node on which this process runs, if it runs on one.
    pub own_node: Option<NodeName>,
    /// Since when this process leads. Deadlines do not fire before it has tried once.
    pub leading_since: Timestamp,
}

impl Snapshot {
    /// An empty cluster at `now`.
    pub fn new(now: Timestamp, namespace: &str) -> Self {
        Self {
            now,
            namespace: namespace.to_owned(),
            nodes: BTreeMap::new(),
            pods: BTreeMap::new(),
            daemon_sets: BTreeMap::new(),
            revisions: BTreeMap::new(),
            budgets: BTreeMap::new(),
            claims: BTreeMap::new(),
            slices: None,
            sources: Sources::default(),
            rollouts: BTreeMap::new(),
            gpu_operator: GpuOperator::default(),
            nvsentinel: None,
            in_flight: BTreeMap::new(),
            setbacks: BTreeMap::new(),
            leaving: BTreeMap::new(),
            refreshes_clients: true,
            own_node: None,
            leading_since: now,
        }
    }

    /// The pods on a node.
    pub fn pods_on(&self, node: &NodeName) -> impl Iterator<Item = &Pod> {
        self.pods.get(node).into_iter().flat_map(BTreeMap::values)
    }

    /// Whether something was sent for this object and not answered.
    pub fn is_busy(&self, object: &Object) -> bool {
        self.in_flight.contains_key(object)
    }
}

/// A node, as far as it matters.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Its UID: another node may come back under the same name.
    pub uid: Uid,
    /// The version that these facts are from.
    pub version: ResourceVersion,
    labels: Labels,
    /// Those of the labels that the contract names: a node carries dozens, and every pass looks for these few.
    marks: Labels,
    /// The annotations of the contract; all others are dropped on arrival.
    pub annotations: Labels,
    /// `spec.unschedulable`.
    pub unschedulable: bool,
    /// The Ready condition is True.
    pub ready: bool,
    /// Conditions that others than the kubelet set.
    pub conditions: Vec<Condition>,
    /// Extended resources that it offers, with the amount.
    pub allocatable: Vec<(Box<str>, u32)>,
    /// Differs after each boot.
    pub boot_id: Box<str>,
    /// It has the taint of somebody who repairs it.
    pub remediated: bool,
    /// The visit record, taken apart once on arrival …
    pub visit: Option<Result<Visit, Unreadable>>,
    /// … what is left of the last one, …
    pub last_visit: Option<LastVisit>,
    /// … and who keeps health systems off it.
    pub health_hold: Option<HealthHold>,
}

impl Node {
    /// A node that is ready and takes work.
    pub fn new(uid: Uid, version: ResourceVersion, labels: Labels, mut annotations: Labels) -> Self {
        annotations.retain(|key, _| is_relevant(key));
        let marks = labels.iter().filter(|(key, _)| is_relevant(key));
        let mut node = Self {
            uid,
            version,
            marks: marks.map(|(key, value)| (key.clone(), value.clone())).collect(),
            labels,
            visit: None,
            last_visit: None,
            health_hold: None,
            annotations,
            unschedulable: false,
            ready: true,
            conditions: Vec::new(),
            allocatable: Vec::new(),
            boot_id: "".into(),
            remediated: false,
        };
        node.read_annotations();
        node
    }

    /// All labels: policies may select by any.
    pub fn labels(&self) -> &Labels {
        &self.labels
    }

    /// A label of the contract.
    pub fn mark(&self, key: &str) -> Option<&str> {
        self.marks.get(key).map(String::as_str)
    }

    /// Sets or removes a label.
    pub fn set_label(&mut self, key: &str, value: Option<&str>) {
        let concerned = [Some(&mut self.labels), is_relevant(key).then_some(&mut self.marks)];
        for labels in concerned.into_iter().flatten() {
            match value {
                Some(value) => drop(labels.insert(key.to_owned(), value.to_owned())),
                None => drop(labels.remove(key)),
            }
        }
    }

    /// Takes our own annotations apart: every pass looks at them, and they change only with the node.
    pub fn read_annotations(&mut self) {
        let text = |key: &str| self.annotations.get(key).map(String::as_str);
        self.visit = text(VISIT_ANNOTATION).map(Visit::parse);
        // One that nobody can read says nothing; it is written anew by the next visit.
        self.last_visit = text(LAST_VISIT_ANNOTATION).and_then(|text| serde_json::from_str(text).ok());
        self.health_hold = text(HEALTH_HOLD_ANNOTATION).and_then(|text| serde_json::from_str(text).ok());
    }
    /// How many devices it offers, as far as `counts` says that they are some.
    pub fn devices(&self, counts: impl Fn(&str) -> bool) -> u32 {
        let amounts = self.allocatable.iter().filter(|(name, _)| counts(name)).map(|(_, amount)| *amount);
        amounts.fold(0, u32::saturating_add)
    }
    /// Takes no new work, for whatever cause.
    pub fn is_out(&self) -> bool {
        self.unschedulable || !self.ready
    }
}

/// A node condition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    /// Its type.
    pub kind: Box<str>,
    /// Its status is True; for the conditions of health systems that is bad.
    pub holds: bool,
    /// When it was last looked at.
    pub heartbeat: Option<Timestamp>,
}

/// NVSentinel, as far as the cluster shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NvSentinel {
    /// Its circuit breaker has tripped: it processes nothing, healthy events included.
    pub tripped: bool,
}

/// A pod that is bound to a node.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "facts that have nothing to do with each other")]
pub struct Pod {
    /// Its name.
    pub name: ObjectName,
    /// Its UID.
    pub uid: Uid,
    /// The version that these facts are from.
    pub version: ResourceVersion,
    /// Its node.
    pub node: NodeName,
    /// All labels: budgets and policies may select by any.
    pub labels: Labels,
    /// The template revision that it was made from, if a DaemonSet made it.
    pub revision: Option<RevisionHash>,
    /// The object that would make it again.
    pub owner: Option<Owner>,
    /// How far it is.
    pub phase: Phase,
    /// The Ready condition is True.
    pub ready: bool,
    /// When it has to be gone, once it was told to go.
    pub deleting: Option<Timestamp>,
    /// When it was made.
    pub created: Timestamp,
    /// When its first container started, while that runs.
    pub started: Option<Timestamp>,
    /// When the oldest of its running main containers started.
    pub oldest_started: Option<Timestamp>,
    /// Since when it is Ready.
    pub ready_since: Option<Timestamp>,
    /// Differs each time its first container starts again.
    pub incarnation: u64,
    /// What it is to the driver, if it is a known client.
    pub client: Option<ClientKind>,
    /// Extended resources that any of its containers asks for, with the amount.
    pub resources: Vec<(Box<str>, u32)>,
    /// The resource claims (DRA) that it uses, in its namespace.
    pub claims: Vec<Box<str>>,
    /// Its runtime class.
    pub runtime_class: Option<Box<str>>,
    /// Paths of the node that it mounts.
    pub host_paths: Vec<Box<str>>,
    /// Until when it was given time to save its work.
    pub checkpoint_requested: Option<Timestamp>,
    /// It says that it has.
    pub checkpointed: bool,
    /// A finalizer that keeps it, once it was told to go.
    pub finalizer: Option<Box<str>>,
    /// It has an emptyDir volume.
    pub empty_dir: bool,
    /// It is the kubelet's own (static) pod.
    pub mirror: bool,
    /// The init container that runs now.
    pub initializing: Option<Box<str>>,
    /// What a container says that does not run.
    pub trouble: Option<Trouble>,
    /// `DRIVER_CONFIG_DIGEST`, in driver pods.
    pub digest: Option<Box<str>>,
    /// The image of the first container.
    pub image: Box<str>,
}

impl Pod {
    /// A pod that runs and is ready, and of which nothing else is known.
    pub fn ready(name: ObjectName, uid: Uid, version: ResourceVersion, node: NodeName) -> Self {
        Self {
            name,
            uid,
            version,
            node,
            labels: Labels::new(),
            revision: None,
            owner: None,
            phase: Phase::Running,
            ready: true,
            deleting: None,
            created: Timestamp::UNIX_EPOCH,
            started: None,
            oldest_started: None,
            ready_since: None,
            incarnation: 0,
            client: None,
            resources: vec![],
            claims: vec![],
            runtime_class: None,
            host_paths: vec![],
            checkpoint_requested: None,
            checkpointed: false,
            finalizer: None,
            empty_dir: false,
            mirror: false,
            initializing: None,
            trouble: None,
            digest: None,
            image: "".into(),
        }
    }

    /// Reads the template revision out of a pod's labels.
    pub fn read_revision(labels: &Labels) -> Option<RevisionHash> {
        labels.get(REVISION_LABEL).map(|hash| hash.as_str().into())
    }
    /// Succeeded or Failed: it holds nothing any more.
    pub fn is_finished(&self) -> bool {
        matches!(self.phase, Phase::Succeeded | Phase::Failed)
    }
    /// Made and kept by a DaemonSet.
    pub fn is_daemon(&self) -> bool {
        self.owner.as_ref().is_some_and(|o| o.kind == OwnerKind::DaemonSet)
    }
}

/// `status.phase`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Not all containers have started.
    Pending,
    /// At least one container runs.
    Running,
    /// All containers ended well.
    Succeeded,
    /// All containers ended, at least one badly.
    Failed,
    /// The node does not tell.
    Unknown,
}

/// The controller that would make a pod again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// What it is.
    pub kind: OwnerKind,
    /// Its name.
    pub name: Box<str>,
    /// Its UID.
    pub uid: Uid,
}

/// Kinds of controllers that are told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnerKind {
    /// Puts its pods on cordoned nodes too.
    DaemonSet,
    /// All others.
    Other,
}

/// What a container says that does not run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// The container.
    pub container: Box<str>,
    /// `CrashLoopBackOff`, `ImagePullBackOff`, …
    pub reason: Box<str>,
    /// What the kubelet adds.
    pub message: Box<str>,
    /// How often it was restarted.
    pub restarts: u32,
}

impl Trouble {
    /// One failure may pass; a loop, or an image that is not there, does not.
    pub fn is_serious(&self) -> bool {
        self.restarts > 0
            || ["BackOff", "ImagePull", "InvalidImage", "CreateContainer", "Unschedulable"]
                .iter()
                .any(|sign| self.reason.contains(sign))
    }
}

/// A DaemonSet.
#[derive(Clone, Debug, PartialEq)]
pub struct DaemonSet {
    /// Its name.
    pub name: ObjectName,
    /// Its UID.
    pub uid: Uid,
    /// Its labels.
    pub labels: Labels,
    /// The generation that was asked for.
    pub generation: i64,
    /// The generation that its controller has seen. Revisions are complete only when both are equal.
    pub observed_generation: i64,
    /// `updateStrategy: OnDelete`.
    pub on_delete: bool,
    /// Nodes that should run it have these labels.
    pub node_selector: Labels,
    /// The policy object that renders it, if one does.
    pub rendered_by: Option<Source>,
    /// `DRIVER_CONFIG_DIGEST` of its template.
    pub digest: Option<Box<str>>,
    /// The driver version, where the image's tag tells it.
    pub driver_version: Option<DriverVersion>,
    /// The labels of its pods.
    pub pod_labels: Labels,
    /// What its pods are to the driver, if they are known clients.
    pub client: Option<ClientKind>,
}

/// One revision of a DaemonSet's template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TemplateRevision {
    /// The DaemonSet's UID.
    pub owner: Uid,
    /// The newest has the highest.
    pub number: i64,
    /// What its pods are labelled with.
    pub hash: RevisionHash,
}

/// A PodDisruptionBudget.
#[derive(Clone, Debug, PartialEq)]
pub struct Budget {
    /// Which pods of its namespace; `None` selects none.
    pub selector: Option<Selector>,
    /// How many may be evicted now.
    pub allowed: i32,
    /// Healthy pods now.
    pub healthy: i32,
    /// Healthy pods that it wants.
    pub desired: i32,
    /// Pods that it counts.
    pub expected: i32,
    /// Its status speaks of its spec.
    pub current: bool,
}

impl Budget {
    /// It wants all of its pods healthy: as long as nobody scales or edits, no eviction will ever be allowed.
    pub fn never_allows(&self) -> bool {
        self.current && self.expected > 0 && self.desired >= self.expected
    }
}

/// A resource claim.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Claim {
    /// The DRA drivers that have allocated devices to it, for use (not for administration).
    pub drivers: BTreeSet<String>,
}

/// One ResourceSlice of NVIDIA's DRA driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slice {
    /// The node whose devices it lists.
    pub node: NodeName,
    /// The pool that it is a part of.
    pub pool: Box<str>,
    /// The newest generation of a pool counts.
    pub generation: i64,
    /// How many slices that has.
    pub count: i64,
    /// The driver versions that its devices tell.
    pub versions: BTreeSet<DriverVersion>,
}

/// Policy objects, by name.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// Ours.
    pub driver_policies: BTreeMap<String, DriverPolicySpec>,
    /// What we last said about ours, with generation.
    pub driver_policy_status: BTreeMap<String, (i64, DriverPolicyStatus)>,
    /// The GPU Operator's.
    pub cluster_policies: BTreeMap<String, ClusterPolicyFacts>,
    /// `spec.upgradePolicy` of each NVIDIADriver.
    pub nvidia_drivers: BTreeMap<String, Value>,
    /// `spec.version` of each NVIDIADriver.
    pub nvidia_driver_versions: BTreeMap<String, String>,
    /// `spec.ofedDriver` of each NicClusterPolicy; null where no driver is installed.
    pub nic_cluster_policies: BTreeMap<String, Value>,
}

/// A rollout so far.
#[derive(Clone, Debug, PartialEq)]
pub struct Rollout {
    /// The version that these facts are from.
    pub version: ResourceVersion,
    /// What it is for.
    pub spec: RolloutSpec,
    /// What we last said about it.
    pub status: Option<RolloutStatus>,
    /// When we last said it, as far as this process remembers: progress is told at a measured pace.
    pub said_at: Option<Timestamp>,
}

/// Signs of a GPU Operator that may act on the same nodes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GpuOperator {
    /// Its leader's Lease: who, where, and until when it counts as held (by our own clock, from when we saw it renewed).
    pub lease: Option<(String, Timestamp)>,
    /// Its Deployments with available replicas.
    pub deployments: BTreeSet<String>,
}

impl GpuOperator {
    /// Who is live at `now`, if anybody is.
    pub fn live(&self, now: Timestamp) -> Option<String> {
        let held = self.lease.as_ref().filter(|(_, until)| *until > now).map(|(who, _)| who.clone());
        self.deployments.first().cloned().or(held)
    }
}

/// An object that an action writes to: at most one action is in flight for each.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Object {
    /// A node.
    Node(NodeName),
    /// A pod.
    Pod(ObjectName),
    /// A rollout.
    Rollout(String),
    /// A DriverPolicy.
    DriverPolicy(String),
}

/// What was sent for an object.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Pending {
    /// The state that the node is being moved to.
    pub moving_to: Option<(DriverName, State)>,
    /// The node that the pod is on.
    pub on_node: Option<NodeName>,
}

/// Something went wrong with an object.
#[derive(Clone, PartialEq, Debug)]
pub struct Setback {
    /// The version that the failed write was based on: a newer one makes the setback void if it was a conflict.
    pub seen: ResourceVersion,
    /// What kind of setback.
    pub kind: SetbackKind,
    /// How often in a row.
    pub attempts: u32,
    /// Not to be tried again before.
    pub retry_at: Timestamp,
}

/// What went wrong.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SetbackKind {
    /// The object changed in between, or the answer never came: wait for a newer version, or read it.
    Stale,
    /// A budget said no to the eviction.
    Refused,
    /// The API said no.
    Error(String),
}

/// How long an accepted eviction is trusted before the pod is asked again to leave.
pub const LEAVING_TRUST: SignedDuration = SignedDuration::from_secs(60);
