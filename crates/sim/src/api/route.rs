//! From a parsed request to the handler that serves it.

use super::call::Call;
use super::delete::{self, DeleteOptions, Deleted};
use super::kinds::Trait;
use super::reply::{self, Failure, Reply};
use super::request::{Options, RequestInfo, check_dry_run};
use super::store::{Object, Store};
use super::{Shared, discovery, evict, lock, patch, read, watch, write};
use bytes::Bytes;
use http::StatusCode;
use http::request::Parts;
use serde_json::json;
use std::sync::Arc;

/// Serves one request; the store is locked for as long as that takes, never across an await.
pub(super) fn serve(
    shared: &Shared,
    info: RequestInfo,
    options: Options,
    parts: &Parts,
    body: Bytes,
) -> Result<Reply, Failure> {
    let mut store = lock(shared);
    if !info.is_resource() {
        let found = discovery::answer(&store, parts.uri.path())?;
        return Ok(reply::value(StatusCode::OK, &found));
    }
    store.serve(&info, &body);
    let call = Call::new(&store, info, options, parts, body)?;
    if call.info.verb == "watch" {
        return watch::watch(shared, &mut store, &call);
    }
    if matches!(call.info.verb, "create" | "update" | "patch") {
        check_dry_run(call.options.text("dryRun"))?;
    }
    store.dry_run = call.options.dry_run();
    let served = dispatch(&mut store, &call);
    store.dry_run = false;
    served
}

fn dispatch(store: &mut Store, call: &Call) -> Result<Reply, Failure> {
    match (call.info.verb, call.subresource()) {
        ("create", "eviction") if call.resource == "pods" => {
            evict::evict(store, call)?;
            Ok(reply::acted())
        }
        ("create", "binding") if call.resource == "pods" => {
            evict::bind(store, call)?;
            Ok(reply::acted())
        }
        ("get" | "update" | "patch", "status") if call.kind.has(Trait::Status) => on_object(store, call),
        (verb, "status") if call.kind.has(Trait::Status) => Err(not_at_this_door(call, verb)),
        (_, "") => on_object(store, call),
        // The handler of custom resources takes any other subresource for an object that is not there.
        _ if call.kind.is_custom => Err(Failure::not_found(&call.resource, &call.info.name)),
        _ => Err(Failure::no_such_resource()),
    }
}

fn on_object(store: &mut Store, call: &Call) -> Result<Reply, Failure> {
    match call.info.verb {
        "get" => read::get(store, call),
        "list" => read::list(store, call),
        "create" | "update" | "patch" => {
            let (code, written) = write(store, call)?;
            Ok(show(call, code, &written))
        }
        "delete" => delete_one(store, call),
        "deletecollection" => {
            let options = DeleteOptions::of_request(call)?;
            store.dry_run = options.dry_run;
            let deleted = delete::delete_collection(store, call, &options)?;
            let mut meta = json!({"resourceVersion": store.version.to_string()});
            read::close(call, &mut meta);
            Ok(read::list_reply(call, &meta, deleted.iter().map(AsRef::as_ref)))
        }
        _ => Err(Failure::method_not_allowed()),
    }
}

/// Creates, updates or patches the object that the call speaks of.
pub(super) fn write(store: &mut Store, call: &Call) -> Result<(StatusCode, Arc<Object>), Failure> {
    match call.info.verb {
        // The handler of custom resources does not look at a name behind the collection.
        "create" if call.info.name.is_empty() || call.kind.is_custom => {
            Ok((StatusCode::CREATED, write::create(store, call, call.object()?)?))
        }
        "update" if !call.info.name.is_empty() => write::replace(store, call, call.object()?),
        "patch" if !call.info.name.is_empty() => patch::patch(store, call),
        "update" | "patch" if call.kind.is_custom => Err(Failure::bad_request("name must be provided")),
        _ => Err(Failure::method_not_allowed()),
    }
}

fn delete_one(store: &mut Store, call: &Call) -> Result<Reply, Failure> {
    let options = DeleteOptions::of_request(call)?;
    store.dry_run = options.dry_run;
    match delete::delete(store, call, &call.name(), &options)? {
        Deleted::Gone(object) if !call.kind.has(Trait::ReturnsDeleted) => {
            let mut details =
                json!({"name": call.info.name, "kind": call.kind.plural, "uid": object.meta("uid")});
            if !call.kind.group.is_empty() {
                details["group"] = call.kind.group.as_str().into();
            }
            Ok(reply::gone(&details))
        }
        Deleted::Gone(object) | Deleted::Pending(object) => Ok(show(call, StatusCode::OK, &object)),
    }
}

fn not_at_this_door(call: &Call, verb: &str) -> Failure {
    if !call.kind.is_custom {
        return Failure::method_not_allowed();
    }
    let message = format!("{verb} is not supported on resources of kind \"{}\"", call.resource);
    let about = json!({"group": call.kind.group, "kind": call.kind.plural});
    Failure::new(StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed", message).with_details(about)
}

fn show(call: &Call, code: StatusCode, object: &Object) -> Reply {
    reply::json_bytes(code, read::render(object, &call.shape))
}
