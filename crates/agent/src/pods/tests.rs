use super::*;
use serde_json::json;

fn pod(name: &str, spec: &Value) -> OnNode {
    let owned = json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "rs", "uid": "u", "controller": true}]);
    let object = json!({
        "metadata": {"namespace": "ns", "name": name, "uid": name, "ownerReferences": owned},
        "spec": spec,
        "status": {"phase": "Running"},
    });
    OnNode::read(serde_json::from_value(object).unwrap())
}

fn gpu(resource: &str) -> Value {
    json!({"containers": [{"name": "c", "resources": {"limits": {resource: "1", "cpu": "2"}}}]})
}

fn leave(whole_node: bool) -> Leave {
    Leave {
        whole_node,
        selector: Selector::default(),
        force: false,
        delete_empty_dir: false,
        custom_label: None,
        administrators: false,
    }
}

fn leaving(how: &Leave, pods: &[OnNode], claims: &Claims) -> Vec<String> {
    how.leaving(pods, claims).unwrap().into_iter().map(|pod| pod.name.name.to_string()).collect()
}

#[test]
fn any_container_that_asks_for_a_gpu_makes_a_user() {
    let nothing = json!({"containers": [{"name": "c"}]});
    let mut init = nothing.clone();
    init["initContainers"] = json!([{"name": "i", "resources": {"requests": {"nvidia.com/gpu": "1"}}}]);
    let mut none = gpu("nvidia.com/gpu");
    none["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] = json!("0");
    let pods = [
        pod("whole", &gpu("nvidia.com/gpu")),
        pod("shared", &gpu("nvidia.com/gpu.shared")),
        pod("slice", &gpu("nvidia.com/mig-1g.5gb")),
        pod("init", &init),
        pod("none", &none),
        pod("other", &gpu("example.com/fpga")),
        pod("nothing", &nothing),
    ];
    assert_eq!(leaving(&leave(false), &pods, &Claims::new()), ["whole", "shared", "slice", "init"]);
    assert_eq!(leaving(&leave(true), &pods, &Claims::new()).len(), 7);
}

#[test]
fn claims_made_for_a_pod_are_found_in_its_status() {
    let object = json!({
        "metadata": {"namespace": "ns", "name": "p"},
        "spec": {"containers": [], "resourceClaims": [{"name": "a", "resourceClaimTemplateName": "t"}, {"name": "b", "resourceClaimName": "own"}]},
        "status": {"resourceClaimStatuses": [{"name": "a", "resourceClaimName": "p-a-x7"}]},
    });
    let found = OnNode::read(serde_json::from_value(object).unwrap());
    assert_eq!(found.pod.claims.iter().map(|claim| &**claim).collect::<Vec<_>>(), ["p-a-x7", "own"]);
}

#[test]
fn a_claim_for_administration_keeps_the_plugin_but_makes_no_user() {
    let results = json!([{"driver": "gpu.nvidia.com", "adminAccess": true}]);
    let data = json!({"status": {"allocation": {"devices": {"results": results}}}});
    let spec = json!({"containers": [], "resourceClaims": [{"name": "c", "resourceClaimName": "admin"}]});
    let pods = [pod("watcher", &spec)];
    let known = |with_administration| {
        Claims::from([(ObjectName::new("ns", "admin"), claim(&data, with_administration))])
    };
    assert_eq!(leaving(&leave(false), &pods, &known(false)), [""; 0]);
    assert_eq!(names(&claim_holders(&pods, &known(true))), "pod ns/watcher");
}

#[test]
fn pods_that_a_paused_label_takes_away_are_not_evicted() {
    let mut spec = gpu("nvidia.com/gpu");
    spec["nodeSelector"] = json!({"nvidia.com/gpu.deploy.client": "true"});
    let mut client = pod("client", &spec);
    assert_eq!(
        leaving(&leave(false), std::slice::from_ref(&client), &Claims::new()),
        ["client"],
        "a Deployment's pod"
    );
    client.pod.owner = Some(Owner { kind: OwnerKind::DaemonSet, name: "d".into(), uid: "u".into() });
    assert_eq!(leaving(&leave(false), &[client], &Claims::new()), [""; 0]);
    spec["nodeSelector"] = json!({});
    let mut daemon = pod("daemon", &spec);
    daemon.pod.owner = Some(Owner { kind: OwnerKind::DaemonSet, name: "d".into(), uid: "u".into() });
    let refused = leave(false).leaving(&[daemon], &Claims::new()).unwrap_err();
    assert!(refused.contains("pod ns/daemon belongs to a DaemonSet"), "{refused}");
}

#[test]
fn a_drain_that_leaves_a_user_behind_is_none() {
    let mut daemon = pod("daemon", &gpu("nvidia.com/gpu"));
    daemon.pod.owner = Some(Owner { kind: OwnerKind::DaemonSet, name: "d".into(), uid: "u".into() });
    let left_out = pod("left-out", &gpu("nvidia.com/gpu"));
    let web = pod("web", &json!({"containers": []}));
    let only_web = Leave { selector: pitcrew_core::selector::parse("app=web").unwrap(), ..leave(true) };
    for (how, user) in [(leave(true), &daemon), (only_web.clone(), &left_out)] {
        let refused = how.leaving(&[web.clone(), user.clone()], &Claims::new()).unwrap_err();
        let expected = format!("pod {} uses the device and is left out of the drain", user.pod.name);
        assert_eq!(refused, expected);
        let mut going = user.clone();
        going.pod.deleting = Some(Timestamp::UNIX_EPOCH);
        assert!(how.leaving(&[web.clone(), going], &Claims::new()).is_ok(), "it leaves already");
    }
    assert_eq!(leaving(&only_web, &[web], &Claims::new()), [""; 0], "who uses nothing may be left out");
}

#[test]
fn a_compute_domains_own_daemon_leaves_by_itself_and_whoever_is_in_the_domain_is_evicted() {
    let spec = |claim: &str| json!({"containers": [], "resourceClaims": [{"name": "c", "resourceClaimName": claim}]});
    let claim_of = |name: &str, driver: &str| {
        (ObjectName::new("ns", name), Claim { drivers: [driver.to_owned()].into_iter().collect() })
    };
    let known = Claims::from([claim_of("channel", DOMAIN_CLAIMS), claim_of("gpu", GPU_CLAIMS)]);
    let mut daemon = pod("daemon", &spec("channel"));
    daemon.pod.owner = Some(Owner { kind: OwnerKind::DaemonSet, name: "d".into(), uid: "u".into() });
    let pods = [daemon.clone(), pod("worker", &spec("channel"))];
    assert_eq!(leaving(&leave(false), &pods, &known), ["worker"]);
    assert_eq!(names(&claim_holders(&pods, &known)), "pod ns/daemon, pod ns/worker");
    daemon.pod.claims = vec!["gpu".into()];
    let refused = leave(false).leaving(&[daemon], &known).unwrap_err();
    assert!(refused.contains("belongs to a DaemonSet"), "{refused}");
}
