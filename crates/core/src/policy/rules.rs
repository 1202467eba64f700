//! What only a DriverPolicy can change: limits, health systems, driver clients, stages, windows, topology.

use super::parse::{amount, duration, problem, select};
use super::stages::{self, RolloutRules};
use super::{Clients, ExtraClient, Health, Limits, Problem, Topology};
use crate::api::{ClientsSpec, ExtraClientSpec, HealthSpec, LimitsSpec, RolloutPolicySpec};
use crate::windows::Windows;

/// All of it.
pub(super) struct Rules {
    pub(super) limits: Limits,
    pub(super) health: Health,
    pub(super) clients: Clients,
    pub(super) moves: Moves,
}

/// How a pool moves.
pub(super) struct Moves {
    pub(super) rollout: RolloutRules,
    pub(super) windows: Windows,
    pub(super) topology: Topology,
}

impl Rules {
    pub(super) fn standard(nvidia: bool) -> Result<Self, Problem> {
        let limits = limits(&LimitsSpec::default())?;
        Ok(Self {
            moves: moves(&RolloutPolicySpec::default(), &limits)?,
            limits,
            health: health(&HealthSpec::default())?,
            clients: clients(&ClientsSpec::default(), nvidia)?,
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

pub(super) fn moves(spec: &RolloutPolicySpec, limits: &Limits) -> Result<Moves, Problem> {
    Ok(Moves {
        rollout: stages::rollout(spec, limits)?,
        windows: Windows::read(&spec.windows, &spec.blackouts)?,
        topology: Topology::read(&spec.topology)?,
    })
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
