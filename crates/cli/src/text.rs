//! Text that has to fit: clocks, cut sentences, ranges of names.

use std::fmt::{Display, Write as _};

/// Shorter words are not worth shortening.
const NAME_MIN: usize = 16;

/// `0:21`, `11:38`, `1:02:07`.
pub(crate) fn clock(seconds: i64) -> String {
    let seconds = seconds.max(0);
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    if hours > 0 { format!("{hours}:{minutes:02}:{seconds:02}") } else { format!("{minutes}:{seconds:02}") }
}

/// `00:11:40`: always as wide, for a place where it ticks.
pub(crate) fn long_clock(seconds: i64) -> String {
    let seconds = seconds.max(0);
    format!("{:02}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

/// `1 pod`, `2 pods`.
pub(crate) fn count(number: impl Into<u64>, noun: &str) -> String {
    let number = number.into();
    format!("{} {noun}{}", grouped(number), if number == 1 { "" } else { "s" })
}

/// `13,042`: long numbers are read in threes.
pub(crate) fn grouped(number: impl Display) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// At most `width` characters; what does not fit is cut with an ellipsis.
pub(crate) fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let mut short: String = text.chars().take(width.saturating_sub(1)).collect();
    short.truncate(short.trim_end().len());
    if width > 0 {
        short.push('…');
    }
    short
}

/// A sentence in `width` characters. Long names of objects go first, as they say least; then it is cut.
pub(crate) fn fit(sentence: &str, width: usize) -> String {
    let fits = |text: &str| text.chars().count() <= width;
    if fits(sentence) {
        return sentence.to_owned();
    }
    let mut text = each_word(sentence, without_namespace);
    for shorten in [shorten_name, drop_name] {
        if fits(&text) {
            break;
        }
        text = each_word(&text, shorten);
    }
    cut(&text, width)
}

fn each_word(sentence: &str, change: impl Fn(&str) -> String) -> String {
    sentence.split(' ').map(change).collect::<Vec<_>>().join(" ")
}

/// `ns/pod` → `pod`, `kind/ns/name` → `kind/name`.
fn without_namespace(word: &str) -> String {
    match word.split('/').collect::<Vec<_>>()[..] {
        [_, name] => name.to_owned(),
        [kind, _, name] => format!("{kind}/{name}"),
        _ => word.to_owned(),
    }
}

/// `nvidia-driver-daemonset-x7k2p` → `nvidia…x7k2p`: names begin with the workload and end with what tells pods apart.
fn shorten_name(word: &str) -> String {
    const HEAD: usize = 6;
    const TAIL: usize = 5;
    let (name, mark) = split_mark(word);
    let length = name.chars().count();
    if length < NAME_MIN || !name.contains('-') || name.contains(['/', '=']) {
        return word.to_owned();
    }
    let head: String = name.chars().take(HEAD).collect();
    let tail: String = name.chars().skip(length - TAIL).collect();
    format!("{head}…{tail}{mark}")
}

/// `nvidia…x7k2p:` → `…:`: the sentence around it says more. Budgets have a short name that everybody knows.
fn drop_name(word: &str) -> String {
    if let Some(budget) = word.strip_prefix("poddisruptionbudget/") {
        return format!("PDB {budget}");
    }
    let (name, mark) = split_mark(word);
    if name.contains('…') { format!("…{mark}") } else { word.to_owned() }
}

fn split_mark(word: &str) -> (&str, &str) {
    word.split_at(word.trim_end_matches([':', ',', ';', '.']).len())
}

/// Names as ranges over their order in the fleet: `gpu-01 … gpu-13, gpu-17`. `picked` are places in `names`.
pub(crate) fn ranges<N: Display>(names: &[N], picked: &[usize], width: usize) -> String {
    let mut picked = picked.to_vec();
    picked.sort_unstable();
    let mut text = String::new();
    for run in picked.chunk_by(|a, b| a + 1 == *b) {
        // More would be cut anyway, and a fleet of thousands must not cost a frame.
        if text.len() > width {
            break;
        }
        let comma = if text.is_empty() { "" } else { ", " };
        let name = |place: Option<&usize>| place.and_then(|place| names.get(*place)).map(ToString::to_string);
        let (first, last) = (name(run.first()).unwrap_or_default(), name(run.last()).unwrap_or_default());
        let _ = match run.len() {
            1 => write!(text, "{comma}{first}"),
            2 => write!(text, "{comma}{first}, {last}"),
            _ => write!(text, "{comma}{first} … {last}"),
        };
    }
    if text.is_empty() { text } else { cut(&format!("({text})"), width) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_are_short_until_they_have_hours() {
        assert_eq!([0, 21, 698, 3727].map(clock), ["0:00", "0:21", "11:38", "1:02:07"]);
        assert_eq!(long_clock(700), "00:11:40");
    }

    #[test]
    fn numbers_and_nouns() {
        assert_eq!(
            [grouped(0), grouped(999), grouped(13_042), grouped(1_000_000)],
            ["0", "999", "13,042", "1,000,000"]
        );
        assert_eq!([count(1_u64, "pod"), count(2_u64, "pod")], ["1 pod", "2 pods"]);
    }

    #[test]
    fn a_sentence_loses_names_before_it_loses_its_end() {
        let long = "driver pod gpu-operator/nvidia-driver-daemonset-x7k2p starts: running, not ready yet";
        assert_eq!(fit(long, 100), long);
        assert_eq!(fit(long, 72), "driver pod nvidia-driver-daemonset-x7k2p starts: running, not ready yet");
        assert_eq!(fit(long, 54), "driver pod nvidia…x7k2p starts: running, not ready yet");
        assert_eq!(fit(long, 43), "driver pod … starts: running, not ready yet");
        assert_eq!(fit(long, 38), "driver pod … starts: running, not rea…");
        assert_eq!(fit("evicting pod llm/chat-1-7d9f", 20), "evicting pod chat-1…");
        let budget = "pod llm/chat-1-7d9f5c4b8-x2x9p cannot leave: poddisruptionbudget/llm/chat-1 wants 3";
        assert_eq!(fit(budget, 70), "pod chat-1…x2x9p cannot leave: poddisruptionbudget/chat-1 wants 3");
        assert_eq!(fit(budget, 40), "pod … cannot leave: PDB chat-1 wants 3");
    }

    #[test]
    fn ranges_follow_the_order_of_the_fleet() {
        let names: Vec<String> = (1..=9).map(|n| format!("n{n}")).collect();
        assert_eq!(ranges(&names, &[4, 0, 1, 2, 6, 7], 80), "(n1 … n3, n5, n7, n8)");
        assert_eq!(ranges(&names, &[4, 0, 1, 2, 6, 7], 12), "(n1 … n3, n…");
        assert_eq!(ranges(&names, &[], 12), "");
    }
}
