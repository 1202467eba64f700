//! What the chart grants is what the program asks for.

use std::collections::BTreeSet;

use libtest_mimic::Failed;
use pitcrew_controller::Feature;
use pitcrew_controller::preflight::{PERMISSIONS, Permission, reads};
use serde_json::Value;

use crate::render::{Outcome, must, name, of_kind, render};

/// The features, as the chart spells them.
const FEATURES: [(&str, Feature); 3] = [
    ("nvsentinel", Feature::Nvsentinel),
    ("clients", Feature::Clients),
    ("networkOperator", Feature::NetworkOperator),
];

/// One verb on one resource, as a line: `nodes patch`, `leases.coordination.k8s.io get in gpu-operator`.
type Lines = BTreeSet<String>;

/// With any feature off, what it needs is not granted, and all the rest is.
pub(crate) fn controller() -> Outcome {
    for off in [None, Some(FEATURES[0]), Some(FEATURES[1]), Some(FEATURES[2])] {
        let switch = off.map(|(feature, _)| format!("features.{feature}=false"));
        let arguments: Vec<_> = switch.iter().flat_map(|switch| ["--set", switch]).collect();
        let granted = granted(&render(&arguments)?, "pitcrew")?;
        let off = off.map(|(_, feature)| feature);
        let needed = |permission: &&Permission| permission.feature.is_none() || permission.feature != off;
        let asked = asked(PERMISSIONS.iter().filter(needed).copied());
        same(&granted, &asked, &format!("with {arguments:?}"))?;
    }
    Ok(())
}

/// The role for people, and for `helm test`. It is one for the whole cluster.
pub(crate) fn reader() -> Outcome {
    let anywhere = reads().map(|permission| Permission { here: false, ..permission });
    same(&granted(&render(&[])?, "pitcrew-reader")?, &asked(anywhere), "to readers")
}

/// No `*`, for nobody.
pub(crate) fn no_wildcards() -> Outcome {
    let job = ["--values", "charts/pitcrew/examples/helm/values.yaml"];
    for arguments in [&[][..], &job] {
        for object in render(arguments)?.iter().filter(|object| object.get("rules").is_some()) {
            must(!object["rules"].to_string().contains('*'), || format!("{} has a wildcard", name(object)))?;
        }
    }
    Ok(())
}

fn same(granted: &Lines, asked: &Lines, when: &str) -> Outcome {
    let list = |lines: &mut dyn Iterator<Item = &String>| lines.cloned().collect::<Vec<_>>().join("; ");
    must(granted == asked, || {
        format!(
            "{when}: granted and not asked for: [{}]; asked for and not granted: [{}]",
            list(&mut granted.difference(asked)),
            list(&mut asked.difference(granted))
        )
    })
}

/// What the roles of this name grant.
fn granted(objects: &[Value], role: &str) -> Result<Lines, Failed> {
    let mut lines = Lines::new();
    let roles = of_kind(objects, "ClusterRole").chain(of_kind(objects, "Role"));
    for object in roles.filter(|object| object["metadata"]["name"] == role) {
        let home = object["metadata"]["namespace"].as_str();
        for rule in object["rules"].as_array().into_iter().flatten() {
            let only = texts(&rule["resourceNames"]).first().copied();
            for group in texts(&rule["apiGroups"]) {
                for resource in texts(&rule["resources"]) {
                    let (resource, subresource) = resource.split_once('/').unwrap_or((resource, ""));
                    let verbs = texts(&rule["verbs"]);
                    lines.extend(
                        verbs.iter().map(|verb| line(group, resource, subresource, verb, only, home)),
                    );
                }
            }
        }
    }
    must(!lines.is_empty(), || format!("there is no role {role}"))?;
    Ok(lines)
}

/// What the program asks for.
fn asked(permissions: impl Iterator<Item = Permission>) -> Lines {
    let lines = permissions.flat_map(|permission| {
        let Permission { group, resource, subresource, verbs, only, here, .. } = permission;
        let home = here.then_some("gpu-operator");
        verbs.iter().map(move |verb| line(group, resource, subresource, verb, only, home))
    });
    lines.collect()
}

fn line(
    group: &str,
    resource: &str,
    subresource: &str,
    verb: &str,
    only: Option<&str>,
    home: Option<&str>,
) -> String {
    let dot = if group.is_empty() { "" } else { "." };
    let slash = if subresource.is_empty() { "" } else { "/" };
    let only = only.map(|name| format!(" ({name})")).unwrap_or_default();
    let home = home.map(|namespace| format!(" in {namespace}")).unwrap_or_default();
    format!("{resource}{dot}{group}{slash}{subresource} {verb}{only}{home}")
}

fn texts(list: &Value) -> Vec<&str> {
    list.as_array().into_iter().flatten().filter_map(Value::as_str).collect()
}
