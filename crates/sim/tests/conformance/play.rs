//! Plays a sequence on both servers and finds the first answer that differs.

use crate::call::Call;
use crate::differences;
use crate::kinds::KINDS;
use crate::side::{Answer, Side};
use kube::Client;
use pitcrew_sim::api::ApiServer;
use std::error::Error;
use std::fmt::Write as _;
use std::time::Duration;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// The first difference of a sequence.
#[derive(Debug)]
pub(crate) struct Difference {
    /// Which call.
    pub(crate) at: usize,
    pub(crate) real: Answer,
    pub(crate) embedded: Answer,
}

/// The answers of a fresh embedded server, on its own clock.
pub(crate) fn embedded(run: &str, calls: &[Call]) -> Result<Vec<Answer>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build()?;
    runtime.block_on(async {
        let server = ApiServer::new("2026-01-01T00:00:00Z".parse()?);
        define(&server.client()).await?;
        answers(server.client(), run, calls).await
    })
}

/// Pitcrew's own kinds.
pub(crate) async fn define(client: &Client) -> Result<()> {
    use kube::runtime::{conditions, wait::await_condition};
    let api = kube::Api::all(client.clone());
    for definition in pitcrew_core::api::crds() {
        let name = definition.metadata.name.clone().unwrap_or_default();
        api.create(&kube::api::PostParams::default(), &definition).await?;
        await_condition(api.clone(), &name, conditions::is_crd_established()).await?;
    }
    // Established is not yet served: the storage of a new kind takes a moment.
    for kind in KINDS.iter().filter(|kind| kind.is_custom()) {
        while !serves(client, &kind.collection()).await? {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
    Ok(())
}

async fn serves(client: &Client, path: &str) -> Result<bool> {
    let request = http::Request::get(path).body(kube::client::Body::empty())?;
    Ok(client.send(request).await?.status().is_success())
}

/// The answers of one server.
pub(crate) async fn answers(client: Client, run: &str, calls: &[Call]) -> Result<Vec<Answer>> {
    let mut side = Side::new(client, run);
    let mut answers = Vec::new();
    for (index, call) in calls.iter().enumerate() {
        answers.push(side.play(index, call).await?);
    }
    Ok(answers)
}

/// Plays on both; `run` must be a new name on the real server.
pub(crate) async fn compare(real: &Client, run: &str, calls: &[Call]) -> Result<Option<Difference>> {
    let (its_run, its_calls) = (run.to_owned(), calls.to_vec());
    let embedded = tokio::task::spawn_blocking(move || embedded(&its_run, &its_calls));
    let real = answers(real.clone(), run, calls).await?;
    let embedded = embedded.await??;
    for (at, (mut real, mut embedded)) in real.into_iter().zip(embedded).enumerate() {
        differences::leave_out(&calls[at], &mut real, &mut embedded);
        if real != embedded {
            return Ok(Some(Difference { at, real, embedded }));
        }
    }
    Ok(None)
}

/// Leaves out calls as long as the sequence still differs.
pub(crate) async fn shrink(
    real: &Client,
    run: &str,
    mut calls: Vec<Call>,
    mut found: Difference,
) -> Result<(Vec<Call>, Difference)> {
    calls.truncate(found.at + 1);
    let mut at = calls.len() - 1;
    let mut attempt = 0;
    // The namespace and the call that differs stay.
    while at > 1 {
        at -= 1;
        let mut fewer = calls.clone();
        fewer.remove(at);
        attempt += 1;
        if let Some(difference) = compare(real, &format!("{run}-{attempt}"), &fewer).await? {
            fewer.truncate(difference.at + 1);
            at = at.min(fewer.len() - 1);
            (calls, found) = (fewer, difference);
        }
    }
    Ok((calls, found))
}

/// The sequence and both answers, for a person.
pub(crate) fn tell(seed: u64, calls: &[Call], difference: &Difference) -> String {
    let Difference { at, real, embedded } = difference;
    let mut text = format!("seed {seed}, call {at} is answered differently:\n");
    for (index, call) in calls.iter().enumerate() {
        let _ = writeln!(text, "  {index:2} {call}");
    }
    let _ = writeln!(
        text,
        "  real:     {} {:?} {}\n  embedded: {} {:?} {}",
        real.code, real.retry_after, real.body, embedded.code, embedded.retry_after, embedded.body
    );
    let mut lines = Vec::new();
    differing("", &real.body, &embedded.body, &mut lines);
    for line in lines {
        let _ = writeln!(text, "  {line}");
    }
    text
}

/// One line per field that differs.
fn differing(path: &str, real: &serde_json::Value, embedded: &serde_json::Value, lines: &mut Vec<String>) {
    use serde_json::Value::{Array, Object};
    match (real, embedded) {
        (Object(left), Object(right)) => {
            let names: std::collections::BTreeSet<&String> = left.keys().chain(right.keys()).collect();
            for name in names {
                differing(&format!("{path}.{name}"), &real[name.as_str()], &embedded[name.as_str()], lines);
            }
        }
        (Array(left), Array(right)) if left.len() == right.len() => {
            for (index, (left, right)) in left.iter().zip(right).enumerate() {
                differing(&format!("{path}[{index}]"), left, right, lines);
            }
        }
        (left, right) if left != right => lines.push(format!("{path}: real {left}, embedded {right}")),
        _ => {}
    }
}
