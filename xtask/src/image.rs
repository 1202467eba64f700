//! `cargo xtask image`: the binaries of the images, as static as the Dockerfiles', without Docker.
//!
//! The Dockerfiles build where musl is the system's library. Here musl is used if Rust has it installed, and glibc
//! linked into the binary otherwise: either way nothing is left to load at run time, and that is what is checked.

use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use tokio::time::Instant;

use crate::cargo::{cargo, workspace};
use crate::elapsed::Elapsed;

/// A program header that names a dynamic loader.
const PT_INTERP: usize = 3;

/// A program of an image.
struct Binary {
    package: &'static str,
    name: &'static str,
    profile: &'static str,
}

/// What the controller's image is made of.
const PITCREW: Binary = Binary { package: "pitcrew", name: "pitcrew", profile: "release" };
/// What the images of a node are made of.
const NODE: Binary = Binary { package: "pitcrew-agent", name: "pitcrew-node", profile: "node" };
/// The names that it answers to, and what its help speaks of.
const NODE_NAMES: [(&str, &str); 4] = [
    ("pitcrew-node", "driver-manager"),
    ("driver-manager", "uninstall_driver"),
    ("vfio-manage", "unbind"),
    ("network-operator-init-container", "--configmap-name"),
];
/// The quickest of so many starts is what a start takes: the machine does other things too.
const STARTS: u32 = 20;

/// Builds both and says where they are.
pub(crate) fn report() -> Result<()> {
    for binary in [PITCREW, NODE] {
        let start = Instant::now();
        let (path, libc) = build(&binary)?;
        let (took, size) = (Elapsed(start.elapsed()), fs::metadata(&path)?.len());
        #[expect(clippy::cast_precision_loss, reason = "megabytes with one decimal")]
        let size = size as f64 / 1e6;
        let starts = start_time(&path)?.as_secs_f64() * 1e3;
        println!(
            "{} is static ({libc}), {size:.1} MB, starts in {starts:.1} ms; built in {took}",
            path.display()
        );
    }
    Ok(())
}

/// Builds both; lets one play a whole upgrade, and the other answer to its names. The answer says what differs from the
/// images'.
pub(crate) fn check() -> Result<Option<String>> {
    let (binary, libc) = build(&PITCREW)?;
    let demo = Command::new(&binary).args(["demo", "--instant"]).env("NO_COLOR", "1").output();
    let demo = demo.with_context(|| format!("start {}", binary.display()))?;
    if !demo.status.success() {
        bail!("the static binary's demo ended with {}.", demo.status);
    }
    let (node, _) = build(&NODE)?;
    for (name, words) in NODE_NAMES {
        answers(&node, name, words)?;
    }
    Ok((libc != "musl").then(|| format!("with {libc}: Rust's musl target is not installed")))
}

/// Called by a name, the program tells of itself.
fn answers(binary: &Path, name: &str, words: &str) -> Result<()> {
    let help = Command::new(binary).arg0(name).arg("--help").env_clear().output();
    let help = help.with_context(|| format!("start {} as {name}", binary.display()))?;
    if !help.status.success() || !String::from_utf8_lossy(&help.stdout).contains(words) {
        bail!("{} as {name} ended with {} and says nothing of {words}.", binary.display(), help.status);
    }
    Ok(())
}

fn start_time(binary: &Path) -> Result<Duration> {
    let mut quickest = Duration::MAX;
    for _ in 0..STARTS {
        let start = Instant::now();
        let version = Command::new(binary).arg("--version").output();
        let version = version.with_context(|| format!("start {}", binary.display()))?;
        quickest = quickest.min(start.elapsed());
        if !version.status.success() {
            bail!("{} --version ended with {}.", binary.display(), version.status);
        }
    }
    Ok(quickest)
}

fn build(binary: &Binary) -> Result<(PathBuf, &'static str)> {
    let Binary { package, name, profile } = binary;
    let arch = std::env::consts::ARCH;
    let musl = format!("{arch}-unknown-linux-musl");
    let (target, libc) =
        if installed(&musl)? { (musl, "musl") } else { (format!("{arch}-unknown-linux-gnu"), "glibc") };
    let mut build =
        cargo(&["build", "--profile", profile, "--locked", "--package", package, "--target", &target]);
    // A named target keeps the flag from build scripts and macros, which cannot be static.
    build.env("RUSTFLAGS", "-C target-feature=+crt-static");
    if !build.status().context("start cargo")?.success() {
        bail!("{name} cannot be built, see above.");
    }
    let binary = target_dir().join(target).join(profile).join(name);
    if wants_a_loader(&fs::read(&binary).with_context(|| format!("read {}", binary.display()))?) {
        bail!("{} is not static: it asks for a dynamic loader.", binary.display());
    }
    Ok((binary, libc))
}

fn installed(target: &str) -> Result<bool> {
    let rustc = Command::new("rustc").args(["--print", "sysroot"]).output().context("start rustc")?;
    let sysroot = String::from_utf8(rustc.stdout)?;
    Ok(Path::new(sysroot.trim()).join("lib/rustlib").join(target).join("lib").is_dir())
}

fn target_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace().join("target"), PathBuf::from)
}

/// Whether a 64-bit ELF file has a program header of that kind.
fn wants_a_loader(elf: &[u8]) -> bool {
    let number = |at: usize, bytes: usize| {
        let bytes = elf.get(at..at + bytes).unwrap_or_default();
        bytes.iter().rev().fold(0_usize, |number, byte| (number << 8) | usize::from(*byte))
    };
    let (first, size, count) = (number(0x20, 8), number(0x36, 2), number(0x38, 2));
    (0..count).any(|index| number(first + index * size, 4) == PT_INTERP)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_usual_program_wants_a_loader() {
        let ours = fs::read(std::env::current_exe().unwrap()).unwrap();
        assert!(wants_a_loader(&ours));
        assert!(!wants_a_loader(b"\x7fELF"));
    }
}
