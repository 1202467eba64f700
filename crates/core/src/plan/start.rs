//! `upgrade-required`: whether a node could start if it had a slot, and if not, why not.

use std::collections::BTreeMap;

use jiff::Timestamp;
use kube::core::SelectorExt;

use super::members::{Member, Standing, label_state};
use super::pool::View;
use super::removal;
use super::walk::revision_pending;
use super::{health, leaving, reboot};
use crate::api::TimeoutAction;
use crate::contract::{RELEASED_ANNOTATION, State};
use crate::names::{DriverName, ObjectName};
use crate::policy::{Policy, Removal};
use crate::reason::Reason;
use crate::snapshot::{Budget, Pod, Snapshot};
use crate::visit::Finding;
use crate::windows::Opening;

/// Whether a node could start if it had a slot; if not, why not.
pub(super) fn may_start(view: &View<'_>, member: &Member<'_>) -> Result<(), Reason> {
    let policy = view.policy;
    if member.state() != State::UpgradeRequired {
        return Err(Reason::UpToDate);
    }
    if let Some(reason) = needs_mending(policy, member) {
        return Err(reason);
    }
    if let Some(reason) = view.condemned.as_ref().filter(|_| !member.needs_driver()) {
        return Err(reason.clone());
    }
    if let Some(rollout) = view.aborted.as_ref().filter(|_| !member.needs_driver()) {
        return Err(Reason::Aborted { rollout: rollout.clone() });
    }
    if let Some(rollout) = view.rollout.as_ref().filter(|_| member.left_alone) {
        return Err(Reason::LeftAlone { rollout: rollout.clone() });
    }
    if let Some(other) = other_driver(view, member) {
        return Err(Reason::OtherDriver { driver: other });
    }
    if member.node.mark(&policy.keys.skip) == Some("true") && !member.needs_driver() {
        return Err(Reason::Skipped { label: policy.keys.skip.clone() });
    }
    let Some(daemon_set) = member.daemon_set.filter(|_| member.target.is_some()) else {
        return Err(revision_pending(member));
    };
    if let Some(unlisted) = view.unlisted(member) {
        return Err(Reason::NotInMatrix { unlisted: unlisted.clone() });
    }
    if member.pod.is_none() {
        return Err(Reason::NoDriverPod { daemon_set: Some(daemon_set.name.clone()), until: None });
    }
    if !member.node.ready {
        return Err(Reason::NodeNotReady { until: None });
    }
    // One that is ours already goes on to its restart and waits there: here it would hold up whoever has to go with it. So does
    // one whose new driver pod asks to be let in: its driver manager comes after that, and is the one to see what has ended.
    let begun = member.walk().is_some() || member.needs_driver();
    if let Some(reason) = reboot::refuses(member).filter(|_| !begun) {
        return Err(reason);
    }
    if let Some(reason) = health::refuses(view, member) {
        return Err(reason);
    }
    // One that only has to be proven keeps its work, as one does that restarts in place.
    if !member.restarts_in_place() && !member.has_its_new_driver() {
        can_be_emptied(view, member)?;
    }
    in_window(view, member)
}

/// A slot would be of no use: somebody has to mend its record or its label first.
fn needs_mending(policy: &Policy, member: &Member<'_>) -> Option<Reason> {
    match &member.standing {
        Standing::Held(reason, _) => Some(Reason::clone(reason)),
        Standing::Label(_) => None,
        Standing::Visit(_, walk) => match label_state(policy, member.node) {
            Ok(State::Unknown | State::UpgradeRequired) => None,
            Ok(label) => Some(Reason::LabelChanged { label, record: walk.state }),
            Err(reason) => Some(reason),
        },
    }
}

/// Nothing starts that is not expected to end before its window does. What keeps a node from starting anyway is told
/// first: there is time to mend it until the window opens. A node without any driver has nothing to lose.
fn in_window(view: &View<'_>, member: &Member<'_>) -> Result<(), Reason> {
    let needs = view.needs;
    match view.opening {
        _ if member.needs_driver() => Ok(()),
        Opening::Always | Opening::Open { .. } => Ok(()),
        Opening::TooShort { until, next } => {
            Err(Reason::WindowClosed { opens: next, needs, closes: Some(until) })
        }
        Opening::Closed { opens } => Err(Reason::WindowClosed { opens, needs, closes: None }),
    }
}

/// A node that cannot be emptied is better left alone and at work.
fn can_be_emptied(view: &View<'_>, member: &Member<'_>) -> Result<(), Reason> {
    let policy = view.policy;
    let culprit = removal::undeletable(view.users(member), policy.removal);
    let drain = policy.drain.as_ref().filter(|_| culprit.is_some() || policy.devices.is_empty());
    let (culprit, removal) = match drain {
        Some(drain) => (leaving::undrainable(view, member, drain), drain.removal),
        None => (culprit, policy.removal),
    };
    if let Some(found) = culprit {
        return Err(Reason::CannotBeEmptied { found });
    }
    match drain {
        Some(drain) => past_budgets(view, member, leaving::drained(member, drain), removal),
        None => past_budgets(view, member, view.users(member), removal),
    }
}

/// A node that was given back because of a budget tries its luck again after so many times `limits.blockedAfter`.
const RELEASED_FOR: i32 = 10;

/// Budgets that will not let the pods go, whatever happens, are recognised before the node is cordoned. A node that was
/// given back because of a budget is not taken again for a while, unless all its pods could leave at once: otherwise the
/// first of them would come back to it, and be evicted again and again.
fn past_budgets<'a>(
    view: &View<'_>,
    member: &Member<'_>,
    mut pods: impl Iterator<Item = &'a Pod>,
    removal: Removal,
) -> Result<(), Reason> {
    let deletes = removal.timeout.is_some() && removal.timeout_action == TimeoutAction::Delete;
    let released = member.node.annotations.get(RELEASED_ANNOTATION);
    let until = released.and_then(|at| at.parse::<Timestamp>().ok()).and_then(|at| {
        let long = view.policy.limits.blocked_after.checked_mul(RELEASED_FOR)?;
        at.checked_add(long).ok()
    });
    let until = until.filter(|until| *until > view.snapshot.now);
    let released = released.is_some();
    // Deleted in the end, they may stay as long as their budgets like; unless the node is given back before that.
    let hopeless_counts = !deletes && !view.hopeless.is_empty();
    if !hopeless_counts && !released {
        return Ok(());
    }
    let mut leaving = BTreeMap::new();
    let refusal = pods.find_map(|pod| {
        let hopeless = || hopeless_counts.then(|| view.hopeless.refuses(pod)).flatten();
        let blocked = || released.then(|| blocked_now(view.snapshot, pod, &mut leaving, until)).flatten();
        hopeless().or_else(blocked)
    });
    refusal.map_or(Ok(()), Err)
}

/// A budget that does not let `pod` go: after those that are `leaving` with it until then, or at all.
fn blocked_now<'a>(
    snapshot: &'a Snapshot,
    pod: &Pod,
    leaving: &mut BTreeMap<&'a ObjectName, i32>,
    until: Option<Timestamp>,
) -> Option<Reason> {
    let mut budgets = removal::budgets_of(&snapshot.budgets, pod).filter(|_| pod.ready);
    let (name, budget) = budgets.find(|(name, budget)| {
        let before = leaving.entry(name).or_default();
        *before += 1;
        budget.allowed < if until.is_some() { *before } else { 1 }
    })?;
    Some(Reason::BudgetBlocks {
        budget: name.clone(),
        pod: pod.name.clone(),
        healthy: (budget.healthy, budget.desired),
        until,
    })
}

/// Budgets that can never allow an eviction as they are, and namespaces in which a pod may be under two of them, which
/// the Eviction API refuses. Most clusters have neither, and then no pod is looked at.
#[derive(Default)]
pub(super) struct Hopeless<'a> {
    namespaces: BTreeMap<&'a str, Vec<(&'a ObjectName, &'a Budget)>>,
}

impl<'a> Hopeless<'a> {
    pub(super) fn of(budgets: &'a BTreeMap<ObjectName, Budget>) -> Self {
        let mut namespaces: BTreeMap<&str, Vec<_>> = BTreeMap::new();
        for (name, budget) in budgets {
            namespaces.entry(&name.namespace).or_default().push((name, budget));
        }
        namespaces.retain(|_, budgets| budgets.len() > 1 || budgets.iter().any(|(_, b)| b.never_allows()));
        Self { namespaces }
    }

    fn is_empty(&self) -> bool {
        self.namespaces.is_empty()
    }

    fn refuses(&self, pod: &Pod) -> Option<Reason> {
        let budgets = self.namespaces.get(pod.name.namespace.as_ref())?;
        let covers = |budget: &Budget| budget.selector.as_ref().is_some_and(|s| s.matches(&pod.labels));
        let mine: Vec<_> = budgets.iter().filter(|(_, budget)| covers(budget)).collect();
        if let [(first, _), (second, _), ..] = mine[..] {
            let what = format!(
                "pod {} is under two PodDisruptionBudgets ({first} and {second}), which the Eviction API refuses",
                pod.name
            );
            return Some(Reason::CannotBeEmptied { found: Finding::about(&pod.name, what) });
        }
        let (name, budget) = mine.iter().find(|(_, budget)| pod.ready && budget.never_allows())?;
        Some(Reason::BudgetNever {
            budget: ObjectName::clone(name),
            pod: pod.name.clone(),
            pods: (budget.expected, budget.desired),
        })
    }
}

/// Another driver whose walk on this node is not over.
pub(super) fn other_driver(view: &View<'_>, member: &Member<'_>) -> Option<DriverName> {
    if let Some(Ok(visit)) = &member.node.visit {
        return visit.drivers.keys().find(|driver| **driver != view.policy.driver).cloned();
    }
    // A start that has no record yet. If both have started, the first by name goes first.
    let started = |rival: &&&Policy| label_state(rival, member.node).is_ok_and(State::in_flight);
    let both = member.state().in_flight();
    let rivals = view.rivals.iter().filter(|rival| rival.selects(member.node.labels()));
    let mut first = rivals.filter(|rival| !both || rival.driver < view.policy.driver);
    first.find(started).map(|rival| rival.driver.clone())
}
