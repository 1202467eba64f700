//! Windows against calendars that were looked up by hand, and against clocks that are read minute by minute.

use proptest::prelude::*;
use proptest::sample::select;

use super::*;
use crate::api::{BlackoutSpec, Day, WindowSpec};

fn at(text: &str) -> Timestamp {
    text.parse().unwrap()
}

fn minutes(minutes: i64) -> SignedDuration {
    SignedDuration::from_mins(minutes)
}

fn window(days: &[Day], start: &str, duration: &str, zone: &str) -> WindowSpec {
    WindowSpec {
        days: days.to_vec(),
        start: start.to_owned(),
        duration: duration.to_owned(),
        time_zone: Some(zone.to_owned()),
    }
}

fn blackout(from: &str, until: Option<&str>, zone: &str) -> BlackoutSpec {
    BlackoutSpec { from: from.to_owned(), until: until.map(str::to_owned), time_zone: Some(zone.to_owned()) }
}

fn windows(windows: &[WindowSpec], blackouts: &[BlackoutSpec]) -> Windows {
    Windows::read(windows, blackouts).unwrap()
}

/// The answer in a line.
fn tell(opening: Opening) -> String {
    let when = |at: Option<Timestamp>| at.map_or("never".to_owned(), |at| at.to_string());
    match opening {
        Opening::Always => "always".to_owned(),
        Opening::Open { until } => format!("open until {until}"),
        Opening::TooShort { until, next } => format!("too short, until {until}, next {}", when(next)),
        Opening::Closed { opens } => format!("closed, opens {}", when(opens)),
    }
}

#[track_caller]
fn check(windows: &Windows, needs: SignedDuration, table: &[(&str, &str)]) {
    for (now, expected) in table {
        assert_eq!(tell(windows.at(at(now), needs)), *expected, "at {now}");
    }
}

#[test]
fn without_windows_it_is_always_open_but_for_blackouts() {
    check(&windows(&[], &[]), minutes(30), &[("2026-01-01T12:00:00Z", "always")]);
    let holidays = windows(&[], &[blackout("2026-12-24", Some("2027-01-01"), "Europe/Berlin")]);
    check(
        &holidays,
        minutes(30),
        &[
            ("2025-01-01T12:00:00Z", "always"),
            ("2026-12-01T12:00:00Z", "open until 2026-12-23T23:00:00Z"),
            ("2026-12-23T22:30:00Z", "open until 2026-12-23T23:00:00Z"),
            ("2026-12-23T22:31:00Z", "too short, until 2026-12-23T23:00:00Z, next 2027-01-01T23:00:00Z"),
            ("2026-12-23T23:00:00Z", "closed, opens 2027-01-01T23:00:00Z"),
            ("2027-01-01T22:59:59Z", "closed, opens 2027-01-01T23:00:00Z"),
            ("2027-01-01T23:00:00Z", "always"),
        ],
    );
}

#[test]
fn a_visit_starts_only_if_it_ends_before_its_window() {
    // A Thursday.
    let weekdays = windows(&[window(&[Day::Mon, Day::Thu], "12:00", "4h", "UTC")], &[]);
    check(
        &weekdays,
        minutes(30),
        &[
            ("2026-01-01T11:59:59Z", "closed, opens 2026-01-01T12:00:00Z"),
            ("2026-01-01T12:00:00Z", "open until 2026-01-01T16:00:00Z"),
            ("2026-01-01T15:30:00Z", "open until 2026-01-01T16:00:00Z"),
            ("2026-01-01T15:30:01Z", "too short, until 2026-01-01T16:00:00Z, next 2026-01-05T12:00:00Z"),
            ("2026-01-01T16:00:00Z", "closed, opens 2026-01-05T12:00:00Z"),
        ],
    );
    check(
        &weekdays,
        minutes(241),
        &[
            ("2026-01-01T11:00:00Z", "closed, opens never"),
            ("2026-01-01T12:00:00Z", "too short, until 2026-01-01T16:00:00Z, next never"),
        ],
    );
}

#[test]
fn windows_cross_midnight_and_belong_to_the_day_on_which_they_begin() {
    let friday_night = windows(&[window(&[Day::Fri], "22:00", "8h", "America/New_York")], &[]);
    check(
        &friday_night,
        minutes(30),
        &[
            ("2026-01-03T02:59:00Z", "closed, opens 2026-01-03T03:00:00Z"),
            ("2026-01-03T06:00:00Z", "open until 2026-01-03T11:00:00Z"),
            ("2026-01-03T11:00:00Z", "closed, opens 2026-01-10T03:00:00Z"),
        ],
    );
}

#[test]
fn windows_that_overlap_or_touch_are_one() {
    let every = windows(
        &[
            window(&[Day::Thu], "10:00", "2h", "UTC"),
            window(&[Day::Thu], "12:00", "2h", "UTC"),
            window(&[Day::Thu], "14:30", "2h", "Europe/Berlin"),
        ],
        &[],
    );
    check(
        &every,
        minutes(300),
        &[
            ("2026-01-01T10:30:00Z", "open until 2026-01-01T15:30:00Z"),
            ("2026-01-01T09:00:00Z", "closed, opens 2026-01-01T10:00:00Z"),
        ],
    );
    // Whatever lasts a week and more never ends.
    for duration in ["7d1h", "30d", "99999999999999d"] {
        let for_ever = windows(&[window(&[Day::Mon], "03:00", duration, "Europe/Berlin")], &[]);
        let Opening::Open { until } = for_ever.at(at("2026-03-29T01:30:00Z"), minutes(30)) else {
            panic!("{duration}")
        };
        assert_eq!(until, at("2027-05-03T01:30:00Z"), "{duration}: as far as anybody looks");
    }
}

#[test]
fn blackouts_cut_whole_local_days_out_of_windows() {
    let nights = windows(
        &[window(&[], "22:00", "6h", "Europe/Berlin")],
        &[blackout("2026-12-24", None, "Europe/Berlin")],
    );
    check(
        &nights,
        minutes(60),
        &[
            ("2026-12-23T21:30:00Z", "open until 2026-12-23T23:00:00Z"),
            ("2026-12-23T22:30:00Z", "too short, until 2026-12-23T23:00:00Z, next 2026-12-24T23:00:00Z"),
            ("2026-12-23T23:30:00Z", "closed, opens 2026-12-24T23:00:00Z"),
            // What the night to the 25th has left after midnight.
            ("2026-12-24T23:00:00Z", "open until 2026-12-25T03:00:00Z"),
        ],
    );
    let never =
        windows(&[window(&[], "22:00", "6h", "UTC")], &[blackout("2026-01-01", Some("9999-12-31"), "UTC")]);
    check(&never, minutes(1), &[("2026-01-02T00:00:00Z", "closed, opens never")]);
}

#[test]
fn four_hours_are_four_hours_also_when_the_clocks_change() {
    let berlin = windows(&[window(&[], "01:00", "4h", "Europe/Berlin")], &[]);
    check(
        &berlin,
        minutes(30),
        &[
            // In March the clocks go from 02:00 to 03:00, so that the window ends at 06:00 local time.
            ("2026-03-29T00:00:00Z", "open until 2026-03-29T04:00:00Z"),
            // In October from 03:00 back to 02:00: it ends at 04:00.
            ("2026-10-25T00:00:00Z", "open until 2026-10-25T03:00:00Z"),
            ("2026-10-24T22:59:00Z", "closed, opens 2026-10-24T23:00:00Z"),
        ],
    );
}

#[test]
fn a_start_that_the_clocks_jump_over_is_right_after_the_jump() {
    for (zone, start, before, opens) in [
        ("Europe/Berlin", "02:30", "2026-03-29T00:59:00Z", "2026-03-29T01:00:00Z"),
        ("America/New_York", "02:30", "2026-03-08T06:59:00Z", "2026-03-08T07:00:00Z"),
        // Half an hour, from 02:00 to 02:30.
        ("Australia/Lord_Howe", "02:15", "2026-10-03T15:29:00Z", "2026-10-03T15:30:00Z"),
    ] {
        let night = windows(&[window(&[], start, "1h", zone)], &[]);
        check(&night, minutes(60), &[(before, &format!("closed, opens {opens}"))]);
    }
}

#[test]
fn a_start_that_the_clocks_show_twice_is_the_first() {
    for (zone, start, opens, closes) in [
        ("Europe/Berlin", "02:30", "2026-10-25T00:30:00Z", "2026-10-25T01:30:00Z"),
        ("Australia/Lord_Howe", "01:45", "2026-04-04T14:45:00Z", "2026-04-04T15:45:00Z"),
    ] {
        let night = windows(&[window(&[], start, "1h", zone)], &[]);
        check(&night, minutes(60), &[(opens, &format!("open until {closes}"))]);
        assert!(!night.at(at(closes), minutes(1)).is_open(), "once is enough");
    }
}

#[test]
fn a_day_that_begins_after_midnight_is_black_from_its_first_moment() {
    // In Cairo the clocks go from 00:00 to 01:00.
    let dark = windows(&[], &[blackout("2026-04-24", None, "Africa/Cairo")]);
    check(&dark, minutes(0), &[("2026-04-23T21:59:00Z", "open until 2026-04-23T22:00:00Z")]);
}

#[test]
fn the_ends_of_time_are_no_trouble() {
    let some =
        windows(&[window(&[], "23:59", "24h", "Pacific/Apia")], &[blackout("9999-12-31", None, "UTC")]);
    for now in [Timestamp::MIN, Timestamp::MAX, Timestamp::UNIX_EPOCH] {
        some.at(now, SignedDuration::MAX);
        some.at(now, minutes(30));
    }
}

#[test]
fn a_visit_is_expected_to_take_what_nine_of_ten_took() {
    let of = |known: &[i64]| expected(known.iter().map(|m| minutes(*m))).as_mins();
    for (known, expected) in [
        (vec![], 30),
        (vec![5, 7], 30),
        (vec![5, 7, -1], 30),
        (vec![5, 9, 7], 9),
        ((1..=10).collect(), 9),
        ((1..=11).collect(), 10),
        ((1..=100).rev().collect(), 90),
        // One that took three days does not decide for the others.
        ((1..=19).chain([4320]).collect(), 18),
    ] {
        assert_eq!(of(&known), expected, "{known:?}");
    }
}

const ZONES: [&str; 4] = ["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe"];

/// Shortly before the clocks change somewhere, or any day.
const EVES: [&str; 7] = [
    "2026-03-27T00:00:00Z",
    "2026-10-23T00:00:00Z",
    "2026-03-06T00:00:00Z",
    "2026-10-30T00:00:00Z",
    "2026-04-03T00:00:00Z",
    "2026-10-02T00:00:00Z",
    "2026-06-10T00:00:00Z",
];

fn some_windows() -> impl Strategy<Value = Vec<WindowSpec>> {
    let days = vec![Day::Mon, Day::Tue, Day::Wed, Day::Thu, Day::Fri, Day::Sat, Day::Sun];
    let days = prop::collection::vec(select(days), 0..3);
    let start = (0..24_u32, select(vec![0, 1, 15, 29, 30, 31, 45, 59]));
    let one = (days, start, 1..2000_i64, select(ZONES.to_vec()));
    let one = one.prop_map(|(days, (hour, minute), length, zone)| {
        window(&days, &format!("{hour:02}:{minute:02}"), &format!("{length}m"), zone)
    });
    prop::collection::vec(one, 0..4)
}

/// Some of the days around an eve.
fn some_blackouts() -> impl Strategy<Value = Vec<(i64, i64, &'static str)>> {
    prop::collection::vec((0..8_i64, 0..3_i64, select(ZONES.to_vec())), 0..2)
}

/// What is open in each minute of some days, read off the clocks of each zone, with nothing but their hands.
struct Clocks {
    from: Timestamp,
    open: Vec<bool>,
}

impl Clocks {
    /// Windows that began so long before count too.
    const BEFORE: i64 = 3 * 1440;

    fn read(from: Timestamp, days: i64, windows: &[WindowSpec], blackouts: &[BlackoutSpec]) -> Self {
        let total = Self::BEFORE + days * 1440;
        let minute = |m: i64| from + minutes(m - Self::BEFORE);
        let zone = |name: &Option<String>| jiff::tz::db().get(name.as_deref().unwrap_or("UTC")).unwrap();
        let mut open = vec![windows.is_empty(); usize::try_from(total).unwrap()];
        for spec in windows {
            let shows: Vec<DateTime> =
                (0..total).map(|m| zone(&spec.time_zone).to_datetime(minute(m))).collect();
            let length: usize = spec.duration.strip_suffix('m').unwrap().parse().unwrap();
            let mut latest = shows[0];
            for m in 1..shows.len() {
                // The hands have never been there before, and the last time they moved they passed the start.
                let start: Time = spec.start.parse().unwrap();
                let passed = [latest.date(), shows[m].date()].into_iter().find(|day| {
                    let begin = day.to_datetime(start);
                    latest < begin && begin <= shows[m]
                });
                let day = |day: Date| format!("{:?}", day.weekday());
                let meant = |at: Date| {
                    spec.days.is_empty() || spec.days.iter().any(|d| day(at).starts_with(&format!("{d:?}")))
                };
                if passed.is_some_and(meant) {
                    let end = (m + length).min(open.len());
                    open[m..end].fill(true);
                }
                latest = latest.max(shows[m]);
            }
        }
        for spec in blackouts {
            for (m, open) in open.iter_mut().enumerate() {
                let day =
                    zone(&spec.time_zone).to_datetime(minute(i64::try_from(m).unwrap())).date().to_string();
                *open &= day < spec.from || day > *spec.until.as_ref().unwrap();
            }
        }
        let skip = usize::try_from(Self::BEFORE).unwrap();
        Self { from, open: open.split_off(skip) }
    }

    /// How many minutes in a row are open from this one on.
    fn run(&self, minute: usize) -> usize {
        self.open[minute..].iter().take_while(|open| **open).count()
    }

    fn minute(&self, minute: usize) -> Timestamp {
        self.from + minutes(i64::try_from(minute).unwrap())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_open_is_what_the_clocks_say(
        specs in some_windows(),
        dark in some_blackouts(),
        eve in select(EVES.to_vec()),
        nows in prop::collection::vec(0..5 * 1440_usize, 20),
        needs in 1..600_usize,
    ) {
        let from = at(eve);
        let day = |days: i64| (from + minutes(days * 1440)).to_string()[..10].to_owned();
        let dark: Vec<BlackoutSpec> =
            dark.iter().map(|(first, more, zone)| blackout(&day(*first), Some(&day(first + more)), zone)).collect();
        let windows = windows(&specs, &dark);
        let days = 14;
        let clocks = Clocks::read(from, days, &specs, &dark);
        let last = clocks.open.len();
        let needed = minutes(i64::try_from(needs).unwrap());
        for now in nows {
            let run = clocks.run(now);
            let at_the_end = now + run == last;
            // What is beyond the last minute is not known.
            let next = (now + run..last).find(|m| {
                clocks.run(*m) >= needs && (*m == 0 || !clocks.open[m - 1])
            });
            match windows.at(clocks.minute(now), needed) {
                Opening::Always => prop_assert!(at_the_end && specs.is_empty()),
                Opening::Open { until } => {
                    prop_assert!(run >= needs);
                    prop_assert!(at_the_end || until == clocks.minute(now + run), "{} {}", until, run);
                    prop_assert!(until > clocks.minute(now));
                }
                Opening::TooShort { until, next: opens } => {
                    prop_assert!(0 < run && (run < needs));
                    prop_assert_eq!(until, clocks.minute(now + run));
                    prop_assert!(next.is_none() || opens == next.map(|m| clocks.minute(m)), "{:?} {:?}", opens, next);
                }
                Opening::Closed { opens } => {
                    prop_assert_eq!(run, 0);
                    prop_assert!(next.is_none() || opens == next.map(|m| clocks.minute(m)), "{:?} {:?}", opens, next);
                }
            }
        }
    }

    #[test]
    fn the_next_opening_is_one_and_nothing_is_open_a_moment_before(
        specs in some_windows(),
        eve in select(EVES.to_vec()),
        now in 0..5 * 1440_i64,
        needs in 1..600_i64,
    ) {
        let windows = windows(&specs, &[blackout("2026-10-24", Some("2026-10-25"), "Europe/Berlin")]);
        let (now, needs) = (at(eve) + minutes(now), minutes(needs));
        if let Opening::Closed { opens: Some(at) } | Opening::TooShort { next: Some(at), .. } = windows.at(now, needs) {
            prop_assert!(at > now);
            prop_assert!(windows.at(at, needs).is_open());
            prop_assert!(!windows.at(at - SignedDuration::from_nanos(1), needs).is_open());
        }
    }
}
