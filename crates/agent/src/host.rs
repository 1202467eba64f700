//! Everything that an agent does to the machine it runs on, as one small trait.
//!
//! [`crate::linux`] does it for real, [`crate::fake`] in memory. What to do is decided elsewhere, from the plain data that
//! comes out of here.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::time::Duration;

/// The loaded kernel modules by name.
pub type Modules = BTreeMap<String, Module>;

/// A loaded kernel module.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Module {
    /// How many references keep it: of modules, of open files, of the kernel itself.
    pub references: i64,
    /// The modules that use it.
    pub holders: BTreeSet<String>,
}

/// Where a machine's `/proc` and `/sys` are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelPaths {
    /// `/proc`.
    pub proc: String,
    /// `/sys`.
    pub sys: String,
}

impl Default for KernelPaths {
    fn default() -> Self {
        Self { proc: "/proc".to_owned(), sys: "/sys".to_owned() }
    }
}

/// A process that holds a device file open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its number.
    pub pid: u32,
    /// What it is called.
    pub command: String,
    /// The device files, each once.
    pub files: BTreeSet<String>,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let files: Vec<&str> = self.files.iter().map(String::as_str).collect();
        write!(f, "process {} ({}) has {} open", self.pid, self.command, files.join(" and "))
    }
}

/// Who holds device files open, as far as that can be seen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holders {
    /// Those that were seen.
    pub seen: Vec<Holder>,
    /// So many processes could not be looked at, and any of them may be one.
    pub hidden: usize,
}

/// What is said of processes that could not be looked at.
pub(crate) fn not_looked_at(hidden: usize) -> String {
    let es = if hidden == 1 { "" } else { "es" };
    format!(
        "{hidden} process{es} that may have it open could not be looked at (that needs CAP_DAC_READ_SEARCH and CAP_SYS_PTRACE)"
    )
}

/// A PCI device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PciDevice {
    /// Its address, such as `0000:3b:00.0`.
    pub address: String,
    /// Its vendor.
    pub vendor: u32,
    /// Its class.
    pub class: u32,
    /// The driver that it is bound to.
    pub driver: Option<String>,
    /// The name by which drivers are found for it.
    pub modalias: String,
    /// The devices that depend on it, by address.
    pub consumers: Vec<String>,
    /// The device files by one of which a virtual machine holds it, if a vfio driver has it.
    pub vfio_files: Vec<String>,
}

/// What came of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ran {
    /// It ended.
    Ended {
        /// Its exit code; none if a signal ended it.
        code: Option<i32>,
        /// What it wrote to its standard output.
        output: String,
    },
    /// There is no such program, or it cannot be started.
    NotStarted,
    /// It did not end in time.
    TimedOut,
}

/// Something could not be done on the machine.
#[derive(Debug, thiserror::Error)]
#[error("{operation}")]
pub struct HostError {
    /// What was tried.
    pub operation: String,
    /// Why it failed.
    pub source: io::Error,
}

impl HostError {
    /// `operation` failed because of `source`.
    pub fn new(operation: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self { operation: operation.into(), source: source.into() }
    }
}

/// A result of the machine.
pub type HostResult<T> = Result<T, HostError>;

/// The machine.
///
/// Paths are absolute, as the agent's container sees them. A call returns only when it is done: nothing goes on in the
/// background, so an agent that is stopped between two calls leaves no half call behind.
pub trait Host: Send + Sync {
    /// The loaded modules. That they cannot be read is an error, never an empty list.
    fn modules(&self, paths: &KernelPaths) -> impl Future<Output = HostResult<Modules>> + Send;
    /// Removes a module that nothing refers to; it never waits and never forces.
    fn remove_module(&self, name: &str) -> impl Future<Output = HostResult<()>> + Send;
    /// All mount points, in the order in which they were mounted; one that is mounted over appears again.
    fn mounts(&self) -> impl Future<Output = HostResult<Vec<String>>> + Send;
    /// Detaches what is mounted last at a mount point, with everything that is mounted below that, even if it is in use.
    fn detach(&self, mount_point: &str) -> impl Future<Output = HostResult<()>> + Send;
    /// The processes that hold device files open whose path begins with `prefix`. One that cannot be looked at is counted,
    /// never left out.
    fn holders(&self, prefix: &str) -> impl Future<Output = HostResult<Holders>> + Send;
    /// The PCI devices, by address.
    fn pci_devices(&self) -> impl Future<Output = HostResult<Vec<PciDevice>>> + Send;
    /// Runs a command with `root` as its root directory. That this cannot be entered is an error, never a missing program.
    fn run(
        &self,
        root: &str,
        command: &[&str],
        limit: Duration,
    ) -> impl Future<Output = HostResult<Ran>> + Send;
    /// A file's text; `None` if there is no such file.
    fn read(&self, path: &str) -> impl Future<Output = HostResult<Option<String>>> + Send;
    /// Whether there is a file or directory.
    fn exists(&self, path: &str) -> impl Future<Output = HostResult<bool>> + Send;
    /// Writes a file, or into a file of the kernel. What the kernel does not do in time is an error, though it may do it yet.
    fn write(&self, path: &str, text: &str) -> impl Future<Output = HostResult<()>> + Send;
    /// Removes a file; one that is not there is removed already.
    fn remove(&self, path: &str) -> impl Future<Output = HostResult<()>> + Send;
}
