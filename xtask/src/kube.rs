//! `cargo xtask kube`: etcd and Kubernetes, built once from the Go module in `xtask/kube`.

use std::fs;
use std::io::{self, IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use pitcrew_sim::plane::{Binaries, LD_FLAGS, PROGRAMS, Program, VERSION};
use tokio::time::Instant;

use crate::cargo::workspace;
use crate::elapsed::Elapsed;

/// Makes sure that the programs of a control plane are there, and says where they come from.
pub(crate) fn ensure() -> Result<Binaries> {
    if let Ok(found) = Binaries::find() {
        let from =
            if found.dir() == Binaries::cached_at() { "in the cache" } else { "given by KUBEBUILDER_ASSETS" };
        println!("Kubernetes {VERSION} is there, {from}: {}", found.dir().display());
        return Ok(found);
    }
    if std::env::var_os("KUBEBUILDER_ASSETS").is_some() {
        println!("KUBEBUILDER_ASSETS is set, but not every program is in there; it is not used.");
    }
    let built = build()?;
    println!("Kubernetes {VERSION} is built: {}", built.dir().display());
    Ok(built)
}

/// Builds into a directory of its own and gives it its name at the end: the cache is complete or not there.
fn build() -> Result<Binaries> {
    let target = Binaries::cached_at();
    let building = target.with_file_name(format!("building-{}", std::process::id()));
    fs::create_dir_all(&building).with_context(|| format!("make the directory {}", building.display()))?;
    println!("Building Kubernetes {VERSION} with Go, once; about 6 minutes on two cores.");
    let outcome = build_all(&building).and_then(|()| publish(&building, &target));
    if outcome.is_err() {
        // The error is what matters; a directory left behind does no harm.
        let _ = fs::remove_dir_all(&building);
    }
    outcome
}

fn build_all(into: &Path) -> Result<()> {
    for (index, program) in PROGRAMS.iter().enumerate() {
        build_one(program, index + 1, into)?;
    }
    Ok(())
}

fn publish(building: &Path, target: &Path) -> Result<Binaries> {
    if let Ok(complete) = Binaries::in_dir(target) {
        // Somebody else was quicker.
        fs::remove_dir_all(building)?;
        return Ok(complete);
    }
    if target.exists() {
        fs::remove_dir_all(target).with_context(|| format!("remove the incomplete {}", target.display()))?;
    }
    fs::rename(building, target).with_context(|| format!("rename {} to its place", building.display()))?;
    Ok(Binaries::in_dir(target)?)
}

fn build_one(program: &Program, number: usize, into: &Path) -> Result<()> {
    let Program { name, package } = program;
    let log = into.join(format!("{name}.log"));
    let output = fs::File::create(&log)?;
    let go = Command::new("go")
        .args(["build", "-trimpath", "-ldflags", LD_FLAGS, "-o"])
        .arg(into.join(name))
        .arg(package)
        .env("CGO_ENABLED", "0") // No C compiler needed, and the binaries run in any image.
        .current_dir(module())
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output)
        .spawn();
    let go = match go {
        Err(error) if error.kind() == io::ErrorKind::NotFound => bail!(
            "Go is not installed, and Kubernetes is built with it: install Go 1.26 or later \
             (https://go.dev/dl), or set KUBEBUILDER_ASSETS to a directory with {}.",
            PROGRAMS.map(|program| program.name).join(", ")
        ),
        other => other.context("start go")?,
    };
    let status = watch(go, &format!("{name}, {number} of {}", PROGRAMS.len()))?;
    if !status.success() {
        let log = fs::read_to_string(&log).unwrap_or_default();
        bail!("`go build {package}` in {} failed:\n{}", module().display(), log.trim_end());
    }
    fs::remove_file(&log)?;
    Ok(())
}

fn module() -> PathBuf {
    workspace().join("xtask/kube")
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
