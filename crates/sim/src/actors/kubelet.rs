//! The kubelets of all simulated nodes, as one actor: one watch of nodes, one of pods.
//!
//! Each look at a pod asks where it is in its life (`pod_life`), given what the behaviour table says, and writes the
//! status if it differs from the API's: so a lost write is written again, and a restarted actor goes on where it was.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, NodeCondition, NodeSystemInfo, Pod};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::ResourceExt;
use pitcrew_core::contract::{DEFAULT_LABEL_DOMAIN, Keys};
use serde_json::json;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::agents::{Agents, Place as OnMachine};
use super::behaviour::Behaviour;
use super::cache::{Cache, Change, Index, Informer, Key, Source};
use super::clients::{GPU, is_device_plugin, is_operand, offer};
use super::clock::Clock;
use super::course::{Place, course};
use super::dra::is_plugin;
use super::drive::Actor;
use super::object::{is_finished, is_terminating, node_of};
use super::on_node::{Obstacle, tell};
use super::pod_life::{Course, Life, Machine};
use super::pod_status::status_of;
use super::queue::Queue;
use super::role::{Role, annotated, asks_first, claims, role};
use super::slices::{self, Slices};
use super::way::Way;
use super::write::{Holds, Write};

/// On a pod: it ends by itself after so many seconds.
pub const RUN_SECONDS: &str = "sim.pitcrew.dev/run-seconds";
/// On a pod: it takes so many seconds to stop, up to its grace period.
pub const STOP_SECONDS: &str = "sim.pitcrew.dev/stop-seconds";

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Task {
    /// The behaviour has changed.
    Everything,
    Node(String),
    Pod(Key),
    /// What the node's DRA plugin publishes.
    Slices(String),
}

pub(super) struct Kubelets {
    way: Way,
    pub(super) clock: Clock,
    seed: u64,
    pub(super) behaviour: watch::Receiver<Behaviour>,
    nodes: Informer<Node>,
    pub(super) pods: Informer<Pod>,
    pub(super) pods_on: Index,
    /// The driver pods among them, and the plugins: every look at a pod asks for those of its node.
    pub(super) drivers_on: Index,
    pub(super) plugins_on: Index,
    pub(super) lives: BTreeMap<Key, Life>,
    pub(super) slices: Slices,
    pub(super) agents: Agents,
    /// When each terminating pod began to stop.
    stopping: BTreeMap<Key, Instant>,
    /// The annotation by which driver pods ask for a safe moment.
    safe_load: String,
}

impl Kubelets {
    /// `ended` is told whose agent has come to its end.
    pub(super) fn new(
        way: Way,
        clock: Clock,
        seed: u64,
        behaviour: watch::Receiver<Behaviour>,
        ended: mpsc::UnboundedSender<Key>,
    ) -> Self {
        Self {
            agents: Agents::new(ended),
            clock,
            seed,
            behaviour,
            nodes: Informer::new(&way),
            pods: Informer::new(&way),
            pods_on: Index::default(),
            drivers_on: Index::default(),
            plugins_on: Index::default(),
            lives: BTreeMap::new(),
            slices: Slices::new(&way),
            stopping: BTreeMap::new(),
            safe_load: Keys::new(&"gpu".into(), DEFAULT_LABEL_DOMAIN).safe_load,
            way,
        }
    }

    fn route_pod(&mut self, change: &Change<Pod>, queue: &mut Queue<Task>) {
        let (old, new) = (change.old.as_deref(), change.new.as_deref());
        self.pods_on.shift(&change.key, old.and_then(node_of), new.and_then(node_of));
        let shift = |index: &mut Index, is: fn(&Pod) -> bool| {
            let on = |pod: Option<&'_ Pod>| pod.filter(|pod| is(pod)).and_then(node_of).map(str::to_owned);
            index.shift(&change.key, on(old).as_deref(), on(new).as_deref());
        };
        shift(&mut self.drivers_on, |pod| role(pod) == Role::Driver);
        shift(&mut self.plugins_on, |pod| is_plugin(pod) || is_device_plugin(pod));
        let uid = new.and_then(|pod| pod.metadata.uid.as_deref());
        if self.lives.get(&change.key).is_some_and(|life| Some(life.uid.as_str()) != uid) {
            self.lives.remove(&change.key);
            self.stopping.remove(&change.key);
            self.agents.forget(&change.key);
        }
        if new.is_some_and(|pod| node_of(pod).is_some()) {
            queue.add(Task::Pod(change.key.clone()));
        }
        if let Some(pod) = new.or(old) {
            self.route_neighbours(pod, queue);
            self.count_users(node_of(pod).unwrap_or_default());
        }
    }

    /// Who on the node depends on this pod.
    fn route_neighbours(&mut self, pod: &Pod, queue: &mut Queue<Task>) {
        let Some(node) = node_of(pod) else { return };
        let changed = role(pod);
        if is_device_plugin(pod) {
            queue.add(Task::Node(node.to_owned()));
        }
        if is_plugin(pod) {
            self.slices.in_use = true;
            queue.add(Task::Slices(node.to_owned()));
        }
        let managed = self.behaviour.borrow().driver_manager;
        let depends = |other: &Pod| match role(other) {
            Role::Validator | Role::Client => changed == Role::Driver,
            Role::Driver => managed && is_operand(pod),
            Role::Job | Role::Workload => {
                self.slices.in_use && claims(other) && matches!(changed, Role::Driver | Role::Client)
            }
        };
        for key in self.pods_on.get(node) {
            if self.pods.cache.get(key).is_some_and(|other| depends(other)) {
                queue.add(Task::Pod(key.clone()));
            }
        }
    }

    fn look_everywhere(&self, queue: &mut Queue<Task>) {
        for (key, _) in self.nodes.cache.iter() {
            queue.add(Task::Node(key.name.clone()));
            queue.add(Task::Slices(key.name.clone()));
        }
        self.pods.cache.iter().for_each(|(key, _)| queue.add(Task::Pod(key.clone())));
    }

    /// Keeps the Ready condition true, or unknown on a node whose kubelet is dead, the boot ID, and what the node
    /// has to offer.
    fn look_node(&self, name: &str) -> Option<Write<Self>> {
        let node = self.nodes.cache.get(&Key::new("", name))?;
        let info = node.status.as_ref().and_then(|status| status.node_info.clone()).unwrap_or_default();
        let boot_id = match self.boot(name) {
            0 => info.boot_id.clone(),
            boot => format!("boot-{boot}"),
        };
        let (wanted, reason) =
            if self.is_down(name) { ("Unknown", "NodeStatusUnknown") } else { ("True", "KubeletReady") };
        let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
        let known = conditions.into_iter().flatten().find(|condition| condition.type_ == "Ready");
        let offer = offer(node, self.has_device_plugin(name)).filter(|_| !self.is_down(name));
        let offer = offer.map(|gpus| json!({"allocatable": {GPU: gpus}}));
        if known.is_some_and(|ready| ready.status == wanted) && info.boot_id == boot_id {
            return offer.map(|offer| Write::merge_status(&self.way, node.as_ref(), &offer));
        }
        let now = Some(self.clock.now());
        let ready = NodeCondition {
            type_: "Ready".into(),
            status: wanted.into(),
            reason: Some(reason.into()),
            last_heartbeat_time: now.clone(),
            last_transition_time: now,
            ..NodeCondition::default()
        };
        let mut status = json!({"conditions": [ready], "nodeInfo": NodeSystemInfo { boot_id, ..info }});
        if let Some(offer) = offer {
            json_patch::merge(&mut status, &offer);
        }
        Some(Write::merge_status(&self.way, node.as_ref(), &status))
    }

    fn look_pod(&mut self, key: &Key, queue: &mut Queue<Task>) -> Vec<Write<Self>> {
        let Some(pod) = self.pods.cache.get(key).cloned() else { return Vec::new() };
        let node = node_of(&pod).and_then(|name| self.nodes.cache.get(&Key::new("", name)).cloned());
        let Some(node) = node.filter(|node| !self.is_down(&node.name_any())) else { return Vec::new() };
        let now = Instant::now();
        if is_terminating(pod.as_ref()) {
            return self.stop(key, &pod, now, queue).into_iter().collect();
        }
        let writes = self.live(key, &pod, &node, now, queue);
        self.count_users(&node.name_any());
        writes
    }

    /// Calls `act` with the machine under a node, where driver pods run our own agents.
    fn on_machine(&mut self, node: &str, act: impl FnOnce(&mut Self, OnMachine<'_>)) {
        let Some(machines) = self.behaviour.borrow().agents.clone() else { return };
        let (boot, now) = (self.boot(node), self.clock.exactly());
        act(self, OnMachine { node, boot, now, machines: &machines });
    }

    /// Tells the machine who has its driver open.
    fn count_users(&mut self, node: &str) {
        if node.is_empty() {
            return;
        }
        self.on_machine(node, |kubelets, under| {
            Agents::opened(under, &kubelets.users_on(node));
        });
    }

    /// Lets our own init containers work while they hold a driver pod back, and `finish` afterwards; the driver is loaded when
    /// its container is ready.
    fn run_agents(&mut self, key: &Key, pod: &Pod, node: &str, held: bool) {
        let up = self.lives.get(key).is_some_and(|life| life.ready);
        self.on_machine(node, |Self { agents, way, .. }, under| {
            if up {
                Agents::driver_is_up(pod, under);
            } else {
                Agents::driver_is_down(under);
            }
            if held {
                agents.initialize(way, key, pod, under);
            } else {
                agents.finish(way, key, pod, under);
            }
        });
    }

    /// A driver does not come up over another one that nobody has unloaded.
    fn finds_another_driver(&mut self, pod: &Pod, node: &str) -> bool {
        let mut found = false;
        self.on_machine(node, |_, under| found = Agents::is_in_the_way(pod, under));
        found
    }

    /// Brings a pod to where it is in its life by now, and tells.
    fn live(
        &mut self,
        key: &Key,
        pod: &Arc<Pod>,
        node: &Node,
        now: Instant,
        queue: &mut Queue<Task>,
    ) -> Vec<Write<Self>> {
        let (name, time) = (node.name_any(), self.clock.now());
        let (driver, run) = (self.driver_on(node), self.driver_run(node));
        let (boot, driver_restarts) = (self.boot(&name), self.driver_restarts(&name));
        let version = run.as_ref().and_then(|run| run.version.as_deref());
        let place = Place { node: &name, seed: self.seed, version };
        let mut course = course(&self.behaviour.borrow(), pod, place, driver.as_deref());
        let obstacle = self.obstacle(key, pod, node, run.as_ref());
        if role(pod) == Role::Driver && obstacle.is_none() && self.finds_another_driver(pod, &name) {
            course = Course::Crash { start: course.start(), after: Duration::ZERO };
        }
        let machine = Machine { driver: driver.as_deref(), run: run.as_ref(), boot, driver_restarts };
        let begin = || Life::of(pod, time.clone(), machine);
        let asks_itself = self.behaviour.borrow().agents.is_some();
        let life = self.lives.entry(key.clone()).or_insert_with(begin);
        let before = life.incarnation();
        life.live_in(boot);
        if role(pod) == Role::Driver {
            life.restart_driver(driver_restarts, &course, now, &time);
        }
        if let Some(obstacle) = obstacle.as_ref().filter(|_| !life.is_past_init()) {
            course = obstacle.course(&course);
        } else if !asks_itself
            && asks_first(pod)
            && !life.may_load(node.annotations().contains_key(&self.safe_load))
        {
            course = Course::Ask { start: course.start() };
        }
        let deadline = deadline(pod, life).map(|seconds| self.clock.instant(&life.since) + seconds);
        if deadline.is_some_and(|deadline| now >= deadline) {
            life.expire(&time);
        }
        for at in life.advance(&course, now, &time).into_iter().chain(deadline.filter(|at| *at > now)) {
            queue.add_at(Task::Pod(key.clone()), at);
        }
        if life.incarnation().is_some() && life.incarnation() != before {
            life.saw = run;
        }
        let at_work = life.is_held() && matches!(obstacle, Some(Obstacle::Agent(None)));
        let mut writes = Vec::new();
        if life.wants_to_load() {
            let wish = json!({"metadata": {"annotations": {&self.safe_load: "true"}}});
            writes.push(Write::patch(&self.way, node, wish));
        }
        match obstacle.filter(|_| life.is_held()) {
            Some(Obstacle::Operands(pods)) => {
                let stay = pods.iter().filter(|pod| !is_terminating(pod.as_ref()));
                writes.extend(stay.map(|pod| Write::delete(&self.way, pod.as_ref(), None)));
            }
            Some(Obstacle::Claims(why)) if life.told != Some(why) => {
                writes.push(tell(&self.way, pod, why, &time));
            }
            _ => {}
        }
        if life.has_begun() && !life.is_shown_by(pod) {
            let status = status_of(pod, life, &time);
            if pod.status.as_ref() == Some(&status) {
                life.note_shown_by(pod);
            } else {
                writes.push(Write::status(&self.way, pod.as_ref(), &status));
            }
        }
        if role(pod) == Role::Driver {
            self.run_agents(key, pod, &name, at_work);
        }
        if let Some(at) = self.agents.again_at(key, now) {
            queue.add_at(Task::Pod(key.clone()), at);
        }
        writes
    }

    fn look_slices(&mut self, name: &str, queue: &mut Queue<Task>) -> Vec<Write<Self>> {
        if !self.slices.in_use || self.is_down(name) {
            return Vec::new();
        }
        let place = slices::Place {
            name,
            node: self.nodes.cache.get(&Key::new("", name)).map(AsRef::as_ref),
            boot: self.boot(name),
            plugin: self.publisher(name),
            second_after: self.behaviour.borrow().second_slice_after,
        };
        let (writes, again) = self.slices.look(&self.way, &place, Instant::now());
        if let Some(at) = again {
            queue.add_at(Task::Slices(name.to_owned()), at);
        }
        writes
    }

    /// Lets the pod end in its own time, but not beyond its grace period, then removes it.
    fn stop(
        &mut self,
        key: &Key,
        pod: &Arc<Pod>,
        now: Instant,
        queue: &mut Queue<Task>,
    ) -> Option<Write<Self>> {
        let since = *self.stopping.entry(key.clone()).or_insert(now);
        let grace =
            pod.metadata.deletion_grace_period_seconds.and_then(|seconds| u64::try_from(seconds).ok());
        let grace_time = Duration::from_secs(grace.unwrap_or(30));
        let ends = self.agents.stop(key, now);
        let wait = if ends { grace_time } else { self.stop_time(pod).min(grace_time) };
        if now < since + wait {
            queue.add_at(Task::Pod(key.clone()), since + wait);
            return None;
        }
        // Somebody else's finalizer holds what is left of it.
        if grace == Some(0) && pod.finalizers().iter().any(|finalizer| !finalizer.is_empty()) {
            return None;
        }
        // Its programs end before anybody is told that it is gone.
        if let Some(node) = node_of(pod).filter(|_| self.behaviour.borrow().agents.is_some()) {
            self.lives.get_mut(key).into_iter().for_each(Life::end);
            self.count_users(node);
        }
        Some(Write::delete(&self.way, pod.as_ref(), Some(0)))
    }

    fn stop_time(&self, pod: &Pod) -> Duration {
        let timing = &self.behaviour.borrow().timing;
        let by_role = match role(pod) {
            Role::Driver => timing.driver_stop,
            _ if is_finished(pod) => Duration::ZERO,
            _ => timing.workload_stop,
        };
        annotated(pod, STOP_SECONDS).unwrap_or(by_role)
    }

    pub(super) fn boot(&self, node: &str) -> u32 {
        self.behaviour.borrow().boots.get(node).copied().unwrap_or(0)
    }

    fn driver_restarts(&self, node: &str) -> u32 {
        self.behaviour.borrow().driver_restarts.get(node).copied().unwrap_or(0)
    }

    fn is_down(&self, node: &str) -> bool {
        self.behaviour.borrow().down.contains(node)
    }
}

/// How long the kubelet lets a pod be active.
fn deadline(pod: &Pod, life: &Life) -> Option<Duration> {
    let seconds = pod.spec.as_ref()?.active_deadline_seconds?;
    u64::try_from(seconds).ok().map(Duration::from_secs).filter(|_| !life.is_over())
}

impl Actor for Kubelets {
    type Task = Task;

    fn sources(&mut self) -> Vec<&mut dyn Source> {
        let mut sources: Vec<&mut dyn Source> = vec![&mut self.nodes, &mut self.pods];
        if self.slices.in_use {
            sources.push(&mut self.slices.informer);
        }
        sources
    }

    fn route(&mut self, queue: &mut Queue<Task>) {
        for change in self.nodes.cache.take_changes() {
            queue.add(Task::Node(change.key.name.clone()));
            if change.new.is_none() {
                self.on_machine(&change.key.name, |_, under| under.machines.hosts.forget(under.node));
            }
            if self.slices.in_use {
                queue.add(Task::Slices(change.key.name.clone()));
            }
            let asked = |node: Option<&Arc<Node>>| {
                node.is_some_and(|node| node.annotations().contains_key(&self.safe_load))
            };
            // A node that comes up finds its pods waiting, as does one on which a driver may be loaded now.
            if change.old.is_none() || asked(change.old.as_ref()) != asked(change.new.as_ref()) {
                self.pods_on.get(&change.key.name).for_each(|key| queue.add(Task::Pod(key.clone())));
            }
        }
        for change in self.pods.cache.take_changes() {
            self.route_pod(&change, queue);
        }
        self.slices.take_changes().into_iter().for_each(|node| queue.add(Task::Slices(node)));
    }

    fn look(&mut self, task: &Task, queue: &mut Queue<Task>) -> Vec<Write<Self>> {
        match task {
            Task::Everything => {
                self.look_everywhere(queue);
                Vec::new()
            }
            Task::Node(name) => self.look_node(name).into_iter().collect(),
            Task::Pod(key) => self.look_pod(key, queue),
            Task::Slices(node) => self.look_slices(node, queue),
        }
    }
}

impl Holds<Node> for Kubelets {
    fn cache(&mut self) -> &mut Cache<Node> {
        &mut self.nodes.cache
    }
}

impl Holds<Pod> for Kubelets {
    fn cache(&mut self) -> &mut Cache<Pod> {
        &mut self.pods.cache
    }
}

impl Holds<ResourceSlice> for Kubelets {
    fn cache(&mut self) -> &mut Cache<ResourceSlice> {
        &mut self.slices.informer.cache
    }
}
