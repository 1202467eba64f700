//! `/proc/modules` and `/sys/module`: what is loaded, and who uses whom.

use std::io;
use std::path::Path;

use crate::host::{HostError, HostResult, Module, Modules};

/// The loaded modules below a `/proc` and a `/sys`. A missing `/proc/modules` or `/sys/module` is an error: a wrong mount must
/// not look like a machine without modules, or like one whose modules have no users.
pub(super) fn modules(proc: &Path, sys: &Path) -> HostResult<Modules> {
    let path = proc.join("modules");
    let text = std::fs::read_to_string(&path)
        .map_err(|error| HostError::new(format!("read {}", path.display()), error))?;
    let mut modules = parse(&text);
    let path = sys.join("module");
    std::fs::metadata(&path).map_err(|error| HostError::new(format!("read {}", path.display()), error))?;
    for (name, module) in &mut modules {
        // Some users are only listed here, others only there.
        let path = sys.join("module").join(name).join("holders");
        let listed =
            names(&path).map_err(|error| HostError::new(format!("read {}", path.display()), error))?;
        module.holders.extend(listed);
    }
    Ok(modules)
}

/// The names in a directory. One that is not there has none: the module has just been removed, or it cannot be.
fn names(path: &Path) -> io::Result<Vec<String>> {
    let entries = match std::fs::read_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
}

/// Lines such as `nvidia 56717312 37 nvidia_uvm,nvidia_modeset, Live 0xffff…`; others are passed over.
fn parse(text: &str) -> Modules {
    let line = |line: &str| {
        let mut fields = line.split_whitespace();
        let (name, _size, references, users) =
            (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
        let users = users.split(',').filter(|user| !matches!(*user, "" | "-" | "[permanent]"));
        // A module that is being loaded or removed has `-` here.
        let references = if references == "-" { -1 } else { references.parse().ok()? };
        Some((name.to_owned(), Module { references, holders: users.map(str::to_owned).collect() }))
    };
    text.lines().filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_proc_modules_are_read_and_broken_ones_passed_over() {
        let text = "nvidia_uvm 4960256 0 - Live 0x0\n\
                    nvidia 56717312 38 nvidia_uvm,nvidia_modeset, Live 0x0 (POE)\n\
                    broken\n\
                    going - - - Unloading\n";
        let modules = parse(text);
        assert_eq!(modules.len(), 3);
        assert_eq!(modules["nvidia"].references, 38);
        assert_eq!(modules["nvidia"].holders.iter().collect::<Vec<_>>(), ["nvidia_modeset", "nvidia_uvm"]);
        assert!(modules["nvidia_uvm"].holders.is_empty());
        assert_eq!(modules["going"].references, -1);
    }
}
