//! One pod's life on a node, as a state machine over time: starting, warming up, ready, crashing, stopping.
//!
//! Pure: what to do comes in as a `Course`, time as an argument. The kubelet asks `advance` where the pod is now and
//! when it will change by itself, and writes the status that `pod_status` makes of it.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use tokio::time::Instant;

use super::object::{is_finished, is_ready};

/// The kubelet's waits between restarts and between image pulls.
const BACKOFF_FIRST: Duration = Duration::from_secs(10);
const BACKOFF_MAX: Duration = Duration::from_mins(5);

/// The exit code of a process that was killed.
pub(super) const KILLED: i32 = 137;

/// What a pod does if nothing comes in between.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Course {
    /// Containers start after `start`, are Ready after `warm_up` more, and run until deleted.
    Run { start: Duration, warm_up: Duration },
    /// Runs for a time and ends.
    Finish { start: Duration, run: Duration, exit_code: i32, message: String },
    /// Starts and exits.
    Crash { start: Duration, after: Duration },
    /// Never gets its image.
    NoImage { start: Duration },
    /// Runs and never becomes Ready.
    Hang { start: Duration },
    /// Starts anew whenever the driver does; `driver` is who provides it now.
    Follow { start: Duration, driver: Option<String> },
    /// Its init container waits for a safe moment to load the driver.
    Ask { start: Duration },
    /// Its init container waits, for the driver or for others to leave.
    Gate { start: Duration },
    /// Its init container has failed, and waits to be started again.
    InitFailed { start: Duration, message: String },
    /// The kubelet cannot prepare what it claims.
    Unprepared { start: Duration },
}

/// What the main container is doing.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Container {
    Creating,
    /// Told about, because claims that cannot be prepared keep it from anything further.
    Unprepared,
    /// The last init container runs.
    Initializing {
        since: Time,
    },
    /// An init container has ended with an error.
    InitBackingOff(Exit),
    Running {
        since: Time,
    },
    BackingOff,
    NoImage,
    Exited(Exit),
    /// The pod was ended before there was one.
    Never,
}

/// How a container ended.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Exit {
    pub(super) started: Time,
    pub(super) at: Time,
    pub(super) code: i32,
    pub(super) message: String,
}

#[derive(Clone, Debug, PartialEq)]
enum Stage {
    /// Not told yet what to do.
    New,
    Starting {
        at: Instant,
    },
    Warming {
        at: Instant,
    },
    Ready {
        until: Option<Instant>,
    },
    BackingOff {
        until: Instant,
    },
    /// A follower without a driver.
    Waiting,
    /// Not before somebody says that the driver may load.
    Asking,
    /// Not before what it waits for has happened.
    Held,
    Over,
}

/// A driver that runs, or ran: one container from its start to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DriverRun {
    pub(super) id: String,
    /// As in the image's tag; unknown of a driver that came with the machine.
    pub(super) version: Option<String>,
    /// When the container started.
    pub(super) since: Option<Time>,
}

/// What a kubelet knows of its machine when it takes up a pod.
#[derive(Clone, Copy, Debug)]
pub(super) struct Machine<'a> {
    /// Who provides the driver.
    pub(super) driver: Option<&'a str>,
    pub(super) run: Option<&'a DriverRun>,
    /// How often it has booted.
    pub(super) boot: u32,
    /// How often its driver container was made to restart.
    pub(super) driver_restarts: u32,
}

/// The hand-shake of a driver pod that loads only at a safe moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Load {
    Unasked,
    Asked,
    Granted,
}

/// Where a pod is in its life.
#[derive(Clone, Debug)]
pub(super) struct Life {
    pub(super) uid: String,
    pub(super) container: Container,
    pub(super) ready: bool,
    pub(super) restarts: i32,
    pub(super) last_exit: Option<Exit>,
    /// When the kubelet took the pod up.
    pub(super) since: Time,
    stage: Stage,
    follows: Option<String>,
    failures: u32,
    load: Load,
    /// The node's boot in which it lives.
    boot: u32,
    /// How often the node's driver container was made to restart, as far as this pod knows.
    driver_restarts: u32,
    /// The driver that ran when the main container started, which is the one that its process has open.
    pub(super) saw: Option<DriverRun>,
    /// Why it does not start, as people were told.
    pub(super) told: Option<&'static str>,
    /// Its time was up.
    pub(super) expired: bool,
    /// What the API is known to show, and in which version of the pod.
    shown: Option<(String, Face)>,
}

/// What a pod's status is made of.
#[derive(Clone, Debug, PartialEq)]
struct Face {
    container: Container,
    ready: bool,
    restarts: i32,
    last_exit: Option<Exit>,
    expired: bool,
}

impl Life {
    /// Takes up a pod where its status says it is: pods outlive the actor that plays their kubelet.
    pub(super) fn of(pod: &Pod, now: Time, machine: Machine<'_>) -> Self {
        let Machine { driver, run, boot, driver_restarts } = machine;
        let status = pod.status.as_ref();
        let first = status.and_then(|status| status.container_statuses.as_ref()?.first());
        let running = first.and_then(|first| first.state.as_ref()?.running.as_ref()?.started_at.clone());
        let ready = is_ready(pod) && running.is_some();
        let stage = match () {
            () if is_finished(pod) => Stage::Over,
            () if ready => Stage::Ready { until: None },
            () => Stage::New,
        };
        let saw = run.filter(|run| running.is_some() && running >= run.since).cloned();
        Self {
            uid: pod.metadata.uid.clone().unwrap_or_default(),
            load: if running.is_some() { Load::Granted } else { Load::Unasked },
            container: running.map_or(Container::Creating, |since| Container::Running { since }),
            ready,
            restarts: first.map_or(0, |first| first.restart_count),
            last_exit: None,
            since: status.and_then(|status| status.start_time.clone()).unwrap_or(now),
            stage,
            follows: driver.filter(|_| ready).map(str::to_owned),
            failures: 0,
            boot,
            driver_restarts,
            saw,
            told: None,
            expired: false,
            shown: None,
        }
    }

    fn face(&self) -> Face {
        let Self { container, ready, restarts, last_exit, expired, .. } = self;
        Face {
            container: container.clone(),
            ready: *ready,
            restarts: *restarts,
            last_exit: last_exit.clone(),
            expired: *expired,
        }
    }

    /// The API shows it as it is: most looks at a pod find nothing new, and a status is much to compare.
    pub(super) fn is_shown_by(&self, pod: &Pod) -> bool {
        let Some((version, face)) = &self.shown else { return false };
        pod.metadata.resource_version.as_ref() == Some(version) && *face == self.face()
    }

    /// The status of this version of the pod is what it should be.
    pub(super) fn note_shown_by(&mut self, pod: &Pod) {
        self.shown = pod.metadata.resource_version.clone().map(|version| (version, self.face()));
    }

    /// Whether the kubelet has something to report: nothing is written before containers start for the first time.
    pub(super) fn has_begun(&self) -> bool {
        self.container != Container::Creating || self.restarts > 0
    }

    /// Whether the main container has started since the pod did: from then on no init container runs again.
    pub(super) fn is_past_init(&self) -> bool {
        matches!(self.container, Container::Running { .. } | Container::BackingOff)
    }

    /// The same, of a pod that may not know yet that its node has booted.
    pub(super) fn is_past_init_in(&self, boot: u32) -> bool {
        self.boot == boot && self.is_past_init()
    }

    /// Something keeps its main container from starting.
    pub(super) fn is_held(&self) -> bool {
        self.stage == Stage::Held
    }

    /// The container that runs, by how often there was one before.
    pub(super) fn incarnation(&self) -> Option<i32> {
        matches!(self.container, Container::Running { .. }).then_some(self.restarts)
    }

    /// The driver that this pod's container is, once it is loaded.
    pub(super) fn as_driver(&self, version: Option<String>, boot: u32) -> Option<DriverRun> {
        let Container::Running { since } = &self.container else { return None };
        let runs = self.ready && self.boot == boot;
        let id = format!("{}/{}", self.uid, self.restarts);
        runs.then(|| DriverRun { id, version, since: Some(since.clone()) })
    }

    /// The driver's container ends and starts again where it is, once for each time it was told to.
    pub(super) fn restart_driver(&mut self, times: u32, course: &Course, now: Instant, time: &Time) {
        if self.driver_restarts == times {
            return;
        }
        self.driver_restarts = times;
        if self.incarnation().is_some() {
            self.ready = false;
            self.last_exit = Some(self.exit(1, "", time));
            self.start(course, now, time);
        }
    }

    /// Its containers will not run again.
    pub(super) fn is_over(&self) -> bool {
        self.stage == Stage::Over
    }

    /// Its containers have ended.
    pub(super) fn end(&mut self) {
        (self.ready, self.stage) = (false, Stage::Over);
    }

    /// The kubelet ends a pod that has been active for longer than it may.
    pub(super) fn expire(&mut self, time: &Time) {
        self.container = match self.container {
            Container::Running { .. } => Container::Exited(self.exit(KILLED, "", time)),
            _ => Container::Never,
        };
        (self.ready, self.stage, self.expired) = (false, Stage::Over, true);
    }

    /// A node that booted starts all its pods again.
    pub(super) fn live_in(&mut self, boot: u32) {
        if self.boot == boot || self.stage == Stage::Over {
            return;
        }
        self.restarts += i32::from(self.is_past_init());
        (self.boot, self.container, self.ready) = (boot, Container::Creating, false);
        (self.stage, self.load, self.follows) = (Stage::New, Load::Unasked, None);
    }

    /// Whether the driver may be loaded, given that the node says that somebody waits for that (or does not).
    pub(super) fn may_load(&mut self, somebody_waits: bool) -> bool {
        self.load = match (self.load, somebody_waits) {
            (Load::Unasked, true) if self.stage == Stage::Asking => Load::Asked,
            (Load::Asked, false) => Load::Granted,
            (load, _) => load,
        };
        self.load == Load::Granted
    }

    /// It should ask now.
    pub(super) fn wants_to_load(&self) -> bool {
        self.stage == Stage::Asking && self.load == Load::Unasked
    }

    /// Moves on to where the pod is at `now`; returns when to look again.
    pub(super) fn advance(&mut self, course: &Course, now: Instant, time: &Time) -> Option<Instant> {
        if let Course::Follow { start, driver } = course {
            self.follow(*start, driver.as_deref(), now);
        }
        // A step may be due at once, and another after it; five is the longest chain there is.
        for _ in 0..5 {
            let before = self.stage.clone();
            self.step(course, now, time);
            if self.stage == before {
                break;
            }
        }
        match self.stage {
            Stage::Starting { at } | Stage::Warming { at } | Stage::BackingOff { until: at } if at > now => {
                Some(at)
            }
            // One that should have ended, and was told otherwise meanwhile, is looked at when that changes.
            Stage::Ready { until } => until.filter(|at| *at > now),
            _ => None,
        }
    }

    fn step(&mut self, course: &Course, now: Instant, time: &Time) {
        match self.stage {
            Stage::New => self.stage = Stage::Starting { at: now + course.start() },
            Stage::Starting { at } if now >= at => self.start(course, now, time),
            Stage::Warming { at } if now >= at => self.warmed_up(course, now, time),
            Stage::BackingOff { until } if now >= until => self.start(course, now, time),
            Stage::Ready { until } => self.while_ready(course, until, now, time),
            Stage::Held if !self.is_held_by(course) => self.start(course, now, time),
            Stage::Asking if !matches!(course, Course::Ask { .. }) => self.start(course, now, time),
            _ => {}
        }
    }

    /// What holds it is what held it when it was last looked at.
    fn is_held_by(&self, course: &Course) -> bool {
        matches!(
            (course, &self.container),
            (Course::Gate { .. }, Container::Initializing { .. })
                | (Course::Unprepared { .. }, Container::Unprepared)
                | (Course::InitFailed { .. }, Container::InitBackingOff(_))
        )
    }

    fn start(&mut self, course: &Course, now: Instant, time: &Time) {
        if let Course::NoImage { .. } = course {
            self.container = Container::NoImage;
            self.back_off(now);
            return;
        }
        if let Course::Ask { .. } = course {
            self.container = Container::Initializing { since: time.clone() };
            self.stage = Stage::Asking;
            return;
        }
        let held = match course {
            Course::Gate { .. } => Some(Container::Initializing { since: time.clone() }),
            Course::Unprepared { .. } => Some(Container::Unprepared),
            Course::InitFailed { message, .. } => {
                Some(Container::InitBackingOff(self.exit(1, message, time)))
            }
            _ => None,
        };
        if let Some(container) = held {
            (self.container, self.stage) = (container, Stage::Held);
            return;
        }
        self.restarts += i32::from(self.is_past_init());
        self.container = Container::Running { since: time.clone() };
        self.stage = match course {
            Course::Run { warm_up, .. } => Stage::Warming { at: now + *warm_up },
            Course::Crash { after, .. } => Stage::Warming { at: now + *after },
            _ => Stage::Warming { at: now },
        };
    }

    fn warmed_up(&mut self, course: &Course, now: Instant, time: &Time) {
        match course {
            Course::Crash { .. } => self.crash(now, time),
            Course::Hang { .. } => {}
            Course::Finish { run, .. } => {
                self.ready = true;
                self.stage = Stage::Ready { until: Some(now + *run) };
            }
            _ => {
                self.ready = true;
                self.failures = 0;
                self.stage = Stage::Ready { until: None };
            }
        }
    }

    fn while_ready(&mut self, course: &Course, until: Option<Instant>, now: Instant, time: &Time) {
        match course {
            Course::Crash { .. } => self.crash(now, time),
            Course::Hang { .. } => {
                self.ready = false;
                self.stage = Stage::Warming { at: now };
            }
            Course::Finish { run, .. } if until.is_none() => {
                self.stage = Stage::Ready { until: Some(now + *run) }
            }
            Course::Finish { exit_code, message, .. } if until.is_some_and(|until| now >= until) => {
                self.ready = false;
                self.container = Container::Exited(self.exit(*exit_code, message, time));
                self.stage = Stage::Over;
            }
            _ => {}
        }
    }

    fn crash(&mut self, now: Instant, time: &Time) {
        self.ready = false;
        self.last_exit = Some(self.exit(1, "NVRM: probe failed", time));
        self.container = Container::BackingOff;
        self.back_off(now);
    }

    fn back_off(&mut self, now: Instant) {
        self.stage = Stage::BackingOff { until: now + back_off(self.failures) };
        self.failures += 1;
    }

    fn exit(&self, code: i32, message: &str, at: &Time) -> Exit {
        let started = match &self.container {
            Container::Running { since } => since.clone(),
            _ => at.clone(),
        };
        Exit { started, at: at.clone(), code, message: message.to_owned() }
    }

    /// A validator is worth something only for the driver it has seen.
    fn follow(&mut self, start: Duration, driver: Option<&str>, now: Instant) {
        if self.stage == Stage::Over || driver.is_some() && self.follows.as_deref() == driver {
            return;
        }
        self.ready = false;
        self.follows = driver.map(str::to_owned);
        self.stage = match driver {
            None => Stage::Waiting,
            Some(_) => Stage::Starting { at: now + start },
        };
    }
}

/// How long a kubelet waits after so many failures before this one.
pub(super) fn back_off(failures: u32) -> Duration {
    BACKOFF_FIRST.saturating_mul(1 << failures.min(5)).min(BACKOFF_MAX)
}

impl Course {
    pub(super) fn start(&self) -> Duration {
        match self {
            Self::Run { start, .. }
            | Self::Finish { start, .. }
            | Self::Crash { start, .. }
            | Self::NoImage { start }
            | Self::Hang { start }
            | Self::Follow { start, .. }
            | Self::Ask { start }
            | Self::Gate { start }
            | Self::InitFailed { start, .. }
            | Self::Unprepared { start } => *start,
        }
    }
}
