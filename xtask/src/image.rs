//! `cargo xtask image`: the binary of the image, as static as the Dockerfile's, without Docker.
//!
//! The Dockerfile builds where musl is the system's library. Here musl is used if Rust has it installed, and glibc
//! linked into the binary otherwise: either way nothing is left to load at run time, and that is what is checked.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::cargo::{cargo, workspace};

/// A program header that names a dynamic loader.
const PT_INTERP: usize = 3;

/// Builds it and says where it is.
pub(crate) fn report() -> Result<()> {
    let (binary, libc) = build()?;
    println!("{} is static ({libc}), {} MB", binary.display(), fs::metadata(&binary)?.len() / 1_000_000);
    Ok(())
}

/// Builds it and lets it play a whole upgrade. The answer says what differs from the image's.
pub(crate) fn check() -> Result<Option<String>> {
    let (binary, libc) = build()?;
    let demo = Command::new(&binary).args(["demo", "--instant"]).env("NO_COLOR", "1").output();
    let demo = demo.with_context(|| format!("start {}", binary.display()))?;
    if !demo.status.success() {
        bail!("the static binary's demo ended with {}.", demo.status);
    }
    Ok((libc != "musl").then(|| format!("with {libc}: Rust's musl target is not installed")))
}

fn build() -> Result<(PathBuf, &'static str)> {
    let arch = std::env::consts::ARCH;
    let musl = format!("{arch}-unknown-linux-musl");
    let (target, libc) =
        if installed(&musl)? { (musl, "musl") } else { (format!("{arch}-unknown-linux-gnu"), "glibc") };
    let mut build = cargo(&["build", "--release", "--locked", "--package", "pitcrew", "--target", &target]);
    // A named target keeps the flag from build scripts and macros, which cannot be static.
    build.env("RUSTFLAGS", "-C target-feature=+crt-static");
    if !build.status().context("start cargo")?.success() {
        bail!("it cannot be built, see above.");
    }
    let binary = target_dir().join(target).join("release/pitcrew");
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
