//! `pitcrew simulate`: random fleets under random faults on virtual time, every promise checked at every change.
//!
//! ```text
//!  simulate.rs   the command line, the progress      report.rs   what is said at the end, as text and as JSON
//! ```

mod report;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::io::Write;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pitcrew_sim::simulate::{self, Case, Fault, Total, Wish};

use crate::stopwatch::Stopwatch;
use crate::terminal::{self, Output};
use crate::text::{count, grouped};

/// More nodes than this are not what chance is for; `pitcrew demo` has large fleets.
const NODES_MAX: usize = 200;
/// Nobody looks at more failures than these at once.
const BROKEN_MAX: usize = 10;
/// How often the progress is drawn.
const DRAW_EVERY: Duration = Duration::from_millis(100);
/// The width of the bar.
const BAR: usize = 30;

/// What `pitcrew simulate` takes.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// How many random cases
    #[arg(long, value_name = "N", default_value_t = 1000, conflicts_with = "seed")]
    seeds: u64,
    /// The first of them
    #[arg(long, value_name = "S", default_value_t = 0, conflicts_with = "seed")]
    from: u64,
    /// Play one case and print what happens in it
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// How many nodes [default: drawn, 1 to 20]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = nodes)]
    nodes: Option<usize>,
    /// Just these faults, comma-separated, or none; "help" lists them [default: drawn, a part of all]
    #[arg(long, value_name = "NAMES", value_parser = faults)]
    faults: Option<Faults>,
    /// For how many (virtual) minutes things go wrong [default: drawn, up to 2]
    #[arg(long, value_name = "M", value_parser = clap::value_parser!(u32).range(1..=600))]
    minutes: Option<u32>,
    /// No stages, windows or atoms [default: drawn, for four cases of ten]
    #[arg(long)]
    plain: bool,
    /// How many threads [default: all cores]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Print the figures as one JSON object and nothing else
    #[arg(short, long, value_enum)]
    output: Option<Output>,
}

/// What `--faults` says.
#[derive(Clone, Debug)]
enum Faults {
    These(BTreeSet<Fault>),
    Help,
}

fn nodes(text: &str) -> Result<usize, String> {
    let problem = || format!("it must be between 1 and {NODES_MAX}");
    text.parse().ok().filter(|nodes| (1..=NODES_MAX).contains(nodes)).ok_or_else(problem)
}

fn faults(text: &str) -> Result<Faults, String> {
    match text {
        "help" => Ok(Faults::Help),
        "none" => Ok(Faults::These(BTreeSet::new())),
        names => names
            .split(',')
            .map(|name| name.parse().map_err(|bad| format!("{bad}; --faults help lists them")))
            .collect::<Result<_, _>>()
            .map(Faults::These),
    }
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let faults = match &args.faults {
        Some(Faults::Help) => {
            print!("{}", report::list_of_faults());
            return Ok(ExitCode::SUCCESS);
        }
        Some(Faults::These(faults)) => Some(faults.clone()),
        None => None,
    };
    let wish = Wish { nodes: args.nodes, faults, minutes: args.minutes, plain: args.plain };
    match args.seed {
        Some(seed) => replay(seed, &wish, args.output),
        None => many(args, &wish),
    }
}

/// One case, with everything that happens in it.
fn replay(seed: u64, wish: &Wish, output: Option<Output>) -> anyhow::Result<ExitCode> {
    let case = Case::new(seed, wish);
    let run = simulate::run(&case, true)?;
    let text = match output {
        Some(Output::Json) => report::replay_json(&run)?,
        None => report::replay(&case, &run),
    };
    std::io::stdout().write_all(text.as_bytes())?;
    Ok(if run.violation.is_none() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn many(args: &Args, wish: &Wish) -> anyhow::Result<ExitCode> {
    let threads = args.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let watch = Stopwatch::start();
    let draws = args.output.is_none() && terminal::can_draw(&std::io::stderr());
    let bar = Mutex::new(Bar { drawn: None, of: args.seeds, watch, told: BTreeSet::new() });
    let seeds = args.from..args.from.saturating_add(args.seeds);
    let total = simulate::run_all(seeds, wish, threads, |total| {
        let mut bar = bar.lock().unwrap_or_else(PoisonError::into_inner);
        if draws {
            bar.draw(total);
        } else {
            bar.tell(total);
        }
        total.broken.len() < BROKEN_MAX
    })?;
    if draws {
        eprint!("\r\x1b[K");
    }
    let figures = report::Figures::new(&total, watch.elapsed(), threads);
    match args.output {
        Some(Output::Json) => println!("{}", serde_json::to_string_pretty(&figures)?),
        None => print!("{}", report::summary(&figures, &total, terminal::colours(&std::io::stdout()))),
    }
    if args.output.is_none() && !total.broken.is_empty() {
        print!("{}", report::broken(&total, wish)?);
    }
    std::io::stdout().flush()?;
    Ok(if total.broken.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// How far it is, drawn over itself.
struct Bar {
    drawn: Option<Duration>,
    of: u64,
    watch: Stopwatch,
    /// The failures that were told of.
    told: BTreeSet<u64>,
}

impl Bar {
    fn draw(&mut self, total: &Total) {
        let now = self.watch.elapsed();
        if self.drawn.is_some_and(|drawn| now < drawn + DRAW_EVERY) {
            return;
        }
        self.drawn = Some(now);
        let full = usize::try_from(total.runs * BAR as u64 / self.of.max(1)).unwrap_or(BAR).min(BAR);
        let (done, left) = ("█".repeat(full), "░".repeat(BAR - full));
        #[expect(clippy::cast_precision_loss, reason = "a speed for people")]
        let speed = total.runs as f64 / now.as_secs_f64().max(0.001);
        eprint!(
            "\r\x1b[K{done}{left} {} of {} · {speed:.0}/s · {}",
            grouped(total.runs),
            count(self.of, "seed"),
            if total.broken.is_empty() {
                "no promise broken".to_owned()
            } else {
                count(total.broken.len() as u64, "failure")
            },
        );
        let _ = std::io::stderr().flush();
    }

    /// Without a bar, a failure is told at once: a long run need not be over for somebody to look at it.
    fn tell(&mut self, total: &Total) {
        for (seed, run) in &total.broken {
            if let Some(violation) = run.violation.as_ref().filter(|_| self.told.insert(*seed)) {
                eprintln!("seed {seed} breaks {}", violation.promise);
            }
        }
    }
}
