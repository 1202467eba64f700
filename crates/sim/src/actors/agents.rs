//! Pitcrew's own agents in simulated driver pods: the real programs, on machines in memory.
//!
//! The driver manager is the pod's first init container, and safe load the second where there is one: they run while the
//! kubelet holds the main container back, are told to end when the pod is deleted, and are started again after a failure, or
//! when their machine has booted, as a kubelet does it. `finish` runs beside the driver's container.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, EnvVar, Pod};
use pitcrew_agent::Failure;
use pitcrew_agent::arguments::{safe_load_in, settings_in};
use pitcrew_agent::clock::Clock;
use pitcrew_agent::cluster::Cluster;
use pitcrew_agent::fake::{FakeHost, Machine};
use pitcrew_agent::finish::finish;
use pitcrew_agent::safe_load::safe_load;
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
use super::render::{MANAGER_CONTAINER, SAFE_LOAD_CONTAINER};
use super::role::asks_first;
use super::way::Way;

/// Written when a driver's container is ready; `finish` looks for it.
const DRIVER_READY: &str = "/run/nvidia/validations/.driver-ctr-ready";
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// What the driver is kept busy by while somebody has a device open.
const OPENED: [&str; 2] = ["nvidia", "nvidia_uvm"];

/// How the agents call themselves to the embedded API.
pub const AGENT: &str = "node-agent";
/// What runs in pods has process IDs from here on.
const FIRST_PID: u32 = 1000;

/// Which program of the agents runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Program {
    Uninstall,
    SafeLoad,
    Finish,
}

/// How far a driver pod's init containers are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// One has to run, or does.
    Due,
    /// One failed, with this sentence, and waits to be started again.
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
    /// The init containers that are left.
    left: VecDeque<Program>,
    runs: Option<Running>,
    progress: Progress,
    failures: u32,
    again_at: Option<Instant>,
    finished: bool,
}

impl Attempts {
    fn new(pod: &Pod, boot: u32) -> Self {
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        let safe_load = asks_first(pod).then_some(Program::SafeLoad);
        let left = [Program::Uninstall].into_iter().chain(safe_load).collect();
        let (progress, failures) = (Progress::Due, 0);
        Self { uid, boot, left, runs: None, progress, failures, again_at: None, finished: false }
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
            (Some(Program::Finish) | None, failure) => self.finished = failure.is_none(),
            (Some(_), Some(sentence)) => self.progress = Progress::Failed(sentence),
            (Some(_), None) => {
                self.left.pop_front();
                self.progress = if self.left.is_empty() { Progress::Done } else { Progress::Due };
                self.failures = 0;
            }
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

    /// How far a pod's init containers are.
    pub(super) fn progress(&mut self, key: &Key, pod: &Pod, boot: u32, now: Instant) -> Progress {
        let is_same = |known: &Attempts| pod.metadata.uid.as_ref() == Some(&known.uid) && known.boot == boot;
        let attempts = match self.pods.entry(key.clone()) {
            Entry::Occupied(known) if is_same(known.get()) => known.into_mut(),
            // What ran in an earlier boot died with it.
            other => other.insert_entry(Attempts::new(pod, boot)).into_mut(),
        };
        attempts.settle(now);
        attempts.progress.clone()
    }

    /// When a program that failed is started again.
    pub(super) fn again_at(&self, key: &Key, now: Instant) -> Option<Instant> {
        self.pods.get(key)?.again_at.filter(|at| *at > now)
    }

    /// Starts the init container of a pod that is due, unless it runs.
    pub(super) fn initialize(&mut self, way: &Way, key: &Key, pod: &Pod, place: Place<'_>) {
        if let Some(due) = self.pods.get(key).and_then(|pod| pod.left.front().copied()) {
            self.start(way, key, pod, place, due);
        }
    }

    /// Starts `finish`, which runs beside the driver's container from its first moment, unless it runs or has done its work.
    pub(super) fn finish(&mut self, way: &Way, key: &Key, pod: &Pod, place: Place<'_>) {
        let due = |pod: &Attempts| pod.progress == Progress::Done && !pod.finished && pod.again_at.is_none();
        if !place.machines.without_finish && self.pods.get(key).is_some_and(due) {
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
            // Whoever the machine itself has started stays.
            machine.processes.retain(|(holder, _)| holder.pid < FIRST_PID);
            for (pid, user) in (FIRST_PID..).zip(users.iter().chain(&own)) {
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
        let cluster =
            Cluster::new(way.client_of(AGENT), place.node, Clock::starting_at(place.now), stop.clone());
        let settings = settings_in(&environment(pod, MANAGER_CONTAINER));
        let options =
            safe_load_in(&arguments(pod, SAFE_LOAD_CONTAINER), &environment(pod, SAFE_LOAD_CONTAINER));
        let work = async move {
            let run = async {
                if program == Program::SafeLoad {
                    return safe_load(host.as_ref(), &cluster, &stop, &options?).await;
                }
                let agent = Agent { host: host.as_ref(), cluster, stop, settings: settings? };
                match program {
                    Program::Finish => finish(&agent, None).await,
                    _ => uninstall(&agent).await,
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
    let mut told = environment(pod, MANAGER_CONTAINER).into_iter();
    told.find(|(name, _)| name == CONFIG_DIGEST_ENV).map(|(_, digest)| digest)
}

fn init_container<'a>(pod: &'a Pod, name: &str) -> Option<&'a Container> {
    pod.spec.as_ref()?.init_containers.as_ref()?.iter().find(|container| container.name == name)
}

fn arguments(pod: &Pod, container: &str) -> Vec<String> {
    init_container(pod, container).and_then(|container| container.args.clone()).unwrap_or_default()
}

/// What an init container is told, with what its kubelet fills in.
fn environment(pod: &Pod, container: &str) -> Vec<(String, String)> {
    let filled_in = |variable: &EnvVar| {
        let field = variable.value_from.as_ref()?.field_ref.as_ref()?;
        match field.field_path.as_str() {
            "spec.nodeName" => pod.spec.as_ref()?.node_name.clone(),
            "metadata.uid" => pod.metadata.uid.clone(),
            _ => None,
        }
    };
    let env = init_container(pod, container).into_iter().flat_map(|container| container.env.iter().flatten());
    env.filter_map(|variable| {
        let value = variable.value.clone().or_else(|| filled_in(variable))?;
        Some((variable.name.clone(), value))
    })
    .collect()
}
