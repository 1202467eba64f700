//! `pitcrew matrix`: the version matrix in Git, checked, compared, promoted and put back. No cluster is asked.
//!
//! ```text
//!  validate.rs   what is wrong with a file        diff.rs       what a promotion, or a commit, changes
//!  promote.rs    canary becomes current           rollback.rs   git revert of the commit that did it
//!  git.rs        the program git, as far as these need it
//! ```

mod diff;
mod git;
mod promote;
mod rollback;
mod validate;

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use pitcrew_core::matrix::{FieldChange, Matrix};

use crate::terminal::Output;

/// The matrix is also handed to the controller in a ConfigMap, which holds no more than this.
const SIZE_MAX: u64 = 1024 * 1024;

/// What `pitcrew matrix` takes.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Say what is wrong with a matrix, line by line
    Validate(ValidateArgs),
    /// Say what differs between current and canary, or since a revision or another file
    Diff(DiffArgs),
    /// Make canary's versions current, and with --commit commit that
    Promote(PromoteArgs),
    /// Revert the newest commit that promoted, and with --commit commit that
    Rollback(RollbackArgs),
}

#[derive(clap::Args)]
struct ValidateArgs {
    #[command(flatten)]
    matrix: MatrixFile,
    /// Print JSON instead of text
    #[arg(short, long, value_enum)]
    output: Option<Output>,
}

#[derive(clap::Args)]
struct DiffArgs {
    #[command(flatten)]
    matrix: MatrixFile,
    /// What to compare the file with: another file, or a Git revision of this one [default: current with canary]
    #[arg(long, value_name = "REV|FILE2")]
    against: Option<String>,
    /// Print JSON instead of text
    #[arg(short, long, value_enum)]
    output: Option<Output>,
}

#[derive(clap::Args)]
struct PromoteArgs {
    #[command(flatten)]
    matrix: MatrixFile,
    /// Commit the promotion, and nothing else
    #[arg(long)]
    commit: bool,
    /// The commit's message [default: says what changes]
    #[arg(short, long, value_name = "TEXT", requires = "commit", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    message: Option<String>,
    /// Print what would be changed as a unified diff, and change nothing
    #[arg(long)]
    dry_run: bool,
}

#[derive(clap::Args)]
struct RollbackArgs {
    #[command(flatten)]
    matrix: MatrixFile,
    /// Commit the revert
    #[arg(long)]
    commit: bool,
    /// Print what would be changed as a unified diff, and change nothing
    #[arg(long)]
    dry_run: bool,
}

#[derive(clap::Args)]
struct MatrixFile {
    /// The matrix
    #[arg(value_name = "FILE", default_value = "gpu-version-matrix.yaml")]
    file: PathBuf,
}

/// Does one of them.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let out = &mut std::io::stdout();
    match &args.action {
        Action::Validate(args) => validate::run(args, out),
        Action::Diff(args) => diff::run(args, out),
        Action::Promote(args) => promote::run(args, out),
        Action::Rollback(args) => rollback::run(args, out),
    }
}

/// A file's text.
fn read(file: &Path) -> anyhow::Result<String> {
    let cannot = || format!("cannot read {}", file.display());
    let mut text = String::new();
    let opened = File::open(file).with_context(cannot)?;
    // One byte more than allowed tells a file that is too long from one that just fits.
    opened.take(SIZE_MAX + 1).read_to_string(&mut text).with_context(cannot)?;
    if u64::try_from(text.len()).unwrap_or(u64::MAX) > SIZE_MAX {
        bail!("{} is larger than 1 MiB, which no version matrix is", file.display());
    }
    Ok(text)
}

/// A text as a matrix; `what` names it.
fn parse(text: &str, what: &str) -> anyhow::Result<Matrix> {
    Matrix::parse(text).with_context(|| format!("{what} is not a version matrix"))
}

/// `driver 560.35.03 → 565.57.01, cuda added: 12.8`.
fn words(changes: &[FieldChange]) -> String {
    let one = |FieldChange { field, before, after }: &FieldChange| match (before, after) {
        (Some(before), Some(after)) => format!("{field} {before} → {after}"),
        (None, Some(after)) => format!("{field} {after} (new)"),
        (Some(before), None) => format!("{field} {before} (gone)"),
        (None, None) => field.clone(),
    };
    changes.iter().map(one).collect::<Vec<_>>().join(", ")
}
