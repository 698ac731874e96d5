//! What an incident of kind Leak waits for before anything is done about it, and what ends it as a
//! ticket.
//!
//! Such an incident is opened at suspicion, and nothing is done about a suspicion: it is watched.
//!
//! | what the agent sees | the incident |
//! |---|---|
//! | a suspicion | waits, `LeakSuspected` |
//! | growth that levels off, or a cache that fills | waits, `CacheFilling` |
//! | replicas of the workload that leak alike | waits, `WorkloadTicket`: see [`crate::leak_tickets`] |
//! | an act is due, restarts did not help | ends, `TicketNeeded` |
//! | an act is due, an option of the allocator would help | waits, `AllocatorOption`, until memory may run out within what a restart takes |
//! | an act is due, and the policy asks for none | waits, `LeakFound` |
//! | an act is due, and a hook comes before it | waits, `AwaitingObservation`, until what is seen after the hook says that it did not help |
//! | an act is due, and a hook freed memory that is still free | waits, `HookHelped` |
//! | an act is due | goes the way of every act |
//!
//! What waits goes on being watched: an act may become due, or the suspicion may clear. Each wait is
//! recorded once, with the numbers of that moment; the present ones are in the observation.

use highwater_crds::{
    ActionType, Decision, DecisionState, GpuMemoryIncidentSpec, HookEffect, IncidentKind, LeakAdvice,
    LeakClass, LeakFinding, LeakMemory, LeakStage, Mode, Observation,
};
use jiff::{SignedDuration, Timestamp};

use crate::{
    episode::AWAITING_OBSERVATION,
    leak::{Settings, how},
    remediation::{
        Asks, Carrier, Step, TICKET_NEEDED, View, agent_gone, asked_lately, carrier, is_fresh, verdict,
    },
};

/// Reason of an incident that is only a suspicion.
pub const LEAK_SUSPECTED: &str = "LeakSuspected";
/// Reason of an incident about growth that levels off.
pub const CACHE_FILLING: &str = "CacheFilling";
/// Reason of an incident whose cause an option of the allocator would remove.
pub const ALLOCATOR_OPTION: &str = "AllocatorOption";
/// Reason of an incident about a leak for which the policy asks for nothing.
pub const LEAK_FOUND: &str = "LeakFound";
/// Reason of an incident whose pod holds less since its engine was asked to free what it caches.
pub const HOOK_HELPED: &str = "HookHelped";
/// Reason of an incident that is a part of one ticket on its workload.
pub const WORKLOAD_TICKET: &str = "WorkloadTicket";

/// So many restarts in a row without effect are enough.
const RESTARTS_IN_VAIN: i32 = 2;
/// How soon what is only watched is looked at again without news,
const LOOK_AGAIN: SignedDuration = SignedDuration::from_secs(300);
/// and how soon while what a hook frees is awaited.
const LOOK_SOON: SignedDuration = SignedDuration::from_secs(10);

/// What is known of a leak beside what the agent found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    /// What a drain, a start and a warm-up take together, by the policy.
    pub lead: SignedDuration,
    /// Whether the policy asks for the act that the incident proposes.
    pub asked: bool,
    /// Whether it asks for a hook, which then comes before that act.
    pub hooks: bool,
    /// The ticket on the workload that the incident is a part of, in a sentence.
    pub ticket: Option<String>,
}

impl Default for Standing {
    fn default() -> Self {
        let lead = i64::try_from(Settings::default().lead_milliseconds).unwrap_or(i64::MAX);
        Self { lead: SignedDuration::from_millis(lead), asked: false, hooks: false, ticket: None }
    }
}

/// What the agent saw last, if that was since the incident was opened.
fn seen<'a>(spec: &GpuMemoryIncidentSpec, observation: Option<&'a Observation>) -> Option<&'a Observation> {
    observation.filter(|o| o.at.0 >= spec.evidence.at.0)
}

/// What the agent found last: by its observation, or, before there is one, by the evidence.
pub fn latest<'a>(
    spec: &'a GpuMemoryIncidentSpec,
    observation: Option<&'a Observation>,
) -> Option<&'a LeakFinding> {
    match seen(spec, observation) {
        Some(observation) => observation.leak.as_ref(),
        None => spec.evidence.leak.as_ref(),
    }
}

/// Whether somebody is to be acted on because of a leak: a suspicion, or what waits for a person,
/// condemns nobody.
pub fn is_due(
    spec: &GpuMemoryIncidentSpec,
    observation: Option<&Observation>,
    decision: Option<&Decision>,
) -> bool {
    let hook = observation.and_then(|o| o.hook);
    let helped = |finding: &LeakFinding| {
        finding.memory == LeakMemory::Device && hook.is_some_and(|hook| hook.effect == HookEffect::Helped)
    };
    let due = |finding: &LeakFinding| finding.stage == LeakStage::Act && !fills(finding) && !helped(finding);
    !has_ticket(decision) && latest(spec, observation).is_some_and(due)
}

/// Whether the incident belongs to a ticket already, on which it stays as long as it is open.
pub fn has_ticket(decision: Option<&Decision>) -> bool {
    decision.is_some_and(|d| d.state == DecisionState::Proposed && d.reason == WORKLOAD_TICKET)
}

/// What to do about a leak for which no act is due; `None`: it goes the way of every act.
pub(crate) fn not_due(view: &View<'_>, now: Timestamp) -> Option<Step> {
    if view.spec.kind != IncidentKind::Leak {
        return None;
    }
    // It may stand for days, longer than an agent is away: the next one goes on with it.
    if let Some(gone) = agent_gone(view) {
        return Some(watch(view, LEAK_SUSPECTED, gone.message, LOOK_AGAIN));
    }
    let Some(finding) = latest(view.spec, view.observation) else {
        let message = format!("the agent on {} does not say how it stands with the leak", view.spec.node);
        return Some(watch(view, LEAK_SUSPECTED, message, LOOK_AGAIN));
    };
    let unknown = Standing::default();
    let standing = view.leak.as_ref().unwrap_or(&unknown);
    let says = describe(finding);
    let enforced = view.spec.mode == Mode::Enforce;
    let ticket = standing.ticket.as_ref().map(|ticket| format!("{ticket}; this one {says}"));
    if let (Some(message), true) = (&ticket, enforced) {
        return Some(watch(view, WORKLOAD_TICKET, message.clone(), LOOK_AGAIN));
    }
    if fills(finding) {
        let message = format!("it {says}: it levels off, so nothing is done");
        return Some(watch(view, CACHE_FILLING, message, LOOK_AGAIN));
    }
    if finding.stage == LeakStage::Suspect {
        let message = format!("it {says}: nothing is done before memory may run out within the horizon");
        return Some(watch(view, LEAK_SUSPECTED, message, LOOK_AGAIN));
    }
    let in_vain = in_vain(view, finding).map(|why| format!("{why}; it {says}"));
    match (in_vain.or(ticket), enforced) {
        (Some(why), true) => {
            return Some(Step::Record(verdict(DecisionState::Suppressed, TICKET_NEEDED, why), None));
        }
        (Some(why), false) => {
            let message = format!("it would have ended as a ticket: {why}");
            return Some(Step::Record(verdict(DecisionState::Suppressed, "DryRun", message), None));
        }
        (None, _) => {}
    }
    if matches!(view.asks, Asks::Act { .. })
        && (!standing.asked || carrier(&view.spec.proposed) == Carrier::Nobody)
    {
        let policy = &view.spec.policy;
        let message = format!("it {says}: policy {policy} asks for no act that the operator decides");
        return Some(watch(view, LEAK_FOUND, message, LOOK_AGAIN));
    }
    by_an_option(view, finding, standing.lead, now).or_else(|| by_a_hook(view, finding, standing.hooks, now))
}

/// Waits with an act until what the agent saw after the hook says that it did not help. Where somebody
/// has paused acts the agent waits as well, and says nothing new meanwhile.
fn by_a_hook(view: &View<'_>, finding: &LeakFinding, hooks: bool, now: Timestamp) -> Option<Step> {
    if finding.memory != LeakMemory::Device || view.spec.mode != Mode::Enforce || view.paused.is_some() {
        return None;
    }
    let effect = match seen(view.spec, view.observation) {
        Some(seen) => seen.hook?.effect,
        // Whether it can be asked, the agent says with its first look.
        None if hooks => HookEffect::Awaited,
        None => return None,
    };
    let says = describe(finding);
    match effect {
        HookEffect::InVain => None,
        HookEffect::Helped => {
            let message = format!(
                "it {says}: its engine was asked and freed memory, so nothing more is done before that is in use again"
            );
            Some(watch(view, HOOK_HELPED, message, LOOK_AGAIN))
        }
        HookEffect::Awaited => {
            let message = format!("it {says}: its engine is asked first, and what that frees is awaited");
            if is_fresh(view.spec, view.observation, now)
                || view.asked.is_some_and(|asked| asked_lately(asked, now))
            {
                return Some(watch(view, AWAITING_OBSERVATION, message, LOOK_SOON));
            }
            Some(Step::Observe(verdict(DecisionState::Proposed, AWAITING_OBSERVATION, message)))
        }
    }
}

/// Waits with a restart that would only hide what an option of the allocator would end, as long as
/// there is time.
fn by_an_option(
    view: &View<'_>,
    finding: &LeakFinding,
    lead: SignedDuration,
    now: Timestamp,
) -> Option<Step> {
    if finding.advice != Some(LeakAdvice::AllocatorOption) {
        return None;
    }
    let spare = left(finding, now).map(|left| left.saturating_sub(lead));
    if spare.is_some_and(|spare| !spare.is_positive()) {
        return None;
    }
    let message = format!(
        "it {}: an option such as expandable segments would end it and a restart only hides it, so it is restarted only where memory may run out within {} s",
        describe(finding),
        lead.as_secs(),
    );
    let again = spare.unwrap_or(LOOK_AGAIN).clamp(SignedDuration::from_secs(1), LOOK_AGAIN);
    Some(watch(view, ALLOCATOR_OPTION, message, again))
}

/// Why a restart would be in vain, if it would.
fn in_vain(view: &View<'_>, finding: &LeakFinding) -> Option<String> {
    if finding.advice == Some(LeakAdvice::Ticket) {
        return Some("restarts did not help: its team has to look".to_owned());
    }
    let without = finding.profile.map_or(0, |p| p.restarts_without_effect);
    if without >= RESTARTS_IN_VAIN {
        return Some(format!("{without} restarts in a row did not lower its slope: its team has to look"));
    }
    view.in_vain.clone().filter(|_| view.spec.proposed.action == ActionType::Restart)
}

/// Growth that ends by itself.
fn fills(finding: &LeakFinding) -> bool {
    finding.class == LeakClass::Saturating || finding.advice == Some(LeakAdvice::CacheFilling)
}

/// How long until memory may run out, at the earliest.
fn left(finding: &LeakFinding, now: Timestamp) -> Option<SignedDuration> {
    let low = finding.exhaustion_seconds?.low;
    Some(SignedDuration::from_secs(low).saturating_sub(now.duration_since(finding.at.0)))
}

/// Waits. The same wait with other numbers is no news.
fn watch(view: &View<'_>, reason: &'static str, message: String, again: SignedDuration) -> Step {
    let same = |d: &Decision| d.state == DecisionState::Proposed && d.reason == reason;
    if view.decision.is_some_and(same) {
        return Step::Rest(Some(again));
    }
    Step::Record(verdict(DecisionState::Proposed, reason, message), Some(again))
}

/// What was found, as the rest of a sentence: class, slope, exhaustion, each with its bounds, and what
/// is recommended.
pub fn describe(finding: &LeakFinding) -> String {
    let slope = finding.slope_bytes_per_hour;
    let how = how(finding.class);
    let end = match finding.exhaustion_seconds {
        Some(e) => format!("is full in {} ({} to {})", span(e.mid), span(e.low), span(e.high)),
        None => "with no end in sight".to_owned(),
    };
    let recommended = match finding.advice {
        Some(LeakAdvice::Restart) => ", recommended: a restart in time",
        Some(LeakAdvice::AllocatorOption) => ", recommended: an option of the allocator",
        Some(LeakAdvice::Ticket) => ", recommended: a ticket",
        Some(LeakAdvice::CacheFilling) => ", recommended: nothing, a cache is filling",
        None => "",
    };
    format!(
        "grows {how} by {} an hour ({} to {}), on {} of {} scales, {end}, {} % sure{recommended}",
        size(slope.mid),
        size(slope.low),
        size(slope.high),
        finding.agreeing_scales,
        finding.eligible_scales,
        finding.confidence_percent,
    )
}

/// A size as people write it.
pub(crate) fn size(bytes: i64) -> String {
    let mi = bytes >> 20;
    if mi.abs() < 10 * 1024 {
        return format!("{mi} MiB");
    }
    // Tenths of a GiB.
    let tenths = i128::from(bytes) * 10 / (1 << 30);
    format!("{}.{} GiB", tenths / 10, (tenths % 10).abs())
}

/// A time as people write it.
fn span(seconds: i64) -> String {
    match seconds {
        ..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use highwater_crds::HookReport;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;
    use crate::{
        pod::{Owner, PodFacts},
        remediation::decide,
    };

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    /// A finding at second 100 that is due, of a leak that fills the pod in 1800 s, at the earliest in
    /// 1200 s.
    fn finding(change: &Value) -> Value {
        let mut finding = json!({
            "at": format!("{:.6}", at(100)), "stage": "Act", "class": "Linear",
            "slopeBytesPerHour": {"low": 1_i64 << 30, "mid": 12_i64 << 30, "high": 15_i64 << 30},
            "exhaustionSeconds": {"low": 1200, "mid": 1800, "high": 9000},
            "confidencePercent": 93, "agreeingScales": 3, "eligibleScales": 4,
            "advice": "Restart", "reason": "r",
        });
        finding.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        finding
    }

    fn spec(mode: &str, action: &str) -> GpuMemoryIncidentSpec {
        serde_json::from_value(json!({
            "kind": "Leak", "mode": mode, "policy": "serving", "node": "n1", "device": "GPU-1", "episode": 1,
            "subject": {"namespace": "team", "name": "leaks-1", "uid": "u1"},
            "evidence": {"at": format!("{:.6}", at(50)), "leak": finding(&json!({"stage": "Suspect"}))},
            "proposed": {"action": action},
        }))
        .unwrap()
    }

    fn observation(state: &str, second: i64, leak: &Value) -> Observation {
        let at = format!("{:.6}", at(second));
        serde_json::from_value(json!({"state": state, "at": at, "leak": leak})).unwrap()
    }

    fn decision(state: DecisionState, reason: &str) -> Decision {
        serde_json::from_value(json!({"state": state, "reason": reason, "since": format!("{:.6}", at(60))}))
            .unwrap()
    }

    struct Case {
        spec: GpuMemoryIncidentSpec,
        observation: Option<Observation>,
        decision: Option<Decision>,
        standing: Standing,
        in_vain: Option<String>,
        paused: bool,
        now: i64,
    }

    #[allow(clippy::needless_pass_by_value)] // made on the spot by every caller
    fn case(change: Value) -> Case {
        Case {
            spec: spec("Enforce", "Restart"),
            observation: Some(observation("Over", 100, &finding(&change))),
            decision: None,
            standing: Standing { asked: true, ..Standing::default() },
            in_vain: None,
            paused: false,
            now: 101,
        }
    }

    impl Case {
        fn step(&self) -> Step {
            let (pod, kinds) = (pod(), vec!["ReplicaSet".to_owned()]);
            let view = View {
                spec: &self.spec,
                decision: self.decision.as_ref(),
                observation: self.observation.as_ref(),
                asked: None,
                pod: Some(&pod),
                evicted: false,
                token: false,
                agent_away: None,
                grace_seconds: None,
                asks: Asks::Act { owner_kinds: &kinds, namespace_selected: true },
                paused: self.paused.then(|| "node n1".into()),
                rival: None,
                halted: None,
                refusal: None,
                blocked: None,
                in_vain: self.in_vain.clone(),
                leak: Some(self.standing.clone()),
            };
            decide(&view, at(self.now))
        }

        fn outcome(&self) -> String {
            match self.step() {
                Step::Record(v, _) | Step::Observe(v) => format!("{:?}/{}", v.state, v.reason),
                step => format!("{step:?}"),
            }
        }

        fn message(&self) -> String {
            match self.step() {
                Step::Record(v, _) => v.message,
                step => format!("{step:?}"),
            }
        }
    }

    fn pod() -> PodFacts {
        PodFacts {
            namespace: "team".into(),
            name: "leaks-1".into(),
            uid: "u1".into(),
            node: Some("n1".into()),
            owner: Some(Owner {
                api_version: "apps/v1".into(),
                kind: "ReplicaSet".into(),
                name: "leaks".into(),
                uid: "r".into(),
            }),
            ..PodFacts::default()
        }
    }

    #[test]
    fn a_suspicion_is_watched_and_its_numbers_are_told() {
        let mut suspect = case(json!({"stage": "Suspect"}));
        assert_eq!(suspect.outcome(), "Proposed/LeakSuspected");
        assert_eq!(
            suspect.message(),
            "it grows steadily by 12.0 GiB an hour (1024 MiB to 15.0 GiB), on 3 of 4 scales, is full in 30 min \
             (20 min to 2 h), 93 % sure, recommended: a restart in time: nothing is done before memory may run \
             out within the horizon"
        );
        suspect.decision = Some(decision(DecisionState::Proposed, LEAK_SUSPECTED));
        assert_eq!(suspect.step(), Step::Rest(Some(LOOK_AGAIN)), "other numbers are no news");
        suspect.observation = None;
        suspect.decision = None;
        assert_eq!(suspect.outcome(), "Proposed/LeakSuspected", "the evidence is the first look");
    }

    #[test]
    fn what_is_due_is_done_and_only_on_a_fresh_look_that_still_says_so() {
        assert_eq!(case(json!({})).outcome(), "Act");
        let stale = Case { now: 106, ..case(json!({})) };
        assert!(matches!(stale.step(), Step::Observe(_)));
        let approved = Some(decision(DecisionState::Approved, "WithinBudget"));
        let resumed = Case { decision: approved.clone(), ..case(json!({})) };
        assert_eq!(resumed.outcome(), "Act");
        let fell = Case { decision: approved, ..case(json!({"stage": "Suspect"})) };
        assert_eq!(fell.outcome(), "Proposed/LeakSuspected", "it is taken back");
        let silent = Case { observation: Some(observation("Over", 100, &Value::Null)), ..case(json!({})) };
        assert_eq!(silent.outcome(), "Proposed/LeakSuspected", "missing is not due");
        let mut in_place = case(json!({}));
        in_place.spec.proposed.in_place = true;
        assert_eq!(in_place.outcome(), "Allow");
    }

    #[test]
    fn a_suspicion_that_clears_is_cancelled() {
        for state in ["Recovered", "Gone"] {
            let cleared =
                Case { observation: Some(observation(state, 100, &Value::Null)), ..case(json!({})) };
            assert_eq!(cleared.outcome(), "Cancelled/Recovered");
        }
    }

    #[test]
    fn what_levels_off_is_watched_and_never_acted_on() {
        for change in [json!({"class": "Saturating"}), json!({"advice": "CacheFilling"})] {
            let case = case(change);
            assert_eq!(case.outcome(), "Proposed/CacheFilling");
            assert!(!is_due(&case.spec, case.observation.as_ref(), None));
        }
    }

    #[test]
    fn an_option_of_the_allocator_comes_before_a_restart_while_there_is_time() {
        let waits = case(json!({"advice": "AllocatorOption"}));
        assert_eq!(waits.outcome(), "Proposed/AllocatorOption");
        let Step::Record(_, Some(again)) = waits.step() else { panic!() };
        assert_eq!(again, LOOK_AGAIN, "there are 599 s to spare");
        let soon = Case {
            observation: Some(observation("Over", 700, &finding(&json!({"advice": "AllocatorOption"})))),
            now: 700,
            ..case(json!({}))
        };
        assert_eq!(soon.outcome(), "Act", "1200 s less 600 s are within the lead");
        let endless = case(json!({"advice": "AllocatorOption", "exhaustionSeconds": null}));
        assert_eq!(endless.outcome(), "Proposed/AllocatorOption");
    }

    fn hook(effect: &str) -> HookReport {
        serde_json::from_value(json!({"effect": effect, "heldBytes": 1_i64 << 34})).unwrap()
    }

    #[test]
    fn a_hook_comes_before_a_restart_and_has_to_be_seen_not_to_help() {
        let hooked = |effect: &str, change: Value| {
            let mut case = case(change);
            case.standing.hooks = true;
            case.observation.as_mut().unwrap().hook = Some(hook(effect));
            case
        };
        assert_eq!(hooked("Awaited", json!({})).outcome(), "Proposed/AwaitingObservation");
        assert_eq!(hooked("Helped", json!({})).outcome(), "Proposed/HookHelped");
        assert_eq!(hooked("InVain", json!({})).outcome(), "Act");
        let stale = Case { now: 106, ..hooked("Awaited", json!({})) };
        assert!(matches!(stale.step(), Step::Observe(_)), "what is not said is asked for");
        let stale = Case { now: 106, ..hooked("InVain", json!({})) };
        assert!(matches!(stale.step(), Step::Observe(_)));
        let awaited = |state, reason| {
            let decision = Some(decision(state, reason));
            Case { decision, ..hooked("Awaited", json!({})) }
        };
        let waits = awaited(DecisionState::Proposed, "AwaitingObservation");
        assert_eq!(waits.step(), Step::Rest(Some(LOOK_SOON)));
        let approved = awaited(DecisionState::Approved, "WithinBudget");
        assert_eq!(approved.outcome(), "Proposed/AwaitingObservation", "it is taken back");
        for (effect, suspected) in [("Helped", false), ("Awaited", true), ("InVain", true)] {
            let case = hooked(effect, json!({}));
            assert_eq!(is_due(&case.spec, case.observation.as_ref(), None), suspected, "{effect}");
        }
        assert_eq!(hooked("Helped", json!({"memory": "Host"})).outcome(), "Act", "that is not what grows");
        assert_eq!(hooked("Awaited", json!({"advice": "Ticket"})).outcome(), "Suppressed/TicketNeeded");
    }

    #[test]
    fn before_its_first_look_nobody_knows_whether_a_hook_comes_first() {
        let mut opened = case(json!({}));
        opened.spec.evidence.leak = opened.observation.take().and_then(|o| o.leak);
        opened.spec.evidence.at = MicroTime(at(100));
        assert_eq!(opened.outcome(), "Act", "the policy asks for no hook");
        opened.standing.hooks = true;
        assert_eq!(opened.outcome(), "Proposed/AwaitingObservation");
        opened.now = 106;
        assert!(matches!(opened.step(), Step::Observe(_)));
        opened.observation = Some(observation("Over", 106, &finding(&json!({}))));
        assert_eq!(opened.outcome(), "Act", "its pod has none");
        opened.paused = true;
        opened.observation.as_mut().unwrap().hook = Some(hook("Awaited"));
        assert_eq!(opened.outcome(), "Proposed/Paused");
    }

    #[test]
    fn restarts_in_vain_end_as_a_ticket_once_an_act_is_due() {
        let profile = |n| json!({"profile": {"lives": 0, "endedBadly": n, "restartsWithoutEffect": n}});
        assert_eq!(case(profile(2)).outcome(), "Suppressed/TicketNeeded");
        assert_eq!(case(profile(1)).outcome(), "Act");
        let advised = case(json!({"advice": "Ticket"}));
        assert_eq!(advised.outcome(), "Suppressed/TicketNeeded");
        assert!(advised.message().contains("12.0 GiB an hour"), "{}", advised.message());
        let remembered = Case { in_vain: Some("twice".into()), ..case(json!({})) };
        assert_eq!(remembered.outcome(), "Suppressed/TicketNeeded");
        let suspect = Case { in_vain: Some("twice".into()), ..case(json!({"stage": "Suspect"})) };
        assert_eq!(suspect.outcome(), "Proposed/LeakSuspected", "it may yet be well");
    }

    #[test]
    fn what_is_on_a_ticket_waits_whatever_else_is_known() {
        let ticket = Standing { asked: true, ticket: Some("3 pods".into()), ..Standing::default() };
        for change in [json!({}), json!({"stage": "Suspect"}), json!({"advice": "Ticket"})] {
            let mut joined = Case { standing: ticket.clone(), ..case(change) };
            assert_eq!(joined.outcome(), "Proposed/WorkloadTicket");
            joined.decision = Some(decision(DecisionState::Proposed, WORKLOAD_TICKET));
            assert_eq!(joined.step(), Step::Rest(Some(LOOK_AGAIN)));
            assert!(!is_due(&joined.spec, joined.observation.as_ref(), joined.decision.as_ref()));
        }
    }

    #[test]
    fn a_policy_that_asks_for_nothing_is_told_of_what_is_found() {
        let unasked = Case { standing: Standing::default(), ..case(json!({})) };
        assert_eq!(unasked.outcome(), "Proposed/LeakFound");
        let signal = Case { spec: spec("Enforce", "Signal"), ..case(json!({})) };
        assert_eq!(signal.outcome(), "Proposed/LeakFound", "the agent does it at once");
    }

    #[test]
    fn a_dry_run_says_what_would_be_done_once_it_is_due() {
        let dry = |change| Case { spec: spec("DryRun", "Restart"), ..case(change) };
        assert_eq!(dry(json!({"stage": "Suspect"})).outcome(), "Proposed/LeakSuspected");
        assert_eq!(dry(json!({})).outcome(), "Rehearse");
        let ticket = dry(json!({"advice": "Ticket"}));
        assert_eq!(ticket.outcome(), "Suppressed/DryRun");
        assert!(ticket.message().contains("would have ended as a ticket"), "{}", ticket.message());
        let joined = Standing { asked: true, ticket: Some("3 pods".into()), ..Standing::default() };
        let joined = Case { standing: joined, ..dry(json!({})) };
        assert_eq!(joined.outcome(), "Suppressed/DryRun");
    }

    fn finds() -> impl Strategy<Value = (Value, bool, bool)> {
        let stage = prop::sample::select(vec!["Suspect", "Act"]);
        let class = prop::sample::select(vec!["Linear", "Step", "Exponential", "Saturating", "PerReplay"]);
        let advice = prop::sample::select(vec!["Restart", "AllocatorOption", "Ticket", "CacheFilling"]);
        (stage, class, advice, any::<bool>(), any::<bool>()).prop_map(
            |(stage, class, advice, asked, joined)| {
                (finding(&json!({"stage": stage, "class": class, "advice": advice})), asked, joined)
            },
        )
    }

    proptest! {
        /// Whatever is found: nothing is done without an act that is due, asked for and fresh, nor on
        /// what levels off, nor on what is joined to a ticket, nor before a hook was seen not to help.
        #[test]
        fn nothing_is_done_that_is_not_due(
            (found, asked, joined) in finds(), age in 0..20i64, by_agent in any::<bool>(),
            (hooks, effect) in (any::<bool>(), prop::option::of(prop::sample::select(vec!["Awaited", "Helped", "InVain"]))),
            before in prop::sample::select(vec![None, Some((DecisionState::Approved, "WithinBudget")),
                Some((DecisionState::Proposed, WORKLOAD_TICKET)), Some((DecisionState::Proposed, LEAK_SUSPECTED))]),
        ) {
            let mut spec = spec("Enforce", "Restart");
            spec.proposed.in_place = by_agent;
            let mut observation = observation("Over", 100, &found);
            observation.hook = effect.map(hook);
            let case = Case {
                spec,
                observation: Some(observation),
                decision: before.map(|(state, reason)| decision(state, reason)),
                standing: Standing { asked, hooks, ticket: joined.then(|| "3 pods".into()), ..Standing::default() },
                in_vain: None,
                paused: false,
                now: 100 + age,
            };
            if matches!(case.step(), Step::Act | Step::Allow) {
                prop_assert!(asked && !joined && age <= 5);
                prop_assert!(effect.is_none_or(|effect| effect == "InVain"));
                prop_assert_eq!(&found["stage"], "Act");
                prop_assert_eq!(&found["advice"], "Restart");
                prop_assert!(found["class"] != "Saturating");
            }
        }
    }
}
