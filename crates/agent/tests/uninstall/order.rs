//! What happens, in which order, and what is asked of the API.

use std::collections::BTreeSet;

use kube::{Client, ResourceExt as _};
use pitcrew_agent::clock::Clock;
use pitcrew_agent::cluster::Cluster;
use pitcrew_agent::failure::TIMED_OUT;
use pitcrew_agent::fake::{HostDriver, Machine};
use pitcrew_agent::labels::DRA_DRIVER;
use pitcrew_agent::stop::Stop;
use pitcrew_agent::uninstall::Agent;
use pitcrew_sim::api::Fault;
use serde_json::{Value, json};

use crate::stage::{NAMESPACE, NODE, Stage, gpu_pod, operand};
use crate::{OURS, wants, with_driver};

/// What the documented program asks, without sixteen more reads of the node, and with the uncordon left to `finish`.
#[tokio::test(start_paused = true)]
async fn the_sequence_of_requests_is_the_documented_one() {
    let mut stage = Stage::new(with_driver()).await;
    wants(&mut stage, "new");
    stage.uninstall().await.unwrap();
    insta::assert_snapshot!(asked(&stage));
    insta::assert_snapshot!(changed(&stage));
}

fn asked(stage: &Stage) -> String {
    stage.trace.lock().unwrap().join("\n")
}

/// What was done to the machine.
fn changed(stage: &Stage) -> String {
    let calls = stage.host.calls();
    let changes = calls.iter().filter(|call| !call.starts_with("read ") && !call.starts_with("look "));
    changes.cloned().collect::<Vec<_>>().join("\n")
}

/// A node with the operator's DRA plugin, which leaves whatever becomes of the driver.
async fn with_plugin(machine: Machine) -> Stage {
    const PLUGIN: &str = "nvidia-dra-driver-kubelet-plugin";
    let stage = Stage::new(machine).await;
    stage.label(DRA_DRIVER, Some("true")).await;
    stage.pod(NAMESPACE, PLUGIN, json!({}), operand(PLUGIN, DRA_DRIVER)).await;
    stage.forget();
    stage
}

#[tokio::test(start_paused = true)]
async fn the_sequence_where_the_wanted_driver_is_loaded_is_the_documented_one() {
    let mut stage = with_plugin(with_driver()).await;
    wants(&mut stage, "old");
    stage.uninstall().await.unwrap();
    insta::assert_snapshot!(asked(&stage));
    insta::assert_snapshot!(changed(&stage));
}

#[tokio::test(start_paused = true)]
async fn the_sequence_where_no_driver_is_loaded_is_the_documented_one() {
    let stage = with_plugin(Machine::default()).await;
    stage.uninstall().await.unwrap();
    insta::assert_snapshot!(asked(&stage));
    insta::assert_snapshot!(changed(&stage));
}

#[tokio::test(start_paused = true)]
async fn the_node_is_read_once() {
    let stage = Stage::new(with_driver()).await;
    stage.uninstall().await.unwrap();
    assert_eq!(stage.api.counts().by_request[&("agent".to_owned(), "get", "nodes".to_owned())], 1);
}

#[tokio::test(start_paused = true)]
async fn after_it_the_driver_is_gone_and_the_labels_are_as_they_were() {
    let stage = Stage::new(with_driver()).await;
    let before = stage.node().await.labels().clone();
    stage.uninstall().await.unwrap();
    assert_eq!(*stage.node().await.labels(), before);
    let machine = stage.host.machine();
    assert!(machine.modules.is_empty());
    assert_eq!(machine.mounts, ["/", "/run"]);
    assert!(!machine.files.contains_key("/run/nvidia/nvidia-driver.pid"));
    assert!(!stage.pods().await.contains(&"research/train".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn the_same_configuration_bothers_nobody() {
    let mut stage = Stage::new(with_driver()).await;
    wants(&mut stage, "old");
    let before = stage.node().await;
    stage.uninstall().await.unwrap();
    assert_eq!(stage.host.machine().modules.len(), 4, "the driver stays");
    assert_eq!(stage.host.machine().mounts, ["/", "/run"], "its root directory is made anew");
    assert_eq!(stage.node().await, before, "nothing was written on the node");
    assert!(stage.pods().await.contains(&"research/train".to_owned()));
    assert_eq!(stage.requests(), 1);
}

#[tokio::test(start_paused = true)]
async fn the_same_configuration_is_installed_again_if_that_is_wanted() {
    let mut stage = Stage::new(with_driver()).await;
    wants(&mut stage, "old");
    stage.settings.force_reinstall = true;
    stage.uninstall().await.unwrap();
    assert!(stage.host.machine().modules.is_empty());
}

#[tokio::test(start_paused = true)]
async fn the_rest_of_the_wanted_driver_is_not_the_wanted_driver() {
    // Somebody else's unload was cut off, and there is no note of it.
    let rest = || {
        let mut machine = with_driver();
        machine.modules.retain(|name, _| name == "nvidia");
        machine.modules.insert("nvidia".to_owned(), BTreeSet::new());
        machine
    };
    let mut stage = Stage::new(rest()).await;
    wants(&mut stage, "old");
    stage.uninstall().await.unwrap();
    assert!(stage.host.machine().modules.is_empty(), "it comes anew");
    assert!(!stage.pods().await.contains(&"research/train".to_owned()), "as any other driver");
    // A driver of virtual GPUs has no such module, and one of its own.
    let mut stage = Stage::new(rest()).await;
    stage.host.change(|machine| machine.load("nvidia_vgpu_vfio", None));
    wants(&mut stage, "old");
    stage.uninstall().await.unwrap();
    assert_eq!(stage.host.machine().modules.len(), 2, "it stays");
}

#[tokio::test(start_paused = true)]
async fn the_digest_of_a_driver_that_was_unloaded_says_nothing_of_the_next_one() {
    // The agent unloads the driver, or somebody else has.
    for loaded in [true, false] {
        let mut stage = Stage::new(with_driver()).await;
        wants(&mut stage, "new");
        let driver = stage.host.machine().modules;
        if !loaded {
            stage.host.change(|machine| machine.modules.clear());
        }
        stage.uninstall().await.unwrap();
        // The new driver's container loads its modules and dies, and the configuration goes back to what it was.
        stage.host.change(|machine| machine.modules = driver);
        wants(&mut stage, "old");
        stage.uninstall().await.unwrap();
        assert!(stage.host.machine().modules.is_empty(), "the driver that is loaded is another one");
    }
}

#[tokio::test(start_paused = true)]
async fn without_a_driver_nobody_is_evicted() {
    let stage = Stage::new(Machine::default()).await;
    stage.uninstall().await.unwrap();
    assert!(stage.pods().await.contains(&"research/train".to_owned()));
    assert!(!stage.is_cordoned().await);
}

#[tokio::test(start_paused = true)]
async fn an_upgrade_controller_does_the_cordon_and_the_eviction_itself() {
    let stage = Stage::new(with_driver()).await;
    stage.annotate("nvidia.com/gpu-driver-upgrade-enabled", Some("true")).await;
    stage.patch(json!({"spec": {"unschedulable": true}})).await;
    stage.uninstall().await.unwrap();
    assert!(
        stage.pods().await.contains(&"research/train".to_owned()),
        "its pods are not the agent's business"
    );
    assert!(stage.is_cordoned().await);
    assert!(stage.host.machine().modules.is_empty());
    assert!(!stage.node().await.annotations().contains_key(OURS));
}

#[tokio::test(start_paused = true)]
async fn the_pods_of_a_custom_label_are_waited_for_and_leave_in_the_last_batch() {
    let mut stage = Stage::new(with_driver()).await;
    let key = "example.com/plugin";
    stage.settings.custom_label = Some(key.to_owned());
    stage.label(key, Some("here")).await;
    let spec =
        json!({"ownedBy": "DaemonSet", "nodeSelector": {key: "here"}, "containers": gpu_pod()["containers"]});
    stage.pod("other", "plugin", json!({}), spec).await;
    stage.uninstall().await.unwrap();
    assert!(!stage.pods().await.contains(&"other/plugin".to_owned()));
    assert_eq!(stage.node().await.labels()[key], "here");
    let trace = stage.trace.lock().unwrap().join("\n");
    let paused = trace.find("example.com/plugin = \"here_paused-for-driver-upgrade\"").unwrap();
    assert!(paused > trace.find("pods/eviction").unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_label_that_cannot_be_paused_is_told_before_anybody_is_bothered() {
    let key = "example.com/plugin";
    for label in ["nvidia.com/gpu.deploy.dcgm", key] {
        let mut stage = Stage::new(with_driver()).await;
        stage.settings.custom_label = Some(key.to_owned());
        stage.label(label, Some(&"x".repeat(40))).await;
        let failure = stage.uninstall().await.unwrap_err();
        assert!(failure.sentence().starts_with(&format!("label {label}=")), "{}", failure.sentence());
        assert_eq!(
            stage.api.counts().by_request.get(&("agent".to_owned(), "patch", "nodes".to_owned())),
            None
        );
        assert_eq!(stage.api.counts().of("create", "pods/eviction"), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn an_operand_that_does_not_leave_ends_in_a_named_failure_and_a_node_as_before() {
    let stage = Stage::new(with_driver()).await;
    let spec = json!({"ownedBy": "DaemonSet"});
    stage.pod(NAMESPACE, "stuck", json!({"labels": {"app": "nvidia-dcgm-exporter"}}), spec).await;
    let failure = stage.uninstall().await.unwrap_err();
    assert_eq!(failure.exit_code(), TIMED_OUT);
    assert!(failure.sentence().contains("pod gpu-operator/stuck still there"), "{}", failure.sentence());
    assert!(stage.paused().await.is_empty() && !stage.is_cordoned().await);
    assert!(
        stage.events().await.iter().any(|event| event.contains("waits for the pods of nvidia-dcgm-exporter"))
    );
}

#[tokio::test(start_paused = true)]
async fn a_passing_error_of_the_api_fails_nothing() {
    let stage = Stage::new(with_driver()).await;
    let mut count = 0;
    stage.api.on_request(move |request| {
        count += u32::from(request.user == "agent");
        (request.user == "agent" && count.is_multiple_of(3))
            .then_some(Fault::Status(http::StatusCode::INTERNAL_SERVER_ERROR))
    });
    stage.uninstall().await.unwrap();
    assert!(stage.host.machine().modules.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_refusal_to_write_on_the_node_counts_at_once() {
    let stage = Stage::new(with_driver()).await;
    stage.api.on_request(|request| {
        let written = request.user == "agent" && request.verb == "patch" && request.resource == "nodes";
        written.then_some(Fault::Denied("you may not"))
    });
    let before = stage.host.machine();
    let text = stage.uninstall().await.unwrap_err().sentence();
    assert_eq!(text, "pause the operands: you may not");
    assert_eq!(stage.api.counts().by_request[&("agent".to_owned(), "patch", "nodes".to_owned())], 1);
    assert_eq!(stage.host.machine(), before);
}

#[tokio::test(start_paused = true)]
async fn the_check_before_the_work_names_everything_and_changes_nothing() {
    let stage =
        Stage::new(Machine { host_driver: HostDriver::Version("535.1".to_owned()), ..with_driver() }).await;
    stage.host.change(|machine| machine.file("/proc/self/status", "CapEff:\t0000000000000000\n"));
    stage.label("nvidia.com/gpu.deploy.dcgm", Some(&"x".repeat(40))).await;
    let (node, machine) = (stage.node().await, stage.host.machine());
    let failure =
        pitcrew_agent::preflight::check(&stage.agent(pitcrew_agent::stop::Stop::never())).await.unwrap_err();
    let text = failure.sentence();
    for words in [
        "7 problems found",
        "gpu.deploy.dcgm",
        "CAP_SYS_MODULE",
        "CAP_DAC_READ_SEARCH",
        "driver 535.1 installed",
    ] {
        assert!(text.contains(words), "{text}");
    }
    assert_eq!((stage.node().await, stage.host.machine()), (node, machine));
}

/// An API that refuses to say yes to some questions about permissions.
fn forbidding(client: Client, verb_and_resource: &'static [(&'static str, &'static str)]) -> Client {
    let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
        let client = client.clone();
        async move {
            if !request.uri().path().ends_with("/selfsubjectaccessreviews") {
                return client.send(request).await;
            }
            let body = request.into_body().collect_bytes().await.unwrap();
            let mut review: Value = serde_json::from_slice(&body).unwrap();
            let asked = review["spec"]["resourceAttributes"].clone();
            let refused = verb_and_resource
                .iter()
                .any(|(verb, what)| asked["verb"] == *verb && asked["resource"] == *what);
            review["status"] = json!({"allowed": !refused});
            let body = kube::client::Body::from(review.to_string().into_bytes());
            Ok(http::Response::builder().status(201).body(body).unwrap())
        }
    });
    Client::new(service, "default")
}

#[tokio::test(start_paused = true)]
async fn the_check_before_the_work_asks_what_the_api_allows() {
    let stage = Stage::new(with_driver()).await;
    let clock = Clock::starting_at(stage.api.now());
    let check = async |refused: &'static [(&'static str, &'static str)]| {
        let client = forbidding(stage.api.client_as("agent"), refused);
        let cluster = Cluster::new(client, NODE, clock, Stop::never());
        pitcrew_agent::preflight::check(&Agent { cluster, ..stage.agent(Stop::never()) }).await
    };
    check(&[]).await.unwrap();
    let text = check(&[("create", "pods"), ("create", "events")]).await.unwrap_err().sentence();
    assert_eq!(
        text,
        "2 problems found: the service account may not create pods/eviction; the service account may not create events in \
         namespace default"
    );
}
