//! Kubernetes, as far as an agent speaks to it: its own node, the pods on it, claims, one ConfigMap, Events.
//!
//! A call that fails for a passing reason is made again with longer and longer pauses. What comes out is one of three
//! things: an answer, "there is none", or an error; an error is never taken for either of the others.

use std::fmt;
use std::time::Duration;

use futures::TryStreamExt as _;
use jiff::Timestamp;
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use k8s_openapi::api::core::v1::{ConfigMap, Event, EventSource, Node as ApiNode, ObjectReference, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{APIGroup, ObjectMeta, Time};
use kube::api::{
    Api, ApiResource, DynamicObject, ListParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams,
};
use kube::core::Status;
use kube::{Client, Error as KubeError};
use pitcrew_core::contract::{COMPONENT, EVENT_NAMESPACE};
use serde_json::json;
use tokio::time::Instant;

use crate::clock::Clock;
use crate::node::{Change, Node};
use crate::stop::{Stop, Stopped};

/// A call that takes longer has an unknown outcome.
const CALL_LIMIT: Duration = Duration::from_secs(5);
/// So often a call is made before its failure counts. With the pauses below that is about a minute.
const ATTEMPTS_MAX: u32 = 7;
/// The first pause; each one after it is twice as long.
const PAUSE: Duration = Duration::from_secs(1);
/// So often the node may change under a patch before that counts as a failure. Others write it a few times a minute.
const CONFLICTS_MAX: u32 = 10;

/// A watch lasts so long; then the node is read once.
const WATCH_SECONDS: u32 = 240;
/// A watch that has not ended so long after its time is over is dead: nothing comes any more, not even its end.
const WATCH_LATE: Duration = Duration::from_secs(30);
/// A watch that ends within this time was not served.
const WATCH_TOO_SHORT: Duration = Duration::from_secs(1);
/// After a watch that broke, or was not served.
const WATCH_AGAIN: Duration = Duration::from_secs(5);

/// The cause in a refusal that says that the object's namespace is being deleted.
const NAMESPACE_TERMINATING: &str = "NamespaceTerminating";

/// Something could not be asked of Kubernetes.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// It refused, or could not be reached for a minute.
    #[error("{operation}")]
    Failed {
        /// What was asked.
        operation: String,
        /// What it said.
        source: Box<KubeError>,
    },
    /// It did not answer, again and again.
    #[error("{operation}: no answer within {} s", CALL_LIMIT.as_secs())]
    NoAnswer {
        /// What was asked.
        operation: String,
    },
    /// The node changed again and again while it was written.
    #[error("{operation}: the node was changed by others {CONFLICTS_MAX} times meanwhile")]
    Contended {
        /// What was asked.
        operation: String,
    },
    /// The agent was told to end while it waited to ask again.
    #[error(transparent)]
    Stopped(#[from] Stopped),
}

/// What came of an eviction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Eviction {
    /// The pod is on its way out, or gone already.
    Accepted,
    /// A budget, or a passing trouble, says: not now. In its own words.
    NotNow(String),
}

/// Something that the agent has to be allowed.
#[derive(Clone, Copy, Debug)]
pub struct Permission {
    /// To do what.
    pub verb: &'static str,
    /// The resource's group, …
    pub group: &'static str,
    /// … its name …
    pub resource: &'static str,
    /// … and what is below it, if that is meant.
    pub subresource: &'static str,
    /// In which namespace; empty: in all, or in none.
    pub namespace: &'static str,
}

impl fmt::Display for Permission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { verb, group, resource, subresource, namespace } = self;
        let slash = if subresource.is_empty() { "" } else { "/" };
        let dot = if group.is_empty() { "" } else { "." };
        write!(f, "{verb} {resource}{dot}{group}{slash}{subresource}")?;
        if namespace.is_empty() { Ok(()) } else { write!(f, " in namespace {namespace}") }
    }
}

/// The API and the node that the agent looks after.
#[derive(Clone)]
pub struct Cluster {
    client: Client,
    node: String,
    clock: Clock,
    stop: Stop,
}

impl Cluster {
    /// For the node of this name.
    pub fn new(client: Client, node: impl Into<String>, clock: Clock, stop: Stop) -> Self {
        Self { client, node: node.into(), clock, stop }
    }

    /// The same for what has to be done after the agent was told to end.
    #[must_use]
    pub fn undisturbed(&self) -> Self {
        Self { stop: Stop::never(), ..self.clone() }
    }

    /// The node's name.
    pub fn node_name(&self) -> &str {
        &self.node
    }

    /// The time.
    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// The node.
    pub async fn node(&self) -> Result<Node, ApiError> {
        let api = Api::<ApiNode>::all(self.client.clone());
        let operation = format!("read node/{}", self.node);
        self.patiently(&operation, || api.get(&self.node)).await.map(Into::into)
    }

    /// Writes what `decide` says on the node, as it is at that moment; `node` is what is there afterwards. If others have
    /// written meanwhile, it is read and decided again.
    pub async fn change(
        &self,
        node: &mut Node,
        operation: &str,
        decide: impl Fn(&Node) -> Change,
    ) -> Result<(), ApiError> {
        let api = Api::<ApiNode>::all(self.client.clone());
        for _ in 0..CONFLICTS_MAX {
            let Some(change) = decide(node).on(node) else { return Ok(()) };
            let body = Patch::Merge(change.body(&node.version));
            let params = PatchParams::default();
            let written = self.patiently(operation, || api.patch(&self.node, &params, &body)).await;
            match written {
                Ok(written) => {
                    *node = written.into();
                    return Ok(());
                }
                Err(ApiError::Failed { source, .. }) if code(&source) == Some(409) => {
                    *node = self.node().await?;
                }
                Err(error) => return Err(error),
            }
        }
        Err(ApiError::Contended { operation: operation.to_owned() })
    }

    /// The pods on the node: those of one namespace with this label, or all.
    pub async fn pods(&self, chosen: Option<(&str, &str)>) -> Result<Vec<Pod>, ApiError> {
        let on_node = ListParams::default().fields(&format!("spec.nodeName={}", self.node));
        let (api, params) = match chosen {
            Some((namespace, label)) => {
                (Api::<Pod>::namespaced(self.client.clone(), namespace), on_node.labels(label))
            }
            None => (Api::<Pod>::all(self.client.clone()), on_node),
        };
        let operation = format!("list the pods on node/{}", self.node);
        Ok(self.patiently(&operation, || api.list(&params)).await?.items)
    }

    /// Asks for a pod to be evicted, once. The UID keeps a pod that came under the same name where it is.
    pub async fn evict(&self, namespace: &str, name: &str, uid: &str) -> Result<Eviction, ApiError> {
        // kube's own `evict` spells `deleteOptions` wrong, so its UID precondition would be ignored.
        let body = json!({
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace},
            "deleteOptions": {"preconditions": {"uid": uid}},
        });
        let api = Api::<Pod>::namespaced(self.client.clone(), namespace);
        let params = PostParams::default();
        let call = api.create_subresource::<_, Status>("eviction", name, &params, &body);
        match tokio::time::timeout(CALL_LIMIT, call).await {
            Ok(Ok(_)) => Ok(Eviction::Accepted),
            // Gone, or another one by now: the next list tells.
            Ok(Err(error)) if matches!(code(&error), Some(404 | 409)) => Ok(Eviction::Accepted),
            Ok(Err(error)) if !passes(&error) && !in_a_namespace_that_ends(&error) => Err(ApiError::Failed {
                operation: format!("evict pod {namespace}/{name}"),
                source: Box::new(error),
            }),
            Ok(Err(error)) => Ok(Eviction::NotNow(plainly(&error))),
            Err(_) => Ok(Eviction::NotNow(format!("no answer within {} s", CALL_LIMIT.as_secs()))),
        }
    }

    /// In which version resource claims are served; `None` if they are not, and then nobody knows who has one from before.
    pub async fn claim_version(&self) -> Result<Option<String>, ApiError> {
        let operation = "ask which version of resource.k8s.io is served";
        let path = || http_get("/apis/resource.k8s.io");
        let served: Option<APIGroup> = self.if_there(operation, || self.client.request(path())).await?;
        Ok(served.and_then(preferred))
    }

    /// A resource claim; `None` if there is no such claim.
    pub async fn claim(
        &self,
        version: &str,
        namespace: &str,
        name: &str,
    ) -> Result<Option<DynamicObject>, ApiError> {
        let resource = ApiResource {
            group: "resource.k8s.io".to_owned(),
            api_version: format!("resource.k8s.io/{version}"),
            version: version.to_owned(),
            kind: "ResourceClaim".to_owned(),
            plural: "resourceclaims".to_owned(),
        };
        let api = Api::<DynamicObject>::namespaced_with(self.client.clone(), namespace, &resource);
        self.if_there(&format!("read resourceclaim {namespace}/{name}"), || api.get(name)).await
    }

    /// Whether the API would let the agent do this. What it does not say, it does not refuse.
    pub async fn may(&self, wanted: Permission) -> Result<bool, ApiError> {
        let Permission { verb, group, resource, subresource, namespace } = wanted;
        let some = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
        let attributes = ResourceAttributes {
            verb: some(verb),
            group: some(group),
            resource: some(resource),
            subresource: some(subresource),
            namespace: some(namespace),
            name: some(&self.node).filter(|_| resource == "nodes"),
            ..ResourceAttributes::default()
        };
        let spec = SelfSubjectAccessReviewSpec {
            resource_attributes: Some(attributes),
            ..SelfSubjectAccessReviewSpec::default()
        };
        let review = SelfSubjectAccessReview { spec, ..SelfSubjectAccessReview::default() };
        let api = Api::<SelfSubjectAccessReview>::all(self.client.clone());
        let params = PostParams::default();
        match self.patiently("ask what is allowed", || api.create(&params, &review)).await {
            Ok(answer) => Ok(answer.status.is_none_or(|status| status.allowed)),
            Err(ApiError::Failed { source, .. }) if matches!(code(&source), Some(403 | 404)) => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// A ConfigMap; `None` if there is none.
    pub async fn config_map(&self, namespace: &str, name: &str) -> Result<Option<ConfigMap>, ApiError> {
        let api = Api::<ConfigMap>::namespaced(self.client.clone(), namespace);
        self.if_there(&format!("read configmap {namespace}/{name}"), || api.get(name)).await
    }

    /// The node after its next change, or after some minutes without one. A watch that breaks is an ordinary thing.
    pub async fn next(&self, node: &Node) -> Result<Node, ApiError> {
        let api = Api::<ApiNode>::all(self.client.clone());
        let params =
            WatchParams::default().fields(&format!("metadata.name={}", self.node)).timeout(WATCH_SECONDS);
        let first = async {
            let events = api.watch(&params, &node.version).await?;
            std::pin::pin!(events).try_next().await
        };
        let limit = Duration::from_secs(WATCH_SECONDS.into()) + WATCH_LATE;
        let begun = Instant::now();
        let event = tokio::select! {
            biased;
            stopped = self.stop.told() => return Err(stopped.into()),
            event = tokio::time::timeout(limit, first) => event.unwrap_or(Ok(None)),
        };
        match event {
            Ok(Some(WatchEvent::Added(node) | WatchEvent::Modified(node))) => return Ok(node.into()),
            Ok(None | Some(WatchEvent::Bookmark(_) | WatchEvent::Deleted(_)))
                if begun.elapsed() < WATCH_TOO_SHORT =>
            {
                self.stop.sleep(WATCH_AGAIN).await?;
            }
            // Its time is over; ask what is.
            Ok(None | Some(WatchEvent::Bookmark(_) | WatchEvent::Deleted(_))) => {}
            Ok(Some(WatchEvent::Error(_))) | Err(_) => self.stop.sleep(WATCH_AGAIN).await?,
        }
        self.node().await
    }

    /// Says something on the node. It is tried once: an Event must not keep the work waiting.
    pub async fn say(&self, node: &Node, reason: &str, warning: bool, message: &str) {
        let now = self.clock.now();
        let event = Event {
            metadata: ObjectMeta {
                name: Some(format!("{}.{:016x}", self.node, now.as_microsecond())),
                namespace: Some(EVENT_NAMESPACE.to_owned()),
                ..ObjectMeta::default()
            },
            involved_object: ObjectReference {
                kind: Some("Node".to_owned()),
                name: Some(self.node.clone()),
                uid: Some(node.uid.clone()),
                api_version: Some("v1".to_owned()),
                ..ObjectReference::default()
            },
            type_: Some(if warning { "Warning" } else { "Normal" }.to_owned()),
            reason: Some(reason.to_owned()),
            message: Some(message.to_owned()),
            first_timestamp: Some(Time(now)),
            last_timestamp: Some(Time(Timestamp::from_second(now.as_second()).unwrap_or(now))),
            count: Some(1),
            source: Some(EventSource {
                component: Some(COMPONENT.to_owned()),
                host: Some(self.node.clone()),
            }),
            reporting_component: Some(COMPONENT.to_owned()),
            reporting_instance: Some(self.node.clone()),
            ..Event::default()
        };
        let api = Api::<Event>::namespaced(self.client.clone(), EVENT_NAMESPACE);
        let written = tokio::time::timeout(CALL_LIMIT, api.create(&PostParams::default(), &event)).await;
        if !matches!(written, Ok(Ok(_))) {
            tracing::warn!("the event could not be written: {message}");
        }
    }

    /// The answer, or `None` if there is no such object.
    async fn if_there<T, F>(&self, operation: &str, call: impl Fn() -> F) -> Result<Option<T>, ApiError>
    where
        F: Future<Output = Result<T, KubeError>>,
    {
        match self.patiently(operation, call).await {
            Ok(found) => Ok(Some(found)),
            Err(ApiError::Failed { source, .. }) if code(&source) == Some(404) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Makes a call until it is answered or its failure is no passing one.
    async fn patiently<T, F>(&self, operation: &str, call: impl Fn() -> F) -> Result<T, ApiError>
    where
        F: Future<Output = Result<T, KubeError>>,
    {
        let mut pause = PAUSE;
        for attempt in 1.. {
            self.stop.check()?;
            let error = match tokio::time::timeout(CALL_LIMIT, call()).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(source)) if attempt >= ATTEMPTS_MAX || !passes(&source) => {
                    return Err(ApiError::Failed {
                        operation: operation.to_owned(),
                        source: Box::new(source),
                    });
                }
                Ok(Err(error)) => plainly(&error),
                Err(_) if attempt >= ATTEMPTS_MAX => break,
                Err(_) => "no answer".to_owned(),
            };
            tracing::warn!("{operation}: {error}; trying again in {} s", pause.as_secs());
            self.stop.sleep(pause).await?;
            pause *= 2;
        }
        Err(ApiError::NoAnswer { operation: operation.to_owned() })
    }
}

/// The code of a refusal.
fn code(error: &KubeError) -> Option<u16> {
    if let KubeError::Api(status) = error { Some(status.code) } else { None }
}

/// Whether a call may succeed if it is made again as it is.
fn passes(error: &KubeError) -> bool {
    match error {
        KubeError::Api(status) => status.code == 429 || status.code >= 500,
        KubeError::SerdeError(_) | KubeError::BuildRequest(_) => false,
        _ => true,
    }
}

/// An eviction is refused where a whole namespace is on its way out. Its pods are deleted in a moment, so it is only asked
/// again, as kubectl does.
fn in_a_namespace_that_ends(error: &KubeError) -> bool {
    let KubeError::Api(status) = error else { return false };
    let mut causes = status.details.iter().flat_map(|details| &details.causes);
    status.code == 403 && causes.any(|cause| cause.reason == NAMESPACE_TERMINATING)
}

/// What the API says, without the client's words around it.
pub(crate) fn plainly(error: &KubeError) -> String {
    match error {
        KubeError::Api(status) => status.message.clone(),
        other => other.to_string(),
    }
}

fn preferred(group: APIGroup) -> Option<String> {
    let preferred = group.preferred_version.map(|version| version.version);
    preferred.or_else(|| group.versions.into_iter().next().map(|version| version.version))
}

fn http_get(path: &str) -> http::Request<Vec<u8>> {
    let mut request = http::Request::new(Vec::new());
    // A constant path is a valid one.
    *request.uri_mut() = path.parse().unwrap_or_default();
    request
}
