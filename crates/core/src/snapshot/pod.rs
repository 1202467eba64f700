//! A pod, as far as it matters.

use jiff::Timestamp;

use crate::clients::ClientKind;
use crate::contract::REVISION_LABEL;
use crate::names::{NodeName, ObjectName, ResourceVersion, RevisionHash, Uid};
use crate::selector::Labels;

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
    /// How often that was.
    pub restarts: u32,
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
            restarts: 0,
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
    /// How many devices of any kind it asks for; a claim counts as one.
    pub fn devices(&self) -> u32 {
        let claims = u32::try_from(self.claims.len()).unwrap_or(u32::MAX);
        self.resources.iter().fold(claims, |sum, (_, amount)| sum.saturating_add(*amount))
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
    /// A ReplicaSet, StatefulSet or ReplicationController: each of its pods works for itself.
    Replicas,
    /// A Job, JobSet, MPIJob or anything else: its pods work together, and losing one may lose the work of all.
    Job,
}

impl OwnerKind {
    /// By its name in the API.
    pub fn of(kind: &str) -> Self {
        match kind {
            "DaemonSet" => OwnerKind::DaemonSet,
            "ReplicaSet" | "StatefulSet" | "ReplicationController" => OwnerKind::Replicas,
            _ => OwnerKind::Job,
        }
    }
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
