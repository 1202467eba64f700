//! How things stand, as data: what `pitcrew status -o json` prints and its text is made from.

use std::collections::BTreeSet;

use jiff::Timestamp;
use pitcrew_controller::Leader;
use pitcrew_core::api::{MatrixStatus, StageStatus};
use pitcrew_core::contract::State;
use pitcrew_core::names::NodeName;
use pitcrew_core::plan::{PoolPlan, PoolStatus, Verdict, newest_rollout};
use pitcrew_core::policy::{Pool, Source};
use pitcrew_core::reason::{self, Kind, Limit, Reason};
use pitcrew_core::snapshot::Snapshot;
use pitcrew_core::version::DriverVersion;
use serde::Serialize;

use crate::reading::{Reading, driver_pod};

/// How things stand at one moment.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Report {
    /// The moment.
    pub(crate) at: Timestamp,
    /// Every node of every pool is done.
    pub(crate) done: bool,
    /// Who would move nodes.
    pub(crate) controller: ControllerReport,
    pub(crate) pools: Vec<PoolReport>,
}

/// The controller that leads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ControllerReport {
    /// Somebody leads.
    pub(crate) running: bool,
    /// Who leads, or led last.
    pub(crate) holder: Option<String>,
    /// `namespace/name` of the Lease.
    pub(crate) lease: String,
    /// When it was last renewed, if nobody leads.
    pub(crate) last_renewed: Option<Timestamp>,
}

/// What a pool is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Phase {
    /// Every node is done.
    Done,
    /// Nodes are moving or waiting.
    Running,
    /// Every node is done or failed, or nothing moves any more without a person.
    Failed,
    /// Somebody said stop.
    Paused,
    /// Something must be mended first.
    Frozen,
}

/// One pool.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PoolReport {
    pub(crate) name: String,
    /// The object that states the policy, as `kind/name`.
    pub(crate) policy: String,
    pub(crate) driver: String,
    pub(crate) phase: Phase,
    /// What stands in the way of the whole pool.
    pub(crate) message: Option<String>,
    pub(crate) versions: Versions,
    pub(crate) rollout: Option<RolloutReport>,
    /// How far each stage is; none if the pool goes as one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) stages: Vec<StageStatus>,
    /// What the version matrix says, if the policy names one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) matrix: Option<MatrixStatus>,
    pub(crate) counts: Counts,
    pub(crate) limits: Limits,
    /// Nodes that somebody else took out.
    pub(crate) foreign: Vec<Foreign>,
    pub(crate) nodes: Vec<NodeReport>,
}

/// Driver versions, where images tell them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Versions {
    /// What nodes run that still have to move.
    pub(crate) from: Vec<String>,
    pub(crate) to: Option<String>,
    /// Driver pods have to be replaced although their version stays.
    pub(crate) new_configuration: bool,
}

/// The rollout under way, or the last one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct RolloutReport {
    pub(crate) name: String,
    pub(crate) started_at: Option<Timestamp>,
    pub(crate) finished_at: Option<Timestamp>,
    pub(crate) aborted: bool,
    /// The rollout whose version this one takes back.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) rollback_of: Option<String>,
    /// Its own version is taken back: by whom, why, and what a person has to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) rollback: Option<String>,
}

/// How many nodes are where. Each node counts once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Counts {
    pub(crate) total: usize,
    pub(crate) done: usize,
    pub(crate) moving: usize,
    pub(crate) waiting: usize,
    pub(crate) paused: usize,
    pub(crate) blocked: usize,
    pub(crate) failed: usize,
}

/// The limits and how much of them is used.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Limits {
    pub(crate) out: usize,
    /// `maxUnavailable` in nodes.
    pub(crate) max_out: usize,
    /// As it is written.
    pub(crate) max_unavailable: Option<String>,
    pub(crate) moving: usize,
    /// `null` sets no limit.
    pub(crate) max_parallel_upgrades: Option<u32>,
    /// The limit that keeps nodes waiting, if one does.
    pub(crate) binding: Option<&'static str>,
}

/// A node that somebody else took out. It counts against `maxUnavailable`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Foreign {
    pub(crate) node: String,
    pub(crate) cordoned: bool,
    pub(crate) ready: bool,
    /// Its own driver manager has cordoned it.
    pub(crate) by_driver_manager: bool,
}

/// One node.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct NodeReport {
    pub(crate) node: String,
    pub(crate) state: State,
    #[serde(serialize_with = "kind_name")]
    pub(crate) kind: Kind,
    /// The short name of the reason, the same as in metrics.
    pub(crate) reason: &'static str,
    pub(crate) message: String,
    pub(crate) since: Option<Timestamp>,
    pub(crate) until: Option<Timestamp>,
    /// The version of its driver pod.
    pub(crate) driver_version: Option<String>,
    /// Its driver pod, as `namespace/name`, if that is of an earlier revision and nobody has told it to go.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) outdated_pod: Option<String>,
    /// Its place in the line for a slot, from 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ahead: Option<usize>,
}

/// The name of a kind, for programs.
pub(crate) fn kind_text(kind: Kind) -> &'static str {
    match kind {
        Kind::Done => "done",
        Kind::Moving => "moving",
        Kind::Waiting => "waiting",
        Kind::Paused => "paused",
        Kind::Blocked => "blocked",
        Kind::Failed => "failed",
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it with a reference")]
pub(crate) fn kind_name<S: serde::Serializer>(kind: &Kind, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(kind_text(*kind))
}

impl Report {
    pub(crate) fn of(reading: &Reading<'_>) -> Self {
        let pools: Vec<PoolReport> =
            reading.each().map(|(pool, plan)| PoolReport::of(reading.snapshot, pool, plan)).collect();
        Self {
            at: reading.snapshot.now,
            done: !pools.is_empty() && pools.iter().all(|pool| pool.phase == Phase::Done),
            controller: ControllerReport::of(reading.leader, reading.snapshot.now),
            pools,
        }
    }
}

impl ControllerReport {
    pub(crate) fn of(leader: &Leader, now: Timestamp) -> Self {
        let running = leader.leads(now);
        Self {
            running,
            holder: leader.holder.clone(),
            lease: leader.lease.to_string(),
            last_renewed: leader.renewed.filter(|_| !running),
        }
    }
}

/// How a node feels, for people: in a pool that stands still as a whole, a node that is done is done all the same.
pub(crate) fn feels(verdict: &Verdict) -> Kind {
    let at_rest = verdict.state == State::UpgradeDone && verdict.in_sync;
    match &verdict.reason {
        Reason::Paused | Reason::PoolFrozen { .. } if at_rest => Kind::Done,
        // The walk has not begun: it is the controller's turn.
        Reason::Moving { .. } if !verdict.state.in_flight() => Kind::Waiting,
        reason => reason.kind(),
    }
}

impl PoolReport {
    fn of(snapshot: &Snapshot, pool: &Pool, plan: &PoolPlan) -> Self {
        let nodes: Vec<NodeReport> =
            plan.nodes.iter().map(|(name, verdict)| NodeReport::of(snapshot, pool, name, verdict)).collect();
        let counts = Counts::of(&nodes);
        let waits_for_operator = unrendered(snapshot, pool, plan);
        let (phase, message) = match (&plan.status, waits_for_operator) {
            (PoolStatus::Frozen(why), _) => (Phase::Frozen, Some(why.clone())),
            (_, None) if counts.done == counts.total => (Phase::Done, None),
            (PoolStatus::Paused, message) => (Phase::Paused, message),
            (PoolStatus::Active, message) => (counts.phase(), message),
        };
        Self {
            name: plan.name.to_string(),
            policy: plan.source.to_string(),
            driver: plan.driver.to_string(),
            phase,
            message,
            versions: versions(plan, &nodes),
            rollout: rollout(snapshot, pool, plan),
            stages: plan.stages.clone(),
            matrix: plan.matrix.clone(),
            counts,
            limits: limits(plan, counts),
            foreign: plan.ledger.foreign.iter().map(|node| foreign(snapshot, node)).collect(),
            nodes,
        }
    }
}

impl Counts {
    fn of(nodes: &[NodeReport]) -> Self {
        let mut counts = Self { total: nodes.len(), ..Self::default() };
        for node in nodes {
            *match node.kind {
                Kind::Done => &mut counts.done,
                Kind::Moving => &mut counts.moving,
                Kind::Waiting => &mut counts.waiting,
                Kind::Paused => &mut counts.paused,
                Kind::Blocked => &mut counts.blocked,
                Kind::Failed => &mut counts.failed,
            } += 1;
        }
        counts
    }

    fn phase(self) -> Phase {
        let still_to_come = self.moving + self.waiting + self.blocked;
        if self.failed > 0 && still_to_come == 0 { Phase::Failed } else { Phase::Running }
    }
}

impl NodeReport {
    pub(crate) fn of(snapshot: &Snapshot, pool: &Pool, name: &NodeName, verdict: &Verdict) -> Self {
        let pod = pool.policy.as_ref().ok().and_then(|policy| driver_pod(snapshot, policy, name));
        Self {
            node: name.to_string(),
            state: verdict.state,
            kind: feels(verdict),
            reason: verdict.reason.code(),
            message: verdict.reason.to_string(),
            since: verdict.since,
            until: verdict.reason.until(),
            driver_version: pod.and_then(|pod| DriverVersion::from_image(&pod.image)).map(|v| v.to_string()),
            outdated_pod: pod
                .filter(|pod| !verdict.in_sync && pod.deleting.is_none())
                .map(|pod| pod.name.to_string()),
            ahead: verdict.reason.ahead(),
        }
    }
}

/// Right after a version was changed in a ClusterPolicy, its operator has not taken it up yet and every node looks done.
fn unrendered(snapshot: &Snapshot, pool: &Pool, plan: &PoolPlan) -> Option<String> {
    let policy = pool.policy.as_ref().ok()?;
    let mut sets = snapshot.daemon_sets.values();
    let set = sets.find(|ds| policy.is_driver(&ds.name.namespace, &ds.labels) && ds.rendered_by.is_some())?;
    let source = set.rendered_by.as_ref()?;
    let Source::ClusterPolicy(name) = source else { return None };
    let wanted = snapshot.sources.cluster_policies.get(name)?.driver.get("version")?.as_str()?;
    let (wanted, current): (DriverVersion, _) = (wanted.parse().ok()?, plan.version.as_ref()?);
    let set = &set.name;
    (wanted != *current).then(|| {
        format!("{source} asks for {wanted}, but its operator has not put that into daemonset/{set} ({current}) yet")
    })
}

fn versions(plan: &PoolPlan, nodes: &[NodeReport]) -> Versions {
    let to = plan.version.as_ref().map(ToString::to_string);
    let outdated = || nodes.iter().zip(plan.nodes.values()).filter(|(_, verdict)| !verdict.in_sync);
    let running: BTreeSet<&String> =
        outdated().filter_map(|(node, _)| node.driver_version.as_ref()).collect();
    let from: Vec<String> =
        running.iter().filter(|from| Some(**from) != to.as_ref()).copied().cloned().collect();
    let new_configuration = from.is_empty() && running.iter().any(|version| Some(*version) == to.as_ref());
    Versions { from, to, new_configuration }
}

/// The newest rollout, if it is about the present target.
fn rollout(snapshot: &Snapshot, pool: &Pool, plan: &PoolPlan) -> Option<RolloutReport> {
    let (name, rollout) = newest_rollout(snapshot, pool)?;
    let target = plan.target.iter().map(|(set, hash)| (set.as_str(), hash.as_str()));
    let current = rollout.spec.target.iter().map(|(set, hash)| (set.as_str(), hash.as_str())).eq(target);
    let status = rollout.status.clone().unwrap_or_default();
    current.then(|| RolloutReport {
        name,
        started_at: status.started_at.map(|time| time.0),
        finished_at: status.finished_at.map(|time| time.0),
        aborted: rollout.spec.abort,
        rollback_of: rollout.spec.rollback_of.clone(),
        rollback: status.rollback.map(|back| back.says()),
    })
}

fn limits(plan: &PoolPlan, counts: Counts) -> Limits {
    let ledger = &plan.ledger;
    let binding = match ledger.binding() {
        // A stage's own limit is said in the reason of whoever waits for it.
        Limit::MaxParallelUpgrades(_) | Limit::Stage { .. } => "maxParallelUpgrades",
        Limit::MaxUnavailable { .. } => "maxUnavailable",
    };
    let queue = plan.nodes.values().any(|verdict| matches!(verdict.reason, Reason::NoSlot { .. }));
    Limits {
        out: ledger.out,
        max_out: ledger.max_out,
        max_unavailable: ledger.max_unavailable.map(|amount| amount.to_string()),
        moving: ledger.moving,
        max_parallel_upgrades: ledger.max_parallel,
        binding: (queue && counts.waiting > 0).then_some(binding),
    }
}

fn foreign(snapshot: &Snapshot, out: &reason::Foreign) -> Foreign {
    let reason::Foreign { node, by_driver_manager } = out;
    let facts = snapshot.nodes.get(node);
    Foreign {
        node: node.to_string(),
        cordoned: facts.is_some_and(|node| node.unschedulable),
        ready: facts.is_some_and(|node| node.ready),
        by_driver_manager: *by_driver_manager,
    }
}
