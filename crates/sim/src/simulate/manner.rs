//! How a new version reaches the fleet of a case: by stages, in windows, rack by rack, past gates and a matrix.
//!
//! It is drawn from generators of its own, and only some cases have any of it: all others are what they would be
//! without it.

use std::collections::BTreeSet;

use fastrand::Rng;
use pitcrew_core::contract::CANARY_LABEL;
use serde_json::{Value, json};

use super::case::{AGAIN, FROM, TO, draw};
use super::fault::Fault;
use crate::fleet::Fleet;

/// Nodes with one value of this label go together.
pub(super) const RACK: &str = "sim.pitcrew.dev/rack";
/// Of the nodes with one value of this label, only so many may be out.
pub(super) const ZONE: &str = "sim.pitcrew.dev/zone";

/// So many cases of ten have a manner of their own.
const OF_TEN: u8 = 4;
/// What a query may say, …
const QUERY_MAX: u8 = 2;
/// … what it says, …
pub(super) const IN_BOUNDS: f64 = 0.0;
/// … and what it must not say.
pub(super) const OUT_OF_BOUNDS: f64 = 3.0;
/// The API takes no more.
const WINDOWS_MAX: usize = 12;
const MINUTES_OF_A_DAY: u32 = 24 * 60;

/// What a case has of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Manner {
    /// `spec.rollout` of the policy.
    pub rollout: Value,
    /// `limits.failureThreshold`, if it is another one.
    pub threshold: Option<Value>,
    /// Changes of the limits: an atom needs room.
    pub limits: Value,
    /// Labels of nodes: name, key, value.
    pub labels: Vec<(String, String, String)>,
    /// The person who promotes does not wait for the end of a bake.
    pub skips_bakes: bool,
    /// The drivers that the version matrix lists; without one nobody asks for it.
    pub matrix: Option<Vec<&'static str>>,
}

/// Whether a case has a manner of its own.
pub(super) fn has_one(seed: u64) -> bool {
    draw(seed, "manner").u8(0..10) < OF_TEN
}

impl Manner {
    /// What is drawn for a seed.
    pub(super) fn new(seed: u64, fleet: &Fleet, faults: &BTreeSet<Fault>) -> Self {
        let mut rng = draw(seed, "which manner");
        let bad = faults.contains(&Fault::BadVersion);
        let (mut staged, windowed) = (rng.u8(0..10) < 6, rng.u8(0..10) < 3);
        let (tied, spread) = (rng.u8(0..10) < 3, rng.u8(0..10) < 2);
        let watched = faults.iter().any(|fault| fault.needs_a_bake());
        staged |= watched || !(windowed || tied || spread || bad);
        let mut manner = Self { rollout: json!({}), limits: json!({}), ..Self::default() };
        let size = if tied { rng.usize(2..=4) } else { 1 };
        if tied {
            manner.tie(seed, fleet, size);
        }
        if spread {
            manner.spread(seed, fleet, size);
        }
        if staged {
            manner.stage(seed, fleet, size, watched);
        }
        let queried = faults.iter().any(|fault| fault.is_about_queries());
        if staged && (queried || draw(seed, "queries").u8(0..10) < 3) {
            manner.ask_prometheus();
        }
        if windowed {
            manner.open_and_close(seed);
        }
        if !staged && bad {
            manner.rollout["onFailure"] = json!("Rollback");
            manner.threshold = Some(chosen(&mut rng, &[json!(0), json!(1), json!("20%")]));
        }
        if faults.iter().any(|fault| fault.is_about_gates()) || draw(seed, "gated").u8(0..10) < 4 {
            manner.prove(seed, staged);
        }
        if faults.contains(&Fault::StruckOff) || draw(seed, "listed").u8(0..10) < 2 {
            manner.list(seed);
        }
        manner
    }

    /// What there is of it, in a word each.
    pub(super) fn kinds(&self) -> impl Iterator<Item = &'static str> {
        let rollout = &self.rollout;
        let all = [
            ("with stages", &rollout["stages"]),
            ("with windows", &rollout["windows"]),
            ("with atoms", &rollout["topology"]["atom"]),
            ("with groups", &rollout["topology"]["spread"]),
            ("with gates", &rollout["gates"]),
            ("with queries", &rollout["prometheus"]),
            ("with a matrix", &rollout["matrix"]),
        ];
        all.into_iter().filter(|(_, said)| !said.is_null()).map(|(kind, _)| kind)
    }

    fn label(&mut self, node: &str, key: &str, value: impl Into<String>) {
        self.labels.push((node.to_owned(), key.to_owned(), value.into()));
    }

    /// Racks of so many nodes, and mostly limits that can take one.
    fn tie(&mut self, seed: u64, fleet: &Fleet, size: usize) {
        let mut rng = draw(seed, "atoms");
        for (place, node) in fleet.node_names().chain(["gpu-new-1".to_owned()]).enumerate() {
            if rng.u8(0..10) > 0 {
                self.label(&node, RACK, format!("r{}", place / size));
            }
        }
        self.rollout["topology"]["atom"] = json!(RACK);
        if rng.u8(0..6) > 0 {
            let parallel = chosen(&mut rng, &[json!(0), json!(size), json!(2 * size)]);
            let out = chosen(&mut rng, &[json!(size), json!("100%"), json!("100%")]);
            self.limits = json!({"maxParallelUpgrades": parallel, "maxUnavailable": out});
        }
    }

    fn spread(&mut self, seed: u64, fleet: &Fleet, size: usize) {
        let mut rng = draw(seed, "spread");
        let zones = rng.usize(1..=3);
        for (place, node) in fleet.node_names().enumerate() {
            self.label(&node, ZONE, format!("z{}", place / size % zones));
        }
        let max = chosen(&mut rng, &[json!(size), json!("50%"), json!("100%")]);
        self.rollout["topology"]["spread"] = json!({"label": ZONE, "max": max});
    }

    /// One to three stages, and after them the rest.
    fn stage(&mut self, seed: u64, fleet: &Fleet, size: usize, watched: bool) {
        let mut rng = draw(seed, "stages");
        // Mostly stages that keep atoms whole: those that do not wait for ever.
        let whole = if rng.u8(0..5) > 0 { size } else { 1 };
        let labelled = rng.bool();
        if labelled {
            for node in fleet.node_names().take(whole * rng.usize(1..=2)) {
                self.label(&node, CANARY_LABEL, "true");
            }
        }
        let mut stages = Vec::new();
        for number in 0..rng.usize(1..=3) {
            let mut stage = stage(&mut rng, number, whole);
            if watched && stage["bake"]["duration"] == "0s" {
                stage["bake"]["duration"] = json!("5m");
            }
            if labelled && number == 0 {
                stage["nodeSelector"] = json!({CANARY_LABEL: "true"});
            } else {
                let some = [json!(whole), json!(2 * whole), json!("25%"), json!("50%")];
                stage["count"] = chosen(&mut rng, if size == 1 { &some } else { &some[..2] });
            }
            stages.push(stage);
        }
        self.rollout["stages"] = json!(stages);
        match rng.u8(0..4) {
            0 => self.rollout["onFailure"] = json!("Pause"),
            1 => self.rollout["onFailure"] = json!("Rollback"),
            _ => {}
        }
        self.skips_bakes = rng.u8(0..4) == 0;
    }

    /// Every stage that is watched asks Prometheus.
    fn ask_prometheus(&mut self) {
        self.rollout["prometheus"] = json!({"url": "http://prometheus:9090"});
        let stages = self.rollout["stages"].as_array_mut().into_iter().flatten();
        for stage in stages.filter(|stage| !stage["bake"].is_null() && stage["bake"]["duration"] != "0s") {
            stage["bake"]["queries"] = json!([{"name": "errors", "query": "sum(errors)", "max": QUERY_MAX}]);
        }
    }

    /// Gates on every node; where there are stages, sometimes one at the end of each.
    fn prove(&mut self, seed: u64, staged: bool) {
        let mut rng = draw(seed, "gates");
        let mut gate = |name: &str, preset: &str| {
            let again = chosen(&mut rng, &[json!("0s"), json!("5m"), json!("10m")]);
            json!({"name": name, "preset": preset, "timeout": "30s", "retries": rng.u8(0..2), "repeatEvery": again})
        };
        let mut gates = vec![gate("version", "driver-version")];
        let (ecc, mut joint) = (gate("ecc", "ecc-errors"), gate("joint", "driver-version"));
        joint["runs"] = json!("Stage");
        gates.extend(Some(ecc).filter(|_| rng.bool()));
        gates.extend(Some(joint).filter(|_| staged && rng.bool()));
        self.rollout["gates"] = json!(gates);
    }

    /// Only versions that are in the matrix may start. The one that comes second is often not.
    fn list(&mut self, seed: u64) {
        let more = [AGAIN].into_iter().filter(|_| draw(seed, "which are listed").bool());
        self.matrix = Some([FROM, TO].into_iter().chain(more).collect());
        self.rollout["matrix"] = json!({"enforce": true});
    }

    /// Hours that come and go, from the beginning or a little later; sometimes a day that ends an hour after it.
    fn open_and_close(&mut self, seed: u64) {
        let mut rng = draw(seed, "windows");
        let mut at = if rng.bool() { 0 } else { rng.u32(0..30) };
        let mut windows = Vec::new();
        while windows.len() < WINDOWS_MAX && at < MINUTES_OF_A_DAY {
            // A visit of a fleet that nobody knows yet is expected to take half an hour.
            let lasts = rng.u32(32..90);
            let start = format!("{:02}:{:02}", at / 60, at % 60);
            windows.push(json!({"start": start, "duration": format!("{lasts}m")}));
            at += lasts + rng.u32(5..45);
        }
        self.rollout["windows"] = json!(windows);
        if rng.u8(0..5) == 0 {
            // One hour west of Greenwich the day before is not over yet.
            self.rollout["blackouts"] = json!([{"from": "2025-12-31", "timeZone": "Etc/GMT+1"}]);
        }
    }
}

fn stage(rng: &mut Rng, number: usize, whole: usize) -> Value {
    let bakes = [json!("0s"), json!("2m"), json!("5m"), json!("10m"), json!("20m")];
    let mut stage = json!({"name": format!("stage-{number}"), "ramp": rng.u8(0..3) == 0});
    // The first of several would bake for two days if nothing were said.
    if number == 0 || rng.bool() {
        stage["bake"] = json!({"duration": chosen(rng, &bakes), "maxDriverRestarts": rng.u8(0..4) / 3});
    }
    if rng.u8(0..3) == 0 {
        stage["maxParallelUpgrades"] = json!(whole * rng.usize(1..=2));
    }
    if rng.u8(0..4) == 0 {
        stage["maxUnavailable"] = chosen(rng, &[json!(whole), json!("50%"), json!("100%")]);
    }
    if rng.u8(0..3) == 0 {
        stage["failureThreshold"] = chosen(rng, &[json!(1), json!("50%"), json!("100%")]);
    }
    if rng.u8(0..4) == 0 {
        stage["promotion"] = json!("Manual");
    }
    stage
}

fn chosen(rng: &mut Rng, choices: &[Value]) -> Value {
    choices[rng.usize(..choices.len())].clone()
}
