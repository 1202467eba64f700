//! `preflight_check`: looks at everything that `uninstall_driver` needs, and changes nothing.

use pitcrew_core::contract::EVENT_NAMESPACE;

use crate::cluster::Permission;
use crate::failure::Failure;
use crate::host::{Host, KernelPaths};
use crate::labels::{self, Batch};
use crate::uninstall::Agent;
use crate::unload;
use crate::{host_driver, journal};

/// Capabilities by number: what for.
const CAPABILITIES: [(u32, &str); 5] = [
    (2, "CAP_DAC_READ_SEARCH (to see the open files of processes of other users)"),
    (16, "CAP_SYS_MODULE (to remove kernel modules)"),
    (18, "CAP_SYS_CHROOT (to ask the host for its driver)"),
    (19, "CAP_SYS_PTRACE (to name the processes that keep the driver busy)"),
    (21, "CAP_SYS_ADMIN (to unmount the driver's root directory)"),
];

const fn to(verb: &'static str, resource: &'static str) -> Permission {
    Permission { verb, group: "", resource, subresource: "", namespace: "" }
}

/// What is asked of the API, as the chart grants it.
const PERMISSIONS: [Permission; 5] = [
    to("patch", "nodes"),
    to("list", "pods"),
    Permission { subresource: "eviction", ..to("create", "pods") },
    Permission { group: "resource.k8s.io", ..to("get", "resourceclaims") },
    Permission { namespace: EVENT_NAMESPACE, ..to("create", "events") },
];

/// Names what the driver manager lacks and what would keep it from its work; what is only in its way for now is told in the log.
pub async fn check<H: Host>(agent: &Agent<'_, H>) -> Result<(), Failure> {
    let Agent { host, cluster, stop, settings } = agent;
    let mut problems = Vec::new();
    let node = cluster.node().await?;
    for batch in [Batch::First, Batch::Last] {
        if let Err(too_long) = labels::pause(&node.labels, batch, settings.custom_label.as_deref()) {
            problems.push(too_long.to_string());
        }
    }
    let status = host.read("/proc/self/status").await?.unwrap_or_default();
    problems.extend(missing_capabilities(&status));
    let mounts = host.read("/proc/self/mountinfo").await?.unwrap_or_default();
    problems.extend(not_shared(&mounts, &settings.paths.driver_root));
    for permission in PERMISSIONS {
        if !cluster.may(permission).await? {
            problems.push(format!("the service account may not {permission}"));
        }
    }
    if !host.exists(&settings.paths.host_root).await? {
        problems.push(format!("{} is not there: mount the host's root directory", settings.paths.host_root));
    }
    match host_driver::ask(*host, stop, &settings.paths).await {
        Ok(Some(version)) => problems.push(format!("the host has driver {version} installed")),
        Ok(None) => {}
        Err(failure) => problems.push(failure.sentence()),
    }
    let boot = journal::boot_id(*host).await?;
    if let Some(reboot) = node.needs_reboot(&boot) {
        let since = reboot.since.map(|at| format!(" since {at}")).unwrap_or_default();
        problems.push(format!("the node needs a reboot{since}: {}", reboot.why));
    }
    say_modules(agent).await?;
    if problems.is_empty() { Ok(()) } else { Err(Failure::Findings(problems)) }
}

/// Who uses the driver now may be gone when it matters: that is said, and is no problem.
async fn say_modules<H: Host>(agent: &Agent<'_, H>) -> Result<(), Failure> {
    match unload::look(agent.host).await {
        Ok(order) if order.is_empty() => tracing::info!("no driver is loaded"),
        Ok(order) => tracing::info!("the driver could be unloaded now: {}", order.join(" ")),
        Err(Failure::Busy(busy)) => tracing::info!("the driver is in use: {busy}"),
        Err(failure) => return Err(failure),
    }
    let loaded = agent.host.modules(&KernelPaths::default()).await?;
    if loaded.contains_key("nouveau") {
        tracing::info!("kernel module nouveau is loaded and will be removed");
    }
    Ok(())
}

/// From the effective set in `/proc/self/status`. Where it cannot be read nothing is said.
fn missing_capabilities(status: &str) -> Vec<String> {
    let set = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let Some(set) = set.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok()) else { return vec![] };
    let missing = CAPABILITIES.iter().filter(|(number, _)| set & (1 << number) == 0);
    missing.map(|(_, name)| format!("the container lacks {name}")).collect()
}

/// What is unmounted in this container has to be unmounted on the host too: the file system that the driver's root directory
/// is mounted on is a shared one, if the pod says Bidirectional. Where that cannot be read nothing is said.
fn not_shared(mountinfo: &str, driver_root: &str) -> Option<String> {
    let holds = |mount_point: &str| {
        let below = driver_root.strip_prefix(mount_point.trim_end_matches('/'));
        below.is_some_and(|below| below.starts_with('/'))
    };
    let mounts = mountinfo.lines().filter_map(|line| Some((line.split(' ').nth(4)?, line)));
    // Of mounts over mounts the last one counts.
    let (mount_point, line) = mounts
        .filter(|(mount_point, _)| holds(mount_point))
        .max_by_key(|(mount_point, _)| mount_point.len())?;
    let shared = line.split(' ').skip(6).take_while(|field| *field != "-").any(|f| f.starts_with("shared:"));
    (!shared).then(|| {
        format!(
            "{driver_root} is on {mount_point}, which is not shared with the host: mount /run/nvidia with mountPropagation \
             Bidirectional"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_root_that_the_host_would_go_on_to_see_is_told_of() {
        const ROOT: &str = "/run/nvidia/driver";
        let told = |mounts: &[&str]| not_shared(&mounts.join("\n"), ROOT);
        let container = "1 0 0:1 / / rw,relatime master:9 - overlay overlay rw";
        let shared = "2 1 0:2 /nvidia /run/nvidia rw shared:7 master:3 - tmpfs tmpfs rw";
        let private = "2 1 0:2 /nvidia /run/nvidia rw master:7 - tmpfs tmpfs rw";
        let driver = "3 2 0:3 / /run/nvidia/driver rw - overlay overlay rw";
        let other = "4 1 0:4 / /run/nvidia-other rw - tmpfs shared:1 rw";
        assert_eq!(told(&[container, shared, driver, other]), None);
        assert_eq!(told(&[]), None, "nobody knows");
        let not_mounted = told(&[container, other]).unwrap();
        assert!(not_mounted.starts_with("/run/nvidia/driver is on /, which is not shared"), "{not_mounted}");
        assert!(told(&[container, private, driver]).unwrap().contains("is on /run/nvidia, which"));
        assert!(told(&[container, shared, private]).is_some(), "the last one is in the way");
        assert_eq!(told(&[container, private, shared]), None);
    }

    #[test]
    fn missing_capabilities_are_named() {
        assert_eq!(missing_capabilities("Name:\tx\nCapEff:\t000001ffffffffff\n"), Vec::<String>::new());
        let without_modules = missing_capabilities("CapEff:\t000001fffffeffff\n");
        assert_eq!(without_modules, ["the container lacks CAP_SYS_MODULE (to remove kernel modules)"]);
        let without_reading = missing_capabilities("CapEff:\t000001fffffffffb\n");
        let named =
            "the container lacks CAP_DAC_READ_SEARCH (to see the open files of processes of other users)";
        assert_eq!(without_reading, [named]);
        assert_eq!(missing_capabilities("CapEff:\t0\n").len(), 5);
    }
}
