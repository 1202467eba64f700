//! `uninstall_driver` from beginning to end, on a machine in memory and the embedded API. Many of these stories are
//! weaknesses of the program that it takes the place of; each is named by what must be true instead.

mod stage;

use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::ResourceExt as _;
use pitcrew_agent::Failure;
use pitcrew_agent::failure::{FAILED, NEEDS_REBOOT, TERMINATED, TIMED_OUT};
use pitcrew_agent::fake::{HostDriver, Machine};
use pitcrew_agent::host::PciDevice;
use pitcrew_sim::api::Fault;
use serde_json::json;
use stage::{NAMESPACE, Stage, early, gpu_pod, operand};

const OURS: &str = "pitcrew.dev/driver-manager-cordon";

fn with_driver() -> Machine {
    Machine::with_driver("old")
}

fn wants(stage: &mut Stage, digest: &str) {
    digest.clone_into(&mut stage.settings.digest);
}

/// §1.15 of the documented program, without its sixteen other reads of the node, and with the uncordon left to `finish`.
#[tokio::test(start_paused = true)]
async fn the_sequence_of_requests_is_the_documented_one() {
    let mut stage = Stage::new(with_driver()).await;
    wants(&mut stage, "new");
    stage.uninstall().await.unwrap();
    let trace = stage.trace.lock().unwrap().join("\n");
    insta::assert_snapshot!(trace);
    let calls = stage.host.calls();
    let changes = calls.iter().filter(|call| !call.starts_with("read ") && !call.starts_with("look "));
    insta::assert_snapshot!(changes.cloned().collect::<Vec<_>>().join("\n"));
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
async fn the_node_stays_cordoned_until_the_new_driver_is_up() {
    let stage = Stage::new(with_driver()).await;
    stage.uninstall().await.unwrap();
    assert!(stage.is_cordoned().await);
    let failure = stage.finish(Duration::from_mins(1)).await.unwrap_err();
    assert_eq!(failure.exit_code(), TIMED_OUT);
    assert!(stage.is_cordoned().await, "there is no driver");
    stage.load_new_driver();
    stage.finish(Duration::from_mins(1)).await.unwrap();
    assert!(!stage.is_cordoned().await);
    assert!(!stage.node().await.annotations().contains_key(OURS));
    assert!(stage.events().await.iter().any(|event| event.contains("given the node back")));
}

#[tokio::test(start_paused = true)]
async fn the_documented_early_uncordon_is_there_for_who_wants_it() {
    let stage = early(Stage::new(with_driver()).await);
    stage.uninstall().await.unwrap();
    assert!(!stage.is_cordoned().await);
    assert!(!stage.node().await.annotations().contains_key(OURS));
}

#[tokio::test(start_paused = true)]
async fn a_foreign_cordon_is_never_lifted() {
    for failing in [false, true] {
        let stage = early(Stage::new(with_driver()).await);
        stage.patch(json!({"spec": {"unschedulable": true}})).await;
        if failing {
            stage.host.change(|machine| machine.open(7, "python3", "/dev/nvidia0", &["nvidia"]));
        }
        assert_eq!(stage.uninstall().await.is_err(), failing);
        assert!(stage.is_cordoned().await);
        stage.load_new_driver();
        stage.finish(Duration::from_mins(1)).await.unwrap();
        assert!(stage.is_cordoned().await);
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_that_nvsentinel_took_meanwhile_is_not_given_back() {
    let stage = Stage::new(with_driver()).await;
    stage.uninstall().await.unwrap();
    stage.load_new_driver();
    stage.annotate("quarantineHealthEventCordonPreExisting", Some("True")).await;
    assert_eq!(stage.finish(Duration::from_mins(1)).await.unwrap_err().exit_code(), TIMED_OUT);
    assert!(stage.is_cordoned().await);
    stage.annotate("quarantineHealthEventCordonPreExisting", None).await;
    stage.finish(Duration::from_mins(1)).await.unwrap();
    assert!(!stage.is_cordoned().await);
}

#[tokio::test(start_paused = true)]
async fn a_busy_module_leaves_everything_as_it_was_and_its_holder_is_named() {
    let stage = Stage::new(with_driver()).await;
    stage.host.change(|machine| machine.open(4242, "python3", "/dev/nvidia-uvm", &["nvidia_uvm"]));
    let before = stage.host.machine();
    let failure = stage.uninstall().await.unwrap_err();
    assert_eq!(failure.exit_code(), FAILED);
    let text = failure.sentence();
    assert!(text.contains("module nvidia_uvm has 1 reference"), "{text}");
    assert!(text.contains("process 4242 (python3) has /dev/nvidia-uvm open"), "{text}");
    assert_eq!(stage.host.machine(), before, "nothing was removed");
    assert!(!stage.is_cordoned().await, "its own cordon, and the driver is as it was");
    assert!(stage.paused().await.is_empty());
    assert!(stage.events().await.iter().any(|event| event.starts_with("! ") && event.contains("python3")));
}

#[tokio::test(start_paused = true)]
async fn gdrdrv_pins_the_module_and_goes_first() {
    let stage = Stage::new(with_driver()).await;
    stage.host.change(|machine| machine.load("gdrdrv", Some("nvidia")));
    stage.uninstall().await.unwrap();
    assert!(stage.host.machine().modules.is_empty());
}

#[tokio::test(start_paused = true)]
async fn half_a_driver_needs_a_reboot_and_keeps_the_node_out() {
    let mut stage = Stage::new(with_driver()).await;
    wants(&mut stage, "old-but-forced");
    stage.host.change(|machine| machine.grabbed = Some(("nvidia_uvm".to_owned(), "nvidia".to_owned())));
    for _ in 0..2 {
        let failure = stage.uninstall().await.unwrap_err();
        assert_eq!(failure.exit_code(), NEEDS_REBOOT, "{}", failure.sentence());
        assert!(stage.is_cordoned().await);
        assert_eq!(stage.paused().await.len(), 3, "operands stay away from half a driver");
        assert!(stage.node().await.annotations().contains_key("pitcrew.dev/needs-reboot"));
    }
    assert!(stage.events().await.iter().any(|event| event.contains("needs a reboot")));
    // Nor is it called fine because the configuration is the same.
    wants(&mut stage, "old");
    assert_eq!(stage.uninstall().await.unwrap_err().exit_code(), NEEDS_REBOOT);
    // After the reboot nothing is loaded, and /run is empty.
    stage.host.change(|machine| {
        *machine = Machine::default();
        machine.file("/proc/sys/kernel/random/boot_id", "boot-2");
    });
    stage.uninstall().await.unwrap();
    assert!(stage.paused().await.is_empty());
    assert!(!stage.node().await.annotations().contains_key("pitcrew.dev/needs-reboot"));
    assert!(stage.is_cordoned().await);
    stage.load_new_driver();
    stage.finish(Duration::from_mins(1)).await.unwrap();
    assert!(!stage.is_cordoned().await);
}

#[tokio::test(start_paused = true)]
async fn half_a_driver_whose_holder_leaves_is_unloaded_after_all() {
    let stage = Stage::new(with_driver()).await;
    stage.host.change(|machine| machine.grabbed = Some(("nvidia_uvm".to_owned(), "nvidia".to_owned())));
    assert_eq!(stage.uninstall().await.unwrap_err().exit_code(), NEEDS_REBOOT);
    stage.host.change(|machine| machine.processes.clear());
    stage.uninstall().await.unwrap();
    assert!(stage.host.machine().modules.is_empty());
    assert!(!stage.node().await.annotations().contains_key("pitcrew.dev/needs-reboot"));
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
async fn a_busy_budget_is_asked_at_most_ten_times_a_minute() {
    let stage = Stage::new(with_driver()).await;
    stage.budget("research", "train", 0).await;
    let mut settings = stage.settings.clone();
    settings.leave_limit = Some(Duration::from_mins(1));
    let stage = with_settings(stage, settings);
    let failure = stage.uninstall().await.unwrap_err();
    assert_eq!(failure.exit_code(), TIMED_OUT, "{}", failure.sentence());
    let asked = stage.api.counts().of("create", "pods/eviction");
    assert!((5..=10).contains(&asked), "{asked} requests");
    assert!(!stage.is_cordoned().await && stage.paused().await.is_empty(), "given back");
}

fn with_settings(mut stage: Stage, settings: pitcrew_agent::settings::Settings) -> Stage {
    stage.settings = settings;
    stage
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

async fn claim(stage: &Stage, name: &str, driver: &str) {
    let object = json!({"metadata": {"name": name}, "spec": {}});
    stage.create::<ResourceClaim>(Some("research"), object).await;
    let status = json!({"status": {"allocation": {"devices": {"results": [
        {"driver": driver, "pool": "p", "device": "d", "request": "r"},
    ]}}}});
    let api = kube::Api::<ResourceClaim>::namespaced(stage.admin.clone(), "research");
    let params = kube::api::PatchParams::default();
    api.patch_status(name, &params, &kube::api::Patch::Merge(status)).await.unwrap();
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
async fn a_pod_that_may_not_be_evicted_keeps_all_others_where_they_are() {
    let stage = Stage::new(with_driver()).await;
    let mut bare = gpu_pod();
    bare.as_object_mut().unwrap().remove("ownedBy");
    stage.pod("research", "bare", json!({}), bare).await;
    let failure = stage.uninstall().await.unwrap_err();
    assert!(matches!(&failure, Failure::CannotLeave(text) if text.contains("research/bare")), "{failure}");
    assert!(stage.pods().await.contains(&"research/train".to_owned()));
}

const DRA: &str = "nvidia.com/gpu.deploy.dra-driver";
const PLUGIN: &str = "nvidia-dra-driver-kubelet-plugin";

#[tokio::test(start_paused = true)]
async fn the_dra_plugin_leaves_last_and_only_without_claim_holders() {
    let stage = Stage::new(with_driver()).await;
    stage.label(DRA, Some("true")).await;
    stage.pod(NAMESPACE, PLUGIN, json!({}), operand(PLUGIN, DRA)).await;
    claim(&stage, "gpu", "gpu.nvidia.com").await;
    // An administrator's claim: nobody evicts its holder, but the plugin has to give it back.
    let spec = json!({"ownedBy": "DaemonSet", "resourceClaims": [{"name": "c", "resourceClaimName": "gpu"}]});
    let api = kube::Api::<ResourceClaim>::namespaced(stage.admin.clone(), "research");
    let status = json!({"status": {"allocation": {"devices": {"results": [
        {"driver": "gpu.nvidia.com", "pool": "p", "device": "d", "request": "r", "adminAccess": true},
    ]}}}});
    api.patch_status("gpu", &kube::api::PatchParams::default(), &kube::api::Patch::Merge(status))
        .await
        .unwrap();
    stage.pod("research", "watcher", json!({}), spec).await;
    let failure = stage.uninstall().await.unwrap_err();
    assert!(failure.sentence().contains("pod research/watcher hold claims"), "{}", failure.sentence());
    assert!(stage.pods().await.contains(&format!("{NAMESPACE}/{PLUGIN}")));
    stage.admin_delete("research", "watcher").await;
    stage.uninstall().await.unwrap();
    assert_eq!(stage.node().await.labels()[DRA], "true");
    let trace = stage.trace.lock().unwrap().join("\n");
    let evicted = trace.rfind("pods/eviction").unwrap();
    assert!(trace.rfind("dra-driver = \"paused").unwrap() > evicted, "{trace}");
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
async fn stacked_mounts_are_all_detached() {
    let stage = Stage::new(with_driver()).await;
    stage.host.change(|machine| {
        for mount in [
            "/run/nvidia/driver",
            "/run/nvidia/driver",
            "/run/nvidia/driver/proc",
            "/run/nvidia/driver-other",
        ] {
            machine.mounts.push(mount.to_owned());
        }
    });
    stage.uninstall().await.unwrap();
    assert_eq!(stage.host.machine().mounts, ["/", "/run", "/run/nvidia/driver-other"]);
}

#[tokio::test(start_paused = true)]
async fn mofed_is_waited_for_with_a_deadline_and_the_node_is_not_left_paused() {
    let mut stage = Stage::new(with_driver()).await;
    stage.settings.rdma = true;
    stage.settings.mofed_limit = Duration::from_mins(2);
    let card = PciDevice { address: "0000:81:00.0".to_owned(), vendor: 0x15b3, ..PciDevice::default() };
    stage.host.change(|machine| machine.devices.push(card));
    let failure = stage.uninstall().await.unwrap_err();
    assert_eq!(failure.exit_code(), TIMED_OUT);
    assert!(failure.sentence().contains("/run/mellanox/drivers/.driver-ready is not there"));
    assert!(stage.paused().await.is_empty());
    assert!(stage.is_cordoned().await, "its driver is gone");
    stage.host.change(|machine| machine.file("/run/mellanox/drivers/.driver-ready", ""));
    stage.uninstall().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn the_hosts_mofed_is_told_by_the_modules_whole_name() {
    let mut stage = Stage::new(with_driver()).await;
    (stage.settings.rdma, stage.settings.host_mofed) = (true, true);
    let card = PciDevice { address: "0000:81:00.0".to_owned(), vendor: 0x15b3, ..PciDevice::default() };
    stage.host.change(|machine| {
        machine.devices.push(card);
        machine.load("mlx5_core_lookalike", None);
    });
    assert_eq!(stage.uninstall().await.unwrap_err().exit_code(), TIMED_OUT);
    stage.host.change(|machine| machine.load("mlx5_core", None));
    stage.uninstall().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn nouveau_is_removed_before_the_operands_come_back() {
    for (busy, loaded) in [(false, with_driver()), (false, Machine::default()), (true, Machine::default())] {
        let stage = Stage::new(loaded).await;
        stage.host.change(|machine| {
            machine.load("nouveau", None);
            if busy {
                machine.open(3, "Xorg", "/dev/dri/card0", &["nouveau"]);
            }
        });
        let result = stage.uninstall().await;
        assert_eq!(result.is_err(), busy);
        assert_eq!(stage.host.machine().modules.contains_key("nouveau"), busy);
        assert!(stage.paused().await.is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn a_driver_on_the_host_is_told_by_a_label_and_there_is_a_way_back() {
    let stage =
        Stage::new(Machine { host_driver: HostDriver::Version("535.1".to_owned()), ..with_driver() }).await;
    let failure = stage.uninstall().await.unwrap_err();
    assert!(failure.sentence().contains("driver 535.1 installed"), "{}", failure.sentence());
    assert_eq!(stage.node().await.labels()["nvidia.com/gpu.deploy.driver"], "pre-installed");
    assert_eq!(stage.host.machine().modules.len(), 4);
    stage.host.change(|machine| machine.host_driver = HostDriver::Absent);
    stage.uninstall().await.unwrap();
    assert_eq!(stage.node().await.labels()["nvidia.com/gpu.deploy.driver"], "true");
    assert!(!stage.node().await.annotations().contains_key("pitcrew.dev/host-driver"));
}

#[tokio::test(start_paused = true)]
async fn a_driver_on_the_host_that_hangs_does_not_hang_the_agent() {
    let stage = Stage::new(Machine { host_driver: HostDriver::Hangs, ..with_driver() }).await;
    let failure = tokio::time::timeout(Duration::from_mins(2), stage.uninstall()).await.unwrap().unwrap_err();
    assert!(failure.sentence().contains("did not answer"), "{}", failure.sentence());
    assert_eq!(stage.host.machine().modules.len(), 4);
    assert_eq!(stage.node().await.labels()["nvidia.com/gpu.deploy.driver"], "true");
}

#[tokio::test(start_paused = true)]
async fn devices_of_virtual_machines_come_back_and_others_are_left_alone() {
    let device = |address: &str, driver: &str| PciDevice {
        address: address.to_owned(),
        vendor: 0x10de,
        class: 0x03_0200,
        driver: Some(driver.to_owned()),
        ..PciDevice::default()
    };
    let stage = Stage::new(Machine::default()).await;
    stage.host.change(|machine| {
        machine.devices =
            vec![device("a", "vfio-pci"), device("b", "other"), device("c", "nvgrace_gpu_vfio_pci")]
    });
    stage.uninstall().await.unwrap();
    let drivers: Vec<Option<String>> =
        stage.host.machine().devices.into_iter().map(|device| device.driver).collect();
    assert_eq!(drivers, [None, Some("other".to_owned()), None]);
    // A device that does not let go is told of, and the operands come back all the same.
    stage.host.change(|machine| {
        machine.devices = vec![device("a", "vfio-pci")];
        machine.unwritable.insert("/sys/bus/pci/devices/a/driver_override".to_owned());
    });
    let failure = stage.uninstall().await.unwrap_err();
    assert!(failure.sentence().contains("take a back from vfio-pci"), "{}", failure.sentence());
    assert!(stage.paused().await.is_empty());
}

#[tokio::test(start_paused = true)]
async fn sigterm_before_the_driver_is_touched_restores_everything() {
    let stage = Stage::new(with_driver()).await;
    stage.budget("research", "train", 0).await;
    let (node, machine) = (stage.node().await, stage.host.machine());
    // While operands leave, and while a budget keeps a pod.
    for seconds in [0, 1, 3, 20, 90] {
        let failure = stage.uninstall_told_after(Duration::from_secs(seconds)).await.unwrap_err();
        assert_eq!(failure.exit_code(), TERMINATED, "after {seconds} s: {}", failure.sentence());
        let after = stage.node().await;
        assert_eq!(after.labels(), node.labels(), "after {seconds} s");
        assert_eq!(after.annotations(), node.annotations(), "after {seconds} s");
        assert_eq!(after.spec, node.spec, "after {seconds} s");
        assert_eq!(stage.host.machine(), machine);
    }
}

#[tokio::test(start_paused = true)]
async fn a_cordon_that_somebody_else_sets_in_the_same_moment_is_theirs() {
    let stage = early(Stage::new(with_driver()).await);
    // Between the look and the patch: the first patch of the spec meets a version that is newer.
    let admin = stage.admin.clone();
    let done = std::sync::atomic::AtomicBool::new(false);
    stage.api.on_request(move |request| {
        let patch = request.user == "agent" && request.verb == "patch" && request.resource == "nodes";
        if patch && !done.swap(true, std::sync::atomic::Ordering::Relaxed) {
            let admin = admin.clone();
            tokio::spawn(async move {
                let api = kube::Api::<k8s_openapi::api::core::v1::Node>::all(admin);
                let patch = kube::api::Patch::Merge(json!({"spec": {"unschedulable": true}}));
                api.patch(stage::NODE, &kube::api::PatchParams::default(), &patch).await.unwrap();
            });
            return Some(Fault::Delay(Duration::from_millis(100)));
        }
        None
    });
    stage.uninstall().await.unwrap();
    assert!(stage.is_cordoned().await);
    assert!(!stage.node().await.annotations().contains_key(OURS));
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
    for words in
        ["5 problems found", "gpu.deploy.dcgm", "CAP_SYS_MODULE", "CAP_SYS_ADMIN", "driver 535.1 installed"]
    {
        assert!(text.contains(words), "{text}");
    }
    assert_eq!((stage.node().await, stage.host.machine()), (node, machine));
}

#[tokio::test(start_paused = true)]
async fn a_cordon_that_a_person_lifted_and_another_set_again_is_not_the_agents() {
    let stage = early(Stage::new(with_driver()).await);
    stage.annotate(OURS, Some("{\"since\":\"2026-01-01T00:00:00Z\"}")).await;
    stage.uninstall().await.unwrap();
    assert!(!stage.node().await.annotations().contains_key(OURS), "the record was stale");
    assert!(!stage.is_cordoned().await, "and the agent's own cordon is lifted with its own record");
}
