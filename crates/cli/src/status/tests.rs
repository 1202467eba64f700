//! Reports in words, and whole stories on the embedded cluster.

use std::time::Duration;

use jiff::tz::TimeZone;
use pitcrew_core::api::MatrixStatus;
use pitcrew_core::contract::State;
use pitcrew_sim::actors::{Behaviour, Fault, Nodes, Timing};
use pitcrew_sim::fleet::{Fleet, Workload};
use serde_json::{Value, json};

use super::report::*;
use super::*;
use crate::tests::{Stage, play, told};
use pitcrew_core::reason::Kind;

fn now() -> jiff::Timestamp {
    "2026-01-06T15:00:00Z".parse().unwrap()
}

fn ago(seconds: i64) -> jiff::Timestamp {
    now() - SignedDuration::from_secs(seconds)
}

fn node(name: &str, state: State, kind: Kind, reason: &'static str, message: &str) -> NodeReport {
    NodeReport {
        node: name.to_owned(),
        state,
        kind,
        reason,
        message: message.to_owned(),
        since: state.in_flight().then(|| ago(123)),
        until: None,
        driver_version: Some("560.35.03".to_owned()),
        outdated_pod: None,
        ahead: None,
    }
}

fn done(name: &str) -> NodeReport {
    node(name, State::UpgradeDone, Kind::Done, "up-to-date", "driver up to date and ready")
}

fn waits(name: &str) -> NodeReport {
    node(name, State::UpgradeRequired, Kind::Waiting, "no-slot", "waits for a slot")
}

fn pool(phase: Phase, nodes: Vec<NodeReport>) -> PoolReport {
    let count = |kind| nodes.iter().filter(|node| node.kind == kind).count();
    PoolReport {
        name: "cluster-policy".to_owned(),
        policy: "clusterpolicy/cluster-policy".to_owned(),
        driver: "gpu".to_owned(),
        phase,
        message: None,
        versions: Versions {
            from: vec!["560.35.03".to_owned()],
            to: Some("565.57.01".to_owned()),
            new_configuration: false,
        },
        rollout: Some(RolloutReport {
            name: "cluster-policy-2".to_owned(),
            started_at: Some(ago(700)),
            finished_at: None,
            aborted: false,
            rollback_of: None,
            rollback: None,
        }),
        stages: vec![],
        matrix: None,
        counts: Counts {
            total: nodes.len(),
            done: count(Kind::Done),
            moving: count(Kind::Moving),
            waiting: count(Kind::Waiting),
            paused: count(Kind::Paused),
            blocked: count(Kind::Blocked),
            failed: count(Kind::Failed),
        },
        limits: Limits {
            out: 3,
            max_out: 6,
            max_unavailable: Some("25%".to_owned()),
            moving: 2,
            max_parallel_upgrades: Some(2),
            binding: Some("maxParallelUpgrades"),
        },
        foreign: vec![],
        nodes,
    }
}

fn report(pools: Vec<PoolReport>) -> Report {
    let controller = ControllerReport {
        running: true,
        holder: Some("pitcrew-0".to_owned()),
        lease: "gpu-operator/pitcrew-controller".to_owned(),
        last_renewed: None,
    };
    Report { at: now(), done: pools.iter().all(|pool| pool.phase == Phase::Done), controller, pools }
}

fn words(report: &Report, width: Option<usize>) -> String {
    let times = Times { now: report.at, zone: TimeZone::UTC };
    text::text(report, &Pen { style: Style { colours: false, width }, times })
}

fn in_trouble() -> PoolReport {
    let crash = "driver pod not ready after 1800 s: pod gpu-operator/driver-x: driver CrashLoopBackOff";
    let budget =
        "pod team-x/nb-0 cannot leave: poddisruptionbudget/team-x/notebook wants 1 healthy pods and has 1";
    let mut failed = node("gpu-03", State::UpgradeFailed, Kind::Failed, "failed", crash);
    failed.since = Some(ago(7380));
    let nodes = vec![
        done("gpu-01"),
        done("gpu-02"),
        failed,
        node("gpu-04", State::PodDeletionRequired, Kind::Blocked, "budget-blocks", budget),
        node(
            "gpu-05",
            State::PodRestartRequired,
            Kind::Moving,
            "driver-starting",
            "driver pod gpu-operator/nvidia-driver-daemonset-x7k2p starts: running, not ready yet",
        ),
        waits("gpu-06"),
        waits("gpu-07"),
        waits("gpu-08"),
        node(
            "gpu-09",
            State::UpgradeRequired,
            Kind::Paused,
            "skipped",
            "left out by label nvidia.com/gpu-driver-upgrade.skip=true",
        ),
        node(
            "gpu-10",
            State::UpgradeRequired,
            Kind::Waiting,
            "revision-pending",
            "daemonset/gpu-operator/d has a new template that its controller has not taken up yet",
        ),
    ];
    let foreign =
        Foreign { node: "gpu-02".to_owned(), cordoned: true, ready: true, by_driver_manager: false };
    PoolReport { foreign: vec![foreign], ..pool(Phase::Running, nodes) }
}

#[test]
fn the_version_matrix_is_told_only_if_something_is_wrong_with_it() {
    let matrix = |listed, message: &str| MatrixStatus {
        listed,
        message: message.to_owned(),
        not_observed: vec!["sriov".to_owned()],
        ..MatrixStatus::default()
    };
    let quiet = |matrix| PoolReport { matrix: Some(matrix), ..pool(Phase::Done, vec![done("gpu-01")]) };
    let well = quiet(matrix(true, "driver 565.57.01 is listed (canary)"));
    assert_eq!(words(&report(vec![well.clone()]), None).lines().count(), 1);
    let drifts = MatrixStatus {
        drift: vec!["canary: cuda is 12.6 on 1 node, not 12.8".to_owned()],
        reminder: Some("driver 565.57.01 is on every node, and the matrix has it as canary: pitcrew matrix promote --commit".to_owned()),
        ..matrix(false, "driver 565.57.01 is not in the version matrix")
    };
    let why = "driver 565.57.01 is not in the version matrix; nothing starts without that";
    let refused = |name| node(name, State::UpgradeRequired, Kind::Blocked, "not-in-matrix", why);
    let waiting = PoolReport {
        matrix: Some(matrix(false, "driver 565.57.01 is not in the version matrix")),
        ..pool(Phase::Running, vec![refused("gpu-01"), refused("gpu-02")])
    };
    insta::assert_snapshot!(words(&report(vec![quiet(drifts), waiting]), None));
}

#[test]
fn trouble_comes_first_with_the_command_that_says_more() {
    insta::assert_snapshot!(words(&report(vec![in_trouble()]), None));
}

#[test]
fn eighty_columns_are_enough() {
    let text = words(&report(vec![in_trouble()]), Some(80));
    let name_wide = |line: &&str| line.chars().count() > 80 && line.trim().contains(' ');
    assert_eq!(text.lines().find(name_wide), None, "{text}");
    insta::assert_snapshot!(text);
}

#[test]
fn what_stands_still_says_what_moves_it() {
    let half_way =
        node("gpu-01", State::PodRestartRequired, Kind::Paused, "paused", "paused: autoUpgrade is false");
    let waiting =
        node("gpu-02", State::UpgradeRequired, Kind::Paused, "paused", "paused: autoUpgrade is false");
    let outdated_pod = Some("gpu-operator/nvidia-driver-daemonset-x7k2p".to_owned());
    let waiting = NodeReport { outdated_pod, ..waiting };
    let paused = pool(Phase::Paused, vec![half_way, waiting, done("gpu-03")]);
    let why = "clusterpolicy/cluster-policy: maxUnavailable \"abc\" is neither a number nor a percentage (maxUnavailable). The pool is frozen until it is mended; nothing was changed.";
    let frozen = PoolReport {
        driver: "ofed".to_owned(),
        message: Some(why.to_owned()),
        versions: Versions::default(),
        rollout: None,
        ..pool(Phase::Frozen, vec![])
    };
    let mut alone = report(vec![paused, frozen]);
    alone.controller.running = false;
    alone.controller.last_renewed = Some(ago(7380));
    insta::assert_snapshot!(words(&alone, Some(80)));
}

#[test]
fn a_fleet_that_is_well_is_short() {
    let well = |driver: &str, version: &str| PoolReport {
        driver: driver.to_owned(),
        policy: format!("driverpolicy/{driver}"),
        versions: Versions { from: vec![], to: Some(version.to_owned()), new_configuration: false },
        ..pool(Phase::Done, vec![done("gpu-01"), done("gpu-02")])
    };
    let text = words(&report(vec![well("gpu", "565.57.01"), well("ofed", "24.10-1.1.4")]), Some(80));
    insta::assert_snapshot!(text, @"
    gpu  565.57.01  ✔ 2 nodes done, nothing to do  (driverpolicy/gpu)
    ofed  24.10-1.1.4  ✔ 2 nodes done, nothing to do  (driverpolicy/ofed)
    ");
    insta::assert_snapshot!(words(&report(vec![]), Some(80)), @"
    No DriverPolicy, ClusterPolicy or NVIDIADriver in this cluster asks for driver
    upgrades, so there is nothing to look after.
    ");
}

fn small_fleet() -> Fleet {
    Fleet::new(4)
        .with_driver("560.35.03")
        .with_workloads(vec![])
        .with_upgrade_policy(json!({"autoUpgrade": true, "maxParallelUpgrades": 1, "maxUnavailable": "50%"}))
}

fn realistic() -> Behaviour {
    Behaviour::default().with_timing(Timing::real())
}

async fn status(stage: &Stage) -> String {
    let (text, ended) = told(async |out| once(&stage.session, None, Style::default(), out).await).await;
    assert_eq!(ended, Ok(true));
    text
}

#[test]
fn an_upgrade_is_told_from_its_beginning_to_its_end() {
    play(&small_fleet(), realistic(), async |stage| {
        insta::assert_snapshot!("at_rest", status(stage).await);
        let before = stage.writes();
        stage.cluster.set_driver_version("565.57.01").await.unwrap();
        assert_eq!(stage.writes(), before + 1);
        stage.until_state("gpu-01", State::PodRestartRequired).await;
        insta::assert_snapshot!("under_way", status(stage).await);
        let (json, _) =
            told(async |out| once(&stage.session, Some(Output::Json), Style::default(), out).await).await;
        let json: Value = serde_json::from_str(&json).unwrap();
        assert_eq!(json["pools"][0]["phase"], "running");
        assert_eq!(json["pools"][0]["nodes"][0]["state"], "pod-restart-required");
        assert_eq!(json["pools"][0]["limits"]["maxParallelUpgrades"], 1);
        let hour = Duration::from_hours(1);
        let (lines, ended) = told(async |out| follow::wait(&stage.session, hour, None, out).await).await;
        assert_eq!(ended, Ok(true));
        insta::assert_snapshot!("waited", lines);
        assert_eq!(stage.writes(), before + 1, "a reader wrote something");
    });
}

#[test]
fn a_wait_right_after_the_change_does_not_end_before_it_began() {
    play(&small_fleet(), Behaviour::default(), async |stage| {
        stage.cluster.set_driver_version("565.57.01").await.unwrap();
        let hour = Duration::from_hours(1);
        let (lines, ended) = told(async |out| follow::wait(&stage.session, hour, None, out).await).await;
        assert_eq!(ended, Ok(true));
        assert!(lines.lines().last().unwrap().contains("565.57.01: 4 of 4 nodes done"), "{lines}");
        assert!(lines.lines().count() >= 4, "{lines}");
    });
}

#[test]
fn a_wait_ends_with_a_sentence_if_a_node_fails_or_the_time_is_up() {
    let behaviour =
        Behaviour::default().with_fault(Nodes::Named("gpu-01".into()), "565.57.01", Fault::CrashLoop);
    play(&small_fleet(), behaviour, async |stage| {
        stage.cluster.set_driver_version("565.57.01").await.unwrap();
        let minute = Duration::from_mins(1);
        let (_, ended) = told(async |out| follow::wait(&stage.session, minute, None, out).await).await;
        let sentence = ended.unwrap_err();
        assert!(
            sentence.starts_with(
                "timed out after 1m: 4 nodes are not done; gpu-01 is pod-restart-required: driver pod "
            ),
            "{sentence}"
        );
        let hour = Duration::from_hours(1);
        let (lines, ended) = told(async |out| follow::wait(&stage.session, hour, None, out).await).await;
        let sentence = ended.unwrap_err();
        assert!(sentence.starts_with("gpu-01 failed: driver pod not ready after 1800 s"), "{sentence}");
        assert!(lines.contains("gpu gpu-01 upgrade-failed: "), "{lines}");
    });
}

#[test]
fn a_pause_a_freeze_and_a_skipped_node_end_a_wait_each_in_its_way() {
    play(&small_fleet(), Behaviour::default(), async |stage| {
        let skip = json!({"metadata": {"labels": {"nvidia.com/gpu-driver-upgrade.skip": "true"}}});
        stage.patch_node("gpu-03", skip).await;
        stage.cluster.set_driver_version("565.57.01").await.unwrap();
        let hour = Duration::from_hours(1);
        let wait = async || told(async |out| follow::wait(&stage.session, hour, None, out).await).await;
        assert_eq!(
            wait().await.1.unwrap_err(),
            "gpu-03 is not done, and left out by its skip label; all others are done"
        );
        let switch = |on: bool| json!({"spec": {"driver": {"upgradePolicy": {"autoUpgrade": on}}}});
        stage.cluster.patch_cluster_policy(switch(false)).await.unwrap();
        let (lines, ended) = wait().await;
        assert!(lines.contains("paused, 3 of 4 nodes done, 1 standing still"), "{lines}");
        assert!(ended.unwrap_err().contains("timed out after 1h: 1 node is not done; gpu-03 is"));
        let bad =
            json!({"spec": {"driver": {"upgradePolicy": {"autoUpgrade": true, "maxUnavailable": "abc"}}}});
        stage.cluster.patch_cluster_policy(bad).await.unwrap();
        let sentence = wait().await.1.unwrap_err();
        assert!(
            sentence.starts_with("driver gpu is frozen: clusterpolicy/cluster-policy: maxUnavailable"),
            "{sentence}"
        );
    });
}

#[test]
fn without_a_controller_that_is_the_first_thing_to_be_said() {
    play(&small_fleet(), realistic(), async |stage| {
        stage.kill_controller();
        stage.cluster.set_driver_version("565.57.01").await.unwrap();
        tokio::time::sleep(Duration::from_mins(10)).await;
        insta::assert_snapshot!("no_controller", status(stage).await);
        let (lines, ended) =
            told(async |out| follow::wait(&stage.session, Duration::from_mins(5), None, out).await).await;
        assert!(lines.contains("no controller is running, nothing moves"), "{lines}");
        assert!(
            ended.unwrap_err().contains("no controller is running (Lease gpu-operator/pitcrew-controller")
        );
    });
}

#[test]
fn a_watch_shows_a_block_for_each_change_and_ends_when_all_is_done() {
    play(&small_fleet(), realistic(), async |stage| {
        stage.cluster.set_driver_version("565.57.01").await.unwrap();
        let (text, ended) =
            told(async |out| follow::watch(&stage.session, Style::default(), false, out).await).await;
        assert_eq!(ended, Ok(true));
        assert!(text.ends_with("✔ 4 nodes done, nothing to do  (clusterpolicy/cluster-policy)\n"), "{text}");
        assert!(text.matches("pod-restart-required").count() >= 4, "{text}");
    });
}

#[test]
fn a_blocked_node_is_told_with_its_budget() {
    let notebook = Workload::new("team-x", "notebook", 1, 1).with_budget(json!({"minAvailable": 1}));
    let fleet = small_fleet().with_workloads(vec![notebook]);
    play(&fleet, Behaviour::default(), async |stage| {
        stage.cluster.set_driver_version("565.57.01").await.unwrap();
        stage
            .until("a budget blocks", |reading| {
                reading.plan.pools[0].nodes.values().any(|verdict| verdict.reason.code() == "budget-never")
            })
            .await;
        insta::assert_snapshot!("blocked", status(stage).await);
    });
}

#[test]
fn a_gpu_operator_counts_as_live_by_when_its_lease_was_renewed() {
    play(&small_fleet(), Behaviour::default(), async |stage| {
        // The controller would see it renewed just now; this is about who comes later and sees it once.
        stage.kill_controller();
        let leases = kube::Api::<k8s_openapi::api::coordination::v1::Lease>::namespaced(
            stage.cluster.admin.clone(),
            "gpu-operator",
        );
        let renewed = stage.cluster.clock.now();
        let lease = json!({
            "metadata": {"name": "53822513.nvidia.com"},
            "spec": {"holderIdentity": "gpu-operator-7d9f_1", "leaseDurationSeconds": 15, "renewTime": format!("{renewed:.6}")},
        });
        leases
            .create(&kube::api::PostParams::default(), &serde_json::from_value(lease).unwrap())
            .await
            .unwrap();
        let live = status(stage).await;
        assert!(
            live.contains("a GPU Operator is live (lease/gpu-operator/53822513.nvidia.com held by"),
            "{live}"
        );
        tokio::time::sleep(Duration::from_mins(5)).await;
        let gone = status(stage).await;
        assert!(gone.contains("✔ 4 nodes done, nothing to do"), "{gone}");
    });
}

#[test]
fn a_node_that_failed_is_failed_in_a_pause_too() {
    let behaviour =
        Behaviour::default().with_fault(Nodes::Named("gpu-01".into()), "565.57.01", Fault::CrashLoop);
    play(&small_fleet(), behaviour, async |stage| {
        stage.cluster.set_driver_version("565.57.01").await.unwrap();
        stage.until_state("gpu-01", State::UpgradeFailed).await;
        stage.until_state("gpu-04", State::UpgradeDone).await;
        let pause = json!({"spec": {"driver": {"upgradePolicy": {"autoUpgrade": false}}}});
        stage.cluster.patch_cluster_policy(pause).await.unwrap();
        let text = status(stage).await;
        assert!(text.contains("⏸ paused, 3 of 4 nodes done, 1 failed"), "{text}");
        assert!(text.contains("driver pod not ready after 1800 s"), "{text}");
    });
}
