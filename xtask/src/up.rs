//! `cargo xtask up` and `down`: a control plane with a simulated GPU fleet in the background.
//!
//! `up` starts one background process, `keep`, that owns everything: the plane's processes end when it ends,
//! whatever ends it. So there is one process to remember, in `<cache>/up/state.json`, and nothing to leave behind.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use pitcrew_sim::plane::{AuditLog, Binaries, Plane, PlaneOptions, VERSION, cache_dir};
use serde::{Deserialize, Serialize};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::Instant;

use crate::background::Background;
use crate::cargo::cargo;
use crate::elapsed::Elapsed;
use crate::fleet;
use crate::kube;

/// The plane's own minute, and the fleet's objects on a busy machine.
const UP_TIMEOUT: Duration = Duration::from_mins(3);

/// `keep` waits for its children, which are killed; more than this means that it hangs.
const DOWN_TIMEOUT: Duration = Duration::from_secs(15);

const LOOK_EVERY: Duration = Duration::from_millis(100);

/// What to start.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// How many GPU nodes
    #[arg(long, default_value_t = 8)]
    nodes: usize,
    /// Install pitcrew's resource definitions too
    #[arg(long)]
    crds: bool,
    /// Also run the driver's clients, a DRA plugin and NVSentinel on the nodes
    #[arg(long)]
    neighbours: bool,
}

/// Where everything of `up` lies.
struct Place(PathBuf);

impl Place {
    fn find() -> Place {
        Place(cache_dir().join("up"))
    }

    /// Two of `up` and `down` at the same time would remove each other's files. The lock ends with its process.
    fn alone(&self) -> Result<File> {
        let path = self.0.with_extension("lock");
        fs::create_dir_all(cache_dir())?;
        let lock = File::create(&path).with_context(|| format!("open {}", path.display()))?;
        lock.try_lock()
            .context("Another `cargo xtask up` or `down` is at work; try again when it is done")?;
        Ok(lock)
    }

    /// Written when the background process starts; holds a [`State`].
    fn state(&self) -> PathBuf {
        self.0.join("state.json")
    }

    /// Written by the background process when the fleet is there.
    fn ready(&self) -> PathBuf {
        self.0.join("ready")
    }

    fn log(&self) -> PathBuf {
        self.0.join("keep-up.log")
    }

    fn plane(&self) -> PathBuf {
        self.0.join("plane")
    }

    fn kubeconfig(&self) -> PathBuf {
        self.plane().join("kubeconfig")
    }

    fn remove(&self) -> Result<()> {
        fs::remove_dir_all(&self.0).with_context(|| format!("remove {}", self.0.display()))
    }
}

/// What a later `up` or `down` must know.
#[derive(Serialize, Deserialize)]
struct State {
    keeper: Background,
}

impl State {
    fn read(place: &Place) -> Result<Option<State>> {
        match fs::read(place.state()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| format!("read {}", place.state().display())),
            // An empty or broken file: its writer was killed before it had anything to remember.
            Ok(text) => Ok(serde_json::from_slice(&text).ok()),
        }
    }
}

/// Starts the background process and waits until the fleet is there.
pub(crate) fn up(options: &Options) -> Result<()> {
    let place = Place::find();
    let _alone = place.alone()?;
    if State::read(&place)?.is_some_and(|state| state.keeper.runs()) {
        println!("It is up already.\n");
        tell_what_next(&place, &Binaries::find()?);
        return Ok(());
    }
    let binaries = kube::ensure()?;
    let start = Instant::now();
    if place.0.exists() {
        place.remove()?; // What a killed keeper left; its children ended with it.
    }
    fs::create_dir_all(&place.0).with_context(|| format!("make the directory {}", place.0.display()))?;
    println!("Starting Kubernetes {VERSION} with {} GPU nodes …", options.nodes);
    let mut keeper = start_keeper(options, &binaries, &place)?;
    let state = State { keeper: Background::with_pid(keeper.id()).context("the background process ended")? };
    fs::write(place.state(), serde_json::to_vec_pretty(&state)?)?;
    wait_until_ready(&mut keeper, &place)?;
    if options.crds {
        install_crds(&binaries, &place)?;
    }
    println!("Up after {}.\n", Elapsed(start.elapsed()));
    tell_what_next(&place, &binaries);
    Ok(())
}

fn start_keeper(options: &Options, binaries: &Binaries, place: &Place) -> Result<Child> {
    // The definitions come from the `pitcrew` command, which is built in the foreground.
    let Options { nodes, crds: _, neighbours } = options;
    let log = File::create(place.log())?;
    let mut keeper = Command::new(std::env::current_exe().context("find this program's own file")?);
    keeper
        .arg("keep-up")
        .arg(format!("--nodes={nodes}"))
        .args(neighbours.then_some("--neighbours"))
        .env("KUBEBUILDER_ASSETS", binaries.dir())
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .process_group(0) // Ctrl-C and the end of this terminal are not for it.
        .spawn()
        .context("start the background process")
}

fn wait_until_ready(keeper: &mut Child, place: &Place) -> Result<()> {
    let deadline = Instant::now() + UP_TIMEOUT;
    while !place.ready().exists() {
        let ended = keeper.try_wait()?;
        if ended.is_some() || Instant::now() >= deadline {
            let log = fs::read_to_string(place.log()).unwrap_or_default();
            end_and_remove(place)?;
            bail!("The cluster did not come up:\n{}", log.trim_end());
        }
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

/// What a person would type: `pitcrew crd | kubectl apply -f -`.
fn install_crds(binaries: &Binaries, place: &Place) -> Result<()> {
    let crd = cargo(&["run", "--quiet", "--package", "pitcrew", "--", "crd"])
        .stderr(Stdio::inherit())
        .output()
        .context("start cargo")?;
    if !crd.status.success() {
        bail!("`pitcrew crd` failed, see above; the cluster is up without pitcrew's resource definitions.");
    }
    let mut kubectl = Command::new(binaries.dir().join("kubectl"))
        .arg("--kubeconfig")
        .arg(place.kubeconfig())
        .args(["apply", "-f", "-"])
        .stdin(Stdio::piped())
        .spawn()
        .context("start kubectl")?;
    if let Some(mut stdin) = kubectl.stdin.take() {
        stdin.write_all(&crd.stdout).context("hand the definitions to kubectl")?;
    }
    if !kubectl.wait()?.success() {
        bail!("kubectl did not take the resource definitions, see above; the cluster is up without them.");
    }
    Ok(())
}

fn tell_what_next(place: &Place, binaries: &Binaries) {
    println!("  export KUBECONFIG={}", place.kubeconfig().display());
    println!("  export PATH={}:$PATH   # kubectl {VERSION}", binaries.dir().display());
    println!(
        "
Then, for example:
  kubectl get nodes
  cargo run -- crd | kubectl apply -f -
  cargo run -- controller
and in another terminal, as documented for the GPU Operator:
  kubectl patch clusterpolicy/cluster-policy --type=json \\
    -p='[{{\"op\": \"replace\", \"path\": \"/spec/driver/version\", \"value\": \"{target}\"}}]'
  kubectl get node -l nvidia.com/gpu.present -L nvidia.com/gpu-driver-upgrade-state -w
  kubectl get events --sort-by=.lastTimestamp | grep GPUDriverUpgrade
  cargo run -- status

Logs are in {dir}; `cargo xtask down` ends it all.",
        target = fleet::NEXT_DRIVER,
        dir = place.0.display()
    );
}

/// Ends the background process, and with it everything it started; removes the data.
pub(crate) fn down() -> Result<()> {
    let place = Place::find();
    let _alone = place.alone()?;
    if place.0.exists() {
        end_and_remove(&place)?;
        println!("The cluster is down, its data are removed.");
    } else {
        println!("Nothing is up.");
    }
    Ok(())
}

fn end_and_remove(place: &Place) -> Result<()> {
    if let Some(State { keeper }) = State::read(place)? {
        end(&keeper)?;
    }
    place.remove()
}

fn end(keeper: &Background) -> Result<()> {
    for signal in ["TERM", "KILL"] {
        keeper.signal(signal)?;
        let deadline = Instant::now() + DOWN_TIMEOUT;
        while keeper.runs() && Instant::now() < deadline {
            std::thread::sleep(LOOK_EVERY);
        }
        if !keeper.runs() {
            return Ok(());
        }
    }
    bail!("Process {} does not end; its data stay where they are.", keeper.pid())
}

/// The background process: plane, fleet and actors, until it is told to end.
pub(crate) async fn keep(options: Options) -> Result<()> {
    let place = Place::find();
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        _ = terminate.recv() => Ok(()),
        outcome = serve(&options, &place) => outcome,
    }
}

async fn serve(options: &Options, place: &Place) -> Result<()> {
    let binaries = Binaries::find()?;
    let data_dir = Some(place.plane());
    let mut control = Plane::start(&binaries, PlaneOptions { audit: AuditLog::None, data_dir }).await?;
    let _actors = fleet::install(&control, options.nodes, options.neighbours).await?;
    mark_ready(&place.ready())?;
    loop {
        tokio::time::sleep(Duration::from_secs(1)).await;
        control.check()?;
    }
}

fn mark_ready(path: &Path) -> Result<()> {
    File::create(path).map(drop).with_context(|| format!("write {}", path.display()))
}
