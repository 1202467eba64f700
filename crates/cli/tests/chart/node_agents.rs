//! What the chart lets the agents of a node do: what they ask for, and each to its own node alone.

use std::fs;

use libtest_mimic::Failed;
use serde_json::json;

use crate::install::{available, documented};
use crate::render::{Outcome, must, name, render};
use crate::stage::Stage;

/// As people name it in the values.
const VALUE: &str = "nodeAgents.serviceAccounts={gpu-operator/node-agent}";
/// What it is called in the release.
const NAME: &str = "pitcrew-node-agent";

/// Nothing is there for nobody.
pub(crate) fn only_if_named() -> Outcome {
    let agents = |arguments: &[&str]| -> Result<Vec<String>, libtest_mimic::Failed> {
        let objects = render(arguments)?;
        let ours = objects.iter().filter(|object| name(object).contains(NAME));
        Ok(ours
            .map(|object| format!("{} {}", object["kind"].as_str().unwrap_or_default(), name(object)))
            .collect())
    };
    let nobody = agents(&[])?;
    must(nobody.is_empty(), || format!("for nobody: {nobody:?}"))?;
    let some = agents(&["--set", VALUE])?;
    must(some.len() == 8, || format!("{some:?}"))
}

/// Installs the chart with a node agent in it; returns the token of a pod on `gpu-01`.
fn token(stage: &Stage) -> Result<String, Failed> {
    stage.sh(&format!("{} --set '{VALUE}'", documented("README.md", "helm install pitcrew ")?))?;
    available(stage)?;
    stage.sh("kubectl create serviceaccount node-agent -n gpu-operator")?;
    let pod = r#"{"spec": {"nodeName": "gpu-01", "serviceAccountName": "node-agent"}}"#;
    stage.sh(&format!("kubectl run agent -n gpu-operator --image=agent --overrides='{pod}'"))?;
    let bound = "--bound-object-kind Pod --bound-object-name agent";
    Ok(stage.sh(&format!("kubectl create token node-agent -n gpu-operator {bound}"))?.trim().to_owned())
}

fn server(stage: &Stage) -> Result<String, Failed> {
    stage.sh("kubectl config view --minify -ojsonpath='{.clusters[0].cluster.server}'")
}

/// The token of a pod says on which node the pod is, and that is the only node it may write.
pub(crate) fn own_node_only(stage: &Stage) -> Outcome {
    let bound = token(stage)?;
    let loose = stage.sh("kubectl create token node-agent -n gpu-operator")?;
    let server = server(stage)?;
    // Without the certificate of the kubeconfig: it would count before any token.
    let agent = |token: &str, command: &str| {
        let who = format!(
            "--kubeconfig=/dev/null --server={server} --insecure-skip-tls-verify --token={}",
            token.trim()
        );
        format!("kubectl {who} {command} 2>&1 || true")
    };
    let pause = |node: &str| format!("label node {node} --overwrite nvidia.com/gpu.deploy.dcgm=p$(date +%N)");
    let elsewhere = "a node agent writes its own node only, and this token is of a pod on gpu-01";
    // A new policy takes a moment.
    stage.until(&agent(&bound, &pause("gpu-02")), "another node is refused", |said| {
        said.contains(elsewhere)
    })?;
    let nowhere = "this token is of no pod on a node";
    stage.until(&agent(&loose, &pause("gpu-01")), "a token of no pod is refused", |said| {
        said.contains(nowhere)
    })?;
    let says = |command: &str, words: &str| {
        let said = stage.sh(&agent(&bound, command))?;
        must(said.contains(words), || format!("`{command}`: {said}"))
    };
    says(&pause("gpu-01"), "gpu-01 labeled")?;
    says(r#"patch node gpu-01 --type=merge -p '{"spec": {"unschedulable": true}}'"#, "gpu-01 patched")?;
    let taint =
        r#"patch node gpu-01 --type=merge -p '{"spec": {"taints": [{"key": "a", "effect": "NoExecute"}]}}'"#;
    says(taint, "leaves its taints alone")?;
    says("delete pod agent -n gpu-operator", "cannot delete resource")?;
    says("get secrets -n gpu-operator", "cannot list resource")
}

/// The driver of this node is in use, so that nothing of it is unloaded: all that comes before is done.
const MACHINE: [(&str, &str); 5] = [
    ("proc/modules", "nvidia 56700928 1 - Live 0x0000000000000000\n"),
    ("proc/self/mountinfo", ""),
    ("proc/sys/kernel/random/boot_id", "boot-1\n"),
    ("sys/module/nvidia/refcnt", "1\n"),
    ("host/etc/os-release", ""),
];
const SAFE_LOAD: &str = "nvidia.com/gpu-driver-upgrade.driver-wait-for-safe-load";
const ENABLED: &str = "nvidia.com/gpu-driver-upgrade-enabled";

/// The program itself, with the token of such a pod: it empties its node and asks for a safe load, and is refused nothing.
pub(crate) fn refused_nothing(stage: &Stage) -> Outcome {
    // Who enters another root directory has to be root, if only of a namespace of its own; and no real driver is touched.
    let namespace = "unshare --user --map-root-user";
    let may_enter = stage.attempt(&format!("{namespace} true"))?.status.success();
    let token = token(stage)?;
    let root = stage.dir().join("machine");
    for (path, text) in MACHINE {
        let path = root.join(path);
        fs::create_dir_all(path.parent().ok_or("no parent")?)?;
        fs::write(path, text)?;
    }
    let kubeconfig = stage.dir().join("agent.kubeconfig");
    let cluster = json!({"server": server(stage)?, "insecure-skip-tls-verify": true});
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    });
    fs::write(&kubeconfig, config.to_string())?;
    let (kubeconfig, root) = (kubeconfig.display(), root.display());
    hand_over(stage)?;
    if may_enter {
        let arguments = format!("--kubeconfig {kubeconfig} --machine-root {root}");
        unloads_nothing(stage, &format!("{namespace} pitcrew"), &arguments)?;
    } else {
        println!("this kernel allows no private user namespace here: the driver manager was not tried");
    }
    safe_load(stage, &kubeconfig.to_string())?;
    let refused =
        stage.refused()?.into_iter().filter(|line| line.contains(":node-agent: ")).collect::<Vec<_>>();
    must(refused.is_empty(), || format!("refused was {refused:?}"))
}

/// The driver manager empties its node, and finds that the driver is in use.
fn unloads_nothing(stage: &Stage, program: &str, arguments: &str) -> Outcome {
    claim(stage)?;
    let uninstall = format!(
        "ENABLE_AUTO_DRAIN=false DRAIN_USE_FORCE=true {program} node driver-manager uninstall_driver \
         --node-name gpu-01 {arguments} 2>&1 || true"
    );
    let said = stage.sh(&uninstall)?;
    must(said.contains("the driver cannot be unloaded, and nothing of it was"), || said.clone())?;
    let left = stage.sh("kubectl get pod holder -n default --ignore-not-found -oname")?;
    must(left.is_empty(), || format!("it was not evicted: {left}; {said}"))?;
    let node = stage.sh("kubectl get node gpu-01 -oyaml")?;
    must(!node.contains("paused-for") && !node.contains("unschedulable"), || node)?;
    let events = stage.sh("kubectl get events -n default -ojsonpath='{.items[*].message}'")?;
    must(events.contains("The driver manager failed"), || events)
}

/// Asks for a safe load, and gets it.
fn safe_load(stage: &Stage, kubeconfig: &str) -> Outcome {
    let load = json!({"safeDriverLoad": {"enable": true, "annotation": SAFE_LOAD}});
    stage.sh(&format!(
        "kubectl create configmap safe-load -n gpu-operator --from-literal=config.json='{load}'"
    ))?;
    stage.sh(&format!(
        "timeout 60 pitcrew node safe-load --node-name gpu-01 --configmap-name safe-load --configmap-namespace gpu-operator \
         --kubeconfig {kubeconfig} & \
         until kubectl get node gpu-01 -oyaml | grep -q {SAFE_LOAD}; do sleep 0.2; kill -0 $! || exit 1; done; \
         kubectl annotate node gpu-01 {SAFE_LOAD}-; wait $!"
    ))
    .map(drop)
}

/// The upgrade controller does not look after the node any more.
fn hand_over(stage: &Stage) -> Outcome {
    let off = json!({"spec": {"driver": {"upgradePolicy": {"autoUpgrade": false}}}});
    stage.sh(&format!("kubectl patch clusterpolicy cluster-policy --type=merge -p '{off}'"))?;
    let stays_away = format!(
        "kubectl annotate node gpu-01 {ENABLED}- >&2; sleep 2; kubectl get node gpu-01 -oyaml | grep {ENABLED} || true"
    );
    stage.until(&stays_away, "nobody claims the node", str::is_empty).map(drop)
}

/// A pod on the node that holds a device.
fn claim(stage: &Stage) -> Outcome {
    let request = json!({"name": "r", "exactly": {"deviceClassName": "gpu.nvidia.com"}});
    let claim = json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "gpu", "namespace": "default"},
        "spec": {"devices": {"requests": [request]}},
    });
    let result = json!({"request": "r", "driver": "gpu.nvidia.com", "pool": "gpu-01", "device": "gpu-0"});
    let status = json!({"status": {"allocation": {"devices": {"results": [result]}}}});
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "holder", "namespace": "default"},
        "spec": {
            "nodeName": "gpu-01",
            "resourceClaims": [{"name": "gpu", "resourceClaimName": "gpu"}],
            "containers": [{"name": "main", "image": "m:1"}],
        },
    });
    stage.sh(&format!("echo '{claim}' | kubectl create -f -"))?;
    stage.sh(&format!(
        "kubectl patch resourceclaim gpu -n default --subresource=status --type=merge -p '{status}'"
    ))?;
    stage.sh(&format!("echo '{pod}' | kubectl create -f -"))?;
    stage.until("kubectl get pod holder -n default -ojsonpath={.status.phase}", "it runs", |phase| {
        phase == "Running"
    })?;
    Ok(())
}
