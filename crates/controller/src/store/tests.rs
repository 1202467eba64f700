//! What comes in twice, late, or under an old name.

use serde_json::json;

use super::*;

fn now() -> Timestamp {
    Timestamp::UNIX_EPOCH
}

fn node(name: &str, uid: &str, version: u64, cordoned: bool) -> wire::Node {
    let metadata = json!({"name": name, "uid": uid, "resourceVersion": version.to_string()});
    serde_json::from_value(json!({"metadata": metadata, "spec": {"unschedulable": cordoned}})).unwrap()
}

fn pod(name: &str, uid: &str, version: u64, node: &str) -> wire::Pod {
    let metadata =
        json!({"namespace": "llm", "name": name, "uid": uid, "resourceVersion": version.to_string()});
    serde_json::from_value(json!({"metadata": metadata, "spec": {"nodeName": node}})).unwrap()
}

fn see_node(store: &mut Store, event: Event<wire::Node>) -> Effect {
    store.fold(Observation::Node(event), now())
}

fn store_with(nodes: &[wire::Node]) -> Store {
    let scope = Scope::controller(&BTreeSet::new());
    let mut store = Store::new(Snapshot::new(now(), "gpu-operator"), scope);
    for node in nodes {
        see_node(&mut store, Event::Apply(node.clone()));
    }
    store
}

#[test]
fn a_newer_version_is_never_replaced_by_an_older_one() {
    let mut store = store_with(&[node("a", "u1", 5, true)]);
    assert_eq!(see_node(&mut store, Event::Apply(node("a", "u1", 4, false))), Effect::None);
    store.answer_node(node("a", "u1", 3, false));
    assert!(store.snapshot.nodes["a"].unschedulable);
    store.answer_node(node("a", "u1", 6, false));
    assert!(!store.snapshot.nodes["a"].unschedulable);
}

#[test]
fn the_answer_to_a_write_never_brings_a_deleted_node_back() {
    let mut store = store_with(&[node("a", "u1", 5, true)]);
    see_node(&mut store, Event::Delete(node("a", "u1", 6, true)));
    store.answer_node(node("a", "u1", 7, true));
    assert!(store.snapshot.nodes.is_empty());
}

#[test]
fn another_node_of_the_same_name_is_another_node() {
    let mut store = store_with(&[node("a", "u1", 5, true)]);
    store.answer_node(node("a", "u2", 9, false));
    assert_eq!(store.snapshot.nodes["a"].uid.as_str(), "u1");
    assert_eq!(see_node(&mut store, Event::Apply(node("a", "u2", 9, false))), Effect::Changed);
    assert_eq!(store.snapshot.nodes["a"].uid.as_str(), "u2");
}

#[test]
fn what_a_new_list_does_not_show_is_gone() {
    let mut store = store_with(&[node("a", "u1", 5, false), node("b", "u2", 6, false)]);
    see_node(&mut store, Event::Init);
    see_node(&mut store, Event::InitApply(node("b", "u2", 6, false)));
    assert_eq!(store.snapshot.nodes.len(), 2, "until the list is complete");
    assert_eq!(see_node(&mut store, Event::InitDone), Effect::Changed);
    assert_eq!(store.snapshot.nodes.keys().map(NodeName::as_str).collect::<Vec<_>>(), ["b"]);
}

#[test]
fn a_new_version_alone_is_no_new_fact() {
    let mut store = store_with(&[node("a", "u1", 5, true)]);
    assert_eq!(see_node(&mut store, Event::Apply(node("a", "u1", 6, true))), Effect::None);
    assert_eq!(store.snapshot.nodes["a"].version, 6.into());
}

#[test]
fn a_pod_that_comes_back_elsewhere_under_its_name_leaves_the_old_node() {
    let mut store = store_with(&[]);
    store.fold(Observation::Pod(Event::Apply(pod("web-0", "u1", 5, "a"))), now());
    store.fold(Observation::Pod(Event::Apply(pod("web-0", "u2", 9, "b"))), now());
    assert_eq!(store.snapshot.pods.keys().map(NodeName::as_str).collect::<Vec<_>>(), ["b"]);
}

fn config_map(version: u64, text: &str) -> k8s_openapi::api::core::v1::ConfigMap {
    let metadata = json!({
        "namespace": "gpu-operator", "name": "gpu-version-matrix", "uid": "m", "resourceVersion": version.to_string(),
    });
    serde_json::from_value(json!({"metadata": metadata, "data": {"a.yaml": text}})).unwrap()
}

#[test]
fn the_version_matrix_is_read_when_it_changes_and_gone_when_it_is_deleted() {
    let mut store = store_with(&[]);
    let mut see = |event| store.fold(Observation::Matrix(event), now());
    assert_eq!(see(Event::Init), Effect::None);
    assert_eq!(see(Event::InitDone), Effect::Changed, "from now on, none means none");
    let text = "versions: {current: {driver: '565.57.01'}}";
    assert_eq!(see(Event::Apply(config_map(1, text))), Effect::Changed);
    assert_eq!(see(Event::Apply(config_map(2, &format!("# a comment\n{text}")))), Effect::None);
    assert_eq!(see(Event::Apply(config_map(3, "versions:"))), Effect::Changed);
    assert_eq!(see(Event::Apply(config_map(4, text))), Effect::Changed);
    let files = store.snapshot.matrices.clone().unwrap();
    assert!(files.get("a.yaml").unwrap().is_ok());
    assert_eq!(files.get("b.yaml"), None);
    assert_eq!(store.fold(Observation::Matrix(Event::Delete(config_map(5, text))), now()), Effect::Changed);
    assert_eq!(store.snapshot.matrices, None);
}

/// An object as the API has it after so many changes, with these labels.
fn marked<K: serde::de::DeserializeOwned>(name: &str, version: u64, labels: &serde_json::Value) -> K {
    let metadata =
        json!({"name": name, "uid": name, "resourceVersion": version.to_string(), "labels": labels});
    let spec = json!({"version": "565.57.01", "driver": {"version": "565.57.01"}, "upgradePolicy": {}});
    serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap()
}

#[test]
fn who_keeps_a_policy_object_is_known_from_its_marks_and_forgotten_without_them() {
    let mut store = store_with(&[]);
    let (argo, flux) =
        (json!({"argocd.argoproj.io/instance": "gpu"}), json!({"helm.toolkit.fluxcd.io/name": "gpu"}));
    let policy = |version, labels| {
        let policy = marked("cluster-policy", version, labels);
        Observation::ClusterPolicy(Event::Apply(policy))
    };
    let driver = |version, labels| Observation::NvidiaDriver(Event::Apply(marked("a100", version, labels)));
    let nic = |version, labels| Observation::NicClusterPolicy(Event::Apply(marked("nic", version, labels)));
    for observed in [policy(1, &argo), driver(1, &flux), nic(1, &argo)] {
        assert_eq!(store.fold(observed, now()), Effect::Changed);
    }
    let argo = "Argo CD (application gpu)".to_owned();
    let kept = [
        (Source::ClusterPolicy("cluster-policy".to_owned()), argo.clone()),
        (Source::NvidiaDriver("a100".to_owned()), "Flux (helmrelease gpu)".to_owned()),
        (Source::NicClusterPolicy("nic".to_owned()), argo),
    ];
    assert_eq!(store.snapshot.sources.managers, BTreeMap::from(kept));
    // Nothing but the mark goes, and that is news.
    for observed in [policy(2, &json!({})), driver(2, &json!({})), nic(2, &json!({}))] {
        assert_eq!(store.fold(observed, now()), Effect::Changed);
    }
    assert_eq!(store.snapshot.sources.managers, BTreeMap::new());
}
