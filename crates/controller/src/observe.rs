//! Watches, as one stream of observations. No polling: after the first list only changes come.
//!
//! A watch that breaks is taken up again by itself; the stream tells of the error and waits a little first. One that only
//! stands still cannot be told from a quiet cluster: a new leader lists the nodes once more, see [`Watches::list_nodes`].

use std::time::Duration;

use futures::stream::{self, BoxStream, SelectAll, StreamExt};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::core::NamespaceResourceScope;
use kube::core::{ApiResource, DynamicObject, GroupVersionKind, PartialObjectMeta};
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, Resource};
use pitcrew_core::api::{ClusterPolicy, DriverPolicy, NVIDIADriver, NicClusterPolicy, Rollout};
use pitcrew_core::contract::{
    GATE_LABEL, GPU_OPERATOR_LEASE, GPU_OPERATOR_SELECTOR, MATRIX_CONFIG_MAP, nvsentinel,
};
use serde::de::DeserializeOwned;
use tokio::sync::oneshot;

use crate::scope::Kind;
use crate::wire;

/// Something that was seen.
#[expect(clippy::large_enum_variant, reason = "an observation is taken up at once, never kept")]
pub(crate) enum Observation {
    Node(Event<wire::Node>),
    Pod(Event<wire::Pod>),
    DaemonSet(Event<DaemonSet>),
    Revision(Event<wire::Revision>),
    Budget(Event<PodDisruptionBudget>),
    DriverPolicy(Event<DriverPolicy>),
    Rollout(Event<Rollout>),
    ClusterPolicy(Event<ClusterPolicy>),
    NvidiaDriver(Event<NVIDIADriver>),
    NicClusterPolicy(Event<NicClusterPolicy>),
    Lease(Event<Lease>),
    Deployment(Event<Deployment>),
    Definition(Event<PartialObjectMeta<CustomResourceDefinition>>),
    Claim(Event<DynamicObject>),
    Slice(Event<DynamicObject>),
    Breaker(Event<ConfigMap>),
    GateJob(Event<Job>),
    GatePod(Event<Pod>),
    Matrix(Event<ConfigMap>),
    /// A watch broke and is taken up again.
    Broken(Kind, watcher::Error),
}

/// The watches that every cluster can serve, and room for those whose definitions appear later.
pub(crate) struct Watches {
    client: Client,
    /// Our own namespace.
    namespace: String,
    streams: SelectAll<BoxStream<'static, Observation>>,
    /// The watch of the nodes ends when this does.
    nodes: Option<oneshot::Sender<()>>,
}

impl Watches {
    /// Starts the watches of these kinds.
    pub(crate) fn start(client: Client, namespace: &str, kinds: impl Iterator<Item = Kind>) -> Self {
        let namespace = namespace.to_owned();
        let mut watches = Self { client, namespace, streams: SelectAll::new(), nodes: None };
        kinds.for_each(|kind| watches.add_kind(kind));
        watches
    }

    /// Starts the watch of one kind: at the beginning, or when its definition is there.
    pub(crate) fn add_kind(&mut self, kind: Kind) {
        let all = watcher::Config::default;
        match kind {
            Kind::Definition => self.add(kind, all(), Observation::Definition),
            Kind::DriverPolicy => self.add(kind, all(), Observation::DriverPolicy),
            Kind::Rollout => self.add(kind, all(), Observation::Rollout),
            Kind::Node => self.list_nodes(),
            Kind::Pod => self.add(kind, all(), Observation::Pod),
            Kind::DaemonSet => self.add(kind, all(), Observation::DaemonSet),
            Kind::Revision => self.add(kind, all(), Observation::Revision),
            Kind::Budget => self.add(kind, all(), Observation::Budget),
            Kind::ClusterPolicy => self.add(kind, all(), Observation::ClusterPolicy),
            Kind::NvidiaDriver => self.add(kind, all(), Observation::NvidiaDriver),
            Kind::NicClusterPolicy => self.add(kind, all(), Observation::NicClusterPolicy),
            Kind::Lease => {
                let operator = format!("metadata.name={GPU_OPERATOR_LEASE}");
                self.add(kind, all().fields(&operator), Observation::Lease);
            }
            Kind::Deployment => self.add(kind, all().labels(GPU_OPERATOR_SELECTOR), Observation::Deployment),
            Kind::Breaker => self.add(kind, all().fields(&breaker()), Observation::Breaker),
            Kind::GateJob => self.add_gates(kind, Observation::GateJob),
            Kind::GatePod => self.add_gates(kind, Observation::GatePod),
            Kind::Matrix => {
                let ours = Api::namespaced(self.client.clone(), &self.namespace);
                self.streams.push(observe(ours, kind, all().fields(&matrix()), Observation::Matrix));
            }
            Kind::Claim => self.streams.push(allocations(self.client.clone(), &CLAIMS)),
            Kind::Slice => self.streams.push(allocations(self.client.clone(), &SLICES)),
            // Readers look for it themselves.
            Kind::Leader => {}
        }
    }

    /// Lists the nodes, and watches them from there. A watch of them that there was ends.
    pub(crate) fn list_nodes(&mut self) {
        let (watching, ended) = oneshot::channel();
        self.nodes = Some(watching);
        let nodes = Api::all(self.client.clone());
        let watch = observe(nodes, Kind::Node, watcher::Config::default(), Observation::Node);
        self.streams.push(watch.take_until(ended).boxed());
    }

    fn add<K>(&mut self, kind: Kind, config: watcher::Config, wrap: fn(Event<K>) -> Observation)
    where
        K: Resource<DynamicType = ()> + DeserializeOwned + Clone + std::fmt::Debug + Send + 'static,
    {
        self.streams.push(observe(Api::<K>::all(self.client.clone()), kind, config, wrap));
    }

    /// Gates' Jobs and pods are in one place, and few.
    fn add_gates<K>(&mut self, kind: Kind, wrap: fn(Event<K>) -> Observation)
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
        K: DeserializeOwned + Clone + std::fmt::Debug + Send + 'static,
    {
        let api = Api::<K>::namespaced(self.client.clone(), &self.namespace);
        let gates = watcher::Config::default().labels(GATE_LABEL);
        self.streams.push(observe(api, kind, gates, wrap));
    }

    pub(crate) async fn next(&mut self) -> Option<Observation> {
        self.streams.next().await
    }
}

fn observe<K>(
    api: Api<K>,
    kind: Kind,
    config: watcher::Config,
    wrap: fn(Event<K>) -> Observation,
) -> BoxStream<'static, Observation>
where
    K: Resource + DeserializeOwned + Clone + std::fmt::Debug + Send + 'static,
    K::DynamicType: Clone + Send,
{
    let events = kube::runtime::watcher(api, config).boxed();
    stream::unfold((events, 0_u32), move |(mut events, failures)| async move {
        if failures > 0 {
            tokio::time::sleep(pause_after(failures)).await;
        }
        Some(match events.next().await? {
            Ok(event) => (wrap(event), (events, 0)),
            Err(error) => (Observation::Broken(kind, error), (events, failures + 1)),
        })
    })
    .boxed()
}

/// The field selector of NVSentinel's circuit breaker.
pub(crate) fn breaker() -> String {
    format!("metadata.namespace={},metadata.name={}", nvsentinel::NAMESPACE, nvsentinel::BREAKER)
}

/// The field selector of the version matrix's ConfigMap, in our own namespace.
pub(crate) fn matrix() -> String {
    format!("metadata.name={MATRIX_CONFIG_MAP}")
}

/// A kind of dynamic resource allocation, which a cluster may serve in one of several versions.
pub(crate) struct Allocation {
    kind: Kind,
    name: &'static str,
    pub(crate) fields: Option<&'static str>,
    /// A reader does without it.
    pub(crate) may_be_refused: bool,
    pub(crate) wrap: fn(Event<DynamicObject>) -> Observation,
}

/// Who has which devices.
pub(crate) const CLAIMS: Allocation = Allocation {
    kind: Kind::Claim,
    name: "ResourceClaim",
    fields: None,
    may_be_refused: false,
    wrap: Observation::Claim,
};
/// Which devices NVIDIA's driver offers.
pub(crate) const SLICES: Allocation = Allocation {
    kind: Kind::Slice,
    name: "ResourceSlice",
    fields: Some("spec.driver=gpu.nvidia.com"),
    may_be_refused: true,
    wrap: Observation::Slice,
};

impl Allocation {
    /// In the newest version that this cluster serves, if it serves them.
    pub(crate) async fn resource(&self, client: &Client) -> kube::Result<Option<ApiResource>> {
        let groups = client.list_api_groups().await?;
        let group = groups.groups.iter().find(|group| group.name == ALLOCATION_GROUP);
        let served = |version: &&str| group.is_some_and(|g| g.versions.iter().any(|v| v.version == *version));
        let newest = ["v1", "v1beta2", "v1beta1"].into_iter().find(served);
        let kind = |version| GroupVersionKind::gvk(ALLOCATION_GROUP, version, self.name);
        Ok(newest.map(|version| ApiResource::from_gvk(&kind(version))))
    }
}

const ALLOCATION_GROUP: &str = "resource.k8s.io";

/// The watch of such a kind. A cluster that serves none has none.
fn allocations(client: Client, allocation: &'static Allocation) -> BoxStream<'static, Observation> {
    let Allocation { kind, wrap, fields, .. } = allocation;
    let find = async move {
        let mut failures = 0;
        let resource = loop {
            match allocation.resource(&client).await {
                Ok(resource) => break resource,
                Err(error) => tracing::warn!(%error, "cannot ask which API groups are served; asks again"),
            }
            failures += 1;
            tokio::time::sleep(pause_after(failures)).await;
        };
        let Some(resource) = resource else {
            let none = [Event::Init, Event::InitDone].map(wrap);
            return stream::iter(none).chain(stream::pending()).boxed();
        };
        let config =
            watcher::Config { field_selector: fields.map(str::to_owned), ..watcher::Config::default() };
        observe(Api::all_with(client, &resource), *kind, config, *wrap)
    };
    stream::once(find).flatten().boxed()
}

/// Without chance, so that a run on virtual time can be repeated.
fn pause_after(failures: u32) -> Duration {
    Duration::from_millis(500_u64.saturating_mul(1 << failures.min(6)).min(30_000))
}
