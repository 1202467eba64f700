//! The controllers of a run: one that leads and one that stands by. Each can die at any moment, and comes back.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::SignedDuration;
use kube::Client;
use pitcrew_controller::Clock;
use pitcrew_controller::metrics::Metrics;
use pitcrew_controller::prometheus::Asks;
use tokio::task::JoinHandle;

use super::record::Record;
use super::weather::{Crash, Weather};
use crate::api::ApiServer;
use crate::cluster;

/// How the API users of controllers are called, before their number.
const USERS: &str = "pitcrew-";

/// Whether a request is one of ours.
pub(super) fn is_ours(user: &str) -> bool {
    user.starts_with(USERS)
}

/// One replica, through all its lives.
pub(super) struct Member {
    pub(super) user: String,
    client: Client,
    clock: Clock,
    asks: Asks,
    record: Record,
    life: Mutex<Life>,
}

#[derive(Default)]
struct Life {
    running: Option<JoinHandle<()>>,
    number: u32,
    /// Of this life and those before it.
    metrics: Vec<Metrics>,
}

impl Member {
    fn life(&self) -> MutexGuard<'_, Life> {
        self.life.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start(&self) {
        let mut life = self.life();
        match &life.running {
            Some(running) if !running.is_finished() => return,
            // Whoever kills it takes it out of here first.
            Some(_) => self.record.broken("a controller ended by itself"),
            None => {}
        }
        life.number += 1;
        let identity = format!("{}-{}", self.user, life.number);
        let controller = cluster::controller(self.client.clone(), self.clock.clone(), &identity, None);
        let controller = controller.asks(self.asks.clone());
        life.metrics.push(controller.metrics());
        let (passes, ended) = (self.record.clone(), self.record.clone());
        let controller = controller.on_pass(Box::new(move |snapshot, plan| passes.pass(snapshot, plan)));
        life.running = Some(tokio::spawn(async move {
            if let Err(error) = controller.run(std::future::pending()).await {
                ended.broken(&format!("the controller ended: {error}"));
            }
        }));
    }

    async fn kill(&self) {
        let running = self.life().running.take();
        if let Some(running) = running {
            running.abort();
            if let Err(error) = running.await
                && error.is_panic()
            {
                self.record.broken("the controller panicked");
            }
        }
    }

    /// Dies, and is back after a while.
    pub(super) async fn crash(&self, away: Duration) {
        self.kill().await;
        tokio::time::sleep(away).await;
        self.start();
    }

    fn has_ended(&self) -> bool {
        self.life().running.as_ref().is_some_and(JoinHandle::is_finished)
    }
}

/// All of them.
pub(super) struct Controllers(Vec<Arc<Member>>);

impl Controllers {
    pub(super) fn new(count: usize, api: &ApiServer, clock: &Clock, asks: &Asks, record: &Record) -> Self {
        let member = |number: usize| {
            let user = format!("{USERS}{number}");
            let client = api.client_as(&user);
            let (clock, asks, record) = (clock.clone(), asks.clone(), record.clone());
            Arc::new(Member { user, client, clock, asks, record, life: Mutex::default() })
        };
        Self((0..count).map(member).collect())
    }

    pub(super) fn start_all(&self) {
        self.0.iter().for_each(|member| member.start());
    }

    pub(super) async fn kill_all(&self) {
        for member in &self.0 {
            member.kill().await;
        }
    }

    /// How often a plan would have broken a promise, had nobody looked at it.
    pub(super) fn dropped(&self) -> u64 {
        self.0
            .iter()
            .flat_map(|member| member.life().metrics.clone())
            .map(|metrics| metrics.violations())
            .sum()
    }

    /// A replica that ended although nobody killed it.
    pub(super) fn any_ended(&self) -> bool {
        self.0.iter().any(|member| member.has_ended())
    }

    fn member(&self, whom: u32) -> &Arc<Member> {
        &self.0[whom as usize % self.0.len()]
    }

    /// The API user of one of them.
    pub(super) fn user(&self, whom: u32) -> &str {
        &self.member(whom).user
    }

    /// One of them dies: at one of its next writes, at one of its next requests of any kind (each before it is made or
    /// after), or now.
    pub(super) fn crash(&self, whom: u32, away: Duration, weather: &Weather) {
        let member = self.member(whom >> 16).clone();
        let (before, made) = ((whom >> 2) % 12, whom & 2 == 0);
        let (at_write, at_any) = (whom & 1 == 0, whom & 1 << 8 == 0);
        if at_write || at_any {
            weather.crash_at(Crash { member, at_any: !at_write, before, made, away });
        } else {
            tokio::spawn(async move { member.crash(away).await });
        }
    }

    /// They share one clock: replicas whose clocks differ are told apart by nothing that matters here.
    pub(super) fn set_clocks(&self, wrong_by: SignedDuration) {
        if let Some(member) = self.0.first() {
            member.clock.set_wrong_by(wrong_by);
        }
    }
}
