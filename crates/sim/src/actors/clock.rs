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
        // Cut after the sum: cut before it, these actors would live up to a second behind everybody else.
        Time(Timestamp::from_second(self.exactly().as_second()).unwrap_or(self.epoch))
    }

    /// The time now.
    pub(super) fn exactly(&self) -> Timestamp {
        let passed = Instant::now().saturating_duration_since(self.started);
        self.epoch.saturating_add(passed).unwrap_or(self.epoch)
    }

    /// When `time` is (or was) on tokio's clock; moments before the start count as the start.
    pub(super) fn instant(&self, time: &Time) -> Instant {
        let passed = time.0.duration_since(self.epoch);
        self.started + Duration::try_from(passed).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn seconds_are_cut_after_the_sum() {
        let clock = Clock::starting_at("2026-01-01T00:00:00.9Z".parse().unwrap());
        tokio::time::advance(Duration::from_millis(200)).await;
        assert_eq!(clock.now().0.to_string(), "2026-01-01T00:00:01Z");
        let before = Time("2026-01-01T00:00:00Z".parse().unwrap());
        assert_eq!(clock.instant(&before), clock.started);
    }
}
