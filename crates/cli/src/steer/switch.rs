//! `pause` and `resume`: `autoUpgrade`, in the object that states the policy.

use anyhow::{anyhow, bail};
use pitcrew_controller::Look;
use pitcrew_core::contract::State;
use pitcrew_core::plan::PoolPlan;
use pitcrew_core::policy::{Policy, Pool, Source};
use pitcrew_core::snapshot::{Snapshot, Sources};
use serde_json::{Value, json};

use super::{Object, Step};
use crate::reading::{Reading, did_you_mean};
use crate::text::count;

/// What switching a policy on or off comes to.
pub(super) fn decide(look: &Look, policy: Option<&str>, on: bool) -> anyhow::Result<Vec<Step>> {
    let reading = Reading::with_pools(look)?;
    let source = choose(&reading, policy)?;
    let so_already = says(&reading.snapshot.sources, &source) == on;
    let patch = (!so_already).then(|| source.options_patch(json!({"autoUpgrade": on})));
    let says = words(&reading, &source, on, so_already);
    Ok(vec![Step { object: Object::Policy(source), patch, says }])
}

/// The policy that is meant: by name, or the only one.
fn choose(reading: &Reading<'_>, name: Option<&str>) -> anyhow::Result<Source> {
    let Some(name) = name else {
        return match &reading.pools[..] {
            [only] => Ok(only.source.clone()),
            pools => {
                let names: Vec<String> = pools.iter().map(|pool| pool.source.to_string()).collect();
                bail!("there is more than one policy; name the one you mean: {}", names.join(", "))
            }
        };
    };
    let known = known(reading);
    let fits = |source: &&Source| source.name() == name || is_called(source, name);
    match known.iter().filter(fits).collect::<Vec<_>>()[..] {
        [one] => Ok(one.clone()),
        [] => {
            let names: Vec<String> = known.iter().map(ToString::to_string).collect();
            let like = did_you_mean(name, known.iter().map(Source::name));
            Err(anyhow!("there is no policy {name}{like} (there is: {})", names.join(", ")))
        }
        ref several => {
            let names: Vec<String> = several.iter().map(ToString::to_string).collect();
            Err(anyhow!(
                "{name} is the name of more than one policy; name the one you mean: {}",
                names.join(", ")
            ))
        }
    }
}

/// `clusterpolicy/x`, and `clusterpolicy.nvidia.com/x` as `kubectl get -o name` prints it.
fn is_called(source: &Source, text: &str) -> bool {
    let Some((kind, name)) = text.split_once('/') else { return false };
    let kind = kind.split('.').next().unwrap_or_default();
    source.name() == name && source.kind().0.eq_ignore_ascii_case(kind)
}

/// The policies of the pools, and those that they inherit from.
fn known(reading: &Reading<'_>) -> Vec<Source> {
    let mut known: Vec<Source> = reading.pools.iter().map(|pool| pool.source.clone()).collect();
    known.extend(reading.pools.iter().filter_map(|pool| renderer(reading.snapshot, pool)));
    known.sort();
    known.dedup();
    known
}

/// The object that a DriverPolicy inherits from.
fn renderer(snapshot: &Snapshot, pool: &Pool) -> Option<Source> {
    let policy: &Policy = pool.policy.as_ref().ok()?;
    let mut sets = snapshot.daemon_sets.values();
    sets.find_map(|ds| ds.rendered_by.clone().filter(|_| policy.is_driver(&ds.name.namespace, &ds.labels)))
}

/// What an object itself says, or means by saying nothing.
fn says(sources: &Sources, source: &Source) -> bool {
    let flag = |options: Option<&Value>| options?.get("autoUpgrade")?.as_bool();
    match source {
        Source::DriverPolicy(name) => sources
            .driver_policies
            .get(name)
            .and_then(|spec| spec.upgrade_policy.auto_upgrade)
            .unwrap_or(true),
        Source::ClusterPolicy(name) => {
            let options =
                sources.cluster_policies.get(name).and_then(|facts| facts.driver.get("upgradePolicy"));
            flag(options).unwrap_or(false)
        }
        Source::NvidiaDriver(name) => flag(sources.nvidia_drivers.get(name)).unwrap_or(true),
        Source::NicClusterPolicy(name) => {
            let options = sources.nic_cluster_policies.get(name).and_then(|ofed| ofed.get("upgradePolicy"));
            flag(options).unwrap_or(false)
        }
    }
}

fn words(reading: &Reading<'_>, source: &Source, on: bool, so_already: bool) -> String {
    let pools: Vec<(&Pool, &PoolPlan)> = reading
        .each()
        .filter(|(pool, _)| {
            pool.source == *source || renderer(reading.snapshot, pool).as_ref() == Some(source)
        })
        .collect();
    let number = |is: fn(State) -> bool| {
        let states = pools.iter().flat_map(|(_, plan)| plan.nodes.values()).map(|verdict| verdict.state);
        u64::try_from(states.filter(|state| is(*state)).count()).unwrap_or(u64::MAX)
    };
    let (under_way, waiting) = (number(State::in_flight), number(|state| state == State::UpgradeRequired));
    let name = if pools.iter().any(|(pool, _)| pool.source == *source) {
        source.name().to_owned()
    } else {
        source.to_string()
    };
    let already = if so_already { " already" } else { "" };
    if !on {
        let keep = match under_way {
            0 => "nothing is under way".to_owned(),
            many => format!("{} under way: cordon, place and time left are kept", count(many, "node")),
        };
        return format!(
            "{source} is paused{already} (autoUpgrade: false). Nothing new starts; {keep}. Go on with: pitcrew resume {name}"
        );
    }
    let go_on = match (under_way, waiting) {
        (0, 0) => "Every node is where it should be.".to_owned(),
        (under_way, waiting) => {
            let go =
                if under_way == 1 { "goes on from where it stood" } else { "go on from where they stood" };
            format!("{} under way {go}, {}.", count(under_way, "node"), waits(waiting))
        }
    };
    format!("{source} is resumed{already} (autoUpgrade: true). {go_on}{}", others(reading, &pools, source))
}

fn waits(number: u64) -> String {
    if number == 1 { "1 waits for its turn".to_owned() } else { format!("{number} wait for their turn") }
}

/// Off in any of them pauses: whoever resumes one has to know of the other.
fn others(reading: &Reading<'_>, pools: &[(&Pool, &PoolPlan)], resumed: &Source) -> String {
    let sources =
        pools.iter().flat_map(|(pool, _)| [Some(pool.source.clone()), renderer(reading.snapshot, pool)]);
    // A ClusterPolicy that only renders, and says nothing, pauses nobody.
    let off = |source: &Source| match source {
        Source::ClusterPolicy(name) if pools.iter().all(|(pool, _)| pool.source != *source) => {
            let facts = reading.snapshot.sources.cluster_policies.get(name);
            facts.and_then(|facts| facts.driver.pointer("/upgradePolicy/autoUpgrade")) == Some(&json!(false))
        }
        source => !says(&reading.snapshot.sources, source),
    };
    match sources.flatten().find(|source| source != resumed && off(source)) {
        Some(other) => format!(
            " It stays paused all the same: {other} says autoUpgrade: false (pitcrew resume {other})."
        ),
        None => String::new(),
    }
}
