//! A node, as far as it matters.

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::contract::{
    AGENT_CORDON_ANNOTATION, HEALTH_HOLD_ANNOTATION, LAST_VISIT_ANNOTATION, NEEDS_REBOOT_ANNOTATION,
    VISIT_ANNOTATION, is_relevant,
};
use crate::driver_manager::{CordonRecord, NeedsReboot};
use crate::health::HealthHold;
use crate::names::{DriverName, ResourceVersion, Uid};
use crate::selector::Labels;
use crate::visit::{LastVisit, Unreadable, Visit, Walk};

/// A node, as far as it matters.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Its UID: another node may come back under the same name.
    pub uid: Uid,
    /// The version that these facts are from.
    pub version: ResourceVersion,
    labels: Labels,
    /// Those of the labels that the contract names: a node carries dozens, and every pass looks for these few.
    marks: Labels,
    /// The annotations of the contract; all others are dropped on arrival.
    pub annotations: Labels,
    /// `spec.unschedulable`.
    pub unschedulable: bool,
    /// The Ready condition is True.
    pub ready: bool,
    /// Conditions that others than the kubelet set.
    pub conditions: Vec<Condition>,
    /// Extended resources that it offers, with the amount.
    pub allocatable: Vec<(Box<str>, u32)>,
    /// Where other nodes find it.
    pub address: Option<Box<str>>,
    /// Differs after each boot.
    pub boot_id: Box<str>,
    /// Its taints, as the API has them: they are written as a whole.
    pub taints: Vec<Value>,
    /// It has the taint of somebody who repairs it.
    pub remediated: bool,
    /// The visit record, taken apart once on arrival …
    pub visit: Option<Result<Visit, Unreadable>>,
    /// … what is left of the last one, …
    pub last_visit: Option<LastVisit>,
    /// … who keeps health systems off it, …
    pub health_hold: Option<HealthHold>,
    /// … and what its driver manager says of a reboot, in this boot or an earlier one.
    reboot: Option<NeedsReboot>,
}

impl Node {
    /// A node that is ready and takes work.
    pub fn new(uid: Uid, version: ResourceVersion, labels: Labels, mut annotations: Labels) -> Self {
        annotations.retain(|key, _| is_relevant(key));
        let marks = labels.iter().filter(|(key, _)| is_relevant(key));
        let mut node = Self {
            uid,
            version,
            marks: marks.map(|(key, value)| (key.clone(), value.clone())).collect(),
            labels,
            visit: None,
            last_visit: None,
            health_hold: None,
            reboot: None,
            annotations,
            unschedulable: false,
            ready: true,
            conditions: Vec::new(),
            allocatable: Vec::new(),
            taints: Vec::new(),
            address: None,
            boot_id: "".into(),
            remediated: false,
        };
        node.read_annotations();
        node
    }

    /// All labels: policies may select by any.
    pub fn labels(&self) -> &Labels {
        &self.labels
    }

    /// A label of the contract.
    pub fn mark(&self, key: &str) -> Option<&str> {
        self.marks.get(key).map(String::as_str)
    }

    /// Sets or removes a label.
    pub fn set_label(&mut self, key: &str, value: Option<&str>) {
        let concerned = [Some(&mut self.labels), is_relevant(key).then_some(&mut self.marks)];
        for labels in concerned.into_iter().flatten() {
            match value {
                Some(value) => drop(labels.insert(key.to_owned(), value.to_owned())),
                None => drop(labels.remove(key)),
            }
        }
    }

    /// Takes our own annotations apart: every pass looks at them, and they change only with the node.
    pub fn read_annotations(&mut self) {
        let text = |key: &str| self.annotations.get(key).map(String::as_str);
        self.visit = text(VISIT_ANNOTATION).map(Visit::parse);
        // One that nobody can read says nothing; it is written anew by the next visit.
        self.last_visit = text(LAST_VISIT_ANNOTATION).and_then(|text| serde_json::from_str(text).ok());
        self.health_hold = text(HEALTH_HOLD_ANNOTATION).and_then(|text| serde_json::from_str(text).ok());
        self.reboot = text(NEEDS_REBOOT_ANNOTATION).map(NeedsReboot::read);
    }

    /// Why only a reboot brings its driver back. What was so in an earlier boot is over, whoever forgot to say so.
    pub fn needs_reboot(&self) -> Option<&NeedsReboot> {
        self.reboot.as_ref().filter(|record| record.is_of(&self.boot_id))
    }

    /// The cordon on it is the driver manager's, by its own record.
    pub fn is_cordoned_by_driver_manager(&self) -> bool {
        self.unschedulable && self.annotations.contains_key(AGENT_CORDON_ANNOTATION)
    }

    /// What the driver manager says of its cordon, if it says anything.
    pub fn driver_manager_cordon(&self) -> Option<CordonRecord> {
        serde_json::from_str(self.annotations.get(AGENT_CORDON_ANNOTATION)?).ok()
    }

    /// The driver manager's record of a cordon that somebody has lifted since. The next cordon is not the driver manager's.
    pub fn has_record_of_a_lifted_cordon(&self) -> bool {
        !self.unschedulable && self.annotations.contains_key(AGENT_CORDON_ANNOTATION)
    }

    /// How many devices it offers, as far as `counts` says that they are some.
    pub fn devices(&self, counts: impl Fn(&str) -> bool) -> u32 {
        let amounts = self.allocatable.iter().filter(|(name, _)| counts(name)).map(|(_, amount)| *amount);
        amounts.fold(0, u32::saturating_add)
    }
    /// It has this taint.
    pub fn has_taint(&self, key: &str) -> bool {
        self.taints.iter().any(|taint| taint["key"] == key)
    }

    /// Its taints with this one, as a wish to the scheduler, or without it.
    pub fn taints_with(&self, key: &str, set: bool) -> Vec<Value> {
        let others = self.taints.iter().filter(|taint| taint["key"] != key).cloned();
        let ours = json!({"key": key, "effect": "PreferNoSchedule"});
        others.chain(set.then_some(ours)).collect()
    }

    /// Takes no new work, for whatever cause.
    pub fn is_out(&self) -> bool {
        self.unschedulable || !self.ready
    }

    /// This driver is tried on it again, and it is out, or on its way.
    pub fn is_out_again(&self, driver: &DriverName) -> bool {
        let again = self.walk_of(driver).filter(|walk| walk.attempts > 0);
        again.is_some_and(|walk| self.is_out() || walk.state.in_flight())
    }

    /// How far this driver is on it, if it is on a visit for it.
    pub fn walk_of(&self, driver: &DriverName) -> Option<&Walk> {
        self.visit.as_ref()?.as_ref().ok()?.drivers.get(driver)
    }
}

/// A node condition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    /// Its type.
    pub kind: Box<str>,
    /// Its status is True; for the conditions of health systems that is bad.
    pub holds: bool,
    /// When it was last looked at.
    pub heartbeat: Option<Timestamp>,
}
