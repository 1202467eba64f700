//! Taking the driver off the machine: modules, mounts, files. What may go is decided in [`crate::modules`].

use std::time::Duration;

use crate::failure::Failure;
use crate::host::{Host, KernelPaths, Modules};
use crate::journal::{self, Stage};
use crate::modules::{self, unload_order};
use crate::node::Node;
use crate::settings::Paths;

/// A module that somebody took hold of after it was looked at is tried so often, …
const TRIES_MAX: u32 = 10;
/// … with such pauses: short-lived programs come and go.
const TRY_AGAIN: Duration = Duration::from_secs(1);
/// A directory has been mounted over so often at most.
const LAYERS_MAX: usize = 256;
/// The driver that Linux brings along for the same devices.
const NOUVEAU: &str = "nouveau";

/// What an unload did, whether it failed or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// The driver is as it was.
    Whole,
    /// Nothing of the driver is loaded.
    Nothing,
    /// Some of it.
    Half,
}

/// What there is of a driver as far as the machine tells, and how far the last unload was.
pub async fn found(host: &impl Host, paths: &Paths, boot: &str) -> Result<(Left, Option<Stage>), Failure> {
    let loaded = host.modules(&KernelPaths::default()).await?;
    let stage = journal::read(host, &paths.journal, boot).await?;
    let left = match &stage {
        _ if !loaded.contains_key(modules::DRIVER) => Left::Nothing,
        Some(stage) if stage.is_half(&loaded) => Left::Half,
        _ => Left::Whole,
    };
    Ok((left, stage))
}

/// The note is gone or cannot be read, but the node says that this boot has half a driver left: somebody has cleared `/run`.
/// Only a reboot, or an unload to the end, takes that back.
pub fn is_half_by_the_node(found: &(Left, Option<Stage>), node: &Node, boot: &str) -> bool {
    matches!(found, (Left::Whole, None)) && node.needs_reboot(boot).is_some()
}

/// Removes the driver's modules, all of them or, if one is busy, none. If that goes wrong half-way `left` says so.
/// `left` is `Half` already if an earlier unload went wrong.
pub async fn unload(host: &impl Host, paths: &Paths, boot: &str, left: &mut Left) -> Result<(), Failure> {
    let order = match look(host).await {
        Ok(order) => order,
        Err(Failure::Busy(busy)) if *left == Left::Half => {
            return Err(half_unloaded(&host.modules(&KernelPaths::default()).await?, &[], &busy.to_string()));
        }
        Err(failure) => return Err(failure),
    };
    // Of half a driver the note from before says more than what is left now.
    if *left != Left::Half {
        journal::write(host, &paths.journal, boot, Stage::Unloading(order.clone())).await?;
    }
    let mut removed: Vec<&str> = Vec::new();
    for name in &order {
        if let Err(error) = remove(host, name, *left).await {
            if *left != Left::Half {
                // Nothing is gone yet: it came too late for the look, but not too late for the driver.
                host.remove(&paths.journal).await?;
                look(host).await?;
                return Err(error.into());
            }
            let why = format!("{}: {}", error, error.source);
            return Err(half_unloaded(&host.modules(&KernelPaths::default()).await?, &removed, &why));
        }
        tracing::info!("removed kernel module {name}");
        removed.push(name);
        *left = if removed.len() == order.len() { Left::Nothing } else { Left::Half };
    }
    *left = Left::Nothing;
    forget_digest(host, paths).await?;
    // Whatever fails from here on: what is loaded from now on is another driver, and not the rest of this one.
    journal::write(host, &paths.journal, boot, Stage::Unloaded).await?;
    Ok(())
}

/// The digest is of a driver that is gone. The next one's container writes its own when it is done; one that dies before that
/// would leave a driver that passes for this one.
pub async fn forget_digest(host: &impl Host, paths: &Paths) -> Result<(), Failure> {
    Ok(host.remove(&paths.state_file).await?)
}

/// The order of removal; if it is none, who is in the way.
pub async fn look(host: &impl Host) -> Result<Vec<String>, Failure> {
    let loaded = host.modules(&KernelPaths::default()).await?;
    match unload_order(&loaded) {
        Ok(order) => Ok(order),
        Err(mut busy) => {
            for files in busy.device_files() {
                let holders = host.holders(files).await.unwrap_or_default();
                busy.processes.extend(holders.seen);
                // They are the same ones for all files.
                busy.hidden = busy.hidden.max(holders.hidden);
            }
            Err(busy.into())
        }
    }
}

/// Removes one module. Once others are gone there is no way back, so it is tried for a while. One that somebody else removes
/// in the same moment is removed.
async fn remove(host: &impl Host, name: &str, left: Left) -> Result<(), crate::host::HostError> {
    let tries = if left == Left::Half { TRIES_MAX } else { 1 };
    for _ in 1..tries {
        match remove_once(host, name).await {
            Ok(()) => return Ok(()),
            Err(error) => tracing::warn!("{error}: {}; trying again", error.source),
        }
        tokio::time::sleep(TRY_AGAIN).await;
    }
    remove_once(host, name).await
}

async fn remove_once(host: &impl Host, name: &str) -> Result<(), crate::host::HostError> {
    match host.remove_module(name).await {
        Err(error) if error.source.kind() == std::io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

fn half_unloaded(loaded: &Modules, removed: &[&str], why: &str) -> Failure {
    let left: Vec<&str> =
        loaded.keys().map(String::as_str).filter(|name| name.starts_with("nvidia")).collect();
    let removed = if removed.is_empty() { "some modules".to_owned() } else { removed.join(" ") };
    Failure::HalfUnloaded { removed, left: left.join(" "), why: why.to_owned() }
}

/// Unmounts everything at and below a directory, however often something was mounted over something else. The shortest
/// path goes first: what is mounted below it goes with it.
pub async fn detach_all(host: &impl Host, directory: &str) -> Result<(), Failure> {
    let below = format!("{directory}/");
    for _ in 0..LAYERS_MAX {
        let mounts = host.mounts().await?;
        let ours = mounts.iter().filter(|mount| *mount == directory || mount.starts_with(&below));
        let Some(top) = ours.min_by_key(|mount| mount.len()) else { return Ok(()) };
        if let Err(error) = host.detach(top).await {
            // Whoever unmounted it in the same moment has done the work.
            if host.mounts().await?.contains(top) {
                return Err(error.into());
            }
        }
    }
    Err(Failure::Remounted { path: directory.to_owned(), rounds: LAYERS_MAX })
}

/// Removes what the driver container left: its root directory, its PID file, and its word that it is up, which it takes back
/// itself only if it ends in order. With that word left behind the next driver would look as if it were up.
pub async fn clear_root(host: &impl Host, paths: &Paths) -> Result<(), Failure> {
    host.remove(&paths.driver_ready).await?;
    detach_all(host, &paths.driver_root).await?;
    host.remove(&paths.pid_file).await?;
    Ok(())
}

/// Removes Linux's own driver for the same devices, if it is loaded. Who uses it is in the way.
pub async fn unload_nouveau(host: &impl Host) -> Result<(), Failure> {
    let loaded = host.modules(&KernelPaths::default()).await?;
    let Some(module) = loaded.get(NOUVEAU) else { return Ok(()) };
    if module.references != 0 || !module.holders.is_empty() {
        let holders: Vec<&str> = module.holders.iter().map(String::as_str).collect();
        let who = if holders.is_empty() { "its users".to_owned() } else { holders.join(" ") };
        let what = format!(
            "kernel module nouveau has {} references ({who}) and cannot be removed; blacklist it on the node and reboot",
            module.references
        );
        return Err(Failure::Devices(what));
    }
    remove_once(host, NOUVEAU).await?;
    tracing::info!("removed kernel module {NOUVEAU}");
    Ok(())
}
