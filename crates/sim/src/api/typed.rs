//! Whether a configuration of a custom resource can be applied at all: apply needs to know the type of each field,
//! so it refuses what an ordinary write would prune or validate.

use super::call::Call;
use super::reply::Failure;
use serde_json::Value;

/// Refuses the first field that the schema does not have, or has with another type.
pub(super) fn check(call: &Call, config: &Value) -> Result<(), Failure> {
    let schema = call.kind.version(&call.info.version).and_then(|version| version.schema.as_ref());
    let Some(schema) = schema else { return Ok(()) };
    for (name, value) in config.as_object().into_iter().flatten() {
        if matches!(name.as_str(), "apiVersion" | "kind" | "metadata") {
            continue;
        }
        let found = fault(value, &schema["properties"][name.as_str()], &format!(".{name}"));
        if let Some(fault) = found {
            let meta = |field: &str| config["metadata"][field].as_str().unwrap_or_default();
            let (namespace, name) = (meta("namespace"), meta("name"));
            let (version, kind) = (call.info.api_version(), &call.kind.kind);
            return Err(Failure::internal(format!(
                "failed to create typed patch object ({namespace}/{name}; {version}, Kind={kind}): {fault}"
            )));
        }
    }
    Ok(())
}

fn fault(value: &Value, schema: &Value, path: &str) -> Option<String> {
    if schema.is_null() {
        return Some(format!("{path}: field not declared in schema"));
    }
    let wrong = |wanted: &str| {
        Some(format!("{path}: expected {wanted}, got &value.valueUnstructured{{Value:{value}}}"))
    };
    if schema["x-kubernetes-int-or-string"] == true || value.is_null() {
        return None;
    }
    match (schema["type"].as_str(), value) {
        (Some("string"), value) if !value.is_string() => wrong("string"),
        (Some("boolean"), value) if !value.is_boolean() => wrong("boolean"),
        (Some("integer" | "number"), value) if !value.is_number() => wrong("numeric (int or float)"),
        (Some("array"), value) if !value.is_array() => wrong("list"),
        (Some("object"), value) if !value.is_object() => wrong("map"),
        (_, Value::Array(items)) => {
            let mut items = items.iter().enumerate();
            items.find_map(|(index, item)| fault(item, &schema["items"], &format!("{path}[{index}]")))
        }
        (_, Value::Object(fields)) if schema["x-kubernetes-preserve-unknown-fields"] != true => {
            fields.iter().find_map(|(name, field)| {
                let named = &schema["properties"][name.as_str()];
                let schema = if named.is_null() { &schema["additionalProperties"] } else { named };
                fault(field, schema, &format!("{path}.{name}"))
            })
        }
        _ => None,
    }
}
