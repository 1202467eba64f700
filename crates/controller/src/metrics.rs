//! What Prometheus sees: NVIDIA's documented gauges and pitcrew's own. Names are in `core::contract::metric`.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use pitcrew_core::contract::{State, metric};
use pitcrew_core::health::Owner;
use pitcrew_core::names::DriverName;
use pitcrew_core::plan::{Plan, PoolStatus};
use pitcrew_core::snapshot::Snapshot;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ByOwner {
    owner: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ByState {
    driver: String,
    state: String,
}
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ByReason {
    driver: String,
    reason: &'static str,
}
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Request {
    verb: &'static str,
    resource: &'static str,
    result: &'static str,
}
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ByResult {
    result: &'static str,
}
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ByPool {
    pool: String,
}

/// All metrics. Clones share them.
#[derive(Clone)]
pub struct Metrics {
    registry: Arc<Mutex<Registry>>,
    enabled: Gauge,
    in_progress: Gauge,
    done: Gauge,
    failed: Gauge,
    available: Gauge,
    pending: Gauge,
    nodes: Family<ByState, Gauge>,
    reasons: Family<ByReason, Gauge>,
    frozen: Family<ByPool, Gauge>,
    visits: Histogram,
    states: Family<ByState, Histogram>,
    evictions: Family<ByResult, Counter>,
    requests: Family<Request, Counter>,
    plan_seconds: Histogram,
    violations: Counter,
    explain_unknown: Gauge<f64, AtomicU64>,
    leader: Gauge,
    holds: Family<ByOwner, Gauge>,
    oldest_hold: Family<ByOwner, Gauge>,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// Registers everything.
    pub fn new() -> Self {
        let minutes = || Histogram::new(exponential_buckets(1.0, 2.0, 16));
        let mut registry = Registry::default();
        let metrics = Self {
            registry: Arc::default(),
            enabled: Gauge::default(),
            in_progress: Gauge::default(),
            done: Gauge::default(),
            failed: Gauge::default(),
            available: Gauge::default(),
            pending: Gauge::default(),
            nodes: Family::default(),
            reasons: Family::default(),
            frozen: Family::default(),
            visits: minutes(),
            states: Family::new_with_constructor(|| Histogram::new(exponential_buckets(1.0, 2.0, 16))),
            evictions: Family::default(),
            requests: Family::default(),
            plan_seconds: Histogram::new(exponential_buckets(0.000_1, 4.0, 8)),
            violations: Counter::default(),
            explain_unknown: Gauge::default(),
            leader: Gauge::default(),
            holds: Family::default(),
            oldest_hold: Family::default(),
        };
        let m = &metrics;
        let r = &mut registry;
        r.register(
            metric::AUTO_UPGRADE_ENABLED,
            "1 if driver auto upgrade is enabled; 0 if not",
            m.enabled.clone(),
        );
        r.register(
            metric::DRIVER_AUTO_UPGRADE_ENABLED,
            "The same under the operator's spelling",
            m.enabled.clone(),
        );
        r.register(
            metric::IN_PROGRESS,
            "Nodes on which a driver pod is being upgraded",
            m.in_progress.clone(),
        );
        r.register(metric::DONE, "Nodes whose driver pod is up to date", m.done.clone());
        r.register(metric::FAILED, "Nodes whose driver upgrade failed", m.failed.clone());
        r.register(metric::AVAILABLE, "Nodes on which an upgrade can start now", m.available.clone());
        r.register(metric::PENDING, "Nodes whose upgrade is pending", m.pending.clone());
        r.register(metric::NODES, "Nodes by driver and state", m.nodes.clone());
        r.register(metric::NODES_BY_REASON, "Nodes by driver and reason", m.reasons.clone());
        r.register(metric::POOL_FROZEN, "1 if the pool is frozen", m.frozen.clone());
        r.register(metric::VISIT_SECONDS, "Seconds from cordon to release", m.visits.clone());
        r.register(metric::STATE_SECONDS, "Seconds that nodes spent in a state", m.states.clone());
        r.register(metric::EVICTIONS, "Evictions by result", m.evictions.clone());
        r.register(metric::API_REQUESTS, "Requests to the Kubernetes API", m.requests.clone());
        r.register(metric::PLAN_SECONDS, "Seconds of one planning pass", m.plan_seconds.clone());
        r.register(
            metric::VIOLATIONS,
            "Actions dropped because they would break a promise",
            m.violations.clone(),
        );
        r.register(metric::EXPLAIN_UNKNOWN, "Nodes without a reason", m.explain_unknown.clone());
        r.register(metric::HEALTH_HOLDS, "Nodes that are kept from NVSentinel", m.holds.clone());
        r.register(metric::HEALTH_HOLD_OLDEST, "Since when the oldest of them is", m.oldest_hold.clone());
        r.register(metric::LEADER, "1 on the replica that leads", m.leader.clone());
        Self { registry: Arc::new(Mutex::new(registry)), ..metrics }
    }

    /// The text that Prometheus scrapes.
    pub fn text(&self) -> String {
        let mut out = String::new();
        let registry = self.registry.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        // Writing into a String cannot fail.
        let _ = text::encode(&mut out, &registry);
        out
    }

    pub(crate) fn request(&self, verb: &'static str, resource: &'static str, result: &'static str) {
        self.requests.get_or_create(&Request { verb, resource, result }).inc();
    }

    pub(crate) fn eviction(&self, result: &'static str) {
        self.evictions.get_or_create(&ByResult { result }).inc();
    }

    /// How many actions were dropped because they would have broken a promise.
    pub fn violations(&self) -> u64 {
        self.violations.get()
    }

    pub(crate) fn violation(&self) {
        self.violations.inc();
    }

    pub(crate) fn leads(&self, leads: bool) {
        self.leader.set(leads.into());
    }

    pub(crate) fn planned_in(&self, seconds: f64) {
        self.plan_seconds.observe(seconds);
    }

    pub(crate) fn left_state(&self, driver: &str, state: State, seconds: f64) {
        self.states
            .get_or_create(&ByState { driver: driver.to_owned(), state: state.to_string() })
            .observe(seconds);
    }

    pub(crate) fn visited(&self, seconds: f64) {
        self.visits.observe(seconds);
    }

    /// Who keeps NVSentinel off how many nodes, and since when.
    pub(crate) fn health(&self, snapshot: &Snapshot) {
        let mut holds: BTreeMap<&'static str, (i64, i64)> = BTreeMap::new();
        for hold in snapshot.nodes.values().filter_map(|node| node.health_hold.as_ref()) {
            let owner = if hold.owner == Owner::Visit { "visit" } else { "person" };
            let (count, oldest) = holds.entry(owner).or_insert((0, i64::MAX));
            (*count, *oldest) = (*count + 1, hold.since.as_second().min(*oldest));
        }
        self.holds.clear();
        self.oldest_hold.clear();
        for (owner, (count, oldest)) in holds {
            self.holds.get_or_create(&ByOwner { owner }).set(count);
            self.oldest_hold.get_or_create(&ByOwner { owner }).set(oldest);
        }
    }

    /// What the plan says of the fleet.
    pub(crate) fn fleet(&self, plan: &Plan) {
        self.nodes.clear();
        self.reasons.clear();
        self.frozen.clear();
        let (mut in_progress, mut done, mut failed, mut available, mut pending) = (0, 0, 0, 0, 0);
        // Counted here first: a label set a node would cost more than the plan itself.
        let mut states: BTreeMap<(&DriverName, State), i64> = BTreeMap::new();
        let mut reasons: BTreeMap<(&DriverName, &'static str), i64> = BTreeMap::new();
        for pool in &plan.pools {
            let frozen = matches!(pool.status, PoolStatus::Frozen(_));
            self.frozen.get_or_create(&ByPool { pool: pool.name.to_string() }).set(frozen.into());
            if pool.status == PoolStatus::Active {
                available += pool.ledger.free();
            }
            for verdict in pool.nodes.values() {
                *states.entry((&pool.driver, verdict.state)).or_default() += 1;
                *reasons.entry((&pool.driver, verdict.reason.code())).or_default() += 1;
            }
        }
        for ((driver, state), count) in states {
            match state {
                State::UpgradeDone => done += count,
                State::UpgradeFailed => failed += count,
                State::UpgradeRequired => pending += count,
                state if state.in_flight() => in_progress += count,
                _ => {}
            }
            let labels = ByState { driver: driver.to_string(), state: state.to_string() };
            self.nodes.get_or_create(&labels).set(count);
        }
        for ((driver, reason), count) in reasons {
            self.reasons.get_or_create(&ByReason { driver: driver.to_string(), reason }).set(count);
        }
        let enabled = plan.pools.iter().any(|pool| pool.status == PoolStatus::Active);
        self.enabled.set(enabled.into());
        self.in_progress.set(in_progress);
        self.done.set(done);
        self.failed.set(failed);
        self.available.set(i64::try_from(available).unwrap_or(i64::MAX));
        self.pending.set(pending);
    }
}
