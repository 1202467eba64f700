//! `promote`: a person's word that the stage after this one may begin, with the name and the time.

use anyhow::{anyhow, bail};
use jiff::Timestamp;
use pitcrew_controller::{Look, preflight::Unfit};
use pitcrew_core::api::{StagePhase, StagePromotion, StageStatus, stamp};
use pitcrew_core::plan::newest_rollout;
use pitcrew_core::snapshot::Rollout;
use serde_json::json;

use super::{Object, Step, abort};
use crate::reading::{Reading, did_you_mean};

/// What is asked for.
pub(super) struct Wish<'a> {
    pub(super) rollout: Option<&'a str>,
    pub(super) stage: Option<&'a str>,
    pub(super) by: &'a str,
    pub(super) skip_bake: bool,
}

/// What promoting a stage comes to.
pub(super) fn decide(look: &Look, wish: &Wish<'_>, now: Timestamp) -> anyhow::Result<Vec<Step>> {
    if !look.installed {
        return Err(Unfit::NoDefinition("rollouts.pitcrew.dev").into());
    }
    let reading = Reading::of(&look.snapshot, &look.leader);
    let (name, rollout) = match wish.rollout {
        Some(_) => abort::choose(&reading, wish.rollout, false)?,
        None => only_staged(&reading)?,
    };
    if rollout.is_taken_back() {
        bail!(
            "rollout {name} is taken back; there is nothing to promote (pitcrew clear {name} lets its version be tried again)"
        );
    }
    let stages = stages(rollout);
    if stages.is_empty() {
        bail!("rollout {name} has no stages; there is nothing to promote");
    }
    let stage = choose(stages, wish.stage)?;
    if stage.phase == StagePhase::Passed {
        let says = format!("stage {} of rollout {name} has passed already.", stage.name);
        return Ok(vec![Step { object: Object::Rollout(name), patch: None, says }]);
    }
    may_be_promoted(&name, stage, wish.skip_bake)?;
    let promotion = StagePromotion {
        stage: stage.name.clone(),
        by: wish.by.to_owned(),
        at: stamp(now),
        skip_bake: wish.skip_bake,
    };
    let mut promotions = rollout.spec.promotions.clone();
    promotions.retain(|earlier| earlier.stage != promotion.stage);
    promotions.push(promotion);
    let version = rollout.version.to_string();
    let patch = json!({"metadata": {"resourceVersion": version}, "spec": {"promotions": promotions}});
    let says =
        format!("stage {} of rollout {name} is promoted by {}; the next one opens.", stage.name, wish.by);
    Ok(vec![Step { object: Object::Rollout(name), patch: Some(patch), says }])
}

fn stages(rollout: &Rollout) -> &[StageStatus] {
    rollout.status.as_ref().map(|status| status.stages.as_slice()).unwrap_or_default()
}

/// The one rollout that has a stage which has not passed.
fn only_staged<'a>(reading: &'a Reading<'a>) -> anyhow::Result<(String, &'a Rollout)> {
    let newest = reading.pools.iter().filter_map(|pool| newest_rollout(reading.snapshot, pool));
    let open = |rollout: &Rollout| stages(rollout).iter().any(|stage| stage.phase != StagePhase::Passed);
    let mut open: Vec<_> = newest.filter(|(_, rollout)| open(rollout)).collect();
    match open.len() {
        0 => bail!("no rollout has a stage that waits; there is nothing to promote"),
        1 => Ok(open.swap_remove(0)),
        _ => {
            let names: Vec<String> = open.into_iter().map(|(name, _)| name).collect();
            bail!("more than one rollout has stages; name the one you mean: {}", names.join(", "))
        }
    }
}

/// The stage that is meant: by name, or the first that has not passed.
fn choose<'a>(stages: &'a [StageStatus], name: Option<&str>) -> anyhow::Result<&'a StageStatus> {
    let names = || stages.iter().map(|stage| stage.name.as_str());
    let Some(name) = name else {
        let open = stages.iter().find(|stage| stage.phase != StagePhase::Passed);
        return open.or(stages.last()).ok_or_else(|| anyhow!("there is no stage"));
    };
    stages.iter().find(|stage| stage.name == name).ok_or_else(|| {
        let like = did_you_mean(name, names());
        anyhow!("there is no stage {name}{like} (there is: {})", names().collect::<Vec<_>>().join(", "))
    })
}

fn may_be_promoted(rollout: &str, stage: &StageStatus, skip_bake: bool) -> anyhow::Result<()> {
    let StageStatus { name, phase, done, failed, total, message, .. } = stage;
    match phase {
        StagePhase::AwaitingApproval | StagePhase::Passed => Ok(()),
        StagePhase::Proving | StagePhase::Baking | StagePhase::Spoiled if skip_bake => Ok(()),
        // Nobody of it is still to come: what is known of it is all that will be.
        StagePhase::Moving | StagePhase::Failed if skip_bake && done + failed >= *total => Ok(()),
        StagePhase::Proving => bail!(
            "the gates of stage {name} of rollout {rollout} have not passed: {}; promote it without them with --skip-bake",
            message.as_deref().unwrap_or("they are asked")
        ),
        StagePhase::Baking => bail!(
            "stage {name} of rollout {rollout} is still watched at work; promote it without waiting for that with --skip-bake"
        ),
        StagePhase::Spoiled => bail!(
            "stage {name} of rollout {rollout} did not stand its bake: {}; promote it in spite of that with --skip-bake",
            message.as_deref().unwrap_or_default()
        ),
        StagePhase::Failed => {
            bail!(
                "nodes of stage {name} of rollout {rollout} have failed; retry or skip them first, or promote it in spite of that with --skip-bake"
            )
        }
        StagePhase::Waiting => bail!("stage {name} of rollout {rollout} has not begun"),
        StagePhase::Moving => {
            bail!("stage {name} of rollout {rollout} is not done: {done} of {total} nodes are")
        }
    }
}
