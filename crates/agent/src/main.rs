//! `pitcrew-node`: the agents of a node as a program of their own.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(pitcrew_agent::run(std::env::args_os()))
}
