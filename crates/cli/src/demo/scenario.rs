//! What a demo is about: who goes first, and what goes wrong.

use std::fmt::Write as _;
use std::time::Duration;

use clap::ValueEnum;
use pitcrew_core::contract::CANARY_LABEL;
use pitcrew_sim::actors::{Behaviour, Fault, Nodes};
use pitcrew_sim::fleet::Fleet;

use super::run::{FROM, TO};

/// The node that goes first.
pub(super) const CANARY: &str = "gpu-01";
/// As long as the documented label makes a canary bake.
const BAKE: Duration = Duration::from_hours(48);
/// A driver that does not come up is given so long.
const DRIVER_READY: Duration = Duration::from_mins(30);

/// What a demo is about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Scenario {
    /// Every node is upgraded, a few at a time
    #[default]
    Upgrade,
    /// One node goes first and is watched at work for two days, then the others follow
    Canary,
    /// The new driver breaks its canary: it is taken back, and nobody else is touched
    BadDriver,
}

impl Scenario {
    /// The fleet with what this is about.
    pub(super) fn stage(self, fleet: Fleet) -> Fleet {
        match self {
            Scenario::Upgrade => fleet,
            Scenario::Canary | Scenario::BadDriver => {
                let canary = fleet.node_names().next().unwrap_or_else(|| CANARY.to_owned());
                fleet.with_label(&canary, CANARY_LABEL, "true")
            }
        }
    }

    /// How machines and drivers behave.
    pub(super) fn behaviour(self, behaviour: Behaviour) -> Behaviour {
        match self {
            Scenario::Upgrade | Scenario::Canary => behaviour,
            // Whoever tries it first, it breaks.
            Scenario::BadDriver => behaviour.with_fault(Nodes::All, TO, Fault::CrashLoop),
        }
    }

    /// The version that every node runs at the end.
    pub(super) fn ends_on(self) -> &'static str {
        if self == Scenario::BadDriver { FROM } else { TO }
    }

    /// How long it is expected to take, of which so long nothing moves.
    pub(super) fn takes(self, upgrade: Duration, visit: Duration) -> (Duration, Duration) {
        match self {
            Scenario::Upgrade => (upgrade, Duration::ZERO),
            Scenario::Canary => (upgrade + visit, BAKE),
            Scenario::BadDriver => (2 * visit + DRIVER_READY, Duration::ZERO),
        }
    }
}

/// All of them, each with a sentence.
pub(super) fn list() -> String {
    let mut text = String::new();
    for scenario in Scenario::value_variants() {
        let Some(value) = scenario.to_possible_value() else { continue };
        let about = value.get_help().map(ToString::to_string).unwrap_or_default();
        let _ = writeln!(text, "{:<12}  {about}", value.get_name());
    }
    text.push_str("\nRun one with: pitcrew demo --scenario canary\n");
    text
}
