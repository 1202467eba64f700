//! One call of a sequence, as data.
//!
//! Texts hold marks that each side fills in from what it has seen itself: `<ns>` and `<run>` (the names of this
//! play), `<rv:pods/a>` and `<old:pods/a>` (the newest and the first version of an object), `<uid:pods/a>`,
//! `<seen>` (the newest version of anything), `<start>` (the version before the first call), `<continue>` (the
//! last page's token) and `<drawn:3>` (the name that the server drew for call 3).

use serde_json::Value;
use std::fmt;

/// What is sent as the body.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Body {
    None,
    /// A JSON text.
    Json(Value),
    /// Not necessarily JSON.
    Raw(&'static str),
    /// What the side saw last of the object at the call's path (without it, `base`), with a merge patch on top.
    Edited {
        base: Value,
        edit: Value,
    },
}

/// One request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Call {
    pub(crate) method: &'static str,
    pub(crate) path: String,
    pub(crate) query: Vec<(&'static str, String)>,
    pub(crate) content_type: &'static str,
    pub(crate) accept: &'static str,
    pub(crate) body: Body,
}

impl Call {
    pub(crate) fn new(method: &'static str, path: impl Into<String>) -> Self {
        Self {
            method,
            path: path.into(),
            query: Vec::new(),
            content_type: "application/json",
            accept: "application/json",
            body: Body::None,
        }
    }

    pub(crate) fn with(mut self, key: &'static str, value: impl Into<String>) -> Self {
        self.query.push((key, value.into()));
        self
    }

    pub(crate) fn sending(mut self, body: Body) -> Self {
        self.body = body;
        self
    }

    pub(crate) fn is_watch(&self) -> bool {
        self.query.iter().any(|(key, _)| *key == "watch")
    }

    pub(crate) fn option(&self, name: &str) -> &str {
        self.query.iter().find(|(key, _)| *key == name).map_or("", |(_, value)| value)
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.method, self.path)?;
        for (index, (key, value)) in self.query.iter().enumerate() {
            write!(f, "{}{key}={value}", if index == 0 { '?' } else { '&' })?;
        }
        for text in [self.accept, self.content_type].iter().filter(|text| **text != "application/json") {
            write!(f, " {text}")?;
        }
        match &self.body {
            Body::None => Ok(()),
            Body::Json(value) => write!(f, " {value}"),
            Body::Raw(text) => write!(f, " {text:?}"),
            Body::Edited { edit, .. } => write!(f, " the object as last seen, with {edit}"),
        }
    }
}
