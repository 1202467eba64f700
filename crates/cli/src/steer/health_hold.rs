//! `health-hold`: keeps NVSentinel off nodes for work that is no driver rollout, and gives them back when they are well.

use std::collections::BTreeSet;

use anyhow::{anyhow, bail};
use jiff::{SignedDuration, Timestamp};
use pitcrew_controller::Look;
use pitcrew_core::contract::HEALTH_HOLD_ANNOTATION;
use pitcrew_core::health::{HealthHold, OPTED_OUT, Owner, Shield};
use pitcrew_core::names::NodeName;
use pitcrew_core::reason::{About, Kind};
use pitcrew_core::selector;
use pitcrew_core::snapshot::Node;
use serde_json::{Value, json};

use super::{Object, Step};
use crate::reading::Reading;

/// Which nodes are meant.
#[derive(clap::Args, Clone)]
#[group(required = true, multiple = false)]
pub(crate) struct Target {
    /// These nodes
    #[arg(long, value_name = "NODE")]
    node: Vec<String>,
    /// Nodes with these labels
    #[arg(long, short = 'l', value_name = "SELECTOR")]
    selector: Option<String>,
    /// All nodes
    #[arg(long)]
    all: bool,
}

impl Target {
    /// Names of nodes.
    #[cfg(test)]
    pub(super) fn nodes(names: &[&str]) -> Self {
        Self { node: names.iter().map(|name| (*name).to_owned()).collect(), selector: None, all: false }
    }

    fn find<'a>(&self, reading: &Reading<'a>) -> anyhow::Result<BTreeSet<&'a NodeName>> {
        if !self.node.is_empty() {
            return self.node.iter().map(|name| reading.node(name)).collect();
        }
        let text = self.selector.as_deref().unwrap_or_default();
        let selector = selector::parse(text).map_err(|bad| anyhow!("--selector: {bad}"))?;
        let fits = |node: &Node| kube::core::SelectorExt::matches(&selector, node.labels());
        let nodes = reading.snapshot.nodes.iter().filter(|(_, node)| fits(node));
        let found: BTreeSet<&NodeName> = nodes.map(|(name, _)| name).collect();
        if found.is_empty() {
            bail!("no node has the labels {text}");
        }
        Ok(found)
    }
}

/// Holds nodes until `until`.
pub(super) fn hold(
    look: &Look,
    target: &Target,
    owner: &str,
    lasts: SignedDuration,
) -> anyhow::Result<Vec<Step>> {
    let reading = Reading::of(&look.snapshot, &look.leader);
    let now = look.snapshot.now;
    let until = now.checked_add(lasts).map_err(|_| anyhow!("--for is too long"))?;
    let nodes = target.find(&reading)?.into_iter();
    Ok(nodes
        .filter_map(|name| Some(hold_one(name, look.snapshot.nodes.get(name)?, owner, now, until)))
        .collect())
}

fn hold_one(name: &NodeName, node: &Node, owner: &str, now: Timestamp, until: Timestamp) -> Step {
    let (label, earlier) = (Shield::Quarantine.label(), node.health_hold.as_ref());
    let value = node.labels().get(label);
    let object = Object::Node(name.to_string());
    if earlier.is_none() && value.is_some_and(|value| value == OPTED_OUT) {
        let says =
            format!("{name} was opted out before ({label}={OPTED_OUT}); it is left as it is, and stays so.");
        return Step { object, patch: None, says };
    }
    // A hold that is there already knows what was there before it.
    let before = earlier.map_or_else(|| value.cloned(), |earlier| earlier.before.clone());
    let hold = HealthHold {
        owner: Owner::Person(owner.to_owned()),
        shield: Shield::Quarantine,
        before,
        since: now,
        until: Some(until),
    };
    let patch = json!({
        "metadata": {
            "resourceVersion": node.version.to_string(),
            "labels": {label: OPTED_OUT},
            "annotations": {HEALTH_HOLD_ANNOTATION: hold.to_text()},
        },
    });
    let says = format!(
        "{name} is held until {until} ({label}={OPTED_OUT}). Give it back with: pitcrew health-hold release --node {name}"
    );
    Step { object, patch: Some(patch), says }
}

/// What can be given back now, and what cannot yet, and why.
pub(super) struct Release {
    pub(super) steps: Vec<Step>,
    pub(super) waiting: Vec<String>,
}

/// Gives nodes back that are well.
pub(super) fn release(look: &Look, target: &Target) -> anyhow::Result<Release> {
    let reading = Reading::of(&look.snapshot, &look.leader);
    let mut release = Release { steps: Vec::new(), waiting: Vec::new() };
    for name in target.find(&reading)? {
        let Some(node) = look.snapshot.nodes.get(name) else { continue };
        let hold = node.health_hold.as_ref().filter(|hold| matches!(hold.owner, Owner::Person(_)));
        let Some(hold) = hold else { continue };
        match reading.about(name.as_str()).iter().find_map(unwell).or_else(|| not_ready(node)) {
            Some(why) => release.waiting.push(format!("{name}: {why}")),
            None => release.steps.push(Step {
                object: Object::Node(name.to_string()),
                patch: Some(given_back(node, hold)),
                says: format!("{name} is given back to NVSentinel."),
            }),
        }
    }
    Ok(release)
}

fn not_ready(node: &Node) -> Option<String> {
    (!node.ready).then(|| "the node is not Ready".to_owned())
}

/// Why a node would be taken for a broken one.
fn unwell(about: &About<'_>) -> Option<String> {
    let conditions = about.pool.policy.as_ref().ok().map(|policy| &policy.health.conditions)?;
    let node = about.snapshot.nodes.get(about.node)?;
    let raised = |name: &&String| {
        node.conditions.iter().any(|condition| *condition.kind == ***name && condition.holds)
    };
    let condition = conditions.iter().find(raised).map(|name| format!("node condition {name} is True"));
    let reason = (about.reason().kind() != Kind::Done).then(|| about.reason().to_string());
    condition.or(reason)
}

fn given_back(node: &Node, hold: &HealthHold) -> Value {
    let mut patch = json!({
        "metadata": {
            "resourceVersion": node.version.to_string(),
            "annotations": {HEALTH_HOLD_ANNOTATION: null},
        },
    });
    if hold.stands(node) {
        patch["metadata"]["labels"] = json!({hold.shield.label(): hold.before});
    }
    patch
}
