//! The regular expressions of CRD schemas, as far as schemas use them.
//!
//! Literals, `.`, classes, `\d \w \s`, groups, `|`, anchors and the quantifiers `* + ? {n,m}`, by backtracking.
//! Schema patterns are short and so are the values, which is why this is a page of code and not a dependency.
//! A pattern that needs more matches everything: this server must not refuse what a real one accepts.

use std::cell::Cell;
use std::iter::Peekable;
use std::str::Chars;

/// Groups inside groups: each is a call inside a call.
const DEPTH_MAX: usize = 50;
/// Each character may be a call inside a call too.
const TEXT_CHARS_MAX: usize = 1000;
/// `(a*)*b` tries every way to cut a text; no pattern of a real schema comes near this.
const STEPS_MAX: u32 = 100_000;

/// A pattern that can be looked for in a text.
#[derive(Debug)]
pub(super) struct Pattern(Option<Vec<Branch>>);

type Branch = Vec<Piece>;

#[derive(Debug)]
struct Piece {
    atom: Atom,
    min: usize,
    max: usize,
}

#[derive(Debug)]
enum Atom {
    Start,
    End,
    Any,
    Class { ranges: Vec<(char, char)>, negated: bool },
    Group(Vec<Branch>),
}

impl Pattern {
    pub(super) fn parse(pattern: &str) -> Self {
        let mut rest = pattern.chars().peekable();
        let branches = parse_branches(&mut rest, 0).filter(|_| rest.next().is_none());
        Self(branches)
    }

    /// As in JSON schema, a pattern without anchors may match anywhere.
    pub(super) fn is_found_in(&self, text: &str) -> bool {
        let Some(branches) = &self.0 else { return true };
        let text = Text { chars: text.chars().collect(), steps_left: Cell::new(STEPS_MAX) };
        if text.chars.len() > TEXT_CHARS_MAX {
            return true;
        }
        let found = (0..=text.chars.len()).any(|start| match_branches(branches, &text, start, &mut |_| true));
        found || text.steps_left.get() == 0
    }
}

/// What is looked through, and how much longer.
struct Text {
    chars: Vec<char>,
    steps_left: Cell<u32>,
}

impl Text {
    /// One more step; false when it has taken too long.
    fn goes_on(&self) -> bool {
        self.steps_left.set(self.steps_left.get().saturating_sub(1));
        self.steps_left.get() > 0
    }
}

fn parse_branches(rest: &mut Peekable<Chars<'_>>, depth: usize) -> Option<Vec<Branch>> {
    if depth > DEPTH_MAX {
        return None;
    }
    let mut branches = vec![Branch::new()];
    while let Some(next) = rest.next_if(|next| *next != ')') {
        if next == '|' {
            branches.push(Branch::new());
            continue;
        }
        let atom = parse_atom(next, rest, depth)?;
        let (min, max) = parse_quantifier(rest)?;
        branches.last_mut()?.push(Piece { atom, min, max });
    }
    Some(branches)
}

fn parse_atom(first: char, rest: &mut Peekable<Chars<'_>>, depth: usize) -> Option<Atom> {
    Some(match first {
        '^' => Atom::Start,
        '$' => Atom::End,
        '.' => Atom::Any,
        '(' => {
            if rest.next_if_eq(&'?').is_some() {
                rest.next_if_eq(&':')?;
            }
            let branches = parse_branches(rest, depth + 1)?;
            rest.next_if_eq(&')')?;
            Atom::Group(branches)
        }
        '[' => parse_class(rest)?,
        '\\' => {
            let (ranges, negated) = parse_escape(rest.next()?)?;
            Atom::Class { ranges, negated }
        }
        '*' | '+' | '?' | '{' => return None,
        literal => Atom::Class { ranges: vec![(literal, literal)], negated: false },
    })
}

fn parse_class(rest: &mut Peekable<Chars<'_>>) -> Option<Atom> {
    let negated = rest.next_if_eq(&'^').is_some();
    let mut ranges = Vec::new();
    while let Some(next) = rest.next_if(|next| *next != ']' || ranges.is_empty()) {
        if next == '\\' {
            let (escaped, false) = parse_escape(rest.next()?)? else { return None };
            ranges.extend(escaped);
        } else if rest.next_if_eq(&'-').is_some() {
            match rest.next_if(|next| *next != ']') {
                Some('\\') => return None,
                Some(end) => ranges.push((next, end)),
                None => ranges.extend([(next, next), ('-', '-')]),
            }
        } else {
            ranges.push((next, next));
        }
    }
    rest.next_if_eq(&']')?;
    Some(Atom::Class { ranges, negated })
}

fn parse_escape(escaped: char) -> Option<(Vec<(char, char)>, bool)> {
    let ranges = match escaped.to_ascii_lowercase() {
        'd' => vec![('0', '9')],
        'w' => vec![('a', 'z'), ('A', 'Z'), ('0', '9'), ('_', '_')],
        's' => vec![(' ', ' '), ('\t', '\r')],
        letter if letter.is_ascii_alphanumeric() => return None,
        _ => return Some((vec![(escaped, escaped)], false)),
    };
    Some((ranges, escaped.is_ascii_uppercase()))
}

fn parse_quantifier(rest: &mut Peekable<Chars<'_>>) -> Option<(usize, usize)> {
    let (min, max) = match rest.peek() {
        Some('*') => (0, usize::MAX),
        Some('+') => (1, usize::MAX),
        Some('?') => (0, 1),
        Some('{') => {
            let inside: String = rest.by_ref().skip(1).take_while(|next| *next != '}').collect();
            return match inside.split_once(',') {
                None => inside.parse().ok().map(|exact| (exact, exact)),
                Some((min, "")) => min.parse().ok().map(|min| (min, usize::MAX)),
                Some((min, max)) => min.parse().ok().zip(max.parse().ok()),
            };
        }
        _ => return Some((1, 1)),
    };
    rest.next();
    // Greedy or lazy finds the same texts.
    rest.next_if_eq(&'?');
    Some((min, max))
}

/// Tries every way to match; `then` gets the place behind each and says whether the rest fits.
fn match_branches(branches: &[Branch], text: &Text, at: usize, then: &mut dyn FnMut(usize) -> bool) -> bool {
    branches.iter().any(|branch| match_pieces(branch, text, at, then))
}

fn match_pieces(pieces: &[Piece], text: &Text, at: usize, then: &mut dyn FnMut(usize) -> bool) -> bool {
    match pieces.split_first() {
        None => then(at),
        Some((piece, rest)) => {
            match_times(piece, 0, text, at, &mut |behind| match_pieces(rest, text, behind, then))
        }
    }
}

fn match_times(
    piece: &Piece,
    done: usize,
    text: &Text,
    at: usize,
    then: &mut dyn FnMut(usize) -> bool,
) -> bool {
    let once_more = text.goes_on()
        && done < piece.max
        && match_atom(&piece.atom, text, at, &mut |behind| {
            // A repetition that consumes nothing would go on forever.
            (behind > at || done < piece.min) && match_times(piece, done + 1, text, behind, then)
        });
    once_more || (done >= piece.min && then(at))
}

fn match_atom(atom: &Atom, text: &Text, at: usize, then: &mut dyn FnMut(usize) -> bool) -> bool {
    match atom {
        Atom::Start => at == 0 && then(at),
        Atom::End => at == text.chars.len() && then(at),
        Atom::Any => at < text.chars.len() && then(at + 1),
        Atom::Class { ranges, negated } => {
            let Some(next) = text.chars.get(at) else { return false };
            let inside = ranges.iter().any(|(low, high)| (low..=high).contains(&next));
            inside != *negated && then(at + 1)
        }
        Atom::Group(branches) => match_branches(branches, text, at, then),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_as_they_do_elsewhere() {
        let cases = [
            ("^[0-9]+(m|h|s)$", "30m", "30"),
            ("^((100|[1-9]?[0-9])%|[0-9]+)$", "25%", "101%"),
            (r"^\d{1,3}(\.\d+)*$", "535.104.05", "535."),
            ("^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "gpu-1", "gpu-"),
            ("b+", "abc", "acd"),
            ("^(?:a|b|)$", "", "c"),
            (r"^[^/\s]+/[\w.-]+$", "nvidia.com/gpu-1", "nvidia com/gpu"),
            ("^x{2}$", "xx", "x"),
            ("^(a*)*$", "aaaa", "b"),
        ];
        for (pattern, yes, no) in cases {
            assert!(Pattern::parse(pattern).is_found_in(yes), "{pattern} {yes}");
            assert!(!Pattern::parse(pattern).is_found_in(no), "{pattern} {no}");
        }
    }

    #[test]
    fn what_takes_too_long_refuses_nothing() {
        assert!(Pattern::parse("^(a*)*b$").is_found_in(&"a".repeat(40)));
        assert!(Pattern::parse(&"(".repeat(100_000)).is_found_in("a"));
        assert!(Pattern::parse("^.*b$").is_found_in(&"a".repeat(100_000)));
        assert!(!Pattern::parse("^.*b$").is_found_in(&"a".repeat(TEXT_CHARS_MAX)));
    }

    #[test]
    fn a_pattern_beyond_this_page_refuses_nothing() {
        for pattern in [r"^\p{L}$", "(?i)x", "(", "[a"] {
            assert!(Pattern::parse(pattern).is_found_in("anything"), "{pattern}");
        }
    }
}
