//! Real time, for a person who waits: how long something took. The only place of the command line that reads it.

use std::time::{Duration, Instant};

/// Runs from its start on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stopwatch {
    began: Instant,
}

impl Stopwatch {
    /// Starts one.
    #[expect(clippy::disallowed_methods, reason = "a person waits in real time; no decision depends on it")]
    pub(crate) fn start() -> Self {
        Self { began: Instant::now() }
    }

    /// The time since its start.
    pub(crate) fn elapsed(self) -> Duration {
        self.began.elapsed()
    }
}
