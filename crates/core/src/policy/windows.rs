//! Windows and blackouts: from the texts of a policy to hours and dates.

use jiff::civil::{Date, Time, Weekday};
use jiff::tz::{TimeZone, TimeZoneDatabase};

use super::Problem;
use super::parse::{duration, problem};
use crate::api::{BlackoutSpec, Day, WindowSpec};
use crate::windows::{Blackout, Window, Windows};

const WINDOWS: &str = "spec.rollout.windows";
const BLACKOUTS: &str = "spec.rollout.blackouts";

/// A name that is less like the one that was written is no help.
const LIKENESS_MIN: f64 = 0.75;

impl Windows {
    /// What a policy says about when nodes may start.
    pub fn read(windows: &[WindowSpec], blackouts: &[BlackoutSpec]) -> Result<Self, Problem> {
        let windows = windows.iter().enumerate().map(|(index, spec)| window(index, spec));
        let blackouts = blackouts.iter().enumerate().map(|(index, spec)| blackout(index, spec));
        Ok(Self::new(windows.collect::<Result<_, _>>()?, blackouts.collect::<Result<_, _>>()?))
    }
}

fn window(index: usize, spec: &WindowSpec) -> Result<Window, Problem> {
    let field = |name: &str| format!("{WINDOWS}[{index}].{name}");
    let length = duration(&spec.duration, &field("duration"))?;
    if length.is_zero() {
        return Err(problem("a window of no length never opens", field("duration")));
    }
    Ok(Window {
        days: spec.days.iter().map(|day| weekday(*day)).collect(),
        start: time(&spec.start, &field("start"))?,
        length,
        zone: zone(spec.time_zone.as_deref(), &field("timeZone"))?,
    })
}

fn blackout(index: usize, spec: &BlackoutSpec) -> Result<Blackout, Problem> {
    let field = |name: &str| format!("{BLACKOUTS}[{index}].{name}");
    let from = date(&spec.from, &field("from"))?;
    let until = spec.until.as_ref().map(|text| date(text, &field("until"))).transpose()?.unwrap_or(from);
    if until < from {
        return Err(problem(format!("the last day {until} is before the first day {from}"), field("until")));
    }
    Ok(Blackout { from, until, zone: zone(spec.time_zone.as_deref(), &field("timeZone"))? })
}

/// What admission takes, `22:00`, and nothing else.
fn time(text: &str, field: &str) -> Result<Time, Problem> {
    let bad = || problem(format!("\"{text}\" is not a time of day such as 22:00"), field);
    let digits = |text: &str| text.len() == 2 && text.bytes().all(|b| b.is_ascii_digit());
    let (hour, minute) = text.split_once(':').filter(|(h, m)| digits(h) && digits(m)).ok_or_else(bad)?;
    let (hour, minute) = (hour.parse().map_err(|_| bad())?, minute.parse().map_err(|_| bad())?);
    Time::new(hour, minute, 0, 0).map_err(|_| bad())
}

/// What admission takes, `2026-12-24`, and nothing else.
fn date(text: &str, field: &str) -> Result<Date, Problem> {
    let bad = || problem(format!("\"{text}\" is not a date such as 2026-12-24"), field);
    let date: Date = text.parse().map_err(|_| bad())?;
    // Parsers of dates take more than people write: other forms, times of day.
    Some(date).filter(|date| date.to_string() == text).ok_or_else(bad)
}

/// A time zone by its name. The database is the one in the binary, so the answer is the same on every machine.
fn zone(name: Option<&str>, field: &str) -> Result<TimeZone, Problem> {
    let Some(name) = name else { return Ok(TimeZone::UTC) };
    let database = TimeZoneDatabase::bundled();
    if let Some(zone) = database.get(name).ok().filter(|zone| !zone.is_unknown()) {
        return Ok(zone);
    }
    let like = |known: &str| strsim::jaro_winkler(&name.to_lowercase(), &known.to_lowercase());
    let names = database.available().map(|known| (like(known.as_str()), known.to_string()));
    // Of two that are alike, the first by name: the sentence must not change from pass to pass.
    let nearest = names.filter(|(likeness, _)| *likeness >= LIKENESS_MIN);
    let nearest = nearest.max_by(|(a, one), (b, other)| a.total_cmp(b).then_with(|| other.cmp(one)));
    let hint = nearest.map_or_else(
        || "use an IANA name such as Europe/Berlin".to_owned(),
        |(_, known)| format!("did you mean {known}?"),
    );
    Err(problem(format!("\"{name}\" is not a time zone that is known here; {hint}"), field))
}

fn weekday(day: Day) -> Weekday {
    match day {
        Day::Mon => Weekday::Monday,
        Day::Tue => Weekday::Tuesday,
        Day::Wed => Weekday::Wednesday,
        Day::Thu => Weekday::Thursday,
        Day::Fri => Weekday::Friday,
        Day::Sat => Weekday::Saturday,
        Day::Sun => Weekday::Sunday,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(start: &str, duration: &str, zone: Option<&str>) -> WindowSpec {
        WindowSpec {
            days: vec![],
            start: start.to_owned(),
            duration: duration.to_owned(),
            time_zone: zone.map(str::to_owned),
        }
    }

    fn dates(from: &str, until: Option<&str>) -> BlackoutSpec {
        BlackoutSpec { from: from.to_owned(), until: until.map(str::to_owned), time_zone: None }
    }

    fn complaint(windows: &[WindowSpec], blackouts: &[BlackoutSpec]) -> String {
        let Problem { what, field } = Windows::read(windows, blackouts).unwrap_err();
        format!("{field}: {what}")
    }

    #[test]
    fn good_windows_are_read() {
        let zones = [None, Some("UTC"), Some("Europe/Berlin"), Some("Etc/GMT+5"), Some("america/new_york")];
        for zone in zones {
            assert!(Windows::read(&[spec("23:59", "1h30m", zone)], &[]).is_ok(), "{zone:?}");
        }
        assert!(
            Windows::read(&[], &[dates("2028-02-29", None), dates("2026-12-24", Some("2027-01-01"))]).is_ok()
        );
        assert!(Windows::read(&[], &[]).is_ok_and(|windows| windows.is_always()));
    }

    #[test]
    fn each_bad_value_is_named_with_its_field() {
        let good = || spec("22:00", "4h", None);
        let window = |bad: WindowSpec| complaint(&[good(), bad], &[]);
        for start in ["24:00", "7:00", "07:60", "0700", "+7:00", "", "07:00:00"] {
            let said =
                format!("spec.rollout.windows[1].start: \"{start}\" is not a time of day such as 22:00");
            assert_eq!(window(spec(start, "4h", None)), said);
        }
        assert_eq!(
            window(spec("22:00", "4 hours", None)),
            "spec.rollout.windows[1].duration: \"4 hours\" is not a duration such as 30m or 2h"
        );
        assert_eq!(
            window(spec("22:00", "0h", None)),
            "spec.rollout.windows[1].duration: a window of no length never opens"
        );
        for from in ["2026-02-30", "2027-02-29", "20261224", "2026-12-24T00:00", "24.12.2026"] {
            let said = format!("spec.rollout.blackouts[0].from: \"{from}\" is not a date such as 2026-12-24");
            assert_eq!(complaint(&[], &[dates(from, None)]), said);
        }
        assert_eq!(
            complaint(&[], &[dates("2026-12-24", Some("2026-12-23"))]),
            "spec.rollout.blackouts[0].until: the last day 2026-12-23 is before the first day 2026-12-24"
        );
    }

    #[test]
    fn an_unknown_time_zone_is_refused_with_the_nearest_name() {
        let zone = |name: &str| complaint(&[spec("22:00", "4h", Some(name))], &[]);
        for (name, nearest) in [
            ("Europe/Berlni", "did you mean Europe/Berlin?"),
            ("Amercia/New_York", "did you mean America/New_York?"),
            ("Australia/LordHowe", "did you mean Australia/Lord_Howe?"),
            ("qqq", "use an IANA name such as Europe/Berlin"),
        ] {
            let said = format!("\"{name}\" is not a time zone that is known here; {nearest}");
            assert_eq!(zone(name), format!("spec.rollout.windows[0].timeZone: {said}"));
        }
        assert!(zone("Etc/Unknown").contains("not a time zone"));
    }
}
