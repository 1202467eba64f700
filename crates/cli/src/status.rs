//! `pitcrew status`: how far each pool is, what limits it, which nodes are in trouble and why.
//!
//! ```text
//!  report.rs   how things stand, as data (-o json)      text.rs   … in words
//!  follow.rs   --watch: until everything is done         --wait: for pipelines, with an exit code
//! ```
//!
//! It reads with the controller's own code and never writes.

mod follow;
mod report;
mod text;

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::anyhow;
use jiff::SignedDuration;
use pitcrew_controller::Look;

use crate::connect::{Connection, Session};
use crate::reading::{NO_POLICY, Reading, not_installed};
use crate::style::Style;
use crate::terminal::{self, Output};
use crate::times::Times;

pub(crate) use report::{ControllerReport, NodeReport, Report, feels, kind_name};
pub(crate) use text::{Pen, absence, baking};

/// What `pitcrew status` takes.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    connection: Connection,
    /// Print JSON instead of text
    #[arg(short, long, value_enum)]
    output: Option<Output>,
    /// Show it live until everything is done
    #[arg(short, long, conflicts_with_all = ["wait", "output"])]
    watch: bool,
    /// Wait until every node is done; exits with 1 if a node failed, a pool is frozen or the time is up
    #[arg(long)]
    wait: bool,
    /// How long to wait, such as 90s, 30m or 2h
    #[arg(long, value_name = "TIME", default_value = "2h", value_parser = time, requires = "wait")]
    timeout: Duration,
}

fn time(text: &str) -> Result<Duration, String> {
    let bad = || "must be a time above 0 such as 90s, 30m or 2h".to_owned();
    let time: SignedDuration = text.parse().map_err(|_| bad())?;
    Duration::try_from(time).ok().filter(|time| !time.is_zero()).ok_or_else(bad)
}

/// Says how things stand.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let style = Style::of_stdout();
    let live = terminal::can_draw(&std::io::stdout());
    let out = &mut std::io::stdout();
    Session::run(&args.connection, async |session| match args {
        Args { wait: true, timeout, output, .. } => follow::wait(&session, *timeout, *output, out).await,
        Args { watch: true, .. } => follow::watch(&session, style, live, out).await,
        Args { output, .. } => once(&session, *output, style, out).await,
    })
}

async fn once(
    session: &Session,
    output: Option<Output>,
    style: Style,
    out: &mut impl Write,
) -> anyhow::Result<ExitCode> {
    let look = session.look().await?;
    let report = report_of(&look)?;
    out.write_all(print(session, &report, output, style)?.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

/// The report of one look. Where nobody could have stated a policy, that is what has to be said.
fn report_of(look: &Look) -> anyhow::Result<Report> {
    let report = Report::of(&Reading::of(&look.snapshot, &look.leader));
    if report.pools.is_empty() && !look.installed { Err(not_installed()) } else { Ok(report) }
}

fn print(session: &Session, report: &Report, output: Option<Output>, style: Style) -> anyhow::Result<String> {
    match output {
        Some(Output::Json) => Ok(format!("{}\n", serde_json::to_string_pretty(report)?)),
        None => Ok(text::text(report, &pen(session, report, style))),
    }
}

fn pen(session: &Session, report: &Report, style: Style) -> Pen {
    Pen { style, times: Times { now: report.at, zone: session.zone.clone() } }
}

fn nothing_to_wait_for() -> anyhow::Error {
    anyhow!(NO_POLICY)
}

#[cfg(test)]
mod tests;
