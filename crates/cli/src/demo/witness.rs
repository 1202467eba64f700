//! What the API itself saw, apart from the controller's own account: nodes out of service, pods that had to leave,
//! writes. The figures at the end come from here.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::stream::{BoxStream, StreamExt};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::core::PartialObjectMeta;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, ResourceExt};
use pitcrew_sim::actors::NAMESPACE;
use pitcrew_sim::api::{ApiServer, Counts};
use tokio::task::JoinSet;

/// The user that the controller's requests are counted under.
const CONTROLLER: &str = "pitcrew";
const WRITES: [&str; 5] = ["create", "update", "patch", "delete", "deletecollection"];

/// What was seen.
#[derive(Clone, Debug, Default)]
pub(super) struct Account {
    /// Nodes that are cordoned or not ready.
    pub(super) out: BTreeSet<String>,
    /// The most of them at the same time.
    pub(super) most_out: usize,
    /// Workload pods that run or are about to.
    pub(super) pods: BTreeSet<String>,
    /// Workload pods that were told to leave, by UID.
    pub(super) left: BTreeSet<String>,
    /// Workload pods that the controller deleted past their budgets.
    pub(super) forced: u64,
}

/// The controller's requests since a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Requests {
    /// Evictions that were asked for, refused ones included.
    pub(super) evictions: u64,
    /// All writes but those to its own Lease.
    pub(super) writes: u64,
}

/// Watches the cluster. Dropping it ends that.
pub(super) struct Witness {
    api: ApiServer,
    before: Counts,
    account: Arc<Mutex<Account>>,
    _watches: JoinSet<()>,
}

impl Witness {
    /// Begins to watch.
    pub(super) fn start(api: &ApiServer, admin: &Client) -> Self {
        let account = Arc::<Mutex<Account>>::default();
        let nodes = watcher(Api::<Node>::all(admin.clone()), watcher::Config::default()).boxed();
        let outside = watcher::Config::default().fields(&format!("metadata.namespace!={NAMESPACE}"));
        let pods = watcher(Api::<PartialObjectMeta<Pod>>::all(admin.clone()), outside).boxed();
        let mut watches = JoinSet::new();
        watches.spawn(watch(nodes, account.clone(), Account::node));
        watches.spawn(watch(pods, account.clone(), Account::pod));
        let forced = account.clone();
        api.on_request(move |request| {
            if request.user == CONTROLLER
                && request.verb == "delete"
                && request.resource == "pods"
                && request.namespace != NAMESPACE
            {
                lock(&forced).forced += 1;
            }
            None
        });
        Self { api: api.clone(), before: api.counts(), account, _watches: watches }
    }

    /// Forgets what was; what is now is the beginning.
    pub(super) fn begin(&mut self) {
        self.before = self.api.counts();
        let mut account = lock(&self.account);
        account.most_out = account.out.len();
        account.left.clear();
        account.forced = 0;
    }

    /// What was seen since.
    pub(super) fn account(&self) -> Account {
        lock(&self.account).clone()
    }

    /// The controller's requests since.
    pub(super) fn requests(&self) -> Requests {
        let now = self.api.counts();
        let since =
            now.by_request.iter().filter(|((user, _, _), _)| user == CONTROLLER).map(|(key, count)| {
                let earlier = self.before.by_request.get(key).copied().unwrap_or_default();
                (key.1, key.2.as_str(), count - earlier)
            });
        let mut requests = Requests { evictions: 0, writes: 0 };
        for (verb, resource, count) in since {
            if resource == "pods/eviction" {
                requests.evictions += count;
            }
            if WRITES.contains(&verb) && resource != "leases" {
                requests.writes += count;
            }
        }
        requests
    }
}

impl Account {
    fn node(&mut self, node: &Node, deleted: bool) {
        let unschedulable = node.spec.as_ref().and_then(|spec| spec.unschedulable).unwrap_or(false);
        let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
        let ready = conditions.into_iter().flatten().any(|c| c.type_ == "Ready" && c.status == "True");
        if !deleted && (unschedulable || !ready) {
            self.out.insert(node.name_any());
        } else {
            self.out.remove(&node.name_any());
        }
        self.most_out = self.most_out.max(self.out.len());
    }

    fn pod(&mut self, pod: &PartialObjectMeta<Pod>, deleted: bool) {
        let Some(uid) = pod.uid() else { return };
        if deleted || pod.metadata.deletion_timestamp.is_some() {
            self.pods.remove(&uid);
            self.left.insert(uid);
        } else {
            self.pods.insert(uid);
        }
    }
}

async fn watch<K>(
    mut events: BoxStream<'static, watcher::Result<Event<K>>>,
    account: Arc<Mutex<Account>>,
    see: fn(&mut Account, &K, bool),
) {
    while let Some(event) = events.next().await {
        match event {
            Ok(Event::Apply(object) | Event::InitApply(object)) => see(&mut lock(&account), &object, false),
            Ok(Event::Delete(object)) => see(&mut lock(&account), &object, true),
            Ok(Event::Init | Event::InitDone) => {}
            // The embedded API breaks no watch; if it did, the next list puts it right.
            Err(error) => tracing::warn!(%error, "the demo's own watch broke"),
        }
    }
}

fn lock(account: &Mutex<Account>) -> MutexGuard<'_, Account> {
    account.lock().unwrap_or_else(PoisonError::into_inner)
}
