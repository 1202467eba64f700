//! Everything that can end an agent's work, as sentences, and the exit code of each.

use std::error::Error;
use std::time::Duration;

use crate::cluster::{ApiError, plainly};
use crate::host::HostError;
use crate::labels::TooLong;
use crate::modules::Busy;
use crate::stop::Stopped;
use crate::values::in_words;

/// Exit code: something failed.
pub const FAILED: u8 = 1;
/// Exit code: wrong flags, variables or configuration.
pub const USAGE: u8 = 2;
/// Exit code: a deadline has passed.
pub const TIMED_OUT: u8 = 3;
/// Exit code: only a reboot of the node helps.
pub const NEEDS_REBOOT: u8 = 4;
/// Exit code: told to end, and everything put back that could be. As a shell reports SIGTERM.
pub const TERMINATED: u8 = 143;

/// Why an agent did not do its work.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// A flag, a variable or the configuration is wrong.
    #[error("{0}")]
    Usage(String),
    /// The machine.
    #[error(transparent)]
    Host(#[from] HostError),
    /// Kubernetes.
    #[error(transparent)]
    Api(ApiError),
    /// The agent was told to end.
    #[error(transparent)]
    Stopped(#[from] Stopped),
    /// A label cannot be paused.
    #[error(transparent)]
    Label(#[from] TooLong),
    /// The node has a driver of its own.
    #[error(
        "the host has driver {version} installed; the node is labelled nvidia.com/gpu.deploy.driver=pre-installed and needs \
         no driver pod"
    )]
    HostDriver {
        /// Its version.
        version: String,
    },
    /// Whether it has one cannot be said.
    #[error("nvidia-smi of the host did not answer within {}: its driver hangs, and may need a reboot", in_words(*limit))]
    HostDriverHangs {
        /// How long it was waited for.
        limit: Duration,
    },
    /// It answered, and still it cannot be said.
    #[error(
        "nvidia-smi of the host {ended}: whether the host has a driver of its own cannot be said; run `nvidia-smi` on the node, \
         and repair that driver or remove what is left of it"
    )]
    HostDriverUnclear {
        /// How it ended.
        ended: String,
    },
    /// Something did not come about in time.
    #[error("waited {} for {what}: {missing}", in_words(*limit))]
    TimedOut {
        /// What was waited for.
        what: String,
        /// What was missing at the end.
        missing: String,
        /// How long.
        limit: Duration,
    },
    /// A pod may not be evicted. None was.
    #[error("{0}")]
    CannotLeave(String),
    /// Pods hold claims that the DRA plugin would have to give back.
    #[error("the DRA plugin is still needed: {pods} hold claims of its devices")]
    ClaimsHeld {
        /// Which.
        pods: String,
    },
    /// The driver is in use. It is as it was.
    #[error("the driver cannot be unloaded, and nothing of it was: {0}")]
    Busy(Box<Busy>),
    /// The whole node was drained, and that did not help.
    #[error(
        "{}; the whole node was drained for it and stays cordoned, so that its pods do not come back to be drained again in vain",
        .0.sentence()
    )]
    DrainedInVain(Box<Failure>),
    /// Some of the driver is gone and some is not.
    #[error(
        "only part of the driver could be unloaded ({removed} gone, {left} left: {why}); the node needs a reboot"
    )]
    HalfUnloaded {
        /// The modules that are gone.
        removed: String,
        /// The modules that are not.
        left: String,
        /// Why.
        why: String,
    },
    /// Some of the driver is gone since an earlier start, and this one failed before it could mend that.
    #[error(
        "only part of the driver could be unloaded (by an earlier start); the node needs a reboot. This start failed too: {}",
        .0.sentence()
    )]
    StillHalf(Box<Failure>),
    /// The driver's root directory is mounted again and again.
    #[error("{path} is still mounted after {rounds} rounds of unmounting: somebody mounts it again")]
    Remounted {
        /// Where.
        path: String,
        /// How often.
        rounds: usize,
    },
    /// Devices that do not let go, or that cannot be taken.
    #[error("{0}")]
    Devices(String),
    /// What a check before the work found.
    #[error("{} found: {}", problems(.0.len()), .0.join("; "))]
    Findings(Vec<String>),
}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        match error {
            ApiError::Stopped(stopped) => Failure::Stopped(stopped),
            other => Failure::Api(other),
        }
    }
}

impl From<Busy> for Failure {
    fn from(busy: Busy) -> Self {
        Failure::Busy(Box::new(busy))
    }
}

impl Failure {
    /// The exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            Failure::Usage(_) => USAGE,
            Failure::TimedOut { .. } => TIMED_OUT,
            Failure::HalfUnloaded { .. } | Failure::StillHalf(_) => NEEDS_REBOOT,
            Failure::Stopped(_) => TERMINATED,
            Failure::DrainedInVain(failure) => failure.exit_code(),
            _ => FAILED,
        }
    }

    /// The whole sentence, with its cause.
    pub fn sentence(&self) -> String {
        let mut text = self.to_string();
        let mut cause = self.source();
        while let Some(error) = cause {
            let kube_error = as_kube_error(error);
            let said = kube_error.map_or_else(|| error.to_string(), plainly);
            text = format!("{text}: {said}");
            // A kube error has said everything that is in it.
            cause = if kube_error.is_some() { None } else { error.source() };
        }
        text
    }
}

/// Errors carry it in a box, which is another type to whoever asks.
fn as_kube_error<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a kube::Error> {
    error.downcast_ref().or_else(|| error.downcast_ref::<Box<kube::Error>>().map(AsRef::as_ref))
}

fn problems(count: usize) -> String {
    if count == 1 { "1 problem".to_owned() } else { format!("{count} problems") }
}
