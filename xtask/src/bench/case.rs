//! One case: a plane and a fleet, a controller, one change of version, and the figures of it.

use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use pitcrew_controller::Clock;
use pitcrew_core::api::{DriverPolicy, DriverPolicySpec};
use pitcrew_core::version::DriverVersion;
use pitcrew_sim::actors::{Behaviour, DRIVER_APP, NAMESPACE, Timing};
use pitcrew_sim::cluster::Cluster;
use pitcrew_sim::fleet::{Fleet, Workload};
use pitcrew_sim::plane::{AuditLog, Binaries, Plane, PlaneOptions, User};
use serde_json::json;
use tokio::time::{Instant, sleep, timeout};

use super::audit::Audit;
use super::controller::Controller;
use super::figures::Figures;
use super::floor;
use super::recorder::Recorder;
use crate::cargo::workspace;

/// What the fleet goes to, and what one node alone goes to afterwards.
const NEXT: &str = "550.54.15";
const AFTER_NEXT: &str = "560.35.03";

const SKIP_LABEL: &str = "nvidia.com/gpu-driver-upgrade.skip";

/// Thousands of objects on a busy machine.
const SET_UP_TIMEOUT: Duration = Duration::from_mins(5);
/// Ten times what is expected at ten nodes at a time.
const UPGRADE_TIMEOUT: Duration = Duration::from_mins(5);
/// Events are written behind the nodes' backs; after this the controller must have nothing left to say.
const SETTLE: Duration = Duration::from_secs(3);
/// How long it must keep silent then.
const IDLE: Duration = Duration::from_secs(20);
/// The audit log is written in batches.
const AUDIT_DELAY: Duration = Duration::from_secs(1);

/// The namespace of the pods that have to leave.
const WORKLOADS: &str = "research";
/// Any number: the same fleet behaves the same way each time.
const SEED: u64 = 1;
/// The pods of one Deployment; three on every two nodes in all.
const REPLICAS: u32 = 10;
/// Labels on nodes are set this many at a time.
const LABELS_IN_FLIGHT: usize = 32;

/// What to measure.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) nodes: u32,
    /// 0 is no limit.
    pub(super) max_parallel: u32,
}

/// Clockwork: what varies is the controller, not the machines.
fn timing() -> Timing {
    Timing {
        driver_start: Duration::from_millis(500),
        driver_stop: Duration::from_millis(200),
        workload_stop: Duration::from_secs(1),
        jitter: 0.0,
        ..Timing::default()
    }
}

fn fleet(nodes: u32) -> Fleet {
    let mut left = nodes * 3 / 2;
    let mut workloads = Vec::new();
    while left > 0 {
        let replicas = left.min(REPLICAS);
        // A budget that is asked for every eviction and refuses none: what it costs is measured, not what it forbids.
        let budget = json!({"maxUnavailable": "100%"});
        let name = format!("train-{}", workloads.len());
        workloads.push(Workload::new(WORKLOADS, &name, replicas, 1).with_budget(budget));
        left -= replicas;
    }
    // The grace period is what a pod takes to stop.
    Fleet::new(nodes as usize).with_workloads(workloads).with_grace_seconds(1).without_validators()
}

/// Runs a case on a plane of its own.
pub(super) async fn run(binaries: &Binaries, program: &Path, case: Case) -> Result<Figures> {
    println!("Starting a control plane with {} nodes …", case.nodes);
    let plane = Plane::start(binaries, PlaneOptions { audit: AuditLog::Requests, data_dir: None }).await?;
    plane.grant(&workspace().join("charts/pitcrew/golden/permissions.yaml"))?;
    let client = |user| Client::try_from(plane.config(user)).context("make a client");
    let bench = client(User::Bench)?;
    let fleet = fleet(case.nodes);
    let behaviour = Behaviour::default().with_timing(timing());
    let set_up =
        Cluster::real(client(User::Admin)?, bench.clone(), client(User::Kubelet)?, &fleet, SEED, behaviour);
    let cluster = timeout(SET_UP_TIMEOUT, set_up).await.context("the fleet is not ready in time")??;
    create_policy(&cluster, case).await?;

    let recorder = Recorder::start(cluster.admin.clone());
    let mut controller = Controller::start(program, &plane)?;
    let (count, limit) = (fleet.nodes, UPGRADE_TIMEOUT);
    controller
        .during(recorder.settled(count, limit))
        .await
        .context("wait until the controller knows the fleet")?;
    sleep(SETTLE).await;

    println!("Upgrading …");
    let before = controller.usage()?;
    recorder.begin();
    let (start, patched_at) = (Instant::now(), Clock::System.now());
    cluster.set_driver_version(NEXT).await.context("patch the version")?;
    controller.during(recorder.done(count, limit)).await.context("upgrade the fleet")?;
    let wall = start.elapsed();
    sleep(SETTLE).await;
    let (settled_at, seen, after) = (Clock::System.now(), recorder.seen(), controller.usage()?);
    all_drivers_are(NEXT, &cluster, count).await?;

    println!("Upgraded; listening for {} s whether the controller is silent now …", IDLE.as_secs());
    sleep(IDLE).await;
    let silent_until = Clock::System.now();
    sleep(AUDIT_DELAY).await;
    let log = Audit::read(plane.audit_log().context("the plane has no audit log")?)?;
    let asked = |time: Range<Timestamp>| log.requests(User::Pitcrew, &time);
    let (requests, idle) = (asked(patched_at..settled_at), asked(settled_at..silent_until));
    let written = |user| (user, log.requests(user, &(patched_at..settled_at)).writes_total());
    let others = [User::Kubelet, User::ControllerManager, User::Scheduler].map(written).to_vec();

    println!("Measuring one node alone, then the floor …");
    let names: Vec<String> = fleet.node_names().collect();
    let visit_alone = one_alone(&cluster, &recorder, &mut controller, &names).await?;
    controller.stop().await?;
    let floor_writes = floor::measure(&bench, &names, &requests.writes, seen.record_bytes()).await?;

    let Timing { workload_stop, driver_stop, driver_start, .. } = timing();
    Ok(Figures {
        case,
        wall,
        requests,
        others,
        idle,
        idle_time: IDLE,
        most_out: seen.most_out,
        visits: seen.visits(),
        visit_alone,
        before,
        after,
        floor_writes,
        pods_own: workload_stop + driver_stop + driver_start,
        record_bytes: seen.record_bytes(),
    })
}

/// Without a validator in it nothing is waited for after the driver.
async fn create_policy(cluster: &Cluster, case: Case) -> Result<()> {
    let spec = json!({
        "driver": {"name": "gpu"},
        "upgradePolicy": {
            "autoUpgrade": true, "maxParallelUpgrades": case.max_parallel, "maxUnavailable": "100%",
            "waitForCompletion": {"podSelector": "job=important", "timeoutSeconds": 60},
        },
    });
    let spec: DriverPolicySpec = serde_json::from_value(spec)?;
    let api = Api::<DriverPolicy>::all(cluster.admin.clone());
    api.create(&PostParams::default(), &DriverPolicy::new("gpu", spec)).await.context("create the policy")?;
    Ok(())
}

/// The labels say that it is done; the pods must say the same.
async fn all_drivers_are(version: &str, cluster: &Cluster, count: usize) -> Result<()> {
    let api = Api::<Pod>::namespaced(cluster.admin.clone(), NAMESPACE);
    let pods = api.list(&ListParams::default().labels(&format!("app={DRIVER_APP}"))).await?;
    let image = |pod: &Pod| pod.spec.as_ref()?.containers.first()?.image.clone();
    let versions = pods.iter().filter_map(image).filter_map(|image| DriverVersion::from_image(&image));
    let current = versions.filter(|found| found.to_string() == version).count();
    if current != count {
        bail!(
            "All nodes are upgrade-done, but only {current} of {count} driver pods are of version {version}."
        );
    }
    Ok(())
}

/// The first node with work on it: without any, a visit would be shorter than most.
async fn busy_node(cluster: &Cluster) -> Result<String> {
    let pods = Api::<Pod>::namespaced(cluster.admin.clone(), WORKLOADS).list(&ListParams::default()).await?;
    let node = |pod: Pod| pod.spec.and_then(|spec| spec.node_name);
    pods.items.into_iter().filter_map(node).min().context("no workload runs anywhere")
}

/// How long a visit takes when the machine has nothing else to do: another version, and all nodes skipped but one.
async fn one_alone(
    cluster: &Cluster,
    recorder: &Recorder,
    controller: &mut Controller,
    names: &[String],
) -> Result<Duration> {
    let busy = busy_node(cluster).await?;
    let nodes = Api::<Node>::all(cluster.admin.clone());
    let skip = json!({"metadata": {"labels": {SKIP_LABEL: "true"}}});
    let labelled = names.iter().filter(|name| **name != busy).map(|name| {
        let (nodes, skip) = (nodes.clone(), &skip);
        async move { nodes.patch(name, &PatchParams::default(), &Patch::Merge(skip)).await.map(drop) }
    });
    let labelled = stream::iter(labelled).buffer_unordered(LABELS_IN_FLIGHT).try_collect::<()>();
    timeout(UPGRADE_TIMEOUT, labelled)
        .await
        .context("label the nodes in time")?
        .context("label the nodes")?;
    sleep(SETTLE).await;
    recorder.begin();
    cluster.set_driver_version(AFTER_NEXT).await.context("patch the version")?;
    controller.during(recorder.done(1, UPGRADE_TIMEOUT)).await.context("upgrade one node")?;
    recorder.seen().visits().first().copied().context("the node was never cordoned")
}
