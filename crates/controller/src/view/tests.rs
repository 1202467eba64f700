use serde_json::{Value, json};

use super::*;

fn says(container: &Value) -> Option<String> {
    let status = serde_json::from_value(json!({"containerStatuses": [container]})).unwrap();
    trouble(&status).map(|trouble| format!("{}: {}", trouble.reason, trouble.message))
}

#[test]
fn a_crash_loop_says_how_the_container_ended_and_nothing_else_does() {
    let waiting = |reason: &str| json!({"waiting": {"reason": reason, "message": "later"}});
    let ended =
        json!({"terminated": {"exitCode": 1, "reason": "Error", "message": "first\n the last line \n\n"}});
    let silent = json!({"terminated": {"exitCode": 1, "reason": "Error"}});
    for (state, last, expected) in [
        (waiting("CrashLoopBackOff"), &ended, Some("CrashLoopBackOff: the last line")),
        (waiting("CrashLoopBackOff"), &silent, Some("CrashLoopBackOff: later")),
        (waiting("ImagePullBackOff"), &ended, Some("ImagePullBackOff: later")),
        (waiting("PodInitializing"), &ended, None),
        (ended.clone(), &silent, Some("Error: the last line")),
        (json!({"running": {}}), &ended, None),
    ] {
        let container = json!({"name": "c", "state": state, "lastState": last});
        assert_eq!(says(&container).as_deref(), expected, "{container}");
    }
}

#[test]
fn last_words_are_a_sentence_and_no_log() {
    let message = "ü".repeat(4096);
    let long =
        json!({"name": "c", "state": {"terminated": {"exitCode": 2, "reason": "Error", "message": message}}});
    assert_eq!(says(&long).unwrap().chars().count(), "Error: ".len() + LAST_WORDS_MAX);
}

/// What is known of who keeps an object, by its labels and annotations. Its name is `gpu`.
fn kept_by(labels: &Value, annotations: &Value) -> Option<String> {
    let meta = json!({"name": "gpu", "labels": labels, "annotations": annotations});
    manager(&serde_json::from_value(meta).unwrap())
}

#[test]
fn what_git_keeps_is_known_by_the_marks_of_argo_cd_and_flux() {
    let chart = json!({
        "app.kubernetes.io/instance": "gpu-operator", "app.kubernetes.io/managed-by": "Helm",
        "helm.sh/chart": "gpu-operator-v25.3.0",
    });
    let also = |more: Value| {
        let mut labels = chart.clone();
        labels.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        labels
    };
    let (none, id) = (json!({}), |id: &str| json!({"argocd.argoproj.io/tracking-id": id}));
    for (labels, annotations, expected) in [
        // By annotation, alone and with the label that says nothing by itself.
        (
            none.clone(),
            id("gpu-stack:nvidia.com/ClusterPolicy:/gpu"),
            Some("Argo CD (application gpu-stack)"),
        ),
        (
            none.clone(),
            id("gpu-stack:nvidia.com/ClusterPolicy:argocd/gpu"),
            Some("Argo CD (application gpu-stack)"),
        ),
        (
            chart.clone(),
            id("team_gpu-stack:apps/DaemonSet:gpu-operator/gpu"),
            Some("Argo CD (application team_gpu-stack)"),
        ),
        // By a label of its own.
        (
            also(json!({"argocd.argoproj.io/instance": "gpu-stack"})),
            none.clone(),
            Some("Argo CD (application gpu-stack)"),
        ),
        (
            also(
                json!({"kustomize.toolkit.fluxcd.io/name": "infra", "kustomize.toolkit.fluxcd.io/namespace": "flux-system"}),
            ),
            none.clone(),
            Some("Flux (kustomization infra)"),
        ),
        (
            also(
                json!({"helm.toolkit.fluxcd.io/name": "gpu-operator", "helm.toolkit.fluxcd.io/namespace": "gpu-operator"}),
            ),
            none.clone(),
            Some("Flux (helmrelease gpu-operator)"),
        ),
        // What a chart or a person leaves.
        (chart.clone(), json!({"meta.helm.sh/release-name": "gpu-operator"}), None),
        (json!({"app.kubernetes.io/instance": "gpu-stack"}), none.clone(), None),
        (none.clone(), json!({"argocd.argoproj.io/sync-wave": "2"}), None),
        (none.clone(), json!({"kustomize.toolkit.fluxcd.io/prune": "disabled"}), None),
        (json!({"kustomize.toolkit.fluxcd.io/namespace": "flux-system"}), none.clone(), None),
        // Copied from another object, or emptied.
        (none.clone(), id("gpu-stack:nvidia.com/ClusterPolicy:/other"), None),
        (none.clone(), id("gpu-stack:nvidia.com/ClusterPolicy:/not-gpu"), None),
        (none.clone(), id(""), None),
        (json!({"argocd.argoproj.io/instance": "", "helm.toolkit.fluxcd.io/name": ""}), none.clone(), None),
    ] {
        assert_eq!(kept_by(&labels, &annotations).as_deref(), expected, "{labels} {annotations}");
    }
}

#[test]
fn a_daemon_set_that_git_keeps_says_so() {
    let object = |annotations: &Value| -> ApiDaemonSet {
        let metadata = json!({
            "name": "nvidia-driver-daemonset", "namespace": "gpu-operator", "uid": "u", "resourceVersion": "7",
            "labels": {"app": "nvidia-driver-daemonset", "app.kubernetes.io/instance": "gpu-operator"},
            "annotations": annotations,
        });
        let container = json!({"name": "driver", "image": "nvcr.io/nvidia/driver:565.57.01-ubuntu22.04"});
        let spec = json!({"selector": {}, "template": {"spec": {"containers": [container]}}});
        serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap()
    };
    let id = "gpu-stack:apps/DaemonSet:gpu-operator/nvidia-driver-daemonset";
    let kept = daemon_set(&object(&json!({"argocd.argoproj.io/tracking-id": id}))).unwrap();
    assert_eq!(kept.manager.as_deref(), Some("Argo CD (application gpu-stack)"));
    assert_eq!(daemon_set(&object(&json!({}))).unwrap().manager, None);
}
