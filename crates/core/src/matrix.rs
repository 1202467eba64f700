//! The version matrix, `gpu-version-matrix.yaml`: which versions were tested together, which of them is in production and
//! which is on trial. Text comes in, entries or sentences about what is wrong with the text come out.
//!
//! ```text
//!  tree.rs     YAML, with the place of each value in the text     read.rs     a tree becomes a Matrix, or Problems
//!  diff.rs     what changes from one entry to another             promote.rs  the text in which canary is current
//!  drift.rs    an entry against what runs                         release.rs  versions that are no driver's
//!  listed.rs   whether a version is listed, in a ConfigMap
//! ```
//!
//! A planner asks [`Matrix::allows`] whether a target is listed and [`drift`](fn@drift) what runs otherwise than stated.

mod diff;
mod drift;
mod listed;
mod problem;
mod promote;
mod read;
mod release;
#[cfg(test)]
mod tests;
mod tree;

use std::collections::BTreeMap;
use std::fmt;

pub use diff::{FieldChange, diff};
pub use drift::{Drift, Observed, Seen, Tally, Verdict, Why, drift};
pub use listed::{Files, Place, Unlisted, WhyUnlisted, find, listing};
pub use problem::{Problem, Problems};
pub use promote::{CannotPromote, Promotion, promoted};
pub use release::Release;

use crate::names::EntryName;
use crate::version::DriverVersion;

/// The entry that is in production.
pub const CURRENT: &str = "current";
/// The entry that is on trial.
pub const CANARY: &str = "canary";
/// The `status` of [`CURRENT`] after a promotion.
pub const STATUS_PRODUCTION: &str = "production";
/// The `status` of [`CANARY`] after a promotion.
pub const STATUS_PROMOTED: &str = "promoted";

/// A version matrix that makes sense: it has at least the entry `current`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Matrix {
    /// What stands under `versions`.
    pub entries: BTreeMap<EntryName, Entry>,
}

impl Matrix {
    /// Reads a matrix, or says everything that is wrong with it.
    pub fn parse(text: &str) -> Result<Self, Problems> {
        let tree = tree::parse(text).map_err(|problem| read::plainly(text, vec![problem]))?;
        read::matrix(&tree).map_err(|problems| read::plainly(text, problems))
    }

    /// The entries that list this driver version, in order of their names; `None` if it is in none of them.
    pub fn allows(&self, version: &DriverVersion) -> Option<Vec<&EntryName>> {
        let lists = |entry: &Entry| entry.driver.as_ref() == Some(version);
        let names: Vec<&EntryName> =
            self.entries.iter().filter(|(_, entry)| lists(entry)).map(|(name, _)| name).collect();
        (!names.is_empty()).then_some(names)
    }

    /// What is in production.
    pub fn current(&self) -> Option<&Entry> {
        self.entries.get(CURRENT)
    }

    /// What is on trial.
    pub fn canary(&self) -> Option<&Entry> {
        self.entries.get(CANARY)
    }
}

/// Versions that belong together. What is not stated is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// The GPU Operator.
    pub gpu_operator: Option<Release>,
    /// The Network Operator.
    pub network_operator: Option<Release>,
    /// The GPU driver.
    pub driver: Option<DriverVersion>,
    /// The CUDA version that the driver offers.
    pub cuda: Option<Release>,
    /// The network adapters' firmware.
    pub firmware: Option<Release>,
    /// The SR-IOV Network Operator.
    pub sriov: Option<Release>,
    /// OpenShift.
    pub openshift: Option<Release>,
    /// What is thought of it: `production`, `testing`, …
    pub status: Option<String>,
    /// Fields of the team's own, as text. Nothing compares them with the cluster.
    pub extra: BTreeMap<String, String>,
}

impl Entry {
    /// A documented field as it was written.
    pub fn text(&self, field: Field) -> Option<String> {
        let release = |release: &Option<Release>| release.as_ref().map(ToString::to_string);
        match field {
            Field::GpuOperator => release(&self.gpu_operator),
            Field::NetworkOperator => release(&self.network_operator),
            Field::Driver => self.driver.as_ref().map(ToString::to_string),
            Field::Cuda => release(&self.cuda),
            Field::Firmware => release(&self.firmware),
            Field::Sriov => release(&self.sriov),
            Field::Openshift => release(&self.openshift),
            Field::Status => self.status.clone(),
        }
    }

    /// Everything that is stated: the documented fields in their order, then the others.
    pub fn stated(&self) -> Vec<(&str, String)> {
        let documented = Field::ALL.into_iter().filter_map(|field| Some((field.key(), self.text(field)?)));
        let extra = self.extra.iter().map(|(key, text)| (key.as_str(), text.clone()));
        documented.chain(extra).collect()
    }

    /// The documented fields that are not stated.
    pub fn unstated(&self) -> impl Iterator<Item = Field> {
        Field::ALL.into_iter().filter(|field| self.text(*field).is_none())
    }
}

/// The documented fields of an entry, in the order of the document.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Field {
    /// `gpu_operator`
    GpuOperator,
    /// `network_operator`
    NetworkOperator,
    /// `driver`
    Driver,
    /// `cuda`
    Cuda,
    /// `firmware`
    Firmware,
    /// `sriov`
    Sriov,
    /// `openshift`
    Openshift,
    /// `status`
    Status,
}

impl Field {
    /// All of them.
    pub const ALL: [Field; 8] = [
        Field::GpuOperator,
        Field::NetworkOperator,
        Field::Driver,
        Field::Cuda,
        Field::Firmware,
        Field::Sriov,
        Field::Openshift,
        Field::Status,
    ];

    /// The key in the file.
    pub fn key(self) -> &'static str {
        match self {
            Field::GpuOperator => "gpu_operator",
            Field::NetworkOperator => "network_operator",
            Field::Driver => "driver",
            Field::Cuda => "cuda",
            Field::Firmware => "firmware",
            Field::Sriov => "sriov",
            Field::Openshift => "openshift",
            Field::Status => "status",
        }
    }

    /// The field of a key, if it is a documented one.
    pub fn of_key(key: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|field| field.key() == key)
    }
}

impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.key())
    }
}
