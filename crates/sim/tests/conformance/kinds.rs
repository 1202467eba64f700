//! The kinds that sequences play with: where they live, and what can be wanted of each (`bodies.rs`).
//!
//! Values come from small pools, so that writes meet: the same edit twice is a write that changes nothing.

use fastrand::Rng;
use serde_json::{Value, json};

/// One kind.
#[expect(clippy::struct_field_names, reason = "`kind` is what Kubernetes calls it")]
pub(crate) struct Kind {
    /// `/api/v1`, `/apis/apps/v1`.
    pub(crate) root: &'static str,
    pub(crate) plural: &'static str,
    pub(crate) kind: &'static str,
    pub(crate) namespaced: bool,
    pub(crate) has_status: bool,
    /// How often it is chosen.
    pub(crate) weight: usize,
}

const fn kind(
    root: &'static str,
    plural: &'static str,
    kind: &'static str,
    namespaced: bool,
    has_status: bool,
    weight: usize,
) -> Kind {
    Kind { root, plural, kind, namespaced, has_status, weight }
}

#[rustfmt::skip] // a table
pub(crate) const KINDS: &[Kind] = &[
    kind("/api/v1", "pods", "Pod", true, true, 12),
    kind("/api/v1", "nodes", "Node", false, true, 8),
    kind("/api/v1", "configmaps", "ConfigMap", true, false, 5),
    kind("/apis/apps/v1", "daemonsets", "DaemonSet", true, true, 4),
    kind("/apis/apps/v1", "deployments", "Deployment", true, true, 3),
    kind("/apis/apps/v1", "controllerrevisions", "ControllerRevision", true, false, 2),
    kind("/apis/policy/v1", "poddisruptionbudgets", "PodDisruptionBudget", true, true, 4),
    kind("/apis/coordination.k8s.io/v1", "leases", "Lease", true, false, 3),
    kind("/api/v1", "events", "Event", true, false, 2),
    kind("/api/v1", "namespaces", "Namespace", false, true, 1),
    kind("/apis/resource.k8s.io/v1", "resourceclaims", "ResourceClaim", true, true, 2),
    kind("/apis/resource.k8s.io/v1", "resourceslices", "ResourceSlice", false, false, 2),
    kind("/apis/pitcrew.dev/v1alpha1", "driverpolicies", "DriverPolicy", false, true, 5),
    kind("/apis/pitcrew.dev/v1alpha1", "rollouts", "Rollout", false, true, 4),
];

pub(crate) fn named(plural: &str) -> &'static Kind {
    KINDS.iter().find(|kind| kind.plural == plural).unwrap_or(&KINDS[0])
}

impl Kind {
    /// Where its objects are listed.
    pub(crate) fn collection(&self) -> String {
        if self.namespaced {
            format!("{}/namespaces/<ns>/{}", self.root, self.plural)
        } else {
            format!("{}/{}", self.root, self.plural)
        }
    }

    /// The object's name on the server: cluster-wide names carry the name of the play.
    pub(crate) fn name(&self, name: &str) -> String {
        if self.namespaced { name.to_owned() } else { format!("<run>-{name}") }
    }

    pub(crate) fn path(&self, name: &str) -> String {
        format!("{}/{}", self.collection(), self.name(name))
    }

    /// The object in a mark: `pods/a`, `nodes/@-a`.
    pub(crate) fn key(&self, name: &str) -> String {
        if self.namespaced { format!("{}/{name}", self.plural) } else { format!("{}/@-{name}", self.plural) }
    }

    pub(crate) fn is_custom(&self) -> bool {
        self.root.contains("pitcrew.dev")
    }

    pub(crate) fn api_version(&self) -> &'static str {
        self.root.trim_start_matches("/apis/").trim_start_matches("/api/")
    }

    /// What a real server does not take a new object without: only custom resources are validated here.
    fn required(&self) -> Value {
        match self.kind {
            "Pod" => json!({"spec": {"containers": [{"name": "main", "image": "image:1"}]}}),
            "DaemonSet" | "Deployment" => {
                json!({"spec": {"selector": {"matchLabels": {"app": "x"}}, "template": {"metadata": {"labels": {"app": "x"}},
                "spec": {"containers": [{"name": "main", "image": "image:1"}]}}}})
            }
            "ControllerRevision" => json!({"data": {"spec": {"word": "a"}}, "revision": 1}),
            "Event" => json!({"involvedObject": {"kind": "Pod", "namespace": "<ns>", "name": "a"}}),
            "ResourceClaim" => {
                json!({"spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"allocationMode": "ExactCount", "count": 1, "deviceClassName": "gpu.example.com"}}]}}})
            }
            "ResourceSlice" => {
                json!({"spec": {"driver": "gpu.example.com", "nodeName": "node-1", "pool": {"name": "pool", "generation": 1, "resourceSliceCount": 1}}})
            }
            _ => json!({}),
        }
    }

    /// What a manager wants of an object.
    pub(crate) fn config(&self, chance: &mut Rng, status: bool) -> Value {
        let wanted = if status { self.status_edit(chance) } else { self.edit(chance) };
        let mut config = if status { json!({}) } else { self.required() };
        json_patch::merge(
            &mut config,
            &json!({"apiVersion": self.api_version(), "kind": self.kind, "metadata": {}}),
        );
        if chance.bool() {
            config["metadata"]["labels"] = json!({"run": "<run>", "app": label(chance)});
        }
        if chance.u8(..4) == 0 {
            config["metadata"]["annotations"] = json!({"note": word(chance)});
        }
        json_patch::merge(&mut config, &wanted);
        if let Some(metadata) = config["metadata"].as_object_mut() {
            metadata.retain(|_, value| *value != json!({}));
        }
        config
    }

    /// A field selector that the kind knows, or nearly.
    pub(crate) fn field_selector(&self, chance: &mut Rng, name: &str) -> String {
        let by_name = format!("metadata.name={}", self.name(name));
        let others = match self.kind {
            "Pod" => [
                "spec.nodeName=node-1",
                "status.phase=Running",
                "spec.nodeName=",
                "status.phase!=Failed",
                "spec.nodeName!=node-1,status.phase=Pending",
                "spec.restartPolicy=Always",
            ]
            .as_slice(),
            "Node" => ["spec.unschedulable=true", "spec.unschedulable=false"].as_slice(),
            "Event" => ["involvedObject.name=a", "reason=Tested", "type!=Normal", "involvedObject.kind=Pod"]
                .as_slice(),
            "ResourceSlice" => {
                ["spec.nodeName=node-1", "spec.nodeName=node-2", "spec.driver=gpu.example.com"].as_slice()
            }
            "Namespace" => ["status.phase=Active"].as_slice(),
            _ => ["spec.wrong=1"].as_slice(),
        };
        if chance.bool() { by_name } else { others[chance.usize(..others.len())].to_owned() }
    }
}

/// Labels, annotations, finalizers; and what a client cannot set.
pub(crate) fn meta_edit(chance: &mut Rng) -> Value {
    let edits = [
        json!({"labels": {"app": label(chance)}}),
        json!({"labels": {"app": null}}),
        json!({"labels": {"more": word(chance)}}),
        json!({"annotations": {"note": word(chance)}}),
        json!({"annotations": {"note": null}}),
        json!({"annotations": null}),
        json!({"finalizers": ["example.com/hold"]}),
        json!({"finalizers": null}),
        json!({"finalizers": null}),
        json!({"finalizers": ["example.com/hold", "example.com/other"]}),
        json!({"generation": 77}),
        json!({"creationTimestamp": "2025-01-01T00:00:00Z"}),
    ];
    json!({"metadata": one_of(&edits, chance)})
}

pub(crate) fn one_of(values: &[Value], chance: &mut Rng) -> Value {
    values[chance.usize(..values.len())].clone()
}

pub(crate) fn word(chance: &mut Rng) -> &'static str {
    ["a", "b", "c"][chance.usize(..3)]
}

pub(crate) fn label(chance: &mut Rng) -> &'static str {
    ["x", "x", "y"][chance.usize(..3)]
}
