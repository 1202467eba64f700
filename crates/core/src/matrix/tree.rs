//! YAML as a tree that knows where each value stands in the text: problems name lines, and a promotion edits values
//! without touching what is around them.
//!
//! serde reads values only, so the events of the parser below it are used. Aliases, tags and a second document are refused:
//! a matrix needs none, and each would make the text mean something else than it shows.

use std::ops::Range;

use serde_saphyr::granit_parser::{Event, Parser, ScalarStyle, ScanError, Span, StructureStyle, options};

use super::problem::Problem;

/// A value and its place.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) kind: Kind,
    /// Where its text is, in bytes; of a map or list, where it begins.
    pub(super) span: Range<usize>,
    /// Counted from 1.
    pub(super) line: usize,
}

#[derive(Debug)]
pub(super) enum Kind {
    /// A key with nothing behind it.
    Nothing,
    Text {
        text: String,
        quotes: Quotes,
    },
    List(Vec<Node>),
    Map {
        pairs: Vec<Pair>,
        /// `{a: b}`
        flow: bool,
    },
}

#[derive(Debug)]
pub(super) struct Pair {
    pub(super) key: String,
    /// Where the key begins, in bytes.
    pub(super) start: usize,
    pub(super) line: usize,
    pub(super) value: Node,
}

/// How a text is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Quotes {
    Plain,
    Single,
    Double,
    /// `|` or `>`, over several lines.
    Block,
}

impl Quotes {
    /// A word in these quotes.
    pub(super) fn around(self, word: &str) -> String {
        match self {
            Quotes::Plain => word.to_owned(),
            Quotes::Single => format!("'{word}'"),
            Quotes::Double | Quotes::Block => format!("\"{word}\""),
        }
    }
}

impl Node {
    /// The pairs of a map.
    pub(super) fn pairs(&self) -> Option<&[Pair]> {
        match &self.kind {
            Kind::Map { pairs, .. } => Some(pairs),
            _ => None,
        }
    }

    /// What stands under a key of a map.
    pub(super) fn get(&self, key: &str) -> Option<&Node> {
        self.pairs()?.iter().find(|pair| pair.key == key).map(|pair| &pair.value)
    }

    /// On one line, for people: `[a, b]`, `{a: b}`.
    pub(super) fn flat(&self) -> String {
        match &self.kind {
            Kind::Nothing => "null".to_owned(),
            Kind::Text { text, .. } => text.split_whitespace().collect::<Vec<_>>().join(" "),
            Kind::List(items) => format!("[{}]", items.iter().map(Node::flat).collect::<Vec<_>>().join(", ")),
            Kind::Map { pairs, .. } => {
                let pairs: Vec<String> =
                    pairs.iter().map(|pair| format!("{}: {}", pair.key, pair.value.flat())).collect();
                format!("{{{}}}", pairs.join(", "))
            }
        }
    }
}

/// Reads the one document of a text.
pub(super) fn parse(text: &str) -> Result<Node, Problem> {
    let options = options! { emit_comments: false };
    let mut builder = Builder::default();
    for event in Parser::new_from_str_with_options(text, options) {
        let (event, span) = event.map_err(|error| not_yaml(text, &error))?;
        builder.take(event, &span)?;
    }
    builder.root.ok_or(Problem::Empty)
}

fn not_yaml(text: &str, error: &ScanError) -> Problem {
    let line = error.marker().line();
    let words = text.lines().nth(line.saturating_sub(1)).unwrap_or_default();
    if words.trim_start_matches(' ').starts_with('\t') {
        return Problem::Tab { line };
    }
    Problem::NotYaml { line, why: error.info() }
}

/// The tree so far, and the maps and lists that are still open.
#[derive(Default)]
struct Builder {
    root: Option<Node>,
    open: Vec<Open>,
}

struct Open {
    node: Node,
    /// A key that waits for its value.
    key: Option<(String, usize, usize)>,
}

impl Builder {
    fn take(&mut self, event: Event<'_>, span: &Span) -> Result<(), Problem> {
        let line = span.start.line();
        match event {
            Event::Scalar(.., Some(_))
            | Event::SequenceStart(.., Some(_))
            | Event::MappingStart(.., Some(_)) => {
                return Err(Problem::Tag { line });
            }
            Event::Alias(_) | Event::UnresolvedAlias(_) => return Err(Problem::Alias { line }),
            Event::Scalar(text, style, ..) => {
                let node = Node { kind: scalar(&text, style, span), span: bytes(span), line };
                return self.put(node);
            }
            Event::SequenceStart(..) => self.open(Kind::List(Vec::new()), span),
            Event::MappingStart(style, ..) => {
                self.open(Kind::Map { pairs: Vec::new(), flow: style == StructureStyle::Flow }, span);
            }
            Event::SequenceEnd | Event::MappingEnd => {
                if let Some(done) = self.open.pop() {
                    return self.put(done.node);
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn open(&mut self, kind: Kind, span: &Span) {
        let node = Node { kind, span: bytes(span), line: span.start.line() };
        self.open.push(Open { node, key: None });
    }

    /// A value is complete: into the map or list around it, or the document.
    fn put(&mut self, value: Node) -> Result<(), Problem> {
        let Some(around) = self.open.last_mut() else {
            if self.root.is_some() {
                return Err(Problem::SecondDocument { line: value.line });
            }
            self.root = Some(value);
            return Ok(());
        };
        match (&mut around.node.kind, around.key.take()) {
            (Kind::Map { pairs, .. }, Some((key, start, line))) => {
                pairs.push(Pair { key, start, line, value });
            }
            (Kind::Map { .. }, None) => match value.kind {
                Kind::Text { text, .. } => around.key = Some((text, value.span.start, value.line)),
                _ => return Err(Problem::BadKey { line: value.line }),
            },
            (Kind::List(items), _) => items.push(value),
            (Kind::Nothing | Kind::Text { .. }, _) => {}
        }
        Ok(())
    }
}

fn scalar(text: &str, style: ScalarStyle, span: &Span) -> Kind {
    let quotes = match style {
        // Nothing at all is given as a plain "~" of no length.
        ScalarStyle::Plain if bytes(span).is_empty() => return Kind::Nothing,
        ScalarStyle::Plain => Quotes::Plain,
        ScalarStyle::SingleQuoted => Quotes::Single,
        ScalarStyle::DoubleQuoted => Quotes::Double,
        ScalarStyle::Literal | ScalarStyle::Folded => Quotes::Block,
    };
    Kind::Text { text: text.to_owned(), quotes }
}

/// A text is given whole, so every mark has its offset.
fn bytes(span: &Span) -> Range<usize> {
    span.start.byte_offset().unwrap_or_default()..span.end.byte_offset().unwrap_or_default()
}
