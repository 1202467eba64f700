//! The floor: the same writes from a client that decides nothing and waits for nothing.
//!
//! Node patches, Events, evictions and pod deletions are sent as what they are: patches of the same size to the same
//! nodes (under other annotation keys), Events of the same form, evictions and deletions of pods that were made
//! for it beforehand and that no scheduler binds, so that each is one write and no kubelet has to answer. All else
//! (a few status patches) becomes new config maps. Reads, and what other controllers write, are not in it.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::core::v1::{ConfigMap, Event, Node, Pod};
use kube::api::{DeleteParams, EvictParams, Patch, PatchParams, PostParams};
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
    sleep(SETTLE).await;

    let start = Instant::now();
    in_parallel(writes.iter().map(async |write| send(client, write).await))
        .await
        .context("measure the floor")?;
    Ok(start.elapsed())
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
