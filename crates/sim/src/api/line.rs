//! The lines over which watches are told: cut, stalled or noisy, for one user at a time.

use std::collections::BTreeMap;

use tokio::time::Instant;

use super::store::{Store, Table};
use super::{Shared, lock};

/// What is wrong with the watches of one user.
#[derive(Debug, Default)]
pub(super) struct Line {
    /// How often they were cut. A watch from before the last cut ends.
    pub(super) cuts: u64,
    /// Nothing of these resources comes through before then.
    pub(super) stalled: BTreeMap<String, Instant>,
    /// Every event comes twice.
    pub(super) doubles: bool,
    /// History up to this version is gone for this user.
    pub(super) forgotten: u64,
}

/// A handle to the lines of all users.
#[derive(Clone)]
pub struct Lines(pub(super) Shared);

impl Lines {
    /// Ends the watches of `user`; it may begin new ones where the old ones ended.
    pub fn cut(&self, user: &str) {
        self.change(user, |line| line.cuts += 1);
        let store = lock(&self.0);
        store.tables.values().for_each(Table::wake_all);
    }

    /// Ends the watches of `user`, and drops the history for it: it gets 410 and lists again.
    pub fn forget(&self, user: &str) {
        let version = lock(&self.0).version;
        self.change(user, |line| line.forgotten = version);
        self.cut(user);
    }

    /// Keeps changes of `resource` (`pods`, `daemonsets.apps`) from `user` until then.
    pub fn stall(&self, user: &str, resource: &str, until: Instant) {
        self.change(user, |line| {
            line.stalled.insert(resource.to_owned(), until);
        });
    }

    /// Sends every event to `user` twice, or once again.
    pub fn double(&self, user: &str, doubles: bool) {
        self.change(user, |line| line.doubles = doubles);
    }

    /// Everything works again.
    pub fn mend(&self) {
        let mut store = lock(&self.0);
        for line in store.lines.values_mut() {
            line.stalled.clear();
            line.doubles = false;
        }
    }

    fn change(&self, user: &str, change: impl FnOnce(&mut Line)) {
        let store: &mut Store = &mut lock(&self.0);
        change(store.lines.entry(user.to_owned()).or_default());
    }
}
