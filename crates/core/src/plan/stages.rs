//! The stages of a pool: which node belongs to which, which of them are open, and how far each is.
//!
//! What opens a stage is what the rollout's status says of those before it, as the API has it: a decision is written
//! first and acted upon in a later pass, by whoever leads then. A pool without stages goes as one, and so does any pool on
//! its way back to an earlier version; nothing here changes anything about it.

use std::borrow::Cow;

use jiff::Timestamp;

use super::bake;
use super::members::{Early, Freshness, Member, Standing};
use super::pool::View;
use super::proofs::{self, Asked, End};
use super::timeline;
use super::walk::has_lost_its_cordon;
use crate::api::{BakeStatus, GateStatus, Promotion, StagePhase, StagePromotion, StageStatus, stamp};
use crate::contract::{CANARY_LABEL, State};
use crate::names::NodeName;
use crate::policy::{CANARY_STAGE, Pick, RolloutRules, Stage};
use crate::reason::{Limit, Narrow, Reason};
use crate::snapshot::Rollout;

/// The stages of one pool in one pass.
pub(super) struct Stages<'a> {
    list: Cow<'a, [Stage]>,
    /// What the rollout's status says of each.
    said: Vec<Option<&'a StageStatus>>,
    promotions: &'a [StagePromotion],
    /// Every node was done once.
    over: bool,
    /// The stage of each member.
    of: Vec<usize>,
    counts: Vec<Count>,
}

/// The nodes of a stage, counted. Those that are left out do not count.
#[derive(Clone, Default)]
struct Count {
    total: usize,
    done: usize,
    failed: usize,
    /// Of those that failed, the ones that say nothing about the version.
    blameless: usize,
    moving: usize,
    out: usize,
    /// The first that is neither done nor failed.
    unfinished: Option<NodeName>,
}

/// How far all stages are, and when to look again.
pub(super) struct Progress {
    pub(super) stages: Vec<StageStatus>,
    /// Gates that are asked.
    pub(super) asked: Asked,
}

impl<'a> Stages<'a> {
    pub(super) fn of(view: &View<'a>, members: &[Member<'a>]) -> Self {
        let said = view.said().map(|status| status.stages.as_slice()).unwrap_or_default();
        let rules = &view.policy.rollout;
        let proves = rules.gates.iter().any(|gate| !gate.is_for_nodes());
        let stages: Cow<'a, [Stage]> = if view.goes_back {
            Cow::Owned(Vec::new())
        } else if rules.stages.is_empty() {
            let labelled = |member: &Member<'_>| member.node.mark(CANARY_LABEL) == Some("true");
            // Once there were canaries, the others wait for them, whoever takes the label away.
            let canaries = said.iter().any(|said| said.name == CANARY_STAGE) || members.iter().any(labelled);
            Cow::Owned(match (canaries, proves) {
                (true, _) => RolloutRules::implicit(&view.policy.limits),
                // A gate for the end of a stage needs one.
                (false, true) => RolloutRules::one(&view.policy.limits),
                (false, false) => vec![],
            })
        } else {
            Cow::Borrowed(&rules.stages)
        };
        let of = assign(view, &stages, members);
        let counts = count(view, &stages, &of, members);
        let said = stages.iter().map(|stage| said.iter().find(|said| said.name == stage.name)).collect();
        let over = view.said().is_some_and(timeline::was_done);
        Self { list: stages, said, promotions: view.promotions(), over, of, counts }
    }

    /// The stage of a member, by its place among them; none if the pool goes as one.
    pub(super) fn index(&self, member: usize) -> Option<usize> {
        self.of.get(member).copied()
    }

    fn phase(&self, stage: usize) -> StagePhase {
        // What is over is over: a stage that comes about later has nothing to wait for.
        if self.over {
            return StagePhase::Passed;
        }
        self.said[stage].map(|said| said.phase).unwrap_or_default()
    }

    /// All stages before this one are open, and this is the first that has not passed.
    fn frontier(&self) -> usize {
        (0..self.list.len()).take_while(|stage| self.phase(*stage) == StagePhase::Passed).count()
    }

    /// Why a node of this stage may not start, if it may not.
    pub(super) fn refuses(&self, stage: usize) -> Option<Reason> {
        let bad = self.said.iter().flatten().find(|said| said.phase.is_bad());
        if let Some(StageStatus { name, message, .. }) = bad {
            let why = message.clone().unwrap_or_default();
            return Some(Reason::StageFailed { stage: name.clone(), why });
        }
        if self.is_held(stage) {
            let (failed, limit) = (self.counts[stage].failed, self.may_fail(stage));
            return Some(Reason::TooManyFailed { stage: Some(self.list[stage].name.clone()), failed, limit });
        }
        self.is_closed(stage).then(|| {
            let before = self.frontier();
            let phase = self.phase(before);
            // Whoever waits for a person's word says so already.
            let said = self.said[before].filter(|_| phase != StagePhase::AwaitingApproval);
            Reason::StageClosed {
                stage: self.list[stage].name.clone(),
                before: self.list[before].name.clone(),
                phase,
                why: said.and_then(|said| said.message.clone()),
            }
        })
    }

    /// More of its nodes have failed than may, if not by the version: the next ones might go the same way.
    fn is_held(&self, stage: usize) -> bool {
        let forced = || self.promoted(&self.list[stage].name).is_some_and(|promotion| promotion.skip_bake);
        stage == self.frontier()
            && !self.over
            && self.counts[stage].failed > self.may_fail(stage)
            && !forced()
    }

    fn may_fail(&self, stage: usize) -> usize {
        self.list[stage].failure_threshold.of(self.counts[stage].total)
    }

    /// Its nodes are on their way, or about to be. While a stage is watched at work, or a person has to open the next one,
    /// nobody is, not even those who came late.
    pub(super) fn moves(&self, stage: usize) -> bool {
        let frontier = self.frontier();
        let rests = |phase: StagePhase| matches!(phase, StagePhase::Baking | StagePhase::AwaitingApproval);
        let rests = frontier < self.list.len() && rests(self.phase(frontier));
        !rests
            && !self.is_closed(stage)
            && !self.is_held(stage)
            && !self.said.iter().flatten().any(|said| said.phase.is_bad())
    }

    /// The stages before it come first.
    pub(super) fn is_closed(&self, stage: usize) -> bool {
        !self.list.is_empty() && stage > self.frontier()
    }

    /// Why a node that came up with the new driver by itself has to be proven: its stage is not open, nobody else starts
    /// towards this version any more, or it has gates.
    pub(super) fn early(&self, view: &View<'_>, index: usize, member: &Member<'_>) -> Option<Early> {
        let taken_back = view.condemned.is_some() && !self.over;
        let Some(stage) = self.index(index).filter(|stage| taken_back || self.is_closed(*stage)) else {
            return member.unproven.then_some(Early::Gates);
        };
        let why = || if taken_back { Early::TakenBack } else { Early::Stage(self.list[stage].name.clone()) };
        (came_by_itself(view, member) && !is_skipped(view, member)).then(why)
    }

    /// What each stage allows apart from the pool's limits.
    pub(super) fn rooms(&self) -> Vec<Room> {
        self.list.iter().zip(&self.counts).map(|(stage, count)| Room::of(stage, count)).collect()
    }

    /// How far each stage is now.
    pub(super) fn progress(&self, view: &View<'_>, members: &[Member<'_>]) -> Progress {
        let mut asked = Asked::default();
        let frontier = self.frontier();
        let stages = self.list.iter().enumerate().map(|(index, stage)| {
            // Of a stage that has not begun, or is over, no more is told than how many of its nodes are done.
            let nodes = members.iter().zip(&self.of).filter(|(_, of)| **of == index && index == frontier);
            let nodes: Vec<&Member<'_>> =
                nodes.map(|(member, _)| member).filter(|member| !is_left_out(view, member)).collect();
            let before = self.before(index);
            let mut next = self.next(view, index, before.clone(), &nodes, &mut asked);
            if index == frontier {
                proofs::tally(view, &mut next, &nodes);
            }
            if next.phase == StagePhase::Baking
                && let (Some(bake), Some(status)) = (&stage.bake, &next.bake)
            {
                // A look that is due waits for an answer, which wakes us.
                let due = bake::due(bake, status);
                Some(due).filter(|due| *due > view.snapshot.now).into_iter().for_each(|due| asked.wake(due));
            }
            let since =
                if next.phase == before.phase { before.since } else { Some(stamp(view.snapshot.now)) };
            StageStatus { since, ..next }
        });
        let stages = stages.collect();
        Progress { stages, asked }
    }

    /// What gates have said on the nodes of a pool that goes as one.
    pub(super) fn said_on_all(&self, view: &View<'_>, members: &[Member<'_>]) -> Vec<GateStatus> {
        if !self.list.is_empty() {
            return Vec::new(); // each stage says it of its own
        }
        let nodes: Vec<&Member<'_>> = members.iter().filter(|member| !is_left_out(view, member)).collect();
        proofs::said_on(view, &nodes)
    }

    /// What was said of a stage, with its nodes counted anew.
    fn before(&self, index: usize) -> StageStatus {
        let Count { total, done, failed, .. } = self.counts[index];
        let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        StageStatus {
            name: self.list[index].name.clone(),
            total: number(total),
            done: number(done),
            failed: number(failed),
            phase: self.phase(index),
            ..self.said[index].cloned().unwrap_or_default()
        }
    }

    fn next(
        &self,
        view: &View<'_>,
        index: usize,
        before: StageStatus,
        nodes: &[&Member<'_>],
        asked: &mut Asked,
    ) -> StageStatus {
        let (stage, count) = (&self.list[index], &self.counts[index]);
        if index != self.frontier() {
            return before;
        }
        if self.promoted(&stage.name).is_some_and(|promotion| promotion.skip_bake) && count.is_complete() {
            return StageStatus { phase: StagePhase::Passed, message: None, ..before };
        }
        let limit = self.may_fail(index);
        if before.phase == StagePhase::Spoiled {
            return before;
        }
        let (failed, total) = (count.failed - count.blameless, count.total);
        if failed > limit {
            let message = format!("{failed} of its {total} nodes failed, and at most {limit} may");
            return StageStatus { phase: StagePhase::Failed, message: Some(message), ..before };
        }
        let waits = (count.failed > limit).then(|| {
            let many = count.blameless;
            format!(
                "{many} of its {total} nodes failed before this version could be judged on them; mend and retry them"
            )
        });
        if let Some(message) = waits.or_else(|| self.knows_nothing(index)) {
            // Who holds it up hides nothing of what is seen on the others.
            let is_watched = matches!(before.phase, StagePhase::Baking | StagePhase::AwaitingApproval);
            if let Some(what) = is_watched.then(|| spoiled(view, stage, &before, nodes)).flatten() {
                return StageStatus { phase: StagePhase::Spoiled, message: Some(what), ..before };
            }
            let begun = !matches!(before.phase, StagePhase::Waiting | StagePhase::Failed);
            let phase = if begun { before.phase } else { StagePhase::Moving };
            return StageStatus { phase, ..uncounted(before, message) };
        }
        match before.phase {
            StagePhase::Baking => self.baking(view, stage, before, nodes, asked),
            StagePhase::AwaitingApproval => self.awaiting(view, stage, before, nodes),
            _ if count.is_complete() => self.proving(view, stage, before, nodes, asked),
            _ => StageStatus { phase: StagePhase::Moving, message: None, ..before },
        }
    }

    /// Why nothing can be learned from a stage, if nobody in it runs the new version: it never passes by default.
    fn knows_nothing(&self, index: usize) -> Option<String> {
        let (stage, count) = (&self.list[index], &self.counts[index]);
        let Stage { name, .. } = stage;
        if !self.of.contains(&index) {
            // A label with a mistake in it must not open everything; a number that no node is left for is meant.
            let by_label = matches!(stage.pick, Pick::Labelled(_));
            return by_label.then(|| format!("no node of the pool belongs to stage {name}; label one"));
        }
        // Nobody waits for the last stage.
        let waited_for = stage.bake.is_some() || index + 1 < self.list.len();
        if !waited_for || count.done > 0 || !count.is_complete() {
            return None;
        }
        let without = format!("no node of stage {name} is done, so nothing is known of this version");
        Some(match count.failed {
            0 => format!("{without}: all of them are skipped"),
            failed => format!("{without}: {failed} failed; retry one"),
        })
    }

    /// All of its nodes are done: the gates at its end are asked, then its bake begins.
    fn proving(
        &self,
        view: &View<'_>,
        stage: &Stage,
        mut before: StageStatus,
        nodes: &[&Member<'_>],
        asked: &mut Asked,
    ) -> StageStatus {
        // Nodes that are done before a rollout has begun prove nothing about it.
        if view.is_called_off() || view.said().is_none() {
            return before;
        }
        match proofs::at_end(view, &mut before, nodes, asked) {
            End::Failed(message) => {
                StageStatus { phase: StagePhase::Spoiled, message: Some(message), ..before }
            }
            End::Waits(message) => {
                StageStatus { phase: StagePhase::Proving, message: Some(message), ..before }
            }
            End::Passed => match &stage.bake {
                Some(bake) => {
                    let begun = Some(bake::begin(bake, view.snapshot.now));
                    StageStatus { phase: StagePhase::Baking, bake: begun, message: None, ..before }
                }
                None => self.approved(stage, before),
            },
        }
    }

    fn baking(
        &self,
        view: &View<'_>,
        stage: &Stage,
        mut before: StageStatus,
        nodes: &[&Member<'_>],
        asked: &mut Asked,
    ) -> StageStatus {
        let (Some(rules), Some(status)) = (&stage.bake, before.bake.clone()) else {
            return self.approved(stage, before);
        };
        // Nobody is asked about it, so nothing is known of that time, also if it goes on later.
        if view.is_called_off() {
            let message =
                "the rollout was called off: its nodes are not watched, and that time does not count";
            return uncounted(before, message.to_owned());
        }
        let ends = status.seconds >= status.needed_seconds;
        let mut rounds = proofs::repeat(view, &stage.name, (status.since.0, ends), nodes, asked);
        if let Some(refusal) = rounds.failed.take() {
            let message = Some(refusal.enter(view, &mut before, asked));
            return StageStatus { phase: StagePhase::Spoiled, message, ..before };
        }
        let look = bake::look(view, rules, &status, nodes, rounds, asked);
        if let bake::Look::Goes(now, _) | bake::Look::Over(now) = &look {
            let between = (status.looked_at.0, now.looked_at.0);
            proofs::count_rounds(view, &mut before, nodes, between, asked);
        }
        match look {
            bake::Look::Goes(status, message) => StageStatus { bake: Some(status), message, ..before },
            bake::Look::Spoiled(status, message) => {
                let (bake, message) = (Some(status), Some(message));
                StageStatus { phase: StagePhase::Spoiled, bake, message, ..before }
            }
            bake::Look::Over(status) => self.approved(stage, StageStatus { bake: Some(status), ..before }),
        }
    }

    /// A person may take days to say the word, and what spoils a bake spoils it until then.
    fn awaiting(
        &self,
        view: &View<'_>,
        stage: &Stage,
        before: StageStatus,
        nodes: &[&Member<'_>],
    ) -> StageStatus {
        match spoiled(view, stage, &before, nodes) {
            Some(what) => StageStatus { phase: StagePhase::Spoiled, message: Some(what), ..before },
            None => self.approved(stage, before),
        }
    }

    /// All that can be seen has been seen: the next stage opens, or a person has to say so.
    fn approved(&self, stage: &Stage, before: StageStatus) -> StageStatus {
        let waits = stage.promotion == Promotion::Manual && self.promoted(&stage.name).is_none();
        let (phase, message) = if waits {
            (StagePhase::AwaitingApproval, Some(format!("a person has to promote stage {}", stage.name)))
        } else {
            (StagePhase::Passed, None)
        };
        StageStatus { phase, message, ..before }
    }

    fn promoted(&self, stage: &str) -> Option<&'a StagePromotion> {
        self.promotions.iter().rev().find(|promotion| promotion.stage == stage)
    }
}

/// A stage that goes on as it is, with what holds it up: the time until the next look at its bake does not count.
fn uncounted(before: StageStatus, message: String) -> StageStatus {
    let bake = before.bake.map(|bake| BakeStatus { unjudged: true, ..bake });
    StageStatus { bake, message: Some(message), ..before }
}

/// What has spoiled a stage between two looks at its bake, or after it.
fn spoiled(view: &View<'_>, stage: &Stage, before: &StageStatus, nodes: &[&Member<'_>]) -> Option<String> {
    let watched = stage.bake.as_ref().zip(before.bake.as_ref()).filter(|_| !view.is_called_off());
    watched.and_then(|(rules, status)| bake::spoiled(view, rules, status, nodes))
}

impl Count {
    fn is_complete(&self) -> bool {
        self.unfinished.is_none()
    }
}

/// The stage of each member: the first that takes it. Where stages are counted out, those come first that the rollout has
/// begun with, in the order in which it did: a node that joins must not take the place of one that is watched at work.
fn assign(view: &View<'_>, stages: &[Stage], members: &[Member<'_>]) -> Vec<usize> {
    if stages.is_empty() {
        return Vec::new();
    }
    let mut left: Vec<usize> = stages
        .iter()
        .map(|stage| match &stage.pick {
            Pick::First(amount) => amount.of(members.len()),
            Pick::Labelled(_) | Pick::Rest => usize::MAX,
        })
        .collect();
    let mut takes = |member: &Member<'_>, index: usize| {
        let fits = match &stages[index].pick {
            Pick::Labelled(labels) => labels.iter().all(|(k, v)| member.node.labels().get(k) == Some(v)),
            Pick::First(_) => left[index] > 0,
            Pick::Rest => true,
        };
        left[index] -= usize::from(fits);
        fits
    };
    let last = stages.len() - 1;
    let mut of = vec![last; members.len()];
    let mut in_order: Vec<_> = members.iter().enumerate().collect();
    // The sort is stable: all others stay in the order of their names.
    in_order.sort_by_key(|(_, member)| begun(view, member).unwrap_or(Timestamp::MAX));
    for (place, member) in in_order {
        of[place] = (0..last).find(|index| takes(member, *index)).unwrap_or(last);
    }
    of
}

/// When the rollout began with a node that is on its visit, or was through with it, if that was not because it came early. A
/// stage begins when those before it are through.
fn begun(view: &View<'_>, member: &Member<'_>) -> Option<Timestamp> {
    match member.standing {
        Standing::Visit(visit, _) => {
            Some(visit.since).filter(|_| !visit.early && visit.rollout == view.rollout)
        }
        _ => view.last_visit_of_rollout(member).filter(|last| !last.early).map(|last| last.ended),
    }
}

/// Nodes that come to the new version by themselves have gates to pass, whether their stage is open or not.
pub(super) fn proves_nodes(view: &View<'_>) -> bool {
    view.policy.rollout.node_gates().next().is_some() && !view.said().is_some_and(timeline::was_done)
}

/// Its gates have not seen it on the version that it came to by itself. Whoever asks for an upgrade of it gets a visit.
pub(super) fn is_unproven(view: &View<'_>, member: &Member<'_>) -> bool {
    !member.requested && came_by_itself(view, member) && !is_skipped(view, member)
}

/// It came to the wanted version by no visit, since the rollout began or since we last left it: its driver pod was lost, or it
/// joined. A driver that was there before, or that the rollout does not change, is nothing new. A version that was taken back
/// comes to nodes all the same, as long as nobody has put back the one before.
fn came_by_itself(view: &View<'_>, member: &Member<'_>) -> bool {
    let Standing::Label(label) = member.standing else { return false };
    // Who has failed and has no record stays failed until a person looks at it.
    let moves = label.in_flight() || label == State::UpgradeFailed;
    let moves = moves || member.sync != Freshness::InSync || member.needs_driver();
    let last = member.node.last_visit.as_ref();
    if moves || view.aborted.is_some() || view.last_visit_of_rollout(member).is_some() {
        return false;
    }
    let is_new = || {
        let (name, rollout) = brought_by(view)?;
        let since = rollout.status.as_ref()?.started_at.as_ref()?.0;
        let (daemon_set, pod) = (member.daemon_set?, member.pod?);
        // What the rollout does not change is not in there. A way back changes what it takes back.
        let changing = view.way_back_of.unwrap_or(rollout);
        changing.spec.previous.as_ref()?.target.get(&*daemon_set.name.name)?;
        let visited_by = last.and_then(|last| last.rollout_of(&view.policy.driver));
        let left = last.and_then(|last| last.pods.get(&view.policy.driver));
        // To a node that was never upgraded the version before is nothing new.
        let is_its_own = view.goes_back && visited_by != rollout.spec.rollback_of.as_deref();
        // A visit has left this very pod there, or another one of the same version.
        if is_its_own || visited_by == Some(name) || left.is_some_and(|left| left.uid == pod.uid) {
            return None;
        }
        // Nobody may have looked when the new template came: what was not there yet when we left the node came after us.
        let came_after_us = || {
            let last = last.filter(|_| visited_by.is_some())?;
            let mut known = view.snapshot.revisions.values().filter(|known| known.owner == daemon_set.uid);
            known
                .find(|known| Some(&known.hash) == pod.revision.as_ref())
                .map(|known| known.created > last.ended)
        };
        Some(pod.created > since || came_after_us().unwrap_or(false))
    };
    is_new().unwrap_or(false)
}

/// The rollout that brings what is wanted, with its name. None begins for a version that went wrong: it is the one in which it
/// did.
fn brought_by<'a>(view: &'a View<'_>) -> Option<(&'a str, &'a Rollout)> {
    let name = match &view.condemned {
        Some(Reason::Condemned { rollout, .. }) => rollout,
        _ => view.rollout.as_ref()?,
    };
    Some((name, view.snapshot.rollouts.get(name)?))
}

pub(super) fn is_skipped(view: &View<'_>, member: &Member<'_>) -> bool {
    member.node.mark(&view.policy.keys.skip) == Some("true")
}

/// A person has left it out, and nothing was done to it, or it has failed: its stage does not wait for it, and learns
/// nothing from it.
fn is_left_out(view: &View<'_>, member: &Member<'_>) -> bool {
    let waits = matches!(member.state(), State::Unknown | State::UpgradeRequired | State::UpgradeDone);
    let unknown = || member.sync != Freshness::InSync || (proves_nodes(view) && came_by_itself(view, member));
    let left_out = member.state() == State::UpgradeFailed || (waits && unknown());
    is_skipped(view, member) && left_out
}

fn count(view: &View<'_>, stages: &[Stage], of: &[usize], members: &[Member<'_>]) -> Vec<Count> {
    let mut counts = vec![Count::default(); stages.len()];
    for (member, stage) in members.iter().zip(of) {
        let state = member.state();
        let begun = state.in_flight() || member.moving_to(view.policy).is_some_and(State::in_flight);
        let moving = begun || member.may_have_started();
        let done = state == State::UpgradeDone && member.sync == Freshness::InSync && !member.unproven;
        let count = &mut counts[*stage];
        count.moving += usize::from(moving);
        count.out += usize::from(moving || member.node.is_out() || has_lost_its_cordon(member));
        if is_left_out(view, member) {
            continue;
        }
        count.total += 1;
        count.done += usize::from(done);
        count.failed += usize::from(state == State::UpgradeFailed);
        count.blameless += usize::from(member.failed_blameless());
        if !done && state != State::UpgradeFailed && count.unfinished.is_none() {
            count.unfinished = Some(member.name.clone());
        }
    }
    counts
}

/// What a stage allows apart from the limits of its pool.
pub(super) struct Room {
    stage: String,
    moving: usize,
    out: usize,
    /// So many at once after those that are done; `None`: no ramp.
    ramp: Option<usize>,
    max_moving: Option<usize>,
    max_out: Option<usize>,
}

impl Room {
    fn of(stage: &Stage, count: &Count) -> Self {
        Self {
            stage: stage.name.clone(),
            moving: count.moving,
            out: count.out,
            // One, two, four, eight: as many as have been done, and one more. After a failure, one by one.
            ramp: stage.ramp.then_some(if count.failed > 0 { 1 } else { count.done + 1 }),
            max_moving: stage.max_parallel.map(|limit| limit as usize),
            max_out: stage.max_unavailable.map(|amount| amount.of(count.total)),
        }
    }

    /// The limit that keeps so many more nodes, of which `new` are in service, from starting now.
    pub(super) fn full(&self, nodes: usize, new: usize) -> Option<Limit> {
        let moving = self.moving + nodes;
        // Atoms go together, if nobody else is on its walk; jobs were split before.
        let ramp = self.ramp.filter(|limit| self.moving > 0 && moving > *limit);
        let own = self.max_moving.filter(|limit| moving > *limit);
        let out = self.max_out.filter(|limit| new > 0 && self.out + new > *limit);
        let full = |limit, moving| Limit::Stage { stage: self.stage.clone(), limit, moving };
        ramp.or(own).map(|limit| full(limit, true)).or_else(|| out.map(|limit| full(limit, false)))
    }

    /// The limit that so many nodes could never fit.
    pub(super) fn narrow(&self, nodes: usize, new: usize) -> Option<(Narrow, usize)> {
        let own = self.max_moving.filter(|limit| nodes > *limit);
        let out = self.max_out.filter(|limit| new > *limit);
        own.map(|limit| (Narrow::MaxParallelUpgrades, limit))
            .or_else(|| out.map(|limit| (Narrow::MaxUnavailable, limit)))
    }

    /// The ramp takes so many at once, now or when those before them are back.
    pub(super) fn ramps_to(&self, nodes: usize) -> bool {
        self.ramp.is_none_or(|limit| nodes <= limit)
    }

    /// So many more start.
    pub(super) fn take(&mut self, nodes: usize, new: usize) {
        self.moving += nodes;
        self.out += new;
    }
}
