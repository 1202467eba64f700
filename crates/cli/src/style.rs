//! How states look: a glyph always, a colour where the terminal and the user want one. Lines fit the terminal.

use pitcrew_core::reason::Kind;

/// What the output can show.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Style {
    /// Whether to colour.
    pub(crate) colours: bool,
    /// How wide lines may be; pipes get whole sentences.
    pub(crate) width: Option<usize>,
}

/// A terminal narrower than this is not worth folding for.
const WIDTH_MIN: usize = 40;

impl Style {
    /// What standard output can show.
    pub(crate) fn of_stdout() -> Self {
        let stdout = std::io::stdout();
        let drawn = crate::terminal::can_draw(&stdout);
        let size = || ratatui::crossterm::terminal::size().ok();
        Self {
            colours: crate::terminal::colours(&stdout),
            width: drawn.then(size).flatten().map(|(columns, _)| usize::from(columns).max(WIDTH_MIN)),
        }
    }

    /// The glyph of a kind, in its colour.
    pub(crate) fn glyph(self, kind: Kind) -> String {
        let (glyph, _) = look(kind);
        self.paint(kind, glyph)
    }

    /// `text` in the colour of a kind.
    pub(crate) fn paint(self, kind: Kind, text: &str) -> String {
        let (_, code) = look(kind);
        if self.colours { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// `text` as something that matters less.
    pub(crate) fn dim(self, text: &str) -> String {
        self.paint(Kind::Waiting, text)
    }

    /// `text` as a heading.
    pub(crate) fn bold(self, text: &str) -> String {
        if self.colours { format!("\x1b[1m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// `text` after `lead`, folded at the width; lines after the first are indented by `indent`.
    pub(crate) fn fold(self, lead: &str, text: &str, indent: usize) -> String {
        let Some(width) = self.width else { return format!("{lead}{text}\n") };
        let (mut folded, mut column, mut at_start) = (lead.to_owned(), visible(lead), true);
        for word in text.split(' ') {
            let length = visible(word);
            if !at_start && column + 1 + length > width {
                folded += "\n";
                folded += &" ".repeat(indent);
                (column, at_start) = (indent, true);
            }
            if !at_start {
                folded.push(' ');
            }
            folded += word;
            column += length + usize::from(!at_start);
            at_start = false;
        }
        folded + "\n"
    }
}

fn look(kind: Kind) -> (&'static str, &'static str) {
    match kind {
        Kind::Done => ("✔", "32"),
        Kind::Moving => ("▸", "36"),
        Kind::Waiting => ("·", "2"),
        Kind::Paused => ("⏸", "35"),
        Kind::Blocked => ("!", "33"),
        Kind::Failed => ("✖", "31"),
    }
}

/// How many columns a text takes: colours take none.
fn visible(text: &str) -> usize {
    let mut escaped = false;
    text.chars()
        .filter(|c| match (escaped, c) {
            (false, '\x1b') => {
                escaped = true;
                false
            }
            (true, 'm') => {
                escaped = false;
                false
            }
            (escaped, _) => !escaped,
        })
        .count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_fold_at_the_width_and_words_stay_whole() {
        let style = Style { colours: true, width: Some(24) };
        let lead = format!("  {} ", style.glyph(Kind::Failed));
        let folded = style.fold(&lead, "one two three four-that-is-far-too-long five", 4);
        assert_eq!(folded, "  \x1b[31m✖\x1b[0m one two three\n    four-that-is-far-too-long\n    five\n");
        let whole = Style::default().fold("  ", "one two", 4);
        assert_eq!(whole, "  one two\n");
    }
}
