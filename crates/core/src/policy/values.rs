//! The documented options: each from the policy itself, from what it inherits, or the default, and which of them it was.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::parse::{amount, problem, seconds, select};
use super::{Amount, Checkpoint, Drain, Problem, Removal, Wait};
use crate::api::{EffectiveValue, PodDeletionSpec, TimeoutAction, UpgradePolicySpec};

/// What a training job of ordinary size needs to write its state.
const CHECKPOINT_SECONDS: i64 = 300;

/// The documented options, resolved.
pub(super) struct Upgrade {
    pub(super) auto: bool,
    pub(super) max_parallel: u32,
    pub(super) max_unavailable: Amount,
    pub(super) wait: Wait,
    pub(super) checkpoint: Option<Checkpoint>,
    pub(super) removal: Removal,
    pub(super) drain: Option<Drain>,
}

/// What a source means when it says nothing. All else is the same everywhere.
#[derive(Clone, Copy)]
pub(super) struct Defaults {
    auto_upgrade: bool,
}

impl Defaults {
    pub(super) const DRIVER_POLICY: Self = Self { auto_upgrade: true };
    pub(super) const NVIDIA_DRIVER: Self = Self { auto_upgrade: true };
    /// NVIDIA's CRD says off; the `true` of the documents is the Helm chart's.
    pub(super) const CLUSTER_POLICY: Self = Self { auto_upgrade: false };
}

/// Picks each value from the policy itself, what it inherits, or the default, and remembers which.
pub(super) struct Values {
    own: String,
    inherited: Option<(String, UpgradePolicySpec)>,
    pub(super) effective: BTreeMap<String, EffectiveValue>,
}

impl Values {
    pub(super) fn new(own: String, inherited: Option<(String, UpgradePolicySpec)>) -> Self {
        Self { own, inherited, effective: BTreeMap::new() }
    }

    fn pick<T: Clone + ToString>(
        &mut self,
        field: &str,
        spec: &UpgradePolicySpec,
        get: impl Fn(&UpgradePolicySpec) -> Option<T>,
        default: T,
    ) -> T {
        let inherited = self.inherited.as_ref().and_then(|(from, spec)| get(spec).map(|v| (v, from.clone())));
        let (value, from) = get(spec)
            .map(|v| (v, self.own.clone()))
            .or(inherited)
            .unwrap_or_else(|| (default, "default".to_owned()));
        self.effective.insert(field.to_owned(), EffectiveValue { value: value.to_string(), from });
        value
    }

    pub(super) fn upgrade(
        &mut self,
        spec: &UpgradePolicySpec,
        defaults: Defaults,
    ) -> Result<Upgrade, Problem> {
        let mut auto_upgrade = self.pick("autoUpgrade", spec, |s| s.auto_upgrade, defaults.auto_upgrade);
        if let Some((from, inherited)) = &self.inherited
            && inherited.auto_upgrade == Some(false)
        {
            // Off in any of them pauses: the documented switch works whoever states the rest.
            let value = EffectiveValue { value: false.to_string(), from: from.clone() };
            self.effective.insert("autoUpgrade".to_owned(), value);
            auto_upgrade = false;
        }
        let max_parallel = self.pick("maxParallelUpgrades", spec, |s| s.max_parallel_upgrades, 1);
        let max_unavailable = self.pick(
            "maxUnavailable",
            spec,
            |s| s.max_unavailable.clone().map(AmountText),
            AmountText(IntOrString::String("25%".to_owned())),
        );
        let wait_selector = self.pick(
            "waitForCompletion.podSelector",
            spec,
            |s| s.wait_for_completion.as_ref()?.pod_selector.clone(),
            String::new(),
        );
        let wait_timeout = self.pick(
            "waitForCompletion.timeoutSeconds",
            spec,
            |s| s.wait_for_completion.as_ref()?.timeout_seconds,
            0,
        );
        let wait = Wait {
            selector: Some(select(&wait_selector, "waitForCompletion.podSelector")?)
                .filter(|_| !wait_selector.trim().is_empty()),
            timeout: seconds(wait_timeout, "waitForCompletion.timeoutSeconds")?,
        };
        let checkpoint_selector = self.pick(
            "checkpoint.podSelector",
            spec,
            |s| s.checkpoint.as_ref()?.pod_selector.clone(),
            String::new(),
        );
        let checkpoint_timeout = self.pick(
            "checkpoint.timeoutSeconds",
            spec,
            |s| s.checkpoint.as_ref()?.timeout_seconds,
            CHECKPOINT_SECONDS,
        );
        let checkpoint = Checkpoint {
            selector: select(&checkpoint_selector, "checkpoint.podSelector")?,
            timeout: seconds(checkpoint_timeout, "checkpoint.timeoutSeconds")?
                .ok_or_else(|| problem("0 seconds is not more than 0", "checkpoint.timeoutSeconds"))?,
        };
        Ok(Upgrade {
            checkpoint: Some(checkpoint).filter(|_| !checkpoint_selector.trim().is_empty()),
            auto: auto_upgrade,
            max_parallel: u32::try_from(max_parallel).map_err(|_| {
                problem(format!("maxParallelUpgrades {max_parallel} is not 0 or more"), "maxParallelUpgrades")
            })?,
            max_unavailable: amount(&max_unavailable.0, "maxUnavailable")?,
            wait,
            removal: self
                .removal("gpuPodDeletion", spec, |s| s.gpu_pod_deletion.clone().or(s.pod_deletion.clone()))?,
            drain: self.drain(spec)?,
        })
    }

    fn drain(&mut self, spec: &UpgradePolicySpec) -> Result<Option<Drain>, Problem> {
        let enable = self.pick("drain.enable", spec, |s| s.drain.as_ref()?.enable, false);
        let selector =
            self.pick("drain.podSelector", spec, |s| s.drain.as_ref()?.pod_selector.clone(), String::new());
        let as_removal = |s: &UpgradePolicySpec| {
            let drain = s.drain.clone()?;
            Some(PodDeletionSpec {
                force: drain.force,
                timeout_seconds: drain.timeout_seconds,
                delete_empty_dir: drain.delete_empty_dir,
                timeout_action: drain.timeout_action,
            })
        };
        let removal = self.removal("drain", spec, as_removal)?;
        let selector = select(&selector, "drain.podSelector")?;
        Ok(enable.then_some(Drain { selector, removal }))
    }

    fn removal(
        &mut self,
        name: &str,
        spec: &UpgradePolicySpec,
        get: impl Fn(&UpgradePolicySpec) -> Option<PodDeletionSpec>,
    ) -> Result<Removal, Problem> {
        let field = |part: &str| format!("{name}.{part}");
        let timeout = self.pick(&field("timeoutSeconds"), spec, |s| get(s)?.timeout_seconds, 300);
        let action = |s: &UpgradePolicySpec| get(s)?.timeout_action.map(ActionText);
        Ok(Removal {
            force: self.pick(&field("force"), spec, |s| get(s)?.force, false),
            delete_empty_dir: self.pick(&field("deleteEmptyDir"), spec, |s| get(s)?.delete_empty_dir, false),
            timeout: seconds(timeout, &field("timeoutSeconds"))?,
            timeout_action: self
                .pick(&field("timeoutAction"), spec, action, ActionText(TimeoutAction::Fail))
                .0,
        })
    }
}

/// Prints an amount as it was written.
#[derive(Clone)]
struct AmountText(IntOrString);
impl std::fmt::Display for AmountText {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.0 {
            IntOrString::Int(n) => write!(f, "{n}"),
            IntOrString::String(s) => f.write_str(s),
        }
    }
}

#[derive(Clone)]
struct ActionText(TimeoutAction);
impl std::fmt::Display for ActionText {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self.0 {
            TimeoutAction::Fail => "Fail",
            TimeoutAction::Delete => "Delete",
        })
    }
}
