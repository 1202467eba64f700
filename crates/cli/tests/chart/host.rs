//! The kubelet of the hosts on which pods are processes: a container of pitcrew's image is this tree's `pitcrew`, with the
//! arguments and the environment of the pod and a token of its service account.
//!
//! Every look compares the pods of a host with the processes that run for them, and writes what differs into their
//! status: started, ready by its probe, ended with an exit code.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Container, EnvVar, Pod, Probe, ServiceAccount};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt as _};
use libtest_mimic::Failed;
use pitcrew_controller::Clock;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::supervised::Supervised;

const LOOK_EVERY: Duration = Duration::from_millis(200);
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);
/// Between the end of a container and its next start; a real kubelet begins with ten times as much.
const RESTART_AFTER: Duration = Duration::from_secs(1);
/// The end of the log that becomes the termination message.
const LAST_WORDS: usize = 2048;

/// Who runs pods as processes on some nodes.
pub(crate) struct Host {
    pub(crate) client: Client,
    pub(crate) nodes: Vec<String>,
    /// A kubeconfig of somebody else for the same cluster.
    pub(crate) kubeconfig: PathBuf,
    /// Where logs and kubeconfigs of pods go.
    pub(crate) dir: PathBuf,
    pub(crate) containers: BTreeMap<String, Running>,
}

/// One container.
pub(crate) struct Running {
    process: Supervised,
    port: u16,
    log: PathBuf,
    restarts: u32,
    since: Instant,
    ready: bool,
    stopping: Option<Instant>,
}

impl Host {
    /// Looks again and again; a look that fails is said and made again.
    pub(crate) async fn run(mut self) {
        loop {
            if let Err(failed) = self.look().await {
                eprintln!("a host: {}", failed.message().unwrap_or("failed"));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    async fn look(&mut self) -> Result<(), Failed> {
        let mut seen = BTreeSet::new();
        for node in self.nodes.clone() {
            let here = ListParams::default().fields(&format!("spec.nodeName={node}"));
            for pod in Api::<Pod>::all(self.client.clone()).list(&here).await? {
                seen.insert(pod.uid().unwrap_or_default());
                if pod.metadata.deletion_timestamp.is_some() {
                    self.stop(&pod).await?;
                } else {
                    self.live(&pod).await?;
                }
            }
        }
        self.containers.retain(|uid, _| seen.contains(uid));
        Ok(())
    }

    /// SIGTERM, SIGKILL when the grace is over, then the pod goes.
    async fn stop(&mut self, pod: &Pod) -> Result<(), Failed> {
        let uid = pod.uid().unwrap_or_default();
        if let Some(container) = self.containers.get_mut(&uid) {
            let grace = pod.metadata.deletion_grace_period_seconds.unwrap_or(30).unsigned_abs();
            let since = *container.stopping.get_or_insert_with(|| {
                container.process.terminate();
                Instant::now()
            });
            if container.process.ended()?.is_none() && since.elapsed() < Duration::from_secs(grace) {
                return Ok(());
            }
            self.containers.remove(&uid);
        }
        let now = DeleteParams::default().grace_period(0);
        match self.pods(pod).delete(&pod.name_any(), &now).await {
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            answer => Ok(answer.map(drop)?),
        }
    }

    async fn live(&mut self, pod: &Pod) -> Result<(), Failed> {
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        if matches!(phase, Some("Succeeded" | "Failed")) {
            return Ok(());
        }
        let (uid, container) = (pod.uid().unwrap_or_default(), container(pod)?);
        let Some(running) = self.containers.get_mut(&uid) else {
            let running = self.start(pod, container, 0).await?;
            self.containers.insert(uid, running);
            return self.tell(pod, "Running", &json!({"running": {"startedAt": now()}}), 0, false).await;
        };
        if let Some(status) = running.process.ended()? {
            let (restarts, code) = (running.restarts, status.code().unwrap_or(137));
            let ended = json!({"terminated": {
                "exitCode": code,
                "reason": if code == 0 { "Completed" } else { "Error" },
                "message": last_words(&running.log)?,
                "finishedAt": now(),
            }});
            if pod.spec.as_ref().and_then(|spec| spec.restart_policy.as_deref()) == Some("Never") {
                self.containers.remove(&uid);
                return self
                    .tell(pod, if code == 0 { "Succeeded" } else { "Failed" }, &ended, 0, false)
                    .await;
            }
            self.tell(pod, "Running", &ended, restarts, false).await?;
            tokio::time::sleep(RESTART_AFTER).await;
            let again = self.start(pod, container, restarts + 1).await?;
            self.containers.insert(uid, again);
            return Ok(());
        }
        let ready = container.readiness_probe.as_ref().is_none_or(|probe| passes(probe, running.port));
        let alive = container.liveness_probe.as_ref().is_none_or(|probe| {
            let delay = probe.initial_delay_seconds.unwrap_or(0).unsigned_abs();
            running.since.elapsed() < Duration::from_secs(delay.into()) || passes(probe, running.port)
        });
        if !alive {
            running.process.kill();
        }
        if running.ready != ready {
            running.ready = ready;
            let restarts = running.restarts;
            let state = json!({"running": {"startedAt": now()}});
            return self.tell(pod, "Running", &state, restarts, ready).await;
        }
        Ok(())
    }

    async fn start(&self, pod: &Pod, container: &Container, restarts: u32) -> Result<Running, Failed> {
        let name = pod.name_any();
        let kubeconfig = self.dir.join(format!("{name}.kubeconfig"));
        fs::write(&kubeconfig, self.kubeconfig_for(pod).await?)?;
        let log = self.dir.join(format!("{name}-{restarts}.log"));
        let (output, port) = (File::create(&log)?, free_port()?);
        let mut command = Supervised::command(Path::new(env!("CARGO_BIN_EXE_pitcrew")));
        for argument in container.args.iter().flatten() {
            // Two pods of one machine cannot have the same port.
            let listens = argument.starts_with("--listen=");
            command.arg(if listens { format!("--listen=127.0.0.1:{port}") } else { argument.clone() });
        }
        command.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command.env("KUBECONFIG", &kubeconfig).envs(environment(pod, container)?);
        command.stdout(output.try_clone()?).stderr(output);
        let process = Supervised::spawn(&mut command)?;
        Ok(Running { process, port, log, restarts, since: Instant::now(), ready: false, stopping: None })
    }

    /// The token that the pod would find in its volume.
    async fn kubeconfig_for(&self, pod: &Pod) -> Result<String, Failed> {
        let account = pod.spec.as_ref().and_then(|spec| spec.service_account_name.clone());
        let account = account.ok_or("a pod without a service account")?;
        let accounts = Api::<ServiceAccount>::namespaced(self.client.clone(), &namespace(pod));
        let spec = TokenRequestSpec { expiration_seconds: Some(3600), ..TokenRequestSpec::default() };
        let request = TokenRequest { spec: Some(spec), ..TokenRequest::default() };
        let answer = accounts.create_token_request(&account, &PostParams::default(), &request).await?;
        let mut config: Value = serde_json::from_slice(&fs::read(&self.kubeconfig)?)?;
        config["users"][0]["user"] = json!({"token": answer.status.unwrap_or_default().token});
        Ok(config.to_string())
    }

    async fn tell(
        &self,
        pod: &Pod,
        phase: &str,
        state: &Value,
        restarts: u32,
        ready: bool,
    ) -> Result<(), Failed> {
        let container = container(pod)?;
        let condition = |kind: &str, holds: bool| {
            let status = if holds { "True" } else { "False" };
            json!({"type": kind, "status": status, "lastTransitionTime": now()})
        };
        let status = json!({"status": {
            "phase": phase,
            "startTime": pod.creation_timestamp(),
            "conditions": [
                condition("PodScheduled", true), condition("Initialized", true),
                condition("ContainersReady", ready), condition("Ready", ready),
            ],
            "containerStatuses": [{
                "name": container.name, "image": container.image, "imageID": "", "state": state,
                "ready": ready, "started": state.get("running").is_some(), "restartCount": restarts,
            }],
        }});
        let name = pod.name_any();
        match self.pods(pod).patch_status(&name, &PatchParams::default(), &Patch::Merge(status)).await {
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            answer => Ok(answer.map(drop)?),
        }
    }

    fn pods(&self, pod: &Pod) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &namespace(pod))
    }
}

fn namespace(pod: &Pod) -> String {
    pod.namespace().unwrap_or_default()
}

/// The only container, which must be pitcrew's: nothing else can be run here.
fn container(pod: &Pod) -> Result<&Container, Failed> {
    let containers = pod.spec.as_ref().map(|spec| &spec.containers[..]).unwrap_or_default();
    match containers {
        [one] if one.image.as_deref().is_some_and(|image| image.contains("pitcrew")) => Ok(one),
        _ => Err(format!("{} is not pitcrew's", pod.name_any()).into()),
    }
}

fn environment(pod: &Pod, container: &Container) -> Result<Vec<(String, String)>, Failed> {
    let pod = serde_json::to_value(pod)?;
    let value = |variable: &EnvVar| {
        let field = variable.value_from.as_ref().and_then(|from| from.field_ref.as_ref());
        let pointer = field.map(|field| format!("/{}", field.field_path.replace('.', "/")));
        let found =
            pointer.and_then(|pointer| pod.pointer(&pointer).and_then(Value::as_str).map(str::to_owned));
        (variable.name.clone(), variable.value.clone().or(found).unwrap_or_default())
    };
    Ok(container.env.iter().flatten().map(value).collect())
}

fn passes(probe: &Probe, port: u16) -> bool {
    let path = probe.http_get.as_ref().and_then(|get| get.path.as_deref()).unwrap_or("/");
    let ask = || {
        let mut stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_read_timeout(Some(PROBE_TIMEOUT))?;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
        let mut answer = [0; 12];
        stream.read_exact(&mut answer)?;
        std::io::Result::Ok(&answer == b"HTTP/1.1 200")
    };
    ask().unwrap_or(false)
}

fn last_words(log: &Path) -> Result<String, Failed> {
    let said = String::from_utf8_lossy(&fs::read(log)?).into_owned();
    Ok(said.chars().skip(said.chars().count().saturating_sub(LAST_WORDS)).collect())
}

fn now() -> String {
    // Kubernetes takes whole seconds.
    Clock::System.now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

fn free_port() -> std::io::Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}
