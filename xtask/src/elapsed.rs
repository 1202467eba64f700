//! How long something took, for people.

use std::fmt;
use std::time::Duration;

/// `0.8 s`, `47 s`, `3 min 29 s`.
pub(crate) struct Elapsed(pub(crate) Duration);

impl fmt::Display for Elapsed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs();
        // `pad` and not `write`: tables align it.
        f.pad(&match seconds {
            0..10 => format!("{:.1} s", self.0.as_secs_f64()),
            10..60 => format!("{seconds} s"),
            _ => format!("{} min {:02} s", seconds / 60, seconds % 60),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_times_have_a_tenth_and_long_ones_minutes() {
        let told: Vec<_> =
            [840, 47_200, 209_000].map(|ms| Elapsed(Duration::from_millis(ms)).to_string()).into();
        assert_eq!(told, ["0.8 s", "47 s", "3 min 29 s"]);
    }
}
