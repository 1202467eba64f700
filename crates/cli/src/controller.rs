//! `pitcrew controller`: the upgrade controller against a real cluster.
//!
//! In come flags and environment, out goes a running [`Controller`] and its HTTP port. What is missing is said in one
//! sentence before anything is written to the cluster.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use pitcrew_controller::{Clock, Config, Controller, Feature, preflight, prometheus, serve};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tracing::info;
use tracing_subscriber::EnvFilter;

use crate::connect::{self, Connection};
use crate::terminal;

/// The client logs a failed connection on top of returning it; whoever gets it says it in a better sentence.
const LOG_FILTER: &str = "info,kube_client::client::builder=off";

/// What `pitcrew controller` takes.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    connection: Connection,
    /// Where /metrics, /healthz and /readyz are served
    #[arg(long, value_name = "ADDR", default_value = "0.0.0.0:8080")]
    listen: SocketAddr,
    /// The node on which this process runs: it is upgraded last
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    node_name: Option<String>,
    /// Switch a feature off: nvsentinel, clients or network-operator. What only it needs is not asked for
    #[arg(long, value_name = "FEATURE")]
    disable: Vec<Feature>,
    /// A directory with credentials for the Prometheus that policies name: `token`, sent over HTTPS only, and `ca.crt`;
    /// either may be missing
    #[arg(long, value_name = "DIR")]
    prometheus_credentials: Option<PathBuf>,
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
    let config = args.connection.config().await?;
    let server = config.cluster_url.to_string();
    let client = connect::client(config)?;
    let disabled = args.disable.iter().copied().collect();
    preflight::check(&client, &args.connection.namespace, &disabled).await?;
    let cannot_listen = || format!("cannot listen on {}, choose another address with --listen", args.listen);
    let listener = TcpListener::bind(args.listen).await.with_context(cannot_listen)?;
    let stop = stop_signal().context("cannot wait for signals")?;

    let (identity, namespace) = (identity(), args.connection.namespace.clone());
    info!(%server, namespace, identity, listen = %args.listen, "pitcrew {} starts", env!("CARGO_PKG_VERSION"));
    let own_node = args.node_name.as_deref().filter(|name| !name.is_empty()).map(Into::into);
    let config = Config { namespace, identity, own_node, clock: Clock::System, disabled };
    let asks = prometheus::over_http(args.prometheus_credentials.clone());
    let controller = Controller::new(client, config).asks(asks);
    let http = tokio::spawn(serve::serve(listener, controller.metrics(), controller.ready()));
    controller.run(stop).await?;
    http.abort();
    info!("stopped");
    Ok(())
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
