//! What is watched: by the controller, without the features that are switched off, and by readers.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

/// A part of pitcrew that can be switched off; what only it needs is then neither watched nor asked for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Feature {
    /// Looking at NVSentinel's circuit breaker. Without it the nodes are not kept from NVSentinel either.
    Nvsentinel,
    /// Bringing the driver's clients back.
    Clients,
    /// Following what a NicClusterPolicy says.
    NetworkOperator,
}

impl Feature {
    /// All of them.
    pub const ALL: [Feature; 3] = [Feature::Nvsentinel, Feature::Clients, Feature::NetworkOperator];
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Feature::Nvsentinel => "nvsentinel",
            Feature::Clients => "clients",
            Feature::NetworkOperator => "network-operator",
        })
    }
}

impl FromStr for Feature {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let known = Feature::ALL.map(|feature| feature.to_string());
        let found = Feature::ALL.into_iter().find(|feature| feature.to_string() == text);
        found.ok_or_else(|| format!("there is no such feature; choose from {}", known.join(", ")))
    }
}

/// Kinds of objects that are watched.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Kind {
    Node,
    Pod,
    DaemonSet,
    Revision,
    Budget,
    DriverPolicy,
    Rollout,
    ClusterPolicy,
    NvidiaDriver,
    NicClusterPolicy,
    Lease,
    Deployment,
    Definition,
    Claim,
    Slice,
    Breaker,
    GateJob,
    GatePod,
    Matrix,
    /// Who leads. Only readers ask; a controller knows.
    Leader,
}

impl Kind {
    /// The definition without which nobody serves it. A cluster need not have it.
    pub(crate) fn definition(self) -> Option<&'static str> {
        match self {
            Kind::ClusterPolicy => Some("clusterpolicies.nvidia.com"),
            Kind::NvidiaDriver => Some("nvidiadrivers.nvidia.com"),
            Kind::NicClusterPolicy => Some("nicclusterpolicies.mellanox.com"),
            _ => None,
        }
    }

    const ALL: [Kind; 20] = [
        Kind::Node,
        Kind::Pod,
        Kind::DaemonSet,
        Kind::Revision,
        Kind::Budget,
        Kind::DriverPolicy,
        Kind::Rollout,
        Kind::ClusterPolicy,
        Kind::NvidiaDriver,
        Kind::NicClusterPolicy,
        Kind::Lease,
        Kind::Deployment,
        Kind::Definition,
        Kind::Claim,
        Kind::Slice,
        Kind::Breaker,
        Kind::GateJob,
        Kind::GatePod,
        Kind::Matrix,
        Kind::Leader,
    ];
}

/// What somebody watches.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Scope(BTreeSet<Kind>);

impl Scope {
    /// All that the controller decides from.
    pub(crate) fn controller(disabled: &BTreeSet<Feature>) -> Self {
        let off = |kind: &Kind| match kind {
            Kind::Breaker => disabled.contains(&Feature::Nvsentinel),
            Kind::Slice => disabled.contains(&Feature::Clients),
            Kind::NicClusterPolicy => disabled.contains(&Feature::NetworkOperator),
            Kind::Leader => true,
            _ => false,
        };
        Self(Kind::ALL.into_iter().filter(|kind| !off(kind)).collect())
    }

    /// All that a reader needs to answer as the controller would. What nobody serves is not there, so it does without
    /// definitions.
    pub(crate) fn reader() -> Self {
        Self(Kind::ALL.into_iter().filter(|kind| *kind != Kind::Definition).collect())
    }

    /// What tells a driver's clients and whether they are stale.
    pub(crate) fn clients() -> Self {
        let kinds = [
            Kind::Node,
            Kind::Pod,
            Kind::DaemonSet,
            Kind::Revision,
            Kind::DriverPolicy,
            Kind::ClusterPolicy,
            Kind::NvidiaDriver,
            Kind::Slice,
        ];
        Self(kinds.into())
    }

    pub(crate) fn kinds(&self) -> impl Iterator<Item = Kind> {
        self.0.iter().copied()
    }

    pub(crate) fn has(&self, kind: Kind) -> bool {
        self.0.contains(&kind)
    }

    /// The kinds that every cluster serves.
    pub(crate) fn required(&self) -> impl Iterator<Item = Kind> {
        self.0.iter().copied().filter(|kind| kind.definition().is_none())
    }

    /// The kinds that a cluster may serve.
    pub(crate) fn optional(&self) -> impl Iterator<Item = Kind> {
        self.0.iter().copied().filter(|kind| kind.definition().is_some())
    }
}
