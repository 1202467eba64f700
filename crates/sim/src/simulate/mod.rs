//! Deterministic simulation: random fleets under random faults, with every promise checked at every change.
//!
//! ```text
//!  seed ─▶ case.rs      fleet, policy (manner.rs: stages, windows, atoms), machines, faults (fault.rs) and when they
//!             │           happen (trouble.rs)
//!             │
//!             ▼
//!          run.rs       an embedded cluster with real controllers (controllers.rs) on virtual time:
//!             │           a storm (weather.rs: the way to the API, trouble.rs: everybody else), then a calm
//!             ▼
//!          record.rs    every change ─▶ world.rs: the facts ─▶ promises.rs: safety, at every change
//!             │    moves.rs: the policy, proofs.rs: gates └▶ settled.rs: liveness, in the calm (people.rs attend it)
//!             ▼
//!          Run          (many.rs: on all cores, shrink.rs: made smaller) the first broken promise, a hash of everything that happened, what was covered
//! ```
//!
//! For a real cluster, `audit.rs` takes the changes from the audit log of its API server.

mod audit;
pub mod case;
mod controllers;
mod fault;
mod manner;
mod many;
mod moves;
mod people;
mod promises;
mod proofs;
mod record;
mod run;
mod settled;
mod shrink;
mod trouble;
mod weather;
pub mod world;

pub use audit::{Audit, audit};
pub use case::{Case, Wish};
pub use fault::{Fault, NoSuchFault};
pub use manner::Manner;
pub use many::{Total, run_all};
pub use promises::{Promise, SAFETY, Step, is_documented};
pub use record::{Coverage, Entry, Violation};
pub use run::{Run, RunError, run};
pub use shrink::shrink;
pub use trouble::Trouble;
