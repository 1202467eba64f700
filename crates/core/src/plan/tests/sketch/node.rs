//! A node as proptest draws it, with what may be on it.

use proptest::prelude::*;
use proptest::sample::select;

use super::super::fixture::*;
use super::HALVES;
use super::pod::{PodSketch, pods};
use crate::clients::ClientKind;
use crate::contract::{
    AGENT_CORDON_ANNOTATION, DRIVER_OWNER_LABEL, HEALTH_HOLD_ANNOTATION, NEEDS_REBOOT_ANNOTATION, State,
    nvsentinel,
};
use crate::health::{HealthHold, OPTED_OUT, Owner, Shield};
use crate::snapshot::{Object, Pending, SetbackKind};

/// A node as proptest draws it: any state, with whatever does or does not belong to it.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is drawn by itself")]
pub(in crate::plan::tests) struct NodeSketch {
    state: State,
    other_state: State,
    /// With its visit record, if that state has one.
    recorded: bool,
    label: LabelSketch,
    outdated: bool,
    driver: DriverSketch,
    cordoned: Option<bool>,
    our_cordon: bool,
    ready: bool,
    skipped: bool,
    requested: bool,
    waits_for_load: bool,
    crashes: bool,
    stale_validator: bool,
    pods: Vec<PodSketch>,
    api: ApiSketch,
    record: RecordSketch,
    health: HealthSketch,
    /// When its client of the driver started, if it has one; before the driver did, or after.
    client: Option<bool>,
    /// Which half of the fleet it is in.
    second_half: bool,
    /// Which rack; some nodes are in none.
    rack: Option<u8>,
}

/// What else may be in a visit record.
#[derive(Clone, Debug)]
pub(super) struct RecordSketch {
    attempts: u32,
    came_back: u32,
    paused: bool,
    replaces_driver: bool,
    old_target: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum HealthSketch {
    Left,
    Quarantined,
    CordonedByNvSentinel,
    HeldByVisit,
    HeldByPerson,
    CordonedByDriverManager,
    NeedsReboot,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum LabelSketch {
    Honest,
    Removed,
    Retry,
    Nonsense,
    Scribbled,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum DriverSketch {
    Ready,
    NotReady,
    Missing,
    Replaced,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum ApiSketch {
    Quiet,
    Writing,
    Stale,
    Refuses,
}

pub(super) fn nodes() -> impl Strategy<Value = NodeSketch> {
    let label = prop_oneof![
        12 => Just(LabelSketch::Honest),
        1 => Just(LabelSketch::Removed),
        1 => Just(LabelSketch::Retry),
        1 => Just(LabelSketch::Nonsense),
        1 => Just(LabelSketch::Scribbled),
    ];
    let driver = prop_oneof![
        6 => Just(DriverSketch::Ready),
        1 => Just(DriverSketch::NotReady),
        1 => Just(DriverSketch::Missing),
        1 => Just(DriverSketch::Replaced),
    ];
    let api = prop_oneof![
        9 => Just(ApiSketch::Quiet),
        1 => Just(ApiSketch::Writing),
        1 => Just(ApiSketch::Stale),
        1 => Just(ApiSketch::Refuses),
    ];
    let health = prop_oneof![
        8 => Just(HealthSketch::Left),
        1 => Just(HealthSketch::Quarantined),
        1 => Just(HealthSketch::CordonedByNvSentinel),
        1 => Just(HealthSketch::HeldByVisit),
        1 => Just(HealthSketch::HeldByPerson),
        1 => Just(HealthSketch::CordonedByDriverManager),
        1 => Just(HealthSketch::NeedsReboot),
    ];
    let rarely = || prop::bool::weighted(0.15);
    let mostly = || prop::bool::weighted(0.85);
    let record = (0..3_u32, 0..4_u32, rarely(), rarely(), rarely()).prop_map(
        |(attempts, came_back, paused, replaces_driver, old_target)| RecordSketch {
            attempts,
            came_back,
            paused,
            replaces_driver,
            old_target,
        },
    );
    let rack = prop::option::weighted(0.7, 0..3_u8);
    let beside = (record, health, prop::option::weighted(0.2, any::<bool>()), any::<bool>(), rack);
    let state = || select(State::ALL.to_vec());
    let place = (state(), state(), mostly(), label, any::<bool>(), driver);
    let wishes = (rarely(), rarely());
    let service = (prop::option::weighted(0.2, any::<bool>()), mostly(), mostly(), rarely(), wishes);
    (place, service, rarely(), rarely(), prop::collection::vec(pods(), 0..3), api, beside).prop_map(
        |(place, service, crashes, stale_validator, pods, api, beside)| {
            let (record, health, client, second_half, rack) = beside;
            let (state, other_state, recorded, label, outdated, driver) = place;
            let (cordoned, our_cordon, ready, skipped, (requested, waits_for_load)) = service;
            NodeSketch {
                state,
                other_state,
                recorded,
                label,
                outdated,
                driver,
                cordoned,
                our_cordon,
                ready,
                skipped,
                requested,
                waits_for_load,
                crashes,
                stale_validator,
                pods,
                api,
                record,
                health,
                client,
                second_half,
                rack,
            }
        },
    )
}

impl NodeSketch {
    pub(super) fn spec(&self, name: &str) -> NodeSpec {
        let mut spec = node(name);
        if self.outdated {
            spec = spec.outdated();
        }
        if self.recorded {
            spec = spec.at(self.state);
            if self.state == State::UpgradeFailed
                || (self.state.in_flight() && self.state != State::CordonRequired)
            {
                spec = spec.visit(|visit| visit.holds.cordon = self.our_cordon);
                spec = self.record.on(spec, name);
            }
        } else {
            spec = spec.labelled(self.state);
        }
        spec = match self.cordoned {
            Some(true) => spec.cordoned(),
            Some(false) => spec.uncordoned(),
            None => spec,
        };
        if !self.ready {
            spec = spec.not_ready();
        }
        if self.skipped {
            spec = spec.skipped();
        }
        if self.requested {
            spec = spec.annotation(&keys("gpu").requested, "true");
        }
        if self.waits_for_load {
            spec = spec.annotation(&keys("gpu").safe_load, "true");
        }
        if self.other_state != State::Unknown {
            spec = spec.label(&keys("ofed").state, self.other_state.as_str());
        }
        if let Some(rack) = self.rack {
            spec = spec.label("rack", &format!("r{rack}"));
        }
        spec = self.health.on(spec.label("half", self.half()).label(DRIVER_OWNER_LABEL, self.half()));
        self.pods.iter().enumerate().fold(spec, |spec, (i, pod)| spec.pod(pod.spec(&format!("{name}-{i}"))))
    }

    /// The half of the fleet, which is a label and the name of the pool that has it.
    pub(in crate::plan::tests) fn half(&self) -> &'static str {
        HALVES[usize::from(self.second_half)]
    }

    /// What cannot be said of a node in the making.
    pub(super) fn finish(&self, fleet: &mut Fleet, name: &str, quiet: bool) {
        match self.label {
            LabelSketch::Honest => {}
            LabelSketch::Removed => fleet.set_label(name, ""),
            LabelSketch::Retry => fleet.set_label(name, "upgrade-required"),
            LabelSketch::Nonsense => fleet.set_label(name, "upgrade-perhaps"),
            LabelSketch::Scribbled => fleet.set_record(name, "scribble"),
        }
        match self.driver {
            DriverSketch::Ready => {}
            DriverSketch::NotReady => fleet.driver_mut(name).ready = false,
            DriverSketch::Missing => fleet.remove_pods(name, |pod| pod.name.name.contains("gpu-driver")),
            DriverSketch::Replaced => fleet.driver_mut(name).uid = "by-hand".into(),
        }
        if self.stale_validator {
            fleet.validator_mut(name).started = Some(after(-9000));
        }
        if self.crashes {
            fleet.crashes_on.insert(name.to_owned());
        }
        if let Some(stale) = self.client {
            let started = if stale { after(-9000) } else { after(-6000) };
            fleet.put_client(name, "nvidia-dcgm", Some(ClientKind::Operand), started);
        }
        let object = Object::Node(name.into());
        match self.api {
            _ if quiet => {}
            ApiSketch::Quiet => {}
            ApiSketch::Writing => {
                let pending =
                    Pending { moving_to: Some(("gpu".into(), State::CordonRequired)), on_node: None };
                fleet.snapshot.in_flight.insert(object, pending);
            }
            ApiSketch::Stale => fleet.setback(object, SetbackKind::Stale, after(5)),
            ApiSketch::Refuses => fleet.setback(object, SetbackKind::Error("no".into()), after(5)),
        }
    }
}

impl RecordSketch {
    fn on(&self, spec: NodeSpec, name: &str) -> NodeSpec {
        spec.walk(|walk| {
            (walk.attempts, walk.came_back) = (self.attempts, self.came_back);
            walk.paused.since = self.paused.then(|| after(-30));
            walk.replace = self.replaces_driver.then(|| format!("uid-gpu-driver-{name}").into());
            walk.target = if self.old_target { OLD.into() } else { NEW.into() };
        })
    }
}

impl HealthSketch {
    fn on(self, spec: NodeSpec) -> NodeSpec {
        let by = |owner: Owner, until| HealthHold {
            owner,
            shield: Shield::Quarantine,
            before: None,
            since: after(-300),
            until,
        };
        let held = |hold: HealthHold| {
            spec.clone()
                .annotation(HEALTH_HOLD_ANNOTATION, &hold.to_text())
                .label(nvsentinel::OPT_OUT_LABEL, OPTED_OUT)
        };
        match self {
            HealthSketch::Left => spec,
            HealthSketch::Quarantined => spec.label(nvsentinel::STATE_LABEL, "quarantined"),
            HealthSketch::CordonedByNvSentinel => {
                spec.annotation(nvsentinel::CORDONED_ANNOTATION, "True").cordoned()
            }
            HealthSketch::HeldByVisit => held(by(Owner::Visit, None)),
            HealthSketch::HeldByPerson => held(by(Owner::Person("ann".into()), Some(after(600)))),
            HealthSketch::CordonedByDriverManager => {
                spec.annotation(AGENT_CORDON_ANNOTATION, "{}").cordoned()
            }
            HealthSketch::NeedsReboot => spec.annotation(NEEDS_REBOOT_ANNOTATION, "half"),
        }
    }
}
