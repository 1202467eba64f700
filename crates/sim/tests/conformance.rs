//! The embedded API beside a real API server: random sequences of calls, answered alike.
//!
//! ```text
//!  kinds.rs, bodies.rs ─▶ generate.rs, patches.rs ─▶ [call.rs] ─▶ side.rs × 2 ─▶ symbols.rs ─▶ differences.rs ─▶ play.rs
//!                         (from a seed)                           (real, embedded)              (what is left out)   (equal, or shrunk and told)
//! ```
//!
//! `PITCREW_CONFORMANCE=2000` plays so many sequences, `PITCREW_CONFORMANCE_SEED=7` that one.

#[path = "conformance/bodies.rs"]
mod bodies;
#[path = "conformance/call.rs"]
mod call;
#[path = "conformance/differences.rs"]
mod differences;
#[path = "conformance/generate.rs"]
mod generate;
#[path = "conformance/kinds.rs"]
mod kinds;
#[path = "conformance/patches.rs"]
mod patches;
#[path = "conformance/play.rs"]
mod play;
#[path = "conformance/side.rs"]
mod side;
#[path = "conformance/symbols.rs"]
mod symbols;

use futures::StreamExt as _;
use libtest_mimic::{Arguments, Failed, Trial};
use pitcrew_sim::plane::{Binaries, Plane, PlaneOptions, User};
use std::ops::Range;

/// An ordinary test run; more when asked.
const SEQUENCES: u64 = 300;

/// Most of a sequence's time is waiting for its watches to end.
const AT_ONCE: usize = 32;

/// Enough to see whether they have one cause.
const TOLD_MAX: usize = 5;

fn main() {
    let arguments = Arguments::from_args();
    let _ = rustls::crypto::ring::default_provider().install_default();
    let binaries = Binaries::find();
    if let Err(missing) = &binaries {
        eprintln!("real control plane: not tested. {missing}");
    }
    let name = "real and embedded answer random sequences of calls alike";
    let trial = Trial::test(name, || answer_alike(seeds()?)).with_ignored_flag(binaries.is_err());
    libtest_mimic::run(&arguments, vec![trial]).exit();
}

fn seeds() -> Result<Range<u64>, Failed> {
    if let Ok(seed) = std::env::var("PITCREW_CONFORMANCE_SEED") {
        let seed = seed.parse()?;
        return Ok(seed..seed + 1);
    }
    let count = std::env::var("PITCREW_CONFORMANCE").map_or(Ok(SEQUENCES), |count| count.parse())?;
    Ok(0..count)
}

fn answer_alike(seeds: Range<u64>) -> Result<(), Failed> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let plane = Plane::start_api(&Binaries::find()?, PlaneOptions::default()).await?;
        let mut config = plane.config(User::Admin);
        config.default_retry = false; // a refusal is an answer
        let client = kube::Client::try_from(config)?;
        play::define(&client).await?;
        let plays = futures::stream::iter(seeds.clone()).map(|seed| {
            let client = client.clone();
            async move {
                let calls = generate::sequence(seed);
                (seed, play::compare(&client, &format!("s{seed}"), &calls).await)
            }
        });
        let mut plays = plays.buffer_unordered(AT_ONCE);
        let mut found = Vec::new();
        while let Some((seed, outcome)) = plays.next().await {
            let outcome = outcome.map_err(|error| format!("seed {seed}: {error}"))?;
            found.extend(outcome.map(|difference| (seed, difference)));
        }
        report(&client, seeds, found).await
    })
}

async fn report(
    client: &kube::Client,
    seeds: Range<u64>,
    found: Vec<(u64, play::Difference)>,
) -> Result<(), Failed> {
    if found.is_empty() {
        return Ok(());
    }
    let mut text = format!("{} of {} sequences differ\n", found.len(), seeds.end - seeds.start);
    for (seed, difference) in found.into_iter().take(TOLD_MAX) {
        let calls = generate::sequence(seed);
        let (calls, difference) = play::shrink(client, &format!("s{seed}"), calls, difference).await?;
        text.push_str(&play::tell(seed, &calls, &difference));
    }
    Err(text.into())
}
