//! `cargo xtask mutate`: breaks the program on purpose, one small place at a time, and sees whether the simulation finds
//! it. A mutation that survives is a missing check.
//!
//! The sources are copied to `target/mutants`, so nothing here is touched. All mutations are built into one program, each
//! behind a switch, and it is run once with each switched on.

use std::fs;
use std::path::Path;
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
    /// An expression that is there exactly once.
    from: &'static str,
    /// What is there instead; with `MUTATED` in it, at all times, and the switch is where that word is.
    to: &'static str,
}

/// Which mutation is switched on.
const SWITCH: &str = "PITCREW_MUTANT";

/// What the copied program asks.
const ASK: &str = r#"
/// Whether a mutation is switched on.
#[doc(hidden)]
pub fn mutated(number: usize) -> bool {
    switch() == Some(number)
}

/// Whether any is.
#[doc(hidden)]
pub fn is_mutant() -> bool {
    switch().is_some()
}

fn switch() -> Option<usize> {
    static ON: std::sync::OnceLock<Option<usize>> = std::sync::OnceLock::new();
    *ON.get_or_init(|| std::env::var("PITCREW_MUTANT").ok()?.parse().ok())
}
"#;

/// The program drops what would break a promise. A mutant does not: it is to be found from outside.
const DROP: (&str, &str) =
    ("crates/controller/src/run.rs", "let found = violations(&self.store.snapshot, plan);");

/// At least so many of twenty must be found.
const FOUND_OF_TWENTY: usize = 19;

const MUTATIONS: &[Mutation] = &[
    Mutation {
        name: "one more than maxParallelUpgrades starts",
        file: "crates/core/src/plan/ledger.rs",
        from: "moving <= limit as usize",
        to: "moving <= limit as usize + 1",
    },
    Mutation {
        name: "nodes that others took out are not counted",
        file: "crates/core/src/plan/ledger.rs",
        from: "usize::from(out)",
        to: "usize::from(out && foreign.is_none())",
    },
    Mutation {
        name: "writes under way take no slot",
        file: "crates/controller/src/run.rs",
        from: "self.store.snapshot.in_flight.insert(object, Pending { moving_to, on_node })",
        to: "None::<Pending>",
    },
    Mutation {
        name: "whoever does not lead acts too",
        file: "crates/controller/src/run.rs",
        from: "!*self.leads.borrow()",
        to: "false",
    },
    Mutation {
        name: "foreign cordons are lifted",
        file: "crates/core/src/plan/cordon.rs",
        from: "(holds.cordon || adopted) && !kept",
        to: "!kept",
    },
    Mutation {
        name: "cordons stay",
        file: "crates/core/src/plan/cordon.rs",
        from: "ours && node.unschedulable",
        to: "ours && !node.unschedulable",
    },
    Mutation {
        name: "a node that a person uncordons is not cordoned again",
        file: "crates/core/src/plan/walk.rs",
        from: "needs_cordon && !member.node.unschedulable",
        to: "false",
    },
    Mutation {
        name: "validators are not waited for",
        file: "crates/core/src/plan/validation.rs",
        from: "!pod.ready || pod.deleting.is_some()",
        to: "false",
    },
    Mutation {
        name: "a driver that broke again is given back",
        file: "crates/core/src/plan/cordon.rs",
        from: "member.sync == Freshness::InSync && member.driver_ready && member.node.ready",
        to: "member.sync == Freshness::InSync || member.driver_ready || member.node.ready",
    },
    Mutation {
        name: "a driver that is not ready goes on to validation",
        file: "crates/core/src/plan/restart.rs",
        from: "sync == Freshness::InSync && member.driver_ready && !retried && !member.waits_for_load",
        to: "sync == Freshness::InSync && !retried && !member.waits_for_load",
    },
    Mutation {
        name: "pods that use the device do not have to leave",
        file: "crates/core/src/plan/removal.rs",
        from: "if pods.is_empty() {\n        return Progress::Gone;\n    }",
        to: "if pods.len() < 2 {\n        return Progress::Gone;\n    }",
    },
    Mutation {
        name: "nobody looks once more before the restart",
        file: "crates/controller/src/execute.rs",
        from: "users.is_some_and(|users| holds_device(users, &pod))",
        to: "false",
    },
    Mutation {
        name: "evictions are not pinned",
        file: "crates/controller/src/execute.rs",
        from: "{\"preconditions\": {\"uid\": pod.uid}}",
        to: "if MUTATED { json!({}) } else { json!({\"preconditions\": {\"uid\": pod.uid}}) }",
    },
    Mutation {
        name: "node writes are not pinned",
        file: "crates/core/src/action.rs",
        from: "Map::from_iter([(\"resourceVersion\".to_owned(), json!(self.seen.to_string()))])",
        to: "Map::new()",
    },
    Mutation {
        name: "a pause is not obeyed",
        file: "crates/core/src/plan/walk.rs",
        from: "*status == PoolStatus::Paused",
        to: "false",
    },
    Mutation {
        name: "an abort is not obeyed",
        file: "crates/core/src/plan/start.rs",
        from: "view.aborted.as_ref().filter(|_| !member.needs_driver())",
        to: "view.aborted.as_ref().filter(|_| false)",
    },
    Mutation {
        name: "nodes to be skipped are not",
        file: "crates/core/src/plan/start.rs",
        from: "member.node.mark(&policy.keys.skip) == Some(\"true\") && !member.needs_driver()",
        to: "false",
    },
    Mutation {
        name: "failed nodes try again at once",
        file: "crates/core/src/plan/walk.rs",
        from: "member.target.is_some_and(|target| *target != walk.target)",
        to: "member.target.is_some()",
    },
    Mutation {
        name: "deadlines do not fire",
        file: "crates/core/src/plan/walk.rs",
        from: "view.snapshot.now >= deadline",
        to: "false",
    },
    Mutation {
        name: "a driver has a quarter of its time",
        file: "crates/core/src/plan/restart.rs",
        from: "let until = deadline(view, walk, view.policy.limits.driver_ready);",
        to: "let limit = view.policy.limits.driver_ready; let until = deadline(view, walk, if MUTATED { limit / 4 } else { limit });",
    },
    Mutation {
        name: "a node that is tried again is given back with whatever driver it has",
        file: "crates/core/src/plan/members.rs",
        from: "self.walk().is_none_or(|walk| walk.attempts == 0) && self.found_its_driver()",
        to: "true",
    },
    Mutation {
        name: "nodes that NVSentinel has are started",
        file: "crates/core/src/plan/health.rs",
        from: "if let Some(what) = quarantine(node) {\n        return Some(Reason::Quarantined { what });",
        to: "if let Some(what) = quarantine(node).filter(|_| !MUTATED) {\n        return Some(Reason::Quarantined { what });",
    },
    Mutation {
        name: "nobody wakes up for a deadline",
        file: "crates/core/src/plan/walk.rs",
        from: "reason.until()",
        to: "None",
    },
    Mutation {
        name: "NVSentinel is kept off for ever",
        file: "crates/core/src/plan/health.rs",
        from: "if hold.stands(node)",
        to: "if !MUTATED && hold.stands(node)",
    },
    Mutation {
        name: "autoscalers are kept off for ever",
        file: "crates/core/src/plan/cordon.rs",
        from: "patch.annotations.set(key, before.clone())",
        to: "drop(before.clone())",
    },
    Mutation {
        name: "the record stays",
        file: "crates/core/src/plan/cordon.rs",
        from: "patch.annotations.set(VISIT_ANNOTATION, None)",
        to: "()",
    },
    Mutation {
        name: "budgets are bypassed although the policy says Fail",
        file: "crates/core/src/plan/removal.rs",
        from: "ran_out && removal.timeout_action == TimeoutAction::Fail",
        to: "false",
    },
    Mutation {
        name: "nobody takes over from a dead leader",
        file: "crates/controller/src/lease.rs",
        from: "holder(lease).is_none() || since.elapsed() >= DURATION",
        to: "holder(lease).is_none()",
    },
    Mutation {
        name: "pods that are gone are remembered",
        file: "crates/controller/src/store.rs",
        from: "self.finish_list(kind)",
        to: "true",
    },
    Mutation {
        name: "a refused write is not tried again",
        file: "crates/core/src/plan/walk.rs",
        from: "SetbackKind::Error(_) if setback.retry_at <= snapshot.now",
        to: "SetbackKind::Error(_) if !MUTATED && setback.retry_at <= snapshot.now",
    },
    Mutation {
        name: "a stage opens before the one before it has passed",
        file: "crates/core/src/plan/stages.rs",
        from: "stage > self.frontier()",
        to: "stage > self.frontier() + 1",
    },
    Mutation {
        name: "a bake is over when it begins",
        file: "crates/core/src/plan/bake.rs",
        from: "ends && missing.is_none()",
        to: "missing.is_none()",
    },
    Mutation {
        name: "windows are not looked at",
        file: "crates/core/src/plan/start.rs",
        from: "_ if member.needs_driver() => Ok(()),",
        to: "_ if MUTATED || member.needs_driver() => Ok(()),",
    },
    Mutation {
        name: "an atom starts although one of it cannot",
        file: "crates/core/src/plan/pool.rs",
        from: "!starts && member.is_due()",
        to: "!MUTATED && !starts && member.is_due()",
    },
    Mutation {
        name: "a version that was taken back is not put back",
        file: "crates/core/src/plan/rollback.rs",
        from: "!used && may_write(snapshot, &object, plan)",
        to: "false",
    },
    Mutation {
        name: "a version that was taken back goes on",
        file: "crates/core/src/plan/start.rs",
        from: "view.condemned.as_ref().filter(|_| !member.needs_driver())",
        to: "view.condemned.as_ref().filter(|_| false)",
    },
    Mutation {
        name: "nobody waits for gates",
        file: "crates/core/src/plan/gates.rs",
        from: "driver.is_none() || !passed(gate)",
        to: "false",
    },
    Mutation {
        name: "gates at the end of a stage are not asked",
        file: "crates/core/src/plan/proofs.rs",
        from: "if nodes.is_empty()",
        to: "if MUTATED || nodes.is_empty()",
    },
    Mutation {
        name: "a person's word is not waited for",
        file: "crates/core/src/plan/stages.rs",
        from: "stage.promotion == Promotion::Manual && self.promoted(&stage.name).is_none()",
        to: "false",
    },
    Mutation {
        name: "groups may be out as a whole",
        file: "crates/core/src/plan/waves.rs",
        from: "self.spread.map_or(usize::MAX, |(_, max)| max.of(total))",
        to: "usize::MAX",
    },
    Mutation {
        name: "what Prometheus says does not matter",
        file: "crates/core/src/plan/queries.rs",
        from: "query.missed(values)",
        to: "None",
    },
    Mutation {
        name: "versions start that nobody listed",
        file: "crates/core/src/plan/start.rs",
        from: "if let Some(unlisted) = view.unlisted(member)",
        to: "if let Some(unlisted) = view.unlisted(member).filter(|_| !MUTATED)",
    },
    Mutation {
        name: "drivers that restart spoil no bake",
        file: "crates/core/src/plan/bake.rs",
        from: "total > bake.max_driver_restarts",
        to: "false",
    },
    Mutation {
        name: "a stage that failed holds nobody",
        file: "crates/core/src/plan/stages.rs",
        from: "self.said.iter().flatten().find(|said| said.phase.is_bad())",
        to: "None::<&&StageStatus>",
    },
    Mutation {
        name: "failures in a stage are not counted",
        file: "crates/core/src/plan/stages.rs",
        from: "count.failed > limit",
        to: "false",
    },
    Mutation {
        name: "a stage that taught nothing passes",
        file: "crates/core/src/plan/stages.rs",
        from: "waits.or_else(|| self.knows_nothing(index))",
        to: "waits.or_else(|| self.knows_nothing(index)).filter(|_| !MUTATED)",
    },
    Mutation {
        name: "a stage is over before its last node is done",
        file: "crates/core/src/plan/stages.rs",
        from: "_ if count.is_complete() =>",
        to: "_ if MUTATED || count.is_complete() =>",
    },
    Mutation {
        name: "a stage has no limit of its own",
        file: "crates/core/src/plan/stages.rs",
        from: "self.max_moving.filter(|limit| moving > *limit)",
        to: "None",
    },
    Mutation {
        name: "a node that came early is not proven",
        file: "crates/core/src/plan/pool.rs",
        from: "early.filter(|_| settled && !claimed)",
        to: "None",
    },
    Mutation {
        name: "atoms are split",
        file: "crates/core/src/plan/waves.rs",
        from: "node.atom.map_or(units.len(), |atom| *known.entry(atom).or_insert(units.len()))",
        to: "{ let _ = &mut known; units.len() }",
    },
    Mutation {
        name: "a visit starts that outlasts its window",
        file: "crates/core/src/windows.rs",
        from: "self.until.duration_since(self.from) >= needs",
        to: "true",
    },
    Mutation {
        name: "a stage that failed takes no version back",
        file: "crates/core/src/plan/rollback.rs",
        from: "stages.iter().find(|stage| stage.phase.is_bad())",
        to: "None",
    },
    Mutation {
        name: "a person's word to take a version back is not heard",
        file: "crates/core/src/plan/rollback.rs",
        from: "if let Some(word) = &rollout.spec.rollback {",
        to: "if let Some(word) = rollout.spec.rollback.as_ref().filter(|_| !MUTATED) {",
    },
    Mutation {
        name: "a version that was cleared does not start",
        file: "crates/core/src/plan/rollback.rs",
        from: "rollout.spec.cleared.is_none() && speaks_of(rollout, wanted)",
        to: "speaks_of(rollout, wanted)",
    },
    Mutation {
        name: "a pool takes nodes of another",
        file: "crates/core/src/plan/pool.rs",
        from: "self.policy.selects(node.labels()) || (visited() && !taken())",
        to: "true",
    },
];

/// Tries all of them.
pub(crate) fn mutate(options: &Options) -> Result<()> {
    let wanted =
        |mutation: &Mutation| options.only.as_ref().is_none_or(|only| mutation.name.contains(only.as_str()));
    let wanted: Vec<(usize, &Mutation)> =
        MUTATIONS.iter().enumerate().filter(|(_, mutation)| wanted(mutation)).collect();
    if wanted.is_empty() {
        bail!("no mutation is called like that");
    }
    let place = Path::new("target/mutants");
    copy_mutated(place)?;
    // The simulation must be fine without them.
    if let Some(found) = simulate(place, None, options.seeds)? {
        bail!("the simulation fails without any mutation: {found}");
    }
    let mut survivors = Vec::new();
    for (number, mutation) in &wanted {
        let start = Instant::now();
        let found = simulate(place, Some(*number), options.seeds)?;
        let took = Elapsed(start.elapsed());
        if let Some(found) = found {
            println!("found     {:<58} {took:>9}  {found}", mutation.name);
        } else {
            println!("SURVIVED  {:<58} {took:>9}", mutation.name);
            survivors.push(mutation.name);
        }
    }
    let found = wanted.len() - survivors.len();
    println!("\n{found} of {} found within {} seeds", wanted.len(), options.seeds);
    if found * 20 < wanted.len() * FOUND_OF_TWENTY {
        bail!("too many survive: {}", survivors.join(", "));
    }
    Ok(())
}

/// What git knows, as it is now, with all mutations in it.
fn copy_mutated(place: &Path) -> Result<()> {
    let listed = Command::new("git")
        .args(["ls-files", "-co", "--exclude-standard"])
        .output()
        .context("ask git for the sources")?;
    for file in String::from_utf8_lossy(&listed.stdout).lines() {
        let Ok(content) = fs::read(file) else { continue };
        let new = match String::from_utf8(content) {
            Ok(text) => mutated(file, text)?.into_bytes(),
            Err(binary) => binary.into_bytes(),
        };
        // What has not changed is not built again.
        let to = place.join(file);
        if fs::read(&to).is_ok_and(|old| old == new) {
            continue;
        }
        fs::create_dir_all(to.parent().unwrap_or(place))?;
        fs::write(&to, new).with_context(|| format!("copy {file}"))?;
    }
    Ok(())
}

/// A source with the mutations that it has.
fn mutated(file: &str, mut text: String) -> Result<String> {
    let home = if file.starts_with("crates/core/") { "crate" } else { "pitcrew_core" };
    for (number, Mutation { name, from, to, .. }) in
        MUTATIONS.iter().enumerate().filter(|(_, mutation)| mutation.file == file)
    {
        if text.matches(from).count() != 1 {
            bail!("\"{name}\": {file} does not have its line exactly once; mend the list");
        }
        let switch = format!("{home}::mutated({number})");
        let new = if to.contains("MUTATED") {
            to.replace("MUTATED", &switch)
        } else {
            format!("if {switch} {{ {to} }} else {{ {from} }}")
        };
        text = text.replacen(from, &new, 1);
    }
    if file == DROP.0 {
        let sees = format!("if {home}::is_mutant() {{ return; }} {}", DROP.1);
        text = text.replacen(DROP.1, &sees, 1);
    }
    if file == "crates/core/src/lib.rs" {
        text.push_str(ASK);
    }
    Ok(text)
}

/// The first broken promise with a mutation, or how else it failed.
fn simulate(place: &Path, number: Option<usize>, seeds: u64) -> Result<Option<String>> {
    let mut cargo = Command::new("cargo");
    cargo.args(["test", "--quiet", "-p", "pitcrew-sim", "--test", "simulation", "seeds_keep_their_promises"]);
    // What the copy depends on is built already.
    let target = std::path::absolute("target").context("find the target directory")?;
    cargo.current_dir(place).env("CARGO_TARGET_DIR", target).env("PITCREW_SEEDS", seeds.to_string());
    cargo.env_remove(SWITCH).envs(number.map(|number| (SWITCH, number.to_string()))).stdin(Stdio::null());
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn every_mutation_finds_its_place() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        for Mutation { name, file, from, .. } in MUTATIONS {
            let found = fs::read_to_string(root.join(file)).map(|text| text.matches(from).count());
            assert_eq!(found.ok(), Some(1), "\"{name}\" in {file}");
        }
        let (file, text) = DROP;
        assert!(fs::read_to_string(root.join(file)).is_ok_and(|code| code.contains(text)));
    }
}
