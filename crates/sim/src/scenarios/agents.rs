//! Driver pods whose init container is pitcrew's own driver manager, on machines in memory: with the controller, without one,
//! and where somebody else's is at work.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use k8s_openapi::api::core::v1::{ConfigMap, Event, Node, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::ResourceExt;
use kube::api::{ListParams, Patch, PatchParams};
use pitcrew_agent::fake::FakeHost;
use pitcrew_core::contract::{
    AGENT_CORDON_ANNOTATION, DEFAULT_LABEL_DOMAIN, Keys, NEEDS_REBOOT_ANNOTATION, State,
};
use serde_json::{Value, json};

use super::{NEW, NEWER, OLD, STATE_LABEL, fleet, in_service, scenario, whole_walks};
use crate::actors::{Behaviour, DraIdentity, Fault, Machines, NAMESPACE, Nodes, SAFE_LOAD_CONFIG};
use crate::fleet::{Fleet, Workload};
use crate::scenario::{Broken, Outcome, Scenario, Script, Stage, must};

const TEAM: &str = "research";
/// A namespace that is there without a workload of the fleet.
const DEFAULT: &str = "default";
/// What an operand's label says while it is paused.
const PAUSED: &str = "paused-for-driver-upgrade";

pub(super) fn all() -> Vec<Scenario> {
    let pinned = Machines { modules: vec!["gdrdrv".to_owned()], ..Machines::default() };
    let unfinished = Machines { without_finish: true, ..Machines::default() };
    let mut busy = Machines::default();
    busy.programs.insert("gpu-01".to_owned(), "nv-hostengine".to_owned());
    vec![
        on(Machines::default(), "our-driver-manager-under-our-controller", managed(), |s| {
            under_controller(s).boxed()
        }),
        on(Machines::default(), "our-driver-manager-alone", alone(&json!({})), |s| {
            by_itself(s, false).boxed()
        }),
        on(Machines::default(), "our-driver-manager-alone-with-an-early-uncordon", alone(&early()), |s| {
            by_itself(s, true).boxed()
        }),
        on(
            Machines::default(),
            "our-driver-manager-where-another-controller-is-at-work",
            alone(&json!({})),
            |s| under_another(s).boxed(),
        ),
        on(pinned, "gdrdrv-pins-module", managed(), |s| with_pinned_module(s).boxed()),
        on(busy, "a-busy-module-is-told-of-and-waited-for", managed(), |s| waits_for_program(s).boxed()),
        on(Machines::default(), "dra-reboot-deadlock", with_claims(), |s| reboots_with_claims(s).boxed()),
        on(Machines::default(), "a-missing-image-leaves-the-node-out", alone(&json!({})), |s| {
            without_image(s).boxed()
        }),
        on(Machines::default(), "half-a-driver-keeps-its-node-out-until-it-is-booted", managed(), |s| {
            half_unloaded(s).boxed()
        }),
        on(unfinished, "half-a-driver-outside-of-a-visit-is-mended-by-a-boot", idle(), |s| {
            half_unloaded_by_hand(s).boxed()
        }),
        on(
            Machines::default(),
            "the-controller-takes-over-our-driver-managers-cordon",
            alone(&json!({})),
            |s| cordon_is_taken_over(s).boxed(),
        ),
        on(Machines::default(), "our-safe-load-under-our-controller", managed(), |s| loads_safely(s).boxed()),
    ]
}

fn on(machines: Machines, name: &'static str, fleet: Fleet, script: Script) -> Scenario {
    Scenario { behaviour: Behaviour::default().with_agents(machines), ..scenario(name, fleet, script) }
}

fn with_work(nodes: usize) -> Fleet {
    let work = vec![Workload::new(TEAM, "train", 2, 8)];
    fleet(nodes).with_clients().with_workloads(work).with_grace_seconds(1)
}

/// Nobody uses the devices.
fn idle() -> Fleet {
    fleet(2).with_clients().with_grace_seconds(1)
}

fn managed() -> Fleet {
    with_work(2)
}

/// An installation whose driver manager is told this.
fn alone(env: &Value) -> Fleet {
    let manager =
        env.as_object().into_iter().flatten().map(|(name, value)| json!({"name": name, "value": value}));
    let manager: Vec<Value> = manager.collect();
    with_work(2).with_driver_options(json!({"manager": {"env": manager}}))
}

fn early() -> Value {
    json!({"UNCORDON": "early"})
}

fn with_claims() -> Fleet {
    fleet(1).with_clients().with_dra(DraIdentity::Operator)
}

async fn nodes(stage: &Stage) -> Result<Vec<Node>, Broken> {
    let api = Api::<Node>::all(stage.cluster().admin.clone());
    Ok(api.list(&ListParams::default()).await?.items)
}

fn paused(nodes: &[Node]) -> Vec<&String> {
    let labels = nodes.iter().flat_map(ResourceExt::labels);
    labels.filter(|(_, value)| value.contains(PAUSED)).map(|(key, _)| key).collect()
}

/// Everything is where it was: no operand paused, no cordon, no record of the driver manager.
async fn left_nothing(stage: &Stage) -> Outcome {
    let nodes = nodes(stage).await?;
    let paused = paused(&nodes);
    must(paused.is_empty(), || format!("paused are {paused:?}"))?;
    for node in nodes {
        let record = node.annotations().get(AGENT_CORDON_ANNOTATION);
        must(record.is_none(), || format!("{}: left is {record:?}", node.name_any()))?;
        let record = node.annotations().get(NEEDS_REBOOT_ANNOTATION);
        must(record.is_none(), || format!("{}: left is {record:?}", node.name_any()))?;
    }
    in_service(stage)
}

/// What the driver manager says on a node.
async fn said(stage: &Stage, node: &str) -> Result<Vec<String>, Broken> {
    let api = Api::<Event>::all(stage.cluster().admin.clone());
    let about = |event: &Event| event.involved_object.name.as_deref() == Some(node);
    let by_agent =
        |event: &Event| event.source.as_ref().is_some_and(|source| source.host.as_deref() == Some(node));
    let events = api.list(&ListParams::default()).await?.items.into_iter();
    Ok(events.filter(|event| about(event) && by_agent(event)).filter_map(|event| event.message).collect())
}

async fn until_versions(stage: &Stage, versions: &[&str]) -> Outcome {
    let done = async || {
        let found: Vec<String> = ready_versions(stage).await?.into_values().collect();
        Ok((found == versions).then_some(()))
    };
    stage.poll(&format!("the drivers are {versions:?} and ready"), done).await
}

/// The versions of the drivers that are ready.
async fn ready_versions(stage: &Stage) -> Result<BTreeMap<String, String>, Broken> {
    let ready: Vec<String> = stage
        .pods(NAMESPACE)
        .await?
        .into_iter()
        .filter(|(.., ready)| *ready)
        .map(|(name, ..)| name)
        .collect();
    let mut versions = BTreeMap::new();
    for (node, version) in stage.driver_versions().await? {
        if ready.contains(&stage.driver_pod(&node).await?) {
            versions.insert(node, version);
        }
    }
    Ok(versions)
}

/// The controller empties the node; the driver manager takes the operands off and unloads, and moves nobody else.
async fn under_controller(stage: &mut Stage) -> Outcome {
    stage.set_version(NEW).await?;
    stage.until("the first is on its way", |scene| !scene.visited.is_empty()).await?;
    stage.until_done().await?;
    until_versions(stage, &[NEW, NEW]).await?;
    stage.until_pods_ready(TEAM, 2).await?;
    for node in ["gpu-01", "gpu-02"] {
        let told = said(stage, node).await?;
        must(told.is_empty(), || format!("the driver manager of {node} had something to say: {told:?}"))?;
        unloaded(stage, node, "nvidia")?;
    }
    left_nothing(stage).await?;
    whole_walks(stage, &stage.trace())
}

async fn with_pinned_module(stage: &mut Stage) -> Outcome {
    under_controller(stage).await?;
    unloaded(stage, "gpu-01", "gdrdrv")?;
    unloaded(stage, "gpu-02", "gdrdrv")
}

fn host(stage: &Stage, node: &str) -> Result<Arc<FakeHost>, Broken> {
    let machines = stage.behaviour().get().agents.unwrap_or_default();
    machines.hosts.get(node).ok_or_else(|| Broken(format!("there is no machine under {node}")))
}

/// The driver manager of a node has removed a module.
fn unloaded(stage: &Stage, node: &str, module: &str) -> Outcome {
    let calls = host(stage, node)?.calls();
    must(calls.contains(&format!("remove module {module}")), || format!("{node}: {calls:#?}"))
}

/// The documented installation without an upgrade controller: the operator takes its marks off the nodes.
async fn switch_off(stage: &Stage) -> Outcome {
    stage.set_upgrade_policy(json!({"autoUpgrade": false})).await?;
    // What is under way may be answered; then nothing moves.
    tokio::time::sleep(Duration::from_secs(3)).await;
    let enabled = Keys::new(&"gpu".into(), DEFAULT_LABEL_DOMAIN).enabled;
    for node in ["gpu-01", "gpu-02"] {
        let marks = json!({"annotations": {&enabled: null}, "labels": {STATE_LABEL: null}});
        stage.patch_node(node, json!({"metadata": marks})).await?;
    }
    Ok(())
}

/// A person deletes one driver pod after the other, as documented; the node comes back with its driver, or before it.
async fn by_itself(stage: &mut Stage, early: bool) -> Outcome {
    stage.behaviour().change(|behaviour| behaviour.timing.driver_start = Duration::from_secs(5));
    switch_off(stage).await?;
    stage.set_version(NEW).await?;
    for (node, then) in [("gpu-01", [NEW, OLD]), ("gpu-02", [NEW, NEW])] {
        stage.delete::<Pod>(NAMESPACE, &stage.driver_pod(node).await?).await?;
        stage.until("the node is emptied", |scene| scene.cordoned.contains(node)).await?;
        stage.until("the node is given back", |scene| scene.cordoned.is_empty()).await?;
        let up = ready_versions(stage).await?.get(node).is_some_and(|version| version == NEW);
        must(up != early, || format!("{node} takes work, and its driver is up: {up}"))?;
        until_versions(stage, &then).await?;
        unloaded(stage, node, "nvidia")?;
    }
    stage.until_pods_ready(TEAM, 2).await?;
    left_nothing(stage).await
}

/// NVIDIA's controller says on the node that it empties it. Until it has, the driver stays, and nobody is moved.
async fn under_another(stage: &mut Stage) -> Outcome {
    switch_off(stage).await?;
    let enabled = Keys::new(&"gpu".into(), DEFAULT_LABEL_DOMAIN).enabled;
    for node in ["gpu-01", "gpu-02"] {
        stage.patch_node(node, json!({"metadata": {"annotations": {&enabled: "true"}}})).await?;
    }
    let before = stage.pods(TEAM).await?;
    stage.set_version(NEW).await?;
    for node in ["gpu-01", "gpu-02"] {
        stage.delete::<Pod>(NAMESPACE, &stage.driver_pod(node).await?).await?;
    }
    for node in ["gpu-01", "gpu-02"] {
        let failed = async || {
            let told = said(stage, node).await?;
            Ok(told.iter().any(|line| line.contains("cannot be unloaded")).then_some(()))
        };
        stage.poll("the driver manager says who has the driver open", failed).await?;
        let modules = host(stage, node)?.machine().modules;
        must(modules.len() == 4, || format!("{node}: left of the driver is {modules:?}"))?;
    }
    must(stage.pods(TEAM).await? == before, || "work was moved".to_owned())?;
    must(stage.scene().cordoned.is_empty(), || "a node was cordoned".to_owned())?;
    // Now it has.
    for node in ["gpu-01", "gpu-02"] {
        stage.patch_node(node, json!({"spec": {"unschedulable": true}})).await?;
    }
    for (name, ..) in before {
        stage.delete::<Pod>(TEAM, &name).await?;
    }
    until_versions(stage, &[NEW, NEW]).await?;
    let cordoned = stage.scene().cordoned;
    must(cordoned.len() == 2, || format!("still cordoned are only {cordoned:?}"))
}

/// A program of the machine has the driver open: the node says which, and goes on when it has ended.
async fn waits_for_program(stage: &mut Stage) -> Outcome {
    stage.set_version(NEW).await?;
    stage.until_reason("gpu-01", "(nv-hostengine) has /dev/nvidia0 open").await?;
    must(stage.scene().cordoned.contains("gpu-01"), || "the node takes work".to_owned())?;
    let told = said(stage, "gpu-01").await?;
    must(told.iter().any(|line| line.contains("nv-hostengine")), || format!("it said only {told:?}"))?;
    let back = async || Ok(paused(&nodes(stage).await?).is_empty().then_some(()));
    stage.poll("the operands are back while it waits", back).await?;
    stage.behaviour().change(|behaviour| behaviour.agents.iter_mut().for_each(|ours| ours.programs.clear()));
    stage.until_done().await?;
    until_versions(stage, &[NEW, NEW]).await?;
    left_nothing(stage).await?;
    whole_walks(stage, &stage.trace())
}

/// After a boot nobody has the driver open, and claims cannot be prepared without it: waiting for their holders would be
/// for ever.
async fn reboots_with_claims(stage: &mut Stage) -> Outcome {
    let request = json!({"name": "r", "exactly": {"deviceClassName": "gpu.nvidia.com"}});
    let claim = json!({"metadata": {"name": "gpu"}, "spec": {"devices": {"requests": [request]}}});
    stage.create::<ResourceClaim>(DEFAULT, claim).await?;
    let result = json!({"request": "r", "driver": "gpu.nvidia.com", "pool": "gpu-01", "device": "gpu-0"});
    let status = json!({"status": {"allocation": {"devices": {"results": [result]}}}});
    let api = Api::<ResourceClaim>::namespaced(stage.cluster().admin.clone(), DEFAULT);
    api.patch_status("gpu", &PatchParams::default(), &Patch::Merge(status)).await?;
    let pod = json!({
        "nodeName": "gpu-01",
        "resourceClaims": [{"name": "gpu", "resourceClaimName": "gpu"}],
        "containers": [{"name": "main", "image": "m:1"}],
    });
    stage.create::<Pod>(DEFAULT, json!({"metadata": {"name": "holder"}, "spec": pod})).await?;
    stage.until_pods_ready(DEFAULT, 1).await?;
    stage.reboot("gpu-01", Duration::from_secs(1)).await;
    let asleep = async || Ok(stage.pods(DEFAULT).await?.iter().all(|(.., ready)| !ready).then_some(()));
    stage.poll("everything starts again", asleep).await?;
    until_versions(stage, &[OLD]).await?;
    stage.until_pods_ready(DEFAULT, 1).await?;
    left_nothing(stage).await
}

/// The old driver of a node is gone and the new one does not come: the node must not take work.
async fn without_driver(stage: &mut Stage) -> Outcome {
    switch_off(stage).await?;
    let missing = Nodes::Named("gpu-01".to_owned());
    stage.behaviour().change(|behaviour| {
        *behaviour = std::mem::take(behaviour).with_fault(missing, NEW, Fault::ImageMissing);
    });
    stage.set_version(NEW).await?;
    stage.delete::<Pod>(NAMESPACE, &stage.driver_pod("gpu-01").await?).await?;
    let waits = async || {
        let told = said(stage, "gpu-01").await?;
        Ok(told.iter().any(|line| line.contains("stays cordoned until")).then_some(()))
    };
    stage.poll("the driver manager has done its part", waits).await?;
    tokio::time::sleep(Duration::from_secs(3)).await;
    must(stage.scene().cordoned.contains("gpu-01"), || "a node without a driver takes work".to_owned())
}

/// … until it does.
async fn without_image(stage: &mut Stage) -> Outcome {
    without_driver(stage).await?;
    stage.behaviour().change(|behaviour| behaviour.drivers.clear());
    until_versions(stage, &[NEW, OLD]).await?;
    stage.until("the node is given back", |scene| scene.cordoned.is_empty()).await?;
    must(stage.scene().state("gpu-01") == State::Unknown, || "the controller had a hand in it".to_owned())?;
    left_nothing(stage).await
}

/// Somebody takes hold of the driver in the middle of its removal. The node is not given back, and says what helps.
async fn half_unloaded(stage: &mut Stage) -> Outcome {
    host(stage, "gpu-01")?
        .change(|machine| machine.grabbed = Some(("nvidia_uvm".to_owned(), "nvidia".to_owned())));
    stage.set_version(NEW).await?;
    stage.until_reason("gpu-01", "needs a reboot, says its driver manager").await?;
    // It is tried again and again, and stays so.
    tokio::time::sleep(Duration::from_secs(5)).await;
    let scene = stage.scene();
    must(scene.cordoned.contains("gpu-01"), || "a node with half a driver takes work".to_owned())?;
    must(scene.state("gpu-01") == State::PodRestartRequired, || format!("{}", scene.state("gpu-01")))?;
    let left = host(stage, "gpu-01")?.machine().modules;
    must(left.contains_key("nvidia") && left.len() < 4, || format!("it is not half a driver: {left:?}"))?;
    must(!paused(&nodes(stage).await?).is_empty(), || "operands run on half a driver".to_owned())?;
    stage.reboot("gpu-01", Duration::from_secs(1)).await;
    stage.until_done().await?;
    until_versions(stage, &[NEW, NEW]).await?;
    stage.until_pods_ready(TEAM, 2).await?;
    left_nothing(stage).await?;
    whole_walks(stage, &stage.trace())
}

/// The same on a node that a person has left out, and whose driver pod that person deletes: its driver manager cordons it, and
/// nothing beside the driver gives it back. Once it is not left out any more, the controller does, after a look at the driver.
async fn half_unloaded_by_hand(stage: &mut Stage) -> Outcome {
    let skip = Keys::new(&"gpu".into(), DEFAULT_LABEL_DOMAIN).skip;
    stage.label("gpu-01", &skip, Some("true")).await?;
    stage.set_version(NEW).await?;
    stage.until("the other is done", |scene| scene.state("gpu-02") == State::UpgradeDone).await?;
    until_versions(stage, &[OLD, NEW]).await?;
    host(stage, "gpu-01")?
        .change(|machine| machine.grabbed = Some(("nvidia_uvm".to_owned(), "nvidia".to_owned())));
    stage.delete::<Pod>(NAMESPACE, &stage.driver_pod("gpu-01").await?).await?;
    stage.until("its driver manager keeps it out", |scene| scene.cordoned.contains("gpu-01")).await?;
    stage.reboot("gpu-01", Duration::from_secs(1)).await;
    until_versions(stage, &[NEW, NEW]).await?;
    tokio::time::sleep(Duration::from_secs(5)).await;
    must(stage.scene().cordoned.contains("gpu-01"), || "it was to be left alone".to_owned())?;
    stage.label("gpu-01", &skip, None).await?;
    stage.until("the node is given back", |scene| scene.cordoned.is_empty()).await?;
    stage.until_done().await?;
    left_nothing(stage).await
}

/// The driver manager has cordoned a node by itself, and its driver does not come. The controller, switched on, brings the
/// next version, and with it the node back; whoever waits beside the driver leaves that to it.
async fn cordon_is_taken_over(stage: &mut Stage) -> Outcome {
    without_driver(stage).await?;
    let record = |nodes: &[Node]| {
        nodes.iter().filter(|node| node.annotations().contains_key(AGENT_CORDON_ANNOTATION)).count()
    };
    must(record(&nodes(stage).await?) == 1, || "the cordon is not the driver manager's".to_owned())?;
    stage.set_version(NEWER).await?;
    stage.set_upgrade_policy(json!({"autoUpgrade": true})).await?;
    stage.until("it is on a visit", |scene| scene.visited.contains("gpu-01")).await?;
    stage.until_done().await?;
    until_versions(stage, &[NEWER, NEWER]).await?;
    left_nothing(stage).await
}

/// Driver pods ask for a safe moment: at an upgrade, after a boot, and on a node that joins. Each loads its driver when the
/// controller has emptied the node, and nobody waits in the end.
async fn loads_safely(stage: &mut Stage) -> Outcome {
    let annotation = Keys::new(&"gpu".into(), DEFAULT_LABEL_DOMAIN).safe_load;
    let config = json!({"safeDriverLoad": {"enable": true, "annotation": annotation}}).to_string();
    let map = json!({"metadata": {"name": SAFE_LOAD_CONFIG}, "data": {"config.json": config}});
    stage.create::<ConfigMap>(NAMESPACE, map).await?;
    let patch = json!({"spec": {"driver": {"version": NEW, "safeLoad": true}}});
    stage.cluster().patch_cluster_policy(patch).await?;
    stage.until("the first is on its way", |scene| !scene.visited.is_empty()).await?;
    stage.until_done().await?;
    asked_and_got(stage, &["gpu-01", "gpu-02"]).await?;
    stage.until_pods_ready(TEAM, 2).await?;
    let before = stage.driver_pod("gpu-01").await?;
    stage.reboot("gpu-01", Duration::from_secs(1)).await;
    stage.until("the node is on its way again", |scene| scene.visited.contains("gpu-01")).await?;
    stage.until_done().await?;
    let after = stage.driver_pod("gpu-01").await?;
    must(before == after, || format!("{before} only had to load, but became {after}"))?;
    stage.join("gpu-03").await?;
    stage.until("the new node is on its way", |scene| scene.visited.contains("gpu-03")).await?;
    stage.until_done().await?;
    until_versions(stage, &[NEW, NEW, NEW]).await?;
    stage.until_pods_ready(TEAM, 2).await?;
    asked_and_got(stage, &["gpu-01", "gpu-02", "gpu-03"]).await?;
    left_nothing(stage).await
}

/// Safe load has spoken on each of these nodes, and waits on none.
async fn asked_and_got(stage: &Stage, names: &[&str]) -> Outcome {
    for name in names {
        let told = said(stage, name).await?;
        must(told.iter().any(|line| line.contains("waits until it can be loaded safely")), || {
            format!("{name}: nobody asked; said was {told:?}")
        })?;
    }
    for node in nodes(stage).await? {
        let waits = node.annotations().iter().find(|(key, _)| key.contains("safe-load"));
        must(waits.is_none(), || format!("{}: {waits:?} was left behind", node.name_any()))?;
    }
    Ok(())
}
