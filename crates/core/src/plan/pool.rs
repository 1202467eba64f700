//! One pool: which nodes belong to it, which revision they should run, and whether it may move at all.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::iter::Peekable;

use jiff::Timestamp;

use super::ledger::{Candidate, Ledger};
use super::removal::BudgetBook;
use super::start::{Hopeless, may_start};
use super::walk::{self, Decision};
use super::{Plan, PoolPlan, PoolStatus, Verdict};
use crate::action::Action;
use crate::api::Mode;
use crate::contract::{RELEASED_ANNOTATION, State};
use crate::names::{DriverName, NodeName, ObjectName, RevisionHash, Uid};
use crate::policy::{Policy, Pool, Source};
use crate::reason::Reason;
use crate::snapshot::{DaemonSet, Node, Object, OwnerKind, Pending, Pod, Setback, SetbackKind, Snapshot};
use crate::visit::{Visit, Walk};

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
    /// Budgets that will not let a pod go, whatever happens.
    pub(super) hopeless: Hopeless<'a>,
}

impl<'a> View<'a> {
    /// Whether a pod keeps the device busy.
    pub(super) fn uses_device(&self, pod: &Pod) -> bool {
        super::uses_device(&self.policy.devices, pod, &self.snapshot.claims)
    }

    /// The pods on a node that keep the device busy.
    pub(super) fn users<'v>(&'v self, member: &Member<'a>) -> impl Iterator<Item = &'a Pod> + use<'a, 'v> {
        member.pods().filter(|pod| self.uses_device(pod))
    }

    /// A node on a visit of this pool stays in it to the end, even if its labels have changed, unless another takes it.
    fn belongs(&self, node: &Node) -> bool {
        let visited = || {
            let visit = node.visit.as_ref().and_then(|visit| visit.as_ref().ok());
            let ours = visit.filter(|visit| visit.drivers.contains_key(&self.policy.driver));
            let rollout = ours.and_then(|visit| visit.rollout.as_deref());
            rollout.is_some_and(|rollout| super::rollout::number(self.pool, rollout).is_some())
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

/// One node of a pool.
#[expect(clippy::struct_excessive_bools, reason = "facts that have nothing to do with each other")]
pub(super) struct Member<'a> {
    pub(super) name: &'a NodeName,
    pub(super) node: &'a Node,
    /// The DaemonSet that its driver pod belongs to, or should belong to.
    pub(super) daemon_set: Option<&'a DaemonSet>,
    /// The driver pod.
    pub(super) pod: Option<&'a Pod>,
    /// The revision that the driver pod should be of, if it is known.
    pub(super) target: Option<&'a RevisionHash>,
    pub(super) sync: Freshness,
    pub(super) standing: Standing<'a>,
    /// The driver pod runs and says that it is ready.
    pub(super) driver_ready: bool,
    /// A person asks for an upgrade although the driver is up to date.
    pub(super) requested: bool,
    /// The driver pod waits for a safe moment to load.
    pub(super) waits_for_load: bool,
    /// Somebody asks for a walk although the driver is up to date: a person, or a driver that waits for a safe load.
    pub(super) asked_for: bool,
    /// The node says that an upgrade controller looks after it.
    pub(super) announced: bool,
    /// What was sent for the node and has not been answered.
    pub(super) pending: Option<&'a Pending>,
    /// What went wrong with the last write to it.
    pub(super) setback: Option<&'a Setback>,
    /// What the ledger says about a start.
    pub(super) start: Start,
    pods: Option<&'a BTreeMap<ObjectName, Pod>>,
}

/// What the ledger says about a start.
pub(super) enum Start {
    /// The node is not at the point where it would start.
    NotDue,
    /// It could not start if it had a slot.
    No(Box<Reason>),
    Granted,
    /// So many nodes are before it.
    Waits {
        ahead: usize,
    },
}

/// Where a node stands, and who says so.
pub(super) enum Standing<'a> {
    /// It is on a visit for this driver: the record is the truth.
    Visit(&'a Visit, &'a Walk),
    /// It is not: the label is the truth.
    Label(State),
    /// Nobody can tell, or only the label could.
    Held(Box<Reason>, State),
}

/// How a driver pod compares with what it should be.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Freshness {
    /// Of the newest revision.
    InSync,
    /// Of another one.
    Outdated,
    /// Without an owner that would replace it.
    Orphaned,
    /// Not known yet: no pod, or the DaemonSet's controller lags behind.
    Unknown,
}

impl<'a> Member<'a> {
    pub(super) fn state(&self) -> State {
        match &self.standing {
            Standing::Visit(_, walk) => walk.state,
            Standing::Label(state) | Standing::Held(_, state) => *state,
        }
    }

    pub(super) fn walk(&self) -> Option<&'a Walk> {
        match self.standing {
            Standing::Visit(_, walk) => Some(walk),
            _ => None,
        }
    }

    pub(super) fn pods(&self) -> impl Iterator<Item = &'a Pod> + use<'a> {
        self.pods.into_iter().flat_map(BTreeMap::values)
    }

    /// The new template differs only in what does not concern the installed driver: the pod restarts in place, and work
    /// on the device goes on.
    pub(super) fn restarts_in_place(&self) -> bool {
        let digests = self
            .pod
            .and_then(|pod| pod.digest.as_deref())
            .zip(self.daemon_set.and_then(|ds| ds.digest.as_deref()));
        self.sync == Freshness::Outdated
            && !self.asked_for
            && self.walk().is_none_or(|walk| walk.replace.is_none())
            && digests.is_some_and(|(pod, template)| !pod.is_empty() && pod == template)
    }

    /// It could take work again as it is: nothing was done to its driver, in this attempt or an earlier one.
    pub(super) fn has_its_old_driver(&self) -> bool {
        self.driver_ready && self.walk().is_none_or(|walk| walk.attempts == 0)
    }

    /// Where a write under way takes it.
    fn moving_to(&self, policy: &Policy) -> Option<State> {
        let (driver, state) = self.pending?.moving_to.as_ref()?;
        (*driver == policy.driver).then_some(*state)
    }

    /// A node that the API lets nobody write must not keep a slot from the others. One whose write has an unknown
    /// outcome keeps its slot until that is known: it may have started.
    fn refuses(&self, now: Timestamp) -> bool {
        self.setback.is_some_and(|s| matches!(s.kind, SetbackKind::Error(_)) && s.retry_at > now)
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
    };
    let policy = match &pool.policy {
        Ok(policy) => policy,
        Err(problem) => return empty(PoolStatus::Frozen(format!("{}: {problem}", pool.source))),
    };
    let daemon_sets = daemon_sets(snapshot, policy);
    let targets = targets(snapshot, &daemon_sets);
    let target = target_map(&targets, &daemon_sets);
    let rollout = super::rollout::current(snapshot, pool, &target);
    let others = pass.pools.iter().filter(|other| other.name != pool.name);
    let others = others.filter_map(|other| other.policy.as_ref().ok());
    let (siblings, rivals) = others.partition(|other| other.driver == pool.driver);
    let aborted = rollout.clone().filter(|name| snapshot.rollouts.get(name).is_some_and(|r| r.spec.abort));
    let hopeless = Hopeless::of(&snapshot.budgets);
    let view = View { snapshot, pool, policy, targets, rollout, rivals, siblings, aborted, hopeless };
    let status = status(&view, &daemon_sets, plan);
    let (members, ledger) = muster(&view, &daemon_sets, &pass.claims, &status);

    let mut result = empty(status);
    let mut verdicts = Vec::with_capacity(members.len());
    plan.actions.reserve(ledger.granted.len() + ledger.moving);
    for member in &members {
        let conflict = pass.claims.get(&(&pool.driver, member.name));
        let mut decision = walk::decide(&view, member, &ledger, &result.status, conflict, &mut pass.budgets);
        pass.one_write(member.name, &mut decision);
        let Decision { reason, actions, wake_at } = decision;
        plan.actions.extend(actions);
        // What is due already does not become due again: whatever keeps it waiting will wake us.
        if let Some(at) = wake_at.filter(|at| *at > snapshot.now) {
            plan.wake(at);
        }
        let verdict = Verdict {
            state: member.state(),
            reason,
            since: member.walk().map(|walk| walk.since),
            in_sync: member.sync == Freshness::InSync,
        };
        verdicts.push((member.name.clone(), verdict));
    }
    result.nodes = verdicts.into_iter().collect();
    result.ledger = ledger;
    result.version = daemon_sets.iter().find_map(|ds| ds.driver_version.clone());
    result.target = target;
    result
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

fn daemon_sets<'a>(snapshot: &'a Snapshot, policy: &Policy) -> Vec<&'a DaemonSet> {
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
    let mut newest: BTreeMap<&Uid, (i64, &RevisionHash)> = BTreeMap::new();
    for revision in snapshot.revisions.values() {
        let entry = newest.entry(&revision.owner).or_insert((revision.number, &revision.hash));
        if revision.number > entry.0 {
            *entry = (revision.number, &revision.hash);
        }
    }
    let known = |ds: &DaemonSet| ds.observed_generation == ds.generation;
    daemon_sets
        .iter()
        .map(|ds| (&ds.uid, newest.get(&ds.uid).filter(|_| known(ds)).map(|(_, hash)| *hash)))
        .collect()
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

/// An ordered map that is walked along with the nodes, so that nothing has to be searched for.
struct Beside<'a, V> {
    rest: Peekable<Box<dyn Iterator<Item = (&'a NodeName, V)> + 'a>>,
}

impl<'a, V: 'a> Beside<'a, V> {
    fn new(entries: impl Iterator<Item = (&'a NodeName, V)> + 'a) -> Self {
        let entries: Box<dyn Iterator<Item = (&'a NodeName, V)> + 'a> = Box::new(entries);
        Self { rest: entries.peekable() }
    }

    /// The entry of `name`, which comes after all names that were asked for before.
    fn at(&mut self, name: &NodeName) -> Option<V> {
        loop {
            match self.rest.peek()?.0.cmp(name) {
                Ordering::Less => drop(self.rest.next()),
                Ordering::Equal => return self.rest.next().map(|(_, value)| value),
                Ordering::Greater => return None,
            }
        }
    }
}

/// The entries that are about nodes, in their order.
fn about_nodes<V>(objects: &BTreeMap<Object, V>) -> Beside<'_, &V> {
    Beside::new(objects.iter().filter_map(|(object, value)| match object {
        Object::Node(name) => Some((name, value)),
        _ => None,
    }))
}

/// The nodes that should run this driver, or do, or are on a visit for it.
fn members<'v, 'a>(view: &'v View<'a>, daemon_sets: &'v [&'a DaemonSet]) -> impl Iterator<Item = Member<'a>> {
    let uids: BTreeSet<&Uid> = daemon_sets.iter().map(|ds| &ds.uid).collect();
    let snapshot = view.snapshot;
    let mut pods = Beside::new(snapshot.pods.iter());
    let (mut pending, mut setbacks) = (about_nodes(&snapshot.in_flight), about_nodes(&snapshot.setbacks));
    let selected = snapshot.nodes.iter().filter(|(_, node)| view.belongs(node));
    selected.filter_map(move |(name, node)| {
        let member = member(view, name, node, pods.at(name), daemon_sets, &uids)?;
        Some(Member { pending: pending.at(name), setback: setbacks.at(name), ..member })
    })
}

fn member<'a>(
    view: &View<'a>,
    name: &'a NodeName,
    node: &'a Node,
    pods: Option<&'a BTreeMap<ObjectName, Pod>>,
    daemon_sets: &[&'a DaemonSet],
    uids: &BTreeSet<&Uid>,
) -> Option<Member<'a>> {
    let policy = view.policy;
    let is_driver_pod = |pod: &&Pod| match &pod.owner {
        Some(owner) => owner.kind == OwnerKind::DaemonSet && uids.contains(&owner.uid),
        None => policy.is_driver(&pod.name.namespace, &pod.labels),
    };
    // A pod that is on its way out may overlap with its successor: the one that stays is the one to judge.
    let on_node = pods.into_iter().flat_map(BTreeMap::values);
    let pod = on_node.filter(is_driver_pod).min_by_key(|pod| pod.deleting.is_some());
    let expects = |ds: &&DaemonSet| ds.node_selector.iter().all(|(k, v)| node.labels().get(k) == Some(v));
    let owner = pod.and_then(|pod| pod.owner.as_ref()).map(|owner| &owner.uid);
    let daemon_set = daemon_sets
        .iter()
        .find(|ds| Some(&ds.uid) == owner)
        .or_else(|| daemon_sets.iter().find(|ds| expects(ds)))
        .copied();
    let standing = standing(policy, node);
    let on_visit = matches!(standing, Standing::Visit(..));
    if pod.is_none() && daemon_set.is_none() && !on_visit {
        return None;
    }
    let target = daemon_set.and_then(|ds| view.targets.get(&ds.uid).copied().flatten());
    let annotation = |key: &String| node.annotations.get(key).map(String::as_str);
    let requested = annotation(&policy.keys.requested) == Some("true");
    let waits_for_load = annotation(&policy.keys.safe_load).is_some_and(|v| !v.is_empty());
    Some(Member {
        name,
        node,
        daemon_set,
        pod,
        target,
        sync: freshness(pod, target),
        standing,
        driver_ready: pod.is_some_and(|pod| pod.ready && pod.deleting.is_none()),
        requested,
        waits_for_load,
        asked_for: requested || waits_for_load,
        announced: annotation(&policy.keys.enabled).is_some(),
        pending: None,
        setback: None,
        start: Start::NotDue,
        pods,
    })
}

fn freshness(pod: Option<&Pod>, target: Option<&RevisionHash>) -> Freshness {
    match (pod, target) {
        (Some(pod), _) if pod.owner.is_none() => Freshness::Orphaned,
        (Some(pod), Some(target)) if pod.revision.as_ref() == Some(target) => Freshness::InSync,
        (Some(_), Some(_)) => Freshness::Outdated,
        _ => Freshness::Unknown,
    }
}

fn standing<'a>(policy: &Policy, node: &'a Node) -> Standing<'a> {
    match &node.visit {
        Some(Err(unreadable)) => {
            let reason = Reason::VisitUnreadable { why: unreadable.to_string() };
            return Standing::Held(Box::new(reason), label_state(policy, node).unwrap_or_default());
        }
        Some(Ok(visit)) => {
            if let Some(walk) = visit.drivers.get(&policy.driver) {
                return Standing::Visit(visit, walk);
            }
        }
        None => {}
    }
    match label_state(policy, node) {
        Ok(state) => Standing::Label(state),
        Err(reason) => Standing::Held(Box::new(reason), State::Unknown),
    }
}

/// What the state label says.
pub(super) fn label_state(policy: &Policy, node: &Node) -> Result<State, Reason> {
    let value = node.mark(&policy.keys.state).unwrap_or_default();
    value
        .parse()
        .map_err(|_| Reason::UnknownLabel { label: policy.keys.state.clone(), value: value.to_owned() })
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

/// Finds the pool's nodes and settles who may start. A fleet does not fit into the processor's caches, so all facts
/// about a node are looked at together, once; what is decided later finds them in the [`Member`].
fn muster<'a>(
    view: &View<'a>,
    daemon_sets: &[&'a DaemonSet],
    claims: &Claims<'_>,
    status: &PoolStatus,
) -> (Vec<Member<'a>>, Ledger) {
    let policy = view.policy;
    let mut ledger = Ledger::open(policy);
    let (mut mustered, mut candidates) = (Vec::with_capacity(view.snapshot.nodes.len()), Vec::new());
    for (index, mut member) in members(view, daemon_sets).enumerate() {
        let pending = member.moving_to(policy);
        let moving = member.state().in_flight() || pending.is_some_and(State::in_flight);
        let out = member.node.is_out() || moving;
        // Of those out, the ones on a visit are ours; all others were taken out by somebody else.
        ledger.count(member.name, moving, out, out && !moving && member.walk().is_none());
        ledger.failed += usize::from(member.state() == State::UpgradeFailed);
        let claimed = claims.contains_key(&(&view.pool.driver, member.name));
        let refuses = member.refuses(view.snapshot.now);
        let ready = *status == PoolStatus::Active && !claimed && pending.is_none() && !refuses;
        if ready && member.state() == State::UpgradeRequired {
            match may_start(view, &member) {
                Ok(()) => candidates.push(candidate(view, index, &member)),
                Err(reason) => member.start = Start::No(Box::new(reason)),
            }
        }
        mustered.push(member);
    }
    ledger.max_failed = policy.limits.failure_threshold.of(ledger.total);
    for (index, start) in ledger.grant(candidates) {
        mustered[index].start = start;
    }
    (mustered, ledger)
}

fn candidate<'a>(view: &View<'a>, index: usize, member: &Member<'a>) -> Candidate<'a> {
    let users = view.users(member);
    let amounts =
        |pod: &Pod| pod.resources.iter().fold(0_u32, |sum, (_, amount)| sum.saturating_add(*amount));
    let (pods, devices) =
        users.fold((0, 0_u32), |(pods, devices), pod| (pods + 1, devices.saturating_add(amounts(pod))));
    Candidate {
        index,
        name: member.name,
        healthy: member.driver_ready,
        already_out: member.node.is_out(),
        pods,
        devices,
        own: view.snapshot.own_node.as_ref() == Some(member.name),
        released: member.node.annotations.contains_key(RELEASED_ANNOTATION),
        retried: member.walk().is_some_and(|walk| walk.attempts > 0),
    }
}
