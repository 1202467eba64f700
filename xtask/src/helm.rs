//! `cargo xtask helm`: Helm and helmfile, built once from the Go modules in `xtask/helm` and `xtask/helmfile`.

use anyhow::Result;
use pitcrew_sim::plane::{HELM_PROGRAMS, HELM_VERSION, Helm};

use crate::go;

/// Makes sure that Helm and helmfile are there.
pub(crate) fn ensure() -> Result<Helm> {
    if let Ok(found) = Helm::find() {
        println!("Helm {HELM_VERSION} is there, in the cache: {}", found.dir().display());
        return Ok(found);
    }
    println!("Building Helm {HELM_VERSION} and helmfile with Go, once; about 6 minutes on two cores.");
    go::build(&HELM_PROGRAMS, &Helm::cached_at(), "")?;
    let built = Helm::find()?;
    println!("Helm {HELM_VERSION} is built: {}", built.dir().display());
    Ok(built)
}
