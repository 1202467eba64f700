//! `pitcrew controller` as a process: its log, its metrics, its end.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use libtest_mimic::Failed;
use pitcrew_sim::plane::User;
use tokio::time::Instant;

use crate::stage::{Stage, until};
use crate::supervised::Supervised;

/// It answers what is under way and gives its Lease back, for which it takes six seconds at most.
const STOP_TIMEOUT: Duration = Duration::from_secs(20);
const READ_TIMEOUT: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// A running controller. Dropping it ends it as Kubernetes would.
pub(crate) struct Controller {
    process: Supervised,
    log: PathBuf,
    port: u16,
}

impl Controller {
    /// Starts one and waits until it knows the cluster.
    pub(crate) fn start(stage: &mut Stage) -> Result<Controller, Failed> {
        let number = stage.next_controller();
        let log = stage.plane().data_dir().join(format!("pitcrew-{number}.log"));
        let (port, output) = (free_port()?, File::create(&log)?);
        let mut command = Supervised::command(Path::new(env!("CARGO_BIN_EXE_pitcrew")));
        command
            .args(["controller", "--kubeconfig"])
            .arg(stage.plane().kubeconfig_of(User::Pitcrew))
            .arg(format!("--listen=127.0.0.1:{port}"))
            .env("NO_COLOR", "1")
            .env_remove("RUST_LOG")
            .stdout(output.try_clone()?)
            .stderr(output);
        let mut controller = Controller { process: Supervised::spawn(&mut command)?, log, port };
        until("the controller is ready", || {
            if let Some(status) = controller.process.ended()? {
                return Err(format!("the controller ended with {status}: {}", controller.log()?).into());
            }
            Ok(controller.get("/readyz").is_ok_and(|answer| answer.starts_with("HTTP/1.1 200")).then_some(()))
        })?;
        Ok(controller)
    }

    /// `kill -9`, wherever it is.
    pub(crate) fn kill(mut self) {
        self.process.kill();
    }

    /// What it has said so far.
    pub(crate) fn log(&self) -> Result<String, Failed> {
        Ok(fs::read_to_string(&self.log)?)
    }

    /// Waits until it says something.
    pub(crate) fn until_it_says(&self, what: &str) -> Result<String, Failed> {
        let said = until(&format!("the log says \"{what}\""), || {
            Ok(self.log()?.lines().find(|line| line.contains(what)).map(str::to_owned))
        });
        said.map_err(|failed| {
            format!("{}; it says:\n{}", words(&failed), self.log().unwrap_or_default()).into()
        })
    }

    /// The value of a metric without labels.
    pub(crate) fn metric(&self, name: &str) -> Result<f64, Failed> {
        let text = self.get("/metrics")?;
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        Ok(line.ok_or_else(|| format!("no metric {name} in:\n{text}"))?.trim().parse()?)
    }

    /// Waits until a metric has a value.
    pub(crate) fn until_metric(&self, name: &str, value: f64) -> Result<(), Failed> {
        let mut last = f64::NAN;
        let same = |a: f64, b: f64| (a - b).abs() < f64::EPSILON;
        let reached = until(&format!("{name} is {value}"), || {
            last = self.metric(name)?;
            Ok(same(last, value).then_some(()))
        });
        reached.map_err(|failed| format!("{}; it is {last}", words(&failed)).into())
    }

    fn get(&self, path: &str) -> Result<String, Failed> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
        stream.set_read_timeout(Some(READ_TIMEOUT))?;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        self.process.terminate();
        let deadline = Instant::now() + STOP_TIMEOUT;
        while matches!(self.process.ended(), Ok(None)) && Instant::now() < deadline {
            sleep(LOOK_EVERY);
        }
    }
}

/// A failure in words.
fn words(failed: &Failed) -> String {
    failed.message().unwrap_or("failed").to_owned()
}

/// A port that was free a moment ago.
pub(crate) fn free_port() -> std::io::Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}
