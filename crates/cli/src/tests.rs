//! What holds for all commands: what people are told to type exists, and readers write nothing.

use std::ffi::OsStr;
use std::process::ExitCode;
use std::time::Duration;

use clap::CommandFactory as _;
use jiff::tz::TimeZone;
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::{Patch, PatchParams};
use pitcrew_controller::Look;
use pitcrew_core::contract::State;
use pitcrew_sim::actors::{Behaviour, NAMESPACE};
use pitcrew_sim::cluster::Cluster;
use pitcrew_sim::fleet::Fleet;
use serde_json::Value;
use tokio::task::JoinHandle;

use crate::connect::Session;
use crate::reading::Reading;
use crate::{Cli, command};

const SEED: u64 = 7;
/// On virtual time patience costs nothing.
const PATIENCE_SECONDS: u32 = 7200;

/// An embedded cluster on virtual time, with a controller in it and a person at a terminal.
pub(crate) struct Stage {
    pub(crate) cluster: Cluster,
    pub(crate) session: Session,
    controller: Option<JoinHandle<()>>,
}

/// Plays a story on a fleet whose nodes are all done to begin with.
pub(crate) fn play(fleet: &Fleet, behaviour: Behaviour, story: impl AsyncFnOnce(&mut Stage)) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.unwrap().block_on(async {
        let cluster = Cluster::embedded(fleet, SEED, behaviour).await.unwrap();
        let (client, clock) = (cluster.admin.clone(), cluster.clock.clone());
        let session = Session { client, namespace: NAMESPACE.to_owned(), clock, zone: TimeZone::UTC };
        let mut stage = Stage { cluster, session, controller: None };
        stage.start_controller();
        stage.until("every node is done", |reading| states(reading).all(|s| s == State::UpgradeDone)).await;
        story(&mut stage).await;
    });
}

fn states(reading: &Reading<'_>) -> impl Iterator<Item = State> {
    reading.plan.pools.iter().flat_map(|pool| pool.nodes.values()).map(|verdict| verdict.state)
}

impl Stage {
    pub(crate) fn start_controller(&mut self) {
        let controller = self.cluster.new_controller("pitcrew-0");
        self.controller = Some(tokio::spawn(async move {
            controller.run(std::future::pending()).await.unwrap();
        }));
    }

    /// As `kill -9` does.
    pub(crate) fn kill_controller(&mut self) {
        self.controller.take().unwrap().abort();
    }

    pub(crate) async fn look(&self) -> Look {
        self.session.look().await.unwrap()
    }

    /// Looks every second until `holds`.
    pub(crate) async fn until(&self, what: &str, holds: impl Fn(&Reading<'_>) -> bool) {
        for _ in 0..PATIENCE_SECONDS {
            let look = self.look().await;
            if holds(&Reading::of(&look.snapshot, &look.leader)) {
                return;
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        panic!("waited in vain until {what}");
    }

    /// Waits until a node is in a state for the first pool's driver.
    pub(crate) async fn until_state(&self, node: &str, state: State) {
        let holds = |reading: &Reading<'_>| reading.plan.pools[0].nodes[node].state == state;
        self.until(&format!("{node} is {state}"), holds).await;
    }

    pub(crate) async fn patch_node(&self, node: &str, patch: Value) {
        let nodes = Api::<Node>::all(self.cluster.admin.clone());
        nodes.patch(node, &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
    }

    /// Requests so far that change something, by the person.
    pub(crate) fn writes(&self) -> u64 {
        let counts = self.cluster.api.as_ref().unwrap().counts();
        let writes = ["create", "update", "patch", "delete", "deletecollection"];
        let by_us =
            counts.by_request.iter().filter(|((user, verb, _), _)| user == "admin" && writes.contains(verb));
        by_us.map(|(_, count)| count).sum()
    }
}

/// What a command printed, and how it ended: its exit code, or its sentence.
pub(crate) async fn told(
    command: impl AsyncFnOnce(&mut Vec<u8>) -> anyhow::Result<ExitCode>,
) -> (String, Result<bool, String>) {
    let mut out = Vec::new();
    let ended = command(&mut out).await;
    let ended = ended.map(|code| code == ExitCode::SUCCESS).map_err(|error| format!("{error:#}"));
    (String::from_utf8(out).unwrap(), ended)
}

/// The words of a command line; only quotes and placeholders that we print ourselves.
fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(|word| word.trim_matches('`').to_owned()).collect()
}

/// Each `pitcrew …` in a text, to the end of its command.
fn commands(text: &str) -> Vec<String> {
    let starts = text.match_indices("pitcrew ").filter(|(at, _)| {
        text[..*at].chars().next_back().is_none_or(|before| matches!(before, ' ' | '`' | '(' | '\n' | '"'))
    });
    let ends = ['`', '\n', ')', '"', '|', '#', '<'];
    let one = |(at, _): (usize, &str)| text[at..].split(ends).next().unwrap_or_default().trim().to_owned();
    starts.map(one).collect()
}

fn is_known(line: &str) -> Result<(), clap::Error> {
    let words = words(line);
    match Cli::command().try_get_matches_from(&words) {
        Ok(_) => Ok(()),
        Err(error) if !error.use_stderr() => Ok(()),
        Err(error) => Err(error),
    }
}

#[test]
fn whatever_core_advises_is_a_command_that_exists() {
    let answers = include_str!(
        "../../core/src/plan/tests/snapshots/pitcrew_core__plan__tests__answers__every_reason_has_an_answer.snap"
    );
    let advice = answers.lines().filter_map(|line| line.trim().strip_prefix("- ")?.split_once(": "));
    let ours: Vec<&str> = advice.map(|(_, command)| command).filter(|c| c.starts_with("pitcrew")).collect();
    assert!(ours.len() >= 5, "{ours:?}");
    for line in ours {
        let line = line.split("  (").next().unwrap();
        assert!(is_known(line).is_ok(), "{line}: {}", is_known(line).unwrap_err());
    }
}

#[test]
fn whatever_the_manual_tells_people_to_type_exists() {
    let manual = concat!(include_str!("../../../docs/commands.md"), include_str!("../../../docs/matrix.md"));
    let typed = manual.lines().filter_map(|line| line.strip_prefix("$ "));
    let typed: Vec<&str> = typed.filter(|line| line.starts_with("pitcrew ")).collect();
    assert!(typed.len() >= 8, "{typed:?}");
    for line in typed
        .into_iter()
        .map(str::to_owned)
        .chain(commands(manual).into_iter().filter(|c| c.contains("explain node/")))
    {
        let line = line.split(';').next().unwrap();
        assert!(is_known(line).is_ok(), "{line}: {}", is_known(line).unwrap_err());
    }
}

#[test]
fn as_a_plugin_of_kubectl_it_answers_by_that_name() {
    let usage = |called: &str| command(OsStr::new(called)).render_usage().to_string();
    assert!(usage("/usr/local/bin/pitcrew").contains("Usage: pitcrew <COMMAND>"));
    assert!(usage("/usr/local/bin/kubectl-pitcrew").contains("Usage: kubectl pitcrew <COMMAND>"));
    Cli::command().debug_assert();
}
