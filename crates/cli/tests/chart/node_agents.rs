//! What the chart lets the agents of a node do: what they ask for, and each to its own node alone.

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

/// The token of a pod says on which node the pod is, and that is the only node it may write.
pub(crate) fn own_node_only(stage: &Stage) -> Outcome {
    stage.sh(&format!("{} --set '{VALUE}'", documented("README.md", "helm install pitcrew ")?))?;
    available(stage)?;
    stage.sh("kubectl create serviceaccount node-agent -n gpu-operator")?;
    let pod = r#"{"spec": {"nodeName": "gpu-01", "serviceAccountName": "node-agent"}}"#;
    stage.sh(&format!("kubectl run agent -n gpu-operator --image=agent --overrides='{pod}'"))?;
    let bound = stage.sh(
        "kubectl create token node-agent -n gpu-operator --bound-object-kind Pod --bound-object-name agent",
    )?;
    let loose = stage.sh("kubectl create token node-agent -n gpu-operator")?;
    let server = stage.sh("kubectl config view --minify -ojsonpath='{.clusters[0].cluster.server}'")?;
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
