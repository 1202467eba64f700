//! What time it is, for timestamps that actors write.
//!
//! The wall clock is read once, by the caller: afterwards time is the epoch plus what tokio's clock says has
//! passed, so that on a paused runtime every run writes the same timestamps.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use tokio::time::Instant;

/// A point in real time tied to a point of tokio's clock.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    epoch: Timestamp,
    started: Instant,
}

impl Clock {
    /// `epoch` is the time at this very moment.
    pub(super) fn starting_at(epoch: Timestamp) -> Self {
        Self { epoch, started: Instant::now() }
    }

    /// The time now, cut to a second as Kubernetes stores it.
    pub(super) fn now(&self) -> Time {
        let passed = Instant::now().saturating_duration_since(self.started);
        let seconds = self.epoch.as_second().saturating_add_unsigned(passed.as_secs());
        Time(Timestamp::from_second(seconds).unwrap_or(self.epoch))
    }

    /// When `time` is (or was) on tokio's clock; moments before the start count as the start.
    pub(super) fn instant(&self, time: &Time) -> Instant {
        let seconds = time.0.as_second().saturating_sub(self.epoch.as_second());
        self.started + Duration::from_secs(u64::try_from(seconds).unwrap_or(0))
    }
}
