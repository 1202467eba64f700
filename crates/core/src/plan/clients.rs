//! The driver's clients on one node: which hold on to a driver that is gone, and who is replaced next. In a visit they come
//! back before the validators look; what they offer is looked at in `offers`, and nodes in service in `steady`.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};

use super::members::Member;
use super::offers::{Missing, devices, offers};
use super::patch::record_patch;
use super::pool::View;
use super::removal::{may_be_asked, pod_ref};
use super::restart::says;
use super::walk::{Decision, deadline, fail, ran_out};
use crate::action::{Action, Changes, DeleteWhy};
use crate::api::Refresh;
use crate::clients::{DEPLOY_CLIENT_LABEL, Epoch, PAUSED_VALUE, Stale, older_than_driver};
use crate::names::{ObjectName, Uid};
use crate::policy::ExtraClient;
use crate::reason::Reason;
use crate::snapshot::{DaemonSet, Object, Pod, Snapshot};
use crate::visit::{Before, Cause, Finding, Visit, Walk};

/// Third parties come after the operands.
const THIRD_PARTY_ORDER: u32 = 3;

/// How a client is treated.
#[derive(Clone, Copy)]
pub(super) struct Rule {
    order: u32,
    gated: bool,
    required: bool,
    timeout: SignedDuration,
}

/// One client on one node.
pub(super) struct Client<'a> {
    rule: Rule,
    pub(super) daemon_set: &'a ObjectName,
    /// Its pod, if there is one.
    pub(super) pod: Option<&'a Pod>,
    pub(super) standing: Standing,
}

/// How a client stands to the driver that runs now.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum Standing {
    Fresh,
    Stale(Stale),
    /// Not there, on its way out, or on its way up.
    Coming,
}

/// All clients of one node, in the order in which they come back.
pub(super) struct Survey<'a> {
    pub(super) epoch: Epoch,
    pub(super) clients: Vec<Client<'a>>,
}

impl<'a> Survey<'a> {
    /// Looks at the clients of a node whose driver is ready; `None` if it is not. Pods of the DaemonSets in `before` are
    /// missed if they are not there. In a visit, newer templates are taken along.
    pub(super) fn of(
        view: &View<'a>,
        member: &Member<'a>,
        before: &[ObjectName],
        in_visit: bool,
    ) -> Option<Self> {
        let epoch = Epoch::of(member.pod?, member.node, view.policy.limits.driver_ready)?;
        let mut found: BTreeMap<&ObjectName, (Rule, &Pod)> = BTreeMap::new();
        for pod in member.pods().filter(|pod| !pod.is_finished()) {
            let Some((rule, daemon_set)) = client(view, pod) else { continue };
            let entry = found.entry(&daemon_set.name).or_insert((rule, pod));
            // The one that stays is the one to judge.
            if entry.1.deleting.is_some() {
                *entry = (rule, pod);
            }
        }
        let mut clients: Vec<Client<'a>> = Vec::with_capacity(found.len());
        for (daemon_set, (rule, pod)) in &found {
            let standing = standing(view.snapshot, pod, rule.gated, epoch, in_visit);
            clients.push(Client { rule: *rule, daemon_set, pod: Some(pod), standing });
        }
        for name in before.iter().filter(|name| !found.contains_key(name)) {
            if let Some(daemon_set) = expected(view.snapshot, member, name) {
                let Some(rule) = rule(view, daemon_set) else { continue };
                let (daemon_set, standing) = (&daemon_set.name, Standing::Coming);
                clients.push(Client { rule, daemon_set, pod: None, standing });
            }
        }
        clients.sort_by_key(|client| client.rule.order);
        Some(Self { epoch, clients })
    }

    /// The clients that are not fresh and come back first.
    pub(super) fn next(&self, is_due: impl Fn(&Client<'a>) -> bool) -> Vec<&Client<'a>> {
        let open = |client: &&Client<'a>| client.standing != Standing::Fresh && is_due(client);
        let first = self.clients.iter().filter(open).map(|client| client.rule.order).min();
        self.clients.iter().filter(open).filter(|client| Some(client.rule.order) == first).collect()
    }
}

impl Client<'_> {
    /// The node is nothing without it.
    pub(super) fn is_required(&self) -> bool {
        self.rule.required
    }

    /// It has to be replaced.
    pub(super) fn is_stale(&self) -> bool {
        matches!(self.standing, Standing::Stale(_))
    }

    /// Its replacement would come from a newer template, which outside of a visit is for a person to decide.
    pub(super) fn is_pending(&self) -> bool {
        matches!(self.standing, Standing::Stale(Stale::PendingRevision { .. }))
    }

    /// What is the matter with it, in a sentence.
    pub(super) fn says(&self) -> Finding {
        let Some(pod) = self.pod else {
            return Finding::plain(format!("no pod of daemonset/{} on this node yet", self.daemon_set));
        };
        let what = match &self.standing {
            Standing::Stale(stale) => format!("client pod {} is stale: {stale}", pod.name),
            _ if pod.deleting.is_some() => format!("client pod {} is stopping", pod.name),
            _ => format!("client pod {} is not ready yet: {}", pod.name, says(pod)),
        };
        Finding::about(&pod.name, what)
    }
}

/// What the clients of a pass are looked up in: DaemonSets that third parties have put under the driver's switch.
pub(super) fn third_parties(snapshot: &Snapshot) -> BTreeSet<&Uid> {
    let asks = |ds: &&DaemonSet| ds.node_selector.contains_key(DEPLOY_CLIENT_LABEL);
    snapshot.daemon_sets.values().filter(asks).map(|ds| &ds.uid).collect()
}

/// When stale clients are replaced.
pub(super) fn refresh(view: &View<'_>) -> Refresh {
    if view.snapshot.refreshes_clients { view.policy.clients.refresh } else { Refresh::Off }
}

/// A pod that is a client, with how it is treated. Only pods of DaemonSets are: nobody else would make them again.
pub(super) fn client<'a>(view: &View<'a>, pod: &Pod) -> Option<(Rule, &'a DaemonSet)> {
    // Most pods are none; that is seen without a look at their owners.
    let maybe = pod.client.is_some() || view.knows_others;
    let owner = pod.owner.as_ref().filter(|_| maybe && pod.is_daemon())?;
    let daemon_set = view.snapshot.daemon_sets.get(&owner.uid)?;
    Some((rule(view, daemon_set)?, daemon_set))
}

/// How the pods of a DaemonSet are treated, if they are clients. A driver is nobody's client, whatever a selector says.
fn rule(view: &View<'_>, daemon_set: &DaemonSet) -> Option<Rule> {
    let DaemonSet { name, pod_labels, .. } = daemon_set;
    let policies = view.rivals.iter().copied().chain([view.policy]);
    if policies.into_iter().any(|policy| policy.is_driver(&name.namespace, pod_labels)) {
        return None;
    }
    let clients = &view.policy.clients;
    let timeout = clients.timeout;
    if let Some(kind) = daemon_set.client.filter(|_| clients.nvidia) {
        return Some(Rule { order: kind.order(), gated: true, required: true, timeout });
    }
    if let Some(extra) = clients.extra.iter().find(|extra| extra.selects(&name.namespace, pod_labels)) {
        let ExtraClient { order, gated, required, timeout, .. } = *extra;
        return Some(Rule { order, gated, required, timeout });
    }
    let asks = clients.nvidia && view.third_parties.contains(&daemon_set.uid);
    asks.then_some(Rule { order: THIRD_PARTY_ORDER, gated: false, required: true, timeout })
}

/// A DaemonSet that had a pod here when the visit began, still exists, and is meant for this node; also if a driver-manager
/// keeps it off for now.
fn expected<'a>(snapshot: &'a Snapshot, member: &Member<'_>, name: &ObjectName) -> Option<&'a DaemonSet> {
    let daemon_set = snapshot.daemon_sets.values().find(|ds| ds.name == *name)?;
    let fits = |(key, wanted): (&String, &String)| {
        let value = member.node.labels().get(key);
        value.is_some_and(|value| value == wanted || value.contains(PAUSED_VALUE))
    };
    daemon_set.node_selector.iter().all(fits).then_some(daemon_set)
}

fn standing(snapshot: &Snapshot, pod: &Pod, gated: bool, epoch: Epoch, in_visit: bool) -> Standing {
    if pod.deleting.is_some() {
        return Standing::Coming;
    }
    // Inside a visit the new template is taken along; outside it is somebody's decision to make.
    let pending = pending_revision(snapshot, pod);
    match (older_than_driver(pod, gated, epoch), pending) {
        (Some(_), Some(pending)) if !in_visit => Standing::Stale(pending),
        (Some(stale), _) => Standing::Stale(stale),
        (None, Some(pending)) if in_visit => Standing::Stale(pending),
        _ if pod.ready => Standing::Fresh,
        _ => Standing::Coming,
    }
}

/// A pod of an OnDelete DaemonSet that would come back from another template.
fn pending_revision(snapshot: &Snapshot, pod: &Pod) -> Option<Stale> {
    let daemon_set = snapshot.daemon_sets.get(&pod.owner.as_ref()?.uid).filter(|ds| ds.on_delete)?;
    if daemon_set.observed_generation != daemon_set.generation {
        return None;
    }
    let revisions = snapshot.revisions.values().filter(|revision| revision.owner == daemon_set.uid);
    let newest = revisions.max_by_key(|revision| revision.number)?;
    let daemon_set = daemon_set.name.clone();
    (pod.revision.as_ref() != Some(&newest.hash)).then_some(Stale::PendingRevision { daemon_set })
}

/// What a node has before its driver is touched: it must have it again afterwards.
pub(super) fn before<'a>(view: &View<'a>, member: &Member<'a>) -> Option<Before> {
    if refresh(view) == Refresh::Off {
        return None;
    }
    let clients = member.pods().filter_map(|pod| client(view, pod)).map(|(_, ds)| ds.name.clone());
    let clients: BTreeSet<ObjectName> = clients.collect();
    Some(Before { clients: clients.into_iter().collect(), devices: devices(view, member) })
}

/// In a visit, before the validators look: stale clients are replaced, and all are waited for. `None`: all are back.
pub(super) fn come_back(
    view: &View<'_>,
    member: &Member<'_>,
    visit: &Visit,
    walk: &Walk,
    until: Timestamp,
) -> Option<Decision> {
    if refresh(view) == Refresh::Off {
        return None;
    }
    let before = visit.before.clone().unwrap_or_default();
    let Some(survey) = Survey::of(view, member, &before.clients, true) else {
        let found = Finding::plain("it is not known yet when the driver container started");
        return Some(wait(view, member, walk, found, until));
    };
    let limit = |client: &Client<'_>| until_of(view, walk, survey.epoch, client, until);
    let due = |client: &Client<'_>| client.rule.required || !ran_out(view, limit(client));
    let open = survey.next(due);
    let Some(next) = open.iter().min_by_key(|client| limit(client)) else {
        let missing = offers(view, member, &survey, before.devices)?;
        return Some(wait_for_offers(view, member, walk, missing, until));
    };
    if ran_out(view, limit(next)) {
        let seconds = limit(next).duration_since(walk.since).as_secs();
        let (client, found) = (next.daemon_set.clone(), next.says());
        return Some(fail(view, member, walk, Cause::ClientNotBack { client, found, seconds }));
    }
    let mut decision = Decision::stay(Reason::ClientsComeBack { found: next.says(), until: limit(next) });
    if let Some(note) = note_replaced(view, member, visit, walk, &open) {
        decision.actions.push(note);
        return Some(decision);
    }
    for client in open {
        decision.actions.extend(replace(view.snapshot, client, &mut decision.wake_at));
    }
    Some(decision)
}

/// A client that was not there when the visit began is written down before its pod goes: it would not be missed else.
fn note_replaced(
    view: &View<'_>,
    member: &Member<'_>,
    visit: &Visit,
    walk: &Walk,
    open: &[&Client<'_>],
) -> Option<Action> {
    let mut before = visit.before.clone().unwrap_or_default();
    let known = before.clients.len();
    for client in open.iter().filter(|client| client.is_stale()) {
        if !before.clients.contains(client.daemon_set) {
            before.clients.push(client.daemon_set.clone());
        }
    }
    if before.clients.len() == known {
        return None;
    }
    let mut visit = visit.clone();
    visit.before = Some(before);
    let mut patch = record_patch(view, member, &visit, walk.clone());
    patch.labels = Changes::default();
    Some(Action::PatchNode(patch))
}

/// Whether a client has become stale since the clients were back: the driver started once more.
pub(super) fn fell_behind(view: &View<'_>, member: &Member<'_>) -> bool {
    let is_behind = |client: &Client<'_>| client.is_required() && client.is_stale() && !client.is_pending();
    let survey = || Survey::of(view, member, &[], true);
    refresh(view) != Refresh::Off && survey().is_some_and(|survey| survey.clients.iter().any(is_behind))
}

/// Something is missing that has until the end of validation to come.
fn wait(view: &View<'_>, member: &Member<'_>, walk: &Walk, found: Finding, until: Timestamp) -> Decision {
    if ran_out(view, until) {
        let seconds = view.policy.limits.validation.as_secs();
        return fail(view, member, walk, Cause::NotValidated { found, seconds });
    }
    Decision::stay(Reason::ClientsComeBack { found, until })
}

/// What the clients offer is not there yet.
fn wait_for_offers(
    view: &View<'_>,
    member: &Member<'_>,
    walk: &Walk,
    missing: Missing<'_>,
    until: Timestamp,
) -> Decision {
    let stale = missing.stale_plugin(view.snapshot.now);
    let mut decision = wait(view, member, walk, missing.found, until);
    match stale {
        _ if !decision.actions.is_empty() => {}
        Some(Ok(plugin)) => decision.actions.extend(delete(view.snapshot, plugin, &mut decision.wake_at)),
        Some(Err(at)) => decision.wake_at = Some(at.min(until)),
        None => {}
    }
    decision
}

/// Until when a client has to be back. One that is still to be replaced has as long as validation; one that is on its way
/// has its own time, from when its pod was made or the driver was ready.
fn until_of(view: &View<'_>, walk: &Walk, epoch: Epoch, client: &Client<'_>, until: Timestamp) -> Timestamp {
    if client.is_stale() {
        return until;
    }
    let begun = client.pod.map_or(epoch.ready, |pod| pod.created.max(epoch.ready));
    let later = begun.duration_since(walk.since).max(SignedDuration::ZERO);
    deadline(view, walk, client.rule.timeout.saturating_add(later)).min(until)
}

pub(super) fn replace(
    snapshot: &Snapshot,
    client: &Client<'_>,
    wake_at: &mut Option<Timestamp>,
) -> Option<Action> {
    let pod = client.pod.filter(|_| client.is_stale())?;
    delete(snapshot, pod, wake_at)
}

/// Deletes a stale client, unless that is under way or has to cool off.
fn delete(snapshot: &Snapshot, pod: &Pod, wake_at: &mut Option<Timestamp>) -> Option<Action> {
    if may_be_asked(snapshot, pod) {
        return Some(Action::Delete(pod_ref(pod), DeleteWhy::StaleClient));
    }
    let setback = snapshot.setbacks.get(&Object::Pod(pod.name.clone()));
    let retry_at = setback.map(|setback| setback.retry_at).filter(|at| *at > snapshot.now);
    // A deadline that has passed must not hide it.
    *wake_at = [wake_at.filter(|at| *at > snapshot.now), retry_at].into_iter().flatten().min();
    None
}
