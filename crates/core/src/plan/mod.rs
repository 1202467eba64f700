//! The planner: facts in, decisions out. It never fails; a node that cannot be judged gets a reason, the others go on.
//!
//! ```text
//!  pool.rs        whether a pool may move at all, and who of it may start
//!  members.rs     which nodes belong to it, and where each stands
//!  stages.rs      the parts of it that go one after the other
//!  proofs.rs        … the gates at the end of each
//!  bake.rs          … and what is seen of each at work before the next one opens
//!  queries.rs       … what Prometheus says of it meanwhile
//!  ledger.rs      how many nodes may start now, and which
//!  waves.rs       … and who of them goes together
//!  start.rs       whether a node could start if it had a slot
//!  walk.rs        one node, one state: where it goes next (the table of docs/walk.md)
//!  cordon.rs        … taking the node, and giving it back
//!  health.rs        … keeping health systems off it meanwhile
//!  leaving.rs       … work leaves the node
//!  removal.rs       … which pods, and whether they may
//!  restart.rs       … replacing its driver pod
//!  reboot.rs        … or waiting for a reboot, where that alone helps
//!  clients.rs       … bringing the driver's clients back
//!  offers.rs        … and what they offer
//!  steady.rs        … and outside of visits
//!  validation.rs    … proving the new driver
//!  gates.rs         … by Jobs
//!  patch.rs         … the one write of each transition
//!  rollout.rs     what to say about the pool as a whole
//!  timeline.rs      … and what was decided
//!  fit.rs           … as far as there is room for it
//!  matrix.rs      versions that nobody has listed, and what runs otherwise than listed
//!  origin.rs      where a rollout comes from, and so where its way back goes
//!  rollback.rs    versions that went wrong, and the way back
//!  refresh.rs     the clients of every node, for somebody who looks after nothing else
//! ```

mod bake;
mod clients;
mod cordon;
mod fit;
mod gates;
mod health;
mod leaving;
mod ledger;
mod left_alone;
mod matrix;
mod members;
mod offers;
mod origin;
mod patch;
mod pool;
mod proofs;
mod queries;
mod reboot;
mod refresh;
mod removal;
mod restart;
mod rollback;
mod rollout;
mod stages;
mod start;
mod steady;
mod timeline;
mod validation;
mod walk;
mod waves;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use jiff::Timestamp;

pub use leaving::leaves_in_drain;
pub use ledger::Ledger;
pub use refresh::{ClientFacts, NodeClients, Outcome, client_survey};
pub use removal::{undeletable, uses_device};
pub use rollout::newest_rollout;

use crate::action::{Action, Event};
use crate::api::{GateStatus, MatrixStatus, StageStatus};
use crate::contract::State;
use crate::names::{DriverName, NodeName, PoolName, RevisionHash};
use crate::policy::{self, Source};
use crate::reason::Reason;
use crate::snapshot::Snapshot;
use crate::version::DriverVersion;

/// What to do now, why each node is where it is, and when to look again if nothing happens.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// What to do.
    pub actions: Vec<Action>,
    /// Each pool and its nodes.
    pub pools: Vec<PoolPlan>,
    /// The next moment at which time alone changes something.
    pub wake_at: Option<Timestamp>,
}

/// One pool in a plan.
#[derive(Clone, Debug)]
pub struct PoolPlan {
    /// Its name.
    pub name: PoolName,
    /// Who states its policy.
    pub source: Source,
    /// Its driver.
    pub driver: DriverName,
    /// Whether it may move.
    pub status: PoolStatus,
    /// The slots.
    pub ledger: Ledger,
    /// Each node's state and reason.
    pub nodes: BTreeMap<NodeName, Verdict>,
    /// The newest template revision of each DaemonSet.
    pub target: BTreeMap<String, RevisionHash>,
    /// The driver version of that, where it is known.
    pub version: Option<DriverVersion>,
    /// How far each stage is; none if the pool goes as one.
    pub stages: Vec<StageStatus>,
    /// What gates have said on the nodes of a pool that goes as one.
    pub gates: Vec<GateStatus>,
    /// Nodes that came up with the new driver by themselves and were taken out for it, the first by name.
    pub early: Vec<String>,
    /// What gates said of a stage as a whole, for the nodes that they ran on.
    pub events: Vec<(NodeName, Event)>,
    /// Nodes to which something happened soon after they were given back by a rollout, and what.
    pub relapses: BTreeMap<NodeName, (String, String)>,
    /// The way back is over, and nodes that it left alone go on by their stages, in a rollout of their own.
    pub goes_on: bool,
    /// What the version matrix says, if the policy names one.
    pub matrix: Option<MatrixStatus>,
}

/// Whether a pool may move.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PoolStatus {
    /// Yes.
    Active,
    /// The policy says `autoUpgrade: false`. Everything stays as it is.
    Paused,
    /// Something must be mended first. The sentence says what.
    Frozen(String),
}

/// Where a node is and why.
#[derive(Clone, PartialEq, Debug)]
pub struct Verdict {
    /// Its state.
    pub state: State,
    /// Why it is there.
    pub reason: Reason,
    /// Since when, as far as that is written down.
    pub since: Option<Timestamp>,
    /// Whether its driver pod is of the target revision, or is left alone as it is.
    pub in_sync: bool,
}

/// Decides everything that can be decided from these facts.
pub fn plan(snapshot: &Snapshot) -> Plan {
    let pools = policy::resolve(&snapshot.sources, snapshot.daemon_sets.values(), &snapshot.namespace);
    let mut plan = Plan::default();
    let mut pass = pool::Pass::begin(snapshot, &pools);
    for pool in &pools {
        let pool_plan = pool::plan_pool(snapshot, pool, &mut pass, &mut plan);
        rollout::report(snapshot, pool, &pool_plan, &mut plan);
        plan.pools.push(pool_plan);
    }
    plan
}

impl Plan {
    /// Notes that time alone changes something at `at`.
    fn wake(&mut self, at: Timestamp) {
        self.wake_at = Some(self.wake_at.map_or(at, |earlier| earlier.min(at)));
    }
}
