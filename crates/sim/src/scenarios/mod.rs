//! The scenarios. Each runs on the embedded cluster and on a real control plane; the nodes' states must agree.

use std::time::Duration;

use futures::FutureExt;
use pitcrew_core::contract::State;
use serde_json::{Value, json};

use crate::actors::{Behaviour, Fault, Nodes};
use crate::fleet::{Fleet, Workload};
use crate::scenario::{On, Outcome, Scenario, Stage, WHOLE_WALK, must};

mod agents;
mod clients;
mod gates;
mod health;
mod machines;
mod matrix;
mod network;
mod policies;
mod queries;
mod reported;
mod rollbacks;
mod stages;
mod topology;

/// What fleets run at first.
const OLD: &str = "535.104.05";
const NEW: &str = "565.57.01";
const NEWER: &str = "570.86.10";
const SKIP_LABEL: &str = "nvidia.com/gpu-driver-upgrade.skip";
const STATE_LABEL: &str = "nvidia.com/gpu-driver-upgrade-state";

/// All scenarios.
pub fn all() -> Vec<Scenario> {
    let mut all = documented();
    all.extend(reported::all());
    all.extend(machines::all());
    all.extend(policies::all());
    all.extend(health::all());
    all.extend(clients::all());
    all.extend(network::all());
    all.extend(stages::all());
    all.extend(queries::all());
    all.extend(gates::all());
    all.extend(rollbacks::all());
    all.extend(topology::all());
    all.extend(matrix::all());
    all.extend(agents::all());
    all
}

/// What the documents promise.
fn documented() -> Vec<Scenario> {
    let limits = |parallel: u32, unavailable: Value| {
        fleet(10).with_upgrade_policy(json!({
            "autoUpgrade": true, "maxParallelUpgrades": parallel, "maxUnavailable": unavailable,
            "podDeletion": {"timeoutSeconds": 300},
        }))
    };
    vec![
        scenario("one node walks through every state", fleet(1), |stage| one_node(stage).boxed()),
        scenario("ten nodes, one at a time", limits(1, json!("100%")), |stage| at_most(stage, 1).boxed()),
        scenario("ten nodes, three at a time", limits(3, json!("100%")), |stage| at_most(stage, 3).boxed()),
        scenario("ten nodes, no limit of parallel upgrades", limits(0, json!("100%")), |stage| {
            at_most(stage, 10).boxed()
        }),
        scenario("max unavailable as a number", limits(0, json!(2)), |stage| at_most(stage, 2).boxed()),
        scenario("max unavailable as a percentage", limits(0, json!("25%")), |stage| {
            at_most(stage, 3).boxed()
        }),
        scenario("workloads leave and come back elsewhere", busy_fleet(), |stage| {
            workloads_move(stage).boxed()
        }),
        scenario("a skipped node is left out until its label goes", fleet(3), |stage| skipped(stage).boxed()),
        scenario("a pause keeps everything and a resume goes on", limits(3, json!("100%")), |stage| {
            paused(stage).boxed()
        }),
        Scenario {
            behaviour: Behaviour::default().with_fault(
                Nodes::Named("gpu-02".to_owned()),
                NEW,
                Fault::CrashLoop,
            ),
            policy: Some(json!({
                "driver": {"name": "gpu", "validator": {"selector": "app=nvidia-operator-validator"}},
                "limits": {"driverReady": "5s"},
            })),
            ..scenario("a failed node is retried by its label", three_at_most_two_out(), |stage| {
                retried(stage).boxed()
            })
        },
        // Which nodes are done when the second version comes would be a matter of milliseconds, so the first never comes
        // up: the one node under way waits for it.
        Scenario {
            behaviour: Behaviour::default().with_fault(Nodes::All, NEW, Fault::Hang),
            ..scenario("a second version while the first is under way", limits(1, json!("100%")), |stage| {
                second_version(stage).boxed()
            })
        },
        scenario(
            "the controller is killed half-way and another goes on",
            limits(3, json!("100%")),
            |stage| killed(stage).boxed(),
        ),
    ]
}

fn scenario(name: &'static str, fleet: Fleet, script: crate::scenario::Script) -> Scenario {
    let (behaviour, policy) = (Behaviour::default(), None);
    Scenario { name, shows: &[], on: On::Both, fleet, behaviour, policy, own_node: None, script }
}

/// Nodes without work on them: the walk itself is what matters.
fn fleet(nodes: usize) -> Fleet {
    Fleet::new(nodes).with_workloads(Vec::new())
}

/// A failed node stays out; the others must still be able to go.
fn three_at_most_two_out() -> Fleet {
    fleet(3).with_upgrade_policy(json!({"autoUpgrade": true, "maxParallelUpgrades": 1, "maxUnavailable": 2}))
}

/// Six nodes with nine pods, one Deployment under a budget that lets one pod go at a time.
fn busy_fleet() -> Fleet {
    let serve = Workload::new("llm", "serve", 5, 1).with_budget(json!({"maxUnavailable": 1}));
    let train = Workload::new("research", "train", 4, 2);
    Fleet::new(6).with_workloads(vec![serve, train]).with_grace_seconds(1).with_upgrade_policy(json!({
        "autoUpgrade": true, "maxParallelUpgrades": 2, "maxUnavailable": "50%",
        "podDeletion": {"timeoutSeconds": 60},
    }))
}

/// Every node went the whole way once, and ended in service.
fn whole_walks(stage: &Stage, trace: &crate::scenario::Trace) -> Outcome {
    for (node, path) in &trace.states {
        must(path[..] == WHOLE_WALK || stage.is_blinded(), || format!("{node} went {path:?}"))?;
    }
    in_service(stage)
}

fn in_service(stage: &Stage) -> Outcome {
    let scene = stage.scene();
    must(scene.cordoned.is_empty(), || format!("still cordoned: {:?}", scene.cordoned))?;
    must(scene.visited.is_empty(), || format!("visit records left behind: {:?}", scene.visited))
}

async fn one_node(stage: &mut Stage) -> Outcome {
    stage.set_version(NEW).await?;
    stage
        .until("the node sets out", |scene| scene.all(State::UpgradeRequired) || !scene.cordoned.is_empty())
        .await?;
    stage.until_done().await?;
    whole_walks(stage, &stage.trace())
}

async fn at_most(stage: &mut Stage, limit: usize) -> Outcome {
    stage.set_version(NEW).await?;
    stage.until("the first node is cordoned", |scene| !scene.cordoned.is_empty()).await?;
    stage.until_done().await?;
    let trace = stage.trace();
    must(trace.most_out <= limit, || format!("{} nodes were out, {limit} allowed", trace.most_out))?;
    must(trace.most_out == limit, || {
        format!("only {} of {limit} allowed nodes were ever out", trace.most_out)
    })?;
    whole_walks(stage, &trace)
}

async fn workloads_move(stage: &mut Stage) -> Outcome {
    let before = stage.pods("llm").await?;
    stage.set_version(NEW).await?;
    stage.until("the first node is cordoned", |scene| !scene.cordoned.is_empty()).await?;
    stage.until_done().await?;
    stage.until_pods_ready("llm", 5).await?;
    stage.until_pods_ready("research", 4).await?;
    let after = stage.pods("llm").await?;
    let stayed = before.iter().filter(|(name, ..)| after.iter().any(|(other, ..)| other == name)).count();
    must(stayed == 0, || format!("{stayed} pods were never taken off"))?;
    whole_walks(stage, &stage.trace())
}

async fn skipped(stage: &mut Stage) -> Outcome {
    stage.label("gpu-02", SKIP_LABEL, Some("true")).await?;
    stage.set_version(NEW).await?;
    stage.until("every node is due", |scene| scene.count(State::UpgradeDone) == 0).await?;
    stage
        .until("the others are done", |scene| {
            scene.count(State::UpgradeDone) == 2 && scene.state("gpu-02") == State::UpgradeRequired
        })
        .await?;
    stage.stands_still_for(Duration::from_secs(2)).await?;
    must(stage.scene().cordoned.is_empty(), || "a node is cordoned".to_owned())?;
    stage.label("gpu-02", SKIP_LABEL, None).await?;
    stage.until_done().await?;
    whole_walks(stage, &stage.trace())
}

async fn paused(stage: &mut Stage) -> Outcome {
    stage.set_version(NEW).await?;
    stage.until("three nodes are under way", |scene| scene.cordoned.len() == 3).await?;
    stage.set_upgrade_policy(json!({"autoUpgrade": false})).await?;
    // What is under way may be answered; then nothing moves.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let held = stage.scene();
    stage.stands_still_for(Duration::from_secs(3)).await?;
    must(held.cordoned.len() == 3, || format!("the pause lost cordons: {:?}", held.cordoned))?;
    must(held.visited == held.cordoned, || "the pause lost visit records".to_owned())?;
    stage.set_upgrade_policy(json!({"autoUpgrade": true})).await?;
    stage.until_done().await?;
    whole_walks(stage, &stage.trace())
}

async fn retried(stage: &mut Stage) -> Outcome {
    stage.set_version(NEW).await?;
    stage
        .until("gpu-02 failed and the others are done", |scene| {
            scene.state("gpu-02") == State::UpgradeFailed && scene.count(State::UpgradeDone) == 2
        })
        .await?;
    stage.stands_still_for(Duration::from_secs(2)).await?;
    must(stage.scene().cordoned.contains("gpu-02"), || "a failed node is in service".to_owned())?;
    stage.behaviour().change(|behaviour| behaviour.drivers.clear());
    stage.label("gpu-02", STATE_LABEL, Some("upgrade-required")).await?;
    stage.until_done().await?;
    in_service(stage)
}

async fn second_version(stage: &mut Stage) -> Outcome {
    stage.set_version(NEW).await?;
    stage.until("a driver restarts", |scene| scene.count(State::PodRestartRequired) == 1).await?;
    stage.set_version(NEWER).await?;
    stage.until_done().await?;
    let versions = stage.driver_versions().await?;
    must(versions.values().all(|v| v == NEWER), || format!("drivers are {versions:?}"))?;
    whole_walks(stage, &stage.trace())
}

async fn killed(stage: &mut Stage) -> Outcome {
    stage.set_version(NEW).await?;
    stage.until("a driver restarts", |scene| scene.count(State::PodRestartRequired) > 0).await?;
    stage.kill_controller().await;
    stage.start_controller();
    stage.until_done().await?;
    let trace = stage.trace();
    must(trace.most_out <= 3, || format!("{} nodes were out, 3 allowed", trace.most_out))?;
    whole_walks(stage, &trace)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_table_in_the_manual_is_complete() {
        let manual = include_str!("../../../../docs/scenarios.md");
        let documented = super::documented().len();
        for scenario in super::all().into_iter().skip(documented) {
            let mut lines = manual.lines();
            let row = lines.find(|line| line.starts_with(&format!("| `{}` |", scenario.name)));
            let row = row.unwrap_or_else(|| panic!("{} is not in docs/scenarios.md", scenario.name));
            for weakness in scenario.shows {
                assert!(row.contains(weakness), "{} shows {weakness}: {row}", scenario.name);
            }
            assert_eq!(scenario.on == super::On::Embedded, row.contains("*embedded*"), "{row}");
        }
    }
}
