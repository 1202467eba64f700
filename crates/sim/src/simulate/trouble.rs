//! What people, machines and other programs do to the cluster in a run, and how each of it ends.

use std::collections::BTreeSet;
use std::ops::Range;
use std::time::Duration;

use fastrand::Rng;
use jiff::SignedDuration;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt};
use pitcrew_core::api::{DriverPolicy, Rollout};
use pitcrew_core::contract::{DEFAULT_LABEL_DOMAIN, Keys, State, nvsentinel};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::case::{AGAIN, Case, TO, draw};
use super::controllers::Controllers;
use super::fault::Fault;
use super::weather::Weather;
use crate::actors::{
    ClientFault, DRIVER_COMPONENT, DriverFault, Fault as Broken, GPU, GateOutcome, GateRule, NAMESPACE,
    Nodes, OPERANDS, quarantined_by_us, released,
};
use crate::cluster::Cluster;
use crate::fleet::Fleet;

/// A foreign finalizer: what it is on does not go.
const STUCK: &str = "sim.pitcrew.dev/stuck";
/// What pods that nobody scheduled are called.
const LATECOMER: &str = "late-";

/// Something that goes wrong, to somebody, for a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// What.
    pub fault: Fault,
    /// To whom: a number from which a node, a pod or a value is chosen when it happens.
    pub whom: u32,
    /// For how long.
    pub lasts: Duration,
}

/// The troubles of a case, in their order.
pub(super) fn draw_all(
    seed: u64,
    faults: &BTreeSet<Fault>,
    fleet: &Fleet,
    storm: Duration,
) -> Vec<(Duration, Trouble)> {
    let mut all = Vec::new();
    for fault in faults {
        let mut rng = draw(seed, fault.name());
        for _ in 0..often(*fault, fleet, &mut rng) {
            let at = storm.mul_f64(rng.f64());
            let lasts = Duration::from_millis(rng.u64(lasts(*fault))).min(storm.saturating_sub(at));
            all.push((at, Trouble { fault: *fault, whom: rng.u32(..), lasts }));
        }
    }
    all.sort_by_key(|(at, trouble)| (*at, trouble.fault));
    all
}

/// For how many milliseconds. Another leader takes over after fifteen seconds at the soonest.
fn lasts(fault: Fault) -> Range<u64> {
    if fault == Fault::Overlap { 10_000..45_000 } else { 200..20_000 }
}

/// How often it happens in a storm. What happens to single requests is drawn with them (`weather.rs`).
fn often(fault: Fault, fleet: &Fleet, rng: &mut Rng) -> usize {
    match fault {
        Fault::Conflict
        | Fault::Throttle
        | Fault::ServerError
        | Fault::LostReply
        | Fault::LateReply
        | Fault::SlowCall
        | Fault::OneInSix
        | Fault::BadVersion
        | Fault::Spoil
        | Fault::GateNo
        | Fault::Intruder
        | Fault::Alarm
        | Fault::Silence => 0,
        Fault::LabelWipe
        | Fault::Retarget
        | Fault::Abort
        | Fault::Overlap
        | Fault::Remove
        | Fault::TakeBack => 1,
        Fault::Join | Fault::Replace | Fault::Pause | Fault::PolicyEdit | Fault::ClockJump => rng.usize(1..3),
        _ => rng.usize(1..=2 + fleet.nodes / 4),
    }
}

/// How a driver can be broken.
pub(super) fn driver_fault(rng: &mut Rng) -> Broken {
    [Broken::CrashLoop, Broken::ImageMissing, Broken::Hang][rng.usize(..3)]
}

/// A pod that takes a device of a node without asking the scheduler.
pub(super) async fn put_on(client: kube::Client, node: &str, called: &str) -> kube::Result<Pod> {
    let container = json!({"name": "main", "image": "late", "resources": {"limits": {GPU: "1"}}});
    let spec = json!({"nodeName": node, "containers": [container]});
    let meta = json!({"name": format!("{LATECOMER}{called}"), "namespace": "team"});
    let pod = serde_json::from_value(json!({"metadata": meta, "spec": spec}));
    let pod = pod.map_err(kube::Error::SerdeError)?;
    Api::namespaced(client, "team").create(&PostParams::default(), &pod).await
}

/// The hands that make trouble, and undo it.
pub(super) struct Hands<'a> {
    pub(super) case: &'a Case,
    pub(super) cluster: &'a Cluster,
    pub(super) controllers: &'a mut Controllers,
    pub(super) weather: &'a Weather,
    pub(super) joined: &'a mut u32,
}

impl Hands<'_> {
    /// Makes trouble. The node that it is about, if it is about one.
    pub(super) async fn begin(&mut self, trouble: Trouble) -> kube::Result<Option<String>> {
        let Trouble { fault, whom, lasts } = trouble;
        let until = Instant::now() + lasts;
        match fault {
            Fault::WatchCut => self.weather.cut(self.controllers.user(whom)),
            Fault::Compaction => self.weather.compact(self.controllers.user(whom)),
            Fault::StaleView => self.weather.stall(self.controllers.user(whom), whom, until),
            Fault::Duplicates => self.weather.double(self.controllers.user(whom), true),
            Fault::Webhook | Fault::NoReturn | Fault::Quota | Fault::Overlap => self.weather.begin(fault),
            Fault::Crash => self.controllers.crash(whom, lasts, self.weather),
            Fault::ClockJump => {
                self.controllers.set_clocks(SignedDuration::from_secs(i64::from(whom % 600) - 300));
            }
            Fault::NotReady
            | Fault::Reboot
            | Fault::Flap
            | Fault::Unproven
            | Fault::ClientStuck
            | Fault::GateBlind
            | Fault::CrashLoop
            | Fault::ImageMissing
            | Fault::Hang => return self.break_machine(fault, whom).await,
            Fault::Replace | Fault::Remove | Fault::Join => return self.move_machine(fault, whom).await,
            Fault::StuckPod => self.hold_pod(whom).await?,
            Fault::PodDeleted => self.delete_driver(whom).await?,
            Fault::Latecomer => self.put_latecomer(whom).await?,
            Fault::Scale => self.scale(whom).await?,
            Fault::TightBudget => self.set_budgets(Some(whom)).await?,
            Fault::Pause => self.set_options(json!({"autoUpgrade": false})).await?,
            Fault::PolicyEdit => self.set_options(limits(whom)).await?,
            Fault::Retarget => {
                let version = if whom.is_multiple_of(3) { super::case::FROM } else { AGAIN };
                self.cluster.set_driver_version(version).await?;
            }
            Fault::Abort => self.abort(true).await?,
            Fault::Cordon | Fault::Uncordon | Fault::Relabel | Fault::Skip | Fault::Quarantine => {
                return self.mark(fault, whom).await;
            }
            Fault::LabelWipe => self.wipe().await?,
            Fault::TakeBack => self.take_back().await?,
            Fault::StruckOff => self.strike_off(whom).await?,
            Fault::Conflict
            | Fault::Throttle
            | Fault::ServerError
            | Fault::LostReply
            | Fault::LateReply
            | Fault::SlowCall
            | Fault::OneInSix
            | Fault::BadVersion
            | Fault::Spoil
            | Fault::GateNo
            | Fault::Intruder
            | Fault::Alarm
            | Fault::Silence => {}
        }
        Ok(None)
    }

    /// Undoes what does not end by itself, on the node that it was about.
    pub(super) async fn end(&mut self, trouble: Trouble, node: Option<String>) -> kube::Result<()> {
        let Trouble { fault, whom, .. } = trouble;
        match fault {
            Fault::Duplicates => self.weather.double(self.controllers.user(whom), false),
            Fault::Webhook | Fault::NoReturn | Fault::Quota | Fault::Overlap => self.weather.end(fault),
            Fault::ClockJump => self.controllers.set_clocks(SignedDuration::ZERO),
            Fault::NotReady | Fault::Reboot => {
                if let Some(node) = node {
                    self.behave(|behaviour| {
                        if fault == Fault::Reboot {
                            *behaviour.boots.entry(node.clone()).or_default() += 1;
                        }
                        behaviour.down.remove(&node);
                    });
                }
            }
            Fault::Unproven => self.behave(|behaviour| behaviour.unproven.clear()),
            Fault::ClientStuck => self.behave(|behaviour| behaviour.clients.clear()),
            Fault::GateBlind => self.behave(|behaviour| behaviour.gates.retain(is_no)),
            Fault::StruckOff => self.list_all().await?,
            Fault::CrashLoop | Fault::ImageMissing | Fault::Hang => self.behave(|behaviour| {
                behaviour.drivers.retain(is_for_good);
            }),
            Fault::TakeBack => self.want_again(whom).await?,
            Fault::StuckPod => self.free_pods().await?,
            Fault::Latecomer => self.remove_latecomers().await?,
            Fault::TightBudget => self.set_budgets(None).await?,
            Fault::Pause => self.set_options(json!({"autoUpgrade": true})).await?,
            Fault::Abort if !self.case.abort_stays() => self.abort(false).await?,
            Fault::Skip => self.unskip().await?,
            Fault::Quarantine => self.release(node).await?,
            _ => {}
        }
        Ok(())
    }

    /// Undoes everything that a person would have to undo, so that nothing stands in the way any more.
    pub(super) async fn mend(&mut self) -> kube::Result<()> {
        self.weather.mend();
        self.controllers.set_clocks(SignedDuration::ZERO);
        self.controllers.start_all();
        self.behave(|behaviour| {
            behaviour.down.clear();
            behaviour.unproven.clear();
            behaviour.clients.clear();
            behaviour.drivers.retain(is_for_good);
            behaviour.gates.retain(is_no);
        });
        self.list_all().await?;
        self.free_pods().await?;
        self.remove_latecomers().await?;
        self.set_budgets(None).await?;
        self.unskip().await?;
        self.set_options(self.case.fleet.upgrade_policy.clone()).await?;
        self.scale_back().await?;
        if self.case.has(Fault::Abort) && !self.case.abort_stays() {
            self.abort(false).await?;
        }
        self.relabel_foreign().await
    }

    /// A person closes NVSentinel's circuit breaker whenever it trips.
    pub(super) async fn close_breaker(&self) -> kube::Result<()> {
        if !self.case.fleet.nvsentinel {
            return Ok(());
        }
        let api = Api::<ConfigMap>::namespaced(self.cluster.admin.clone(), nvsentinel::NAMESPACE);
        let closed = Patch::Merge(json!({"data": {"status": "CLOSED"}}));
        ignore_missing(api.patch(nvsentinel::BREAKER, &params(), &closed).await)
    }

    pub(super) fn behave(&self, change: impl FnOnce(&mut crate::actors::Behaviour)) {
        self.cluster.actors.behaviour().change(change);
    }

    pub(super) fn nodes(&self) -> Api<Node> {
        Api::all(self.cluster.admin.clone())
    }

    async fn node(&self, whom: u32) -> kube::Result<Option<String>> {
        let nodes = self.nodes().list(&ListParams::default()).await?.items;
        Ok(chosen(&nodes, whom).map(ResourceExt::name_any))
    }

    async fn break_machine(&self, fault: Fault, whom: u32) -> kube::Result<Option<String>> {
        let Some(node) = self.node(whom).await? else { return Ok(None) };
        let named = || Nodes::Named(node.clone());
        let broken = |fault| DriverFault { nodes: named(), version: Some(TO.to_owned()), fault };
        self.behave(|behaviour| match fault {
            Fault::NotReady | Fault::Reboot => drop(behaviour.down.insert(node.clone())),
            Fault::Flap => *behaviour.driver_restarts.entry(node.clone()).or_default() += 1,
            Fault::Unproven => drop(behaviour.unproven.insert(node.clone())),
            Fault::CrashLoop => behaviour.drivers.push(broken(Broken::CrashLoop)),
            Fault::ImageMissing => behaviour.drivers.push(broken(Broken::ImageMissing)),
            Fault::Hang => behaviour.drivers.push(broken(Broken::Hang)),
            Fault::GateBlind => {
                let (nodes, outcome) = (named(), GateOutcome::ImageMissing);
                behaviour.gates.push(GateRule { gate: None, nodes, version: None, outcome });
            }
            _ => {
                let operand = &OPERANDS[whom as usize % OPERANDS.len()];
                let client = operand.app.to_owned();
                behaviour.clients.push(ClientFault { client, nodes: named(), fault: Broken::Hang });
            }
        });
        Ok(Some(node))
    }

    async fn move_machine(&mut self, fault: Fault, whom: u32) -> kube::Result<Option<String>> {
        if fault == Fault::Join {
            *self.joined += 1;
            self.join(&format!("gpu-new-{}", self.joined)).await?;
            return Ok(None);
        }
        let Some(node) = self.node(whom).await? else { return Ok(None) };
        ignore_missing(self.nodes().delete(&node, &DeleteParams::default()).await)?;
        if fault == Fault::Replace {
            tokio::time::sleep(Duration::from_millis(u64::from(whom % 2000))).await;
            self.join(&node).await?;
        }
        Ok(Some(node))
    }

    async fn join(&self, name: &str) -> kube::Result<()> {
        let node = serde_json::from_value(self.case.fleet.node(name)).map_err(kube::Error::SerdeError)?;
        ignore_missing(self.nodes().create(&PostParams::default(), &node).await)
    }

    async fn drivers(&self) -> kube::Result<Vec<Pod>> {
        let selector = format!("app.kubernetes.io/component={DRIVER_COMPONENT}");
        let pods = Api::<Pod>::namespaced(self.cluster.admin.clone(), NAMESPACE);
        Ok(pods.list(&ListParams::default().labels(&selector)).await?.items)
    }

    async fn delete_driver(&self, whom: u32) -> kube::Result<()> {
        let pods = self.drivers().await?;
        let Some(pod) = chosen(&pods, whom) else { return Ok(()) };
        let api = Api::<Pod>::namespaced(self.cluster.admin.clone(), NAMESPACE);
        ignore_missing(api.delete(&pod.name_any(), &DeleteParams::default()).await)
    }

    fn team(&self) -> Api<Pod> {
        Api::namespaced(self.cluster.admin.clone(), "team")
    }

    async fn hold_pod(&self, whom: u32) -> kube::Result<()> {
        let pods = self.team().list(&ListParams::default()).await?.items;
        let Some(pod) = chosen(&pods, whom).filter(|pod| pod.metadata.deletion_timestamp.is_none()) else {
            return Ok(());
        };
        let patch = Patch::Merge(json!({"metadata": {"finalizers": [STUCK]}}));
        ignore_missing(self.team().patch(&pod.name_any(), &params(), &patch).await)
    }

    async fn free_pods(&self) -> kube::Result<()> {
        for pod in self.team().list(&ListParams::default()).await? {
            if pod.finalizers().iter().any(|finalizer| finalizer == STUCK) {
                let patch = Patch::Merge(json!({"metadata": {"finalizers": null}}));
                ignore_missing(self.team().patch(&pod.name_any(), &params(), &patch).await)?;
            }
        }
        Ok(())
    }

    /// On a node that is being upgraded, if there is one.
    async fn put_latecomer(&self, whom: u32) -> kube::Result<()> {
        let mut nodes = self.nodes().list(&ListParams::default()).await?.items;
        let is_closed = |node: &Node| node.spec.as_ref().is_some_and(|spec| spec.unschedulable == Some(true));
        if nodes.iter().any(is_closed) {
            nodes.retain(is_closed);
        }
        let Some(node) = chosen(&nodes, whom) else { return Ok(()) };
        ignore_missing(put_on(self.cluster.admin.clone(), &node.name_any(), &whom.to_string()).await)
    }

    async fn remove_latecomers(&self) -> kube::Result<()> {
        for pod in self.team().list(&ListParams::default()).await? {
            if pod.name_any().starts_with(LATECOMER) {
                ignore_missing(self.team().delete(&pod.name_any(), &DeleteParams::default()).await)?;
            }
        }
        Ok(())
    }

    async fn scale(&self, whom: u32) -> kube::Result<()> {
        let Some(workload) = chosen(&self.case.fleet.workloads, whom) else { return Ok(()) };
        let api = Api::<Deployment>::namespaced(self.cluster.admin.clone(), &workload.namespace);
        let replicas = (whom >> 8) % (workload.replicas + 1);
        let patch = Patch::Merge(json!({"spec": {"replicas": replicas}}));
        ignore_missing(api.patch(&workload.name, &params(), &patch).await)
    }

    async fn scale_back(&self) -> kube::Result<()> {
        for workload in &self.case.fleet.workloads {
            let api = Api::<Deployment>::namespaced(self.cluster.admin.clone(), &workload.namespace);
            let patch = Patch::Merge(json!({"spec": {"replicas": workload.replicas}}));
            ignore_missing(api.patch(&workload.name, &params(), &patch).await)?;
        }
        Ok(())
    }

    /// One budget allows nothing, or all are as they were.
    async fn set_budgets(&self, tight: Option<u32>) -> kube::Result<()> {
        let with: Vec<_> = self.case.fleet.workloads.iter().filter(|work| work.budget.is_some()).collect();
        let tight = tight.and_then(|whom| chosen(&with, whom)).map(|workload| workload.name.clone());
        for workload in with {
            let spec = match &tight {
                Some(name) if *name == workload.name => {
                    json!({"minAvailable": workload.replicas, "maxUnavailable": null})
                }
                Some(_) => continue,
                None => {
                    let mut spec = json!({"minAvailable": null, "maxUnavailable": null});
                    json_patch::merge(&mut spec, workload.budget.as_ref().unwrap_or(&Value::Null));
                    spec
                }
            };
            let api = Api::<PodDisruptionBudget>::namespaced(self.cluster.admin.clone(), &workload.namespace);
            ignore_missing(api.patch(&workload.name, &params(), &Patch::Merge(json!({"spec": spec}))).await)?;
        }
        Ok(())
    }

    /// Changes the upgrade options, wherever they are stated.
    async fn set_options(&self, options: Value) -> kube::Result<()> {
        if self.case.policy.is_none() {
            let patch = json!({"spec": {"driver": {"upgradePolicy": options}}});
            return self.cluster.patch_cluster_policy(patch).await;
        }
        let api = Api::<DriverPolicy>::all(self.cluster.admin.clone());
        let patch = Patch::Merge(json!({"spec": {"upgradePolicy": options}}));
        ignore_missing(api.patch("gpu", &params(), &patch).await)
    }

    async fn abort(&self, abort: bool) -> kube::Result<()> {
        let api = Api::<Rollout>::all(self.cluster.admin.clone());
        for rollout in api.list(&ListParams::default()).await? {
            let patch = Patch::Merge(json!({"spec": {"abort": abort}}));
            ignore_missing(api.patch(&rollout.name_any(), &params(), &patch).await)?;
        }
        Ok(())
    }

    async fn patch_node(&self, node: &str, patch: Value) -> kube::Result<()> {
        ignore_missing(self.nodes().patch(node, &params(), &Patch::Merge(patch)).await)
    }

    async fn mark(&self, fault: Fault, whom: u32) -> kube::Result<Option<String>> {
        let nodes = self.nodes().list(&ListParams::default()).await?.items;
        let Some(node) = chosen(&nodes, whom) else { return Ok(None) };
        let patch = match fault {
            Fault::Cordon => json!({"spec": {"unschedulable": true}}),
            Fault::Uncordon => json!({"spec": {"unschedulable": null}}),
            Fault::Skip => json!({"metadata": {"labels": {keys().skip: "true"}}}),
            Fault::Quarantine => quarantined_by_us(node),
            _ => json!({"metadata": {"labels": {keys().state: some_state(whom)}}}),
        };
        self.patch_node(&node.name_any(), patch).await?;
        Ok(Some(node.name_any()))
    }

    async fn unskip(&self) -> kube::Result<()> {
        for node in self.nodes().list(&ListParams::default()).await? {
            if node.labels().contains_key(&keys().skip) {
                let patch = json!({"metadata": {"labels": {keys().skip: null}}});
                self.patch_node(&node.name_any(), patch).await?;
            }
        }
        Ok(())
    }

    async fn release(&self, node: Option<String>) -> kube::Result<()> {
        let Some(node) = node else { return Ok(()) };
        match self.nodes().get_opt(&node).await? {
            Some(found) if found.annotations().contains_key(nvsentinel::QUARANTINE_ANNOTATIONS) => {
                self.patch_node(&node, released(&found)).await
            }
            _ => Ok(()),
        }
    }

    async fn wipe(&self) -> kube::Result<()> {
        for node in self.nodes().list(&ListParams::default()).await? {
            let patch = json!({"metadata": {"labels": {keys().state: null}}});
            self.patch_node(&node.name_any(), patch).await?;
        }
        Ok(())
    }

    /// Labels that people set during a visit keep pitcrew's hands off, and quarantines end with their cause: whoever set
    /// them takes them back.
    async fn relabel_foreign(&self) -> kube::Result<()> {
        for node in self.nodes().list(&ListParams::default()).await? {
            let name = node.name_any();
            if node.annotations().contains_key(nvsentinel::QUARANTINE_ANNOTATIONS) {
                self.patch_node(&name, released(&node)).await?;
            }
            if self.case.has(Fault::Relabel) {
                self.patch_node(&name, json!({"metadata": {"labels": {keys().state: null}}})).await?;
            }
        }
        Ok(())
    }
}

/// Nobody mends a version.
fn is_for_good(rule: &DriverFault) -> bool {
    matches!(rule.nodes, Nodes::OneIn(_) | Nodes::All)
}

/// Nobody mends what a gate found either.
fn is_no(rule: &GateRule) -> bool {
    matches!(rule.outcome, GateOutcome::Fails { .. })
}

pub(super) fn keys() -> Keys {
    Keys::new(&"gpu".into(), DEFAULT_LABEL_DOMAIN)
}

fn limits(whom: u32) -> Value {
    let unavailable = [json!(0), json!(1), json!("30%"), json!("100%"), json!("nonsense")];
    let parallel = (whom >> 8) % 4;
    json!({"maxUnavailable": unavailable[whom as usize % unavailable.len()], "maxParallelUpgrades": parallel})
}

/// A documented state, none, or nonsense.
fn some_state(whom: u32) -> Value {
    match (whom >> 8) % 13 {
        12 => json!("upgrade-maybe"),
        11 => Value::Null,
        index => match State::ALL.get(index as usize) {
            Some(State::Unknown) | None => json!("upgrade-required"),
            Some(state) => json!(state.as_str()),
        },
    }
}

fn chosen<T>(all: &[T], whom: u32) -> Option<&T> {
    all.get((whom as usize).checked_rem(all.len())?)
}

pub(super) fn params() -> PatchParams {
    PatchParams::default()
}

/// The cluster moves on under everybody's hands: what is gone, or there already, needs nothing.
pub(super) fn ignore_missing<T>(answer: kube::Result<T>) -> kube::Result<()> {
    match answer {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409 | 422) => Ok(()),
        Err(error) => Err(error),
    }
}
