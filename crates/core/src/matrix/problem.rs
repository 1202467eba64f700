//! What can be wrong with a matrix: each a value that prints as one sentence with the place and what to do.

use std::fmt;

use crate::version::BadVersion;

/// Something in the file that has to be mended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// The parser gave up.
    #[error("line {line} is not YAML ({why}); mend it there")]
    NotYaml {
        /// Counted from 1.
        line: usize,
        /// In the parser's words.
        why: String,
    },
    /// A tab before a key.
    #[error("line {line} is indented with a tab, which YAML does not allow; indent with spaces")]
    Tab {
        /// Counted from 1.
        line: usize,
    },
    /// Everything stands at the left edge, as after copying from a page.
    #[error(
        "its indentation was lost in copying: \"{key}:\" (line {line}) stands no deeper than the \"{above}:\" it belongs to; indent each entry under \"versions:\" by two spaces and its fields by four"
    )]
    IndentationLost {
        /// Counted from 1.
        line: usize,
        /// The first key that is not where it should be.
        key: String,
        /// What it belongs to.
        above: String,
    },
    /// There is nothing in it.
    #[error("it is empty; it needs \"versions:\" with at least the entry \"current:\"")]
    Empty,
    /// More than one document.
    #[error("a second YAML document begins at line {line}; a matrix is one, remove the \"---\"")]
    SecondDocument {
        /// Counted from 1.
        line: usize,
    },
    /// `*name`
    #[error("line {line} uses a YAML alias (*); write the value out, so that everybody can read it there")]
    Alias {
        /// Counted from 1.
        line: usize,
    },
    /// `!tag`
    #[error("line {line} uses a YAML tag (!); write the value in quotes instead")]
    Tag {
        /// Counted from 1.
        line: usize,
    },
    /// A key that is no word.
    #[error("line {line} has a key that is no word; write it as \"name: value\"")]
    BadKey {
        /// Counted from 1.
        line: usize,
    },
    /// The top is no map with `versions`.
    #[error("it has no \"versions:\"; a matrix begins with it, and its entries stand under it")]
    NoVersions,
    /// A map was expected.
    #[error("{path} (line {line}) has nothing under it that reads \"name: value\"; {hint}")]
    NotAMap {
        /// Where, as `versions.canary`.
        path: String,
        /// Counted from 1.
        line: usize,
        /// What belongs there.
        hint: &'static str,
    },
    /// The one entry that must be there is not.
    #[error("versions has no entry \"current\" ({}); name what is in production so", listed(names))]
    NoCurrent {
        /// Those that are there.
        names: Vec<String>,
    },
    /// The same key twice: readers disagree on which one counts.
    #[error("{path} is there twice (lines {first} and {line}); keep one of them")]
    Twice {
        /// Where.
        path: String,
        /// The first of them, counted from 1.
        first: usize,
        /// The second.
        line: usize,
    },
    /// A key without a value.
    #[error("{path} (line {line}) has no value; write one or remove the line")]
    NoValue {
        /// Where.
        path: String,
        /// Counted from 1.
        line: usize,
    },
    /// A list, a map or several lines where a version belongs.
    #[error("{path} (line {line}) must be one line of text")]
    NotText {
        /// Where.
        path: String,
        /// Counted from 1.
        line: usize,
    },
    /// Without quotes it is a number, a truth value or nothing, and is not printed as it was written.
    #[error("{path} (line {line}): {text} without quotes is {read_as} to other programs; write \"{text}\"")]
    NeedsQuotes {
        /// Where.
        path: String,
        /// Counted from 1.
        line: usize,
        /// As it was written.
        text: String,
        /// What becomes of it.
        read_as: String,
    },
    /// No driver version.
    #[error("{path} (line {line}): {source}")]
    BadDriver {
        /// Where.
        path: String,
        /// Counted from 1.
        line: usize,
        /// What is wrong with it.
        source: BadVersion,
    },
}

impl Problem {
    /// The line it is about, counted from 1.
    pub fn line(&self) -> Option<usize> {
        match self {
            Problem::Empty | Problem::NoVersions | Problem::NoCurrent { .. } => None,
            Problem::NotYaml { line, .. }
            | Problem::Tab { line }
            | Problem::IndentationLost { line, .. }
            | Problem::SecondDocument { line }
            | Problem::Alias { line }
            | Problem::Tag { line }
            | Problem::BadKey { line }
            | Problem::NotAMap { line, .. }
            | Problem::Twice { line, .. }
            | Problem::NoValue { line, .. }
            | Problem::NotText { line, .. }
            | Problem::NeedsQuotes { line, .. }
            | Problem::BadDriver { line, .. } => Some(*line),
        }
    }
}

fn listed(names: &[String]) -> String {
    if names.is_empty() { "it is empty".to_owned() } else { format!("it has {}", names.join(", ")) }
}

/// All that is wrong with a matrix: one problem at least. Printed, it is the first, and how many there are besides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problems {
    /// The one to begin with.
    pub first: Problem,
    /// The others.
    pub others: Vec<Problem>,
}

impl Problems {
    /// Each of them, in the order of the file.
    pub fn iter(&self) -> impl Iterator<Item = &Problem> {
        std::iter::once(&self.first).chain(&self.others)
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.first.fmt(f)?;
        match self.others.len() {
            0 => Ok(()),
            1 => f.write_str(" (and 1 more problem)"),
            many => write!(f, " (and {many} more problems)"),
        }
    }
}

impl std::error::Error for Problems {}
