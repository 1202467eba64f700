//! Why a node is where it is. Every "no" and every "not yet" of the planner is one of these.
//!
//! One [`Display`](fmt::Display) makes the sentence for the status line, the event, the log and the screen;
//! [`Reason::code`] is the metric label. There is no "unknown".
//!
//! ```text
//!  about.rs     one node in one pool: what an answer may look at
//!  culprit.rs   the objects responsible          next.rs    what happens next, and whether by itself
//!  advice.rs    what a person can do, as commands to paste
//!  words.rs     the sentence
//! ```

mod about;
mod advice;
mod culprit;
mod next;
mod words;

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};

use crate::api::StagePhase;
use crate::contract::State;
use crate::matrix::Unlisted;
use crate::names::{DriverName, NodeName, ObjectName};
use crate::version::DriverVersion;
use crate::visit::{Cause, Finding};

pub use about::{About, Thing};
pub use advice::{Advice, advice};
pub use culprit::culprits;
pub use next::{Motion, Next, next};
pub(crate) use words::list;

/// How a node feels about its place.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Kind {
    /// It is where it should be.
    Done,
    /// It is on its way.
    Moving,
    /// It will go on by itself.
    Waiting,
    /// Somebody said stop.
    Paused,
    /// It will not go on before something outside changes.
    Blocked,
    /// It went wrong.
    Failed,
}

/// Why a node is where it is.
#[derive(Clone, PartialEq, Debug)]
pub enum Reason {
    /// The driver pod is up to date and ready.
    UpToDate,
    /// On the way back to this version the node has it already, from an earlier template, and is left alone.
    SameVersion {
        /// The version.
        version: DriverVersion,
    },
    /// Up to date, but its driver pod is not ready.
    DriverNotReady {
        /// The driver pod.
        pod: ObjectName,
        /// What its containers say.
        says: String,
    },
    /// The write that moves it on is being made.
    Moving {
        /// Where to.
        to: State,
    },
    /// A write for this node is under way.
    Writing,
    /// The DaemonSet controller has not seen the newest template yet.
    RevisionPending {
        /// The DaemonSet.
        daemon_set: ObjectName,
    },
    /// It has no driver pod.
    NoDriverPod {
        /// The DaemonSet that should make one; `None`: none of this driver is meant for the node any more.
        daemon_set: Option<ObjectName>,
        /// When that becomes a failure.
        until: Option<Timestamp>,
    },
    /// The limits allow no more nodes now.
    NoSlot {
        /// The limit that binds.
        limit: Limit,
        /// How many nodes are before it.
        ahead: usize,
        /// How many start with it, itself included.
        together: usize,
    },
    /// No window is open in which a visit would end in time.
    WindowClosed {
        /// When one opens; `None`: not as far as anybody looks.
        opens: Option<Timestamp>,
        /// How long a visit is expected to take.
        needs: SignedDuration,
        /// When the one that is open now closes, which is too soon.
        closes: Option<Timestamp>,
    },
    /// Its atom goes as one, and another node of it does not start.
    AtomWaits {
        /// The atom, as `label=value`.
        atom: String,
        /// The node that holds it.
        node: NodeName,
        /// Why that one does not start.
        why: Box<Reason>,
    },
    /// Its atom goes as one, and a limit can never take it as one.
    AtomTooLarge {
        /// The atom, as `label=value`.
        atom: String,
        /// How many nodes would start.
        nodes: usize,
        /// The limit.
        narrow: Narrow,
        /// How many nodes it takes.
        limit: usize,
    },
    /// So many nodes of its group are out that no more are started.
    SpreadFull {
        /// The group, as `label=value`.
        group: String,
        /// How many of its nodes may be out.
        max: usize,
        /// Those that are.
        out: Vec<NodeName>,
    },
    /// Left out by its label.
    Skipped {
        /// The label.
        label: String,
    },
    /// Another driver's walk comes first.
    OtherDriver {
        /// Which.
        driver: DriverName,
    },
    /// The node is not ready, so nothing could run on it.
    NodeNotReady {
        /// When that becomes a failure.
        until: Option<Timestamp>,
    },
    /// Only a reboot brings its driver back: its driver manager could unload only a part of the old one.
    NeedsReboot {
        /// What the driver manager says.
        why: String,
        /// When that becomes a failure.
        until: Option<Timestamp>,
    },
    /// A health system is at the node.
    Quarantined {
        /// What it has done, in a sentence.
        what: String,
    },
    /// NVSentinel's circuit breaker has tripped: too many nodes are in quarantine to take another one out.
    BreakerTripped,
    /// Selected pods are given time to complete.
    WaitingForJobs {
        /// Which.
        pods: Vec<ObjectName>,
        /// Until when; `None`: as long as they take.
        until: Option<Timestamp>,
    },
    /// Pods are given time to save their work.
    Checkpointing {
        /// Which have not yet.
        pods: Vec<ObjectName>,
        /// Until when.
        until: Timestamp,
    },
    /// Pods are leaving.
    PodsLeaving {
        /// Which.
        pods: Vec<ObjectName>,
        /// When that becomes a failure.
        until: Option<Timestamp>,
    },
    /// A budget allows no eviction now.
    BudgetBlocks {
        /// The PodDisruptionBudget.
        budget: ObjectName,
        /// The pod that cannot leave.
        pod: ObjectName,
        /// Healthy pods now, and how many it wants.
        healthy: (i32, i32),
        /// When that becomes a failure.
        until: Option<Timestamp>,
    },
    /// A budget wants all of its pods: it will never allow an eviction as it is.
    BudgetNever {
        /// The PodDisruptionBudget.
        budget: ObjectName,
        /// The pod that cannot leave.
        pod: ObjectName,
        /// How many pods it counts, and how many of them it wants healthy.
        pods: (i32, i32),
    },
    /// A pod was told to go, its time is over, and it is still there.
    PodStuck {
        /// Which.
        pod: ObjectName,
        /// What keeps it.
        why: String,
        /// When that becomes a failure.
        until: Option<Timestamp>,
    },
    /// So many nodes failed that no more are started.
    TooManyFailed {
        /// The stage whose limit that is; none: of the whole pool.
        stage: Option<String>,
        /// Failed nodes.
        failed: usize,
        /// How many are accepted.
        limit: usize,
    },
    /// The stages before its own come first.
    StageClosed {
        /// Its stage.
        stage: String,
        /// The one that it waits for.
        before: String,
        /// What that one is doing.
        phase: StagePhase,
        /// What keeps it from going on beside time.
        why: Option<String>,
    },
    /// A stage has failed, so nothing new starts.
    StageFailed {
        /// Which.
        stage: String,
        /// Why.
        why: String,
    },
    /// This version went wrong before, and nobody has cleared it.
    Condemned {
        /// In which rollout.
        rollout: String,
        /// What went wrong.
        why: String,
    },
    /// It never had what is taken back, and the way back leaves it alone.
    LeftAlone {
        /// The rollout that is the way back.
        rollout: String,
    },
    /// Nobody can say that the version matrix lists this version, and the policy wants that.
    NotInMatrix {
        /// Where the matrix is, and why: one answer for all nodes of a DaemonSet.
        unlisted: Arc<Unlisted>,
    },
    /// The rollout was aborted.
    Aborted {
        /// Which.
        rollout: String,
    },
    /// Pods that the policy does not allow to evict.
    CannotBeEmptied {
        /// Which, and what would allow it.
        found: Finding,
    },
    /// The old driver pod is on its way out.
    DriverStopping {
        /// Which.
        pod: ObjectName,
        /// When that becomes a failure.
        until: Timestamp,
    },
    /// The new driver pod is on its way up.
    DriverStarting {
        /// Which.
        pod: ObjectName,
        /// What its containers say.
        says: String,
        /// When that becomes a failure.
        until: Timestamp,
    },
    /// The driver's clients are on their way back.
    ClientsComeBack {
        /// What is missing.
        found: Finding,
        /// When that becomes a failure.
        until: Timestamp,
    },
    /// In service, but a client holds on to a driver that is gone.
    ClientsStale {
        /// Which, and why.
        found: Finding,
        /// Who replaces it.
        remedy: Remedy,
    },
    /// The new driver has to prove itself.
    Validating {
        /// What is missing.
        found: Finding,
        /// When that becomes a failure. `None`: work on the device is waited for that nobody asked to leave.
        until: Option<Timestamp>,
    },
    /// The policy says `autoUpgrade: false`.
    Paused,
    /// It failed and stays out.
    Failed {
        /// Why.
        cause: Cause,
    },
    /// The label says that it failed; nobody wrote down why.
    FailedWithoutRecord,
    /// The pool is frozen as a whole.
    PoolFrozen {
        /// Why, in a sentence.
        why: String,
    },
    /// More than one policy claims this driver on this node.
    TwoPolicies {
        /// Which.
        pools: Vec<String>,
    },
    /// The state label has a value that nobody knows.
    UnknownLabel {
        /// The label.
        label: String,
        /// Its value.
        value: String,
    },
    /// Somebody set the state label during a visit.
    LabelChanged {
        /// The label's state.
        label: State,
        /// The visit's state.
        record: State,
    },
    /// The visit record cannot be read.
    VisitUnreadable {
        /// Why.
        why: String,
    },
    /// The Kubernetes API said no.
    ApiError {
        /// What it said.
        what: String,
        /// When it is tried again.
        retry_at: Timestamp,
    },
    /// The node changed while it was written; a newer version is awaited.
    Conflict,
}

/// Who replaces a stale client of a node in service.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Remedy {
    /// The controller: the policy says Always.
    ItSelf,
    /// Whoever runs `pitcrew refresh-clients`.
    Command,
    /// A person: it would come back from a newer template.
    Hand,
}

/// A limit that is too narrow for an atom.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Narrow {
    /// So many nodes are on their walk at the same time.
    MaxParallelUpgrades,
    /// So many nodes may be out.
    MaxUnavailable,
    /// So many nodes of one group may be out.
    SpreadMax,
}

/// Which limit binds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Limit {
    /// So many nodes are on their walk at the same time.
    MaxParallelUpgrades(u32),
    /// So many of the nodes of a stage move, or are out, at the same time.
    Stage {
        /// The stage.
        stage: String,
        /// How many.
        limit: usize,
        /// They move; otherwise they are out.
        moving: bool,
    },
    /// So many nodes may be out, and so many are, of which some were not taken out by us.
    MaxUnavailable {
        /// The limit in nodes.
        limit: usize,
        /// Nodes out now.
        out: usize,
        /// One of those that somebody else took out.
        foreign: Option<Foreign>,
    },
}

/// A node that somebody else took out.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Foreign {
    /// Which.
    pub node: NodeName,
    /// It was its own driver manager, which gives it back when the driver is up.
    pub by_driver_manager: bool,
}

impl Reason {
    /// A short name for metrics and machines.
    pub fn code(&self) -> &'static str {
        match self {
            Reason::UpToDate => "up-to-date",
            Reason::SameVersion { .. } => "same-version",
            Reason::DriverNotReady { .. } => "driver-not-ready",
            Reason::Moving { .. } | Reason::Writing => "moving",
            Reason::RevisionPending { .. } => "revision-pending",
            Reason::NoDriverPod { .. } => "no-driver-pod",
            Reason::NoSlot { .. } => "no-slot",
            Reason::WindowClosed { .. } => "window-closed",
            Reason::AtomWaits { .. } => "atom-waits",
            Reason::AtomTooLarge { .. } => "atom-too-large",
            Reason::SpreadFull { .. } => "spread-full",
            Reason::Skipped { .. } => "skipped",
            Reason::OtherDriver { .. } => "other-driver",
            Reason::NodeNotReady { .. } => "node-not-ready",
            Reason::NeedsReboot { .. } => "needs-reboot",
            Reason::Quarantined { .. } => "quarantined",
            Reason::BreakerTripped => "breaker-tripped",
            Reason::WaitingForJobs { .. } => "waiting-for-jobs",
            Reason::Checkpointing { .. } => "checkpointing",
            Reason::PodsLeaving { .. } => "pods-leaving",
            Reason::BudgetBlocks { .. } => "budget-blocks",
            Reason::BudgetNever { .. } => "budget-never",
            Reason::PodStuck { .. } => "pod-stuck",
            Reason::TooManyFailed { .. } => "too-many-failed",
            Reason::StageClosed { .. } => "stage-closed",
            Reason::StageFailed { .. } => "stage-failed",
            Reason::Condemned { .. } => "condemned",
            Reason::LeftAlone { .. } => "left-alone",
            Reason::NotInMatrix { .. } => "not-in-matrix",
            Reason::Aborted { .. } => "aborted",
            Reason::CannotBeEmptied { .. } => "cannot-be-emptied",
            Reason::DriverStopping { .. } => "driver-stopping",
            Reason::DriverStarting { .. } => "driver-starting",
            Reason::ClientsComeBack { .. } => "clients-come-back",
            Reason::ClientsStale { .. } => "clients-stale",
            Reason::Validating { .. } => "validating",
            Reason::Paused => "paused",
            Reason::Failed { .. } | Reason::FailedWithoutRecord => "failed",
            Reason::PoolFrozen { .. } => "pool-frozen",
            Reason::TwoPolicies { .. } => "two-policies",
            Reason::UnknownLabel { .. } => "unknown-label",
            Reason::LabelChanged { .. } => "label-changed",
            Reason::VisitUnreadable { .. } => "visit-unreadable",
            Reason::ApiError { .. } => "api-error",
            Reason::Conflict => "conflict",
        }
    }

    /// How many nodes are before this one, if it waits in the line for a slot.
    pub fn ahead(&self) -> Option<usize> {
        match self {
            Reason::NoSlot { ahead, .. } => Some(*ahead),
            _ => None,
        }
    }

    /// How a node with this reason feels.
    pub fn kind(&self) -> Kind {
        match self {
            Reason::UpToDate | Reason::SameVersion { .. } => Kind::Done,
            Reason::Moving { .. }
            | Reason::Writing
            | Reason::WaitingForJobs { .. }
            | Reason::Checkpointing { .. }
            | Reason::PodsLeaving { .. }
            | Reason::DriverStopping { .. }
            | Reason::DriverStarting { .. }
            | Reason::ClientsComeBack { .. }
            | Reason::Validating { .. } => Kind::Moving,
            Reason::ClientsStale { remedy: Remedy::ItSelf, .. }
            | Reason::RevisionPending { .. }
            | Reason::NoDriverPod { .. }
            | Reason::NoSlot { .. }
            | Reason::StageClosed { .. }
            | Reason::LeftAlone { .. }
            | Reason::WindowClosed { opens: Some(_), .. }
            | Reason::SpreadFull { .. }
            | Reason::OtherDriver { .. }
            | Reason::ApiError { .. }
            | Reason::Conflict => Kind::Waiting,
            Reason::Paused | Reason::Skipped { .. } | Reason::Aborted { .. } => Kind::Paused,
            // Whoever waits for another feels as that one does, unless that one is on its way.
            Reason::AtomWaits { why, .. } => match why.kind() {
                Kind::Done | Kind::Moving | Kind::Waiting => Kind::Waiting,
                Kind::Paused | Kind::Blocked | Kind::Failed => Kind::Blocked,
            },
            Reason::DriverNotReady { .. }
            | Reason::WindowClosed { .. }
            | Reason::AtomTooLarge { .. }
            | Reason::ClientsStale { .. }
            | Reason::NodeNotReady { .. }
            | Reason::NeedsReboot { .. }
            | Reason::Quarantined { .. }
            | Reason::BreakerTripped
            | Reason::BudgetBlocks { .. }
            | Reason::BudgetNever { .. }
            | Reason::PodStuck { .. }
            | Reason::TooManyFailed { .. }
            | Reason::StageFailed { .. }
            | Reason::Condemned { .. }
            | Reason::NotInMatrix { .. }
            | Reason::CannotBeEmptied { .. }
            | Reason::PoolFrozen { .. }
            | Reason::TwoPolicies { .. }
            | Reason::UnknownLabel { .. }
            | Reason::LabelChanged { .. }
            | Reason::VisitUnreadable { .. } => Kind::Blocked,
            Reason::Failed { .. } | Reason::FailedWithoutRecord => Kind::Failed,
        }
    }

    /// The pod that keeps the node from being emptied.
    pub(crate) fn pod(&self) -> Option<&ObjectName> {
        match self {
            Reason::BudgetBlocks { pod, .. } | Reason::PodStuck { pod, .. } => Some(pod),
            _ => None,
        }
    }

    /// When something happens by itself.
    pub fn until(&self) -> Option<Timestamp> {
        match self {
            Reason::NoDriverPod { until, .. }
            | Reason::NodeNotReady { until }
            | Reason::NeedsReboot { until, .. }
            | Reason::WaitingForJobs { until, .. }
            | Reason::Validating { until, .. }
            | Reason::PodsLeaving { until, .. }
            | Reason::PodStuck { until, .. }
            | Reason::BudgetBlocks { until, .. } => *until,
            Reason::Checkpointing { until, .. }
            | Reason::DriverStopping { until, .. }
            | Reason::DriverStarting { until, .. }
            | Reason::ClientsComeBack { until, .. } => Some(*until),
            Reason::ApiError { retry_at, .. } => Some(*retry_at),
            Reason::WindowClosed { opens, .. } => *opens,
            _ => None,
        }
    }
}
