//! `/proc/<pid>/fd`: who has a device file open. Only a container with the host's PID namespace sees everybody.

use std::collections::BTreeSet;
use std::path::Path;

use crate::host::{Holder, HostError, HostResult};

/// The processes that hold a file open whose path begins with `prefix`. Processes that end meanwhile are not there.
pub(super) fn holders(proc: &Path, prefix: &str) -> HostResult<Vec<Holder>> {
    let entries =
        std::fs::read_dir(proc).map_err(|error| HostError::new(format!("read {}", proc.display()), error))?;
    let mut pids: Vec<u32> =
        entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    pids.sort_unstable();
    let holder = |pid: u32| {
        let files = open_files(&proc.join(pid.to_string()), prefix);
        let command = || std::fs::read_to_string(proc.join(pid.to_string()).join("comm")).unwrap_or_default();
        (!files.is_empty()).then(|| Holder { pid, command: command().trim().to_owned(), files })
    };
    Ok(pids.into_iter().filter_map(holder).collect())
}

fn open_files(process: &Path, prefix: &str) -> BTreeSet<String> {
    let Ok(entries) = std::fs::read_dir(process.join("fd")) else { return BTreeSet::new() };
    let targets = entries.flatten().filter_map(|entry| std::fs::read_link(entry.path()).ok());
    let names = targets.map(|target| target.to_string_lossy().into_owned());
    names.filter(|name| name.starts_with(prefix)).collect()
}
