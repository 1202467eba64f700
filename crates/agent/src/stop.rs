//! Being told to end: SIGTERM, as a value that every wait looks at.
//!
//! Calls are not cut short, only waits between them: what an interrupted call has done nobody knows.

use std::time::Duration;

use tokio::sync::watch;

/// The agent was told to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("told to end")]
pub struct Stopped;

/// Whether the agent was told to end.
#[derive(Clone, Debug)]
pub struct Stop(watch::Receiver<bool>);

/// The hand that tells it.
#[derive(Debug)]
pub struct Stopper(watch::Sender<bool>);

impl Stopper {
    /// A hand, and what it tells.
    pub fn new() -> (Self, Stop) {
        let (sender, receiver) = watch::channel(false);
        (Self(sender), Stop(receiver))
    }

    /// Tells the agent to end.
    pub fn stop(&self) {
        self.0.send_replace(true);
    }
}

impl Stop {
    /// Nobody ever tells.
    pub fn never() -> Self {
        Stopper::new().1
    }

    /// An error if the agent was told to end.
    pub fn check(&self) -> Result<(), Stopped> {
        if *self.0.borrow() { Err(Stopped) } else { Ok(()) }
    }

    /// Waits; an error as soon as the agent is told to end.
    pub async fn sleep(&self, time: Duration) -> Result<(), Stopped> {
        tokio::select! {
            biased;
            stopped = self.told() => Err(stopped),
            () = tokio::time::sleep(time) => Ok(()),
        }
    }

    /// Returns when the agent is told to end.
    pub async fn told(&self) -> Stopped {
        let mut told = self.0.clone();
        if told.wait_for(|told| *told).await.is_err() {
            // The hand is gone, so nobody will tell.
            std::future::pending::<()>().await;
        }
        Stopped
    }
}
