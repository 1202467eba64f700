//! A plane with a fleet of three nodes, and the shell in which the documented commands run.

use std::collections::BTreeMap;
use std::env;
use std::path::Path;
use std::process::{Output, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread::sleep;
use std::time::Duration;

use kube::Client;
use libtest_mimic::Failed;
use pitcrew_controller::Clock;
use pitcrew_sim::actors::{Actors, Behaviour, BehaviourHandle, Timing};
use pitcrew_sim::fleet::Fleet;
use pitcrew_sim::plane::{Binaries, Plane, PlaneOptions, User};
use tokio::runtime::{Builder, Runtime};
use tokio::time::{Instant, timeout};

/// The documented way to change the version.
pub(crate) const PATCH: &str = r#"kubectl patch clusterpolicy/cluster-policy --type='json' -p='[{"op": "replace", "path": "/spec/driver/version", "value":"510.85.02"}]'"#;
/// The version in it.
pub(crate) const DOCUMENTED: &str = "510.85.02";
/// The documented way to see how far the nodes are.
const MONITOR: &str = r#"kubectl get node -l nvidia.com/gpu.present \
   -ojsonpath='{range .items[*]}{.metadata.name}{"\t"}{.metadata.labels.nvidia\.com/gpu-driver-upgrade-state}{"\n"}{end}'"#;
/// Where each driver pod is, and what it is.
const DRIVERS: &str = r#"kubectl get pods -n gpu-operator -lapp=nvidia-driver-daemonset \
   -ojsonpath='{range .items[*]}{.spec.nodeName}{"\t"}{.metadata.uid} {.spec.containers[0].image}{"\n"}{end}'"#;

/// What the chart lets the controller do.
const PERMISSIONS: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../charts/pitcrew/golden/permissions.yaml");

/// Nothing in a story takes longer, on a busy machine too. An eviction whose caller is killed half-way keeps its place in
/// the budget for two minutes: the API server has counted it, and never deleted the pod.
const PATIENCE: Duration = Duration::from_mins(4);
/// One command.
const COMMAND_TIMEOUT: Duration = Duration::from_mins(1);
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Long enough for a controller that moves on in milliseconds to do what it should not.
const WATCHED_FOR: Duration = Duration::from_secs(3);
const SEED: u64 = 3;

/// Nodes or driver pods by the node's name.
pub(crate) type ByNode = BTreeMap<String, String>;
/// What a story returns.
pub(crate) type Outcome = Result<(), Failed>;
/// What a person does, and what must hold.
pub(crate) type Story = fn(&mut Stage) -> Outcome;

/// The plane of the last story, if that went well.
static SPARE: Mutex<Option<Stage>> = Mutex::new(None);

/// Plays one story on a plane that is in order.
pub(crate) fn play(story: Story) -> Outcome {
    let spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner).take();
    let mut stage = spare.map_or_else(Stage::open, Ok)?;
    stage.sh("kubectl delete events --all")?;
    stage.behaviour().change(|behaviour| *behaviour = quick());
    story(&mut stage)?;
    *SPARE.lock().unwrap_or_else(PoisonError::into_inner) = Some(stage);
    Ok(())
}

/// Ends the plane that is left.
pub(crate) fn close() {
    drop(SPARE.lock().unwrap_or_else(PoisonError::into_inner).take());
}

/// What must hold.
pub(crate) fn must(holds: bool, otherwise: impl FnOnce() -> String) -> Outcome {
    if holds { Ok(()) } else { Err(otherwise().into()) }
}

/// Waits until `look` finds what `what` describes.
pub(crate) fn until<T>(what: &str, mut look: impl FnMut() -> Result<Option<T>, Failed>) -> Result<T, Failed> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look()? {
            return Ok(found);
        }
        if Instant::now() >= deadline {
            return Err(format!("waited in vain until {what}").into());
        }
        sleep(LOOK_EVERY);
    }
}

/// Quick, but slow enough at the driver's start for a person with kubectl to see a node there.
fn quick() -> Behaviour {
    Behaviour::default().with_timing(Timing { driver_start: Duration::from_secs(2), ..Timing::default() })
}

/// A plane, its fleet, and hands.
pub(crate) struct Stage {
    // Fields are dropped in this order: who works in the plane, the plane, what they ran on.
    actors: Actors,
    plane: Plane,
    runtime: Runtime,
    versions: u32,
    controllers: u32,
}

impl Stage {
    fn open() -> Result<Stage, Failed> {
        let runtime = Builder::new_multi_thread().enable_all().build()?;
        let (plane, actors) = runtime.block_on(async {
            let plane = Plane::start(&Binaries::find()?, PlaneOptions::default()).await?;
            plane.grant(Path::new(PERMISSIONS))?;
            let client = |user| Client::try_from(plane.config(user));
            let (admin, machines) = (client(User::Admin)?, client(User::Kubelet)?);
            let fleet = Fleet::new(3).with_grace_seconds(1);
            fleet.install(&admin).await?;
            let actors = Actors::fleet_only(machines, Clock::System.now(), SEED, Behaviour::default());
            timeout(PATIENCE, fleet.wait_ready(&admin))
                .await
                .map_err(|_| "the fleet is not ready in time")?;
            Ok::<_, Failed>((plane, actors))
        })?;
        let stage = Stage { actors, plane, runtime, versions: 0, controllers: 0 };
        stage.install_definitions()?;
        Ok(stage)
    }

    /// As the manual says.
    pub(crate) fn install_definitions(&self) -> Outcome {
        self.sh("pitcrew crd | kubectl apply -f -")?;
        let served = "kubectl wait --for=condition=established --timeout=30s \
             crd/driverpolicies.pitcrew.dev crd/rollouts.pitcrew.dev";
        self.sh(served).map(drop)
    }

    pub(crate) fn plane(&self) -> &Plane {
        &self.plane
    }

    /// How the simulated machines behave from now on.
    pub(crate) fn behaviour(&self) -> BehaviourHandle {
        self.actors.behaviour()
    }

    /// A number for the next controller of this plane.
    pub(crate) fn next_controller(&mut self) -> u32 {
        self.controllers += 1;
        self.controllers
    }

    /// Runs a command line as a person would, with `kubectl` and `pitcrew` in the path; returns what it printed.
    pub(crate) fn sh(&self, line: &str) -> Result<String, Failed> {
        let output = self.attempt(line)?;
        if output.status.success() {
            return Ok(String::from_utf8(output.stdout)?);
        }
        let said = String::from_utf8_lossy(&output.stderr);
        Err(format!("`{line}` ended with {}: {}", output.status, said.trim_end()).into())
    }

    /// The same for a command that may fail.
    pub(crate) fn attempt(&self, line: &str) -> Result<Output, Failed> {
        let kubectl = self.plane.kubectl();
        let dirs =
            [Path::new(kubectl.get_program()), Path::new(env!("CARGO_BIN_EXE_pitcrew"))].map(Path::parent);
        let dirs = dirs.into_iter().flatten().map(Path::to_owned);
        let path = env::join_paths(dirs.chain(env::split_paths(&env::var_os("PATH").unwrap_or_default())))?;
        let mut shell = tokio::process::Command::new("sh");
        shell
            .args(["-c", line])
            .env("PATH", path)
            .env("KUBECONFIG", self.plane.kubeconfig())
            .env("NO_COLOR", "1");
        shell.env_remove("RUST_LOG").stdin(Stdio::null()).kill_on_drop(true);
        let finished = self.runtime.block_on(async { timeout(COMMAND_TIMEOUT, shell.output()).await });
        Ok(finished.map_err(|_| format!("`{line}` did not end within {} s", COMMAND_TIMEOUT.as_secs()))??)
    }

    /// `kubectl apply -f -` of this text.
    pub(crate) fn apply(&self, manifest: &str) -> Result<Output, Failed> {
        self.attempt(&format!("kubectl apply -f - <<'MANIFEST'\n{manifest}\nMANIFEST"))
    }

    /// A DriverPolicy that is accepted.
    pub(crate) fn apply_policy(&self, name: &str, spec: &str) -> Outcome {
        let output = self.apply(&policy(name, spec))?;
        must(output.status.success(), || String::from_utf8_lossy(&output.stderr).into_owned())
    }

    /// A version that was never there.
    pub(crate) fn new_version(&mut self) -> String {
        self.versions += 1;
        format!("550.54.{:02}", self.versions)
    }

    /// Changes the version by the documented command.
    pub(crate) fn set_version(&self, version: &str) -> Outcome {
        self.sh(&PATCH.replace(DOCUMENTED, version)).map(drop)
    }

    /// Changes the version by the documented command, to one that was never there.
    pub(crate) fn patch_version(&mut self) -> Result<String, Failed> {
        let version = self.new_version();
        self.set_version(&version)?;
        Ok(version)
    }

    /// Changes one of the documented options in the ClusterPolicy.
    pub(crate) fn patch_option(&self, option: &str, value: &str) -> Outcome {
        let patch = r#"[{"op": "replace", "path": "/spec/driver/upgradePolicy/OPTION", "value": VALUE}]"#;
        let patch = patch.replace("OPTION", option).replace("VALUE", value);
        self.sh(&format!("kubectl patch clusterpolicy/cluster-policy --type='json' -p='{patch}'")).map(drop)
    }

    /// The nodes' states, by the documented command.
    pub(crate) fn states(&self) -> Result<ByNode, Failed> {
        self.by_node(MONITOR)
    }

    /// UID and image of each node's driver pod.
    pub(crate) fn drivers(&self) -> Result<ByNode, Failed> {
        self.by_node(DRIVERS)
    }

    fn by_node(&self, command: &str) -> Result<ByNode, Failed> {
        let table = self.sh(command)?;
        let rows = table.lines().filter_map(|line| line.split_once('\t'));
        Ok(rows.map(|(node, rest)| (node.to_owned(), rest.to_owned())).collect())
    }

    /// Waits until the nodes' states are as `holds` says.
    pub(crate) fn until_states(&self, what: &str, holds: impl Fn(&ByNode) -> bool) -> Result<ByNode, Failed> {
        let mut last = ByNode::new();
        let found = until(what, || {
            last = self.states()?;
            Ok(holds(&last).then(|| last.clone()))
        });
        found.map_err(|_| format!("waited in vain until {what}; the nodes: {last:?}").into())
    }

    /// Waits until every node is done, whatever it was before.
    pub(crate) fn until_known(&self) -> Outcome {
        self.until_states("every node is upgrade-done", all_done).map(drop)
    }

    /// Waits until every node is done and runs the version, and is in service.
    pub(crate) fn until_upgraded(&self, version: &str) -> Outcome {
        let tag = format!(":{version}-");
        until(&format!("every driver pod is of version {version}"), || {
            let drivers = self.drivers()?;
            Ok((drivers.len() == 3 && drivers.values().all(|driver| driver.contains(&tag))).then_some(()))
        })?;
        self.until_known()?;
        let out = self.sh("kubectl get nodes -ojsonpath='{.items[*].spec.unschedulable}'")?;
        must(out.is_empty(), || format!("a node is still cordoned: {out}"))
    }

    /// Neither labels nor driver pods change for a while.
    pub(crate) fn stands_still(&self) -> Result<ByNode, Failed> {
        let before = (self.states()?, self.drivers()?);
        sleep(WATCHED_FOR);
        let after = (self.states()?, self.drivers()?);
        must(before == after, || format!("something moved: {before:?} became {after:?}"))?;
        Ok(after.0)
    }
}

/// A DriverPolicy as people write it.
pub(crate) fn policy(name: &str, spec: &str) -> String {
    format!(
        r#"{{"apiVersion": "pitcrew.dev/v1alpha1", "kind": "DriverPolicy", "metadata": {{"name": "{name}"}}, "spec": {spec}}}"#
    )
}

/// Every node is `upgrade-done`.
pub(crate) fn all_done(states: &ByNode) -> bool {
    states.len() == 3 && states.values().all(|state| state == "upgrade-done")
}
