//! One pool: whether it may move at all, which revision its nodes should run, and who of them may start.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::SignedDuration;

use super::ledger::{Candidate, Ledger};
use super::members::{Early, Freshness, Member, Standing, Start, members};
use super::removal::BudgetBook;
use super::rollback::{self, Wanted};
use super::stages::{self, Stages};
use super::start::{Hopeless, may_start, other_driver};
use super::walk::{self, Decision};
use super::waves::{Job, Ties};
use super::{Plan, PoolPlan, PoolStatus, Verdict};
use super::{clients, health, left_alone, matrix, reboot, steady};
use crate::action::Action;
use crate::api::{Mode, ROLLOUT_FAILURES_MAX, RolloutStatus, StagePromotion};
use crate::contract::{RELEASED_ANNOTATION, State};
use crate::gate::is_gate_pod;
use crate::matrix::Unlisted;
use crate::names::{DriverName, NodeName, RevisionHash, Uid};
use crate::policy::{Policy, Pool, Source};
use crate::reason::{Foreign, Reason};
use crate::snapshot::{DaemonSet, Node, Pod, Rollout, Setback, SetbackKind, Snapshot, TemplateRevision};
use crate::visit::LastVisit;
use crate::windows::{Opening, expected};

/// Nodes that more than one policy of the same driver claims, with the policies' names.
type Claims<'a> = BTreeMap<(&'a DriverName, &'a NodeName), Vec<String>>;

/// One pool in one pass: what the steps of the walk look things up in.
pub(super) struct View<'a> {
    pub(super) snapshot: &'a Snapshot,
    pub(super) pool: &'a Pool,
    pub(super) policy: &'a Policy,
    /// The newest revision of each DaemonSet; `None` while its controller lags behind its spec.
    pub(super) targets: BTreeMap<&'a Uid, Option<&'a RevisionHash>>,
    /// The rollout that visits belong to.
    pub(super) rollout: Option<String>,
    /// The policies of other drivers, which may be at work on the same nodes.
    pub(super) rivals: Vec<&'a Policy>,
    /// The other policies of the same driver.
    siblings: Vec<&'a Policy>,
    /// The rollout, if somebody has aborted it.
    pub(super) aborted: Option<String>,
    /// Why this version does not start, if it went wrong before.
    pub(super) condemned: Option<Reason>,
    /// DaemonSets whose version the matrix does not list, where the policy enforces it. A way back is never refused.
    pub(super) unlisted: BTreeMap<&'a Uid, Arc<Unlisted>>,
    /// Nodes go back to the version before: all that have to, and not by stages.
    pub(super) goes_back: bool,
    /// The rollout that they come back from, if it is still known.
    pub(super) way_back_of: Option<&'a Rollout>,
    /// Budgets that will not let a pod go, whatever happens.
    pub(super) hopeless: Hopeless<'a>,
    /// DaemonSets that third parties have put under the driver's switch.
    pub(super) third_parties: BTreeSet<&'a Uid>,
    /// Some clients are not known by their kind alone.
    pub(super) knows_others: bool,
    /// Whether a window is open …
    pub(super) opening: Opening,
    /// … for a visit that takes as long as they are expected to take here.
    pub(super) needs: SignedDuration,
}

impl<'a> View<'a> {
    /// A pool as it is seen in a pass over `pools`, and its DaemonSets.
    pub(super) fn of(
        snapshot: &'a Snapshot,
        pool: &'a Pool,
        policy: &'a Policy,
        pools: &'a [Pool],
    ) -> (Self, Vec<&'a DaemonSet>) {
        let daemon_sets = daemon_sets(snapshot, policy);
        let targets = targets(snapshot, &daemon_sets);
        let target = target_map(&targets, &daemon_sets);
        let wanted = Wanted::of(&target, &daemon_sets);
        let rollout = super::rollout::current(snapshot, pool, &target);
        let begun = rollout.as_ref().and_then(|name| snapshot.rollouts.get(name));
        let goes_back = match begun {
            Some(begun) => begun.spec.rollback_of.is_some(),
            None => rollback::taken_back(snapshot, pool, &wanted).is_some(),
        };
        let others = pools.iter().filter(|other| other.name != pool.name);
        let others = others.filter_map(|other| other.policy.as_ref().ok());
        let (siblings, rivals) = others.partition(|other| other.driver == pool.driver);
        let is_aborted = |name: &String| snapshot.rollouts.get(name).is_some_and(|r| r.spec.abort);
        let third_parties = clients::third_parties(snapshot);
        let unlisted = matrix::unlisted(snapshot, policy, &daemon_sets);
        let mut view = Self {
            snapshot,
            pool,
            policy,
            targets,
            aborted: rollout.clone().filter(is_aborted),
            condemned: rollback::refusal(snapshot, pool, &wanted),
            unlisted: if goes_back { BTreeMap::new() } else { unlisted },
            goes_back,
            way_back_of: rollback::way_back_of(snapshot, pool, begun, &wanted)
                .and_then(|bad| snapshot.rollouts.get(&bad)),
            rollout,
            rivals,
            siblings,
            hopeless: Hopeless::of(&snapshot.budgets),
            knows_others: !third_parties.is_empty() || !policy.clients.extra.is_empty(),
            third_parties,
            opening: Opening::Always,
            needs: SignedDuration::ZERO,
        };
        view.look_at_windows();
        (view, daemon_sets)
    }

    fn look_at_windows(&mut self) {
        let Policy { windows, .. } = self.policy;
        if windows.is_always() {
            return;
        }
        let nodes = self.snapshot.nodes.values().filter(|node| self.belongs(node));
        self.needs = expected(nodes.filter_map(|node| node.last_visit.as_ref()?.took()));
        self.opening = windows.at(self.snapshot.now, self.needs);
    }

    /// Nothing new starts, and whoever still has its old driver is given back.
    pub(super) fn is_called_off(&self) -> bool {
        self.aborted.is_some() || self.condemned.is_some()
    }

    /// Work that leaves a node should find its way to one that is done: nodes are on their way, and more will follow.
    pub(super) fn steers_work(&self) -> bool {
        self.policy.rollout.prefer_upgraded && !self.is_called_off()
    }

    /// A window is open, for a visit or for the rest of those `begun` in it.
    pub(super) fn is_at_work(&self, begun: impl Fn() -> bool) -> bool {
        match self.opening {
            Opening::Always | Opening::Open { .. } => true,
            Opening::TooShort { .. } => begun(),
            Opening::Closed { .. } => false,
        }
    }

    /// Why the matrix keeps a node from starting. One without any driver is brought the wanted one.
    pub(super) fn unlisted(&self, member: &Member<'_>) -> Option<&Arc<Unlisted>> {
        let daemon_set = member.daemon_set.filter(|_| !member.needs_driver())?;
        self.unlisted.get(&daemon_set.uid)
    }

    /// What was said of the rollout that visits belong to.
    pub(super) fn said(&self) -> Option<&'a RolloutStatus> {
        self.snapshot.rollouts.get(self.rollout.as_ref()?)?.status.as_ref()
    }

    /// Stages of it that a person has let pass.
    pub(super) fn promotions(&self) -> &'a [StagePromotion] {
        let rollout = self.rollout.as_ref().and_then(|rollout| self.snapshot.rollouts.get(rollout));
        rollout.map(|rollout| rollout.spec.promotions.as_slice()).unwrap_or_default()
    }

    /// Whether a pod keeps the device busy. A gate's does too, but is no work: it is not asked to leave, see
    /// [`super::gates::at_work`].
    pub(super) fn uses_device(&self, pod: &Pod) -> bool {
        super::uses_device(&self.policy.devices, pod, &self.snapshot.claims) && !is_gate_pod(&pod.labels)
    }

    /// The pods on a node that keep the device busy.
    pub(super) fn users<'v>(&'v self, member: &Member<'a>) -> impl Iterator<Item = &'a Pod> + use<'a, 'v> {
        member.pods().filter(|pod| self.uses_device(pod))
    }

    /// What a visit of the rollout under way has left on a node.
    pub(super) fn last_visit_of_rollout<'m>(&self, member: &Member<'m>) -> Option<&'m LastVisit> {
        let last = member.node.last_visit.as_ref();
        last.filter(|last| last.rollout_of(&self.policy.driver) == self.rollout.as_deref())
    }

    /// The rollout that visits belong to. Those that only prove a node begin none: a name that is not taken would be another's later.
    pub(super) fn rollout_of_visits(&self, early: bool) -> Option<String> {
        self.rollout.clone().filter(|name| !early || self.snapshot.rollouts.contains_key(name))
    }

    /// A node on a visit of this pool stays in it to the end, even if its labels have changed, unless another takes it.
    pub(super) fn belongs(&self, node: &Node) -> bool {
        let visited = || {
            let visit = node.visit.as_ref().and_then(|visit| visit.as_ref().ok());
            let ours = visit.filter(|visit| visit.drivers.contains_key(&self.policy.driver));
            let of_this = |rollout: &str| super::rollout::number(self.pool, rollout).is_some();
            // Without a rollout there is nothing but the driver to tell whose it is.
            ours.is_some_and(|visit| visit.rollout.as_deref().map_or(self.siblings.is_empty(), of_this))
        };
        let taken = || self.siblings.iter().any(|sibling| sibling.selects(node.labels()));
        self.policy.selects(node.labels()) || (visited() && !taken())
    }
}

/// What the pools of one pass share.
pub(super) struct Pass<'a> {
    pools: &'a [Pool],
    claims: Claims<'a>,
    budgets: BudgetBook<'a>,
    /// Nodes that a pool writes in this pass: the next one waits for the one after.
    written: BTreeSet<&'a NodeName>,
}

impl<'a> Pass<'a> {
    pub(super) fn begin(snapshot: &'a Snapshot, pools: &'a [Pool]) -> Self {
        let (claims, budgets) = (claims(snapshot, pools), BudgetBook::open(snapshot));
        Self { pools, claims, budgets, written: BTreeSet::new() }
    }

    /// A pool before this one writes the node.
    fn is_taken(&self, node: &NodeName) -> bool {
        self.written.contains(node)
    }

    /// At most one write per node, whoever makes it.
    fn one_write(&mut self, node: &'a NodeName, decision: &mut Decision) {
        let writes = |action: &Action| matches!(action, Action::PatchNode(_) | Action::ReadNode(_));
        if self.pools.len() == 1 || !decision.actions.iter().any(writes) || self.written.insert(node) {
            return;
        }
        decision.actions.clear();
        if matches!(decision.reason, Reason::Moving { .. }) {
            decision.reason = Reason::Writing;
        }
    }
}

/// Plans one pool: verdicts for its nodes, actions into `plan`.
pub(super) fn plan_pool<'a>(
    snapshot: &'a Snapshot,
    pool: &'a Pool,
    pass: &mut Pass<'a>,
    plan: &mut Plan,
) -> PoolPlan {
    let empty = |status| PoolPlan {
        name: pool.name.clone(),
        source: pool.source.clone(),
        driver: pool.driver.clone(),
        status,
        ledger: Ledger::default(),
        nodes: BTreeMap::new(),
        target: BTreeMap::new(),
        version: None,
        stages: Vec::new(),
        gates: Vec::new(),
        early: Vec::new(),
        events: Vec::new(),
        relapses: BTreeMap::new(),
        goes_on: false,
        matrix: None,
    };
    let policy = match &pool.policy {
        Ok(policy) => policy,
        Err(problem) => return empty(PoolStatus::Frozen(format!("{}: {problem}", pool.source))),
    };
    let (view, daemon_sets) = View::of(snapshot, pool, policy, pass.pools);
    let status = status(&view, &daemon_sets, plan);
    let Muster { members, stages, ledger, ties } = muster(&view, &daemon_sets, &pass.claims, &status);

    let mut result = empty(status);
    let mut verdicts = Vec::with_capacity(members.len());
    plan.actions.reserve(ledger.granted.len() + ledger.moving);
    let mut refreshes = steady::Allowance::new();
    // Where nodes go together, all is decided before anything is settled.
    let mut together = Vec::new();
    for member in &members {
        let conflict = pass.claims.get(&(&pool.driver, member.name));
        let mut decision = walk::decide(&view, member, &ledger, &result.status, conflict, &mut pass.budgets);
        refreshes.spend(&view, &mut decision);
        if policy.topology.atom.is_some() {
            together.push(decision);
        } else {
            verdicts.push(settle(&view, member, decision, pass, plan, &mut result.relapses));
        }
    }
    ties.keep_whole(&members, &mut together, |node| pass.is_taken(node));
    for (member, decision) in members.iter().zip(together) {
        verdicts.push(settle(&view, member, decision, pass, plan, &mut result.relapses));
    }
    let waits = match view.opening {
        Opening::Open { until } => Some((until, members.iter().any(|m| m.state() == State::UpgradeRequired))),
        // Whoever is unwelcome until then is welcome again.
        Opening::TooShort { until, .. } => {
            Some((until, members.iter().any(|m| m.node.has_taint(&policy.keys.pending))))
        }
        Opening::Always | Opening::Closed { .. } => None,
    };
    waits.filter(|(_, anybody)| *anybody).into_iter().for_each(|(until, _)| plan.wake(until));
    (result.stages, result.gates) = match result.status {
        PoolStatus::Active => {
            let progress = stages.progress(&view, &members);
            progress.asked.wake_at.into_iter().for_each(|at| plan.wake(at));
            plan.actions.extend(progress.asked.actions);
            result.events = progress.asked.events;
            (progress.stages, stages.said_on_all(&view, &members))
        }
        // What was said stays said, and nothing opens.
        _ => view.said().map(|said| (said.stages.clone(), said.gates.clone())).unwrap_or_default(),
    };
    result.early = early(&view, &members);
    result.goes_on = left_alone::goes_on(&view, &members);
    result.matrix = matrix::report(&view, &daemon_sets, &members);
    result.nodes = verdicts.into_iter().collect();
    result.ledger = ledger;
    result.version = daemon_sets.iter().find_map(|ds| ds.driver_version.clone());
    result.target = target_map(&view.targets, &daemon_sets);
    result
}

/// Nodes that came up with the new driver by themselves and were taken out for it, as far as they show it.
fn early(view: &View<'_>, members: &[Member<'_>]) -> Vec<String> {
    let here = |member: &&Member<'_>| matches!(member.standing, Standing::Visit(visit, _) if visit.early);
    let before = |member: &&Member<'_>| view.last_visit_of_rollout(member).is_some_and(|last| last.early);
    let early = members.iter().filter(|member| here(member) || before(member));
    early.take(ROLLOUT_FAILURES_MAX).map(|member| member.name.to_string()).collect()
}

/// Puts what was decided for a node into the plan.
fn settle<'a>(
    view: &View<'a>,
    member: &Member<'a>,
    mut decision: Decision,
    pass: &mut Pass<'a>,
    plan: &mut Plan,
    relapses: &mut BTreeMap<NodeName, (String, String)>,
) -> (NodeName, Verdict) {
    pass.one_write(member.name, &mut decision);
    let Decision { reason, actions, wake_at } = decision;
    plan.actions.extend(actions);
    // What is due already does not become due again: whatever keeps it waiting will wake us.
    if let Some(at) = wake_at.filter(|at| *at > view.snapshot.now) {
        plan.wake(at);
    }
    if let Some(at) = health::hold_wakes(view, member) {
        plan.wake(at);
    }
    if let Some(relapse) = health::relapse(view, member) {
        relapses.insert(member.name.clone(), relapse);
    }
    let verdict = Verdict {
        state: member.state(),
        reason,
        since: member.walk().map(|walk| walk.since),
        in_sync: member.sync == Freshness::InSync,
    };
    (member.name.clone(), verdict)
}

/// Whether the pool may move.
fn status(view: &View<'_>, daemon_sets: &[&DaemonSet], plan: &mut Plan) -> PoolStatus {
    let View { snapshot, pool, policy, .. } = view;
    if let Some((_, until)) = &snapshot.gpu_operator.lease
        && *until > snapshot.now
    {
        plan.wake(*until);
    }
    if let Some(who) = snapshot.gpu_operator.live(snapshot.now) {
        return PoolStatus::Frozen(format!(
            "a GPU Operator is live ({who}) and its upgrade controller may act on these nodes; pitcrew does nothing until it is gone"
        ));
    }
    if matches!(policy.mode, Mode::Guest | Mode::TakeOver) {
        return PoolStatus::Frozen(format!(
            "{}: mode {:?} needs a live GPU Operator, and there is none; use Auto or Standalone (spec.mode)",
            pool.source, policy.mode
        ));
    }
    if daemon_sets.is_empty() {
        return PoolStatus::Frozen(format!(
            "{}: no DaemonSet in namespace {} matches {}; nothing to upgrade",
            pool.source, policy.namespace, policy.daemon_sets_text
        ));
    }
    if let Some(rolling) = daemon_sets.iter().find(|ds| !ds.on_delete) {
        return PoolStatus::Frozen(format!(
            "daemonset/{} has updateStrategy RollingUpdate, so Kubernetes replaces driver pods under running work; set it to OnDelete",
            rolling.name
        ));
    }
    if policy.auto_upgrade { PoolStatus::Active } else { PoolStatus::Paused }
}

pub(super) fn daemon_sets<'a>(snapshot: &'a Snapshot, policy: &Policy) -> Vec<&'a DaemonSet> {
    let rendered_by = policy.rendered_by.as_ref().map(|name| Source::NvidiaDriver(name.clone()));
    let mut found: Vec<&DaemonSet> = snapshot
        .daemon_sets
        .values()
        .filter(|ds| policy.is_driver(&ds.name.namespace, &ds.labels))
        .filter(|ds| rendered_by.is_none() || ds.rendered_by == rendered_by)
        .collect();
    found.sort_by_key(|ds| &ds.name);
    found
}

/// The newest revision of each DaemonSet, if its controller has caught up with its spec.
fn targets<'a>(
    snapshot: &'a Snapshot,
    daemon_sets: &[&'a DaemonSet],
) -> BTreeMap<&'a Uid, Option<&'a RevisionHash>> {
    let mut newest: BTreeMap<&Uid, &TemplateRevision> = BTreeMap::new();
    for revision in snapshot.revisions.values() {
        let entry = newest.entry(&revision.owner).or_insert(revision);
        if revision.number > entry.number {
            *entry = revision;
        }
    }
    let known = |ds: &DaemonSet, revision: &TemplateRevision| {
        ds.observed_generation == ds.generation && revision.may_be_of(ds)
    };
    let target =
        |ds: &DaemonSet| newest.get(&ds.uid).filter(|newest| known(ds, newest)).map(|newest| &newest.hash);
    daemon_sets.iter().map(|ds| (&ds.uid, target(ds))).collect()
}

/// The target of a rollout; empty until the revisions of all DaemonSets are known.
fn target_map(
    targets: &BTreeMap<&Uid, Option<&RevisionHash>>,
    daemon_sets: &[&DaemonSet],
) -> BTreeMap<String, RevisionHash> {
    let entry =
        |ds: &&DaemonSet| Some((ds.name.name.to_string(), targets.get(&ds.uid).copied().flatten()?.clone()));
    daemon_sets.iter().map(entry).collect::<Option<_>>().unwrap_or_default()
}

/// Nodes that two policies of one driver claim. Nothing is done with them.
fn claims<'a>(snapshot: &'a Snapshot, pools: &'a [Pool]) -> Claims<'a> {
    let mut claims = Claims::new();
    let mut drivers: BTreeMap<&DriverName, Vec<(&Pool, &Policy)>> = BTreeMap::new();
    for pool in pools {
        if let Ok(policy) = &pool.policy {
            drivers.entry(&pool.driver).or_default().push((pool, policy));
        }
    }
    // One policy a driver is the rule; then there is nothing to compare.
    for (driver, pools) in drivers.into_iter().filter(|(_, pools)| pools.len() > 1) {
        for (name, node) in &snapshot.nodes {
            let claiming = pools.iter().filter(|(_, policy)| policy.selects(node.labels()));
            let names: Vec<String> = claiming.map(|(pool, _)| pool.source.to_string()).collect();
            if names.len() > 1 {
                claims.insert((driver, name), names);
            }
        }
    }
    claims
}

/// The pool's nodes, and who of them may start.
struct Muster<'a> {
    members: Vec<Member<'a>>,
    stages: Stages<'a>,
    ledger: Ledger,
    ties: Ties<'a>,
}

/// Finds the pool's nodes and settles who may start. A fleet does not fit into the processor's caches, so all facts
/// about a node are looked at together, once; what is decided later finds them in the [`Member`].
fn muster<'a>(
    view: &View<'a>,
    daemon_sets: &[&'a DaemonSet],
    claims: &Claims<'_>,
    status: &PoolStatus,
) -> Muster<'a> {
    let policy = view.policy;
    let (mut ledger, mut ties) = (Ledger::open(policy), Ties::new(policy));
    let (mut mustered, mut candidates) = (Vec::with_capacity(view.snapshot.nodes.len()), Vec::new());
    let (mut unmarked, proves) = (0, stages::proves_nodes(view));
    for (index, mut member) in members(view, daemon_sets).enumerate() {
        let pending = member.moving_to(policy);
        let mended = *status == PoolStatus::Active && walk::is_mended(policy, &member);
        let unsure = member.may_have_started();
        let walking = member.state().in_flight() || pending.is_some_and(State::in_flight);
        let moving = walking || mended || unsure;
        let out = member.node.is_out() || moving || walk::has_lost_its_cordon(&member);
        // Of those out, the ones on a visit are ours; all others were taken out by somebody else.
        let foreign = (out && !moving && member.walk().is_none()).then(|| Foreign {
            node: member.name.clone(),
            by_driver_manager: member.node.is_cordoned_by_driver_manager(),
        });
        ledger.count(moving, out, foreign);
        ties.count(policy, &member, moving, out);
        ledger.failed += usize::from(member.state() == State::UpgradeFailed);
        ledger.blameless += usize::from(member.failed_blameless());
        let claimed = claims.get(&(&view.pool.driver, member.name));
        let refuses = member.refuses(view.snapshot.now);
        let free = claimed.is_none() && pending.is_none() && !refuses && !unsure;
        let ready = *status == PoolStatus::Active && free;
        unmarked += usize::from(!refuses && claimed.is_none() && member.is_about_to_be_marked());
        let mut starts = false;
        member.unproven = proves && stages::is_unproven(view, &member);
        if ready && member.state() == State::UpgradeRequired && !member.unproven {
            match may_start(view, &member) {
                Ok(()) => {
                    candidates.push(candidate(view, index, &member));
                    starts = true;
                }
                Err(reason) => member.start = Start::No(Box::new(reason)),
            }
        }
        match member.atom {
            Some(atom) if walking => {
                ties.begin(atom, member.walk().is_some_and(|walk| walk.state.in_flight()));
            }
            Some(atom) if !starts && member.is_due() && !member.unproven => {
                ties.hold(atom, member.name, why_not(&member, claimed));
            }
            _ => {}
        }
        mustered.push(member);
    }
    // Whoever fails on the way back keeps nobody on a version that has to go.
    let may_fail = || policy.limits.failure_threshold.of(ledger.total);
    ledger.max_failed = if view.goes_back { ledger.total } else { may_fail() };
    let stages = Stages::of(view, &mustered);
    let mut rooms = stages.rooms();
    for (index, member) in mustered.iter_mut().enumerate().filter(|_| *status == PoolStatus::Active) {
        member.stage_moves = stages.index(index).is_none_or(|stage| stages.moves(stage));
        member.atom_moves = ties.is_cordoned(member.atom);
        let settled = member.pending.is_none() && !member.refuses(view.snapshot.now);
        let claimed = claims.contains_key(&(&view.pool.driver, member.name));
        let early = stages.early(view, index, member);
        let early = early.or_else(|| reboot::came_back(view, member).then_some(Early::DriverManager));
        if let Some(early) = early.filter(|_| settled && !claimed) {
            let refusal = health::refuses(view, member)
                .or_else(|| other_driver(view, member).map(|driver| Reason::OtherDriver { driver }))
                .or_else(|| (!member.node.ready).then_some(Reason::NodeNotReady { until: None }))
                .or_else(|| reboot::refuses(member));
            member.start = refusal.map_or_else(
                || ledger.take_in(member.node.is_out(), early),
                |reason| Start::No(Box::new(reason)),
            );
        }
        // What it takes up is not there for those that start in the same pass.
        if matches!(member.start, Start::Early(_)) {
            let new = !member.node.is_out();
            if let Some(room) = stages.index(index).and_then(|stage| rooms.get_mut(stage)) {
                room.take(1, usize::from(new));
            }
            if new {
                ties.take_in(policy, member);
            }
        }
    }
    candidates.retain(|candidate| !matches!(mustered[candidate.index].start, Start::Early(_)));
    candidates.retain_mut(|candidate| {
        candidate.stage = stages.index(candidate.index);
        let refusal = candidate.stage.and_then(|stage| stages.refuses(stage));
        let Some(reason) = refusal.filter(|_| !candidate.whatever_stage) else { return true };
        let member = &mut mustered[candidate.index];
        if let Some(atom) = member.atom {
            ties.hold(atom, member.name, reason.clone());
        }
        member.start = Start::No(Box::new(reason));
        false
    });
    // The controller's own node goes last, also while others are only about to be told that they are due.
    for (index, start) in ledger.grant(candidates, &mut rooms, &mut ties, unmarked) {
        mustered[index].start = start;
    }
    Muster { members: mustered, stages, ledger, ties }
}

/// Why a node that is due does not start.
fn why_not(member: &Member<'_>, claimed_by: Option<&Vec<String>>) -> Reason {
    if let Start::No(reason) = &member.start {
        return Reason::clone(reason);
    }
    if let Standing::Held(reason, _) = &member.standing {
        return Reason::clone(reason);
    }
    match (claimed_by, member.setback) {
        (Some(pools), _) => Reason::TwoPolicies { pools: pools.clone() },
        (None, Some(Setback { kind: SetbackKind::Error(what), retry_at, .. })) => {
            Reason::ApiError { what: what.clone(), retry_at: *retry_at }
        }
        _ if member.pending.is_some() => Reason::Writing,
        _ if member.may_have_started() => Reason::Conflict,
        _ => Reason::Moving { to: State::UpgradeRequired },
    }
}

fn candidate<'a>(view: &View<'a>, index: usize, member: &Member<'a>) -> Candidate<'a> {
    let topology = &view.policy.topology;
    let (mut pods, mut devices, mut jobs) = (0, 0_u32, Vec::new());
    // What only restarts in place, or is only proven, interrupts no job.
    let interrupts = !member.restarts_in_place() && !member.has_its_new_driver();
    for pod in view.users(member) {
        (pods, devices) = (pods + 1, devices.saturating_add(pod.devices()));
        jobs.extend(Job::of(&topology.gang, pod).filter(|job| interrupts && !jobs.contains(job)));
    }
    Candidate {
        stage: None,
        // Without any driver it is of no use; and a person who tries a node again has a reason.
        whatever_stage: member.needs_driver() || member.walk().is_some_and(|walk| walk.by_hand),
        index,
        name: member.name,
        // One that failed before may well have a driver that is Ready, and no good.
        healthy: member.driver_ready && !member.node.is_out_again(&view.policy.driver),
        already_out: member.node.is_out(),
        pods,
        devices,
        own: view.snapshot.own_node.as_ref() == Some(member.name),
        released: member.node.annotations.contains_key(RELEASED_ANNOTATION),
        whatever_failed: member.needs_driver() || member.walk().is_some_and(|walk| walk.attempts > 0),
        atom: member.atom,
        jobs,
        spread: topology.group_of(member.node.labels()),
    }
}
