//! `cargo xtask test`: every check, in the order in which a mistake is found soonest. Stops at the first that
//! fails and says how to run it alone.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;
use tokio::time::Instant;

use crate::cargo::cargo;
use crate::elapsed::Elapsed;
use crate::{alerts, deny, fuzz, helm, image, kube, simulation};

/// One check.
struct Step {
    name: &'static str,
    /// What to type to run this step alone.
    again: &'static str,
    /// Passed, with a remark on what was left out; or not.
    run: fn() -> Result<Option<String>>,
}

const STEPS: [Step; 12] = [
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
    Step { name: "helm", again: "cargo xtask helm", run: || helm::ensure().map(|_| None) },
    Step { name: "tests", again: "cargo test --workspace", run: tests },
    Step { name: "fuzzing", again: "cargo xtask fuzz", run: fuzz::check },
    Step {
        name: "demo",
        again: "cargo run --release -- demo --instant",
        run: || run(cargo(&["run", "--release", "--quiet", "--", "demo", "--instant"])),
    },
    Step { name: "demo as json", again: "cargo run --release -- demo --instant -o json", run: demo_as_json },
    Step {
        name: "simulation",
        again: "cargo run --release -- simulate --seeds 2000",
        run: simulation::check,
    },
    Step { name: "static binaries", again: "cargo xtask image", run: image::check },
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
/// are told beside the others; what they say is printed after them.
fn tests() -> Result<Option<String>> {
    let planes = kube::ensure()?;
    let (beside, others): (Vec<_>, Vec<_>) =
        test_binaries()?.into_iter().partition(|test| test.name == BESIDE);
    let start = |test: &TestBinary| {
        let mut command = Command::new(&test.path);
        command.current_dir(&test.dir).env("KUBEBUILDER_ASSETS", planes.dir());
        command
    };
    thread::scope(|scope| {
        let told: Vec<_> = beside.iter().map(|test| scope.spawn(|| start(test).output())).collect();
        let outcome = others.iter().try_for_each(|test| {
            println!("\n     Running {}", test.name);
            run(start(test)).map(drop)
        });
        for told in told {
            let Ok(output) = told.join() else { bail!("{BESIDE} was not waited for.") };
            let output = output.with_context(|| format!("start {BESIDE}"))?;
            let said = String::from_utf8_lossy(&output.stdout);
            println!("\n     Running {BESIDE}, meanwhile\n{}{said}", String::from_utf8_lossy(&output.stderr));
            if !output.status.success() {
                bail!("{BESIDE} ended with {}, see above.", output.status);
            }
        }
        outcome
    })?;
    run(cargo(&["test", "--workspace", "--doc", "--quiet"]))
}

/// The stories of the program.
const BESIDE: &str = "documented_commands";

/// A program with tests, as cargo built it.
struct TestBinary {
    name: String,
    path: String,
    /// Where cargo would start it.
    dir: PathBuf,
}

fn test_binaries() -> Result<Vec<TestBinary>> {
    run(cargo(&["test", "--workspace", "--no-run"]))?;
    let list = ["test", "--workspace", "--no-run", "--quiet", "--message-format=json"];
    let output = cargo(&list).stderr(Stdio::inherit()).output().context("start cargo")?;
    let messages = serde_json::Deserializer::from_slice(&output.stdout).into_iter::<Value>();
    let mut found = Vec::new();
    for message in messages {
        let message = message.context("read what cargo built")?;
        let text = |pointer: &str| message.pointer(pointer).and_then(Value::as_str).map(str::to_owned);
        let is_test = message.pointer("/profile/test").and_then(Value::as_bool) == Some(true);
        if let (true, Some(path), Some(name), Some(manifest)) =
            (is_test, text("/executable"), text("/target/name"), text("/manifest_path"))
        {
            let dir = Path::new(&manifest).parent().map(Path::to_owned).unwrap_or_default();
            found.push(TestBinary { name, path, dir });
        }
    }
    if !found.iter().any(|test| test.name == BESIDE) {
        bail!("cargo built no tests called {BESIDE}.");
    }
    Ok(found)
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
