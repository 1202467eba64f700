//! The one loop that every actor runs: fold what happened, turn it into tasks, look at each task, write, wait.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::BoxStream;
use tokio::time::{Instant, sleep_until};

use super::cache::{Source, changed};
use super::queue::Queue;
use super::write::{Write, run_all};

/// First and longest wait after a failed write; doubled in between, with jitter.
const RETRY_FIRST: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(8);

/// Somebody who works in the cluster.
pub(super) trait Actor: Send + Sized + 'static {
    /// What it looks at in one go: an object, or a part of one.
    type Task: Ord + Clone + Debug + Send + 'static;

    /// What it watches.
    fn sources(&mut self) -> Vec<&mut dyn Source>;

    /// Turns the changes since the last call into tasks. Called again after each round of writes.
    fn route(&mut self, queue: &mut Queue<Self::Task>);

    /// Looks at one thing and says what to write.
    fn look(&mut self, task: &Self::Task, queue: &mut Queue<Self::Task>) -> Vec<Write<Self>>;
}

/// Chance, from a seed, for waits after failures.
#[derive(Debug)]
struct Retries<T> {
    attempts: BTreeMap<T, u32>,
    chance: fastrand::Rng,
}

impl<T: Ord + Clone> Retries<T> {
    fn next_at(&mut self, task: &T) -> Instant {
        let attempts = self.attempts.entry(task.clone()).or_insert(0);
        let longest = RETRY_FIRST.saturating_mul(1 << (*attempts).min(7)).min(RETRY_MAX);
        *attempts += 1;
        Instant::now() + longest.mul_f64(0.5 + self.chance.f64() / 2.0)
    }
}

/// Runs an actor until its task is aborted. `nudges` are tasks that come from outside the API.
pub(super) async fn drive<A: Actor>(mut actor: A, seed: u64, mut nudges: BoxStream<'static, A::Task>) {
    let mut queue = Queue::new();
    let mut retries = Retries { attempts: BTreeMap::new(), chance: fastrand::Rng::with_seed(seed) };
    loop {
        while work(&mut actor, &mut queue, &mut retries).await {}
        let wake_at = queue.next_at();
        let mut sources = actor.sources();
        tokio::select! {
            biased;
            () = changed(&mut sources) => {}
            Some(task) = nudges.next() => queue.add(task),
            () = at(wake_at) => {}
        }
        drop(sources);
        actor.route(&mut queue);
    }
}

/// One round; returns whether there was anything to do.
async fn work<A: Actor>(actor: &mut A, queue: &mut Queue<A::Task>, retries: &mut Retries<A::Task>) -> bool {
    let tasks = queue.take_due(Instant::now());
    if tasks.is_empty() {
        return false;
    }
    let mut writes = Vec::new();
    for task in &tasks {
        writes.extend(actor.look(task, queue).into_iter().map(|write| (task.clone(), write)));
    }
    let failed = run_all(actor, writes).await;
    for task in &tasks {
        if !failed.iter().any(|(failed, _)| failed == task) {
            retries.attempts.remove(task);
        }
    }
    for (task, failure) in failed {
        if failure.is_ordinary() {
            tracing::debug!(?task, error = &failure as &dyn std::error::Error, "write lost a race");
        } else {
            tracing::warn!(?task, error = &failure as &dyn std::error::Error, "write failed, trying again");
        }
        let next_at = retries.next_at(&task);
        queue.add_at(task, next_at);
    }
    actor.route(queue);
    true
}

async fn at(instant: Option<Instant>) {
    match instant {
        Some(instant) => sleep_until(instant).await,
        None => std::future::pending().await,
    }
}
