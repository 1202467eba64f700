//! A plane with a fleet of three GPU nodes, and two hosts without GPUs on which pods are processes.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::fs;
use std::path::Path;
use std::process::{Output, Stdio};
use std::thread::sleep;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::api::PostParams;
use kube::{Api, Client};
use libtest_mimic::Failed;
use pitcrew_controller::Clock;
use pitcrew_sim::actors::{Actors, Behaviour};
use pitcrew_sim::fleet::Fleet;
use pitcrew_sim::plane::{AuditLog, Binaries, Helm, Plane, PlaneOptions, User};
use serde_json::{Value, json};
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use crate::host::Host;
use crate::render::{Outcome, top};

const HOSTS: [&str; 2] = ["host-1", "host-2"];
/// Nothing in a story takes longer, on a busy machine too.
const PATIENCE: Duration = Duration::from_mins(2);
const COMMAND_TIMEOUT: Duration = Duration::from_mins(3);
const LOOK_EVERY: Duration = Duration::from_millis(200);
const SEED: u64 = 5;

/// What a person does, and what must hold.
pub(crate) type Story = fn(&Stage) -> Outcome;

/// Plays one story on a plane of its own.
pub(crate) fn play(story: Story) -> Outcome {
    let stage = Stage::open()?;
    story(&stage).map_err(|failed| {
        let said = failed.message().unwrap_or("failed");
        Failed::from(format!("{said}\n{}", stage.logs()))
    })
}

/// A plane, its fleet, its hosts, and hands.
pub(crate) struct Stage {
    // Fields are dropped in this order: who works in the plane, the plane, what they ran on.
    host: JoinHandle<()>,
    _actors: Actors,
    plane: Plane,
    runtime: Runtime,
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.host.abort();
        // Its processes end with it.
        let _ = self.runtime.block_on(&mut self.host);
    }
}

impl Stage {
    fn open() -> Result<Stage, Failed> {
        let runtime = Builder::new_multi_thread().enable_all().build()?;
        let (plane, actors) = runtime.block_on(set_up())?;
        let inside = runtime.enter(); // A client is made in a runtime.
        let dir = plane.data_dir().join("pods");
        fs::create_dir(&dir)?;
        let host = Host {
            client: Client::try_from(plane.config(User::Kubelet))?,
            nodes: HOSTS.map(str::to_owned).into(),
            kubeconfig: plane.kubeconfig().to_owned(),
            dir,
            containers: BTreeMap::new(),
        };
        let host = runtime.spawn(host.run());
        drop(inside);
        Ok(Stage { host, _actors: actors, plane, runtime })
    }

    /// A directory that goes with the plane.
    pub(crate) fn dir(&self) -> &Path {
        self.plane.data_dir()
    }

    /// Runs a command line at the top of the tree as a person would; returns what it printed.
    pub(crate) fn sh(&self, line: &str) -> Result<String, Failed> {
        let output = self.attempt(line)?;
        if output.status.success() {
            return Ok(String::from_utf8(output.stdout)?);
        }
        let said = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        Err(format!("`{line}` ended with {}: {}", output.status, said.concat().trim_end()).into())
    }

    /// The same for a command that may fail.
    pub(crate) fn attempt(&self, line: &str) -> Result<Output, Failed> {
        let (kubectl, helm) = (self.plane.kubectl(), Helm::find()?);
        let ours = Path::new(env!("CARGO_BIN_EXE_pitcrew"));
        let kubectl = Path::new(kubectl.get_program());
        let dirs = [Some(helm.dir()), kubectl.parent(), ours.parent()].into_iter().flatten();
        let dirs = dirs.map(Path::to_owned);
        let path = env::join_paths(dirs.chain(env::split_paths(&env::var_os("PATH").unwrap_or_default())))?;
        let mut shell = tokio::process::Command::new("sh");
        shell.args(["-c", line]).current_dir(top()).stdin(Stdio::null()).kill_on_drop(true);
        shell.env("PATH", path).env("KUBECONFIG", self.plane.kubeconfig()).env("NO_COLOR", "1");
        for home in ["HELM_CONFIG_HOME", "HELM_CACHE_HOME", "HELM_DATA_HOME"] {
            shell.env(home, self.plane.data_dir().join("helm"));
        }
        let finished = self.runtime.block_on(async { timeout(COMMAND_TIMEOUT, shell.output()).await });
        Ok(finished.map_err(|_| format!("`{line}` did not end within {} s", COMMAND_TIMEOUT.as_secs()))??)
    }

    /// Waits until a command prints what is wanted.
    pub(crate) fn until(
        &self,
        line: &str,
        what: &str,
        holds: impl Fn(&str) -> bool,
    ) -> Result<String, Failed> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let said = self.sh(line)?;
            if holds(&said) {
                return Ok(said);
            }
            if Instant::now() >= deadline {
                return Err(format!("waited in vain until {what}; `{line}` says: {said}").into());
            }
            sleep(LOOK_EVERY);
        }
    }

    /// What the API refused to a service account of the release, from the audit log.
    pub(crate) fn refused(&self) -> Result<BTreeSet<String>, Failed> {
        let log = self.plane.audit_log().ok_or("there is no audit log")?;
        let mut refused = BTreeSet::new();
        for line in fs::read_to_string(log)?.lines() {
            // The last line may be cut off in the middle.
            let Ok(event) = serde_json::from_str::<Value>(line) else { continue };
            let user = event["user"]["username"].as_str().unwrap_or_default();
            if event["responseStatus"]["code"] == 403 && user.starts_with("system:serviceaccount:") {
                refused.insert(format!("{user}: {} {}", event["verb"], event["requestURI"]));
            }
        }
        Ok(refused)
    }

    /// What the processes have said, each one's last lines.
    fn logs(&self) -> String {
        let files = fs::read_dir(self.plane.data_dir().join("pods")).into_iter().flatten().flatten();
        let logs = files.map(|file| file.path()).filter(|path| path.extension().is_some_and(|e| e == "log"));
        let mut told: Vec<String> = logs
            .map(|path| {
                let said = fs::read_to_string(&path).unwrap_or_default();
                let lines: Vec<_> = said.lines().collect();
                let name = path.file_name().unwrap_or_default().display().to_string();
                format!("{name}:\n  {}", lines[lines.len().saturating_sub(8)..].join("\n  "))
            })
            .collect();
        told.sort();
        told.join("\n")
    }
}

async fn set_up() -> Result<(Plane, Actors), Failed> {
    let plane =
        Plane::start(&Binaries::find()?, PlaneOptions { audit: AuditLog::Requests, data_dir: None }).await?;
    let client = |user| Client::try_from(plane.config(user));
    let (admin, machines) = (client(User::Admin)?, client(User::Kubelet)?);
    // To the fleet's kubelets the hosts are dead: they have a kubelet of their own.
    let mut behaviour = Behaviour::default();
    behaviour.down.extend(HOSTS.map(str::to_owned));
    for name in HOSTS {
        let capacity = json!({"cpu": "8", "memory": "16Gi", "pods": "110"});
        let node = json!({
            "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
            "status": {"capacity": capacity, "allocatable": capacity},
        });
        let node: Node = serde_json::from_value(node)?;
        Api::<Node>::all(admin.clone()).create(&PostParams::default(), &node).await?;
    }
    let fleet = Fleet::new(3).with_grace_seconds(1);
    fleet.install(&admin).await?;
    let actors = Actors::fleet_only(machines, Clock::System.now(), SEED, behaviour);
    timeout(PATIENCE, fleet.wait_ready(&admin)).await.map_err(|_| "the fleet is not ready in time")?;
    Ok((plane, actors))
}
