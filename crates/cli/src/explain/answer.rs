//! The answer about one node, as data: what `pitcrew explain -o json` prints and its text is made from.

use std::fmt;

use jiff::Timestamp;
use pitcrew_core::contract::{GPU_DRIVER, State};
use pitcrew_core::names::NodeName;
use pitcrew_core::reason::{About, Kind, Motion, Thing, advice, culprits, next};
use pitcrew_core::snapshot::Node;
use serde::Serialize;

use crate::reading::{Reading, driver_pod};
use crate::status::{ControllerReport, NodeReport, feels, kind_name};

/// The answer about one node.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Answer {
    pub(super) node: String,
    pub(super) cordoned: bool,
    /// By its own driver manager.
    pub(super) cordoned_by_driver_manager: bool,
    pub(super) ready: bool,
    pub(super) controller: ControllerReport,
    /// One answer for each driver that is looked after on the node.
    pub(super) drivers: Vec<DriverAnswer>,
}

/// The answer about one driver on the node.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct DriverAnswer {
    pub(super) driver: String,
    /// The object that states the policy, as `kind/name`.
    pub(super) policy: String,
    pub(super) state: State,
    #[serde(serialize_with = "kind_name")]
    pub(super) kind: Kind,
    /// Whether it moves by itself: `done`, `byItself`, `heldUp` or `needsAPerson`.
    #[serde(serialize_with = "motion_name")]
    pub(super) moves: Motion,
    /// The short name of the reason, the same as in metrics.
    pub(super) reason: &'static str,
    pub(super) message: String,
    pub(super) since: Option<Timestamp>,
    pub(super) until: Option<Timestamp>,
    /// The objects responsible, the most important one first.
    pub(super) cause: Vec<CauseAnswer>,
    /// What the visit holds on the node.
    pub(super) holds: Option<String>,
    pub(super) next: Option<NextAnswer>,
    pub(super) you_can: Vec<AdviceAnswer>,
    pub(super) visit: Option<VisitAnswer>,
    /// The version of the driver pod.
    pub(super) driver_version: Option<String>,
    /// When its containers started.
    pub(super) driver_since: Option<Timestamp>,
}

/// An object responsible.
#[derive(Clone, Debug, Serialize)]
pub(super) struct CauseAnswer {
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    namespace: Option<String>,
    name: String,
}

/// What happens next.
#[derive(Clone, Debug, Serialize)]
pub(super) struct NextAnswer {
    pub(super) at: Option<Timestamp>,
    pub(super) what: String,
}

/// What a person can do.
#[derive(Clone, Debug, Serialize)]
pub(super) struct AdviceAnswer {
    pub(super) what: &'static str,
    pub(super) command: String,
    /// What it costs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) but: Option<&'static str>,
}

/// The visit under way.
#[derive(Clone, Debug, Serialize)]
pub(super) struct VisitAnswer {
    pub(super) since: Timestamp,
    pub(super) rollout: Option<String>,
    /// How often it was started again.
    pub(super) attempts: u32,
}

impl From<Thing> for CauseAnswer {
    fn from(Thing { kind, namespace, name }: Thing) -> Self {
        Self { kind, namespace, name }
    }
}

impl fmt::Display for CauseAnswer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, namespace, name } = self.clone();
        Thing { kind, namespace, name }.fmt(f)
    }
}

impl Answer {
    /// The answer about a node that exists; a sentence if no pool has it.
    pub(super) fn of(reading: &Reading<'_>, node: &NodeName) -> anyhow::Result<Self> {
        let about = reading.about(node.as_str());
        if about.is_empty() {
            return Err(reading.stranger(node));
        }
        let facts = reading.snapshot.nodes.get(node);
        Ok(Self {
            node: node.to_string(),
            cordoned: facts.is_some_and(|node| node.unschedulable),
            cordoned_by_driver_manager: facts.is_some_and(Node::is_cordoned_by_driver_manager),
            ready: facts.is_some_and(|node| node.ready),
            controller: ControllerReport::of(reading.leader, reading.snapshot.now),
            drivers: about.iter().map(DriverAnswer::of).collect(),
        })
    }
}

impl DriverAnswer {
    fn of(about: &About<'_>) -> Self {
        let About { snapshot, pool, node, verdict, .. } = *about;
        let NodeReport { state, reason, message, since, until, driver_version, .. } =
            NodeReport::of(snapshot, pool, node, verdict);
        let pod = pool.policy.as_ref().ok().and_then(|policy| driver_pod(snapshot, policy, node));
        let (kind, facts) = (feels(verdict), snapshot.nodes.get(node));
        let motion = if kind == Kind::Done { Motion::Done } else { verdict.reason.motion() };
        let next = next(about).filter(|_| kind != Kind::Done);
        let advice = if kind == Kind::Done { vec![] } else { advice(about) };
        Self {
            driver: pool.driver.to_string(),
            policy: pool.source.to_string(),
            state,
            kind,
            moves: motion,
            reason,
            message,
            since,
            until,
            cause: culprits(about).into_iter().map(Into::into).collect(),
            holds: facts.and_then(holds),
            next: next.map(|next| NextAnswer { at: next.at, what: next.what }),
            you_can: advice
                .into_iter()
                .map(|advice| AdviceAnswer { what: advice.what, command: advice.command, but: advice.but })
                .collect(),
            visit: facts.and_then(|facts| visit(facts, about)),
            driver_version,
            driver_since: pod.and_then(|pod| pod.started),
        }
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it with a reference")]
fn motion_name<S: serde::Serializer>(motion: &Motion, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(match motion {
        Motion::Done => "done",
        Motion::ByItself => "byItself",
        Motion::HeldUp => "heldUp",
        Motion::NeedsAPerson => "needsAPerson",
    })
}

/// What the visit set on the node and puts back at its end.
fn holds(node: &Node) -> Option<String> {
    let visit = node.visit.as_ref()?.as_ref().ok()?;
    let adopted = node.is_cordoned_by_driver_manager() && visit.drivers.contains_key(GPU_DRIVER);
    let ours = visit.holds.cordon || adopted;
    Some(match (ours, node.unschedulable) {
        (true, true) => "the cordon, which pitcrew lifts at the end of the visit".to_owned(),
        (true, false) => "a cordon that somebody has lifted".to_owned(),
        (false, _) => "nothing; the node was cordoned by somebody else before, and stays so".to_owned(),
    })
}

fn visit(node: &Node, about: &About<'_>) -> Option<VisitAnswer> {
    let visit = node.visit.as_ref()?.as_ref().ok()?;
    let walk = visit.drivers.get(&about.pool.driver)?;
    Some(VisitAnswer { since: visit.since, rollout: visit.rollout.clone(), attempts: walk.attempts })
}
