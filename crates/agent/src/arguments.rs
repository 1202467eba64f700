//! The command line and the environment of every agent, and which of them was called.
//!
//! The name of the program chooses the agent: `driver-manager`, `vfio-manage` and `network-operator-init-container` take
//! the place of the programs of these names; under any other name the first argument says it.

mod logging;

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};

use self::logging::Logging;
use crate::failure::Failure;
use crate::linux::CHROOT_NAME;
use crate::safe_load::{Options, Overlay};
use crate::settings::{Paths, Settings, Uncordon};
use crate::values::{duration, switch};
use crate::vfio::Which;

/// What was called.
#[derive(Debug)]
pub enum Called {
    /// One of the agents.
    Agent(Box<Agent>),
    /// This program's own second half: change the root directory and become another program.
    Chroot(PathBuf, Vec<OsString>),
}

/// Agents that work on a Kubernetes node beside the driver.
#[derive(Debug, Parser)]
#[command(name = "pitcrew-node", version, propagate_version = true, max_term_width = 100)]
pub struct Agent {
    /// Which one.
    #[command(subcommand)]
    pub which: AgentCommand,
}

/// The agents.
#[derive(Debug, Subcommand)]
pub enum AgentCommand {
    /// Make the node ready for another driver, or give it back afterwards
    DriverManager(DriverManager),
    /// Give NVIDIA's devices to virtual machines, or take them back
    VfioManage(VfioManage),
    /// Ask for a safe moment to load a driver, and wait for it
    SafeLoad(SafeLoad),
}

/// The default of times that have no limit.
const FOR_EVER: &str = "0s";
/// How long `finish` waits unless it is told otherwise.
const FINISH: &str = "30m";
/// How long MOFED may take unless somebody says otherwise.
const MOFED: &str = "10m";

/// A switch that may stand alone or have a value, as in Go.
macro_rules! switch_arg {
    () => {
        "true"
    };
}

/// The driver manager.
#[derive(Debug, Args)]
pub struct DriverManager {
    #[command(flatten)]
    flags: DriverManagerFlags,
    /// What to do
    #[command(subcommand)]
    pub command: Option<DriverManagerCommand>,
}

/// What the driver manager can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Subcommand)]
pub enum DriverManagerCommand {
    /// Unload the driver and clear its place, unless the one that is wanted is loaded
    #[command(name = "uninstall_driver")]
    UninstallDriver,
    /// Look at everything that `uninstall_driver` needs, and change nothing
    #[command(name = "preflight_check")]
    PreflightCheck,
    /// Look for a driver on the host and make the node's label say so, or no longer
    #[command(name = "detect_host_driver")]
    DetectHostDriver,
    /// Wait for the new driver, then lift the cordon if it is the driver manager's own
    #[command(name = "finish")]
    Finish {
        /// How long the driver may take (0: for ever)
        #[arg(long, env = "FINISH_TIMEOUT", default_value = FINISH, value_parser = duration_or(FINISH))]
        timeout: Duration,
        /// Go on running when it is done: for a container beside the driver's
        #[arg(long)]
        stay: bool,
    },
}

#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "the documented switches")]
struct DriverManagerFlags {
    /// The node
    #[arg(long, env = "NODE_NAME", global = true)]
    node_name: Option<String>,
    /// Kubeconfig file [default: the pod's service account]
    #[arg(long, env = "KUBECONFIG", global = true)]
    kubeconfig: Option<PathBuf>,
    /// Evict pods that use a GPU
    #[arg(long, env = "ENABLE_GPU_POD_EVICTION", global = true, default_value = "true", value_parser = switch_or_off,
          num_args = 0..=1, require_equals = true, default_missing_value = switch_arg!(), action = clap::ArgAction::Set)]
    enable_gpu_pod_eviction: bool,
    /// Drain the node if that is not enough
    #[arg(long, env = "ENABLE_AUTO_DRAIN", global = true, default_value = "true", value_parser = switch_or_off,
          num_args = 0..=1, require_equals = true, default_missing_value = switch_arg!(), action = clap::ArgAction::Set)]
    enable_auto_drain: bool,
    /// Also evict pods that no controller makes again
    #[arg(long, env = "DRAIN_USE_FORCE", global = true, default_value = "false", value_parser = switch_or_off,
          num_args = 0..=1, require_equals = true, default_missing_value = switch_arg!(), action = clap::ArgAction::Set)]
    drain_use_force: bool,
    /// Drain only pods that match
    #[arg(long, env = "DRAIN_POD_SELECTOR_LABEL", global = true, default_value = "")]
    drain_pod_selector_label: String,
    /// How long pods may take to leave: a duration, or seconds (0: for ever)
    #[arg(long, env = "DRAIN_TIMEOUT_SECONDS", global = true, default_value = FOR_EVER, value_parser = duration_or(FOR_EVER))]
    drain_timeout_seconds: Duration,
    /// Also evict pods with emptyDir volumes
    #[arg(long, env = "DRAIN_DELETE_EMPTYDIR_DATA", global = true, default_value = "false", value_parser = switch_or_off,
          num_args = 0..=1, require_equals = true, default_missing_value = switch_arg!(), action = clap::ArgAction::Set)]
    drain_delete_emptydir_data: bool,
    /// Where the operator's operands are
    #[arg(long, env = "OPERATOR_NAMESPACE", global = true, default_value = "gpu-operator")]
    operator_namespace: String,
    /// A node label that places GPU clients of other installations
    #[arg(long, env = "NODE_LABEL_FOR_GPU_POD_EVICTION", global = true, default_value = "")]
    node_label_for_gpu_pod_eviction: String,
    /// The driver uses GPUDirect RDMA and needs MOFED
    #[arg(long, env = "GPU_DIRECT_RDMA_ENABLED", global = true, default_value = "false", value_parser = switch_or_off,
          num_args = 0..=1, require_equals = true, default_missing_value = switch_arg!(), action = clap::ArgAction::Set)]
    gpu_direct_rdma_enabled: bool,
    /// … which is installed on the host
    #[arg(long, env = "USE_HOST_MOFED", global = true, default_value = "false", value_parser = switch_or_off,
          num_args = 0..=1, require_equals = true, default_missing_value = switch_arg!(), action = clap::ArgAction::Set)]
    use_host_mofed: bool,
    /// How long MOFED may take (0: for ever)
    #[arg(long, env = "MOFED_TIMEOUT", global = true, default_value = MOFED, value_parser = duration_or(MOFED))]
    mofed_timeout: Duration,
    /// Unload the driver even if the one that is wanted is loaded
    #[arg(long, env = "FORCE_REINSTALL", global = true, default_value = "false", value_parser = switch_or_off,
          num_args = 0..=1, require_equals = true, default_missing_value = switch_arg!(), action = clap::ArgAction::Set)]
    force_reinstall: bool,
    /// The digest of the configuration that is wanted
    #[arg(long, env = "DRIVER_CONFIG_DIGEST", global = true, default_value = "", hide = true)]
    driver_config_digest: String,
    /// When to lift the driver manager's own cordon: `finish`, when the new driver is up; `early`, before
    #[arg(long, env = "UNCORDON", global = true, default_value = "finish", value_parser = uncordon)]
    uncordon: Uncordon,
    /// Take NVSwitches back from virtual machines too
    #[arg(long, env = "BIND_NVSWITCHES", global = true, default_value = "false", value_parser = switch_or_off,
          num_args = 0..=1, require_equals = true, default_missing_value = switch_arg!(), action = clap::ArgAction::Set)]
    unbind_nvswitches: bool,
    /// Where the host's root directory is mounted
    #[arg(long, global = true, default_value = "/host")]
    host_root: String,
    /// Where the host's /run is mounted
    #[arg(long, global = true, default_value = "/run")]
    run_root: String,
    /// Below which directory the machine's files are; for tests
    #[arg(long, global = true, default_value = "/", hide = true)]
    machine_root: PathBuf,
}

/// A switch whose variable is set to nothing is off, whatever its default is: so it is in the documented programs.
fn switch_or_off(text: &str) -> Result<bool, String> {
    if text.is_empty() { Ok(false) } else { switch(text) }
}

/// A time whose variable is set to nothing is not set.
fn duration_or(default: &'static str) -> impl Fn(&str) -> Result<Duration, String> + Clone + Send + Sync {
    move |text| duration(if text.is_empty() { default } else { text })
}

/// The same for the moment of the uncordon.
fn uncordon(text: &str) -> Result<Uncordon, String> {
    match text {
        "" | "finish" => Ok(Uncordon::Finish),
        "early" => Ok(Uncordon::Early),
        other => Err(format!("\"{other}\" is neither finish nor early")),
    }
}

impl DriverManager {
    /// The node's name.
    pub fn node_name(&self) -> Result<&str, Failure> {
        required(self.flags.node_name.as_deref(), "NODE_NAME (or --node-name)")
    }

    /// The kubeconfig file.
    pub fn kubeconfig(&self) -> Option<&Path> {
        kubeconfig(self.flags.kubeconfig.as_deref())
    }

    /// Below which directory the machine's files are.
    pub fn machine_root(&self) -> &Path {
        &self.flags.machine_root
    }

    /// What it was told.
    pub fn settings(&self) -> Result<Settings, Failure> {
        let flags = &self.flags;
        let some = |text: &str| Some(text.trim().to_owned()).filter(|text| !text.is_empty());
        Ok(Settings {
            evict: flags.enable_gpu_pod_eviction,
            drain: flags.enable_auto_drain,
            force: flags.drain_use_force,
            selector: Settings::drain_selector(&flags.drain_pod_selector_label)?,
            leave_limit: limit(flags.drain_timeout_seconds),
            delete_empty_dir: flags.drain_delete_emptydir_data,
            namespace: required(Some(&flags.operator_namespace), "OPERATOR_NAMESPACE")?.to_owned(),
            custom_label: some(&flags.node_label_for_gpu_pod_eviction),
            rdma: flags.gpu_direct_rdma_enabled,
            host_mofed: flags.use_host_mofed,
            mofed_limit: limit(flags.mofed_timeout),
            force_reinstall: flags.force_reinstall,
            digest: flags.driver_config_digest.trim().to_owned(),
            uncordon: flags.uncordon,
            nvswitches: flags.unbind_nvswitches,
            paths: Paths::new(flags.run_root.trim_end_matches('/'), &flags.host_root),
        })
    }
}

/// What the driver manager is told by a container's environment, for a container that is no process of its own.
pub fn settings_in(environment: &[(String, String)]) -> Result<Settings, Failure> {
    match in_container("driver-manager", &[], environment)? {
        AgentCommand::DriverManager(manager) => manager.settings(),
        _ => Err(Failure::Usage("not a driver manager".to_owned())),
    }
}

/// What safe load is told by a container's arguments and environment, likewise.
pub fn safe_load_in(arguments: &[String], environment: &[(String, String)]) -> Result<Options, Failure> {
    match in_container("safe-load", arguments, environment)? {
        AgentCommand::SafeLoad(safe_load) => Ok(safe_load.options()),
        _ => Err(Failure::Usage("not safe load".to_owned())),
    }
}

fn in_container(
    agent: &str,
    arguments: &[String],
    environment: &[(String, String)],
) -> Result<AgentCommand, Failure> {
    let (command, mut given) = (Agent::command(), vec!["pitcrew-node".to_owned(), agent.to_owned()]);
    for flag in command.find_subcommand(agent).into_iter().flat_map(clap::Command::get_arguments) {
        let set = environment.iter().find(|(name, _)| flag.get_env() == Some(OsStr::new(name)));
        given.extend(set.zip(flag.get_long()).map(|((_, value), long)| format!("--{long}={value}")));
    }
    given.extend(arguments.iter().cloned());
    // Whatever the environment of this process says is not meant.
    let command = command
        .mut_subcommand(agent, |agent| agent.mut_args(|flag| flag.env(clap::builder::Resettable::Reset)));
    let matches = command.try_get_matches_from(given);
    let read = matches.and_then(|matches| Agent::from_arg_matches(&matches));
    read.map(|agent| agent.which).map_err(|error| Failure::Usage(error.to_string()))
}

/// Zero stands for "for ever".
pub fn limit(time: Duration) -> Option<Duration> {
    Some(time).filter(|time| !time.is_zero())
}

fn required<'a>(value: Option<&'a str>, name: &str) -> Result<&'a str, Failure> {
    value.filter(|text| !text.is_empty()).ok_or_else(|| Failure::Usage(format!("{name} is not set")))
}

/// A variable that is set to nothing is not set.
fn kubeconfig(path: Option<&Path>) -> Option<&Path> {
    path.filter(|path| !path.as_os_str().is_empty())
}

/// Devices for virtual machines.
#[derive(Debug, Args)]
pub struct VfioManage {
    /// What to do
    #[command(subcommand)]
    pub command: VfioCommand,
}

/// What can be done with devices.
#[derive(Debug, Subcommand)]
pub enum VfioCommand {
    /// Give devices to the vfio driver that fits each best
    Bind {
        /// Which devices
        #[command(flatten)]
        devices: VfioDevices,
        /// The host's root directory, in which modprobe is
        #[arg(long, env = "HOST_ROOT", default_value = "/")]
        host_root: String,
        /// NVSwitches too
        #[arg(long = "bind-nvswitches", env = "BIND_NVSWITCHES", default_value = "false", value_parser = switch_or_off,
              num_args = 0..=1, require_equals = true, default_missing_value = switch_arg!(), action = clap::ArgAction::Set)]
        nvswitches: bool,
    },
    /// Take devices back from vfio drivers
    Unbind {
        /// Which devices
        #[command(flatten)]
        devices: VfioDevices,
        /// NVSwitches too
        #[arg(long = "unbind-nvswitches", env = "BIND_NVSWITCHES", default_value = "false", value_parser = switch_or_off,
              num_args = 0..=1, require_equals = true, default_missing_value = switch_arg!(), action = clap::ArgAction::Set)]
        nvswitches: bool,
    },
}

/// Which devices.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub struct VfioDevices {
    /// All of NVIDIA's
    #[arg(short, long)]
    all: bool,
    /// The one with this address
    #[arg(short, long, value_name = "BDF")]
    device_id: Option<String>,
}

impl VfioDevices {
    /// Which are meant.
    pub fn which(&self) -> Which {
        self.device_id.clone().map_or(Which::All, Which::One)
    }
}

/// Safe load.
#[derive(Debug, Args)]
pub struct SafeLoad {
    /// The node
    #[arg(long, env = "NODE_NAME")]
    node_name: String,
    /// The ConfigMap with the configuration
    #[arg(long)]
    configmap_name: String,
    /// Its namespace
    #[arg(long)]
    configmap_namespace: String,
    /// The key of the configuration in it
    #[arg(long, default_value = "config.json")]
    configmap_key: String,
    /// Kubeconfig file [default: the pod's service account]
    #[arg(long, env = "KUBECONFIG")]
    kubeconfig: Option<PathBuf>,
    /// How long to wait for a safe moment (0: for ever)
    #[arg(long, env = "SAFE_LOAD_TIMEOUT", default_value = FOR_EVER, value_parser = duration_or(FOR_EVER))]
    timeout: Duration,
    /// The UID of the pod that asks
    #[arg(long, env = "POD_UID", default_value = "")]
    pod_uid: String,
    #[arg(long, env = "STORAGE_MODULES", default_value = "", hide = true)]
    storage_modules: String,
    #[arg(long, env = "THIRD_PARTY_RDMA_MODULES", default_value = "", hide = true)]
    third_party_rdma_modules: String,
    #[arg(long, env = "UNLOAD_STORAGE_MODULES", default_value = "", hide = true)]
    unload_storage_modules: String,
    #[arg(long, env = "UNLOAD_THIRD_PARTY_RDMA_MODULES", default_value = "", hide = true)]
    unload_third_party_rdma_modules: String,
    #[arg(long, env = "SKIP_PREFLIGHT_CHECKS", default_value = "", hide = true)]
    skip_preflight_checks: String,
    #[command(flatten)]
    logging: Logging,
}

impl SafeLoad {
    /// The node's name.
    pub fn node_name(&self) -> Result<&str, Failure> {
        required(Some(&self.node_name), "--node-name")
    }

    /// The kubeconfig file.
    pub fn kubeconfig(&self) -> Option<&Path> {
        kubeconfig(self.kubeconfig.as_deref())
    }

    /// What it was told.
    pub fn options(&self) -> Options {
        Options {
            namespace: self.configmap_namespace.clone(),
            name: self.configmap_name.clone(),
            key: self.configmap_key.clone(),
            overlay: Overlay {
                storage: self.storage_modules.clone(),
                third_party: self.third_party_rdma_modules.clone(),
                unload_storage: self.unload_storage_modules.clone(),
                unload_third_party: self.unload_third_party_rdma_modules.clone(),
                skip: self.skip_preflight_checks.clone(),
            },
            deadline: limit(self.timeout),
            pod: Some(self.pod_uid.clone()).filter(|uid| !uid.is_empty()),
        }
    }
}

/// The agents that are called by a name of their own.
const OWN_NAMES: [(&str, &str); 3] = [
    ("driver-manager", "driver-manager"),
    ("vfio-manage", "vfio-manage"),
    ("network-operator-init-container", "safe-load"),
];

/// Whether a program that is called by this name is one of the agents, whatever its arguments are.
pub fn is_own_name(called: &OsStr) -> bool {
    let name = Path::new(called).file_name();
    let own = OWN_NAMES.iter().map(|(own, _)| *own).chain([CHROOT_NAME]);
    own.into_iter().any(|own| name == Some(OsStr::new(own)))
}

/// Reads a whole command line, the program's name included.
pub fn read(arguments: impl IntoIterator<Item = OsString>) -> Result<Called, clap::Error> {
    let mut arguments = arguments.into_iter();
    let called = arguments.next().unwrap_or_default();
    let name = Path::new(&called).file_name().unwrap_or_default().to_string_lossy().into_owned();
    if name == CHROOT_NAME {
        let root = arguments.next().unwrap_or_default();
        return Ok(Called::Chroot(root.into(), arguments.collect()));
    }
    let agent = OWN_NAMES.iter().find(|(own, _)| *own == name).map(|(_, agent)| OsString::from(agent));
    let whole = std::iter::once(called).chain(agent).chain(arguments);
    Agent::try_parse_from(whole).map(|agent| Called::Agent(Box::new(agent)))
}

#[cfg(test)]
mod tests;
