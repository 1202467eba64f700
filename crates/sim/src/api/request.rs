//! From an HTTP request to what it means: user, verb, resource, namespace, name, options.
//!
//! In comes a method, a path, a query and headers; out goes a [`RequestInfo`] (public: counts and fault hooks read
//! it) and the [`Options`] that a handler looks at. Nothing here knows which resources exist.

use super::reply::Failure;
use http::{Method, StatusCode, request::Parts};
use std::collections::BTreeMap;

/// Who asks for what: the fields of an audit log entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestInfo {
    /// The name given to [`ApiServer::client_as`](super::ApiServer::client_as).
    pub user: String,
    /// `get`, `list`, `watch`, `create`, `update`, `patch`, `delete` or `deletecollection`.
    pub verb: &'static str,
    /// API group, empty for the core group.
    pub group: String,
    /// API version without the group.
    pub version: String,
    /// Plural and subresource as in the audit log: `nodes`, `nodes/status`, `pods/eviction`. For paths outside
    /// the resources (`/version`, `/apis`): the path itself.
    pub resource: String,
    /// Empty for cluster-scoped resources and for requests over all namespaces.
    pub namespace: String,
    /// The object's name; empty for requests on a collection.
    pub name: String,
}

impl RequestInfo {
    /// Reads the request line; `None` as resource target means a path such as `/apis`.
    pub(super) fn parse(user: &str, parts: &Parts, options: &Options) -> Self {
        let path = parts.uri.path();
        let mut info = Self {
            user: user.to_owned(),
            verb: "get",
            group: String::new(),
            version: String::new(),
            resource: path.to_owned(),
            namespace: String::new(),
            name: String::new(),
        };
        info.read_path(path);
        info.verb = verb(&parts.method, info.is_collection(), options.flag("watch"));
        info
    }

    fn read_path(&mut self, path: &str) -> Option<()> {
        let mut segments = path.trim_matches('/').split('/').peekable();
        let (group, version) = match segments.next()? {
            "api" => ("", segments.next()?),
            "apis" => (segments.next()?, segments.next()?),
            _ => return None,
        };
        let mut rest: Vec<&str> = segments.collect();
        // `/namespaces/x` and `/namespaces/x/status` are about the namespace; anything longer is inside it.
        if rest.len() > 2 && rest[0] == "namespaces" && !matches!(rest[2], "status" | "finalize") {
            rest[1].clone_into(&mut self.namespace);
            rest.drain(..2);
        }
        let mut rest = rest.into_iter();
        let plural = rest.next()?;
        rest.next().unwrap_or_default().clone_into(&mut self.name);
        self.resource = match rest.next() {
            Some(subresource) => format!("{plural}/{subresource}"),
            None => plural.to_owned(),
        };
        group.clone_into(&mut self.group);
        version.clone_into(&mut self.version);
        Some(())
    }

    /// False for discovery, `/version` and the health paths.
    pub(super) fn is_resource(&self) -> bool {
        !self.version.is_empty()
    }

    fn is_collection(&self) -> bool {
        self.is_resource() && self.name.is_empty()
    }

    /// `nodes`, `status`.
    pub(super) fn plural_and_subresource(&self) -> (&str, &str) {
        self.resource.split_once('/').unwrap_or((&self.resource, ""))
    }

    /// The resource as the store and error messages name it: `pods`, `daemonsets.apps`.
    pub(super) fn group_resource(&self) -> String {
        let (plural, _) = self.plural_and_subresource();
        if self.group.is_empty() { plural.to_owned() } else { format!("{plural}.{}", self.group) }
    }

    /// `v1`, `apps/v1`.
    pub(super) fn api_version(&self) -> String {
        if self.group.is_empty() { self.version.clone() } else { format!("{}/{}", self.group, self.version) }
    }
}

fn verb(method: &Method, is_collection: bool, is_watch: bool) -> &'static str {
    match (method.as_str(), is_collection) {
        ("GET", _) if is_watch => "watch",
        ("GET", true) => "list",
        ("POST", _) => "create",
        ("PUT", _) => "update",
        ("PATCH", _) => "patch",
        ("DELETE", true) => "deletecollection",
        ("DELETE", false) => "delete",
        _ => "get",
    }
}

/// The query parameters.
#[derive(Debug, Default)]
pub(super) struct Options(BTreeMap<String, String>);

impl Options {
    pub(super) fn parse(query: Option<&str>) -> Self {
        Self(form_urlencoded::parse(query.unwrap_or_default().as_bytes()).into_owned().collect())
    }

    /// The parameter's text, empty when it is absent.
    pub(super) fn text(&self, key: &str) -> &str {
        self.0.get(key).map_or("", String::as_str)
    }

    pub(super) fn flag(&self, key: &str) -> bool {
        matches!(self.text(key), "true" | "1")
    }

    pub(super) fn number(&self, key: &str) -> Result<Option<u64>, Failure> {
        match self.text(key) {
            "" => Ok(None),
            text => text
                .parse()
                .map(Some)
                .map_err(|_| Failure::bad_request(format!("invalid value for {key}: \"{text}\""))),
        }
    }

    /// `dryRun=All`: do everything but store.
    pub(super) fn dry_run(&self) -> bool {
        self.text("dryRun") == "All"
    }
}

/// Whoever only wants to try must not be misunderstood: any other word is refused.
pub(super) fn check_dry_run(word: &str) -> Result<(), Failure> {
    if matches!(word, "" | "All") {
        return Ok(());
    }
    let message = format!("dryRun: Unsupported value: \"{word}\": supported values: \"All\"");
    Err(Failure::new(StatusCode::UNPROCESSABLE_ENTITY, "Invalid", message))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(method: &str, uri: &str) -> RequestInfo {
        let (parts, ()) = http::Request::builder().method(method).uri(uri).body(()).unwrap().into_parts();
        RequestInfo::parse("me", &parts, &Options::parse(parts.uri.query()))
    }

    #[test]
    fn paths_are_read_as_the_audit_log_names_them() {
        let cases = [
            ("GET", "/api/v1/nodes", "list", "nodes", "", ""),
            ("GET", "/api/v1/nodes?watch=true", "watch", "nodes", "", ""),
            ("GET", "/api/v1/nodes/a", "get", "nodes", "", "a"),
            ("PATCH", "/api/v1/nodes/a/status", "patch", "nodes/status", "", "a"),
            ("POST", "/api/v1/namespaces/x/pods/p/eviction", "create", "pods/eviction", "x", "p"),
            ("GET", "/api/v1/namespaces/x", "get", "namespaces", "", "x"),
            ("PUT", "/api/v1/namespaces/x/status", "update", "namespaces/status", "", "x"),
            ("DELETE", "/apis/apps/v1/namespaces/x/daemonsets", "deletecollection", "daemonsets", "x", ""),
            ("DELETE", "/apis/apps/v1/namespaces/x/daemonsets/d", "delete", "daemonsets", "x", "d"),
            ("GET", "/apis/apps/v1", "get", "/apis/apps/v1", "", ""),
            ("GET", "/version", "get", "/version", "", ""),
        ];
        for (method, uri, verb, resource, namespace, name) in cases {
            let info = parse(method, uri);
            assert_eq!(
                (info.verb, &*info.resource, &*info.namespace, &*info.name),
                (verb, resource, namespace, name),
                "{uri}"
            );
        }
    }

    #[test]
    fn a_group_is_part_of_the_stored_name() {
        let info = parse("GET", "/apis/apps/v1/daemonsets");
        assert_eq!((info.group_resource(), info.api_version()), ("daemonsets.apps".into(), "apps/v1".into()));
    }
}
