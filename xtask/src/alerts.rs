//! The alert rules, tested with promtool: the machine's own, or Debian's package unpacked into the cache. Its server is what
//! tests ask that need a real Prometheus.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use pitcrew_sim::plane::{cache_dir, prometheus_dir};

use crate::cargo::workspace;

/// Where the rules and their tests are.
const RULES: &str = "docs/monitoring/alerts.yaml";
const TESTS: &str = "docs/monitoring/alerts_test.yaml";

/// Tests the rules and says what had to be left out.
pub(crate) fn report() -> Result<()> {
    if let Some(left_out) = check()? {
        println!("{left_out}");
    }
    Ok(())
}

/// Tests the rules. The answer says what had to be left out.
pub(crate) fn check() -> Result<Option<String>> {
    let Some(promtool) = ensure()? else {
        return Ok(Some(
            "alerts, and the test against a real Prometheus, left out: there is no promtool, and Debian's package \
             cannot be had"
                .to_owned(),
        ));
    };
    run(&promtool, &["check", "rules", RULES])?;
    run(&promtool, &["test", "rules", TESTS])?;
    Ok(None)
}

fn run(promtool: &Path, arguments: &[&str]) -> Result<()> {
    let status = Command::new(promtool).args(arguments).current_dir(workspace()).status();
    if status.context("start promtool")?.success() {
        return Ok(());
    }
    bail!("promtool found what is listed above.")
}

fn ensure() -> Result<Option<PathBuf>> {
    let works =
        |program: &Path| Command::new(program).arg("--version").output().is_ok_and(|o| o.status.success());
    let installed = PathBuf::from("promtool");
    if works(&installed) {
        return Ok(Some(installed));
    }
    let root = cache_dir().join("tools/prometheus");
    let unpacked = prometheus_dir().join("promtool");
    if !works(&unpacked) {
        println!("Unpacking Debian's package prometheus into {}, once.", root.display());
        unpack(&root)?;
    }
    Ok(Some(unpacked).filter(|program| works(program)))
}

/// Downloads the package and unpacks it. Nothing is installed, so no rights are needed.
fn unpack(root: &Path) -> Result<()> {
    std::fs::create_dir_all(root).context("make the cache")?;
    let download =
        || Command::new("apt-get").args(["download", "--quiet", "prometheus"]).current_dir(root).output();
    if !download().is_ok_and(|output| output.status.success()) {
        // The lists of packages may never have been fetched.
        let _ = Command::new("apt-get").args(["update", "--quiet"]).output();
        let _ = download();
    }
    for entry in std::fs::read_dir(root).context("read the cache")? {
        let path = entry.context("read the cache")?.path();
        if path.extension().is_some_and(|extension| extension == "deb") {
            let _ = Command::new("dpkg-deb").arg("-x").arg(&path).arg(root).status();
            std::fs::remove_file(&path).context("remove the package")?;
        }
    }
    Ok(())
}
