//! What people reported about driver upgrades that went wrong, under the names of the reports, and what must happen here
//! instead. `docs/scenarios.md` says where each comes from.

use std::time::Duration;

use futures::FutureExt;
use http::StatusCode;
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment, StatefulSet};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use pitcrew_core::contract::State;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{NEW, NEWER, STATE_LABEL, fleet, in_service, scenario, whole_walks};
use crate::actors::{self, Behaviour, NAMESPACE, Nodes};
use crate::api::{ApiServer, Fault};
use crate::fleet::{Fleet, Workload};
use crate::scenario::{Broken, On, Outcome, Scenario, Script, Stage, must};

/// The workloads' namespace.
pub(super) const TEAM: &str = "team-x";

pub(super) fn all() -> Vec<Scenario> {
    vec![
        Scenario {
            shows: &["W1"],
            policy: Some(limits(&json!({"validation": "5s"}))),
            ..scenario("validate-fails-while-driver-ready", fleet(1), |s| validation_fails(s).boxed())
        },
        Scenario {
            shows: &["W11"],
            policy: Some(limits(&json!({"validation": "5s"}))),
            ..scenario("no-validator-pod", fleet(1), |s| no_validator(s).boxed())
        },
        Scenario {
            shows: &["W9"],
            behaviour: broken(Nodes::Named("gpu-01".to_owned()), actors::Fault::CrashLoop),
            policy: Some(limits(&json!({"driverReady": "5s"}))),
            ..scenario("one-failed-maxparallel-1", spread(3, 2), |s| one_failed(s).boxed())
        },
        Scenario {
            shows: &["W10"],
            behaviour: broken(Nodes::All, actors::Fault::ImageMissing),
            ..scenario("imagepullbackoff-forever", fleet(2), |s| image_missing(s).boxed())
        },
        Scenario {
            shows: &["W9"],
            behaviour: broken(Nodes::All, actors::Fault::CrashLoop),
            policy: Some(limits(&json!({"driverReady": "5s", "failureThreshold": "100%"}))),
            ..scenario("fixed-spec-blocked-by-broken-pod", spread(2, 2), |s| fixed_spec(s).boxed())
        },
        embedded(&["W3", "W8"], "cordon-denied-blocks-uncordon", spread(4, 2), |s| denied(s).boxed()),
        Scenario {
            shows: &["W12"],
            ..scenario("gpu-daemonset-consumer", fleet(2), |s| daemon_set_consumer(s).boxed())
        },
        Scenario { shows: &["W5"], ..scenario("rack-precordoned", spread(4, 3), |s| precordoned(s).boxed()) },
        scenario("admin-cordon-survives", spread(2, 2), |s| admin_cordon(s).boxed()),
        scenario("other-controller-uncordons-midway", fleet(1), |s| uncordoned_midway(s).boxed()),
        scenario("same-name-pod-moves", spread(2, 1), |s| same_name(s).boxed()),
        Scenario {
            shows: &["W4"],
            ..scenario("pdb-never", one_replica(json!({"minAvailable": 1})), |s| pdb_never(s).boxed())
        },
        embedded(&["W4"], "pdb-blocked", blocked_budget(), |s| pdb_blocked(s).boxed()),
        embedded(&[], "unreachable-node-pdb", one_replica(json!({"maxUnavailable": 1})), |s| {
            unreachable(s).boxed()
        }),
        scenario("chart-label-only-change", one_replica(json!({"maxUnavailable": 1})), |s| {
            label_only(s).boxed()
        }),
        embedded(&[], "a-template-seen-late-is-not-restarted-in-place", notebook(), |s| {
            template_seen_late(s).boxed()
        }),
        Scenario {
            shows: &["W14"],
            ..scenario("driver-pod-already-gone", fleet(1), |s| driver_pod_gone(s).boxed())
        },
        Scenario { shows: &["W15"], ..scenario("label-set-by-hand", fleet(1), |s| label_by_hand(s).boxed()) },
        Scenario {
            shows: &["W22"],
            ..scenario("bad-max-unavailable", fleet(1), |s| bad_max_unavailable(s).boxed())
        },
        Scenario {
            shows: &["W25"],
            ..scenario("gpu-in-an-init-container", spread(2, 1), |s| init_container(s).boxed())
        },
        Scenario {
            behaviour: broken(Nodes::Named("gpu-01".to_owned()), actors::Fault::CrashLoop),
            policy: Some(limits(&json!({"driverReady": "5s"}))),
            ..scenario("documented-recovery-by-hand", spread(1, 1), |s| recovery_by_hand(s).boxed())
        },
        embedded(&["W7"], "node-deleted-midway", spread(3, 1), |s| node_deleted(s).boxed()),
        embedded(&["W18"], "timers-survive-restarts", slow_jobs(), |s| timers(s).boxed()),
        Scenario {
            policy: Some(json!({
                "driver": {"name": "gpu"}, "limits": {"onBlocked": "Release", "blockedAfter": "5s"},
                "upgradePolicy": {"gpuPodDeletion": {"timeoutSeconds": 0}},
            })),
            ..embedded(&[], "blocked-node-is-given-back", blocked_budget(), |s| given_back(s).boxed())
        },
        scenario("abort-restores-schedulability", endless_job(), |s| aborted(s).boxed()),
    ]
}

pub(super) fn embedded(
    shows: &'static [&'static str],
    name: &'static str,
    fleet: Fleet,
    script: Script,
) -> Scenario {
    Scenario { shows, on: On::Embedded, ..scenario(name, fleet, script) }
}

/// A DriverPolicy with the operator's validators and these limits.
pub(super) fn limits(limits: &Value) -> Value {
    json!({
        "driver": {"name": "gpu", "validator": {"selector": "app=nvidia-operator-validator"}},
        "limits": limits,
    })
}

pub(super) fn broken(nodes: Nodes, fault: actors::Fault) -> Behaviour {
    Behaviour::default().with_fault(nodes, NEW, fault)
}

/// Nodes without work, one upgrade at a time, so many of them out at most.
pub(super) fn spread(nodes: usize, out: u32) -> Fleet {
    fleet(nodes).with_upgrade_policy(json!({"autoUpgrade": true, "maxUnavailable": out}))
}

/// One node, and work on it.
fn notebook() -> Fleet {
    fleet(1).with_workloads(vec![Workload::new(TEAM, "notebook", 1, 8)]).with_grace_seconds(1)
}

fn one_replica(budget: Value) -> Fleet {
    let work = Workload::new(TEAM, "notebook", 1, 8).with_budget(budget);
    spread(2, 1).with_workloads(vec![work]).with_grace_seconds(1)
}

/// Two nodes full of one workload of two pods, of which one may be missing: the second node waits for room.
fn blocked_budget() -> Fleet {
    let work = Workload::new(TEAM, "serve", 2, 8).with_budget(json!({"minAvailable": 2}));
    let policy = json!({"autoUpgrade": true, "maxUnavailable": 1, "podDeletion": {"timeoutSeconds": 0}});
    Fleet::new(3).with_workloads(vec![work]).with_grace_seconds(1).with_upgrade_policy(policy)
}

/// A node with a job that is waited for as long as it takes.
fn endless_job() -> Fleet {
    let work = Workload::new(TEAM, "job", 1, 1);
    let wait = json!({"podSelector": "app=job", "timeoutSeconds": 0});
    let policy = json!({"autoUpgrade": true, "maxUnavailable": 1, "waitForCompletion": wait});
    Fleet::new(1).with_workloads(vec![work]).with_grace_seconds(1).with_upgrade_policy(policy)
}

/// A node with a job that is waited for.
fn slow_jobs() -> Fleet {
    let mut work = Workload::new(TEAM, "job", 1, 1);
    work.annotations.push(("sim.pitcrew.dev/stop-seconds".to_owned(), "1".to_owned()));
    let wait = json!({"podSelector": "app=job", "timeoutSeconds": 60});
    let policy = json!({"autoUpgrade": true, "maxUnavailable": 1, "waitForCompletion": wait});
    Fleet::new(1).with_workloads(vec![work]).with_upgrade_policy(policy)
}

pub(super) fn embedded_api(stage: &Stage) -> Result<ApiServer, Broken> {
    stage.cluster().api.clone().ok_or_else(|| Broken("needs the embedded API".to_owned()))
}

/// Somebody else uses up what the budgets allow, at every moment.
fn refuse_evictions(server: &ApiServer) {
    server.on_request(|request| {
        let evicts = request.verb == "create" && request.resource == "pods/eviction";
        evicts.then_some(Fault::Status(StatusCode::TOO_MANY_REQUESTS))
    });
}

async fn failed_and_stays(stage: &mut Stage, node: &str, words: &str) -> Outcome {
    stage.until("the node fails", |scene| scene.state(node) == State::UpgradeFailed).await?;
    stage.until_reason(node, words).await?;
    stage.stands_still_for(Duration::from_secs(5)).await?;
    must(stage.scene().cordoned.contains(node), || format!("{node} failed and is in service"))
}

async fn validation_fails(stage: &mut Stage) -> Outcome {
    stage.behaviour().change(|behaviour| behaviour.unproven.extend(["gpu-01".to_owned()]));
    stage.set_version(NEW).await?;
    failed_and_stays(stage, "gpu-01", "not validated after 5 s").await?;
    stage.behaviour().change(|behaviour| behaviour.unproven.clear());
    stage.label("gpu-01", STATE_LABEL, Some("upgrade-required")).await?;
    stage.until_done().await?;
    in_service(stage)
}

async fn no_validator(stage: &mut Stage) -> Outcome {
    stage.label("gpu-01", "nvidia.com/gpu.deploy.operator-validator", None).await?;
    stage.set_version(NEW).await?;
    failed_and_stays(stage, "gpu-01", "no validator pod").await
}

async fn one_failed(stage: &mut Stage) -> Outcome {
    stage.set_version(NEW).await?;
    stage
        .until("one failed and the others are done", |scene| {
            scene.state("gpu-01") == State::UpgradeFailed && scene.count(State::UpgradeDone) == 2
        })
        .await?;
    failed_and_stays(stage, "gpu-01", "nvidia-driver-ctr").await
}

async fn image_missing(stage: &mut Stage) -> Outcome {
    stage.set_version(NEW).await?;
    stage.until("a driver restarts", |scene| scene.count(State::PodRestartRequired) == 1).await?;
    let stuck = if stage.scene().state("gpu-01") == State::PodRestartRequired { "gpu-01" } else { "gpu-02" };
    stage.until_reason(stuck, "ImagePullBackOff").await?;
    stage.set_version(NEWER).await?;
    stage.until_done().await?;
    whole_walks(stage, &stage.trace())
}

async fn fixed_spec(stage: &mut Stage) -> Outcome {
    stage.set_version(NEW).await?;
    stage.until("both failed", |scene| scene.count(State::UpgradeFailed) == 2).await?;
    stage.set_version(NEWER).await?;
    stage.until_done().await?;
    in_service(stage)
}

/// A webhook refuses every write to one node.
async fn denied(stage: &mut Stage) -> Outcome {
    let server = embedded_api(stage)?;
    server.on_request(|request| {
        let refused = request.verb == "patch" && request.resource == "nodes" && request.name == "gpu-02";
        (refused && request.user == "pitcrew").then_some(Fault::Status(StatusCode::FORBIDDEN))
    });
    stage.set_version(NEW).await?;
    let walked = |stage: &Stage| stage.trace().states.values().filter(|path| path.len() > 2).count();
    stage.until("the others are on their way", |scene| !scene.visited.is_empty()).await?;
    while walked(stage) < 3 || !stage.scene().visited.is_empty() {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    must(stage.reason("gpu-02").contains("refused a write"), || stage.reason("gpu-02"))?;
    server.on_request(|_| None);
    stage.until("it is on its way too", |scene| scene.visited.contains("gpu-02")).await?;
    stage.until_done().await?;
    whole_walks(stage, &stage.trace())
}

async fn daemon_set_consumer(stage: &mut Stage) -> Outcome {
    let pod = json!({
        "nodeSelector": {"kubernetes.io/hostname": "gpu-01"},
        "containers": [{"name": "main", "image": "monitor:1", "resources": {"limits": {"nvidia.com/gpu": "1"}}}],
    });
    let spec = json!({
        "selector": {"matchLabels": {"app": "monitor"}},
        "template": {"metadata": {"labels": {"app": "monitor"}}, "spec": pod},
    });
    stage.create::<DaemonSet>(NAMESPACE, json!({"metadata": {"name": "monitor"}, "spec": spec})).await?;
    stage.until_pod(NAMESPACE, "monitor").await?;
    stage.set_version(NEW).await?;
    stage.until("the other is done", |scene| scene.state("gpu-02") == State::UpgradeDone).await?;
    stage.until_reason("gpu-01", "belongs to a DaemonSet").await?;
    must(!stage.scene().cordoned.contains("gpu-01"), || "it was cordoned for nothing".to_owned())?;
    stage.delete::<DaemonSet>(NAMESPACE, "monitor").await?;
    stage.until_done().await?;
    whole_walks(stage, &stage.trace())
}

async fn precordoned(stage: &mut Stage) -> Outcome {
    for node in ["gpu-01", "gpu-02"] {
        stage.patch_node(node, json!({"spec": {"unschedulable": true}})).await?;
    }
    stage.set_version(NEW).await?;
    stage.until("the first is under way", |scene| !scene.visited.is_empty()).await?;
    stage.until_done().await?;
    let (scene, most) = (stage.scene(), stage.trace().most_visited);
    must(most == 1, || format!("{most} nodes were under way at once"))?;
    must(scene.cordoned.iter().eq(["gpu-01", "gpu-02"]), || format!("cordoned: {:?}", scene.cordoned))
}

async fn admin_cordon(stage: &mut Stage) -> Outcome {
    stage.patch_node("gpu-01", json!({"spec": {"unschedulable": true}})).await?;
    stage.set_version(NEW).await?;
    stage.until("a node is on its way", |scene| !scene.visited.is_empty()).await?;
    stage.until_done().await?;
    let cordoned = stage.scene().cordoned;
    must(cordoned.iter().eq(["gpu-01"]), || format!("cordoned: {cordoned:?}"))
}

async fn uncordoned_midway(stage: &mut Stage) -> Outcome {
    stage.behaviour().change(|behaviour| behaviour.timing.driver_start = Duration::from_secs(3));
    stage.set_version(NEW).await?;
    stage.until("the driver restarts", |scene| scene.state("gpu-01") == State::PodRestartRequired).await?;
    stage.patch_node("gpu-01", json!({"spec": {"unschedulable": null}})).await?;
    stage.until("it is cordoned again", |scene| !scene.cordoned.is_empty()).await?;
    stage.until_done().await?;
    whole_walks(stage, &stage.trace())
}

/// A StatefulSet's pod comes back elsewhere under its own name: it must not be chased.
async fn same_name(stage: &mut Stage) -> Outcome {
    let pod = json!({
        "terminationGracePeriodSeconds": 1,
        "containers": [{"name": "main", "image": "nb:1", "resources": {"limits": {"nvidia.com/gpu": "1"}}}],
    });
    let spec = json!({
        "serviceName": "nb", "replicas": 1, "selector": {"matchLabels": {"app": "nb"}},
        "template": {"metadata": {"labels": {"app": "nb"}}, "spec": pod},
    });
    stage.create::<StatefulSet>(NAMESPACE, json!({"metadata": {"name": "nb"}, "spec": spec})).await?;
    stage.until_pod(NAMESPACE, "nb-0").await?;
    stage.set_version(NEW).await?;
    stage.until("a node is on its way", |scene| !scene.visited.is_empty()).await?;
    stage.until_done().await?;
    stage.until_pod(NAMESPACE, "nb-0").await?;
    whole_walks(stage, &stage.trace())
}

async fn pdb_never(stage: &mut Stage) -> Outcome {
    let pods = stage.pods(TEAM).await?;
    let (_, node, _) = pods.first().ok_or_else(|| Broken("no pod".to_owned()))?.clone();
    stage.set_version(NEW).await?;
    stage.until("the other node is on its way", |scene| !scene.visited.is_empty()).await?;
    stage.until("it is done", |scene| scene.visited.is_empty()).await?;
    stage.until_reason(&node, "could never leave: poddisruptionbudget/team-x/notebook").await?;
    stage.stands_still_for(Duration::from_secs(3)).await?;
    must(stage.scene().cordoned.is_empty(), || "it was cordoned for nothing".to_owned())?;
    stage.patch::<Deployment>(TEAM, "notebook", json!({"spec": {"replicas": 2}})).await?;
    stage.until_done().await?;
    in_service(stage)
}

/// Asked ten times in the first minute at most, and named as the cause all the while.
async fn pdb_blocked(stage: &mut Stage) -> Outcome {
    // The budget counts a pod that is not there, so it does not say "never".
    stage.patch::<PodDisruptionBudget>(TEAM, "serve", json!({"spec": {"minAvailable": 1}})).await?;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let server = embedded_api(stage)?;
    let node = stage.pods(TEAM).await?.first().map(|(_, node, _)| node.clone()).unwrap_or_default();
    refuse_evictions(&server);
    stage.set_version(NEW).await?;
    stage
        .until("the node is being emptied", |scene| scene.state(&node) == State::PodDeletionRequired)
        .await?;
    let before = server.counts().of("create", "pods/eviction");
    tokio::time::sleep(Duration::from_mins(1)).await;
    let asked = server.counts().of("create", "pods/eviction") - before;
    must((1..=10).contains(&asked), || format!("asked {asked} times in a minute"))?;
    server.on_request(|_| None);
    stage.until_done().await?;
    in_service(stage)
}

async fn unreachable(stage: &mut Stage) -> Outcome {
    let node = stage.pods(TEAM).await?.first().map(|(_, node, _)| node.clone()).unwrap_or_default();
    stage.behaviour().change(|behaviour| behaviour.timing.workload_stop = Duration::from_secs(1));
    stage.set_version(NEW).await?;
    stage
        .until("the node is being emptied", |scene| scene.state(&node) == State::PodDeletionRequired)
        .await?;
    let dead = node.clone();
    stage.behaviour().change(|behaviour| behaviour.down.extend([dead]));
    stage.until_reason(&node, "the node's kubelet does not answer").await?;
    stage.behaviour().change(|behaviour| behaviour.down.clear());
    stage.until_done().await?;
    in_service(stage)
}

/// Only a label of the pods changes: the drivers restart in place, and nobody is evicted.
async fn label_only(stage: &mut Stage) -> Outcome {
    let before = stage.pods(TEAM).await?;
    let patch = json!({"spec": {"daemonsets": {"labels": {"team": "ml"}}}});
    stage.cluster().patch_cluster_policy(patch).await?;
    stage.until("a node is on its way", |scene| !scene.visited.is_empty()).await?;
    stage.until_done().await?;
    let evicted = [State::WaitForJobsRequired, State::PodDeletionRequired];
    let trace = stage.trace();
    must(trace.states.values().flatten().all(|state| !evicted.contains(state)), || trace.text())?;
    let after = stage.pods(TEAM).await?;
    must(before == after, || format!("{before:?} became {after:?}"))?;
    in_service(stage)
}

/// The controller knows the new revision, but not yet what it installs: by the template that it remembers, nothing new.
async fn template_seen_late(stage: &mut Stage) -> Outcome {
    let late = Instant::now() + Duration::from_secs(10);
    embedded_api(stage)?.lines().stall("pitcrew", "daemonsets.apps", late);
    stage.set_version(NEW).await?;
    stage.until("the node is on its way", |scene| !scene.visited.is_empty()).await?;
    stage.until_done().await?;
    let emptied = |path: &Vec<State>| path.contains(&State::PodDeletionRequired);
    let trace = stage.trace();
    must(trace.states.values().any(emptied), || trace.text())?;
    in_service(stage)
}

async fn driver_pod_gone(stage: &mut Stage) -> Outcome {
    stage.behaviour().change(|behaviour| behaviour.timing.driver_start = Duration::from_secs(2));
    stage.set_version(NEW).await?;
    stage.until("the driver restarts", |scene| scene.state("gpu-01") == State::PodRestartRequired).await?;
    if let Ok(pod) = stage.driver_pod("gpu-01").await {
        // Whoever is faster: it may be gone by now.
        let _ = stage.delete::<Pod>(NAMESPACE, &pod).await;
    }
    stage.until_done().await?;
    whole_walks(stage, &stage.trace())
}

async fn label_by_hand(stage: &mut Stage) -> Outcome {
    stage.behaviour().change(|behaviour| behaviour.timing.driver_start = Duration::from_secs(3));
    stage.set_version(NEW).await?;
    stage.until("the driver restarts", |scene| scene.state("gpu-01") == State::PodRestartRequired).await?;
    stage.label("gpu-01", STATE_LABEL, Some("upgrade-maybe")).await?;
    stage.until_reason("gpu-01", "unknown value \"upgrade-maybe\"").await?;
    stage.label("gpu-01", STATE_LABEL, None).await?;
    stage.until_done().await?;
    in_service(stage)
}

async fn bad_max_unavailable(stage: &mut Stage) -> Outcome {
    stage.set_upgrade_policy(json!({"maxUnavailable": "5"})).await?;
    stage.set_version(NEW).await?;
    tokio::time::sleep(Duration::from_secs(3)).await;
    must(stage.scene().all(State::UpgradeDone), || "a frozen pool moved".to_owned())?;
    stage.set_upgrade_policy(json!({"maxUnavailable": 1})).await?;
    stage.until("the node is on its way", |scene| !scene.visited.is_empty()).await?;
    stage.until_done().await?;
    whole_walks(stage, &stage.trace())
}

async fn init_container(stage: &mut Stage) -> Outcome {
    let gpu = json!({"limits": {"nvidia.com/gpu": "1"}});
    let pod = json!({
        "terminationGracePeriodSeconds": 1,
        "initContainers": [{"name": "warm-up", "image": "w:1", "restartPolicy": "Always", "resources": gpu}],
        "containers": [{"name": "main", "image": "m:1"}],
    });
    let spec = json!({
        "replicas": 1, "selector": {"matchLabels": {"app": "sidecar"}},
        "template": {"metadata": {"labels": {"app": "sidecar"}}, "spec": pod},
    });
    stage.create::<Deployment>(NAMESPACE, json!({"metadata": {"name": "sidecar"}, "spec": spec})).await?;
    let first = stage.until_pod(NAMESPACE, "sidecar").await?;
    stage.set_version(NEW).await?;
    stage.until("a node is on its way", |scene| !scene.visited.is_empty()).await?;
    stage.until_done().await?;
    let now = stage.until_pod(NAMESPACE, "sidecar").await?;
    must(first != now, || "the pod was never taken off".to_owned())?;
    whole_walks(stage, &stage.trace())
}

/// The documented way out of a failure: empty the node, delete the driver pod, wait.
async fn recovery_by_hand(stage: &mut Stage) -> Outcome {
    stage.set_version(NEW).await?;
    stage.until("the node fails", |scene| scene.state("gpu-01") == State::UpgradeFailed).await?;
    stage.behaviour().change(|behaviour| behaviour.drivers.clear());
    let pod = stage.driver_pod("gpu-01").await?;
    stage.delete::<Pod>(NAMESPACE, &pod).await?;
    stage.until_done().await?;
    in_service(stage)
}

async fn node_deleted(stage: &mut Stage) -> Outcome {
    stage.behaviour().change(|behaviour| behaviour.timing.driver_start = Duration::from_secs(2));
    stage.set_version(NEW).await?;
    stage.until("its driver restarts", |scene| scene.state("gpu-02") == State::PodRestartRequired).await?;
    let nodes = kube::Api::<Node>::all(stage.cluster().admin.clone());
    nodes.delete("gpu-02", &kube::api::DeleteParams::default()).await?;
    stage.until("the others are done", |scene| scene.states.len() == 2 && scene.all(State::UpgradeDone)).await
}

/// The wait for jobs goes on where it was, however often the controller starts again.
async fn timers(stage: &mut Stage) -> Outcome {
    stage.set_version(NEW).await?;
    stage.until("it waits for the job", |s| s.state("gpu-01") == State::WaitForJobsRequired).await?;
    let began = tokio::time::Instant::now();
    for _ in 0..4 {
        tokio::time::sleep(Duration::from_secs(12)).await;
        stage.kill_controller().await;
        stage.start_controller();
    }
    stage.until("the wait is over", |s| s.state("gpu-01") > State::WaitForJobsRequired).await?;
    let took = began.elapsed().as_secs();
    // A killed leader's lease has to run out, and whoever follows gets 10 s to try for itself.
    must((55..=110).contains(&took), || format!("the wait of 60 s took {took} s"))?;
    stage.until_done().await?;
    whole_walks(stage, &stage.trace())
}

async fn given_back(stage: &mut Stage) -> Outcome {
    stage.patch::<PodDisruptionBudget>(TEAM, "serve", json!({"spec": {"minAvailable": 1}})).await?;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let busy: Vec<String> = stage.pods(TEAM).await?.into_iter().map(|(_, node, _)| node).collect();
    let server = embedded_api(stage)?;
    refuse_evictions(&server);
    stage.set_version(NEW).await?;
    stage
        .until("the node without work is done, the others wait", |scene| {
            scene.count(State::UpgradeDone) == 1
                && busy.iter().all(|node| scene.state(node) == State::UpgradeRequired)
        })
        .await?;
    server.on_request(|_| None);
    stage.until_done().await?;
    in_service(stage)
}

async fn aborted(stage: &mut Stage) -> Outcome {
    stage.set_version(NEW).await?;
    stage.until("it waits for the job", |s| s.state("gpu-01") == State::WaitForJobsRequired).await?;
    stage.patch_rollout("cluster-policy-1", json!({"spec": {"abort": true}})).await?;
    stage.until("nobody is out any more", |scene| scene.visited.is_empty()).await?;
    stage.until_reason("gpu-01", "was aborted").await?;
    stage.stands_still_for(Duration::from_secs(3)).await?;
    in_service(stage)?;
    stage.set_upgrade_policy(json!({"waitForCompletion": {"podSelector": ""}})).await?;
    stage.patch_rollout("cluster-policy-1", json!({"spec": {"abort": false}})).await?;
    stage.until_done().await?;
    in_service(stage)
}
