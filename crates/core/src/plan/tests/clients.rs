//! The driver's clients: whoever started before the driver that runs now is replaced, in order, and waited for.

use serde_json::json;

use super::fixture::*;
use crate::clients::{ClientKind, DEPLOY_CLIENT_LABEL};
use crate::contract::State;
use crate::names::{ObjectName, RevisionHash};
use crate::snapshot::{Slice, TemplateRevision};

const DRA: Option<ClientKind> = Some(ClientKind::DraPlugin { gpus: true });
const DCGM: Option<ClientKind> = Some(ClientKind::Operand);

/// A node whose driver was replaced a minute ago and was ready ten seconds later.
fn replaced(spec: NodeSpec) -> Fleet {
    let mut fleet = Fleet::new().with(spec);
    let driver = fleet.driver_mut("n");
    (driver.started, driver.ready_since) = (Some(after(-60)), Some(after(-50)));
    fleet.validator_mut("n").started = Some(after(-40));
    fleet
}

fn validating() -> Fleet {
    replaced(node("n").at(State::ValidationRequired))
}

fn slice(fleet: &mut Fleet, name: &str, generation: i64, count: i64, version: &str) {
    let versions = [version.parse().unwrap()].into();
    let slice = Slice { node: "n".into(), pool: "n".into(), generation, count, versions };
    fleet.snapshot.slices.get_or_insert_default().insert(name.into(), slice);
}

#[test]
fn stale_clients_come_back_in_order_before_the_node_is_given_back() {
    let mut fleet = validating();
    fleet.put_client("n", "toolkit", Some(ClientKind::Toolkit), after(-900));
    fleet.put_client("n", "dcgm", DCGM, after(-900));
    fleet.put_client("n", "dra", DRA, after(-900));
    fleet.put_client("n", "gfd", DCGM, after(-55));
    fleet.play();
    let deleted = fleet.told("StaleClient");
    assert_eq!(
        deleted,
        [
            "n delete clients/dra-n (StaleClient)",
            "n delete clients/toolkit-n (StaleClient)",
            "n delete clients/dcgm-n (StaleClient)"
        ]
    );
    assert_eq!(fleet.states_of("n"), ["uncordon-required", "upgrade-done"]);
}

#[test]
fn who_waits_for_the_driver_is_fresh_from_its_start_all_others_from_its_readiness() {
    let deleted = |gated: bool, started: i64| {
        let extra = json!({"selector": "app=agent", "waitsForDriver": gated});
        let spec = json!({"driver": {"name": "gpu"}, "clients": {"extra": [extra]}});
        let mut fleet = validating().driver_policy("mine", spec);
        fleet.put_client("n", "agent", None, after(started));
        fleet.play();
        !fleet.told("StaleClient").is_empty()
    };
    assert_eq!([-61, -60, -55].map(|started| deleted(true, started)), [true, false, false]);
    assert_eq!([-55, -50, -49].map(|started| deleted(false, started)), [true, true, false]);
}

#[test]
fn a_client_that_does_not_come_back_fails_the_node_by_name() {
    let mut fleet = validating();
    fleet.hung_clients.insert("dra".to_owned());
    fleet.put_client("n", "dra", DRA, after(-900));
    fleet.settle();
    assert_eq!(fleet.why("n"), "client pod clients/dra-n is not ready yet: running, not ready yet");
    fleet.play();
    assert_eq!(
        fleet.why("n"),
        "driver client daemonset/clients/dra not back after 361 s: client pod clients/dra-n is not ready yet: running, not ready yet"
    );
    assert!(fleet.snapshot.nodes["n"].unschedulable);
}

#[test]
fn a_client_that_may_be_missing_is_not_waited_for_for_ever() {
    let extra = json!({"selector": "app=agent", "required": false, "timeout": "30s"});
    let spec = json!({"driver": {"name": "gpu"}, "clients": {"extra": [extra]}});
    let mut fleet = validating().driver_policy("mine", spec);
    fleet.hung_clients.insert("agent".to_owned());
    fleet.put_client("n", "agent", None, after(-900));
    fleet.play();
    assert_eq!(fleet.verdict("n").state, State::UpgradeDone, "{}", fleet.story.join("\n"));
}

#[test]
fn a_client_that_is_gone_when_it_is_looked_for_is_waited_for() {
    let mut fleet = Fleet::new().with(node("n").outdated());
    fleet.put_client("n", "dra", DRA, after(-900));
    // The pod is deleted, and its DaemonSet takes its time.
    while fleet.verdict("n").state != State::ValidationRequired {
        fleet.step();
    }
    fleet.remove_pods("n", |pod| pod.client.is_some());
    assert_eq!(fleet.why("n"), "no pod of daemonset/clients/dra on this node yet");
    fleet.settle();
    assert_eq!(fleet.verdict("n").state, State::ValidationRequired);
    fleet.snapshot.daemon_sets.remove("client-dra");
    fleet.play();
    assert_eq!(fleet.verdict("n").state, State::UpgradeDone, "nobody waits for a DaemonSet that was removed");
}

#[test]
fn a_paused_operand_is_waited_for_and_one_that_is_switched_off_is_not() {
    let state = |label: &str| {
        let mut fleet = Fleet::new().with(node("n").outdated().label("deploy.dcgm", "true"));
        fleet.put_client("n", "dcgm", DCGM, after(-900));
        let wanted = [("deploy.dcgm".to_owned(), "true".to_owned())].into();
        fleet.snapshot.daemon_sets.get_mut("client-dcgm").unwrap().node_selector = wanted;
        while fleet.verdict("n").state != State::ValidationRequired {
            fleet.step();
        }
        fleet.remove_pods("n", |pod| pod.client.is_some());
        fleet.node_mut("n").set_label("deploy.dcgm", Some(label));
        fleet.settle();
        fleet.verdict("n").state
    };
    assert_eq!(state("paused-for-driver-upgrade"), State::ValidationRequired);
    assert_eq!(state("false"), State::UpgradeDone);
}

#[test]
fn the_plugin_has_to_publish_complete_slices_of_the_running_driver() {
    let why = |publish: &dyn Fn(&mut Fleet)| {
        let mut fleet = validating();
        fleet.snapshot.slices = Some([].into());
        fleet.put_client("n", "dra", DRA, after(-55));
        publish(&mut fleet);
        fleet.settle();
        fleet.why("n")
    };
    assert_eq!(why(&|_| ()), "the DRA plugin has not published a ResourceSlice for this node yet");
    assert_eq!(
        why(&|fleet| slice(fleet, "n-a", 2, 2, "565.57.1")),
        "1 of the 2 ResourceSlices of pool n are published"
    );
    assert_eq!(
        why(&|fleet| slice(fleet, "n-a", 2, 1, "550.54.15")),
        "resourceslice/n-a tells driver 550.54.15, the node runs 565.57.01"
    );
    // 565.57.01 is published as 565.57.1, and slices of an older generation do not count.
    let done = why(&|fleet| {
        slice(fleet, "n-old", 1, 1, "550.54.15");
        slice(fleet, "n-a", 2, 2, "565.57.1");
        slice(fleet, "n-b", 2, 2, "565.57.1");
    });
    assert_eq!(done, "driver up to date and ready");
}

#[test]
fn a_plugin_for_compute_domains_alone_publishes_no_gpus() {
    let mut fleet = validating();
    fleet.snapshot.slices = Some([].into());
    fleet.put_client("n", "dra", Some(ClientKind::DraPlugin { gpus: false }), after(-55));
    fleet.play();
    assert_eq!(fleet.verdict("n").state, State::UpgradeDone);
}

#[test]
fn a_precompiled_driver_tells_no_version_to_compare() {
    let mut fleet = validating();
    fleet.driver_mut("n").image = "nvcr.io/nvidia/driver:565-6.8.0-45-generic-ubuntu22.04".into();
    slice(&mut fleet, "n-a", 1, 1, "565.57.1");
    fleet.put_client("n", "dra", DRA, after(-55));
    fleet.play();
    assert_eq!(fleet.verdict("n").state, State::UpgradeDone);
}

#[test]
fn all_devices_have_to_be_back() {
    let mut fleet = Fleet::new().with(node("n").outdated());
    fleet.node_mut("n").allocatable = vec![("nvidia.com/gpu".into(), 8)];
    while fleet.verdict("n").state != State::ValidationRequired {
        fleet.step();
    }
    fleet.node_mut("n").allocatable = vec![("nvidia.com/gpu".into(), 7)];
    assert_eq!(fleet.why("n"), "the node offers 7 of the 8 devices that it had before");
    fleet.settle();
    assert_eq!(fleet.verdict("n").state, State::ValidationRequired);
    fleet.node_mut("n").allocatable = vec![("nvidia.com/gpu".into(), 8)];
    fleet.play();
    assert_eq!(fleet.verdict("n").state, State::UpgradeDone);
}

fn on_delete(fleet: &mut Fleet, name: &str) {
    let uid = format!("client-{name}");
    fleet.snapshot.daemon_sets.get_mut(uid.as_str()).unwrap().on_delete = true;
    for (number, hash) in [(1, "1"), (2, "2")] {
        let (owner, hash) = (uid.as_str().into(), RevisionHash::from(hash));
        let created = fleet.snapshot.now;
        let revision = TemplateRevision { owner, number, created, hash, digest: None, driver_version: None };
        fleet.snapshot.revisions.insert(format!("{uid}-{number}").into(), revision);
    }
}

#[test]
fn a_pending_revision_is_taken_in_a_visit_and_left_alone_outside_of_one() {
    let mut fleet = validating();
    fleet.put_client("n", "agent", DCGM, after(-55));
    on_delete(&mut fleet, "agent");
    fleet.play();
    assert_eq!(fleet.told("StaleClient"), ["n delete clients/agent-n (StaleClient)"]);
    assert_eq!(fleet.verdict("n").state, State::UpgradeDone);

    let spec = json!({"driver": {"name": "gpu"}, "clients": {"refresh": "Always"}});
    let mut fleet = replaced(node("n").labelled(State::UpgradeDone)).driver_policy("mine", spec);
    fleet.put_client("n", "agent", DCGM, after(-55));
    on_delete(&mut fleet, "agent");
    assert_eq!(fleet.why("n"), "driver up to date and ready", "a fresh client may be of an older template");
    fleet.client_mut("n", "agent").oldest_started = Some(after(-900));
    fleet.play();
    assert_eq!(
        fleet.why("n"),
        "client pod clients/agent-n is stale: it would come back from a newer template of daemonset/clients/agent (OnDelete)"
    );
    assert_eq!(fleet.told("StaleClient"), [""; 0]);
}

#[test]
fn outside_of_a_visit_stale_clients_are_told_of_and_replaced_only_if_the_policy_says_always() {
    let play = |refresh: &str| {
        let spec = json!({"driver": {"name": "gpu"}, "clients": {"refresh": refresh}});
        let mut fleet = replaced(node("n").labelled(State::UpgradeDone)).driver_policy("mine", spec);
        fleet.put_client("n", "dra", DRA, after(-900));
        let why = fleet.why("n");
        fleet.play();
        (why, fleet.told("StaleClient").len(), fleet.why("n"))
    };
    let stale = "client pod clients/dra-n is stale: it started at 2026-01-01T11:45:00Z, before the driver (2026-01-01T11:59:00Z)".to_owned();
    let fine = "driver up to date and ready".to_owned();
    assert_eq!(play("Visit"), (stale.clone(), 0, stale.clone()));
    assert_eq!(play("Always"), (stale, 1, fine.clone()));
    assert_eq!(play("Off"), (fine.clone(), 0, fine));
}

#[test]
fn outside_of_visits_a_few_nodes_at_a_time_and_no_driver_that_has_just_come_up() {
    let spec = json!({"driver": {"name": "gpu"}, "clients": {"refresh": "Always"}});
    let mut fleet = Fleet::new().nodes(12, |n| n.labelled(State::UpgradeDone)).driver_policy("mine", spec);
    fleet.hung_clients.insert("dra".to_owned());
    for i in 1..=12 {
        let name = format!("gpu-{i}");
        let driver = fleet.driver_mut(&name);
        (driver.started, driver.ready_since) = (Some(after(-30)), Some(after(-20)));
        fleet.put_client(&name, "dra", DRA, after(-900));
    }
    fleet.settle();
    assert_eq!(fleet.told("StaleClient"), [""; 0], "it may go down again at once");
    fleet.wait(10);
    fleet.settle();
    assert_eq!(fleet.told("StaleClient").len(), 5, "{}", fleet.story.join("\n"));
    fleet.play();
    assert_eq!(
        fleet.told("StaleClient").len(),
        12,
        "those that do not come back do not keep the others for ever"
    );
}

#[test]
fn third_parties_ask_by_their_node_selector_and_others_are_not_touched() {
    let mut fleet = validating();
    fleet.put_client("n", "agent", None, after(-900));
    fleet.put_client("n", "logs", None, after(-900));
    let wanted = [(DEPLOY_CLIENT_LABEL.to_owned(), "true".to_owned())].into();
    fleet.snapshot.daemon_sets.get_mut("client-agent").unwrap().node_selector = wanted;
    fleet.play();
    assert_eq!(fleet.told("StaleClient"), ["n delete clients/agent-n (StaleClient)"]);
}

#[test]
fn clients_of_the_gpu_driver_are_not_clients_of_another() {
    let spec = json!({"driver": {"name": "ofed", "daemonSets": {"selector": "app=nvidia-driver-daemonset"}}});
    let mut fleet = Fleet::new().driver_policy("nic", spec);
    fleet.snapshot.sources.cluster_policies.clear();
    let mut fleet = fleet.with(node("n"));
    fleet.put_client("n", "dra", DRA, after(-9000));
    assert_eq!(fleet.told("StaleClient"), [""; 0]);
    fleet.play();
    assert!(fleet.told("StaleClient").is_empty());
}

#[test]
fn a_plugin_leaves_after_all_who_hold_its_claims() {
    let holder = ObjectName::new("work", "holder");
    let mut fleet = Fleet::new().with(node("n").outdated().pod(pod("holder").claim("c")));
    fleet.put_client("n", "dra", DRA, after(-900));
    fleet.play();
    let place = |words: &str| fleet.story.iter().position(|line| line.contains(words));
    let (evicted, restarted) = (place(&format!("evict {holder}")), place("restart"));
    assert!(evicted < restarted && restarted < place("StaleClient"), "{}", fleet.story.join("\n"));
    assert_eq!(fleet.verdict("n").state, State::UpgradeDone);
}

#[test]
fn a_plugin_that_started_in_the_second_of_the_change_and_tells_of_the_old_driver_is_replaced_once() {
    let mut fleet = validating();
    fleet.put_client("n", "dra", DRA, after(-60));
    slice(&mut fleet, "n-a", 1, 1, "550.54.15");
    fleet.client_mut("n", "dra").ready_since = Some(after(-2));
    fleet.settle();
    assert_eq!(fleet.told("StaleClient"), [""; 0], "a fresh one needs a moment to publish");
    fleet.wait(10);
    fleet.settle();
    assert_eq!(fleet.told("StaleClient"), ["n delete clients/dra-n (StaleClient)"]);
    fleet.wait(60);
    fleet.settle();
    assert_eq!(fleet.told("StaleClient").len(), 1, "the new one started after this driver was ready");
}

#[test]
fn a_driver_is_nobodys_client_whatever_a_selector_says() {
    let extra = json!({"selector": "app"});
    let spec = json!({"driver": {"name": "gpu"}, "clients": {"refresh": "Always", "extra": [extra]}});
    let mut fleet = replaced(node("n").labelled(State::UpgradeDone)).driver_policy("mine", spec);
    fleet.daemon_set_mut().pod_labels = [("app".to_owned(), "nvidia-driver-daemonset".to_owned())].into();
    let driver = fleet.driver_mut("n");
    driver.oldest_started = driver.started;
    fleet.play();
    assert_eq!(fleet.told("StaleClient"), [""; 0]);
}

#[test]
fn a_client_that_came_during_the_visit_is_written_down_before_its_pod_goes() {
    let mut fleet = validating();
    fleet.put_client("n", "dra", DRA, after(-900));
    let plan = fleet.plan();
    fleet.apply(&plan);
    assert_eq!(fleet.told("StaleClient"), [""; 0], "first the record, or nobody would miss it");
    fleet.step();
    assert_eq!(fleet.told("StaleClient").len(), 1);
    fleet.remove_pods("n", |pod| pod.client.is_some());
    assert_eq!(fleet.why("n"), "no pod of daemonset/clients/dra on this node yet");
}

#[test]
fn a_driver_that_starts_again_before_the_release_brings_its_clients_back_once_more() {
    let mut fleet = replaced(node("n").at(State::UncordonRequired));
    fleet.put_client("n", "dra", DRA, after(-55));
    fleet.driver_mut("n").started = Some(after(-5));
    fleet.validator_mut("n").started = Some(after(-1));
    fleet.play();
    assert_eq!(fleet.states_of("n"), ["validation-required", "uncordon-required", "upgrade-done"]);
    assert_eq!(fleet.told("StaleClient").len(), 1);
}

#[test]
fn a_client_whose_turn_has_not_come_does_not_run_out_of_its_time() {
    let mut fleet = replaced(node("n").at(State::ValidationRequired).walk(|walk| walk.since = after(-320)));
    let driver = fleet.driver_mut("n");
    (driver.started, driver.ready_since) = (Some(after(-10)), Some(after(-5)));
    fleet.validator_mut("n").started = Some(after(-4));
    fleet.put_client("n", "dcgm", DCGM, after(-900));
    fleet.play();
    assert_eq!(fleet.verdict("n").state, State::UpgradeDone, "{}", fleet.story.join("\n"));
}

#[test]
fn who_retries_a_node_takes_it_with_the_devices_that_it_has() {
    let mut fleet = Fleet::new().with(node("n").outdated());
    fleet.node_mut("n").allocatable = vec![("nvidia.com/gpu".into(), 8)];
    while fleet.verdict("n").state != State::ValidationRequired {
        fleet.step();
    }
    fleet.node_mut("n").allocatable = vec![("nvidia.com/gpu".into(), 7)];
    fleet.play();
    assert_eq!(fleet.verdict("n").state, State::UpgradeFailed);
    fleet.set_label("n", "upgrade-required");
    fleet.play();
    assert_eq!(fleet.verdict("n").state, State::UpgradeDone, "{}", fleet.why("n"));
}

#[test]
fn a_device_plugin_that_offers_nothing_is_not_back() {
    let mut fleet = validating();
    fleet.put_client("n", "plugin", Some(ClientKind::DevicePlugin), after(-55));
    fleet.settle();
    assert_eq!(fleet.why("n"), "the node offers no devices yet, although its device plugin runs");
    fleet.node_mut("n").allocatable = vec![("nvidia.com/gpu".into(), 1)];
    fleet.play();
    assert_eq!(fleet.verdict("n").state, State::UpgradeDone);
}

#[test]
fn outside_of_visits_the_order_is_kept_and_a_pending_template_keeps_nobody_else() {
    let spec = json!({"driver": {"name": "gpu"}, "clients": {"refresh": "Always"}});
    let mut fleet = replaced(node("n").labelled(State::UpgradeDone)).driver_policy("mine", spec);
    fleet.hung_clients.insert("toolkit".to_owned());
    fleet.put_client("n", "dra", DRA, after(-900));
    on_delete(&mut fleet, "dra");
    fleet.put_client("n", "toolkit", Some(ClientKind::Toolkit), after(-900));
    fleet.put_client("n", "dcgm", DCGM, after(-900));
    fleet.settle();
    assert_eq!(fleet.told("StaleClient"), ["n delete clients/toolkit-n (StaleClient)"], "dcgm has to wait");
    fleet.client_mut("n", "toolkit").ready = true;
    fleet.settle();
    assert_eq!(fleet.told("StaleClient").len(), 2);
    assert!(fleet.why("n").contains("newer template"), "{}", fleet.why("n"));
}

#[test]
fn a_driver_whose_ready_condition_comes_and_goes_makes_nobody_stale() {
    let spec = json!({"driver": {"name": "gpu"}, "clients": {"extra": [{"selector": "app=agent"}]}});
    let mut fleet = replaced(node("n").labelled(State::UpgradeDone)).driver_policy("mine", spec);
    let driver = fleet.driver_mut("n");
    (driver.started, driver.ready_since) = (Some(after(-90_000)), Some(after(-10)));
    fleet.put_client("n", "agent", None, after(-80_000));
    assert_eq!(fleet.why("n"), "driver up to date and ready");
}

#[test]
fn a_client_that_may_be_missing_does_not_send_a_node_back_from_its_release() {
    let extra = json!({"selector": "app=agent", "required": false});
    let spec = json!({"driver": {"name": "gpu"}, "clients": {"extra": [extra]}});
    let mut fleet = replaced(node("n").at(State::UncordonRequired)).driver_policy("mine", spec);
    fleet.put_client("n", "agent", None, after(-900));
    fleet.play();
    assert_eq!(fleet.states_of("n"), ["upgrade-done"]);
}
