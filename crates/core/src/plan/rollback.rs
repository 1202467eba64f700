//! The way back: which versions went wrong, who says so, and how the one before is put back.
//!
//! A rollback is decided in the status of the rollout that went wrong, then carried out: first the version where it came
//! from, then, by another rollout, the nodes. A version that went wrong does not start again until a person clears it.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};

use super::pool::{View, daemon_sets};
use super::rollout::{has_target, may_write, name, newest, rollouts};
use super::{Plan, PoolPlan};
use crate::action::{Action, PutBack};
use crate::api::{OnFailure, Previous, RollbackStatus, stamp};
use crate::names::RevisionHash;
use crate::policy::{Pool, Source};
use crate::reason::Reason;
use crate::snapshot::{DaemonSet, Pod, Rollout, Snapshot};
use crate::version::DriverVersion;

/// Who decides if no person does.
pub(super) const OURSELVES: &str = "pitcrew";

/// Whoever sets a version again after so many times owns it.
const TRIES_MAX: u32 = 2;

/// So long after a version was put back, somebody has set it again or nobody has rendered it.
const PATIENCE: SignedDuration = SignedDuration::from_mins(1);

/// The newest revision of each DaemonSet.
type Target = BTreeMap<String, RevisionHash>;

/// What the DaemonSets of a pool ask for.
pub(super) struct Wanted<'a> {
    pub(super) target: &'a Target,
    pub(super) daemon_sets: BTreeMap<&'a str, &'a DaemonSet>,
}

impl<'a> Wanted<'a> {
    pub(super) fn of(target: &'a Target, daemon_sets: &[&'a DaemonSet]) -> Self {
        Self { target, daemon_sets: daemon_sets.iter().map(|ds| (&*ds.name.name, *ds)).collect() }
    }

    /// The driver version of a DaemonSet, where its image's tag tells it.
    fn version(&self, ds: &str) -> Option<&'a DriverVersion> {
        self.daemon_sets.get(ds)?.driver_version.as_ref()
    }
}

/// A person has cleared it after it went wrong: its target begins anew, in another rollout.
pub(super) fn is_spent(rollout: &Rollout) -> bool {
    rollout.spec.cleared.is_some() && rollout.went_wrong()
}

/// Nothing about it has to be remembered.
pub(super) fn is_forgivable(rollout: &Rollout) -> bool {
    !rollout.went_wrong() || rollout.spec.cleared.is_some()
}

/// The newest rollout because of which nobody may start towards what is wanted. A stage that failed in the rollout under
/// way does that by itself, as long as its very template is wanted.
pub(super) fn condemned<'a>(
    snapshot: &'a Snapshot,
    pool: &'a Pool,
    wanted: &Wanted<'_>,
) -> Option<(u32, &'a Rollout)> {
    let newest = newest(snapshot, pool).map(|(number, _)| number);
    let found = rollouts(snapshot, pool).filter(|(number, rollout)| {
        let under_way = Some(*number) == newest && has_target(rollout, wanted.target);
        let holds = if under_way { rollout.is_taken_back() } else { rollout.went_wrong() };
        holds && rollout.spec.cleared.is_none() && speaks_of(rollout, wanted)
    });
    found.max_by_key(|(number, _)| *number)
}

/// Why nobody may start towards what is wanted.
pub(super) fn refusal(snapshot: &Snapshot, pool: &Pool, wanted: &Wanted<'_>) -> Option<Reason> {
    let (number, rollout) = condemned(snapshot, pool, wanted)?;
    let status = rollout.status.as_ref();
    let decided = status.and_then(|status| status.rollback.as_ref()).map(|back| back.why.clone());
    let asked = || rollout.spec.rollback.as_ref().and_then(|word| word.why.clone());
    let failed =
        || status.and_then(|status| status.stages.iter().find(|s| s.phase.is_bad())?.message.clone());
    let why = decided.or_else(asked).or_else(failed).unwrap_or_default();
    Some(Reason::Condemned { rollout: name(pool, number), why })
}

/// The same revisions; or the same driver version, where the rollout changed it or the DaemonSet is new. As long as one of
/// several DaemonSets has not been put back, a version that is taken back is still there.
fn speaks_of(rollout: &Rollout, wanted: &Wanted<'_>) -> bool {
    let condemns = |(ds, hash): (&String, &RevisionHash)| {
        (rollout.is_taken_back() && is_new(rollout, ds, hash.as_str()))
            || has_its_version(rollout, ds, hash.as_str(), wanted.version(ds))
    };
    has_target(rollout, wanted.target) || wanted.target.iter().any(condemns)
}

/// This revision of a DaemonSet came with the rollout, or is another one of the version that did.
pub(super) fn brought(
    rollout: &Rollout,
    daemon_set: &str,
    hash: &str,
    version: Option<&DriverVersion>,
) -> bool {
    is_new(rollout, daemon_set, hash) || has_its_version(rollout, daemon_set, hash, version)
}

/// This revision of a DaemonSet came with the rollout.
fn is_new(rollout: &Rollout, daemon_set: &str, hash: &str) -> bool {
    let target = rollout.spec.target.get(daemon_set).map(String::as_str);
    target == Some(hash) && before_it(rollout, daemon_set) != target
}

/// It is a revision of the driver version that came with the rollout.
fn has_its_version(rollout: &Rollout, daemon_set: &str, hash: &str, version: Option<&DriverVersion>) -> bool {
    let brings = parsed(rollout.spec.version.as_deref());
    let before = parsed(rollout.spec.previous.as_ref().and_then(|previous| previous.version.as_deref()));
    let is_another = brings.is_some() && before.is_some() && brings != before;
    let is_changed = changes(rollout, daemon_set) || !rollout.spec.target.contains_key(daemon_set);
    let is_of_it = version == brings.as_ref() && before_it(rollout, daemon_set) != Some(hash);
    is_another && is_changed && is_of_it
}

/// The rollout brought another revision of a DaemonSet.
fn changes(rollout: &Rollout, daemon_set: &str) -> bool {
    rollout.spec.previous.as_ref().is_some_and(|previous| previous.target.contains_key(daemon_set))
}

/// The revision of a DaemonSet before the rollout. What the rollout does not change is not written down as something that
/// ran before: it is what it was.
fn before_it<'a>(rollout: &'a Rollout, daemon_set: &str) -> Option<&'a str> {
    let changed = rollout.spec.previous.as_ref()?.target.get(daemon_set);
    changed.or_else(|| rollout.spec.target.get(daemon_set)).map(String::as_str)
}

pub(super) fn parsed(version: Option<&str>) -> Option<DriverVersion> {
    version.and_then(|version| version.parse().ok())
}

/// The number of the rollout that a new one towards what is wanted would take back: each DaemonSet has its revision of
/// before, or another one of the version of before.
pub(super) fn taken_back(snapshot: &Snapshot, pool: &Pool, wanted: &Wanted<'_>) -> Option<u32> {
    let (number, rollout) = newest(snapshot, pool)?;
    let has_version = |ds: &str| {
        let known = wanted.daemon_sets.get(ds);
        let before = known.and_then(|known| version_before(snapshot, known, rollout));
        before.is_some() && before.as_ref() == wanted.version(ds)
    };
    let is_back = |(ds, hash): (&String, &RevisionHash)| {
        before_it(rollout, ds) == Some(hash.as_str()) || has_version(ds)
    };
    let goes_back = !has_target(rollout, wanted.target) && wanted.target.iter().all(is_back);
    (rollout.is_taken_back() && !wanted.target.is_empty() && goes_back).then_some(number)
}

/// The rollout that nodes come back from: the one under way says so, or a new one would.
pub(super) fn way_back_of(
    snapshot: &Snapshot,
    pool: &Pool,
    begun: Option<&Rollout>,
    wanted: &Wanted<'_>,
) -> Option<String> {
    match begun {
        Some(begun) => begun.spec.rollback_of.clone(),
        None => Some(name(pool, taken_back(snapshot, pool, wanted)?)),
    }
}

/// On the way back from another version: a driver of the wanted one stays as it is if only its template is another one, which
/// nobody has rolled out before. What a rollout brought that went wrong has to go.
pub(super) fn spares(view: &View<'_>, pod: &Pod, ds: &DaemonSet) -> bool {
    let Some(bad) = view.way_back_of.and_then(|bad| parsed(bad.spec.version.as_deref())) else {
        return false;
    };
    let same = || ds.driver_version.is_some() && DriverVersion::from_image(&pod.image) == ds.driver_version;
    let hash = view.targets.get(&ds.uid).copied().flatten();
    let wanted_before = |rollout: &Rollout| {
        let of = rollout.spec.target.get(ds.name.name.as_ref()).map(String::as_str);
        rollout.spec.rollback_of.is_none() && of.is_some() && of == hash.map(RevisionHash::as_str)
    };
    let came_with = |rollout: &Rollout| {
        pod.revision.as_ref().is_none_or(|revision| is_new(rollout, &ds.name.name, revision.as_str()))
    };
    let has_to_go =
        |rollout: &Rollout| wanted_before(rollout) || (!is_forgivable(rollout) && came_with(rollout));
    ds.driver_version.as_ref() != Some(&bad)
        && same()
        && !rollouts(view.snapshot, view.pool).any(|(_, rollout)| has_to_go(rollout))
}

/// The driver version of a DaemonSet before a rollout; of one whose revision of then is gone, that of the others.
pub(super) fn version_before(
    snapshot: &Snapshot,
    ds: &DaemonSet,
    rollout: &Rollout,
) -> Option<DriverVersion> {
    let own = before_it(rollout, &ds.name.name).and_then(|hash| version_of(snapshot, ds, hash));
    own.or_else(|| parsed(rollout.spec.previous.as_ref()?.version.as_deref()))
}

/// The driver version of a revision, as long as that is there.
pub(super) fn version_of(snapshot: &Snapshot, ds: &DaemonSet, hash: &str) -> Option<DriverVersion> {
    let mut revisions = snapshot.revisions.values().filter(|revision| revision.owner == ds.uid);
    revisions.find(|revision| revision.hash.as_str() == hash)?.driver_version.clone()
}

/// The rollback that the rollout of the wanted version says it is in, or that it begins now.
pub(super) fn review(
    snapshot: &Snapshot,
    pool: &Pool,
    rollout: &Rollout,
    done: &PoolPlan,
) -> Option<RollbackStatus> {
    let said = rollout.status.as_ref().and_then(|status| status.rollback.clone());
    let back = said.or_else(|| begin(snapshot, pool, rollout, done))?;
    Some(judge(snapshot, pool, rollout, &done.target, back))
}

/// How far a rollback is whose version is still, or again, the wanted one.
pub(super) fn judge(
    snapshot: &Snapshot,
    pool: &Pool,
    rollout: &Rollout,
    target: &Target,
    back: RollbackStatus,
) -> RollbackStatus {
    let ways = match way_back(snapshot, pool, rollout, target) {
        Ok(ways) => ways,
        Err(what) => return RollbackStatus { message: Some(what), ..back },
    };
    if back.tries > TRIES_MAX {
        let what = "somebody sets the version again each time it is put back; set it back there";
        return RollbackStatus { message: Some(what.to_owned()), ..back };
    }
    let used = last_put_back(snapshot, &ways).filter(|at| *at >= back.since.0);
    let late = snapshot.now >= patience(used.unwrap_or(back.since.0));
    match used {
        Some(_) if late => next_try(snapshot, back),
        None if late && ways.is_empty() => {
            let what =
                "the version was put back, and nobody has rendered the driver from it yet; see its operator";
            RollbackStatus { message: Some(what.to_owned()), ..back }
        }
        _ => RollbackStatus { message: None, ..back },
    }
}

/// When somebody has to have seen what was put back.
fn patience(since: Timestamp) -> Timestamp {
    since.saturating_add(PATIENCE).unwrap_or(Timestamp::MAX)
}

fn last_put_back(snapshot: &Snapshot, ways: &[PutBack]) -> Option<Timestamp> {
    ways.iter().filter_map(|way| snapshot.put_back.get(&way.object())).max().copied()
}

fn next_try(snapshot: &Snapshot, back: RollbackStatus) -> RollbackStatus {
    RollbackStatus { since: stamp(snapshot.now), tries: back.tries + 1, message: None, ..back }
}

fn begin(snapshot: &Snapshot, pool: &Pool, rollout: &Rollout, done: &PoolPlan) -> Option<RollbackStatus> {
    let since = stamp(snapshot.now);
    if let Some(word) = &rollout.spec.rollback {
        let why = word.why.clone().unwrap_or_else(|| "a person asked for it".to_owned());
        return Some(RollbackStatus { since, by: word.by.clone(), why, tries: 1, message: None });
    }
    // The way back has no way back.
    if rollout.spec.rollback_of.is_some() {
        return None;
    }
    let why = why_wrong(pool, rollout, done)?;
    Some(RollbackStatus { since, by: OURSELVES.to_owned(), why, tries: 1, message: None })
}

/// Why the policy takes a version back: a stage has failed, as the API has it; or, in a pool without stages whose policy
/// says so, more nodes than it accepts.
fn why_wrong(pool: &Pool, rollout: &Rollout, done: &PoolPlan) -> Option<String> {
    let rules = &pool.policy.as_ref().ok()?.rollout;
    let stages = rollout.status.as_ref().map(|status| status.stages.as_slice()).unwrap_or_default();
    let bad = stages.iter().find(|stage| stage.phase.is_bad());
    let by_default = if stages.is_empty() { OnFailure::Pause } else { OnFailure::Rollback };
    if rules.on_failure.unwrap_or(by_default) == OnFailure::Pause {
        return None;
    }
    let (failed, limit) = (done.ledger.failed - done.ledger.blameless, done.ledger.max_failed);
    match bad {
        Some(stage) => {
            Some(format!("stage {} failed: {}", stage.name, stage.message.as_deref().unwrap_or_default()))
        }
        None if stages.is_empty() && failed > limit => {
            Some(format!("{failed} nodes failed and at most {limit} may (limits.failureThreshold)"))
        }
        None => None,
    }
}

/// How the version before is put back where it came from; or what a person has to do instead. Nothing, if it is back.
fn way_back(
    snapshot: &Snapshot,
    pool: &Pool,
    rollout: &Rollout,
    target: &Target,
) -> Result<Vec<PutBack>, String> {
    let Ok(policy) = &pool.policy else { return Ok(Vec::new()) };
    let Some(previous) = &rollout.spec.previous else {
        return Err("what ran before is not known; set the driver version back by hand".to_owned());
    };
    let mut ways = Vec::new();
    // Another rendering of its version is no way back.
    let is_back = |ds: &DaemonSet| {
        let (name, version) = (ds.name.name.as_ref(), ds.driver_version.as_ref());
        target.get(name).is_some_and(|hash| !brought(rollout, name, hash.as_str(), version))
    };
    let daemon_sets = daemon_sets(snapshot, policy);
    // DaemonSets of one pool may be rendered from several objects, and come from different versions.
    let version_before = |source: &Source| {
        let rendered = daemon_sets.iter().filter(|ds| ds.rendered_by.as_ref() == Some(source));
        let own = rendered.filter_map(|ds| version_of(snapshot, ds, previous.target.get(&*ds.name.name)?));
        let own: Vec<_> = own.map(|version| version.to_string()).collect();
        // One object has one version: what most of them ran, if it is theirs.
        let most = previous.version.as_ref().filter(|version| own.is_empty() || own.contains(version));
        most.or_else(|| own.first()).cloned()
    };
    for ds in daemon_sets.iter().filter(|ds| !is_back(ds)) {
        let way = match &ds.rendered_by {
            Some(source) => put_version_back(snapshot, source, ds, version_before(source).as_deref())?,
            None => Some(put_template_back(snapshot, ds, previous)?),
        };
        ways.extend(way.filter(|way| !ways.contains(way)));
    }
    Ok(ways)
}

fn put_version_back(
    snapshot: &Snapshot,
    source: &Source,
    ds: &DaemonSet,
    before: Option<&str>,
) -> Result<Option<PutBack>, String> {
    let field = source.version_field();
    let by_hand = |to: &str| format!("set {field} of {source} back to {to}");
    let Some(to) = before else {
        return Err(format!("which version ran before is not known; {}", by_hand("it by hand")));
    };
    if let Some(owner) = snapshot.sources.managers.get(source) {
        return Err(format!(
            "{source} is managed by {owner}, which would undo any change here; {} there",
            by_hand(to)
        ));
    }
    // Its tags say more than its version does.
    if matches!(source, Source::NicClusterPolicy(_)) {
        return Err(format!("pitcrew does not write NicClusterPolicies; {}", by_hand(to)));
    }
    let from = snapshot.sources.version_of(source).unwrap_or_default();
    if parsed(Some(from)).is_some_and(|from| Some(from) == parsed(Some(to))) {
        if ds.driver_version == parsed(Some(to)) {
            return Err(format!("what changed in {source} is not its {field}; put it back there"));
        }
        return Ok(None); // its operator has to render it
    }
    // The field may say more than a version, or something else than the image's tag.
    if from.is_empty() || parsed(Some(from)) != ds.driver_version {
        return Err(format!(
            "its {field} is \"{from}\", which is not what the image is tagged with; {} by hand",
            by_hand(to)
        ));
    }
    Ok(Some(PutBack::Version { source: source.clone(), from: from.to_owned(), to: to.to_owned() }))
}

fn put_template_back(snapshot: &Snapshot, ds: &DaemonSet, previous: &Previous) -> Result<PutBack, String> {
    let name = &ds.name;
    let revision = previous.target.get(ds.name.name.as_ref());
    let known = |hash: &&String| {
        snapshot.revisions.values().any(|known| known.owner == ds.uid && known.hash.as_str() == **hash)
    };
    if let Some(owner) = &ds.manager {
        return Err(format!(
            "daemonset/{name} is managed by {owner}, which would undo any change here; put its earlier template back there"
        ));
    }
    let Some(revision) = revision.filter(known) else {
        return Err(format!(
            "the earlier revision of daemonset/{name} is gone; put its earlier template back by hand"
        ));
    };
    let (uid, generation) = (ds.uid.clone(), ds.generation);
    Ok(PutBack::Template { daemon_set: name.clone(), uid, generation, revision: revision.as_str().into() })
}

/// Puts the version back that the API says is to be put back, once for each try.
pub(super) fn carry_out(
    snapshot: &Snapshot,
    pool: &Pool,
    rollout: &Rollout,
    target: &Target,
    plan: &mut Plan,
) {
    let Some(back) = rollout.status.as_ref().and_then(|status| status.rollback.as_ref()) else { return };
    let ways = way_back(snapshot, pool, rollout, target).unwrap_or_default();
    let late = patience(last_put_back(snapshot, &ways).unwrap_or(back.since.0));
    if late > snapshot.now {
        plan.wake(late);
    }
    for way in ways.into_iter().filter(|_| back.tries <= TRIES_MAX) {
        let object = way.object();
        let used = snapshot.put_back.get(&object).is_some_and(|at| *at >= back.since.0);
        if !used && may_write(snapshot, &object, plan) {
            plan.actions.push(Action::PutBack(way));
        }
    }
}

/// A version that was put back, and seen to be, is there again. While nodes are on their way back, that is undone.
pub(super) fn set_again(snapshot: &Snapshot, rollout: &Rollout) -> Option<RollbackStatus> {
    let back = rollout.status.as_ref()?.rollback.as_ref()?;
    (back.tries <= TRIES_MAX).then(|| next_try(snapshot, back.clone()))
}
