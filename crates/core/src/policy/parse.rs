//! Texts and numbers of a policy, each with the field to mend if it is none.

use jiff::SignedDuration;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::core::Selector;

use super::{Amount, Problem};
use crate::selector::{self, Labels};

/// What admission takes, `([0-9]+(d|h|m|s))+`, and nothing else: a policy that was let in must not freeze its pool.
pub(crate) fn duration(text: &str, field: &str) -> Result<SignedDuration, Problem> {
    let bad = || problem(format!("\"{text}\" is not a duration such as 30m or 2h"), field);
    let (mut sum, mut rest) = (0_i64, text);
    while let Some(at) = rest.find(|c: char| !c.is_ascii_digit()) {
        let number: i64 = rest[..at].parse().map_err(|_| bad())?;
        let unit = match rest.as_bytes()[at] {
            b'd' => 86_400,
            b'h' => 3600,
            b'm' => 60,
            b's' => 1,
            _ => return Err(bad()),
        };
        sum = number.checked_mul(unit).and_then(|seconds| sum.checked_add(seconds)).ok_or_else(bad)?;
        rest = &rest[at + 1..];
    }
    if text.is_empty() || !rest.is_empty() {
        return Err(bad());
    }
    Ok(SignedDuration::from_secs(sum))
}

pub(super) fn amount(value: &IntOrString, field: &str) -> Result<Amount, Problem> {
    let name = field.rsplit('.').next().unwrap_or(field);
    Amount::try_from(value).map_err(|bad| problem(format!("{name} {bad}"), field))
}

/// 0 is no limit.
pub(super) fn seconds(value: i64, field: &str) -> Result<Option<SignedDuration>, Problem> {
    match value {
        0 => Ok(None),
        1.. => Ok(Some(SignedDuration::from_secs(value))),
        _ => Err(problem(format!("{value} seconds is not 0 or more"), field)),
    }
}

pub(super) fn select(text: &str, field: &str) -> Result<Selector, Problem> {
    selector::parse(text).map_err(|bad| problem(bad.to_string(), field))
}

pub(super) fn matches(selector: &Selector, labels: &Labels) -> bool {
    kube::core::SelectorExt::matches(selector, labels)
}

pub(crate) fn problem(what: impl Into<String>, field: impl Into<String>) -> Problem {
    Problem { what: what.into(), field: field.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_those_that_admission_takes() {
        let seconds = |text| duration(text, "field").map(|d| d.as_secs()).ok();
        for (text, expected) in
            [("30m", 1800), ("2h", 7200), ("1d", 86_400), ("1h30m", 5400), ("1s1h", 3601), ("0s", 0)]
        {
            assert_eq!(seconds(text), Some(expected), "{text}");
        }
        for text in ["", "5", "m", "-5m", "PT1H", "1h 30m", "1ms", "5\u{b5}s", "9999999999999999999h"] {
            assert_eq!(seconds(text), None, "{text}");
        }
    }
}
