//! The DRA plugin: under which names it runs, what it publishes, and what its staleness does to claims.

use k8s_openapi::api::core::v1::Event;
use k8s_openapi::api::resource::v1::ResourceSlice;

use super::clients::main_of;
use super::*;
use crate::actors::{DRA_DRIVER, Dra, DraIdentity, Fault, Nodes, Timing, is_plugin};

const OLD: &str = "580.95.05";
const NEW: &str = "580.105.08";

fn slow() -> Behaviour {
    Behaviour::default().with_timing(Timing::real())
}

fn fleet() -> Fleet {
    Fleet::new(1).with_workloads(Vec::new()).with_driver(OLD).with_dra(DraIdentity::NvidiaChart)
}

impl Cluster {
    pub(super) async fn plugin(&self) -> Pod {
        self.pods("").await.into_iter().find(is_plugin).expect("a plugin")
    }

    async fn restart_plugin(&self) {
        self.delete(&self.plugin().await).await;
        seconds(100).await;
        assert!(is_ready(&self.plugin().await));
    }

    async fn slices(&self) -> Vec<ResourceSlice> {
        let slices: Api<ResourceSlice> = Api::all(self.client.clone());
        slices.list(&ListParams::default()).await.unwrap().items
    }

    /// Generation of the pool and versions of the devices, slice by slice.
    async fn published(&self) -> Vec<(i64, Vec<String>)> {
        let versions = |slice: &ResourceSlice| {
            let devices = slice.spec.devices.iter().flatten();
            let mut versions: Vec<String> = devices
                .filter_map(|device| device.attributes.as_ref()?.get("driverVersion")?.version.clone())
                .collect();
            versions.dedup();
            versions
        };
        self.slices().await.iter().map(|slice| (slice.spec.pool.generation, versions(slice))).collect()
    }

    /// A pod with a claim, a while after its creation.
    async fn claimant(&self, name: &str) -> Pod {
        let pod = json!({
            "nodeName": "gpu-01",
            "resourceClaims": [{"name": "gpu", "resourceClaimName": name}],
            "containers": [{"name": "main", "image": "m:1"}],
        });
        self.create::<Pod>("default", json!({"metadata": {"name": name}, "spec": pod})).await;
        seconds(60).await;
        self.get("default", name).await
    }

    async fn complaints(&self, pod: &str) -> Vec<String> {
        let events: Api<Event> = Api::namespaced(self.client.clone(), "default");
        let events = events.list(&ListParams::default()).await.unwrap().items;
        let about = events.into_iter().filter(|event| event.involved_object.name.as_deref() == Some(pod));
        about.filter_map(|event| event.message).collect()
    }
}

fn published(generation: i64, version: &str) -> Vec<(i64, Vec<String>)> {
    vec![(generation, vec![version.to_owned()])]
}

fn waiting_reason(pod: &Pod) -> Option<String> {
    let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
    statuses.first()?.state.as_ref()?.waiting.as_ref()?.reason.clone()
}

#[tokio::test(start_paused = true)]
async fn a_plugin_goes_by_many_names() {
    let component = "nvidia-dra-driver-gpu-component";
    let by_identity = [
        (DraIdentity::NvidiaChart, "nvidia-dra-driver-gpu/nvidia-dra-driver-gpu-kubelet-plugin", component),
        (
            DraIdentity::NvidiaChartRelabelled,
            "nvidia-dra-driver-gpu/nvidia-dra-driver-gpu-kubelet-plugin",
            "example.com/part",
        ),
        (
            DraIdentity::SigsChart,
            "dra-driver-nvidia-gpu/dra-driver-nvidia-gpu-kubelet-plugin",
            "dra-driver-nvidia-gpu-component",
        ),
        (DraIdentity::Operator, "gpu-operator/nvidia-dra-driver-kubelet-plugin", "app"),
    ];
    for (identity, place, label) in by_identity {
        let cluster = Cluster::of(&fleet().with_dra(identity), Behaviour::default()).await;
        seconds(1).await;
        let plugin = cluster.plugin().await;
        let owner = crate::actors::object::controller_of(&plugin).unwrap().name.clone();
        assert_eq!(format!("{}/{owner}", plugin.namespace().unwrap()), place);
        assert!(plugin.labels().contains_key(label), "{:?}", plugin.labels());
        assert_eq!(plugin.labels().contains_key(component), identity == DraIdentity::NvidiaChart);
        let set: DaemonSet = cluster.get(identity.namespace(), &identity.daemon_set()).await;
        assert!(set.labels().keys().all(|key| !key.ends_with("-component")));
        assert_eq!(cluster.published().await, published(1, "580.95.5"));
    }
}

#[tokio::test(start_paused = true)]
async fn a_plugin_publishes_the_devices_of_its_node() {
    let cluster = Cluster::new(slow());
    fleet().install(&cluster.client).await.unwrap();
    seconds(60).await;
    // The driver is not ready, so the plugin waits.
    assert_eq!((main_of(&cluster.plugin().await).started, cluster.slices().await.len()), (None, 0));
    seconds(240).await;
    let slice = cluster.slices().await.remove(0);
    assert_eq!((slice.spec.driver.as_str(), slice.spec.node_name.as_deref()), (DRA_DRIVER, Some("gpu-01")));
    let pool = slice.spec.pool;
    assert_eq!((pool.name.as_str(), pool.generation, pool.resource_slice_count), ("gpu-01", 1, 1));
    assert_eq!(slice.spec.devices.unwrap().len(), 8);
    assert_eq!(slice.metadata.owner_references.unwrap()[0].name, "gpu-01");
}

#[tokio::test(start_paused = true)]
async fn a_plugin_that_nobody_restarts_keeps_the_old_version_in_its_slices() {
    let cluster = Cluster::of(&fleet(), slow().with_driver_manager()).await;
    cluster.upgrade_driver(NEW).await;
    assert!(main_of(&cluster.plugin().await).started < main_of(&cluster.driver().await).started);
    assert_eq!(cluster.published().await, published(1, "580.95.5"));
    cluster.restart_plugin().await;
    assert!(main_of(&cluster.plugin().await).started > main_of(&cluster.driver().await).started);
    assert_eq!(cluster.published().await, published(2, "580.105.8"));
}

#[tokio::test(start_paused = true)]
async fn a_plugin_restarted_before_its_node_migrated_is_as_stale_as_one_that_was_not() {
    let cluster = Cluster::of(&fleet(), slow()).await;
    cluster.set_version(NEW).await;
    cluster.restart_plugin().await;
    assert_eq!(cluster.published().await, published(2, "580.95.5"));
    cluster.upgrade_driver(NEW).await;
    assert!(is_ready(&cluster.plugin().await));
    assert_eq!(cluster.published().await, published(2, "580.95.5"));
}

#[tokio::test(start_paused = true)]
async fn a_plugin_restarted_while_the_driver_is_away_waits_for_the_new_one() {
    let cluster = Cluster::of(&fleet(), slow()).await;
    cluster.set_version(NEW).await;
    seconds(1).await;
    cluster.delete(&cluster.driver().await).await;
    cluster.delete(&cluster.plugin().await).await;
    seconds(60).await;
    assert_eq!(main_of(&cluster.plugin().await).started, None);
    seconds(240).await;
    assert_eq!(cluster.published().await, published(2, "580.105.8"));
}

#[tokio::test(start_paused = true)]
async fn a_claim_on_a_node_with_a_stale_plugin_keeps_its_pod_creating() {
    let cluster = Cluster::of(&fleet(), slow()).await;
    let first = cluster.claimant("first").await;
    assert!(is_ready(&first) && cluster.complaints("first").await.is_empty());
    cluster.upgrade_driver(NEW).await;
    let second = cluster.claimant("second").await;
    assert_eq!(waiting_reason(&second).as_deref(), Some("ContainerCreating"));
    assert!(!is_ready(&second) && is_ready(&cluster.get::<Pod>("default", "first").await));
    let complaints = cluster.complaints("second").await;
    assert!(complaints.len() == 1 && complaints[0].contains("empty device edits"), "{complaints:?}");
    seconds(3600).await;
    assert!(!is_ready(&cluster.get::<Pod>("default", "second").await));
    cluster.restart_plugin().await;
    assert!(is_ready(&cluster.get::<Pod>("default", "second").await));
}

#[tokio::test(start_paused = true)]
async fn a_driver_of_the_same_version_makes_a_plugin_stale_too() {
    let cluster = Cluster::of(&fleet(), slow()).await;
    cluster.actors.behaviour().restart_driver("gpu-01");
    seconds(300).await;
    assert!(is_ready(&cluster.driver().await));
    assert_eq!(cluster.published().await, published(1, "580.95.5"));
    assert_eq!(waiting_reason(&cluster.claimant("a").await).as_deref(), Some("ContainerCreating"));
}

#[tokio::test(start_paused = true)]
async fn after_a_boot_slices_are_wiped_and_published_anew() {
    let cluster = Cluster::of(&fleet(), slow()).await;
    seconds(1).await;
    cluster.actors.behaviour().change(|behaviour| *behaviour.boots.entry("gpu-01".into()).or_default() += 1);
    seconds(5).await;
    assert!(cluster.slices().await.is_empty());
    seconds(300).await;
    assert_eq!(cluster.published().await, published(2, "580.95.5"));
    assert_eq!(main_of(&cluster.plugin().await).restarts, 1);
    assert!(is_ready(&cluster.claimant("a").await));
}

#[tokio::test(start_paused = true)]
async fn a_pool_of_two_slices_is_incomplete_for_a_moment() {
    let behaviour = Behaviour { second_slice_after: Some(Duration::from_secs(20)), ..Behaviour::default() };
    let cluster = Cluster::of(&fleet(), behaviour).await;
    seconds(1).await;
    assert_eq!(cluster.slices().await.len(), 1);
    assert_eq!(cluster.slices().await[0].spec.pool.resource_slice_count, 2);
    seconds(20).await;
    let devices = |slices: Vec<ResourceSlice>| -> Vec<usize> {
        slices.iter().map(|slice| slice.spec.devices.iter().flatten().count()).collect()
    };
    assert_eq!(devices(cluster.slices().await), [4, 4]);
    cluster.delete(&cluster.plugin().await).await;
    let generations =
        async || -> Vec<i64> { cluster.published().await.iter().map(|slice| slice.0).collect() };
    let mut seen = vec![generations().await];
    for _ in 0..100 {
        seconds(1).await;
        seen.push(generations().await);
    }
    for generations in &mut seen {
        generations.sort_unstable();
    }
    seen.dedup();
    assert_eq!(seen, [vec![1, 1], vec![1, 2], vec![2, 2]]);
}

#[tokio::test(start_paused = true)]
async fn slices_of_a_plugin_that_does_not_come_back_are_wiped_after_a_while() {
    let cluster = Cluster::of(&fleet(), Behaviour::default()).await;
    let fault = Behaviour::default().with_client_fault(
        &DraIdentity::NvidiaChart.daemon_set(),
        Nodes::All,
        Fault::Hang,
    );
    cluster.actors.behaviour().change(|behaviour| *behaviour = fault);
    cluster.delete(&cluster.plugin().await).await;
    seconds(20).await;
    assert_eq!(cluster.slices().await.len(), 1);
    seconds(20).await;
    assert!(cluster.slices().await.is_empty());
    let claimant = cluster.claimant("a").await;
    assert!(!is_ready(&claimant) && cluster.complaints("a").await[0].contains("not registered"));
}

#[tokio::test(start_paused = true)]
async fn a_plugin_that_updates_on_delete_stays_until_somebody_deletes_it() {
    let identity = DraIdentity::NvidiaChart;
    for on_delete in [true, false] {
        let cluster = Cluster::of(&fleet().with_dra(Dra { identity, on_delete }), Behaviour::default()).await;
        let before = cluster.plugin().await.uid();
        let sets: Api<DaemonSet> = Api::namespaced(cluster.client.clone(), identity.namespace());
        let patch = json!({"spec": {"template": {"metadata": {"annotations": {"restartedAt": "now"}}}}});
        let patch = Patch::Merge(patch);
        sets.patch(&identity.daemon_set(), &PatchParams::default(), &patch).await.unwrap();
        seconds(10).await;
        assert_eq!(cluster.plugin().await.uid() == before, on_delete);
    }
}

#[tokio::test(start_paused = true)]
async fn two_runs_with_clients_are_the_same() {
    let mut runs = Vec::new();
    for _ in 0..2 {
        let fleet = fleet().with_clients();
        let cluster = Cluster::of(&fleet, slow().with_driver_manager()).await;
        cluster.upgrade_driver(NEW).await;
        let pods = cluster.pods("").await;
        let pods: Vec<_> = pods.iter().map(|pod| format!("{} {:?}", describe(pod), pod.status)).collect();
        runs.push((pods, cluster.slices().await, cluster.server.counts()));
    }
    assert_eq!(runs[0].0, runs[1].0);
    assert_eq!(runs[0].1, runs[1].1);
    assert_eq!(runs[0].2, runs[1].2);
}
