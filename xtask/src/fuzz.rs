//! `cargo xtask fuzz`: inputs from outside, made up by libFuzzer and guided by coverage. It works on the stable compiler:
//! `fuzz/instrument` asks LLVM for the counters that libFuzzer looks at, without any sanitizer.
//!
//! An input that breaks something is written into the target's corpus, where an ordinary test replays it from then on.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tokio::time::Instant;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use serde_json::Value;

use crate::cargo::{cargo, workspace};

/// Of each target, and always the same from one seed: a step of `cargo xtask test` that fails tells of the change, not of luck.
const INPUTS: u64 = 10_000;

/// A whole small cluster fits; larger inputs only take longer.
const INPUT_BYTES_MAX: usize = 16_384;

/// An input that takes longer than this hangs.
const HANG_SECONDS: u64 = 20;

/// What to fuzz.
#[derive(Args)]
pub(crate) struct Options {
    /// The target; all of them one after the other if none is named
    target: Option<String>,
    /// How long to look for new inputs that break something, for each target [default: the same 10,000 every time]
    #[arg(long)]
    seconds: Option<u64>,
    /// Run these inputs once instead
    #[arg(long, requires = "target", value_name = "FILE", num_args = 1..)]
    replay: Vec<PathBuf>,
}

/// Fuzzes what was asked for.
pub(crate) fn run(options: &Options) -> Result<()> {
    let mut targets = targets()?;
    if let Some(name) = &options.target {
        if !targets.contains(name) {
            bail!("there is no target {name}; choose from {}", targets.join(", "));
        }
        targets = vec![name.clone()];
    }
    let program = build()?;
    for target in targets {
        if options.replay.is_empty() {
            fuzz(&program, &target, options.seconds)?;
        } else {
            replay(&program, &target, &options.replay)?;
        }
    }
    Ok(())
}

/// Each has a directory of inputs; a test holds them against the targets themselves.
fn targets() -> Result<Vec<String>> {
    let corpus = workspace().join("fuzz/corpus");
    let entries = fs::read_dir(&corpus).with_context(|| format!("read {}", corpus.display()))?;
    let mut names: Vec<String> =
        entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    Ok(names)
}

/// A step of `cargo xtask test`.
pub(crate) fn check() -> Result<Option<String>> {
    if !has_cxx() {
        return Ok(Some("left out: libFuzzer needs a C++ compiler (c++)".to_owned()));
    }
    run(&Options { target: None, seconds: None, replay: Vec::new() }).map(|()| None)
}

fn has_cxx() -> bool {
    let cxx = std::env::var_os("CXX").unwrap_or_else(|| "c++".into());
    let version = Command::new(cxx).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    version.is_ok_and(|status| status.success())
}

/// Builds the program with counters; gives its path.
fn build() -> Result<PathBuf> {
    let mut command = cargo(&["build", "-p", "pitcrew-fuzz", "--features", "libfuzzer", "--bin", "fuzz"]);
    command.arg("--message-format=json-render-diagnostics");
    command.env("RUSTC_WORKSPACE_WRAPPER", workspace().join("fuzz/instrument"));
    let output = command.stderr(Stdio::inherit()).output().context("start cargo")?;
    if !output.status.success() {
        bail!("the fuzz targets cannot be built, see above.");
    }
    let messages = serde_json::Deserializer::from_slice(&output.stdout).into_iter::<Value>();
    let built =
        messages.filter_map(|message| Some(PathBuf::from(message.ok()?["executable"].as_str()?))).last();
    built.context("cargo built no fuzz targets")
}

fn command(program: &Path, target: &str) -> Command {
    let mut command = Command::new(program);
    command.env("PITCREW_FUZZ_TARGET", target).env("RUST_BACKTRACE", "1").current_dir(workspace());
    command
}

fn fuzz(program: &Path, target: &str, seconds: Option<u64>) -> Result<()> {
    let corpus = format!("fuzz/corpus/{target}/");
    let mut command = command(program, target);
    // libFuzzer writes what covers something new into the first directory, and reads all of them.
    let grown = if let Some(seconds) = seconds {
        command.arg(format!("-max_total_time={seconds}"));
        program.with_file_name(format!("fuzz-corpus-{target}"))
    } else {
        command.arg(format!("-runs={INPUTS}")).arg("-seed=1");
        let scratch = program.with_file_name(format!("fuzz-step-{target}"));
        if scratch.exists() {
            fs::remove_dir_all(&scratch).with_context(|| format!("empty {}", scratch.display()))?;
        }
        scratch
    };
    fs::create_dir_all(&grown).with_context(|| format!("make {}", grown.display()))?;
    let started = Instant::now();
    let mut child = command
        .arg(&grown)
        .arg(workspace().join(&corpus))
        .arg(format!("-max_len={INPUT_BYTES_MAX}"))
        .arg(format!("-timeout={HANG_SECONDS}"))
        .args(["-print_final_stats=1", "-verbosity=0"])
        .arg(format!("-artifact_prefix={corpus}"))
        .stderr(Stdio::piped())
        .spawn()
        .context("start the fuzz targets")?;
    let said = child.stderr.take().map(BufReader::new);
    let (mut runs, mut found, mut told) = (String::new(), None, Vec::new());
    for line in said.into_iter().flat_map(|said| said.lines().map_while(Result::ok)) {
        if let Some(count) = line.strip_prefix("stat::number_of_executed_units:") {
            count.trim().clone_into(&mut runs);
        } else if let Some((_, path)) = line.split_once("Test unit written to ") {
            found = Some(path.trim().to_owned());
        } else {
            told.push(line);
        }
    }
    let status = child.wait().context("wait for the fuzz targets")?;
    if status.success() {
        println!(
            "{target:<10} {runs:>10} inputs in {:.0} s, none of them breaks anything",
            started.elapsed().as_secs_f32()
        );
        return Ok(());
    }
    // The panic and where it came from; before that libFuzzer tells of every new function that it reaches.
    let first = told.iter().position(|line| line.contains("panicked at") || line.contains("ERROR:"));
    told.iter().skip(first.unwrap_or(0)).for_each(|line| eprintln!("{line}"));
    let Some(path) = found else { bail!("{target}: it ended with {status}, see above.") };
    let input = fs::read(workspace().join(&path)).unwrap_or_default();
    bail!(
        "{target}: this input breaks what must hold, see above:\n{}\nIt is kept in {path}. Run it again with: cargo xtask fuzz {target} --replay {path}",
        String::from_utf8_lossy(&input)
    )
}

fn replay(program: &Path, target: &str, inputs: &[PathBuf]) -> Result<()> {
    let status = command(program, target).args(inputs).status().context("start the fuzz targets")?;
    if !status.success() {
        bail!("{target}: it ended with {status}, see above.");
    }
    Ok(())
}
