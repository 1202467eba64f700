//! `pitcrew matrix validate`: everything that is wrong with a file, and what it says if nothing is.

use std::io::Write;
use std::process::ExitCode;

use pitcrew_core::matrix::{Entry, Field, Matrix, Problems};
use pitcrew_core::names::EntryName;
use pitcrew_core::reason::Kind;
use serde_json::{Value, json};

use super::{ValidateArgs, read};
use crate::reading::did_you_mean;
use crate::style::Style;
use crate::terminal::Output;
use crate::text::count;

pub(super) fn run(args: &ValidateArgs, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let result = Matrix::parse(&read(&args.matrix.file)?);
    let file = args.matrix.file.display().to_string();
    let text = match args.output {
        Some(Output::Json) => format!("{}\n", serde_json::to_string_pretty(&json(&file, &result))?),
        None => match &result {
            Ok(matrix) => good(&file, matrix, Style::of_stdout()),
            Err(problems) => bad(&file, problems, Style::of_stdout()),
        },
    };
    out.write_all(text.as_bytes())?;
    Ok(if result.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn good(file: &str, matrix: &Matrix, style: Style) -> String {
    let entries = match matrix.entries.len() {
        1 => "1 entry".to_owned(),
        many => format!("{many} entries"),
    };
    let mut text = format!("{} {file}: {entries}\n", style.glyph(Kind::Done));
    for (name, entry) in &matrix.entries {
        text += &style.fold(&format!("  {}  ", style.bold(name.as_str())), &summary(entry), 4);
    }
    for note in notes(matrix) {
        text += &style.fold(&format!("{} ", style.glyph(Kind::Blocked)), &note, 2);
    }
    text
}

fn bad(file: &str, problems: &Problems, style: Style) -> String {
    let number = u64::try_from(problems.iter().count()).unwrap_or(u64::MAX);
    let mut text = format!("{} {file}: {}\n", style.glyph(Kind::Failed), count(number, "problem"));
    for problem in problems.iter() {
        text += &style.fold("  ", &problem.to_string(), 4);
    }
    text
}

fn summary(entry: &Entry) -> String {
    let stated = Field::ALL.into_iter().filter_map(|field| Some(format!("{field} {}", entry.text(field)?)));
    stated.collect::<Vec<_>>().join(", ")
}

/// What is allowed and may yet be a slip.
fn notes(matrix: &Matrix) -> Vec<String> {
    matrix.entries.iter().flat_map(|(name, entry)| entry_notes(name, entry)).collect()
}

fn entry_notes(name: &EntryName, entry: &Entry) -> Vec<String> {
    let unstated: Vec<&str> = entry.unstated().map(Field::key).collect();
    let not_stated = (!unstated.is_empty()).then(|| {
        format!(
            "versions.{name} does not state {}: that is not compared with the cluster",
            unstated.join(", ")
        )
    });
    let unknown = entry.extra.keys().map(|key| {
        let like = did_you_mean(key, unstated.iter().copied());
        format!("versions.{name}.{key} is a field of your own: it is kept, and compared with nothing{like}")
    });
    not_stated.into_iter().chain(unknown).collect()
}

fn json(file: &str, result: &Result<Matrix, Problems>) -> Value {
    match result {
        Ok(matrix) => {
            let entry = |entry: &Entry| {
                entry.stated().into_iter().map(|(key, text)| (key.to_owned(), text.into())).collect()
            };
            let entries: serde_json::Map<String, Value> = matrix
                .entries
                .iter()
                .map(|(name, of)| (name.to_string(), Value::Object(entry(of))))
                .collect();
            json!({"file": file, "valid": true, "entries": entries, "notes": notes(matrix)})
        }
        Err(problems) => {
            let problems: Vec<Value> = problems
                .iter()
                .map(|problem| json!({"line": problem.line(), "message": problem.to_string()}))
                .collect();
            json!({"file": file, "valid": false, "problems": problems})
        }
    }
}
