//! The decisions in the life of a rollout: what, when, by whom. Made by comparing what was said with what is said now.

use jiff::Timestamp;

use super::rollback::OURSELVES;
use crate::api::{RolloutPhase, RolloutStatus, StagePhase, StageStatus, TimelineEntry, stamp};
use crate::snapshot::Rollout;

/// What was decided between `said` and `now`.
pub(super) fn news(
    said: Option<&RolloutStatus>,
    now: &RolloutStatus,
    rollout: &Rollout,
    at: Timestamp,
) -> Vec<TimelineEntry> {
    let entry = |what: String, by: &str| TimelineEntry { at: stamp(at), what, by: by.to_owned() };
    let mut news = Vec::new();
    if said.is_none() {
        news.push(entry(begins(rollout), OURSELVES));
    }
    for stage in &now.stages {
        let before = said.and_then(|said| said.stages.iter().find(|before| before.name == stage.name));
        let before = before.map(|before| before.phase).unwrap_or_default();
        if before != stage.phase && stage.phase != StagePhase::Waiting {
            news.push(entry(tells(stage), who(stage, rollout)));
        }
    }
    let before = said.and_then(|said| said.rollback.as_ref());
    if let Some(back) = &now.rollback
        && before.map(|before| (before.tries, &before.message)) != Some((back.tries, &back.message))
        && now.phase != RolloutPhase::RolledBack
    {
        let again = if back.tries > 1 { " again" } else { "" };
        let what = match &back.message {
            Some(message) => format!("a person has to put the version back: {message}"),
            None => format!("the version is put back{again}: {}", back.why),
        };
        news.push(entry(what, &back.by));
    }
    let ends = said.map(|said| said.phase).unwrap_or_default() != now.phase;
    news.extend(end(now.phase).filter(|_| ends).map(|what| entry(what.to_owned(), OURSELVES)));
    news
}

/// Every node was done once. Whoever comes later joins a fleet, and no move of it.
pub(super) fn was_done(said: &RolloutStatus) -> bool {
    let done = end(RolloutPhase::Done);
    said.phase == RolloutPhase::Done || said.timeline.iter().any(|entry| Some(entry.what.as_str()) == done)
}

fn begins(rollout: &Rollout) -> String {
    let spec = &rollout.spec;
    let version = spec.version.as_deref().unwrap_or("a new revision");
    let from = spec.previous.as_ref().and_then(|previous| previous.version.as_deref());
    match (&spec.rollback_of, from) {
        (Some(taken_back), _) => format!("back to {version}, because of rollout {taken_back}"),
        (None, Some(from)) => format!("from {from} to {version}"),
        (None, None) => format!("to {version}"),
    }
}

fn tells(stage: &StageStatus) -> String {
    let why = stage.message.as_ref().filter(|_| stage.phase.is_bad());
    let why = why.map(|why| format!(": {why}")).unwrap_or_default();
    let does = match stage.phase {
        StagePhase::Waiting => "waits",
        StagePhase::Moving => "begins",
        StagePhase::Proving => "asks its gates",
        StagePhase::Baking => "is watched at work",
        StagePhase::AwaitingApproval => "waits for a person's word",
        StagePhase::Passed => "has passed",
        StagePhase::Failed | StagePhase::Spoiled => "has failed",
    };
    format!("stage {} {does}{why}", stage.name)
}

/// A stage that waited for a person, or did not have to wait because of one.
fn who<'a>(stage: &StageStatus, rollout: &'a Rollout) -> &'a str {
    let promotions = rollout.spec.promotions.iter().rev();
    let promoted = promotions.filter(|_| stage.phase == StagePhase::Passed).find(|p| p.stage == stage.name);
    promoted.map_or(OURSELVES, |promotion| promotion.by.as_str())
}

fn end(phase: RolloutPhase) -> Option<&'static str> {
    match phase {
        RolloutPhase::Done => Some("every node is done"),
        RolloutPhase::Failed => Some("every node is done or has failed"),
        RolloutPhase::Aborted => Some("aborted; no node is on its walk any more"),
        RolloutPhase::Superseded => Some("another target took its place"),
        RolloutPhase::RolledBack => Some("the version before is the target again"),
        _ => None,
    }
}
