//! `pitcrew matrix rollback`: `git revert` of the newest commit that promoted. If it does not apply, nothing is changed.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use anyhow::bail;
use pitcrew_core::matrix::Matrix;

use super::git::{PROMOTED, Repository, short};
use super::{RollbackArgs, read};

pub(super) fn run(args: &RollbackArgs, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let file = args.matrix.file.as_path();
    let repository = Repository::of(file)?;
    repository.is_committed()?;
    let Some(promotion) = repository.newest_promotion()? else {
        bail!(
            "no commit in the history of {} promoted it and is still in force (looked for the line \"{PROMOTED}\" that pitcrew matrix promote --commit writes); git log -- {0} shows what there is to revert",
            file.display()
        );
    };
    if args.dry_run {
        let diff = repository.reverted(&promotion.hash)?;
        writeln!(out, "(dry run, nothing was changed) git revert {}", promotion.short())?;
        out.write_all(diff.as_bytes())?;
        return Ok(ExitCode::SUCCESS);
    }
    repository.nothing_is_staged()?;
    repository.revert(&promotion.hash, args.commit)?;
    let (name, driver, promoting) = (file.display(), &promotion.driver, promotion.short());
    let now = now_current(file);
    if args.commit {
        let commit = repository.head()?;
        writeln!(
            out,
            "{name}: the promotion of driver {driver} ({promoting}) is reverted{now}. Committed as {}.",
            short(&commit)
        )?;
    } else {
        writeln!(
            out,
            "{name}: the promotion of driver {driver} ({promoting}) is reverted{now}. Staged, not committed yet: git commit --no-edit (or leave it with: git revert --abort)"
        )?;
    }
    Ok(ExitCode::SUCCESS)
}

/// What is in production again, if the file says so.
fn now_current(file: &Path) -> String {
    let matrix = read(file).ok().and_then(|text| Matrix::parse(&text).ok());
    let driver = matrix.as_ref().and_then(|matrix| matrix.current()?.driver.as_ref());
    driver.map(|driver| format!(", current is driver {driver}")).unwrap_or_default()
}
