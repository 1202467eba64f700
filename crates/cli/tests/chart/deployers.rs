//! The client refresh without the controller: the same Job for every deployer, each in the way that this one runs Jobs.

use std::fs;

use libtest_mimic::Failed;
use serde_json::{Value, json};

use crate::render::{Outcome, chart, must, name, objects, of_kind, only, render};

const HOOKS: [&str; 3] = ["helm", "helmfile", "flux"];
const PLAIN: [&str; 2] = ["argocd", "argocd-app-of-apps"];
const HOOK: &str = "helm.sh/hook";

fn golden(deployer: &str) -> Result<Vec<Value>, Failed> {
    objects(&fs::read_to_string(chart().join(format!("golden/{deployer}.yaml")))?)
}

fn example(path: &str) -> Result<String, Failed> {
    Ok(fs::read_to_string(chart().join("examples").join(path))?)
}

fn is_hook(object: &Value) -> bool {
    object["metadata"]["annotations"].get(HOOK).is_some()
}

/// Without what a person may choose for each.
fn template(job: &Value) -> Value {
    let mut template = job["spec"]["template"].clone();
    if let Some(arguments) = template["spec"]["containers"][0]["args"].as_array_mut() {
        let times = ["--deadline=", "--settle="];
        let is_time = |text: &str| times.iter().any(|time| text.starts_with(time));
        arguments.retain(|argument| !argument.as_str().is_some_and(is_time));
    }
    template
}

/// As rendered with each deployer's example: these are the golden files.
pub(crate) fn same_job() -> Outcome {
    let reference = template(only(&golden("helm")?, "Job")?);
    for deployer in HOOKS.into_iter().chain(PLAIN) {
        let objects = golden(deployer)?;
        let job = only(&objects, "Job")?;
        must(template(job) == reference, || format!("{deployer} has another pod"))?;
        let (name_of_job, spec) = (name(job), &job["spec"]);
        if HOOKS.contains(&deployer) {
            let annotations = &job["metadata"]["annotations"];
            must(annotations[HOOK] == "post-install,post-upgrade", || format!("{deployer}: {annotations}"))?;
            must(annotations["helm.sh/hook-delete-policy"] == "before-hook-creation", || {
                format!("{deployer}: {annotations}")
            })?;
            must(name_of_job == "Job/gpu-operator/pitcrew-refresh-clients", || name_of_job)?;
        } else {
            must(!is_hook(job), || format!("{deployer} would never run a hook"))?;
            let hash = name_of_job.strip_prefix("Job/gpu-operator/pitcrew-refresh-clients-");
            must(hash.is_some_and(|hash| hash.len() == 8), || name_of_job.clone())?;
            must(spec.get("ttlSecondsAfterFinished").is_none(), || format!("{deployer} would run it again"))?;
        }
        let others = objects.iter().filter(|object| object["kind"] != "Job");
        for object in others {
            must(!is_hook(object), || format!("{deployer}: {} must be there before the Job", name(object)))?;
        }
        must(of_kind(&objects, "Deployment").next().is_none(), || format!("{deployer} has a controller"))?;
    }
    Ok(())
}

/// Whoever acts on differences sees one in an object that is not a hook; Argo CD gets a new Job, Helm replaces its own.
pub(crate) fn new_version() -> Outcome {
    for deployer in HOOKS.into_iter().chain(PLAIN) {
        let with = |set: &str| {
            let deployer = format!("postInstallHooks.dra.deployer={deployer}");
            render(&[
                "--values",
                "charts/pitcrew/examples/helm/values.yaml",
                "--set",
                &deployer,
                "--set",
                set,
            ])
        };
        let before = with("postInstallHooks.dra.revision=1")?;
        let again = with("postInstallHooks.dra.revision=1")?;
        must(before == again, || format!("{deployer}: the same values render to two things"))?;
        for set in ["driverVersion=590.1.1", "operatorVersion=v27.1.0", "revision=2"] {
            let after = with(&format!("postInstallHooks.dra.{set}"))?;
            let plain = |objects: &[Value]| -> Vec<Value> {
                objects.iter().filter(|object| !is_hook(object)).cloned().collect()
            };
            must(plain(&before) != plain(&after), || format!("{deployer} sees nothing new in {set}"))?;
            let renamed = name(only(&before, "Job")?) != name(only(&after, "Job")?);
            must(renamed == PLAIN.contains(&deployer), || format!("{deployer}, {set}: renamed {renamed}"))?;
        }
    }
    Ok(())
}

/// The Job gives up first and says why, then Kubernetes ends it, then the deployer stops waiting.
pub(crate) fn timeouts() -> Outcome {
    for deployer in HOOKS {
        let objects = golden(deployer)?;
        let job = only(&objects, "Job")?;
        must(job["spec"]["activeDeadlineSeconds"] == json!(48 * 60), || format!("{deployer}: {job}"))?;
        let told = &only(&objects, "ConfigMap")?["data"]["releaseTimeout"];
        must(told == "50m", || format!("{deployer}: {told}"))?;
    }
    for (path, waits) in [
        ("helm/values.yaml", "--timeout 50m"),
        ("helmfile/helmfile.yaml.gotmpl", "timeout: 3000\n"),
        ("flux/helmrelease.yaml", "\n  timeout: 50m\n"),
    ] {
        must(example(path)?.contains(waits), || format!("{path} does not say {waits:?}"))?;
    }
    for (deadline, timeout) in [("90s", "7m"), ("2h", "125m")] {
        let set = format!("postInstallHooks.dra.deadline={deadline}");
        let objects = render(&["--values", "charts/pitcrew/examples/helm/values.yaml", "--set", &set])?;
        let told = &only(&objects, "ConfigMap")?["data"]["releaseTimeout"];
        must(told == timeout, || format!("{deadline}: {told}"))?;
    }
    Ok(())
}
