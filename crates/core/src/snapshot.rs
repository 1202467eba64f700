//! The facts of one moment, as small ordered structs: all that the planner may know.
//!
//! The controller folds watch events into these; tests build them by hand. Every fact is here because a step of
//! the plan, a reason or a screen reads it.

mod node;
mod pod;

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use kube::core::Selector;
use serde_json::Value;

use crate::api::{DriverPolicySpec, DriverPolicyStatus, RolloutSpec, RolloutStatus};
use crate::clients::ClientKind;
use crate::contract::State;
use crate::gate::{GateJob, GatePod, JobFacts};
use crate::matrix::{self, Release};
use crate::names::{DriverName, NodeName, ObjectName, ResourceVersion, RevisionHash, Uid};
use crate::policy::{ClusterPolicyFacts, Source};
use crate::prometheus::{Answer, Question};
use crate::selector::Labels;
use crate::version::DriverVersion;

pub use node::*;
pub use pod::*;

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
    /// Jobs of gates …
    pub gate_jobs: BTreeMap<ObjectName, JobFacts>,
    /// … and their pods, wherever they are.
    pub gate_pods: BTreeMap<ObjectName, GatePod>,
    /// Signs of a GPU Operator.
    pub gpu_operator: GpuOperator,
    /// NVSentinel, if it is there.
    pub nvsentinel: Option<NvSentinel>,
    /// The version matrices in our ConfigMap; `None`: there is no such ConfigMap.
    pub matrices: Option<matrix::Files>,
    /// What Prometheus said, as far as this process remembers: what is forgotten is asked again.
    pub answers: BTreeMap<Question, Answer>,
    /// What was sent and has not been answered yet.
    pub in_flight: BTreeMap<Object, Pending>,
    /// What went wrong with an object, and when it may be tried again.
    pub setbacks: BTreeMap<Object, Setback>,
    /// Evictions that were accepted and whose deletion has not been seen yet.
    pub leaving: BTreeMap<Uid, Timestamp>,
    /// When earlier versions were put back, as far as this process remembers.
    pub put_back: BTreeMap<Object, Timestamp>,
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
            gate_jobs: BTreeMap::new(),
            gate_pods: BTreeMap::new(),
            gpu_operator: GpuOperator::default(),
            nvsentinel: None,
            matrices: None,
            answers: BTreeMap::new(),
            in_flight: BTreeMap::new(),
            setbacks: BTreeMap::new(),
            leaving: BTreeMap::new(),
            put_back: BTreeMap::new(),
            refreshes_clients: true,
            own_node: None,
            leading_since: now,
        }
    }

    /// The pods on a node.
    pub fn pods_on(&self, node: &NodeName) -> impl Iterator<Item = &Pod> {
        self.pods.get(node).into_iter().flat_map(BTreeMap::values)
    }

    /// A gate's Job with what its pods tell.
    pub fn gate_job(&self, name: &ObjectName) -> Option<GateJob> {
        let job = self.gate_jobs.get(name)?;
        // A Job's pods are called as it is, and a little more.
        let named = self.gate_pods.range(name..);
        let pods =
            named.take_while(|(pod, _)| pod.namespace == name.namespace && pod.name.starts_with(&*name.name));
        Some(job.with(pods.map(|(_, pod)| pod), self.now))
    }

    /// Whether something was sent for this object and not answered.
    pub fn is_busy(&self, object: &Object) -> bool {
        self.in_flight.contains_key(object)
    }
}

/// NVSentinel, as far as the cluster shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NvSentinel {
    /// Its circuit breaker has tripped: it processes nothing, healthy events included.
    pub tripped: bool,
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
    /// Who else keeps it as it is, by the marks on it: a GitOps system.
    pub manager: Option<Box<str>>,
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
    /// When it was first made. One that is used again keeps it.
    pub created: Timestamp,
    /// What its pods are labelled with.
    pub hash: RevisionHash,
    /// `DRIVER_CONFIG_DIGEST` of it.
    pub digest: Option<Box<str>>,
    /// The driver version, where the image's tag tells it.
    pub driver_version: Option<DriverVersion>,
}

impl TemplateRevision {
    /// It may be of the template that a DaemonSet has. News of a revision may come before news of its DaemonSet, which
    /// then still looks as if its controller had caught up.
    pub fn may_be_of(&self, daemon_set: &DaemonSet) -> bool {
        let DaemonSet { digest, driver_version, .. } = daemon_set;
        (self.digest.is_none() || self.digest == *digest)
            && (self.driver_version.is_none() || self.driver_version == *driver_version)
    }
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
    /// Who keeps these objects as they are, by the marks on them: a GitOps system.
    pub managers: BTreeMap<Source, String>,
}

impl Sources {
    /// The driver version that an object asks for.
    pub fn version_of(&self, source: &Source) -> Option<&str> {
        match source {
            Source::ClusterPolicy(name) => self.cluster_policies.get(name)?.driver["version"].as_str(),
            Source::NvidiaDriver(name) => self.nvidia_driver_versions.get(name).map(String::as_str),
            Source::NicClusterPolicy(name) => self.nic_cluster_policies.get(name)?["version"].as_str(),
            Source::DriverPolicy(_) => None,
        }
    }
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

impl Rollout {
    /// Its version is taken back, or somebody has asked for that.
    pub fn is_taken_back(&self) -> bool {
        self.spec.rollback.is_some() || self.status.as_ref().is_some_and(|status| status.rollback.is_some())
    }

    /// Something went wrong with its version, or a person has had enough of it.
    pub fn went_wrong(&self) -> bool {
        let stages = self.status.as_ref().map(|status| status.stages.as_slice()).unwrap_or_default();
        self.is_taken_back() || stages.iter().any(|stage| stage.phase.is_bad())
    }
}

/// Signs of a GPU Operator that may act on the same nodes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GpuOperator {
    /// Its leader's Lease: who, where, and until when it counts as held (by our own clock, from when we saw it renewed).
    pub lease: Option<(String, Timestamp)>,
    /// Its Deployments with available replicas.
    pub deployments: BTreeSet<String>,
    /// The version that each of its Deployments is labelled with, whether it runs or not.
    pub versions: BTreeMap<String, Release>,
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
    /// A gate's Job.
    Job(ObjectName),
    /// A DriverPolicy.
    DriverPolicy(String),
    /// A DaemonSet.
    DaemonSet(ObjectName),
    /// The object that an operator renders the driver from.
    Source(Source),
    /// Nothing is written: a question to a Prometheus.
    Question(Question),
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

impl Setback {
    /// What went wrong, in a few words.
    pub fn says(&self) -> &str {
        match &self.kind {
            SetbackKind::Stale => "what became of the last try is not known yet",
            SetbackKind::Refused => "it was refused",
            SetbackKind::Error(what) => what,
        }
    }
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
