//! Symbols in the place of what a server makes up: UIDs, versions, times and drawn names.
//!
//! A value becomes the number of its first appearance, so that two answers are equal exactly if the same things
//! are equal in them. A version that is new but not newer says so.

use serde_json::Value;
use std::collections::BTreeMap;

/// The values of one play on one server.
#[derive(Debug, Default)]
pub(crate) struct Symbols {
    uids: BTreeMap<String, String>,
    versions: BTreeMap<u64, String>,
    names: BTreeMap<String, String>,
}

impl Symbols {
    /// The server drew `name`.
    pub(crate) fn name(&mut self, name: &str, symbol: &str) {
        self.names.insert(name.to_owned(), symbol.to_owned());
    }

    /// The answer with symbols. `newest` is the newest version of any object so far.
    pub(crate) fn put_into(&mut self, mut body: Value, newest: u64) -> Value {
        if body.get("items").is_some() {
            let version =
                body["metadata"]["resourceVersion"].as_str().and_then(|text| text.parse::<u64>().ok());
            let symbol = version.map(|version| if version >= newest { "the newest" } else { "an older" });
            body["metadata"]["resourceVersion"] = symbol.into();
            if body["metadata"]["continue"].as_str().is_some_and(|token| !token.is_empty()) {
                body["metadata"]["continue"] = "a token".into();
            }
        }
        for event in body.as_array_mut().into_iter().flatten().filter(|event| event["type"] == "BOOKMARK") {
            event["object"]["metadata"]["resourceVersion"] = "a bookmark".into();
        }
        self.learn(&body);
        self.replace(&mut body, "");
        body
    }

    fn learn(&mut self, value: &Value) {
        match value {
            Value::Object(fields) => {
                for (name, field) in fields {
                    match (name.as_str(), field.as_str()) {
                        ("uid", Some(uid)) => self.learn_uid(uid),
                        ("resourceVersion", Some(version)) => self.learn_version(version),
                        _ => self.learn(field),
                    }
                }
            }
            Value::Array(items) => items.iter().for_each(|item| self.learn(item)),
            _ => {}
        }
    }

    fn learn_uid(&mut self, uid: &str) {
        let next = format!("uid-{}", self.uids.len() + 1);
        if uid.len() == 36 {
            self.uids.entry(uid.to_owned()).or_insert(next);
        }
    }

    fn learn_version(&mut self, version: &str) {
        let Ok(version) = version.parse::<u64>() else { return };
        let is_newest = self.versions.last_key_value().is_none_or(|(newest, _)| *newest < version);
        let next =
            format!("version-{}{}", self.versions.len() + 1, if is_newest { "" } else { "-not-newer" });
        self.versions.entry(version).or_insert(next);
    }

    fn replace(&self, value: &mut Value, field: &str) {
        match value {
            Value::Object(fields) => fields.iter_mut().for_each(|(name, value)| self.replace(value, name)),
            Value::Array(items) => items.iter_mut().for_each(|item| self.replace(item, field)),
            Value::String(text) => *text = self.text(text, field),
            _ => {}
        }
    }

    fn text(&self, text: &str, field: &str) -> String {
        if field == "resourceVersion" {
            let symbol = text.parse().ok().and_then(|version: u64| self.versions.get(&version));
            return symbol.cloned().unwrap_or_else(|| text.to_owned());
        }
        if is_time(text) {
            // What a client wrote is from 2025; what a server made up is not.
            return if text.starts_with("2025-") { text.to_owned() } else { "a time".to_owned() };
        }
        let mut text = text.to_owned();
        for (value, symbol) in self.uids.iter().chain(&self.names) {
            if text.contains(value.as_str()) {
                text = text.replace(value.as_str(), symbol);
            }
        }
        if field == "message" && text.contains("ResourceVersion") {
            for (version, symbol) in &self.versions {
                text = text.replace(&format!("({version})"), &format!("({symbol})"));
            }
            text = without_numbers(&text);
        }
        text
    }
}

/// Versions that no answer has shown stand in brackets in some messages.
fn without_numbers(text: &str) -> String {
    let mut pieces = text.split('(');
    let mut result = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        let rest = piece.trim_start_matches(|letter: char| letter.is_ascii_digit());
        let is_number = rest.len() < piece.len() && rest.starts_with(')');
        result.push('(');
        result.push_str(if is_number { "a version" } else { "" });
        result.push_str(if is_number { rest } else { piece });
    }
    result
}

fn is_time(text: &str) -> bool {
    let bytes = text.as_bytes();
    bytes.len() >= 20 && bytes[4] == b'-' && bytes[10] == b'T' && text.ends_with('Z')
}
