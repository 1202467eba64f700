//! The part of pitcrew that thinks: plain data in, plain data out. No IO, no clock, no chance.
//!
//! ```text
//!   Snapshot ──▶ plan() ──▶ Plan { actions, verdicts, wake_at }
//!      facts        │          what to do, and why each node is where it is
//!                   └──▶ violations(): the promises, written apart from the planner
//! ```
//!
//! Where to look:
//!
//! | file | the one thing in it |
//! |---|---|
//! | [`contract`] | every label, annotation, state, event and metric name that the cluster sees |
//! | [`api`] | the custom resources: `DriverPolicy`, `Rollout`, and NVIDIA's as far as they are read |
//! | [`policy`] | what the user wants, resolved from whichever source says it |
//! | [`snapshot`] | the facts: nodes, pods, DaemonSets, budgets, what is in flight |
//! | [`matrix`] | the version matrix: which versions belong together, and what runs otherwise |
//! | [`visit`] | the record that pitcrew keeps on a node while it owns it |
//! | [`windows`] | when nodes may start, and how long a visit is expected to take |
//! | [`health`] | keeping health systems off a node for a while |
//! | [`driver_manager`] | what the driver manager writes on its node |
//! | [`clients`] | who keeps a handle on the driver, and whose is stale |
//! | [`prometheus`] | questions to a Prometheus, and whether the answers keep their bounds |
//! | [`gate`] | checks that run as Jobs: presets, the Job, the verdict |
//! | [`mod@plan`] | the walk of a node, one file per step; the slot ledger |
//! | [`reason`] | why a node is where it is |
//! | [`action`] | every effect that pitcrew may cause |
//! | [`check`] | the safety promises as code |

pub mod action;
pub mod api;
pub mod check;
pub mod clients;
pub mod contract;
pub mod driver_manager;
pub mod gate;
pub mod health;
pub mod matrix;
pub mod names;
pub mod plan;
pub mod policy;
pub mod prometheus;
pub mod reason;
pub mod selector;
pub mod snapshot;
pub mod version;
pub mod visit;
pub mod windows;

pub use action::Action;
pub use plan::{Plan, plan};
pub use reason::Reason;
pub use snapshot::Snapshot;
