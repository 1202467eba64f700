//! How lists merge: as a whole, by key, or as a set.
//!
//! Maps always merge field by field; what a list does depends on its schema. For custom resources that is the
//! CRD's `x-kubernetes-list-type`; for built-in kinds it is the part of the published schema that this cluster
//! needs, by field name.

use serde_json::Value;

/// What two versions of one list become.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ListRule<'a> {
    /// The later one replaces the earlier.
    Atomic,
    /// Items with equal keys are the same item.
    Keyed(Vec<&'a str>),
    /// Scalars, each at most once.
    Set,
}

/// Where we are in the schema while walking an object.
#[derive(Clone, Copy, Debug)]
pub(super) enum Lists<'a> {
    /// A built-in type: rules go by field name.
    BuiltIn,
    /// A custom resource's schema node.
    Schema(&'a Value),
}

const NOTHING: &Value = &Value::Null;

impl<'a> Lists<'a> {
    pub(super) fn of(schema: Option<&'a Value>) -> Self {
        schema.map_or(Self::BuiltIn, Self::Schema)
    }

    /// The schema of a field of this object.
    pub(super) fn field(self, name: &str, is_root: bool) -> Self {
        match self {
            Self::BuiltIn => Self::BuiltIn,
            // ObjectMeta is built in, whatever the CRD says.
            Self::Schema(_) if is_root && name == "metadata" => Self::BuiltIn,
            Self::Schema(schema) => {
                let named = schema.get("properties").and_then(|properties| properties.get(name));
                Self::Schema(named.or_else(|| schema.get("additionalProperties")).unwrap_or(NOTHING))
            }
        }
    }

    /// The schema of the items of this list.
    pub(super) fn items(self) -> Self {
        match self {
            Self::BuiltIn => Self::BuiltIn,
            Self::Schema(schema) => Self::Schema(schema.get("items").unwrap_or(NOTHING)),
        }
    }

    /// Whether apply takes the map in the field `name` as a whole.
    pub(super) fn is_atomic_map(self, name: &str) -> bool {
        match self {
            Self::BuiltIn => matches!(name, "involvedObject" | "selector" | "nodeSelector"),
            Self::Schema(schema) => schema["x-kubernetes-map-type"] == "atomic",
        }
    }

    /// How a list in the field `name` merges.
    pub(super) fn rule(self, name: &str) -> ListRule<'a> {
        match self {
            Self::BuiltIn => built_in_rule(name),
            Self::Schema(schema) => match schema["x-kubernetes-list-type"].as_str() {
                Some("map") => ListRule::Keyed(keys(schema)),
                Some("set") => ListRule::Set,
                _ => ListRule::Atomic,
            },
        }
    }
}

fn keys(schema: &Value) -> Vec<&str> {
    schema["x-kubernetes-list-map-keys"].as_array().into_iter().flatten().filter_map(Value::as_str).collect()
}

/// `taints` and `tolerations` are not here on purpose: they are atomic in Kubernetes.
fn built_in_rule(field: &str) -> ListRule<'static> {
    let key = match field {
        "containers"
        | "initContainers"
        | "ephemeralContainers"
        | "env"
        | "volumes"
        | "imagePullSecrets"
        | "resourceClaims"
        | "schedulingGates" => "name",
        "conditions" | "addresses" => "type",
        "ownerReferences" => "uid",
        "ports" => "containerPort",
        "volumeMounts" => "mountPath",
        "volumeDevices" => "devicePath",
        "podIPs" | "hostIPs" | "hostAliases" => "ip",
        "topologySpreadConstraints" => "topologyKey",
        "finalizers" | "podCIDRs" => return ListRule::Set,
        _ => return ListRule::Atomic,
    };
    ListRule::Keyed(vec![key])
}

/// Whether two items of a keyed list are the same item.
pub(super) fn same_item(keys: &[&str], left: &Value, right: &Value) -> bool {
    keys.iter().all(|key| left[*key] == right[*key])
}
