//! The status of a policy, from what became of it.

use highwater_crds::GpuMemoryPolicyStatus;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use crate::resolve::Outcome;

/// Condition: the policy makes sense.
pub const ACCEPTED: &str = "Accepted";
/// Condition: all of it holds on what it selects.
pub const PROGRAMMED: &str = "Programmed";

/// The status to write, or None where `old` says the same already (whenever it said so).
pub fn status(
    outcome: &Outcome,
    old: Option<&GpuMemoryPolicyStatus>,
    now: Timestamp,
) -> Option<GpuMemoryPolicyStatus> {
    let (accepted, programmed) = verdicts(outcome);
    let known = old.map(|o| o.conditions.as_slice()).unwrap_or_default();
    let new = GpuMemoryPolicyStatus {
        conditions: vec![
            accepted.condition(ACCEPTED, outcome.generation, known, now),
            programmed.condition(PROGRAMMED, outcome.generation, known, now),
        ],
        nodes: Some(i32::try_from(outcome.nodes).unwrap_or(i32::MAX)),
        devices: Some(i32::try_from(outcome.devices).unwrap_or(i32::MAX)),
    };
    old.is_none_or(|old| !same(old, &new)).then_some(new)
}

/// The outcome of a stored policy that this version cannot read.
pub fn unreadable(generation: i64, error: &str) -> Outcome {
    Outcome {
        generation,
        invalid: Some(format!("the stored object cannot be read: {error}: apply a corrected one")),
        ..Outcome::default()
    }
}

struct Verdict {
    holds: bool,
    reason: &'static str,
    message: String,
}

fn verdicts(outcome: &Outcome) -> (Verdict, Verdict) {
    let verdict = |holds, reason, message| Verdict { holds, reason, message };
    if let Some(problem) = &outcome.invalid {
        return (
            verdict(false, "Invalid", problem.clone()),
            verdict(false, "Invalid", "the policy is not accepted and holds nowhere".to_owned()),
        );
    }
    let accepted = match outcome.clamped.as_slice() {
        [] => "the policy makes sense".to_owned(),
        clamped => clamped.join("; "),
    };
    let programmed = if let Some(selector) = &outcome.unmatched {
        verdict(false, "TargetNotFound", selector.clone())
    } else if outcome.lost.is_empty() {
        verdict(true, "Programmed", "every field holds on every selected device".to_owned())
    } else {
        let lost: Vec<_> = outcome.lost.iter().map(ToString::to_string).collect();
        verdict(false, "PartiallyProgrammed", lost.join("; "))
    };
    (verdict(true, "Accepted", accepted), programmed)
}

impl Verdict {
    /// As a condition. The transition time is kept where the status stays.
    fn condition(self, type_: &str, generation: i64, known: &[Condition], now: Timestamp) -> Condition {
        let status = if self.holds { "True" } else { "False" };
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
    use super::*;
    use crate::resolve::Lost;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn reason(outcome: &Outcome, type_: &str) -> String {
        let status = status(outcome, None, at(0)).unwrap();
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
        let mut old = status(&outcome, None, at(0)).unwrap();
        old.conditions.reverse();
        assert_eq!(status(&outcome, Some(&old), at(9)), None);
    }

    #[test]
    fn a_transition_time_moves_only_with_the_status() {
        let old = status(&Outcome::default(), None, at(0)).unwrap();
        let clamped = Outcome { clamped: vec!["quota".into()], invalid: None, ..Outcome::default() };
        let new = status(&clamped, Some(&old), at(9)).unwrap();
        assert!(new.conditions.iter().all(|c| c.last_transition_time == Time(at(0))));
        let unmatched = Outcome { unmatched: Some("nodes".into()), ..Outcome::default() };
        let new = status(&unmatched, Some(&old), at(9)).unwrap();
        let times: Vec<_> = new.conditions.iter().map(|c| c.last_transition_time.0.as_second()).collect();
        assert_eq!(times, [0, 9]);
    }
}
