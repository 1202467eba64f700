//! Who keeps the modules loaded that a driver is going to replace, by the graph of module users.

use std::collections::{BTreeMap, BTreeSet};

use super::ModuleCheck;
use crate::host::Modules;

/// What was found, in sentences, in a fixed order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// Modules that use one of ours. Nobody drains those away.
    pub kernel: Vec<String>,
    /// References that no module explains: programs, or the kernel itself. Draining the node may end them.
    pub references: Vec<String>,
}

/// The driver's own family, which it replaces together with the rest.
fn is_own(module: &str) -> bool {
    module.starts_with("mlx5") || module == "iw_cm"
}

/// Looks at every module that will be replaced.
pub fn findings(modules: &Modules, check: &ModuleCheck) -> Findings {
    let mut findings = Findings::default();
    for (user, used) in users(modules, &check.names) {
        let (kind, unloaded, variable) = match () {
            () if is_own(&user) => continue,
            () if check.third_party.contains(&user) => {
                ("another vendor's module", check.unload_third_party, Some("UNLOAD_THIRD_PARTY_RDMA_MODULES"))
            }
            () if check.storage.contains(&user) => {
                ("storage module", check.unload_storage, Some("UNLOAD_STORAGE_MODULES"))
            }
            () => ("module", false, None),
        };
        if !unloaded {
            let way_out =
                variable.map(|name| format!(" (unload it, or set {name}=true)")).unwrap_or_default();
            findings.kernel.push(format!("{kind} {user} uses {used}{way_out}"));
        }
    }
    for name in &check.names {
        let Some(module) = modules.get(name) else { continue };
        let holders = i64::try_from(module.holders.len()).unwrap_or(i64::MAX);
        let unexplained = module.references.saturating_sub(holders);
        if unexplained > 0 {
            findings.references.push(format!(
                "module {name} has {unexplained} references that no module explains: programs, or the kernel itself"
            ));
        }
    }
    findings
}

/// All users of these modules that are none of them, however indirect, each with what it uses.
fn users(modules: &Modules, names: &BTreeSet<String>) -> BTreeMap<String, String> {
    let mut users = BTreeMap::new();
    let mut ahead: Vec<&str> = names.iter().map(String::as_str).collect();
    while let Some(used) = ahead.pop() {
        for user in modules.get(used).into_iter().flat_map(|module| &module.holders) {
            if !names.contains(user) && !users.contains_key(user) {
                users.insert(user.clone(), used.to_owned());
                ahead.push(user);
            }
        }
    }
    users
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::Module;
    use crate::safe_load::{Config, Overlay};

    fn modules(list: &[(&str, i64, &[&str])]) -> Modules {
        let module = |references: i64, holders: &[&str]| Module {
            references,
            holders: holders.iter().map(|holder| (*holder).to_owned()).collect(),
        };
        list.iter().map(|(name, n, holders)| ((*name).to_owned(), module(*n, holders))).collect()
    }

    fn check(names: &[&str], overlay: &Overlay) -> ModuleCheck {
        let mut check = Config::read("{}", overlay).unwrap().modules;
        check.names = names.iter().map(|name| (*name).to_owned()).collect();
        check
    }

    #[test]
    fn users_of_users_are_found_once_and_in_order() {
        let loaded = modules(&[
            ("ib_core", 3, &["rdma_cm", "ib_uverbs", "mlx5_ib"]),
            ("rdma_cm", 2, &["rpcrdma", "strange"]),
            ("ib_uverbs", 1, &["strange"]),
            ("strange", 0, &[]),
            ("rpcrdma", 0, &[]),
            ("mlx5_ib", 1, &["irdma"]),
            ("irdma", 0, &[]),
            ("iw_cm", 0, &[]),
        ]);
        let found = findings(&loaded, &check(&["ib_core", "rdma_cm", "ib_uverbs"], &Overlay::default()));
        assert_eq!(
            found.kernel,
            [
                "another vendor's module irdma uses mlx5_ib (unload it, or set UNLOAD_THIRD_PARTY_RDMA_MODULES=true)",
                "storage module rpcrdma uses rdma_cm (unload it, or set UNLOAD_STORAGE_MODULES=true)",
                "module strange uses rdma_cm",
            ]
        );
        assert!(found.references.is_empty());
    }

    #[test]
    fn what_the_driver_container_unloads_is_not_in_the_way() {
        let loaded = modules(&[("ib_core", 2, &["rpcrdma", "siw"]), ("rpcrdma", 0, &[]), ("siw", 0, &[])]);
        let yes = "true".to_owned();
        let overlay = Overlay { unload_storage: yes.clone(), unload_third_party: yes, ..Overlay::default() };
        assert_eq!(findings(&loaded, &check(&["ib_core"], &overlay)), Findings::default());
    }

    #[test]
    fn references_without_a_module_are_not_called_userspace_alone() {
        for (references, found) in [(0, 0), (1, 0), (3, 1)] {
            let loaded = modules(&[("mlx5_core", references, &["mlx5_ib"]), ("mlx5_ib", 0, &[])]);
            let findings = findings(&loaded, &check(&["mlx5_core", "absent"], &Overlay::default()));
            assert_eq!(findings.references.len(), found);
            assert!(findings.references.iter().all(|text| text.contains("or the kernel itself")));
        }
    }
}
