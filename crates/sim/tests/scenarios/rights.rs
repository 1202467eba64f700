//! Granted is what is used: the chart's permissions against the audit logs of all scenarios.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use libtest_mimic::Failed;
use pitcrew_sim::plane::{Plane, User};
use serde_json::Value;

/// The audit log is written in batches; a request appears within a second.
const LOG_DELAY: Duration = Duration::from_secs(1);

/// What all scenarios together did.
struct Seen {
    scenarios: usize,
    uses: BTreeSet<Use>,
    /// Each refusal, with the scenario in which it was first seen.
    refusals: BTreeMap<Use, &'static str>,
}

/// What only embedded scenarios use: the template of a DaemonSet that nobody renders is put back in one whose driver the
/// checkers of audit logs do not know.
const EMBEDDED_ONLY: [(&str, &str); 1] = [("patch", "daemonsets")];

static SEEN: Mutex<Seen> =
    Mutex::new(Seen { scenarios: 0, uses: BTreeSet::new(), refusals: BTreeMap::new() });

fn seen() -> MutexGuard<'static, Seen> {
    SEEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One request, as far as permissions are concerned.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Use {
    verb: String,
    group: String,
    /// With its subresource: `pods/eviction`.
    resource: String,
    namespace: String,
    name: String,
}

/// One verb on one resource that a role allows.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Grant {
    verb: String,
    group: String,
    resource: String,
    /// None: everywhere.
    namespace: Option<String>,
    /// Empty: any.
    names: Vec<String>,
}

impl Grant {
    fn allows(&self, used: &Use) -> bool {
        let Use { verb, group, resource, namespace, name } = used;
        (verb, group, resource) == (&self.verb, &self.group, &self.resource)
            && self.namespace.as_ref().is_none_or(|only| only == namespace)
            && (self.names.is_empty() || self.names.contains(name))
    }
}

impl fmt::Display for Grant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Grant { verb, group, resource, namespace, names } = self;
        let dot = if group.is_empty() { "" } else { "." };
        write!(f, "{verb} {resource}{dot}{group}")?;
        if !names.is_empty() {
            write!(f, " ({})", names.join(", "))?;
        }
        namespace.as_ref().map_or(Ok(()), |namespace| write!(f, " in {namespace}"))
    }
}

/// What the chart grants, as Helm rendered it.
pub(crate) fn granted_in() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../charts/pitcrew/golden/permissions.yaml")
}

fn grants() -> Result<Vec<Grant>, Failed> {
    let objects: Vec<Value> = serde_saphyr::from_multiple(&std::fs::read_to_string(granted_in())?)?;
    let mut grants = Vec::new();
    for object in &objects {
        let namespace = object["metadata"]["namespace"].as_str().map(str::to_owned);
        for rule in object["rules"].as_array().into_iter().flatten() {
            for group in texts(&rule["apiGroups"]) {
                for resource in texts(&rule["resources"]) {
                    grants.extend(texts(&rule["verbs"]).into_iter().map(|verb| Grant {
                        verb,
                        group: group.clone(),
                        resource: resource.clone(),
                        namespace: namespace.clone(),
                        names: texts(&rule["resourceNames"]),
                    }));
                }
            }
        }
    }
    Ok(grants)
}

fn texts(list: &Value) -> Vec<String> {
    list.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
}

/// Adds what the controller did in a scenario that has just ended.
pub(crate) async fn read(scenario: &'static str, plane: &Plane) -> Result<(), Failed> {
    tokio::time::sleep(LOG_DELAY).await;
    let log = plane.audit_log().ok_or("the plane has no audit log")?;
    let mut seen = seen();
    seen.scenarios += 1;
    for line in std::fs::read_to_string(log)?.lines() {
        // The last line may be cut off in the middle.
        let Ok(event) = serde_json::from_str::<Value>(line) else { continue };
        let object = &event["objectRef"];
        if event["user"]["username"] != User::Pitcrew.name() || object.is_null() {
            continue;
        }
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let subresource = text(&object["subresource"]);
        let slash = if subresource.is_empty() { "" } else { "/" };
        let used = Use {
            verb: text(&event["verb"]),
            group: text(&object["apiGroup"]),
            resource: format!("{}{slash}{subresource}", text(&object["resource"])),
            namespace: text(&object["namespace"]),
            name: text(&object["name"]),
        };
        if event["responseStatus"]["code"] == 403 {
            seen.refusals.entry(used).or_insert(scenario);
        } else {
            seen.uses.insert(used);
        }
    }
    Ok(())
}

/// How many scenarios have been read.
pub(crate) fn scenarios_seen() -> usize {
    seen().scenarios
}

/// The last trial.
pub(crate) fn check() -> Result<(), Failed> {
    let (seen, grants) = (seen(), grants()?);
    let unused = grants.iter().filter(|grant| !seen.uses.iter().any(|used| grant.allows(used)));
    let elsewhere = |grant: &&Grant| EMBEDDED_ONLY.contains(&(grant.verb.as_str(), grant.resource.as_str()));
    let unused = unused.filter(|grant| !elsewhere(grant));
    let unused: Vec<String> = unused.map(|grant| format!("\n  {grant}")).collect();
    let refused = seen.refusals.iter().map(|(used, scenario)| {
        let Use { verb, group, resource, namespace, name } = used;
        format!("\n  {verb} {resource} {group} {namespace}/{name} in \"{scenario}\"")
    });
    let refused: Vec<String> = refused.collect();
    if unused.is_empty() && refused.is_empty() {
        return Ok(());
    }
    Err(format!(
        "granted and never used by {} scenarios: {}{}\nrefused: {}{}",
        seen.scenarios,
        unused.len(),
        unused.concat(),
        refused.len(),
        refused.concat()
    )
    .into())
}
