//! The regular expressions of CRD schemas, as far as schemas use them.
//!
//! Literals, `.`, classes, `\d \w \s`, groups, `|`, anchors and the quantifiers `* + ? {n,m}`, by backtracking.
//! Schema patterns are short and so are the values, which is why this is a page of code and not a dependency.
//! A pattern that needs more matches everything: this server must not refuse what a real one accepts.

use std::iter::Peekable;
use std::str::Chars;

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
        let branches = parse_branches(&mut rest).filter(|_| rest.next().is_none());
        Self(branches)
    }

    /// As in JSON schema, a pattern without anchors may match anywhere.
    pub(super) fn is_found_in(&self, text: &str) -> bool {
        let Some(branches) = &self.0 else { return true };
        let text: Vec<char> = text.chars().collect();
        (0..=text.len()).any(|start| match_branches(branches, &text, start, &mut |_| true))
    }
}

fn parse_branches(rest: &mut Peekable<Chars<'_>>) -> Option<Vec<Branch>> {
    let mut branches = vec![Branch::new()];
    while let Some(next) = rest.next_if(|next| *next != ')') {
        if next == '|' {
            branches.push(Branch::new());
            continue;
        }
        let atom = parse_atom(next, rest)?;
        let (min, max) = parse_quantifier(rest)?;
        branches.last_mut()?.push(Piece { atom, min, max });
    }
    Some(branches)
}

fn parse_atom(first: char, rest: &mut Peekable<Chars<'_>>) -> Option<Atom> {
    Some(match first {
        '^' => Atom::Start,
        '$' => Atom::End,
        '.' => Atom::Any,
        '(' => {
            if rest.next_if_eq(&'?').is_some() {
                rest.next_if_eq(&':')?;
            }
            let branches = parse_branches(rest)?;
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
fn match_branches(
    branches: &[Branch],
    text: &[char],
    at: usize,
    then: &mut dyn FnMut(usize) -> bool,
) -> bool {
    branches.iter().any(|branch| match_pieces(branch, text, at, then))
}

fn match_pieces(pieces: &[Piece], text: &[char], at: usize, then: &mut dyn FnMut(usize) -> bool) -> bool {
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
    text: &[char],
    at: usize,
    then: &mut dyn FnMut(usize) -> bool,
) -> bool {
    let once_more = done < piece.max
        && match_atom(&piece.atom, text, at, &mut |behind| {
            // A repetition that consumes nothing would go on forever.
            (behind > at || done < piece.min) && match_times(piece, done + 1, text, behind, then)
        });
    once_more || (done >= piece.min && then(at))
}

fn match_atom(atom: &Atom, text: &[char], at: usize, then: &mut dyn FnMut(usize) -> bool) -> bool {
    match atom {
        Atom::Start => at == 0 && then(at),
        Atom::End => at == text.len() && then(at),
        Atom::Any => at < text.len() && then(at + 1),
        Atom::Class { ranges, negated } => {
            let Some(next) = text.get(at) else { return false };
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
    fn a_pattern_beyond_this_page_refuses_nothing() {
        for pattern in [r"^\p{L}$", "(?i)x", "(", "[a"] {
            assert!(Pattern::parse(pattern).is_found_in("anything"), "{pattern}");
        }
    }
}
