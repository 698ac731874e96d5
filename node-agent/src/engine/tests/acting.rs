//! Acts, as the loop begins them, carries them out and takes them back.

use std::net::Ipv4Addr;

use highwater_crds::{ActReport, ActState, ActionType};
use highwater_policy::{
    host_memory::Sample as HostSample,
    pod::{Hook, HookPreset},
};

use super::*;
use crate::{
    act::{
        hook::{Answered, Failure},
        restart::{Main, Outcome},
    },
    host::{Reading as HostReading, Surveyed},
    keeper_protocol::{Moved, Park, ParkState, Parking, Process, Status},
    link,
};

/// A layer with one breaker of this scope: critical at 80 % with these actions, cleared below 75 %.
#[allow(clippy::needless_pass_by_value, reason = "made where it is given")]
fn breaker(scope: &str, actions: Value) -> Value {
    json!({"mode": "Enforce", "rules": [{
        "product": "NVIDIA H200", "partition": "Whole", "quotaPolicies": ["serving"],
        "breakers": [{"policy": "serving", "ownerKinds": ["ReplicaSet"], "value": {
            "scope": scope, "minimumStayMilliseconds": 0,
            "critical": {"tripPercent": 80, "clearPercent": 75, "holdMilliseconds": 0, "actions": actions}}}]}],
        "quotas": [{"policy": "serving", "ownerKinds": ["ReplicaSet"], "value": {"default": {"limit": "8Gi"}}}]})
}

impl Bench {
    #[allow(clippy::needless_pass_by_value, reason = "made where it is given")]
    fn with(layer: Value, change: impl Fn(&mut PodFacts)) -> Self {
        let mut bench = Self::new(&json!([layer]));
        let mut facts = super::pod("a");
        change(&mut facts);
        bench.world(WorldChange::Pod(Set::Upsert(facts)));
        for _ in 0..2 {
            bench.sample(0, &[("a", 1)]);
        }
        bench.jobs();
        bench.orders();
        bench
    }

    fn orders(&self) -> Vec<Order> {
        self.orders.take()
    }

    fn hooks(&self) -> Vec<hook::Call> {
        let call = |order| if let Order::Hook(call) = order { Some(call) } else { None };
        self.orders().into_iter().filter_map(call).collect()
    }

    fn keeper_orders(&self) -> Vec<link::Order> {
        let asked = |order| if let Order::Keeper(order) = order { Some(order) } else { None };
        self.orders().into_iter().filter_map(asked).collect()
    }

    /// What is written of acts; it is from now on, and the watch shows it.
    fn reports(&mut self) -> Vec<ActState> {
        let mut reports = Vec::new();
        for job in self.jobs() {
            if let Job::Observe(name, observation) = job {
                reports.extend(observation.act.as_ref().map(|act| act.state));
                self.engine.done(done(What::Observe(name, observation)));
            }
        }
        reports
    }

    /// An incident that is created, and approved.
    fn approved(&mut self, act: ActionType) -> GpuMemoryIncident {
        let created = self.created();
        let mut incident =
            created.into_iter().find(|incident| incident.spec.proposed.action == act).expect("an incident");
        incident.metadata.uid = Some(format!("uid-{act:?}"));
        self.decide(&incident, DecisionState::Approved, "WithinBudget");
        incident
    }

    /// The operator goes on; what was observed stands.
    fn goes_on(&mut self, incident: &GpuMemoryIncident, state: DecisionState) {
        let observation = self.engine.world.incidents.values().find_map(|known| {
            let same = known.metadata.uid == incident.metadata.uid;
            known.status.as_ref().filter(|_| same)?.observation.clone()
        });
        self.decide(incident, state, "Test");
        let mut known = incident.clone();
        let name = name_of(incident);
        known.status = self.engine.world.incidents[&name].status.clone();
        known.status.as_mut().unwrap().observation = observation;
        self.world(WorldChange::Incident(Set::Upsert(known)));
    }

    fn keeper(&mut self, parks: &[(&str, ParkState)]) {
        let park = |(pod, state): &(&str, ParkState)| Park {
            pod: (*pod).into(),
            device: "GPU-0".into(),
            bytes: 40 * GI,
            state: *state,
            since: 0,
            message: None,
        };
        let parking = Some(Parking { unable: None, parks: parks.iter().map(park).collect() });
        self.engine.keeper(Heard::Up(Status { parking, ..Status::default() }));
    }

    fn pressure(&self, pod: &str) -> Value {
        let path = self.volume(pod).join("pressure");
        serde_json::from_slice(&std::fs::read(path).unwrap_or_else(|_| b"{}".to_vec())).unwrap()
    }
}

fn hooked(facts: &mut PodFacts) {
    facts.hook = Some(Hook { preset: HookPreset::VllmSleep, port: 8000 });
    facts.pod_ip = Some(Ipv4Addr::new(10, 0, 0, 7).into());
}

#[test]
fn a_hook_is_called_in_the_round_that_saw_the_reason_and_taken_back_when_it_is_calm() {
    let mut bench = Bench::with(breaker("Device", json!([{"type": "Hook"}])), hooked);
    bench.sample(100, &[("a", 45), ("b", 20)]);
    let calls = bench.hooks();
    assert_eq!(calls.len(), 1);
    assert_eq!(
        (calls[0].path.as_str(), calls[0].address.to_string().as_str()),
        ("/sleep?level=1", "10.0.0.7")
    );
    for _ in 0..80 {
        bench.sample(100, &[("a", 45), ("b", 20)]);
    }
    assert!(bench.hooks().is_empty(), "once an episode");
    bench.engine.hooked(Answered { call: calls[0].clone(), result: Ok(()) });
    bench.sample(100, &[("a", 5), ("b", 22)]);
    assert!(bench.hooks().is_empty(), "with what it held before it would have to sleep again");
    bench.sample(100, &[("a", 5), ("b", 10)]);
    let calls = bench.hooks();
    assert_eq!(calls.iter().map(|call| call.path.as_str()).collect::<Vec<_>>(), ["/wake_up"]);
    bench.engine.hooked(Answered { call: calls[0].clone(), result: Ok(()) });
    bench.sample(100, &[("a", 45), ("b", 10)]);
    assert!(bench.hooks().is_empty());
    let text = bench.engine.render(None);
    assert!(
        text.contains("highwater_hook_calls_total{node=\"n1\",preset=\"VllmSleep\",result=\"done\"} 2"),
        "{text}"
    );
}

#[test]
fn a_hook_that_fails_is_told_and_what_is_stronger_follows_at_once() {
    let layer = breaker("Device", json!([{"type": "Hook"}, {"type": "Restart"}]));
    let mut bench = Bench::with(layer, hooked);
    bench.sample(100, &[("a", 70)]);
    assert!(bench.created().is_empty(), "it has its time");
    let call = bench.hooks().remove(0);
    bench.engine.hooked(Answered { call, result: Err(Failure::Status(500)) });
    assert!(bench.jobs().iter().any(|job| matches!(job, Job::Tell(_))));
    bench.sample(100, &[("a", 70)]);
    let created = bench.created();
    assert_eq!(created.iter().map(subject).collect::<Vec<_>>(), [Some("a")]);
    assert!(created[0].spec.proposed.alternatives.iter().any(|line| line.starts_with("Hook")), "{created:?}");
}

#[test]
fn a_gentle_act_has_its_time_before_a_stronger_one_is_proposed() {
    let layer = breaker("Device", json!([{"type": "Signal"}, {"type": "Restart"}]));
    let mut bench = Bench::with(layer, |_| {});
    bench.volume("a");
    bench.sample(100, &[("a", 70)]);
    assert_eq!(bench.pressure("a")["level"], "Critical");
    bench.sample(4_900, &[("a", 70)]);
    assert!(bench.created().is_empty());
    bench.sample(200, &[("a", 70)]);
    assert_eq!(bench.created().iter().map(subject).collect::<Vec<_>>(), [Some("a")]);
}

#[test]
fn while_paused_no_hook_is_called() {
    let mut bench = Bench::with(breaker("Device", json!([{"type": "Hook"}])), hooked);
    let paused = NamespaceFacts { paused: true, ..NamespaceFacts::default() };
    bench.world(WorldChange::Namespace(Set::Upsert(("team".to_owned(), paused))));
    bench.sample(100, &[("a", 70)]);
    assert!(bench.hooks().is_empty());
    bench.world(WorldChange::Namespace(Set::Upsert(("team".to_owned(), NamespaceFacts::default()))));
    bench.sample(100, &[("a", 70)]);
    assert_eq!(bench.hooks().len(), 1, "it is called when the pause is over");
}

#[test]
fn a_pod_breaker_concerns_that_pod_alone() {
    let layer = breaker("Pod", json!([{"type": "Signal"}, {"type": "Restart"}]));
    let mut bench = Bench::with(layer, |_| {});
    bench.volume("a");
    bench.volume("b");
    bench.sample(100, &[("a", 7), ("b", 5)]);
    assert_eq!(bench.pressure("a")["level"], "Critical");
    assert_eq!(bench.pressure("b")["level"], Value::Null);
    bench.sample(5_100, &[("a", 7), ("b", 5)]);
    let created = bench.created();
    assert_eq!(created.iter().map(subject).collect::<Vec<_>>(), [Some("a")]);
    assert_eq!(created[0].spec.evidence.scope, Some(highwater_crds::BreakerScope::Pod));
    bench.sample(100, &[("a", 5), ("b", 5)]);
    assert_eq!(bench.observed(), [ObservationState::Recovered]);
}

#[test]
fn a_rise_enters_a_level_early() {
    let mut layer = breaker("Device", json!([{"type": "Signal"}]));
    layer["rules"][0]["breakers"][0]["value"]["rise"] =
        json!({"level": "Critical", "leadSeconds": 60, "abovePercent": 40});
    let mut bench = Bench::with(layer, |_| {});
    bench.volume("a");
    for gib in 30..50 {
        bench.sample(500, &[("a", gib)]);
    }
    assert_eq!(bench.pressure("a")["level"], "Critical", "60 % at 2 GiB a second");
}

#[test]
fn unready_is_told_before_it_begins_held_while_memory_is_high_and_taken_back() {
    let layer = breaker("Device", json!([{"type": "Unready"}]));
    let mut bench = Bench::with(layer, |facts| facts.unready = true);
    bench.volume("a");
    bench.sample(100, &[("a", 70)]);
    let incident = bench.approved(ActionType::Unready);
    bench.sample(100, &[("a", 70)]);
    assert_eq!(bench.pressure("a")["unreadyUntil"], Value::Null, "it is not told yet");
    assert_eq!(bench.reports(), [ActState::Begun]);
    bench.sample(100, &[("a", 70)]);
    bench.sample(100, &[("a", 70)]);
    assert!(bench.pressure("a")["unreadyUntil"].is_u64());
    assert_eq!(bench.reports(), [ActState::Done]);
    bench.goes_on(&incident, DecisionState::Verifying);
    let before = bench.pressure("a")["unreadyUntil"].as_u64().unwrap();
    for _ in 0..120 {
        bench.sample(100, &[("a", 70)]);
        bench.reports();
    }
    assert!(bench.pressure("a")["unreadyUntil"].as_u64().unwrap() > before, "it is renewed");
    bench.sample(100, &[("a", 50)]);
    assert_eq!(bench.pressure("a")["unreadyUntil"], Value::Null);
    assert_eq!(bench.reports(), [ActState::Done]);
    bench.sample(100, &[("a", 50)]);
    assert_eq!(bench.reports(), [ActState::Undone]);
}

#[test]
fn an_unready_pod_is_ready_again_when_the_operator_ends_it_or_the_incident_is_deleted() {
    for delete in [false, true] {
        let layer = breaker("Device", json!([{"type": "Unready"}]));
        let mut bench = Bench::with(layer, |facts| facts.unready = true);
        bench.volume("a");
        bench.sample(100, &[("a", 70)]);
        let incident = bench.approved(ActionType::Unready);
        for _ in 0..4 {
            bench.sample(100, &[("a", 70)]);
            bench.reports();
        }
        assert!(bench.pressure("a")["unreadyUntil"].is_u64());
        if delete {
            bench.world(WorldChange::Incident(Set::Remove(incident)));
        } else {
            bench.goes_on(&incident, DecisionState::Failed);
        }
        bench.sample(100, &[("a", 70)]);
        assert_eq!(bench.pressure("a")["unreadyUntil"], Value::Null, "{delete}");
    }
}

#[test]
fn what_was_allowed_for_a_pod_that_did_not_opt_in_is_refused() {
    let layer = breaker("Device", json!([{"type": "Unready"}]));
    let mut bench = Bench::with(layer, |facts| facts.unready = true);
    bench.sample(100, &[("a", 70)]);
    let incident = bench.approved(ActionType::Unready);
    bench.world(WorldChange::Pod(Set::Upsert(super::pod("a"))));
    bench.sample(100, &[("a", 70)]);
    assert_eq!(bench.reports(), [ActState::Refused]);
    bench.goes_on(&incident, DecisionState::Cancelled);
    bench.sample(100, &[("a", 70)]);
    assert!(bench.reports().is_empty());
}

#[test]
fn an_agent_that_starts_goes_on_with_what_was_begun_and_begins_nothing_twice() {
    let layer =
        breaker("Device", json!([{"type": "Unready"}, {"type": "Restart", "restart": {"inPlace": true}}]));
    for (state, act, unready) in [
        (DecisionState::Verifying, ActState::Done, true),
        (DecisionState::Approved, ActState::Begun, true),
        (DecisionState::Failed, ActState::Done, false),
        (DecisionState::Verifying, ActState::Undone, false),
        (DecisionState::Verifying, ActState::Refused, false),
    ] {
        let mut bench = Bench::with(layer.clone(), |facts| facts.unready = true);
        bench.volume("a");
        bench.sample(100, &[("a", 70)]);
        let mut incident = bench.approved(ActionType::Unready);
        bench.world(WorldChange::Incident(Set::Remove(incident.clone())));
        bench.sample(100, &[("a", 70)]);
        // A second agent on the same node.
        let report = ActReport { state: act, message: "x".into(), parked_bytes: None };
        let (_, wall) = clock();
        incident.status = Some(GpuMemoryIncidentStatus {
            observation: Some(Observation {
                state: ObservationState::Over,
                bytes: None,
                at: MicroTime(wall),
                leak: None,
                hook: None,
                after_act: None,
                act: Some(report),
            }),
            decision: Some(Decision {
                state,
                reason: "x".into(),
                message: String::new(),
                since: MicroTime(wall),
                workload: None,
                budgets: Vec::new(),
                acted_at: None,
                targets: Vec::new(),
            }),
        });
        let mut bench = Bench::unsynced(&json!([layer.clone()]));
        bench.world(WorldChange::Pod(Set::Upsert(PodFacts { unready: true, ..super::pod("a") })));
        bench.volume("a");
        bench.world(WorldChange::Incident(reset([incident])));
        for _ in 0..3 {
            bench.sample(100, &[("a", 70)]);
        }
        assert_eq!(bench.pressure("a")["unreadyUntil"].is_u64(), unready, "{state:?} {act:?}");
    }
}

fn parkable(facts: &mut PodFacts) {
    facts.park = true;
}

/// A pod that is being parked.
fn parking() -> (Bench, GpuMemoryIncident) {
    let mut bench = Bench::with(breaker("Device", json!([{"type": "Park"}])), parkable);
    bench.keeper(&[]);
    bench.sample(100, &[("a", 70)]);
    let surveys = bench.orders().into_iter().filter(|order| matches!(order, Order::Survey(_))).count();
    assert_eq!(surveys, 1);
    bench.engine.surveyed(Surveyed {
        pod: "a".into(),
        device: "GPU-0".into(),
        processes: Some(vec![Process { pid: 97, started: 5 }]),
        room: Some(100 * GI),
        available: Some(200 * GI),
    });
    bench.sample(100, &[("a", 70)]);
    let incident = bench.approved(ActionType::Park);
    bench.sample(100, &[("a", 70)]);
    assert_eq!(bench.reports(), [ActState::Begun]);
    assert!(bench.keeper_orders().is_empty());
    bench.sample(100, &[("a", 70)]);
    let orders = bench.keeper_orders();
    assert!(
        matches!(&orders[..], [link::Order::Park(ask)] if ask.pod == "a" && ask.bytes == 70 * GI),
        "{orders:?}"
    );
    (bench, incident)
}

fn moved(bench: &mut Bench, state: ParkState, message: Option<&str>) {
    let moved = Moved { state, message: message.map(str::to_owned), milliseconds: 1 };
    bench.engine.keeper(Heard::Moved { pod: "a".into(), device: "GPU-0".into(), result: Ok(moved) });
}

#[test]
fn a_parked_pod_is_not_gone_and_comes_back_when_there_is_room_at_level_normal() {
    let (mut bench, incident) = parking();
    moved(&mut bench, ParkState::Parked, None);
    bench.keeper(&[("a", ParkState::Parked)]);
    bench.sample(100, &[("b", 70)]);
    assert_eq!(bench.reports(), [ActState::Done]);
    let observed = bench.engine.world.incidents[&name_of(&incident)].status.clone().unwrap();
    let observation = observed.observation.unwrap();
    assert_eq!((observation.state, observation.bytes), (ObservationState::Recovered, Some(0)));
    assert_eq!(observation.act.unwrap().parked_bytes, Some(70 << 30));
    assert_eq!(bench.engine.facts(Watch::On).devices[0].parked, 1);
    let text = bench.engine.render(None);
    let line =
        "highwater_pod_parked_bytes{device=\"0\",namespace=\"team\",node=\"n1\",pod=\"a\"} 42949672960";
    assert!(text.contains(line), "{text}");
    assert!(bench.keeper_orders().is_empty(), "there is pressure");
    bench.goes_on(&incident, DecisionState::Succeeded);
    bench.sample(100, &[("b", 30)]);
    assert!(bench.keeper_orders().is_empty(), "there is no room");
    bench.sample(100, &[("b", 10)]);
    let orders = bench.keeper_orders();
    assert!(matches!(&orders[..], [link::Order::Restore { pod, .. }] if pod == "a"), "{orders:?}");
    // Refused: it stays parked, and is tried again later.
    moved(&mut bench, ParkState::Parked, Some("no room"));
    bench.sample(100, &[("b", 10)]);
    assert!(bench.keeper_orders().is_empty());
    bench.sample(5_000, &[("b", 10)]);
    assert_eq!(bench.keeper_orders().len(), 1);
    moved(&mut bench, ParkState::Running, None);
    bench.sample(100, &[("a", 60), ("b", 10)]);
    assert_eq!(bench.reports(), [ActState::Undone]);
}

#[test]
fn a_checkpoint_that_failed_leaves_nothing_booked_and_one_that_lost_a_process_is_restarted() {
    let (mut bench, _) = parking();
    moved(&mut bench, ParkState::Running, Some("the driver refused"));
    bench.sample(100, &[("a", 70)]);
    assert_eq!(bench.reports(), [ActState::Failed]);
    assert_eq!(bench.engine.facts(Watch::On).devices[0].parked, 0);

    let (mut bench, _) = parking();
    moved(&mut bench, ParkState::Lost, Some("it is gone"));
    bench.keeper(&[("a", ParkState::Lost)]);
    bench.sample(100, &[("a", 70)]);
    let mut jobs = bench.jobs();
    let created = jobs.iter().find_map(|job| match job {
        Job::Create(_, incident) => Some(incident.clone()),
        _ => None,
    });
    let created = created.expect("it is to be restarted");
    assert_eq!((created.spec.proposed.action, subject(&created)), (ActionType::Restart, Some("a")));
    let failed = jobs.drain(..).any(|job| {
        matches!(job, Job::Observe(_, Observation { act: Some(act), .. }) if act.state == ActState::Failed)
    });
    assert!(failed);
}

#[test]
fn a_pod_is_not_parked_where_the_host_has_no_room_or_no_keeper_answers() {
    let mut bench = Bench::with(breaker("Device", json!([{"type": "Park"}])), parkable);
    bench.sample(100, &[("a", 70)]);
    assert!(bench.created().is_empty(), "no keeper");
    bench.keeper(&[]);
    bench.sample(100, &[("a", 70)]);
    bench.engine.surveyed(Surveyed {
        pod: "a".into(),
        device: "GPU-0".into(),
        processes: Some(vec![Process { pid: 97, started: 5 }]),
        room: Some(76 * GI),
        available: Some(200 * GI),
    });
    bench.sample(100, &[("a", 70)]);
    assert!(bench.created().is_empty(), "its cgroup has room for 76 GiB, and 77 are needed");
}

/// A pod that is to be restarted in place.
fn in_place() -> (Bench, GpuMemoryIncident) {
    let layer = breaker(
        "Device",
        json!([{"type": "Restart", "restart": {"inPlace": true, "gracePeriodSeconds": 7}}]),
    );
    let mut bench = Bench::with(layer, |facts| facts.restart_in_place = true);
    let holder = Holder::Container { pod: "a".into(), container: Some("c1".into()) };
    bench.hold(100, &[(holder.clone(), 70)]);
    let incident = bench.approved(ActionType::Restart);
    assert!(incident.spec.proposed.in_place);
    bench.hold(100, &[(holder.clone(), 70)]);
    assert_eq!(bench.reports(), [ActState::Begun]);
    bench.hold(100, &[(holder, 70)]);
    (bench, incident)
}

fn mains() -> Vec<Main> {
    vec![Main { pid: 7, started: 9, container: "c1".into() }]
}

#[test]
fn a_restart_in_place_ends_the_containers_that_use_the_device() {
    let (mut bench, incident) = in_place();
    let uid: Arc<str> = incident.metadata.uid.as_deref().unwrap().into();
    let orders = bench.orders();
    assert!(
        orders.iter().any(|order| matches!(order, Order::Restart(restart::Order::Find { containers, .. })
            if containers.iter().map(|id| &**id).eq(["c1"]))),
        "{orders:?}"
    );
    bench.engine.restarted(Outcome::Found { incident: Arc::clone(&uid), result: Ok(mains()) });
    let orders = bench.orders();
    assert!(
        matches!(&orders[..], [Order::Restart(restart::Order::End { grace, mains: found, .. })]
            if grace.as_secs() == 7 && *found == mains()),
        "{orders:?}"
    );
    bench.engine.restarted(Outcome::Ended { incident: uid, result: Ok(0) });
    bench.sample(100, &[("b", 1)]);
    assert_eq!(bench.reports(), [ActState::Done]);
}

#[test]
fn a_restart_that_was_begun_goes_on_with_the_same_processes_and_never_with_others() {
    for recorded in [true, false] {
        let (mut bench, incident) = in_place();
        let uid: Arc<str> = incident.metadata.uid.as_deref().unwrap().into();
        if recorded {
            bench.engine.restarted(Outcome::Found { incident: uid, result: Ok(mains()) });
        }
        bench.orders();
        let known = bench.engine.world.incidents[&name_of(&incident)].clone();
        // The agent is killed; the next one has the same folder.
        bench.engine.carries = Carries::new(Record::open(bench.root.path(), std::path::Path::new("/proc")));
        bench.world(WorldChange::Incident(Set::Upsert(known)));
        bench.sample(100, &[("a", 70)]);
        let orders = bench.orders();
        let ended = orders.iter().any(|order| {
            matches!(order, Order::Restart(restart::Order::End { mains: found, .. }) if *found == mains())
        });
        assert_eq!(ended, recorded, "{orders:?}");
        let found = orders.iter().any(|order| matches!(order, Order::Restart(restart::Order::Find { .. })));
        assert!(!found);
        if !recorded {
            assert_eq!(bench.reports(), [ActState::Failed]);
        }
    }
}

#[test]
fn host_memory_that_stays_high_is_signalled_and_proposed_and_its_end_is_seen() {
    let mut layer = breaker("Device", json!([]));
    layer["rules"][0]["hostMemory"] = json!({"policy": "serving", "ownerKinds": ["ReplicaSet"],
        "value": {"tripPercent": 92, "clearPercent": 88, "holdMilliseconds": 5000,
            "actions": [{"type": "Signal"}, {"type": "Restart"}]}});
    let mut bench = Bench::with(layer, |_| {});
    bench.volume("a");
    assert_eq!(bench.engine.host_wants().len(), 1, "of the pod on the device");
    let read = |bench: &mut Bench, held: u64| {
        let sample = HostSample { held: Some(held), limit: Some(100), ..HostSample::default() };
        bench.engine.host(vec![HostReading { pod: "a".into(), sample: Some(sample), exact: None }]);
        bench.sample(100, &[("a", 1)]);
    };
    read(&mut bench, 93);
    assert_eq!(bench.pressure("a")["level"], Value::Null);
    bench.sample(5_000, &[("a", 1)]);
    read(&mut bench, 93);
    assert_eq!(
        (&bench.pressure("a")["level"], &bench.pressure("a")["device"]),
        (&json!("Critical"), &json!("host"))
    );
    bench.sample(5_100, &[("a", 1)]);
    let created = bench.created();
    assert_eq!(created.len(), 1);
    assert_eq!((created[0].spec.kind, subject(&created[0])), (IncidentKind::HostMemory, Some("a")));
    let evidence = &created[0].spec.evidence;
    assert_eq!((evidence.used_bytes, evidence.limit_bytes), (Some(93), Some(100)), "of the host's");
    assert_eq!((evidence.due_bytes, evidence.strength), (None, None), "these are of the device's");
    read(&mut bench, 80);
    assert_eq!(bench.observed(), [ObservationState::Recovered]);
    assert_eq!(bench.pressure("a")["level"], "Normal");
}

#[test]
fn l03_zombie_memory_is_an_incident_of_nobody_until_it_is_back() {
    let mut bench = Bench::with(breaker("Device", json!([])), |_| {});
    for _ in 0..130 {
        bench.hold(100, &[(Holder::Gone, 30)]);
    }
    let created = bench.created();
    assert_eq!(created.len(), 1, "one episode, one incident");
    let spec = &created[0].spec;
    assert_eq!((spec.kind, subject(&created[0])), (IncidentKind::ZombieMemory, None));
    assert_eq!((spec.proposed.action, spec.proposed.frees_bytes), (ActionType::Drain, Some(30 << 30)));
    for _ in 0..130 {
        bench.hold(100, &[]);
    }
    assert!(bench.observed().contains(&ObservationState::Recovered));
}

#[test]
fn d07_far_more_zombie_memory_and_another_policy_each_have_an_incident_of_their_own() {
    let mut bench = Bench::with(breaker("Device", json!([])), |_| {});
    let told = |bench: &mut Bench, gib: u64| {
        for _ in 0..130 {
            bench.hold(100, &[(Holder::Gone, gib)]);
        }
        let created = bench.created();
        let of = |i: &GpuMemoryIncident| (i.spec.policy.clone(), i.spec.episode, i.spec.proposed.frees_bytes);
        (created.iter().map(of).collect::<Vec<_>>(), created)
    };
    let of = |policy: &str, episode, gib: i64| vec![(policy.to_owned(), episode, Some(gib << 30))];
    let (first, small) = told(&mut bench, 1);
    assert_eq!(first, of("serving", 1, 1));
    bench.decide(&small[0], DecisionState::Proposed, "ResetRequested");
    let (second, large) = told(&mut bench, 30);
    assert_eq!(second, of("serving", 2, 30), "a little of it does not hide a lot");
    assert!(told(&mut bench, 30).0.is_empty() && told(&mut bench, 45).0.is_empty(), "it is the same");

    for incident in small.iter().chain(&large) {
        bench.decide(incident, DecisionState::Cancelled, "PolicyDeleted");
    }
    let mut layer = breaker("Device", json!([]));
    layer["rules"][0]["breakers"][0]["policy"] = json!("batch");
    let spec = serde_json::from_value(json!({"planLifeSeconds": 600, "layers": [layer]})).unwrap();
    bench.world(WorldChange::Plan(Set::Upsert(GpuMemoryNode::new("n1", spec))));
    let (third, next) = told(&mut bench, 30);
    assert_eq!(third, of("batch", 3, 30), "what the policy before was told is no news to this one");
    assert!(told(&mut bench, 30).0.is_empty());

    bench.decide(&next[0], DecisionState::Cancelled, "PolicyDeleted");
    assert_eq!(told(&mut bench, 30).0, of("batch", 4, 30), "a policy that was made again asks again");
    for _ in 0..130 {
        bench.hold(100, &[]);
    }
    assert!(bench.observed().contains(&ObservationState::Recovered));
}

#[test]
fn d07_zombie_memory_that_an_earlier_agent_was_told_of_is_the_same_episode() {
    let mut bench = Bench::with(breaker("Device", json!([])), |_| {});
    for _ in 0..130 {
        bench.hold(100, &[(Holder::Gone, 30)]);
    }
    let incident = bench.created().remove(0);
    bench.decide(&incident, DecisionState::Proposed, "ResetRequested");
    // The agent is killed; the next one finds less of it, then as much as there was.
    bench.engine.episodes = Episodes::default();
    for gib in [1, 30] {
        for _ in 0..130 {
            bench.hold(100, &[(Holder::Gone, gib)]);
        }
        assert!(bench.created().is_empty(), "{gib} GiB");
    }
}
