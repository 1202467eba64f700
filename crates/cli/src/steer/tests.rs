//! What each command changes, what it says, and that bad input changes nothing.

use kube::ResourceExt as _;
use pitcrew_core::api::{Rollout, RolloutPhase};
use pitcrew_core::contract::{CANARY_LABEL, State, nvsentinel};
use pitcrew_sim::actors::{Behaviour, Fault, Nodes, Timing};
use pitcrew_sim::fleet::Fleet;
use serde_json::json;

use super::*;
use crate::reading::Reading;
use crate::tests::{Stage, play, told};

const NEW: &str = "565.57.01";

fn fleet() -> Fleet {
    Fleet::new(3)
        .with_driver("560.35.03")
        .with_workloads(vec![])
        .with_upgrade_policy(json!({"autoUpgrade": true, "maxParallelUpgrades": 1, "maxUnavailable": "50%"}))
}

fn slow() -> Behaviour {
    Behaviour::default().with_timing(Timing::real())
}

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// What a command says, or why it does nothing.
async fn steer(stage: &Stage, dry_run: bool, decide: impl Fn(&Look) -> anyhow::Result<Vec<Step>>) -> String {
    let (text, ended) = told(async |out| carry_out(&stage.session, dry_run, decide, out).await).await;
    ended.map_or_else(|sentence| format!("{text}pitcrew: {sentence}"), |_| text.trim_end().to_owned())
}

async fn policy_says(stage: &Stage) -> Value {
    let policies = Api::<ClusterPolicy>::all(stage.cluster.admin.clone());
    policies.get("cluster-policy").await.unwrap().spec.driver["upgradePolicy"]["autoUpgrade"].clone()
}

#[test]
fn a_pause_and_a_resume_say_what_they_mean() {
    play(&fleet(), slow(), async |stage| {
        stage.cluster.set_driver_version(NEW).await.unwrap();
        stage.until_state("gpu-01", State::PodRestartRequired).await;
        let mut told = vec![steer(stage, true, |look| switch::decide(look, None, false)).await];
        assert_eq!(policy_says(stage).await, true, "a dry run changed something");
        told.push(steer(stage, false, |look| switch::decide(look, None, false)).await);
        assert_eq!(policy_says(stage).await, false);
        told.push(steer(stage, false, |look| switch::decide(look, Some("cluster-policy"), false)).await);
        told.push(
            steer(stage, false, |look| {
                switch::decide(look, Some("clusterpolicy.nvidia.com/cluster-policy"), true)
            })
            .await,
        );
        assert_eq!(policy_says(stage).await, true);
        told.push(steer(stage, false, |look| switch::decide(look, Some("cluster-policies"), true)).await);
        insta::assert_snapshot!(told.join("\n"));
    });
}

#[test]
fn a_driver_policy_is_switched_itself_and_told_of_whom_it_inherits_from() {
    play(&fleet(), slow(), async |stage| {
        let policies = Api::<DriverPolicy>::all(stage.cluster.admin.clone());
        let make = async |name: &str, selector: Value| {
            let spec = json!({"driver": {"name": "gpu"}, "nodeSelector": selector});
            let policy = DriverPolicy::new(name, serde_json::from_value(spec).unwrap());
            policies.create(&kube::api::PostParams::default(), &policy).await.unwrap();
        };
        make("gpu", json!({"kubernetes.io/hostname": "gpu-01"})).await;
        let mut told = vec![steer(stage, false, |look| switch::decide(look, None, false)).await];
        assert_eq!(policies.get("gpu").await.unwrap().spec.upgrade_policy.auto_upgrade, Some(false));
        told.push(steer(stage, false, |look| switch::decide(look, Some("cluster-policy"), false)).await);
        told.push(steer(stage, false, |look| switch::decide(look, None, true)).await);
        make("other", json!({"kubernetes.io/hostname": "gpu-02"})).await;
        told.push(steer(stage, false, |look| switch::decide(look, None, true)).await);
        insta::assert_snapshot!(told.join("\n"));
    });
}

#[test]
fn a_skipped_node_is_left_out_until_that_is_undone() {
    play(&fleet(), slow(), async |stage| {
        let skip = async |nodes: &[&str], driver: Option<&str>, undo: bool| {
            let nodes = names(nodes);
            steer(stage, false, |look| nodes::skip(look, &nodes, driver, undo)).await
        };
        let mut told = vec![
            skip(&["gpu-02", "node/gpu-02"], None, false).await,
            skip(&["gpu-02"], Some("gpu"), false).await,
        ];
        stage.cluster.set_driver_version(NEW).await.unwrap();
        stage.until_state("gpu-01", State::PodRestartRequired).await;
        told.push(skip(&["gpu-01"], None, false).await);
        stage.until_state("gpu-03", State::UpgradeDone).await;
        stage.until_state("gpu-02", State::UpgradeRequired).await;
        let before = stage.writes();
        told.push(skip(&["gpu-03", "gpu-04"], None, false).await);
        told.push(skip(&["gpu-03"], Some("gpus"), false).await);
        assert_eq!(stage.writes(), before, "bad input changed something");
        told.push(skip(&["gpu-02", "gpu-01"], None, true).await);
        told.push(skip(&["gpu-02"], None, true).await);
        stage.until_state("gpu-02", State::UpgradeDone).await;
        insta::assert_snapshot!(told.join("\n"));
    });
}

#[test]
fn only_failed_nodes_are_retried() {
    let behaviour = Behaviour::default().with_fault(Nodes::Named("gpu-01".into()), NEW, Fault::CrashLoop);
    play(&fleet(), behaviour, async |stage| {
        let retry = async |nodes: &[&str]| {
            let nodes = names(nodes);
            steer(stage, false, |look| nodes::retry(look, &nodes, None)).await
        };
        stage.cluster.set_driver_version(NEW).await.unwrap();
        stage.until_state("gpu-01", State::UpgradeFailed).await;
        let before = stage.writes();
        let mut told = vec![retry(&["gpu-02", "gpu-01"]).await];
        assert_eq!(stage.writes(), before, "bad input changed something");
        stage.cluster.actors.behaviour().change(|behaviour| behaviour.drivers.clear());
        told.push(retry(&["gpu-01"]).await);
        stage.until_state("gpu-01", State::UpgradeDone).await;
        insta::assert_snapshot!(told.join("\n"));
    });
}

#[test]
fn an_abort_is_written_into_the_rollout_that_is_under_way() {
    play(&fleet(), slow(), async |stage| {
        let abort =
            async |name: Option<&str>| steer(stage, false, |look| abort::decide(look, name, false)).await;
        let undo =
            async |name: Option<&str>| steer(stage, false, |look| abort::decide(look, name, true)).await;
        let mut told = vec![abort(None).await, undo(None).await];
        stage.cluster.set_driver_version(NEW).await.unwrap();
        stage.until_state("gpu-01", State::PodRestartRequired).await;
        told.push(abort(Some("cluster-polic-1")).await);
        told.push(abort(None).await);
        let rollouts = Api::<Rollout>::all(stage.cluster.admin.clone());
        assert!(rollouts.get("cluster-policy-1").await.unwrap().spec.abort);
        told.push(abort(Some("rollout/cluster-policy-1")).await);
        told.push(undo(None).await);
        assert!(!rollouts.get("cluster-policy-1").await.unwrap().spec.abort);
        told.push(undo(Some("cluster-policy-1")).await);
        insta::assert_snapshot!(told.join("\n"));
    });
}

#[test]
fn a_stage_is_promoted_by_name_and_opens_the_next_one() {
    let fleet = fleet().with_label("gpu-01", CANARY_LABEL, "true");
    play(&fleet, Behaviour::default(), async |stage| {
        let promote = async |rollout: Option<&str>, name: Option<&str>, skip_bake: bool| {
            let wish = promote::Wish { rollout, stage: name, by: "mei", skip_bake };
            steer(stage, false, |look| promote::decide(look, &wish, look.snapshot.now)).await
        };
        let mut told = vec![promote(None, None, false).await];
        stage.cluster.set_driver_version(NEW).await.unwrap();
        stage.until_state("gpu-02", State::UpgradeRequired).await;
        stage.until_state("gpu-01", State::UpgradeDone).await;
        tokio::time::sleep(std::time::Duration::from_mins(1)).await;
        let before = stage.writes();
        told.push(promote(None, None, false).await);
        told.push(promote(None, Some("canari"), true).await);
        told.push(promote(Some("cluster-policy-1"), Some("fleet"), true).await);
        assert_eq!(stage.writes(), before, "bad input changed something");
        told.push(promote(None, None, true).await);
        let rollouts = Api::<Rollout>::all(stage.cluster.admin.clone());
        let promotions = rollouts.get("cluster-policy-1").await.unwrap().spec.promotions;
        assert_eq!((promotions[0].stage.as_str(), promotions[0].by.as_str()), ("canary", "mei"));
        stage.until_state("gpu-02", State::UpgradeDone).await;
        told.push(promote(Some("cluster-policy-1"), Some("canary"), false).await);
        insta::assert_snapshot!(told.join("\n"));
    });
}

#[test]
fn somebody_who_writes_in_between_is_no_reason_to_give_up() {
    play(&fleet(), slow(), async |stage| {
        let label = json!({"metadata": {"labels": {"touched": "true"}}});
        stage.patch_node("gpu-02", label).await;
        let old = stage.look().await;
        stage.patch_node("gpu-02", json!({"metadata": {"labels": {"touched": "again"}}})).await;
        let first = std::cell::Cell::new(true);
        let nodes = names(&["gpu-02"]);
        let decide = |look: &Look| {
            let look = if first.take() { &old } else { look };
            nodes::skip(look, &nodes, None, false)
        };
        let said = steer(stage, false, decide).await;
        assert!(said.starts_with("gpu-02 is left out of gpu driver upgrades (label"), "{said}");
        assert_eq!(said.lines().count(), 1);
    });
}

#[test]
fn a_health_hold_is_set_and_given_back_with_what_was_there_before() {
    play(&fleet(), Behaviour::default(), async |stage| {
        let label = |value: &str| json!({"metadata": {"labels": {nvsentinel::OPT_OUT_LABEL: value}}});
        stage.patch_node("gpu-01", label("true")).await;
        stage.patch_node("gpu-02", label("false")).await;
        let target = health_hold::Target::nodes(&["gpu-01", "gpu-02"]);
        let lasts = jiff::SignedDuration::from_hours(2);
        let mut told = vec![steer(stage, false, |look| health_hold::hold(look, &target, "ann", lasts)).await];
        let nodes = Api::<Node>::all(stage.cluster.admin.clone());
        let value = async |name: &str| {
            nodes.get(name).await.unwrap().labels().get(nvsentinel::OPT_OUT_LABEL).cloned()
        };
        assert_eq!(value("gpu-01").await.as_deref(), Some("false"));
        told.push(steer(stage, false, |look| Ok(health_hold::release(look, &target)?.steps)).await);
        assert_eq!(value("gpu-01").await.as_deref(), Some("true"), "what was there before");
        assert_eq!(value("gpu-02").await.as_deref(), Some("false"), "somebody else's");
        insta::assert_snapshot!(told.join("\n"));
    });
}

#[test]
fn a_version_is_taken_back_and_cleared_in_somebodys_name() {
    let fast = Behaviour::default();
    play(&fleet(), fast, async |stage| {
        let wish = |rollout| rollback::Wish { rollout, by: "mei", why: Some("jobs are slow") };
        let take_back = async |rollout: Option<&'static str>| {
            steer(stage, false, |look| rollback::take_back(look, &wish(rollout), look.snapshot.now)).await
        };
        let clear = async |rollout: Option<&'static str>| {
            steer(stage, false, |look| rollback::clear(look, &wish(rollout), look.snapshot.now)).await
        };
        let mut told = vec![take_back(None).await, clear(None).await];
        stage.cluster.set_driver_version(NEW).await.unwrap();
        let phase = |reading: &Reading<'_>, name: &str| {
            reading.snapshot.rollouts.get(name)?.status.as_ref().map(|status| status.phase)
        };
        let done = |reading: &Reading<'_>| phase(reading, "cluster-policy-1") == Some(RolloutPhase::Done);
        stage.until("it is done", done).await;
        told.push(clear(Some("cluster-policy-1")).await);
        told.push(take_back(Some("cluster-policy-9")).await);
        told.push(take_back(None).await);
        told.push(take_back(Some("cluster-policy-1")).await);
        let promotion =
            promote::Wish { rollout: Some("cluster-policy-1"), stage: None, by: "mei", skip_bake: true };
        told.push(steer(stage, false, |look| promote::decide(look, &promotion, look.snapshot.now)).await);
        let back = |reading: &Reading<'_>| phase(reading, "cluster-policy-2") == Some(RolloutPhase::Done);
        stage.until("all nodes are back", back).await;
        told.push(take_back(Some("cluster-policy-2")).await);
        told.push(clear(None).await);
        told.push(clear(Some("cluster-policy-1")).await);
        insta::assert_snapshot!(told.join("\n"));
    });
}
