//! What only a DriverPolicy can change: limits, health systems, driver clients, windows, topology.

use super::parse::{amount, duration, problem, select};
use super::{Clients, ExtraClient, Health, Limits, Problem, Topology};
use crate::api::{ClientsSpec, ExtraClientSpec, HealthSpec, LimitsSpec, RolloutPolicySpec};
use crate::windows::Windows;

/// All of it.
pub(super) struct Rules {
    pub(super) limits: Limits,
    pub(super) health: Health,
    pub(super) clients: Clients,
    pub(super) rollout: RolloutRules,
}

/// How a pool moves.
#[derive(Default)]
pub(super) struct RolloutRules {
    pub(super) windows: Windows,
    pub(super) topology: Topology,
}

impl Rules {
    pub(super) fn standard(nvidia: bool) -> Result<Self, Problem> {
        Ok(Self {
            limits: limits(&LimitsSpec::default())?,
            health: health(&HealthSpec::default())?,
            clients: clients(&ClientsSpec::default(), nvidia)?,
            rollout: RolloutRules::default(),
        })
    }
}

pub(super) fn limits(spec: &LimitsSpec) -> Result<Limits, Problem> {
    Ok(Limits {
        driver_ready: duration(&spec.driver_ready, "spec.limits.driverReady")?,
        validation: duration(&spec.validation, "spec.limits.validation")?,
        failure_threshold: amount(&spec.failure_threshold, "spec.limits.failureThreshold")?,
        on_blocked: spec.on_blocked,
        blocked_after: duration(&spec.blocked_after, "spec.limits.blockedAfter")?,
    })
}

pub(super) fn rollout(spec: &RolloutPolicySpec) -> Result<RolloutRules, Problem> {
    let RolloutPolicySpec { windows, blackouts, topology } = spec;
    Ok(RolloutRules { windows: Windows::read(windows, blackouts)?, topology: Topology::read(topology)? })
}

pub(super) fn health(spec: &HealthSpec) -> Result<Health, Problem> {
    Ok(Health {
        nvsentinel: spec.nvsentinel,
        conditions: spec.conditions.clone(),
        watch_after: duration(&spec.watch_after, "spec.health.watchAfter")?,
    })
}

pub(super) fn clients(spec: &ClientsSpec, nvidia: bool) -> Result<Clients, Problem> {
    let timeout = duration(&spec.timeout, "spec.clients.timeout")?;
    let extra = |(index, spec): (usize, &ExtraClientSpec)| {
        let field = |name: &str| format!("spec.clients.extra[{index}].{name}");
        if spec.selector.trim().is_empty() {
            return Err(problem("an empty selector would select every pod", field("selector")));
        }
        let own = spec.timeout.as_ref().map(|text| duration(text, &field("timeout"))).transpose()?;
        Ok(ExtraClient {
            selector: select(&spec.selector, &field("selector"))?,
            namespaces: spec.namespaces.clone(),
            order: spec.order,
            gated: spec.waits_for_driver,
            required: spec.required,
            timeout: own.unwrap_or(timeout),
        })
    };
    let extra = spec.extra.iter().enumerate().map(extra).collect::<Result<_, _>>()?;
    Ok(Clients { refresh: spec.refresh, timeout, nvidia, extra })
}
