//! Deletion: at once, after a grace period, or when the last finalizer is gone.
//!
//! In comes a `DeleteOptions`; out goes the object as it is now, or its last state when it is gone. Dependents
//! of an owner that goes in the background are the garbage collector's work (an actor); what must happen before
//! the owner goes is in `dependents.rs`.

use super::call::Call;
use super::reply::Failure;
use super::request::check_dry_run;
use super::selector::Selector;
use super::store::{Name, Object, Store};
use super::{clock, dependents, write};
use serde_json::{Value, json};
use std::sync::Arc;

/// What a DELETE did.
pub(super) enum Deleted {
    /// The object is no more; this was its last state.
    Gone(Arc<Object>),
    /// It waits for its kubelet or for a finalizer.
    Pending(Arc<Object>),
}

/// The parts of `DeleteOptions` that matter here.
#[derive(Clone, Debug, Default)]
pub(super) struct DeleteOptions {
    pub(super) grace_seconds: Option<i64>,
    pub(super) uid: Option<String>,
    pub(super) version: Option<String>,
    pub(super) dry_run: bool,
    propagation: Propagation,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Propagation {
    #[default]
    Background,
    Foreground,
    Orphan,
}

impl DeleteOptions {
    /// How a dependent of an owner that waits for it is deleted.
    pub(super) fn foreground() -> Self {
        Self { propagation: Propagation::Foreground, ..Self::default() }
    }

    /// Reads the body. Only a request without one is asked for its query: as in a real server, `dryRun` beside a
    /// body is not seen.
    pub(super) fn of_request(call: &Call) -> Result<Self, Failure> {
        match call.body()? {
            Value::Null => Self::parse(&json!({
                "gracePeriodSeconds": call.options.number("gracePeriodSeconds")?,
                "propagationPolicy": call.options.text("propagationPolicy"),
                "dryRun": [call.options.text("dryRun")],
            })),
            body => Self::parse(&body),
        }
    }

    pub(super) fn parse(body: &Value) -> Result<Self, Failure> {
        let text = |path: &str| body.pointer(path).and_then(Value::as_str).map(str::to_owned);
        let policy = text("/propagationPolicy").unwrap_or_default();
        let propagation = match policy.as_str() {
            "" | "Background" => Propagation::Background,
            "Foreground" => Propagation::Foreground,
            "Orphan" => Propagation::Orphan,
            other => return Err(Failure::bad_request(format!("invalid propagationPolicy: \"{other}\""))),
        };
        check_dry_run(body["dryRun"][0].as_str().unwrap_or_default())?;
        Ok(Self {
            grace_seconds: body["gracePeriodSeconds"].as_i64(),
            uid: text("/preconditions/uid"),
            version: text("/preconditions/resourceVersion"),
            dry_run: body["dryRun"][0] == "All",
            propagation,
        })
    }
}

/// Deletes one object of the call's resource.
pub(super) fn delete(
    store: &mut Store,
    call: &Call,
    name: &Name,
    options: &DeleteOptions,
) -> Result<Deleted, Failure> {
    let object = store.get(&call.resource, name)?;
    check_preconditions(call, &object, options)?;
    let mut next = object.value().clone();
    match options.propagation {
        Propagation::Background => {}
        Propagation::Orphan => dependents::orphan(store, object.meta("uid"))?,
        Propagation::Foreground => dependents::hold_owner(store, &mut next),
    }
    if !object.is_deleting() {
        mark(store, &mut next, grace_seconds(call, object.value(), options));
    } else if let Some(shorter) = shorter_grace(object.value(), options) {
        shorten(&mut next, shorter);
    } else {
        return Ok(Deleted::Pending(object));
    }
    if write::is_finished(&next) {
        // A pod is always marked first, even if it goes at once: watches see both.
        let last =
            if call.resource == "pods" { store.put(&call.resource, name.clone(), next)? } else { object };
        store.remove(&call.resource, name)?;
        let last =
            if store.dry_run { last } else { Arc::new(Object::new(last.value().clone(), store.version)) };
        write::after_removal(store, &call.resource, last.value())?;
        return Ok(Deleted::Gone(last));
    }
    let pending = store.put(&call.resource, name.clone(), next)?;
    if store.dry_run {
        return Ok(Deleted::Pending(pending));
    }
    if options.propagation == Propagation::Foreground {
        dependents::delete_all(store, call, pending.meta("uid"))?;
    }
    Ok(store.get(&call.resource, name).map_or(Deleted::Gone(pending), Deleted::Pending))
}

/// Deletes what the selectors choose; answers with what was there.
pub(super) fn delete_collection(
    store: &mut Store,
    call: &Call,
    options: &DeleteOptions,
) -> Result<Vec<Arc<Object>>, Failure> {
    let selector = Selector::from_options(&call.options, &call.kind)?;
    let table = store.table(&call.resource)?;
    let chosen: Vec<(Name, Arc<Object>)> = table
        .range(&call.info.namespace)
        .filter(|(_, object)| selector.matches(object.value()))
        .map(|(name, object)| (name.clone(), object.clone()))
        .collect();
    for (name, _) in &chosen {
        delete(store, call, name, options)?;
    }
    Ok(chosen.into_iter().map(|(_, object)| object).collect())
}

/// How long the object may take; only a pod on a node takes any time.
#[derive(Clone, Copy)]
struct Grace(i64);

/// A second DELETE may only shorten the time, and only if it says so.
fn shorter_grace(object: &Value, options: &DeleteOptions) -> Option<Grace> {
    let pending = object["metadata"]["deletionGracePeriodSeconds"].as_i64().unwrap_or(0);
    options.grace_seconds.filter(|seconds| *seconds < pending).map(Grace)
}

fn grace_seconds(call: &Call, object: &Value, options: &DeleteOptions) -> Grace {
    let has_kubelet = object["spec"]["nodeName"].as_str().is_some_and(|node| !node.is_empty());
    let is_over = matches!(object["status"]["phase"].as_str(), Some("Succeeded" | "Failed"));
    if call.resource != "pods" || !has_kubelet || is_over {
        return Grace(0);
    }
    let own = || object["spec"]["terminationGracePeriodSeconds"].as_i64().unwrap_or(30);
    match options.grace_seconds.unwrap_or_else(own) {
        negative if negative < 0 => Grace(1),
        seconds => Grace(seconds),
    }
}

fn mark(store: &Store, next: &mut Value, Grace(seconds): Grace) {
    let meta = &mut next["metadata"];
    meta["deletionTimestamp"] = store.clock.stamp_in(seconds);
    meta["deletionGracePeriodSeconds"] = json!(seconds);
    bump_generation(meta);
}

fn shorten(next: &mut Value, Grace(seconds): Grace) {
    let meta = &mut next["metadata"];
    let pending = meta["deletionGracePeriodSeconds"].as_i64().unwrap_or(0);
    let due = meta["deletionTimestamp"].as_str().and_then(|due| due.parse::<jiff::Timestamp>().ok());
    if let Some(due) = due {
        meta["deletionTimestamp"] = clock::stamp(due.as_second() - pending + seconds);
    }
    meta["deletionGracePeriodSeconds"] = json!(seconds);
}

fn bump_generation(meta: &mut Value) {
    if let Some(generation) = meta["generation"].as_i64() {
        meta["generation"] = json!(generation + 1);
    }
}

pub(super) fn check_preconditions(
    call: &Call,
    object: &Object,
    options: &DeleteOptions,
) -> Result<(), Failure> {
    let (kind, name) = (call.kind.qualified(), object.meta("name"));
    if let Some(uid) = options.uid.as_deref().filter(|uid| *uid != object.meta("uid")) {
        let why = format!(
            "the UID in the precondition ({uid}) does not match the UID in record ({}). The object might have been deleted and then recreated",
            object.meta("uid")
        );
        return Err(Failure::conflict(&kind, name, &why));
    }
    if let Some(version) =
        options.version.as_deref().filter(|version| *version != object.meta("resourceVersion"))
    {
        let why = format!(
            "the ResourceVersion in the precondition ({version}) does not match the ResourceVersion in record ({}). The object might have been modified",
            object.meta("resourceVersion")
        );
        return Err(Failure::conflict(&kind, name, &why));
    }
    Ok(())
}
