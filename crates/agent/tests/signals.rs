//! The real binary, as a process of its own, on the embedded API over HTTP and on a real kube-apiserver: ended by SIGTERM and
//! SIGKILL at any moment. The machine under the driver manager is a tree of files: without a driver, or with one that is in use, so
//! that nothing real is ever unloaded.

#![allow(clippy::unwrap_used, clippy::panic, reason = "what these tests do not expect is a failure")]

mod stage;

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Client, ResourceExt as _};
use pitcrew_agent::failure::TERMINATED;
use pitcrew_agent::fake::Machine;
use pitcrew_agent::labels::DRA_DRIVER;
use pitcrew_sim::plane::{Binaries, Plane, PlaneOptions, User};
use serde_json::json;
use stage::{NAMESPACE, NODE, Stage};
use tokio::process::{Child, Command};

const BINARY: &str = env!("CARGO_BIN_EXE_pitcrew-node");
/// The operator's DRA plugin, by the label `app` of its pods.
const PLUGIN: &str = "nvidia-dra-driver-kubelet-plugin";
const KEY: &str = "nvidia.com/ofed-driver-upgrade.driver-wait-for-safe-load";

/// Passes requests on to the embedded API.
async fn forward(client: Client, request: axum::extract::Request) -> axum::response::Response {
    let (parts, body) = request.into_parts();
    let body = axum::body::to_bytes(body, usize::MAX).await.unwrap();
    let request = http::Request::from_parts(parts, kube::client::Body::from(body.to_vec()));
    client.send(request).await.unwrap().map(axum::body::Body::new)
}

/// Serves the stage's API; the kubeconfig is written below `directory`.
async fn serve(stage: &Stage, directory: &Path) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let client = stage.api.client_as("agent");
    let app =
        axum::Router::new().fallback(move |request: axum::extract::Request| forward(client.clone(), request));
    tokio::spawn(async move { axum::serve(listener, app).await });
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": format!("http://{address}")}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    });
    let path = directory.join("kubeconfig");
    std::fs::write(&path, config.to_string()).unwrap();
    path.to_str().unwrap().to_owned()
}

fn start(arguments: &[&str]) -> Child {
    start_by(&[], arguments)
}

/// Starts it through another program, which becomes this one.
fn start_by(before: &[&str], arguments: &[&str]) -> Child {
    let command = [before, &[BINARY], arguments].concat();
    let mut program = Command::new(command[0]);
    // A drain that frees no driver would keep the node cordoned.
    program
        .args(&command[1..])
        .env_clear()
        .env("ENABLE_AUTO_DRAIN", "false")
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    program.spawn().unwrap()
}

/// What makes a program root, if only of a namespace of its own: who enters another root directory has to be. `None` if the
/// kernel does not allow that.
async fn to_be_root() -> Option<&'static [&'static str]> {
    const UNSHARE: [&str; 3] = ["unshare", "--user", "--map-root-user"];
    if rustix::process::geteuid().is_root() {
        return Some(&[]);
    }
    let tried = Command::new(UNSHARE[0]).args(&UNSHARE[1..]).arg("true").status().await;
    tried.is_ok_and(|status| status.success()).then_some(&UNSHARE)
}

async fn end(child: &mut Child, signal: &str) -> Option<i32> {
    let pid = child.id().unwrap().to_string();
    assert!(Command::new("kill").args([signal, &pid]).status().await.unwrap().success());
    child.wait().await.unwrap().code()
}

async fn until_asked(stage: &Stage) -> String {
    for _ in 0..200 {
        if let Some(value) = stage.node().await.annotations().get(KEY) {
            return value.clone();
        }
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
    panic!("nobody asked");
}

/// The moments at which an agent is killed, in milliseconds: closer together where more happens.
const MOMENTS: [u64; 12] = [0, 2, 4, 7, 11, 16, 23, 32, 45, 64, 90, 130];

/// A real API server, and a cluster on it.
async fn real() -> (Plane, Stage) {
    let plane = Plane::start_api(&Binaries::find().unwrap(), PlaneOptions::default()).await.unwrap();
    let client = Client::try_from(plane.config(User::Admin)).unwrap();
    (plane, Stage::elsewhere(client).await)
}

async fn safe_load(stage: &Stage, kubeconfig: &str) {
    let config = json!({"safeDriverLoad": {"enable": true, "annotation": KEY}}).to_string();
    let object = json!({"metadata": {"name": "config"}, "data": {"config.json": config}});
    stage.create::<ConfigMap>(Some(NAMESPACE), object).await;
    let arguments = [
        "safe-load",
        "--node-name",
        NODE,
        "--configmap-name=config",
        "--configmap-namespace",
        NAMESPACE,
        "--pod-uid=pod-1",
        "--kubeconfig",
        kubeconfig,
    ];
    for millis in MOMENTS {
        let mut child = start(&arguments);
        tokio::time::sleep(Duration::from_millis(millis)).await;
        assert_eq!(end(&mut child, "-KILL").await, None);
    }
    // Whoever asks from here on is the one that runs.
    stage.annotate(KEY, None).await;
    let mut child = start(&arguments);
    let asked = until_asked(stage).await;
    assert!(asked.contains("pod-1"), "{asked}");
    assert_eq!(end(&mut child, "-TERM").await, Some(i32::from(TERMINATED)));
    assert!(!stage.node().await.annotations().contains_key(KEY));
    let mut child = start(&arguments);
    until_asked(stage).await;
    stage.annotate(KEY, None).await;
    assert_eq!(child.wait().await.unwrap().code(), Some(0));
}

async fn uninstall(stage: &Stage, kubeconfig: &str) {
    let Some(root_first) = to_be_root().await else {
        return println!("this kernel does not allow a private user namespace here: nothing was tried");
    };
    let directory = machine("");
    stage.label(DRA_DRIVER, Some("true")).await;
    let before = stage.node().await.labels().clone();
    let arguments = uninstall_driver(kubeconfig, &directory);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    // A plugin that does not leave keeps the agent waiting, with its label paused.
    let plugin = json!({"annotations": {"test/stays": "true"}});
    stage.pod(NAMESPACE, PLUGIN, plugin, json!({"ownedBy": "DaemonSet"})).await;
    let mut child = start_by(root_first, &arguments);
    until_paused(stage).await;
    assert_eq!(end(&mut child, "-TERM").await, Some(i32::from(TERMINATED)));
    assert_eq!(*stage.node().await.labels(), before, "after SIGTERM");
    let mut child = start_by(root_first, &arguments);
    until_paused(stage).await;
    assert_eq!(end(&mut child, "-KILL").await, None);
    assert_ne!(*stage.node().await.labels(), before, "SIGKILL leaves what was paused");
    stage.admin_delete(NAMESPACE, PLUGIN).await;
    for millis in MOMENTS {
        let mut child = start_by(root_first, &arguments);
        tokio::time::sleep(Duration::from_millis(millis)).await;
        end(&mut child, "-KILL").await;
    }
    let code = start_by(root_first, &arguments).wait().await.unwrap().code();
    assert_eq!(code, Some(0));
    assert_eq!(*stage.node().await.labels(), before);
    assert!(!stage.is_cordoned().await);
}

/// A tree of files for a machine: not every kernel that tests run on has modules.
fn machine(modules: &str) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for path in ["host", "sys/module/nvidia"] {
        std::fs::create_dir_all(directory.path().join(path)).unwrap();
    }
    let boot = "proc/sys/kernel/random/boot_id";
    for (path, text) in [
        ("proc/modules", modules),
        ("proc/self/mountinfo", ""),
        (boot, "boot-1\n"),
        ("sys/module/nvidia/refcnt", "1\n"),
    ] {
        let path = directory.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    directory
}

fn uninstall_driver(kubeconfig: &str, machine: &tempfile::TempDir) -> Vec<String> {
    let root = machine.path().to_str().unwrap();
    let program = ["driver-manager", "uninstall_driver", "--node-name", NODE];
    program
        .into_iter()
        .chain(["--kubeconfig", kubeconfig, "--machine-root", root])
        .map(str::to_owned)
        .collect()
}

/// Moments within the time that a run takes, other ones each time the test is run.
fn moments() -> impl Iterator<Item = Duration> {
    let seed = u64::from(std::process::id());
    println!("moments by {seed}");
    let drawn = move |n: u64| (seed * 1_000 + n).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40;
    (0..24).map(move |n| Duration::from_millis(drawn(n) % 160))
}

/// All that is done before the driver turns out to be in use is taken back, by SIGTERM, by the run itself, or by the next one.
async fn find_it_in_use(stage: &Stage, kubeconfig: &str) {
    let Some(root_first) = to_be_root().await else {
        return println!("this kernel does not allow a private user namespace here: nothing was tried");
    };
    let directory = machine("nvidia 56700928 1 - Live 0x0000000000000000\n");
    stage.label(DRA_DRIVER, Some("true")).await;
    let before = stage.node().await.labels().clone();
    let arguments = uninstall_driver(kubeconfig, &directory);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let is_as_before = async || {
        let node = stage.node().await;
        *node.labels() == before && !stage.is_cordoned().await
    };
    for (number, moment) in moments().enumerate() {
        let signal = ["-TERM", "-KILL"][number % 2];
        let mut child = start_by(root_first, &arguments);
        tokio::time::sleep(moment).await;
        if end(&mut child, signal).await == Some(i32::from(TERMINATED)) {
            assert!(is_as_before().await, "after {signal} at {moment:?}: {:?}", stage.node().await);
        }
    }
    let code = start_by(root_first, &arguments).wait().await.unwrap().code();
    assert_eq!(code, Some(1));
    assert!(is_as_before().await, "{:?}", stage.node().await);
    assert!(!stage.node().await.annotations().keys().any(|key| key.starts_with("pitcrew.dev/")));
}

async fn until_paused(stage: &Stage) {
    for _ in 0..400 {
        if stage.paused().await == [DRA_DRIVER] {
            return;
        }
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
    panic!("nothing was paused: {:?}", stage.node().await.labels());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_safe_load_that_is_killed_goes_on_and_one_that_is_told_to_end_takes_its_request_back() {
    let (directory, stage) = (tempfile::tempdir().unwrap(), Stage::bare(Machine::default()).await);
    let kubeconfig = serve(&stage, directory.path()).await;
    safe_load(&stage, &kubeconfig).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_uninstall_that_is_killed_is_finished_by_the_next_start() {
    let (directory, stage) = (tempfile::tempdir().unwrap(), Stage::new(Machine::default()).await);
    let kubeconfig = serve(&stage, directory.path()).await;
    uninstall(&stage, &kubeconfig).await;
    find_it_in_use(&stage, &kubeconfig).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_a_real_api_server_it_is_the_same() {
    let (plane, stage) = real().await;
    let kubeconfig = plane.kubeconfig().to_str().unwrap();
    safe_load(&stage, kubeconfig).await;
    uninstall(&stage, kubeconfig).await;
    find_it_in_use(&stage, kubeconfig).await;
}
