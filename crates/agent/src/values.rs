//! Flags and variables in the spelling that the documented programs accept, and a little more.

use std::time::Duration;

/// A switch, as Go's `ParseBool` reads it.
pub fn switch(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        other => Err(format!("\"{other}\" is neither true nor false")),
    }
}

/// A duration as Go writes it (`1h30m`, `300s`, `1.5s`), or as a number of seconds.
pub fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("\"{text}\" is not a duration (expected 300s, 5m, 1h30m or a number of seconds)");
    let text = text.trim();
    let seconds = |number: f64, unit: f64| Duration::try_from_secs_f64(number * unit).map_err(|_| wrong());
    if let Ok(number) = text.parse::<f64>() {
        return seconds(number, 1.0);
    }
    let mut rest = text;
    let mut total = Duration::ZERO;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(wrong)?;
        let (number, after) = rest.split_at(digits);
        let end = after.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(after.len());
        let (unit, next) = after.split_at(end);
        let unit = match unit {
            "h" => 3600.0,
            "m" => 60.0,
            "s" => 1.0,
            "ms" => 1e-3,
            "us" | "µs" => 1e-6,
            "ns" => 1e-9,
            _ => return Err(wrong()),
        };
        let part = seconds(number.parse().map_err(|_| wrong())?, unit)?;
        total = total.checked_add(part).ok_or_else(wrong)?;
        rest = next;
    }
    if text.is_empty() { Err(wrong()) } else { Ok(total) }
}

/// For people: `5 min`, `90 s`.
pub fn in_words(time: Duration) -> String {
    match time.as_secs() {
        seconds if seconds >= 120 && seconds % 60 == 0 => format!("{} min", seconds / 60),
        seconds => format!("{seconds} s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_gos_or_bare_seconds() {
        for (text, millis) in [
            ("0", 0),
            ("0s", 0),
            ("300", 300_000),
            ("300s", 300_000),
            ("5m", 300_000),
            ("1h30m", 5_400_000),
            ("1.5s", 1_500),
            ("250ms", 250),
        ] {
            assert_eq!(duration(text), Ok(Duration::from_millis(millis)), "{text}");
        }
        let endless = "9223372036854775807s".repeat(3);
        for text in ["", "-5s", "5 apples", "s", "5m3", "1e30", "inf", "NaN", &endless] {
            assert!(duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn switches_are_spelled_as_in_go() {
        for text in ["1", "t", "T", "true", "TRUE", "True"] {
            assert_eq!(switch(text), Ok(true));
        }
        for text in ["0", "f", "F", "false", "FALSE", "False"] {
            assert_eq!(switch(text), Ok(false));
        }
        for text in ["yes", "on", "", "tRUE"] {
            assert!(switch(text).is_err(), "{text}");
        }
    }
}
