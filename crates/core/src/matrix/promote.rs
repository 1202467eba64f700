//! Promotion: the text in which canary's values are current's. Only values are edited, so comments, order and quotes of
//! everything else survive, and `git diff` shows the decision and nothing else.
//!
//! - What canary does not state stays as it is in current: nothing was tried about it.
//! - `current` gets the status `production`.
//! - `canary` stays, with the status `promoted`: the next trial is a change of its values, whoever reads `versions.canary`
//!   still finds it, and a second promotion can be told from the first.

use std::ops::Range;

use super::diff::{FieldChange, diff};
use super::problem::Problems;
use super::tree::{self, Kind, Node, Pair, Quotes};
use super::{CANARY, CURRENT, Entry, Field, Matrix, STATUS_PRODUCTION, STATUS_PROMOTED};
use crate::names::EntryName;
use crate::version::DriverVersion;

/// A matrix after its promotion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Promotion {
    /// The new text of the file.
    pub text: String,
    /// The driver version that is current now.
    pub driver: DriverVersion,
    /// What changed in `current`.
    pub changes: Vec<FieldChange>,
}

/// Why a matrix cannot be promoted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CannotPromote {
    /// It is no matrix.
    #[error("{0}")]
    Unreadable(Problems),
    /// Nothing is on trial.
    #[error("versions has no entry \"canary\" (it has {}), so there is nothing to promote", listed(names))]
    NoCanary {
        /// What is there.
        names: Vec<EntryName>,
    },
    /// Nothing says which driver was tried.
    #[error("versions.canary has no driver; write the version that was tried there")]
    NoDriver,
    /// Nothing would change.
    #[error(
        "versions.canary and versions.current say the same (driver {driver}), so there is nothing to promote"
    )]
    Same {
        /// What both say.
        driver: DriverVersion,
    },
    /// A new version stands in an entry that says it was promoted.
    #[error(
        "versions.canary has the status \"{STATUS_PROMOTED}\" but differs from versions.current in {}; set its status to \"testing\" if that is what it is",
        fields.join(", ")
    )]
    StatusDisagrees {
        /// Where they differ.
        fields: Vec<String>,
    },
    /// The text is not written so that one value can be replaced.
    #[error(
        "{path} (line {line}) cannot be edited in place; write each field on a line of its own, as \"name: value\""
    )]
    Form {
        /// Where, as `versions.canary.notes`.
        path: String,
        /// Counted from 1.
        line: usize,
    },
    /// The edited text does not mean what it should.
    #[error("it is written in a way that cannot be edited safely; copy canary's values into current by hand")]
    Unsure,
}

impl From<Problems> for CannotPromote {
    fn from(problems: Problems) -> Self {
        CannotPromote::Unreadable(problems)
    }
}

fn listed(names: &[EntryName]) -> String {
    names.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// Promotes: canary becomes current.
pub fn promoted(text: &str) -> Result<Promotion, CannotPromote> {
    let before = Matrix::parse(text)?;
    let wanted = wanted(&before)?;
    let tree = tree::parse(text).map_err(|_| CannotPromote::Unsure)?;
    let versions = tree.get("versions").ok_or(CannotPromote::Unsure)?;
    let current = Place::of(text, versions, CURRENT)?;
    let canary = Place::of(text, versions, CANARY)?;
    let mut edits = current_edits(&current, &canary, &wanted.changes)?;
    edits.extend(canary.set_word(Field::Status.key(), STATUS_PROMOTED, Quotes::Double, &canary)?);
    let text = apply(text, edits);
    // The reader judges the writer: a text that does not mean what was decided is never given out.
    let after = Matrix::parse(&text).map_err(|_| CannotPromote::Unsure)?;
    if after != wanted.matrix {
        return Err(CannotPromote::Unsure);
    }
    Ok(Promotion { text, driver: wanted.driver, changes: wanted.changes })
}

/// What the matrix is to say.
struct Wanted {
    matrix: Matrix,
    driver: DriverVersion,
    /// In `current`.
    changes: Vec<FieldChange>,
}

fn wanted(before: &Matrix) -> Result<Wanted, CannotPromote> {
    let no_canary = || CannotPromote::NoCanary { names: before.entries.keys().cloned().collect() };
    let canary = before.canary().ok_or_else(no_canary)?;
    let current = before.current().ok_or(CannotPromote::Unsure)?;
    let driver = canary.driver.clone().ok_or(CannotPromote::NoDriver)?;
    let next = Entry { status: Some(STATUS_PRODUCTION.to_owned()), ..over(current, canary) };
    let changes = diff(current, &next);
    let of_versions: Vec<String> = changes
        .iter()
        .map(|change| change.field.clone())
        .filter(|field| field != Field::Status.key())
        .collect();
    if of_versions.is_empty() {
        return Err(CannotPromote::Same { driver });
    }
    if canary.status.as_deref() == Some(STATUS_PROMOTED) {
        return Err(CannotPromote::StatusDisagrees { fields: of_versions });
    }
    let mut matrix = before.clone();
    if let Some(canary) = matrix.entries.get_mut(CANARY) {
        canary.status = Some(STATUS_PROMOTED.to_owned());
    }
    matrix.entries.insert(CURRENT.into(), next);
    Ok(Wanted { matrix, driver, changes })
}

/// `base` with everything that `top` states.
fn over(base: &Entry, top: &Entry) -> Entry {
    let Entry { gpu_operator, network_operator, driver, cuda, firmware, sriov, openshift, status, extra } =
        top.clone();
    let mut both = base.extra.clone();
    both.extend(extra);
    Entry {
        gpu_operator: gpu_operator.or_else(|| base.gpu_operator.clone()),
        network_operator: network_operator.or_else(|| base.network_operator.clone()),
        driver: driver.or_else(|| base.driver.clone()),
        cuda: cuda.or_else(|| base.cuda.clone()),
        firmware: firmware.or_else(|| base.firmware.clone()),
        sriov: sriov.or_else(|| base.sriov.clone()),
        openshift: openshift.or_else(|| base.openshift.clone()),
        status: status.or_else(|| base.status.clone()),
        extra: both,
    }
}

/// A part of the text and what is to stand there.
type Edit = (Range<usize>, String);

fn current_edits(
    current: &Place<'_>,
    canary: &Place<'_>,
    changes: &[FieldChange],
) -> Result<Vec<Edit>, CannotPromote> {
    let mut edits = Vec::new();
    for pair in canary.pairs {
        let differs = changes.iter().any(|change| change.field == pair.key);
        if differs && pair.key != Field::Status.key() {
            let source = canary.one_line(pair)?;
            edits.push(current.set(&pair.key, source, canary)?);
        }
    }
    let quotes = canary.quotes(Field::Status.key()).unwrap_or(Quotes::Double);
    edits.extend(current.set_word(Field::Status.key(), STATUS_PRODUCTION, quotes, canary)?);
    Ok(edits)
}

/// An entry in the text.
struct Place<'t> {
    name: &'static str,
    text: &'t str,
    pairs: &'t [Pair],
}

impl<'t> Place<'t> {
    fn of(text: &'t str, versions: &'t Node, name: &'static str) -> Result<Self, CannotPromote> {
        let node = versions.get(name).ok_or(CannotPromote::Unsure)?;
        match &node.kind {
            Kind::Map { pairs, flow: false } => Ok(Place { name, text, pairs }),
            _ => Err(CannotPromote::Form { path: format!("versions.{name}"), line: node.line }),
        }
    }

    fn pair(&self, key: &str) -> Option<&'t Pair> {
        self.pairs.iter().find(|pair| pair.key == key)
    }

    fn quotes(&self, key: &str) -> Option<Quotes> {
        match self.pair(key)?.value.kind {
            Kind::Text { quotes, .. } => Some(quotes),
            _ => None,
        }
    }

    /// How a value is written, if it is a text on one line.
    fn one_line(&self, pair: &Pair) -> Result<&'t str, CannotPromote> {
        let form =
            || CannotPromote::Form { path: format!("versions.{}.{}", self.name, pair.key), line: pair.line };
        let written = self.text.get(pair.value.span.clone()).unwrap_or_default();
        match pair.value.kind {
            Kind::Text { quotes, .. } if quotes != Quotes::Block && !written.contains('\n') => Ok(written),
            _ => Err(form()),
        }
    }

    /// Gives a field a value, as it is written in the file. A field that is new here comes after the one that it follows in
    /// `model`.
    fn set(&self, key: &str, written: &str, model: &Place<'_>) -> Result<Edit, CannotPromote> {
        if let Some(pair) = self.pair(key) {
            self.one_line(pair)?;
            return Ok((pair.value.span.clone(), written.to_owned()));
        }
        let end = model.pairs.iter().position(|pair| pair.key == key).unwrap_or(model.pairs.len());
        let followed = model.pairs.iter().take(end).rev().find_map(|before| {
            let here = self.pair(&before.key)?;
            self.one_line(here).is_ok().then_some(here)
        });
        let model_pair = followed.or(self.pairs.first()).ok_or(CannotPromote::Unsure)?;
        let indent = self.indent(model_pair)?;
        let broken = if self.text.contains("\r\n") { "\r\n" } else { "\n" };
        Ok(match followed {
            Some(pair) => {
                let at = self.line_end(pair.value.span.end);
                (at..at, format!("{broken}{indent}{key}: {written}"))
            }
            None => (model_pair.start..model_pair.start, format!("{key}: {written}{broken}{indent}")),
        })
    }

    /// Gives a field a word in the quotes that it has, or else in these. Nothing if it says so already.
    fn set_word(
        &self,
        key: &str,
        word: &str,
        quotes: Quotes,
        model: &Place<'_>,
    ) -> Result<Option<Edit>, CannotPromote> {
        if matches!(self.pair(key).map(|pair| &pair.value.kind), Some(Kind::Text { text, .. }) if text == word)
        {
            return Ok(None);
        }
        let quotes = self.quotes(key).unwrap_or(quotes);
        self.set(key, &quotes.around(word), model).map(Some)
    }

    /// The spaces before a key.
    fn indent(&self, pair: &Pair) -> Result<&'t str, CannotPromote> {
        let before = self.text.get(..pair.start).unwrap_or_default();
        let indent = &before[before.rfind('\n').map_or(0, |at| at + 1)..];
        let form =
            || CannotPromote::Form { path: format!("versions.{}.{}", self.name, pair.key), line: pair.line };
        if indent.bytes().all(|byte| byte == b' ') { Ok(indent) } else { Err(form()) }
    }

    /// Where the line ends that a place is in, comments included.
    fn line_end(&self, from: usize) -> usize {
        let rest = self.text.get(from..).unwrap_or_default();
        let line = rest.split('\n').next().unwrap_or_default();
        from + line.trim_end_matches('\r').len()
    }
}

/// From the back, so that places stay what they are; of two at one place the first comes first.
fn apply(text: &str, mut edits: Vec<Edit>) -> String {
    edits.sort_by_key(|(range, _)| range.start);
    let mut text = text.to_owned();
    for (range, new) in edits.into_iter().rev() {
        text.replace_range(range, &new);
    }
    text
}
