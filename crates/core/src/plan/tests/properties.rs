//! What holds for any fleet, whatever people and programs did to it before.

use std::collections::BTreeSet;

use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Value, json};

use super::fixture::*;
use crate::action::Action;
use crate::contract::State;
use crate::names::{NodeName, ObjectName};
use crate::plan::plan;
use crate::snapshot::{Object, Pending, Phase, SetbackKind};

/// A fleet as proptest draws it.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is drawn by itself")]
struct Sketch {
    nodes: Vec<NodeSketch>,
    parallel: u32,
    unavailable: Value,
    paused: bool,
    drain: Option<bool>,
    timeout_delete: bool,
    wait_for_jobs: bool,
    budget: Option<i32>,
    two_drivers: bool,
    new_version: bool,
}

/// A node as proptest draws it: any state, with whatever does or does not belong to it.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is drawn by itself")]
struct NodeSketch {
    state: State,
    other_state: State,
    /// With its visit record, if that state has one.
    recorded: bool,
    label: LabelSketch,
    outdated: bool,
    driver: DriverSketch,
    cordoned: Option<bool>,
    our_cordon: bool,
    ready: bool,
    skipped: bool,
    requested: bool,
    waits_for_load: bool,
    crashes: bool,
    stale_validator: bool,
    pods: Vec<PodSketch>,
    api: ApiSketch,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum LabelSketch {
    Honest,
    Removed,
    Retry,
    Nonsense,
    Scribbled,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum DriverSketch {
    Ready,
    NotReady,
    Missing,
    Replaced,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum ApiSketch {
    Quiet,
    Writing,
    Stale,
    Refuses,
}

#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is drawn by itself")]
struct PodSketch {
    bare: bool,
    empty_dir: bool,
    daemon: bool,
    budgeted: bool,
    drain_skip: bool,
    gpus: u32,
    phase: Phase,
    /// It came only now.
    new: bool,
}

fn pods() -> impl Strategy<Value = PodSketch> {
    let phase =
        prop_oneof![6 => Just(Phase::Running), 1 => Just(Phase::Pending), 1 => Just(Phase::Succeeded)];
    let rarely = || prop::bool::weighted(0.15);
    (rarely(), rarely(), rarely(), any::<bool>(), rarely(), 0..3_u32, phase, rarely()).prop_map(
        |(bare, empty_dir, daemon, budgeted, drain_skip, gpus, phase, new)| PodSketch {
            bare,
            empty_dir,
            daemon,
            budgeted,
            drain_skip,
            gpus,
            phase,
            new,
        },
    )
}

fn nodes() -> impl Strategy<Value = NodeSketch> {
    let label = prop_oneof![
        12 => Just(LabelSketch::Honest),
        1 => Just(LabelSketch::Removed),
        1 => Just(LabelSketch::Retry),
        1 => Just(LabelSketch::Nonsense),
        1 => Just(LabelSketch::Scribbled),
    ];
    let driver = prop_oneof![
        6 => Just(DriverSketch::Ready),
        1 => Just(DriverSketch::NotReady),
        1 => Just(DriverSketch::Missing),
        1 => Just(DriverSketch::Replaced),
    ];
    let api = prop_oneof![
        9 => Just(ApiSketch::Quiet),
        1 => Just(ApiSketch::Writing),
        1 => Just(ApiSketch::Stale),
        1 => Just(ApiSketch::Refuses),
    ];
    let rarely = || prop::bool::weighted(0.15);
    let mostly = || prop::bool::weighted(0.85);
    let state = || select(State::ALL.to_vec());
    let place = (state(), state(), mostly(), label, any::<bool>(), driver);
    let wishes = (rarely(), rarely());
    let service = (prop::option::weighted(0.2, any::<bool>()), mostly(), mostly(), rarely(), wishes);
    (place, service, rarely(), rarely(), prop::collection::vec(pods(), 0..3), api).prop_map(
        |(place, service, crashes, stale_validator, pods, api)| {
            let (state, other_state, recorded, label, outdated, driver) = place;
            let (cordoned, our_cordon, ready, skipped, (requested, waits_for_load)) = service;
            NodeSketch {
                state,
                other_state,
                recorded,
                label,
                outdated,
                driver,
                cordoned,
                our_cordon,
                ready,
                skipped,
                requested,
                waits_for_load,
                crashes,
                stale_validator,
                pods,
                api,
            }
        },
    )
}

fn amounts() -> impl Strategy<Value = Value> {
    prop_oneof![(0..6_u32).prop_map(|n| json!(n)), (0..=100_u32).prop_map(|p| json!(format!("{p}%")))]
}

fn sketches() -> impl Strategy<Value = Sketch> {
    let fleet = prop::collection::vec(nodes(), 1..8);
    let limits = (0..4_u32, amounts(), prop::bool::weighted(0.1));
    let ways = (prop::option::of(any::<bool>()), any::<bool>(), any::<bool>(), prop::option::of(0..3_i32));
    (fleet, limits, ways, any::<bool>(), any::<bool>()).prop_map(
        |(nodes, limits, ways, two_drivers, new_version)| {
            let (parallel, unavailable, paused) = limits;
            let (drain, timeout_delete, wait_for_jobs, budget) = ways;
            Sketch {
                nodes,
                parallel,
                unavailable,
                paused,
                drain,
                timeout_delete,
                wait_for_jobs,
                budget,
                two_drivers,
                new_version,
            }
        },
    )
}

impl PodSketch {
    fn spec(&self, name: &str) -> PodSpec {
        let mut spec = pod(name).gpus(self.gpus).phase(self.phase);
        if self.bare {
            spec = spec.bare();
        }
        if self.daemon {
            spec = spec.of_daemon_set();
        }
        if self.empty_dir {
            spec = spec.with_empty_dir();
        }
        if self.budgeted {
            spec = spec.label("app", "web");
        }
        if self.drain_skip {
            spec = spec.label(&keys("gpu").drain_skip, "true");
        }
        if self.new { spec.created(noon()) } else { spec }
    }
}

impl NodeSketch {
    fn spec(&self, name: &str) -> NodeSpec {
        let mut spec = node(name);
        if self.outdated {
            spec = spec.outdated();
        }
        if self.recorded {
            spec = spec.at(self.state);
            if self.state == State::UpgradeFailed
                || (self.state.in_flight() && self.state != State::CordonRequired)
            {
                spec = spec.visit(|visit| visit.holds.cordon = self.our_cordon);
            }
        } else {
            spec = spec.labelled(self.state);
        }
        spec = match self.cordoned {
            Some(true) => spec.cordoned(),
            Some(false) => spec.uncordoned(),
            None => spec,
        };
        if !self.ready {
            spec = spec.not_ready();
        }
        if self.skipped {
            spec = spec.skipped();
        }
        if self.requested {
            spec = spec.annotation(&keys("gpu").requested, "true");
        }
        if self.waits_for_load {
            spec = spec.annotation(&keys("gpu").safe_load, "true");
        }
        if self.other_state != State::Unknown {
            spec = spec.label(&keys("ofed").state, self.other_state.as_str());
        }
        self.pods.iter().enumerate().fold(spec, |spec, (i, pod)| spec.pod(pod.spec(&format!("{name}-{i}"))))
    }

    /// What cannot be said of a node in the making.
    fn finish(&self, fleet: &mut Fleet, name: &str, quiet: bool) {
        match self.label {
            LabelSketch::Honest => {}
            LabelSketch::Removed => fleet.set_label(name, ""),
            LabelSketch::Retry => fleet.set_label(name, "upgrade-required"),
            LabelSketch::Nonsense => fleet.set_label(name, "upgrade-perhaps"),
            LabelSketch::Scribbled => fleet.set_record(name, "scribble"),
        }
        match self.driver {
            DriverSketch::Ready => {}
            DriverSketch::NotReady => fleet.driver_mut(name).ready = false,
            DriverSketch::Missing => fleet.remove_pods(name, |pod| pod.name.name.contains("gpu-driver")),
            DriverSketch::Replaced => fleet.driver_mut(name).uid = "by-hand".into(),
        }
        if self.stale_validator {
            fleet.validator_mut(name).started = Some(after(-9000));
        }
        if self.crashes {
            fleet.crashes_on.insert(name.to_owned());
        }
        let object = Object::Node(name.into());
        match self.api {
            _ if quiet => {}
            ApiSketch::Quiet => {}
            ApiSketch::Writing => {
                let pending =
                    Pending { moving_to: Some(("gpu".into(), State::CordonRequired)), on_node: None };
                fleet.snapshot.in_flight.insert(object, pending);
            }
            ApiSketch::Stale => fleet.setback(object, SetbackKind::Stale, after(5)),
            ApiSketch::Refuses => fleet.setback(object, SetbackKind::Error("no".into()), after(5)),
        }
    }
}

impl Sketch {
    fn options(&self) -> Value {
        let mut options = json!({
            "autoUpgrade": !self.paused,
            "maxParallelUpgrades": self.parallel,
            "maxUnavailable": self.unavailable,
            "gpuPodDeletion": {"timeoutAction": if self.timeout_delete { "Delete" } else { "Fail" }},
        });
        if let Some(force) = self.drain {
            options["drain"] = json!({"enable": true, "force": force, "deleteEmptyDir": force});
        }
        if self.wait_for_jobs {
            options["waitForCompletion"] = json!({"podSelector": "app=web", "timeoutSeconds": 30});
        }
        options
    }

    /// The fleet; `quiet` without writes under way or refused.
    fn fleet(&self, quiet: bool) -> Fleet {
        self.fleet_in_order(quiet, &(0..self.nodes.len()).collect::<Vec<_>>())
    }

    fn fleet_in_order(&self, quiet: bool, order: &[usize]) -> Fleet {
        let mut fleet = if self.two_drivers {
            let ofed = json!({"driver": {"name": "ofed", "daemonSets": {"selector": "app=mofed"}}, "upgradePolicy": self.options()});
            let gpu = json!({"driver": {"name": "gpu", "validator": {"selector": "app=nvidia-operator-validator"}}, "upgradePolicy": self.options()});
            Fleet::without_policy()
                .daemon_set("ofed", "mofed")
                .driver_policy("gpu", gpu)
                .driver_policy("ofed", ofed)
        } else {
            Fleet::new().policy(self.options())
        };
        if self.new_version {
            fleet.publish("gpu", 3, "newer");
        }
        if let Some(allowed) = self.budget {
            fleet = fleet.budget("web", allowed);
        }
        for i in order {
            let (name, sketch) = (format!("gpu-{i}"), &self.nodes[*i]);
            fleet = fleet.with(sketch.spec(&name));
            sketch.finish(&mut fleet, &name, quiet);
        }
        // Versions differ with the order of arrival; what is planned must not.
        for node in fleet.snapshot.nodes.values_mut() {
            node.version = 1000.into();
        }
        for setback in fleet.snapshot.setbacks.values_mut() {
            setback.seen = 1000.into();
        }
        fleet
    }
}

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
        let members: BTreeSet<&NodeName> = fleet.snapshot.nodes.keys().collect();
        prop_assert_eq!(plan.pools.len(), if sketch.two_drivers { 2 } else { 1 });
        for pool in &plan.pools {
            prop_assert_eq!(pool.nodes.keys().collect::<BTreeSet<_>>(), members.clone());
        }
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
        let options = json!({"maxParallelUpgrades": parallel, "maxUnavailable": unavailable});
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
