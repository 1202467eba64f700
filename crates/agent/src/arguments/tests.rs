use super::*;

fn driver_manager(arguments: &[&str]) -> DriverManager {
    let whole = ["driver-manager"].iter().chain(arguments).map(OsString::from);
    match read(whole).unwrap() {
        Called::Agent(agent) => match agent.which {
            AgentCommand::DriverManager(manager) => manager,
            other => panic!("{other:?}"),
        },
        Called::Chroot(..) => panic!("not an agent"),
    }
}

fn is_refused(arguments: &[&str]) -> bool {
    read(arguments.iter().map(OsString::from)).is_err()
}

#[test]
fn the_defaults_are_the_documented_ones() {
    let manager = driver_manager(&["uninstall_driver"]);
    assert_eq!(manager.command, Some(DriverManagerCommand::UninstallDriver));
    let settings = manager.settings().unwrap();
    assert!(settings.evict && settings.drain);
    assert!(!settings.force && !settings.delete_empty_dir && !settings.rdma && !settings.host_mofed);
    assert!(!settings.force_reinstall && settings.leave_limit.is_none());
    assert_eq!(settings.namespace, "gpu-operator");
    assert_eq!(settings.custom_label, None);
    assert_eq!(settings.paths.driver_root, "/run/nvidia/driver");
    assert_eq!(settings.uncordon, Uncordon::Finish);
}

#[test]
fn flags_stand_before_or_after_the_command_and_switches_need_no_value() {
    for arguments in [
        &[
            "--enable-auto-drain=false",
            "--drain-use-force",
            "--drain-timeout-seconds=300",
            "uninstall_driver",
        ][..],
        &[
            "uninstall_driver",
            "--enable-auto-drain=F",
            "--drain-use-force=1",
            "--drain-timeout-seconds",
            "5m",
        ],
    ] {
        let settings = driver_manager(arguments).settings().unwrap();
        assert!(!settings.drain && settings.force);
        assert_eq!(settings.leave_limit, Some(Duration::from_mins(5)));
    }
    assert!(is_refused(&["driver-manager", "--enable-auto-drain=yes", "uninstall_driver"]));
    assert!(is_refused(&["driver-manager", "something_else"]));
}

#[test]
fn a_variable_that_is_set_to_nothing_keeps_its_default() {
    let manager = driver_manager(&[
        "--enable-auto-drain=",
        "--drain-use-force=",
        "--drain-timeout-seconds=",
        "--mofed-timeout=",
        "--uncordon=",
        "finish",
        "--timeout=",
    ]);
    let settings = manager.settings().unwrap();
    assert!(settings.drain && !settings.force && settings.leave_limit.is_none());
    assert_eq!(settings.mofed_limit, Some(Duration::from_mins(10)));
    assert_eq!(settings.uncordon, Uncordon::Finish);
    let timeout = Duration::from_mins(30);
    assert_eq!(manager.command, Some(DriverManagerCommand::Finish { timeout, stay: false }));
    let safe_load = ["network-operator-init-container", "--node-name=n", "--configmap-name=c"];
    let safe_load = safe_load.into_iter().chain(["--configmap-namespace=ns", "--timeout="]);
    assert!(read(safe_load.map(OsString::from)).is_ok());
}

#[test]
fn no_time_is_for_ever() {
    let arguments = ["--mofed-timeout=0", "--drain-timeout-seconds=0s", "uninstall_driver"];
    let settings = driver_manager(&arguments).settings().unwrap();
    assert_eq!((settings.mofed_limit, settings.leave_limit), (None, None));
}

#[test]
fn an_empty_node_name_is_not_a_node_name() {
    let manager = driver_manager(&["--node-name=", "uninstall_driver"]);
    assert_eq!(manager.node_name().unwrap_err().exit_code(), crate::failure::USAGE);
    assert_eq!(driver_manager(&["--node-name=gpu-1", "uninstall_driver"]).node_name().unwrap(), "gpu-1");
}

#[test]
fn a_selector_that_cannot_be_read_is_a_usage_error() {
    let manager = driver_manager(&["--drain-pod-selector-label=a b c", "uninstall_driver"]);
    assert_eq!(manager.settings().unwrap_err().exit_code(), crate::failure::USAGE);
}

#[test]
fn the_name_of_the_program_chooses_the_agent() {
    let agent = |arguments: &[&str]| match read(arguments.iter().map(OsString::from)).unwrap() {
        Called::Agent(agent) => match agent.which {
            AgentCommand::DriverManager(_) => "driver-manager",
            AgentCommand::VfioManage(_) => "vfio-manage",
            AgentCommand::SafeLoad(_) => "safe-load",
        },
        Called::Chroot(..) => "chroot",
    };
    let safe_load = ["--node-name=n", "--configmap-name=c", "--configmap-namespace=ns"];
    assert_eq!(agent(&["/usr/bin/driver-manager", "preflight_check"]), "driver-manager");
    assert_eq!(agent(&["vfio-manage", "unbind", "--all"]), "vfio-manage");
    assert_eq!(agent(&[&["/network-operator-init-container"][..], &safe_load].concat()), "safe-load");
    assert_eq!(agent(&["pitcrew-node", "driver-manager", "finish", "--stay"]), "driver-manager");
    assert_eq!(agent(&[&["pitcrew-node", "safe-load"][..], &safe_load].concat()), "safe-load");
    assert_eq!(agent(&["pitcrew-chroot", "/host", "nvidia-smi"]), "chroot");
    assert!(is_refused(&["network-operator-init-container", "positional"]));
}

#[test]
fn the_logging_flags_of_the_documented_program_are_accepted_and_others_are_not() {
    const NEEDED: [&str; 4] = [
        "network-operator-init-container",
        "--node-name=n",
        "--configmap-name=c",
        "--configmap-namespace=ns",
    ];
    for flags in [
        &["-v=4"][..],
        &["-v", "4"],
        &["--v=4", "--vmodule", "a=1,b=2"],
        &["--logging-format=json", "--log-flush-frequency", "5s"],
        &["--log-text-split-stream", "--log-text-info-buffer-size=1Ki"],
        &["--log-json-split-stream=true", "--log-json-info-buffer-size", "0"],
        &["--logtostderr", "--alsologtostderr=false", "--stderrthreshold=2"],
    ] {
        let whole = NEEDED.iter().chain(flags).map(OsString::from);
        let Called::Agent(agent) = read(whole).unwrap() else { panic!("an agent") };
        let AgentCommand::SafeLoad(safe_load) = agent.which else { panic!("safe load") };
        assert_eq!(safe_load.node_name().unwrap(), "n");
    }
    assert!(is_refused(&[&NEEDED[..], &["--log-everything"]].concat()));
    assert!(is_refused(&[&NEEDED[..], &["positional"]].concat()));
}

#[test]
fn devices_are_all_or_one() {
    assert!(is_refused(&["vfio-manage", "bind"]));
    assert!(is_refused(&["vfio-manage", "bind", "--all", "--device-id=0000:01:00.0"]));
    let one = read(["vfio-manage", "bind", "-d", "0000:01:00.0"].map(OsString::from)).unwrap();
    let Called::Agent(agent) = one else { panic!("an agent") };
    let AgentCommand::VfioManage(VfioManage { command: VfioCommand::Bind { devices, host_root, .. } }) =
        agent.which
    else {
        panic!("bind")
    };
    assert_eq!(devices.which(), Which::One("0000:01:00.0".to_owned()));
    assert_eq!(host_root, "/");
}
