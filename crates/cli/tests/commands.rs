//! The binary as people call it: what it prints, where, and its exit code.

#![expect(clippy::unwrap_used, clippy::panic, reason = "what these tests do not expect is a failure")]

use std::process::{Command, Output};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde_json::Value;

/// Runs `pitcrew` away from the tester's own cluster and settings.
fn pitcrew(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pitcrew"))
        .args(args)
        .env_remove("KUBECONFIG")
        .env_remove("KUBERNETES_SERVICE_HOST")
        .env("HOME", "/nonexistent")
        .env_remove("RUST_LOG")
        .output()
        .unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// The one sentence of a failure; nothing else may have been printed.
fn sentence(output: &Output) -> String {
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(text.lines().count(), 1, "more than one line: {text}");
    assert_eq!(stdout(output), "");
    text.strip_prefix("pitcrew: ").unwrap_or_else(|| panic!("not by pitcrew: {text}")).trim_end().to_owned()
}

#[test]
fn the_definitions_read_back_from_yaml_and_from_json() {
    let expected = pitcrew_core::api::crds();
    let yaml = pitcrew(&["crd"]);
    assert!(yaml.status.success());
    let read: Vec<CustomResourceDefinition> = serde_saphyr::from_multiple(&stdout(&yaml)).unwrap();
    assert_eq!(read, expected);
    let json = pitcrew(&["crd", "-o", "json"]);
    let list: Value = serde_json::from_str(&stdout(&json)).unwrap();
    assert_eq!(list["kind"], "List");
    let read: Vec<CustomResourceDefinition> = serde_json::from_value(list["items"].clone()).unwrap();
    assert_eq!(read, expected);
}

#[test]
fn the_same_seed_gives_the_same_figures() {
    let figures = |seed: &str| {
        let output = pitcrew(&["demo", "--nodes", "8", "--instant", "--seed", seed, "-o", "json"]);
        assert!(output.status.success(), "{output:?}");
        assert!(output.stderr.is_empty(), "{output:?}");
        let mut figures: Value = serde_json::from_str(&stdout(&output)).unwrap();
        assert!(figures.as_object_mut().unwrap().remove("realSeconds").is_some());
        figures
    };
    let first = figures("1");
    assert_eq!(first, figures("1"));
    assert_eq!(first["done"], 8);
    assert_eq!(first["driversReady"]["565.57.01"], 8);
    assert_eq!(first["mostOut"], first["limit"]);
    assert_ne!(first["virtualSeconds"], figures("2")["virtualSeconds"]);
}

#[test]
fn two_days_of_bake_pass_a_bad_driver_is_taken_back_and_a_budget_is_waited_for() {
    let figures = |scenario: &str| -> Value {
        let output = pitcrew(&["demo", "--nodes", "3", "--scenario", scenario, "--instant", "-o", "json"]);
        assert!(output.status.success(), "{output:?}");
        serde_json::from_str(&stdout(&output)).unwrap()
    };
    let canary = figures("canary");
    assert_eq!((&canary["endsOn"], &canary["visited"]), (&"565.57.01".into(), &3.into()));
    assert!(canary["virtualSeconds"].as_f64().unwrap() > 48.0 * 3600.0, "{canary}");
    let bad = figures("bad-driver");
    assert_eq!((&bad["endsOn"], &bad["visited"]), (&"560.35.03".into(), &1.into()));
    assert_eq!(bad["driversReady"]["560.35.03"], 3);
    let broke = figures("bad-bake");
    assert_eq!((&broke["endsOn"], &broke["visited"]), (&"560.35.03".into(), &1.into()));
    assert!(broke["virtualSeconds"].as_f64().unwrap() > 30.0 * 3600.0, "{broke}");
    let closed = figures("pdb");
    assert_eq!((&closed["endsOn"], &closed["done"]), (&"565.57.01".into(), &3.into()));
    assert!(closed["virtualSeconds"].as_f64().unwrap() > 20.0 * 60.0, "{closed}");
    assert!(stdout(&pitcrew(&["demo", "--list"])).contains("\nbad-driver "));
}

#[test]
fn a_version_that_somebody_takes_back_leaves_the_nodes_that_have_it_and_no_others() {
    let output = pitcrew(&["demo", "--scenario", "take-back", "--instant", "-o", "json"]);
    assert!(output.status.success(), "{output:?}");
    let figures: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(figures["driversReady"]["560.35.03"], 24, "{figures}");
    let visited = figures["visited"].as_u64().unwrap();
    assert!((4..20).contains(&visited), "{figures}");
}

#[test]
fn a_pipe_gets_lines_and_the_summary() {
    let output = pitcrew(&["demo", "--nodes", "4", "--instant"]);
    assert!(output.status.success(), "{output:?}");
    let text = stdout(&output);
    assert!(
        text.starts_with("4 GPU nodes on driver 560.35.03; the policy now asks for 565.57.01\n"),
        "{text}"
    );
    assert_eq!(text.lines().filter(|line| line.contains("upgrade-done")).count(), 4, "{text}");
    assert!(text.contains("\n✔ 4 of 4 nodes on 565.57.01 in "), "{text}");
    assert!(text.contains("never more than 1 node out"), "{text}");
}

#[test]
fn wrong_usage_is_one_sentence_and_2() {
    let cases = [
        (
            vec!["demo", "--nodes", "0"],
            "invalid value '0' for '--nodes <N>': must be a number from 1 to 10000",
        ),
        (
            vec!["demo", "--nodes", "-3"],
            "invalid value '-3' for '--nodes <N>': must be a number from 1 to 10000",
        ),
        (vec!["demo", "--speed", "0"], "invalid value '0' for '--speed <X>': must be a number above 0"),
        (vec!["demo", "--speed", "-1"], "invalid value '-1' for '--speed <X>': must be a number above 0"),
        (vec!["demo", "--speed", "nan"], "invalid value 'nan' for '--speed <X>'"),
        (
            vec!["demo", "--max-parallel", "-1"],
            "invalid value '-1' for '--max-parallel <N>': must be a whole number",
        ),
        (vec!["demo", "--speed", "2", "--instant"], "cannot be used with"),
        (vec!["demo", "--frobnicate"], "unexpected argument '--frobnicate' found"),
        (vec!["frobnicate"], "unrecognized subcommand 'frobnicate'"),
        (vec!["status", "--watch", "--wait"], "cannot be used with"),
        (vec!["status", "--wait", "--timeout", "0s"], "must be a time above 0 such as 90s, 30m or 2h"),
        (vec!["status", "--timeout", "2h"], "required arguments were not provided"),
        (vec!["explain"], "required arguments were not provided"),
        (vec!["skip"], "required arguments were not provided"),
        (vec!["skip", "gpu-01", "--ignore-pdb"], "unexpected argument '--ignore-pdb' found"),
        (vec!["controller", "--listen", "here"], "invalid value 'here' for '--listen <ADDR>'"),
    ];
    for (args, expected) in cases {
        let output = pitcrew(&args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        let sentence = sentence(&output);
        assert!(sentence.contains(expected), "{args:?}: {sentence}");
    }
}

#[test]
fn help_is_no_failure() {
    for args in [vec!["--help"], vec!["demo", "--help"], vec!["--version"]] {
        let output = pitcrew(&args);
        assert_eq!(output.status.code(), Some(0), "{args:?}");
        assert!(!output.stdout.is_empty());
    }
}

#[test]
fn a_controller_without_a_cluster_says_so_in_one_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("broken"), "clusters: [\n").unwrap();
    std::fs::write(path("nobody"), kubeconfig("http://127.0.0.1:1")).unwrap();
    let cases = [
        (vec!["--kubeconfig".to_owned(), path("missing")], "cannot use kubeconfig"),
        (vec!["--kubeconfig".to_owned(), path("broken")], "cannot use kubeconfig"),
        (
            vec!["--kubeconfig".to_owned(), path("nobody"), "--context".to_owned(), "other".to_owned()],
            "other",
        ),
        (vec!["--kubeconfig".to_owned(), path("nobody")], "cannot reach the cluster"),
        (vec![], "cannot find a usable kubeconfig"),
    ];
    for (args, expected) in cases {
        let mut all = vec!["controller", "--listen", "127.0.0.1:0"];
        all.extend(args.iter().map(String::as_str));
        let output = pitcrew(&all);
        assert_eq!(output.status.code(), Some(1), "{all:?}");
        let sentence = sentence(&output);
        assert!(sentence.contains(expected), "{all:?}: {sentence}");
    }
}

#[test]
fn every_command_that_needs_a_cluster_says_in_one_sentence_that_there_is_none() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("nobody");
    std::fs::write(&path, kubeconfig("http://127.0.0.1:1")).unwrap();
    let commands: [&[&str]; 9] = [
        &["status"],
        &["status", "--wait"],
        &["status", "--watch"],
        &["explain", "gpu-01"],
        &["pause"],
        &["resume"],
        &["skip", "gpu-01"],
        &["retry", "gpu-01"],
        &["abort"],
    ];
    for command in commands {
        let unreachable = pitcrew(&[command, &["--kubeconfig", path.to_str().unwrap()]].concat());
        assert_eq!(unreachable.status.code(), Some(1), "{command:?}");
        assert!(sentence(&unreachable).starts_with("cannot reach the cluster: "), "{unreachable:?}");
        let unknown = pitcrew(command);
        assert_eq!(unknown.status.code(), Some(1), "{command:?}");
        assert!(sentence(&unknown).starts_with("cannot find a usable kubeconfig"), "{unknown:?}");
    }
}

fn kubeconfig(server: &str) -> String {
    format!(
        "apiVersion: v1
kind: Config
current-context: demo
contexts: [{{name: demo, context: {{cluster: demo, user: demo}}}}]
clusters: [{{name: demo, cluster: {{server: \"{server}\"}}}}]
users: [{{name: demo, user: {{}}}}]
"
    )
}
