//! Objects, their history, and who waits for changes.
//!
//! ```text
//!  put / remove ──▶ version + 1 ──▶ table.objects          (what is)
//!                                   table.log              (what changed; watches are cursors over it)
//!                                   table.watchers         (woken when a change concerns them)
//! ```
//!
//! One table per resource, so that a watch reads only its own resource's history. Every other file decides what
//! to write; only this one writes.

use super::apply::Ownership;
use super::clock::Clock;
use super::kinds::{self, Kind};
use super::line::Line;
use super::reply::Failure;
use super::request::RequestInfo;
use super::selector::Selector;
use bytes::Bytes;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::any::Any;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, OnceLock, Weak};
use tokio::sync::Notify;

/// Changes kept per resource. A watcher that falls further behind gets 410 and lists again, as with etcd's
/// compaction; 100,000 is more than a 1,000-node upgrade makes.
pub(super) const LOG_CHANGES_MAX: usize = 100_000;

/// The newest changes, which watches are about to read, are kept ready to use; older ones are packed.
const LOG_CHANGES_READY: usize = 256;

/// Names and UIDs are drawn from this seed: the same requests in the same order give the same answers.
const SEED: u64 = 0x7069_7463_7265_7721;

/// An object as stored: as a tree to work with, as bytes to send, as its type for those inside. One of the first two is
/// there from the start; the others are made when first asked for.
#[derive(Debug)]
pub(super) struct Object {
    value: OnceLock<Value>,
    json: OnceLock<Bytes>,
    typed: OnceLock<Arc<dyn Any + Send + Sync>>,
}

impl Object {
    /// Takes the value and stamps the version into it.
    pub(super) fn new(mut value: Value, version: u64) -> Self {
        value["metadata"]["resourceVersion"] = version.to_string().into();
        Self::unwritten(value)
    }

    /// An object that is not stored like this: a new one has no version, another keeps the one it had.
    pub(super) fn unwritten(value: Value) -> Self {
        Self { value: OnceLock::from(value), json: OnceLock::new(), typed: OnceLock::new() }
    }

    pub(super) fn value(&self) -> &Value {
        let parse = || self.json.get().and_then(|json| serde_json::from_slice(json).ok()).unwrap_or_default();
        self.value.get_or_init(parse)
    }

    /// Serialised once, shared by every reply, list and watch that shows this version.
    pub(super) fn json(&self) -> &Bytes {
        // A tree of strings, numbers and lists always has a text. (`to_string` goes through the formatter: twice the time.)
        self.json.get_or_init(|| serde_json::to_vec(self.value()).unwrap_or_default().into())
    }

    /// The same object without its tree, which takes ten times the room of its bytes.
    fn packed(&self) -> Arc<Self> {
        let json = OnceLock::from(self.json().clone());
        Arc::new(Self { value: OnceLock::new(), json, typed: OnceLock::new() })
    }

    /// Read once, shared by everybody who wants this type.
    pub(super) fn typed<K: DeserializeOwned + Send + Sync + 'static>(&self) -> serde_json::Result<Arc<K>> {
        if let Some(known) = self.typed.get().and_then(|known| known.clone().downcast().ok()) {
            return Ok(known);
        }
        let read = Arc::new(K::deserialize(self.value())?);
        let _ = self.typed.set(read.clone());
        Ok(read)
    }

    pub(super) fn meta(&self, field: &str) -> &str {
        self.value()["metadata"][field].as_str().unwrap_or_default()
    }

    fn node(&self) -> Option<&str> {
        self.value()["spec"]["nodeName"].as_str()
    }

    pub(super) fn is_deleting(&self) -> bool {
        !self.meta("deletionTimestamp").is_empty()
    }
}

/// A change as it is stored, and whose.
#[derive(Clone, Copy, Debug)]
pub struct Written<'a> {
    /// The request that made it.
    pub request: &'a RequestInfo,
    /// Its body; empty if it did not come over the wire.
    pub body: &'a Bytes,
    /// The resource of the changed object: `pods`, `daemonsets.apps`.
    pub resource: &'a str,
    /// The object's namespace, empty for cluster-scoped ones.
    pub namespace: &'a str,
    /// The object's name.
    pub name: &'a str,
    /// The version that it has since.
    pub version: u64,
    /// What it is; `None`: gone.
    pub after: Option<&'a Value>,
    /// The same, as it goes over the wire.
    pub json: Option<&'a Bytes>,
}

/// Hears of every change.
pub(super) struct Listener(Box<dyn FnMut(&Written<'_>) + Send>);

impl Listener {
    pub(super) fn new(listener: impl FnMut(&Written<'_>) + Send + 'static) -> Self {
        Self(Box::new(listener))
    }
}

impl std::fmt::Debug for Listener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Listener")
    }
}

/// Where an object is in its table. Ordered by namespace, so that one namespace is one range.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Name {
    pub(super) namespace: String,
    pub(super) name: String,
}

impl Name {
    pub(super) fn new(namespace: &str, name: &str) -> Self {
        Self { namespace: namespace.to_owned(), name: name.to_owned() }
    }
}

/// One step of a table's history.
#[derive(Debug)]
pub(super) struct Change {
    pub(super) version: u64,
    pub(super) name: Name,
    pub(super) before: Option<Arc<Object>>,
    pub(super) after: Option<Arc<Object>>,
    farewell: OnceLock<Option<Arc<Object>>>,
}

impl Change {
    /// What a DELETED event shows: the last state before the change, at the change's version.
    pub(super) fn farewell(&self) -> Option<&Arc<Object>> {
        let build = || Some(Arc::new(Object::new(self.before.as_ref()?.value().clone(), self.version)));
        self.farewell.get_or_init(build).as_ref()
    }

    /// Keeps the bytes only: nearly every watch has read this change by now.
    fn pack(&mut self) {
        for object in [&mut self.before, &mut self.after].into_iter().flatten() {
            *object = object.packed();
        }
        self.farewell = OnceLock::new();
    }
}

/// A watch that may be asleep.
#[derive(Debug)]
pub(super) struct Watcher {
    /// Empty: all namespaces.
    pub(super) namespace: String,
    pub(super) selector: Arc<Selector>,
    pub(super) wake: Weak<Notify>,
}

impl Watcher {
    fn cares(&self, change: &Change) -> bool {
        let selects =
            |object: &Option<Arc<Object>>| object.as_ref().is_some_and(|o| self.selector.matches(o.value()));
        (self.namespace.is_empty() || self.namespace == change.name.namespace)
            && (selects(&change.after) || selects(&change.before))
    }
}

/// All objects of one resource.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) kind: Arc<Kind>,
    pub(super) objects: BTreeMap<Name, Arc<Object>>,
    /// Names by `spec.nodeName`: the pods of one node are asked for once in every visit.
    by_node: BTreeMap<String, BTreeSet<Name>>,
    pub(super) log: VecDeque<Change>,
    /// History up to and including this version is gone.
    pub(super) compacted: u64,
    watchers: Vec<Watcher>,
    /// Who applied what, for objects that were ever written by server-side apply.
    pub(super) owners: BTreeMap<Name, Ownership>,
}

impl Table {
    fn new(kind: Kind, compacted: u64) -> Self {
        let (kind, objects, log) = (Arc::new(kind), BTreeMap::new(), VecDeque::new());
        let (by_node, owners) = (BTreeMap::new(), BTreeMap::new());
        Self { kind, objects, by_node, log, compacted, watchers: Vec::new(), owners }
    }

    /// The objects on one node, by name.
    pub(super) fn on_node(&self, node: &str) -> impl Iterator<Item = (&Name, &Arc<Object>)> {
        let names = self.by_node.get(node).into_iter().flatten();
        names.filter_map(|name| self.objects.get_key_value(name))
    }

    fn index(&mut self, change: &Change) {
        let node = |object: &Option<Arc<Object>>| object.as_ref()?.node().map(str::to_owned);
        let (before, after) = (node(&change.before), node(&change.after));
        if before == after {
            return;
        }
        if let Some(names) = before.and_then(|before| self.by_node.get_mut(&before)) {
            names.remove(&change.name);
        }
        if let Some(after) = after {
            self.by_node.entry(after).or_default().insert(change.name.clone());
        }
    }

    /// The objects of one namespace, or of all when it is empty.
    pub(super) fn range(&self, namespace: &str) -> impl Iterator<Item = (&Name, &Arc<Object>)> {
        let all = namespace.is_empty();
        let mine = move |name: &Name| all || name.namespace == namespace;
        self.objects.range(Name::new(namespace, "")..).take_while(move |(name, _)| mine(name))
    }

    /// Takes a watch in, and forgets those that have ended.
    pub(super) fn add_watcher(&mut self, watcher: Watcher) {
        self.watchers.retain(|watcher| watcher.wake.strong_count() > 0);
        self.watchers.push(watcher);
    }

    fn record(&mut self, change: Change) {
        self.index(&change);
        self.watchers.retain(|watcher| {
            let Some(wake) = watcher.wake.upgrade() else { return false };
            if watcher.cares(&change) {
                wake.notify_one();
            }
            true
        });
        self.log.push_back(change);
        let settled = self.log.len().checked_sub(LOG_CHANGES_READY + 1);
        if let Some(change) = settled.and_then(|index| self.log.get_mut(index)) {
            change.pack();
        }
        if self.log.len() > LOG_CHANGES_MAX
            && let Some(oldest) = self.log.pop_front()
        {
            self.compacted = oldest.version;
        }
    }

    fn compact(&mut self, version: u64) {
        self.compacted = version;
        self.log.clear();
        self.wake_all();
    }

    pub(super) fn wake_all(&self) {
        for wake in self.watchers.iter().filter_map(|watcher| watcher.wake.upgrade()) {
            wake.notify_one();
        }
    }
}

/// The whole cluster.
#[derive(Debug)]
pub(super) struct Store {
    pub(super) clock: Clock,
    pub(super) version: u64,
    pub(super) tables: BTreeMap<String, Table>,
    pub(super) chance: fastrand::Rng,
    /// While set, `put` and `remove` answer as ever and store nothing.
    pub(super) dry_run: bool,
    /// Who hears of every change, and the request that is being served for it.
    pub(super) listener: Option<Listener>,
    pub(super) serving: Option<(RequestInfo, Bytes)>,
    /// What is wrong with the watches of some users.
    pub(super) lines: BTreeMap<String, Line>,
}

impl Store {
    pub(super) fn new(clock: Clock) -> Self {
        let tables = kinds::built_in().map(|kind| (kind.resource(), Table::new(kind, 0))).collect();
        let chance = fastrand::Rng::with_seed(SEED);
        // Version 0 means "any" in requests, so history starts at 1.
        let (listener, serving, lines) = (None, None, BTreeMap::new());
        Self { clock, version: 1, tables, chance, dry_run: false, listener, serving, lines }
    }

    pub(super) fn table(&self, resource: &str) -> Result<&Table, Failure> {
        self.tables.get(resource).ok_or_else(Failure::no_such_resource)
    }

    pub(super) fn table_mut(&mut self, resource: &str) -> Result<&mut Table, Failure> {
        self.tables.get_mut(resource).ok_or_else(Failure::no_such_resource)
    }

    pub(super) fn get(&self, resource: &str, name: &Name) -> Result<Arc<Object>, Failure> {
        let found = self.table(resource)?.objects.get(name).cloned();
        found.ok_or_else(|| Failure::not_found(resource, &name.name))
    }

    /// Stores a new or changed object.
    pub(super) fn put(&mut self, resource: &str, name: Name, value: Value) -> Result<Arc<Object>, Failure> {
        let (version, dry_run) = (self.version + 1, self.dry_run);
        let table = self.table_mut(resource)?;
        if dry_run {
            return Ok(Arc::new(Object::unwritten(value)));
        }
        let object = Arc::new(Object::new(value, version));
        let before = table.objects.insert(name.clone(), object.clone());
        let after = Some(object.clone());
        table.record(Change { version, name, before, after, farewell: OnceLock::new() });
        self.version = version;
        self.tell(resource);
        Ok(object)
    }

    /// Forgets an object.
    pub(super) fn remove(&mut self, resource: &str, name: &Name) -> Result<(), Failure> {
        let (version, dry_run) = (self.version + 1, self.dry_run);
        let table = self.table_mut(resource)?;
        if dry_run {
            return Ok(());
        }
        table.owners.remove(name);
        let Some(before) = table.objects.remove(name) else { return Ok(()) };
        let (before, farewell) = (Some(before), OnceLock::new());
        table.record(Change { version, name: name.clone(), before, after: None, farewell });
        self.version = version;
        self.tell(resource);
        Ok(())
    }

    /// Notes which request is served, for the listener.
    pub(super) fn serve(&mut self, request: &RequestInfo, body: &Bytes) {
        if self.listener.is_some() {
            self.serving = Some((request.clone(), body.clone()));
        }
    }

    /// Tells the listener of the newest change of a resource.
    fn tell(&mut self, resource: &str) {
        let (Some(listener), Some((request, body))) = (&mut self.listener, &self.serving) else { return };
        let Some(change) = self.tables.get(resource).and_then(|table| table.log.back()) else { return };
        (listener.0)(&Written {
            request,
            body,
            resource,
            namespace: &change.name.namespace,
            name: &change.name.name,
            version: change.version,
            after: change.after.as_ref().map(|object| object.value()),
            json: change.after.as_ref().map(|object| object.json()),
        });
    }

    /// Adds a resource, or gives a known one its new schema.
    pub(super) fn register(&mut self, kind: Kind) {
        let resource = kind.resource();
        match self.tables.get_mut(&resource) {
            Some(table) => table.kind = Arc::new(kind),
            None => drop(self.tables.insert(resource, Table::new(kind, self.version))),
        }
    }

    /// Drops a resource with all its objects; open watches end.
    pub(super) fn unregister(&mut self, resource: &str) {
        if let Some(mut table) = self.tables.remove(resource) {
            table.compact(self.version);
        }
    }

    /// Drops all history, as etcd's compaction does.
    pub(super) fn compact(&mut self) {
        for table in self.tables.values_mut() {
            table.compact(self.version);
        }
    }

    /// A UUID-shaped name nobody else has.
    pub(super) fn next_uid(&mut self) -> String {
        let bits = format!("{:032x}", self.chance.u128(..));
        format!("{}-{}-4{}-8{}-{}", &bits[..8], &bits[8..12], &bits[13..16], &bits[17..20], &bits[20..])
    }

    /// Five letters as Kubernetes draws them: no vowels, so no words.
    pub(super) fn next_suffix(&mut self) -> String {
        const LETTERS: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
        (0..5).map(|_| char::from(LETTERS[self.chance.usize(..LETTERS.len())])).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[tokio::test(start_paused = true)]
    async fn history_is_bounded() {
        let mut store = Store::new(Clock::start_at("2026-01-01T00:00:00Z".parse().unwrap()));
        for count in 0..=LOG_CHANGES_MAX {
            store.put("nodes", Name::new("", "a"), json!({"metadata": {"count": count}})).unwrap();
        }
        let table = store.table("nodes").unwrap();
        assert_eq!((table.log.len(), table.compacted), (LOG_CHANGES_MAX, 2));
    }
}
