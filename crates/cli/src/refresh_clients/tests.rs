//! The sentences, and when nothing is to be done.

use pitcrew_core::api::DriverPolicy;
use pitcrew_core::names::ResourceVersion;
use pitcrew_core::policy::ClusterPolicyFacts;
use pitcrew_core::snapshot::Node;
use pitcrew_sim::actors::{Behaviour, ClientFault, DraIdentity, Fault, Nodes as FaultyNodes, Timing};
use pitcrew_sim::fleet::Fleet;
use serde_json::json;

use super::*;
use crate::tests::{Stage, play, told};

fn node(name: &str, outcome: Outcome) -> NodeClients {
    let (node, pool) = (name.into(), "gpu".into());
    NodeClients { node, pool, epoch: None, clients: vec![], outcome, wake_at: None }
}

#[test]
fn the_end_of_the_time_names_the_first_few() {
    let waits = |name| node(name, Outcome::Waits("its driver is not replaced yet".to_owned()));
    let nodes = [waits("a"), node("b", Outcome::Fresh), waits("c"), waits("d"), waits("e"), waits("f")];
    assert_eq!(
        late(&nodes, SignedDuration::from_mins(45)),
        "not fresh after 45m: a: its driver is not replaced yet; c: its driver is not replaced yet; d: its driver is not replaced yet; and 2 more"
    );
}

#[test]
fn nothing_to_do_has_to_be_certain() {
    let mut snapshot = Snapshot::new(Timestamp::UNIX_EPOCH, "gpu-operator");
    assert_eq!(nothing_to_do(&snapshot, &[]).as_deref(), Some(NO_DRIVER));
    let labels = [(DEPLOY_DRIVER_LABEL.to_owned(), "true".to_owned())].into();
    let gpu = Node::new("u".into(), ResourceVersion::from(1), labels, [].into());
    snapshot.nodes.insert("gpu-1".into(), gpu);
    snapshot
        .nodes
        .insert("cpu-1".into(), Node::new("c".into(), ResourceVersion::from(1), [].into(), [].into()));
    let survey = |snapshot: &Snapshot, more: &[&str]| {
        let nodes = Work::default().survey(snapshot, &args(more).nodes).unwrap();
        nodes.into_iter().map(|node| (node.node.to_string(), node.outcome)).collect::<Vec<_>>()
    };
    let waits = format!("labelled {DEPLOY_DRIVER_LABEL}=true, but no driver DaemonSet is meant for it yet");
    assert_eq!(survey(&snapshot, &["--all-nodes"]), [("gpu-1".to_owned(), Outcome::Waits(waits))]);
    let alone = Outcome::LeftAlone(NO_DRIVER_HERE.to_owned());
    assert_eq!(survey(&snapshot, &["--node", "cpu-1"]), [("cpu-1".to_owned(), alone)]);
    let facts = ClusterPolicyFacts { driver: json!({"enabled": false}), ..ClusterPolicyFacts::default() };
    snapshot.sources.cluster_policies.insert("cluster-policy".to_owned(), facts);
    assert_eq!(survey(&snapshot, &["--all-nodes"]), [], "the operator labels all GPU nodes");
    let said = nothing_to_do(&snapshot, &[]).unwrap();
    assert!(said.starts_with("the operator does not install the driver"), "{said}");
    let fresh = [node("gpu-1", Outcome::Fresh)];
    assert_eq!(
        nothing_to_do(&snapshot, &fresh).as_deref(),
        Some("there are no driver clients on these nodes")
    );
}

fn fleet() -> Fleet {
    Fleet::new(3)
        .with_driver("560.35.03")
        .with_workloads(vec![])
        .with_upgrade_policy(json!({"autoUpgrade": true, "maxParallelUpgrades": 1, "maxUnavailable": 1}))
        .with_dra(DraIdentity::SigsChart)
}

fn args(more: &[&str]) -> Args {
    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }
    let words = ["refresh-clients"].iter().chain(more);
    <Line as clap::Parser>::try_parse_from(words).unwrap().args
}

async fn run_it(stage: &Stage, more: &[&str]) -> (String, Result<bool, String>) {
    let args = args(more);
    told(async |out| refresh(&stage.session, &args, false, out).await).await
}

/// Whose controller leaves the clients alone, as NVIDIA's does.
async fn leave_clients_alone(stage: &Stage) {
    let spec = json!({"driver": {"name": "gpu"}, "clients": {"refresh": "Off"}});
    let policy = DriverPolicy::new("gpu", serde_json::from_value(spec).unwrap());
    let api = Api::<DriverPolicy>::all(stage.cluster.admin.clone());
    api.create(&kube::api::PostParams::default(), &policy).await.unwrap();
}

#[test]
fn each_node_is_refreshed_when_its_driver_is_there_and_a_second_run_does_nothing() {
    let slow = Behaviour::default().with_timing(Timing::real());
    play(&fleet(), slow, async |stage| {
        leave_clients_alone(stage).await;
        stage.cluster.set_driver_version("565.57.01").await.unwrap();
        let (text, ended) = run_it(stage, &["--all-nodes"]).await;
        assert_eq!(ended, Ok(true), "{text}");
        assert!(text.ends_with("3 nodes: 3 fresh; 3 clients replaced.\n"), "{text}");
        let place = |words: &str| text.find(words).unwrap_or_else(|| panic!("no \"{words}\" in:\n{text}"));
        assert!(place("gpu-01  fresh") < place("gpu-03  replaced"), "not after the slowest:\n{text}");
        let before = stage.writes();
        let (text, ended) = run_it(stage, &["--all-nodes"]).await;
        assert_eq!((ended, stage.writes()), (Ok(true), before), "{text}");
        assert!(text.ends_with("3 nodes: 3 fresh; 0 clients replaced.\n"), "{text}");
    });
}

#[test]
fn a_dry_run_says_what_it_would_do_and_changes_nothing() {
    play(&fleet(), Behaviour::default(), async |stage| {
        tokio::time::sleep(std::time::Duration::from_secs(5)).await;
        stage.cluster.actors.behaviour().restart_driver("gpu-02");
        tokio::time::sleep(std::time::Duration::from_mins(1)).await;
        let before = stage.writes();
        let (text, ended) = run_it(stage, &["--all-nodes", "--dry-run"]).await;
        assert_eq!((ended, stage.writes()), (Ok(true), before));
        assert!(text.contains("gpu-02  would delete pod dra-driver-nvidia-gpu/"), "{text}");
        assert!(text.ends_with("3 nodes: 2 fresh, 1 stale; nothing was changed.\n"), "{text}");
        let (text, _) = run_it(stage, &["--node", "gpu-01", "-o", "json"]).await;
        let document: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&document["done"], &document["replaced"]), (&json!(true), &json!(0)));
        assert_eq!(document["nodes"][0]["clients"][0]["state"], "fresh");
        let (text, ended) = run_it(stage, &["--node", "gpu-02"]).await;
        assert_eq!(ended, Ok(true), "{text}");
        assert!(text.ends_with("1 node: 1 fresh; 1 client replaced.\n"), "{text}");
    });
}

#[test]
fn who_waits_for_somebody_elses_decision_is_named_and_does_not_make_it_fail() {
    let slow = Behaviour::default().with_timing(Timing::real());
    play(&fleet(), slow, async |stage| {
        let pause = json!({"spec": {"driver": {"upgradePolicy": {"autoUpgrade": false}}}});
        stage.cluster.patch_cluster_policy(pause).await.unwrap();
        stage.cluster.set_driver_version("565.57.01").await.unwrap();
        let (text, ended) = run_it(stage, &["--all-nodes"]).await;
        assert_eq!(ended, Ok(true), "{text}");
        let said = "gpu-01  left alone: its driver is out of date, and autoUpgrade is false";
        assert!(text.contains(said), "{text}");
    });
}

#[test]
fn what_does_not_come_back_is_named_at_the_deadline() {
    play(&fleet(), Behaviour::default(), async |stage| {
        tokio::time::sleep(std::time::Duration::from_secs(5)).await;
        let name = DraIdentity::SigsChart.daemon_set();
        stage.cluster.actors.behaviour().restart_driver("gpu-02");
        tokio::time::sleep(std::time::Duration::from_secs(20)).await;
        let fault =
            ClientFault { client: name, nodes: FaultyNodes::Named("gpu-02".into()), fault: Fault::Hang };
        stage.cluster.actors.behaviour().change(|behaviour| behaviour.clients.push(fault));
        let (text, ended) = run_it(stage, &["--all-nodes", "--deadline", "2m"]).await;
        let sentence = ended.unwrap_err();
        assert!(sentence.starts_with("not fresh after 2m: gpu-02: client pod "), "{sentence}\n{text}");
    });
}

#[test]
fn a_node_that_does_not_exist_is_bad_input() {
    play(&fleet(), Behaviour::default(), async |stage| {
        let (_, ended) = run_it(stage, &["--node", "gpu-99"]).await;
        assert_eq!(ended, Err("there is no node gpu-99 (kubectl get nodes lists them)".to_owned()));
    });
}
