//! A whole cluster with a fleet in it, ready for a controller: embedded, or on a real control plane.
//!
//! What runs in it sees only `kube::Client`s and a clock, so scenarios, demo and benchmarks are written once.

use std::collections::BTreeSet;
use std::sync::LazyLock;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Patch, PatchParams, PostParams};
use kube::runtime::wait::{Condition as _, await_condition, conditions};
use kube::{Api, Client, ResourceExt};
use pitcrew_controller::{Clock, Config, Controller};
use pitcrew_core::api::{ClusterPolicy, crds};
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::actors::{Actors, Behaviour, NAMESPACE, Way};
use crate::api::ApiServer;
use crate::fleet::{self, Fleet};

/// The moment at which virtual time begins: any fixed one will do.
pub(crate) const EPOCH: Timestamp = Timestamp::constant(1_767_225_600, 0);

/// A fleet that is not up by then will not come up. On virtual time this costs nothing.
const READY_WITHIN: Duration = Duration::from_mins(10);

/// pitcrew's own, made once: schemas take longer to make than a small upgrade takes to play.
static DEFINITIONS: LazyLock<Vec<CustomResourceDefinition>> = LazyLock::new(crds);

/// A cluster with a fleet in it.
pub struct Cluster {
    /// For the person who works with the cluster.
    pub admin: Client,
    /// For the controller under test.
    pub controller: Client,
    /// The cluster's time.
    pub clock: Clock,
    /// Who works in it.
    pub actors: Actors,
    /// The embedded API, if it is that.
    pub api: Option<ApiServer>,
}

/// Why a cluster could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum SetUpError {
    /// The fleet could not be installed.
    #[error("install the fleet")]
    Fleet(#[from] fleet::Error),
    /// pitcrew's own definitions could not be installed.
    #[error("install pitcrew's custom resource definitions")]
    Definitions(#[source] kube::Error),
    /// Not all pods of the fleet came up.
    #[error("the fleet's pods are not all Ready after {0} s")]
    NotReady(u64),
    /// They were installed, but are not served.
    #[error("wait for pitcrew's custom resource definitions")]
    Served(#[source] kube::runtime::wait::Error),
}

impl Cluster {
    /// An embedded cluster in which everything runs already. The clock is tokio's: paused, it is virtual.
    pub async fn embedded(fleet: &Fleet, seed: u64, behaviour: Behaviour) -> Result<Self, SetUpError> {
        Self::on(ApiServer::new(EPOCH), fleet, seed, behaviour).await
    }

    /// The same on an API that somebody listens to; it has just begun.
    pub(crate) async fn on(
        api: ApiServer,
        fleet: &Fleet,
        seed: u64,
        behaviour: Behaviour,
    ) -> Result<Self, SetUpError> {
        let clock = Clock::starting_at(EPOCH);
        let mut actors = Actors::embedded(&api, EPOCH, seed, behaviour);
        if fleet.nvsentinel {
            actors.add_nvsentinel_on(Way::Inside(api.inside("nvsentinel")), EPOCH, seed);
        }
        let (admin, controller) = (api.client_as("admin"), api.client_as("pitcrew"));
        let cluster = Self { admin, controller, clock, actors, api: Some(api) };
        cluster.set_up(fleet).await
    }

    /// The same on a real control plane, on real time.
    pub async fn real(
        admin: Client,
        controller: Client,
        machines: Client,
        fleet: &Fleet,
        seed: u64,
        behaviour: Behaviour,
    ) -> Result<Self, SetUpError> {
        let clock = Clock::System;
        let mut actors = Actors::fleet_only(machines.clone(), clock.now(), seed, behaviour);
        if fleet.nvsentinel {
            actors.add_nvsentinel(machines, clock.now(), seed);
        }
        Self { admin, controller, clock, actors, api: None }.set_up(fleet).await
    }

    async fn set_up(self, fleet: &Fleet) -> Result<Self, SetUpError> {
        install_definitions(&self.admin).await?;
        fleet.install(&self.admin).await?;
        let ready = timeout(READY_WITHIN, fleet.wait_ready(&self.admin)).await;
        ready.map_err(|_| SetUpError::NotReady(READY_WITHIN.as_secs()))?;
        Ok(self)
    }

    /// A controller for this cluster, not started yet.
    pub fn new_controller(&self, identity: &str) -> Controller {
        let controller = controller(self.controller.clone(), self.clock.clone(), identity, None);
        controller.asks(self.actors.behaviour().prometheus())
    }

    /// Changes the driver version as a user would.
    pub async fn set_driver_version(&self, version: &str) -> kube::Result<()> {
        self.patch_cluster_policy(json!({"spec": {"driver": {"version": version}}})).await
    }

    /// Merges `patch` into the ClusterPolicy.
    pub async fn patch_cluster_policy(&self, patch: Value) -> kube::Result<()> {
        let api = Api::<ClusterPolicy>::all(self.admin.clone());
        api.patch("cluster-policy", &PatchParams::default(), &Patch::Merge(patch)).await.map(drop)
    }
}

/// A controller for the simulated fleet, not started yet.
pub fn controller(client: Client, clock: Clock, identity: &str, own_node: Option<&str>) -> Controller {
    let (namespace, identity) = (NAMESPACE.to_owned(), identity.to_owned());
    let (own_node, disabled) = (own_node.map(Into::into), BTreeSet::new());
    Controller::new(client, Config { namespace, identity, own_node, clock, disabled })
}

/// Installs what `pitcrew crd` prints; what is there already stays as it is.
pub async fn install_definitions(client: &Client) -> Result<(), SetUpError> {
    let api = Api::<CustomResourceDefinition>::all(client.clone());
    for definition in DEFINITIONS.iter() {
        match api.create(&PostParams::default(), definition).await {
            // The embedded API serves it at once.
            Ok(created) if conditions::is_crd_established().matches_object(Some(&created)) => continue,
            Ok(_) => {}
            Err(kube::Error::Api(status)) if status.is_already_exists() => {}
            Err(error) => return Err(SetUpError::Definitions(error)),
        }
        let name = definition.name_any();
        let established = await_condition(api.clone(), &name, conditions::is_crd_established());
        established.await.map_err(SetUpError::Served)?;
    }
    Ok(())
}
