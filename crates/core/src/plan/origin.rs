//! Where a new rollout comes from: what ran before in each DaemonSet that it changes, and so where its way back goes.

use std::collections::BTreeMap;

use super::rollback::{Wanted, brought, is_forgivable, parsed, version_before, version_of};
use super::rollout::{newest, rollouts};
use super::timeline::was_done;
use crate::api::{Previous, RolloutPhase};
use crate::names::RevisionHash;
use crate::policy::Pool;
use crate::snapshot::{DaemonSet, Pod, Rollout, Snapshot};
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
    let unfinished = unfinished(snapshot, pool, wanted);
    let (mut target, mut changes) = (BTreeMap::new(), Vec::new());
    for (name, ds) in &wanted.daemon_sets {
        let new = wanted.target.get(*name);
        let said = unfinished.and_then(|rollout| said_before(snapshot, rollout, ds, new));
        let Some(before) = said.or_else(|| ran_before(snapshot, pool, ds, new)) else { continue };
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

/// The newest rollout, if its version is rendered anew on its way. Most nodes may have it by now, in its first rendering; but that
/// is no version to go back to from its second one. Where a way back has led into the middle of a rollout, that one goes on.
fn unfinished<'a>(snapshot: &'a Snapshot, pool: &'a Pool, wanted: &Wanted<'_>) -> Option<&'a Rollout> {
    let (_, mut last) = newest(snapshot, pool)?;
    if last.spec.rollback_of.is_some() {
        let good = |rollout: &Rollout| rollout.spec.rollback_of.is_none() && is_forgivable(rollout);
        let good = rollouts(snapshot, pool).filter(|(_, rollout)| good(rollout));
        last = good.max_by_key(|(number, _)| *number)?.1;
    }
    let said = last.status.as_ref();
    let is_over = said.is_some_and(|said| said.phase == RolloutPhase::Failed || was_done(said));
    let changed = &last.spec.previous.as_ref()?.target;
    let brought = |name: &str, ds: &DaemonSet| {
        let own = last.spec.target.get(name).and_then(|hash| version_of(snapshot, ds, hash));
        own.or_else(|| parsed(last.spec.version.as_deref()))
    };
    let is_same =
        |name: &str, ds: &DaemonSet| ds.driver_version.is_some() && brought(name, ds) == ds.driver_version;
    let mut changed = wanted.daemon_sets.iter().filter(|(name, _)| changed.contains_key(**name));
    (!is_over && changed.all(|(name, ds)| is_same(name, ds))).then_some(last)
}

/// What a rollout says that ran before it.
fn said_before<'a>(
    snapshot: &'a Snapshot,
    rollout: &'a Rollout,
    ds: &DaemonSet,
    target: Option<&RevisionHash>,
) -> Option<Before<'a>> {
    let hash = rollout.spec.previous.as_ref()?.target.get(ds.name.name.as_ref())?.as_str();
    let pods = pods_of(snapshot, ds).count();
    let is_another = target.map(RevisionHash::as_str) != Some(hash);
    is_another.then(|| Before { hash, version: version_before(snapshot, ds, rollout), pods })
}

fn pods_of<'a>(snapshot: &'a Snapshot, ds: &DaemonSet) -> impl Iterator<Item = &'a Pod> {
    let owned = move |pod: &&Pod| pod.owner.as_ref().is_some_and(|owner| owner.uid == ds.uid);
    snapshot.pods.values().flat_map(BTreeMap::values).filter(owned)
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
    for pod in pods_of(snapshot, ds) {
        if let Some(hash) = &pod.revision {
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
