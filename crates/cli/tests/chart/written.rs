//! Files of the chart that are made from others. `cargo xtask chart` writes them; here they are compared.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use kube::ResourceExt as _;
use libtest_mimic::Failed;
use serde_json::Value;

use crate::render::{Outcome, chart, must, objects, printed, program, text, top};

/// A file and how it is made.
pub(crate) struct Written {
    /// In the chart.
    pub(crate) path: &'static str,
    /// Whether Helm makes it.
    pub(crate) needs_helm: bool,
    make: fn() -> Result<String, Failed>,
}

const fn taken(path: &'static str, make: fn() -> Result<String, Failed>) -> Written {
    Written { path, needs_helm: false, make }
}

const fn golden(path: &'static str, make: fn() -> Result<String, Failed>) -> Written {
    Written { path, needs_helm: true, make }
}

/// All of them. The golden files of the deployers are rendered with the values of their examples.
pub(crate) const FILES: [Written; 12] = [
    taken("files/crds/driverpolicies.pitcrew.dev.yaml", || definition("driverpolicies.pitcrew.dev")),
    taken("files/crds/rollouts.pitcrew.dev.yaml", || definition("rollouts.pitcrew.dev")),
    taken("files/alerts.yaml", || monitoring("alerts.yaml")),
    taken("files/dashboard.json", || monitoring("dashboard.json")),
    golden("golden/controller.yaml", || text(&["--set", "crds.install=false"])),
    golden("golden/permissions.yaml", || text(&["--show-only", "templates/controller/rbac.yaml"])),
    golden("golden/features-off.yaml", || text(&["--set", "crds.install=false", "--set-json", FEATURES_OFF])),
    golden("golden/helm.yaml", || text(&["--values", "charts/pitcrew/examples/helm/values.yaml"])),
    golden("golden/helmfile.yaml", helmfile),
    golden("golden/flux.yaml", || with_values_in("flux/helmrelease.yaml", "/spec/values")),
    golden("golden/argocd.yaml", || {
        with_values_in("argocd/application.yaml", "/spec/source/helm/valuesObject")
    }),
    golden("golden/argocd-app-of-apps.yaml", || {
        with_values_in("argocd-app-of-apps/apps/pitcrew.yaml", "/spec/source/helm/valuesObject")
    }),
];

const FEATURES_OFF: &str = r#"features={"nvsentinel": false, "clients": false, "networkOperator": false}"#;

fn definition(name: &str) -> Result<String, Failed> {
    let found = pitcrew_core::api::crds().into_iter().find(|definition| definition.name_any() == name);
    Ok(serde_saphyr::to_string(&found.ok_or_else(|| format!("there is no definition {name}"))?)?)
}

fn monitoring(name: &str) -> Result<String, Failed> {
    Ok(fs::read_to_string(top().join("docs/monitoring").join(name))?)
}

fn helmfile() -> Result<String, Failed> {
    let mut helmfile = program("helmfile")?;
    printed(helmfile.args(["--quiet", "template"]).current_dir(chart().join("examples/helmfile")))
}

/// As the deployer does: it takes the values out of its own object and hands them to Helm.
fn with_values_in(example: &str, pointer: &str) -> Result<String, Failed> {
    let example = fs::read_to_string(chart().join("examples").join(example))?;
    let object = objects(&example)?.into_iter().next().unwrap_or_default();
    let values = object.pointer(pointer).unwrap_or(&Value::Null);
    let file = tempfile::NamedTempFile::with_suffix(".json")?;
    fs::write(file.path(), values.to_string())?;
    text(&["--values", &file.path().display().to_string()])
}

/// Compares one file with what it should be, or writes it if that is asked for.
pub(crate) fn compare(file: &Written) -> Outcome {
    let (path, wanted) = (chart().join(file.path), (file.make)()?);
    if std::env::var_os("PITCREW_WRITE_CHART").is_some() {
        fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))?;
        return Ok(fs::write(&path, wanted)?);
    }
    let found = fs::read_to_string(&path).unwrap_or_default();
    let differs = || {
        let both = found.lines().zip(wanted.lines()).enumerate();
        let (line, (is, should)) =
            both.into_iter().find(|(_, (is, should))| is != should).unwrap_or((0, ("…", "…")));
        format!(
            "{} is not what it is made from; `cargo xtask chart` writes it. Line {}:\n  is      {is}\n  should  {should}",
            file.path,
            line + 1
        )
    };
    must(found == wanted, differs)
}

/// What is not made any more is not left behind.
pub(crate) fn nothing_else() -> Outcome {
    let known: BTreeSet<_> = FILES.iter().map(|file| chart().join(file.path)).collect();
    for dir in ["files", "files/crds", "golden"] {
        for entry in fs::read_dir(chart().join(dir))? {
            let path = entry?.path();
            must(path.is_dir() || known.contains(&path), || format!("nothing makes {}", path.display()))?;
        }
    }
    Ok(())
}
