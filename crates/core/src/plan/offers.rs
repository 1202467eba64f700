//! What the driver's clients offer must be there again before a node is given back: complete ResourceSlices of the driver
//! that runs, and as many devices as before.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};

use super::clients::Survey;
use super::members::Member;
use super::pool::View;
use crate::clients::ClientKind;
use crate::names::NodeName;
use crate::snapshot::{Pod, Slice};
use crate::version::DriverVersion;
use crate::visit::Finding;

/// A plugin that is ready so long has published what it offers.
const PUBLISHED_AFTER: SignedDuration = SignedDuration::from_secs(10);

/// What is missing of what the clients offer.
pub(super) struct Missing<'a> {
    pub(super) found: Finding,
    /// The plugin, if it tells of another driver and may have started before this one was ready: start times are whole
    /// seconds, so one that opened the old driver in the second in which it went looks fresh.
    plugin: Option<&'a Pod>,
}

impl<'a> Missing<'a> {
    fn plain(what: String) -> Self {
        Self { found: Finding::plain(what), plugin: None }
    }

    /// The plugin that has to be replaced, or when that is known: a fresh one needs a moment to publish.
    pub(super) fn stale_plugin(&self, now: Timestamp) -> Option<Result<&'a Pod, Timestamp>> {
        let plugin = self.plugin?;
        let at = plugin.ready_since.unwrap_or(plugin.created).saturating_add(PUBLISHED_AFTER).ok()?;
        Some(if at <= now { Ok(plugin) } else { Err(at) })
    }
}

/// What is missing of what the clients offer: complete ResourceSlices of the driver that runs, and all devices.
pub(super) fn offers<'a>(
    view: &View<'a>,
    member: &Member<'a>,
    survey: &Survey<'a>,
    before: u32,
) -> Option<Missing<'a>> {
    let pod_of =
        |kind| survey.clients.iter().filter_map(|client| client.pod).find(|pod| pod.client == Some(kind));
    let plugin = pod_of(ClientKind::DraPlugin { gpus: true });
    if let (Some(plugin), Some(slices), Some(driver)) = (plugin, &view.snapshot.slices, member.pod)
        && let Some(incomplete) = incomplete(slices, member.name, running_version(driver).as_ref())
    {
        let early = plugin.oldest_started.is_some_and(|started| started <= survey.epoch.ready);
        let suspect = early && matches!(incomplete, Incomplete::OtherDriver(_));
        let (Incomplete::OtherDriver(what) | Incomplete::NotThere(what)) = incomplete;
        return Some(Missing { plugin: Some(plugin).filter(|_| suspect), ..Missing::plain(what) });
    }
    let now = devices(view, member);
    let counts = !view.policy.devices.resources.is_empty();
    match () {
        () if now < before => {
            Some(Missing::plain(format!("the node offers {now} of the {before} devices that it had before")))
        }
        () if now == 0 && counts && pod_of(ClientKind::DevicePlugin).is_some() => {
            Some(Missing::plain("the node offers no devices yet, although its device plugin runs".to_owned()))
        }
        () => None,
    }
}

/// The version in a driver pod's image, if it is a whole one: precompiled drivers are tagged by branch and kernel.
fn running_version(driver: &Pod) -> Option<DriverVersion> {
    let version = DriverVersion::from_image(&driver.image)?;
    version.to_string().bytes().all(|byte| byte != b'-').then_some(version)
}

/// Why the slices of a node do not describe its driver yet.
enum Incomplete {
    NotThere(String),
    OtherDriver(String),
}

fn incomplete(
    slices: &BTreeMap<Box<str>, Slice>,
    node: &NodeName,
    version: Option<&DriverVersion>,
) -> Option<Incomplete> {
    let mut pools: BTreeMap<&str, Vec<(&str, &Slice)>> = BTreeMap::new();
    for (name, slice) in slices.iter().filter(|(_, slice)| slice.node == *node) {
        pools.entry(&slice.pool).or_default().push((name, slice));
    }
    if pools.is_empty() {
        let what = "the DRA plugin has not published a ResourceSlice for this node yet";
        return Some(Incomplete::NotThere(what.to_owned()));
    }
    pools.into_iter().find_map(|(pool, slices)| {
        let newest = slices.iter().map(|(_, slice)| slice.generation).max()?;
        let current = slices.into_iter().filter(|(_, slice)| slice.generation == newest);
        let current: Vec<(&str, &Slice)> = current.collect();
        let (there, wanted) = (current.len(), current.first()?.1.count);
        if i64::try_from(there).is_ok_and(|there| there < wanted) {
            let what = format!("{there} of the {wanted} ResourceSlices of pool {pool} are published");
            return Some(Incomplete::NotThere(what));
        }
        let version = version?;
        let (name, other) = current.into_iter().find_map(|(name, slice)| {
            slice.versions.iter().find(|told| *told != version).map(|told| (name, told))
        })?;
        let what = format!("resourceslice/{name} tells driver {other}, the node runs {version}");
        Some(Incomplete::OtherDriver(what))
    })
}

/// How many devices a node offers.
pub(super) fn devices(view: &View<'_>, member: &Member<'_>) -> u32 {
    let resources = &view.policy.devices.resources;
    member.node.devices(|name| resources.iter().any(|pattern| pattern.matches(name)))
}
