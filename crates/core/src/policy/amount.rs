//! A number of nodes, or a share of them.

use std::fmt;

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

/// A number of nodes, or a percentage that rounds up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Amount {
    /// So many nodes.
    Nodes(u32),
    /// So many of a hundred, rounded up.
    Percent(u32),
}

/// A value that is neither a number nor a percentage.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("\"{0}\" is neither a number nor a percentage")]
pub struct BadAmount(pub String);

impl Amount {
    /// How many of `total` nodes.
    pub fn of(self, total: usize) -> usize {
        match self {
            Amount::Nodes(nodes) => nodes as usize,
            Amount::Percent(percent) => (total * percent as usize).div_ceil(100),
        }
    }
}

impl TryFrom<&IntOrString> for Amount {
    type Error = BadAmount;
    fn try_from(value: &IntOrString) -> Result<Self, BadAmount> {
        let (bad, amount) = match value {
            IntOrString::Int(n) => (n.to_string(), u32::try_from(*n).ok().map(Amount::Nodes)),
            IntOrString::String(text) => (text.clone(), percent(text)),
        };
        amount.ok_or(BadAmount(bad))
    }
}

fn percent(text: &str) -> Option<Amount> {
    let digits = text.strip_suffix('%').filter(|digits| digits.bytes().all(|b| b.is_ascii_digit()))?;
    let number = digits.parse().ok()?;
    (number <= 100).then_some(Amount::Percent(number))
}

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Amount::Nodes(nodes) => write!(f, "{nodes}"),
            Amount::Percent(percent) => write!(f, "{percent}%"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentages_round_up() {
        for (percent, total, nodes) in
            [(25, 24, 6), (25, 10, 3), (50, 5, 3), (0, 10, 0), (100, 7, 7), (1, 1, 1)]
        {
            assert_eq!(Amount::Percent(percent).of(total), nodes, "{percent}% of {total}");
        }
    }

    #[test]
    fn only_numbers_and_percentages_are_amounts() {
        let text = |t: &str| Amount::try_from(&IntOrString::String(t.to_owned()));
        assert_eq!(Amount::try_from(&IntOrString::Int(3)), Ok(Amount::Nodes(3)));
        assert_eq!(text("25%"), Ok(Amount::Percent(25)));
        for bad in ["5", "abc", "-1%", "+5%", "101%", "%", ""] {
            assert!(text(bad).is_err(), "{bad}");
        }
        assert!(Amount::try_from(&IntOrString::Int(-1)).is_err());
    }
}
