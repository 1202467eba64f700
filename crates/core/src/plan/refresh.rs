//! The driver's clients on every node, for somebody who looks after nothing else: `pitcrew refresh-clients` in a cluster
//! that is driven by Helm or GitOps alone. The test of staleness is the one of the walk.

use std::collections::{BTreeMap, BTreeSet};

use super::clients::{Client, Standing, Survey, is_pending, offers};
use super::members::{Freshness, Member, members};
use super::pool::View;
use super::removal::pod_ref;
use super::restart::says;
use crate::action::PodRef;
use crate::api::Refresh;
use crate::clients::Epoch;
use crate::names::{NodeName, ObjectName, PoolName};
use crate::policy::{self, Pool, Problem, Source};
use crate::snapshot::{DaemonSet, Snapshot};
use crate::version::DriverVersion;

/// The clients of one node, and what is to be done with them.
#[derive(Clone, Debug)]
pub struct NodeClients {
    /// The node.
    pub node: NodeName,
    /// The pool that it belongs to.
    pub pool: PoolName,
    /// The driver's epoch, while it is ready.
    pub epoch: Option<Epoch>,
    /// Each client.
    pub clients: Vec<ClientFacts>,
    /// What is to be done.
    pub outcome: Outcome,
}

/// One client on one node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ClientFacts {
    /// Its DaemonSet.
    pub daemon_set: ObjectName,
    /// Its pod, if there is one.
    pub pod: Option<ObjectName>,
    /// `fresh`, `coming`, or why it is stale.
    pub state: &'static str,
    /// What is the matter with it, in a sentence.
    pub says: Option<String>,
}

/// What is to be done with the clients of a node.
#[derive(Clone, PartialEq, Debug)]
pub enum Outcome {
    /// Nothing: all are fresh.
    Fresh,
    /// These are replaced now; others may follow.
    Replace(Vec<(PodRef, String)>),
    /// Nothing yet: something is on its way, and worth waiting for.
    Waits(String),
    /// Nothing: it is for somebody else to do, whenever that is.
    LeftAlone(String),
}

/// Looks at the clients of all nodes. `replaced` names the DaemonSets whose pods were deleted and are waited for.
pub fn client_survey(
    snapshot: &Snapshot,
    replaced: &BTreeMap<NodeName, BTreeSet<ObjectName>>,
) -> Result<Vec<NodeClients>, (Source, Problem)> {
    let pools = policy::resolve(&snapshot.sources, snapshot.daemon_sets.values(), &snapshot.namespace);
    let mut all = Vec::new();
    for pool in &pools {
        let policy = pool.policy.as_ref().map_err(|problem| (pool.source.clone(), problem.clone()))?;
        let (view, daemon_sets) = View::of(snapshot, pool, policy, &pools);
        let unrendered = daemon_sets.iter().find_map(|ds| unrendered(snapshot, pool, ds));
        for member in members(&view, &daemon_sets) {
            let before: Vec<ObjectName> = replaced.get(member.name).into_iter().flatten().cloned().collect();
            let survey = Survey::of(&view, &member, &before, false);
            let outcome = match &unrendered {
                Some(why) if member.node.visit.is_none() => Outcome::Waits(why.clone()),
                _ => outcome(&view, &member, survey.as_ref()),
            };
            all.push(NodeClients {
                node: member.name.clone(),
                pool: pool.name.clone(),
                epoch: survey.as_ref().map(|survey| survey.epoch),
                clients: survey.iter().flat_map(|survey| &survey.clients).map(facts).collect(),
                outcome,
            });
        }
    }
    Ok(all)
}

/// A new version that the operator has not turned into a DaemonSet yet: what is in sync now is in sync with the past.
fn unrendered(snapshot: &Snapshot, pool: &Pool, daemon_set: &DaemonSet) -> Option<String> {
    let Source::ClusterPolicy(name) = &pool.source else { return None };
    let wanted = snapshot.sources.cluster_policies.get(name)?.driver.get("version")?.as_str()?;
    let (version, rendered): (DriverVersion, _) = (wanted.parse().ok()?, daemon_set.driver_version.as_ref()?);
    (version != *rendered).then(|| {
        format!(
            "{} asks for driver {wanted}, daemonset/{} still has {rendered}",
            pool.source, daemon_set.name
        )
    })
}

fn facts(client: &Client<'_>) -> ClientFacts {
    let (state, says) = match &client.standing {
        Standing::Fresh => ("fresh", None),
        Standing::Stale(stale) => (stale.code(), Some(client.says().what)),
        Standing::Coming => ("coming", Some(client.says().what)),
    };
    ClientFacts {
        daemon_set: client.daemon_set.clone(),
        pod: client.pod.map(|pod| pod.name.clone()),
        state,
        says,
    }
}

fn outcome<'a>(view: &View<'a>, member: &Member<'a>, survey: Option<&Survey<'a>>) -> Outcome {
    // A controller that leaves clients alone leaves them to us.
    let controller = view.policy.clients.refresh != Refresh::Off;
    match (member.node.visit.is_some(), controller) {
        (true, true) => {
            return Outcome::LeftAlone("on a visit; the controller brings its clients back".to_owned());
        }
        (true, false) => return Outcome::Waits("on a visit".to_owned()),
        (false, _) => {}
    }
    match member.sync {
        Freshness::Outdated => return behind(view, member),
        Freshness::Unknown => return Outcome::Waits("its driver pod is not there yet".to_owned()),
        Freshness::InSync | Freshness::Orphaned => {}
    }
    if !member.node.ready {
        return Outcome::Waits("the node is not Ready".to_owned());
    }
    let (Some(survey), Some(driver)) = (survey, member.pod) else {
        let what = member.pod.map(|pod| format!("driver pod {} is not ready: {}", pod.name, says(pod)));
        return Outcome::Waits(what.unwrap_or_else(|| "its driver pod is not there yet".to_owned()));
    };
    if !member.driver_ready {
        return Outcome::Waits(format!("driver pod {} is not ready: {}", driver.name, says(driver)));
    }
    let open = survey.next(|client| !is_pending(client));
    let stale = open.iter().filter(|client| matches!(client.standing, Standing::Stale(_)));
    let stale: Vec<(PodRef, String)> =
        stale.filter_map(|client| Some((pod_ref(client.pod?), client.says().what))).collect();
    if !stale.is_empty() {
        return Outcome::Replace(stale);
    }
    if let Some(coming) = open.first() {
        return Outcome::Waits(coming.says().what);
    }
    // A client that is left alone offers what it offers.
    if let Some(pending) = survey.clients.iter().find(|client| is_pending(client)) {
        return Outcome::LeftAlone(pending.says().what);
    }
    let Some(missing) = offers(view, member, survey, 0) else { return Outcome::Fresh };
    match missing.stale_plugin(view.snapshot.now) {
        Some(Ok(plugin)) => Outcome::Replace(vec![(pod_ref(plugin), missing.found.what)]),
        _ => Outcome::Waits(missing.found.what),
    }
}

/// A node whose driver is still to be replaced.
fn behind(view: &View<'_>, member: &Member<'_>) -> Outcome {
    let keys = &view.policy.keys;
    let controller = view.policy.clients.refresh != Refresh::Off;
    if matches!(view.pool.source, Source::DriverPolicy(_)) && controller {
        let what = "its driver is still to be upgraded; its clients come back in that visit";
        return Outcome::LeftAlone(what.to_owned());
    }
    if !view.policy.auto_upgrade {
        return Outcome::LeftAlone("its driver is out of date, and autoUpgrade is false".to_owned());
    }
    if member.node.mark(&keys.skip) == Some("true") {
        return Outcome::LeftAlone(format!(
            "its driver is out of date, and label {}=true leaves it out",
            keys.skip
        ));
    }
    Outcome::Waits("its driver is not replaced yet".to_owned())
}
