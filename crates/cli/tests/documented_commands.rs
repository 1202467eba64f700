//! The commands of NVIDIA's manual, pasted into a shell, with `pitcrew controller` in a real control plane.
//!
//! ```text
//!  documented_commands/
//!    stage.rs        a plane with a fleet of three nodes, and the shell in which the commands run
//!    controller.rs   `pitcrew controller` as a process (supervised.rs): its log, its metrics, its end
//!    upgrades.rs     upgrade, monitor, pause, skip, retry, as documented
//!    steering.rs     the same by pitcrew's own commands: status, explain, pause, resume, skip, retry, abort
//!    crashes.rs      kill -9 at random moments, and a driver that is dead on arrival
//!    mistakes.rs     what people get wrong, and the sentence that they get
//!    neighbours.rs   a live GPU Operator, missing definitions, missing permissions
//! ```
//!
//! The stories share a plane as long as each leaves it in order; one that fails takes its plane with it.

#[path = "documented_commands/controller.rs"]
mod controller;
#[path = "documented_commands/crashes.rs"]
mod crashes;
#[path = "documented_commands/mistakes.rs"]
mod mistakes;
#[path = "documented_commands/neighbours.rs"]
mod neighbours;
#[path = "documented_commands/stage.rs"]
mod stage;
#[path = "documented_commands/steering.rs"]
mod steering;
#[path = "documented_commands/supervised.rs"]
mod supervised;
#[path = "documented_commands/upgrades.rs"]
mod upgrades;

use libtest_mimic::{Arguments, Trial};
use pitcrew_sim::plane::Binaries;

use stage::Story;

const STORIES: [(&str, Story); 20] = [
    ("the documented commands upgrade a fleet and show how", upgrades::upgrade),
    ("a pause keeps everything and a resume goes on", upgrades::pause_and_resume),
    ("a skipped node is left out until its label goes", upgrades::skip),
    ("a failed node is retried by its label", upgrades::retry),
    ("pitcrew pauses, resumes and waits, and says what it did", steering::pause_and_wait),
    ("pitcrew explains a blocked node, and its advice works", steering::blocked),
    ("pitcrew leaves a node out and lets it take part again", steering::skip),
    ("pitcrew retries a failed node, and no other", steering::retry),
    ("pitcrew's commands answer bad input with one sentence", steering::bad_input),
    ("killed at random moments, the fleet comes to the same end", crashes::killed_at_random),
    ("a dead driver pod is told of within a minute", crashes::dead_driver),
    ("bad DriverPolicies are refused with a sentence", mistakes::bad_driver_policies),
    ("a bad ClusterPolicy freezes the pool until it is mended", mistakes::bad_cluster_policy),
    ("two policies for one driver do nothing and both say so", mistakes::two_policies),
    ("a selector that finds no DaemonSet is told in the status", mistakes::no_daemon_set),
    ("a node with an unknown state label is left alone", mistakes::unknown_label),
    ("a live GPU Operator freezes everything", neighbours::live_gpu_operator),
    ("without definitions the controller says how to get them", neighbours::no_definitions),
    ("missing permissions are named all at once", neighbours::no_permissions),
    ("an address in use is named", neighbours::address_in_use),
];

fn main() {
    let mut arguments = Arguments::from_args();
    // A control plane needs both cores for itself.
    arguments.test_threads = Some(1);
    let _ = rustls::crypto::ring::default_provider().install_default();
    let binaries = Binaries::find();
    if let Err(missing) = &binaries {
        eprintln!("documented commands: not tested. {missing}");
    }
    let trial = |(name, story): (&str, Story)| {
        Trial::test(name, move || stage::play(story)).with_ignored_flag(binaries.is_err())
    };
    let conclusion = libtest_mimic::run(&arguments, STORIES.into_iter().map(trial).collect());
    stage::close();
    conclusion.exit();
}
