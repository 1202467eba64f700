//! Programs that are built with Go, once, from the modules beside this crate, into the cache.

use std::fs;
use std::io::{self, IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use pitcrew_sim::plane::Program;
use tokio::time::Instant;

use crate::cargo::workspace;
use crate::elapsed::Elapsed;

/// Builds into a directory of its own and gives it its name at the end: the cache is complete or not there.
/// `without_go` says what else somebody without Go can do.
pub(crate) fn build(programs: &[Program], target: &Path, without_go: &str) -> Result<()> {
    let building = target.with_file_name(format!("building-{}", std::process::id()));
    fs::create_dir_all(&building).with_context(|| format!("make the directory {}", building.display()))?;
    let outcome =
        build_all(programs, &building, without_go).and_then(|()| publish(programs, &building, target));
    if outcome.is_err() {
        // The error is what matters; a directory left behind does no harm.
        let _ = fs::remove_dir_all(&building);
    }
    outcome
}

fn build_all(programs: &[Program], into: &Path, without_go: &str) -> Result<()> {
    for (index, program) in programs.iter().enumerate() {
        let what = format!("{}, {} of {}", program.name, index + 1, programs.len());
        build_one(program, &what, into, without_go)?;
    }
    Ok(())
}

fn publish(programs: &[Program], building: &Path, target: &Path) -> Result<()> {
    if programs.iter().all(|program| target.join(program.name).is_file()) {
        // Somebody else was quicker.
        return Ok(fs::remove_dir_all(building)?);
    }
    if target.exists() {
        fs::remove_dir_all(target).with_context(|| format!("remove the incomplete {}", target.display()))?;
    }
    fs::rename(building, target).with_context(|| format!("rename {} to its place", building.display()))
}

fn build_one(program: &Program, what: &str, into: &Path, without_go: &str) -> Result<()> {
    let Program { name, package, module, ld_flags } = program;
    let module = module_dir(module);
    let log = into.join(format!("{name}.log"));
    let output = fs::File::create(&log)?;
    let go = Command::new("go")
        .args(["build", "-trimpath", "-ldflags", ld_flags, "-o"])
        .arg(into.join(name))
        .arg(package)
        .env("CGO_ENABLED", "0") // No C compiler needed, and the binaries run in any image.
        .current_dir(&module)
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output)
        .spawn();
    let go = match go {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            bail!(
                "Go is not installed, and {name} is built with it: install Go 1.26 or later (https://go.dev/dl){without_go}."
            )
        }
        other => other.context("start go")?,
    };
    let status = watch(go, what)?;
    if !status.success() {
        let log = fs::read_to_string(&log).unwrap_or_default();
        bail!("`go build {package}` in {} failed:\n{}", module.display(), log.trim_end());
    }
    fs::remove_file(&log)?;
    Ok(())
}

fn module_dir(module: &str) -> PathBuf {
    workspace().join("xtask").join(module)
}

/// Waits for a build with one line that is redrawn on a terminal, and two plain lines elsewhere.
fn watch(mut build: Child, what: &str) -> Result<ExitStatus> {
    let start = Instant::now();
    let terminal = io::stdout().is_terminal();
    if !terminal {
        println!("  {what}");
    }
    loop {
        let ended = build.try_wait()?;
        if terminal {
            print!("\r  {what}, {}   ", Elapsed(start.elapsed()));
            io::stdout().flush()?;
        }
        if let Some(status) = ended {
            if terminal {
                println!();
            } else {
                println!("  {what}: {}", Elapsed(start.elapsed()));
            }
            return Ok(status);
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}
