//! Jobs: run pods until enough have succeeded, or too many have failed, or time is up.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::batch::v1::{Job, JobCondition, JobSpec, JobStatus};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt;
use tokio::time::Instant;

use super::cache::{Change, Key};
use super::clock::Clock;
use super::manager::{Manager, Task};
use super::object::{is_active, is_finished, is_ready, is_terminating, phase, pod_of, seconds_between};
use super::queue::Queue;
use super::way::Way;
use super::world::World;
use super::write::Write;

/// Waits before the pod after the first, second, … failure.
const BACKOFF_FIRST: Duration = Duration::from_secs(10);
const BACKOFF_MAX: Duration = Duration::from_mins(10);

/// Pods that went away without finishing count as failures; the API does not remember them.
#[derive(Debug, Default)]
pub(super) struct Jobs {
    lost: BTreeMap<String, i32>,
    /// No new pod before; by Job UID.
    not_before: BTreeMap<String, (i32, Instant)>,
}

#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Running,
    Complete,
    Failed(&'static str, &'static str),
}

struct Tally {
    active: i32,
    ready: i32,
    succeeded: i32,
    failed: i32,
}

impl Jobs {
    pub(super) fn note(&mut self, change: &Change<Pod>) {
        if let (Some(old), None) = (&change.old, &change.new)
            && !is_finished(old)
            && let Some(owner) =
                old.metadata.owner_references.iter().flatten().find(|owner| owner.kind == "Job")
        {
            *self.lost.entry(owner.uid.clone()).or_default() += 1;
        }
    }

    pub(super) fn look(
        &mut self,
        way: &Way,
        world: &World,
        key: &Key,
        clock: &Clock,
        queue: &mut Queue<Task>,
    ) -> Vec<Write<Manager>> {
        let Some(job) = world.jobs.cache.get(key).filter(|job| !is_terminating(job.as_ref())) else {
            return Vec::new();
        };
        let (Some(spec), Some(uid)) = (&job.spec, &job.metadata.uid) else { return Vec::new() };
        if let Some(ended) = ended_at(job) {
            return after_end(way, job, spec, clock, &ended, queue);
        }
        let pods: Vec<_> = world.pods_of(Some(uid)).collect();
        let tally = self.tally(uid, &pods);
        let started =
            job.status.as_ref().and_then(|status| status.start_time.clone()).unwrap_or_else(|| clock.now());
        let age = seconds_between(&started, &clock.now());
        let verdict = verdict(spec, &tally, age);
        let mut writes = Vec::new();
        if verdict == Verdict::Running {
            let deadline = spec.active_deadline_seconds.and_then(|seconds| u64::try_from(seconds).ok());
            if let Some(seconds) = deadline {
                queue.add_at(Task::Job(key.clone()), clock.instant(&started) + Duration::from_secs(seconds));
            }
            writes.extend(self.start_pods(way, job, spec, &tally, key, queue));
        } else {
            let running = pods.iter().filter(|pod| is_active(pod));
            writes.extend(running.map(|pod| Write::delete(way, pod.as_ref(), None)));
        }
        let status = status(job, &tally, &verdict, started, clock);
        if job.status.as_ref() != Some(&status) {
            writes.push(Write::status(way, job.as_ref(), &status));
        }
        writes
    }

    fn tally(&self, uid: &str, pods: &[&Arc<Pod>]) -> Tally {
        let count = |test: &dyn Fn(&Pod) -> bool| {
            i32::try_from(pods.iter().filter(|pod| test(pod)).count()).unwrap_or(i32::MAX)
        };
        Tally {
            active: count(&is_active),
            ready: count(&|pod| is_active(pod) && is_ready(pod)),
            succeeded: count(&|pod| phase(pod) == "Succeeded"),
            failed: count(&|pod| phase(pod) == "Failed") + self.lost.get(uid).copied().unwrap_or(0),
        }
    }

    fn start_pods(
        &mut self,
        way: &Way,
        job: &Job,
        spec: &JobSpec,
        tally: &Tally,
        key: &Key,
        queue: &mut Queue<Task>,
    ) -> Vec<Write<Manager>> {
        let left = spec.completions.unwrap_or(1) - tally.succeeded;
        let missing = spec.parallelism.unwrap_or(1).min(left) - tally.active;
        if spec.suspend == Some(true) || missing <= 0 {
            return Vec::new();
        }
        let now = Instant::now();
        let not_before = self.not_before(job, tally.failed, now);
        if not_before > now {
            queue.add_at(Task::Job(key.clone()), not_before);
            return Vec::new();
        }
        (0..missing).map(|_| Write::create(way, new_pod(job, spec))).collect()
    }

    /// The back-off starts when a failure is first seen.
    fn not_before(&mut self, job: &Job, failed: i32, now: Instant) -> Instant {
        let uid = job.metadata.uid.clone().unwrap_or_default();
        let (seen, at) = self.not_before.entry(uid).or_insert((0, now));
        if failed > *seen {
            let wait = BACKOFF_FIRST.saturating_mul(1 << (failed - 1).clamp(0, 6)).min(BACKOFF_MAX);
            (*seen, *at) = (failed, now + wait);
        }
        *at
    }
}

fn verdict(spec: &JobSpec, tally: &Tally, age_seconds: u64) -> Verdict {
    let deadline = spec.active_deadline_seconds.and_then(|seconds| u64::try_from(seconds).ok());
    if tally.succeeded >= spec.completions.unwrap_or(1) {
        Verdict::Complete
    } else if tally.failed > spec.backoff_limit.unwrap_or(6) {
        Verdict::Failed("BackoffLimitExceeded", "Job has reached the specified backoff limit")
    } else if deadline.is_some_and(|deadline| age_seconds >= deadline) {
        Verdict::Failed("DeadlineExceeded", "Job was active longer than specified deadline")
    } else {
        Verdict::Running
    }
}

fn ended_at(job: &Job) -> Option<Time> {
    let ended = |condition: &&JobCondition| matches!(condition.type_.as_str(), "Complete" | "Failed");
    job.status.as_ref()?.conditions.iter().flatten().find(ended)?.last_transition_time.clone()
}

/// A finished Job goes when its time to live is over.
fn after_end(
    way: &Way,
    job: &Job,
    spec: &JobSpec,
    clock: &Clock,
    ended: &Time,
    queue: &mut Queue<Task>,
) -> Vec<Write<Manager>> {
    let Some(seconds) = spec.ttl_seconds_after_finished.and_then(|seconds| u64::try_from(seconds).ok())
    else {
        return Vec::new();
    };
    let over = clock.instant(ended) + Duration::from_secs(seconds);
    if Instant::now() < over {
        queue.add_at(Task::Job(Key::of(job)), over);
        return Vec::new();
    }
    vec![Write::delete(way, job, None)]
}

fn new_pod(job: &Job, spec: &JobSpec) -> Pod {
    let mut pod = pod_of(job, &spec.template);
    let (name, uid) = (job.name_any(), job.metadata.uid.clone().unwrap_or_default());
    let labels = pod.metadata.labels.get_or_insert_default();
    for (key, value) in [("job-name", &name), ("controller-uid", &uid)] {
        labels.insert(key.into(), value.clone());
        labels.insert(format!("batch.kubernetes.io/{key}"), value.clone());
    }
    pod
}

fn status(job: &Job, tally: &Tally, verdict: &Verdict, started: Time, clock: &Clock) -> JobStatus {
    let before = job.status.clone().unwrap_or_default();
    let over = *verdict != Verdict::Running;
    let conditions = match verdict {
        Verdict::Running => before.conditions,
        Verdict::Complete => Some(vec![
            condition(
                "SuccessCriteriaMet",
                "CompletionsReached",
                "Reached expected number of succeeded pods",
                clock,
            ),
            condition("Complete", "CompletionsReached", "Reached expected number of succeeded pods", clock),
        ]),
        Verdict::Failed(reason, message) => Some(vec![
            condition("FailureTarget", reason, message, clock),
            condition("Failed", reason, message, clock),
        ]),
    };
    let counted = |count: i32| (count > 0).then_some(count);
    JobStatus {
        active: counted(if over { 0 } else { tally.active }),
        ready: Some(if over { 0 } else { tally.ready }),
        succeeded: counted(tally.succeeded),
        failed: counted(tally.failed),
        terminating: Some(0),
        start_time: Some(started),
        completion_time: (*verdict == Verdict::Complete).then(|| clock.now()),
        conditions,
        ..JobStatus::default()
    }
}

fn condition(kind: &str, reason: &str, message: &str, clock: &Clock) -> JobCondition {
    JobCondition {
        type_: kind.into(),
        status: "True".into(),
        reason: Some(reason.into()),
        message: Some(message.into()),
        last_probe_time: Some(clock.now()),
        last_transition_time: Some(clock.now()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_ends_in_one_of_three_ways() {
        let spec =
            JobSpec { backoff_limit: Some(1), active_deadline_seconds: Some(60), ..JobSpec::default() };
        let tally = |succeeded, failed| Tally { active: 0, ready: 0, succeeded, failed };
        assert_eq!(verdict(&spec, &tally(0, 1), 59), Verdict::Running);
        assert_eq!(verdict(&spec, &tally(1, 1), 59), Verdict::Complete);
        assert!(matches!(verdict(&spec, &tally(0, 2), 0), Verdict::Failed("BackoffLimitExceeded", _)));
        assert!(matches!(verdict(&spec, &tally(0, 0), 60), Verdict::Failed("DeadlineExceeded", _)));
    }
}
