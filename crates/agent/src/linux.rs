//! The machine for real: system calls through rustix, everything else by reading and writing files.
//!
//! All paths are taken below a root directory, `/` in production and a tree of files in tests. The calls are short, so they
//! block the thread; the two that are not have a limit: a command in another root is a process of its own, and a write, for
//! which the kernel may wait for others, is made on a thread of its own.

mod kernel;
mod mountinfo;
mod pci;
mod processes;

use std::ffi::CString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use rustix::fs::OFlags;
use rustix::mount::UnmountFlags;

use crate::host::{Holders, Host, HostError, HostResult, KernelPaths, Modules, PciDevice, Ran};
use crate::values::in_words;

/// The name under which the agent's own binary changes its root and becomes another program (see [`become_another`]).
pub const CHROOT_NAME: &str = "pitcrew-chroot";
/// Exit code of that binary if the program cannot be started, as shells have it.
const CANNOT_START: i32 = 127;
/// Exit code of that binary if the root directory cannot be entered: then nobody knows what is there.
const CANNOT_ENTER: i32 = 126;

/// To take a device from its driver takes a second or two; one that somebody holds takes for ever. Less than the 30 s
/// between SIGTERM and SIGKILL.
const WRITTEN_WITHIN: Duration = Duration::from_secs(15);

/// Where programs are on a host, whatever the agent's own image says.
const HOST_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The machine that this program runs on.
#[derive(Clone, Debug)]
pub struct Linux {
    root: PathBuf,
    /// This program, to be started again under [`CHROOT_NAME`].
    this_program: PathBuf,
    /// How long the kernel may take to do what is written.
    patience: Duration,
}

impl Default for Linux {
    fn default() -> Self {
        Self { root: "/".into(), this_program: "/proc/self/exe".into(), patience: WRITTEN_WITHIN }
    }
}

impl Linux {
    /// A machine whose files are below `root`.
    pub fn below(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), ..Self::default() }
    }

    /// With another program to change the root directory with.
    #[must_use]
    pub fn with_program(mut self, this_program: impl Into<PathBuf>) -> Self {
        self.this_program = this_program.into();
        self
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }
}

impl Host for Linux {
    async fn modules(&self, paths: &KernelPaths) -> HostResult<Modules> {
        kernel::modules(&self.path(&paths.proc), &self.path(&paths.sys))
    }

    async fn remove_module(&self, name: &str) -> HostResult<()> {
        let failed = |error: std::io::Error| HostError::new(format!("remove kernel module {name}"), error);
        let name = CString::new(name).map_err(|error| failed(error.into()))?;
        // NONBLOCK: a busy module is an answer, not something to wait for. Never TRUNC, which would force it.
        let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or_default();
        rustix::system::delete_module(&name, flags).map_err(|error| failed(error.into()))
    }

    async fn mounts(&self) -> HostResult<Vec<String>> {
        let path = self.path("/proc/self/mountinfo");
        let text = std::fs::read_to_string(&path)
            .map_err(|error| HostError::new(format!("read {}", path.display()), error))?;
        Ok(mountinfo::mount_points(&text))
    }

    async fn detach(&self, mount_point: &str) -> HostResult<()> {
        rustix::mount::unmount(mount_point, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)
            .map_err(|error| HostError::new(format!("unmount {mount_point}"), error))
    }

    async fn holders(&self, prefix: &str) -> HostResult<Holders> {
        processes::holders(&self.path("/proc"), prefix)
    }

    async fn pci_devices(&self) -> HostResult<Vec<PciDevice>> {
        pci::devices(&self.path("/sys/bus/pci/devices"))
    }

    async fn run(&self, root: &str, command: &[&str], limit: Duration) -> HostResult<Ran> {
        let failed =
            |error| HostError::new(format!("run {} in {root}", command.first().unwrap_or(&"")), error);
        let mut program = tokio::process::Command::new(&self.this_program);
        program.arg0(CHROOT_NAME).arg(self.path(root)).args(command);
        program.stdin(Stdio::null()).stderr(Stdio::null()).stdout(Stdio::piped());
        // A process that hangs in the kernel cannot be killed; it is told to end and not waited for.
        program.kill_on_drop(true);
        let child = program.spawn().map_err(failed)?;
        match tokio::time::timeout(limit, child.wait_with_output()).await {
            Err(_) => Ok(Ran::TimedOut),
            Ok(Err(error)) => Err(failed(error)),
            Ok(Ok(ended)) if ended.status.code() == Some(CANNOT_START) => Ok(Ran::NotStarted),
            Ok(Ok(ended)) if ended.status.code() == Some(CANNOT_ENTER) => {
                let why = "the root directory cannot be entered: is it mounted, and has the container CAP_SYS_CHROOT?";
                Err(failed(io::Error::other(why)))
            }
            Ok(Ok(ended)) => Ok(Ran::Ended {
                code: ended.status.code(),
                output: String::from_utf8_lossy(&ended.stdout).into_owned(),
            }),
        }
    }

    async fn read(&self, path: &str) -> HostResult<Option<String>> {
        match std::fs::read_to_string(self.path(path)) {
            Ok(text) => Ok(Some(text)),
            Err(error) if is_absent(&error) => Ok(None),
            Err(error) => Err(HostError::new(format!("read {path}"), error)),
        }
    }

    async fn exists(&self, path: &str) -> HostResult<bool> {
        self.path(path).try_exists().map_err(|error| HostError::new(format!("look for {path}"), error))
    }

    async fn write(&self, path: &str, text: &str) -> HostResult<()> {
        let failed = |error| HostError::new(format!("write {path}"), error);
        let (file, text) = (self.path(path), text.to_owned());
        let writing = tokio::task::spawn_blocking(move || std::fs::write(file, text));
        match tokio::time::timeout(self.patience, writing).await {
            Ok(Ok(result)) => result.map_err(failed),
            Ok(Err(broken)) => Err(failed(io::Error::other(broken))),
            Err(_) => {
                let limit = in_words(self.patience);
                Err(failed(io::Error::other(format!("it has not come about within {limit}; who holds it?"))))
            }
        }
    }

    async fn remove(&self, path: &str) -> HostResult<()> {
        match std::fs::remove_file(self.path(path)) {
            Err(error) if !is_absent(&error) => Err(HostError::new(format!("remove {path}"), error)),
            _ => Ok(()),
        }
    }
}

/// Not there, or below something that is no directory.
fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// Changes the root directory and becomes the program in `command`. Returns only if that fails.
///
/// A child process that changes its root between fork and exec needs unsafe code; a program that changes its own does not.
pub fn become_another(root: &Path, command: &[std::ffi::OsString]) -> i32 {
    use std::os::unix::process::CommandExt as _;
    if rustix::process::chroot(root).and_then(|()| rustix::process::chdir("/")).is_err() {
        return CANNOT_ENTER;
    }
    if let [program, arguments @ ..] = command {
        let _error = std::process::Command::new(program).args(arguments).env("PATH", HOST_PATH).exec();
    }
    CANNOT_START
}

#[cfg(test)]
mod tests;
