//! `pitcrew`: the one binary. Each command has its file; this one reads the command line and ends the process.
//!
//! Exit codes: 0 done, 1 failed, 2 wrong usage, 130 left by the user. Failures are one sentence on stderr.

mod connect;
mod controller;
mod crd;
mod demo;
mod explain;
mod matrix;
mod reading;
mod refresh_clients;
mod simulate;
mod status;
mod steer;
mod stopwatch;
mod style;
mod terminal;
mod text;
mod times;
mod words;

#[cfg(test)]
mod tests;

use std::ffi::OsStr;
use std::path::Path;
use std::process::ExitCode;

use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};

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
    /// Say how far each pool is, what limits it and which nodes are in trouble
    Status(status::Args),
    /// Say why a node is where it is, who is responsible, what is next and what you can do
    Explain(explain::Args),
    /// Stop everything where it is; nodes under way keep their place
    Pause(steer::SwitchArgs),
    /// Go on after a pause
    Resume(steer::SwitchArgs),
    /// Leave nodes out of driver upgrades, or with --undo let them take part again
    Skip(steer::SkipArgs),
    /// Start failed nodes again
    Retry(steer::RetryArgs),
    /// End a rollout: nodes with their old driver are given back, the others finish
    Abort(steer::AbortArgs),
    /// Say that a stage has done enough: the next one begins
    Promote(steer::PromoteArgs),
    /// Take a version back: it is put back where it came from, and upgraded nodes go back to the one before
    Rollback(steer::VersionArgs),
    /// Let a version that went wrong be tried again
    Clear(steer::VersionArgs),
    /// Keep NVSentinel off nodes for work of your own, and give them back when they are well
    HealthHold(steer::HealthHoldArgs),
    /// Replace driver clients that hold on to a driver that is gone, in clusters without the controller
    RefreshClients(refresh_clients::Args),
    /// Check, compare, promote and put back the version matrix that is kept in Git: no cluster is asked
    Matrix(matrix::Args),
    /// Play random upgrades under random faults and check every promise: no cluster, no configuration
    Simulate(simulate::Args),
    /// Run one of the agents that work on a node beside its driver
    Node(pitcrew_agent::arguments::Agent),
    /// Print pitcrew's custom resource definitions, for kubectl apply -f -
    Crd(crd::Args),
}

fn main() -> ExitCode {
    let called = std::env::args_os().next().unwrap_or_default();
    if pitcrew_agent::is_own_name(&called) {
        return ExitCode::from(pitcrew_agent::run(std::env::args_os()));
    }
    let parsed = command(&called).try_get_matches().and_then(|matches| Cli::from_arg_matches(&matches));
    let cli = match parsed {
        Ok(cli) => cli,
        Err(error) => return words::usage(&error),
    };
    // Whoever speaks TLS first would have to choose otherwise. It fails only if somebody has chosen already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let result = match cli.command {
        Command::Controller(args) => controller::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Status(args) => status::run(&args),
        Command::Explain(args) => explain::run(&args),
        Command::Pause(args) => steer::pause(&args),
        Command::Resume(args) => steer::resume(&args),
        Command::Skip(args) => steer::skip(&args),
        Command::Retry(args) => steer::retry(&args),
        Command::Abort(args) => steer::abort(&args),
        Command::Promote(args) => steer::promote(&args),
        Command::Rollback(args) => steer::rollback(&args),
        Command::Clear(args) => steer::clear(&args),
        Command::HealthHold(args) => steer::health_hold(&args),
        Command::RefreshClients(args) => refresh_clients::run(&args),
        Command::Matrix(args) => matrix::run(&args),
        Command::Simulate(args) => simulate::run(&args),
        Command::Node(agent) => Ok(ExitCode::from(pitcrew_agent::run_agent(&agent))),
        Command::Crd(args) => crd::run(&args),
    };
    result.unwrap_or_else(|error| words::failure(&error))
}

/// The command line under the name by which it was called: `kubectl pitcrew` runs a program `kubectl-pitcrew`.
fn command(called: &OsStr) -> clap::Command {
    let plugin = Path::new(called).file_stem() == Some(OsStr::new("kubectl-pitcrew"));
    let command = Cli::command();
    if plugin { command.name("kubectl-pitcrew").bin_name("kubectl pitcrew") } else { command }
}
