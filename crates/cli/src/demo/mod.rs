//! `pitcrew demo`: an upgrade of a simulated fleet, live, on virtual time.
//!
//! ```text
//!  run.rs      the cluster, the controller and the pace, on a thread of their own
//!    scenario.rs what it is about
//!    record.rs   what passed so far, from each pass of the controller      witness.rs  what the API itself saw
//!    view.rs     what is shown of one moment: data, no drawing
//!  live.rs     the terminal: keys, frames        screen.rs   one frame
//!  plain.rs    lines, for pipes                  summary.rs  the figures at the end, as text and as JSON
//! ```
//!
//! `run` sends updates through a channel; one of `live`, `plain` or nobody shows them.

mod live;
mod plain;
mod record;
mod run;
mod scenario;
mod screen;
mod summary;
mod view;
mod witness;

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use crate::stopwatch::Stopwatch;
use crate::terminal::{self, Output};

use run::{Ending, Story};
use scenario::Scenario;

/// More than this does not fit the memory of a laptop.
const NODES_MAX: usize = 10_000;
/// Beyond this, a second of real time is more than a week: `--instant` is meant.
const SPEED_MAX: f64 = 1_000_000.0;
/// What shells report for a program that ctrl-c ended.
const LEFT_BY_USER: u8 = 130;

/// What `pitcrew demo` takes.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// How many GPU nodes
    #[arg(long, value_name = "N", default_value_t = 24, allow_negative_numbers = true, value_parser = nodes)]
    nodes: usize,
    /// Virtual seconds per real second [default: so that it takes about half a minute]
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = speed, conflicts_with = "instant")]
    speed: Option<f64>,
    /// As fast as this machine can
    #[arg(long)]
    instant: bool,
    /// Chance: the same seed gives the same run
    #[arg(long, value_name = "S", default_value_t = 1)]
    seed: u64,
    /// maxParallelUpgrades of the policy; 0 sets no limit, maxUnavailable 25% still does [default: a sixth of the nodes]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = max_parallel)]
    max_parallel: Option<u32>,
    /// What happens in it; --list tells more
    #[arg(long, value_enum, value_name = "NAME", default_value_t, hide_possible_values = true)]
    scenario: Scenario,
    /// Say what scenarios there are
    #[arg(long)]
    list: bool,
    /// Print the figures as one JSON object at the end and nothing else; instant unless --speed is given
    #[arg(short, long, value_enum)]
    output: Option<Output>,
}

fn nodes(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|number| (1..=NODES_MAX).contains(number));
    number.ok_or_else(|| format!("must be a number from 1 to {NODES_MAX}"))
}

fn speed(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number| *number > 0.0 && *number <= SPEED_MAX);
    number.ok_or_else(|| format!("must be a number above 0, at most {SPEED_MAX}"))
}

fn max_parallel(text: &str) -> Result<u32, String> {
    let number = text.parse().ok().filter(|number| i32::try_from(*number).is_ok());
    number.ok_or_else(|| "must be a whole number, 0 or more".to_owned())
}

/// Runs the demo and shows it.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if args.list {
        std::io::stdout().lock().write_all(scenario::list().as_bytes())?;
        return Ok(ExitCode::SUCCESS);
    }
    let stopwatch = Stopwatch::start();
    let a_sixth = || u32::try_from(args.nodes.div_ceil(6)).unwrap_or(u32::MAX);
    let max_parallel = args.max_parallel.unwrap_or_else(a_sixth);
    let Args { nodes, seed, speed, scenario, .. } = *args;
    let mut story = Story { nodes, seed, max_parallel, speed, scenario };
    if story.speed.is_none() && !args.instant && args.output.is_none() {
        story.speed = Some(story.usual_speed());
    }
    let stdout = std::io::stdout();
    let colours = terminal::colours(&stdout);
    let show = run::start(story.clone())?;
    let ending = match args.output {
        Some(Output::Json) => show.wait()?,
        None if terminal::can_draw(&stdout) && std::io::stdin().is_terminal() => {
            live::show(&show, &story, screen::Look { colours })?
        }
        None => plain::show(&show, &story, &mut stdout.lock())?,
    };
    let mut figures = match ending {
        Ending::Played(figures) => figures,
        Ending::LeftByUser => {
            eprintln!("pitcrew: left before every node was done");
            return Ok(ExitCode::from(LEFT_BY_USER));
        }
    };
    figures.real_seconds = summary::tenths(stopwatch.elapsed().as_secs_f64());
    let text = match args.output {
        Some(Output::Json) => format!("{}\n", serde_json::to_string_pretty(&*figures)?),
        None => summary::text(&figures, colours),
    };
    std::io::stdout().lock().write_all(text.as_bytes())?;
    Ok(if figures.succeeded() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
