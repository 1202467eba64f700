//! The process under test: the release build of `pitcrew controller`, and what it takes from the machine.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use pitcrew_sim::plane::{Plane, User};
use serde_json::Value;
use tokio::process::{Child, Command};
use tokio::time::timeout;

use crate::background::Background;
use crate::cargo::cargo;

/// Linux counts a process's time in hundredths of a second, on every architecture that it runs on today.
const TICKS_PER_SECOND: f64 = 100.0;

/// It answers what is under way and gives its Lease back, for which it takes six seconds at most.
const STOP_TIMEOUT: Duration = Duration::from_secs(15);

/// Enough to see why it ended.
const TAIL_LINES: usize = 20;

/// Builds the release binary and returns where cargo put it.
pub(super) fn build() -> Result<PathBuf> {
    let build = ["build", "--release", "--package", "pitcrew", "--message-format=json-render-diagnostics"];
    let output = cargo(&build).stderr(Stdio::inherit()).output().context("start cargo")?;
    if !output.status.success() {
        bail!("`cargo build --release --package pitcrew` failed, see above.");
    }
    let artifacts = serde_json::Deserializer::from_slice(&output.stdout).into_iter::<Value>();
    let executable = |artifact: Value| artifact["executable"].as_str().map(PathBuf::from);
    artifacts.filter_map(Result::ok).filter_map(executable).last().context("cargo built no executable")
}

/// What a process has taken so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Usage {
    /// The most memory that it ever had.
    pub(super) peak_mib: f64,
    /// On all cores together.
    pub(super) cpu_seconds: f64,
}

/// A running controller. Dropping it kills it.
pub(super) struct Controller {
    child: Child,
    background: Background,
    log: PathBuf,
}

impl Controller {
    /// Starts it as [`User::Pitcrew`], by whose name the audit log knows it.
    pub(super) fn start(program: &Path, plane: &Plane) -> Result<Controller> {
        let log = plane.data_dir().join("pitcrew.log");
        let output = File::create(&log)?;
        let child = Command::new(program)
            .arg("controller")
            .arg("--kubeconfig")
            .arg(plane.kubeconfig_of(User::Pitcrew))
            .args(["--listen", "127.0.0.1:0"])
            .env("NO_COLOR", "1")
            .env_remove("RUST_LOG") // Measured as people run it.
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("start {}", program.display()))?;
        let background = child.id().and_then(Background::with_pid).context("the controller ended at once")?;
        Ok(Controller { child, background, log })
    }

    /// Waits for `work`, and fails if the controller ends before that.
    pub(super) async fn during<T>(&mut self, work: impl Future<Output = Result<T>>) -> Result<T> {
        let outcome = tokio::select! {
            outcome = work => outcome,
            status = self.child.wait() => Err(anyhow::anyhow!("the controller ended with {}", status?)),
        };
        outcome.with_context(|| format!("the controller's last words:\n{}\n", self.last_words()))
    }

    /// What it has taken so far.
    pub(super) fn usage(&self) -> Result<Usage> {
        let read = |file: &str| {
            let path = format!("/proc/{}/{file}", self.background.pid());
            fs::read_to_string(&path).with_context(|| format!("read {path}"))
        };
        let peak_mib = peak_mib(&read("status")?).context("no VmHWM in the controller's status")?;
        let cpu_seconds = cpu_seconds(&read("stat")?).context("no times in the controller's stat")?;
        Ok(Usage { peak_mib, cpu_seconds })
    }

    /// Ends it as Kubernetes would.
    pub(super) async fn stop(mut self) -> Result<()> {
        self.background.signal("TERM")?;
        let Ok(status) = timeout(STOP_TIMEOUT, self.child.wait()).await else {
            bail!("the controller did not end within {} s of SIGTERM", STOP_TIMEOUT.as_secs());
        };
        let status = status?;
        if !status.success() {
            bail!("the controller ended with {status} after SIGTERM:\n{}", self.last_words());
        }
        Ok(())
    }

    fn last_words(&self) -> String {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
    }
}

fn peak_mib(status: &str) -> Option<f64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<f64>().ok()? / 1024.0)
}

/// The 14th and 15th field: time in user mode and in the kernel.
fn cpu_seconds(stat: &str) -> Option<f64> {
    // The second field is the program's name in parentheses and may contain anything.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<f64>().ok();
    Some((ticks()? + ticks()?) / TICKS_PER_SECOND)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_and_time_are_read_from_proc() {
        assert_eq!(peak_mib("Name:\tpitcrew\nVmHWM:\t   20480 kB\nVmRSS:\t 9 kB\n"), Some(20.0));
        let stat = "42 (pit) crew) S 1 42 42 0 -1 4194304 100 0 0 0 150 50 0 0 20 0 8 0 100";
        assert_eq!(cpu_seconds(stat), Some(2.0));
    }
}
