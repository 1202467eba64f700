//! The Snapshot for readers: through the controller's own fold, so that both see the same. Nothing is ever written.
//!
//! [`look`] lists every kind once. [`Watch`] goes on from there with the controller's own watches. What only the
//! controller knows (calls under way, setbacks) is not there; who leads is, because without a leader nothing moves.

use std::fmt::Debug;
use std::time::Duration;

use futures::stream::{self, BoxStream, StreamExt};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{DynamicObject, ListParams};
use kube::core::NamespaceResourceScope;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, Resource};
use pitcrew_core::contract::{GATE_LABEL, GPU_OPERATOR_LEASE, GPU_OPERATOR_SELECTOR, LEASE_NAME};
use pitcrew_core::names::ObjectName;
use pitcrew_core::snapshot::Snapshot;
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep_until, timeout};

use crate::clock::Clock;
use crate::observe::{self, Allocation, CLAIMS, Observation, SLICES, Watches};
use crate::preflight::{self, Unfit};
use crate::scope::{Kind, Scope};
use crate::setback::sentence;
use crate::store::{Effect, Store};

/// As many as `kubectl` asks for at once.
const PAGE: u32 = 500;
/// One page of the largest cluster takes a few seconds; somebody waits at a terminal.
const CALL: Duration = Duration::from_secs(30);
/// What comes in within this time is shown together: quicker than anybody reads.
const COALESCE: Duration = Duration::from_millis(100);
/// A reader sees a Lease once and has to trust the clocks of two machines. A minute in all is lenient enough.
const LEASE_SLACK: SignedDuration = SignedDuration::from_secs(45);
/// If a Lease does not say how long it lasts.
const LEASE_SECONDS: i32 = 15;

/// What a reader sees.
pub struct Look {
    /// The facts.
    pub snapshot: Snapshot,
    /// Who acts on them.
    pub leader: Leader,
    /// Whether pitcrew's own definitions are there.
    pub installed: bool,
}

/// The controller that leads, as far as its Lease tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leader {
    /// The Lease.
    pub lease: ObjectName,
    /// Who holds it, or held it last.
    pub holder: Option<String>,
    /// When it was last renewed.
    pub renewed: Option<Timestamp>,
    until: Timestamp,
}

impl Leader {
    fn none(namespace: &str) -> Self {
        let lease = ObjectName::new(namespace, LEASE_NAME);
        Self { lease, holder: None, renewed: None, until: Timestamp::MIN }
    }

    fn see(&mut self, lease: &Lease) {
        let spec = lease.spec.clone().unwrap_or_default();
        self.holder = spec.holder_identity.clone().filter(|holder| !holder.is_empty());
        self.renewed = spec.renew_time.as_ref().map(|time| time.0);
        // A leader that gave its Lease back holds it no longer, whatever the time.
        self.until = if self.holder.is_some() { held_until(lease) } else { Timestamp::MIN };
    }

    /// Whether somebody leads at `now`.
    pub fn leads(&self, now: Timestamp) -> bool {
        self.until > now
    }
}

/// Until when a Lease counts as held, by what it says itself.
fn held_until(lease: &Lease) -> Timestamp {
    let Some(spec) = &lease.spec else { return Timestamp::MIN };
    let Some(renewed) = &spec.renew_time else { return Timestamp::MIN };
    let lasts = SignedDuration::from_secs(spec.lease_duration_seconds.unwrap_or(LEASE_SECONDS).into());
    renewed.0.saturating_add(lasts.saturating_add(LEASE_SLACK)).unwrap_or(Timestamp::MAX)
}

/// Looks once. `namespace` is where driver DaemonSets are when the policy does not say, and where the Lease is.
pub async fn look(client: &Client, namespace: &str, clock: Clock) -> Result<Look, Unfit> {
    let Reader { store, leader, .. } = Reader::read(client, namespace, clock, Scope::reader()).await?;
    let installed = store.knows(Kind::DriverPolicy) && store.knows(Kind::Rollout);
    Ok(Look { snapshot: store.snapshot, leader, installed })
}

/// Objects of this name, wherever they are.
fn named(name: &str) -> ListParams {
    ListParams::default().fields(&format!("metadata.name={name}"))
}

/// Fills a store by lists.
struct Reader<'a> {
    client: &'a Client,
    scope: Scope,
    store: Store,
    leader: Leader,
    now: Timestamp,
}

impl<'a> Reader<'a> {
    async fn read(
        client: &'a Client,
        namespace: &str,
        clock: Clock,
        scope: Scope,
    ) -> Result<Reader<'a>, Unfit> {
        let mut snapshot = Snapshot::new(clock.now(), namespace);
        // A reader's deadlines are those of the visits: the grace of a new leader is not its to give.
        snapshot.leading_since = Timestamp::MIN;
        let (store, now) = (Store::new(snapshot, scope.clone()), clock.now());
        let mut reader = Reader { client, scope, store, leader: Leader::none(namespace), now };
        if let Err(unfit) = reader.read_all().await {
            return Err(reader.all_that_is_missing(unfit).await);
        }
        reader.store.snapshot.now = clock.now();
        Ok(reader)
    }

    async fn read_all(&mut self) -> Result<(), Unfit> {
        let all = ListParams::default;
        for kind in self.scope.clone().kinds() {
            match kind {
                Kind::Node => self.list(all(), Observation::Node).await?,
                Kind::Pod => self.list(all(), Observation::Pod).await?,
                Kind::DaemonSet => self.list(all(), Observation::DaemonSet).await?,
                Kind::Revision => self.list(all(), Observation::Revision).await?,
                Kind::Budget => self.list(all(), Observation::Budget).await?,
                Kind::DriverPolicy => self.list(all(), Observation::DriverPolicy).await?,
                Kind::Rollout => self.list(all(), Observation::Rollout).await?,
                Kind::ClusterPolicy => self.list(all(), Observation::ClusterPolicy).await?,
                Kind::NvidiaDriver => self.list(all(), Observation::NvidiaDriver).await?,
                Kind::NicClusterPolicy => self.list(all(), Observation::NicClusterPolicy).await?,
                Kind::Claim => self.list_allocations(&CLAIMS).await?,
                Kind::Slice => self.list_allocations(&SLICES).await?,
                Kind::Deployment => {
                    self.list(all().labels(GPU_OPERATOR_SELECTOR), Observation::Deployment).await?;
                }
                Kind::Breaker => self.list(all().fields(&observe::breaker()), Observation::Breaker).await?,
                Kind::GateJob => self.list_gates(Observation::GateJob).await?,
                Kind::GatePod => self.list_gates(Observation::GatePod).await?,
                Kind::Matrix => self.read_matrix().await?,
                Kind::Lease => self.read_operator_lease().await?,
                Kind::Leader => self.read_leader().await?,
                // Not in any reader's scope.
                Kind::Definition => {}
            }
        }
        Ok(())
    }

    /// Lists one kind. A kind that nobody serves has no objects.
    async fn list<K>(&mut self, params: ListParams, wrap: fn(Event<K>) -> Observation) -> Result<(), Unfit>
    where
        K: Resource<DynamicType = ()> + DeserializeOwned + Clone + Debug,
    {
        self.list_from(Api::all(self.client.clone()), params, wrap).await
    }

    /// The Jobs of gates, or their pods.
    async fn list_gates<K>(&mut self, wrap: fn(Event<K>) -> Observation) -> Result<(), Unfit>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + DeserializeOwned + Clone + Debug,
    {
        let api = Api::namespaced(self.client.clone(), &self.leader.lease.namespace);
        self.list_from(api, ListParams::default().labels(GATE_LABEL), wrap).await
    }

    async fn list_from<K>(
        &mut self,
        api: Api<K>,
        params: ListParams,
        wrap: fn(Event<K>) -> Observation,
    ) -> Result<(), Unfit>
    where
        K: Resource<DynamicType = ()> + DeserializeOwned + Clone + Debug,
    {
        let mut params = params.limit(PAGE);
        let mut first = true;
        loop {
            let Some(page) = page(&api, &params).await? else { return Ok(()) };
            if std::mem::take(&mut first) {
                self.store.fold(wrap(Event::Init), self.now);
            }
            for object in page.items {
                self.store.fold(wrap(Event::InitApply(object)), self.now);
            }
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => break,
            }
        }
        self.store.fold(wrap(Event::InitDone), self.now);
        Ok(())
    }

    /// A kind of dynamic resource allocation, in the newest version that is served.
    async fn list_allocations(&mut self, allocation: &Allocation) -> Result<(), Unfit> {
        let served = allocation.resource(self.client).await;
        let served = served.map_err(|error| preflight::refused("apigroups", &error))?;
        let wrap = allocation.wrap;
        self.store.fold(wrap(Event::Init), self.now);
        if let Some(resource) = served {
            let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &resource);
            let field_selector = allocation.fields.map(str::to_owned);
            let params = ListParams { field_selector, ..ListParams::default() };
            let listed = timeout(CALL, api.list(&params)).await;
            let listed =
                listed.map_err(|_| Unfit::Unreachable(format!("no answer within {} s", CALL.as_secs())))?;
            // Without it one check cannot be made; all other answers stay what they are.
            if matches!(&listed, Err(kube::Error::Api(status)) if status.code == 403)
                && allocation.may_be_refused
                && self.scope.has(Kind::Leader)
            {
                return Ok(());
            }
            for object in listed.map_err(|error| preflight::refused(&resource.plural, &error))? {
                self.store.fold(wrap(Event::InitApply(object)), self.now);
            }
        }
        self.store.fold(wrap(Event::InitDone), self.now);
        Ok(())
    }

    fn leases(&self) -> Api<Lease> {
        Api::all(self.client.clone())
    }

    /// The version matrix is in our own namespace, and nowhere else may it have to be read.
    async fn read_matrix(&mut self) -> Result<(), Unfit> {
        let api = Api::<ConfigMap>::namespaced(self.client.clone(), &self.leader.lease.namespace);
        self.list_from(api, ListParams::default().fields(&observe::matrix()), Observation::Matrix).await
    }

    /// The GPU Operator's Lease is a fact of the Snapshot.
    async fn read_operator_lease(&mut self) -> Result<(), Unfit> {
        for lease in page(&self.leases(), &named(GPU_OPERATOR_LEASE)).await?.into_iter().flatten() {
            // The store counts a Lease from when it was seen renewed. We see it long after that, perhaps.
            let lasts =
                lease.spec.as_ref().and_then(|spec| spec.lease_duration_seconds).unwrap_or(LEASE_SECONDS);
            let seen = held_until(&lease).saturating_sub(SignedDuration::from_secs(lasts.into()));
            self.store.fold(Observation::Lease(Event::Apply(lease)), seen.unwrap_or(Timestamp::MIN));
        }
        Ok(())
    }

    /// Ours tells who leads.
    async fn read_leader(&mut self) -> Result<(), Unfit> {
        let namespace = self.leader.lease.namespace.clone();
        let ours = page(&self.leases(), &named(LEASE_NAME)).await?.into_iter().flatten();
        for lease in ours.filter(|lease| lease.metadata.namespace.as_deref() == Some(&*namespace)) {
            self.leader.see(&lease);
        }
        Ok(())
    }

    /// Who is refused one thing is told all that is missing at once.
    async fn all_that_is_missing(&self, unfit: Unfit) -> Unfit {
        if !matches!(unfit, Unfit::Refused { .. }) || !self.scope.has(Kind::Leader) {
            return unfit;
        }
        let namespace = &self.leader.lease.namespace;
        preflight::permissions(self.client, namespace, preflight::reads()).await.err().unwrap_or(unfit)
    }
}

/// One page of a list; `None` if nobody serves the kind.
async fn page<K>(api: &Api<K>, params: &ListParams) -> Result<Option<kube::core::ObjectList<K>>, Unfit>
where
    K: Resource<DynamicType = ()> + DeserializeOwned + Clone + Debug,
{
    match timeout(CALL, api.list(params)).await {
        Ok(Ok(page)) => Ok(Some(page)),
        Ok(Err(kube::Error::Api(status))) if status.code == 404 => Ok(None),
        Ok(Err(error)) => Err(preflight::refused(&K::plural(&()), &error)),
        Err(_) => Err(Unfit::Unreachable(format!("no answer within {} s", CALL.as_secs()))),
    }
}

/// A look that is kept current by the controller's own watches.
pub struct Watch {
    clock: Clock,
    store: Store,
    leader: Leader,
    watches: Watches,
    leases: BoxStream<'static, watcher::Result<Event<Lease>>>,
    trouble: Option<String>,
}

impl Watch {
    /// Looks once, then watches.
    pub async fn start(client: &Client, namespace: &str, clock: Clock) -> Result<Self, Unfit> {
        Self::of(client, namespace, clock, Scope::reader()).await
    }

    /// The same for somebody who needs to know of the driver's clients and nothing else.
    pub async fn clients(client: &Client, namespace: &str, clock: Clock) -> Result<Self, Unfit> {
        Self::of(client, namespace, clock, Scope::clients()).await
    }

    async fn of(client: &Client, namespace: &str, clock: Clock, scope: Scope) -> Result<Self, Unfit> {
        let Reader { store, leader, .. } =
            Reader::read(client, namespace, clock.clone(), scope.clone()).await?;
        // What nobody serves cannot be watched. Leases are served everywhere.
        let anywhere = |kind: &Kind| matches!(kind, Kind::Lease | Kind::Leader);
        let served = scope.kinds().filter(|kind| store.knows(*kind) || anywhere(kind));
        let watches = Watches::start(client.clone(), namespace, served);
        let leases =
            if scope.has(Kind::Leader) { leases(client, namespace) } else { stream::pending().boxed() };
        Ok(Self { clock, store, leader, watches, leases, trouble: None })
    }

    /// The facts as they are now.
    pub fn snapshot(&self) -> &Snapshot {
        &self.store.snapshot
    }

    /// Who acts on them.
    pub fn leader(&self) -> &Leader {
        &self.leader
    }

    /// Why what is known may be old, if it may.
    pub fn trouble(&self) -> Option<&str> {
        self.trouble.as_deref()
    }

    /// Sets the time to now.
    pub fn tick(&mut self) {
        self.store.snapshot.now = self.clock.now();
    }

    /// Waits until a fact has changed, or until `wake_at`, when time alone changes something.
    pub async fn changed(&mut self, wake_at: Option<Timestamp>) {
        let lapse = Some(self.leader.until).filter(|until| *until > self.snapshot().now);
        let wake_at = [wake_at, lapse].into_iter().flatten().min();
        let mut due = wake_at.map(|at| self.clock.instant(at));
        loop {
            let changed = tokio::select! {
                biased;
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => break,
                Some(observation) = self.watches.next() => self.take_up(observation),
                Some(event) = self.leases.next() => self.see_lease(event),
            };
            if changed {
                let soon = Instant::now() + COALESCE;
                due = Some(due.map_or(soon, |due| due.min(soon)));
            }
        }
        self.tick();
    }

    fn take_up(&mut self, observation: Observation) -> bool {
        let now = self.clock.now();
        // The nodes' watch stands for all: they share a connection, and every cluster serves nodes.
        let trouble = match &observation {
            Observation::Broken(
                Kind::Node,
                watcher::Error::InitialListFailed(error)
                | watcher::Error::WatchStartFailed(error)
                | watcher::Error::WatchFailed(error),
            ) => Some(sentence(error)),
            Observation::Node(_) => None,
            _ => self.trouble.clone(),
        };
        let news = trouble != self.trouble;
        self.trouble = trouble;
        match self.store.fold(observation, now) {
            Effect::Changed => true,
            // Definitions are not watched here.
            Effect::None | Effect::Serves(_) => news,
        }
    }

    /// A renewal is no news; another leader, or none, is.
    fn see_lease(&mut self, event: watcher::Result<Event<Lease>>) -> bool {
        let now = self.clock.now();
        let before = (self.leader.leads(now), self.leader.holder.clone());
        match event {
            Ok(Event::Apply(lease) | Event::InitApply(lease)) => self.leader.see(&lease),
            Ok(Event::Delete(_)) => self.leader = Leader::none(&self.leader.lease.namespace.clone()),
            Ok(Event::Init | Event::InitDone) | Err(_) => {}
        }
        before != (self.leader.leads(now), self.leader.holder.clone())
    }
}

fn leases(client: &Client, namespace: &str) -> BoxStream<'static, watcher::Result<Event<Lease>>> {
    let ours = watcher::Config::default().fields(&format!("metadata.name={LEASE_NAME}"));
    let api = Api::<Lease>::namespaced(client.clone(), namespace);
    kube::runtime::watcher(api, ours).default_backoff().boxed()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn lease(holder: &str, renewed: &str) -> Lease {
        let spec = json!({"holderIdentity": holder, "leaseDurationSeconds": 15, "renewTime": renewed});
        serde_json::from_value(json!({"spec": spec})).unwrap()
    }

    #[test]
    fn a_leader_leads_for_a_minute_after_its_last_renewal_and_not_after_giving_up() {
        let mut leader = Leader::none("gpu-operator");
        let at = |text: &str| -> Timestamp { text.parse().unwrap() };
        assert!(!leader.leads(at("2026-01-01T00:00:00Z")));
        leader.see(&lease("pitcrew-0", "2026-01-01T00:00:00.000000Z"));
        assert!(leader.leads(at("2026-01-01T00:00:59Z")));
        assert!(!leader.leads(at("2026-01-01T00:01:00Z")));
        leader.see(&lease("", "2026-01-01T00:00:02.000000Z"));
        assert!(!leader.leads(at("2026-01-01T00:00:03Z")));
        assert_eq!(leader.renewed, Some(at("2026-01-01T00:00:02Z")));
    }
}
