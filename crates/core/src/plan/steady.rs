//! The driver's clients on nodes in service: after a crash or a reboot a stale one is told of, and replaced on a few nodes at
//! a time if the policy says so.

use std::collections::BTreeSet;

use jiff::{SignedDuration, Timestamp};

use super::clients::{Survey, client, refresh, replace};
use super::members::Member;
use super::pool::View;
use super::walk::Decision;
use crate::api::Refresh;
use crate::names::NodeName;
use crate::reason::{Reason, Remedy};
use crate::snapshot::{Object, Pod, Snapshot};

/// A driver that has just come up may go down again at once, and nobody hurries.
const SETTLED: SignedDuration = SignedDuration::from_secs(30);
/// Nodes whose clients are replaced at the same time.
const REFRESHES_MAX: usize = 5;
/// So long after it was made, a client pod is not counted as one that is just coming back.
const COMING_BACK: SignedDuration = SignedDuration::from_mins(2);

/// A node in service: stale clients are told of, and replaced if the policy says so. `None`: there are none.
pub(super) fn in_service(view: &View<'_>, member: &Member<'_>) -> Option<Decision> {
    let refresh = refresh(view);
    if refresh == Refresh::Off || !member.node.ready || !maybe_stale(view, member) {
        return None;
    }
    let survey = Survey::of(view, member, &[], false)?;
    let open = survey.next(|client| !client.is_pending());
    let stale = open.iter().copied().find(|client| client.is_stale());
    let Some(stale) = stale else {
        // Others are on their way, or nobody but a person may decide.
        let pending = survey.clients.iter().find(|client| client.is_pending()).filter(|_| open.is_empty())?;
        return Some(Decision::stay(Reason::ClientsStale { found: pending.says(), remedy: Remedy::Hand }));
    };
    let by_itself = refresh == Refresh::Always && !member.node.unschedulable;
    let remedy = if by_itself { Remedy::ItSelf } else { Remedy::Command };
    let mut decision = Decision::stay(Reason::ClientsStale { found: stale.says(), remedy });
    let settled = survey.epoch.ready.saturating_add(SETTLED).unwrap_or(Timestamp::MAX);
    if by_itself && settled > view.snapshot.now {
        decision.wake_at = Some(settled);
    } else if by_itself {
        for client in open {
            decision.actions.extend(replace(view.snapshot, client, &mut decision.wake_at));
        }
    }
    Some(decision)
}

/// Most passes find nothing: that is seen without a survey.
fn maybe_stale(view: &View<'_>, member: &Member<'_>) -> bool {
    let Some(driver) = member.pod else { return false };
    let ready = driver.ready_since.max(driver.started);
    let old = |started: Option<Timestamp>| started.is_some() && started <= ready;
    let others = || member.pods().any(|pod| pod.is_daemon() && old(pod.oldest_started));
    old(member.oldest_client) || (view.knows_others && others())
}

/// Outside of visits, clients are replaced on a few nodes at a time: how many more nodes may be begun in this pass.
pub(super) struct Allowance(Option<usize>);

impl Allowance {
    pub(super) fn new() -> Self {
        Self(None)
    }

    /// Keeps what a decision wants to replace, or puts it off.
    pub(super) fn spend(&mut self, view: &View<'_>, decision: &mut Decision) {
        let refreshes = matches!(decision.reason, Reason::ClientsStale { .. });
        if !refreshes || decision.actions.is_empty() {
            return;
        }
        let left = self.0.get_or_insert_with(|| REFRESHES_MAX.saturating_sub(busy_nodes(view)));
        if let Some(less) = left.checked_sub(1) {
            *left = less;
            return;
        }
        decision.actions.clear();
        // A client that does not come back holds its place for so long at most.
        let later = view.snapshot.now.saturating_add(COMING_BACK).unwrap_or(Timestamp::MAX);
        decision.wake_at = Some(decision.wake_at.map_or(later, |at| at.min(later)));
    }
}

/// Nodes in service on which a client is being replaced.
fn busy_nodes(view: &View<'_>) -> usize {
    let Snapshot { now, nodes, pods, in_flight, .. } = view.snapshot;
    let recent = |at: Timestamp| at.saturating_add(COMING_BACK).is_ok_and(|until| until > *now);
    let comes_back = |pod: &Pod| pod.deleting.is_some_and(recent) || (!pod.ready && recent(pod.created));
    let in_service = |node: &NodeName| nodes.get(node).is_some_and(|n| n.visit.is_none() && n.ready);
    let seen = pods
        .iter()
        .filter(|(_, pods)| pods.values().any(|pod| comes_back(pod) && client(view, pod).is_some()));
    let seen = seen.map(|(node, _)| node);
    let asked = in_flight.iter().filter(|(object, _)| matches!(object, Object::Pod(_)));
    let asked = asked.filter_map(|(_, pending)| pending.on_node.as_ref());
    seen.chain(asked).filter(|node| in_service(node)).collect::<BTreeSet<_>>().len()
}
