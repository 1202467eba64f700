//! From a command line to an exit code: the runtime, the signals, the client.

use std::ffi::OsString;
use std::io::Write as _;
use std::path::Path;

use clap::CommandFactory as _;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::arguments::{
    self, Agent as Arguments, AgentCommand, Called, DriverManager, DriverManagerCommand, SafeLoad,
    VfioCommand, VfioManage, limit,
};
use crate::clock::Clock;
use crate::cluster::Cluster;
use crate::failure::{FAILED, Failure, USAGE};
use crate::finish::finish;
use crate::linux::{Linux, become_another};
use crate::node::Node;
use crate::stop::{Stop, Stopper};
use crate::uninstall::{Agent, uninstall};
use crate::{host_driver, preflight, safe_load, vfio};

/// Runs the agent that a command line names, on this machine. Returns the exit code.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    match arguments::read(arguments) {
        Ok(Called::Chroot(root, command)) => u8::try_from(become_another(&root, &command)).unwrap_or(FAILED),
        Ok(Called::Agent(agent)) => run_agent(&agent),
        Err(error) => {
            // Help and version are what was asked for.
            let _ = error.print();
            if !error.use_stderr() {
                return 0;
            }
            leave_last_words(error.to_string().lines().next().unwrap_or_default());
            USAGE
        }
    }
}

/// Runs an agent on this machine. Returns the exit code.
pub fn run_agent(agent: &Arguments) -> u8 {
    // Containers' logs have a time already. If somebody else writes the log already, they go on doing so.
    // A container's log is no terminal, and colours would be noise in it.
    let log = tracing_subscriber::fmt().without_time().with_target(false).with_ansi(false);
    let _ = log.with_writer(std::io::stderr).try_init();
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            tracing::error!("cannot start: {error}");
            return FAILED;
        }
    };
    let result = runtime.block_on(work(agent));
    // A program in the host's root directory that hangs must not keep the agent.
    runtime.shutdown_background();
    match result {
        Ok(()) => 0,
        Err(failure) => {
            tracing::error!("{}", failure.sentence());
            leave_last_words(&failure.sentence());
            failure.exit_code()
        }
    }
}

/// Kubernetes shows what a container leaves here beside its exit code, and pitcrew's controller on the node. Outside of a
/// container there is no such file.
fn leave_last_words(sentence: &str) {
    let file = std::fs::OpenOptions::new().write(true).truncate(true).open("/dev/termination-log");
    if let Ok(mut file) = file {
        let _ = file.write_all(sentence.as_bytes());
    }
}

async fn work(agent: &Arguments) -> Result<(), Failure> {
    let (stopper, stop) = Stopper::new();
    // Before there is any work: as the first process of a container an agent that does not listen yet is never told.
    let signals = Signals::listen();
    let work = async {
        match &agent.which {
            AgentCommand::DriverManager(arguments) => {
                let host = Linux::below(arguments.machine_root());
                driver_manager(&host, &stop, arguments).await
            }
            AgentCommand::VfioManage(arguments) => vfio_manage(&Linux::default(), &stop, arguments).await,
            AgentCommand::SafeLoad(arguments) => safe_load_on(&Linux::default(), &stop, arguments).await,
        }
    };
    let telling = async {
        if let Some(signals) = signals {
            signals.told().await;
            tracing::info!("told to end");
            stopper.stop();
        }
        std::future::pending::<()>().await;
    };
    tokio::pin!(work, telling);
    loop {
        tokio::select! {
            biased;
            result = &mut work => return result,
            () = &mut telling => {}
        }
    }
}

/// SIGTERM and SIGINT, from the moment on at which this is made.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Listens; `None` if the system does not allow that.
    fn listen() -> Option<Self> {
        let terminate = signal(SignalKind::terminate()).ok()?;
        Some(Self { terminate, interrupt: signal(SignalKind::interrupt()).ok()? })
    }

    /// Returns when one of them has come.
    async fn told(mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

async fn driver_manager(host: &Linux, stop: &Stop, arguments: &DriverManager) -> Result<(), Failure> {
    let Some(command) = arguments.command else {
        let mut help = Arguments::command();
        let help = help.find_subcommand_mut("driver-manager").map(clap::Command::render_help);
        return Err(Failure::Usage(help.map(|help| help.to_string()).unwrap_or_default()));
    };
    let (node, settings) = (arguments.node_name()?, arguments.settings()?);
    let client = client(arguments.kubeconfig()).await?;
    let cluster = Cluster::new(client, node, Clock::System, stop.clone());
    let agent = Agent { host, cluster, stop: stop.clone(), settings };
    match command {
        DriverManagerCommand::UninstallDriver => uninstall(&agent).await,
        DriverManagerCommand::PreflightCheck => preflight::check(&agent).await,
        DriverManagerCommand::DetectHostDriver => {
            let mut node: Node = agent.cluster.node().await?;
            let paths = &agent.settings.paths;
            let found = host_driver::settle(host, &agent.cluster, stop, &mut node, paths).await?;
            tracing::info!("host driver: {}", found.as_deref().unwrap_or("none"));
            Ok(())
        }
        DriverManagerCommand::Finish { timeout, stay } => {
            finish(&agent, limit(timeout)).await?;
            if stay {
                stop.told().await;
            }
            Ok(())
        }
    }
}

async fn vfio_manage(host: &Linux, stop: &Stop, arguments: &VfioManage) -> Result<(), Failure> {
    match &arguments.command {
        VfioCommand::Bind { devices, host_root, nvswitches } => {
            vfio::bind(host, stop, &devices.which(), *nvswitches, host_root).await
        }
        VfioCommand::Unbind { devices, nvswitches } => {
            vfio::unbind(host, stop, &devices.which(), *nvswitches).await
        }
    }
}

async fn safe_load_on(host: &Linux, stop: &Stop, arguments: &SafeLoad) -> Result<(), Failure> {
    let node = arguments.node_name()?;
    let client = client(arguments.kubeconfig()).await?;
    let cluster = Cluster::new(client, node, Clock::System, stop.clone());
    safe_load::safe_load(host, &cluster, stop, &arguments.options()).await
}

async fn client(kubeconfig: Option<&Path>) -> Result<Client, Failure> {
    // Whoever speaks TLS first would have to choose otherwise. It fails only if somebody has chosen already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let unusable =
        |what: String| move |error: &dyn std::fmt::Display| Failure::Usage(format!("{what}: {error}"));
    let mut config = if let Some(file) = kubeconfig {
        let unusable = unusable(format!("cannot use kubeconfig {}", file.display()));
        let read = Kubeconfig::read_from(file).map_err(|error| unusable(&error))?;
        let options = KubeConfigOptions::default();
        Config::from_custom_kubeconfig(read, &options).await.map_err(|error| unusable(&error))?
    } else {
        let unusable = unusable("cannot use the pod's service account".to_owned());
        Config::incluster().map_err(|error| unusable(&error))?
    };
    config.default_retry = false; // a budget's refusal must be seen at once
    let unusable = unusable("cannot speak to the API server".to_owned());
    Client::try_from(config).map_err(|error| unusable(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_word_that_comes_before_anybody_waits_for_it_is_heard() {
        let signals = Signals::listen().unwrap();
        // Nothing has been polled. Without a listener this would be the end of all tests.
        let own = rustix::process::getpid();
        rustix::process::kill_process(own, rustix::process::Signal::TERM).unwrap();
        let told = tokio::time::timeout(std::time::Duration::from_secs(10), signals.told()).await;
        assert!(told.is_ok());
    }
}
