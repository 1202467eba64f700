//! `ResourceSlice`s of `resource.k8s.io/v1`.

use k8s_openapi::api::resource::v1::ResourceSlice;

use super::*;

fn slice(node: &str, generation: i64) -> Value {
    json!({
        "metadata": {"name": format!("{node}-gpu.nvidia.com-a")},
        "spec": {
            "driver": "gpu.nvidia.com", "nodeName": node,
            "pool": {"name": node, "generation": generation, "resourceSliceCount": 1},
            "devices": [{"name": "gpu-0", "attributes": {"driverVersion": {"version": "535.104.5"}}}],
        },
    })
}

#[tokio::test(start_paused = true)]
async fn slices_belong_to_the_cluster_and_are_found_by_their_node() {
    let client = server().client();
    let slices = all::<ResourceSlice>(&client);
    for node in ["gpu-01", "gpu-02"] {
        create(&slices, slice(node, 1)).await;
    }
    let on_two = slices.list(&ListParams::default().fields("spec.nodeName=gpu-02")).await.unwrap();
    assert_eq!(
        on_two.items.iter().map(ResourceExt::name_any).collect::<Vec<_>>(),
        ["gpu-02-gpu.nvidia.com-a"]
    );
    assert_eq!(slices.list(&ListParams::default().fields("spec.driver=other")).await.unwrap().items.len(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_rewritten_slice_has_a_new_generation_and_a_deleted_one_is_answered_with() {
    let slices = all::<ResourceSlice>(&server().client());
    let first = create(&slices, slice("gpu-01", 1)).await;
    assert_eq!((first.metadata.generation, first.metadata.namespace), (Some(1), None));
    let next: ResourceSlice = from(slice("gpu-01", 2));
    let name = next.name_any();
    let second = slices.replace(&name, &PostParams::default(), &next).await.unwrap();
    assert_eq!((second.metadata.generation, second.spec.pool.generation), (Some(2), 2));
    let gone = slices.delete(&name, &DeleteParams::default()).await.unwrap();
    assert_eq!(gone.left().map(|gone| gone.name_any()), Some(name));
    assert_eq!(slices.list(&ListParams::default()).await.unwrap().items.len(), 0);
}
