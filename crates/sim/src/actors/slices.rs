//! `ResourceSlice`s: what the DRA plugins of the nodes publish, and what is left of it when they are gone.
//!
//! A plugin publishes the driver that it found when it started, for as long as it runs. One that starts anew writes
//! the slices of its node again under a higher pool generation. Slices of a plugin that has gone stay for a while, in
//! case it comes back, then the kubelet wipes them; a kubelet that starts wipes them at once.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{
    Device, DeviceAttribute, ResourcePool, ResourceSlice, ResourceSliceSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::ResourceExt;
use tokio::time::Instant;

use super::cache::{Index, Informer};
use super::clients::GPU;
use super::dra::{DRA_DRIVER, semantic};
use super::kubelet::Kubelets;
use super::object::hash_name;
use super::way::Way;
use super::write::Write;

/// The kubelet's patience with a plugin that has gone.
const WIPED_AFTER: Duration = Duration::from_secs(30);

pub(super) struct Slices {
    pub(super) informer: Informer<ResourceSlice>,
    /// Whether there is a plugin at all. Nothing is asked of the API before.
    pub(super) in_use: bool,
    by_node: Index,
    pools: BTreeMap<String, Pool>,
    /// Since when nodes that have slices have no plugin.
    left: BTreeMap<String, Instant>,
}

/// What a plugin has published.
struct Pool {
    by: String,
    generation: i64,
    at: Instant,
    boot: u32,
}

/// A plugin that is ready to serve.
#[derive(Clone, Debug)]
pub(super) struct Plugin {
    /// Its container.
    pub(super) id: String,
    /// Of the driver that it has open.
    pub(super) version: Option<String>,
}

/// A node, as far as slices have to do with it.
pub(super) struct Place<'a> {
    pub(super) name: &'a str,
    pub(super) node: Option<&'a Node>,
    pub(super) boot: u32,
    pub(super) plugin: Option<Plugin>,
    /// The devices come in two slices, the second so much later.
    pub(super) second_after: Option<Duration>,
}

impl Slices {
    pub(super) fn new(way: &Way) -> Self {
        Self {
            informer: Informer::new(way),
            in_use: false,
            by_node: Index::default(),
            pools: BTreeMap::new(),
            left: BTreeMap::new(),
        }
    }

    /// The nodes whose slices have changed.
    pub(super) fn take_changes(&mut self) -> Vec<String> {
        let mut nodes = Vec::new();
        for change in self.informer.cache.take_changes() {
            let node = |slice: Option<&ResourceSlice>| {
                slice.filter(|slice| slice.spec.driver == DRA_DRIVER)?.spec.node_name.clone()
            };
            let (old, new) = (node(change.old.as_deref()), node(change.new.as_deref()));
            self.by_node.shift(&change.key, old.as_deref(), new.as_deref());
            nodes.extend(new.or(old));
        }
        nodes
    }

    /// Brings a node's slices to what its plugin publishes; returns when to look again.
    pub(super) fn look(
        &mut self,
        way: &Way,
        place: &Place<'_>,
        now: Instant,
    ) -> (Vec<Write<Kubelets>>, Option<Instant>) {
        let (Some(node), Some(plugin)) = (place.node, &place.plugin) else {
            return self.wipe(way, place, now);
        };
        self.left.remove(place.name);
        let (generation, at) = self.pool(place, plugin, now);
        let (mut writes, mut again) = (Vec::new(), None);
        let wanted = slices(node, plugin, generation, place.second_after.is_some());
        for (index, slice) in wanted.into_iter().enumerate() {
            let due = at + place.second_after.filter(|_| index > 0).unwrap_or_default();
            if now < due {
                again = Some(due);
                continue;
            }
            writes.extend(self.ensure(way, slice));
        }
        (writes, again)
    }

    /// Generation and time of what the plugin publishes: a new one for each plugin process.
    fn pool(&mut self, place: &Place<'_>, plugin: &Plugin, now: Instant) -> (i64, Instant) {
        let there = self.of(place.name).map(|slice| slice.spec.pool.generation).max();
        let known = self.pools.get(place.name);
        if let Some(pool) = known.filter(|pool| pool.by == plugin.id) {
            return (pool.generation, pool.at);
        }
        let generation = there.max(known.map(|pool| pool.generation)).unwrap_or(0) + 1;
        let pool = Pool { by: plugin.id.clone(), generation, at: now, boot: place.boot };
        self.pools.insert(place.name.to_owned(), pool);
        (generation, now)
    }

    fn of(&self, node: &str) -> impl Iterator<Item = &ResourceSlice> {
        self.by_node.get(node).filter_map(|key| self.informer.cache.get(key)).map(AsRef::as_ref)
    }

    fn ensure(&self, way: &Way, wanted: ResourceSlice) -> Option<Write<Kubelets>> {
        let name = wanted.name_any();
        let Some(found) = self.informer.cache.get(&super::cache::Key::new("", name)) else {
            return Some(Write::create(way, wanted));
        };
        if found.spec == wanted.spec {
            return None;
        }
        Some(Write::replace(way, ResourceSlice { spec: wanted.spec, ..ResourceSlice::clone(found) }))
    }

    /// Removes what a plugin left behind, when it has been away for long enough.
    fn wipe(
        &mut self,
        way: &Way,
        place: &Place<'_>,
        now: Instant,
    ) -> (Vec<Write<Kubelets>>, Option<Instant>) {
        if self.of(place.name).next().is_none() {
            self.left.remove(place.name);
            return (Vec::new(), None);
        }
        let since = *self.left.entry(place.name.to_owned()).or_insert(now);
        let fresh_kubelet = self.pools.get(place.name).is_some_and(|pool| pool.boot != place.boot);
        let due = if fresh_kubelet || place.node.is_none() { since } else { since + WIPED_AFTER };
        if now < due {
            return (Vec::new(), Some(due));
        }
        (self.of(place.name).map(|slice| Write::delete(way, slice, None)).collect(), None)
    }
}

/// The node's devices, in one slice or in two.
fn slices(node: &Node, plugin: &Plugin, generation: i64, in_two: bool) -> Vec<ResourceSlice> {
    let count: usize = if in_two { 2 } else { 1 };
    let capacity = node.status.as_ref().and_then(|status| status.capacity.as_ref()?.get(GPU));
    let gpus: usize = capacity.and_then(|gpus| gpus.0.parse().ok()).unwrap_or(0);
    let devices: Vec<Device> = (0..gpus).map(|number| device(number, plugin)).collect();
    let slice = |index: usize| {
        let (from, to) = (gpus * index / count, gpus * (index + 1) / count);
        let name = node.name_any();
        let pool = ResourcePool {
            name: name.clone(),
            generation,
            resource_slice_count: i64::try_from(count).unwrap_or(1),
        };
        let spec = ResourceSliceSpec {
            driver: DRA_DRIVER.to_owned(),
            node_name: Some(name.clone()),
            pool,
            devices: Some(devices[from..to].to_vec()).filter(|devices| !devices.is_empty()),
            ..ResourceSliceSpec::default()
        };
        let metadata = ObjectMeta {
            name: Some(format!("{name}-{DRA_DRIVER}-{}", hash_name(&index))),
            owner_references: Some(vec![owner(node)]),
            ..ObjectMeta::default()
        };
        ResourceSlice { metadata, spec }
    };
    (0..count).map(slice).collect()
}

fn device(number: usize, plugin: &Plugin) -> Device {
    let attribute =
        |version: String| DeviceAttribute { version: Some(version), ..DeviceAttribute::default() };
    let version = plugin.version.as_deref().and_then(semantic).map(attribute);
    let attributes: BTreeMap<String, DeviceAttribute> =
        version.into_iter().map(|version| ("driverVersion".to_owned(), version)).collect();
    Device {
        name: format!("gpu-{number}"),
        attributes: Some(attributes).filter(|all| !all.is_empty()),
        ..Device::default()
    }
}

fn owner(node: &Node) -> OwnerReference {
    OwnerReference {
        api_version: "v1".into(),
        kind: "Node".into(),
        name: node.name_any(),
        uid: node.metadata.uid.clone().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: None,
    }
}
