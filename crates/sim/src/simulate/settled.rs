//! The liveness promises: once faults stop, every node comes to an end within a bound, and then nothing moves.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use pitcrew_core::contract::State;
use pitcrew_core::reason::{Limit, Reason, Remedy};

use super::case::{Case, is_of};
use super::moves::Moves;
use super::promises::Promise;
use super::record::Book;
use super::world::{Node, Role, Rollout, World};

/// A visit takes no longer than its deadlines together; the policies of `case.rs` have none beyond these.
const VISIT_MAX: Duration = Duration::from_mins(12);
/// Without limits of our own, a driver has so long by default.
const VISIT_MAX_BY_DEFAULT: Duration = Duration::from_hours(1);
/// A node that tries again no sooner than this stands still for now.
const NEXT_TRY_MIN: SignedDuration = SignedDuration::from_mins(3);
/// So much more with gates: each of the cases' has half a minute, and is asked again if it cannot judge.
const GATES_MAX: Duration = Duration::from_mins(10);
/// A gate at the end of a stage that could not judge is asked again within the hour.
const ASKED_AGAIN: Duration = Duration::from_hours(2);
/// A new leader, back-offs, and what was under way.
const BEFORE_THE_FIRST: Duration = Duration::from_mins(5);

/// A version may be taken back, and asked for again: so many times a fleet is gone through.
const ROUNDS: u32 = 4;
/// Windows come back every day, and what needs two of them has to wait for the second.
const WINDOWS: Duration = Duration::from_hours(48);

/// What has not come to its end.
pub(super) struct Unsettled {
    pub(super) promise: Promise,
    pub(super) node: Option<String>,
    pub(super) what: String,
}

/// How long it may take from the end of all faults until every node has come to an end: one visit after the other.
pub(super) fn bound(case: &Case, nodes: usize) -> Duration {
    let visit = if case.policy.is_some() { VISIT_MAX } else { VISIT_MAX_BY_DEFAULT };
    let visits = u32::try_from(nodes).unwrap_or(u32::MAX);
    let moves = case.policy.as_ref().map(Moves::read).unwrap_or_default();
    let gates = if moves.gates.is_empty() { Duration::ZERO } else { GATES_MAX };
    let once = BEFORE_THE_FIRST + (visit + gates).saturating_mul(visits);
    if case.manner.is_none() {
        return once;
    }
    let again = if moves.gates.iter().any(|gate| gate.at_stage_ends) { ASKED_AGAIN } else { Duration::ZERO };
    let once = once + again * u32::try_from(moves.stages.len()).unwrap_or(u32::MAX);
    let bakes: i64 = moves.stages.iter().map(|stage| stage.bake).sum();
    // Time in which a node cannot be judged does not count: that lasts no longer than its visit.
    let bakes = Duration::from_secs(u64::try_from(bakes).unwrap_or_default()) * 2;
    (once + bakes) * ROUNDS + if moves.has_windows() { WINDOWS } else { Duration::ZERO }
}

/// The first thing that has not come to its end, with what is missing. `now` is when nothing had been touched for a while.
pub(super) fn unsettled(book: &Book, aborted: bool, now: Timestamp) -> Option<Unsettled> {
    book.worlds.iter().find_map(|world| unsettled_pool(&Sight { world, book, aborted, now }))
}

/// A pool, and what is said of its nodes.
struct Sight<'a> {
    world: &'a World,
    book: &'a Book,
    /// Somebody has aborted what is under way, and that stays.
    aborted: bool,
    now: Timestamp,
}

impl<'a> Sight<'a> {
    fn reason(&self, node: &str) -> Option<&'a Reason> {
        self.book.reason(node)
    }
}

fn unsettled_pool(book: &Sight<'_>) -> Option<Unsettled> {
    let mut nodes = book.world.nodes.iter().filter(|(_, node)| node.member);
    let node = nodes.find_map(|(name, node)| {
        let what = missing(book, name, node)?;
        Some(Unsettled { promise: Promise::ComesToAnEnd, node: Some(name.clone()), what })
    });
    node.or_else(|| unsettled_rollout(book, book.world.newest()?))
}

/// A rollout that will go on by itself, or should.
fn unsettled_rollout(book: &Sight<'_>, newest: &Rollout) -> Option<Unsettled> {
    let says = |promise, what: String| Some(Unsettled { promise, node: None, what });
    // Also one that is not the newest: its version is set again while nodes are on their way back (seed 2523).
    if book.world.rollouts.values().any(|rollout| rollout.phase == "RollingBack") {
        return says(Promise::GoesBack, "a version is still being put back".to_owned());
    }
    let is_back = newest.back_since.is_some() && !newest.is_cleared() && !newest.needs_a_person;
    match newest.phase.as_str() {
        _ if is_back && newest.version == book.world.target && newest.phase != "RolledBack" => {
            says(Promise::GoesBack, format!("{} was taken back, and is still asked for", newest.version))
        }
        "AwaitingApproval" => says(Promise::ComesToAnEnd, "a stage waits for a person".to_owned()),
        _ if newest.bakes() && !newest.stages.keys().any(|stage| bakes_for_ever(book, newest, stage)) => {
            says(Promise::ComesToAnEnd, "a stage is still watched at work".to_owned())
        }
        _ if newest.aborted_since.is_none() && newest.proves().any(|stage| !proves_for_ever(book, stage)) => {
            says(Promise::ComesToAnEnd, "gates at the end of a stage are still asked".to_owned())
        }
        _ => None,
    }
}

fn missing(book: &Sight<'_>, name: &str, node: &Node) -> Option<String> {
    let now = book.now;
    match node.state() {
        State::UpgradeDone => not_done(book, name, node),
        State::UpgradeFailed | State::UpgradeRequired if node.visit.is_none() && left_on(node).is_some() => {
            left_on(node).map(|what| format!("it is not ours any more, and {what}"))
        }
        // It stays out until a person or another version comes.
        State::UpgradeFailed if node.visit.is_none() || node.cordoned || node.opened_by_others => None,
        State::UpgradeFailed => Some("it has failed and is not cordoned".to_owned()),
        State::UpgradeRequired if node.visit.is_some() && !node.is_retried() => {
            Some("it waits for its first try, and is on a visit".to_owned())
        }
        State::UpgradeRequired => {
            let Some(reason) = book.reason(name) else {
                return Some("it waits in upgrade-required, and nobody says for what".to_owned());
            };
            let waits = waits_for_good(book, (name, node), reason);
            (!waits).then(|| format!("it waits in upgrade-required: {reason}"))
        }
        // It joined with a driver that does not come up: that is told, and not ours to mend.
        State::Unknown if matches!(book.reason(name), Some(Reason::DriverNotReady { .. })) => None,
        // Nobody knows when a budget allows it, as long as others are out.
        _ if let Some(reason @ (Reason::BudgetBlocks { .. } | Reason::BudgetNever { .. })) =
            book.reason(name)
            && reason.until().is_none_or(|until| now.duration_until(until) > NEXT_TRY_MIN)
            && out_anywhere(book, name) =>
        {
            None
        }
        state => {
            let since =
                node.visit.as_ref().map_or(SignedDuration::ZERO, |visit| now.duration_since(visit.since));
            let reason = book.reason(name).map(ToString::to_string).unwrap_or_default();
            Some(format!("it is in {state} since {} s: {reason}", since.as_secs()))
        }
    }
}

/// What a node in `upgrade-required` waits for does not come by itself.
fn waits_for_good(book: &Sight<'_>, (name, node): (&str, &Node), reason: &Reason) -> bool {
    let now = book.now;
    match reason {
        Reason::NoSlot { limit: Limit::MaxUnavailable { limit, .. }, together, .. } => {
            out_for_good(book, name) + together > *limit
        }
        Reason::AtomTooLarge { nodes, limit, .. } => nodes > limit,
        // Whoever holds the atom waits for good.
        Reason::AtomWaits { node: holder, why, .. } => {
            let other = book.world.nodes.get(holder.as_str());
            other.is_some_and(|other| waits_for_good(book, (holder.as_str(), other), why))
        }
        Reason::SpreadFull { out, .. } => out.iter().any(|other| stays_out(book, other.as_str())),
        Reason::StageClosed { before, .. } => stands(book, before),
        Reason::StageFailed { .. } => book.world.newest().is_some_and(|newest| {
            newest.bad_since().is_some() && (book.world.moves.pauses || newest.needs_a_person)
        }),
        Reason::Condemned { .. } => is_condemned(book),
        Reason::NotInMatrix { .. } => !book.world.proofs.lists(&book.world.target, now, SignedDuration::ZERO),
        Reason::Aborted { .. } => book.aborted,
        // Somebody who has to go back waits for good, which is looked at for itself.
        Reason::LeftAlone { .. } => book.world.newest().is_some_and(|newest| newest.goes_back),
        Reason::TooManyFailed { stage: Some(stage), limit, .. } => {
            nodes_of(book, stage).filter(|(_, node)| node.state() == State::UpgradeFailed).count() > *limit
        }
        Reason::TooManyFailed { limit, .. } => out_for_good(book, name) > *limit,
        // Given back, it tries again much later.
        Reason::BudgetBlocks { until: Some(until), .. } => now.duration_until(*until) > NEXT_TRY_MIN,
        Reason::BudgetBlocks { .. }
        | Reason::BudgetNever { .. }
        | Reason::NoSlot { limit: Limit::Stage { moving: false, .. }, .. } => out_anywhere(book, name),
        // Its driver does not come up: NVSentinel waits for that, and we do not take a node from it (seed 41879:
        // not even for a version that might come up).
        Reason::Quarantined { .. } => node.quarantined && has_driver_down(book, name),
        _ => false,
    }
}

/// A stage does not go on by itself: nobody is in it, or somebody in it waits for good (which is looked at for itself),
/// or its nodes cannot be judged.
fn stands(book: &Sight<'_>, stage: &str) -> bool {
    let Some(newest) = book.world.newest() else { return false };
    let phase = newest.stages.get(stage).map(|stage| stage.phase.as_str()).unwrap_or_default();
    let mut nodes = nodes_of(book, stage).peekable();
    match phase {
        "Baking" => bakes_for_ever(book, newest, stage),
        "Proving" => proves_for_ever(book, stage),
        "Moving" if nodes.peek().is_none() => true,
        // Of nodes that have all failed, or are left out, nothing can be learned; and if more have failed than may, for reasons
        // that say nothing of the version, a person has to look at them.
        "Moving" => {
            let waits = |node: &Node| matches!(node.state(), State::UpgradeRequired | State::Unknown);
            nodes_of(book, stage).all(|(_, node)| node.state() == State::UpgradeFailed)
                || is_held(book, stage)
                || nodes.any(|(_, node)| waits(node))
        }
        _ => false,
    }
}

/// More of its nodes have failed than may.
fn is_held(book: &Sight<'_>, stage: &str) -> bool {
    let total = nodes_of(book, stage).count();
    let failed = nodes_of(book, stage).filter(|(_, node)| node.state() == State::UpgradeFailed).count();
    let mut rules = book.world.moves.stages.iter().filter(|rules| rules.name == stage);
    rules.any(|rules| failed > rules.may_fail.of(total))
}

/// A node of the stage is not in service, or nobody asks Prometheus any more: that is not ours to mend, and it is told.
fn bakes_for_ever(book: &Sight<'_>, rollout: &Rollout, stage: &str) -> bool {
    let says = rollout.stages.get(stage).filter(|stage| stage.phase == "Baking");
    let in_service = |(name, node): (&str, &Node)| {
        node.state() == State::UpgradeFailed
            || (node.state() == State::UpgradeDone && node.ready && has_ready_driver(book, name))
    };
    let nobody = nodes_of(book, stage).all(|(_, node)| node.state() == State::UpgradeFailed);
    let called_off =
        rollout.aborted_since.is_some() || (rollout.back_since.is_some() && !rollout.is_cleared());
    // In a fleet that has no node any more there is nobody to look at (seeds 19119, 25754).
    let deserted = says.is_some() && !book.world.nodes.values().any(|node| node.member);
    let told = says.is_some_and(|says| says.message.is_some());
    // A node that had failed was left out, and is not any more (seed 13683).
    let held = is_held(book, stage);
    deserted || (told && (called_off || nobody || held || !nodes_of(book, stage).all(in_service)))
}

/// Nobody is in service on whom a gate could be asked.
fn proves_for_ever(book: &Sight<'_>, stage: &str) -> bool {
    let asked = |(_, node): (&str, &Node)| {
        node.state() == State::UpgradeDone && node.ready && !node.cordoned && !node.skipped
    };
    !nodes_of(book, stage).any(asked)
}

fn nodes_of<'a>(book: &'a Sight<'_>, stage: &str) -> impl Iterator<Item = (&'a str, &'a Node)> {
    let place = book.world.moves.stages.iter().position(|known| known.name == stage);
    let members = book.world.nodes.iter().filter(|(_, node)| node.member);
    members
        .filter(move |(name, _)| book.world.stage_of(name) == place && place.is_some())
        .map(|(name, node)| (name.as_str(), node))
}

/// The version that is asked for went wrong, nobody has cleared it, and nothing about it is under way.
fn is_condemned(book: &Sight<'_>) -> bool {
    let speaks = |rollout: &&Rollout| rollout.version == book.world.target && !rollout.is_cleared();
    let wrong = |rollout: &Rollout| rollout.back_since.is_some() || rollout.bad_since().is_some();
    let mut all = book.world.rollouts.values().filter(speaks);
    all.any(|rollout| wrong(rollout) && rollout.phase != "RollingBack")
}

/// Nodes that nobody will bring back: failed, or cordoned by a person. NVSentinel gives back a node that is well, but
/// leaves it cordoned if somebody had done that before (seed 40503).
fn out_for_good(book: &Sight<'_>, but: &str) -> usize {
    let nodes = book.world.nodes.iter().filter(|(name, node)| *name != but && node.member);
    nodes.filter(|(name, _)| stays_out(book, name)).count()
}

/// The same in any pool: the work that has no place there is what a budget here waits for.
fn out_anywhere(book: &Sight<'_>, but: &str) -> bool {
    let mut pools = book.book.worlds.iter().map(|world| Sight { world, ..*book });
    pools.any(|pool| out_for_good(&pool, but) > 0)
}

fn stays_out(book: &Sight<'_>, name: &str) -> bool {
    book.world.nodes.get(name).is_some_and(|node| match node.state() {
        State::UpgradeFailed => true,
        // It had failed, and is not tried again with what is asked for now (seed 11308).
        State::UpgradeRequired if node.cordoned_by_us() => is_given_up(book, name, node),
        _ if !node.quarantined || node.quarantined_cordoned => node.foreign_cordon,
        _ => node.foreign_cordon && !has_ready_driver(book, name),
    })
}

/// The version that it waits for does not come to anybody.
fn is_given_up(book: &Sight<'_>, name: &str, node: &Node) -> bool {
    let of_the_version = |reason: &&Reason| {
        matches!(
            reason,
            Reason::NotInMatrix { .. }
                | Reason::Condemned { .. }
                | Reason::StageFailed { .. }
                | Reason::StageClosed { .. }
                | Reason::Aborted { .. }
        )
    };
    let reason = book.reason(name).filter(of_the_version);
    reason.is_some_and(|reason| waits_for_good(book, (name, node), reason))
}

fn has_ready_driver(book: &Sight<'_>, node: &str) -> bool {
    book.world.pods_on(node).any(|(_, pod)| pod.role == Role::Driver && pod.ready)
}

fn has_driver_down(book: &Sight<'_>, node: &str) -> bool {
    let mut drivers = book.world.pods_on(node).filter(|(_, pod)| pod.role == Role::Driver && !pod.deleting);
    drivers.any(|(_, pod)| !pod.ready)
}

/// What of ours is still on a node that is not on a visit.
fn left_on(node: &Node) -> Option<&'static str> {
    match () {
        () if node.cordoned && !node.foreign_cordon && !node.quarantined && !node.keep_cordoned => {
            Some("nobody lifted our cordon")
        }
        () if node.held => Some("autoscalers are still kept off it"),
        () if node.shield_recorded => Some("NVSentinel is still kept off it"),
        () => None,
    }
}

fn not_done(book: &Sight<'_>, name: &str, node: &Node) -> Option<String> {
    if node.visit.is_some() {
        return Some("it is done, and its visit is not over".to_owned());
    }
    if let Some(what) = left_on(node) {
        return Some(format!("it is done, and {what}"));
    }
    if let Some(reason @ Reason::ClientsStale { remedy: Remedy::ItSelf, .. }) = book.reason(name) {
        return Some(format!("it is done, but {reason}"));
    }
    let mut drivers = book.world.pods_on(name).filter(|(_, pod)| pod.role == Role::Driver && !pod.deleting);
    match drivers.next() {
        None => Some("it is done, and has no driver".to_owned()),
        Some((_, driver)) if !is_of(&driver.image, &book.world.target) => {
            Some(format!("it is done, and runs {} instead of {}", driver.image, book.world.target))
        }
        // A driver that breaks after a visit is not ours to mend; that it is told is.
        Some((_, driver)) if !driver.ready => match book.reason(name) {
            Some(Reason::UpToDate | Reason::SameVersion { .. }) | None => {
                Some("it is done, and its driver is not ready".to_owned())
            }
            Some(_) => None,
        },
        Some(_) => None,
    }
}
