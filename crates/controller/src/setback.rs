//! What a failed call means, and when to try again. Retries are decisions of the planner, never hidden in a client.

use jiff::{SignedDuration, Timestamp};
use pitcrew_core::names::ResourceVersion;
use pitcrew_core::snapshot::{Setback, SetbackKind};

/// A conflict is followed by a newer version as a rule; if none comes in this time, the object is read.
const NEWER_VERSION_WITHIN: SignedDuration = SignedDuration::from_secs(5);
/// The first wait after a refusal or an error; it doubles from there.
const BACK_OFF_FIRST_MS: i64 = 1_000;
/// The longest wait: a budget that opens is used within half a minute.
const BACK_OFF_LONGEST_MS: i64 = 30_000;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    /// No answer in time: it may or may not have happened.
    #[error("no answer within {0} s")]
    TimedOut(u64),
    /// The API answered no, or could not be reached.
    #[error("{}", sentence(.0))]
    Api(#[from] kube::Error),
    /// The last look before the point of no return found something else than the plan had seen.
    #[error("the last look found that {0}")]
    LastLook(String),
    /// What the plan asks for cannot be said to the API.
    #[error("{0}")]
    Unfit(String),
    /// The answer was not what the API promises.
    #[error(transparent)]
    Answer(#[from] crate::view::Incomplete),
}

/// What the API itself says, without the client's wrapping.
pub fn sentence(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => status.message.clone(),
        other => {
            // The kind of the client's error says nothing to a reader; what it wraps does.
            let mut text = other.to_string().trim_start_matches("ServiceError: ").to_owned();
            let mut source = std::error::Error::source(other);
            while let Some(cause) = source {
                let cause_text = cause.to_string();
                if !text.contains(&cause_text) {
                    text = format!("{text}: {cause_text}");
                }
                source = cause.source();
            }
            text
        }
    }
}

impl CallError {
    fn code(&self) -> u16 {
        match self {
            CallError::Api(kube::Error::Api(status)) => status.code,
            _ => 0,
        }
    }

    /// Nobody answered, or the connection broke: it may or may not have happened.
    fn outcome_unknown(&self) -> bool {
        match self {
            CallError::TimedOut(_) => true,
            CallError::Api(error) => !matches!(error, kube::Error::Api(_)),
            CallError::LastLook(_) | CallError::Unfit(_) | CallError::Answer(_) => false,
        }
    }

    /// The object is gone, or is another one of the same name.
    pub(crate) fn is_gone(&self) -> bool {
        self.code() == 404
    }

    /// For the metric: what came of the call.
    pub(crate) fn outcome(&self) -> &'static str {
        match self.code() {
            409 => "conflict",
            404 => "gone",
            429 => "refused",
            403 => "forbidden",
            _ if matches!(self, CallError::TimedOut(_)) => "timeout",
            _ => "error",
        }
    }
}

/// What a failed write to a node, a rollout or a policy means.
pub(crate) fn after_write(
    error: &CallError,
    seen: ResourceVersion,
    earlier: Option<&Setback>,
    now: Timestamp,
) -> Setback {
    let attempts = earlier.map_or(1, |setback| setback.attempts + 1);
    let (kind, retry_at) = match () {
        // Did it happen? Read before anything else: at once the first time, then as the API recovers.
        () if error.outcome_unknown() && attempts == 1 => (SetbackKind::Stale, now),
        () if error.outcome_unknown() => (SetbackKind::Stale, back_off(now, attempts - 1, seen)),
        // Nothing was written; what was found is seen by the next plan, or read.
        () if matches!(error, CallError::LastLook(_)) => (SetbackKind::Stale, back_off(now, attempts, seen)),
        () if matches!(error.code(), 409 | 404) => (SetbackKind::Stale, after(now, NEWER_VERSION_WITHIN)),
        () => (SetbackKind::Error(error.to_string()), back_off(now, attempts, seen)),
    };
    Setback { seen, kind, attempts, retry_at }
}

/// A node was to be read because nobody knows whether a write to it happened, and could not be: nobody knows it still, and
/// until then it keeps what the write may have given it (seed 31114).
pub(crate) fn after_read(seen: ResourceVersion, earlier: Option<&Setback>, now: Timestamp) -> Setback {
    let attempts = earlier.map_or(1, |setback| setback.attempts + 1);
    let seen = earlier.map_or(seen, |setback| setback.seen);
    Setback { seen, kind: SetbackKind::Stale, attempts, retry_at: back_off(now, attempts, seen) }
}

/// What a failed eviction or deletion means. The pod itself tells the rest by its next event.
pub(crate) fn after_removal(
    error: &CallError,
    seen: ResourceVersion,
    earlier: Option<&Setback>,
    now: Timestamp,
) -> Setback {
    let attempts = earlier.map_or(1, |setback| setback.attempts + 1);
    let kind = if error.code() == 429 { SetbackKind::Refused } else { SetbackKind::Error(error.to_string()) };
    Setback { seen, kind, attempts, retry_at: back_off(now, attempts, seen) }
}

/// 1 s, 2 s, 4 s … 30 s, each up to a quarter shorter: objects that failed together do not come back together.
/// The share is drawn from the version seen, not from chance, so that a run can be repeated.
fn back_off(now: Timestamp, attempts: u32, seen: ResourceVersion) -> Timestamp {
    let full =
        BACK_OFF_FIRST_MS.saturating_mul(1 << attempts.saturating_sub(1).min(10)).min(BACK_OFF_LONGEST_MS);
    let share = i64::from(seen.spread()) * full / 4 / 256;
    after(now, SignedDuration::from_millis(full - share))
}

fn after(now: Timestamp, wait: SignedDuration) -> Timestamp {
    now.saturating_add(wait).unwrap_or(Timestamp::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_that_fails_does_not_answer_whether_a_write_happened() {
        let now = Timestamp::UNIX_EPOCH;
        let lost = after_write(&CallError::TimedOut(5), 7.into(), None, now);
        assert_eq!((&lost.kind, lost.retry_at), (&SetbackKind::Stale, now));
        let unread = after_read(9.into(), Some(&lost), now);
        assert_eq!((unread.kind, unread.seen, unread.attempts), (SetbackKind::Stale, 7.into(), 2));
        assert!(unread.retry_at > now);
    }

    #[test]
    fn waits_double_up_to_half_a_minute() {
        let now = Timestamp::UNIX_EPOCH;
        let mut last = SignedDuration::ZERO;
        for attempts in 1..8 {
            let wait = back_off(now, attempts, 7.into()).duration_since(now);
            assert!(wait >= last && wait <= SignedDuration::from_secs(30), "{attempts}: {wait}");
            last = wait;
        }
        assert!(last > SignedDuration::from_secs(22));
        assert!(back_off(now, u32::MAX, 7.into()) > now);
    }
}
