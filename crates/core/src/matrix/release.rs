//! Versions of everything that is no driver: operators, CUDA, firmware, OpenShift. They come with and without a `v` and
//! with build stamps, so they are compared by what they mean and printed as they were written.

use std::cmp::Ordering;
use std::fmt;

/// A number with this many digits after the version is the moment of a build, as in `4.18.0-202509240837`.
const STAMP_MIN: u64 = 100_000_000_000;

/// A version such as `v24.9.0`, `12.6` or `4.18.0-202509240837`. `v24.9.0` equals `24.9`.
#[derive(Clone, Debug)]
pub struct Release {
    parts: Vec<Part>,
    text: String,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    Number(u64),
    Word(String),
}

impl Release {
    /// Reads a version; every text is one.
    pub fn new(text: &str) -> Self {
        let digits =
            text.strip_prefix(['v', 'V']).filter(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
        let part = |part: &str| match part.parse() {
            Ok(number) if part.bytes().all(|byte| byte.is_ascii_digit()) => Part::Number(number),
            _ => Part::Word(part.to_owned()),
        };
        let parts = digits.unwrap_or(text).split(['.', '-', '+', '_']).map(part).collect();
        Self { parts: significant(parts), text: text.to_owned() }
    }

    /// The version in the name of an OLM bundle, which its Deployment carries as the label `olm.owner`:
    /// `sriov-network-operator.v4.18.0-202509240837` → `v4.18.0-202509240837`.
    pub fn from_bundle(name: &str) -> Option<Self> {
        let (_, version) = name.split_once('.')?;
        let digits = version.strip_prefix('v').unwrap_or(version);
        digits.starts_with(|c: char| c.is_ascii_digit()).then(|| Self::new(version))
    }

    /// Whether `seen` is what this states. A build stamp that is not stated does not matter.
    pub fn is_met_by(&self, seen: &Release) -> bool {
        self == seen || self.parts == seen.without_stamp()
    }

    /// The first number. Of a network adapter's firmware it is the family: 28 is ConnectX-7, 22 ConnectX-6 Dx.
    pub(super) fn family(&self) -> Option<u64> {
        match self.parts.first() {
            Some(Part::Number(number)) => Some(*number),
            _ => None,
        }
    }

    fn without_stamp(&self) -> Vec<Part> {
        let mut parts = self.parts.clone();
        if matches!(parts.last(), Some(Part::Number(number)) if *number >= STAMP_MIN) {
            parts.pop();
        }
        significant(parts)
    }
}

/// 24.9.0 is 24.9.
fn significant(mut parts: Vec<Part>) -> Vec<Part> {
    while parts.len() > 1 && parts.last() == Some(&Part::Number(0)) {
        parts.pop();
    }
    parts
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.text)
    }
}
impl PartialEq for Release {
    fn eq(&self, other: &Self) -> bool {
        self.parts == other.parts
    }
}
impl Eq for Release {}
impl PartialOrd for Release {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Release {
    fn cmp(&self, other: &Self) -> Ordering {
        self.parts.cmp(&other.parts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_what_they_mean() {
        for (a, b, same) in [
            ("v24.9.0", "24.9.0", true),
            ("v24.9.0", "v24.9", true),
            ("12.6", "12.06", true),
            ("12.1", "12.10", false),
            ("v24.9.0", "v24.9.0-rc.1", false),
            ("4.18.0", "4.18.0-202509240837", false),
            ("stable", "stable", true),
            ("vanilla", "anilla", false),
            ("0", "0.0", true),
        ] {
            assert_eq!(Release::new(a) == Release::new(b), same, "{a} {b}");
        }
        assert!(Release::new("12.9") < Release::new("12.10"));
        assert_eq!(Release::new("v24.9.0").to_string(), "v24.9.0");
    }

    #[test]
    fn a_build_stamp_matters_only_if_it_is_stated() {
        for (stated, seen, met) in [
            ("4.18.0", "4.18.0-202509240837", true),
            ("4.18.0-202509240837", "4.18.0-202509240837", true),
            ("4.18.0-202509240837", "4.18.0", false),
            ("4.18.0-202509240837", "4.18.0-202501230001", false),
            ("4.18.1", "4.18.0-202509240837", false),
            ("v24.9.0", "v24.9.0-rc.1", false),
            ("28.42.1000", "28.42.1000", true),
        ] {
            assert_eq!(Release::new(stated).is_met_by(&Release::new(seen)), met, "{stated} {seen}");
        }
    }

    #[test]
    fn a_bundle_tells_its_version() {
        for (bundle, version) in [
            ("sriov-network-operator.v4.18.0-202509240837", Some("v4.18.0-202509240837")),
            ("gpu-operator-certified.v24.9.0", Some("v24.9.0")),
            ("ptp-operator.4.12.0-202304111715", Some("4.12.0-202304111715")),
            ("packageserver", None),
            ("some.operator", None),
        ] {
            assert_eq!(Release::from_bundle(bundle).map(|found| found.to_string()).as_deref(), version);
        }
    }
}
