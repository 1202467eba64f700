//! The driver's RDMA parts are built against MOFED, so that has to be there first.

use std::time::Duration;

use crate::failure::Failure;
use crate::host::{Host, KernelPaths};
use crate::settings::Settings;
use crate::stop::Stop;
use crate::wait::{Audience, Look, Looker, Wait};

/// Mellanox.
const VENDOR: u32 = 0x15b3;
/// How often it is looked for.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// The module that the host's MOFED loads.
const HOST_MODULE: &str = "mlx5_core";

/// Waits for MOFED if the driver and the machine have a use for it.
pub(crate) async fn ready(
    host: &impl Host,
    settings: &Settings,
    stop: &Stop,
    told: Audience<'_>,
) -> Result<(), Failure> {
    if !settings.rdma || !host.pci_devices().await?.iter().any(|device| device.vendor == VENDOR) {
        return Ok(());
    }
    let wait = Wait { what: "MOFED", every: LOOK_EVERY, limit: settings.mofed_limit };
    wait.until(stop, told, Mofed { host, settings }).await
}

/// MOFED on this machine.
struct Mofed<'a, H> {
    host: &'a H,
    settings: &'a Settings,
}

impl<H: Host> Looker for Mofed<'_, H> {
    async fn look(&mut self) -> Result<Look, Failure> {
        let (ready, missing) = if self.settings.host_mofed {
            let loaded = self.host.modules(&KernelPaths::default()).await?.contains_key(HOST_MODULE);
            (loaded, format!("kernel module {HOST_MODULE} is not loaded on the host"))
        } else {
            let path = &self.settings.paths.mofed_ready;
            (self.host.exists(path).await?, format!("{path} is not there"))
        };
        Ok(if ready { Look::Done } else { Look::Missing(missing) })
    }
}
