//! Pitcrew's own agents in simulated driver pods: the real programs, on machines in memory.
//!
//! The driver manager is the pod's init container: it runs while the kubelet holds the main container back, is told to end
//! when the pod is deleted, and is started again after a failure, or when its machine has booted, as a kubelet does it.
//! `finish` runs beside the driver's container.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use pitcrew_agent::Failure;
use pitcrew_agent::arguments::settings_in;
use pitcrew_agent::clock::Clock;
use pitcrew_agent::cluster::Cluster;
use pitcrew_agent::fake::{FakeHost, Machine};
use pitcrew_agent::finish::finish;
use pitcrew_agent::settings::Settings;
use pitcrew_agent::stop::Stopper;
use pitcrew_agent::uninstall::{Agent, uninstall};
use pitcrew_core::contract::CONFIG_DIGEST_ENV;
use tokio::sync::{mpsc, oneshot};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::Instant;

use super::behaviour::Machines;
use super::cache::Key;
use super::pod_life::back_off;
use super::render::MANAGER_CONTAINER;
use super::way::Way;

/// Written when a driver's container is ready; `finish` looks for it.
const DRIVER_READY: &str = "/run/nvidia/validations/.driver-ctr-ready";
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// What the driver is kept busy by while somebody has a device open.
const OPENED: [&str; 2] = ["nvidia", "nvidia_uvm"];

/// Which program of the agents runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Program {
    Uninstall,
    Finish,
}

/// How far a driver pod's driver manager is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// It has to run, or does.
    Due,
    /// It failed, with this sentence, and waits to be started again.
    Failed(String),
    Done,
}

/// A program that runs, or has ended and nobody has looked yet.
struct Running {
    program: Program,
    stopper: Stopper,
    task: AbortHandle,
    /// Why it failed, if it did.
    end: oneshot::Receiver<Option<String>>,
}

impl Drop for Running {
    /// Nothing outlives its container.
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The agents of one driver pod in one boot of its machine.
struct Attempts {
    uid: String,
    boot: u32,
    runs: Option<Running>,
    progress: Progress,
    failures: u32,
    again_at: Option<Instant>,
    finished: bool,
}

impl Attempts {
    fn new(uid: String, boot: u32) -> Self {
        let (progress, failures) = (Progress::Due, 0);
        Self { uid, boot, runs: None, progress, failures, again_at: None, finished: false }
    }

    /// Takes up what has come to its end.
    fn settle(&mut self, now: Instant) {
        let again = self.again_at.take_if(|at| *at <= now).is_some();
        if again && matches!(self.progress, Progress::Failed(_)) {
            self.progress = Progress::Due;
        }
        let Some(failure) = self.runs.as_mut().and_then(|running| running.end.try_recv().ok()) else {
            return;
        };
        let program = self.runs.take().map(|ended| ended.program);
        if failure.is_some() {
            self.again_at = Some(now + back_off(self.failures));
            self.failures += 1;
        }
        match (program, failure) {
            (Some(Program::Uninstall), Some(sentence)) => self.progress = Progress::Failed(sentence),
            (Some(Program::Uninstall), None) => (self.progress, self.failures) = (Progress::Done, 0),
            (_, failure) => self.finished = failure.is_none(),
        }
    }
}

/// The agents of all nodes.
pub(super) struct Agents {
    pods: BTreeMap<Key, Attempts>,
    programs: JoinSet<()>,
    /// Told whose program has ended.
    ended: mpsc::UnboundedSender<Key>,
}

impl Agents {
    pub(super) fn new(ended: mpsc::UnboundedSender<Key>) -> Self {
        Self { pods: BTreeMap::new(), programs: JoinSet::new(), ended }
    }

    /// How far a pod's driver manager is.
    pub(super) fn progress(&mut self, key: &Key, uid: &str, boot: u32, now: Instant) -> Progress {
        let attempts = match self.pods.entry(key.clone()) {
            Entry::Occupied(known) if known.get().uid == uid && known.get().boot == boot => known.into_mut(),
            // What ran in an earlier boot died with it.
            other => other.insert_entry(Attempts::new(uid.to_owned(), boot)).into_mut(),
        };
        attempts.settle(now);
        attempts.progress.clone()
    }

    /// When a driver manager that failed is started again.
    pub(super) fn again_at(&self, key: &Key, now: Instant) -> Option<Instant> {
        self.pods.get(key)?.again_at.filter(|at| *at > now)
    }

    /// Starts the driver manager of a pod, unless it runs.
    pub(super) fn uninstall(&mut self, way: &Way, key: &Key, pod: &Pod, place: Place<'_>) {
        self.start(way, key, pod, place, Program::Uninstall);
    }

    /// Starts `finish`, which runs beside the driver's container from its first moment, unless it runs or has done its work.
    pub(super) fn finish(&mut self, way: &Way, key: &Key, pod: &Pod, place: Place<'_>) {
        let due = |pod: &Attempts| pod.progress == Progress::Done && !pod.finished && pod.again_at.is_none();
        if self.pods.get(key).is_some_and(due) {
            self.start(way, key, pod, place, Program::Finish);
        }
    }

    /// Another driver than a pod's own is still loaded.
    pub(super) fn is_in_the_way(pod: &Pod, place: Place<'_>) -> bool {
        let machine = place.host().machine();
        let installed = machine.files.get(&Settings::default().paths.state_file).cloned();
        machine.modules.contains_key("nvidia") && installed != digest(pod)
    }

    /// A driver's container is ready: its driver is loaded.
    pub(super) fn driver_is_up(pod: &Pod, place: Place<'_>) {
        let modules = place.machines.modules.clone();
        place.host().change(|machine| {
            if machine.files.contains_key(DRIVER_READY) {
                return;
            }
            machine.install(&digest(pod).unwrap_or_default());
            for module in &modules {
                machine.load(module, Some("nvidia"));
            }
            machine.file(DRIVER_READY, "");
        });
    }

    /// A driver's container is not ready, or no more.
    pub(super) fn driver_is_down(place: Place<'_>) {
        place.host().change(|machine| drop(machine.files.remove(DRIVER_READY)));
    }

    /// The programs on a node that have the driver open.
    pub(super) fn opened(place: Place<'_>, users: &[String]) {
        let own = place.machines.programs.get(place.node).cloned();
        place.host().change(|machine| {
            machine.processes.clear();
            for (pid, user) in (1000..).zip(users.iter().chain(&own)) {
                machine.open(pid, user, "/dev/nvidia0", &OPENED);
            }
        });
    }

    /// The pod is told to end. Returns whether a program in it still runs.
    pub(super) fn stop(&mut self, key: &Key, now: Instant) -> bool {
        let Some(attempts) = self.pods.get_mut(key) else { return false };
        attempts.settle(now);
        attempts.runs.as_ref().inspect(|running| running.stopper.stop()).is_some()
    }

    /// The pod is gone, and whatever ran in it.
    pub(super) fn forget(&mut self, key: &Key) {
        self.pods.remove(key);
    }

    fn start(&mut self, way: &Way, key: &Key, pod: &Pod, place: Place<'_>, program: Program) {
        let host = place.host();
        let Some(attempts) = self.pods.get_mut(key).filter(|pod| pod.runs.is_none()) else { return };
        let (told, whose) = (self.ended.clone(), key.clone());
        let (stopper, stop) = Stopper::new();
        let (ending, end) = oneshot::channel();
        let cluster = Cluster::new(way.client(), place.node, Clock::starting_at(place.now), stop.clone());
        let settings = settings_in(&environment(pod));
        let work = async move {
            let agent = |settings: Settings| Agent { host: host.as_ref(), cluster, stop, settings };
            let run = async {
                match settings {
                    Ok(settings) if program == Program::Uninstall => uninstall(&agent(settings)).await,
                    Ok(settings) => finish(&agent(settings), None).await,
                    Err(failure) => Err(failure),
                }
            };
            let failure = tokio::select! {
                biased;
                () = host.died() => Some("killed".to_owned()),
                result = run => result.err().as_ref().map(Failure::sentence),
            };
            // Nobody listens when the cluster is on its way out.
            let _ = ending.send(failure);
            let _ = told.send(whose);
        };
        let task = self.programs.spawn(work);
        attempts.runs = Some(Running { program, stopper, task, end });
        while self.programs.try_join_next().is_some() {}
    }
}

/// Where a program runs, and when.
#[derive(Clone, Copy)]
pub(super) struct Place<'a> {
    pub(super) node: &'a str,
    pub(super) boot: u32,
    pub(super) now: Timestamp,
    pub(super) machines: &'a Machines,
}

impl Place<'_> {
    /// The machine. One that has booted has nothing in its memory, and nothing of `/run`.
    fn host(&self) -> Arc<FakeHost> {
        self.machines.hosts.in_boot(self.node, self.boot, || {
            let mut machine = Machine { mounts: vec!["/".into(), "/run".into()], ..Machine::default() };
            machine.file(BOOT_ID, &format!("boot-{}\n", self.boot));
            FakeHost::new(machine)
        })
    }
}

fn digest(pod: &Pod) -> Option<String> {
    environment(pod).into_iter().find(|(name, _)| name == CONFIG_DIGEST_ENV).map(|(_, digest)| digest)
}

/// What the driver manager's container is told.
fn environment(pod: &Pod) -> Vec<(String, String)> {
    let init = pod.spec.as_ref().and_then(|spec| spec.init_containers.as_ref()).into_iter().flatten();
    let manager = init.filter(|container| container.name == MANAGER_CONTAINER);
    let env = manager.flat_map(|container| container.env.iter().flatten());
    env.filter_map(|variable| Some((variable.name.clone(), variable.value.clone()?))).collect()
}
