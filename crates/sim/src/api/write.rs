//! Create and update: from what a client sent to what is stored.
//!
//! The server's own fields (uid, creation time, generation, …) are never the client's to set, `status` and the
//! rest are written through different doors, a stale resourceVersion is refused and a write that changes nothing
//! is not a write.

use super::call::Call;
use super::kinds::{DEFINITIONS, Kind, Trait};
use super::reply::Failure;
use super::store::{Name, Object, Store};
use super::{apply, checks, crd, defaults, dependents, schema, validate};
use http::StatusCode;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Set by the server; an update keeps what is stored.
const SERVER_FIELDS: &[&str] = &[
    "uid",
    "creationTimestamp",
    "name",
    "namespace",
    "generation",
    "generateName",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "resourceVersion",
];

/// Stores a new object.
pub(super) fn create(store: &mut Store, call: &Call, mut object: Value) -> Result<Arc<Object>, Failure> {
    if !store.dry_run && !object["metadata"]["resourceVersion"].as_str().unwrap_or_default().is_empty() {
        return Err(Failure::internal("resourceVersion should not be set on objects to be created"));
    }
    if call.kind.has(Trait::Namespaced) && call.info.namespace.is_empty() {
        return Err(Failure::bad_request("an empty namespace may not be set during creation"));
    }
    let name = choose_name(store, call, &object)?;
    checks::affinity(call, &name.name, &object)?;
    stamp(store, call, &mut object, &name);
    if call.kind.has(Trait::Status) {
        let status = defaults::initial_status(&call.kind.kind, object["status"].take());
        set(&mut object, "status", status);
    }
    admit(call, &mut object)?;
    if call.resource == DEFINITIONS {
        crd::establish(store, &mut object);
    }
    if let Some(there) = store.table(&call.resource)?.objects.get(&name) {
        return Err(Failure::already_exists(&call.resource, &name.name, there.is_deleting()));
    }
    let created = store.put(&call.resource, name, object)?;
    after_write(store, call, &created);
    Ok(created)
}

/// PUT: in place of what is there, or as something new where the kind allows it.
pub(super) fn replace(
    store: &mut Store,
    call: &Call,
    mut object: Value,
) -> Result<(StatusCode, Arc<Object>), Failure> {
    match store.get(&call.resource, &call.name()) {
        Ok(before) => Ok((StatusCode::OK, update(store, call, &before, object)?)),
        Err(_) if call.kind.has(Trait::CreateOnUpdate) && call.subresource().is_empty() => {
            let uid = object["metadata"]["uid"].as_str().unwrap_or_default();
            if !uid.is_empty() {
                return Err(checks::other_object(call, uid, ""));
            }
            checks::version(object["metadata"]["resourceVersion"].as_str().unwrap_or_default())?;
            if !store.dry_run {
                set(&mut object["metadata"], "resourceVersion", Value::Null);
            }
            Ok((StatusCode::CREATED, create(store, call, object)?))
        }
        Err(missing) => Err(missing),
    }
}

/// Stores `next` in place of `before`.
pub(super) fn update(
    store: &mut Store,
    call: &Call,
    before: &Arc<Object>,
    mut next: Value,
) -> Result<Arc<Object>, Failure> {
    checks::preconditions(call, before, &next)?;
    keep_server_fields(before.value(), &mut next);
    keep_other_door(call, before.value(), &mut next);
    checks::finalizers(call, before, &next)?;
    if call.resource == "pods" && call.subresource().is_empty() {
        checks::pod_spec(call, before.value(), &next)?;
    }
    admit(call, &mut next)?;
    if next == *before.value() {
        return Ok(before.clone());
    }
    if call.kind.has(Trait::Generation)
        && call.subresource().is_empty()
        && is_new_generation(&call.kind, before.value(), &next)
    {
        next["metadata"]["generation"] =
            json!(before.value()["metadata"]["generation"].as_i64().unwrap_or(0) + 1);
    }
    let name = call.name();
    if is_finished(&next) {
        store.remove(&call.resource, &name)?;
        after_removal(store, &call.resource, &next)?;
        // The client sees what it sent, not what its going left behind.
        return Ok(Arc::new(Object::unwritten(next)));
    }
    let updated = store.put(&call.resource, name, next)?;
    apply::note_update(store, call, before, &updated)?;
    after_write(store, call, &updated);
    Ok(updated)
}

/// Deleted earlier, and the last finalizer has just gone.
pub(super) fn is_finished(object: &Value) -> bool {
    let meta = &object["metadata"];
    let has_finalizers = meta["finalizers"].as_array().is_some_and(|finalizers| !finalizers.is_empty());
    let grace = meta["deletionGracePeriodSeconds"].as_i64().unwrap_or(0);
    meta["deletionTimestamp"].is_string() && !has_finalizers && grace == 0
}

/// A definition that was written is a resource that exists.
fn after_write(store: &mut Store, call: &Call, written: &Object) {
    if call.resource == DEFINITIONS && !store.dry_run {
        store.register(Kind::from_definition(written.value()));
    }
}

/// A definition that is gone takes its resource along; an owner that waited for this object may go.
pub(super) fn after_removal(store: &mut Store, resource: &str, removed: &Value) -> Result<(), Failure> {
    if store.dry_run {
        return Ok(());
    }
    if resource == DEFINITIONS {
        store.unregister(&Kind::from_definition(removed).resource());
    }
    dependents::release_owners(store, removed)
}

fn choose_name(store: &mut Store, call: &Call, object: &Value) -> Result<Name, Failure> {
    let meta = &object["metadata"];
    if let Some(name) = meta["name"].as_str().filter(|name| !name.is_empty()) {
        // The names of budgets and events are not looked at.
        let is_checked = !matches!(call.kind.kind.as_str(), "PodDisruptionBudget" | "Event");
        let wrong = validate::name(name, call.kind.kind == "Namespace").filter(|_| is_checked);
        return match wrong {
            None => Ok(Name::new(&call.info.namespace, name)),
            Some(cause) => Err(checks::invalid(call, name, cause)),
        };
    }
    let Some(prefix) = meta["generateName"].as_str().filter(|prefix| !prefix.is_empty()) else {
        let cause = validate::Cause::required("metadata.name", "name or generateName is required");
        return Err(checks::invalid(call, "", cause));
    };
    loop {
        let name = Name::new(&call.info.namespace, &format!("{prefix}{}", store.next_suffix()));
        if !store.table(&call.resource)?.objects.contains_key(&name) {
            return Ok(name);
        }
    }
}

/// Writes the fields that only the server sets.
fn stamp(store: &mut Store, call: &Call, object: &mut Value, name: &Name) {
    let (uid, created) = (store.next_uid(), store.clock.stamp());
    let meta = &mut object["metadata"];
    if let Some(meta) = meta.as_object_mut() {
        for field in ["deletionTimestamp", "deletionGracePeriodSeconds", "managedFields", "selfLink"] {
            meta.remove(field);
        }
    }
    meta["name"] = name.name.as_str().into();
    if call.kind.has(Trait::Namespaced) {
        meta["namespace"] = name.namespace.as_str().into();
    }
    if call.kind.has(Trait::Generation) {
        meta["generation"] = json!(1);
    }
    meta["uid"] = uid.into();
    meta["creationTimestamp"] = created;
}

fn keep_server_fields(before: &Value, next: &mut Value) {
    if !next["metadata"].is_object() {
        next["metadata"] = Value::Object(Map::new());
    }
    restore(&before["metadata"], &mut next["metadata"], |field| SERVER_FIELDS.contains(&field));
    restore(before, next, |field| matches!(field, "apiVersion" | "kind"));
    set(&mut next["metadata"], "managedFields", Value::Null);
}

/// Whether the status door leaves labels, annotations and finalizers alone. For most built-in kinds it does not.
pub(super) fn keeps_metadata(kind: &Kind) -> bool {
    kind.is_custom || matches!(kind.kind.as_str(), "ResourceClaim" | "CustomResourceDefinition")
}

/// The status door changes `status`, and metadata where the kind allows it; the main door changes everything else.
fn keep_other_door(call: &Call, before: &Value, next: &mut Value) {
    if call.subresource() == "status" {
        let keeps_metadata = keeps_metadata(&call.kind);
        let status = next["status"].take();
        set(next, "status", status);
        restore(before, next, |field| field != "status" && (keeps_metadata || field != "metadata"));
        if call.kind.kind == "Deployment" {
            set(&mut next["metadata"], "labels", before["metadata"]["labels"].clone());
        }
        if call.kind.kind == "Pod" {
            set(&mut next["metadata"], "ownerReferences", before["metadata"]["ownerReferences"].clone());
        }
    } else if call.kind.has(Trait::Status) {
        set(next, "status", before["status"].clone());
    }
}

/// Puts back what was there, field by field. What is the same is left alone: nearly every status is written with nothing
/// else changed, and copying a whole pod for each took longer than everything else about it.
fn restore(before: &Value, next: &mut Value, of: impl Fn(&str) -> bool) {
    let (Some(before), Some(next)) = (before.as_object(), next.as_object_mut()) else { return };
    next.retain(|field, _| !of(field) || before.contains_key(field));
    for (field, value) in before.iter().filter(|(field, _)| of(field)) {
        if next.get(field) != Some(value) {
            next.insert(field.clone(), value.clone());
        }
    }
}

/// Defaults, pruning and validation.
fn admit(call: &Call, object: &mut Value) -> Result<(), Failure> {
    drop_empty_metadata(&mut object["metadata"]);
    if !call.kind.is_custom {
        check_parts(call, object)?;
        if call.subresource() != "status" {
            defaults::fill_spec(&call.kind.kind, object);
        }
        defaults::fill_zeros(&call.kind.kind, object);
        return Ok(());
    }
    let version = call.kind.version(&call.info.version);
    let Some(schema) = version.and_then(|version| version.schema.as_ref()) else { return Ok(()) };
    let dropped = schema::prune(object, schema);
    if let Some(first) = dropped.first().filter(|_| call.options.text("fieldValidation") == "Strict") {
        return Err(Failure::new(
            StatusCode::BAD_REQUEST,
            "BadRequest",
            format!(
                "{} in version \"{}\" cannot be handled as a {}: strict decoding error: unknown field \"{first}\"",
                call.kind.kind, call.info.version, call.kind.kind
            ),
        ));
    }
    schema::fill_defaults(object, schema);
    let causes = validate::check(object, schema);
    if causes.is_empty() {
        return Ok(());
    }
    let name = object["metadata"]["name"].as_str().unwrap_or_default();
    Err(validate::invalid(&call.kind, name, &validate::with_unchecked_rules(causes, schema)))
}

/// The built-in kinds have no schema here; what the server itself writes into must at least be there to write into.
fn check_parts(call: &Call, object: &Value) -> Result<(), Failure> {
    let odd = |part: &&str| !object[*part].is_null() && !object[*part].is_object();
    let Some(part) = ["spec", "status"].into_iter().find(odd) else { return Ok(()) };
    let Kind { kind, .. } = call.kind.as_ref();
    let version = &call.info.version;
    Err(Failure::bad_request(format!(
        "{kind} in version \"{version}\" cannot be handled as a {kind}: the field {part} is not an object"
    )))
}

/// Go's `omitempty`: an empty map or list in the metadata is the same as none.
fn drop_empty_metadata(meta: &mut Value) {
    let is_empty = |value: &Value| match value {
        Value::Null => true,
        Value::Object(map) => map.is_empty(),
        Value::Array(list) => list.is_empty(),
        _ => false,
    };
    if let Some(meta) = meta.as_object_mut() {
        meta.retain(|_, value| !is_empty(value));
    }
}

/// Whether what is wanted has changed, which for custom resources is anything but metadata and status.
fn is_new_generation(kind: &Kind, before: &Value, next: &Value) -> bool {
    if kind.is_custom {
        let ours = |key: &&String| *key != "metadata" && !(kind.has(Trait::Status) && *key == "status");
        let keys = [before, next].into_iter().filter_map(Value::as_object).flat_map(Map::keys).filter(ours);
        return keys.into_iter().any(|key| before[key.as_str()] != next[key.as_str()]);
    }
    // Deployments are the one kind whose annotations count: `kubectl rollout` keeps its notes there.
    let notes =
        kind.kind == "Deployment" && before["metadata"]["annotations"] != next["metadata"]["annotations"];
    before["spec"] != next["spec"] || notes
}

/// Sets a field; null removes it.
fn set(object: &mut Value, field: &str, value: Value) {
    match (object.as_object_mut(), value) {
        (Some(map), Value::Null) => drop(map.remove(field)),
        (Some(map), value) => drop(map.insert(field.to_owned(), value)),
        (None, _) => {}
    }
}
