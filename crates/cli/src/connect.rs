//! The way to the cluster, the same for every command that has one.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use jiff::tz::TimeZone;
use kube::Client;
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use pitcrew_controller::{Clock, Look, Watch, look};
use pitcrew_core::contract::DEFAULT_NAMESPACE;

/// Longer than any handshake on a working network, short enough for somebody who mistyped an address.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Which cluster, and where in it.
#[derive(clap::Args)]
pub(crate) struct Connection {
    /// Kubeconfig file [default: $KUBECONFIG, then the pod's service account, then ~/.kube/config]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig [default: its current one]
    #[arg(long, value_name = "NAME")]
    context: Option<String>,
    /// Where the driver DaemonSets and pitcrew's Lease are
    #[arg(short, long, value_name = "NS", env = "OPERATOR_NAMESPACE", default_value = DEFAULT_NAMESPACE)]
    pub(crate) namespace: String,
}

impl Connection {
    /// How to reach the cluster. A file or context that is named is used or complained about; there is no silent
    /// second choice.
    pub(crate) async fn config(&self) -> anyhow::Result<kube::Config> {
        let mut config = self.find().await?;
        config.default_retry = false; // a PDB's 429 must reach the planner at once
        config.connect_timeout = Some(CONNECT_TIMEOUT);
        Ok(config)
    }

    async fn find(&self) -> anyhow::Result<kube::Config> {
        let options = KubeConfigOptions { context: self.context.clone(), ..KubeConfigOptions::default() };
        if let Some(file) = &self.kubeconfig {
            let unusable = || format!("cannot use kubeconfig {}", file.display());
            let kubeconfig = Kubeconfig::read_from(file).map_err(plainly).with_context(unusable)?;
            return kube::Config::from_custom_kubeconfig(kubeconfig, &options).await.with_context(unusable);
        }
        let in_pod = std::env::var_os("KUBERNETES_SERVICE_HOST").is_some();
        if in_pod && self.context.is_none() && std::env::var_os("KUBECONFIG").is_none() {
            return kube::Config::incluster().context("cannot use the pod's service account");
        }
        let advice = "cannot find a usable kubeconfig (name one with --kubeconfig FILE, or set KUBECONFIG)";
        kube::Config::from_kubeconfig(&options).await.context(advice)
    }
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

/// A client of a cluster.
pub(crate) fn client(config: kube::Config) -> anyhow::Result<Client> {
    Client::try_from(config).context("cannot use this kubeconfig")
}

/// A cluster that is reached, for a command that ends: whom to ask, where to look, what time it is.
pub(crate) struct Session {
    pub(crate) client: Client,
    pub(crate) namespace: String,
    pub(crate) clock: Clock,
    /// Times are shown in it.
    pub(crate) zone: TimeZone,
}

impl Session {
    /// Opens one and does `work` in it.
    pub(crate) fn run<T>(
        connection: &Connection,
        work: impl AsyncFnOnce(Session) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.context("cannot start")?.block_on(async {
            let client = client(connection.config().await?)?;
            let (namespace, zone) = (connection.namespace.clone(), TimeZone::system());
            work(Session { client, namespace, clock: Clock::System, zone }).await
        })
    }

    /// What is in the cluster now.
    pub(crate) async fn look(&self) -> anyhow::Result<Look> {
        Ok(look(&self.client, &self.namespace, self.clock.clone()).await?)
    }

    /// The same, kept current.
    pub(crate) async fn watch(&self) -> anyhow::Result<Watch> {
        Ok(Watch::start(&self.client, &self.namespace, self.clock.clone()).await?)
    }
}
