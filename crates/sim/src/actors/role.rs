//! What a pod is for, read from the pod itself.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;

use super::dra::is_plugin;
use super::kubelet::RUN_SECONDS;
use super::object::{controller_of, value};
use super::operator::{DRIVER_APP, DRIVER_COMPONENT, VALIDATOR_APP};
use super::render::SAFE_LOAD_CONTAINER;

/// Init containers of the operator's operands that wait until the node's driver is ready.
const GATES: [&str; 2] = ["driver-validation", "toolkit-validation"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Driver,
    Validator,
    /// A program that has the driver open, and whose init container waits for it.
    Client,
    Job,
    Workload,
}

pub(super) fn role(pod: &Pod) -> Role {
    let label = |key| value(pod.metadata.labels.as_ref(), key);
    if label("app") == Some(DRIVER_APP) || label("app.kubernetes.io/component") == Some(DRIVER_COMPONENT) {
        Role::Driver
    } else if label("app") == Some(VALIDATOR_APP) {
        Role::Validator
    } else if is_plugin(pod) || init_containers(pod).any(|name| GATES.contains(&name)) {
        Role::Client
    } else if controller_of(pod).is_some_and(|owner| owner.kind == "Job")
        || annotated(pod, RUN_SECONDS).is_some()
    {
        Role::Job
    } else {
        Role::Workload
    }
}

/// Whether a driver pod loads its driver only when somebody says so.
pub(super) fn asks_first(pod: &Pod) -> bool {
    init_containers(pod).any(|name| name == SAFE_LOAD_CONTAINER)
}

fn init_containers(pod: &Pod) -> impl Iterator<Item = &str> {
    let init = pod.spec.as_ref().and_then(|spec| spec.init_containers.as_ref());
    init.into_iter().flatten().map(|container| container.name.as_str())
}

/// Whether a pod has its devices by claims.
pub(super) fn claims(pod: &Pod) -> bool {
    let claims = pod.spec.as_ref().and_then(|spec| spec.resource_claims.as_ref());
    claims.is_some_and(|claims| !claims.is_empty())
}

/// `nvcr.io/nvidia/driver:535.104.05-ubuntu22.04` is 535.104.05.
pub(super) fn driver_version(pod: &Pod) -> Option<String> {
    let image = pod.spec.as_ref()?.containers.first()?.image.as_deref()?;
    let (_, tag) = image.rsplit_once(':')?;
    Some(tag.rsplit_once('-').map_or(tag, |(version, _)| version).to_owned())
}

/// A number of seconds in an annotation.
pub(super) fn annotated(pod: &Pod, key: &str) -> Option<Duration> {
    let seconds: f64 = value(pod.metadata.annotations.as_ref(), key)?.parse().ok()?;
    Duration::try_from_secs_f64(seconds).ok()
}
