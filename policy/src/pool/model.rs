//! A device, its pods, a keeper that obeys late and in part, and an agent that may die between
//! any two steps: whatever happens in whatever order, the promises of a pool are kept.

use std::collections::BTreeMap;

use highwater_crds::ByteSize;
use proptest::prelude::*;

use super::*;
use crate::pool::{
    grant::Decay,
    journal::{Entry, Journal},
    ladder::{EDGE, GRAIN},
};

const MI: u64 = ByteSize::MI;
const TOTAL: u64 = 24 * ByteSize::GI;
/// What the driver keeps itself, and what policy sets aside beyond.
const OWN: u64 = 300 * MI;
const SET_ASIDE: u64 = 256 * MI;
const DEVICE: &str = "GPU-1";
const BOOT: &str = "boot";

/// Cases of a property; more by the environment.
fn cases(usual: u32) -> u32 {
    usual.max(ProptestConfig::default().cases)
}

/// A pod as it really is.
#[derive(Clone, Debug)]
struct RealPod {
    kind: Kind,
    guarantee: u64,
    limit: u64,
    bound_at: Millis,
    used: u64,
    charged: u64,
    /// What its page says, or for a pod without a guard what it was told to be granted.
    page: u64,
    /// What its guard may still believe,
    stale: u64,
    /// though others may have taken some of it.
    doubtful: bool,
}

#[derive(Debug)]
struct World {
    settings: Settings,
    now: u64,
    pods: BTreeMap<Arc<str>, RealPod>,
    foreign: u64,
    hidden: u64,
    ballast: u64,
    pressure: Pressure,
    agent: Option<DevicePool>,
    /// As written.
    journal: String,
    /// Sent and not carried out, and carried out and not replied.
    sent: Option<Command>,
    done: Option<Reply>,
    /// When the last reply came.
    replied: Millis,
    /// Facts that were read and not delivered, and whether anything was taken since.
    read: Option<Read>,
    /// Somebody took what was not his since the last sample that told of everything.
    disturbed: bool,
    /// The keeper died since then.
    bereft: bool,
    next_id: u64,
    answers: Vec<Answer>,
    requests: BTreeMap<u64, u64>,
    /// How many pods there were before in each place: no UID comes twice.
    ended: [u32; 5],
}

#[derive(Clone, Debug)]
struct Read {
    at: Millis,
    device: DeviceBytes,
    ballast: u64,
    pods: Vec<PodDemand>,
    disturbed: bool,
    bereft: bool,
}

impl World {
    fn new(settings: Settings) -> Self {
        Self {
            settings,
            now: 1,
            pods: BTreeMap::new(),
            foreign: 0,
            hidden: 0,
            ballast: 0,
            pressure: Pressure::default(),
            agent: None,
            journal: Journal::new(BOOT, Vec::new()).to_text().unwrap(),
            sent: None,
            done: None,
            replied: Millis(0),
            read: None,
            disturbed: false,
            bereft: false,
            next_id: 0,
            answers: Vec::new(),
            requests: BTreeMap::new(),
            ended: [0; 5],
        }
    }

    fn at(&self) -> Millis {
        Millis(self.now)
    }

    fn used(&self) -> u64 {
        self.pods.values().map(|pod| pod.used).sum::<u64>() + self.foreign + self.hidden
    }

    /// Free as the driver says it. Panics where bytes would be given out twice.
    fn free(&self) -> u64 {
        (TOTAL - OWN).checked_sub(self.used() + self.ballast).expect("more is held than there is")
    }

    fn journaled(&self) -> BTreeMap<Arc<str>, u64> {
        let journal = Journal::parse(&self.journal, BOOT).unwrap();
        let grants = journal.device(DEVICE).map(|entry| entry.grants.clone()).unwrap_or_default();
        grants.into_iter().map(|held| (Arc::from(held.pod), held.granted)).collect()
    }

    /// Granted by page and not free.
    fn broken(&self) -> u64 {
        let unused: u64 = self.pods.values().map(|pod| pod.page.saturating_sub(pod.used)).sum();
        unused.saturating_sub(self.free())
    }

    /// The agent, restarted if need be. The keeper has finished with the old one by then.
    fn agent(&mut self) -> &mut DevicePool {
        if self.agent.is_none() {
            self.obey(50);
            self.done = None;
            let entry =
                Journal::parse(&self.journal, BOOT).unwrap().device(DEVICE).cloned().unwrap_or(Entry {
                    device: DEVICE.to_owned(),
                    size_percent: self.settings.size_percent,
                    share: 10_000 * self.settings.size_percent,
                    grants: Vec::new(),
                });
            self.agent = Some(DevicePool::restore(self.settings.clone(), &entry, self.at()));
            for pod in self.pods.values_mut() {
                pod.stale = pod.stale.max(pod.page);
                pod.page = 0;
            }
        }
        self.agent.as_mut().unwrap()
    }

    fn crash(&mut self) {
        self.agent = None;
        self.read = None;
        self.requests.clear();
    }

    /// Carries out a decision, and dies after `steps` of it.
    fn carry_out(&mut self, decision: Decision, steps: u8) {
        let mut left = steps;
        let mut step = || {
            left = left.saturating_sub(1);
            left == 0
        };
        for Grant { uid, granted } in &decision.lower {
            if let Some(pod) = self.pods.get_mut(uid) {
                assert!(*granted <= pod.page.max(pod.stale), "not lowered");
                pod.stale = pod.stale.max(pod.page);
                pod.doubtful |= self.disturbed;
                pod.page = *granted;
            }
        }
        if step() {
            return self.crash();
        }
        if decision.journal {
            let entry = self.agent().entry(DEVICE);
            self.journal = Journal::new(BOOT, vec![entry]).to_text().unwrap();
        }
        if step() {
            return self.crash();
        }
        for Grant { uid, granted } in &decision.raise {
            if let Some(pod) = self.pods.get_mut(uid) {
                pod.page = *granted;
            }
        }
        if step() {
            return self.crash();
        }
        for answer in decision.answers {
            let wanted = self.requests.remove(&answer.id);
            if let (Outcome::Granted { granted }, Some(wanted), Some(pod)) =
                (answer.outcome, wanted, self.pods.get(&answer.uid))
            {
                assert!(granted >= wanted && pod.page >= wanted, "granted before it was");
            }
            self.answers.push(answer);
        }
        if step() {
            return self.crash();
        }
        if let Some(command) = decision.command {
            assert!(self.sent.is_none() && self.done.is_none(), "one command at a time");
            self.sent = Some(command);
        }
        if step() {
            self.crash();
        }
    }

    /// The keeper does so many percent of what it was asked for.
    fn obey(&mut self, percent: u64) {
        let Some(command) = self.sent.take() else { return };
        let (done, asked) = match command {
            Command::Reserve { bytes, keep_free } => {
                assert!(bytes > 0 && bytes % GRAIN == 0 && bytes <= self.settings.reserve_step);
                let done = (bytes * percent / 100).min(self.free().saturating_sub(keep_free));
                let done = ladder::floor(done);
                self.ballast += done;
                (done, bytes)
            }
            Command::Release { bytes } => {
                assert!(bytes > 0);
                let done = ladder::ceil(bytes * percent / 100).min(self.ballast);
                self.ballast -= done;
                (done, bytes)
            }
        };
        if self.agent.is_some() {
            self.done = Some(Reply { done, complete: done >= asked });
        }
    }

    fn reply(&mut self, steps: u8) {
        let Some(reply) = self.done.take() else { return };
        let now = self.at();
        self.replied = now;
        if let Some(agent) = &mut self.agent {
            let decision = agent.replied(reply, now);
            self.carry_out(decision, steps);
        }
    }

    fn read(&mut self) {
        // What was read by an agent that died since is never delivered.
        self.agent();
        let at = self.at();
        for pod in self.pods.values_mut() {
            (pod.stale, pod.doubtful) = (0, false);
        }
        let pods = self.pods.iter().map(|(uid, pod)| PodDemand {
            uid: uid.clone(),
            kind: pod.kind,
            guarantee: pod.guarantee,
            limit: pod.limit,
            used: Some(pod.used),
            charged: Some(pod.charged),
            bound_at: pod.bound_at,
        });
        let set_aside = SET_ASIDE.min(self.free());
        let device = DeviceBytes {
            total: TOTAL,
            driver_reserved: OWN + set_aside,
            set_aside,
            pods: self.pods.values().map(|pod| pod.used).sum(),
            foreign: self.foreign,
            zombie: 0,
            unexplained: self.hidden,
            free: self.free(),
        };
        let held: u64 = device.pods + device.nameless() + self.ballast + device.free + OWN;
        assert_eq!(held, TOTAL, "used + ballast + free = device");
        self.read = Some(Read {
            at,
            device,
            ballast: self.ballast,
            pods: pods.collect(),
            disturbed: false,
            bereft: false,
        });
    }

    fn deliver(&mut self, steps: u8) {
        let Some(read) = self.read.take() else { return };
        let (pressure, now) = (self.pressure, self.at());
        let in_flight = self.sent.is_some() || self.done.is_some();
        let agent = self.agent();
        let facts = Facts {
            at: read.at,
            device: Some(read.device),
            ballast: Some(read.ballast),
            torn: false,
            pods: Some(&read.pods),
            pressure,
        };
        let decision = agent.sample(&facts, now);
        let report = agent.report();
        // Else it moves nothing.
        let moved = !in_flight && read.at > self.replied;
        self.carry_out(decision, steps);
        if moved && self.agent.is_some() {
            self.disturbed = read.disturbed;
            self.bereft = read.bereft;
            if !self.disturbed {
                assert_eq!(self.broken(), 0, "granted and not free after a sample");
            }
            if !self.bereft {
                self.check_guarantees(&report, &read.device);
            }
        }
    }

    /// What is guaranteed and not granted is in the ballast, or said to be missing.
    fn check_guarantees(&self, report: &Report, device: &DeviceBytes) {
        let open: u64 = report.pods.iter().map(|pod| pod.guarantee.saturating_sub(pod.entitled)).sum();
        assert!(open <= self.ballast + report.short, "{report:?}");
        let covered: u64 =
            report.pods.iter().map(|pod| pod.guarantee.min(pod.guarantee - pod.uncovered)).sum();
        let share = self.agent.as_ref().map_or(0, |agent| agent.entry(DEVICE).share);
        let most = size::size(&self.settings, share, device, 0).undisturbed;
        let granted: u64 = report.pods.iter().map(|pod| pod.entitled.min(pod.guarantee)).sum();
        assert!(covered <= most.max(granted), "guaranteed beyond the pool");
    }

    fn sample(&mut self, steps: u8) {
        self.read();
        self.deliver(steps);
    }

    fn request(&mut self, uid: &Arc<str>, wanted: u64, wait_ms: u64, steps: u8) -> u64 {
        let (id, now) = (self.next_id, self.at());
        self.next_id += 1;
        self.requests.insert(id, wanted);
        let request = Request { uid: uid.clone(), id, wanted, wait_ms };
        let decision = self.agent().request(request, now);
        self.carry_out(decision, steps);
        id
    }

    /// A guarded pod allocates, within what it may believe; else it asks.
    fn allocate(&mut self, uid: &Arc<str>, bytes: u64, race: bool, wait_ms: u64, steps: u8) {
        let (free, disturbed) = (self.free(), self.disturbed);
        let Some(pod) = self.pods.get_mut(uid) else { return };
        if pod.kind == Kind::Static {
            return self.take(Some(uid), bytes);
        }
        let total = pod.charged + bytes;
        let believed = if race { pod.page.max(pod.stale) } else { pod.page };
        if total > pod.limit {
            return;
        }
        if total > believed {
            self.request(uid, total, wait_ms, steps);
            return;
        }
        if bytes > free {
            let past = pod.used + bytes > believed;
            assert!(disturbed || race || past, "refused by the driver within its grant");
            return;
        }
        pod.charged = total;
        pod.used += bytes;
        // What it holds past its guard comes on top.
        if pod.used > believed || (pod.doubtful && pod.used > pod.page) {
            self.disturb();
        }
    }

    /// Somebody without a guard takes what is free.
    fn take(&mut self, uid: Option<&Arc<str>>, bytes: u64) {
        let bytes = bytes.min(self.free());
        match uid.and_then(|uid| self.pods.get_mut(uid)) {
            Some(pod) => pod.used += bytes,
            None if bytes % 4 < 2 => self.foreign += bytes,
            None => self.hidden += bytes,
        }
        self.disturb();
    }

    /// Until it is seen, what the pool takes for free is not.
    fn disturb(&mut self) {
        self.disturbed = true;
        if let Some(read) = &mut self.read {
            read.disturbed = true;
        }
    }

    fn check(&self) {
        if !self.disturbed {
            assert_eq!(self.broken(), 0, "granted and not free");
        }
        let journaled = self.journaled();
        for (uid, pod) in self.pods.iter().filter(|(_, pod)| pod.page > 0) {
            let written = journaled.get(uid).copied().unwrap_or(0);
            assert!(pod.page <= written, "{uid}: {} by its page, {written} by the journal", pod.page);
        }
    }

    /// Everybody does what he should, until nothing moves.
    fn quiesce(&mut self) {
        self.pressure = Pressure::default();
        let step = self.settings.start_hold_ms.max(self.settings.calm_ms).max(70_000);
        for round in 0..60 {
            self.now += if round < 4 { step } else { 1 };
            self.sample(u8::MAX);
            self.obey(100);
            self.now += 1;
            self.reply(u8::MAX);
            self.check();
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Bind { pod: u8, elastic: bool, guarantee: u64, limit: u64 },
    Change { pod: u8, elastic: bool, guarantee: u64, limit: u64 },
    End { pod: u8 },
    Allocate { pod: u8, bytes: u64, race: bool, wait: u64 },
    Free { pod: u8, percent: u64 },
    Take { pod: Option<u8>, bytes: u64 },
    Return { percent: u64 },
    Sample,
    Read,
    Deliver,
    Obey { percent: u64 },
    Reply,
    KeeperDies,
    AgentDies,
    Pass { ms: u64 },
    Pressure { reclaim: bool, freeze: bool },
    Tick,
}

fn bytes(most_mib: u64) -> impl Strategy<Value = u64> + Clone {
    (0..=most_mib * MI / 512).prop_map(|sectors| sectors * 512)
}

fn step() -> impl Strategy<Value = Step> {
    let pod = 0u8..5;
    let demand = (pod.clone(), any::<bool>(), bytes(8192), bytes(10_000));
    let order = |(guarantee, limit): (u64, u64)| (guarantee.min(limit), guarantee.max(limit));
    prop_oneof![
        4 => demand.clone().prop_map(move |(pod, elastic, a, b)| {
            let (guarantee, limit) = order((a, b));
            Step::Bind { pod, elastic, guarantee, limit }
        }),
        1 => demand.prop_map(move |(pod, elastic, a, b)| {
            let (guarantee, limit) = order((a, b));
            Step::Change { pod, elastic, guarantee, limit }
        }),
        1 => pod.clone().prop_map(|pod| Step::End { pod }),
        10 => (pod.clone(), bytes(4096), any::<bool>(), 0u64..400)
            .prop_map(|(pod, bytes, race, wait)| Step::Allocate { pod, bytes, race, wait }),
        3 => (pod.clone(), 0u64..=100).prop_map(|(pod, percent)| Step::Free { pod, percent }),
        2 => (prop::option::of(pod), bytes(4096)).prop_map(|(pod, bytes)| Step::Take { pod, bytes }),
        1 => (0u64..=100).prop_map(|percent| Step::Return { percent }),
        8 => Just(Step::Sample),
        2 => Just(Step::Read),
        2 => Just(Step::Deliver),
        8 => prop_oneof![3 => Just(100u64), 1 => 0u64..100].prop_map(|percent| Step::Obey { percent }),
        8 => Just(Step::Reply),
        1 => Just(Step::KeeperDies),
        1 => Just(Step::AgentDies),
        2 => (0u64..2000).prop_map(|ms| Step::Pass { ms }),
        1 => any::<(bool, bool)>().prop_map(|(reclaim, freeze)| Step::Pressure { reclaim, freeze }),
        1 => Just(Step::Tick),
    ]
}

fn settings() -> impl Strategy<Value = Settings> {
    let sizes = (20u32..=100, 50u32..=100, bytes(8192), prop_oneof![Just(0), Just(512 * MI)]);
    (sizes, any::<bool>(), prop_oneof![Just(0u64), Just(500)]).prop_map(
        |((size_percent, max_percent, min_size, margin), adaptive, start_hold_ms)| Settings {
            size_percent,
            max_percent,
            min_size,
            margin,
            start_hold_ms,
            calm_ms: 300,
            keeper_timeout_ms: 200,
            adaptive: adaptive.then_some(adaptive::Rule {
                every_requests: 5,
                every_ms: 1000,
                ..adaptive::Rule::default()
            }),
            decay: Decay { per_mille: 920, every_ms: 1000 },
            ..Settings::default()
        },
    )
}

impl World {
    fn uid(&self, pod: u8) -> Arc<str> {
        Arc::from(format!("pod-{pod}.{}", self.ended[usize::from(pod)]))
    }

    /// `steps`: after how many steps of carrying out a decision the agent dies.
    fn live(&mut self, step: &Step, steps: u8) {
        self.now += 1;
        match *step {
            Step::Bind { pod, elastic, guarantee, limit } => {
                let kind = if elastic { Kind::Elastic } else { Kind::Static };
                let bound_at = self.at();
                let uid = self.uid(pod);
                self.pods.entry(uid).or_insert(RealPod {
                    kind,
                    guarantee,
                    limit,
                    bound_at,
                    used: 0,
                    charged: 0,
                    page: 0,
                    stale: 0,
                    doubtful: false,
                });
            }
            Step::Change { pod, elastic, guarantee, limit } => {
                let uid = self.uid(pod);
                if let Some(pod) = self.pods.get_mut(&uid) {
                    pod.kind = if elastic { Kind::Elastic } else { Kind::Static };
                    (pod.guarantee, pod.limit) = (guarantee, limit);
                    pod.charged = pod.used;
                }
            }
            Step::End { pod } => {
                // Facts that still tell of it, or not yet of others, are not delivered out of turn.
                self.read = None;
                if self.pods.remove(&self.uid(pod)).is_some() {
                    self.ended[usize::from(pod)] += 1;
                }
            }
            Step::Allocate { pod, bytes, race, wait } => {
                let uid = self.uid(pod);
                self.allocate(&uid, bytes, race, wait, steps);
            }
            Step::Free { pod, percent } => {
                let uid = self.uid(pod);
                if let Some(pod) = self.pods.get_mut(&uid) {
                    pod.used -= pod.used * percent / 100;
                    pod.charged = pod.used;
                }
                // What is used less must be free for it again: it is.
            }
            Step::Take { pod, bytes } => {
                let pod = pod.map(|pod| self.uid(pod)).filter(|uid| self.pods.contains_key(uid));
                self.take(pod.as_ref(), bytes);
            }
            Step::Return { percent } => {
                self.foreign -= self.foreign * percent / 100;
                self.hidden -= self.hidden * percent / 100;
            }
            Step::Sample => self.sample(steps),
            Step::Read => self.read(),
            Step::Deliver => self.deliver(steps),
            Step::Obey { percent } => self.obey(percent),
            Step::Reply => self.reply(steps),
            Step::KeeperDies => {
                self.ballast = 0;
                self.bereft = true;
                if let Some(read) = &mut self.read {
                    read.bereft = true;
                }
                if self.sent.take().is_some() || self.done.take().is_some() {
                    self.done = self.agent.as_ref().map(|_| Reply { done: 0, complete: false });
                    self.reply(steps);
                }
            }
            Step::AgentDies => self.crash(),
            Step::Pass { ms } => self.now += ms,
            Step::Pressure { reclaim, freeze } => self.pressure = Pressure { reclaim, freeze },
            Step::Tick => {
                let now = self.at();
                let decision = self.agent().tick(now);
                self.carry_out(decision, steps);
            }
        }
        self.check();
    }
}

/// Of ten decisions, one is not carried out to its end.
fn steps() -> impl Strategy<Value = u8> {
    prop_oneof![9 => Just(u8::MAX), 1 => 1u8..=5]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(400), ..ProptestConfig::default() })]

    #[test]
    fn promises_are_kept_whatever_happens(
        settings in settings(),
        events in prop::collection::vec((step(), steps()), 1..120),
    ) {
        let mut world = World::new(settings);
        for (step, steps) in &events {
            world.live(step, *steps);
        }
        world.quiesce();
        let agent = world.agent.as_ref().unwrap();
        let report = agent.report();
        prop_assert_eq!(world.broken(), 0);

        // All that is to be held back is, as far as it is free, and no more than that.
        let unused: u64 = report.pods.iter().map(|pod| pod.entitled.saturating_sub(pod.used)).sum();
        let loose = world.free().saturating_sub(unused + SET_ASIDE + world.settings.margin);
        let missing = report.ballast_target.saturating_sub(world.ballast);
        prop_assert!(missing.min(loose) < EDGE, "{:?}", report);
        let outside = world.foreign + world.hidden;
        let most = report.ballast_target.max(report.owed);
        prop_assert!(world.ballast <= most + outside + SET_ASIDE + EDGE, "{:?}", report);

        // Nothing is left on its way.
        for pod in &report.pods {
            prop_assert_eq!(pod.granted, pod.entitled);
        }
        // What is not said to be short is there for whoever asks.
        if report.short == 0 {
            let owed: Vec<_> = report.pods.iter().filter(|pod| pod.kind == Kind::Elastic).collect();
            let ids: Vec<_> =
                owed.iter().map(|pod| world.request(&pod.uid, pod.guarantee, 0, u8::MAX)).collect();
            for _ in 0..4 {
                world.now += 1;
                world.obey(100);
                world.reply(u8::MAX);
                world.sample(u8::MAX);
            }
            for id in ids {
                let answer = world.answers.iter().find(|answer| answer.id == id).map(|answer| answer.outcome);
                prop_assert!(matches!(answer, Some(Outcome::Granted { .. })), "{:?} of {:?}", answer, report);
            }
            world.check();
        }
    }

    #[test]
    fn no_grant_is_lost_or_doubled_when_either_side_dies(
        settings in settings(),
        // Nobody takes what is not his, so that nothing but a death could lose a grant.
        events in prop::collection::vec(
            (step().prop_filter("nobody steals", |step| !matches!(step, Step::Take { .. })), steps()), 1..80),
        keeper in any::<bool>(),
        part in 0u64..=100,
    ) {
        let decay = Decay { per_mille: 1000, ..settings.decay };
        let mut world = World::new(Settings { decay, ..settings });
        for (step, steps) in &events {
            // Pods without a guard hold to their limit here as well.
            if let Step::Allocate { pod, .. } = step
                && world.pods.get(&world.uid(*pod)).is_some_and(|pod| pod.kind == Kind::Static)
            {
                continue;
            }
            world.live(step, *steps);
        }
        let before: BTreeMap<_, _> =
            world.pods.iter().map(|(uid, pod)| (uid.clone(), pod.page.min(pod.limit.max(pod.used)))).collect();
        prop_assert_eq!(world.broken(), 0);
        // An idle surplus is taken back for a guarantee at any time.
        let owing = world.pods.values().any(|pod| pod.page < pod.guarantee);
        world.obey(part);
        world.live(if keeper { &Step::KeeperDies } else { &Step::AgentDies }, u8::MAX);
        for _ in 0..10 {
            world.now += 1;
            world.sample(u8::MAX);
            world.obey(100);
            world.now += 1;
            world.reply(u8::MAX);
            world.check();
        }
        let report = world.agent.as_ref().unwrap().report();
        for pod in &report.pods {
            let had = before.get(&pod.uid).copied().unwrap_or(0);
            let elastic = pod.kind == Kind::Elastic;
            let idle = elastic && pod.granted >= had.min(pod.guarantee.max(pod.used));
            let reclaimed = idle && (world.pressure.reclaim || owing);
            let empty = elastic && pod.used == 0;
            prop_assert!(pod.granted >= had || reclaimed || empty, "{} had {had}: {pod:?}", pod.uid);
            prop_assert_eq!(pod.ungranted, 0, "nobody took anything");
        }
        let granted: u64 = report.pods.iter().map(|pod| pod.granted.max(pod.used)).sum();
        prop_assert!(granted + world.ballast + OWN + world.foreign + world.hidden <= TOTAL);
    }
}

// The order of waiting.

/// A device full but for what the pool holds, and guarded pods that ask.
fn crowd(guarantees: &[u64], limit: u64) -> World {
    let settings = Settings {
        size_percent: 100,
        max_percent: 100,
        margin: 0,
        start_hold_ms: 0,
        decay: Decay { per_mille: 1000, every_ms: 60_000 },
        ..Settings::default()
    };
    let mut world = World::new(settings);
    for (n, guarantee) in guarantees.iter().enumerate() {
        let pod = u8::try_from(n).unwrap();
        let step = Step::Bind { pod, elastic: true, guarantee: *guarantee, limit };
        world.live(&step, u8::MAX);
    }
    for _ in 0..20 {
        world.live(&Step::Sample, u8::MAX);
        world.live(&Step::Obey { percent: 100 }, u8::MAX);
        world.live(&Step::Reply, u8::MAX);
    }
    world
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(200), ..ProptestConfig::default() })]

    #[test]
    fn l10_who_waits_is_served_in_order_and_guarantees_are_never_starved(
        guarantees in prop::collection::vec(bytes(3000), 5),
        asks in prop::collection::vec((0u8..5, bytes(12_000), 0u64..20), 1..40),
        frees in prop::collection::vec((0u8..5, 0u64..=100), 40),
    ) {
        let mut world = crowd(&guarantees, 20_000 * MI);
        // Requests above guarantees in the order in which they came, with what was asked for.
        let mut above: Vec<(u64, u64, Arc<str>)> = Vec::new();
        let mut within: Vec<u64> = Vec::new();
        let mut judged = 0;
        for ((pod, wanted, passed), (freed, percent)) in asks.into_iter().zip(frees) {
            world.now += passed;
            let name = world.uid(pod);
            let needs = wanted > world.pods[&name].page;
            let id = world.request(&name, wanted, 3_600_000, u8::MAX);
            if wanted <= guarantees[usize::from(pod)] {
                within.push(id);
            } else if needs {
                above.push((id, wanted, name));
            }
            world.live(&Step::Obey { percent: 100 }, u8::MAX);
            world.live(&Step::Reply, u8::MAX);
            // It uses what it was granted, and another gives something back.
            let name = world.uid(pod);
            let grown = world.pods.get_mut(&name).unwrap();
            grown.used = grown.used.max(grown.page);
            grown.charged = grown.used;
            world.live(&Step::Free { pod: freed, percent }, u8::MAX);
            for _ in 0..3 {
                world.live(&Step::Sample, u8::MAX);
                world.live(&Step::Obey { percent: 100 }, u8::MAX);
                world.live(&Step::Reply, u8::MAX);
            }
            let answered = |id: u64| world.answers.iter().position(|answer| answer.id == id);
            prop_assert!(within.iter().all(|id| answered(*id).is_some()), "a guarantee waits");
            for (n, (id, asked, of)) in above.iter().enumerate() {
                // Each answer is judged when it is new: what a pod has later is another story.
                let Some(place) = answered(*id).filter(|place| *place >= judged) else { continue };
                // What its pod was given for an earlier request may be enough for it as well.
                let enough = |(_, wanted, name): &&(u64, u64, Arc<str>)| name == of && wanted >= asked;
                if above[..n].iter().filter(enough).any(|(id, ..)| answered(*id).is_some()) {
                    continue;
                }
                for (earlier, wanted, name) in &above[..n] {
                    // One that asks for no more than its pod has by then is no wait: of those that are
                    // served at once, the one whose bytes are there already is told first.
                    let others = world.pods[name].page < *wanted;
                    prop_assert!(
                        !others || answered(*earlier).is_some_and(|first| first < place),
                        "{earlier} was passed by {id}"
                    );
                }
            }
            judged = world.answers.len();
        }
    }

    #[test]
    fn what_a_page_shows_as_free_can_be_had_at_once(
        guarantees in prop::collection::vec(bytes(3000), 5),
        asks in prop::collection::vec((0u8..5, bytes(6000)), 1..20),
        last in (0u8..5, bytes(20_000)),
    ) {
        let mut world = crowd(&guarantees, 16_000 * MI);
        for (pod, bytes) in asks {
            world.live(&Step::Allocate { pod, bytes, race: false, wait: 0 }, u8::MAX);
            world.live(&Step::Obey { percent: 100 }, u8::MAX);
            world.live(&Step::Reply, u8::MAX);
            world.live(&Step::Allocate { pod, bytes, race: false, wait: 0 }, u8::MAX);
            world.live(&Step::Sample, u8::MAX);
            world.live(&Step::Obey { percent: 100 }, u8::MAX);
            world.live(&Step::Reply, u8::MAX);
        }
        let (pod, bytes) = last;
        let uid = world.uid(pod);
        let charged = world.pods[&uid].charged;
        let numbers = world.agent().page(&uid, charged).unwrap();
        prop_assert!(numbers.free <= numbers.limit - charged);
        let before = world.answers.len();
        world.allocate(&uid, bytes, false, 0, u8::MAX);
        world.obey(100);
        world.now += 1;
        world.reply(u8::MAX);
        let refused = world.answers[before..].iter().any(|a| matches!(a.outcome, Outcome::Refused(_)));
        let more = charged + bytes;
        if more <= numbers.limit {
            prop_assert_eq!(refused, bytes > numbers.free && more > numbers.granted, "{:?}", numbers);
        }
    }
}
