//! What a person who works on pitcrew needs around `cargo`: real Kubernetes parts, a cluster to play with, and
//! all checks in one command.
//!
//! ```text
//!  kube.rs      cargo xtask kube        builds etcd and Kubernetes once, into a cache
//!  helm.rs      cargo xtask helm        the same for Helm and helmfile (go.rs: how)
//!  chart.rs     cargo xtask chart       writes what the chart takes from elsewhere, and what it renders to
//!  image.rs     cargo xtask image       the static binaries that the images are made of
//!  up.rs        cargo xtask up | down   a control plane with a simulated GPU fleet in the background
//!  test.rs      cargo xtask test        every check, step by step
//!  bench.rs     cargo xtask bench       the controller's time and cost on a real control plane
//!  mutate.rs    cargo xtask mutate      breaks the program on purpose: does the simulation find it?
//!  fleet.rs     the simulated fleet that `up` puts into the control plane
//!  deny.rs      cargo xtask deny        one of those steps: licences, bans, sources, advisories
//!  alerts.rs    cargo xtask alerts      another: the alert rules, with promtool
//!  fuzz.rs      cargo xtask fuzz        another: inputs from outside, guided by coverage
//!  cargo.rs     how cargo is called from within cargo
//!  background.rs, elapsed.rs            a process that is safe to end by its number; times for people
//! ```

mod alerts;
mod background;
mod bench;
mod cargo;
mod chart;
mod deny;
mod elapsed;
mod fleet;
mod fuzz;
mod go;
mod helm;
mod image;
mod kube;
mod mutate;
mod simulation;
mod test;
mod up;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Set-up, tests and a cluster to play with.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Make sure that etcd, Kubernetes and kubectl are there; build them with Go if not (once, about 6 minutes)
    Kube,
    /// Make sure that Helm and helmfile are there; build them with Go if not (once, about 6 minutes)
    Helm,
    /// Write the chart's copies of definitions, alerts and dashboard, and the golden files of what it renders to
    Chart,
    /// Build the static binaries that the images are made of, and check that they are static
    Image,
    /// Start a control plane with a simulated GPU fleet in the background
    Up(up::Options),
    /// End what `up` started and remove its data
    Down,
    /// Check licences, banned crates and known vulnerabilities of the dependencies
    Deny,
    /// Test the alert rules with promtool
    Alerts,
    /// Look for inputs from outside that break something
    Fuzz(fuzz::Options),
    /// Run every check: format, lints, licences, tests, demo
    Test,
    /// Break the program on purpose, in many small ways, and see whether the simulation finds each
    Mutate(mutate::Options),
    /// Measure the controller on a real control plane and hold it against its bars
    Bench(bench::Options),
    /// The background process of `up`
    #[command(hide = true)]
    KeepUp(up::Options),
}

#[tokio::main]
async fn main() -> ExitCode {
    let outcome = match Arguments::parse().task {
        Task::Kube => kube::ensure().map(drop),
        Task::Helm => helm::ensure().map(drop),
        Task::Chart => chart::write(),
        Task::Image => image::report(),
        Task::Up(options) => up::up(&options),
        Task::Down => up::down(),
        Task::Deny => deny::report(),
        Task::Alerts => alerts::report(),
        Task::Fuzz(options) => fuzz::run(&options),
        Task::Test => test::run_all(),
        Task::Mutate(options) => mutate::mutate(&options),
        Task::Bench(options) => bench::run(options).await,
        Task::KeepUp(options) => up::keep(options).await,
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("{problem:#}");
            ExitCode::FAILURE
        }
    }
}
