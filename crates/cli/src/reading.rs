//! What a reader makes of a look: the controller's own plan, and each node's place in it.

use anyhow::{anyhow, bail};
use pitcrew_controller::{Leader, Look, preflight::Unfit};
use pitcrew_core::names::NodeName;
use pitcrew_core::plan::{Plan, PoolPlan, plan};
use pitcrew_core::policy::{self, Policy, Pool};
use pitcrew_core::reason::About;
use pitcrew_core::snapshot::{Pod, Snapshot};

/// Names that are less like than this are no slips of the pen.
const LIKENESS_MIN: f64 = 0.75;
/// So many suggestions are read.
const SUGGESTIONS_MAX: usize = 3;

/// A snapshot and what the planner makes of it. Actions in the plan are the controller's to take.
pub(crate) struct Reading<'a> {
    pub(crate) snapshot: &'a Snapshot,
    pub(crate) leader: &'a Leader,
    pub(crate) pools: Vec<Pool>,
    pub(crate) plan: Plan,
}

impl<'a> Reading<'a> {
    /// Plans what is known.
    pub(crate) fn of(snapshot: &'a Snapshot, leader: &'a Leader) -> Self {
        let pools = policy::resolve(&snapshot.sources, snapshot.daemon_sets.values(), &snapshot.namespace);
        Self { snapshot, leader, pools, plan: plan(snapshot) }
    }

    /// The same for a command that needs a pool to speak of.
    pub(crate) fn with_pools(look: &'a Look) -> anyhow::Result<Self> {
        let reading = Self::of(&look.snapshot, &look.leader);
        if reading.pools.is_empty() {
            return Err(if look.installed { anyhow!(NO_POLICY) } else { not_installed() });
        }
        Ok(reading)
    }

    /// Each pool with its plan.
    pub(crate) fn each(&self) -> impl Iterator<Item = (&Pool, &PoolPlan)> {
        self.pools.iter().zip(&self.plan.pools)
    }

    /// A node in each pool that has it.
    pub(crate) fn about<'s>(&'s self, node: &str) -> Vec<About<'s>> {
        let (snapshot, with) = (self.snapshot, |(pool, plan): (&'s Pool, &'s PoolPlan)| {
            plan.nodes.get_key_value(node).map(|(name, verdict)| (pool, plan, name, verdict))
        });
        let found: Vec<_> = self.each().filter_map(with).collect();
        let many_drivers = found.iter().any(|(pool, ..)| pool.driver != found[0].0.driver);
        found
            .into_iter()
            .map(|(pool, plan, node, verdict)| About { snapshot, pool, plan, node, verdict, many_drivers })
            .collect()
    }

    /// The node that a person means by `gpu-17`, `node/gpu-17` or `nodes/gpu-17`.
    pub(crate) fn node(&self, text: &str) -> anyhow::Result<&'a NodeName> {
        let name = text.strip_prefix("node/").or_else(|| text.strip_prefix("nodes/")).unwrap_or(text);
        if name.is_empty() || name.contains('/') {
            bail!("{text:?} is not a node; write node/NAME or NAME");
        }
        let found = self.snapshot.nodes.get_key_value(name).map(|(name, _)| name);
        let names = self.snapshot.nodes.keys().map(NodeName::as_str);
        found.ok_or_else(|| anyhow!("there is no node {name}{}", did_you_mean(name, names)))
    }

    /// Why nothing is known about a node that exists but is in no pool.
    pub(crate) fn stranger(&self, node: &NodeName) -> anyhow::Error {
        let unreadable = self.pools.iter().find_map(|pool| Some((pool, pool.policy.as_ref().err()?)));
        if let Some((pool, problem)) = unreadable {
            return anyhow!("node {node} cannot be judged: {}: {problem}", pool.source);
        }
        let policies: Vec<String> = self.pools.iter().map(|pool| pool.source.to_string()).collect();
        anyhow!(
            "node {node} is in no pool: no DaemonSet of {} is meant for it and no driver pod runs on it, so pitcrew leaves it alone",
            policies.join(", ")
        )
    }
}

/// No policy, no pools.
pub(crate) const NO_POLICY: &str = "no DriverPolicy, ClusterPolicy or NVIDIADriver in this cluster asks for driver upgrades, so there is nothing to look after";

/// Without definitions nobody can state a policy.
pub(crate) fn not_installed() -> anyhow::Error {
    Unfit::NoDefinition("driverpolicies.pitcrew.dev").into()
}

/// The driver pod of a pool on a node; one that is on its way out only if there is no other.
pub(crate) fn driver_pod<'a>(snapshot: &'a Snapshot, policy: &Policy, node: &NodeName) -> Option<&'a Pod> {
    let drivers = snapshot.pods_on(node).filter(|pod| policy.is_driver(&pod.name.namespace, &pod.labels));
    drivers.min_by_key(|pod| pod.deleting.is_some())
}

/// `; did you mean gpu-17?`, or nothing if no name is like it.
pub(crate) fn did_you_mean<'n>(name: &str, names: impl Iterator<Item = &'n str>) -> String {
    let mut like: Vec<(f64, &str)> = names.map(|known| (strsim::jaro_winkler(name, known), known)).collect();
    like.retain(|(likeness, _)| *likeness >= LIKENESS_MIN);
    like.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(b.1)));
    let names: Vec<&str> = like.into_iter().take(SUGGESTIONS_MAX).map(|(_, known)| known).collect();
    match names[..] {
        [] => String::new(),
        [one] => format!("; did you mean {one}?"),
        [.., last] => format!("; did you mean {} or {last}?", names[..names.len() - 1].join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_names_are_offered_and_no_others() {
        let fleet = ["gpu-01", "gpu-02", "gpu-17", "gpu-71", "cpu-a", "login"];
        assert_eq!(did_you_mean("gpu-117", fleet.into_iter()), "; did you mean gpu-17, gpu-71 or gpu-01?");
        assert_eq!(did_you_mean("logni", fleet.into_iter()), "; did you mean login?");
        assert_eq!(did_you_mean("zzz", fleet.into_iter()), "");
    }
}
