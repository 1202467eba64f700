//! `finish`: gives the node back when the new driver is up, in clusters without an upgrade controller.
//!
//! It runs beside the driver container. It lifts only a cordon that the driver manager has set, and only when nothing else
//! keeps the node out.

use std::time::Duration;

use crate::failure::Failure;
use crate::host::Host;
use crate::node::{self, Node};
use crate::settings::EVENT_REASON;
use crate::uninstall::Agent;
use crate::unload::{self, Left};
use crate::wait::{Audience, Look, Looker, Wait};
use crate::{journal, labels};

/// How often it is looked whether the driver is up, and whether others still keep the node out.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// What is missing where an unload stopped half-way.
const HALF: &str = "half of the old one is still loaded; the node needs a reboot";

/// Waits for the new driver and lifts the driver manager's cordon.
pub async fn finish<H: Host>(agent: &Agent<'_, H>, limit: Option<Duration>) -> Result<(), Failure> {
    let Agent { host, cluster, stop, settings } = agent;
    let boot = journal::boot_id(*host).await?;
    let mut node = cluster.node().await?;
    let operation = "drop the record of a cordon that was lifted";
    cluster.change(&mut node, operation, node::without_stale_record).await?;
    let told = Audience { cluster, node: &node, reason: EVENT_REASON };
    let wait = Wait { what: "the new driver", every: LOOK_EVERY, limit };
    wait.until(stop, told, Finishing { agent, boot: &boot }).await?;
    host.remove(&settings.paths.journal).await?;
    Ok(())
}

/// A node that waits to be given back.
struct Finishing<'a, 'b, H> {
    agent: &'a Agent<'b, H>,
    boot: &'a str,
}

impl<H: Host> Looker for Finishing<'_, '_, H> {
    /// Gives the node back as soon as nothing speaks against it.
    async fn look(&mut self) -> Result<Look, Failure> {
        let Agent { host, cluster, settings, .. } = self.agent;
        let found = unload::found(*host, &settings.paths, self.boot).await?;
        if let Some(missing) = missing(self.agent, found.0).await? {
            return Ok(Look::Missing(missing));
        }
        let mut node = cluster.node().await?;
        if unload::is_half_by_the_node(&found, &node, self.boot) {
            return Ok(Look::Missing(HALF.to_owned()));
        }
        if !node.is_cordoned_by_agent() {
            return Ok(Look::Done);
        }
        if node.kept_out_by().is_none() {
            give_back(self.agent, &mut node).await?;
        }
        // Somebody may have begun to keep it out in the same moment.
        Ok(match node.kept_out_by().filter(|_| node.is_cordoned_by_agent()) {
            Some(who) => Look::Missing(format!("it is up, but the node is kept out by {who}")),
            None => Look::Done,
        })
    }
}

async fn give_back<H: Host>(agent: &Agent<'_, H>, node: &mut Node) -> Result<(), Failure> {
    let custom = agent.settings.custom_label.as_deref();
    agent
        .cluster
        .change(node, "give the node back", |node| {
            node::reboot_is_over(node, node::uncordon(node))
                .with_labels(labels::restore(&node.labels, custom))
        })
        .await?;
    if !node.is_cordoned_by_agent() {
        let message = "The new driver is up: the driver manager has given the node back";
        agent.cluster.say(node, EVENT_REASON, false, message).await;
    }
    Ok(())
}

/// What is missing of the new driver, by what there is of one.
async fn missing<H: Host>(agent: &Agent<'_, H>, left: Left) -> Result<Option<String>, Failure> {
    let paths = &agent.settings.paths;
    Ok(match left {
        Left::Nothing => Some("it is not loaded".to_owned()),
        Left::Half => Some(HALF.to_owned()),
        Left::Whole if !agent.host.mounts().await?.contains(&paths.driver_root) => {
            Some(format!("its root directory {} is not mounted", paths.driver_root))
        }
        Left::Whole if !agent.host.exists(&paths.driver_ready).await? => {
            Some(format!("{} is not there", paths.driver_ready))
        }
        Left::Whole => None,
    })
}
