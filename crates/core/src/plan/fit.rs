//! What a rollout's status has room for, whatever the size of the fleet and whatever gates write.
//!
//! Every list in it has an end of its own, and every sentence here. All of them together, with the logs of many gates, could
//! still be too much for one object: then words go first, of what is over before what is open. Numbers stay.

use serde::Serialize;

use crate::api::{RolloutStatus, StagePhase, StageStatus};

/// Everybody who watches rollouts gets a status as a whole with every change of it; etcd takes six times as much.
pub(super) const STATUS_BYTES_MAX: usize = 256 * 1024;

/// Enough for a sentence. Kubelets and runtimes say more than that in one.
const SENTENCE_BYTES_MAX: usize = 512;

/// Ends a sentence where it is too long to be one.
pub(super) fn shorten(sentence: &mut String) {
    if sentence.len() > SENTENCE_BYTES_MAX {
        sentence.truncate(sentence.floor_char_boundary(SENTENCE_BYTES_MAX));
        sentence.push('…');
    }
}

/// The same for every sentence of a status that somebody else may have written a part of.
pub(super) fn shorten_all(status: &mut RolloutStatus) {
    let RolloutStatus { message, stages, gates, failures, relapses, .. } = status;
    message.iter_mut().for_each(shorten);
    for stage in stages.iter_mut() {
        stage.message.iter_mut().for_each(shorten);
    }
    let gates = stages.iter_mut().flat_map(|stage| &mut stage.gates).chain(gates);
    gates.filter_map(|gate| gate.message.as_mut()).for_each(shorten);
    failures.iter_mut().chain(relapses).for_each(|failure| shorten(&mut failure.cause));
}

/// Takes words out of a status that is too large, as few as possible.
pub(super) fn fit(status: &mut RolloutStatus) {
    let mut over = bytes(status).saturating_sub(STATUS_BYTES_MAX);
    for words in expendable(status) {
        if over == 0 {
            return;
        }
        over = over.saturating_sub(words.take().map_or(0, |words| bytes(&words)));
    }
}

/// As the API keeps it.
fn bytes(value: &impl Serialize) -> usize {
    serde_json::to_vec(value).map_or(0, |text| text.len())
}

/// What can be found elsewhere, the first to go first: Events have what gates wrote, and nodes why they failed.
fn expendable(status: &mut RolloutStatus) -> Vec<&mut Option<String>> {
    let RolloutStatus { stages, gates, failures, .. } = status;
    let is_over = |stage: &&mut StageStatus| stage.phase == StagePhase::Passed;
    let (over, open): (Vec<_>, Vec<_>) = stages.iter_mut().partition(is_over);
    let mut words = Vec::new();
    for gate in over.into_iter().flat_map(|stage| &mut stage.gates) {
        words.extend([&mut gate.log, &mut gate.message]);
    }
    words.extend(open.into_iter().flat_map(|stage| &mut stage.gates).chain(gates).map(|gate| &mut gate.log));
    // The newest is the first.
    words.extend(failures.iter_mut().rev().map(|failure| &mut failure.log));
    words
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{GateStatus, GateWhen, RolloutFailure};

    const AT: jiff::Timestamp = jiff::Timestamp::UNIX_EPOCH;

    fn failed(gate: &str, log: usize) -> GateStatus {
        let mut said = GateStatus::new(gate, GateWhen::Node);
        said.fail(None, "no".to_owned(), &"x".repeat(log));
        said
    }

    fn stage(name: &str, phase: StagePhase, log: usize) -> StageStatus {
        StageStatus { name: name.to_owned(), phase, gates: vec![failed("smoke", log)], ..Default::default() }
    }

    /// Whose logs are left: of a stage that is over, of an open one, of the newer and of the older failure.
    fn left(sizes: [usize; 4]) -> [bool; 4] {
        let [over, open, newer, older] = sizes;
        let failure = |node: &str, log: usize| RolloutFailure {
            log: Some("x".repeat(log)),
            ..RolloutFailure::new(node, AT, "no".to_owned())
        };
        let mut status = RolloutStatus {
            stages: vec![stage("a", StagePhase::Passed, over), stage("b", StagePhase::Moving, open)],
            failures: vec![failure("newer", newer), failure("older", older)],
            ..Default::default()
        };
        fit(&mut status);
        assert!(bytes(&status) <= STATUS_BYTES_MAX);
        assert_eq!(status.stages.iter().map(|stage| stage.gates[0].failed).sum::<u32>(), 2, "numbers stay");
        let log = |stage: usize| status.stages[stage].gates[0].log.is_some();
        [log(0), log(1), status.failures[0].log.is_some(), status.failures[1].log.is_some()]
    }

    #[test]
    fn what_is_over_goes_first_and_only_as_much_as_has_to() {
        const MANY: usize = 100 * 1024;
        assert_eq!(left([MANY, MANY, 10, 10]), [true; 4]);
        assert_eq!(left([MANY, MANY, MANY, 10]), [false, true, true, true]);
        assert_eq!(left([10, MANY, MANY, MANY]), [false, false, true, true]);
        assert_eq!(left([10, 10, 2 * MANY, MANY]), [false, false, true, false]);
        assert_eq!(left([10, 10, 3 * MANY, 10]), [false; 4]);
    }

    #[test]
    fn a_sentence_has_an_end_between_two_letters() {
        let mut long = "é".repeat(SENTENCE_BYTES_MAX);
        shorten(&mut long);
        assert_eq!(long.len(), SENTENCE_BYTES_MAX + "…".len());
        let mut short = "x".repeat(SENTENCE_BYTES_MAX);
        shorten(&mut short);
        assert_eq!(short.len(), SENTENCE_BYTES_MAX);
    }
}
