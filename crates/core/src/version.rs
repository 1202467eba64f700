//! Driver versions. `535.104.05` equals `535.104.5` and prints as it was written.

use std::cmp::Ordering;
use std::fmt;
use std::str::FromStr;

/// A driver version such as `565.57.01` or `24.10-1.1.4`: numbers, separated by dots or dashes.
#[derive(Clone, Debug)]
pub struct DriverVersion {
    numbers: Vec<u64>,
    text: String,
}

/// A text that is no driver version.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("\"{0}\" is not a driver version (expected numbers with dots, such as 565.57.01)")]
pub struct BadVersion(String);

impl FromStr for DriverVersion {
    type Err = BadVersion;
    fn from_str(text: &str) -> Result<Self, BadVersion> {
        let number =
            |part: &str| part.bytes().all(|b| b.is_ascii_digit()).then(|| part.parse().ok()).flatten();
        let numbers: Option<Vec<u64>> = text.split(['.', '-']).map(number).collect();
        let Some(mut numbers) = numbers.filter(|numbers| numbers.len() > 1) else {
            return Err(BadVersion(text.to_owned()));
        };
        // 550.142 is published as 550.142.0 by whoever needs three numbers.
        while numbers.last() == Some(&0) {
            numbers.pop();
        }
        Ok(Self { numbers, text: text.to_owned() })
    }
}

impl DriverVersion {
    /// The version in a driver image's tag, `nvcr.io/nvidia/driver:565.57.01-ubuntu22.04` → `565.57.01`.
    pub fn from_image(image: &str) -> Option<Self> {
        let tag = image.rsplit('/').next()?.split('@').next()?.split_once(':')?.1;
        let end = tag.find(|c: char| !(c.is_ascii_digit() || c == '.' || c == '-')).unwrap_or(tag.len());
        tag[..end].trim_end_matches(['-', '.']).parse().ok()
    }
}

impl fmt::Display for DriverVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.text)
    }
}
impl PartialEq for DriverVersion {
    fn eq(&self, other: &Self) -> bool {
        self.numbers == other.numbers
    }
}
impl Eq for DriverVersion {}
impl PartialOrd for DriverVersion {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for DriverVersion {
    fn cmp(&self, other: &Self) -> Ordering {
        self.numbers.cmp(&other.numbers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leading_zeros_do_not_matter_and_are_kept() {
        let written: DriverVersion = "535.104.05".parse().unwrap();
        assert_eq!(written, "535.104.5".parse().unwrap());
        assert_eq!(written.to_string(), "535.104.05");
        assert!(written < "550.54.15".parse().unwrap());
        let two: DriverVersion = "550.142".parse().unwrap();
        assert_eq!(two, "550.142.0".parse().unwrap());
        assert!(two < "550.142.1".parse().unwrap());
        for bad in ["latest", "535.+104", "535", "", "1..2"] {
            assert!(bad.parse::<DriverVersion>().is_err(), "{bad}");
        }
    }

    #[test]
    fn the_image_tag_tells_the_version() {
        for (image, version) in [
            ("nvcr.io/nvidia/driver:565.57.01-ubuntu22.04", Some("565.57.01")),
            ("registry:5000/driver:390.157", Some("390.157")),
            ("nvcr.io/nvidia/doca:24.10-1.1.4", Some("24.10-1.1.4")),
            ("nvcr.io/nvidia/driver@sha256:abc", None),
            ("nvcr.io/nvidia/driver", None),
        ] {
            assert_eq!(
                DriverVersion::from_image(image).map(|v| v.to_string()).as_deref(),
                version,
                "{image}"
            );
        }
    }
}
