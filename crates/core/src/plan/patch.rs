//! The writes of the walk: each transition is ONE patch that carries label, cordon and visit record together.

use super::members::{Member, Standing};
use super::pool::View;
use super::walk::Decision;
use crate::action::{Action, Changes, Event, NodePatch, Transition};
use crate::contract::{State, VISIT_ANNOTATION, transition_message};
use crate::reason::Reason;
use crate::visit::{Visit, Walk};

/// The one write of a transition.
pub(super) fn go(view: &View<'_>, member: &Member<'_>, to: State, walk: Option<Walk>) -> Decision {
    let mut patch = base_patch(view, member, to);
    if let Some(walk) = walk {
        if let (Some(failure), Some(event)) = (&walk.failure, &mut patch.event) {
            event.warning = true;
            event.message = format!("{}. Cause: {}", event.message, failure.cause);
            event.message.push_str(&ends_with(failure.cause.log().unwrap_or_default()));
        }
        if let Standing::Visit(visit, _) = member.standing {
            patch.annotations.set(VISIT_ANNOTATION, Some(with_walk(view, visit, walk).to_text()));
        }
    }
    Decision::act(Reason::Moving { to }, Action::PatchNode(patch))
}

/// As much of a log as people read in a list of events.
pub(super) fn ends_with(log: &str) -> String {
    const BYTES: usize = 500;
    let end = &log[log.ceil_char_boundary(log.len().saturating_sub(BYTES))..];
    if end.is_empty() { String::new() } else { format!(". Its log ends with: {end}") }
}

/// Writes record and label again, without a transition.
pub(super) fn rewrite(view: &View<'_>, member: &Member<'_>, visit: &Visit, walk: Walk) -> Action {
    Action::PatchNode(record_patch(view, member, visit, walk))
}

pub(super) fn record_patch(view: &View<'_>, member: &Member<'_>, visit: &Visit, walk: Walk) -> NodePatch {
    let mut patch = base_patch(view, member, walk.state);
    (patch.to, patch.event) = (None, None);
    patch.annotations.set(VISIT_ANNOTATION, Some(with_walk(view, visit, walk).to_text()));
    patch
}

/// The event of a write that people should know of.
pub(super) fn warning(view: &View<'_>, message: String) -> Event {
    Event { warning: true, reason: view.policy.keys.event_reason.clone(), message }
}

fn with_walk(view: &View<'_>, visit: &Visit, walk: Walk) -> Visit {
    let mut visit = visit.clone();
    if matches!(walk.state, State::PodRestartRequired | State::ValidationRequired) {
        // It may be another version that comes now than the one that it set out for.
        visit.rollout = view.rollout_of_visits(visit.early).or(visit.rollout);
    }
    visit.drivers.insert(view.policy.driver.clone(), walk);
    visit
}

/// A patch that moves the state label, with everything that goes with it in any state.
pub(super) fn base_patch(view: &View<'_>, member: &Member<'_>, to: State) -> NodePatch {
    let keys = &view.policy.keys;
    let mut annotations = Changes::default();
    if !member.announced {
        annotations.set(&keys.enabled, Some("true".to_owned()));
    }
    NodePatch {
        node: member.name.clone(),
        pool: view.pool.name.clone(),
        seen: member.node.version,
        labels: Changes::from((keys.state.as_str(), Some(to.as_str().to_owned()))),
        annotations,
        unschedulable: None,
        taints: None,
        to: Some(Transition { driver: view.policy.driver.clone(), from: member.state(), to }),
        event: Some(Event {
            warning: false,
            reason: keys.event_reason.clone(),
            message: transition_message(to),
        }),
        unless_used: None,
    }
}
