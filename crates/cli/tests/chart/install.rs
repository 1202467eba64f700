//! Install, upgrade, test, uninstall: each by the command that the manual gives.

use std::fs;

use libtest_mimic::Failed;

use crate::render::{Outcome, must, top};
use crate::stage::Stage;

const DRIVERS: &str = "kubectl get pods -n gpu-operator -lapp=nvidia-driver-daemonset \
     -ojsonpath='{.items[*].spec.containers[0].image}'";
const STATES: &str = "kubectl get nodes -l nvidia.com/gpu.present \
     -ojsonpath='{.items[*].metadata.labels.nvidia\\.com/gpu-driver-upgrade-state}'";

/// The line of a document that begins so.
pub(crate) fn documented(document: &str, beginning: &str) -> Result<String, Failed> {
    let text = fs::read_to_string(top().join(document))?;
    let line = text.lines().find(|line| line.starts_with(beginning)).map(str::to_owned);
    line.ok_or_else(|| format!("{document} has no line that begins with {beginning}").into())
}

/// One release from its beginning to its end.
pub(crate) fn install(stage: &Stage) -> Outcome {
    stage.sh(&documented("README.md", "helm install pitcrew ")?)?;
    available(stage)?;
    upgrades_drivers(stage, "550.54.01")?;
    upgrade(stage)?;
    upgrades_drivers(stage, "550.54.02")?;
    test(stage)?;
    let refused = stage.refused()?;
    must(refused.is_empty(), || format!("the chart grants too little: {refused:?}"))?;
    uninstall(stage)
}

/// The same with all that can be switched off switched off: fewer permissions, and nobody misses them.
pub(crate) fn features_off(stage: &Stage) -> Outcome {
    let off = ["nvsentinel", "clients", "networkOperator"].map(|feature| format!("features.{feature}=false"));
    stage.sh(&format!("{} --set {}", documented("README.md", "helm install pitcrew ")?, off.join(",")))?;
    available(stage)?;
    upgrades_drivers(stage, "550.54.01")?;
    test(stage)?;
    let refused = stage.refused()?;
    must(refused.is_empty(), || format!("the chart grants too little: {refused:?}"))
}

/// Both replicas are Ready, on two nodes, and one leads.
pub(crate) fn available(stage: &Stage) -> Outcome {
    stage.sh("kubectl rollout status -n gpu-operator deployment/pitcrew --timeout=90s")?;
    let hosts = "kubectl get pods -n gpu-operator -lapp.kubernetes.io/component=controller \
         -ojsonpath='{.items[*].spec.nodeName}'";
    let one_each = |hosts: &str| matches!(hosts, "host-1 host-2" | "host-2 host-1");
    stage.until(hosts, "there are two replicas, on two hosts", one_each)?;
    stage
        .until(
            "kubectl get leases -n gpu-operator -ojsonpath='{.items[*].spec.holderIdentity}'",
            "a replica leads",
            |holder| holder.starts_with("pitcrew-"),
        )
        .map(drop)
}

/// The whole point.
fn upgrades_drivers(stage: &Stage, version: &str) -> Outcome {
    let patch = format!(
        r#"[{{"op": "replace", "path": "/spec/driver/version", "value": "{version}"}}, {{"op": "replace", "path": "/spec/driver/upgradePolicy/autoUpgrade", "value": true}}]"#
    );
    stage.sh(&format!("kubectl patch clusterpolicy/cluster-policy --type=json -p='{patch}'"))?;
    let tag = format!(":{version}-");
    stage.until(DRIVERS, "every driver is upgraded", |images| images.matches(&tag).count() == 3)?;
    let done = |states: &str| states.split_whitespace().filter(|state| *state == "upgrade-done").count() == 3;
    stage.until(STATES, "every node is done", done)?;
    let out = stage.sh("kubectl get nodes -ojsonpath='{.items[*].spec.unschedulable}'")?;
    must(out.is_empty(), || "a node is still cordoned".to_owned())
}

/// From an older chart: other values replace the pods, and the definitions become new.
fn upgrade(stage: &Stage) -> Outcome {
    let older = stage.dir().join("older");
    let definition = older.join("files/crds/rollouts.pitcrew.dev.yaml");
    stage.sh(&format!("cp -r charts/pitcrew '{}'", older.display()))?;
    fs::write(&definition, fs::read_to_string(&definition)?.replace("name: Phase", "name: OlderPhase"))?;
    stage
        .sh(&format!("helm upgrade pitcrew '{}' --namespace gpu-operator --reuse-values", older.display()))?;
    let columns = "kubectl get crd rollouts.pitcrew.dev -ojsonpath='{.spec.versions[0].additionalPrinterColumns[*].name}'";
    let before = stage.sh(columns)?;
    must(before.contains(" OlderPhase "), || format!("the older definition has the columns {before}"))?;
    let line = documented("docs/install.md", "helm upgrade pitcrew ")?;
    stage.sh(&format!("{line} --set controller.podAnnotations.changed=yes"))?;
    let now = stage.sh(columns)?;
    must(now.contains(" Phase "), || format!("the definition was not upgraded: {now}"))?;
    available(stage)
}

/// As somebody who may only read.
fn test(stage: &Stage) -> Outcome {
    stage.sh("helm test pitcrew --namespace gpu-operator")?;
    let left = stage.sh("kubectl get clusterrolebinding -oname")?;
    must(!left.contains("pitcrew-test"), || "the test's permissions are still there".to_owned())
}

/// Everything goes but the definitions and what people wrote; and it can be installed again.
fn uninstall(stage: &Stage) -> Outcome {
    // The first policy, as the notes of the release give it.
    stage
        .sh("helm get notes pitcrew --namespace gpu-operator | sed -n '/^kubectl apply/,/^END$/p' | sh -e")?;
    stage.sh("kubectl get driverpolicy gpu")?;
    stage.sh(&documented("docs/install.md", "helm uninstall pitcrew ")?)?;
    let kinds = "deployments,services,networkpolicies,poddisruptionbudgets,serviceaccounts,roles,rolebindings,\
         clusterroles,clusterrolebindings";
    let left = stage.sh(&format!("kubectl get {kinds} -A -lapp.kubernetes.io/instance=pitcrew -oname"))?;
    must(left.is_empty(), || format!("left behind: {left}"))?;
    stage.sh("kubectl get driverpolicy gpu")?;
    stage.sh(&documented("README.md", "helm install pitcrew ")?)?;
    available(stage)
}
