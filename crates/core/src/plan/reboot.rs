//! A node whose driver only a reboot brings back, as its driver manager says. Its driver counts as not ready, so it is neither
//! given back nor done; it is not started, and one on its walk waits as long as its driver may take. It goes on by itself.

use jiff::{SignedDuration, Timestamp};

use super::members::{Freshness, Member, Standing};
use super::pool::View;
use super::walk::{Decision, deadline, fail, ran_out};
use crate::contract::{GPU_DRIVER, KEEP_CORDONED_LABEL, State};
use crate::health::quarantine;
use crate::reason::Reason;
use crate::visit::{Cause, Finding, Walk};

/// Why nothing is begun with a node: another driver pod would find the same half of a driver.
pub(super) fn refuses(member: &Member<'_>) -> Option<Reason> {
    reason(member, None)
}

/// Waits for the reboot, or for the end of whatever holds the driver, until the time of the node's state is over.
pub(super) fn wait(
    view: &View<'_>,
    member: &Member<'_>,
    walk: &Walk,
    limit: SignedDuration,
) -> Option<Decision> {
    let until = deadline(view, walk, limit);
    let reason = reason(member, Some(until))?;
    if !ran_out(view, until) {
        return Some(Decision::stay(reason));
    }
    let what = member.node.needs_reboot().map(|record| record.why.clone()).unwrap_or_default();
    let found = Finding { about: member.pod.map(|pod| pod.name.clone()), ..Finding::plain(what) };
    Some(fail(view, member, walk, Cause::NeedsReboot { found, seconds: limit.as_secs() }))
}

/// Its driver manager had taken it out, and its driver is up again. Where nothing in its driver pod gives it back, we do, when it
/// has proved itself.
pub(super) fn came_back(view: &View<'_>, member: &Member<'_>) -> bool {
    let node = member.node;
    let is = |label: &str| node.mark(label) == Some("true");
    let left_alone = is(&view.policy.keys.skip) || is(KEEP_CORDONED_LABEL) || member.asked_for;
    let held = left_alone || view.is_called_off() || quarantine(node).is_some();
    // What is told of the driver may be from before. Times are told in whole seconds, and a clock may have been ahead.
    let ready = member.pod.and_then(|pod| pod.ready_since);
    let cordoned = node.driver_manager_cordon().map(|record| record.since);
    let cordoned = cordoned.filter(|since| *since <= view.snapshot.now);
    let came_up = ready.zip(cordoned).is_none_or(|(ready, since)| ready.as_second() >= since.as_second());
    // There is a driver manager for GPUs alone.
    view.policy.driver.as_str() == GPU_DRIVER
        && matches!(member.standing, Standing::Label(State::Unknown | State::UpgradeDone))
        && node.is_cordoned_by_driver_manager()
        && (member.sync, member.driver_ready) == (Freshness::InSync, true)
        && came_up
        && !held
}

fn reason(member: &Member<'_>, until: Option<Timestamp>) -> Option<Reason> {
    let record = member.node.needs_reboot()?;
    Some(Reason::NeedsReboot { why: record.why.clone(), until })
}
