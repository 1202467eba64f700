//! What a person can do about a reason, with the exact command. Nothing is offered that would not work.

use serde_json::{Map, Value, json};

use super::about::{About, Thing};
use super::culprit::culprits;
use super::{Foreign, Limit, Motion, Narrow, Reason};
use crate::api::StagePhase;
use crate::contract::{MATRIX_KEY, NEEDS_REBOOT_ANNOTATION, State, VISIT_ANNOTATION, nvsentinel};
use crate::matrix::{Place, Unlisted, WhyUnlisted};
use crate::names::{NodeName, ObjectName};
use crate::policy::Source;
use crate::snapshot::{Node, Pod};
use crate::visit::{Cause, Finding, Remedy};

/// One thing that a person can do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Advice {
    /// In two or three words.
    pub what: &'static str,
    /// The command to paste.
    pub command: String,
    /// What it costs, if it costs something.
    pub but: Option<&'static str>,
}

fn to(what: &'static str, command: String) -> Advice {
    Advice { what, command, but: None }
}

impl Advice {
    fn but(self, but: &'static str) -> Self {
        Self { but: Some(but), ..self }
    }
}

/// What a person can do about a node's reason, the best first.
pub fn advice(about: &About<'_>) -> Vec<Advice> {
    let node = about.node;
    match about.reason() {
        Reason::UpToDate | Reason::Writing | Reason::Conflict | Reason::OtherDriver { .. } => vec![],
        // Whoever wants the newest template as well.
        Reason::SameVersion { .. } => vec![restart(about)],
        Reason::Moving { .. } | Reason::ApiError { .. } => vec![see_events(about)],
        Reason::DriverNotReady { pod, .. } => vec![see_logs(pod), see_pod(pod), restart(about)],
        Reason::DriverStopping { pod, .. } => vec![see_pod(pod)],
        Reason::DriverStarting { pod, .. } => vec![see_logs(pod), see_pod(pod)],
        Reason::RevisionPending { daemon_set } | Reason::NoDriverPod { daemon_set: Some(daemon_set), .. } => {
            vec![see_daemon_set(daemon_set), to("see the node", format!("kubectl describe node {node}"))]
        }
        Reason::NoDriverPod { daemon_set: None, .. } => {
            vec![to("see its labels", format!("kubectl get node {node} --show-labels"))]
        }
        Reason::NoSlot { limit, .. } => wait_less(about, limit),
        Reason::WindowClosed { .. } => {
            let change = Advice { what: "change the windows", ..edit(&Thing::from(&about.pool.source)) };
            [change].into_iter().chain(leave_out(about)).collect()
        }
        Reason::AtomWaits { node, why, .. } => free_atom(about, node, why),
        Reason::AtomTooLarge { narrow, nodes, .. } => vec![widen(about, *narrow, *nodes)],
        Reason::SpreadFull { max, .. } => {
            let more = to("allow one more", patch_spread(about, max.saturating_add(1)));
            [more].into_iter().chain(leave_out(about)).collect()
        }
        Reason::Skipped { .. } => vec![to("undo it", pitcrew(about, "skip", " --undo"))],
        Reason::BreakerTripped => {
            let (namespace, name) = (nvsentinel::NAMESPACE, nvsentinel::BREAKER);
            let which = format!("kubectl get nodes -l {}", nvsentinel::STATE_LABEL);
            let see = format!("kubectl -n {namespace} get configmap {name} -o yaml");
            vec![to("see the breaker", see), to("see which nodes", which)]
        }
        Reason::NeedsReboot { .. } => reboot(about),
        Reason::Quarantined { .. } | Reason::NodeNotReady { .. } => {
            let mut all = vec![to("see why", format!("kubectl describe node {node}"))];
            all.extend(leave_out(about));
            all
        }
        Reason::WaitingForJobs { pods, until } => {
            let mut all: Vec<Advice> = pods.first().map(see_pod).into_iter().collect();
            if until.is_none() {
                let limit = json!({"waitForCompletion": {"timeoutSeconds": 3600}});
                all.push(to("wait an hour", patch_policy(about, limit)));
            }
            all
        }
        Reason::PodsLeaving { pods, .. } | Reason::Checkpointing { pods, .. } => {
            pods.first().map(see_pod).into_iter().collect()
        }
        Reason::PodStuck { pod, .. } => {
            let node = to("see the node", format!("kubectl describe node {node}"));
            vec![see_pod(pod), node]
        }
        Reason::LeftAlone { .. } => vec![to("see who is not back", "pitcrew status".to_owned())],
        Reason::TooManyFailed { .. } => vec![to("see which failed", "pitcrew status".to_owned())],
        Reason::StageClosed { phase, .. } => open_stage(about, *phase),
        Reason::StageFailed { .. } | Reason::Condemned { .. } => decide_on_version(about),
        Reason::NotInMatrix { unlisted } => list_version(about, unlisted),
        Reason::Aborted { rollout } => {
            vec![to("take it back", format!("pitcrew abort {rollout} --undo"))]
        }
        Reason::BudgetNever { budget, pod, pods: (expected, desired) } => {
            let mut all = open_budget(about, budget, pod, (*expected, *desired));
            all.extend(leave_out(about));
            all
        }
        Reason::BudgetBlocks { budget, pod, healthy, .. } => open_budget(about, budget, pod, *healthy),
        Reason::CannotBeEmptied { found } => {
            let mut all = allow_eviction(about, found);
            all.extend(leave_out(about));
            all
        }
        Reason::Validating { found: Finding { about: Some(pod), .. }, until: None } => {
            vec![see_pod(pod), take_off(pod)]
        }
        Reason::ClientsComeBack { found, .. } | Reason::Validating { found, .. } => {
            see_validator(about, found)
        }
        Reason::ClientsStale { found, remedy } => replace_client(about, found, *remedy),
        Reason::Paused => resume(about),
        Reason::Failed { cause } => after_failure(about, cause),
        Reason::FailedWithoutRecord => vec![see_events(about), to("try again", pitcrew(about, "retry", ""))],
        Reason::PoolFrozen { .. } => unfreeze(about),
        Reason::TwoPolicies { .. } => culprits(about).iter().map(edit).collect(),
        Reason::UnknownLabel { label, .. } => {
            vec![to("remove it", format!("kubectl label node {node} {label}-"))]
        }
        Reason::LabelChanged { .. } => mend_label(about),
        Reason::VisitUnreadable { .. } => {
            let remove = to("forget the visit", format!("kubectl annotate node {node} {VISIT_ANNOTATION}-"));
            vec![remove.but("the walk begins again; lifting the cordon is then up to you")]
        }
    }
}

/// Half of a driver is loaded: boot the node, or end what holds it.
fn reboot(about: &About<'_>) -> Vec<Advice> {
    let node = about.node;
    let who = to("see what holds the driver", format!("kubectl describe node {node}"));
    let boot = format!(
        "kubectl debug node/{node} --profile=sysadmin --image=busybox -- chroot /host systemctl reboot"
    );
    let record = about.snapshot.nodes.get(node).and_then(Node::needs_reboot);
    let done = record.filter(|record| record.boot.is_empty()).map(|_| {
        to("say that it is done", format!("kubectl annotate node {node} {NEEDS_REBOOT_ANNOTATION}-"))
    });
    [to("reboot it", boot).but("everything on the node stops")].into_iter().chain(done).chain([who]).collect()
}

fn open_stage(about: &About<'_>, before: StagePhase) -> Vec<Advice> {
    let mut all = vec![to("see how far it is", "pitcrew status".to_owned())];
    let newest = crate::plan::newest_rollout(about.snapshot, about.pool);
    if let (Some((rollout, _)), StagePhase::AwaitingApproval) = (newest, before) {
        all.insert(0, to("open it", format!("pitcrew promote {rollout}")));
    }
    all
}

/// A version went wrong: take it back, or try it again.
fn decide_on_version(about: &About<'_>) -> Vec<Advice> {
    let see = to("see why", "pitcrew status".to_owned());
    let newest = crate::plan::newest_rollout(about.snapshot, about.pool);
    let decide = match about.reason() {
        Reason::Condemned { rollout, .. } => {
            Some(to("try the version again", format!("pitcrew clear {rollout}")))
        }
        _ => newest.map(|(name, _)| to("take it back", format!("pitcrew rollback {name}"))),
    };
    [see].into_iter().chain(decide).collect()
}

/// A version that is not in the matrix: put it there, or do without.
fn list_version(about: &About<'_>, unlisted: &Unlisted) -> Vec<Advice> {
    let Unlisted { place: Place { config_map: ObjectName { namespace, name }, key }, why } = unlisted;
    let see = to("see the matrix", format!("kubectl -n {namespace} get configmap {name} -o yaml"));
    let put = format!(
        "kubectl -n {namespace} create configmap {name} --from-file={key}={MATRIX_KEY} --dry-run=client -o yaml | kubectl apply -f -"
    );
    let put =
        to("put it there", put).but("from a checkout, where pitcrew matrix validate finds nothing wrong");
    let patch = json!({"spec": {"rollout": {"matrix": {"enforce": false}}}});
    let policy = about.pool.source.name();
    let off = to("do without", format!("kubectl patch driverpolicy {policy} --type=merge -p '{patch}'"));
    let off = off.but("every version starts then");
    match why {
        WhyUnlisted::NoConfigMap => vec![put, off],
        WhyUnlisted::NoVersion { daemon_set } => vec![see_daemon_set(daemon_set), off],
        WhyUnlisted::NoKey | WhyUnlisted::Unreadable(_) | WhyUnlisted::InNoEntry { .. } => {
            vec![see, put, off]
        }
    }
}

fn see_pod(pod: &ObjectName) -> Advice {
    to("see the pod", format!("kubectl -n {} describe pod {}", pod.namespace, pod.name))
}

fn take_off(pod: &ObjectName) -> Advice {
    to("take it off", format!("kubectl -n {} delete pod {}", pod.namespace, pod.name))
}

fn see_logs(pod: &ObjectName) -> Advice {
    let command = format!("kubectl -n {} logs {} --all-containers --tail=50", pod.namespace, pod.name);
    to("see its log", command)
}

fn see_daemon_set(daemon_set: &ObjectName) -> Advice {
    let command = format!("kubectl -n {} describe daemonset {}", daemon_set.namespace, daemon_set.name);
    to("see why", command)
}

fn see_events(about: &About<'_>) -> Advice {
    let command = format!("kubectl get events --field-selector involvedObject.name={}", about.node);
    to("see its events", command)
}

/// A command of ours about this node.
fn pitcrew(about: &About<'_>, command: &str, flags: &str) -> String {
    pitcrew_about(about, about.node, command, flags)
}

/// A command of ours about another node of its pool.
fn pitcrew_about(about: &About<'_>, node: &NodeName, command: &str, flags: &str) -> String {
    let driver = if about.many_drivers { format!(" --driver {}", about.pool.driver) } else { String::new() };
    format!("pitcrew {command} {node}{driver}{flags}")
}

/// The documented wish for an upgrade of a node that is up to date: its driver pod is replaced safely.
fn restart(about: &About<'_>) -> Advice {
    let key = about.policy().map(|policy| policy.keys.requested.as_str()).unwrap_or_default();
    to("restart it", format!("kubectl annotate node {} {key}=true", about.node))
        .but("the node is cordoned and emptied first")
}

/// The skip label counts only before a visit begins.
fn leave_out(about: &About<'_>) -> Option<Advice> {
    let before_a_visit =
        matches!(about.verdict.state, State::Unknown | State::UpgradeDone | State::UpgradeRequired);
    before_a_visit.then(|| to("leave it out", pitcrew(about, "skip", "")))
}

fn wait_less(about: &About<'_>, limit: &Limit) -> Vec<Advice> {
    let mut all = Vec::new();
    match limit {
        Limit::Stage { .. } => all.push(edit(&Thing::from(&about.pool.source))),
        Limit::MaxParallelUpgrades(limit) => {
            let more = json!({"maxParallelUpgrades": limit.saturating_add(1)});
            all.push(to("allow one more", patch_policy(about, more)));
        }
        Limit::MaxUnavailable { limit, foreign, .. } => {
            let cordoned =
                |name: &&NodeName| about.snapshot.nodes.get(*name).is_some_and(|n| n.unschedulable);
            let theirs = foreign.as_ref().filter(|foreign| !foreign.by_driver_manager);
            if let Some(node) = theirs.map(|foreign| &foreign.node).filter(cordoned) {
                all.push(to("bring it back", format!("kubectl uncordon {node}")));
            } else if let Some(Foreign { node, .. }) = foreign {
                all.push(to("see that node", format!("kubectl describe node {node}")));
            }
            let more = json!({"maxUnavailable": limit.saturating_add(1)});
            all.push(to("allow one more", patch_policy(about, more)));
        }
    }
    all.extend(leave_out(about));
    all
}

/// The command that changes upgrade options where this pool's policy states them.
fn patch_policy(about: &About<'_>, options: Value) -> String {
    let source = &about.pool.source;
    let (kind, patch) = (source.kind().0.to_lowercase(), source.options_patch(options));
    format!("kubectl patch {kind} {} --type=merge -p '{patch}'", source.name())
}

/// What lets an atom go that one of its nodes holds.
fn free_atom(about: &About<'_>, holder: &NodeName, why: &Reason) -> Vec<Advice> {
    let mut all = vec![to("see why", format!("pitcrew explain node/{holder}"))];
    if why.motion() != Motion::ByItself {
        all.push(to("go without it", pitcrew_about(about, holder, "skip", "")));
    }
    all
}

/// Makes a limit wide enough for an atom.
fn widen(about: &About<'_>, narrow: Narrow, nodes: usize) -> Advice {
    let command = match narrow {
        Narrow::MaxParallelUpgrades => patch_policy(about, json!({"maxParallelUpgrades": nodes})),
        Narrow::MaxUnavailable => patch_policy(about, json!({"maxUnavailable": nodes})),
        Narrow::SpreadMax => patch_spread(about, nodes),
    };
    to("raise it", command)
}

/// The command that changes how many of a group may be out. Only a DriverPolicy says that.
fn patch_spread(about: &About<'_>, max: usize) -> String {
    let patch = json!({"spec": {"rollout": {"topology": {"spread": {"max": max}}}}});
    format!("kubectl patch driverpolicy {} --type=merge -p '{patch}'", about.pool.source.name())
}

fn open_budget(
    about: &About<'_>,
    budget: &ObjectName,
    pod: &ObjectName,
    (healthy, desired): (i32, i32),
) -> Vec<Advice> {
    let ObjectName { namespace, name } = budget;
    let mut all = vec![to("see the budget", format!("kubectl -n {namespace} describe pdb {name}"))];
    // While pods are missing, one more would be missing too.
    if healthy >= desired
        && let Some((kind, workload)) = about.pod(pod).and_then(workload)
    {
        let replicas = desired.saturating_add(1);
        let command = format!("kubectl -n {namespace} scale {kind} {workload} --replicas={replicas}");
        all.push(to("add a replica", command));
    }
    let relaxed = json!({"spec": {"minAvailable": null, "maxUnavailable": 1}});
    let relax = format!("kubectl -n {namespace} patch pdb {name} --type=merge -p '{relaxed}'");
    all.push(to("relax it", relax));
    all.push(take_off(pod).but("past the budget: what it protects is interrupted"));
    all
}

/// The workload that makes a pod, as far as the labels that Kubernetes sets tell.
fn workload(pod: &Pod) -> Option<(&'static str, &str)> {
    let owner: &str = &pod.owner.as_ref()?.name;
    if pod.labels.contains_key("statefulset.kubernetes.io/pod-name") {
        return Some(("statefulset", owner));
    }
    let hash = pod.labels.get("pod-template-hash")?;
    Some(("deployment", owner.strip_suffix(hash.as_str())?.strip_suffix('-')?))
}

/// What would let a pod be evicted that the policy keeps where it is.
fn allow_eviction(about: &About<'_>, found: &Finding) -> Vec<Advice> {
    let Some(pod) = &found.about else { return vec![] };
    let mut all = vec![see_pod(pod)];
    let option = |name: &str| {
        let inner = Value::Object(Map::from_iter([(name.to_owned(), json!(true))]));
        Value::Object(Map::from_iter([(removal_field(about).to_owned(), inner)]))
    };
    if let Some(remedy) = found.remedy {
        let price = match remedy {
            Remedy::Force => "nobody makes such a pod again",
            Remedy::DeleteEmptyDir => "the data in it is lost",
        };
        all.push(to("allow it", patch_policy(about, option(remedy.option()))).but(price));
    }
    if !about.pod(pod).is_some_and(Pod::is_daemon) {
        all.push(take_off(pod));
    }
    all
}

/// The field of the policy that says how pods are taken off. It has two names; both at once are refused.
fn removal_field(about: &About<'_>) -> &'static str {
    let (long, short) = ("gpuPodDeletion", "podDeletion");
    let sources = &about.snapshot.sources;
    let has =
        |options: Option<&Value>, field: &str| options.is_some_and(|options| options.get(field).is_some());
    match &about.pool.source {
        _ if about.verdict.state == State::DrainRequired => "drain",
        Source::DriverPolicy(name) => {
            let spec = sources.driver_policies.get(name);
            if spec.is_some_and(|spec| spec.upgrade_policy.pod_deletion.is_some()) { short } else { long }
        }
        Source::ClusterPolicy(name) => {
            let options =
                sources.cluster_policies.get(name).and_then(|facts| facts.driver.get("upgradePolicy"));
            if has(options, long) { long } else { short }
        }
        Source::NicClusterPolicy(_) => short,
        Source::NvidiaDriver(name) => {
            if has(sources.nvidia_drivers.get(name), long) {
                long
            } else {
                short
            }
        }
    }
}

fn see_validator(about: &About<'_>, found: &Finding) -> Vec<Advice> {
    if let Some(pod) = &found.about {
        return vec![see_logs(pod), see_pod(pod)];
    }
    let command = format!("kubectl get pods -A -o wide --field-selector spec.nodeName={}", about.node);
    vec![to("see its pods", command)]
}

fn replace_client(about: &About<'_>, found: &Finding, remedy: super::Remedy) -> Vec<Advice> {
    let mut all = see_validator(about, found);
    match (remedy, &found.about) {
        (super::Remedy::Command, _) => {
            all.push(to("replace it", format!("pitcrew refresh-clients --node {}", about.node)));
        }
        (super::Remedy::Hand, Some(pod)) => {
            let delete = format!("kubectl -n {} delete pod {}", pod.namespace, pod.name);
            all.push(to("replace it", delete).but("it comes back from the newer template"));
        }
        _ => {}
    }
    all
}

fn resume(about: &About<'_>) -> Vec<Advice> {
    let switch = about.switch();
    // Whoever inherits a pause has to lift it where it was said.
    let name = if switch == Thing::from(&about.pool.source) {
        switch.name
    } else {
        format!("{}/{}", switch.kind.to_lowercase(), switch.name)
    };
    vec![to("resume it", format!("pitcrew resume {name}"))]
}

fn after_failure(about: &About<'_>, cause: &Cause) -> Vec<Advice> {
    // A pod that is gone has neither log nor description.
    let pod = cause.found().about.as_ref().filter(|pod| about.pod(pod).is_some());
    let mut all = match (cause, pod) {
        (Cause::NeedsReboot { .. }, _) => reboot(about),
        (_, None) => vec![see_events(about)],
        (Cause::PodsCannotLeave { found }, _) => allow_eviction(about, found),
        (Cause::PodsDidNotLeave { .. }, Some(pod)) => match about.closed_budget(pod) {
            Some((name, budget)) => open_budget(about, name, pod, (budget.healthy, budget.desired)),
            None => vec![see_pod(pod)],
        },
        (
            Cause::DriverNotReady { .. }
            | Cause::ClientNotBack { .. }
            | Cause::Gate { .. }
            | Cause::NotValidated { .. },
            Some(pod),
        ) => {
            vec![see_logs(pod), see_pod(pod)]
        }
    };
    all.push(to("try again", pitcrew(about, "retry", "")));
    all
}

fn edit(thing: &Thing) -> Advice {
    to("mend it", format!("kubectl edit {} {}", thing.kind.to_lowercase(), thing.name))
}

fn unfreeze(about: &About<'_>) -> Vec<Advice> {
    let mend = |thing: &Thing| {
        let (namespace, name) = (thing.namespace.as_deref().unwrap_or_default(), &thing.name);
        match thing.kind {
            "DaemonSet" => {
                let patch = json!({"spec": {"updateStrategy": {"type": "OnDelete", "rollingUpdate": null}}});
                let command =
                    format!("kubectl -n {namespace} patch daemonset {name} --type=merge -p '{patch}'");
                to("mend it", command)
            }
            "Deployment" => {
                let stop = format!("kubectl -n {namespace} scale deployment {name} --replicas=0");
                to("stop it", stop).but("the GPU Operator does nothing else either then")
            }
            "Lease" => to("see who it is", format!("kubectl -n {namespace} get lease {name} -o yaml")),
            _ => edit(thing),
        }
    };
    culprits(about).iter().map(mend).collect()
}

fn mend_label(about: &About<'_>) -> Vec<Advice> {
    let node = about.node;
    let Some(policy) = about.policy() else { return vec![] };
    let (key, again) = (&policy.keys.state, State::UpgradeRequired);
    vec![
        to("let it go on", format!("kubectl label node {node} {key}-")),
        to("start again", format!("kubectl label node {node} {key}={again} --overwrite")),
    ]
}
