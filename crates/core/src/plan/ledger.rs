//! The slots: how many nodes may start now, and which.
//!
//! `free = min(maxParallelUpgrades − moving, maxUnavailable − out)`. Nodes that somebody else took out count as out.
//! A node that is out already costs no more of `maxUnavailable`, but it starts only through here, like any other.

use super::members::Start;
use super::stages::Room;
use crate::names::NodeName;
use crate::policy::{Amount, Policy};
use crate::reason::{Limit, Reason};

/// The slots of one pool in one pass.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    /// Nodes that should run the driver.
    pub total: usize,
    /// Nodes between slot and release.
    pub moving: usize,
    /// Nodes out of service, by whatever cause.
    pub out: usize,
    /// Nodes that somebody else took out.
    pub foreign: Vec<NodeName>,
    /// `maxParallelUpgrades`; `None` if it sets no limit.
    pub max_parallel: Option<u32>,
    /// `maxUnavailable`, as written.
    pub max_unavailable: Option<Amount>,
    /// `maxUnavailable` in nodes.
    pub max_out: usize,
    /// Nodes that failed.
    pub failed: usize,
    /// So many may fail before no more are started.
    pub max_failed: usize,
    /// Those that start now, in their order.
    pub granted: Vec<NodeName>,
    /// How many wait; each one's place is in its reason.
    pub waiting: usize,
    /// Of those that start now, the ones that were in service until now.
    newly_out: usize,
}

/// A node that would start if it could.
#[expect(clippy::struct_excessive_bools, reason = "facts that have nothing to do with each other")]
pub(super) struct Candidate<'a> {
    /// Its place among the pool's members, who are in the order of their names.
    pub(super) index: usize,
    pub(super) name: &'a NodeName,
    /// Its stage's place.
    pub(super) stage: usize,
    /// It may start although its stage is not open.
    pub(super) whatever_stage: bool,
    pub(super) healthy: bool,
    pub(super) already_out: bool,
    pub(super) pods: u32,
    pub(super) devices: u32,
    pub(super) own: bool,
    /// Given back once already, because its pods could not leave.
    pub(super) released: bool,
    /// Tried again by a person or a new version, or without any driver: failures of others do not hold it.
    pub(super) whatever_failed: bool,
}

impl Candidate<'_> {
    /// Stage by stage; broken nodes first, then the cheapest disruption, then by name; last the controller's own node,
    /// and before it those that were given back.
    fn rank(&self) -> (usize, bool, bool, bool, u32, u32, usize) {
        (self.stage, self.own, self.released, self.healthy, self.pods, self.devices, self.index)
    }
}

impl Ledger {
    pub(super) fn open(policy: &Policy) -> Self {
        Self {
            max_parallel: Some(policy.max_parallel).filter(|limit| *limit > 0),
            max_unavailable: Some(policy.max_unavailable),
            ..Self::default()
        }
    }

    /// Enters one node of the pool. All are in before the first slot is granted.
    pub(super) fn count(&mut self, node: &NodeName, moving: bool, out: bool, foreign: bool) {
        self.total += 1;
        self.max_out = self.max_unavailable.map_or(self.max_out, |amount| amount.of(self.total));
        self.moving += usize::from(moving);
        self.out += usize::from(out);
        if foreign {
            self.foreign.push(node.clone());
        }
    }

    /// How many more could start, if each of them were in service now.
    pub fn free(&self) -> usize {
        let parallel =
            self.max_parallel.map_or(usize::MAX, |limit| (limit as usize).saturating_sub(self.moving));
        parallel.min(self.max_out.saturating_sub(self.out))
    }

    /// Gives slots to candidates in their order, as long as all limits allow: those of the pool, and those of a stage.
    pub(super) fn grant(
        &mut self,
        mut candidates: Vec<Candidate<'_>>,
        mut rooms: Vec<Room>,
    ) -> Vec<(usize, Start)> {
        candidates.sort_unstable_by_key(Candidate::rank);
        let mut moving = self.moving;
        let mut starts = Vec::with_capacity(candidates.len());
        for candidate in candidates {
            // More of the same would fail too. Whoever tries a node again has done something about it.
            if self.failed > self.max_failed && !candidate.whatever_failed {
                let reason = Reason::TooManyFailed { failed: self.failed, limit: self.max_failed };
                starts.push((candidate.index, Start::No(Box::new(reason))));
                continue;
            }
            let parallel_ok = self.max_parallel.is_none_or(|limit| moving < limit as usize);
            // With the limit at 0 nothing starts, not even what is out already: that is the brake.
            let out_ok = if candidate.already_out {
                self.max_out > 0
            } else {
                self.out + self.newly_out < self.max_out
            };
            let room = rooms.get_mut(candidate.stage);
            let full = room.as_ref().and_then(|room| room.full(candidate.already_out));
            if parallel_ok && out_ok && full.is_none() {
                if let Some(room) = room {
                    room.take(candidate.already_out);
                }
                moving += 1;
                self.newly_out += usize::from(!candidate.already_out);
                self.granted.push(candidate.name.clone());
                starts.push((candidate.index, Start::Granted));
            } else {
                let limit = full.filter(|_| parallel_ok && out_ok);
                starts.push((candidate.index, Start::Waits { ahead: self.waiting, limit }));
                self.waiting += 1;
            }
        }
        starts
    }

    /// The limit that keeps waiting nodes waiting.
    pub fn binding(&self) -> Limit {
        match self.max_parallel {
            Some(limit) if self.moving + self.granted.len() >= limit as usize => {
                Limit::MaxParallelUpgrades(limit)
            }
            _ => Limit::MaxUnavailable {
                limit: self.max_out,
                out: self.out + self.newly_out,
                foreign: self.foreign.first().cloned(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Case {
        parallel: u32,
        unavailable: Amount,
        /// Nodes on their walk, all of them out.
        moving: usize,
        /// Nodes that somebody else took out.
        foreign: usize,
        /// Candidates in service, and candidates that are out already.
        candidates: (usize, usize),
        start: usize,
    }

    /// The worked examples of NVIDIA's own tests, then those on which pitcrew differs on purpose.
    #[test]
    #[expect(clippy::too_many_lines, reason = "a table")]
    fn slots_are_the_smaller_of_both_limits() {
        let percent = Amount::Percent;
        let cases = [
            Case {
                parallel: 3,
                unavailable: percent(100),
                moving: 0,
                foreign: 0,
                candidates: (5, 0),
                start: 3,
            },
            Case {
                parallel: 4,
                unavailable: percent(100),
                moving: 3,
                foreign: 0,
                candidates: (2, 0),
                start: 1,
            },
            Case {
                parallel: 4,
                unavailable: Amount::Nodes(4),
                moving: 3,
                foreign: 0,
                candidates: (2, 0),
                start: 1,
            },
            Case {
                parallel: 0,
                unavailable: percent(50),
                moving: 0,
                foreign: 2,
                candidates: (3, 0),
                start: 1,
            },
            Case {
                parallel: 3,
                unavailable: Amount::Nodes(2),
                moving: 0,
                foreign: 0,
                candidates: (5, 0),
                start: 2,
            },
            Case {
                parallel: 0,
                unavailable: percent(100),
                moving: 0,
                foreign: 0,
                candidates: (3, 2),
                start: 5,
            },
            Case {
                parallel: 0,
                unavailable: percent(50),
                moving: 0,
                foreign: 0,
                candidates: (3, 2),
                start: 3,
            },
            // NVIDIA's starts any number of cordoned nodes past every limit (W5).
            Case {
                parallel: 1,
                unavailable: percent(100),
                moving: 0,
                foreign: 0,
                candidates: (0, 5),
                start: 1,
            },
            Case {
                parallel: 0,
                unavailable: Amount::Nodes(0),
                moving: 0,
                foreign: 0,
                candidates: (2, 3),
                start: 0,
            },
        ];
        for (index, case) in cases.iter().enumerate() {
            let Case { parallel, unavailable, moving, foreign, candidates: (inside, outside), start } = *case;
            let total = moving + foreign + inside + outside;
            let mut ledger = Ledger {
                total,
                moving,
                out: moving + foreign + outside,
                max_parallel: Some(parallel).filter(|p| *p > 0),
                max_out: unavailable.of(total),
                ..Ledger::default()
            };
            let names: Vec<NodeName> =
                (0..inside + outside).map(|i| NodeName::from(format!("n{i}"))).collect();
            let candidate = |(i, name)| Candidate {
                index: i,
                name,
                stage: 0,
                whatever_stage: false,
                healthy: true,
                already_out: i >= inside,
                pods: 0,
                devices: 0,
                own: false,
                released: false,
                whatever_failed: false,
            };
            ledger.grant(names.iter().enumerate().map(candidate).collect(), vec![]);
            assert_eq!(ledger.granted.len(), start, "case {index}");
        }
    }

    #[test]
    fn order_is_broken_first_then_cheapest_then_name_and_own_node_last() {
        let names = ["broken", "early", "idle", "late", "own"].map(NodeName::from);
        let plain = |index: usize| Candidate {
            index,
            name: &names[index],
            stage: 0,
            whatever_stage: false,
            healthy: true,
            already_out: false,
            pods: 1,
            devices: 1,
            own: false,
            released: false,
            whatever_failed: false,
        };
        let candidates = vec![
            Candidate { own: true, healthy: false, ..plain(4) },
            plain(3),
            plain(1),
            Candidate { pods: 0, devices: 0, ..plain(2) },
            Candidate { healthy: false, pods: 9, ..plain(0) },
        ];
        let mut ledger = Ledger { total: 5, max_out: 5, ..Ledger::default() };
        ledger.grant(candidates, vec![]);
        let order: Vec<&str> = ledger.granted.iter().map(NodeName::as_str).collect();
        assert_eq!(order, ["broken", "idle", "early", "late", "own"]);
    }
}
