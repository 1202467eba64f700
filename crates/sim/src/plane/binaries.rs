//! The five programs of a control plane: which they are, how they are built, where they lie.
//!
//! `cargo xtask kube` builds them once from the Go module in `xtask/kube` into a cache directory whose name
//! changes with the module's checksums and the build flags, so that a stale build is never picked up.

use std::env;
use std::fmt;
use std::path::{Path, PathBuf};

/// The Kubernetes release that `xtask/kube/go.mod` requires.
pub const VERSION: &str = "v1.36.3";

/// Without these a server calls itself v0.0.0 and some clients refuse it.
pub const LD_FLAGS: &str = "-s -w \
     -X k8s.io/component-base/version.gitVersion=v1.36.3 \
     -X k8s.io/component-base/version.gitMajor=1 \
     -X k8s.io/component-base/version.gitMinor=36 \
     -X k8s.io/component-base/version.gitTreeState=clean";

/// A program of the control plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Program {
    /// The name of the executable.
    pub name: &'static str,
    /// The Go package it is built from.
    pub package: &'static str,
}

/// Everything that must be there, in the order in which it is built: the quick ones tell early of a problem.
pub const PROGRAMS: [Program; 5] = [
    Program { name: "etcd", package: "go.etcd.io/etcd/server/v3" },
    Program { name: "kubectl", package: "k8s.io/kubernetes/cmd/kubectl" },
    Program { name: "kube-apiserver", package: "k8s.io/kubernetes/cmd/kube-apiserver" },
    Program { name: "kube-controller-manager", package: "k8s.io/kubernetes/cmd/kube-controller-manager" },
    Program { name: "kube-scheduler", package: "k8s.io/kubernetes/cmd/kube-scheduler" },
];

const GO_SUM: &[u8] = include_bytes!("../../../../xtask/kube/go.sum");

/// Computed by the compiler: the binary carries eight bytes and not the whole `go.sum`.
const BUILD_KEY: u64 = fnv1a(LD_FLAGS.as_bytes(), fnv1a(GO_SUM, 0xcbf2_9ce4_8422_2325));

/// FNV-1a: a name for a cache directory needs no more, and no dependency.
const fn fnv1a(bytes: &[u8], seed: u64) -> u64 {
    let mut hash = seed;
    let mut at = 0;
    while at < bytes.len() {
        hash = (hash ^ bytes[at] as u64).wrapping_mul(0x0000_0100_0000_01b3);
        at += 1;
    }
    hash
}

/// Where pitcrew's tools keep what is slow to make: `$PITCREW_CACHE`, else `$XDG_CACHE_HOME/pitcrew`, else
/// `~/.cache/pitcrew`.
pub fn cache_dir() -> PathBuf {
    let set = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("PITCREW_CACHE")
        .or_else(|| set("XDG_CACHE_HOME").map(|dir| dir.join("pitcrew")))
        .unwrap_or_else(|| env::home_dir().unwrap_or_else(env::temp_dir).join(".cache/pitcrew"))
}

/// A directory that holds every program of [`PROGRAMS`].
#[derive(Clone, Debug)]
pub struct Binaries {
    dir: PathBuf,
}

impl Binaries {
    /// `$KUBEBUILDER_ASSETS` if it is complete, else the cache.
    pub fn find() -> Result<Binaries, MissingBinaries> {
        Binaries::given().unwrap_or_else(|| Binaries::in_dir(&Binaries::cached_at()))
    }

    /// Those in `$KUBEBUILDER_ASSETS`, if that is set and complete.
    fn given() -> Option<Result<Binaries, MissingBinaries>> {
        let dir = env::var_os("KUBEBUILDER_ASSETS")?;
        Binaries::in_dir(Path::new(&dir)).ok().map(Ok)
    }

    /// Those in one directory, which must have all of them.
    pub fn in_dir(dir: &Path) -> Result<Binaries, MissingBinaries> {
        let missing: Vec<_> =
            PROGRAMS.iter().map(|program| program.name).filter(|name| !dir.join(name).is_file()).collect();
        if missing.is_empty() {
            Ok(Binaries { dir: dir.to_owned() })
        } else {
            Err(MissingBinaries { dir: dir.to_owned(), missing })
        }
    }

    /// Where `cargo xtask kube` puts what it builds.
    pub fn cached_at() -> PathBuf {
        cache_dir().join("kube").join(format!("{VERSION}-{BUILD_KEY:016x}"))
    }

    /// The directory, for `$KUBEBUILDER_ASSETS` of a child process.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }
}

/// Some programs of the control plane are not there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingBinaries {
    dir: PathBuf,
    missing: Vec<&'static str>,
}

impl fmt::Display for MissingBinaries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MissingBinaries { dir, missing } = self;
        let (names, dir) = (missing.join(", "), dir.display());
        write!(
            f,
            "a real control plane needs {names}, not found in {dir}; `cargo xtask kube` builds what is missing"
        )
    }
}

impl std::error::Error for MissingBinaries {}

#[cfg(test)]
mod tests {
    use super::*;

    const GO_MOD: &str = include_str!("../../../../xtask/kube/go.mod");

    #[test]
    fn the_version_is_the_one_that_go_mod_requires() {
        assert!(GO_MOD.contains(&format!("k8s.io/kubernetes {VERSION}")));
        assert!(LD_FLAGS.contains(&format!("gitVersion={VERSION} ")));
    }

    #[test]
    fn every_program_is_a_tool_of_the_go_module() {
        for Program { name, package } in PROGRAMS {
            assert!(GO_MOD.contains(&format!("\t{package}\n")), "{name} is missing in go.mod");
        }
    }

    #[test]
    fn what_is_missing_is_said_in_one_sentence() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["etcd", "kubectl", "kube-scheduler"] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        let missing = Binaries::in_dir(dir.path()).unwrap_err().to_string();
        assert_eq!(
            missing.replace(&dir.path().display().to_string(), "DIR"),
            "a real control plane needs kube-apiserver, kube-controller-manager, not found in DIR; \
             `cargo xtask kube` builds what is missing"
        );
    }
}
