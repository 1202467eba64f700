//! Answers about nodes of the embedded cluster, word for word.

use pitcrew_core::contract::State;
use pitcrew_sim::actors::{Behaviour, Fault, Nodes, Timing};
use pitcrew_sim::fleet::{Fleet, Workload};
use serde_json::{Value, json};

use super::*;
use crate::tests::{Stage, play, told};
use pitcrew_core::reason::Thing;

fn fleet() -> Fleet {
    Fleet::new(3)
        .with_driver("560.35.03")
        .with_workloads(vec![])
        .with_upgrade_policy(json!({"autoUpgrade": true, "maxParallelUpgrades": 1, "maxUnavailable": "50%"}))
}

async fn answer(stage: &Stage, node: &str) -> String {
    let (text, ended) =
        told(async |out| explain(&stage.session, node, None, Style::default(), out).await).await;
    ended.map_or_else(|sentence| format!("pitcrew: {sentence}"), |_| text)
}

#[test]
fn a_node_is_explained_on_its_whole_way() {
    let behaviour = Behaviour::default().with_timing(Timing::real());
    play(&fleet(), behaviour, async |stage| {
        let mut told = vec![answer(stage, "node/gpu-01").await];
        stage.cluster.set_driver_version("565.57.01").await.unwrap();
        stage.until_state("gpu-01", State::PodRestartRequired).await;
        told.push(answer(stage, "gpu-01").await);
        told.push(answer(stage, "gpu-02").await);
        stage.until_state("gpu-01", State::ValidationRequired).await;
        told.push(answer(stage, "gpu-01").await);
        stage.until_state("gpu-01", State::UpgradeDone).await;
        told.push(answer(stage, "gpu-01").await);
        stage.patch_node("gpu-01", json!({"spec": {"unschedulable": true}})).await;
        told.push(answer(stage, "gpu-01").await);
        stage.kill_controller();
        tokio::time::sleep(std::time::Duration::from_mins(10)).await;
        told.push(answer(stage, "gpu-02").await);
        insta::assert_snapshot!(told.join("\n"));
    });
}

#[test]
fn a_budget_that_blocks_is_named_with_its_pod_and_what_opens_it() {
    let notebook = Workload::new("team-x", "notebook", 1, 1).with_budget(json!({"minAvailable": 1}));
    play(&fleet().with_workloads(vec![notebook]), Behaviour::default(), async |stage| {
        stage.cluster.set_driver_version("565.57.01").await.unwrap();
        let blocked = |reading: &Reading<'_>| {
            let nodes = &reading.plan.pools[0].nodes;
            nodes.iter().find(|(_, v)| v.reason.code() == "budget-never").map(|(node, _)| node.to_string())
        };
        stage.until("a budget blocks", |reading| blocked(reading).is_some()).await;
        let look = stage.look().await;
        let node = blocked(&Reading::of(&look.snapshot, &look.leader)).unwrap();
        insta::assert_snapshot!(answer(stage, &node).await);
        let (json, _) =
            told(async |out| explain(&stage.session, &node, Some(Output::Json), Style::default(), out).await)
                .await;
        let json: Value = serde_json::from_str(&json).unwrap();
        let driver = &json["drivers"][0];
        assert_eq!(
            driver["cause"][0],
            json!({"kind": "PodDisruptionBudget", "namespace": "team-x", "name": "notebook"})
        );
        assert_eq!(driver["cause"][1]["kind"], "Pod");
        assert_eq!(driver["moves"], "heldUp");
        assert!(
            driver["youCan"][1]["command"]
                .as_str()
                .unwrap()
                .contains("scale deployment notebook --replicas=2")
        );
    });
}

#[test]
fn a_failed_node_says_why_and_how_to_try_again() {
    let behaviour =
        Behaviour::default().with_fault(Nodes::Named("gpu-01".into()), "565.57.01", Fault::CrashLoop);
    play(&fleet(), behaviour, async |stage| {
        stage.cluster.set_driver_version("565.57.01").await.unwrap();
        stage.until_state("gpu-01", State::UpgradeFailed).await;
        insta::assert_snapshot!(answer(stage, "gpu-01").await);
    });
}

#[test]
fn what_cannot_be_explained_is_one_sentence() {
    play(&fleet(), Behaviour::default(), async |stage| {
        let cpu = json!({"metadata": {"name": "cpu-01"}});
        let nodes = kube::Api::<k8s_openapi::api::core::v1::Node>::all(stage.cluster.admin.clone());
        nodes.create(&kube::api::PostParams::default(), &serde_json::from_value(cpu).unwrap()).await.unwrap();
        let mut told = Vec::new();
        for node in ["gpu-001", "zebra", "pod/gpu-01", "node/", "cpu-01"] {
            told.push(answer(stage, node).await);
        }
        let bad = json!({"spec": {"driver": {"upgradePolicy": {"maxUnavailable": "abc"}}}});
        stage.cluster.patch_cluster_policy(bad).await.unwrap();
        told.push(answer(stage, "gpu-01").await);
        insta::assert_snapshot!(told.join("\n"));
    });
}

#[test]
fn two_drivers_have_a_block_each() {
    let driver = |driver: &str| DriverAnswer {
        driver: driver.to_owned(),
        policy: format!("driverpolicy/{driver}"),
        state: State::UpgradeRequired,
        kind: Kind::Waiting,
        moves: Motion::ByItself,
        reason: "other-driver",
        message: "driver ofed is upgraded on this node first".to_owned(),
        since: None,
        until: None,
        cause: vec![Thing::node(&"gpu-17".into()).into()],
        holds: None,
        next: None,
        you_can: vec![],
        visit: None,
        driver_version: None,
        driver_since: None,
    };
    let controller = crate::status::ControllerReport {
        running: true,
        holder: None,
        lease: "gpu-operator/pitcrew-controller".to_owned(),
        last_renewed: None,
    };
    let ofed = DriverAnswer { kind: Kind::Done, reason: "up-to-date", ..driver("ofed") };
    let answer = Answer {
        node: "gpu-17".to_owned(),
        cordoned: false,
        cordoned_by_driver_manager: false,
        ready: true,
        controller,
        drivers: vec![driver("gpu"), ofed],
    };
    let times = Times { now: jiff::Timestamp::UNIX_EPOCH, zone: jiff::tz::TimeZone::UTC };
    insta::assert_snapshot!(text(&answer, &Pen { style: Style::default(), times }));
}
