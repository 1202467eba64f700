//! GET of one object and of many.
//!
//! A list is taken at one version: the newest, the one a `continue` token was made at, or one that was asked for
//! exactly. Older ones are rebuilt by undoing the log, so pages agree with each other while others write.

use super::call::{Call, Shape};
use super::reply::{self, Failure, Reply};
use super::selector::Selector;
use super::store::{Name, Object, Store, Table};
use bytes::Bytes;
use http::StatusCode;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The object in the form that the client asked for.
pub(super) fn render(object: &Object, shape: &Shape) -> Bytes {
    if shape.metadata_only {
        let meta = &object.value()["metadata"];
        return json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": meta})
            .to_string()
            .into();
    }
    match &shape.api_version {
        None => object.json().clone(),
        Some(api_version) => {
            let mut value = object.value().clone();
            value["apiVersion"] = api_version.as_str().into();
            value.to_string().into()
        }
    }
}

/// One object.
pub(super) fn get(store: &Store, call: &Call) -> Result<Reply, Failure> {
    check_not_ahead(store, call.options.number("resourceVersion")?.unwrap_or(0))?;
    let object = store.get(&call.resource, &call.name())?;
    Ok(reply::json_bytes(StatusCode::OK, render(&object, &call.shape)))
}

/// Where the next page begins.
#[derive(Debug)]
struct Continue {
    version: u64,
    after: Name,
}

impl Continue {
    fn parse(token: &str) -> Result<Option<Self>, Failure> {
        if token.is_empty() {
            return Ok(None);
        }
        let mut parts = token.splitn(3, '|');
        let (version, namespace, name) = (parts.next(), parts.next(), parts.next());
        let version = version.and_then(|version| version.parse().ok());
        match (version, namespace, name) {
            (Some(version), Some(namespace), Some(name)) => {
                Ok(Some(Self { version, after: Name::new(namespace, name) }))
            }
            _ => Err(Failure::bad_request("continue key is not valid")),
        }
    }
}

/// Many objects.
pub(super) fn list(store: &Store, call: &Call) -> Result<Reply, Failure> {
    let selector = Selector::from_options(&call.options, &call.kind)?;
    let limit = call.options.number("limit")?.filter(|limit| *limit > 0);
    let limit = limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX);
    let from = Continue::parse(call.options.text("continue"))?;
    let version = version_to_list(store, call, from.as_ref())?;
    let table = store.table(&call.resource)?;
    let mut chosen = objects_at(table, &call.info.namespace, version, &selector);
    if let Some(from) = &from {
        chosen.retain(|(name, _)| **name > from.after);
    }
    if let Some(name) = selector.name() {
        chosen.retain(|(found, _)| found.name == name);
    }
    let all = chosen.len();
    let mut seen = 0;
    let mut page = Vec::with_capacity(all.min(limit));
    // A page is full as soon as it is full: whether the rest matches is the next page's matter.
    for (name, object) in chosen {
        if page.len() == limit {
            break;
        }
        seen += 1;
        if selector.matches(object.value()) {
            page.push((name, object));
        }
    }
    let mut meta = json!({"resourceVersion": version.to_string()});
    if let (Some((last, _)), true) = (page.last(), seen < all) {
        meta["continue"] = format!("{version}|{}|{}", last.namespace, last.name).into();
        // With a selector a real server would have to read the rest to count it.
        if selector.is_everything() {
            meta["remainingItemCount"] = (all - seen).into();
        }
    }
    close(call, &mut meta);
    let items = page.iter().map(|(_, object)| object.as_ref());
    Ok(list_reply(call, &meta, items))
}

/// Lists of custom resources say it when there is no next page; others leave it out.
pub(super) fn close(call: &Call, meta: &mut Value) {
    if call.kind.is_custom && !call.shape.metadata_only && meta["continue"].is_null() {
        meta["continue"] = "".into();
    }
}

/// A list object around the items.
pub(super) fn list_reply<'a>(call: &Call, meta: &Value, items: impl Iterator<Item = &'a Object>) -> Reply {
    let (kind, api_version) = if call.shape.metadata_only {
        ("PartialObjectMetadata", "meta.k8s.io/v1".to_owned())
    } else {
        (call.kind.kind.as_str(), call.info.api_version())
    };
    let mut body =
        format!("{{\"kind\":\"{kind}List\",\"apiVersion\":\"{api_version}\",\"metadata\":{meta},\"items\":[")
            .into_bytes();
    let mut items = items.peekable();
    if call.shape.metadata_only && items.peek().is_none() {
        // Go's nil: what is made from nothing stays nothing.
        body.truncate(body.len() - 1);
        body.extend_from_slice(b"null}");
        return reply::json_bytes(StatusCode::OK, body.into());
    }
    for (index, object) in items.enumerate() {
        if index > 0 {
            body.push(b',');
        }
        body.extend_from_slice(&render(object, &call.shape));
    }
    body.extend_from_slice(b"]}");
    reply::json_bytes(StatusCode::OK, body.into())
}

fn version_to_list(store: &Store, call: &Call, from: Option<&Continue>) -> Result<u64, Failure> {
    let asked = call.options.number("resourceVersion")?.unwrap_or(0);
    let exact = match from {
        Some(from) => Some(from.version),
        None => (call.options.text("resourceVersionMatch") == "Exact").then_some(asked),
    };
    check_not_ahead(store, asked)?;
    let compacted = store.table(&call.resource)?.compacted;
    match exact {
        Some(version) if version < compacted => Err(Failure::expired(version, compacted)),
        Some(version) => Ok(version),
        None => Ok(store.version),
    }
}

/// Nothing here is ever behind, so a version that is not there yet was never handed out.
fn check_not_ahead(store: &Store, asked: u64) -> Result<(), Failure> {
    if asked <= store.version {
        return Ok(());
    }
    let message = format!("Too large resource version: {asked}, current: {}", store.version);
    let causes = json!([{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]);
    let details = json!({"causes": causes, "retryAfterSeconds": 1});
    Err(Failure::new(StatusCode::GATEWAY_TIMEOUT, "Timeout", message).with_details(details))
}

/// The objects of a namespace (of all, when empty) as they were at `version`: at least those that are selected.
fn objects_at<'a>(
    table: &'a Table,
    namespace: &str,
    version: u64,
    selector: &Selector,
) -> Vec<(&'a Name, &'a Arc<Object>)> {
    let newer = table.log.partition_point(|change| change.version <= version);
    if newer == table.log.len() {
        let here = |name: &Name| namespace.is_empty() || name.namespace == namespace;
        return match selector.node() {
            Some(node) => table.on_node(node).filter(|(name, _)| here(name)).collect(),
            None => table.range(namespace).collect(),
        };
    }
    let mut objects: BTreeMap<_, _> = table.range(namespace).collect();
    for change in table.log.range(newer..).rev() {
        match &change.before {
            Some(before) => drop(objects.insert(&change.name, before)),
            None => drop(objects.remove(&change.name)),
        }
    }
    objects.retain(|name, _| namespace.is_empty() || name.namespace == namespace);
    objects.into_iter().collect()
}
