//! `pitcrew`: the one binary. Each command has its file; this one reads the command line and ends the process.
//!
//! Exit codes: 0 done, 1 failed, 2 wrong usage, 130 left by the user. Failures are one sentence on stderr.

mod controller;
mod crd;
mod demo;
mod stopwatch;
mod terminal;
mod words;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Upgrades GPU drivers on Kubernetes nodes, a few at a time, and says why each node is where it is.
#[derive(Parser)]
#[command(name = "pitcrew", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the upgrade controller against a cluster
    Controller(controller::Args),
    /// Watch an upgrade of a simulated fleet: no cluster, no configuration
    Demo(demo::Args),
    /// Print pitcrew's custom resource definitions, for kubectl apply -f -
    Crd(crd::Args),
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return words::usage(&error),
    };
    // Whoever speaks TLS first would have to choose otherwise. It fails only if somebody has chosen already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let result = match cli.command {
        Command::Controller(args) => controller::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Crd(args) => crd::run(&args),
    };
    result.unwrap_or_else(|error| words::failure(&error))
}
