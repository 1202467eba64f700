//! Deployments: one ReplicaSet per template; the newest grows at once, older ones shrink as it becomes available.

use std::sync::Arc;

use k8s_openapi::api::apps::v1::{
    Deployment, DeploymentCondition, DeploymentStatus, ReplicaSet, ReplicaSetSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Resource, ResourceExt};
use serde_json::json;

use super::cache::Key;
use super::clock::Clock;
use super::manager::Manager;
use super::object::{hash_name, is_terminating, value};
use super::replica_set::replicas;
use super::way::Way;
use super::world::World;
use super::write::Write;

const TEMPLATE_HASH: &str = "pod-template-hash";

/// Makes or scales `ReplicaSet`s, and reports.
pub(super) fn look(way: &Way, world: &World, key: &Key, clock: &Clock) -> Vec<Write<Manager>> {
    let Some(deployment) = world.deployments.cache.get(key).filter(|found| !is_terminating(found.as_ref()))
    else {
        return Vec::new();
    };
    let spec = &deployment.spec;
    let hash = hash_name(&spec.template);
    let owned = world.replica_sets_of.get(deployment.metadata.uid.as_deref().unwrap_or_default());
    let (new, old): (Vec<_>, Vec<_>) = owned
        .filter_map(|key| world.replica_sets.cache.get(key))
        .partition(|set| value(set.metadata.labels.as_ref(), TEMPLATE_HASH) == Some(hash.as_str()));
    let wanted = spec.replicas.unwrap_or(1);
    let Some(new) = new.first() else {
        return vec![Write::create(way, new_replica_set(deployment, &hash, wanted))];
    };
    let mut writes = Vec::new();
    writes.extend(scale(way, new, wanted));
    let mut keep = (wanted - available(new)).max(0);
    for set in &old {
        let share = replicas(set).min(keep);
        keep -= share;
        writes.extend(scale(way, set, share));
    }
    let status = status(deployment, new, &old, wanted, clock);
    if deployment.status.as_ref() != Some(&status) {
        writes.push(Write::status(way, deployment.as_ref(), &status));
    }
    writes
}

fn scale(way: &Way, set: &Arc<ReplicaSet>, wanted: i32) -> Option<Write<Manager>> {
    (replicas(set) != wanted).then(|| Write::patch(way, set.as_ref(), json!({"spec": {"replicas": wanted}})))
}

fn available(set: &ReplicaSet) -> i32 {
    set.status.as_ref().and_then(|status| status.available_replicas).unwrap_or(0)
}

fn new_replica_set(deployment: &Deployment, hash: &str, wanted: i32) -> ReplicaSet {
    let spec = deployment.spec.clone();
    let (mut template, mut selector) = (spec.template, spec.selector);
    let labels = template.metadata.get_or_insert_default().labels.get_or_insert_default();
    labels.insert(TEMPLATE_HASH.into(), hash.to_owned());
    let labels = labels.clone();
    selector.match_labels.get_or_insert_default().insert(TEMPLATE_HASH.into(), hash.to_owned());
    let metadata = ObjectMeta {
        name: Some(format!("{}-{hash}", deployment.name_any())),
        namespace: deployment.namespace(),
        labels: Some(labels),
        owner_references: deployment.controller_owner_ref(&()).map(|reference| vec![reference]),
        ..ObjectMeta::default()
    };
    let spec = ReplicaSetSpec {
        replicas: Some(wanted),
        selector,
        template: Some(template),
        ..ReplicaSetSpec::default()
    };
    ReplicaSet { metadata, spec, status: None }
}

fn status(
    deployment: &Deployment,
    new: &ReplicaSet,
    old: &[&Arc<ReplicaSet>],
    wanted: i32,
    clock: &Clock,
) -> DeploymentStatus {
    let present = |set: &ReplicaSet| set.status.as_ref().map_or(0, |status| status.replicas);
    let ready = available(new) + old.iter().map(|set| available(set)).sum::<i32>();
    let known = deployment.status.as_ref();
    // At the default maxUnavailable of a quarter.
    let verdict = if ready >= wanted - wanted / 4 { "True" } else { "False" };
    let before = known
        .and_then(|status| {
            status
                .conditions
                .as_ref()?
                .iter()
                .find(|condition| condition.type_.as_deref() == Some("Available"))
        })
        .filter(|condition| condition.status.as_deref() == Some(verdict))
        .cloned();
    let condition = before.unwrap_or_else(|| DeploymentCondition {
        type_: Some("Available".into()),
        status: Some(verdict.into()),
        reason: Some(
            if verdict == "True" { "MinimumReplicasAvailable" } else { "MinimumReplicasUnavailable" }.into(),
        ),
        last_transition_time: Some(clock.now()),
        last_update_time: Some(clock.now()),
        ..DeploymentCondition::default()
    });
    DeploymentStatus {
        observed_generation: deployment.metadata.generation,
        replicas: Some(present(new) + old.iter().map(|set| present(set)).sum::<i32>()),
        updated_replicas: Some(present(new)),
        ready_replicas: Some(ready),
        available_replicas: Some(ready),
        unavailable_replicas: Some((wanted - ready).max(0)),
        conditions: Some(vec![condition]),
        ..DeploymentStatus::default()
    }
}
