//! What the kubelets know of one node: its driver, its driver's clients, and what keeps a pod there from starting.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{Event, Node, ObjectReference, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::api::PostParams;
use kube::{Api, ResourceExt};
use tokio::time::Instant;

use super::agents::Progress;
use super::cache::Key;
use super::clients::{asks_for_gpu, is_device_plugin, is_operand};
use super::dra::is_plugin;
use super::kubelet::Kubelets;
use super::object::{hash_name, is_ready, is_terminating, node_of, value};
use super::operator::DEPLOY_DRIVER;
use super::pod_life::{Course, DriverRun, Life, Machine};
use super::role::{Role, claims, driver_version, role};
use super::slices::Plugin;
use super::way::Way;
use super::write::{Fold, Write};

/// What a plugin says that has a driver open which is not there any more.
const EMPTY_EDITS: &str = "Failed to prepare dynamic resources: NodePrepareResources failed: unable to create CDI \
                           spec file: invalid CDI Spec: failed add device \"gpu-0\": empty device edits";
/// What the kubelet says while there is no plugin.
const NOT_REGISTERED: &str =
    "Failed to prepare dynamic resources: DRA driver gpu.nvidia.com is not registered";

/// What keeps a pod's main container from its first start.
pub(super) enum Obstacle {
    /// A client waits for the driver.
    NoDriver,
    /// The driver-manager waits for the operands of the node to leave.
    Operands(Vec<Arc<Pod>>),
    /// One of our own agents is at work, or has failed.
    Agent(Option<String>),
    /// Claims cannot be prepared.
    Claims(&'static str),
}

impl Obstacle {
    pub(super) fn course(&self, course: &Course) -> Course {
        let start = course.start();
        match self {
            Self::NoDriver | Self::Operands(_) | Self::Agent(None) => Course::Gate { start },
            Self::Agent(Some(message)) => Course::InitFailed { start, message: message.clone() },
            Self::Claims(_) => Course::Unprepared { start },
        }
    }
}

impl Kubelets {
    /// Who provides the driver on a node, as the API tells: the UID of its driver pod while that is Ready, or the
    /// machine itself.
    pub(super) fn driver_on(&self, node: &Node) -> Option<String> {
        if has_own_driver(node) {
            return Some("host".into());
        }
        let mut ready = self.drivers_on(node).filter(|(_, pod)| is_ready(pod));
        ready.next()?.1.metadata.uid.clone()
    }

    /// The driver that is loaded on a node, as the kubelet itself knows, which is before the API does.
    pub(super) fn driver_run(&self, node: &Node) -> Option<DriverRun> {
        let boot = self.boot(&node.name_any());
        if has_own_driver(node) {
            return Some(DriverRun { id: format!("host/{boot}"), version: None, since: None });
        }
        let run = |(key, pod): (&Key, &Arc<Pod>)| self.life(key, pod).as_driver(driver_version(pod), boot);
        self.drivers_on(node).find_map(run)
    }

    fn drivers_on(&self, node: &Node) -> impl Iterator<Item = (&Key, &Arc<Pod>)> {
        let name = node.metadata.name.as_deref().unwrap_or_default();
        self.pods(self.drivers_on.get(name)).filter(|(_, pod)| !is_terminating(pod.as_ref()))
    }

    fn on(&self, node: &str) -> impl Iterator<Item = (&Key, &Arc<Pod>)> {
        self.pods(self.pods_on.get(node))
    }

    fn plugins_on(&self, node: &str) -> impl Iterator<Item = (&Key, &Arc<Pod>)> {
        self.pods(self.plugins_on.get(node))
    }

    fn pods<'a>(
        &'a self,
        keys: impl Iterator<Item = &'a Key>,
    ) -> impl Iterator<Item = (&'a Key, &'a Arc<Pod>)> {
        keys.filter_map(|key| Some((key, self.pods.cache.get(key)?)))
    }

    /// Where a pod is in its life, also if this kubelet has not looked at it yet.
    fn life(&self, key: &Key, pod: &Pod) -> Life {
        let begin = || {
            let boot = self.boot(node_of(pod).unwrap_or_default());
            let machine = Machine { driver: None, run: None, boot, driver_restarts: 0 };
            Life::of(pod, self.clock.now(), machine)
        };
        self.lives.get(key).cloned().unwrap_or_else(begin)
    }

    pub(super) fn has_device_plugin(&self, node: &str) -> bool {
        let ready = |pod: &Pod| is_device_plugin(pod) && is_ready(pod) && !is_terminating(pod);
        self.plugins_on(node).any(|(_, pod)| ready(pod))
    }

    /// The node's DRA plugin, if it serves, and the driver that it has open.
    fn dra_plugin(&self, node: &str) -> Option<(Plugin, DriverRun)> {
        let boot = self.boot(node);
        let serves = |(key, pod): (&Key, &Arc<Pod>)| {
            let life = self.lives.get(key).filter(|life| life.ready && life.is_past_init_in(boot))?;
            let saw = life.saw.clone().filter(|_| !is_terminating(pod.as_ref()) && is_plugin(pod))?;
            let id = format!("{}/{}", life.uid, life.restarts);
            Some((Plugin { id, version: saw.version.clone() }, saw))
        };
        self.plugins_on(node).find_map(serves)
    }

    pub(super) fn publisher(&self, node: &str) -> Option<Plugin> {
        self.dra_plugin(node).map(|(plugin, _)| plugin)
    }

    /// What keeps `pod` from starting, while its main container has not.
    pub(super) fn obstacle(
        &mut self,
        key: &Key,
        pod: &Pod,
        node: &Node,
        run: Option<&DriverRun>,
    ) -> Option<Obstacle> {
        match role(pod) {
            Role::Client => run.is_none().then_some(Obstacle::NoDriver),
            Role::Driver if self.behaviour.borrow().agents.is_some() => {
                let boot = self.boot(&node.name_any());
                match self.agents.progress(key, pod, boot, Instant::now()) {
                    Progress::Due => Some(Obstacle::Agent(None)),
                    Progress::Failed(sentence) => Some(Obstacle::Agent(Some(sentence))),
                    Progress::Done => None,
                }
            }
            Role::Driver if self.behaviour.borrow().driver_manager => {
                let operands = self.in_the_way(&node.name_any());
                (!operands.is_empty()).then_some(Obstacle::Operands(operands))
            }
            Role::Job | Role::Workload if self.slices.in_use && claims(pod) => {
                self.unprepared(&node.name_any(), run).map(Obstacle::Claims)
            }
            _ => None,
        }
    }

    /// The operands that have a driver open, or are not gone yet. After a boot nobody has, and the driver-manager
    /// finds no driver loaded and leaves them alone.
    fn in_the_way(&self, node: &str) -> Vec<Arc<Pod>> {
        let boot = self.boot(node);
        let stays = |key: &Key, pod: &Pod| is_terminating(pod) || self.life(key, pod).is_past_init_in(boot);
        let operands = self.on(node).filter(|(key, pod)| is_operand(pod) && stays(key, pod));
        operands.map(|(_, pod)| pod.clone()).collect()
    }

    /// Who has the driver of a node open: its clients, and whoever has a device.
    pub(super) fn users_on(&self, node: &str) -> Vec<String> {
        let boot = self.boot(node);
        let uses = |pod: &Pod| {
            matches!(role(pod), Role::Client | Role::Validator) || claims(pod) || asks_for_gpu(pod)
        };
        let open = self.on(node).filter(|(key, pod)| {
            let alive = self.lives.get(key).is_some_and(|life| life.is_past_init_in(boot) && !life.is_over());
            alive && uses(pod)
        });
        open.map(|(_, pod)| pod.name_any()).collect()
    }

    fn unprepared(&self, node: &str, run: Option<&DriverRun>) -> Option<&'static str> {
        match self.dra_plugin(node) {
            None => Some(NOT_REGISTERED),
            Some((_, saw)) => (Some(&saw) != run).then_some(EMPTY_EDITS),
        }
    }
}

/// Whether the driver came with the machine.
fn has_own_driver(node: &Node) -> bool {
    value(node.metadata.labels.as_ref(), DEPLOY_DRIVER) != Some("true")
}

/// Tells people why a pod does not start.
pub(super) fn tell(way: &Way, pod: &Pod, why: &'static str, now: &Time) -> Write<Kubelets> {
    let key = Key::of(pod);
    let about = ObjectReference {
        api_version: Some("v1".into()),
        kind: Some("Pod".into()),
        namespace: pod.namespace(),
        name: pod.metadata.name.clone(),
        uid: pod.metadata.uid.clone(),
        ..ObjectReference::default()
    };
    let event = Event {
        metadata: ObjectMeta {
            namespace: pod.namespace(),
            name: Some(format!("{}.{}", key.name, hash_name(&(&pod.metadata.uid, why)))),
            ..ObjectMeta::default()
        },
        involved_object: about,
        type_: Some("Warning".into()),
        reason: Some("FailedPrepareDynamicResources".into()),
        message: Some(why.into()),
        first_timestamp: Some(now.clone()),
        last_timestamp: Some(now.clone()),
        count: Some(1),
        ..Event::default()
    };
    let way = way.clone();
    Write::new(async move {
        let api: Api<Event> = Api::namespaced(way.client(), &key.namespace);
        match api.create(&PostParams::default(), &event).await {
            Ok(_) => {}
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            Err(error) => return Err(error),
        }
        let fold: Fold<Kubelets> = Box::new(move |kubelets| {
            if let Some(life) = kubelets.lives.get_mut(&key) {
                life.told = Some(why);
            }
        });
        Ok(fold)
    })
}
