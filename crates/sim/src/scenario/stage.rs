//! The cluster during a scenario: how it is opened, what can be seen of it, and what a script waits for.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Event, Node, Pod};
use kube::api::{ListParams, PostParams};
use kube::{Api, ResourceExt};
use pitcrew_core::api::{DriverPolicy, DriverPolicySpec, Rollout, RolloutPhase};
use pitcrew_core::contract::{State, is_relevant, nvsentinel};
use pitcrew_core::version::DriverVersion;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use super::controllers::Controllers;
use super::scene::{Scene, Trace, record};
use super::{Broken, End, Outcome, STATE_LABEL, Scenario, must};
use crate::actors::{BehaviourHandle, DRIVER_COMPONENT, NAMESPACE};
use crate::api::{Fault, RequestInfo};
use crate::cluster::{Cluster, controller};
use crate::fleet::Fleet;

/// Nothing in a scenario takes longer; on virtual time this costs nothing. A real API server that breaks an eviction off
/// half-way keeps its place in the budget for two minutes.
const PATIENCE: Duration = Duration::from_mins(5);
/// Longer than any scenario.
const NEVER: Duration = Duration::from_hours(24);
/// How late a controller hears of something: longer than most steps take, shorter than any deadline of a story.
const LATE: Duration = Duration::from_secs(2);
/// The controller's name for the API.
const CONTROLLER: &str = "pitcrew";
/// What was written is seen by everybody.
const NEWS_WITHIN: Duration = Duration::from_secs(1);
/// How often the API is asked for what no watch tells.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// What happens to a controller at one write of a story.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disturbance {
    /// It is killed at a write of its own, before it is made or after.
    Killed {
        /// After.
        made: bool,
    },
    /// It hears of a change, and of those of the same kind after it, two seconds late.
    SeesLate,
    /// It never hears of a change, but finds the state of two seconds later in a new list.
    Misses,
}

impl Disturbance {
    fn is_about(self, request: &RequestInfo) -> bool {
        let write = !matches!(request.verb, "get" | "list" | "watch");
        let (plural, _) = request.resource.split_once('/').unwrap_or((&request.resource, ""));
        write
            && match self {
                Disturbance::Killed { .. } => request.user == CONTROLLER && plural != "leases",
                // What it watches and others, or its own hands, change.
                Disturbance::SeesLate | Disturbance::Misses => {
                    matches!(
                        plural,
                        "nodes" | "pods" | "daemonsets" | "controllerrevisions" | "poddisruptionbudgets"
                    ) || request.group == "nvidia.com"
                        || request.group == "pitcrew.dev"
                }
            }
    }
}

/// As the API's own tables are called.
fn resource_of(request: &RequestInfo) -> String {
    let (plural, _) = request.resource.split_once('/').unwrap_or((&request.resource, ""));
    if request.group.is_empty() { plural.to_owned() } else { format!("{plural}.{}", request.group) }
}

/// The cluster during a scenario, and the hands that a script has.
pub struct Stage {
    pub(super) cluster: Cluster,
    pub(super) fleet: Fleet,
    scene: watch::Receiver<Scene>,
    recording: watch::Sender<Scene>,
    controllers: Arc<Controllers>,
    recorder: JoinHandle<()>,
    /// The controller may be blind for a while: its way is another one then, and only its end counts.
    blinded: AtomicBool,
    /// The controller may be killed or blind at any moment: how fast it is says nothing.
    disturbed: AtomicBool,
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.recorder.abort();
        if let Some(running) = self.controllers.slot().take() {
            running.abort();
        }
    }
}

impl Stage {
    pub(super) async fn open(scenario: &Scenario, cluster: Cluster) -> Result<Self, Broken> {
        if let Some(spec) = &scenario.policy {
            let spec: DriverPolicySpec =
                serde_json::from_value(spec.clone()).map_err(|e| Broken(e.to_string()))?;
            let api = Api::<DriverPolicy>::all(cluster.admin.clone());
            api.create(&PostParams::default(), &DriverPolicy::new("gpu", spec)).await?;
        }
        let (recording, scene) = watch::channel(Scene::default());
        let recorder = tokio::spawn(record(Api::all(cluster.admin.clone()), recording.clone()));
        let (client, clock, own_node) =
            (cluster.controller.clone(), cluster.clock.clone(), scenario.own_node);
        let prometheus = cluster.actors.behaviour().prometheus();
        let controllers = Arc::new(Controllers {
            make: Box::new(move |identity| {
                let controller = controller(client.clone(), clock.clone(), identity, own_node);
                controller.asks(prometheus.clone())
            }),
            running: Mutex::default(),
            started: AtomicU64::default(),
            reasons: watch::Sender::default(),
        });
        let fleet = scenario.fleet.clone();
        let (blinded, disturbed) = (AtomicBool::new(false), AtomicBool::new(false));
        let mut stage = Self { cluster, fleet, scene, recording, controllers, recorder, blinded, disturbed };
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

    /// Disturbs the controller at the `point`-th write that such a disturbance can be about. Returns how many of those
    /// there were in the end.
    pub fn disturb(&self, disturbance: Disturbance, point: u64) -> Arc<AtomicU64> {
        let writes = Arc::new(AtomicU64::new(0));
        let Some(api) = self.cluster.api.clone() else { return writes };
        self.disturbed.store(true, Ordering::Relaxed);
        self.blinded.store(!matches!(disturbance, Disturbance::Killed { .. }), Ordering::Relaxed);
        let (counted, controllers, lines) = (writes.clone(), self.controllers.clone(), api.lines());
        api.on_request_as("disturbance", move |request| {
            if !disturbance.is_about(request) || counted.fetch_add(1, Ordering::Relaxed) + 1 != point {
                return None;
            }
            match disturbance {
                Disturbance::Killed { made } => {
                    let controllers = controllers.clone();
                    tokio::spawn(async move {
                        controllers.kill().await;
                        controllers.start();
                    });
                    Some(if made { Fault::LostReply } else { Fault::Delay(NEVER) })
                }
                Disturbance::SeesLate => {
                    lines.stall(CONTROLLER, &resource_of(request), Instant::now() + LATE);
                    None
                }
                Disturbance::Misses => {
                    lines.stall(CONTROLLER, &resource_of(request), Instant::now() + LATE);
                    let lines = lines.clone();
                    tokio::spawn(async move {
                        tokio::time::sleep(LATE).await;
                        lines.forget(CONTROLLER);
                    });
                    None
                }
            }
        });
        writes
    }

    pub(super) async fn end(&self) -> Result<End, Broken> {
        let mut end = End::default();
        for node in Api::<Node>::all(self.cluster.admin.clone()).list(&ListParams::default()).await? {
            // What NVSentinel leaves behind is a matter of its own timing.
            let ours =
                |key: &&String| is_relevant(key) && !key.starts_with(nvsentinel::QUARANTINE_ANNOTATIONS);
            let annotations = node.annotations().keys().filter(ours).cloned();
            let left: Vec<String> = annotations.collect();
            let cordoned = node.spec.as_ref().and_then(|s| s.unschedulable).unwrap_or(false);
            let state = node.labels().get(STATE_LABEL).cloned().unwrap_or_default();
            end.nodes.insert(node.name_any(), format!("{state}, cordoned {cordoned}, {}", left.join(" ")));
        }
        for pod in self.driver_pods().await? {
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

    async fn driver_pods(&self) -> Result<Vec<Pod>, Broken> {
        let api = Api::<Pod>::namespaced(self.cluster.admin.clone(), NAMESPACE);
        let drivers = format!("app.kubernetes.io/component={DRIVER_COMPONENT}");
        Ok(api.list(&ListParams::default().labels(&drivers)).await?.items)
    }

    /// The name of the driver pod on a node.
    pub async fn driver_pod(&self, node: &str) -> Result<String, Broken> {
        let here = |pod: &&Pod| pod.spec.as_ref().and_then(|s| s.node_name.as_deref()) == Some(node);
        let found = self.driver_pods().await?.iter().find(here).map(ResourceExt::name_any);
        found.ok_or_else(|| Broken(format!("no driver pod on {node}")))
    }

    /// The version that each node's driver pod really is of.
    pub async fn driver_versions(&self) -> Result<BTreeMap<String, String>, Broken> {
        let of = |pod: &Pod| {
            let spec = pod.spec.as_ref()?;
            let version = DriverVersion::from_image(spec.containers.first()?.image.as_deref()?)?;
            Some((spec.node_name.clone()?, version.to_string()))
        };
        Ok(self.driver_pods().await?.iter().filter_map(of).collect())
    }

    /// The messages of the Warnings on a node.
    pub async fn warnings(&self, node: &str) -> Result<Vec<String>, Broken> {
        let api = Api::<Event>::all(self.cluster.admin.clone());
        let on_node = |event: &Event| event.involved_object.name.as_deref() == Some(node);
        let warning = |event: &Event| event.type_.as_deref() == Some("Warning");
        let events = api.list(&ListParams::default()).await?.items.into_iter();
        Ok(events.filter(|e| on_node(e) && warning(e)).filter_map(|e| e.message).collect())
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

    /// What was recorded so far.
    pub fn trace(&self) -> Trace {
        self.scene().into_trace()
    }

    /// Whether the controller may be blind for a while.
    pub fn is_blinded(&self) -> bool {
        self.blinded.load(Ordering::Relaxed)
    }

    /// Waits until the driver of a node is Ready and of this version. Returns the last moment at which it was not yet, as
    /// far as anybody looked.
    pub async fn until_driver_ready(&self, node: &str, version: &str) -> Result<Instant, Broken> {
        let here = |pod: &Pod| pod.spec.as_ref().and_then(|s| s.node_name.as_deref()) == Some(node);
        let image = |pod: &Pod| pod.spec.as_ref()?.containers.first()?.image.clone();
        let is_new = |pod: &Pod| image(pod).is_some_and(|image| image.contains(version));
        let is_up = |pod: &Pod| here(pod) && is_new(pod) && crate::actors::is_ready(pod);
        let came_up = async {
            let mut not_yet = Instant::now();
            loop {
                let looked = Instant::now();
                if self.driver_pods().await?.iter().any(is_up) {
                    return Ok(not_yet);
                }
                not_yet = looked;
                tokio::time::sleep(LOOK_EVERY).await;
            }
        };
        let late = || Err(Broken(format!("no driver {version} became Ready on {node}")));
        timeout(PATIENCE, came_up).await.unwrap_or_else(|_| late())
    }

    /// Waits until a node is cordoned, and compares that with `since`. Nothing is said of a controller that is disturbed.
    pub async fn until_cordoned(&mut self, node: &str, since: Instant, within: Duration) -> Outcome {
        let at = |scene: &Scene| scene.cordoned_at.get(node).copied();
        self.until(&format!("{node} is cordoned"), |scene| at(scene).is_some()).await?;
        let took = at(&self.scene()).map(|at| at.saturating_duration_since(since)).unwrap_or_default();
        must(took < within || self.disturbed.load(Ordering::Relaxed), || {
            format!("{node} was cordoned {took:?} after its driver was Ready")
        })
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
        let what = format!("a pod {beginning}… in {namespace} is Ready");
        let ready = |(name, _, ready): &(String, String, bool)| *ready && name.starts_with(beginning);
        let found = async || Ok(self.pods(namespace).await?.into_iter().find(ready));
        Ok(self.poll(&what, found).await?.0)
    }

    /// Waits until pods are there and all Ready.
    pub async fn until_pods_ready(&self, namespace: &str, count: usize) -> Outcome {
        let what = format!("{count} pods in {namespace} are there and Ready");
        let all = |pods: &Vec<(String, String, bool)>| pods.len() == count && pods.iter().all(|pod| pod.2);
        self.poll(&what, async || Ok(Some(self.pods(namespace).await?).filter(all))).await.map(drop)
    }

    /// Waits until a rollout is in a phase.
    pub async fn until_rollout(&self, name: &str, phase: RolloutPhase) -> Outcome {
        let api = Api::<Rollout>::all(self.cluster.admin.clone());
        let there = async || {
            let rollout = api.get_opt(name).await?;
            Ok(rollout.and_then(|rollout| rollout.status).filter(|status| status.phase == phase).map(drop))
        };
        self.poll(&format!("rollout {name} is {phase:?}"), there).await
    }

    /// Asks again and again until there is an answer.
    pub(crate) async fn poll<T, F>(&self, what: &str, mut ask: impl FnMut() -> F) -> Result<T, Broken>
    where
        F: Future<Output = Result<Option<T>, Broken>>,
    {
        let answered = async {
            loop {
                if let Some(answer) = ask().await? {
                    return Ok(answer);
                }
                tokio::time::sleep(LOOK_EVERY).await;
            }
        };
        match timeout(PATIENCE, answered).await {
            Ok(answer) => answer,
            Err(_) => Err(Broken(format!("waited in vain until {what}; {}", self.whereabouts().await))),
        }
    }

    /// Where everything is: what a person would ask for first.
    async fn whereabouts(&self) -> String {
        let api = Api::<Rollout>::all(self.cluster.admin.clone());
        let rollouts = api.list(&ListParams::default()).await.map(|list| list.items).unwrap_or_default();
        let rollouts = rollouts.into_iter().map(|rollout| {
            let status = rollout.status.as_ref();
            let stages = status.map(|status| &status.stages).into_iter().flatten();
            let stages = stages.map(|stage| format!("{} {:?} {:?}", stage.name, stage.phase, stage.message));
            let stages = stages.collect::<Vec<_>>().join(", ");
            format!("{}: {:?} ({stages})", rollout.name_any(), status.map(|status| status.phase))
        });
        let reasons = self.controllers.reasons.borrow().clone();
        let nodes = self.scene().states.into_iter().map(|(node, state)| {
            format!("{node}: {state:?}, {}", reasons.get(&node).map_or("no reason", String::as_str))
        });
        rollouts.chain(nodes).collect::<Vec<_>>().join("\n  ")
    }

    /// Nothing about the nodes changes for a while.
    pub async fn stands_still_for(&mut self, time: Duration) -> Outcome {
        // The controller knows what it wrote before it is seen here: on a busy machine much before.
        tokio::time::sleep(NEWS_WITHIN).await;
        let before = self.scene().states;
        tokio::time::sleep(time).await;
        must(self.scene().states == before, || {
            format!("nodes moved: {before:?} became {:?}", self.scene().states)
        })
    }
}
