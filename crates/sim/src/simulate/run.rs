//! One run: a cluster, controllers, a storm, and the calm after it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use kube::Api;
use kube::api::PostParams;
use pitcrew_controller::Clock;
use pitcrew_controller::prometheus::Asks;
use pitcrew_core::api::{DriverPolicy, DriverPolicySpec};
use pitcrew_core::contract::State;
use pitcrew_core::reason::Reason;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::case::{Case, TO};
use super::controllers::{Controllers, is_ours};
use super::fault::Fault;
use super::manner::Manner;
use super::people::Deeds;
use super::promises::Promise;
use super::record::{Coverage, Entry, Record, Violation};
use super::settled;
use super::trouble::{Hands, Trouble};
use super::weather::Weather;
use super::world::{Key, Pool, World};
use crate::api::ApiServer;
use crate::cluster::{Cluster, EPOCH, SetUpError};

/// What others did may be known so much later …
const LAG: SignedDuration = SignedDuration::from_secs(2);
/// … or so much, where the news can be delayed: a broken watch is taken up again after 30 s at most, then lists.
const LAG_OF_DELAYED_NEWS: SignedDuration = SignedDuration::from_secs(90);
/// Between a last look and the write that follows: each call has 5 s.
const LAG_OF_SLOW_LOOKS: SignedDuration = SignedDuration::from_secs(15);
/// Clocks that jump are wrong by so much at most.
const CLOCKS_OFF: SignedDuration = SignedDuration::from_secs(300);
/// All of it is known after so long.
const AFTER_DELAYED_NEWS: Duration = Duration::from_mins(1);
/// How often it is looked whether all nodes have come to an end.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// A rollout says how it ended after this long at most …
const LAST_WORDS: Duration = Duration::from_secs(20);
/// … and what runs otherwise than listed is told once a minute (seed 2387).
const LAST_WORDS_OF_A_MATRIX: Duration = Duration::from_secs(75);
/// Others may bring something new so many times.
const ROUNDS_MAX: u32 = 10;
/// Then nothing may be written for so long.
const REST: Duration = Duration::from_secs(70);

/// What came of a run.
#[derive(Clone, Debug)]
pub struct Run {
    /// The seed.
    pub seed: u64,
    /// The first promise that was broken.
    pub violation: Option<Violation>,
    /// Over every change: the same for the same seed and commit.
    pub hash: u64,
    /// Changes that the API stored.
    pub changes: u64,
    /// Requests to the API, by user.
    pub requests: BTreeMap<String, u64>,
    /// Passes of the planner.
    pub passes: u64,
    /// How many nodes there were.
    pub nodes: usize,
    /// How much time went by in the cluster.
    pub time: Duration,
    /// How often each fault happened.
    pub faults: BTreeMap<Fault, u64>,
    /// Which faults met nodes in which states.
    pub coverage: Coverage,
    /// How often each transition was made.
    pub transitions: BTreeMap<(State, State), u64>,
    /// How versions reached the fleet, and what rollouts came to.
    pub rollouts: BTreeMap<&'static str, u64>,
    /// What happened, if it was asked for.
    pub trace: Vec<Entry>,
}

/// A run could not begin.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// No runtime.
    #[error("start a runtime")]
    Runtime(#[from] std::io::Error),
    /// No cluster.
    #[error("set up the cluster")]
    SetUp(#[from] SetUpError),
    /// A run panicked; standard error says where.
    #[error("a run panicked, see above")]
    Panicked,
    /// The cluster refused what a person does.
    #[error("work in the cluster")]
    Api(#[from] kube::Error),
}

/// Plays a case to its end, or until a promise is broken.
pub fn run(case: &Case, keep_trace: bool) -> Result<Run, RunError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build()?;
    runtime.block_on(play(case, keep_trace))
}

async fn play(case: &Case, keep_trace: bool) -> Result<Run, RunError> {
    let began = Instant::now();
    let api = ApiServer::new(EPOCH);
    let record = Record::new(worlds(case), keep_trace);
    let (seen, clock) = (record.clone(), api.clone());
    let now = clock.wall_clock();
    api.on_written(move |written| seen.written(now(), written));
    let cluster = Cluster::on(api.clone(), &case.fleet, case.seed, case.behaviour.clone()).await?;
    for (name, spec) in case.policies() {
        let spec: DriverPolicySpec = serde_json::from_value(spec.clone()).map_err(kube::Error::SerdeError)?;
        let policies = Api::<DriverPolicy>::all(cluster.admin.clone());
        policies.create(&PostParams::default(), &DriverPolicy::new(name, spec)).await?;
    }
    let replicas = if case.has(Fault::Overlap) || case.seed.is_multiple_of(3) { 2 } else { 1 };
    let asks = overheard(cluster.actors.behaviour().prometheus(), &api, &record);
    let controllers = Controllers::new(replicas, &api, &Clock::starting_at(api.now()), &asks, &record);
    let deeds = Deeds::default();
    let mut play = Play { case, cluster, controllers, record, api, joined: 0, deeds };
    let record = play.record.clone();
    let result = tokio::select! {
        biased;
        () = record.until_broken() => Ok(()),
        result = play.storm_and_calm() => result,
    };
    play.controllers.kill_all().await;
    result?;
    let dropped = play.controllers.dropped();
    if dropped > 0 {
        let what = format!("{dropped} planned actions were dropped");
        record.break_promise(Promise::PlansKeepThem, None, what, play.api.now());
    }
    if let Some((_, what)) = play.api.counts().overlapping.iter().find(|(user, _)| is_ours(user)) {
        let what = format!("{what}, before the write to it that was under way was answered");
        record.break_promise(Promise::OneAtATime, None, what, play.api.now());
    }
    let mut book = record.book();
    let mut rollouts = std::mem::take(&mut book.rollouts);
    rollouts.extend(case.manner.iter().flat_map(Manner::kinds).map(|kind| (kind, 1)));
    rollouts.extend(case.second.is_some().then_some(("with two pools", 1)));
    Ok(Run {
        seed: case.seed,
        violation: book.violation.take(),
        hash: book.hash,
        changes: book.changes,
        requests: requests(&play.api),
        passes: book.passes,
        nodes: case.fleet.nodes,
        time: began.elapsed(),
        faults: std::mem::take(&mut book.faults),
        coverage: std::mem::take(&mut book.coverage),
        transitions: std::mem::take(&mut book.transitions),
        rollouts,
        trace: book.trace.take().unwrap_or_default(),
    })
}

/// The same answers, noted as they are given.
fn overheard(asks: Asks, api: &ApiServer, record: &Record) -> Asks {
    let (clock, record) = (api.clone(), record.clone());
    Arc::new(move |question| {
        let (answer, now, record) = (asks(question), clock.wall_clock(), record.clone());
        Box::pin(async move {
            let said = answer.await;
            record.book().worlds.iter_mut().for_each(|world| world.proofs.note_answer(now(), &said));
            said
        })
    })
}

fn requests(api: &ApiServer) -> BTreeMap<String, u64> {
    let mut by_user = BTreeMap::new();
    for ((user, ..), count) in api.counts().by_request {
        *by_user.entry(user).or_default() += count;
    }
    by_user
}

/// How often each was asked for, by verb and resource.
type Writes = BTreeMap<(&'static str, String), u64>;

/// What controllers asked to be written, done or not, by verb and resource. Leases are renewed for ever, Events are
/// written once more after a while, and pods may be asked to leave again.
fn our_writes(api: &ApiServer) -> Writes {
    let mut ours = BTreeMap::new();
    for ((user, verb, resource), count) in api.counts().by_request {
        let writes = !matches!(verb, "get" | "list" | "watch");
        let counts = !matches!(resource.as_str(), "leases" | "events" | "pods/eviction");
        if is_ours(&user) && writes && counts {
            *ours.entry((verb, resource)).or_default() += count;
        }
    }
    ours
}

/// One for each pool.
fn worlds(case: &Case) -> Vec<World> {
    let world = world(case);
    if case.second.is_none() {
        return vec![world];
    }
    let pool = |(name, _): (&str, _)| Pool { name: name.to_owned(), label: name.to_owned() };
    let of = |policy| {
        let mut world = world.clone();
        world.pool = Some(pool(policy));
        world
    };
    case.policies().map(of).collect()
}

fn world(case: &Case) -> World {
    let delayed = case.delays_news();
    let mut world = World::default();
    world.lag = if delayed { LAG_OF_DELAYED_NEWS } else { LAG };
    // A look goes to the API itself, so that it is late only where calls are slow.
    world.lag_of_looks = if case.has(Fault::SlowCall) { LAG_OF_SLOW_LOOKS } else { SignedDuration::ZERO };
    world.clock_off = if case.has(Fault::ClockJump) { CLOCKS_OFF } else { SignedDuration::ZERO };
    world
}

struct Play<'a> {
    case: &'a Case,
    cluster: Cluster,
    controllers: Controllers,
    record: Record,
    api: ApiServer,
    joined: u32,
    deeds: Deeds,
}

/// What a timeline is made of.
#[derive(Clone, Copy)]
enum Cue {
    AskForVersion,
    /// A trouble, known by its number.
    Begin(usize, Trouble),
    End(usize, Trouble),
}

impl Play<'_> {
    async fn storm_and_calm(&mut self) -> Result<(), RunError> {
        let weather = Weather::new(self.case, self.api.clone(), self.record.clone());
        self.hands(&weather).list_all().await?;
        self.controllers.start_all();
        weather.blow();
        self.storm(&weather).await?;
        let mut hands = self.hands(&weather);
        hands.mend().await?;
        self.note("the storm is over");
        self.calm(&weather).await
    }

    fn hands<'b>(&'b mut self, weather: &'b Weather) -> Hands<'b> {
        Hands {
            case: self.case,
            cluster: &self.cluster,
            controllers: &mut self.controllers,
            weather,
            joined: &mut self.joined,
        }
    }

    fn note(&self, text: &str) {
        self.record.note(self.api.now(), text);
    }

    async fn storm(&mut self, weather: &Weather) -> Result<(), RunError> {
        let began = Instant::now();
        let mut cues = vec![(self.case.asked_after, Cue::AskForVersion)];
        for (number, (at, trouble)) in self.case.troubles.iter().enumerate() {
            cues.push((*at, Cue::Begin(number, *trouble)));
            cues.push((*at + trouble.lasts, Cue::End(number, *trouble)));
        }
        cues.sort_by_key(|(at, _)| *at);
        let mut nodes = BTreeMap::new();
        for (at, cue) in cues {
            sleep_until(began + at).await;
            match cue {
                Cue::AskForVersion => {
                    self.note("a new version is asked for");
                    for fault in self.case.faults.iter().filter(|fault| fault.is_standing()) {
                        self.record.count(*fault);
                    }
                    self.cluster.set_driver_version(TO).await?;
                }
                Cue::Begin(number, trouble) => {
                    self.note(&format!("{} begins, for {:.1?}", trouble.fault, trouble.lasts));
                    let node = self.hands(weather).begin(trouble).await?;
                    self.record.hit(trouble.fault, node.as_deref());
                    nodes.extend(node.map(|node| (number, node)));
                }
                Cue::End(number, trouble) => {
                    self.hands(weather).end(trouble, nodes.remove(&number)).await?;
                }
            }
        }
        sleep_until(began + self.case.storm).await;
        Ok(())
    }

    /// Every node comes to an end, and then nothing moves.
    async fn calm(&mut self, weather: &Weather) -> Result<(), RunError> {
        let bound = settled::bound(self.case, self.record.book().nodes().count());
        // What was under way ends first, and news that were held up arrive.
        sleep(if self.case.delays_news() { AFTER_DELAYED_NEWS } else { LOOK_EVERY }).await;
        let mut rounds = 0;
        let settled_at = loop {
            rounds += 1;
            let Ok(ended) = timeout(bound, self.until_settled(weather)).await else {
                let after = format!("after {} min", bound.as_secs() / 60);
                self.break_unsettled(&after, self.api.now());
                let what = format!("{after}, drivers and NVSentinel do not come to rest");
                self.record.break_promise(Promise::ComesToRest, None, what, self.api.now());
                return Ok(());
            };
            ended?;
            let (settled_at, (down, quarantined)) = (self.api.now(), self.outside());
            let baked = self.bakes();
            self.note("every node has come to an end");
            let listed = self.case.manner.as_ref().is_some_and(|manner| manner.matrix.is_some());
            sleep(if listed { LAST_WORDS_OF_A_MATRIX } else { LAST_WORDS }).await;
            let before = our_writes(&self.api);
            sleep(REST).await;
            // A driver that comes up after all is news, and brings its node further; so is a bake that nobody is left for,
            // and that Prometheus spoils (seed 4717); and NVSentinel takes its time (seed 12990).
            let over = baked && !self.bakes();
            let now = self.outside();
            let rests = !over && now.0.is_superset(&down) && now.1 == quarantined;
            if rests || rounds == ROUNDS_MAX {
                self.break_unrest(&before);
                break settled_at;
            }
        };
        // By the time at which they had: a node that tries again much later has come nearer to it meanwhile.
        // A window that closes meanwhile is what a node says it waits for then, though it was at its end (seed 156).
        let window_closed = {
            let book = self.record.book();
            let names = book.worlds.iter().flat_map(|world| world.nodes.keys());
            let mut reasons = names.filter_map(|name| book.reason(name));
            reasons.any(|reason| matches!(reason, Reason::WindowClosed { .. }))
        };
        if !window_closed {
            self.break_unsettled("after it had come to an end", settled_at);
        }
        if self.controllers.any_ended() {
            self.record.broken("a controller ended by itself");
        }
        Ok(())
    }

    /// What others do of themselves: drivers that are down, and nodes that NVSentinel has.
    fn outside(&self) -> (BTreeSet<Key>, BTreeSet<String>) {
        let book = self.record.book();
        (book.drivers_down(), book.quarantined())
    }

    fn bakes(&self) -> bool {
        self.record.book().bakes()
    }

    /// Something was written since then, although nothing happened.
    fn break_unrest(&self, before: &Writes) {
        let mut writes = our_writes(&self.api);
        // A bake that cannot end is looked at for as long as it takes, gates are asked again, and that is told.
        let bakes = self.bakes();
        let of_a_bake = |what: &str| bakes && matches!(what, "rollouts/status" | "jobs");
        writes.retain(|what, count| before.get(what) != Some(count) && !of_a_bake(&what.1));
        if !writes.is_empty() {
            let writes: Vec<String> =
                writes.into_iter().map(|((verb, what), _)| format!("{verb} {what}")).collect();
            let what = format!(
                "{} within {} s after everything had come to an end",
                writes.join(", "),
                REST.as_secs()
            );
            self.record.break_promise(Promise::ComesToRest, None, what, self.api.now());
        }
    }

    async fn until_settled(&mut self, weather: &Weather) -> Result<(), RunError> {
        // Seen twice: a node may look settled in the moment before it is looked at.
        let (mut quiet, mut before) = (0, self.outside());
        while quiet < 3 {
            sleep(LOOK_EVERY).await;
            self.attend(weather).await?;
            // Who has just come back may have to be looked after (seed 12925).
            let now = self.outside();
            let settled = now == before && self.unsettled(self.api.now()).is_none();
            quiet = if settled { quiet + 1 } else { 0 };
            before = now;
        }
        Ok(())
    }

    /// People look after what only they can change.
    async fn attend(&mut self, weather: &Weather) -> Result<(), RunError> {
        let mut deeds = std::mem::take(&mut self.deeds);
        let brought = self.hands(weather).attend(&mut deeds).await;
        self.deeds = deeds;
        if let Some((fault, node)) = brought? {
            self.note(&format!("{fault} begins"));
            self.record.hit(fault, node.as_deref());
        }
        Ok(())
    }

    fn unsettled(&self, now: Timestamp) -> Option<settled::Unsettled> {
        settled::unsettled(&self.record.book(), self.case.abort_stays(), now)
    }

    fn break_unsettled(&self, when: &str, now: Timestamp) {
        if let Some(settled::Unsettled { promise, node, what }) = self.unsettled(now) {
            self.record.break_promise(promise, node, format!("{when}, {what}"), self.api.now());
        }
    }
}
