//! `pitcrew controller`: the upgrade controller against a real cluster.
//!
//! In come flags and environment, out goes a running [`Controller`] and its HTTP port. What is missing is said in one
//! sentence before anything is written to the cluster.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use kube::Client;
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use pitcrew_controller::{Clock, Config, Controller, preflight, serve};
use pitcrew_core::contract::DEFAULT_NAMESPACE;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tracing::info;
use tracing_subscriber::EnvFilter;

use crate::terminal;

/// The client logs a failed connection on top of returning it; whoever gets it says it in a better sentence.
const LOG_FILTER: &str = "info,kube_client::client::builder=off";
/// Longer than any handshake on a working network, short enough for somebody who mistyped an address.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// What `pitcrew controller` takes.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Kubeconfig file [default: $KUBECONFIG, then the pod's service account, then ~/.kube/config]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig [default: its current one]
    #[arg(long, value_name = "NAME")]
    context: Option<String>,
    /// Where /metrics, /healthz and /readyz are served
    #[arg(long, value_name = "ADDR", default_value = "0.0.0.0:8080")]
    listen: SocketAddr,
    /// Where the driver DaemonSets and pitcrew's Lease are
    #[arg(long, value_name = "NS", env = "OPERATOR_NAMESPACE", default_value = DEFAULT_NAMESPACE)]
    namespace: String,
    /// The node on which this process runs: it is upgraded last
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    node_name: Option<String>,
}

/// Runs the controller until SIGTERM or ctrl-c.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let filter = std::env::var(EnvFilter::DEFAULT_ENV).ok().filter(|filter| !filter.is_empty());
    let filter = EnvFilter::builder().parse_lossy(filter.as_deref().unwrap_or(LOG_FILTER));
    let ansi = terminal::colours(&std::io::stderr());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(ansi).init();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().context("cannot start threads")?;
    runtime.block_on(control(args))?;
    Ok(ExitCode::SUCCESS)
}

async fn control(args: &Args) -> anyhow::Result<()> {
    let mut config = cluster_config(args).await?;
    config.default_retry = false; // a PDB's 429 must reach the planner at once
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    let server = config.cluster_url.to_string();
    let client = Client::try_from(config).context("cannot use this kubeconfig")?;
    preflight::check(&client).await?;
    let cannot_listen = || format!("cannot listen on {}, choose another address with --listen", args.listen);
    let listener = TcpListener::bind(args.listen).await.with_context(cannot_listen)?;
    let stop = stop_signal().context("cannot wait for signals")?;

    let identity = identity();
    info!(%server, namespace = args.namespace, identity, listen = %args.listen, "pitcrew {} starts", env!("CARGO_PKG_VERSION"));
    let own_node = args.node_name.as_deref().filter(|name| !name.is_empty()).map(Into::into);
    let config = Config { namespace: args.namespace.clone(), identity, own_node, clock: Clock::System };
    let controller = Controller::new(client, config);
    let http = tokio::spawn(serve::serve(listener, controller.metrics(), controller.ready()));
    controller.run(stop).await?;
    http.abort();
    info!("stopped");
    Ok(())
}

/// A file or context that is named is used or complained about; there is no silent second choice.
async fn cluster_config(args: &Args) -> anyhow::Result<kube::Config> {
    let options = KubeConfigOptions { context: args.context.clone(), ..KubeConfigOptions::default() };
    if let Some(file) = &args.kubeconfig {
        let unusable = || format!("cannot use kubeconfig {}", file.display());
        let kubeconfig = Kubeconfig::read_from(file).map_err(plainly).with_context(unusable)?;
        return kube::Config::from_custom_kubeconfig(kubeconfig, &options).await.with_context(unusable);
    }
    let in_pod = std::env::var_os("KUBERNETES_SERVICE_HOST").is_some();
    if in_pod && args.context.is_none() && std::env::var_os("KUBECONFIG").is_none() {
        return kube::Config::incluster().context("cannot use the pod's service account");
    }
    let advice = "cannot find a usable kubeconfig (name one with --kubeconfig FILE, or set KUBECONFIG)";
    kube::Config::from_kubeconfig(&options).await.context(advice)
}

/// Without the path, which the client quotes once more, and without the excerpt of the file, which may hold secrets.
fn plainly(error: KubeconfigError) -> anyhow::Error {
    match error {
        KubeconfigError::ReadConfig(source, _) => source.into(),
        KubeconfigError::Parse(error) => {
            let text = error.to_string();
            anyhow!(
                "it is not valid YAML: {}",
                text.lines().next().unwrap_or_default().trim_start_matches("error: ")
            )
        }
        other => other.into(),
    }
}

/// Resolves at SIGTERM or ctrl-c.
fn stop_signal() -> std::io::Result<impl Future<Output = ()>> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => info!("SIGTERM"),
            _ = interrupt.recv() => info!("ctrl-c"),
        }
    })
}

/// The name of this candidate for leadership: the pod's, or one that no other process has.
fn identity() -> String {
    if let Some(pod) = std::env::var("POD_NAME").ok().filter(|name| !name.is_empty()) {
        return pod;
    }
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = if host.trim().is_empty() { "pitcrew" } else { host.trim() };
    format!("{host}-{}", std::process::id())
}
