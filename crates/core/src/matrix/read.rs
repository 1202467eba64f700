//! A tree becomes a matrix: every entry and field is looked at, and everything that is wrong is said at once.

use std::collections::{BTreeMap, BTreeSet};

use super::problem::{Problem, Problems};
use super::release::Release;
use super::tree::{Kind, Node, Pair, Quotes};
use super::{CANARY, CURRENT, Entry, Field, Matrix};
use crate::names::EntryName;

const VERSIONS: &str = "versions";

/// The entries, or what is wrong with them.
pub(super) fn matrix(tree: &Node) -> Result<Matrix, Vec<Problem>> {
    let mut problems = Vec::new();
    let entries = entries(tree, &mut problems);
    match entries {
        Some(entries) if problems.is_empty() => Ok(Matrix { entries }),
        _ => Err(problems),
    }
}

/// What to say about a text that is wrong. Without its indentation nearly everything is wrong, and only one thing worth
/// saying.
pub(super) fn plainly(text: &str, problems: Vec<Problem>) -> Problems {
    let mut problems = problems.into_iter();
    match (flattened(text), problems.next()) {
        (Some(lost), _) => Problems { first: lost, others: Vec::new() },
        (None, Some(first)) => Problems { first, others: problems.collect() },
        (None, None) => Problems { first: Problem::Empty, others: Vec::new() },
    }
}

fn entries(tree: &Node, problems: &mut Vec<Problem>) -> Option<BTreeMap<EntryName, Entry>> {
    let Some(top) = tree.pairs() else {
        problems.push(Problem::NoVersions);
        return None;
    };
    repeated(top, "", problems);
    let Some(versions) = tree.get(VERSIONS) else {
        problems.push(Problem::NoVersions);
        return None;
    };
    let Some(pairs) = versions.pairs() else {
        let hint = "write the entries \"current:\" and \"canary:\" there, indented by two spaces";
        problems.push(Problem::NotAMap { path: VERSIONS.to_owned(), line: versions.line, hint });
        return None;
    };
    repeated(pairs, "versions.", problems);
    let entries: BTreeMap<EntryName, Entry> =
        pairs.iter().map(|pair| (pair.key.as_str().into(), entry(pair, problems))).collect();
    if !entries.contains_key(CURRENT) {
        let names = pairs.iter().map(|pair| pair.key.clone()).collect();
        problems.push(Problem::NoCurrent { names });
    }
    Some(entries)
}

fn entry(pair: &Pair, problems: &mut Vec<Problem>) -> Entry {
    let path = format!("versions.{}", pair.key);
    let mut entry = Entry::default();
    let Some(fields) = pair.value.pairs() else {
        let hint = "write its fields there, such as driver: \"565.57.01\", indented by four spaces";
        problems.push(Problem::NotAMap { path, line: pair.line, hint });
        return entry;
    };
    repeated(fields, &format!("{path}."), problems);
    for field in fields {
        let path = format!("{path}.{}", field.key);
        let Some(known) = Field::of_key(&field.key) else {
            entry.extra.insert(field.key.clone(), field.value.flat());
            continue;
        };
        if let Err(problem) = set(&mut entry, known, &field.value, path, field.line) {
            problems.push(problem);
        }
    }
    entry
}

fn set(entry: &mut Entry, field: Field, value: &Node, path: String, line: usize) -> Result<(), Problem> {
    let text = word(value, &path, line)?;
    let release = || Some(Release::new(text));
    match field {
        Field::GpuOperator => entry.gpu_operator = release(),
        Field::NetworkOperator => entry.network_operator = release(),
        Field::Driver => {
            let version = text.parse().map_err(|source| Problem::BadDriver { path, line, source })?;
            entry.driver = Some(version);
        }
        Field::Cuda => entry.cuda = release(),
        Field::Firmware => entry.firmware = release(),
        Field::Sriov => entry.sriov = release(),
        Field::Openshift => entry.openshift = release(),
        Field::Status => entry.status = Some(text.to_owned()),
    }
    Ok(())
}

/// One line of text that every program reads as it stands there.
fn word<'n>(value: &'n Node, path: &str, line: usize) -> Result<&'n str, Problem> {
    let path = || path.to_owned();
    let (text, quotes) = match &value.kind {
        Kind::Nothing => return Err(Problem::NoValue { path: path(), line }),
        Kind::List(_) | Kind::Map { .. } => return Err(Problem::NotText { path: path(), line }),
        Kind::Text { text, quotes } => (text, *quotes),
    };
    if text.trim().is_empty() {
        return Err(Problem::NoValue { path: path(), line });
    }
    if quotes == Quotes::Block || text.contains(char::is_control) {
        return Err(Problem::NotText { path: path(), line });
    }
    let other = (quotes == Quotes::Plain).then(|| read_as(text)).flatten();
    match other {
        Some(read_as) => Err(Problem::NeedsQuotes { path: path(), line, text: text.clone(), read_as }),
        None => Ok(text),
    }
}

/// What other readers of YAML make of a word without quotes, unless it is what stands there. `12.6` is a number that every
/// program prints as 12.6, so it may stand; `12.10` is the number 12.1.
fn read_as(text: &str) -> Option<String> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "yes" | "on" | "y" => return Some("the truth value true".to_owned()),
        "false" | "no" | "off" | "n" => return Some("the truth value false".to_owned()),
        "null" | "~" => return Some("nothing".to_owned()),
        _ => {}
    }
    let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
    let lower = digits.to_ascii_lowercase();
    if lower == ".inf" || lower == ".nan" || lower.starts_with("0x") || lower.starts_with("0o") {
        return Some("a number".to_owned());
    }
    let numeric = |c: char| c.is_ascii_digit() || "._eE+-".contains(c);
    if !digits.starts_with(|c: char| c.is_ascii_digit() || c == '.') || !digits.chars().all(numeric) {
        return None;
    }
    let number: f64 = text.replace('_', "").parse().ok()?;
    let printed = number.to_string();
    (printed != text).then(|| format!("the number {printed}"))
}

/// Keys that are there more than once.
fn repeated(pairs: &[Pair], path: &str, problems: &mut Vec<Problem>) {
    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    let mut told = BTreeSet::new();
    for pair in pairs {
        if let Some(first) = seen.get(pair.key.as_str()) {
            if told.insert(pair.key.as_str()) {
                let path = format!("{path}{}", pair.key);
                problems.push(Problem::Twice { path, first: *first, line: pair.line });
            }
        } else {
            seen.insert(&pair.key, pair.line);
        }
    }
}

/// Whether a text that is wrong is a matrix whose lines have moved to the left. It looks at lines, because what was copied
/// from a page need not even be YAML.
fn flattened(text: &str) -> Option<Problem> {
    let mut versions: Option<usize> = None;
    let mut entry: Option<(usize, &str)> = None;
    for (number, line) in text.lines().enumerate() {
        let words = line.trim_start_matches([' ', '\t', '\u{feff}']);
        let depth = line.chars().take_while(|c| c.is_whitespace()).count();
        let Some((key, value)) = words.split_once(':') else { continue };
        let lost = |above: &str| {
            Some(Problem::IndentationLost { line: number + 1, key: key.to_owned(), above: above.to_owned() })
        };
        match (key, bare(value)) {
            (VERSIONS, true) => versions = Some(depth),
            (CURRENT | CANARY, true) => {
                if versions.is_some_and(|versions| depth <= versions) {
                    return lost(VERSIONS);
                }
                entry = Some((depth, key));
            }
            (key, false) if Field::of_key(key).is_some() => {
                if let Some((_, name)) = entry.filter(|(entry, _)| depth <= *entry) {
                    return lost(name);
                }
            }
            _ => {}
        }
    }
    None
}

/// Nothing but a comment.
fn bare(value: &str) -> bool {
    let value = value.trim();
    value.is_empty() || value.starts_with('#')
}
