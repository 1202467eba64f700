//! A pod's status, as a kubelet writes it, from where the pod is in its life.

use k8s_openapi::api::core::v1::{
    Container as ContainerSpec, ContainerState, ContainerStateRunning, ContainerStateTerminated,
    ContainerStateWaiting, ContainerStatus, Pod, PodCondition, PodStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::pod_life::{Container, Exit, KILLED, Life};

/// The pod's status with the kubelet's part brought up to date; what others wrote stays.
pub(super) fn status_of(pod: &Pod, life: &Life, now: &Time) -> PodStatus {
    let mut status = pod.status.clone().unwrap_or_default();
    let spec = pod.spec.as_ref();
    status.phase = Some(phase(life).into());
    status.start_time = Some(life.since.clone());
    status.container_statuses =
        spec.map(|spec| spec.containers.iter().map(|container| main_status(container, life)).collect());
    status.init_container_statuses =
        spec.and_then(|spec| spec.init_containers.as_ref()).map(|containers| init_statuses(containers, life));
    if life.expired {
        status.reason = Some("DeadlineExceeded".into());
        status.message = Some("Pod was active on the node longer than the specified deadline".into());
    }
    let finished = matches!(life.container, Container::Exited(_) | Container::Never);
    let reason = (!life.ready).then_some(if finished { "PodCompleted" } else { "ContainersNotReady" });
    let conditions = status.conditions.get_or_insert_default();
    set(conditions, "PodScheduled", true, None, now);
    let prepared = life.container != Container::Unprepared;
    set(conditions, "PodReadyToStartContainers", prepared, None, now);
    let initializing =
        matches!(life.container, Container::Initializing { .. } | Container::InitBackingOff(_));
    let initialized = prepared && !initializing;
    set(conditions, "Initialized", initialized, None, now);
    set(conditions, "ContainersReady", life.ready, reason, now);
    set(conditions, "Ready", life.ready, reason, now);
    status
}

fn phase(life: &Life) -> &'static str {
    match &life.container {
        Container::Creating if life.restarts > 0 => "Running",
        Container::Creating
        | Container::Unprepared
        | Container::Initializing { .. }
        | Container::InitBackingOff(_)
        | Container::NoImage => "Pending",
        Container::Running { .. } | Container::BackingOff => "Running",
        Container::Exited(exit) if exit.code == 0 => "Succeeded",
        Container::Exited(_) | Container::Never => "Failed",
    }
}

fn set(conditions: &mut Vec<PodCondition>, kind: &str, holds: bool, reason: Option<&str>, now: &Time) {
    let status = if holds { "True" } else { "False" };
    let known = conditions.iter_mut().find(|condition| condition.type_ == kind);
    if known.as_ref().is_some_and(|known| known.status == status && known.reason.as_deref() == reason) {
        return;
    }
    let same = known.as_ref().is_some_and(|known| known.status == status);
    let since = known.as_ref().filter(|_| same).and_then(|known| known.last_transition_time.clone());
    let condition = PodCondition {
        type_: kind.into(),
        status: status.into(),
        reason: reason.map(str::to_owned),
        last_transition_time: Some(since.unwrap_or_else(|| now.clone())),
        ..PodCondition::default()
    };
    match known {
        Some(known) => *known = condition,
        None => conditions.push(condition),
    }
}

fn main_status(container: &ContainerSpec, life: &Life) -> ContainerStatus {
    let image = container.image.clone().unwrap_or_default();
    let state = match &life.container {
        Container::Creating | Container::Unprepared => waiting("ContainerCreating", None),
        Container::Initializing { .. } | Container::InitBackingOff(_) => waiting("PodInitializing", None),
        Container::NoImage => {
            waiting("ImagePullBackOff", Some(format!("Back-off pulling image \"{image}\"")))
        }
        Container::Running { since } => running(since),
        Container::BackingOff => {
            let message = format!("back-off restarting failed container={}", container.name);
            waiting("CrashLoopBackOff", Some(message))
        }
        Container::Exited(exit) => terminated(exit),
        Container::Never => never(),
    };
    let runs = matches!(life.container, Container::Running { .. });
    ContainerStatus {
        name: container.name.clone(),
        image_id: if runs { image.clone() } else { String::new() },
        image,
        container_id: runs.then(|| format!("sim://{}/{}/{}", life.uid, container.name, life.restarts)),
        ready: life.ready,
        started: Some(runs),
        restart_count: life.restarts,
        state: Some(state),
        last_state: life.last_exit.as_ref().map(terminated),
        ..ContainerStatus::default()
    }
}

/// Init containers have done their work by the time anything is reported, but for the last one of a pod that waits, and the
/// first of one that has failed.
fn init_statuses(containers: &[ContainerSpec], life: &Life) -> Vec<ContainerStatus> {
    let done = Exit { started: life.since.clone(), at: life.since.clone(), code: 0, message: String::new() };
    let last = containers.len().saturating_sub(1);
    let status = |(index, container): (usize, &ContainerSpec)| {
        let (state, last_state) = match &life.container {
            Container::Initializing { since } if index == last => (running(since), None),
            Container::InitBackingOff(exit) if index == 0 => {
                let message = format!("back-off restarting failed container={}", container.name);
                (waiting("CrashLoopBackOff", Some(message)), Some(terminated(exit)))
            }
            Container::InitBackingOff(_) => (waiting("PodInitializing", None), None),
            _ => (terminated(&done), None),
        };
        ContainerStatus {
            last_state,
            name: container.name.clone(),
            image: container.image.clone().unwrap_or_default(),
            ready: state.terminated.is_some(),
            started: Some(state.running.is_some()),
            state: Some(state),
            ..ContainerStatus::default()
        }
    };
    containers.iter().enumerate().map(status).collect()
}

fn running(since: &Time) -> ContainerState {
    let running = ContainerStateRunning { started_at: Some(since.clone()) };
    ContainerState { running: Some(running), ..ContainerState::default() }
}

fn waiting(reason: &str, message: Option<String>) -> ContainerState {
    let waiting = ContainerStateWaiting { reason: Some(reason.into()), message };
    ContainerState { waiting: Some(waiting), ..ContainerState::default() }
}

/// What kubelets say of a container that a pod's end came before.
fn never() -> ContainerState {
    let terminated = ContainerStateTerminated {
        exit_code: KILLED,
        reason: Some("ContainerStatusUnknown".into()),
        message: Some("The container could not be located when the pod was terminated".into()),
        ..ContainerStateTerminated::default()
    };
    ContainerState { terminated: Some(terminated), ..ContainerState::default() }
}

fn terminated(exit: &Exit) -> ContainerState {
    let terminated = ContainerStateTerminated {
        exit_code: exit.code,
        reason: Some(if exit.code == 0 { "Completed" } else { "Error" }.into()),
        message: Some(exit.message.clone()).filter(|message| !message.is_empty()),
        started_at: Some(exit.started.clone()),
        finished_at: Some(exit.at.clone()),
        ..ContainerStateTerminated::default()
    };
    ContainerState { terminated: Some(terminated), ..ContainerState::default() }
}
