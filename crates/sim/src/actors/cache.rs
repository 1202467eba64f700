//! What an actor knows of the cluster: objects folded from a watch, plus the answers to its own writes.
//!
//! Every change is kept as `Change { old, new }` until the actor has turned it into tasks, so indexes are updated
//! in step and no pass looks at all objects. The answer to a write counts at once (an actor that waited for its
//! own echo would act twice), and an older version never replaces a newer one.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Debug};
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::StreamExt;
use kube::runtime::watcher::{self, Event};
use kube::{Resource, ResourceExt};
use serde::de::DeserializeOwned;

use super::way::{Events, Part, Way};

/// Where an object is: namespace (empty for cluster-scoped ones) and name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) namespace: String,
    pub(crate) name: String,
}

impl Key {
    pub(crate) fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }

    pub(crate) fn of<K: Resource>(object: &K) -> Self {
        Self::new(object.namespace().unwrap_or_default(), object.name_any())
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.namespace.as_str() {
            "" => write!(f, "{}", self.name),
            namespace => write!(f, "{namespace}/{}", self.name),
        }
    }
}

/// One object as it was and as it is; `None` is "not there".
#[derive(Debug)]
pub(crate) struct Change<K> {
    pub(crate) key: Key,
    pub(crate) old: Option<Arc<K>>,
    pub(crate) new: Option<Arc<K>>,
}

/// The objects of one kind.
#[derive(Debug)]
pub(crate) struct Cache<K> {
    objects: BTreeMap<Key, Arc<K>>,
    changes: Vec<Change<K>>,
    /// Keys seen by the list that is under way.
    listed: Option<BTreeSet<Key>>,
}

impl<K: Resource> Cache<K> {
    pub(crate) fn new() -> Self {
        Self { objects: BTreeMap::new(), changes: Vec::new(), listed: None }
    }

    pub(crate) fn get(&self, key: &Key) -> Option<&Arc<K>> {
        self.objects.get(key)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&Key, &Arc<K>)> {
        self.objects.iter()
    }

    /// The objects of one namespace, without looking at the others.
    pub(crate) fn in_namespace<'a>(
        &'a self,
        namespace: &'a str,
    ) -> impl Iterator<Item = (&'a Key, &'a Arc<K>)> {
        let first = Key::new(namespace, "");
        self.objects.range(first..).take_while(move |(key, _)| key.namespace == namespace)
    }

    pub(crate) fn take_changes(&mut self) -> Vec<Change<K>> {
        std::mem::take(&mut self.changes)
    }

    /// Takes up an object as a watch or a write's answer reports it.
    pub(crate) fn apply(&mut self, new: Arc<K>) {
        let key = Key::of(new.as_ref());
        if let Some(listed) = &mut self.listed {
            listed.insert(key.clone());
        }
        let old = self.objects.get(&key);
        if old.is_some_and(|old| old.uid() == new.uid() && version(old.as_ref()) >= version(new.as_ref())) {
            return;
        }
        let old = old.cloned();
        self.objects.insert(key.clone(), new.clone());
        self.changes.push(Change { key, old, new: Some(new) });
    }

    /// Takes up what a write did whose answer is not the object; the watch brings the full version.
    pub(crate) fn adjust(&mut self, key: &Key, adjust: impl FnOnce(&mut K))
    where
        K: Clone,
    {
        let Some(old) = self.objects.get(key).cloned() else { return };
        let mut new = K::clone(&old);
        adjust(&mut new);
        let new = Arc::new(new);
        self.objects.insert(key.clone(), new.clone());
        self.changes.push(Change { key: key.clone(), old: Some(old), new: Some(new) });
    }

    /// The object with this UID is gone; one that has taken its name since stays.
    pub(crate) fn forget(&mut self, key: &Key, uid: Option<&str>) {
        let same = |object: &Arc<K>| uid.is_none() || object.meta().uid.as_deref() == uid;
        if !self.objects.get(key).is_some_and(same) {
            return;
        }
        let old = self.objects.remove(key);
        self.changes.push(Change { key: key.clone(), old, new: None });
    }

    fn fold(&mut self, event: Event<Arc<K>>) {
        match event {
            Event::Init => self.listed = Some(BTreeSet::new()),
            Event::InitApply(object) | Event::Apply(object) => self.apply(object),
            Event::InitDone => self.drop_unlisted(),
            Event::Delete(object) => self.forget(&Key::of(object.as_ref()), object.meta().uid.as_deref()),
        }
    }

    fn drop_unlisted(&mut self) {
        let Some(listed) = self.listed.take() else { return };
        let gone: Vec<Key> = self.objects.keys().filter(|key| !listed.contains(key)).cloned().collect();
        for key in gone {
            self.forget(&key, None);
        }
    }
}

/// Resource versions are numbers in every API server there is, and comparable since Kubernetes 1.35.
fn version<K: Resource>(object: &K) -> u64 {
    object.meta().resource_version.as_deref().and_then(|version| version.parse().ok()).unwrap_or(u64::MAX)
}

/// A cache and the watch that feeds it.
pub(crate) struct Informer<K> {
    watch: Events<K>,
    pub(crate) cache: Cache<K>,
    synced: bool,
}

impl<K> Informer<K>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
{
    /// Of all objects of a kind.
    pub(crate) fn new(way: &Way) -> Self
    where
        K: Resource<DynamicType = ()>,
    {
        Self::of_part(way, Part::default())
    }

    /// Of some of them.
    pub(crate) fn of_part(way: &Way, part: Part<'_>) -> Self
    where
        K: Resource<DynamicType = ()>,
    {
        Self::of_kind(way, &(), part)
    }

    /// Of a kind that is known by its name only.
    pub(crate) fn of_kind(way: &Way, kind: &K::DynamicType, part: Part<'_>) -> Self {
        Self { watch: way.watch(kind, part), cache: Cache::new(), synced: false }
    }
}

/// Something that folds events as they come; lets one loop wait for watches of several kinds.
pub(crate) trait Source: Send {
    /// Folds whatever has arrived; returns whether the view is complete.
    fn fold_ready(&mut self, context: &mut Context<'_>) -> bool;
    /// Whether there are changes nobody has looked at.
    fn has_changes(&self) -> bool;
}

impl<K> Source for Informer<K>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
{
    fn fold_ready(&mut self, context: &mut Context<'_>) -> bool {
        while let Poll::Ready(Some(event)) = self.watch.poll_next_unpin(context) {
            match event {
                Ok(event) => {
                    match event {
                        Event::Init => self.synced = false,
                        Event::InitDone => self.synced = true,
                        _ => {}
                    }
                    self.cache.fold(event);
                }
                // A kind that is not served (a CRD that comes later) has no objects: do not wait for it.
                Err(error) if is_not_served(&error) => self.synced = true,
                Err(error) => {
                    tracing::debug!(kind = std::any::type_name::<K>(), %error, "watch failed, trying again");
                }
            }
        }
        self.synced
    }

    fn has_changes(&self) -> bool {
        !self.cache.changes.is_empty()
    }
}

fn is_not_served(error: &watcher::Error) -> bool {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status)) => status.code == 404,
        _ => false,
    }
}

/// Waits until something has changed and every view is complete. Watches are polled in the order given, never
/// in a random one.
pub(crate) async fn changed(sources: &mut [&mut dyn Source]) {
    poll_fn(|context| {
        let mut complete = true;
        for source in sources.iter_mut() {
            complete &= source.fold_ready(context);
        }
        if complete && sources.iter().any(|source| source.has_changes()) {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    })
    .await;
}

/// Keys by some other name: pods by node, dependents by owner.
#[derive(Debug, Default)]
pub(crate) struct Index {
    keys: BTreeMap<String, BTreeSet<Key>>,
}

impl Index {
    /// Moves `key` from under `old` to under `new`.
    pub(crate) fn shift(&mut self, key: &Key, old: Option<&str>, new: Option<&str>) {
        if old == new {
            return;
        }
        if let Some(old) = old
            && let Some(keys) = self.keys.get_mut(old)
        {
            keys.remove(key);
            if keys.is_empty() {
                self.keys.remove(old);
            }
        }
        if let Some(new) = new {
            self.keys.entry(new.to_owned()).or_default().insert(key.clone());
        }
    }

    pub(crate) fn get(&self, name: &str) -> impl Iterator<Item = &Key> {
        self.keys.get(name).into_iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Pod;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

    use super::*;

    fn pod(name: &str, uid: &str, version: u64) -> Arc<Pod> {
        let metadata = ObjectMeta {
            name: Some(name.into()),
            uid: Some(uid.into()),
            resource_version: Some(version.to_string()),
            ..ObjectMeta::default()
        };
        Arc::new(Pod { metadata, ..Pod::default() })
    }

    fn versions(cache: &Cache<Pod>) -> Vec<(String, u64)> {
        cache.iter().map(|(key, pod)| (key.name.clone(), version(pod.as_ref()))).collect()
    }

    #[test]
    fn an_older_version_never_replaces_a_newer_one() {
        let mut cache = Cache::new();
        cache.apply(pod("a", "1", 7));
        cache.fold(Event::Apply(pod("a", "1", 5)));
        assert_eq!(versions(&cache), [("a".into(), 7)]);
        assert_eq!(cache.take_changes().len(), 1);
    }

    #[test]
    fn a_late_delete_spares_the_successor_of_the_same_name() {
        let mut cache = Cache::new();
        cache.apply(pod("a", "2", 9));
        cache.fold(Event::Delete(pod("a", "1", 8)));
        assert_eq!(versions(&cache), [("a".into(), 9)]);
    }

    #[test]
    fn a_new_list_drops_what_it_does_not_name() {
        let mut cache = Cache::new();
        cache.apply(pod("a", "1", 1));
        cache.apply(pod("b", "2", 2));
        cache.take_changes();
        cache.fold(Event::Init);
        cache.fold(Event::InitApply(pod("b", "2", 2)));
        cache.apply(pod("c", "3", 3));
        cache.fold(Event::InitDone);
        assert_eq!(versions(&cache), [("b".into(), 2), ("c".into(), 3)]);
        let gone: Vec<_> = cache.take_changes().into_iter().filter(|change| change.new.is_none()).collect();
        assert_eq!(gone.len(), 1);
    }
}
