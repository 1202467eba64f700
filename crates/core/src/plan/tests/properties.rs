//! What holds for any fleet, whatever people and programs did to it before.

use std::collections::BTreeSet;

use proptest::prelude::*;
use serde_json::json;

use super::fixture::*;
use super::judge::{checked_step, explains, together_and_in_time, within_limits};
use super::sketch::{amounts, deeds, sketches};
use crate::action::Action;
use crate::contract::State;
use crate::names::{NodeName, ObjectName};
use crate::plan::plan;

/// A few hundred cases; `PROPTEST_CASES=20000` for a longer look, `PROPTEST_RNG_SEED` to see one again.
fn config() -> ProptestConfig {
    let default = ProptestConfig::default();
    ProptestConfig { cases: default.cases.max(400), failure_persistence: None, ..default }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn no_plan_breaks_a_promise_and_every_member_has_one_verdict(sketch in sketches()) {
        let fleet = sketch.fleet(false);
        let plan = fleet.plan(); // asserts that there are no violations
        let found: Vec<_> = plan.pools.iter().map(|p| (&p.name, p.nodes.keys().collect::<BTreeSet<_>>())).collect();
        let expected = sketch.pools();
        prop_assert_eq!(found.len(), expected.len());
        for ((name, nodes), (pool, members)) in found.iter().zip(&expected) {
            prop_assert_eq!(*name, pool);
            let members: BTreeSet<NodeName> = members.iter().map(|i| format!("gpu-{i}").into()).collect();
            prop_assert_eq!(nodes.iter().copied().cloned().collect::<BTreeSet<_>>(), members);
        }
    }

    #[test]
    fn every_reason_has_words_and_who_is_not_done_has_a_culprit_and_a_next_step(sketch in sketches()) {
        let fleet = sketch.fleet(false);
        explains(&fleet.snapshot, &fleet.plan())?;
    }

    #[test]
    fn starts_never_exceed_either_limit_counted_from_the_facts(sketch in sketches()) {
        let fleet = sketch.fleet(false);
        within_limits(&sketch, &fleet.snapshot, &fleet.plan())?;
    }

    #[test]
    fn atoms_are_never_split_and_nothing_starts_in_a_closed_window(sketch in sketches(), later in 0..3 * 86_400_i64) {
        let mut fleet = sketch.fleet(false);
        fleet.wait(later);
        together_and_in_time(&sketch, &fleet.snapshot, &fleet.plan())?;
    }

    #[test]
    fn walks_follow_the_table_and_visits_keep_their_beginning_whatever_happens_meanwhile(
        sketch in sketches(),
        deeds in deeds(),
    ) {
        let mut fleet = sketch.fleet(true);
        for (serial, (node, deed)) in (0..).zip(deeds) {
            for _ in 0..3 {
                checked_step(&sketch, &mut fleet)?;
            }
            deed.happen(&mut fleet, &format!("gpu-{}", node % sketch.nodes.len()), serial);
        }
        // Left alone, it comes to rest again.
        let bound = 150 * (sketch.nodes.len() + 2);
        let mut rests = false;
        for _ in 0..bound {
            let wake_at = fleet.plan().wake_at;
            if !checked_step(&sketch, &mut fleet)? {
                let Some(at) = wake_at else { rests = true; break };
                fleet.snapshot.now = fleet.snapshot.now.max(at);
            }
        }
        prop_assert!(rests, "no end after {} passes:\n{}", bound, fleet.story.join("\n"));
        explains(&fleet.snapshot, &fleet.plan())?;
    }

    #[test]
    fn no_plan_does_two_things_to_one_object(sketch in sketches()) {
        let plan = sketch.fleet(false).plan();
        let mut seen = BTreeSet::new();
        for object in plan.actions.iter().filter_map(Action::object) {
            prop_assert!(seen.insert(object.clone()), "{:?} twice: {:#?}", object, plan.actions);
        }
    }

    #[test]
    fn the_next_moment_that_matters_is_always_ahead(sketch in sketches(), later in 0..4000_i64) {
        let mut fleet = sketch.fleet(false);
        fleet.wait(later);
        let now = fleet.snapshot.now;
        prop_assert!(fleet.plan().wake_at.is_none_or(|at| at > now));
    }

    #[test]
    fn nothing_is_done_to_an_object_that_is_busy(sketch in sketches()) {
        let fleet = sketch.fleet(false);
        for object in fleet.plan().actions.iter().filter_map(Action::object) {
            prop_assert!(!fleet.snapshot.is_busy(&object));
        }
    }

    #[test]
    fn the_same_facts_make_the_same_plan_in_whatever_order_they_came(
        (sketch, order) in sketches().prop_flat_map(|sketch| {
            let order: Vec<usize> = (0..sketch.nodes.len()).collect();
            (Just(sketch), Just(order).prop_shuffle())
        })
    ) {
        let told = |fleet: &Fleet| format!("{:?}", plan(&fleet.snapshot));
        let fleet = sketch.fleet(false);
        prop_assert_eq!(told(&fleet), told(&fleet));
        // UIDs of validators carry the order of arrival.
        let normal = |mut fleet: Fleet| {
            for pod in fleet.snapshot.pods.values_mut().flat_map(|pods| pods.values_mut()) {
                pod.uid = format!("uid-{}", pod.name).into();
            }
            fleet
        };
        prop_assert_eq!(told(&normal(fleet)), told(&normal(sketch.fleet_in_order(false, &order))));
    }

    #[test]
    fn any_fleet_comes_to_rest_and_stays_there(sketch in sketches()) {
        let mut fleet = sketch.fleet(true);
        fleet.play(); // checks every pass for violations, and that the number of passes is bounded
        prop_assert_eq!(fleet.decisions(), Vec::<String>::new());
        fleet.wait(86_400);
        prop_assert_eq!(fleet.decisions(), Vec::<String>::new());
    }

    #[test]
    fn at_rest_everything_is_explained(sketch in sketches()) {
        let mut fleet = sketch.fleet(true);
        fleet.play();
        for pool in &fleet.plan().pools {
            for (name, verdict) in &pool.nodes {
                let rests = !matches!(verdict.reason.code(), "moving" | "conflict" | "api-error");
                prop_assert!(rests, "{}: {}", name, verdict.reason);
                prop_assert!(verdict.reason.until().is_none(), "{}: {}", name, verdict.reason);
            }
        }
    }

    #[test]
    fn a_whole_upgrade_never_exceeds_either_limit(
        count in 1..9_usize,
        parallel in 0..4_u32,
        unavailable in amounts(),
        foreign in prop::collection::btree_set(0..9_usize, 0..3),
        crashing in prop::collection::btree_set(0..9_usize, 0..3),
        working in prop::collection::btree_set(0..9_usize, 0..9),
    ) {
        let options = json!({"maxParallelUpgrades": parallel, "maxUnavailable": unavailable.json()});
        let mut fleet = (0..count).fold(Fleet::new().policy(options), |fleet, i| {
            let mut spec = node(&format!("gpu-{i}")).outdated();
            if foreign.contains(&i) {
                spec = spec.cordoned();
            }
            if working.contains(&i) {
                spec = spec.pod(pod(&format!("train-{i}")));
            }
            fleet.with(spec)
        });
        fleet.crashes_on = crashing.iter().map(|i| format!("gpu-{i}")).collect();
        let out_before = foreign.iter().filter(|i| **i < count).count();
        for _ in 0..200 * count {
            let ledger = fleet.pool().ledger;
            prop_assert!(parallel == 0 || ledger.moving <= parallel as usize);
            prop_assert!(ledger.out <= ledger.max_out.max(out_before), "{ledger:?}");
            // The ledger's own sums, counted again from the facts.
            let states: Vec<State> = fleet.pool().nodes.values().map(|v| v.state).collect();
            prop_assert_eq!(ledger.moving, states.iter().filter(|s| s.in_flight()).count());
            let wake_at = fleet.plan().wake_at;
            if !fleet.step() {
                let Some(at) = wake_at else { break };
                fleet.snapshot.now = fleet.snapshot.now.max(at);
            }
        }
        let brake = fleet.pool().ledger.max_out == 0;
        let stuck = fleet.pool().nodes.values().any(|v| v.state == State::UpgradeRequired);
        let full = fleet.pool().ledger.out >= fleet.pool().ledger.max_out;
        let stopped = fleet.pool().ledger.failed > fleet.pool().ledger.max_failed;
        prop_assert!(!stuck || brake || full || stopped, "{}", fleet.screen());
        for name in (0..count).filter(|i| foreign.contains(i)).map(|i| format!("gpu-{i}")) {
            prop_assert!(fleet.snapshot.nodes[name.as_str()].unschedulable, "somebody else's cordon survives");
        }
    }

    #[test]
    fn evictions_of_one_pass_never_exceed_a_budget(sketch in sketches()) {
        let fleet = sketch.fleet(false);
        let Some(budget) = fleet.snapshot.budgets.get(&ObjectName::new("work", "web")) else { return Ok(()) };
        let plan = fleet.plan();
        let counts = |pod: &&crate::action::PodRef| {
            let pod = &fleet.snapshot.pods[&pod.node][&pod.name];
            pod.ready && pod.labels.get("app").is_some_and(|app| app == "web")
        };
        let evictions = plan.actions.iter().filter_map(|action| match action {
            Action::Evict(pod) => Some(pod),
            _ => None,
        });
        let evicted = evictions.filter(counts).count();
        prop_assert!(i32::try_from(evicted).unwrap() <= budget.allowed);
    }
}
