//! The simulated GPU fleet in a real control plane: nodes, ClusterPolicy, workloads, kubelets and operator.

use std::time::Duration;

use anyhow::{Context as _, Result};
use jiff::Timestamp;
use kube::Client;
use pitcrew_sim::actors::{Actors, Behaviour, DraIdentity, Timing};
use pitcrew_sim::fleet::Fleet;
use pitcrew_sim::plane::{Plane, User};

/// What the fleet's drivers can be upgraded to.
pub(crate) const NEXT_DRIVER: &str = "550.54.15";

/// Any number: the same fleet behaves the same way each time.
const SEED: u64 = 1;

/// Fills the plane with a fleet, starts its kubelets and its operator, and waits until all pods are Ready. The
/// fleet lives as long as what it returns.
pub(crate) async fn install(plane: &Plane, nodes: usize, neighbours: bool) -> Result<Actors> {
    let admin = Client::try_from(plane.config(User::Admin)).context("make a client for the admin")?;
    let machines = Client::try_from(plane.config(User::Kubelet)).context("make a client for the kubelets")?;
    let fleet = Fleet::new(nodes);
    let fleet = if neighbours {
        fleet.with_clients().with_dra(DraIdentity::NvidiaChart).with_nvsentinel()
    } else {
        fleet
    };
    fleet.install(&admin).await.context("install the fleet")?;
    let mut actors = Actors::fleet_only(machines.clone(), now(), SEED, Behaviour::default());
    if neighbours {
        actors.add_nvsentinel(machines, now(), SEED);
    }
    fleet.wait_ready(&admin).await;
    // Quick to set up, then at a pace that a person can follow.
    actors.behaviour().change(|behaviour| behaviour.timing = watchable());
    Ok(actors)
}

/// A node's upgrade takes half a minute: long enough to see each state, short enough to wait for.
fn watchable() -> Timing {
    Timing {
        driver_start: Duration::from_secs(12),
        driver_stop: Duration::from_secs(2),
        validator_start: Duration::from_secs(4),
        workload_start: Duration::from_secs(3),
        workload_stop: Duration::from_secs(2),
        job_run: Duration::from_secs(5),
        gate_run: Duration::from_secs(2),
        crash_after: Duration::from_secs(3),
        jitter: 0.3,
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "a real control plane runs on real time; this is where it enters"
)]
fn now() -> Timestamp {
    Timestamp::now()
}
