//! What is said about each node, when it is something new, and about all of them at the end.

use std::collections::BTreeMap;
use std::io::Write;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use pitcrew_core::names::NodeName;
use pitcrew_core::plan::{NodeClients, Outcome};
use serde_json::{Value, json};

use super::{Work, is_settled};
use crate::terminal::Output;
use crate::times::Times;

/// Starts the line again and clears it.
const REDRAW: &str = "\r\x1b[K";

/// What was said so far.
pub(super) struct Progress {
    zone: TimeZone,
    /// A last line tells how far it is, drawn over itself.
    live: bool,
    /// Programs read the end only.
    quiet: bool,
    told: BTreeMap<NodeName, String>,
    troubled: Option<String>,
}

impl Progress {
    pub(super) fn new(zone: TimeZone, live: bool, quiet: bool) -> Self {
        Self { zone, live, quiet, told: BTreeMap::new(), troubled: None }
    }

    /// Tells what is new.
    pub(super) fn tell(
        &mut self,
        nodes: &[NodeClients],
        now: Timestamp,
        deadline: Timestamp,
        out: &mut impl Write,
    ) -> std::io::Result<()> {
        if self.quiet {
            return Ok(());
        }
        let times = Times { now, zone: self.zone.clone() };
        let clear = if self.live { REDRAW } else { "" };
        for node in nodes {
            let says = says(&node.outcome);
            if self.told.get(&node.node) != Some(&says) {
                writeln!(out, "{clear}{}  {}  {says}", times.clock(), node.node)?;
                self.told.insert(node.node.clone(), says);
            }
        }
        if self.live {
            write!(out, "{clear}{}; {} left", count(nodes), times.span(deadline))?;
        }
        out.flush()
    }

    /// Tells once that what is known may be old.
    pub(super) fn trouble(&mut self, trouble: &str, out: &mut impl Write) -> std::io::Result<()> {
        if self.quiet || self.troubled.as_deref() == Some(trouble) {
            return Ok(());
        }
        self.troubled = Some(trouble.to_owned());
        let clear = if self.live { REDRAW } else { "" };
        writeln!(out, "{clear}what is known may be old: {trouble}")
    }

    /// What would be done.
    pub(super) fn would(
        nodes: &[NodeClients],
        output: Option<Output>,
        out: &mut impl Write,
    ) -> std::io::Result<()> {
        if output.is_some() {
            return writeln!(out, "{:#}", document(nodes, None, 0));
        }
        for node in nodes {
            match &node.outcome {
                Outcome::Replace(pods) => {
                    for (pod, why) in pods {
                        writeln!(out, "{}  would delete pod {}: {why}", node.node, pod.name)?;
                    }
                }
                outcome => writeln!(out, "{}  {}", node.node, says(outcome))?,
            }
        }
        writeln!(out, "{}; nothing was changed.", count(nodes))
    }

    /// How it ended.
    pub(super) fn end(
        &self,
        nodes: &[NodeClients],
        nothing: Option<String>,
        work: &Work,
        output: Option<Output>,
        out: &mut impl Write,
    ) -> std::io::Result<()> {
        if output.is_some() {
            return writeln!(out, "{:#}", document(nodes, nothing.as_deref(), work.deleted));
        }
        let clear = if self.live { REDRAW } else { "" };
        if let Some(why) = nothing {
            return writeln!(out, "{clear}Nothing to do: {why}.");
        }
        let pods = if work.deleted == 1 { "client" } else { "clients" };
        writeln!(out, "{clear}{}; {} {pods} replaced.", count(nodes), work.deleted)
    }
}

fn says(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Fresh => "fresh".to_owned(),
        Outcome::Replace(pods) => {
            let whys: Vec<&str> = pods.iter().map(|(_, why)| why.as_str()).collect();
            format!("replaced: {}", whys.join("; "))
        }
        Outcome::Waits(why) => format!("waits: {why}"),
        Outcome::LeftAlone(why) => format!("left alone: {why}"),
        Outcome::NeedsPerson(why) => format!("needs a person: {why}"),
    }
}

/// `12 nodes: 10 fresh, 1 waits, 1 left alone`
fn count(nodes: &[NodeClients]) -> String {
    let of = |is: fn(&Outcome) -> bool| nodes.iter().filter(|node| is(&node.outcome)).count();
    let parts = [
        (of(|outcome| *outcome == Outcome::Fresh), "fresh"),
        (of(|outcome| matches!(outcome, Outcome::Replace(_))), "stale"),
        (of(|outcome| matches!(outcome, Outcome::Waits(_))), "waiting"),
        (of(|outcome| matches!(outcome, Outcome::LeftAlone(_))), "left alone"),
        (of(|outcome| matches!(outcome, Outcome::NeedsPerson(_))), "for a person"),
    ];
    let parts: Vec<String> = parts
        .iter()
        .filter(|(number, _)| *number > 0)
        .map(|(number, what)| format!("{number} {what}"))
        .collect();
    let word = if nodes.len() == 1 { "node" } else { "nodes" };
    format!("{} {word}: {}", nodes.len(), parts.join(", "))
}

fn document(nodes: &[NodeClients], nothing: Option<&str>, deleted: usize) -> Value {
    json!({
        "done": nodes.iter().all(|node| is_settled(node) && !matches!(node.outcome, Outcome::NeedsPerson(_))),
        "nothingToDo": nothing,
        "replaced": deleted,
        "nodes": nodes.iter().map(node_document).collect::<Vec<_>>(),
    })
}

fn node_document(node: &NodeClients) -> Value {
    let (outcome, why) = match &node.outcome {
        Outcome::Fresh => ("fresh", None),
        Outcome::Replace(_) => ("stale", None),
        Outcome::Waits(why) => ("waits", Some(why)),
        Outcome::LeftAlone(why) => ("leftAlone", Some(why)),
        Outcome::NeedsPerson(why) => ("needsPerson", Some(why)),
    };
    let client = |client: &pitcrew_core::plan::ClientFacts| {
        json!({
            "daemonSet": client.daemon_set.to_string(),
            "pod": client.pod.as_ref().map(ToString::to_string),
            "state": client.state,
            "why": client.says,
        })
    };
    json!({
        "node": node.node.to_string(),
        "pool": node.pool.to_string(),
        "outcome": outcome,
        "why": why,
        "epoch": node.epoch.map(|epoch| json!({
            "id": epoch.to_string(),
            "loaded": epoch.loaded.to_string(),
            "ready": epoch.ready.to_string(),
        })),
        "clients": node.clients.iter().map(client).collect::<Vec<_>>(),
    })
}
