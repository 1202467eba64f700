//! The liveness promises: once faults stop, every node comes to an end within a bound, and then nothing moves.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use pitcrew_core::contract::State;
use pitcrew_core::reason::{Limit, Reason, Remedy};

use super::case::{Case, is_of};
use super::record::Book;
use super::world::{Node, Role};

/// A visit takes no longer than its deadlines together; the policies of `case.rs` have none beyond these.
const VISIT_MAX: Duration = Duration::from_mins(12);
/// Without limits of our own, a driver has so long by default.
const VISIT_MAX_BY_DEFAULT: Duration = Duration::from_hours(1);
/// A node that tries again no sooner than this stands still for now.
const NEXT_TRY_MIN: SignedDuration = SignedDuration::from_mins(3);
/// A new leader, back-offs, and what was under way.
const BEFORE_THE_FIRST: Duration = Duration::from_mins(5);

/// How long it may take from the end of all faults until every node has come to an end: one visit after the other.
pub(super) fn bound(case: &Case, nodes: usize) -> Duration {
    let visit = if case.policy.is_some() { VISIT_MAX } else { VISIT_MAX_BY_DEFAULT };
    let visits = u32::try_from(nodes).unwrap_or(u32::MAX);
    BEFORE_THE_FIRST + visit.saturating_mul(visits)
}

/// The nodes that have not come to an end, each with what is missing. `now` is when nothing had been touched for a while.
pub(super) fn unsettled(book: &Book, aborted: bool, now: Timestamp) -> Vec<(String, String)> {
    let nodes = book.world.nodes.iter().filter(|(_, node)| node.member);
    nodes.filter_map(|(name, node)| Some((name.clone(), missing(book, name, node, aborted, now)?))).collect()
}

fn missing(book: &Book, name: &str, node: &Node, aborted: bool, now: Timestamp) -> Option<String> {
    match node.state() {
        State::UpgradeDone => not_done(book, name, node),
        // It stays out until a person or another version comes.
        State::UpgradeFailed if node.visit.is_none() || node.cordoned || node.opened_by_others => None,
        State::UpgradeFailed => Some("it has failed and is not cordoned".to_owned()),
        State::UpgradeRequired => {
            let reason = book.reason(name)?;
            let waits = match reason {
                Reason::NoSlot { limit: Limit::MaxUnavailable { limit, .. }, .. } => {
                    out_for_good(book, name) >= *limit
                }
                Reason::Aborted { .. } => aborted,
                Reason::TooManyFailed { limit, .. } => out_for_good(book, name) > *limit,
                // Given back, it tries again much later.
                Reason::BudgetBlocks { until: Some(until), .. } => now.duration_until(*until) > NEXT_TRY_MIN,
                Reason::BudgetBlocks { .. } | Reason::BudgetNever { .. } => out_for_good(book, name) > 0,
                // The wanted driver came without us, and does not come up: NVSentinel waits for that, and so do we.
                Reason::Quarantined { .. } => node.quarantined && has_wanted_driver_down(book, name),
                _ => false,
            };
            (!waits).then(|| format!("it waits in upgrade-required: {reason}"))
        }
        // It joined with a driver that does not come up: that is told, and not ours to mend.
        State::Unknown if matches!(book.reason(name), Some(Reason::DriverNotReady { .. })) => None,
        // Nobody knows when a budget allows it, as long as others are out.
        _ if let Some(reason @ (Reason::BudgetBlocks { .. } | Reason::BudgetNever { .. })) =
            book.reason(name)
            && reason.until().is_none_or(|until| now.duration_until(until) > NEXT_TRY_MIN)
            && out_for_good(book, name) > 0 =>
        {
            None
        }
        state => {
            let since =
                node.visit.as_ref().map_or(SignedDuration::ZERO, |visit| now.duration_since(visit.since));
            let reason = book.reason(name).map(ToString::to_string).unwrap_or_default();
            Some(format!("it is in {state} since {} s: {reason}", since.as_secs()))
        }
    }
}

/// Nodes that nobody will bring back: failed, or cordoned by a person. NVSentinel gives back a node that is well.
fn out_for_good(book: &Book, but: &str) -> usize {
    let stays_out = |name: &str, node: &Node| match node.state() {
        State::UpgradeFailed => true,
        _ => node.foreign_cordon && !(node.quarantined && has_ready_driver(book, name)),
    };
    let nodes = book.world.nodes.iter().filter(|(name, node)| *name != but && node.member);
    nodes.filter(|(name, node)| stays_out(name, node)).count()
}

fn has_ready_driver(book: &Book, node: &str) -> bool {
    book.world.pods_on(node).any(|(_, pod)| pod.role == Role::Driver && pod.ready)
}

fn has_wanted_driver_down(book: &Book, node: &str) -> bool {
    let mut drivers = book.world.pods_on(node).filter(|(_, pod)| pod.role == Role::Driver && !pod.deleting);
    drivers.any(|(_, pod)| !pod.ready && is_of(&pod.image, &book.world.target))
}

fn not_done(book: &Book, name: &str, node: &Node) -> Option<String> {
    if node.visit.is_some() {
        return Some("it is done, and its visit is not over".to_owned());
    }
    if node.cordoned && !node.foreign_cordon && !node.quarantined && !node.keep_cordoned {
        return Some("it is done, and nobody lifted our cordon".to_owned());
    }
    if node.held {
        return Some("it is done, and autoscalers are still kept off it".to_owned());
    }
    if node.shield_recorded {
        return Some("it is done, and NVSentinel is still kept off it".to_owned());
    }
    if let Some(reason @ Reason::ClientsStale { remedy: Remedy::ItSelf, .. }) = book.reason(name) {
        return Some(format!("it is done, but {reason}"));
    }
    let mut drivers = book.world.pods_on(name).filter(|(_, pod)| pod.role == Role::Driver && !pod.deleting);
    match drivers.next() {
        None => Some("it is done, and has no driver".to_owned()),
        Some((_, driver)) if !is_of(&driver.image, &book.world.target) => {
            Some(format!("it is done, and runs {} instead of {}", driver.image, book.world.target))
        }
        // A driver that breaks after a visit is not ours to mend; that it is told is.
        Some((_, driver)) if !driver.ready => match book.reason(name) {
            Some(Reason::UpToDate) | None => Some("it is done, and its driver is not ready".to_owned()),
            Some(_) => None,
        },
        Some(_) => None,
    }
}
