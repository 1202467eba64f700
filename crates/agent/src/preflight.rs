//! `preflight_check`: looks at everything that `uninstall_driver` needs, and changes nothing.

use crate::failure::Failure;
use crate::host::{Host, KernelPaths};
use crate::labels::{self, Batch};
use crate::uninstall::Agent;
use crate::unload;
use crate::{host_driver, journal};

/// Capabilities by number: what for.
const CAPABILITIES: [(u32, &str); 3] = [
    (16, "CAP_SYS_MODULE (to remove kernel modules)"),
    (18, "CAP_SYS_CHROOT (to ask the host for its driver)"),
    (21, "CAP_SYS_ADMIN (to unmount the driver's root directory)"),
];

/// Names what would keep the driver manager from its work; what is only in its way for now is told in the log.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_capabilities_are_named() {
        assert_eq!(missing_capabilities("Name:\tx\nCapEff:\t000001ffffffffff\n"), Vec::<String>::new());
        let without_modules = missing_capabilities("CapEff:\t000001fffffeffff\n");
        assert_eq!(without_modules, ["the container lacks CAP_SYS_MODULE (to remove kernel modules)"]);
        assert_eq!(missing_capabilities("CapEff:\t0\n").len(), 3);
    }
}
