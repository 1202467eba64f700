//! A real control plane as child processes: etcd, kube-apiserver, kube-controller-manager, kube-scheduler.
//!
//! ```text
//!  binaries.rs   which programs, where they lie         access.rs     users, tokens, kubeconfigs
//!  process.rs    a child that never outlives us         arguments.rs  each program's command line
//!  data.rs       the directory of all that it writes    prometheus.rs a Prometheus beside it
//! ```
//!
//! Everything listens on loopback, on ports that the kernel chose, so several planes run side by side. There is
//! no kubelet: the actors of this crate play them, as they do in the embedded cluster, and that is how the two
//! are compared.

mod access;
mod arguments;
mod binaries;
mod data;
mod process;
mod prometheus;

use std::fs;
use std::io;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::Duration;

use tokio::time::Instant;

pub use access::User;
pub use binaries::{
    Binaries, HELM_PROGRAMS, HELM_VERSION, Helm, MissingBinaries, PROGRAMS, Program, VERSION, cache_dir,
};

pub use prometheus::{Prometheus, prometheus_dir};

use access::Access;
use arguments::Ports;
use data::Data;
use process::Process;

/// From the first process to the last answer. Five seconds on an idle machine; a busy one gets its time.
const READY_TIMEOUT: Duration = Duration::from_mins(1);

/// Short against the start itself, long against the cost of a look.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Another program can take a port between our asking for it and the server's binding it. Twice is chance.
const ATTEMPTS_MAX: u32 = 3;

/// What kind of plane to start.
#[derive(Clone, Debug, Default)]
pub struct PlaneOptions {
    /// What is written to [`Plane::audit_log`].
    pub audit: AuditLog,
    /// Keep the data here and leave them there. Not set: a temporary directory that goes with the plane.
    pub data_dir: Option<PathBuf>,
}

/// What the audit log tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AuditLog {
    /// There is none.
    #[default]
    None,
    /// One line per request and nothing of its content.
    Requests,
    /// For changes that promises are about, what was sent and what came of it too.
    Changes,
}

/// Why a plane did not start. What was started is ended again.
#[derive(Debug, thiserror::Error)]
pub enum PlaneError {
    /// The data directory cannot be made or written.
    #[error("prepare the data directory {dir}")]
    Prepare {
        /// The directory.
        dir: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The kernel has no free port on loopback.
    #[error("ask for a free port on 127.0.0.1")]
    Port(#[source] io::Error),
    /// A program cannot be started at all.
    #[error("start {name}")]
    Spawn {
        /// The program.
        name: &'static str,
        /// What the system says.
        source: io::Error,
    },
    /// A program ended while the plane was starting.
    #[error("{name} ended with {status} while the control plane was starting; its last words:\n{log_tail}")]
    Ended {
        /// The program.
        name: &'static str,
        /// How it ended.
        status: ExitStatus,
        /// The last lines of its log.
        log_tail: String,
    },
    /// The permissions of [`User::Pitcrew`] cannot be given.
    #[error("grant what is in {rendered}: {said}")]
    Grant {
        /// The file.
        rendered: PathBuf,
        /// What kubectl says.
        said: String,
    },
    /// A program runs but does not answer.
    #[error("{name} was not ready within {} s; its last words:\n{log_tail}", READY_TIMEOUT.as_secs())]
    NotReady {
        /// The program.
        name: &'static str,
        /// The last lines of its log.
        log_tail: String,
    },
}

impl PlaneError {
    /// Somebody else took the port first: with other ports it may work.
    fn lost_a_port(&self) -> bool {
        matches!(self, PlaneError::Ended { log_tail, .. } if log_tail.contains("address already in use"))
    }
}

/// Where servers of the plane listen.
const PORTS: std::ops::Range<u16> = 20_000..32_000;

/// A running control plane. Dropping it ends its processes and removes its temporary data.
#[derive(Debug)]
pub struct Plane {
    // Fields are dropped in this order: processes before their data.
    processes: Processes,
    binaries: Binaries,
    access: Access,
    audit_log: Option<PathBuf>,
    data: Data,
}

impl Plane {
    /// Starts a plane. When it returns, the API server is ready, the namespace `default` is there, and
    /// controllers and scheduler run.
    pub async fn start(binaries: &Binaries, options: PlaneOptions) -> Result<Plane, PlaneError> {
        let mut plane = Plane::start_api(binaries, options).await?;
        let Plane { processes, access, data, .. } = &mut plane;
        let controllers = arguments::controller_manager(access);
        processes.start(binaries, "kube-controller-manager", &controllers, data)?;
        processes.start(binaries, "kube-scheduler", &arguments::scheduler(access), data)?;
        plane.check()?;
        Ok(plane)
    }

    /// The API server and its store alone: nothing changes but what a test changes.
    pub async fn start_api(binaries: &Binaries, options: PlaneOptions) -> Result<Plane, PlaneError> {
        let mut attempt = 1;
        loop {
            match Plane::start_once(binaries, &options).await {
                Err(error) if error.lost_a_port() && attempt < ATTEMPTS_MAX => attempt += 1,
                outcome => return outcome,
            }
        }
    }

    async fn start_once(binaries: &Binaries, options: &PlaneOptions) -> Result<Plane, PlaneError> {
        let deadline = Instant::now() + READY_TIMEOUT;
        let data = Data::make(options.data_dir.as_deref())?;
        let ports = free_ports().map_err(PlaneError::Port)?;
        let audit_log = (options.audit != AuditLog::None).then(|| data.dir.join("audit.log"));
        let access = write_files(&data.dir, ports, options.audit)
            .map_err(|source| PlaneError::Prepare { dir: data.dir.clone(), source })?;

        let mut processes = Processes::default();
        processes.start(binaries, "etcd", &arguments::etcd(&data.dir, ports), &data)?;
        let apiserver = arguments::apiserver(&data.dir, ports, audit_log.as_deref());
        processes.start(binaries, "kube-apiserver", &apiserver, &data)?;
        let mut plane = Plane { processes, binaries: binaries.clone(), access, audit_log, data };
        plane.listens("kube-apiserver", ports.apiserver, deadline).await?;
        plane.answers("/readyz", deadline).await?;
        plane.answers("/api/v1/namespaces/default", deadline).await?;
        Ok(plane)
    }

    /// The kubeconfig of [`User::Admin`].
    pub fn kubeconfig(&self) -> &Path {
        self.kubeconfig_of(User::Admin)
    }

    /// The kubeconfig of one user, for a program that is started with it.
    pub fn kubeconfig_of(&self, user: User) -> &Path {
        self.access.kubeconfig(user)
    }

    /// The configuration of a client that is one of the users. Client-side retries are off.
    pub fn config(&self, user: User) -> kube::Config {
        self.access.config(user)
    }

    /// Where the API server listens.
    pub fn server_url(&self) -> &http::Uri {
        &self.access.server
    }

    /// The certificates, in PEM, that the API server is trusted by.
    pub fn ca(&self) -> &Path {
        &self.access.ca
    }

    /// The bearer token of a user.
    pub fn token(&self, user: User) -> &str {
        self.access.token(user)
    }

    /// One JSON line per request, if [`PlaneOptions::audit`] says so. A request appears within a second.
    pub fn audit_log(&self) -> Option<&Path> {
        self.audit_log.as_deref()
    }

    /// Where the logs of the processes are, as `<name>.log`.
    pub fn data_dir(&self) -> &Path {
        &self.data.dir
    }

    /// `kubectl`, speaking to this plane as [`User::Admin`].
    pub fn kubectl(&self) -> Command {
        let mut kubectl = Command::new(self.binaries.path("kubectl"));
        kubectl.arg("--kubeconfig").arg(self.kubeconfig());
        kubectl
    }

    /// Lets [`User::Pitcrew`] do what a rendered chart grants to its service account.
    pub fn grant(&self, rendered: &Path) -> Result<(), PlaneError> {
        let run = |kubectl: &mut Command| {
            let output = kubectl.output();
            output.map_err(|source| PlaneError::Spawn { name: "kubectl", source })
        };
        // Roles of a namespace need it to be there; whoever comes later finds it.
        run(self.kubectl().args(["create", "namespace", "gpu-operator"]))?;
        let output = run(self.kubectl().arg("apply").arg("-f").arg(rendered))?;
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr).trim_end().to_owned();
        Err(PlaneError::Grant { rendered: rendered.to_owned(), said })
    }

    /// Whether all processes still run; the error names the one that does not, with its last words.
    pub fn check(&mut self) -> Result<(), PlaneError> {
        self.processes.check()
    }

    /// Waits until a server accepts connections.
    async fn listens(&mut self, name: &'static str, port: u16, deadline: Instant) -> Result<(), PlaneError> {
        while tokio::net::TcpStream::connect(("127.0.0.1", port)).await.is_err() {
            self.processes.look_again(name, deadline).await?;
        }
        Ok(())
    }

    /// Waits until the API server answers a path with success.
    async fn answers(&mut self, path: &str, deadline: Instant) -> Result<(), PlaneError> {
        loop {
            // kubectl and not a client of ours: this crate chooses no TLS for those that use it.
            let mut kubectl = self.kubectl();
            kubectl.args(["get", "--raw", path, "--request-timeout=5s"]);
            let answer = tokio::process::Command::from(kubectl).kill_on_drop(true).output().await;
            let answer = answer.map_err(|source| PlaneError::Spawn { name: "kubectl", source })?;
            if answer.status.success() {
                return Ok(());
            }
            self.processes.look_again("kube-apiserver", deadline).await?;
        }
    }
}

/// The children, in the order of their start.
#[derive(Debug, Default)]
struct Processes(Vec<Process>);

impl Processes {
    fn start(
        &mut self,
        binaries: &Binaries,
        name: &'static str,
        arguments: &[String],
        data: &Data,
    ) -> Result<(), PlaneError> {
        let throw_away = data.temporary.then_some(data.dir.as_path());
        let process = Process::start(&binaries.path(name), name, arguments, &data.dir, throw_away)
            .map_err(|source| PlaneError::Spawn { name, source })?;
        self.0.push(process);
        Ok(())
    }

    fn check(&mut self) -> Result<(), PlaneError> {
        for process in &mut self.0 {
            let name = process.name();
            let ended = process.ended().map_err(|source| PlaneError::Spawn { name, source })?;
            if let Some(status) = ended {
                return Err(PlaneError::Ended { name, status, log_tail: process.log_tail() });
            }
        }
        Ok(())
    }

    /// Waits a little for `name`, unless something ended or the time is over.
    async fn look_again(&mut self, name: &'static str, deadline: Instant) -> Result<(), PlaneError> {
        self.check()?;
        if Instant::now() >= deadline {
            let process = self.0.iter().find(|process| process.name() == name);
            let log_tail = process.map(Process::log_tail).unwrap_or_default();
            return Err(PlaneError::NotReady { name, log_tail });
        }
        tokio::time::sleep(LOOK_EVERY).await;
        Ok(())
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        // The clients of the API server first, the store last.
        while let Some(process) = self.0.pop() {
            drop(process);
        }
    }
}

fn write_files(data: &Path, ports: Ports, audit: AuditLog) -> io::Result<Access> {
    fs::write(data.join("audit-policy.json"), arguments::audit_policy(audit == AuditLog::Changes))?;
    let server = format!("https://127.0.0.1:{}", ports.apiserver).parse().map_err(io::Error::other)?;
    Access::write(data, server, data.join("certificates/apiserver.crt"))
}

/// Ports that were free a moment ago. They lie below those that the kernel gives to outgoing connections: one of
/// those could take a port back before its server has it.
fn free_ports() -> io::Result<Ports> {
    let first =
        PORTS.start + u16::try_from(std::process::id() % u32::from(PORTS.end - PORTS.start)).unwrap_or(0);
    let candidates = (first..PORTS.end).chain(PORTS.start..first);
    let mut held = Vec::new();
    for port in candidates {
        held.extend(TcpListener::bind(("127.0.0.1", port)));
        if let [etcd, apiserver] = &held[..] {
            return Ok(Ports { etcd: etcd.local_addr()?.port(), apiserver: apiserver.local_addr()?.port() });
        }
    }
    Err(io::Error::from(io::ErrorKind::AddrInUse))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: &str = r#"{"apiVersion": "v1", "kind": "Node", "metadata": {"name": "gpu-1"},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]}}"#;

    fn run(command: &mut Command) -> String {
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    #[tokio::test]
    async fn a_plane_takes_a_node_names_its_users_and_leaves_nothing_behind() {
        let binaries = match Binaries::find() {
            Ok(binaries) => binaries,
            Err(missing) => return eprintln!("left out: {missing}"),
        };
        let options = PlaneOptions { audit: AuditLog::Requests, data_dir: None };
        let mut plane = Plane::start(&binaries, options).await.unwrap();
        let data = plane.data_dir().to_owned();
        let node = data.join("node.json");
        fs::write(&node, NODE).unwrap();

        run(plane.kubectl().arg("create").arg("-f").arg(&node));
        let nodes = run(plane.kubectl().args(["get", "nodes", "--no-headers"]));
        assert_eq!(nodes.split_whitespace().take(2).collect::<Vec<_>>(), ["gpu-1", "Ready"]);

        let audit = plane.audit_log().unwrap().to_owned();
        // The log is written in batches, and the scheduler speaks when it has something to say.
        let users = [r#""user":{"username":"admin""#, r#""user":{"username":"system:kube-scheduler""#];
        let all_told = |log: &str| users.iter().all(|user| log.contains(user));
        let mut log = String::new();
        for _ in 0..300 {
            log = fs::read_to_string(&audit).unwrap();
            if all_told(&log) {
                break;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        assert!(all_told(&log), "somebody is missing in the audit log");

        plane.check().unwrap();
        drop(plane);
        assert!(!data.exists());
    }

    #[tokio::test]
    async fn a_program_that_cannot_run_is_named_with_its_last_words() {
        let dir = tempfile::tempdir().unwrap();
        for Program { name, .. } in PROGRAMS {
            let path = dir.path().join(name);
            fs::write(&path, "#!/bin/sh\necho no disk left; exit 3\n").unwrap();
            let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
            fs::set_permissions(&path, executable).unwrap();
        }
        let binaries = Binaries::in_dir(dir.path()).unwrap();
        let error = Plane::start(&binaries, PlaneOptions::default()).await.unwrap_err().to_string();
        assert!(error.contains("ended with exit status: 3"), "{error}");
        assert!(error.ends_with("no disk left"), "{error}");
    }
}
