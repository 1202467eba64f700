//! `rollback`: a person wants the version before back. `clear`: a version that went wrong may be tried again.

use anyhow::bail;
use jiff::Timestamp;
use pitcrew_controller::{Look, preflight::Unfit};
use pitcrew_core::api::{RolloutPhase, Word, stamp};
use pitcrew_core::plan::newest_rollout;
use pitcrew_core::snapshot::Rollout;
use serde_json::json;

use super::{Object, Step, abort};
use crate::reading::Reading;

/// What is asked for.
pub(super) struct Wish<'a> {
    pub(super) rollout: Option<&'a str>,
    pub(super) by: &'a str,
    pub(super) why: Option<&'a str>,
}

impl Wish<'_> {
    fn word(&self, now: Timestamp) -> Word {
        Word { by: self.by.to_owned(), at: stamp(now), why: self.why.map(str::to_owned) }
    }
}

/// What taking a version back comes to.
pub(super) fn take_back(look: &Look, wish: &Wish<'_>, now: Timestamp) -> anyhow::Result<Vec<Step>> {
    let reading = reading(look)?;
    let meant = |name: &str, rollout: &Rollout| is_newest(&reading, name) && refusal(rollout).is_none();
    let (name, rollout) = choose(&reading, wish, "take back", meant)?;
    let object = Object::Rollout(name.clone());
    if rollout.is_taken_back() {
        let says = format!("rollout {name} is taken back already.");
        return Ok(vec![Step { object, patch: None, says }]);
    }
    if let Some(why_not) = refusal(rollout) {
        bail!("rollout {name} cannot be taken back: {why_not}");
    }
    if !is_newest(&reading, &name) {
        bail!(
            "rollout {name} is not the newest of its pool any more; take that one back, or set the version by hand"
        );
    }
    let previous = rollout.spec.previous.as_ref().and_then(|previous| previous.version.as_deref());
    let says = format!(
        "rollout {name} is taken back by {}: nothing new starts, {} is put back where it came from, and upgraded nodes go back to it.",
        wish.by,
        previous.unwrap_or("what ran before"),
    );
    let version = rollout.version.to_string();
    let patch = json!({"metadata": {"resourceVersion": version}, "spec": {"rollback": wish.word(now)}});
    Ok(vec![Step { object, patch: Some(patch), says }])
}

/// What clearing a version that went wrong comes to.
pub(super) fn clear(look: &Look, wish: &Wish<'_>, now: Timestamp) -> anyhow::Result<Vec<Step>> {
    let reading = reading(look)?;
    let condemned = |_: &str, rollout: &Rollout| rollout.went_wrong() && rollout.spec.cleared.is_none();
    let (name, rollout) = choose(&reading, wish, "clear", condemned)?;
    let object = Object::Rollout(name.clone());
    let version = rollout.spec.version.as_deref().unwrap_or("its revision");
    if rollout.spec.cleared.is_some() {
        let says = format!("rollout {name} is cleared already.");
        return Ok(vec![Step { object, patch: None, says }]);
    }
    if !rollout.went_wrong() {
        bail!("nothing went wrong in rollout {name}; there is nothing to clear");
    }
    let says = format!(
        "{version} is cleared by {}: it is tried again, from the first stage on, as soon as it is asked for.",
        wish.by
    );
    let seen = rollout.version.to_string();
    let patch = json!({"metadata": {"resourceVersion": seen}, "spec": {"cleared": wish.word(now)}});
    Ok(vec![Step { object, patch: Some(patch), says }])
}

fn reading(look: &Look) -> anyhow::Result<Reading<'_>> {
    if !look.installed {
        return Err(Unfit::NoDefinition("rollouts.pitcrew.dev").into());
    }
    Ok(Reading::of(&look.snapshot, &look.leader))
}

/// The rollout that is meant: by name, or the only one that can be meant.
fn choose<'a>(
    reading: &'a Reading<'a>,
    wish: &Wish<'_>,
    what: &str,
    meant: impl Fn(&str, &Rollout) -> bool,
) -> anyhow::Result<(String, &'a Rollout)> {
    if wish.rollout.is_some() {
        return abort::choose(reading, wish.rollout, false);
    }
    let rollouts = reading.snapshot.rollouts.iter();
    let mut found: Vec<_> = rollouts.filter(|(name, rollout)| meant(name, rollout)).collect();
    match found.len() {
        0 => bail!("there is no rollout to {what}"),
        1 => Ok(found.swap_remove(0)).map(|(name, rollout)| (name.clone(), rollout)),
        _ => {
            let names: Vec<&str> = found.into_iter().map(|(name, _)| name.as_str()).collect();
            bail!("there is more than one rollout to {what}; name the one you mean: {}", names.join(", "))
        }
    }
}

fn is_newest(reading: &Reading<'_>, name: &str) -> bool {
    let mut newest = reading.pools.iter().filter_map(|pool| newest_rollout(reading.snapshot, pool));
    newest.any(|(newest, _)| newest == name)
}

/// Why there is no way back from a rollout.
fn refusal(rollout: &Rollout) -> Option<String> {
    let phase = rollout.status.as_ref().map(|status| status.phase).unwrap_or_default();
    match &rollout.spec.rollback_of {
        Some(earlier) => Some(format!("it is the way back of rollout {earlier} itself")),
        None if matches!(phase, RolloutPhase::Superseded | RolloutPhase::RolledBack) => {
            Some(format!("it is over ({phase:?})"))
        }
        None if rollout.spec.previous.is_none() => {
            Some("what ran before it is not known; set the driver version back by hand".to_owned())
        }
        None => None,
    }
}
