//! What a demo is about: who goes first, and what goes wrong.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::Context as _;
use clap::ValueEnum;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::Client;
use kube::ResourceExt as _;
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use pitcrew_controller::Clock;
use pitcrew_core::api::{DriverPolicy, Rollout, Word};
use pitcrew_core::contract::CANARY_LABEL;
use pitcrew_sim::actors::{Behaviour, BehaviourHandle, GateOutcome, GateRule, Nodes};
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
/// In the second day of its bake a driver restarts by itself.
const SOUND_FOR: Duration = Duration::from_hours(30);
/// Somebody takes the version back when about half of the usual fleet has it, or is about to.
const WANTED_FOR: Duration = Duration::from_mins(7);

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
    /// The new driver passes its gates and breaks in the second day of its bake: it is taken back, as before
    BadBake,
    /// Somebody takes the version back when half of the fleet has it: those return, the others stay as they are
    TakeBack,
    /// A budget lets nobody go: its nodes are left alone until somebody opens it
    Pdb,
}

impl Scenario {
    /// The fleet with what this is about.
    pub(super) fn stage(self, fleet: Fleet) -> Fleet {
        match self {
            Scenario::Upgrade | Scenario::TakeBack => fleet,
            Scenario::Pdb => {
                let (namespace, name) = CLOSED;
                let closed = Workload::new(namespace, name, 2, 1).with_budget(json!({"maxUnavailable": 0}));
                let workloads = fleet.workloads.iter().cloned().chain([closed]).collect();
                fleet.with_workloads(workloads)
            }
            Scenario::Canary | Scenario::BadDriver | Scenario::BadBake => {
                let canary = canary(&fleet);
                fleet.with_label(&canary, CANARY_LABEL, "true")
            }
        }
    }

    /// How machines and drivers behave.
    pub(super) fn behaviour(self, behaviour: Behaviour) -> Behaviour {
        match self {
            Scenario::Upgrade | Scenario::Canary | Scenario::BadBake | Scenario::TakeBack | Scenario::Pdb => {
                behaviour
            }
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

    /// When something happens that nobody planned for, if it does.
    fn turns_after(self) -> Option<Duration> {
        match self {
            Scenario::Upgrade | Scenario::Canary | Scenario::BadDriver => None,
            Scenario::BadBake => Some(SOUND_FOR),
            Scenario::TakeBack => Some(WANTED_FOR),
            Scenario::Pdb => Some(CLOSED_FOR),
        }
    }

    /// What people and machines do meanwhile, and what is said of it. Where that fails, the demo says that it came to no end.
    pub(super) async fn meanwhile(self, cluster: Inside, say: impl FnOnce(Duration, String)) {
        let Some(after) = self.turns_after() else { return };
        tokio::time::sleep(after).await;
        let what = match self {
            Scenario::BadBake => Some(cluster.restart_driver()),
            Scenario::TakeBack => cluster.take_back().await,
            _ => cluster.open_budget().await,
        };
        if let Some(what) = what {
            say(after, what);
        }
    }

    /// The version that every node runs at the end.
    pub(super) fn ends_on(self) -> &'static str {
        match self {
            Scenario::BadDriver | Scenario::BadBake | Scenario::TakeBack => FROM,
            Scenario::Upgrade | Scenario::Canary | Scenario::Pdb => TO,
        }
    }

    /// How long it is expected to take, of which so long nothing moves.
    pub(super) fn takes(self, upgrade: Duration, visit: Duration) -> (Duration, Duration) {
        match self {
            Scenario::Upgrade => (upgrade, Duration::ZERO),
            Scenario::Canary => (upgrade + visit, BAKE),
            Scenario::BadDriver => (2 * visit, Duration::ZERO),
            Scenario::BadBake => (2 * visit, SOUND_FOR),
            Scenario::TakeBack => (2 * WANTED_FOR, Duration::ZERO),
            Scenario::Pdb => (upgrade + CLOSED_FOR, Duration::ZERO),
        }
    }
}

/// Who goes first in a fleet.
fn canary(fleet: &Fleet) -> String {
    fleet.node_names().next().unwrap_or_else(|| CANARY.to_owned())
}

/// What something can be done to while the demo is played.
pub(super) struct Inside {
    client: Client,
    clock: Clock,
    machines: BehaviourHandle,
    canary: String,
}

impl Inside {
    pub(super) fn of(cluster: &Cluster, fleet: &Fleet) -> Self {
        Self {
            client: cluster.admin.clone(),
            clock: cluster.clock.clone(),
            machines: cluster.actors.behaviour(),
            canary: canary(fleet),
        }
    }

    fn restart_driver(self) -> String {
        self.machines.restart_driver(&self.canary);
        format!("the driver on {} ends and starts again by itself", self.canary)
    }

    /// As `pitcrew rollback` does.
    async fn take_back(self) -> Option<String> {
        let rollouts = Api::<Rollout>::all(self.client);
        let newest = rollouts.list(&ListParams::default()).await.ok()?.items.pop()?;
        let at = Time(self.clock.now());
        let word = Word { by: "mei".to_owned(), at, why: Some("jobs are slow".to_owned()) };
        let patch = Patch::Merge(json!({"spec": {"rollback": word}}));
        rollouts.patch(&newest.name_any(), &PatchParams::default(), &patch).await.ok()?;
        Some("mei takes the version back: jobs are slow".to_owned())
    }

    async fn open_budget(self) -> Option<String> {
        let (namespace, name) = CLOSED;
        let budgets = Api::<PodDisruptionBudget>::namespaced(self.client, namespace);
        let open = Patch::Merge(json!({"spec": {"maxUnavailable": 1}}));
        budgets.patch(name, &PatchParams::default(), &open).await.ok()?;
        Some(format!("somebody lets the budget {namespace}/{name} allow one pod to leave"))
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
