//! The floor: the same writes from a client that decides nothing and waits for nothing.
//!
//! Node patches, Events, evictions and pod deletions are sent as what they are: patches of the same size to the same
//! nodes (under other annotation keys), Events of the same form, evictions and deletions of pods that were made
//! for it beforehand and that no scheduler binds, so that each is one write and no kubelet has to answer. The pods that
//! are evicted are under budgets, ten each, as the fleet's are: the server asks the budget for every eviction, and writes
//! it. All else (a few status patches) becomes new config maps. Reads, and what other controllers write, are not in it.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::core::v1::{ConfigMap, Event, Node, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{DeleteParams, EvictParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout};

use super::audit::Kind;

/// What one client can keep busy without waiting; a small API server is saturated long before.
const IN_FLIGHT: usize = 64;

/// Thousands of writes take seconds.
const TIMEOUT: Duration = Duration::from_mins(3);

/// The pods of the floor are seen and left alone by everybody before the clock starts.
const SETTLE: Duration = Duration::from_secs(2);

/// As in the fleet.
const PODS_OF_A_BUDGET: usize = 10;

const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Where everything that is not a node goes.
const NAMESPACE: &str = "default";

/// One write.
enum Write {
    PatchNode(String, Value),
    CreateEvent(Value),
    Evict(String),
    Delete(String),
    CreateConfigMap(Value),
}

/// Sends as many writes of each kind as were counted, and returns how long that takes.
pub(super) async fn measure(
    client: &Client,
    nodes: &[String],
    counted: &BTreeMap<Kind, usize>,
    record_bytes: usize,
) -> Result<Duration> {
    let writes = mixed(nodes, counted, record_bytes);
    let doomed = writes.iter().filter_map(|write| match write {
        Write::Evict(pod) | Write::Delete(pod) => Some(pod.as_str()),
        _ => None,
    });
    let pods = Api::<Pod>::namespaced(client.clone(), NAMESPACE);
    in_parallel(doomed.map(async |name| create(&pods, pod(name)).await))
        .await
        .context("make the floor's pods")?;
    let evicted = writes.iter().filter_map(|write| match write {
        Write::Evict(pod) => Some(pod.clone()),
        _ => None,
    });
    protect(client, &evicted.collect::<Vec<_>>()).await.context("put the floor's pods under budgets")?;
    sleep(SETTLE).await;

    let start = Instant::now();
    in_parallel(writes.iter().map(async |write| send(client, write).await))
        .await
        .context("measure the floor")?;
    Ok(start.elapsed())
}

/// Puts pods under budgets that refuse nothing. A budget is asked only for pods that run.
async fn protect(client: &Client, names: &[String]) -> Result<()> {
    let pods = Api::<Pod>::namespaced(client.clone(), NAMESPACE);
    let budgets = Api::<PodDisruptionBudget>::namespaced(client.clone(), NAMESPACE);
    let running = json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]});
    let in_groups = names.iter().enumerate().map(|(index, name)| (index / PODS_OF_A_BUDGET, name));
    in_parallel(in_groups.map(async |(group, name)| {
        let labels = json!({"metadata": {"labels": {"floor": group.to_string()}}});
        pods.patch(name, &PatchParams::default(), &Patch::Merge(labels)).await?;
        let status = json!({"status": running});
        pods.patch_status(name, &PatchParams::default(), &Patch::Merge(status)).await?;
        Ok(())
    }))
    .await?;
    let groups = names.len().div_ceil(PODS_OF_A_BUDGET);
    in_parallel((0..groups).map(async |group| {
        let selector = json!({"matchLabels": {"floor": group.to_string()}});
        let budget = json!({"metadata": {"name": format!("floor-{group}")}, "spec": {"minAvailable": 0, "selector": selector}});
        create(&budgets, budget).await
    }))
    .await?;
    let allows = |budget: &PodDisruptionBudget| {
        budget.status.as_ref().and_then(|s| s.disruptions_allowed).unwrap_or(0)
    };
    let all_allowed = async {
        loop {
            let allowed: i32 = budgets.list(&ListParams::default()).await?.iter().map(allows).sum();
            if usize::try_from(allowed).is_ok_and(|allowed| allowed >= names.len()) {
                return anyhow::Ok(());
            }
            sleep(LOOK_EVERY).await;
        }
    };
    timeout(TIMEOUT, all_allowed).await.context("the budgets were not looked after in time")?
}

/// All kinds spread evenly over the whole, as they are when a fleet moves.
fn mixed(nodes: &[String], counted: &BTreeMap<Kind, usize>, record_bytes: usize) -> Vec<Write> {
    let mut placed = Vec::new();
    for (kind, count) in counted {
        for index in 0..*count {
            #[expect(clippy::cast_precision_loss, reason = "a place in a line of thousands")]
            let place = (index as f64 + 0.5) / *count as f64;
            placed.push((place, write(kind, index, nodes, record_bytes)));
        }
    }
    placed.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    placed.into_iter().map(|(_, write)| write).collect()
}

fn write(kind: &Kind, index: usize, nodes: &[String], record_bytes: usize) -> Write {
    let node = &nodes[index % nodes.len()];
    match (kind.verb.as_str(), kind.resource.as_str()) {
        ("patch", "nodes") => Write::PatchNode(node.clone(), node_patch(index, record_bytes)),
        ("create", "events") => Write::CreateEvent(event(index, node)),
        ("create", "pods/eviction") => Write::Evict(format!("floor-evicted-{index}")),
        ("delete", "pods") => Write::Delete(format!("floor-deleted-{index}")),
        (verb, resource) => {
            let name = format!("floor-{verb}-{}-{index}", resource.replace('/', "-"));
            Write::CreateConfigMap(
                json!({"metadata": {"name": name}, "data": {"record": filled(record_bytes)}}),
            )
        }
    }
}

/// A label, a record and the cordon, as in a transition. Never the same twice: an empty change is not written.
fn node_patch(index: usize, record_bytes: usize) -> Value {
    json!({
        "metadata": {
            "labels": {"bench.pitcrew.dev/state": format!("state-{index}")},
            "annotations": {"bench.pitcrew.dev/record": filled(record_bytes)},
        },
    })
}

fn filled(bytes: usize) -> String {
    "x".repeat(bytes)
}

fn event(index: usize, node: &str) -> Value {
    let at = "2026-01-01T00:00:00Z"; // Nobody sorts these.
    json!({
        "metadata": {"name": format!("{node}.floor-{index}")},
        "involvedObject": {"kind": "Node", "name": node, "apiVersion": "v1"},
        "type": "Normal", "reason": "PitcrewBench", "message": "Successfully updated node state label to [upgrade-done]",
        "firstTimestamp": at, "lastTimestamp": at, "count": 1,
        "source": {"component": "bench"}, "reportingComponent": "bench", "reportingInstance": "bench",
    })
}

/// A pod that stays without a node.
fn pod(name: &str) -> Value {
    json!({
        "metadata": {"name": name},
        "spec": {"schedulerName": "nobody", "containers": [{"name": "main", "image": "registry.example/floor:1"}]},
    })
}

async fn send(client: &Client, write: &Write) -> Result<()> {
    let pods = || Api::<Pod>::namespaced(client.clone(), NAMESPACE);
    match write {
        Write::PatchNode(node, patch) => {
            let api = Api::<Node>::all(client.clone());
            api.patch(node, &PatchParams::default(), &Patch::Merge(patch)).await?;
        }
        Write::CreateEvent(event) => {
            create(&Api::<Event>::namespaced(client.clone(), NAMESPACE), event.clone()).await?;
        }
        Write::Evict(pod) => drop(pods().evict(pod, &EvictParams::default()).await?),
        Write::Delete(pod) => drop(pods().delete(pod, &DeleteParams::default()).await?),
        Write::CreateConfigMap(map) => {
            create(&Api::<ConfigMap>::namespaced(client.clone(), NAMESPACE), map.clone()).await?;
        }
    }
    Ok(())
}

async fn create<K>(api: &Api<K>, object: Value) -> Result<()>
where
    K: kube::Resource + Clone + std::fmt::Debug + serde::Serialize + DeserializeOwned,
{
    api.create(&PostParams::default(), &serde_json::from_value(object)?).await?;
    Ok(())
}

async fn in_parallel(calls: impl Iterator<Item = impl Future<Output = Result<()>>>) -> Result<()> {
    let all = stream::iter(calls).buffer_unordered(IN_FLIGHT).try_collect::<()>();
    timeout(TIMEOUT, all).await.with_context(|| format!("not done within {} s", TIMEOUT.as_secs()))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_counted_write_has_its_like_and_kinds_are_mixed() {
        let kind = |verb: &str, resource: &str| Kind { verb: verb.to_owned(), resource: resource.to_owned() };
        let counted = BTreeMap::from([
            (kind("patch", "nodes"), 8),
            (kind("create", "events"), 8),
            (kind("create", "pods/eviction"), 2),
            (kind("delete", "pods"), 1),
            (kind("patch", "rollouts/status"), 1),
        ]);
        let writes = mixed(&["gpu-1".to_owned(), "gpu-2".to_owned()], &counted, 300);
        let count = |is: fn(&Write) -> bool| writes.iter().filter(|write| is(write)).count();
        assert_eq!(writes.len(), 20);
        assert_eq!(count(|w| matches!(w, Write::PatchNode(..))), 8);
        assert_eq!(count(|w| matches!(w, Write::Evict(_))), 2);
        assert_eq!(count(|w| matches!(w, Write::CreateConfigMap(_))), 1);
        assert!(!matches!((&writes[0], &writes[1]), (Write::PatchNode(..), Write::PatchNode(..))));
    }
}
