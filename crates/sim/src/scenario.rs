//! One way to write a scenario, for the embedded cluster and for a real control plane alike.
//!
//! A scenario is a fleet, a policy, how the machines behave, and a script: what a person does when something has
//! come about, and what must hold then. A recorder watches the nodes all the time; its [`Trace`] is what two runs
//! are compared by.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{Debug, Write as _};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::StreamExt;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use kube::{Api, Resource, ResourceExt};
use pitcrew_controller::Controller;
use pitcrew_core::api::{DriverPolicy, DriverPolicySpec, Rollout};
use pitcrew_core::contract::{State, VISIT_ANNOTATION, is_relevant};
use pitcrew_core::plan::Plan;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::actors::{Behaviour, BehaviourHandle, DRIVER_APP, NAMESPACE};
use crate::api::Fault;
use crate::cluster::Cluster;
use crate::fleet::Fleet;

/// Nothing in a scenario takes longer; on virtual time this costs nothing.
const PATIENCE: Duration = Duration::from_mins(2);
/// A lease runs out, another controller takes over, and says what is left to say.
const AFTERMATH: Duration = Duration::from_mins(2);
/// Longer than any scenario.
const NEVER: Duration = Duration::from_hours(24);
/// The label that everything is about.
const STATE_LABEL: &str = "nvidia.com/gpu-driver-upgrade-state";

/// The states of an undisturbed upgrade, in their order.
pub const WHOLE_WALK: [State; 8] = [
    State::UpgradeRequired,
    State::CordonRequired,
    State::WaitForJobsRequired,
    State::PodDeletionRequired,
    State::PodRestartRequired,
    State::ValidationRequired,
    State::UncordonRequired,
    State::UpgradeDone,
];

/// What goes wrong in a scenario, in a sentence.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Broken(pub String);

impl From<kube::Error> for Broken {
    fn from(error: kube::Error) -> Self {
        Self(format!("the API refused: {error}"))
    }
}

/// What a script returns.
pub type Outcome = Result<(), Broken>;
/// A script: what a person does, and what must hold.
pub type Script = for<'a> fn(&'a mut Stage) -> BoxFuture<'a, Outcome>;

/// Where a scenario can be played.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum On {
    /// On the embedded cluster and on a real control plane, with the same states.
    Both,
    /// On the embedded cluster: it needs faults that a real one does not have, or takes too long on real time.
    Embedded,
}

/// A story that must end well wherever it is played.
pub struct Scenario {
    /// What must be true, or the name under which a report of it is known.
    pub name: &'static str,
    /// Weaknesses of other controllers that it shows to be absent here (`docs/scenarios.md`).
    pub shows: &'static [&'static str],
    /// Where it can be played.
    pub on: On,
    /// What is in the cluster.
    pub fleet: Fleet,
    /// How the machines behave.
    pub behaviour: Behaviour,
    /// A DriverPolicy beside the fleet's ClusterPolicy.
    pub policy: Option<Value>,
    /// What happens.
    pub script: Script,
}

/// What was seen of the nodes from the first change of version on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// Each node's states, in order, without repetitions.
    pub states: BTreeMap<String, Vec<State>>,
    /// The most nodes that were cordoned at the same time.
    pub most_out: usize,
    /// The most nodes that were on a visit at the same time.
    pub most_visited: usize,
}

impl Trace {
    /// As text, for people and snapshots: the nodes with the same path together.
    pub fn text(&self) -> String {
        let mut paths: BTreeMap<Vec<State>, BTreeSet<&str>> = BTreeMap::new();
        for (node, path) in &self.states {
            paths.entry(path.clone()).or_default().insert(node);
        }
        let mut text = String::new();
        for (path, nodes) in paths {
            let nodes: Vec<&str> = nodes.into_iter().collect();
            let path: Vec<String> = path.iter().map(ToString::to_string).collect();
            let _ = writeln!(text, "{}: {}", nodes.join(" "), path.join(" > "));
        }
        text
    }
}

/// The nodes as the recorder last saw them.
#[derive(Clone, Debug, Default)]
pub struct Scene {
    /// Each node's state.
    pub states: BTreeMap<String, State>,
    /// Cordoned nodes.
    pub cordoned: BTreeSet<String>,
    /// Nodes with a visit record.
    pub visited: BTreeSet<String>,
    trace: Trace,
    recording: bool,
}

impl Scene {
    /// The state of a node.
    pub fn state(&self, node: &str) -> State {
        self.states.get(node).copied().unwrap_or_default()
    }
    /// How many nodes are in a state.
    pub fn count(&self, state: State) -> usize {
        self.states.values().filter(|s| **s == state).count()
    }
    /// Whether every node is in one of these.
    pub fn all(&self, state: State) -> bool {
        !self.states.is_empty() && self.count(state) == self.states.len()
    }

    /// What was recorded.
    pub fn into_trace(self) -> Trace {
        self.trace
    }

    fn see(&mut self, node: &Node) {
        let name = node.name_any();
        let label = node.labels().get(STATE_LABEL).map_or("", String::as_str);
        let state = label.parse().unwrap_or_default();
        let cordoned = node.spec.as_ref().and_then(|s| s.unschedulable).unwrap_or(false);
        let visited = node.annotations().contains_key(VISIT_ANNOTATION);
        set(&mut self.cordoned, &name, cordoned);
        set(&mut self.visited, &name, visited);
        let before = self.states.insert(name.clone(), state);
        if self.recording {
            self.trace.most_out = self.trace.most_out.max(self.cordoned.len());
            self.trace.most_visited = self.trace.most_visited.max(self.visited.len());
            if before != Some(state) {
                self.trace.states.entry(name).or_default().push(state);
            }
        }
    }
}

fn set(names: &mut BTreeSet<String>, name: &str, present: bool) {
    if present {
        names.insert(name.to_owned());
    } else {
        names.remove(name);
    }
}

/// The cluster during a scenario, and the hands that a script has.
pub struct Stage {
    cluster: Cluster,
    scene: watch::Receiver<Scene>,
    recording: watch::Sender<Scene>,
    controllers: Arc<Controllers>,
    recorder: JoinHandle<()>,
}

/// One controller after the other.
struct Controllers {
    make: Box<dyn Fn(&str) -> Controller + Send + Sync>,
    running: Mutex<Option<JoinHandle<()>>>,
    started: AtomicU64,
    /// What the newest plan says of each node.
    reasons: watch::Sender<BTreeMap<String, String>>,
}

impl Controllers {
    fn start(&self) {
        let number = self.started.fetch_add(1, Ordering::Relaxed) + 1;
        let reasons = self.reasons.clone();
        let told = move |plan: &Plan| {
            let verdicts = plan.pools.iter().flat_map(|pool| &pool.nodes);
            let now = verdicts.map(|(name, verdict)| (name.to_string(), verdict.reason.to_string()));
            reasons.send_replace(now.collect());
        };
        let controller = (self.make)(&format!("controller-{number}"));
        let controller = controller.on_pass(Box::new(move |_, plan| told(plan)));
        let running = tokio::spawn(async move {
            if let Err(error) = controller.run(std::future::pending()).await {
                tracing::error!(%error, "the controller ended");
            }
        });
        *self.slot() = Some(running);
    }

    async fn kill(&self) {
        let running = self.slot().take();
        if let Some(running) = running {
            running.abort();
            let _ = running.await;
        }
    }

    fn slot(&self) -> MutexGuard<'_, Option<JoinHandle<()>>> {
        // Nobody panics while holding it; if somebody did, the handle is still good.
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.recorder.abort();
        if let Some(running) = self.controllers.slot().take() {
            running.abort();
        }
    }
}

/// Plays a scenario on a cluster and returns what was seen.
pub async fn play(scenario: &Scenario, cluster: Cluster) -> Result<Trace, Broken> {
    let mut stage = Stage::open(scenario, cluster).await?;
    (scenario.script)(&mut stage).await?;
    Ok(stage.trace())
}

/// Plays a scenario with `prepare` called once the controller has settled, and returns what it all comes to.
pub async fn play_to_the_end(
    scenario: &Scenario,
    cluster: Cluster,
    prepare: impl FnOnce(&Stage),
) -> Result<End, Broken> {
    let mut stage = Stage::open(scenario, cluster).await?;
    prepare(&stage);
    (scenario.script)(&mut stage).await?;
    tokio::time::sleep(AFTERMATH).await;
    stage.end().await
}

/// What a story comes to, without names and times that chance decides.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct End {
    /// Each node: state, cordon, and what we left on it.
    pub nodes: BTreeMap<String, String>,
    /// Each node's driver, and whether it is Ready.
    pub drivers: BTreeMap<String, String>,
    /// Each rollout's phase.
    pub rollouts: BTreeMap<String, String>,
}

impl Stage {
    async fn open(scenario: &Scenario, cluster: Cluster) -> Result<Self, Broken> {
        if let Some(spec) = &scenario.policy {
            let spec: DriverPolicySpec =
                serde_json::from_value(spec.clone()).map_err(|e| Broken(e.to_string()))?;
            let api = Api::<DriverPolicy>::all(cluster.admin.clone());
            api.create(&PostParams::default(), &DriverPolicy::new("gpu", spec)).await?;
        }
        let (recording, scene) = watch::channel(Scene::default());
        let recorder = tokio::spawn(record(Api::all(cluster.admin.clone()), recording.clone()));
        let (client, clock) = (cluster.controller.clone(), cluster.clock);
        let controllers = Arc::new(Controllers {
            make: Box::new(move |identity| crate::cluster::controller(client.clone(), clock, identity)),
            running: Mutex::default(),
            started: AtomicU64::default(),
            reasons: watch::Sender::default(),
        });
        let mut stage = Self { cluster, scene, recording, controllers, recorder };
        stage.start_controller();
        stage
            .until("every node is upgrade-done to begin with", |scene| scene.all(State::UpgradeDone))
            .await?;
        stage.recording.send_modify(|scene| scene.recording = true);
        Ok(stage)
    }

    /// Starts a controller under a new name.
    pub fn start_controller(&self) {
        self.controllers.start();
    }

    /// Ends the controller at once, between any two steps of its work, as `kill -9` does.
    pub async fn kill_controller(&self) {
        self.controllers.kill().await;
    }

    /// Kills the controller at its `point`-th write from now on, and starts another. The write is not made, or, if `made`,
    /// it is and nobody hears of it. Returns how many writes there were in the end.
    pub fn crash_at(&self, point: u64, made: bool) -> Arc<AtomicU64> {
        let writes = Arc::new(AtomicU64::new(0));
        let Some(api) = &self.cluster.api else { return writes };
        let (counted, controllers) = (writes.clone(), self.controllers.clone());
        api.on_request_as("crash", move |request| {
            let write = !matches!(request.verb, "get" | "list" | "watch");
            let ours = request.user == "pitcrew" && write && !request.resource.ends_with("leases");
            if !ours || counted.fetch_add(1, Ordering::Relaxed) + 1 != point {
                return None;
            }
            let controllers = controllers.clone();
            tokio::spawn(async move {
                controllers.kill().await;
                controllers.start();
            });
            Some(if made { Fault::LostReply } else { Fault::Delay(NEVER) })
        });
        writes
    }

    async fn end(&self) -> Result<End, Broken> {
        let mut end = End::default();
        for node in Api::<Node>::all(self.cluster.admin.clone()).list(&ListParams::default()).await? {
            let annotations = node.annotations().keys().filter(|key| is_relevant(key)).cloned();
            let left: Vec<String> = annotations.collect();
            let cordoned = node.spec.as_ref().and_then(|s| s.unschedulable).unwrap_or(false);
            let state = node.labels().get(STATE_LABEL).cloned().unwrap_or_default();
            end.nodes.insert(node.name_any(), format!("{state}, cordoned {cordoned}, {}", left.join(" ")));
        }
        let pods = Api::<Pod>::namespaced(self.cluster.admin.clone(), NAMESPACE);
        for pod in pods.list(&ListParams::default().labels(&format!("app={DRIVER_APP}"))).await? {
            let spec = pod.spec.clone().unwrap_or_default();
            let image = spec.containers.first().and_then(|c| c.image.clone()).unwrap_or_default();
            let ready = crate::actors::is_ready(&pod);
            end.drivers.insert(spec.node_name.unwrap_or_default(), format!("{image}, ready {ready}"));
        }
        for rollout in Api::<Rollout>::all(self.cluster.admin.clone()).list(&ListParams::default()).await? {
            let phase = rollout.status.as_ref().map(|status| format!("{:?}", status.phase));
            end.rollouts.insert(rollout.name_any(), phase.unwrap_or_default());
        }
        Ok(end)
    }

    /// Changes the driver version in the ClusterPolicy.
    pub async fn set_version(&self, version: &str) -> Outcome {
        Ok(self.cluster.set_driver_version(version).await?)
    }

    /// Merges into `spec.driver.upgradePolicy` of the ClusterPolicy.
    pub async fn set_upgrade_policy(&self, patch: Value) -> Outcome {
        Ok(self.cluster.patch_cluster_policy(json!({"spec": {"driver": {"upgradePolicy": patch}}})).await?)
    }

    /// Sets or removes a label on a node.
    pub async fn label(&self, node: &str, key: &str, value: Option<&str>) -> Outcome {
        self.patch_node(node, json!({"metadata": {"labels": {key: value}}})).await
    }

    /// Merges into a node.
    pub async fn patch_node(&self, node: &str, patch: Value) -> Outcome {
        let api = Api::<Node>::all(self.cluster.admin.clone());
        api.patch(node, &PatchParams::default(), &Patch::Merge(patch)).await?;
        Ok(())
    }

    /// Creates an object from its manifest, `namespace` empty for cluster-scoped ones.
    pub async fn create<K>(&self, namespace: &str, manifest: Value) -> Outcome
    where
        K: Resource<DynamicType = ()> + DeserializeOwned + Serialize + Clone + Debug,
    {
        let object: K = serde_json::from_value(manifest).map_err(|e| Broken(e.to_string()))?;
        let client = self.cluster.admin.clone();
        let kind = kube::core::ApiResource::erase::<K>(&());
        let body = serde_json::to_value(&object).map_err(|e| Broken(e.to_string()))?;
        let object: DynamicObject = serde_json::from_value(body).map_err(|e| Broken(e.to_string()))?;
        let api: Api<DynamicObject> = match namespace {
            "" => Api::all_with(client, &kind),
            namespace => Api::namespaced_with(client, namespace, &kind),
        };
        api.create(&PostParams::default(), &object).await?;
        Ok(())
    }

    /// Merges into an object of a namespace.
    pub async fn patch<K>(&self, namespace: &str, name: &str, patch: Value) -> Outcome
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + DeserializeOwned + Clone + Debug,
    {
        let api = Api::<K>::namespaced(self.cluster.admin.clone(), namespace);
        api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await?;
        Ok(())
    }

    /// Deletes an object of a namespace.
    pub async fn delete<K>(&self, namespace: &str, name: &str) -> Outcome
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + DeserializeOwned + Clone + Debug,
    {
        let api = Api::<K>::namespaced(self.cluster.admin.clone(), namespace);
        api.delete(name, &DeleteParams::default()).await?;
        Ok(())
    }

    /// The name of the driver pod on a node.
    pub async fn driver_pod(&self, node: &str) -> Result<String, Broken> {
        let api = Api::<Pod>::namespaced(self.cluster.admin.clone(), NAMESPACE);
        let drivers = api.list(&ListParams::default().labels(&format!("app={DRIVER_APP}"))).await?;
        let here = |pod: &&Pod| pod.spec.as_ref().and_then(|s| s.node_name.as_deref()) == Some(node);
        let found = drivers.iter().find(here).map(ResourceExt::name_any);
        found.ok_or_else(|| Broken(format!("no driver pod on {node}")))
    }

    /// Pods in a namespace, as `(name, node, ready)`.
    pub async fn pods(&self, namespace: &str) -> Result<Vec<(String, String, bool)>, Broken> {
        let api = Api::<Pod>::namespaced(self.cluster.admin.clone(), namespace);
        let pods = api.list(&ListParams::default()).await?;
        let node = |pod: &Pod| pod.spec.as_ref().and_then(|s| s.node_name.clone()).unwrap_or_default();
        Ok(pods.iter().map(|pod| (pod.name_any(), node(pod), crate::actors::is_ready(pod))).collect())
    }

    /// The cluster.
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// How the machines behave from now on.
    pub fn behaviour(&self) -> BehaviourHandle {
        self.cluster.actors.behaviour()
    }

    /// The nodes as they were last seen.
    pub fn scene(&self) -> Scene {
        self.scene.borrow().clone()
    }

    /// Waits until `holds`, which `what` describes.
    pub async fn until(&mut self, what: &str, holds: impl Fn(&Scene) -> bool) -> Outcome {
        let came_true =
            matches!(timeout(PATIENCE, self.scene.wait_for(|scene| holds(scene))).await, Ok(Ok(_)));
        must(came_true, || format!("waited in vain until {what}; the nodes: {:?}", self.scene().states))
    }

    /// Waits until the controller's reason for a node contains these words.
    pub async fn until_reason(&mut self, node: &str, words: &str) -> Outcome {
        let mut reasons = self.controllers.reasons.subscribe();
        let says =
            |reasons: &BTreeMap<String, String>| reasons.get(node).is_some_and(|why| why.contains(words));
        let came_true = matches!(timeout(PATIENCE, reasons.wait_for(says)).await, Ok(Ok(_)));
        must(came_true, || format!("{node} never said \"{words}\" but {:?}", self.reason(node)))
    }

    /// The controller's reason for a node.
    pub fn reason(&self, node: &str) -> String {
        self.controllers.reasons.borrow().get(node).cloned().unwrap_or_default()
    }

    /// Waits until every node is done.
    pub async fn until_done(&mut self) -> Outcome {
        self.until("every node is upgrade-done", |scene| scene.all(State::UpgradeDone)).await
    }

    /// Waits until a pod whose name begins so is Ready, and returns its name.
    pub async fn until_pod(&self, namespace: &str, beginning: &str) -> Result<String, Broken> {
        let ready = async {
            loop {
                let pods = self.pods(namespace).await?;
                if let Some((name, ..)) =
                    pods.into_iter().find(|(name, _, ready)| *ready && name.starts_with(beginning))
                {
                    return Ok(name);
                }
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        };
        let late = || Broken(format!("waited in vain for a ready pod {beginning}… in {namespace}"));
        timeout(PATIENCE, ready).await.unwrap_or_else(|_| Err(late()))
    }

    /// Merges into a rollout, once it is there.
    pub async fn patch_rollout(&self, name: &str, patch: Value) -> Outcome {
        let api = Api::<Rollout>::all(self.cluster.admin.clone());
        let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
        let patched = async {
            loop {
                match api.patch(name, &params, &patch).await {
                    Err(kube::Error::Api(status)) if status.code == 404 => {
                        tokio::time::sleep(Duration::from_millis(200)).await;
                    }
                    answer => return answer.map(drop).map_err(Broken::from),
                }
            }
        };
        let late = || Broken(format!("waited in vain for rollout {name}"));
        timeout(PATIENCE, patched).await.unwrap_or_else(|_| Err(late()))
    }

    /// Waits until pods are there and all Ready.
    pub async fn until_pods_ready(&self, namespace: &str, count: usize) -> Outcome {
        let ready = async {
            loop {
                let pods = self.pods(namespace).await?;
                if pods.len() == count && pods.iter().all(|(_, _, ready)| *ready) {
                    return Ok(());
                }
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        };
        let late = || Broken(format!("waited in vain for {count} ready pods in {namespace}"));
        timeout(PATIENCE, ready).await.unwrap_or_else(|_| Err(late()))
    }

    /// Nothing about the nodes changes for a while.
    pub async fn stands_still_for(&mut self, time: Duration) -> Outcome {
        let before = self.scene().states;
        tokio::time::sleep(time).await;
        must(self.scene().states == before, || {
            format!("nodes moved: {before:?} became {:?}", self.scene().states)
        })
    }
}

/// What must hold.
pub fn must(holds: bool, otherwise: impl FnOnce() -> String) -> Outcome {
    if holds { Ok(()) } else { Err(Broken(otherwise())) }
}

/// Watches the nodes and writes down what it sees.
async fn record(nodes: Api<Node>, scene: watch::Sender<Scene>) {
    let mut events = watcher(nodes, watcher::Config::default()).boxed();
    while let Some(event) = events.next().await {
        match event {
            Ok(watcher::Event::Apply(node) | watcher::Event::InitApply(node)) => {
                scene.send_modify(|scene| scene.see(&node));
            }
            Ok(watcher::Event::Delete(node)) => scene.send_modify(|scene| {
                let name = node.name_any();
                scene.states.remove(&name);
                scene.cordoned.remove(&name);
                scene.visited.remove(&name);
            }),
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(%error, "the recorder's watch broke");
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        }
    }
}
