//! Policy objects of every source: each becomes a pool that can be followed, or one that says what to mend.
//!
//! The input is an object with a map of specs for each kind, as the API has them.

use std::collections::BTreeSet;

use pitcrew_core::api::{
    ClusterPolicySpec, DriverPolicySpec, DriverPolicyStatus, NVIDIADriverSpec, NicClusterPolicySpec,
};
use pitcrew_core::names::ObjectName;
use pitcrew_core::policy::{self, ClusterPolicyFacts, Policy, Pool, Source};
use pitcrew_core::selector::Labels;
use pitcrew_core::snapshot::{DaemonSet, Snapshot, Sources};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::world;

const NAMESPACE: &str = "gpu-operator";

pub(crate) fn run(input: &str) {
    let Ok(input) = serde_json::from_str::<Value>(input) else { return };
    let sources = sources(&input);
    let sets: Vec<DaemonSet> = daemon_sets(&sources);
    let pools = policy::resolve(&sources, sets.iter(), NAMESPACE);
    let again = policy::resolve(&sources, sets.iter().rev(), NAMESPACE);
    assert_eq!(names(&pools), names(&again), "the order of DaemonSets decides which pools there are");
    // In order, and each name once.
    assert!(pools.is_sorted_by(|a, b| a.name < b.name));
    for spec in sources.driver_policies.values() {
        let written = serde_json::to_value(spec).expect("a spec can be written");
        let read: DriverPolicySpec = serde_json::from_value(written).expect("what was written can be read");
        assert_eq!(read, *spec);
    }
    for pool in &pools {
        match &pool.policy {
            Ok(policy) => follow(pool, policy),
            Err(problem) => assert!(!problem.what.is_empty() && !problem.field.is_empty(), "{problem:?}"),
        }
    }
    let mut snapshot = Snapshot::new("2026-01-01T12:00:00Z".parse().expect("a time"), NAMESPACE);
    snapshot.sources = sources;
    snapshot.daemon_sets = sets.into_iter().map(|set| (set.uid.clone(), set)).collect();
    world::judge(&snapshot);
}

fn names(pools: &[Pool]) -> BTreeSet<(String, String, bool)> {
    pools.iter().map(|p| (p.source.to_string(), p.driver.to_string(), p.policy.is_ok())).collect()
}

/// A policy that can be followed has no limit that would be none.
fn follow(pool: &Pool, policy: &Policy) {
    assert_eq!(pool.driver, policy.driver);
    for total in [0, 1, 7, 100_000] {
        let limit = policy.max_unavailable.of(total);
        let percent = policy.max_unavailable.to_string().ends_with('%');
        assert!(!percent || limit <= total, "{} of {total} is {limit}", policy.max_unavailable);
    }
    assert!(policy.removal.timeout.is_none_or(|t| t.is_positive()));
    assert!(policy.effective.contains_key("autoUpgrade"));
}

fn sources(input: &Value) -> Sources {
    let mut sources = Sources::default();
    for (name, spec) in specs::<DriverPolicySpec>(input, "driverPolicies") {
        sources.driver_policy_status.insert(name.clone(), (1, DriverPolicyStatus::default()));
        sources.driver_policies.insert(name, spec);
    }
    for (name, spec) in specs::<ClusterPolicySpec>(input, "clusterPolicies") {
        let facts = ClusterPolicyFacts {
            created: input["created"].as_str().and_then(|at| at.parse().ok()).unwrap_or_default(),
            sandbox: spec.sandbox_workloads["enabled"] == true,
            timeout_action: input["timeoutAction"].as_str().map(str::to_owned),
            driver: spec.driver,
        };
        sources.cluster_policies.insert(name, facts);
    }
    for (name, spec) in specs::<NVIDIADriverSpec>(input, "nvidiaDrivers") {
        sources.nvidia_driver_versions.insert(name.clone(), spec.version);
        sources.nvidia_drivers.insert(name, spec.upgrade_policy);
    }
    for (name, spec) in specs::<NicClusterPolicySpec>(input, "nicClusterPolicies") {
        sources.nic_cluster_policies.insert(name, spec.ofed_driver);
    }
    sources
}

fn specs<T: DeserializeOwned>(input: &Value, kind: &str) -> Vec<(String, T)> {
    let all = input[kind].as_object().into_iter().flatten();
    all.filter_map(|(name, spec)| Some((name.clone(), serde_json::from_value(spec.clone()).ok()?))).collect()
}

/// One DaemonSet that each object may have rendered, so that DriverPolicies inherit.
fn daemon_sets(sources: &Sources) -> Vec<DaemonSet> {
    let gpu = sources.cluster_policies.keys().map(|name| Source::ClusterPolicy(name.clone()));
    let gpu = gpu.chain(sources.nvidia_drivers.keys().map(|name| Source::NvidiaDriver(name.clone())));
    let ofed = sources.nic_cluster_policies.keys().map(|name| Source::NicClusterPolicy(name.clone()));
    let gpu = gpu.take(1).map(|source| ("nvidia-driver-daemonset", source));
    gpu.chain(ofed.take(1).map(|source| ("mofed", source)))
        .map(|(app, source)| daemon_set(app, source))
        .collect()
}

fn daemon_set(app: &str, source: Source) -> DaemonSet {
    let labels =
        [("app", app), ("app.kubernetes.io/component", "nvidia-driver"), ("nvidia.com/ofed-driver", "")];
    DaemonSet {
        name: ObjectName::new(NAMESPACE, app),
        uid: app.into(),
        labels: labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
        generation: 1,
        observed_generation: 1,
        on_delete: true,
        node_selector: Labels::new(),
        rendered_by: Some(source),
        digest: None,
        driver_version: None,
        manager: None,
        pod_labels: Labels::new(),
        client: None,
    }
}
