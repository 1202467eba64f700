//! What changes from one entry to another, field by field.

use std::collections::BTreeMap;

use super::{Entry, Field, Matrix};
use crate::names::EntryName;

/// One field that says something else. A field that is not stated is `None`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldChange {
    /// Its key.
    pub field: String,
    /// What it said.
    pub before: Option<String>,
    /// What it says.
    pub after: Option<String>,
}

/// The fields that differ: the documented ones in their order, then the others. Two ways to write the same version do not
/// differ.
pub fn diff(before: &Entry, after: &Entry) -> Vec<FieldChange> {
    let change = |field: &str, before, after| FieldChange { field: field.to_owned(), before, after };
    let documented = Field::ALL
        .into_iter()
        .filter(|field| differs(before, after, *field))
        .map(|field| change(field.key(), before.text(field), after.text(field)));
    let mut extra: Vec<&String> = before.extra.keys().chain(after.extra.keys()).collect();
    extra.sort();
    extra.dedup();
    let extra = extra
        .into_iter()
        .map(|key| change(key, before.extra.get(key).cloned(), after.extra.get(key).cloned()))
        .filter(|change| change.before != change.after);
    documented.chain(extra).collect()
}

fn differs(a: &Entry, b: &Entry, field: Field) -> bool {
    match field {
        Field::GpuOperator => a.gpu_operator != b.gpu_operator,
        Field::NetworkOperator => a.network_operator != b.network_operator,
        Field::Driver => a.driver != b.driver,
        Field::Cuda => a.cuda != b.cuda,
        Field::Firmware => a.firmware != b.firmware,
        Field::Sriov => a.sriov != b.sriov,
        Field::Openshift => a.openshift != b.openshift,
        Field::Status => a.status != b.status,
    }
}

impl Matrix {
    /// The entries that differ, each with what changes in it; an entry that only one of the two has is all change.
    pub fn changes(&self, after: &Matrix) -> BTreeMap<EntryName, Vec<FieldChange>> {
        let none = Entry::default();
        let names = self.entries.keys().chain(after.entries.keys());
        let change = |name: &EntryName| {
            let entry = |matrix: &Matrix| matrix.entries.get(name).cloned().unwrap_or_else(|| none.clone());
            (name.clone(), diff(&entry(self), &entry(after)))
        };
        names.map(change).filter(|(_, changes)| !changes.is_empty()).collect()
    }
}
