//! API objects as far as they are read. Parsing only these fields is faster and smaller than the full types.

use std::borrow::Cow;
use std::collections::BTreeMap;

use k8s_openapi::api::{apps, core};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::Resource;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

macro_rules! wire {
    ($name:ident like $full:ty) => {
        impl Resource for $name {
            type DynamicType = ();
            type Scope = <$full as Resource>::Scope;
            fn kind(dt: &()) -> Cow<'_, str> {
                <$full as Resource>::kind(dt)
            }
            fn group(dt: &()) -> Cow<'_, str> {
                <$full as Resource>::group(dt)
            }
            fn version(dt: &()) -> Cow<'_, str> {
                <$full as Resource>::version(dt)
            }
            fn plural(dt: &()) -> Cow<'_, str> {
                <$full as Resource>::plural(dt)
            }
            fn meta(&self) -> &ObjectMeta {
                &self.metadata
            }
            fn meta_mut(&mut self) -> &mut ObjectMeta {
                &mut self.metadata
            }
        }
    };
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Node {
    pub(crate) metadata: ObjectMeta,
    #[serde(default)]
    pub(crate) spec: NodeSpec,
    #[serde(default)]
    pub(crate) status: NodeStatus,
}
wire!(Node like core::v1::Node);

#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct NodeSpec {
    #[serde(default)]
    pub(crate) unschedulable: bool,
    #[serde(default)]
    pub(crate) taints: Vec<Value>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct NodeStatus {
    #[serde(default)]
    pub(crate) conditions: Vec<Condition>,
    #[serde(default)]
    pub(crate) allocatable: BTreeMap<String, IntOrString>,
    #[serde(default)]
    pub(crate) node_info: NodeInfo,
    #[serde(default)]
    pub(crate) addresses: Vec<Address>,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Address {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) address: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct NodeInfo {
    #[serde(default, rename = "bootID")]
    pub(crate) boot_id: String,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Condition {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) status: String,
    #[serde(default)]
    pub(crate) last_heartbeat_time: Option<Time>,
    #[serde(default)]
    pub(crate) last_transition_time: Option<Time>,
    #[serde(default)]
    pub(crate) reason: String,
    #[serde(default)]
    pub(crate) message: String,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Pod {
    pub(crate) metadata: ObjectMeta,
    #[serde(default)]
    pub(crate) spec: PodSpec,
    #[serde(default)]
    pub(crate) status: PodStatus,
}
wire!(Pod like core::v1::Pod);

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PodSpec {
    #[serde(default)]
    pub(crate) node_name: String,
    #[serde(default)]
    pub(crate) containers: Vec<Container>,
    #[serde(default)]
    pub(crate) init_containers: Vec<Container>,
    #[serde(default)]
    pub(crate) volumes: Vec<Volume>,
    #[serde(default)]
    pub(crate) runtime_class_name: Option<String>,
    #[serde(default)]
    pub(crate) resource_claims: Vec<ClaimRef>,
    #[serde(default)]
    pub(crate) affinity: Option<core::v1::Affinity>,
}

/// A claim by its own name, or one that is made for the pod; then the pod's status has the name.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ClaimRef {
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) resource_claim_name: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Container {
    #[serde(default)]
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) image: String,
    #[serde(default)]
    pub(crate) resources: Resources,
    #[serde(default)]
    pub(crate) env: Vec<Env>,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct Resources {
    #[serde(default)]
    pub(crate) limits: BTreeMap<String, IntOrString>,
    #[serde(default)]
    pub(crate) requests: BTreeMap<String, IntOrString>,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Env {
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) value: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Volume {
    #[serde(default)]
    pub(crate) empty_dir: Option<IgnoredAny>,
    #[serde(default)]
    pub(crate) host_path: Option<HostPath>,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct HostPath {
    #[serde(default)]
    pub(crate) path: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PodStatus {
    #[serde(default)]
    pub(crate) phase: String,
    #[serde(default)]
    pub(crate) conditions: Vec<Condition>,
    #[serde(default)]
    pub(crate) container_statuses: Vec<ContainerStatus>,
    #[serde(default)]
    pub(crate) init_container_statuses: Vec<ContainerStatus>,
    #[serde(default)]
    pub(crate) resource_claim_statuses: Vec<ClaimRef>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ContainerStatus {
    pub(crate) name: String,
    #[serde(default, rename = "containerID")]
    pub(crate) container_id: String,
    #[serde(default)]
    pub(crate) restart_count: u32,
    #[serde(default)]
    pub(crate) state: ContainerState,
    #[serde(default)]
    pub(crate) last_state: LastState,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct LastState {
    #[serde(default)]
    pub(crate) terminated: Option<Terminated>,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct ContainerState {
    #[serde(default)]
    pub(crate) running: Option<Running>,
    #[serde(default)]
    pub(crate) waiting: Option<Waiting>,
    #[serde(default)]
    pub(crate) terminated: Option<Terminated>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Running {
    #[serde(default)]
    pub(crate) started_at: Option<Time>,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Waiting {
    #[serde(default)]
    pub(crate) reason: String,
    #[serde(default)]
    pub(crate) message: String,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Terminated {
    #[serde(default)]
    pub(crate) exit_code: i32,
    #[serde(default)]
    pub(crate) reason: String,
    #[serde(default)]
    pub(crate) message: String,
}

/// A ControllerRevision. Its data is a whole pod template if it is a DaemonSet's, and anything at all otherwise.
#[expect(clippy::struct_field_names, reason = "the API's own name")]
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Revision {
    pub(crate) metadata: ObjectMeta,
    pub(crate) revision: i64,
    #[serde(default)]
    pub(crate) data: serde_json::Value,
}
wire!(Revision like apps::v1::ControllerRevision);
