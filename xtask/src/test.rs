//! `cargo xtask test`: every check, in the order in which a mistake is found soonest. Stops at the first that
//! fails and says how to run it alone.

use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;
use tokio::time::Instant;

use crate::cargo::cargo;
use crate::elapsed::Elapsed;
use crate::{alerts, deny, kube};

/// One check.
struct Step {
    name: &'static str,
    /// What to type to run this step alone.
    again: &'static str,
    /// Passed, with a remark on what was left out; or not.
    run: fn() -> Result<Option<String>>,
}

const STEPS: [Step; 8] = [
    Step {
        name: "format",
        again: "cargo fmt --all --check",
        run: || run(cargo(&["fmt", "--all", "--check"])),
    },
    Step {
        name: "lints",
        again: "cargo clippy --workspace --all-targets -- -D warnings",
        run: || run(cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"])),
    },
    Step { name: "dependencies", again: "cargo xtask deny", run: deny::check },
    Step { name: "alerts", again: "cargo xtask alerts", run: alerts::check },
    Step { name: "kubernetes", again: "cargo xtask kube", run: || kube::ensure().map(|_| None) },
    Step { name: "tests", again: "cargo test --workspace", run: tests },
    Step {
        name: "demo",
        again: "cargo run --release -- demo --instant",
        run: || run(cargo(&["run", "--release", "--quiet", "--", "demo", "--instant"])),
    },
    Step { name: "demo as json", again: "cargo run --release -- demo --instant -o json", run: demo_as_json },
];

/// Runs all steps and sums them up.
pub(crate) fn run_all() -> Result<()> {
    let mut passed: Vec<Passed> = Vec::new();
    println!("{} steps: {}.", STEPS.len(), STEPS.map(|step| step.name).join(", "));
    for (index, Step { name, again, run }) in STEPS.into_iter().enumerate() {
        println!("\n[{} of {}] {name}: {again}", index + 1, STEPS.len());
        let start = Instant::now();
        let outcome = run();
        let took = start.elapsed();
        match outcome {
            Ok(left_out) => passed.push(Passed { name, took, left_out }),
            Err(problem) => {
                summarise(&passed);
                println!("{name:<14} failed  {:>12}", Elapsed(took));
                bail!(
                    "\nThe step \"{name}\" failed: {problem:#}\nRun it alone with: {again}\n{} passed, 1 failed",
                    passed.len()
                );
            }
        }
    }
    summarise(&passed);
    println!("\n{} passed, 0 failed", passed.len());
    Ok(())
}

struct Passed {
    name: &'static str,
    took: Duration,
    left_out: Option<String>,
}

fn summarise(passed: &[Passed]) {
    println!();
    for Passed { name, took, left_out } in passed {
        let remark = left_out.as_deref().map(|remark| format!("  ({remark})")).unwrap_or_default();
        println!("{name:<14} passed  {:>12}{remark}", Elapsed(*took));
    }
}

fn run(mut command: Command) -> Result<Option<String>> {
    let status = command.status().with_context(|| format!("start {}", command.get_program().display()))?;
    if !status.success() {
        bail!("it ended with {status}, see above.");
    }
    Ok(None)
}

/// All tests, those that need a real control plane included. The stories of the program wait more than they work, so they
/// are told beside the others, and what they say is printed after them.
fn tests() -> Result<Option<String>> {
    let binaries = kube::ensure()?;
    let test = |arguments: &[&str]| {
        let mut test = cargo(&[&["test"], arguments].concat());
        test.env("KUBEBUILDER_ASSETS", binaries.dir());
        test
    };
    run(test(&["--workspace", "--no-run"]))?;
    let mut program = test(&["-p", "pitcrew", "--color=always"]);
    program.stdout(Stdio::piped()).stderr(Stdio::piped());
    let program = program.spawn().context("start cargo")?;
    thread::scope(|scope| {
        let told = scope.spawn(|| program.wait_with_output());
        let others = run(test(&["--workspace", "--exclude", "pitcrew"]));
        let Ok(told) = told.join() else { bail!("the tests of the program were not waited for.") };
        let told = told.context("wait for the tests of the program")?;
        let (said, warned) = (String::from_utf8_lossy(&told.stdout), String::from_utf8_lossy(&told.stderr));
        println!("\nThe tests of the program, meanwhile:\n{warned}{said}");
        if !told.status.success() {
            bail!("the tests of the program ended with {}, see above.", told.status);
        }
        others
    })
}

/// What programs read must be JSON and nothing else.
fn demo_as_json() -> Result<Option<String>> {
    let output = cargo(&["run", "--release", "--quiet", "--", "demo", "--instant", "-o", "json"])
        .stderr(Stdio::inherit())
        .output()
        .context("start cargo")?;
    if !output.status.success() {
        bail!("it ended with {}, see above.", output.status);
    }
    let values = serde_json::Deserializer::from_slice(&output.stdout).into_iter::<Value>();
    let count = values.collect::<Result<Vec<_>, _>>().context("the output is not JSON")?.len();
    if count == 0 {
        bail!("the output is empty.");
    }
    println!("{} bytes of valid JSON", output.stdout.len());
    Ok(None)
}
