//! The Snapshot, kept current by what is observed and by the answers to our own writes.
//!
//! Two rules hold for everything that comes in: a newer version is never replaced by an older one, relists included;
//! and the answer to a write never brings back an object that is gone. A pass is due only if a fact changed.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::coordination::v1::Lease;
use kube::Resource;
use kube::core::DynamicObject;
use kube::runtime::watcher::Event;
use pitcrew_core::action::Action;
use pitcrew_core::api::{DriverPolicy, Rollout};
use pitcrew_core::gate::{GatePod, JobFacts};
use pitcrew_core::names::{NodeName, ObjectName, ResourceVersion, Uid};
use pitcrew_core::policy::Source;
use pitcrew_core::prometheus::{Answer, Values};
use pitcrew_core::snapshot::{GpuOperator, Node, Object, Pod, Snapshot};
use tracing::warn;

use crate::observe::Observation;
use crate::scope::{Kind, Scope};
use crate::{view, wire};

/// How long a GPU Operator counts as live after its Lease was seen renewed, if the Lease does not say.
const LEASE_SECONDS: i32 = 15;

/// Longer than between two looks at a bake.
const ANSWERS_KEPT: SignedDuration = SignedDuration::from_hours(1);

/// The facts, and what is known about where they came from.
pub(crate) struct Store {
    pub(crate) snapshot: Snapshot,
    scope: Scope,
    tables: BTreeMap<Kind, Table>,
}

/// What is known of one kind.
#[derive(Default)]
struct Table {
    objects: BTreeMap<ObjectName, Known>,
    /// Names that a list under way has shown so far.
    listing: Option<BTreeSet<ObjectName>>,
    listed: bool,
}

struct Known {
    uid: Uid,
    version: ResourceVersion,
    /// Where the pod is.
    node: Option<NodeName>,
}

/// What an observation changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Effect {
    /// Nothing that anybody reads.
    None,
    /// A fact: a pass is due.
    Changed,
    /// The definition of an optional kind is there now.
    Serves(Kind),
}

impl Effect {
    fn changed(changed: bool) -> Self {
        if changed { Effect::Changed } else { Effect::None }
    }
}

impl Store {
    pub(crate) fn new(snapshot: Snapshot, scope: Scope) -> Self {
        Self { snapshot, scope, tables: BTreeMap::new() }
    }

    /// Whether the first lists are complete: before that, absence means nothing.
    pub(crate) fn is_complete(&self) -> bool {
        let optional = self.scope.optional().filter(|kind| self.tables.contains_key(kind));
        self.scope.required().chain(optional).all(|kind| self.knows(kind))
    }

    /// Whether objects of this kind have been listed.
    pub(crate) fn knows(&self, kind: Kind) -> bool {
        self.tables.get(&kind).is_some_and(|table| table.listed)
    }

    /// What is known of this kind counts only once it has been listed again.
    pub(crate) fn doubt(&mut self, kind: Kind) {
        self.table(kind).listed = false;
    }

    /// Takes up what was observed.
    pub(crate) fn fold(&mut self, observation: Observation, now: Timestamp) -> Effect {
        match observation {
            Observation::Node(event) => self.fold_kind(Kind::Node, event, Self::put_node),
            Observation::Pod(event) => self.fold_kind(Kind::Pod, event, Self::put_pod),
            Observation::DaemonSet(event) => self.fold_kind(Kind::DaemonSet, event, |store, ds| {
                let Ok(ds) = view::daemon_set(&ds) else { return false };
                store.snapshot.daemon_sets.insert(ds.uid.clone(), ds.clone()).as_ref() != Some(&ds)
            }),
            Observation::Revision(event) => self.fold_kind(Kind::Revision, event, |store, object| {
                let (Ok(identity), Some(revision)) =
                    (view::identity(&object.metadata), view::revision(&object))
                else {
                    return false;
                };
                store.snapshot.revisions.insert(identity.uid, revision.clone()).as_ref() != Some(&revision)
            }),
            Observation::Budget(event) => self.fold_kind(Kind::Budget, event, |store, object| {
                let Ok(identity) = view::identity(&object.metadata) else { return false };
                let name = ObjectName::new(&identity.namespace, &identity.name);
                let budget = view::budget(&object);
                store.snapshot.budgets.insert(name, budget.clone()).as_ref() != Some(&budget)
            }),
            Observation::Claim(event) => self.fold_kind(Kind::Claim, event, |store, object| {
                let (name, claim) = (object_name(&object.metadata), view::claim(&object));
                store.snapshot.claims.insert(name, claim.clone()).as_ref() != Some(&claim)
            }),
            Observation::Slice(event) => self.fold_slice(event),
            Observation::DriverPolicy(event) => {
                self.fold_kind(Kind::DriverPolicy, event, Self::put_driver_policy)
            }
            Observation::Rollout(event) => self.fold_kind(Kind::Rollout, event, Self::put_rollout),
            Observation::ClusterPolicy(event) => {
                self.fold_kind(Kind::ClusterPolicy, event, |store, object| {
                    let name = object.metadata.name.clone().unwrap_or_default();
                    store.note_manager(Source::ClusterPolicy(name.clone()), &object.metadata);
                    store.snapshot.sources.cluster_policies.insert(name, view::cluster_policy(&object));
                    true
                })
            }
            Observation::NvidiaDriver(event) => self.fold_kind(Kind::NvidiaDriver, event, |store, object| {
                let name = object.metadata.name.clone().unwrap_or_default();
                let managed = store.note_manager(Source::NvidiaDriver(name.clone()), &object.metadata);
                let (policy, version) = (object.spec.upgrade_policy, object.spec.version);
                let sources = &mut store.snapshot.sources;
                let versions = &mut sources.nvidia_driver_versions;
                let new = versions.insert(name.clone(), version.clone()) != Some(version);
                sources.nvidia_drivers.insert(name, policy.clone()) != Some(policy) || new || managed
            }),
            Observation::NicClusterPolicy(event) => {
                self.fold_kind(Kind::NicClusterPolicy, event, |store, object| {
                    let name = object.metadata.name.clone().unwrap_or_default();
                    let managed =
                        store.note_manager(Source::NicClusterPolicy(name.clone()), &object.metadata);
                    let (policies, ofed) =
                        (&mut store.snapshot.sources.nic_cluster_policies, object.spec.ofed_driver);
                    policies.insert(name, ofed.clone()) != Some(ofed) || managed
                })
            }
            Observation::Lease(event) => {
                self.fold_kind(Kind::Lease, event, |store, l| store.put_lease(&l, now))
            }
            Observation::Deployment(event) => {
                self.fold_kind(Kind::Deployment, event, |store, d| store.put_deployment(&d))
            }
            Observation::Breaker(event) => self.fold_kind(Kind::Breaker, event, |store, breaker| {
                let now = Some(view::nvsentinel(&breaker));
                std::mem::replace(&mut store.snapshot.nvsentinel, now) != now
            }),
            Observation::GateJob(event) => {
                self.fold_kind(Kind::GateJob, event, |store, job| store.put_gate_job(&job))
            }
            Observation::GatePod(event) => self.fold_kind(Kind::GatePod, event, |store, object| {
                let Some(pod) = GatePod::read(&object) else { return false };
                store.snapshot.gate_pods.insert(pod.name.clone(), pod.clone()).as_ref() != Some(&pod)
            }),
            Observation::Matrix(event) => self.fold_kind(Kind::Matrix, event, |store, object| {
                let now = Some(view::matrices(&object));
                let before = std::mem::replace(&mut store.snapshot.matrices, now);
                before != store.snapshot.matrices
            }),
            Observation::Definition(event) => self.fold_definition(&event),
            Observation::Broken(kind, error) => {
                warn!(?kind, %error, "a watch broke; it is taken up again");
                Effect::None
            }
        }
    }

    fn fold_definition(&mut self, event: &Event<impl Resource>) -> Effect {
        let kind = match event {
            Event::Apply(object) | Event::InitApply(object) => {
                let name = object.meta().name.as_deref();
                self.scope.optional().find(|kind| kind.definition() == name)
            }
            Event::InitDone => {
                self.tables.entry(Kind::Definition).or_default().listed = true;
                return Effect::Changed;
            }
            _ => None,
        };
        match kind.filter(|kind| !self.tables.contains_key(kind)) {
            Some(kind) => {
                self.tables.insert(kind, Table::default());
                Effect::Serves(kind)
            }
            None => Effect::None,
        }
    }

    fn fold_slice(&mut self, event: Event<DynamicObject>) -> Effect {
        let listed = matches!(event, Event::InitDone);
        let effect = self.fold_kind(Kind::Slice, event, |store, object| {
            let Some(slice) = view::slice(&object) else { return false };
            let name = object.metadata.name.unwrap_or_default().into();
            let slices = store.snapshot.slices.get_or_insert_default();
            slices.insert(name, slice.clone()).as_ref() != Some(&slice)
        });
        if listed {
            // From now on, none means none.
            self.snapshot.slices.get_or_insert_default();
        }
        effect
    }

    fn fold_kind<K: Resource>(
        &mut self,
        kind: Kind,
        event: Event<K>,
        put: impl Fn(&mut Self, K) -> bool,
    ) -> Effect {
        match event {
            Event::Init => {
                self.table(kind).listing = Some(BTreeSet::new());
                Effect::None
            }
            Event::InitApply(object) => {
                let name = name_of(&object);
                if let Some(listing) = &mut self.table(kind).listing {
                    listing.insert(name);
                }
                self.apply(kind, object, put)
            }
            Event::InitDone => Effect::changed(self.finish_list(kind)),
            Event::Apply(object) => self.apply(kind, object, put),
            Event::Delete(object) => {
                let name = name_of(&object);
                let version = object.meta().resource_version.as_deref().and_then(ResourceVersion::parse);
                let newer =
                    self.table(kind).objects.get(&name).is_some_and(|known| Some(known.version) > version);
                Effect::changed(!newer && self.remove(kind, &name))
            }
        }
    }

    /// What the list did not show is gone.
    fn finish_list(&mut self, kind: Kind) -> bool {
        let table = self.table(kind);
        let first = !std::mem::replace(&mut table.listed, true);
        let shown = table.listing.take().unwrap_or_default();
        let gone: Vec<ObjectName> =
            table.objects.keys().filter(|name| !shown.contains(name)).cloned().collect();
        let changed = !gone.is_empty();
        for name in gone {
            self.remove(kind, &name);
        }
        changed || first
    }

    fn apply<K: Resource>(&mut self, kind: Kind, object: K, put: impl Fn(&mut Self, K) -> bool) -> Effect {
        let identity = match view::identity(object.meta()) {
            Ok(identity) => identity,
            Err(error) => {
                warn!(?kind, %error, "ignored");
                return Effect::None;
            }
        };
        let name = name_of(&object);
        let known = self.table(kind).objects.get(&name);
        if known.is_some_and(|known| known.version >= identity.version) {
            return Effect::None;
        }
        if known.is_some_and(|known| known.uid != identity.uid) {
            // Another object of the same name: nothing of the old one may shine through.
            self.remove(kind, &name);
        }
        let known = Known { uid: identity.uid, version: identity.version, node: None };
        let entry = self.table(kind).objects.entry(name).or_insert_with(|| Known { ..known });
        entry.version = identity.version;
        Effect::changed(put(self, object))
    }

    fn remove(&mut self, kind: Kind, name: &ObjectName) -> bool {
        let Some(known) = self.table(kind).objects.remove(name) else { return false };
        let snapshot = &mut self.snapshot;
        let plain: &str = &name.name;
        match kind {
            Kind::Node => {
                snapshot.setbacks.remove(&Object::Node(plain.into()));
                snapshot.nodes.remove(plain).is_some()
            }
            Kind::Pod => {
                snapshot.leaving.remove(&known.uid);
                snapshot.setbacks.remove(&Object::Pod(name.clone()));
                known.node.is_some_and(|node| remove_pod(snapshot, &node, name))
            }
            Kind::DaemonSet => snapshot.daemon_sets.remove(&known.uid).is_some(),
            Kind::Revision => snapshot.revisions.remove(&known.uid).is_some(),
            Kind::Budget => snapshot.budgets.remove(name).is_some(),
            Kind::Claim => snapshot.claims.remove(name).is_some(),
            Kind::Slice => snapshot.slices.as_mut().is_some_and(|slices| slices.remove(plain).is_some()),
            Kind::DriverPolicy => {
                snapshot.sources.driver_policy_status.remove(plain);
                snapshot.sources.driver_policies.remove(plain).is_some()
            }
            Kind::Rollout => snapshot.rollouts.remove(plain).is_some(),
            Kind::ClusterPolicy => snapshot.sources.cluster_policies.remove(plain).is_some(),
            Kind::NvidiaDriver => {
                snapshot.sources.nvidia_driver_versions.remove(plain);
                snapshot.sources.nvidia_drivers.remove(plain).is_some()
            }
            Kind::NicClusterPolicy => snapshot.sources.nic_cluster_policies.remove(plain).is_some(),
            Kind::Lease => snapshot.gpu_operator.lease.take().is_some(),
            Kind::Deployment => {
                let text = deployment_text(name);
                let versioned = snapshot.gpu_operator.versions.remove(&text).is_some();
                snapshot.gpu_operator.deployments.remove(&text) || versioned
            }
            Kind::Breaker => snapshot.nvsentinel.take().is_some(),
            Kind::GateJob => {
                snapshot.setbacks.remove(&Object::Job(name.clone()));
                snapshot.gate_jobs.remove(name).is_some()
            }
            Kind::GatePod => snapshot.gate_pods.remove(name).is_some(),
            Kind::Matrix => snapshot.matrices.take().is_some(),
            Kind::Definition | Kind::Leader => false,
        }
    }

    /// Who else keeps this object as it is; whether that is news.
    fn note_manager(&mut self, source: Source, meta: &kube::core::ObjectMeta) -> bool {
        let managers = &mut self.snapshot.sources.managers;
        match view::manager(meta) {
            Some(manager) => managers.insert(source, manager.clone()) != Some(manager),
            None => managers.remove(&source).is_some(),
        }
    }

    fn put_node(&mut self, object: wire::Node) -> bool {
        let Ok((name, node)) = view::node(object) else { return false };
        let before = self.snapshot.nodes.insert(name.clone(), node);
        let after = self.snapshot.nodes.get(&name);
        // A new version alone is no new fact, unless a write waits for it.
        let waited_for = || self.snapshot.setbacks.contains_key(&Object::Node(name.clone()));
        let same = |(mut before, after): (Node, &Node)| {
            before.version = after.version;
            before == *after
        };
        !before.zip(after).is_some_and(same) || waited_for()
    }

    fn put_pod(&mut self, object: wire::Pod) -> bool {
        let Ok(pod) = view::pod(object) else { return false };
        if pod.node.as_str().is_empty() {
            return false;
        }
        if let Some(known) = self.table(Kind::Pod).objects.get_mut(&pod.name) {
            known.node = Some(pod.node.clone());
        }
        let pods = self.snapshot.pods.entry(pod.node.clone()).or_default();
        let before = pods.insert(pod.name.clone(), pod.clone());
        before.is_none_or(|before| before != Pod { version: before.version, ..pod })
    }

    fn put_gate_job(&mut self, object: &Job) -> bool {
        let Some(job) = JobFacts::read(object) else { return false };
        self.snapshot.setbacks.remove(&Object::Job(job.name.clone()));
        self.snapshot.gate_jobs.insert(job.name.clone(), job.clone()).as_ref() != Some(&job)
    }

    fn put_driver_policy(&mut self, object: DriverPolicy) -> bool {
        let name = object.metadata.name.unwrap_or_default();
        let status = (object.metadata.generation.unwrap_or_default(), object.status.unwrap_or_default());
        let sources = &mut self.snapshot.sources;
        let status_new = sources.driver_policy_status.insert(name.clone(), status.clone()) != Some(status);
        sources.driver_policies.insert(name, object.spec.clone()) != Some(object.spec) || status_new
    }

    fn put_rollout(&mut self, object: Rollout) -> bool {
        let Ok((name, mut rollout)) = view::rollout(object) else { return false };
        let before = self.snapshot.rollouts.get(&name);
        rollout.said_at = before.and_then(|before| before.said_at);
        let same = before.is_some_and(|b| (&b.spec, &b.status) == (&rollout.spec, &rollout.status));
        self.snapshot.rollouts.insert(name, rollout);
        !same
    }

    /// Live until the Lease was not renewed for its duration, by our own clock.
    fn put_lease(&mut self, lease: &Lease, now: Timestamp) -> bool {
        let before = self.snapshot.gpu_operator.live(now);
        let spec = lease.spec.clone().unwrap_or_default();
        let name = object_name(&lease.metadata);
        let holder = spec.holder_identity.filter(|holder| !holder.is_empty());
        let seconds = spec.lease_duration_seconds.unwrap_or(LEASE_SECONDS);
        self.snapshot.gpu_operator.lease = holder.map(|holder| {
            let until =
                now.saturating_add(SignedDuration::from_secs(seconds.into())).unwrap_or(Timestamp::MAX);
            (format!("lease/{name} held by {holder}"), until)
        });
        before != self.snapshot.gpu_operator.live(now)
    }

    fn put_deployment(&mut self, deployment: &Deployment) -> bool {
        let text = deployment_text(&object_name(&deployment.metadata));
        let available = deployment.status.as_ref().and_then(|s| s.available_replicas).unwrap_or(0);
        let GpuOperator { deployments, versions, .. } = &mut self.snapshot.gpu_operator;
        let version = view::operator_version(deployment.metadata.labels.as_ref());
        let before = match version.clone() {
            Some(version) => versions.insert(text.clone(), version),
            None => versions.remove(&text),
        };
        let changed = if available > 0 { deployments.insert(text) } else { deployments.remove(&text) };
        changed || before != version
    }

    /// The answer to a write on a node: a newer version of something that is still there.
    pub(crate) fn answer_node(&mut self, object: wire::Node) {
        if self.is_known(Kind::Node, &object) {
            self.apply(Kind::Node, object, Self::put_node);
        }
    }

    /// The answer to a deletion of a pod that takes its time, or to a write on it.
    pub(crate) fn answer_pod(&mut self, object: wire::Pod) {
        if self.is_known(Kind::Pod, &object) {
            self.apply(Kind::Pod, object, Self::put_pod);
        }
    }

    /// The answer to a write on a rollout; its creation is the one answer that may bring something new.
    pub(crate) fn answer_rollout(&mut self, object: Rollout, created: bool, now: Timestamp) {
        if !created && !self.is_known(Kind::Rollout, &object) {
            return;
        }
        let name = object.metadata.name.clone().unwrap_or_default();
        self.apply(Kind::Rollout, object, Self::put_rollout);
        if let Some(rollout) = self.snapshot.rollouts.get_mut(&name).filter(|_| !created) {
            rollout.said_at = Some(now);
        }
    }

    /// The answer to the making of a gate's Job.
    pub(crate) fn answer_gate_job(&mut self, object: Job) {
        self.apply(Kind::GateJob, object, |store, job| store.put_gate_job(&job));
    }

    /// The answer to a write on a policy.
    pub(crate) fn answer_driver_policy(&mut self, object: DriverPolicy) {
        if self.is_known(Kind::DriverPolicy, &object) {
            self.apply(Kind::DriverPolicy, object, Self::put_driver_policy);
        }
    }

    /// What Prometheus said. What nobody has asked for a while, nobody will listen to any more.
    pub(crate) fn answer_question(&mut self, action: &Action, said: Result<Values, String>) {
        let Action::Ask { question, at } = action else { return };
        if let Err(why) = &said {
            warn!(url = question.url, query = question.query, "Prometheus has no value: {why}");
        }
        let oldest = at.saturating_sub(ANSWERS_KEPT).unwrap_or(Timestamp::MIN);
        self.snapshot.answers.retain(|_, answer| answer.asked_at > oldest);
        self.snapshot.answers.insert(question.clone(), Answer { asked_at: *at, said });
    }

    /// The UID of a policy object, for events about it.
    pub(crate) fn uid_of(&self, source: &Source) -> Option<String> {
        let kind = match source {
            Source::DriverPolicy(_) => Kind::DriverPolicy,
            Source::ClusterPolicy(_) => Kind::ClusterPolicy,
            Source::NvidiaDriver(_) => Kind::NvidiaDriver,
            Source::NicClusterPolicy(_) => Kind::NicClusterPolicy,
        };
        let known = self.tables.get(&kind)?.objects.get(&ObjectName::new("", source.name()))?;
        Some(known.uid.to_string())
    }

    fn is_known(&mut self, kind: Kind, object: &impl Resource) -> bool {
        let uid = object.meta().uid.as_deref();
        self.table(kind).objects.get(&name_of(object)).is_some_and(|known| Some(known.uid.as_str()) == uid)
    }

    fn table(&mut self, kind: Kind) -> &mut Table {
        self.tables.entry(kind).or_default()
    }
}

fn remove_pod(snapshot: &mut Snapshot, node: &NodeName, name: &ObjectName) -> bool {
    let Some(pods) = snapshot.pods.get_mut(node) else { return false };
    let removed = pods.remove(name).is_some();
    if pods.is_empty() {
        snapshot.pods.remove(node);
    }
    removed
}

fn name_of(object: &impl Resource) -> ObjectName {
    object_name(object.meta())
}

fn object_name(meta: &k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta) -> ObjectName {
    ObjectName::new(meta.namespace.as_deref().unwrap_or_default(), meta.name.as_deref().unwrap_or_default())
}

fn deployment_text(name: &ObjectName) -> String {
    format!("deployment/{name}")
}
