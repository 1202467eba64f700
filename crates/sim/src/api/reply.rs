//! What goes back over the wire: an object's bytes, or a `Status` that says why not.
//!
//! Every refusal is a [`Failure`] with the code, reason and sentence a real API server uses, because clients
//! match on all three.

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full, combinators::UnsyncBoxBody};
use serde_json::{Value, json};
use tower::BoxError;

/// The body may be a stream (a watch) or one buffer (everything else).
pub(super) type Reply = Response<UnsyncBoxBody<Bytes, BoxError>>;

/// Stands for a refusal that is not a `Status`.
const PLAIN: &str = "plain text";

/// A refused request.
#[derive(Debug)]
pub(super) struct Failure {
    code: StatusCode,
    reason: &'static str,
    message: String,
    details: Value,
}

impl Failure {
    pub(super) fn new(code: StatusCode, reason: &'static str, message: impl Into<String>) -> Self {
        Self { code, reason, message: message.into(), details: Value::Null }
    }

    pub(super) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "BadRequest", message)
    }

    /// Nobody registered this resource, or the path is none of ours.
    pub(super) fn no_such_resource() -> Self {
        let message = "the server could not find the requested resource";
        Self::new(StatusCode::NOT_FOUND, "NotFound", message).with_details(json!({}))
    }

    pub(super) fn not_found(resource: &str, name: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, "NotFound", format!("{resource} \"{name}\" not found"))
            .about(resource, name)
    }

    pub(super) fn already_exists(resource: &str, name: &str, is_deleting: bool) -> Self {
        let why = if is_deleting { "object is being deleted: " } else { "" };
        let message = format!("{why}{resource} \"{name}\" already exists");
        Self::new(StatusCode::CONFLICT, "AlreadyExists", message).about(resource, name)
    }

    pub(super) fn conflict(resource: &str, name: &str, why: &str) -> Self {
        let message = format!("Operation cannot be fulfilled on {resource} \"{name}\": {why}");
        Self::new(StatusCode::CONFLICT, "Conflict", message).about(resource, name)
    }

    pub(super) fn is_conflict(&self) -> bool {
        self.code == StatusCode::CONFLICT
    }

    pub(super) fn method_not_allowed() -> Self {
        let message = "the server does not allow this method on the requested resource";
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed", message).with_details(json!({}))
    }

    /// What Go code did not expect: no reason, only its error.
    pub(super) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "", message)
    }

    /// A path that leads nowhere is answered by the HTTP server itself, which knows no `Status`.
    pub(super) fn no_such_page() -> Self {
        Self::new(StatusCode::NOT_FOUND, PLAIN, "404 page not found\n")
    }

    /// A refusal that only a fault explains, in the words that a real server would choose.
    pub(super) fn injected(code: StatusCode) -> Self {
        let (reason, message) = match code {
            StatusCode::CONFLICT => (
                "Conflict",
                "the object has been modified; please apply your changes to the latest version and try again",
            ),
            StatusCode::TOO_MANY_REQUESTS => ("TooManyRequests", "too many requests, please try again later"),
            _ => ("InternalError", "injected fault"),
        };
        let failure = Self::new(code, reason, message);
        match code {
            StatusCode::TOO_MANY_REQUESTS => failure.with_details(json!({"retryAfterSeconds": 1})),
            _ => failure,
        }
    }

    /// The watch or page asks for history that is no longer kept.
    pub(super) fn expired(asked: u64, oldest: u64) -> Self {
        let message = format!("too old resource version: {asked} ({oldest})");
        Self::new(StatusCode::GONE, "Expired", message)
    }

    pub(super) fn with_details(mut self, details: Value) -> Self {
        self.details = details;
        self
    }

    /// Details as the real server has them: `kind` is the resource, not the kind.
    fn about(self, resource: &str, name: &str) -> Self {
        let (plural, group) = resource.split_once('.').unwrap_or((resource, ""));
        let mut details = json!({"name": name, "kind": plural});
        if !group.is_empty() {
            details["group"] = group.into();
        }
        self.with_details(details)
    }

    /// The `Status` object, for a reply or for a watch's `ERROR` event.
    pub(super) fn status(&self) -> Value {
        let mut status = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "code": self.code.as_u16(),
        });
        if !self.reason.is_empty() {
            status["reason"] = self.reason.into();
        }
        if !self.details.is_null() {
            status["details"] = self.details.clone();
        }
        status
    }
}

impl From<Failure> for Reply {
    fn from(failure: Failure) -> Self {
        if failure.reason == PLAIN {
            let mut reply = json_bytes(failure.code, failure.message.into());
            let text = HeaderValue::from_static("text/plain; charset=utf-8");
            reply.headers_mut().insert(header::CONTENT_TYPE, text);
            return reply;
        }
        let mut reply = value(failure.code, &failure.status());
        if let Some(seconds) = failure.details.get("retryAfterSeconds").and_then(Value::as_u64) {
            reply.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        reply
    }
}

/// One buffer of JSON.
pub(super) fn json_bytes(code: StatusCode, body: Bytes) -> Reply {
    stream(code, Full::new(body).map_err(|never| match never {}).boxed_unsync())
}

/// A JSON value.
pub(super) fn value(code: StatusCode, body: &Value) -> Reply {
    json_bytes(code, body.to_string().into())
}

/// A body that is produced as it is read.
pub(super) fn stream(code: StatusCode, body: UnsyncBoxBody<Bytes, BoxError>) -> Reply {
    let mut reply = Response::new(body);
    *reply.status_mut() = code;
    reply.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    reply
}

/// The `Status` of a pod that was acted on.
pub(super) fn acted() -> Reply {
    let code = StatusCode::CREATED;
    let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": code.as_u16()});
    value(code, &status)
}

/// The `Status` of an object that is gone.
pub(super) fn gone(details: &Value) -> Reply {
    let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details});
    value(StatusCode::OK, &status)
}
