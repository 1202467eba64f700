//! The controllers that any real cluster has, in one loop over shared watches: the part of kube-controller-manager
//! and kube-scheduler that a driver upgrade meets. Each controller is a file of small functions; this one only says
//! which change concerns whom.

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::api::apps::v1::{ControllerRevision, DaemonSet, Deployment, ReplicaSet, StatefulSet};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::Resource;
use tokio::time::Instant;

use super::budget::Budgets;
use super::cache::{Cache, Change, Key, Source};
use super::clock::Clock;
use super::daemon_set::DaemonSets;
use super::drive::Actor;
use super::gc::Collector;
use super::job::Jobs;
use super::object::{controller_of, controller_uid, is_terminating, meant_for};
use super::queue::Queue;
use super::scheduler::Scheduler;
use super::way::Way;
use super::world::World;
use super::write::{Holds, Write};
use super::{deployment, gc, replica_set, stateful_set};

/// Counts in a status may lag a little, so that a thousand pods that become ready are not a thousand writes.
pub(super) const STATUS_DELAY: Duration = Duration::from_secs(1);
/// Of a ReplicaSet's counts, which only its Deployment reads.
const REPLICAS_DELAY: Duration = Duration::from_millis(400);

/// What there is to look at; a pass goes through them in this order.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Task {
    Collect(String),
    CollectNode(String),
    DaemonSet(Key),
    DaemonNode(Key, String),
    DaemonRoll(Key),
    DaemonStatus(Key),
    Deployment(Key),
    ReplicaSet(Key),
    ReplicaSetStatus(Key),
    StatefulSet(Key),
    Job(Key),
    Schedule,
    Budget(Key),
}

/// Each controller writes under a name of its own, as in a real cluster.
pub(super) struct Ways {
    pub(super) daemon_set: Way,
    pub(super) deployment: Way,
    pub(super) replica_set: Way,
    pub(super) stateful_set: Way,
    pub(super) job: Way,
    pub(super) disruption: Way,
    pub(super) collector: Way,
    pub(super) scheduler: Way,
}

/// All built-in controllers and what they remember.
pub(super) struct Manager {
    pub(super) ways: Ways,
    pub(super) clock: Clock,
    pub(super) world: World,
    pub(super) daemon_sets: DaemonSets,
    pub(super) scheduler: Scheduler,
    pub(super) budgets: Budgets,
    pub(super) jobs: Jobs,
    pub(super) collector: Collector,
}

impl Manager {
    pub(super) fn new(way_for: impl Fn(&str) -> Way, clock: Clock) -> Self {
        let ways = Ways {
            daemon_set: way_for("daemon-set-controller"),
            deployment: way_for("deployment-controller"),
            replica_set: way_for("replicaset-controller"),
            stateful_set: way_for("statefulset-controller"),
            job: way_for("job-controller"),
            disruption: way_for("disruption-controller"),
            collector: way_for("generic-garbage-collector"),
            scheduler: way_for("scheduler"),
        };
        Self {
            ways,
            clock,
            world: World::new(&way_for("controller-manager")),
            daemon_sets: DaemonSets::default(),
            scheduler: Scheduler::default(),
            budgets: Budgets::default(),
            jobs: Jobs::default(),
            collector: Collector::default(),
        }
    }

    fn route_pod(&mut self, change: &Change<Pod>, queue: &mut Queue<Task>) {
        self.world.index_pod(change);
        let mut owners = BTreeSet::new();
        for pod in [&change.old, &change.new].into_iter().flatten() {
            if let Some(owner) = controller_of(pod.as_ref()) {
                let key = Key::new(change.key.namespace.as_str(), owner.name.as_str());
                match owner.kind.as_str() {
                    "DaemonSet" => {
                        owners.extend(meant_for(pod).map(|node| Task::DaemonNode(key, node.to_owned())));
                    }
                    "ReplicaSet" => owners.extend([Task::ReplicaSet(key)]),
                    "StatefulSet" => owners.extend([Task::StatefulSet(key)]),
                    "Job" => owners.extend([Task::Job(key)]),
                    _ => {}
                }
            }
        }
        for task in owners {
            queue.add(task);
        }
        self.jobs.note(change);
        if self.scheduler.note_pod(change) {
            queue.add(Task::Schedule);
        }
        for key in self.budgets.note_pod(change) {
            queue.add(Task::Budget(key));
        }
        if let (None, Some(pod)) = (&change.old, &change.new) {
            self.collector.note_dependent(&self.world, pod.as_ref(), queue);
            if meant_for(pod).is_some_and(|node| self.world.node(node).is_none()) {
                gc::note_orphan(meant_for(pod).unwrap_or_default(), queue);
            }
        }
    }

    fn route_node(&mut self, change: &Change<Node>, queue: &mut Queue<Task>) {
        if self.scheduler.note_node(change) {
            queue.add(Task::Schedule);
        }
        if change.new.is_none() {
            gc::note_orphan(&change.key.name, queue);
        }
        if daemon_facts(change.old.as_deref()) != daemon_facts(change.new.as_deref()) {
            for (key, _) in self.world.daemon_sets.cache.iter() {
                queue.add(Task::DaemonNode(key.clone(), change.key.name.clone()));
            }
        }
    }

    fn route_replica_set(&mut self, change: &Change<ReplicaSet>, queue: &mut Queue<Task>) {
        let (old, new) = (change.old.as_deref(), change.new.as_deref());
        self.world.replica_sets_of.shift(
            &change.key,
            old.and_then(controller_uid),
            new.and_then(controller_uid),
        );
        if let Some(owner) = new.or(old).and_then(controller_of) {
            queue.add(Task::Deployment(Key::new(change.key.namespace.as_str(), owner.name.as_str())));
        }
        if spec_changed(change) {
            queue.add(Task::ReplicaSet(change.key.clone()));
        }
        if let (None, Some(new)) = (old, new) {
            self.collector.note_dependent(&self.world, new, queue);
        }
        // A budget in percent is of the replicas that are wanted.
        if spec_changed(change) {
            self.budgets.in_namespace(&change.key.namespace).for_each(|key| queue.add(Task::Budget(key)));
        }
        self.note_gone(change, queue);
    }

    fn route_budget(&mut self, change: &Change<PodDisruptionBudget>, queue: &mut Queue<Task>) {
        self.budgets.note_budget(&self.world, change);
        if change.new.is_some() {
            queue.add(Task::Budget(change.key.clone()));
        }
    }

    fn route_revision(&mut self, change: &Change<ControllerRevision>, queue: &mut Queue<Task>) {
        let (old, new) = (change.old.as_deref(), change.new.as_deref());
        self.world.revisions_of.shift(
            &change.key,
            old.and_then(controller_uid),
            new.and_then(controller_uid),
        );
        if let Some(owner) = new.or(old).and_then(controller_of).filter(|owner| owner.kind == "DaemonSet") {
            queue.add(Task::DaemonSet(Key::new(change.key.namespace.as_str(), owner.name.as_str())));
        }
    }

    fn route_job(&mut self, change: &Change<Job>, queue: &mut Queue<Task>) {
        let (old, new) = (change.old.as_deref(), change.new.as_deref());
        self.world.jobs_of.shift(&change.key, old.and_then(controller_uid), new.and_then(controller_uid));
        queue.add(Task::Job(change.key.clone()));
        self.note_gone(change, queue);
    }

    /// An owner that goes leaves dependents behind.
    fn note_gone<K: Resource>(&mut self, change: &Change<K>, queue: &mut Queue<Task>) {
        let uid = |object: &K| object.meta().uid.clone();
        let (old, new) = (change.old.as_deref().and_then(uid), change.new.as_deref().and_then(uid));
        if let Some(old) = old
            && new.as_ref() != Some(&old)
        {
            self.collector.note_gone(old, queue);
        }
    }
}

/// What decides whether a DaemonSet's pod belongs on a node.
fn daemon_facts(node: Option<&Node>) -> Option<impl PartialEq> {
    node.map(|node| {
        let spec = node.spec.as_ref();
        (
            node.metadata.labels.clone(),
            spec.and_then(|spec| spec.taints.clone()),
            spec.and_then(|spec| spec.unschedulable),
        )
    })
}

/// Status writes do not raise the generation, so a controller's own writes do not wake it.
pub(super) fn spec_changed<K: Resource>(change: &Change<K>) -> bool {
    match (&change.old, &change.new) {
        (Some(old), Some(new)) => {
            old.meta().generation != new.meta().generation
                || old.meta().uid != new.meta().uid
                || is_terminating(old.as_ref()) != is_terminating(new.as_ref())
                || new.meta().generation.is_none()
        }
        _ => true,
    }
}

impl Actor for Manager {
    type Task = Task;

    fn sources(&mut self) -> Vec<&mut dyn Source> {
        self.world.sources()
    }

    fn route(&mut self, queue: &mut Queue<Task>) {
        for change in self.world.nodes.cache.take_changes() {
            self.route_node(&change, queue);
        }
        for change in self.world.daemon_sets.cache.take_changes() {
            if spec_changed(&change) {
                queue.add(Task::DaemonSet(change.key.clone()));
            }
            self.note_gone(&change, queue);
        }
        for change in self.world.deployments.cache.take_changes() {
            if spec_changed(&change) {
                queue.add(Task::Deployment(change.key.clone()));
            }
            self.note_gone(&change, queue);
        }
        for change in self.world.stateful_sets.cache.take_changes() {
            if spec_changed(&change) {
                queue.add(Task::StatefulSet(change.key.clone()));
            }
            self.note_gone(&change, queue);
        }
        for change in self.world.jobs.cache.take_changes() {
            self.route_job(&change, queue);
        }
        for change in self.world.replica_sets.cache.take_changes() {
            self.route_replica_set(&change, queue);
        }
        for change in self.world.revisions.cache.take_changes() {
            self.route_revision(&change, queue);
        }
        for change in self.world.budgets.cache.take_changes() {
            self.route_budget(&change, queue);
        }
        for change in self.world.pods.cache.take_changes() {
            self.route_pod(&change, queue);
        }
        self.collector.take_confirmed().into_iter().for_each(|uid| queue.add(Task::Collect(uid)));
    }

    fn look(&mut self, task: &Task, queue: &mut Queue<Task>) -> Vec<Write<Self>> {
        let now = Instant::now();
        let Self { ways, clock, world, daemon_sets, scheduler, budgets, jobs, collector } = self;
        match task {
            Task::Collect(uid) => collector.look(&ways.collector, world, uid),
            Task::CollectNode(node) => gc::look_node(&ways.collector, world, node),
            Task::DaemonSet(key) => daemon_sets.look(&ways.daemon_set, world, key, queue),
            Task::DaemonNode(key, node) => {
                daemon_sets.look_node(&ways.daemon_set, world, (key, node), now, queue)
            }
            Task::DaemonRoll(key) => daemon_sets.roll(&ways.daemon_set, world, key),
            Task::DaemonStatus(key) => daemon_sets.status(&ways.daemon_set, world, key),
            Task::Deployment(key) => deployment::look(&ways.deployment, world, key, clock),
            Task::ReplicaSet(key) => {
                queue.add_at(Task::ReplicaSetStatus(key.clone()), now + REPLICAS_DELAY);
                replica_set::look(&ways.replica_set, world, key)
            }
            Task::ReplicaSetStatus(key) => replica_set::status(&ways.replica_set, world, key),
            Task::StatefulSet(key) => stateful_set::look(&ways.stateful_set, world, key),
            Task::Job(key) => jobs.look(&ways.job, world, key, clock, queue),
            Task::Schedule => scheduler.look(&ways.scheduler, world, clock),
            Task::Budget(key) => budgets.look(&ways.disruption, world, key, clock, queue),
        }
    }
}

macro_rules! holds {
    ($($kind:ty => $field:ident),* $(,)?) => {$(
        impl Holds<$kind> for Manager {
            fn cache(&mut self) -> &mut Cache<$kind> {
                &mut self.world.$field.cache
            }
        }
    )*};
}

holds! {
    Node => nodes,
    DaemonSet => daemon_sets,
    ControllerRevision => revisions,
    Deployment => deployments,
    ReplicaSet => replica_sets,
    StatefulSet => stateful_sets,
    Job => jobs,
    PodDisruptionBudget => budgets,
    Pod => pods,
}
