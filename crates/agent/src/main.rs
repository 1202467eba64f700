//! `pitcrew-node`: the agents of a node as a program of their own.

use std::process::ExitCode;

fn main() -> ExitCode {
    // Containers' logs have a time already, and nothing else writes here.
    tracing_subscriber::fmt().without_time().with_target(false).with_writer(std::io::stderr).init();
    ExitCode::from(pitcrew_agent::run(std::env::args_os()))
}
