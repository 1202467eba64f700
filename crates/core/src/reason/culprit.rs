//! Who is responsible: the objects that keep a node where it is, the most important one first.

use super::about::{About, Thing};
use super::{Limit, Reason};
use crate::contract::{LEASE_NAME, State, nvsentinel};
use crate::matrix::WhyUnlisted;
use crate::names::ObjectName;
use crate::visit::Cause;

/// The objects that keep a node where it is. Only a node that is done has none.
pub fn culprits(about: &About<'_>) -> Vec<Thing> {
    match about.reason() {
        Reason::UpToDate | Reason::SameVersion { .. } => vec![],
        Reason::DriverNotReady { pod, .. }
        | Reason::PodStuck { pod, .. }
        | Reason::DriverStopping { pod, .. }
        | Reason::DriverStarting { pod, .. } => vec![Thing::pod(pod)],
        Reason::Moving { .. } | Reason::Writing | Reason::ApiError { .. } | Reason::Conflict => {
            vec![controller(about)]
        }
        Reason::RevisionPending { daemon_set } | Reason::NoDriverPod { daemon_set: Some(daemon_set), .. } => {
            vec![Thing::namespaced("DaemonSet", daemon_set)]
        }
        Reason::NoSlot { limit, .. } => slot_holders(about, limit),
        Reason::WindowClosed { .. } | Reason::AtomTooLarge { .. } => vec![Thing::from(&about.pool.source)],
        Reason::AtomWaits { node, .. } => vec![Thing::node(node)],
        Reason::SpreadFull { out, .. } => {
            std::iter::once(Thing::from(&about.pool.source)).chain(out.iter().map(Thing::node)).collect()
        }
        Reason::BreakerTripped => {
            vec![Thing::namespaced("ConfigMap", &ObjectName::new(nvsentinel::NAMESPACE, nvsentinel::BREAKER))]
        }
        Reason::NoDriverPod { daemon_set: None, .. }
        | Reason::Quarantined { .. }
        | Reason::Skipped { .. }
        | Reason::OtherDriver { .. }
        | Reason::NodeNotReady { .. }
        | Reason::NeedsReboot { .. }
        | Reason::FailedWithoutRecord
        | Reason::UnknownLabel { .. }
        | Reason::LabelChanged { .. }
        | Reason::VisitUnreadable { .. } => vec![Thing::node(about.node)],
        Reason::WaitingForJobs { pods, .. }
        | Reason::Checkpointing { pods, .. }
        | Reason::PodsLeaving { pods, .. } => pods.iter().map(Thing::pod).collect(),
        Reason::TooManyFailed { .. } => about.in_the_way(|_, verdict| verdict.state == State::UpgradeFailed),
        Reason::StageClosed { .. } | Reason::StageFailed { .. } => vec![rollout(about)],
        Reason::Condemned { rollout, .. } | Reason::LeftAlone { rollout } | Reason::Aborted { rollout } => {
            vec![Thing { kind: "Rollout", namespace: None, name: rollout.clone() }]
        }
        Reason::NotInMatrix { unlisted } => match &unlisted.why {
            WhyUnlisted::NoVersion { daemon_set } => vec![Thing::namespaced("DaemonSet", daemon_set)],
            _ => vec![Thing::namespaced("ConfigMap", &unlisted.place.config_map)],
        },
        Reason::BudgetBlocks { budget, pod, .. } | Reason::BudgetNever { budget, pod, .. } => {
            vec![Thing::namespaced("PodDisruptionBudget", budget), Thing::pod(pod)]
        }
        Reason::CannotBeEmptied { found }
        | Reason::ClientsComeBack { found, .. }
        | Reason::ClientsStale { found, .. } => {
            vec![found.about.as_ref().map_or_else(|| Thing::node(about.node), Thing::pod)]
        }
        // Without a pod on the node it is the policy that asks for one.
        Reason::Validating { found, .. } => {
            vec![found.about.as_ref().map_or_else(|| Thing::from(&about.pool.source), Thing::pod)]
        }
        Reason::Paused => vec![about.switch()],
        Reason::Failed { cause } => of_failure(about, cause),
        Reason::PoolFrozen { why } => vec![freezer(about, why)],
        Reason::TwoPolicies { pools } => pools.iter().filter_map(|pool| Thing::read(pool)).collect(),
    }
}

/// The pod that a failure is about, after the budget that still keeps it, if one does.
fn of_failure(about: &About<'_>, cause: &Cause) -> Vec<Thing> {
    let Some(pod) = &cause.found().about else { return vec![Thing::node(about.node)] };
    let held = matches!(cause, Cause::PodsDidNotLeave { .. });
    let budget = about.closed_budget(pod).filter(|_| held);
    let budget = budget.map(|(name, _)| Thing::namespaced("PodDisruptionBudget", name));
    budget.into_iter().chain([Thing::pod(pod)]).collect()
}

/// The rollout that says how far the stages are; before there is one, the policy.
fn rollout(about: &About<'_>) -> Thing {
    let newest = crate::plan::newest_rollout(about.snapshot, about.pool);
    let rollout = newest.map(|(name, _)| Thing { kind: "Rollout", namespace: None, name });
    rollout.unwrap_or_else(|| Thing::from(&about.pool.source))
}

/// The controller, known by its Lease.
fn controller(about: &About<'_>) -> Thing {
    Thing::namespaced("Lease", &ObjectName::new(&about.snapshot.namespace, LEASE_NAME))
}

/// The policy that sets the limit, then the nodes that use it up.
fn slot_holders(about: &About<'_>, limit: &Limit) -> Vec<Thing> {
    let is_out = |name: &_| about.snapshot.nodes.get(name).is_some_and(crate::snapshot::Node::is_out);
    let nodes = match limit {
        Limit::MaxParallelUpgrades(_) | Limit::Stage { .. } => {
            about.in_the_way(|_, verdict| verdict.state.in_flight())
        }
        Limit::MaxUnavailable { .. } => {
            about.in_the_way(|name, verdict| verdict.state.in_flight() || is_out(name))
        }
    };
    std::iter::once(Thing::from(&about.pool.source)).chain(nodes).collect()
}

/// What a whole pool stands still for.
fn freezer(about: &About<'_>, why: &str) -> Thing {
    let operator = about.snapshot.gpu_operator.live(about.snapshot.now);
    let operator = operator.and_then(|who| Thing::read(who.split(' ').next()?));
    let rolling = || {
        let sets = about.snapshot.daemon_sets.values().filter(|ds| !ds.on_delete);
        sets.map(|ds| &ds.name).find(|name| why.contains(&format!("daemonset/{name} ")))
    };
    operator
        .or_else(|| rolling().map(|name| Thing::namespaced("DaemonSet", name)))
        .unwrap_or_else(|| Thing::from(&about.pool.source))
}
