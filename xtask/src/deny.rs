//! cargo-deny: licences, banned crates, sources, and known vulnerabilities if their database can be had.

use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use pitcrew_sim::plane::cache_dir;
use tokio::time::Instant;

use crate::cargo::{cargo, without_our_package, workspace};

/// Written for this release; another one may know other settings.
const VERSION: &str = "0.20.2";

/// The database is a Git repository of some megabytes; a machine without a way to it may wait for ever.
const FETCH_TIMEOUT: Duration = Duration::from_mins(1);

/// Checks the tree and says what had to be left out.
pub(crate) fn report() -> Result<()> {
    if let Some(left_out) = check()? {
        println!("{left_out}");
    }
    Ok(())
}

/// Checks the tree. The answer says what had to be left out.
pub(crate) fn check() -> Result<Option<String>> {
    let program = ensure()?;
    run(&program, &["check", "bans", "licenses", "sources"])?;
    if fetch_advisories(&program)? {
        run(&program, &["check", "--disable-fetch", "advisories"])?;
        return Ok(None);
    }
    Ok(Some(
        "advisories left out: their database, github.com/rustsec/advisory-db, cannot be fetched".to_owned(),
    ))
}

/// The program, installed into the cache if it is not there.
fn ensure() -> Result<PathBuf> {
    let root = cache_dir().join("tools");
    let program = root.join("bin/cargo-deny");
    if program.is_file() {
        return Ok(program);
    }
    println!("Installing cargo-deny {VERSION} into {}, once; some minutes.", root.display());
    let status = cargo(&["install", "cargo-deny", "--locked", "--version", VERSION, "--root"])
        .arg(&root)
        .status()
        .context("start cargo install")?;
    if !status.success() {
        bail!("cargo-deny cannot be installed.");
    }
    Ok(program)
}

fn command(program: &PathBuf, arguments: &[&str]) -> Command {
    let mut deny = Command::new(program);
    deny.args(arguments).current_dir(workspace());
    without_our_package(&mut deny);
    deny
}

fn run(program: &PathBuf, arguments: &[&str]) -> Result<()> {
    if command(program, arguments).status().context("start cargo-deny")?.success() {
        return Ok(());
    }
    bail!("cargo-deny found what is listed above; deny.toml says what is allowed.")
}

fn fetch_advisories(program: &PathBuf) -> Result<bool> {
    let fetch = command(program, &["fetch", "db"])
        .env("GIT_TERMINAL_PROMPT", "0")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .context("start cargo-deny")?;
    Ok(wait_at_most(FETCH_TIMEOUT, fetch)?.is_some_and(|status| status.success()))
}

/// None: it took too long and was ended.
fn wait_at_most(limit: Duration, mut child: Child) -> Result<Option<ExitStatus>> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}
