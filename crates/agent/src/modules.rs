//! Taking the driver out of the kernel: every module is looked at before the first one is removed.
//!
//! The order is not a list that ages but follows from who holds whom. Modules of others that hold the driver are named,
//! not removed.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::host::{Holder, Modules, not_looked_at};

/// The driver's heart. It is loaded if and only if this is.
pub const DRIVER: &str = "nvidia";
/// Holds two references on the driver.
const TWO_REFERENCES: &str = "nvidia_vgpu_vfio";
/// Without one of these nobody can compute: CUDA's module, or that of virtual GPUs.
const SERVES: [&str; 2] = ["nvidia_uvm", TWO_REFERENCES];
/// Modules that come with the driver. Among modules that can go, this is the order in which they do.
const OURS: [&str; 8] = [
    "nvidia_drm",
    "nvidia_modeset",
    "nvidia_uvm",
    "nvidia_peermem",
    "nvidia_fs",
    TWO_REFERENCES,
    "gdrdrv",
    DRIVER,
];

/// How the names of a driver's own device files begin, …
const DEVICE_FILES: &str = "/dev/nvidia";
/// … and of those that modules make in other places.
const OTHER_DEVICE_FILES: [(&str, &str); 3] =
    [("gdrdrv", "/dev/gdrdrv"), ("nvidia_drm", "/dev/dri/"), ("nvidia_peermem", "/dev/infiniband/")];

/// Why the driver cannot be unloaded now. Nothing has been removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Busy {
    /// Modules with references that no module explains: the module, how many.
    pub used: BTreeMap<String, i64>,
    /// Modules of others that hold one of ours: theirs, ours.
    pub held_by: BTreeMap<String, String>,
    /// Modules that are being loaded or removed by somebody else.
    pub moving: BTreeSet<String>,
    /// Who has device files open, as far as that can be seen.
    pub processes: Vec<Holder>,
    /// How many processes could not be looked at.
    pub hidden: usize,
}

impl Busy {
    /// How the names of the device files begin by which processes keep the driver: those of a module that nobody uses are
    /// nobody's fault.
    pub fn device_files(&self) -> Vec<&'static str> {
        let others = OTHER_DEVICE_FILES.into_iter().filter(|(module, _)| self.used.contains_key(*module));
        std::iter::once(DEVICE_FILES).chain(others.map(|(_, files)| files)).collect()
    }
}

impl fmt::Display for Busy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        for (module, references) in &self.used {
            let s = if *references == 1 { "" } else { "s" };
            parts.push(format!("module {module} has {references} reference{s} that no module explains"));
        }
        parts.extend(self.held_by.iter().map(|(theirs, ours)| format!("module {theirs} uses {ours}")));
        parts.extend(self.moving.iter().map(|module| format!("module {module} is being loaded or removed")));
        parts.extend(self.processes.iter().map(ToString::to_string));
        if self.hidden > 0 {
            parts.push(not_looked_at(self.hidden));
        } else if self.processes.is_empty() && !self.used.is_empty() {
            let files: Vec<String> = self.device_files().iter().map(|files| format!("{files}*")).collect();
            parts.push(format!("no process with an open {} file can be seen from here", files.join(" or ")));
        }
        f.write_str(&parts.join("; "))
    }
}

/// The driver is loaded and can serve somebody. A driver container loads all of it; what somebody else's unload has left, when that
/// was cut off, looks like a driver too.
pub fn serves(loaded: &Modules) -> bool {
    loaded.contains_key(DRIVER) && SERVES.iter().any(|name| loaded.contains_key(*name))
}

/// The order in which the driver's modules can be removed, or why they cannot. Without a driver there is nothing to remove.
pub fn unload_order(modules: &Modules) -> Result<Vec<String>, Busy> {
    let (family, held_by) = family(modules);
    let mut busy = Busy { held_by, ..Busy::default() };
    for name in &family {
        let Some(module) = modules.get(name) else { continue };
        let unexplained = module.references - explained(modules, name);
        match module.references {
            ..0 => drop(busy.moving.insert(name.clone())),
            _ if unexplained > 0 => drop(busy.used.insert(name.clone(), unexplained)),
            _ => {}
        }
    }
    if busy != Busy::default() {
        return Err(busy);
    }
    Ok(in_order(modules, family))
}

/// The driver and all modules of its own that use it, however indirectly; and others that do.
fn family(modules: &Modules) -> (BTreeSet<String>, BTreeMap<String, String>) {
    let mut family: BTreeSet<String> = BTreeSet::new();
    let mut others = BTreeMap::new();
    let mut ahead: Vec<&str> = OURS.into_iter().filter(|name| modules.contains_key(*name)).collect();
    while let Some(name) = ahead.pop() {
        if !family.insert(name.to_owned()) {
            continue;
        }
        for holder in modules.get(name).into_iter().flat_map(|module| &module.holders) {
            if holder.starts_with(DRIVER) || OURS.contains(&holder.as_str()) {
                ahead.push(holder);
            } else {
                others.insert(holder.clone(), name.to_owned());
            }
        }
    }
    (family, others)
}

/// How many of a module's references are those of other modules.
fn explained(modules: &Modules, name: &str) -> i64 {
    let holders = modules.get(name).into_iter().flat_map(|module| &module.holders);
    let ordinary = holders.filter(|holder| *holder != TWO_REFERENCES).count();
    let twice = if name == DRIVER && modules.contains_key(TWO_REFERENCES) { 2 } else { 0 };
    i64::try_from(ordinary).unwrap_or(i64::MAX).saturating_add(twice)
}

/// Users before what they use.
fn in_order(modules: &Modules, mut left: BTreeSet<String>) -> Vec<String> {
    let rank = |name: &&String| {
        let known = OURS.iter().position(|ours| ours == name);
        // One that nobody knows here uses the ones that everybody knows.
        (known.map_or(0, |at| at + 1), (*name).clone())
    };
    let mut order = Vec::new();
    while !left.is_empty() {
        let free = |name: &&String| {
            modules.get(*name).is_none_or(|module| module.holders.iter().all(|holder| !left.contains(holder)))
        };
        // The kernel has no circles; if it had, any order would be as good.
        let next = left.iter().filter(free).min_by_key(rank).or_else(|| left.first()).cloned();
        let Some(next) = next else { break };
        left.remove(&next);
        order.push(next);
    }
    order.retain(|name| modules.contains_key(name));
    order
}

#[cfg(test)]
mod tests;
