//! The figures at the end, all of them measured: as a few lines for people, as JSON for programs.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Serialize;

use crate::text::{clock, count, grouped};

/// Nodes in trouble are named up to here; the rest is counted.
const TROUBLES_MAX: usize = 5;

/// What to do next: only things that exist.
const TRY: &str = "  \
  try: pitcrew demo --scenario bad-driver     a driver that breaks its canary
       pitcrew demo --scenario canary         one node first, two days of bake, then the others
       pitcrew demo --nodes 1000 --instant    as fast as this machine can
       docs/quickstart.md                     the same on your cluster
";

/// What was measured in one run.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Figures {
    pub(super) nodes: usize,
    pub(super) from: String,
    pub(super) to: String,
    /// The version on which it was to end: the one before, where that is what the scenario is about.
    pub(super) ends_on: String,
    /// Nodes that were taken out for the driver.
    pub(super) visited: usize,
    pub(super) seed: u64,
    pub(super) max_parallel_upgrades: u32,
    pub(super) max_unavailable: String,
    /// From the change of the version until every node was done.
    pub(super) virtual_seconds: f64,
    /// Of the whole command.
    pub(super) real_seconds: f64,
    /// Nodes that ended upgrade-done on the new version.
    pub(super) done: usize,
    /// Nodes that ended upgrade-failed.
    pub(super) failed: usize,
    /// Ready driver pods by version.
    pub(super) drivers_ready: BTreeMap<String, usize>,
    /// Nodes still cordoned or not ready.
    pub(super) out_at_end: usize,
    /// The most nodes that were cordoned or not ready at the same time.
    pub(super) most_out: usize,
    /// How many the policy allows.
    pub(super) limit: usize,
    /// Pods of people's workloads.
    pub(super) workload_pods: usize,
    /// Evictions that the API accepted.
    pub(super) evictions: usize,
    /// Evictions that were asked for; the difference was refused by budgets.
    pub(super) evictions_asked: u64,
    /// Workload pods that were deleted past their budgets.
    pub(super) forced_deletions: u64,
    /// The controller's writes, without those to its Lease.
    pub(super) writes: u64,
    pub(super) writes_per_node: f64,
    pub(super) visit_seconds: VisitSeconds,
    /// It took too long and was given up.
    pub(super) gave_up: bool,
    /// Which nodes are not done, and where they are.
    pub(super) troubles: Vec<String>,
}

/// How long a node was on its visit.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct VisitSeconds {
    pub(super) min: f64,
    pub(super) mean: f64,
    pub(super) max: f64,
}

impl Figures {
    /// Every node is done on the version that is meant and back in service, and no limit was ever exceeded.
    pub(super) fn succeeded(&self) -> bool {
        self.done == self.nodes
            && self.on_their_version() == self.nodes
            && self.out_at_end == 0
            && self.kept_limit()
    }

    fn kept_limit(&self) -> bool {
        self.most_out <= self.limit
    }

    fn on_their_version(&self) -> usize {
        self.drivers_ready.get(&self.ends_on).copied().unwrap_or_default()
    }
}

/// A figure with one decimal: more would be noise.
pub(super) fn tenths(number: f64) -> f64 {
    (number * 10.0).round() / 10.0
}

/// The summary.
pub(super) fn text(figures: &Figures, colours: bool) -> String {
    let Figures { nodes, to, ends_on, visited, .. } = figures;
    let glyph = match (figures.succeeded(), colours) {
        (true, true) => "\x1b[32m✔\x1b[0m",
        (true, false) => "✔",
        (false, true) => "\x1b[31m✖\x1b[0m",
        (false, false) => "✖",
    };
    let mut text = String::new();
    #[expect(clippy::cast_possible_truncation, reason = "seconds of a run")]
    let seconds = figures.virtual_seconds.round() as i64;
    let _ = writeln!(
        text,
        "{glyph} {} of {} nodes on {ends_on} in {} (virtual), {} s real",
        grouped(figures.on_their_version()),
        grouped(nodes),
        clock(seconds),
        figures.real_seconds
    );
    if to != ends_on {
        let touched = count(*visited as u64, "node");
        let _ = writeln!(text, "  {to} was taken back: {touched} had seen it, the others were never touched");
    }
    let writes = format!("{} ({} per node)", count(figures.writes, "API write"), figures.writes_per_node);
    let _ = writeln!(text, "  {} · {writes}", limits(figures));
    #[expect(clippy::cast_possible_truncation, reason = "seconds of a visit")]
    let [min, max] =
        [figures.visit_seconds.min, figures.visit_seconds.max].map(|seconds| clock(seconds as i64));
    let _ = writeln!(text, "  {} · visits {min} to {max}", pods(figures));
    problems(figures, &mut text);
    text.push_str(TRY);
    text
}

fn limits(figures: &Figures) -> String {
    let Figures { most_out, limit, .. } = figures;
    if figures.kept_limit() {
        return format!("never more than {} out", count(*most_out as u64, "node"));
    }
    format!("LIMIT EXCEEDED: {most_out} nodes were out at once, {limit} are allowed")
}

fn pods(figures: &Figures) -> String {
    let Figures { evictions, workload_pods, forced_deletions, evictions_asked, .. } = figures;
    let moved =
        format!("{} of {}", count(*evictions as u64, "eviction"), count(*workload_pods as u64, "pod"));
    let refused = grouped(evictions_asked.saturating_sub(*evictions as u64));
    format!("{moved}, {refused} refused by budgets, {} forced", grouped(forced_deletions))
}

/// What went wrong, if anything did.
fn problems(figures: &Figures, text: &mut String) {
    if figures.gave_up {
        let _ = writeln!(text, "  given up: it should have been over long before");
    }
    if figures.out_at_end > 0 {
        let _ = writeln!(text, "  still out of service: {}", count(figures.out_at_end as u64, "node"));
    }
    for trouble in figures.troubles.iter().take(TROUBLES_MAX) {
        let _ = writeln!(text, "  {trouble}");
    }
    if figures.troubles.len() > TROUBLES_MAX {
        let _ = writeln!(text, "  and {} more", figures.troubles.len() - TROUBLES_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> Figures {
        Figures {
            nodes: 24,
            to: "565.57.01".to_owned(),
            ends_on: "565.57.01".to_owned(),
            virtual_seconds: 1265.2,
            real_seconds: 30.1,
            done: 24,
            drivers_ready: BTreeMap::from([("565.57.01".to_owned(), 24)]),
            most_out: 4,
            limit: 4,
            workload_pods: 36,
            evictions: 41,
            evictions_asked: 43,
            writes: 512,
            writes_per_node: 21.3,
            visit_seconds: VisitSeconds { min: 170.0, mean: 190.5, max: 212.2 },
            ..Figures::default()
        }
    }

    #[test]
    fn a_good_run_is_told_in_three_lines() {
        insta::assert_snapshot!(text(&good(), false));
    }

    #[test]
    fn a_node_too_many_out_is_a_failure_and_is_said() {
        let figures = Figures { most_out: 5, ..good() };
        assert!(!figures.succeeded());
        assert!(text(&figures, false).contains("LIMIT EXCEEDED: 5 nodes were out at once, 4 are allowed"));
    }

    #[test]
    fn a_label_without_the_driver_is_no_success() {
        let drivers_ready = BTreeMap::from([("565.57.01".to_owned(), 23), ("560.35.03".to_owned(), 1)]);
        let figures =
            Figures { drivers_ready, troubles: vec!["gpu-07 is upgrade-done".to_owned()], ..good() };
        assert!(!figures.succeeded());
        assert!(text(&figures, false).starts_with("✖ 23 of 24 nodes on 565.57.01"));
    }
}
