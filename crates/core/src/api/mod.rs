//! The custom resources: our own with schema and rules, NVIDIA's as far as they are read.

#[expect(unreachable_pub, reason = "KubeSchema's expansion repeats the structs where nobody can reach them")]
mod driver_policy;
mod foreign;
#[expect(unreachable_pub, reason = "KubeSchema's expansion repeats the structs where nobody can reach them")]
mod gates;
#[expect(unreachable_pub, reason = "as above")]
mod matrix;
#[expect(unreachable_pub, reason = "as above")]
mod queries;
mod rollback;
mod rollout;
#[expect(unreachable_pub, reason = "as above")]
mod rollout_policy;
mod stage;
#[expect(unreachable_pub, reason = "as above")]
mod topology;
#[expect(unreachable_pub, reason = "as above")]
mod windows;

pub use driver_policy::*;
pub use foreign::*;
pub use gates::*;
pub use matrix::*;
pub use queries::*;
pub use rollback::*;
pub use rollout::*;
pub use rollout_policy::*;
pub use stage::*;
pub use topology::*;
pub use windows::*;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;

/// pitcrew's own custom resource definitions.
pub fn crds() -> Vec<CustomResourceDefinition> {
    vec![DriverPolicy::crd(), Rollout::crd()]
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_definitions_change_only_on_purpose() {
        insta::assert_json_snapshot!(super::crds());
    }
}
