//! Tells the program which commit it was built from.

use std::process::Command;

fn main() {
    println!("cargo::rerun-if-env-changed=PITCREW_COMMIT");
    println!("cargo::rerun-if-changed=../../.git/HEAD");
    println!("cargo::rerun-if-changed=../../.git/refs/heads");
    let git = || {
        let output = Command::new("git").args(["rev-parse", "--short=12", "HEAD"]).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    // A source archive has no history; whoever builds from one can say.
    let commit = std::env::var("PITCREW_COMMIT").ok().or_else(git).unwrap_or_else(|| "unknown".to_owned());
    println!("cargo::rustc-env=PITCREW_COMMIT={commit}");
}
