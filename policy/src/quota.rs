//! What a pod may have on a device, and when it has too much.

use highwater_crds::{Breach, ByteSize, KernelLimits, ManagedMemory, PlanQuota, Strength};

use crate::{
    breaker::milliseconds,
    pod::{self, NamespaceFacts, PodFacts},
    time::Millis,
};

/// The quota that holds for one pod on one device.
#[derive(Clone, Debug, PartialEq)]
pub struct EffectiveQuota {
    /// What the pod may have, in bytes.
    pub limit: u64,
    /// Where the limit comes from.
    pub source: Source,
    /// What the pod is owed whatever others do, in bytes; never above the limit.
    pub guarantee: Option<u64>,
    /// What happens above the limit.
    pub breach: Option<BreachTerms>,
    /// The strength that the limit must have at least; `None` where nobody asks for more than
    /// `Observe`.
    pub asked: Option<Asked>,
    /// What a guard does about managed memory.
    pub managed: ManagedMemory,
    /// Whether the limit is given to the driver as well (by the enforced layer alone).
    pub kernel_limits: KernelLimits,
}

/// A strength that a policy asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// The strength.
    pub strength: Strength,
    /// The policy.
    pub policy: String,
    /// Its rule.
    pub rule: String,
}

/// Where a limit comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// The policy with the strictest limit.
    pub policy: String,
    /// Its rule; `default` where no rule matched.
    pub rule: String,
    /// The pod's own annotation, or the size of the device, lowered the limit further.
    pub lowered_by: Option<LoweredBy>,
}

/// What lowered the limit of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoweredBy {
    /// The pod's annotation.
    Annotation,
    /// The limit was more than the device has.
    Device,
}

/// What a policy asks for when a pod is above its limit.
#[derive(Clone, Debug, PartialEq)]
pub struct BreachTerms {
    /// The policy.
    pub policy: String,
    /// Owner kinds whose pods it may restart.
    pub owner_kinds: Vec<String>,
    /// What it asks for.
    pub terms: Breach,
}

impl EffectiveQuota {
    /// What the pod is owed: its guarantee, else its limit.
    pub fn due(&self) -> u64 {
        self.guarantee.unwrap_or(self.limit)
    }

    /// Provenance of the limit in a few words, such as `policy serving, rule default`.
    pub fn provenance(&self) -> String {
        let Source { policy, rule, lowered_by } = &self.source;
        let lowered = match lowered_by {
            None => "",
            Some(LoweredBy::Annotation) => ", lowered by the pod's annotation",
            Some(LoweredBy::Device) => ", lowered to the size of the device",
        };
        format!("policy {policy}, rule {rule}{lowered}")
    }
}

/// The quota of a pod on a device of `capacity` bytes, from the quotas that hold there in order
/// of precedence. Limit, strength and managed memory are the strictest; guarantee and kernel limits
/// are those of the first that gives the pod a limit; the breach is the first that is set. The pod
/// may lower its own limit, never raise it.
pub fn effective<'a>(
    quotas: impl IntoIterator<Item = &'a PlanQuota>,
    pod: &PodFacts,
    namespace: Option<&NamespaceFacts>,
    release_namespace: &str,
    capacity: Option<u64>,
) -> Option<EffectiveQuota> {
    let matching: Vec<&PlanQuota> = quotas
        .into_iter()
        .filter(|quota| {
            pod::selects_namespace(quota.namespaces.as_ref(), &pod.namespace, namespace, release_namespace)
        })
        .collect();
    let entitlements: Vec<Entitlement<'_>> =
        matching.iter().filter_map(|quota| Entitlement::of(quota, pod)).collect();
    // Of equal limits the one that comes first gives its name.
    let strictest = entitlements.iter().min_by_key(|e| e.limit)?;
    let mut limit = strictest.limit.bytes();
    let mut lowered_by = None;
    for (bound, by) in
        [(capacity, LoweredBy::Device), (pod.limit.map(ByteSize::bytes), LoweredBy::Annotation)]
    {
        if let Some(bound) = bound
            && bound < limit
        {
            limit = bound;
            lowered_by = Some(by);
        }
    }
    let first = entitlements.first();
    let guarantee = first.and_then(|e| e.guarantee).map(|g| g.bytes().min(limit));
    let kernel_limits = first.map(|e| e.kernel_limits).unwrap_or_default();
    let managed = entitlements.iter().filter_map(|e| e.managed).max().unwrap_or_default();
    // Of equal strengths the one that comes first gives its name.
    let asked = entitlements.iter().rev().max_by_key(|e| e.minimum).filter(|e| e.minimum > Strength::Observe);
    let asked =
        asked.map(|e| Asked { strength: e.minimum, policy: e.policy.to_owned(), rule: e.rule.to_owned() });
    let breach = matching.iter().find_map(|quota| {
        quota.value.breach.as_ref().map(|terms| BreachTerms {
            policy: quota.policy.clone(),
            owner_kinds: quota.owner_kinds.clone(),
            terms: terms.clone(),
        })
    });
    let source = Source { policy: strictest.policy.to_owned(), rule: strictest.rule.to_owned(), lowered_by };
    Some(EffectiveQuota { limit, source, guarantee, breach, asked, managed, kernel_limits })
}

/// Whether some pod may have a limit of the driver under these quotas. Where there are none, nobody has
/// said no.
pub fn wants_kernel_limits<'a>(quotas: impl IntoIterator<Item = &'a PlanQuota>) -> bool {
    let mut quotas = quotas.into_iter().map(|quota| quota.value.kernel_limits).peekable();
    quotas.peek().is_none() || quotas.any(|limits| limits != KernelLimits::Off)
}

/// What a CUDA context takes where none was seen yet, in bytes: as measured on an H200 with driver
/// 580 (docs/real-gpu.md).
pub const DEFAULT_CONTEXT: u64 = 518 * ByteSize::MI;
/// What a process needs beside its context to do anything at all, in bytes.
pub const CONTEXT_HEADROOM: u64 = 64 * ByteSize::MI;

/// Whether a limit is below what one CUDA context takes on such a device and a little more, so that
/// no process can work under it (`QuotaBelowContext`). `context` is what was learned for the kind of
/// device, else [`DEFAULT_CONTEXT`].
pub const fn below_context(limit: u64, context: u64) -> bool {
    limit < context.saturating_add(CONTEXT_HEADROOM)
}

/// What one policy gives a pod.
struct Entitlement<'a> {
    policy: &'a str,
    rule: &'a str,
    guarantee: Option<ByteSize>,
    limit: ByteSize,
    minimum: Strength,
    managed: Option<ManagedMemory>,
    kernel_limits: KernelLimits,
}

impl<'a> Entitlement<'a> {
    fn of(quota: &'a PlanQuota, pod: &PodFacts) -> Option<Self> {
        let policy = quota.policy.as_str();
        let kernel_limits = quota.value.kernel_limits;
        let rule = quota.value.rules.iter().find(|rule| pod::selects(&rule.pods, &pod.labels));
        if let Some(rule) = rule {
            return Some(Self {
                policy,
                rule: &rule.name,
                guarantee: rule.guarantee,
                limit: rule.limit,
                minimum: rule.minimum_strength.unwrap_or_default(),
                managed: rule.managed_memory,
                kernel_limits,
            });
        }
        let default = quota.value.default.as_ref()?;
        Some(Self {
            policy,
            rule: "default",
            guarantee: default.guarantee,
            limit: default.limit,
            minimum: Strength::Observe,
            managed: None,
            kernel_limits,
        })
    }
}

/// Whether a pod is in breach of its limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BreachState {
    /// In breach: above the limit and its tolerance for the hold, and not back at the limit since.
    pub active: bool,
    over_since: Option<Millis>,
}

/// How a breach changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BreachChange {
    /// The pod has been above its limit for the hold.
    Began,
    /// The pod is back at or below its limit.
    Ended,
}

impl BreachState {
    /// The state after a sample. `used` is `None` where the driver did not say.
    pub fn step(
        self,
        limit: u64,
        terms: &Breach,
        used: Option<u64>,
        now: Millis,
    ) -> (Self, Option<BreachChange>) {
        let Some(used) = used else { return (self, None) };
        if self.active {
            return if used <= limit { (Self::default(), Some(BreachChange::Ended)) } else { (self, None) };
        }
        if used <= limit.saturating_add(terms.tolerance.map_or(0, ByteSize::bytes)) {
            return (Self::default(), None);
        }
        let since = self.over_since.unwrap_or(now);
        let active = now.since(since) >= milliseconds(terms.hold_milliseconds);
        (Self { active, over_since: Some(since) }, active.then_some(BreachChange::Began))
    }
}

/// Room above its due within which a pod is not yet called over it, so that the count is steady.
const OVER_MARGIN: u64 = 64 * ByteSize::MI;

/// Whether a pod counts as over its due, given whether it did before. Unlike
/// [`BreachState`] this decides nothing: it is shown.
pub fn is_over_due(was_over: bool, due: u64, used: Option<u64>) -> bool {
    let margin = if was_over { 0 } else { OVER_MARGIN };
    used.map_or(was_over, |used| used > due.saturating_add(margin))
}

#[cfg(test)]
mod tests {
    use highwater_crds::{DefaultQuota, Quota, QuotaRule};
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
    use proptest::prelude::*;

    use super::*;

    const GI: u64 = ByteSize::GI;

    fn quota(policy: &str, limit: u64, guarantee: Option<u64>, hold: Option<i32>) -> PlanQuota {
        PlanQuota {
            policy: policy.into(),
            namespaces: None,
            owner_kinds: vec!["ReplicaSet".into()],
            value: Quota {
                default: Some(DefaultQuota { guarantee: guarantee.map(ByteSize), limit: ByteSize(limit) }),
                rules: Vec::new(),
                breach: hold.map(terms),
                kernel_limits: KernelLimits::default(),
            },
        }
    }

    /// A policy with one rule that matches every pod.
    fn asking(policy: &str, strength: Option<Strength>, managed: Option<ManagedMemory>) -> PlanQuota {
        let mut asking = quota(policy, 8 * GI, None, None);
        asking.value.rules = vec![QuotaRule {
            name: "all".into(),
            pods: LabelSelector::default(),
            guarantee: None,
            limit: ByteSize(8 * GI),
            minimum_strength: strength,
            managed_memory: managed,
        }];
        asking
    }

    fn terms(hold: i32) -> Breach {
        Breach { tolerance: Some(ByteSize::mib(512)), hold_milliseconds: hold, actions: Vec::new() }
    }

    fn pod() -> PodFacts {
        PodFacts { namespace: "team".into(), ..PodFacts::default() }
    }

    fn of(quotas: &[PlanQuota], pod: &PodFacts, capacity: Option<u64>) -> Option<EffectiveQuota> {
        effective(quotas, pod, Some(&NamespaceFacts::default()), "highwater-system", capacity)
    }

    #[test]
    fn the_strictest_limit_holds_and_the_rest_comes_from_the_first() {
        let found =
            of(&[quota("a", 8 * GI, Some(6 * GI), None), quota("b", 4 * GI, None, Some(7))], &pod(), None)
                .unwrap();
        assert_eq!((found.limit, found.guarantee), (4 * GI, Some(4 * GI)));
        assert_eq!(found.source.policy, "b");
        assert_eq!(found.breach.unwrap().terms.hold_milliseconds, 7);
    }

    #[test]
    fn the_first_rule_that_matches_holds_else_the_default() {
        let mut quotas = [quota("a", 8 * GI, None, None)];
        quotas[0].value.rules = vec![QuotaRule {
            name: "serving".into(),
            pods: LabelSelector {
                match_labels: Some([("tier".into(), "serving".into())].into()),
                ..LabelSelector::default()
            },
            guarantee: Some(ByteSize(12 * GI)),
            limit: ByteSize(16 * GI),
            minimum_strength: None,
            managed_memory: None,
        }];
        let labelled = PodFacts { labels: [("tier".into(), "serving".into())].into(), ..pod() };
        assert_eq!(of(&quotas, &labelled, None).unwrap().due(), 12 * GI);
        let dropped = of(&quotas, &pod(), None).unwrap();
        assert_eq!((dropped.limit, dropped.source.rule.as_str()), (8 * GI, "default"));
    }

    #[test]
    fn strength_and_managed_memory_are_the_strictest_and_name_who_asks() {
        use ManagedMemory::{Charge, Ignore, Refuse};
        let asked = |quotas: &[PlanQuota]| of(quotas, &pod(), None).unwrap();
        let nobody = asked(&[asking("a", Some(Strength::Observe), None), quota("b", GI, None, None)]);
        assert_eq!((nobody.asked, nobody.managed), (None, Charge));
        let both = asked(&[
            asking("a", Some(Strength::Reservation), Some(Ignore)),
            asking("b", Some(Strength::Guard), None),
            asking("c", Some(Strength::Guard), Some(Refuse)),
        ]);
        let Asked { strength, policy, rule } = both.asked.unwrap();
        assert_eq!((strength, policy.as_str(), rule.as_str()), (Strength::Guard, "b", "all"));
        assert_eq!(both.managed, Refuse);
        let alone = asked(&[asking("a", None, Some(Ignore)), quota("b", GI, None, None)]);
        assert_eq!(alone.managed, Ignore, "who says nothing of it does not overrule who does");
    }

    #[test]
    fn kernel_limits_are_wanted_unless_every_policy_says_no() {
        let wanted = quota("a", GI, None, None);
        let mut off = quota("b", GI, None, None);
        off.value.kernel_limits = KernelLimits::Off;
        assert!(wants_kernel_limits([]));
        assert!(wants_kernel_limits([&off, &wanted]));
        assert!(!wants_kernel_limits([&off, &off]));
    }

    #[test]
    fn kernel_limits_are_those_of_the_first_policy() {
        let mut off = quota("a", 8 * GI, None, None);
        off.value.kernel_limits = KernelLimits::Off;
        let quotas = [off, quota("b", GI, None, None)];
        assert_eq!(of(&quotas, &pod(), None).unwrap().kernel_limits, KernelLimits::Off);
        assert_eq!(of(&quotas[1..], &pod(), None).unwrap().kernel_limits, KernelLimits::IfAvailable);
    }

    #[test]
    fn b17_a_limit_must_hold_a_context_and_a_little_more() {
        assert!(below_context(512 * ByteSize::MI, DEFAULT_CONTEXT));
        assert!(below_context(DEFAULT_CONTEXT + CONTEXT_HEADROOM - 1, DEFAULT_CONTEXT));
        assert!(!below_context(DEFAULT_CONTEXT + CONTEXT_HEADROOM, DEFAULT_CONTEXT));
        assert!(below_context(u64::MAX - 1, u64::MAX), "saturates");
    }

    #[test]
    fn l12_a_guarantee_is_soft_up_to_the_limit_and_never_above_it() {
        let found = of(&[quota("a", 16 * GI, Some(12 * GI), None)], &pod(), None).unwrap();
        assert_eq!((found.limit, found.guarantee, found.due()), (16 * GI, Some(12 * GI), 12 * GI));
        let small = of(&[quota("a", 16 * GI, Some(12 * GI), None)], &pod(), Some(10 * GI)).unwrap();
        assert_eq!((small.limit, small.guarantee), (10 * GI, Some(10 * GI)), "clamped with the limit");
    }

    #[test]
    fn an_annotation_lowers_and_never_raises() {
        let own = |limit| PodFacts { limit: Some(ByteSize(limit)), ..pod() };
        let quotas = [quota("a", 8 * GI, Some(8 * GI), None)];
        let lowered = of(&quotas, &own(2 * GI), None).unwrap();
        assert_eq!((lowered.limit, lowered.due()), (2 * GI, 2 * GI));
        assert_eq!(lowered.source.lowered_by, Some(LoweredBy::Annotation));
        assert_eq!(of(&quotas, &own(80 * GI), None).unwrap().limit, 8 * GI);
    }

    #[test]
    fn a_limit_above_the_device_is_clamped_to_it() {
        let found = of(&[quota("a", 800 * GI, None, None)], &pod(), Some(80 * GI)).unwrap();
        assert_eq!((found.limit, found.source.lowered_by), (80 * GI, Some(LoweredBy::Device)));
    }

    #[test]
    fn system_and_release_namespaces_have_no_quota() {
        for namespace in ["kube-system", "highwater-system"] {
            let pod = PodFacts { namespace: namespace.into(), ..pod() };
            assert_eq!(of(&[quota("a", GI, None, None)], &pod, None), None);
        }
    }

    #[test]
    fn a_breach_begins_after_its_hold_above_the_tolerance_and_ends_at_the_limit() {
        let mut state = BreachState::default();
        let mut changes = Vec::new();
        for (time, used) in [
            (0, GI + 1),
            (100, 2 * GI),
            (1099, 2 * GI),
            (1100, 2 * GI),
            (1200, GI + 1),
            (1300, GI),
            (1400, GI),
        ] {
            let (next, change) = state.step(GI, &terms(1000), Some(used), Millis(time));
            state = next;
            changes.push(change);
        }
        assert_eq!(
            changes,
            [None, None, None, Some(BreachChange::Began), None, Some(BreachChange::Ended), None]
        );
    }

    #[test]
    fn a_missing_number_keeps_a_breach() {
        let (state, _) = BreachState::default().step(GI, &terms(0), Some(2 * GI), Millis(0));
        assert!(state.active);
        assert_eq!(state.step(GI, &terms(0), None, Millis(9)), (state, None));
    }

    #[test]
    fn a_pod_at_its_due_does_not_flap() {
        assert!(!is_over_due(false, GI, Some(GI + 1)));
        assert!(is_over_due(true, GI, Some(GI + 1)));
        assert!(!is_over_due(true, GI, Some(GI)));
    }

    proptest! {
        #[test]
        fn more_policies_never_raise_a_limit(limits in prop::collection::vec(1u64..1 << 40, 1..6), own in prop::option::of(1u64..1 << 40)) {
            let pod = PodFacts { limit: own.map(ByteSize), ..pod() };
            let quotas: Vec<_> = limits.iter().map(|&l| quota("p", l, None, None)).collect();
            let mut last = u64::MAX;
            for n in 1..=quotas.len() {
                let found = of(&quotas[..n], &pod, Some(1 << 39)).unwrap();
                prop_assert!(found.limit <= last && found.due() <= found.limit);
                last = found.limit;
            }
        }
    }
}
