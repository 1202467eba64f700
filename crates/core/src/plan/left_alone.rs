//! What a way back leaves alone: nodes that never had a version that went wrong, and do not have the one before either, because
//! that was on its way itself. They stay as they are, and go on by the stages when all others are back.

use super::members::{Freshness, Member};
use super::pool::View;
use super::rollback::{brought, is_forgivable};
use super::rollout::rollouts;
use super::stages::is_skipped;
use crate::contract::State;
use crate::snapshot::{DaemonSet, Pod, Rollout};
use crate::version::DriverVersion;

/// On the way back: nobody has touched its driver, which is of another version than the wanted one, and never went wrong.
pub(super) fn is_left_alone(view: &View<'_>, member: &Member<'_>) -> bool {
    let driver = member.pod.zip(member.daemon_set);
    let outdated = member.sync == Freshness::Outdated && member.is_untouched();
    outdated && driver.is_some_and(|(pod, ds)| is_none_of_it(view, pod, ds))
}

fn is_none_of_it(view: &View<'_>, pod: &Pod, ds: &DaemonSet) -> bool {
    let (Some(bad), Some(revision)) = (view.way_back_of, &pod.revision) else { return false };
    let (name, version) = (ds.name.name.as_ref(), DriverVersion::from_image(&pod.image));
    let same = version.is_some() && version == ds.driver_version;
    // Whoever does not say what ran before has changed everything.
    let all_new = |rollout: &Rollout| {
        rollout.spec.previous.is_none()
            && rollout.spec.target.get(name).is_some_and(|hash| hash == revision.as_str())
    };
    let came_with =
        |rollout: &Rollout| all_new(rollout) || brought(rollout, name, revision.as_str(), version.as_ref());
    let others = rollouts(view.snapshot, view.pool).map(|(_, rollout)| rollout);
    // The one that they come back from counts also when a person has cleared it meanwhile.
    let mut wrong = others.filter(|rollout| !is_forgivable(rollout)).chain([bad]);
    !same && !wrong.any(came_with)
}

/// Everybody else is back, or is left out by a person. A node that fails on its way holds the others up: the stages would take
/// it for a failure of the version before.
pub(super) fn goes_on(view: &View<'_>, members: &[Member<'_>]) -> bool {
    let rests = |state| matches!(state, State::Unknown | State::UpgradeRequired | State::UpgradeDone);
    let waits = |member: &Member<'_>| member.left_alone && rests(member.state());
    let is_back = |member: &Member<'_>| match member.state() {
        State::UpgradeDone | State::Unknown => member.sync != Freshness::Outdated,
        State::UpgradeRequired | State::UpgradeFailed => is_skipped(view, member),
        _ => false,
    };
    !view.is_called_off()
        && members.iter().any(|member| waits(member) && !is_skipped(view, member))
        && members.iter().all(|member| waits(member) || is_back(member))
}
