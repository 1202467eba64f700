//! Label selectors as people write them in policies (`app=web,tier in (a, b),!legacy`).
//!
//! kube's [`Selector`] does the matching; it has no parser, so the text form is read here.

use std::collections::{BTreeMap, BTreeSet};

use kube::core::{Expression, Selector};

/// An object's labels.
pub type Labels = BTreeMap<String, String>;

/// A selector that cannot be read.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "\"{term}\" is not a label selector term (expected key=value, key!=value, key in (a, b), key notin (a, b), key or !key)"
)]
pub struct BadSelector {
    /// The part that does not fit.
    pub term: String,
}

/// Reads a selector; the empty text selects everything.
pub fn parse(text: &str) -> Result<Selector, BadSelector> {
    split_terms(text).map(str::trim).filter(|term| !term.is_empty()).map(parse_term).collect()
}

/// Splits at commas that are not inside parentheses.
fn split_terms(text: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0_i32;
    text.split(move |c| {
        depth += i32::from(c == '(') - i32::from(c == ')');
        c == ',' && depth == 0
    })
}

fn parse_term(term: &str) -> Result<Expression, BadSelector> {
    let bad = || BadSelector { term: term.to_owned() };
    let key = |text: &str| Some(text.trim().to_owned()).filter(|k| is_key(k)).ok_or_else(bad);
    let value = |text: &str| Some(text.trim().to_owned()).filter(|v| is_value(v)).ok_or_else(bad);
    if let Some((left, right)) = term.split_once(" notin ") {
        return Ok(Expression::NotIn(key(left)?, parse_set(right).ok_or_else(bad)?));
    }
    if let Some((left, right)) = term.split_once(" in ") {
        return Ok(Expression::In(key(left)?, parse_set(right).ok_or_else(bad)?));
    }
    if let Some((left, right)) = term.split_once("!=") {
        return Ok(Expression::NotEqual(key(left)?, value(right)?));
    }
    if let Some((left, right)) = term.split_once("==").or_else(|| term.split_once('=')) {
        return Ok(Expression::Equal(key(left)?, value(right)?));
    }
    match term.strip_prefix('!') {
        Some(rest) => Ok(Expression::DoesNotExist(key(rest)?)),
        None => Ok(Expression::Exists(key(term)?)),
    }
}

fn parse_set(text: &str) -> Option<BTreeSet<String>> {
    let inner = text.trim().strip_prefix('(')?.strip_suffix(')')?;
    inner.split(',').map(|v| Some(v.trim().to_owned()).filter(|v| is_value(v))).collect()
}

fn is_key(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_./".contains(c))
}

fn is_value(text: &str) -> bool {
    text.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
}

#[cfg(test)]
mod tests {
    use kube::core::SelectorExt;

    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    }

    #[test]
    fn terms_select_what_kubectl_would_select() {
        let pod = labels(&[("app", "web"), ("tier", "a")]);
        for (selector, matches) in [
            ("", true),
            ("app=web", true),
            ("app==web, tier=a", true),
            ("app=db", false),
            ("app!=db", true),
            ("tier in (a, b),app", true),
            ("tier notin (a,b)", false),
            ("!legacy", true),
            ("!app", false),
            ("nvidia.com/x=", false),
        ] {
            assert_eq!(parse(selector).unwrap().matches(&pod), matches, "{selector}");
        }
    }

    #[test]
    fn nonsense_is_named() {
        for text in ["app=web tier=a", "a in b", "=x", "!", "app in (a", "a,b c"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
