//! One node in one pool: what an answer about its reason may look at.

use std::fmt;

use kube::core::SelectorExt as _;

use crate::names::{NodeName, ObjectName};
use crate::plan::{PoolPlan, Verdict};
use crate::policy::{Policy, Pool, Source};
use crate::reason::Reason;
use crate::snapshot::{Budget, Pod, Snapshot};

/// One node in one pool, with the plan that its reason comes from.
#[derive(Clone, Copy)]
pub struct About<'a> {
    /// The facts.
    pub snapshot: &'a Snapshot,
    /// The pool and its policy.
    pub pool: &'a Pool,
    /// What was planned for the pool.
    pub plan: &'a PoolPlan,
    /// The node.
    pub node: &'a NodeName,
    /// Where it is and why.
    pub verdict: &'a Verdict,
    /// Other drivers are looked after on this node too, so commands have to name the one that is meant.
    pub many_drivers: bool,
}

/// An object of the cluster, printed as `Kind namespace/name`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Thing {
    /// Its kind, as the API spells it.
    pub kind: &'static str,
    /// Its namespace; `None` for objects that have none.
    pub namespace: Option<String>,
    /// Its name.
    pub name: String,
}

impl Thing {
    /// An object in a namespace.
    pub fn namespaced(kind: &'static str, name: &ObjectName) -> Self {
        Self { kind, namespace: Some(name.namespace.to_string()), name: name.name.to_string() }
    }

    /// A pod.
    pub fn pod(name: &ObjectName) -> Self {
        Self::namespaced("Pod", name)
    }

    /// A node.
    pub fn node(name: &NodeName) -> Self {
        Self { kind: "Node", namespace: None, name: name.to_string() }
    }

    /// Reads `kind/name` and `kind/namespace/name`, as sentences spell objects.
    pub(super) fn read(text: &str) -> Option<Self> {
        const KINDS: [&str; 6] =
            ["DriverPolicy", "ClusterPolicy", "NVIDIADriver", "DaemonSet", "Deployment", "Lease"];
        let (kind, rest) = text.split_once('/')?;
        let kind = KINDS.into_iter().find(|known| known.to_lowercase() == kind)?;
        let (namespace, name) = match rest.split_once('/') {
            Some((namespace, name)) => (Some(namespace.to_owned()), name),
            None => (None, rest),
        };
        Some(Self { kind, namespace, name: name.to_owned() })
    }
}

impl From<&Source> for Thing {
    fn from(source: &Source) -> Self {
        Self { kind: source.kind().0, namespace: None, name: source.name().to_owned() }
    }
}

impl fmt::Display for Thing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.namespace {
            Some(namespace) => write!(f, "{} {namespace}/{}", self.kind, self.name),
            None => write!(f, "{} {}", self.kind, self.name),
        }
    }
}

impl<'a> About<'a> {
    /// Why the node is where it is.
    pub fn reason(&self) -> &'a Reason {
        &self.verdict.reason
    }

    /// The policy, if it can be followed.
    pub(super) fn policy(&self) -> Option<&'a Policy> {
        self.pool.policy.as_ref().ok()
    }

    /// The object whose `autoUpgrade` is in force: the policy itself, or the one that it inherits from.
    pub fn switch(&self) -> Thing {
        let effective = self.policy().and_then(|policy| policy.effective.get("autoUpgrade"));
        effective.and_then(|value| Thing::read(&value.from)).unwrap_or_else(|| Thing::from(&self.pool.source))
    }

    /// A pod on the node.
    pub(super) fn pod(&self, name: &ObjectName) -> Option<&'a Pod> {
        self.snapshot.pods.get(self.node)?.get(name)
    }

    /// The budget that keeps a pod on the node now.
    pub(super) fn closed_budget(&self, pod: &ObjectName) -> Option<(&'a ObjectName, &'a Budget)> {
        let labels = &self.pod(pod)?.labels;
        let selects =
            |budget: &Budget| budget.selector.as_ref().is_some_and(|selector| selector.matches(labels));
        let mut budgets = self.snapshot.budgets.iter();
        budgets
            .find(|(name, budget)| name.namespace == pod.namespace && budget.allowed <= 0 && selects(budget))
    }

    /// The nodes of the pool that keep a slot or a place outside from the others.
    pub(super) fn in_the_way(&self, blocks: impl Fn(&NodeName, &Verdict) -> bool) -> Vec<Thing> {
        let others = self.plan.nodes.iter().filter(|(name, _)| *name != self.node);
        others.filter(|(name, verdict)| blocks(name, verdict)).map(|(name, _)| Thing::node(name)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_read_as_sentences_spell_them() {
        let read = |text| Thing::read(text).map(|thing| thing.to_string());
        assert_eq!(read("nvidiadriver/a100"), Some("NVIDIADriver a100".into()));
        assert_eq!(read("deployment/gpu-operator/op"), Some("Deployment gpu-operator/op".into()));
        assert_eq!(read("default"), None);
    }
}
