//! Prometheus is asked while a canary bakes.

use std::time::Duration;

use futures::FutureExt;
use pitcrew_core::api::RolloutPhase;
use pitcrew_core::contract::State;
use serde_json::{Value, json};

use super::stages::{CANARY, labelled, others_untouched, staged, taken_back};
use super::{NEW, in_service, scenario};
use crate::actors::Behaviour;
use crate::scenario::{Outcome, Scenario, Stage};

pub(super) fn all() -> Vec<Scenario> {
    vec![
        Scenario {
            policy: Some(asked("2m")),
            behaviour: Behaviour { prometheus: Some(0.0), ..Behaviour::default() },
            ..scenario("a-prometheus-query-that-is-out-of-bounds-is-taken-back", labelled(), |s| {
                spoils(s).boxed()
            })
        },
        Scenario {
            policy: Some(asked("3s")),
            ..scenario("a-prometheus-that-does-not-answer-makes-a-bake-wait", labelled(), |s| {
                waits(s).boxed()
            })
        },
    ]
}

/// A canary that bakes for so long and must not have errors.
fn asked(duration: &str) -> Value {
    let query = json!({"name": "xid-errors", "query": "sum(DCGM_FI_DEV_XID_ERRORS)", "max": 2});
    let mut policy = staged(&json!({"bake": {"duration": duration, "queries": [query]}}));
    policy["rollout"]["prometheus"] = json!({"url": "http://prometheus.monitoring:9090"});
    policy
}

async fn bakes(stage: &mut Stage) -> Outcome {
    stage.set_version(NEW).await?;
    stage.until("the canary is done", |scene| scene.state(CANARY) == State::UpgradeDone).await?;
    stage.until_rollout("gpu-1", RolloutPhase::Baking).await
}

async fn spoils(stage: &mut Stage) -> Outcome {
    bakes(stage).await?;
    stage.behaviour().change(|behaviour| behaviour.prometheus = Some(3.0));
    taken_back(stage).await?;
    others_untouched(stage)
}

/// Nobody says no, and still nothing passes; then it answers.
async fn waits(stage: &mut Stage) -> Outcome {
    bakes(stage).await?;
    stage.until_reason("gpu-01", "query xid-errors cannot be judged").await?;
    stage.stands_still_for(Duration::from_secs(15)).await?;
    others_untouched(stage)?;
    stage.behaviour().change(|behaviour| behaviour.prometheus = Some(2.0));
    stage.until_done().await?;
    stage.until_rollout("gpu-1", RolloutPhase::Done).await?;
    in_service(stage)
}
