//! Fleets as proptest draws them: nodes in any state with whatever does or does not belong to it, policies of every source,
//! pauses, health systems, writes under way.

mod deed;
mod node;
mod pod;

use jiff::Timestamp;
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Value, json};

use super::fixture::*;
use crate::contract::MATRIX_KEY;
use crate::matrix::Files;
use crate::names::PoolName;
use crate::policy::{ClusterPolicyFacts, Source};
use crate::snapshot::NvSentinel;

pub(super) use deed::deeds;
pub(super) use node::NodeSketch;

/// The halves of a fleet that has two pools of one driver, and the names of the pools.
pub(super) const HALVES: [&str; 2] = ["a100", "h100"];

/// A fleet as proptest draws it.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is drawn by itself")]
pub(super) struct Sketch {
    pub(super) nodes: Vec<NodeSketch>,
    pub(super) rule: Rule,
    pub(super) parallel: u32,
    pub(super) unavailable: Unavailable,
    paused: bool,
    drain: Option<bool>,
    timeout_delete: bool,
    wait_for_jobs: bool,
    budget: Option<i32>,
    new_version: bool,
    /// NVSentinel is there; its breaker has tripped.
    breaker: Option<bool>,
    refresh: &'static str,
    on_blocked: &'static str,
    /// A GPU Operator is live, so everything stands still.
    operator: bool,
    aborted: bool,
    hung_clients: bool,
    pub(super) topology: TopologySketch,
    windows: WindowSketch,
    matrix: MatrixSketch,
}

/// What the version matrix says of the version that is wanted.
#[derive(Clone, Copy, Debug, PartialEq)]
enum MatrixSketch {
    /// Nobody asks.
    Off,
    Listed,
    Unlisted,
    Unreadable,
    Missing,
}

impl MatrixSketch {
    fn files(self) -> Option<Files> {
        let text = match self {
            MatrixSketch::Off | MatrixSketch::Missing => return None,
            MatrixSketch::Listed => "versions: {current: {driver: '565.57.01'}}",
            MatrixSketch::Unlisted => "versions: {current: {driver: '560.35.03'}}",
            MatrixSketch::Unreadable => "versions:",
        };
        Some(Files::read([(MATRIX_KEY, text)].into_iter()))
    }
}

/// Which nodes go together, and which do not. Only a DriverPolicy says that.
#[derive(Clone, Copy, Debug)]
pub(super) struct TopologySketch {
    /// Nodes with one value of label `rack` start together.
    pub(super) atoms: bool,
    /// At most so many nodes with one value of label `half` are out.
    pub(super) spread: Option<u32>,
    gangs: bool,
}

/// When nodes may start. Each comes to an end, so that a fleet comes to rest.
#[derive(Clone, Copy, Debug, PartialEq)]
enum WindowSketch {
    Always,
    /// Until four in the afternoon of the first day.
    Today,
    /// Two hours of the second day.
    Tomorrow,
    Never,
}

impl WindowSketch {
    fn json(self) -> Value {
        let (start, duration, first, from) = match self {
            WindowSketch::Always => return json!({}),
            WindowSketch::Today => ("10:00", "6h", "2025-01-01", "2026-01-02"),
            WindowSketch::Tomorrow => ("14:00", "2h", "2026-01-01", "2026-01-03"),
            WindowSketch::Never => ("10:00", "6h", "2025-01-01", "2026-01-01"),
        };
        json!({
            "windows": [{"start": start, "duration": duration}],
            "blackouts": [{"from": first}, {"from": from, "until": "9999-12-31"}],
        })
    }
}

/// Who states the policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Rule {
    ClusterPolicy,
    /// And a NicClusterPolicy for the other driver.
    BothOperators,
    /// One for each half.
    NvidiaDrivers,
    /// One for each of two drivers.
    TwoDrivers,
    /// One for each half.
    TwoPools,
    /// Two that both want all nodes.
    Rivals,
}

/// `maxUnavailable`.
#[derive(Clone, Copy, Debug)]
pub(super) enum Unavailable {
    Nodes(u32),
    Percent(u32),
}

impl Unavailable {
    pub(super) fn json(self) -> Value {
        match self {
            Unavailable::Nodes(nodes) => json!(nodes),
            Unavailable::Percent(percent) => json!(format!("{percent}%")),
        }
    }

    /// In nodes, counted by hand: every node that begins a hundredth counts.
    pub(super) fn of(self, total: usize) -> usize {
        match self {
            Unavailable::Nodes(nodes) => nodes as usize,
            Unavailable::Percent(percent) => {
                (0..total).filter(|node| node * 100 < total * percent as usize).count()
            }
        }
    }
}

pub(super) fn amounts() -> impl Strategy<Value = Unavailable> {
    prop_oneof![(0..6_u32).prop_map(Unavailable::Nodes), (0..=100_u32).prop_map(Unavailable::Percent),]
}

pub(super) fn sketches() -> impl Strategy<Value = Sketch> {
    let fleet = prop::collection::vec(node::nodes(), 1..8);
    let rarely = || prop::bool::weighted(0.08);
    let limits = (0..4_u32, amounts(), rarely());
    let ways = (prop::option::of(any::<bool>()), any::<bool>(), any::<bool>(), prop::option::of(0..3_i32));
    let rule = prop_oneof![
        3 => Just(Rule::ClusterPolicy),
        1 => Just(Rule::BothOperators),
        2 => Just(Rule::NvidiaDrivers),
        3 => Just(Rule::TwoDrivers),
        2 => Just(Rule::TwoPools),
        1 => Just(Rule::Rivals),
    ];
    let ours = (select(vec!["Visit", "Always", "Off"]), select(vec!["Wait", "Release", "Fail"]));
    let world = (prop::option::weighted(0.4, rarely()), rarely(), rarely(), rarely(), ours);
    let topology = (any::<bool>(), prop::option::weighted(0.3, 1..4_u32), any::<bool>());
    let topology = topology.prop_map(|(atoms, spread, gangs)| TopologySketch { atoms, spread, gangs });
    let windows = prop_oneof![
        5 => Just(WindowSketch::Always),
        2 => Just(WindowSketch::Today),
        2 => Just(WindowSketch::Tomorrow),
        1 => Just(WindowSketch::Never),
    ];
    let matrix = prop_oneof![
        12 => Just(MatrixSketch::Off),
        2 => Just(MatrixSketch::Listed),
        2 => Just(MatrixSketch::Unlisted),
        1 => Just(MatrixSketch::Unreadable),
        1 => Just(MatrixSketch::Missing),
    ];
    let world = (world, topology, windows, matrix);
    (fleet, limits, ways, rule, any::<bool>(), world).prop_map(
        |(nodes, limits, ways, rule, new_version, world)| {
            let (parallel, unavailable, paused) = limits;
            let (drain, timeout_delete, wait_for_jobs, budget) = ways;
            let (world, topology, windows, matrix) = world;
            let (breaker, operator, aborted, hung_clients, (refresh, on_blocked)) = world;
            Sketch {
                nodes,
                rule,
                parallel,
                unavailable,
                paused,
                drain,
                timeout_delete,
                wait_for_jobs,
                budget,
                new_version,
                breaker,
                refresh,
                on_blocked,
                operator,
                aborted,
                hung_clients,
                topology,
                windows,
                matrix,
            }
        },
    )
}

impl Sketch {
    /// Its policies are ours: they may say more than how many.
    pub(super) fn says_more(&self) -> bool {
        matches!(self.rule, Rule::TwoDrivers | Rule::TwoPools | Rule::Rivals)
    }

    /// Whether a window is open.
    pub(super) fn opens_at(&self, now: Timestamp) -> bool {
        let at = |text: &str| text.parse::<Timestamp>().unwrap();
        let between = |from: &str, until: &str| at(from) <= now && now < at(until);
        match self.windows {
            WindowSketch::Always => true,
            WindowSketch::Today => between("2026-01-01T10:00:00Z", "2026-01-01T16:00:00Z"),
            WindowSketch::Tomorrow => between("2026-01-02T14:00:00Z", "2026-01-02T16:00:00Z"),
            WindowSketch::Never => false,
        }
    }

    fn options(&self) -> Value {
        let mut options = json!({
            "autoUpgrade": !self.paused,
            "maxParallelUpgrades": self.parallel,
            "maxUnavailable": self.unavailable.json(),
            "gpuPodDeletion": {"timeoutAction": if self.timeout_delete { "Delete" } else { "Fail" }},
        });
        if let Some(force) = self.drain {
            options["drain"] = json!({"enable": true, "force": force, "deleteEmptyDir": force});
        }
        if self.wait_for_jobs {
            options["waitForCompletion"] = json!({"podSelector": "app=web", "timeoutSeconds": 30});
        }
        options
    }

    /// A DriverPolicy, with what only those can say.
    fn driver_policy(&self, driver: &Value, nodes: &Value) -> Value {
        let mut rollout = self.windows.json();
        let TopologySketch { atoms, spread, gangs } = self.topology;
        rollout["topology"] = json!({"gang": {"enabled": gangs}});
        if atoms {
            rollout["topology"]["atom"] = json!("rack");
        }
        if let Some(max) = spread {
            rollout["topology"]["spread"] = json!({"label": "half", "max": max});
        }
        if self.matrix != MatrixSketch::Off {
            rollout["matrix"] = json!({"enforce": true});
        }
        json!({
            "driver": driver,
            "rollout": rollout,
            "nodeSelector": nodes,
            "upgradePolicy": self.options(),
            "clients": {"refresh": self.refresh},
            "limits": {"onBlocked": self.on_blocked, "blockedAfter": "1m"},
        })
    }

    /// The names of the pools; in each, the nodes that the policy selects.
    pub(super) fn pools(&self) -> Vec<(PoolName, Vec<usize>)> {
        let all = || (0..self.nodes.len()).collect::<Vec<_>>();
        let half = |half: &str| all().into_iter().filter(|i| self.nodes[*i].half() == half).collect();
        let pools: Vec<(&str, Vec<usize>)> = match self.rule {
            Rule::ClusterPolicy => vec![(POOL, all())],
            Rule::BothOperators => vec![(POOL, all()), ("nic", all())],
            Rule::TwoDrivers => vec![("gpu", all()), ("ofed", all())],
            Rule::Rivals => vec![(HALVES[0], all()), (HALVES[1], all())],
            Rule::NvidiaDrivers | Rule::TwoPools => HALVES.map(|name| (name, half(name))).into(),
        };
        pools.into_iter().map(|(name, nodes)| (name.into(), nodes)).collect()
    }

    fn policies(&self) -> Fleet {
        let gpu = || json!({"name": "gpu", "validator": {"selector": "app=nvidia-operator-validator"}});
        let ofed = || json!({"name": "ofed", "daemonSets": {"selector": "app=mofed"}});
        let plain = Fleet::without_policy;
        match self.rule {
            Rule::ClusterPolicy => Fleet::new().policy(self.options()),
            Rule::BothOperators => {
                let mut fleet = Fleet::new().policy(self.options()).daemon_set("ofed", "mofed");
                fleet.label_daemon_sets("ofed", "nvidia.com/ofed-driver");
                let spec = json!({"upgradePolicy": self.options()});
                fleet.snapshot.sources.nic_cluster_policies.insert("nic".to_owned(), spec);
                fleet
            }
            Rule::NvidiaDrivers => {
                let mut fleet = plain();
                let facts = json!({"useNvidiaDriverCRD": true});
                let facts = ClusterPolicyFacts { driver: facts, ..ClusterPolicyFacts::default() };
                fleet.snapshot.sources.cluster_policies.insert(POOL.to_owned(), facts);
                for name in HALVES {
                    fleet.snapshot.sources.nvidia_drivers.insert(name.to_owned(), self.options());
                }
                // One DaemonSet for each half.
                fleet = fleet.daemon_set("gpu-h100", "nvidia-driver-h100");
                for (driver, half) in ["gpu", "gpu-h100"].into_iter().zip(HALVES) {
                    let set = fleet.label_daemon_sets(driver, "app.kubernetes.io/component");
                    set.labels.insert("app.kubernetes.io/component".to_owned(), "nvidia-driver".to_owned());
                    set.node_selector.insert("half".to_owned(), half.to_owned());
                    set.rendered_by = Some(Source::NvidiaDriver(half.to_owned()));
                }
                fleet
            }
            Rule::TwoDrivers => plain()
                .daemon_set("ofed", "mofed")
                .driver_policy("gpu", self.driver_policy(&gpu(), &json!({})))
                .driver_policy("ofed", self.driver_policy(&ofed(), &json!({}))),
            Rule::TwoPools | Rule::Rivals => HALVES.into_iter().fold(plain(), |fleet, half| {
                let nodes = if self.rule == Rule::TwoPools { json!({"half": half}) } else { json!({}) };
                fleet.driver_policy(half, self.driver_policy(&gpu(), &nodes))
            }),
        }
    }

    /// The fleet; `quiet` without writes under way or refused.
    pub(super) fn fleet(&self, quiet: bool) -> Fleet {
        self.fleet_in_order(quiet, &(0..self.nodes.len()).collect::<Vec<_>>())
    }

    /// The same, its nodes seen in this order.
    pub(super) fn fleet_in_order(&self, quiet: bool, order: &[usize]) -> Fleet {
        let mut fleet = self.policies();
        if self.new_version {
            fleet.publish("gpu", 3, "newer");
        }
        if let Some(allowed) = self.budget {
            fleet = fleet.budget("web", allowed);
        }
        fleet.snapshot.matrices = self.matrix.files();
        fleet.snapshot.nvsentinel = self.breaker.map(|tripped| NvSentinel { tripped });
        if self.operator {
            fleet.snapshot.gpu_operator.deployments.insert("deployment/gpu-operator/gpu-operator".to_owned());
        }
        if self.hung_clients {
            fleet.hung_clients.insert("nvidia-dcgm".to_owned());
        }
        for i in order {
            let (name, sketch) = (format!("gpu-{i}"), &self.nodes[*i]);
            fleet = fleet.with(sketch.spec(&name));
            sketch.finish(&mut fleet, &name, quiet);
        }
        if self.aborted {
            fleet.abort_rollouts();
        }
        // Versions differ with the order of arrival; what is planned must not.
        for node in fleet.snapshot.nodes.values_mut() {
            node.version = 1000.into();
        }
        for setback in fleet.snapshot.setbacks.values_mut() {
            setback.seen = 1000.into();
        }
        fleet
    }
}
