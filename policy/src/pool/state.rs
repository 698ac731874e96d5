//! The state machine of a pool: what is seen, asked and answered goes in, decisions come out.

use std::{collections::BTreeMap, sync::Arc};

use highwater_crds::ByteSize;

use crate::{
    pool::{
        Command, Decision, DeviceBytes, Facts, Grant, Kind, PodDemand, PodReport, Pressure, Reply, Report,
        Settings, adaptive,
        grant::{Pod, by_age, cover},
        journal::{Entry, Held},
        ladder,
        page::{self, Numbers},
        size::{self, percent, share_of},
        wait::{Outcome, Queue, Refusal, Request, Waiting},
    },
    time::Millis,
};

/// After a refusal of the driver to hold back more, in milliseconds, doubled up to the most.
const RESERVE_PAUSE: u64 = 10_000;
const RESERVE_PAUSE_MOST: u64 = 60_000;
/// After a failure of the keeper, in milliseconds, doubled up to the most.
const RELEASE_PAUSE: u64 = 100;
const RELEASE_PAUSE_MOST: u64 = 5000;
/// What the driver may take on a device without charging anybody: measured 3.25 MiB and 5.56 MiB a
/// context (`docs/benchmarks/real-gpu.md`), for the contexts that begin within a sample.
const UNCHARGED: u64 = 64 * ByteSize::MI;

mod place;
mod sums;

use self::sums::{Pause, Sums, Takers, positive};

/// The pool of one device.
#[derive(Clone, Debug)]
pub struct DevicePool {
    settings: Settings,
    /// Share of the device in parts per million.
    share: u32,
    adaptive: adaptive::State,
    pods: BTreeMap<Arc<str>, Pod>,
    queue: Queue,
    /// Who has the bytes of the device: as last seen, and moved on by what the keeper replied.
    device: Option<DeviceBytes>,
    ballast: Option<u64>,
    pressure: Pressure,
    in_flight: Option<Command>,
    /// When the last reply came. What was read before may be of before.
    replied_at: Option<Millis>,
    /// Bytes of grants that were due at once and for which nothing was given out yet.
    due: u64,
    reserving: Pause,
    releasing: Pause,
    takers: Takers,
    /// What the journal holds if every decision was carried out.
    written: Holdings,
    /// What quota pages say if every decision was carried out.
    shown: BTreeMap<Arc<str>, u64>,
}

/// What the journal holds: what each pod may have, and the share of the device.
type Holdings = (Vec<(Arc<str>, Kind, u64)>, u32);

/// What is decided at one event.
#[derive(Debug, Default)]
struct Turn {
    answers: Vec<super::Answer>,
    sample_soon: bool,
    /// A sample was taken,
    sampled: bool,
    /// and all of it was told.
    fresh: bool,
}

impl DevicePool {
    /// A pool of which nothing is known yet.
    pub fn new(settings: Settings) -> Self {
        Self {
            share: percent(settings.size_percent),
            settings,
            adaptive: adaptive::State::default(),
            pods: BTreeMap::new(),
            queue: Queue::default(),
            device: None,
            ballast: None,
            pressure: Pressure::default(),
            in_flight: None,
            replied_at: None,
            due: 0,
            reserving: Pause::default(),
            releasing: Pause::default(),
            takers: Takers::default(),
            written: Holdings::default(),
            shown: BTreeMap::new(),
        }
    }

    /// A pool whose grants were written down before a crash. What is not free for them is given
    /// out again at the first sample; pods that are gone are dropped then.
    pub fn restore(settings: Settings, entry: &Entry, now: Millis) -> Self {
        let mut pool = Self::new(settings);
        if pool.settings.adaptive.is_some() && entry.size_percent == pool.settings.size_percent {
            pool.share = entry.share.min(size::WHOLE);
        }
        for Held { pod, kind, granted } in &entry.grants {
            pool.pods.insert(pod.as_str().into(), Pod::restored(*kind, *granted, now));
        }
        pool.written = pool.held();
        pool
    }

    /// The same with a command that is under way already: its reply is still to come.
    #[must_use]
    pub fn awaiting(mut self, command: Option<Command>) -> Self {
        self.in_flight = command;
        self
    }

    /// What policy says of it.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Takes over what policy says now. It takes effect at the next event.
    pub fn set_settings(&mut self, settings: Settings) {
        if settings.adaptive.is_none() || settings.size_percent != self.settings.size_percent {
            self.share = percent(settings.size_percent);
            self.adaptive = adaptive::State::default();
        }
        self.settings = settings;
    }

    /// A sample of the device. One that began before the keeper's last reply, or while a command
    /// is under way, moves nothing.
    pub fn sample(&mut self, facts: &Facts<'_>, now: Millis) -> Decision {
        let mut turn = Turn { sampled: true, ..Turn::default() };
        self.pressure = facts.pressure;
        if let Some(pods) = facts.pods {
            self.meet(pods, now, &mut turn);
        }
        let settled = self.in_flight.is_none() && self.replied_at.is_none_or(|at| facts.at > at);
        if settled {
            self.ballast = facts.ballast;
        }
        if settled && !facts.torn && self.measure(facts, now) {
            turn.fresh = true;
            self.judge(facts.at, now);
        }
        self.proceed(turn, now)
    }

    /// A guard asks for more.
    pub fn request(&mut self, request: Request, now: Millis) -> Decision {
        let mut turn = Turn::default();
        if self.device.is_some() {
            let sums = self.sums();
            self.adaptive.request(sums.entitled, sums.size.pool);
        }
        if let Some(pod) = self.pods.get_mut(&request.uid) {
            pod.asks(now);
        }
        let (uid, id) = (request.uid.clone(), request.id);
        if let Err(refusal) = self.queue.push(request, now) {
            turn.answers.push(super::Answer { uid, id, outcome: Outcome::Refused(refusal) });
        }
        self.proceed(turn, now)
    }

    /// Nobody waits for the answer to a request any more; none will be given.
    pub fn withdraw(&mut self, id: u64, now: Millis) -> Decision {
        if let Some(waiting) = self.queue.remove(id) {
            self.disentitle(&waiting.request.uid);
        }
        self.proceed(Turn::default(), now)
    }

    /// The keeper's reply to the command under way.
    pub fn replied(&mut self, reply: Reply, now: Millis) -> Decision {
        let mut turn = Turn::default();
        if let Some(command) = self.in_flight.take() {
            self.replied_at = Some(now);
            self.move_bytes(command, reply, now);
            turn.sample_soon = true;
        }
        self.proceed(turn, now)
    }

    /// The keeper failed at the command under way, which says nothing of the device: it is tried again
    /// soon.
    pub fn failed(&mut self, now: Millis) -> Decision {
        let mut turn = Turn::default();
        if let Some(command) = self.in_flight.take() {
            self.replied_at = Some(now);
            let free = self.device.map_or(0, |device| device.free);
            let pause = match command {
                Command::Reserve { .. } => &mut self.reserving,
                Command::Release { .. } => &mut self.releasing,
            };
            pause.begin(RELEASE_PAUSE, RELEASE_PAUSE_MOST, free, now);
            turn.sample_soon = true;
        }
        self.proceed(turn, now)
    }

    /// Nothing but the passing of time.
    pub fn tick(&mut self, now: Millis) -> Decision {
        self.proceed(Turn::default(), now)
    }

    /// When time alone may change something: a request is refused, or something is tried again.
    pub fn next_deadline(&self) -> Option<Millis> {
        let waiting = self.queue.iter().map(|w| self.deadline(w));
        waiting.chain(self.releasing.until).min()
    }

    /// What to write to the journal for a device.
    pub fn entry(&self, device: &str) -> Entry {
        let grants = self
            .held()
            .0
            .into_iter()
            .map(|(pod, kind, granted)| Held { pod: pod.to_string(), kind, granted })
            .collect();
        Entry {
            device: device.to_owned(),
            size_percent: self.settings.size_percent,
            share: self.share,
            grants,
        }
    }

    /// The quota page of a pod that has charged so many bytes.
    pub fn page(&self, uid: &str, charged: u64) -> Option<Numbers> {
        let pod = self.pods.get(uid)?;
        let obtainable = self.reach(uid, pod).saturating_sub(charged);
        let free = page::left(pod.limit, charged, Some(obtainable));
        Some(Numbers { limit: pod.limit, granted: pod.granted, free })
    }

    /// How the pool stands.
    pub fn report(&self) -> Report {
        let sums = self.sums();
        let raw = self.device.map_or(0, |device| device.free);
        let pods: Vec<_> = self.pods.iter().map(|(uid, pod)| report(uid, pod, raw)).collect();
        let uncovered = pods.iter().fold(0u64, |sum, pod| sum.saturating_add(pod.uncovered));
        let granted = pods.iter().fold(0u64, |sum, pod| sum.saturating_add(pod.granted));
        Report {
            size: sums.size.pool,
            ballast: self.ballast,
            ballast_target: sums.target(),
            granted,
            owed: sums.owed,
            short: uncovered.saturating_add(sums.owed.saturating_sub(sums.ballast)),
            utilisation_percent: share_of(granted, sums.size.pool) / (size::WHOLE / 100),
            waiting: self.queue.len(),
            start_hold_until: self.start_hold_until(),
            pods,
        }
    }

    // What is seen.

    /// Learns which pods there are.
    fn meet(&mut self, demands: &[PodDemand], now: Millis, turn: &mut Turn) {
        let mut gone: Vec<_> = self.pods.keys().cloned().collect();
        gone.retain(|uid| !demands.iter().any(|demand| demand.uid == *uid));
        for uid in gone {
            self.pods.remove(&uid);
            let refused = Outcome::Refused(Refusal::UnknownPod);
            turn.answers.extend(self.queue.answer(|w| (w.request.uid == uid).then_some(refused)));
        }
        for demand in demands {
            self.pods
                .entry(demand.uid.clone())
                .and_modify(|pod| pod.demand(demand))
                .or_insert_with(|| Pod::new(demand, now));
        }
    }

    /// Learns who holds what. Whether all of it was told.
    fn measure(&mut self, facts: &Facts<'_>, now: Millis) -> bool {
        let (Some(device), Some(demands)) = (facts.device, facts.pods) else { return false };
        if demands.iter().any(|demand| demand.used.is_none()) {
            return false;
        }
        for demand in demands {
            if let (Some(pod), Some(used)) = (self.pods.get_mut(&demand.uid), demand.used) {
                pod.hold(used, demand.charged, now);
            }
        }
        self.device = Some(device);
        true
    }

    /// Books what the keeper did.
    fn move_bytes(&mut self, command: Command, reply: Reply, now: Millis) {
        let (held, free) = (self.ballast.unwrap_or(0), self.device.map_or(0, |device| device.free));
        let (held, free, pause) = match command {
            Command::Reserve { .. } => {
                let done = reply.done.min(free);
                (held.saturating_add(done), free.saturating_sub(done), &mut self.reserving)
            }
            Command::Release { .. } => {
                let done = reply.done.min(held);
                self.due = self.due.saturating_sub(done);
                (held.saturating_sub(done), free.saturating_add(done), &mut self.releasing)
            }
        };
        match command {
            _ if reply.complete => *pause = Pause::default(),
            Command::Reserve { .. } => pause.begin(RESERVE_PAUSE, RESERVE_PAUSE_MOST, free, now),
            Command::Release { .. } if reply.done == 0 => {
                pause.begin(RELEASE_PAUSE, RELEASE_PAUSE_MOST, free, now);
            }
            Command::Release { .. } => {}
        }
        self.ballast = Some(held);
        if let Some(device) = &mut self.device {
            device.free = free;
        }
    }

    // What follows from a sample.

    /// What a fresh sample, begun at `at`, changes by itself.
    fn judge(&mut self, at: Millis, now: Millis) {
        for pod in self.pods.values_mut() {
            pod.settle(at);
        }
        let ungranted = self.pods.values().fold(0u64, |sum, pod| sum.saturating_add(pod.ungranted()));
        let nameless = self.device.map_or(0, |device| device.nameless()).saturating_add(self.ungoverned());
        self.takers.see(ungranted, nameless, now);
        let still = self.start_hold_until().is_some_and(|until| now < until);
        for (uid, pod) in &mut self.pods {
            let asking = self.queue.of(uid).next().is_some();
            let mut to = pod.falls_to(self.settings.decay, still, asking, now);
            if self.pressure.reclaim {
                to = to.min(pod.entitled.saturating_sub(pod.idle_surplus()));
            }
            pod.lower(to, now);
        }
        let taken = self.taken();
        self.cut();
        if self.taken() > taken {
            self.takers.take_again();
        }
        self.adapt(still, now);
    }

    /// Grants whose bytes others took are cut to what is there: first what is above guarantees,
    /// then the last bound first.
    fn cut(&mut self) {
        let free = self.grantable();
        let unused = self.pods.values().fold(0u64, |sum, pod| sum.saturating_add(pod.unused_now()));
        let mut missing = unused.saturating_sub(free);
        for pod in self.pods.values_mut() {
            missing = missing.saturating_sub(pod.disillusion(missing));
        }
        let mut order = by_age(&self.pods);
        order.reverse();
        for all in [false, true] {
            for uid in &order {
                let Some(pod) = self.pods.get_mut(uid) else { continue };
                let floor = if all { pod.used } else { pod.used.max(pod.guarantee()) };
                let by = ladder::ceil(missing).min(pod.granted.saturating_sub(floor));
                missing = missing.saturating_sub(by);
                pod.cut(by);
            }
        }
        // What was still to come may be gone as well.
        let Some(ballast) = self.ballast else { return };
        let sums = self.sums();
        let mut missing = sums.unused.saturating_sub(sums.free.saturating_add(ballast));
        for uid in &order {
            let Some(pod) = self.pods.get_mut(uid) else { continue };
            missing = missing.saturating_sub(pod.forgo(ladder::ceil(missing)));
        }
        for waiting in self.queue.iter_mut() {
            let pod = self.pods.get(&waiting.request.uid);
            if pod.is_some_and(|pod| waiting.request.wanted > pod.entitled) {
                waiting.placed = None;
            }
        }
    }

    /// What others took of grants, together.
    fn taken(&self) -> u64 {
        self.pods.values().fold(0u64, |sum, pod| sum.saturating_add(pod.taken))
    }

    /// Lets the size of the pool follow its use.
    fn adapt(&mut self, still: bool, now: Millis) {
        let Some(rule) = self.settings.adaptive.filter(|_| !still) else { return };
        let sums = self.sums();
        let initial = percent(self.settings.size_percent);
        let least = match self.settings.min_size {
            // Without one it keeps half of what it began with: growing back by tenths takes long.
            0 => initial / 2,
            min => share_of(min, sums.size.base),
        };
        let promised = share_of(sums.entitled.saturating_add(sums.owed), sums.size.base);
        let bounds =
            adaptive::Bounds { least: least.max(promised), most: percent(self.settings.max_percent) };
        self.share = self.adaptive.step(&rule, self.share, bounds, (sums.entitled, sums.size.pool), now);
    }

    // What follows from any event.

    fn proceed(&mut self, mut turn: Turn, now: Millis) -> Decision {
        if !self.releasing.holds(now) {
            self.releasing.until = None;
        }
        self.cover();
        if self.device.is_some() {
            self.place(now, &mut turn);
            self.publish();
        }
        self.answer(now, &mut turn);
        let command = self.command(now, &mut turn);
        self.in_flight = self.in_flight.or(command);
        let (mut lower, mut raise) = (Vec::new(), Vec::new());
        self.shown.retain(|uid, _| self.pods.contains_key(uid));
        for (uid, pod) in &self.pods {
            let shown = self.shown.entry(uid.clone()).or_insert(0);
            let list = if pod.granted < *shown { &mut lower } else { &mut raise };
            if pod.granted != *shown {
                *shown = pod.granted;
                list.push(Grant { uid: uid.clone(), granted: pod.granted });
            }
        }
        let held = self.held();
        let journal = held != self.written;
        self.written = held;
        Decision {
            lower,
            journal,
            raise,
            answers: turn.answers,
            command,
            sample_soon: turn.sample_soon || command.is_some(),
        }
    }

    /// How much of each guarantee is covered: by the pool as it should be, or by what is held and
    /// granted already where that is more.
    fn cover(&mut self) {
        let sums = self.sums();
        let held = self.ballast.unwrap_or(0).saturating_add(sums.entitled).min(sums.size.undisturbed);
        cover(&mut self.pods, sums.size.pool.max(held));
    }

    /// Lets pods have what they are entitled to, as far as it is free.
    fn publish(&mut self) {
        let free = self.grantable().saturating_sub(self.moving());
        let unused = self.pods.values().fold(0u64, |sum, pod| sum.saturating_add(pod.unused_now()));
        let mut left = free.saturating_sub(unused);
        for uid in by_age(&self.pods) {
            let Some(pod) = self.pods.get_mut(&uid) else { continue };
            if pod.entitled <= pod.granted {
                continue;
            }
            // What it holds anyway, or may believe that it may have, costs nothing more.
            let most = pod.used.max(pod.believed()).saturating_add(left);
            let to = if pod.entitled <= most { pod.entitled } else { ladder::floor(most).max(pod.granted) };
            if to > pod.granted {
                let before = pod.unused_now();
                pod.granted = to;
                left = left.saturating_sub(pod.unused_now().saturating_sub(before));
            }
        }
    }

    /// Answers what can be answered, and what can wait no longer.
    fn answer(&mut self, now: Millis, turn: &mut Turn) {
        let patience = self.patience();
        let (pods, frozen, measured) = (&self.pods, self.pressure.freeze, self.device.is_some());
        let ever = self.sums().size.ever;
        let answers = self.queue.answer(|waiting| {
            let Request { uid, wanted, wait_ms, .. } = &waiting.request;
            let pod = pods.get(uid);
            match pod {
                Some(pod) if *wanted > pod.limit => return Some(Outcome::Refused(Refusal::OverLimit)),
                Some(pod) if *wanted <= pod.granted => {
                    return Some(Outcome::Granted { granted: pod.granted });
                }
                // It would only keep those behind it waiting.
                Some(pod) if measured && *wanted > ever.max(pod.entitled).max(pod.covered) => {
                    return Some(Outcome::Refused(Refusal::TooLarge));
                }
                _ => {}
            }
            let patient = !measured || pod.is_none_or(|pod| *wanted <= pod.covered);
            if now < waiting.deadline(patient, patience) {
                return None;
            }
            Some(Outcome::Refused(match () {
                () if pod.is_none() => Refusal::UnknownPod,
                () if !measured => Refusal::NotMeasured,
                () if waiting.placed.is_some() => Refusal::KeeperSlow,
                () if frozen && !patient => Refusal::Frozen,
                () if *wait_ms == 0 => Refusal::PoolEmpty,
                () => Refusal::TimedOut,
            }))
        });
        for answer in answers.iter().filter(|answer| matches!(answer.outcome, Outcome::Refused(_))) {
            self.disentitle(&answer.uid);
        }
        turn.answers.extend(answers);
    }

    /// What to ask of the keeper.
    fn command(&mut self, now: Millis, turn: &mut Turn) -> Option<Command> {
        let device = self.device?;
        let ballast = self.ballast?;
        if self.in_flight.is_some() {
            return None;
        }
        let sums = self.sums();
        let need = sums.unused.saturating_sub(sums.free);
        let over = ballast.saturating_sub(sums.most());
        self.due = self.due.min(over);
        let still = self.start_hold_until().is_some_and(|until| now < until);
        let give = if still || over < ladder::EDGE.max(self.due) {
            self.due
        } else {
            over.min(self.due.max(self.settings.reserve_step))
        };
        let give = ladder::ceil(need.max(give)).min(ballast);
        if give > 0 {
            return (!self.releasing.holds(now)).then_some(Command::Release { bytes: give });
        }
        let missing = sums.target().saturating_sub(ballast);
        let keep_free = device.set_aside.saturating_add(sums.unused).saturating_add(self.settings.margin);
        let most = device.free.saturating_sub(keep_free).min(self.settings.reserve_step);
        let take = ladder::floor(missing.min(most));
        let paused =
            self.reserving.holds(now) && device.free < self.reserving.free.saturating_add(ladder::EDGE);
        let urgent = sums.owed > ballast;
        if paused || take == 0 || (take < ladder::EDGE && !urgent) {
            return None;
        }
        // What is free may have changed: it is read again before more is held back.
        turn.sample_soon |= !turn.sampled;
        turn.fresh.then_some(Command::Reserve { bytes: take, keep_free })
    }

    // Small things.

    fn sums(&self) -> Sums {
        let device = self.device.unwrap_or_default();
        let moving = self.moving();
        let sum = |of: fn(&Pod) -> u64| self.pods.values().fold(0u64, |sum, pod| sum.saturating_add(of(pod)));
        Sums {
            size: size::size(&self.settings, self.share, &device, self.ungoverned()),
            entitled: sum(|pod| pod.entitled),
            owed: sum(Pod::owed),
            unused: sum(Pod::unused),
            free: self.grantable().saturating_sub(moving),
            moving: moving.min(device.usable_free()),
            ballast: self.ballast.unwrap_or(0),
        }
    }

    /// Free, and possible to grant. Of the margin a part is never granted: a context costs the device
    /// more than its process is charged, and a pod that was granted just what it asked for would be
    /// refused by the driver.
    fn grantable(&self) -> u64 {
        let free = self.device.map_or(0, |device| device.usable_free());
        free.saturating_sub(self.settings.margin.min(UNCHARGED))
    }

    /// What the keeper may be holding back at this moment.
    fn moving(&self) -> u64 {
        match self.in_flight {
            Some(Command::Reserve { bytes, .. }) => bytes,
            _ => 0,
        }
    }

    /// Held by pods that have no quota.
    fn ungoverned(&self) -> u64 {
        let governed = self.pods.values().fold(0u64, |sum, pod| sum.saturating_add(pod.used));
        self.device.map_or(0, |device| device.pods).saturating_sub(governed)
    }

    fn start_hold_until(&self) -> Option<Millis> {
        self.pods.values().map(|pod| pod.bound_at.plus(self.settings.start_hold_ms)).max()
    }

    fn patience(&self) -> u64 {
        self.settings.keeper_timeout_ms
    }

    /// When a request that waits is refused at last.
    fn deadline(&self, waiting: &Waiting) -> Millis {
        let known = self.device.is_some() && self.pods.contains_key(&waiting.request.uid);
        waiting.deadline(!known || self.is_owed(&waiting.request), self.patience())
    }

    /// Whether all that is asked for is guaranteed and covered.
    fn is_owed(&self, request: &Request) -> bool {
        self.pods.get(&request.uid).is_some_and(|pod| request.wanted <= pod.covered)
    }

    /// Takes back what a guarded pod was entitled to ahead of use or for a request that is no
    /// more, and was not given yet.
    fn disentitle(&mut self, uid: &str) {
        let asked = self.queue.of(uid).filter(|w| w.placed.is_some());
        let asked = asked.map(|w| ladder::ceil(w.request.wanted)).max().unwrap_or(0);
        if let Some(pod) = self.pods.get_mut(uid).filter(|pod| pod.kind == Kind::Elastic) {
            pod.disentitle(asked);
        }
    }

    /// What a request of the pod would be given at once, in bytes in total.
    fn reach(&self, uid: &str, pod: &Pod) -> u64 {
        let sums = self.sums();
        if self.device.is_none() || pod.entitled >= pod.limit {
            return pod.entitled.min(pod.limit.max(pod.granted));
        }
        let there = positive(sums.physical()).saturating_add(pod.ungranted());
        let owed = pod.owed().min(ladder::floor(there));
        let others = self
            .queue
            .iter()
            .any(|w| *w.request.uid != *uid && w.placed.is_none() && !self.is_owed(&w.request));
        let spare =
            if owed < pod.owed() || self.pressure.freeze || others { 0 } else { sums.spare(pod.ungranted()) };
        pod.entitled.saturating_add(owed).saturating_add(ladder::floor(spare)).min(pod.limit)
    }

    /// What the journal holds.
    fn held(&self) -> Holdings {
        let pods = self.pods.iter().filter(|(_, pod)| pod.entitled > 0);
        (pods.map(|(uid, pod)| (uid.clone(), pod.kind, pod.entitled)).collect(), self.share)
    }
}

fn report(uid: &Arc<str>, pod: &Pod, free: u64) -> PodReport {
    PodReport {
        uid: uid.clone(),
        kind: pod.kind,
        granted: pod.granted,
        entitled: pod.entitled,
        guarantee: pod.guarantee(),
        used: pod.used,
        uncovered: pod.guarantee().saturating_sub(pod.covered.max(pod.entitled)),
        shrinking: pod.shrinking(),
        ungranted: pod.ungranted(),
        taken: pod.taken,
        overshoot: free.saturating_sub(pod.unused()),
    }
}

#[cfg(test)]
mod tests;
