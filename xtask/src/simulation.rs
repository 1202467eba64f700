//! Thousands of made-up upgrades, and whether a seed is the same story in every build.

use std::process::Stdio;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use crate::cargo::cargo;

/// As a step of `cargo xtask test`.
const SEEDS: &str = "2000";
/// In both builds: enough to meet every kind of fault.
const SEEDS_COMPARED: &str = "60";

/// Keeps its promises under 2,000 seeds, and tells the same of a seed in debug and release.
pub(crate) fn check() -> Result<Option<String>> {
    let status = cargo(&["run", "--release", "--quiet", "--", "simulate", "--seeds", SEEDS]).status();
    let status = status.context("start cargo")?;
    if !status.success() {
        bail!("it ended with {status}, see above.");
    }
    let (debug, release) = (hash(&[])?, hash(&["--release"])?);
    if debug != release {
        bail!("the trace hash of {SEEDS_COMPARED} seeds is {debug} in debug and {release} in release.");
    }
    println!("the trace hash of {SEEDS_COMPARED} seeds is {debug}, in debug and release");
    Ok(None)
}

/// Over everything that happened.
fn hash(profile: &[&str]) -> Result<String> {
    let mut command = cargo(&["run", "--quiet"]);
    command.args(profile).args(["--", "simulate", "--seeds", SEEDS_COMPARED, "-o", "json"]);
    let output = command.stderr(Stdio::inherit()).output().context("start cargo")?;
    let summary: Value = serde_json::from_slice(&output.stdout).context("the summary is not JSON")?;
    summary["hash"].as_str().map(str::to_owned).context("the summary has no hash")
}
