//! The nodes of a pool: which belong to it, what is known about each, and where each stands.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::iter::Peekable;

use jiff::Timestamp;

use super::pool::View;
use super::{left_alone, rollback};
use crate::contract::State;
use crate::names::{NodeName, ObjectName, RevisionHash, Uid};
use crate::policy::Policy;
use crate::reason::{Limit, Reason};
use crate::snapshot::{DaemonSet, Node, Object, OwnerKind, Pending, Pod, Setback, SetbackKind};
use crate::version::DriverVersion;
use crate::visit::{Cause, Visit, Walk};

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
    /// The driver pod runs and says that it is ready, and nobody says that only a reboot helps.
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
    /// Its stage moves, or the pool goes as one.
    pub(super) stage_moves: bool,
    /// A way back leaves it alone, as it never had what is taken back.
    pub(super) left_alone: bool,
    /// It came to the wanted version by itself, and its gates have not seen it there: it does not count as done.
    pub(super) unproven: bool,
    /// What the ledger says about a start.
    pub(super) start: Start,
    /// The atom whose wave it belongs to.
    pub(super) atom: Option<&'a str>,
    /// Some of that atom have been cordoned: the rest follows.
    pub(super) atom_moves: bool,
    /// When the oldest container of its known clients started: most passes look no further.
    pub(super) oldest_client: Option<Timestamp>,
    pods: Option<&'a BTreeMap<ObjectName, Pod>>,
}

/// What the ledger says about a start.
pub(super) enum Start {
    /// The node is not at the point where it would start.
    NotDue,
    /// It could not start if it had a slot.
    No(Box<Reason>),
    Granted,
    /// It has, by itself: it came up with the new driver, and has to be proven.
    Early(Early),
    /// For a slot.
    Waits {
        /// So many nodes are before it.
        ahead: usize,
        /// So many start with it, itself included.
        together: usize,
        /// The limit of its stage, if that is the one that binds.
        limit: Option<Limit>,
    },
}

/// Why a node that came up with the new driver by itself is taken out.
pub(super) enum Early {
    /// Its driver manager had cordoned it, and nobody else gives it back.
    DriverManager,
    /// The stage of this name, which it belongs to, is not open.
    Stage(String),
    /// The version was taken back, and is there still.
    TakenBack,
    /// Its gates have not seen the driver.
    Gates,
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
    /// Of the newest revision; or, on the way back, of another one that brings the same driver version.
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

    /// The version of its driver, which came with an earlier template and is the wanted one all the same.
    pub(super) fn spared(&self) -> Option<DriverVersion> {
        let earlier = self.sync == Freshness::InSync && self.pod?.revision.as_ref() != self.target;
        self.daemon_set?.driver_version.clone().filter(|_| earlier)
    }

    /// It could take work again as it is.
    pub(super) fn has_its_old_driver(&self) -> bool {
        self.driver_ready && !self.needs_driver() && self.is_untouched()
    }

    /// Nothing was done to its driver, in this attempt or an earlier one.
    pub(super) fn is_untouched(&self) -> bool {
        self.walk().is_none_or(|walk| walk.attempts == 0) && self.found_its_driver()
    }

    /// Its driver pod was there before its visit began, if it is on one.
    pub(super) fn found_its_driver(&self) -> bool {
        let Standing::Visit(visit, _) = self.standing else { return true };
        self.pod.is_some_and(|pod| visit.found(pod.created))
    }

    /// Its driver is the wanted one, works, and nobody wants another pod of it: there is nothing to do but to prove it.
    pub(super) fn has_its_new_driver(&self) -> bool {
        let replaced = self.walk().and_then(|walk| walk.replace.as_ref());
        let stays = replaced.is_none() || replaced != self.pod.map(|pod| &pod.uid);
        self.sync == Freshness::InSync && self.driver_ready && !self.asked_for && stays
    }

    /// Its driver is the wanted one and waits to be loaded: without that the node has no driver at all, and leaving it
    /// out would help nobody.
    pub(super) fn needs_driver(&self) -> bool {
        self.waits_for_load && self.sync == Freshness::InSync
    }

    /// Out of date, and nobody has written that down yet.
    pub(super) fn is_about_to_be_marked(&self) -> bool {
        matches!(self.standing, Standing::Label(State::Unknown | State::UpgradeDone))
            && self.sync == Freshness::Outdated
    }

    /// It is due, or is about to be told so: a walk that failed begins again for a new version.
    pub(super) fn is_due(&self) -> bool {
        let state = self.state();
        let anew = |walk: &Walk| self.target.is_some_and(|target| *target != walk.target);
        match state {
            State::UpgradeRequired => true,
            State::Unknown | State::UpgradeDone => self.sync == Freshness::Outdated,
            State::UpgradeFailed => self.walk().is_some_and(anew),
            _ => false,
        }
    }

    /// It failed, and that says nothing about the version: somebody else is to blame, or the old driver never went.
    pub(super) fn failed_blameless(&self) -> bool {
        let failed = self.walk().filter(|walk| walk.state == State::UpgradeFailed);
        let failure = failed.and_then(|walk| walk.failure.as_ref());
        let never_came =
            |cause: &Cause| matches!(cause, Cause::DriverNotReady { .. }) && self.sync != Freshness::InSync;
        failure.is_some_and(|failure| failure.cause.is_blameless() || never_came(&failure.cause))
    }

    /// It should run this driver, or does, or is on a visit for it.
    fn is_meant(&self) -> bool {
        self.pod.is_some() || self.daemon_set.is_some() || matches!(self.standing, Standing::Visit(..))
    }

    /// Where a write under way takes it.
    pub(super) fn moving_to(&self, policy: &Policy) -> Option<State> {
        let (driver, state) = self.pending?.moving_to.as_ref()?;
        (*driver == policy.driver).then_some(*state)
    }

    /// The outcome of the last write to it is not known: it keeps a slot until it is, whoever comes before it in the line.
    pub(super) fn may_have_started(&self) -> bool {
        let unknown =
            |setback: &Setback| setback.kind == SetbackKind::Stale && self.node.version <= setback.seen;
        self.state() == State::UpgradeRequired && self.setback.is_some_and(unknown)
    }

    /// A node that the API lets nobody write must not keep a slot from the others.
    pub(super) fn refuses(&self, now: Timestamp) -> bool {
        self.setback.is_some_and(|s| matches!(s.kind, SetbackKind::Error(_)) && s.retry_at > now)
    }
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

/// The nodes that should run this driver, or do, or are on a visit for it, or may be about to begin one: their start is under way.
pub(super) fn members<'v, 'a>(
    view: &'v View<'a>,
    daemon_sets: &'v [&'a DaemonSet],
) -> impl Iterator<Item = Member<'a>> {
    let uids: BTreeSet<&Uid> = daemon_sets.iter().map(|ds| &ds.uid).collect();
    let snapshot = view.snapshot;
    let mut pods = Beside::new(snapshot.pods.iter());
    let (mut pending, mut setbacks) = (about_nodes(&snapshot.in_flight), about_nodes(&snapshot.setbacks));
    let selected = snapshot.nodes.iter().filter(|(_, node)| view.belongs(node));
    selected.filter_map(move |(name, node)| {
        let (pending, setback) = (pending.at(name), setbacks.at(name));
        let is_written = pending.is_some() || setback.is_some();
        let member = member(view, name, node, pods.at(name), (daemon_sets, &uids), is_written)?;
        let member = Member { pending, setback, ..member };
        let starts = || member.moving_to(view.policy).is_some() || member.may_have_started();
        (member.is_meant() || starts()).then_some(member)
    })
}

fn member<'a>(
    view: &View<'a>,
    name: &'a NodeName,
    node: &'a Node,
    pods: Option<&'a BTreeMap<ObjectName, Pod>>,
    (daemon_sets, uids): (&[&'a DaemonSet], &BTreeSet<&Uid>),
    is_written: bool,
) -> Option<Member<'a>> {
    let policy = view.policy;
    let is_driver_pod = |pod: &&Pod| match &pod.owner {
        Some(owner) => owner.kind == OwnerKind::DaemonSet && uids.contains(&owner.uid),
        None => policy.is_driver(&pod.name.namespace, &pod.labels),
    };
    let (mut pod, mut oldest_client) = (None::<&Pod>, None);
    for here in pods.into_iter().flat_map(BTreeMap::values) {
        // A pod that is on its way out may overlap with its successor: the one that stays is the one to judge.
        if is_driver_pod(&here) && pod.is_none_or(|other| other.deleting.is_some()) {
            pod = Some(here);
        }
        if here.client.is_some() {
            oldest_client = [oldest_client, here.oldest_started].into_iter().flatten().min();
        }
    }
    let expects = |ds: &&DaemonSet| ds.node_selector.iter().all(|(k, v)| node.labels().get(k) == Some(v));
    let owner = pod.and_then(|pod| pod.owner.as_ref()).map(|owner| &owner.uid);
    let daemon_set = daemon_sets
        .iter()
        .find(|ds| Some(&ds.uid) == owner)
        .or_else(|| daemon_sets.iter().find(|ds| expects(ds)))
        .copied();
    let standing = standing(policy, node);
    let on_visit = matches!(standing, Standing::Visit(..));
    if pod.is_none() && daemon_set.is_none() && !on_visit && !is_written {
        return None;
    }
    let target = daemon_set.and_then(|ds| view.targets.get(&ds.uid).copied().flatten());
    let annotation = |key: &String| node.annotations.get(key).map(String::as_str);
    let requested = annotation(&policy.keys.requested) == Some("true");
    let waits_for_load = annotation(&policy.keys.safe_load).is_some_and(|v| !v.is_empty());
    let sync = match freshness(pod, target) {
        Freshness::Outdated
            if pod.zip(daemon_set).is_some_and(|(pod, ds)| rollback::spares(view, pod, ds)) =>
        {
            Freshness::InSync
        }
        sync => sync,
    };
    // A person has taken it out; or its driver is the wanted one already, and only has to be loaded; or it is out since
    // an earlier attempt, and would keep the others of its atom from the place that only its return makes free.
    let alone = node.mark(&policy.keys.skip) == Some("true")
        || (waits_for_load && sync == Freshness::InSync)
        || node.is_out_again(&policy.driver);
    let member = Member {
        name,
        node,
        daemon_set,
        pod,
        target,
        sync,
        standing,
        driver_ready: pod.is_some_and(|pod| pod.ready && pod.deleting.is_none())
            && node.needs_reboot().is_none(),
        requested,
        waits_for_load,
        asked_for: requested || waits_for_load,
        announced: annotation(&policy.keys.enabled).is_some(),
        pending: None,
        setback: None,
        stage_moves: true,
        left_alone: false,
        unproven: false,
        start: Start::NotDue,
        atom: policy.topology.atom_of(node.labels()).filter(|_| !alone),
        atom_moves: false,
        oldest_client,
        pods,
    };
    let left_alone = left_alone::is_left_alone(view, &member);
    Some(Member { left_alone, atom: member.atom.filter(|_| !left_alone), ..member })
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
