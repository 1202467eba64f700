//! Who leaves the node, who may not, and who gives claims back.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kube::{Client, ResourceExt as _};
use pitcrew_agent::Failure;
use pitcrew_agent::clock::Clock;
use pitcrew_agent::cluster::Cluster;
use pitcrew_agent::failure::{FAILED, TIMED_OUT};
use pitcrew_agent::fake::Machine;
use pitcrew_agent::settings::Settings;
use pitcrew_agent::stop::Stop;
use pitcrew_agent::uninstall::{Agent, uninstall};
use pitcrew_sim::api::Fault;
use serde_json::{Value, json};

use crate::stage::{NAMESPACE, NODE, Stage, gpu_pod, operand};
use crate::{wants, with_driver};

async fn claim(stage: &Stage, name: &str, driver: &str) {
    allocated(stage, name, json!({"driver": driver, "pool": "p", "device": "d", "request": "r"})).await;
}

/// A claim of an administrator's, who looks at a device and does not keep it busy.
async fn admin_claim(stage: &Stage, name: &str) {
    let device =
        json!({"driver": "gpu.nvidia.com", "pool": "p", "device": "d", "request": "r", "adminAccess": true});
    allocated(stage, name, device).await;
}

async fn allocated(stage: &Stage, name: &str, device: Value) {
    stage.claim("research", name, device).await;
}

const DRA: &str = "nvidia.com/gpu.deploy.dra-driver";
const PLUGIN: &str = "nvidia-dra-driver-kubelet-plugin";

#[tokio::test(start_paused = true)]
async fn a_busy_budget_is_asked_at_most_ten_times_a_minute() {
    let mut stage = Stage::new(with_driver()).await;
    stage.budget("research", "train", 0).await;
    stage.settings.leave_limit = Some(Duration::from_mins(1));
    let failure = stage.uninstall().await.unwrap_err();
    assert_eq!(failure.exit_code(), TIMED_OUT, "{}", failure.sentence());
    let asked = stage.api.counts().of("create", "pods/eviction");
    assert!((5..=10).contains(&asked), "{asked} requests");
    assert!(!stage.is_cordoned().await && stage.paused().await.is_empty(), "given back");
}

#[tokio::test(start_paused = true)]
async fn who_refuses_an_eviction_is_heard() {
    for (broken, words) in [(false, "disruption budget"), (true, "injected fault")] {
        let mut stage = Stage::new(with_driver()).await;
        stage.settings.leave_limit = Some(Duration::from_secs(10));
        stage.budget("research", "train", 0).await;
        stage.api.on_request(move |request| {
            let eviction = request.resource == "pods/eviction";
            (broken && eviction).then_some(Fault::Status(http::StatusCode::INTERNAL_SERVER_ERROR))
        });
        let text = stage.uninstall().await.unwrap_err().sentence();
        assert!(
            text.contains("pod research/train may not be evicted now: ") && text.contains(words),
            "{text}"
        );
        assert_eq!(text.contains("budget"), !broken, "{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn gpu_users_in_init_containers_and_sidecars_are_evicted() {
    let stage = Stage::new(with_driver()).await;
    let gpu = json!({"limits": {"nvidia.com/gpu": "1"}});
    let sidecar = json!({
        "ownedBy": "ReplicaSet",
        "initContainers": [{"name": "side", "image": "i", "restartPolicy": "Always", "resources": gpu}],
    });
    let mig = json!({
        "ownedBy": "Job",
        "containers": [{"name": "main", "image": "i", "resources": {"requests": {"nvidia.com/mig-1g.10gb": "1"}, "limits": {"nvidia.com/mig-1g.10gb": "1"}}}],
    });
    stage.pod("research", "sidecar", json!({}), sidecar).await;
    stage.pod("research", "mig", json!({}), mig).await;
    stage.pod("research", "web", json!({}), json!({"ownedBy": "ReplicaSet"})).await;
    stage.uninstall().await.unwrap();
    let pods = stage.pods().await;
    assert!(!pods.contains(&"research/sidecar".to_owned()) && !pods.contains(&"research/mig".to_owned()));
    assert!(pods.contains(&"research/web".to_owned()), "who uses no GPU stays");
}

#[tokio::test(start_paused = true)]
async fn users_by_claim_are_evicted_compute_domains_included() {
    let stage = Stage::new(with_driver()).await;
    claim(&stage, "gpu", "gpu.nvidia.com").await;
    claim(&stage, "domain", "compute-domain.nvidia.com").await;
    claim(&stage, "other", "nic.example.com").await;
    for (name, used) in [("a", "gpu"), ("b", "domain"), ("c", "other"), ("d", "gone")] {
        let spec = json!({"ownedBy": "Job", "resourceClaims": [{"name": "c", "resourceClaimName": used}]});
        stage.pod("research", name, json!({}), spec).await;
    }
    stage.uninstall().await.unwrap();
    let pods = stage.pods().await;
    let left = |name: &str| pods.contains(&format!("research/{name}"));
    assert!(!left("a") && !left("b"), "{pods:?}");
    assert!(left("c") && left("d"), "{pods:?}");
}

/// A cluster in which the pods' namespace is being deleted: the first evictions are refused.
fn ending(client: Client, asked: Arc<AtomicUsize>) -> Client {
    let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
        let (client, asked) = (client.clone(), asked.clone());
        async move {
            if !request.uri().path().ends_with("/eviction") || asked.fetch_add(1, Ordering::Relaxed) >= 2 {
                return client.send(request).await;
            }
            let cause = json!({"reason": "NamespaceTerminating", "message": "namespace research is being terminated"});
            let status = json!({
                "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 403, "reason": "Forbidden",
                "message": "unable to create new content in namespace research because it is being terminated",
                "details": {"name": "train", "kind": "pods", "causes": [cause]},
            });
            let body = kube::client::Body::from(status.to_string().into_bytes());
            let mut response = http::Response::new(body);
            *response.status_mut() = http::StatusCode::FORBIDDEN;
            Ok(response)
        }
    });
    Client::new(service, "default")
}

#[tokio::test(start_paused = true)]
async fn a_pod_whose_namespace_ends_is_asked_again_and_any_other_refusal_counts_at_once() {
    let stage = Stage::new(with_driver()).await;
    let (clock, asked) = (Clock::starting_at(stage.api.now()), Arc::new(AtomicUsize::new(0)));
    let client = ending(stage.api.client_as("agent"), asked.clone());
    let cluster = Cluster::new(client, NODE, clock, Stop::never());
    uninstall(&Agent { cluster, ..stage.agent(Stop::never()) }).await.unwrap();
    assert_eq!(asked.load(Ordering::Relaxed), 3);
    let stage = Stage::new(with_driver()).await;
    stage
        .api
        .on_request(|request| (request.resource == "pods/eviction").then_some(Fault::Denied("you may not")));
    let text = stage.uninstall().await.unwrap_err().sentence();
    assert!(text.contains("evict pod research/train: you may not"), "{text}");
    assert_eq!(stage.api.counts().of("create", "pods/eviction"), 1);
}

/// A cluster that serves resource claims as `v1beta1` only, as Kubernetes did before 1.34.
fn older(client: Client) -> Client {
    const GROUP: &str = "/apis/resource.k8s.io";
    let service = tower::service_fn(move |mut request: http::Request<kube::client::Body>| {
        let client = client.clone();
        async move {
            let uri = request.uri().to_string();
            if uri.ends_with(GROUP) {
                let version = json!({"groupVersion": "resource.k8s.io/v1beta1", "version": "v1beta1"});
                let group =
                    json!({"name": "resource.k8s.io", "versions": [version], "preferredVersion": version});
                return Ok(http::Response::new(kube::client::Body::from(group.to_string().into_bytes())));
            }
            let newer = uri.replace(&format!("{GROUP}/v1beta1"), &format!("{GROUP}/v1"));
            assert!(newer != uri || !uri.contains(GROUP), "not served: {uri}");
            *request.uri_mut() = newer.parse().unwrap();
            client.send(request).await
        }
    });
    Client::new(service, "default")
}

#[tokio::test(start_paused = true)]
async fn claims_are_read_in_the_version_that_the_cluster_serves() {
    let stage = Stage::new(with_driver()).await;
    claim(&stage, "gpu", "gpu.nvidia.com").await;
    let spec = json!({"ownedBy": "Job", "resourceClaims": [{"name": "c", "resourceClaimName": "gpu"}]});
    stage.pod("research", "user", json!({}), spec).await;
    let clock = Clock::starting_at(stage.api.now());
    let cluster = Cluster::new(older(stage.api.client_as("agent")), NODE, clock, Stop::never());
    uninstall(&Agent { cluster, ..stage.agent(Stop::never()) }).await.unwrap();
    let pods = stage.pods().await;
    assert!(!pods.contains(&"research/user".to_owned()), "{pods:?}");
}

/// A cluster that does not serve resource claims at all.
fn without_claims(client: Client) -> Client {
    let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
        let client = client.clone();
        async move {
            let path = request.uri().path().to_owned();
            if !path.starts_with("/apis/resource.k8s.io") {
                return client.send(request).await;
            }
            assert_eq!(path, "/apis/resource.k8s.io", "nobody asks for a claim");
            let body = kube::client::Body::from(b"404 page not found\n".to_vec());
            let mut response = http::Response::new(body);
            *response.status_mut() = http::StatusCode::NOT_FOUND;
            Ok(response)
        }
    });
    Client::new(service, "default")
}

#[tokio::test(start_paused = true)]
async fn where_claims_are_not_served_who_refers_to_one_may_hold_it_from_before() {
    let stage = Stage::new(with_driver()).await;
    let spec = json!({"ownedBy": "Job", "resourceClaims": [{"name": "c", "resourceClaimName": "gpu"}]});
    stage.pod("research", "from-before", json!({}), spec).await;
    let clock = Clock::starting_at(stage.api.now());
    let cluster = Cluster::new(without_claims(stage.api.client_as("agent")), NODE, clock, Stop::never());
    uninstall(&Agent { cluster, ..stage.agent(Stop::never()) }).await.unwrap();
    assert!(stage.host.machine().modules.is_empty());
    let pods = stage.pods().await;
    assert!(!pods.iter().any(|pod| pod.starts_with("research/")), "not served is not absent: {pods:?}");
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_cannot_be_read_is_not_an_absent_one() {
    let stage = Stage::new(with_driver()).await;
    let spec = json!({"ownedBy": "Job", "resourceClaims": [{"name": "c", "resourceClaimName": "gpu"}]});
    stage.pod("research", "a", json!({}), spec).await;
    stage.api.on_request(|request| {
        (request.resource == "resourceclaims").then_some(Fault::Denied("no access to claims"))
    });
    let failure = stage.uninstall().await.unwrap_err();
    assert!(failure.sentence().contains("no access to claims"), "{}", failure.sentence());
    assert_eq!(stage.host.machine().modules.len(), 4);
    assert!(stage.paused().await.is_empty() && !stage.is_cordoned().await);
}

#[tokio::test(start_paused = true)]
async fn a_gpu_pod_of_a_daemon_set_is_named_and_nobody_is_evicted() {
    let stage = Stage::new(with_driver()).await;
    let mut spec = gpu_pod();
    spec["ownedBy"] = json!("DaemonSet");
    stage.pod("research", "monitor", json!({}), spec).await;
    let failure = stage.uninstall().await.unwrap_err();
    assert!(
        failure.sentence().contains("pod research/monitor belongs to a DaemonSet"),
        "{}",
        failure.sentence()
    );
    assert_eq!(stage.api.counts().of("create", "pods/eviction"), 0);
    assert!(!stage.is_cordoned().await);
}

#[tokio::test(start_paused = true)]
async fn a_drain_that_would_leave_a_gpu_pod_behind_does_not_begin() {
    let skip = json!({"labels": {"nvidia.com/gpu-driver-upgrade-drain.skip": "true"}});
    let other = json!({"labels": {"app": "other"}});
    // Nobody may evict it, so the agent looks whether a drain would do.
    for (metadata, owner, selector) in
        [(json!({}), Some("DaemonSet"), ""), (skip, None, ""), (other, None, "app in (train, web)")]
    {
        let mut stage = Stage::new(with_driver()).await;
        stage.settings.drain = true;
        stage.settings.selector = Settings::drain_selector(selector).unwrap();
        let mut spec = gpu_pod();
        spec.as_object_mut().unwrap().remove("ownedBy");
        if let Some(owner) = owner {
            spec["ownedBy"] = json!(owner);
        }
        stage.pod("research", "monitor", metadata, spec).await;
        stage.pod("research", "web", json!({}), json!({"ownedBy": "ReplicaSet"})).await;
        let failure = stage.uninstall().await.unwrap_err();
        let expected = "pod research/monitor uses the device and is left out of the drain";
        assert_eq!(failure.sentence(), expected);
        assert_eq!(stage.api.counts().of("create", "pods/eviction"), 0);
        assert!(!stage.is_cordoned().await && stage.paused().await.is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn a_drain_works_with_daemon_sets_pods_on_the_node() {
    let mut stage = Stage::new(with_driver()).await;
    stage.settings.drain = true;
    stage.pod("research", "web", json!({}), json!({"ownedBy": "ReplicaSet"})).await;
    stage
        .pod(
            "research",
            "skipped",
            json!({"labels": {"nvidia.com/gpu-driver-upgrade-drain.skip": "true"}}),
            json!({"ownedBy": "ReplicaSet"}),
        )
        .await;
    stage.pod("kube-system", "proxy", json!({}), json!({"ownedBy": "DaemonSet"})).await;
    // Somebody outside of Kubernetes' sight keeps the driver busy until the node is drained.
    stage.host.change(|machine| machine.open(9, "web", "/dev/nvidia0", &["nvidia"]));
    let host = stage.host.clone();
    stage.api.on_request(move |request| {
        if request.resource == "pods/eviction" && request.name == "web" {
            host.change(|machine| machine.processes.clear());
        }
        None
    });
    stage.uninstall().await.unwrap();
    let pods = stage.pods().await;
    assert!(!pods.contains(&"research/web".to_owned()));
    assert!(pods.contains(&"kube-system/proxy".to_owned()) && pods.contains(&"research/skipped".to_owned()));
    assert!(stage.host.machine().modules.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_drain_that_did_not_help_is_not_made_again() {
    let mut stage = Stage::new(with_driver()).await;
    stage.settings.drain = true;
    stage.pod("research", "web", json!({}), json!({"ownedBy": "ReplicaSet"})).await;
    // A process of the host: no pod that leaves takes it along.
    stage.host.change(|machine| machine.open(9, "monitor", "/dev/nvidia0", &["nvidia"]));
    let text = stage.uninstall().await.unwrap_err().sentence();
    assert!(text.contains("process 9 (monitor)") && text.contains("stays cordoned"), "{text}");
    assert!(!stage.pods().await.contains(&"research/web".to_owned()));
    assert!(stage.events().await.iter().any(|event| event.contains("stays cordoned")));
    // Whoever is here all the same is left alone by the starts after it, also if one is told to end.
    stage.pod("research", "tolerant", json!({}), json!({"ownedBy": "ReplicaSet"})).await;
    let evicted = stage.api.counts().of("create", "pods/eviction");
    stage.uninstall_told_after(Duration::from_secs(1)).await.unwrap_err();
    for _ in 0..3 {
        assert!(stage.is_cordoned().await && stage.paused().await.is_empty());
        let failure = stage.uninstall().await.unwrap_err();
        assert_eq!(failure.exit_code(), FAILED);
        assert!(failure.sentence().contains("stays cordoned"), "{}", failure.sentence());
    }
    assert_eq!(stage.api.counts().of("create", "pods/eviction"), evicted);
    // A person who gives the node back may have ended what was in the way: that is another attempt.
    stage.patch(json!({"spec": {"unschedulable": null}})).await;
    stage.uninstall().await.unwrap_err();
    assert!(stage.is_cordoned().await && !stage.pods().await.contains(&"research/tolerant".to_owned()));
    stage.host.change(|machine| machine.processes.clear());
    stage.uninstall().await.unwrap();
    stage.load_new_driver();
    stage.finish(Duration::from_mins(1)).await.unwrap();
    assert!(!stage.is_cordoned().await);
}

#[tokio::test(start_paused = true)]
async fn a_drain_whose_time_is_over_goes_on_with_the_next_start_and_does_not_begin_anew() {
    let mut stage = Stage::new(with_driver()).await;
    stage.settings.drain = true;
    stage.settings.leave_limit = Some(Duration::from_mins(1));
    stage.pod("research", "web", json!({}), json!({"ownedBy": "ReplicaSet"})).await;
    stage.budget("research", "train", 0).await;
    let failure = stage.uninstall().await.unwrap_err();
    assert_eq!(failure.exit_code(), TIMED_OUT, "{}", failure.sentence());
    assert!(!stage.pods().await.contains(&"research/web".to_owned()));
    assert!(stage.is_cordoned().await, "or it would come back, to be evicted again");
    stage.admin_delete("research", "train").await;
    stage.uninstall().await.unwrap();
    assert!(stage.host.machine().modules.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_may_not_be_evicted_keeps_all_others_where_they_are() {
    let stage = Stage::new(with_driver()).await;
    let mut bare = gpu_pod();
    bare.as_object_mut().unwrap().remove("ownedBy");
    stage.pod("research", "bare", json!({}), bare).await;
    let failure = stage.uninstall().await.unwrap_err();
    assert!(matches!(&failure, Failure::CannotLeave(text) if text.contains("research/bare")), "{failure}");
    assert!(stage.pods().await.contains(&"research/train".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn the_dra_plugin_leaves_last_and_only_without_claim_holders() {
    let mut stage = Stage::new(with_driver()).await;
    stage.label(DRA, Some("true")).await;
    stage.pod(NAMESPACE, PLUGIN, json!({}), operand(PLUGIN, DRA)).await;
    // It keeps no driver busy, but the plugin has to give the claim back.
    admin_claim(&stage, "gpu").await;
    let spec = json!({"ownedBy": "DaemonSet", "resourceClaims": [{"name": "c", "resourceClaimName": "gpu"}]});
    stage.pod("research", "watcher", json!({}), spec).await;
    // Whoever evicts finds before anybody leaves that it cannot.
    let text = stage.uninstall().await.unwrap_err().sentence();
    assert!(text.contains("pod research/watcher belongs to a DaemonSet"), "{text}");
    assert_eq!(stage.api.counts().of("create", "pods/eviction"), 0);
    stage.settings.evict = false;
    let failure = stage.uninstall().await.unwrap_err();
    assert!(failure.sentence().contains("pod research/watcher hold claims"), "{}", failure.sentence());
    assert!(stage.pods().await.contains(&format!("{NAMESPACE}/{PLUGIN}")));
    stage.admin_delete("research", "watcher").await;
    stage.settings.evict = true;
    stage.uninstall().await.unwrap();
    assert_eq!(stage.node().await.labels()[DRA], "true");
    let trace = stage.trace.lock().unwrap().join("\n");
    let evicted = trace.rfind("pods/eviction").unwrap();
    assert!(trace.rfind("dra-driver = \"paused").unwrap() > evicted, "{trace}");
}

const CUSTOM: &str = "example.com/client";

/// A node with a DRA plugin, and with a client of another installation that holds a claim.
async fn with_client(machine: Machine) -> Stage {
    let mut stage = Stage::new(machine).await;
    stage.settings.custom_label = Some(CUSTOM.to_owned());
    stage.label(CUSTOM, Some("here")).await;
    stage.label(DRA, Some("true")).await;
    stage.pod(NAMESPACE, PLUGIN, json!({}), operand(PLUGIN, DRA)).await;
    claim(&stage, "gpu", "gpu.nvidia.com").await;
    let claims = json!([{"name": "c", "resourceClaimName": "gpu"}]);
    let spec = json!({"ownedBy": "DaemonSet", "nodeSelector": {CUSTOM: "here"}, "resourceClaims": claims});
    stage.pod("research", "client", json!({}), spec).await;
    stage
}

#[tokio::test(start_paused = true)]
async fn a_client_of_the_custom_label_that_holds_a_claim_stays_where_nobody_has_to_leave() {
    for machine in [with_driver(), Machine::default()] {
        let mut stage = with_client(machine).await;
        wants(&mut stage, "old");
        stage.uninstall().await.unwrap();
        assert!(stage.pods().await.contains(&"research/client".to_owned()));
        assert!(!stage.pods().await.contains(&format!("{NAMESPACE}/{PLUGIN}")), "it comes back by itself");
        let trace = stage.trace.lock().unwrap().join("\n");
        assert!(trace.contains("dra-driver = \"paused") && !trace.contains(CUSTOM), "{trace}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_of_the_custom_label_that_holds_a_claim_leaves_before_the_plugin() {
    let stage = with_client(with_driver()).await;
    stage.uninstall().await.unwrap();
    let pods = stage.pods().await;
    assert!(!pods.contains(&"research/client".to_owned()), "{pods:?}");
    let trace = stage.trace.lock().unwrap().join("\n");
    let (client, plugin) =
        (trace.find("client = \"here_paused").unwrap(), trace.find("dra-driver = \"paused").unwrap());
    assert!(client < plugin, "the plugin gives its claim back: {trace}");
    let node = stage.node().await;
    assert_eq!((node.labels()[CUSTOM].as_str(), node.labels()[DRA].as_str()), ("here", "true"));
}

#[tokio::test(start_paused = true)]
async fn an_administrators_pod_is_evicted_if_the_plugin_has_to_give_its_claim_back() {
    for plugin in [true, false] {
        let stage = Stage::new(with_driver()).await;
        if plugin {
            stage.label(DRA, Some("true")).await;
            stage.pod(NAMESPACE, PLUGIN, json!({}), operand(PLUGIN, DRA)).await;
        }
        admin_claim(&stage, "gpu").await;
        let claims = json!([{"name": "c", "resourceClaimName": "gpu"}]);
        stage
            .pod(
                "research",
                "exporter",
                json!({}),
                json!({"ownedBy": "ReplicaSet", "resourceClaims": claims}),
            )
            .await;
        stage.uninstall().await.unwrap();
        let stays = stage.pods().await.contains(&"research/exporter".to_owned());
        assert_eq!(stays, !plugin, "it is in nobody's way but the plugin's");
    }
}

#[tokio::test(start_paused = true)]
async fn a_compute_domains_daemon_is_waited_for_before_the_dra_plugin_leaves() {
    for leaves in [true, false] {
        let stage = Stage::new(with_driver()).await;
        stage.label(DRA, Some("true")).await;
        stage.pod(NAMESPACE, PLUGIN, json!({}), operand(PLUGIN, DRA)).await;
        claim(&stage, "domain", "compute-domain.nvidia.com").await;
        let claims = json!([{"name": "c", "resourceClaimName": "domain"}]);
        for (name, owner) in [("worker", "Job"), ("daemon", "DaemonSet")] {
            stage.pod("research", name, json!({}), json!({"ownedBy": owner, "resourceClaims": claims})).await;
        }
        // The domain's controller takes its daemon off some time after the last worker has left.
        let domain = async {
            tokio::time::sleep(Duration::from_mins(2)).await;
            assert!(!stage.pods().await.contains(&"research/worker".to_owned()));
            assert!(stage.pods().await.contains(&format!("{NAMESPACE}/{PLUGIN}")), "it gives the claim back");
            if leaves {
                stage.admin_delete("research", "daemon").await;
            }
        };
        let (result, ()) = tokio::join!(stage.uninstall(), domain);
        assert_eq!(result.is_ok(), leaves);
        if let Err(failure) = result {
            assert_eq!(failure.exit_code(), TIMED_OUT);
            assert!(failure.sentence().contains("pod research/daemon on the way"), "{}", failure.sentence());
            assert!(!stage.is_cordoned().await && stage.paused().await.is_empty());
        }
    }
}
