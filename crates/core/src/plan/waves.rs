//! Who goes together: the nodes that could start, put into units of which each starts whole or not at all.
//!
//! An *atom* (an NVLink domain, a rack) is a promise: its nodes start in one wave, or none of them does, and it is never
//! split. A node of it that cannot start holds the others, and an atom that is larger than a limit waits until the limit
//! is raised. A node that was skipped or has failed does not belong to the wave: a person, or its failure, has taken it
//! out; tried again, it goes by itself as long as it is out. A *gang* (the nodes of one job) is a preference: it goes
//! together so that the job is interrupted once, but where the limits can never take it as one, or the ramp of its stage
//! does not yet, it is split into the largest parts that they can take. A *spread* group is the opposite of both: at most so many of its nodes are out at a time.

use std::collections::BTreeMap;

use super::ledger::Candidate;
use super::members::{Member, Start};
use super::walk::Decision;
use crate::action::{Action, NodePatch};
use crate::contract::State;
use crate::names::{NodeName, Uid};
use crate::policy::{Amount, Gang, Policy};
use crate::reason::Reason;
use crate::snapshot::{OwnerKind, Pod};

/// Every pod of a JobSet carries its name. Its pods are owned by Jobs of its own, one for each part.
const JOBSET_LABEL: &str = "jobset.sigs.k8s.io/jobset-name";

/// A job that runs on several nodes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Job<'a> {
    /// By the object that controls its pods.
    Owner(&'a Uid),
    /// By namespace and label value.
    Label(&'a str, &'a str),
}

impl<'a> Job<'a> {
    /// The job that a pod belongs to.
    pub(super) fn of(gang: &Gang, pod: &'a Pod) -> Option<Self> {
        match gang {
            Gang::Off => None,
            Gang::Owner => {
                let owner = pod.owner.as_ref().filter(|owner| owner.kind == OwnerKind::Job)?;
                Self::labelled(pod, JOBSET_LABEL).or(Some(Job::Owner(&owner.uid)))
            }
            Gang::Label(key) => Self::labelled(pod, key),
        }
    }

    fn labelled(pod: &'a Pod, key: &str) -> Option<Self> {
        let value = pod.labels.get(key).filter(|value| !value.is_empty())?;
        Some(Job::Label(&pod.name.namespace, value))
    }
}

/// The atoms and groups of one pool in one pass.
#[derive(Default)]
pub(super) struct Ties<'a> {
    atom_label: Option<&'a str>,
    atoms: BTreeMap<&'a str, Atom>,
    spread: Option<(&'a str, Amount)>,
    groups: BTreeMap<&'a str, Group>,
}

/// What is known about an atom besides its nodes that could start.
#[derive(Default)]
struct Atom {
    /// Some of its nodes are on their walk: the rest follows, whoever cannot.
    under_way: bool,
    /// Some of these have been cordoned.
    cordoned: bool,
    /// A node that should start and cannot, and why.
    holder: Option<(NodeName, Reason)>,
}

/// The nodes of one group that are out, by whatever cause.
#[derive(Default)]
struct Group {
    total: usize,
    out: Vec<NodeName>,
    /// Of these, the ones on their walk: they come back by themselves.
    moving: usize,
}

impl<'a> Ties<'a> {
    pub(super) fn new(policy: &'a Policy) -> Self {
        let topology = &policy.topology;
        Self {
            atom_label: topology.atom.as_deref(),
            spread: topology.spread.as_ref().map(|spread| (spread.label.as_str(), spread.max)),
            ..Self::default()
        }
    }

    /// Enters one node of the pool. All are in before the first slot is granted.
    pub(super) fn count(&mut self, policy: &Policy, member: &Member<'a>, moving: bool, out: bool) {
        if let Some(group) = policy.topology.group_of(member.node.labels()) {
            let group = self.groups.entry(group).or_default();
            group.total += 1;
            group.moving += usize::from(moving);
            if out {
                group.out.push(member.name.clone());
            }
        }
    }

    /// A node of this atom is on its walk, and has been cordoned for it or is about to be.
    pub(super) fn begin(&mut self, atom: &'a str, cordoned: bool) {
        let atom = self.atoms.entry(atom).or_default();
        atom.under_way = true;
        atom.cordoned |= cordoned;
    }

    /// Nodes of this atom have been cordoned for their walk.
    pub(super) fn is_cordoned(&self, atom: Option<&str>) -> bool {
        atom.and_then(|atom| self.atoms.get(atom)).is_some_and(|atom| atom.cordoned)
    }

    /// A node of this atom should start and cannot. The first one is named.
    pub(super) fn hold(&mut self, atom: &'a str, node: &NodeName, why: Reason) {
        self.atoms.entry(atom).or_default().holder.get_or_insert_with(|| (node.clone(), why));
    }

    fn under_way(&self, atom: Option<&str>) -> bool {
        atom.and_then(|atom| self.atoms.get(atom)).is_some_and(|atom| atom.under_way)
    }

    /// As people know it: `rack=r7`.
    fn atom_name(&self, atom: &str) -> String {
        format!("{}={atom}", self.atom_label.unwrap_or_default())
    }

    /// Why an atom does not go, if one of its nodes holds it.
    pub(super) fn held(&self, unit: &Unit<'_>) -> Option<Reason> {
        let name = unit.atom?;
        let atom = self.atoms.get(name).filter(|atom| !atom.under_way)?;
        let (node, why) = atom.holder.as_ref()?;
        Some(atom_waits(self.atom_name(name), node, why))
    }

    /// The name of a unit's atom and how many of its nodes go, if it is one.
    pub(super) fn atom_of(&self, unit: &Unit<'_>) -> Option<(String, usize)> {
        Some((self.atom_name(unit.atom?), unit.nodes.len()))
    }

    fn group_max(&self, group: &str) -> usize {
        let total = self.groups.get(group).map_or(0, |group| group.total);
        self.spread.map_or(usize::MAX, |(_, max)| max.of(total))
    }

    /// A group that could never take a unit, even if none of its nodes were out, and how many it takes.
    pub(super) fn too_small(&self, cost: &Cost<'_>) -> Option<usize> {
        let small = |(group, (all, new)): (&&str, &(usize, usize))| {
            Some(self.group_max(group)).filter(|max| *new > 0 && all > max)
        };
        cost.groups.iter().find_map(small)
    }

    /// Why a unit does not start, if one of its groups has too many nodes out.
    pub(super) fn full(&self, cost: &Cost<'_>) -> Option<Reason> {
        let is_full = |(group, (_, new)): (&&str, &(usize, usize))| {
            let out = self.groups.get(*group).map_or(0, |known| known.out.len());
            *new > 0 && out + new > self.group_max(group)
        };
        let group = *cost.groups.iter().find(|(group, needs)| is_full((group, needs)))?.0;
        Some(self.spread_full(group))
    }

    pub(super) fn spread_full(&self, group: &str) -> Reason {
        Reason::SpreadFull {
            group: format!("{}={group}", self.spread.map_or("", |(label, _)| label)),
            max: self.group_max(group),
            out: self.groups.get(group).map(|group| group.out.clone()).unwrap_or_default(),
        }
    }

    /// The groups could take a unit once the nodes that are on their walk are back.
    pub(super) fn will_take(&self, cost: &Cost<'_>) -> bool {
        let standing = |group: &str| self.groups.get(group).map_or(0, |known| known.out.len() - known.moving);
        cost.groups
            .iter()
            .all(|(group, (_, new))| *new == 0 || standing(group) + new <= self.group_max(group))
    }

    /// A node that was in service goes out now, and asks nobody for a slot.
    pub(super) fn take_in(&mut self, policy: &Policy, member: &Member<'a>) {
        let group = policy.topology.group_of(member.node.labels());
        if let Some(group) = group.and_then(|group| self.groups.get_mut(group)) {
            group.out.push(member.name.clone());
            group.moving += 1;
        }
    }

    /// A unit starts now.
    pub(super) fn take(&mut self, unit: &Unit<'a>) {
        for node in unit.nodes.iter().filter(|node| !node.already_out) {
            if let Some(group) = node.spread.and_then(|group| self.groups.get_mut(group)) {
                group.out.push(node.name.clone());
                group.moving += 1;
            }
        }
    }

    /// Nodes of an atom start together, or none of them does. What the ledger grants may still not be written in this
    /// pass: another write comes first, or the label is not what it should be.
    pub(super) fn keep_whole(
        &self,
        members: &[Member<'a>],
        decisions: &mut [Decision],
        taken: impl Fn(&NodeName) -> bool,
    ) {
        let mut late: BTreeMap<&str, (&NodeName, Reason)> = BTreeMap::new();
        for (member, decision) in members.iter().zip(&*decisions) {
            if let Some(atom) = self.granted_atom(member)
                && (!starts(decision) || taken(member.name))
            {
                late.entry(atom).or_insert((member.name, decision.reason.clone()));
            }
        }
        if late.is_empty() {
            return;
        }
        for (member, decision) in members.iter().zip(decisions) {
            let atom = self.granted_atom(member).filter(|_| starts(decision));
            if let Some((atom, (node, why))) = atom.and_then(|atom| Some((atom, late.get(atom)?))) {
                *decision = Decision::stay(atom_waits(self.atom_name(atom), node, why));
            }
        }
    }

    /// The atom that a node was granted a start with.
    fn granted_atom(&self, member: &Member<'a>) -> Option<&'a str> {
        let granted = matches!(member.start, Start::Granted);
        member.atom.filter(|atom| granted && !self.under_way(Some(atom)))
    }
}

fn starts(decision: &Decision) -> bool {
    decision.actions.iter().any(|action| {
        let to = |patch: &NodePatch| patch.to.as_ref().is_some_and(|to| to.to == State::CordonRequired);
        matches!(action, Action::PatchNode(patch) if to(patch))
    })
}

fn atom_waits(atom: String, node: &NodeName, why: &Reason) -> Reason {
    Reason::AtomWaits { atom, node: node.clone(), why: Box::new(why.clone()) }
}

/// What a unit takes of the limits.
#[derive(Clone, Default)]
pub(super) struct Cost<'a> {
    /// Nodes that start.
    pub(super) nodes: usize,
    /// Of these, the ones that are in service now.
    pub(super) new: usize,
    /// Both, in each group.
    groups: BTreeMap<&'a str, (usize, usize)>,
    /// Both, in each stage.
    stages: BTreeMap<usize, (usize, usize)>,
}

impl<'a> Cost<'a> {
    fn add(&mut self, node: &Candidate<'a>) {
        let new = usize::from(!node.already_out);
        self.nodes += 1;
        self.new += new;
        if let Some(group) = node.spread {
            let (all, out) = self.groups.entry(group).or_default();
            (*all, *out) = (*all + 1, *out + new);
        }
        if let Some(stage) = node.stage {
            let (all, out) = self.stages.entry(stage).or_default();
            (*all, *out) = (*all + 1, *out + new);
        }
    }

    /// The stages of its nodes, with how many start and how many of these are in service now.
    pub(super) fn stages(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        self.stages.iter().map(|(stage, (nodes, new))| (*stage, *nodes, *new))
    }

    pub(super) fn groups(&self) -> impl Iterator<Item = &'a str> {
        self.groups.keys().copied()
    }
}

/// Nodes that start together or not at all.
pub(super) struct Unit<'a> {
    pub(super) nodes: Vec<Candidate<'a>>,
    pub(super) cost: Cost<'a>,
    /// The atom, if it is one.
    atom: Option<&'a str>,
    /// Some of its atoms are on their walk already.
    under_way: bool,
}

/// Where a unit stands in the line.
type Rank = (Option<usize>, bool, bool, bool, bool, u32, u32, usize);

impl<'a> Unit<'a> {
    fn new(atom: Option<&'a str>, under_way: bool) -> Self {
        Self { nodes: Vec::with_capacity(1), cost: Cost::default(), atom, under_way }
    }

    fn push(&mut self, node: Candidate<'a>) {
        self.cost.add(&node);
        self.nodes.push(node);
    }

    /// Both together.
    fn join(mut self, other: Self) -> Self {
        self.under_way |= other.under_way;
        self.atom = None;
        other.nodes.into_iter().for_each(|node| self.push(node));
        self
    }

    /// What is begun is finished first. Then broken nodes, then the cheapest disruption, then by name; last the
    /// controller's own node, and before it those that were given back.
    fn rank(&self) -> Rank {
        let any = |is: fn(&Candidate<'_>) -> bool| self.nodes.iter().any(is);
        let sum = |of: fn(&Candidate<'_>) -> u32| self.nodes.iter().map(of).fold(0, u32::saturating_add);
        (
            self.nodes.iter().map(|node| node.stage).min().flatten(),
            !self.under_way,
            any(|node| node.own),
            any(|node| node.released),
            !any(|node| !node.healthy),
            sum(|node| node.pods),
            sum(|node| node.devices),
            self.nodes.iter().map(|node| node.index).min().unwrap_or_default(),
        )
    }

    pub(super) fn has_own(&self) -> bool {
        self.nodes.iter().any(|node| node.own)
    }

    /// Failures of others hold none of its nodes.
    pub(super) fn whatever_failed(&self) -> bool {
        self.nodes.iter().all(|node| node.whatever_failed)
    }
}

/// The nodes of each atom together, all others by themselves.
pub(super) fn atoms<'a>(candidates: Vec<Candidate<'a>>, ties: &Ties<'_>) -> Vec<Unit<'a>> {
    let mut units: Vec<Unit<'a>> = Vec::with_capacity(candidates.len());
    let mut known: BTreeMap<&str, usize> = BTreeMap::new();
    for node in candidates {
        let place = node.atom.map_or(units.len(), |atom| *known.entry(atom).or_insert(units.len()));
        if place == units.len() {
            units.push(Unit::new(node.atom, ties.under_way(node.atom)));
        }
        units[place].push(node);
    }
    units
}

/// Units that share a job together, as far as `fits` says that the limits could take them as one; all in their order.
pub(super) fn gangs<'a>(units: Vec<Unit<'a>>, fits: impl Fn(&Cost<'a>) -> bool) -> Vec<Unit<'a>> {
    let mut tree: Vec<usize> = (0..units.len()).collect();
    let mut first: BTreeMap<Job<'a>, usize> = BTreeMap::new();
    for (place, unit) in units.iter().enumerate() {
        for job in unit.nodes.iter().flat_map(|node| &node.jobs) {
            let other = *first.entry(*job).or_insert(place);
            let (one, other) = (root(&mut tree, place), root(&mut tree, other));
            // The smaller is the root: what comes out does not depend on the order of jobs.
            tree[one.max(other)] = one.min(other);
        }
    }
    let mut families: BTreeMap<usize, Vec<Unit<'a>>> = BTreeMap::new();
    for (place, unit) in units.into_iter().enumerate() {
        families.entry(root(&mut tree, place)).or_default().push(unit);
    }
    let mut families: Vec<Vec<Unit<'a>>> =
        families.into_values().map(|family| parts(family, &fits)).collect();
    // The parts of a job follow each other; only the controller's own node goes after all others.
    families.sort_by_cached_key(|parts| parts.first().map(Unit::rank));
    let mut units: Vec<Unit<'a>> = families.into_iter().flatten().collect();
    units.sort_by_key(Unit::has_own);
    units
}

fn root(tree: &mut [usize], mut place: usize) -> usize {
    while tree[place] != place {
        tree[place] = tree[tree[place]];
        place = tree[place];
    }
    place
}

/// One part, if it fits; otherwise as few as their order allows.
fn parts<'a>(mut family: Vec<Unit<'a>>, fits: impl Fn(&Cost<'a>) -> bool) -> Vec<Unit<'a>> {
    if family.len() == 1 {
        return family;
    }
    family.sort_by_cached_key(Unit::rank);
    let mut parts: Vec<Unit<'a>> = Vec::new();
    for unit in family {
        let joined = |part: &Unit<'a>| {
            let mut cost = part.cost.clone();
            unit.nodes.iter().for_each(|node| cost.add(node));
            cost
        };
        match parts.pop() {
            Some(part) if fits(&joined(&part)) => parts.push(part.join(unit)),
            part => parts.extend(part.into_iter().chain([unit])),
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nodes as `rack:job,job`, each part of which may be empty; the units that they make, as `0+1 2`.
    fn units(nodes: &[&'static str], fits: impl Fn(&Cost<'_>) -> bool) -> String {
        let names: Vec<NodeName> = (0..nodes.len()).map(|i| NodeName::from(format!("n{i}"))).collect();
        let candidate = |(index, text): (usize, &&'static str)| {
            let (rack, jobs) = text.split_once(':').unwrap();
            Candidate {
                stage: None,
                whatever_stage: false,
                index,
                name: &names[index],
                healthy: true,
                already_out: false,
                pods: 0,
                devices: 0,
                own: false,
                released: false,
                whatever_failed: false,
                atom: Some(rack).filter(|rack| !rack.is_empty()),
                jobs: jobs
                    .split(',')
                    .filter(|job| !job.is_empty())
                    .map(|job| Job::Label("work", job))
                    .collect(),
                spread: None,
            }
        };
        let candidates = nodes.iter().enumerate().map(candidate).collect();
        let units = gangs(atoms(candidates, &Ties::default()), fits);
        let unit = |unit: &Unit<'_>| {
            assert_eq!(unit.cost.nodes, unit.nodes.len());
            unit.nodes.iter().map(|node| node.index.to_string()).collect::<Vec<_>>().join("+")
        };
        units.iter().map(unit).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn units_are_what_atoms_and_shared_jobs_tie_together() {
        for (nodes, together) in [
            (vec![":", ":"], "0 1"),
            (vec!["a:", "b:", "a:", ":", "b:"], "0+2 1+4 3"),
            (vec![":x", ":", ":x"], "0+2 1"),
            (vec![":x", ":y", ":x,y", ":z"], "0+1+2 3"),
            // Jobs tie whole atoms, and atoms tie jobs.
            (vec!["a:x", "a:", "b:", "b:x"], "0+1+2+3"),
            (vec!["a:x", ":x", "a:y", ":y", ":"], "0+2+1+3 4"),
            (vec![":x,y", ":y,z", ":z,x"], "0+1+2"),
        ] {
            assert_eq!(units(&nodes, |_| true), together, "{nodes:?}");
        }
    }

    #[test]
    fn gangs_are_split_into_parts_that_fit_and_atoms_never() {
        for (nodes, limit, together) in [
            (vec![":x"; 5], 2, "0+1 2+3 4"),
            (vec![":x"; 5], 5, "0+1+2+3+4"),
            (vec![":x"; 3], 0, "0 1 2"),
            (vec!["a:x", "a:x", "b:x", "b:x", ":x"], 3, "0+1 2+3+4"),
            (vec!["a:"; 3], 2, "0+1+2"),
            (vec!["a:x", "a:", "a:", ":x"], 2, "0+1+2 3"),
        ] {
            assert_eq!(units(&nodes, |cost| cost.nodes <= limit), together, "{nodes:?} {limit}");
        }
    }
}
