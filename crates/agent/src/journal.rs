//! The agent's note of how far an unload is, in a file that a reboot removes.
//!
//! It is written before the first module goes, so that after `kill -9` a driver of which half is gone is not taken for a
//! whole one, and a node whose driver is gone is not given back.

use serde::{Deserialize, Serialize};

use crate::host::{Host, HostError, HostResult, Modules};

/// The machine's name for this boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// How far an unload is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    /// Some of these modules may be gone.
    Unloading(Vec<String>),
    /// All are. What is loaded now is the new driver.
    Unloaded,
    /// None is: the whole node was drained for it, and the driver was busy all the same.
    DrainedInVain,
}

impl Stage {
    /// Some modules are gone and some are not.
    pub fn is_half(&self, loaded: &Modules) -> bool {
        let Stage::Unloading(modules) = self else { return false };
        let (there, gone): (Vec<_>, Vec<_>) = modules.iter().partition(|name| loaded.contains_key(*name));
        !there.is_empty() && !gone.is_empty()
    }
}

/// The note.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Journal {
    boot: String,
    stage: Stage,
}

/// The boot that the machine is in.
pub async fn boot_id(host: &impl Host) -> HostResult<String> {
    Ok(host.read(BOOT_ID).await?.unwrap_or_default().trim().to_owned())
}

/// How far the last unload of this boot was; `None` if there was none, or if it is over.
pub async fn read(host: &impl Host, path: &str, boot: &str) -> HostResult<Option<Stage>> {
    let Some(text) = host.read(path).await? else { return Ok(None) };
    // A note that cannot be read was cut off while it was written, before the first module went; or somebody else wrote it,
    // and then the node tells of half a driver.
    let journal: Option<Journal> = serde_json::from_str(&text).ok();
    Ok(journal.filter(|journal| journal.boot == boot).map(|journal| journal.stage))
}

/// Notes how far it is.
pub async fn write(host: &impl Host, path: &str, boot: &str, stage: Stage) -> HostResult<()> {
    let journal = Journal { boot: boot.to_owned(), stage };
    let text =
        serde_json::to_string(&journal).map_err(|error| HostError::new(format!("write {path}"), error))?;
    host.write(path, &text).await
}
