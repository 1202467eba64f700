//! Every scenario on the embedded cluster, and, where its binaries are, on a real control plane: the nodes must go
//! through the same states on both. There the controller may do what the chart grants; what all scenarios together never
//! do is granted in vain, and fails the last trial (`scenarios/rights.rs`).

#[path = "scenarios/rights.rs"]
mod rights;

use libtest_mimic::{Arguments, Failed, Trial};
use pitcrew_sim::cluster::Cluster;
use pitcrew_sim::plane::{AuditLog, Binaries, Plane, PlaneOptions, User};
use pitcrew_sim::scenario::{On, Scenario, Trace, play};
use pitcrew_sim::scenarios;
use pitcrew_sim::simulate::audit;

const SEED: u64 = 7;

fn main() {
    let mut arguments = Arguments::from_args();
    // Half of the time of a story is a control plane's start, which waits more than it works.
    arguments.test_threads = Some(2);
    // Silent unless RUST_LOG says otherwise: a failing scenario is told by its own sentence first.
    tracing_subscriber::fmt().with_env_filter(tracing_subscriber::EnvFilter::from_default_env()).init();
    let _ = rustls::crypto::ring::default_provider().install_default();
    let binaries = Binaries::find();
    if let Err(missing) = &binaries {
        eprintln!("real control plane: not tested. {missing}");
    }
    let (mut trials, mut reals) = (Vec::new(), 0);
    for (index, scenario) in scenarios::all().iter().enumerate() {
        trials.push(Trial::test(format!("embedded: {}", scenario.name), move || {
            let scenario = story(index)?;
            let first = embedded(&scenario)?;
            (first == embedded(&scenario)?).then_some(()).ok_or_else(|| "two runs of one seed differ".into())
        }));
        if scenario.on == On::Both {
            reals += 1;
            let real = Trial::test(format!("real: {}", scenario.name), move || same_on_both(index));
            trials.push(real.with_ignored_flag(binaries.is_err()));
        }
    }
    let conclusion = libtest_mimic::run(&arguments, trials);
    // Only all of them together tell.
    if rights::scenarios_seen() == reals && reals > 0 {
        let last =
            Trial::test("real: everything that is granted is used, and nothing is refused", rights::check);
        libtest_mimic::run(&arguments, vec![last]).exit_if_failed();
    }
    conclusion.exit();
}

fn story(index: usize) -> Result<Scenario, Failed> {
    scenarios::all().into_iter().nth(index).ok_or_else(|| "no such scenario".into())
}

fn embedded(scenario: &Scenario) -> Result<Trace, Failed> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build()?;
    runtime.block_on(async {
        let cluster = Cluster::embedded(&scenario.fleet, SEED, scenario.behaviour.clone()).await?;
        Ok(play(scenario, cluster).await?)
    })
}

fn real(scenario: &Scenario) -> Result<Trace, Failed> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let options = PlaneOptions { audit: AuditLog::Changes, data_dir: None };
        let plane = Plane::start(&Binaries::find()?, options).await?;
        plane.grant(&rights::granted_in())?;
        let client = |user| {
            let mut config = plane.config(user);
            config.default_retry = false; // as in production: refusals must reach the planner at once
            kube::Client::try_from(config)
        };
        let (admin, controller, machines) =
            (client(User::Admin)?, client(User::Pitcrew)?, client(User::Kubelet)?);
        let cluster =
            Cluster::real(admin, controller, machines, &scenario.fleet, SEED, scenario.behaviour.clone())
                .await?;
        let trace = play(scenario, cluster).await;
        rights::read(scenario.name, &plane).await?;
        let trace = trace?;
        keeps_its_promises(&plane)?;
        Ok(trace)
    })
}

/// The promises of the simulation, over what really happened.
fn keeps_its_promises(plane: &Plane) -> Result<(), Failed> {
    let log = std::fs::read_to_string(plane.audit_log().ok_or("the plane has no audit log")?)?;
    let found = audit(&log, |user| user == User::Pitcrew.name());
    if found.ours == 0 {
        return Err("the audit log shows no change of the controller's".into());
    }
    match found.broken.first() {
        None => Ok(()),
        Some(broken) => Err(format!("a promise was broken: {broken:?}").into()),
    }
}

fn same_on_both(index: usize) -> Result<(), Failed> {
    let scenario = story(index)?;
    let (real, embedded) = (real(&scenario)?, embedded(&scenario)?);
    if real.text() == embedded.text() {
        return Ok(());
    }
    Err(format!("real:\n{}\nembedded:\n{}", real.text(), embedded.text()).into())
}
