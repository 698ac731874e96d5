use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use proptest::{collection::vec, prelude::*};
use serde_json::json;

use super::*;
use crate::{
    pod::Owner,
    remediation::{Particulars, approved, may_follow, record},
};

const TIMEOUT_MINUTES: i32 = 15;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

/// Evidence of second 100.
fn spec(kind: &str, mode: &str) -> GpuMemoryIncidentSpec {
    serde_json::from_value(json!({
        "kind": kind, "mode": mode, "policy": "serving", "node": "n1", "device": "GPU-1", "episode": 1,
        "evidence": {"at": "1970-01-01T00:01:40.000000Z"},
        "proposed": {"action": "Drain"},
    }))
    .unwrap()
}

fn observation(state: &str, second: i64) -> Observation {
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

fn pod(name: &str, workload: &str, priority: i32) -> Pod {
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
fn view<'a>(spec: &'a GpuMemoryIncidentSpec, pods: &'a [Pod], targets: &'a [String]) -> View<'a> {
    View {
        spec,
        decision: None,
        observation: None,
        asked: None,
        agent_away: None,
        asks: Asks::Drain { timeout_minutes: TIMEOUT_MINUTES },
        rival: None,
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

fn targets() -> Vec<String> {
    vec!["n2".into()]
}

#[test]
fn a_drain_begins_with_its_cordon() {
    let (spec, pods, targets) = (spec("Breaker", "Enforce"), [pod("a", "Deployment/a", 0)], targets());
    assert_eq!(decide(&view(&spec, &pods, &targets), at(101)), Step::Begin);
    let approved = decision(DecisionState::Approved, None);
    let resumed = View { decision: Some(&approved), ..view(&spec, &pods, &targets) };
    assert_eq!(decide(&resumed, at(102)), Step::Begin, "its leader died before the cordon");
    let cordoned = View { cordon: Some(Cordon::Own), ..resumed };
    assert_eq!(decide(&cordoned, at(102)), Step::Begin, "or before it had recorded that");
}

#[test]
fn every_wait_before_the_cordon_is_named() {
    let (spec, pods, targets) = (spec("Breaker", "Enforce"), [pod("a", "Deployment/a", 0)], targets());
    let base = view(&spec, &pods, &targets);
    let case = |view: View<'_>, expected: &str| assert_eq!(outcome(&view, 101), expected);
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
    let case = |view: View<'_>, expected: &str| assert_eq!(outcome(&view, 101), expected);
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
    assert_eq!(outcome(&still, 1001), "Failed/MemoryNotReturned");
}

#[test]
fn only_our_own_cordon_is_ours() {
    let own = mark("hw", "i", "u");
    assert_eq!(marked(&own), Some(("hw", "i", "u")));
    assert_eq!(marked("by hand"), None);
    assert_eq!(marked("a/b/c/d"), None);
    assert_eq!(cordon(false, None, &own), Cordon::Open);
    assert_eq!(cordon(true, None, &own), Cordon::Others);
    assert_eq!(cordon(true, Some(&own), &own), Cordon::Own);
    assert_eq!(cordon(false, Some(&own), &own), Cordon::Lifted);
    assert_eq!(cordon(true, Some("hw/other/u"), &own), Cordon::Others);
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

/// A cluster with one node, three pods of two workloads, and two operators.
#[derive(Clone, Debug)]
#[allow(clippy::struct_excessive_bools)] // independent facts
struct World {
    now: i64,
    decision: Option<Decision>,
    seen: i64,
    over: bool,
    /// Whether the incident was deleted.
    deleted: bool,
    unschedulable: bool,
    annotation: Option<String>,
    /// Somebody lifted our cordon.
    lifted: bool,
    /// resourceVersion of each pod and whether it is ending; None: gone.
    pods: Vec<Option<(i64, bool)>>,
    tokens: Vec<bool>,
    evictions: Vec<usize>,
    paused: bool,
}

/// An operator between two of its calls.
#[derive(Clone, Debug)]
enum Leader {
    Idle,
    Reserved(Option<Decision>),
    Approved,
    Cordoned,
    Evicting { pod: usize, version: i64 },
}

const NODE_TOKEN: usize = 3;

impl World {
    fn new() -> Self {
        Self {
            now: 100,
            decision: None,
            seen: 100,
            over: true,
            deleted: false,
            unschedulable: false,
            annotation: None,
            lifted: false,
            pods: vec![Some((1, false)); 3],
            tokens: vec![false; 4],
            evictions: vec![0; 3],
            paused: false,
        }
    }

    fn state(&self) -> Option<DecisionState> {
        self.decision.as_ref().map(|d| d.state)
    }

    fn write(&mut self, cached: Option<&Decision>, verdict: &Verdict, acted: bool) -> bool {
        if self.deleted {
            return false;
        }
        let particulars = Particulars { acted_at: acted.then(|| at(self.now)), ..Particulars::default() };
        let Some(new) = record(cached, verdict, particulars, at(self.now)) else { return true };
        if !may_follow(self.state(), new.state) {
            return false;
        }
        self.decision = Some(new);
        true
    }

    fn look(&self, spec: &GpuMemoryIncidentSpec, cached: Option<&Decision>) -> Step {
        let own = mark("hw", "i", "u");
        let seen = observation(if self.over { "Over" } else { "Recovered" }, self.seen);
        let named = [("a-1", "Deployment/a"), ("a-2", "Deployment/a"), ("b-1", "Deployment/b")];
        let there = |(index, (name, workload)): (usize, &(&str, &str))| {
            let (_, going) = self.pods[index]?;
            Some(Pod { going, uid: index.to_string(), ..pod(name, workload, 0) })
        };
        let pods: Vec<Pod> = named.iter().enumerate().filter_map(there).collect();
        let targets = targets();
        let view = View {
            decision: cached,
            observation: Some(&seen),
            cordon: Some(cordon(self.unschedulable, self.annotation.as_deref(), &own)),
            evicting: self.tokens[..3].contains(&true),
            paused: self.paused.then(|| "node n1".to_owned()),
            ..view(spec, &pods, &targets)
        };
        match decide(&view, at(self.now)) {
            Step::Evict(index) => Step::Evict(pods[index].uid.parse().unwrap()),
            step => step,
        }
    }

    fn advance(&mut self, spec: &GpuMemoryIncidentSpec, leader: Leader, stale: Option<Decision>) -> Leader {
        if self.deleted {
            return Leader::Idle;
        }
        match leader {
            Leader::Idle => match self.look(spec, stale.as_ref()) {
                Step::Begin => {
                    self.tokens[NODE_TOKEN] = true;
                    Leader::Reserved(stale)
                }
                Step::Evict(pod) => {
                    self.tokens[pod] = true;
                    Leader::Evicting { pod, version: self.pods[pod].unwrap().0 }
                }
                Step::Record(verdict, _) | Step::Observe(verdict) => {
                    self.write(stale.as_ref(), &verdict, false);
                    Leader::Idle
                }
                Step::Rest(_) => Leader::Idle,
            },
            Leader::Reserved(cached) => {
                if self.write(cached.as_ref(), &approved(spec), false) {
                    Leader::Approved
                } else {
                    Leader::Idle
                }
            }
            // What was decided is looked at again between the approval and the cordon.
            Leader::Approved if self.look(spec, self.decision.as_ref()) != Step::Begin => Leader::Idle,
            Leader::Approved => {
                let own = mark("hw", "i", "u");
                match cordon(self.unschedulable, self.annotation.as_deref(), &own) {
                    // One patch, with the version of the node that was read.
                    Cordon::Open => {
                        (self.unschedulable, self.annotation) = (true, Some(own));
                        Leader::Cordoned
                    }
                    Cordon::Own => Leader::Cordoned,
                    Cordon::Others | Cordon::Lifted => Leader::Idle,
                }
            }
            Leader::Cordoned => {
                let cached = self.decision.clone();
                self.write(cached.as_ref(), &approved(spec), true);
                Leader::Idle
            }
            Leader::Evicting { pod, version } => {
                // The node is read again just before.
                let own = mark("hw", "i", "u");
                let cordoned = cordon(self.unschedulable, self.annotation.as_deref(), &own) == Cordon::Own;
                let open = self.state() == Some(DecisionState::Approved);
                match &mut self.pods[pod] {
                    Some((current, ending)) if *current == version && cordoned && open && !self.paused => {
                        assert!(self.tokens[pod] && self.tokens[NODE_TOKEN], "acted without a token");
                        assert!(!self.lifted, "evicted from a node that somebody uncordoned");
                        (*current, *ending) = (version + 1, true);
                        self.evictions[pod] += 1;
                    }
                    _ => {}
                }
                Leader::Idle
            }
        }
    }

    /// What the operator does beside its incidents: it undoes a cordon with nothing behind it.
    fn sweep(&mut self) {
        let mut incident = GpuMemoryIncident::new("i", spec("Breaker", "Enforce"));
        incident.metadata.uid = Some("u".into());
        incident.status = Some(highwater_crds::GpuMemoryIncidentStatus {
            observation: None,
            decision: self.decision.clone(),
        });
        let found = (!self.deleted).then_some(&incident);
        if self.annotation.as_deref().is_some_and(|a| is_orphaned(a, found)) {
            self.annotation = None;
            if !self.lifted {
                self.unschedulable = false;
            }
        }
    }
}

proptest! {
    /// Whatever operators, people and crashes do in whatever order: no pod is evicted twice, none
    /// without a token and our cordon, what ended never changes, and when all is over our cordon is
    /// gone - and a cordon by hand is not.
    #[test]
    fn a_drain_leaves_nothing_behind_whoever_dies_when(events in vec((0..16u8, 0..2usize), 1..160)) {
        let spec = spec("Breaker", "Enforce");
        let mut world = World::new();
        let mut leaders = [Leader::Idle, Leader::Idle];
        let mut caches: [Option<Decision>; 2] = [None, None];
        let mut by_hand = false;
        for (event, who) in events {
            let ended = world.state().filter(|s| s.is_final());
            match event {
                0 => world.now += 3,
                1 => world.seen = world.now,
                2 => leaders[who] = Leader::Idle, // SIGKILL
                3 => caches[who] = world.decision.clone(),
                4 => for pod in &mut world.pods {
                    if pod.is_some_and(|(_, ending)| ending) { *pod = None; }
                },
                5 => world.over = world.pods.iter().any(Option::is_some) && !world.over,
                6 => world.paused = !world.paused,
                7 if who == 0 && world.unschedulable => {
                    world.lifted = world.annotation.is_some();
                    (world.unschedulable, by_hand) = (false, false);
                }
                7 if world.annotation.is_none() => (world.unschedulable, by_hand) = (true, true),
                8 if who == 0 => world.deleted = true,
                9 => world.now += 400,
                10 => world.sweep(),
                _ => {
                    let leader = std::mem::replace(&mut leaders[who], Leader::Idle);
                    leaders[who] = world.advance(&spec, leader, caches[who].clone());
                }
            }
            prop_assert!(world.evictions.iter().all(|n| *n <= 1), "evicted twice: {world:?}");
            prop_assert!(ended.is_none() || world.state() == ended);
            prop_assert!(!by_hand || world.unschedulable, "a cordon by hand is not ours to undo");
        }
        // Time passes, one operator is left, and nobody interferes any more.
        world.paused = false;
        for _ in 0..40 {
            world.now += 60;
            world.seen = world.now;
            for pod in &mut world.pods {
                if pod.is_some_and(|(_, ending)| ending) { *pod = None; }
            }
            let cached = world.decision.clone();
            let mut leader = world.advance(&spec, Leader::Idle, cached);
            for _ in 0..4 { leader = world.advance(&spec, leader, world.decision.clone()); }
            world.sweep();
        }
        prop_assert!(world.deleted || by_hand || world.state().is_some_and(DecisionState::is_final), "{world:?}");
        prop_assert!(world.annotation.is_none(), "left behind: {world:?}");
        prop_assert_eq!(world.unschedulable, by_hand, "{:?}", world);
    }
}
