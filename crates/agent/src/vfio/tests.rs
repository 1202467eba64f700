use super::*;
use crate::failure::TERMINATED;
use crate::fake::{FakeHost, Machine};
use crate::stop::Stopper;

fn device(address: &str, class: u32, driver: Option<&str>) -> PciDevice {
    PciDevice {
        address: address.to_owned(),
        vendor: NVIDIA,
        class,
        driver: driver.map(str::to_owned),
        modalias: "pci:v000010DEd00002342sv000010DEsd000016EBbc03sc02i00".to_owned(),
        consumers: Vec::new(),
        vfio_files: vec![format!("/dev/vfio/{address}"), format!("/dev/vfio/noiommu-{address}")],
    }
}

fn host(devices: Vec<PciDevice>) -> FakeHost {
    let mut machine = Machine { devices, ..Machine::default() };
    machine.file("/proc/sys/kernel/osrelease", "6.8.0-gpu\n");
    machine.file(
        "/lib/modules/6.8.0-gpu/modules.alias",
        "alias vfio_pci:v*d*sv*sd*bc*sc*i* vfio_pci\nalias vfio_pci:v000010DEd00002342sv*sd*bc*sc*i* nvgrace_gpu_vfio_pci\n",
    );
    machine.loadable.insert("vfio_pci".to_owned(), "vfio-pci".to_owned());
    machine.loadable.insert("nvgrace_gpu_vfio_pci".to_owned(), "nvgrace-gpu-vfio-pci".to_owned());
    FakeHost::new(machine)
}

fn drivers(host: &FakeHost) -> Vec<Option<String>> {
    host.machine().devices.into_iter().map(|device| device.driver).collect()
}

#[test]
fn only_nvidias_gpus_are_meant_and_nvswitches_if_asked_for() {
    let other = PciDevice { vendor: 0x8086, ..device("d", VGA, None) };
    let devices =
        [device("a", VGA, None), device("b", ACCELERATOR, None), device("c", NVSWITCH, None), other];
    let addresses = |which: &Which, nvswitches| -> Vec<&str> {
        chosen(&devices, which, nvswitches).into_iter().map(|device| device.address.as_str()).collect()
    };
    assert_eq!(addresses(&Which::All, false), ["a", "b"]);
    assert_eq!(addresses(&Which::All, true), ["a", "b", "c"]);
    assert_eq!(addresses(&Which::One("b".to_owned()), false), ["b"]);
    assert_eq!(addresses(&Which::One("d".to_owned()), true), [""; 0]);
}

#[tokio::test]
async fn a_device_goes_to_the_driver_that_fits_best_under_the_name_that_the_bus_knows() {
    let host = host(vec![device("a", ACCELERATOR, Some("nvidia"))]);
    bind(&host, &Stop::never(), &Which::All, false, "/").await.unwrap();
    assert_eq!(drivers(&host), [Some("nvgrace-gpu-vfio-pci".to_owned())]);
    let before = host.calls().len();
    bind(&host, &Stop::never(), &Which::All, false, "/").await.unwrap();
    let writes = host.calls().into_iter().skip(before).filter(|call| call.starts_with("write")).count();
    assert_eq!(writes, 0, "it is where it should be");
}

#[tokio::test]
async fn what_is_on_the_card_goes_with_it_and_comes_back() {
    let mut card = device("a", VGA, None);
    card.consumers = vec!["a.1".to_owned()];
    let sound = PciDevice { vendor: NVIDIA, ..device("a.1", 0x04_0300, Some("snd_hda_intel")) };
    let host = host(vec![card, sound]);
    bind(&host, &Stop::never(), &Which::One("a".to_owned()), false, "/").await.unwrap();
    assert!(drivers(&host).iter().all(|driver| driver.as_deref().is_some_and(is_vfio)));
    unbind(&host, &Stop::never(), &Which::All, false).await.unwrap();
    assert_eq!(drivers(&host), [None, None]);
}

#[tokio::test]
async fn one_device_that_fails_is_told_of_and_does_not_keep_the_others() {
    let host = host(vec![device("a", VGA, Some("vfio-pci")), device("b", VGA, Some("vfio-pci"))]);
    host.change(|machine| {
        machine.failing.insert("write /sys/bus/pci/devices/a/driver/unbind".to_owned());
    });
    let failure = unbind(&host, &Stop::never(), &Which::All, false).await.unwrap_err();
    assert!(failure.sentence().starts_with("take a back from vfio-pci"), "{}", failure.sentence());
    assert_eq!(drivers(&host), [Some("vfio-pci".to_owned()), None]);
}

#[tokio::test]
async fn a_bind_that_was_killed_before_its_last_step_is_undone() {
    let host = host(vec![device("a", VGA, None), device("b", VGA, None)]);
    let (ours, theirs) = (driver_override("a"), driver_override("b"));
    host.change(|machine| {
        machine.file(&ours, "vfio-pci\n");
        machine.file(&theirs, "nvidia\n");
    });
    unbind(&host, &Stop::never(), &Which::All, false).await.unwrap();
    let files = host.machine().files;
    assert_eq!(files[&ours], NO_OVERRIDE);
    assert_eq!(files[&theirs], "nvidia\n", "nobody here wrote that");
    host.change(|machine| {
        machine.file(&ours, "vfio-pci\n");
        machine.failing.insert(format!("write {ours}"));
    });
    let failure = unbind(&host, &Stop::never(), &Which::All, false).await.unwrap_err();
    assert!(failure.sentence().starts_with("clear the override of a: "), "{}", failure.sentence());
}

#[tokio::test(start_paused = true)]
async fn a_device_that_a_virtual_machine_holds_is_not_taken_away_and_who_holds_it_is_named() {
    let held = host(vec![device("1", VGA, Some("vfio-pci")), device("12", VGA, Some("vfio-pci"))]);
    // Of the other device's group; the names begin alike.
    held.change(|machine| machine.open(9, "qemu-kvm", "/dev/vfio/12", &[]));
    let stop = Stop::never();
    let unbinding = unbind(&held, &stop, &Which::All, false);
    let unbound = tokio::time::timeout(Duration::from_hours(1), unbinding).await;
    let text = unbound.expect("the kernel would wait for ever").unwrap_err().sentence();
    assert_eq!(text, "take 12 back from vfio-pci: process 9 (qemu-kvm) has /dev/vfio/12 open");
    assert_eq!(drivers(&held), [None, Some("vfio-pci".to_owned())]);
    assert!(!held.calls().contains(&format!("write {}", driver_override("12"))), "nothing was changed");
    // Nor is it given to another vfio driver.
    let one = Which::One("12".to_owned());
    let bound = tokio::time::timeout(Duration::from_hours(1), bind(&held, &stop, &one, false, "/")).await;
    let text = bound.expect("the kernel would wait for ever").unwrap_err().sentence();
    assert!(text.contains("process 9 (qemu-kvm) has /dev/vfio/12 open"), "{text}");
}

#[tokio::test]
async fn a_device_is_not_taken_away_where_nobody_can_see_who_holds_it() {
    let unseen = host(vec![device("a", VGA, Some("vfio-pci"))]);
    unseen.change(|machine| machine.hidden = 1);
    let text = unbind(&unseen, &Stop::never(), &Which::All, false).await.unwrap_err().sentence();
    assert!(
        text.starts_with("take a back from vfio-pci: 1 process that may have it open could not"),
        "{text}"
    );
    assert_eq!(drivers(&unseen), [Some("vfio-pci".to_owned())]);
    // One that has no such file is held by no virtual machine.
    unseen.change(|machine| machine.devices[0].vfio_files.clear());
    unbind(&unseen, &Stop::never(), &Which::All, false).await.unwrap();
    assert_eq!(drivers(&unseen), [None]);
}

#[tokio::test(start_paused = true)]
async fn whoever_is_told_to_end_leaves_the_devices_that_are_left_as_they_are() {
    let (stopper, stop) = Stopper::new();
    stopper.stop();
    let devices = || vec![device("a", VGA, Some("vfio-pci")), device("b", VGA, Some("nvidia"))];
    let host = host(devices());
    for failure in [
        unbind(&host, &stop, &Which::All, false).await.unwrap_err(),
        bind(&host, &stop, &Which::All, false, "/").await.unwrap_err(),
    ] {
        assert_eq!(failure.exit_code(), TERMINATED, "{}", failure.sentence());
    }
    assert_eq!(host.machine().devices, devices());
    // Nor does it wait for a program on the host that hangs, with half a minute until SIGKILL.
    host.change(|machine| machine.modprobe_hangs = true);
    let (stopper, stop) = Stopper::new();
    let tell = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        stopper.stop();
    };
    let begun = tokio::time::Instant::now();
    let failure = tokio::join!(bind(&host, &stop, &Which::All, false, "/"), tell).0.unwrap_err();
    assert_eq!((failure.exit_code(), begun.elapsed()), (TERMINATED, Duration::from_secs(1)));
    assert_eq!(host.machine().devices, devices());
}
