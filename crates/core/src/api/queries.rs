//! Questions to a Prometheus that are asked while a stage bakes.

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

/// The Prometheus that bakes ask.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct PrometheusSpec {
    /// Where it is, as the controller reaches it: what comes before `/api/v1/query`. A token and certificates for it are
    /// given to the controller, not written here.
    #[schemars(length(max = 512))]
    #[x_kube(validation = ("self.matches('^https?://[^/?#@ ]+(/[^?# ]*)?$')", "prometheus.url must be an address such as http://prometheus.monitoring:9090, without name, password and parameters"))]
    pub url: String,
}

/// A number that Prometheus knows, and what it must be while a stage bakes.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = ("has(self.min) || has(self.max)", "a query needs min, max or both: what its value must be"),
    validation = ("!has(self.min) || !has(self.max) || self.min <= self.max", "a query's min must not be above its max"),
)]
pub struct QuerySpec {
    /// Its name, for people.
    #[schemars(length(min = 1, max = 63))]
    #[x_kube(validation = ("self.matches('^[a-z0-9]([a-z0-9-]*[a-z0-9])?$')", "a query's name must be lower-case letters, digits and dashes, such as xid-errors"))]
    pub name: String,
    /// PromQL for a number, or for a series of them each of which must keep the bound.
    #[schemars(length(max = 2048))]
    #[x_kube(validation = ("self.matches('[^ ]')", "a query must not be empty: say in PromQL what Prometheus is asked"))]
    pub query: String,
    /// At least.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min: Option<f64>,
    /// At most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<f64>,
}
