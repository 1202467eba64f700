//! `uninstall_driver`: makes the node ready for another driver, in the documented order.
//!
//! ```text
//!  nothing loaded        ── last operands leave ── clear the root ──────────────────────┐
//!  same configuration    ── last operands leave ── clear the root ────────────────────────┐
//!  another one ── operands leave ── cordon, users leave ── last operands ── unload ── root ┤
//!                                                     nouveau, vfio, MOFED ◀───────────────┘ ─▶ labels back
//! ```
//!
//! A failure puts back what was paused, and gives the node back if the driver is as it was and nobody was drained for it in
//! vain; without a driver the node stays cordoned, and with half of one its operands stay away too. Everything that is needed to go on after `kill -9` is on the
//! node: in its labels, its annotations, and [`crate::journal`].

use std::time::Duration;

use crate::cluster::Cluster;
use crate::failure::Failure;
use crate::host::{Host, KernelPaths};
use crate::journal::Stage;
use crate::labels::{self, Batch};
use crate::leaving::{holds_claims, leave, no_claim_holders};
use crate::node::{self, Node};
use crate::pods::Leave;
use crate::settings::{EVENT_REASON, Settings, Uncordon};
use crate::stop::Stop;
use crate::unload::{self, Left};
use crate::vfio::{self, Which};
use crate::wait::Audience;
use crate::{host_driver, journal, modules, mofed, operands};

/// The DaemonSet controller takes the pod off a node with a driver of its own within this time.
const TAKEN_OFF_WITHIN: Duration = Duration::from_mins(1);
/// What is put back after SIGTERM has to be so before SIGKILL comes, 30 s later.
const PUT_BACK_WITHIN: Duration = Duration::from_secs(20);

/// An agent at work on its node.
pub struct Agent<'a, H> {
    /// The machine.
    pub host: &'a H,
    /// The API.
    pub cluster: Cluster,
    /// Whether it was told to end.
    pub stop: Stop,
    /// What it was told to do.
    pub settings: Settings,
}

/// Makes the node ready for another driver.
pub async fn uninstall<H: Host>(agent: &Agent<'_, H>) -> Result<(), Failure> {
    // What an earlier start paused has to be found again, even by one that is told to end at once.
    let node = agent.cluster.undisturbed().node().await?;
    let mut run = match Run::begin(agent, node.clone()).await {
        Ok(run) => run,
        Err(failure) => {
            // Nobody knows what there is of the driver: operands that an earlier start paused must not come back to half of it.
            agent.say_failure(&node, &failure).await;
            return Err(failure);
        }
    };
    let Err(failure) = run.work().await else { return Ok(()) };
    let failure = run.all_in_all(failure);
    run.put_back(&failure).await;
    agent.say_failure(&run.node, &failure).await;
    Err(failure)
}

impl<H: Host> Agent<'_, H> {
    /// Says on the node why the work was not done. That the agent was told to end is nobody's trouble.
    async fn say_failure(&self, node: &Node, failure: &Failure) {
        if !matches!(failure, Failure::Stopped(_)) {
            let message = format!("The driver manager failed: {}", failure.sentence());
            self.cluster.say(node, EVENT_REASON, true, &message).await;
        }
    }
}

/// One attempt.
struct Run<'a, 'b, H> {
    agent: &'a Agent<'b, H>,
    /// The node as it was last read or written.
    node: Node,
    boot: String,
    /// What there is of the driver.
    left: Left,
    /// The driver that is loaded came after the last unload, and the node has not been given back since.
    succeeded: bool,
    /// The whole node was drained, in this start.
    drained: bool,
    /// … or in an earlier one, it did not help, and the node has not been given back since.
    in_vain: bool,
}

impl<'a, 'b, H: Host> Run<'a, 'b, H> {
    /// Finds out how far the start before this one was.
    async fn begin(agent: &'a Agent<'b, H>, node: Node) -> Result<Self, Failure> {
        let boot = journal::boot_id(agent.host).await?;
        let found = unload::found(agent.host, &agent.settings.paths, &boot).await?;
        let half = unload::is_half_by_the_node(&found, &node, &boot);
        let (left, stage) = if half { (Left::Half, None) } else { found };
        if left == Left::Nothing && matches!(stage, Some(Stage::Unloading(_))) {
            // The last start was killed before it could note that.
            journal::write(agent.host, &agent.settings.paths.journal, &boot, Stage::Unloaded).await?;
        }
        let kept = node.is_cordoned_by_agent() && node.unschedulable;
        let (succeeded, in_vain) = match stage {
            Some(Stage::Unloaded) => (kept, false),
            Some(Stage::DrainedInVain) => (false, kept),
            Some(Stage::Unloading(_)) | None => (false, false),
        };
        if !kept && matches!(stage, Some(Stage::Unloaded | Stage::DrainedInVain)) {
            // The node was given back since: the next cordon is about another attempt, for the starts after this one too.
            agent.host.remove(&agent.settings.paths.journal).await?;
        }
        Ok(Self { agent, node, boot, left, succeeded, drained: false, in_vain })
    }

    async fn work(&mut self) -> Result<(), Failure> {
        let Agent { host, cluster, stop, settings } = self.agent;
        if self.left == Left::Half {
            self.keep_out().await?;
        }
        let found = host_driver::settle(*host, cluster, stop, &mut self.node, &settings.paths).await?;
        if let Some(version) = found {
            stop.sleep(TAKEN_OFF_WITHIN).await?;
            return Err(Failure::HostDriver { version });
        }
        match self.left {
            Left::Nothing => {
                tracing::info!("no driver is loaded");
                unload::forget_digest(*host, &settings.paths).await?;
                self.plugins_leave().await?;
                unload::clear_root(*host, &settings.paths).await?;
                self.prepare().await?;
            }
            // Looked at before anybody is bothered.
            Left::Whole if self.is_wanted().await? => {
                tracing::info!("the driver that is loaded is the one that is wanted: it stays");
                self.plugins_leave().await?;
                unload::clear_root(*host, &settings.paths).await?;
            }
            Left::Whole | Left::Half => {
                // What cannot be paused later is found before anybody is evicted.
                labels::pause(&self.node.labels, Batch::Last, settings.custom_label.as_deref())?;
                self.pause(Batch::First).await?;
                self.empty().await?;
                self.pause(Batch::Last).await?;
                self.unload().await?;
                unload::clear_root(*host, &settings.paths).await?;
                self.prepare().await?;
            }
        }
        self.end().await
    }

    /// An earlier start was killed between two modules, and where pods are not evicted it had not cordoned the node: that
    /// comes before everything that may take its time.
    async fn keep_out(&mut self) -> Result<(), Failure> {
        let (boot, now) = (&self.boot, self.agent.cluster.now());
        let decide = |node: &Node| node::needs_reboot(node, boot, None, now);
        self.agent.cluster.change(&mut self.node, "keep the node out with half a driver", decide).await?;
        Ok(())
    }

    /// The same configuration is installed and serves, and nobody wants it installed again.
    async fn is_wanted(&self) -> Result<bool, Failure> {
        let Agent { host, settings, .. } = self.agent;
        let Settings { force_reinstall, digest, paths, .. } = settings;
        let installed = host.read(&paths.state_file).await?.unwrap_or_default();
        if *force_reinstall || digest.is_empty() || installed.trim() != digest {
            return Ok(false);
        }
        let serves = modules::serves(&host.modules(&KernelPaths::default()).await?);
        if !serves {
            tracing::warn!("the wanted driver is loaded, but not all of it: it is installed again");
        }
        Ok(serves)
    }

    fn told(&self) -> Audience<'_> {
        Audience { cluster: &self.agent.cluster, node: &self.node, reason: EVENT_REASON }
    }

    /// Pauses operands and waits until they have left.
    async fn pause(&mut self, batch: Batch) -> Result<(), Failure> {
        let Agent { cluster, stop, settings, .. } = self.agent;
        let custom = settings.custom_label.as_deref();
        let operation = "pause the operands";
        // What is too long is found before anything is written; meanwhile changed labels are the same for this.
        labels::pause(&self.node.labels, batch, custom)?;
        let paused = |node: &Node| labels::pause(&node.labels, batch, custom).unwrap_or_default();
        cluster
            .change(&mut self.node, operation, |node| {
                node::without_stale_record(node).with_labels(paused(node))
            })
            .await?;
        operands::gone(self.told(), stop, &settings.namespace, batch, custom).await
    }

    /// Takes everybody off who uses a GPU, unless somebody else does that.
    async fn empty(&mut self) -> Result<(), Failure> {
        let dra = labels::is_deployed(&self.node.labels, labels::DRA_DRIVER);
        let (evict, drain) = self.allowed();
        if evict || (dra && drain) {
            self.cordon().await?;
            match self.leave(false).await {
                Err(failure @ (Failure::CannotLeave(_) | Failure::TimedOut { .. })) if drain => {
                    tracing::warn!("{failure}; draining the node instead");
                    self.drain().await?;
                }
                result => result?,
            }
        }
        if !self.plugin_leaves() {
            return Ok(());
        }
        self.clients_leave().await?;
        no_claim_holders(self.told(), &self.agent.stop).await
    }

    /// Clients that the user's label places leave with their label, like operands; those that hold claims have to do that
    /// while there is a plugin that gives the claims back.
    async fn clients_leave(&mut self) -> Result<(), Failure> {
        if self.has_clients().await? { self.pause(Batch::Client).await } else { Ok(()) }
    }

    /// Where nobody else has to leave, plugins come back for the new root directory. Clients with claims stay, as whoever has
    /// a claim does: without a plugin, or without a driver under it, they could not leave.
    async fn plugins_leave(&mut self) -> Result<(), Failure> {
        let batch = if self.has_clients().await? { Batch::Plugin } else { Batch::Last };
        self.pause(batch).await
    }

    /// Whether the user's label places pods that hold claims, and not a plugin.
    async fn has_clients(&self) -> Result<bool, Failure> {
        let Agent { cluster, settings, .. } = self.agent;
        let deployed = |key: &&String| labels::is_deployed(&self.node.labels, key);
        match settings.custom_label.as_ref().filter(deployed) {
            Some(key) => holds_claims(cluster, key).await,
            None => Ok(false),
        }
    }

    /// Whether a DRA plugin has to leave, the operator's own or one that the user's label places.
    fn plugin_leaves(&self) -> bool {
        let keys = labels::keys(Batch::Last, self.agent.settings.custom_label.as_deref());
        keys.iter().any(|key| labels::is_deployed(&self.node.labels, key))
    }

    /// Whether pods may be evicted, and the node drained. An upgrade controller does both itself.
    fn allowed(&self) -> (bool, bool) {
        let own = !self.node.is_managed();
        (self.agent.settings.evict && own, self.agent.settings.drain && own)
    }

    async fn cordon(&mut self) -> Result<(), Failure> {
        let now = self.agent.cluster.now();
        self.agent.cluster.change(&mut self.node, "cordon the node", |node| node::cordon(node, now)).await?;
        Ok(())
    }

    async fn drain(&mut self) -> Result<(), Failure> {
        self.cordon().await?;
        let result = self.leave(true).await;
        // When its time is over it has emptied the node but for a pod or two; who cannot leave is found before anybody does.
        self.drained = matches!(result, Ok(()) | Err(Failure::TimedOut { .. }));
        result
    }

    async fn leave(&self, whole_node: bool) -> Result<(), Failure> {
        let settings = &self.agent.settings;
        let how = Leave {
            whole_node,
            selector: settings.selector.clone(),
            force: settings.force,
            delete_empty_dir: settings.delete_empty_dir,
            custom_label: settings.custom_label.clone(),
            administrators: self.plugin_leaves(),
        };
        leave(self.told(), &self.agent.stop, &how, settings.leave_limit).await
    }

    async fn unload(&mut self) -> Result<(), Failure> {
        let Agent { host, settings, stop, .. } = self.agent;
        // From here on there is no way back; the last moment to be told.
        stop.check()?;
        let first = unload::unload(*host, &settings.paths, &self.boot, &mut self.left).await;
        let (_, drain) = self.allowed();
        match first {
            Err(Failure::Busy(busy)) if drain && !self.drained && !self.in_vain => {
                tracing::warn!("the driver cannot be unloaded: {busy}; draining the node");
                self.drain().await?;
                unload::unload(*host, &settings.paths, &self.boot, &mut self.left).await
            }
            result => result,
        }
    }

    /// What else the next driver needs.
    async fn prepare(&self) -> Result<(), Failure> {
        let Agent { host, settings, stop, .. } = self.agent;
        unload::unload_nouveau(*host).await?;
        vfio::unbind(*host, stop, &Which::All, settings.nvswitches).await?;
        mofed::ready(*host, settings, stop, self.told()).await
    }

    /// The operands come back; they wait for the new driver by themselves. The cordon stays until that is up.
    async fn end(&mut self) -> Result<(), Failure> {
        let Agent { host, cluster, settings, .. } = self.agent;
        let custom = settings.custom_label.as_deref();
        let early = settings.uncordon == Uncordon::Early;
        cluster
            .change(&mut self.node, "put the operands back", |node| {
                let given_back = if early { node::uncordon(node) } else { node::without_stale_record(node) };
                node::reboot_is_over(node, given_back).with_labels(labels::restore(&node.labels, custom))
            })
            .await?;
        if self.node.is_cordoned_by_agent() {
            if self.left == Left::Nothing {
                // What is loaded from now on is the new driver: a failure before `finish` must not give the node back.
                journal::write(*host, &settings.paths.journal, &self.boot, Stage::Unloaded).await?;
            }
            let message = "The node stays cordoned until `driver-manager finish` sees its driver up";
            tracing::info!("{message}");
            cluster.say(&self.node, EVENT_REASON, false, message).await;
        } else {
            host.remove(&settings.paths.journal).await?;
        }
        Ok(())
    }

    /// A failure, with what it means together with what was done before.
    fn all_in_all(&mut self, failure: Failure) -> Failure {
        self.in_vain |= self.drained && !matches!(failure, Failure::Stopped(_));
        match (self.left, failure) {
            (_, failure @ (Failure::Stopped(_) | Failure::HalfUnloaded { .. })) => failure,
            (Left::Half, failure) => Failure::StillHalf(Box::new(failure)),
            (Left::Whole, failure) if self.in_vain => Failure::DrainedInVain(Box::new(failure)),
            (_, failure) => failure,
        }
    }

    /// The next start has to know that draining the node does not help: it would begin with that again.
    async fn note_that_it_was_in_vain(&self) {
        let Agent { host, settings, .. } = self.agent;
        let noted = journal::write(*host, &settings.paths.journal, &self.boot, Stage::DrainedInVain).await;
        if let Err(error) = noted {
            tracing::error!("{error}: {}", error.source);
        }
    }

    /// After a failure: what was paused comes back unless it would run into half a driver, and the node is given back if
    /// its driver is as it was. After a drain that did not help it is not: its pods would come back, and the next start,
    /// minutes later, would take them all off again.
    async fn put_back(&mut self, failure: &Failure) {
        let cluster = self.agent.cluster.undisturbed();
        let custom = self.agent.settings.custom_label.as_deref();
        let (left, stays, why) = (self.left, self.succeeded || self.in_vain, why_half(failure));
        if left == Left::Whole && self.in_vain {
            self.note_that_it_was_in_vain().await;
        }
        let (boot, now) = (self.boot.clone(), cluster.now());
        let decide = |node: &Node| {
            let operands = labels::restore(&node.labels, custom);
            match left {
                Left::Half => node::needs_reboot(node, &boot, why.as_deref(), now),
                Left::Whole if !stays => {
                    node::reboot_is_over(node, node::uncordon(node)).with_labels(operands)
                }
                Left::Whole | Left::Nothing => {
                    node::reboot_is_over(node, node::without_stale_record(node)).with_labels(operands)
                }
            }
        };
        let put_back = async {
            // A write whose answer was lost may have been made: what is put back is what is there.
            let mut node = cluster.node().await?;
            cluster.change(&mut node, "put back what was paused", decide).await?;
            Ok::<Node, Failure>(node)
        };
        match tokio::time::timeout(PUT_BACK_WITHIN, put_back).await {
            Ok(Ok(node)) => self.node = node,
            Ok(Err(error)) => tracing::error!("could not put back what was paused: {}", error.sentence()),
            Err(_) => tracing::error!("could not put back what was paused in time; the next run does"),
        }
    }
}

/// Why half a driver is left, if that is what this start saw.
fn why_half(failure: &Failure) -> Option<String> {
    matches!(failure, Failure::HalfUnloaded { .. }).then(|| failure.sentence())
}
