//! When nodes may start: windows that repeat, less the dates on which nothing starts.
//!
//! In: the hours and dates of a policy, a moment, and how long a visit is expected to take. Out: whether a visit that
//! starts now ends in time, and if not, when the next one would. What a policy's texts mean is read in
//! [`policy`](crate::policy); here is only the arithmetic.

#[cfg(test)]
mod tests;

use jiff::civil::{Date, DateTime, Time, Weekday};
use jiff::tz::{AmbiguousOffset, TimeZone};
use jiff::{SignedDuration, Timestamp, ToSpan};

/// So many days ahead somebody looks for the next window: more than a year, so that whatever comes back every year is
/// found. What is further away is as good as never.
pub const LOOK_AHEAD_DAYS: i32 = 400;

/// Most questions are answered by the next week; only who finds nothing there looks further.
const HORIZON_DAYS: [i32; 3] = [9, 45, LOOK_AHEAD_DAYS];

/// A window comes back every week at the latest. Whatever lasts longer than a week and the hour that a change of clocks
/// can add never ends, so nobody has to look further back than this.
const LENGTH_MAX: SignedDuration = SignedDuration::from_hours(8 * 24);

/// How long a visit is expected to take while fewer than [`VISITS_MIN`] are known: emptying a node has 5 minutes by
/// default, a driver that is built on the node takes 10 to 15, validation has 10.
pub const EXPECTED_DEFAULT: SignedDuration = SignedDuration::from_mins(30);

/// Of fewer visits than this, the longest would decide alone.
pub const VISITS_MIN: usize = 3;

/// How long a visit is expected to take: nine of ten past visits of this fleet took no longer.
pub fn expected(durations: impl Iterator<Item = SignedDuration>) -> SignedDuration {
    // Clocks of two leaders may disagree: a visit that ended before it began tells nothing.
    let mut known: Vec<SignedDuration> = durations.filter(|d| !d.is_negative()).collect();
    if known.len() < VISITS_MIN {
        return EXPECTED_DEFAULT;
    }
    let rank = (known.len() * 9).div_ceil(10) - 1;
    *known.select_nth_unstable(rank).1
}

/// Whether a visit may start now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Opening {
    /// Nothing limits it.
    Always,
    /// Yes, and it is expected to end before the window does.
    Open {
        /// The end of the window.
        until: Timestamp,
    },
    /// A window is open, but it would end before the visit does.
    TooShort {
        /// The end of the window.
        until: Timestamp,
        /// When the next one begins that is long enough; `None`: not within [`LOOK_AHEAD_DAYS`].
        next: Option<Timestamp>,
    },
    /// No window is open.
    Closed {
        /// When the next one begins that is long enough; `None`: not within [`LOOK_AHEAD_DAYS`].
        opens: Option<Timestamp>,
    },
}

impl Opening {
    /// A visit may start.
    pub fn is_open(self) -> bool {
        matches!(self, Opening::Always | Opening::Open { .. })
    }
}

/// When nodes may start. The default: always.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Windows {
    windows: Vec<Window>,
    blackouts: Vec<Blackout>,
}

/// Hours that repeat.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Window {
    /// Empty: every day.
    pub(crate) days: Vec<Weekday>,
    pub(crate) start: Time,
    pub(crate) length: SignedDuration,
    pub(crate) zone: TimeZone,
}

/// Whole days, the last one included.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Blackout {
    pub(crate) from: Date,
    pub(crate) until: Date,
    pub(crate) zone: TimeZone,
}

/// Some time, without its end.
#[derive(Clone, Copy, Debug)]
struct Span {
    from: Timestamp,
    until: Timestamp,
}

impl Span {
    fn has(self, needs: SignedDuration) -> bool {
        self.until.duration_since(self.from) >= needs
    }
}

impl Windows {
    pub(crate) fn new(windows: Vec<Window>, blackouts: Vec<Blackout>) -> Self {
        Self { windows, blackouts }
    }

    /// Nothing is ever closed.
    pub fn is_always(&self) -> bool {
        self.windows.is_empty() && self.blackouts.is_empty()
    }

    /// Whether a visit that starts now and takes as long as it `needs` ends before its window does.
    pub fn at(&self, now: Timestamp, needs: SignedDuration) -> Opening {
        if self.is_always() {
            return Opening::Always;
        }
        let mut known = Opening::Closed { opens: None };
        for days in HORIZON_DAYS {
            let end = later(now, SignedDuration::from_hours(24 * i64::from(days)));
            known = self.within(now, end, needs);
            let unfinished = match known {
                Opening::Always => false,
                Opening::Open { until } => until == end,
                Opening::TooShort { next: at, .. } | Opening::Closed { opens: at } => at.is_none(),
            };
            if !unfinished {
                return known;
            }
        }
        // Without windows, only dates close anything, and none of them is near.
        if self.windows.is_empty() && known.is_open() { Opening::Always } else { known }
    }

    /// The same, for somebody who knows nothing of what is after `end`.
    fn within(&self, now: Timestamp, end: Timestamp, needs: SignedDuration) -> Opening {
        let spans = self.spans(now, end);
        let current = spans.iter().find(|span| span.from <= now);
        let next = || spans.iter().find(|span| span.from > now && span.has(needs)).map(|span| span.from);
        match current.map(|span| Span { from: now, ..*span }) {
            Some(rest) if rest.has(needs) => Opening::Open { until: rest.until },
            Some(rest) => Opening::TooShort { until: rest.until, next: next() },
            None => Opening::Closed { opens: next() },
        }
    }

    /// Whatever is open between `now` and `end`, in its order; the first may have begun before.
    fn spans(&self, now: Timestamp, end: Timestamp) -> Vec<Span> {
        let open = if self.windows.is_empty() {
            vec![Span { from: now, until: end }]
        } else {
            self.windows.iter().flat_map(|window| window.spans(now, end)).collect()
        };
        let mut open = merged(open);
        for dark in self.blackouts.iter().map(Blackout::span) {
            open = open.into_iter().flat_map(|span| without(span, dark)).collect();
        }
        // Of what is over by now, a blackout may have left a piece.
        open.retain(|span| span.until > now);
        open
    }
}

impl Window {
    fn spans(&self, now: Timestamp, end: Timestamp) -> impl Iterator<Item = Span> {
        let length = self.length.min(LENGTH_MAX);
        // A day more on both sides: no zone is further from another than that.
        let first = date(&self.zone, later(now, -LENGTH_MAX)).saturating_sub(1.day());
        let last = date(&self.zone, end).saturating_add(1.day());
        let days = first.series(1.day()).take_while(move |day| *day <= last);
        let begins = days.filter(|day| self.days.is_empty() || self.days.contains(&day.weekday()));
        let span = move |day: Date| {
            let from = first_moment(&self.zone, day.to_datetime(self.start));
            Span { from, until: later(from, length).min(end) }
        };
        begins.map(span).filter(move |span| span.until > now && span.from < end)
    }
}

impl Blackout {
    fn span(&self) -> Span {
        let midnight = |day: Date| first_moment(&self.zone, day.to_datetime(Time::midnight()));
        Span { from: midnight(self.from), until: self.until.tomorrow().map_or(Timestamp::MAX, midnight) }
    }
}

/// Spans that overlap or touch each other are one.
fn merged(mut spans: Vec<Span>) -> Vec<Span> {
    spans.sort_unstable_by_key(|span| span.from);
    let mut whole: Vec<Span> = Vec::with_capacity(spans.len());
    for span in spans {
        match whole.last_mut().filter(|last| span.from <= last.until) {
            Some(last) => last.until = last.until.max(span.until),
            None => whole.push(span),
        }
    }
    whole
}

/// What is left of a span.
fn without(span: Span, dark: Span) -> impl Iterator<Item = Span> {
    let before = Span { until: span.until.min(dark.from), ..span };
    let after = Span { from: span.from.max(dark.until), ..span };
    [before, after].into_iter().filter(|left| left.from < left.until)
}

fn later(at: Timestamp, by: SignedDuration) -> Timestamp {
    let end = if by.is_negative() { Timestamp::MIN } else { Timestamp::MAX };
    at.checked_add(by).unwrap_or(end)
}

fn date(zone: &TimeZone, at: Timestamp) -> Date {
    zone.to_datetime(at).date()
}

/// The first moment at which the clocks of a zone show this time, or a later one if they jump over it.
fn first_moment(zone: &TimeZone, shown: DateTime) -> Timestamp {
    let at = zone.to_ambiguous_timestamp(shown);
    let jumps = matches!(at.offset(), AmbiguousOffset::Gap { .. });
    let end = if shown.year() < 0 { Timestamp::MIN } else { Timestamp::MAX };
    let Ok(earlier) = at.earlier() else { return end };
    if !jumps {
        return earlier;
    }
    zone.following(earlier).next().map_or(earlier, |jump| jump.timestamp())
}
