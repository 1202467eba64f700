//! One request on a resource, with everything that was looked up for it.
//!
//! Handlers take a [`Call`] and the store; they never see HTTP.

use super::kinds::{Kind, Trait};
use super::reply::Failure;
use super::request::{Options, RequestInfo};
use super::store::{Name, Store};
use bytes::Bytes;
use http::{HeaderMap, HeaderName, header, request::Parts};
use serde_json::Value;
use std::sync::Arc;

/// How the client wants its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    /// The asked API version, when it is not the stored one.
    pub(super) api_version: Option<String>,
    /// `PartialObjectMetadata` instead of whole objects.
    pub(super) metadata_only: bool,
}

/// A request on a resource that exists, in a version that is served.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) info: RequestInfo,
    pub(super) options: Options,
    /// `pods`, `daemonsets.apps`.
    pub(super) resource: String,
    pub(super) kind: Arc<Kind>,
    pub(super) shape: Shape,
    pub(super) content_type: String,
    /// Who owns the fields that this request writes.
    pub(super) manager: String,
    body: Body,
}

#[derive(Debug)]
enum Body {
    None,
    Text(Bytes),
    Tree(Value),
}

impl Call {
    pub(super) fn new(
        store: &Store,
        info: RequestInfo,
        options: Options,
        parts: &Parts,
        body: Bytes,
    ) -> Result<Self, Failure> {
        let (resource, kind) = served(store, &info)?;
        let text = |name| header_text(&parts.headers, &name);
        let shape = Shape {
            api_version: (info.version != kind.storage).then(|| info.api_version()),
            metadata_only: text(header::ACCEPT).contains("as=PartialObjectMetadata"),
        };
        let manager = match (options.text("fieldManager"), text(header::USER_AGENT)) {
            ("", agent) => {
                agent.split('/').next().filter(|agent| !agent.is_empty()).unwrap_or(&info.user).to_owned()
            }
            (manager, _) => manager.to_owned(),
        };
        let content_type = text(header::CONTENT_TYPE).split(';').next().unwrap_or_default().to_owned();
        let body = if body.is_empty() { Body::None } else { Body::Text(body) };
        Ok(Self { info, options, resource, kind, shape, content_type, manager, body })
    }

    /// A call that did not come over the wire.
    pub(super) fn inside(
        store: &Store,
        info: RequestInfo,
        content_type: &str,
        body: Value,
    ) -> Result<Self, Failure> {
        let (resource, kind) = served(store, &info)?;
        Ok(Self {
            resource,
            kind,
            options: Options::default(),
            shape: Shape { api_version: None, metadata_only: false },
            content_type: content_type.to_owned(),
            manager: info.user.clone(),
            info,
            body: Body::Tree(body),
        })
    }

    /// The same client's call on another object.
    pub(super) fn on(&self, store: &Store, resource: &str, name: &Name) -> Result<Self, Failure> {
        let kind = store.table(resource)?.kind.clone();
        let mut info = self.info.clone();
        info.group.clone_from(&kind.group);
        info.version.clone_from(&kind.storage);
        info.resource.clone_from(&kind.plural);
        info.namespace.clone_from(&name.namespace);
        info.name.clone_from(&name.name);
        Ok(Self {
            info,
            options: Options::default(),
            resource: resource.to_owned(),
            kind,
            shape: self.shape.clone(),
            content_type: String::new(),
            manager: self.manager.clone(),
            body: Body::None,
        })
    }

    pub(super) fn subresource(&self) -> &str {
        self.info.plural_and_subresource().1
    }

    /// The object that the path names.
    pub(super) fn name(&self) -> Name {
        Name::new(&self.info.namespace, &self.info.name)
    }

    /// The body as JSON; no body is `null`.
    pub(super) fn body(&self) -> Result<Value, Failure> {
        match &self.body {
            Body::None => Ok(Value::Null),
            Body::Tree(body) => Ok(body.clone()),
            Body::Text(body) => {
                serde_json::from_slice(body).map_err(|error| Failure::bad_request(error.to_string()))
            }
        }
    }

    /// The body as an object of this kind: what the path says wins where the body is silent, and a
    /// contradiction is refused.
    pub(super) fn object(&self) -> Result<Value, Failure> {
        self.checked(self.body()?)
    }

    fn checked(&self, mut object: Value) -> Result<Value, Failure> {
        if !object.is_object() {
            return Err(Failure::bad_request("the request body is not an object"));
        }
        if !object["metadata"].is_object() {
            object["metadata"] = Value::Object(serde_json::Map::new());
        }
        self.agree(&mut object, &["apiVersion"], &self.info.api_version(), "API version")?;
        self.agree(&mut object, &["kind"], &self.kind.kind, "kind")?;
        if self.kind.has(Trait::Namespaced) {
            self.agree(&mut object, &["metadata", "namespace"], &self.info.namespace, "namespace")?;
        }
        if !self.info.name.is_empty() && self.info.verb != "create" {
            self.check_name(&object)?;
        }
        object["apiVersion"] = self.kind.api_version(&self.kind.storage).into();
        Ok(object)
    }

    /// The body as a configuration: it may leave out the name of an object that is there.
    pub(super) fn config(&self, store: &Store) -> Result<Value, Failure> {
        let mut body = self.body()?;
        let is_there = store.get(&self.resource, &self.name()).is_ok();
        if is_there && body["metadata"].is_object() && body["metadata"]["name"].is_null() {
            body["metadata"]["name"] = self.info.name.as_str().into();
        }
        self.checked(body)
    }

    /// The name stands in both places, and is the same.
    fn check_name(&self, object: &Value) -> Result<(), Failure> {
        let wanted = &self.info.name;
        match object["metadata"]["name"].as_str().unwrap_or_default() {
            "" => Err(Failure::bad_request(format!(
                "the name of the object ({wanted} based on URL) was undeterminable: name must be provided"
            ))),
            name if name == wanted => Ok(()),
            name => Err(Failure::bad_request(format!(
                "the name of the object ({name}) does not match the name on the URL ({wanted})"
            ))),
        }
    }

    #[expect(clippy::unused_self, reason = "reads as a check of this call")]
    fn agree(&self, object: &mut Value, path: &[&str], want: &str, what: &str) -> Result<(), Failure> {
        let field = path.iter().fold(object, |value, step| &mut value[*step]);
        match field.as_str() {
            None | Some("") => *field = want.into(),
            Some(got) if got == want => {}
            Some(_) => {
                return Err(Failure::bad_request(format!(
                    "the {what} of the provided object does not match the {what} sent on the request"
                )));
            }
        }
        Ok(())
    }
}

/// What the request is about, if it is there in this version.
fn served(store: &Store, info: &RequestInfo) -> Result<(String, Arc<Kind>), Failure> {
    let resource = info.group_resource();
    let kind = store.tables.get(&resource).map(|table| table.kind.clone());
    let kind = kind.filter(|kind| kind.version(&info.version).is_some());
    let kind = kind.ok_or_else(|| not_served(store, info))?;
    if !info.namespace.is_empty() && !kind.has(Trait::Namespaced) {
        return Err(Failure::no_such_resource());
    }
    Ok((resource, kind))
}

/// Only the groups of built-in kinds know what they do not have; elsewhere it is not even a path.
fn not_served(store: &Store, info: &RequestInfo) -> Failure {
    let is_mine = |kind: &Kind| !kind.is_custom && kind.group == info.group;
    if store.tables.values().any(|table| is_mine(&table.kind)) {
        return Failure::no_such_resource();
    }
    Failure::no_such_page()
}

fn header_text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> &'a str {
    headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
}
