//! The agents in the embedded cluster with everybody else in it: real DaemonSet controllers take operands off when their
//! labels are paused, kubelets end pods, and pitcrew's own controller answers a safe load.

#![allow(clippy::unwrap_used, clippy::panic, reason = "what these tests do not expect is a failure")]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use kube::{Client, ResourceExt as _};
use pitcrew_agent::clock::Clock;
use pitcrew_agent::cluster::Cluster as ClusterOfNode;
use pitcrew_agent::fake::{Death, FakeHost, Machine};
use pitcrew_agent::finish::finish;
use pitcrew_agent::safe_load::{Options, Overlay, safe_load};
use pitcrew_agent::settings::Settings;
use pitcrew_agent::stop::Stop;
use pitcrew_agent::uninstall::{Agent, uninstall};
use pitcrew_sim::actors::{AGENT, Behaviour, Machines, OPERANDS};
use pitcrew_sim::api::Fault;
use pitcrew_sim::cluster::Cluster;
use pitcrew_sim::fleet::{Fleet, Workload};
use serde_json::json;

const NODE: &str = "gpu-01";
const NAMESPACE: &str = "gpu-operator";

async fn cluster(fleet: &Fleet) -> Cluster {
    Cluster::embedded(fleet, 7, Behaviour::default()).await.unwrap()
}

fn agent<'a>(cluster: &Cluster, host: &'a FakeHost) -> Agent<'a, FakeHost> {
    let api = cluster.api.clone().unwrap();
    let clock = Clock::starting_at(api.now());
    let of_node = ClusterOfNode::new(api.client_as("agent"), NODE, clock, Stop::never());
    let settings = Settings { drain: false, digest: "new".to_owned(), ..Settings::default() };
    Agent { host, cluster: of_node, stop: Stop::never(), settings }
}

async fn node(client: &Client) -> Node {
    Api::<Node>::all(client.clone()).get(NODE).await.unwrap()
}

fn is_cordoned(node: &Node) -> bool {
    node.spec.as_ref().and_then(|spec| spec.unschedulable).unwrap_or(false)
}

async fn apps(client: &Client) -> Vec<String> {
    let on_node = ListParams::default().fields(&format!("spec.nodeName={NODE}"));
    let pods = Api::<Pod>::all(client.clone()).list(&on_node).await.unwrap();
    pods.iter().filter_map(|pod| pod.labels().get("app").cloned()).collect()
}

/// `autoUpgrade: false`: the documented flow without a controller.
#[tokio::test(start_paused = true)]
async fn without_a_controller_the_driver_is_replaced_and_the_node_comes_back() {
    let jobs = vec![Workload::new("research", "train", 2, 1)];
    let fleet = Fleet::new(1).with_clients().with_workloads(jobs);
    let fleet = fleet.with_upgrade_policy(json!({"autoUpgrade": false}));
    let cluster = cluster(&fleet).await;
    let host = FakeHost::new(Machine::with_driver("old"));
    let before = node(&cluster.admin).await;
    assert!(apps(&cluster.admin).await.contains(&"train".to_owned()));
    let agent = agent(&cluster, &host);
    uninstall(&agent).await.unwrap();
    let emptied = node(&cluster.admin).await;
    assert!(host.machine().modules.is_empty() && is_cordoned(&emptied));
    assert_eq!(emptied.labels(), before.labels());
    assert!(!apps(&cluster.admin).await.contains(&"train".to_owned()), "there is no other node for it");
    host.change(|machine| {
        machine.install("new");
        machine.file("/run/nvidia/validations/.driver-ctr-ready", "");
    });
    finish(&agent, Some(Duration::from_mins(5))).await.unwrap();
    assert!(!is_cordoned(&node(&cluster.admin).await));
    tokio::time::sleep(Duration::from_mins(5)).await;
    let running = apps(&cluster.admin).await;
    assert!(running.contains(&"train".to_owned()), "{running:?}");
    assert!(OPERANDS.iter().all(|operand| running.contains(&operand.app.to_owned())), "{running:?}");
}

#[tokio::test(start_paused = true)]
async fn pitcrews_controller_releases_a_safe_load_whatever_its_value() {
    let cluster = cluster(&Fleet::new(2)).await;
    let controller = cluster.new_controller("controller");
    let running = tokio::spawn(async move {
        let _ = controller.run(std::future::pending()).await;
    });
    let key = "nvidia.com/gpu-driver-upgrade.driver-wait-for-safe-load";
    let config = json!({"safeDriverLoad": {"enable": true, "annotation": key}}).to_string();
    let object =
        json!({"metadata": {"name": "config", "namespace": NAMESPACE}, "data": {"config.json": config}});
    let object: ConfigMap = serde_json::from_value(object).unwrap();
    let api = Api::<ConfigMap>::namespaced(cluster.admin.clone(), NAMESPACE);
    api.create(&PostParams::default(), &object).await.unwrap();
    let host = FakeHost::new(Machine::default());
    let agent = agent(&cluster, &host);
    let options = Options {
        namespace: NAMESPACE.to_owned(),
        name: "config".to_owned(),
        key: "config.json".to_owned(),
        overlay: Overlay::default(),
        deadline: Some(Duration::from_hours(1)),
        pod: Some("pod".to_owned()),
    };
    tokio::time::sleep(Duration::from_mins(1)).await;
    let asking = safe_load(agent.host, &agent.cluster, &agent.stop, &options);
    let mut cordoned = false;
    let watching = async {
        loop {
            tokio::time::sleep(Duration::from_millis(200)).await;
            cordoned |= is_cordoned(&node(&cluster.admin).await);
        }
    };
    tokio::select! {
        result = asking => result.unwrap(),
        () = watching => unreachable!("it never ends"),
    }
    assert!(cordoned, "the node was emptied first");
    tokio::time::sleep(Duration::from_mins(10)).await;
    let after = node(&cluster.admin).await;
    assert!(!is_cordoned(&after) && !after.annotations().contains_key(key));
    running.abort();
}

/// Where an agent is killed.
#[derive(Clone, Copy, Debug)]
enum Kill {
    /// At a call to the machine.
    Host(Death),
    /// At a request to the API, before it is served or after.
    Api(Death),
}

/// Kills the agent on `host` at one of its requests to the API, and counts them.
fn kill_at_request(cluster: &Cluster, host: &Arc<FakeHost>, death: Option<Death>) -> Arc<Mutex<usize>> {
    const NEVER: Duration = Duration::from_hours(24 * 365);
    let (made, host) = (Arc::new(Mutex::new(0)), host.clone());
    let counted = made.clone();
    cluster.api.as_ref().unwrap().on_request_as("kill", move |request| {
        if request.user != AGENT {
            return None;
        }
        let mut made = made.lock().unwrap();
        *made += 1;
        let Death { after, .. } = death.filter(|death| death.at == *made)?;
        host.kill();
        Some(if after { Fault::LateReply(NEVER) } else { Fault::Delay(NEVER) })
    });
    counted
}

/// A whole upgrade of one node with work on it, whose agents are killed at one call to their machine or one request: what is
/// there when everything is over, and how many calls and requests there were.
async fn upgrade(managed: bool, kill: Option<Kill>) -> (String, usize, usize) {
    let fleet = Fleet::new(1).with_clients().with_workloads(vec![Workload::new("research", "train", 2, 1)]);
    let fleet = fleet.with_upgrade_policy(json!({"autoUpgrade": managed}));
    let behaviour = Behaviour::default().with_agents(Machines::default());
    let cluster = Cluster::embedded(&fleet, 7, behaviour).await.unwrap();
    let controller = cluster.new_controller("controller");
    let controller = tokio::spawn(async move { drop(controller.run(std::future::pending()).await) });
    tokio::time::sleep(Duration::from_mins(1)).await;
    let host = cluster.actors.behaviour().get().agents.unwrap().hosts.get(NODE).unwrap();
    let (death, refusal) = match kill {
        Some(Kill::Host(death)) => (Some(death), None),
        Some(Kill::Api(death)) => (None, Some(death)),
        None => (None, None),
    };
    host.dies(death);
    let requests = kill_at_request(&cluster, &host, refusal);
    cluster.set_driver_version("570.86.10").await.unwrap();
    if !managed {
        let driver = ListParams::default().labels("app.kubernetes.io/component=nvidia-driver");
        let pods = Api::<Pod>::namespaced(cluster.admin.clone(), NAMESPACE);
        pods.delete_collection(&DeleteParams::default(), &driver).await.unwrap();
    }
    tokio::time::sleep(Duration::from_mins(10)).await;
    controller.abort();
    let (node, machine, mut apps) = (node(&cluster.admin).await, host.machine(), apps(&cluster.admin).await);
    apps.sort();
    let marks: Vec<&String> = node.annotations().keys().filter(|key| key.contains("driver")).collect();
    let end = format!(
        "cordoned {}\nlabels {:#?}\nmarks {marks:#?}\nmodules {:#?}\nmounts {:?}\nfiles {:?}\npods {apps:#?}",
        is_cordoned(&node),
        node.labels(),
        machine.modules.keys(),
        machine.mounts,
        machine.files,
    );
    let requests = *requests.lock().unwrap();
    (end, host.calls().len(), requests)
}

#[tokio::test(start_paused = true)]
async fn killed_at_any_call_or_request_a_whole_upgrade_comes_to_the_same_end() {
    for managed in [true, false] {
        let (expected, calls, requests) = upgrade(managed, None).await;
        assert!(expected.starts_with("cordoned false") && expected.contains("nvidia_uvm"), "{expected}");
        assert!(calls > 20 && requests > 10, "{calls} calls, {requests} requests");
        let deaths = |count: usize, kill: fn(Death) -> Kill| {
            (1..=count).flat_map(move |at| [false, true].map(|after| kill(Death { at, after })))
        };
        for kill in deaths(calls, Kill::Host).chain(deaths(requests, Kill::Api)) {
            let (end, ..) = upgrade(managed, Some(kill)).await;
            assert_eq!(end, expected, "managed {managed}, {kill:?} of {calls} calls and {requests} requests");
        }
    }
}

/// A simulation runs many agents as tasks; that this compiles is the test.
#[expect(dead_code, reason = "it is compiled, not called")]
fn agents_can_be_tasks(agent: &Agent<'_, FakeHost>, options: &Options) {
    fn is_send(_: impl Send) {}
    is_send(uninstall(agent));
    is_send(finish(agent, None));
    is_send(safe_load(agent.host, &agent.cluster, &agent.stop, options));
}
