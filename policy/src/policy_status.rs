//! The status of a policy, from what became of it and from what the nodes say of it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

use highwater_crds::{
    BelowStrength, GpuMemoryNodeSpec, GpuMemoryNodeStatus, GpuMemoryPolicyStatus, Mode, PoolTrouble,
};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use crate::{
    node_status::{self, say_below},
    resolve::Outcome,
};

/// Condition: the policy makes sense.
pub const ACCEPTED: &str = "Accepted";
/// Condition: all of it holds on what it selects.
pub const PROGRAMMED: &str = "Programmed";
/// Condition, of policies in mode Enforce that have quotas: these hold as firmly as they ask.
pub const ENFORCED: &str = "Enforced";
/// Condition, of policies in mode Enforce that ask for a pool: it does not cover what is promised.
pub const POOL_SHORT: &str = "PoolShort";

/// Condition, once it was so: so much of the fleet is condemned that nothing is done, by the share of
/// this policy.
pub const HALTED: &str = "Halted";

/// The most nodes, pods or devices that a message names.
const NAMED: usize = 3;

/// What the nodes say of an enforced policy, level-triggered: it is made anew of their statuses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Some pods below their strength, by node; and how many there are at least.
    below: BTreeMap<String, Vec<BelowStrength>>,
    /// Nodes that hold a quota of it and do not say how firmly.
    silent: BTreeSet<String>,
    /// Devices whose pool is not what it should be: node and UUID.
    pools: BTreeMap<PoolTrouble, BTreeSet<(String, String)>>,
}

/// What each policy in mode Enforce is told by the nodes, by its name: name, plan and status of
/// each node that has a plan. A policy that is not in it has nothing to hear.
pub fn reports<'a>(
    nodes: impl IntoIterator<Item = (&'a str, &'a GpuMemoryNodeSpec, Option<&'a GpuMemoryNodeStatus>)>,
) -> BTreeMap<String, Report> {
    let mut reports: BTreeMap<String, Report> = BTreeMap::new();
    for (name, plan, status) in nodes {
        let Some(layer) = plan.layers.iter().find(|layer| layer.mode == Mode::Enforce) else { continue };
        // One whose status has no room for their names does not say whose pods are below.
        let untold = |s: &GpuMemoryNodeStatus| s.below_count > 0 && s.below_strength.is_empty();
        if status.is_none_or(|status| is_silent(status) || untold(status)) {
            for policy in layer.rules.iter().flat_map(|rule| &rule.quota_policies) {
                reports.entry(policy.clone()).or_default().silent.insert(name.to_owned());
            }
        }
        let Some(status) = status else { continue };
        for pod in &status.below_strength {
            // A status may be older than the plan: only what is asked for now counts.
            if layer.quotas.iter().any(|quota| quota.policy == pod.policy) {
                let report = reports.entry(pod.policy.clone()).or_default();
                report.below.entry(name.to_owned()).or_default().push(pod.clone());
            }
        }
        for device in &status.devices {
            let Some(trouble) = device.pool else { continue };
            let model = usize::try_from(device.model).ok().and_then(|at| status.models.get(at));
            let rule = model.and_then(|model| {
                layer.rules.iter().find(|r| r.product == model.product && r.partition == model.partition)
            });
            if let Some(pool) = rule.and_then(|rule| rule.pool.as_ref()) {
                let report = reports.entry(pool.policy.clone()).or_default();
                report.pools.entry(trouble).or_default().insert((name.to_owned(), device.uuid.clone()));
            }
        }
    }
    reports
}

/// Whether a node does not say how firmly quotas hold there. One of whose devices some are not
/// measured does.
fn is_silent(status: &GpuMemoryNodeStatus) -> bool {
    let monitored = status.conditions.iter().find(|c| c.type_ == node_status::MONITORED);
    monitored.is_none_or(|c| c.status != "True" && c.reason != node_status::DEVICE_FAULT)
}

/// The status to write, or None where `old` says the same already (whenever it said so). `report` is
/// what the nodes say of the policy, where they say anything; `halts` is whether the whole fleet stands
/// still by its share.
pub fn status(
    outcome: &Outcome,
    report: Option<&Report>,
    halts: bool,
    old: Option<&GpuMemoryPolicyStatus>,
    now: Timestamp,
) -> Option<GpuMemoryPolicyStatus> {
    let known = old.map(|o| o.conditions.as_slice()).unwrap_or_default();
    let conditions = verdicts(outcome, report)
        .into_iter()
        .chain(halt(halts, known))
        .map(|(type_, verdict)| verdict.condition(type_, outcome.generation, known, now))
        .collect();
    let new = GpuMemoryPolicyStatus {
        conditions,
        nodes: Some(i32::try_from(outcome.nodes).unwrap_or(i32::MAX)),
        devices: Some(i32::try_from(outcome.devices).unwrap_or(i32::MAX)),
    };
    old.is_none_or(|old| !same(old, &new)).then_some(new)
}

/// Whether the fleet stands still. Not said before it ever did. Without the numbers, which change all
/// the time.
fn halt(halts: bool, known: &[Condition]) -> Option<(&'static str, Verdict)> {
    let verdict = if halts {
        verdict(
            Holds::True,
            "FleetHalted",
            "more devices or nodes than remediation.budget.haltAtCondemnedPercent are to be acted on at once, which looks like a fault of measurement: every new act waits until fewer are",
        )
    } else {
        known.iter().find(|c| c.type_ == HALTED)?;
        verdict(Holds::False, "WithinLimits", "no more devices and nodes are to be acted on than may be")
    };
    Some((HALTED, verdict))
}

/// The outcome of a stored policy that this version cannot read.
pub fn unreadable(generation: i64, error: &str) -> Outcome {
    Outcome {
        generation,
        invalid: Some(format!("the stored object cannot be read: {error}: apply a corrected one")),
        ..Outcome::default()
    }
}

/// Whether a condition holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holds {
    True,
    False,
    Unknown,
}

struct Verdict {
    holds: Holds,
    reason: &'static str,
    message: String,
}

fn verdict(holds: Holds, reason: &'static str, message: impl Into<String>) -> Verdict {
    Verdict { holds, reason, message: message.into() }
}

fn verdicts(outcome: &Outcome, report: Option<&Report>) -> Vec<(&'static str, Verdict)> {
    if let Some(problem) = &outcome.invalid {
        let nowhere = "the policy is not accepted and holds nowhere";
        return vec![
            (ACCEPTED, verdict(Holds::False, "Invalid", problem.clone())),
            (PROGRAMMED, verdict(Holds::False, "Invalid", nowhere)),
        ];
    }
    let mut all = vec![(ACCEPTED, accepted(outcome)), (PROGRAMMED, programmed(outcome))];
    let nothing = Report::default();
    let report = report.unwrap_or(&nothing);
    if outcome.enforces.quota {
        all.push((ENFORCED, enforced(outcome, report)));
    }
    if outcome.enforces.pool {
        all.push((POOL_SHORT, pool_short(outcome, report)));
    }
    all
}

fn accepted(outcome: &Outcome) -> Verdict {
    let notes = [&outcome.clamped, &outcome.below_context, &outcome.above_pool];
    let notes: Vec<&str> = notes.into_iter().flatten().map(String::as_str).collect();
    let message = if notes.is_empty() { "the policy makes sense".to_owned() } else { notes.join("; ") };
    verdict(Holds::True, "Accepted", message)
}

fn programmed(outcome: &Outcome) -> Verdict {
    if let Some(selector) = &outcome.unmatched {
        return verdict(Holds::False, "TargetNotFound", selector.clone());
    }
    let lost: Vec<_> = outcome.lost.iter().map(ToString::to_string).collect();
    let mut said =
        if lost.is_empty() { vec!["every field holds on every selected device".to_owned()] } else { lost };
    said.extend(outcome.capped.iter().cloned());
    let (holds, reason) = if outcome.lost.is_empty() {
        (Holds::True, "Programmed")
    } else {
        (Holds::False, "PartiallyProgrammed")
    };
    verdict(holds, reason, said.join("; "))
}

fn enforced(outcome: &Outcome, report: &Report) -> Verdict {
    if !report.below.is_empty() {
        return verdict(Holds::False, "BelowStrength", say_report(report));
    }
    if !outcome.below_context.is_empty() {
        return verdict(Holds::False, "QuotaBelowContext", outcome.below_context.join("; "));
    }
    if outcome.enforces.strength && !report.silent.is_empty() {
        let nodes = first(report.silent.iter().map(|node| format!("node {node}")));
        return verdict(
            Holds::Unknown,
            "NotReported",
            format!("nobody can tell, for no news comes from: {nodes}"),
        );
    }
    let message = if outcome.enforces.strength {
        "every pod has the strength that its rule asks for"
    } else {
        "no rule asks for more than to be measured (minimumStrength)"
    };
    verdict(Holds::True, "AllAtStrength", message)
}

fn say_report(report: &Report) -> String {
    let pods = report.below.iter().flat_map(|(node, pods)| pods.iter().map(move |pod| (node, pod)));
    first(pods.map(|(node, pod)| format!("on node {node} {}", say_below(pod))))
}

fn pool_short(outcome: &Outcome, report: &Report) -> Verdict {
    let words = |trouble: PoolTrouble| match trouble {
        PoolTrouble::Short => ("Short", "promised is more than the pool can give"),
        PoolTrouble::KeeperAway => ("KeeperAway", "the keeper does not answer"),
        PoolTrouble::Unsupported => ("Unsupported", "the driver lets no memory be held"),
    };
    let mut said: Vec<String> = outcome.above_pool.clone();
    let mut reason = if said.is_empty() { None } else { Some("Short") };
    for (trouble, devices) in &report.pools {
        let (name, what) = words(*trouble);
        reason = reason.or(Some(name));
        let devices = first(devices.iter().map(|(node, uuid)| format!("device {uuid} of node {node}")));
        said.push(format!("{what}: {devices}"));
    }
    match reason {
        Some(reason) => verdict(Holds::True, reason, said.join("; ")),
        None => verdict(Holds::False, "Covered", "every pool covers what is promised"),
    }
}

/// The first few, and about how many more: in powers of two, so that a message about many does not
/// change with every one of them.
fn first(mut all: impl Iterator<Item = String>) -> String {
    let mut said = all.by_ref().take(NAMED).collect::<Vec<_>>().join(", ");
    let more = all.count();
    if let Some(power) = more.checked_ilog2() {
        // Writing to a string does not fail.
        let _ = write!(said, " and at least {} more", 1u64 << power);
    }
    said
}

impl Verdict {
    /// As a condition. The transition time is kept where the status stays.
    fn condition(self, type_: &str, generation: i64, known: &[Condition], now: Timestamp) -> Condition {
        let status = match self.holds {
            Holds::True => "True",
            Holds::False => "False",
            Holds::Unknown => "Unknown",
        };
        let since = known
            .iter()
            .find(|c| c.type_ == type_ && c.status == status)
            .map_or(Time(now), |c| c.last_transition_time.clone());
        Condition {
            type_: type_.to_owned(),
            status: status.to_owned(),
            reason: self.reason.to_owned(),
            message: self.message,
            observed_generation: Some(generation),
            last_transition_time: since,
        }
    }
}

/// Equality but for times and for the order of conditions.
fn same(a: &GpuMemoryPolicyStatus, b: &GpuMemoryPolicyStatus) -> bool {
    let facts = |status: &GpuMemoryPolicyStatus| {
        let mut facts: Vec<_> = status
            .conditions
            .iter()
            .map(|c| {
                (
                    c.type_.clone(),
                    c.status.clone(),
                    c.reason.clone(),
                    c.message.clone(),
                    c.observed_generation,
                )
            })
            .collect();
        facts.sort();
        facts
    };
    (a.nodes, a.devices) == (b.nodes, b.devices) && facts(a) == facts(b)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::resolve::{Enforces, Lost};

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn reason(outcome: &Outcome, type_: &str) -> String {
        let status = status(outcome, None, false, None, at(0)).unwrap();
        let condition = status.conditions.iter().find(|c| c.type_ == type_).unwrap();
        format!("{}/{}", condition.status, condition.reason)
    }

    #[test]
    fn each_outcome_has_its_reason() {
        let good = Outcome { generation: 3, nodes: 2, devices: 16, ..Outcome::default() };
        assert_eq!(reason(&good, ACCEPTED), "True/Accepted");
        assert_eq!(reason(&good, PROGRAMMED), "True/Programmed");
        let unmatched = Outcome { unmatched: Some("nodes".into()), ..good.clone() };
        assert_eq!(reason(&unmatched, PROGRAMMED), "False/TargetNotFound");
        let lost = Outcome { lost: vec![Lost { field: "f".into(), to: "policy x".into() }], ..good.clone() };
        assert_eq!(
            (reason(&lost, ACCEPTED), reason(&lost, PROGRAMMED)),
            ("True/Accepted".into(), "False/PartiallyProgrammed".into())
        );
        let invalid = unreadable(1, "limit: not a quantity");
        assert_eq!(
            (reason(&invalid, ACCEPTED), reason(&invalid, PROGRAMMED)),
            ("False/Invalid".into(), "False/Invalid".into())
        );
    }

    #[test]
    fn the_same_outcome_later_is_no_write() {
        let outcome = Outcome { nodes: 1, ..Outcome::default() };
        let mut old = status(&outcome, None, false, None, at(0)).unwrap();
        old.conditions.reverse();
        assert_eq!(status(&outcome, None, false, Some(&old), at(9)), None);
    }

    #[test]
    fn a_transition_time_moves_only_with_the_status() {
        let old = status(&Outcome::default(), None, false, None, at(0)).unwrap();
        let clamped = Outcome { clamped: vec!["quota".into()], invalid: None, ..Outcome::default() };
        let new = status(&clamped, None, false, Some(&old), at(9)).unwrap();
        assert!(new.conditions.iter().all(|c| c.last_transition_time == Time(at(0))));
        let unmatched = Outcome { unmatched: Some("nodes".into()), ..Outcome::default() };
        let new = status(&unmatched, None, false, Some(&old), at(9)).unwrap();
        let times: Vec<_> = new.conditions.iter().map(|c| c.last_transition_time.0.as_second()).collect();
        assert_eq!(times, [0, 9]);
    }

    fn enforcing(strength: bool) -> Outcome {
        let enforces = Enforces { quota: true, strength, pool: true };
        Outcome { nodes: 1, devices: 1, enforces, ..Outcome::default() }
    }

    fn plan() -> GpuMemoryNodeSpec {
        serde_json::from_value(json!({"layers": [
            {"mode": "Enforce", "rules": [{"product": "G", "partition": "Whole", "quotaPolicies": ["p"],
                "pool": {"policy": "p", "value": {"sizePercent": 60, "maxPercent": 75}}}],
             "quotas": [{"policy": "p", "ownerKinds": [], "value": {"default": {"limit": "8Gi"}}}]},
            {"mode": "DryRun", "rules": [{"product": "G", "partition": "Whole", "quotaPolicies": ["dry"]}],
             "quotas": [{"policy": "dry", "ownerKinds": [], "value": {"default": {"limit": "8Gi"}}}]}]}))
        .unwrap()
    }

    fn node(monitored: &str, below: &[(&str, &str)], pool: Option<&str>) -> GpuMemoryNodeStatus {
        let below: Vec<_> = below
            .iter()
            .map(|(policy, name)| {
                json!({"namespace": "team", "name": name, "device": "GPU-0", "policy": policy,
                       "asked": "Guard", "reason": "NotOptedIn"})
            })
            .collect();
        let (status, reason) = monitored.split_once('/').unwrap();
        serde_json::from_value(json!({
            "conditions": [{"type": "Monitored", "status": status, "reason": reason, "message": "",
                            "lastTransitionTime": "2026-01-01T00:00:00Z"}],
            "models": [{"product": "G", "partition": "Whole"}],
            "devices": [{"uuid": "GPU-0", "pool": pool}], "belowStrength": below, "belowCount": below.len()}))
        .unwrap()
    }

    /// What is said of policy `p` where the nodes say this.
    fn said(outcome: &Outcome, nodes: &[GpuMemoryNodeStatus], type_: &str) -> (String, String) {
        let plan = plan();
        let names: Vec<_> = (0..nodes.len()).map(|n| format!("n{n}")).collect();
        let nodes = names.iter().zip(nodes).map(|(name, status)| (name.as_str(), &plan, Some(status)));
        let reports = reports(nodes);
        assert_eq!(reports.get("dry"), None, "what does not enforce has nothing to hear");
        let status = status(outcome, reports.get("p"), false, None, at(0)).unwrap();
        let condition = status.conditions.into_iter().find(|c| c.type_ == type_).unwrap();
        (format!("{}/{}", condition.status, condition.reason), condition.message)
    }

    #[test]
    fn a_policy_hears_of_its_pods_that_are_below_and_no_others() {
        let (well, fault) = (node("True/AllDevices", &[], None), node("False/DeviceFault", &[], None));
        assert_eq!(said(&enforcing(true), &[well.clone(), fault], ENFORCED).0, "True/AllAtStrength");
        let foreign = node("True/AllDevices", &[("dry", "x"), ("gone", "y")], None);
        assert_eq!(said(&enforcing(true), &[foreign], ENFORCED).0, "True/AllAtStrength");
        let below = node("True/AllDevices", &[("p", "a")], None);
        let (reason, message) = said(&enforcing(true), &[well, below], ENFORCED);
        assert_eq!(reason, "False/BelowStrength");
        assert_eq!(message, "on node n1 pod team/a is to have Guard and has Observe (NotOptedIn)");
    }

    #[test]
    fn a_message_about_many_changes_seldom() {
        let many = |n: usize| vec![node("True/AllDevices", &[("p", "a")], None); n];
        let message = |n| said(&enforcing(true), &many(n), ENFORCED).1;
        assert!(message(3).ends_with("(NotOptedIn)"));
        assert!(message(4).ends_with(" and at least 1 more"));
        assert!(message(19).ends_with(" and at least 16 more"));
        assert_eq!(message(19), message(34));
    }

    #[test]
    fn a_node_that_does_not_measure_leaves_it_open_where_something_is_asked_for() {
        let silent = node("False/NoDriver", &[], None);
        let (reason, message) = said(&enforcing(true), std::slice::from_ref(&silent), ENFORCED);
        assert_eq!(reason, "Unknown/NotReported");
        assert!(message.ends_with(": node n0"), "{message}");
        assert_eq!(said(&enforcing(false), &[silent], ENFORCED).0, "True/AllAtStrength");
        let full = GpuMemoryNodeStatus { below_count: 9, ..node("True/AllDevices", &[], None) };
        assert_eq!(said(&enforcing(true), &[full], ENFORCED).0, "Unknown/NotReported");
    }

    #[test]
    fn b17_a_limit_below_a_context_is_not_enforced() {
        let outcome = Outcome { below_context: vec!["quota.default.limit 1Mi".into()], ..enforcing(false) };
        assert_eq!(said(&outcome, &[], ENFORCED).0, "False/QuotaBelowContext");
        assert_eq!(reason(&outcome, ACCEPTED), "True/Accepted", "it holds all the same");
    }

    #[test]
    fn a_pool_says_why_it_does_not_cover_what_is_promised() {
        let with = |trouble| node("True/AllDevices", &[], trouble);
        assert_eq!(said(&enforcing(false), &[with(None)], POOL_SHORT).0, "False/Covered");
        let troubled = [with(Some("KeeperAway")), with(Some("Short")), with(Some("Unsupported"))];
        let (reason, message) = said(&enforcing(false), &troubled, POOL_SHORT);
        assert_eq!(reason, "True/Short");
        assert!(message.contains("the keeper does not answer: device GPU-0 of node n0"), "{message}");
        let promised = Outcome { above_pool: vec!["quota.default.guarantee".into()], ..enforcing(false) };
        assert_eq!(said(&promised, &[with(None)], POOL_SHORT).0, "True/Short");
    }

    #[test]
    fn conditions_of_enforcement_are_only_where_something_is_enforced() {
        let types = |outcome: &Outcome| -> Vec<String> {
            let status = status(outcome, None, false, None, at(0)).unwrap();
            status.conditions.into_iter().map(|c| c.type_).collect()
        };
        assert_eq!(types(&Outcome::default()), [ACCEPTED, PROGRAMMED]);
        assert_eq!(types(&enforcing(false)), [ACCEPTED, PROGRAMMED, ENFORCED, POOL_SHORT]);
        let invalid = Outcome { invalid: Some("no".into()), ..enforcing(true) };
        assert_eq!(types(&invalid), [ACCEPTED, PROGRAMMED]);
    }

    #[test]
    fn a_size_that_a_cap_holds_down_is_told_and_is_no_loss() {
        let capped = Outcome { nodes: 1, capped: vec!["held at 40".into()], ..Outcome::default() };
        let status = status(&capped, None, false, None, at(0)).unwrap();
        assert_eq!(status.conditions[1].status, "True");
        assert!(status.conditions[1].message.ends_with("; held at 40"));
    }

    #[test]
    fn that_the_fleet_stands_still_is_said_once_and_taken_back() {
        let outcome = Outcome::default();
        let halted = |status: &GpuMemoryPolicyStatus| {
            let condition = status.conditions.iter().find(|c| c.type_ == HALTED);
            condition.map(|c| (c.status.clone(), c.reason.clone()))
        };
        let before = status(&outcome, None, false, None, at(0)).unwrap();
        assert_eq!(halted(&before), None);
        let during = status(&outcome, None, true, Some(&before), at(1)).unwrap();
        assert_eq!(halted(&during).unwrap(), ("True".to_owned(), "FleetHalted".to_owned()));
        assert_eq!(status(&outcome, None, true, Some(&during), at(2)), None, "it is not said again");
        let after = status(&outcome, None, false, Some(&during), at(3)).unwrap();
        assert_eq!(halted(&after).unwrap(), ("False".to_owned(), "WithinLimits".to_owned()));
    }
}
