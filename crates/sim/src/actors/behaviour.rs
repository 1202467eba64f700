//! How the simulated machines behave: how long things take, which drivers are broken where, what Jobs and gates do.
//!
//! A table of rules that tests and demos can change while the cluster runs. Chance comes from the seed and the
//! name of the node or pod, not from a running generator: what happens on one node does not depend on what
//! happened elsewhere before.

use std::collections::{BTreeMap, BTreeSet};
use std::future::{pending, ready};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use pitcrew_agent::fake::FakeHost;
use pitcrew_controller::prometheus::Asks;
use pitcrew_core::prometheus::Values;
use serde_json::{Value, json};
use tokio::sync::watch;

/// How long things take. Each start takes up to `jitter` longer than said.
#[derive(Clone, Debug, PartialEq)]
pub struct Timing {
    /// From the driver pod's creation until it is Ready; its container starts after a fifth of it.
    pub driver_start: Duration,
    /// From the driver pod's deletion until it is gone.
    pub driver_stop: Duration,
    /// From the driver being Ready until the node's validator is.
    pub validator_start: Duration,
    /// From binding until Ready, for everything else.
    pub workload_start: Duration,
    /// From deletion until gone, for everything else; never longer than the grace period.
    pub workload_stop: Duration,
    /// How long a Job's pod runs if no rule says otherwise.
    pub job_run: Duration,
    /// How long a gate runs.
    pub gate_run: Duration,
    /// How long a crashing driver container lives.
    pub crash_after: Duration,
    /// The largest part by which a start takes longer, 0.0 for clockwork.
    pub jitter: f64,
}

impl Default for Timing {
    /// Quick, for tests on a real control plane too.
    fn default() -> Self {
        Self {
            driver_start: Duration::from_millis(500),
            driver_stop: Duration::from_millis(200),
            validator_start: Duration::from_millis(200),
            workload_start: Duration::from_millis(200),
            workload_stop: Duration::from_millis(200),
            job_run: Duration::from_secs(1),
            gate_run: Duration::from_secs(1),
            crash_after: Duration::from_secs(1),
            jitter: 0.3,
        }
    }
}

impl Timing {
    /// As on real machines: for virtual time.
    pub fn real() -> Self {
        Self {
            driver_start: Duration::from_secs(100),
            driver_stop: Duration::from_secs(12),
            validator_start: Duration::from_secs(25),
            workload_start: Duration::from_secs(20),
            workload_stop: Duration::from_secs(8),
            job_run: Duration::from_mins(1),
            gate_run: Duration::from_secs(40),
            crash_after: Duration::from_secs(10),
            jitter: 0.4,
        }
    }
}

/// What can be wrong with a driver, or with one of its clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The container starts and exits, again and again.
    CrashLoop,
    /// The image cannot be pulled.
    ImageMissing,
    /// The container runs and never becomes Ready.
    Hang,
}

/// Which nodes a rule is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Nodes {
    /// All of them.
    All,
    /// This one.
    Named(String),
    /// Every n-th on average, chosen by the seed.
    OneIn(u32),
}

/// A broken driver: which version, where, how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverFault {
    /// Where.
    pub nodes: Nodes,
    /// The version as in the image tag; `None` is any.
    pub version: Option<String>,
    /// How.
    pub fault: Fault,
}

/// A broken client of the driver: which, where, how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientFault {
    /// The DaemonSet's name.
    pub client: String,
    /// Where.
    pub nodes: Nodes,
    /// How.
    pub fault: Fault,
}

/// What pods of certain Jobs do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobRule {
    /// The beginning of the Job's name.
    pub prefix: String,
    /// Where.
    pub nodes: Nodes,
    /// How long the pod runs.
    pub run: Duration,
    /// 0 is success.
    pub exit_code: i32,
    /// The container's termination message.
    pub message: String,
}

/// What a gate says: which, where, with which driver. Nothing said is a pass with the numbers of a healthy node.
#[derive(Clone, Debug, PartialEq)]
pub struct GateRule {
    /// The gate's name; `None` is any.
    pub gate: Option<String>,
    /// Where.
    pub nodes: Nodes,
    /// The driver version that runs on the node, as in the image tag; `None` is any.
    pub version: Option<String>,
    /// What.
    pub outcome: GateOutcome,
}

/// How a gate ends.
#[derive(Clone, Debug, PartialEq)]
pub enum GateOutcome {
    /// It exits with 0 and reports this.
    Passes {
        /// The JSON object.
        report: Value,
    },
    /// It exits with something else.
    Fails {
        /// With what.
        exit_code: i32,
        /// The end of its log.
        log: String,
    },
    /// It runs until somebody ends it.
    Hangs,
    /// Its image cannot be pulled.
    ImageMissing,
}

impl GateOutcome {
    /// A failure with exit code 1.
    pub fn failure(log: &str) -> Self {
        Self::Fails { exit_code: 1, log: log.to_owned() }
    }

    /// What the presets report of a healthy node, all in one.
    pub fn healthy() -> Self {
        Self::Passes {
            report: json!({
                "gpus": 8, "withEcc": 8, "corrected": 0, "uncorrected": 0, "loss": 0.5, "milliseconds": 1.5,
                "gigabytesPerSecond": 400, "ports": 8, "active": 8, "gbps": 3200, "seconds": 20,
            }),
        }
    }
}

/// The machines under the nodes, in memory.
#[derive(Clone, Debug, Default)]
pub struct Hosts(Arc<Mutex<HostsByNode>>);

/// Each with the boot that it is in.
type HostsByNode = BTreeMap<String, (u32, Arc<FakeHost>)>;

impl PartialEq for Hosts {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Hosts {
    /// The machine under a node, once its kubelet has looked at it.
    pub fn get(&self, node: &str) -> Option<Arc<FakeHost>> {
        self.all().get(node).map(|(_, host)| host.clone())
    }

    /// The machine under a node in one of its boots; `booted` makes a new one.
    pub(super) fn in_boot(&self, node: &str, boot: u32, booted: impl FnOnce() -> FakeHost) -> Arc<FakeHost> {
        let mut all = self.all();
        if let Some((_, host)) = all.get(node).filter(|(known, _)| *known == boot) {
            return host.clone();
        }
        let host = Arc::new(booted());
        all.insert(node.to_owned(), (boot, host.clone()));
        host
    }

    pub(super) fn forget(&self, node: &str) {
        self.all().remove(node);
    }

    fn all(&self) -> MutexGuard<'_, HostsByNode> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The machines, and what is special about them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Machines {
    /// What is on them.
    pub hosts: Hosts,
    /// Programs of the machines themselves that have the driver open, by node.
    pub programs: BTreeMap<String, String>,
    /// Modules of others that are loaded with every driver and use it.
    pub modules: Vec<String>,
    /// No `finish` runs beside the driver, as where an operator renders its DaemonSet.
    pub without_finish: bool,
}

/// Everything the simulated kubelets are told. The first rule that fits wins.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Behaviour {
    /// How long things take.
    pub timing: Timing,
    /// Broken drivers.
    pub drivers: Vec<DriverFault>,
    /// Jobs that do not simply succeed.
    pub jobs: Vec<JobRule>,
    /// Gates that do not simply pass.
    pub gates: Vec<GateRule>,
    /// Nodes whose kubelet is dead: `NotReady`, and nothing happens on them.
    pub down: BTreeSet<String>,
    /// How often nodes have booted since the beginning; a node that boots starts all its pods again.
    pub boots: BTreeMap<String, u32>,
    /// Nodes whose validator never gets Ready, whatever the driver does.
    pub unproven: BTreeSet<String>,
    /// Broken clients of the driver.
    pub clients: Vec<ClientFault>,
    /// How often nodes' driver containers were made to end and start again where they are.
    pub driver_restarts: BTreeMap<String, u32>,
    /// Whether a new driver pod's driver-manager removes the operator's operands from the node, as the real one does.
    pub driver_manager: bool,
    /// Driver pods run pitcrew's own driver manager, on machines like these. `None`: a sketch of NVIDIA's, or nothing.
    pub agents: Option<Machines>,
    /// A node's devices are published in two `ResourceSlice`s, the second so much later. `None`: in one.
    pub second_slice_after: Option<Duration>,
    /// What a Prometheus answers, whatever it is asked; `None`: nothing.
    pub prometheus: Option<f64>,
}

impl Behaviour {
    /// Adds a fault of one driver version, on one node or on all.
    #[must_use]
    pub fn with_fault(mut self, nodes: Nodes, version: &str, fault: Fault) -> Self {
        self.drivers.push(DriverFault { nodes, version: Some(version.to_owned()), fault });
        self
    }

    /// Other timings.
    #[must_use]
    pub fn with_timing(mut self, timing: Timing) -> Self {
        self.timing = timing;
        self
    }

    pub(super) fn fault(&self, seed: u64, node: &str, version: &str) -> Option<Fault> {
        let fits = |rule: &&DriverFault| {
            rule.version.as_deref().is_none_or(|wanted| wanted == version) && rule.nodes.include(seed, node)
        };
        self.drivers.iter().find(fits).map(|rule| rule.fault)
    }

    /// Adds a fault of one client of the driver, named by its DaemonSet.
    #[must_use]
    pub fn with_client_fault(mut self, client: &str, nodes: Nodes, fault: Fault) -> Self {
        self.clients.push(ClientFault { client: client.to_owned(), nodes, fault });
        self
    }

    /// Adds what one gate says, with whatever driver.
    #[must_use]
    pub fn with_gate(self, gate: &str, nodes: Nodes, outcome: GateOutcome) -> Self {
        self.with_gate_rule(GateRule { gate: Some(gate.to_owned()), nodes, version: None, outcome })
    }

    /// Adds what gates say. The first rule that fits wins.
    #[must_use]
    pub fn with_gate_rule(mut self, rule: GateRule) -> Self {
        self.gates.push(rule);
        self
    }

    /// New driver pods remove the operator's operands of their node first.
    #[must_use]
    pub fn with_driver_manager(mut self) -> Self {
        self.driver_manager = true;
        self
    }

    /// Driver pods run pitcrew's own driver manager.
    #[must_use]
    pub fn with_agents(mut self, machines: Machines) -> Self {
        self.agents = Some(machines);
        self
    }

    pub(super) fn client_fault(&self, seed: u64, node: &str, client: &str) -> Option<Fault> {
        let fits = |rule: &&ClientFault| rule.client == client && rule.nodes.include(seed, node);
        self.clients.iter().find(fits).map(|rule| rule.fault)
    }

    pub(super) fn job(&self, seed: u64, node: &str, name: &str) -> Option<&JobRule> {
        self.jobs.iter().find(|rule| name.starts_with(&rule.prefix) && rule.nodes.include(seed, node))
    }

    pub(super) fn gate(&self, seed: u64, node: &str, gate: &str, version: Option<&str>) -> GateOutcome {
        let fits = |rule: &&GateRule| {
            rule.gate.as_deref().is_none_or(|wanted| wanted == gate)
                && rule.version.as_deref().is_none_or(|wanted| Some(wanted) == version)
                && rule.nodes.include(seed, node)
        };
        self.gates.iter().find(fits).map_or_else(GateOutcome::healthy, |rule| rule.outcome.clone())
    }

    /// `base`, longer by a chance that belongs to `name`.
    pub(super) fn jittered(&self, base: Duration, seed: u64, name: &str) -> Duration {
        let chance = fastrand::Rng::with_seed(mixed(seed, name)).f64();
        base.mul_f64(1.0 + self.timing.jitter.max(0.0) * chance)
    }
}

impl Nodes {
    fn include(&self, seed: u64, node: &str) -> bool {
        match self {
            Self::All => true,
            Self::Named(name) => name == node,
            Self::OneIn(n) => fastrand::Rng::with_seed(mixed(seed, node)).u32(0..(*n).max(1)) == 0,
        }
    }
}

/// A seed for one name.
fn mixed(seed: u64, name: &str) -> u64 {
    name.bytes().fold(seed ^ 0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Changes the behaviour of a running cluster.
#[derive(Clone, Debug)]
pub struct BehaviourHandle {
    current: Arc<watch::Sender<Behaviour>>,
}

impl BehaviourHandle {
    /// Of a cluster of its own: nobody else's machines are under its nodes.
    pub(super) fn new(mut behaviour: Behaviour) -> Self {
        if let Some(machines) = &mut behaviour.agents {
            machines.hosts = Hosts::default();
        }
        Self { current: Arc::new(watch::Sender::new(behaviour)) }
    }

    /// Changes it; the kubelets look at all their pods again.
    pub fn change(&self, change: impl FnOnce(&mut Behaviour)) {
        self.current.send_modify(change);
    }

    /// A node's driver container ends and starts again where it is: same pod, no init containers.
    pub fn restart_driver(&self, node: &str) {
        self.change(|behaviour| *behaviour.driver_restarts.entry(node.to_owned()).or_default() += 1);
    }

    /// As it is now.
    pub fn get(&self) -> Behaviour {
        self.current.borrow().clone()
    }

    /// The Prometheus of this cluster, for a controller to ask.
    pub fn prometheus(&self) -> Asks {
        let handle = self.clone();
        Arc::new(move |_| match handle.current.borrow().prometheus {
            Some(value) => ready(Ok(Values::one(value))).boxed(),
            None => pending().boxed(),
        })
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<Behaviour> {
        self.current.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_in_six_is_about_one_in_six_and_always_the_same_ones() {
        let rule = Nodes::OneIn(6);
        let hit = |seed| (0..600).filter(|n| rule.include(seed, &format!("gpu-{n:03}"))).collect::<Vec<_>>();
        assert_eq!(hit(7), hit(7));
        assert_ne!(hit(7), hit(8));
        assert!((70..130).contains(&hit(7).len()), "{}", hit(7).len());
    }

    #[test]
    fn a_fault_is_of_a_version_and_a_node() {
        let behaviour = Behaviour::default().with_fault(Nodes::Named("gpu-02".into()), "550.1", Fault::Hang);
        assert_eq!(behaviour.fault(1, "gpu-02", "550.1"), Some(Fault::Hang));
        assert_eq!(behaviour.fault(1, "gpu-02", "535.1"), None);
        assert_eq!(behaviour.fault(1, "gpu-01", "550.1"), None);
    }

    #[test]
    fn a_gate_says_what_the_first_rule_that_fits_says() {
        let rule = |version: Option<&str>, outcome| GateRule {
            gate: Some("smoke".into()),
            nodes: Nodes::Named("gpu-02".into()),
            version: version.map(str::to_owned),
            outcome,
        };
        let behaviour = Behaviour::default()
            .with_gate_rule(rule(Some("550.1"), GateOutcome::Hangs))
            .with_gate_rule(rule(None, GateOutcome::ImageMissing));
        let says = |node: &str, gate: &str, version| behaviour.gate(1, node, gate, version);
        assert_eq!(says("gpu-02", "smoke", Some("550.1")), GateOutcome::Hangs);
        assert_eq!(says("gpu-02", "smoke", Some("535.1")), GateOutcome::ImageMissing);
        assert_eq!(says("gpu-02", "smoke", None), GateOutcome::ImageMissing);
        assert_eq!(says("gpu-01", "smoke", Some("550.1")), GateOutcome::healthy());
        assert_eq!(says("gpu-02", "other", Some("550.1")), GateOutcome::healthy());
    }
}
