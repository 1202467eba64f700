//! The driver's clients on every node, for somebody who looks after nothing else: `pitcrew refresh-clients` in a cluster
//! that is driven by Helm or GitOps alone. The test of staleness is the one of the walk.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;

use super::clients::{Client, Standing, Survey};
use super::members::{Freshness, Member, members};
use super::offers::offers;
use super::pool::View;
use super::removal::pod_ref;
use super::restart::says;
use crate::action::PodRef;
use crate::api::Refresh;
use crate::clients::Epoch;
use crate::contract::State;
use crate::names::{NodeName, ObjectName, PoolName};
use crate::policy::{self, Problem, Source};
use crate::snapshot::Snapshot;
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
    /// When time alone changes that.
    pub wake_at: Option<Timestamp>,
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
    /// Nothing: only a person can decide it, and until then the node is not fresh.
    NeedsPerson(String),
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
        for member in members(&view, &daemon_sets) {
            let before: Vec<ObjectName> = replaced.get(member.name).into_iter().flatten().cloned().collect();
            let survey = Survey::of(&view, &member, &before, false);
            let (outcome, wake_at) = match unrendered(snapshot, &member).filter(|_| member.walk().is_none()) {
                Some(why) => (Outcome::Waits(why), None),
                None => outcome(&view, &member, survey.as_ref()),
            };
            all.push(NodeClients {
                node: member.name.clone(),
                pool: pool.name.clone(),
                epoch: survey.as_ref().map(|survey| survey.epoch),
                clients: survey.iter().flat_map(|survey| &survey.clients).map(facts).collect(),
                outcome,
                wake_at,
            });
        }
    }
    Ok(all)
}

/// A new version that the operator has not turned into a DaemonSet yet: what is in sync now is in sync with the past.
fn unrendered(snapshot: &Snapshot, member: &Member<'_>) -> Option<String> {
    let daemon_set = member.daemon_set?;
    let renderer = daemon_set.rendered_by.as_ref()?;
    let wanted = match renderer {
        Source::ClusterPolicy(name) => {
            snapshot.sources.cluster_policies.get(name)?.driver.get("version")?.as_str()?
        }
        Source::NvidiaDriver(name) => snapshot.sources.nvidia_driver_versions.get(name)?,
        Source::DriverPolicy(_) | Source::NicClusterPolicy(_) => return None,
    };
    let (version, installed): (DriverVersion, _) =
        (wanted.parse().ok()?, daemon_set.driver_version.as_ref()?);
    // Precompiled drivers are tagged by branch and kernel.
    let whole = !installed.to_string().contains('-');
    (whole && version != *installed).then(|| {
        format!("{renderer} asks for driver {wanted}, daemonset/{} still has {installed}", daemon_set.name)
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

fn outcome<'a>(
    view: &View<'a>,
    member: &Member<'a>,
    survey: Option<&Survey<'a>>,
) -> (Outcome, Option<Timestamp>) {
    let now = |outcome| (outcome, None);
    let waits = |what: String| now(Outcome::Waits(what));
    if let Some(elsewhere) = for_the_controller(view, member) {
        return now(elsewhere);
    }
    let Some(driver) = member.pod else { return waits("its driver pod is not there yet".to_owned()) };
    match member.sync {
        Freshness::Outdated => return now(behind(view, member)),
        Freshness::Unknown => return waits("the DaemonSet's newest template is not known yet".to_owned()),
        Freshness::InSync | Freshness::Orphaned => {}
    }
    if !member.node.ready {
        return waits("the node is not Ready".to_owned());
    }
    let Some(survey) = survey else {
        return waits(format!("driver pod {} is not ready: {}", driver.name, says(driver)));
    };
    // Who may be missing is replaced, but not waited for.
    let open = survey.next(|client| !client.is_pending() && (client.is_required() || client.is_stale()));
    let stale = open.iter().filter(|client| client.is_stale());
    let stale: Vec<(PodRef, String)> =
        stale.filter_map(|client| Some((pod_ref(client.pod?), client.says().what))).collect();
    if !stale.is_empty() {
        return now(Outcome::Replace(stale));
    }
    if let Some(coming) = open.first() {
        return waits(coming.says().what);
    }
    if let Some(pending) = survey.clients.iter().find(|client| client.is_pending()) {
        return now(Outcome::NeedsPerson(pending.says().what));
    }
    let Some(missing) = offers(view, member, survey, 0) else { return now(Outcome::Fresh) };
    match missing.stale_plugin(view.snapshot.now) {
        Some(Ok(plugin)) => now(Outcome::Replace(vec![(pod_ref(plugin), missing.found.what)])),
        Some(Err(at)) => (Outcome::Waits(missing.found.what), Some(at)),
        None => waits(missing.found.what),
    }
}

/// A node on its walk, which a controller brings to its end with its clients, unless it leaves them alone or has failed.
fn for_the_controller(view: &View<'_>, member: &Member<'_>) -> Option<Outcome> {
    let walk = member.walk()?;
    Some(match () {
        () if walk.state == State::UpgradeFailed => {
            Outcome::Waits("its driver upgrade failed; pitcrew explain says why".to_owned())
        }
        () if view.policy.clients.refresh == Refresh::Off => Outcome::Waits("on a visit".to_owned()),
        () => Outcome::LeftAlone("on a visit; the controller brings its clients back".to_owned()),
    })
}

/// A node whose driver is still to be replaced.
fn behind(view: &View<'_>, member: &Member<'_>) -> Outcome {
    let skip = &view.policy.keys.skip;
    let brings_clients = view.policy.clients.refresh != Refresh::Off;
    match () {
        () if !view.policy.auto_upgrade => {
            Outcome::LeftAlone("its driver is out of date, and autoUpgrade is false".to_owned())
        }
        () if member.node.mark(skip) == Some("true") => {
            Outcome::LeftAlone(format!("its driver is out of date, and label {skip}=true leaves it out"))
        }
        () if matches!(view.pool.source, Source::DriverPolicy(_)) && brings_clients => {
            let what = "its driver is still to be upgraded; its clients come back in that visit";
            Outcome::LeftAlone(what.to_owned())
        }
        () => Outcome::Waits("its driver is not replaced yet".to_owned()),
    }
}
