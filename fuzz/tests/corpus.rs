//! Every input in `corpus`, seeds and what fuzzing has found alike, through its target.

use std::fs;
use std::path::Path;

use pitcrew_fuzz::{TARGETS, Target};

fn replay(name: &str) {
    let target = Target::named(name).unwrap();
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
    let mut paths: Vec<_> = fs::read_dir(directory).unwrap().map(|file| file.unwrap().path()).collect();
    paths.sort();
    assert!(!paths.is_empty());
    for path in paths {
        println!("{}", path.display()); // shown when it fails
        target.feed(&fs::read(path).unwrap());
    }
}

#[test]
fn policies_are_resolved_or_refused() {
    replay("policies");
}

#[test]
fn records_on_nodes_are_read_or_refused() {
    replay("records");
}

#[test]
fn texts_mean_what_they_say() {
    replay("texts");
}

#[test]
fn requests_are_answered_and_refused_ones_change_nothing() {
    replay("requests");
}

#[test]
fn whatever_the_api_sends_is_planned_within_the_promises() {
    replay("wire");
}

#[test]
fn every_directory_has_its_target() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    let mut found: Vec<_> = fs::read_dir(directory).unwrap().map(|d| d.unwrap().file_name()).collect();
    found.sort();
    let mut named = TARGETS.map(|target| target.name);
    named.sort_unstable();
    assert_eq!(found, named);
}
