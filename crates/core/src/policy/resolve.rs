//! From policy objects to pools: who rules, and where each value comes from.
//!
//! DriverPolicies rule their drivers. For a driver without one: gpu is ruled by a ClusterPolicy, or, if it hands over to
//! NVIDIADrivers (or there is none), by each NVIDIADriver on its own nodes; ofed by a NicClusterPolicy. Each source has its own defaults (`docs/policy.md`).

use kube::core::Selector;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::parse::{matches, problem, select};
use super::rules::{self, Moves, Rules};
use super::values::{Defaults, Upgrade, Values};
use super::{Devices, Pattern, Policy, Pool, Problem, Source};
use crate::api::{DevicesSpec, DriverPolicySpec, DriverSpec, Mode, TimeoutAction, UpgradePolicySpec};
use crate::contract::{
    DEFAULT_LABEL_DOMAIN, DRIVER_OWNER_LABEL, GPU_DRIVER, Keys, TIMEOUT_ACTION_ANNOTATION,
};
use crate::names::DriverName;
use crate::selector::Labels;
use crate::snapshot::{DaemonSet, Sources};

const GPU_DAEMON_SETS: &str = "app=nvidia-driver-daemonset";
const GPU_DAEMON_SETS_BY_COMPONENT: &str = "app.kubernetes.io/component=nvidia-driver";
const GPU_VALIDATOR: &str = "app=nvidia-operator-validator";
const OFED: &str = "ofed";
/// The Network Operator labels its driver DaemonSets and pods with this key, in whatever namespace it runs.
const OFED_DAEMON_SETS: &str = "nvidia.com/ofed-driver";
const OFED_NAMESPACE: &str = "nvidia-network-operator";
/// Not compute domains: a DaemonSet of theirs holds a claim as long as any workload is in the domain, and whoever is in
/// one has GPUs too.
const GPU_CLAIM_DRIVER: &str = "gpu.nvidia.com";
const GPU_RESOURCES: [&str; 2] = ["nvidia.com/gpu*", "nvidia.com/mig-*"];

/// The pools of this cluster, in order of their names. DriverPolicies rule their drivers; the operators' own objects rule
/// the drivers for which there is none.
pub fn resolve<'a>(
    sources: &Sources,
    daemon_sets: impl Iterator<Item = &'a DaemonSet> + Clone,
    namespace: &str,
) -> Vec<Pool> {
    let daemon_sets: Vec<&DaemonSet> = daemon_sets.collect();
    let policies = sources.driver_policies.iter();
    let mut pools: Vec<Pool> =
        policies.map(|(name, spec)| from_driver_policy(name, spec, sources, &daemon_sets)).collect();
    let ruled = |driver: &str| sources.driver_policies.values().any(|spec| spec.driver.name == driver);
    if !ruled(GPU_DRIVER) {
        pools.extend(gpu_pools(sources, namespace));
    }
    if !ruled(OFED) {
        let nics = sources.nic_cluster_policies.iter().filter(|(_, ofed)| !ofed.is_null());
        pools.extend(nics.map(|(name, ofed)| from_nic_cluster_policy(name, ofed, &daemon_sets)));
    }
    tell_apart(&mut pools);
    pools.sort_by(|a, b| a.name.cmp(&b.name));
    pools
}

/// Objects of two kinds may have one name. Pools may not: rollouts and slots go by it. Ours keeps it, then the GPU
/// Operator's; the other's driver is added to its name.
fn tell_apart(pools: &mut [Pool]) {
    pools.sort_by(|a, b| a.source.cmp(&b.source));
    for index in 1..pools.len() {
        let (before, rest) = pools.split_at_mut(index);
        let pool = &mut rest[0];
        while before.iter().any(|other| other.name == pool.name) {
            pool.name = format!("{}-{}", pool.name, pool.driver).as_str().into();
        }
    }
}

fn gpu_pools(sources: &Sources, namespace: &str) -> Vec<Pool> {
    // The oldest rules, as in the GPU Operator.
    let ruling = sources.cluster_policies.iter().min_by_key(|(name, p)| (p.created, (*name).clone()));
    match ruling {
        Some((name, policy)) if !policy.flag("/useNvidiaDriverCRD", false) => {
            // A driver that the operator does not install is not ours to upgrade.
            let installs = policy.flag("/enabled", true);
            installs.then(|| from_cluster_policy(name, policy, namespace)).into_iter().collect()
        }
        _ => {
            let drivers = sources.nvidia_drivers.iter();
            drivers.map(|(name, spec)| from_nvidia_driver(name, spec, namespace)).collect()
        }
    }
}

fn from_driver_policy(
    name: &str,
    spec: &DriverPolicySpec,
    sources: &Sources,
    daemon_sets: &[&DaemonSet],
) -> Pool {
    let source = Source::DriverPolicy(name.to_owned());
    let driver = DriverName::from(spec.driver.name.as_str());
    let policy = driver_basics(&spec.driver).and_then(|basics| {
        let renderer = daemon_sets
            .iter()
            .filter(|ds| {
                ds.name.namespace.as_ref() == basics.namespace && matches(&basics.selector, &ds.labels)
            })
            .find_map(|ds| ds.rendered_by.clone());
        let inherited = renderer.map(|renderer| inherited_from(&renderer, sources)).transpose()?;
        let mut values = Values::new(source.to_string(), inherited);
        let upgrade = values.upgrade(&spec.upgrade_policy, Defaults::DRIVER_POLICY)?;
        let nvidia = spec.driver.name == GPU_DRIVER;
        let limits = rules::limits(&spec.limits)?;
        let rules = Rules {
            moves: rules::moves(&spec.rollout, &limits)?,
            limits,
            health: rules::health(&spec.health)?,
            clients: rules::clients(&spec.clients, nvidia)?,
        };
        Ok(Policy {
            node_selector: spec.node_selector.clone(),
            mode: spec.mode,
            ..basics.policy(upgrade, rules, values)
        })
    });
    Pool { name: name.into(), source, driver, policy }
}

fn from_cluster_policy(name: &str, object: &ClusterPolicyFacts, namespace: &str) -> Pool {
    let source = Source::ClusterPolicy(name.to_owned());
    let policy = (|| {
        if object.sandbox {
            return Err(problem("sandboxed workloads are not managed", "spec.sandboxWorkloads.enabled"));
        }
        let mut spec: UpgradePolicySpec =
            read(&object.driver, "/upgradePolicy", "spec.driver.upgradePolicy")?;
        apply_timeout_action(&mut spec, object.timeout_action.as_deref())?;
        let mut values = Values::new(source.to_string(), None);
        let upgrade = values.upgrade(&spec, Defaults::CLUSTER_POLICY)?;
        let basics = gpu_basics(namespace, GPU_DAEMON_SETS)?;
        Ok(basics.policy(upgrade, Rules::standard(true)?, values))
    })();
    Pool { name: name.into(), source, driver: GPU_DRIVER.into(), policy }
}

fn from_nvidia_driver(name: &str, spec: &Value, namespace: &str) -> Pool {
    let source = Source::NvidiaDriver(name.to_owned());
    let policy = (|| {
        let spec: UpgradePolicySpec = read(spec, "", "spec.upgradePolicy")?;
        let mut values = Values::new(source.to_string(), None);
        let upgrade = values.upgrade(&spec, Defaults::NVIDIA_DRIVER)?;
        let basics = gpu_basics(namespace, GPU_DAEMON_SETS_BY_COMPONENT)?;
        Ok(Policy {
            node_selector: Labels::from([(DRIVER_OWNER_LABEL.to_owned(), name.to_owned())]),
            rendered_by: Some(name.to_owned()),
            ..basics.policy(upgrade, Rules::standard(true)?, values)
        })
    })();
    Pool { name: name.into(), source, driver: GPU_DRIVER.into(), policy }
}

fn from_nic_cluster_policy(name: &str, ofed: &Value, daemon_sets: &[&DaemonSet]) -> Pool {
    let source = Source::NicClusterPolicy(name.to_owned());
    let policy = (|| {
        let spec: UpgradePolicySpec = read(ofed, "/upgradePolicy", "spec.ofedDriver.upgradePolicy")?;
        let mut values = Values::new(source.to_string(), None);
        let upgrade = values.upgrade(&spec, Defaults::CLUSTER_POLICY)?;
        let driver = DriverName::from(OFED);
        let found = daemon_sets.iter().find(|ds| ds.labels.contains_key(OFED_DAEMON_SETS));
        let basics = Basics {
            keys: Keys::new(&driver, DEFAULT_LABEL_DOMAIN),
            driver,
            namespace: found.map_or(OFED_NAMESPACE, |ds| ds.name.namespace.as_ref()).to_owned(),
            selector: select(OFED_DAEMON_SETS, "label")?,
            selector_text: OFED_DAEMON_SETS.to_owned(),
            devices: Devices::default(),
            validator: None,
        };
        Ok(basics.policy(upgrade, Rules::standard(false)?, values))
    })();
    Pool { name: name.into(), source, driver: OFED.into(), policy }
}

/// What the policy resolver reads of a ClusterPolicy.
#[derive(Clone, Debug, Default)]
pub struct ClusterPolicyFacts {
    /// When it was made.
    pub created: jiff::Timestamp,
    /// `spec.driver`.
    pub driver: Value,
    /// `spec.sandboxWorkloads.enabled`.
    pub sandbox: bool,
    /// The annotation that says what happens to pods which did not leave in time.
    pub timeout_action: Option<String>,
}

impl ClusterPolicyFacts {
    fn flag(&self, pointer: &str, default: bool) -> bool {
        self.driver.pointer(pointer).and_then(Value::as_bool).unwrap_or(default)
    }
}

/// The documents say that pods are deleted at the timeout, NVIDIA's code never does it: only who asks gets it.
fn apply_timeout_action(spec: &mut UpgradePolicySpec, asked: Option<&str>) -> Result<(), Problem> {
    let action = match asked {
        None => return Ok(()),
        Some("Fail") => TimeoutAction::Fail,
        Some("Delete") => TimeoutAction::Delete,
        Some(other) => {
            let field = format!("metadata.annotations[{TIMEOUT_ACTION_ANNOTATION}]");
            return Err(problem(format!("timeout action \"{other}\" is neither Fail nor Delete"), field));
        }
    };
    // The field has two names; the one in use is the one that counts.
    let deletion =
        if spec.gpu_pod_deletion.is_some() { &mut spec.gpu_pod_deletion } else { &mut spec.pod_deletion };
    deletion.get_or_insert_default().timeout_action = Some(action);
    spec.drain.get_or_insert_default().timeout_action = Some(action);
    Ok(())
}

/// What a renderer says explicitly, for a DriverPolicy to inherit.
fn inherited_from(renderer: &Source, sources: &Sources) -> Result<(String, UpgradePolicySpec), Problem> {
    let spec = match renderer {
        Source::ClusterPolicy(name) => {
            let read = |o: &ClusterPolicyFacts| {
                let mut spec =
                    read(&o.driver, "/upgradePolicy", &format!("{renderer} spec.driver.upgradePolicy"))?;
                apply_timeout_action(&mut spec, o.timeout_action.as_deref())?;
                Ok(spec)
            };
            sources.cluster_policies.get(name).map(read)
        }
        Source::NvidiaDriver(name) => {
            let object = sources.nvidia_drivers.get(name);
            object.map(|o| read(o, "", &format!("{renderer} spec.upgradePolicy")))
        }
        Source::NicClusterPolicy(name) => {
            let ofed = sources.nic_cluster_policies.get(name);
            let field = format!("{renderer} spec.ofedDriver.upgradePolicy");
            ofed.map(|ofed| read(ofed, "/upgradePolicy", &field))
        }
        Source::DriverPolicy(_) => None,
    };
    Ok((renderer.to_string(), spec.transpose()?.unwrap_or_default()))
}

fn read<T: DeserializeOwned + Default>(value: &Value, pointer: &str, field: &str) -> Result<T, Problem> {
    match value.pointer(pointer) {
        None | Some(Value::Null) => Ok(T::default()),
        Some(found) => serde_json::from_value(found.clone()).map_err(|e| problem(e.to_string(), field)),
    }
}

/// The part of a policy that says what the driver is.
struct Basics {
    driver: DriverName,
    keys: Keys,
    namespace: String,
    selector: Selector,
    selector_text: String,
    devices: Devices,
    validator: Option<Selector>,
}

fn driver_basics(spec: &DriverSpec) -> Result<Basics, Problem> {
    let driver = DriverName::from(spec.name.as_str());
    let is_gpu = spec.name == GPU_DRIVER;
    let selector_text = spec.daemon_sets.as_ref().and_then(|d| d.selector.clone());
    let selector_text =
        selector_text.or_else(|| is_gpu.then(|| GPU_DAEMON_SETS.to_owned())).ok_or_else(|| {
            problem(format!("driver {driver} has no DaemonSet selector"), "spec.driver.daemonSets.selector")
        })?;
    let namespace = spec.daemon_sets.as_ref().map(|d| d.namespace.clone());
    let devices = match &spec.devices {
        Some(devices) => devices_of(devices),
        None if is_gpu => gpu_devices(),
        None => Devices::default(),
    };
    let validator = spec.validator.as_ref().map(|v| select(&v.selector, "spec.driver.validator.selector"));
    Ok(Basics {
        keys: Keys::new(&driver, &spec.label_domain),
        driver,
        namespace: namespace.unwrap_or_else(|| crate::contract::DEFAULT_NAMESPACE.to_owned()),
        selector: select(&selector_text, "spec.driver.daemonSets.selector")?,
        selector_text,
        devices,
        validator: validator.transpose()?,
    })
}

fn devices_of(spec: &DevicesSpec) -> Devices {
    let patterns = |texts: &[String]| texts.iter().cloned().map(Pattern).collect();
    Devices {
        resources: patterns(&spec.resources),
        claim_drivers: spec.claim_drivers.clone(),
        runtime_classes: spec.runtime_classes.clone(),
        host_paths: patterns(&spec.host_paths),
    }
}

fn gpu_devices() -> Devices {
    Devices {
        resources: GPU_RESOURCES.map(|r| Pattern(r.to_owned())).to_vec(),
        claim_drivers: vec![GPU_CLAIM_DRIVER.to_owned()],
        ..Devices::default()
    }
}

fn gpu_basics(namespace: &str, selector_text: &str) -> Result<Basics, Problem> {
    let driver = DriverName::from(GPU_DRIVER);
    Ok(Basics {
        keys: Keys::new(&driver, DEFAULT_LABEL_DOMAIN),
        driver,
        namespace: namespace.to_owned(),
        selector: select(selector_text, "app")?,
        selector_text: selector_text.to_owned(),
        devices: gpu_devices(),
        validator: Some(select(GPU_VALIDATOR, "app")?),
    })
}

impl Basics {
    fn policy(self, upgrade: Upgrade, rules: Rules, values: Values) -> Policy {
        let Rules { limits, health, clients, moves: Moves { rollout, windows, topology } } = rules;
        let Basics { driver, keys, namespace, selector, selector_text, devices, validator } = self;
        let Upgrade { auto, max_parallel, max_unavailable, wait, checkpoint, removal, mut drain } = upgrade;
        if let Some(drain) = &mut drain {
            // The pod label that keeps a pod out of drains always counts, whatever selector the user adds.
            drain
                .selector
                .extend([kube::core::Expression::NotEqual(keys.drain_skip.clone(), "true".to_owned())]);
        }
        Policy {
            driver,
            keys,
            namespace,
            daemon_sets: selector,
            daemon_sets_text: selector_text,
            rendered_by: None,
            devices,
            validator,
            node_selector: Labels::new(),
            mode: Mode::Auto,
            auto_upgrade: auto,
            max_parallel,
            max_unavailable,
            wait,
            checkpoint,
            removal,
            drain,
            limits,
            health,
            clients,
            rollout,
            windows,
            topology,
            effective: values.effective,
        }
    }
}
