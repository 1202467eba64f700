//! A driver that is installed on the host: found by asking it, told by a label, and taken back when it is gone.

use std::time::Duration;

use crate::cluster::Cluster;
use crate::failure::Failure;
use crate::host::{Host, Ran};
use crate::labels;
use crate::node::{self, Node};
use crate::settings::Paths;
use crate::stop::Stop;

/// Asks a driver for its version.
const QUESTION: [&str; 3] = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"];
/// Slow machines with eight GPUs take ten seconds; a driver that hangs takes for ever.
const ANSWERS_WITHIN: Duration = Duration::from_mins(1);

/// Exit codes of `nvidia-smi`, as its manual has them: no driver is loaded, …
const NOT_LOADED: i32 = 9;
/// … there is no library to ask one with, …
const NO_LIBRARY: i32 = 12;
/// … and a GPU complains, but the driver has answered.
const INFO_ROM_CORRUPT: i32 = 14;

/// Asks whether the host has a driver; its version. An answer that says neither is a failure: whoever took it for "none" would
/// unload the host's own driver. Whoever is told to end does not wait for a driver that hangs: what an
/// earlier start paused has to be put back before SIGKILL comes.
pub async fn ask(host: &impl Host, stop: &Stop, paths: &Paths) -> Result<Option<String>, Failure> {
    let ran = tokio::select! {
        biased;
        stopped = stop.told() => return Err(stopped.into()),
        ran = host.run(&paths.host_root, &QUESTION, ANSWERS_WITHIN) => ran?,
    };
    match ran {
        Ran::Ended { code: Some(0), output } => {
            Ok(output.lines().map(str::trim).find(|line| !line.is_empty()).map(str::to_owned))
        }
        Ran::Ended { code: Some(NOT_LOADED | NO_LIBRARY), .. } | Ran::NotStarted => Ok(None),
        Ran::Ended { code, output } => {
            // Beside its complaint.
            let numbers = |line: &String| line.starts_with(|first: char| first.is_ascii_digit());
            let found = output.lines().map(|line| line.trim().to_owned()).find(numbers);
            let found = found.filter(|_| code == Some(INFO_ROM_CORRUPT));
            // What is loaded is a container's: tools that somebody left on the host are not made for it.
            if found.is_some() || host.exists(&paths.state_file).await? {
                return Ok(found);
            }
            Err(Failure::HostDriverUnclear { ended: how_it_ended(code) })
        }
        Ran::TimedOut => Err(Failure::HostDriverHangs { limit: ANSWERS_WITHIN }),
    }
}

fn how_it_ended(code: Option<i32>) -> String {
    let Some(code) = code else { return "was ended by a signal".to_owned() };
    let meaning = match code {
        4 => " (it lacks a permission)",
        6 => " (it finds no GPU)",
        INFO_ROM_CORRUPT => " (a GPU's infoROM is corrupt) without a version",
        15 => " (a GPU has fallen off the bus)",
        18 => " (its library is of another version than the driver that is loaded)",
        _ => "",
    };
    format!("ended with exit code {code}{meaning}")
}

/// Asks, and makes the node's label say what is so.
pub async fn settle(
    host: &impl Host,
    cluster: &Cluster,
    stop: &Stop,
    node: &mut Node,
    paths: &Paths,
) -> Result<Option<String>, Failure> {
    if let Some(version) = ask(host, stop, paths).await? {
        tracing::info!("the host has driver {version} installed");
        cluster.change(node, "label the node as one with a host driver", node::has_host_driver).await?;
        return Ok(Some(version));
    }
    let operation = "take back that the node has a host driver";
    cluster.change(node, operation, node::has_no_host_driver).await?;
    if node.says_pre_installed() {
        let label = labels::DRIVER;
        tracing::info!("no driver was found on the host; {label}=pre-installed is somebody else's and stays");
    }
    Ok(None)
}
