//! One of the two servers: fills in a call's marks from what it has seen, sends it, remembers the answer.

use crate::call::{Body, Call};
use crate::symbols::Symbols;
use http::{Request, header};
use http_body_util::BodyExt as _;
use kube::client::Body as HttpBody;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// What came back. A watch's body is the list of its events.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Answer {
    pub(crate) code: u16,
    pub(crate) retry_after: Option<String>,
    pub(crate) body: Value,
}

/// What is known of one object.
#[derive(Debug)]
struct Seen {
    first_version: String,
    last: Value,
}

/// A server, and what one play has learnt about it.
pub(crate) struct Side {
    client: kube::Client,
    run: String,
    objects: BTreeMap<String, Seen>,
    drawn: BTreeMap<usize, String>,
    token: String,
    newest: u64,
    start: u64,
    symbols: Symbols,
}

/// An identity that no object has.
const NO_UID: &str = "00000000-0000-4000-8000-000000000000";

impl Side {
    /// `run` is a name that nobody else uses on this server.
    pub(crate) fn new(client: kube::Client, run: &str) -> Self {
        Self {
            client,
            run: run.to_owned(),
            objects: BTreeMap::new(),
            drawn: BTreeMap::new(),
            token: String::new(),
            newest: 0,
            start: 0,
            symbols: Symbols::default(),
        }
    }

    /// Sends the call; the answer has symbols where the server has its own values.
    pub(crate) async fn play(&mut self, index: usize, call: &Call) -> Result<Answer, kube::Error> {
        if call.option("resourceVersion") == "<seen>" && call.option("resourceVersionMatch") != "Exact" {
            self.catch_up(call).await?;
        }
        let request = self.request(call)?;
        let response = self.client.send(request).await?;
        let code = response.status().as_u16();
        let retry_after = response.headers().get(header::RETRY_AFTER);
        let retry_after = retry_after.and_then(|value| value.to_str().ok()).map(str::to_owned);
        let body = response.into_body().collect().await?.to_bytes();
        let text = String::from_utf8_lossy(&body);
        let body = if call.is_watch() && code == 200 {
            text.lines().map(|line| serde_json::from_str(line).unwrap_or(Value::Null)).collect()
        } else {
            serde_json::from_str(&text).unwrap_or_else(|_| json!(text))
        };
        self.remember(index, call, &body);
        let body = self.symbols.put_into(body, self.newest);
        Ok(Answer { code, retry_after, body })
    }

    /// An eviction does not tell its version, so a server's cache may know all that was seen and not yet that. A read
    /// that asks for the newest state waits for it.
    async fn catch_up(&self, call: &Call) -> Result<(), kube::Error> {
        let path = self.fill(&call.path);
        let key = object_key(&path);
        let collection = path.split_once(&key).map_or("", |(before, _)| before);
        let plural = key.split('/').next().unwrap_or_default();
        let newest = Call::new("GET", format!("{collection}{plural}")).with("limit", "1");
        self.client.send(self.request(&newest)?).await?.into_body().collect().await?;
        Ok(())
    }

    fn request(&self, call: &Call) -> Result<Request<HttpBody>, kube::Error> {
        let mut uri = self.fill(&call.path);
        let mut query = form_urlencoded::Serializer::new(String::new());
        for (key, value) in &call.query {
            query.append_pair(key, &self.fill(value));
        }
        if !call.query.is_empty() {
            uri = format!("{uri}?{}", query.finish());
        }
        let request = Request::builder()
            .method(call.method)
            .uri(uri)
            .header(header::USER_AGENT, "tester/1")
            .header(header::ACCEPT, call.accept)
            .header(header::CONTENT_TYPE, call.content_type);
        request.body(self.body(call).into_bytes().into()).map_err(kube::Error::HttpError)
    }

    fn body(&self, call: &Call) -> String {
        match &call.body {
            Body::None => String::new(),
            Body::Raw(text) => (*text).to_owned(),
            Body::Json(value) => self.fill(&value.to_string()),
            Body::Edited { base, edit } => {
                let key = object_key(&self.fill(&call.path));
                let mut object =
                    self.objects.get(&key).map_or_else(|| base.clone(), |seen| seen.last.clone());
                json_patch::merge(&mut object, edit);
                self.fill(&object.to_string())
            }
        }
    }

    /// Writes what is known in the place of the marks.
    fn fill(&self, text: &str) -> String {
        let mut filled = String::with_capacity(text.len());
        let mut rest = text;
        while let Some((before, behind)) = rest.split_once('<') {
            let Some((mark, behind)) = behind.split_once('>') else { break };
            filled.push_str(before);
            filled.push_str(&self.meaning(mark));
            rest = behind;
        }
        filled + rest
    }

    fn meaning(&self, mark: &str) -> String {
        let (what, of) = mark.split_once(':').unwrap_or((mark, ""));
        let seen = || self.objects.get(&of.replace('@', &self.run));
        let meta = |field: &str| Some(seen()?.last["metadata"][field].as_str()?.to_owned());
        match what {
            "ns" | "run" => self.run.clone(),
            "rv" => meta("resourceVersion").unwrap_or_else(|| "1".to_owned()),
            "uid" => meta("uid").unwrap_or_else(|| NO_UID.to_owned()),
            "old" => seen().map_or_else(|| "1".to_owned(), |seen| seen.first_version.clone()),
            "seen" => self.newest.to_string(),
            "start" => self.start.to_string(),
            "continue" => self.token.clone(),
            "drawn" => of
                .parse()
                .ok()
                .and_then(|index: usize| self.drawn.get(&index))
                .cloned()
                .unwrap_or_else(|| "nothing-drawn".to_owned()),
            _ => format!("<{mark}>"),
        }
    }

    fn remember(&mut self, index: usize, call: &Call, body: &Value) {
        if body.is_array() {
            return;
        }
        if let Some(token) = body.pointer("/metadata/continue").and_then(Value::as_str) {
            token.clone_into(&mut self.token);
        }
        let is_dry = !call.option("dryRun").is_empty();
        // A list's own version is also that of what others wrote.
        if body["items"].is_null() {
            self.note_version(body, is_dry);
        }
        for item in body["items"].as_array().into_iter().flatten() {
            self.note_version(item, is_dry);
        }
        if let (Some(prefix), Some(name)) =
            (body.pointer("/metadata/generateName"), body.pointer("/metadata/name"))
        {
            let (prefix, name) = (prefix.as_str().unwrap_or_default(), name.as_str().unwrap_or_default());
            self.symbols.name(name, &format!("{prefix}drawn"));
            if call.method == "POST" {
                self.drawn.insert(index, name.to_owned());
            }
        }
        let is_object = body["metadata"]["uid"].is_string() && body["kind"] != "PartialObjectMetadata";
        if is_object && !is_dry {
            let key = object_key(&self.fill(&call.path));
            let key = if call.method == "POST" {
                format!("{key}/{}", body["metadata"]["name"].as_str().unwrap_or_default())
            } else {
                key
            };
            let version = body["metadata"]["resourceVersion"].as_str().unwrap_or("1").to_owned();
            let seen = self.objects.entry(key).or_insert(Seen { first_version: version, last: Value::Null });
            seen.last = body.clone();
        }
    }

    fn note_version(&mut self, object: &Value, is_dry: bool) {
        let version = object.pointer("/metadata/resourceVersion").and_then(Value::as_str);
        let Some(version) = version.and_then(|version| version.parse::<u64>().ok()) else { return };
        if !is_dry {
            self.newest = self.newest.max(version);
        }
        if self.start == 0 {
            self.start = version;
        }
    }
}

/// `pods/a` out of `/api/v1/namespaces/x/pods/a/status`.
fn object_key(path: &str) -> String {
    let segments: Vec<&str> = path.trim_matches('/').split('/').collect();
    let rest = match segments.as_slice() {
        ["apis", _, _, rest @ ..] => rest,
        rest => rest.get(2..).unwrap_or_default(),
    };
    let rest = match rest {
        ["namespaces", _, rest @ ..] if !rest.is_empty() => rest,
        rest => rest,
    };
    rest.iter().take(2).copied().collect::<Vec<_>>().join("/")
}
