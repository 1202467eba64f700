//! The Job of the client refresh, run by the program itself with the permissions of the chart.

use crate::render::{Outcome, must};
use crate::stage::Stage;

const VALUES: &str = "charts/pitcrew/examples/helm/values.yaml --set postInstallHooks.dra.settle=1s";
const JOBS: &str = "kubectl get jobs -n gpu-operator \
     -ojsonpath='{range .items[*]}{.metadata.name} {.status.succeeded} {.status.failed}{\"\\n\"}{end}'";

/// Helm waits for the hook, so a release that is installed has fresh clients; the next one replaces the Job.
pub(crate) fn by_helm(stage: &Stage) -> Outcome {
    stage.sh("kubectl create namespace nvidia-dra-driver-gpu")?;
    let install = format!(
        "helm upgrade --install pitcrew charts/pitcrew --namespace gpu-operator --values {VALUES} --timeout 2m"
    );
    stage.sh(&install)?;
    let first = stage
        .sh(&format!("{JOBS} && kubectl get jobs -n gpu-operator -ojsonpath='{{.items[*].metadata.uid}}'"))?;
    must(first.starts_with("pitcrew-refresh-clients 1 \n"), || format!("the Jobs: {first}"))?;
    stage.sh(&format!("{install} --set postInstallHooks.dra.revision=2"))?;
    let second = stage
        .sh(&format!("{JOBS} && kubectl get jobs -n gpu-operator -ojsonpath='{{.items[*].metadata.uid}}'"))?;
    must(second.starts_with("pitcrew-refresh-clients 1 \n") && second != first, || {
        format!("the Jobs: {second}")
    })?;
    not_refused(stage)
}

/// Argo CD applies what Helm renders, again and again: nothing runs twice, and a new version runs once.
pub(crate) fn by_argocd(stage: &Stage) -> Outcome {
    stage.sh("kubectl create namespace nvidia-dra-driver-gpu")?;
    let apply = |more: &str| {
        stage.sh(&format!(
            "helm template pitcrew charts/pitcrew --namespace gpu-operator --values {VALUES} \
             --set postInstallHooks.dra.deployer=argocd {more} | kubectl apply --server-side -f -"
        ))
    };
    let succeeded =
        |jobs: usize| move |said: &str| said.lines().filter(|line| line.ends_with(" 1 ")).count() == jobs;
    apply("")?;
    stage.until(JOBS, "the Job has succeeded", succeeded(1))?;
    apply("")?;
    let again = stage.sh(JOBS)?;
    must(again.lines().count() == 1, || format!("another Job without another version: {again}"))?;
    apply("--set postInstallHooks.dra.driverVersion=590.1.1")?;
    stage.until(JOBS, "the Job of the new version has succeeded", succeeded(2))?;
    not_refused(stage)
}

fn not_refused(stage: &Stage) -> Outcome {
    let refused = stage.refused()?;
    must(refused.is_empty(), || format!("the chart grants too little: {refused:?}"))
}
