//! What a gate's Job and its pods tell, as small facts: whether it is over, and how it went.
//!
//! A Job's conditions say that it ended, its pods say how: by the exit code and the termination message of their
//! containers. The two arrive by two watches, so a Job that has ended is not read before its pods are seen, or were
//! waited for.

use std::fmt;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ContainerStateTerminated, ContainerStatus, Pod, PodCondition, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::{CANNOT_JUDGE_EXIT, GateRun};
use crate::contract::GATE_RUN_ANNOTATION;
use crate::names::{NodeName, ObjectName, Uid};

/// How long after a Job's end its pods' last words are waited for: watches are never so far apart for long.
pub const PODS_LAG: SignedDuration = SignedDuration::from_secs(30);

/// The reason of Jobs and pods whose time was up.
const DEADLINE: &str = "DeadlineExceeded";

/// A gate's Job, on its own.
#[derive(Clone, Debug, PartialEq)]
pub struct JobFacts {
    /// Its name.
    pub name: ObjectName,
    /// Its UID.
    pub uid: Uid,
    /// What it is for.
    pub run: GateRun,
    /// When it was made.
    pub created: Timestamp,
    /// When it ended, and how.
    pub end: Option<(Timestamp, JobEnd)>,
}

/// How a Job ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobEnd {
    /// All its pods succeeded.
    Complete,
    /// Its pods failed.
    Failed,
    /// Its own time was up.
    Late,
}

/// A pod of a gate.
#[derive(Clone, Debug, PartialEq)]
pub struct GatePod {
    /// Its name.
    pub name: ObjectName,
    /// The Job that made it.
    pub job: Uid,
    /// When it was made.
    pub created: Timestamp,
    /// Its node, once it has one.
    pub node: Option<NodeName>,
    /// When its container started.
    pub started: Option<Timestamp>,
    /// How it is.
    pub state: PodState,
    /// It was told to go.
    pub deleting: bool,
}

/// How a gate's pod is.
#[derive(Clone, Debug, PartialEq)]
pub enum PodState {
    /// It has not started, or runs; what keeps it from that, if something does.
    Open {
        /// What.
        waits: Option<Obstacle>,
    },
    /// It succeeded.
    Succeeded {
        /// What it reports.
        message: Box<str>,
    },
    /// It failed.
    Failed {
        /// When.
        at: Option<Timestamp>,
        /// How.
        how: Outcome,
    },
}

/// A gate's Job with what its pods tell: all that a verdict needs.
#[derive(Clone, Debug, PartialEq)]
pub struct GateJob {
    /// Its name.
    pub name: ObjectName,
    /// Its UID.
    pub uid: Uid,
    /// What it is for.
    pub run: GateRun,
    /// When it was made.
    pub created: Timestamp,
    /// When its (last) container started.
    pub started: Option<Timestamp>,
    /// When it ended.
    pub finished: Option<Timestamp>,
    /// How; `None` as long as it is not over.
    pub outcome: Option<Outcome>,
    /// What keeps it from running, while it is not over.
    pub waits: Option<Obstacle>,
}

/// How a gate ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// Every pod exited with 0.
    Succeeded {
        /// What each of them reports. Empty: no pod is left that could tell.
        messages: Vec<Box<str>>,
    },
    /// A container exited with something else.
    Exited {
        /// With what.
        code: i32,
        /// Its last words: what it reports, or the end of its log.
        message: Box<str>,
    },
    /// A try ran longer than it may.
    TimedOut {
        /// Its last words.
        message: Box<str>,
    },
    /// It did not get to judge.
    NotRun(Obstacle),
}

/// Why a gate did not get to judge. None of these is the driver's fault for sure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// Its pod never got a place on its node.
    NotScheduled {
        /// What the scheduler says.
        says: Box<str>,
    },
    /// Its container never started.
    NotStarted {
        /// What the kubelet says, such as `ImagePullBackOff`.
        says: Box<str>,
    },
    /// Its pod was taken away: evicted, preempted, lost with its node.
    Disrupted {
        /// By whom.
        says: Box<str>,
    },
    /// Its container had less memory than it needs.
    OutOfMemory,
    /// It says so itself, by its exit code.
    SaysSo {
        /// Its words.
        message: Box<str>,
    },
    /// There is no sample from before to compare with.
    NoBefore,
    /// Nothing is left that could tell.
    Vanished,
}

impl Obstacle {
    /// Another try may go better.
    pub fn may_pass(&self) -> bool {
        !matches!(self, Obstacle::NoBefore | Obstacle::SaysSo { .. } | Obstacle::OutOfMemory)
    }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Obstacle::NotScheduled { says } if says.is_empty() => {
                f.write_str("its pod got no place on the node (no device was free?)")
            }
            Obstacle::NotScheduled { says } => write!(f, "its pod got no place on the node: {says}"),
            Obstacle::NotStarted { says } if says.is_empty() => f.write_str("its container never started"),
            Obstacle::NotStarted { says } => write!(f, "its container did not start: {says}"),
            Obstacle::Disrupted { says } => write!(f, "its pod was taken away: {says}"),
            Obstacle::OutOfMemory => {
                f.write_str("its container ran out of memory; give it more in resources")
            }
            Obstacle::SaysSo { message } if message.is_empty() => {
                write!(f, "it says that it cannot judge (exit code {CANNOT_JUDGE_EXIT})")
            }
            Obstacle::SaysSo { message } => write!(f, "it says that it cannot judge: {message}"),
            Obstacle::NoBefore => {
                f.write_str("there is no sample from before the driver's restart to compare with")
            }
            Obstacle::Vanished => f.write_str("its Job ended and no pod is left that could tell how"),
        }
    }
}

impl JobFacts {
    /// Reads a Job; `None` if it is no gate's.
    pub fn read(job: &Job) -> Option<Self> {
        let meta = &job.metadata;
        let run = meta.annotations.as_ref()?.get(GATE_RUN_ANNOTATION)?;
        let mut conditions = job.status.iter().flat_map(|status| status.conditions.iter().flatten());
        let ended = |condition: &k8s_openapi::api::batch::v1::JobCondition| {
            let end = match (condition.type_.as_str(), condition.reason.as_deref()) {
                ("Complete", _) => JobEnd::Complete,
                ("Failed", Some(DEADLINE)) => JobEnd::Late,
                ("Failed", _) => JobEnd::Failed,
                _ => return None,
            };
            let at = condition.last_transition_time.as_ref()?.0;
            (condition.status == "True").then_some((at, end))
        };
        Some(Self {
            name: ObjectName::new(meta.namespace.as_deref()?, meta.name.as_deref()?),
            uid: meta.uid.as_deref()?.into(),
            run: serde_json::from_str(run).ok()?,
            created: meta.creation_timestamp.as_ref()?.0,
            end: conditions.find_map(ended),
        })
    }

    /// The Job with what its pods tell at `now`. Pods of other Jobs are left out.
    pub fn with<'a>(&self, pods: impl IntoIterator<Item = &'a GatePod>, now: Timestamp) -> GateJob {
        let mut pods: Vec<&GatePod> = pods.into_iter().filter(|pod| pod.job == self.uid).collect();
        pods.sort_by_key(|pod| (pod.created, &pod.name));
        let outcome = self.end.and_then(|(at, end)| {
            let told = outcome(end, &pods, self.run.nodes.len());
            // Its pods' last words may still be on their way.
            told.or_else(|| (now.duration_since(at) >= PODS_LAG).then(|| without_pods(end)))
        });
        let waits = pods.iter().rev().find_map(|pod| match &pod.state {
            PodState::Open { waits } => waits.clone(),
            _ => None,
        });
        GateJob {
            name: self.name.clone(),
            uid: self.uid.clone(),
            run: self.run.clone(),
            created: self.created,
            started: pods.iter().rev().find_map(|pod| pod.started),
            finished: self.end.map(|(at, _)| at).filter(|_| outcome.is_some()),
            waits: waits.filter(|_| outcome.is_none()),
            outcome,
        }
    }
}

/// What a Job's end means without any pod to tell more. A gate that wants numbers cannot be judged by it.
fn without_pods(end: JobEnd) -> Outcome {
    match end {
        JobEnd::Complete => Outcome::Succeeded { messages: Vec::new() },
        JobEnd::Failed => Outcome::NotRun(Obstacle::Vanished),
        JobEnd::Late => Outcome::NotRun(Obstacle::NotScheduled { says: "".into() }),
    }
}

/// How a Job that has ended went; `None` while its pods have not told. `pods` are in order of their making.
fn outcome(end: JobEnd, pods: &[&GatePod], wanted: usize) -> Option<Outcome> {
    match end {
        JobEnd::Complete => {
            let message = |pod: &&GatePod| match &pod.state {
                PodState::Succeeded { message } => Some(message.clone()),
                _ => None,
            };
            let messages: Vec<_> = pods.iter().filter_map(message).collect();
            (messages.len() >= wanted).then_some(Outcome::Succeeded { messages })
        }
        JobEnd::Failed => failure(pods, wanted),
        JobEnd::Late => {
            // The Job's deadline removes pods: one that is still to be seen runs, or never got that far.
            let last = pods.last()?;
            match &last.state {
                PodState::Open { .. } if last.started.is_some() => {
                    Some(Outcome::TimedOut { message: "".into() })
                }
                PodState::Open { waits } => {
                    let unknown = Obstacle::NotStarted { says: "".into() };
                    Some(Outcome::NotRun(waits.clone().unwrap_or(unknown)))
                }
                PodState::Failed { how: Outcome::Exited { message, .. }, .. } if last.deleting => {
                    Some(Outcome::TimedOut { message: message.clone() })
                }
                PodState::Succeeded { .. } | PodState::Failed { .. } => failure(pods, wanted),
            }
        }
    }
}

/// The failure that counts: of tries one after the other the last, of pods that ran together the first, since the
/// others fail for lack of it.
fn failure(pods: &[&GatePod], wanted: usize) -> Option<Outcome> {
    let mut failed = pods.iter().filter_map(|pod| match &pod.state {
        PodState::Failed { at, how } => Some((at.unwrap_or(Timestamp::MAX), how)),
        _ => None,
    });
    let counts = if wanted > 1 { failed.min_by_key(|(at, _)| *at) } else { failed.next_back() };
    counts.map(|(_, how)| how.clone())
}

impl GatePod {
    /// Reads a pod; `None` if no Job made it.
    pub fn read(pod: &Pod) -> Option<Self> {
        let meta = &pod.metadata;
        let owner = meta.owner_references.iter().flatten().find(|owner| owner.kind == "Job")?;
        let nothing = PodStatus::default();
        let status = pod.status.as_ref().unwrap_or(&nothing);
        let main = status.container_statuses.iter().flatten();
        let started = main.filter_map(started_at).min();
        let state = match status.phase.as_deref() {
            Some("Succeeded") => PodState::Succeeded { message: last_words(status).into() },
            Some("Failed") => failed(status, started),
            _ => PodState::Open { waits: waits(status) },
        };
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
        Some(Self {
            name: ObjectName::new(meta.namespace.as_deref()?, meta.name.as_deref()?),
            job: owner.uid.as_str().into(),
            created: meta.creation_timestamp.as_ref()?.0,
            node: node.map(NodeName::from),
            started,
            state,
            deleting: meta.deletion_timestamp.is_some(),
        })
    }
}

/// A container that the runtime could not start is reported as started in 1970.
fn at(time: Option<&Time>) -> Option<Timestamp> {
    time.map(|time| time.0).filter(|time| *time > Timestamp::UNIX_EPOCH)
}

fn started_at(container: &ContainerStatus) -> Option<Timestamp> {
    let state = container.state.as_ref()?;
    let running = state.running.as_ref().and_then(|running| at(running.started_at.as_ref()));
    running.or_else(|| at(state.terminated.as_ref()?.started_at.as_ref()))
}

fn terminated(container: &ContainerStatus) -> Option<&ContainerStateTerminated> {
    container.state.as_ref()?.terminated.as_ref()
}

/// The message of the first container that has one.
fn last_words(status: &PodStatus) -> &str {
    containers(status).find_map(|container| terminated(container)?.message.as_deref()).unwrap_or_default()
}

/// Init containers too: they may be the ones that fail.
fn containers(status: &PodStatus) -> impl Iterator<Item = &ContainerStatus> {
    let init = status.init_container_statuses.iter().flatten();
    init.chain(status.container_statuses.iter().flatten())
}

fn failed(status: &PodStatus, started: Option<Timestamp>) -> PodState {
    let ends = || containers(status).filter_map(terminated);
    let at = ends().filter_map(|end| at(end.finished_at.as_ref())).max();
    let how = if let Some(says) = disruption(status) {
        Outcome::NotRun(Obstacle::Disrupted { says })
    } else if status.reason.as_deref() == Some(DEADLINE) && started.is_some() {
        Outcome::TimedOut { message: last_words(status).into() }
    } else if let Some(end) = ends().find(|end| end.exit_code != 0 && !is_unknown(end)) {
        exited(end)
    } else {
        let says = words(status.reason.as_ref(), status.message.as_ref());
        Outcome::NotRun(match started {
            None => Obstacle::NotStarted { says },
            Some(_) => Obstacle::Disrupted { says },
        })
    };
    PodState::Failed { at, how }
}

/// The kubelet lost sight of it, or it never was.
fn is_unknown(end: &ContainerStateTerminated) -> bool {
    end.reason.as_deref() == Some("ContainerStatusUnknown")
}

fn exited(end: &ContainerStateTerminated) -> Outcome {
    let message: Box<str> = end.message.as_deref().unwrap_or_default().into();
    match end.reason.as_deref() {
        Some("OOMKilled") => Outcome::NotRun(Obstacle::OutOfMemory),
        _ if end.exit_code == CANNOT_JUDGE_EXIT => Outcome::NotRun(Obstacle::SaysSo { message }),
        _ => Outcome::Exited { code: end.exit_code, message },
    }
}

/// Somebody took the pod away: the scheduler, an eviction, the taint manager, the collector of pods without a node.
fn disruption(status: &PodStatus) -> Option<Box<str>> {
    let by_condition = condition(status, "DisruptionTarget").filter(|condition| condition.status == "True");
    let by_condition =
        by_condition.map(|condition| words(condition.reason.as_ref(), condition.message.as_ref()));
    let evicted =
        matches!(status.reason.as_deref(), Some("Evicted" | "NodeLost" | "Preempting" | "Shutdown"));
    by_condition.or_else(|| evicted.then(|| words(status.reason.as_ref(), status.message.as_ref())))
}

/// What keeps a pod from running.
fn waits(status: &PodStatus) -> Option<Obstacle> {
    if let Some(scheduled) = condition(status, "PodScheduled").filter(|condition| condition.status == "False")
    {
        let says = scheduled.message.as_deref().unwrap_or_default().into();
        return Some(Obstacle::NotScheduled { says });
    }
    containers(status).find_map(|container| {
        let waiting = container.state.as_ref()?.waiting.as_ref()?;
        let reason = waiting.reason.as_deref().unwrap_or_default();
        // All is well so far.
        let ordinary = matches!(reason, "" | "ContainerCreating" | "PodInitializing");
        let says = || words(waiting.reason.as_ref(), waiting.message.as_ref());
        (!ordinary).then(|| Obstacle::NotStarted { says: says() })
    })
}

fn condition<'a>(status: &'a PodStatus, kind: &str) -> Option<&'a PodCondition> {
    status.conditions.iter().flatten().find(|condition| condition.type_ == kind)
}

fn words(reason: Option<&String>, message: Option<&String>) -> Box<str> {
    let parts: Vec<&str> = [reason, message].into_iter().flatten().map(String::as_str).collect();
    parts.join(": ").into()
}

#[cfg(test)]
#[expect(clippy::needless_pass_by_value, reason = "stories read better without ampersands")]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const STARTED: &str = "2026-03-01T08:01:00Z";
    const ENDED: &str = "2026-03-01T08:02:00Z";

    fn job(conditions: Value) -> JobFacts {
        let run = json!({"gate": "smoke", "rollout": "gpu-7", "nodes": ["gpu-01"], "sample": "After",
                         "attempt": 1, "subject": "7d9f"});
        let job = json!({
            "metadata": {"namespace": "ops", "name": "gate-smoke", "uid": "job-1",
                         "creationTimestamp": "2026-03-01T08:00:00Z",
                         "annotations": {GATE_RUN_ANNOTATION: run.to_string()}},
            "status": {"conditions": conditions},
        });
        JobFacts::read(&serde_json::from_value(job).unwrap()).unwrap()
    }

    fn ended(kind: &str, reason: &str) -> JobFacts {
        job(json!([{"type": kind, "status": "True", "reason": reason, "lastTransitionTime": ENDED}]))
    }

    fn pod(number: u32, status: Value) -> GatePod {
        let owner = json!({"apiVersion": "batch/v1", "kind": "Job", "name": "gate-smoke", "uid": "job-1"});
        let pod = json!({
            "metadata": {"namespace": "ops", "name": format!("gate-smoke-{number}"), "ownerReferences": [owner],
                         "creationTimestamp": format!("2026-03-01T08:00:{number:02}Z")},
            "spec": {"nodeName": "gpu-01", "containers": []},
            "status": status,
        });
        GatePod::read(&serde_json::from_value(pod).unwrap()).unwrap()
    }

    fn exit(code: i32, message: &str) -> Value {
        let end = json!({"exitCode": code, "message": message, "startedAt": STARTED, "finishedAt": ENDED});
        with(if code == 0 { "Succeeded" } else { "Failed" }, json!({"terminated": end}))
    }

    fn with(phase: &str, state: Value) -> Value {
        let container = json!({"name": "gate", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": state});
        json!({"phase": phase, "containerStatuses": [container]})
    }

    fn and(mut status: Value, more: Value) -> Value {
        status.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        status
    }

    fn outcome_of(job: &JobFacts, pods: &[Value]) -> Option<Outcome> {
        let pods: Vec<_> = pods.iter().zip(1..).map(|(status, number)| pod(number, status.clone())).collect();
        job.with(&pods, ENDED.parse().unwrap()).outcome
    }

    #[test]
    fn a_job_without_our_record_is_none_of_ours() {
        let other = json!({"metadata": {"namespace": "ops", "name": "backup", "uid": "job-2",
                           "creationTimestamp": ENDED}});
        assert_eq!(JobFacts::read(&serde_json::from_value(other).unwrap()), None);
    }

    #[test]
    fn the_last_try_counts() {
        let failed = ended("Failed", "BackoffLimitExceeded");
        let last = Outcome::Exited { code: 4, message: "worse".into() };
        assert_eq!(outcome_of(&failed, &[exit(3, "bad"), exit(4, "worse")]), Some(last));
        let complete = ended("Complete", "CompletionsReached");
        let passed = Outcome::Succeeded { messages: vec!["{}".into()] };
        assert_eq!(outcome_of(&complete, &[exit(3, "bad"), exit(0, "{}")]), Some(passed));
        assert_eq!(outcome_of(&job(json!([])), &[exit(3, "bad")]), None);
        let target = json!([{"type": "FailureTarget", "status": "True", "lastTransitionTime": ENDED}]);
        assert_eq!(outcome_of(&job(target), &[exit(3, "bad")]), None);
    }

    #[test]
    fn of_pods_that_ran_together_the_first_to_fail_counts() {
        let mut failed = ended("Failed", "BackoffLimitExceeded");
        failed.run.nodes.push("gpu-02".into());
        let end = json!({"exitCode": 1, "message": "NCCL error", "startedAt": STARTED,
                         "finishedAt": "2026-03-01T08:01:30Z"});
        let first = with("Failed", json!({"terminated": end}));
        let wanted = Outcome::Exited { code: 1, message: "NCCL error".into() };
        let follows = exit(137, "peer is gone");
        assert_eq!(outcome_of(&failed, &[first.clone(), follows.clone()]), Some(wanted.clone()));
        assert_eq!(outcome_of(&failed, &[follows, first]), Some(wanted));
    }

    #[test]
    fn a_gate_that_ran_too_long_is_told_apart_from_one_that_never_started() {
        let late = json!({"reason": "DeadlineExceeded", "message": "Pod was active too long"});
        let failed = ended("Failed", "BackoffLimitExceeded");
        let ran = and(exit(137, "step 3"), late.clone());
        assert_eq!(outcome_of(&failed, &[ran]), Some(Outcome::TimedOut { message: "step 3".into() }));
        // What kubelets make of a container that they never got to start.
        let unknown = json!({"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown"}});
        let never = outcome_of(&failed, &[and(with("Failed", unknown), late)]);
        assert!(matches!(never, Some(Outcome::NotRun(Obstacle::NotStarted { .. }))), "{never:?}");
        let too_late = ended("Failed", "DeadlineExceeded");
        let running = with("Running", json!({"running": {"startedAt": STARTED}}));
        assert_eq!(outcome_of(&too_late, &[running]), Some(Outcome::TimedOut { message: "".into() }));
        let pending = json!({"phase": "Pending", "conditions": [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/9 nodes"}]});
        let says = Obstacle::NotScheduled { says: "0/9 nodes".into() };
        assert_eq!(outcome_of(&too_late, &[pending]), Some(Outcome::NotRun(says)));
        let stuck = json!({"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}});
        let says = Obstacle::NotStarted { says: "ImagePullBackOff: Back-off pulling image".into() };
        assert_eq!(outcome_of(&too_late, &[with("Pending", stuck)]), Some(Outcome::NotRun(says)));
        // The time of the whole Job was up while it waited to try again: the try that failed tells.
        let wanted = Outcome::Exited { code: 3, message: "bad".into() };
        assert_eq!(outcome_of(&too_late, &[exit(3, "bad")]), Some(wanted));
    }

    #[test]
    fn what_is_not_the_drivers_fault_is_told_apart() {
        let failed = ended("Failed", "BackoffLimitExceeded");
        let not_run = |status: Value| match outcome_of(&failed, &[status]) {
            Some(Outcome::NotRun(why)) => why,
            other => panic!("{other:?}"),
        };
        let disrupted = json!({"conditions": [
            {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}]});
        let says = Obstacle::Disrupted { says: "DeletionByTaintManager".into() };
        assert_eq!(not_run(and(exit(137, ""), disrupted)), says);
        let evicted =
            json!({"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory"});
        let says = Obstacle::Disrupted { says: "Evicted: The node was low on memory".into() };
        assert_eq!(not_run(evicted), says);
        assert_eq!(not_run(exit(75, "no target")), Obstacle::SaysSo { message: "no target".into() });
        let oom = json!({"exitCode": 137, "reason": "OOMKilled", "startedAt": STARTED});
        assert_eq!(not_run(with("Failed", json!({"terminated": oom}))), Obstacle::OutOfMemory);
        // A container that the runtime could not start may well be the driver's fault.
        let hook = json!({"exitCode": 128, "reason": "StartError", "message": "nvidia-container-cli: initialization error",
                          "startedAt": "1970-01-01T00:00:00Z"});
        let wanted =
            Outcome::Exited { code: 128, message: "nvidia-container-cli: initialization error".into() };
        assert_eq!(outcome_of(&failed, &[with("Failed", json!({"terminated": hook}))]), Some(wanted));
    }

    #[test]
    fn a_job_that_has_ended_waits_for_its_pods_last_words_but_not_for_ever() {
        let running = pod(1, with("Running", json!({"running": {"startedAt": STARTED}})));
        let end: Timestamp = ENDED.parse().unwrap();
        for (job, then) in [
            (ended("Complete", "CompletionsReached"), Outcome::Succeeded { messages: vec![] }),
            (ended("Failed", "BackoffLimitExceeded"), Outcome::NotRun(Obstacle::Vanished)),
        ] {
            assert_eq!(job.with([&running], end).outcome, None);
            assert_eq!(job.with([&running], end).finished, None);
            let later = job.with([], end + PODS_LAG);
            assert_eq!((later.outcome, later.finished), (Some(then), Some(end)));
        }
        let late = ended("Failed", "DeadlineExceeded").with([], end + PODS_LAG).outcome;
        assert!(matches!(late, Some(Outcome::NotRun(Obstacle::NotScheduled { .. }))), "{late:?}");
    }

    #[test]
    fn a_pod_of_another_job_tells_nothing() {
        let mut other = pod(1, exit(3, "bad"));
        other.job = "job-2".into();
        let mine = ended("Failed", "BackoffLimitExceeded");
        assert_eq!(mine.with([&other], ENDED.parse().unwrap()).outcome, None);
    }

    #[test]
    fn people_can_see_what_a_gate_waits_for() {
        let stuck = json!({"waiting": {"reason": "ErrImagePull", "message": "not found"}});
        let job = job(json!([])).with([&pod(1, with("Pending", stuck))], ENDED.parse().unwrap());
        assert_eq!(job.waits.unwrap().to_string(), "its container did not start: ErrImagePull: not found");
        let creating = with("Pending", json!({"waiting": {"reason": "ContainerCreating"}}));
        assert_eq!(pod(1, creating).state, PodState::Open { waits: None });
    }
}
