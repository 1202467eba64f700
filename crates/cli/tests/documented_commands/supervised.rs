//! A child process that is ended as Kubernetes ends a container, and never outlives us.

use std::io::{self, Write as _};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};

/// The first line that we write, or our end, is SIGTERM, unless it says KILL; the end of the pipe is SIGKILL. So it
/// never outlives us.
const SUPERVISE: &str = r#"
    exec 3<&0
    "$@" </dev/null 3<&- &
    program=$!
    (
        read -r how <&3
        [ "$how" = KILL ] || { kill -TERM "$program"; read -r _ <&3; }
        kill -KILL "$program"
    ) 2>/dev/null &
    watcher=$!
    exec 3<&-
    wait "$program"
    status=$?
    kill "$watcher" 2>/dev/null
    exit "$status"
"#;

/// A running program. Dropping it kills it.
pub(crate) struct Supervised {
    shell: Child,
}

impl Supervised {
    /// A command to which arguments, environment and output can be added.
    pub(crate) fn command(program: &Path) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", SUPERVISE, "sh"]).arg(program);
        command
    }

    /// Starts it.
    pub(crate) fn spawn(command: &mut Command) -> io::Result<Supervised> {
        Ok(Supervised { shell: command.stdin(Stdio::piped()).spawn()? })
    }

    /// How it ended, if it did.
    pub(crate) fn ended(&mut self) -> io::Result<Option<ExitStatus>> {
        self.shell.try_wait()
    }

    /// SIGTERM.
    pub(crate) fn terminate(&mut self) {
        self.say("\n");
    }

    /// SIGKILL; waits for its end.
    pub(crate) fn kill(&mut self) {
        self.say("KILL\n");
        drop(self.shell.stdin.take());
        let _ = self.shell.wait();
    }

    fn say(&mut self, how: &str) {
        if let Some(pipe) = &mut self.shell.stdin {
            let _ = pipe.write_all(how.as_bytes()); // It may have ended already.
        }
    }
}

impl Drop for Supervised {
    fn drop(&mut self) {
        self.kill();
    }
}
