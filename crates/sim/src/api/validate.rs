//! Whether a custom resource's values are what its schema allows, and the sentence that says where they are not.
//!
//! Messages follow the real server's, word for word where tests or people read them. CEL rules
//! (`x-kubernetes-validations`) are not evaluated here: the conformance runs on a real API server cover them.

use super::kinds::Kind;
use super::pattern::Pattern;
use super::reply::Failure;
use http::StatusCode;
use serde_json::{Value, json};

/// One field that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Cause {
    field: String,
    reason: &'static str,
    message: String,
}

impl Cause {
    pub(super) fn required(field: &str, why: &str) -> Self {
        let message =
            if why.is_empty() { "Required value".to_owned() } else { format!("Required value: {why}") };
        Self { field: field.to_owned(), reason: "FieldValueRequired", message }
    }

    pub(super) fn invalid(field: &str, shown: &str, why: &str) -> Self {
        Self {
            field: field.to_owned(),
            reason: "FieldValueInvalid",
            message: format!("Invalid value: {shown}: {why}"),
        }
    }

    pub(super) fn forbidden(field: &str, why: &str) -> Self {
        let message = format!("Forbidden: {why}");
        Self { field: field.to_owned(), reason: "FieldValueForbidden", message }
    }

    fn unsupported(field: &str, value: &Value, allowed: &[Value]) -> Self {
        let allowed: Vec<String> = allowed.iter().map(ToString::to_string).collect();
        let message = format!("Unsupported value: {value}: supported values: {}", allowed.join(", "));
        Self { field: field.to_owned(), reason: "FieldValueNotSupported", message }
    }
}

/// 422, with every cause in the message and in the details.
pub(super) fn invalid(kind: &Kind, name: &str, causes: &[Cause]) -> Failure {
    invalid_as(kind, &kind.kind, name, causes)
}

/// The same about something that is not called by its kind.
pub(super) fn invalid_as(kind: &Kind, called: &str, name: &str, causes: &[Cause]) -> Failure {
    let lines: Vec<String> =
        causes.iter().map(|cause| format!("{}: {}", cause.field, cause.message)).collect();
    let all = if let [only] = lines.as_slice() { only.clone() } else { format!("[{}]", lines.join(", ")) };
    let details: Vec<Value> = causes
        .iter()
        .map(|Cause { field, reason, message }| json!({"reason": reason, "message": message, "field": field}))
        .collect();
    let group = if kind.group.is_empty() { String::new() } else { format!(".{}", kind.group) };
    let message = format!("{called}{group} \"{name}\" is invalid: {all}");
    let mut about = json!({"kind": called, "causes": details});
    for (field, text) in [("name", name), ("group", &kind.group)] {
        if !text.is_empty() {
            about[field] = text.into();
        }
    }
    Failure::new(StatusCode::UNPROCESSABLE_ENTITY, "Invalid", message).with_details(about)
}

/// An object that is wrong in itself is not put to the rules of its schema, and that is said too.
pub(super) fn with_unchecked_rules(mut causes: Vec<Cause>, schema: &Value) -> Vec<Cause> {
    let blocks = |cause: &Cause| !matches!(cause.reason, "FieldValueInvalid" | "FieldValueForbidden");
    if causes.iter().any(blocks) && has_rules(schema) {
        let why = "some validation rules were not checked because the object was invalid; correct the existing \
                   errors to complete validation";
        causes.push(Cause::invalid("<nil>", "null", why));
    }
    causes
}

fn has_rules(schema: &Value) -> bool {
    match schema {
        Value::Object(fields) => {
            fields.contains_key("x-kubernetes-validations") || fields.values().any(has_rules)
        }
        Value::Array(items) => items.iter().any(has_rules),
        _ => false,
    }
}

/// What is wrong with an object's name: all of them are DNS names, and those of namespaces one label of one.
pub(super) fn name(name: &str, is_label: bool) -> Option<Cause> {
    let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let fits = |label: &str| {
        let bytes = label.as_bytes();
        bytes.first().copied().is_some_and(is_inner)
            && bytes.last().copied().is_some_and(is_inner)
            && bytes.iter().all(|byte| is_inner(*byte) || *byte == b'-')
    };
    let is_right = if is_label { fits(name) } else { name.split('.').all(fits) };
    let why = if is_label { NOT_A_LABEL } else { NOT_A_SUBDOMAIN };
    (!is_right).then(|| Cause::invalid("metadata.name", &Value::from(name).to_string(), why))
}

const NOT_A_LABEL: &str = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', \
    and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for \
    validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')";

const NOT_A_SUBDOMAIN: &str = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, \
    '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for \
    validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')";

/// Everything that is wrong with an object.
pub(super) fn check(object: &Value, schema: &Value) -> Vec<Cause> {
    let mut causes = Vec::new();
    let at_root = |name: &str| matches!(name, "apiVersion" | "kind" | "metadata");
    for field in required(schema).filter(|field| !at_root(field) && object.get(field).is_none()) {
        causes.push(Cause::required(field, ""));
    }
    for (name, value) in object.as_object().into_iter().flatten().filter(|(name, _)| !at_root(name)) {
        let schema = &schema["properties"][name.as_str()];
        check_value(value, schema, name, &mut causes);
    }
    causes
}

fn required(schema: &Value) -> impl Iterator<Item = &str> {
    schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str)
}

fn check_value(value: &Value, schema: &Value, path: &str, causes: &mut Vec<Cause>) {
    if value.is_null() && schema["nullable"] == true {
        return;
    }
    if let Some(cause) = wrong_type(value, schema, path) {
        causes.push(cause);
        return;
    }
    if let Some(allowed) = schema["enum"].as_array().filter(|allowed| !allowed.contains(value)) {
        causes.push(Cause::unsupported(path, value, allowed));
    }
    match value {
        Value::Number(_) => check_bounds(value, schema, path, causes),
        Value::String(text) => check_text(text, schema, path, causes),
        Value::Array(items) => check_items(items, schema, path, causes),
        Value::Object(_) => check_fields(value, schema, path, causes),
        _ => {}
    }
    check_alternatives(value, schema, path, causes);
}

fn wrong_type(value: &Value, schema: &Value, path: &str) -> Option<Cause> {
    let is_whole =
        value.is_i64() || value.is_u64() || value.as_f64().is_some_and(|number| number.fract() == 0.0);
    let (fits, wanted) = match schema["type"].as_str() {
        _ if schema["x-kubernetes-int-or-string"] == true => {
            (is_whole || value.is_string(), "integer,string")
        }
        Some("integer") => (is_whole, "integer"),
        Some("number") => (value.is_number(), "number"),
        Some("string") => (value.is_string(), "string"),
        Some("boolean") => (value.is_boolean(), "boolean"),
        Some("array") => (value.is_array(), "array"),
        Some("object") => (value.is_object(), "object"),
        _ => (true, ""),
    };
    let got = format!("\"{}\"", type_name(value));
    (!fits).then(|| Cause {
        reason: "FieldValueTypeInvalid",
        ..Cause::invalid(path, &got, &format!("{path} in body must be of type {wanted}: {got}"))
    })
}

fn type_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

fn check_bounds(value: &Value, schema: &Value, path: &str, causes: &mut Vec<Cause>) {
    let Some(number) = value.as_f64() else { return };
    let mut refuse = |why: &str, bound: &Value| {
        causes.push(Cause::invalid(
            path,
            &value.to_string(),
            &format!("{path} in body should be {why} {bound}"),
        ));
    };
    let bound = |name: &str| schema[name].as_f64();
    if let Some(minimum) = bound("minimum") {
        let exclusive = schema["exclusiveMinimum"] == true;
        if number < minimum || (exclusive && number <= minimum) {
            refuse(
                if exclusive { "greater than" } else { "greater than or equal to" },
                &plain(&schema["minimum"]),
            );
        }
    }
    if let Some(maximum) = bound("maximum") {
        let exclusive = schema["exclusiveMaximum"] == true;
        if number > maximum || (exclusive && number >= maximum) {
            refuse(if exclusive { "less than" } else { "less than or equal to" }, &plain(&schema["maximum"]));
        }
    }
}

/// Schemas made from Rust types write `0.0` where people read `0`.
fn plain(bound: &Value) -> Value {
    #[expect(clippy::cast_possible_truncation, reason = "checked to be whole, and bounds are small")]
    match bound.as_f64() {
        Some(number) if number.fract() == 0.0 && number.abs() < 1e15 => json!(number as i64),
        _ => bound.clone(),
    }
}

fn check_text(text: &str, schema: &Value, path: &str, causes: &mut Vec<Cause>) {
    let length = text.chars().count() as u64;
    let shown = Value::from(text).to_string();
    if let Some(minimum) = schema["minLength"].as_u64().filter(|minimum| length < *minimum) {
        causes.push(Cause::invalid(
            path,
            &shown,
            &format!("{path} in body should be at least {minimum} chars long"),
        ));
    }
    if let Some(maximum) = schema["maxLength"].as_u64().filter(|maximum| length > *maximum) {
        let message = format!("Too long: may not be more than {maximum} bytes");
        causes.push(Cause { field: path.to_owned(), reason: "FieldValueTooLong", message });
    }
    if schema["format"] == "date-time" && text.parse::<jiff::Timestamp>().is_err() {
        let why = format!("{path} in body must be of type date-time: {shown}");
        causes.push(Cause { reason: "FieldValueTypeInvalid", ..Cause::invalid(path, &shown, &why) });
    }
    if let Some(pattern) = schema["pattern"].as_str()
        && !Pattern::parse(pattern).is_found_in(text)
    {
        causes.push(Cause::invalid(path, &shown, &format!("{path} in body should match '{pattern}'")));
    }
}

fn check_items(items: &[Value], schema: &Value, path: &str, causes: &mut Vec<Cause>) {
    let count = items.len() as u64;
    if let Some(minimum) = schema["minItems"].as_u64().filter(|minimum| count < *minimum) {
        causes.push(Cause::invalid(
            path,
            &count.to_string(),
            &format!("{path} in body should have at least {minimum} items"),
        ));
    }
    if let Some(maximum) = schema["maxItems"].as_u64().filter(|maximum| count > *maximum) {
        let message = format!("Too many: {count}: must have at most {maximum} items");
        causes.push(Cause { field: path.to_owned(), reason: "FieldValueTooMany", message });
    }
    for (index, item) in items.iter().enumerate() {
        check_value(item, &schema["items"], &format!("{path}[{index}]"), causes);
    }
}

fn check_fields(value: &Value, schema: &Value, path: &str, causes: &mut Vec<Cause>) {
    for field in required(schema).filter(|field| value.get(field).is_none()) {
        causes.push(Cause::required(&format!("{path}.{field}"), ""));
    }
    for (name, field) in value.as_object().into_iter().flatten() {
        let named = &schema["properties"][name.as_str()];
        let schema = if named.is_null() { &schema["additionalProperties"] } else { named };
        check_value(field, schema, &format!("{path}.{name}"), causes);
    }
}

fn check_alternatives(value: &Value, schema: &Value, path: &str, causes: &mut Vec<Cause>) {
    let fits = |schema: &Value| {
        let mut causes = Vec::new();
        check_value(value, schema, path, &mut causes);
        causes.is_empty()
    };
    let count = |name: &str| {
        schema[name].as_array().map(|all| (all.iter().filter(|one| fits(one)).count(), all.len()))
    };
    let mut refuse = |what: &str| {
        let shown = if value.is_object() || value.is_array() {
            format!("\"{}\"", type_name(value))
        } else {
            value.to_string()
        };
        causes.push(Cause::invalid(path, &shown, &format!("{path} in body must validate {what}")));
    };
    if count("oneOf").is_some_and(|(fitting, _)| fitting != 1) {
        refuse("one and only one schema (oneOf)");
    }
    if count("anyOf").is_some_and(|(fitting, _)| fitting == 0) {
        refuse("at least one schema (anyOf)");
    }
    if count("allOf").is_some_and(|(fitting, all)| fitting < all) {
        refuse("all the schemas (allOf)");
    }
    if schema["not"].is_object() && fits(&schema["not"]) {
        refuse("not one of the schemas (not)");
    }
}
