//! A watch is a cursor over a table's log.
//!
//! Nothing is pushed: a change wakes the watches that it concerns, and each reads the log from its cursor when
//! its client polls. So a slow client costs nothing, and one that falls behind the log gets 410, as from etcd.

use super::call::{Call, Shape};
use super::read::render;
use super::reply::{self, Failure, Reply};
use super::selector::Selector;
use super::store::{Change, Object, Store, Table, Watcher};
use super::{Shared, lock};
use bytes::Bytes;
use futures::stream;
use http::StatusCode;
use http_body_util::{BodyExt as _, StreamBody};
use serde_json::{Value, json};
use std::sync::Arc;
use tokio::sync::Notify;
use tokio::time::{Duration, Instant, sleep_until};
use tower::BoxError;

/// About what a real server does; keeps quiet watches from ageing out of the log.
const BOOKMARK_EVERY: Duration = Duration::from_mins(1);

/// For clients that do not say. Real servers draw between 30 and 60 minutes.
const TIMEOUT_SECONDS: u64 = 1800;

#[derive(Debug)]
struct Watch {
    store: Shared,
    user: String,
    /// How often this user's lines had been cut when it began.
    cuts: u64,
    resource: String,
    kind: (String, String),
    namespace: String,
    selector: Arc<Selector>,
    shape: Shape,
    wake: Arc<Notify>,
    /// Everything up to this version has been told.
    cursor: u64,
    /// The initial events, until they are sent.
    first: Vec<u8>,
    /// The client's deadline, and the next bookmark if it wants any.
    deadline: Instant,
    bookmark_at: Option<Instant>,
    is_over: bool,
}

/// Answers with a stream of events.
pub(super) fn watch(shared: &Shared, store: &mut Store, call: &Call) -> Result<Reply, Failure> {
    let mut selector = Selector::from_options(&call.options, &call.kind)?;
    if !call.info.name.is_empty() {
        selector = selector.and_name(&call.info.name);
    }
    let from = call.options.number("resourceVersion")?.unwrap_or(0);
    let seconds = call.options.number("timeoutSeconds")?.unwrap_or(TIMEOUT_SECONDS);
    let now = Instant::now();
    let mut watch = Watch {
        store: shared.clone(),
        user: call.info.user.clone(),
        cuts: store.lines.get(&call.info.user).map_or(0, |line| line.cuts),
        resource: call.resource.clone(),
        kind: (call.kind.kind.clone(), call.info.api_version()),
        namespace: call.info.namespace.clone(),
        selector: Arc::new(selector),
        shape: call.shape.clone(),
        wake: Arc::new(Notify::new()),
        cursor: from,
        first: Vec::new(),
        deadline: now + Duration::from_secs(seconds),
        bookmark_at: call.options.flag("allowWatchBookmarks").then(|| now + BOOKMARK_EVERY),
        is_over: false,
    };
    let wants_state = call.options.flag("sendInitialEvents");
    let version = store.version;
    let table = store.table_mut(&call.resource)?;
    if wants_state || (from == 0 && call.options.text("sendInitialEvents").is_empty()) {
        watch.tell_state(table, version, wants_state);
    }
    table.add_watcher(Watcher {
        namespace: watch.namespace.clone(),
        selector: watch.selector.clone(),
        wake: Arc::downgrade(&watch.wake),
    });
    let frames = stream::unfold(watch, |mut watch| async move {
        let bytes = watch.next().await?;
        Some((Ok::<_, BoxError>(http_body::Frame::data(bytes)), watch))
    });
    Ok(reply::stream(StatusCode::OK, StreamBody::new(frames).boxed_unsync()))
}

impl Watch {
    /// The present state as ADDED events, and for streaming lists the bookmark that says it was all.
    fn tell_state(&mut self, table: &Table, version: u64, mark_the_end: bool) {
        for (_, object) in
            table.range(&self.namespace).filter(|(_, object)| self.selector.matches(object.value()))
        {
            push_event(&mut self.first, "ADDED", &render(object, &self.shape));
        }
        if mark_the_end {
            let bookmark = self.bookmark(version, true);
            push_event(&mut self.first, "BOOKMARK", &bookmark);
        }
        self.cursor = version;
    }

    /// The next events, as many as there are; `None` ends the stream.
    async fn next(&mut self) -> Option<Bytes> {
        if !self.first.is_empty() {
            return Some(std::mem::take(&mut self.first).into());
        }
        loop {
            if self.is_over {
                return None;
            }
            if let Some(end) = self.stalled() {
                sleep_until(end.min(self.deadline)).await;
                self.is_over = end >= self.deadline;
                continue;
            }
            let events = self.pull();
            if !events.is_empty() {
                return Some(events.into());
            }
            // A line that was cut ends here and now: a bookmark later would say that nothing was missed (seed 10371).
            if self.is_over {
                return None;
            }
            let until = self.bookmark_at.map_or(self.deadline, |at| at.min(self.deadline));
            tokio::select! {
                biased;
                () = self.wake.notified() => {}
                () = sleep_until(until) => {
                    if until == self.deadline {
                        return None;
                    }
                    self.bookmark_at = Some(until + BOOKMARK_EVERY);
                    return Some(self.say_bookmark());
                }
            }
        }
    }

    /// Until when nothing comes through.
    fn stalled(&self) -> Option<Instant> {
        let store = lock(&self.store);
        let end = *store.lines.get(&self.user)?.stalled.get(&self.resource)?;
        (end > Instant::now()).then_some(end)
    }

    /// Turns the log after the cursor into events.
    fn pull(&mut self) -> Vec<u8> {
        let shared = self.store.clone();
        let store = lock(&shared);
        let mut events = Vec::new();
        let line = store.lines.get(&self.user);
        if line.is_some_and(|line| line.cuts != self.cuts) {
            self.is_over = true;
            return events;
        }
        let copies = if line.is_some_and(|line| line.doubles) { 2 } else { 1 };
        let Ok(table) = store.table(&self.resource) else {
            self.is_over = true;
            return events;
        };
        let compacted = table.compacted.max(line.map_or(0, |line| line.forgotten));
        if self.cursor < compacted {
            self.is_over = true;
            let gone = Failure::expired(self.cursor, compacted).status();
            push_event(&mut events, "ERROR", gone.to_string().as_bytes());
            return events;
        }
        let start = table.log.partition_point(|change| change.version <= self.cursor);
        for change in table.log.range(start..) {
            if let Some((kind, object)) = self.judge(change) {
                for _ in 0..copies {
                    push_event(&mut events, kind, &render(object, &self.shape));
                }
            }
        }
        self.cursor = self.cursor.max(store.version);
        events
    }

    /// What a change means to this watch: an object that leaves the selector is deleted as far as it can see.
    fn judge<'a>(&self, change: &'a Change) -> Option<(&'static str, &'a Arc<Object>)> {
        if !self.namespace.is_empty() && self.namespace != change.name.namespace {
            return None;
        }
        let selects =
            |object: &Option<Arc<Object>>| object.as_ref().is_some_and(|o| self.selector.matches(o.value()));
        match (selects(&change.before), selects(&change.after)) {
            (false, true) => Some(("ADDED", change.after.as_ref()?)),
            (true, true) => Some(("MODIFIED", change.after.as_ref()?)),
            (true, false) => Some(("DELETED", change.farewell()?)),
            (false, false) => None,
        }
    }

    fn say_bookmark(&mut self) -> Bytes {
        self.cursor = self.cursor.max(lock(&self.store).version);
        let mut event = Vec::new();
        push_event(&mut event, "BOOKMARK", &self.bookmark(self.cursor, false));
        event.into()
    }

    fn bookmark(&self, version: u64, is_end_of_list: bool) -> Bytes {
        let (kind, api_version) = if self.shape.metadata_only {
            ("PartialObjectMetadata", "meta.k8s.io/v1")
        } else {
            (self.kind.0.as_str(), self.kind.1.as_str())
        };
        let mut bookmark: Value = json!({"kind": kind, "apiVersion": api_version, "metadata": {"resourceVersion": version.to_string()}});
        if is_end_of_list {
            bookmark["metadata"]["annotations"] = json!({"k8s.io/initial-events-end": "true"});
        }
        bookmark.to_string().into()
    }
}

fn push_event(events: &mut Vec<u8>, kind: &str, object: &[u8]) {
    events.extend_from_slice(b"{\"type\":\"");
    events.extend_from_slice(kind.as_bytes());
    events.extend_from_slice(b"\",\"object\":");
    events.extend_from_slice(object);
    events.extend_from_slice(b"}\n");
}
