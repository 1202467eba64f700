//! Gates: Jobs are asked for, looked at, and their verdicts written down. On a node in two places of its walk: a sample is
//! taken before its driver restarts, and the new driver is proven after. One gate at a time, in the policy's order.
//!
//! A Job's name says all that tells it apart, so asking twice is asking once; what it says is written into the visit
//! before the Job is forgotten.

use jiff::{SignedDuration, Timestamp};

use super::members::Member;
use super::patch::record_patch;
use super::pool::View;
use super::walk::{Decision, deadline, fail, ran_out};
use crate::action::{Action, Changes, Event};
use crate::gate::{
    self, Gate, GateJob, GateRun, KEPT, Numbers, Obstacle, Order, Outcome, Place, Sample, Verdict,
};
use crate::names::ObjectName;
use crate::reason::Reason;
use crate::snapshot::{Object, Pod};
use crate::visit::{Cause, Finding, GateNote, Visit, Walk};

/// A gate that could not be judged so often will not be judged.
const TRIES_MAX: u32 = 3;
/// More Jobs than that are never made for one purpose: a gate's retries, and those that could not be judged.
const ATTEMPTS_MAX: u32 = 9;

/// What a gate says of one subject.
pub(super) enum Said {
    /// Nothing: it has to be asked.
    Ask(Box<GateRun>),
    /// Nothing yet.
    Runs(Runs),
    /// Yes.
    Passed { took: SignedDuration, numbers: Numbers },
    /// No, with the end of its log.
    Failed { why: String, log: Box<str> },
    /// It cannot tell.
    Unjudged { why: String },
}

/// A gate that is being asked.
pub(super) struct Runs {
    /// The Job.
    pub(super) job: ObjectName,
    /// What keeps it from running.
    waits: Option<Obstacle>,
    /// When it is over, whatever comes.
    pub(super) until: Timestamp,
    /// It has ended, and what its pods said must be known by then.
    pub(super) told_by: Option<Timestamp>,
}

impl Runs {
    /// When to look again, if nothing happens.
    pub(super) fn wakes(&self) -> Timestamp {
        self.told_by.map_or(self.until, |told_by| told_by.min(self.until))
    }

    /// In a few words.
    pub(super) fn says(&self) -> String {
        let waits = self.waits.as_ref().map(|waits| format!(": {waits}")).unwrap_or_default();
        format!("job {} is at work{waits}", self.job)
    }
}

/// What a gate says of what `run` is about, compared with what was before.
pub(super) fn ask(view: &View<'_>, gate: &Gate, run: GateRun, before: Option<&Numbers>) -> Said {
    let Some((job, attempt)) = newest(view, &run) else { return Said::Ask(Box::new(run)) };
    let again = || Said::Ask(Box::new(GateRun { attempt: attempt + 1, ..run.clone() }));
    let until = job.created.saturating_add(gate.longest()).unwrap_or(Timestamp::MAX);
    match verdict(view, gate, before, &job, until) {
        Verdict::Running { waits } => {
            let end = view.snapshot.gate_jobs.get(&job.name).and_then(|job| job.end);
            let told_by = end.and_then(|(at, _)| at.checked_add(gate::PODS_LAG).ok());
            Said::Runs(Runs { job: job.name, waits, until, told_by })
        }
        Verdict::Passed { took, numbers } => Said::Passed { took, numbers },
        Verdict::Failed { .. } if attempt < gate.attempts() => again(),
        Verdict::Failed { why, log_tail, took, .. } => {
            let why = format!("failed after {took:#}: {why}");
            Said::Failed { why, log: log_tail }
        }
        Verdict::Unjudged { why } if why.may_pass() && attempt < TRIES_MAX => again(),
        Verdict::Unjudged { why } => Said::Unjudged { why: format!("could not judge: {why}") },
    }
}

/// A sample from before is there, or it is not: nobody judges it.
fn verdict(
    view: &View<'_>,
    gate: &Gate,
    before: Option<&Numbers>,
    job: &GateJob,
    until: Timestamp,
) -> Verdict {
    let late = job.outcome.is_none() && view.snapshot.now >= until;
    match &job.outcome {
        // Whoever should have ended it does not look after it.
        None if late => {
            Verdict::Unjudged { why: Obstacle::NotStarted { says: "its job does not end".into() } }
        }
        Some(Outcome::Succeeded { messages }) if job.is_before() => match job.numbers(gate) {
            Some(numbers) => Verdict::Passed { took: SignedDuration::ZERO, numbers },
            None if messages.is_empty() => Verdict::Unjudged { why: Obstacle::Vanished },
            None => Verdict::Unjudged { why: Obstacle::SaysSo { message: "it reports no numbers".into() } },
        },
        _ => judge(gate, before, job),
    }
}

/// What a Job says. Without anything to compare with, only what it says by itself counts.
pub(super) fn judge(gate: &Gate, before: Option<&Numbers>, job: &GateJob) -> Verdict {
    match before {
        Some(before) => gate::judge(gate, Some(before), job),
        None => gate::judge(&gate.without_comparison(), None, job),
    }
}

/// The last Job that was made for a purpose, and its number.
fn newest(view: &View<'_>, run: &GateRun) -> Option<(GateJob, u32)> {
    (1..=ATTEMPTS_MAX).rev().find_map(|attempt| {
        let name = job_name(view, &GateRun { attempt, ..run.clone() });
        Some((view.snapshot.gate_job(&name)?, attempt))
    })
}

fn job_name(view: &View<'_>, run: &GateRun) -> ObjectName {
    ObjectName::new(&view.snapshot.namespace, &run.job_name())
}

/// What it takes to have a Job made: nothing while one is under way, or was refused a moment ago.
pub(super) enum Make {
    Now(Box<Action>),
    /// Not before.
    At(Timestamp, String),
    UnderWay,
}

/// Has the Job of a run made, on these nodes.
pub(super) fn make(
    view: &View<'_>,
    gate: &Gate,
    run: &GateRun,
    nodes: &[&Member<'_>],
    kept: SignedDuration,
) -> Make {
    let (name, now) = (job_name(view, run), view.snapshot.now);
    let object = Object::Job(name.clone());
    if view.snapshot.is_busy(&object) {
        return Make::UnderWay;
    }
    if let Some(setback) = view.snapshot.setbacks.get(&object).filter(|setback| setback.retry_at > now) {
        return Make::At(setback.retry_at, format!("job {name} cannot be made: {}", setback.says()));
    }
    let places: Vec<Place<'_>> = nodes.iter().map(|member| place(member)).collect();
    let target = nodes.first().and_then(|member| member.daemon_set);
    let rollout = view.snapshot.rollouts.get(&run.rollout);
    let previous = rollout.and_then(|rollout| rollout.spec.previous.as_ref()?.version.as_ref()?.parse().ok());
    let order = Order {
        namespace: &view.snapshot.namespace,
        driver: &view.policy.driver,
        rollout: &run.rollout,
        stage: run.stage.as_deref(),
        places: &places,
        sample: run.sample,
        attempt: run.attempt,
        subject: &run.subject,
        kept,
        version: target.and_then(|target| target.driver_version.as_ref()),
        previous: previous.as_ref(),
    };
    let body = Box::new(gate::manifest(gate, &order));
    Make::Now(Box::new(Action::CreateJob { name, body }))
}

fn place<'a>(member: &Member<'a>) -> Place<'a> {
    let gpus = member.node.devices(|name| name == crate::contract::GPU_RESOURCE);
    Place { node: member.name, gpus, address: member.node.address.as_deref(), taints: &member.node.taints }
}

/// A driver pod as it runs: another pod, or the same one started again, has to be proven anew.
pub(super) fn subject(pod: &Pod) -> String {
    format!("{}/{:x}", pod.uid, pod.incarnation)
}

fn run_on(member: &Member<'_>, visit: &Visit, gate: &Gate, pod: &Pod, sample: Sample) -> GateRun {
    GateRun {
        gate: gate.name.clone(),
        rollout: visit.rollout.clone().unwrap_or_default(),
        stage: None,
        nodes: vec![member.name.clone()],
        sample,
        attempt: 1,
        subject: subject(pod),
    }
}

/// The first gate that has not let this driver pass.
pub(super) fn unproven<'a>(view: &View<'a>, member: &Member<'_>, walk: &Walk) -> Option<&'a Gate> {
    let driver = member.pod.map(subject);
    let passed = |gate: &Gate| walk.gates.get(&gate.name).is_some_and(|note| note.passed == driver);
    view.policy.rollout.node_gates().find(|gate| driver.is_none() || !passed(gate))
}

/// How long validation may take: its limit, and what the gates that have begun may take on top.
pub(super) fn validation_limit(
    view: &View<'_>,
    member: &Member<'_>,
    visit: &Visit,
    walk: &Walk,
) -> SignedDuration {
    let begun = |gate: &&Gate| {
        let run = member.pod.map(|pod| run_on(member, visit, gate, pod, Sample::After));
        let tries = run.and_then(|run| newest(view, &run)).map_or(0, |(_, attempt)| attempt);
        let passed = walk.gates.get(&gate.name).is_some_and(|note| note.passed.is_some());
        gate.longest().saturating_mul(i32::try_from(tries.max(u32::from(passed))).unwrap_or(i32::MAX))
    };
    let gates = view.policy.rollout.node_gates();
    gates.fold(view.policy.limits.validation, |sum, gate| sum.saturating_add(begun(&gate)))
}

/// The new driver is proven: gate by gate. `None`: by all of them.
pub(super) fn prove(
    view: &View<'_>,
    member: &Member<'_>,
    (visit, walk): (&Visit, &Walk),
    until: Timestamp,
) -> Option<Decision> {
    let gate = unproven(view, member, walk)?;
    let pod = member.pod?;
    if visit.early
        && gate.needs_device()
        && let Some(user) = view.users(member).next()
    {
        // Nobody was asked to leave, so it is waited for, however long that takes.
        let what = format!("gate {} waits until pod {} has left the device", gate.name, user.name);
        let found = Finding::about(&user.name, what);
        return Some(Decision::stay(Reason::Validating { found, until: None }));
    }
    let run = run_on(member, visit, gate, pod, Sample::After);
    let note = walk.gates.get(&gate.name).cloned().unwrap_or_default();
    Some(match ask(view, gate, run, note.before.as_ref()) {
        Said::Passed { took, numbers } => {
            let at = Some(view.snapshot.now);
            let note = GateNote { passed: Some(subject(pod)), seconds: took.as_secs(), at, ..note };
            let compared = if gate.before && note.before.is_none() { ", compared with nothing" } else { "" };
            let message = format!("Gate {} passed in {took:#}{compared}{}", gate.name, listed(&numbers));
            write_down(view, member, visit, walk, (gate, note), Some(message))
        }
        Said::Failed { why, log } => fail(view, member, walk, says_no(gate, why, log)),
        Said::Unjudged { why } => fail(view, member, walk, cannot_say(gate, why, "")),
        Said::Runs(runs) => wait(gate, &runs, &runs.says(), runs.until),
        Said::Ask(run) => start(view, member, walk, gate, &run, until),
    })
}

/// What gates measure before the driver restarts. `None`: all of them have, or there is nothing to measure.
pub(super) fn sample_before(
    view: &View<'_>,
    member: &Member<'_>,
    (visit, walk): (&Visit, &Walk),
    pod: &Pod,
) -> Option<Decision> {
    // A driver that does not work is nothing to compare with.
    if !member.driver_ready || member.waits_for_load {
        return None;
    }
    let missing =
        |gate: &&Gate| gate.before && walk.gates.get(&gate.name).is_none_or(|note| note.before.is_none());
    let gate = view.policy.rollout.node_gates().find(missing)?;
    let until = deadline(view, walk, view.policy.limits.driver_ready);
    Some(match ask(view, gate, run_on(member, visit, gate, pod, Sample::Before), None) {
        Said::Passed { numbers, .. } => {
            let note = walk.gates.get(&gate.name).cloned().unwrap_or_default();
            let note = GateNote { before: Some(gate.compared(numbers)), ..note };
            write_down(view, member, visit, walk, (gate, note), None)
        }
        Said::Failed { why, log } => {
            let why = format!("took no sample before the driver's restart: it {why}");
            fail(view, member, walk, cannot_say(gate, why, log))
        }
        Said::Unjudged { why } => {
            let why = format!("took no sample before the driver's restart: it {why}");
            fail(view, member, walk, cannot_say(gate, why, ""))
        }
        Said::Runs(runs) => {
            let says = format!("takes a sample before the driver restarts; {}", runs.says());
            wait(gate, &runs, &says, runs.until)
        }
        Said::Ask(run) => start(view, member, walk, gate, &run, until),
    })
}

/// A gate's pod that is at work on the device: it is not chased away, its own deadline ends it.
pub(super) fn at_work<'a>(view: &View<'_>, member: &Member<'a>) -> Option<&'a Pod> {
    let strict = |pod: &&Pod| super::uses_device(&view.policy.devices, pod, &view.snapshot.claims);
    member.pods().filter(|pod| gate::is_gate_pod(&pod.labels)).find(strict)
}

fn start(
    view: &View<'_>,
    member: &Member<'_>,
    walk: &Walk,
    gate: &Gate,
    run: &GateRun,
    until: Timestamp,
) -> Decision {
    let found = |what: String| Finding::plain(format!("gate {} {what}", gate.name));
    let starts = || Reason::Validating { found: found("is about to start".to_owned()), until: Some(until) };
    match make(view, gate, run, &[member], KEPT) {
        Make::Now(action) => Decision::act(starts(), *action),
        Make::UnderWay => Decision::stay(starts()),
        Make::At(_, what) if ran_out(view, until) => {
            let why = format!("could not be asked: {what}");
            fail(view, member, walk, cannot_say(gate, why, ""))
        }
        Make::At(retry_at, what) => {
            let reason = Reason::Validating { found: found(format!("waits: {what}")), until: Some(until) };
            Decision { wake_at: Some(retry_at.min(until)), ..Decision::stay(reason) }
        }
    }
}

fn wait(gate: &Gate, runs: &Runs, says: &str, until: Timestamp) -> Decision {
    let found = Finding::plain(format!("gate {}: {says}", gate.name));
    Decision {
        wake_at: Some(runs.wakes()),
        ..Decision::stay(Reason::Validating { found, until: Some(until) })
    }
}

/// The driver did not stand a gate.
fn says_no(gate: &Gate, why: String, log: impl Into<String>) -> Cause {
    Cause::Gate { gate: gate.name.clone(), found: Finding::plain(why), unjudged: false, log: log.into() }
}

/// Nobody knows whether it would.
fn cannot_say(gate: &Gate, why: String, log: impl Into<String>) -> Cause {
    Cause::Gate { gate: gate.name.clone(), found: Finding::plain(why), unjudged: true, log: log.into() }
}

fn write_down(
    view: &View<'_>,
    member: &Member<'_>,
    visit: &Visit,
    walk: &Walk,
    (gate, note): (&Gate, GateNote),
    message: Option<String>,
) -> Decision {
    let mut walk = walk.clone();
    walk.gates.insert(gate.name.clone(), note);
    let mut patch = record_patch(view, member, visit, walk);
    patch.labels = Changes::default();
    patch.event = message.map(|message| Event {
        warning: false,
        reason: view.policy.keys.event_reason.clone(),
        message,
    });
    Decision::act(Reason::Writing, Action::PatchNode(patch))
}

/// A few numbers, for people.
fn listed(numbers: &Numbers) -> String {
    let few: Vec<String> = numbers.iter().take(4).map(|(name, number)| format!("{name} {number}")).collect();
    if few.is_empty() { String::new() } else { format!(": {}", few.join(", ")) }
}
