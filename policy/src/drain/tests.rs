use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use serde_json::json;

use super::*;
use crate::pod::Owner;

const TIMEOUT_MINUTES: i32 = 15;

pub(super) fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

/// Evidence of second 100.
pub(super) fn spec(kind: &str, mode: &str) -> GpuMemoryIncidentSpec {
    serde_json::from_value(json!({
        "kind": kind, "mode": mode, "policy": "serving", "node": "n1", "device": "GPU-1", "episode": 1,
        "evidence": {"at": "1970-01-01T00:01:40.000000Z"},
        "proposed": {"action": "Drain"},
    }))
    .unwrap()
}

pub(super) fn observation(state: &str, second: i64) -> Observation {
    let at = format!("{:.6}", at(second));
    serde_json::from_value(json!({"state": state, "at": at})).unwrap()
}

fn decision(state: DecisionState, acted: Option<i64>) -> Decision {
    Decision {
        state,
        reason: "R".into(),
        message: String::new(),
        since: MicroTime(at(acted.unwrap_or(100))),
        workload: None,
        budgets: vec![],
        acted_at: acted.map(|second| MicroTime(at(second))),
        targets: vec![],
    }
}

pub(super) fn pod(name: &str, workload: &str, priority: i32) -> Pod {
    Pod {
        namespace: "team".into(),
        name: name.into(),
        uid: name.into(),
        workload: workload.into(),
        priority,
        born: Some(at(0)),
        ..Pod::default()
    }
}

/// A view in which everything speaks for the drain.
pub(super) fn view<'a>(spec: &'a GpuMemoryIncidentSpec, pods: &'a [Pod], targets: &'a [String]) -> View<'a> {
    View {
        spec,
        decision: None,
        observation: None,
        asked: None,
        agent_away: None,
        asks: Asks::Drain { timeout_minutes: TIMEOUT_MINUTES },
        rival: None,
        larger: None,
        paused: None,
        halted: None,
        refusal: None,
        cordon: Some(Cordon::Open),
        pods,
        evicting: false,
        room: Ok(targets),
    }
}

fn outcome(view: &View<'_>, second: i64) -> String {
    match decide(view, at(second)) {
        Step::Record(v, _) | Step::Observe(v) => format!("{:?}/{}", v.state, v.reason),
        step => format!("{step:?}"),
    }
}

pub(super) fn targets() -> Vec<String> {
    vec!["n2".into()]
}

#[test]
fn a_drain_begins_with_its_cordon() {
    let (spec, pods, targets) = (spec("Breaker", "Enforce"), [pod("a", "Deployment/a", 0)], targets());
    assert_eq!(decide(&view(&spec, &pods, &targets), at(103)), Step::Begin);
    let approved = decision(DecisionState::Approved, None);
    let resumed = View { decision: Some(&approved), ..view(&spec, &pods, &targets) };
    assert_eq!(decide(&resumed, at(103)), Step::Begin, "its leader died before the cordon");
    let cordoned = View { cordon: Some(Cordon::Own), ..resumed };
    assert_eq!(decide(&cordoned, at(103)), Step::Begin, "or before it had recorded that");
}

#[test]
fn a_drain_begins_when_those_that_are_due_at_the_same_time_are_known() {
    let (spec, pods, targets) = (spec("Breaker", "Enforce"), [pod("a", "Deployment/a", 0)], targets());
    let base = view(&spec, &pods, &targets);
    assert_eq!(decide(&base, at(100)), Step::Rest(Some(SETTLING)));
    assert_eq!(decide(&base, at(102)), Step::Rest(Some(SignedDuration::from_secs(1))));
    assert_eq!(
        decide(&View { pods: &[], ..base.clone() }, at(102)),
        Step::Rest(Some(SignedDuration::from_secs(1)))
    );
    // The node's clock is ahead of ours.
    assert_eq!(decide(&base, at(97)), Step::Rest(Some(SETTLING)));
    assert_eq!(decide(&base, at(103)), Step::Begin);
    let halted = View { halted: Some("3 of 4 nodes".into()), ..base };
    assert_eq!(outcome(&halted, 102), "Proposed/FleetHalted", "which is said at once");
}

#[test]
fn a_cordon_that_bears_the_drains_mark_has_begun_it_whatever_was_recorded_and_the_clocks_say() {
    let (spec, pods, targets) = (spec("Breaker", "Enforce"), [pod("a", "Deployment/a", 0)], targets());
    let waits = decision(DecisionState::Proposed, None);
    for recorded in [None, Some(&waits)] {
        let refusal = Some(Refusal { said: vec!["no".into()], retry_at: None });
        let paused = Some("node n1".to_owned());
        let base = View { decision: recorded, refusal, paused, ..view(&spec, &pods, &targets) };
        for second in [-20_000, 101, 20_000] {
            let own = View { cordon: Some(Cordon::Own), ..base.clone() };
            assert_eq!(decide(&own, at(second)), Step::Begin, "it is recorded, and goes on from there");
            let lifted = View { cordon: Some(Cordon::Lifted), ..base.clone() };
            assert_eq!(outcome(&lifted, second), "Cancelled/Uncordoned");
        }
        assert_eq!(outcome(&base, 101), "Proposed/Paused");
    }
}

#[test]
fn whose_a_cordon_is_is_read_off_the_node_alone() {
    let own = mark("hw", "i", "u");
    let of = |field, annotation: &str| cordon(field, Some(annotation).filter(|a| !a.is_empty()), &own);
    assert_eq!(of(Some(Field::Ours), &own), Cordon::Own);
    assert_eq!(of(None, &own), Cordon::Lifted);
    assert_eq!(of(Some(Field::Theirs), &own), Cordon::Lifted, "somebody lifted ours and set their own");
    assert_eq!(of(None, ""), Cordon::Open);
    for field in [Field::Ours, Field::Theirs] {
        assert_eq!(of(Some(field), ""), Cordon::Others);
        assert_eq!(of(Some(field), "hw/i/another"), Cordon::Others, "an earlier incident of the same name");
    }
}

#[test]
fn every_wait_before_the_cordon_is_named() {
    let (spec, pods, targets) = (spec("Breaker", "Enforce"), [pod("a", "Deployment/a", 0)], targets());
    let base = view(&spec, &pods, &targets);
    let case = |view: View<'_>, expected: &str| assert_eq!(outcome(&view, 103), expected);
    case(View { paused: Some("node n1".into()), ..base.clone() }, "Proposed/Paused");
    case(View { halted: Some("why".into()), ..base.clone() }, "Proposed/FleetHalted");
    case(View { asks: Asks::Unknown, ..base.clone() }, "Proposed/AwaitingObservation");
    case(View { cordon: Some(Cordon::Others), ..base.clone() }, "Proposed/NodeCordoned");
    let rival = Some("other".to_owned());
    let cordoned = View { cordon: Some(Cordon::Others), rival, ..base.clone() };
    case(cordoned, "Proposed/AwaitingVerification");
    case(View { room: Err("no node has room".into()), ..base.clone() }, "Proposed/NoTarget");
    let refusal = Some(Refusal { said: vec!["no".into()], retry_at: None });
    case(View { refusal, ..base.clone() }, "Proposed/BudgetExhausted");
    assert!(matches!(decide(&base, at(106)), Step::Observe(_)), "the evidence is 6 s old");
}

#[test]
fn every_end_before_the_cordon_is_named() {
    let (enforce, pods, targets) = (spec("Breaker", "Enforce"), [pod("a", "Deployment/a", 0)], targets());
    let base = view(&enforce, &pods, &targets);
    let case = |view: View<'_>, expected: &str| assert_eq!(outcome(&view, 103), expected);
    case(View { cordon: None, ..base.clone() }, "Cancelled/NodeGone");
    case(View { asks: Asks::Deleted, ..base.clone() }, "Cancelled/PolicyDeleted");
    case(View { asks: Asks::Nothing, ..base.clone() }, "Suppressed/PolicyGone");
    let back = observation("Recovered", 101);
    case(View { observation: Some(&back), ..base.clone() }, "Cancelled/Recovered");
    let away = Some(SignedDuration::from_secs(600));
    case(View { agent_away: away, ..base.clone() }, "Cancelled/AgentGone");
    case(View { pods: &[], ..base.clone() }, "Suppressed/NoCulprit");
    let stays = [Pod { stays: Some("it is a DaemonSet's"), ..pod("d", "DaemonSet/d", 0) }];
    case(View { pods: &stays, ..base.clone() }, "Suppressed/NoCulprit");
    let dry = spec("Breaker", "DryRun");
    let paused = Some("node n1".to_owned());
    case(View { spec: &dry, paused, ..base.clone() }, "Suppressed/DryRun");
    let observe = spec("Breaker", "Observe");
    case(View { spec: &observe, ..base }, "Suppressed/ObserveOnly");
}

#[test]
fn a_rehearsal_names_pods_and_what_would_have_kept_them() {
    let (dry, pods, targets) = (spec("Breaker", "DryRun"), [pod("a", "Deployment/a", 0)], targets());
    let said = |view: View<'_>| match decide(&view, at(101)) {
        Step::Record(verdict, None) => verdict.message,
        step => panic!("{step:?}"),
    };
    let base = view(&dry, &pods, &targets);
    assert!(said(base.clone()).contains("cordoned and 1 pods evicted (team/a)"));
    assert!(said(View { room: Err("all full".into()), ..base.clone() }).contains("nothing would have been"));
    let zombie = spec("ZombieMemory", "DryRun");
    assert!(said(View { spec: &zombie, ..base }).starts_with("a reset of the device would have been"));
}

#[test]
fn d07_zombie_memory_asks_for_a_reset_first_and_drains_only_where_that_did_not_help() {
    let (spec, pods, targets) = (spec("ZombieMemory", "Enforce"), [pod("a", "Deployment/a", 0)], targets());
    let over = observation("Over", 399);
    let base = View { observation: Some(&over), ..view(&spec, &pods, &targets) };
    let Step::Record(verdict, Some(again)) = decide(&base, at(101)) else { panic!() };
    assert_eq!((verdict.reason, again.as_secs()), ("ResetRequested", 299));
    assert_eq!(outcome(&base, 399), "Proposed/ResetRequested");
    assert_eq!(outcome(&base, 400), "Begin");
    let unasked = View { asks: Asks::Nothing, ..base.clone() };
    assert_eq!(outcome(&unasked, 4000), "Proposed/ResetRequested", "its policy does not ask for a drain");
    let back = observation("Recovered", 399);
    assert_eq!(outcome(&View { observation: Some(&back), ..base }, 4000), "Cancelled/Recovered");
}

#[test]
fn a_reset_is_asked_for_until_the_memory_is_back_or_nobody_asks() {
    let incident = |state: Option<DecisionState>, seen: &str| -> GpuMemoryIncident {
        let mut incident = GpuMemoryIncident::new("i", spec("ZombieMemory", "Enforce"));
        incident.status = Some(highwater_crds::GpuMemoryIncidentStatus {
            observation: Some(observation(seen, 101)),
            decision: state.map(|state| decision(state, None)),
        });
        incident
    };
    assert!(wants_reset(&incident(None, "Over")));
    assert!(wants_reset(&incident(Some(DecisionState::Failed), "Over")), "the drain did not help");
    assert!(!wants_reset(&incident(Some(DecisionState::Failed), "Recovered")));
    assert!(!wants_reset(&incident(Some(DecisionState::Cancelled), "Over")));
    let breaker = GpuMemoryIncident::new("i", spec("Breaker", "Enforce"));
    assert!(!wants_reset(&breaker));
    assert!(!wants_reset(&GpuMemoryIncident::new("i", spec("ZombieMemory", "DryRun"))));
}

#[test]
fn evictions_go_by_priority_and_one_at_a_time_of_each_workload() {
    let (spec, targets) = (spec("Breaker", "Enforce"), targets());
    let begun = decision(DecisionState::Approved, Some(101));
    let over = observation("Over", 102);
    let mut pods = vec![
        pod("high", "Deployment/a", 9),
        pod("low-2", "Deployment/b", 1),
        pod("low-1", "Deployment/b", 1),
    ];
    let next = |pods: &[Pod]| {
        let view = View {
            decision: Some(&begun),
            observation: Some(&over),
            cordon: Some(Cordon::Own),
            ..view(&spec, pods, &targets)
        };
        outcome(&view, 103)
    };
    assert_eq!(next(&pods), "Evict(2)");
    pods[2].going = true;
    assert_eq!(next(&pods), "Evict(0)", "the other pod of Deployment/b waits");
    pods[0].waits = Some("a disruption budget".into());
    assert_eq!(next(&pods), "Approved/DisruptionBudget");
    pods[0].waits = Some("maxUnavailable 1 (policy p): 2 with this pod: refused".into());
    assert_eq!(next(&pods), "Approved/BudgetExhausted");
    pods[0] = Pod { going: true, ..pods[0].clone() };
    assert_eq!(next(&pods), "Approved/Evicting");
    pods.remove(2);
    assert_eq!(next(&pods), "Evict(1)");
    pods[1].going = true;
    assert_eq!(next(&pods), "Verifying/Evicted");
    assert_eq!(next(&[]), "Verifying/Evicted");
}

#[test]
fn who_comes_after_the_cordon_is_not_chased() {
    let (spec, targets) = (spec("Breaker", "Enforce"), targets());
    let begun = decision(DecisionState::Approved, Some(200));
    let late = [Pod { born: Some(at(203)), ..pod("late", "StatefulSet/s", 0) }];
    let over = observation("Over", 204);
    let view = View {
        decision: Some(&begun),
        observation: Some(&over),
        cordon: Some(Cordon::Own),
        ..view(&spec, &late, &targets)
    };
    assert_eq!(outcome(&view, 205), "Verifying/Evicted");
}

#[test]
fn d11_an_uncordon_by_hand_ends_a_drain_and_never_as_a_success() {
    let (spec, pods, targets) = (spec("Breaker", "Enforce"), [pod("a", "Deployment/a", 0)], targets());
    let back = observation("Recovered", 150);
    for cordon in [Cordon::Lifted, Cordon::Open, Cordon::Others] {
        let at_state = |decision: &Decision| {
            let view = View {
                decision: Some(decision),
                observation: Some(&back),
                cordon: Some(cordon),
                ..view(&spec, &pods, &targets)
            };
            outcome(&view, 151)
        };
        assert_eq!(at_state(&decision(DecisionState::Approved, Some(101))), "Cancelled/Uncordoned");
        assert_eq!(at_state(&decision(DecisionState::Verifying, Some(101))), "Failed/Uncordoned");
    }
}

#[test]
fn d01_what_is_back_before_the_first_eviction_is_cancelled_and_after_it_verified() {
    let (spec, pods, targets) = (spec("Breaker", "Enforce"), [pod("a", "Deployment/a", 0)], targets());
    let begun = decision(DecisionState::Approved, Some(101));
    let back = observation("Recovered", 102);
    let base = View {
        decision: Some(&begun),
        observation: Some(&back),
        cordon: Some(Cordon::Own),
        ..view(&spec, &pods, &targets)
    };
    assert_eq!(outcome(&base, 103), "Cancelled/Recovered");
    assert_eq!(outcome(&View { evicting: true, ..base }, 103), "Verifying/MemoryBack");
}

#[test]
fn d08_a_drain_that_takes_too_long_fails_and_names_who_is_left() {
    let (spec, targets) = (spec("Breaker", "Enforce"), targets());
    let blocked = [Pod { waits: Some("the disruption budget x".into()), ..pod("a", "Deployment/a", 0) }];
    let begun = decision(DecisionState::Approved, Some(101));
    let base = View { decision: Some(&begun), cordon: Some(Cordon::Own), ..view(&spec, &blocked, &targets) };
    let Step::Record(verdict, Some(again)) = decide(&base, at(1000)) else { panic!() };
    assert_eq!((verdict.reason, again.as_secs()), ("DisruptionBudget", 1));
    let Step::Record(verdict, None) = decide(&base, at(1001)) else { panic!() };
    assert_eq!((verdict.state, verdict.reason), (DecisionState::Failed, "DrainTimedOut"));
    assert!(verdict.message.contains("team/a"), "{}", verdict.message);
    let paused = View { paused: Some("node n1".into()), ..base.clone() };
    assert_eq!(outcome(&paused, 500), "Approved/Paused", "the next step waits");
    assert_eq!(outcome(&paused, 1001), "Failed/DrainTimedOut", "the undo does not");
    assert_eq!(outcome(&View { asks: Asks::Deleted, ..base.clone() }, 500), "Cancelled/PolicyDeleted");
    assert_eq!(outcome(&View { room: Err("full".into()), ..base.clone() }, 500), "Approved/NoTarget");
    let away = Some(SignedDuration::from_secs(600));
    assert_eq!(outcome(&View { agent_away: away, ..base }, 800), "Failed/AgentGone");
}

#[test]
fn a_drain_has_helped_when_the_pods_are_gone_and_the_memory_is_back() {
    let (spec, targets) = (spec("Breaker", "Enforce"), targets());
    let ending = [Pod { going: true, ..pod("a", "Deployment/a", 0) }];
    let verifying = decision(DecisionState::Verifying, Some(101));
    let (back, over) = (observation("Recovered", 150), observation("Over", 150));
    let base = View {
        decision: Some(&verifying),
        observation: Some(&back),
        cordon: Some(Cordon::Own),
        ..view(&spec, &ending, &targets)
    };
    assert!(outcome(&base, 151).starts_with("Rest"));
    assert_eq!(outcome(&View { pods: &[], ..base.clone() }, 151), "Succeeded/MemoryReturned");
    let still = View { pods: &[], observation: Some(&over), ..base };
    assert!(outcome(&still, 1000).starts_with("Rest"));
    assert_eq!(outcome(&still, 1001), "Verifying/AwaitingObservation", "a last look");
    let (asked, over) = (Some(at(1001)), observation("Over", 1002));
    assert_eq!(outcome(&View { asked, observation: Some(&over), ..still }, 1003), "Failed/MemoryNotReturned");
}

#[test]
fn a_cordon_of_the_future_counts_anew() {
    let (spec, pods, targets) = (spec("Breaker", "Enforce"), [pod("a", "Deployment/a", 0)], targets());
    for state in [DecisionState::Approved, DecisionState::Verifying] {
        let ahead = decision(state, Some(7200));
        let cordon = Some(Cordon::Own);
        let view = View { decision: Some(&ahead), cordon, ..view(&spec, &pods, &targets) };
        assert_eq!(outcome(&view, 150), format!("{state:?}/ClockSetBack"));
    }
}

#[test]
fn memory_is_seen_back_by_a_node_whose_clock_is_behind() {
    let (spec, targets) = (spec("Breaker", "Enforce"), targets());
    let verifying = decision(DecisionState::Verifying, Some(101));
    let mut back = observation("Recovered", 101 - 3600);
    back.after_act.clone_from(&verifying.acted_at);
    let (cordon, observation) = (Some(Cordon::Own), Some(&back));
    let view = View { decision: Some(&verifying), cordon, observation, ..view(&spec, &[], &targets) };
    assert_eq!(outcome(&view, 150), "Succeeded/MemoryReturned");
}

#[test]
fn a_mark_names_its_incident() {
    let own = mark("hw", "i", "u");
    assert_eq!(marked(&own), Some(("hw", "i", "u")));
    assert_eq!(marked("by hand"), None);
    assert_eq!(marked("a/b/c/d"), None);
}

#[test]
fn a_cordon_without_an_open_incident_behind_it_is_undone() {
    let own = mark("hw", "i", "u");
    let mut incident = GpuMemoryIncident::new("i", spec("Breaker", "Enforce"));
    incident.metadata.uid = Some("u".into());
    assert!(!is_orphaned(&own, Some(&incident)), "nothing is decided yet");
    assert!(is_orphaned(&own, None), "it was deleted by hand");
    let mut again = incident.clone();
    again.metadata.uid = Some("v".into());
    assert!(is_orphaned(&own, Some(&again)), "it is another of the same name");
    let status = |state| highwater_crds::GpuMemoryIncidentStatus {
        observation: None,
        decision: Some(decision(state, None)),
    };
    incident.status = Some(status(DecisionState::Verifying));
    assert!(!is_orphaned(&own, Some(&incident)));
    incident.status = Some(status(DecisionState::Failed));
    assert!(is_orphaned(&own, Some(&incident)));
}

#[test]
fn who_stays_stays_for_a_reason() {
    let owner = |kind: &str| {
        Some(Owner { api_version: "v1".into(), kind: kind.into(), name: "o".into(), uid: "o".into() })
    };
    let kinds = ["ReplicaSet".to_owned()];
    let good = PodFacts { owner: owner("ReplicaSet"), ..PodFacts::default() };
    assert_eq!(stays(&good, &kinds, true), None);
    assert!(stays(&good, &kinds, false).is_some());
    for pod in [
        PodFacts { owner: None, ..good.clone() },
        PodFacts { owner: owner("DaemonSet"), ..good.clone() },
        PodFacts { owner: owner("Job"), ..good.clone() },
        PodFacts { mirror: true, ..good.clone() },
        PodFacts { system_priority: true, ..good.clone() },
        PodFacts { finished: true, ..good.clone() },
        PodFacts { paused: true, ..good },
    ] {
        assert!(stays(&pod, &kinds, true).is_some(), "{pod:?}");
    }
}

#[test]
fn what_a_pod_needs_elsewhere_is_never_guessed_too_small() {
    let mut spec = spec("Breaker", "Enforce");
    assert_eq!(bytes_a_pod(&spec), 0);
    (spec.evidence.device_total_bytes, spec.evidence.device_free_bytes) = (Some(100), Some(30));
    assert_eq!(bytes_a_pod(&spec), 70);
    spec.proposed.frees_bytes = Some(50);
    assert_eq!(bytes_a_pod(&spec), 50);
    spec.evidence.neighbour_bytes = vec![40, 20];
    assert_eq!(bytes_a_pod(&spec), 40);
}

#[test]
fn a_pod_uses_a_gpu_by_a_limit_or_a_claim() {
    let pod = |container: serde_json::Value, claims: serde_json::Value| -> ApiPod {
        serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": {"containers": [container],
            "resourceClaims": claims}}))
        .unwrap()
    };
    let plain = json!({"name": "c"});
    let gpu = json!({"name": "c", "resources": {"limits": {"nvidia.com/gpu": "1"}}});
    let mig = json!({"name": "c", "resources": {"limits": {"nvidia.com/mig-1g.18gb": "1"}}});
    assert!(!uses_gpu(&pod(plain.clone(), json!([]))));
    assert!(uses_gpu(&pod(gpu, json!([]))) && uses_gpu(&pod(mig, json!([]))));
    assert!(uses_gpu(&pod(plain, json!([{"name": "gpu", "resourceClaimName": "g"}]))));
}
