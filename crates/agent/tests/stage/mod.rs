//! One node in the embedded API, a machine in memory under it, and what a cluster does by itself: DaemonSets follow the
//! node's labels, pods that are told to go are gone after a while.

#![allow(
    dead_code,
    clippy::missing_panics_doc,
    reason = "each test file uses a part of it, and a test may panic"
)]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, Namespace, Node as ApiNode, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt as _};
use pitcrew_agent::Failure;
use pitcrew_agent::clock::Clock;
use pitcrew_agent::cluster::Cluster;
use pitcrew_agent::fake::{Death, FakeHost, Machine};
use pitcrew_agent::finish::finish;
use pitcrew_agent::labels::PAUSED;
use pitcrew_agent::settings::{Settings, Uncordon};
use pitcrew_agent::stop::{Stop, Stopper};
use pitcrew_agent::uninstall::{Agent, uninstall};
use pitcrew_sim::api::{ApiServer, Fault};
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

pub(crate) const NODE: &str = "gpu-1";
pub(crate) const NAMESPACE: &str = "gpu-operator";
const EPOCH: Timestamp = Timestamp::constant(1_767_225_600, 0);
const NEVER: Duration = Duration::from_hours(24 * 365);
/// How often the cluster looks after its pods.
const BEAT: Duration = Duration::from_millis(500);

/// Operands of the fleet: `app`, label.
pub(crate) const OPERANDS: [(&str, &str); 3] = [
    ("nvidia-operator-validator", "nvidia.com/gpu.deploy.operator-validator"),
    ("nvidia-device-plugin-daemonset", "nvidia.com/gpu.deploy.device-plugin"),
    ("nvidia-dcgm", "nvidia.com/gpu.deploy.dcgm"),
];

/// Where an agent is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kill {
    /// At a call to the machine.
    Host(Death),
    /// At a request to the API, before it is served or after.
    Api { at: usize, after: bool },
}

/// How many requests the agent made, and at which it is killed, before that is served or after.
#[derive(Default)]
struct Requests {
    made: usize,
    kill: Option<(usize, bool)>,
}

pub(crate) struct Stage {
    pub(crate) api: ApiServer,
    pub(crate) admin: Client,
    pub(crate) host: Arc<FakeHost>,
    pub(crate) settings: Settings,
    /// What the agent asked of the API, and what it wrote on its node.
    pub(crate) trace: Arc<Mutex<Vec<String>>>,
    /// The labels that the list is limited to that is asked for next.
    selector: Arc<Mutex<String>>,
    requests: Arc<Mutex<Requests>>,
    died: Arc<Notify>,
    cluster: JoinHandle<()>,
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.cluster.abort();
    }
}

impl Stage {
    /// A node with operands, and a Deployment's pod on one of its GPUs.
    pub(crate) async fn new(machine: Machine) -> Self {
        Self::bare(machine).await.with_pods().await
    }

    /// The same on a cluster of somebody else's; the embedded API stays empty.
    pub(crate) async fn elsewhere(admin: Client) -> Self {
        let stage = Self::over(ApiServer::new(EPOCH), admin.clone(), admin, Machine::default()).await;
        for name in [NAMESPACE, "research"] {
            stage.create::<Namespace>(None, json!({"metadata": {"name": name}})).await;
        }
        stage.with_pods().await
    }

    async fn with_pods(self) -> Self {
        let stage = self;
        for (app, label) in OPERANDS {
            stage.label(label, Some("true")).await;
            stage.pod(NAMESPACE, app, json!({}), operand(app, label)).await;
        }
        stage.label("nvidia.com/gpu.deploy.driver", Some("true")).await;
        stage.pod("research", "train", json!({}), gpu_pod()).await;
        stage.forget();
        stage
    }

    /// A node without anything on it.
    pub(crate) async fn bare(machine: Machine) -> Self {
        let api = ApiServer::new(EPOCH);
        let (admin, others) = (api.client_as("admin"), api.client_as("cluster"));
        Self::over(api, admin, others, machine).await
    }

    async fn over(api: ApiServer, admin: Client, others: Client, machine: Machine) -> Self {
        let requests = Arc::new(Mutex::new(Requests::default()));
        let died = Arc::new(Notify::new());
        let (trace, selector) = (Arc::new(Mutex::new(Vec::new())), Arc::default());
        let host = Arc::new(FakeHost::new(machine));
        let cluster = tokio::spawn(live(others));
        let settings =
            Settings { drain: false, leave_limit: Some(Duration::from_mins(10)), ..Settings::default() };
        let stage = Self { api, admin, host, settings, trace, selector, requests, died, cluster };
        stage.listen();
        stage.create::<ApiNode>(None, json!({"metadata": {"name": NODE}, "spec": {}})).await;
        stage
    }

    fn listen(&self) {
        let (trace, requests, died) = (self.trace.clone(), self.requests.clone(), self.died.clone());
        let selector = self.selector.clone();
        self.api.on_request_as("trace", move |request| {
            if request.user != "agent" {
                return None;
            }
            if request.resource != "events" {
                let name = [request.namespace.as_str(), request.name.as_str()];
                let name: Vec<&str> = name.into_iter().filter(|part| !part.is_empty()).collect();
                let selector = std::mem::take(&mut *selector.lock().unwrap());
                let line = format!("{} {} {} {selector}", request.verb, request.resource, name.join("/"));
                trace.lock().unwrap().push(line.trim().to_owned());
            }
            let mut requests = requests.lock().unwrap();
            requests.made += 1;
            let (at, after) = requests.kill?;
            if requests.made != at {
                return None;
            }
            requests.kill = None;
            died.notify_one();
            Some(if after { Fault::LateReply(NEVER) } else { Fault::Delay(NEVER) })
        });
        let trace = self.trace.clone();
        self.api.on_written(move |written| {
            if written.request.user == "agent" && written.resource == "nodes" {
                let body: Value = serde_json::from_slice(written.body).unwrap_or_default();
                let mut trace = trace.lock().unwrap();
                for part in ["/metadata/labels", "/metadata/annotations", "/spec"] {
                    for (key, value) in body.pointer(part).and_then(Value::as_object).into_iter().flatten() {
                        trace.push(format!("  {key} = {value}"));
                    }
                }
            }
        });
    }

    pub(crate) fn forget(&self) {
        self.trace.lock().unwrap().clear();
        *self.requests.lock().unwrap() = Requests::default();
    }

    pub(crate) fn requests(&self) -> usize {
        self.requests.lock().unwrap().made
    }

    pub(crate) fn agent(&self, stop: Stop) -> Agent<'_, FakeHost> {
        let client = noting(self.selector.clone(), self.api.client_as("agent"));
        let clock = Clock::starting_at(self.api.now());
        let cluster = Cluster::new(client, NODE, clock, stop.clone());
        Agent { host: &self.host, cluster, stop, settings: self.settings.clone() }
    }

    /// Runs `uninstall_driver` to its end.
    pub(crate) async fn uninstall(&self) -> Result<(), Failure> {
        uninstall(&self.agent(Stop::never())).await
    }

    /// Runs it, and tells it to end after a while.
    pub(crate) async fn uninstall_told_after(&self, time: Duration) -> Result<(), Failure> {
        let (stopper, stop) = Stopper::new();
        let tell = async {
            tokio::time::sleep(time).await;
            stopper.stop();
            std::future::pending::<()>().await;
        };
        let agent = self.agent(stop);
        tokio::select! {
            result = uninstall(&agent) => result,
            () = tell => unreachable!("it never ends"),
        }
    }

    pub(crate) async fn finish(&self, limit: Duration) -> Result<(), Failure> {
        finish(&self.agent(Stop::never()), Some(limit)).await
    }

    /// The agent is to be killed there.
    pub(crate) fn plan(&self, kill: Kill) {
        match kill {
            Kill::Host(death) => self.host.dies(Some(death)),
            Kill::Api { at, after } => self.requests.lock().unwrap().kill = Some((at, after)),
        }
    }

    /// Runs an agent until it ends or is killed; `None`: it was killed.
    pub(crate) async fn until_killed<T>(&self, agent: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            () = self.host.died() => None,
            () = self.died.notified() => None,
            result = agent => Some(result),
        }
    }

    /// What the driver container does once its init container has succeeded.
    pub(crate) fn load_new_driver(&self) {
        self.host.change(|machine| {
            let new = Machine::with_driver("new");
            machine.modules = new.modules;
            machine.mounts.extend(["/run/nvidia/driver".to_owned()]);
            machine.file("/run/nvidia/nvidia-driver.state", "new");
            machine.file("/run/nvidia/validations/.driver-ctr-ready", "");
        });
    }

    pub(crate) async fn create<K>(&self, namespace: Option<&str>, object: Value) -> K
    where
        K: kube::Resource<DynamicType = ()>
            + Clone
            + std::fmt::Debug
            + serde::Serialize
            + serde::de::DeserializeOwned,
    {
        let mut object = object;
        if let Some(namespace) = namespace {
            object["metadata"]["namespace"] = json!(namespace);
        }
        let object: K = serde_json::from_value(object).unwrap();
        let url = K::url_path(&(), namespace);
        let request = kube::core::Request::new(url);
        let body = serde_json::to_vec(&object).unwrap();
        let request = request.create(&PostParams::default(), body).unwrap();
        self.admin.request(request).await.unwrap()
    }

    /// A pod on the node.
    pub(crate) async fn pod(&self, namespace: &str, name: &str, metadata: Value, mut spec: Value) -> Pod {
        spec["nodeName"] = json!(NODE);
        if spec.get("containers").is_none() {
            spec["containers"] = json!([{"name": "main", "image": "i"}]);
        }
        let mut meta = json!({"name": name, "labels": {"app": name}});
        if let Some(kind) = spec.as_object_mut().and_then(|spec| spec.remove("ownedBy")) {
            meta["ownerReferences"] = json!([{"apiVersion": "apps/v1", "kind": kind, "name": name, "uid": "u", "controller": true}]);
        }
        for (key, value) in metadata.as_object().into_iter().flatten() {
            meta[key] = value.clone();
        }
        let pod: Pod = self.create(Some(namespace), json!({"metadata": meta, "spec": spec})).await;
        // Budgets protect only pods that are up.
        let ready = json!([{"type": "Ready", "status": "True"}]);
        let status = Patch::Merge(json!({"status": {"phase": "Running", "conditions": ready}}));
        let api = Api::<Pod>::namespaced(self.admin.clone(), namespace);
        api.patch_status(&pod.name_any(), &PatchParams::default(), &status).await.unwrap()
    }

    /// A claim that this device is allocated to.
    pub(crate) async fn claim(&self, namespace: &str, name: &str, device: Value) {
        self.create::<ResourceClaim>(Some(namespace), json!({"metadata": {"name": name}, "spec": {}})).await;
        let status = json!({"status": {"allocation": {"devices": {"results": [device]}}}});
        let api = Api::<ResourceClaim>::namespaced(self.admin.clone(), namespace);
        api.patch_status(name, &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
    }

    pub(crate) async fn budget(&self, namespace: &str, app: &str, allowed: i32) {
        let object = json!({
            "metadata": {"name": app},
            "spec": {"maxUnavailable": allowed, "selector": {"matchLabels": {"app": app}}},
        });
        self.create::<PodDisruptionBudget>(Some(namespace), object).await;
        let status = json!({"status": {
            "disruptionsAllowed": allowed, "currentHealthy": 1, "desiredHealthy": 1, "expectedPods": 1, "observedGeneration": 1,
        }});
        let api = Api::<PodDisruptionBudget>::namespaced(self.admin.clone(), namespace);
        api.patch_status(app, &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
    }

    pub(crate) async fn label(&self, key: &str, value: Option<&str>) {
        self.patch(json!({"metadata": {"labels": {key: value}}})).await;
    }

    pub(crate) async fn annotate(&self, key: &str, value: Option<&str>) {
        self.patch(json!({"metadata": {"annotations": {key: value}}})).await;
    }

    pub(crate) async fn patch(&self, patch: Value) {
        let api = Api::<ApiNode>::all(self.admin.clone());
        api.patch(NODE, &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
    }

    pub(crate) async fn node(&self) -> ApiNode {
        Api::<ApiNode>::all(self.admin.clone()).get(NODE).await.unwrap()
    }

    pub(crate) async fn is_cordoned(&self) -> bool {
        self.node().await.spec.and_then(|spec| spec.unschedulable).unwrap_or(false)
    }

    /// Labels that are paused.
    pub(crate) async fn paused(&self) -> Vec<String> {
        let node = self.node().await;
        let paused = node.labels().iter().filter(|(_, value)| value.contains(PAUSED));
        paused.map(|(key, _)| key.clone()).collect()
    }

    pub(crate) async fn pods(&self) -> Vec<String> {
        let pods = Api::<Pod>::all(self.admin.clone()).list(&ListParams::default()).await.unwrap();
        pods.iter().map(|pod| format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any())).collect()
    }

    /// A person deletes a pod, at once.
    pub(crate) async fn admin_delete(&self, namespace: &str, name: &str) {
        let api = Api::<Pod>::namespaced(self.admin.clone(), namespace);
        api.delete(name, &DeleteParams::default().grace_period(0)).await.unwrap();
    }

    /// The messages of the Events, warnings marked.
    pub(crate) async fn events(&self) -> Vec<String> {
        let events = Api::<Event>::all(self.admin.clone()).list(&ListParams::default()).await.unwrap();
        let text = |event: &Event| {
            let warning = if event.type_.as_deref() == Some("Warning") { "! " } else { "" };
            format!("{warning}{}", event.message.clone().unwrap_or_default())
        };
        events.iter().map(text).collect()
    }

    /// Everything that an end is compared by, without times. Of why a reboot is needed the beginning: a start that was killed
    /// leaves less to say than one that was not.
    pub(crate) async fn end(&self) -> String {
        let node = self.node().await;
        let spec = node.spec.clone().unwrap_or_default();
        let without_time = |text: &String| {
            let mut value: Value = serde_json::from_str(text).unwrap_or(json!(text));
            if let Some(object) = value.as_object_mut() {
                object.remove("since");
                let why = object.get("why").and_then(Value::as_str).unwrap_or_default();
                let begins = json!(why.split(" (").next());
                if let Some(why) = object.get_mut("why") {
                    *why = begins;
                }
            }
            value.to_string()
        };
        let annotations: Vec<String> =
            node.annotations().iter().map(|(key, value)| format!("{key}={}", without_time(value))).collect();
        let Machine { modules, mounts, files, devices, .. } = self.host.machine();
        format!(
            "labels {:?}\nannotations {annotations:?}\ncordoned {:?}\npods {:?}\nmodules {modules:?}\nmounts {mounts:?}\nfiles \
             {files:?}\ndevices {devices:?}",
            node.labels(),
            spec.unschedulable,
            self.pods().await,
        )
    }
}

/// Hooks of the embedded API see no query: what a list is limited to is noted on its way there.
fn noting(selector: Arc<Mutex<String>>, client: Client) -> Client {
    let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
        let (selector, client) = (selector.clone(), client.clone());
        async move {
            let query = request.uri().query().unwrap_or_default();
            let labels = query.split('&').find_map(|part| part.strip_prefix("labelSelector="));
            *selector.lock().unwrap() = labels.unwrap_or_default().replace("%3D", "=");
            client.send(request).await
        }
    });
    Client::new(service, "default")
}

/// The spec of an operand's pod.
pub(crate) fn operand(app: &str, label: &str) -> Value {
    let _ = app;
    json!({"ownedBy": "DaemonSet", "nodeSelector": {label: "true"}})
}

/// The spec of a pod with a GPU, made by a ReplicaSet.
pub(crate) fn gpu_pod() -> Value {
    json!({
        "ownedBy": "ReplicaSet",
        "containers": [{"name": "main", "image": "i", "resources": {"limits": {"nvidia.com/gpu": "1"}}}],
    })
}

/// What goes on in a cluster by itself.
async fn live(client: Client) {
    loop {
        tokio::time::sleep(BEAT).await;
        let Ok(node) = Api::<ApiNode>::all(client.clone()).get(NODE).await else { continue };
        let Ok(pods) = Api::<Pod>::all(client.clone()).list(&ListParams::default()).await else { continue };
        for pod in pods {
            let api = Api::<Pod>::namespaced(client.clone(), &pod.namespace().unwrap_or_default());
            let selector = pod.spec.as_ref().and_then(|spec| spec.node_selector.clone()).unwrap_or_default();
            let belongs = selector.iter().all(|(key, value)| node.labels().get(key) == Some(value));
            let stays = pod.annotations().contains_key("test/stays");
            if (pod.metadata.deletion_timestamp.is_some() && !stays) || !belongs {
                let at_once = DeleteParams::default().grace_period(0);
                let _ = api.delete(&pod.name_any(), &at_once).await;
            }
        }
        for (app, label) in OPERANDS {
            let wanted = node.labels().get(label).is_some_and(|value| value == "true");
            let api = Api::<Pod>::namespaced(client.clone(), NAMESPACE);
            if wanted && matches!(api.get_opt(app).await, Ok(None)) {
                let pod = json!({
                    "metadata": {"name": app, "labels": {"app": app}, "ownerReferences":
                        [{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": app, "uid": "u", "controller": true}]},
                    "spec": {"nodeName": NODE, "nodeSelector": {label: "true"}, "containers": [{"name": "main", "image": "i"}]},
                });
                if let Ok(pod) = serde_json::from_value(pod) {
                    let _ = api.create(&PostParams::default(), &pod).await;
                }
            }
        }
    }
}

/// The documented behaviour of a cluster without `finish`.
pub(crate) fn early(mut stage: Stage) -> Stage {
    stage.settings.uncordon = Uncordon::Early;
    stage
}
