//! Texts and numbers of a policy, each with the field to mend if it is none.

use jiff::SignedDuration;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::core::Selector;

use super::{Amount, Problem};
use crate::selector::{self, Labels};

pub(super) fn duration(text: &str, field: &str) -> Result<SignedDuration, Problem> {
    let parsed: Result<SignedDuration, _> = text.parse();
    parsed.map_err(|_| problem(format!("\"{text}\" is not a duration such as 30m or 2h"), field))
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

pub(super) fn problem(what: impl Into<String>, field: impl Into<String>) -> Problem {
    Problem { what: what.into(), field: field.into() }
}
