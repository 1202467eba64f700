//! `pods/eviction` and `pods/binding`: the two subresources that act on a pod.
//!
//! An eviction is a delete that asks the pod's PodDisruptionBudget first and takes one disruption from it. A
//! binding is how a scheduler puts a pod on a node.

use super::call::Call;
use super::delete::{self, DeleteOptions};
use super::reply::Failure;
use super::selector::Selector;
use super::store::{Name, Object, Store};
use http::StatusCode;
use serde_json::{Value, json};
use std::sync::Arc;

const BUDGETS: &str = "poddisruptionbudgets.policy";

/// Evicts the pod that the call names.
pub(super) fn evict(store: &mut Store, call: &Call) -> Result<(), Failure> {
    let body = call.body()?;
    let named = body["metadata"]["name"].as_str().unwrap_or_default();
    if !named.is_empty() && named != call.info.name {
        return Err(Failure::bad_request("name in URL does not match name in Eviction object"));
    }
    let name = call.name();
    let mut options = DeleteOptions::parse(&body["deleteOptions"])?;
    options.dry_run |= call.options.dry_run();
    store.dry_run = options.dry_run;
    let pod = store.get(&call.resource, &name)?;
    // As in a real server, the budget is asked and used up before the preconditions are looked at.
    let spared = if is_out_of_budget(&pod) { None } else { ask_budget(store, &pod, &name)? };
    let had_version = options.version.is_some();
    if spared.is_some() {
        // It must still be the pod that was not ready.
        options.version = Some(pod.meta("resourceVersion").to_owned());
    }
    match (go(store, call, &pod, options), spared) {
        (Err(refused), Some(budget)) if refused.is_conflict() && !had_version => {
            Err(still_processed(&budget))
        }
        (result, _) => result,
    }
}

fn go(store: &mut Store, call: &Call, pod: &Arc<Object>, mut options: DeleteOptions) -> Result<(), Failure> {
    let name = call.name();
    if !options.dry_run {
        delete::check_preconditions(call, pod, &options)?;
        let marked = mark_evicted(store, call, &name, pod)?;
        options.version = options.version.map(|_| marked.meta("resourceVersion").to_owned());
    }
    delete::delete(store, call, &name, &options)?;
    Ok(())
}

/// The pod says why it goes.
fn mark_evicted(
    store: &mut Store,
    call: &Call,
    name: &Name,
    pod: &Arc<Object>,
) -> Result<Arc<Object>, Failure> {
    let conditions = pod.value()["status"]["conditions"].as_array();
    let is_target =
        |condition: &Value| condition["type"] == "DisruptionTarget" && condition["status"] == "True";
    if conditions.into_iter().flatten().any(is_target) {
        return Ok(pod.clone());
    }
    let mut conditions = conditions.cloned().unwrap_or_default();
    conditions.retain(|condition| condition["type"] != "DisruptionTarget");
    conditions.push(json!({
        "type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI",
        "message": "Eviction API: evicting", "lastProbeTime": null, "lastTransitionTime": store.clock.stamp(),
    }));
    let mut next = pod.value().clone();
    next["status"]["conditions"] = conditions.into();
    store.put(&call.resource, name.clone(), next)
}

/// Pods that serve nobody may always go.
fn is_out_of_budget(pod: &Object) -> bool {
    pod.is_deleting()
        || matches!(pod.value()["status"]["phase"].as_str(), Some("Succeeded" | "Failed" | "Pending"))
}

/// Takes a disruption from the pod's budget. Names the budget if it lets the pod go without one, as it is not ready.
fn ask_budget(store: &mut Store, pod: &Object, name: &Name) -> Result<Option<String>, Failure> {
    let budgets = matching_budgets(store, pod, &name.namespace)?;
    let (budget_name, budget) = match budgets.as_slice() {
        [] => return Ok(None),
        [only] => only,
        _ => {
            let message = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support.";
            return Err(Failure::internal(message));
        }
    };
    if !is_ready(pod.value()) && unhealthy_may_go(budget.value()) {
        return Ok(Some(budget_name.name.clone()));
    }
    let next = take_one(budget.value(), &name.name, store.clock.stamp())?;
    store.put(BUDGETS, budget_name.clone(), next)?;
    Ok(None)
}

fn matching_budgets(
    store: &Store,
    pod: &Object,
    namespace: &str,
) -> Result<Vec<(Name, Arc<Object>)>, Failure> {
    let covers = |budget: &Object| {
        let selector = &budget.value()["spec"]["selector"];
        selector.is_object() && Selector::from_object(selector).matches(pod.value())
    };
    let budgets = store.table(BUDGETS)?.range(namespace);
    Ok(budgets
        .filter(|(_, budget)| covers(budget))
        .map(|(name, budget)| (name.clone(), budget.clone()))
        .collect())
}

fn is_ready(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array();
    conditions
        .into_iter()
        .flatten()
        .any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
}

/// A pod that is not Ready may go when policy says always, or when the budget is met without it.
fn unhealthy_may_go(budget: &Value) -> bool {
    let count = |field: &str| budget["status"][field].as_i64().unwrap_or(0);
    budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
        || (count("currentHealthy") >= count("desiredHealthy") && count("desiredHealthy") > 0)
}

/// The budget with one disruption less, or the refusal.
fn take_one(budget: &Value, pod: &str, now: Value) -> Result<Value, Failure> {
    let name = budget["metadata"]["name"].as_str().unwrap_or_default();
    let count = |field: &str| budget["status"][field].as_i64().unwrap_or(0);
    if count("observedGeneration") < budget["metadata"]["generation"].as_i64().unwrap_or(0) {
        return Err(still_processed(name));
    }
    if count("disruptionsAllowed") <= 0 {
        return Err(refusal(&why_none(budget, name), None));
    }
    let mut next = budget.clone();
    let left = count("disruptionsAllowed") - 1;
    if left == 0 {
        set_used_up(&mut next["status"], &now);
    }
    next["status"]["disruptionsAllowed"] = json!(left);
    let disrupted = &mut next["status"]["disruptedPods"];
    if !disrupted.is_object() {
        *disrupted = json!({});
    }
    disrupted[pod] = now;
    Ok(next)
}

/// Why a budget allows nothing.
fn why_none(budget: &Value, name: &str) -> String {
    let status = &budget["status"];
    let count = |field: &str| status[field].as_i64().unwrap_or(0);
    let (desired, healthy) = (count("desiredHealthy"), count("currentHealthy"));
    let mut conditions = status["conditions"].as_array().into_iter().flatten();
    let failed =
        conditions.find(|condition| condition["type"] == ALLOWED && condition["reason"] == "SyncFailed");
    if let Some(failed) = failed.filter(|condition| condition["status"] == "False") {
        let why = failed["message"].as_str().unwrap_or_default();
        return format!(
            "The disruption budget {name} does not allow evicting pods currently because it failed sync: {why}"
        );
    }
    if healthy <= desired {
        return format!(
            "The disruption budget {name} needs {desired} healthy pods and has {healthy} currently"
        );
    }
    format!("The disruption budget {name} does not allow evicting pods currently")
}

const ALLOWED: &str = "DisruptionAllowed";

/// The last disruption is gone: the budget says so before its controller does.
fn set_used_up(status: &mut Value, now: &Value) {
    let mut condition = json!({
        "type": ALLOWED, "status": "False", "reason": "InsufficientPods", "message": "", "lastTransitionTime": now,
    });
    if let Some(observed) = status["observedGeneration"].as_i64() {
        condition["observedGeneration"] = json!(observed);
    }
    let mut conditions = status["conditions"].as_array().cloned().unwrap_or_default();
    match conditions.iter_mut().find(|known| known["type"] == ALLOWED) {
        None => conditions.push(condition),
        Some(known) => {
            if known["status"] == "False" {
                condition["lastTransitionTime"] = known["lastTransitionTime"].clone();
            }
            *known = condition;
        }
    }
    status["conditions"] = conditions.into();
}

fn still_processed(budget: &str) -> Failure {
    let cause = format!("The disruption budget {budget} is still being processed by the server.");
    refusal(&cause, Some(10))
}

fn refusal(cause: &str, retry_seconds: Option<u32>) -> Failure {
    let message = "Cannot evict pod as it would violate the pod's disruption budget.";
    let mut details = json!({"causes": [{"reason": "DisruptionBudget", "message": cause}]});
    if let Some(seconds) = retry_seconds {
        details["retryAfterSeconds"] = json!(seconds);
    }
    Failure::new(StatusCode::TOO_MANY_REQUESTS, "TooManyRequests", message).with_details(details)
}

/// Puts the pod that the call names on a node.
pub(super) fn bind(store: &mut Store, call: &Call) -> Result<(), Failure> {
    let body = call.body()?;
    let node = body["target"]["name"].as_str().unwrap_or_default();
    if node.is_empty() {
        return Err(Failure::internal("target.name: Required value"));
    }
    let name = call.name();
    let pod = store.get(&call.resource, &name)?;
    let refuse = |why: String| Err(Failure::conflict("pods/binding", &name.name, &why));
    if pod.is_deleting() {
        return refuse(format!("pod {} is being deleted, cannot be assigned to a host", name.name));
    }
    if let Some(taken) = pod.value()["spec"]["nodeName"].as_str().filter(|taken| !taken.is_empty()) {
        return refuse(format!("pod {} is already assigned to node \"{taken}\"", name.name));
    }
    let mut next = pod.value().clone();
    next["spec"]["nodeName"] = node.into();
    set_scheduled(&mut next["status"], &store.clock.stamp());
    store.put(&call.resource, name, next)?;
    Ok(())
}

fn set_scheduled(status: &mut Value, now: &Value) {
    let mut conditions = status["conditions"].as_array().cloned().unwrap_or_default();
    conditions.retain(|condition| condition["type"] != "PodScheduled");
    conditions.push(
        json!({"type": "PodScheduled", "status": "True", "lastProbeTime": null, "lastTransitionTime": now}),
    );
    status["conditions"] = conditions.into();
}
