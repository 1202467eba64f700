//! Moments and spans for people: both absolute and relative, in their own time zone.

use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};

const MINUTE: i64 = 60;
const HOUR: i64 = 60 * MINUTE;
const DAY: i64 = 24 * HOUR;

/// The moment from which others are told, and the zone in which.
#[derive(Clone, Debug)]
pub(crate) struct Times {
    pub(crate) now: Timestamp,
    pub(crate) zone: TimeZone,
}

impl Times {
    /// `14:37`, `Tue 14:37` within a week, `2026-01-05 14:37` beyond.
    pub(crate) fn at(&self, moment: Timestamp) -> String {
        let (moment, now) = (moment.to_zoned(self.zone.clone()), self.now.to_zoned(self.zone.clone()));
        let away = moment.timestamp().duration_since(now.timestamp()).abs();
        let format = match () {
            () if moment.date() == now.date() => "%H:%M",
            () if away < SignedDuration::from_secs(6 * DAY) => "%a %H:%M",
            () => "%Y-%m-%d %H:%M",
        };
        moment.strftime(format).to_string()
    }

    /// `14:37:05`, for lines that follow each other.
    pub(crate) fn clock(&self) -> String {
        self.now.to_zoned(self.zone.clone()).strftime("%H:%M:%S").to_string()
    }

    /// How long ago that was, or how long it takes until then.
    pub(crate) fn span(&self, moment: Timestamp) -> String {
        span(moment.duration_since(self.now).abs())
    }

    /// `14:37 (2 h 03 m ago)` or `17:40 (in 37 m)`.
    pub(crate) fn both(&self, moment: Timestamp) -> String {
        let (at, span) = (self.at(moment), self.span(moment));
        if moment > self.now { format!("{at} (in {span})") } else { format!("{at} ({span} ago)") }
    }
}

/// Two units are enough: `37 s`, `1 m 02 s`, `2 h 03 m`, `2 d 4 h`.
fn span(length: SignedDuration) -> String {
    let seconds = length.as_secs();
    match seconds {
        ..MINUTE => format!("{seconds} s"),
        MINUTE..HOUR => format!("{} m {:02} s", seconds / MINUTE, seconds % MINUTE),
        HOUR..DAY => format!("{} h {:02} m", seconds / HOUR, seconds % HOUR / MINUTE),
        _ => format!("{} d {} h", seconds / DAY, seconds % DAY / HOUR),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_as_short_as_they_can_be() {
        let now: Timestamp = "2026-01-06T15:00:00Z".parse().unwrap();
        let times = Times { now, zone: TimeZone::UTC };
        let told = |text: &str| times.both(text.parse().unwrap());
        assert_eq!(told("2026-01-06T14:37:30Z"), "14:37 (22 m 30 s ago)");
        assert_eq!(told("2026-01-06T15:00:09Z"), "15:00 (in 9 s)");
        assert_eq!(told("2026-01-05T12:57:00Z"), "Mon 12:57 (1 d 2 h ago)");
        assert_eq!(told("2025-12-06T12:00:00Z"), "2025-12-06 12:00 (31 d 3 h ago)");
        assert_eq!(span(SignedDuration::from_secs(7380)), "2 h 03 m");
    }
}
