//! `/proc/<pid>/fd`: who has a device file open. Only a container with the host's PID namespace sees everybody, and only one
//! with `CAP_DAC_READ_SEARCH` and `CAP_SYS_PTRACE` may look at the processes of other users.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

use crate::host::{Holder, Holders, HostError, HostResult};

/// The processes that hold a file open whose path begins with `prefix`. Processes that end meanwhile are not there; those that
/// may not be looked at are counted.
pub(super) fn holders(proc: &Path, prefix: &str) -> HostResult<Holders> {
    let entries =
        std::fs::read_dir(proc).map_err(|error| HostError::new(format!("read {}", proc.display()), error))?;
    let mut pids: Vec<u32> =
        entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    pids.sort_unstable();
    let mut holders = Holders::default();
    for pid in pids {
        let process = proc.join(pid.to_string());
        match open_files(&process, prefix) {
            Ok(files) if files.is_empty() => {}
            Ok(files) => {
                let command = std::fs::read_to_string(process.join("comm")).unwrap_or_default();
                holders.seen.push(Holder { pid, command: command.trim().to_owned(), files });
            }
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => holders.hidden += 1,
            // It has ended.
            Err(_) => {}
        }
    }
    Ok(holders)
}

/// What a process has open. A file that is closed meanwhile is not open.
fn open_files(process: &Path, prefix: &str) -> io::Result<BTreeSet<String>> {
    let mut files = BTreeSet::new();
    for entry in std::fs::read_dir(process.join("fd"))?.flatten() {
        match std::fs::read_link(entry.path()) {
            Ok(target) => drop(files.insert(target.to_string_lossy().into_owned())),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Err(error),
            Err(_) => {}
        }
    }
    files.retain(|name| name.starts_with(prefix));
    Ok(files)
}
