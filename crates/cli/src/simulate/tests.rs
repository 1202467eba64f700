use std::collections::BTreeSet;

use pitcrew_sim::simulate::{Fault, Wish};

use super::{Faults, faults, nodes, report};

#[test]
fn the_command_that_replays_says_all_that_was_asked_for() {
    let faults = Some([Fault::Crash, Fault::Conflict].into());
    let wish = Wish { nodes: Some(3), faults, minutes: Some(2), plain: true };
    let command = report::command(7, &wish);
    assert_eq!(command, "pitcrew simulate --seed 7 --nodes 3 --faults conflict,crash --minutes 2 --plain");
    let wish = Wish { faults: Some(BTreeSet::new()), ..Wish::default() };
    assert_eq!(report::command(7, &wish), "pitcrew simulate --seed 7 --faults none");
}

#[test]
fn bad_input_is_named() {
    assert_eq!(nodes("0").unwrap_err(), "it must be between 1 and 200");
    let problem = faults("conflict,rain").unwrap_err();
    assert_eq!(problem, "there is no fault \"rain\"; --faults help lists them");
    assert!(matches!(faults("help"), Ok(Faults::Help)));
}

#[test]
fn every_fault_is_listed_with_what_it_is() {
    let list = report::list_of_faults();
    assert_eq!(list.lines().count(), Fault::ALL.len());
    assert!(list.lines().all(|line| line.len() > 20), "{list}");
}
