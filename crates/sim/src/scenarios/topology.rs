//! Who goes together, who does not, and when: atoms, spread and windows.

use std::collections::BTreeSet;
use std::time::Duration;

use futures::FutureExt;
use kube::Api;
use kube::api::{Patch, PatchParams};
use pitcrew_core::api::DriverPolicy;
use serde_json::{Value, json};

use super::{NEW, fleet, scenario, whole_walks};
use crate::fleet::Fleet;
use crate::scenario::{Outcome, Scenario, Stage, must};

const RACK: &str = "example.com/rack";

pub(super) fn all() -> Vec<Scenario> {
    vec![
        Scenario {
            policy: Some(rollout(&json!({"topology": {"atom": RACK}}))),
            ..scenario("an-atom-goes-in-one-wave", racks(2), |s| in_one_wave(s).boxed())
        },
        Scenario {
            policy: Some(rollout(&json!({"topology": {"spread": {"label": RACK, "max": 1}}}))),
            ..scenario("one-of-each-group-is-out", racks(0), |s| spread_out(s).boxed())
        },
        Scenario {
            policy: Some(rollout(&json!({"blackouts": [{"from": "2000-01-01", "until": "2999-12-31"}]}))),
            ..scenario("nothing-starts-before-a-window-opens", racks(0), |s| opens(s).boxed())
        },
    ]
}

fn rollout(rollout: &Value) -> Value {
    json!({
        "driver": {"name": "gpu", "validator": {"selector": "app=nvidia-operator-validator"}},
        "rollout": rollout,
    })
}

/// Two racks of two nodes each, which do not follow each other by name.
fn racks(parallel: u32) -> Fleet {
    let limits = json!({"autoUpgrade": true, "maxParallelUpgrades": parallel, "maxUnavailable": "100%"});
    [("gpu-01", "a"), ("gpu-02", "b"), ("gpu-03", "a"), ("gpu-04", "b")]
        .into_iter()
        .fold(fleet(4).with_upgrade_policy(limits), |fleet, (node, rack)| fleet.with_label(node, RACK, rack))
}

fn set<'a>(names: impl IntoIterator<Item = &'a str>) -> BTreeSet<String> {
    names.into_iter().map(str::to_owned).collect()
}

/// Upgrades everybody; a driver takes so long to come up that nodes which start together are out together.
async fn upgrade(stage: &mut Stage) -> Result<BTreeSet<BTreeSet<String>>, crate::scenario::Broken> {
    stage.behaviour().change(|behaviour| behaviour.timing.driver_start = Duration::from_secs(2));
    stage.set_version(NEW).await?;
    stage.until("the first node is cordoned", |scene| !scene.cordoned.is_empty()).await?;
    stage.until_done().await?;
    whole_walks(stage, &stage.trace())?;
    Ok(stage.scene().together)
}

/// There is room for two, and by name the first two are of different racks.
async fn in_one_wave(stage: &mut Stage) -> Outcome {
    let racks = [set(["gpu-01", "gpu-03"]), set(["gpu-02", "gpu-04"])];
    let together = upgrade(stage).await?;
    for nodes in &together {
        must(racks.iter().any(|rack| nodes.is_subset(rack)), || format!("{nodes:?} were out together"))?;
    }
    // Whoever hears late of one node is late with it.
    let whole = racks.iter().all(|rack| together.contains(rack)) || stage.is_blinded();
    must(whole, || format!("out together were {together:?}"))
}

/// There is room for everybody, but each rack spares one.
async fn spread_out(stage: &mut Stage) -> Outcome {
    let together = upgrade(stage).await?;
    for rack in [set(["gpu-01", "gpu-03"]), set(["gpu-02", "gpu-04"])] {
        let whole = together.iter().find(|nodes| rack.is_subset(nodes));
        must(whole.is_none(), || format!("{whole:?} were out together"))?;
    }
    let most = stage.trace().most_out;
    must(most == 2 || stage.is_blinded(), || {
        format!("{most} nodes were out at once, and one of each rack may be")
    })
}

async fn opens(stage: &mut Stage) -> Outcome {
    stage.set_version(NEW).await?;
    stage.until_reason("gpu-01", "window").await?;
    stage.stands_still_for(Duration::from_secs(3)).await?;
    must(stage.scene().together.iter().all(BTreeSet::is_empty), || "a node was cordoned".to_owned())?;
    // One of them is open for hours, whatever time it is.
    let windows = json!([{"start": "00:00", "duration": "24h"}, {"start": "12:00", "duration": "24h"}]);
    let open = json!({"spec": {"rollout": {"blackouts": [], "windows": windows}}});
    let policies = Api::<DriverPolicy>::all(stage.cluster().admin.clone());
    policies.patch("gpu", &PatchParams::default(), &Patch::Merge(open)).await?;
    stage.until("a node is on its way", |scene| !scene.visited.is_empty()).await?;
    stage.until_done().await?;
    whole_walks(stage, &stage.trace())
}
