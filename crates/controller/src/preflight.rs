//! What must be there before the controller starts, or a reader looks: each missing thing has one sentence that says
//! what to do.

use std::collections::BTreeSet;

use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use kube::Client;
use kube::api::{Api, ListParams, PostParams};
use kube::core::ObjectMeta;
use pitcrew_core::api::{DriverPolicy, Rollout};
use pitcrew_core::contract::{MATRIX_CONFIG_MAP, nvsentinel};

use crate::scope::Feature;
use crate::setback::sentence;

/// Why the controller cannot start, or a reader cannot look.
#[derive(Debug, thiserror::Error)]
pub enum Unfit {
    /// Nobody answers.
    #[error(
        "cannot reach the cluster: {0}. Check the address in the kubeconfig, or that you are connected to its network."
    )]
    Unreachable(String),
    /// Our own definitions are missing.
    #[error("the custom resource {0} is not installed. Install it with: pitcrew crd | kubectl apply -f -")]
    NoDefinition(&'static str),
    /// The API said no to something basic.
    #[error("cannot list {resource}: {what}")]
    Refused {
        /// The resource.
        resource: String,
        /// What the API says.
        what: String,
    },
    /// Permissions are missing.
    #[error("missing permissions: {}. Grant them to the user or service account that pitcrew runs as.", .0.join("; "))]
    Forbidden(Vec<String>),
}

/// Verbs on a resource.
#[derive(Clone, Copy, Debug)]
pub struct Permission {
    /// The API group; empty for the core.
    pub group: &'static str,
    /// The resource.
    pub resource: &'static str,
    /// The subresource; empty for the resource itself.
    pub subresource: &'static str,
    /// The verbs.
    pub verbs: &'static [&'static str],
    /// Only the object of this name.
    pub only: Option<&'static str>,
    /// Only in the controller's own namespace.
    pub here: bool,
    /// Not needed without this feature.
    pub feature: Option<Feature>,
}

const fn to(
    group: &'static str,
    resource: &'static str,
    subresource: &'static str,
    verbs: &'static [&'static str],
) -> Permission {
    Permission { group, resource, subresource, verbs, only: None, here: false, feature: None }
}

const SEES: &[&str] = &["list", "watch"];

const fn feature(feature: Feature, permission: Permission) -> Permission {
    Permission { feature: Some(feature), ..permission }
}

/// NVSentinel's circuit breaker.
const BREAKER: Permission = feature(
    Feature::Nvsentinel,
    Permission { only: Some(nvsentinel::BREAKER), ..to("", "configmaps", "", SEES) },
);
/// The version matrix is looked for in the own namespace only.
const MATRIX: Permission =
    Permission { only: Some(MATRIX_CONFIG_MAP), here: true, ..to("", "configmaps", "", SEES) };
/// What the DRA plugin offers.
const SLICES: Permission = feature(Feature::Clients, to("resource.k8s.io", "resourceslices", "", SEES));
/// Leadership is a matter of the own namespace; a live GPU Operator may be in any.
const OWN_LEASE: Permission =
    Permission { here: true, ..to("coordination.k8s.io", "leases", "", &["get", "create", "update"]) };

/// Gates run in the own namespace, and nowhere else.
const GATES: Permission = Permission { here: true, ..to("batch", "jobs", "", &["list", "watch", "create"]) };

/// All that the controller asks for.
pub const PERMISSIONS: &[Permission] = &[
    to("", "nodes", "", &["get", "list", "watch", "patch"]),
    to("", "pods", "", &["list", "watch", "patch", "delete"]),
    to("", "pods", "eviction", &["create"]),
    to("", "events", "", &["create"]),
    to("apps", "daemonsets", "", &["list", "watch", "patch"]),
    to("apps", "controllerrevisions", "", SEES),
    to("apps", "deployments", "", SEES),
    to("policy", "poddisruptionbudgets", "", SEES),
    BREAKER,
    MATRIX,
    to("resource.k8s.io", "resourceclaims", "", SEES),
    SLICES,
    to("coordination.k8s.io", "leases", "", SEES),
    OWN_LEASE,
    GATES,
    to("apiextensions.k8s.io", "customresourcedefinitions", "", SEES),
    to("nvidia.com", "clusterpolicies", "", &["list", "watch", "patch"]),
    to("nvidia.com", "nvidiadrivers", "", &["list", "watch", "patch"]),
    feature(Feature::NetworkOperator, to("mellanox.com", "nicclusterpolicies", "", SEES)),
    to("pitcrew.dev", "driverpolicies", "", SEES),
    to("pitcrew.dev", "driverpolicies", "status", &["patch"]),
    to("pitcrew.dev", "rollouts", "", &["list", "watch", "create", "delete"]),
    to("pitcrew.dev", "rollouts", "status", &["patch"]),
];

/// All that a reader asks for: to see what the controller sees. Kinds that nobody serves are asked for too: who may not
/// list them, may not know. Definitions are not: they only tell when to begin.
pub fn reads() -> impl Iterator<Item = Permission> {
    let seen = |p: &&Permission| p.verbs.contains(&"list") && p.resource != "customresourcedefinitions";
    PERMISSIONS.iter().filter(seen).map(|permission| Permission { verbs: SEES, here: false, ..*permission })
}

/// Checks that the cluster answers, that our definitions are there, and that we may do what we have to.
pub async fn check(client: &Client, namespace: &str, disabled: &BTreeSet<Feature>) -> Result<(), Unfit> {
    if let Err(error) = client.apiserver_version().await
        && !matches!(error, kube::Error::Api(_))
    {
        return Err(Unfit::Unreachable(sentence(&error)));
    }
    let needed = |p: &&Permission| p.feature.is_none_or(|feature| !disabled.contains(&feature));
    permissions(client, namespace, PERMISSIONS.iter().filter(needed).copied()).await?;
    definition(
        Api::<DriverPolicy>::all(client.clone()).list(&one()).await.err(),
        "driverpolicies.pitcrew.dev",
    )?;
    definition(Api::<Rollout>::all(client.clone()).list(&one()).await.err(), "rollouts.pitcrew.dev")
}

fn one() -> ListParams {
    ListParams::default().limit(1)
}

fn definition(error: Option<kube::Error>, resource: &'static str) -> Result<(), Unfit> {
    match error {
        None => Ok(()),
        // A group that nobody serves is answered in plain text, without a Status to ask.
        Some(kube::Error::Api(status)) if status.code == 404 => Err(Unfit::NoDefinition(resource)),
        Some(error) => Err(refused(resource, &error)),
    }
}

/// What a failed list means.
pub(crate) fn refused(resource: &str, error: &kube::Error) -> Unfit {
    match error {
        kube::Error::Api(_) => Unfit::Refused { resource: resource.to_owned(), what: sentence(error) },
        _ => Unfit::Unreachable(sentence(error)),
    }
}

/// Asks for every verb and names all that are missing at once.
pub(crate) async fn permissions(
    client: &Client,
    namespace: &str,
    wanted: impl Iterator<Item = Permission>,
) -> Result<(), Unfit> {
    let api = Api::<SelfSubjectAccessReview>::all(client.clone());
    let mut missing = Vec::new();
    for permission in wanted {
        let Permission { group, resource, subresource, verbs, only, here, .. } = permission;
        let mut denied = Vec::new();
        for verb in verbs {
            if !may(&api, &permission, verb, namespace).await? {
                denied.push(*verb);
            }
        }
        if !denied.is_empty() {
            let slash = if subresource.is_empty() { "" } else { "/" };
            let dot = if group.is_empty() { "" } else { "." };
            let only = only.map(|name| format!(" ({name})")).unwrap_or_default();
            let place = if here { format!(" in {namespace}") } else { String::new() };
            missing.push(format!(
                "{resource}{dot}{group}{slash}{subresource}{only} {}{place}",
                denied.join(", ")
            ));
        }
    }
    if missing.is_empty() { Ok(()) } else { Err(Unfit::Forbidden(missing)) }
}

async fn may(
    api: &Api<SelfSubjectAccessReview>,
    permission: &Permission,
    verb: &str,
    namespace: &str,
) -> Result<bool, Unfit> {
    let attributes = ResourceAttributes {
        group: Some(permission.group.to_owned()),
        resource: Some(permission.resource.to_owned()),
        subresource: Some(permission.subresource.to_owned()).filter(|s| !s.is_empty()),
        name: permission.only.map(str::to_owned),
        namespace: permission.here.then(|| namespace.to_owned()),
        verb: Some(verb.to_owned()),
        ..ResourceAttributes::default()
    };
    let spec = SelfSubjectAccessReviewSpec {
        resource_attributes: Some(attributes),
        ..SelfSubjectAccessReviewSpec::default()
    };
    let review = SelfSubjectAccessReview { metadata: ObjectMeta::default(), spec, status: None };
    match api.create(&PostParams::default(), &review).await {
        Ok(review) => Ok(review.status.is_some_and(|status| status.allowed)),
        // Who may not even ask learns it from the first call that is refused.
        Err(kube::Error::Api(status)) if status.code == 403 || status.code == 404 => Ok(true),
        Err(error) => Err(refused("selfsubjectaccessreviews", &error)),
    }
}
