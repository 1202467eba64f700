//! Faults of the way between the controllers and the API, drawn request by request.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fastrand::Rng;
use http::StatusCode;
use pitcrew_core::contract::State;
use tokio::time::Instant;

use super::case::{Case, draw};
use super::controllers::{Member, is_ours};
use super::fault::Fault;
use super::record::Record;
use super::trouble::put_on;
use crate::api::{ApiServer, Fault as ApiFault, RequestInfo};

/// Longer than any run.
const NEVER: Duration = Duration::from_hours(100);
/// Long enough that a pod is on its node before a look at the node is answered.
const INTRUDER_FIRST: Duration = Duration::from_millis(50);
/// Longer than a controller waits for an answer.
const TOO_LATE: Duration = Duration::from_secs(6);
/// What can be kept from a controller; pods twice, since most depends on them. The last ones matter only where a version
/// reaches the fleet in a manner of its own.
const STALLED: [&str; 11] = [
    "nodes",
    "pods",
    "pods",
    "daemonsets.apps",
    "controllerrevisions.apps",
    "poddisruptionbudgets.policy",
    "driverpolicies.pitcrew.dev",
    "rollouts.pitcrew.dev",
    "jobs.batch",
    "configmaps",
    "clusterpolicies.nvidia.com",
];
/// So many of them always matter.
const STALLED_EVER: usize = 7;

/// Faults of single requests, each with its chance, and those that last.
struct Sky {
    rng: Rng,
    chances: Vec<(Fault, f64)>,
    lasting: BTreeSet<Fault>,
    /// Who wrote the Lease last.
    leader: String,
    crash: Option<Crash>,
    intruders: Option<Intruders>,
}

/// Pods that come when nobody expects them, once to a node at most.
struct Intruders {
    rng: Rng,
    been: BTreeSet<String>,
}

/// A controller dies at one of its next requests.
pub(super) struct Crash {
    pub(super) member: Arc<Member>,
    /// Whatever it asks; otherwise when it acts.
    pub(super) at_any: bool,
    /// So many go well before.
    pub(super) before: u32,
    /// The server carries out the one at which it dies.
    pub(super) made: bool,
    pub(super) away: Duration,
}

/// A handle to it.
#[derive(Clone)]
pub(super) struct Weather {
    api: ApiServer,
    sky: Arc<Mutex<Sky>>,
    record: Record,
    stalled: &'static [&'static str],
}

impl Weather {
    /// Fine until [`Weather::blow`].
    pub(super) fn new(case: &Case, api: ApiServer, record: Record) -> Self {
        let mut rng = draw(case.seed, "weather");
        let mut chances = Vec::new();
        for fault in [
            Fault::Conflict,
            Fault::Throttle,
            Fault::ServerError,
            Fault::LostReply,
            Fault::LateReply,
            Fault::SlowCall,
        ] {
            let chance = 0.01 + rng.f64() * 0.09;
            if case.has(fault) {
                chances.push((fault, chance));
            }
        }
        let intruders = Intruders { rng: draw(case.seed, "intruder"), been: BTreeSet::new() };
        let intruders = case.has(Fault::Intruder).then_some(intruders);
        let (lasting, leader, crash) = (BTreeSet::new(), String::new(), None);
        let sky = Sky { rng, chances, lasting, leader, crash, intruders };
        let stalled = if case.manner.is_some() { &STALLED[..] } else { &STALLED[..STALLED_EVER] };
        Self { api, sky: Arc::new(Mutex::new(sky)), record, stalled }
    }

    fn sky(&self) -> MutexGuard<'_, Sky> {
        self.sky.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Requests go wrong from now on.
    pub(super) fn blow(&self) {
        let weather = self.clone();
        self.api.on_request_as("weather", move |request| weather.strike(request));
    }

    /// All is well again.
    pub(super) fn mend(&self) {
        self.api.on_request_as("weather", |_| None);
        self.api.lines().mend();
        let mut sky = self.sky();
        (sky.lasting, sky.crash, sky.intruders) = (BTreeSet::new(), None, None);
    }

    pub(super) fn begin(&self, fault: Fault) {
        self.sky().lasting.insert(fault);
    }

    pub(super) fn end(&self, fault: Fault) {
        self.sky().lasting.remove(&fault);
    }

    pub(super) fn cut(&self, user: &str) {
        self.api.lines().cut(user);
    }

    pub(super) fn compact(&self, user: &str) {
        self.api.lines().forget(user);
    }

    pub(super) fn stall(&self, user: &str, which: u32, until: Instant) {
        self.api.lines().stall(user, self.stalled[which as usize % self.stalled.len()], until);
    }

    pub(super) fn double(&self, user: &str, doubles: bool) {
        self.api.lines().double(user, doubles);
    }

    /// The controller dies at one of its next requests.
    pub(super) fn crash_at(&self, crash: Crash) {
        self.sky().crash = Some(crash);
    }

    fn strike(&self, request: &RequestInfo) -> Option<ApiFault> {
        let node = (request.resource == "nodes").then_some(request.name.as_str());
        let state = node.and_then(|node| Some(self.record.book().node(node)?.state()));
        let (fault, effect) = match node.filter(|node| self.sky().intrudes(request, node, state)) {
            Some(node) => (Fault::Intruder, self.intrude(node.to_owned())),
            None => self.sky().strike(request, state)?,
        };
        match node.map(str::to_owned).or_else(|| self.node_of_pod(request)) {
            Some(node) => self.record.hit(fault, Some(&node)),
            None => self.record.count(fault),
        }
        Some(effect)
    }

    fn node_of_pod(&self, request: &RequestInfo) -> Option<String> {
        let of_pods = request.resource.split('/').next() == Some("pods");
        let key = (request.namespace.clone(), request.name.clone());
        self.record.book().pod(&key).filter(|_| of_pods).map(|pod| pod.node.clone())
    }

    /// A pod is on the node before the last look at it is answered.
    fn intrude(&self, node: String) -> ApiFault {
        let client = self.api.client_as("admin");
        tokio::spawn(async move { put_on(client, &node, &node).await });
        ApiFault::Delay(INTRUDER_FIRST)
    }
}

impl Sky {
    /// Whether a pod comes now: before a driver restarts, its node is looked at once more, and then its pods.
    fn intrudes(&mut self, request: &RequestInfo, node: &str, state: Option<State>) -> bool {
        let looks = is_ours(&request.user) && request.verb == "get";
        let Some(intruders) = self.intruders.as_mut().filter(|_| looks) else { return false };
        state == Some(State::PodRestartRequired)
            && intruders.rng.bool()
            && intruders.been.insert(node.to_owned())
    }

    /// What happens to a request, if anything; `state` is where its node stands.
    fn strike(&mut self, request: &RequestInfo, state: Option<State>) -> Option<(Fault, ApiFault)> {
        let quota = self.lasting.contains(&Fault::Quota);
        if quota && request.user == "daemon-set-controller" && request.resource == "pods" {
            let words = "exceeded quota: gpu-operator, requested: pods=1, used: pods=100, limited: pods=100";
            return (request.verb == "create").then_some((Fault::Quota, ApiFault::Denied(words)));
        }
        if !is_ours(&request.user) {
            return None;
        }
        let write = !matches!(request.verb, "get" | "list" | "watch");
        if request.resource == "leases" && write {
            if self.lasting.contains(&Fault::Overlap) && self.leader == request.user {
                return Some((Fault::Overlap, ApiFault::Status(StatusCode::INTERNAL_SERVER_ERROR)));
            }
            self.leader.clone_from(&request.user);
        }
        if request.resource == "nodes" && request.verb == "patch" {
            let words = "admission webhook \"nodes.example.com\" denied the request: nodes are frozen";
            let returns = state == Some(State::UncordonRequired);
            let denied = |fault: &Fault| *fault == Fault::Webhook || (*fault == Fault::NoReturn && returns);
            if let Some(fault) = self.lasting.iter().copied().find(denied) {
                return Some((fault, ApiFault::Denied(words)));
            }
        }
        if let Some(effect) = self.crash(request, write && request.resource != "leases") {
            return Some((Fault::Crash, effect));
        }
        let drawn = self.chances.iter().find(|(fault, chance)| {
            let fits = match fault {
                Fault::Conflict | Fault::LostReply | Fault::LateReply => write,
                Fault::SlowCall => request.verb != "watch",
                _ => true,
            };
            fits && self.rng.f64() < *chance
        });
        let (fault, _) = *drawn?;
        let effect = match fault {
            Fault::Conflict => ApiFault::Status(StatusCode::CONFLICT),
            Fault::Throttle => ApiFault::Status(StatusCode::TOO_MANY_REQUESTS),
            Fault::ServerError => ApiFault::Status(StatusCode::INTERNAL_SERVER_ERROR),
            Fault::LostReply => ApiFault::LostReply,
            Fault::LateReply => ApiFault::LateReply(TOO_LATE),
            _ => ApiFault::Delay(Duration::from_millis(self.rng.u64(10..4500))),
        };
        Some((fault, effect))
    }

    fn crash(&mut self, request: &RequestInfo, acts: bool) -> Option<ApiFault> {
        let crash = self.crash.as_mut().filter(|crash| crash.member.user == request.user)?;
        if !acts && !crash.at_any {
            return None;
        }
        if crash.before > 0 {
            crash.before -= 1;
            return None;
        }
        let crash = self.crash.take()?;
        let (member, away) = (crash.member, crash.away);
        tokio::spawn(async move { member.crash(away).await });
        Some(if crash.made { ApiFault::LostReply } else { ApiFault::Delay(NEVER) })
    }
}
