//! What is played for a seed: a fleet, a policy, how the machines behave, and what goes wrong when.
//!
//! Everything is drawn from the seed, each topic from a generator of its own: a case with one kind of fault less has
//! the others as before. That is what makes shrinking work.

use std::collections::BTreeSet;
use std::time::Duration;

use fastrand::Rng;
use pitcrew_core::version::DriverVersion;
use serde_json::{Value, json};

use super::fault::Fault;
use super::manner::{self, Manner};
use super::trouble::{self, Trouble};
use super::world::POOL;
use crate::actors::{Behaviour, DraIdentity, DriverFault, GateOutcome, GateRule, Nodes, Timing};
use crate::fleet::{Fleet, Workload};

/// The driver that runs to begin with.
pub const FROM: &str = "535.104.05";
/// The driver that is asked for.
pub const TO: &str = "550.54.14";
/// The driver that is asked for when the version changes again.
pub const AGAIN: &str = "550.90.07";

/// The policy of the fleet, or of one half of it, …
pub(super) const FIRST: &str = "gpu";
/// … and that of the other half.
const SECOND: &str = "other";
/// So many machines may join.
const JOINING_MAX: u32 = 4;

/// So many nodes at most, unless told otherwise.
const NODES_MAX: usize = 20;
/// How long things go wrong, unless told otherwise.
const STORM_SECONDS: std::ops::RangeInclusive<u64> = 20..=120;

/// What is asked for; the rest is drawn.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wish {
    /// So many nodes.
    pub nodes: Option<usize>,
    /// Just these faults.
    pub faults: Option<BTreeSet<Fault>>,
    /// Faults for so many minutes.
    pub minutes: Option<u32>,
    /// A version goes as fast as the limits allow: no stages, windows or atoms.
    pub plain: bool,
}

/// All that a run is made from.
#[derive(Clone, Debug)]
pub struct Case {
    /// The seed.
    pub seed: u64,
    /// What can go wrong.
    pub faults: BTreeSet<Fault>,
    /// For how long.
    pub storm: Duration,
    /// The fleet.
    pub fleet: Fleet,
    /// The machines.
    pub behaviour: Behaviour,
    /// The DriverPolicy's spec; without one the ClusterPolicy rules.
    pub policy: Option<Value>,
    /// The policy of the other half of the fleet, if it has one of its own.
    pub second: Option<Value>,
    /// What goes wrong when, from the beginning of the storm.
    pub troubles: Vec<(Duration, Trouble)>,
    /// How long after the beginning the new version is asked for.
    pub asked_after: Duration,
    /// How it reaches the fleet, where that is not simply as fast as the limits allow.
    pub manner: Option<Manner>,
}

/// A generator for one topic.
pub(super) fn draw(seed: u64, topic: &str) -> Rng {
    let mixed = topic.bytes().fold(seed ^ 0x9e37_79b9_7f4a_7c15, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3).rotate_left(5)
    });
    Rng::with_seed(mixed)
}

impl Case {
    /// The case of a seed.
    pub fn new(seed: u64, wish: &Wish) -> Self {
        let faults = faults(seed, wish);
        let mut fleet = fleet(seed, wish, &faults);
        let storm = match wish.minutes {
            Some(minutes) => Duration::from_mins(u64::from(minutes)),
            None => Duration::from_secs(draw(seed, "storm").u64(STORM_SECONDS)),
        };
        let mut behaviour = behaviour(seed, &faults);
        behaviour.prometheus = Some(manner::IN_BOUNDS);
        let mut policy = policy(seed, &fleet);
        let mannered = manner::has_one(seed) || faults.iter().any(|fault| fault.needs_a_manner());
        let manner = policy.as_mut().filter(|_| mannered && !wish.plain).map(|policy| {
            let manner = Manner::new(seed, &fleet, &faults);
            adopt(&manner, &mut fleet, policy);
            manner
        });
        let second = policy.as_mut().filter(|_| manner.is_none() && !wish.plain && has_two(seed, &fleet));
        let second = second.map(|policy| divide(seed, &mut fleet, policy));
        let troubles = trouble::draw_all(seed, &faults, &fleet, storm);
        let asked_after = Duration::from_millis(draw(seed, "asked").u64(0..4000));
        Self { seed, faults, storm, fleet, behaviour, policy, second, troubles, asked_after, manner }
    }

    /// Whether controllers may learn of things late.
    pub(super) fn delays_news(&self) -> bool {
        self.faults.iter().any(|fault| fault.delays_news())
    }

    /// Whether an abort is never taken back.
    pub(super) fn abort_stays(&self) -> bool {
        self.has(Fault::Abort) && draw(self.seed, "abort").u8(0..3) == 0
    }

    /// The DriverPolicies, by their names.
    pub(super) fn policies(&self) -> impl Iterator<Item = (&'static str, &Value)> {
        let second = self.second.iter().map(|spec| (SECOND, spec));
        self.policy.iter().map(|spec| (FIRST, spec)).chain(second)
    }

    /// Whether `fault` can happen.
    pub fn has(&self, fault: Fault) -> bool {
        self.faults.contains(&fault)
    }
}

/// A random part of all kinds (a swarm): what always happens hides what rarely does.
fn faults(seed: u64, wish: &Wish) -> BTreeSet<Fault> {
    let mut rng = draw(seed, "faults");
    let share = rng.f64() * 0.6;
    let drawn = Fault::ALL.iter().copied().filter(|_| rng.f64() < share);
    let mannered = manner::has_one(seed) && !wish.plain;
    // What is about the way of a version is only in cases in which it has one, and plain ones are what they always were.
    let fits = |fault: &Fault| (!fault.is_late() || !wish.plain) && (!fault.needs_a_manner() || mannered);
    let drawn = drawn.filter(fits).collect();
    wish.faults.clone().unwrap_or(drawn)
}

fn fleet(seed: u64, wish: &Wish, faults: &BTreeSet<Fault>) -> Fleet {
    let mut rng = draw(seed, "fleet");
    let nodes = rng.usize(1..=NODES_MAX).min(rng.usize(1..=NODES_MAX));
    let nodes = wish.nodes.unwrap_or(nodes).max(1);
    let mut workloads = workloads(seed, nodes);
    for workload in &mut workloads {
        workload.stateful = faults.contains(&Fault::SameName);
    }
    let mut fleet = Fleet::new(nodes).with_driver(FROM).with_workloads(workloads);
    if rng.u8(0..5) == 0 {
        fleet = fleet.without_validators();
    }
    let clients = rng.u8(0..5) == 0;
    if clients || faults.contains(&Fault::ClientStuck) || faults.contains(&Fault::ClientLost) {
        fleet = fleet.with_clients();
    }
    if rng.u8(0..8) == 0 {
        fleet = fleet.with_dra(DraIdentity::NvidiaChart);
    }
    if rng.u8(0..6) == 0 || faults.contains(&Fault::Quarantine) {
        fleet = fleet.with_nvsentinel();
    }
    let upgrade = upgrade_policy(seed);
    fleet.with_upgrade_policy(upgrade)
}

/// Few enough that everybody finds another place, most of the time.
fn workloads(seed: u64, nodes: usize) -> Vec<Workload> {
    let mut rng = draw(seed, "workloads");
    let mut devices = u32::try_from(nodes).unwrap_or(u32::MAX).saturating_mul(4);
    let mut all = Vec::new();
    for number in 0..rng.u32(0..4) {
        let gpus = 1 << rng.u32(0..3);
        let replicas = rng.u32(1..=4).min(devices / gpus);
        if replicas == 0 {
            continue;
        }
        devices -= replicas * gpus;
        let mut workload = Workload::new("team", &format!("work-{number}"), replicas, gpus);
        workload.grace_seconds = rng.u32(0..20);
        workload.budget = match rng.u8(0..4) {
            0 => Some(json!({"maxUnavailable": 1})),
            1 => Some(json!({"minAvailable": replicas.saturating_sub(1)})),
            _ => None,
        };
        all.push(workload);
    }
    all
}

fn upgrade_policy(seed: u64) -> Value {
    let mut rng = draw(seed, "upgrade-policy");
    let mut pick = |choices: &[Value]| choices[rng.usize(..choices.len())].clone();
    let unavailable = pick(&[json!(1), json!(2), json!("25%"), json!("50%"), json!("100%")]);
    let parallel = pick(&[json!(0), json!(1), json!(2), json!(4)]);
    let action = pick(&[json!("Fail"), json!("Delete"), json!("Delete")]);
    let force = pick(&[json!(true), json!(false)]);
    let seconds = pick(&[json!(10), json!(30), json!(60)]);
    let drain = pick(&[json!(false), json!(false), json!(false), json!(true)]);
    let removal = json!({"force": force, "timeoutSeconds": seconds, "deleteEmptyDir": true});
    let mut policy = json!({
        "autoUpgrade": true, "maxParallelUpgrades": parallel, "maxUnavailable": unavailable,
        "podDeletion": removal, "waitForCompletion": {"timeoutSeconds": 0},
        "drain": {"enable": drain, "force": force, "timeoutSeconds": seconds, "deleteEmptyDir": true},
    });
    policy["podDeletion"]["timeoutAction"] = action;
    let mut rng = draw(seed, "wait");
    if rng.u8(0..3) == 0 {
        let seconds = [5, 20, 60][rng.usize(..3)];
        policy["waitForCompletion"] = json!({"podSelector": "app=work-0", "timeoutSeconds": seconds});
    }
    policy
}

fn policy(seed: u64, fleet: &Fleet) -> Option<Value> {
    let mut rng = draw(seed, "policy");
    if rng.u8(0..8) == 0 {
        return None;
    }
    let mut pick = |choices: &[Value]| choices[rng.usize(..choices.len())].clone();
    let ready = pick(&[json!("60s"), json!("90s"), json!("3m")]);
    let blocked = pick(&[json!("30s"), json!("2m")]);
    let on_blocked = pick(&[json!("Wait"), json!("Fail"), json!("Release")]);
    let sentinel = pick(&[json!("Everything"), json!("Quarantine"), json!("Auto"), json!("Off")]);
    let refresh = pick(&[json!("Always"), json!("Visit"), json!("Off")]);
    let validator = pick(&[json!({"selector": "app=nvidia-operator-validator"}), Value::Null]);
    let validator = if fleet.validators { validator } else { Value::Null };
    Some(json!({
        "driver": {"name": "gpu", "validator": validator},
        "upgradePolicy": fleet.upgrade_policy,
        "limits": {"driverReady": ready, "validation": "90s", "failureThreshold": "100%",
            "blockedAfter": blocked, "onBlocked": on_blocked},
        "health": {"nvsentinel": sentinel, "watchAfter": "30s"},
        "clients": {"refresh": refresh, "timeout": "60s"},
    }))
}

/// Some fleets have two pools.
fn has_two(seed: u64, fleet: &Fleet) -> bool {
    fleet.nodes > 1 && draw(seed, "pools").u8(0..4) == 0
}

/// The nodes that are there, and those that may join, belong to one of two pools. The other one has limits of its own.
fn divide(seed: u64, fleet: &mut Fleet, policy: &mut Value) -> Value {
    let mut rng = draw(seed, "which pool");
    for node in fleet.node_names().chain((1..=JOINING_MAX).map(|number| format!("gpu-new-{number}"))) {
        let pool = if rng.bool() { FIRST } else { SECOND };
        fleet.labels.push((node, POOL.to_owned(), pool.to_owned()));
    }
    let mut second = policy.clone();
    let waits = policy["upgradePolicy"]["waitForCompletion"].clone();
    second["upgradePolicy"] = upgrade_policy(rng.u64(..));
    // Of what it leaves unsaid, the ClusterPolicy's counts: half of a wait would last for ever.
    second["upgradePolicy"]["waitForCompletion"] = waits;
    policy["nodeSelector"] = json!({POOL: FIRST});
    second["nodeSelector"] = json!({POOL: SECOND});
    second
}

/// Policy and fleet say how a version reaches them.
fn adopt(manner: &Manner, fleet: &mut Fleet, policy: &mut Value) {
    let Manner { rollout, threshold, limits, labels, .. } = manner;
    fleet.labels.extend(labels.iter().cloned());
    json_patch::merge(&mut fleet.upgrade_policy, limits);
    json_patch::merge(&mut policy["upgradePolicy"], limits);
    policy["rollout"] = rollout.clone();
    if let Some(threshold) = threshold {
        policy["limits"]["failureThreshold"] = threshold.clone();
    }
}

fn behaviour(seed: u64, faults: &BTreeSet<Fault>) -> Behaviour {
    let mut rng = draw(seed, "machines");
    let mut between = |low: u64, high: u64| Duration::from_millis(rng.u64(low..=high));
    let timing = Timing {
        driver_start: between(300, 6000),
        driver_stop: between(50, 1500),
        validator_start: between(50, 1500),
        workload_start: between(50, 2000),
        workload_stop: between(50, 4000),
        job_run: Duration::from_secs(1),
        gate_run: Duration::from_secs(1),
        crash_after: Duration::from_secs(1),
        jitter: 0.5,
    };
    let mut behaviour = Behaviour::default().with_timing(timing);
    behaviour.driver_manager = rng.bool();
    if faults.contains(&Fault::OneInSix) {
        let fault = trouble::driver_fault(&mut rng);
        behaviour.drivers.push(DriverFault { nodes: Nodes::OneIn(6), version: Some(TO.to_owned()), fault });
    }
    if faults.contains(&Fault::BadVersion) {
        let fault = trouble::driver_fault(&mut draw(seed, "how bad"));
        behaviour.drivers.push(DriverFault { nodes: Nodes::All, version: Some(TO.to_owned()), fault });
    }
    if faults.contains(&Fault::GateNo) {
        let (nodes, version) = (Nodes::OneIn(6), Some(TO.to_owned()));
        let outcome = GateOutcome::failure("loss is nan");
        behaviour = behaviour.with_gate_rule(GateRule { gate: None, nodes, version, outcome });
    }
    behaviour
}

/// Whether an image is of a version.
pub(super) fn is_of(image: &str, version: &str) -> bool {
    DriverVersion::from_image(image).is_some_and(|found| found.to_string() == version)
}
