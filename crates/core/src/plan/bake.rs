//! The bake: the nodes of a stage are watched at work before the next stage opens.
//!
//! Only time counts in which somebody looked and could judge: it is added up look by look, so a controller that was away,
//! a clock that jumped and a node that was down make the bake longer and never shorter. It never passes by default.

use jiff::{SignedDuration, Timestamp};

use super::members::{Freshness, Member};
use super::patch::base_patch;
use super::pool::View;
use super::proofs::{Asked, Rounds};
use super::queries::{self, Heard};
use super::walk::Decision;
use crate::action::{Action, Changes};
use crate::api::{BakeStatus, StagePhase, stamp};
use crate::contract::{LAST_VISIT_ANNOTATION, State};
use crate::gate::is_gate_pod;
use crate::policy::Bake;
use crate::reason::Reason;
use crate::snapshot::{Phase, Pod, Trouble};
use crate::visit::DriverPod;

/// How often nodes are looked at: 48 hours take 288 writes.
const LOOK_EVERY_MAX: SignedDuration = SignedDuration::from_mins(10);
/// A short bake is looked at so many times.
const LOOKS_MIN: i64 = 20;

/// Everything can be judged again.
const FOR_A_MOMENT: &str =
    "not all of its nodes could be judged for a moment; the time until the next look does not count";

/// What a look brought.
pub(super) enum Look {
    /// It goes on; the sentence says what is missing beside time.
    Goes(BakeStatus, Option<String>),
    /// It is over, and all is well.
    Over(BakeStatus),
    /// It did not stand it.
    Spoiled(BakeStatus, String),
}

/// A bake that begins now.
pub(super) fn begin(bake: &Bake, now: Timestamp) -> BakeStatus {
    BakeStatus {
        since: stamp(now),
        looked_at: stamp(now),
        unjudged: false,
        seconds: 0,
        needed_seconds: bake.duration.as_secs(),
        device_seconds: 0,
        job_starts: 0,
        queries: Vec::new(),
    }
}

fn every(bake: &Bake) -> i64 {
    (bake.duration.as_secs() / LOOKS_MIN).clamp(1, LOOK_EVERY_MAX.as_secs())
}

/// When the nodes are looked at next.
pub(super) fn due(bake: &Bake, status: &BakeStatus) -> Timestamp {
    let left = bake.duration.as_secs().saturating_sub(status.seconds);
    let next = if left > 0 { every(bake).min(left) } else { every(bake) };
    status.looked_at.0.saturating_add(SignedDuration::from_secs(next)).unwrap_or(Timestamp::MAX)
}

/// Looks at the nodes of a stage, if it is time to; Prometheus is asked first.
pub(super) fn look(
    view: &View<'_>,
    bake: &Bake,
    before: &BakeStatus,
    nodes: &[&Member<'_>],
    gates: Rounds,
    asked: &mut Asked,
) -> Look {
    if let Some(what) = spoiled(view, bake, before, nodes) {
        return Look::Spoiled(before.clone(), what);
    }
    let now = stamp(view.snapshot.now);
    let mut status = BakeStatus { needed_seconds: bake.duration.as_secs(), ..before.clone() };
    let passed = now.0.duration_since(before.looked_at.0).as_secs();
    // A clock that was set back is believed from now on; there is nothing to ask about no time.
    let mut looks = passed < 0;
    let due = due(bake, before);
    if !looks
        && view.snapshot.now >= due
        && let Heard::All { said, missed } = queries::hear(view, &bake.queries, due, asked)
    {
        (looks, status.queries) = (true, said);
        if let Some(what) = missed {
            status.looked_at = now;
            return Look::Spoiled(status, what);
        }
    }
    let unseen = nodes.iter().find_map(|member| unjudged(member)).or(gates.unjudged);
    // What was not to be judged for a moment between two looks is over by the next one, so it is written down.
    status.unjudged |= unseen.is_some();
    let unjudged = unseen.clone().or_else(|| queries::unjudged(&status.queries));
    if looks {
        // One that jumped ahead counts as one look.
        let counts = !status.unjudged && unjudged.is_none();
        let counted = if counts { passed.clamp(0, 2 * every(bake)) } else { 0 };
        status.unjudged = unseen.is_some();
        let started = nodes.iter().map(|member| starts(view, member, before.looked_at.0)).sum();
        status.job_starts = before.job_starts.saturating_add(started);
        status.seconds = before.seconds.saturating_add(counted);
        status.device_seconds =
            before.device_seconds.saturating_add(counted.saturating_mul(at_work(view, nodes)));
        status.looked_at = now;
    }
    let for_a_moment = || status.unjudged.then(|| FOR_A_MOMENT.to_owned());
    let missing = unjudged.or_else(for_a_moment).or_else(|| too_little(bake, &status));
    // A gate that is at work when all else is over is waited for.
    let ends = status.seconds >= status.needed_seconds;
    let missing = missing.or_else(|| gates.at_work.filter(|_| ends));
    let missing = missing.or_else(|| queries::unasked(&bake.queries, &status.queries).filter(|_| ends));
    let over = ends && missing.is_none();
    if over { Look::Over(status) } else { Look::Goes(status, missing) }
}

/// What no driver that is any good does to its node.
pub(super) fn spoiled(
    view: &View<'_>,
    bake: &Bake,
    before: &BakeStatus,
    nodes: &[&Member<'_>],
) -> Option<String> {
    // Who has failed is out of service, and the stage has accepted that.
    let nodes = || nodes.iter().filter(|member| member.state() != State::UpgradeFailed);
    for member in nodes() {
        let named = |kind: &str| view.policy.health.conditions.iter().any(|named| named == kind);
        // A node was given back without them, so one that stands came since then, whenever it was last looked at. Of others only
        // that tells.
        let visited = view.last_visit_of_rollout(member).is_some();
        let is_news = |at: Option<Timestamp>| visited || at.is_none_or(|at| at >= before.since.0);
        let bad = member.node.conditions.iter().find(|c| c.holds && named(&c.kind) && is_news(c.heartbeat));
        if let Some(condition) = bad {
            return Some(format!("node {} has the condition {}", member.name, condition.kind));
        }
    }
    let restarts = nodes().map(|member| (member.name, restarts(view, before, member)));
    let restarts: Vec<_> = restarts.filter(|(_, restarts)| *restarts > 0).collect();
    let total = restarts.iter().map(|(_, restarts)| *restarts).fold(0, u32::saturating_add);
    let (first, _) = restarts.first().filter(|_| total > bake.max_driver_restarts)?;
    let (times, may) = (times(total), times(bake.max_driver_restarts));
    let on = restarts.len();
    Some(format!(
        "drivers restarted by themselves {times}, on {on} of its nodes (the first is {first}), and may {may}"
    ))
}

fn times(count: u32) -> String {
    match count {
        0 => "never".to_owned(),
        1 => "once".to_owned(),
        _ => format!("{count} times"),
    }
}

/// How often the driver of a node started again since the bake began, and nobody had asked it to.
fn restarts(view: &View<'_>, before: &BakeStatus, member: &Member<'_>) -> u32 {
    // What happens on a visit is what the visit is for.
    let at_work = member.pod.filter(|pod| pod.restarts > 0 && member.walk().is_none());
    let Some(pod) = at_work else { return 0 };
    let last = member.node.last_visit.as_ref();
    let of_this = view.last_visit_of_rollout(member).is_some();
    match last.and_then(|last| last.pods.get(&view.policy.driver)) {
        // It is watched again when it is up, see [`note_boot`]. After a visit of another rollout only a pod that came since then
        // cannot have been restarted by the boot.
        Some(known)
            if (of_this || known.uid == pod.uid || pod.created < before.since.0)
                && !known.is_same_boot(member.node) =>
        {
            0
        }
        // Counted, since the node's clock may be another one than ours.
        Some(known) if known.uid == pod.uid => pod.restarts.saturating_sub(known.restarts),
        // It came in place of the one that the rollout left behind: by order, and not by clocks that may differ.
        Some(_) if of_this => pod.restarts,
        _ if pod.created >= before.since.0 => pod.restarts,
        // In a crash loop it does not even run. The API tells whole seconds: one that restarts in the very first counts.
        _ => {
            let loops = !pod.ready && pod.trouble.as_ref().is_some_and(Trouble::is_serious);
            u32::from(loops || pod.started >= Some(before.since.0))
        }
    }
}

/// A boot restarts the driver too, and is not the driver's fault: it is watched again as it is when it has come up after
/// that. Written down on the node, since whoever looks next must know.
pub(super) fn note_boot(view: &View<'_>, member: &Member<'_>) -> Option<Decision> {
    let said = view.said()?;
    let watches = |phase| matches!(phase, StagePhase::Baking | StagePhase::AwaitingApproval);
    if !said.stages.iter().any(|stage| watches(stage.phase)) {
        return None;
    }
    let (node, pod, driver) = (member.node, member.pod?, &view.policy.driver);
    let last = node.last_visit.as_ref()?;
    let known = last.pods.get(driver).filter(|known| !known.is_same_boot(node))?;
    let now = DriverPod::of(pod, node);
    // What is told of the pod may be from before the boot.
    let started_again = (&known.uid, known.incarnation) != (&now.uid, now.incarnation);
    if !node.ready || !member.driver_ready || !started_again {
        return None;
    }
    let mut last = last.clone();
    last.pods.insert(driver.clone(), now);
    let mut patch = base_patch(view, member, member.state());
    (patch.to, patch.event, patch.labels) = (None, None, Changes::default());
    patch.annotations.set(LAST_VISIT_ANNOTATION, Some(last.to_text()));
    Some(Decision::act(Reason::Writing, Action::PatchNode(patch)))
}

/// Why nothing can be said about a node now.
fn unjudged(member: &Member<'_>) -> Option<String> {
    let name = member.name;
    match () {
        () if member.state() == State::UpgradeFailed => None,
        () if !member.node.ready => Some(format!("node {name} is not Ready; that time does not count")),
        () if !is_done(member) => {
            Some(format!("node {name} is not in service with the new driver; that time does not count"))
        }
        () if !member.driver_ready => {
            Some(format!("the driver of node {name} is not ready; that time does not count"))
        }
        () => None,
    }
}

fn is_done(member: &Member<'_>) -> bool {
    member.sync == Freshness::InSync && member.state() == State::UpgradeDone && !member.unproven
}

/// What has to be seen before the bake may end.
fn too_little(bake: &Bake, status: &BakeStatus) -> Option<String> {
    let hours = status.device_seconds / 3600;
    if hours < i64::from(bake.min_device_hours) {
        return Some(format!("{hours} of {} device hours of work seen", bake.min_device_hours));
    }
    (status.job_starts < bake.min_job_starts)
        .then(|| format!("{} of {} starts of work seen", status.job_starts, bake.min_job_starts))
}

/// Work that began on a node since then: pods that run for the first time, or were made and have done what they had to. A
/// container that is started again and again shows the opposite.
fn starts(view: &View<'_>, member: &Member<'_>, since: Timestamp) -> u32 {
    let runs = |pod: &&Pod| view.uses_device(pod) && pod.restarts == 0 && pod.started > Some(since);
    let did = |pod: &&Pod| {
        let worked = view.policy.devices.asked_for_by(pod) && !is_gate_pod(&pod.labels) && !pod.mirror;
        worked && pod.phase == Phase::Succeeded && pod.created > since
    };
    let started = member.pods().filter(|pod| runs(pod) || did(pod)).count();
    u32::try_from(started).unwrap_or(u32::MAX)
}

/// Devices that are at work on these nodes now.
fn at_work(view: &View<'_>, nodes: &[&Member<'_>]) -> i64 {
    let pods = nodes.iter().flat_map(|member| view.users(member)).filter(|pod| pod.ready);
    pods.map(|pod| i64::from(pod.devices())).sum()
}
