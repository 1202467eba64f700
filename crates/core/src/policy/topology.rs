//! Which nodes go together, and which do not, as a policy says it.

use super::parse::{amount, problem};
use super::{Amount, Problem};
use crate::api::{GangSpec, SpreadSpec, TopologySpec};
use crate::selector::Labels;

/// Which nodes go together, and which do not. The default: nodes of one job go together.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Topology {
    /// Nodes with one value of this label start in one wave or not at all.
    pub atom: Option<String>,
    /// So many nodes of one group may be out.
    pub spread: Option<Spread>,
    /// How a job is known whose nodes go together.
    pub gang: Gang,
}

/// So many nodes of one group may be out.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Spread {
    /// The node label whose values are the groups.
    pub label: String,
    /// Of the nodes of one group.
    pub max: Amount,
}

/// How a job is known whose nodes go together.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Gang {
    /// Not at all.
    Off,
    /// One Job, JobSet, MPIJob or the like controls its pods.
    #[default]
    Owner,
    /// Its pods have one value of this label, in one namespace.
    Label(String),
}

impl Topology {
    pub(super) fn read(spec: &TopologySpec) -> Result<Self, Problem> {
        let TopologySpec { atom, spread, gang } = spec;
        let spread = spread.as_ref().map(|SpreadSpec { label, max }| {
            let field = "spec.rollout.topology.spread.max";
            let max = amount(max, field)?;
            if matches!(max, Amount::Nodes(0) | Amount::Percent(0)) {
                return Err(problem(
                    "spread.max 0 would let no node start; leave spread out, or use 1",
                    field,
                ));
            }
            Ok(Spread { label: label.clone(), max })
        });
        let gang = match gang {
            GangSpec { enabled: false, .. } => Gang::Off,
            GangSpec { label: None, .. } => Gang::Owner,
            GangSpec { label: Some(label), .. } => Gang::Label(label.clone()),
        };
        Ok(Self { atom: atom.clone(), spread: spread.transpose()?, gang })
    }

    /// The atom that a node with these labels is of.
    pub(crate) fn atom_of<'a>(&self, labels: &'a Labels) -> Option<&'a str> {
        value(labels, self.atom.as_deref()?)
    }

    /// The group that a node with these labels is of.
    pub(crate) fn group_of<'a>(&self, labels: &'a Labels) -> Option<&'a str> {
        value(labels, &self.spread.as_ref()?.label)
    }
}

/// A label without a value puts nobody together.
fn value<'a>(labels: &'a Labels, key: &str) -> Option<&'a str> {
    labels.get(key).map(String::as_str).filter(|value| !value.is_empty())
}
