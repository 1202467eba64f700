//! What can go wrong in a run. Each kind can be switched on and off by its name.

use std::fmt;
use std::str::FromStr;

/// One line per kind: variant, name, what it is. Everything else is made from it, so that none is forgotten anywhere.
macro_rules! faults {
    ($($variant:ident = $name:literal: $what:literal,)*) => {
        /// A kind of fault.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
        pub enum Fault {
            $(#[doc = $what] $variant,)*
        }

        impl Fault {
            /// Every kind.
            pub const ALL: &[Fault] = &[$(Fault::$variant),*];

            /// How it is called on the command line.
            pub fn name(self) -> &'static str {
                match self { $(Fault::$variant => $name),* }
            }

            /// What it is.
            pub fn describe(self) -> &'static str {
                match self { $(Fault::$variant => $what),* }
            }
        }
    };
}

faults! {
    Conflict = "conflict": "A write is refused with 409, although nobody competed with it",
    Throttle = "throttle": "A request is refused with 429",
    ServerError = "server-error": "A request is refused with 500",
    LostReply = "lost-reply": "A write is made, and the connection breaks before the answer",
    LateReply = "late-reply": "A write is made, and the answer takes longer than anybody waits",
    SlowCall = "slow-call": "A call takes seconds",
    WatchCut = "watch-cut": "All watches of a controller end, and are taken up where they were",
    Compaction = "compaction": "Its watches end and the history is gone: 410, and everything is listed again",
    StaleView = "stale-view": "A controller does not hear of changes of one kind for a while",
    Duplicates = "duplicates": "A controller hears of everything twice",
    Webhook = "webhook": "A webhook denies all writes to nodes for a while",
    NoReturn = "no-return": "A webhook denies that nodes are given back for a while",
    Quota = "quota": "A quota denies new driver pods for a while",
    Crash = "crash": "The controller's process dies at one of its requests or between two of them, and comes back",
    Overlap = "overlap": "The leader cannot reach its Lease while all else works; another one takes over",
    ClockJump = "clock-jump": "A controller's clock is wrong for a while",
    NotReady = "not-ready": "A kubelet is dead for a while",
    Reboot = "reboot": "A machine boots",
    Replace = "replace": "A machine is replaced by a new one of the same name",
    Remove = "remove": "A machine is taken away",
    Join = "join": "A machine joins",
    StuckPod = "stuck-pod": "A pod does not stop when it is told to",
    CrashLoop = "crash-loop": "The new driver crashes on a node for a while",
    ImageMissing = "image-missing": "The new driver's image cannot be pulled on a node for a while",
    Hang = "hang": "The new driver starts on a node and does not become Ready for a while",
    OneInSix = "one-in-six": "The new driver fails on one node in six, for good",
    Flap = "flap": "A driver container ends and starts again",
    PodDeleted = "pod-deleted": "A person deletes a driver pod",
    Unproven = "unproven": "A node's validator does not become Ready for a while",
    ClientStuck = "client-stuck": "A client of the driver does not come back for a while",
    Cordon = "cordon": "A person cordons a node",
    Uncordon = "uncordon": "A person uncordons a node",
    Relabel = "relabel": "A person sets or removes a node's state label",
    LabelWipe = "label-wipe": "NVIDIA's controller wipes all state labels",
    Skip = "skip": "A person labels a node to be skipped, for a while",
    PolicyEdit = "policy-edit": "A person edits the limits of the policy",
    Pause = "pause": "A person pauses and resumes",
    Retarget = "retarget": "The version changes again",
    Abort = "abort": "The rollout is aborted, and taken up again",
    Scale = "scale": "Workloads get more or fewer replicas",
    Latecomer = "latecomer": "A pod takes devices of a node without asking the scheduler, for a while",
    TightBudget = "tight-budget": "A budget allows nothing for a while",
    Quarantine = "quarantine": "A health system quarantines a node and releases it",
    BadVersion = "bad-version": "The new driver fails on every node, for good",
    TakeBack = "take-back": "A person takes the version back; some set it again, or clear it first",
    Spoil = "spoil": "A driver ends and starts again while its stage is watched at work",
    GateNo = "gate-no": "A gate says no to the new driver on one node in six, for good",
    GateBlind = "gate-blind": "The gates' image cannot be pulled on a node for a while",
    StruckOff = "struck-off": "The version is not in the matrix, or nobody can read it, for a while",
    Intruder = "intruder": "A pod takes devices of a node just when its driver is about to restart",
    Alarm = "alarm": "A Prometheus query is out of bounds while a stage is watched at work",
    Silence = "silence": "Prometheus does not answer for a while, when a stage is watched at work",
    Pending = "pending": "A node has no room for pods, its driver's among them, until somebody makes some",
    ClientLost = "client-lost": "A client of the driver does not come back on one node in six, for good",
    SameName = "same-name": "People's work is in StatefulSets: a pod that goes comes back under its name",
    Taint = "taint": "Somebody taints a node, for a while: no new driver comes there, or the old one goes",
    TwoBudgets = "two-budgets": "Work is under two budgets for a while, which no eviction survives",
    Unlabel = "unlabel": "The label by which a node has a driver is taken away for a while",
}

impl Fault {
    /// Whether it is there from the beginning to the end, and so meets a node in no state more than in another.
    pub fn is_standing(self) -> bool {
        matches!(self, Fault::OneInSix | Fault::BadVersion | Fault::GateNo | Fault::SameName)
    }

    /// Whether it came after the first seeds were kept, whose plain cases are what they always were.
    pub fn is_late(self) -> bool {
        self == Fault::Intruder || self >= Fault::Pending
    }

    /// Whether it is about gates.
    pub fn is_about_gates(self) -> bool {
        matches!(self, Fault::GateNo | Fault::GateBlind)
    }

    /// Whether it is about what Prometheus says.
    pub fn is_about_queries(self) -> bool {
        matches!(self, Fault::Alarm | Fault::Silence)
    }

    /// Whether it happens to a stage that is watched at work, and so needs one.
    pub fn needs_a_bake(self) -> bool {
        self == Fault::Spoil || self.is_about_queries()
    }

    /// Whether it is about the way of a version through a fleet.
    pub fn needs_a_manner(self) -> bool {
        self.is_about_gates()
            || self.needs_a_bake()
            || matches!(self, Fault::BadVersion | Fault::TakeBack | Fault::StruckOff)
    }

    /// Whether it can make a controller learn of things late.
    pub fn delays_news(self) -> bool {
        matches!(
            self,
            Fault::Throttle
                | Fault::ServerError
                | Fault::LostReply
                | Fault::LateReply
                | Fault::SlowCall
                | Fault::WatchCut
                | Fault::Compaction
                | Fault::StaleView
                | Fault::Crash
                | Fault::Overlap
        )
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that is no fault's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no fault \"{0}\"")]
pub struct NoSuchFault(pub String);

impl FromStr for Fault {
    type Err = NoSuchFault;
    fn from_str(name: &str) -> Result<Self, NoSuchFault> {
        Fault::ALL
            .iter()
            .copied()
            .find(|fault| fault.name() == name)
            .ok_or_else(|| NoSuchFault(name.to_owned()))
    }
}
