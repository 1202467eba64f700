//! New inputs from old ones. Bytes of JSON that are changed at random are mostly not JSON any more, so the tree is changed
//! instead: parts go, come twice, swap places, or are replaced by parts of other inputs and by values that are awkward.

use std::fs;
use std::path::Path;

use fastrand::Rng;
use serde_json::{Map, Value, json};

/// One in so many inputs is changed byte by byte all the same: parsers see broken JSON too.
const BYTES_EVERY: u32 = 8;
/// A tree that is changed in few places stays near to what made it interesting.
const CHANGES_MAX: usize = 4;

/// Parts of known inputs, to build new ones from.
pub struct Stock {
    keys: Vec<String>,
    values: Vec<Value>,
    awkward: Vec<Value>,
}

impl Stock {
    /// All parts of the inputs in a directory.
    pub fn from_directory(directory: &Path) -> Self {
        let mut stock =
            Self { keys: vec!["metadata".to_owned()], values: vec![Value::Null], awkward: awkward() };
        let mut paths: Vec<_> =
            fs::read_dir(directory).into_iter().flatten().flatten().map(|f| f.path()).collect();
        paths.sort();
        let inputs = paths.into_iter().filter_map(|path| fs::read(path).ok());
        for input in inputs.filter_map(|text| serde_json::from_slice(&text).ok()) {
            stock.collect(&input);
        }
        stock.keys.sort_unstable();
        stock.keys.dedup();
        stock
    }

    fn collect(&mut self, value: &Value) {
        self.values.push(value.clone());
        match value {
            Value::Object(map) => {
                self.keys.extend(map.keys().cloned());
                map.values().for_each(|value| self.collect(value));
            }
            Value::Array(items) => items.iter().for_each(|item| self.collect(item)),
            _ => {}
        }
    }

    /// A changed input; `None` if it is to be changed byte by byte.
    pub fn change(&self, input: &[u8], seed: u32, max_size: usize) -> Option<Vec<u8>> {
        let mut rng = Rng::with_seed(seed.into());
        if rng.u32(..BYTES_EVERY) == 0 {
            return None;
        }
        let mut tree = serde_json::from_slice(input).unwrap_or_else(|_| self.value(&mut rng));
        for _ in 0..rng.usize(1..=CHANGES_MAX) {
            self.change_somewhere(&mut tree, &mut rng);
        }
        Some(tree.to_string().into_bytes()).filter(|text| text.len() <= max_size)
    }

    /// Walks down by chance and changes what it comes to.
    fn change_somewhere(&self, value: &mut Value, rng: &mut Rng) {
        let size = size(value);
        // In large parts it goes further down, so that leaves are changed more often than whole trees.
        if size > 1 && rng.usize(..size) != 0 {
            let inner = match value {
                Value::Object(map) => weighted(map.values_mut().collect(), rng),
                Value::Array(items) => weighted(items.iter_mut().collect(), rng),
                _ => None,
            };
            if let Some(inner) = inner {
                return self.change_somewhere(inner, rng);
            }
        }
        self.change_here(value, rng);
    }

    fn change_here(&self, value: &mut Value, rng: &mut Rng) {
        match value {
            Value::Object(map) if rng.u8(..4) != 0 => self.change_map(map, rng),
            Value::Array(items) if rng.u8(..4) != 0 => self.change_list(items, rng),
            Value::String(text) if rng.bool() => change_text(text, rng),
            Value::Number(number) if rng.bool() => {
                let by = [1, -1, 1000, i64::MAX][rng.usize(..4)];
                *value = json!(number.as_i64().unwrap_or_default().wrapping_add(by));
            }
            Value::Bool(flag) => *flag = !*flag,
            _ => *value = self.value(rng),
        }
    }

    fn change_map(&self, map: &mut Map<String, Value>, rng: &mut Rng) {
        let key = rng.choice(map.keys()).cloned();
        match (rng.u8(..4), key) {
            (0, Some(key)) => drop(map.remove(&key)),
            (1, Some(key)) => drop(map.insert(key, self.value(rng))),
            // The same under another name.
            (2, Some(key)) => {
                let value = map.get(&key).cloned().unwrap_or_default();
                map.insert(self.key(rng), value);
            }
            _ => drop(map.insert(self.key(rng), self.value(rng))),
        }
    }

    fn change_list(&self, items: &mut Vec<Value>, rng: &mut Rng) {
        match (rng.u8(..5), items.len()) {
            (0, 1..) => drop(items.remove(rng.usize(..items.len()))),
            (1, 1..) => {
                let twice = items[rng.usize(..items.len())].clone();
                items.insert(rng.usize(..=items.len()), twice);
            }
            (2, 2..) => rng.shuffle(items),
            _ => items.insert(rng.usize(..=items.len()), self.value(rng)),
        }
    }

    fn key(&self, rng: &mut Rng) -> String {
        self.keys[rng.usize(..self.keys.len())].clone()
    }

    fn value(&self, rng: &mut Rng) -> Value {
        let from = if rng.bool() { &self.values } else { &self.awkward };
        from[rng.usize(..from.len())].clone()
    }
}

/// Values that programs stumble over.
fn awkward() -> Vec<Value> {
    let texts =
        ["", " ", "\u{0}", "ä€𝄞", "/", "true", "-1", "1e400", "99999999999999999999", "100%", "PT1H", "-5m"];
    let times = ["1970-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "-009999-01-02T01:59:59Z"];
    let numbers =
        [json!(0), json!(-1), json!(i32::MAX), json!(i64::MAX), json!(i64::MIN), json!(u64::MAX), json!(1.5)];
    let shapes = [Value::Null, json!(true), json!([]), json!({}), json!([[]]), json!({"": null})];
    let texts = texts.into_iter().chain(times).map(Value::from);
    texts.chain(numbers).chain(shapes).collect()
}

fn size(value: &Value) -> usize {
    match value {
        Value::Object(map) => 1 + map.values().map(size).sum::<usize>(),
        Value::Array(items) => 1 + items.iter().map(size).sum::<usize>(),
        _ => 1,
    }
}

/// Each part as likely as it is large.
fn weighted<'v>(parts: Vec<&'v mut Value>, rng: &mut Rng) -> Option<&'v mut Value> {
    let total: usize = parts.iter().map(|part| size(part)).sum();
    let mut at = rng.usize(..total.max(1));
    parts.into_iter().find(|part| {
        let size = size(part);
        let here = at < size;
        at = at.saturating_sub(size);
        here
    })
}

fn change_text(text: &mut String, rng: &mut Rng) {
    let places: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
    let at = rng.choice(places).unwrap_or(0);
    match rng.u8(..4) {
        0 => text.truncate(at),
        1 => drop(text.drain(..at)),
        2 => text.insert(at, char::from(rng.u8(b' '..=b'~'))),
        _ => {
            text.insert_str(
                at,
                rng.choice(["/", "=", ",", "%", "-", ".", "(", "0", " "]).unwrap_or_default(),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_mostly_json_and_can_be_made_again() {
        let stock = Stock::from_directory(Path::new("no such place"));
        let input = br#"{"a": {"b": [1, "two", {"c": null}]}, "d": true}"#;
        let all = || (0..200).map(|seed| stock.change(input, seed, 1000)).collect::<Vec<_>>();
        assert_eq!(all(), all());
        let changed: Vec<_> = all().into_iter().flatten().collect();
        assert!(changed.len() > 150);
        assert!(changed.iter().all(|text| serde_json::from_slice::<Value>(text).is_ok()));
        assert!(changed.iter().filter(|text| text.as_slice() != input).count() > 150);
    }
}
