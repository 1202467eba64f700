//! Which resources exist, and which of the API server's rules apply to each.
//!
//! The built-in ones are a table; a `CustomResourceDefinition` object becomes a [`Kind`] like any other, with a
//! schema per served version.

use serde_json::Value;

/// A rule that applies to some kinds only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trait {
    /// Objects live in a namespace.
    Namespaced,
    /// `status` is written through its own subresource only.
    Status,
    /// `metadata.generation` counts changes of what is wanted.
    Generation,
    /// A PUT without a resourceVersion is taken as "whatever is there".
    UnconditionalUpdate,
    /// DELETE answers with the object instead of a Status.
    ReturnsDeleted,
    /// A PUT of what is not there makes it.
    CreateOnUpdate,
}

/// One resource.
#[derive(Clone, Debug)]
#[expect(clippy::struct_field_names, reason = "`kind` is what Kubernetes calls it")]
pub(super) struct Kind {
    pub(super) group: String,
    pub(super) plural: String,
    pub(super) singular: String,
    pub(super) short_names: Vec<String>,
    pub(super) kind: String,
    /// Made by a `CustomResourceDefinition`.
    pub(super) is_custom: bool,
    pub(super) traits: Vec<Trait>,
    /// The served versions.
    pub(super) versions: Vec<Version>,
    /// The version objects are stored in.
    pub(super) storage: String,
}

/// One served version of a resource.
#[derive(Clone, Debug)]
pub(super) struct Version {
    pub(super) name: String,
    /// `openAPIV3Schema`; the built-in kinds have none here and are taken as they come.
    pub(super) schema: Option<Value>,
}

impl Kind {
    pub(super) fn has(&self, wanted: Trait) -> bool {
        self.traits.contains(&wanted)
    }

    /// `pods`, `daemonsets.apps`.
    pub(super) fn resource(&self) -> String {
        if self.group.is_empty() { self.plural.clone() } else { format!("{}.{}", self.plural, self.group) }
    }

    /// `Pod`, `DaemonSet.apps`: how validation messages name the kind.
    pub(super) fn qualified(&self) -> String {
        if self.group.is_empty() { self.kind.clone() } else { format!("{}.{}", self.kind, self.group) }
    }

    pub(super) fn version(&self, name: &str) -> Option<&Version> {
        self.versions.iter().find(|version| version.name == name)
    }

    pub(super) fn api_version(&self, version: &str) -> String {
        if self.group.is_empty() { version.to_owned() } else { format!("{}/{version}", self.group) }
    }

    /// Reads a `CustomResourceDefinition`.
    pub(super) fn from_definition(definition: &Value) -> Self {
        let spec = &definition["spec"];
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let declared: Vec<&Value> = spec["versions"].as_array().into_iter().flatten().collect();
        let served = declared.iter().filter(|version| version["served"] != Value::Bool(false));
        let versions = served.map(|version| Version {
            name: text(&version["name"]),
            schema: version.pointer("/schema/openAPIV3Schema").cloned(),
        });
        let storage = declared.iter().find(|version| version["storage"] == Value::Bool(true));
        let mut traits = vec![Trait::Generation];
        if spec["scope"] == "Namespaced" {
            traits.push(Trait::Namespaced);
        }
        if declared.iter().any(|version| version["subresources"]["status"].is_object()) {
            traits.push(Trait::Status);
        }
        let kind = text(&spec["names"]["kind"]);
        let singular = spec["names"]["singular"].as_str().map_or_else(|| kind.to_lowercase(), str::to_owned);
        let short_names = spec["names"]["shortNames"].as_array().into_iter().flatten();
        Self {
            group: text(&spec["group"]),
            plural: text(&spec["names"]["plural"]),
            singular,
            short_names: short_names.map(text).collect(),
            kind,
            is_custom: true,
            traits,
            versions: versions.collect(),
            storage: storage.map_or_else(String::new, |version| text(&version["name"])),
        }
    }
}

/// The resources every cluster has.
pub(super) fn built_in() -> impl Iterator<Item = Kind> {
    BUILT_IN.iter().map(|&(group, version, plural, kind, traits)| Kind {
        group: group.to_owned(),
        plural: plural.to_owned(),
        singular: kind.to_lowercase(),
        short_names: Vec::new(),
        kind: kind.to_owned(),
        is_custom: false,
        traits: traits.to_vec(),
        versions: vec![Version { name: version.to_owned(), schema: None }],
        storage: version.to_owned(),
    })
}

type Row = (&'static str, &'static str, &'static str, &'static str, &'static [Trait]);

#[rustfmt::skip] // a table
const BUILT_IN: &[Row] = {
    use Trait::{CreateOnUpdate, Generation, Namespaced, ReturnsDeleted, Status, UnconditionalUpdate};
    const WORKLOAD: &[Trait] = &[Namespaced, Status, Generation, UnconditionalUpdate];
    const DATA: &[Trait] = &[Namespaced, UnconditionalUpdate];
    &[
        ("", "v1", "nodes", "Node", &[Status, UnconditionalUpdate]),
        ("", "v1", "pods", "Pod", &[Namespaced, Status, Generation, UnconditionalUpdate, ReturnsDeleted]),
        ("", "v1", "namespaces", "Namespace", &[Status, UnconditionalUpdate, ReturnsDeleted]),
        ("", "v1", "configmaps", "ConfigMap", DATA),
        ("", "v1", "events", "Event", &[Namespaced, UnconditionalUpdate, CreateOnUpdate]),
        ("", "v1", "serviceaccounts", "ServiceAccount", &[Namespaced, UnconditionalUpdate, ReturnsDeleted]),
        ("", "v1", "secrets", "Secret", DATA),
        ("", "v1", "services", "Service", &[Namespaced, Status, UnconditionalUpdate, ReturnsDeleted]),
        ("apps", "v1", "daemonsets", "DaemonSet", WORKLOAD),
        ("apps", "v1", "deployments", "Deployment", WORKLOAD),
        ("apps", "v1", "replicasets", "ReplicaSet", WORKLOAD),
        ("apps", "v1", "statefulsets", "StatefulSet", WORKLOAD),
        ("apps", "v1", "controllerrevisions", "ControllerRevision", DATA),
        ("batch", "v1", "jobs", "Job", WORKLOAD),
        ("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", &[Namespaced, Status, Generation]),
        ("coordination.k8s.io", "v1", "leases", "Lease", &[Namespaced, CreateOnUpdate]),
        ("resource.k8s.io", "v1", "resourceclaims", "ResourceClaim", &[Namespaced, Status, UnconditionalUpdate, ReturnsDeleted]),
        ("resource.k8s.io", "v1", "resourceslices", "ResourceSlice", &[Generation, UnconditionalUpdate, ReturnsDeleted]),
        ("scheduling.k8s.io", "v1", "priorityclasses", "PriorityClass", &[Generation, UnconditionalUpdate]),
        ("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", &[Status, Generation]),
    ]
};

/// Where definitions are stored; a write here changes which resources exist.
pub(super) const DEFINITIONS: &str = "customresourcedefinitions.apiextensions.k8s.io";
