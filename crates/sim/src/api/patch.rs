//! PATCH: four dialects, one update.
//!
//! A patch turns the stored object into the next one; from there on it is an update like any other. Apply
//! (`apply.rs`) is the dialect that also knows who owns which field.

use super::apply;
use super::call::Call;
use super::lists::{ListRule, Lists, same_item};
use super::reply::Failure;
use super::store::{Object, Store};
use super::write;
use http::StatusCode;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Patches the object that the call names; the code is 201 when apply created it.
pub(super) fn patch(store: &mut Store, call: &Call) -> Result<(StatusCode, Arc<Object>), Failure> {
    if call.content_type == apply::CONTENT_TYPE {
        return apply::apply(store, call);
    }
    if !is_known(call) {
        return Err(unknown_format(call));
    }
    let before = store.get(&call.resource, &call.name())?;
    let mut next = before.value().clone();
    let body = call.body()?;
    match call.content_type.as_str() {
        "application/merge-patch+json" => json_patch::merge(&mut next, &body),
        "application/json-patch+json" => apply_operations(&mut next, body)?,
        _ => strategic(&mut next, &body, "", Lists::BuiltIn, Order::NewFirst),
    }
    if !next.is_object() {
        return Err(Failure::bad_request("the patch does not leave an object"));
    }
    Ok((StatusCode::OK, write::update(store, call, &before, next)?))
}

fn apply_operations(next: &mut Value, body: Value) -> Result<(), Failure> {
    let operations: json_patch::Patch =
        serde_json::from_value(body).map_err(|error| Failure::bad_request(error.to_string()))?;
    json_patch::patch(next, &operations).map_err(|_| {
        let message = "the server rejected our request due to an error in our request";
        Failure::new(StatusCode::UNPROCESSABLE_ENTITY, "Invalid", message).with_details(json!({}))
    })
}

const STRATEGIC: &str = "application/strategic-merge-patch+json";

fn is_known(call: &Call) -> bool {
    match call.content_type.as_str() {
        "application/merge-patch+json" | "application/json-patch+json" => true,
        // Custom resources have no strategic merge: their schema has no merge keys.
        STRATEGIC => !call.kind.is_custom,
        _ => false,
    }
}

fn unknown_format(call: &Call) -> Failure {
    let code = StatusCode::UNSUPPORTED_MEDIA_TYPE;
    if !call.kind.is_custom {
        let message = "415: Unsupported Media Type";
        return Failure::new(code, "UnsupportedMediaType", message).with_details(json!({}));
    }
    let message = "the body of the request was in an unknown format - accepted media types include: \
                   application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml";
    Failure::new(code, "UnsupportedMediaType", message)
}

/// Where a merge puts the items that a list did not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// Before those that the patch does not mention: strategic merge.
    NewFirst,
    /// Behind everything: apply.
    NewLast,
}

/// Merges `patch` into `target`: maps field by field, lists by their rule, `$patch` directives obeyed.
pub(super) fn strategic(target: &mut Value, patch: &Value, field: &str, lists: Lists<'_>, order: Order) {
    match (target, patch) {
        (Value::Object(target), Value::Object(patch))
            if order == Order::NewFirst || !lists.is_atomic_map(field) =>
        {
            merge_maps(target, patch, field.is_empty(), lists, order);
        }
        (Value::Array(target), Value::Array(patch)) => {
            let rule = lists.rule(field);
            let live = if order == Order::NewFirst { target.clone() } else { Vec::new() };
            merge_lists(target, patch, &rule, lists, order);
            if order == Order::NewFirst {
                new_first(target, &live, patch, &rule);
            }
        }
        (target, patch) => {
            *target = patch.clone();
            strip_directives(target);
        }
    }
}

/// The items of the patch in its order; the others before the first of them that they were before already.
fn new_first(merged: &mut Vec<Value>, live: &[Value], patch: &[Value], rule: &ListRule<'_>) {
    let same = |left: &Value, right: &Value| match rule {
        ListRule::Atomic => false,
        ListRule::Keyed(keys) => same_item(keys, left, right),
        ListRule::Set => left == right,
    };
    if *rule == ListRule::Atomic {
        return;
    }
    let place = |list: &[Value], item: &Value| list.iter().position(|other| same(other, item));
    let (mut mine, theirs): (Vec<Value>, Vec<Value>) =
        std::mem::take(merged).into_iter().partition(|item| place(patch, item).is_some());
    mine.sort_by_key(|item| place(patch, item));
    let mut mine = mine.into_iter().peekable();
    for item in theirs {
        let was_before = |next: &Value| match (place(live, &item), place(live, next)) {
            (Some(left), Some(right)) => left < right,
            _ => false,
        };
        while let Some(next) = mine.next_if(|next| !was_before(next)) {
            merged.push(next);
        }
        merged.push(item);
    }
    merged.extend(mine);
}

fn merge_maps(
    target: &mut Map<String, Value>,
    patch: &Map<String, Value>,
    is_root: bool,
    lists: Lists<'_>,
    order: Order,
) {
    if patch.get("$patch").is_some_and(|directive| directive == "replace") {
        target.clear();
    }
    if let Some(Value::Array(kept)) = patch.get("$retainKeys") {
        target.retain(|key, _| kept.iter().any(|kept| kept == key));
    }
    for (key, value) in patch {
        if let Some(list) = key.strip_prefix("$deleteFromPrimitiveList/") {
            delete_members(target.get_mut(list), value);
        }
        if key.starts_with('$') {
            continue;
        }
        // There is nothing to replace or delete in what is not there.
        let is_in_vain = value.get("$patch").is_some() && !target.contains_key(key);
        if value.is_null() || is_in_vain {
            target.remove(key);
        } else {
            strategic(
                target.entry(key.clone()).or_insert(Value::Null),
                value,
                key,
                lists.field(key, is_root),
                order,
            );
        }
    }
}

fn merge_lists(
    target: &mut Vec<Value>,
    patch: &[Value],
    rule: &ListRule<'_>,
    lists: Lists<'_>,
    order: Order,
) {
    match rule {
        ListRule::Atomic => {
            *target = patch.to_vec();
            target.iter_mut().for_each(strip_directives);
        }
        ListRule::Set => {
            for item in patch.iter().filter(|item| !item.is_object()) {
                if !target.contains(item) {
                    target.push(item.clone());
                }
            }
        }
        ListRule::Keyed(keys) => {
            if patch.iter().any(|item| item["$patch"] == "replace") {
                target.clear();
            }
            for item in patch {
                merge_item(target, item, keys, lists, order);
            }
        }
    }
}

fn merge_item(target: &mut Vec<Value>, item: &Value, keys: &[&str], lists: Lists<'_>, order: Order) {
    let at = target.iter().position(|existing| same_item(keys, existing, item));
    match (item["$patch"].as_str(), at) {
        (Some("delete"), Some(at)) => drop(target.remove(at)),
        (Some("delete" | "replace"), None) => {}
        // "item": inside a list there is no root, so `metadata` has no special meaning.
        (_, Some(at)) => strategic(&mut target[at], item, "item", lists.items(), order),
        (_, None) => {
            let mut item = item.clone();
            strip_directives(&mut item);
            target.push(item);
        }
    }
}

fn delete_members(list: Option<&mut Value>, members: &Value) {
    if let (Some(Value::Array(list)), Value::Array(members)) = (list, members) {
        list.retain(|item| !members.contains(item));
    }
}

fn strip_directives(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.retain(|key, value| !key.starts_with('$') && !value.is_null());
            map.values_mut().for_each(strip_directives);
        }
        Value::Array(list) => {
            list.retain(|item| item.get("$patch").is_none());
            list.iter_mut().for_each(strip_directives);
        }
        _ => {}
    }
}
