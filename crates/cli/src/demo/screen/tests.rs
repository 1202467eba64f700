//! The drawn screen, from hand-made views.

use jiff::{SignedDuration, Timestamp};
use pitcrew_core::contract::State;
use ratatui::Terminal;
use ratatui::backend::TestBackend;

use super::super::record::Transition;
use super::super::view::Slots;
use super::*;

const BEGAN: Timestamp = Timestamp::constant(1_767_225_600, 0);

fn at(seconds: i64) -> Timestamp {
    BEGAN + SignedDuration::from_secs(seconds)
}

fn row(kind: Kind, node: &str, state: State, since: i64, why: &str) -> Row {
    let (visit, driver) = if state.in_flight() { (Some(at(since - 30)), TO) } else { (None, FROM) };
    Row {
        kind,
        node: node.into(),
        state,
        since: at(since),
        visit,
        driver: driver.to_owned(),
        why: why.to_owned(),
    }
}

fn moved(seconds: i64, node: &str, to: State, words: &str) -> Transition {
    Transition { at: seconds, node: node.into(), to, words: words.to_owned() }
}

/// A fleet in the middle of its way: 13 done, one failed, one blocked, two moving, the rest waiting.
fn middle() -> View {
    let names: Vec<String> = (1..=24).map(|n| format!("gpu-{n:02}")).collect();
    let place = |n| match n {
        0..13 => Place::Done,
        13 => Place::Failed,
        14..17 => Place::Moving,
        _ => Place::Waiting,
    };
    let driver_pod = "gpu-operator/nvidia-driver-daemonset-x7k2p";
    View {
        began: BEGAN,
        ends: Some(at(1240)),
        is_over: false,
        tally: Tally { done: 13, moving: 3, waiting: 7, failed: 1 },
        slots: Slots { out: 4, max_unavailable: ("25%".to_owned(), 6), max_parallel: Some(4) },
        names: names.iter().map(|name| name.as_str().into()).collect(),
        places: (0..24).map(place).collect(),
        rows: vec![
            row(
                Kind::Failed,
                "gpu-14",
                State::UpgradeFailed,
                400,
                "not validated after 600 s: no validator pod (app=nvidia-operator-validator) on this node",
            ),
            row(
                Kind::Blocked,
                "gpu-15",
                State::PodDeletionRequired,
                640,
                "pod llm/chat-1-7d9f5c4b8-x2x9p cannot leave: poddisruptionbudget/llm/chat-1 wants 3 healthy pods and has 3",
            ),
            row(
                Kind::Moving,
                "gpu-16",
                State::PodRestartRequired,
                638,
                &format!("driver pod {driver_pod} starts: running, not ready yet"),
            ),
            row(
                Kind::Moving,
                "gpu-17",
                State::ValidationRequired,
                692,
                "validator pod gpu-operator/nvidia-operator-validator-9ss2d is not ready yet",
            ),
        ],
        more_rows: 0,
        next: vec![
            row(Kind::Waiting, "gpu-20", State::UpgradeRequired, 0, "next slot; maxParallelUpgrades is 4"),
            row(
                Kind::Waiting,
                "gpu-18",
                State::UpgradeRequired,
                0,
                "waits for a slot, 1 before it; maxParallelUpgrades is 4",
            ),
        ],
        waiting: vec![19, 17, 18, 20, 21, 22, 23],
        done: (0..13).collect(),
        headline: None,
        recent: vec![
            moved(698, "gpu-13", State::UpgradeDone, "visit 3:12"),
            moved(692, "gpu-17", State::ValidationRequired, "driver ready after 1:52"),
            moved(640, "gpu-15", State::PodDeletionRequired, "2 pods to move"),
            moved(400, "gpu-14", State::UpgradeFailed, "not validated after 600 s: no validator pod"),
        ],
    }
}

fn drawn(picture: &Picture<'_>, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, picture, Look { colours: false })).unwrap();
    terminal.backend().to_string()
}

#[test]
fn fits_the_smallest_usual_terminal() {
    let view = middle();
    insta::assert_snapshot!(drawn(&Picture::Upgrade { view: &view, now: at(700) }, 80, 24));
}

#[test]
fn uses_a_wide_terminal() {
    let view = middle();
    insta::assert_snapshot!(drawn(&Picture::Upgrade { view: &view, now: at(700) }, 140, 40));
}

#[test]
fn shows_that_the_fleet_is_being_built() {
    insta::assert_snapshot!(drawn(&Picture::SetUp { nodes: 1000 }, 60, 3));
}

#[test]
fn no_size_breaks_it() {
    let view = middle();
    for (width, height) in [(1, 1), (10, 3), (20, 5), (40, 12), (80, 15), (80, 16), (300, 100)] {
        drawn(&Picture::Upgrade { view: &view, now: at(700) }, width, height);
    }
}

#[test]
fn many_moving_nodes_are_counted_where_they_do_not_fit() {
    let mut view = middle();
    view.rows = (0..60).map(|_| view.rows[2].clone()).collect();
    view.more_rows = 190;
    let text = drawn(&Picture::Upgrade { view: &view, now: at(700) }, 80, 24);
    assert!(text.contains("more on their way"), "{text}");
    assert!(text.contains("13 done"), "{text}");
}

#[test]
fn colour_says_nothing_that_glyphs_do_not() {
    let view = middle();
    let mut terminal = Terminal::new(TestBackend::new(80, 24)).unwrap();
    let picture = Picture::Upgrade { view: &view, now: at(700) };
    terminal.draw(|frame| draw(frame, &picture, Look { colours: true })).unwrap();
    let coloured = terminal.backend().to_string();
    assert_eq!(coloured, drawn(&picture, 80, 24));
    let plain_cells = |colours| {
        let mut terminal = Terminal::new(TestBackend::new(80, 24)).unwrap();
        terminal.draw(|frame| draw(frame, &picture, Look { colours })).unwrap();
        terminal.backend().buffer().content().iter().all(|cell| cell.fg == Color::Reset)
    };
    assert!(plain_cells(false));
    assert!(!plain_cells(true));
}
