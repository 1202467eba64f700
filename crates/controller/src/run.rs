//! The loop: fold what came in, plan, start what is planned. It never awaits an action; answers come back as inputs.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::{FuturesUnordered, StreamExt};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, Client};
use pitcrew_core::action::{Action, DeleteWhy, Event, NodePatch, PodRef, PutBack};
use pitcrew_core::check::violations;
use pitcrew_core::contract::{COMPONENT, LEASE_NAME, LOG_TARGET, State};
use pitcrew_core::names::{NodeName, PoolName, ResourceVersion};
use pitcrew_core::plan::{Plan, plan};
use pitcrew_core::policy::Source;
use pitcrew_core::reason::Kind;
use pitcrew_core::snapshot::{Object, Pending, Snapshot};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{debug, error, info, warn};

use crate::clock::Clock;
use crate::events::Events;
use crate::execute::{Answer, Executor};
use crate::lease::Elector;
use crate::metrics::Metrics;
use crate::observe::Watches;
use crate::prometheus::{Asks, over_http};
use crate::scope::{Feature, Kind as Watched, Scope};
use crate::setback::{self, CallError};
use crate::store::{Effect, Store};

/// What comes in within this time is judged together.
const COALESCE: Duration = Duration::from_millis(5);
/// A pass looks at every node, and what there is to look at grows with the nodes too. With this much more time for each
/// pair of nodes, the work of a whole upgrade grows with the fleet and not with its square, …
const COALESCE_PER_PAIR: Duration = Duration::from_nanos(500);
/// … and even in the largest fleets nothing waits longer than this to be seen.
const COALESCE_MAX: Duration = Duration::from_millis(500);
/// At the end, what is under way gets this long to be answered.
const LAST_ANSWERS: Duration = Duration::from_secs(6);

/// How a controller runs.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where driver DaemonSets are when the policy does not say, and where the Lease is.
    pub namespace: String,
    /// The name of this candidate for leadership.
    pub identity: String,
    /// The node on which this process runs.
    pub own_node: Option<NodeName>,
    /// Where time comes from.
    pub clock: Clock,
    /// What is switched off.
    pub disabled: BTreeSet<Feature>,
}

/// Why a controller ended before it was told to.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// All watches ended, which they never do.
    #[error("the watches of the cluster ended")]
    WatchesEnded,
}

/// Called after each pass with what was known and what was decided.
pub type Pass = Box<dyn FnMut(&Snapshot, &Plan) + Send>;

/// The controller.
pub struct Controller {
    client: Client,
    config: Config,
    metrics: Metrics,
    ready: watch::Sender<bool>,
    on_pass: Option<Pass>,
    asks: Asks,
}

type InFlight = FuturesUnordered<BoxFuture<'static, (Action, Result<Answer, CallError>)>>;

impl Controller {
    /// A controller that speaks through `client`.
    pub fn new(client: Client, config: Config) -> Self {
        let (metrics, ready) = (Metrics::new(), watch::Sender::new(false));
        Self { client, config, metrics, ready, on_pass: None, asks: over_http(None) }
    }

    /// Calls `on_pass` after each pass.
    #[must_use]
    pub fn on_pass(mut self, on_pass: Pass) -> Self {
        self.on_pass = Some(on_pass);
        self
    }

    /// Asks a Prometheus in this way.
    #[must_use]
    pub fn asks(mut self, asks: Asks) -> Self {
        self.asks = asks;
        self
    }

    /// The metrics.
    pub fn metrics(&self) -> Metrics {
        self.metrics.clone()
    }

    /// Whether the first lists are complete.
    pub fn ready(&self) -> watch::Receiver<bool> {
        self.ready.subscribe()
    }

    /// Runs until `stop` resolves; then finishes what is under way and gives the Lease back.
    pub async fn run(self, stop: impl Future<Output = ()>) -> Result<(), RunError> {
        let Config { namespace, identity, clock, .. } = &self.config;
        let leases = Api::<Lease>::namespaced(self.client.clone(), namespace);
        let (leading, leads) = watch::channel(false);
        let (events, writer) = Events::start(self.client.clone(), self.metrics.clone());
        // A set, because whoever drops this future wants all of it to end at once.
        let mut helpers = JoinSet::new();
        helpers.spawn(Elector::new(leases, LEASE_NAME, identity, clock.clone()).run(leading));
        helpers.spawn(writer);
        let result = Loop::new(self, events, leads).run(stop).await;
        // Both end by themselves once the loop has dropped its ends of their channels.
        let _ = timeout(LAST_ANSWERS, async { while helpers.join_next().await.is_some() {} }).await;
        result
    }
}

/// The loop's own state. Nothing in it is needed to go on after a restart.
struct Loop {
    clock: Clock,
    store: Store,
    watches: Watches,
    executor: Arc<Executor>,
    events: Events,
    metrics: Metrics,
    leads: watch::Receiver<bool>,
    ready: watch::Sender<bool>,
    on_pass: Option<Pass>,
    in_flight: InFlight,
    complained: BTreeMap<Source, String>,
    /// What the log last said of each node.
    told: BTreeMap<PoolName, BTreeMap<NodeName, (State, &'static str)>>,
    /// When the next pass is due.
    due: Option<Instant>,
    last_pass: Instant,
}

impl Loop {
    fn new(controller: Controller, events: Events, leads: watch::Receiver<bool>) -> Self {
        let Controller { client, config, metrics, ready, on_pass, asks } = controller;
        let mut snapshot = Snapshot::new(config.clock.now(), &config.namespace);
        snapshot.own_node = config.own_node;
        snapshot.refreshes_clients = !config.disabled.contains(&Feature::Clients);
        let scope = Scope::controller(&config.disabled);
        Self {
            clock: config.clock,
            watches: Watches::start(client.clone(), &config.namespace, scope.required()),
            store: Store::new(snapshot, scope),
            executor: Arc::new(Executor::new(client, asks, metrics.clone())),
            events,
            metrics,
            leads,
            ready,
            on_pass,
            in_flight: FuturesUnordered::new(),
            complained: BTreeMap::new(),
            told: BTreeMap::new(),
            due: None,
            last_pass: Instant::now(),
        }
    }

    async fn run(mut self, stop: impl Future<Output = ()>) -> Result<(), RunError> {
        let mut stop = pin!(stop);
        loop {
            let due = self.due.unwrap_or_else(Instant::now);
            tokio::select! {
                biased;
                () = &mut stop => break,
                Ok(()) = self.leads.changed() => self.change_of_leader(),
                () = sleep_until(due), if self.due.is_some() => self.pass(),
                Some((action, result)) = self.in_flight.next() => self.answer(&action, result),
                observation = self.watches.next() => match observation {
                    Some(observation) => {
                        let effect = self.store.fold(observation, self.clock.now());
                        self.take_up(effect);
                    }
                    None => return Err(RunError::WatchesEnded),
                },
            }
        }
        info!("stopping; {} calls under way", self.in_flight.len());
        let last_answers = async { while self.in_flight.next().await.is_some() {} };
        let _ = timeout(LAST_ANSWERS, last_answers).await;
        Ok(())
    }

    fn take_up(&mut self, effect: Effect) {
        match effect {
            Effect::None => {}
            Effect::Serves(kind) => self.watches.add_kind(kind),
            Effect::Changed => self.pass_soon(),
        }
    }

    fn coalesce(&self) -> Duration {
        let nodes = u32::try_from(self.store.snapshot.nodes.len()).unwrap_or(u32::MAX);
        (COALESCE + COALESCE_PER_PAIR.saturating_mul(nodes.saturating_mul(nodes))).min(COALESCE_MAX)
    }

    fn pass_soon(&mut self) {
        let soon = (self.last_pass + self.coalesce()).max(Instant::now());
        self.due = Some(self.due.map_or(soon, |due| due.min(soon)));
    }

    fn change_of_leader(&mut self) {
        let leads = *self.leads.borrow_and_update();
        self.metrics.leads(leads);
        if leads {
            self.store.snapshot.leading_since = self.clock.now();
            // Whoever led before, ourselves included, may have started nodes, and a watch tells of that in its own time.
            self.store.doubt(Watched::Node);
            self.watches.list_nodes();
            self.pass_soon();
        } else {
            // Whoever leads now, we ourselves once more perhaps, decides from what is in the API. What we had sent is pinned
            // to what we had seen.
            self.in_flight.clear();
            self.store.snapshot.in_flight.clear();
            self.store.snapshot.setbacks.clear();
        }
    }

    /// Plans, checks the promises, starts what is left.
    fn pass(&mut self) {
        (self.last_pass, self.due) = (Instant::now(), None);
        if !self.store.is_complete() {
            return;
        }
        self.ready.send_replace(true);
        if !*self.leads.borrow() {
            return;
        }
        let now = self.clock.now();
        if now < self.store.snapshot.now {
            // The clock was set back: what waits for a time that it showed before would wait for ever.
            self.store.snapshot.setbacks.values_mut().for_each(|setback| setback.retry_at = now);
        }
        self.store.snapshot.now = now;
        let began = Instant::now();
        let mut plan = plan(&self.store.snapshot);
        self.metrics.planned_in(began.elapsed().as_secs_f64());
        self.drop_violations(&mut plan);
        self.metrics.fleet(&plan);
        self.metrics.health(&self.store.snapshot);
        self.log_decisions(&plan);
        if let Some(on_pass) = &mut self.on_pass {
            on_pass(&self.store.snapshot, &plan);
        }
        let complaining = |source: &Source| {
            plan.actions
                .iter()
                .any(|action| matches!(action, Action::Complain { source: of, .. } if of == source))
        };
        self.complained.retain(|source, _| complaining(source));
        let Plan { actions, wake_at, .. } = plan;
        debug!(%now, actions = actions.len(), wake_at = wake_at.map(tracing::field::display), "pass");
        for action in actions {
            self.start(action, now);
        }
        if let Some(at) = wake_at {
            // Never at once: a moment that has passed without effect must not make the loop spin.
            let at = self.clock.instant(at).max(self.last_pass + self.coalesce());
            self.due = Some(self.due.map_or(at, |due| due.min(at)));
        }
    }

    /// One line per decision, when it is another one than before.
    fn log_decisions(&mut self, plan: &Plan) {
        for pool in &plan.pools {
            let told = self.told.entry(pool.name.clone()).or_default();
            for (node, verdict) in &pool.nodes {
                let decision = (verdict.state, verdict.reason.code());
                if told.get(node) == Some(&decision) {
                    continue;
                }
                told.insert(node.clone(), decision);
                let (state, reason) = (verdict.state, &verdict.reason);
                // Thousands may wait for a slot; those that will not go on by themselves must be seen.
                match reason.kind() {
                    Kind::Blocked | Kind::Failed => warn!(target: LOG_TARGET, %node, %state, "{reason}"),
                    Kind::Moving | Kind::Paused => info!(target: LOG_TARGET, %node, %state, "{reason}"),
                    Kind::Done | Kind::Waiting => debug!(target: LOG_TARGET, %node, %state, "{reason}"),
                }
            }
        }
    }

    /// An action that would break a promise is dropped, and with it all else that its pool wanted, but for uncordons.
    fn drop_violations(&self, plan: &mut Plan) {
        let found = violations(&self.store.snapshot, plan);
        if found.is_empty() {
            return;
        }
        for violation in &found {
            error!(node = %violation.node, pool = %violation.pool, "dropped: it would break the promise \"{}\"", violation.promise);
            self.metrics.violation();
        }
        let mut index = 0;
        plan.actions.retain(|action| {
            let broken = found.iter().any(|violation| violation.action == index);
            index += 1;
            let pool = plan
                .pools
                .iter()
                .find(|pool| action.node().is_some_and(|node| pool.nodes.contains_key(node)));
            let frozen = pool.is_some_and(|pool| found.iter().any(|violation| violation.pool == pool.name));
            let uncordons = matches!(action, Action::PatchNode(NodePatch { unschedulable: Some(false), .. }));
            !broken && (!frozen || uncordons)
        });
    }

    fn start(&mut self, action: Action, now: Timestamp) {
        if let Action::Complain { source, message } = action {
            self.complain(source, message, now);
            return;
        }
        let Some(object) = action.object() else { return };
        if self.store.snapshot.is_busy(&object) {
            return;
        }
        let moving_to = match &action {
            Action::PatchNode(patch) => {
                patch.to.as_ref().map(|transition| (transition.driver.clone(), transition.to))
            }
            _ => None,
        };
        let on_node = action.node().cloned();
        self.store.snapshot.in_flight.insert(object, Pending { moving_to, on_node });
        let executor = self.executor.clone();
        self.in_flight.push(Box::pin(async move {
            let result = executor.carry_out(&action).await;
            (action, result)
        }));
    }

    /// Says once why a policy is not followed.
    fn complain(&mut self, source: Source, message: String, now: Timestamp) {
        if self.complained.get(&source) == Some(&message) {
            return;
        }
        warn!(target: LOG_TARGET, %source, "{message}");
        let event =
            Event { warning: true, reason: "DriverUpgradeFrozen".to_owned(), message: message.clone() };
        let uid = self.store.uid_of(&source);
        self.events.about_policy(&source, uid, &event, now);
        self.complained.insert(source, message);
    }

    /// Takes up what came of an action.
    fn answer(&mut self, action: &Action, result: Result<Answer, CallError>) {
        let now = self.clock.now();
        let Some(object) = action.object() else { return };
        self.store.snapshot.in_flight.remove(&object);
        match result {
            Ok(answer) => {
                self.store.snapshot.setbacks.remove(&object);
                self.tell(action, now);
                self.succeeded(action, answer, now);
            }
            Err(error) => self.failed(action, object, &error, now),
        }
        self.pass_soon();
    }

    fn succeeded(&mut self, action: &Action, answer: Answer, now: Timestamp) {
        match answer {
            Answer::Node(node) => self.store.answer_node(node),
            Answer::Asked(pod) => self.store.answer_pod(pod),
            Answer::Pod(pod) => {
                if let Some(pod) = pod {
                    self.store.answer_pod(pod);
                }
                let uid = match action {
                    Action::Evict(pod) | Action::Delete(pod, _) => Some(&pod.uid),
                    Action::RestartDriver(restart) => Some(&restart.pod.uid),
                    _ => None,
                };
                // The deletion may be seen only later; until then the pod is not asked twice.
                if let Some(uid) = uid {
                    self.store.snapshot.leaving.insert(uid.clone(), now);
                }
            }
            Answer::RolloutCreated(rollout) => self.store.answer_rollout(rollout, true, now),
            Answer::RolloutStatus(rollout) => self.store.answer_rollout(rollout, false, now),
            Answer::Policy(policy) => self.store.answer_driver_policy(policy),
            Answer::Job(job) => self.store.answer_gate_job(*job),
            Answer::Said(said) => self.store.answer_question(action, said),
            Answer::NoNode | Answer::Nothing => {}
        }
        if let Action::PutBack(way) = action {
            self.store.snapshot.put_back.insert(way.object(), now);
        }
    }

    fn failed(&mut self, action: &Action, object: Object, error: &CallError, now: Timestamp) {
        let earlier = self.store.snapshot.setbacks.get(&object);
        let setback = match action {
            Action::PatchNode(patch) => setback::after_write(error, patch.seen, earlier, now),
            Action::AskCheckpoint(pod, _) | Action::Evict(pod) | Action::Delete(pod, _) => {
                let seen = self.version_of(&pod.node, &object);
                setback::after_removal(error, seen, earlier, now)
            }
            Action::RestartDriver(restart) => {
                let seen = self.version_of(&restart.pod.node, &object);
                setback::after_removal(error, seen, earlier, now)
            }
            Action::ReadNode(node) => {
                let seen = self.store.snapshot.nodes.get(node).map(|node| node.version).unwrap_or_default();
                setback::after_read(seen, earlier, now)
            }
            _ => setback::after_removal(error, ResourceVersion::default(), earlier, now),
        };
        if !matches!(error.outcome(), "conflict" | "refused") && !error.is_gone() {
            let node = action.node().map(NodeName::as_str).unwrap_or_default();
            warn!(target: LOG_TARGET, node, %error, "a call failed; next try {}", setback.retry_at);
        }
        self.store.snapshot.setbacks.insert(object, setback);
    }

    fn version_of(&self, node: &NodeName, object: &Object) -> ResourceVersion {
        let Object::Pod(name) = object else { return ResourceVersion::default() };
        let pod = self.store.snapshot.pods.get(node).and_then(|pods| pods.get(name));
        pod.map(|pod| pod.version).unwrap_or_default()
    }

    /// Event, log line and metrics of what was done.
    fn tell(&mut self, action: &Action, now: Timestamp) {
        match action {
            Action::PatchNode(patch) => self.tell_patch(patch, now),
            Action::Delete(pod, DeleteWhy::TimedOut) => {
                let what = "did not leave in time and was deleted past its disruption budgets";
                self.tell_of_pod(pod, true, what, now);
            }
            Action::Delete(pod, DeleteWhy::StaleClient) => {
                info!(target: LOG_TARGET, node = %pod.node, pod = %pod.name, "stale client deleted");
                let what = "was deleted so that it comes back with the driver that runs now";
                self.tell_of_pod(pod, false, what, now);
            }
            Action::Evict(pod) => info!(target: LOG_TARGET, node = %pod.node, pod = %pod.name, "evicted"),
            Action::RestartDriver(restart) => {
                info!(target: LOG_TARGET, node = %restart.pod.node, pod = %restart.pod.name, "driver pod deleted");
            }
            Action::PutBack(way) => self.tell_of_put_back(way, now),
            Action::RolloutStatus { events, .. } => {
                for (node, event) in events {
                    let uid = self.store.snapshot.nodes.get(node).map(|node| node.uid.to_string());
                    self.events.about_node(node, &uid.unwrap_or_default(), event, now);
                }
            }
            Action::PolicyStatus { name, status } if !status.ready => {
                warn!(target: LOG_TARGET, driverpolicy = name, "{}", status.message);
            }
            _ => {}
        }
    }

    fn tell_of_put_back(&mut self, way: &PutBack, now: Timestamp) {
        match way {
            PutBack::Version { source, from, to } => {
                let message = format!("{} was put back from {from} to {to}", source.version_field());
                info!(target: LOG_TARGET, %source, "{message}");
                let event = Event { warning: true, reason: "DriverRollback".to_owned(), message };
                self.events.about_policy(source, self.store.uid_of(source), &event, now);
            }
            PutBack::Template { daemon_set, revision, .. } => {
                info!(target: LOG_TARGET, %daemon_set, %revision, "template put back");
            }
        }
    }

    fn tell_of_pod(&mut self, pod: &PodRef, warning: bool, what: &str, now: Timestamp) {
        let node = self.store.snapshot.nodes.get(&pod.node);
        let uid = node.map(|node| node.uid.to_string()).unwrap_or_default();
        let message = format!("Pod {} {what}", pod.name);
        let event = Event { warning, reason: COMPONENT.to_owned(), message };
        self.events.about_node(&pod.node, &uid, &event, now);
    }

    fn tell_patch(&mut self, patch: &NodePatch, now: Timestamp) {
        let Some(node) = self.store.snapshot.nodes.get(&patch.node) else { return };
        if let Some(event) = &patch.event {
            self.events.about_node(&patch.node, node.uid.as_str(), event, now);
        }
        let Some(transition) = &patch.to else { return };
        info!(target: LOG_TARGET, node = %patch.node, driver = %transition.driver, from = %transition.from, to = %transition.to, "{}",
            patch.event.as_ref().map(|event| event.message.as_str()).unwrap_or_default());
        let Some(Ok(visit)) = &node.visit else { return };
        let seconds = |since: Timestamp| now.duration_since(since).as_secs_f64();
        if let Some(walk) = visit.drivers.get(&transition.driver) {
            self.metrics.left_state(transition.driver.as_str(), transition.from, seconds(walk.since));
        }
        if transition.to == State::UpgradeDone {
            self.metrics.visited(seconds(visit.since));
        }
    }
}
