//! The sentences, and when nothing is to be done.

use pitcrew_core::names::ResourceVersion;
use pitcrew_core::snapshot::Node;

use super::*;

fn node(name: &str, outcome: Outcome) -> NodeClients {
    NodeClients { node: name.into(), pool: "gpu".into(), epoch: None, clients: vec![], outcome }
}

#[test]
fn the_end_of_the_time_names_the_first_few() {
    let waits = |name| node(name, Outcome::Waits("its driver is not replaced yet".to_owned()));
    let nodes = [waits("a"), node("b", Outcome::Fresh), waits("c"), waits("d"), waits("e"), waits("f")];
    assert_eq!(
        late(&nodes, SignedDuration::from_mins(45)),
        "not fresh after 45m: a: its driver is not replaced yet; c: its driver is not replaced yet; d: its driver is not replaced yet; and 2 more"
    );
}

#[test]
fn nothing_to_do_has_to_be_certain() {
    let mut snapshot = Snapshot::new(Timestamp::UNIX_EPOCH, "gpu-operator");
    let said = nothing_to_do(&snapshot, &[]).unwrap();
    assert_eq!(said.as_deref(), Some("no node has a driver that an operator installs"));
    let labels = [(DEPLOY_DRIVER_LABEL.to_owned(), "true".to_owned())].into();
    let gpu = Node::new("u".into(), ResourceVersion::from(1), labels, [].into());
    snapshot.nodes.insert("gpu-1".into(), gpu);
    let problem = nothing_to_do(&snapshot, &[]).unwrap_err().to_string();
    assert!(problem.starts_with("node gpu-1 is labelled nvidia.com/gpu.deploy.driver=true"), "{problem}");
    let fresh = [node("gpu-1", Outcome::Fresh)];
    let said = nothing_to_do(&snapshot, &fresh).unwrap();
    assert_eq!(said.as_deref(), Some("there are no driver clients on these nodes"));
    let waits = [node("gpu-1", Outcome::Waits("x".to_owned()))];
    assert_eq!(nothing_to_do(&snapshot, &waits).unwrap(), None);
}
