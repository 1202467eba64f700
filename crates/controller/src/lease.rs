//! Leader election by a Lease, with client-go's rule: trust only how long *we* have seen the record unchanged.
//!
//! Renewals are one PUT every two seconds with the version that the last one returned; nothing else is asked.
//! `RENEW_WITHIN + CALL < DURATION`, so a leader that cannot renew stands down before anybody else may lead.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::{Api, PostParams};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

use crate::clock::Clock;

/// Others wait this long after the last renewal that they saw.
const DURATION: Duration = Duration::from_secs(15);
/// A leader that has not renewed for this long stands down.
const RENEW_WITHIN: Duration = Duration::from_secs(8);
/// One call; a hanging one counts as failed.
const CALL: Duration = Duration::from_secs(5);
/// Between two tries.
const RETRY: Duration = Duration::from_secs(2);

/// One candidate.
pub struct Elector {
    api: Api<Lease>,
    name: String,
    id: String,
    clock: Clock,
    /// The record as last seen, and since when it has been so.
    seen: Option<(Lease, Instant)>,
}

impl Elector {
    /// A candidate called `id` for the Lease `name`.
    pub fn new(api: Api<Lease>, name: &str, id: &str, clock: Clock) -> Self {
        Self { api, name: name.to_owned(), id: id.to_owned(), clock, seen: None }
    }

    /// Leads whenever it can; `leading` tells. Ends when nobody listens any more, and gives the Lease back.
    pub async fn run(mut self, leading: watch::Sender<bool>) {
        let mut renewed = Instant::now();
        while !leading.is_closed() {
            let won = match timeout(CALL, self.attempt()).await {
                Ok(Ok(won)) => won.then(Instant::now),
                Ok(Err(error)) => {
                    warn!(%error, "cannot reach the lease");
                    None
                }
                Err(_) => None,
            };
            renewed = won.unwrap_or(renewed);
            let is_leader =
                won.is_some() || (*leading.borrow() && renewed.elapsed() < RENEW_WITHIN && self.is_ours());
            // Only a change is news: whoever listens starts afresh on it.
            if leading.send_if_modified(|leads| std::mem::replace(leads, is_leader) != is_leader) {
                info!(id = self.id, "{}", if is_leader { "leads" } else { "stands down" });
            }
            tokio::select! {
                biased;
                () = leading.closed() => break,
                () = sleep(RETRY) => {}
            }
        }
        let _ = timeout(CALL, self.give_back()).await;
    }

    /// As far as we know. Somebody else's record means that we lost it.
    fn is_ours(&self) -> bool {
        self.seen.as_ref().and_then(|(lease, _)| holder(lease)) == Some(&self.id)
    }

    /// One try to create, take over or renew. Exclusive, because every write carries the version that was seen.
    async fn attempt(&mut self) -> kube::Result<bool> {
        if !self.is_ours() {
            self.look().await?;
        }
        let Some((lease, since)) = &self.seen else {
            let metadata = ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() };
            let lease = Lease { metadata, spec: Some(self.spec(None)) };
            let created = self.api.create(&PostParams::default(), &lease).await;
            return self.took(created);
        };
        let free = holder(lease).is_none() || since.elapsed() >= DURATION;
        if !self.is_ours() && !free {
            return Ok(false);
        }
        let spec = self.spec(lease.spec.as_ref().filter(|_| self.is_ours()));
        let lease = Lease { spec: Some(spec), ..lease.clone() };
        let written = self.api.replace(&self.name, &PostParams::default(), &lease).await;
        self.took(written)
    }

    fn took(&mut self, written: kube::Result<Lease>) -> kube::Result<bool> {
        match written {
            Ok(lease) => {
                self.seen = Some((lease, Instant::now()));
                Ok(true)
            }
            Err(kube::Error::Api(status))
                if status.is_conflict() || status.is_already_exists() || status.is_not_found() =>
            {
                // Somebody wrote in between: look before the next try.
                self.seen = None;
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    async fn look(&mut self) -> kube::Result<()> {
        let found = self.api.get_opt(&self.name).await?;
        let unchanged = |lease: &Lease| self.seen.as_ref().is_some_and(|(seen, _)| seen.spec == lease.spec);
        self.seen = match (found, self.seen.as_ref().map(|(_, since)| *since)) {
            (Some(lease), Some(since)) if unchanged(&lease) => Some((lease, since)),
            (Some(lease), _) => Some((lease, Instant::now())),
            (None, _) => None,
        };
        Ok(())
    }

    async fn give_back(&mut self) -> kube::Result<()> {
        if !self.is_ours() {
            return Ok(());
        }
        if let Some((mut lease, _)) = self.seen.take() {
            if let Some(spec) = &mut lease.spec {
                spec.holder_identity = Some(String::new());
            }
            self.api.replace(&self.name, &PostParams::default(), &lease).await?;
        }
        Ok(())
    }

    fn spec(&self, ours: Option<&LeaseSpec>) -> LeaseSpec {
        let now = MicroTime(self.clock.now());
        LeaseSpec {
            holder_identity: Some(self.id.clone()),
            lease_duration_seconds: i32::try_from(DURATION.as_secs()).ok(),
            acquire_time: ours.and_then(|spec| spec.acquire_time.clone()).or(Some(now.clone())),
            renew_time: Some(now),
            ..LeaseSpec::default()
        }
    }
}

fn holder(lease: &Lease) -> Option<&String> {
    lease.spec.as_ref()?.holder_identity.as_ref().filter(|holder| !holder.is_empty())
}
