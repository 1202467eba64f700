//! pitcrew's own commands, typed beside `kubectl` by a person who only has a kubeconfig.

use libtest_mimic::Failed;

use crate::controller::Controller;
use crate::neighbours::service_account;
use crate::stage::{Outcome, Stage, must, until};
use crate::upgrades::one_fails;

const NOTEBOOK: &str = r#"{"apiVersion": "v1", "kind": "List", "items": [
    {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team-x"}},
    {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"namespace": "team-x", "name": "notebook"},
     "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "notebook"}}}},
    {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"namespace": "team-x", "name": "notebook"},
     "spec": {"replicas": 1, "selector": {"matchLabels": {"app": "notebook"}}, "template": {
        "metadata": {"labels": {"app": "notebook"}},
        "spec": {"terminationGracePeriodSeconds": 1, "containers": [{"name": "main", "image": "registry.example/notebook:1",
            "resources": {"limits": {"nvidia.com/gpu": "1"}, "requests": {"nvidia.com/gpu": "1"}}}]}}}}
]}"#;

const READER: &str = "kubectl create clusterrole reader --verb=get,list,watch --resource='*.*' \
     && kubectl create clusterrolebinding reader --clusterrole=reader --serviceaccount=default:reader";

/// Ends with this code; what it printed, and its sentence.
fn ends(stage: &Stage, line: &str, code: i32) -> Result<(String, String), Failed> {
    let output = stage.attempt(line)?;
    let (out, said) = (String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?);
    let as_it_should = output.status.code() == Some(code) && said.lines().count() <= 1;
    must(as_it_should, || {
        format!("`{line}` ended with {}, said:\n{said}\nand printed:\n{out}", output.status)
    })?;
    Ok((out, said))
}

/// A command that works prints something that contains this.
fn prints(stage: &Stage, line: &str, what: &str) -> Result<String, Failed> {
    let (out, said) = ends(stage, line, 0)?;
    must(out.contains(what) && said.is_empty(), || {
        format!("`{line}` did not print \"{what}\":\n{out}{said}")
    })?;
    Ok(out)
}

/// A command that fails says a sentence that contains this, and prints nothing.
fn refuses(stage: &Stage, line: &str, what: &str) -> Outcome {
    let (out, said) = ends(stage, line, 1)?;
    let sentence = said.starts_with("pitcrew: ") && said.contains(what) && out.is_empty();
    must(sentence, || format!("`{line}` did not say \"{what}\":\n{said}{out}"))
}

fn wait_to_the_end(stage: &Stage) -> Outcome {
    let (lines, _) = ends(stage, "pitcrew status --wait --timeout 50s", 0)?;
    must(lines.contains(": 3 of 3 nodes done"), || format!("it did not say how it went:\n{lines}"))
}

/// The switch of the documents, without having to know where it is.
pub(crate) fn pause_and_wait(stage: &mut Stage) -> Outcome {
    let controller = Controller::start(stage)?;
    stage.until_known()?;
    prints(stage, "pitcrew status", "✔ 3 nodes done, nothing to do")?;
    prints(stage, "pitcrew explain node/gpu-01", "gpu-01 is done: driver ")?;
    let version = stage.patch_version()?;
    stage.until_states("a driver restarts", |states| {
        states.values().any(|state| state == "pod-restart-required")
    })?;
    prints(stage, "pitcrew pause", "clusterpolicy/cluster-policy is paused (autoUpgrade: false)")?;
    controller.until_metric(pitcrew_core::contract::metric::AUTO_UPGRADE_ENABLED, 0.0)?;
    prints(stage, "pitcrew status", "go on with: pitcrew resume cluster-policy")?;
    let half_way = stage
        .states()?
        .into_iter()
        .find(|(_, state)| state == "pod-restart-required" || state == "validation-required");
    if let Some((node, _)) = half_way {
        prints(stage, &format!("pitcrew explain {node}"), "ClusterPolicy cluster-policy")?;
    }
    let (lines, said) = ends(stage, "pitcrew status --wait --timeout 3s", 1)?;
    must(lines.contains("paused, "), || format!("it did not say that it is paused:\n{lines}"))?;
    must(said.starts_with("pitcrew: timed out after 3s: "), || format!("it said:\n{said}"))?;

    prints(
        stage,
        "pitcrew resume cluster-policy",
        "clusterpolicy/cluster-policy is resumed (autoUpgrade: true)",
    )?;
    wait_to_the_end(stage)?;
    stage.until_upgraded(&version)
}

/// The budget and the pod are named, and what is offered helps.
pub(crate) fn blocked(stage: &mut Stage) -> Outcome {
    let _controller = Controller::start(stage)?;
    stage.until_known()?;
    must(stage.apply(NOTEBOOK)?.status.success(), || "the notebook was refused".to_owned())?;
    stage.sh("kubectl -n team-x rollout status deployment notebook --timeout=60s")?;
    let pod = "kubectl -n team-x get pods -l app=notebook -ojsonpath='{.items[0].metadata.name} {.items[0].spec.nodeName}'";
    let pod = stage.sh(pod)?;
    let (pod, node) = pod.split_once(' ').ok_or("no pod")?;
    let version = stage.patch_version()?;
    let answer = until("the budget blocks", || {
        let answer = stage.sh(&format!("pitcrew explain node/{node}"))?;
        Ok(answer.contains("PodDisruptionBudget team-x/notebook").then_some(answer))
    })?;
    must(answer.contains(&format!("Pod team-x/{pod}")), || format!("the pod is not named:\n{answer}"))?;
    prints(stage, "pitcrew status", &format!("pitcrew explain node/{node}"))?;
    let json = stage.sh(&format!("pitcrew explain {node} -o json"))?;
    let json: serde_json::Value = serde_json::from_str(&json)?;
    must(json["drivers"][0]["cause"][0]["kind"] == "PodDisruptionBudget", || format!("{json:#}"))?;

    let cure =
        answer.lines().find(|line| line.contains("kubectl -n team-x scale")).ok_or("no cure is offered")?;
    stage.sh(&cure[cure.find("kubectl").unwrap_or_default()..])?;
    wait_to_the_end(stage)?;
    stage.until_upgraded(&version)?;
    stage.sh("kubectl delete namespace team-x").map(drop)
}

/// The documented label, without having to know it.
pub(crate) fn skip(stage: &mut Stage) -> Outcome {
    let _controller = Controller::start(stage)?;
    stage.until_known()?;
    prints(stage, "pitcrew skip gpu-02 --dry-run", "(dry run, nothing was changed)")?;
    let label =
        r"kubectl get node gpu-02 -ojsonpath='{.metadata.labels.nvidia\.com/gpu-driver-upgrade\.skip}'";
    must(stage.sh(label)?.is_empty(), || "a dry run set the label".to_owned())?;
    prints(stage, "pitcrew skip gpu-02", "nvidia.com/gpu-driver-upgrade.skip=true")?;
    must(stage.sh(label)? == "true", || "the label is not there".to_owned())?;
    let version = stage.patch_version()?;
    let (_, said) = ends(stage, "pitcrew status --wait --timeout 50s", 1)?;
    must(said.contains("gpu-02 is not done, and left out by its skip label"), || {
        format!("it said:\n{said}")
    })?;
    prints(stage, "pitcrew explain gpu-02", "pitcrew skip gpu-02 --undo")?;
    prints(stage, "pitcrew skip gpu-02 --undo", "gpu-02 takes part")?;
    wait_to_the_end(stage)?;
    stage.until_upgraded(&version)
}

/// The documented label for a node that failed; others are left alone.
pub(crate) fn retry(stage: &mut Stage) -> Outcome {
    let (_controller, version) = one_fails(stage)?;
    let (_, said) = ends(stage, "pitcrew status --wait --timeout 50s", 1)?;
    must(said.contains("gpu-02 failed: driver pod not ready after 6 s"), || format!("it said:\n{said}"))?;
    stage.until_states("the others are done", |states| {
        states
            .iter()
            .all(|(node, state)| state == if node == "gpu-02" { "upgrade-failed" } else { "upgrade-done" })
    })?;
    prints(stage, "pitcrew explain node/gpu-02", "pitcrew retry gpu-02")?;
    refuses(stage, "pitcrew retry gpu-02 gpu-01", "node gpu-01 has not failed, it is upgrade-done")?;
    must(stage.states()?["gpu-02"] == "upgrade-failed", || "it was retried all the same".to_owned())?;

    stage.behaviour().change(|behaviour| behaviour.drivers.clear());
    prints(stage, "pitcrew retry gpu-02", "gpu-02 starts again from upgrade-required")?;
    wait_to_the_end(stage)?;
    stage.until_upgraded(&version)?;
    refuses(stage, "pitcrew abort", "no rollout is under way")?;
    stage.sh("kubectl delete driverpolicy gpu").map(drop)
}

/// One sentence each, and 1; wrong usage is 2.
pub(crate) fn bad_input(stage: &mut Stage) -> Outcome {
    refuses(stage, "pitcrew explain node/gpu-2", "there is no node gpu-2; did you mean gpu-02")?;
    refuses(stage, "pitcrew skip gpu-99", "there is no node gpu-99")?;
    refuses(
        stage,
        "pitcrew pause clusterpolicy",
        "there is no policy clusterpolicy; did you mean cluster-policy?",
    )?;
    ends(stage, "pitcrew explain", 2)?;
    ends(stage, "pitcrew status --wait --timeout soon", 2)?;
    ends(stage, "pitcrew status --watch --wait", 2)?;

    let nobody = service_account(stage, "somebody")?;
    let missing = "missing permissions: nodes list, watch; pods list, watch";
    refuses(stage, &format!("pitcrew status --kubeconfig '{}'", nobody.display()), missing)?;
    let reader = service_account(stage, "reader")?;
    stage.sh(READER)?;
    let reader = reader.display();
    prints(stage, &format!("pitcrew status --kubeconfig '{reader}'"), "gpu  ")?;
    let forbidden = r#"cannot patch node/gpu-01: nodes "gpu-01" is forbidden"#;
    refuses(stage, &format!("pitcrew skip gpu-01 --kubeconfig '{reader}'"), forbidden)?;
    stage.sh("kubectl delete clusterrolebinding reader; kubectl delete clusterrole reader")?;
    stage.sh("kubectl delete serviceaccount somebody reader")?;

    stage.sh("kubectl delete crd driverpolicies.pitcrew.dev rollouts.pitcrew.dev")?;
    prints(stage, "pitcrew status", "No controller is running")?;
    let cure = "the custom resource rollouts.pitcrew.dev is not installed. Install it with: pitcrew crd | kubectl apply -f -";
    refuses(stage, "pitcrew abort", cure)?;
    stage.install_definitions()
}
