//! From a gate's Job to a verdict: passed, failed, or not to be judged. Pure.

use std::fmt;

use jiff::SignedDuration;
use serde_json::Value;

use super::bound::{self, Judged};
use super::{Gate, GateJob, Missed, Numbers, Obstacle, Outcome, Sample};

/// How much of a failing log is kept; kubelets send no more either.
pub const LOG_TAIL_BYTES: usize = 2048;

/// What a gate says.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// Nothing yet.
    Running {
        /// What keeps it from running.
        waits: Option<Obstacle>,
    },
    /// The node, or the stage, may go on.
    Passed {
        /// How long it took.
        took: SignedDuration,
        /// What it measured; of several nodes the first one's.
        numbers: Numbers,
    },
    /// It must not.
    Failed {
        /// Why.
        why: Why,
        /// The end of its log, or what else it said.
        log_tail: Box<str>,
        /// How long it took.
        took: SignedDuration,
        /// What it measured.
        numbers: Numbers,
    },
    /// Nobody knows, and it need not be the driver's fault.
    Unjudged {
        /// Why not.
        why: Obstacle,
    },
}

/// Why a gate failed.
#[derive(Clone, Debug, PartialEq)]
pub enum Why {
    /// By its exit code.
    Exited {
        /// Which.
        code: i32,
    },
    /// It ran too long.
    TimedOut {
        /// How long it had.
        after: SignedDuration,
    },
    /// It should report numbers and reports nothing.
    NoOutput,
    /// What it reports is no JSON object.
    NotJson,
    /// A number is out of its bounds.
    Missed(Missed),
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Why::Exited { code } => write!(f, "exit code {code}"),
            Why::TimedOut { after } => write!(f, "it was not done after {after:#}"),
            Why::NoOutput => f.write_str(
                "it has bounds and reports no numbers: it must write a JSON object to /dev/termination-log",
            ),
            Why::NotJson => {
                f.write_str("it has bounds, and what it wrote to /dev/termination-log is no JSON object")
            }
            Why::Missed(missed) => missed.fmt(f),
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Verdict::Running { waits: None } => f.write_str("runs"),
            Verdict::Running { waits: Some(waits) } => write!(f, "waits: {waits}"),
            Verdict::Passed { took, .. } => write!(f, "passed in {took:#}"),
            Verdict::Failed { why, took, .. } => write!(f, "failed after {took:#}: {why}"),
            Verdict::Unjudged { why } => write!(f, "could not judge: {why}"),
        }
    }
}

impl GateJob {
    /// The numbers of a sample, if it has been taken and they can be read: to be compared with, or kept for later.
    pub fn numbers(&self, gate: &Gate) -> Option<Numbers> {
        let Some(Outcome::Succeeded { messages }) = &self.outcome else { return None };
        let output = object(messages.first()?).ok()?;
        Some(bound::numbers(&output, &gate.bounds))
    }

    /// It ran before the driver was restarted.
    pub fn is_before(&self) -> bool {
        self.run.sample == Sample::Before
    }

    fn took(&self) -> SignedDuration {
        let since = self.started.unwrap_or(self.created);
        self.finished.map_or(SignedDuration::ZERO, |end| end.duration_since(since)).max(SignedDuration::ZERO)
    }
}

/// What `after` says, compared with what was before.
pub fn verdict(gate: &Gate, before: Option<&GateJob>, after: &GateJob) -> Verdict {
    judge(gate, before.and_then(|before| before.numbers(gate)).as_ref(), after)
}

/// The same, with numbers from before that somebody kept: a Job is gone an hour after its end, a bake takes days.
pub fn judge(gate: &Gate, before: Option<&Numbers>, after: &GateJob) -> Verdict {
    let took = after.took();
    let failed = |why: Why, said: &str, numbers: Numbers| Verdict::Failed {
        why,
        log_tail: tail(said).into(),
        took,
        numbers,
    };
    match &after.outcome {
        None => Verdict::Running { waits: after.waits.clone() },
        Some(Outcome::NotRun(why)) => Verdict::Unjudged { why: why.clone() },
        Some(Outcome::Exited { code, message }) => {
            failed(Why::Exited { code: *code }, message, Numbers::new())
        }
        Some(Outcome::TimedOut { message }) => {
            failed(Why::TimedOut { after: gate.timeout }, message, Numbers::new())
        }
        Some(Outcome::Succeeded { messages }) => {
            let samples: Vec<_> = messages.iter().map(|message| (message, object(message))).collect();
            let mut unjudged = false;
            for (message, output) in &samples {
                match weigh(gate, before, output) {
                    Ok(Judged::Missed(missed)) => {
                        let numbers = output.as_ref().map(|output| bound::numbers(output, &gate.bounds));
                        return failed(Why::Missed(missed), message, numbers.unwrap_or_default());
                    }
                    Ok(Judged::NoBefore) => unjudged = true,
                    Ok(Judged::Kept) => {}
                    Err(why) => return failed(why, message, Numbers::new()),
                }
            }
            // Its exit code is known, its numbers are not: nobody knows what they were.
            if samples.is_empty() && !gate.bounds.is_empty() {
                return Verdict::Unjudged { why: Obstacle::Vanished };
            }
            if unjudged {
                return Verdict::Unjudged { why: Obstacle::NoBefore };
            }
            let numbers = samples.iter().find_map(|(_, output)| output.as_ref().ok());
            let numbers = numbers.map(|output| bound::numbers(output, &gate.bounds)).unwrap_or_default();
            Verdict::Passed { took, numbers }
        }
    }
}

/// What the bounds make of one pod's output: the worst of it.
fn weigh(gate: &Gate, before: Option<&Numbers>, output: &Result<Value, Why>) -> Result<Judged, Why> {
    if gate.bounds.is_empty() {
        return Ok(Judged::Kept);
    }
    let numbers = bound::numbers(output.as_ref().map_err(Why::clone)?, &gate.bounds);
    let mut worst = Judged::Kept;
    for bound in &gate.bounds {
        match bound.judge(before, &numbers) {
            missed @ Judged::Missed(_) => return Ok(missed),
            Judged::NoBefore => worst = Judged::NoBefore,
            Judged::Kept => {}
        }
    }
    Ok(worst)
}

fn object(message: &str) -> Result<Value, Why> {
    if message.trim().is_empty() {
        return Err(Why::NoOutput);
    }
    serde_json::from_str(message).ok().filter(Value::is_object).ok_or(Why::NotJson)
}

/// The end of a text, at most [`LOG_TAIL_BYTES`] long.
fn tail(text: &str) -> &str {
    let text = text.trim_end();
    let from = text.len().saturating_sub(LOG_TAIL_BYTES);
    &text[text.ceil_char_boundary(from)..]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{BoundSpec, GateSpec, Preset};
    use crate::gate::GateRun;
    use crate::names::ObjectName;

    fn gate(bounds: Vec<BoundSpec>) -> Gate {
        Gate::read(&GateSpec { bounds, ..GateSpec::preset(Preset::SmokeTraining) }).unwrap()
    }

    fn at_most(field: &str, max: f64) -> BoundSpec {
        BoundSpec { field: field.into(), max: Some(max), ..BoundSpec::default() }
    }

    fn job(sample: Sample, outcome: Option<Outcome>) -> GateJob {
        let time = |seconds: i64| jiff::Timestamp::from_second(1_772_352_000 + seconds).unwrap();
        GateJob {
            name: ObjectName::new("ops", "gate"),
            uid: "job-1".into(),
            run: GateRun {
                gate: "smoke-training".into(),
                rollout: "gpu-7".into(),
                stage: None,
                nodes: vec!["gpu-01".into()],
                sample,
                attempt: 1,
                subject: "7d9f".into(),
            },
            created: time(0),
            started: Some(time(20)),
            finished: outcome.as_ref().map(|_| time(50)),
            outcome,
            waits: None,
        }
    }

    fn said(messages: &[&str]) -> GateJob {
        let messages = messages.iter().map(|message| (*message).into()).collect();
        job(Sample::After, Some(Outcome::Succeeded { messages }))
    }

    fn why(verdict: Verdict) -> String {
        match verdict {
            Verdict::Failed { why, .. } => why.to_string(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn without_bounds_the_exit_code_alone_counts() {
        let took = SignedDuration::from_secs(30);
        for message in ["", "all is well", "[1, 2]"] {
            let verdict = judge(&gate(vec![]), None, &said(&[message]));
            assert_eq!(verdict, Verdict::Passed { took, numbers: Numbers::new() }, "{message}");
        }
        let numbers = Numbers::from([("loss".to_owned(), 0.5)]);
        assert_eq!(
            judge(&gate(vec![]), None, &said(&[r#"{"loss": 0.5}"#])),
            Verdict::Passed { took, numbers }
        );
        let exited = Outcome::Exited { code: 3, message: "loss is nan\n".into() };
        let Verdict::Failed { why, log_tail, .. } =
            judge(&gate(vec![]), None, &job(Sample::After, Some(exited)))
        else {
            panic!("it failed")
        };
        assert_eq!((why.to_string().as_str(), log_tail.as_ref()), ("exit code 3", "loss is nan"));
    }

    #[test]
    fn a_verdict_is_a_sentence() {
        let says = |outcome| judge(&gate(vec![]), None, &job(Sample::After, outcome)).to_string();
        assert_eq!(says(None), "runs");
        assert_eq!(says(Some(Outcome::Succeeded { messages: vec![] })), "passed in 30s");
        let exited = Outcome::Exited { code: 3, message: "".into() };
        assert_eq!(says(Some(exited)), "failed after 30s: exit code 3");
        let stuck = Obstacle::NotStarted { says: "ErrImagePull".into() };
        let sentence = "could not judge: its container did not start: ErrImagePull";
        assert_eq!(says(Some(Outcome::NotRun(stuck))), sentence);
    }

    #[test]
    fn numbers_that_are_asked_for_must_be_there() {
        let gate = gate(vec![at_most("loss", 1.0)]);
        for (message, sentence) in [
            ("", "it has bounds and reports no numbers: it must write a JSON object to /dev/termination-log"),
            ("fine", "it has bounds, and what it wrote to /dev/termination-log is no JSON object"),
            ("[1]", "it has bounds, and what it wrote to /dev/termination-log is no JSON object"),
            ("{}", "its output has no number loss"),
            (r#"{"loss": "low"}"#, "its output has no number loss"),
            (r#"{"loss": 1.5}"#, "loss is 1.5 and must be at most 1"),
        ] {
            assert_eq!(why(judge(&gate, None, &said(&[message]))), sentence, "{message}");
        }
        assert_eq!(judge(&gate, None, &said(&[])), Verdict::Unjudged { why: Obstacle::Vanished });
        assert!(matches!(judge(&gate, None, &said(&[r#"{"loss": 1}"#])), Verdict::Passed { .. }));
    }

    #[test]
    fn ecc_errors_are_compared_with_those_before() {
        let gate = Gate::read(&GateSpec::preset(Preset::EccErrors)).unwrap();
        let sample = |uncorrected: u32, gpus: u32| {
            format!(r#"{{"gpus": {gpus}, "withEcc": {gpus}, "corrected": 7, "uncorrected": {uncorrected}}}"#)
        };
        let taken =
            |text: String| job(Sample::Before, Some(Outcome::Succeeded { messages: vec![text.into()] }));
        let before = taken(sample(2, 8));
        let after = |text: String| verdict(&gate, Some(&before), &said(&[&text]));
        assert!(matches!(after(sample(2, 8)), Verdict::Passed { .. }));
        assert_eq!(why(after(sample(3, 8))), "uncorrected was 2 before and is 3; it may grow by 0");
        assert_eq!(why(after(sample(2, 7))), "gpus was 8 before and is 7; it may shrink by 0");
        let unjudged = Verdict::Unjudged { why: Obstacle::NoBefore };
        let now = said(&[&sample(2, 8)]);
        assert_eq!(verdict(&gate, None, &now), unjudged);
        let broken = job(Sample::Before, Some(Outcome::Exited { code: 9, message: "".into() }));
        assert_eq!(verdict(&gate, Some(&broken), &now), unjudged);
        let garbled = taken("nvidia-smi: command not found".into());
        assert_eq!(verdict(&gate, Some(&garbled), &now), unjudged);
        // The numbers outlive the Job.
        let kept = before.numbers(&gate).unwrap();
        assert!(matches!(judge(&gate, Some(&kept), &now), Verdict::Passed { .. }));
    }

    #[test]
    fn of_several_nodes_every_one_must_keep_the_bounds() {
        let gate = gate(vec![at_most("loss", 1.0)]);
        let (good, bad) = (r#"{"loss": 0.5}"#, r#"{"loss": 2}"#);
        assert!(matches!(judge(&gate, None, &said(&[good, good])), Verdict::Passed { .. }));
        assert_eq!(why(judge(&gate, None, &said(&[good, bad]))), "loss is 2 and must be at most 1");
    }

    #[test]
    fn what_was_not_run_is_not_judged_and_what_runs_is_not_over() {
        let missing = Obstacle::NotStarted { says: "ErrImagePull".into() };
        let mut waiting = job(Sample::After, None);
        waiting.waits = Some(missing.clone());
        let running = Verdict::Running { waits: Some(missing.clone()) };
        assert_eq!(judge(&gate(vec![]), None, &waiting), running);
        let over = job(Sample::After, Some(Outcome::NotRun(missing.clone())));
        assert_eq!(judge(&gate(vec![]), None, &over), Verdict::Unjudged { why: missing });
        let late = job(Sample::After, Some(Outcome::TimedOut { message: "step 3".into() }));
        assert_eq!(why(judge(&gate(vec![]), None, &late)), "it was not done after 10m");
    }

    #[test]
    fn a_tail_is_the_end_and_whole_letters() {
        let text = format!("{}the end\n", "\u{e4}".repeat(3000));
        let tail = tail(&text);
        assert!(tail.len() <= LOG_TAIL_BYTES && tail.len() > LOG_TAIL_BYTES - 4);
        assert!(tail.ends_with("\u{e4}the end"));
    }
}
