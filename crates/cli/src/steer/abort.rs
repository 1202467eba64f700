//! `abort`: ends a rollout. No new starts; nodes that still have their old driver are given back, the others finish.

use anyhow::{anyhow, bail};
use pitcrew_controller::{Look, preflight::Unfit};
use pitcrew_core::api::RolloutPhase;
use pitcrew_core::plan::newest_rollout;
use pitcrew_core::snapshot::Rollout;
use serde_json::json;

use super::{Object, Step};
use crate::reading::{Reading, did_you_mean};

/// What aborting a rollout comes to.
pub(super) fn decide(look: &Look, name: Option<&str>) -> anyhow::Result<Vec<Step>> {
    if !look.installed {
        return Err(Unfit::NoDefinition("rollouts.pitcrew.dev").into());
    }
    let reading = Reading::of(&look.snapshot, &look.leader);
    let (name, rollout) = choose(&reading, name)?;
    if let Some(phase) = over(rollout) {
        bail!("rollout {name} is over ({phase:?}); there is nothing to abort");
    }
    // Its status is written all the time, its spec by nobody: what matters is that it is still this rollout.
    let patch = (!rollout.spec.abort).then(
        || json!({"metadata": {"resourceVersion": rollout.version.to_string()}, "spec": {"abort": true}}),
    );
    let already = if patch.is_none() { " already" } else { "" };
    let says = format!(
        "rollout {name} is aborted{already}: no node starts any more, nodes that still have their old driver are given back, the others finish."
    );
    Ok(vec![Step { object: Object::Rollout(name), patch, says }])
}

/// The rollout that is meant: by name, or the only one under way.
fn choose<'a>(reading: &'a Reading<'a>, name: Option<&str>) -> anyhow::Result<(String, &'a Rollout)> {
    let rollouts = &reading.snapshot.rollouts;
    if let Some(name) = name {
        let name = name.rsplit('/').next().unwrap_or(name);
        let found = rollouts.get_key_value(name).map(|(name, rollout)| (name.clone(), rollout));
        let like = || did_you_mean(name, rollouts.keys().map(String::as_str));
        return found.ok_or_else(|| anyhow!("there is no rollout {name}{}", like()));
    }
    let newest = reading.pools.iter().filter_map(|pool| newest_rollout(reading.snapshot, pool));
    let mut under_way: Vec<_> = newest.filter(|(_, rollout)| over(rollout).is_none()).collect();
    match under_way.len() {
        0 => bail!("no rollout is under way; there is nothing to abort"),
        1 => Ok(under_way.swap_remove(0)),
        _ => {
            let names: Vec<String> = under_way.into_iter().map(|(name, _)| name).collect();
            bail!("more than one rollout is under way; name the one you mean: {}", names.join(", "))
        }
    }
}

/// The phase in which it ended, if it has.
fn over(rollout: &Rollout) -> Option<RolloutPhase> {
    let phase = rollout.status.as_ref()?.phase;
    matches!(
        phase,
        RolloutPhase::Done | RolloutPhase::Failed | RolloutPhase::Superseded | RolloutPhase::Aborted
    )
    .then_some(phase)
}
