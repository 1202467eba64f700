//! Prometheus is asked while a stage bakes: what its answers do to the bake, and what no answer does.

use jiff::SignedDuration;
use serde_json::{Value, json};

use super::fixture::*;
use crate::action::Action;
use crate::api::{BakeStatus, RolloutPhase, StagePhase, StageStatus};
use crate::prometheus::{Answer, Series, Values};
use crate::snapshot::Object;

const HOUR: i64 = 3600;
/// A bake of two hours is looked at so often.
const LOOK: i64 = 6 * 60;

/// Three outdated nodes; the first bakes for two hours, and nobody but a person takes a version back.
fn fleet() -> Fleet {
    asked(&json!([{"name": "xid-errors", "query": "max(xid)", "max": 2}]))
}

fn asked(queries: &Value) -> Fleet {
    let canary = json!({"name": "canary", "count": 1, "bake": {"duration": "2h", "queries": queries}});
    let spec = json!({
        "driver": {"name": "gpu"},
        "rollout": {"stages": [canary], "onFailure": "Pause", "prometheus": {"url": "http://prometheus:9090/"}},
    });
    Fleet::without_policy().driver_policy("gpu", spec).nodes(3, NodeSpec::outdated)
}

fn canary(fleet: &Fleet) -> StageStatus {
    let (_, rollout) = fleet.snapshot.rollouts.last_key_value().unwrap();
    rollout.status.as_ref().unwrap().stages[0].clone()
}

fn phase(fleet: &Fleet) -> RolloutPhase {
    let (_, rollout) = fleet.snapshot.rollouts.last_key_value().unwrap();
    rollout.status.as_ref().unwrap().phase
}

fn values(lowest: f64, highest: f64) -> Values {
    let series = |gpu: &str, value| Series { labels: format!("{{gpu=\"{gpu}\"}}"), value };
    Values { lowest: series("0", lowest), highest: series("7", highest) }
}

/// The last look was a few passes ago.
fn is_recent(fleet: &Fleet, bake: &BakeStatus) -> bool {
    fleet.snapshot.now.duration_since(bake.looked_at.0) < SignedDuration::from_secs(5)
}

/// What Prometheus said at the last look, one line for each query.
fn said(fleet: &Fleet) -> Vec<String> {
    let bake = canary(fleet).bake.unwrap();
    let line = |query: crate::api::QueryStatus| {
        format!("{} {:?} {}", query.name, query.value, query.message.unwrap_or_default())
    };
    bake.queries.into_iter().map(line).collect()
}

#[test]
fn a_value_within_its_bounds_lets_the_bake_pass() {
    let mut fleet = fleet();
    fleet.prometheus = Some(Ok(Values::one(2.0)));
    fleet.live(HOUR);
    assert_eq!(said(&fleet), ["xid-errors Some(2.0) "]);
    assert_eq!(canary(&fleet).message, None);
    fleet.live(2 * HOUR);
    assert_eq!(phase(&fleet), RolloutPhase::Done);
    let asked = fleet.told("ask http://prometheus:9090: max(xid)").len();
    assert_eq!(asked, 20, "once for every look");
}

#[test]
fn one_series_out_of_its_bounds_spoils_the_bake() {
    let mut fleet = fleet();
    fleet.live(HOUR);
    fleet.prometheus = Some(Ok(values(0.0, 3.0)));
    fleet.live(LOOK);
    assert_eq!((canary(&fleet).phase, phase(&fleet)), (StagePhase::Spoiled, RolloutPhase::Halted));
    insta::assert_snapshot!(
        canary(&fleet).message.unwrap(),
        @r#"query xid-errors is 3 and must be at most 2 ({gpu="7"})"#
    );
    assert_eq!(said(&fleet), ["xid-errors Some(3.0) "]);
    insta::assert_snapshot!(
        fleet.why("gpu-2"),
        @r#"stage canary has failed, so nothing new starts: query xid-errors is 3 and must be at most 2 ({gpu="7"})"#
    );
    fleet.prometheus = Some(Ok(Values::one(0.0)));
    fleet.live(10 * HOUR);
    assert_eq!(canary(&fleet).phase, StagePhase::Spoiled, "what was seen was seen");
}

#[test]
fn a_lower_bound_holds_too() {
    let mut fleet = asked(&json!([{"name": "utilisation", "query": "avg(util)", "min": 5}]));
    fleet.prometheus = Some(Ok(Values::one(5.0)));
    fleet.live(HOUR);
    assert_eq!(canary(&fleet).phase, StagePhase::Baking);
    fleet.prometheus = Some(Ok(values(4.5, 90.0)));
    fleet.live(LOOK);
    insta::assert_snapshot!(
        canary(&fleet).message.unwrap(),
        @r#"query utilisation is 4.5 and must be at least 5 ({gpu="0"})"#
    );
}

#[test]
fn whatever_is_no_number_does_not_count_and_does_not_spoil() {
    for why in
        ["there is no such series", "its value is NaN", "http://prometheus:9090 did not answer within 10 s"]
    {
        let mut fleet = fleet();
        fleet.live(HOUR);
        let before = canary(&fleet).bake.unwrap().seconds;
        fleet.prometheus = Some(Err(why.to_owned()));
        fleet.live(100 * HOUR);
        let bake = canary(&fleet).bake.unwrap();
        assert_eq!((phase(&fleet), bake.seconds), (RolloutPhase::Baking, before), "{why}");
        assert_eq!(said(&fleet), [format!("xid-errors None {why}")]);
        assert_eq!(
            canary(&fleet).message.unwrap(),
            format!("query xid-errors cannot be judged: {why}; that time does not count")
        );
        assert_eq!(
            fleet.why("gpu-2"),
            format!(
                "stage fleet is not open yet: stage canary is watched at work; \
                 query xid-errors cannot be judged: {why}; that time does not count"
            )
        );
        fleet.prometheus = Some(Ok(Values::one(0.0)));
        fleet.live(2 * HOUR);
        assert_eq!(phase(&fleet), RolloutPhase::Done, "{why}");
    }
}

#[test]
fn a_look_waits_for_its_answer_and_does_not_ask_twice() {
    let mut fleet = fleet();
    fleet.live(HOUR);
    let before = canary(&fleet).bake.unwrap();
    fleet.prometheus = None;
    fleet.live(HOUR);
    assert_eq!(canary(&fleet).bake.unwrap(), before, "no look without an answer");
    assert!(fleet.plan().wake_at.is_none_or(|at| at > fleet.snapshot.now), "the answer wakes us");
    // The answer is lost with the process that asked; the next one asks again.
    fleet.snapshot.in_flight.clear();
    fleet.snapshot.answers.clear();
    fleet.prometheus = Some(Ok(Values::one(0.0)));
    fleet.live(1);
    let after = canary(&fleet).bake.unwrap();
    assert!(is_recent(&fleet, &after));
    assert_eq!(after.seconds - before.seconds, 2 * LOOK, "a long wait is no long look");
}

#[test]
fn an_answer_that_is_older_than_the_look_does_not_count() {
    let mut fleet = fleet();
    fleet.live(HOUR);
    let looked_at = canary(&fleet).bake.unwrap().looked_at.0;
    let (question, answer) = fleet.snapshot.answers.pop_first().unwrap();
    let asks = |fleet: &Fleet| fleet.plan().actions.iter().any(|action| matches!(action, Action::Ask { .. }));
    fleet.snapshot.now = looked_at + SignedDuration::from_secs(LOOK);
    // At the look before, between the two, and at a time that has not come.
    for asked_at in [0, LOOK - 1, LOOK + 1].map(|seconds| looked_at + SignedDuration::from_secs(seconds)) {
        let answer = Answer { asked_at, ..answer.clone() };
        fleet.snapshot.answers.insert(question.clone(), answer);
        assert!(asks(&fleet), "{asked_at}");
        assert_eq!(fleet.pool().stages[0].bake.as_ref().unwrap().looked_at.0, looked_at);
    }
    fleet.snapshot.answers.insert(question.clone(), Answer { asked_at: fleet.snapshot.now, ..answer });
    assert!(!asks(&fleet));
    assert_eq!(fleet.pool().stages[0].bake.as_ref().unwrap().looked_at.0, fleet.snapshot.now);
    // While it is being asked, it is not asked again.
    fleet.snapshot.answers.clear();
    fleet.snapshot.in_flight.insert(Object::Question(question), crate::snapshot::Pending::default());
    assert!(!asks(&fleet));
}

#[test]
fn several_queries_are_judged_together_and_the_same_question_is_asked_once() {
    let mut fleet = asked(&json!([
        {"name": "few", "query": "max(xid)", "max": 5},
        {"name": "fewer", "query": "max(xid)", "max": 1},
        {"name": "busy", "query": "avg(util)", "min": -1},
    ]));
    fleet.live(LOOK + 60);
    assert_eq!(said(&fleet), ["few Some(0.0) ", "fewer Some(0.0) ", "busy Some(0.0) "]);
    assert_eq!(fleet.told("ask ").len(), 2);
    fleet.prometheus = Some(Ok(Values::one(3.0)));
    fleet.live(LOOK);
    insta::assert_snapshot!(canary(&fleet).message.unwrap(), @"query fewer is 3 and must be at most 1");
}

#[test]
fn a_query_that_comes_late_is_asked_before_the_bake_ends() {
    let canary_of = |queries: Value| json!([{"name": "canary", "count": 1, "bake": {"duration": "0s", "queries": queries}}]);
    let mut fleet = asked(&json!([]));
    let spec = fleet.snapshot.sources.driver_policies.get_mut("gpu").unwrap();
    let late = canary_of(json!([{"name": "late", "query": "max(xid)", "max": 2}]));
    spec.rollout.stages = serde_json::from_value(late).unwrap();
    fleet.prometheus = None;
    fleet.live(HOUR);
    assert_eq!(phase(&fleet), RolloutPhase::Baking);
    insta::assert_snapshot!(canary(&fleet).message.unwrap(), @"query late has not been asked yet");
}

#[test]
fn a_clock_that_is_set_back_asks_nothing_and_counts_nothing() {
    let mut fleet = fleet();
    fleet.live(HOUR);
    let before = canary(&fleet).bake.unwrap();
    let asked = fleet.told("ask ").len();
    fleet.snapshot.now -= SignedDuration::from_mins(30);
    fleet.settle();
    let after = canary(&fleet).bake.unwrap();
    assert_eq!(after.seconds, before.seconds);
    assert!(is_recent(&fleet, &after));
    assert_eq!(fleet.told("ask ").len(), asked);
    fleet.live(2 * HOUR);
    assert_eq!(phase(&fleet), RolloutPhase::Done);
}
