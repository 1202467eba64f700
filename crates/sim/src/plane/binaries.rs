//! The programs that are built with Go: the five of a control plane, and those of the chart's tests. Which they are, how
//! they are built, where they lie.
//!
//! `cargo xtask kube` and `cargo xtask helm` build them once from the Go modules in `xtask` into cache directories whose
//! names change with the modules' checksums and the build flags, so that a stale build is never picked up.

use std::env;
use std::fmt;
use std::path::{Path, PathBuf};

/// The Kubernetes release that `xtask/kube/go.mod` requires.
pub const VERSION: &str = "v1.36.3";

/// Without these a server calls itself v0.0.0 and some clients refuse it.
const LD_FLAGS: &str = "-s -w \
     -X k8s.io/component-base/version.gitVersion=v1.36.3 \
     -X k8s.io/component-base/version.gitMajor=1 \
     -X k8s.io/component-base/version.gitMinor=36 \
     -X k8s.io/component-base/version.gitTreeState=clean";

/// The Helm release that `xtask/helm/go.mod` requires.
pub const HELM_VERSION: &str = "v4.3.1";

/// Without it Helm does not know its own release, and helmfile asks for it.
const HELM_LD_FLAGS: &str = "-s -w -X helm.sh/helm/v4/internal/version.version=v4.3.1";

/// A program that is built with Go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Program {
    /// The name of the executable.
    pub name: &'static str,
    /// The Go package it is built from.
    pub package: &'static str,
    /// The directory of the Go module, under `xtask`.
    pub module: &'static str,
    /// What the linker is told.
    pub ld_flags: &'static str,
}

const fn kube(name: &'static str, package: &'static str) -> Program {
    Program { name, package, module: "kube", ld_flags: LD_FLAGS }
}

/// A control plane, in the order in which it is built: the quick ones tell early of a problem.
pub const PROGRAMS: [Program; 5] = [
    kube("etcd", "go.etcd.io/etcd/server/v3"),
    kube("kubectl", "k8s.io/kubernetes/cmd/kubectl"),
    kube("kube-apiserver", "k8s.io/kubernetes/cmd/kube-apiserver"),
    kube("kube-controller-manager", "k8s.io/kubernetes/cmd/kube-controller-manager"),
    kube("kube-scheduler", "k8s.io/kubernetes/cmd/kube-scheduler"),
];

/// What renders and installs the chart. Two modules: they disagree about the versions of what they share.
pub const HELM_PROGRAMS: [Program; 2] = [
    Program { name: "helm", package: "helm.sh/helm/v4/cmd/helm", module: "helm", ld_flags: HELM_LD_FLAGS },
    Program {
        name: "helmfile",
        package: "github.com/helmfile/helmfile",
        module: "helmfile",
        ld_flags: "-s -w",
    },
];

/// Computed by the compiler: the binary carries eight bytes and not the whole `go.sum`.
const BUILD_KEY: u64 = key(include_bytes!("../../../../xtask/kube/go.sum"), LD_FLAGS, FNV_BASIS);
const HELM_KEY: u64 = key(
    include_bytes!("../../../../xtask/helmfile/go.sum"),
    "",
    key(include_bytes!("../../../../xtask/helm/go.sum"), HELM_LD_FLAGS, FNV_BASIS),
);

const FNV_BASIS: u64 = 0xcbf2_9ce4_8422_2325;

const fn key(go_sum: &[u8], ld_flags: &str, seed: u64) -> u64 {
    fnv1a(ld_flags.as_bytes(), fnv1a(go_sum, seed))
}

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
        let missing = MissingBinaries::of(&PROGRAMS, dir, "a real control plane", "cargo xtask kube");
        missing.map_or_else(|| Ok(Binaries { dir: dir.to_owned() }), Err)
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

/// A directory that holds every program of [`HELM_PROGRAMS`].
#[derive(Clone, Debug)]
pub struct Helm {
    dir: PathBuf,
}

impl Helm {
    /// Those in the cache.
    pub fn find() -> Result<Helm, MissingBinaries> {
        let dir = Helm::cached_at();
        let missing = MissingBinaries::of(&HELM_PROGRAMS, &dir, "the chart", "cargo xtask helm");
        missing.map_or_else(|| Ok(Helm { dir }), Err)
    }

    /// Where `cargo xtask helm` puts what it builds.
    pub fn cached_at() -> PathBuf {
        cache_dir().join("helm").join(format!("{HELM_VERSION}-{HELM_KEY:016x}"))
    }

    /// The directory with `helm` and `helmfile`, for the path of a child process.
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

/// Some programs are not there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingBinaries {
    dir: PathBuf,
    missing: Vec<&'static str>,
    /// Who needs them, and what builds them.
    needed_by: &'static str,
    built_by: &'static str,
}

impl MissingBinaries {
    fn of(
        programs: &[Program],
        dir: &Path,
        needed_by: &'static str,
        built_by: &'static str,
    ) -> Option<MissingBinaries> {
        let names = programs.iter().map(|program| program.name);
        let missing: Vec<_> = names.filter(|name| !dir.join(name).is_file()).collect();
        let some = !missing.is_empty();
        some.then(|| MissingBinaries { dir: dir.to_owned(), missing, needed_by, built_by })
    }
}

impl fmt::Display for MissingBinaries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MissingBinaries { dir, missing, needed_by, built_by } = self;
        let (names, dir) = (missing.join(", "), dir.display());
        write!(f, "{needed_by} needs {names}, not found in {dir}; `{built_by}` builds what is missing")
    }
}

impl std::error::Error for MissingBinaries {}

#[cfg(test)]
mod tests {
    use super::*;

    fn go_mod(module: &str) -> String {
        let modules = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../xtask");
        std::fs::read_to_string(modules.join(module).join("go.mod")).unwrap()
    }

    #[test]
    fn the_versions_are_those_that_go_mod_requires() {
        assert!(go_mod("kube").contains(&format!("k8s.io/kubernetes {VERSION}")));
        assert!(LD_FLAGS.contains(&format!("gitVersion={VERSION} ")));
        assert!(go_mod("helm").contains(&format!("helm.sh/helm/v4 {HELM_VERSION}")));
        assert!(HELM_LD_FLAGS.ends_with(&format!("version={HELM_VERSION}")));
    }

    #[test]
    fn every_program_is_a_tool_of_its_go_module() {
        for Program { name, package, module, .. } in PROGRAMS.into_iter().chain(HELM_PROGRAMS) {
            let tools = go_mod(module);
            let named = [format!("\t{package}\n"), format!("tool {package}\n")];
            assert!(named.iter().any(|line| tools.contains(line)), "{name} is missing in go.mod");
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
