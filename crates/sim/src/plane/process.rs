//! One child process that never outlives its parent.
//!
//! Each program runs under a small shell that holds the read end of a pipe from us. However we end, `kill -9`
//! included, the kernel closes our end, the shell sees the end of file and kills the program. It needs no
//! `unsafe` and works where there is a POSIX shell.

use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

/// Arguments: a directory to remove when the parent is gone (or nothing), then the program and its arguments.
///
/// The shell's own remarks ("Terminated") do not belong into the program's log. SIGKILL at once: the data are
/// thrown away, and an API server that ends politely takes a minute.
const SUPERVISE: &str = r#"
    exec 3<&0 4>&2 2>/dev/null
    dir=$1; shift
    "$@" </dev/null 3<&- 2>&4 4>&- &
    program=$!
    ( read -r _ <&3; kill -9 "$program"; exit 0 ) &
    watcher=$!
    exec 3<&-
    wait "$program"
    status=$?
    kill "$watcher"
    wait "$watcher" && [ -n "$dir" ] && rm -rf -- "$dir"
    exit "$status"
"#;

/// Enough for the sentence before a Go program's exit, short enough for a terminal.
const TAIL_LINES: usize = 12;

/// A running program with its log file. Dropping it kills the program and waits for its end.
#[derive(Debug)]
pub(super) struct Process {
    name: &'static str,
    supervisor: Child,
    log: PathBuf,
}

impl Process {
    /// Starts a program; its output goes to `<data>/<name>.log`. `throw_away` is removed if we are killed.
    pub(super) fn start(
        program: &Path,
        name: &'static str,
        arguments: &[String],
        data: &Path,
        throw_away: Option<&Path>,
    ) -> io::Result<Process> {
        let log = data.join(format!("{name}.log"));
        let output = File::create(&log)?;
        let supervisor = Command::new("sh")
            .args(["-c", SUPERVISE, "sh"])
            .arg(throw_away.unwrap_or(Path::new("")))
            .arg(program)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(output.try_clone()?)
            .stderr(output)
            .process_group(0) // Ctrl-C is for the parent, which then ends its children in order.
            .spawn()?;
        Ok(Process { name, supervisor, log })
    }

    pub(super) fn name(&self) -> &'static str {
        self.name
    }

    /// How the program ended, if it did.
    pub(super) fn ended(&mut self) -> io::Result<Option<ExitStatus>> {
        self.supervisor.try_wait()
    }

    /// The last lines of its log.
    pub(super) fn log_tail(&self) -> String {
        let log = fs::read(&self.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.supervisor.stdin.take());
        // Nothing is left to do for a child that cannot be waited for.
        let _ = self.supervisor.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, data: &Path, throw_away: Option<&Path>) -> Process {
        Process::start(Path::new("/bin/sh"), "part", &["-c".to_owned(), script.to_owned()], data, throw_away)
            .unwrap()
    }

    fn wait_for<T>(mut look: impl FnMut() -> Option<T>) -> T {
        for _ in 0..500 {
            if let Some(seen) = look() {
                return seen;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        panic!("waited for ten seconds");
    }

    #[test]
    fn a_program_that_ends_leaves_its_status_and_its_last_words() {
        let data = tempfile::tempdir().unwrap();
        let mut part = shell("echo so it goes; exit 7", data.path(), Some(data.path()));
        let status = wait_for(|| part.ended().unwrap());
        assert_eq!(status.code(), Some(7));
        assert_eq!(part.log_tail(), "so it goes");
    }

    #[test]
    fn the_end_of_the_parents_pipe_kills_the_program_and_removes_its_data() {
        let data = tempfile::tempdir().unwrap();
        let thrown_away = data.path().join("etcd");
        fs::create_dir(&thrown_away).unwrap();
        let part = shell("echo $$; exec sleep 1000", data.path(), Some(&thrown_away));
        let pid = wait_for(|| Some(part.log_tail()).filter(|pid| !pid.is_empty()));
        let lives = || {
            Command::new("sh").args(["-c", "kill -0 $1 2>/dev/null", "sh", &pid]).status().unwrap().success()
        };
        assert!(lives());
        drop(part);
        assert!(!lives(), "sleep outlived its supervisor");
        assert!(!thrown_away.exists());
    }
}
