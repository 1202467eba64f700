//! `/sys/bus/pci/devices`: which devices there are, and what they are bound to.

use std::path::Path;

use crate::host::{HostError, HostResult, PciDevice};

/// The PCI devices by address. A machine without a PCI bus has none.
pub(super) fn devices(bus: &Path) -> HostResult<Vec<PciDevice>> {
    let entries = match std::fs::read_dir(bus) {
        Ok(entries) => entries,
        Err(error) if super::is_absent(&error) => return Ok(Vec::new()),
        Err(error) => return Err(HostError::new(format!("read {}", bus.display()), error)),
    };
    let mut devices: Vec<PciDevice> = entries.flatten().map(|entry| device(&entry.path())).collect();
    devices.sort_by(|a, b| a.address.cmp(&b.address));
    Ok(devices)
}

fn device(path: &Path) -> PciDevice {
    let text = |name: &str| std::fs::read_to_string(path.join(name)).unwrap_or_default().trim().to_owned();
    let number = |name: &str| u32::from_str_radix(text(name).trim_start_matches("0x"), 16).unwrap_or(0);
    let driver = std::fs::read_link(path.join("driver")).ok();
    let names = std::fs::read_dir(path).into_iter().flatten().flatten();
    let names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut consumers: Vec<String> =
        names.filter_map(|name| name.strip_prefix("consumer:pci:").map(str::to_owned)).collect();
    consumers.sort();
    PciDevice {
        address: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        vendor: number("vendor"),
        class: number("class"),
        driver: driver.and_then(|target| Some(target.file_name()?.to_string_lossy().into_owned())),
        modalias: text("modalias"),
        consumers,
        vfio_files: vfio_files(path),
    }
}

/// A virtual machine opens the device's group (with an IOMMU or without one), in newer kernels also the device itself.
fn vfio_files(path: &Path) -> Vec<String> {
    let group = std::fs::read_link(path.join("iommu_group")).ok();
    let group = group.as_ref().and_then(|target| target.file_name()).map(|name| name.to_string_lossy());
    let groups = group.into_iter().flat_map(|name| [name.to_string(), format!("noiommu-{name}")]);
    let devices = std::fs::read_dir(path.join("vfio-dev")).into_iter().flatten().flatten();
    let devices = devices.map(|entry| format!("devices/{}", entry.file_name().to_string_lossy()));
    groups.chain(devices).map(|name| format!("/dev/vfio/{name}")).collect()
}
