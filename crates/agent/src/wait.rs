//! Waiting, the one way it is done: looked at in steps, with a limit, a reason, and a word to people if it takes long.

use std::time::Duration;

use tokio::time::Instant;

use crate::cluster::Cluster;
use crate::failure::Failure;
use crate::node::{self, Node};
use crate::stop::Stop;

/// A wait that takes longer is told of in an Event, …
const TOLD_AFTER: Duration = Duration::from_secs(30);
/// … and again after this time: an API server keeps an Event for an hour.
const TOLD_AGAIN: Duration = Duration::from_mins(15);
/// What is missing may be something else with every look; that is told so often at most.
const CHANGE_TOLD: Duration = Duration::from_mins(1);

/// How something is waited for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wait<'a> {
    /// What for, in words.
    pub(crate) what: &'a str,
    /// How often it is looked at.
    pub(crate) every: Duration,
    /// How long at most; `None`: for ever, because somebody asked for that.
    pub(crate) limit: Option<Duration>,
}

/// One look.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// It has come about.
    Done,
    /// Something is missing: what.
    Missing(String),
}

/// Who looks. A trait and not a closure: a program that is told to be `Send` has to know that its looks are.
pub(crate) trait Looker: Send {
    /// One look.
    fn look(&mut self) -> impl Future<Output = Result<Look, Failure>> + Send;
}

/// Whom to tell, and about which node.
#[derive(Clone, Copy)]
pub(crate) struct Audience<'a> {
    /// The API.
    pub(crate) cluster: &'a Cluster,
    /// The node.
    pub(crate) node: &'a Node,
    /// The reason of the Event.
    pub(crate) reason: &'a str,
}

impl Audience<'_> {
    /// Drops the record of the agent's cordon if a person has lifted that: with it, the next cordon, whoever sets it, would
    /// look like the agent's own. What fails here is tried again with the next look.
    async fn forget_lifted_cordon(self) {
        if !self.node.is_cordoned_by_agent() {
            return;
        }
        let dropped = async {
            let mut node = self.cluster.node().await?;
            let operation = "drop the record of a cordon that was lifted";
            self.cluster.change(&mut node, operation, node::without_stale_record).await
        };
        if let Err(error) = dropped.await {
            tracing::warn!("{error}");
        }
    }
}

/// What people have been told of a wait, and when.
struct Told {
    at: Instant,
    missing: String,
}

impl Told {
    fn is_out_of_date(&self, missing: &str) -> bool {
        let after = if self.missing == missing { TOLD_AGAIN } else { CHANGE_TOLD };
        self.at.elapsed() >= after
    }
}

impl Wait<'_> {
    /// Looks until nothing is missing, the limit has passed or the agent is told to end. From the second look on it is also
    /// seen whether somebody has lifted the agent's cordon meanwhile.
    pub(crate) async fn until(
        self,
        stop: &Stop,
        told: Audience<'_>,
        mut look: impl Looker,
    ) -> Result<(), Failure> {
        let Wait { what, every, limit } = self;
        let begun = Instant::now();
        let (mut said, mut last) = (None::<Told>, String::new());
        loop {
            stop.check()?;
            let Look::Missing(missing) = look.look().await? else { return Ok(()) };
            if !last.is_empty() {
                told.forget_lifted_cordon().await;
            }
            if missing != last {
                tracing::info!("waiting for {what}: {missing}");
                last.clone_from(&missing);
            }
            let waited = begun.elapsed();
            if let Some(limit) = limit.filter(|limit| waited >= *limit) {
                return Err(Failure::TimedOut { what: what.to_owned(), missing, limit });
            }
            if said.as_ref().map_or(waited >= TOLD_AFTER, |said| said.is_out_of_date(&missing)) {
                said = Some(Told { at: Instant::now(), missing: missing.clone() });
                let message = format!("The driver manager waits for {what}: {missing}");
                told.cluster.say(told.node, told.reason, false, &message).await;
            }
            let left = limit.map_or(every, |limit| limit.saturating_sub(waited));
            stop.sleep(every.min(left)).await?;
        }
    }
}
