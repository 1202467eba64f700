//! What is around the controller: a live GPU Operator, definitions, permissions, ports.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};

use libtest_mimic::Failed;
use pitcrew_sim::plane::User;
use serde_json::{Value, json};

use crate::controller::{Controller, free_port};
use crate::mistakes::until_cluster_policy_event;
use crate::stage::{Outcome, Stage, all_done, must};

/// Its upgrade controller may act on the same nodes: hands off, and say so.
pub(crate) fn live_gpu_operator(stage: &mut Stage) -> Outcome {
    let _controller = Controller::start(stage)?;
    stage.until_known()?;
    // An hour: nobody renews it here, and it must hold for the whole story.
    let lease = r#"{"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": {"name": "53822513.nvidia.com", "namespace": "gpu-operator"},
        "spec": {"holderIdentity": "gpu-operator-7d9f_1", "leaseDurationSeconds": 3600, "renewTime": "'$(date -u +%Y-%m-%dT%H:%M:%S.000000Z)'"}}"#;
    stage.sh(&format!("echo '{lease}' | kubectl apply -f -"))?;
    until_cluster_policy_event(stage, "GPU Operator is live")?;
    let version = stage.patch_version()?;
    let states = stage.stands_still()?;
    must(all_done(&states), || format!("nodes were touched: {states:?}"))?;

    stage.sh("kubectl delete lease -n gpu-operator 53822513.nvidia.com")?;
    stage.until_upgraded(&version)
}

/// The sentence is the cure.
pub(crate) fn no_definitions(stage: &mut Stage) -> Outcome {
    stage.sh("kubectl delete crd driverpolicies.pitcrew.dev rollouts.pitcrew.dev")?;
    let said = refused(stage, stage.plane().kubeconfig_of(User::Pitcrew), free_port()?)?;
    let cure = "the custom resource driverpolicies.pitcrew.dev is not installed. \
         Install it with: pitcrew crd | kubectl apply -f -";
    must(said.contains(cure), || format!("the controller said: {said}"))?;
    stage.install_definitions()
}

/// A service account that may do nothing learns all that it needs at once.
pub(crate) fn no_permissions(stage: &mut Stage) -> Outcome {
    let kubeconfig = service_account(stage, "nobody")?;
    let said = refused(stage, &kubeconfig, free_port()?)?;
    for part in
        ["missing permissions: nodes get, list, watch, patch", "pods/eviction create", "rollouts.pitcrew.dev"]
    {
        must(said.contains(part), || format!("the controller did not say \"{part}\": {said}"))?;
    }
    stage.sh("kubectl delete serviceaccount nobody").map(drop)
}

/// A kubeconfig for a service account that is made for it.
pub(crate) fn service_account(stage: &Stage, name: &str) -> Result<PathBuf, Failed> {
    stage.sh(&format!("kubectl create serviceaccount {name}"))?;
    let token = stage.sh(&format!("kubectl create token {name}"))?;
    let kubeconfig = stage.plane().data_dir().join(format!("kubeconfig-{name}"));
    let mut config: Value = serde_json::from_slice(&fs::read(stage.plane().kubeconfig())?)?;
    config["users"][0]["user"] = json!({"token": token.trim()});
    fs::write(&kubeconfig, config.to_string())?;
    Ok(kubeconfig)
}

/// Somebody else listens there.
pub(crate) fn address_in_use(stage: &mut Stage) -> Outcome {
    let taken = TcpListener::bind(("127.0.0.1", 0))?;
    let said = refused(stage, stage.plane().kubeconfig_of(User::Pitcrew), taken.local_addr()?.port())?;
    must(said.contains("choose another address with --listen"), || format!("the controller said: {said}"))
}

/// Runs a controller that must end by itself with 1, and returns what it said.
fn refused(stage: &Stage, kubeconfig: &Path, port: u16) -> Result<String, Failed> {
    let kubeconfig = kubeconfig.display();
    let output = stage
        .attempt(&format!("exec pitcrew controller --kubeconfig '{kubeconfig}' --listen 127.0.0.1:{port}"))?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    must(output.status.code() == Some(1), || format!("it ended with {}: {said}", output.status))?;
    Ok(said)
}
