//! One action, one call; before a driver is taken away or loaded, one more look. What came of it goes back to the loop.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use json_patch::jsonptr::PointerBuf;
use json_patch::{AddOperation, PatchOperation, ReplaceOperation, TestOperation};
use k8s_openapi::api::apps::v1::{ControllerRevision, DaemonSet};
use k8s_openapi::api::batch::v1::Job;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions};
use kube::core::{ObjectMeta, Status};
use kube::{Client, Resource};
use pitcrew_core::action::{Action, PodRef, PutBack, RestartDriver, Users};
use pitcrew_core::api::{ClusterPolicy, DriverPolicy, NVIDIADriver, Rollout, RolloutSpec};
use pitcrew_core::contract::{
    CHECKPOINT_REQUESTED_ANNOTATION, CHECKPOINTED_ANNOTATION, REVISION_LABEL, State,
};
use pitcrew_core::names::{NodeName, ObjectName, ResourceVersion, RevisionHash, Uid};
use pitcrew_core::plan::uses_device;
use pitcrew_core::policy::Source;
use pitcrew_core::prometheus::{Question, Values};
use pitcrew_core::snapshot::Pod;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use crate::metrics::Metrics;
use crate::prometheus::{ANSWER_SECONDS, Asks};
use crate::setback::CallError;
use crate::{view, wire};

/// A call that takes longer has an unknown outcome.
const CALL_SECONDS: u64 = 5;
/// Each holds one seat of the API server; 32 stays under a tenth of its default share.
const WRITES_IN_FLIGHT_MAX: usize = 32;
/// Evictions wait for etcd and for budgets; they must not keep the patches waiting.
const EVICTIONS_IN_FLIGHT_MAX: usize = 16;
/// A Prometheus has other things to do, and an answer may take seconds.
const QUESTIONS_IN_FLIGHT_MAX: usize = 4;

/// What a call brought.
#[expect(clippy::large_enum_variant, reason = "an answer is taken up at once, never kept")]
pub(crate) enum Answer {
    Node(wire::Node),
    /// The node is not there any more.
    NoNode,
    /// The pod knows that it should save its work.
    Asked(wire::Pod),
    /// The pod is on its way out.
    Pod(Option<wire::Pod>),
    RolloutCreated(Rollout),
    RolloutStatus(Rollout),
    Policy(DriverPolicy),
    Job(Box<Job>),
    /// What Prometheus said.
    Said(Result<Values, String>),
    Nothing,
}

/// Carries actions out.
pub(crate) struct Executor {
    client: Client,
    writes: Semaphore,
    evictions: Semaphore,
    questions: Semaphore,
    asks: Asks,
    metrics: Metrics,
}

impl Executor {
    pub(crate) fn new(client: Client, asks: Asks, metrics: Metrics) -> Self {
        let writes = Semaphore::new(WRITES_IN_FLIGHT_MAX);
        let evictions = Semaphore::new(EVICTIONS_IN_FLIGHT_MAX);
        let questions = Semaphore::new(QUESTIONS_IN_FLIGHT_MAX);
        Self { client, writes, evictions, questions, asks, metrics }
    }

    /// Carries one action out.
    pub(crate) async fn carry_out(&self, action: &Action) -> Result<Answer, CallError> {
        let seats = match action {
            Action::Evict(_) => &self.evictions,
            Action::Ask { .. } => &self.questions,
            _ => &self.writes,
        };
        // The semaphore is never closed; if it were, going on without a seat would still be right.
        let _seat = seats.acquire().await;
        match action {
            Action::PatchNode(patch) => {
                if let Some(users) = &patch.unless_used {
                    self.pods_on(&patch.node, Some(users)).await?;
                }
                let body = Patch::Merge(patch.body());
                let (api, params) = (self.nodes(), PatchParams::default());
                let call = api.patch(patch.node.as_str(), &params, &body);
                self.call("patch", "nodes", call).await.map(Answer::Node)
            }
            Action::ReadNode(node) => {
                let api = self.nodes();
                let found = self.call("get", "nodes", api.get_opt(node.as_str())).await?;
                Ok(found.map_or(Answer::NoNode, Answer::Node))
            }
            Action::AskCheckpoint(pod, until) => self.ask_checkpoint(pod, *until).await,
            Action::Evict(pod) => self.evict(pod).await,
            Action::Delete(pod, _) => self.delete(pod, None).await,
            Action::RestartDriver(restart) => self.restart_driver(restart).await,
            Action::CreateRollout { name, spec } => self.create_rollout(name, spec).await,
            Action::RolloutStatus { name, seen, status, .. } => self
                .say::<Rollout>(name, "rollouts/status", Some(*seen), json!(status))
                .await
                .map(Answer::RolloutStatus),
            Action::PutBack(PutBack::Version { source, from, to }) => {
                self.put_version_back(source, from, to).await
            }
            Action::PutBack(PutBack::Template { daemon_set, uid, generation, revision }) => {
                self.put_template_back(daemon_set, uid, *generation, revision).await
            }
            Action::CreateJob { name, body } => self.create_job(name, body).await,
            Action::Ask { question, .. } => Ok(Answer::Said(self.ask(question).await)),
            Action::DeleteRollout { name, seen } => self.delete_rollout(name, *seen).await,
            Action::PolicyStatus { name, status } => self
                .say::<DriverPolicy>(name, "driverpolicies/status", None, json!(status))
                .await
                .map(Answer::Policy),
            Action::Complain { .. } => Ok(Answer::Nothing),
        }
    }

    async fn ask(&self, question: &Question) -> Result<Values, String> {
        let answer = (self.asks)(question.clone());
        let late = || Err(format!("{} did not answer within {ANSWER_SECONDS} s", question.url));
        tokio::time::timeout(Duration::from_secs(ANSWER_SECONDS), answer).await.unwrap_or_else(|_| late())
    }

    fn nodes(&self) -> Api<wire::Node> {
        Api::all(self.client.clone())
    }

    fn pods(&self, namespace: &str) -> Api<wire::Pod> {
        Api::namespaced(self.client.clone(), namespace)
    }

    async fn ask_checkpoint(&self, pod: &PodRef, until: Timestamp) -> Result<Answer, CallError> {
        let annotations = json!({
            CHECKPOINT_REQUESTED_ANNOTATION: until.to_string(),
            CHECKPOINTED_ANNOTATION: null, // an answer to an earlier request
        });
        // A UID in a patch makes the API refuse it for another pod of the same name.
        let body = Patch::Merge(json!({"metadata": {"uid": pod.uid, "annotations": annotations}}));
        let (api, params) = (self.pods(&pod.name.namespace), PatchParams::default());
        let call = api.patch(&pod.name.name, &params, &body);
        self.call("patch", "pods", call).await.map(Answer::Asked)
    }

    async fn evict(&self, pod: &PodRef) -> Result<Answer, CallError> {
        // kube's own `evict` spells `deleteOptions` wrong, so its UID precondition would be ignored.
        let body = json!({
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod.name.name, "namespace": pod.name.namespace},
            "deleteOptions": {"preconditions": {"uid": pod.uid}},
        });
        let (api, params) = (self.pods(&pod.name.namespace), PostParams::default());
        let call = api.create_subresource::<_, Status>("eviction", &pod.name.name, &params, &body);
        let result = self.call("create", "pods/eviction", call).await;
        self.metrics.eviction(result.as_ref().map_or_else(CallError::outcome, |_| "accepted"));
        result.map(|_| Answer::Pod(None))
    }

    async fn delete(&self, pod: &PodRef, version: Option<String>) -> Result<Answer, CallError> {
        let preconditions = Preconditions { uid: Some(pod.uid.to_string()), resource_version: version };
        let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
        let api = self.pods(&pod.name.namespace);
        let result = self.call("delete", "pods", api.delete(&pod.name.name, &params)).await;
        result.map(|answer| Answer::Pod(answer.left()))
    }

    /// The point of no return. Watches lag; what is asked here is what is.
    async fn restart_driver(&self, restart: &RestartDriver) -> Result<Answer, CallError> {
        let nodes = self.nodes();
        let node = self.call("get", "nodes", nodes.get(restart.pod.node.as_str())).await?;
        still_ours(restart, node).map_err(CallError::LastLook)?;
        let users = Some(&restart.users).filter(|_| !restart.in_place);
        let mut pods = self.pods_on(&restart.pod.node, users).await?;
        let is_it = |pod: &wire::Pod| pod.metadata.uid.as_deref() == Some(restart.pod.uid.as_str());
        if !pods.iter().any(is_it) {
            // The scheduler has not put it there.
            let by_name = ListParams::default().fields(&format!("metadata.name={}", restart.pod.name.name));
            let api = self.pods(&restart.pod.name.namespace);
            pods.extend(self.call("list", "pods", api.list(&by_name)).await?);
        }
        let pod = pods.into_iter().find(is_it);
        let pod =
            pod.ok_or_else(|| CallError::LastLook("the driver pod is another one already".to_owned()))?;
        let version = pod.metadata.resource_version.clone();
        if restart.in_place {
            self.stays_installed(pod).await?;
        }
        self.delete(&restart.pod, version).await
    }

    /// Work goes on while a driver restarts in place: the template as it is now must install what is installed. The plan
    /// may have seen an older one.
    async fn stays_installed(&self, pod: wire::Pod) -> Result<(), CallError> {
        let pod = view::pod(pod)?;
        let owner = pod.owner.as_ref().map(|owner| &*owner.name).unwrap_or_default();
        let by_name = ListParams::default().fields(&format!("metadata.name={owner}"));
        let api = Api::<DaemonSet>::namespaced(self.client.clone(), &pod.name.namespace);
        let found = self.call("list", "daemonsets", api.list(&by_name)).await?.items;
        let template = found.first().and_then(|daemon_set| view::daemon_set(daemon_set).ok()?.digest);
        match pod.digest.zip(template) {
            Some((old, new)) if old == new => Ok(()),
            _ => Err(CallError::LastLook(format!("daemonset/{owner} installs another driver by now"))),
        }
    }

    /// The pods that are on a node now; an error if one of `users` is among them.
    async fn pods_on(&self, node: &NodeName, users: Option<&Users>) -> Result<Vec<wire::Pod>, CallError> {
        let on_node = ListParams::default().fields(&format!("spec.nodeName={node}"));
        let api = Api::<wire::Pod>::all(self.client.clone());
        let pods = self.call("list", "pods", api.list(&on_node)).await?.items;
        for pod in pods.iter().filter(|_| users.is_some()) {
            let pod = view::pod(pod.clone())?;
            if users.is_some_and(|users| holds_device(users, &pod)) {
                return Err(CallError::LastLook(format!("pod {} uses the device", pod.name)));
            }
        }
        Ok(pods)
    }

    async fn create_rollout(&self, name: &str, spec: &RolloutSpec) -> Result<Answer, CallError> {
        let metadata = ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() };
        let rollout = Rollout { metadata, spec: spec.clone(), status: None };
        let (api, params) = (Api::<Rollout>::all(self.client.clone()), PostParams::default());
        self.call("create", "rollouts", api.create(&params, &rollout)).await.map(Answer::RolloutCreated)
    }

    async fn create_job(&self, name: &ObjectName, body: &Value) -> Result<Answer, CallError> {
        let api = Api::<Job>::namespaced(self.client.clone(), &name.namespace);
        let job: Job = serde_json::from_value(body.clone())
            .map_err(|error| CallError::Unfit(format!("the gate makes no job: {error}")))?;
        let params = PostParams::default();
        self.call("create", "jobs", api.create(&params, &job)).await.map(|job| Answer::Job(Box::new(job)))
    }

    async fn delete_rollout(&self, name: &str, seen: ResourceVersion) -> Result<Answer, CallError> {
        let preconditions = Preconditions { uid: None, resource_version: Some(seen.to_string()) };
        let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
        let api = Api::<Rollout>::all(self.client.clone());
        self.call("delete", "rollouts", api.delete(name, &params)).await.map(|_| Answer::Nothing)
    }

    /// Changes the version in the object that an operator renders the driver from, if it still says what was seen.
    async fn put_version_back(&self, source: &Source, from: &str, to: &str) -> Result<Answer, CallError> {
        let field = PointerBuf::from_tokens(source.version_field().split('.'));
        let change = json_patch::Patch(vec![
            PatchOperation::Test(TestOperation { path: field.clone(), value: json!(from) }),
            PatchOperation::Replace(ReplaceOperation { path: field, value: json!(to) }),
        ]);
        match source {
            Source::ClusterPolicy(name) => {
                self.change::<ClusterPolicy>("clusterpolicies", name, change).await
            }
            Source::NvidiaDriver(name) => self.change::<NVIDIADriver>("nvidiadrivers", name, change).await,
            // Nobody plans that: the one has no version, the other is not ours to write.
            Source::DriverPolicy(_) | Source::NicClusterPolicy(_) => Ok(Answer::Nothing),
        }
    }

    async fn change<K>(
        &self,
        resource: &'static str,
        name: &str,
        change: json_patch::Patch,
    ) -> Result<Answer, CallError>
    where
        K: Resource<DynamicType = ()> + DeserializeOwned + Clone + std::fmt::Debug,
    {
        let (api, params) = (Api::<K>::all(self.client.clone()), PatchParams::default());
        let change = Patch::<()>::Json(change);
        self.call("patch", resource, api.patch(name, &params, &change)).await.map(|_| Answer::Nothing)
    }

    /// What `kubectl rollout undo` does: the template of an earlier revision, unless somebody has changed it meanwhile.
    async fn put_template_back(
        &self,
        name: &ObjectName,
        uid: &Uid,
        generation: i64,
        revision: &RevisionHash,
    ) -> Result<Answer, CallError> {
        let sets = Api::<DaemonSet>::namespaced(self.client.clone(), &name.namespace);
        let by_name = ListParams::default().fields(&format!("metadata.name={}", name.name));
        let found = self.call("list", "daemonsets", sets.list(&by_name)).await?.items.pop();
        let found = found
            .map(|set| set.metadata)
            .filter(|meta| meta.uid.as_deref() == Some(uid.as_str()) && meta.generation == Some(generation));
        let Some(seen) = found.and_then(|meta| meta.resource_version) else {
            return Err(CallError::LastLook(format!("daemonset/{name} was changed meanwhile")));
        };
        let revisions = Api::<ControllerRevision>::namespaced(self.client.clone(), &name.namespace);
        let by_hash = ListParams::default().labels(&format!("{REVISION_LABEL}={revision}"));
        let listed = self.call("list", "controllerrevisions", revisions.list(&by_hash)).await?.items;
        let ours = |revision: &ControllerRevision| {
            revision.metadata.owner_references.iter().flatten().any(|owner| owner.uid == uid.as_str())
        };
        let Some(earlier) = listed.into_iter().find(ours) else {
            return Err(CallError::LastLook(format!("revision {revision} of daemonset/{name} is gone")));
        };
        let mut patch = earlier.data.0;
        json_patch::merge(&mut patch, &json!({"metadata": {"resourceVersion": seen}}));
        let (params, patch) = (PatchParams::default(), Patch::Strategic(patch));
        let call = sets.patch(&name.name, &params, &patch);
        self.call("patch", "daemonsets", call).await.map(|_| Answer::Nothing)
    }

    /// Writes a status in place of the one before: merged into it, what is no longer said would stay. One that later
    /// decisions are made from is pinned to the version that was `seen`.
    async fn say<K>(
        &self,
        name: &str,
        resource: &'static str,
        seen: Option<ResourceVersion>,
        status: Value,
    ) -> Result<K, CallError>
    where
        K: Resource<DynamicType = ()> + DeserializeOwned + Clone + std::fmt::Debug,
    {
        let api = Api::<K>::all(self.client.clone());
        let add = |path: &[&str], value| {
            PatchOperation::Add(AddOperation { path: PointerBuf::from_tokens(path.iter().copied()), value })
        };
        let pin = seen.map(|seen| add(&["metadata", "resourceVersion"], json!(seen.to_string())));
        let operations = pin.into_iter().chain([add(&["status"], status)]).collect();
        let patch = Patch::<()>::Json(json_patch::Patch(operations));
        self.call("patch", resource, api.patch_status(name, &PatchParams::default(), &patch)).await
    }

    /// One call with its time limit, counted.
    async fn call<T>(
        &self,
        verb: &'static str,
        resource: &'static str,
        call: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, CallError> {
        let result = match tokio::time::timeout(Duration::from_secs(CALL_SECONDS), call).await {
            Ok(answer) => answer.map_err(CallError::Api),
            Err(_) => Err(CallError::TimedOut(CALL_SECONDS)),
        };
        self.metrics.request(verb, resource, result.as_ref().map_or_else(CallError::outcome, |_| "ok"));
        result
    }
}

/// Claims are not read again; a pod with claims that the plan did not judge counts as a user.
fn holds_device(users: &Users, pod: &Pod) -> bool {
    let judged = users.harmless.contains(&pod.uid);
    let nothing_known = BTreeMap::new();
    let devices = &users.devices;
    if judged { devices.asked_for_by(pod) } else { uses_device(devices, pod, &nothing_known) }
}

/// Whether the node is the one of the plan, cordoned, on its visit, at the restart.
fn still_ours(restart: &RestartDriver, node: wire::Node) -> Result<(), String> {
    let (name, node) = view::node(node).map_err(|e| e.to_string())?;
    if node.uid != restart.node_uid {
        return Err(format!("node {name} is another machine of that name"));
    }
    if !node.unschedulable {
        return Err(format!("node {name} is not cordoned any more"));
    }
    let walk = node.visit.and_then(Result::ok).and_then(|visit| visit.drivers.get(&restart.driver).cloned());
    match walk {
        Some(walk) if walk.state == State::PodRestartRequired => Ok(()),
        _ => Err(format!("node {name} is not at its driver restart any more")),
    }
}
