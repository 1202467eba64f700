//! What the user reads when something is wrong: one line, `pitcrew: <sentence>`, on stderr.

use std::io;
use std::process::ExitCode;

use clap::error::ErrorKind;

/// Says what failed and returns the exit code.
pub(crate) fn failure(error: &anyhow::Error) -> ExitCode {
    // Whoever read our output has gone, as in `pitcrew crd | head -1`: there is nobody to tell.
    let broken_pipe = |cause: &(dyn std::error::Error + 'static)| {
        cause.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
    };
    if !error.chain().any(broken_pipe) {
        eprintln!("pitcrew: {}", one_line(error));
    }
    ExitCode::FAILURE
}

/// Says what is wrong with the command line, or prints the help that was asked for.
pub(crate) fn usage(error: &clap::Error) -> ExitCode {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            let _ = error.print();
            ExitCode::SUCCESS
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
            ExitCode::from(2)
        }
        _ => {
            eprintln!("pitcrew: {}", usage_line(&error.to_string()));
            ExitCode::from(2)
        }
    }
}

/// clap writes a paragraph; its first part is the sentence, a line that begins with `tip:` helps.
fn usage_line(text: &str) -> String {
    let sentence: Vec<&str> =
        text.lines().take_while(|line| !line.trim().is_empty()).map(str::trim).collect();
    let sentence = sentence.join(" ");
    let sentence = sentence.strip_prefix("error: ").unwrap_or(&sentence);
    match text.lines().find_map(|line| line.trim().strip_prefix("tip: ")) {
        Some(tip) => format!("{sentence}; {tip}"),
        None => format!("{sentence} (pitcrew --help tells more)"),
    }
}

/// The error and its causes as one sentence. A cause that is already part of it is not said twice.
fn one_line(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let cause = cause.to_string();
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_of_causes_is_one_line_and_says_nothing_twice() {
        let io = io::Error::other("no such\n  file");
        let error = anyhow::Error::new(io).context("read x: no such\n  file").context("cannot start");
        assert_eq!(one_line(&error), "cannot start: read x: no such file");
    }

    #[test]
    fn usage_is_one_line_with_its_tip() {
        let text = "error: unexpected argument '--node' found\n\n  tip: a similar argument exists: '--nodes'\n\nUsage: …";
        assert_eq!(
            usage_line(text),
            "unexpected argument '--node' found; a similar argument exists: '--nodes'"
        );
    }
}
