//! helm and helmfile, and the objects that they render.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use libtest_mimic::Failed;
use pitcrew_sim::plane::Helm;
use serde_json::Value;

/// What a test returns.
pub(crate) type Outcome = Result<(), Failed>;

/// Where the README says that commands are typed.
pub(crate) fn top() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here).to_owned()
}

/// The chart.
pub(crate) fn chart() -> PathBuf {
    top().join("charts/pitcrew")
}

/// What must hold.
pub(crate) fn must(holds: bool, otherwise: impl FnOnce() -> String) -> Outcome {
    if holds { Ok(()) } else { Err(otherwise().into()) }
}

/// `helm` or `helmfile` at the top of the tree, with nobody's settings and plugins.
pub(crate) fn program(name: &str) -> Result<Command, Failed> {
    let helm = Helm::find()?;
    let mut command = Command::new(helm.dir().join(name));
    let path = env::var_os("PATH").unwrap_or_default();
    let dirs = [helm.dir().to_owned()].into_iter().chain(env::split_paths(&path));
    command.env("PATH", env::join_paths(dirs)?).current_dir(top());
    for home in ["HELM_CONFIG_HOME", "HELM_CACHE_HOME", "HELM_DATA_HOME", "HELMFILE_CACHE_HOME"] {
        command.env(home, Path::new(env!("CARGO_TARGET_TMPDIR")).join("helm"));
    }
    Ok(command)
}

/// What a command prints, if it goes well.
pub(crate) fn printed(command: &mut Command) -> Result<String, Failed> {
    let Output { status, stdout, stderr } = command.output()?;
    if status.success() {
        return Ok(String::from_utf8(stdout)?);
    }
    Err(format!("{command:?} ended with {status}: {}", String::from_utf8_lossy(&stderr).trim_end()).into())
}

fn template(release: &str, arguments: &[&str]) -> Result<Command, Failed> {
    let mut helm = program("helm")?;
    helm.args(["template", release, "charts/pitcrew", "--namespace", "gpu-operator"]).args(arguments);
    Ok(helm)
}

/// The chart as a release called `pitcrew` in the namespace `gpu-operator`.
pub(crate) fn text(arguments: &[&str]) -> Result<String, Failed> {
    printed(&mut template("pitcrew", arguments)?)
}

/// The objects of a release.
pub(crate) fn release(name: &str, arguments: &[&str]) -> Result<Vec<Value>, Failed> {
    objects(&printed(&mut template(name, arguments)?)?)
}

/// The objects of a release called `pitcrew`.
pub(crate) fn render(arguments: &[&str]) -> Result<Vec<Value>, Failed> {
    release("pitcrew", arguments)
}

/// What helm says if the chart must not be rendered.
pub(crate) fn refusal(arguments: &[&str]) -> Result<String, Failed> {
    let output = template("pitcrew", arguments)?.output()?;
    must(!output.status.success(), || format!("{arguments:?} were taken"))?;
    Ok(String::from_utf8(output.stderr)?)
}

/// The documents of a YAML text.
pub(crate) fn objects(yaml: &str) -> Result<Vec<Value>, Failed> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(yaml)?;
    Ok(documents.into_iter().filter(|document| !document.is_null()).collect())
}

/// One kind of objects.
pub(crate) fn of_kind<'a>(objects: &'a [Value], kind: &str) -> impl Iterator<Item = &'a Value> {
    objects.iter().filter(move |object| object["kind"] == kind)
}

/// The only object of a kind.
pub(crate) fn only<'a>(objects: &'a [Value], kind: &str) -> Result<&'a Value, Failed> {
    let found: Vec<_> = of_kind(objects, kind).collect();
    match found[..] {
        [one] => Ok(one),
        _ => Err(format!("there are {} of kind {kind}", found.len()).into()),
    }
}

/// `Kind/namespace/name`.
pub(crate) fn name(object: &Value) -> String {
    let part = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let metadata = &object["metadata"];
    format!("{}/{}/{}", part(&object["kind"]), part(&metadata["namespace"]), part(&metadata["name"]))
}
