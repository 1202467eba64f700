//! One planning pass over 10,000 nodes and 100,000 pods: the bar is 20 ms.

use std::hint::black_box;

use criterion::{BatchSize, Criterion};
use jiff::{SignedDuration, Timestamp};
use pitcrew_core::check::violations;
use pitcrew_core::contract::{DEFAULT_LABEL_DOMAIN, Keys, REVISION_LABEL, State, VISIT_ANNOTATION};
use pitcrew_core::names::{NodeName, ObjectName};
use pitcrew_core::plan;
use pitcrew_core::policy::ClusterPolicyFacts;
use pitcrew_core::selector::{self, Labels};
use pitcrew_core::snapshot::{Budget, DaemonSet, Node, Owner, OwnerKind, Pod, Snapshot, TemplateRevision};
use pitcrew_core::visit::{Holds, Visit, Walk};
use serde_json::{Value, json};

const NODES: usize = 10_000;
const PODS_PER_NODE: usize = 10;

fn now() -> Timestamp {
    Timestamp::UNIX_EPOCH + SignedDuration::from_hours(500_000)
}

fn labels<const N: usize>(pairs: [(&str, &str); N]) -> Labels {
    pairs.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

/// What a GPU node carries in a real cluster, so that looking a label up costs what it costs there.
fn node_labels() -> Labels {
    let mut found = labels([("gpu", "true"), ("kubernetes.io/arch", "amd64"), ("kubernetes.io/os", "linux")]);
    found.extend((0..40).map(|i| (format!("nvidia.com/gpu.deploy.operand-{i}"), "true".to_owned())));
    found
}

fn pod(node: &NodeName, namespace: &str, name: &str, labels: Labels, owner: (OwnerKind, &str)) -> Pod {
    let uid = format!("uid-{namespace}-{name}").into();
    Pod {
        revision: Pod::read_revision(&labels),
        labels,
        owner: Some(Owner { kind: owner.0, name: owner.1.into(), uid: owner.1.into() }),
        started: Some(now() - SignedDuration::from_hours(1)),
        ..Pod::ready(ObjectName::new(namespace, name), uid, 1.into(), node.clone())
    }
}

/// A driver pod, a validator, two pods that use the device under a budget, and others that do not.
fn pods(node: &NodeName, revision: &str) -> Vec<Pod> {
    let driver = labels([("app", "nvidia-driver-daemonset"), (REVISION_LABEL, revision)]);
    let validator = labels([("app", "nvidia-operator-validator")]);
    let mut pods = vec![
        pod(node, "gpu-operator", &format!("driver-{node}"), driver, (OwnerKind::DaemonSet, "ds")),
        pod(
            node,
            "gpu-operator",
            &format!("validator-{node}"),
            validator,
            (OwnerKind::DaemonSet, "validator"),
        ),
    ];
    pods.extend((2..PODS_PER_NODE).map(|i| {
        let mut pod = pod(
            node,
            "work",
            &format!("pod-{node}-{i}"),
            labels([("app", "train")]),
            (OwnerKind::Replicas, "job"),
        );
        if i < 4 {
            pod.resources = vec![("nvidia.com/gpu".into(), 4)];
        }
        pod
    }));
    pods
}

/// A fleet whose `i`-th node is in `state(i)`, with the record and the cordon that go with it.
fn fleet(options: &Value, revision: &str, state: impl Fn(usize) -> State) -> Snapshot {
    let keys = Keys::new(&"gpu".into(), DEFAULT_LABEL_DOMAIN);
    let mut snapshot = Snapshot::new(now(), "gpu-operator");
    snapshot.leading_since = now() - SignedDuration::from_hours(1);
    let policy = ClusterPolicyFacts { driver: json!({ "upgradePolicy": options }), ..Default::default() };
    snapshot.sources.cluster_policies.insert("cluster-policy".to_owned(), policy);
    let daemon_set = DaemonSet {
        name: ObjectName::new("gpu-operator", "nvidia-driver-daemonset"),
        uid: "ds".into(),
        labels: labels([("app", "nvidia-driver-daemonset")]),
        generation: 2,
        observed_generation: 2,
        on_delete: true,
        node_selector: labels([("gpu", "true")]),
        rendered_by: None,
        digest: None,
        driver_version: None,
        manager: None,
        pod_labels: Labels::new(),
        client: None,
    };
    snapshot.daemon_sets.insert(daemon_set.uid.clone(), daemon_set);
    for (number, hash) in [(1, "old"), (2, "new")] {
        let (owner, digest, driver_version) = ("ds".into(), None, None);
        let (hash_of, created) = (hash.into(), Timestamp::UNIX_EPOCH);
        let revision = TemplateRevision { owner, number, created, hash: hash_of, digest, driver_version };
        snapshot.revisions.insert(hash.into(), revision);
    }
    let selector = selector::parse("app=train").ok();
    let budget =
        Budget { selector, allowed: 100, healthy: 20_000, desired: 19_900, expected: 20_000, current: true };
    snapshot.budgets.insert(ObjectName::new("work", "train"), budget);
    for i in 0..NODES {
        let name = NodeName::from(format!("gpu-{i:05}"));
        let state = state(i);
        let mut labels = node_labels();
        labels.insert(keys.state.clone(), state.as_str().to_owned());
        let mut annotations = Labels::from([(keys.enabled.clone(), "true".to_owned())]);
        let visited = state.in_flight() && state != State::CordonRequired;
        if visited {
            let walk = Walk::begin(state, now() - SignedDuration::from_secs(10), "new".into());
            let visit = Visit::begin(None, now(), Holds::only_cordon(), "gpu".into(), walk);
            annotations.insert(VISIT_ANNOTATION.to_owned(), visit.to_text());
        }
        let mut node = Node::new(format!("uid-{name}").into(), 1.into(), labels, annotations);
        node.unschedulable = visited;
        let on_node = pods(&name, revision).into_iter().map(|pod| (pod.name.clone(), pod)).collect();
        snapshot.pods.insert(name.clone(), on_node);
        snapshot.nodes.insert(name, node);
    }
    snapshot
}

fn passes(criterion: &mut Criterion) {
    let default = json!({"autoUpgrade": true});
    let limited = json!({"autoUpgrade": true, "maxParallelUpgrades": 0, "maxUnavailable": "25%"});
    let unlimited = json!({"autoUpgrade": true, "maxParallelUpgrades": 0, "maxUnavailable": "100%"});
    let walk = [
        State::WaitForJobsRequired,
        State::PodDeletionRequired,
        State::PodRestartRequired,
        State::ValidationRequired,
    ];
    let steady = fleet(&default, "new", |_| State::UpgradeDone);
    let waiting = fleet(&default, "old", |_| State::UpgradeRequired);
    let a_quarter =
        |i: usize| if i.is_multiple_of(4) { walk[(i / 4) % walk.len()] } else { State::UpgradeRequired };
    let moving = fleet(&limited, "old", a_quarter);
    let starting = fleet(&unlimited, "old", a_quarter);

    let mut group = criterion.benchmark_group("plan 10,000 nodes");
    group.sample_size(30);
    group.bench_function("steady state", |b| b.iter(|| plan(black_box(&steady))));
    group.bench_function("all outdated, default limits", |b| b.iter(|| plan(black_box(&waiting))));
    group.bench_function("a quarter in flight, as many as may", |b| b.iter(|| plan(black_box(&moving))));
    // The most that one pass can bring: 10,000 actions.
    group.bench_function("a quarter in flight, all others start", |b| b.iter(|| plan(black_box(&starting))));
    let one_changed = || {
        let mut snapshot = steady.clone();
        if let Some(node) = snapshot.nodes.get_mut("gpu-05000") {
            node.ready = false;
        }
        snapshot
    };
    group.bench_function("one node changed", |b| {
        b.iter_batched_ref(one_changed, |s| plan(s), BatchSize::PerIteration);
    });
    group.finish();

    let mut group = criterion.benchmark_group("violations 10,000 nodes");
    group.sample_size(30);
    for (name, snapshot) in [("steady state", &steady), ("all others start", &starting)] {
        let plan = plan(snapshot);
        group.bench_function(name, |b| b.iter(|| violations(black_box(snapshot), &plan)));
    }
    group.finish();
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    passes(&mut criterion);
    criterion.final_summary();
}
