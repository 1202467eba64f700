//! The cluster's wall clock: an epoch plus tokio's time.
//!
//! On the paused clock it stands still between events and jumps with them; on the real clock it runs.

use jiff::{SignedDuration, Timestamp};
use serde_json::Value;
use tokio::time::Instant;

/// Reads as wall-clock time, moves with tokio's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    epoch: Timestamp,
    start: Instant,
}

impl Clock {
    /// Starts at `epoch` now. Must be called inside a tokio runtime.
    pub(super) fn start_at(epoch: Timestamp) -> Self {
        Self { epoch, start: Instant::now() }
    }

    pub(super) fn now(&self) -> Timestamp {
        let elapsed = SignedDuration::try_from(self.start.elapsed()).unwrap_or(SignedDuration::ZERO);
        self.epoch.checked_add(elapsed).unwrap_or(Timestamp::MAX)
    }

    /// `metav1.Time` of a moment `seconds` from now. Kubernetes keeps whole seconds.
    pub(super) fn stamp_in(&self, seconds: i64) -> Value {
        stamp(self.now().as_second().saturating_add(seconds))
    }

    pub(super) fn stamp(&self) -> Value {
        self.stamp_in(0)
    }
}

/// `metav1.Time` of a Unix time.
pub(super) fn stamp(second: i64) -> Value {
    Timestamp::from_second(second).unwrap_or(Timestamp::MAX).to_string().into()
}
