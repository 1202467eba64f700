//! Watches, as one stream of observations. No polling: after the first list only changes come.
//!
//! A watch that breaks is taken up again by itself; the stream tells of the error and waits a little first.

use std::time::Duration;

use futures::stream::{self, BoxStream, SelectAll, StreamExt};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::core::{ApiResource, DynamicObject, GroupVersionKind, PartialObjectMeta};
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, Resource};
use pitcrew_core::api::{ClusterPolicy, DriverPolicy, NVIDIADriver, NicClusterPolicy, Rollout};
use pitcrew_core::contract::{GPU_OPERATOR_LEASE, GPU_OPERATOR_SELECTOR, nvsentinel};
use serde::de::DeserializeOwned;

use crate::wire;

/// What kinds of objects are watched.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Kind {
    Node,
    Pod,
    DaemonSet,
    Revision,
    Budget,
    DriverPolicy,
    Rollout,
    ClusterPolicy,
    NvidiaDriver,
    NicClusterPolicy,
    Lease,
    Deployment,
    Definition,
    Claim,
    Breaker,
}

/// Something that was seen.
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
    Breaker(Event<ConfigMap>),
    /// A watch broke and is taken up again.
    Broken(Kind, watcher::Error),
}

/// The watches that every cluster can serve, and room for those whose definitions appear later.
pub(crate) struct Watches {
    client: Client,
    streams: SelectAll<BoxStream<'static, Observation>>,
}

/// Kinds without whose first list nothing can be judged.
pub(crate) const REQUIRED: [Kind; 12] = [
    Kind::Node,
    Kind::Pod,
    Kind::DaemonSet,
    Kind::Revision,
    Kind::Budget,
    Kind::DriverPolicy,
    Kind::Rollout,
    Kind::Lease,
    Kind::Deployment,
    Kind::Definition,
    Kind::Claim,
    Kind::Breaker,
];

impl Watches {
    pub(crate) fn start(client: Client) -> Self {
        let mut watches = Self { client, streams: SelectAll::new() };
        let all = watcher::Config::default;
        watches.add(Kind::Definition, all(), Observation::Definition);
        watches.add(Kind::DriverPolicy, all(), Observation::DriverPolicy);
        watches.add(Kind::Rollout, all(), Observation::Rollout);
        watches.add(Kind::Node, all(), Observation::Node);
        watches.add(Kind::Pod, all(), Observation::Pod);
        watches.add(Kind::DaemonSet, all(), Observation::DaemonSet);
        watches.add(Kind::Revision, all(), Observation::Revision);
        watches.add(Kind::Budget, all(), Observation::Budget);
        let operator_lease = format!("metadata.name={GPU_OPERATOR_LEASE}");
        watches.add(Kind::Lease, all().fields(&operator_lease), Observation::Lease);
        watches.add(Kind::Deployment, all().labels(GPU_OPERATOR_SELECTOR), Observation::Deployment);
        watches.add(Kind::Breaker, all().fields(&breaker()), Observation::Breaker);
        watches.streams.push(claims(watches.client.clone()));
        watches
    }

    /// Starts the watch of a kind whose definition is there now.
    pub(crate) fn add_optional(&mut self, kind: Kind) {
        let all = watcher::Config::default;
        match kind {
            Kind::ClusterPolicy => self.add(kind, all(), Observation::ClusterPolicy),
            Kind::NvidiaDriver => self.add(kind, all(), Observation::NvidiaDriver),
            Kind::NicClusterPolicy => self.add(kind, all(), Observation::NicClusterPolicy),
            _ => {}
        }
    }

    fn add<K>(&mut self, kind: Kind, config: watcher::Config, wrap: fn(Event<K>) -> Observation)
    where
        K: Resource<DynamicType = ()> + DeserializeOwned + Clone + std::fmt::Debug + Send + 'static,
    {
        self.streams.push(observe(Api::<K>::all(self.client.clone()), kind, config, wrap));
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

/// Resource claims, in the newest version that this cluster serves. A cluster that serves none has none.
fn claims(client: Client) -> BoxStream<'static, Observation> {
    let find = async move {
        let mut failures = 0;
        let resource = loop {
            match claims_resource(&client).await {
                Ok(resource) => break resource,
                Err(error) => tracing::warn!(%error, "cannot ask which API groups are served; asks again"),
            }
            failures += 1;
            tokio::time::sleep(pause_after(failures)).await;
        };
        let Some(resource) = resource else {
            let none = [Event::Init, Event::InitDone].map(Observation::Claim);
            return stream::iter(none).chain(stream::pending()).boxed();
        };
        let api = Api::all_with(client, &resource);
        observe(api, Kind::Claim, watcher::Config::default(), Observation::Claim)
    };
    stream::once(find).flatten().boxed()
}

const CLAIMS_GROUP: &str = "resource.k8s.io";

/// The newest version of resource claims that this cluster serves, if it serves them.
pub(crate) async fn claims_resource(client: &Client) -> kube::Result<Option<ApiResource>> {
    let groups = client.list_api_groups().await?;
    let group = groups.groups.iter().find(|group| group.name == CLAIMS_GROUP);
    let served = |version: &&str| group.is_some_and(|g| g.versions.iter().any(|v| v.version == *version));
    let newest = ["v1", "v1beta2", "v1beta1"].into_iter().find(served);
    let kind = |version| GroupVersionKind::gvk(CLAIMS_GROUP, version, "ResourceClaim");
    Ok(newest.map(|version| ApiResource::from_gvk(&kind(version))))
}

/// Without chance, so that a run on virtual time can be repeated.
fn pause_after(failures: u32) -> Duration {
    Duration::from_millis(500_u64.saturating_mul(1 << failures.min(6)).min(30_000))
}
