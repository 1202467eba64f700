//! What deleting an owner does to its dependents, where it cannot wait for the garbage collector.
//!
//! `Orphan` cuts the references before the owner goes. `Foreground` deletes the dependents and keeps the owner,
//! held by a finalizer, until the last one that blocks it is gone.

use super::call::Call;
use super::delete::{self, DeleteOptions};
use super::kinds::Trait;
use super::reply::Failure;
use super::store::{Name, Object, Store};
use super::write;
use serde_json::{Value, json};
use std::sync::Arc;

const FINALIZER: &str = "foregroundDeletion";

/// Cuts the references to an owner that goes alone.
pub(super) fn orphan(store: &mut Store, owner: &str) -> Result<(), Failure> {
    for (resource, name, object) in dependents_of(store, owner) {
        let mut kept = references(object.value()).to_vec();
        kept.retain(|reference| reference["uid"] != owner);
        let mut next = object.value().clone();
        if let Some(meta) = next["metadata"].as_object_mut() {
            meta.remove("ownerReferences");
            if !kept.is_empty() {
                meta.insert("ownerReferences".to_owned(), kept.into());
            }
        }
        store.put(&resource, name, next)?;
    }
    Ok(())
}

/// Puts the finalizer on an owner that has to wait for dependents.
pub(super) fn hold_owner(store: &Store, owner: &mut Value) {
    let meta = &mut owner["metadata"];
    if dependents_of(store, meta["uid"].as_str().unwrap_or_default()).is_empty() {
        return;
    }
    let mut finalizers = meta["finalizers"].as_array().cloned().unwrap_or_default();
    if !finalizers.iter().any(|finalizer| finalizer == FINALIZER) {
        finalizers.push(json!(FINALIZER));
    }
    meta["finalizers"] = finalizers.into();
}

/// Deletes the dependents of a held owner, and theirs; the last to go releases it.
pub(super) fn delete_all(store: &mut Store, call: &Call, owner: &str) -> Result<(), Failure> {
    for (resource, name, _) in dependents_of(store, owner) {
        // It may have gone with an earlier one, or be on its way because owners go round in a circle.
        if store.get(&resource, &name).is_ok_and(|dependent| !dependent.is_deleting()) {
            let call = call.on(store, &resource, &name)?;
            delete::delete(store, &call, &name, &DeleteOptions::foreground())?;
        }
    }
    Ok(())
}

/// Lets an owner go that has waited for this object, if it was the last.
pub(super) fn release_owners(store: &mut Store, removed: &Value) -> Result<(), Failure> {
    for reference in references(removed) {
        let uid = reference["uid"].as_str().unwrap_or_default();
        let Some((resource, name, owner)) = find_owner(store, removed, reference) else { continue };
        let finalizers = owner.value()["metadata"]["finalizers"].as_array().map_or(&[][..], Vec::as_slice);
        let waits = finalizers.iter().any(|finalizer| finalizer == FINALIZER);
        if !waits || !dependents_of(store, uid).is_empty() {
            continue;
        }
        let kept: Vec<Value> =
            finalizers.iter().filter(|finalizer| *finalizer != FINALIZER).cloned().collect();
        let mut next = owner.value().clone();
        next["metadata"]["finalizers"] = kept.into();
        if write::is_finished(&next) {
            store.remove(&resource, &name)?;
            write::after_removal(store, &resource, &next)?;
        } else {
            store.put(&resource, name, next)?;
        }
    }
    Ok(())
}

fn references(object: &Value) -> &[Value] {
    object["metadata"]["ownerReferences"].as_array().map_or(&[], Vec::as_slice)
}

fn find_owner(store: &Store, dependent: &Value, reference: &Value) -> Option<(String, Name, Arc<Object>)> {
    let (kind, api_version) = (reference["kind"].as_str()?, reference["apiVersion"].as_str()?);
    let group = api_version.split_once('/').map_or("", |(group, _)| group);
    let (resource, table) =
        store.tables.iter().find(|(_, table)| table.kind.kind == kind && table.kind.group == group)?;
    let namespace = dependent["metadata"]["namespace"].as_str().filter(|_| table.kind.has(Trait::Namespaced));
    let name = Name::new(namespace.unwrap_or_default(), reference["name"].as_str()?);
    let owner = table.objects.get(&name).filter(|owner| reference["uid"] == owner.meta("uid"))?;
    Some((resource.clone(), name, owner.clone()))
}

fn dependents_of(store: &Store, owner: &str) -> Vec<(String, Name, Arc<Object>)> {
    let points_here =
        |object: &Object| references(object.value()).iter().any(|reference| reference["uid"] == owner);
    let mut found = Vec::new();
    for (resource, table) in &store.tables {
        let mine = table.objects.iter().filter(|(_, object)| points_here(object));
        found.extend(mine.map(|(name, object)| (resource.clone(), name.clone(), object.clone())));
    }
    found
}
