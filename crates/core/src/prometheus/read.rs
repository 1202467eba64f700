//! What a Prometheus sends, as values or as a sentence that says why there are none.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Deserialize;
use serde_json::Value;

use super::{Series, Values};

/// A sentence for a status and a screen: what is longer has said enough.
const SENTENCE_MAX: usize = 240;

/// The answer of `/api/v1/query`, as far as it is read.
#[derive(Deserialize)]
struct Reply {
    #[serde(default)]
    data: Option<Data>,
    #[serde(default)]
    error: Option<String>,
    /// A part of the data could not be had, or the query is not what it seems.
    #[serde(default)]
    warnings: Vec<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Data {
    result_type: String,
    result: Value,
}

#[derive(Deserialize)]
struct Element {
    #[serde(default)]
    metric: BTreeMap<String, String>,
    /// Time and number; none if it is a histogram.
    value: Option<(f64, String)>,
}

/// Reads what came back with an HTTP status.
pub fn read(status: u16, body: &[u8]) -> Result<Values, String> {
    let refused = || format!("it answered with HTTP status {status} and no sentence");
    let Ok(reply) = serde_json::from_slice::<Reply>(body) else {
        return Err(if status == 200 {
            "it sent something else than an answer".to_owned()
        } else {
            refused()
        });
    };
    if let Some(error) = reply.error {
        return Err(short(format!("it refused the query: {error}")));
    }
    let Some(data) = reply.data.filter(|_| status == 200) else { return Err(refused()) };
    // Values that are only some of them prove nothing.
    if let Some(warning) = reply.warnings.first() {
        return Err(short(format!("it warns: {warning}")));
    }
    let series = match data.result_type.as_str() {
        "vector" => serde_json::from_value::<Vec<Element>>(data.result).ok(),
        "scalar" => serde_json::from_value::<(f64, String)>(data.result)
            .ok()
            .map(|value| vec![Element { metric: BTreeMap::new(), value: Some(value) }]),
        other => return Err(format!("the query gives a {other}; ask for one moment and for numbers")),
    };
    extremes(series.ok_or("it sent something else than numbers")?)
}

fn extremes(elements: Vec<Element>) -> Result<Values, String> {
    let mut found: Option<Values> = None;
    for Element { metric, value } in elements {
        let labels = labels(metric);
        let text = value.map(|(_, text)| text).ok_or_else(|| format!("{labels} is a histogram"))?;
        let value = text.parse::<f64>().ok().filter(|value| value.is_finite());
        let value =
            value.ok_or_else(|| short(format!("its value is {text} {labels}").trim_end().to_owned()))?;
        let series = Series { labels, value };
        found = Some(match found {
            None => Values { lowest: series.clone(), highest: series },
            Some(Values { lowest, highest }) if value < lowest.value => Values { lowest: series, highest },
            Some(Values { lowest, highest }) if value > highest.value => Values { lowest, highest: series },
            Some(values) => values,
        });
    }
    found.ok_or_else(|| "there is no such series".to_owned())
}

/// `up{job="gpu"}`, as Prometheus writes it.
fn labels(mut metric: BTreeMap<String, String>) -> String {
    let mut text = metric.remove("__name__").unwrap_or_default();
    for (place, (name, value)) in metric.iter().enumerate() {
        let _ = write!(text, "{}{name}={value:?}", if place == 0 { "{" } else { "," });
    }
    if !metric.is_empty() {
        text.push('}');
    }
    short(text)
}

fn short(mut text: String) -> String {
    if text.len() > SENTENCE_MAX {
        let cut = (0..=SENTENCE_MAX).rev().find(|at| text.is_char_boundary(*at)).unwrap_or_default();
        text.truncate(cut);
        text.push('…');
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn vector(values: &[(&str, &str)]) -> Value {
        let element = |(gpu, value): &(&str, &str)| json!({"metric": {"__name__": "xid", "gpu": gpu, "b": "c"}, "value": [1.5, value]});
        let result: Vec<Value> = values.iter().map(element).collect();
        json!({"status": "success", "data": {"resultType": "vector", "result": result}})
    }

    fn says(status: u16, reply: &Value) -> String {
        match read(status, reply.to_string().as_bytes()) {
            Ok(Values { lowest, highest }) => {
                format!("{} {} .. {} {}", lowest.labels, lowest.value, highest.labels, highest.value)
            }
            Err(why) => why,
        }
    }

    #[test]
    fn values_are_read_and_all_else_is_told() {
        insta::assert_snapshot!(says(200, &vector(&[("1", "3"), ("0", "-1e3"), ("2", "0.5")])), @r#"xid{b="c",gpu="0"} -1000 .. xid{b="c",gpu="1"} 3"#);
        insta::assert_snapshot!(says(200, &json!({"status": "success", "data": {"resultType": "scalar", "result": [1, "7"]}})), @" 7 ..  7");
        insta::assert_snapshot!(says(200, &vector(&[])), @"there is no such series");
        insta::assert_snapshot!(says(200, &vector(&[("0", "1"), ("1", "NaN")])), @r#"its value is NaN xid{b="c",gpu="1"}"#);
        insta::assert_snapshot!(says(200, &vector(&[("0", "+Inf")])), @r#"its value is +Inf xid{b="c",gpu="0"}"#);
        let matrix = json!({"status": "success", "data": {"resultType": "matrix", "result": []}});
        insta::assert_snapshot!(says(200, &matrix), @"the query gives a matrix; ask for one moment and for numbers");
        let bad = json!({"status": "error", "errorType": "bad_data", "error": "parse error: unexpected end of input"});
        insta::assert_snapshot!(says(400, &bad), @"it refused the query: parse error: unexpected end of input");
        let mut partial = vector(&[("0", "1")]);
        partial["warnings"] = json!(["store gateway 3 is not there"]);
        insta::assert_snapshot!(says(200, &partial), @"it warns: store gateway 3 is not there");
        insta::assert_snapshot!(says(200, &json!("hello")), @"it sent something else than an answer");
        insta::assert_snapshot!(says(502, &json!("bad gateway")), @"it answered with HTTP status 502 and no sentence");
        insta::assert_snapshot!(says(503, &vector(&[("0", "1")])), @"it answered with HTTP status 503 and no sentence");
    }

    #[test]
    fn a_long_sentence_is_cut() {
        let long = json!({"status": "error", "error": "ü".repeat(1000)});
        assert!(says(400, &long).len() <= SENTENCE_MAX + '…'.len_utf8());
    }
}
