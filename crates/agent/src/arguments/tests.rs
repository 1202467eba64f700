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
fn a_switch_that_is_set_to_nothing_is_off_and_anything_else_keeps_its_default() {
    let manager = driver_manager(&[
        "--enable-auto-drain=",
        "--enable-gpu-pod-eviction=",
        "--drain-use-force=",
        "--drain-timeout-seconds=",
        "--mofed-timeout=",
        "--uncordon=",
        "finish",
        "--timeout=",
    ]);
    let settings = manager.settings().unwrap();
    assert!(!settings.drain && !settings.evict && !settings.force && settings.leave_limit.is_none());
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

/// What a program is told by a variable: the variable, its value, and how the options show it.
type Row<T> = (&'static str, &'static str, fn(&T) -> bool);

const DRIVER_MANAGER: [Row<DriverManager>; 17] = [
    ("NODE_NAME", "gpu-1", |told| told.node_name().is_ok_and(|name| name == "gpu-1")),
    ("KUBECONFIG", "/k", |told| told.kubeconfig() == Some(Path::new("/k"))),
    ("ENABLE_GPU_POD_EVICTION", "false", |told| !settings(told).evict),
    ("ENABLE_AUTO_DRAIN", "false", |told| !settings(told).drain),
    ("DRAIN_USE_FORCE", "true", |told| settings(told).force),
    ("DRAIN_POD_SELECTOR_LABEL", "team=a", |told| format!("{:?}", settings(told).selector).contains("team")),
    ("DRAIN_TIMEOUT_SECONDS", "300", |told| settings(told).leave_limit == Some(Duration::from_mins(5))),
    ("DRAIN_DELETE_EMPTYDIR_DATA", "true", |told| settings(told).delete_empty_dir),
    ("OPERATOR_NAMESPACE", "elsewhere", |told| settings(told).namespace == "elsewhere"),
    ("NODE_LABEL_FOR_GPU_POD_EVICTION", "a/b", |told| {
        settings(told).custom_label.is_some_and(|key| key == "a/b")
    }),
    ("GPU_DIRECT_RDMA_ENABLED", "true", |told| settings(told).rdma),
    ("USE_HOST_MOFED", "true", |told| settings(told).host_mofed),
    ("FORCE_REINSTALL", "true", |told| settings(told).force_reinstall),
    ("DRIVER_CONFIG_DIGEST", "4711", |told| settings(told).digest == "4711"),
    ("MOFED_TIMEOUT", "90s", |told| settings(told).mofed_limit == Some(Duration::from_secs(90))),
    ("UNCORDON", "early", |told| settings(told).uncordon == Uncordon::Early),
    ("BIND_NVSWITCHES", "true", |told| settings(told).nvswitches),
];

const SAFE_LOAD: [Row<SafeLoad>; 9] = [
    ("NODE_NAME", "gpu-1", |told| told.node_name().is_ok_and(|name| name == "gpu-1")),
    ("KUBECONFIG", "/k", |told| told.kubeconfig() == Some(Path::new("/k"))),
    ("POD_UID", "uid", |told| told.options().pod.is_some_and(|uid| uid == "uid")),
    ("SAFE_LOAD_TIMEOUT", "90s", |told| told.options().deadline == Some(Duration::from_secs(90))),
    ("STORAGE_MODULES", "a b", |told| told.options().overlay.storage == "a b"),
    ("THIRD_PARTY_RDMA_MODULES", "a b", |told| told.options().overlay.third_party == "a b"),
    ("UNLOAD_STORAGE_MODULES", "true", |told| told.options().overlay.unload_storage == "true"),
    ("UNLOAD_THIRD_PARTY_RDMA_MODULES", "true", |told| told.options().overlay.unload_third_party == "true"),
    ("SKIP_PREFLIGHT_CHECKS", "false", |told| told.options().overlay.skip == "false"),
];

fn settings(manager: &DriverManager) -> Settings {
    manager.settings().unwrap()
}

#[test]
fn switches_that_are_on_by_default_are_off_where_their_variable_is_empty() {
    let test = "switches_that_are_on_by_default_are_off_where_their_variable_is_empty";
    let table: [Row<DriverManager>; 2] = [
        ("ENABLE_GPU_POD_EVICTION", "", |told| !settings(told).evict),
        ("ENABLE_AUTO_DRAIN", "", |told| !settings(told).drain),
    ];
    each_variable_counts(test, &table, || driver_manager(&["uninstall_driver"]));
}

/// Set for the copy of the test that runs with one variable: which one, or `none`.
const ROW: &str = "PITCREW_TEST_VARIABLE";

/// Runs a test of this file again with nothing but these variables: a program's own cannot be changed safely.
fn with_variables(test: &str, row: &str, variable: Option<(&str, &str)>) {
    let mut program = std::process::Command::new(std::env::current_exe().unwrap());
    program.args(["--exact", &format!("arguments::tests::{test}")]).env_clear().env(ROW, row).envs(variable);
    let output = program.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{row}: {said}");
}

/// In the test itself: one run for each variable, and one without any. In a copy of it: reads the options, as the binary does.
fn each_variable_counts<T>(test: &str, table: &[Row<T>], read: impl Fn() -> T) {
    let Ok(row) = std::env::var(ROW) else {
        with_variables(test, "none", None);
        return table.iter().for_each(|(name, value, _)| with_variables(test, name, Some((name, value))));
    };
    let told = read();
    for (name, _, holds) in table {
        assert_eq!(holds(&told), *name == row, "{name} where {row} is set");
    }
}

#[test]
fn every_variable_of_the_driver_manager_counts_under_its_documented_name() {
    let test = "every_variable_of_the_driver_manager_counts_under_its_documented_name";
    each_variable_counts(test, &DRIVER_MANAGER, || driver_manager(&["uninstall_driver"]));
}

#[test]
fn every_variable_of_safe_load_counts_under_its_documented_name() {
    let test = "every_variable_of_safe_load_counts_under_its_documented_name";
    each_variable_counts(test, &SAFE_LOAD, || {
        // Without a node the command line would be refused.
        let node = std::env::var("NODE_NAME").is_err().then_some("--node-name=other");
        let needed = ["safe-load", "--configmap-name=c", "--configmap-namespace=ns"];
        let whole = ["pitcrew-node"].into_iter().chain(needed).chain(node);
        let Called::Agent(agent) = read(whole.map(OsString::from)).unwrap() else { panic!("an agent") };
        let AgentCommand::SafeLoad(safe_load) = agent.which else { panic!("safe load") };
        safe_load
    });
}

#[test]
fn the_variables_of_commands_count_under_their_documented_names() {
    let test = "the_variables_of_commands_count_under_their_documented_names";
    let table: [Row<(DriverManager, String)>; 2] = [
        ("FINISH_TIMEOUT", "90s", |(told, _)| {
            told.command
                == Some(DriverManagerCommand::Finish { timeout: Duration::from_secs(90), stay: false })
        }),
        ("HOST_ROOT", "/host", |(_, root)| root == "/host"),
    ];
    each_variable_counts(test, &table, || {
        let bind = read(["vfio-manage", "bind", "--all"].map(OsString::from)).unwrap();
        let Called::Agent(agent) = bind else { panic!("an agent") };
        let AgentCommand::VfioManage(VfioManage { command: VfioCommand::Bind { host_root, .. } }) =
            agent.which
        else {
            panic!("bind")
        };
        (driver_manager(&["finish"]), host_root)
    });
}
