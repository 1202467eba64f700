//! `safe-load`: the driver pod asks for a moment in which its driver can be loaded, and waits for it.
//!
//! ```text
//!  modules that nobody drains away? ── ask on the node ── wait until somebody releases ── programs that hold modules?
//! ```
//!
//! The request is an annotation on the node; whoever empties the node removes it (any non-empty value is a request). It is
//! taken back on SIGTERM and at the deadline, so nobody empties a node for a pod that is gone.

mod config;
mod graph;
mod request;

use std::time::Duration;

pub use config::{Config, ModuleCheck, Overlay};
pub use graph::{Findings, findings};
pub use request::Request;

use crate::cluster::Cluster;
use crate::failure::Failure;
use crate::host::Host;
use crate::journal;
use crate::node::{Change, Node};
use crate::stop::Stop;
use crate::values::in_words;

/// What the agent was told.
#[derive(Clone, Debug)]
pub struct Options {
    /// The ConfigMap's namespace, …
    pub namespace: String,
    /// … its name …
    pub name: String,
    /// … and the key of the configuration in it.
    pub key: String,
    /// What the environment says.
    pub overlay: Overlay,
    /// How long to wait; `None`: for ever.
    pub deadline: Option<Duration>,
    /// The UID of the pod that asks; if nobody says it, it is looked for on the machine.
    pub pod: Option<String>,
}

/// After SIGTERM the request has to be gone before SIGKILL comes.
const TAKE_BACK_WITHIN: Duration = Duration::from_secs(20);

/// Asks and waits.
pub async fn safe_load<H: Host>(
    host: &H,
    cluster: &Cluster,
    stop: &Stop,
    options: &Options,
) -> Result<(), Failure> {
    // A request of an earlier start has to be found again, even by one that is told to end at once.
    let config = read_config(&cluster.undisturbed(), options).await?;
    let pod = match &options.pod {
        Some(uid) => Some(uid.clone()),
        None => request::own_pod(host).await?,
    };
    let request = Request { pod, boot: journal::boot_id(host).await?, since: cluster.now() };
    let result = ask(host, cluster, stop, options, &config, &request).await;
    if let Some(annotation) = config.annotation.as_deref().filter(|_| result.is_err() || !config.enabled) {
        clean_up(&cluster.undisturbed(), annotation, &request, result.as_ref().err()).await;
    }
    result
}

/// Asks and waits, if that is switched on; else only looks whether the driver could be loaded.
async fn ask<H: Host>(
    host: &H,
    cluster: &Cluster,
    stop: &Stop,
    options: &Options,
    config: &Config,
    request: &Request,
) -> Result<(), Failure> {
    check(host, &config.modules, false).await?;
    if let Some(annotation) = config.annotation.as_deref().filter(|_| config.enabled) {
        let mut node = cluster.node().await?;
        let ask = |node: &Node| {
            let ours = Request::found(node, annotation).is_some_and(|found| found.is_same(request));
            let change = Change::default();
            if ours { change } else { change.with_annotation(annotation, Some(request.text())) }
        };
        cluster.change(&mut node, "ask for a safe moment to load the driver", ask).await?;
        let message = "The driver waits until it can be loaded safely";
        cluster.say(&node, &event_reason(annotation), false, message).await;
        released(cluster, stop, &mut node, annotation, options.deadline).await?;
    }
    check(host, &config.modules, true).await?;
    tracing::info!("the driver can be loaded");
    Ok(())
}

/// Takes the request back if it is this pod's, whichever start of it asked, and says why the driver was not loaded.
async fn clean_up(cluster: &Cluster, annotation: &str, request: &Request, failure: Option<&Failure>) {
    let taking_back = async {
        let mut node = cluster.node().await?;
        take_back(cluster, &mut node, annotation, request).await?;
        Ok::<Node, Failure>(node)
    };
    let node = match tokio::time::timeout(TAKE_BACK_WITHIN, taking_back).await {
        Ok(Ok(node)) => node,
        Ok(Err(error)) => {
            return tracing::error!("could not take the request back: {}", error.sentence());
        }
        Err(_) => {
            return tracing::error!("could not take the request back in time; the next driver pod does");
        }
    };
    if let Some(failure) = failure.filter(|failure| !matches!(failure, Failure::Stopped(_))) {
        let message = format!("The driver was not loaded: {}", failure.sentence());
        cluster.say(&node, &event_reason(annotation), true, &message).await;
    }
}

async fn read_config(cluster: &Cluster, options: &Options) -> Result<Config, Failure> {
    let Options { namespace, name, key, overlay, .. } = options;
    let found = cluster.config_map(namespace, name).await?;
    let found =
        found.ok_or_else(|| Failure::Usage(format!("configmap {namespace}/{name} does not exist")))?;
    let text = found.data.unwrap_or_default().remove(key);
    let text =
        text.ok_or_else(|| Failure::Usage(format!("configmap {namespace}/{name} has no key {key}")))?;
    Config::read(&text, overlay).map_err(|why| Failure::Usage(format!("configmap {namespace}/{name}: {why}")))
}

/// What keeps the driver's modules loaded: other modules, which nobody drains away, or programs, which somebody may have.
async fn check<H: Host>(host: &H, modules: &ModuleCheck, userspace: bool) -> Result<(), Failure> {
    if modules.skip || modules.names.is_empty() {
        return Ok(());
    }
    let Findings { kernel, references } = findings(&host.modules(&modules.paths).await?, modules);
    let found = if userspace { references } else { kernel };
    if found.is_empty() { Ok(()) } else { Err(Failure::Findings(found)) }
}

/// Waits until the request is gone, whoever removed it.
async fn released(
    cluster: &Cluster,
    stop: &Stop,
    node: &mut Node,
    annotation: &str,
    deadline: Option<Duration>,
) -> Result<(), Failure> {
    let wait = async {
        while node.annotations.get(annotation).is_some_and(|value| !value.is_empty()) {
            stop.check()?;
            *node = cluster.next(node).await?;
        }
        Ok(())
    };
    let Some(limit) = deadline else { return wait.await };
    tokio::time::timeout(limit, wait).await.unwrap_or_else(|_| {
        let what = "the driver's load to be released".to_owned();
        let missing = format!(
            "no upgrade controller removed annotation {annotation} within {}; is one running?",
            in_words(limit)
        );
        Err(Failure::TimedOut { what, missing, limit })
    })
}

/// Removes the request if it is this pod's.
async fn take_back(
    cluster: &Cluster,
    node: &mut Node,
    annotation: &str,
    request: &Request,
) -> Result<(), Failure> {
    let decide = |node: &Node| match Request::found(node, annotation) {
        Some(found) if found.is_same(request) => Change::default().with_annotation(annotation, None),
        _ => Change::default(),
    };
    Ok(cluster.change(node, "take the request for a safe load back", decide).await?)
}

/// `nvidia.com/ofed-driver-upgrade.driver-wait-for-safe-load` is about `ofed`.
fn event_reason(annotation: &str) -> String {
    let name = annotation.rsplit('/').next().unwrap_or_default();
    let driver = name.split_once("-driver-upgrade").map_or("", |(driver, _)| driver);
    format!("{}DriverUpgrade", driver.to_uppercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_carry_the_drivers_name() {
        assert_eq!(
            event_reason("nvidia.com/ofed-driver-upgrade.driver-wait-for-safe-load"),
            "OFEDDriverUpgrade"
        );
        assert_eq!(event_reason("example.com/other"), "DriverUpgrade");
    }
}
