//! The Helm chart: what it renders, what it refuses, and, on a real control plane, that it installs a controller which
//! works with the permissions that the chart grants and no others.
//!
//! ```text
//!  chart/
//!    render.rs       helm and helmfile, and the objects that they render
//!    written.rs      files that are made from others: definitions, alerts, dashboard, golden files
//!    permissions.rs  what the chart grants is what the program asks for, feature by feature
//!    refusals.rs     bad values, and the sentence that people get
//!    deployers.rs    the client refresh for helm, helmfile, flux and both ways of Argo CD
//!    stage.rs        a plane with a fleet, and two hosts on which pods are processes
//!    host.rs         the kubelet of those hosts
//!    install.rs      install, upgrade, test, uninstall
//!    node_agents.rs  what the agents of a node may do
//!    refresh.rs      the Job of the client refresh, by Helm and by Argo CD
//! ```

#[path = "chart/deployers.rs"]
mod deployers;
#[path = "chart/host.rs"]
mod host;
#[path = "chart/install.rs"]
mod install;
#[path = "chart/node_agents.rs"]
mod node_agents;
#[path = "chart/permissions.rs"]
mod permissions;
#[path = "chart/refresh.rs"]
mod refresh;
#[path = "chart/refusals.rs"]
mod refusals;
#[path = "chart/render.rs"]
mod render;
#[path = "chart/stage.rs"]
mod stage;
#[path = "documented_commands/supervised.rs"]
mod supervised;
#[path = "chart/written.rs"]
mod written;

use libtest_mimic::{Arguments, Trial};
use pitcrew_sim::plane::{Binaries, Helm};

use stage::Story;

/// A look at what the chart renders to.
type Look = fn() -> render::Outcome;

const RENDERED: [(&str, Look); 11] = [
    ("helm lint finds nothing", refusals::lint),
    ("a typo or a bad value is named", refusals::schema),
    ("values that are wrong together are refused with what to do", refusals::together),
    ("the longest release name fits", refusals::long_name),
    ("the controller is granted what it asks for, feature by feature", permissions::controller),
    ("readers are granted what they ask for", permissions::reader),
    ("nobody may do anything to everything", permissions::no_wildcards),
    ("agents of a node are granted something only if they are named", node_agents::only_if_named),
    ("every deployer gets the same Job, each in its own way", deployers::same_job),
    ("a new driver is a difference for every deployer", deployers::new_version),
    ("the deployers wait longer than the Job", deployers::timeouts),
];

/// What is played on a real control plane.
const STORIES: [(&str, Story); 6] = [
    ("the command of the README installs a controller that upgrades a fleet", install::install),
    ("a controller without its features works with fewer permissions", install::features_off),
    ("an agent of a node writes its own node and no other", node_agents::own_node_only),
    ("an agent of a node is refused nothing that it needs", node_agents::refused_nothing),
    ("the refresh Job runs by Helm's hook", refresh::by_helm),
    ("the refresh Job runs by Argo CD, once for each version", refresh::by_argocd),
];

fn main() {
    let mut arguments = Arguments::from_args();
    // A control plane needs both cores for itself.
    arguments.test_threads = Some(1);
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (helm, binaries) = (Helm::find(), Binaries::find());
    for missing in [helm.as_ref().err(), binaries.as_ref().err()].into_iter().flatten() {
        eprintln!("the chart: not all is tested. {missing}");
    }
    let mut trials: Vec<Trial> = written::FILES
        .iter()
        .map(|file| {
            let trial = Trial::test(format!("written: {}", file.path), || written::compare(file));
            trial.with_ignored_flag(file.needs_helm && helm.is_err())
        })
        .collect();
    trials.push(Trial::test("written: nothing else", written::nothing_else));
    trials.extend(RENDERED.map(|(name, look)| Trial::test(name, look).with_ignored_flag(helm.is_err())));
    trials.extend(STORIES.map(|(name, story)| {
        Trial::test(name, move || stage::play(story)).with_ignored_flag(helm.is_err() || binaries.is_err())
    }));
    libtest_mimic::run(&arguments, trials).exit();
}
