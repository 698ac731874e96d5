use serde_json::json;

use super::*;
use crate::pod::Owner;

pub(super) fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

pub(super) fn spec(mode: &str) -> GpuMemoryIncidentSpec {
    serde_json::from_value(json!({
        "kind": "QuotaBreach", "mode": mode, "policy": "serving", "node": "n1", "device": "GPU-1", "episode": 1,
        "subject": {"namespace": "team", "name": "hog-1", "uid": "u1"},
        "evidence": {"at": "1970-01-01T00:01:40.000000Z"},
        "proposed": {"action": "Restart", "gracePeriodSeconds": 10},
    }))
    .unwrap()
}

pub(super) fn pod() -> PodFacts {
    PodFacts {
        namespace: "team".into(),
        name: "hog-1".into(),
        uid: "u1".into(),
        node: Some("n1".into()),
        owner: Some(Owner {
            api_version: "apps/v1".into(),
            kind: "ReplicaSet".into(),
            name: "hog".into(),
            uid: "r".into(),
        }),
        ..PodFacts::default()
    }
}

pub(super) fn kinds() -> Vec<String> {
    vec!["ReplicaSet".into()]
}

fn decision(state: DecisionState) -> Decision {
    Decision {
        state,
        reason: "R".into(),
        message: String::new(),
        since: MicroTime(at(100)),
        workload: None,
        budgets: vec![],
        acted_at: None,
        targets: vec![],
    }
}

fn observation(state: &str, second: i64) -> Observation {
    let at = format!("{:.6}", at(second));
    serde_json::from_value(json!({"state": state, "at": at})).unwrap()
}

/// A view in which everything speaks for the act, at second 100.
pub(super) fn view<'a>(spec: &'a GpuMemoryIncidentSpec, pod: &'a PodFacts, kinds: &'a [String]) -> View<'a> {
    View {
        spec,
        decision: None,
        observation: None,
        asked: None,
        pod: Some(pod),
        evicted: false,
        token: false,
        agent_away: None,
        grace_seconds: Some(30),
        asks: Asks::Act { owner_kinds: kinds, namespace_selected: true },
        paused: None,
        rival: None,
        halted: None,
        refusal: None,
        blocked: None,
        in_vain: None,
        leak: None,
    }
}

fn outcome(view: &View<'_>, second: i64) -> String {
    match decide(view, at(second)) {
        Step::Record(v, _) | Step::Observe(v) => format!("{:?}/{}", v.state, v.reason),
        step => format!("{step:?}"),
    }
}

#[test]
fn a_fresh_breach_of_an_eligible_pod_is_acted_on() {
    let (spec, pod, kinds) = (spec("Enforce"), pod(), kinds());
    assert_eq!(decide(&view(&spec, &pod, &kinds), at(101)), Step::Act);
    let approved = decision(DecisionState::Approved);
    let resumed = View { decision: Some(&approved), ..view(&spec, &pod, &kinds) };
    assert_eq!(decide(&resumed, at(102)), Step::Act);
}

#[test]
fn a_dry_run_is_rehearsed_even_while_paused_or_out_of_budget() {
    let (spec, pod, kinds) = (spec("DryRun"), pod(), kinds());
    let refusal = Refusal { said: vec!["no".into()], retry_at: None };
    let view = View { paused: Some("node n1".into()), refusal: Some(refusal), ..view(&spec, &pod, &kinds) };
    assert_eq!(decide(&view, at(300)), Step::Rehearse);
}

#[test]
fn every_reason_never_to_act_is_named() {
    let (enforce, good, kinds) = (spec("Enforce"), pod(), kinds());
    let case = |change: &dyn Fn(&mut PodFacts), expected: &str| {
        let mut pod = good.clone();
        change(&mut pod);
        assert_eq!(outcome(&view(&enforce, &pod, &kinds), 101), expected);
    };
    case(&|p| p.uid = "u2".into(), "Cancelled/PodReplaced");
    case(&|p| p.node = Some("n2".into()), "Suppressed/NotOnNode");
    case(&|p| p.terminating = true, "Cancelled/PodGone");
    case(&|p| p.mirror = true, "Suppressed/MirrorPod");
    case(&|p| p.system_priority = true, "Suppressed/SystemPriority");
    case(&|p| p.owner = None, "Suppressed/NoOwner");
    case(&|p| p.owner.as_mut().unwrap().kind = "DaemonSet".into(), "Suppressed/DaemonSetPod");
    case(&|p| p.owner.as_mut().unwrap().kind = "Job".into(), "Suppressed/OwnerKindNotListed");

    let base = view(&enforce, &good, &kinds);
    assert_eq!(outcome(&View { pod: None, ..base.clone() }, 101), "Cancelled/PodGone");
    assert_eq!(outcome(&View { asks: Asks::Deleted, ..base.clone() }, 101), "Cancelled/PolicyDeleted");
    assert_eq!(outcome(&View { asks: Asks::Nothing, ..base.clone() }, 101), "Suppressed/PolicyGone");
    let unselected = Asks::Act { owner_kinds: &kinds, namespace_selected: false };
    assert_eq!(outcome(&View { asks: unselected, ..base.clone() }, 101), "Suppressed/NamespaceNotSelected");
    let rival = Some(Rival::Subject("other"));
    assert_eq!(outcome(&View { rival, ..base.clone() }, 101), "Superseded/SubjectBeingRestarted");

    let nobody = GpuMemoryIncidentSpec { subject: None, ..enforce.clone() };
    assert_eq!(outcome(&view(&nobody, &good, &kinds), 101), "Suppressed/NoCulprit");
    let observe = spec("Observe");
    assert_eq!(outcome(&view(&observe, &good, &kinds), 101), "Suppressed/ObserveOnly");
}

#[test]
fn d01_what_recovered_before_the_act_is_cancelled() {
    let (spec, pod, kinds) = (spec("Enforce"), pod(), kinds());
    for (state, second, expected) in [
        ("Recovered", 101, "Cancelled/Recovered"),
        ("Gone", 101, "Cancelled/Recovered"),
        ("Over", 101, "Act"),
        ("Recovered", 99, "Cancelled/Recovered"), // the node's clock was set back since the evidence
    ] {
        let seen = observation(state, second);
        let view = View { observation: Some(&seen), ..view(&spec, &pod, &kinds) };
        assert_eq!(outcome(&view, 102), expected, "{state} at {second}");
    }
}

#[test]
fn every_wait_is_named() {
    let (spec, pod, kinds) = (spec("Enforce"), pod(), kinds());
    let base = view(&spec, &pod, &kinds);
    assert_eq!(outcome(&View { paused: Some("node n1".into()), ..base.clone() }, 101), "Proposed/Paused");
    assert_eq!(outcome(&View { halted: Some("why".into()), ..base.clone() }, 101), "Proposed/FleetHalted");
    let rival = Some(Rival::Device("other"));
    assert_eq!(outcome(&View { rival, ..base.clone() }, 101), "Proposed/AwaitingVerification");
    let refusal = Some(Refusal { said: vec![], retry_at: Some(at(130)) });
    let Step::Record(v, Some(again)) = decide(&View { refusal, ..base.clone() }, at(101)) else { panic!() };
    assert_eq!((v.reason, again.as_secs()), ("BudgetExhausted", 29));

    let blocked = View { blocked: Some("pdb x".into()), ..base.clone() };
    assert_eq!(outcome(&blocked, 300), "Proposed/DisruptionBudget", "no observation is asked for in vain");

    assert!(matches!(decide(&base, at(106)), Step::Observe(_)));
    let asked = View { asked: Some(at(106)), ..base.clone() };
    assert_eq!(outcome(&asked, 110), "Proposed/AwaitingObservation");
    assert!(matches!(decide(&asked, at(110)), Step::Record(..)), "it is not asked for twice");
    assert!(matches!(decide(&asked, at(136)), Step::Observe(_)), "an agent that was away is asked again");
    let unsure = observation("Unknown", 101);
    assert!(matches!(decide(&View { observation: Some(&unsure), ..base }, at(102)), Step::Observe(_)));
}

#[test]
fn an_approved_act_that_was_done_before_a_crash_is_verified_not_repeated() {
    let (spec, mut pod, kinds) = (spec("Enforce"), pod(), kinds());
    pod.terminating = true;
    let approved = decision(DecisionState::Approved);
    let base = View { decision: Some(&approved), ..view(&spec, &pod, &kinds) };
    assert_eq!(outcome(&View { evicted: true, ..base.clone() }, 102), "Verifying/Evicted");
    assert_eq!(outcome(&View { pod: None, ..base.clone() }, 102), "Verifying/Evicted");
    assert_eq!(outcome(&base, 102), "Cancelled/PodGone", "somebody else deleted it");
}

#[test]
fn an_act_that_was_requested_without_an_answer_is_verified_though_it_waits_again() {
    let (spec, mut pod, kinds) = (spec("Enforce"), pod(), kinds());
    pod.terminating = true;
    let proposed = decision(DecisionState::Proposed);
    let base = View { decision: Some(&proposed), token: true, ..view(&spec, &pod, &kinds) };
    assert_eq!(outcome(&View { evicted: true, ..base.clone() }, 102), "Verifying/Evicted");
    assert_eq!(outcome(&View { pod: None, ..base.clone() }, 102), "Verifying/Evicted");
    assert_eq!(outcome(&base, 102), "Cancelled/PodGone", "somebody else deleted it");
    let without = View { token: false, pod: None, ..base };
    assert_eq!(outcome(&without, 102), "Cancelled/PodGone", "it was never requested");
}

pub(super) fn agent_act(action: &str, in_place: bool) -> GpuMemoryIncidentSpec {
    let mut spec = spec("Enforce");
    spec.proposed = serde_json::from_value(json!({"action": action, "inPlace": in_place})).unwrap();
    spec
}

fn reported(state: &str, act: &str, second: i64) -> Observation {
    let at = format!("{:.6}", at(second));
    let value = json!({"state": state, "at": at, "act": {"state": act, "message": "why"}});
    serde_json::from_value(value).unwrap()
}

#[test]
fn what_the_agent_carries_out_is_approved_and_then_waited_for() {
    let (pod, kinds) = (pod(), kinds());
    for spec in [agent_act("Unready", false), agent_act("Park", false), agent_act("Restart", true)] {
        let base = view(&spec, &pod, &kinds);
        assert_eq!(decide(&base, at(101)), Step::Allow);
        let approved = decision(DecisionState::Approved);
        let waiting = View { decision: Some(&approved), token: true, ..base };
        assert!(outcome(&waiting, 159).starts_with("Rest"), "no fresh look is asked for");
        assert_eq!(outcome(&waiting, 160), "Failed/NotBegun");
        let paused = View { paused: Some("node n1".into()), ..waiting.clone() };
        assert_eq!(outcome(&paused, 102), "Proposed/Paused", "it is taken back before it begins");
        for (act, expected) in [
            ("Begun", "Verifying/Begun"),
            ("Done", "Verifying/Begun"),
            ("Undone", "Verifying/Begun"),
            ("Refused", "Cancelled/ActRefused"),
            ("Failed", "Failed/ActFailed"),
        ] {
            let seen = reported("Over", act, 101);
            let paused = View { observation: Some(&seen), ..paused.clone() };
            assert_eq!(outcome(&paused, 102), expected, "{act} was begun before the pause");
            let proposed = decision(DecisionState::Proposed);
            let again = View { decision: Some(&proposed), ..paused.clone() };
            assert_eq!(outcome(&again, 102), expected, "{act}: its token is spent");
            let without = View { token: false, ..again };
            assert_eq!(outcome(&without, 102), "Proposed/Paused", "{act} without a token is not ours");
        }
    }
}

#[test]
fn an_act_of_the_agent_has_helped_when_it_is_done_and_memory_is_back() {
    let (pod, kinds) = (pod(), kinds());
    let mut verifying = decision(DecisionState::Verifying);
    verifying.acted_at = Some(MicroTime(at(110)));
    let case = |action: &str, seen: &Observation, second: i64| {
        let spec = agent_act(action, action == "Restart");
        let view = View { decision: Some(&verifying), observation: Some(seen), ..view(&spec, &pod, &kinds) };
        outcome(&view, second)
    };
    for action in ["Unready", "Park", "Restart"] {
        assert_eq!(case(action, &reported("Recovered", "Done", 111), 112), "Succeeded/MemoryReturned");
        assert!(case(action, &reported("Recovered", "Begun", 111), 112).starts_with("Rest"));
        assert!(case(action, &reported("Over", "Done", 111), 112).starts_with("Rest"));
        assert!(case(action, &reported("Recovered", "Done", 109), 112).starts_with("Rest"), "of before");
        assert_eq!(case(action, &reported("Over", "Failed", 111), 112), "Failed/ActFailed");
        assert_eq!(case(action, &reported("Over", "Undone", 111), 112), "Failed/ActUndone");
        assert_eq!(case(action, &reported("Over", "Done", 498), 500), "Failed/MemoryNotReturned");
    }
}

#[test]
fn what_lasts_ends_with_its_policy_and_no_pause_keeps_it() {
    let (pod, kinds) = (pod(), kinds());
    let verifying = decision(DecisionState::Verifying);
    let begun = reported("Over", "Begun", 111);
    let case = |action: &str, asks: Asks<'_>| {
        let spec = agent_act(action, action == "Restart");
        let view = View {
            decision: Some(&verifying),
            observation: Some(&begun),
            asks,
            paused: Some("node n1".into()),
            ..view(&spec, &pod, &kinds)
        };
        outcome(&view, 112)
    };
    assert_eq!(case("Unready", Asks::Deleted), "Failed/PolicyDeleted");
    assert_eq!(case("Park", Asks::Nothing), "Failed/PolicyGone");
    assert!(case("Restart", Asks::Deleted).starts_with("Rest"), "it cannot be taken back");
}

#[test]
fn a_third_restart_in_vain_becomes_a_ticket() {
    let (spec, pod, kinds) = (spec("Enforce"), pod(), kinds());
    let in_vain = Some("it was restarted twice".to_owned());
    let refusal = Some(Refusal { said: vec!["no".into()], retry_at: None });
    let base = View { refusal, in_vain, ..view(&spec, &pod, &kinds) };
    assert_eq!(outcome(&base, 101), "Suppressed/TicketNeeded");
    let back = observation("Recovered", 101);
    let recovered = View { observation: Some(&back), ..base.clone() };
    assert_eq!(outcome(&recovered, 102), "Cancelled/Recovered");
    let unready = agent_act("Unready", false);
    assert_eq!(outcome(&View { spec: &unready, ..base }, 101), "Proposed/BudgetExhausted");
}

#[test]
fn an_act_of_the_agent_is_rehearsed_without_a_call() {
    let (mut spec, pod, kinds) = (agent_act("Park", false), pod(), kinds());
    spec.mode = Mode::DryRun;
    let Step::Record(verdict, None) = decide(&view(&spec, &pod, &kinds), at(300)) else { panic!() };
    assert_eq!((verdict.reason, verdict.message.as_str()), ("DryRun", "Park would have been approved"));
}

#[test]
fn a_look_from_the_future_is_not_fresh_and_names_the_skew() {
    let (spec, pod, kinds) = (spec("Enforce"), pod(), kinds());
    let ahead = observation("Over", 160);
    let view = View { observation: Some(&ahead), ..view(&spec, &pod, &kinds) };
    let Step::Observe(verdict) = decide(&view, at(101)) else { panic!() };
    assert!(verdict.message.contains("n1 is 59 s ahead"), "{}", verdict.message);
    assert_eq!(decide(&view, at(155)), Step::Act, "a few seconds are no matter");
}

#[test]
fn what_waits_for_an_agent_that_is_gone_ends() {
    let (spec, pod, kinds) = (spec("Enforce"), pod(), kinds());
    let away = |seconds| View {
        agent_away: Some(SignedDuration::from_secs(seconds)),
        paused: Some("node n1".into()),
        ..view(&spec, &pod, &kinds)
    };
    assert_eq!(outcome(&away(599), 1000), "Proposed/Paused");
    assert_eq!(outcome(&away(600), 1000), "Cancelled/AgentGone");
}

#[test]
fn a_report_that_cannot_be_read_ends_nothing() {
    let (spec, pod, kinds) = (spec("Enforce"), pod(), kinds());
    let view = View { asks: Asks::Unknown, ..view(&spec, &pod, &kinds) };
    assert_eq!(outcome(&view, 101), "Proposed/AwaitingObservation");
}

#[test]
fn verification_waits_for_the_pod_and_for_its_memory() {
    let (spec, pod, kinds) = (spec("Enforce"), pod(), kinds());
    let mut verifying = decision(DecisionState::Verifying);
    verifying.acted_at = Some(MicroTime(at(110)));
    let (over, gone) = (observation("Over", 115), observation("Gone", 115));
    let base = View { decision: Some(&verifying), ..view(&spec, &pod, &kinds) };
    let without_pod = View { pod: None, ..base.clone() };
    assert_eq!(outcome(&View { observation: Some(&gone), ..base.clone() }, 120), rest(120));
    assert_eq!(outcome(&View { observation: Some(&over), ..without_pod.clone() }, 120), rest(120));
    assert_eq!(
        outcome(&View { observation: Some(&gone), ..without_pod.clone() }, 120),
        "Succeeded/MemoryReturned"
    );
    let (over, gone) = (observation("Over", 238), observation("Gone", 238));
    assert_eq!(outcome(&View { observation: Some(&over), ..without_pod }, 240), "Failed/MemoryNotReturned");
    assert_eq!(outcome(&View { observation: Some(&gone), ..base }, 240), "Failed/MemoryNotReturned");
}

fn rest(seconds: i64) -> String {
    format!("{:?}", Step::Rest(Some(SignedDuration::from_secs(seconds))))
}

#[test]
fn what_the_agent_has_not_said_since_the_act_is_asked_for() {
    let (spec, pod, kinds) = (spec("Enforce"), pod(), kinds());
    let mut verifying = decision(DecisionState::Verifying);
    verifying.acted_at = Some(MicroTime(at(110)));
    let before = observation("Gone", 105);
    let base = View {
        decision: Some(&verifying),
        observation: Some(&before),
        pod: None,
        ..view(&spec, &pod, &kinds)
    };
    assert_eq!(outcome(&base, 112), rest(8), "it speaks by itself");
    assert_eq!(outcome(&base, 120), "Verifying/AwaitingObservation");
    assert!(matches!(decide(&base, at(120)), Step::Observe(_)));
    let asked = |second| View { asked: Some(at(second)), ..base.clone() };
    assert!(matches!(decide(&asked(109), at(120)), Step::Observe(_)), "that was before the act");
    assert_eq!(outcome(&asked(120), 125), rest(25));
    assert!(
        matches!(decide(&asked(120), at(150)), Step::Observe(_)),
        "an agent that was away is asked again"
    );
    // Its clock is an hour behind: it names the act that it knows of.
    let mut behind = observation("Gone", 115 - 3600);
    behind.after_act.clone_from(&verifying.acted_at);
    assert_eq!(
        outcome(&View { observation: Some(&behind), ..base.clone() }, 120),
        "Succeeded/MemoryReturned"
    );
    behind.after_act = Some(MicroTime(at(90)));
    assert_eq!(outcome(&View { observation: Some(&behind), ..base.clone() }, 112), rest(8), "of another act");
    let still_there = View { pod: Some(&pod), ..base };
    assert_eq!(outcome(&still_there, 130), rest(110), "the pod is awaited, not the agent");
}

#[test]
fn an_act_is_not_said_to_have_failed_before_a_last_look() {
    let (spec, pod, kinds) = (spec("Enforce"), pod(), kinds());
    let mut verifying = decision(DecisionState::Verifying);
    verifying.acted_at = Some(MicroTime(at(110)));
    let over = observation("Over", 115);
    let base =
        View { decision: Some(&verifying), observation: Some(&over), pod: None, ..view(&spec, &pod, &kinds) };
    // The operator's clock was set forward by an hour: hardly any time has passed.
    assert!(matches!(decide(&base, at(3720)), Step::Observe(_)));
    let asked = View { asked: Some(at(3720)), ..base.clone() };
    assert_eq!(outcome(&asked, 3725), rest(25));
    assert_eq!(outcome(&asked, 3750), "Failed/MemoryNotReturned", "nobody answers");
    let answer = observation("Over", 3724);
    assert_eq!(outcome(&View { observation: Some(&answer), ..asked }, 3725), "Failed/MemoryNotReturned");
}

#[test]
fn an_act_of_the_future_counts_anew() {
    let (spec, pod, kinds) = (spec("Enforce"), pod(), kinds());
    for (act, state) in
        [(spec.clone(), DecisionState::Verifying), (agent_act("Park", false), DecisionState::Verifying)]
    {
        let mut verifying = decision(state);
        verifying.acted_at = Some(MicroTime(at(7200)));
        let view = View { decision: Some(&verifying), ..view(&act, &pod, &kinds) };
        assert_eq!(outcome(&view, 112), "Verifying/ClockSetBack");
        assert_ne!(outcome(&view, 7195), "Verifying/ClockSetBack", "a few seconds are no matter");
    }
    let act = agent_act("Unready", false);
    let approved = Decision { since: MicroTime(at(7200)), ..decision(DecisionState::Approved) };
    let waiting = View { decision: Some(&approved), token: true, ..view(&act, &pod, &kinds) };
    assert_eq!(outcome(&waiting, 102), "Proposed/ClockSetBack", "it is approved anew");
    let asked = View { asked: Some(at(7200)), ..view(&spec, &pod, &kinds) };
    assert!(matches!(decide(&asked, at(120)), Step::Observe(_)), "nobody was asked in the future");
}

#[test]
fn what_an_eviction_says_becomes_a_verdict() {
    let state = |e: Eviction| after_eviction(&e, false).map(|v| format!("{:?}/{}", v.state, v.reason));
    assert_eq!(state(Eviction::Accepted).unwrap(), "Verifying/Evicted");
    assert_eq!(state(Eviction::Budget("pdb".into())).unwrap(), "Proposed/DisruptionBudget");
    assert_eq!(state(Eviction::Gone).unwrap(), "Cancelled/PodGone");
    let retried = after_eviction(&Eviction::Gone, true).unwrap();
    assert_eq!(retried.state, DecisionState::Verifying, "an earlier request was accepted after all");
    assert_eq!(state(Eviction::Denied("no".into())).unwrap(), "Failed/EvictionRefused");
    assert_eq!(state(Eviction::Conflict), None);
    assert_eq!(state(Eviction::Unclear("timeout".into())), None);
    let rehearsed = after_rehearsal(&Eviction::Budget("pdb x".into()), None).unwrap();
    assert_eq!((rehearsed.state, rehearsed.reason), (DecisionState::Suppressed, "DryRun"));
    assert!(rehearsed.message.contains("pdb x"));
}

#[test]
fn the_same_verdict_later_is_no_write() {
    let wait = verdict(DecisionState::Proposed, "Paused", "by x");
    let first = record(None, &wait, Particulars::default(), at(1)).unwrap();
    assert_eq!(record(Some(&first), &wait, Particulars::default(), at(2)), None);
    let other = verdict(DecisionState::Proposed, "BudgetExhausted", "1");
    let second = record(Some(&first), &other, Particulars::default(), at(3)).unwrap();
    assert_eq!(second.since.0, at(1), "the state is the same");
}

#[test]
fn final_states_never_change() {
    for old in DecisionState::ALL.into_iter().filter(|s| s.is_final()) {
        assert!(DecisionState::ALL.into_iter().all(|new| new == old || !may_follow(Some(old), new)));
    }
    assert!(!may_follow(Some(DecisionState::Verifying), DecisionState::Proposed));
    assert!(!may_follow(None, DecisionState::Verifying));
    assert!(!may_follow(Some(DecisionState::Proposed), DecisionState::Succeeded));
}
