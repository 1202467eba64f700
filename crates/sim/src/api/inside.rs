//! The way of a cluster's own actors to its API: the same rules, counts and faults, without HTTP and without JSON text.
//!
//! Simulations make thousands of clusters, and most of what happens in one is its actors talking to it. So what they
//! send is taken as a tree, and an object is turned into its type once for all of them ([`Object::typed`]).

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::{Stream, stream};
use kube::runtime::watcher::Event;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::sync::Notify;
use tokio::time::sleep;

use super::call::Call;
use super::delete::{self, DeleteOptions, Deleted};
use super::reply::Failure;
use super::request::RequestInfo;
use super::selector::Selector;
use super::store::{Change, Object, Store, Watcher};
use super::{ApiServer, Shared, evict, lock, route};

/// How often it is looked whether a kind is served by now.
const NOT_SERVED_RETRY: Duration = Duration::from_millis(500);

/// A user inside the server.
#[derive(Clone, Debug)]
pub(crate) struct Inside {
    server: ApiServer,
    user: Arc<str>,
}

/// Where a request goes: one object, or the collection if it has no name.
#[derive(Clone, Debug, Default)]
pub(crate) struct Target {
    pub(crate) group: String,
    pub(crate) version: String,
    /// With the subresource: `pods`, `pods/status`.
    pub(crate) resource: String,
    pub(crate) namespace: String,
    pub(crate) name: String,
}

/// What comes out of a request, or out of a watch.
pub(crate) trait Typed: DeserializeOwned + Send + Sync + 'static {}

impl<K: DeserializeOwned + Send + Sync + 'static> Typed for K {}

impl ApiServer {
    /// A way in for `user`, without a wire.
    pub(crate) fn inside(&self, user: &str) -> Inside {
        Inside { server: self.clone(), user: user.into() }
    }
}

impl Inside {
    /// The same user, over the wire.
    pub(crate) fn client(&self) -> kube::Client {
        self.server.client_as(&self.user)
    }

    /// Another user, over the wire.
    pub(crate) fn client_as(&self, user: &str) -> kube::Client {
        self.server.client_as(user)
    }

    /// Creates, updates or patches an object.
    pub(crate) async fn write<K: Typed>(
        &self,
        verb: &'static str,
        target: Target,
        content_type: &str,
        body: Value,
    ) -> kube::Result<Arc<K>> {
        let write = |store: &mut Store, call: &Call| route::write(store, call).map(|(_, object)| object);
        let written = self.ask(verb, target, content_type, body, write).await?;
        written.typed().map_err(kube::Error::SerdeError)
    }

    /// Deletes an object; `None`: it is gone already.
    pub(crate) async fn delete<K: Typed>(
        &self,
        target: Target,
        options: Value,
    ) -> kube::Result<Option<Arc<K>>> {
        let delete = |store: &mut Store, call: &Call| {
            let options = DeleteOptions::of_request(call)?;
            delete::delete(store, call, &call.name(), &options)
        };
        match self.ask("delete", target, "", options, delete).await? {
            Deleted::Gone(_) => Ok(None),
            Deleted::Pending(object) => object.typed().map(Some).map_err(kube::Error::SerdeError),
        }
    }

    /// Puts a pod on a node.
    pub(crate) async fn bind(&self, target: Target, binding: Value) -> kube::Result<()> {
        self.ask("create", target, "", binding, evict::bind).await
    }

    async fn ask<T>(
        &self,
        verb: &'static str,
        target: Target,
        content_type: &str,
        body: Value,
        answer: impl FnOnce(&mut Store, &Call) -> Result<T, Failure>,
    ) -> kube::Result<T> {
        let Target { group, version, resource, namespace, name } = target;
        let info =
            RequestInfo { user: self.user.to_string(), verb, group, version, resource, namespace, name };
        self.server.count(&info);
        let fault = self.server.fault(&info);
        let serve = || {
            let mut store = lock(&self.server.store);
            store.serve(&info, &Bytes::new());
            let call = Call::inside(&store, info, content_type, body)?;
            answer(&mut store, &call)
        };
        match self.server.suffer(fault, serve, Err).await {
            Ok(answer) => answer.map_err(|failure| refused(&failure)),
            Err(lost) => Err(kube::Error::Service(lost)),
        }
    }

    /// What is there and what becomes of it: all of a kind, of one namespace, or one object.
    pub(crate) fn watch<K: Typed>(
        &self,
        target: &Target,
    ) -> impl Stream<Item = Event<Arc<K>>> + Send + use<K> {
        let Target { group, resource, namespace, name, .. } = target;
        let selector = Selector::default();
        let feed = Feed {
            store: self.server.store.clone(),
            resource: if group.is_empty() { resource.clone() } else { format!("{resource}.{group}") },
            namespace: namespace.clone(),
            selector: Arc::new(if name.is_empty() { selector } else { selector.and_name(name) }),
            wake: Arc::default(),
            cursor: None,
            is_served: true,
            events: VecDeque::new(),
        };
        stream::unfold(feed, |mut feed| async move { Some((feed.next().await, feed)) })
    }
}

fn refused(failure: &Failure) -> kube::Error {
    match serde_json::from_value(failure.status()) {
        Ok(status) => kube::Error::Api(Box::new(status)),
        Err(error) => kube::Error::SerdeError(error),
    }
}

/// A cursor over a table's log, as a watch is; whoever falls behind is told everything anew.
struct Feed<K> {
    store: Shared,
    resource: String,
    namespace: String,
    selector: Arc<Selector>,
    wake: Arc<Notify>,
    /// Everything up to this version has been told; `None`: nothing has.
    cursor: Option<u64>,
    is_served: bool,
    events: VecDeque<Event<Arc<K>>>,
}

impl<K: Typed> Feed<K> {
    async fn next(&mut self) -> Event<Arc<K>> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return event;
            }
            self.pull();
            match (self.events.is_empty(), self.is_served) {
                (false, _) => {}
                (true, true) => self.wake.notified().await,
                (true, false) => sleep(NOT_SERVED_RETRY).await,
            }
        }
    }

    fn pull(&mut self) {
        let shared = self.store.clone();
        let mut store = lock(&shared);
        let version = store.version;
        let Ok(table) = store.table_mut(&self.resource) else {
            // A kind that is not served has no objects.
            if self.is_served {
                self.events.extend([Event::Init, Event::InitDone]);
            }
            (self.is_served, self.cursor) = (false, None);
            return;
        };
        self.is_served = true;
        if let Some(cursor) = self.cursor.filter(|cursor| *cursor >= table.compacted) {
            let start = table.log.partition_point(|change| change.version <= cursor);
            for change in table.log.range(start..) {
                self.tell(change);
            }
        } else {
            // The table may be another one than before; whoever was woken by that one goes with its bell.
            self.wake = Arc::default();
            let (namespace, selector) = (self.namespace.clone(), self.selector.clone());
            table.add_watcher(Watcher { namespace, selector, wake: Arc::downgrade(&self.wake) });
            self.events.push_back(Event::Init);
            let there = table.range(&self.namespace).map(|(_, object)| object);
            let there = there.filter(|object| self.selector.matches(object.value()));
            self.events.extend(there.filter_map(typed).map(Event::InitApply));
            self.events.push_back(Event::InitDone);
        }
        self.cursor = Some(version);
    }

    fn tell(&mut self, change: &Change) {
        if !self.namespace.is_empty() && self.namespace != change.name.namespace {
            return;
        }
        let selected =
            |object: Option<&Arc<Object>>| object.filter(|o| self.selector.matches(o.value())).cloned();
        let event = match (selected(change.before.as_ref()), selected(change.after.as_ref())) {
            (_, Some(after)) => typed(&after).map(Event::Apply),
            (Some(before), None) => typed(&before).map(Event::Delete),
            (None, None) => None,
        };
        self.events.extend(event);
    }
}

fn typed<K: Typed>(object: &Arc<Object>) -> Option<Arc<K>> {
    let typed = object.typed();
    if let Err(error) = &typed {
        tracing::debug!(kind = std::any::type_name::<K>(), %error, "left out: it is not what its kind says");
    }
    typed.ok()
}

#[cfg(test)]
mod tests {
    use futures::{FutureExt as _, StreamExt as _};
    use k8s_openapi::api::core::v1::Node;
    use kube::ResourceExt as _;
    use kube::api::DynamicObject;
    use serde_json::json;

    use super::*;
    use crate::cluster::EPOCH;

    fn nodes(name: &str) -> Target {
        Target { version: "v1".into(), resource: "nodes".into(), name: name.into(), ..Target::default() }
    }

    async fn create(inside: &Inside, name: &str) -> kube::Result<Arc<Node>> {
        inside.write("create", nodes(""), "", json!({"metadata": {"name": name}})).await
    }

    fn told<K: kube::Resource>(events: &mut (impl Stream<Item = Event<Arc<K>>> + Unpin)) -> Vec<String> {
        let mut all = Vec::new();
        while let Some(Some(event)) = events.next().now_or_never() {
            all.push(match event {
                Event::Init => "init".to_owned(),
                Event::InitApply(object) => format!("there {}", object.name_any()),
                Event::InitDone => "done".to_owned(),
                Event::Apply(object) => format!("set {}", object.name_any()),
                Event::Delete(object) => format!("gone {}", object.name_any()),
            });
        }
        all
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_tells_what_is_there_and_what_becomes_of_it() -> kube::Result<()> {
        let server = ApiServer::new(EPOCH);
        let inside = server.inside("actor");
        create(&inside, "a").await?;
        let mut events = Box::pin(inside.watch::<Node>(&nodes("")));
        assert_eq!(told(&mut events), ["init", "there a", "done"]);
        create(&inside, "b").await?;
        let gone: Option<Arc<Node>> = inside.delete(nodes("a"), json!({})).await?;
        assert!(gone.is_none());
        assert_eq!(told(&mut events), ["set b", "gone a"]);
        create(&inside, "c").await?;
        server.compact();
        assert_eq!(told(&mut events), ["init", "there b", "there c", "done"]);
        create(&inside, "d").await?;
        assert_eq!(told(&mut events), ["set d"]);
        Ok(())
    }

    #[tokio::test(start_paused = true)]
    async fn a_kind_that_is_not_served_has_no_objects_until_it_is() -> kube::Result<()> {
        let server = ApiServer::new(EPOCH);
        let inside = server.inside("actor");
        let things = Target {
            group: "x.io".into(),
            version: "v1".into(),
            resource: "things".into(),
            ..Target::default()
        };
        let mut events = Box::pin(inside.watch::<DynamicObject>(&things));
        assert_eq!(told(&mut events), ["init", "done"]);
        let definition = json!({"metadata": {"name": "things.x.io"}, "spec": {"group": "x.io", "scope": "Cluster",
            "names": {"kind": "Thing", "plural": "things"}, "versions": [{"name": "v1", "served": true,
            "storage": true, "schema": {"openAPIV3Schema": {"type": "object"}}}]}});
        let definitions = Target {
            group: "apiextensions.k8s.io".into(),
            version: "v1".into(),
            resource: "customresourcedefinitions".into(),
            ..Target::default()
        };
        inside.write::<DynamicObject>("create", definitions, "", definition).await?;
        inside.write::<DynamicObject>("create", things, "", json!({"metadata": {"name": "t"}})).await?;
        sleep(NOT_SERVED_RETRY).await;
        assert_eq!(told(&mut events), ["init", "there t", "done"]);
        Ok(())
    }

    #[tokio::test(start_paused = true)]
    async fn refusals_are_those_of_the_api() -> kube::Result<()> {
        let inside = ApiServer::new(EPOCH).inside("actor");
        create(&inside, "a").await?;
        let refused = create(&inside, "a").await;
        assert!(matches!(refused, Err(kube::Error::Api(status)) if status.reason == "AlreadyExists"));
        Ok(())
    }
}
