//! What is looked at before an update is taken: does it speak of this object, and may it change what it changes.

use super::call::Call;
use super::kinds::{Kind, Trait};
use super::reply::Failure;
use super::store::Object;
use super::validate;
use serde_json::Value;

/// 422 for one fault outside of the schema.
pub(super) fn invalid(call: &Call, name: &str, cause: validate::Cause) -> Failure {
    let schema = call.kind.version(&call.info.version).and_then(|version| version.schema.as_ref());
    let causes = validate::with_unchecked_rules(vec![cause], schema.unwrap_or(&Value::Null));
    validate::invalid(&call.kind, name, &causes)
}

/// The client means an object of that name which is no longer, or never was.
pub(super) fn other_object(call: &Call, sent: &str, stored: &str) -> Failure {
    let Kind { group, plural, is_custom, .. } = call.kind.as_ref();
    let mut key = vec![if call.options.dry_run() { "" } else { "/registry" }];
    match plural.as_str() {
        // What nodes were called in the beginning.
        "nodes" => key.push("minions"),
        _ if *is_custom => key.extend([group.as_str(), plural.as_str()]),
        _ => key.push(plural),
    }
    key.extend([call.info.namespace.as_str(), &call.info.name].iter().filter(|part| !part.is_empty()));
    let why = format!(
        "StorageError: invalid object, Code: 4, Key: {}, ResourceVersion: 0, AdditionalErrorMsg: Precondition \
         failed: UID in precondition: {sent}, UID in object meta: {stored}",
        key.join("/")
    );
    Failure::conflict(&call.resource, &call.info.name, &why)
}

/// Whether the client speaks of the object that is there, as it is.
pub(super) fn preconditions(call: &Call, before: &Object, next: &Value) -> Result<(), Failure> {
    let sent = |field: &str| next["metadata"][field].as_str().unwrap_or_default();
    let name = before.meta("name");
    let is_other = !sent("uid").is_empty() && sent("uid") != before.meta("uid");
    if is_other && call.info.verb == "update" {
        return Err(other_object(call, sent("uid"), before.meta("uid")));
    }
    match sent("resourceVersion") {
        "" if call.info.verb == "update" && !call.kind.has(Trait::UnconditionalUpdate) => {
            let cause =
                validate::Cause::invalid("metadata.resourceVersion", "0", "must be specified for an update");
            Err(validate::invalid_as(&call.kind, &call.kind.plural, name, &[cause]))
        }
        version if version.is_empty() || version == before.meta("resourceVersion") => {
            // A patch is not a statement about the whole object, so a wrong UID is a change and not a mistake.
            let is_ignored = call.subresource() == "status" && call.kind.is_custom;
            if !is_other || is_ignored {
                return Ok(());
            }
            let shown = Value::from(sent("uid")).to_string();
            let cause = validate::Cause::invalid("metadata.uid", &shown, "field is immutable");
            Err(invalid(call, name, cause))
        }
        version => {
            self::version(version)?;
            let why =
                "the object has been modified; please apply your changes to the latest version and try again";
            Err(Failure::conflict(&call.resource, name, why))
        }
    }
}

/// Nobody may hold on to what is on its way out.
pub(super) fn finalizers(call: &Call, before: &Object, next: &Value) -> Result<(), Failure> {
    if !before.is_deleting() {
        return Ok(());
    }
    let finalizers =
        |object: &Value| object["metadata"]["finalizers"].as_array().cloned().unwrap_or_default();
    let mut new = finalizers(next);
    let old = finalizers(before.value());
    new.retain(|finalizer| !old.contains(finalizer));
    if new.is_empty() {
        return Ok(());
    }
    let mut new: Vec<String> = new.iter().map(ToString::to_string).collect();
    new.sort();
    let why = format!(
        "no new finalizers can be added if the object is being deleted, found new finalizers []string{{{}}}",
        new.join(", ")
    );
    let cause = validate::Cause::forbidden("metadata.finalizers", &why);
    Err(invalid(call, before.meta("name"), cause))
}

/// Versions are numbers, whatever the documentation says.
pub(super) fn version(version: &str) -> Result<(), Failure> {
    if version.is_empty() || version.parse::<u64>().is_ok() {
        return Ok(());
    }
    Err(Failure::internal(format!("strconv.ParseUint: parsing \"{version}\": invalid syntax")))
}

/// What of a pod's spec may change once it is there.
const CHANGEABLE: &[&str] = &[
    "containers",
    "initContainers",
    "activeDeadlineSeconds",
    "tolerations",
    "terminationGracePeriodSeconds",
];

/// A pod does not move, and is not made into another.
pub(super) fn pod_spec(call: &Call, before: &Value, next: &Value) -> Result<(), Failure> {
    if before["spec"] == next["spec"] {
        return Ok(());
    }
    let name = before["metadata"]["name"].as_str().unwrap_or_default();
    let deadline = |pod: &Value| pod["spec"]["activeDeadlineSeconds"].as_i64();
    if deadline(before).is_some() && deadline(next).is_none() {
        let why = "must not update from a positive integer to nil value";
        return Err(invalid(call, name, validate::Cause::invalid("spec.activeDeadlineSeconds", "null", why)));
    }
    let fixed = |pod: &Value| {
        let mut spec = pod["spec"].clone();
        if let Some(spec) = spec.as_object_mut() {
            spec.retain(|field, _| !CHANGEABLE.contains(&field.as_str()));
        }
        spec
    };
    if fixed(before) == fixed(next) {
        return Ok(());
    }
    let why = "pod updates may not change fields other than `spec.containers[*].image`,\
               `spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to \
               existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was \
               previously negative)";
    Err(invalid(call, name, validate::Cause::forbidden("spec", why)))
}

const TERMS: &str = "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms";

/// A pod that wants one of several nodes names each in a term of its own: a field of a node is asked for one value only.
pub(super) fn affinity(call: &Call, name: &str, object: &Value) -> Result<(), Failure> {
    let spec = match call.kind.kind.as_str() {
        "Pod" => "spec",
        "Job" => "spec.template.spec",
        _ => return Ok(()),
    };
    let terms = spec.split('.').chain(TERMS.split('.')).fold(object, |value, field| &value[field]);
    for (place, term) in terms.as_array().into_iter().flatten().enumerate() {
        for (field, asked) in term["matchFields"].as_array().into_iter().flatten().enumerate() {
            if asked["values"].as_array().is_none_or(|values| values.len() != 1) {
                let field = format!("{spec}.{TERMS}[{place}].matchFields[{field}].values");
                let why = "must be only one value when `operator` is 'In' or 'NotIn' for node field selector";
                return Err(invalid(call, name, validate::Cause::required(&field, why)));
            }
        }
    }
    Ok(())
}
