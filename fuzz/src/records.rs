//! What stands on a node: our annotations, labels, cordon. Anybody may have edited them. They are read or refused; what was
//! read is written so that it reads the same; and the plan for such a node keeps every promise, now and later.
//!
//! The input is an object: `annotations` and `labels` (values that are not strings are written as JSON into one), the
//! node's flags, and what its driver pod and a user of the device look like.

use jiff::{SignedDuration, Timestamp};
use pitcrew_core::contract::{HEALTH_HOLD_ANNOTATION, LAST_VISIT_ANNOTATION, VISIT_ANNOTATION};
use pitcrew_core::health::HealthHold;
use pitcrew_core::names::{NodeName, ObjectName};
use pitcrew_core::policy::ClusterPolicyFacts;
use pitcrew_core::selector::Labels;
use pitcrew_core::snapshot::{
    DaemonSet, Node, NvSentinel, Owner, OwnerKind, Pod, Snapshot, TemplateRevision,
};
use pitcrew_core::visit::{LastVisit, Visit};
use serde_json::{Value, json};

use crate::world;

const NAMESPACE: &str = "gpu-operator";
/// Now, a moment later, after every deadline, and when nothing is left of anything.
const LATER: [i64; 4] = [0, 31, 100_000, 100_000_000];

pub(crate) fn run(input: &str) {
    let Ok(input) = serde_json::from_str::<Value>(input) else { return };
    let annotations = texts(&input["annotations"]);
    reads_back(&annotations);
    let mut snapshot = world_of(&input, annotations);
    for seconds in LATER {
        snapshot.now =
            snapshot.now.saturating_add(SignedDuration::from_secs(seconds)).unwrap_or(Timestamp::MAX);
        world::judge(&snapshot);
    }
}

/// What is read and written again reads the same, and writing it twice makes the same text.
fn reads_back(annotations: &Labels) {
    let text = |key: &str| annotations.get(key).map(String::as_str).unwrap_or_default();
    if let Ok(visit) = Visit::parse(text(VISIT_ANNOTATION)) {
        assert_eq!(Visit::parse(&visit.to_text()).as_ref(), Ok(&visit));
        for walk in visit.drivers.values() {
            let limit = SignedDuration::from_secs(i64::MAX);
            assert!(walk.deadline(limit, Timestamp::MAX) >= walk.since);
            for paused in [true, false] {
                drop(walk.with_pause(paused, Timestamp::MAX));
                drop(walk.with_pause(paused, Timestamp::MIN));
            }
        }
    }
    if let Ok(last) = serde_json::from_str::<LastVisit>(text(LAST_VISIT_ANNOTATION)) {
        assert_eq!(serde_json::from_str::<LastVisit>(&last.to_text()).ok(), Some(last));
    }
    if let Ok(hold) = serde_json::from_str::<HealthHold>(text(HEALTH_HOLD_ANNOTATION)) {
        assert_eq!(serde_json::from_str::<HealthHold>(&hold.to_text()).ok(), Some(hold));
    }
}

fn texts(value: &Value) -> Labels {
    let all = value.as_object().into_iter().flatten();
    all.map(|(key, value)| (key.clone(), value.as_str().map_or_else(|| value.to_string(), str::to_owned)))
        .collect()
}

fn world_of(input: &Value, annotations: Labels) -> Snapshot {
    let now = "2026-01-01T12:00:00Z".parse().unwrap_or_default();
    let mut snapshot = Snapshot::new(now, NAMESPACE);
    snapshot.leading_since = Timestamp::MIN;
    let driver = json!({"upgradePolicy": {"autoUpgrade": true, "maxUnavailable": "100%"}});
    let facts = ClusterPolicyFacts { driver, ..ClusterPolicyFacts::default() };
    snapshot.sources.cluster_policies.insert("cluster-policy".to_owned(), facts);
    snapshot.nvsentinel = input["tripped"].as_bool().map(|tripped| NvSentinel { tripped });
    let name = NodeName::from("gpu-1");
    let mut node = Node::new("uid-node".into(), 1.into(), texts(&input["labels"]), annotations);
    node.unschedulable = input["unschedulable"] == true;
    node.ready = input["ready"] != false;
    snapshot.nodes.insert(name.clone(), node);
    let set = daemon_set();
    for (number, hash) in [(1, "old"), (2, "new")] {
        let revision = TemplateRevision {
            owner: set.uid.clone(),
            number,
            created: Timestamp::UNIX_EPOCH,
            hash: hash.into(),
            digest: None,
            driver_version: None,
        };
        snapshot.revisions.insert(hash.into(), revision);
    }
    if input["driver"].is_object() {
        put(&mut snapshot, driver_pod(&set, &name, &input["driver"]));
    }
    if input["user"].is_object() {
        put(&mut snapshot, user(&name, &input["user"]));
    }
    snapshot.daemon_sets.insert(set.uid.clone(), set);
    snapshot
}

fn put(snapshot: &mut Snapshot, pod: Pod) {
    snapshot.pods.entry(pod.node.clone()).or_default().insert(pod.name.clone(), pod);
}

fn time(value: &Value) -> Option<Timestamp> {
    value.as_str()?.parse().ok()
}

fn driver_pod(set: &DaemonSet, node: &NodeName, facts: &Value) -> Pod {
    let owner = Owner { kind: OwnerKind::DaemonSet, name: (*set.name.name).into(), uid: set.uid.clone() };
    Pod {
        labels: set.labels.clone(),
        owner: Some(owner),
        revision: facts["revision"].as_str().map(Into::into),
        ready: facts["ready"] != false,
        deleting: time(&facts["deleting"]),
        created: time(&facts["created"]).unwrap_or_default(),
        started: time(&facts["started"]),
        ..Pod::ready(ObjectName::new(NAMESPACE, "driver"), "uid-driver".into(), 1.into(), node.clone())
    }
}

fn user(node: &NodeName, facts: &Value) -> Pod {
    let owner = Owner { kind: OwnerKind::Replicas, name: "web".into(), uid: "uid-web".into() };
    Pod {
        owner: (facts["owned"] != false).then_some(owner),
        resources: vec![("nvidia.com/gpu".into(), 1)],
        created: time(&facts["created"]).unwrap_or_default(),
        deleting: time(&facts["deleting"]),
        checkpoint_requested: time(&facts["asked"]),
        ..Pod::ready(ObjectName::new("work", "user"), "uid-user".into(), 1.into(), node.clone())
    }
}

fn daemon_set() -> DaemonSet {
    let app = "nvidia-driver-daemonset";
    DaemonSet {
        name: ObjectName::new(NAMESPACE, app),
        uid: "uid-set".into(),
        labels: Labels::from([("app".to_owned(), app.to_owned())]),
        generation: 1,
        observed_generation: 1,
        on_delete: true,
        node_selector: Labels::new(),
        rendered_by: None,
        digest: None,
        driver_version: None,
        manager: None,
        pod_labels: Labels::new(),
        client: None,
    }
}
