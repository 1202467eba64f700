//! What is said about simulated runs: figures for people and programs, and for a broken promise all that is needed to
//! see it again.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use pitcrew_core::contract::State;
use pitcrew_sim::simulate::{self, Case, Entry, Fault, Run, Total, Violation, Wish};
use serde::Serialize;
use serde_json::json;

use crate::text::{count, grouped};

/// The commit that this program was built from.
const COMMIT: &str = env!("PITCREW_COMMIT");
/// So many of the last lines about a node are shown with a broken promise.
const LAST_LINES: usize = 15;

/// All figures.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Figures {
    commit: &'static str,
    seeds: u64,
    broken_promises: BTreeMap<u64, String>,
    seconds: f64,
    threads: usize,
    seeds_per_second: f64,
    nodes: u64,
    node_hours: f64,
    changes_checked: u64,
    faults: BTreeMap<&'static str, u64>,
    states_and_faults_met: usize,
    states_and_faults: usize,
    transitions: BTreeMap<String, u64>,
    rollouts: BTreeMap<&'static str, u64>,
    hash: String,
}

impl Figures {
    pub(super) fn new(total: &Total, took: Duration, threads: usize) -> Self {
        let broken = total.broken.iter().filter_map(|(seed, run)| {
            Some((*seed, run.violation.as_ref().map(|violation| violation.promise.to_string())?))
        });
        let seconds = took.as_secs_f64().max(0.001);
        #[expect(clippy::cast_precision_loss, reason = "a speed for people")]
        let speed = total.runs as f64 / seconds;
        Self {
            commit: COMMIT,
            seeds: total.runs,
            broken_promises: broken.collect(),
            seconds: tenths(seconds),
            threads,
            seeds_per_second: tenths(speed),
            nodes: total.nodes,
            node_hours: tenths(total.node_hours),
            changes_checked: total.changes,
            faults: total.faults.iter().map(|(fault, count)| (fault.name(), *count)).collect(),
            states_and_faults_met: total.coverage.len(),
            states_and_faults: Total::pairs().count(),
            transitions: total
                .transitions
                .iter()
                .map(|((from, to), count)| (format!("{from} > {to}"), *count))
                .collect(),
            rollouts: total.rollouts.clone(),
            hash: format!("{:016x}", total.hash),
        }
    }
}

fn tenths(number: f64) -> f64 {
    (number * 10.0).round() / 10.0
}

/// The figures in a few lines.
pub(super) fn summary(figures: &Figures, total: &Total, colours: bool) -> String {
    let broken = total.broken.len() as u64;
    let (glyph, code) = if broken == 0 { ("✔", 32) } else { ("✖", 31) };
    let glyph = if colours { format!("\x1b[{code}m{glyph}\x1b[0m") } else { glyph.to_owned() };
    let verdict = if broken == 0 {
        "no promise broken".to_owned()
    } else {
        format!("promises broken in {broken} of them")
    };
    let mut text = String::new();
    let _ = writeln!(
        text,
        "{glyph} {} in {} s ({} a second on {}): {verdict}",
        count(figures.seeds, "seed"),
        figures.seconds,
        figures.seeds_per_second,
        count(figures.threads as u64, "thread"),
    );
    let _ = writeln!(
        text,
        "  {} · {} simulated node-hours · {} changes checked · commit {COMMIT}",
        count(figures.nodes, "node"),
        grouped(figures.node_hours.round()),
        grouped(figures.changes_checked),
    );
    let met = format!("{} of {}", figures.states_and_faults_met, figures.states_and_faults);
    let _ = writeln!(text, "  {met} pairs of a state and a fault met · trace hash {}", figures.hash);
    text +=
        &listed("faults:", total.faults.iter().map(|(fault, count)| format!("{fault} {}", grouped(count))));
    if !total.rollouts.is_empty() {
        let words = total.rollouts.iter().map(|(what, count)| format!("{what} {}", grouped(count)));
        text += &listed("rollouts:", words);
    }
    for state in State::ALL {
        let missing: Vec<&str> = Total::pairs()
            .filter(|pair| pair.0 == state && !total.coverage.contains(pair))
            .map(|(_, fault)| fault.name())
            .collect();
        if !missing.is_empty() && missing.len() < 6 && figures.seeds >= 1000 {
            let _ = writeln!(text, "  never met in {state}: {}", missing.join(", "));
        }
    }
    text
}

/// Words in lines that fit a terminal, behind a title.
fn listed(title: &str, words: impl Iterator<Item = String>) -> String {
    let indent = title.len() + 2;
    let mut text = format!("  {title}");
    let mut column = indent;
    for word in words {
        if column + word.len() + 1 > 98 {
            let _ = write!(text, "\n{:indent$}", "");
            column = indent;
        }
        column += word.len() + 2;
        let _ = write!(text, " {word},");
    }
    if text.ends_with(',') {
        text.pop();
    }
    text + "\n"
}

/// The smallest form of each failure, and how to see it again.
pub(super) fn broken(total: &Total, wish: &Wish) -> anyhow::Result<String> {
    let mut text = String::new();
    let mut shown = std::collections::BTreeSet::new();
    for (seed, run) in &total.broken {
        let Some(violation) = &run.violation else { continue };
        let _ = writeln!(text, "\nseed {seed}: {}", sentence(violation));
        // One of each kind is enough to begin with.
        if !shown.insert(violation.promise) {
            continue;
        }
        let (smaller, _) = simulate::shrink(*seed, wish, violation.promise)?;
        let case = Case::new(*seed, &smaller);
        let run = simulate::run(&case, true)?;
        text += &told(&case, &run, &smaller);
    }
    Ok(text)
}

fn sentence(violation: &Violation) -> String {
    let node = violation.node.as_deref().map(|node| format!(" {node}:")).unwrap_or_default();
    format!("{}\n  {}{node} {}", violation.promise, time(violation.at), violation.what)
}

/// One failure in full.
fn told(case: &Case, run: &Run, wish: &Wish) -> String {
    let mut text = String::new();
    let Some(violation) = &run.violation else { return text };
    let _ = writeln!(text, "  made smaller: {} with {}", count(case.fleet.nodes as u64, "node"), names(case));
    let _ = writeln!(text, "  {}", sentence(violation).replace('\n', "\n  "));
    let about =
        |entry: &&Entry| violation.node.is_none() || entry.node.is_none() || entry.node == violation.node;
    let lines: Vec<&Entry> = run.trace.iter().filter(about).collect();
    for entry in &lines[lines.len().saturating_sub(LAST_LINES)..] {
        let _ = writeln!(text, "    {} {}", time(entry.at), entry.text);
    }
    let _ = writeln!(text, "  commit {COMMIT}; see it again: {}", command(case.seed, wish));
    text
}

fn names(case: &Case) -> String {
    let names: Vec<&str> = case.faults.iter().map(|fault| fault.name()).collect();
    if names.is_empty() { "no faults".to_owned() } else { names.join(", ") }
}

/// The command line that plays a case again.
pub(super) fn command(seed: u64, wish: &Wish) -> String {
    let mut command = format!("pitcrew simulate --seed {seed}");
    if let Some(nodes) = wish.nodes {
        let _ = write!(command, " --nodes {nodes}");
    }
    if let Some(faults) = &wish.faults {
        let names: Vec<&str> = faults.iter().map(|fault| fault.name()).collect();
        let _ = write!(
            command,
            " --faults {}",
            if names.is_empty() { "none".to_owned() } else { names.join(",") }
        );
    }
    if let Some(minutes) = wish.minutes {
        let _ = write!(command, " --minutes {minutes}");
    }
    if wish.plain {
        command += " --plain";
    }
    command
}

/// One run, line by line.
pub(super) fn replay(case: &Case, run: &Run) -> String {
    let mut text =
        format!("seed {}: {}, faults: {}\n", case.seed, count(case.fleet.nodes as u64, "node"), names(case));
    for entry in &run.trace {
        let _ = writeln!(text, "{} {}", time(entry.at), entry.text);
    }
    match &run.violation {
        None => text += "✔ no promise broken",
        Some(violation) => {
            let _ = write!(text, "✖ {}", sentence(violation));
        }
    }
    let _ = writeln!(
        text,
        "\n  {} changes · trace hash {:016x} · commit {COMMIT}",
        grouped(run.changes),
        run.hash
    );
    text
}

/// The same for programs.
pub(super) fn replay_json(run: &Run) -> anyhow::Result<String> {
    let violation = run.violation.as_ref().map(|violation| {
        json!({"promise": violation.promise.to_string(), "node": violation.node, "what": violation.what, "at": violation.at})
    });
    let trace: Vec<_> =
        run.trace.iter().map(|e| json!({"at": e.at, "node": e.node, "text": e.text})).collect();
    let value = json!({
        "commit": COMMIT, "seed": run.seed, "nodes": run.nodes, "seconds": run.time.as_secs_f64(),
        "changes": run.changes, "hash": format!("{:016x}", run.hash), "violation": violation, "trace": trace,
    });
    Ok(serde_json::to_string_pretty(&value)? + "\n")
}

/// Every fault and what it is.
pub(super) fn list_of_faults() -> String {
    let mut text = String::new();
    for fault in Fault::ALL {
        let _ = writeln!(text, "{fault:<14} {}", fault.describe());
    }
    text
}

fn time(at: jiff::Timestamp) -> String {
    at.strftime("%H:%M:%S%.3f").to_string()
}
