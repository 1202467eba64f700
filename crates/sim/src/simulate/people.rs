//! People who look after rollouts: they promote stages, keep the version matrix, and some of them have second thoughts
//! about a version.

use std::time::Duration;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt};
use pitcrew_core::api::{Rollout, RolloutPhase, StagePhase};
use pitcrew_core::contract::{MATRIX_CONFIG_MAP, MATRIX_KEY, State};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::case::{TO, draw};
use super::fault::Fault;
use super::manner::{IN_BOUNDS, OUT_OF_BOUNDS};
use super::trouble::{Hands, ignore_missing};
use crate::actors::NAMESPACE;

/// What they did in the calm; each only once.
#[derive(Debug, Default)]
pub(super) struct Deeds {
    took_back: bool,
    spoiled: bool,
    alarmed: bool,
    /// Until when Prometheus does not answer.
    silent_until: Option<Instant>,
}

/// Longer than several looks at a short bake.
const SILENCE: Duration = Duration::from_mins(1);

impl Hands<'_> {
    /// A look at the rollout, now and then in the calm. The faults that it brought are told, each with its node.
    pub(super) async fn attend(&self, deeds: &mut Deeds) -> kube::Result<Option<(Fault, Option<String>)>> {
        self.close_breaker().await?;
        let Some(manner) = &self.case.manner else { return Ok(None) };
        let Some(rollout) = self.newest().await? else { return Ok(None) };
        let Some(phase) = rollout.status.as_ref().map(|status| status.phase) else { return Ok(None) };
        if phase == RolloutPhase::Baking && self.case.has(Fault::Spoil) && !deeds.spoiled {
            deeds.spoiled = true;
            return Ok(self.spoil().await?.map(|node| (Fault::Spoil, Some(node))));
        }
        if let Some(fault) = self.change_answers(phase, deeds) {
            return Ok(Some((fault, None)));
        }
        if self.case.has(Fault::TakeBack) && !deeds.took_back && phase == self.second_thoughts() {
            deeds.took_back = true;
            self.take_back().await?;
            return Ok(Some((Fault::TakeBack, None)));
        }
        self.promote(&rollout, manner.skips_bakes).await?;
        Ok(None)
    }

    /// While a stage is watched, Prometheus is silent once and then, once, says what it must not say.
    fn change_answers(&self, phase: RolloutPhase, deeds: &mut Deeds) -> Option<Fault> {
        let (bakes, now) = (phase == RolloutPhase::Baking, Instant::now());
        let (fault, answer) = match deeds.silent_until {
            None if bakes && self.case.has(Fault::Silence) => {
                deeds.silent_until = Some(now + SILENCE);
                (Some(Fault::Silence), None)
            }
            Some(until) if until > now => (None, None),
            _ if bakes && self.case.has(Fault::Alarm) => {
                let first = !std::mem::replace(&mut deeds.alarmed, true);
                (first.then_some(Fault::Alarm), Some(OUT_OF_BOUNDS))
            }
            _ => (None, Some(IN_BOUNDS)),
        };
        // Whoever plays a part in the cluster looks at everything again when it is told something.
        if self.cluster.actors.behaviour().get().prometheus != answer {
            self.behave(|behaviour| behaviour.prometheus = answer);
        }
        fault
    }

    /// When somebody takes a version back in the calm; most do not.
    fn second_thoughts(&self) -> RolloutPhase {
        use RolloutPhase::{AwaitingApproval, Baking, Done, Superseded};
        // A rollout that is superseded is not the newest.
        [Baking, AwaitingApproval, Done, Superseded, Superseded][draw(self.case.seed, "thoughts").usize(..5)]
    }

    fn rollouts(&self) -> Api<Rollout> {
        Api::all(self.cluster.admin.clone())
    }

    async fn newest(&self) -> kube::Result<Option<Rollout>> {
        let number = |rollout: &Rollout| {
            rollout.name_any().rsplit_once('-').and_then(|(_, number)| number.parse::<u32>().ok())
        };
        Ok(self.rollouts().list(&ListParams::default()).await?.items.into_iter().max_by_key(number))
    }

    async fn say(&self, rollout: &Rollout, spec: Value) -> kube::Result<()> {
        let patch = Patch::Merge(json!({ "spec": spec }));
        ignore_missing(self.rollouts().patch(&rollout.name_any(), &PatchParams::default(), &patch).await)
    }

    /// A stage that waits for a word gets it; from those who do not like to wait, before its bake is over.
    async fn promote(&self, rollout: &Rollout, skips_bakes: bool) -> kube::Result<()> {
        let status = rollout.status.as_ref();
        // `pitcrew promote` refuses what is taken back.
        if rollout.spec.rollback.is_some() || status.is_some_and(|status| status.rollback.is_some()) {
            return Ok(());
        }
        let said = status.map(|status| status.stages.as_slice()).unwrap_or_default();
        let waits = |phase: StagePhase| match phase {
            StagePhase::AwaitingApproval => true,
            StagePhase::Baking => skips_bakes,
            _ => false,
        };
        let promoted = |name: &str| rollout.spec.promotions.iter().any(|known| known.stage == name);
        let Some(stage) = said.iter().find(|stage| waits(stage.phase) && !promoted(&stage.name)) else {
            return Ok(());
        };
        let skip = stage.phase == StagePhase::Baking;
        let word = json!({"stage": stage.name, "by": "mei", "at": AT, "skipBake": skip});
        let mut promotions = json!(rollout.spec.promotions);
        if let Some(list) = promotions.as_array_mut() {
            list.push(word);
        }
        self.say(rollout, json!({ "promotions": promotions })).await
    }

    /// A driver that is watched restarts.
    async fn spoil(&self) -> kube::Result<Option<String>> {
        let nodes = self.nodes().list(&ListParams::default()).await?.items;
        let state = super::trouble::keys().state;
        let done = |node: &&k8s_openapi::api::core::v1::Node| {
            node.labels().get(&state).is_some_and(|label| label == State::UpgradeDone.as_str())
        };
        let done: Vec<_> = nodes.iter().filter(done).collect();
        if done.is_empty() {
            return Ok(None);
        }
        let node = done[draw(self.case.seed, "spoiled").usize(..done.len())].name_any();
        self.cluster.actors.behaviour().restart_driver(&node);
        Ok(Some(node))
    }

    /// A person takes the newest version back.
    pub(super) async fn take_back(&self) -> kube::Result<()> {
        match self.newest().await? {
            Some(rollout) => self.say(&rollout, json!({"rollback": word("jobs are slow")})).await,
            None => Ok(()),
        }
    }

    fn matrices(&self) -> Api<ConfigMap> {
        Api::namespaced(self.cluster.admin.clone(), NAMESPACE)
    }

    /// Somebody takes the version out of the matrix, breaks the file, or loses it.
    pub(super) async fn strike_off(&self, whom: u32) -> kube::Result<()> {
        let Some(listed) = self.case.manner.as_ref().and_then(|manner| manner.matrix.as_ref()) else {
            return Ok(());
        };
        let left: Vec<&str> = listed.iter().copied().filter(|version| *version != TO).collect();
        let file = match whom % 3 {
            0 => matrix(&left),
            1 => "versions: [".to_owned(),
            _ => {
                return ignore_missing(
                    self.matrices().delete(MATRIX_CONFIG_MAP, &DeleteParams::default()).await,
                );
            }
        };
        let patch = Patch::Merge(json!({"data": {MATRIX_KEY: file}}));
        ignore_missing(self.matrices().patch(MATRIX_CONFIG_MAP, &PatchParams::default(), &patch).await)
    }

    /// The matrix lists what it should.
    pub(super) async fn list_all(&self) -> kube::Result<()> {
        let Some(listed) = self.case.manner.as_ref().and_then(|manner| manner.matrix.as_ref()) else {
            return Ok(());
        };
        let data = json!({MATRIX_KEY: matrix(listed)});
        let made = json!({"metadata": {"name": MATRIX_CONFIG_MAP}, "data": data});
        let made = serde_json::from_value(made).map_err(kube::Error::SerdeError)?;
        ignore_missing(self.matrices().create(&PostParams::default(), &made).await)?;
        let patch = Patch::Merge(json!({ "data": data }));
        ignore_missing(self.matrices().patch(MATRIX_CONFIG_MAP, &PatchParams::default(), &patch).await)
    }

    /// Somebody wants it all the same; or a person clears it first.
    pub(super) async fn want_again(&self, whom: u32) -> kube::Result<()> {
        match whom % 4 {
            2 => self.cluster.set_driver_version(TO).await,
            3 => {
                for rollout in self.rollouts().list(&ListParams::default()).await? {
                    if rollout.spec.rollback.is_some() {
                        self.say(&rollout, json!({"cleared": word("it was the network")})).await?;
                    }
                }
                self.cluster.set_driver_version(TO).await
            }
            _ => Ok(()),
        }
    }
}

/// Nobody reads it.
const AT: &str = "2026-01-01T00:00:00Z";

fn word(why: &str) -> Value {
    json!({"by": "mei", "at": AT, "why": why})
}

/// The file, with an entry for each driver.
fn matrix(drivers: &[&str]) -> String {
    let entries = drivers.iter().enumerate().map(|(place, driver)| {
        let name = ["current", "canary", "next"][place.min(2)];
        format!("  {name}:\n    driver: \"{driver}\"\n")
    });
    format!("versions:\n{}", entries.collect::<String>())
}
