//! Server-side apply: who wants which fields.
//!
//! In comes a configuration and the name of its manager. A field that another manager owns with another value
//! is a conflict, unless forced; a field that the manager no longer mentions is removed, unless somebody else
//! still wants it. Ordinary writes take over the fields that they change. Ownership is kept beside the objects,
//! only for objects that were ever applied, and is not shown as `metadata.managedFields`.

use super::call::Call;
use super::lists::{ListRule, Lists, same_item};
use super::reply::Failure;
use super::store::{Name, Object, Store};
use super::write;
use super::{patch, typed};
use http::StatusCode;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

pub(super) const CONTENT_TYPE: &str = "application/apply-patch+yaml";

/// What each manager wants of one object.
pub(super) type Ownership = BTreeMap<Manager, Fields>;

/// The fields of a configuration and the values wanted there.
pub(super) type Fields = BTreeMap<Path, Value>;

type Path = Vec<Step>;

/// A manager is one per name, door and way of writing, as in `managedFields`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Manager {
    name: String,
    subresource: String,
    applies: bool,
}

impl Manager {
    /// As a conflict names it.
    fn named(&self, version: &str) -> String {
        let door = match self.subresource.as_str() {
            "" => String::new(),
            subresource => format!(" with subresource \"{subresource}\""),
        };
        let way = if self.applies { String::new() } else { format!(" using {version}") };
        format!("\"{}\"{door}{way}", self.name)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Step {
    Field(String),
    /// Item of a keyed list, by its keys as JSON.
    Item(String),
    /// Member of a set, as JSON.
    Member(String),
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Field(name) => write!(f, ".{name}"),
            Self::Item(keys) => {
                write!(f, "[{}]", keys.trim_matches(['{', '}']).replace("\":", "\"=").replacen('"', "", 2))
            }
            Self::Member(value) => write!(f, "[={value}]"),
        }
    }
}

fn show(path: &[Step]) -> String {
    path.iter().map(ToString::to_string).collect()
}

/// Creates or changes the object that the call names.
pub(super) fn apply(store: &mut Store, call: &Call) -> Result<(StatusCode, Arc<Object>), Failure> {
    if call.options.text("fieldManager").is_empty() {
        return Err(no_manager());
    }
    if !call.subresource().is_empty() {
        store.get(&call.resource, &call.name())?;
    }
    if call.kind.is_custom {
        typed::check(call, &call.body()?)?;
    }
    let config = call.config(store)?;
    if !config["metadata"]["managedFields"].is_null() {
        return Err(Failure::bad_request("metadata.managedFields must be nil"));
    }
    let name = call.name();
    let manager =
        Manager { name: call.manager.clone(), subresource: call.subresource().to_owned(), applies: true };
    let lists = Lists::of(schema(call));
    let wanted = wanted_fields(call, &config, lists);
    let Some(before) = store.table(&call.resource)?.objects.get(&name).cloned() else {
        return create(store, call, config, (manager, wanted));
    };
    let known = store.table(&call.resource)?.owners.get(&name).cloned();
    let unapplied =
        if known.is_none() { before_first_apply(before.value(), lists) } else { Ownership::new() };
    let mut owners = known.as_ref().unwrap_or(&unapplied).clone();
    take_fields(&mut owners, &manager, &wanted, call)?;
    let mut next = before.value().clone();
    let previous = owners.remove(&manager).unwrap_or_default();
    for path in previous.keys().filter(|path| !wanted.contains_key(*path)) {
        if !owners.values().any(|fields| fields.contains_key(path)) {
            remove(&mut next, path);
        }
    }
    patch::strategic(&mut next, &config, "", lists, patch::Order::NewLast);
    if !wanted.is_empty() {
        owners.insert(manager, wanted);
    }
    let was_noted = *known.as_ref().unwrap_or(&unapplied) == owners;
    let mut updated = write::update(store, call, &before, next)?;
    // Who wants what is a part of the object: a new wish is a write, even if nothing else changes.
    if !was_noted && Arc::ptr_eq(&updated, &before) {
        updated = store.put(&call.resource, name.clone(), before.value().clone())?;
    }
    remember(store, call, name, owners)?;
    Ok((StatusCode::OK, updated))
}

fn no_manager() -> Failure {
    let message =
        "PatchOptions.meta.k8s.io \"\" is invalid: fieldManager: Required value: is required for apply patch";
    let cause = json!({"reason": "FieldValueRequired", "message": "Required value: is required for apply patch", "field": "fieldManager"});
    Failure::new(StatusCode::UNPROCESSABLE_ENTITY, "Invalid", message)
        .with_details(json!({"group": "meta.k8s.io", "kind": "PatchOptions", "causes": [cause]}))
}

fn create(
    store: &mut Store,
    call: &Call,
    config: Value,
    (manager, wanted): (Manager, Fields),
) -> Result<(StatusCode, Arc<Object>), Failure> {
    let created = write::create(store, call, config)?;
    remember(store, call, call.name(), Ownership::from([(manager, wanted)]))?;
    Ok((StatusCode::CREATED, created))
}

fn remember(store: &mut Store, call: &Call, name: Name, owners: Ownership) -> Result<(), Failure> {
    let dry_run = store.dry_run;
    let table = store.table_mut(&call.resource)?;
    if !dry_run && table.objects.contains_key(&name) {
        table.owners.insert(name, owners);
    }
    Ok(())
}

/// An ordinary write takes over the fields that it changed.
pub(super) fn note_update(
    store: &mut Store,
    call: &Call,
    before: &Object,
    after: &Object,
) -> Result<(), Failure> {
    if store.dry_run || call.content_type == CONTENT_TYPE {
        return Ok(());
    }
    let lists = Lists::of(schema(call));
    let Some(owners) = store.table_mut(&call.resource)?.owners.get_mut(&call.name()) else { return Ok(()) };
    let (old, new) = (fields(before.value(), lists), fields(after.value(), lists));
    let changed: Fields = new
        .iter()
        .filter(|(path, value)| old.get(*path) != Some(*value))
        .map(|(p, v)| (p.clone(), v.clone()))
        .collect();
    for owned in owners.values_mut() {
        owned.retain(|path, _| new.contains_key(path) && !changed.contains_key(path));
    }
    let manager =
        Manager { name: call.manager.clone(), subresource: call.subresource().to_owned(), applies: false };
    owners.entry(manager).or_default().extend(changed);
    owners.retain(|_, fields| !fields.is_empty());
    Ok(())
}

fn schema(call: &Call) -> Option<&Value> {
    call.kind.is_custom.then_some(())?;
    Some(
        call.kind
            .version(&call.info.version)
            .and_then(|version| version.schema.as_ref())
            .unwrap_or(&Value::Null),
    )
}

/// Until somebody applies, everything belongs to whoever wrote it before.
fn before_first_apply(object: &Value, lists: Lists<'_>) -> Ownership {
    let manager =
        Manager { name: "before-first-apply".to_owned(), subresource: String::new(), applies: false };
    let mut all = fields(object, lists);
    all.retain(|path, value| !is_initial(path, value));
    Ownership::from([(manager, all)])
}

/// What the server wrote into a new object's status belongs to nobody.
fn is_initial(path: &[Step], value: &Value) -> bool {
    let is_status = matches!(path.first(), Some(Step::Field(name)) if name == "status");
    is_status && (*value == json!(0) || *value == json!("Pending") || *value == json!("Active"))
}

/// Fields behind the other door are ignored, so they are not owned either.
fn wanted_fields(call: &Call, config: &Value, lists: Lists<'_>) -> Fields {
    let mut wanted = fields(config, lists);
    let (status, metadata) = (Step::Field("status".to_owned()), Step::Field("metadata".to_owned()));
    if call.subresource() == "status" {
        let with_metadata = !write::keeps_metadata(&call.kind);
        wanted.retain(|path, _| {
            path.first() == Some(&status) || (with_metadata && path.first() == Some(&metadata))
        });
    } else if call.kind.has(super::kinds::Trait::Status) {
        wanted.retain(|path, _| path.first() != Some(&status));
    }
    wanted
}

/// Refuses, or with `force` takes away, what others own with another value.
fn take_fields(owners: &mut Ownership, me: &Manager, wanted: &Fields, call: &Call) -> Result<(), Failure> {
    let clashes = |fields: &Fields| -> Vec<Path> {
        let differs =
            |(path, value): &(&Path, &Value)| fields.get(*path).is_some_and(|theirs| theirs != *value);
        wanted.iter().filter(differs).map(|(path, _)| path.clone()).collect()
    };
    let others = owners.iter().filter(|(manager, _)| *manager != me);
    let conflicts: Vec<(Manager, Vec<Path>)> = others
        .map(|(manager, fields)| (manager.clone(), clashes(fields)))
        .filter(|(_, paths)| !paths.is_empty())
        .collect();
    if !conflicts.is_empty() && !call.options.flag("force") {
        return Err(conflict(call, &conflicts));
    }
    for (manager, paths) in conflicts {
        if let Some(fields) = owners.get_mut(&manager) {
            fields.retain(|path, _| !paths.contains(path));
        }
    }
    Ok(())
}

fn conflict(call: &Call, conflicts: &[(Manager, Vec<Path>)]) -> Failure {
    let version = call.info.api_version();
    let mut causes = Vec::new();
    let mut lines = Vec::new();
    for (manager, paths) in conflicts {
        let manager = manager.named(&version);
        lines.push(format!("conflicts with {manager}:"));
        for path in paths {
            lines.push(format!("- {}", show(path)));
            causes.push(json!({"reason": "FieldManagerConflict", "message": format!("conflict with {manager}"), "field": show(path)}));
        }
    }
    let message = match causes.as_slice() {
        [only] => {
            let text = |field: &str| only[field].as_str().unwrap_or_default();
            format!("Apply failed with 1 conflict: {}: {}", text("message"), text("field"))
        }
        many => format!("Apply failed with {} conflicts: {}", many.len(), lines.join("\n")),
    };
    Failure::new(StatusCode::CONFLICT, "Conflict", message).with_details(json!({"causes": causes}))
}

/// The fields of an object that somebody may own.
fn fields(object: &Value, lists: Lists<'_>) -> Fields {
    let mut found = Fields::new();
    walk(object, "", lists, &mut Vec::new(), &mut found);
    found.retain(|path, _| !is_server_field(path));
    found
}

fn is_server_field(path: &[Step]) -> bool {
    let named =
        |step: &Step, names: &[&str]| matches!(step, Step::Field(name) if names.contains(&name.as_str()));
    match path {
        [first] => named(first, &["apiVersion", "kind"]),
        [first, second, ..] if named(first, &["metadata"]) => {
            !named(second, &["labels", "annotations", "finalizers", "ownerReferences"])
        }
        _ => false,
    }
}

fn walk(value: &Value, field: &str, lists: Lists<'_>, at: &mut Path, found: &mut Fields) {
    let mut enter = |step: Step, value: &Value, field: &str, lists: Lists<'_>| {
        at.push(step);
        walk(value, field, lists, at, found);
        at.pop();
    };
    match (value, lists.rule(field)) {
        (Value::Object(map), _) if !map.is_empty() && !lists.is_atomic_map(field) => {
            for (key, value) in map {
                enter(Step::Field(key.clone()), value, key, lists.field(key, field.is_empty()));
            }
        }
        (Value::Array(items), ListRule::Keyed(keys)) => {
            for item in items {
                enter(Step::Item(item_keys(item, &keys).to_string()), item, "item", lists.items());
            }
        }
        (Value::Array(items), ListRule::Set) => {
            for item in items {
                enter(Step::Member(item.to_string()), item, "item", lists.items());
            }
        }
        (leaf, _) => {
            found.insert(at.clone(), leaf.clone());
        }
    }
}

fn item_keys(item: &Value, keys: &[&str]) -> Value {
    keys.iter().map(|key| ((*key).to_owned(), item[*key].clone())).collect::<Map<_, _>>().into()
}

/// Removes what is at `path`, and every container that this leaves empty.
fn remove(value: &mut Value, path: &[Step]) {
    let Some((step, rest)) = path.split_first() else { return };
    match (value, step) {
        (Value::Object(map), Step::Field(name)) => {
            let Some(child) = map.get_mut(name) else { return };
            remove(child, rest);
            if rest.is_empty() || is_empty(child) {
                map.remove(name);
            }
        }
        (Value::Array(items), Step::Member(member)) => {
            let Ok(member) = serde_json::from_str::<Value>(member) else { return };
            items.retain(|item| *item != member);
        }
        (Value::Array(items), Step::Item(keys)) => {
            let Ok(Value::Object(keys)) = serde_json::from_str::<Value>(keys) else { return };
            let names: Vec<&str> = keys.keys().map(String::as_str).collect();
            let wanted = Value::Object(keys.clone());
            let Some(at) = items.iter().position(|item| same_item(&names, item, &wanted)) else { return };
            // Every owner of an item owns its keys: when a key goes, nobody wants the item any more.
            if matches!(rest, [Step::Field(name)] if keys.contains_key(name)) {
                items.remove(at);
            } else {
                remove(&mut items[at], rest);
            }
        }
        _ => {}
    }
}

fn is_empty(value: &Value) -> bool {
    value.as_object().is_some_and(Map::is_empty) || value.as_array().is_some_and(Vec::is_empty)
}
