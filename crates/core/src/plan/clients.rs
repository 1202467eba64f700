//! The driver's clients on one node: which hold on to a driver that is gone, who is replaced next, and whether what
//! they offer is back. In a visit they come back before the validators look; outside of one they are told of, and
//! replaced if the policy says so.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};

use super::members::Member;
use super::pool::View;
use super::removal::{may_be_asked, pod_ref};
use super::restart::says;
use super::walk::{Decision, deadline, fail, ran_out};
use crate::action::{Action, DeleteWhy};
use crate::api::Refresh;
use crate::clients::{ClientKind, DEPLOY_CLIENT_LABEL, Epoch, PAUSED_VALUE_PREFIX, Stale, older_than_driver};
use crate::names::{NodeName, ObjectName, Uid};
use crate::reason::Reason;
use crate::snapshot::{DaemonSet, Object, Pod, Slice, Snapshot};
use crate::version::DriverVersion;
use crate::visit::{Before, Cause, Finding, Visit, Walk};

/// A driver that has just come up may go down again at once. Outside of a visit nobody hurries.
const SETTLED: SignedDuration = SignedDuration::from_secs(30);
/// Nodes whose clients are replaced at the same time outside of visits.
pub(super) const REFRESHES_MAX: usize = 5;
/// So long after it was made, a client pod is not counted as one that is just coming back.
const COMING_BACK: SignedDuration = SignedDuration::from_mins(2);

/// A plugin that is ready so long has published what it offers.
const PUBLISHED_AFTER: SignedDuration = SignedDuration::from_secs(10);

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
        let epoch = Epoch::of(member.pod?, member.node)?;
        let mut found: BTreeMap<&ObjectName, (Rule, &Pod)> = BTreeMap::new();
        for pod in member.pods().filter(|pod| !pod.is_finished()) {
            let Some((rule, daemon_set)) = rule(view, pod) else { continue };
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
                let rule = rule_of_set(view, daemon_set);
                clients.push(Client {
                    rule,
                    daemon_set: &daemon_set.name,
                    pod: None,
                    standing: Standing::Coming,
                });
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
fn refresh(view: &View<'_>) -> Refresh {
    if view.snapshot.refreshes_clients { view.policy.clients.refresh } else { Refresh::Off }
}

/// Whether a pod is a client, and how it is treated. Only pods of DaemonSets are: nobody else would make them again.
fn rule<'a>(view: &View<'a>, pod: &Pod) -> Option<(Rule, &'a DaemonSet)> {
    let clients = &view.policy.clients;
    let third_party = |owner| clients.nvidia && view.third_parties.contains(owner);
    let known = pod.client.filter(|_| clients.nvidia);
    if known.is_none() && clients.extra.is_empty() && view.third_parties.is_empty() {
        return None;
    }
    let owner = &pod.owner.as_ref().filter(|_| pod.is_daemon())?.uid;
    let extra = clients.extra.iter().find(|extra| extra.selects(pod));
    let timeout = clients.timeout;
    let rule = match (known, extra) {
        (Some(kind), _) => Rule { order: kind.order(), gated: true, required: true, timeout },
        (None, Some(extra)) => {
            Rule { order: extra.order, gated: extra.gated, required: extra.required, timeout: extra.timeout }
        }
        (None, None) if third_party(owner) => Rule { order: 3, gated: false, required: true, timeout },
        (None, None) => return None,
    };
    Some((rule, view.snapshot.daemon_sets.get(owner)?))
}

/// How a client is treated that has no pod now, by the pods that its DaemonSet has elsewhere.
fn rule_of_set(view: &View<'_>, daemon_set: &DaemonSet) -> Rule {
    let pods = view.snapshot.pods.values().flat_map(BTreeMap::values);
    let is_its = |pod: &&Pod| pod.owner.as_ref().is_some_and(|owner| owner.uid == daemon_set.uid);
    let known = pods.filter(is_its).find_map(|pod| rule(view, pod)).map(|(rule, _)| rule);
    let timeout = view.policy.clients.timeout;
    known.unwrap_or(Rule { order: 0, gated: true, required: true, timeout })
}

/// A DaemonSet that had a pod here when the visit began, still exists, and is meant for this node; also if a driver-manager
/// keeps it off for now.
fn expected<'a>(snapshot: &'a Snapshot, member: &Member<'_>, name: &ObjectName) -> Option<&'a DaemonSet> {
    let daemon_set = snapshot.daemon_sets.values().find(|ds| ds.name == *name)?;
    let fits = |(key, wanted): (&String, &String)| {
        let value = member.node.labels().get(key);
        value.is_some_and(|value| value == wanted || value.starts_with(PAUSED_VALUE_PREFIX))
    };
    daemon_set.node_selector.iter().all(fits).then_some(daemon_set)
}

fn standing(snapshot: &Snapshot, pod: &Pod, gated: bool, epoch: Epoch, in_visit: bool) -> Standing {
    if pod.deleting.is_some() {
        return Standing::Coming;
    }
    // Inside a visit the new template is taken along; outside it is somebody's decision to make.
    let pending = pending_revision(snapshot, pod).filter(|_| in_visit || pod.oldest_started.is_some());
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
    let clients = member.pods().filter_map(|pod| rule(view, pod)).map(|(_, ds)| ds.name.clone());
    let clients: BTreeSet<ObjectName> = clients.collect();
    Some(Before { clients: clients.into_iter().collect(), devices: devices(view, member) })
}

fn devices(view: &View<'_>, member: &Member<'_>) -> u32 {
    let resources = &view.policy.devices.resources;
    member.node.devices(|name| resources.iter().any(|pattern| pattern.matches(name)))
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
    let nothing = Before::default();
    let before = visit.before.as_ref().unwrap_or(&nothing);
    let survey = Survey::of(view, member, &before.clients, true)?;
    let due = |client: &Client<'_>| client.rule.required || !ran_out(view, until_of(view, walk, client));
    let open = survey.next(due);
    let Some(first) = open.first() else {
        let missing = offers(view, member, &survey, before.devices)?;
        return Some(wait_for_offers(view, member, walk, missing, until));
    };
    let limit = until_of(view, walk, first).min(until);
    if ran_out(view, limit) {
        let cause = Cause::ClientNotBack {
            client: first.daemon_set.clone(),
            found: first.says(),
            seconds: limit.duration_since(walk.since).as_secs(),
        };
        return Some(fail(view, member, walk, cause));
    }
    let mut decision = Decision::stay(Reason::ClientsComeBack { found: first.says(), until: limit });
    for client in open {
        if let Some(action) = replace(view.snapshot, client, &mut decision.wake_at) {
            decision.actions.push(action);
        }
    }
    Some(decision)
}

/// What the clients offer is not there yet: as for validation, which it is a part of.
fn wait_for_offers(
    view: &View<'_>,
    member: &Member<'_>,
    walk: &Walk,
    missing: Missing<'_>,
    until: Timestamp,
) -> Decision {
    let stale = missing.stale_plugin(view.snapshot.now);
    let found = missing.found;
    if ran_out(view, until) {
        let seconds = view.policy.limits.validation.as_secs();
        return fail(view, member, walk, Cause::NotValidated { found, seconds });
    }
    let mut decision = Decision::stay(Reason::ClientsComeBack { found, until });
    match stale {
        Some(Ok(plugin)) => decision.actions.extend(delete(view.snapshot, plugin, &mut decision.wake_at)),
        Some(Err(at)) => decision.wake_at = Some(at.min(until)),
        None => {}
    }
    decision
}

/// Until when a client has to be back: counted from the visit's validation, or from when its new pod was made.
fn until_of(view: &View<'_>, walk: &Walk, client: &Client<'_>) -> Timestamp {
    let later = client.pod.map_or(SignedDuration::ZERO, |pod| pod.created.duration_since(walk.since));
    let later = later.max(SignedDuration::ZERO);
    deadline(view, walk, client.rule.timeout.saturating_add(later))
}

fn replace(snapshot: &Snapshot, client: &Client<'_>, wake_at: &mut Option<Timestamp>) -> Option<Action> {
    let pod = client.pod.filter(|_| matches!(client.standing, Standing::Stale(_)))?;
    delete(snapshot, pod, wake_at)
}

/// Deletes a stale client, unless that is under way or has to cool off.
fn delete(snapshot: &Snapshot, pod: &Pod, wake_at: &mut Option<Timestamp>) -> Option<Action> {
    if !may_be_asked(snapshot, pod) {
        if let Some(setback) = snapshot.setbacks.get(&Object::Pod(pod.name.clone())) {
            *wake_at = Some(wake_at.map_or(setback.retry_at, |at| at.min(setback.retry_at)));
        }
        return None;
    }
    Some(Action::Delete(pod_ref(pod), DeleteWhy::StaleClient))
}

/// What is missing of what the clients offer.
pub(super) struct Missing<'a> {
    pub(super) found: Finding,
    /// The plugin, if it tells of another driver and may have started before this one was ready: start times are whole
    /// seconds, so one that opened the old driver in the second in which it went looks fresh.
    plugin: Option<&'a Pod>,
}

impl<'a> Missing<'a> {
    fn plain(what: String) -> Self {
        Self { found: Finding::plain(what), plugin: None }
    }

    /// The plugin that has to be replaced, or when that is known: a fresh one needs a moment to publish.
    pub(super) fn stale_plugin(&self, now: Timestamp) -> Option<Result<&'a Pod, Timestamp>> {
        let plugin = self.plugin?;
        let at = plugin.ready_since.unwrap_or(plugin.created).saturating_add(PUBLISHED_AFTER).ok()?;
        Some(if at <= now { Ok(plugin) } else { Err(at) })
    }
}

/// What is missing of what the clients offer: complete ResourceSlices of the driver that runs, and all devices.
pub(super) fn offers<'a>(
    view: &View<'a>,
    member: &Member<'a>,
    survey: &Survey<'a>,
    before: u32,
) -> Option<Missing<'a>> {
    let plugin = survey.clients.iter().filter_map(|client| client.pod);
    let plugin = plugin.into_iter().find(|pod| pod.client == Some(ClientKind::DraPlugin { gpus: true }));
    if let (Some(plugin), Some(slices), Some(driver)) = (plugin, &view.snapshot.slices, member.pod)
        && let Some(incomplete) = incomplete(slices, member.name, running_version(driver).as_ref())
    {
        let early = plugin.oldest_started.is_some_and(|started| started <= survey.epoch.ready);
        let suspect = early && matches!(incomplete, Incomplete::OtherDriver(_));
        let (Incomplete::OtherDriver(what) | Incomplete::NotThere(what)) = incomplete;
        return Some(Missing { plugin: Some(plugin).filter(|_| suspect), ..Missing::plain(what) });
    }
    let now = devices(view, member);
    let what = || format!("the node offers {now} of the {before} devices that it had before");
    (now < before).then(|| Missing::plain(what()))
}

/// The version in a driver pod's image, if it is a whole one: precompiled drivers are tagged by branch and kernel.
fn running_version(driver: &Pod) -> Option<DriverVersion> {
    let version = DriverVersion::from_image(&driver.image)?;
    version.to_string().bytes().all(|byte| byte != b'-').then_some(version)
}

/// Why the slices of a node do not describe its driver yet.
enum Incomplete {
    NotThere(String),
    OtherDriver(String),
}

fn incomplete(
    slices: &BTreeMap<Box<str>, Slice>,
    node: &NodeName,
    version: Option<&DriverVersion>,
) -> Option<Incomplete> {
    let mut pools: BTreeMap<&str, Vec<(&str, &Slice)>> = BTreeMap::new();
    for (name, slice) in slices.iter().filter(|(_, slice)| slice.node == *node) {
        pools.entry(&slice.pool).or_default().push((name, slice));
    }
    if pools.is_empty() {
        let what = "the DRA plugin has not published a ResourceSlice for this node yet";
        return Some(Incomplete::NotThere(what.to_owned()));
    }
    pools.into_iter().find_map(|(pool, slices)| {
        let newest = slices.iter().map(|(_, slice)| slice.generation).max()?;
        let current = slices.into_iter().filter(|(_, slice)| slice.generation == newest);
        let current: Vec<(&str, &Slice)> = current.collect();
        let (there, wanted) = (current.len(), current.first()?.1.count);
        if i64::try_from(there).is_ok_and(|there| there < wanted) {
            let what = format!("{there} of the {wanted} ResourceSlices of pool {pool} are published");
            return Some(Incomplete::NotThere(what));
        }
        let version = version?;
        let (name, other) = current.into_iter().find_map(|(name, slice)| {
            slice.versions.iter().find(|told| *told != version).map(|told| (name, told))
        })?;
        let what = format!("resourceslice/{name} tells driver {other}, the node runs {version}");
        Some(Incomplete::OtherDriver(what))
    })
}

/// A node in service: stale clients are told of, and replaced if the policy says so. `None`: there are none.
pub(super) fn in_service(view: &View<'_>, member: &Member<'_>) -> Option<Decision> {
    let refresh = refresh(view);
    if refresh == Refresh::Off || !member.node.ready || !has_clients(view, member) {
        return None;
    }
    let survey = Survey::of(view, member, &[], false)?;
    let open = survey.next(|client| matches!(client.standing, Standing::Stale(_)));
    let stale = open.iter().map(|client| client.says()).next()?;
    let left_alone = open.iter().all(|client| is_pending(client));
    let by_us = refresh == Refresh::Always && !member.node.unschedulable && !left_alone;
    let mut decision = Decision::stay(Reason::ClientsStale { found: stale, by_itself: by_us });
    if !by_us {
        return Some(decision);
    }
    let settled = survey.epoch.ready.saturating_add(SETTLED).unwrap_or(Timestamp::MAX);
    if settled > view.snapshot.now {
        decision.wake_at = Some(settled);
        return Some(decision);
    }
    for client in open.into_iter().filter(|client| !is_pending(client)) {
        decision.actions.extend(replace(view.snapshot, client, &mut decision.wake_at));
    }
    Some(decision)
}

pub(super) fn is_pending(client: &Client<'_>) -> bool {
    matches!(client.standing, Standing::Stale(Stale::PendingRevision { .. }))
}

/// Most passes find nothing: that is seen without a survey.
fn has_clients(view: &View<'_>, member: &Member<'_>) -> bool {
    let Some(driver) = member.pod.and_then(|pod| pod.started) else { return false };
    let youngest = member.pod.and_then(|pod| pod.ready_since).unwrap_or(driver).max(driver);
    let maybe = |pod: &Pod| pod.oldest_started.is_some_and(|at| at <= youngest) && pod.is_daemon();
    member.pods().any(|pod| (pod.client.is_some() || view.knows_others) && maybe(pod))
}

/// How many nodes outside of visits may have their clients replaced now.
pub(super) fn allowance(view: &View<'_>) -> usize {
    if refresh(view) != Refresh::Always {
        return 0;
    }
    let now = view.snapshot.now;
    let young = |pod: &Pod| pod.created.saturating_add(COMING_BACK).is_ok_and(|until| until > now);
    let comes_back = |pod: &Pod| pod.deleting.is_some() || (!pod.ready && young(pod));
    let busy = |pods: &BTreeMap<ObjectName, Pod>| {
        pods.values().any(|pod| comes_back(pod) && rule(view, pod).is_some())
    };
    let in_service = |node: &NodeName| view.snapshot.nodes.get(node).is_some_and(|n| n.visit.is_none());
    let busy = view.snapshot.pods.iter().filter(|(node, pods)| in_service(node) && busy(pods)).count();
    REFRESHES_MAX.saturating_sub(busy)
}
