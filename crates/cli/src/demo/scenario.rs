//! What a demo is about: who goes first, and what goes wrong.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::Context as _;
use clap::ValueEnum;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::Client;
use kube::api::{Api, Patch, PatchParams, PostParams};
use pitcrew_core::api::DriverPolicy;
use pitcrew_core::contract::CANARY_LABEL;
use pitcrew_sim::actors::{Behaviour, GateOutcome, GateRule, Nodes};
use pitcrew_sim::cluster::Cluster;
use pitcrew_sim::fleet::{Fleet, Workload};
use serde_json::{Value, json};

use super::run::{FROM, TO};

/// The node that goes first.
pub(super) const CANARY: &str = "gpu-01";
/// As long as the documented label makes a canary bake.
const BAKE: Duration = Duration::from_hours(48);
/// Somebody opens the budget after so long.
const CLOSED_FOR: Duration = Duration::from_mins(20);
/// Work whose budget lets nobody go.
const CLOSED: (&str, &str) = ("payments", "fraud-scores");
/// What proves a canary.
const GATE: &str = "smoke-training";

/// What a demo is about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Scenario {
    /// Every node is upgraded, a few at a time
    #[default]
    Upgrade,
    /// One node goes first and is watched at work for two days, then the others follow
    Canary,
    /// The new driver's canary fails its gate: it is taken back, and nobody else is touched
    BadDriver,
    /// A budget lets nobody go: its nodes are left alone until somebody opens it
    Pdb,
}

impl Scenario {
    /// The fleet with what this is about.
    pub(super) fn stage(self, fleet: Fleet) -> Fleet {
        match self {
            Scenario::Upgrade => fleet,
            Scenario::Pdb => {
                let (namespace, name) = CLOSED;
                let closed = Workload::new(namespace, name, 2, 1).with_budget(json!({"maxUnavailable": 0}));
                let workloads = fleet.workloads.iter().cloned().chain([closed]).collect();
                fleet.with_workloads(workloads)
            }
            Scenario::Canary | Scenario::BadDriver => {
                let canary = fleet.node_names().next().unwrap_or_else(|| CANARY.to_owned());
                fleet.with_label(&canary, CANARY_LABEL, "true")
            }
        }
    }

    /// How machines and drivers behave.
    pub(super) fn behaviour(self, behaviour: Behaviour) -> Behaviour {
        match self {
            Scenario::Upgrade | Scenario::Canary | Scenario::Pdb => behaviour,
            // Whoever tries it first, it does not compute.
            Scenario::BadDriver => behaviour.with_gate_rule(GateRule {
                gate: Some(GATE.to_owned()),
                nodes: Nodes::All,
                version: Some(TO.to_owned()),
                outcome: GateOutcome::failure("step 3: loss is nan"),
            }),
        }
    }

    /// What the cluster has beside its ClusterPolicy.
    fn policy(self) -> Option<Value> {
        (self == Scenario::BadDriver).then(|| {
            json!({
                "driver": {"name": "gpu", "validator": {"selector": "app=nvidia-operator-validator"}},
                "rollout": {"gates": [{"name": GATE, "preset": GATE}]},
            })
        })
    }

    /// Sets up what the fleet alone does not have.
    pub(super) async fn set_up(self, cluster: &Cluster) -> anyhow::Result<()> {
        let Some(spec) = self.policy() else { return Ok(()) };
        let policy = DriverPolicy::new("gpu", serde_json::from_value(spec)?);
        let policies = Api::<DriverPolicy>::all(cluster.admin.clone());
        policies.create(&PostParams::default(), &policy).await.context("cannot make the policy")?;
        Ok(())
    }

    /// What people do meanwhile, and say of it.
    pub(super) async fn meanwhile(self, client: Client, say: impl FnOnce(Duration, String)) {
        if self != Scenario::Pdb {
            return;
        }
        tokio::time::sleep(CLOSED_FOR).await;
        let (namespace, name) = CLOSED;
        let budgets = Api::<PodDisruptionBudget>::namespaced(client, namespace);
        let open = Patch::Merge(json!({"spec": {"maxUnavailable": 1}}));
        // Without it the demo says that it came to no end.
        if budgets.patch(name, &PatchParams::default(), &open).await.is_ok() {
            say(CLOSED_FOR, format!("somebody lets the budget {namespace}/{name} allow one pod to leave"));
        }
    }

    /// The version that every node runs at the end.
    pub(super) fn ends_on(self) -> &'static str {
        if self == Scenario::BadDriver { FROM } else { TO }
    }

    /// How long it is expected to take, of which so long nothing moves.
    pub(super) fn takes(self, upgrade: Duration, visit: Duration) -> (Duration, Duration) {
        match self {
            Scenario::Upgrade => (upgrade, Duration::ZERO),
            Scenario::Canary => (upgrade + visit, BAKE),
            Scenario::BadDriver => (2 * visit, Duration::ZERO),
            Scenario::Pdb => (upgrade + CLOSED_FOR, Duration::ZERO),
        }
    }
}

/// All of them, each with a sentence.
pub(super) fn list() -> String {
    let mut text = String::new();
    for scenario in Scenario::value_variants() {
        let Some(value) = scenario.to_possible_value() else { continue };
        let about = value.get_help().map(ToString::to_string).unwrap_or_default();
        let _ = writeln!(text, "{:<12}  {about}", value.get_name());
    }
    text.push_str("\nRun one with: pitcrew demo --scenario canary\n");
    text
}
