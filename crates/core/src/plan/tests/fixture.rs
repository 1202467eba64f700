//! Fleets in memory: builders with good defaults, and an API and kubelets that carry out what the planner decides.
//!
//! A node is up to date, in service and `upgrade-done` unless told otherwise, so each story tells only what matters
//! to it.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use crate::action::{Action, DeleteWhy, Event, NodePatch, PodRef, PutBack, RestartDriver};
use crate::check::violations;
use crate::clients::ClientKind;
use crate::contract::{DEFAULT_LABEL_DOMAIN, GATE_RUN_ANNOTATION, Keys, State, VISIT_ANNOTATION};
use crate::gate::{GatePod, GateRun, JobEnd, JobFacts, PodState, Sample};
use crate::names::{DriverName, NodeName, ObjectName, ResourceVersion, RevisionHash, Uid};
use crate::plan::{Plan, PoolPlan, Verdict, plan};
use crate::policy::{ClusterPolicyFacts, Source};
use crate::prometheus::{Answer, Values};
use crate::reason::Reason;
use crate::selector::{self, Labels};
use crate::snapshot::{
    Budget, DaemonSet, Node, Object, Owner, OwnerKind, Pending, Phase, Pod, Rollout, Setback, SetbackKind,
    Snapshot, TemplateRevision, Trouble,
};
use crate::visit::{Cause, Failure, Finding, Holds, Visit, Walk};

/// Where the driver's DaemonSets and validators live.
pub(super) const NAMESPACE: &str = "gpu-operator";
/// The pool of a fleet with a ClusterPolicy.
pub(super) const POOL: &str = "cluster-policy";
/// The revision that nodes run unless told otherwise.
pub(super) const NEW: &str = "new";
/// The revision before it.
pub(super) const OLD: &str = "old";

/// The moment at which every story begins.
pub(super) fn noon() -> Timestamp {
    "2026-01-01T12:00:00Z".parse().unwrap()
}

/// So many seconds after the beginning.
pub(super) fn after(seconds: i64) -> Timestamp {
    noon() + SignedDuration::from_secs(seconds)
}

/// The label and annotation keys of a driver.
pub(super) fn keys(driver: &str) -> Keys {
    Keys::new(&driver.into(), DEFAULT_LABEL_DOMAIN)
}

/// A node in the making.
#[derive(Clone)]
pub(super) struct NodeSpec {
    name: String,
    labels: Labels,
    annotations: Labels,
    unschedulable: bool,
    ready: bool,
    revision: &'static str,
    visit: Option<Visit>,
    pods: Vec<PodSpec>,
}

/// A node that is up to date and in service.
pub(super) fn node(name: &str) -> NodeSpec {
    NodeSpec {
        name: name.to_owned(),
        labels: Labels::from([("gpu".to_owned(), "true".to_owned())]),
        annotations: Labels::new(),
        unschedulable: false,
        ready: true,
        revision: NEW,
        visit: None,
        pods: Vec::new(),
    }
    .labelled(State::UpgradeDone)
    .annotation(&keys("gpu").enabled, "true")
}

impl NodeSpec {
    /// Its driver pods are of the old revision.
    pub(super) fn outdated(self) -> Self {
        Self { revision: OLD, ..self }
    }
    pub(super) fn cordoned(self) -> Self {
        Self { unschedulable: true, ..self }
    }
    pub(super) fn uncordoned(self) -> Self {
        Self { unschedulable: false, ..self }
    }
    pub(super) fn not_ready(self) -> Self {
        Self { ready: false, ..self }
    }
    pub(super) fn label(mut self, key: &str, value: &str) -> Self {
        self.labels.insert(key.to_owned(), value.to_owned());
        self
    }
    pub(super) fn annotation(mut self, key: &str, value: &str) -> Self {
        self.annotations.insert(key.to_owned(), value.to_owned());
        self
    }
    pub(super) fn skipped(self) -> Self {
        self.label(&keys("gpu").skip, "true")
    }
    /// Only the gpu driver's label says so.
    pub(super) fn labelled(mut self, state: State) -> Self {
        self.labels.remove(&keys("gpu").state);
        if state == State::Unknown { self } else { self.label(&keys("gpu").state, state.as_str()) }
    }
    /// On its walk for the gpu driver, with everything that goes with the state: label, and where the walk has one,
    /// our cordon and the record, a minute old.
    pub(super) fn at(self, state: State) -> Self {
        let recorded = state == State::UpgradeFailed || (state.in_flight() && state != State::CordonRequired);
        let mut spec = self.labelled(state);
        if recorded {
            let mut walk = Walk::begin(state, after(-60), NEW.into());
            if state == State::UpgradeFailed {
                let cause =
                    Cause::DriverNotReady { found: Finding::plain("driver CrashLoopBackOff"), seconds: 1800 };
                walk.failure = Some(Failure { cause, pod: Some(driver_uid("gpu", &spec.name)) });
            }
            let visit = Visit::begin(
                Some("cluster-policy-1".into()),
                after(-120),
                Holds::only_cordon(),
                "gpu".into(),
                walk,
            );
            spec = spec.recorded(visit).cordoned();
        }
        spec
    }
    /// With this visit record.
    pub(super) fn recorded(mut self, visit: Visit) -> Self {
        self.visit = Some(visit);
        self
    }
    /// With this changed in its visit record.
    pub(super) fn visit(mut self, change: impl FnOnce(&mut Visit)) -> Self {
        change(self.visit.as_mut().unwrap());
        self
    }
    /// With this changed in the record of its gpu walk.
    pub(super) fn walk(self, change: impl FnOnce(&mut Walk)) -> Self {
        self.visit(|visit| change(visit.drivers.get_mut("gpu").unwrap()))
    }
    /// With this pod on it.
    pub(super) fn pod(mut self, pod: PodSpec) -> Self {
        self.pods.push(pod);
        self
    }
}

/// A workload pod in the making.
#[derive(Clone)]
pub(super) struct PodSpec {
    name: ObjectName,
    labels: Labels,
    owner: Option<OwnerKind>,
    owner_name: String,
    phase: Phase,
    ready: bool,
    gpus: u32,
    claims: Vec<Box<str>>,
    runtime_class: Option<Box<str>>,
    host_paths: Vec<Box<str>>,
    finalizer: Option<Box<str>>,
    empty_dir: bool,
    mirror: bool,
    deleting: Option<Timestamp>,
    created: Timestamp,
}

/// A pod of a Deployment in namespace `work` that uses one device.
pub(super) fn pod(name: &str) -> PodSpec {
    PodSpec {
        name: ObjectName::new("work", name),
        labels: Labels::new(),
        owner: Some(OwnerKind::Replicas),
        owner_name: "owner".to_owned(),
        phase: Phase::Running,
        ready: true,
        gpus: 1,
        claims: vec![],
        runtime_class: None,
        host_paths: vec![],
        finalizer: None,
        empty_dir: false,
        mirror: false,
        deleting: None,
        created: Timestamp::UNIX_EPOCH,
    }
}

impl PodSpec {
    pub(super) fn gpus(self, gpus: u32) -> Self {
        Self { gpus, ..self }
    }
    pub(super) fn bare(self) -> Self {
        Self { owner: None, ..self }
    }
    /// A pod of the Job of this name, which may have others.
    pub(super) fn of_job(self, name: &str) -> Self {
        Self { owner: Some(OwnerKind::Job), owner_name: name.to_owned(), ..self }
    }
    pub(super) fn of_daemon_set(self) -> Self {
        Self { owner: Some(OwnerKind::DaemonSet), ..self }
    }
    pub(super) fn with_empty_dir(self) -> Self {
        Self { empty_dir: true, ..self }
    }
    pub(super) fn mirror(self) -> Self {
        Self { mirror: true, ..self }
    }
    pub(super) fn phase(self, phase: Phase) -> Self {
        Self { phase, ready: phase == Phase::Running, ..self }
    }
    pub(super) fn leaving(self) -> Self {
        Self { deleting: Some(after(30)), ..self }
    }
    pub(super) fn label(mut self, key: &str, value: &str) -> Self {
        self.labels.insert(key.to_owned(), value.to_owned());
        self
    }
    /// It asks for no resource, but has a resource claim.
    pub(super) fn claim(self, name: &str) -> Self {
        Self { gpus: 0, claims: vec![name.into()], ..self }
    }
    /// It asks for no resource, but runs in this class.
    pub(super) fn runtime_class(self, name: &str) -> Self {
        Self { gpus: 0, runtime_class: Some(name.into()), ..self }
    }
    /// It asks for no resource, but mounts this path.
    pub(super) fn host_path(self, path: &str) -> Self {
        Self { gpus: 0, host_paths: vec![path.into()], ..self }
    }
    pub(super) fn created(self, created: Timestamp) -> Self {
        Self { created, ..self }
    }
    pub(super) fn finalizer(self, name: &str) -> Self {
        Self { finalizer: Some(name.into()), ..self }
    }

    fn make(self, node: &NodeName, serial: u64) -> Pod {
        let uid = Uid::from(format!("uid-{}", self.name.name));
        let name = self.owner_name.as_str();
        let owner = |kind| Owner { kind, name: name.into(), uid: format!("uid-{name}").into() };
        Pod {
            labels: self.labels,
            owner: self.owner.map(owner),
            phase: self.phase,
            ready: self.ready,
            deleting: self.deleting,
            created: self.created,
            started: Some(after(-3600)),
            resources: if self.gpus == 0 { vec![] } else { vec![("nvidia.com/gpu".into(), self.gpus)] },
            claims: self.claims,
            runtime_class: self.runtime_class,
            host_paths: self.host_paths,
            finalizer: self.finalizer,
            empty_dir: self.empty_dir,
            mirror: self.mirror,
            ..Pod::ready(self.name, uid, serial.into(), node.clone())
        }
    }
}

/// A fleet, and the part of Kubernetes that carries plans out.
#[derive(Clone)]
pub(super) struct Fleet {
    pub(super) snapshot: Snapshot,
    /// What happened so far, one line per write.
    pub(super) story: Vec<String>,
    /// Nodes on which new driver pods crash.
    pub(super) crashes_on: BTreeSet<String>,
    /// Nodes on which every driver pod does.
    pub(super) broken: BTreeSet<String>,
    /// Clients that do not become ready again.
    pub(super) hung_clients: BTreeSet<String>,
    /// What gates say that do not simply pass: by name, at which time.
    pub(super) gates: Vec<(&'static str, Sample, PodState)>,
    /// … and on which nodes, where that matters.
    pub(super) gates_on: Option<fn(&GateRun) -> Option<PodState>>,
    /// What Prometheus says; `None`: the answer is still on its way.
    pub(super) prometheus: Option<Result<Values, String>>,
    /// The revision that an earlier version gets when it is put back, if its template is not what it was.
    pub(super) renders: Option<&'static str>,
    /// What budgets allow again after each pass: evicted pods come up elsewhere.
    budgets: BTreeMap<ObjectName, Budget>,
    serial: u64,
}

fn driver_pod_name(driver: &str, node: &str) -> ObjectName {
    ObjectName::new(NAMESPACE, &format!("{driver}-driver-{node}"))
}

fn driver_uid(driver: &str, node: &str) -> Uid {
    format!("uid-{driver}-driver-{node}").into()
}

fn validator_name(node: &str) -> ObjectName {
    ObjectName::new(NAMESPACE, &format!("validator-{node}"))
}

/// The driver version that a revision brings.
fn image_version(revision: &str) -> &'static str {
    if revision.starts_with(OLD) { "560.35.03" } else { "565.57.01" }
}

fn daemon_set_uid(driver: &str) -> Uid {
    format!("uid-{driver}-daemonset").into()
}

impl Fleet {
    /// No nodes yet; a ClusterPolicy that upgrades the gpu driver by itself, one DaemonSet with two revisions.
    pub(super) fn new() -> Self {
        let mut fleet = Self::without_policy();
        let policy = ClusterPolicyFacts {
            driver: json!({"upgradePolicy": {"autoUpgrade": true}}),
            ..Default::default()
        };
        fleet.snapshot.sources.cluster_policies.insert(POOL.to_owned(), policy);
        fleet
    }

    /// The same with nobody who says what is wanted.
    pub(super) fn without_policy() -> Self {
        let mut snapshot = Snapshot::new(noon(), NAMESPACE);
        snapshot.leading_since = after(-3600);
        let fleet = Self {
            snapshot,
            story: vec![],
            crashes_on: BTreeSet::new(),
            broken: BTreeSet::new(),
            hung_clients: BTreeSet::new(),
            gates: Vec::new(),
            gates_on: None,
            prometheus: Some(Ok(Values::one(0.0))),
            renders: None,
            budgets: BTreeMap::new(),
            serial: 1,
        };
        fleet.daemon_set("gpu", "nvidia-driver-daemonset")
    }

    /// A DaemonSet of `driver`, labelled `app=<app>`, on every node with label `gpu=true`.
    pub(super) fn daemon_set(mut self, driver: &str, app: &str) -> Self {
        let uid = daemon_set_uid(driver);
        let daemon_set = DaemonSet {
            name: ObjectName::new(NAMESPACE, app),
            uid: uid.clone(),
            labels: Labels::from([("app".to_owned(), app.to_owned())]),
            generation: 2,
            observed_generation: 2,
            on_delete: true,
            node_selector: Labels::from([("gpu".to_owned(), "true".to_owned())]),
            rendered_by: None,
            digest: None,
            driver_version: Some("565.57.01".parse().unwrap()),
            manager: None,
            pod_labels: Labels::new(),
            client: None,
        };
        self.snapshot.daemon_sets.insert(uid, daemon_set);
        self.revision(driver, 1, OLD).revision(driver, 2, NEW)
    }

    /// A revision of the driver's DaemonSet: a new version, if the number is higher than all before it.
    pub(super) fn revision(mut self, driver: &str, number: i64, hash: &str) -> Self {
        self.publish(driver, number, hash);
        self
    }

    /// The same, in the middle of a story.
    pub(super) fn publish(&mut self, driver: &str, number: i64, hash: &str) {
        let (owner, hash) = (daemon_set_uid(driver), RevisionHash::from(hash));
        // One that is used again keeps its age.
        let known = self.snapshot.revisions.values().find(|known| known.owner == owner && known.hash == hash);
        let created = known.map_or(self.snapshot.now, |known| known.created);
        let revision = TemplateRevision { owner, number, created, hash, digest: None, driver_version: None };
        self.snapshot.revisions.insert(format!("{driver}-{number}").into(), revision);
    }

    /// The ClusterPolicy's `upgradePolicy` says this too.
    pub(super) fn policy(mut self, options: Value) -> Self {
        self.set_policy(options);
        self
    }

    /// The same, in the middle of a story.
    pub(super) fn set_policy(&mut self, options: Value) {
        let policy = self.snapshot.sources.cluster_policies.get_mut(POOL).unwrap();
        let Value::Object(options) = options else { panic!("options are an object") };
        policy.driver["upgradePolicy"].as_object_mut().unwrap().extend(options);
    }

    /// A DriverPolicy of this name.
    pub(super) fn driver_policy(mut self, name: &str, spec: Value) -> Self {
        let sources = &mut self.snapshot.sources;
        sources.driver_policies.insert(name.to_owned(), serde_json::from_value(spec).unwrap());
        sources.driver_policy_status.insert(name.to_owned(), (1, crate::api::DriverPolicyStatus::default()));
        self
    }

    /// A budget in namespace `work` over pods with label `app=<app>`.
    pub(super) fn budget(mut self, app: &str, allowed: i32) -> Self {
        let selector = Some(selector::parse(&format!("app={app}")).unwrap());
        let budget =
            Budget { selector, allowed, healthy: 3, desired: 3 - allowed, expected: 3, current: true };
        let name = ObjectName::new("work", app);
        self.budgets.insert(name.clone(), budget.clone());
        self.snapshot.budgets.insert(name, budget);
        self
    }

    /// Somebody, or the disruption controller, changes budgets.
    pub(super) fn change_budgets(&mut self, change: impl Fn(&mut BTreeMap<ObjectName, Budget>)) {
        change(&mut self.budgets);
        change(&mut self.snapshot.budgets);
    }

    /// A node with its driver pods, a validator that proved them, and its workload.
    pub(super) fn with(mut self, spec: NodeSpec) -> Self {
        let name = NodeName::from(spec.name.as_str());
        let mut annotations = spec.annotations;
        if let Some(visit) = &spec.visit {
            annotations.insert(VISIT_ANNOTATION.to_owned(), visit.to_text());
        }
        let (uid, version) = (format!("uid-{name}").into(), ResourceVersion::from(self.tick()));
        let mut node = Node::new(uid, version, spec.labels, annotations);
        (node.unschedulable, node.ready) = (spec.unschedulable, spec.ready);
        self.snapshot.nodes.insert(name.clone(), node);
        let drivers: Vec<(DriverName, Uid)> = self.drivers(&name);
        for (driver, daemon_set) in drivers {
            let uid = driver_uid(driver.as_str(), name.as_str());
            self.put_driver(driver.as_str(), &name, uid, &daemon_set, spec.revision, after(-7200));
        }
        self.put_validator(&name, after(-7000));
        for pod in spec.pods {
            self.put(&name, pod);
        }
        self
    }

    /// So many plain nodes `gpu-1`, `gpu-2`, …
    pub(super) fn nodes(self, count: usize, make: impl Fn(NodeSpec) -> NodeSpec) -> Self {
        (1..=count).fold(self, |fleet, i| fleet.with(make(node(&format!("gpu-{i}")))))
    }

    /// The drivers whose DaemonSets are meant for this node. `gpu-x` is another DaemonSet of driver gpu.
    fn drivers(&self, node: &NodeName) -> Vec<(DriverName, Uid)> {
        let labels = self.snapshot.nodes[node].labels();
        let meant = |ds: &DaemonSet| ds.node_selector.iter().all(|(k, v)| labels.get(k) == Some(v));
        let driver = |(uid, ds): (&Uid, &DaemonSet)| {
            let name = uid.as_str().strip_prefix("uid-")?.strip_suffix("-daemonset")?;
            meant(ds).then(|| (name.split('-').next().unwrap_or(name).into(), uid.clone()))
        };
        self.snapshot.daemon_sets.iter().filter_map(driver).collect()
    }

    fn tick(&mut self) -> u64 {
        self.serial += 1;
        self.serial
    }

    fn put_driver(
        &mut self,
        driver: &str,
        node: &NodeName,
        uid: Uid,
        daemon_set: &Uid,
        revision: &str,
        started: Timestamp,
    ) {
        let app = self.snapshot.daemon_sets[daemon_set].name.name.to_string();
        let broken = self.broken.contains(node.as_str());
        let crashes = broken || (self.crashes_on.contains(node.as_str()) && !revision.starts_with(OLD));
        let trouble = Trouble {
            container: "driver".into(),
            reason: "CrashLoopBackOff".into(),
            message: "".into(),
            restarts: 3,
        };
        let version = ResourceVersion::from(self.tick());
        let pod = Pod {
            labels: self.snapshot.daemon_sets[daemon_set].labels.clone(),
            revision: Some(revision.into()),
            owner: Some(Owner { kind: OwnerKind::DaemonSet, name: app.into(), uid: daemon_set.clone() }),
            ready: !crashes,
            created: started,
            started: Some(started).filter(|_| !crashes),
            empty_dir: true,
            trouble: crashes.then_some(trouble),
            image: format!("nvcr.io/nvidia/driver:{}", image_version(revision)).into(),
            ..Pod::ready(driver_pod_name(driver, node.as_str()), uid, version, node.clone())
        };
        self.snapshot.pods.entry(node.clone()).or_default().insert(pod.name.clone(), pod);
    }

    fn put_validator(&mut self, node: &NodeName, started: Timestamp) {
        let version = ResourceVersion::from(self.tick());
        let owner =
            Owner { kind: OwnerKind::DaemonSet, name: "validator".into(), uid: "uid-validator".into() };
        let uid = format!("uid-validator-{node}-{version}").into();
        let pod = Pod {
            labels: Labels::from([("app".to_owned(), "nvidia-operator-validator".to_owned())]),
            owner: Some(owner),
            started: Some(started),
            ..Pod::ready(validator_name(node.as_str()), uid, version, node.clone())
        };
        self.snapshot.pods.entry(node.clone()).or_default().insert(pod.name.clone(), pod);
    }

    /// A DaemonSet of this name has a pod on the node since then, which is a client of the driver.
    pub(super) fn put_client(
        &mut self,
        node: &str,
        name: &str,
        kind: Option<ClientKind>,
        started: Timestamp,
    ) {
        let uid = Uid::from(format!("client-{name}"));
        let template = self.snapshot.daemon_sets[&daemon_set_uid("gpu")].clone();
        self.snapshot.daemon_sets.entry(uid.clone()).or_insert(DaemonSet {
            name: ObjectName::new("clients", name),
            uid: uid.clone(),
            labels: Labels::new(),
            node_selector: Labels::new(),
            on_delete: false,
            pod_labels: Labels::from([("app".to_owned(), name.to_owned())]),
            client: kind,
            ..template
        });
        let version = ResourceVersion::from(self.tick());
        let pod_name = ObjectName::new("clients", &format!("{name}-{node}"));
        let pod = Pod {
            labels: Labels::from([("app".to_owned(), name.to_owned())]),
            revision: Some("1".into()),
            owner: Some(Owner { kind: OwnerKind::DaemonSet, name: name.into(), uid }),
            ready: !(self.hung_clients.contains(name) && started == self.snapshot.now),
            created: started,
            started: Some(started),
            oldest_started: Some(started),
            client: kind,
            ..Pod::ready(pod_name, format!("uid-{name}-{node}-{version}").into(), version, node.into())
        };
        self.snapshot.pods.entry(node.into()).or_default().insert(pod.name.clone(), pod);
    }

    /// The client pod of a node.
    pub(super) fn client_mut(&mut self, node: &str, name: &str) -> &mut Pod {
        self.pod_mut(node, &ObjectName::new("clients", &format!("{name}-{node}")))
    }

    /// The pod goes, its DaemonSet makes it again at once, of its newest template.
    fn replace_client(&mut self, pod: &PodRef) {
        let old = self.take(pod);
        let owner = old.owner.unwrap();
        self.put_client(pod.node.as_str(), &owner.name, old.client, self.snapshot.now);
        let newest = self.snapshot.revisions.values().filter(|r| r.owner == owner.uid);
        if let Some(newest) = newest.max_by_key(|r| r.number).map(|r| r.hash.clone()) {
            self.client_mut(pod.node.as_str(), &owner.name).revision = Some(newest);
        }
    }

    /// A workload pod appears on a node.
    pub(super) fn put(&mut self, node: &NodeName, pod: PodSpec) {
        let serial = self.tick();
        let pod = pod.make(node, serial);
        self.snapshot.pods.entry(node.clone()).or_default().insert(pod.name.clone(), pod);
    }

    /// What the kubelet and others say about a node changes.
    pub(super) fn node_mut(&mut self, name: &str) -> &mut Node {
        let version = self.tick();
        let node = self.snapshot.nodes.get_mut(name).unwrap();
        node.version = version.into();
        node
    }

    /// A person sets the state label of the gpu driver; nothing removes it.
    pub(super) fn set_label(&mut self, name: &str, state: &str) {
        let key = keys("gpu").state;
        self.node_mut(name).set_label(&key, Some(state).filter(|state| !state.is_empty()));
    }

    /// Somebody edits the visit record.
    pub(super) fn set_record(&mut self, name: &str, text: &str) {
        let node = self.node_mut(name);
        node.annotations.insert(VISIT_ANNOTATION.to_owned(), text.to_owned());
        node.read_annotations();
    }

    /// The gpu driver pod of a node.
    pub(super) fn driver_mut(&mut self, node: &str) -> &mut Pod {
        self.pod_mut(node, &driver_pod_name("gpu", node))
    }

    /// The validator pod of a node.
    pub(super) fn validator_mut(&mut self, node: &str) -> &mut Pod {
        self.pod_mut(node, &validator_name(node))
    }

    fn pod_mut(&mut self, node: &str, name: &ObjectName) -> &mut Pod {
        self.snapshot.pods.get_mut(node).unwrap().get_mut(name).unwrap()
    }

    /// A workload pod.
    pub(super) fn work_mut(&mut self, node: &str, name: &str) -> &mut Pod {
        self.pod_mut(node, &ObjectName::new("work", name))
    }

    pub(super) fn remove_pods(&mut self, node: &str, which: impl Fn(&Pod) -> bool) {
        self.snapshot.pods.get_mut(node).unwrap().retain(|_, pod| !which(pod));
    }

    /// A setback on an object.
    pub(super) fn setback(&mut self, object: Object, kind: SetbackKind, retry_at: Timestamp) {
        let seen = match &object {
            Object::Node(name) => self.snapshot.nodes[name].version,
            _ => ResourceVersion::default(),
        };
        self.snapshot.setbacks.insert(object, Setback { seen, kind, attempts: 1, retry_at });
    }

    /// Time passes.
    pub(super) fn wait(&mut self, seconds: i64) {
        self.snapshot.now += SignedDuration::from_secs(seconds);
    }

    /// Plans, and checks that no promise would be broken.
    pub(super) fn plan(&self) -> Plan {
        let plan = plan(&self.snapshot);
        assert_eq!(violations(&self.snapshot, &plan), [], "{plan:#?}");
        plan
    }

    /// The first pool's verdict on a node.
    pub(super) fn verdict(&self, name: &str) -> Verdict {
        self.plan().pools[0].nodes[name].clone()
    }

    pub(super) fn reason(&self, name: &str) -> Reason {
        self.verdict(name).reason
    }

    /// The words of the reason.
    pub(super) fn why(&self, name: &str) -> String {
        self.reason(name).to_string()
    }

    pub(super) fn pool(&self) -> PoolPlan {
        self.plan().pools.swap_remove(0)
    }

    /// What the planner would do now, one line per action.
    pub(super) fn decisions(&self) -> Vec<String> {
        self.plan().actions.iter().filter(|action| is_deed(action)).map(tell).collect()
    }

    /// Carries a plan out, as the API server and the kubelets would.
    pub(super) fn apply(&mut self, plan: &Plan) {
        for action in &plan.actions {
            self.story.push(tell(action));
            match action {
                Action::PatchNode(patch) => self.patch(patch),
                Action::AskCheckpoint(pod, until) => {
                    let asked = self.pod_mut(pod.node.as_str(), &pod.name);
                    (asked.checkpoint_requested, asked.checkpointed) = (Some(*until), false);
                }
                Action::Evict(pod) => self.evict(pod),
                Action::Delete(pod, DeleteWhy::StaleValidator) => {
                    self.put_validator(&pod.node, self.snapshot.now);
                }
                Action::Delete(pod, DeleteWhy::TimedOut) => drop(self.take(pod)),
                Action::Delete(pod, DeleteWhy::StaleClient) => self.replace_client(pod),
                Action::RestartDriver(restart) => self.restart(restart),
                Action::ReadNode(node) => drop(self.snapshot.setbacks.remove(&Object::Node(node.clone()))),
                Action::CreateRollout { name, spec } => {
                    let version = self.tick().into();
                    let rollout = Rollout { version, spec: spec.clone(), status: None, said_at: None };
                    assert!(
                        self.snapshot.rollouts.insert(name.clone(), rollout).is_none(),
                        "{name} is there already"
                    );
                }
                Action::RolloutStatus { name, status, .. } => {
                    let rollout = self.snapshot.rollouts.get_mut(name).unwrap();
                    (rollout.status, rollout.said_at) = (Some(status.clone()), Some(self.snapshot.now));
                }
                Action::PutBack(way) => self.put_back(way),
                Action::DeleteRollout { name, .. } => drop(self.snapshot.rollouts.remove(name).unwrap()),
                Action::PolicyStatus { name, status } => {
                    self.snapshot.sources.driver_policy_status.get_mut(name).unwrap().1 = status.clone();
                }
                Action::CreateJob { name, body } => self.run_gate(name, body),
                Action::Ask { question, at } => {
                    if let Some(said) = self.prometheus.clone() {
                        let answer = Answer { asked_at: *at, said };
                        self.snapshot.answers.insert(question.clone(), answer);
                    } else {
                        let asked = Object::Question(question.clone());
                        self.snapshot.in_flight.insert(asked, Pending::default());
                    }
                }
                Action::Complain { .. } => {}
            }
        }
        self.snapshot.budgets.clone_from(&self.budgets);
    }

    /// The earlier revision becomes the newest, as its controller numbers it. An operator renders it from its object.
    fn put_back(&mut self, way: &PutBack) {
        self.snapshot.put_back.insert(way.object(), self.snapshot.now);
        let sets = self.snapshot.daemon_sets.values();
        let (sets, revision): (Vec<&DaemonSet>, String) = match way {
            PutBack::Template { daemon_set, revision, .. } => {
                (sets.filter(|ds| ds.name == *daemon_set).collect(), revision.to_string())
            }
            PutBack::Version { source, from, to } => {
                let sources = &mut self.snapshot.sources;
                assert_eq!(sources.version_of(source), Some(from.as_str()));
                match source {
                    Source::ClusterPolicy(name) => {
                        let policy = sources.cluster_policies.get_mut(name).unwrap();
                        policy.driver["version"] = to.as_str().into();
                    }
                    Source::NvidiaDriver(name) => {
                        sources.nvidia_driver_versions.insert(name.clone(), to.clone());
                    }
                    _ => panic!("{source} renders nothing here"),
                }
                (sets.filter(|ds| ds.rendered_by.as_ref() == Some(source)).collect(), OLD.to_owned())
            }
        };
        let uids: Vec<Uid> = sets.into_iter().map(|ds| ds.uid.clone()).collect();
        for uid in uids {
            let newest = self.snapshot.revisions.values().map(|revision| revision.number).max().unwrap();
            let driver = uid.as_str().strip_prefix("uid-").unwrap().strip_suffix("-daemonset").unwrap();
            self.publish(driver, newest + 1, self.renders.unwrap_or(&revision));
            let stays = |known: &TemplateRevision| known.owner != uid || known.hash.as_str() != revision;
            self.snapshot.revisions.retain(|_, known| stays(known) || known.number > newest);
            let version = image_version(&revision).parse().unwrap();
            self.snapshot.daemon_sets.get_mut(&uid).unwrap().driver_version = Some(version);
        }
    }

    /// A gate's Job, with one pod on each of its nodes, which are done at once or never.
    fn run_gate(&mut self, name: &ObjectName, body: &Value) {
        let now = self.snapshot.now;
        let text = body["metadata"]["annotations"][GATE_RUN_ANNOTATION].as_str().unwrap();
        let run: GateRun = serde_json::from_str(text).unwrap();
        let report =
            r#"{"gpus": 8, "withEcc": 8, "corrected": 0, "uncorrected": 0, "active": 8, "gbps": 3200}"#;
        let told = self.gates.iter().find(|(gate, at, _)| *gate == run.gate.as_str() && *at == run.sample);
        let told =
            told.map(|(.., state)| state.clone()).or_else(|| self.gates_on.and_then(|says| says(&run)));
        let state = told.unwrap_or(PodState::Succeeded { message: report.into() });
        let end = match &state {
            PodState::Open { .. } => None,
            PodState::Succeeded { .. } => Some((now, JobEnd::Complete)),
            PodState::Failed { .. } => Some((now, JobEnd::Failed)),
        };
        let uid: Uid = format!("uid-{}", name.name).into();
        for node in &run.nodes {
            let name = ObjectName::new(&name.namespace, &format!("{}-{node}", name.name));
            let (node, started, state) = (Some(node.clone()), Some(now), state.clone());
            let (job, created, deleting) = (uid.clone(), now, false);
            let pod = GatePod { name: name.clone(), job, created, node, started, state, deleting };
            self.snapshot.gate_pods.insert(name, pod);
        }
        let job = JobFacts { name: name.clone(), uid, run, created: now, end };
        assert!(self.snapshot.gate_jobs.insert(name.clone(), job).is_none(), "{name} is there already");
    }

    /// Time has passed, and Jobs that are over are gone.
    pub(super) fn forget_jobs(&mut self) {
        self.snapshot.gate_jobs.clear();
        self.snapshot.gate_pods.clear();
    }

    fn patch(&mut self, patch: &NodePatch) {
        let NodePatch { node: name, seen, labels, annotations, unschedulable, .. } = patch;
        let version = self.tick();
        let node = self.snapshot.nodes.get_mut(name).unwrap();
        assert_eq!(node.version, *seen, "{name} was written in between");
        node.version = version.into();
        for (key, value) in labels.iter() {
            node.set_label(key, value);
        }
        for (key, value) in annotations.iter() {
            match value {
                Some(value) => node.annotations.insert(key.to_owned(), value.to_owned()),
                None => node.annotations.remove(key),
            };
        }
        node.unschedulable = unschedulable.unwrap_or(node.unschedulable);
        if let Some(taints) = &patch.taints {
            node.taints.clone_from(taints);
        }
        node.read_annotations();
    }

    fn evict(&mut self, pod: &PodRef) {
        let pod = self.take(pod);
        for (name, budget) in &mut self.snapshot.budgets {
            let selector = budget.selector.as_ref().unwrap();
            if name.namespace == pod.name.namespace && kube::core::SelectorExt::matches(selector, &pod.labels)
            {
                assert!(budget.allowed > 0 || !pod.ready, "{name} does not allow {} to leave", pod.name);
                budget.allowed -= 1;
            }
        }
    }

    fn take(&mut self, pod: &PodRef) -> Pod {
        let taken = self.snapshot.pods.get_mut(&pod.node).unwrap().remove(&pod.name).unwrap();
        assert_eq!(taken.uid, pod.uid);
        taken
    }

    /// The driver pod goes, the DaemonSet makes a new one of its newest revision, which comes up or crashes.
    fn restart(&mut self, restart: &RestartDriver) {
        let RestartDriver { driver, pod, .. } = restart;
        let owner = self.take(pod).owner;
        let daemon_set = owner.map_or_else(|| daemon_set_uid(driver.as_str()), |owner| owner.uid);
        let revisions = self.snapshot.revisions.values().filter(|r| r.owner == daemon_set);
        let newest = revisions.max_by_key(|r| r.number).unwrap().hash.clone();
        let uid = format!("{}-{}", driver_uid(driver.as_str(), pod.node.as_str()), self.tick()).into();
        self.put_driver(driver.as_str(), &pod.node, uid, &daemon_set, newest.as_str(), self.snapshot.now);
    }

    /// One pass: plans, carries it out, a second passes. Tells whether there was anything to do.
    pub(super) fn step(&mut self) -> bool {
        let plan = self.plan();
        let busy = plan.actions.iter().any(is_deed);
        self.apply(&plan);
        self.wait(1);
        busy
    }

    /// Passes until there is nothing to do now.
    pub(super) fn settle(&mut self) {
        let bound = 60 * (self.snapshot.nodes.len() + 2);
        assert!((0..bound).any(|_| !self.step()), "no end after {bound} passes:\n{}", self.story.join("\n"));
    }

    /// Passes, and time in between, for so long.
    pub(super) fn live(&mut self, seconds: i64) {
        let end = self.snapshot.now + SignedDuration::from_secs(seconds);
        while self.snapshot.now < end {
            self.settle();
            let wake = self.plan().wake_at.unwrap_or(end).min(end);
            self.snapshot.now = wake.max(self.snapshot.now);
        }
        self.settle();
    }

    /// Passes until nothing would ever happen by itself, jumping to the next moment that matters. The number of passes.
    pub(super) fn play(&mut self) -> usize {
        let bound = 120 * (self.snapshot.nodes.len() + 2);
        for pass in 0..bound {
            let wake_at = self.plan().wake_at;
            match (self.step(), wake_at) {
                (true, _) => {}
                (false, Some(at)) => self.snapshot.now = self.snapshot.now.max(at),
                (false, None) => return pass,
            }
        }
        panic!("no end after {bound} passes:\n{}", self.story.join("\n"));
    }

    /// The states that a node went through.
    pub(super) fn states_of(&self, node: &str) -> Vec<String> {
        let of =
            |line: &String| Some(line.strip_prefix(&format!("{node} -> "))?.split(' ').next()?.to_owned());
        self.story.iter().filter_map(of).collect()
    }

    /// The lines of the story that are about this node.
    pub(super) fn told(&self, words: &str) -> Vec<&str> {
        self.story.iter().map(String::as_str).filter(|line| line.contains(words)).collect()
    }

    /// Every node with its place and reason, in the first pool.
    pub(super) fn screen(&self) -> String {
        let line = |(name, v): (&NodeName, &Verdict)| format!("{name} {} | {}\n", v.state, v.reason);
        self.pool().nodes.iter().map(line).collect()
    }

    /// A DaemonSet, and the pods that it makes from now on, get a label without a value.
    pub(super) fn label_daemon_sets(&mut self, driver: &str, key: &str) -> &mut DaemonSet {
        let daemon_set = self.snapshot.daemon_sets.get_mut(&daemon_set_uid(driver)).unwrap();
        daemon_set.labels.insert(key.to_owned(), String::new());
        daemon_set
    }

    /// The rollouts that the planner would begin now are there, and somebody has aborted them.
    pub(super) fn abort_rollouts(&mut self) {
        for action in self.plan().actions {
            if let Action::CreateRollout { name, mut spec } = action {
                spec.abort = true;
                let version = self.tick().into();
                let rollout = Rollout { version, spec, status: None, said_at: None };
                self.snapshot.rollouts.insert(name, rollout);
            }
        }
    }

    /// The node's gpu driver pod, if it has one, is not ready any more.
    pub(super) fn break_driver(&mut self, node: &str) {
        if let Some(pod) =
            self.snapshot.pods.get_mut(node).and_then(|p| p.get_mut(&driver_pod_name("gpu", node)))
        {
            pod.ready = false;
        }
    }

    /// Somebody pauses or resumes everything.
    pub(super) fn pause(&mut self, pause: bool) {
        let sources = &mut self.snapshot.sources;
        for policy in sources.driver_policies.values_mut() {
            policy.upgrade_policy.auto_upgrade = Some(!pause);
        }
        for policy in sources.cluster_policies.values_mut() {
            policy.driver["upgradePolicy"]["autoUpgrade"] = (!pause).into();
        }
        for policy in sources.nvidia_drivers.values_mut() {
            policy["autoUpgrade"] = (!pause).into();
        }
        for policy in sources.nic_cluster_policies.values_mut() {
            policy["upgradePolicy"]["autoUpgrade"] = (!pause).into();
        }
    }

    /// The gpu driver's DaemonSet.
    pub(super) fn daemon_set_mut(&mut self) -> &mut DaemonSet {
        self.daemon_set_of("gpu")
    }

    /// A driver's DaemonSet.
    pub(super) fn daemon_set_of(&mut self, driver: &str) -> &mut DaemonSet {
        self.snapshot.daemon_sets.get_mut(&daemon_set_uid(driver)).unwrap()
    }
}

/// The node has a driver pod that was made just now, of the new version: somebody has deleted the one before.
pub(super) fn comes_up(fleet: &mut Fleet, node: &str) {
    let now = fleet.snapshot.now;
    let driver = fleet.driver_mut(node);
    (driver.created, driver.started, driver.uid) = (now, Some(now), "uid-another".into());
    driver.revision = Some(NEW.into());
    fleet.validator_mut(node).started = Some(now);
}

/// Complaints are repeated in every plan; whoever writes events says them once.
pub(super) fn is_deed(action: &Action) -> bool {
    !matches!(action, Action::Complain { .. })
}

/// An action in one line.
pub(super) fn tell(action: &Action) -> String {
    match action {
        Action::PatchNode(patch) => tell_patch(patch),
        Action::AskCheckpoint(pod, _) => format!("{} ask {} for a checkpoint", pod.node, pod.name),
        Action::Evict(pod) => format!("{} evict {}", pod.node, pod.name),
        Action::Delete(pod, why) => format!("{} delete {} ({why:?})", pod.node, pod.name),
        Action::RestartDriver(restart) => format!("{} restart {}", restart.pod.node, restart.pod.name),
        Action::ReadNode(node) => format!("{node} read"),
        Action::CreateRollout { name, spec } => format!("rollout {name} begins: {:?}", spec.target),
        Action::RolloutStatus { name, status, events, .. } => {
            let crate::api::RolloutStatus { phase, done, total, moving, waiting, failed, .. } = status;
            let kind = |event: &Event| if event.warning { "Warning" } else { "Normal" };
            let told =
                |(node, event): &(NodeName, Event)| format!("; {node} {} \"{}\"", kind(event), event.message);
            let events = events.iter().map(told).collect::<Vec<_>>().concat();
            format!(
                "rollout {name} {phase:?}: {done}/{total} done, {moving} moving, {waiting} waiting, {failed} failed{events}"
            )
        }
        Action::PutBack(PutBack::Version { source, from, to }) => format!("{source} {from} -> {to}"),
        Action::PutBack(PutBack::Template { daemon_set, revision, .. }) => {
            format!("{daemon_set} -> {revision}")
        }
        Action::CreateJob { body, .. } => {
            let run = body["metadata"]["annotations"][GATE_RUN_ANNOTATION].as_str().unwrap();
            let GateRun { gate, nodes, sample, attempt, stage, .. } = serde_json::from_str(run).unwrap();
            let nodes: Vec<&str> = nodes.iter().map(NodeName::as_str).collect();
            let stage = stage.map(|stage| format!(" for stage {stage}")).unwrap_or_default();
            format!("{} gate {gate} {sample:?} {attempt}{stage}", nodes.join(" "))
        }
        Action::Ask { question, .. } => format!("ask {}: {}", question.url, question.query),
        Action::DeleteRollout { name, .. } => format!("rollout {name} is forgotten"),
        Action::PolicyStatus { name, status } => {
            format!("policy {name} ready={}: {}", status.ready, status.message)
        }
        Action::Complain { source, message } => format!("{source}: {message}"),
    }
}

fn tell_patch(patch: &NodePatch) -> String {
    let mut parts = vec![patch.node.to_string()];
    match &patch.to {
        Some(transition) => parts.push(format!("-> {}", transition.to)),
        None if patch.labels.is_empty() => parts.push("annotate".to_owned()),
        None => parts.push("write again".to_owned()),
    }
    match patch.unschedulable {
        Some(true) => parts.push("+cordon".to_owned()),
        Some(false) => parts.push("-cordon".to_owned()),
        None => {}
    }
    if let Some(taints) = &patch.taints {
        let set =
            taints.iter().any(|taint| taint["key"].as_str().is_some_and(|key| key.ends_with("-pending")));
        parts.push(if set { "+pending" } else { "-pending" }.to_owned());
    }
    let mut annotations: Vec<_> = patch.annotations.iter().collect();
    annotations.sort_unstable();
    for (key, value) in annotations {
        let key = key.rsplit('/').next().unwrap_or_default().rsplit('.').next().unwrap_or_default();
        parts.push(format!("{}{key}", if value.is_some() { '+' } else { '-' }));
    }
    if let Some(event) = patch.event.as_ref().filter(|event| event.warning) {
        parts.push(format!("Warning \"{}\"", event.message));
    }
    parts.join(" ")
}
