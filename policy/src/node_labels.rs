//! Labels that say which strength a node gives to every pod, whatever is in the pod.
//!
//! A pod that must have such a strength selects the label: then the scheduler, and nobody later,
//! keeps it from a node that could not give it.

use std::collections::BTreeSet;

use highwater_crds::{
    GpuMemoryNodeStatus, Strength,
    names::{KERNEL_LIMITS_LABEL, RESERVATION_LABEL},
};
use jiff::SignedDuration;

use crate::{pod::Labels, taint::AGENT_GONE};

/// Value of the labels.
pub const VALUE: &str = "true";
/// Every label of this kind.
pub const ALL: [&str; 2] = [KERNEL_LIMITS_LABEL, RESERVATION_LABEL];

/// The labels that a node ought to have. After its agent was away for as long as a taint outlasts
/// it, nobody vouches for what it last said.
pub fn desired(
    status: Option<&GpuMemoryNodeStatus>,
    agent_away: Option<SignedDuration>,
) -> BTreeSet<&'static str> {
    let vouched = agent_away.is_none_or(|away| away < AGENT_GONE);
    let base = status.filter(|_| vouched).map(|s| s.base_strength).unwrap_or_default();
    let mut labels = BTreeSet::new();
    if base == Strength::Kernel {
        labels.insert(KERNEL_LIMITS_LABEL);
    }
    if base >= Strength::Reservation {
        labels.insert(RESERVATION_LABEL);
    }
    labels
}

/// The labels of this kind that a node has.
pub fn present(labels: Option<&Labels>) -> BTreeSet<&'static str> {
    let has = |key: &&str| labels.and_then(|l| l.get(*key)).is_some_and(|value| value == VALUE);
    ALL.into_iter().filter(has).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(base: Strength, away: Option<i64>) -> Vec<&'static str> {
        let status = GpuMemoryNodeStatus { base_strength: base, ..GpuMemoryNodeStatus::default() };
        desired(Some(&status), away.map(SignedDuration::from_secs)).into_iter().collect()
    }

    #[test]
    fn a_node_is_labelled_with_what_it_gives_and_with_what_that_includes() {
        assert_eq!(of(Strength::Observe, None), [""; 0]);
        assert_eq!(of(Strength::Reservation, None), [RESERVATION_LABEL]);
        assert_eq!(of(Strength::Kernel, None), [KERNEL_LIMITS_LABEL, RESERVATION_LABEL]);
        assert!(desired(None, None).is_empty());
    }

    #[test]
    fn what_an_agent_said_that_stays_away_is_void() {
        assert_eq!(of(Strength::Reservation, Some(59)), [RESERVATION_LABEL]);
        assert_eq!(of(Strength::Reservation, Some(60)), [""; 0]);
    }

    #[test]
    fn only_a_label_that_says_true_is_there() {
        let labels = |value: &str| Labels::from([(RESERVATION_LABEL.to_owned(), value.to_owned())]);
        assert_eq!(present(Some(&labels("true"))).len(), 1);
        assert!(present(Some(&labels("no"))).is_empty() && present(None).is_empty());
    }
}
