//! What a pod is going to do, as its role and the behaviour table have it. Values in, a `Course` out.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use pitcrew_core::contract::GATE_LABEL;

use super::behaviour::{Behaviour, Fault, GateOutcome};
use super::kubelet::RUN_SECONDS;
use super::object::{controller_of, value};
use super::pod_life::Course;
use super::role::{Role, annotated, driver_version, role};

/// Where, and by whose chance.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place<'a> {
    pub(super) node: &'a str,
    pub(super) seed: u64,
    /// The driver that is loaded there.
    pub(super) version: Option<&'a str>,
}

/// What `pod` does if nothing comes in between; `driver` is who provides the node's driver now.
pub(super) fn course(behaviour: &Behaviour, pod: &Pod, place: Place<'_>, driver: Option<&str>) -> Course {
    let Place { node, seed, .. } = place;
    let timing = &behaviour.timing;
    match role(pod) {
        Role::Driver => of_driver(behaviour, pod, place),
        Role::Validator if behaviour.unproven.contains(node) => {
            Course::Hang { start: timing.validator_start }
        }
        Role::Validator => {
            let start = behaviour.jittered(timing.validator_start, seed, &format!("{node}/validator"));
            Course::Follow { start, driver: driver.map(str::to_owned) }
        }
        Role::Client => of_client(behaviour, pod, place),
        Role::Job => {
            if let Some(gate) = value(pod.metadata.labels.as_ref(), GATE_LABEL) {
                return of_gate(behaviour, pod, place, gate);
            }
            let start = behaviour.jittered(timing.workload_start, seed, &pod.name_any());
            let name = controller_of(pod).map_or_else(|| pod.name_any(), |owner| owner.name.clone());
            let rule = behaviour.job(seed, node, &name);
            let run = annotated(pod, RUN_SECONDS).or(rule.map(|rule| rule.run)).unwrap_or(timing.job_run);
            let message = rule.map(|rule| rule.message.clone()).unwrap_or_default();
            Course::Finish { start, run, exit_code: rule.map_or(0, |rule| rule.exit_code), message }
        }
        Role::Workload => {
            let start = behaviour.jittered(timing.workload_start, seed, &pod.name_any());
            Course::Run { start, warm_up: Duration::ZERO }
        }
    }
}

fn of_driver(behaviour: &Behaviour, pod: &Pod, Place { node, seed, .. }: Place<'_>) -> Course {
    let version = driver_version(pod).unwrap_or_default();
    let whole = behaviour.jittered(behaviour.timing.driver_start, seed, &format!("{node}/{version}"));
    let start = whole / 5;
    let run = Course::Run { start, warm_up: whole.saturating_sub(start) };
    broken(behaviour, run, behaviour.fault(seed, node, &version))
}

fn of_gate(behaviour: &Behaviour, pod: &Pod, Place { node, seed, version }: Place<'_>, gate: &str) -> Course {
    let start = behaviour.jittered(behaviour.timing.workload_start, seed, &pod.name_any());
    let run = behaviour.jittered(behaviour.timing.gate_run, seed, &pod.name_any());
    match behaviour.gate(seed, node, gate, version) {
        GateOutcome::Passes { report } => {
            Course::Finish { start, run, exit_code: 0, message: report.to_string() }
        }
        GateOutcome::Fails { exit_code, log } => Course::Finish { start, run, exit_code, message: log },
        GateOutcome::Hangs => Course::Run { start, warm_up: Duration::ZERO },
        GateOutcome::ImageMissing => Course::NoImage { start },
    }
}

/// As long from the gate to Ready as it took to the gate.
fn of_client(behaviour: &Behaviour, pod: &Pod, Place { node, seed, .. }: Place<'_>) -> Course {
    let client = controller_of(pod).map_or_else(|| pod.name_any(), |owner| owner.name.clone());
    let start = behaviour.jittered(behaviour.timing.workload_start, seed, &format!("{node}/{client}"));
    let run = Course::Run { start, warm_up: start };
    broken(behaviour, run, behaviour.client_fault(seed, node, &client))
}

/// `run`, but for what is wrong.
fn broken(behaviour: &Behaviour, run: Course, fault: Option<Fault>) -> Course {
    let start = run.start();
    match fault {
        None => run,
        Some(Fault::CrashLoop) => Course::Crash { start, after: behaviour.timing.crash_after },
        Some(Fault::ImageMissing) => Course::NoImage { start },
        Some(Fault::Hang) => Course::Hang { start },
    }
}
