//! Lines for pipes and logs: one per transition, or for big fleets one per twentieth of the way.

use std::io::{self, Write};
use std::sync::mpsc::RecvError;

use pitcrew_core::contract::State;

use super::record::{Decision, Transition};
use super::run::{Ending, FROM, Show, Story, TO, Update, broke_off};
use crate::text::{clock, grouped};

/// Beyond this, a line per transition is more than anybody reads.
const NODES_EACH_MAX: usize = 50;
/// Big fleets get a line per so many percent.
const STEP_PERCENT: usize = 5;
/// More nodes than this that do the same at the same time share a line.
const SAME_EACH_MAX: usize = 4;

/// Writes lines until the end.
pub(super) fn show(show: &Show, story: &Story, out: &mut impl Write) -> anyhow::Result<Ending> {
    let mut lines = Lines::new(story.nodes, out);
    loop {
        match show.updates.recv().map_err(|RecvError| broke_off())? {
            Update::Begins => lines.begin()?,
            Update::Moved(transition) => lines.moved(&transition)?,
            Update::Decided(decision) => lines.decided(&decision)?,
            Update::View(_) => {}
            Update::Ended(result) => {
                lines.tell()?;
                return result.map(Ending::Played);
            }
        }
    }
}

struct Lines<'a, W> {
    nodes: usize,
    out: &'a mut W,
    begun: bool,
    done: usize,
    failed: usize,
    told_percent: usize,
    /// Nodes that did the same at the same time; not told yet, because more of them may follow.
    same: Vec<Transition>,
}

impl<'a, W: Write> Lines<'a, W> {
    fn new(nodes: usize, out: &'a mut W) -> Self {
        Self { nodes, out, begun: false, done: 0, failed: 0, told_percent: 0, same: Vec::new() }
    }

    fn begin(&mut self) -> io::Result<()> {
        self.begun = true;
        writeln!(
            self.out,
            "{} GPU nodes on driver {FROM}; the policy now asks for {TO}",
            grouped(self.nodes)
        )?;
        self.out.flush()
    }

    fn decided(&mut self, decision: &Decision) -> io::Result<()> {
        self.tell()?;
        writeln!(self.out, "{:>7}  {}", clock(decision.at), decision.what)?;
        self.out.flush()
    }

    fn moved(&mut self, transition: &Transition) -> io::Result<()> {
        // Before the version changes, nodes only report that they are up to date.
        if !self.begun {
            return Ok(());
        }
        self.done += usize::from(transition.to == State::UpgradeDone);
        self.failed += usize::from(transition.to == State::UpgradeFailed);
        if self.nodes <= NODES_EACH_MAX || transition.to == State::UpgradeFailed {
            if self.same.first().is_some_and(|first| !is_same(first, transition)) {
                self.tell()?;
            }
            self.same.push(transition.clone());
        } else {
            let percent = self.done * 100 / self.nodes / STEP_PERCENT * STEP_PERCENT;
            if percent <= self.told_percent {
                return Ok(());
            }
            self.told_percent = percent;
            self.tell()?;
            let (done, nodes) = (grouped(self.done), grouped(self.nodes));
            writeln!(
                self.out,
                "{:>8}  {percent:>3}%  {done} of {nodes} done, {} failed",
                clock(transition.at),
                self.failed
            )?;
        }
        self.out.flush()
    }

    /// Writes what waits to be told.
    fn tell(&mut self) -> io::Result<()> {
        let same = std::mem::take(&mut self.same);
        if let [first, .., last] = same.as_slice()
            && same.len() > SAME_EACH_MAX
        {
            let nodes = format!("{} … {}, {} nodes", first.node, last.node, same.len());
            self.line(first, &nodes)?;
        } else {
            same.iter().try_for_each(|transition| self.line(transition, &transition.node.to_string()))?;
        }
        self.out.flush()
    }

    fn line(&mut self, transition: &Transition, nodes: &str) -> io::Result<()> {
        let Transition { at, node: _, to, words } = transition;
        let line = format!("{:>7}  {nodes}  {to:<22}  {words}", clock(*at));
        writeln!(self.out, "{}", line.trim_end())
    }
}

/// Each failure has a line of its own.
fn is_same(one: &Transition, other: &Transition) -> bool {
    let Transition { at, node: _, to, words } = one;
    *to != State::UpgradeFailed && (at, to, words) == (&other.at, &other.to, &other.words)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(nodes: usize) -> String {
        let mut out = Vec::new();
        let mut lines = Lines::new(nodes, &mut out);
        let moved = |at, node: String, to, words: &str| Transition {
            at,
            node: node.as_str().into(),
            to,
            words: words.into(),
        };
        lines.moved(&moved(0, "gpu-00".into(), State::UpgradeDone, "")).unwrap();
        lines.begin().unwrap();
        for number in 1..=nodes {
            let at = i64::try_from(number).unwrap() * 97;
            lines
                .moved(&moved(at, format!("gpu-{number:02}"), State::UpgradeRequired, "driver is outdated"))
                .unwrap();
            lines.moved(&moved(at, format!("gpu-{number:02}"), State::UpgradeDone, "visit 3:12")).unwrap();
        }
        lines.tell().unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn nodes_that_do_the_same_at_once_share_a_line() {
        let mut out = Vec::new();
        let mut lines = Lines::new(24, &mut out);
        lines.begin().unwrap();
        let mut moved = |numbers: std::ops::RangeInclusive<u32>, to, words: &str| {
            for number in numbers {
                let node = format!("gpu-{number:02}").as_str().into();
                lines.moved(&Transition { at: 7, node, to, words: words.into() }).unwrap();
            }
        };
        moved(1..=24, State::UpgradeRequired, "driver is outdated");
        moved(5..=6, State::CordonRequired, "slot 2 of 4");
        moved(1..=5, State::UpgradeFailed, "no image");
        lines.tell().unwrap();
        insta::assert_snapshot!(String::from_utf8(out).unwrap(), @r"
        24 GPU nodes on driver 560.35.03; the policy now asks for 565.57.01
           0:07  gpu-01 … gpu-24, 24 nodes  upgrade-required        driver is outdated
           0:07  gpu-05  cordon-required         slot 2 of 4
           0:07  gpu-06  cordon-required         slot 2 of 4
           0:07  gpu-01  upgrade-failed          no image
           0:07  gpu-02  upgrade-failed          no image
           0:07  gpu-03  upgrade-failed          no image
           0:07  gpu-04  upgrade-failed          no image
           0:07  gpu-05  upgrade-failed          no image
        ");
    }

    #[test]
    fn a_small_fleet_has_a_line_for_each_transition() {
        insta::assert_snapshot!(told(2), @r"
        2 GPU nodes on driver 560.35.03; the policy now asks for 565.57.01
           1:37  gpu-01  upgrade-required        driver is outdated
           1:37  gpu-01  upgrade-done            visit 3:12
           3:14  gpu-02  upgrade-required        driver is outdated
           3:14  gpu-02  upgrade-done            visit 3:12
        ");
    }

    #[test]
    fn a_big_fleet_has_a_line_for_each_twentieth() {
        let text = told(1000);
        assert_eq!(text.lines().count(), 21, "{text}");
        assert!(text.ends_with("100%  1,000 of 1,000 done, 0 failed\n"), "{text}");
    }
}
