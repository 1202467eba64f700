//! The part of pitcrew that speaks to Kubernetes, over a `kube::Client` that it is given.
//!
//! ```text
//!   observe ──▶ store (Snapshot) ──▶ core::plan ──▶ core::violations ──▶ execute ──▶ the API
//!      ▲                                                                     │
//!      └───────────────── answers and watch events come back as inputs ──────┘
//! ```
//!
//! | file | the one thing in it |
//! |---|---|
//! | [`run`](mod@run) | the loop: fold what came in, plan, start what is planned; it never awaits an action |
//! | `scope` | what is watched, and the features that can be switched off |
//! | `observe` | watches as one stream of observations |
//! | `wire`, `view` | API objects as far as they are read, and how they become facts |
//! | `store` | the Snapshot, kept current; read your own writes |
//! | `execute` | one action, one call; what came of it |
//! | [`prometheus`] | questions to a Prometheus, over HTTP |
//! | `setback` | what a failed call means and when to try again |
//! | `events` | Kubernetes Events, in order, out of the loop's way |
//! | [`lease`] | leader election |
//! | [`clock`] | the only reader of time |
//! | [`metrics`], [`serve`] | `/metrics`, `/healthz`, `/readyz` |
//! | [`preflight`] | what must be there before the controller starts or a reader looks, each with its sentence |
//! | [`look`](mod@look) | the same Snapshot for readers: listed once, or kept current; nothing is ever written |

pub mod clock;
mod events;
mod execute;
pub mod lease;
pub mod look;
pub mod metrics;
mod observe;
pub mod preflight;
pub mod prometheus;
pub mod run;
mod scope;
pub mod serve;
mod setback;
mod store;
mod view;
mod wire;

pub use clock::Clock;
pub use look::{Leader, Look, Watch, look};
pub use run::{Config, Controller, Pass, RunError};
pub use scope::Feature;
pub use setback::sentence;
