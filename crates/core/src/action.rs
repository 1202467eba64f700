//! Every effect that pitcrew may cause, as data: pinned to what was seen, idempotent, one object each.
//!
//! The planner leaves no choice to whoever carries an action out.

use jiff::Timestamp;
use serde_json::{Map, Value, json};

use crate::api::{DriverPolicyStatus, RolloutSpec, RolloutStatus};
use crate::contract::State;
use crate::names::{DriverName, NodeName, ObjectName, PoolName, ResourceVersion, RevisionHash, Uid};
use crate::policy::{Devices, Source};
use crate::prometheus::Question;
use crate::snapshot::Object;

/// One effect.
#[derive(Clone, PartialEq, Debug)]
pub enum Action {
    /// Change a node: label, cordon and record in one write.
    PatchNode(NodePatch),
    /// Ask a pod to save its work until then.
    AskCheckpoint(PodRef, Timestamp),
    /// Ask a pod to leave, through its budgets.
    Evict(PodRef),
    /// Tell a pod to leave, past its budgets, with its own grace period.
    Delete(PodRef, DeleteWhy),
    /// Look at the node once more, then delete the driver pod.
    RestartDriver(RestartDriver),
    /// Read a node again: a write's outcome is unknown, or a conflict was not followed by a newer version.
    ReadNode(NodeName),
    /// Begin a rollout.
    CreateRollout {
        /// Its name.
        name: String,
        /// What it is for.
        spec: RolloutSpec,
    },
    /// Say how far a rollout is.
    RolloutStatus {
        /// Its name.
        name: String,
        /// The version that the plan was made from: what stages are doing is decided by what was said of them.
        seen: ResourceVersion,
        /// What to say.
        status: RolloutStatus,
        /// What nodes are told of it when it is said.
        events: Vec<(NodeName, Event)>,
    },
    /// Put an earlier version back where it came from.
    PutBack(PutBack),
    /// Forget an old rollout.
    DeleteRollout {
        /// Its name.
        name: String,
        /// The version that was seen.
        seen: ResourceVersion,
    },
    /// Have a gate checked.
    CreateJob {
        /// The Job's name: the same for the same check.
        name: ObjectName,
        /// The Job.
        body: Box<Value>,
    },
    /// Ask a Prometheus. Whatever comes of it, a time-out included, is an answer.
    Ask {
        /// What.
        question: Question,
        /// The moment of the plan: the answer counts as of then.
        at: Timestamp,
    },
    /// Say what became of a policy.
    PolicyStatus {
        /// The DriverPolicy.
        name: String,
        /// What to say.
        status: DriverPolicyStatus,
    },
    /// Say in an event why a policy that has no status of ours is not followed.
    Complain {
        /// The policy object.
        source: Source,
        /// The sentence.
        message: String,
    },
}

impl Action {
    /// The object it writes to. At most one action is in flight for each.
    pub fn object(&self) -> Option<Object> {
        match self {
            Action::PatchNode(patch) => Some(Object::Node(patch.node.clone())),
            Action::ReadNode(node) => Some(Object::Node(node.clone())),
            Action::AskCheckpoint(pod, _) | Action::Evict(pod) | Action::Delete(pod, _) => {
                Some(Object::Pod(pod.name.clone()))
            }
            Action::RestartDriver(restart) => Some(Object::Pod(restart.pod.name.clone())),
            Action::CreateRollout { name, .. }
            | Action::RolloutStatus { name, .. }
            | Action::DeleteRollout { name, .. } => Some(Object::Rollout(name.clone())),
            Action::PutBack(way) => Some(way.object()),
            Action::CreateJob { name, .. } => Some(Object::Job(name.clone())),
            Action::Ask { question, .. } => Some(Object::Question(question.clone())),
            Action::PolicyStatus { name, .. } => Some(Object::DriverPolicy(name.clone())),
            Action::Complain { .. } => None,
        }
    }

    /// The node that it affects.
    pub fn node(&self) -> Option<&NodeName> {
        match self {
            Action::PatchNode(patch) => Some(&patch.node),
            Action::ReadNode(node) => Some(node),
            Action::AskCheckpoint(pod, _) | Action::Evict(pod) | Action::Delete(pod, _) => Some(&pod.node),
            Action::RestartDriver(restart) => Some(&restart.pod.node),
            _ => None,
        }
    }
}

/// Where a version comes from, and how it gets back there. Refused if somebody has changed it meanwhile.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PutBack {
    /// The version in the object that an operator renders the driver from.
    Version {
        /// The object.
        source: Source,
        /// What it says.
        from: String,
        /// What it said before.
        to: String,
    },
    /// The template of a DaemonSet that nobody renders.
    Template {
        /// The DaemonSet.
        daemon_set: ObjectName,
        /// Its UID.
        uid: Uid,
        /// What was seen of it: a newer one is somebody else's.
        generation: i64,
        /// The earlier revision.
        revision: RevisionHash,
    },
}

impl PutBack {
    /// The object that it writes to.
    pub fn object(&self) -> Object {
        match self {
            PutBack::Version { source, .. } => Object::Source(source.clone()),
            PutBack::Template { daemon_set, .. } => Object::DaemonSet(daemon_set.clone()),
        }
    }
}

/// One write to a node, pinned to the version that was seen.
#[derive(Clone, PartialEq, Debug)]
pub struct NodePatch {
    /// The node.
    pub node: NodeName,
    /// The pool on whose behalf.
    pub pool: PoolName,
    /// The version that the plan was made from: anything newer refuses the write.
    pub seen: ResourceVersion,
    /// Labels to set, or to remove.
    pub labels: Changes,
    /// Annotations to set, or to remove.
    pub annotations: Changes,
    /// Cordon or uncordon.
    pub unschedulable: Option<bool>,
    /// All of its taints, if they are changed.
    pub taints: Option<Vec<Value>>,
    /// The transition that this write makes, if it makes one.
    pub to: Option<Transition>,
    /// The event that tells of it.
    pub event: Option<Event>,
    /// Looked at once more before the write: nobody of these may be on the node.
    pub unless_used: Option<Box<Users>>,
}

/// Labels or annotations to set, or to remove: a handful at most.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Changes(Vec<(String, Option<String>)>);

impl Changes {
    /// Sets `key`, or removes it. Each key is changed once.
    pub fn set(&mut self, key: &str, value: Option<String>) {
        self.0.push((key.to_owned(), value));
    }

    /// The new value of `key`, if it is changed; `Some(None)` removes it.
    pub fn get(&self, key: &str) -> Option<Option<&str>> {
        self.iter().find(|(changed, _)| *changed == key).map(|(_, value)| value)
    }

    /// Whether nothing is changed.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Each key with its new value.
    pub fn iter(&self) -> impl Iterator<Item = (&str, Option<&str>)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value.as_deref()))
    }
}

impl From<(&str, Option<String>)> for Changes {
    fn from((key, value): (&str, Option<String>)) -> Self {
        Self(vec![(key.to_owned(), value)])
    }
}

/// A transition of one driver's state on a node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Transition {
    /// The driver.
    pub driver: DriverName,
    /// From.
    pub from: State,
    /// To.
    pub to: State,
}

/// An event to be written about a node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Event {
    /// Something went wrong.
    pub warning: bool,
    /// The reason that people grep for.
    pub reason: String,
    /// The sentence.
    pub message: String,
}

impl NodePatch {
    /// The merge patch. It carries the seen version, so it is refused if anybody wrote in between.
    pub fn body(&self) -> Value {
        let map = |changes: &Changes| -> Map<String, Value> {
            changes.iter().map(|(key, value)| (key.to_owned(), json!(value))).collect()
        };
        let mut metadata = Map::from_iter([("resourceVersion".to_owned(), json!(self.seen.to_string()))]);
        if !self.labels.is_empty() {
            metadata.insert("labels".to_owned(), Value::Object(map(&self.labels)));
        }
        if !self.annotations.is_empty() {
            metadata.insert("annotations".to_owned(), Value::Object(map(&self.annotations)));
        }
        let mut body = Map::from_iter([("metadata".to_owned(), Value::Object(metadata))]);
        let mut spec = Map::new();
        if let Some(unschedulable) = self.unschedulable {
            // `null` removes the field, as an uncordon by kubectl does; `false` would stay in the object.
            let value = if unschedulable { json!(true) } else { Value::Null };
            spec.insert("unschedulable".to_owned(), value);
        }
        if let Some(taints) = &self.taints {
            spec.insert("taints".to_owned(), if taints.is_empty() { Value::Null } else { json!(taints) });
        }
        if !spec.is_empty() {
            body.insert("spec".to_owned(), Value::Object(spec));
        }
        Value::Object(body)
    }
}

/// A pod, so that no other pod of that name is ever meant.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PodRef {
    /// Its name.
    pub name: ObjectName,
    /// Its UID.
    pub uid: Uid,
    /// Its node.
    pub node: NodeName,
}

/// Why a pod is deleted rather than evicted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeleteWhy {
    /// It did not leave in time and the policy says `timeoutAction: Delete`.
    TimedOut,
    /// A validator that proved the driver before this one.
    StaleValidator,
    /// A client that holds on to the driver before this one.
    StaleClient,
}

/// The point of no return: the driver pod is deleted, after one more look.
#[derive(Clone, PartialEq, Debug)]
pub struct RestartDriver {
    /// The driver.
    pub driver: DriverName,
    /// The driver pod.
    pub pod: PodRef,
    /// The node's UID.
    pub node_uid: Uid,
    /// The installed driver stays what it is: pods may go on using it.
    pub in_place: bool,
    /// Who must be gone.
    pub users: Users,
}

/// Who must not be on a node when its driver is taken away, or loaded.
#[derive(Clone, PartialEq, Debug)]
pub struct Users {
    /// Pods that use any of these.
    pub devices: Devices,
    /// Apart from these, whose resource claims have nothing to do with the device.
    pub harmless: Vec<Uid>,
}
