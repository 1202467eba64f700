//! The version matrix: DaemonSets whose version nobody has listed, what runs otherwise than listed, and what a person should
//! do about the file. It refuses starts only where the policy says so; all else is only told.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::members::Member;
use super::pool::View;
use super::rollout::newest;
use crate::api::{MatrixSpec, MatrixStatus, RolloutPhase};
use crate::contract::{CUDA_LABEL, DRIVER_VERSION_LABEL, MATRIX_CONFIG_MAP};
use crate::matrix::{
    CANARY, CURRENT, Drift, Field, Matrix, Observed, Place, Release, Unlisted, Verdict, drift, find, listing,
};
use crate::names::{EntryName, ObjectName, Uid};
use crate::policy::Policy;
use crate::snapshot::{DaemonSet, Snapshot};
use crate::version::DriverVersion;

/// Whoever has more than this wrong looks at the cluster, not at a status.
const DRIFT_MAX: usize = 8;
/// A sentence in a status: a fleet may run as many versions as it has nodes.
const SENTENCE_MAX: usize = 300;

/// DaemonSets that nobody may start towards; none, where the policy does not enforce its matrix.
pub(super) fn unlisted<'a>(
    snapshot: &Snapshot,
    policy: &Policy,
    daemon_sets: &[&'a DaemonSet],
) -> BTreeMap<&'a Uid, Arc<Unlisted>> {
    let Some(spec) = policy.rollout.matrix.as_ref().filter(|spec| spec.enforce) else {
        return BTreeMap::new();
    };
    let refusal = |ds: &&'a DaemonSet| Some((&ds.uid, entries(snapshot, spec, ds).err()?));
    daemon_sets.iter().filter_map(refusal).collect()
}

/// The entries that list what a DaemonSet installs.
fn entries<'s>(
    snapshot: &'s Snapshot,
    spec: &MatrixSpec,
    daemon_set: &DaemonSet,
) -> Result<Vec<&'s EntryName>, Arc<Unlisted>> {
    let found = find(snapshot.matrices.as_ref(), &spec.key);
    let found =
        found.and_then(|matrix| listing(matrix, daemon_set.driver_version.as_ref(), &daemon_set.name));
    found.map_err(|why| Arc::new(Unlisted { place: place(snapshot, spec), why }))
}

fn place(snapshot: &Snapshot, spec: &MatrixSpec) -> Place {
    Place { config_map: ObjectName::new(&snapshot.namespace, MATRIX_CONFIG_MAP), key: spec.key.clone() }
}

/// What there is to say about the matrix of a pool, if it has one.
pub(super) fn report(
    view: &View<'_>,
    daemon_sets: &[&DaemonSet],
    members: &[Member<'_>],
) -> Option<MatrixStatus> {
    let (snapshot, spec) = (view.snapshot, view.policy.rollout.matrix.as_ref()?);
    let matrix = match find(snapshot.matrices.as_ref(), &spec.key) {
        Ok(matrix) => matrix,
        Err(why) => {
            let message = Unlisted { place: place(snapshot, spec), why }.to_string();
            return Some(MatrixStatus { message: shortened(message), ..MatrixStatus::default() });
        }
    };
    let wanted = wanted(snapshot, spec, daemon_sets);
    let Sightings { differs, unseen } = Sightings::of(snapshot, matrix, members);
    Some(MatrixStatus {
        at: None,
        listed: wanted.is_ok(),
        message: shortened(wanted.unwrap_or_else(|unlisted| unlisted.to_string())),
        drift: differs.into_iter().take(DRIFT_MAX).map(shortened).collect(),
        not_observed: unseen.into_iter().map(|field| field.key().to_owned()).collect(),
        reminder: reminder(view, matrix),
    })
}

/// Where the wanted version is listed; the first DaemonSet whose version is not speaks for all.
fn wanted(
    snapshot: &Snapshot,
    spec: &MatrixSpec,
    daemon_sets: &[&DaemonSet],
) -> Result<String, Arc<Unlisted>> {
    let mut said = None;
    for ds in daemon_sets {
        let names: Vec<String> = entries(snapshot, spec, ds)?.iter().map(ToString::to_string).collect();
        let version = ds.driver_version.as_ref().map(ToString::to_string).unwrap_or_default();
        said.get_or_insert_with(|| format!("driver {version} is listed ({})", names.join(", ")));
    }
    Ok(said.unwrap_or_else(|| "no driver is wanted".to_owned()))
}

/// The matrix against the cluster. A node is held against the entry that lists its driver, current before canary before the
/// others; whoever runs what no entry lists is held against current.
struct Sightings {
    /// What runs otherwise than stated.
    differs: Vec<String>,
    /// Stated, and seen nowhere by the controller.
    unseen: BTreeSet<Field>,
}

impl Sightings {
    fn of(snapshot: &Snapshot, matrix: &Matrix, members: &[Member<'_>]) -> Self {
        let gpu_operator = snapshot.gpu_operator.versions.values().next();
        let compared = observed(matrix, members).into_iter().flat_map(|(name, observed)| {
            let observed = Observed { gpu_operator: gpu_operator.cloned(), ..observed };
            let entry = matrix.entries.get(name);
            let drifts = entry.map(|entry| drift(entry, &observed)).unwrap_or_default();
            drifts.into_iter().map(move |drift| (name, drift))
        });
        let compared: Vec<(&EntryName, Drift)> =
            compared.filter(|(_, drift)| drift.field != Field::Status).collect();
        // There is one operator in the cluster: it is right if it is what any of the entries states.
        let excused = compared.iter().any(|(_, drift)| {
            drift.field == Field::GpuOperator && matches!(drift.verdict, Verdict::Agrees { .. })
        });
        let (mut differs, mut seen, mut unseen) = (Vec::new(), BTreeSet::new(), BTreeSet::new());
        for (name, drift) in &compared {
            let differing = match drift.verdict {
                Verdict::NotObservable { .. } => {
                    unseen.insert(drift.field);
                    continue;
                }
                Verdict::Agrees { .. } => false,
                Verdict::Differs { .. } => drift.field != Field::GpuOperator || !excused,
            };
            seen.insert(drift.field);
            if differing {
                differs.push(format!("{name}: {drift}"));
            }
        }
        Self { differs, unseen: unseen.difference(&seen).copied().collect() }
    }
}

/// What the nodes show, by the entry that they are held against. Nodes on a visit are between two versions and show nothing.
fn observed<'m>(matrix: &'m Matrix, members: &[Member<'_>]) -> BTreeMap<&'m EntryName, Observed> {
    // Most nodes are alike, so versions are read once for all that are.
    let mut alike: BTreeMap<(&str, Option<&str>, Option<&str>), u32> = BTreeMap::new();
    for member in members.iter().filter(|member| !member.state().in_flight()) {
        let Some(pod) = member.pod else { continue };
        let label = |key: &str| member.node.labels().get(key).map(String::as_str);
        *alike.entry((&pod.image, label(DRIVER_VERSION_LABEL), label(CUDA_LABEL))).or_default() += 1;
    }
    let mut entries: BTreeMap<&EntryName, Observed> = BTreeMap::new();
    for ((image, driver, cuda), nodes) in alike {
        let labelled = || driver.and_then(|version| version.parse().ok());
        let version = DriverVersion::from_image(image).or_else(labelled);
        let Some(name) = entry_of(matrix, version.as_ref()) else { continue };
        let observed = entries.entry(name).or_default();
        observed.driver.add_all(version, nodes);
        observed.cuda.add_all(cuda.map(Release::new), nodes);
    }
    if entries.is_empty() {
        entries.extend(entry_of(matrix, None).map(|name| (name, Observed::default())));
    }
    entries
}

/// The entry that a node with this driver is held against.
fn entry_of<'m>(matrix: &'m Matrix, version: Option<&DriverVersion>) -> Option<&'m EntryName> {
    let listing = version.and_then(|version| matrix.allows(version)).unwrap_or_default();
    let called = |name: &str| listing.iter().copied().find(|entry| entry.as_str() == name);
    let current = || matrix.entries.get_key_value(CURRENT).map(|(name, _)| name);
    called(CURRENT).or_else(|| called(CANARY)).or(listing.first().copied()).or_else(current)
}

/// After a rollout the file is what it was until somebody commits.
fn reminder(view: &View<'_>, matrix: &Matrix) -> Option<String> {
    let snapshot = view.snapshot;
    let (_, rollout) = newest(snapshot, view.pool)?;
    let is_done = rollout.status.as_ref().is_some_and(|status| status.phase == RolloutPhase::Done);
    let version = |spec: &crate::api::RolloutSpec| -> Option<DriverVersion> {
        spec.version.as_ref().filter(|_| is_done)?.parse().ok()
    };
    let states = |entry: Option<&crate::matrix::Entry>, version: &DriverVersion| {
        entry.and_then(|entry| entry.driver.as_ref()) == Some(version)
    };
    if let Some(taken_back) = &rollout.spec.rollback_of {
        let version = version(&snapshot.rollouts.get(taken_back)?.spec)?;
        return states(matrix.current(), &version).then(|| {
            format!(
                "driver {version} was taken back, and the matrix has it as current: pitcrew matrix rollback --commit"
            )
        });
    }
    let version = version(&rollout.spec)?;
    (states(matrix.canary(), &version) && !states(matrix.current(), &version)).then(|| {
        format!(
            "driver {version} is on every node, and the matrix has it as canary: pitcrew matrix promote --commit"
        )
    })
}

fn shortened(mut sentence: String) -> String {
    if let Some((at, _)) = sentence.char_indices().nth(SENTENCE_MAX) {
        sentence.truncate(at);
        sentence.push('…');
    }
    sentence
}
