//! What people and machines do in the middle of it all.

use proptest::prelude::*;
use proptest::sample::select;

use super::super::fixture::*;

/// Something that a person or a machine does in the middle of it all.
#[derive(Clone, Copy, Debug)]
pub(in crate::plan::tests) enum Deed {
    Cordon(bool),
    Ready(bool),
    Label(&'static str),
    Scribble,
    Skip,
    Request,
    Work,
    DriverBreaks,
    NewVersion,
    Pause(bool),
    Time(i64),
}

/// Deeds, each with the node that it is done to.
pub(in crate::plan::tests) fn deeds() -> impl Strategy<Value = Vec<(usize, Deed)>> {
    let labels = vec!["", "upgrade-required", "upgrade-done", "upgrade-perhaps", "pod-restart-required"];
    let deed = prop_oneof![
        any::<bool>().prop_map(Deed::Cordon),
        any::<bool>().prop_map(Deed::Ready),
        select(labels).prop_map(Deed::Label),
        Just(Deed::Scribble),
        Just(Deed::Skip),
        Just(Deed::Request),
        Just(Deed::Work),
        Just(Deed::DriverBreaks),
        Just(Deed::NewVersion),
        any::<bool>().prop_map(Deed::Pause),
        (1..4000_i64).prop_map(Deed::Time),
    ];
    prop::collection::vec((0..8_usize, deed), 0..6)
}

impl Deed {
    pub(in crate::plan::tests) fn happen(self, fleet: &mut Fleet, node: &str, serial: i64) {
        match self {
            Deed::Cordon(on) => fleet.node_mut(node).unschedulable = on,
            Deed::Ready(on) => fleet.node_mut(node).ready = on,
            Deed::Label(value) => fleet.set_label(node, value),
            Deed::Scribble => fleet.set_record(node, "scribble"),
            Deed::Skip => fleet.node_mut(node).set_label(&keys("gpu").skip, Some("true")),
            Deed::Request => {
                let key = keys("gpu").requested;
                fleet.node_mut(node).annotations.insert(key, "true".to_owned());
            }
            Deed::Work => {
                let now = fleet.snapshot.now;
                fleet.put(&node.into(), pod(&format!("new-{serial}")).created(now));
            }
            Deed::DriverBreaks => fleet.break_driver(node),
            Deed::NewVersion => fleet.publish("gpu", 10 + serial, &format!("deed-{serial}")),
            Deed::Pause(on) => fleet.pause(on),
            Deed::Time(seconds) => fleet.wait(seconds),
        }
    }
}
