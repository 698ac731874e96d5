//! Tests of what the engine holds pods to: guards, pools, the driver's limits, and how firmly.

use std::{cell::RefCell, fs, rc::Rc};

use highwater_crds::{BelowStrength, PoolTrouble};
use highwater_gpu::DeviceInfo;
use highwater_guard_abi::charge::Charge as Charged;
use highwater_policy::{
    ledger::{Charge, Holder},
    pod::{NamespaceFacts, PodFacts},
    quota::DEFAULT_CONTEXT,
};
use serde_json::{Value, json};

use super::{
    testing::{GI, MI, TOTAL, charge, device, object, reset, sampled},
    *,
};
use crate::{
    guard::Pages,
    keeper_protocol::{DeviceStatus, End, Released, Reserved, Status},
    limits::{Failure, Outcome},
    pod_resources::{Assignments, ContainerDevices},
    test_clock::{TIME, clock},
    world::{Change as Set, NodeFacts},
};

const DEVICE: &str = "GPU-00000000-0000-0000-0000-000000000001";

/// A node with one device of 80 GiB, a keeper, and a kubelet that gave the device to all pods.
struct Bench {
    engine: Engine,
    jobs: Rc<RefCell<Vec<Job>>>,
    orders: Rc<RefCell<Vec<Order>>>,
    root: Rc<tempfile::TempDir>,
    card: Card,
    pages: HashMap<String, Arc<Pages>>,
    /// What guards were told.
    told: Vec<(u64, ToGuard)>,
    limits: Vec<Task>,
    inspected: Vec<(String, u32)>,
    stored: Vec<String>,
    stood_down: Vec<bool>,
    keeper_answers: bool,
}

/// The device, and who has it.
#[derive(Default)]
struct Card {
    /// Pod, PID and bytes.
    held: Vec<(String, u32, u64)>,
    ballast: u64,
    /// Bytes of a process without a context.
    hidden: u64,
    /// What an earlier agent had the keeper keep of each pod.
    kept: HashMap<String, Arc<Pages>>,
}

impl Card {
    fn free(&self) -> u64 {
        TOTAL - self.ballast - self.hidden - self.held.iter().map(|(_, _, bytes)| bytes).sum::<u64>()
    }

    fn holds(&mut self, pod: &str, pid: u32, bytes: u64) {
        self.held.retain(|(_, held, _)| *held != pid);
        if bytes > 0 {
            self.held.push((pod.to_owned(), pid, bytes));
        }
    }
}

fn pod(name: &str, guard: GuardOptIn) -> PodFacts {
    PodFacts { guard, ..testing::pod(name) }
}

/// 8 GiB for each pod, of which 4 GiB are guaranteed.
fn layer(mode: &str, pool: &Value, minimum: &str) -> Value {
    let mut rule = json!({"product": "NVIDIA H200", "partition": "Whole", "quotaPolicies": ["serving"]});
    if !pool.is_null() {
        rule["pool"] = json!({"policy": "serving", "value": pool});
    }
    json!({"mode": mode, "rules": [rule], "quotas": [{"policy": "serving", "ownerKinds": ["ReplicaSet"],
        "value": {"rules": [{"name": "all", "pods": {}, "limit": "8Gi", "guarantee": "4Gi", "minimumStrength": minimum}],
                  "breach": {"holdMilliseconds": 0, "actions": [{"type": "Restart"}]}}}]})
}

fn pool() -> Value {
    json!({"sizePercent": 60, "maxPercent": 75, "startHoldSeconds": 0})
}

/// A pool of the whole device.
fn whole() -> Value {
    json!({"sizePercent": 99, "maxPercent": 99, "startHoldSeconds": 0})
}

fn enforced(pool: &Value) -> Value {
    json!([layer("Enforce", pool, "Observe")])
}

impl Bench {
    /// `a` and `b` opted in to the guard, `c` did not.
    fn new(layers: &Value) -> Self {
        let mut bench = Self::start(layers, Rc::new(tempfile::tempdir().unwrap()), Card::default());
        bench.settle();
        bench
    }

    fn start(layers: &Value, root: Rc<tempfile::TempDir>, card: Card) -> Self {
        let jobs = Rc::new(RefCell::new(Vec::new()));
        let orders = Rc::new(RefCell::new(Vec::new()));
        let (submitted, given) = (Rc::clone(&jobs), Rc::clone(&orders));
        let setup = Setup {
            node: "n1".into(),
            release_namespace: "highwater-system".into(),
            state_dir: root.path().into(),
            proc_root: "/proc".into(),
            keeper: true,
            cgroups: Ok(()),
            host_memory: true,
            grants: crate::metrics::grant_durations("n1").unwrap(),
        };
        let engine = Engine::new(
            clock,
            setup,
            Signals::new(root.path()),
            move |job| submitted.borrow_mut().push(job),
            move |order| given.borrow_mut().push(order),
        )
        .unwrap();
        let mut bench = Self {
            engine,
            jobs,
            orders,
            root,
            card,
            pages: HashMap::new(),
            told: Vec::new(),
            limits: Vec::new(),
            inspected: Vec::new(),
            stored: Vec::new(),
            stood_down: Vec::new(),
            keeper_answers: true,
        };
        bench.open(false);
        bench.world(WorldChange::Namespace(reset([("team".to_owned(), NamespaceFacts::default())])));
        bench.world(WorldChange::Node(reset([NodeFacts { uid: "node".into(), ..NodeFacts::default() }])));
        bench.plan(layers, 1);
        bench.world(WorldChange::Pod(reset([
            pod("a", GuardOptIn::Volume),
            pod("b", GuardOptIn::Volume),
            pod("c", GuardOptIn::No),
        ])));
        bench.world(WorldChange::Incident(reset([])));
        bench.assign(&["a", "b", "c"]);
        bench.up();
        bench.sample(10);
        while bench.obey() {}
        bench
    }

    fn open(&mut self, limits: bool) {
        let device = DeviceInfo { minor: Some(0), ..device(DEVICE, 0) };
        self.engine.report(Report::Opened { version: "580".into(), devices: vec![device], limits });
    }

    fn world(&mut self, change: WorldChange) {
        self.engine.world(change);
    }

    fn plan(&mut self, layers: &Value, generation: i64) {
        let object = object(layers, generation);
        self.world(WorldChange::Plan(Set::Upsert(object.clone())));
        self.world(WorldChange::Plan(reset([object])));
    }

    fn assign(&mut self, pods: &[&str]) {
        let mut assignments = Assignments::default();
        for pod in pods {
            let devices = ContainerDevices { container: "main".into(), devices: [DEVICE.to_owned()].into() };
            assignments.pods.entry("team".into()).or_default().insert((*pod).to_owned(), vec![devices]);
        }
        let at = Some(tokio::time::Instant::now());
        self.engine.resources(Snapshot { assignments: Arc::new(assignments), at });
    }

    fn up(&mut self) {
        let device =
            DeviceStatus { uuid: DEVICE.into(), ballast_bytes: self.card.ballast, ..DeviceStatus::default() };
        self.engine.keeper(Heard::Up(Status { devices: vec![device], ..Status::default() }));
    }

    /// One sample after `after` milliseconds, without anybody doing anything.
    fn sample(&mut self, after: u64) {
        TIME.set(TIME.get() + after);
        let (at, wall) = clock();
        let charge = |(pod, pid, bytes): &(String, u32, u64)| match pod.as_str() {
            "foreign" => Charge { pid: *pid, bytes: Some(*bytes), holder: Holder::Foreign },
            pod => charge(pod, *pid, *bytes),
        };
        let charges: Vec<Charge> = self.card.held.iter().map(charge).collect();
        let devices = vec![sampled(DEVICE, charges, self.card.ballast + self.card.hidden)];
        let pass = Pass { at, wall, late: Duration::ZERO, took: Duration::ZERO, devices };
        self.engine.report(Report::Pass(pass));
    }

    /// Does what was ordered. Returns whether anything was.
    fn obey(&mut self) -> bool {
        let orders = self.orders.take();
        let any = !orders.is_empty();
        for order in orders {
            match order {
                Order::Guard(guard::Order::Serve { pod, pages, .. }) => {
                    self.pages.insert(pod.to_string(), pages);
                }
                Order::Guard(guard::Order::Leave { pod }) => {
                    self.pages.remove(&*pod);
                }
                Order::Guard(guard::Order::Tell { connection, what }) => self.told.push((connection, what)),
                Order::Guard(guard::Order::Correct { pod, slot, device, bytes, .. }) => {
                    self.pages[&*pod].usage.correct(slot, device, bytes).unwrap();
                }
                Order::Guard(guard::Order::Inspect { pod, pid }) => {
                    self.inspected.push((pod.to_string(), pid));
                }
                Order::Keeper(order) if self.keeper_answers => self.keep(order),
                Order::Limit(task) => self.limits.push(task),
                Order::Keeper(_)
                | Order::Guard(guard::Order::Trim { .. })
                | Order::Hook(_)
                | Order::Restart(_)
                | Order::Survey(_)
                | Order::Keep(_) => {}
            }
        }
        any
    }

    fn keep(&mut self, order: link::Order) {
        match order {
            link::Order::Reserve { device, bytes, keep_free } => {
                let taken = bytes.min(self.card.free().saturating_sub(keep_free));
                self.card.ballast += taken;
                let reserved = Reserved {
                    bytes: taken,
                    ballast_bytes: self.card.ballast,
                    end: if taken == bytes { End::Complete } else { End::KeepFree },
                    message: None,
                    free_bytes: None,
                };
                self.engine.keeper(Heard::Reserved { device, result: Ok(reserved) });
            }
            link::Order::Release { device, bytes } => {
                let bytes = bytes.min(self.card.ballast);
                self.card.ballast -= bytes;
                let released = Released { bytes, ballast_bytes: self.card.ballast };
                self.engine.keeper(Heard::Released { device, result: Ok(released) });
            }
            link::Order::Fetch { pod } => {
                let kept =
                    self.card.kept.get(&*pod).map(|pages| pages.kept().map(|fd| fd.try_clone_to_owned()));
                let kept = kept.into_iter().flatten().collect::<Result<_, _>>().unwrap();
                self.engine.keeper(Heard::Fetched { pod, kept });
            }
            link::Order::Store { pod, .. } => self.stored.push(pod.to_string()),
            link::Order::StandDown(on) => self.stood_down.push(on),
            link::Order::Warm { .. }
            | link::Order::Sweep { .. }
            | link::Order::Park(_)
            | link::Order::Restore { .. } => {}
        }
    }

    /// Samples until nobody has anything to do any more.
    fn settle(&mut self) {
        for _ in 0..80 {
            self.sample(20);
            while self.obey() {}
            self.engine.tick(&[], None);
        }
    }

    /// A process of the pod says Hello to its guard.
    fn join(&mut self, pod: &str, pid: u32) -> Guest {
        let pages = Arc::clone(&self.pages[pod]);
        let slot = pages.usage.claim_any(u64::from(pid)).unwrap();
        let joined = News::Joined { pod: pod.into(), pid, slot, comm: "python".into() };
        self.engine.guards(joined);
        Guest { pod: pod.into(), pages, slot, pid }
    }

    /// A guard asks for bytes in total.
    fn want(&mut self, guest: &Guest, connection: u64, bytes: u64, wait: u64) {
        let pod = guest.pod.as_str().into();
        self.engine.guards(News::Wants(Want { pod, connection, device: 0, ticket: 1, bytes, wait }));
        while self.obey() {}
    }

    /// How guards were answered.
    fn answers(&mut self) -> Vec<bool> {
        let told = std::mem::take(&mut self.told);
        told.into_iter().map(|(_, what)| matches!(what, ToGuard::Granted { .. })).collect()
    }

    fn strength(&self, pod: &str) -> strength::Verdict {
        let tenants = &self.engine.devices[0].1.tenants;
        tenants.iter().find(|tenant| *tenant.pod.uid == *pod).unwrap().strength
    }

    fn notices(&self) -> Vec<String> {
        let jobs = self.jobs.take();
        jobs.iter()
            .filter_map(|job| if let Job::Tell(notice) = job { Some(format!("{notice:?}")) } else { None })
            .collect()
    }

    fn facts(&self) -> Facts {
        self.engine.facts(Watch::On)
    }
}

/// A process with a guard.
struct Guest {
    pod: String,
    pages: Arc<Pages>,
    slot: usize,
    pid: u32,
}

impl Guest {
    fn quota(&self) -> DeviceQuota {
        self.pages.quota.device(0).unwrap()
    }

    fn charge(&self, bytes: u64) -> Charged {
        let quota = self.quota();
        self.pages.usage.charge(self.slot, 0, bytes, quota.limit, quota.granted)
    }

    fn charged(&self) -> u64 {
        self.pages.usage.charged(0)
    }

    /// Charges a context and so many bytes, and has them.
    fn takes(&self, bench: &mut Bench, bytes: u64) {
        assert_eq!(self.charge(bytes), Charged::Granted);
        let held = self.pages.usage.held(self.slot, 0);
        bench.card.holds(&self.pod, self.pid, held);
    }
}

#[test]
fn a_page_says_what_the_enforced_quota_is_and_follows_it_within_a_round() {
    let mut bench = Bench::new(&enforced(&Value::Null));
    let guest = bench.join("a", 1);
    let quota = guest.quota();
    assert_eq!((quota.limit, quota.granted, quota.context), (8 * GI, 8 * GI, DEFAULT_CONTEXT));
    assert_eq!((quota.total, quota.free), (80 * GI, 8 * GI));
    assert_eq!(quota.uuid[15], 1);
    // A quota that is edited live.
    let mut edited = layer("Enforce", &Value::Null, "Observe");
    edited["quotas"][0]["value"]["rules"][0]["limit"] = json!("5Gi");
    bench.plan(&json!([edited]), 2);
    bench.sample(100);
    assert_eq!((guest.quota().limit, guest.quota().granted), (5 * GI, 5 * GI));
    // A quota that binds nobody is none.
    bench.plan(&json!([layer("DryRun", &Value::Null, "Observe")]), 3);
    bench.sample(100);
    assert_eq!(guest.quota().limit, 80 * GI);
    assert_eq!(bench.strength("a"), (Strength::Observe, Some(StrengthReason::NoPlan)));
    // Nor is one that outlived its life.
    bench.plan(&enforced(&Value::Null), 4);
    bench.sample(100);
    assert_eq!(guest.quota().limit, 8 * GI);
    TIME.set(TIME.get() + 601_000);
    bench.engine.tick(&[], None);
    bench.sample(100);
    assert_eq!(guest.quota().limit, 80 * GI);
}

#[test]
fn a_pod_that_goes_is_served_no_longer_and_one_that_comes_is_and_is_kept() {
    let mut bench = Bench::new(&enforced(&Value::Null));
    bench.stored.sort();
    assert_eq!(bench.stored, ["a", "b"]);
    bench.world(WorldChange::Pod(Set::Remove(pod("a", GuardOptIn::Volume))));
    bench.world(WorldChange::Pod(Set::Upsert(pod("d", GuardOptIn::Asked))));
    bench.settle();
    let mut served: Vec<_> = bench.pages.keys().map(String::as_str).collect();
    served.sort_unstable();
    assert_eq!(served, ["b", "d"]);
    // A keeper that came back may have lost what it kept.
    bench.stored.clear();
    bench.engine.keeper(Heard::Away("gone".into()));
    bench.up();
    bench.settle();
    assert_eq!(bench.stored, ["b", "d"]);
}

#[test]
fn without_a_keeper_pages_are_made_all_the_same() {
    let mut bench = Bench::new(&enforced(&Value::Null));
    bench.engine.keeper(Heard::Away("gone".into()));
    bench.keeper_answers = false;
    bench.world(WorldChange::Pod(Set::Upsert(pod("d", GuardOptIn::Volume))));
    bench.settle();
    assert!(!bench.pages.contains_key("d"), "one that is on its way may have those of an earlier agent");
    bench.sample(3_000);
    bench.settle();
    assert!(bench.pages.contains_key("d"));
}

#[test]
fn what_a_context_takes_is_learned_and_charges_are_corrected_to_the_drivers_numbers() {
    let mut bench = Bench::new(&enforced(&Value::Null));
    let guest = bench.join("a", 1);
    assert_eq!(guest.charge(DEFAULT_CONTEXT), Charged::Granted);
    bench.card.holds("a", 1, 400 * MI);
    bench.sample(100);
    bench.sample(100);
    assert_eq!(bench.engine.wards.context(DEVICE), None, "it may still be in the making");
    bench.settle();
    assert_eq!(bench.engine.wards.context(DEVICE), Some(400 * MI));
    assert_eq!(guest.charged(), 400 * MI, "it was charged too much");
    assert_eq!(guest.quota().context, 400 * MI);
    let mib = |n: i64| n * i64::try_from(MI).unwrap();
    let view = |bench: &Bench| bench.engine.wards.view("a", DEVICE).unwrap().clone();
    let seen = view(&bench);
    assert_eq!((seen.charged, seen.context, seen.driver), (DEFAULT_CONTEXT, mib(-118), 0));
    // A guard follows the estimate with its next charge. The driver takes more by itself.
    guest.pages.usage.uncharge(guest.slot, 0, 118 * MI);
    assert_eq!(guest.charge(GI), Charged::Granted);
    bench.card.holds("a", 1, GI + 470 * MI);
    bench.settle();
    assert_eq!(guest.charged(), GI + 470 * MI);
    let seen = view(&bench);
    assert_eq!((seen.charged, seen.context, seen.driver), (GI + 400 * MI, 0, mib(70)));
    assert_eq!((seen.outside, seen.processes, seen.guarded), (0, 1, Guarded::All));
    // What one process loads besides makes no context larger.
    let other = bench.join("b", 2);
    assert_eq!(other.charge(other.quota().context), Charged::Granted);
    bench.card.holds("b", 2, 700 * MI);
    bench.settle();
    assert_eq!(bench.engine.wards.context(DEVICE), Some(400 * MI));
    assert_eq!(other.charged(), 700 * MI, "but it is charged to it");
    // Managed memory is in no list of the driver's: that it is charged stands.
    assert_eq!(guest.charge(2 * GI), Charged::Granted);
    bench.settle();
    assert_eq!(guest.charged(), 3 * GI + 400 * MI);
    let text = bench.engine.render(None);
    let series = |part: &str, value: i64| {
        format!(
            "highwater_pod_memory_difference_bytes{{device=\"0\",namespace=\"team\",node=\"n1\",part=\"{part}\",pod=\"a\"}} {value}\n"
        )
    };
    assert!(text.contains(&series("context", 0)), "{text}");
    assert!(text.contains(&series("driver", mib(70 - 2048))), "what is charged and not listed");
    assert!(text.contains(&series("outside_guard", 0)));
    assert_eq!(bench.facts().devices[0].model.context, Some(ByteSize(448 * MI)), "in steps of 64 MiB");
}

#[test]
fn b05_who_avoids_the_guard_is_named_within_a_sample_and_charged() {
    let mut bench = Bench::new(&json!([layer("Enforce", &Value::Null, "Guard")]));
    let guest = bench.join("a", 1);
    guest.takes(&mut bench, 2 * GI);
    bench.settle();
    assert_eq!(bench.strength("a"), (Strength::Guard, Some(StrengthReason::NoKernelLimits)));
    bench.notices();
    bench.card.holds("a", 7, 3 * GI);
    bench.sample(100);
    assert_eq!(bench.strength("a"), (Strength::Observe, Some(StrengthReason::OutsideGuard)));
    assert_eq!(bench.strength("b").0, Strength::Guard, "its neighbour's holds on");
    assert!(bench.notices().is_empty(), "it is looked at first");
    bench.obey();
    assert_eq!(bench.inspected, [("a".to_owned(), 7)]);
    let found = News::Inspected { pod: "a".into(), pid: 7, comm: "miner".into(), other_root: false };
    bench.engine.guards(found);
    bench.sample(100);
    let notices = bench.notices();
    assert!(
        notices.len() == 1 && notices[0].contains("process miner (7)") && notices[0].contains("StrengthFell"),
        "{notices:?}"
    );
    assert_eq!(guest.charged(), 5 * GI, "the quota counts it");
    assert!(matches!(guest.charge(4 * GI), Charged::OverLimit { .. }));
    // What is stored follows when it lasts, and then once.
    let below = |bench: &Bench| bench.facts().below.into_iter().find(|below| below.name == "a");
    assert_eq!(below(&bench), None);
    for _ in 0..40 {
        bench.sample(100);
    }
    let BelowStrength { asked, active, reason, .. } = below(&bench).unwrap();
    assert_eq!((asked, active, reason), (Strength::Guard, Strength::Observe, StrengthReason::OutsideGuard));
    assert!(bench.notices().is_empty(), "told once");
    assert!(bench.engine.render(None).contains("highwater_pod_strength_below_minimum{device=\"0\",namespace=\"team\",node=\"n1\",pod=\"a\",reason=\"OutsideGuard\"} 1"));
    // It ends.
    bench.card.holds("a", 7, 0);
    bench.settle();
    assert_eq!(bench.strength("a").0, Strength::Guard);
    assert_eq!(guest.charged(), 2 * GI);
}

#[test]
fn a_pod_none_of_whose_processes_has_a_guard_says_so() {
    let mut bench = Bench::new(&enforced(&Value::Null));
    bench.card.holds("a", 7, GI);
    bench.sample(100);
    assert_eq!(bench.strength("a").1, Some(StrengthReason::GuardNotConnected));
    bench.engine.guards(News::Incompatible { pod: "a".into(), pid: 7 });
    bench.sample(100);
    assert_eq!(bench.strength("a").1, Some(StrengthReason::GuardVersion));
    let _guest = bench.join("b", 8);
    bench.card.holds("b", 9, GI);
    bench.sample(100);
    bench.obey();
    bench.engine.guards(News::Inspected { pod: "b".into(), pid: 9, comm: "x".into(), other_root: true });
    bench.sample(100);
    assert_eq!(bench.strength("b").1, Some(StrengthReason::OtherRoot));
    // Nobody opted in here.
    assert_eq!(bench.strength("c"), (Strength::Observe, Some(StrengthReason::NoPool)));
}

#[test]
fn b06_a_pod_whose_programs_run_without_the_guard_that_it_has_is_below_its_strength_and_told() {
    let mut bench = Bench::new(&json!([layer("Enforce", &Value::Null, "Guard")]));
    bench.settle();
    bench.notices();
    // As where the loader could not read the guard: memory in the driver's list, and nobody says hello.
    bench.card.holds("a", 7, GI);
    bench.sample(100);
    assert_eq!(bench.strength("a"), (Strength::Observe, Some(StrengthReason::GuardNotConnected)));
    let found = News::Inspected { pod: "a".into(), pid: 7, comm: "server".into(), other_root: false };
    bench.engine.guards(found);
    for _ in 0..40 {
        bench.sample(100);
    }
    let notices = bench.notices();
    assert!(notices.len() == 1 && notices[0].contains("no process of the pod has a guard"), "{notices:?}");
    let below = bench.facts().below.into_iter().find(|below| below.name == "a").unwrap();
    assert_eq!((below.asked, below.active), (Strength::Guard, Strength::Observe));
    assert_eq!(below.reason, StrengthReason::GuardNotConnected);
    let series = "highwater_pod_strength_below_minimum{device=\"0\",namespace=\"team\",node=\"n1\",pod=\"a\",reason=\"GuardNotConnected\"} 1";
    assert!(bench.engine.render(None).contains(series));
}

#[test]
fn a_process_that_goes_round_its_own_guard_is_found() {
    let mut bench = Bench::new(&enforced(&Value::Null));
    let guest = bench.join("a", 1);
    guest.takes(&mut bench, 2 * GI);
    bench.settle();
    // By a private copy of the driver's library, in a process that has a guard.
    bench.card.holds("a", 1, 7 * GI);
    bench.sample(100);
    bench.sample(100);
    assert_eq!(bench.strength("a").1, Some(StrengthReason::OutsideGuard));
    bench.settle();
    assert_eq!(guest.charged(), 7 * GI);
    let notices = bench.notices();
    assert!(notices.iter().any(|notice| notice.contains("process python (1)")), "{notices:?}");
    // One that never charged anything at all.
    let _other = bench.join("b", 2);
    bench.card.holds("b", 2, 100 * MI);
    bench.sample(100);
    bench.sample(100);
    assert_eq!(bench.strength("b").1, Some(StrengthReason::OutsideGuard));
}

#[test]
fn memory_that_a_dying_process_still_holds_is_nobodys_offence() {
    let mut bench = Bench::new(&enforced(&Value::Null));
    let guest = bench.join("a", 1);
    guest.takes(&mut bench, 2 * GI);
    bench.settle();
    // Its end is seen before the driver has freed its memory, and one frees just before it is listed.
    guest.pages.usage.reap(guest.slot).unwrap();
    bench.engine.guards(News::Left { pod: "a".into(), pid: 1, slot: guest.slot });
    bench.sample(100);
    assert_eq!(bench.strength("a").0, Strength::Guard);
    bench.card.holds("a", 1, 0);
    bench.settle();
    assert!(bench.inspected.is_empty());
    assert_eq!(guest.charged(), 0);
}

#[test]
fn what_weakens_a_guard_has_its_name() {
    use highwater_guard_abi::wire::{STRENGTH_MPS, STRENGTH_STOPPED, STRENGTH_UNCOVERED};
    let mut bench = Bench::new(&enforced(&Value::Null));
    let guest = bench.join("a", 1);
    guest.takes(&mut bench, 2 * GI);
    for (flags, reason) in [
        (STRENGTH_UNCOVERED, StrengthReason::Uncovered),
        (STRENGTH_UNCOVERED | STRENGTH_MPS, StrengthReason::Mps),
        (STRENGTH_MPS | STRENGTH_STOPPED, StrengthReason::Mps),
        (STRENGTH_STOPPED, StrengthReason::UnknownDriver),
        (0, StrengthReason::NoKernelLimits),
    ] {
        bench.engine.guards(News::Weakness { pod: "a".into(), pid: 1, flags });
        bench.sample(100);
        assert_eq!(bench.strength("a").1, Some(reason), "{flags}");
    }
    bench.notices();
    for _ in 0..2 {
        bench.engine.guards(News::Stranger { pod: "a".into(), pid: 9, comm: "spy".into() });
    }
    let notices = bench.notices();
    assert_eq!(notices.len(), 1, "once: {notices:?}");
    assert_eq!(bench.strength("a").0, Strength::Guard);
}

#[test]
fn a_guard_that_does_not_cover_all_says_so_wherever_strength_is_told() {
    use highwater_guard_abi::wire::STRENGTH_UNCOVERED;
    let mut bench = Bench::new(&json!([layer("Enforce", &Value::Null, "Guard")]));
    let guest = bench.join("a", 1);
    guest.takes(&mut bench, 2 * GI);
    bench.settle();
    bench.engine.guards(News::Weakness { pod: "a".into(), pid: 1, flags: STRENGTH_UNCOVERED });
    for _ in 0..40 {
        bench.sample(100);
    }
    // It is held to its quota as far as anybody sees, so it is not below what its rule asks for.
    assert_eq!(bench.strength("a"), (Strength::Guard, Some(StrengthReason::Uncovered)));
    let facts = bench.facts();
    assert_eq!(
        (facts.uncovered, facts.below.iter().any(|pod| pod.name == "a")),
        (vec!["team/a".into()], false)
    );
    let text = bench.engine.render(None);
    let series = "highwater_pod_strength_info{device=\"0\",namespace=\"team\",node=\"n1\",pod=\"a\",reason=\"Uncovered\",strength=\"Guard\"} 1";
    assert!(text.contains(series), "{text}");
    // What it takes that way is found all the same.
    bench.card.holds("a", 1, 7 * GI);
    bench.sample(100);
    bench.sample(100);
    assert_eq!(bench.strength("a"), (Strength::Observe, Some(StrengthReason::OutsideGuard)));
}

#[test]
fn a_page_that_was_written_past_its_guard_is_told() {
    use std::{fs::File, os::unix::fs::FileExt};
    /// Where a page has what the first process holds on the first device.
    const HELD: u64 = 192 + 576 + 64;
    let mut bench = Bench::new(&enforced(&Value::Null));
    let guest = bench.join("a", 1);
    guest.takes(&mut bench, 2 * GI);
    bench.settle();
    let told = |bench: &mut Bench, bytes: u64| {
        bench.sample(10_000);
        let series = format!(
            "highwater_pod_guard_misaccounted_bytes{{device=\"0\",namespace=\"team\",node=\"n1\",pod=\"a\"}} {bytes}\n"
        );
        let text = bench.engine.render(None);
        assert!(text.contains(&series), "{text}");
        bench.notices().into_iter().filter(|notice| notice.contains("GuardPageFalsified")).count()
    };
    assert_eq!(told(&mut bench, 0), 0);
    assert_eq!(guest.slot, 1);
    let page = File::from(guest.pages.kept()[0].try_clone_to_owned().unwrap());
    page.write_all_at(&0u64.to_ne_bytes(), HELD).unwrap();
    assert_eq!(guest.pages.usage.held(guest.slot, 0), 0);
    assert_eq!(told(&mut bench, 0), 0, "it may be looked at amid a change");
    assert_eq!(told(&mut bench, 2 * GI), 1);
    assert_eq!(told(&mut bench, 2 * GI), 0, "once");
}

#[test]
fn b17_a_quota_below_a_context_is_told() {
    let mut small = layer("Enforce", &Value::Null, "Observe");
    small["quotas"][0]["value"]["rules"][0]["limit"] = json!("512Mi");
    small["quotas"][0]["value"]["rules"][0]["guarantee"] = json!("512Mi");
    let bench = Bench::new(&json!([small]));
    let notices = bench.notices();
    assert_eq!(
        notices.iter().filter(|notice| notice.contains("QuotaBelowContext")).count(),
        2,
        "{notices:?}"
    );
}

#[test]
fn a_pool_is_held_and_what_is_held_is_nobodys_use() {
    let bench = Bench::new(&enforced(&pool()));
    let ledger = &bench.engine.devices[0].0.ledger;
    // 60 % of 80 GiB, of which c, which has no guard, was given its limit.
    assert_eq!(bench.card.ballast / GI, 40);
    assert_eq!((ledger.ballast, ledger.unexplained), (bench.card.ballast, Some(0)));
    assert_eq!(ledger.level.unwrap().used, 0);
    let report = bench.engine.pools.report(DEVICE).unwrap();
    assert_eq!((report.size, report.granted, report.short), (48 * GI, 8 * GI, 0));
    let text = bench.engine.render(None);
    for series in [
        "highwater_keeper_up{node=\"n1\"} 1".to_owned(),
        format!("highwater_pool_size_bytes{{device=\"0\",node=\"n1\"}} {}", 48 * GI),
        format!("highwater_pool_ballast_bytes{{device=\"0\",node=\"n1\"}} {}", bench.card.ballast),
        "highwater_pool_short_bytes{device=\"0\",node=\"n1\"} 0".to_owned(),
        format!(
            "highwater_pool_granted_bytes{{device=\"0\",namespace=\"team\",node=\"n1\",pod=\"c\"}} {}",
            8 * GI
        ),
    ] {
        assert!(text.contains(&series), "{series} in\n{text}");
    }
    let journal = fs::read_to_string(bench.root.path().join("grants.json")).unwrap();
    assert!(journal.contains("\"pod\":\"c\""), "{journal}");
}

#[test]
fn a_guard_is_granted_what_it_asks_for_once_that_is_written_down_and_free() {
    let mut bench = Bench::new(&enforced(&pool()));
    let guest = bench.join("a", 1);
    assert_eq!(guest.quota().limit, 8 * GI);
    let Charged::NeedsGrant { wanted_total } = guest.charge(3 * GI) else { panic!("{:?}", guest.quota()) };
    let before = bench.card.ballast;
    bench.want(&guest, 5, wanted_total, 0);
    assert_eq!(bench.answers(), [true]);
    assert!(bench.card.ballast < before && guest.quota().granted >= 3 * GI);
    let journal = fs::read_to_string(bench.root.path().join("grants.json")).unwrap();
    assert!(journal.contains("\"pod\":\"a\""), "{journal}");
    guest.takes(&mut bench, 3 * GI);
    bench.settle();
    assert_eq!(bench.engine.devices[0].0.ledger.unexplained, Some(0));
    // Above its limit nothing is granted.
    bench.want(&guest, 5, 9 * GI, 0);
    assert_eq!(bench.answers(), [false]);
}

#[test]
fn limits_may_add_up_to_more_than_the_pool_and_who_comes_late_waits_as_policy_says() {
    let mut small = pool();
    small["sizePercent"] = json!(20);
    let mut layers = enforced(&small);
    layers[0]["rules"][0]["pool"]["value"]["allocationWaitSeconds"] = json!(3);
    let mut bench = Bench::new(&layers);
    let (a, b) = (bench.join("a", 1), bench.join("b", 2));
    // 16 GiB: c has 8, a and b are owed 4 each.
    bench.want(&a, 1, 4 * GI, 0);
    bench.want(&b, 2, 4 * GI, 0);
    bench.settle();
    assert_eq!(bench.answers(), [true, true]);
    a.takes(&mut bench, 4 * GI);
    b.takes(&mut bench, 4 * GI);
    bench.settle();
    bench.want(&b, 2, 5 * GI, 60_000);
    bench.settle();
    assert!(bench.answers().is_empty(), "it waits");
    let deadline = bench.engine.deadline().unwrap();
    assert!(deadline <= Duration::from_secs(3), "but no longer than policy lets it: {deadline:?}");
    TIME.set(TIME.get() + 3_000);
    bench.engine.due();
    bench.obey();
    assert_eq!(bench.answers(), [false]);
    // Nobody is answered who is not there any more.
    bench.want(&b, 3, 5 * GI, 3_000);
    bench.engine.guards(News::Gone { connection: 3 });
    TIME.set(TIME.get() + 5_000);
    bench.engine.due();
    bench.settle();
    assert!(bench.answers().is_empty());
    // What another gives back is had.
    bench.want(&b, 4, 5 * GI, 3_000);
    bench.world(WorldChange::Pod(Set::Remove(pod("a", GuardOptIn::Volume))));
    bench.card.holds("a", 1, 0);
    bench.assign(&["b", "c"]);
    bench.settle();
    assert_eq!(bench.answers(), [true]);
}

#[test]
fn what_cannot_be_written_down_is_not_granted() {
    let mut bench = Bench::new(&enforced(&pool()));
    let guest = bench.join("a", 1);
    fs::create_dir(bench.root.path().join("grants.unfinished")).unwrap();
    let (ballast, granted) = (bench.card.ballast, guest.quota().granted);
    bench.want(&guest, 5, 3 * GI, 0);
    assert_eq!(bench.answers(), [false]);
    assert_eq!((bench.card.ballast, guest.quota().granted), (ballast, granted));
    fs::remove_dir(bench.root.path().join("grants.unfinished")).unwrap();
    bench.settle();
    bench.want(&guest, 5, 3 * GI, 0);
    bench.settle();
    assert_eq!(bench.answers(), [true]);
}

#[test]
fn an_agent_that_starts_again_goes_on_with_the_grants_and_moves_no_ballast() {
    let mut bench = Bench::new(&enforced(&pool()));
    let guest = bench.join("a", 1);
    bench.want(&guest, 5, 3 * GI, 0);
    guest.takes(&mut bench, 2 * GI);
    bench.settle();
    let granted = guest.quota().granted;
    let Bench { root, card, .. } = bench;
    let (ballast, free) = (card.ballast, card.free());
    let mut bench = Bench::start(&enforced(&pool()), root, card);
    let guest = bench.join("a", 1);
    assert_eq!(guest.charge(2 * GI), Charged::Granted);
    assert_eq!(guest.quota().granted, granted);
    bench.settle();
    assert_eq!((bench.card.ballast, bench.card.free()), (ballast, free));
    assert_eq!(guest.quota().granted, granted);
}

#[test]
fn b09_devices_keep_the_places_by_which_an_earlier_agents_processes_charge() {
    let bench = Bench::new(&enforced(&Value::Null));
    let other = [7; 16];
    let quota = bench.pages["a"].quota.device(0).unwrap();
    // The kubelet had named another device first, which is away by now.
    let earlier = Pages::create().unwrap();
    earlier.quota.set(0, &DeviceQuota { uuid: other, ..quota });
    earlier.quota.set(1, &quota);
    let slot = earlier.usage.claim_any(1).unwrap();
    assert_eq!(earlier.usage.charge(slot, 1, 2 * GI, u64::MAX, u64::MAX), Charged::Granted);
    let Bench { root, mut card, .. } = bench;
    card.kept.insert("a".into(), Arc::new(earlier));
    card.holds("a", 1, 2 * GI);
    let mut bench = Bench::start(&enforced(&Value::Null), root, card);
    bench.engine.guards(News::Joined { pod: "a".into(), pid: 1, slot, comm: "python".into() });
    bench.settle();
    let page = &bench.pages["a"].quota;
    let places: Vec<_> = (0..page.len()).map(|ordinal| page.device(ordinal).unwrap().uuid).collect();
    assert_eq!(places, [other, quota.uuid]);
    assert_eq!(page.device(1).unwrap().limit, 8 * GI);
    assert_eq!(bench.strength("a").0, Strength::Guard);
    let view = bench.engine.wards.view("a", DEVICE).unwrap();
    assert_eq!((view.charged, view.outside), (2 * GI, 0));
}

#[test]
fn a_guard_may_ask_before_the_kubelet_says_that_its_pod_has_the_device() {
    let mut bench = Bench::new(&enforced(&pool()));
    bench.world(WorldChange::Pod(Set::Upsert(pod("d", GuardOptIn::Volume))));
    bench.settle();
    let guest = bench.join("d", 4);
    assert_eq!((guest.quota().limit, guest.quota().granted), (8 * GI, 0));
    bench.want(&guest, 9, GI, 0);
    assert_eq!(bench.answers(), [true]);
    assert!(guest.quota().granted >= GI);
}

#[test]
fn without_a_pool_there_is_nothing_to_ask_for() {
    let mut bench = Bench::new(&enforced(&Value::Null));
    let guest = bench.join("a", 1);
    bench.want(&guest, 9, 8 * GI, 0);
    bench.want(&guest, 9, 9 * GI, 0);
    assert_eq!(bench.answers(), [true, false]);
    let unknown = Want { pod: "a".into(), connection: 1, device: 7, ticket: 1, bytes: 1, wait: 0 };
    bench.engine.guards(News::Wants(unknown));
    bench.obey();
    assert_eq!(bench.answers(), [false]);
}

#[test]
fn a_pool_that_is_taken_away_is_given_back() {
    let mut bench = Bench::new(&enforced(&pool()));
    let guest = bench.join("a", 1);
    bench.plan(&enforced(&Value::Null), 2);
    bench.settle();
    assert_eq!((bench.card.ballast, guest.quota().granted), (0, 8 * GI));
    assert_eq!(bench.strength("c").1, Some(StrengthReason::NoPool));
}

#[test]
fn a_keeper_that_goes_takes_nothing_from_anybody_and_that_is_told_when_it_lasts() {
    let mut bench = Bench::new(&enforced(&whole()));
    let guest = bench.join("a", 1);
    bench.want(&guest, 5, 3 * GI, 0);
    guest.takes(&mut bench, 3 * GI);
    bench.settle();
    assert_eq!(bench.strength("c"), (Strength::Reservation, Some(StrengthReason::NotOptedIn)));
    let granted = guest.quota().granted;
    // It crashed: what it held is free.
    bench.engine.keeper(Heard::Away("gone".into()));
    bench.keeper_answers = false;
    bench.card.ballast = 0;
    bench.settle();
    assert_eq!(guest.quota().granted, granted);
    assert_eq!(bench.strength("c"), (Strength::Observe, Some(StrengthReason::KeeperAway)));
    assert_eq!(bench.strength("a").0, Strength::Guard, "its guard does without");
    assert_eq!(bench.facts().devices[0].pool.unwrap().trouble, None);
    for _ in 0..110 {
        bench.sample(100);
    }
    assert_eq!(bench.facts().devices[0].pool.unwrap().trouble, Some(PoolTrouble::KeeperAway));
    // It is back, and takes what is free without refusing anybody what was granted.
    bench.keeper_answers = true;
    bench.up();
    bench.settle();
    assert!(bench.card.ballast >= 30 * GI, "{}", bench.card.ballast);
    assert!(bench.card.free() >= granted - 3 * GI);
    assert_eq!(guest.quota().granted, granted);
    assert_eq!(bench.strength("c").0, Strength::Reservation);
}

#[test]
fn a_keeper_that_is_busy_when_it_is_met_holds_what_it_says() {
    let mut bench = Bench::new(&enforced(&pool()));
    let busy = |bench: &mut Bench, ballast_bytes| {
        let device =
            DeviceStatus { uuid: DEVICE.into(), ballast_bytes, busy: true, ..DeviceStatus::default() };
        bench.engine.keeper(Heard::Up(Status { devices: vec![device], ..Status::default() }));
    };
    bench.engine.keeper(Heard::Away("gone".into()));
    bench.card.ballast = 4 * GI;
    busy(&mut bench, 4 * GI);
    bench.sample(20);
    assert_eq!(bench.engine.pools.report(DEVICE).unwrap().ballast, Some(4 * GI));
    // From then on its answers say more.
    while bench.obey() {}
    let held = bench.card.ballast;
    busy(&mut bench, held + 5 * GI);
    bench.sample(20);
    assert_eq!(bench.engine.pools.report(DEVICE).unwrap().ballast, Some(held));
}

#[test]
fn a_reservation_that_a_hand_over_ends_is_taken_up_again_at_once() {
    let mut bench = Bench::new(&enforced(&Value::Null));
    bench.plan(&enforced(&pool()), 2);
    let reserves = |bench: &Bench| {
        let orders = bench.orders.take();
        orders.iter().any(|order| matches!(order, Order::Keeper(link::Order::Reserve { .. })))
    };
    bench.sample(20);
    assert!(reserves(&bench));
    let interrupted =
        Reserved { bytes: 0, ballast_bytes: 0, end: End::Interrupted, message: None, free_bytes: None };
    bench.engine.keeper(Heard::Reserved { device: DEVICE.into(), result: Ok(interrupted) });
    bench.sample(20);
    assert!(reserves(&bench));
    // While it is handing over it refuses.
    bench.engine.keeper(Heard::Reserved { device: DEVICE.into(), result: Err("handing over".into()) });
    bench.sample(20);
    assert!(!reserves(&bench), "not in a loop");
    bench.sample(100);
    assert!(reserves(&bench), "and not 10 seconds later");
}

#[test]
fn what_is_being_held_back_is_not_taken_for_somebodys_use() {
    let mut bench = Bench::new(&enforced(&Value::Null));
    bench.plan(&enforced(&pool()), 2);
    bench.sample(20);
    let reserving =
        bench.orders.borrow().iter().any(|order| matches!(order, Order::Keeper(link::Order::Reserve { .. })));
    assert!(reserving);
    // The sample falls between the keeper's taking it and its answer.
    bench.card.ballast = 4 * GI;
    bench.sample(20);
    let ledger = &bench.engine.devices[0].0.ledger;
    assert_eq!((ledger.ballast, ledger.unexplained), (4 * GI, Some(0)));
    bench.card.ballast = 0;
    bench.settle();
    // A sample that was taken before a release, and is looked at after it.
    let held = bench.card.ballast;
    let before = TIME.get();
    bench.plan(&enforced(&Value::Null), 3);
    bench.sample(20);
    while bench.obey() {}
    assert_eq!(bench.card.ballast, 0);
    bench.card.ballast = held;
    TIME.set(before);
    bench.sample(10);
    let ledger = &bench.engine.devices[0].0.ledger;
    assert_eq!((ledger.ballast, ledger.unexplained), (held, Some(0)));
}

#[test]
fn b12_who_takes_what_was_granted_to_nobody_is_named_and_its_neighbour_has_its_own() {
    let mut bench = Bench::new(&enforced(&pool()));
    let guest = bench.join("a", 1);
    bench.want(&guest, 5, 3 * GI, 0);
    guest.takes(&mut bench, 3 * GI);
    bench.settle();
    bench.notices();
    let free = bench.card.free();
    // c may have 8 GiB and takes whatever is free.
    bench.card.holds("c", 9, 8 * GI + free / 2);
    bench.sample(100);
    let notices = bench.notices();
    assert!(
        notices.iter().any(|notice| notice.contains("TookUngranted") && notice.contains("\"c\"")),
        "{notices:?}"
    );
    assert!(
        notices.iter().any(|notice| notice.contains("QuotaBreach") && notice.contains("needs the guard")),
        "{notices:?}"
    );
    assert_eq!(bench.facts().oversized, ["team/c"]);
    while bench.obey() {}
    bench.want(&guest, 6, 4 * GI, 0);
    bench.settle();
    assert_eq!(bench.answers(), [true, true], "what it is guaranteed is there");
    for _ in 0..10 {
        bench.sample(100);
    }
    assert!(bench.notices().iter().all(|notice| !notice.contains("TookUngranted")), "told once");
}

#[test]
fn a_pod_without_a_guard_has_strength_only_while_it_can_take_little() {
    let mut loose = pool();
    loose["overshootLimit"] = json!("2Gi");
    loose["sizePercent"] = json!(50);
    let mut bench = Bench::new(&enforced(&loose));
    // Half of the device is free for whoever takes it.
    for _ in 0..80 {
        bench.sample(100);
    }
    assert_eq!(bench.strength("c"), (Strength::Observe, Some(StrengthReason::Overshoot)));
    assert_eq!(bench.facts().base_strength, Strength::Observe);
    let facts = bench.facts().devices[0].pool.unwrap();
    assert!(facts.overshoot.unwrap() > 2 * GI);
    bench.plan(&enforced(&whole()), 2);
    bench.settle();
    for _ in 0..40 {
        bench.sample(100);
    }
    assert_eq!(bench.strength("c"), (Strength::Reservation, Some(StrengthReason::NotOptedIn)));
    assert_eq!(bench.facts().base_strength, Strength::Reservation);
    assert_eq!(bench.facts().devices[0].strengths.of(Strength::Reservation), 1);
}

#[test]
fn standing_down_reaches_the_keeper_and_pages_stay() {
    let mut bench = Bench::new(&enforced(&pool()));
    let guest = bench.join("a", 1);
    let down = |on| WorldChange::Node(Set::Upsert(NodeFacts { stand_down: on, ..NodeFacts::default() }));
    bench.world(down(true));
    bench.engine.tick(&[], None);
    bench.obey();
    assert_eq!(bench.stood_down, [true]);
    bench.engine.report(Report::Closed);
    bench.card.ballast = 0;
    bench.obey();
    assert_eq!((guest.quota().limit, guest.quota().granted), (8 * GI, 8 * GI), "nothing is held back");
    bench.want(&guest, 5, 5 * GI, 0);
    assert_eq!(bench.answers(), [true]);
    bench.world(down(false));
    bench.engine.tick(&[], None);
    bench.obey();
    assert_eq!(bench.stood_down, [true, false]);
    bench.open(false);
    bench.up();
    bench.settle();
    assert!(bench.card.ballast > 0);
}

#[test]
fn a_node_whose_policies_want_no_limit_of_the_driver_claims_none() {
    let told = |limits: &str| {
        let mut layer = layer("Enforce", &Value::Null, "Observe");
        layer["quotas"][0]["value"]["kernelLimits"] = json!(limits);
        let mut bench = Bench::new(&json!([layer]));
        bench.open(true);
        for _ in 0..40 {
            bench.sample(100);
        }
        bench.facts().base_strength
    };
    assert_eq!((told("IfAvailable"), told("Off")), (Strength::Kernel, Strength::Observe));
}

#[test]
fn the_driver_is_given_the_limit_where_it_can_and_that_is_the_strongest() {
    let mut bench = Bench::new(&json!([layer("Enforce", &Value::Null, "Kernel")]));
    assert!(bench.limits.is_empty());
    bench.open(true);
    bench.settle();
    let mut pods: Vec<_> = bench.limits.iter().map(|task| (task.pod.to_string(), task.bytes)).collect();
    pods.sort();
    assert_eq!(pods, ["a", "b", "c"].map(|pod| (pod.to_owned(), Some(8 * GI))));
    bench.notices();
    for task in std::mem::take(&mut bench.limits) {
        let failed = *task.pod == *"b";
        let result = if failed { Err(Failure::Refused("no".into())) } else { Ok(()) };
        bench.engine.report(Report::Limited(Outcome { task, result }));
    }
    bench.sample(100);
    assert_eq!(bench.strength("c"), (Strength::Kernel, None));
    assert_eq!(bench.strength("b"), (Strength::Guard, Some(StrengthReason::KernelLimitRefused)));
    let notices = bench.notices();
    assert!(
        notices.iter().any(|notice| notice.contains("KernelLimit") && notice.contains("since")),
        "{notices:?}"
    );
    // A policy that wants none.
    let mut off = layer("Enforce", &Value::Null, "Observe");
    off["quotas"][0]["value"]["kernelLimits"] = json!("Off");
    bench.plan(&json!([off]), 2);
    bench.sample(100);
    bench.obey();
    assert_eq!(bench.strength("a").1, Some(StrengthReason::KernelLimitsOff));
    assert!(bench.limits.iter().all(|task| task.bytes.is_none()) && !bench.limits.is_empty());
}

#[test]
fn memory_of_no_process_makes_the_pool_smaller_and_is_contained() {
    let mut bench = Bench::new(&enforced(&pool()));
    assert!(!bench.engine.is_alarmed());
    let size = bench.engine.pools.report(DEVICE).unwrap().size;
    let free = bench.card.free();
    bench.card.hidden = free - GI;
    bench.sample(100);
    assert!(!bench.engine.is_alarmed(), "one sample may fall between two calls");
    bench.sample(100);
    assert!(bench.engine.is_alarmed(), "who has the device open is looked for at once");
    bench.settle();
    let report = bench.engine.pools.report(DEVICE).unwrap();
    assert!(report.size < size);
    let ledger = &bench.engine.devices[0].0.ledger;
    assert_eq!(ledger.unexplained, Some(i64::try_from(bench.card.hidden).unwrap()));
    assert!(
        bench.card.ballast >= 40 * GI - GI,
        "what is held back is not given up for it: {}",
        bench.card.ballast
    );
}
