//! The reservation pools of the node: what policy decides of them is carried out here, in its order, and
//! what the keeper holds is known here.

use std::{
    collections::{BTreeMap, HashMap},
    path::Path,
    sync::Arc,
};

use highwater_crds::{ByteSize, PlanPool, Pool as PoolPolicy, PoolTrouble, StrengthReason};
use highwater_guard_abi::{
    charge::UNIT,
    wire::{NotGrantedReason, ToGuard},
};
use highwater_policy::{
    breaker,
    ledger::Share,
    node_status::PoolFacts,
    pool::{
        Command, Decision, DeviceBytes, DevicePool, Facts, Kind, Outcome, PodDemand, PodReport, Pressure,
        Refusal, Reply, Report, Request, Settings, adaptive, grant::Decay, journal::Entry, page::Numbers,
    },
    time::Millis,
};
use tracing::{info, warn};

use crate::{
    account::Lasting,
    engine::Order,
    guard::{self, Want},
    journal::Grants,
    keeper_protocol::{End, Released, Reserved, Status},
    link,
    wards::{Keeper, Wards},
};

/// How long any request waits at least, in milliseconds: what is not to be had at this moment may be on
/// its way, with a command of the keeper or the next sample.
const LOOK: u64 = 300;
/// How long a guard may at least wait for what it cannot do without, such as the first context of a
/// process, whatever policy says of allocations, in milliseconds.
const CONTEXT_WAIT: u64 = 2_000;
/// A keeper's worker ends when it had nothing to do for some minutes. Before that it is kept awake, so
/// that the memory of a process that died is held back at once. In milliseconds.
const WARM_EVERY: u64 = 180_000;
/// How long it is remembered what the keeper held before, in milliseconds: far longer than a sample may
/// be on its way.
const PAST: u64 = 30_000;
/// Reservations in a row that got nothing, after which the driver is said to let nothing be held.
const FUTILE: u32 = 3;
/// How long more than the bound may be free before the pool is said not to hold it back, in
/// milliseconds: memory that a process gave back is held back only a moment later.
const SETTLES: u64 = 3_000;

/// The pools.
#[derive(Debug)]
pub(crate) struct Pools {
    keeper: Keeper,
    grants: Grants,
    by_device: BTreeMap<Arc<str>, Pool>,
    ballasts: HashMap<Arc<str>, Ballast>,
    /// Questions of guards that are not answered, by number.
    asked: HashMap<u64, (Arc<str>, Want)>,
    next: u64,
    /// Another sample is worth taking at once.
    hurry: bool,
    /// The journal could not be written, and that was told.
    unwritten: bool,
}

/// The pool of a device.
#[derive(Debug)]
struct Pool {
    state: DevicePool,
    overshoot_limit: u64,
    /// How long an allocation may wait, in milliseconds.
    wait: u64,
    demands: Option<Vec<PodDemand>>,
    last: Option<Seen>,
    report: Report,
    warmed: Millis,
    short: Lasting,
    away: Lasting,
    /// Since when more than the bound is free that is not owed to a pod without a guard.
    loose: Option<Millis>,
}

/// What is seen of a device at a sample.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    /// When reading began.
    pub(crate) at: Millis,
    /// Who has its bytes; `None` where the driver does not say all of it.
    pub(crate) device: Option<DeviceBytes>,
    /// Its numbers are not of one moment.
    pub(crate) torn: bool,
    /// What its breaker asks for.
    pub(crate) pressure: Pressure,
}

/// What the keeper holds of a device.
#[derive(Debug, Default)]
struct Ballast {
    held: u64,
    /// What it was asked to take, or to give, and has not answered yet.
    flight: Option<Command>,
    /// What it held before each change, and when that changed.
    past: Vec<(Millis, u64)>,
    /// Reservations in a row that got nothing of a device of which nothing is held.
    futile: u32,
    message: Option<String>,
}

impl Ballast {
    fn set(&mut self, held: u64, now: Millis) {
        if self.held != held {
            self.past.retain(|(at, _)| now.since(*at) < PAST);
            self.past.push((now, self.held));
            self.held = held;
        }
    }

    /// The most that it may have held when a sample was taken. What the device shows beyond what is
    /// explained says how much of that it was.
    fn at(&self, sample: Millis) -> u64 {
        let before = self.past.iter().filter(|(at, _)| *at >= sample).map(|(_, held)| *held);
        let coming = match self.flight {
            Some(Command::Reserve { bytes, .. }) => bytes,
            Some(Command::Release { .. }) | None => 0,
        };
        before.fold(self.held, u64::max).saturating_add(coming)
    }
}

/// The keeper did not do what it was asked, or did not say.
#[derive(Clone, Copy)]
struct KeeperFailed;

/// How a pool stands for a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Standing {
    /// Why it does not hold back what nobody is owed; `Ok` if it does.
    pub(crate) holds: Result<(), StrengthReason>,
    /// What the pod could take beyond its due.
    pub(crate) overshoot: u64,
}

impl Pools {
    /// Those that an earlier agent left in the journal. `keeper`: whether there is to be one.
    pub(crate) fn new(state_dir: &Path, proc_root: &Path, keeper: bool) -> Self {
        Self {
            keeper: if keeper { Keeper::Away } else { Keeper::None },
            grants: Grants::open(state_dir, proc_root),
            by_device: BTreeMap::new(),
            ballasts: HashMap::new(),
            asked: HashMap::new(),
            next: 1,
            hurry: false,
            unwritten: false,
        }
    }

    /// Where the keeper stands.
    pub(crate) fn keeper(&self) -> Keeper {
        self.keeper
    }

    /// Whether another sample is worth taking at once; it is asked for then.
    pub(crate) fn hurries(&mut self) -> bool {
        std::mem::take(&mut self.hurry)
    }

    /// When something is due that no event tells.
    pub(crate) fn deadline(&self) -> Option<Millis> {
        self.by_device.values().filter_map(|pool| pool.state.next_deadline()).min()
    }

    /// What the keeper may have held of a device at a sample, at most.
    pub(crate) fn ballast_at(&self, device: &str, sample: Millis) -> u64 {
        self.ballasts.get(device).map_or(0, |ballast| ballast.at(sample))
    }

    /// Whether a device has a pool.
    pub(crate) fn has(&self, device: &str) -> bool {
        self.by_device.contains_key(device)
    }

    /// What a pod's quota page says of a device with a pool.
    pub(crate) fn numbers(&self, device: &str, pod: &str, charged: u64) -> Option<Numbers> {
        self.by_device.get(device)?.state.page(pod, charged)
    }

    /// How long an allocation may wait on a device, in milliseconds.
    pub(crate) fn wait(&self, device: &str) -> u64 {
        self.by_device.get(device).map_or(0, |pool| pool.wait)
    }

    /// How a device's pool is, for metrics.
    pub(crate) fn report(&self, device: &str) -> Option<&Report> {
        self.by_device.get(device).map(|pool| &pool.report)
    }

    /// What is granted of a device's pool.
    pub(crate) fn share(&self, device: &str) -> Option<Share> {
        let report = self.report(device)?;
        breaker::pool_share(report.granted, report.size)
    }

    /// What is granted to other pods of a device than this, and not used: free, and owed to them.
    pub(crate) fn owed_to_others(&self, device: &str, pod: &str) -> u64 {
        let pods = self.report(device).map_or(&[][..], |report| report.pods.as_slice());
        let others = pods.iter().filter(|report| *report.uid != *pod);
        others.fold(0, |sum, report| sum.saturating_add(report.granted.saturating_sub(report.used)))
    }

    /// How a pod is in its device's pool.
    pub(crate) fn of_pod(&self, device: &str, pod: &str) -> Option<&PodReport> {
        self.report(device)?.pods.iter().find(|report| *report.uid == *pod)
    }

    /// How a device's pool stands for a pod.
    pub(crate) fn standing(&self, device: &str, pod: &str, now: Millis) -> Option<Standing> {
        let pool = self.by_device.get(device)?;
        let overshoot = self.of_pod(device, pod).map_or(0, |report| report.overshoot);
        let loose = pool.loose.is_some_and(|since| now.since(since) >= SETTLES);
        let holds = if self.keeper != Keeper::Up {
            Err(StrengthReason::KeeperAway)
        } else if pool.last.is_none() {
            Err(StrengthReason::NoPool)
        } else if overshoot > pool.overshoot_limit && loose {
            Err(if pool.report.short > 0 { StrengthReason::PoolShort } else { StrengthReason::Overshoot })
        } else {
            Ok(())
        };
        Some(Standing { holds, overshoot })
    }

    /// What is told of a device's pool.
    pub(crate) fn facts(&self, device: &str) -> Option<PoolFacts> {
        let pool = self.by_device.get(device)?;
        let unsupported = self.ballasts.get(device).is_some_and(|ballast| ballast.futile >= FUTILE);
        let trouble = if pool.away.holds {
            Some(PoolTrouble::KeeperAway)
        } else if unsupported {
            Some(PoolTrouble::Unsupported)
        } else {
            pool.short.holds.then_some(PoolTrouble::Short)
        };
        let unguarded = pool.report.pods.iter().filter(|report| report.kind == Kind::Static);
        Some(PoolFacts { trouble, overshoot: unguarded.map(|report| report.overshoot).max() })
    }

    /// Whether a pod without a guard can take little beyond its due on a device: the pool is there and
    /// is really held.
    pub(crate) fn is_held(&self, device: &str, now: Millis) -> bool {
        let Some(pool) = self.by_device.get(device) else { return false };
        let loose = pool.loose.is_some_and(|since| now.since(since) >= SETTLES);
        self.keeper == Keeper::Up && pool.last.is_some() && !loose && !pool.short.holds
    }

    /// Policy gives a device this pool, or none.
    pub(crate) fn set(
        &mut self,
        device: &Arc<str>,
        plan: Option<&PlanPool>,
        now: Millis,
        mut order: impl FnMut(Order),
    ) {
        let Some(policy) = plan.map(|plan| &plan.value).filter(|pool| pool.is_sized()) else {
            if self.by_device.remove(device).is_some() {
                info!(%device, "the device has no pool any more");
                self.refuse_all(device, &mut order);
            }
            self.shed(device, order);
            return;
        };
        let settings = settings(policy);
        let grants = &self.grants;
        let flight = self.ballasts.get(device).and_then(|ballast| ballast.flight);
        let pool = self.by_device.entry(Arc::clone(device)).or_insert_with(|| {
            info!(%device, percent = settings.size_percent, "the device has a pool");
            let state = match grants.device(device) {
                Some(entry) => DevicePool::restore(settings.clone(), entry, now),
                None => DevicePool::new(settings.clone()),
            };
            Pool {
                state: state.awaiting(flight),
                overshoot_limit: 0,
                wait: 0,
                demands: None,
                last: None,
                report: Report::default(),
                warmed: Millis::default(),
                short: Lasting::default(),
                away: Lasting::default(),
                loose: None,
            }
        });
        if *pool.state.settings() != settings {
            pool.state.set_settings(settings);
        }
        pool.overshoot_limit = policy.overshoot_limit().bytes();
        pool.wait = u64::try_from(policy.allocation_wait_seconds()).unwrap_or(0).saturating_mul(1_000);
    }

    /// The devices are let go of. What is written down stands, for when they come back.
    pub(crate) fn let_go(&mut self, mut order: impl FnMut(Order)) {
        let devices: Vec<_> = std::mem::take(&mut self.by_device).into_keys().collect();
        for device in devices {
            self.refuse_all(&device, &mut order);
        }
    }

    /// Gives back what is held of a device that has no pool.
    fn shed(&mut self, device: &Arc<str>, mut order: impl FnMut(Order)) {
        let Some(ballast) = self.ballasts.get_mut(device) else { return };
        if self.keeper == Keeper::Up && ballast.held > 0 && ballast.flight.is_none() {
            let bytes = ballast.held;
            ballast.flight = Some(Command::Release { bytes });
            order(Order::Keeper(link::Order::Release { device: Arc::clone(device), bytes }));
        }
    }

    /// A device was sampled. `demands`: `None` where it is not known which pods there are.
    pub(crate) fn sample(
        &mut self,
        device: &Arc<str>,
        seen: Seen,
        demands: Option<Vec<PodDemand>>,
        now: Millis,
        wards: &mut Wards,
        mut order: impl FnMut(Order),
    ) {
        if self.by_device.contains_key(device) {
            if let Some(pool) = self.by_device.get_mut(device) {
                pool.demands = demands;
                pool.last = Some(seen);
            }
            self.look(device, now, wards, &mut order);
        }
        let Some(pool) = self.by_device.get_mut(device) else { return };
        let away = self.keeper != Keeper::Up;
        pool.away.step(Some(away), now);
        pool.short.step((!away).then_some(pool.report.short > 0), now);
        let loosest =
            pool.report.pods.iter().filter(|pod| pod.kind == Kind::Static).map(|pod| pod.overshoot).max();
        let loose = loosest.is_some_and(|bytes| bytes > pool.overshoot_limit);
        pool.loose = loose.then(|| pool.loose.unwrap_or(now));
        let tenanted = pool.demands.as_ref().is_some_and(|demands| !demands.is_empty());
        if !away && tenanted && now.since(pool.warmed) >= WARM_EVERY {
            pool.warmed = now;
            order(Order::Keeper(link::Order::Warm { device: Arc::clone(device) }));
        }
    }

    /// Lets a pool decide by what was seen last.
    fn look(&mut self, device: &Arc<str>, now: Millis, wards: &mut Wards, order: &mut impl FnMut(Order)) {
        let ballast = self.ballasts.get(device).map_or(0, |ballast| ballast.held);
        let Some(pool) = self.by_device.get_mut(device) else { return };
        let Some(Seen { at, device: bytes, torn, pressure }) = pool.last else { return };
        let facts = Facts {
            at,
            device: bytes,
            ballast: (self.keeper == Keeper::Up).then_some(ballast),
            torn,
            pods: pool.demands.as_deref(),
            pressure,
        };
        let decision = pool.state.sample(&facts, now);
        self.carry_out(device, decision, now, wards, order);
    }

    /// The breaker of a device asks for what is idle, or no longer.
    pub(crate) fn press(
        &mut self,
        device: &Arc<str>,
        reclaim: bool,
        now: Millis,
        wards: &mut Wards,
        mut order: impl FnMut(Order),
    ) {
        let Some(seen) = self.by_device.get_mut(device).and_then(|pool| pool.last.as_mut()) else { return };
        if std::mem::replace(&mut seen.pressure.reclaim, reclaim) != reclaim {
            self.look(device, now, wards, &mut order);
        }
    }

    /// Who uses a device changed since it was sampled.
    pub(crate) fn met(
        &mut self,
        device: &Arc<str>,
        demands: Vec<PodDemand>,
        now: Millis,
        wards: &mut Wards,
        mut order: impl FnMut(Order),
    ) {
        if let Some(pool) = self.by_device.get_mut(device) {
            pool.demands = Some(demands);
            self.look(device, now, wards, &mut order);
        }
    }

    /// A guard asks that its pod may have more of a device, where `limit` is what it may have at all.
    pub(crate) fn want(
        &mut self,
        device: &Arc<str>,
        want: Want,
        limit: u64,
        now: Millis,
        wards: &mut Wards,
        mut order: impl FnMut(Order),
    ) {
        let Some(pool) = self.by_device.get_mut(device) else {
            // Nothing to ask for: its page says so, or is about to.
            let outcome = if want.bytes <= limit {
                Outcome::Granted { granted: limit }
            } else {
                Outcome::Refused(Refusal::OverLimit)
            };
            order(answer(&want, outcome));
            return;
        };
        let id = self.next;
        self.next += 1;
        let request = Request {
            uid: Arc::clone(&want.pod),
            id,
            wanted: want.bytes,
            wait_ms: want.wait.min(pool.wait.max(CONTEXT_WAIT)).max(LOOK),
        };
        self.asked.insert(id, (Arc::clone(device), want));
        let decision = pool.state.request(request, now);
        self.carry_out(device, decision, now, wards, &mut order);
    }

    /// Nobody waits for answers on this connection any more.
    pub(crate) fn gone(
        &mut self,
        connection: u64,
        now: Millis,
        wards: &mut Wards,
        mut order: impl FnMut(Order),
    ) {
        let theirs = self.asked.iter().filter(|(_, (_, want))| want.connection == connection);
        let theirs: Vec<_> = theirs.map(|(id, (device, _))| (*id, Arc::clone(device))).collect();
        for (id, device) in theirs {
            self.asked.remove(&id);
            if let Some(pool) = self.by_device.get_mut(&device) {
                let decision = pool.state.withdraw(id, now);
                self.carry_out(&device, decision, now, wards, &mut order);
            }
        }
    }

    /// What is due at a time.
    pub(crate) fn tick(&mut self, now: Millis, wards: &mut Wards, mut order: impl FnMut(Order)) {
        let due = |pool: &Pool| pool.state.next_deadline().is_some_and(|at| now >= at);
        let devices: Vec<_> = self
            .by_device
            .iter()
            .filter(|(_, pool)| due(pool))
            .map(|(device, _)| Arc::clone(device))
            .collect();
        for device in devices {
            let Some(pool) = self.by_device.get_mut(&device) else { continue };
            let decision = pool.state.tick(now);
            self.carry_out(&device, decision, now, wards, &mut order);
        }
    }

    /// The keeper answers, and holds this.
    pub(crate) fn up(&mut self, status: &Status, now: Millis) {
        let met = std::mem::replace(&mut self.keeper, Keeper::Up) != Keeper::Up;
        self.hurry |= met;
        for device in &status.devices {
            self.ballasts.entry(device.uuid.as_str().into()).or_default();
        }
        for (uuid, ballast) in &mut self.ballasts {
            let device = status.device(uuid);
            // While something is under way, its answer says more. Of a keeper that was not known so far
            // anything says more than nothing.
            if ballast.flight.is_none() && (met || device.is_none_or(|device| !device.busy)) {
                ballast.set(device.map_or(0, |device| device.ballast_bytes), now);
            }
        }
    }

    /// The keeper does not answer.
    pub(crate) fn away(&mut self) {
        self.keeper = Keeper::Away;
        self.hurry = true;
    }

    /// What a reservation came to.
    pub(crate) fn reserved(
        &mut self,
        device: &Arc<str>,
        result: Result<Reserved, String>,
        now: Millis,
        wards: &mut Wards,
        order: impl FnMut(Order),
    ) {
        let ballast = self.ballasts.entry(Arc::clone(device)).or_default();
        let reply = match result {
            Ok(reserved) => {
                ballast.set(reserved.ballast_bytes, now);
                let failed = matches!(reserved.end, End::Refused | End::Failed);
                let nothing = failed && reserved.bytes == 0 && reserved.ballast_bytes == 0;
                ballast.futile = if nothing { ballast.futile.saturating_add(1) } else { 0 };
                if failed && ballast.message != reserved.message {
                    warn!(%device, bytes = reserved.bytes, end = ?reserved.end, message = reserved.message,
                        "less was held back than there seemed to be");
                }
                ballast.message = reserved.message;
                // An interruption, as when another keeper takes over, says nothing against the rest.
                let complete = matches!(reserved.end, End::Complete | End::Interrupted);
                Ok(Reply { done: reserved.bytes, complete })
            }
            Err(error) => {
                warn!(%device, error, "nothing was held back");
                Err(KeeperFailed)
            }
        };
        self.replied(device, reply, now, wards, order);
    }

    /// What a release came to.
    pub(crate) fn released(
        &mut self,
        device: &Arc<str>,
        result: Result<Released, String>,
        now: Millis,
        wards: &mut Wards,
        order: impl FnMut(Order),
    ) {
        let ballast = self.ballasts.entry(Arc::clone(device)).or_default();
        let asked = match ballast.flight {
            Some(Command::Release { bytes }) => bytes,
            _ => 0,
        };
        let reply = match result {
            Ok(released) => {
                ballast.set(released.ballast_bytes, now);
                Ok(Reply { done: released.bytes, complete: released.bytes >= asked })
            }
            Err(error) => {
                warn!(%device, error, "nothing was given out");
                Err(KeeperFailed)
            }
        };
        self.replied(device, reply, now, wards, order);
    }

    fn replied(
        &mut self,
        device: &Arc<str>,
        reply: Result<Reply, KeeperFailed>,
        now: Millis,
        wards: &mut Wards,
        mut order: impl FnMut(Order),
    ) {
        let flight = self.ballasts.get_mut(device).and_then(|ballast| ballast.flight.take());
        if flight.is_none() {
            return;
        }
        if let Some(pool) = self.by_device.get_mut(device) {
            let decision = match reply {
                Ok(reply) => pool.state.replied(reply, now),
                Err(KeeperFailed) => pool.state.failed(now),
            };
            self.carry_out(device, decision, now, wards, &mut order);
        }
    }

    /// Carries a decision out, in its order: nothing after the journal is done before that is written.
    fn carry_out(
        &mut self,
        device: &Arc<str>,
        decision: Decision,
        now: Millis,
        wards: &mut Wards,
        order: &mut impl FnMut(Order),
    ) {
        let Decision { lower, journal, raise, answers, command, sample_soon } = decision;
        for grant in lower {
            wards.grant(&grant.uid, device, grant.granted);
        }
        if journal && let Err(error) = self.write() {
            if !std::mem::replace(&mut self.unwritten, true) {
                warn!(%error, "grants cannot be written down, so nothing more is granted: see to the state directory");
            }
            self.start_over(device, now, order);
            return;
        }
        if journal {
            self.unwritten = false;
        }
        for grant in raise {
            wards.grant(&grant.uid, device, grant.granted);
        }
        for given in answers {
            if let Some((_, want)) = self.asked.remove(&given.id) {
                order(answer(&want, given.outcome));
            }
        }
        if let Some(command) = command {
            let device = Arc::clone(device);
            self.ballasts.entry(Arc::clone(&device)).or_default().flight = Some(command);
            order(Order::Keeper(match command {
                Command::Reserve { bytes, keep_free } => link::Order::Reserve { device, bytes, keep_free },
                Command::Release { bytes } => link::Order::Release { device, bytes },
            }));
        }
        // While a command is under way its answer comes first.
        self.hurry |= sample_soon && command.is_none();
        if let Some(pool) = self.by_device.get_mut(device) {
            pool.report = pool.state.report();
        }
    }

    /// Writes the grants of all devices; those of devices that are not there now stand as they are.
    fn write(&mut self) -> std::io::Result<()> {
        let mut entries: Vec<Entry> =
            self.by_device.iter().map(|(device, pool)| pool.state.entry(device)).collect();
        let absent =
            self.grants.devices().iter().filter(|entry| !self.by_device.contains_key(entry.device.as_str()));
        entries.extend(absent.cloned());
        self.grants.write(entries)
    }

    /// Forgets what was decided and not written down.
    fn start_over(&mut self, device: &Arc<str>, now: Millis, order: &mut impl FnMut(Order)) {
        self.refuse_all(device, order);
        let Some(pool) = self.by_device.get_mut(device) else { return };
        let settings = pool.state.settings().clone();
        let state = match self.grants.device(device) {
            Some(entry) => DevicePool::restore(settings, entry, now),
            None => DevicePool::new(settings),
        };
        pool.state = state.awaiting(self.ballasts.get(device).and_then(|ballast| ballast.flight));
        pool.report = pool.state.report();
    }

    /// Answers everybody who waits for memory of a device.
    fn refuse_all(&mut self, device: &str, order: &mut impl FnMut(Order)) {
        self.asked.retain(|_, (of, want)| {
            let theirs = **of == *device;
            if theirs {
                order(answer(want, Outcome::Refused(Refusal::NotMeasured)));
            }
            !theirs
        });
    }
}

/// What a guard is answered.
fn answer(want: &Want, outcome: Outcome) -> Order {
    let (device, ticket) = (want.device, want.ticket);
    let what = match outcome {
        Outcome::Granted { granted } => ToGuard::Granted { device, ticket, granted_units: granted / UNIT },
        Outcome::Refused(refusal) => {
            let reason = match refusal {
                Refusal::OverLimit => NotGrantedReason::OverLimit,
                Refusal::TimedOut | Refusal::KeeperSlow => NotGrantedReason::Timeout,
                Refusal::UnknownPod => NotGrantedReason::UnknownDevice,
                Refusal::TooLarge
                | Refusal::PoolEmpty
                | Refusal::Frozen
                | Refusal::TooManyWaiting
                | Refusal::NotMeasured => NotGrantedReason::NoMemory,
            };
            ToGuard::NotGranted { device, ticket, reason }
        }
    };
    Order::Guard(guard::Order::Tell { connection: want.connection, what })
}

/// What policy says of a pool, in the words of the pool.
fn settings(policy: &PoolPolicy) -> Settings {
    let unsigned = |n: i32| u32::try_from(n).unwrap_or(0);
    let milliseconds = |seconds: i32| u64::from(unsigned(seconds)).saturating_mul(1_000);
    Settings {
        size_percent: unsigned(policy.size_percent.unwrap_or(0)),
        min_size: policy.min_size.map_or(0, ByteSize::bytes),
        max_percent: unsigned(policy.max_percent()),
        margin: policy.margin().bytes(),
        grant_step: policy.step().bytes(),
        start_hold_ms: milliseconds(policy.start_hold_seconds()),
        adaptive: policy.adaptive.as_ref().map(|rule| adaptive::Rule {
            every_requests: unsigned(rule.every_requests),
            every_ms: milliseconds(rule.every_minutes).saturating_mul(60),
            grow_above_percent: unsigned(rule.grow_above_percent),
            shrink_below_percent: unsigned(rule.shrink_below_percent),
            by_percent: unsigned(rule.change_percent),
        }),
        decay: Decay {
            per_mille: 1_000u32.saturating_sub(unsigned(policy.decay_percent()).saturating_mul(10)),
            every_ms: 60_000,
        },
        ..Settings::default()
    }
}
