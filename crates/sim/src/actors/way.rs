//! How an actor reaches the API: over the wire, or, where the API is in the same process, without one.

use std::fmt::Debug;
use std::sync::Arc;

use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher::{self, Event, watcher};
use kube::runtime::{WatchStreamExt, utils::Backoff};
use kube::{Api, Client, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::time::Duration;

use super::cache::Key;
use super::write::Kind;
use crate::api::inside::{Inside, Target};

/// Long watches, because each reconnect is a request per watch and virtual days are short. Allowed since kube 5.
const WATCH_TIMEOUT_SECONDS: u32 = 3600;
/// Fixed, because kube's default back-off draws from the process' own randomness.
const WATCH_RETRY: Duration = Duration::from_millis(500);

/// What a watch brings.
pub(super) type Events<K> = BoxStream<'static, watcher::Result<Event<Arc<K>>>>;

/// A way to the API.
#[derive(Clone)]
pub(crate) enum Way {
    /// Over the wire: any cluster.
    Wire(Client),
    /// In the same process: the embedded one.
    Inside(Inside),
}

impl From<Client> for Way {
    fn from(client: Client) -> Self {
        Self::Wire(client)
    }
}

/// What is watched of a kind.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Part<'a> {
    /// Empty: all namespaces.
    pub(crate) namespace: &'a str,
    /// Empty: all objects.
    pub(crate) name: &'a str,
}

/// A change of an object, in one of the ways that the API knows.
#[derive(Clone, Copy, Debug)]
pub(super) enum Merge {
    /// Of the object.
    Object,
    /// Of its status.
    Status,
    /// Of its status, lists by their keys.
    StatusByKeys,
}

impl Way {
    /// A client for what is seldom asked.
    pub(super) fn client(&self) -> Client {
        match self {
            Self::Wire(client) => client.clone(),
            Self::Inside(inside) => inside.client(),
        }
    }

    /// A client for a program that is somebody else there, where it can be told apart: in the embedded cluster.
    pub(super) fn client_of(&self, user: &str) -> Client {
        match self {
            Self::Wire(client) => client.clone(),
            Self::Inside(inside) => inside.client_as(user),
        }
    }

    /// What is there of a kind and what becomes of it.
    pub(super) fn watch<K>(&self, kind: &K::DynamicType, part: Part<'_>) -> Events<K>
    where
        K: Resource + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    {
        match self {
            Self::Wire(client) => {
                // The path of a namespaced kind without its namespace is that of all of them.
                let api: Api<K> = Api::all_with(client.clone(), kind);
                let mut config = watcher::Config::default().timeout(WATCH_TIMEOUT_SECONDS);
                let namespace = ("metadata.namespace", part.namespace);
                let fields = [namespace, ("metadata.name", part.name)].into_iter();
                let fields: Vec<String> = fields
                    .filter(|(_, value)| !value.is_empty())
                    .map(|(field, value)| format!("{field}={value}"))
                    .collect();
                if !fields.is_empty() {
                    config = config.fields(&fields.join(","));
                }
                watcher(api, config).backoff(Fixed).map_ok(shared).boxed()
            }
            Self::Inside(inside) => {
                let target = Target {
                    resource: K::plural(kind).into_owned(),
                    group: K::group(kind).into_owned(),
                    version: K::version(kind).into_owned(),
                    namespace: part.namespace.to_owned(),
                    name: part.name.to_owned(),
                };
                inside.watch(&target).map(Ok).boxed()
            }
        }
    }

    pub(super) async fn create<K: Kind>(&self, object: &K) -> kube::Result<Arc<K>> {
        let key = Key::of(object);
        match self {
            Self::Wire(client) => {
                K::api(client, &key.namespace).create(&PostParams::default(), object).await.map(Arc::new)
            }
            Self::Inside(inside) => {
                let target = Target { name: String::new(), ..target::<K>(&key, "") };
                inside.write("create", target, "", tree(object)?).await
            }
        }
    }

    pub(super) async fn replace<K: Kind>(&self, object: &K) -> kube::Result<Arc<K>> {
        let key = Key::of(object);
        match self {
            Self::Wire(client) => {
                let api = K::api(client, &key.namespace);
                api.replace(&key.name, &PostParams::default(), object).await.map(Arc::new)
            }
            Self::Inside(inside) => inside.write("update", target::<K>(&key, ""), "", tree(object)?).await,
        }
    }

    pub(super) async fn patch<K: Kind>(&self, key: &Key, how: Merge, patch: Value) -> kube::Result<Arc<K>> {
        let inside = match self {
            Self::Wire(client) => return over_wire(client, key, how, patch).await,
            Self::Inside(inside) => inside,
        };
        let (subresource, content_type) = match how {
            Merge::Object => ("", "application/merge-patch+json"),
            Merge::Status => ("/status", "application/merge-patch+json"),
            Merge::StatusByKeys => ("/status", "application/strategic-merge-patch+json"),
        };
        inside.write("patch", target::<K>(key, subresource), content_type, patch).await
    }

    /// Deletes exactly this object; `None`: it is gone already.
    pub(super) async fn delete<K: Kind>(
        &self,
        key: &Key,
        params: &DeleteParams,
    ) -> kube::Result<Option<Arc<K>>> {
        match self {
            Self::Wire(client) => {
                let answer = K::api(client, &key.namespace).delete(&key.name, params).await?;
                let stays =
                    |object: &K| params.grace_period_seconds != Some(0) || !object.finalizers().is_empty();
                Ok(answer.left().filter(stays).map(Arc::new))
            }
            Self::Inside(inside) => inside.delete(target::<K>(key, ""), tree(params)?).await,
        }
    }

    /// Puts a pod on a node.
    pub(super) async fn bind(&self, key: &Key, uid: Option<&str>, node: &str) -> kube::Result<()> {
        let meta = json!({"name": key.name, "namespace": key.namespace, "uid": uid});
        let binding = json!({"metadata": meta, "target": {"kind": "Node", "name": node}});
        match self {
            Self::Wire(client) => {
                let api = Api::<Pod>::namespaced(client.clone(), &key.namespace);
                let _: Value =
                    api.create_subresource("binding", &key.name, &PostParams::default(), &binding).await?;
                Ok(())
            }
            Self::Inside(inside) => inside.bind(target::<Pod>(key, "/binding"), binding).await,
        }
    }
}

async fn over_wire<K: Kind>(client: &Client, key: &Key, how: Merge, patch: Value) -> kube::Result<Arc<K>> {
    let (api, params) = (K::api(client, &key.namespace), PatchParams::default());
    let patched = match how {
        Merge::Object => api.patch(&key.name, &params, &Patch::Merge(patch)).await,
        Merge::Status => api.patch_status(&key.name, &params, &Patch::Merge(patch)).await,
        Merge::StatusByKeys => api.patch_status(&key.name, &params, &Patch::Strategic(patch)).await,
    };
    patched.map(Arc::new)
}

fn tree(object: &impl Serialize) -> kube::Result<Value> {
    serde_json::to_value(object).map_err(kube::Error::SerdeError)
}

fn target<K: Kind>(key: &Key, subresource: &str) -> Target {
    Target {
        group: K::group(&()).into_owned(),
        version: K::version(&()).into_owned(),
        resource: format!("{}{subresource}", K::plural(&())),
        namespace: key.namespace.clone(),
        name: key.name.clone(),
    }
}

fn shared<K>(event: Event<K>) -> Event<Arc<K>> {
    match event {
        Event::Init => Event::Init,
        Event::InitDone => Event::InitDone,
        Event::InitApply(object) => Event::InitApply(Arc::new(object)),
        Event::Apply(object) => Event::Apply(Arc::new(object)),
        Event::Delete(object) => Event::Delete(Arc::new(object)),
    }
}

struct Fixed;

impl Iterator for Fixed {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        Some(WATCH_RETRY)
    }
}

impl Backoff for Fixed {
    fn reset(&mut self) {}
}
