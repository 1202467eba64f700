//! What people, machines and other programs do to the cluster in a run, and how each of it ends.

mod machines;
mod marks;
mod work;

use std::collections::BTreeSet;
use std::ops::Range;
use std::time::Duration;

use fastrand::Rng;
use jiff::SignedDuration;
use k8s_openapi::api::core::v1::{ConfigMap, Node};
use kube::Api;
use kube::api::{Patch, PatchParams};
use pitcrew_core::contract::{DEFAULT_LABEL_DOMAIN, Keys, nvsentinel};
use serde_json::json;
use tokio::time::Instant;

use self::machines::{is_for_good, is_lost, is_no};
use self::marks::limits;
use super::case::{AGAIN, Case, draw};
use super::controllers::Controllers;
use super::fault::Fault;
use super::weather::Weather;
use crate::cluster::Cluster;
use crate::fleet::Fleet;

pub(super) use self::machines::driver_fault;
pub(super) use self::work::put_on;

/// Something that goes wrong, to somebody, for a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// What.
    pub fault: Fault,
    /// To whom: a number from which a node, a pod or a value is chosen when it happens.
    pub whom: u32,
    /// For how long.
    pub lasts: Duration,
}

/// The troubles of a case, in their order.
pub(super) fn draw_all(
    seed: u64,
    faults: &BTreeSet<Fault>,
    fleet: &Fleet,
    storm: Duration,
) -> Vec<(Duration, Trouble)> {
    let mut all = Vec::new();
    for fault in faults {
        let mut rng = draw(seed, fault.name());
        for _ in 0..often(*fault, fleet, &mut rng) {
            let at = storm.mul_f64(rng.f64());
            let lasts = Duration::from_millis(rng.u64(lasts(*fault))).min(storm.saturating_sub(at));
            all.push((at, Trouble { fault: *fault, whom: rng.u32(..), lasts }));
        }
    }
    all.sort_by_key(|(at, trouble)| (*at, trouble.fault));
    all
}

/// For how many milliseconds. Another leader takes over after fifteen seconds at the soonest; and what people have to mend
/// lasts longer than most deadlines, if the storm does.
fn lasts(fault: Fault) -> Range<u64> {
    match fault {
        Fault::Overlap => 10_000..45_000,
        Fault::Pending | Fault::Taint | Fault::TwoBudgets | Fault::Unlabel => 200..110_000,
        _ => 200..20_000,
    }
}

/// How often it happens in a storm. What happens to single requests is drawn with them (`weather.rs`).
fn often(fault: Fault, fleet: &Fleet, rng: &mut Rng) -> usize {
    match fault {
        Fault::Conflict
        | Fault::Throttle
        | Fault::ServerError
        | Fault::LostReply
        | Fault::LateReply
        | Fault::SlowCall
        | Fault::OneInSix
        | Fault::BadVersion
        | Fault::Spoil
        | Fault::GateNo
        | Fault::Intruder
        | Fault::Alarm
        | Fault::Silence
        | Fault::SameName => 0,
        Fault::LabelWipe
        | Fault::Retarget
        | Fault::Abort
        | Fault::Overlap
        | Fault::Remove
        | Fault::TakeBack
        | Fault::ClientLost => 1,
        Fault::Join | Fault::Replace | Fault::Pause | Fault::PolicyEdit | Fault::ClockJump => rng.usize(1..3),
        _ => rng.usize(1..=2 + fleet.nodes / 4),
    }
}

/// The hands that make trouble, and undo it.
pub(super) struct Hands<'a> {
    pub(super) case: &'a Case,
    pub(super) cluster: &'a Cluster,
    pub(super) controllers: &'a mut Controllers,
    pub(super) weather: &'a Weather,
    pub(super) joined: &'a mut u32,
}

impl Hands<'_> {
    /// Makes trouble. The node that it is about, if it is about one.
    pub(super) async fn begin(&mut self, trouble: Trouble) -> kube::Result<Option<String>> {
        let Trouble { fault, whom, lasts } = trouble;
        let until = Instant::now() + lasts;
        match fault {
            Fault::WatchCut => self.weather.cut(self.controllers.user(whom)),
            Fault::Compaction => self.weather.compact(self.controllers.user(whom)),
            Fault::StaleView => self.weather.stall(self.controllers.user(whom), whom, until),
            Fault::Duplicates => self.weather.double(self.controllers.user(whom), true),
            Fault::Webhook | Fault::NoReturn | Fault::Quota | Fault::Overlap => self.weather.begin(fault),
            Fault::Crash => self.controllers.crash(whom, lasts, self.weather),
            Fault::ClockJump => {
                self.controllers.set_clocks(SignedDuration::from_secs(i64::from(whom % 600) - 300));
            }
            Fault::NotReady
            | Fault::Reboot
            | Fault::Flap
            | Fault::Unproven
            | Fault::ClientStuck
            | Fault::GateBlind
            | Fault::CrashLoop
            | Fault::ImageMissing
            | Fault::Hang => return self.break_machine(fault, whom).await,
            Fault::ClientLost => self.lose_client(whom),
            Fault::Replace | Fault::Remove | Fault::Join => return self.move_machine(fault, whom).await,
            Fault::Pending => return self.fill(whom).await,
            Fault::StuckPod => self.hold_pod(whom).await?,
            Fault::PodDeleted => self.delete_driver(whom).await?,
            Fault::Latecomer => self.put_latecomer(whom).await?,
            Fault::Scale => self.scale(whom).await?,
            Fault::TightBudget => self.set_budgets(Some(whom)).await?,
            Fault::TwoBudgets => self.double_budgets(whom).await?,
            Fault::Pause => self.set_options(&json!({"autoUpgrade": false}), Some(whom)).await?,
            Fault::PolicyEdit => self.set_options(&limits(whom), Some(whom)).await?,
            Fault::Retarget => {
                let version = if whom.is_multiple_of(3) { super::case::FROM } else { AGAIN };
                self.cluster.set_driver_version(version).await?;
            }
            Fault::Abort => self.abort(true).await?,
            Fault::Cordon
            | Fault::Uncordon
            | Fault::Relabel
            | Fault::Skip
            | Fault::Quarantine
            | Fault::Unlabel
            | Fault::Taint => return self.mark(fault, whom).await,
            Fault::LabelWipe => self.wipe().await?,
            Fault::TakeBack => self.take_back().await?,
            Fault::StruckOff => self.strike_off(whom).await?,
            Fault::Conflict
            | Fault::Throttle
            | Fault::ServerError
            | Fault::LostReply
            | Fault::LateReply
            | Fault::SlowCall
            | Fault::OneInSix
            | Fault::BadVersion
            | Fault::Spoil
            | Fault::GateNo
            | Fault::Intruder
            | Fault::Alarm
            | Fault::Silence
            | Fault::SameName => {}
        }
        Ok(None)
    }

    /// Undoes what does not end by itself, on the node that it was about.
    pub(super) async fn end(&mut self, trouble: Trouble, node: Option<String>) -> kube::Result<()> {
        let Trouble { fault, whom, .. } = trouble;
        match fault {
            Fault::Duplicates => self.weather.double(self.controllers.user(whom), false),
            Fault::Webhook | Fault::NoReturn | Fault::Quota | Fault::Overlap => self.weather.end(fault),
            Fault::ClockJump => self.controllers.set_clocks(SignedDuration::ZERO),
            Fault::NotReady | Fault::Reboot => {
                if let Some(node) = node {
                    self.behave(|behaviour| {
                        if fault == Fault::Reboot {
                            *behaviour.boots.entry(node.clone()).or_default() += 1;
                        }
                        behaviour.down.remove(&node);
                    });
                }
            }
            Fault::Unproven => self.behave(|behaviour| behaviour.unproven.clear()),
            Fault::ClientStuck => self.behave(|behaviour| behaviour.clients.retain(is_lost)),
            Fault::Pending => self.make_room().await?,
            Fault::TwoBudgets => self.single_budgets().await?,
            Fault::Unlabel => self.label_again().await?,
            Fault::Taint => self.untaint().await?,
            Fault::GateBlind => self.behave(|behaviour| behaviour.gates.retain(is_no)),
            Fault::StruckOff => self.list_all().await?,
            Fault::CrashLoop | Fault::ImageMissing | Fault::Hang => self.behave(|behaviour| {
                behaviour.drivers.retain(is_for_good);
            }),
            Fault::TakeBack => self.want_again(whom).await?,
            Fault::StuckPod => self.free_pods().await?,
            Fault::Latecomer => self.remove_latecomers().await?,
            Fault::TightBudget => self.set_budgets(None).await?,
            Fault::Pause => self.set_options(&json!({"autoUpgrade": true}), None).await?,
            Fault::Abort if !self.case.abort_stays() => self.abort(false).await?,
            Fault::Skip => self.unskip().await?,
            Fault::Quarantine => self.release(node).await?,
            _ => {}
        }
        Ok(())
    }

    /// Undoes everything that a person would have to undo, so that nothing stands in the way any more.
    pub(super) async fn mend(&mut self) -> kube::Result<()> {
        self.weather.mend();
        self.controllers.set_clocks(SignedDuration::ZERO);
        self.controllers.start_all();
        self.behave(|behaviour| {
            behaviour.down.clear();
            behaviour.unproven.clear();
            behaviour.clients.retain(is_lost);
            behaviour.drivers.retain(is_for_good);
            behaviour.gates.retain(is_no);
        });
        self.list_all().await?;
        self.free_pods().await?;
        self.remove_latecomers().await?;
        self.set_budgets(None).await?;
        self.single_budgets().await?;
        self.unskip().await?;
        self.make_room().await?;
        self.label_again().await?;
        self.untaint().await?;
        self.reset_options().await?;
        self.scale_back().await?;
        if self.case.has(Fault::Abort) && !self.case.abort_stays() {
            self.abort(false).await?;
        }
        self.relabel_foreign().await
    }

    /// A person closes NVSentinel's circuit breaker whenever it trips.
    pub(super) async fn close_breaker(&self) -> kube::Result<()> {
        if !self.case.fleet.nvsentinel {
            return Ok(());
        }
        let api = Api::<ConfigMap>::namespaced(self.cluster.admin.clone(), nvsentinel::NAMESPACE);
        let closed = Patch::Merge(json!({"data": {"status": "CLOSED"}}));
        ignore_missing(api.patch(nvsentinel::BREAKER, &params(), &closed).await)
    }

    pub(super) fn behave(&self, change: impl FnOnce(&mut crate::actors::Behaviour)) {
        self.cluster.actors.behaviour().change(change);
    }

    pub(super) fn nodes(&self) -> Api<Node> {
        Api::all(self.cluster.admin.clone())
    }
}

pub(super) fn keys() -> Keys {
    Keys::new(&"gpu".into(), DEFAULT_LABEL_DOMAIN)
}

fn chosen<T>(all: &[T], whom: u32) -> Option<&T> {
    all.get((whom as usize).checked_rem(all.len())?)
}

pub(super) fn params() -> PatchParams {
    PatchParams::default()
}

/// The cluster moves on under everybody's hands: what is gone, or there already, needs nothing.
pub(super) fn ignore_missing<T>(answer: kube::Result<T>) -> kube::Result<()> {
    match answer {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409 | 422) => Ok(()),
        Err(error) => Err(error),
    }
}
