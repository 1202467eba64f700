//! PodDisruptionBudget status: how many pods may go, counted as the disruption controller counts.
//!
//! Members are kept per budget, so a pod that changes costs one look at the budgets of its namespace.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetSpec, PodDisruptionBudgetStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::ResourceExt;
use kube::core::{Selector, SelectorExt};

use super::cache::{Change, Key};
use super::clock::Clock;
use super::daemon_set::scaled;
use super::manager::{Manager, Task};
use super::object::{controller_of, is_ready, is_terminating, seconds_between};
use super::queue::Queue;
use super::replica_set::replicas;
use super::way::Way;
use super::world::World;
use super::write::Write;

/// An eviction that was allowed counts as a disruption until the pod is seen going, but no longer than this.
const DISRUPTED_SECONDS_MAX: u64 = 120;

/// The pods under each budget.
#[derive(Debug, Default)]
pub(super) struct Budgets {
    budgets: BTreeMap<Key, Members>,
    /// Budgets by namespace and one label they ask for; those that name none are under the empty label.
    by_label: BTreeMap<(String, Label), BTreeSet<Key>>,
}

type Label = (String, String);

#[derive(Debug)]
struct Members {
    selector: Option<Selector>,
    label: Label,
    pods: BTreeMap<String, Member>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Member {
    /// Kind and name of the controller; its size is what a percentage is of.
    owner: Option<(String, String)>,
    healthy: bool,
    leaving: bool,
}

/// What the status is computed from.
#[derive(Debug, Clone, Copy)]
struct Counts {
    pods: i32,
    healthy: i32,
    /// Replicas wanted by the pods' controllers; `None` if one of them has no scale.
    scale: Option<i32>,
}

#[derive(Debug, PartialEq, Eq)]
struct Allowance {
    expected: i32,
    healthy: i32,
    desired: i32,
    allowed: i32,
}

impl Budgets {
    pub(super) fn in_namespace<'a>(&'a self, namespace: &'a str) -> impl Iterator<Item = Key> + 'a {
        let first = Key::new(namespace, "");
        self.budgets
            .range(first..)
            .map(|(key, _)| key)
            .take_while(move |key| key.namespace == namespace)
            .cloned()
    }

    /// A budget came, went or changed its selector: find its pods afresh.
    pub(super) fn note_budget(&mut self, world: &World, change: &Change<PodDisruptionBudget>) {
        let Some(budget) = &change.new else {
            self.drop_budget(&change.key);
            return;
        };
        let selector =
            |budget: &PodDisruptionBudget| budget.spec.as_ref().and_then(|spec| spec.selector.clone());
        if change.old.as_deref().is_some_and(|old| selector(old) == selector(budget))
            && self.budgets.contains_key(&change.key)
        {
            return;
        }
        self.drop_budget(&change.key);
        let selector = selector(budget);
        let label = selector.as_ref().and_then(|selector| selector.match_labels.as_ref()?.iter().next());
        let label: Label = label.map(|(key, value)| (key.clone(), value.clone())).unwrap_or_default();
        let selector = selector.and_then(|selector| Selector::try_from(selector).ok());
        let mut members = Members { selector, label: label.clone(), pods: BTreeMap::new() };
        for (key, pod) in world.pods.cache.in_namespace(&change.key.namespace) {
            members.put(&key.name, Some(pod));
        }
        self.budgets.insert(change.key.clone(), members);
        self.by_label.entry((change.key.namespace.clone(), label)).or_default().insert(change.key.clone());
    }

    fn drop_budget(&mut self, key: &Key) {
        let Some(members) = self.budgets.remove(key) else { return };
        let place = (key.namespace.clone(), members.label);
        if let Some(keys) = self.by_label.get_mut(&place) {
            keys.remove(key);
        }
    }

    /// Returns the budgets whose count changed.
    pub(super) fn note_pod(&mut self, change: &Change<Pod>) -> BTreeSet<Key> {
        let facts = |pod: &Pod| (pod.metadata.labels.clone(), member(pod));
        if change.old.as_deref().map(facts) == change.new.as_deref().map(facts) {
            return BTreeSet::new();
        }
        let labels = [&change.old, &change.new].into_iter().flatten().flat_map(|pod| pod.labels());
        let labels = labels.map(|(key, value)| (key.clone(), value.clone())).chain([Label::default()]);
        let places = labels.map(|label| (change.key.namespace.clone(), label));
        let concerned: BTreeSet<Key> =
            places.filter_map(|place| self.by_label.get(&place)).flatten().cloned().collect();
        let mut put = |key: &Key| {
            let members = self.budgets.get_mut(key);
            members.is_some_and(|members| members.put(&change.key.name, change.new.as_deref()))
        };
        concerned.into_iter().filter(|key| put(key)).collect()
    }

    pub(super) fn look(
        &mut self,
        way: &Way,
        world: &World,
        key: &Key,
        clock: &Clock,
        queue: &mut Queue<Task>,
    ) -> Vec<Write<Manager>> {
        let (Some(budget), Some(members)) = (world.budgets.cache.get(key), self.budgets.get(key)) else {
            return Vec::new();
        };
        let Some(spec) = &budget.spec else { return Vec::new() };
        let known = budget.status.clone().unwrap_or_default();
        let disrupted = still_disrupted(&known, members, clock);
        if !disrupted.is_empty() {
            let over = tokio::time::Instant::now() + Duration::from_secs(DISRUPTED_SECONDS_MAX);
            queue.add_at(Task::Budget(key.clone()), over);
        }
        let counts = members.counts(world, &key.namespace, &disrupted);
        let allowance = allowance(spec, counts);
        let status = status(budget, &known, &allowance, disrupted, clock);
        if known == status {
            return Vec::new();
        }
        // A merge patch keeps map keys that are not named, so the whole map goes out by name.
        vec![Write::status(way, budget.as_ref(), &with_removals(&known, &status))]
    }
}

impl Members {
    fn put(&mut self, name: &str, pod: Option<&Pod>) -> bool {
        let selected =
            |pod: &&Pod| self.selector.as_ref().is_some_and(|selector| selector.matches(pod.labels()));
        match pod.filter(selected).map(member) {
            Some(member) => self.pods.insert(name.to_owned(), member.clone()) != Some(member),
            None => self.pods.remove(name).is_some(),
        }
    }

    fn counts(&self, world: &World, namespace: &str, disrupted: &BTreeMap<String, Time>) -> Counts {
        let healthy =
            self.pods.iter().filter(|(name, pod)| pod.healthy && !disrupted.contains_key(*name)).count();
        let mut owners: Vec<_> = self.pods.values().filter_map(|pod| pod.owner.as_ref()).collect();
        owners.sort();
        owners.dedup();
        let scale = owners.into_iter().map(|owner| scale(world, namespace, owner)).sum();
        let count = |count: usize| i32::try_from(count).unwrap_or(i32::MAX);
        Counts { pods: count(self.pods.len()), healthy: count(healthy), scale }
    }
}

fn member(pod: &Pod) -> Member {
    let owner = controller_of(pod).map(|owner| (owner.kind.clone(), owner.name.clone()));
    let leaving = is_terminating(pod);
    Member { owner, healthy: is_ready(pod) && !leaving, leaving }
}

/// The size of a pod's controller. Jobs and DaemonSets have none.
fn scale(world: &World, namespace: &str, (kind, name): &(String, String)) -> Option<i32> {
    let key = Key::new(namespace, name.as_str());
    match kind.as_str() {
        "ReplicaSet" => world.replica_sets.cache.get(&key).map(|set| replicas(set)),
        "StatefulSet" => world.stateful_sets.cache.get(&key).map(|set| set.spec.replicas.unwrap_or(1)),
        _ => None,
    }
}

fn allowance(spec: &PodDisruptionBudgetSpec, counts: Counts) -> Allowance {
    let Counts { pods, healthy, scale } = counts;
    let (expected, desired) = match (&spec.max_unavailable, &spec.min_available) {
        (Some(limit), _) => match scale {
            Some(scale) => (scale, (scale - scaled(limit.clone(), scale)).max(0)),
            None => return Allowance { expected: 0, healthy, desired: 0, allowed: 0 },
        },
        (None, Some(IntOrString::Int(least))) => (pods, *least),
        (None, Some(percent)) => match scale {
            Some(scale) => (scale, scaled(percent.clone(), scale)),
            None => return Allowance { expected: 0, healthy, desired: 0, allowed: 0 },
        },
        (None, None) => (pods, 1),
    };
    let allowed = if expected <= 0 { 0 } else { (healthy - desired).max(0) };
    Allowance { expected, healthy, desired, allowed }
}

fn still_disrupted(
    known: &PodDisruptionBudgetStatus,
    members: &Members,
    clock: &Clock,
) -> BTreeMap<String, Time> {
    let now = clock.now();
    let fresh = |(name, since): &(&String, &Time)| {
        let stays = members.pods.get(*name).is_some_and(|pod| !pod.leaving);
        stays && seconds_between(since, &now) < DISRUPTED_SECONDS_MAX
    };
    let disrupted = known.disrupted_pods.iter().flatten().filter(fresh);
    disrupted.map(|(name, since)| (name.clone(), since.clone())).collect()
}

fn status(
    budget: &PodDisruptionBudget,
    known: &PodDisruptionBudgetStatus,
    allowance: &Allowance,
    disrupted: BTreeMap<String, Time>,
    clock: &Clock,
) -> PodDisruptionBudgetStatus {
    let Allowance { expected, healthy, desired, allowed } = *allowance;
    let (verdict, reason) =
        if allowed > 0 { ("True", "SufficientPods") } else { ("False", "InsufficientPods") };
    let before = known.conditions.iter().flatten().find(|condition| condition.type_ == "DisruptionAllowed");
    let since = before
        .filter(|condition| condition.status == verdict)
        .map(|found| found.last_transition_time.clone());
    let condition = Condition {
        type_: "DisruptionAllowed".into(),
        status: verdict.into(),
        reason: reason.into(),
        message: String::new(),
        last_transition_time: since.unwrap_or_else(|| clock.now()),
        observed_generation: budget.metadata.generation,
    };
    PodDisruptionBudgetStatus {
        expected_pods: Some(expected),
        current_healthy: Some(healthy),
        desired_healthy: Some(desired),
        disruptions_allowed: Some(allowed),
        disrupted_pods: (!disrupted.is_empty()).then_some(disrupted),
        observed_generation: budget.metadata.generation,
        conditions: Some(vec![condition]),
    }
}

/// The status as a merge patch that also drops disrupted pods which are no longer named.
fn with_removals(known: &PodDisruptionBudgetStatus, status: &PodDisruptionBudgetStatus) -> serde_json::Value {
    let mut patch = serde_json::to_value(status).unwrap_or_default();
    let kept = status.disrupted_pods.clone().unwrap_or_default();
    for name in
        known.disrupted_pods.iter().flatten().map(|(name, _)| name).filter(|name| !kept.contains_key(*name))
    {
        patch["disruptedPods"][name] = serde_json::Value::Null;
    }
    patch
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_budget_allows() {
        let int = IntOrString::Int;
        let percent = |text: &str| IntOrString::String(text.into());
        // maxUnavailable, minAvailable, pods, healthy, scale → expected, desired, allowed
        let cases = [
            (Some(int(1)), None, 4, 4, Some(4), (4, 3, 1)),
            (Some(int(1)), None, 4, 3, Some(4), (4, 3, 0)),
            (Some(percent("25%")), None, 10, 10, Some(10), (10, 7, 3)),
            (Some(int(9)), None, 2, 2, Some(2), (2, 0, 2)),
            (Some(int(1)), None, 4, 4, None, (0, 0, 0)),
            (None, Some(int(2)), 3, 3, Some(3), (3, 2, 1)),
            (None, Some(int(2)), 1, 1, None, (1, 2, 0)),
            (None, Some(percent("75%")), 4, 4, Some(4), (4, 3, 1)),
            (None, Some(percent("75%")), 3, 3, Some(3), (3, 3, 0)),
            (None, Some(int(0)), 0, 0, Some(0), (0, 0, 0)),
        ];
        for (max_unavailable, min_available, pods, healthy, scale, (expected, desired, allowed)) in cases {
            let text = format!("max {max_unavailable:?} min {min_available:?} of {pods}");
            let spec = PodDisruptionBudgetSpec {
                max_unavailable,
                min_available,
                ..PodDisruptionBudgetSpec::default()
            };
            let found = allowance(&spec, Counts { pods, healthy, scale });
            assert_eq!(found, Allowance { expected, healthy, desired, allowed }, "{text}");
        }
    }
}
