//! Who asked the API server for what, from its audit log: one JSON line per request.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::ops::Range;
use std::path::Path;

use anyhow::{Context as _, Result};
use jiff::Timestamp;
use pitcrew_sim::plane::User;
use serde::Deserialize;

/// The whole log.
pub(super) struct Audit(Vec<Line>);

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Line {
    stage: String,
    verb: String,
    #[serde(rename = "requestURI")]
    uri: String,
    user: Who,
    object_ref: Option<Object>,
    response_status: Option<Response>,
    request_received_timestamp: Timestamp,
}

#[derive(Deserialize)]
struct Who {
    username: String,
}

#[derive(Deserialize)]
struct Object {
    resource: Option<String>,
    subresource: Option<String>,
    namespace: Option<String>,
    name: Option<String>,
}

#[derive(Deserialize)]
struct Response {
    code: Option<u16>,
}

/// A kind of request: `patch nodes`, `create pods/eviction`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Kind {
    pub(super) verb: String,
    pub(super) resource: String,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{} {}", self.verb, self.resource))
    }
}

/// What one user asked for in some time. The Lease of its leader is not in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Requests {
    /// How many of each kind that changes something.
    pub(super) writes: BTreeMap<Kind, usize>,
    /// How many of each kind that only looks.
    pub(super) reads: BTreeMap<Kind, usize>,
    /// Watches that were begun.
    pub(super) watches: usize,
    /// Writes that the API server said no to, conflicts for the most part.
    pub(super) refused: usize,
    /// Pods whose eviction was granted.
    pub(super) evicted: BTreeSet<(String, String)>,
}

impl Requests {
    pub(super) fn writes_total(&self) -> usize {
        self.writes.values().sum()
    }

    pub(super) fn reads_total(&self) -> usize {
        self.reads.values().sum()
    }

    pub(super) fn evictions(&self) -> usize {
        self.writes.iter().filter(|(kind, _)| kind.resource == "pods/eviction").map(|(_, count)| count).sum()
    }

    fn count(&mut self, line: &Line) {
        let kind = line.kind();
        let code = line.response_status.as_ref().and_then(|status| status.code).unwrap_or_default();
        match line.verb.as_str() {
            // Told twice, at its beginning and at its end.
            "watch" => self.watches += usize::from(line.stage == "ResponseStarted"),
            "get" | "list" => *self.reads.entry(kind).or_default() += 1,
            _ => {
                self.refused += usize::from(code >= 400);
                if kind.resource == "pods/eviction" && code < 300 {
                    self.evicted.extend(line.object());
                }
                *self.writes.entry(kind).or_default() += 1;
            }
        }
    }
}

impl Line {
    fn kind(&self) -> Kind {
        let path = self.uri.split('?').next().unwrap_or_default();
        let object = self.object_ref.as_ref();
        let resource = object.and_then(|object| object.resource.as_deref()).unwrap_or(path);
        let subresource = object.and_then(|object| object.subresource.as_deref());
        let resource = subresource.map_or_else(|| resource.to_owned(), |sub| format!("{resource}/{sub}"));
        Kind { verb: self.verb.clone(), resource }
    }

    fn object(&self) -> Option<(String, String)> {
        let object = self.object_ref.as_ref()?;
        Some((object.namespace.clone().unwrap_or_default(), object.name.clone()?))
    }
}

impl Audit {
    /// Reads the log as far as it is written; a last line that is still being written is left out.
    pub(super) fn read(log: &Path) -> Result<Audit> {
        let text = fs::read_to_string(log).with_context(|| format!("read {}", log.display()))?;
        let complete = text.rsplit_once('\n').map_or("", |(complete, _)| complete);
        let lines = complete.lines().map(serde_json::from_str).collect::<Result<_, _>>();
        Ok(Audit(lines.with_context(|| format!("{} is not an audit log", log.display()))?))
    }

    /// What `user` asked for in that time, leader election apart.
    pub(super) fn requests(&self, user: User, time: &Range<Timestamp>) -> Requests {
        let mut requests = Requests::default();
        let ours = self.0.iter().filter(|line| line.user.username == user.name());
        for line in ours.filter(|line| time.contains(&line.request_received_timestamp)) {
            if line.kind().resource != "leases" {
                requests.count(line);
            }
        }
        requests
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(verb: &str, resource: &str, subresource: &str, stage: &str, code: u16, second: u8) -> String {
        serde_json::json!({
            "stage": stage, "verb": verb, "requestURI": "/api", "user": {"username": User::Pitcrew.name()},
            "objectRef": {"resource": resource, "subresource": Some(subresource).filter(|s| !s.is_empty()), "name": "x"},
            "responseStatus": {"code": code},
            "requestReceivedTimestamp": format!("2026-01-01T00:00:{second:02}.000001Z"),
        })
        .to_string()
    }

    #[test]
    fn leases_do_not_count_and_a_watch_counts_once() {
        let lines = [
            line("patch", "nodes", "", "ResponseComplete", 200, 1),
            line("patch", "nodes", "", "ResponseComplete", 409, 1),
            line("create", "pods", "eviction", "ResponseComplete", 429, 2),
            line("create", "pods", "eviction", "ResponseComplete", 201, 3),
            line("update", "leases", "", "ResponseComplete", 200, 3),
            line("get", "nodes", "", "ResponseComplete", 200, 3),
            line("watch", "nodes", "", "ResponseStarted", 200, 3),
            line("watch", "nodes", "", "ResponseComplete", 200, 3),
            line("patch", "nodes", "", "ResponseComplete", 200, 9),
        ];
        let dir = std::env::temp_dir().join(format!("pitcrew-audit-{}", std::process::id()));
        fs::write(&dir, format!("{}\n{{\"cut off", lines.join("\n"))).unwrap();
        let audit = Audit::read(&dir).unwrap();
        fs::remove_file(&dir).unwrap();

        let at = |second: u8| format!("2026-01-01T00:00:0{second}Z").parse::<Timestamp>().unwrap();
        let seen = audit.requests(User::Pitcrew, &(at(0)..at(5)));
        assert_eq!((seen.writes_total(), seen.reads_total(), seen.watches), (4, 1, 1));
        assert_eq!((seen.evictions(), seen.evicted.len(), seen.refused), (2, 1, 2));
        assert_eq!(audit.requests(User::Bench, &(at(0)..at(9))), Requests::default());
    }
}
