//! `uninstall_driver` from beginning to end, on a machine in memory and the embedded API. Many of these stories are
//! weaknesses of the program that it takes the place of; each is named by what must be true instead.

#![allow(clippy::unwrap_used, clippy::panic, reason = "what these tests do not expect is a failure")]

mod machine;
mod order;
mod ownership;
mod pods;
#[path = "../stage/mod.rs"]
mod stage;

use pitcrew_agent::fake::Machine;
use stage::Stage;

const OURS: &str = "pitcrew.dev/driver-manager-cordon";

fn with_driver() -> Machine {
    Machine::with_driver("old")
}

fn wants(stage: &mut Stage, digest: &str) {
    digest.clone_into(&mut stage.settings.digest);
}
