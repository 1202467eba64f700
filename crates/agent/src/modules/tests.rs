use super::*;
use crate::host::Module;

/// Modules by name, references and holders.
type Loaded<'a> = &'a [(&'a str, i64, &'a [&'a str])];

fn modules(list: Loaded<'_>) -> Modules {
    list.iter()
        .map(|(name, references, holders)| {
            let holders = holders.iter().map(|holder| (*holder).to_owned()).collect();
            ((*name).to_owned(), Module { references: *references, holders })
        })
        .collect()
}

fn order(list: Loaded<'_>) -> String {
    match unload_order(&modules(list)) {
        Ok(order) => order.join(" "),
        Err(busy) => format!("busy: {busy}"),
    }
}

#[test]
fn users_leave_before_what_they_use() {
    let table: [(Loaded<'_>, &str); 6] = [
        (&[], ""),
        (&[("nvidia", 0, &[])], "nvidia"),
        (
            &[
                ("nvidia", 2, &["nvidia_modeset", "nvidia_uvm"]),
                ("nvidia_modeset", 1, &["nvidia_drm"]),
                ("nvidia_drm", 0, &[]),
                ("nvidia_uvm", 0, &[]),
            ],
            "nvidia_drm nvidia_modeset nvidia_uvm nvidia",
        ),
        (
            &[("nvidia", 2, &["gdrdrv", "nvidia_uvm"]), ("gdrdrv", 0, &[]), ("nvidia_uvm", 0, &[])],
            "nvidia_uvm gdrdrv nvidia",
        ),
        // One that came with a newer driver and that nobody here has heard of.
        (&[("nvidia", 1, &["nvidia_new"]), ("nvidia_new", 0, &[])], "nvidia_new nvidia"),
        // Named like the driver's, but not the driver's.
        (&[("nvidia", 0, &[]), ("nvidia_wmi_ec_backlight", 1, &[])], "nvidia"),
    ];
    for (loaded, expected) in table {
        assert_eq!(order(loaded), expected);
    }
}

#[test]
fn nvidia_vgpu_vfio_holds_two_references() {
    let with = |references| [("nvidia", references, &["nvidia_vgpu_vfio"][..]), ("nvidia_vgpu_vfio", 0, &[])];
    assert_eq!(order(&with(2)), "nvidia_vgpu_vfio nvidia");
    assert_eq!(order(&with(1)), "nvidia_vgpu_vfio nvidia");
    assert!(order(&with(3)).starts_with("busy: module nvidia has 1 reference that"));
}

#[test]
fn one_busy_module_keeps_all() {
    let text = order(&[("nvidia", 1, &["nvidia_uvm"]), ("nvidia_uvm", 3, &[])]);
    assert_eq!(
        text,
        "busy: module nvidia_uvm has 3 references that no module explains; \
         no process with an open /dev/nvidia* file can be seen from here"
    );
}

#[test]
fn device_files_are_those_of_the_driver_and_of_the_modules_that_are_used() {
    let busy = |list: Loaded<'_>| unload_order(&modules(list)).unwrap_err().device_files();
    let with = |drm, gdr| {
        busy(&[("nvidia", 4, &["nvidia_drm", "gdrdrv"]), ("nvidia_drm", drm, &[]), ("gdrdrv", gdr, &[])])
    };
    assert_eq!(with(0, 0), ["/dev/nvidia"]);
    assert_eq!(with(1, 0), ["/dev/nvidia", "/dev/dri/"]);
    assert_eq!(with(0, 2), ["/dev/nvidia", "/dev/gdrdrv"]);
    let text = order(&[("nvidia", 1, &["nvidia_peermem"]), ("nvidia_peermem", 1, &[])]);
    assert_eq!(
        text,
        "busy: module nvidia_peermem has 1 reference that no module explains; \
         no process with an open /dev/nvidia* or /dev/infiniband/* file can be seen from here"
    );
}

#[test]
fn a_module_of_others_is_named_and_not_removed() {
    let text = order(&[("nvidia", 1, &["acme_rdma"]), ("acme_rdma", 0, &[])]);
    assert_eq!(text, "busy: module acme_rdma uses nvidia");
}

#[test]
fn a_module_that_somebody_is_removing_is_waited_for() {
    assert_eq!(order(&[("nvidia", -1, &[])]), "busy: module nvidia is being loaded or removed");
}
