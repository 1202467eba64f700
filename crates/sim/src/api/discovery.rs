//! `/version`, `/api`, `/apis` and below: what this server serves, as `kube::discovery` and `kubectl` ask for it.

use super::kinds::{Kind, Trait};
use super::reply::Failure;
use super::store::Store;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

const VERBS: &[&str] = &["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"];

/// Answers the paths that are not about one resource.
pub(super) fn answer(store: &Store, path: &str) -> Result<Value, Failure> {
    let segments: Vec<&str> = path.trim_matches('/').split('/').collect();
    match segments.as_slice() {
        ["version"] => Ok(version()),
        ["healthz" | "livez" | "readyz"] => Ok(json!("ok")),
        ["api"] => Ok(json!({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []})),
        ["api", version] => resources(store, "", version),
        ["apis"] => Ok(groups(store)),
        ["apis", group] => group_named(store, group),
        ["apis", group, version] => resources(store, group, version),
        _ => Err(Failure::no_such_resource()),
    }
}

fn version() -> Value {
    json!({"major": "1", "minor": "37", "gitVersion": "v1.37.0-pitcrew.embedded", "gitCommit": "", "gitTreeState": "clean",
        "buildDate": "1970-01-01T00:00:00Z", "goVersion": "", "compiler": "rustc", "platform": "embedded"})
}

fn versions_by_group(store: &Store) -> BTreeMap<&str, BTreeSet<&str>> {
    let mut groups: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for kind in store.tables.values().map(|table| &table.kind).filter(|kind| !kind.group.is_empty()) {
        groups
            .entry(&kind.group)
            .or_default()
            .extend(kind.versions.iter().map(|version| version.name.as_str()));
    }
    groups
}

fn group(name: &str, versions: &BTreeSet<&str>) -> Value {
    let entry = |version: &&str| json!({"groupVersion": format!("{name}/{version}"), "version": version});
    let versions: Vec<Value> = versions.iter().map(entry).collect();
    json!({"name": name, "versions": versions, "preferredVersion": versions.last()})
}

fn groups(store: &Store) -> Value {
    let groups: Vec<Value> =
        versions_by_group(store).iter().map(|(name, versions)| group(name, versions)).collect();
    json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
}

fn group_named(store: &Store, name: &str) -> Result<Value, Failure> {
    let groups = versions_by_group(store);
    let mut group = group(name, groups.get(name).ok_or_else(Failure::no_such_resource)?);
    group["kind"] = "APIGroup".into();
    group["apiVersion"] = "v1".into();
    Ok(group)
}

fn resources(store: &Store, group: &str, version: &str) -> Result<Value, Failure> {
    let kinds = store.tables.values().map(|table| table.kind.as_ref());
    let served = kinds.filter(|kind| kind.group == group && kind.version(version).is_some());
    let resources: Vec<Value> = served.flat_map(entries).collect();
    if resources.is_empty() {
        return Err(Failure::no_such_resource());
    }
    let group_version = if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") };
    Ok(
        json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": resources}),
    )
}

/// The resource itself, and its subresources.
fn entries(kind: &Kind) -> Vec<Value> {
    let namespaced = kind.has(Trait::Namespaced);
    let mut entries =
        vec![json!({"name": kind.plural, "singularName": kind.singular, "shortNames": kind.short_names,
        "namespaced": namespaced, "kind": kind.kind, "verbs": VERBS})];
    let mut below = |name: &str, kind_below: &str, verbs: &[&str]| {
        entries.push(
            json!({"name": format!("{}/{name}", kind.plural), "singularName": "", "namespaced": namespaced,
            "kind": kind_below, "verbs": verbs}),
        );
    };
    if kind.has(Trait::Status) {
        below("status", &kind.kind, &["get", "patch", "update"]);
    }
    if kind.resource() == "pods" {
        below("eviction", "Eviction", &["create"]);
        below("binding", "Binding", &["create"]);
    }
    entries
}
