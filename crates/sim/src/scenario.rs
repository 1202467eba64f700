//! One way to write a scenario, for the embedded cluster and for a real control plane alike.
//!
//! A scenario is a fleet, a policy, how the machines behave, and a script: what a person does when something has
//! come about, and what must hold then. A recorder watches the nodes all the time; its [`Trace`] is what two runs
//! are compared by.
//!
//! ```text
//!  stage.rs        the cluster during a scenario, and what a script waits for
//!  hands.rs        what a person does in it          scene.rs   what the recorder sees
//!  controllers.rs  one controller after the other, killed and started again
//! ```

mod controllers;
mod hands;
mod scene;
mod stage;

use std::collections::BTreeMap;
use std::time::Duration;

use futures::future::BoxFuture;
use pitcrew_core::contract::State;
use serde_json::Value;

use crate::actors::Behaviour;
use crate::cluster::Cluster;
use crate::fleet::Fleet;

pub use scene::{Scene, Trace};
pub use stage::{Disturbance, Stage};

/// A lease runs out, another controller takes over, and says what is left to say.
const AFTERMATH: Duration = Duration::from_mins(2);
/// The label that everything is about.
const STATE_LABEL: &str = "nvidia.com/gpu-driver-upgrade-state";

/// The states of an undisturbed upgrade, in their order.
pub const WHOLE_WALK: [State; 8] = [
    State::UpgradeRequired,
    State::CordonRequired,
    State::WaitForJobsRequired,
    State::PodDeletionRequired,
    State::PodRestartRequired,
    State::ValidationRequired,
    State::UncordonRequired,
    State::UpgradeDone,
];

/// What goes wrong in a scenario, in a sentence.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Broken(pub String);

impl From<kube::Error> for Broken {
    fn from(error: kube::Error) -> Self {
        Self(format!("the API refused: {error}"))
    }
}

/// What a script returns.
pub type Outcome = Result<(), Broken>;
/// A script: what a person does, and what must hold.
pub type Script = for<'a> fn(&'a mut Stage) -> BoxFuture<'a, Outcome>;

/// Where a scenario can be played.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum On {
    /// On the embedded cluster and on a real control plane, with the same states.
    Both,
    /// On the embedded cluster: it needs faults that a real one does not have, or takes too long on real time.
    Embedded,
}

/// A story that must end well wherever it is played.
pub struct Scenario {
    /// What must be true, or the name under which a report of it is known.
    pub name: &'static str,
    /// Weaknesses of other controllers that it shows to be absent here (`docs/scenarios.md`).
    pub shows: &'static [&'static str],
    /// Where it can be played.
    pub on: On,
    /// What is in the cluster.
    pub fleet: Fleet,
    /// How the machines behave.
    pub behaviour: Behaviour,
    /// A DriverPolicy beside the fleet's ClusterPolicy.
    pub policy: Option<Value>,
    /// The node that the controller runs on.
    pub own_node: Option<&'static str>,
    /// What happens.
    pub script: Script,
}

/// Plays a scenario on a cluster and returns what was seen.
pub async fn play(scenario: &Scenario, cluster: Cluster) -> Result<Trace, Broken> {
    let mut stage = Stage::open(scenario, cluster).await?;
    (scenario.script)(&mut stage).await?;
    Ok(stage.trace())
}

/// Plays a scenario with `prepare` called once the controller has settled, and returns what it all comes to.
pub async fn play_to_the_end(
    scenario: &Scenario,
    cluster: Cluster,
    prepare: impl FnOnce(&Stage),
) -> Result<End, Broken> {
    let mut stage = Stage::open(scenario, cluster).await?;
    prepare(&stage);
    (scenario.script)(&mut stage).await?;
    tokio::time::sleep(AFTERMATH).await;
    stage.end().await
}

/// What a story comes to, without names and times that chance decides.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct End {
    /// Each node: state, cordon, and what we left on it.
    pub nodes: BTreeMap<String, String>,
    /// Each node's driver, and whether it is Ready.
    pub drivers: BTreeMap<String, String>,
    /// Each rollout's phase.
    pub rollouts: BTreeMap<String, String>,
}

/// What must hold.
pub fn must(holds: bool, otherwise: impl FnOnce() -> String) -> Outcome {
    if holds { Ok(()) } else { Err(Broken(otherwise())) }
}
