//! What must hold for a plan of any facts, however they came to be: it is made, it is the same twice, it breaks no promise,
//! and every node's reason can be explained.

use pitcrew_core::check::violations;
use pitcrew_core::policy::{self, Pool};
use pitcrew_core::reason::{About, Kind, advice, culprits, next};
use pitcrew_core::snapshot::Snapshot;
use pitcrew_core::{Plan, plan};

/// Plans, checks and explains.
pub(crate) fn judge(snapshot: &Snapshot) -> Plan {
    let (plan, again) = (plan(snapshot), pitcrew_core::plan(snapshot));
    assert_eq!(plan.actions, again.actions, "two plans of the same facts");
    assert!(plan.pools.iter().map(|pool| &pool.nodes).eq(again.pools.iter().map(|pool| &pool.nodes)));
    assert_eq!(violations(snapshot, &plan), [], "{plan:#?}");
    assert!(plan.wake_at.is_none_or(|at| at > snapshot.now), "wakes in the past: {:?}", plan.wake_at);
    let pools = policy::resolve(&snapshot.sources, snapshot.daemon_sets.values(), &snapshot.namespace);
    for pool in &pools {
        explain(snapshot, pool, &plan);
    }
    plan
}

fn explain(snapshot: &Snapshot, pool: &Pool, plan: &Plan) {
    let planned =
        plan.pools.iter().find(|planned| planned.name == pool.name && planned.source == pool.source);
    let planned = planned.unwrap_or_else(|| panic!("{} is not in the plan", pool.source));
    for (node, verdict) in &planned.nodes {
        let about = About { snapshot, pool, plan: planned, node, verdict, many_drivers: false };
        let reason = &verdict.reason;
        assert!(!reason.to_string().is_empty(), "{reason:?} has no words");
        assert!(!reason.code().is_empty());
        let done = reason.kind() == Kind::Done;
        assert_eq!(next(&about).is_none(), done, "what happens next to {node}: {reason:?}");
        assert_eq!(culprits(&about).is_empty(), done, "who is responsible for {node}: {reason:?}");
        for advice in advice(&about) {
            assert!(!advice.command.is_empty() && !advice.what.is_empty());
        }
    }
}
