//! Who goes together, and who does not.

use serde_json::{Value, json};

use super::fixture::*;
use crate::contract::State;
use crate::reason::Reason;
use crate::snapshot::{Object, Pending, SetbackKind};

/// A DriverPolicy with these limits and this topology, and no nodes yet.
#[expect(clippy::needless_pass_by_value, reason = "values are written at the call")]
fn fleet(parallel: u32, unavailable: Value, topology: Value) -> Fleet {
    let policy = json!({
        "driver": {"name": "gpu"},
        "upgradePolicy": {"maxParallelUpgrades": parallel, "maxUnavailable": unavailable},
        "rollout": {"topology": topology},
    });
    Fleet::without_policy().driver_policy("gpu", policy)
}

fn racks(parallel: u32, unavailable: Value) -> Fleet {
    fleet(parallel, unavailable, json!({"atom": "rack"}))
}

/// An outdated node that is due.
fn due(name: &str) -> NodeSpec {
    node(name).outdated().at(State::UpgradeRequired)
}

/// So many of them in one rack: `a-1`, `a-2`, …
fn rack(fleet: Fleet, rack: &str, count: usize) -> Fleet {
    (1..=count).fold(fleet, |fleet, i| fleet.with(due(&format!("{rack}-{i}")).label("rack", rack)))
}

fn starts(fleet: &Fleet) -> Vec<String> {
    let start = |line: String| Some(line.strip_suffix(" -> cordon-required")?.to_owned());
    fleet.decisions().into_iter().filter_map(start).collect()
}

#[test]
fn an_atom_starts_whole_or_not_at_all() {
    let fleet = rack(rack(racks(5, json!("100%")), "a", 3), "b", 3);
    assert_eq!(starts(&fleet), ["a-1", "a-2", "a-3"], "two slots are of no use to the second");
    assert_eq!(fleet.why("b-1"), "next 3 slots, for nodes that go together; maxParallelUpgrades is 5");
    assert_eq!(fleet.why("b-1"), fleet.why("b-3"));
    let both = rack(rack(racks(6, json!("100%")), "a", 3), "b", 3);
    assert_eq!(starts(&both).len(), 6);
}

#[test]
fn a_whole_upgrade_never_has_a_part_of_an_atom_waiting() {
    let mut fleet = rack(rack(rack(racks(2, json!("50%")), "a", 2), "b", 2), "c", 2);
    let mut waves = Vec::new();
    loop {
        let now = starts(&fleet);
        if !now.is_empty() {
            waves.push(now.join(" "));
        }
        let wake_at = fleet.plan().wake_at;
        if !fleet.step() {
            let Some(at) = wake_at else { break };
            fleet.snapshot.now = fleet.snapshot.now.max(at);
        }
    }
    assert_eq!(waves, ["a-1 a-2", "b-1 b-2", "c-1 c-2"]);
    assert!(fleet.pool().nodes.values().all(|verdict| verdict.state == State::UpgradeDone));
}

/// There is room for two, and one place of it is taken by the node that failed: the others go when it is back.
#[test]
fn a_node_that_is_out_and_tried_again_does_not_wait_for_the_others_of_its_atom() {
    // Its label is the person's: once more.
    let failed = node("a-1").outdated().at(State::UpgradeFailed).walk(|walk| {
        (walk.state, walk.attempts) = (State::UpgradeRequired, 1);
    });
    let again = failed.labelled(State::UpgradeRequired).label("rack", "a");
    let fleet = racks(0, json!(2)).with(again);
    let mut fleet = fleet.with(due("a-2").label("rack", "a")).with(due("a-3").label("rack", "a"));
    assert_eq!(fleet.decisions()[..2], ["a-1 -> cordon-required +visit", "a-2 annotate +pending"]);
    fleet.play();
    assert!(fleet.pool().nodes.values().all(|verdict| verdict.state == State::UpgradeDone));
}

#[test]
fn an_atom_that_can_never_fit_says_which_limit_must_be_how_large() {
    for (parallel, unavailable, why) in [
        (2, json!("100%"), "maxParallelUpgrades allows 2: it must be at least 3"),
        (0, json!(2), "maxUnavailable allows 2: it must be at least 3"),
        (0, json!("34%"), "maxUnavailable allows 2: it must be at least 3"),
    ] {
        let fleet = rack(racks(parallel, unavailable), "a", 3).with(due("loner")).with(node("done"));
        assert_eq!(fleet.why("a-1"), format!("3 nodes with rack=a start together, and {why}"));
        assert_eq!(starts(&fleet), ["loner"], "others go on");
    }
    let spread = json!({"atom": "rack", "spread": {"label": "zone", "max": 2}});
    let zoned = |name: &str| due(name).label("rack", "a").label("zone", "z");
    let fleet =
        ["a-1", "a-2", "a-3"].into_iter().fold(fleet(0, json!("100%"), spread), |f, n| f.with(zoned(n)));
    assert_eq!(
        fleet.why("a-1"),
        "3 nodes with rack=a start together, and topology.spread.max allows 2: it must be at least 3"
    );
    let brake = rack(racks(0, json!(0)), "a", 2);
    assert_eq!(
        brake.why("a-1"),
        "next 2 slots, for nodes that go together; 0 of at most 0 nodes are out (maxUnavailable)"
    );
}

#[test]
fn a_node_that_cannot_start_holds_its_atom_and_is_named() {
    let stuck = || due("a-9").label("rack", "a").pod(pod("shell").bare());
    let fleet = rack(racks(0, json!("100%")), "a", 2).with(stuck());
    assert_eq!(starts(&fleet), [""; 0]);
    let why = fleet.why("a-1");
    assert!(
        why.starts_with("nodes with rack=a start together, and a-9 does not: cannot be emptied: "),
        "{why}"
    );
    assert!(fleet.why("a-9").starts_with("cannot be emptied: "), "it says so for itself");

    let not_ready = rack(racks(0, json!("100%")), "a", 2).with(due("a-9").label("rack", "a").not_ready());
    assert_eq!(starts(&not_ready), [""; 0]);
}

#[test]
fn nodes_that_are_skipped_done_or_failed_do_not_belong_to_the_wave() {
    let fleet = rack(racks(2, json!("100%")), "a", 2)
        .with(due("a-7").label("rack", "a").skipped())
        .with(node("a-8").label("rack", "a"))
        .with(node("a-9").label("rack", "a").outdated().at(State::UpgradeFailed))
        .with(node("elsewhere"));
    assert_eq!(starts(&fleet), ["a-1", "a-2"]);
}

#[test]
fn nobody_starts_before_all_of_an_atom_were_told_that_they_are_due() {
    let mut fleet = rack(racks(0, json!("100%")), "a", 2).with(node("a-3").label("rack", "a").outdated());
    assert_eq!(starts(&fleet), [""; 0]);
    assert_eq!(
        fleet.why("a-1"),
        "nodes with rack=a start together, and a-3 does not: moves on to upgrade-required"
    );
    fleet.step();
    assert_eq!(starts(&fleet), ["a-1", "a-2", "a-3"]);
}

#[test]
fn what_is_written_or_refused_on_one_node_holds_the_others() {
    let fleet = || rack(racks(0, json!("100%")), "a", 2);
    let mut writing = fleet();
    let pending = Pending { moving_to: None, on_node: None };
    writing.snapshot.in_flight.insert(Object::Node("a-2".into()), pending);
    assert_eq!(starts(&writing), [""; 0]);
    assert_eq!(writing.why("a-1"), "nodes with rack=a start together, and a-2 does not: being written");
    let mut stale = fleet();
    stale.setback(Object::Node("a-2".into()), SetbackKind::Stale, after(5));
    assert_eq!(starts(&stale), [""; 0]);
    assert_eq!(
        stale.why("a-1"),
        "nodes with rack=a start together, and a-2 does not: changed by somebody else at the same moment; looks again"
    );
    let mut refused = fleet();
    refused.setback(Object::Node("a-1".into()), SetbackKind::Error("no".into()), after(5));
    assert_eq!(
        refused.why("a-2"),
        "nodes with rack=a start together, and a-1 does not: the Kubernetes API refused a write: no"
    );
}

#[test]
fn an_atom_that_is_under_way_is_finished_first_whoever_cannot() {
    let fleet = racks(2, json!("100%"))
        .with(due("a-1").label("rack", "a"))
        .with(node("b-1").label("rack", "b").outdated().at(State::PodDeletionRequired).pod(pod("train")))
        .with(due("b-2").label("rack", "b").pod(pod("work")))
        .with(due("b-3").label("rack", "b").pod(pod("shell").bare()));
    assert_eq!(starts(&fleet), ["b-2"]);
}

#[test]
fn slots_are_kept_for_an_atom_unless_they_would_never_be_enough() {
    // One is on its way. Of the two slots, the free one must not go to whoever needs only one.
    let waiting =
        |fleet: Fleet| rack(fleet, "a", 2).with(due("z").pod(pod("work").gpus(8)).pod(pod("more").gpus(8)));
    let fleet = waiting(
        racks(2, json!("100%"))
            .with(node("m").outdated().at(State::PodDeletionRequired).pod(pod("x").leaving())),
    );
    assert_eq!(starts(&fleet), [""; 0]);
    assert_eq!(fleet.why("z"), "waits for a slot, 2 before it; maxParallelUpgrades is 2");
    // A node that somebody else took out comes back when it likes.
    let fleet = waiting(racks(0, json!(2)).with(node("m").cordoned()));
    assert_eq!(starts(&fleet), ["z"]);
}

#[test]
fn a_node_that_only_has_to_load_its_driver_waits_for_no_atom() {
    let mut fleet = rack(racks(0, json!("100%")), "a", 2)
        .with(due("a-8").label("rack", "a").pod(pod("shell").bare()))
        .with(
            node("a-9")
                .label("rack", "a")
                .at(State::UpgradeRequired)
                .annotation(&keys("gpu").safe_load, "true"),
        );
    fleet.driver_mut("a-9").ready = false;
    assert_eq!(starts(&fleet), ["a-9"]);
}

#[test]
fn nodes_of_one_job_go_together() {
    let with = |topology: Value, first: PodSpec, second: PodSpec| {
        let fleet = fleet(2, json!("100%"), topology);
        starts(&fleet.with(due("n-1").pod(first)).with(due("n-2")).with(due("n-3").pod(second)))
    };
    let train = |name: &str| pod(name).of_job("train");
    assert_eq!(
        with(json!({}), train("t-0"), train("t-1")),
        ["n-2"],
        "the cheapest first, then both of the job"
    );
    let off = json!({"gang": {"enabled": false}});
    assert_eq!(with(off, train("t-0"), train("t-1")), ["n-1", "n-2"]);
    assert_eq!(with(json!({}), pod("web-0"), pod("web-1")), ["n-1", "n-2"], "replicas work for themselves");
    assert_eq!(with(json!({}), train("t-0"), pod("t-1").of_job("other")), ["n-1", "n-2"]);
    assert_eq!(
        with(json!({}), train("t-0"), train("t-1").gpus(0)),
        ["n-2", "n-3"],
        "only who uses the device is interrupted"
    );
    let label = || json!({"gang": {"label": "job"}});
    let labelled = |name: &str, value: &str| pod(name).label("job", value);
    assert_eq!(with(label(), labelled("t-0", "x"), labelled("t-1", "x")), ["n-2"]);
    assert_eq!(with(label(), labelled("t-0", "x"), labelled("t-1", "y")), ["n-1", "n-2"]);
    assert_eq!(with(label(), train("t-0"), train("t-1")), ["n-1", "n-2"], "the label instead of the owner");
}

#[test]
fn a_job_set_is_one_job_whose_parts_are_jobs_of_their_own() {
    let with = |first: PodSpec, second: PodSpec| {
        let fleet = fleet(2, json!("100%"), json!({}));
        starts(&fleet.with(due("n-1").pod(first)).with(due("n-2")).with(due("n-3").pod(second)))
    };
    let part = |job: &str, set: &str| pod(job).of_job(job).label("jobset.sigs.k8s.io/jobset-name", set);
    assert_eq!(with(part("train-0", "train"), part("train-1", "train")), ["n-2"], "both or none");
    assert_eq!(with(part("train-0", "train"), part("other-0", "other")), ["n-1", "n-2"]);
}

#[test]
fn a_job_is_interrupted_once() {
    let mut fleet = fleet(2, json!("100%"), json!({}));
    for i in 1..=4 {
        fleet = fleet.with(due(&format!("n-{i}")).pod(pod(&format!("p-{i}")).of_job(["even", "odd"][i % 2])));
    }
    assert_eq!(starts(&fleet), ["n-1", "n-3"]);
    fleet.play();
    let order: Vec<&str> = fleet.told("evict").iter().map(|line| &line[..3]).collect();
    assert_eq!(order, ["n-1", "n-3", "n-2", "n-4"]);
}

#[test]
fn a_job_that_is_larger_than_the_limits_is_split() {
    let job = |parallel: u32, unavailable: Value| {
        let fleet = fleet(parallel, unavailable, json!({}));
        (1..=5).fold(fleet, |fleet, i| {
            fleet.with(due(&format!("n-{i}")).pod(pod(&format!("p-{i}")).of_job("big")))
        })
    };
    let fleet = job(2, json!("100%"));
    assert_eq!(starts(&fleet), ["n-1", "n-2"]);
    assert_eq!(fleet.why("n-4"), "next 2 slots, for nodes that go together; maxParallelUpgrades is 2");
    assert_eq!(starts(&job(0, json!(3))), ["n-1", "n-2", "n-3"]);
    // What somebody else keeps out will not come back for a preference.
    assert_eq!(starts(&job(0, json!(3)).with(node("parked").cordoned())), ["n-1", "n-2"]);
}

#[test]
fn a_job_over_several_atoms_takes_them_whole() {
    let topology = json!({"atom": "rack"});
    let racks = |parallel| {
        let fleet = fleet(parallel, json!("100%"), topology.clone());
        let on = |name: &str, rack: &str| due(name).label("rack", rack);
        fleet
            .with(on("a-1", "a").pod(pod("t-0").of_job("train")))
            .with(on("a-2", "a"))
            .with(on("b-1", "b"))
            .with(on("b-2", "b").pod(pod("t-1").of_job("train")))
    };
    assert_eq!(starts(&racks(4)), ["a-1", "a-2", "b-1", "b-2"]);
    assert_eq!(starts(&racks(3)), ["a-1", "a-2"], "the job is split, the racks are not");
}

#[test]
fn at_most_so_many_of_a_group_are_out() {
    let spread = |max: Value| fleet(0, json!("100%"), json!({"spread": {"label": "zone", "max": max}}));
    let zoned = |zone: &str, i: usize| due(&format!("{zone}-{i}")).label("zone", zone);
    let all = |fleet: Fleet| {
        ["a", "b"].into_iter().fold(fleet, |f, zone| (1..=3).fold(f, |f, i| f.with(zoned(zone, i))))
    };
    let one = all(spread(json!(1))).with(due("nowhere"));
    assert_eq!(starts(&one), ["a-1", "b-1", "nowhere"]);
    assert_eq!(one.why("a-2"), "at most 1 of the nodes with zone=a may be out (topology.spread), and a-1 is");
    assert_eq!(starts(&all(spread(json!("50%")))), ["a-1", "a-2", "b-1", "b-2"], "two of three, rounded up");
    let foreign = all(spread(json!(1))).with(node("a-9").label("zone", "a").cordoned());
    assert_eq!(starts(&foreign), ["b-1"]);
    assert!(matches!(foreign.reason("a-1"), Reason::SpreadFull { out, .. } if out == ["a-9".into()]));
    let parked = spread(json!(1)).with(zoned("a", 1).cordoned()).with(zoned("a", 2));
    assert_eq!(starts(&parked), ["a-1"], "who is out already costs nothing more");
}
