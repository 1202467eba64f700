//! `cargo xtask kube`: etcd and Kubernetes, built once from the Go module in `xtask/kube`.

use anyhow::Result;
use pitcrew_sim::plane::{Binaries, PROGRAMS, VERSION};

use crate::go;

/// Makes sure that the programs of a control plane are there, and says where they come from.
pub(crate) fn ensure() -> Result<Binaries> {
    if let Ok(found) = Binaries::find() {
        let from =
            if found.dir() == Binaries::cached_at() { "in the cache" } else { "given by KUBEBUILDER_ASSETS" };
        println!("Kubernetes {VERSION} is there, {from}: {}", found.dir().display());
        return Ok(found);
    }
    if std::env::var_os("KUBEBUILDER_ASSETS").is_some() {
        println!("KUBEBUILDER_ASSETS is set, but not every program is in there; it is not used.");
    }
    println!("Building Kubernetes {VERSION} with Go, once; about 6 minutes on two cores.");
    let names = PROGRAMS.map(|program| program.name).join(", ");
    let without_go = format!(", or set KUBEBUILDER_ASSETS to a directory with {names}");
    go::build(&PROGRAMS, &Binaries::cached_at(), &without_go)?;
    let built = Binaries::in_dir(&Binaries::cached_at())?;
    println!("Kubernetes {VERSION} is built: {}", built.dir().display());
    Ok(built)
}
