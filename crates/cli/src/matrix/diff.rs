//! `pitcrew matrix diff`: what a promotion would change, or what has changed since a revision or another file.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use anyhow::anyhow;
use pitcrew_core::matrix::{CANARY, CURRENT, FieldChange, Matrix, diff};
use pitcrew_core::names::EntryName;
use serde_json::{Value, json};

use super::git::Repository;
use super::{DiffArgs, parse, read};
use crate::style::Style;
use crate::terminal::Output;

/// What is compared, and what differs in each entry.
struct Comparison {
    before: String,
    after: String,
    changes: BTreeMap<EntryName, Vec<FieldChange>>,
}

pub(super) fn run(args: &DiffArgs, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let comparison = compare(args)?;
    let text = match args.output {
        Some(Output::Json) => format!("{}\n", serde_json::to_string_pretty(&json(&comparison))?),
        None => text(&comparison, Style::of_stdout()),
    };
    out.write_all(text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

fn compare(args: &DiffArgs) -> anyhow::Result<Comparison> {
    let name = args.matrix.file.display().to_string();
    let matrix = parse(&read(&args.matrix.file)?, &name)?;
    match &args.against {
        Some(other) => {
            let before = other_matrix(&args.matrix.file, other)?;
            Ok(Comparison { before: other.clone(), after: name, changes: before.changes(&matrix) })
        }
        None => within(&name, &matrix),
    }
}

/// Current with canary.
fn within(name: &str, matrix: &Matrix) -> anyhow::Result<Comparison> {
    let missing = |entry| {
        anyhow!("{name} has no versions.{entry} to compare with; name something with --against REV|FILE2")
    };
    let current = matrix.current().ok_or_else(|| missing(CURRENT))?;
    let canary = matrix.canary().ok_or_else(|| missing(CANARY))?;
    let changes = BTreeMap::from([(CANARY.into(), diff(current, canary))]);
    Ok(Comparison { before: CURRENT.to_owned(), after: CANARY.to_owned(), changes })
}

/// The matrix to compare with: a file if there is one of that name, a revision otherwise.
fn other_matrix(file: &Path, other: &str) -> anyhow::Result<Matrix> {
    let path = Path::new(other);
    if path.exists() {
        return parse(&read(path)?, other);
    }
    let text = Repository::of(file)?.at_revision(other)?;
    parse(&text, &format!("{} at {other}", file.display()))
}

fn text(comparison: &Comparison, style: Style) -> String {
    let Comparison { before, after, changes } = comparison;
    if changes.values().all(Vec::is_empty) {
        return format!("{before} and {after} say the same\n");
    }
    let mut text = format!("{}\n", style.bold(&format!("{before} → {after}")));
    let within = before == CURRENT && after == CANARY;
    let label =
        |name: &EntryName, field: &str| if within { field.to_owned() } else { format!("{name}.{field}") };
    let rows: Vec<(String, &str, &str)> = changes
        .iter()
        .flat_map(|(name, changes)| changes.iter().map(move |change| (name, change)))
        .map(|(name, change)| {
            (label(name, &change.field), side(change.before.as_deref()), side(change.after.as_deref()))
        })
        .collect();
    let wide = |column: fn(&(String, &str, &str)) -> usize| rows.iter().map(column).max().unwrap_or_default();
    let (first, second) = (wide(|row| row.0.chars().count()), wide(|row| row.1.chars().count()));
    for (field, before, after) in &rows {
        let line = format!("  {field:first$}  {before:second$} → {after}\n");
        text += &line;
    }
    text
}

/// What is not stated has to be seen all the same.
fn side(text: Option<&str>) -> &str {
    text.unwrap_or("(not stated)")
}

fn json(comparison: &Comparison) -> Value {
    let Comparison { before, after, changes } = comparison;
    let change = |name: &EntryName, change: &FieldChange| json!({"entry": name, "field": change.field, "before": change.before, "after": change.after});
    let changes: Vec<Value> =
        changes.iter().flat_map(|(name, of)| of.iter().map(move |one| change(name, one))).collect();
    json!({"before": before, "after": after, "changes": changes})
}
