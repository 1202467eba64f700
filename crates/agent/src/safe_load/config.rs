//! The configuration: JSON in a ConfigMap, and what the environment adds.

use std::collections::BTreeSet;

use serde::Deserialize;

use crate::host::KernelPaths;
use crate::values::switch;

/// Storage drivers that use RDMA.
const STORAGE: &str = "ib_iser ib_isert ib_srp ib_srpt nvme_rdma nvmet_rdma rpcrdma xprtrdma";
/// RDMA drivers of other vendors.
const THIRD_PARTY: &str = "bnxt_re efa erdma iw_cxgb4 hfi1 hns_roce ionic_rdma irdma ib_qib mana_ib ocrdma qedr rdma_rxe siw \
                           vmw_pvrdma";

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Ask before the driver is loaded.
    pub enabled: bool,
    /// By this annotation.
    pub annotation: Option<String>,
    /// Which modules must not be in use.
    pub modules: ModuleCheck,
}

/// Which modules must not be in use, and who may use them all the same.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModuleCheck {
    /// Do not look.
    pub skip: bool,
    /// The modules that will be replaced.
    pub names: BTreeSet<String>,
    /// Where the machine's `/proc` and `/sys` are.
    pub paths: KernelPaths,
    /// Storage drivers …
    pub storage: BTreeSet<String>,
    /// … which the driver container unloads itself.
    pub unload_storage: bool,
    /// Drivers of other vendors …
    pub third_party: BTreeSet<String>,
    /// … which the driver container unloads itself.
    pub unload_third_party: bool,
}

/// What the environment says, as it is written there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overlay {
    /// `STORAGE_MODULES`.
    pub storage: String,
    /// `THIRD_PARTY_RDMA_MODULES`.
    pub third_party: String,
    /// `UNLOAD_STORAGE_MODULES`.
    pub unload_storage: String,
    /// `UNLOAD_THIRD_PARTY_RDMA_MODULES`.
    pub unload_third_party: String,
    /// `SKIP_PREFLIGHT_CHECKS`.
    pub skip: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Written {
    #[serde(default)]
    safe_driver_load: SafeDriverLoad,
    #[serde(default)]
    module_dependency_check: ModuleDependencyCheck,
}

#[derive(Default, Deserialize)]
struct SafeDriverLoad {
    #[serde(default)]
    enable: bool,
    #[serde(default)]
    annotation: String,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ModuleDependencyCheck {
    #[serde(default)]
    modules: BTreeSet<String>,
    #[serde(default)]
    host_proc_path: String,
    #[serde(default)]
    host_sys_path: String,
}

impl Config {
    /// Reads the ConfigMap's text with what the environment adds; else a sentence.
    pub fn read(text: &str, overlay: &Overlay) -> Result<Self, String> {
        let Written { safe_driver_load, module_dependency_check } = serde_json::from_str(text)
            .map_err(|error| format!("the configuration is not readable: {error}"))?;
        let SafeDriverLoad { enable, annotation } = safe_driver_load;
        if enable && annotation.is_empty() {
            return Err("safeDriverLoad.enable needs safeDriverLoad.annotation".to_owned());
        }
        let ModuleDependencyCheck { modules, host_proc_path, host_sys_path } = module_dependency_check;
        let usual = KernelPaths::default();
        let or = |written: String, usual: String| if written.is_empty() { usual } else { written };
        let flag = |name: &str, text: &str, default: bool| {
            if text.is_empty() { Ok(default) } else { switch(text).map_err(|why| format!("{name}: {why}")) }
        };
        let modules = ModuleCheck {
            skip: flag("SKIP_PREFLIGHT_CHECKS", &overlay.skip, true)?,
            names: modules,
            paths: KernelPaths { proc: or(host_proc_path, usual.proc), sys: or(host_sys_path, usual.sys) },
            storage: words(&overlay.storage, STORAGE),
            unload_storage: flag("UNLOAD_STORAGE_MODULES", &overlay.unload_storage, false)?,
            third_party: words(&overlay.third_party, THIRD_PARTY),
            unload_third_party: flag("UNLOAD_THIRD_PARTY_RDMA_MODULES", &overlay.unload_third_party, false)?,
        };
        Ok(Self { enabled: enable, annotation: Some(annotation).filter(|text| !text.is_empty()), modules })
    }
}

fn words(text: &str, default: &str) -> BTreeSet<String> {
    let text = if text.trim().is_empty() { default } else { text };
    text.split_whitespace().map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Config, String> {
        Config::read(text, &Overlay::default())
    }

    #[test]
    fn an_old_configuration_is_read_with_the_documented_defaults() {
        let config =
            read(r#"{"safeDriverLoad": {"enable": true, "annotation": "some-annotation"}}"#).unwrap();
        assert!(config.enabled);
        assert_eq!(config.annotation.as_deref(), Some("some-annotation"));
        assert!(config.modules.skip, "the check is off unless somebody wants it");
        assert_eq!(config.modules.storage.len(), 8);
        assert_eq!(config.modules.third_party.len(), 15);
        assert_eq!(config.modules.paths, KernelPaths::default());
    }

    #[test]
    fn lists_are_separated_by_blanks_and_paths_are_taken_over() {
        let overlay = Overlay {
            storage: " a  b ".to_owned(),
            skip: "false".to_owned(),
            unload_storage: "True".to_owned(),
            ..Overlay::default()
        };
        let text = r#"{"moduleDependencyCheck": {"modules": ["mlx5_core"], "hostProcPath": "/host/proc", "hostSysPath": "/host/sys"}}"#;
        let modules = Config::read(text, &overlay).unwrap().modules;
        assert_eq!(modules.storage.iter().collect::<Vec<_>>(), ["a", "b"]);
        assert!(!modules.skip && modules.unload_storage);
        assert_eq!(modules.paths, KernelPaths { proc: "/host/proc".to_owned(), sys: "/host/sys".to_owned() });
    }

    #[test]
    fn wrong_configurations_are_named() {
        for (text, words) in [
            ("", "not readable"),
            ("{", "not readable"),
            (r#"{"safeDriverLoad": {"enable": true}}"#, "needs safeDriverLoad.annotation"),
        ] {
            assert!(read(text).unwrap_err().contains(words), "{text}");
        }
        let overlay = Overlay { skip: "yes".to_owned(), ..Overlay::default() };
        assert!(Config::read("{}", &overlay).unwrap_err().starts_with("SKIP_PREFLIGHT_CHECKS"));
    }
}
