//! What an actor has to look at, now or later.
//!
//! A task is in the queue at most once, in order, so that a burst of events about one object is one look at it.

use std::collections::{BTreeMap, BTreeSet};

use tokio::time::Instant;

/// Tasks that are due, and tasks that become due.
#[derive(Debug)]
pub(super) struct Queue<T> {
    due: BTreeSet<T>,
    later: BTreeSet<(Instant, T)>,
    when: BTreeMap<T, Instant>,
}

impl<T: Ord + Clone> Queue<T> {
    pub(super) fn new() -> Self {
        Self { due: BTreeSet::new(), later: BTreeSet::new(), when: BTreeMap::new() }
    }

    /// Look at it in the next pass.
    pub(super) fn add(&mut self, task: T) {
        self.due.insert(task);
    }

    /// Look at it at `at`, or earlier if that was asked for already.
    pub(super) fn add_at(&mut self, task: T, at: Instant) {
        match self.when.get(&task) {
            Some(known) if *known <= at => return,
            Some(known) => {
                self.later.remove(&(*known, task.clone()));
            }
            None => {}
        }
        self.when.insert(task.clone(), at);
        self.later.insert((at, task));
    }

    /// Everything due by `now`, in order.
    pub(super) fn take_due(&mut self, now: Instant) -> BTreeSet<T> {
        while let Some((at, _)) = self.later.first() {
            if *at > now {
                break;
            }
            if let Some((_, task)) = self.later.pop_first() {
                self.when.remove(&task);
                self.due.insert(task);
            }
        }
        std::mem::take(&mut self.due)
    }

    /// When there is something to do without anything happening.
    pub(super) fn next_at(&self) -> Option<Instant> {
        self.later.first().map(|(at, _)| *at)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_task_waits_once_and_for_the_earliest_time_asked() {
        let start = Instant::now();
        let mut queue = Queue::new();
        queue.add_at("node", start + Duration::from_secs(5));
        queue.add_at("node", start + Duration::from_secs(2));
        queue.add_at("node", start + Duration::from_secs(9));
        assert_eq!(queue.next_at(), Some(start + Duration::from_secs(2)));
        assert!(queue.take_due(start).is_empty());
        assert_eq!(queue.take_due(start + Duration::from_secs(2)).into_iter().collect::<Vec<_>>(), ["node"]);
        assert_eq!(queue.next_at(), None);
    }
}
