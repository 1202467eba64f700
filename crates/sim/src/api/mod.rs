//! The embedded Kubernetes API: a `tower::Service` under a real `kube::Client`.
//!
//! ```text
//!  http::Request ─▶ request.rs ─▶ call.rs ─┬─▶ read.rs, watch.rs                           ─▶ reply.rs ─▶ http::Response
//!   (kube::Client)   user, verb,   kind,   ├─▶ write.rs ◀─ patch.rs ◀─ apply.rs
//!                    resource      options ├─▶ delete.rs ◀─ evict.rs, dependents.rs
//!                                          └─▶ discovery.rs
//!                                                  │
//!                                               store.rs: objects, log, watchers (the only file that writes)
//!  rules they share: kinds.rs (what exists), selector.rs, lists.rs (how lists merge), defaults.rs, checks.rs,
//!                    crd.rs · schema.rs · validate.rs · pattern.rs (custom resources), clock.rs
//!  without a wire:   inside.rs, for the cluster's own actors
//! ```
//!
//! It answers as a real API server does, in code, reason and words, as far as pitcrew and the actors of the
//! cluster can tell; the same scenarios run against a real one to keep it honest. Requests are served in the
//! order they arrive, time is tokio's and chance is seeded, so a run can be repeated exactly.
//!
//! What goes wrong on the way is injected: per request by hooks ([`Fault`]), per watch by [`lines`](ApiServer::lines).
//!
//! Left out on purpose: authentication and RBAC, admission webhooks, CEL rules, `metadata.managedFields` in
//! replies, and owner garbage collection (an actor does that).

mod apply;
mod call;
mod checks;
mod clock;
mod crd;
mod defaults;
mod delete;
mod dependents;
mod discovery;
mod evict;
pub(crate) mod inside;
mod kinds;
mod line;
mod lists;
mod patch;
mod pattern;
mod read;
mod reply;
mod request;
mod route;
mod schema;
mod selector;
mod store;
#[cfg(test)]
mod tests;
mod typed;
mod validate;
mod watch;
mod write;

pub use line::Lines;
pub use request::RequestInfo;
pub use store::Written;

use clock::Clock;
use futures::future::BoxFuture;
use http::{Request, StatusCode};
use http_body_util::BodyExt as _;
use kube::client::Body;
use reply::{Failure, Reply};
use request::Options;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use store::Store;
use tower::BoxError;

type Shared = Arc<Mutex<Store>>;
type Hook = Box<dyn FnMut(&RequestInfo) -> Option<Fault> + Send>;

/// A small Kubernetes API server. Clones are handles to the same one.
#[derive(Clone)]
pub struct ApiServer {
    store: Shared,
    clock: Clock,
    counts: Arc<Mutex<Counts>>,
    hooks: Arc<Mutex<BTreeMap<&'static str, Hook>>>,
    under_way: UnderWay,
}

/// What happens to a request instead of, or before, being served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// Not served; answered with this status code.
    Status(StatusCode),
    /// Not served; forbidden, in these words.
    Denied(&'static str),
    /// Served, but the answer is lost and the client sees a broken connection.
    LostReply,
    /// Served at once, but the answer takes this long.
    LateReply(Duration),
    /// Served after this time.
    Delay(Duration),
}

/// Requests so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// By user, verb and resource, named as in the audit log.
    pub by_request: BTreeMap<(String, &'static str, String), u64>,
    /// By user: the first write to an object that came before the one before it was answered.
    pub overlapping: BTreeMap<String, String>,
}

impl Counts {
    /// Requests of one verb on one resource, by anyone.
    pub fn of(&self, verb: &str, resource: &str) -> u64 {
        let wanted = self.by_request.iter().filter(|((_, v, r), _)| *v == verb && r == resource);
        wanted.map(|(_, count)| count).sum()
    }

    /// All requests of one user.
    pub fn by_user(&self, user: &str) -> u64 {
        self.by_request.iter().filter(|((u, _, _), _)| u == user).map(|(_, count)| count).sum()
    }

    /// All requests.
    pub fn total(&self) -> u64 {
        self.by_request.values().sum()
    }
}

impl ApiServer {
    /// An empty cluster whose clock stands at `epoch`. Must be called inside a tokio runtime.
    pub fn new(epoch: jiff::Timestamp) -> Self {
        let clock = Clock::start_at(epoch);
        let store = Arc::new(Mutex::new(Store::new(clock)));
        Self { store, clock, counts: Arc::default(), hooks: Arc::default(), under_way: Arc::default() }
    }

    /// A client for the programs under test, counted as `user`. Must be called inside a tokio runtime.
    pub fn client(&self) -> kube::Client {
        self.client_as("user")
    }

    /// A client whose requests are counted under `user`. Must be called inside a tokio runtime.
    pub fn client_as(&self, user: &str) -> kube::Client {
        kube::Client::new(Connection { server: self.clone(), user: user.into() }, "default")
    }

    /// The cluster's wall clock.
    pub fn now(&self) -> jiff::Timestamp {
        self.clock.now()
    }

    /// The same for somebody who must not hold on to the server.
    pub(crate) fn wall_clock(&self) -> impl Fn() -> jiff::Timestamp + Send + use<> {
        let clock = self.clock;
        move || clock.now()
    }

    /// Requests so far, refused ones included.
    pub fn counts(&self) -> Counts {
        lock(&self.counts).clone()
    }

    /// Drops the watch history: watches and pages from before get 410.
    pub fn compact(&self) {
        lock(&self.store).compact();
    }

    /// Asks `hook` about every request before it is served. It must not call this server.
    pub fn on_request(&self, hook: impl FnMut(&RequestInfo) -> Option<Fault> + Send + 'static) {
        self.on_request_as("", hook);
    }

    /// The same beside other hooks; one of the same name is replaced. The first that has something to say is heard.
    pub fn on_request_as(
        &self,
        name: &'static str,
        hook: impl FnMut(&RequestInfo) -> Option<Fault> + Send + 'static,
    ) {
        lock(&self.hooks).insert(name, Box::new(hook));
    }

    /// Tells `listener` of every change as it is stored, in order. It must not call this server.
    pub fn on_written(&self, listener: impl FnMut(&Written<'_>) + Send + 'static) {
        lock(&self.store).listener = Some(store::Listener::new(listener));
    }

    /// The lines over which watches are told of changes.
    pub fn lines(&self) -> Lines {
        Lines(self.store.clone())
    }

    fn fault(&self, info: &RequestInfo) -> Option<Fault> {
        lock(&self.hooks).values_mut().find_map(|hook| hook(info))
    }

    fn count(&self, info: &RequestInfo) {
        let key = (info.user.clone(), info.verb, info.resource.clone());
        *lock(&self.counts).by_request.entry(key).or_default() += 1;
    }

    /// Held while a write is under way; notes if another one by the same user, to the same object, is.
    fn writing(&self, info: &RequestInfo) -> Option<Writing> {
        if info.name.is_empty() || matches!(info.verb, "get" | "list" | "watch") {
            return None;
        }
        let RequestInfo { user, verb, resource, namespace, name, .. } = info;
        let object = [user, resource, namespace, name].map(String::clone);
        if !lock(&self.under_way).insert(object.clone()) {
            let what = format!("{verb} {resource} {name}");
            lock(&self.counts).overlapping.entry(user.clone()).or_insert(what);
            return None;
        }
        Some(Writing { under_way: self.under_way.clone(), object })
    }

    async fn handle(self, user: Arc<str>, request: Request<Body>) -> Result<Reply, BoxError> {
        let (parts, body) = request.into_parts();
        let body = body.collect().await?.to_bytes();
        let options = Options::parse(parts.uri.query());
        let info = RequestInfo::parse(&user, &parts, &options);
        self.count(&info);
        let _writing = self.writing(&info);
        let fault = self.fault(&info);
        let serve = || route::serve(&self.store, info, options, &parts, body).unwrap_or_else(Into::into);
        self.suffer(fault, serve, Into::into).await
    }

    /// Serves a request, or does to it what `fault` says; `refuse` makes an answer of a refusal.
    async fn suffer<T>(
        &self,
        fault: Option<Fault>,
        serve: impl FnOnce() -> T,
        refuse: impl FnOnce(Failure) -> T,
    ) -> Result<T, BoxError> {
        match fault {
            None => Ok(serve()),
            Some(Fault::Status(code)) => Ok(refuse(Failure::injected(code))),
            Some(Fault::Denied(words)) => Ok(refuse(Failure::new(StatusCode::FORBIDDEN, "Forbidden", words))),
            Some(Fault::LostReply) => {
                drop(serve());
                Err("injected fault: connection closed before the reply arrived".into())
            }
            Some(Fault::LateReply(time)) => {
                let reply = serve();
                tokio::time::sleep(time).await;
                Ok(reply)
            }
            Some(Fault::Delay(time)) => {
                tokio::time::sleep(time).await;
                Ok(serve())
            }
        }
    }
}

impl fmt::Debug for ApiServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiServer").field("now", &self.now()).finish_non_exhaustive()
    }
}

/// A poisoned lock is still the only copy of the cluster; the panic that poisoned it has failed its own test.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Objects that are being written, each with who writes it.
type UnderWay = Arc<Mutex<BTreeSet<[String; 4]>>>;

/// A write that has not been answered.
struct Writing {
    under_way: UnderWay,
    object: [String; 4],
}

impl Drop for Writing {
    fn drop(&mut self) {
        lock(&self.under_way).remove(&self.object);
    }
}

/// One client's way to the server.
#[derive(Clone)]
struct Connection {
    server: ApiServer,
    user: Arc<str>,
}

impl tower::Service<Request<Body>> for Connection {
    type Response = Reply;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Reply, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        Box::pin(self.server.clone().handle(self.user.clone(), request))
    }
}
