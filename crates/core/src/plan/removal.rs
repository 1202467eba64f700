//! Taking pods off a node: who has to leave, who may be asked to, and how far it is.
//!
//! Evictions are asked for only when the budget's status allows them, so a refusal is the exception. A pod that the
//! policy does not allow to evict keeps all others where they are: half an emptied node helps nobody.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use kube::core::SelectorExt;

use crate::action::{Action, DeleteWhy, PodRef};
use crate::api::TimeoutAction;
use crate::names::ObjectName;
use crate::policy::{Devices, Removal};
use crate::reason::{self, Reason};
use crate::snapshot::{Budget, Claim, LEAVING_TRUST, Object, Pod, Setback, Snapshot};
use crate::visit::{Finding, Remedy};

/// Whether a pod keeps the device busy. Finished and mirror pods do not.
pub fn uses_device(devices: &Devices, pod: &Pod, claims: &BTreeMap<ObjectName, Claim>) -> bool {
    // Most pods ask for nothing; that is seen without a look at the rest of the pod.
    (devices.asked_for_by(pod) || claims_device(devices, pod, claims)) && !pod.is_finished() && !pod.mirror
}

/// Through a resource claim that one of the device's DRA drivers has allocated. A claim that is not known (yet) counts:
/// the driver must not be taken away under it.
fn claims_device(devices: &Devices, pod: &Pod, claims: &BTreeMap<ObjectName, Claim>) -> bool {
    let allocated = |claim: &str| {
        let name = ObjectName { namespace: pod.name.namespace.clone(), name: claim.into() };
        claims.get(&name).is_none_or(|claim| devices.claim_drivers.iter().any(|d| claim.drivers.contains(d)))
    };
    !devices.claim_drivers.is_empty() && pod.claims.iter().any(|claim| allocated(claim))
}

/// A pod that is still there so long after the end of its grace period will not leave by itself.
const STUCK_AFTER: SignedDuration = SignedDuration::from_secs(30);

/// A pod that comes while others leave is asked to leave only after so long.
const NEWCOMER_RESTS: SignedDuration = SignedDuration::from_secs(5);

/// How far a removal is.
pub(super) enum Progress {
    /// Nobody is left.
    Gone,
    /// The policy does not allow it.
    Cannot { found: Finding },
    /// The time is up and the policy says that this is a failure.
    TimedOut { found: Finding },
    /// Some are still there.
    Leaving { reason: Reason, actions: Vec<Action>, retry_at: Option<Timestamp> },
}

/// Names the pods that the policy does not allow to evict, and what would allow it.
pub fn undeletable<'a>(pods: impl Iterator<Item = &'a Pod>, removal: Removal) -> Option<Finding> {
    let why = |pod: &Pod| match () {
        () if pod.deleting.is_some() => None,
        () if pod.is_daemon() => Some(("belongs to a DaemonSet, which would put it back at once", None)),
        () if pod.owner.is_none() && !removal.force => {
            Some(("has no controller that would make it again (set force)", Some(Remedy::Force)))
        }
        () if pod.empty_dir && !removal.delete_empty_dir => {
            Some(("has emptyDir data (set deleteEmptyDir)", Some(Remedy::DeleteEmptyDir)))
        }
        () => None,
    };
    pods.into_iter().find_map(|pod| {
        let (why, remedy) = why(pod)?;
        Some(Finding { remedy, ..Finding::about(&pod.name, format!("pod {} {why}", pod.name)) })
    })
}

/// The time that a removal has.
#[derive(Clone, Copy)]
pub(super) struct Span {
    /// When it began.
    pub(super) since: Timestamp,
    /// When its time is up.
    pub(super) until: Option<Timestamp>,
    /// It is.
    pub(super) ran_out: bool,
}

pub(super) fn progress(
    snapshot: &Snapshot,
    node_ready: bool,
    pods: &[&Pod],
    removal: Removal,
    span: Span,
    budgets: &mut BudgetBook<'_>,
) -> Progress {
    let Span { until, ran_out, .. } = span;
    if pods.is_empty() {
        return Progress::Gone;
    }
    if let Some(found) = undeletable(pods.iter().copied(), removal) {
        return Progress::Cannot { found };
    }
    let names: Vec<ObjectName> = pods.iter().map(|pod| pod.name.clone()).collect();
    if ran_out && removal.timeout_action == TimeoutAction::Fail {
        let found = Finding { about: names.first().cloned(), ..Finding::plain(reason::list(&names)) };
        return Progress::TimedOut { found };
    }
    let mut actions = Vec::new();
    let mut blocked = None;
    let mut retry_at = None;
    for pod in pods {
        match ask(snapshot, pod, span, budgets) {
            Ask::Leaving => {}
            Ask::Now(action) => actions.push(action),
            Ask::At(time) => retry_at = Some(retry_at.map_or(time, |other: Timestamp| other.min(time))),
            Ask::Budget(budget, facts) => {
                blocked.get_or_insert_with(|| Reason::BudgetBlocks {
                    budget: budget.clone(),
                    pod: pod.name.clone(),
                    healthy: (facts.healthy, facts.desired),
                    until,
                });
            }
        }
    }
    let stuck = || pods.iter().find_map(|pod| stuck(snapshot.now, node_ready, pod, until));
    if let Some(at) = pods.iter().filter_map(|pod| stuck_at(pod)).filter(|at| *at > snapshot.now).min() {
        retry_at = Some(retry_at.map_or(at, |other: Timestamp| other.min(at)));
    }
    let reason = blocked.or_else(stuck).unwrap_or(Reason::PodsLeaving { pods: names, until });
    Progress::Leaving { reason, actions, retry_at }
}

/// A pod that should be gone by now.
fn stuck(now: Timestamp, node_ready: bool, pod: &Pod, until: Option<Timestamp>) -> Option<Reason> {
    stuck_at(pod).filter(|at| *at <= now)?;
    let why = match &pod.finalizer {
        Some(finalizer) => format!("finalizer {finalizer} is not removed"),
        None if !node_ready => "the node's kubelet does not answer".to_owned(),
        None => "its containers do not stop".to_owned(),
    };
    Some(Reason::PodStuck { pod: pod.name.clone(), why, until })
}

/// From when on a pod that was told to go is called stuck.
fn stuck_at(pod: &Pod) -> Option<Timestamp> {
    pod.deleting.map(|by| by.saturating_add(STUCK_AFTER).unwrap_or(Timestamp::MAX))
}

/// Exactly this pod.
pub(super) fn pod_ref(pod: &Pod) -> PodRef {
    PodRef { name: pod.name.clone(), uid: pod.uid.clone(), node: pod.node.clone() }
}

/// Nothing is under way for the pod, and no setback has to cool off.
pub(super) fn may_be_asked(snapshot: &Snapshot, pod: &Pod) -> bool {
    let object = Object::Pod(pod.name.clone());
    let cools_off = |setback: &Setback| setback.retry_at > snapshot.now;
    !snapshot.is_busy(&object) && !snapshot.setbacks.get(&object).is_some_and(cools_off)
}

#[expect(clippy::large_enum_variant, reason = "taken apart at once, never kept")]
enum Ask<'a> {
    /// It is on its way already.
    Leaving,
    Now(Action),
    At(Timestamp),
    /// A budget allows nobody to leave.
    Budget(&'a ObjectName, &'a Budget),
}

fn ask<'a>(snapshot: &Snapshot, pod: &Pod, span: Span, budgets: &mut BudgetBook<'a>) -> Ask<'a> {
    let object = Object::Pod(pod.name.clone());
    if pod.deleting.is_some() || snapshot.is_busy(&object) {
        return Ask::Leaving;
    }
    if let Some(accepted) = snapshot.leaving.get(&pod.uid) {
        let trusted_until = accepted.saturating_add(LEAVING_TRUST).unwrap_or(Timestamp::MAX);
        if snapshot.now < trusted_until {
            return Ask::At(trusted_until);
        }
    }
    if let Some(setback) = snapshot.setbacks.get(&object).filter(|setback| setback.retry_at > snapshot.now) {
        return Ask::At(setback.retry_at);
    }
    // Whatever puts pods on the node again and again is not raced.
    let settled = pod.created.saturating_add(NEWCOMER_RESTS).unwrap_or(Timestamp::MAX);
    if pod.created > span.since && snapshot.now < settled {
        return Ask::At(settled);
    }
    let pod_ref = pod_ref(pod);
    if span.ran_out {
        return Ask::Now(Action::Delete(pod_ref, DeleteWhy::TimedOut));
    }
    match budgets.take(pod) {
        Ok(()) => Ask::Now(Action::Evict(pod_ref)),
        Err((budget, facts)) => Ask::Budget(budget, facts),
    }
}

/// The budgets that a pod is under.
pub(super) fn budgets_of<'a, 'p>(
    budgets: &'a BTreeMap<ObjectName, Budget>,
    pod: &'p Pod,
) -> impl Iterator<Item = (&'a ObjectName, &'a Budget)> + use<'a, 'p> {
    let namespace = &pod.name.namespace;
    let first = ObjectName { namespace: namespace.clone(), name: "".into() };
    let selects = |budget: &Budget| budget.selector.as_ref().is_some_and(|s| s.matches(&pod.labels));
    let in_namespace = budgets.range(first..).take_while(move |(name, _)| name.namespace == *namespace);
    in_namespace.filter(move |(_, budget)| selects(budget))
}

/// What each budget still allows in this pass: two nodes must not spend the same disruption.
pub(super) struct BudgetBook<'a> {
    budgets: &'a BTreeMap<ObjectName, Budget>,
    spent: BTreeMap<&'a ObjectName, i32>,
}

impl<'a> BudgetBook<'a> {
    /// Opens the book; evictions in flight have spent already.
    pub(super) fn open(snapshot: &'a Snapshot) -> Self {
        let mut book = Self { budgets: &snapshot.budgets, spent: BTreeMap::new() };
        for (object, pending) in &snapshot.in_flight {
            if let (Object::Pod(name), Some(node)) = (object, &pending.on_node)
                && let Some(pod) = snapshot.pods.get(node).and_then(|pods| pods.get(name))
            {
                book.spend(pod);
            }
        }
        book
    }

    fn spend(&mut self, pod: &Pod) {
        for (name, _) in budgets_of(self.budgets, pod) {
            *self.spent.entry(name).or_default() += 1;
        }
    }

    /// Takes one disruption from every budget of the pod, or from none.
    fn take(&mut self, pod: &Pod) -> Result<(), (&'a ObjectName, &'a Budget)> {
        let spent = |name| self.spent.get(name).copied().unwrap_or(0);
        // A pod that is not ready can leave whatever the budget says, if nobody is harmed: the API decides that.
        // The API refuses while a budget's status is behind its spec, so such a number is worth nothing.
        let left = |name, budget: &Budget| if budget.current { budget.allowed - spent(name) } else { 0 };
        let exhausted =
            budgets_of(self.budgets, pod).find(|(name, budget)| pod.ready && left(*name, budget) <= 0);
        if let Some(exhausted) = exhausted {
            return Err(exhausted);
        }
        self.spend(pod);
        Ok(())
    }
}
