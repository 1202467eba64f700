//! ControllerRevisions of a DaemonSet: which revision its template is, as the real controller numbers them.

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::apps::v1::{ControllerRevision, DaemonSet};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use kube::{Resource, ResourceExt};
use serde_json::{Value, json};

use super::object::{REVISION_HASH, hash_name};

/// What to do so that the newest revision is the DaemonSet's template.
#[derive(Debug)]
pub(super) enum Step {
    /// Nothing; this is the hash.
    Current(String),
    /// An earlier revision has the same template: it becomes the newest again.
    Renumber(Arc<ControllerRevision>, i64),
    /// There is none yet.
    Create(Box<ControllerRevision>),
}

/// `known` are the revisions the DaemonSet owns.
pub(super) fn step(set: &DaemonSet, known: &[Arc<ControllerRevision>]) -> Step {
    let data = template_patch(set);
    let newest = known.iter().map(|revision| number_of(revision)).max().unwrap_or(0);
    match known.iter().find(|revision| revision.data.0 == data) {
        Some(equal) if number_of(equal) == newest => Step::Current(hash_of(equal)),
        Some(equal) => Step::Renumber(equal.clone(), newest + 1),
        None => Step::Create(Box::new(create(set, data, newest + 1))),
    }
}

/// Old revisions beyond the history limit that no pod has.
pub(super) fn surplus(
    set: &DaemonSet,
    known: &[Arc<ControllerRevision>],
    used: &BTreeSet<String>,
) -> Vec<Arc<ControllerRevision>> {
    let limit = set.spec.revision_history_limit.unwrap_or(10);
    let mut spare: Vec<_> =
        known.iter().filter(|revision| !used.contains(&hash_of(revision))).cloned().collect();
    spare.sort_by_key(|revision| number_of(revision));
    let excess = spare.len().saturating_sub(usize::try_from(limit).unwrap_or(0));
    spare.truncate(excess);
    spare
}

fn number_of(revision: &ControllerRevision) -> i64 {
    revision.revision.unwrap_or(0)
}

pub(super) fn hash_of(revision: &ControllerRevision) -> String {
    revision.labels().get(REVISION_HASH).cloned().unwrap_or_default()
}

fn template_patch(set: &DaemonSet) -> Value {
    let mut template = serde_json::to_value(&set.spec.template).unwrap_or_default();
    if let Some(template) = template.as_object_mut() {
        template.insert("$patch".into(), json!("replace"));
    }
    json!({"spec": {"template": template}})
}

fn create(set: &DaemonSet, data: Value, number: i64) -> ControllerRevision {
    let hash = hash_name(&data);
    let template_labels = set.spec.template.metadata.as_ref().and_then(|metadata| metadata.labels.clone());
    let mut labels = template_labels.unwrap_or_default();
    labels.insert(REVISION_HASH.into(), hash.clone());
    let metadata = ObjectMeta {
        name: Some(format!("{}-{hash}", set.name_any())),
        namespace: set.namespace(),
        labels: Some(labels),
        owner_references: set.controller_owner_ref(&()).map(|reference| vec![reference]),
        ..ObjectMeta::default()
    };
    ControllerRevision { metadata, data: RawExtension(data), revision: Some(number) }
}
