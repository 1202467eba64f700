//! `cargo xtask bench`: how quick and how frugal the controller is, on a real control plane.
//!
//! One case is one plane: a fleet, the release build of `pitcrew controller` as a process of its own, one change of
//! version. What it cost is read from outside: the API server's audit log, a watch of the nodes, `/proc`. Then a
//! bare client sends the same writes to the same plane as fast as it can; what lies between the two is ours.
//!
//! ```text
//!  case.rs      one case, from the plane to the figures      controller.rs  the process under test
//!  audit.rs     who asked the API server for what            recorder.rs    the nodes, as a watch sees them
//!  floor.rs     the bare client                              figures.rs     what was measured, and the bars
//! ```

mod audit;
mod case;
mod controller;
mod figures;
mod floor;
mod recorder;

use anyhow::{Result, bail};

use crate::kube;

/// The cases that are run when none is asked for: no limit of parallel upgrades, and ten at a time.
const CASES: [u32; 2] = [0, 10];

/// What to measure.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// How many GPU nodes
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=5000))]
    nodes: u32,
    /// Only the case with this maxParallelUpgrades (0: no limit); both 0 and 10 if not given
    #[arg(long)]
    max_parallel: Option<u32>,
    /// Run the next case even if this one missed a bar
    #[arg(long)]
    keep_going: bool,
}

/// Runs the cases and prints their tables. A missed bar is an error.
pub(crate) async fn run(options: Options) -> Result<()> {
    let Options { nodes, max_parallel, keep_going } = options;
    let binaries = kube::ensure()?;
    println!("Building the release binary …");
    let program = controller::build()?;
    let mut missed = Vec::new();
    for max_parallel in max_parallel.map_or_else(|| CASES.to_vec(), |only| vec![only]) {
        let figures = case::run(&binaries, &program, case::Case { nodes, max_parallel }).await?;
        println!("{figures}");
        let bars = figures.bars();
        missed.extend(bars.iter().filter(|bar| !bar.holds).map(|bar| format!("P={max_parallel}: {bar}")));
        if !missed.is_empty() && !keep_going {
            break;
        }
    }
    if missed.is_empty() {
        println!("Every bar holds.");
        return Ok(());
    }
    bail!("{} missed:\n  {}", if missed.len() == 1 { "One bar" } else { "Some bars" }, missed.join("\n  "))
}
