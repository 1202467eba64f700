//! The largest status that a rollout can come to: every list full, every log as long and as awkward as it may be.

use serde_json::{Value, json};

use super::fixture::*;
use crate::api::{
    ROLLOUT_FAILURES_MAX, RolloutStatus, StagePhase, StagePromotion, TIMELINE_MAX, Word, stamp,
};
use crate::contract::State;
use crate::gate::{GateRun, LOG_TAIL_BYTES, Obstacle, Outcome, PodState, Sample};
use crate::visit::{Cause, Failure, Finding};

const NODES: usize = 5000;
/// As many as a policy may have.
const STAGES: usize = 16;
const GATES: usize = 16;
const QUERIES: usize = 8;
/// One that fails for each gate, and two that come through.
const OF_A_STAGE: usize = GATES + 2;

/// A name that is as long as one may be.
fn long(name: &str, length: usize) -> String {
    format!("{name}-{}", "x".repeat(length - name.len() - 1))
}

/// The n-th node of those that go before the rest, or of the rest.
fn name(kind: char, number: usize) -> String {
    long(&format!("{kind}-{number:04}"), 253)
}

fn number(node: &str) -> usize {
    node.split('-').nth(1).unwrap().parse().unwrap()
}

fn gate(number: usize) -> String {
    long(&format!("g-{number:02}"), 24)
}

/// More than is kept of it, and every second byte of it takes two or more in JSON.
fn log() -> String {
    "\u{1b}[31m\"CUDA error\"\t\\n\n".repeat(400)
}

fn policy() -> Value {
    let gates: Vec<Value> = (0..GATES)
        .map(|i| json!({"name": gate(i), "preset": "driver-version", "retries": 0, "repeatEvery": "5m"}))
        .collect();
    let queries: Vec<Value> =
        (0..QUERIES).map(|i| json!({"name": long(&format!("q-{i}"), 63), "query": "up", "max": 1})).collect();
    let stage = |i: usize| {
        let bake = json!({"duration": "10m", "queries": queries});
        let promotion = if i + 1 == STAGES { "Manual" } else { "Auto" };
        json!({
            "name": long(&format!("s-{i:02}"), 63), "count": OF_A_STAGE, "failureThreshold": "100%",
            "bake": bake, "promotion": promotion,
        })
    };
    let stages: Vec<Value> = (0..STAGES).map(stage).collect();
    json!({
        "driver": {"name": "gpu"},
        "upgradePolicy": {"maxParallelUpgrades": 0, "maxUnavailable": "100%"},
        "limits": {"failureThreshold": "100%"},
        "health": {"watchAfter": "48h"},
        "rollout": {
            "prometheus": {"url": "http://prometheus"}, "gates": gates, "stages": stages, "onFailure": "Pause",
        },
    })
}

/// Each node of a stage is refused by another gate. In a bake nobody can judge at first, for a long reason.
fn says(run: &GateRun) -> Option<PodState> {
    let failed = |how| Some(PodState::Failed { at: None, how });
    let mut rounds = run.subject.split(' ').skip(1);
    if run.stage.is_some() {
        let blind = || Outcome::NotRun(Obstacle::NotStarted { says: "ErrImagePull ".repeat(200).into() });
        return rounds.next().filter(|round| *round == "1").and_then(|_| failed(blind()));
    }
    let refused_by = number(run.nodes[0].as_str()) % OF_A_STAGE;
    let refuses = refused_by < GATES && run.gate.as_str() == gate(refused_by) && run.sample == Sample::After;
    refuses.then(|| failed(Outcome::Exited { code: 1, message: log().into() })).flatten()
}

fn status(fleet: &Fleet) -> &RolloutStatus {
    fleet.snapshot.rollouts["gpu-1"].status.as_ref().unwrap()
}

/// A node of the rest that a gate has refused.
fn refused(number: usize) -> NodeSpec {
    let text = log();
    let cause = Cause::Gate {
        gate: gate(number % GATES).as_str().into(),
        found: Finding::plain(format!("failed after 9min 59s: {}", "out of its bounds ".repeat(80))),
        unjudged: false,
        log: text[text.len() - LOG_TAIL_BYTES..].to_owned(),
    };
    let spec = node(&name('z', number)).outdated().at(State::UpgradeFailed);
    let spec = spec.visit(|visit| visit.rollout = Some("gpu-1".to_owned()));
    spec.walk(|walk| walk.failure = walk.failure.take().map(|failure| Failure { cause, ..failure }))
}

/// Everything that can be said is said, to the end of each list.
fn full() -> Fleet {
    let begins = Fleet::without_policy().driver_policy("gpu", policy());
    let first = STAGES * OF_A_STAGE;
    let mut fleet = (0..first).fold(begins, |fleet, i| fleet.with(node(&name('a', i)).outdated()));
    fleet.gates_on = Some(says);
    while status_phase(&fleet, STAGES - 1) != StagePhase::AwaitingApproval {
        fleet.live(600);
        fleet.forget_jobs();
        assert!(fleet.snapshot.now < after(48 * 3600), "{:#?}", status(&fleet).stages);
    }
    // The rest has failed too, but for some that come up by themselves before their stage is open.
    let early = ROLLOUT_FAILURES_MAX + 5;
    fleet = (first..NODES - early).fold(fleet, |fleet, i| fleet.with(refused(i)));
    for number in NODES - early..NODES {
        fleet = fleet.with(node(&name('z', number)).outdated().at(State::UpgradeRequired));
        comes_up(&mut fleet, &name('z', number));
    }
    fleet.step();
    // Nodes that had been given back are lost again, and a person has had enough of it.
    for number in (0..first).filter(|number| number % OF_A_STAGE >= GATES) {
        fleet.node_mut(&name('a', number)).ready = false;
    }
    let at = stamp(fleet.snapshot.now);
    let spec = &mut fleet.snapshot.rollouts.get_mut("gpu-1").unwrap().spec;
    let stage = long(&format!("s-{:02}", STAGES - 1), 63);
    spec.promotions.push(StagePromotion { stage, by: "m".repeat(253), at: at.clone(), skip_bake: true });
    fleet.live(30);
    let spec = &mut fleet.snapshot.rollouts.get_mut("gpu-1").unwrap().spec;
    spec.rollback = Some(Word { by: "m".repeat(253), at, why: Some("w".repeat(1024)) });
    fleet.daemon_set_mut().manager = Some(long("Argo CD", 63).into());
    fleet.live(30);
    fleet
}

fn status_phase(fleet: &Fleet, stage: usize) -> StagePhase {
    let status = fleet.snapshot.rollouts.get("gpu-1").and_then(|rollout| rollout.status.as_ref());
    status.and_then(|status| status.stages.get(stage)).map(|stage| stage.phase).unwrap_or_default()
}

#[test]
fn a_status_is_at_most_256_kib_however_much_there_is_to_say() {
    let mut fleet = full();
    let status = status(&fleet).clone();
    assert_eq!(status.total as usize, NODES);
    assert_eq!(status.stages.len(), STAGES + 1);
    for stage in &status.stages[..STAGES] {
        assert_eq!(stage.gates.len(), 2 * GATES, "{stage:?}");
        assert_eq!(stage.bake.as_ref().unwrap().queries.len(), QUERIES);
    }
    assert_eq!(status.stages[STAGES].gates.len(), GATES);
    assert_eq!((status.failures.len(), status.relapses.len()), (ROLLOUT_FAILURES_MAX, ROLLOUT_FAILURES_MAX));
    assert_eq!((status.early.len(), status.timeline.len()), (ROLLOUT_FAILURES_MAX, TIMELINE_MAX));
    assert!(status.rollback.as_ref().is_some_and(|back| back.message.is_some()));
    let bytes = serde_json::to_vec(&status).unwrap().len();
    assert!(bytes <= 256 * 1024, "{bytes} bytes");
    assert!(bytes > 200 * 1024, "so little that nothing was left out: {bytes} bytes");
    // What was said once is not said again.
    fleet.wait(60);
    let told = fleet.decisions().into_iter().filter(|line| line.starts_with("rollout")).collect::<Vec<_>>();
    assert_eq!(told, [""; 0]);
}
