//! A CRD's schema at work: fields that it does not name are dropped, defaults are filled in.
//!
//! In comes an object and its `openAPIV3Schema`; the object is changed in place. Whether the values are right is
//! `validate.rs`.

use serde_json::{Map, Value};

/// Drops what the schema does not name; answers with the paths that went.
pub(super) fn prune(object: &mut Value, schema: &Value) -> Vec<String> {
    let mut dropped = Vec::new();
    let Some(fields) = object.as_object_mut() else { return dropped };
    if schema["x-kubernetes-preserve-unknown-fields"] == true {
        return dropped;
    }
    // apiVersion, kind and metadata belong to every object, whatever the schema says about them.
    let known = |name: &str| {
        matches!(name, "apiVersion" | "kind" | "metadata") || !schema["properties"][name].is_null()
    };
    fields.retain(|name, _| known(name) || note(&mut dropped, "", name));
    for (name, value) in
        fields.iter_mut().filter(|(name, _)| !matches!(name.as_str(), "apiVersion" | "kind" | "metadata"))
    {
        prune_value(value, &schema["properties"][name.as_str()], name, &mut dropped);
    }
    dropped
}

/// Remembers a dropped field; false, so that it can end a `retain`.
fn note(dropped: &mut Vec<String>, path: &str, name: &str) -> bool {
    dropped.push(if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") });
    false
}

fn prune_value(value: &mut Value, schema: &Value, path: &str, dropped: &mut Vec<String>) {
    match value {
        Value::Object(fields) => prune_fields(fields, schema, path, dropped),
        Value::Array(items) => {
            for (index, item) in items.iter_mut().enumerate() {
                prune_value(item, &schema["items"], &format!("{path}[{index}]"), dropped);
            }
        }
        _ => {}
    }
}

fn prune_fields(fields: &mut Map<String, Value>, schema: &Value, path: &str, dropped: &mut Vec<String>) {
    let properties = &schema["properties"];
    let more = &schema["additionalProperties"];
    let keeps_all = schema["x-kubernetes-preserve-unknown-fields"] == true
        || schema["x-kubernetes-embedded-resource"] == true
        || *more == true;
    let of = |name: &str| {
        let named = &properties[name];
        if named.is_null() && more.is_object() { more } else { named }
    };
    fields.retain(|name, _| keeps_all || !of(name).is_null() || note(dropped, path, name));
    // Below an unknown but preserved field nothing is known, so nothing is dropped.
    for (name, value) in fields.iter_mut().filter(|(name, _)| !of(name).is_null()) {
        prune_value(value, of(name), &format!("{path}.{name}"), dropped);
    }
}

/// Sets the defaults of absent fields, outermost first: a default may itself have defaults inside.
pub(super) fn fill_defaults(value: &mut Value, schema: &Value) {
    match value {
        Value::Object(fields) => {
            for (name, schema) in schema["properties"].as_object().into_iter().flatten() {
                fill_field(fields, name, schema);
            }
            let more = &schema["additionalProperties"];
            let named = |name: &str| !schema["properties"][name].is_null();
            if more.is_object() {
                fields
                    .iter_mut()
                    .filter(|(name, _)| !named(name))
                    .for_each(|(_, value)| fill_defaults(value, more));
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| fill_defaults(item, &schema["items"])),
        _ => {}
    }
}

fn fill_field(fields: &mut Map<String, Value>, name: &str, schema: &Value) {
    let Some(default) = schema.get("default") else {
        if let Some(value) = fields.get_mut(name) {
            fill_defaults(value, schema);
        }
        return;
    };
    // A null where null is not allowed counts as absent, but only if there is a default for it.
    if fields.get(name).is_none_or(|value| value.is_null() && schema["nullable"] != true) {
        fields.insert(name.to_owned(), default.clone());
    }
    if let Some(value) = fields.get_mut(name) {
        fill_defaults(value, schema);
    }
}
