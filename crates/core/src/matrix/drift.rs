//! Drift: an entry of the matrix against what runs. Every field that the entry states agrees, differs, or cannot be
//! observed in this cluster, and then the reason says what would have to be there.
//!
//! Nodes that are on trial run canary's versions, all others current's: whoever calls this puts the nodes of a stage
//! together and holds them against that stage's entry.

use std::collections::BTreeMap;
use std::fmt;

use super::release::Release;
use super::{Entry, Field};
use crate::version::DriverVersion;

/// What was seen in the cluster. What nobody shows is `None`, or an empty tally.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observed {
    /// Label `app.kubernetes.io/version` of the GPU Operator's Deployment; under OLM the bundle in `olm.owner`.
    pub gpu_operator: Option<Release>,
    /// The same of the Network Operator's Deployment.
    pub network_operator: Option<Release>,
    /// The driver container's image; of host drivers the node label `nvidia.com/cuda.driver-version.full`.
    pub driver: Tally<DriverVersion>,
    /// Node label `nvidia.com/cuda.runtime-version.full`, which GPU Feature Discovery sets.
    pub cuda: Tally<Release>,
    /// `status.firmwareVersion` of the `NicDevice`s of the NIC Configuration Operator. A node counts for each version that
    /// one of its adapters has.
    pub firmware: Tally<Release>,
    /// The bundle in `olm.owner` of the SR-IOV Network Operator's Deployment.
    pub sriov: Option<Release>,
    /// The newest completed entry of `status.history` in the `ClusterVersion` named `version`.
    pub openshift: Option<Release>,
}

/// Nodes by the version that they run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tally<V> {
    /// How many nodes run each.
    pub nodes: BTreeMap<V, u32>,
    /// Nodes that do not show it.
    pub unknown: u32,
}

impl<V> Default for Tally<V> {
    fn default() -> Self {
        Self { nodes: BTreeMap::new(), unknown: 0 }
    }
}

impl<V: Ord> Tally<V> {
    /// One more node, with what it shows.
    pub fn add(&mut self, version: Option<V>) {
        self.add_all(version, 1);
    }

    /// So many more nodes that show the same.
    pub fn add_all(&mut self, version: Option<V>, nodes: u32) {
        match version {
            Some(version) => *self.nodes.entry(version).or_default() += nodes,
            None => self.unknown += nodes,
        }
    }
}

/// One field of an entry, held against the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drift {
    /// Which.
    pub field: Field,
    /// What the entry states.
    pub stated: String,
    /// How the two compare.
    pub verdict: Verdict,
}

/// How a field and the cluster compare.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Whatever shows a version shows the stated one.
    Agrees {
        /// Nodes that do not show any.
        unknown: u32,
    },
    /// Something runs another version.
    Differs {
        /// What runs.
        seen: Seen,
    },
    /// Nothing in this cluster shows it.
    NotObservable {
        /// What would have to be there.
        why: Why,
    },
}

/// What runs instead of what is stated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seen {
    /// There is one of it in the cluster.
    Cluster(String),
    /// Each node has its own: the versions that are not the stated one, and on how many nodes.
    Nodes(BTreeMap<String, u32>),
}

/// Why a field cannot be compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// Whatever shows this field is not there.
    NothingShows(Field),
    /// There are network adapters, but none of the family (the first number of the firmware) that is stated.
    NoAdapterOfFamily(u64),
    /// It is a word of people about the entry.
    ForPeople,
}

/// Compares every field that an entry states, in the order of the document.
pub fn drift(entry: &Entry, observed: &Observed) -> Vec<Drift> {
    let one = |field| {
        let stated = entry.text(field)?;
        Some(Drift { field, stated, verdict: verdict(entry, observed, field)? })
    };
    Field::ALL.into_iter().filter_map(one).collect()
}

fn verdict(entry: &Entry, observed: &Observed, field: Field) -> Option<Verdict> {
    let cluster = |stated: &Option<Release>, seen: &Option<Release>| {
        Some(in_cluster(field, stated.as_ref()?, seen.as_ref()))
    };
    match field {
        Field::GpuOperator => cluster(&entry.gpu_operator, &observed.gpu_operator),
        Field::NetworkOperator => cluster(&entry.network_operator, &observed.network_operator),
        Field::Driver => {
            let stated = entry.driver.as_ref()?;
            Some(on_nodes(field, &observed.driver, |seen| seen == stated))
        }
        Field::Cuda => {
            let stated = entry.cuda.as_ref()?;
            Some(on_nodes(field, &observed.cuda, |seen| stated.is_met_by(seen)))
        }
        Field::Firmware => Some(firmware(entry.firmware.as_ref()?, &observed.firmware)),
        Field::Sriov => cluster(&entry.sriov, &observed.sriov),
        Field::Openshift => cluster(&entry.openshift, &observed.openshift),
        Field::Status => Some(Verdict::NotObservable { why: Why::ForPeople }),
    }
}

fn in_cluster(field: Field, stated: &Release, seen: Option<&Release>) -> Verdict {
    match seen {
        None => Verdict::NotObservable { why: Why::NothingShows(field) },
        Some(seen) if stated.is_met_by(seen) => Verdict::Agrees { unknown: 0 },
        Some(seen) => Verdict::Differs { seen: Seen::Cluster(seen.to_string()) },
    }
}

fn on_nodes<V: fmt::Display>(field: Field, tally: &Tally<V>, is_stated: impl Fn(&V) -> bool) -> Verdict {
    let others: BTreeMap<String, u32> = tally
        .nodes
        .iter()
        .filter(|(version, _)| !is_stated(version))
        .map(|(version, nodes)| (version.to_string(), *nodes))
        .collect();
    if tally.nodes.is_empty() {
        Verdict::NotObservable { why: Why::NothingShows(field) }
    } else if others.is_empty() {
        Verdict::Agrees { unknown: tally.unknown }
    } else {
        Verdict::Differs { seen: Seen::Nodes(others) }
    }
}

/// Firmware of another family of adapters is another product: it says nothing about the stated one.
fn firmware(stated: &Release, tally: &Tally<Release>) -> Verdict {
    let Some(family) = stated.family() else {
        return on_nodes(Field::Firmware, tally, |seen| stated.is_met_by(seen));
    };
    let same = |(version, nodes): (&Release, &u32)| {
        (version.family() == Some(family)).then(|| (version.clone(), *nodes))
    };
    let of_family = Tally { nodes: tally.nodes.iter().filter_map(same).collect(), unknown: tally.unknown };
    if of_family.nodes.is_empty() && !tally.nodes.is_empty() {
        return Verdict::NotObservable { why: Why::NoAdapterOfFamily(family) };
    }
    on_nodes(Field::Firmware, &of_family, |seen| stated.is_met_by(seen))
}

impl fmt::Display for Drift {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Drift { field, stated, verdict } = self;
        match verdict {
            Verdict::Agrees { unknown: 0 } => write!(f, "{field} is {stated}, as stated"),
            Verdict::Agrees { unknown } => {
                let verb = if *unknown == 1 { "does" } else { "do" };
                write!(f, "{field} is {stated}, as stated; {} {verb} not show it", nodes(*unknown))
            }
            Verdict::Differs { seen: Seen::Cluster(seen) } => write!(f, "{field} is {seen}, not {stated}"),
            Verdict::Differs { seen: Seen::Nodes(seen) } => {
                let on = |(version, number): (&String, &u32)| format!("{version} on {}", nodes(*number));
                let seen: Vec<String> = seen.iter().map(on).collect();
                write!(f, "{field} is {}, not {stated}", seen.join(", "))
            }
            Verdict::NotObservable { why } => write!(f, "{field} {stated} cannot be observed: {why}"),
        }
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let field = match self {
            Why::NothingShows(field) => field,
            Why::NoAdapterOfFamily(family) => {
                return write!(f, "no network adapter has firmware that begins with {family}");
            }
            Why::ForPeople => return f.write_str("it is a word for people"),
        };
        f.write_str(match field {
            Field::GpuOperator => "no GPU Operator Deployment has the label app.kubernetes.io/version or olm.owner",
            Field::NetworkOperator => {
                "no Network Operator Deployment has the label app.kubernetes.io/version or olm.owner"
            }
            Field::Driver => {
                "no driver image has a version in its tag, and no node the label nvidia.com/cuda.driver-version.full"
            }
            Field::Cuda => {
                "no node has the label nvidia.com/cuda.runtime-version.full (GPU Feature Discovery sets it)"
            }
            Field::Firmware => "there are no NicDevices (the NIC Configuration Operator makes them)",
            Field::Sriov => "no SR-IOV Network Operator Deployment has the label olm.owner",
            Field::Openshift => "there is no ClusterVersion (this is not OpenShift)",
            Field::Status => "it is a word for people",
        })
    }
}

/// `1 node`, `2 nodes`.
fn nodes(number: u32) -> String {
    if number == 1 { "1 node".to_owned() } else { format!("{number} nodes") }
}
