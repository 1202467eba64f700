//! The kubelet plugin of NVIDIA's DRA driver: the identities under which it is installed, and its DaemonSet.
//!
//! Its pods are recognised by what they run, because names and labels differ from one installation to the next. What
//! they publish is in `slices.rs`.

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::object::controller_of;
use super::operator::{GPU_PRESENT, NAMESPACE};

/// The DRA driver's name in claims and slices.
pub const DRA_DRIVER: &str = "gpu.nvidia.com";
/// On nodes that get a pod of the operator's plugin.
pub(crate) const DEPLOY_DRA: &str = "nvidia.com/gpu.deploy.dra-driver";
/// DaemonSet and label `app` of the plugin that the operator deploys.
pub(super) const OPERATOR_PLUGIN: &str = "nvidia-dra-driver-kubelet-plugin";
/// The container that serves GPUs.
const GPUS_CONTAINER: &str = "gpus";

/// Who installed the plugin, which decides how its objects are called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraIdentity {
    /// NVIDIA's chart `nvidia-dra-driver-gpu`.
    NvidiaChart,
    /// The same with `selectorLabelsOverride`: the component label is replaced.
    NvidiaChartRelabelled,
    /// The chart `dra-driver-nvidia-gpu` of kubernetes-sigs.
    SigsChart,
    /// The GPU operator.
    Operator,
}

/// A DRA plugin in a fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dra {
    /// Under which names.
    pub identity: DraIdentity,
    /// Whether pods stay as they are until somebody deletes them.
    pub on_delete: bool,
}

impl From<DraIdentity> for Dra {
    fn from(identity: DraIdentity) -> Self {
        Self { identity, on_delete: false }
    }
}

impl DraIdentity {
    /// The DaemonSet's namespace.
    pub fn namespace(self) -> &'static str {
        match self {
            Self::Operator => NAMESPACE,
            other => other.chart(),
        }
    }

    /// The DaemonSet's name.
    pub fn daemon_set(self) -> String {
        match self {
            Self::Operator => OPERATOR_PLUGIN.to_owned(),
            other => format!("{}-kubelet-plugin", other.chart()),
        }
    }

    fn chart(self) -> &'static str {
        match self {
            Self::SigsChart => "dra-driver-nvidia-gpu",
            _ => "nvidia-dra-driver-gpu",
        }
    }

    /// The DaemonSet's own labels. The component is on pods only.
    fn labels(self) -> Value {
        match self {
            Self::Operator => json!({"app": OPERATOR_PLUGIN}),
            other => {
                json!({"app.kubernetes.io/name": other.chart(), "app.kubernetes.io/instance": other.chart()})
            }
        }
    }

    fn pod_labels(self) -> Value {
        let mut labels = self.labels();
        match self {
            Self::Operator => {}
            Self::NvidiaChartRelabelled => labels["example.com/part"] = json!("gpu-claims"),
            other => labels[format!("{}-component", other.chart())] = json!("kubelet-plugin"),
        }
        labels
    }

    fn node_selector(self) -> Value {
        match self {
            Self::Operator => json!({DEPLOY_DRA: "true"}),
            _ => json!({GPU_PRESENT: "true"}),
        }
    }
}

impl Dra {
    /// The DaemonSet to create.
    pub(crate) fn object(self) -> Value {
        let Self { identity, on_delete } = self;
        let image = "nvcr.io/nvidia/k8s-dra-driver-gpu:v25.8.0";
        let strategy = match (on_delete, identity) {
            (true, _) => json!({"type": "OnDelete"}),
            (false, DraIdentity::Operator) => {
                json!({"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "100%"}})
            }
            (false, _) => json!({"type": "RollingUpdate"}),
        };
        let container = |name: &str| json!({"name": name, "image": image});
        let pod = json!({
            "nodeSelector": identity.node_selector(),
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "priorityClassName": "system-node-critical",
            // Waits for the driver root.
            "initContainers": [container("init-container")],
            "containers": [container("compute-domains"), container(GPUS_CONTAINER)],
        });
        json!({
            "metadata": {
                "namespace": identity.namespace(), "name": identity.daemon_set(), "labels": identity.labels(),
            },
            "spec": {
                "selector": {"matchLabels": identity.pod_labels()},
                "updateStrategy": strategy,
                "template": {"metadata": {"labels": identity.pod_labels()}, "spec": pod},
            },
        })
    }
}

/// A plugin's pod, whatever it is called.
pub(crate) fn is_plugin(pod: &Pod) -> bool {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    controller_of(pod)
        .is_some_and(|owner| owner.kind == "DaemonSet" && owner.name.ends_with("-kubelet-plugin"))
        && containers.into_iter().any(|container| container.name == GPUS_CONTAINER)
}

/// A driver's version as a device attribute has it, which must be a semantic version: `580.105.08` is `580.105.8`.
pub(super) fn semantic(version: &str) -> Option<String> {
    let parts: Option<Vec<u64>> = version.split('.').map(|part| part.parse().ok()).collect();
    match parts?.as_slice() {
        [major] => Some(format!("{major}.0.0")),
        [major, minor] => Some(format!("{major}.{minor}.0")),
        [major, minor, patch] => Some(format!("{major}.{minor}.{patch}")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_version_loses_its_leading_zeros() {
        assert_eq!(semantic("580.105.08").as_deref(), Some("580.105.8"));
        assert_eq!(semantic("550.1").as_deref(), Some("550.1.0"));
        assert_eq!(semantic("580.105.08-grid"), None);
    }
}
