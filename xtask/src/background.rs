//! A process that goes on after us, and that a later run of ours may end by its number.
//!
//! Numbers are used again. A process is therefore known by its number and its start, and one that started at
//! another time is somebody else's.

use std::fs;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

/// One process, not to be confused with a later one of the same number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Background {
    pid: u32,
    started: String,
}

impl Background {
    /// The running process with this number, if there is one.
    pub(crate) fn with_pid(pid: u32) -> Option<Background> {
        start_of(pid).map(|started| Background { pid, started })
    }

    /// The process's number.
    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// Whether this very process still runs.
    pub(crate) fn runs(&self) -> bool {
        start_of(self.pid).is_some_and(|started| started == self.started)
    }

    /// Sends a signal (`TERM`, `KILL`) if this very process still runs.
    pub(crate) fn signal(&self, signal: &str) -> Result<()> {
        if self.runs() {
            // The shell's own `kill`: a slim container has no program of that name.
            Command::new("sh")
                .args(["-c", r#"kill -"$1" "$2""#, "sh", signal, &self.pid.to_string()])
                .stderr(Stdio::null()) // It may end between the question and the signal.
                .status()
                .with_context(|| format!("send {signal} to process {}", self.pid))?;
        }
        Ok(())
    }
}

/// When a process started, as text to compare: from /proc on Linux, from `ps` elsewhere. None: it has ended.
fn start_of(pid: u32) -> Option<String> {
    let Ok(boot) = fs::read_to_string("/proc/sys/kernel/random/boot_id") else {
        return start_by_ps(pid);
    };
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the program's name in parentheses and may contain anything.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    // The 22nd field of the line, the 19th after the state: clock ticks from boot to start.
    let ticks = fields.nth(18)?;
    (state != "Z").then(|| format!("{} {ticks}", boot.trim()))
}

fn start_by_ps(pid: u32) -> Option<String> {
    let ps = Command::new("ps").args(["-o", "lstart=", "-p", &pid.to_string()]).output().ok()?;
    let started = String::from_utf8(ps.stdout).ok()?.trim().to_owned();
    (!started.is_empty()).then_some(started)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_started_at_another_time_is_never_signalled() {
        let mut sleep = Command::new("sleep").arg("1000").spawn().unwrap();
        let ours = Background::with_pid(sleep.id()).unwrap();
        let of_yesterday = Background { started: "yesterday".to_owned(), ..ours.clone() };

        of_yesterday.signal("KILL").unwrap();
        assert!(ours.runs());

        ours.signal("KILL").unwrap();
        sleep.wait().unwrap();
        assert!(!ours.runs());
    }
}
