//! Giving NVIDIA's devices to virtual machines (vfio) and taking them back.
//!
//! A device is taken back only from a vfio driver; one that something else drives is left alone. What fails is said and
//! makes the whole fail, after the other devices have had their turn. Whoever is told to end does so between two devices.

use std::time::Duration;

use crate::failure::Failure;
use crate::host::{Holders, Host, HostError, PciDevice, Ran, not_looked_at};
use crate::modalias::best_driver;
use crate::stop::Stop;

const NVIDIA: u32 = 0x10de;
const VGA: u32 = 0x03_0000;
const ACCELERATOR: u32 = 0x03_0200;
const NVSWITCH: u32 = 0x06_8000;
/// How the names of the device files of virtual machines begin.
const DEVICE_FILES: &str = "/dev/vfio/";
/// An empty line clears the override.
const NO_OVERRIDE: &str = "\n";
/// Loading a module takes a moment.
const MODPROBE_WITHIN: Duration = Duration::from_mins(1);

/// Which devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Which {
    /// All of NVIDIA's.
    All,
    /// The one with this address.
    One(String),
}

/// NVIDIA's devices among all, as far as they are meant.
pub fn chosen<'a>(devices: &'a [PciDevice], which: &Which, nvswitches: bool) -> Vec<&'a PciDevice> {
    let ours = |device: &&PciDevice| {
        let class = matches!(device.class, VGA | ACCELERATOR) || (nvswitches && device.class == NVSWITCH);
        device.vendor == NVIDIA && class
    };
    let meant = |device: &&PciDevice| match which {
        Which::All => true,
        Which::One(address) => device.address == *address,
    };
    devices.iter().filter(ours).filter(meant).collect()
}

/// A device and, for a graphics card, the devices on it that depend on it.
fn with_auxiliary<'a>(devices: &'a [PciDevice], device: &'a PciDevice) -> Vec<&'a PciDevice> {
    let auxiliary = |other: &&PciDevice| device.class == VGA && device.consumers.contains(&other.address);
    std::iter::once(device).chain(devices.iter().filter(auxiliary)).collect()
}

fn is_vfio(driver: &str) -> bool {
    driver.contains("vfio")
}

/// Takes devices back from vfio drivers.
pub async fn unbind(host: &impl Host, stop: &Stop, which: &Which, nvswitches: bool) -> Result<(), Failure> {
    let devices = host.pci_devices().await?;
    let mut failed = Vec::new();
    for device in chosen(&devices, which, nvswitches) {
        stop.check()?;
        for device in with_auxiliary(&devices, device) {
            match device.driver.as_deref() {
                Some(driver) if is_vfio(driver) => {
                    if let Err(failure) = take_back(host, device).await {
                        let why = failure.sentence();
                        failed.push(format!("take {} back from {driver}: {why}", device.address));
                    }
                }
                Some(driver) => tracing::info!("{} is driven by {driver} and is left alone", device.address),
                None => {
                    if let Err(error) = forget(host, &device.address).await {
                        failed.push(format!("clear the override of {}: {}", device.address, error.source));
                    }
                }
            }
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(Failure::Devices(failed.join("; "))) }
}

async fn take_back(host: &impl Host, device: &PciDevice) -> Result<(), Failure> {
    is_free(host, device).await?;
    let address = &device.address;
    host.write(&driver_override(address), NO_OVERRIDE).await?;
    host.write(&format!("/sys/bus/pci/devices/{address}/driver/unbind"), address).await?;
    tracing::info!("took {address} back");
    Ok(())
}

/// An error that names who holds the device, or says that this cannot be seen. To take it away from a virtual machine asks that to give it up, and waits for
/// it in the kernel, where nothing ends the wait.
async fn is_free(host: &impl Host, device: &PciDevice) -> Result<(), Failure> {
    // A virtual machine holds it by one of these, or not at all.
    if device.vfio_files.is_empty() {
        return Ok(());
    }
    let Holders { mut seen, hidden } = host.holders(DEVICE_FILES).await?;
    seen.retain(|holder| device.vfio_files.iter().any(|file| holder.files.contains(file)));
    let mut held: Vec<String> = seen.iter().map(ToString::to_string).collect();
    if hidden > 0 {
        held.push(not_looked_at(hidden));
    }
    if held.is_empty() { Ok(()) } else { Err(Failure::Devices(held.join("; "))) }
}

/// A `bind` that was killed before its last step leaves a device that no driver has and only a vfio driver may take.
async fn forget(host: &impl Host, address: &str) -> Result<(), HostError> {
    let path = driver_override(address);
    if host.read(&path).await?.is_some_and(|driver| is_vfio(&driver)) {
        host.write(&path, NO_OVERRIDE).await?;
        tracing::info!("{address} may be taken by any driver again");
    }
    Ok(())
}

/// The file with the name of the only driver that may take a device.
fn driver_override(address: &str) -> String {
    format!("/sys/bus/pci/devices/{address}/driver_override")
}

/// Gives devices to the vfio driver that fits each best.
pub async fn bind(
    host: &impl Host,
    stop: &Stop,
    which: &Which,
    nvswitches: bool,
    host_root: &str,
) -> Result<(), Failure> {
    let devices = host.pci_devices().await?;
    let aliases = aliases(host, host_root).await?;
    let mut failed = Vec::new();
    for device in chosen(&devices, which, nvswitches) {
        stop.check()?;
        for device in with_auxiliary(&devices, device) {
            let driver = best_driver(&aliases, &device.modalias);
            match give(host, stop, device, &driver, host_root).await {
                Err(failure @ Failure::Stopped(_)) => return Err(failure),
                Err(failure) => {
                    failed.push(format!("give {} to {driver}: {}", device.address, failure.sentence()));
                }
                Ok(()) => {}
            }
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(Failure::Devices(failed.join("; "))) }
}

async fn aliases(host: &impl Host, host_root: &str) -> Result<String, Failure> {
    let release = host.read("/proc/sys/kernel/osrelease").await?.unwrap_or_default();
    let root = host_root.trim_end_matches('/');
    let path = format!("{root}/lib/modules/{}/modules.alias", release.trim());
    Ok(host.read(&path).await?.unwrap_or_default())
}

async fn give(
    host: &impl Host,
    stop: &Stop,
    device: &PciDevice,
    driver: &str,
    host_root: &str,
) -> Result<(), Failure> {
    // Nothing of the device has changed yet, and modprobe may take longer than SIGKILL waits.
    let modprobe = ["modprobe", driver];
    let ran = tokio::select! {
        biased;
        stopped = stop.told() => return Err(stopped.into()),
        ran = host.run(host_root, &modprobe, MODPROBE_WITHIN) => ran?,
    };
    match ran {
        Ran::Ended { code: Some(0), .. } => {}
        other => return Err(Failure::Devices(format!("modprobe {driver} did not succeed ({other:?})"))),
    }
    let driver = registered(host, driver).await?;
    if device.driver.as_deref() == Some(&driver) {
        return Ok(());
    }
    is_free(host, device).await?;
    let path = driver_override(&device.address);
    host.write(&path, NO_OVERRIDE).await?;
    if device.driver.is_some() {
        let unbind = format!("/sys/bus/pci/devices/{}/driver/unbind", device.address);
        host.write(&unbind, &device.address).await?;
    }
    host.write(&path, &driver).await?;
    host.write(&format!("/sys/bus/pci/drivers/{driver}/bind"), &device.address).await?;
    tracing::info!("gave {} to {driver}", device.address);
    Ok(())
}

/// The name under which a module's driver is known to the bus: modules are spelled with `_`, some drivers with `-`.
async fn registered(host: &impl Host, module: &str) -> Result<String, Failure> {
    for name in [module.to_owned(), module.replace('_', "-"), module.replace('-', "_")] {
        if host.exists(&format!("/sys/bus/pci/drivers/{name}")).await? {
            return Ok(name);
        }
    }
    Err(Failure::Devices(format!("the bus knows no driver {module}")))
}

#[cfg(test)]
mod tests;
