//! Who keeps a handle on the driver: a DRA plugin or DCGM that started before the driver which runs now is replaced, by
//! nobody twice, and the node is given back only when all of them are back.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures::FutureExt;
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Event, Node};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::ListParams;
use kube::{Api, ResourceExt};
use pitcrew_core::contract::State;
use pitcrew_core::version::DriverVersion;
use serde_json::{Value, json};

use super::reported::embedded;
use super::{NEW, fleet, in_service, scenario, whole_walks};
use crate::actors::{Behaviour, ClientFault, Dra, DraIdentity, Fault, Nodes};
use crate::fleet::Fleet;
use crate::scenario::{Broken, Outcome, Scenario, Stage, must};

/// Long enough that all plugins have been restarted before the next node's driver is touched.
const SLOW: Duration = Duration::from_secs(8);
/// Start times are whole seconds: what runs already must be older than what comes.
const EARLIER: Duration = Duration::from_secs(2);
/// What is said on a node about a client that was replaced.
const REPLACED: &str = "comes back with the driver that runs now";

pub(super) fn all() -> Vec<Scenario> {
    let dra = |identity| fleet(2).with_dra(identity);
    let mut all = vec![
        Scenario {
            policy: Some(clients(&json!({"refresh": "Off"}))),
            ..scenario("one-restart-of-the-plugin-when-the-first-node-is-ready-is-too-early", race(), |s| {
                too_early(s).boxed()
            })
        },
        scenario("dra-replug-race-slowest-node", race(), |s| just_in_time(s).boxed()),
        scenario("clients-come-back-before-the-node-does", all_clients(1), |s| come_back(s).boxed()),
        Scenario {
            behaviour: Behaviour::default().with_driver_manager(),
            ..scenario("clients-that-the-driver-manager-restarted-are-left-alone", all_clients(1), |s| {
                not_twice(s).boxed()
            })
        },
        Scenario {
            policy: Some(clients(&json!({"timeout": "5s"}))),
            ..scenario("a-client-that-does-not-come-back-fails-the-node-by-name", all_clients(1), |s| {
                not_back(s).boxed()
            })
        },
        Scenario {
            policy: Some(clients(&json!({"refresh": "Always"}))),
            ..embedded(
                &[],
                "a-driver-that-restarts-outside-of-a-rollout-gets-its-clients-back",
                dra(DraIdentity::NvidiaChart),
                |s| restarted_in_place(s).boxed(),
            )
        },
        embedded(
            &[],
            "a-stale-client-is-told-of-where-nobody-may-replace-it",
            dra(DraIdentity::NvidiaChart),
            |s| told_of(s).boxed(),
        ),
        embedded(&[], "a-reboot-leaves-no-client-stale", all_clients(2), |s| rebooted(s).boxed()),
        embedded(&[], "a-pending-template-of-the-plugin-is-taken-in-the-visit", dra_on_delete(), |s| {
            pending(s).boxed()
        }),
        Scenario {
            behaviour: Behaviour { second_slice_after: Some(Duration::from_secs(2)), ..Behaviour::default() },
            ..embedded(&[], "a-node-waits-for-all-its-resource-slices", dra(DraIdentity::NvidiaChart), |s| {
                slow_slices(s).boxed()
            })
        },
    ];
    let names = [
        (DraIdentity::NvidiaChartRelabelled, "a-relabelled-dra-plugin-is-found"),
        (DraIdentity::SigsChart, "the-dra-plugin-of-the-other-chart-is-found"),
        (DraIdentity::Operator, "the-operators-own-dra-plugin-is-found"),
    ];
    let found = |(identity, name)| embedded(&[], name, dra(identity), |s| found(s).boxed());
    all.extend(names.map(found));
    all
}

/// The slowest node migrates last.
fn race() -> Fleet {
    let policy = json!({"autoUpgrade": true, "maxParallelUpgrades": 1, "maxUnavailable": 1});
    fleet(3).with_upgrade_policy(policy).with_dra(DraIdentity::NvidiaChart)
}

fn all_clients(nodes: usize) -> Fleet {
    fleet(nodes).with_clients().with_dra(DraIdentity::NvidiaChart)
}

fn dra_on_delete() -> Fleet {
    fleet(1).with_dra(Dra { identity: DraIdentity::NvidiaChart, on_delete: true })
}

fn clients(clients: &Value) -> Value {
    json!({
        "driver": {"name": "gpu", "validator": {"selector": "app=nvidia-operator-validator"}},
        "clients": clients,
    })
}

/// The driver versions that each node's slices tell.
async fn told(stage: &Stage) -> Result<BTreeMap<String, BTreeSet<DriverVersion>>, Broken> {
    let mut told: BTreeMap<String, BTreeSet<DriverVersion>> = BTreeMap::new();
    for slice in Api::<ResourceSlice>::all(stage.cluster().admin.clone()).list(&ListParams::default()).await?
    {
        let versions = told.entry(slice.spec.node_name.unwrap_or_default()).or_default();
        for device in slice.spec.devices.unwrap_or_default() {
            let attribute = device.attributes.unwrap_or_default().remove("driverVersion");
            let version = attribute.and_then(|attribute| attribute.version);
            versions.extend(version.and_then(|version| version.parse().ok()));
        }
    }
    Ok(told)
}

/// Nodes whose slices do not tell the driver that runs there.
async fn stale(stage: &Stage) -> Result<BTreeSet<String>, Broken> {
    let told = told(stage).await?;
    let differs = |(node, version): &(String, String)| {
        let running: Option<DriverVersion> = version.parse().ok();
        !told.get(node).is_some_and(|told| told.iter().eq(running.as_ref()))
    };
    let running = stage.driver_versions().await?.into_iter();
    Ok(running.filter(differs).map(|(node, _)| node).collect())
}

/// The clients that were replaced on a node, as its events tell. A controller that is killed may leave one out: what must be
/// there is seen by what the clients offer, and the events tell that nobody was replaced without need.
async fn replaced(stage: &Stage, node: &str) -> Result<Vec<String>, Broken> {
    let events = Api::<Event>::all(stage.cluster().admin.clone()).list(&ListParams::default()).await?;
    let mut events: Vec<Event> = events.items;
    events.sort_by_key(ResourceExt::name_any);
    let about = |event: &Event| event.involved_object.name.as_deref() == Some(node);
    let messages = events.into_iter().filter(about).filter_map(|event| event.message);
    let pods = messages.filter(|message| message.contains(REPLACED));
    Ok(pods.filter_map(|message| message.split(' ').nth(1).map(str::to_owned)).collect())
}

async fn upgrade(stage: &mut Stage) -> Outcome {
    tokio::time::sleep(EARLIER).await;
    stage.set_version(NEW).await?;
    stage.until("a node is on its way", |scene| !scene.visited.is_empty()).await
}

async fn restart_plugin(stage: &Stage) -> Outcome {
    let identity = DraIdentity::NvidiaChart;
    let now = json!({"metadata": {"annotations": {"kubectl.kubernetes.io/restartedAt": "now"}}});
    let patch = json!({"spec": {"template": now}});
    stage.patch::<DaemonSet>(identity.namespace(), &identity.daemon_set(), patch).await
}

/// What a script does that waits until the cluster says "ready" and then restarts the plugin once.
async fn restart_when_the_first_is_ready(stage: &mut Stage) -> Outcome {
    stage.behaviour().change(|behaviour| behaviour.timing.driver_start = SLOW);
    upgrade(stage).await?;
    stage
        .until("the first node is done", |scene| {
            scene.count(State::UpgradeRequired) > 0 && scene.count(State::UpgradeDone) == 1
        })
        .await?;
    restart_plugin(stage).await?;
    stage.until_done().await
}

async fn too_early(stage: &mut Stage) -> Outcome {
    restart_when_the_first_is_ready(stage).await?;
    let behind = stale(stage).await?;
    must(!behind.is_empty(), || "the race was not shown: no node has stale slices".to_owned())
}

async fn just_in_time(stage: &mut Stage) -> Outcome {
    restart_when_the_first_is_ready(stage).await?;
    let behind = stale(stage).await?;
    must(behind.is_empty(), || format!("stale slices on {behind:?}"))?;
    whole_walks(stage, &stage.trace())
}

async fn come_back(stage: &mut Stage) -> Outcome {
    upgrade(stage).await?;
    stage.until_done().await?;
    let pods = replaced(stage, "gpu-01").await?;
    let plugin = pods.iter().position(|pod| pod.contains("kubelet-plugin"));
    let first = plugin.is_none_or(|place| place == 0);
    must(first && pods.len() <= 6, || format!("replaced, in this order: {pods:?}"))?;
    let node = Api::<Node>::all(stage.cluster().admin.clone()).get("gpu-01").await?;
    let offered = node.status.and_then(|status| status.allocatable).unwrap_or_default();
    let gpus = offered.get("nvidia.com/gpu").map(|gpus| gpus.0.clone());
    must(gpus.as_deref() == Some("8"), || format!("the node offers {gpus:?} GPUs"))?;
    must(stale(stage).await?.is_empty(), || "its slices are stale".to_owned())?;
    whole_walks(stage, &stage.trace())
}

async fn not_twice(stage: &mut Stage) -> Outcome {
    upgrade(stage).await?;
    stage.until_done().await?;
    let pods = replaced(stage, "gpu-01").await?;
    let only_plugin = pods.iter().all(|pod| pod.contains("kubelet-plugin"));
    must(pods.len() <= 1 && only_plugin, || format!("replaced: {pods:?}"))?;
    must(stale(stage).await?.is_empty(), || "its slices are stale".to_owned())?;
    whole_walks(stage, &stage.trace())
}

async fn not_back(stage: &mut Stage) -> Outcome {
    let fault = ClientFault { client: "nvidia-dcgm".into(), nodes: Nodes::All, fault: Fault::Hang };
    upgrade(stage).await?;
    stage.until("the driver is replaced", |scene| scene.count(State::PodRestartRequired) == 1).await?;
    stage.behaviour().change(|behaviour| behaviour.clients.push(fault));
    stage.until("it failed", |scene| scene.state("gpu-01") == State::UpgradeFailed).await?;
    stage.until_reason("gpu-01", "driver client daemonset/gpu-operator/nvidia-dcgm not back after").await?;
    must(stage.scene().cordoned.contains("gpu-01"), || "it takes work again".to_owned())
}

async fn restarted_in_place(stage: &mut Stage) -> Outcome {
    tokio::time::sleep(EARLIER).await;
    stage.behaviour().restart_driver("gpu-01");
    stage.until_reason("gpu-01", "is stale").await?;
    stage.until_reason("gpu-01", "driver up to date and ready").await?;
    let pods = (replaced(stage, "gpu-01").await?, replaced(stage, "gpu-02").await?);
    must(pods.0.len() <= 1 && pods.1.is_empty(), || format!("replaced: {pods:?}"))?;
    in_service(stage)
}

async fn told_of(stage: &mut Stage) -> Outcome {
    tokio::time::sleep(EARLIER).await;
    stage.behaviour().restart_driver("gpu-01");
    stage.until_reason("gpu-01", "is stale: it started at").await?;
    tokio::time::sleep(Duration::from_mins(5)).await;
    must(replaced(stage, "gpu-01").await?.is_empty(), || "it was replaced all the same".to_owned())
}

async fn rebooted(stage: &mut Stage) -> Outcome {
    stage.reboot("gpu-01", Duration::from_secs(20)).await;
    stage.until_reason("gpu-01", "driver up to date and ready").await?;
    tokio::time::sleep(Duration::from_mins(1)).await;
    let reason = stage.reason("gpu-01");
    must(reason == "driver up to date and ready", || format!("gpu-01: {reason}"))
}

async fn pending(stage: &mut Stage) -> Outcome {
    restart_plugin(stage).await?;
    tokio::time::sleep(Duration::from_mins(1)).await;
    must(replaced(stage, "gpu-01").await?.is_empty(), || "replaced outside of a visit".to_owned())?;
    upgrade(stage).await?;
    stage.until_done().await?;
    let pods = replaced(stage, "gpu-01").await?;
    must(pods.len() <= 1, || format!("replaced: {pods:?}"))?;
    must(stale(stage).await?.is_empty(), || "its slices are stale".to_owned())
}

/// The node is given back only when the second slice is there: both are, at that moment.
async fn slow_slices(stage: &mut Stage) -> Outcome {
    upgrade(stage).await?;
    stage.until("the first node is done", |scene| scene.state("gpu-01") == State::UpgradeDone).await?;
    let slices =
        Api::<ResourceSlice>::all(stage.cluster().admin.clone()).list(&ListParams::default()).await?;
    let there = slices.iter().filter(|slice| slice.spec.node_name.as_deref() == Some("gpu-01")).count();
    must(there == 2, || format!("{there} slices of gpu-01 are there"))?;
    stage.until_done().await?;
    must(stale(stage).await?.is_empty(), || "slices are stale".to_owned())
}

async fn found(stage: &mut Stage) -> Outcome {
    upgrade(stage).await?;
    stage.until_done().await?;
    must(stale(stage).await?.is_empty(), || "slices are stale".to_owned())?;
    for node in ["gpu-01", "gpu-02"] {
        let pods = replaced(stage, node).await?;
        must(pods.len() <= 1, || format!("replaced on {node}: {pods:?}"))?;
    }
    in_service(stage)
}
