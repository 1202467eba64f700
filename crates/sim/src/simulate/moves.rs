//! How the policy wants a version to reach the fleet, as the promises read it: stages, windows, atoms and groups.
//!
//! It is read from the policy's own words and shares no code with the planner. It knows what the cases of `manner.rs`
//! and the scenarios say, and no more: time zones are fixed offsets, the policy does not change its stages on the way.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use pitcrew_core::policy::Amount;
use serde_json::Value;

const DAY: i64 = 24 * 3600;
/// How a visit is judged whose window may close over it: looked at this often, in seconds.
const LOOK_SECONDS: i64 = 30;

/// Which nodes go when, and which together.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Moves {
    /// The parts of the fleet in their order, the rest as the last; none if it goes as one.
    pub stages: Vec<Stage>,
    /// When a day's windows begin, and how long they last, in seconds.
    windows: Vec<(i64, i64)>,
    /// Dates on which nothing starts, from and until.
    dark: Vec<(i64, i64)>,
    /// Nodes with one value of this label start together.
    pub atom: Option<String>,
    /// Of those with one value of this label, so many may be out.
    pub spread: Option<(String, Amount)>,
    /// A stage that fails only stops the rollout.
    pub pauses: bool,
    /// What has to prove a driver.
    pub gates: Vec<Gate>,
    /// Only versions that the matrix lists may start.
    pub only_listed: bool,
}

/// A gate.
#[derive(Clone, Debug, PartialEq)]
pub struct Gate {
    /// Its name.
    pub name: String,
    /// It is asked when all nodes of a stage are done, and not on each of them.
    pub at_stage_ends: bool,
}

/// A part of the fleet.
#[derive(Clone, Debug, PartialEq)]
pub struct Stage {
    /// Its name.
    pub name: String,
    pick: Pick,
    /// For how long its nodes are watched, in seconds.
    pub bake: i64,
    /// So many move at once, where it says so.
    pub max_parallel: Option<u64>,
    /// So many may fail.
    pub may_fail: Amount,
    /// A person opens the next one.
    pub manual: bool,
    /// What Prometheus is asked meanwhile, and the most that it may say.
    pub queries: Vec<(String, f64)>,
    /// So often its drivers may restart by themselves meanwhile, all together.
    pub may_restart: u64,
}

#[derive(Clone, Debug, PartialEq)]
enum Pick {
    Labels(BTreeMap<String, String>),
    Count(Amount),
    Rest,
}

impl Moves {
    /// What a DriverPolicy says.
    pub fn read(spec: &Value) -> Self {
        let rollout = &spec["rollout"];
        let may_fail = amount(&spec["limits"]["failureThreshold"]).unwrap_or(Amount::Percent(20));
        let read = |stage: &Value| Stage::read(stage, may_fail);
        let mut stages: Vec<Stage> = list(&rollout["stages"]).map(read).collect();
        if stages.last().is_some_and(|last| last.pick != Pick::Rest) {
            stages.push(read(&serde_json::json!({"name": "fleet"})));
        }
        let topology = &rollout["topology"];
        let spread = &topology["spread"];
        Self {
            stages,
            windows: list(&rollout["windows"]).filter_map(window).collect(),
            dark: list(&rollout["blackouts"]).filter_map(blackout).collect(),
            atom: topology["atom"].as_str().map(str::to_owned),
            spread: spread["label"].as_str().map(str::to_owned).zip(amount(&spread["max"])),
            pauses: rollout["onFailure"] == "Pause",
            gates: list(&rollout["gates"]).map(gate).collect(),
            only_listed: rollout["matrix"]["enforce"] == true,
        }
    }

    /// Something says when nodes may start.
    pub fn has_windows(&self) -> bool {
        !self.windows.is_empty() || !self.dark.is_empty()
    }

    /// Nodes may start at this moment.
    pub fn is_open(&self, at: Timestamp) -> bool {
        self.is_open_at(at.as_second())
    }

    fn is_open_at(&self, now: i64) -> bool {
        let today = now.div_euclid(DAY) * DAY;
        let begun = |begin: i64, lasts: i64| (begin..begin + lasts).contains(&now);
        let is_in = |(start, lasts): &(i64, i64)| {
            [today - DAY, today].iter().any(|midnight| begun(midnight + start, *lasts))
        };
        let dark = self.dark.iter().any(|(from, until)| (*from..*until).contains(&now));
        !dark && (self.windows.is_empty() || self.windows.iter().any(is_in))
    }

    /// From this moment on nodes may start for so many seconds.
    pub fn stays_open(&self, at: Timestamp, seconds: i64) -> bool {
        let from = at.as_second();
        (0..=seconds / LOOK_SECONDS).all(|step| self.is_open_at(from + step * LOOK_SECONDS))
    }

    /// The stage of each of these nodes, who come in the order in which stages are counted out.
    pub fn assign<'a>(
        &self,
        nodes: impl ExactSizeIterator<Item = (&'a str, &'a BTreeMap<String, String>)>,
    ) -> BTreeMap<String, usize> {
        let total = nodes.len();
        let last = self.stages.len().saturating_sub(1);
        let mut taken = vec![0; self.stages.len()];
        let mut all = BTreeMap::new();
        for (name, labels) in nodes {
            let fits = |(place, stage): &(usize, &Stage)| match &stage.pick {
                Pick::Labels(wanted) => wanted.iter().all(|(key, value)| labels.get(key) == Some(value)),
                Pick::Count(amount) => taken[*place] < amount.of(total),
                Pick::Rest => true,
            };
            let stage = self.stages.iter().enumerate().find(fits).map_or(last, |(place, _)| place);
            if let Some(taken) = taken.get_mut(stage) {
                *taken += 1;
            }
            all.insert(name.to_owned(), stage);
        }
        all
    }
}

impl Stage {
    /// So many nodes of the pool may fail: that is what the last stage goes by, if it says nothing else.
    fn read(stage: &Value, of_the_pool: Amount) -> Self {
        let labels: BTreeMap<String, String> =
            serde_json::from_value(stage["nodeSelector"].clone()).unwrap_or_default();
        let pick = match amount(&stage["count"]) {
            Some(count) => Pick::Count(count),
            None if labels.is_empty() => Pick::Rest,
            None => Pick::Labels(labels),
        };
        let by_default = if pick == Pick::Rest { of_the_pool } else { Amount::Nodes(0) };
        Self {
            name: stage["name"].as_str().unwrap_or_default().to_owned(),
            pick,
            bake: stage["bake"]["duration"].as_str().map_or(0, seconds),
            max_parallel: stage["maxParallelUpgrades"].as_u64(),
            may_fail: amount(&stage["failureThreshold"]).unwrap_or(by_default),
            manual: stage["promotion"] == "Manual",
            queries: list(&stage["bake"]["queries"]).filter_map(query).collect(),
            may_restart: stage["bake"]["maxDriverRestarts"].as_u64().unwrap_or_default(),
        }
    }
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn gate(spec: &Value) -> Gate {
    let name = spec["name"].as_str().unwrap_or_default().to_owned();
    Gate { name, at_stage_ends: spec["runs"] == "Stage" }
}

fn query(spec: &Value) -> Option<(String, f64)> {
    Some((spec["name"].as_str()?.to_owned(), spec["max"].as_f64()?))
}

fn amount(value: &Value) -> Option<Amount> {
    let value: IntOrString = serde_json::from_value(value.clone()).ok()?;
    Amount::try_from(&value).ok()
}

/// `1h30m`.
pub(super) fn seconds(text: &str) -> i64 {
    let (mut all, mut number) = (0, 0);
    for letter in text.chars() {
        let unit = match letter {
            'd' => DAY,
            'h' => 3600,
            'm' => 60,
            's' => 1,
            digit => {
                number = number * 10 + i64::from(digit.to_digit(10).unwrap_or_default());
                continue;
            }
        };
        (all, number) = (all + number * unit, 0);
    }
    all
}

fn window(spec: &Value) -> Option<(i64, i64)> {
    let (hour, minute) = spec["start"].as_str()?.split_once(':')?;
    let start = hour.parse::<i64>().ok()? * 3600 + minute.parse::<i64>().ok()? * 60;
    Some((start, seconds(spec["duration"].as_str()?)))
}

/// One day, in a zone like `Etc/GMT+1`, which is one hour west.
fn blackout(spec: &Value) -> Option<(i64, i64)> {
    let midnight: Timestamp = format!("{}T00:00:00Z", spec["from"].as_str()?).parse().ok()?;
    let west = spec["timeZone"].as_str().and_then(|zone| zone.strip_prefix("Etc/GMT")?.parse::<i64>().ok());
    let from = midnight.as_second() + west.unwrap_or_default() * 3600;
    Some((from, from + DAY))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn moves(rollout: &Value) -> Moves {
        Moves::read(&json!({ "rollout": rollout }))
    }

    fn at(text: &str) -> Timestamp {
        format!("2026-01-01T{text}Z").parse().unwrap()
    }

    #[test]
    fn a_window_is_open_from_its_start_until_it_is_over() {
        let moves = moves(&json!({"windows": [{"start": "00:10", "duration": "1h5m"}]}));
        let open = |time: &str| moves.is_open(at(time));
        assert!(!open("00:09:59") && open("00:10:00") && open("01:14:59") && !open("01:15:00"));
        assert!(moves.stays_open(at("00:45:00"), 1790) && !moves.stays_open(at("00:46:00"), 1790));
    }

    #[test]
    fn a_window_may_last_past_midnight() {
        let moves = moves(&json!({"windows": [{"start": "23:30", "duration": "1h"}]}));
        assert!(moves.is_open(at("00:29:59")) && !moves.is_open(at("00:30:00")));
    }

    #[test]
    fn a_day_in_the_west_ends_later() {
        let moves = moves(&json!({"blackouts": [{"from": "2025-12-31", "timeZone": "Etc/GMT+1"}]}));
        assert!(!moves.is_open(at("00:59:59")) && moves.is_open(at("01:00:00")));
    }

    #[test]
    fn a_node_belongs_to_the_first_stage_that_takes_it() {
        let stages = json!([
            {"name": "canary", "nodeSelector": {"gpu-canary": "true"}}, {"name": "some", "count": "50%"},
        ]);
        let moves = moves(&json!({ "stages": stages }));
        let plain = BTreeMap::new();
        let canary = BTreeMap::from([("gpu-canary".to_owned(), "true".to_owned())]);
        let nodes = [("a", &plain), ("b", &canary), ("c", &plain), ("d", &plain)];
        let of: Vec<usize> = moves.assign(nodes.into_iter()).into_values().collect();
        assert_eq!(of, [1, 0, 1, 2]);
    }
}
