//! `skip` and `retry`: the documented labels of a node, one write per node, pinned to the version that was seen.

use anyhow::{anyhow, bail};
use pitcrew_controller::Look;
use pitcrew_core::contract::State;
use pitcrew_core::names::NodeName;
use pitcrew_core::plan::PoolStatus;
use pitcrew_core::policy::Policy;
use pitcrew_core::reason::About;
use serde_json::{Map, Value, json};

use super::{Object, Step};
use crate::reading::{Reading, did_you_mean};

/// Leaves nodes out, or lets them take part again.
pub(super) fn skip(
    look: &Look,
    nodes: &[String],
    driver: Option<&str>,
    undo: bool,
) -> anyhow::Result<Vec<Step>> {
    let reading = Reading::with_pools(look)?;
    each(&reading, nodes, |node| {
        let concerned = concerned(&reading, node, driver)?;
        let value = (!undo).then_some("true");
        let differs = |(_, policy): &&(About<'_>, &Policy)| mark(&reading, node, &policy.keys.skip) != value;
        let changes =
            concerned.iter().filter(differs).map(|(_, policy)| (policy.keys.skip.clone(), json!(value)));
        let patch = labels(&reading, node, &changes.collect());
        let says = skip_words(node, &concerned, undo, patch.is_none());
        Ok(Step { object: Object::Node(node.to_string()), patch, says })
    })
}

/// Starts failed nodes again, from the beginning of their walk.
pub(super) fn retry(look: &Look, nodes: &[String], driver: Option<&str>) -> anyhow::Result<Vec<Step>> {
    let reading = Reading::with_pools(look)?;
    each(&reading, nodes, |node| {
        let concerned = concerned(&reading, node, driver)?;
        let failed: Vec<_> =
            concerned.iter().filter(|(about, _)| about.verdict.state == State::UpgradeFailed).collect();
        let Some((about, _)) = failed.first() else {
            let state = concerned.first().map(|(about, _)| about.verdict.state).unwrap_or_default();
            bail!(
                "node {node} has not failed, it is {state}; nothing was changed (pitcrew explain node/{node})"
            );
        };
        let again = json!(State::UpgradeRequired.as_str());
        let changes = failed.iter().map(|(_, policy)| (policy.keys.state.clone(), again.clone())).collect();
        let paused = match about.plan.status {
            PoolStatus::Active => String::new(),
            PoolStatus::Paused => format!(" and {} is resumed", about.pool.source),
            PoolStatus::Frozen(_) => format!(" and {} is mended", about.pool.source),
        };
        let says = format!(
            "{node} starts again from upgrade-required as soon as it has a slot{paused}. It stays cordoned until it is done."
        );
        Ok(Step { object: Object::Node(node.to_string()), patch: labels(&reading, node, &changes), says })
    })
}

/// One step for each node that is named, however often.
fn each(
    reading: &Reading<'_>,
    names: &[String],
    step: impl Fn(&NodeName) -> anyhow::Result<Step>,
) -> anyhow::Result<Vec<Step>> {
    let nodes: anyhow::Result<std::collections::BTreeSet<&NodeName>> =
        names.iter().map(|name| reading.node(name)).collect();
    nodes?.into_iter().map(step).collect()
}

/// The node in the pools that a command is about, each with the policy whose keys count.
fn concerned<'r>(
    reading: &'r Reading<'_>,
    node: &NodeName,
    driver: Option<&str>,
) -> anyhow::Result<Vec<(About<'r>, &'r Policy)>> {
    let about = reading.about(node.as_str());
    if about.is_empty() {
        return Err(reading.stranger(node));
    }
    let drivers: Vec<&str> = about.iter().map(|about| about.pool.driver.as_str()).collect();
    if let Some(wanted) = driver.filter(|wanted| !drivers.contains(wanted)) {
        let like = did_you_mean(wanted, drivers.iter().copied());
        return Err(anyhow!(
            "driver {wanted} is not looked after on node {node}{like} (there is: {})",
            drivers.join(", ")
        ));
    }
    let meant =
        about.into_iter().filter(|about| driver.is_none_or(|wanted| about.pool.driver.as_str() == wanted));
    Ok(meant.filter_map(|about| Some((about, about.pool.policy.as_ref().ok()?))).collect())
}

fn mark<'r>(reading: &'r Reading<'_>, node: &NodeName, key: &str) -> Option<&'r str> {
    reading.snapshot.nodes.get(node)?.labels().get(key).map(String::as_str)
}

/// The patch that changes these labels of the node that was seen; `None` if there is nothing to change.
fn labels(reading: &Reading<'_>, node: &NodeName, changes: &Map<String, Value>) -> Option<Value> {
    let seen = reading.snapshot.nodes.get(node)?.version.to_string();
    (!changes.is_empty()).then(|| json!({"metadata": {"resourceVersion": seen, "labels": changes}}))
}

fn skip_words(node: &NodeName, concerned: &[(About<'_>, &Policy)], undo: bool, so_already: bool) -> String {
    let drivers: Vec<&str> = concerned.iter().map(|(about, _)| about.pool.driver.as_str()).collect();
    let drivers = drivers.join(" and ");
    let keys: Vec<&str> = concerned.iter().map(|(_, policy)| policy.keys.skip.as_str()).collect();
    let keys = keys.join(", ");
    let already = if so_already { " already" } else { "" };
    if undo {
        return format!("{node} takes part in {drivers} driver upgrades{already} (no label {keys}).");
    }
    let under_way = concerned.iter().find(|(about, _)| about.verdict.state.in_flight());
    let but = under_way.map(|(about, _)| {
        format!(
            " Its visit under way ({}) is finished first; the label counts after that.",
            about.verdict.state
        )
    });
    format!(
        "{node} is left out of {drivers} driver upgrades{already} (label {keys}=true).{} Undo with: pitcrew skip {node} --undo",
        but.unwrap_or_default()
    )
}
