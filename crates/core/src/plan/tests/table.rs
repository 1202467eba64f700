//! The table of the walk: every state in every situation, with the decision and the words of the reason.

use super::fixture::*;
use crate::contract::State;
use crate::names::ObjectName;
use crate::snapshot::{Phase, SetbackKind};

use State::*;

/// One row: the node's state and what is special about it.
struct Case {
    state: State,
    situation: &'static str,
    fleet: Fleet,
}

fn case(state: State, situation: &'static str, node: NodeSpec) -> Case {
    Case { state, situation, fleet: Fleet::new().with(node) }
}

impl Case {
    /// With these options.
    fn policy(self, options: serde_json::Value) -> Self {
        Self { fleet: self.fleet.policy(options), ..self }
    }
    /// With this change.
    fn but(mut self, change: impl FnOnce(&mut Fleet)) -> Self {
        change(&mut self.fleet);
        self
    }
}

fn n() -> NodeSpec {
    node("n")
}

/// Renders cases as blocks of text: the situation, the decision, the words.
fn table(cases: Vec<Case>) -> String {
    let row = |Case { state, situation, fleet }: Case| {
        let verdict = fleet.verdict("n");
        assert_eq!(verdict.state, state, "{situation}");
        let decisions = fleet.decisions();
        let about_node: Vec<&str> = decisions.iter().filter_map(|line| line.strip_prefix("n ")).collect();
        let decision = if about_node.is_empty() { "stay".to_owned() } else { about_node.join("; ") };
        format!("{state}, {situation}\n    {decision}\n    {}", verdict.reason)
    };
    cases.into_iter().map(row).collect::<Vec<_>>().join("\n")
}

/// The driver pod starts and is not ready yet.
fn starting(fleet: &mut Fleet) {
    let driver = fleet.driver_mut("n");
    (driver.ready, driver.started, driver.phase) = (false, None, Phase::Pending);
}

fn no_driver_pod(fleet: &mut Fleet) {
    fleet.remove_pods("n", |pod| pod.name.name.contains("driver"));
}

fn revision_unknown(fleet: &mut Fleet) {
    fleet.daemon_set_mut().observed_generation = 1;
}

#[test]
fn outside_a_visit() {
    let requested = &keys("gpu").requested;
    let safe_load = &keys("gpu").safe_load;
    let mut cases = vec![];
    for state in [Unknown, UpgradeDone] {
        let here = || n().labelled(state);
        cases.extend([
            case(state, "in sync and ready", here()),
            case(state, "outdated", here().outdated()),
            case(state, "upgrade requested", here().annotation(requested, "true")),
            case(state, "upgrade not requested", here().annotation(requested, "false")),
            case(state, "safe load asked for", here().annotation(safe_load, "true")),
            case(state, "driver pod not ready", here()).but(starting),
            case(state, "no driver pod", here()).but(no_driver_pod),
            case(state, "driver pod without owner", here()).but(|f| f.driver_mut("n").owner = None),
            case(state, "revision not known yet", here().outdated()).but(revision_unknown),
            case(state, "skipped and outdated", here().outdated().skipped()),
            case(state, "cordoned by somebody, in sync", here().cordoned()),
        ]);
    }
    let required = || n().outdated().labelled(UpgradeRequired);
    cases.extend(vec![
        case(UpgradeRequired, "slot free", required()),
        case(UpgradeRequired, "cordoned by somebody", required().cordoned()),
        case(UpgradeRequired, "back in sync", n().labelled(UpgradeRequired)),
        case(
            UpgradeRequired,
            "back in sync, not requested",
            n().labelled(UpgradeRequired).annotation(requested, "false"),
        ),
        case(
            UpgradeRequired,
            "in sync, but requested",
            n().labelled(UpgradeRequired).annotation(requested, "true"),
        ),
        case(UpgradeRequired, "skipped", required().skipped()),
        case(UpgradeRequired, "no slot", required()).policy(serde_json::json!({"maxUnavailable": 0})),
        case(UpgradeRequired, "revision not known yet", required()).but(revision_unknown),
        case(UpgradeRequired, "no driver pod", required()).but(no_driver_pod),
        case(UpgradeRequired, "node not Ready", required().not_ready()),
        case(UpgradeRequired, "pod without controller", required().pod(pod("notebook").bare())),
        case(UpgradeRequired, "pod with emptyDir", required().pod(pod("scratch").with_empty_dir())),
        case(UpgradeRequired, "pod of another DaemonSet", required().pod(pod("exporter").of_daemon_set())),
        case(
            UpgradeRequired,
            "pod without device or controller",
            required().pod(pod("shell").bare().gpus(0)),
        ),
        case(CordonRequired, "in service", n().outdated().at(CordonRequired)),
        case(CordonRequired, "cordoned by somebody", n().outdated().at(CordonRequired).cordoned()),
        case(CordonRequired, "upgrade was requested", n().at(CordonRequired).annotation(requested, "true")),
        case(CordonRequired, "revision not known yet", n().outdated().at(CordonRequired))
            .but(revision_unknown),
        case(UpgradeFailed, "without a record", n().labelled(UpgradeFailed)),
    ]);
    for state in State::ALL.into_iter().filter(|s| s.in_flight() && *s != CordonRequired) {
        cases.push(case(state, "without a record", n().outdated().labelled(state)));
    }
    insta::assert_snapshot!(table(cases));
}

#[test]
fn waiting_for_jobs_and_taking_pods_off() {
    let jobs = || n().outdated().at(WaitForJobsRequired);
    let wait_for =
        |seconds| serde_json::json!({"waitForCompletion": {"podSelector": "job", "timeoutSeconds": seconds}});
    let job = || pod("train").label("job", "a");
    let off = || n().outdated().at(PodDeletionRequired);
    let drain = serde_json::json!({"drain": {"enable": true}});
    let drain_by_force = serde_json::json!({"drain": {"enable": true, "force": true}});
    let draining = || n().outdated().at(DrainRequired);
    let train = ObjectName::new("work", "train");
    let insistent = serde_json::json!({"gpuPodDeletion": {"timeoutAction": "Delete"}});
    let cases = vec![
        case(WaitForJobsRequired, "nothing selected", jobs().pod(job())),
        case(WaitForJobsRequired, "a job runs", jobs().pod(job())).policy(wait_for(0)),
        case(WaitForJobsRequired, "a job is Pending", jobs().pod(job().phase(Phase::Pending)))
            .policy(wait_for(0)),
        case(WaitForJobsRequired, "the job has ended", jobs().pod(job().phase(Phase::Succeeded)))
            .policy(wait_for(0)),
        case(WaitForJobsRequired, "another pod runs", jobs().pod(pod("other"))).policy(wait_for(0)),
        case(WaitForJobsRequired, "in time", jobs().pod(job())).policy(wait_for(61)),
        case(WaitForJobsRequired, "time is up", jobs().pod(job())).policy(wait_for(60)),
        case(PodDeletionRequired, "nobody there", off()),
        case(PodDeletionRequired, "a pod uses the device", off().pod(pod("train"))),
        case(PodDeletionRequired, "a pod does not use the device", off().pod(pod("web").gpus(0))),
        case(PodDeletionRequired, "a finished pod", off().pod(pod("train").phase(Phase::Failed))),
        case(PodDeletionRequired, "a static pod", off().pod(pod("static").mirror())),
        case(
            PodDeletionRequired,
            "two pods, one leaves already",
            off().pod(pod("a").leaving()).pod(pod("b")),
        ),
        case(PodDeletionRequired, "all leave already", off().pod(pod("a").leaving())),
        case(PodDeletionRequired, "time is up", off().pod(pod("train"))).but(|f| f.wait(240)),
        case(PodDeletionRequired, "time is up, drain enabled", off().pod(pod("train")))
            .policy(drain.clone())
            .but(|f| f.wait(240)),
        case(PodDeletionRequired, "time is up, timeoutAction Delete", off().pod(pod("train")))
            .policy(insistent)
            .but(|f| f.wait(240)),
        case(PodDeletionRequired, "a bare pod came", off().pod(pod("shell").bare()).pod(pod("train"))),
        case(PodDeletionRequired, "a bare pod, force", off().pod(pod("shell").bare()))
            .policy(serde_json::json!({"gpuPodDeletion": {"force": true}})),
        case(PodDeletionRequired, "a bare pod, drain enabled", off().pod(pod("shell").bare()))
            .policy(drain.clone()),
        case(PodDeletionRequired, "emptyDir, deleteEmptyDir", off().pod(pod("scratch").with_empty_dir()))
            .policy(serde_json::json!({"podDeletion": {"deleteEmptyDir": true}})),
        case(PodDeletionRequired, "refused a moment ago", off().pod(pod("train")))
            .but(|f| f.setback(crate::snapshot::Object::Pod(train.clone()), SetbackKind::Refused, after(1))),
        case(DrainRequired, "drained", draining()).policy(drain.clone()),
        case(DrainRequired, "any pod", draining().pod(pod("web").gpus(0))).policy(drain.clone()),
        case(
            DrainRequired,
            "a pod that is left out",
            draining().pod(pod("web").gpus(0).label(&keys("gpu").drain_skip, "true")),
        )
        .policy(drain.clone()),
        case(DrainRequired, "a DaemonSet's pod", draining().pod(pod("agent").gpus(0).of_daemon_set()))
            .policy(drain.clone()),
        case(DrainRequired, "a bare pod", draining().pod(pod("shell").gpus(0).bare())).policy(drain.clone()),
        case(DrainRequired, "a bare pod, by force", draining().pod(pod("shell").gpus(0).bare()))
            .policy(drain_by_force),
        case(DrainRequired, "time is up", draining().pod(pod("web").gpus(0)))
            .policy(drain.clone())
            .but(|f| f.wait(240)),
        case(
            DrainRequired,
            "a device user is left out",
            draining().pod(pod("train").label(&keys("gpu").drain_skip, "true")),
        )
        .policy(drain.clone()),
        case(DrainRequired, "a DaemonSet's device user", draining().pod(pod("agent").of_daemon_set()))
            .policy(drain),
        case(DrainRequired, "drain was switched off", draining().pod(pod("web").gpus(0))),
    ];
    insta::assert_snapshot!(table(cases));
}

#[test]
fn restart_and_validation() {
    let restart = || n().at(PodRestartRequired);
    let safe_load = &keys("gpu").safe_load;
    let validate = || n().at(ValidationRequired);
    let crash = |f: &mut Fleet| {
        starting(f);
        let trouble = crate::snapshot::Trouble {
            container: "nvidia-driver-ctr".into(),
            reason: "ImagePullBackOff".into(),
            message: "manifest unknown".into(),
            restarts: 0,
        };
        f.driver_mut("n").trouble = Some(trouble);
    };
    let cases = vec![
        case(PodRestartRequired, "outdated", restart().outdated()),
        case(PodRestartRequired, "outdated, a pod came back", restart().outdated().pod(pod("train"))),
        case(PodRestartRequired, "without owner", restart()).but(|f| f.driver_mut("n").owner = None),
        case(PodRestartRequired, "old pod stops", restart().outdated())
            .but(|f| f.driver_mut("n").deleting = Some(after(30))),
        case(PodRestartRequired, "old pod does not stop", restart().outdated()).but(|f| {
            f.driver_mut("n").deleting = Some(after(30));
            f.wait(1740);
        }),
        case(PodRestartRequired, "no pod yet", restart()).but(no_driver_pod),
        case(PodRestartRequired, "its label is lost, and the pod with it", restart()).but(|f| {
            no_driver_pod(f);
            f.node_mut("n").set_label("gpu", None);
        }),
        case(PodRestartRequired, "no pod ever", restart()).but(|f| {
            no_driver_pod(f);
            f.wait(1740);
        }),
        case(PodRestartRequired, "new pod starts", restart()).but(starting),
        case(PodRestartRequired, "new pod cannot start", restart()).but(crash),
        case(PodRestartRequired, "time is up", restart()).but(|f| {
            crash(f);
            f.wait(1740);
        }),
        case(PodRestartRequired, "node not Ready", restart().outdated().not_ready()),
        case(PodRestartRequired, "node not Ready for too long", restart().outdated().not_ready())
            .but(|f| f.wait(1740)),
        case(PodRestartRequired, "init container works", restart()).but(|f| {
            starting(f);
            f.driver_mut("n").initializing = Some("k8s-driver-manager".into());
        }),
        case(PodRestartRequired, "new pod ready", restart()),
        case(PodRestartRequired, "new pod waits for a safe load", restart().annotation(safe_load, "true"))
            .but(starting),
        case(ValidationRequired, "all pass", validate()),
        case(ValidationRequired, "node not Ready", validate().not_ready()),
        case(ValidationRequired, "asks for a safe load again", validate().annotation(safe_load, "true"))
            .but(starting),
        case(ValidationRequired, "driver not ready any more", validate()).but(starting),
        case(ValidationRequired, "validator not ready", validate())
            .but(|f| f.validator_mut("n").ready = false),
        case(ValidationRequired, "validator leaves", validate())
            .but(|f| f.validator_mut("n").deleting = Some(after(9))),
        case(ValidationRequired, "validator missing", validate())
            .but(|f| f.remove_pods("n", |p| p.name.name.contains("validator"))),
        case(ValidationRequired, "validator proved the old driver", validate())
            .but(|f| f.driver_mut("n").started = Some(after(-30))),
        case(ValidationRequired, "time is up", validate()).but(|f| {
            f.validator_mut("n").ready = false;
            f.wait(540);
        }),
        case(ValidationRequired, "a newer version came", validate()).but(|f| f.publish("gpu", 3, "newer")),
        case(UncordonRequired, "all well", n().at(UncordonRequired)),
        case(
            UncordonRequired,
            "the cordon is somebody else's",
            n().at(UncordonRequired).visit(|v| v.holds.cordon = false),
        ),
        case(
            UncordonRequired,
            "told to keep it cordoned",
            n().at(UncordonRequired).label("pitcrew.dev/keep-cordoned", "true"),
        ),
        case(UncordonRequired, "driver not ready any more", n().at(UncordonRequired)).but(starting),
        case(UncordonRequired, "node not Ready", n().at(UncordonRequired).not_ready()),
        case(
            UncordonRequired,
            "the driver asks for a safe load again",
            n().at(UncordonRequired).annotation(safe_load, "true"),
        ),
        case(UncordonRequired, "a newer version came", n().at(UncordonRequired))
            .but(|f| f.publish("gpu", 3, "newer")),
        case(UpgradeFailed, "nothing changed", n().at(UpgradeFailed)).but(starting),
        case(UpgradeFailed, "the same pod recovered", n().at(UpgradeFailed)),
        case(UpgradeFailed, "a newer version came", n().at(UpgradeFailed))
            .but(|f| f.publish("gpu", 3, "newer")),
        case(UpgradeFailed, "another driver pod, ready", n().at(UpgradeFailed))
            .but(|f| f.driver_mut("n").uid = "by-hand".into()),
        case(UpgradeFailed, "another driver pod, not ready", n().at(UpgradeFailed)).but(|f| {
            starting(f);
            f.driver_mut("n").uid = "by-hand".into();
        }),
        case(UpgradeFailed, "uncordoned by a person", n().at(UpgradeFailed).uncordoned()),
    ];
    insta::assert_snapshot!(table(cases));
}
