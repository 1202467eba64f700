//! When nodes may start: the hours that repeat, and the dates on which nothing starts.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Hours that repeat, in which nodes may start.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct WindowSpec {
    /// The days on which it begins. Empty: every day.
    #[serde(default)]
    #[schemars(length(max = 7))]
    pub days: Vec<Day>,
    /// The time of day at which it begins: `22:00`. On a day on which the clocks jump over that time it begins right after the jump.
    #[schemars(length(max = 5))]
    #[x_kube(validation = ("self.matches('^([01][0-9]|2[0-3]):[0-5][0-9]$')", "windows.start must be a time of day from 00:00 to 23:59, such as 22:00"))]
    pub start: String,
    /// How long it lasts: `4h`. That is real time, also in nights in which the clocks change.
    #[schemars(length(max = 12))]
    #[x_kube(validation = ("self.matches('^([0-9]+(d|h|m|s))+$') && self.matches('[1-9]')", "windows.duration must be a duration of more than 0, such as 4h"))]
    pub duration: String,
    /// The time zone of days and start by its IANA name, such as Europe/Berlin. Not set: UTC.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    #[x_kube(validation = ("self.matches('^[A-Za-z0-9_+/-]+$')", "windows.timeZone must be an IANA name such as Europe/Berlin"))]
    pub time_zone: Option<String>,
}

/// A day of the week.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, JsonSchema)]
pub enum Day {
    /// Monday.
    Mon,
    /// Tuesday.
    Tue,
    /// Wednesday.
    Wed,
    /// Thursday.
    Thu,
    /// Friday.
    Fri,
    /// Saturday.
    Sat,
    /// Sunday.
    Sun,
}

/// Dates on which nothing starts, and into which no visit is expected to last.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = ("!has(self.until) || self.from <= self.until", "blackouts.until must not be before blackouts.from"))]
pub struct BlackoutSpec {
    /// The first day: `2026-12-24`.
    #[schemars(length(max = 10))]
    #[x_kube(validation = ("self.matches('^[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|[12][0-9]))$')", "blackouts.from must be a date such as 2026-12-24"))]
    pub from: String,
    /// The last day. Not set: it is one day.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 10))]
    #[x_kube(validation = ("self.matches('^[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|[12][0-9]))$')", "blackouts.until must be a date such as 2027-01-01"))]
    pub until: Option<String>,
    /// The time zone in which these are days, by its IANA name. Not set: UTC.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    #[x_kube(validation = ("self.matches('^[A-Za-z0-9_+/-]+$')", "blackouts.timeZone must be an IANA name such as Europe/Berlin"))]
    pub time_zone: Option<String>,
}
