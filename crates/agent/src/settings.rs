//! What the driver manager was told to do, read once from flags and environment.

use std::time::Duration;

use kube::core::{Expression, Selector};
use pitcrew_core::contract::{DEFAULT_LABEL_DOMAIN, Keys};

use crate::failure::Failure;

/// The reason of the agent's Events, the one that people look for.
pub const EVENT_REASON: &str = "GPUDriverUpgrade";

/// When a cordon of the agent's own is lifted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Uncordon {
    /// When the new driver is up, by `finish`.
    Finish,
    /// Before the new driver is there, as NVIDIA's driver manager does.
    Early,
}

/// Where things are, as the agent's container sees them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paths {
    /// Where the driver container mounts its root directory.
    pub driver_root: String,
    /// The driver container's PID file.
    pub pid_file: String,
    /// The digest of the configuration that is installed, written by the driver container.
    pub state_file: String,
    /// The agent's own note of how far an unload is; it has to be on a file system that a reboot empties.
    pub journal: String,
    /// The host's root directory.
    pub host_root: String,
    /// Written by the network operator when MOFED is ready.
    pub mofed_ready: String,
    /// Written by the driver container's startup probe.
    pub driver_ready: String,
}

impl Paths {
    /// With `/run` and the host's root directory at these places.
    pub fn new(run: &str, host_root: &str) -> Self {
        Self {
            driver_root: format!("{run}/nvidia/driver"),
            pid_file: format!("{run}/nvidia/nvidia-driver.pid"),
            state_file: format!("{run}/nvidia/nvidia-driver.state"),
            journal: format!("{run}/nvidia/pitcrew-unload.json"),
            host_root: host_root.to_owned(),
            mofed_ready: format!("{run}/mellanox/drivers/.driver-ready"),
            driver_ready: format!("{run}/nvidia/validations/.driver-ctr-ready"),
        }
    }
}

/// What the driver manager was told.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "the documented switches")]
pub struct Settings {
    /// Evict pods that use a GPU.
    pub evict: bool,
    /// Drain the node if that is not enough.
    pub drain: bool,
    /// Also pods that nobody makes again.
    pub force: bool,
    /// Which pods a drain takes off.
    pub selector: Selector,
    /// How long pods may take; `None`: for ever.
    pub leave_limit: Option<Duration>,
    /// Also pods with emptyDir volumes.
    pub delete_empty_dir: bool,
    /// Where the operands are.
    pub namespace: String,
    /// A label that places GPU clients of other installations.
    pub custom_label: Option<String>,
    /// The driver needs MOFED …
    pub rdma: bool,
    /// … which is the host's.
    pub host_mofed: bool,
    /// How long MOFED may take; `None`: for ever.
    pub mofed_limit: Option<Duration>,
    /// Unload even if the same configuration is installed.
    pub force_reinstall: bool,
    /// The digest of the configuration that is wanted; empty if unknown.
    pub digest: String,
    /// When a cordon of the agent's own is lifted.
    pub uncordon: Uncordon,
    /// Give NVSwitches back too.
    pub nvswitches: bool,
    /// Where things are.
    pub paths: Paths,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            evict: true,
            drain: true,
            force: false,
            selector: Self::drain_selector("").unwrap_or_default(),
            leave_limit: None,
            delete_empty_dir: false,
            namespace: "gpu-operator".to_owned(),
            custom_label: None,
            rdma: false,
            host_mofed: false,
            mofed_limit: Some(Duration::from_mins(10)),
            force_reinstall: false,
            digest: String::new(),
            uncordon: Uncordon::Finish,
            nvswitches: false,
            paths: Paths::new("/run", "/host"),
        }
    }
}

impl Settings {
    /// The selector of a drain: what the user says, without the pods that are to be left out of drains.
    pub fn drain_selector(text: &str) -> Result<Selector, Failure> {
        let mut selector = pitcrew_core::selector::parse(text)
            .map_err(|error| Failure::Usage(format!("DRAIN_POD_SELECTOR_LABEL: {error}")))?;
        let skip = Keys::new(&"gpu".into(), DEFAULT_LABEL_DOMAIN).drain_skip;
        selector.extend([Expression::NotEqual(skip, "true".to_owned())]);
        Ok(selector)
    }
}
