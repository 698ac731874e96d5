//! Whom a breaker that asks for Restart picks.
//!
//! The pod most over its due, never the one that happened to fail, and never one within its due
//! while another is above.

use highwater_crds::{ByteSize, WhenNobodyIsOver};
use jiff::{SignedDuration, Timestamp};

use crate::pod::PodFacts;

/// A pod on the device.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// The pod.
    pub pod: &'a PodFacts,
    /// What it holds on the device. A pod whose use is not known is never picked.
    pub used: Option<u64>,
    /// What it is owed there. A pod without a quota is never over its due.
    pub due: Option<u64>,
    /// Whether it may be restarted at all.
    pub acceptable: bool,
}

impl Candidate<'_> {
    fn over(&self) -> u64 {
        self.used.zip(self.due).map_or(0, |(used, due)| used.saturating_sub(due))
    }
}

/// Who is picked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Choice {
    /// The candidate at this index, and why.
    Pod(usize, String),
    /// Somebody over its due is ending already: wait for its memory.
    Leaving(usize),
    /// No pod is to blame.
    Nobody,
}

/// How long beyond its grace period a pod that is ending is waited for.
const LEAVES_WITHIN: SignedDuration = SignedDuration::from_secs(30);

/// Whether a pod that was asked to end should have ended long ago.
pub fn is_stuck(pod: &PodFacts, now: Timestamp) -> bool {
    let ends = pod.ends_at.filter(|_| pod.terminating);
    ends.is_some_and(|ends| now.duration_since(ends) > LEAVES_WITHIN)
}

/// Picks among the pods on a device at the time `now`. Where somebody is over its due but nobody of these may be
/// restarted, it is the worst all the same: the incident then says why nothing is done. A pod that
/// should have ended long ago is passed over: asking again would not make it leave.
pub fn choose(candidates: &[Candidate<'_>], when_nobody_is_over: WhenNobodyIsOver, now: Timestamp) -> Choice {
    let stuck = |c: &Candidate<'_>| is_stuck(c.pod, now);
    let over = || candidates.iter().enumerate().filter(|(_, c)| c.over() > 0 && !stuck(c));
    if let Some((leaving, _)) = over().find(|(_, c)| c.pod.terminating) {
        return Choice::Leaving(leaving);
    }
    let worst = over().filter(|(_, c)| c.acceptable).max_by_key(|(_, c)| c.over());
    if let Some((index, candidate)) = worst.or_else(|| over().max_by_key(|(_, c)| c.over())) {
        let who =
            if candidate.acceptable { "that may be restarted" } else { "(none of which may be restarted)" };
        let why = format!(
            "{} above its due of {}: the most of {} pods over their due {who}",
            ByteSize(candidate.over()).rounded(),
            ByteSize(candidate.due.unwrap_or(0)).rounded(),
            over().filter(|(_, c)| c.acceptable == candidate.acceptable).count(),
        );
        return Choice::Pod(index, why);
    }
    if when_nobody_is_over == WhenNobodyIsOver::None {
        return Choice::Nobody;
    }
    let mut held =
        candidates.iter().enumerate().filter(|(_, c)| c.acceptable && c.used.unwrap_or(0) > 0 && !stuck(c));
    if let Some((leaving, _)) = held.clone().find(|(_, c)| c.pod.terminating) {
        return Choice::Leaving(leaving);
    }
    let lowest = held.clone().map(|(_, c)| c.pod.priority).min();
    let largest = held.by_ref().filter(|(_, c)| Some(c.pod.priority) == lowest).max_by_key(|(_, c)| c.used);
    largest.map_or(Choice::Nobody, |(index, candidate)| {
        let used = ByteSize(candidate.used.unwrap_or(0)).rounded();
        let priority = candidate.pod.priority;
        Choice::Pod(
            index,
            format!("nobody is over its due: lowest priority ({priority}), then largest use ({used})"),
        )
    })
}

/// Why a pod is never restarted, in the words of a decision's reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// The policy does not concern its namespace.
    NamespaceNotSelected,
    /// It is a static pod.
    MirrorPod,
    /// It belongs to the system.
    SystemPriority,
    /// It is a pod of a DaemonSet.
    DaemonSetPod,
    /// Nothing would start it anew.
    NoOwner,
    /// The policy does not list its owner's kind.
    OwnerKindNotListed,
}

impl Refusal {
    /// The reason in CamelCase.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NamespaceNotSelected => "NamespaceNotSelected",
            Self::MirrorPod => "MirrorPod",
            Self::SystemPriority => "SystemPriority",
            Self::DaemonSetPod => "DaemonSetPod",
            Self::NoOwner => "NoOwner",
            Self::OwnerKindNotListed => "OwnerKindNotListed",
        }
    }
}

/// Whether a pod may be restarted for a policy, given whether the policy selects its namespace
/// and the owner kinds that it lists.
pub fn may_restart(pod: &PodFacts, namespace_selected: bool, owner_kinds: &[String]) -> Result<(), Refusal> {
    if !namespace_selected {
        return Err(Refusal::NamespaceNotSelected);
    }
    if pod.mirror {
        return Err(Refusal::MirrorPod);
    }
    if pod.system_priority {
        return Err(Refusal::SystemPriority);
    }
    match &pod.owner {
        None => Err(Refusal::NoOwner),
        Some(owner) if owner.kind == "DaemonSet" => Err(Refusal::DaemonSetPod),
        Some(owner) if owner.kind == "Node" => Err(Refusal::MirrorPod),
        Some(owner) if !owner_kinds.contains(&owner.kind) => Err(Refusal::OwnerKindNotListed),
        Some(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::pod::Owner;

    const GI: u64 = ByteSize::GI;

    fn candidate(pod: &PodFacts, used: u64, due: Option<u64>, acceptable: bool) -> Candidate<'_> {
        Candidate { pod, used: Some(used), due, acceptable }
    }

    fn picked(choice: &Choice) -> Option<usize> {
        match choice {
            Choice::Pod(index, _) => Some(*index),
            _ => None,
        }
    }

    #[test]
    fn b16_the_pod_most_over_its_due_is_picked_not_the_largest() {
        let pod = PodFacts::default();
        let all = [
            candidate(&pod, 40 * GI, Some(40 * GI), true),
            candidate(&pod, 20 * GI, Some(10 * GI), true),
            candidate(&pod, 12 * GI, Some(8 * GI), true),
        ];
        assert_eq!(picked(&choose(&all, WhenNobodyIsOver::None, Timestamp::UNIX_EPOCH)), Some(1));
    }

    #[test]
    fn one_that_may_be_restarted_goes_first_and_else_the_worst_is_named() {
        let pod = PodFacts::default();
        let all = [candidate(&pod, 40 * GI, Some(GI), false), candidate(&pod, 3 * GI, Some(GI), true)];
        assert_eq!(picked(&choose(&all, WhenNobodyIsOver::None, Timestamp::UNIX_EPOCH)), Some(1));
        assert_eq!(picked(&choose(&all[..1], WhenNobodyIsOver::None, Timestamp::UNIX_EPOCH)), Some(0));
    }

    #[test]
    fn nobody_over_means_nobody_unless_the_policy_says_otherwise() {
        let (low, high) = (
            PodFacts { priority: 1, ..PodFacts::default() },
            PodFacts { priority: 9, ..PodFacts::default() },
        );
        let all = [
            candidate(&high, 40 * GI, Some(40 * GI), true),
            candidate(&low, 2 * GI, None, true),
            candidate(&low, 3 * GI, None, true),
        ];
        assert_eq!(choose(&all, WhenNobodyIsOver::None, Timestamp::UNIX_EPOCH), Choice::Nobody);
        assert_eq!(picked(&choose(&all, WhenNobodyIsOver::LowestPriority, Timestamp::UNIX_EPOCH)), Some(2));
    }

    #[test]
    fn d13_a_pod_that_is_ending_already_is_waited_for() {
        let ending = PodFacts { terminating: true, ..PodFacts::default() };
        let pod = PodFacts::default();
        let all = [candidate(&pod, 9 * GI, Some(GI), true), candidate(&ending, 2 * GI, Some(GI), true)];
        assert_eq!(choose(&all, WhenNobodyIsOver::None, Timestamp::UNIX_EPOCH), Choice::Leaving(1));
    }

    #[test]
    fn a_pod_that_does_not_end_when_it_should_have_does_not_switch_the_breaker_off() {
        let at = |second| Timestamp::from_second(second).unwrap();
        let ending = PodFacts { terminating: true, ends_at: Some(at(100)), ..PodFacts::default() };
        let pod = PodFacts::default();
        let all = [candidate(&ending, 9 * GI, Some(GI), true), candidate(&pod, 2 * GI, Some(GI), true)];
        for rule in [WhenNobodyIsOver::None, WhenNobodyIsOver::LowestPriority] {
            assert_eq!(choose(&all, rule, at(130)), Choice::Leaving(0));
            assert_eq!(picked(&choose(&all, rule, at(131))), Some(1));
        }
        assert_eq!(choose(&all[..1], WhenNobodyIsOver::LowestPriority, at(131)), Choice::Nobody);
    }

    #[test]
    fn a_pod_whose_use_is_missing_is_never_picked() {
        let pod = PodFacts::default();
        let all = [Candidate { pod: &pod, used: None, due: Some(0), acceptable: true }];
        assert_eq!(choose(&all, WhenNobodyIsOver::LowestPriority, Timestamp::UNIX_EPOCH), Choice::Nobody);
    }

    #[test]
    fn pods_that_nobody_would_start_anew_or_that_are_the_systems_are_never_restarted() {
        let kinds = ["ReplicaSet".to_owned(), "DaemonSet".to_owned()];
        let owned = |kind: &str| PodFacts {
            owner: Some(Owner {
                api_version: String::new(),
                kind: kind.into(),
                name: String::new(),
                uid: String::new(),
            }),
            ..PodFacts::default()
        };
        let verdict = |pod: &PodFacts| may_restart(pod, true, &kinds);
        assert_eq!(verdict(&owned("ReplicaSet")), Ok(()));
        assert_eq!(verdict(&owned("DaemonSet")), Err(Refusal::DaemonSetPod));
        assert_eq!(verdict(&owned("Job")), Err(Refusal::OwnerKindNotListed));
        assert_eq!(verdict(&PodFacts::default()), Err(Refusal::NoOwner));
        assert_eq!(verdict(&PodFacts { mirror: true, ..owned("Node") }), Err(Refusal::MirrorPod));
        assert_eq!(
            verdict(&PodFacts { system_priority: true, ..owned("ReplicaSet") }),
            Err(Refusal::SystemPriority)
        );
        assert_eq!(may_restart(&owned("ReplicaSet"), false, &kinds), Err(Refusal::NamespaceNotSelected));
    }

    proptest! {
        #[test]
        fn nobody_within_its_due_is_picked_while_another_is_above(
            pods in prop::collection::vec((0u64..100, prop::option::of(0u64..100), any::<bool>()), 0..12),
        ) {
            let facts = PodFacts::default();
            let all: Vec<_> = pods.iter().map(|&(used, due, ok)| candidate(&facts, used, due, ok)).collect();
            let choice = choose(&all, WhenNobodyIsOver::LowestPriority, Timestamp::UNIX_EPOCH);
            if all.iter().any(|c| c.over() > 0) {
                let index = picked(&choice).unwrap();
                prop_assert!(all[index].over() > 0);
                prop_assert!(all.iter().all(|c| c.over() <= all[index].over() || (!c.acceptable && all[index].acceptable)));
            }
        }
    }
}
