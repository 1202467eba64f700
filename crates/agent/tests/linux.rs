//! What only a real Linux shows: mounts in a mount namespace of their own, programs in another root directory, the real
//! binary by its names and signals. Where the kernel does not allow a private namespace the test says so and passes.

#![allow(clippy::unwrap_used, clippy::panic, reason = "what these tests do not expect is a failure")]

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use pitcrew_agent::host::{Host as _, Ran};
use pitcrew_agent::linux::Linux;
use pitcrew_agent::unload::detach_all;

const BINARY: &str = env!("CARGO_BIN_EXE_pitcrew-node");
/// Set for the copy of a test that runs in its own namespace: the directory to work in.
const INSIDE: &str = "PITCREW_TEST_NAMESPACE";

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// Runs a test of this file again as root of a namespace of its own; `None` if the kernel does not allow that.
fn in_namespace(test: &str, directory: &Path) -> Option<Output> {
    let unshare = |arguments: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--mount", "--propagation", "private"]).args(arguments);
        command.env(INSIDE, directory).stdin(Stdio::null());
        command.output()
    };
    let allowed = unshare(&["mount", "-t", "tmpfs", "tmpfs", directory.to_str()?]);
    if !allowed.is_ok_and(|output| output.status.success()) {
        println!("this kernel does not allow a private mount namespace here: nothing was tried");
        return None;
    }
    let this = std::env::current_exe().ok()?;
    Some(unshare(&[this.to_str()?, "--exact", test, "--nocapture"]).unwrap())
}

fn sh(script: &str) {
    let status = Command::new("sh").args(["-ec", script]).status().unwrap();
    assert!(status.success(), "{script}");
}

#[test]
fn stacked_and_busy_mounts_are_all_detached_and_their_neighbours_are_not() {
    let Ok(directory) = std::env::var(INSIDE) else {
        let directory = tempfile::tempdir().unwrap();
        let name = "stacked_and_busy_mounts_are_all_detached_and_their_neighbours_are_not";
        if let Some(output) = in_namespace(name, directory.path()) {
            let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{text}");
        }
        return;
    };
    sh(&format!(
        "cd {directory}; mount -t tmpfs t .; cd {directory}; mkdir -p driver 'driver other'; mount -t tmpfs a driver; \
         mkdir driver/sub; mount -t tmpfs b driver/sub; mount -t tmpfs c driver; mkdir driver/sub; mount -t tmpfs d driver/sub; \
         mount --bind driver 'driver other'; touch driver/file"
    ));
    let held = std::fs::File::open(format!("{directory}/driver/file")).unwrap();
    runtime().block_on(async {
        let host = Linux::default();
        let root = format!("{directory}/driver");
        let count = |mounts: &[String]| mounts.iter().filter(|mount| mount.starts_with(&root)).count();
        assert_eq!(count(&host.mounts().await.unwrap()), 5);
        detach_all(&host, &root).await.unwrap();
        let left = host.mounts().await.unwrap();
        assert_eq!(
            left.iter().filter(|mount| mount.starts_with(&root)).collect::<Vec<_>>(),
            [&format!("{root} other")]
        );
        detach_all(&host, &root).await.unwrap();
        detach_all(&host, "/nonexistent").await.unwrap();
    });
    drop(held);
}

/// What a driver container mounts below `/run/nvidia` is on the host too (Bidirectional), and in every container that follows
/// the host (`HostToContainer`); what the host mounts there comes to us.
#[test]
fn mounts_that_others_see_are_gone_for_them_too() {
    let Ok(directory) = std::env::var(INSIDE) else {
        let directory = tempfile::tempdir().unwrap();
        if let Some(output) = in_namespace("mounts_that_others_see_are_gone_for_them_too", directory.path()) {
            let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{text}");
        }
        return;
    };
    sh(&format!(
        "cd {directory}; mount -t tmpfs t .; cd {directory}; mkdir run host follower alone; \
         mount -t tmpfs r run; mount --make-shared run; mkdir run/driver run/other; \
         mount --bind run host; mount --bind run follower; mount --make-slave follower; \
         mount --bind run alone; mount --make-private alone; \
         mount -t tmpfs a run/driver; mkdir run/driver/dev; mount -t tmpfs b run/driver/dev; \
         mount -t tmpfs c host/driver; mount -t tmpfs d host/other; mount -t tmpfs e alone/driver; touch host/driver/file"
    ));
    let held = std::fs::File::open(format!("{directory}/host/driver/file")).unwrap();
    runtime().block_on(async {
        let host = Linux::default();
        let below = async |place: &str, name: &str| {
            let root = format!("{directory}/{place}/{name}");
            host.mounts().await.unwrap().iter().filter(|mount| mount.starts_with(&root)).count()
        };
        for place in ["run", "host", "follower"] {
            assert_eq!((below(place, "driver").await, below(place, "other").await), (3, 1), "{place}");
        }
        detach_all(&host, &format!("{directory}/run/driver")).await.unwrap();
        for place in ["run", "host", "follower"] {
            assert_eq!((below(place, "driver").await, below(place, "other").await), (0, 1), "{place}");
        }
        assert_eq!(below("alone", "driver").await, 1, "what is nobody else's stays");
    });
    drop(held);
}

#[test]
fn a_program_in_another_root_directory_answers_is_missing_or_hangs() {
    let Ok(_) = std::env::var(INSIDE) else {
        let directory = tempfile::tempdir().unwrap();
        let name = "a_program_in_another_root_directory_answers_is_missing_or_hangs";
        if let Some(output) = in_namespace(name, directory.path()) {
            let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{text}");
        }
        return;
    };
    runtime().block_on(async {
        let host = Linux::default().with_program(BINARY);
        let limit = Duration::from_secs(10);
        let answer = host.run("/", &["sh", "-c", "pwd; exit 3"], limit).await.unwrap();
        assert_eq!(answer, Ran::Ended { code: Some(3), output: "/\n".to_owned() });
        assert_eq!(host.run("/", &["no-such-program"], limit).await.unwrap(), Ran::NotStarted);
        let nowhere = host.run("/nonexistent", &["sh"], limit).await.unwrap_err();
        assert!(nowhere.source.to_string().contains("cannot be entered"), "{nowhere}: {}", nowhere.source);
        let hangs = host.run("/", &["sleep", "60"], Duration::from_millis(200)).await.unwrap();
        assert_eq!(hangs, Ran::TimedOut);
    });
}

/// Who is root may look everywhere; without a single capability, and with the files of a process closed, nobody may.
#[test]
fn processes_that_may_not_be_looked_at_are_counted() {
    const NAME: &str = "processes_that_may_not_be_looked_at_are_counted";
    let Ok(directory) = std::env::var(INSIDE) else {
        let directory = tempfile::tempdir().unwrap();
        let this = std::env::current_exe().unwrap();
        let mut command = Command::new("unshare");
        // Without a map of users the capabilities that come with a namespace of one's own open no file.
        command.arg("--user").arg(this).args(["--exact", NAME, "--nocapture"]);
        let output = command.env(INSIDE, directory.path()).stdin(Stdio::null()).output();
        let Some(output) = output.ok().filter(|output| !output.stdout.is_empty()) else {
            return println!("this kernel does not allow a private user namespace here: nothing was tried");
        };
        let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{text}");
        return;
    };
    sh(&format!(
        "cd {directory}; mkdir -p proc/7/fd proc/8/fd proc/9; echo qemu > proc/7/comm; ln -s /dev/vfio/1 proc/7/fd/3; \
         ln -s /dev/vfio/1 proc/8/fd/3; chmod 0 proc/8/fd"
    ));
    let holders = runtime().block_on(Linux::below(&directory).holders("/dev/vfio/")).unwrap();
    sh(&format!("chmod 700 {directory}/proc/8/fd"));
    let seen: Vec<u32> = holders.seen.iter().map(|holder| holder.pid).collect();
    assert_eq!((seen, holders.hidden), (vec![7], 1), "process 9 has ended");
}

fn binary(name: &str, arguments: &[&str]) -> Output {
    use std::os::unix::process::CommandExt as _;
    let mut command = Command::new(BINARY);
    command.arg0(name).args(arguments).env_clear().stdin(Stdio::null());
    command.output().unwrap()
}

#[test]
fn the_binary_answers_to_its_names() {
    for (name, arguments, code, words) in [
        ("driver-manager", &["--help"][..], 0, "uninstall_driver"),
        ("vfio-manage", &["--help"], 0, "unbind"),
        ("network-operator-init-container", &["--help"], 0, "--configmap-name"),
        ("pitcrew-node", &["--version"], 0, "pitcrew-node"),
        ("driver-manager", &["--version"], 0, env!("CARGO_PKG_VERSION")),
        ("vfio-manage", &["--version"], 0, env!("CARGO_PKG_VERSION")),
        ("network-operator-init-container", &["--version"], 0, env!("CARGO_PKG_VERSION")),
        ("driver-manager", &["uninstall_driver"], 2, "NODE_NAME"),
        ("driver-manager", &["--node-name=n", "uninstall_driver"], 2, "service account"),
        ("driver-manager", &["no_such_command"], 2, "no_such_command"),
        ("driver-manager", &["--drain-timeout-seconds=soon", "uninstall_driver"], 2, "not a duration"),
    ] {
        let output = binary(name, arguments);
        let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{name} {arguments:?}: {text}");
        assert!(text.contains(words), "{name} {arguments:?}: {text}");
    }
}
