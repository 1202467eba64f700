//! Cargo, called from a program that cargo itself runs.

use std::env;
use std::path::Path;
use std::process::Command;

/// The directory of the workspace.
pub(crate) fn workspace() -> &'static Path {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here)
}

/// A cargo command in the workspace.
pub(crate) fn cargo(arguments: &[&str]) -> Command {
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(arguments).current_dir(workspace());
    without_our_package(&mut cargo);
    cargo
}

/// `cargo run` tells us about our own package in the environment. Build scripts (ring's) that watch these
/// variables would make the inner cargo build again what the outer one has built.
pub(crate) fn without_our_package(command: &mut Command) {
    for (name, _) in env::vars_os() {
        let told = name.to_str().is_some_and(|name| {
            name.starts_with("CARGO_PKG_") || ["CARGO_MANIFEST_DIR", "CARGO_MANIFEST_PATH"].contains(&name)
        });
        if told {
            command.env_remove(name);
        }
    }
}
