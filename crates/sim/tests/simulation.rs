//! The simulation itself: it can be repeated, it ends well, and what it once found stays found.
//!
//! `pitcrew simulate` plays many more seeds; `cargo xtask mutate` shows that it finds what is broken on purpose.
//! `PITCREW_SEEDS=1000` plays so many here and stops at the first broken promise.

use pitcrew_core::contract::State;
use pitcrew_sim::simulate::{Case, Fault, Run, Wish, run, run_all};

#[expect(clippy::unwrap_used, reason = "a run that cannot begin fails its test")]
fn play(seed: u64, wish: &Wish) -> Run {
    run(&Case::new(seed, wish), true).unwrap()
}

#[track_caller]
fn keeps_its_promises(seed: u64, wish: &Wish) {
    let run = play(seed, wish);
    assert_eq!(run.violation, None, "seed {seed} with {wish:?}");
}

/// Without stages, windows and atoms: what these seeds were when they were kept.
fn plain() -> Wish {
    Wish { plain: true, ..Wish::default() }
}

#[test]
fn the_same_seed_gives_the_same_run() {
    for seed in 0..6 {
        let (first, again) = (play(seed, &Wish::default()), play(seed, &Wish::default()));
        assert_eq!(first.hash, again.hash, "seed {seed}");
        assert_eq!(first.trace, again.trace, "seed {seed}");
    }
    assert_ne!(play(1, &Wish::default()).hash, play(2, &Wish::default()).hash);
}

#[test]
fn without_faults_every_node_is_upgraded_if_somebody_proves_it() {
    for seed in 0..10 {
        let wish = Wish { faults: Some([].into()), ..Wish::default() };
        let run = play(seed, &wish);
        assert_eq!(run.violation, None, "seed {seed}");
        let done: u64 =
            run.transitions.get(&(State::UncordonRequired, State::UpgradeDone)).copied().unwrap_or(0);
        // A ClusterPolicy means the operator's validators; where there are none, no node is given back.
        let Case { policy, fleet, .. } = Case::new(seed, &wish);
        let proven = policy.is_some() || fleet.validators;
        let expected = if proven { run.nodes as u64..u64::MAX } else { 0..1 };
        assert!(expected.contains(&done), "seed {seed}: {:?}", run.transitions);
    }
}

#[test]
fn every_fault_happens_when_it_is_asked_for() {
    for fault in Fault::ALL {
        let wish = Wish { faults: Some([*fault].into()), nodes: Some(4), minutes: Some(1), plain: false };
        let happened = (0..4).any(|seed| {
            let run = play(seed, &wish);
            assert_eq!(run.violation, None, "{fault}, seed {seed}");
            run.faults.contains_key(fault) || *fault == Fault::OneInSix
        });
        assert!(happened, "{fault}");
    }
}

#[test]
fn seeds_keep_their_promises() {
    let seeds = std::env::var("PITCREW_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(60);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let total = run_all(0..seeds, &Wish::default(), threads, |total| total.broken.is_empty()).unwrap();
    let broken: Vec<_> =
        total.broken.values().filter_map(|run| Some((run.seed, run.violation.clone()?))).collect();
    assert!(broken.is_empty(), "\nafter {} seeds: {broken:?}", total.runs);
}

/// A controller whose clock had been ahead said nothing about its rollout until the time that it had shown came again.
#[test]
fn a_clock_that_was_wrong_does_not_silence_a_rollout() {
    keeps_its_promises(46, &plain());
}

/// The same, about a policy whose status could not be written while the clock was ahead.
#[test]
fn a_clock_that_is_set_back_does_not_put_off_what_is_tried_again() {
    keeps_its_promises(864, &plain());
}

/// The template had changed twice, and a plan from an older view of it took the second change for one that installs
/// nothing: the driver restarted in place, under running work.
#[test]
fn a_driver_restarts_in_place_only_if_the_template_of_this_moment_installs_nothing() {
    keeps_its_promises(745, &plain());
}

/// The answer to a start was lost; another node came to stand before it in the line, and both were out.
#[test]
fn a_node_that_may_have_started_keeps_its_slot() {
    keeps_its_promises(5876, &plain());
}

/// The driver pod that was ready had gone, and the news of it was late: nobody could know.
#[test]
fn a_pod_that_was_ready_a_moment_ago_is_not_held_against_us() {
    keeps_its_promises(15472, &plain());
}

/// A driver came up long after its node had been replaced, and brought it further: that is no unrest.
#[test]
fn a_driver_that_comes_up_late_is_news() {
    keeps_its_promises(17266, &plain());
}

/// Two events of one node waited behind NVSentinel's breaker, and the second was lost.
#[test]
fn a_node_that_is_well_is_given_back_by_its_health_system() {
    keeps_its_promises(16396, &plain());
}

/// A node had failed under somebody else's cordon, which a person lifted: it was cordoned again by the plan that gave its
/// place to another one, and both were out.
#[test]
fn a_failed_node_that_is_cordoned_again_keeps_its_place() {
    keeps_its_promises(9489, &plain());
    keeps_its_promises(13807, &plain());
}

/// A leader lost its Lease and got it back, and had forgotten a start that no watch had told it of yet.
#[test]
fn a_new_leader_knows_who_has_started() {
    keeps_its_promises(11640, &plain());
}

/// A visit found its node cordoned; that cordon was lifted, and a person cordoned the node again before we did.
#[test]
fn a_cordon_of_somebody_else_during_a_visit_stays() {
    for seed in [7127, 7391, 8333, 11809] {
        keeps_its_promises(seed, &plain());
    }
}

/// A person had deleted the driver pod, and the wanted driver that came in its place hangs: NVSentinel keeps the node.
#[test]
fn a_node_in_quarantine_with_a_driver_that_does_not_come_up_is_at_its_end() {
    for seed in [11132, 19415, 20696] {
        keeps_its_promises(seed, &plain());
    }
}

/// Broken by flaws that were found by other seeds.
#[test]
fn other_seeds_that_once_broke_a_promise_keep_it() {
    for seed in [6004, 6229, 6465, 7858, 8401, 10463, 14001] {
        keeps_its_promises(seed, &plain());
    }
}

/// A deletion past its deadline was refused once, and nobody came back to it: the deadline hid the time of the next try.
#[test]
fn a_deletion_that_was_refused_after_its_deadline_is_tried_again() {
    keeps_its_promises(40087, &plain());
}

/// A person had cordoned a node before NVSentinel came to it: whoever waits for its place waits for that person.
#[test]
fn a_node_that_was_cordoned_before_its_quarantine_stays_out() {
    keeps_its_promises(40503, &plain());
}

/// A driver pod was deleted, the one in its place does not come up, and then the version changed: NVSentinel has the
/// node, and it is not taken from it.
#[test]
fn a_node_in_quarantine_is_not_taken_although_its_driver_is_an_old_one() {
    keeps_its_promises(41879, &plain());
}

/// News of a revision came before news of its DaemonSet: the rollout was made with the version before, and could not be
/// taken back.
#[test]
fn a_rollout_says_the_version_that_it_brings() {
    for seed in [1182, 1196] {
        keeps_its_promises(seed, &Wish::default());
    }
}

/// A node that had failed waited, under our cordon, for room for its whole atom: its own return would have made it.
#[test]
fn a_node_that_is_tried_again_waits_for_no_atom() {
    keeps_its_promises(1434, &Wish::default());
}

/// What the checkers did not know: drift is told once a minute (2387), a rollout that is not the newest may be put back
/// again (2523), and a bake begins before the slow write that tells of it (3392).
#[test]
fn last_words_may_come_late() {
    for seed in [2387, 2523, 3392] {
        keeps_its_promises(seed, &Wish::default());
    }
}

/// A stage is watched to the end although its rollout is aborted: that is no unrest.
#[test]
fn an_abort_stops_no_bake() {
    for seed in [1077, 1438] {
        keeps_its_promises(seed, &Wish::default());
    }
}

/// Of a rollout that was called off Prometheus is asked nothing any more, so its bake does not end (367, 460); and it can be
/// spoiled although nobody is left in its stage (4717).
#[test]
fn a_bake_that_stands_still_is_told_from_one_that_goes_on() {
    let wish = |faults: &[Fault]| Wish {
        faults: Some(faults.iter().copied().collect()),
        nodes: Some(1),
        ..Wish::default()
    };
    keeps_its_promises(367, &wish(&[Fault::Abort, Fault::Silence]));
    keeps_its_promises(460, &Wish::default());
    let gone = [Fault::ClockJump, Fault::Remove, Fault::PolicyEdit, Fault::Alarm, Fault::Silence];
    keeps_its_promises(4717, &wish(&gone));
}

/// A node that came up with a driver before its stage is left alone where somebody has left it out (258) or has aborted
/// the rollout (1441), and takes no slot from a start that is on its way (301).
#[test]
fn early_nodes_are_taken_out_only_where_that_may_be() {
    for seed in [258, 301, 1441] {
        keeps_its_promises(seed, &Wish::default());
    }
}

/// A bake goes on after an abort and wakes nobody in vain (108); a window closes (156), or opens (1036), after the end.
#[test]
fn what_time_alone_changes_is_told_from_what_is_missing() {
    for seed in [108, 156, 1036] {
        keeps_its_promises(seed, &Wish::default());
    }
}

#[test]
fn fleets_with_two_pools_are_drawn_and_both_are_upgraded() {
    let wish = Wish { faults: Some([].into()), ..Wish::default() };
    let two = |seed: &u64| Case::new(*seed, &wish).second.is_some();
    let seeds: Vec<u64> = (0..100).filter(two).take(3).collect();
    assert_eq!(seeds.len(), 3, "{seeds:?}");
    for seed in seeds {
        let Case { fleet, second, .. } = Case::new(seed, &wish);
        let of = |pool: &str| fleet.labels.iter().filter(|(.., label)| label == pool).count();
        assert!(of("gpu") + of("other") >= fleet.nodes, "every node is in a pool");
        assert_ne!(second.unwrap()["upgradePolicy"], fleet.upgrade_policy, "with limits of its own");
        keeps_its_promises(seed, &wish);
    }
}

#[test]
fn stages_windows_atoms_and_ways_back_are_drawn() {
    let mut met = std::collections::BTreeSet::new();
    for seed in 0..400 {
        let Some(manner) = Case::new(seed, &Wish::default()).manner else { continue };
        let topology = &manner.rollout["topology"];
        let said =
            [&manner.rollout["stages"], &manner.rollout["windows"], &topology["atom"], &topology["spread"]];
        met.extend(said.iter().enumerate().filter(|(_, said)| !said.is_null()).map(|(place, _)| place));
    }
    assert_eq!(met.len(), 4, "{met:?}");
    // What such cases come to: a bake of which something comes, and a version that goes back.
    let wish =
        Wish { faults: Some([Fault::BadVersion].into()), nodes: Some(4), minutes: Some(1), plain: false };
    let backs = (0..8).filter(|seed| play(*seed, &wish).rollouts.contains_key("versions put back"));
    assert!(backs.count() > 0);
}

/// The embedded API told a bookmark where it should have ended a watch: the controller took it for the whole truth, and never
/// knew of a node (10371), or of a start (10946).
#[test]
fn a_watch_that_is_cut_does_not_pretend_to_have_told_everything() {
    let wish = |nodes: usize, faults: &[Fault]| Wish {
        faults: Some(faults.iter().copied().collect()),
        nodes: Some(nodes),
        ..plain()
    };
    keeps_its_promises(10371, &wish(4, &[Fault::Compaction, Fault::Replace]));
    let lossy = [Fault::Throttle, Fault::LostReply, Fault::LateReply, Fault::Compaction, Fault::PodDeleted];
    keeps_its_promises(10946, &wish(15, &lossy));
}

/// A reply was lost, and so was the look whether the write had happened: the node lost its slot to another one.
#[test]
fn a_look_that_fails_tells_nothing() {
    keeps_its_promises(31114, &Wish::default());
}

/// A start was on its way while a node left its pool, which made the share that may be out a smaller one.
#[test]
fn a_start_is_judged_by_the_fleet_that_it_was_decided_for() {
    keeps_its_promises(45594, &Wish::default());
}

/// Nobody was left in a pool, so its rollout was over, and was taken back then.
#[test]
fn a_rollout_that_nobody_was_left_for_has_nothing_to_watch() {
    keeps_its_promises(49668, &Wish::default());
}

/// What the checkers did not know: a failed node that is mended is proven whatever was aborted (11090, 13924, 14913, 25947), and without a slot (15449); a node under
/// our cordon stays out if its version comes to nobody (11308, 29193); clients go after a driver that came back late (12925); NVSentinel
/// takes its time (12990); a stage is held up by a failed node that says nothing of the version (13683). And one that the controller did not: a pod that came during a bake, by clocks that differ (5729).
#[test]
fn mended_nodes_are_proven_and_ends_are_ends() {
    for seed in [
        5729, 11090, 11308, 12925, 12990, 13683, 13924, 14913, 15449, 19119, 19779, 20014, 25754, 25947,
        29193,
    ] {
        keeps_its_promises(seed, &Wish::default());
    }
}

/// Labels were lost for a moment, and with them a driver pod in the middle of its restart: the node failed at once, and said
/// that it had waited for all of its time.
#[test]
fn a_node_that_loses_its_labels_for_a_moment_waits_for_its_driver() {
    keeps_its_promises(24, &Wish::default());
}

/// Clocks were set back during a pause, which took that time away from the driver's.
#[test]
fn a_clock_that_is_set_back_in_a_pause_takes_no_time_away() {
    keeps_its_promises(9477, &Wish::default());
}

/// A version was put back in the moment in which a person cleared it (7092), and a pod was deleted while its machine went (6954).
#[test]
fn what_is_on_its_way_when_something_else_happens_is_judged_by_what_was_known() {
    for seed in [6954, 7092] {
        keeps_its_promises(seed, &Wish::default());
    }
}

/// A start was on its way back while that ended, and arrived in a stage of the next rollout: nobody could know.
#[test]
fn a_start_may_arrive_when_its_way_back_is_over() {
    keeps_its_promises(1410, &Wish::default());
}
