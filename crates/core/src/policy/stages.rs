//! `spec.rollout`: the parts of a pool in their order, every value known.

use jiff::SignedDuration;

use super::parse::{amount, duration, problem};
use super::{Amount, Limits, Problem};
use crate::api::{BakeSpec, MatrixSpec, OnFailure, Promotion, RolloutPolicySpec, StageSpec};
use crate::contract::CANARY_LABEL;
use crate::gate::Gate;
use crate::prometheus::{Query, is_address};
use crate::selector::Labels;

/// How a new version reaches a pool.
#[derive(Clone, Debug)]
pub struct RolloutRules {
    /// The stages that the policy names, and after them the rest. Empty: it names none.
    pub stages: Vec<Stage>,
    /// What must pass before a node, or a stage, goes on.
    pub gates: Vec<Gate>,
    /// What happens when a stage fails; `None`: the policy does not say.
    pub on_failure: Option<OnFailure>,
    /// So many rollouts that are over are kept.
    pub history_limit: u32,
    /// Nodes that are still to go are unwelcome to work, while others of their stage move.
    pub prefer_upgraded: bool,
    /// The version matrix that it is held against.
    pub matrix: Option<MatrixSpec>,
}

/// A part of a pool that goes together.
#[derive(Clone, Debug, PartialEq)]
pub struct Stage {
    /// Its name.
    pub name: String,
    /// Which nodes.
    pub pick: Pick,
    /// So many of them move at once; `None`: as many as the pool allows.
    pub max_parallel: Option<u32>,
    /// So many of them may be out; `None`: as many as the pool allows.
    pub max_unavailable: Option<Amount>,
    /// One first, then two, four, eight at a time.
    pub ramp: bool,
    /// More failed nodes than this fail it.
    pub failure_threshold: Amount,
    /// Watched at work before the next one opens.
    pub bake: Option<Bake>,
    /// Who opens the next one.
    pub promotion: Promotion,
}

/// Which of the nodes that are left belong to a stage.
#[derive(Clone, Debug, PartialEq)]
pub enum Pick {
    /// Those with these labels.
    Labelled(Labels),
    /// So many, the first by name.
    First(Amount),
    /// All of them.
    Rest,
}

/// What must be seen of a stage's nodes at work.
#[derive(Clone, Debug, PartialEq)]
pub struct Bake {
    /// For how long.
    pub duration: SignedDuration,
    /// More restarts of drivers fail it.
    pub max_driver_restarts: u32,
    /// Devices at work, times hours.
    pub min_device_hours: u32,
    /// Pods that started on the devices.
    pub min_job_starts: u32,
    /// What Prometheus is asked at every look.
    pub queries: Vec<Query>,
}

/// The stage of those that no other takes.
const FLEET: &str = "fleet";
/// The stage that the documented label makes.
pub const CANARY_STAGE: &str = "canary";

impl RolloutRules {
    /// The one stage of a pool that has a gate for its end and no stages.
    pub fn one(limits: &Limits) -> Vec<Stage> {
        vec![Stage::rest(limits)]
    }

    /// Gates for every node.
    pub fn node_gates(&self) -> impl Iterator<Item = &Gate> {
        self.gates.iter().filter(|gate| gate.is_for_nodes())
    }

    /// The stages of a pool in which nodes carry the documented label and whose policy names none.
    pub fn implicit(limits: &Limits) -> Vec<Stage> {
        let labels = Labels::from([(CANARY_LABEL.to_owned(), "true".to_owned())]);
        let bake = Bake {
            duration: SignedDuration::from_hours(48),
            max_driver_restarts: 0,
            min_device_hours: 0,
            min_job_starts: 0,
            queries: Vec::new(),
        };
        let failure_threshold = Amount::Nodes(0);
        let canary =
            Stage { name: CANARY_STAGE.to_owned(), pick: Pick::Labelled(labels), ..Stage::rest(limits) };
        vec![Stage { bake: Some(bake), failure_threshold, ..canary }, Stage::rest(limits)]
    }
}

impl Stage {
    fn rest(limits: &Limits) -> Self {
        Self {
            name: FLEET.to_owned(),
            pick: Pick::Rest,
            max_parallel: None,
            max_unavailable: None,
            ramp: false,
            failure_threshold: limits.failure_threshold,
            bake: None,
            promotion: Promotion::Auto,
        }
    }
}

pub(super) fn rollout(spec: &RolloutPolicySpec, limits: &Limits) -> Result<RolloutRules, Problem> {
    let url = address(spec)?;
    let mut stages = Vec::with_capacity(spec.stages.len() + 1);
    for (index, stage) in spec.stages.iter().enumerate() {
        let field = |name: &str| format!("spec.rollout.stages[{index}].{name}");
        if stages.iter().any(|before: &Stage| before.pick == Pick::Rest) {
            let what = format!("stage {} would never have a node: the one before it takes all", stage.name);
            return Err(problem(what, field("nodeSelector")));
        }
        if stages.iter().any(|before| before.name == stage.name) {
            return Err(problem(format!("two stages are called {}", stage.name), field("name")));
        }
        stages.push(read(stage, index, limits, url)?);
    }
    if stages.last().is_some_and(|last| last.pick != Pick::Rest) {
        if let Some(index) = stages.iter().position(|stage| stage.name == FLEET) {
            let what = format!("{FLEET} is the name of the stage of all other nodes");
            return Err(problem(what, format!("spec.rollout.stages[{index}].name")));
        }
        stages.push(Stage::rest(limits));
    }
    let gates = read_gates(spec, &stages)?;
    Ok(RolloutRules {
        stages,
        gates,
        on_failure: spec.on_failure,
        history_limit: spec.history_limit,
        prefer_upgraded: spec.prefer_upgraded_nodes,
        matrix: spec.matrix.clone(),
    })
}

fn read_gates(spec: &RolloutPolicySpec, stages: &[Stage]) -> Result<Vec<Gate>, Problem> {
    let in_policy =
        |problem: Problem| Problem { field: format!("spec.rollout.{}", problem.field), ..problem };
    let gates = Gate::read_all(&spec.gates).map_err(in_policy)?;
    let exists = |name: &String| match stages {
        // Those that come about by themselves.
        [] => [CANARY_STAGE, FLEET].contains(&name.as_str()),
        stages => stages.iter().any(|stage| stage.name == *name),
    };
    for gate in &gates {
        if let Some(name) = gate.stages.iter().find(|name| !exists(name)) {
            let field = format!("spec.rollout.gates[{}].stages", gate.name);
            return Err(problem(format!("there is no stage {name}"), field));
        }
    }
    Ok(gates)
}

/// Where the Prometheus is that bakes ask, if they may.
fn address(spec: &RolloutPolicySpec) -> Result<Option<&str>, Problem> {
    let url = spec.prometheus.as_ref().map(|prometheus| prometheus.url.as_str());
    match url.filter(|url| !is_address(url)) {
        Some(bad) => {
            let what = format!("\"{bad}\" is not an address such as http://prometheus.monitoring:9090");
            Err(problem(what, "spec.rollout.prometheus.url"))
        }
        None => Ok(url),
    }
}

fn read(spec: &StageSpec, index: usize, limits: &Limits, url: Option<&str>) -> Result<Stage, Problem> {
    let field = |name: &str| format!("spec.rollout.stages[{index}].{name}");
    let of = |value: &Option<_>, name: &str| value.as_ref().map(|v| amount(v, &field(name))).transpose();
    let pick = match (of(&spec.count, "count")?, spec.node_selector.is_empty()) {
        (Some(_), false) => {
            let what = format!("stage {} has a nodeSelector and a count", spec.name);
            return Err(problem(what, field("count")));
        }
        (Some(count), true) => Pick::First(count),
        (None, false) => Pick::Labelled(spec.node_selector.clone()),
        (None, true) => Pick::Rest,
    };
    // Others wait for it, unless it takes all that are left.
    let leads = pick != Pick::Rest;
    let threshold = of(&spec.failure_threshold, "failureThreshold")?;
    let by_default = if leads { Amount::Nodes(0) } else { limits.failure_threshold };
    let standard = (leads && index == 0).then(BakeSpec::default);
    let bake = spec.bake.as_ref().or(standard.as_ref());
    let bake = bake.map(|bake| read_bake(bake, url, &field("bake"))).transpose()?;
    Ok(Stage {
        name: spec.name.clone(),
        pick,
        max_parallel: spec.max_parallel_upgrades,
        max_unavailable: of(&spec.max_unavailable, "maxUnavailable")?,
        ramp: spec.ramp,
        failure_threshold: threshold.unwrap_or(by_default),
        bake: bake.filter(Bake::asks_for_anything),
        promotion: spec.promotion,
    })
}

fn read_bake(spec: &BakeSpec, url: Option<&str>, field: &str) -> Result<Bake, Problem> {
    let asks = format!("{field}.queries");
    let mut queries: Vec<Query> = Vec::with_capacity(spec.queries.len());
    for query in &spec.queries {
        let Some(url) = url else {
            let what = format!("query {} has no Prometheus to ask: set rollout.prometheus.url", query.name);
            return Err(problem(what, asks));
        };
        if queries.iter().any(|other| other.name == query.name) {
            return Err(problem(format!("two queries are called {}", query.name), asks));
        }
        queries.push(Query::read(query, url, &asks)?);
    }
    Ok(Bake {
        duration: duration(&spec.duration, &format!("{field}.duration"))?,
        max_driver_restarts: spec.max_driver_restarts,
        min_device_hours: spec.min_device_hours,
        min_job_starts: spec.min_job_starts,
        queries,
    })
}

impl Bake {
    /// `duration: 0s` and nothing else switches it off.
    fn asks_for_anything(&self) -> bool {
        let asks = self.min_device_hours > 0 || self.min_job_starts > 0 || !self.queries.is_empty();
        !self.duration.is_zero() || asks
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::api::LimitsSpec;
    use crate::policy::rules;

    fn read_stages(stages: &Value) -> Result<Vec<Stage>, Problem> {
        let spec: RolloutPolicySpec = serde_json::from_value(json!({ "stages": stages })).unwrap();
        let limits = rules::limits(&LimitsSpec::default())?;
        rollout(&spec, &limits).map(|rules| rules.stages)
    }

    #[test]
    fn the_rest_comes_last_and_only_the_first_of_several_bakes() {
        let stages = json!([
            {"name": "canary", "nodeSelector": {"gpu-canary": "true"}},
            {"name": "some", "count": "10%", "ramp": true},
        ]);
        let stages = read_stages(&stages).unwrap();
        let names: Vec<&str> = stages.iter().map(|stage| stage.name.as_str()).collect();
        assert_eq!(names, ["canary", "some", "fleet"]);
        let hours = |stage: &Stage| stage.bake.as_ref().map(|bake| bake.duration.as_hours());
        assert_eq!(stages.iter().map(hours).collect::<Vec<_>>(), [Some(48), None, None]);
        let may_fail = |stage: &Stage| stage.failure_threshold;
        let expected = [Amount::Nodes(0), Amount::Nodes(0), Amount::Percent(20)];
        assert_eq!(stages.iter().map(may_fail).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn a_bake_of_no_time_is_none() {
        let stages = json!([{"name": "canary", "count": 1, "bake": {"duration": "0s"}}]);
        assert_eq!(read_stages(&stages).unwrap()[0].bake, None);
        let stages = json!([{"name": "canary", "count": 1, "bake": {"duration": "0s", "minJobStarts": 3}}]);
        assert!(read_stages(&stages).unwrap()[0].bake.is_some());
    }

    #[test]
    fn a_bake_of_queries_alone_is_one_and_bad_queries_are_refused() {
        let read = |url: Option<&str>, queries: Value| {
            let stages =
                json!([{"name": "canary", "count": 1, "bake": {"duration": "0s", "queries": queries}}]);
            let mut spec = json!({ "stages": stages });
            if let Some(url) = url {
                spec["prometheus"] = json!({ "url": url });
            }
            let spec: RolloutPolicySpec = serde_json::from_value(spec).unwrap();
            rollout(&spec, &rules::limits(&LimitsSpec::default())?).map(|rules| rules.stages)
        };
        let good = json!({"name": "xid", "query": "sum(xid)", "max": 0});
        let url = Some("http://prometheus:9090");
        let stages = read(url, json!([good])).unwrap();
        assert_eq!(stages[0].bake.as_ref().unwrap().queries.len(), 1);
        let refused = |url, queries| {
            let Problem { what, field } = read(url, queries).unwrap_err();
            format!("{field}: {what}")
        };
        insta::assert_snapshot!(refused(None, json!([good])), @"spec.rollout.stages[0].bake.queries: query xid has no Prometheus to ask: set rollout.prometheus.url");
        insta::assert_snapshot!(refused(Some("prometheus:9090"), json!([good])), @r#"spec.rollout.prometheus.url: "prometheus:9090" is not an address such as http://prometheus.monitoring:9090"#);
        insta::assert_snapshot!(refused(url, json!([good, good])), @"spec.rollout.stages[0].bake.queries: two queries are called xid");
        insta::assert_snapshot!(refused(url, json!([{"name": "xid", "query": " ", "max": 0}])), @"spec.rollout.stages[0].bake.queries: query xid is empty");
        insta::assert_snapshot!(refused(url, json!([{"name": "xid", "query": "x"}])), @"spec.rollout.stages[0].bake.queries: query xid needs min, max or both");
        insta::assert_snapshot!(refused(url, json!([{"name": "xid", "query": "x", "min": 2, "max": 1}])), @"spec.rollout.stages[0].bake.queries: query xid has a min above its max");
    }

    #[test]
    fn stages_that_make_no_sense_are_refused() {
        let refused = |stages: Value| read_stages(&stages).unwrap_err().what;
        insta::assert_snapshot!(
            refused(json!([{"name": "all"}, {"name": "canary", "count": 1}])),
            @"stage canary would never have a node: the one before it takes all"
        );
        insta::assert_snapshot!(
            refused(json!([{"name": "a", "count": 1}, {"name": "a", "count": 2}])),
            @"two stages are called a"
        );
        insta::assert_snapshot!(
            refused(json!([{"name": "fleet", "count": 1}])),
            @"fleet is the name of the stage of all other nodes"
        );
        insta::assert_snapshot!(
            refused(json!([{"name": "a", "count": 1, "nodeSelector": {"x": "y"}}])),
            @"stage a has a nodeSelector and a count"
        );
    }
}
