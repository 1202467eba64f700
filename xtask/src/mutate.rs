//! `cargo xtask mutate`: breaks the program on purpose, one small place at a time, and sees whether the simulation finds
//! it. A mutation that survives is a missing check.
//!
//! The sources are copied to `target/mutants`, so nothing here is touched, and each mutation is undone before the next.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};
use tokio::time::Instant;

use crate::elapsed::Elapsed;

/// What `cargo xtask mutate` takes.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Only mutations whose name contains this
    only: Option<String>,
    /// Seeds within which each must be found
    #[arg(long, default_value_t = 1000)]
    seeds: u64,
}

/// One small thing that is wrong.
struct Mutation {
    name: &'static str,
    file: &'static str,
    /// There exactly once.
    from: &'static str,
    to: &'static str,
}

/// At least so many of twenty must be found.
const FOUND_OF_TWENTY: usize = 19;

const MUTATIONS: &[Mutation] = &[
    Mutation {
        name: "one more than maxParallelUpgrades starts",
        file: "crates/core/src/plan/ledger.rs",
        from: "is_none_or(|limit| moving < limit as usize)",
        to: "is_none_or(|limit| moving <= limit as usize)",
    },
    Mutation {
        name: "nodes that others took out are not counted",
        file: "crates/core/src/plan/ledger.rs",
        from: "self.out += usize::from(out);",
        to: "self.out += usize::from(out && !foreign);",
    },
    Mutation {
        name: "writes under way take no slot",
        file: "crates/controller/src/run.rs",
        from: "self.store.snapshot.in_flight.insert(object, Pending { moving_to, on_node });",
        to: "let _ = Pending { moving_to, on_node };",
    },
    Mutation {
        name: "whoever does not lead acts too",
        file: "crates/controller/src/run.rs",
        from: "if !*self.leads.borrow() {",
        to: "if false {",
    },
    Mutation {
        name: "foreign cordons are lifted",
        file: "crates/core/src/plan/cordon.rs",
        from: "let ours = holds.cordon && !kept",
        to: "let ours = !kept",
    },
    Mutation {
        name: "cordons stay",
        file: "crates/core/src/plan/cordon.rs",
        from: "patch.unschedulable = (ours && node.unschedulable).then_some(false);",
        to: "patch.unschedulable = (ours && !node.unschedulable).then_some(false);",
    },
    Mutation {
        name: "a node that a person uncordons is not cordoned again",
        file: "crates/core/src/plan/walk.rs",
        from: "if walk.state.in_flight() && walk.state > State::CordonRequired && !member.node.unschedulable {",
        to: "if false {",
    },
    Mutation {
        name: "validators are not waited for",
        file: "crates/core/src/plan/validation.rs",
        from: "match validators.iter().find(|pod| !pod.ready || pod.deleting.is_some()) {",
        to: "match validators.iter().find(|_| false) {",
    },
    Mutation {
        name: "a driver that broke again is given back",
        file: "crates/core/src/plan/cordon.rs",
        from: "let fit = member.sync == Freshness::InSync && member.driver_ready && member.node.ready;",
        to: "let fit = member.sync == Freshness::InSync || member.driver_ready || member.node.ready;",
    },
    Mutation {
        name: "a driver that is not ready goes on to validation",
        file: "crates/core/src/plan/restart.rs",
        from: "if sync == Freshness::InSync && member.driver_ready && !retried && !member.waits_for_load {",
        to: "if sync == Freshness::InSync && !retried && !member.waits_for_load {",
    },
    Mutation {
        name: "pods that use the device do not have to leave",
        file: "crates/core/src/plan/removal.rs",
        from: "    if pods.is_empty() {\n        return Progress::Gone;",
        to: "    if pods.len() < 2 {\n        return Progress::Gone;",
    },
    Mutation {
        name: "nobody looks once more before the restart",
        file: "crates/controller/src/execute.rs",
        from: "if users.is_some_and(|users| holds_device(users, &pod)) {",
        to: "if users.is_some_and(|users| holds_device(users, &pod)) && false {",
    },
    Mutation {
        name: "evictions are not pinned",
        file: "crates/controller/src/execute.rs",
        from: "\"deleteOptions\": {\"preconditions\": {\"uid\": pod.uid}},",
        to: "\"deleteOptions\": {},",
    },
    Mutation {
        name: "node writes are not pinned",
        file: "crates/core/src/action.rs",
        from: "Map::from_iter([(\"resourceVersion\".to_owned(), json!(self.seen.to_string()))]);",
        to: "Map::new();",
    },
    Mutation {
        name: "a pause is not obeyed",
        file: "crates/core/src/plan/walk.rs",
        from: "_ if *status == PoolStatus::Paused => {",
        to: "_ if false && *status == PoolStatus::Paused => {",
    },
    Mutation {
        name: "an abort is not obeyed",
        file: "crates/core/src/plan/start.rs",
        from: "if let Some(rollout) = view.aborted.as_ref().filter(|_| !member.needs_driver()) {",
        to: "if let Some(rollout) = view.aborted.as_ref().filter(|_| false) {",
    },
    Mutation {
        name: "nodes to be skipped are not",
        file: "crates/core/src/plan/start.rs",
        from: "if member.node.mark(&policy.keys.skip) == Some(\"true\") && !member.needs_driver() {",
        to: "if member.node.mark(&policy.keys.skip) == Some(\"never\") {",
    },
    Mutation {
        name: "failed nodes try again at once",
        file: "crates/core/src/plan/walk.rs",
        from: "if member.target.is_some_and(|target| *target != walk.target) {",
        to: "if member.target.is_some() {",
    },
    Mutation {
        name: "deadlines do not fire",
        file: "crates/core/src/plan/walk.rs",
        from: "view.snapshot.now >= deadline",
        to: "view.snapshot.now >= deadline && false",
    },
    Mutation {
        name: "nobody wakes up for a deadline",
        file: "crates/core/src/plan/walk.rs",
        from: "let wake_at = reason.until();",
        to: "let wake_at = None;",
    },
    Mutation {
        name: "NVSentinel is kept off for ever",
        file: "crates/core/src/plan/cordon.rs",
        from: "    health::release(node, patch);\n",
        to: "",
    },
    Mutation {
        name: "autoscalers are kept off for ever",
        file: "crates/core/src/plan/cordon.rs",
        from: "            patch.annotations.set(key, before.clone());\n        }\n    }\n    health",
        to: "            let _ = before;\n        }\n    }\n    health",
    },
    Mutation {
        name: "the record stays",
        file: "crates/core/src/plan/cordon.rs",
        from: "    patch.annotations.set(VISIT_ANNOTATION, None);\n",
        to: "",
    },
    Mutation {
        name: "budgets are bypassed although the policy says Fail",
        file: "crates/core/src/plan/removal.rs",
        from: "if ran_out && removal.timeout_action == TimeoutAction::Fail {",
        to: "if ran_out && false {",
    },
    Mutation {
        name: "nobody takes over from a dead leader",
        file: "crates/controller/src/lease.rs",
        from: "let free = holder(lease).is_none() || since.elapsed() >= DURATION;",
        to: "let free = holder(lease).is_none();",
    },
    Mutation {
        name: "pods that are gone are remembered",
        file: "crates/controller/src/store.rs",
        from: "Event::InitDone => Effect::changed(self.finish_list(kind)),",
        to: "Event::InitDone => Effect::changed(true),",
    },
    Mutation {
        name: "a refused write is not tried again",
        file: "crates/core/src/plan/walk.rs",
        from: "SetbackKind::Error(_) if setback.retry_at <= snapshot.now => None,",
        to: "SetbackKind::Error(_) if false => None,",
    },
];

/// Tries all of them.
pub(crate) fn mutate(options: &Options) -> Result<()> {
    let place = Path::new("target/mutants");
    copy_sources(place)?;
    let wanted =
        |mutation: &&Mutation| options.only.as_ref().is_none_or(|only| mutation.name.contains(only.as_str()));
    let mutations: Vec<&Mutation> = MUTATIONS.iter().filter(wanted).collect();
    if mutations.is_empty() {
        bail!("no mutation is called like that");
    }
    // The simulation must be fine without them.
    if let Some(found) = simulate(place, options.seeds.min(100))? {
        bail!("the simulation fails without any mutation: {found}");
    }
    let mut survivors = Vec::new();
    for mutation in &mutations {
        let start = Instant::now();
        let found = try_one(place, mutation, options.seeds)?;
        let took = Elapsed(start.elapsed());
        if let Some(found) = found {
            println!("found     {:<58} {took:>9}  {found}", mutation.name);
        } else {
            println!("SURVIVED  {:<58} {took:>9}", mutation.name);
            survivors.push(mutation.name);
        }
    }
    let found = mutations.len() - survivors.len();
    println!("\n{found} of {} found within {} seeds", mutations.len(), options.seeds);
    if found * 20 < mutations.len() * FOUND_OF_TWENTY {
        bail!("too many survive: {}", survivors.join(", "));
    }
    Ok(())
}

/// What git knows, as it is now.
fn copy_sources(place: &Path) -> Result<()> {
    let listed = Command::new("git")
        .args(["ls-files", "-co", "--exclude-standard"])
        .output()
        .context("ask git for the sources")?;
    for file in String::from_utf8_lossy(&listed.stdout).lines() {
        let (from, to) = (PathBuf::from(file), place.join(file));
        let Ok(new) = fs::read(&from) else { continue };
        if fs::read(&to).is_ok_and(|old| old == new) {
            continue;
        }
        fs::create_dir_all(to.parent().unwrap_or(place))?;
        fs::write(&to, new).with_context(|| format!("copy {file}"))?;
    }
    Ok(())
}

fn try_one(place: &Path, mutation: &Mutation, seeds: u64) -> Result<Option<String>> {
    let path = place.join(mutation.file);
    let original = fs::read_to_string(&path).with_context(|| format!("read {}", mutation.file))?;
    if original.matches(mutation.from).count() != 1 {
        bail!("\"{}\": {} does not have its line exactly once; mend the list", mutation.name, mutation.file);
    }
    fs::write(&path, original.replacen(mutation.from, mutation.to, 1))?;
    let found = simulate(place, seeds);
    fs::write(&path, original)?;
    found
}

/// The first broken promise, or how else it failed.
fn simulate(place: &Path, seeds: u64) -> Result<Option<String>> {
    let mut cargo = Command::new("cargo");
    cargo.args(["test", "--quiet", "-p", "pitcrew-sim", "--test", "simulation", "seeds_keep_their_promises"]);
    cargo.current_dir(place).env("CARGO_TARGET_DIR", "target").env("PITCREW_SEEDS", seeds.to_string());
    cargo.env("RUSTFLAGS", "-Awarnings").stdin(Stdio::null());
    let output = cargo.output().context("start cargo")?;
    if output.status.success() {
        return Ok(None);
    }
    let said = String::from_utf8_lossy(&output.stdout);
    let line = said.lines().find(|line| line.starts_with("after "));
    let Some(line) = line else {
        bail!("the mutated program was not tried:\n{said}{}", String::from_utf8_lossy(&output.stderr));
    };
    let seeds = line.split(':').next().unwrap_or_default();
    let promise = line.split("promise: ").nth(1).and_then(|rest| rest.split(',').next()).unwrap_or("?");
    Ok(Some(format!("{promise} {seeds}")))
}
