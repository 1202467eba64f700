//! Gates of a stage as a whole: those at its end, those that are repeated while it bakes, and what all of them have said.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};

use super::gates::{self, Make, Said};
use super::members::{Freshness, Member};
use super::patch::ends_with;
use super::pool::View;
use crate::action::{Action, Event};
use crate::api::{GateStatus, GateWhen, StagePhase, StageStatus, stamp};
use crate::contract::State;
use crate::gate::{Gate, GateRun, JobFacts, KEPT, Numbers, Sample, Verdict};
use crate::names::{GateName, NodeName};
use crate::visit::{Cause, GateNote};

/// Jobs to be made, what was said, and when to look again.
#[derive(Default)]
pub(super) struct Asked {
    pub(super) actions: Vec<Action>,
    /// What gates said, for the nodes that they ran on.
    pub(super) events: Vec<(NodeName, Event)>,
    pub(super) wake_at: Option<Timestamp>,
}

impl Asked {
    pub(super) fn wake(&mut self, at: Timestamp) {
        self.wake_at = Some(self.wake_at.map_or(at, |other| other.min(at)));
    }

    /// Has a Job made; what stands in its way, if something does.
    fn make(
        &mut self,
        view: &View<'_>,
        gate: &Gate,
        run: &GateRun,
        nodes: &[&Member<'_>],
        kept: SignedDuration,
    ) -> Option<String> {
        match gates::make(view, gate, run, nodes, kept) {
            Make::Now(action) => self.actions.push(*action),
            Make::UnderWay => {}
            Make::At(at, what) => {
                self.wake(at);
                return Some(what);
            }
        }
        None
    }

    /// A gate has said something about these nodes.
    fn tell(&mut self, view: &View<'_>, nodes: &[NodeName], warning: bool, message: &str) {
        let event =
            || Event { warning, reason: view.policy.keys.event_reason.clone(), message: message.to_owned() };
        self.events.extend(nodes.iter().map(|node| (node.clone(), event())));
    }

    fn wait(&mut self, runs: &gates::Runs) {
        self.wake(runs.wakes());
    }
}

/// What the gates at a stage's end say.
pub(super) enum End {
    Passed,
    Waits(String),
    Failed(String),
}

/// Asks the gates at the end of a stage, one after the other. What they say goes into `status` at once: a Job that is over
/// is soon forgotten.
pub(super) fn at_end(
    view: &View<'_>,
    status: &mut StageStatus,
    nodes: &[&Member<'_>],
    asked: &mut Asked,
) -> End {
    let (stage, now) = (status.name.clone(), || Some(stamp(view.snapshot.now)));
    if nodes.is_empty() {
        // Nothing was moved, so there is nothing to prove.
        return End::Passed;
    }
    for gate in &view.policy.rollout.gates {
        let Some(wanted) = gate.at_end_of(&stage) else { continue };
        let name = &gate.name;
        let said = status.gates.iter().find(|said| said.is_of(name.as_str(), GateWhen::Stage));
        if said.is_some_and(|said| said.passed > 0) {
            continue;
        }
        let (said, on) = match ask_at_end(view, gate, &stage, wanted as usize, nodes) {
            Ok(heard) => heard,
            Err(too_few) => return End::Waits(too_few),
        };
        match said {
            Said::Passed { took, .. } => {
                let message = format!("Gate {name} passed in {took:#} at the end of stage {stage}");
                asked.tell(view, &names(&on), false, &message);
                entry(status, name, GateWhen::Stage).pass(now(), took.as_secs());
            }
            Said::Failed { why, log } => {
                let message = format!("gate {name} {why}");
                let told = format!("Gate {name} at the end of stage {stage} {why}{}", ends_with(&log));
                asked.tell(view, &names(&on), true, &told);
                entry(status, name, GateWhen::Stage).fail(now(), why, &log);
                return End::Failed(message);
            }
            Said::Unjudged { why } => {
                entry(status, name, GateWhen::Stage).message = Some(why.clone());
                return End::Waits(format!("gate {name} {why}; it is asked again within the hour"));
            }
            Said::Runs(runs) => {
                asked.wait(&runs);
                return End::Waits(format!("gate {name}: {}", runs.says()));
            }
            Said::Ask(run) => {
                let refused = asked.make(view, gate, &run, &on, KEPT);
                return End::Waits(
                    refused
                        .map_or(format!("gate {name} is asked"), |what| format!("gate {name} waits: {what}")),
                );
            }
        }
    }
    End::Passed
}

/// What a gate at the end of a stage says, and of which nodes; a sentence, if too few of them can be asked.
fn ask_at_end<'m, 'a>(
    view: &View<'_>,
    gate: &Gate,
    stage: &str,
    wanted: usize,
    nodes: &[&'m Member<'a>],
) -> Result<(Said, Vec<&'m Member<'a>>), String> {
    let (mut attempt, mut before) = (1, Vec::new());
    // One that was asked is listened to, also where its nodes have been taken out of service meanwhile.
    if let Some((job, on)) = begun_at_end(view, gate, stage, nodes) {
        match gates::ask(view, gate, GateRun { attempt, ..job.run.clone() }, None) {
            Said::Ask(again) => (attempt, before) = (again.attempt, again.nodes),
            said => return Ok((said, on)),
        }
    }
    let fit = nodes.iter().copied().filter(|member| is_in_service(member) && !member.node.is_out());
    let mut on: Vec<&Member<'_>> = fit.collect();
    if on.len() < wanted {
        let (name, has) = (&gate.name, on.len());
        return Err(format!("gate {name} needs {wanted} nodes in service; the stage has {has}"));
    }
    // Nobody is asked to leave for it, so it would wait in vain where there is work. The sort is stable: it stays where it was asked
    // before, if it can, else it takes the first by name.
    let is_used = |member: &Member<'_>| gate.needs_device() && view.users(member).next().is_some();
    on.sort_by_cached_key(|member| (is_used(member), !before.contains(member.name)));
    on.truncate(wanted);
    on.sort_by_key(|member| member.name);
    let run = GateRun { attempt, ..run(view, gate, stage, names(&on), &at_end_with(&on)) };
    Ok((Said::Ask(Box::new(run)), on))
}

/// The newest Job of a gate at the end of a stage, with its nodes. Drivers that came after it were never looked at: the stage has
/// moved since then, and what such a Job says does not count.
fn begun_at_end<'j, 'm, 'a>(
    view: &View<'j>,
    gate: &'j Gate,
    stage: &'j str,
    nodes: &[&'m Member<'a>],
) -> Option<(&'j JobFacts, Vec<&'m Member<'a>>)> {
    let seen = |job: &JobFacts, name: &NodeName| {
        let member = nodes.iter().copied().find(|member| member.name == name)?;
        member.pod.is_some_and(|pod| pod.created <= job.created).then_some(member)
    };
    let on = |job: &'j JobFacts| {
        let on: Option<Vec<_>> = job.run.nodes.iter().map(|name| seen(job, name)).collect();
        Some((job, on?))
    };
    asked_before(view, gate, stage, END).filter_map(on).max_by_key(|(job, _)| (job.created, &job.name))
}

fn names(nodes: &[&Member<'_>]) -> Vec<NodeName> {
    nodes.iter().map(|member| member.name.clone()).collect()
}

/// What the gates that are repeated during a bake say.
#[derive(Default)]
pub(super) struct Rounds {
    /// One said no.
    pub(super) failed: Option<Refusal>,
    /// One could not tell, the last time it was asked.
    pub(super) unjudged: Option<String>,
    /// One is at work.
    pub(super) at_work: Option<String>,
}

/// A gate that said no during a bake.
pub(super) struct Refusal {
    /// Which, where and why.
    what: String,
    gate: GateName,
    node: NodeName,
    log: Box<str>,
}

impl Refusal {
    /// Writes it down.
    pub(super) fn enter(self, view: &View<'_>, status: &mut StageStatus, asked: &mut Asked) -> String {
        let told = format!("In the bake of stage {}, {}{}", status.name, self.what, ends_with(&self.log));
        asked.tell(view, &[self.node], true, &told);
        let now = Some(stamp(view.snapshot.now));
        entry(status, &self.gate, GateWhen::Bake).fail(now, self.what.clone(), &self.log);
        self.what
    }
}

/// Asks the gates that are repeated while a stage bakes, each on every node, round by round since the bake began. When the
/// time is over (`ends`), no round begins that nobody needs.
pub(super) fn repeat(
    view: &View<'_>,
    stage: &str,
    (since, ends): (Timestamp, bool),
    nodes: &[&Member<'_>],
    asked: &mut Asked,
) -> Rounds {
    let (mut rounds, about) = (Rounds::default(), in_bake(since));
    for gate in view.policy.rollout.node_gates() {
        let Some(every) = gate.repeat else { continue };
        let round = view.snapshot.now.duration_since(since).as_secs() / every.as_secs().max(1);
        let next = SignedDuration::from_secs(every.as_secs().saturating_mul(round.saturating_add(1)));
        asked.wake(since.saturating_add(next).unwrap_or(Timestamp::MAX));
        // The newest round decides, however long ago it began.
        let mut newest: BTreeMap<&NodeName, i64> = BTreeMap::new();
        for job in asked_before(view, gate, stage, &about) {
            let (Some(node), Some(round)) = (job.run.nodes.first(), round_of(&job.run)) else { continue };
            let known = newest.entry(node).or_insert(round);
            *known = round.max(*known);
        }
        // The bake begins when the gate has just passed.
        for member in nodes.iter().filter(|member| round > 0 && is_in_service(member)) {
            let times = Times { about: &about, round, newest: newest.get(member.name).copied(), ends };
            ask_again(view, gate, (stage, times), member, asked, &mut rounds);
        }
    }
    rounds
}

/// The round that it is, and the last one that was begun on a node.
struct Times<'a> {
    /// The bake.
    about: &'a str,
    round: i64,
    newest: Option<i64>,
    ends: bool,
}

fn ask_again(
    view: &View<'_>,
    gate: &Gate,
    (stage, times): (&str, Times<'_>),
    member: &Member<'_>,
    asked: &mut Asked,
    rounds: &mut Rounds,
) {
    let Times { about, round, newest, ends } = times;
    let node = || vec![member.name.clone()];
    let run = |round: i64| run(view, gate, stage, node(), &format!("{about} {round}"));
    let says = |round: i64| gates::ask(view, gate, run(round), before(view, member, gate));
    let on = format!("gate {} on node {}", gate.name, member.name);
    let older = newest.filter(|newest| *newest != round).map(says);
    let said = match older {
        None => says(round),
        Some(Said::Passed { .. }) if ends => return,
        Some(Said::Passed { .. } | Said::Ask(_)) => Said::Ask(Box::new(run(round))),
        Some(Said::Unjudged { why }) => {
            rounds.unjudged.get_or_insert(format!("{on} {why}"));
            Said::Ask(Box::new(run(round)))
        }
        // It ran into this round, and is waited for.
        Some(said) => said,
    };
    match said {
        Said::Passed { .. } => {}
        Said::Failed { why, log } => {
            let (gate, node) = (gate.name.clone(), member.name.clone());
            rounds.failed = Some(Refusal { what: format!("{on} {why}"), gate, node, log });
        }
        Said::Unjudged { why } => {
            rounds.unjudged.get_or_insert(format!("{on} {why}; time counts again when it has passed"));
        }
        Said::Runs(runs) => {
            asked.wait(&runs);
            rounds.at_work.get_or_insert(format!("{on}: {}", runs.says()));
        }
        Said::Ask(run) => {
            let every = gate.repeat.unwrap_or_default();
            // Until the round after the next one is over.
            let kept = every.saturating_mul(2).saturating_add(KEPT);
            match asked.make(view, gate, &run, &[member], kept) {
                Some(what) => rounds.unjudged.get_or_insert(format!("{on} waits: {what}")),
                None => rounds.at_work.get_or_insert(format!("{on} is asked")),
            };
        }
    }
}

/// Counts what was said between two looks at a bake. A no ends it, and is told where it is read.
pub(super) fn count_rounds(
    view: &View<'_>,
    status: &mut StageStatus,
    nodes: &[&Member<'_>],
    (from, to): (Timestamp, Timestamp),
    asked: &mut Asked,
) {
    let Some(about) = status.bake.as_ref().map(|bake| in_bake(bake.since.0)) else { return };
    let stage = status.name.clone();
    for gate in view.policy.rollout.node_gates().filter(|gate| gate.repeat.is_some()) {
        let ended = |job: &&JobFacts| job.end.is_some_and(|(at, _)| at >= from && at < to);
        for facts in asked_before(view, gate, &stage, &about).filter(ended) {
            let member = nodes.iter().find(|member| facts.run.nodes.first() == Some(member.name));
            let before = member.and_then(|member| before(view, member, gate));
            let Some(job) = view.snapshot.gate_job(&facts.name) else { continue };
            let ended = facts.end.map(|(at, _)| stamp(at));
            match gates::judge(gate, before, &job) {
                Verdict::Passed { took, .. } => {
                    let message =
                        format!("Gate {} passed in {took:#} in the bake of stage {stage}", gate.name);
                    asked.tell(view, &facts.run.nodes, false, &message);
                    entry(status, &gate.name, GateWhen::Bake).pass(ended, took.as_secs());
                }
                Verdict::Unjudged { why } => {
                    entry(status, &gate.name, GateWhen::Bake).unjudge(ended, why.to_string());
                }
                Verdict::Failed { .. } | Verdict::Running { .. } => {}
            }
        }
    }
}

/// What gates have said on the nodes of a stage. What was said in its bake stays as it was, and what was said at its end until it
/// moves again: that was about other drivers.
pub(super) fn tally(view: &View<'_>, status: &mut StageStatus, nodes: &[&Member<'_>]) {
    let moves = matches!(status.phase, StagePhase::Moving | StagePhase::Failed);
    status.gates.retain(|gate| match gate.when {
        GateWhen::Node => false,
        GateWhen::Stage => !moves,
        GateWhen::Bake => true,
    });
    status.gates.extend(said_on(view, nodes));
    status.gates.sort_by(|a, b| (a.when, &a.name).cmp(&(b.when, &b.name)));
}

/// What gates have said on these nodes, as far as the nodes show it.
pub(super) fn said_on(view: &View<'_>, nodes: &[&Member<'_>]) -> Vec<GateStatus> {
    let on_all = |gate: &Gate| {
        let mut said = GateStatus::new(gate.name.as_str(), GateWhen::Node);
        for member in nodes {
            if let Some(note) = passed_on(view, member, gate) {
                said.pass(note.at.map(stamp), note.seconds);
            }
            let walk = member.walk();
            let failure = walk.and_then(|walk| Some((walk.since, &walk.failure.as_ref()?.cause)));
            if let Some((since, cause @ Cause::Gate { found, gate: by, .. })) = failure
                && *by == gate.name
            {
                let (why, log) = (format!("{}: {found}", member.name), cause.log().unwrap_or_default());
                said.fail(Some(stamp(since)), why, log);
            }
        }
        Some(said).filter(|said| said.passed + said.failed > 0)
    };
    view.policy.rollout.node_gates().filter_map(on_all).collect()
}

/// What is known of a gate that let a node pass in this rollout.
fn passed_on<'a>(view: &View<'_>, member: &Member<'a>, gate: &Gate) -> Option<&'a GateNote> {
    let here = member.walk().map(|walk| &walk.gates);
    let gates = here.or_else(|| view.last_visit_of_rollout(member)?.gates.get(&view.policy.driver))?;
    gates.get(&gate.name).filter(|note| note.passed.is_some())
}

fn before<'a>(view: &View<'_>, member: &Member<'a>, gate: &Gate) -> Option<&'a Numbers> {
    let last = member.node.last_visit.as_ref()?;
    last.gates.get(&view.policy.driver)?.get(&gate.name)?.before.as_ref()
}

fn is_in_service(member: &Member<'_>) -> bool {
    let done = member.state() == State::UpgradeDone && member.sync == Freshness::InSync;
    done && !member.unproven && member.node.ready
}

/// What gates at the end of a stage are about: the first word of it.
const END: &str = "end";

/// The same with these drivers, of which the youngest tells when others have come: then another Job is made.
fn at_end_with(nodes: &[&Member<'_>]) -> String {
    let created = nodes.iter().filter_map(|member| Some(member.pod?.created.as_second()));
    format!("{END} {}", created.max().unwrap_or_default())
}

/// What gates that are repeated in a bake are about. A stage may bake again, with other drivers: what was said in the bake
/// before says nothing of these. The round comes behind it.
fn in_bake(since: Timestamp) -> String {
    format!("bake {}", since.as_second())
}

fn run(view: &View<'_>, gate: &Gate, stage: &str, nodes: Vec<NodeName>, subject: &str) -> GateRun {
    GateRun {
        gate: gate.name.clone(),
        rollout: view.rollout.clone().unwrap_or_default(),
        stage: Some(stage.to_owned()),
        nodes,
        sample: Sample::After,
        attempt: 1,
        // A rollout's name may be used again, for another version.
        subject: format!("{subject} {}", target(view)),
    }
}

fn target(view: &View<'_>) -> String {
    let rollout = view.rollout.as_ref().and_then(|rollout| view.snapshot.rollouts.get(rollout));
    let target = rollout.into_iter().flat_map(|rollout| rollout.spec.target.values());
    target.map(String::as_str).collect::<Vec<_>>().join("+")
}

fn round_of(run: &GateRun) -> Option<i64> {
    run.subject.split(' ').nth(2)?.parse().ok()
}

/// The Jobs of a gate for one purpose in a stage of this rollout.
fn asked_before<'a>(
    view: &View<'a>,
    gate: &'a Gate,
    stage: &'a str,
    about: &'a str,
) -> impl Iterator<Item = &'a JobFacts> {
    let (rollout, target) = (view.rollout.clone().unwrap_or_default(), target(view));
    view.snapshot.gate_jobs.values().filter(move |job| {
        let run = &job.run;
        let is_about = run.subject.strip_prefix(about).is_some_and(|rest| rest.starts_with(' '));
        run.gate == gate.name
            && run.rollout == rollout
            && run.stage.as_deref() == Some(stage)
            && is_about
            && run.subject.split(' ').next_back() == Some(target.as_str())
    })
}

/// What is known of a gate in a stage.
fn entry<'a>(status: &'a mut StageStatus, gate: &GateName, when: GateWhen) -> &'a mut GateStatus {
    let is_it = |known: &GateStatus| known.is_of(gate.as_str(), when);
    let place = status.gates.iter().position(is_it).unwrap_or_else(|| {
        status.gates.push(GateStatus::new(gate.as_str(), when));
        status.gates.len() - 1
    });
    &mut status.gates[place]
}
