//! `abort`: ends a rollout. No new starts; nodes that still have their old driver are given back, the others finish.
//! `--undo` takes that back.

use anyhow::{anyhow, bail};
use pitcrew_controller::{Look, preflight::Unfit};
use pitcrew_core::api::RolloutPhase;
use pitcrew_core::plan::newest_rollout;
use pitcrew_core::snapshot::Rollout;
use serde_json::json;

use super::{Object, Step};
use crate::reading::{Reading, did_you_mean};

/// What aborting a rollout, or taking that back, comes to.
pub(super) fn decide(look: &Look, name: Option<&str>, undo: bool) -> anyhow::Result<Vec<Step>> {
    if !look.installed {
        return Err(Unfit::NoDefinition("rollouts.pitcrew.dev").into());
    }
    let reading = Reading::of(&look.snapshot, &look.leader);
    let (name, rollout) = choose(&reading, name, undo)?;
    if !is_open(rollout, undo) {
        let phase = rollout.status.as_ref().map(|status| status.phase).unwrap_or_default();
        let what = if undo { "no abort to take back" } else { "nothing to abort" };
        bail!("rollout {name} is over ({phase:?}); there is {what}");
    }
    // Its status is written all the time, its spec by nobody: what matters is that it is still this rollout.
    let (wanted, version) = (!undo, rollout.version.to_string());
    let patch = (rollout.spec.abort != wanted)
        .then(|| json!({"metadata": {"resourceVersion": version}, "spec": {"abort": wanted}}));
    let says = match (undo, patch.is_none()) {
        (true, true) => format!("rollout {name} is not aborted; there was nothing to take back."),
        (true, false) => format!("rollout {name} goes on: its nodes start again as slots allow."),
        (false, already) => format!(
            "rollout {name} is aborted{}: no node starts any more, nodes that still have their old driver are given back, the others finish.",
            if already { " already" } else { "" }
        ),
    };
    Ok(vec![Step { object: Object::Rollout(name), patch, says }])
}

/// The rollout that is meant: by name, or the only one that can be meant.
pub(super) fn choose<'a>(
    reading: &'a Reading<'a>,
    name: Option<&str>,
    undo: bool,
) -> anyhow::Result<(String, &'a Rollout)> {
    let rollouts = &reading.snapshot.rollouts;
    if let Some(name) = name {
        let name = name.rsplit('/').next().unwrap_or(name);
        let found = rollouts.get_key_value(name).map(|(name, rollout)| (name.clone(), rollout));
        let like = || did_you_mean(name, rollouts.keys().map(String::as_str));
        return found.ok_or_else(|| anyhow!("there is no rollout {name}{}", like()));
    }
    let newest = reading.pools.iter().filter_map(|pool| newest_rollout(reading.snapshot, pool));
    let meant = |rollout: &Rollout| is_open(rollout, undo) && (rollout.spec.abort || !undo);
    let mut meant: Vec<_> = newest.filter(|(_, rollout)| meant(rollout)).collect();
    match meant.len() {
        0 if undo => bail!("no rollout is aborted; there is nothing to take back"),
        0 => bail!("no rollout is under way; there is nothing to abort"),
        1 => Ok(meant.swap_remove(0)),
        _ => {
            let is = if undo { "aborted" } else { "under way" };
            let names: Vec<String> = meant.into_iter().map(|(name, _)| name).collect();
            bail!("more than one rollout is {is}; name the one you mean: {}", names.join(", "))
        }
    }
}

/// Whether there is something left to abort, or to go on with.
fn is_open(rollout: &Rollout, undo: bool) -> bool {
    match rollout.status.as_ref().map(|status| status.phase) {
        Some(
            RolloutPhase::Done | RolloutPhase::Failed | RolloutPhase::Superseded | RolloutPhase::RolledBack,
        ) => false,
        Some(RolloutPhase::Aborted) => undo,
        _ => true,
    }
}
