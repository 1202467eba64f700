//! Short texts that people write: versions, image tags, selectors, amounts, durations, states. Each is read or refused, and
//! what is read means what it says.
//!
//! The input is lines; every line is given to every reader.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::core::SelectorExt as _;
use pitcrew_controller::Feature;
use pitcrew_core::api::DriverPolicySpec;
use pitcrew_core::contract::State;
use pitcrew_core::names::ResourceVersion;
use pitcrew_core::policy::{self, Amount};
use pitcrew_core::selector::{self, Labels};
use pitcrew_core::snapshot::Sources;
use pitcrew_core::version::DriverVersion;
use serde_json::json;

/// Enough for comparisons between lines; more makes each input slow.
const LINES_MAX: usize = 16;

pub(crate) fn run(input: &str) {
    let lines: Vec<&str> = input.lines().take(LINES_MAX).collect();
    versions(&lines);
    for line in &lines {
        image(line);
        selects(line, &lines);
        amount(line);
        duration(line);
        names(line);
    }
}

/// Versions print as they were written and have one order.
fn versions(lines: &[&str]) {
    let versions: Vec<DriverVersion> = lines.iter().filter_map(|line| line.parse().ok()).collect();
    for version in &versions {
        let text = version.to_string();
        assert!(text.chars().all(|c| c.is_ascii_digit() || ".-".contains(c)), "\"{text}\" is a version");
        assert_eq!(text.parse().as_ref(), Ok(version));
        assert_eq!(format!("{text}.0").parse().as_ref(), Ok(version), "a zero at the end says nothing");
        for other in &versions {
            assert_eq!(version == other, version.cmp(other).is_eq());
            assert_eq!(version.cmp(other), other.cmp(version).reverse());
        }
    }
}

fn image(line: &str) {
    let found = DriverVersion::from_image(line);
    if let Some(version) = &found {
        assert!(line.contains(&version.to_string()), "{version} is not in \"{line}\"");
    }
    // Who writes a version as a tag finds it there.
    if let Ok(version) = line.parse::<DriverVersion>() {
        let image = format!("registry:5000/nvidia/driver:{line}-ubuntu22.04");
        assert_eq!(DriverVersion::from_image(&image), Some(version));
    }
}

fn selects(line: &str, lines: &[&str]) {
    let Ok(selector) = selector::parse(line) else { return };
    let text = selector.to_string();
    let again = selector::parse(&text).unwrap_or_else(|bad| panic!("\"{line}\" became \"{text}\": {bad}"));
    let pairs = lines.iter().filter_map(|line| line.split_once('='));
    let labels: Labels = pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
    for labels in [Labels::new(), labels] {
        assert_eq!(selector.matches(&labels), again.matches(&labels), "\"{line}\" became \"{text}\"");
    }
}

/// The same as admission takes.
fn amount(line: &str) {
    let digits = line.strip_suffix('%').filter(|digits| digits.bytes().all(|b| b.is_ascii_digit()));
    let percent: Option<u32> = digits.and_then(|digits| digits.parse().ok()).filter(|n| *n <= 100);
    let read = Amount::try_from(&IntOrString::String(line.to_owned()));
    assert_eq!(read.as_ref().ok(), percent.map(Amount::Percent).as_ref(), "\"{line}\"");
    if let Ok(number) = line.parse::<i32>() {
        let read = Amount::try_from(&IntOrString::Int(number));
        assert_eq!(read.ok(), u32::try_from(number).ok().map(Amount::Nodes));
    }
    if let Ok(amount) = read {
        for total in [0, 1, 3, 1000] {
            assert!(amount.of(total) <= total && amount.of(total) <= amount.of(total + 1));
        }
    }
}

/// A duration that admission takes is followed, and no other: `[0-9]+(d|h|m|s)`, once or more.
fn duration(line: &str) {
    let spec = json!({"driver": {"name": "gpu"}, "limits": {"driverReady": line}});
    let Ok(spec) = serde_json::from_value::<DriverPolicySpec>(spec) else { return };
    let mut sources = Sources::default();
    sources.driver_policies.insert("gpu".to_owned(), spec);
    let pools = policy::resolve(&sources, std::iter::empty(), "gpu-operator");
    let read = pools[0].policy.as_ref().ok().map(|policy| policy.limits.driver_ready);
    assert_eq!(read, admitted(line), "\"{line}\"");
    if let Some(limit) = read {
        let until = Timestamp::UNIX_EPOCH.saturating_add(limit).unwrap_or(Timestamp::MAX);
        assert!(until >= Timestamp::UNIX_EPOCH);
    }
}

/// Counted in another way than the program does.
fn admitted(text: &str) -> Option<SignedDuration> {
    let units = [('d', 86_400_i64), ('h', 3600), ('m', 60), ('s', 1)];
    let (mut sum, mut digits) = (0_i64, String::new());
    for c in text.chars() {
        if c.is_ascii_digit() {
            digits.push(c);
            continue;
        }
        let (_, seconds) = units.iter().find(|(unit, _)| *unit == c)?;
        let number: i64 = std::mem::take(&mut digits).parse().ok()?;
        sum = sum.checked_add(number.checked_mul(*seconds)?)?;
    }
    (digits.is_empty() && !text.is_empty()).then(|| SignedDuration::from_secs(sum))
}

fn names(line: &str) {
    if let Ok(state) = line.parse::<State>() {
        assert_eq!(state.as_str(), line);
    }
    if let Ok(feature) = line.parse::<Feature>() {
        assert_eq!(feature.to_string(), line);
    }
    if let Some(version) = ResourceVersion::parse(line) {
        assert_eq!(ResourceVersion::parse(&version.to_string()), Some(version));
    }
}
