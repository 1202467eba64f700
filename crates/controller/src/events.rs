//! Kubernetes Events, written out of the loop's way: `core/v1`, in namespace `default`, on the Node.
//!
//! The documented `kubectl get events --sort-by=.lastTimestamp` must show the true sequence, but `lastTimestamp` has
//! whole seconds, a node passes several states in one, and kubectl's sort leaves equal ones in any order. So the stamps
//! of one object differ by a second at least; `firstTimestamp` is the true time, and names sort by it too.

use std::collections::BTreeMap;

use futures::stream::StreamExt;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event as ApiEvent, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, Time};
use kube::Client;
use kube::api::{Api, PostParams};
use pitcrew_core::action::Event;
use pitcrew_core::contract::{COMPONENT, EVENT_NAMESPACE};
use pitcrew_core::names::NodeName;
use pitcrew_core::policy::Source;
use tokio::sync::mpsc;
use tracing::warn;

use crate::metrics::Metrics;

/// Events that may wait to be written. A fleet of 10,000 nodes that all move at once fits.
const QUEUE_MAX: usize = 20_000;
/// Each holds one seat of the API server.
const WRITES_IN_FLIGHT_MAX: usize = 16;

/// Takes events and writes them in the background.
pub(crate) struct Events {
    queue: mpsc::Sender<ApiEvent>,
    last_stamp: i64,
    /// The second of each object's last event.
    last_seconds: BTreeMap<String, i64>,
    metrics: Metrics,
}

impl Events {
    /// Starts the writer, which ends when all that was queued is written and this is dropped.
    pub(crate) fn start(client: Client, metrics: Metrics) -> (Self, impl Future<Output = ()> + use<>) {
        let (queue, waiting) = mpsc::channel(QUEUE_MAX);
        let writer = write_all(client, waiting, metrics.clone());
        (Self { queue, last_stamp: 0, last_seconds: BTreeMap::new(), metrics }, writer)
    }

    /// An event about a node.
    pub(crate) fn about_node(&mut self, node: &NodeName, uid: &str, event: &Event, now: Timestamp) {
        let object = ObjectReference {
            kind: Some("Node".to_owned()),
            name: Some(node.to_string()),
            uid: Some(uid.to_owned()),
            api_version: Some("v1".to_owned()),
            ..ObjectReference::default()
        };
        self.send(object, event, now);
    }

    /// An event about a policy object that has no status of ours.
    pub(crate) fn about_policy(
        &mut self,
        source: &Source,
        uid: Option<String>,
        event: &Event,
        now: Timestamp,
    ) {
        let (kind, api_version) = source.kind();
        let object = ObjectReference {
            kind: Some(kind.to_owned()),
            name: Some(source.name().to_owned()),
            api_version: Some(api_version.to_owned()),
            uid,
            ..ObjectReference::default()
        };
        self.send(object, event, now);
    }

    fn send(&mut self, object: ObjectReference, event: &Event, now: Timestamp) {
        let name = format!("{}.{:016x}", object.name.as_deref().unwrap_or_default(), self.stamp(now));
        let last_timestamp = self.second_of(object.name.as_deref().unwrap_or_default(), now);
        let event = ApiEvent {
            metadata: ObjectMeta {
                name: Some(name),
                namespace: Some(EVENT_NAMESPACE.to_owned()),
                ..ObjectMeta::default()
            },
            involved_object: object,
            type_: Some(if event.warning { "Warning" } else { "Normal" }.to_owned()),
            reason: Some(event.reason.clone()),
            message: Some(event.message.clone()),
            first_timestamp: Some(Time(now)),
            last_timestamp: Some(Time(last_timestamp)),
            event_time: None::<MicroTime>,
            count: Some(1),
            source: Some(EventSource { component: Some(COMPONENT.to_owned()), host: None }),
            reporting_component: Some(COMPONENT.to_owned()),
            reporting_instance: Some(COMPONENT.to_owned()),
            ..ApiEvent::default()
        };
        if self.queue.try_send(event).is_err() {
            self.metrics.request("create", "events", "dropped");
        }
    }

    /// This second, or the one after the object's last event.
    fn second_of(&mut self, object: &str, now: Timestamp) -> Timestamp {
        let last = self.last_seconds.entry(object.to_owned()).or_insert(0);
        *last = now.as_second().max(*last + 1);
        Timestamp::from_second(*last).unwrap_or(now)
    }

    /// Microseconds, but never the same twice: two events of one moment keep their order.
    fn stamp(&mut self, now: Timestamp) -> i64 {
        self.last_stamp = now.as_microsecond().max(self.last_stamp + 1);
        self.last_stamp
    }
}

async fn write_all(client: Client, waiting: mpsc::Receiver<ApiEvent>, metrics: Metrics) {
    let api = Api::<ApiEvent>::namespaced(client, EVENT_NAMESPACE);
    let stream =
        futures::stream::unfold(waiting, |mut waiting| async move { Some((waiting.recv().await?, waiting)) });
    stream
        .for_each_concurrent(WRITES_IN_FLIGHT_MAX, |event| {
            let (api, metrics) = (api.clone(), metrics.clone());
            async move {
                let result = api.create(&PostParams::default(), &event).await;
                metrics.request("create", "events", if result.is_ok() { "ok" } else { "error" });
                if let Err(error) = result {
                    warn!(%error, "an event could not be written");
                }
            }
        })
        .await;
}
