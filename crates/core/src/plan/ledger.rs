//! The slots: how many nodes may start now, and which. Nodes that go together ([`waves`]) get theirs together or not at
//! all.
//!
//! `free = min(maxParallelUpgrades − moving, maxUnavailable − out)`. Nodes that somebody else took out count as out.
//! A node that is out already costs no more of `maxUnavailable`, but it starts only through here, like any other.

use std::collections::BTreeSet;

use super::members::{Early, Start};
use super::stages::Room;
use super::waves::{self, Cost, Job, Ties, Unit};
use crate::names::NodeName;
use crate::policy::{Amount, Policy};
use crate::reason::{Foreign, Limit, Narrow, Reason};

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
    pub foreign: Vec<Foreign>,
    /// `maxParallelUpgrades`; `None` if it sets no limit.
    pub max_parallel: Option<u32>,
    /// `maxUnavailable`, as written.
    pub max_unavailable: Option<Amount>,
    /// `maxUnavailable` in nodes.
    pub max_out: usize,
    /// Nodes that failed.
    pub failed: usize,
    /// Of these, the ones whose failure says nothing about the version.
    pub blameless: usize,
    /// So many may fail before no more are started.
    pub max_failed: usize,
    /// Those that start now, in their order.
    pub granted: Vec<NodeName>,
    /// How many wait; each one's place is in its reason.
    pub waiting: usize,
    /// Of those that start now, the ones that were in service until now.
    newly_out: usize,
    /// What a unit of several nodes waits for: the slots that become free are kept for it.
    kept_by: Option<Limit>,
    /// Groups in which such a unit waits.
    kept_groups: BTreeSet<String>,
}

/// A node that would start if it could.
#[expect(clippy::struct_excessive_bools, reason = "facts that have nothing to do with each other")]
pub(super) struct Candidate<'a> {
    /// Its place among the pool's members, who are in the order of their names.
    pub(super) index: usize,
    pub(super) name: &'a NodeName,
    /// Its stage's place, in a pool with stages.
    pub(super) stage: Option<usize>,
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
    /// The atom that it goes with.
    pub(super) atom: Option<&'a str>,
    /// The jobs that its start interrupts, as far as their nodes go together.
    pub(super) jobs: Vec<Job<'a>>,
    /// The group of which only so many may be out.
    pub(super) spread: Option<&'a str>,
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
    pub(super) fn count(&mut self, moving: bool, out: bool, foreign: Option<Foreign>) {
        self.total += 1;
        self.max_out = self.max_unavailable.map_or(self.max_out, |amount| amount.of(self.total));
        self.moving += usize::from(moving);
        self.out += usize::from(out);
        self.foreign.extend(foreign);
    }

    /// A node that has come up with the new driver by itself is taken out, whatever slots there are; but never a whole fleet
    /// at once: the others follow when there is room.
    pub(super) fn take_in(&mut self, already_out: bool, early: Early) -> Start {
        if !already_out && self.out >= self.max_out.max(1) {
            return Start::Waits { ahead: 0, together: 1, limit: Some(self.unavailable()) };
        }
        self.moving += 1;
        self.out += usize::from(!already_out);
        Start::Early(early)
    }

    /// How many more could start, if each of them were in service now.
    pub fn free(&self) -> usize {
        let parallel =
            self.max_parallel.map_or(usize::MAX, |limit| (limit as usize).saturating_sub(self.moving));
        parallel.min(self.max_out.saturating_sub(self.out))
    }

    /// Gives slots to units of candidates in their order, as long as all limits allow. `unmarked` nodes are about to be
    /// told that they are due: the controller's own node goes after them too.
    pub(super) fn grant<'a>(
        &mut self,
        candidates: Vec<Candidate<'a>>,
        rooms: &mut [Room],
        ties: &mut Ties<'a>,
        unmarked: usize,
    ) -> Vec<(usize, Start)> {
        let mut starts = Vec::with_capacity(candidates.len());
        let mut units = waves::atoms(candidates, ties);
        units.retain(|unit| {
            let refusal = self.refusal(unit, rooms, ties);
            starts.extend(refusal.iter().flat_map(|reason| refuse(unit, reason)));
            refusal.is_none()
        });
        let take = |cost: &Cost<'_>| self.will_take(cost) && ties.will_take(cost) && will_take(rooms, cost);
        // A ramp is there to try a version on a few first: a job that runs on all of them must not undo that.
        let ramps = |cost: &Cost<'_>| {
            cost.stages().all(|(stage, nodes, _)| rooms.get(stage).is_none_or(|room| room.ramps_to(nodes)))
        };
        let units = waves::gangs(units, |cost| take(cost) && ramps(cost));
        let (own, units): (Vec<_>, Vec<_>) =
            units.into_iter().partition(|unit| unmarked > 0 && unit.has_own());
        for unit in units {
            self.grant_unit(&unit, rooms, ties, &mut starts);
        }
        for unit in own {
            self.wait(&unit, unmarked, None, &mut starts);
        }
        starts
    }

    /// Why none of a unit's nodes starts, whatever slots are free.
    fn refusal(&self, unit: &Unit<'_>, rooms: &[Room], ties: &Ties<'_>) -> Option<Reason> {
        // More of the same would fail too. Whoever tries a node again has done something about it.
        if self.failed > self.max_failed && !unit.whatever_failed() {
            return Some(Reason::TooManyFailed { stage: None, failed: self.failed, limit: self.max_failed });
        }
        ties.held(unit).or_else(|| self.too_large(unit, rooms, ties))
    }

    /// An atom that no limit could ever take as one, even if nobody else were out. It is never split.
    fn too_large(&self, unit: &Unit<'_>, rooms: &[Room], ties: &Ties<'_>) -> Option<Reason> {
        let (atom, nodes) = ties.atom_of(unit).filter(|(_, nodes)| *nodes > 1)?;
        let parallel = self.max_parallel.map(|limit| limit as usize).filter(|limit| nodes > *limit);
        // With the limit at 0 nothing starts at all: that is the brake, and not a matter of size.
        let out = Some(self.max_out).filter(|limit| unit.cost.new > 0 && *limit > 0 && nodes > *limit);
        let of_stage =
            || unit.cost.stages().find_map(|(stage, nodes, new)| rooms.get(stage)?.narrow(nodes, new));
        let (narrow, limit) = parallel
            .map(|limit| (Narrow::MaxParallelUpgrades, limit))
            .or_else(of_stage)
            .or_else(|| out.map(|limit| (Narrow::MaxUnavailable, limit)))
            .or_else(|| ties.too_small(&unit.cost).map(|limit| (Narrow::SpreadMax, limit)))?;
        Some(Reason::AtomTooLarge { atom, nodes, narrow, limit })
    }

    fn grant_unit<'a>(
        &mut self,
        unit: &Unit<'a>,
        rooms: &mut [Room],
        ties: &mut Ties<'a>,
        starts: &mut Vec<(usize, Start)>,
    ) {
        let Unit { cost, nodes, .. } = unit;
        // Smaller units must not take, one by one, the places that a larger one waits for.
        let attainable = nodes.len() > 1 && self.will_take(cost) && ties.will_take(cost);
        let group = cost.groups().find(|group| self.kept_groups.contains(*group) && cost.new > 0);
        let full = group.map(|group| ties.spread_full(group)).or_else(|| ties.full(cost));
        if let Some(reason) = full {
            if attainable {
                self.kept_groups.extend(cost.groups().map(str::to_owned));
            }
            starts.extend(refuse(unit, &reason));
            return;
        }
        let takes_nothing = cost.new == 0 && self.max_parallel.is_none();
        if !self.has_room(cost) || (self.kept_by.is_some() && !takes_nothing) {
            if attainable && self.kept_by.is_none() {
                self.kept_by = Some(self.short_of(cost));
            }
            self.wait(unit, 0, None, starts);
            return;
        }
        let full = cost.stages().find_map(|(stage, nodes, new)| rooms.get(stage)?.full(nodes, new));
        if full.is_some() {
            self.wait(unit, 0, full.as_ref(), starts);
            return;
        }
        for (stage, nodes, new) in cost.stages() {
            rooms.get_mut(stage).into_iter().for_each(|room| room.take(nodes, new));
        }
        self.newly_out += cost.new;
        ties.take(unit);
        for node in nodes {
            self.granted.push(node.name.clone());
            starts.push((node.index, Start::Granted));
        }
    }

    fn wait(
        &mut self,
        unit: &Unit<'_>,
        unmarked: usize,
        limit: Option<&Limit>,
        starts: &mut Vec<(usize, Start)>,
    ) {
        let (ahead, together) = (self.waiting + unmarked, unit.nodes.len());
        let waits = || Start::Waits { ahead, together, limit: limit.cloned() };
        starts.extend(unit.nodes.iter().map(|node| (node.index, waits())));
        self.waiting += together;
    }

    /// Both limits take a unit now.
    fn has_room(&self, cost: &Cost<'_>) -> bool {
        let moving = self.moving + self.granted.len() + cost.nodes;
        // With the limit at 0 nothing starts, not even what is out already: that is the brake.
        let out_ok = if cost.new == 0 {
            self.max_out > 0
        } else {
            self.out + self.newly_out + cost.new <= self.max_out
        };
        self.max_parallel.is_none_or(|limit| moving <= limit as usize) && out_ok
    }

    /// Both limits could take a unit once the nodes that are on their walk are back.
    fn will_take(&self, cost: &Cost<'_>) -> bool {
        let standing = self.out.saturating_sub(self.moving);
        self.max_parallel.is_none_or(|limit| cost.nodes <= limit as usize)
            && (cost.new == 0 || standing + cost.new <= self.max_out)
    }

    /// The limit that a unit waits for.
    fn short_of(&self, cost: &Cost<'_>) -> Limit {
        let moving = self.moving + self.granted.len() + cost.nodes;
        match self.max_parallel {
            Some(limit) if moving > limit as usize => Limit::MaxParallelUpgrades(limit),
            _ => self.unavailable(),
        }
    }

    fn unavailable(&self) -> Limit {
        Limit::MaxUnavailable {
            limit: self.max_out,
            out: self.out + self.newly_out,
            foreign: self.foreign.first().cloned(),
        }
    }

    /// The limit that keeps waiting nodes waiting.
    pub fn binding(&self) -> Limit {
        match (&self.kept_by, self.max_parallel) {
            (Some(limit), _) => limit.clone(),
            (None, Some(limit)) if self.moving + self.granted.len() >= limit as usize => {
                Limit::MaxParallelUpgrades(limit)
            }
            _ => self.unavailable(),
        }
    }
}

/// The stages of a unit could take it once the nodes that are on their walk are back.
fn will_take(rooms: &[Room], cost: &Cost<'_>) -> bool {
    cost.stages()
        .all(|(stage, nodes, new)| rooms.get(stage).is_none_or(|room| room.narrow(nodes, new).is_none()))
}

/// None of a unit's nodes starts.
fn refuse(unit: &Unit<'_>, reason: &Reason) -> impl Iterator<Item = (usize, Start)> {
    unit.nodes.iter().map(move |node| (node.index, Start::No(Box::new(reason.clone()))))
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
                stage: None,
                whatever_stage: false,
                healthy: true,
                already_out: i >= inside,
                pods: 0,
                devices: 0,
                own: false,
                released: false,
                whatever_failed: false,
                atom: None,
                jobs: vec![],
                spread: None,
            };
            ledger.grant(names.iter().enumerate().map(candidate).collect(), &mut [], &mut Ties::default(), 0);
            assert_eq!(ledger.granted.len(), start, "case {index}");
        }
    }

    #[test]
    fn order_is_broken_first_then_cheapest_then_name_and_own_node_last() {
        let names = ["broken", "early", "idle", "late", "own"].map(NodeName::from);
        let plain = |index: usize| Candidate {
            index,
            name: &names[index],
            stage: None,
            whatever_stage: false,
            healthy: true,
            already_out: false,
            pods: 1,
            devices: 1,
            own: false,
            released: false,
            whatever_failed: false,
            atom: None,
            jobs: vec![],
            spread: None,
        };
        let candidates = vec![
            Candidate { own: true, healthy: false, ..plain(4) },
            plain(3),
            plain(1),
            Candidate { pods: 0, devices: 0, ..plain(2) },
            Candidate { healthy: false, pods: 9, ..plain(0) },
        ];
        let mut ledger = Ledger { total: 5, max_out: 5, ..Ledger::default() };
        ledger.grant(candidates, &mut [], &mut Ties::default(), 0);
        let order: Vec<&str> = ledger.granted.iter().map(NodeName::as_str).collect();
        assert_eq!(order, ["broken", "idle", "early", "late", "own"]);
    }
}
