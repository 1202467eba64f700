//! What the terminal can and what the user wants of it.

use std::io::IsTerminal;

/// Another form of output than text for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Output {
    /// For programs.
    Json,
}

/// Whether `stream` is a terminal on which a screen can be drawn.
pub(crate) fn can_draw(stream: &impl IsTerminal) -> bool {
    stream.is_terminal() && std::env::var_os("TERM").is_some_and(|term| term != "dumb")
}

/// Whether to write colours to `stream`; see no-color.org.
pub(crate) fn colours(stream: &impl IsTerminal) -> bool {
    can_draw(stream) && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}
