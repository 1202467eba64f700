//! Where a new rollout comes from: what ran before in each DaemonSet that it changes, and so where its way back goes.

use std::collections::BTreeMap;

use super::rollback::{Wanted, brought, is_forgivable, version_before, version_of};
use super::rollout::rollouts;
use crate::api::Previous;
use crate::names::RevisionHash;
use crate::policy::Pool;
use crate::snapshot::{DaemonSet, Rollout, Snapshot};
use crate::version::DriverVersion;

/// What a new rollout comes from.
pub(super) struct Origin {
    pub(super) previous: Previous,
    /// The version that it brings, of the same DaemonSet as the one that ran before.
    pub(super) version: Option<DriverVersion>,
}

/// What ran before in each DaemonSet that a new rollout changes. The versions are of the largest whose version changes, or
/// else of the largest that changes at all. `None` also if the way back from there is not known: a person has to find it.
pub(super) fn origin(snapshot: &Snapshot, pool: &Pool, wanted: &Wanted<'_>) -> Option<Origin> {
    let mut target = BTreeMap::new();
    let mut changes = Vec::new();
    for (name, ds) in &wanted.daemon_sets {
        let new = wanted.target.get(*name);
        let Some(before) = ran_before(snapshot, pool, ds, new) else { continue };
        let known = good_before(snapshot, pool, ds, before);
        let Before { hash, version, pods } =
            known.filter(|before| new.map(RevisionHash::as_str) != Some(before.hash))?;
        target.insert((*name).to_owned(), hash.to_owned());
        changes.push(((version != ds.driver_version, pods), version, ds.driver_version.clone()));
    }
    let (_, from, version) = changes.into_iter().max_by_key(|(rank, ..)| *rank)?;
    Some(Origin { previous: Previous { target, version: from.map(|from| from.to_string()) }, version })
}

/// Where a way back may end: not at what a rollout brought that went wrong, which nobody may start towards, but at what ran
/// before that. `None` if nobody knows.
fn good_before<'a>(
    snapshot: &'a Snapshot,
    pool: &'a Pool,
    ds: &DaemonSet,
    mut before: Before<'a>,
) -> Option<Before<'a>> {
    let name = ds.name.name.as_ref();
    let wrong = || rollouts(snapshot, pool).filter(|(_, rollout)| !is_forgivable(rollout));
    // Each leads one step back. Two that took each other's place lead nowhere.
    for _ in 0..=wrong().count() {
        let brings =
            |(_, rollout): &(u32, &Rollout)| brought(rollout, name, before.hash, before.version.as_ref());
        let Some((_, bad)) = wrong().filter(brings).max_by_key(|(number, _)| *number) else {
            return Some(before);
        };
        let hash = bad.spec.previous.as_ref()?.target.get(name)?;
        before = Before { hash, version: version_before(snapshot, ds, bad), ..before };
    }
    None
}

/// What ran in a DaemonSet.
struct Before<'a> {
    hash: &'a str,
    version: Option<DriverVersion>,
    /// In so many pods.
    pods: usize,
}

/// What most pods of a DaemonSet are of that are not of the new revision. Where there are no pods at all, what was last
/// wanted. A few stragglers do not make a change of a revision that was rolled out before.
fn ran_before<'a>(
    snapshot: &'a Snapshot,
    pool: &'a Pool,
    ds: &DaemonSet,
    target: Option<&RevisionHash>,
) -> Option<Before<'a>> {
    let wanted_in = |rollout: &'a Rollout| rollout.spec.target.get(ds.name.name.as_ref()).map(String::as_str);
    let mut over = rollouts(snapshot, pool).filter(|(_, rollout)| is_forgivable(rollout));
    let mut counts: BTreeMap<&RevisionHash, (usize, &str)> = BTreeMap::new();
    for pod in snapshot.pods.values().flat_map(BTreeMap::values) {
        let owned = pod.owner.as_ref().is_some_and(|owner| owner.uid == ds.uid);
        if let Some(hash) = pod.revision.as_ref().filter(|_| owned) {
            counts.entry(hash).or_insert((0, &pod.image)).0 += 1;
        }
    }
    if counts.is_empty() {
        let (_, last) = over.max_by_key(|(number, _)| *number)?;
        let hash = wanted_in(last).filter(|hash| target.is_some_and(|target| target.as_str() != *hash))?;
        return Some(Before { hash, version: version_of(snapshot, ds, hash), pods: 0 });
    }
    let all: usize = counts.values().map(|(count, _)| count).sum();
    let there = target.and_then(|target| counts.get(target)).map_or(0, |(count, _)| *count);
    if there * 2 > all && over.any(|(_, rollout)| wanted_in(rollout) == target.map(RevisionHash::as_str)) {
        return None;
    }
    let others = counts.into_iter().filter(|(hash, _)| Some(*hash) != target);
    let (hash, (pods, image)) = others.max_by_key(|(_, (count, _))| *count)?;
    Some(Before { hash: hash.as_str(), version: DriverVersion::from_image(image), pods })
}
