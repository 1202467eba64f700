//! Questions to a Prometheus: policy in, a [`Question`] out; its [`Answer`] in, a number that keeps its bound, or not, out.
//!
//! An answer is a fact like any other: somebody else asks, and what comes back is in the Snapshot. No answer, none with a
//! number, or one that is only a part of it is a reason not to judge, never a pass. `prometheus/read.rs` reads what a server
//! sends.

mod read;

use std::borrow::Cow;

use jiff::Timestamp;

pub use read::read;

use crate::api::QuerySpec;
use crate::gate::{Bound, Missed};
use crate::policy::{Problem, problem};

/// What a Prometheus is asked.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Question {
    /// Where it is, without the path of its API.
    pub url: String,
    /// PromQL.
    pub query: String,
}

/// What came of a question.
#[derive(Clone, PartialEq, Debug)]
pub struct Answer {
    /// When it was asked.
    pub asked_at: Timestamp,
    /// The values, or why there are none.
    pub said: Result<Values, String>,
}

/// One series.
#[derive(Clone, PartialEq, Debug)]
pub struct Series {
    /// Which, as Prometheus writes it; empty if the query leaves no label.
    pub labels: String,
    /// Its value; always finite.
    pub value: f64,
}

/// All series of an answer, as far as a bound can be held against them: there may be thousands.
#[derive(Clone, PartialEq, Debug)]
pub struct Values {
    /// The one with the lowest value.
    pub lowest: Series,
    /// The one with the highest.
    pub highest: Series,
}

impl Values {
    /// One series.
    pub fn one(value: f64) -> Self {
        let series = Series { labels: String::new(), value };
        Self { lowest: series.clone(), highest: series }
    }
}

/// A query of a bake, every value known.
#[derive(Clone, Debug, PartialEq)]
pub struct Query {
    /// Its name.
    pub name: String,
    /// What is asked.
    pub question: Question,
    /// What every value must be.
    pub bound: Bound,
}

impl Query {
    /// Reads a query of a policy; `field` is where it stands.
    pub(crate) fn read(spec: &QuerySpec, url: &str, field: &str) -> Result<Self, Problem> {
        let QuerySpec { name, query, min, max } = spec;
        if query.trim().is_empty() {
            return Err(problem(format!("query {name} is empty"), field));
        }
        if min.is_none() && max.is_none() {
            return Err(problem(format!("query {name} needs min, max or both"), field));
        }
        if min.zip(*max).is_some_and(|(min, max)| min > max) {
            return Err(problem(format!("query {name} has a min above its max"), field));
        }
        let bound = Bound {
            field: Cow::Owned(name.clone()),
            min: *min,
            max: *max,
            max_increase: None,
            max_decrease: None,
        };
        let question = Question { url: url.trim_end_matches('/').to_owned(), query: query.clone() };
        Ok(Self { name: name.clone(), question, bound })
    }

    /// The series that is nearest to the bound, or farthest beyond it.
    pub fn tightest<'a>(&self, values: &'a Values) -> &'a Series {
        let Values { lowest, highest } = values;
        let room_below = self.bound.min.map_or(f64::INFINITY, |min| lowest.value - min);
        let room_above = self.bound.max.map_or(f64::INFINITY, |max| max - highest.value);
        if room_below < room_above { lowest } else { highest }
    }

    /// How the values are out of their bounds, in a sentence.
    pub fn missed(&self, values: &Values) -> Option<String> {
        let worst = self.tightest(values);
        let missed: Missed = self.bound.missed_by(worst.value)?;
        let of = if worst.labels.is_empty() { String::new() } else { format!(" ({})", worst.labels) };
        Some(format!("query {missed}{of}"))
    }
}

/// Whether an address is one that a question can be sent to: no name and password in it, no parameters.
pub(crate) fn is_address(url: &str) -> bool {
    let rest = url.strip_prefix("http://").or_else(|| url.strip_prefix("https://"));
    let host = rest.and_then(|rest| rest.split('/').next());
    host.is_some_and(|host| !host.is_empty() && !host.contains('@')) && !url.contains(['?', '#', ' '])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn query(min: Option<f64>, max: Option<f64>) -> Query {
        let spec = QuerySpec { name: "xid-errors".into(), query: "sum(xid)".into(), min, max };
        Query::read(&spec, "http://prometheus:9090/", "queries").unwrap()
    }

    fn values(lowest: f64, highest: f64) -> Values {
        let series = |labels: &str, value| Series { labels: labels.to_owned(), value };
        Values { lowest: series(r#"{gpu="0"}"#, lowest), highest: series(r#"{gpu="7"}"#, highest) }
    }

    #[test]
    fn every_series_must_keep_the_bound() {
        let table = [
            (None, Some(5.0), 5.0, None),
            (None, Some(2.0), 5.0, Some(r#"query xid-errors is 5 and must be at most 2 ({gpu="7"})"#)),
            (Some(0.0), None, 0.0, None),
            (Some(0.5), None, 0.0, Some(r#"query xid-errors is 0 and must be at least 0.5 ({gpu="0"})"#)),
            (Some(-1.0), Some(9.0), 0.0, None),
            (
                Some(0.5),
                Some(9.0),
                0.0,
                Some(r#"query xid-errors is 0 and must be at least 0.5 ({gpu="0"})"#),
            ),
        ];
        for (min, max, tightest, missed) in table {
            let query = query(min, max);
            let values = values(0.0, 5.0);
            assert!((query.tightest(&values).value - tightest).abs() < 1e-9, "{min:?} {max:?}");
            assert_eq!(query.missed(&values).as_deref(), missed, "{min:?} {max:?}");
        }
        assert_eq!(query(None, Some(2.0)).question.url, "http://prometheus:9090");
    }

    #[test]
    fn an_address_has_a_host_and_nothing_that_is_secret() {
        let good =
            ["http://prometheus:9090", "https://[::1]:9090/prefix/", "http://a.b/select/0:0/prometheus"];
        let bad =
            ["prometheus:9090", "http://", "ftp://a", "http://me:secret@a", "http://a/?x=1", "http://a b"];
        assert!(good.into_iter().all(is_address));
        assert!(!bad.into_iter().any(is_address));
    }
}
