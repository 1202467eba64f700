//! The driver's RDMA parts are built against MOFED, so that has to be there first.

use std::time::Duration;

use crate::failure::Failure;
use crate::host::{Host, KernelPaths};
use crate::settings::Settings;
use crate::stop::Stop;
use crate::wait::{Audience, Look, Wait};

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
    let has_card =
        async || Ok::<_, Failure>(host.pci_devices().await?.iter().any(|device| device.vendor == VENDOR));
    if !settings.rdma || !has_card().await? {
        return Ok(());
    }
    let wait = Wait { what: "MOFED", every: LOOK_EVERY, limit: Some(settings.mofed_limit) };
    wait.until(stop, told, async || {
        let (ready, missing) = if settings.host_mofed {
            let loaded = host.modules(&KernelPaths::default()).await?.contains_key(HOST_MODULE);
            (loaded, format!("kernel module {HOST_MODULE} is not loaded on the host"))
        } else {
            let path = &settings.paths.mofed_ready;
            (host.exists(path).await?, format!("{path} is not there"))
        };
        Ok(if ready { Look::Done } else { Look::Missing(missing) })
    })
    .await
}
