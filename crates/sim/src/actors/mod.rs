//! Who works in a cluster: ordinary API clients.
//!
//! ```text
//!  drive.rs     the loop all of them run          cache.rs   what they know, from watches and their own writes
//!  queue.rs     what to look at, now or later     write.rs   what they want written
//!  way.rs       how they reach the API: a `kube::Client`, or without a wire where it is in the same process
//!
//!  manager.rs   built-in controllers over one set of watches (world.rs), embedded cluster only:
//!               daemon_set.rs (revision.rs)  deployment.rs  replica_set.rs  stateful_set.rs  job.rs
//!               scheduler.rs  budget.rs  gc.rs           who may be where: placement.rs, quantity.rs
//!  operator.rs  ClusterPolicy and NVIDIADriver into DaemonSets (render.rs, clients.rs, crds.rs)   anywhere
//!  sentinel.rs  NVSentinel: conditions, quarantine, circuit breaker                           anywhere
//!  kubelet.rs   all simulated nodes, as behaviour.rs says; a pod is for something (role.rs), has plans
//!               (course.rs), lives (pod_life.rs) beside others (on_node.rs) and tells (pod_status.rs);
//!               our own agents may run in driver pods (agents.rs);
//!               DRA plugins (dra.rs) publish devices (slices.rs)                              anywhere
//! ```
//!
//! Everything is ordered and seeded: on a paused current-thread runtime two runs make the same requests.

mod agents;
mod behaviour;
mod budget;
mod cache;
mod clients;
mod clock;
mod course;
pub(crate) mod crds;
mod daemon_set;
mod deployment;
mod dra;
mod drive;
mod gc;
mod job;
mod kubelet;
mod manager;
mod object;
mod on_node;
mod operator;
mod placement;
mod pod_life;
mod pod_status;
mod quantity;
mod queue;
mod render;
mod replica_set;
mod revision;
mod role;
mod scheduler;
mod sentinel;
mod slices;
mod stateful_set;
mod way;
mod world;
mod write;

#[cfg(test)]
mod tests;

use futures::{StreamExt, stream};
use jiff::Timestamp;
use kube::Client;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

pub use agents::AGENT;
pub use behaviour::{
    Behaviour, BehaviourHandle, ClientFault, DriverFault, Fault, GateOutcome, GateRule, Hosts, JobRule,
    Machines, Nodes, Timing,
};
pub(crate) use cache::{Informer, changed};
pub(crate) use clients::GPU;
pub use clients::{OPERANDS, Operand};
pub(crate) use dra::{DEPLOY_DRA, is_plugin};
pub use dra::{DRA_DRIVER, Dra, DraIdentity};
pub use kubelet::{RUN_SECONDS, STOP_SECONDS};
pub(crate) use object::is_ready;
pub use operator::{
    DEPLOY_DRIVER, DEPLOY_VALIDATOR, DRIVER_APP, DRIVER_COMPONENT, GPU_PRESENT, KERNEL, NAMESPACE,
    VALIDATOR_APP,
};
pub(crate) use operator::{cluster_policy_kind, nvidia_driver_kind};
pub use render::SAFE_LOAD_CONFIG;
pub(crate) use sentinel::{quarantined_by_us, released};
pub(crate) use way::Way;

use crate::api::ApiServer;
use clock::Clock;
use drive::drive;
use kubelet::Kubelets;
use manager::Manager;
use operator::Operator;
use sentinel::Sentinel;

/// Running actors. Dropping it stops them all.
#[derive(Debug)]
pub struct Actors {
    behaviour: BehaviourHandle,
    tasks: JoinSet<()>,
}

impl Actors {
    /// Everybody: what a control plane has anyway, the operator and the kubelets. `epoch` is the time now.
    pub fn embedded(api: &ApiServer, epoch: Timestamp, seed: u64, behaviour: Behaviour) -> Self {
        let clock = Clock::starting_at(epoch);
        let way_for = |user: &str| Way::Inside(api.inside(user));
        let mut tasks = JoinSet::new();
        tasks.spawn(drive(Manager::new(way_for, clock), seed, stream::pending().boxed()));
        let behaviour = fleet(&mut tasks, [way_for("operator"), way_for("kubelet")], clock, seed, behaviour);
        Self { behaviour, tasks }
    }

    /// Operator and kubelets only, for a cluster that has a control plane of its own.
    pub fn fleet_only(client: Client, epoch: Timestamp, seed: u64, behaviour: Behaviour) -> Self {
        let mut tasks = JoinSet::new();
        let way = Way::from(client);
        let behaviour = fleet(&mut tasks, [way.clone(), way], Clock::starting_at(epoch), seed, behaviour);
        Self { behaviour, tasks }
    }

    /// NVSentinel moves in, as somebody with a client. It begins its work when its circuit breaker is there.
    pub fn add_nvsentinel(&mut self, client: Client, epoch: Timestamp, seed: u64) {
        self.add_nvsentinel_on(client.into(), epoch, seed);
    }

    /// NVSentinel moves in. It begins its work when its circuit breaker is there.
    pub(crate) fn add_nvsentinel_on(&mut self, way: Way, epoch: Timestamp, seed: u64) {
        let sentinel = Sentinel::new(way, Clock::starting_at(epoch));
        self.tasks.spawn(drive(sentinel, seed, stream::pending().boxed()));
    }

    /// Changes how the simulated machines behave, while they run.
    pub fn behaviour(&self) -> BehaviourHandle {
        self.behaviour.clone()
    }
}

fn fleet(
    tasks: &mut JoinSet<()>,
    [operator, kubelet]: [Way; 2],
    clock: Clock,
    seed: u64,
    behaviour: Behaviour,
) -> BehaviourHandle {
    let behaviour = BehaviourHandle::new(behaviour);
    tasks.spawn(drive(Operator::new(operator), seed, stream::pending().boxed()));
    let (ended, ends) = mpsc::unbounded_channel();
    let kubelets = Kubelets::new(kubelet, clock, seed, behaviour.subscribe(), ended);
    let told = stream::unfold(behaviour.subscribe(), async |mut told| {
        told.changed().await.ok()?;
        Some((kubelet::Task::Everything, told))
    });
    let ends = stream::unfold(ends, async |mut ends| Some((kubelet::Task::Pod(ends.recv().await?), ends)));
    tasks.spawn(drive(kubelets, seed, stream::select(told, ends).boxed()));
    behaviour
}
