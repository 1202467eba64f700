//! Kubernetes Events, written out of the loop's way: `core/v1`, in namespace `default`, on the Node.
//!
//! Their names sort in order of time, and `lastTimestamp` is set: the documented
//! `kubectl get events --sort-by=.lastTimestamp` shows the true sequence.

use futures::stream::StreamExt;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event as ApiEvent, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, Time};
use kube::api::{Api, PostParams};
use kube::Client;
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
    metrics: Metrics,
}

impl Events {
    /// Starts the writer, which ends when all that was queued is written and this is dropped.
    pub(crate) fn start(client: Client, metrics: Metrics) -> (Self, tokio::task::JoinHandle<()>) {
        let (queue, waiting) = mpsc::channel(QUEUE_MAX);
        let writer = tokio::spawn(write_all(client, waiting, metrics.clone()));
        (Self { queue, last_stamp: 0, metrics }, writer)
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
    pub(crate) fn about_policy(&mut self, source: &Source, event: &Event, now: Timestamp) {
        let (kind, api_version) = source.kind();
        let object = ObjectReference {
            kind: Some(kind.to_owned()),
            name: Some(source.name().to_owned()),
            api_version: Some(api_version.to_owned()),
            ..ObjectReference::default()
        };
        self.send(object, event, now);
    }

    fn send(&mut self, object: ObjectReference, event: &Event, now: Timestamp) {
        let name = format!("{}.{:016x}", object.name.as_deref().unwrap_or_default(), self.stamp(now));
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
            last_timestamp: Some(Time(now)),
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

    /// Microseconds, but never the same twice: two events of one moment keep their order.
    fn stamp(&mut self, now: Timestamp) -> i64 {
        self.last_stamp = now.as_microsecond().max(self.last_stamp + 1);
        self.last_stamp
    }
}

async fn write_all(client: Client, waiting: mpsc::Receiver<ApiEvent>, metrics: Metrics) {
    let api = Api::<ApiEvent>::namespaced(client, EVENT_NAMESPACE);
    let stream = futures::stream::unfold(waiting, |mut waiting| async move { Some((waiting.recv().await?, waiting)) });
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
