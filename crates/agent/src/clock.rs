//! The only reader of wall time, for what is written on nodes. Waits run on tokio's clock.

use jiff::{SignedDuration, Timestamp};
use tokio::time::Instant;

/// Where "now" comes from.
#[derive(Clone, Copy, Debug)]
pub enum Clock {
    /// The machine's clock.
    System,
    /// Starts at a moment of our choice and goes on with tokio's clock, which tests pause.
    Tokio {
        /// The moment.
        epoch: Timestamp,
        /// When that was.
        start: Instant,
    },
}

impl Clock {
    /// A clock that shows `epoch` now and goes on with tokio's clock.
    pub fn starting_at(epoch: Timestamp) -> Self {
        Self::Tokio { epoch, start: Instant::now() }
    }

    /// The time.
    #[expect(clippy::disallowed_methods, reason = "this is the one place that reads the time")]
    pub fn now(self) -> Timestamp {
        match self {
            Clock::System => Timestamp::now(),
            Clock::Tokio { epoch, start } => {
                let elapsed = SignedDuration::try_from(start.elapsed()).unwrap_or(SignedDuration::ZERO);
                epoch.saturating_add(elapsed).unwrap_or(Timestamp::MAX)
            }
        }
    }
}
