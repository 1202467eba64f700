//! The command line of each part of the control plane: as light as it gets, complete enough for DaemonSets,
//! Deployments, Jobs, disruption budgets and evictions to work for real.

use std::path::Path;

use serde_json::{Value, json};

use super::access::{Access, User, token_file_in};

/// Ports on loopback, one per server.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ports {
    pub(super) etcd: u16,
    pub(super) apiserver: u16,
}

/// Nobody asks controllers or scheduler anything, so they need no port that somebody else may have.
const NO_PORT: &str = "--secure-port=0";

/// 8 GiB, etcd's advised maximum: a fleet of 5,000 nodes with its history stays far below.
const ETCD_QUOTA_BYTES: u64 = 8 << 30;

/// The controllers that a driver upgrade meets. Pod garbage collection removes the pods of deleted nodes.
const CONTROLLERS: [&str; 10] = [
    "daemonset-controller",
    "deployment-controller",
    "disruption-controller",
    "garbage-collector-controller",
    "job-controller",
    "namespace-controller",
    "pod-garbage-collector-controller",
    "replicaset-controller",
    "statefulset-controller",
    "ttl-after-finished-controller",
];

/// One line per request; `changes` adds what was sent and what came of it, where a promise is about it.
pub(super) fn audit_policy(changes: bool) -> String {
    let about = json!([
        {"group": "", "resources": ["nodes", "nodes/*", "pods", "pods/*", "configmaps"]},
        {"group": "nvidia.com", "resources": ["clusterpolicies"]},
        {"group": "pitcrew.dev", "resources": ["driverpolicies", "rollouts"]},
    ]);
    let verbs = ["create", "update", "patch", "delete"];
    let content = json!({"level": "RequestResponse", "verbs": verbs, "resources": about});
    let rules: Vec<Value> =
        changes.then_some(content).into_iter().chain([json!({"level": "Metadata"})]).collect();
    json!({
        "apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"], "rules": rules,
    })
    .to_string()
}

pub(super) fn etcd(data: &Path, ports: Ports) -> Vec<String> {
    let clients = format!("http://127.0.0.1:{}", ports.etcd);
    vec![
        format!("--data-dir={}", data.join("etcd").display()),
        format!("--listen-client-urls={clients}"),
        format!("--advertise-client-urls={clients}"),
        "--listen-peer-urls=http://127.0.0.1:0".to_owned(),
        // The data are thrown away: waiting for the disk would only slow every write down.
        "--unsafe-no-fsync".to_owned(),
        format!("--quota-backend-bytes={ETCD_QUOTA_BYTES}"),
        "--log-level=warn".to_owned(),
    ]
}

pub(super) fn apiserver(data: &Path, ports: Ports, audit_log: Option<&Path>) -> Vec<String> {
    let certificates = data.join("certificates");
    // The server writes its own certificate and key before it reads the key for service accounts, so that one
    // RSA key serves both and nothing here has to make keys.
    let key = certificates.join("apiserver.key");
    let mut arguments = vec![
        format!("--etcd-servers=http://127.0.0.1:{}", ports.etcd),
        "--bind-address=127.0.0.1".to_owned(),
        "--advertise-address=127.0.0.1".to_owned(),
        format!("--secure-port={}", ports.apiserver),
        format!("--cert-dir={}", certificates.display()),
        format!("--token-auth-file={}", token_file_in(data).display()),
        "--authorization-mode=RBAC".to_owned(),
        "--service-account-issuer=https://pitcrew.invalid".to_owned(),
        format!("--service-account-key-file={}", key.display()),
        format!("--service-account-signing-key-file={}", key.display()),
        "--service-cluster-ip-range=10.0.0.0/24".to_owned(),
        // No token controller runs; and nodes made by hand would stay tainted not-ready.
        "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition".to_owned(),
        // A loopback address is refused in Endpoints, and nothing in here looks for the server by them.
        "--endpoint-reconciler-type=none".to_owned(),
        "--allow-privileged=true".to_owned(),
    ];
    if let Some(log) = audit_log {
        arguments.extend([
            format!("--audit-policy-file={}", data.join("audit-policy.json").display()),
            format!("--audit-log-path={}", log.display()),
            "--audit-log-mode=batch".to_owned(),
            "--audit-log-batch-max-wait=200ms".to_owned(),
            // A benchmark counts requests: room for a burst, and one file however long it gets (in MiB).
            "--audit-log-batch-buffer-size=100000".to_owned(),
            "--audit-log-maxsize=100000".to_owned(),
        ]);
    }
    arguments
}

pub(super) fn controller_manager(access: &Access) -> Vec<String> {
    let mut arguments = client_of_the_apiserver(access.kubeconfig(User::ControllerManager));
    arguments.push(NO_PORT.to_owned());
    arguments.push(format!("--controllers={}", CONTROLLERS.join(",")));
    arguments
}

pub(super) fn scheduler(access: &Access) -> Vec<String> {
    let mut arguments = client_of_the_apiserver(access.kubeconfig(User::Scheduler));
    arguments.push(NO_PORT.to_owned());
    arguments
}

fn client_of_the_apiserver(kubeconfig: &Path) -> Vec<String> {
    let kubeconfig = kubeconfig.display();
    vec![
        format!("--kubeconfig={kubeconfig}"),
        format!("--authentication-kubeconfig={kubeconfig}"),
        format!("--authorization-kubeconfig={kubeconfig}"),
        "--bind-address=127.0.0.1".to_owned(),
        "--leader-elect=false".to_owned(),
        // Their default of 20 requests a second would be what a benchmark measures.
        "--kube-api-qps=1000".to_owned(),
        "--kube-api-burst=2000".to_owned(),
    ]
}
