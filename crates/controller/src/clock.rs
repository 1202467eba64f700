//! The only reader of time. Real, or virtual: then it runs on tokio's clock, which tests and the demo pause.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use jiff::{SignedDuration, Timestamp};
use tokio::time::Instant;

/// Where "now" comes from.
#[derive(Clone, Debug)]
pub enum Clock {
    /// The machine's clock.
    System,
    /// Starts at a moment of our choice and goes on with tokio's clock.
    Tokio {
        /// The moment.
        epoch: Timestamp,
        /// When that was.
        start: Instant,
        /// By how many milliseconds it is wrong, as machines' clocks sometimes are. Its clones are wrong with it.
        wrong_by: Arc<AtomicI64>,
    },
}

impl Clock {
    /// A clock that shows `epoch` now and goes on with tokio's clock.
    pub fn starting_at(epoch: Timestamp) -> Self {
        Self::Tokio { epoch, start: Instant::now(), wrong_by: Arc::default() }
    }

    /// Makes a virtual clock show a time that is wrong by so much. Timers are not affected, as on a real machine.
    pub fn set_wrong_by(&self, by: SignedDuration) {
        if let Clock::Tokio { wrong_by, .. } = self {
            wrong_by.store(i64::try_from(by.as_millis()).unwrap_or_default(), Ordering::Relaxed);
        }
    }

    /// The time.
    #[expect(clippy::disallowed_methods, reason = "this is the one place that reads the time")]
    pub fn now(&self) -> Timestamp {
        match self {
            Clock::System => Timestamp::now(),
            Clock::Tokio { epoch, start, wrong_by } => {
                let elapsed = SignedDuration::try_from(start.elapsed()).unwrap_or(SignedDuration::ZERO);
                let shown = elapsed + SignedDuration::from_millis(wrong_by.load(Ordering::Relaxed));
                epoch.saturating_add(shown).unwrap_or(Timestamp::MAX)
            }
        }
    }

    /// The moment `at`, for tokio's timers. A moment in the past is now.
    pub fn instant(&self, at: Timestamp) -> Instant {
        let wait = at.duration_since(self.now());
        Instant::now() + std::time::Duration::try_from(wait).unwrap_or_default()
    }
}
