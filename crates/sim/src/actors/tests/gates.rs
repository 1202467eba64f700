//! Gates: the real Jobs of pitcrew's presets, and the verdicts that follow from what the cluster shows of them.

use k8s_openapi::api::batch::v1::Job;
use pitcrew_core::api::{GateSpec, Preset};
use pitcrew_core::contract::GATE_LABEL;
use pitcrew_core::gate::{
    Gate, GateJob, GatePod, JobFacts, Obstacle, Order, Place, Sample, Verdict, Why, manifest, verdict,
};
use pitcrew_core::names::NodeName;

use super::*;
use crate::actors::{GateOutcome, GateRule, Nodes};

fn gate(preset: Preset) -> Gate {
    Gate::read(&GateSpec { timeout: "2m".into(), ..GateSpec::preset(preset) }).unwrap()
}

fn manifest_for(gate: &Gate, nodes: &[&str], sample: Sample) -> Value {
    let nodes: Vec<NodeName> = nodes.iter().map(|node| NodeName::from(*node)).collect();
    let places: Vec<_> =
        nodes.iter().map(|node| Place { node, gpus: 8, address: Some("10.0.0.1"), taints: &[] }).collect();
    let order = Order {
        namespace: NAMESPACE,
        driver: &"gpu".into(),
        rollout: "cluster-policy-1",
        stage: None,
        places: &places,
        sample,
        attempt: 1,
        subject: "7d9f",
        kept: pitcrew_core::gate::KEPT,
        version: None,
        previous: None,
    };
    manifest(gate, &order)
}

impl Cluster {
    async fn gated(behaviour: Behaviour) -> Self {
        Self::of(&Fleet::new(3).with_workloads(Vec::new()), behaviour).await
    }

    /// Makes a gate's Job and returns its name.
    async fn start_gate(&self, gate: &Gate, nodes: &[&str], sample: Sample) -> String {
        self.create::<Job>(NAMESPACE, manifest_for(gate, nodes, sample)).await.name_any()
    }

    /// What pitcrew would know of the Job.
    async fn gate_job(&self, name: &str) -> GateJob {
        let job: Job = self.get(NAMESPACE, name).await;
        let pods: Vec<_> = self.pods(GATE_LABEL).await.iter().filter_map(GatePod::read).collect();
        let now = "2026-04-01T08:00:00Z".parse().unwrap();
        JobFacts::read(&job).expect("a gate's Job").with(&pods, now)
    }
}

#[tokio::test(start_paused = true)]
async fn a_gate_goes_to_its_node_past_the_cordon_and_passes() {
    let cluster = Cluster::gated(Behaviour::default()).await;
    cluster.patch_node("gpu-02", json!({"spec": {"unschedulable": true}})).await;
    let gate = gate(Preset::SmokeTraining);
    let name = cluster.start_gate(&gate, &["gpu-02"], Sample::After).await;
    seconds(10).await;
    assert_eq!(nodes_of(&cluster.pods(GATE_LABEL).await), ["gpu-02"]);
    let verdict = verdict(&gate, None, &cluster.gate_job(&name).await);
    assert!(
        matches!(&verdict, Verdict::Passed { numbers, .. } if numbers.contains_key("loss")),
        "{verdict:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_failing_gate_is_tried_again_and_leaves_its_log() {
    let cause = GateOutcome::Fails { exit_code: 3, log: "loss is nan".into() };
    let behaviour = Behaviour::default().with_gate("smoke-training", Nodes::All, cause);
    let cluster = Cluster::gated(behaviour).await;
    let gate = gate(Preset::SmokeTraining);
    let name = cluster.start_gate(&gate, &["gpu-02"], Sample::After).await;
    seconds(5).await;
    let running = verdict(&gate, None, &cluster.gate_job(&name).await);
    assert_eq!(running, Verdict::Running { waits: None });
    seconds(20).await;
    assert_eq!(cluster.pods(GATE_LABEL).await.len(), 2);
    let verdict = verdict(&gate, None, &cluster.gate_job(&name).await);
    let Verdict::Failed { why, log_tail, .. } = verdict else { panic!("{verdict:?}") };
    assert_eq!((why, log_tail.as_ref()), (Why::Exited { code: 3 }, "loss is nan"));
}

#[tokio::test(start_paused = true)]
async fn a_new_driver_with_more_errors_fails_against_the_sample_before() {
    let errors = json!({"gpus": 8, "withEcc": 8, "corrected": 0, "uncorrected": 2});
    let rule = GateRule {
        gate: None,
        nodes: Nodes::Named("gpu-01".into()),
        version: Some("550.54.15".into()),
        outcome: GateOutcome::Passes { report: errors },
    };
    let cluster = Cluster::gated(Behaviour::default().with_gate_rule(rule)).await;
    let gate = gate(Preset::EccErrors);
    let before = cluster.start_gate(&gate, &["gpu-01"], Sample::Before).await;
    seconds(10).await;
    cluster.set_version("550.54.15").await;
    seconds(2).await;
    cluster.delete(&cluster.drivers().await[0]).await;
    seconds(10).await;
    let after = cluster.start_gate(&gate, &["gpu-01"], Sample::After).await;
    seconds(10).await;
    let (before, after) = (cluster.gate_job(&before).await, cluster.gate_job(&after).await);
    let Verdict::Failed { why, .. } = verdict(&gate, Some(&before), &after) else { panic!("{after:?}") };
    assert_eq!(why.to_string(), "uncorrected was 0 before and is 2; it may grow by 0");
}

#[tokio::test(start_paused = true)]
async fn a_gate_that_hangs_has_failed_and_one_without_image_is_not_judged() {
    let behaviour = Behaviour::default()
        .with_gate("smoke-training", Nodes::All, GateOutcome::Hangs)
        .with_gate("smoke-inference", Nodes::All, GateOutcome::ImageMissing);
    let cluster = Cluster::gated(behaviour).await;
    let (hangs, missing) = (gate(Preset::SmokeTraining), gate(Preset::SmokeInference));
    let hanging = cluster.start_gate(&hangs, &["gpu-01"], Sample::After).await;
    let imageless = cluster.start_gate(&missing, &["gpu-01"], Sample::After).await;
    seconds(30).await;
    let waits = verdict(&missing, None, &cluster.gate_job(&imageless).await);
    let Verdict::Running { waits: Some(Obstacle::NotStarted { says }) } = waits else { panic!("{waits:?}") };
    assert!(says.starts_with("ImagePullBackOff"), "{says}");
    assert_eq!(verdict(&hangs, None, &cluster.gate_job(&hanging).await), Verdict::Running { waits: None });
    // Two tries of two minutes, and the Job controller's wait in between.
    seconds(270).await;
    let hung = verdict(&hangs, None, &cluster.gate_job(&hanging).await);
    assert!(matches!(hung, Verdict::Failed { why: Why::TimedOut { .. }, .. }), "{hung:?}");
    let missing = verdict(&missing, None, &cluster.gate_job(&imageless).await);
    assert!(matches!(missing, Verdict::Unjudged { why: Obstacle::NotStarted { .. } }), "{missing:?}");
}

#[tokio::test(start_paused = true)]
async fn a_gate_that_finds_no_free_gpu_is_not_judged() {
    let cluster = Cluster::gated(Behaviour::default()).await;
    let limits = json!({"limits": {"nvidia.com/gpu": 8}});
    let tolerations = json!([{"operator": "Exists"}]);
    let spec = json!({"nodeName": "gpu-01", "tolerations": tolerations,
                      "containers": [{"name": "main", "image": "hog", "resources": limits}]});
    cluster.create::<Pod>("default", json!({"metadata": {"name": "hog"}, "spec": spec})).await;
    let gate = gate(Preset::MultiGpu);
    let name = cluster.start_gate(&gate, &["gpu-01"], Sample::After).await;
    seconds(30).await;
    let waits = verdict(&gate, None, &cluster.gate_job(&name).await);
    let Verdict::Running { waits: Some(Obstacle::NotScheduled { .. }) } = waits else { panic!("{waits:?}") };
    // Twice two minutes, and twice two more to get a place.
    seconds(8 * 60).await;
    let verdict = verdict(&gate, None, &cluster.gate_job(&name).await);
    assert!(matches!(verdict, Verdict::Unjudged { why: Obstacle::NotScheduled { .. } }), "{verdict:?}");
}

#[tokio::test(start_paused = true)]
async fn a_gate_over_two_nodes_has_one_pod_on_each_at_the_same_time() {
    let cluster = Cluster::gated(Behaviour::default()).await;
    // Few enough GPUs that both pods would fit on one node.
    let spec = GateSpec { gpus: Some(1), ..GateSpec::preset(Preset::DistributedTraining) };
    let gate = Gate::read(&spec).unwrap();
    let name = cluster.start_gate(&gate, &["gpu-01", "gpu-03"], Sample::After).await;
    seconds(1).await;
    let pods = cluster.pods(GATE_LABEL).await;
    assert_eq!(nodes_of(&pods), ["gpu-01", "gpu-03"]);
    seconds(10).await;
    let verdict = verdict(&gate, None, &cluster.gate_job(&name).await);
    assert!(matches!(verdict, Verdict::Passed { .. }), "{verdict:?}");
}

#[tokio::test(start_paused = true)]
async fn a_second_pod_waits_while_the_only_other_node_is_down() {
    let mut behaviour =
        Behaviour::default().with_gate("distributed-training", Nodes::All, GateOutcome::Hangs);
    behaviour.timing.jitter = 0.0;
    let cluster = Cluster::gated(behaviour).await;
    cluster.actors.behaviour().change(|behaviour| behaviour.down.extend(["gpu-03".to_owned()]));
    seconds(5).await;
    let spec = GateSpec { gpus: Some(1), ..GateSpec::preset(Preset::DistributedTraining) };
    cluster.start_gate(&Gate::read(&spec).unwrap(), &["gpu-01", "gpu-03"], Sample::After).await;
    seconds(10).await;
    let pods = cluster.pods(GATE_LABEL).await;
    assert_eq!((pods.len(), nodes_of(&pods)), (2, vec!["gpu-01"]));
}

#[tokio::test(start_paused = true)]
async fn a_finished_gate_goes_with_its_pods_after_an_hour() {
    let cluster = Cluster::gated(Behaviour::default()).await;
    let name = cluster.start_gate(&gate(Preset::DriverVersion), &["gpu-01"], Sample::After).await;
    seconds(50 * 60).await;
    assert!(cluster.gate_job(&name).await.outcome.is_some());
    seconds(20 * 60).await;
    let jobs: Api<Job> = Api::namespaced(cluster.client.clone(), NAMESPACE);
    assert!(jobs.get_opt(&name).await.unwrap().is_none());
    assert!(cluster.pods(GATE_LABEL).await.is_empty());
}
