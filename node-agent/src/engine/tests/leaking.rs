//! Leaks, from the samples to what is written.

use highwater_crds::{ActionType, Evidence, HookEffect, LeakClass, LeakFinding, LeakMemory, LeakStage};
use highwater_policy::pod::{ContainerFacts, Ended, Hook, HookPreset, MetricsEndpoint};

use super::{testing::MI, *};
use crate::{
    framework::{Fault, Scraped},
    host::{Exact, Reading as HostReading},
    pod_http::Failure,
};

/// A layer that watches for leaks sixty times as fast as by default, with a limit of 60 GiB.
#[allow(clippy::needless_pass_by_value, reason = "made where it is given")]
fn watching(mode: &str, actions: Value) -> Value {
    json!({"mode": mode, "rules": [{
        "product": "NVIDIA H200", "partition": "Whole", "quotaPolicies": ["serving"],
        "leaks": {"policy": "serving", "ownerKinds": ["ReplicaSet"], "value": {
            "actions": actions, "sampleMilliseconds": 500, "bucketMilliseconds": 1000,
            "blockMilliseconds": [3000, 10_000, 30_000, 120_000], "warmUpMilliseconds": 10_000,
            "horizonMilliseconds": 60_000, "leadMilliseconds": 10_000}}}],
        "quotas": [{"policy": "serving", "ownerKinds": ["ReplicaSet"], "value": {"default": {"limit": "60Gi"}}}]})
}

fn restart() -> Value {
    json!([{"type": "Signal"}, {"type": "Hook"}, {"type": "Restart"}])
}

/// What was written of incidents.
#[derive(Debug, Default)]
struct Written {
    created: Vec<GpuMemoryIncident>,
    observed: Vec<Observation>,
}

impl Written {
    fn stages(&self) -> Vec<LeakStage> {
        self.observed.iter().filter_map(|o| Some(o.leak.as_ref()?.stage)).collect()
    }
}

impl Bench {
    /// Samples `GPU-0` each half second for so many seconds, while `a` holds what `mib` says of the second
    /// and `b` 8 GiB. Every incident waits for the operator.
    fn run(&mut self, seconds: std::ops::Range<u64>, mib: impl Fn(u64) -> u64) -> Written {
        let mut written = Written::default();
        for half in seconds.start * 2..seconds.end * 2 {
            self.mib(500, mib(half / 2));
            self.take(&mut written);
        }
        written
    }

    fn mib(&mut self, after: u64, held: u64) {
        let mut charges = vec![charge("b", 2, 8 * GI)];
        charges.extend((held > 0).then(|| charge("a", 1, held * MI)));
        self.pass(after, vec![sampled("GPU-0", charges, 0)]);
        self.engine.tick(&[], None);
    }

    fn take(&mut self, written: &mut Written) {
        for job in self.jobs() {
            match job {
                Job::Create(key, incident) => {
                    written.created.push((*incident).clone());
                    self.engine.done(done(What::Create(key, incident.clone())));
                    self.decide(&incident, DecisionState::Proposed, "Waiting");
                }
                Job::Observe(name, observation) => {
                    written.observed.push(observation.clone());
                    self.engine.done(done(What::Observe(name, observation)));
                }
                _ => {}
            }
        }
    }

    /// What the agent gave to be kept so far is written: all that an agent leaves that is killed.
    fn keep(&mut self) {
        let (send, kept) = tokio::sync::mpsc::unbounded_channel();
        for order in self.orders.take() {
            if let Order::Keep(seen) = order {
                send.send(seen).unwrap();
            }
        }
        drop(send);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(crate::leaks::keep(kept));
    }

    /// The agent ends.
    fn close(&mut self) {
        self.engine.close();
        self.keep();
    }

    /// Whether metrics show that a pod is suspected.
    fn suspects(&self, pod: &str) -> bool {
        let text = self.engine.render(None);
        let of = |line: &&str| {
            line.starts_with("highwater_pod_leak_stage{") && line.contains(&format!("pod=\"{pod}\""))
        };
        text.lines().filter(of).any(|line| !line.ends_with(" 0"))
    }

    /// The engine of `a` can be asked to free what it caches.
    fn opt_in_to_hooks(&mut self) {
        let mut facts = super::pod("a");
        facts.hook = Some(Hook { preset: HookPreset::SglangFlushCache, port: 8000 });
        facts.pod_ip = Some(std::net::Ipv4Addr::new(10, 0, 0, 7).into());
        self.world(WorldChange::Pod(Set::Upsert(facts)));
    }

    /// How often it was asked since this was asked last.
    fn times_hooked(&mut self) -> usize {
        self.orders.take().iter().filter(|order| matches!(order, Order::Hook(_))).count()
    }

    fn container(&mut self, id: &str, ended: Option<Ended>) {
        let container = ContainerFacts { name: "c".into(), id: id.into(), started: None, ended };
        let facts = PodFacts { containers: vec![container], ..super::pod("a") };
        self.world(WorldChange::Pod(Set::Upsert(facts)));
    }
}

/// The same without its section on leaks.
fn without(mut layer: Value) -> Value {
    layer["rules"][0].as_object_mut().unwrap().remove("leaks");
    layer
}

/// A tenth of a GiB a second, from 8 GiB: 60 GiB are full after 520 s.
fn leak(second: u64) -> u64 {
    8 * 1024 + second * 102
}

fn evidence(incident: &GpuMemoryIncident) -> (&Evidence, &LeakFinding) {
    (&incident.spec.evidence, incident.spec.evidence.leak.as_ref().unwrap())
}

#[test]
fn l01_a_leak_is_reported_when_it_is_suspected_and_raised_to_act_before_memory_is_full() {
    let mut bench = Bench::new(&json!([watching("Enforce", restart())]));
    let written = bench.run(0..300, leak);
    assert_eq!(written.created.len(), 1);
    let incident = &written.created[0];
    assert_eq!((incident.spec.kind, subject(incident)), (IncidentKind::Leak, Some("a")));
    assert_eq!(incident.spec.proposed.action, ActionType::Restart, "the strongest that is budgeted");
    let (evidence, found) = evidence(incident);
    assert_eq!((found.stage, found.class), (LeakStage::Suspect, LeakClass::Linear));
    assert!(evidence.explanation.contains("recommended"), "{}", evidence.explanation);
    let hourly = found.slope_bytes_per_hour.mid / (1 << 30);
    assert!((300..420).contains(&hourly), "{hourly} GiB an hour");
    assert!(written.stages().iter().all(|stage| *stage == LeakStage::Suspect));
    assert!(written.observed.len() <= 5, "a suspicion that stands is hardly written: {:?}", written.observed);
    let written = bench.run(300..520, leak);
    assert!(written.created.is_empty(), "one episode, one incident");
    let raised = written.observed.iter().find(|o| o.leak.as_ref().unwrap().stage == LeakStage::Act).unwrap();
    assert_eq!(raised.state, ObservationState::Over);
    let end = raised.leak.as_ref().unwrap().exhaustion_seconds.unwrap();
    assert!(end.low < 60, "{end:?}");
}

#[test]
fn what_does_not_grow_is_never_written() {
    let mut bench = Bench::new(&json!([watching("Enforce", restart())]));
    bench.run(0..30, |_| 30 * 1024);
    let mut jobs = 0;
    for second in 30..1800_u64 {
        bench.mib(1000, 30 * 1024 + (second % 7) * 300);
        let pertinent = |job: &Job| matches!(job, Job::Create(..) | Job::Observe(..));
        jobs += bench.jobs().iter().filter(|job| pertinent(job)).count();
    }
    assert_eq!(jobs, 0);
    assert!(bench.engine.render(None).contains(
        "highwater_pod_leak_stage{device=\"0\",memory=\"Device\",namespace=\"team\",node=\"n1\",pod=\"a\"} 0"
    ));
}

#[test]
fn a_policy_that_observes_shows_a_leak_and_reports_none() {
    let mut bench = Bench::new(&json!([watching("Observe", restart())]));
    let volume = bench.volume("a");
    let written = bench.run(0..520, leak);
    assert!(written.created.is_empty());
    let pressure: Value = serde_json::from_slice(&std::fs::read(volume.join("pressure")).unwrap()).unwrap();
    assert_eq!(pressure["level"], json!("Normal"), "a signal is an act");
    let text = bench.engine.render(None);
    assert!(text.contains("pod=\"a\"} 2"), "{text}");
    for name in ["highwater_pod_leak_slope_bytes_per_hour{", "highwater_pod_leak_exhaustion_seconds{"] {
        assert!(text.contains(name), "{name}");
    }
    assert!(
        text.contains("highwater_leak_findings_total{class=\"Linear\",node=\"n1\",stage=\"Act\"} 1"),
        "{text}"
    );
    let mut bench = Bench::new(&json!([watching("DryRun", restart())]));
    let written = bench.run(0..300, leak);
    assert_eq!(written.created[0].spec.mode, Mode::DryRun);
}

#[test]
fn what_the_agent_does_by_itself_it_does_once_an_act_is_due() {
    let mut bench = Bench::new(&json!([watching("Enforce", restart())]));
    let volume = bench.volume("a");
    bench.opt_in_to_hooks();
    let mut calls = 0;
    let mut raised = None;
    for second in 0..520_u64 {
        let written = bench.run(second..second + 1, leak);
        let acts = written.stages().contains(&LeakStage::Act);
        calls += bench.times_hooked();
        let pressure = std::fs::read(volume.join("pressure")).unwrap_or_else(|_| b"{}".to_vec());
        let pressure: Value = serde_json::from_slice(&pressure).unwrap();
        if raised.is_none() && !acts {
            assert!(pressure["level"] != json!("Critical") && calls == 0, "at {second}: {pressure}");
        } else if raised.is_none() {
            raised = Some(second);
            assert_eq!((&pressure["level"], &pressure["device"]), (&json!("Critical"), &json!("GPU-0")));
            assert_eq!(pressure["limitBytes"], json!(60 * GI));
        }
    }
    assert!(raised.is_some());
    assert_eq!(calls, 1, "once an episode");
}

/// What was told of the hook with each observation since an act was due.
fn effects(observed: &[Observation]) -> Vec<Option<HookEffect>> {
    let due = |o: &&Observation| o.leak.as_ref().is_some_and(|leak| leak.stage == LeakStage::Act);
    let mut effects: Vec<_> = observed.iter().filter(due).map(|o| o.hook.map(|hook| hook.effect)).collect();
    effects.dedup();
    effects
}

#[test]
fn that_a_hook_comes_first_is_told_as_it_is_raised_and_then_what_came_of_it() {
    use HookEffect::{Awaited, Helped, InVain};
    for (frees, expected) in [(0, vec![Awaited, InVain]), (1024, vec![Awaited, Helped, InVain])] {
        let mut bench = Bench::new(&json!([watching("Enforce", restart())]));
        bench.opt_in_to_hooks();
        let (mut observed, mut calls) = (Vec::new(), 0);
        for second in 0..515_u64 {
            let freed = if calls > 0 { frees } else { 0 };
            observed.extend(bench.run(second..second + 1, |at| leak(at) - freed).observed);
            calls += bench.times_hooked();
        }
        assert_eq!(effects(&observed), expected.into_iter().map(Some).collect::<Vec<_>>());
        assert_eq!(calls, 1, "once an episode");
    }
    let mut bench = Bench::new(&json!([watching("Enforce", restart())]));
    let written = bench.run(0..515, leak);
    assert_eq!(effects(&written.observed), [None], "its engine cannot be asked");
}

#[test]
fn a_hook_that_cannot_be_called_is_in_vain_at_once() {
    let mut bench = Bench::new(&json!([watching("Enforce", restart())]));
    let mut facts = super::pod("a");
    // It has no address.
    facts.hook = Some(Hook { preset: HookPreset::SglangFlushCache, port: 8000 });
    bench.world(WorldChange::Pod(Set::Upsert(facts)));
    let written = bench.run(0..515, leak);
    assert_eq!(effects(&written.observed).last(), Some(&Some(HookEffect::InVain)));
    assert_eq!(bench.times_hooked(), 0);
}

#[test]
fn an_agent_that_comes_after_the_hook_does_not_ask_again_and_sees_what_came_of_it() {
    let layers = json!([watching("Enforce", restart())]);
    let mut bench = Bench::new(&layers);
    bench.opt_in_to_hooks();
    let asked = (0..515).find(|at| {
        bench.run(*at..at + 1, leak);
        bench.times_hooked() > 0
    });
    let asked = asked.unwrap();
    bench.run(asked + 1..asked + 4, leak);
    let incident = bench.engine.world.incidents.values().next().unwrap().clone();
    let told = incident.status.as_ref().unwrap().observation.as_ref().unwrap().hook.unwrap();
    assert!(told.effect == HookEffect::Awaited && told.held_bytes.is_some());
    bench.close();
    let Bench { root, .. } = bench;
    let mut bench = Bench::unsynced_in(root, &layers);
    bench.opt_in_to_hooks();
    bench.world(WorldChange::Incident(reset([incident])));
    let written = bench.run(asked + 4..asked + 30, leak);
    assert_eq!(bench.times_hooked(), 0);
    let last = written.observed.last().and_then(|o| o.hook).unwrap();
    assert_eq!((last.effect, last.held_bytes), (HookEffect::InVain, told.held_bytes));
}

#[test]
fn what_nothing_was_done_about_is_proposed_again_later_each_time() {
    let mut bench = Bench::new(&json!([watching("Enforce", restart())]));
    let mut opened = Vec::new();
    for second in 0..500_u64 {
        for incident in bench.run(second..second + 1, leak).created {
            opened.push((second, incident.spec.episode, incident.spec.evidence.used_bytes));
            bench.decide(&incident, DecisionState::Suppressed, "OwnerKindNotListed");
        }
    }
    assert!(opened.len() >= 4, "{opened:?}");
    for (pair, wait) in opened.windows(2).zip([30, 60, 120]) {
        let [before, next] = pair else { panic!() };
        assert!((wait..wait + 2).contains(&(next.0 - before.0)), "{opened:?}");
        assert_eq!(next.1, before.1 + 1);
        assert!(next.2 > before.2, "its evidence is what is known then: {opened:?}");
    }
}

#[test]
fn after_an_act_or_a_rehearsal_nothing_is_proposed_in_the_same_episode() {
    for (mode, state, reason, acted) in [
        ("Enforce", DecisionState::Failed, "MemoryNotReturned", true),
        ("Enforce", DecisionState::Suppressed, "TicketNeeded", false),
        ("DryRun", DecisionState::Suppressed, "DryRun", false),
    ] {
        let mut bench = Bench::new(&json!([watching(mode, restart())]));
        let suspected = (0..400).find(|at| !bench.run(*at..at + 1, leak).created.is_empty()).unwrap();
        let incident = bench.engine.world.incidents.values().next().unwrap().clone();
        bench.decide(&incident, state, reason);
        if acted {
            let mut incident = bench.engine.world.incidents.values().next().unwrap().clone();
            let decision = incident.status.as_mut().and_then(|status| status.decision.as_mut()).unwrap();
            decision.acted_at = Some(MicroTime(clock().1));
            bench.world(WorldChange::Incident(Set::Upsert(incident)));
        }
        let written = bench.run(suspected + 1..suspected + 200, leak);
        assert!(written.created.is_empty(), "{reason}");
    }
}

#[test]
fn without_an_act_that_needs_leave_an_incident_says_what_would_be_signalled() {
    let mut bench = Bench::new(&json!([watching("Enforce", json!([]))]));
    let written = bench.run(0..300, leak);
    assert_eq!(written.created[0].spec.proposed.action, ActionType::Signal);
}

#[test]
fn an_agent_that_starts_in_the_middle_changes_nothing() {
    let layers = json!([watching("Enforce", restart())]);
    let mut whole = Bench::new(&layers);
    let undisturbed = whole.run(0..520, leak);
    let mut bench = Bench::new(&layers);
    let before = bench.run(0..400, leak);
    let incident = bench.engine.world.incidents.values().next().unwrap().clone();
    bench.close();
    let Bench { root, .. } = bench;
    let mut bench = Bench::unsynced_in(root, &layers);
    bench.world(WorldChange::Incident(reset([incident])));
    let after = bench.run(400..520, leak);
    assert_eq!((before.created.len(), after.created.len()), (1, 0), "one episode, one incident");
    let raised = |written: &Written| {
        let act = |o: &&Observation| o.leak.as_ref().is_some_and(|leak| leak.stage == LeakStage::Act);
        written.observed.iter().find(act).map(|o| o.leak.as_ref().unwrap().exhaustion_seconds)
    };
    assert!(raised(&undisturbed).is_some());
    assert_eq!(raised(&after), raised(&undisturbed));
    assert!(after.observed.iter().all(|o| o.state == ObservationState::Over), "{:?}", after.observed);
}

#[test]
fn what_an_agent_suspected_and_had_not_written_down_is_not_taken_back_by_the_next() {
    let layers = json!([watching("Enforce", restart())]);
    let mut bench = Bench::new(&layers);
    let suspected = (0..400).find(|at| !bench.run(*at..at + 1, leak).created.is_empty()).unwrap();
    let mut bench = Bench::new(&layers);
    bench.run(0..suspected - 1, leak);
    bench.close();
    let file = bench.root.path().join("leaks.state");
    let before = std::fs::read(&file).unwrap();
    assert_eq!(bench.run(suspected - 1..suspected + 1, leak).created.len(), 1);
    let incident = bench.engine.world.incidents.values().next().unwrap().clone();
    let Bench { root, .. } = bench;
    std::fs::write(&file, before).unwrap();
    let mut bench = Bench::unsynced_in(root, &layers);
    bench.world(WorldChange::Incident(reset([incident])));
    let written = bench.run(suspected + 1..suspected + 60, leak);
    let states: Vec<_> = written.observed.iter().map(|o| o.state).collect();
    assert!(!states.contains(&ObservationState::Recovered), "{states:?}");
    assert_eq!(states.last(), Some(&ObservationState::Over), "{states:?}");
    assert!(written.created.is_empty(), "one episode, one incident");
}

#[test]
fn a_state_file_that_was_cut_off_begins_anew_and_recovers_nobody() {
    let layers = json!([watching("Enforce", restart())]);
    let mut bench = Bench::new(&layers);
    bench.run(0..300, leak);
    let incident = bench.engine.world.incidents.values().next().unwrap().clone();
    bench.close();
    let Bench { root, .. } = bench;
    let file = root.path().join("leaks.state");
    let bytes = std::fs::read(&file).unwrap();
    std::fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
    let mut bench = Bench::unsynced_in(root, &layers);
    // It runs already when this agent comes.
    let started = (clock().1 - SignedDuration::from_secs(300)).into();
    let container = ContainerFacts { name: "c".into(), id: "one".into(), started, ended: None };
    bench.world(WorldChange::Pod(Set::Upsert(PodFacts { containers: vec![container], ..super::pod("a") })));
    bench.world(WorldChange::Incident(reset([incident])));
    let written = bench.run(300..320, leak);
    assert!(written.observed.iter().all(|o| o.state == ObservationState::Unknown), "{:?}", written.observed);
}

#[test]
fn what_was_suspected_is_forgotten_with_the_section_that_asked() {
    let layers = json!([watching("Enforce", restart())]);
    let mut bench = Bench::new(&layers);
    assert_eq!(bench.run(0..300, leak).created.len(), 1);
    assert!(bench.suspects("a"));
    bench.plan(&json!([without(watching("Enforce", restart()))]), 2);
    let written = bench.run(300..302, leak);
    assert_eq!(written.observed.last().map(|o| o.state), Some(ObservationState::Recovered));
    bench.plan(&layers, 3);
    let written = bench.run(302..330, leak);
    assert!(written.created.is_empty() && !bench.suspects("a"), "it is judged by what is seen from now on");
    let written = bench.run(330..520, leak);
    assert_eq!(written.created.len(), 1);
    assert_eq!(written.created[0].spec.episode, 2);
}

#[test]
fn what_was_forgotten_is_not_brought_back_by_a_restart() {
    let layers = json!([watching("Enforce", restart())]);
    for closes in [true, false] {
        let mut bench = Bench::new(&layers);
        bench.run(0..300, leak);
        bench.keep();
        bench.plan(&json!([without(watching("Enforce", restart()))]), 2);
        bench.run(300..302, leak);
        if closes {
            bench.close();
        } else {
            bench.keep();
        }
        let incident = bench.engine.world.incidents.values().next().unwrap().clone();
        let Bench { root, .. } = bench;
        let mut bench = Bench::unsynced_in(root, &layers);
        bench.world(WorldChange::Incident(reset([incident])));
        let written = bench.run(302..330, leak);
        assert!(written.created.is_empty() && !bench.suspects("a"));
    }
}

#[test]
fn a_policy_that_leaves_a_pod_alone_from_now_on_has_its_suspicion_forgotten() {
    let layer = |team: &str| {
        let mut layer = watching("Enforce", restart());
        layer["rules"][0]["leaks"]["namespaces"] = json!({"matchLabels": {"team": team}});
        json!([layer])
    };
    let mut bench = Bench::new(&layer("a"));
    let labels = [("team".to_owned(), "a".to_owned())].into();
    let facts = NamespaceFacts { labels, ..NamespaceFacts::default() };
    bench.world(WorldChange::Namespace(reset([("team".to_owned(), facts)])));
    bench.run(0..300, leak);
    assert!(bench.suspects("a"));
    bench.plan(&layer("b"), 2);
    bench.run(300..302, leak);
    bench.plan(&layer("a"), 3);
    bench.run(302..310, leak);
    assert!(!bench.suspects("a"));
}

#[test]
fn a_rule_that_finds_nobody_for_a_while_forgets_nobody() {
    let mut bench = Bench::new(&json!([watching("Enforce", restart())]));
    bench.run(0..300, leak);
    assert!(bench.suspects("a"));
    // The devices are let go of, and come back.
    bench.engine.report(Report::Closed);
    TIME.set(TIME.get() + 3_000);
    bench.engine.tick(&[], None);
    let devices = vec![device("GPU-0", 0), device("GPU-1", 1)];
    bench.engine.report(Report::Opened { version: "580".into(), devices, limits: false });
    bench.run(303..304, leak);
    assert!(bench.suspects("a"));
    // For a moment it holds nothing there, and the kubelet says nothing of it.
    bench.run(304..315, |_| 0);
    bench.run(315..316, leak);
    assert!(bench.suspects("a"));
}

#[test]
fn pods_that_are_gone_are_not_brought_back_by_a_restart() {
    let layers = json!([watching("Enforce", restart())]);
    for closes in [true, false] {
        let mut bench = Bench::new(&layers);
        bench.run(0..300, leak);
        bench.keep();
        bench.world(WorldChange::Pod(reset([])));
        for _ in 0..4 {
            bench.pass(500, vec![sampled("GPU-0", vec![], 0)]);
            bench.engine.tick(&[], None);
        }
        if closes {
            bench.close();
        } else {
            bench.keep();
        }
        let Bench { root, .. } = bench;
        let mut bench = Bench::unsynced_in(root, &layers);
        bench.sync();
        let written = bench.run(302..330, leak);
        assert!(written.created.is_empty() && !bench.suspects("a"));
    }
}

#[test]
fn a_restart_ends_the_life_and_the_next_one_knows_of_it() {
    let mut bench = Bench::new(&json!([watching("Enforce", restart())]));
    bench.container("one", None);
    let written = bench.run(0..500, leak);
    let incident = written.created[0].clone();
    bench.decide(&incident, DecisionState::Verifying, "Acted");
    bench.container("two", Some(Ended { id: "one".into(), exit_code: 137, out_of_memory: false }));
    let written = bench.run(0..5, leak);
    assert_eq!(written.observed.last().map(|o| o.state), Some(ObservationState::Recovered));
    let written = bench.run(5..300, leak);
    let (_, found) = evidence(&written.created[0]);
    let profile = found.profile.unwrap();
    assert_eq!((profile.ended_badly, profile.lives), (1, 0));
    assert!(profile.last_slope_bytes_per_hour.is_some());
    assert_eq!(written.created[0].spec.episode, 2);
}

#[test]
fn an_incident_ends_with_its_pod_and_with_its_growth() {
    let mut bench = Bench::new(&json!([watching("Enforce", restart())]));
    bench.run(0..300, leak);
    bench.world(WorldChange::Pod(Set::Remove(super::pod("a"))));
    let written = bench.run(300..310, |_| 0);
    assert_eq!(written.observed.last().map(|o| o.state), Some(ObservationState::Gone));
    let mut bench = Bench::new(&json!([watching("Enforce", restart())]));
    bench.run(0..200, leak);
    let written = bench.run(200..1400, |_| leak(200));
    assert_eq!(written.observed.last().map(|o| o.state), Some(ObservationState::Recovered));
}

impl Bench {
    /// Samples `GPU-0` each half second for so many seconds, while `a` holds so many MiB on the host, of at
    /// most 64 GiB, and on the device.
    fn run_on_host(&mut self, seconds: std::ops::Range<u64>, mib: impl Fn(u64) -> (u64, u64)) -> Written {
        let mut written = Written::default();
        for half in seconds.start * 2..seconds.end * 2 {
            let (host, device) = mib(half / 2);
            let exact = Exact { held: Some(host * MI), limit: Some(64 * GI) };
            self.engine.host(vec![HostReading { pod: "a".into(), sample: None, exact: Some(exact) }]);
            self.mib(500, device);
            self.take(&mut written);
        }
        written
    }
}

#[test]
fn host_memory_that_leaks_is_told_at_the_pods_device_with_its_own_numbers() {
    let mut bench = Bench::new(&json!([watching("Enforce", restart())]));
    let volume = bench.volume("a");
    bench.mib(500, 1024);
    assert!(bench.engine.host_wants().iter().any(|want| &*want.pod == "a" && want.exact_every == Some(500)));
    let mut written = bench.run_on_host(0..560, |second| (leak(second), 1024));
    assert_eq!(written.created.len(), 1);
    let spec = &written.created[0].spec;
    let (evidence, found) = evidence(&written.created[0]);
    assert_eq!(found.memory, LeakMemory::Host);
    assert!(evidence.explanation.starts_with("host memory grows"), "{}", evidence.explanation);
    let held = evidence.used_bytes.unwrap();
    assert!(held > 8 << 30, "{held} is what it holds on the device");
    assert_eq!((evidence.limit_bytes, spec.proposed.frees_bytes), (Some(64 << 30), Some(held)));
    assert_eq!((evidence.due_bytes, &evidence.quota_rule, evidence.strength), (None, &None, None));
    assert!(written.stages().contains(&LeakStage::Act));
    let bytes: Vec<_> = written.observed.iter().map(|o| o.bytes.unwrap()).collect();
    assert!(bytes.iter().all(|bytes| *bytes >= held), "{bytes:?}");
    let pressure: Value = serde_json::from_slice(&std::fs::read(volume.join("pressure")).unwrap()).unwrap();
    assert_eq!((&pressure["device"], &pressure["limitBytes"]), (&json!("host"), &json!(64 * GI)));
    assert!(pressure["usedBytes"].as_i64().unwrap() > held);
    let text = bench.engine.render(None);
    for (memory, stage) in [("Device", 0), ("Host", 2)] {
        let line =
            format!("device=\"0\",memory=\"{memory}\",namespace=\"team\",node=\"n1\",pod=\"a\"}} {stage}\n");
        assert!(text.contains(&format!("highwater_pod_leak_stage{{{line}")), "{text}");
    }
    bench.world(WorldChange::Pod(Set::Upsert(super::pod("c"))));
    for _ in 0..10 {
        // Nobody says any more what it holds.
        bench.mib(1000, 1024);
        bench.take(&mut written);
    }
    let last = written.observed.last().unwrap();
    assert_eq!((last.state, last.bytes), (ObservationState::Unknown, None));
}

#[test]
fn an_event_about_host_memory_that_leaks_says_how_much_of_it_there_is() {
    let mut bench = Bench::new(&json!([watching("Enforce", restart())]));
    bench.volume("a");
    let mut notes = Vec::new();
    for half in 0..1120 {
        let exact = Exact { held: Some(leak(half / 2) * MI), limit: Some(64 * GI) };
        bench.engine.host(vec![HostReading { pod: "a".into(), sample: None, exact: Some(exact) }]);
        bench.mib(500, 1024);
        notes.extend(bench.jobs().into_iter().filter_map(|job| match job {
            Job::Tell(notice) => Some(format!("{notice:?}")),
            _ => None,
        }));
    }
    let note = notes.iter().find(|note| note.contains("MemoryPressure")).unwrap();
    assert!(note.contains("use less host memory") && note.contains("can come to 64.0 GiB"), "{note}");
    assert!(!note.contains("holds 1.0 GiB"), "that is on the device: {note}");
}

#[test]
fn an_incident_tells_of_the_memory_that_is_further() {
    let mut bench = Bench::new(&json!([watching("Enforce", restart())]));
    // The device is suspected first and stays far from its end; the host comes to it.
    let mut written = bench.run_on_host(0..200, |second| (1024, 8 * 1024 + second * 20));
    assert_eq!(written.created.len(), 1);
    let (evidence, found) = evidence(&written.created[0]);
    assert_eq!((found.memory, evidence.limit_bytes), (LeakMemory::Device, Some(60 << 30)));
    assert!(evidence.used_bytes > Some(8 << 30));
    let later = bench.run_on_host(200..760, |second| (leak(second - 200), 8 * 1024 + second * 20));
    assert!(later.created.is_empty(), "one episode, one incident");
    written.observed.extend(later.observed);
    for observed in &written.observed {
        let on_host = observed.leak.as_ref().unwrap().memory == LeakMemory::Host;
        assert!(!on_host || observed.bytes > Some(30 << 30), "what is on the device: {observed:?}");
    }
    let act = |o: &&Observation| o.leak.as_ref().unwrap().stage == LeakStage::Act;
    assert_eq!(written.observed.iter().find(act).unwrap().leak.as_ref().unwrap().memory, LeakMemory::Host);
}

#[test]
fn a_leak_of_host_memory_ends_with_its_pod_whatever_is_left_on_the_device() {
    let mut bench = Bench::new(&json!([watching("Enforce", restart())]));
    let written = bench.run_on_host(0..300, |second| (leak(second), 1024));
    assert_eq!(written.created.len(), 1);
    bench.world(WorldChange::Pod(Set::Remove(super::pod("a"))));
    let written = bench.run(300..303, |_| 1024);
    let last = written.observed.last().unwrap();
    assert_eq!((last.state, last.bytes), (ObservationState::Gone, Some(0)));
}

#[test]
fn an_endpoint_that_does_not_answer_is_told_once() {
    let mut bench = Bench::new(&json!([watching("Observe", restart())]));
    let mut facts = super::pod("a");
    facts.metrics = Some(MetricsEndpoint { port: 8000, path: "/metrics".into() });
    facts.pod_ip = Some(std::net::Ipv4Addr::new(10, 0, 0, 7).into());
    bench.world(WorldChange::Pod(Set::Upsert(facts)));
    bench.mib(500, 1024);
    let targets = bench.engine.framework_targets();
    assert_eq!((targets.len(), targets[0].port, targets[0].every), (1, 8000, 500));
    bench.jobs();
    for _ in 0..5 {
        let result = Err(Fault::Http(Failure::Status(500)));
        bench.engine.scraped(Scraped { target: targets[0].clone(), result });
    }
    assert_eq!(bench.jobs().iter().filter(|job| matches!(job, Job::Tell(_))).count(), 1);
    let text = bench.engine.render(None);
    assert!(text.contains("highwater_framework_scrapes_total{node=\"n1\",result=\"status\"} 5"), "{text}");
}
