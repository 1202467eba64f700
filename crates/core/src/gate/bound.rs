//! Numbers that a gate reports, and what they must be.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use serde_json::Value;

use crate::api::BoundSpec;
use crate::policy::{Problem, problem};

/// Numbers of one sample, by field as the bound names it, or as it is called in the output.
pub type Numbers = BTreeMap<String, f64>;

/// How many numbers that nobody asked for are kept for people to read.
const KEPT_MAX: usize = 16;

/// What one number must be.
#[derive(Clone, Debug, PartialEq)]
pub struct Bound {
    /// A JSON pointer, or names with dots.
    pub field: Cow<'static, str>,
    /// At least.
    pub min: Option<f64>,
    /// At most.
    pub max: Option<f64>,
    /// At most so much more than before.
    pub max_increase: Option<f64>,
    /// At most so much less than before.
    pub max_decrease: Option<f64>,
}

/// How a number is out of its bounds, or why there is none.
#[derive(Clone, Debug, PartialEq)]
pub enum Missed {
    /// It is not in the output, or is no number.
    NoNumber {
        /// The field.
        field: String,
    },
    /// Below the least.
    Below {
        /// The field.
        field: String,
        /// What it is.
        is: f64,
        /// What it must be at least.
        min: f64,
    },
    /// Above the most.
    Above {
        /// The field.
        field: String,
        /// What it is.
        is: f64,
        /// What it may be at most.
        max: f64,
    },
    /// More than before by more than it may.
    Grew {
        /// The field.
        field: String,
        /// What it was.
        was: f64,
        /// What it is.
        is: f64,
        /// By how much it may.
        by_max: f64,
    },
    /// Less than before by more than it may.
    Shrank {
        /// The field.
        field: String,
        /// What it was.
        was: f64,
        /// What it is.
        is: f64,
        /// By how much it may.
        by_max: f64,
    },
}

/// What a bound makes of a number.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Judged {
    Kept,
    Missed(Missed),
    /// There is nothing to compare with.
    NoBefore,
}

impl Bound {
    /// A number that must not be below what it was before.
    pub(super) const fn no_less_than_before(field: &'static str) -> Self {
        Self::compared(field, None, Some(0.0))
    }

    /// A number that must not be above what it was before by more than `by`.
    pub(super) const fn no_more_than_before(field: &'static str, by: f64) -> Self {
        Self::compared(field, Some(by), None)
    }

    const fn compared(field: &'static str, max_increase: Option<f64>, max_decrease: Option<f64>) -> Self {
        Self { field: Cow::Borrowed(field), min: None, max: None, max_increase, max_decrease }
    }

    /// It needs a sample from before.
    pub fn compares(&self) -> bool {
        self.max_increase.is_some() || self.max_decrease.is_some()
    }

    /// How a number is out of its range, whatever it was before.
    pub(crate) fn missed_by(&self, is: f64) -> Option<Missed> {
        let Self { field, min, max, .. } = self;
        let field = || field.clone().into_owned();
        let below = min.filter(|min| is < *min).map(|min| Missed::Below { field: field(), is, min });
        below.or_else(|| max.filter(|max| is > *max).map(|max| Missed::Above { field: field(), is, max }))
    }

    pub(super) fn judge(&self, before: Option<&Numbers>, after: &Numbers) -> Judged {
        let Self { field, max_increase, max_decrease, .. } = self;
        let name = || field.clone().into_owned();
        let Some(&is) = after.get(field.as_ref()) else {
            return Judged::Missed(Missed::NoNumber { field: name() });
        };
        if let Some(missed) = self.missed_by(is) {
            return Judged::Missed(missed);
        }
        if !self.compares() {
            return Judged::Kept;
        }
        let Some(&was) = before.and_then(|before| before.get(field.as_ref())) else {
            return Judged::NoBefore;
        };
        if let Some(by_max) = max_increase.filter(|by| is - was > *by) {
            return Judged::Missed(Missed::Grew { field: name(), was, is, by_max });
        }
        if let Some(by_max) = max_decrease.filter(|by| was - is > *by) {
            return Judged::Missed(Missed::Shrank { field: name(), was, is, by_max });
        }
        Judged::Kept
    }
}

impl fmt::Display for Missed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Missed::NoNumber { field } => write!(f, "its output has no number {field}"),
            Missed::Below { field, is, min } => write!(f, "{field} is {is} and must be at least {min}"),
            Missed::Above { field, is, max } => write!(f, "{field} is {is} and must be at most {max}"),
            Missed::Grew { field, was, is, by_max } => {
                write!(f, "{field} was {was} before and is {is}; it may grow by {by_max}")
            }
            Missed::Shrank { field, was, is, by_max } => {
                write!(f, "{field} was {was} before and is {is}; it may shrink by {by_max}")
            }
        }
    }
}

/// The policy's bounds and the preset's, but for those that the policy has its own of.
pub(super) fn read(own: &[BoundSpec], preset: &[Bound], field: &str) -> Result<Vec<Bound>, Problem> {
    for spec in own {
        let BoundSpec { field: name, min, max, max_increase, max_decrease } = spec;
        let limits = [min, max, max_increase, max_decrease];
        if name.is_empty() || limits.iter().all(|limit| limit.is_none()) {
            let what = "a bound needs a field and at least one of min, max, maxIncrease and maxDecrease";
            return Err(problem(what, field));
        }
        if min.zip(*max).is_some_and(|(min, max)| min > max) {
            return Err(problem(format!("the bound on {name} has a min above its max"), field));
        }
    }
    let others = preset.iter().filter(|bound| own.iter().all(|spec| spec.field != bound.field));
    let own = own.iter().map(|spec| Bound {
        field: Cow::Owned(spec.field.clone()),
        min: spec.min,
        max: spec.max,
        max_increase: spec.max_increase,
        max_decrease: spec.max_decrease,
    });
    Ok(own.chain(others.cloned()).collect())
}

/// The numbers of a JSON object: those that bounds name, and some others that are on its first level, for people.
pub(super) fn numbers(output: &Value, bounds: &[Bound]) -> Numbers {
    let named = bounds.iter().filter_map(|bound| {
        let number = find(output, &bound.field)?.as_f64()?;
        Some((bound.field.clone().into_owned(), number))
    });
    let named: Numbers = named.collect();
    let others = output.as_object().into_iter().flatten().filter(|(name, _)| !named.contains_key(*name));
    let others = others.filter_map(|(name, value)| Some((name.clone(), value.as_f64()?))).take(KEPT_MAX);
    others.chain(named.clone()).collect()
}

/// `/gpu/0/errors` is a JSON pointer; `gpu.0.errors` is the same, unless a field is really called that.
fn find<'a>(output: &'a Value, field: &str) -> Option<&'a Value> {
    if field.starts_with('/') {
        return output.pointer(field);
    }
    let by_dots = || output.pointer(&format!("/{}", field.replace('.', "/")));
    output.get(field).or_else(by_dots)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn on(field: &'static str) -> Bound {
        Bound::compared(field, None, None)
    }

    #[test]
    fn numbers_are_found_by_pointer_and_by_dots() {
        let output = json!({"gpu": [{"errors": 3}], "a.b": 1, "rate": 2.5, "text": "7", "ok": true});
        for (field, found) in
            [("/gpu/0/errors", 3.0), ("gpu.0.errors", 3.0), ("a.b", 1.0), ("rate", 2.5), ("/rate", 2.5)]
        {
            assert_eq!(find(&output, field).and_then(Value::as_f64), Some(found), "{field}");
        }
        assert_eq!(find(&output, "gpu.1.errors"), None);
        let bounds = [Bound { max: Some(9.0), ..on("gpu.0.errors") }, on("text")];
        let kept = numbers(&output, &bounds);
        let wanted = [("a.b", 1.0), ("gpu.0.errors", 3.0), ("rate", 2.5)];
        assert_eq!(kept, wanted.map(|(name, number)| (name.to_owned(), number)).into());
    }

    #[test]
    fn bounds_hold_at_their_edges_and_not_beyond() {
        let sample = |number: f64| Numbers::from([("n".to_owned(), number)]);
        let judge = |bound: &Bound, was: Option<f64>, is: f64| {
            bound.judge(was.map(sample).as_ref(), &sample(is)) == Judged::Kept
        };
        let range = Bound { min: Some(1.0), max: Some(2.0), ..on("n") };
        let kept = [0.9, 1.0, 2.0, 2.1].map(|is| judge(&range, None, is));
        assert_eq!(kept, [false, true, true, false]);
        let grow = Bound::no_more_than_before("n", 2.0);
        assert_eq!([6.0, 7.0, 8.0, 0.0].map(|is| judge(&grow, Some(5.0), is)), [true, true, false, true]);
        let shrink = Bound::no_less_than_before("n");
        assert_eq!([6.0, 5.0, 4.0].map(|is| judge(&shrink, Some(5.0), is)), [true, true, false]);
        assert_eq!(grow.judge(None, &sample(1.0)), Judged::NoBefore);
        // A number that is out of its own range fails, whatever was before.
        let both = Bound { max: Some(2.0), ..grow };
        assert!(matches!(both.judge(None, &sample(3.0)), Judged::Missed(Missed::Above { .. })));
    }

    #[test]
    fn a_bound_of_the_policy_takes_the_place_of_the_presets() {
        let own = [BoundSpec { field: "a".into(), max: Some(5.0), ..BoundSpec::default() }];
        let preset = [Bound::no_less_than_before("a"), Bound::no_less_than_before("b")];
        let read = read(&own, &preset, "bounds").unwrap();
        let wanted = [Bound { max: Some(5.0), ..on("a") }, Bound::no_less_than_before("b")];
        assert_eq!(read, wanted);
    }
}
