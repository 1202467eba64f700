//! `validation-required`: the new driver proves itself, within `limits.validation`. A failure stays one (W1).

use super::members::{Freshness, Member};
use super::patch::go;
use super::pool::View;
use super::removal::pod_ref;
use super::walk::{Decision, deadline, fail, ran_out};
use super::{clients, gates, reboot};
use crate::action::{Action, DeleteWhy};
use crate::contract::State;
use crate::reason::Reason;
use crate::snapshot::{Object, Pod};
use crate::visit::{Cause, Finding, Visit, Walk};

pub(super) fn step(view: &View<'_>, member: &Member<'_>, (visit, walk): (&Visit, &Walk)) -> Decision {
    let limit = gates::validation_limit(view, member, visit, walk);
    let until = deadline(view, walk, limit);
    if member.sync == Freshness::Outdated || member.waits_for_load {
        // A newer version came, or the driver starts once more, after a reboot perhaps.
        let back = State::PodRestartRequired;
        return go(view, member, back, Some(walk.enter(back, view.snapshot.now)));
    }
    if let Some(decision) = reboot::wait(view, member, walk, limit) {
        return decision;
    }
    // A validator that looks while the clients are away finds nothing.
    let ready = member.node.ready && member.driver_ready && member.sync == Freshness::InSync;
    if ready && let Some(decision) = clients::come_back(view, member, visit, walk, until) {
        return decision;
    }
    let (found, stale) = match missing(view, member) {
        Missing::Nothing => {
            if let Some(decision) = gates::prove(view, member, (visit, walk), until) {
                return decision;
            }
            let next = State::UncordonRequired;
            return go(view, member, next, Some(walk.enter(next, view.snapshot.now)));
        }
        Missing::Stale(pod) => {
            let what = format!("validator pod {} proved the old driver; it is replaced", pod.name);
            (Finding::about(&pod.name, what), Some(pod))
        }
        Missing::Other(found) => (found, None),
    };
    if ran_out(view, until) {
        return fail(view, member, walk, Cause::NotValidated { found, seconds: limit.as_secs() });
    }
    let reason = Reason::Validating { found, until: Some(until) };
    let Some(pod) = stale else { return Decision::stay(reason) };
    let object = Object::Pod(pod.name.clone());
    if view.snapshot.is_busy(&object) {
        return Decision::stay(reason);
    }
    if let Some(setback) =
        view.snapshot.setbacks.get(&object).filter(|setback| setback.retry_at > view.snapshot.now)
    {
        return Decision { wake_at: Some(setback.retry_at.min(until)), ..Decision::stay(reason) };
    }
    let pod = pod_ref(pod);
    Decision::act(reason, Action::Delete(pod, DeleteWhy::StaleValidator))
}

/// What is missing for a proof.
enum Missing<'a> {
    Nothing,
    /// A validator that ran before the driver it should prove.
    Stale(&'a Pod),
    Other(Finding),
}

fn missing<'a>(view: &View<'a>, member: &Member<'a>) -> Missing<'a> {
    if !member.node.ready {
        return Missing::Other(Finding::plain("the node is not Ready"));
    }
    let Some(driver) = member.pod.filter(|_| member.driver_ready && member.sync == Freshness::InSync) else {
        let what = "the driver pod is not ready any more";
        let about = member.pod.map(|pod| pod.name.clone());
        return Missing::Other(Finding { about, ..Finding::plain(what) });
    };
    let Some(selector) = &view.policy.validator else { return Missing::Nothing };
    let validators = member.pods();
    let validators: Vec<&Pod> = validators
        .filter(|pod| kube::core::SelectorExt::matches(selector, &pod.labels) && !pod.is_finished())
        .collect();
    if validators.is_empty() {
        return Missing::Other(Finding::plain(format!("no validator pod ({selector}) on this node")));
    }
    if let Some(stale) =
        validators.iter().find(|pod| pod.deleting.is_none() && pod.started < driver.started && pod.ready)
    {
        return Missing::Stale(stale);
    }
    match validators.iter().find(|pod| !pod.ready || pod.deleting.is_some()) {
        Some(pod) => {
            let what = format!("validator pod {} is not ready yet", pod.name);
            Missing::Other(Finding::about(&pod.name, what))
        }
        None => Missing::Nothing,
    }
}
