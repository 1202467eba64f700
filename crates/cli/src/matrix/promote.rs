//! `pitcrew matrix promote`: canary's versions become current's, in the file and, if asked, in a commit of its own.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context as _;
use pitcrew_core::matrix::{FieldChange, Promotion, promoted};
use similar::TextDiff;

use super::git::{PROMOTED, Repository, short};
use super::{PromoteArgs, read, words};

pub(super) fn run(args: &PromoteArgs, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let file = args.matrix.file.as_path();
    let before = read(file)?;
    let promotion = promoted(&before).with_context(|| format!("{} cannot be promoted", file.display()))?;
    // Everything that can be refused is refused before the first write.
    let repository = args.commit.then(|| Repository::of(file)).transpose()?;
    if let Some(repository) = &repository {
        repository.is_committed()?;
    }
    if args.dry_run {
        writeln!(out, "(dry run, nothing was changed)")?;
        out.write_all(unified(file, &before, &promotion.text).as_bytes())?;
        return Ok(ExitCode::SUCCESS);
    }
    write(file, &promotion.text)?;
    let changed = words(&promotion.changes);
    let Some(repository) = repository else {
        writeln!(
            out,
            "{}: canary is current now: {changed}. {}",
            file.display(),
            how_to_commit(file, &promotion)
        )?;
        return Ok(ExitCode::SUCCESS);
    };
    let message = message(args.message.as_deref(), file, &promotion);
    match repository.commit(&message) {
        Ok(commit) => {
            let undo = format!("pitcrew matrix rollback {} --commit", file.display());
            writeln!(
                out,
                "{}: canary is current now: {changed}. Committed as {}. Undo with: {undo}",
                file.display(),
                short(&commit)
            )?;
            Ok(ExitCode::SUCCESS)
        }
        Err(refused) => {
            write(file, &before)?;
            Err(refused.context(format!("{} was not promoted, and is as it was", file.display())))
        }
    }
}

fn write(file: &Path, text: &str) -> anyhow::Result<()> {
    std::fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))
}

/// The commit's message: what the user says, or what changes; then the line by which a rollback finds it.
fn message(own: Option<&str>, file: &Path, promotion: &Promotion) -> String {
    let name = file.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let default = || {
        let lines: Vec<String> = promotion
            .changes
            .iter()
            .map(|change: &FieldChange| format!("- {}", words(std::slice::from_ref(change))))
            .collect();
        format!(
            "Promote driver {} in {name}\n\ncanary becomes current:\n{}",
            promotion.driver,
            lines.join("\n")
        )
    };
    let text = own.map_or_else(default, |own| own.trim_end().to_owned());
    format!("{text}\n\n{PROMOTED} {}\n", promotion.driver)
}

/// A commit by hand needs the line too.
fn how_to_commit(file: &Path, promotion: &Promotion) -> String {
    let driver = &promotion.driver;
    format!(
        "Not committed yet: git commit -m \"Promote driver {driver}\" -m \"{PROMOTED} {driver}\" -- {}",
        file.display()
    )
}

/// As `git diff` shows it.
fn unified(file: &Path, before: &str, after: &str) -> String {
    let name = file.display();
    TextDiff::from_lines(before, after)
        .unified_diff()
        .context_radius(3)
        .header(&format!("a/{name}"), &format!("b/{name}"))
        .to_string()
}
