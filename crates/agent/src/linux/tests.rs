//! The machine for real, on a tree of files; mounts and other roots need rights and are tried in `tests/linux.rs`.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use super::*;
use crate::modules::unload_order;

fn tree() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn put(root: &Path, path: &str, text: &str) {
    let path = root.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

#[tokio::test]
async fn modules_come_from_proc_and_sys_together() {
    let dir = tree();
    let root = dir.path();
    put(
        root,
        "proc/modules",
        "nvidia 1 2 nvidia_uvm, Live 0x0\nnvidia_uvm 1 0 - Live 0x0\nnvidia_drm 1 0 - Live 0x0\n",
    );
    // A holder that /proc/modules does not list.
    put(root, "sys/module/nvidia/holders/nvidia_drm", "");
    let modules = Linux::below(root).modules(&KernelPaths::default()).await.unwrap();
    assert_eq!(modules["nvidia"].holders.iter().collect::<Vec<_>>(), ["nvidia_drm", "nvidia_uvm"]);
    assert_eq!(unload_order(&modules).unwrap(), ["nvidia_drm", "nvidia_uvm", "nvidia"]);
}

#[tokio::test]
async fn a_missing_proc_is_an_error_and_not_a_machine_without_modules() {
    let dir = tree();
    let error = Linux::below(dir.path()).modules(&KernelPaths::default()).await.unwrap_err();
    assert!(error.operation.ends_with("/proc/modules"), "{error}");
}

#[tokio::test]
async fn a_missing_sys_is_an_error_and_not_a_machine_whose_modules_have_no_users() {
    let dir = tree();
    put(dir.path(), "proc/modules", "nvidia 1 0 - Live 0x0\n");
    let error = Linux::below(dir.path()).modules(&KernelPaths::default()).await.unwrap_err();
    assert!(error.operation.ends_with("/sys/module"), "{error}");
}

#[tokio::test]
async fn holders_that_cannot_be_read_are_an_error_and_not_a_module_without_users() {
    let dir = tree();
    put(dir.path(), "proc/modules", "nvidia 1 0 - Live 0x0\n");
    // Root may read everything, but nobody can list a file.
    put(dir.path(), "sys/module/nvidia/holders", "");
    let error = Linux::below(dir.path()).modules(&KernelPaths::default()).await.unwrap_err();
    assert!(error.operation.ends_with("/sys/module/nvidia/holders"), "{error}");
}

#[tokio::test]
async fn holders_are_named_with_pid_and_command() {
    let dir = tree();
    let root = dir.path();
    put(root, "proc/4242/comm", "python3\n");
    fs::create_dir_all(root.join("proc/4242/fd")).unwrap();
    symlink("/dev/nvidia0", root.join("proc/4242/fd/5")).unwrap();
    symlink("/dev/nvidia-uvm", root.join("proc/4242/fd/6")).unwrap();
    symlink("/dev/null", root.join("proc/4242/fd/0")).unwrap();
    put(root, "proc/17/comm", "sh\n");
    fs::create_dir_all(root.join("proc/17/fd")).unwrap();
    put(root, "proc/modules", "");
    let holders = Linux::below(root).holders("/dev/nvidia").await.unwrap();
    let texts: Vec<String> = holders.seen.iter().map(ToString::to_string).collect();
    assert_eq!(texts, ["process 4242 (python3) has /dev/nvidia-uvm and /dev/nvidia0 open"]);
}

#[tokio::test]
async fn a_real_process_with_an_open_file_is_found() {
    let dir = tree();
    let path = dir.path().join("nvidia0");
    put(dir.path(), "nvidia0", "");
    let mut child =
        std::process::Command::new("sleep").arg("60").stdin(fs::File::open(&path).unwrap()).spawn().unwrap();
    let holders = Linux::default().holders(path.to_str().unwrap()).await.unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    let found = holders.seen.iter().find(|holder| holder.pid == child.id()).unwrap();
    assert_eq!(found.command, "sleep");
}

#[tokio::test]
async fn devices_are_read_with_driver_and_consumers() {
    let dir = tree();
    let root = dir.path();
    let device = "sys/bus/pci/devices/0000:01:00.0";
    put(root, &format!("{device}/vendor"), "0x10de\n");
    put(root, &format!("{device}/class"), "0x030000\n");
    put(root, &format!("{device}/modalias"), "pci:v000010DEd00002342sv0sd0bc03sc00i00\n");
    put(root, &format!("{device}/consumer:pci:0000:01:00.1/x"), "");
    symlink("../../drivers/vfio-pci", root.join(device).join("driver")).unwrap();
    symlink("../../../kernel/iommu_groups/12", root.join(device).join("iommu_group")).unwrap();
    fs::create_dir_all(root.join(device).join("vfio-dev/vfio3")).unwrap();
    let host = Linux::below(root);
    let devices = host.pci_devices().await.unwrap();
    assert_eq!(devices.len(), 1);
    let found = &devices[0];
    assert_eq!((found.vendor, found.class), (0x10de, 0x03_0000));
    assert_eq!(found.driver.as_deref(), Some("vfio-pci"));
    assert_eq!(found.consumers, ["0000:01:00.1"]);
    assert_eq!(found.vfio_files, ["/dev/vfio/12", "/dev/vfio/noiommu-12", "/dev/vfio/devices/vfio3"]);
    assert_eq!(Linux::below("/nonexistent").pci_devices().await.unwrap(), []);
}

#[tokio::test]
async fn files_that_are_not_there_are_told_from_files_that_cannot_be_read() {
    let dir = tree();
    let host = Linux::below(dir.path());
    assert_eq!(host.read("/run/x").await.unwrap(), None);
    host.remove("/run/x").await.unwrap();
    put(dir.path(), "run/x", "text");
    assert_eq!(host.read("/run/x").await.unwrap().as_deref(), Some("text"));
    assert!(host.read("/run").await.is_err(), "a directory is not an absent file");
    host.write("/run/x", "other").await.unwrap();
    host.remove("/run/x").await.unwrap();
    assert!(!host.exists("/run/x").await.unwrap());
}

#[tokio::test]
async fn a_write_that_the_kernel_holds_on_to_ends_with_its_time() {
    let dir = tree();
    // Nobody reads it, so whoever opens it for writing waits.
    let pipe = dir.path().join("unbind");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let host = Linux { patience: Duration::from_millis(50), ..Linux::below(dir.path()) };
    let error = host.write("/unbind", "0000:01:00.0").await.unwrap_err();
    assert!(error.source.to_string().contains("it has not come about"), "{}", error.source);
    // The thread of the write ends with this.
    assert_eq!(fs::read_to_string(&pipe).unwrap(), "0000:01:00.0");
}

#[tokio::test]
async fn removing_a_module_that_is_not_loaded_is_refused_by_the_kernel() {
    let error = Linux::default().remove_module("pitcrew_no_such_module").await.unwrap_err();
    assert_eq!(error.operation, "remove kernel module pitcrew_no_such_module");
}
