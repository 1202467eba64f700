//! Each source's defaults, who rules, and where each value comes from.

use serde_json::{Value, json};

use super::*;
use crate::api::DriverPolicySpec;
use crate::names::ObjectName;
use crate::snapshot::{DaemonSet, Sources};

fn cluster_policy(driver: Value) -> ClusterPolicyFacts {
    ClusterPolicyFacts { driver, ..ClusterPolicyFacts::default() }
}

fn driver_policy(spec: Value) -> DriverPolicySpec {
    serde_json::from_value(spec).unwrap()
}

/// The gpu DaemonSet, rendered by `source`.
fn daemon_set(source: Option<Source>) -> DaemonSet {
    DaemonSet {
        name: ObjectName::new("gpu-operator", "nvidia-driver-daemonset"),
        uid: "ds".into(),
        labels: Labels::from([("app".to_owned(), "nvidia-driver-daemonset".to_owned())]),
        generation: 1,
        observed_generation: 1,
        on_delete: true,
        node_selector: Labels::new(),
        rendered_by: source,
        digest: None,
        driver_version: None,
        manager: None,
        pod_labels: Labels::new(),
        client: None,
    }
}

fn pools(sources: &Sources, daemon_set: Option<&DaemonSet>) -> Vec<Pool> {
    resolve(sources, daemon_set.into_iter(), "gpu-operator")
}

fn only(pools: &[Pool]) -> Policy {
    let [pool] = pools else { panic!("{pools:#?}") };
    pool.policy.clone().unwrap()
}

fn from_cluster_policy(policy: ClusterPolicyFacts) -> Policy {
    let mut sources = Sources::default();
    sources.cluster_policies.insert("cluster-policy".to_owned(), policy);
    only(&pools(&sources, None))
}

fn problem(policy: ClusterPolicyFacts) -> String {
    let mut sources = Sources::default();
    sources.cluster_policies.insert("cluster-policy".to_owned(), policy);
    pools(&sources, None).remove(0).policy.unwrap_err().to_string()
}

/// A DriverPolicy beside the ClusterPolicy that renders its DaemonSet.
fn inheriting(own: Value, cluster_policy: ClusterPolicyFacts) -> Policy {
    let mut sources = Sources::default();
    sources.driver_policies.insert("gpu".to_owned(), driver_policy(own));
    sources.cluster_policies.insert("cluster-policy".to_owned(), cluster_policy);
    let daemon_set = daemon_set(Some(Source::ClusterPolicy("cluster-policy".into())));
    only(&pools(&sources, Some(&daemon_set)))
}

/// Every value and where it comes from, as text.
fn effective(policy: &Policy) -> String {
    let line = |(field, EffectiveValue { value, from }): (&String, &EffectiveValue)| {
        format!("{field} = {value} ({from})")
    };
    policy.effective.iter().map(line).collect::<Vec<_>>().join("\n")
}

#[test]
fn a_driver_policy_that_says_nothing_has_the_documented_defaults() {
    let mut sources = Sources::default();
    sources.driver_policies.insert("gpu".to_owned(), driver_policy(json!({"driver": {"name": "gpu"}})));
    let policy = only(&pools(&sources, None));
    insta::assert_snapshot!(effective(&policy), @r"
    autoUpgrade = true (default)
    checkpoint.podSelector =  (default)
    checkpoint.timeoutSeconds = 300 (default)
    drain.deleteEmptyDir = false (default)
    drain.enable = false (default)
    drain.force = false (default)
    drain.podSelector =  (default)
    drain.timeoutAction = Fail (default)
    drain.timeoutSeconds = 300 (default)
    gpuPodDeletion.deleteEmptyDir = false (default)
    gpuPodDeletion.force = false (default)
    gpuPodDeletion.timeoutAction = Fail (default)
    gpuPodDeletion.timeoutSeconds = 300 (default)
    maxParallelUpgrades = 1 (default)
    maxUnavailable = 25% (default)
    waitForCompletion.podSelector =  (default)
    waitForCompletion.timeoutSeconds = 0 (default)
    ");
    assert!(policy.auto_upgrade);
    assert_eq!((policy.max_parallel, policy.max_unavailable), (1, Amount::Percent(25)));
    assert_eq!((policy.limits.driver_ready.as_secs(), policy.limits.validation.as_secs()), (1800, 600));
    assert_eq!(policy.wait.timeout, None, "0 is for ever");
    assert!(policy.wait.selector.is_none(), "an empty selector waits for nobody");
    assert!(policy.drain.is_none());
    assert!(policy.validator.is_none(), "not set: nothing to wait for");
    assert!(policy.devices.resources.iter().any(|pattern| pattern.matches("nvidia.com/gpu")));
    assert!(policy.devices.resources.iter().any(|pattern| pattern.matches("nvidia.com/mig-1g.5gb")));
}

#[test]
fn a_cluster_policy_that_says_nothing_does_not_upgrade() {
    let policy = from_cluster_policy(cluster_policy(json!({})));
    assert!(!policy.auto_upgrade, "NVIDIA's CRD says off");
    assert_eq!((policy.max_parallel, policy.max_unavailable), (1, Amount::Percent(25)));
    assert!(policy.validator.is_some(), "the operator brings its validator");
    assert!(
        from_cluster_policy(cluster_policy(json!({"upgradePolicy": {"autoUpgrade": true}}))).auto_upgrade
    );
}

#[test]
fn an_nvidia_driver_that_says_nothing_upgrades_its_own_nodes() {
    let mut sources = Sources::default();
    sources.nvidia_drivers.insert("h100".to_owned(), json!({}));
    let policy = only(&pools(&sources, None));
    assert!(policy.auto_upgrade);
    assert_eq!(policy.rendered_by.as_deref(), Some("h100"));
    let owned =
        |owner: &str| Labels::from([("nvidia.com/gpu-operator.driver.owner".to_owned(), owner.to_owned())]);
    assert!(policy.selects(&owned("h100")));
    assert!(!policy.selects(&owned("a100")));
}

#[test]
fn driver_policies_rule_then_the_oldest_cluster_policy_then_nvidia_drivers() {
    let names = |sources: &Sources| -> Vec<String> {
        pools(sources, None).iter().map(|pool| pool.source.to_string()).collect()
    };
    let mut sources = Sources::default();
    assert_eq!(names(&sources), [""; 0]);
    sources.nvidia_drivers.insert("a100".to_owned(), json!({}));
    sources.nvidia_drivers.insert("h100".to_owned(), json!({}));
    assert_eq!(names(&sources), ["nvidiadriver/a100", "nvidiadriver/h100"]);

    let created =
        |text: &str| ClusterPolicyFacts { created: text.parse().unwrap(), ..cluster_policy(json!({})) };
    sources.cluster_policies.insert("a".to_owned(), created("2026-01-02T00:00:00Z"));
    sources.cluster_policies.insert("b".to_owned(), created("2026-01-01T00:00:00Z"));
    assert_eq!(names(&sources), ["clusterpolicy/b"], "the oldest rules");

    sources.cluster_policies.get_mut("b").unwrap().driver = json!({"useNvidiaDriverCRD": true});
    assert_eq!(names(&sources), ["nvidiadriver/a100", "nvidiadriver/h100"], "it hands over");
    sources.cluster_policies.get_mut("b").unwrap().driver = json!({"enabled": false});
    assert_eq!(names(&sources), [""; 0], "a driver that the operator does not install is not ours");

    sources.driver_policies.insert("gpu".to_owned(), driver_policy(json!({"driver": {"name": "gpu"}})));
    assert_eq!(names(&sources), ["driverpolicy/gpu"]);
}

#[test]
fn a_driver_policy_inherits_what_it_does_not_say_and_names_the_source_of_each_value() {
    let own = json!({"driver": {"name": "gpu"}, "upgradePolicy": {"maxParallelUpgrades": 4, "drain": {"force": true}}});
    let theirs =
        json!({"upgradePolicy": {"maxParallelUpgrades": 2, "maxUnavailable": 3, "drain": {"enable": true}}});
    let policy = inheriting(own, cluster_policy(theirs));
    let said: Vec<String> =
        effective(&policy).lines().filter(|line| !line.contains("(default)")).map(str::to_owned).collect();
    assert_eq!(
        said,
        [
            "drain.enable = true (clusterpolicy/cluster-policy)",
            "drain.force = true (driverpolicy/gpu)",
            "maxParallelUpgrades = 4 (driverpolicy/gpu)",
            "maxUnavailable = 3 (clusterpolicy/cluster-policy)",
        ]
    );
    assert_eq!((policy.max_parallel, policy.max_unavailable), (4, Amount::Nodes(3)));
    assert!(policy.drain.unwrap().removal.force);
}

#[test]
fn a_driver_policy_inherits_from_an_nvidia_driver_too() {
    let mut sources = Sources::default();
    sources.driver_policies.insert("gpu".to_owned(), driver_policy(json!({"driver": {"name": "gpu"}})));
    sources.nvidia_drivers.insert("h100".to_owned(), json!({"maxUnavailable": "10%"}));
    let daemon_set = daemon_set(Some(Source::NvidiaDriver("h100".into())));
    let policy = only(&pools(&sources, Some(&daemon_set)));
    assert_eq!(
        policy.effective["maxUnavailable"],
        EffectiveValue { value: "10%".into(), from: "nvidiadriver/h100".into() }
    );
}

#[test]
fn auto_upgrade_off_in_any_of_them_pauses() {
    let own = |on: Option<bool>| json!({"driver": {"name": "gpu"}, "upgradePolicy": {"autoUpgrade": on}});
    let theirs = |on: Option<bool>| cluster_policy(json!({"upgradePolicy": {"autoUpgrade": on}}));
    for (ours, rendered, upgrades, from) in [
        (None, None, true, "default"),
        (None, Some(true), true, "clusterpolicy/cluster-policy"),
        (Some(true), Some(true), true, "driverpolicy/gpu"),
        (Some(true), Some(false), false, "clusterpolicy/cluster-policy"),
        (Some(false), Some(true), false, "driverpolicy/gpu"),
        (None, Some(false), false, "clusterpolicy/cluster-policy"),
    ] {
        let policy = inheriting(own(ours), theirs(rendered));
        assert_eq!(policy.auto_upgrade, upgrades, "{ours:?} {rendered:?}");
        let expected = EffectiveValue { value: upgrades.to_string(), from: from.to_owned() };
        assert_eq!(policy.effective["autoUpgrade"], expected, "{ours:?} {rendered:?}");
    }
}

#[test]
fn pod_deletion_is_another_name_of_gpu_pod_deletion() {
    for name in ["gpuPodDeletion", "podDeletion"] {
        let options = json!({name: {"force": true, "timeoutSeconds": 7}});
        let policy = from_cluster_policy(cluster_policy(json!({"upgradePolicy": options})));
        assert!(policy.removal.force, "{name}");
        assert_eq!(policy.removal.timeout.map(|t| t.as_secs()), Some(7), "{name}");
        assert_eq!(policy.effective["gpuPodDeletion.force"].from, "clusterpolicy/cluster-policy");
    }
}

#[test]
fn the_timeout_action_of_a_cluster_policy_is_asked_for_by_annotation() {
    let asking = |action: &str, options: Value| ClusterPolicyFacts {
        timeout_action: Some(action.to_owned()),
        ..cluster_policy(json!({"upgradePolicy": options}))
    };
    let delete = TimeoutAction::Delete;
    assert_eq!(from_cluster_policy(cluster_policy(json!({}))).removal.timeout_action, TimeoutAction::Fail);
    for options in
        [json!({}), json!({"podDeletion": {"force": true}}), json!({"gpuPodDeletion": {"force": true}})]
    {
        let policy = from_cluster_policy(asking("Delete", options.clone()));
        assert_eq!(policy.removal.timeout_action, delete, "{options}");
    }
    let draining = from_cluster_policy(asking("Delete", json!({"drain": {"enable": true}})));
    assert_eq!(draining.drain.unwrap().removal.timeout_action, delete);
    let inherited = inheriting(json!({"driver": {"name": "gpu"}}), asking("Delete", json!({})));
    assert_eq!(inherited.removal.timeout_action, delete, "a DriverPolicy inherits it like any other value");
    assert_eq!(
        problem(asking("Explode", json!({}))),
        "timeout action \"Explode\" is neither Fail nor Delete (metadata.annotations[pitcrew.dev/timeout-action]). The pool is frozen until it is mended; nothing was changed."
    );
}

#[test]
fn sandboxed_workloads_are_not_managed() {
    let policy = ClusterPolicyFacts { sandbox: true, ..cluster_policy(json!({})) };
    assert!(
        problem(policy).starts_with("sandboxed workloads are not managed (spec.sandboxWorkloads.enabled)")
    );
}

#[test]
fn a_bad_value_of_the_renderer_is_named_with_the_renderer() {
    let mut sources = Sources::default();
    sources.driver_policies.insert("gpu".to_owned(), driver_policy(json!({"driver": {"name": "gpu"}})));
    let bad = cluster_policy(json!({"upgradePolicy": {"maxParallelUpgrades": "many"}}));
    sources.cluster_policies.insert("cluster-policy".to_owned(), bad);
    let daemon_set = daemon_set(Some(Source::ClusterPolicy("cluster-policy".into())));
    let problem = pools(&sources, Some(&daemon_set)).remove(0).policy.unwrap_err();
    assert_eq!(problem.field, "clusterpolicy/cluster-policy spec.driver.upgradePolicy");
}

#[test]
fn a_driver_other_than_gpu_has_to_name_its_daemon_sets() {
    let mut sources = Sources::default();
    sources.driver_policies.insert("net".to_owned(), driver_policy(json!({"driver": {"name": "ofed"}})));
    let pool = pools(&sources, None).remove(0);
    assert_eq!(pool.driver.as_str(), "ofed", "known even if the rest cannot be read");
    assert_eq!(pool.policy.unwrap_err().field, "spec.driver.daemonSets.selector");
}

#[test]
fn the_drain_skip_label_counts_whatever_selector_the_user_adds() {
    let drain = json!({"upgradePolicy": {"drain": {"enable": true, "podSelector": "tier=batch"}}});
    let selector = from_cluster_policy(cluster_policy(drain)).drain.unwrap().selector;
    let labels = |pairs: &[(&str, &str)]| -> Labels {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    };
    assert!(selector.matches(&labels(&[("tier", "batch")])));
    assert!(!selector.matches(&labels(&[("tier", "web")])));
    assert!(
        !selector
            .matches(&labels(&[("tier", "batch"), ("nvidia.com/gpu-driver-upgrade-drain.skip", "true")]))
    );
}

#[test]
fn a_pattern_matches_its_name_or_its_beginning() {
    for (pattern, resource, matches) in [
        ("nvidia.com/gpu", "nvidia.com/gpu", true),
        ("nvidia.com/gpu", "nvidia.com/gpu.shared", false),
        ("nvidia.com/gpu*", "nvidia.com/gpu.shared", true),
        ("nvidia.com/mig-*", "nvidia.com/gpu", false),
    ] {
        assert_eq!(Pattern(pattern.to_owned()).matches(resource), matches, "{pattern} {resource}");
    }
}

#[test]
fn pools_have_names_of_their_own_even_if_their_objects_share_one() {
    let mut sources = Sources::default();
    sources.cluster_policies.insert("mine".to_owned(), cluster_policy(json!({})));
    sources.nic_cluster_policies.insert("mine".to_owned(), json!({}));
    let names = |sources: &Sources| {
        let pools = pools(sources, None);
        pools.iter().map(|pool| format!("{} of {}", pool.name, pool.source)).collect::<Vec<_>>()
    };
    assert_eq!(names(&sources), ["mine of clusterpolicy/mine", "mine-ofed of nicclusterpolicy/mine"]);
    let ofed = json!({"driver": {"name": "ofed", "daemonSets": {"selector": "app=mofed"}}});
    sources.driver_policies.insert("mine".to_owned(), driver_policy(ofed));
    assert_eq!(names(&sources), ["mine of driverpolicy/mine", "mine-gpu of clusterpolicy/mine"]);
}
