//! The programs that run on a node beside its driver: driver manager, vfio manager, safe load.
//!
//! ```text
//!  run.rs ── arguments.rs, settings.rs         from a command line to an exit code
//!    ├─ uninstall.rs   the driver manager: the node is made ready for another driver
//!    │    labels.rs, operands.rs               the operator's operands leave and come back
//!    │    pods.rs, leaving.rs                  users of the GPU leave; core decides who
//!    │    modules.rs, unload.rs, journal.rs    the driver leaves: all of it or nothing
//!    │    host_driver.rs, mofed.rs             drivers of others
//!    ├─ finish.rs      … is given back when the new driver is up
//!    ├─ preflight.rs   … is looked at, and nothing changes
//!    ├─ vfio.rs        devices go to virtual machines and come back (modalias.rs)
//!    └─ safe_load.rs   a driver asks whether it may be loaded
//!  host.rs             the machine, as a trait: linux.rs for real, fake.rs in memory
//!  cluster.rs, node.rs Kubernetes, and the agent's own node in it
//! ```
//!
//! What to pause, whom to evict, what to unload and in which order are functions from plain data to plain data; only
//! `linux.rs` and `cluster.rs` touch anything. An agent may be killed at any moment: the next run finds on the node what it
//! needs to come to the same end.

pub mod arguments;
pub mod clock;
pub mod cluster;
pub mod failure;
pub mod fake;
pub mod finish;
pub mod host;
pub mod host_driver;
pub mod journal;
pub mod labels;
mod leaving;
pub mod linux;
mod modalias;
pub mod modules;
mod mofed;
pub mod node;
mod operands;
mod pods;
pub mod preflight;
mod run;
pub mod safe_load;
pub mod settings;
pub mod stop;
pub mod uninstall;
pub mod unload;
pub mod values;
pub mod vfio;
mod wait;

pub use arguments::is_own_name;
pub use failure::Failure;
pub use run::{run, run_agent};
