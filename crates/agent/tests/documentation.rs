//! The manifest in `docs/node.md`, as somebody copies it.

#![allow(clippy::unwrap_used, clippy::panic, reason = "what these tests do not expect is a failure")]

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::PodTemplateSpec;
use serde_json::Value;

const DOCUMENTATION: &str = include_str!("../../../docs/node.md");

/// The pod of the documented DaemonSet.
fn pod() -> PodTemplateSpec {
    let blocks = DOCUMENTATION.split("```yaml\n").skip(1).filter_map(|rest| rest.split("```").next());
    let manifest = blocks.into_iter().find(|block| block.contains("volumeMounts")).unwrap();
    let manifest: Value = serde_saphyr::from_str(manifest).unwrap();
    // A field that Kubernetes does not know would be dropped without a word.
    let template = manifest.pointer("/spec/template").unwrap().clone();
    let pod: PodTemplateSpec = serde_json::from_value(template.clone()).unwrap();
    let mut read = serde_json::to_value(&pod).unwrap();
    read.as_object_mut().unwrap().retain(|_, value| !value.is_null());
    assert_eq!(read, template);
    pod
}

#[test]
fn every_mount_of_the_documented_manifest_has_its_volume_and_every_volume_is_mounted() {
    let spec = pod().spec.unwrap();
    assert_eq!(spec.host_pid, Some(true));
    let volumes: BTreeMap<String, String> = spec
        .volumes
        .into_iter()
        .flatten()
        .map(|volume| (volume.name, volume.host_path.unwrap().path))
        .collect();
    let containers = spec.init_containers.into_iter().flatten().chain(spec.containers);
    let mounts: Vec<_> =
        containers.flat_map(|container| container.volume_mounts.into_iter().flatten()).collect();
    for mount in &mounts {
        let path = volumes.get(&mount.name).unwrap_or_else(|| panic!("no volume {}", mount.name));
        // Where the agent looks is where the host has it, below `/host` or at the same place.
        let expected = if mount.mount_path == "/host" { "/" } else { &mount.mount_path };
        assert_eq!(path, expected);
    }
    let mounted: BTreeSet<&String> = mounts.iter().map(|mount| &mount.name).collect();
    assert_eq!(mounted, volumes.keys().collect());
}

#[test]
fn the_documented_manifest_mounts_what_the_table_asks_for() {
    let row = DOCUMENTATION.lines().find(|line| line.starts_with("| mounts |")).unwrap();
    let asked = row.split('|').nth(2).unwrap().split('`').skip(1).step_by(2);
    let manager = pod().spec.unwrap().init_containers.unwrap().remove(0);
    let mounted: BTreeSet<String> =
        manager.volume_mounts.unwrap().into_iter().map(|mount| mount.mount_path).collect();
    assert_eq!(asked.map(str::to_owned).collect::<BTreeSet<String>>(), mounted);
}
