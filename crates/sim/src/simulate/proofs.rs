//! What speaks for a version, as the promises read it: Jobs of gates that have ended well, the version matrix, and what
//! Prometheus said.
//!
//! The first two are read from API objects alone, and share no code with the planner but the words on a Job that say what it is for.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use pitcrew_core::contract::{GATE_RUN_ANNOTATION, MATRIX_KEY};
use pitcrew_core::gate::{GateRun, Sample};
use pitcrew_core::prometheus::Values;
use serde_json::Value;

use super::world::before;

/// Times are told in whole seconds.
const ROUNDED: SignedDuration = SignedDuration::from_secs(1);

/// All of it.
#[derive(Clone, Debug, Default)]
pub struct Proofs {
    /// Jobs of gates that ended well, by their names, each with when it was made.
    passed: BTreeMap<String, (GateRun, Timestamp)>,
    /// The drivers that the matrix listed, each time since when.
    listed: Vec<(Timestamp, BTreeSet<String>)>,
    /// What Prometheus said, each time when.
    answers: Vec<(Timestamp, f64)>,
}

impl Proofs {
    /// A Job as it is now.
    pub fn note_job(&mut self, name: &str, job: &Value) {
        let conditions = job["status"]["conditions"].as_array().into_iter().flatten();
        let complete = conditions.into_iter().any(|c| c["type"] == "Complete" && c["status"] == "True");
        let run = job["metadata"]["annotations"][GATE_RUN_ANNOTATION].as_str();
        let run = run.filter(|_| complete).and_then(|run| serde_json::from_str(run).ok());
        let made = job["metadata"]["creationTimestamp"].as_str().and_then(|made| made.parse().ok());
        self.passed.extend(run.zip(made).map(|proof| (name.to_owned(), proof)));
    }

    /// The matrix as it is now.
    pub fn note_matrix(&mut self, at: Timestamp, config_map: Option<&Value>) {
        let text = config_map.and_then(|map| map["data"][MATRIX_KEY].as_str()).unwrap_or_default();
        // `    driver: "550.54.14"`, in whichever entry.
        let driver = |line: &str| Some(line.trim().strip_prefix("driver: ")?.trim_matches('"').to_owned());
        self.listed.push((at, text.lines().filter_map(driver).collect()));
    }

    /// Prometheus has answered.
    pub fn note_answer(&mut self, at: Timestamp, said: &Result<Values, String>) {
        self.answers.extend(said.as_ref().ok().map(|values| (at, values.highest.value)));
    }

    /// What Prometheus said from then on.
    pub fn heard(&self, since: Timestamp) -> impl Iterator<Item = (Timestamp, f64)> {
        self.answers.iter().copied().filter(move |(at, _)| *at >= since)
    }

    /// A gate has let a node pass, asked about a driver that was there since then.
    pub fn node_passed(&self, gate: &str, node: &str, since: Timestamp) -> bool {
        self.passed.values().any(|(run, made)| {
            let about = run.stage.is_none() && run.sample == Sample::After;
            about && run.gate.as_str() == gate && is_only(run, node) && *made + ROUNDED >= since
        })
    }

    /// A gate has let a stage of a rollout pass.
    pub fn stage_passed(&self, gate: &str, rollout: &str, stage: &str) -> bool {
        self.passed.values().any(|(run, _)| {
            run.gate.as_str() == gate && run.rollout == rollout && run.stage.as_deref() == Some(stage)
        })
    }

    /// The matrix lists a driver, or did a moment ago.
    pub fn lists(&self, driver: &str, now: Timestamp, lag: SignedDuration) -> bool {
        let known_since = before(now, lag);
        let mut ended = self.listed.iter().skip(1).map(|(next, _)| *next).chain([Timestamp::MAX]);
        let mut known = self.listed.iter().filter(|_| ended.next().is_some_and(|end| end >= known_since));
        known.any(|(_, drivers)| drivers.contains(driver))
    }
}

fn is_only(run: &GateRun, node: &str) -> bool {
    run.nodes.len() == 1 && run.nodes[0].as_str() == node
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(seconds).unwrap()
    }

    fn job(run: &Value, complete: bool) -> Value {
        let annotations = json!({GATE_RUN_ANNOTATION: run.to_string()});
        let condition = if complete { json!([{"type": "Complete", "status": "True"}]) } else { json!([]) };
        json!({
            "metadata": {"creationTimestamp": at(100).to_string(), "annotations": annotations},
            "status": {"conditions": condition},
        })
    }

    #[test]
    fn only_a_job_that_ended_well_about_this_driver_proves_a_node() {
        let run = json!({"gate": "smoke", "rollout": "gpu-1", "nodes": ["a"], "sample": "After", "attempt": 1,
            "subject": "x"});
        let mut proofs = Proofs::default();
        proofs.note_job("one", &job(&run, false));
        assert!(!proofs.node_passed("smoke", "a", at(50)), "it runs");
        proofs.note_job("one", &job(&run, true));
        assert!(proofs.node_passed("smoke", "a", at(50)));
        assert!(!proofs.node_passed("smoke", "a", at(150)), "another driver came after it");
        assert!(!proofs.node_passed("smoke", "b", at(50)) && !proofs.node_passed("ecc", "a", at(50)));
        assert!(!proofs.stage_passed("smoke", "gpu-1", "canary"));
    }

    #[test]
    fn what_was_struck_off_counts_for_a_moment() {
        let map =
            |driver: &str| json!({"data": {MATRIX_KEY: format!("current:\n    driver: \"{driver}\"\n")}});
        let mut proofs = Proofs::default();
        let lag = SignedDuration::from_secs(2);
        assert!(!proofs.lists("550", at(5), lag), "nobody has listed anything");
        proofs.note_matrix(at(10), Some(&map("550")));
        proofs.note_matrix(at(20), Some(&map("535")));
        assert!(proofs.lists("550", at(21), lag) && !proofs.lists("550", at(23), lag));
        proofs.note_matrix(at(30), None);
        assert!(!proofs.lists("535", at(33), lag));
    }
}
