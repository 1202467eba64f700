//! `safe-load` from beginning to end, on a machine in memory and the embedded API.

#![allow(clippy::unwrap_used, clippy::panic, reason = "what these tests do not expect is a failure")]

mod stage;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use k8s_openapi::api::core::v1::{ConfigMap, Node};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, ResourceExt as _};
use pitcrew_agent::Failure;
use pitcrew_agent::clock::Clock;
use pitcrew_agent::cluster::Cluster;
use pitcrew_agent::failure::{FAILED, TERMINATED, TIMED_OUT, USAGE};
use pitcrew_agent::fake::{Death, Machine};
use pitcrew_agent::safe_load::{Options, Overlay, safe_load};
use pitcrew_agent::stop::{Stop, Stopper};
use pitcrew_sim::api::Fault;
use serde_json::{Value, json};
use stage::{Kill, NAMESPACE, NODE, Stage};

const KEY: &str = "nvidia.com/ofed-driver-upgrade.driver-wait-for-safe-load";

async fn stage(config: Value, machine: Machine) -> Stage {
    let stage = Stage::bare(machine).await;
    let object = json!({"metadata": {"name": "config"}, "data": {"config.json": config.to_string()}});
    stage.create::<ConfigMap>(Some(NAMESPACE), object).await;
    stage.forget();
    stage
}

fn enabled() -> Value {
    json!({"safeDriverLoad": {"enable": true, "annotation": KEY}})
}

fn options() -> Options {
    Options {
        namespace: NAMESPACE.to_owned(),
        name: "config".to_owned(),
        key: "config.json".to_owned(),
        overlay: Overlay { skip: "false".to_owned(), ..Overlay::default() },
        deadline: Some(Duration::from_mins(30)),
        pod: Some("pod-1".to_owned()),
    }
}

async fn ask(stage: &Stage, options: &Options, stop: Stop) -> Result<(), Failure> {
    let agent = stage.agent(stop);
    safe_load(agent.host, &agent.cluster, &agent.stop, options).await
}

async fn request(stage: &Stage) -> Option<String> {
    stage.node().await.annotations().get(KEY).cloned()
}

/// An upgrade controller that releases every request after a while. Any non-empty value is one.
async fn release(stage: &Stage) {
    let api = Api::<Node>::all(stage.admin.clone());
    loop {
        tokio::time::sleep(Duration::from_secs(20)).await;
        let node = api.get(NODE).await.unwrap();
        if node.annotations().get(KEY).is_some_and(|value| !value.is_empty()) {
            let patch = Patch::Merge(json!({"metadata": {"annotations": {KEY: null}}}));
            api.patch(NODE, &PatchParams::default(), &patch).await.unwrap();
        }
    }
}

async fn ask_and_release(stage: &Stage, options: &Options) -> Result<(), Failure> {
    tokio::select! {
        result = ask(stage, options, Stop::never()) => result,
        () = release(stage) => unreachable!("it never ends"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_says_who_asks_and_ends_when_it_is_released() {
    let stage = stage(enabled(), Machine::default()).await;
    let look = async {
        tokio::time::sleep(Duration::from_secs(5)).await;
        request(&stage).await
    };
    let options = options();
    let (result, seen) = tokio::join!(ask_and_release(&stage, &options), look);
    result.unwrap();
    let seen: Value = serde_json::from_str(&seen.unwrap()).unwrap();
    assert_eq!(seen["pod"], "pod-1");
    assert_eq!(seen["boot"], "boot-1");
    assert_eq!(request(&stage).await, None);
    assert_eq!(stage.events().await, ["The driver waits until it can be loaded safely"]);
}

#[tokio::test(start_paused = true)]
async fn a_wait_without_a_controller_ends_with_its_own_exit_code_and_no_request() {
    let stage = stage(enabled(), Machine::default()).await;
    let failure = ask(&stage, &options(), Stop::never()).await.unwrap_err();
    assert_eq!(failure.exit_code(), TIMED_OUT);
    assert!(failure.sentence().contains("is one running?"), "{}", failure.sentence());
    assert_eq!(request(&stage).await, None);
    assert!(stage.events().await.iter().any(|event| event.starts_with("! The driver was not loaded")));
}

#[tokio::test(start_paused = true)]
async fn sigterm_takes_the_request_back() {
    let stage = stage(enabled(), Machine::default()).await;
    let (stopper, stop) = Stopper::new();
    let tell = async {
        tokio::time::sleep(Duration::from_mins(1)).await;
        assert!(request(&stage).await.is_some());
        stopper.stop();
    };
    let options = options();
    let (result, ()) = tokio::join!(ask(&stage, &options, stop), tell);
    assert_eq!(result.unwrap_err().exit_code(), TERMINATED);
    assert_eq!(request(&stage).await, None);
}

#[tokio::test(start_paused = true)]
async fn told_to_end_at_once_it_still_takes_back_what_an_earlier_start_asked() {
    let stage = stage(enabled(), Machine::default()).await;
    stage.annotate(KEY, Some(r#"{"pod":"pod-1","boot":"boot-1","since":"2026-01-01T00:00:00Z"}"#)).await;
    let (stopper, stop) = Stopper::new();
    stopper.stop();
    assert_eq!(ask(&stage, &options(), stop).await.unwrap_err().exit_code(), TERMINATED);
    assert_eq!(request(&stage).await, None);
}

#[tokio::test(start_paused = true)]
async fn a_stale_request_is_replaced_and_another_pods_is_not_taken_back() {
    for stale in ["true", r#"{"pod":"pod-0","boot":"boot-1","since":"2026-01-01T00:00:00Z"}"#] {
        let stage = stage(enabled(), Machine::default()).await;
        stage.annotate(KEY, Some(stale)).await;
        let look = async {
            tokio::time::sleep(Duration::from_secs(5)).await;
            let seen = request(&stage).await.unwrap();
            assert!(seen.contains("pod-1"), "{seen}");
            // The next pod has asked while this one ends.
            stage.annotate(KEY, Some(&seen.replace("pod-1", "pod-2"))).await;
        };
        let options = options();
        let (result, ()) = tokio::join!(ask(&stage, &options, Stop::never()), look);
        assert_eq!(result.unwrap_err().exit_code(), TIMED_OUT);
        assert!(request(&stage).await.unwrap().contains("pod-2"), "it is not this pod's");
    }
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_nobody_told_its_uid_does_not_take_back_what_the_next_one_asks() {
    let options = Options { pod: None, ..options() };
    let mounted = |uid: &str| {
        format!("95 90 8:1 /var/lib/kubelet/pods/{uid}/etc-hosts /etc/hosts rw - ext4 /dev/sda1 rw")
    };
    // With the kubelet's mounts, and where even those say nothing.
    for mounts in [Some(["pod-1", "pod-2"]), None] {
        let stage = stage(enabled(), Machine::default()).await;
        let becomes = |pod: usize| {
            let text = mounts.map(|uids| mounted(uids[pod])).unwrap_or_default();
            stage.host.change(|machine| machine.file("/proc/self/mountinfo", &text));
        };
        becomes(0);
        let (stopper, stop) = Stopper::new();
        let next = async {
            tokio::time::sleep(Duration::from_mins(1)).await;
            becomes(1);
            let asking = ask_and_release(&stage, &options);
            let ending = async {
                tokio::time::sleep(Duration::from_secs(1)).await;
                let asked = request(&stage).await;
                stopper.stop();
                tokio::time::sleep(Duration::from_secs(1)).await;
                assert!(asked.is_some() && request(&stage).await == asked, "the old pod took it back");
            };
            tokio::join!(asking, ending).0.unwrap();
        };
        let (old, ()) = tokio::join!(ask(&stage, &options, stop), next);
        assert_eq!(old.unwrap_err().exit_code(), TERMINATED);
    }
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_nobody_told_its_uid_takes_back_what_an_earlier_start_asked() {
    let stage = stage(enabled(), Machine::default()).await;
    let mounts = "96 90 8:2 /pods/pod-1/containers/c/1a2b /dev/termination-log rw - xfs /dev/sdb rw";
    stage.host.change(|machine| machine.file("/proc/self/mountinfo", mounts));
    stage.annotate(KEY, Some(r#"{"pod":"pod-1","boot":"boot-1","since":"2026-01-01T00:00:00Z"}"#)).await;
    let (stopper, stop) = Stopper::new();
    stopper.stop();
    let options = Options { pod: None, ..options() };
    assert_eq!(ask(&stage, &options, stop).await.unwrap_err().exit_code(), TERMINATED);
    assert_eq!(request(&stage).await, None);
}

#[tokio::test(start_paused = true)]
async fn its_own_request_is_not_written_twice() {
    let stage = stage(enabled(), Machine::default()).await;
    let own = r#"{"pod":"pod-1","boot":"boot-1","since":"2026-01-01T00:00:00Z"}"#;
    stage.annotate(KEY, Some(own)).await;
    ask_and_release(&stage, &options()).await.unwrap();
    assert_eq!(stage.api.counts().by_request.get(&("agent".to_owned(), "patch", "nodes".to_owned())), None);
}

#[tokio::test(start_paused = true)]
async fn a_patch_that_fails_for_a_moment_is_tried_again() {
    let stage = stage(enabled(), Machine::default()).await;
    let mut count = 0;
    stage.api.on_request(move |request| {
        count += u32::from(request.user == "agent");
        (request.user == "agent" && count < 5).then_some(Fault::Status(http::StatusCode::SERVICE_UNAVAILABLE))
    });
    ask_and_release(&stage, &options()).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_broken_watch_is_not_the_end() {
    let stage = stage(enabled(), Machine::default()).await;
    let lines = stage.api.lines();
    let cut = async {
        for _ in 0..3 {
            tokio::time::sleep(Duration::from_secs(4)).await;
            lines.forget("agent");
        }
    };
    let options = options();
    let (result, ()) = tokio::join!(ask_and_release(&stage, &options), cut);
    result.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_says_nothing_any_more_is_given_up() {
    let stage = stage(enabled(), Machine::default()).await;
    let mut first = true;
    stage.api.on_request(move |request| {
        let watch = request.user == "agent" && request.verb == "watch";
        (watch && std::mem::take(&mut first)).then_some(Fault::Delay(Duration::from_hours(24)))
    });
    let options = Options { deadline: None, ..options() };
    let asking = ask_and_release(&stage, &options);
    tokio::time::timeout(Duration::from_mins(5), asking).await.unwrap().unwrap();
}

/// An API whose watches end at once, without a word.
fn hasty(client: Client, asked: Arc<AtomicUsize>) -> Client {
    let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
        let (client, asked) = (client.clone(), asked.clone());
        async move {
            if !request.uri().query().is_some_and(|query| query.contains("watch=true")) {
                return client.send(request).await;
            }
            assert!(asked.fetch_add(1, Ordering::Relaxed) < 100, "asked again and again without a pause");
            Ok(http::Response::new(kube::client::Body::empty()))
        }
    });
    Client::new(service, "default")
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_ends_at_once_is_not_asked_for_again_at_once() {
    let stage = stage(enabled(), Machine::default()).await;
    let asked = Arc::new(AtomicUsize::new(0));
    let agent = stage.agent(Stop::never());
    let client = hasty(stage.api.client_as("agent"), asked.clone());
    let cluster = Cluster::new(client, NODE, Clock::starting_at(stage.api.now()), Stop::never());
    let options = options();
    tokio::select! {
        result = safe_load(agent.host, &cluster, &agent.stop, &options) => result.unwrap(),
        () = release(&stage) => unreachable!("it never ends"),
    }
    assert!(asked.load(Ordering::Relaxed) <= 5, "{} watches in 20 s", asked.load(Ordering::Relaxed));
}

fn checked(modules: &[&str]) -> Value {
    let mut config = enabled();
    config["moduleDependencyCheck"] = json!({"modules": modules});
    config
}

#[tokio::test(start_paused = true)]
async fn modules_that_nobody_drains_away_are_told_before_anybody_is_drained() {
    let mut machine = Machine::default();
    machine.load("rpcrdma", Some("rdma_cm"));
    let stage = stage(checked(&["rdma_cm"]), machine).await;
    let failure = ask_and_release(&stage, &options()).await.unwrap_err();
    assert_eq!(failure.exit_code(), FAILED);
    assert!(failure.sentence().contains("storage module rpcrdma uses rdma_cm"), "{}", failure.sentence());
    assert_eq!(stage.api.counts().of("patch", "nodes"), 0, "nobody was asked to drain the node");
}

#[tokio::test(start_paused = true)]
async fn programs_that_a_drain_ends_do_not_keep_it_from_being_asked_for() {
    let mut machine = Machine::default();
    machine.load("mlx5_core", None);
    machine.open(9, "ibv_rc_pingpong", "/dev/infiniband/uverbs0", &["mlx5_core"]);
    let stage = stage(checked(&["mlx5_core"]), machine).await;
    // Nobody ends it: it is told after the release.
    let failure = ask_and_release(&stage, &options()).await.unwrap_err();
    assert!(failure.sentence().contains("1 references that no module explains"), "{}", failure.sentence());
    assert_eq!(stage.api.counts().of("patch", "nodes"), 2, "asked, and released");
    // The drain ends it.
    stage.host.change(|machine| machine.processes.clear());
    ask_and_release(&stage, &options()).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_wrong_mount_of_proc_does_not_pass_for_a_clean_machine() {
    let stage = stage(checked(&["mlx5_core"]), Machine { no_proc: true, ..Machine::default() }).await;
    let failure = ask_and_release(&stage, &options()).await.unwrap_err();
    assert!(failure.sentence().contains("/proc/modules"), "{}", failure.sentence());
}

#[tokio::test(start_paused = true)]
async fn switched_off_it_does_not_touch_the_node_but_for_a_request_of_its_own() {
    let off = json!({"safeDriverLoad": {"enable": false, "annotation": KEY}});
    let stage = stage(off, Machine::default()).await;
    ask(&stage, &options(), Stop::never()).await.unwrap();
    assert_eq!(stage.api.counts().of("patch", "nodes"), 0);
    stage.annotate(KEY, Some("true")).await;
    ask(&stage, &options(), Stop::never()).await.unwrap();
    assert_eq!(request(&stage).await.as_deref(), Some("true"), "another program's");
}

#[tokio::test(start_paused = true)]
async fn a_missing_configuration_and_an_unknown_node_are_failures() {
    let stage = Stage::bare(Machine::default()).await;
    assert_eq!(ask(&stage, &options(), Stop::never()).await.unwrap_err().exit_code(), USAGE);
    let object = json!({"metadata": {"name": "config"}, "data": {"other": "{}"}});
    stage.create::<ConfigMap>(Some(NAMESPACE), object).await;
    let failure = ask(&stage, &options(), Stop::never()).await.unwrap_err();
    assert_eq!(failure.sentence(), "configmap gpu-operator/config has no key config.json");
}

#[test]
fn killed_anywhere_it_comes_to_the_same_end() {
    let run = |kill: Option<Kill>| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        runtime.unwrap().block_on(async {
            let mut machine = Machine::default();
            machine.load("mlx5_core", None);
            let stage = stage(checked(&["mlx5_core"]), machine).await;
            stage.host.dies(None);
            if let Some(kill) = kill {
                stage.plan(kill);
            }
            let options = options();
            let mut counts = None;
            for start in 0.. {
                let ended = stage.until_killed(Box::pin(ask_and_release(&stage, &options))).await;
                counts.get_or_insert((stage.host.calls().len(), stage.requests()));
                match ended {
                    Some(result) => {
                        result.unwrap();
                        break;
                    }
                    None => assert!(start < 2, "{kill:?}: killed twice"),
                }
            }
            let (calls, requests) = counts.unwrap();
            (stage.end().await, calls, requests)
        })
    };
    let (expected, calls, requests) = run(None);
    for after in [false, true] {
        let host = (1..=calls).map(|at| Kill::Host(Death { at, after }));
        for kill in host.chain((1..=requests).map(|at| Kill::Api { at, after })) {
            assert_eq!(run(Some(kill)).0, expected, "killed at {kill:?}");
        }
    }
    println!("safe-load: {calls} calls, {requests} requests, {} points", 2 * (calls + requests));
}
