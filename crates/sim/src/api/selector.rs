//! Label and field selectors.
//!
//! In comes the query text (or a `LabelSelector` object, as in a PodDisruptionBudget), out goes a [`Selector`]
//! that judges an object's JSON in place: this is the hot path of every watch, so nothing is cloned.

use super::kinds::{Kind, Trait};
use super::reply::Failure;
use super::request::Options;
use serde_json::{Map, Value};

/// All terms must hold. The default selects everything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Selector {
    labels: Vec<Term>,
    fields: Vec<Field>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Term {
    In(String, Vec<String>),
    NotIn(String, Vec<String>),
    Exists(String),
    Missing(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Field {
    path: Vec<String>,
    value: String,
    equal: bool,
}

impl Selector {
    /// Reads `labelSelector` and `fieldSelector`.
    pub(super) fn from_options(options: &Options, kind: &Kind) -> Result<Self, Failure> {
        let labels = parse_labels(options.text("labelSelector"))?;
        let fields = parse_fields(options.text("fieldSelector"))?;
        for field in &fields {
            check_field(&field.path.join("."), kind)?;
        }
        Ok(Self { labels, fields })
    }

    /// Whether nothing was asked for.
    pub(super) fn is_everything(&self) -> bool {
        self.labels.is_empty() && self.fields.is_empty()
    }

    /// Reads a `LabelSelector` object (`matchLabels`, `matchExpressions`); empty selects everything.
    pub(super) fn from_object(selector: &Value) -> Self {
        let pairs = selector["matchLabels"].as_object().into_iter().flatten();
        let equal = pairs.map(|(key, value)| Term::In(key.clone(), strings(std::slice::from_ref(value))));
        let expressions = selector["matchExpressions"].as_array().into_iter().flatten();
        let labels = equal.chain(expressions.map(expression)).collect();
        Self { labels, fields: Vec::new() }
    }

    /// Narrows the selector to one object.
    pub(super) fn and_name(mut self, name: &str) -> Self {
        let path = vec!["metadata".to_owned(), "name".to_owned()];
        self.fields.push(Field { path, value: name.to_owned(), equal: true });
        self
    }

    /// The one name that it selects, if there is one.
    pub(super) fn name(&self) -> Option<&str> {
        let is_name = |field: &&Field| field.equal && field.path == ["metadata", "name"];
        Some(self.fields.iter().find(is_name)?.value.as_str())
    }

    /// The one node whose objects it selects, if there is one.
    pub(super) fn node(&self) -> Option<&str> {
        let names_node = |field: &&Field| field.equal && field.path == ["spec", "nodeName"];
        let node = self.fields.iter().find(names_node)?;
        Some(node.value.as_str()).filter(|node| !node.is_empty())
    }

    pub(super) fn matches(&self, object: &Value) -> bool {
        let labels = object["metadata"]["labels"].as_object();
        self.fields.iter().all(|field| field.holds(object))
            && self.labels.iter().all(|term| term.holds(labels))
    }
}

impl Term {
    fn holds(&self, labels: Option<&Map<String, Value>>) -> bool {
        let label = |key: &str| labels.and_then(|labels| labels.get(key)).and_then(Value::as_str);
        match self {
            Self::In(key, values) => {
                label(key).is_some_and(|label| values.iter().any(|value| value == label))
            }
            // An absent label is "not in" any set, as in Kubernetes.
            Self::NotIn(key, values) => {
                label(key).is_none_or(|label| values.iter().all(|value| value != label))
            }
            Self::Exists(key) => label(key).is_some(),
            Self::Missing(key) => label(key).is_none(),
        }
    }
}

impl Field {
    fn holds(&self, object: &Value) -> bool {
        let found = self.path.iter().fold(object, |value, step| &value[step.as_str()]);
        let equal = match found {
            Value::String(text) => *text == self.value,
            // Absent booleans are false in Go, so `spec.unschedulable=false` selects nodes without the field.
            Value::Null => {
                self.value.is_empty()
                    || (self.value == "false" && self.path.ends_with(&["unschedulable".to_owned()]))
            }
            Value::Bool(flag) => self.value == if *flag { "true" } else { "false" },
            _ => false,
        };
        equal == self.equal
    }
}

/// A field that the kind is not indexed by is refused, not compared.
fn check_field(path: &str, kind: &Kind) -> Result<(), Failure> {
    let own: &[&str] = if kind.is_custom { &[] } else { fields_of(&kind.kind) };
    let is_namespace = path == "metadata.namespace" && (kind.has(Trait::Namespaced) || own.is_empty());
    if path == "metadata.name" || is_namespace || own.contains(&path) {
        return Ok(());
    }
    Err(Failure::bad_request(if own.is_empty() && !kind.is_custom {
        format!("\"{path}\" is not a known field selector: only \"metadata.name\", \"metadata.namespace\"")
    } else {
        format!("field label not supported: {path}")
    }))
}

/// The fields besides name and namespace that a built-in kind can be selected by.
fn fields_of(kind: &str) -> &'static [&'static str] {
    match kind {
        "Pod" => &[
            "spec.nodeName",
            "spec.restartPolicy",
            "spec.schedulerName",
            "spec.serviceAccountName",
            "spec.hostNetwork",
            "status.phase",
            "status.podIP",
            "status.nominatedNodeName",
        ],
        "Node" => &["spec.unschedulable"],
        "Namespace" => &["status.phase"],
        "Event" => &[
            "involvedObject.kind",
            "involvedObject.namespace",
            "involvedObject.name",
            "involvedObject.uid",
            "involvedObject.apiVersion",
            "involvedObject.resourceVersion",
            "involvedObject.fieldPath",
            "reason",
            "reportingComponent",
            "source",
            "type",
        ],
        "Secret" => &["type"],
        "Job" => &["status.successful"],
        "ReplicaSet" => &["status.replicas"],
        "ResourceSlice" => &["spec.nodeName", "spec.driver"],
        _ => &[],
    }
}

fn expression(expression: &Value) -> Term {
    let key = expression["key"].as_str().unwrap_or_default().to_owned();
    let values = strings(expression["values"].as_array().map_or(&[], Vec::as_slice));
    match expression["operator"].as_str() {
        Some("NotIn") => Term::NotIn(key, values),
        Some("Exists") => Term::Exists(key),
        Some("DoesNotExist") => Term::Missing(key),
        _ => Term::In(key, values),
    }
}

fn strings(values: &[Value]) -> Vec<String> {
    values.iter().filter_map(Value::as_str).map(str::to_owned).collect()
}

fn parse_fields(text: &str) -> Result<Vec<Field>, Failure> {
    text.split(',').filter(|term| !term.is_empty()).map(parse_field).collect()
}

fn parse_field(term: &str) -> Result<Field, Failure> {
    let (path, value, equal) = match (term.split_once("!="), term.split_once('=')) {
        (Some((path, value)), _) => (path, value, false),
        (None, Some((path, value))) => (path, value.trim_start_matches('='), true),
        (None, None) => return Err(Failure::bad_request(format!("invalid field selector: \"{term}\""))),
    };
    let path = path.trim().split('.').map(str::to_owned).collect();
    Ok(Field { path, value: value.trim().to_owned(), equal })
}

fn parse_labels(text: &str) -> Result<Vec<Term>, Failure> {
    split_outside_brackets(text)
        .into_iter()
        .map(str::trim)
        .filter(|term| !term.is_empty())
        .map(parse_label)
        .collect()
}

/// The commas inside `in (a, b)` do not separate terms.
fn split_outside_brackets(text: &str) -> Vec<&str> {
    let mut terms = Vec::new();
    let (mut start, mut depth) = (0, 0_u32);
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'(' => depth += 1,
            b')' => depth = depth.saturating_sub(1),
            b',' if depth == 0 => {
                terms.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    terms.push(&text[start..]);
    terms
}

fn parse_label(term: &str) -> Result<Term, Failure> {
    let owned = |text: &str| text.trim().to_owned();
    if let Some((key, set)) = term.split_once(" notin ") {
        return Ok(Term::NotIn(owned(key), parse_set(set)?));
    }
    if let Some((key, set)) = term.split_once(" in ") {
        return Ok(Term::In(owned(key), parse_set(set)?));
    }
    if let Some((key, value)) = term.split_once("!=") {
        return Ok(Term::NotIn(owned(key), vec![owned(value)]));
    }
    if let Some((key, value)) = term.split_once('=') {
        return Ok(Term::In(owned(key), vec![owned(value.trim_start_matches('='))]));
    }
    if let Some(key) = term.strip_prefix('!') {
        return Ok(Term::Missing(owned(key)));
    }
    if let Some(found) = term.split_whitespace().nth(1) {
        return Err(Failure::bad_request(format!(
            "unable to parse requirement: found '{found}', expected: in, notin, =, ==, !=, gt, lt"
        )));
    }
    Ok(Term::Exists(owned(term)))
}

fn parse_set(text: &str) -> Result<Vec<String>, Failure> {
    let inner = text.trim().strip_prefix('(').and_then(|text| text.strip_suffix(')'));
    let inner =
        inner.ok_or_else(|| Failure::bad_request(format!("unable to parse requirement: \"{text}\"")))?;
    Ok(inner.split(',').map(|value| value.trim().to_owned()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn selects(labels: &str, fields: &str) -> bool {
        let node = json!({"metadata": {"name": "a", "labels": {"gpu": "h100", "zone": "x"}}, "spec": {"nodeName": "n"}});
        let selector =
            Selector { labels: parse_labels(labels).unwrap(), fields: parse_fields(fields).unwrap() };
        selector.matches(&node)
    }

    #[test]
    fn label_selectors_follow_the_kubernetes_grammar() {
        for yes in [
            "",
            "gpu",
            "gpu=h100",
            "gpu==h100,zone=x",
            "gpu in (b200, h100),zone",
            "!draining",
            "gpu!=b200",
            "draining!=1",
            "draining notin (1)",
        ] {
            assert!(selects(yes, ""), "{yes}");
        }
        for no in ["gpu=b200", "gpu notin (h100)", "!gpu", "gpu in (b200)", "draining", "zone!=x", "gpu="] {
            assert!(!selects(no, ""), "{no}");
        }
    }

    #[test]
    fn field_selectors_compare_any_path() {
        for yes in [
            "metadata.name=a",
            "metadata.name==a,spec.nodeName=n",
            "status.phase!=Failed",
            "spec.unschedulable=false",
            "status.phase=",
        ] {
            assert!(selects("", yes), "{yes}");
        }
        for no in ["metadata.name=b", "spec.nodeName!=n", "spec.nodeName=", "spec.unschedulable=true"] {
            assert!(!selects("", no), "{no}");
        }
    }

    #[test]
    fn a_broken_selector_is_a_bad_request() {
        assert!(parse_labels("a b").is_err());
        assert!(parse_labels("a in b").is_err());
        assert!(parse_fields("a").is_err());
    }

    #[test]
    fn a_selector_object_means_the_same_as_its_text() {
        let object = json!({"matchLabels": {"a": "1"}, "matchExpressions": [
            {"key": "b", "operator": "In", "values": ["1", "2"]}, {"key": "c", "operator": "DoesNotExist"}]});
        let text = parse_labels("a=1,b in (1,2),!c").unwrap();
        assert_eq!(Selector::from_object(&object), Selector { labels: text, fields: vec![] });
    }
}
