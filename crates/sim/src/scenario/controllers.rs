//! The controllers of a scenario, one after the other: each can be killed at any moment.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pitcrew_controller::Controller;
use pitcrew_core::plan::Plan;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// One controller after the other.
pub(super) struct Controllers {
    pub(super) make: Box<dyn Fn(&str) -> Controller + Send + Sync>,
    pub(super) running: Mutex<Option<JoinHandle<()>>>,
    pub(super) started: AtomicU64,
    /// What the newest plan says of each node.
    pub(super) reasons: watch::Sender<BTreeMap<String, String>>,
}

impl Controllers {
    pub(super) fn start(&self) {
        let number = self.started.fetch_add(1, Ordering::Relaxed) + 1;
        let reasons = self.reasons.clone();
        let told = move |plan: &Plan| {
            let verdicts = plan.pools.iter().flat_map(|pool| &pool.nodes);
            let now = verdicts.map(|(name, verdict)| (name.to_string(), verdict.reason.to_string()));
            reasons.send_replace(now.collect());
        };
        let controller = (self.make)(&format!("controller-{number}"));
        let controller = controller.on_pass(Box::new(move |_, plan| told(plan)));
        let running = tokio::spawn(async move {
            if let Err(error) = controller.run(std::future::pending()).await {
                tracing::error!(%error, "the controller ended");
            }
        });
        *self.slot() = Some(running);
    }

    pub(super) async fn kill(&self) {
        let running = self.slot().take();
        if let Some(running) = running {
            running.abort();
            let _ = running.await;
        }
    }

    pub(super) fn slot(&self) -> MutexGuard<'_, Option<JoinHandle<()>>> {
        // Nobody panics while holding it; if somebody did, the handle is still good.
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
