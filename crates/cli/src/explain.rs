//! `pitcrew explain node/NAME`: why a node is where it is, who is responsible, what happens next, what you can do.
//!
//! The words for each reason are core's (`reason/`); here they are laid out. `answer.rs` is the answer as data.

mod answer;
#[cfg(test)]
mod tests;

use std::fmt::Write as _;
use std::io::Write;
use std::process::ExitCode;

use pitcrew_core::contract::State;
use pitcrew_core::reason::{Kind, Motion};

use crate::connect::{Connection, Session};
use crate::reading::Reading;
use crate::status::{Pen, absence};
use crate::style::Style;
use crate::terminal::Output;
use crate::times::Times;

use answer::{Answer, DriverAnswer};

/// More objects than this are counted.
const CULPRITS_MAX: usize = 6;
/// The width of the field names, with the space around them.
const FIELD: usize = 11;

/// What `pitcrew explain` takes.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The node, as node/NAME or NAME
    #[arg(value_name = "NODE")]
    node: String,
    #[command(flatten)]
    connection: Connection,
    /// Print JSON instead of text
    #[arg(short, long, value_enum)]
    output: Option<Output>,
}

/// Explains a node.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let (style, out) = (Style::of_stdout(), &mut std::io::stdout());
    Session::run(&args.connection, async |session| {
        explain(&session, &args.node, args.output, style, out).await
    })
}

async fn explain(
    session: &Session,
    node: &str,
    output: Option<Output>,
    style: Style,
    out: &mut impl Write,
) -> anyhow::Result<ExitCode> {
    let look = session.look().await?;
    let reading = Reading::with_pools(&look)?;
    let answer = Answer::of(&reading, reading.node(node)?)?;
    let text = match output {
        Some(Output::Json) => format!("{}\n", serde_json::to_string_pretty(&answer)?),
        None => {
            let times = Times { now: look.snapshot.now, zone: session.zone.clone() };
            text(&answer, &Pen { style, times })
        }
    };
    out.write_all(text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

/// One block for each driver of the node.
fn text(answer: &Answer, pen: &Pen) -> String {
    let several = answer.drivers.len() > 1;
    answer.drivers.iter().map(|driver| block(answer, driver, several, pen)).collect::<Vec<_>>().join("\n")
}

fn block(answer: &Answer, driver: &DriverAnswer, several: bool, pen: &Pen) -> String {
    let subject =
        if several { format!("{} (driver {})", answer.node, driver.driver) } else { answer.node.clone() };
    let lead = format!("{} ", pen.style.glyph(driver.kind));
    if driver.kind == Kind::Done {
        return pen.style.fold(&lead, &at_rest(&subject, answer, driver, pen), 2);
    }
    let mut text = pen.style.fold(&lead, &headline(&subject, answer, driver, pen), 2);
    let mut field = |name: &str, value: &str| text += &pen.style.fold(&format!("  {name:<9}"), value, FIELD);
    if !answer.controller.running {
        let absence = absence(&answer.controller, &pen.times);
        field("stopped", &format!("no controller is running: {absence}"));
    }
    field("cause", &culprits(driver));
    field("", &driver.message);
    if let Some(holds) = &driver.holds {
        field("holds", holds);
    }
    if let Some(next) = &driver.next {
        let at = next.at.map(|at| format!("{}: ", pen.times.both(at))).unwrap_or_default();
        field("next", &format!("{at}{}", next.what));
    }
    text += &you_can(answer, driver, pen);
    let seen = seen(answer, driver, pen);
    text + &pen.style.fold(&format!("  {:<9}", "seen"), &pen.style.dim(&seen), FIELD)
}

/// The one line about a node that is where it should be.
fn at_rest(subject: &str, answer: &Answer, driver: &DriverAnswer, pen: &Pen) -> String {
    let version = driver.driver_version.as_deref().map(|version| format!("driver {version}"));
    let version = version.unwrap_or_else(|| format!("driver {} is up to date", driver.driver));
    let since = driver.driver_since.map(|at| format!(" since {}", pen.times.at(at))).unwrap_or_default();
    let standing = match driver.reason {
        "paused" => format!(" Its pool is paused by {}.", culprits(driver)),
        "pool-frozen" => format!(" Its pool is frozen: {}.", driver.message),
        _ => String::new(),
    };
    let by = if answer.cordoned_by_driver_manager { " by its driver manager" } else { ", not by pitcrew" };
    let lift = format!(" Where no `finish` container lifts that, kubectl uncordon {} does.", answer.node);
    let lift = if answer.cordoned_by_driver_manager { lift } else { String::new() };
    let out = match (answer.cordoned, answer.ready) {
        (true, true) => {
            format!("It is cordoned{by}: it takes no work and counts against maxUnavailable.{lift}")
        }
        (true, false) => format!("It is cordoned{by}, and not Ready: it counts against maxUnavailable."),
        (false, false) => "The node is not Ready: it counts against maxUnavailable.".to_owned(),
        (false, true) => "Nothing to do.".to_owned(),
    };
    format!("{subject} is done: {version}{since}.{standing} {out}")
}

fn headline(subject: &str, answer: &Answer, driver: &DriverAnswer, pen: &Pen) -> String {
    let motion = match driver.moves {
        _ if !answer.controller.running => "and will not move: no controller is running.",
        Motion::Done | Motion::ByItself => "and goes on by itself.",
        Motion::HeldUp => "and is held up; it goes on by itself when the cause is gone.",
        Motion::NeedsAPerson => "and will not move by itself.",
    };
    let place = match (driver.state, driver.since) {
        (State::Unknown, _) => "has not been looked at yet".to_owned(),
        (state, Some(since)) => format!("has been in {state} for {}", pen.times.span(since)),
        (state, None) => format!("is in {state}"),
    };
    format!("{subject} {place} {motion}")
}

fn culprits(driver: &DriverAnswer) -> String {
    let named: Vec<String> = driver.cause.iter().take(CULPRITS_MAX).map(ToString::to_string).collect();
    let rest = match driver.cause.len().saturating_sub(CULPRITS_MAX) {
        0 => String::new(),
        rest => format!(" and {rest} more"),
    };
    format!("{}{rest}", named.join(", "))
}

/// Commands stand alone on their lines, unfolded: they are there to be pasted.
fn you_can(answer: &Answer, driver: &DriverAnswer, pen: &Pen) -> String {
    let mut all: Vec<(&str, &str, Option<&str>)> = Vec::new();
    if !answer.controller.running {
        all.push(("start one", "pitcrew controller", None));
    }
    all.extend(driver.you_can.iter().map(|advice| (advice.what, advice.command.as_str(), advice.but)));
    let widest = all.iter().map(|(what, ..)| what.len()).max().unwrap_or_default();
    let mut text = String::new();
    for (place, (what, command, but)) in all.iter().enumerate() {
        let name = if place == 0 { "you can" } else { "" };
        let but = but.map(|but| pen.style.dim(&format!("   # {but}"))).unwrap_or_default();
        let _ = writeln!(text, "  {name:<9}{what:<widest$}  {command}{but}");
    }
    text
}

fn seen(answer: &Answer, driver: &DriverAnswer, pen: &Pen) -> String {
    let mut parts = vec![driver.policy.clone()];
    if let Some(visit) = &driver.visit {
        let rollout = visit.rollout.as_ref().map(|name| format!(" for rollout {name}")).unwrap_or_default();
        parts.push(format!("visit since {}{rollout}", pen.times.at(visit.since)));
        if visit.attempts > 0 {
            parts.push(format!("attempt {}", visit.attempts + 1));
        }
    }
    if let Some(version) = &driver.driver_version {
        parts.push(format!("driver {version}"));
    }
    if let Some(holder) = answer.controller.holder.as_ref().filter(|_| answer.controller.running) {
        parts.push(format!("controller {holder} leads"));
    }
    parts.join(" · ")
}
