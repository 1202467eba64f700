//! Writes as values: what an actor wants to tell the API, and how the answer goes into its view.
//!
//! A write belongs to the task that asked for it. When it fails, the task is looked at again later; nothing is
//! retried blindly, because by then the cluster may want something else.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, stream};
use k8s_openapi::api::apps::v1::{ControllerRevision, DaemonSet, Deployment, ReplicaSet, StatefulSet};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{DeleteParams, Preconditions};
use kube::{Api, Client, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::time::error::Elapsed;
use tokio::time::timeout;

use super::cache::{Cache, Key};
use super::way::{Merge, Way};

/// Enough to keep a server busy, few enough that a fleet's start does not look like an attack.
const WRITES_IN_FLIGHT_MAX: usize = 32;
/// A call that takes longer has an unknown outcome; the watch will tell.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// Puts a write's answer into the actor's view.
pub(super) type Fold<A> = Box<dyn FnOnce(&mut A) + Send>;

/// One request, made for a task.
pub(super) struct Write<A> {
    request: BoxFuture<'static, kube::Result<Fold<A>>>,
}

/// Why a write did not happen, or may not have happened.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error("the API refused")]
    Refused(#[source] kube::Error),
    #[error("no answer within {CALL_TIMEOUT:?}")]
    TimedOut,
}

impl Failure {
    /// Conflicts and vanished objects are what happens when several work on one cluster.
    pub(super) fn is_ordinary(&self) -> bool {
        matches!(self, Self::Refused(kube::Error::Api(status)) if status.code == 404 || status.code == 409)
    }
}

/// An actor that has a cache of `K`.
pub(super) trait Holds<K>: 'static {
    /// The cache that answers go into.
    fn cache(&mut self) -> &mut Cache<K>;
}

/// A kind of object that actors write.
pub(super) trait Kind:
    Resource<DynamicType = ()> + Clone + Debug + Serialize + DeserializeOwned + Send + Sync + 'static
{
    /// The API of this kind in a namespace; cluster-scoped kinds ignore it.
    fn api(client: &Client, namespace: &str) -> Api<Self>;
}

macro_rules! namespaced {
    ($($kind:ty),*) => {$(
        impl Kind for $kind {
            fn api(client: &Client, namespace: &str) -> Api<Self> {
                Api::namespaced(client.clone(), namespace)
            }
        }
    )*};
}

namespaced!(
    Pod,
    DaemonSet,
    ControllerRevision,
    Deployment,
    ReplicaSet,
    StatefulSet,
    Job,
    PodDisruptionBudget,
    ConfigMap
);

macro_rules! cluster_wide {
    ($($kind:ty),*) => {$(
        impl Kind for $kind {
            fn api(client: &Client, _namespace: &str) -> Api<Self> {
                Api::all(client.clone())
            }
        }
    )*};
}

cluster_wide!(Node, ResourceSlice);

impl<A: 'static> Write<A> {
    /// Any request; `fold` says what its answer means.
    pub(super) fn new(request: impl Future<Output = kube::Result<Fold<A>>> + Send + 'static) -> Self {
        Self { request: request.boxed() }
    }

    pub(super) fn create<K: Kind>(way: &Way, object: K) -> Self
    where
        A: Holds<K>,
    {
        let way = way.clone();
        Self::new(async move { Ok(applied(way.create(&object).await?)) })
    }

    /// Replaces the whole object; the API refuses if somebody was faster.
    pub(super) fn replace<K: Kind>(way: &Way, object: K) -> Self
    where
        A: Holds<K>,
    {
        let way = way.clone();
        Self::new(async move { Ok(applied(way.replace(&object).await?)) })
    }

    /// Merges `patch` into the object.
    pub(super) fn patch<K: Kind>(way: &Way, object: &K, patch: Value) -> Self
    where
        A: Holds<K>,
    {
        let (key, way) = (Key::of(object), way.clone());
        let patch = pinned(patch, object.meta().uid.as_deref());
        Self::new(async move { Ok(applied(way.patch::<K>(&key, Merge::Object, patch).await?)) })
    }

    /// Merges `status` into the object's status.
    pub(super) fn status<K: Kind>(way: &Way, object: &K, status: &impl Serialize) -> Self
    where
        A: Holds<K>,
    {
        let (key, uid, way) = (Key::of(object), object.meta().uid.clone(), way.clone());
        let status = serde_json::to_value(status);
        Self::new(async move {
            let status = status.map_err(kube::Error::SerdeError)?;
            let patch = pinned(json!({"status": status}), uid.as_deref());
            match way.patch::<K>(&key, Merge::Status, patch).await {
                Err(kube::Error::Api(status)) if status.code == 404 => Ok(forgotten::<A, K>(key, uid)),
                answer => Ok(applied(answer?)),
            }
        })
    }

    /// Merges `status` into the status of a built-in object, lists by their keys: several write conditions.
    pub(super) fn merge_status<K: Kind>(way: &Way, object: &K, status: &Value) -> Self
    where
        A: Holds<K>,
    {
        let (key, way, patch) = (Key::of(object), way.clone(), json!({"status": status}));
        Self::new(async move { Ok(applied(way.patch::<K>(&key, Merge::StatusByKeys, patch).await?)) })
    }

    /// Deletes exactly this object, not a successor of the same name.
    pub(super) fn delete<K: Kind>(way: &Way, object: &K, grace_seconds: Option<u32>) -> Self
    where
        A: Holds<K>,
    {
        let (key, uid, way) = (Key::of(object), object.meta().uid.clone(), way.clone());
        let preconditions = Preconditions { uid: uid.clone(), resource_version: None };
        let params = DeleteParams {
            grace_period_seconds: grace_seconds,
            preconditions: Some(preconditions),
            ..DeleteParams::background()
        };
        Self::new(async move {
            match way.delete::<K>(&key, &params).await {
                Ok(Some(terminating)) => Ok(applied(terminating)),
                Ok(None) => Ok(forgotten::<A, K>(key, uid)),
                Err(kube::Error::Api(status)) if status.code == 404 => Ok(forgotten::<A, K>(key, uid)),
                Err(error) => Err(error),
            }
        })
    }
}

/// A UID in a patch makes the API refuse it for a successor of the same name.
fn pinned(mut patch: Value, uid: Option<&str>) -> Value {
    if let (Some(uid), Some(patch)) = (uid, patch.as_object_mut()) {
        let metadata = patch.entry("metadata").or_insert_with(|| Value::Object(serde_json::Map::new()));
        metadata["uid"] = Value::String(uid.to_owned());
    }
    patch
}

fn applied<A: Holds<K>, K: Kind>(object: Arc<K>) -> Fold<A> {
    Box::new(move |actor| actor.cache().apply(object))
}

fn forgotten<A: Holds<K>, K: Kind>(key: Key, uid: Option<String>) -> Fold<A> {
    Box::new(move |actor| actor.cache().forget(&key, uid.as_deref()))
}

type Answer<A> = Result<kube::Result<Fold<A>>, Elapsed>;

/// Boxed: the compiler cannot prove that a stream of closures over borrowed folds is `Send`.
fn answered<A: 'static, T: Send + 'static>(task: T, write: Write<A>) -> BoxFuture<'static, (T, Answer<A>)> {
    async move { (task, timeout(CALL_TIMEOUT, write.request).await) }.boxed()
}

/// Makes the requests, a bounded number at a time, and folds the answers in the order of the requests.
pub(super) async fn run_all<A: 'static, T: Send + 'static>(
    actor: &mut A,
    writes: Vec<(T, Write<A>)>,
) -> Vec<(T, Failure)> {
    let requests = writes.into_iter().map(|(task, write)| answered(task, write));
    let mut answers = stream::iter(requests).buffered(WRITES_IN_FLIGHT_MAX);
    let mut failed = Vec::new();
    while let Some((task, answer)) = answers.next().await {
        match answer {
            Ok(Ok(fold)) => fold(actor),
            Ok(Err(error)) => failed.push((task, Failure::Refused(error))),
            Err(_elapsed) => failed.push((task, Failure::TimedOut)),
        }
    }
    failed
}
