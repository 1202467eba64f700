//! The upgrade itself: an embedded cluster and the real controller on virtual time, on a thread of their own.
//!
//! The thread's tokio clock is paused: an idle runtime jumps to its next timer. A pace task makes it wait for real
//! time in small steps; without one the run is as fast as the machine. Updates go out through a channel, and a view
//! is built only when somebody asked for one, so that watching costs next to nothing.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::mpsc::{Receiver, RecvError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::ListParams;
use pitcrew_controller::{Clock, Pass};
use pitcrew_core::contract::State;
use pitcrew_core::plan::Plan;
use pitcrew_core::policy::Amount;
use pitcrew_core::snapshot::Snapshot;
use pitcrew_core::version::DriverVersion;
use pitcrew_sim::actors::{Behaviour, DRIVER_COMPONENT, NAMESPACE, Timing};
use pitcrew_sim::cluster::Cluster;
use pitcrew_sim::fleet::Fleet;
use serde_json::json;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use super::record::{Decision, Record, Tally, Transition, Visits};
use super::scenario::{Inside, Scenario};
use super::summary::{Figures, VisitSeconds, tenths};
use super::view::View;
use super::witness::Witness;
use crate::stopwatch::Stopwatch;

/// The version that runs to begin with.
pub(super) const FROM: &str = "560.35.03";
/// The version that a user asks for.
pub(super) const TO: &str = "565.57.01";
/// `maxUnavailable` of the policy, in percent.
const UNAVAILABLE_PERCENT: u32 = 25;
/// A visit takes about so long with `Timing::real`; measured.
const VISIT: Duration = Duration::from_mins(3);
/// As long as somebody likes to watch.
const USUAL_REAL_SECONDS: f64 = 30.0;
/// While nothing moves, two days take six seconds.
const QUIET_SPEED: f64 = 28_800.0;
/// The steps in which virtual time follows real time: four to a frame.
const STEP: Duration = Duration::from_millis(25);
/// Up to here a view of every pass costs nothing that shows, and the last pass before a quiet time is shown for sure.
/// In bigger fleets the next pass is never far.
const EVERY_PASS_NODES_MAX: usize = 200;
/// The last watch events and status writes arrive within this (virtual) time.
const SETTLE: Duration = Duration::from_secs(5);
/// Virtual time beyond the tenfold of what is expected: something hangs.
const PATIENCE: Duration = Duration::from_hours(1);

/// What is played.
#[derive(Clone, Debug)]
pub(super) struct Story {
    pub(super) nodes: usize,
    pub(super) seed: u64,
    pub(super) max_parallel: u32,
    /// Virtual seconds per real second; `None`: as fast as the machine.
    pub(super) speed: Option<f64>,
    pub(super) scenario: Scenario,
}

impl Story {
    /// How many nodes may be out at once, by both limits of the policy.
    fn at_most(&self) -> usize {
        let parallel = if self.max_parallel == 0 { usize::MAX } else { self.max_parallel as usize };
        parallel.min(Amount::Percent(UNAVAILABLE_PERCENT).of(self.nodes)).max(1)
    }

    /// About how long it takes in virtual time, and for how long of that nothing moves.
    fn expected(&self) -> (Duration, Duration) {
        let waves = u32::try_from(self.nodes.div_ceil(self.at_most())).unwrap_or(u32::MAX);
        self.scenario.takes(VISIT.saturating_mul(waves), VISIT)
    }

    /// The speed at which the whole takes about half a minute.
    pub(super) fn usual_speed(&self) -> f64 {
        (self.expected().0.as_secs_f64() / USUAL_REAL_SECONDS).max(1.0)
    }

    fn fleet(&self) -> Fleet {
        let mut fleet = Fleet::new(self.nodes).with_driver(FROM);
        fleet.upgrade_policy["autoUpgrade"] = json!(true);
        fleet.upgrade_policy["maxParallelUpgrades"] = json!(self.max_parallel);
        fleet.upgrade_policy["maxUnavailable"] = json!(format!("{UNAVAILABLE_PERCENT}%"));
        self.scenario.stage(fleet)
    }
}

/// What happens, in order.
pub(super) enum Update {
    /// The cluster runs on the old version and a user asks for the new one.
    Begins,
    /// A node went on.
    Moved(Transition),
    /// Something was decided about the rollout.
    Decided(Decision),
    /// How things stand: after somebody asked, and at the end.
    View(Box<View>),
    /// It is over.
    Ended(anyhow::Result<Box<Figures>>),
}

/// How a demo ended.
pub(super) enum Ending {
    /// It was played to its end.
    Played(Box<Figures>),
    /// Somebody left.
    LeftByUser,
}

/// A running demo, for whoever shows it.
pub(super) struct Show {
    /// What happens.
    pub(super) updates: Receiver<Update>,
    wanted: Arc<AtomicBool>,
    now: Arc<AtomicI64>,
}

impl Show {
    /// Asks for a view of the next pass.
    pub(super) fn ask(&self) {
        self.wanted.store(true, Ordering::Relaxed);
    }

    /// The virtual time.
    pub(super) fn now(&self) -> Timestamp {
        Timestamp::from_millisecond(self.now.load(Ordering::Relaxed)).unwrap_or_default()
    }

    /// Waits for the end without looking.
    pub(super) fn wait(&self) -> anyhow::Result<Ending> {
        loop {
            if let Update::Ended(result) = self.updates.recv().map_err(|RecvError| broke_off())? {
                return result.map(Ending::Played);
            }
        }
    }
}

/// The thread is gone without a last word.
pub(super) fn broke_off() -> anyhow::Error {
    anyhow!("the simulated cluster broke off; please report this with the seed")
}

/// Starts it.
pub(super) fn start(story: Story) -> anyhow::Result<Show> {
    let (updates, receiver) = channel();
    let (wanted, now) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicI64::new(0)));
    let stage = Stage { story, updates, wanted: wanted.clone(), now: now.clone() };
    std::thread::Builder::new()
        .name("sim".to_owned())
        .spawn(move || stage.play())
        .context("cannot start a thread")?;
    Ok(Show { updates: receiver, wanted, now })
}

/// The thread's side.
struct Stage {
    story: Story,
    updates: Sender<Update>,
    wanted: Arc<AtomicBool>,
    now: Arc<AtomicI64>,
}

impl Stage {
    fn play(&self) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        let result =
            runtime.context("cannot start the simulated cluster").and_then(|r| r.block_on(self.upgrade()));
        // If nobody listens any more, nobody needs to know.
        let _ = self.updates.send(Update::Ended(result.map(Box::new)));
    }

    async fn upgrade(&self) -> anyhow::Result<Figures> {
        let scenario = self.story.scenario;
        let behaviour = scenario.behaviour(Behaviour::default().with_timing(Timing::real()));
        let cluster = Cluster::embedded(&self.story.fleet(), self.story.seed, behaviour).await?;
        scenario.set_up(&cluster).await?;
        let Some(api) = &cluster.api else { bail!("the cluster is not embedded") };
        let mut witness = Witness::start(api, &cluster.admin);
        let record = Arc::new(Mutex::new(Record::begin(FROM.parse()?, cluster.clock.now())));
        let (tally, mut progress) = watch::channel(Tally::default());
        let controller = cluster.new_controller("demo").on_pass(self.on_pass(record.clone(), tally.clone()));
        let mut controller = tokio::spawn(controller.run(std::future::pending()));

        timeout(PATIENCE, progress.wait_for(|tally| tally.is_over()))
            .await
            .context("the fleet did not come up on its first driver")??;
        let began = cluster.clock.now();
        witness.begin();
        *lock(&record) = Record::begin(TO.parse()?, began).ending_on(scenario.ends_on().parse()?);
        tally.send_replace(Tally::default());
        let _ = self.updates.send(Update::Begins);
        cluster.set_driver_version(TO).await.context("cannot change the driver version")?;
        let pace = self
            .story
            .speed
            .map(|speed| tokio::spawn(pace(speed, cluster.clock.clone(), self.now.clone(), record.clone())));
        let updates = self.updates.clone();
        let say = move |after: Duration, what: String| {
            let at = i64::try_from(after.as_secs()).unwrap_or(i64::MAX);
            let _ = updates.send(Update::Decided(Decision { at, what }));
        };
        let inside = Inside::of(&cluster, &self.story.fleet());
        let people = tokio::spawn(scenario.meanwhile(inside, say));
        let (moves, stands_still) = self.story.expected();
        let patience = PATIENCE + 10 * moves + 2 * stands_still;
        let over = tokio::select! {
            over = timeout(patience, progress.wait_for(|tally| tally.is_over())) => over.is_ok(),
            ended = &mut controller => { ended??; bail!("the controller ended by itself") }
        };
        let virtual_seconds = cluster.clock.now().duration_since(began).as_secs_f64();
        people.abort();
        if let Some(pace) = pace {
            pace.abort();
        }
        sleep(SETTLE).await;
        let figures = self.figures(&cluster, &witness, &record).await?;
        Ok(Figures { virtual_seconds: tenths(virtual_seconds), gave_up: !over, ..figures })
    }

    /// Called by the controller after each pass.
    fn on_pass(&self, record: Arc<Mutex<Record>>, tally: watch::Sender<Tally>) -> Pass {
        let (updates, wanted, now) = (self.updates.clone(), self.wanted.clone(), self.now.clone());
        let watched = self.story.speed.is_some() && self.story.nodes <= EVERY_PASS_NODES_MAX;
        Box::new(move |snapshot: &Snapshot, plan: &Plan| {
            let mut record = lock(&record);
            record.see(snapshot, plan, |transition| {
                let _ = updates.send(Update::Moved(transition.clone()));
            });
            for decision in record.news(snapshot) {
                let _ = updates.send(Update::Decided(decision));
            }
            now.store(snapshot.now.as_millisecond(), Ordering::Relaxed);
            let news = record.tally;
            let changed = tally.send_if_modified(|tally| std::mem::replace(tally, news) != news);
            if (wanted.swap(false, Ordering::Relaxed) || watched || (changed && news.is_over()))
                && let Some(view) = View::of(&record, snapshot, plan)
            {
                let _ = updates.send(Update::View(Box::new(view)));
            }
        })
    }

    /// What was measured. A node counts as done if the controller says so, and its driver pod and the API agree.
    async fn figures(
        &self,
        cluster: &Cluster,
        witness: &Witness,
        record: &Mutex<Record>,
    ) -> anyhow::Result<Figures> {
        let drivers = drivers(cluster).await?;
        let (account, requests) = (witness.account(), witness.requests());
        let record = lock(record);
        let Visits { min, max, .. } = record.visits;
        let troubles = record.nodes.iter().filter(|(_, seen)| seen.state != State::UpgradeDone);
        let nodes = u32::try_from(self.story.nodes).unwrap_or(u32::MAX);
        #[expect(clippy::cast_precision_loss, reason = "a number of requests")]
        let writes_per_node = tenths(requests.writes as f64 / f64::from(nodes));
        Ok(Figures {
            nodes: self.story.nodes,
            from: FROM.to_owned(),
            to: TO.to_owned(),
            ends_on: self.story.scenario.ends_on().to_owned(),
            visited: record.visited.len(),
            seed: self.story.seed,
            max_parallel_upgrades: self.story.max_parallel,
            max_unavailable: format!("{UNAVAILABLE_PERCENT}%"),
            virtual_seconds: 0.0,
            real_seconds: 0.0,
            done: record.tally.done,
            failed: record.tally.failed,
            drivers_ready: drivers,
            out_at_end: account.out.len(),
            most_out: account.most_out,
            limit: self.story.at_most(),
            workload_pods: account.pods.len(),
            evictions: account.left.len(),
            evictions_asked: requests.evictions,
            forced_deletions: account.forced,
            writes: requests.writes,
            writes_per_node,
            visit_seconds: VisitSeconds {
                min: tenths(min),
                mean: tenths(record.visits.mean().unwrap_or_default()),
                max: tenths(max),
            },
            gave_up: false,
            troubles: troubles.map(|(name, seen)| format!("{name} is {}", seen.state)).collect(),
        })
    }
}

/// The versions that really run: ready driver pods by the version of their image.
async fn drivers(cluster: &Cluster) -> anyhow::Result<BTreeMap<String, usize>> {
    let pods = Api::<Pod>::namespaced(cluster.admin.clone(), NAMESPACE);
    let selector = ListParams::default().labels(&format!("app.kubernetes.io/component={DRIVER_COMPONENT}"));
    let mut versions = BTreeMap::new();
    for pod in pods.list(&selector).await.context("cannot list the driver pods")? {
        let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
        let ready = conditions.into_iter().flatten().any(|c| c.type_ == "Ready" && c.status == "True");
        let container = pod.spec.as_ref().and_then(|spec| spec.containers.first());
        let version = container.and_then(|c| DriverVersion::from_image(c.image.as_deref()?));
        if let Some(version) = version.filter(|_| ready) {
            *versions.entry(version.to_string()).or_default() += 1;
        }
    }
    Ok(versions)
}

fn lock(record: &Mutex<Record>) -> std::sync::MutexGuard<'_, Record> {
    record.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Holds virtual time back to `speed` times real time. The wait blocks the runtime on purpose: its clock must stand.
async fn pace(speed: f64, clock: Clock, now: Arc<AtomicI64>, record: Arc<Mutex<Record>>) {
    let (real, mut due) = (Stopwatch::start(), Duration::ZERO);
    loop {
        let speed = if lock(&record).is_quiet { QUIET_SPEED.max(speed) } else { speed };
        let step = Instant::now();
        sleep(STEP.mul_f64(speed)).await;
        now.store(clock.now().as_millisecond(), Ordering::Relaxed);
        due += step.elapsed().div_f64(speed);
        std::thread::sleep(due.saturating_sub(real.elapsed()));
    }
}
