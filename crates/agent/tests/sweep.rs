//! `kill -9` at every call to the machine and at every request to the API, once before it has its effect and once after.
//! The agent is started again until it ends, as a kubelet would. The end must be the one of an undisturbed run, nobody
//! else's cordon may be lifted, and half a driver is never called fine.

#![allow(clippy::unwrap_used, clippy::panic, reason = "what these tests do not expect is a failure")]

mod stage;

use std::time::Duration;

use kube::ResourceExt as _;
use pitcrew_agent::fake::{Death, HostDriver, Machine};
use pitcrew_agent::host::PciDevice;
use pitcrew_agent::labels::PAUSED;
use serde_json::json;
use stage::{Kill, NAMESPACE, Stage, early, operand};

/// In a story that is disturbed twice every so manyth point is the second one: all pairs would be thousands.
const STRIDE: usize = 7;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Story {
    Replaced,
    ReplacedEarly,
    ForeignCordon,
    Managed,
    Kept,
    NoDriver,
    Busy,
    Half,
    HalfUncordoned,
    WithPlugin,
    GivenBack,
    Drained,
    DrainedInVain,
    CustomLabel,
    CustomClient,
    HostDriver,
    HostDriverGone,
}

const DRA: &str = "nvidia.com/gpu.deploy.dra-driver";
const CUSTOM: &str = "example.com/plugin";
const DRIVER: &str = "nvidia.com/gpu.deploy.driver";

impl Story {
    async fn stage(self) -> Stage {
        let machine = match self {
            Story::NoDriver => Machine::default(),
            _ => Machine::with_driver("old"),
        };
        let mut stage = Stage::new(machine).await;
        "new".clone_into(&mut stage.settings.digest);
        match self {
            Story::Replaced => {}
            Story::ReplacedEarly => stage = early(stage),
            Story::ForeignCordon => {
                stage = early(stage);
                stage.patch(json!({"spec": {"unschedulable": true}})).await;
            }
            Story::Managed => {
                stage.annotate("nvidia.com/gpu-driver-upgrade-enabled", Some("true")).await;
                stage.patch(json!({"spec": {"unschedulable": true}})).await;
            }
            Story::Kept => "old".clone_into(&mut stage.settings.digest),
            Story::NoDriver => stage.host.change(|machine| {
                machine.load("nouveau", None);
                machine.devices.push(PciDevice {
                    address: "a".to_owned(),
                    vendor: 0x10de,
                    class: 0x03_0000,
                    driver: Some("vfio-pci".to_owned()),
                    ..PciDevice::default()
                });
            }),
            Story::Busy => {
                stage.host.change(|machine| machine.open(7, "python3", "/dev/nvidia0", &["nvidia"]));
            }
            Story::Half | Story::HalfUncordoned => {
                // Who evicts nobody does not cordon either.
                stage.settings.evict = self == Story::Half;
                let grabbed = Some(("nvidia_uvm".to_owned(), "nvidia".to_owned()));
                stage.host.change(|machine| machine.grabbed = grabbed);
            }
            Story::WithPlugin => {
                stage.label(DRA, Some("true")).await;
                let app = "nvidia-dra-driver-kubelet-plugin";
                stage.pod(NAMESPACE, app, json!({}), operand(app, DRA)).await;
            }
            Story::GivenBack => {
                stage.uninstall().await.unwrap();
                stage.load_new_driver();
                // A person was faster than `finish`; now comes another driver, which cannot replace this one.
                stage.patch(json!({"spec": {"unschedulable": null}})).await;
                stage.host.change(|machine| machine.open(7, "python3", "/dev/nvidia0", &["nvidia"]));
                "newer".clone_into(&mut stage.settings.digest);
            }
            Story::Drained => {
                // Nobody sees whose process it is, and it ends with none of the pods: everybody is taken off for it.
                stage.settings.drain = true;
                stage.host.change(|machine| machine.open(7, "monitor", "/dev/nvidia0", &["nvidia"]));
                stage.pod("research", "monitor", json!({}), json!({"ownedBy": "ReplicaSet"})).await;
                stage.pod("kube-system", "network", json!({}), json!({"ownedBy": "DaemonSet"})).await;
            }
            Story::DrainedInVain => {
                stage.settings.drain = true;
                stage.host.change(|machine| machine.open(7, "monitor", "/dev/nvidia0", &["nvidia"]));
                stage.uninstall().await.unwrap_err();
                stage.pod("research", "tolerant", json!({}), json!({"ownedBy": "ReplicaSet"})).await;
            }
            Story::CustomLabel => {
                stage.settings.custom_label = Some(CUSTOM.to_owned());
                stage.label(CUSTOM, Some("here")).await;
                let spec = json!({"ownedBy": "DaemonSet", "nodeSelector": {CUSTOM: "here"}});
                stage.pod("other", "plugin", json!({}), spec).await;
            }
            Story::CustomClient => {
                stage.settings.custom_label = Some(CUSTOM.to_owned());
                stage.label(CUSTOM, Some("here")).await;
                stage.label(DRA, Some("true")).await;
                let app = "nvidia-dra-driver-kubelet-plugin";
                stage.pod(NAMESPACE, app, json!({}), operand(app, DRA)).await;
                let device = json!({"driver": "gpu.nvidia.com", "pool": "p", "device": "d", "request": "r"});
                stage.claim("other", "gpu", device).await;
                let claims = json!([{"name": "c", "resourceClaimName": "gpu"}]);
                let selector = json!({CUSTOM: "here"});
                let spec =
                    json!({"ownedBy": "DaemonSet", "nodeSelector": selector, "resourceClaims": claims});
                stage.pod("other", "client", json!({}), spec).await;
            }
            Story::HostDriver => {
                stage.host.change(|machine| machine.host_driver = HostDriver::Version("535.1".to_owned()));
            }
            Story::HostDriverGone => {
                stage.label(DRIVER, Some("pre-installed")).await;
                stage.annotate("pitcrew.dev/host-driver", Some("{\"before\":\"true\"}")).await;
            }
        }
        stage.forget();
        stage
    }

    fn succeeds(self) -> bool {
        !matches!(
            self,
            Story::Busy
                | Story::Half
                | Story::HalfUncordoned
                | Story::GivenBack
                | Story::Drained
                | Story::DrainedInVain
                | Story::HostDriver
        )
    }
}

/// Plays a story and kills the agent once for each of `kills`; what it comes to, and how many calls and requests the first
/// run made.
async fn play(story: Story, kills: &[Kill]) -> (String, usize, usize) {
    let stage = story.stage().await;
    let mut counts = None;
    // One start more than it is killed; a second kill may lie behind the end.
    for start in 0..=kills.len() {
        stage.forget();
        stage.host.dies(None);
        if let Some(kill) = kills.get(start) {
            stage.plan(*kill);
        }
        let half = is_half(&stage);
        let ended = stage.until_killed(stage.uninstall()).await;
        counts.get_or_insert((stage.host.calls().len(), stage.requests()));
        // Where nobody cordons first, a start that was killed between two modules could not do that either, nor the next one if
        // it was killed before it had written on the node.
        let cannot_say = ended.is_none() && (!half || stage.requests() <= 2);
        judge(&stage, story, story == Story::HalfUncordoned && cannot_say).await;
        match ended {
            Some(Ok(())) => break,
            Some(Err(failure)) => {
                assert!(!story.succeeds(), "{story:?} {kills:?}: {}", failure.sentence());
                break;
            }
            None => {}
        }
    }
    // What a cluster does by itself is over.
    tokio::time::sleep(Duration::from_secs(10)).await;
    let (calls, requests) = counts.unwrap();
    (stage.end().await, calls, requests)
}

fn is_half(stage: &Stage) -> bool {
    let loaded = stage.host.machine().modules;
    loaded.contains_key("nvidia") && !loaded.contains_key("nvidia_uvm")
}

/// What must hold at every moment at which an agent may have been killed. `uncordoned`: half a driver may be there before anybody could say so.
async fn judge(stage: &Stage, story: Story, uncordoned: bool) {
    let node = stage.node().await;
    let cordoned = node.spec.as_ref().and_then(|spec| spec.unschedulable).unwrap_or(false);
    let ours = node.annotations().contains_key("pitcrew.dev/driver-manager-cordon");
    if matches!(story, Story::ForeignCordon | Story::Managed) {
        assert!(cordoned && !ours, "{story:?}: a foreign cordon was touched");
    }
    if is_half(stage) {
        assert!(cordoned || uncordoned, "{story:?}: half a driver on a node that takes work");
        let operands = node.labels().iter().filter(|(key, _)| key.contains("gpu.deploy.dcgm"));
        for (key, value) in operands {
            assert!(value.contains(PAUSED), "{story:?}: {key} comes back to half a driver");
        }
    }
    // A label is never lost: it says what it said, or that and the mark.
    for (_, label) in stage::OPERANDS {
        let value = node.labels().get(label).map(String::as_str);
        assert!(matches!(value, Some("true" | "paused-for-driver-upgrade")), "{story:?}: {label}={value:?}");
    }
    if story == Story::DrainedInVain {
        assert!(cordoned && ours, "{story:?}: its pods come back to be drained again");
        assert!(stage.pods().await.contains(&"research/tolerant".to_owned()), "{story:?}: drained again");
    }
    if matches!(story, Story::CustomLabel | Story::CustomClient) {
        let value = node.labels()[CUSTOM].as_str();
        assert!(matches!(value, "here" | "here_paused-for-driver-upgrade"), "{CUSTOM}={value}");
    }
    // Nobody forgets what the driver's label said before.
    let before = node.annotations().contains_key("pitcrew.dev/host-driver");
    assert_eq!(node.labels()[DRIVER], if before { "pre-installed" } else { "true" }, "{story:?}");
}

fn run(story: Story, kills: &[Kill]) -> (String, usize, usize) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.unwrap().block_on(play(story, kills))
}

/// Every call and every request, each before its effect and after it.
fn points(calls: usize, requests: usize) -> Vec<Kill> {
    let both = [false, true].into_iter();
    let of_one = |after| {
        let host = (1..=calls).map(move |at| Kill::Host(Death { at, after }));
        host.chain((1..=requests).map(move |at| Kill::Api { at, after }))
    };
    both.flat_map(of_one).collect()
}

fn sweep(story: Story) {
    let (expected, calls, requests) = run(story, &[]);
    let points = points(calls, requests);
    for kill in &points {
        assert_eq!(run(story, &[*kill]).0, expected, "{story:?} killed at {kill:?}");
    }
    println!("{story:?}: {calls} calls, {requests} requests, {} points", points.len());
}

fn sweep_twice(story: Story) {
    let (expected, calls, requests) = run(story, &[]);
    let points = points(calls, requests);
    let mut pairs = 0;
    for (index, first) in points.iter().enumerate() {
        for second in points.iter().skip(index % STRIDE).step_by(STRIDE) {
            pairs += 1;
            assert_eq!(
                run(story, &[*first, *second]).0,
                expected,
                "{story:?} killed at {first:?} and {second:?}"
            );
        }
    }
    println!("{story:?}: {pairs} pairs of points");
}

#[test]
fn killed_anywhere_while_the_driver_is_replaced() {
    sweep(Story::Replaced);
}

#[test]
fn killed_anywhere_with_the_early_uncordon() {
    sweep(Story::ReplacedEarly);
}

#[test]
fn killed_anywhere_on_a_node_that_others_cordoned() {
    sweep(Story::ForeignCordon);
}

#[test]
fn killed_anywhere_under_an_upgrade_controller() {
    sweep(Story::Managed);
}

#[test]
fn killed_anywhere_while_the_driver_is_kept() {
    sweep(Story::Kept);
}

#[test]
fn killed_anywhere_without_a_driver() {
    sweep(Story::NoDriver);
}

#[test]
fn killed_anywhere_with_a_busy_driver() {
    sweep(Story::Busy);
}

#[test]
fn killed_anywhere_around_half_a_driver() {
    sweep(Story::Half);
}

#[test]
fn killed_anywhere_around_half_a_driver_where_nobody_cordons_first() {
    sweep(Story::HalfUncordoned);
}

#[test]
fn killed_anywhere_with_a_dra_plugin() {
    sweep(Story::WithPlugin);
}

#[test]
fn killed_anywhere_after_a_person_gave_the_node_back() {
    sweep(Story::GivenBack);
}

#[test]
fn killed_anywhere_while_the_node_is_drained() {
    let end = run(Story::Drained, &[]).0;
    assert!(!end.contains("research/") && end.contains("kube-system/network"), "{end}");
    sweep(Story::Drained);
}

#[test]
fn killed_anywhere_after_a_drain_that_did_not_help() {
    sweep(Story::DrainedInVain);
}

#[test]
fn killed_anywhere_with_a_plugin_of_another_installation() {
    sweep(Story::CustomLabel);
}

#[test]
fn killed_anywhere_with_a_client_that_holds_a_claim() {
    sweep(Story::CustomClient);
}

#[test]
fn killed_anywhere_on_a_node_with_a_driver_of_its_own() {
    sweep(Story::HostDriver);
}

#[test]
fn killed_anywhere_after_the_hosts_driver_was_removed() {
    sweep(Story::HostDriverGone);
}

#[test]
fn killed_twice_while_the_driver_is_replaced() {
    sweep_twice(Story::Replaced);
}

#[test]
fn killed_twice_around_half_a_driver() {
    sweep_twice(Story::Half);
}

#[test]
fn killed_twice_around_half_a_driver_where_nobody_cordons_first() {
    sweep_twice(Story::HalfUncordoned);
}
