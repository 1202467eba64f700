//! Pods are asked to leave the node, by the rules in [`crate::pods`], with longer and longer pauses where a budget refuses.

use std::collections::BTreeMap;
use std::time::Duration;

use pitcrew_core::names::{ObjectName, Uid};
use pitcrew_core::snapshot::{Claim, Pod};
use tokio::time::Instant;

use crate::cluster::{Cluster, Eviction};
use crate::failure::Failure;
use crate::operands::on_node;
use crate::pods::{self, Claims, Leave, OnNode, claim_holders, serves_a_domain};
use crate::stop::Stop;
use crate::wait::{Audience, Look, Looker, Wait};

/// How often it is looked who is still there.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// After the first refusal; each one after it doubles the pause, …
const PAUSE: Duration = Duration::from_secs(1);
/// … up to this. A budget that refuses for a minute is asked seven times.
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// Who leaves without being asked may take as long as an operand.
const GIVEN_BACK_WITHIN: Duration = Duration::from_mins(5);

/// A pod was not let go.
struct Refusal {
    /// Until when it is not asked again.
    until: Instant,
    /// How long that is.
    pause: Duration,
    /// What was said.
    why: String,
}

/// Pods that were not let go.
type Refusals = BTreeMap<Uid, Refusal>;

/// Evicts the pods that have to leave, and waits until they have.
pub(crate) async fn leave(
    told: Audience<'_>,
    stop: &Stop,
    how: &Leave,
    limit: Option<Duration>,
) -> Result<(), Failure> {
    let what = if how.whole_node { "the node's pods to leave" } else { "the pods that use a GPU to leave" };
    let wait = Wait { what, every: LOOK_EVERY, limit };
    wait.until(stop, told, Leaving { cluster: told.cluster, how, refusals: Refusals::new() }).await
}

/// Pods on their way out.
struct Leaving<'a> {
    cluster: &'a Cluster,
    how: &'a Leave,
    refusals: Refusals,
}

impl Looker for Leaving<'_> {
    /// Asks whoever has to leave and may be asked now.
    async fn look(&mut self) -> Result<Look, Failure> {
        let pods = on_node(self.cluster).await?;
        let claims = claims_of(self.cluster, &pods, self.how.administrators).await?;
        let leaving = self.how.leaving(&pods, &claims).map_err(Failure::CannotLeave)?;
        let mut refused = None;
        for pod in &leaving {
            if pod.deleting.is_some() {
                continue;
            }
            if let Some(why) = ask(self.cluster, pod, &mut self.refusals).await? {
                refused.get_or_insert((&pod.name, why));
            }
        }
        Ok(match (leaving.is_empty(), refused) {
            (true, _) => Look::Done,
            (false, Some((pod, why))) => Look::Missing(format!("pod {pod} may not be evicted now: {why}")),
            (false, None) => Look::Missing(format!("{} on the way", pods::names(&leaving))),
        })
    }
}

/// Asks a pod to leave unless it was refused a moment ago; why it does not.
async fn ask(cluster: &Cluster, pod: &Pod, refusals: &mut Refusals) -> Result<Option<String>, Failure> {
    let now = Instant::now();
    let before = refusals.get(&pod.uid);
    if let Some(refusal) = before.filter(|refusal| now < refusal.until) {
        return Ok(Some(refusal.why.clone()));
    }
    let pause = before.map_or(PAUSE, |refusal| (refusal.pause * 2).min(PAUSE_MAX));
    match cluster.evict(&pod.name.namespace, &pod.name.name, pod.uid.as_str()).await? {
        Eviction::Accepted => {
            tracing::info!("evicted pod {}", pod.name);
            Ok(None)
        }
        Eviction::NotNow(why) => {
            refusals.insert(pod.uid.clone(), Refusal { until: now + pause, pause, why: why.clone() });
            Ok(Some(why))
        }
    }
}

/// Nobody on the node may hold a claim when the plugin leaves that would give it back. Who leaves without being asked is
/// waited for.
pub(crate) async fn no_claim_holders(told: Audience<'_>, stop: &Stop) -> Result<(), Failure> {
    let what = "the claims of the DRA plugin's devices to be given back";
    let wait = Wait { what, every: LOOK_EVERY, limit: Some(GIVEN_BACK_WITHIN) };
    wait.until(stop, told, Holding { cluster: told.cluster }).await
}

/// Whether a pod that this label places holds a claim.
pub(crate) async fn holds_claims(cluster: &Cluster, key: &str) -> Result<bool, Failure> {
    let mut pods = on_node(cluster).await?;
    pods.retain(|on_node| on_node.is_placed_by(&[key.to_owned()]));
    let claims = claims_of(cluster, &pods, true).await?;
    Ok(!claim_holders(&pods, &claims).is_empty())
}

/// Pods that hold claims.
struct Holding<'a> {
    cluster: &'a Cluster,
}

impl Looker for Holding<'_> {
    async fn look(&mut self) -> Result<Look, Failure> {
        let pods = on_node(self.cluster).await?;
        let claims = claims_of(self.cluster, &pods, true).await?;
        let holders = claim_holders(&pods, &claims);
        if holders.is_empty() {
            return Ok(Look::Done);
        }
        let names = pods::names(&holders);
        if holders.iter().all(|pod| pod.deleting.is_some() || serves_a_domain(pod, &claims)) {
            return Ok(Look::Missing(format!("{names} on the way")));
        }
        Err(Failure::ClaimsHeld { pods: names })
    }
}

/// Looks up the claims that pods refer to. One that does not exist is held by nobody; one that cannot be asked for, because claims
/// are not served any more, is missing here, and counts.
async fn claims_of(cluster: &Cluster, pods: &[OnNode], with_administration: bool) -> Result<Claims, Failure> {
    let mut claims = Claims::new();
    if pods.iter().all(|on_node| on_node.pod.claims.is_empty()) {
        return Ok(claims);
    }
    let Some(version) = cluster.claim_version().await? else { return Ok(claims) };
    for OnNode { pod, .. } in pods.iter().filter(|on_node| !on_node.pod.is_finished()) {
        for claim in &pod.claims {
            let name = ObjectName { namespace: pod.name.namespace.clone(), name: (**claim).into() };
            if claims.contains_key(&name) {
                continue;
            }
            let found = cluster.claim(&version, &name.namespace, &name.name).await?;
            let facts =
                found.map_or_else(Claim::default, |found| pods::claim(&found.data, with_administration));
            claims.insert(name, facts);
        }
    }
    Ok(claims)
}
