//! The agent's state and its one round: sample -> attribute -> account -> decide -> act ->
//! publish.
//!
//! Sampling and attribution come from the sampler's thread. The rest happens here, in one go for
//! every sample and without waiting for anybody: a signal is written in the round in which its
//! reason was seen. What is for the API server is handed over as jobs.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use highwater_crds::{
    ByteSize, DeviceFault, GpuMemoryNode, Level, Mode, Strength, StrengthCounts, StrengthReason, TopPod,
};
use highwater_guard_abi::{
    page::DeviceQuota,
    wire::{NotGrantedReason, ToGuard},
};
use highwater_policy::{
    episode, host_status,
    ledger::Sample,
    node_status::{self, DeviceFacts, Facts, Watch},
    pod::GuardOptIn,
    pool::{DeviceBytes, Kind, PodDemand, Pressure, page},
    quota::{self, BreachChange},
    time::Millis,
};
use jiff::Timestamp;
use tracing::{error, info, warn};

mod acting;

use crate::{
    account::{Device, memory},
    act::{Acts, At, carry::Carries, hook, hooks::Hooks, parks::Parks, record::Record, restart},
    decide::{Change, Place, Rules, Tenant, Wanted},
    episodes::{Episodes, Moment, name_of},
    evidence::{self, Evidence, Found},
    guard::{self, News, Want},
    host::Survey,
    hosts::Hosts,
    leaks::{Leaks, Snapshot as LeaksSeen},
    limits::{Ability, Limits, Task},
    link::{self, Heard},
    metrics::{Gauges, Metrics, Shown},
    plan::{Cache, Plan},
    pod_resources::Snapshot,
    pools::{self, Pools},
    publish::{Attempt, Done, Job, NodeWriter, Notice, What},
    sampler::{Pass, Report, Sampled},
    signal::Signals,
    strength::{self, Grounds, Guarded, Steady},
    wards::{self, Keeper, Wards},
    world::{self, Pod, World, WorldChange},
};

/// Without a word from the API server for so long, it is asked whether it is there.
const PROBE_AFTER: Duration = Duration::from_secs(30);
/// How often who is where is looked up anew, whether or not something changed.
const RULES_EVERY: u64 = 10_000;
/// Without a sample for so long, what follows from the state is done on the tick.
const IDLE_AFTER: u64 = 1_000;
/// Without a sample for so long, the agent calls itself ill.
const ILL_AFTER: Duration = Duration::from_mins(1);

/// A plan that does not bind is taken to be gone only after this, in milliseconds, unless the API server
/// said so: an agent that has just started knows an old one.
const SETTLED: u64 = 60_000;
/// Bytes that a pod holds and that were granted to nobody, from which on that is told.
const TOOK: u64 = 64 * ByteSize::MI;
/// How long after it came to a device a pod is taken to be starting, in milliseconds.
const STARTING: u64 = 300_000;
/// Pods that are told that they may have memory which no list shows.
const SUSPECTS_TOLD: usize = 8;
/// How long it may take to find out what kind of process avoids the guard before it is told without, in
/// milliseconds.
const INSPECT_WITHIN: u64 = 500;

/// Something to be done by others than the API server.
#[derive(Debug)]
pub(crate) enum Order {
    /// By the thread that serves guards.
    Guard(guard::Order),
    /// By the keeper.
    Keeper(link::Order),
    /// By the driver.
    Limit(Task),
    /// By the engine in a pod.
    Hook(hook::Call),
    /// About the processes of a pod.
    Restart(restart::Order),
    /// Finds out what is needed to park a pod.
    Survey(Survey),
    /// Keeps what was seen of leaks.
    Keep(Box<LeaksSeen>),
}

/// What people were told of a pod on a device, so that they are told once, and again after a while.
#[derive(Debug, Default)]
struct Told(HashMap<(Arc<str>, Arc<str>, &'static str), Millis>);

impl Told {
    /// How long until the same is told again, in milliseconds.
    const AGAIN: u64 = 600_000;

    /// Whether this is to be told now.
    fn is_news(&mut self, pod: &Arc<str>, device: &Arc<str>, what: &'static str, now: Millis) -> bool {
        let key = (Arc::clone(pod), Arc::clone(device), what);
        let news = self.0.get(&key).is_none_or(|told| now.since(*told) >= Self::AGAIN);
        if news {
            self.0.insert(key, now);
        }
        news
    }
}

/// What the agent is made with.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    /// Name of the node.
    pub(crate) node: String,
    /// The release namespace.
    pub(crate) release_namespace: String,
    /// Where plan and grants are kept.
    pub(crate) state_dir: PathBuf,
    /// `/proc` of the host.
    pub(crate) proc_root: PathBuf,
    /// There is to be a keeper.
    pub(crate) keeper: bool,
    /// Whether the driver may set limits on the node's cgroups; else why not.
    pub(crate) cgroups: Result<(), StrengthReason>,
    /// Host memory can be read, by cgroup v2.
    pub(crate) host_memory: bool,
    /// How long guards' questions take.
    pub(crate) grants: prometheus::HistogramVec,
}

/// Tells the time: on the monotonic clock, and for people.
pub(crate) type Clock = fn() -> (Instant, Timestamp);

/// The agent.
#[allow(clippy::struct_excessive_bools, reason = "independent facts")]
pub(crate) struct Engine {
    clock: Clock,
    node: String,
    release_namespace: String,
    started: Instant,
    world: World,
    resources: Snapshot,
    plan: Option<Plan>,
    cache: Cache,
    binds: bool,
    stale: bool,
    /// What pods are to be shown may have changed since all of them were looked at.
    restless: bool,
    /// Whose host memory and whose framework's numbers are read may have changed since that was asked.
    asks_anew: bool,
    ruled: Millis,
    evidence: Evidence,
    watch: Option<Watch>,
    driver: Option<String>,
    devices: Vec<(Device, Rules)>,
    /// The levels that an earlier agent showed, by UUID, as far as nobody has gone on from them.
    /// Absent: not known yet.
    levels: Option<HashMap<String, Level>>,
    /// Since when devices have been measured without a break.
    measured: Option<Millis>,
    last_pass: Option<(Millis, Timestamp)>,
    /// How the host fares, once it is known what an earlier agent told of it.
    fares: Option<host_status::Host>,
    /// When that was asked last.
    fares_asked: Option<Millis>,
    blocked: Option<Duration>,
    acts: Acts,
    hooks: Hooks,
    parks: Parks,
    carries: Carries,
    hosts: Hosts,
    leaks: Leaks,
    host_memory: bool,
    /// How often idle memory was taken back.
    reclaims: u64,
    episodes: Episodes,
    writer: NodeWriter,
    contact: Option<Instant>,
    probe: Attempt,
    metrics: Metrics,
    wards: Wards,
    pools: Pools,
    limits: Limits,
    ability: Ability,
    /// The strength that a pod without a guard has here.
    base: Steady,
    /// The keeper was told to stand down.
    stood_down: bool,
    swept: bool,
    told: Told,
    submit: Box<dyn FnMut(Job)>,
    order: Box<dyn FnMut(Order)>,
}

impl Engine {
    /// An agent that knows nothing yet but the last plan and the last grants. `submit` takes what is to
    /// be written, `order` what others are to do.
    ///
    /// # Errors
    /// Fails when metrics cannot be registered.
    pub(crate) fn new(
        clock: Clock,
        setup: Setup,
        signals: Signals,
        submit: impl FnMut(Job) + 'static,
        order: impl FnMut(Order) + 'static,
    ) -> prometheus::Result<Self> {
        let Setup { node, release_namespace, state_dir, proc_root, keeper, cgroups, host_memory, grants } =
            setup;
        let mut cache = Cache::new(&state_dir);
        let (started, wall) = clock();
        let metrics = Metrics::new(&node, grants)?;
        Ok(Self {
            clock,
            plan: cache.load(&node, Millis::default(), wall),
            node,
            release_namespace,
            started,
            world: World::default(),
            resources: Snapshot::default(),
            cache,
            binds: false,
            stale: true,
            restless: true,
            asks_anew: true,
            ruled: Millis::default(),
            evidence: Evidence::default(),
            watch: None,
            driver: None,
            devices: Vec::new(),
            levels: None,
            measured: None,
            last_pass: None,
            fares: None,
            fares_asked: None,
            blocked: None,
            acts: Acts::new(signals),
            hooks: Hooks::open(&state_dir),
            parks: Parks::default(),
            carries: Carries::new(Record::open(&state_dir, &proc_root)),
            hosts: Hosts::default(),
            leaks: Leaks::open(&state_dir, wall),
            host_memory,
            reclaims: 0,
            episodes: Episodes::default(),
            writer: NodeWriter::default(),
            contact: None,
            probe: Attempt::default(),
            metrics,
            wards: Wards::default(),
            pools: Pools::new(&state_dir, &proc_root, keeper),
            limits: Limits::default(),
            ability: Ability { driver: false, cgroups },
            base: Steady::default(),
            stood_down: false,
            swept: false,
            told: Told::default(),
            submit: Box::new(submit),
            order: Box::new(order),
        })
    }

    /// Whether the devices are to be let go of.
    pub(crate) fn stands_down(&self) -> bool {
        let planned = self.plan.as_ref().is_some_and(|plan| plan.spec.stand_down);
        planned || self.world.node.as_ref().is_some_and(|node| node.stand_down)
    }

    /// The sampler reports.
    pub(crate) fn report(&mut self, report: Report) {
        match report {
            Report::Opened { version, devices, limits } => {
                info!(driver = version, devices = devices.len(), limits, "measuring");
                self.driver = Some(version);
                self.ability.driver = limits;
                self.watch = Some(Watch::On);
                let mut before = std::mem::take(&mut self.devices);
                self.devices = devices
                    .into_iter()
                    .map(|info| match before.iter().position(|(device, _)| *device.uuid == *info.uuid) {
                        Some(at) => {
                            let (mut device, rules) = before.swap_remove(at);
                            device.describe(info);
                            (device, rules)
                        }
                        None => (Device::new(info), Rules::default()),
                    })
                    .collect();
                self.stale = true;
            }
            Report::Failed(why) => self.let_go(Watch::NoDriver(why)),
            Report::Closing(why) => self.let_go(Watch::StandingDown(why)),
            Report::Closed => {
                info!("every device handle is closed");
                self.let_go(Watch::StandDown);
            }
            Report::Pass(pass) => self.pass(&pass),
            Report::Limited(outcome) => {
                let (now, wall) = self.now();
                let Some(since) = self.limits.done(&outcome, now, wall) else { return };
                let Task { pod, device, bytes } = &outcome.task;
                if let Some(pod) = self.world.pods.get(pod) {
                    let limit = ByteSize(bytes.unwrap_or(0)).rounded();
                    info!(pod = pod.facts.name, namespace = pod.facts.namespace, %device, limit, "the driver holds the pod to its limit");
                    let note = format!("since {since} the driver holds the pod to {limit} on {device}");
                    (self.submit)(Job::Tell(Notice::normal(pod, "KernelLimit", "Limit", note)));
                }
            }
        }
    }

    fn let_go(&mut self, watch: Watch) {
        self.devices.clear();
        self.open_pages();
        self.restless = true;
        self.watch = Some(watch);
        self.last_pass = None;
        self.measured = None;
    }

    /// A round of samples was dropped.
    pub(crate) fn dropped(&self) {
        self.metrics.dropped.inc();
    }

    /// The API server says something new.
    pub(crate) fn world(&mut self, change: WorldChange) {
        self.heard();
        let (now, wall) = self.now();
        let plan = matches!(change, WorldChange::Plan(_));
        // A pod, or one of the switches that pause acts.
        self.restless |= !matches!(change, WorldChange::Incident(_));
        let effect = self.world.apply(change, now);
        self.stale |= effect.rules;
        for pod in effect.malformed {
            for error in &pod.facts.annotation_errors {
                let notice = Notice::warning(&pod, "InvalidAnnotation", "ReadAnnotations", error.to_string());
                (self.submit)(Job::Tell(notice));
            }
        }
        if plan {
            let object = self.world.object.as_ref();
            self.plan = object.map(|object| Plan::of(&self.node, object, now, wall));
            let status = object.and_then(|object| object.status.as_ref());
            let devices = status.map_or(&[][..], |status| status.devices.as_slice());
            let told = status.and_then(|status| status.host);
            self.fares.get_or_insert_with(|| {
                let mut fares = host_status::Host::default();
                fares.resume(&told.unwrap_or_default(), now);
                fares
            });
            self.levels.get_or_insert_with(|| devices.iter().map(|d| (d.uuid.clone(), d.level)).collect());
            if let Some(plan) = &self.plan {
                self.cache.save(plan);
            }
            self.check_plan(now);
            self.writer.seen(self.world.object.as_ref(), now);
        }
    }

    /// The kubelet says something new.
    pub(crate) fn resources(&mut self, snapshot: Snapshot) {
        self.resources = snapshot;
        self.stale = true;
    }

    /// Whether it is time to read how the host fares.
    pub(crate) fn asks_how_host_fares(&mut self) -> bool {
        let (now, _) = self.now();
        let due = self.fares_asked.is_none_or(|at| now.since(at) >= host_status::EVERY);
        let due = due && self.fares.is_some();
        if due {
            self.fares_asked = Some(now);
        }
        due
    }

    /// So the host fares.
    pub(crate) fn fares(&mut self, reading: &host_status::Reading) {
        let (now, _) = self.now();
        if let Some(fares) = &mut self.fares {
            fares.step(reading, now);
        }
    }

    /// Whether it is time to look which processes have devices open: some memory is in use that
    /// no process explains.
    pub(crate) fn seeks_evidence(&mut self) -> bool {
        let (now, _) = self.now();
        let sought = self.devices.iter().any(|(device, _)| device.ledger.unusual() > 0);
        self.evidence.is_due(sought, now)
    }

    /// Whether that is to be looked for at once: where memory is held back or guarded, somebody takes much
    /// past all that.
    pub(crate) fn is_alarmed(&mut self) -> bool {
        let (now, _) = self.now();
        let kept = |device: &Device| self.pools.has(&device.uuid) || self.wards.iter().next().is_some();
        let alarming =
            self.devices.iter().filter(|(device, _)| kept(device)).map(|(device, _)| device.unlisted());
        let alarming = alarming.max().unwrap_or(0);
        self.evidence.is_alarmed(alarming, now)
    }

    /// These processes have devices open.
    pub(crate) fn found(&mut self, found: Found) {
        let (now, _) = self.now();
        self.evidence.set(found);
        for (device, _) in self.devices.iter().filter(|(device, _)| evidence::is_alarming(device.unlisted()))
        {
            let suspects = self.evidence.suspects(device, &self.world);
            for (pod, _) in suspects.iter().zip(0..SUSPECTS_TOLD) {
                if !self.told.is_news(&pod.kubelet_uid, &device.uuid, "unlisted", now) {
                    continue;
                }
                let note = format!(
                    "{} are in use on {} that no process list shows: this pod is one of {} that may have them, and nobody is acted on for it",
                    ByteSize(device.unlisted()).rounded(),
                    device.uuid,
                    suspects.len(),
                );
                (self.submit)(Job::Tell(Notice::warning(pod, "UnlistedMemory", "Measure", note)));
            }
        }
    }

    /// A job ended.
    pub(crate) fn done(&mut self, done: Done) {
        let (now, _) = self.now();
        if done.written {
            self.heard();
        }
        match done.what {
            What::CreateNode(object) => {
                self.writer.created(done.written, now);
                if let Some(object) = object {
                    self.world(WorldChange::Plan(world::Change::Upsert(*object)));
                }
            }
            What::Status(status) => self.writer.written(*status, done.written, now),
            What::Create(key, incident) => {
                let (name, act) = (name_of(&incident), incident.spec.proposed.action);
                if done.written {
                    // The watch will say so as well, but observing need not wait for it.
                    self.world.incidents.entry(name.clone()).or_insert(*incident);
                }
                self.episodes.created(&key, act, name, done.written, now);
            }
            What::Observe(name, observation) => {
                if done.gone {
                    self.world.incidents.remove(&name);
                } else if let Some(incident) = self.world.incidents.get_mut(&name).filter(|_| done.written) {
                    // The watch will say so as well, but the next episode need not wait for it.
                    incident.status.get_or_insert_default().observation = Some(observation.clone());
                }
                self.episodes.observed(&name, observation, done.written, now);
            }
            What::Probe(object) => {
                self.probe.done(done.written, now);
                match object {
                    Some(object) if !self.is_older(&object) => {
                        self.world(WorldChange::Plan(world::Change::Upsert(*object)));
                    }
                    None if done.written => {
                        self.world(WorldChange::Plan(world::Change::Reset { items: vec![], complete: true }));
                    }
                    _ => {}
                }
            }
        }
    }

    /// Whether the watch has shown a later plan already.
    fn is_older(&self, object: &GpuMemoryNode) -> bool {
        self.world.object.as_ref().is_some_and(|known| {
            known.metadata.uid == object.metadata.uid
                && known.metadata.generation > object.metadata.generation
        })
    }

    /// Every quarter of a second: what does not depend on a sample.
    pub(crate) fn tick(&mut self, unresponsive: &[Arc<str>], blocked: Option<Duration>) {
        let (now, wall) = self.now();
        self.blocked = blocked;
        for (device, rules) in &mut self.devices {
            if blocked.is_some() || unresponsive.contains(&device.uuid) {
                if device.fault != Some(DeviceFault::Unresponsive) {
                    error!(device = device.label, "the driver does not answer");
                }
                device.unresponsive();
                self.restless |= !rules.step(&device.ledger, self.pools.share(&device.uuid), now).is_empty();
            }
        }
        self.check_plan(now);
        self.tend(now);
        let silent = self.since_contact().is_none_or(|silent| silent >= PROBE_AFTER);
        if silent && self.probe.ready(now) {
            self.probe.start();
            (self.submit)(Job::Probe);
        }
        self.stale |= now.since(self.ruled) >= RULES_EVERY;
        if self.last_pass.is_none_or(|(at, _)| now.since(at) >= IDLE_AFTER) {
            self.rule(now);
            self.conclude(now, wall);
        }
        self.publish_node(now, wall);
        let seen = self.leaks.snapshot(now, wall);
        self.keep(seen);
    }

    /// This agent ends: a later one is to go on with what it knows last.
    pub(crate) fn close(&mut self) {
        let (now, wall) = self.now();
        let seen = self.leaks.close(now, wall);
        self.keep(seen);
    }

    fn keep(&mut self, seen: Option<LeaksSeen>) {
        if let Some(seen) = seen {
            (self.order)(Order::Keep(Box::new(seen)));
        }
    }

    /// Whether there is a plan that binds.
    fn check_plan(&mut self, now: Millis) {
        let binds = self.plan.as_ref().is_some_and(|plan| plan.binds(now));
        self.restless |= binds != self.binds;
        self.asks_anew |= binds != self.binds;
        if std::mem::replace(&mut self.binds, binds) && !binds {
            warn!("no plan binds any more: measuring only");
        }
    }

    /// Whether the next sample is worth taking at once.
    pub(crate) fn hurries(&mut self) -> bool {
        self.pools.hurries()
    }

    /// Whether the end of a process is worth a sample: its memory is to be held back.
    pub(crate) fn is_eager(&self) -> bool {
        self.devices.iter().any(|(device, _)| self.pools.has(&device.uuid))
    }

    /// How long until [`due`](Self::due) is to be called.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        let (now, _) = self.now();
        self.pools.deadline().map(|at| Duration::from_millis(at.since(now)))
    }

    /// What is due at a time that no event tells.
    pub(crate) fn due(&mut self) {
        let (now, _) = self.now();
        self.pools.tick(now, &mut self.wards, &mut self.order);
    }

    /// The thread that serves guards has something to say.
    pub(crate) fn guards(&mut self, news: News) {
        let (now, _) = self.now();
        self.wards.hear(&news, now);
        match news {
            News::Wants(want) => self.want(want, now),
            News::Gone { connection } => {
                self.pools.gone(connection, now, &mut self.wards, &mut self.order);
            }
            News::Stranger { pod, pid, comm } => {
                let anywhere: Arc<str> = "".into();
                if let Some(pod) = self.world.pods.get(&pod)
                    && self.told.is_news(&pod.kubelet_uid, &anywhere, "stranger", now)
                {
                    let note = format!(
                        "process {comm} ({pid}), which is not of this pod, came to the socket of its guard and was turned away"
                    );
                    (self.submit)(Job::Tell(Notice::warning(pod, "ForeignGuardClient", "Guard", note)));
                }
            }
            News::Garbage { pod } => {
                let anywhere: Arc<str> = "".into();
                if let Some(pod) = self.world.pods.get(&pod)
                    && self.told.is_news(&pod.kubelet_uid, &anywhere, "garbage", now)
                {
                    let count = self.wards.get(&pod.kubelet_uid).map_or(1, wards::Ward::garbage);
                    let note = format!(
                        "a process of the pod sent what no guard sends to the socket of its guard and was cut off, {count} times so far"
                    );
                    (self.submit)(Job::Tell(Notice::warning(pod, "GuardGarbage", "Guard", note)));
                }
            }
            News::Joined { .. }
            | News::Left { .. }
            | News::Weakness { .. }
            | News::Incompatible { .. }
            | News::Inspected { .. } => {}
        }
    }

    /// A guard asks that its pod may have more.
    fn want(&mut self, want: Want, now: Millis) {
        let ordinal = usize::try_from(want.device).unwrap_or(usize::MAX);
        let ward = self.wards.get(&want.pod);
        let written = ward.and_then(|ward| ward.written(ordinal)).copied();
        let device = ward.and_then(|ward| ward.devices().get(ordinal)).cloned();
        let (Some(device), Some(written)) = (device, written) else {
            let (device, ticket) = (want.device, want.ticket);
            let what = ToGuard::NotGranted { device, ticket, reason: NotGrantedReason::UnknownDevice };
            (self.order)(Order::Guard(guard::Order::Tell { connection: want.connection, what }));
            return;
        };
        // It may ask before the kubelet said that it has the device.
        let place = place(
            self.plan.as_ref(),
            &self.world,
            &self.resources,
            (&self.wards, &self.parks),
            &self.release_namespace,
            now,
        );
        let mut met = None;
        if let Some((known, rules)) = self.devices.iter_mut().find(|(known, _)| known.uuid == device)
            && self.pools.has(&device)
            && rules.tenants.iter().all(|tenant| tenant.pod.kubelet_uid != want.pod)
        {
            *rules = Rules::of(known, place, rules);
            self.restless = true;
            met = demands(rules, known, &self.wards, self.binds);
        }
        if let Some(demands) = met {
            self.pools.met(&device, demands, now, &mut self.wards, &mut self.order);
        }
        self.pools.want(&device, want, written.limit, now, &mut self.wards, &mut self.order);
    }

    /// The line to the keeper has something to say.
    pub(crate) fn keeper(&mut self, heard: Heard) {
        let (now, _) = self.now();
        match heard {
            Heard::Up(status) => {
                let before = self.pools.keeper();
                self.pools.up(&status, now);
                self.parks.up(status.parking.as_ref());
                self.stood_down = status.stand_down;
                if before != Keeper::Up {
                    self.swept = false;
                    self.wards.store(&mut self.order);
                    self.stale = true;
                }
                self.tend(now);
            }
            Heard::Away(why) => {
                warn!(why, "no pool is held while the keeper is away");
                self.pools.away();
                self.parks.away();
            }
            Heard::Moved { pod, device, result } => self.parks.moved(&pod, &device, result, now),
            Heard::Reserved { device, result } => {
                self.pools.reserved(&device, result, now, &mut self.wards, &mut self.order);
            }
            Heard::Released { device, result } => {
                self.pools.released(&device, result, now, &mut self.wards, &mut self.order);
            }
            Heard::Fetched { pod, kept } => {
                self.wards.fetched(&pod, kept, self.pools.keeper(), now);
                self.tend(now);
            }
        }
    }

    /// Sees to what follows from the state and not from a sample: which pods are guarded, and whether
    /// the keeper stands down.
    fn tend(&mut self, now: Millis) {
        let stand_down = self.stands_down();
        // What is not known yet brings nobody back to the devices.
        let known = self.world.synced.node && (self.plan.is_some() || self.world.synced.plan);
        if self.pools.keeper() == Keeper::Up && stand_down != self.stood_down && (stand_down || known) {
            self.stood_down = stand_down;
            (self.order)(Order::Keeper(link::Order::StandDown(stand_down)));
        }
        let node: Vec<Arc<str>> = self.devices.iter().map(|(device, _)| Arc::clone(&device.uuid)).collect();
        let assignments = &self.resources.assignments;
        let given = |pod: &Pod| {
            let given = |device: &Arc<str>| {
                assignments.devices(&pod.facts.namespace, &pod.facts.name).any(|given| *given == **device)
            };
            node.iter().filter(|device| given(device)).map(Arc::clone).collect()
        };
        self.wards.follow(&self.world, &node, self.pools.keeper(), given, now, &mut self.order);
        if self.wards.incomplete() {
            self.set_terms(now);
            self.write_pages();
        }
        if self.is_settled(now) {
            for pod in self.wards.unserved() {
                self.wards.serve(&pod, now, &mut self.order);
            }
        }
        if !self.swept && self.pools.keeper() == Keeper::Up && self.world.synced.pods {
            self.swept = true;
            let pods = self.world.pods.keys().cloned().collect();
            (self.order)(Order::Keeper(link::Order::Sweep { pods }));
        }
    }

    /// Looks up anew which quota holds for each guarded pod on each device of its page.
    fn set_terms(&mut self, now: Millis) {
        let place = place(
            self.plan.as_ref(),
            &self.world,
            &self.resources,
            (&self.wards, &self.parks),
            &self.release_namespace,
            now,
        );
        let quota = |pod: &Pod, uuid: &Arc<str>| {
            let (device, _) = self.devices.iter().find(|(device, _)| device.uuid == *uuid)?;
            place.enforced_quota(pod, device)
        };
        let terms: Vec<_> = self
            .wards
            .iter()
            .map(|ward| {
                let quotas = ward.devices().iter().map(|uuid| quota(&ward.pod, uuid)).collect();
                (Arc::clone(&ward.pod.kubelet_uid), quotas)
            })
            .collect();
        for (pod, quotas) in terms {
            self.wards.set_terms(&pod, quotas);
        }
    }

    /// Writes what each guarded pod may have into its page.
    fn write_pages(&mut self) {
        let mut pages = Vec::new();
        for ward in self.wards.iter().filter(|ward| ward.pages().is_some() && ward.has_terms()) {
            let pod = &ward.pod;
            for (ordinal, uuid) in ward.devices().iter().enumerate() {
                let device =
                    self.devices.iter().map(|(device, _)| device).find(|device| device.uuid == *uuid);
                // What was written of a device that is away stands; one that was away from the start has its
                // place all the same.
                if device.is_none() && ward.is_written(ordinal) {
                    continue;
                }
                let quota = ward.quota(ordinal).filter(|_| self.binds);
                let total = device.and_then(|device| device.ledger.total.or(device.info.total));
                let (total, free) = (total.unwrap_or(u64::MAX), device.and_then(|device| device.ledger.free));
                let limit = quota.map_or(total, |quota| quota.limit);
                let charged = ward.charged(ordinal);
                let numbers = match self.pools.numbers(uuid, &pod.kubelet_uid, charged) {
                    Some(numbers) if quota.is_some() => numbers,
                    // It is given nothing there, unless it asks.
                    None if quota.is_some() && self.pools.has(uuid) => {
                        page::Numbers { granted: 0, ..page::without_pool(limit, charged, free) }
                    }
                    _ => page::without_pool(limit, charged, free),
                };
                let context = wards::context_or_default(self.wards.context(uuid));
                let written = DeviceQuota {
                    uuid: wards::uuid_bytes(uuid).unwrap_or_default(),
                    limit: numbers.limit,
                    granted: numbers.granted,
                    context,
                    free: numbers.free,
                    total,
                    managed: wards::managed(quota.map(|quota| quota.managed).unwrap_or_default()),
                    wait_milliseconds: u32::try_from(self.pools.wait(uuid)).unwrap_or(u32::MAX),
                };
                pages.push((Arc::clone(&pod.kubelet_uid), ordinal, written));
            }
        }
        for (pod, ordinal, written) in pages {
            self.wards.write(&pod, ordinal, written);
        }
    }

    /// The devices are let go of: no memory is held back any more, so nothing needs to be granted.
    fn open_pages(&mut self) {
        let mut pages = Vec::new();
        for ward in self.wards.iter() {
            for (ordinal, device) in ward.devices().iter().enumerate() {
                if let Some(written) = ward.written(ordinal) {
                    pages.push((Arc::clone(&ward.pod.kubelet_uid), Arc::clone(device), written.limit));
                }
            }
        }
        for (pod, device, limit) in pages {
            self.wards.grant(&pod, &device, limit);
        }
        self.pools.let_go(&mut self.order);
    }

    /// One round.
    fn pass(&mut self, pass: &Pass) {
        let now = self.millis(pass.at);
        self.metrics.sampled(pass.took, pass.late);
        if self.stale {
            self.rule(now);
        }
        let mut urgent = false;
        for sampled in &pass.devices {
            urgent |= self.account_and_decide(sampled, now);
        }
        self.write_pages();
        self.audit(now);
        if self.stale {
            // Who is seen there for the first time may have been watched by an earlier agent.
            self.leaks.rule(&self.devices, &self.world, &self.release_namespace, now, pass.wall);
            self.asks_anew = true;
        }
        self.restless |= self.leaks.sample(&self.devices, now, pass.wall);
        self.base.step((self.base_strength(now), None), now);
        self.measured = self.measured.or(Some(now));
        self.last_pass = Some((now, pass.wall));
        self.conclude(now, pass.wall);
        if urgent {
            self.publish_node(now, pass.wall);
        }
    }

    /// Looks whether the pages of guarded pods are what their guards have made them.
    fn audit(&mut self, now: Millis) {
        for (pod, device, bytes) in self.wards.audit(now) {
            warn!(pod = pod.facts.name, namespace = pod.facts.namespace, %device, bytes, "a guard's page does not add up");
            if self.told.is_news(&pod.kubelet_uid, &device, "page", now) {
                let note = format!(
                    "the total in the page of its guards is {} away from what they charged on {device}: a process of it has written there past its guard. Its own account is wrong, nobody else's; a restart mends it",
                    ByteSize(bytes).rounded(),
                );
                (self.submit)(Job::Tell(Notice::warning(&pod, "GuardPageFalsified", "Guard", note)));
            }
        }
    }

    /// Whether it is known what binds: an old plan that an agent finds when it starts may bind again as
    /// soon as the API server is heard, and whom it concerns depends on the namespaces.
    fn is_settled(&self, now: Millis) -> bool {
        let binds = self.binds || self.world.synced.plan;
        (binds && self.world.synced.namespaces) || now.0 >= SETTLED
    }

    /// Looks up anew what holds for whom.
    fn rule(&mut self, now: Millis) {
        self.stale = false;
        self.restless = true;
        self.ruled = now;
        let place = place(
            self.plan.as_ref(),
            &self.world,
            &self.resources,
            (&self.wards, &self.parks),
            &self.release_namespace,
            now,
        );
        let settled = self.is_settled(now);
        for (device, rules) in &mut self.devices {
            *rules = Rules::of(device, place, rules);
            // An older level than that of the present plan's first look says nothing.
            if let Some(level) = self.levels.as_mut().and_then(|levels| levels.remove(&*device.uuid)) {
                rules.resume(level, now);
            }
            if settled {
                let pool = rules.pool.as_ref().filter(|_| self.binds);
                self.pools.set(&device.uuid, pool, now, &mut self.order);
            }
        }
        self.hosts.rule(&self.devices, &self.world, &self.release_namespace);
        let (_, wall) = self.now();
        self.leaks.rule(&self.devices, &self.world, &self.release_namespace, now, wall);
        self.asks_anew = true;
        let pods = &self.world.pods;
        self.limits.retain(|uid| pods.contains_key(uid));
        if self.world.synced.pods {
            self.parks.retain(|uid| pods.contains_key(uid));
            self.hooks.retain(|uid| pods.contains_key(uid));
        }
        self.told.0.retain(|(uid, ..), _| pods.contains_key(uid));
        self.set_terms(now);
        self.tend(now);
    }

    /// The account and decide steps for one device. Returns whether something changed that the
    /// operator waits for.
    fn account_and_decide(&mut self, sampled: &Sampled, now: Millis) -> bool {
        let place = place(
            self.plan.as_ref(),
            &self.world,
            &self.resources,
            (&self.wards, &self.parks),
            &self.release_namespace,
            now,
        );
        let Some((device, rules)) = self.devices.iter_mut().find(|(device, _)| device.uuid == sampled.uuid)
        else {
            return false;
        };
        let fault = device.fault;
        let (tenants, enforced) = (&rules.tenants, rules.enforced());
        let is_any_declared = tenants.iter().any(|tenant| tenant.pod.facts.declared.is_some());
        let declared = |uid: &str| {
            // Hardly a pod declares anything, and this is asked for each of them at each sample.
            if !is_any_declared {
                return 0;
            }
            let tenant = tenants.iter().find(|tenant| *tenant.pod.kubelet_uid == *uid);
            tenant.zip(enforced).map_or(0, |(tenant, layer)| declared_part(tenant, layer))
        };
        let sample = Sample {
            memory: memory(&sampled.reading),
            charges: sampled.charges.as_deref(),
            torn: sampled.reading.torn,
            managed: self.evidence.is_managed(&device.info),
            ballast: self.pools.ballast_at(&sampled.uuid, now),
        };
        device.take(&sampled.reading, sample, rules.reserve.as_ref(), declared, now);
        if device.fault != fault {
            warn!(device = device.label, fault = ?device.fault, errors = ?sampled.reading.errors, "the device's fault changed");
        }
        // A pod may hold memory on a device that the kubelet did not give it.
        let new = device.ledger.by_pod.iter().any(|held| {
            rules.tenants.iter().all(|tenant| tenant.pod.kubelet_uid != held.pod)
                && place.world.pods.contains_key(&held.pod)
        });
        if new {
            *rules = Rules::of(device, place, rules);
            self.restless = true;
            // What else depends on who is there is looked up with the next sample.
            self.stale = true;
        }
        let mut urgent = device.fault != fault;
        for change in rules.step(&device.ledger, self.pools.share(&device.uuid), now) {
            self.restless = true;
            match change {
                Change::Level(mode, scope, of, transition) => {
                    urgent |= of.is_none();
                    let share = device.ledger.level.map(highwater_policy::ledger::Share::percent);
                    let pod = of
                        .and_then(|place| rules.tenants.get(place))
                        .map(|tenant| tenant.pod.facts.name.as_str());
                    info!(device = device.label, ?mode, ?scope, pod, from = ?transition.from, to = ?transition.to,
                        early = transition.early, device_percent = share, "the level changed");
                }
                Change::Breach(mode, at, change) => {
                    let Some(tenant) = rules.tenants.get(at) else { continue };
                    info!(
                        device = device.label,
                        ?mode,
                        pod = tenant.pod.facts.name,
                        namespace = tenant.pod.facts.namespace,
                        used = tenant.used,
                        ?change,
                        "a quota breach"
                    );
                    if mode == Mode::Enforce && change == BreachChange::Began {
                        (self.submit)(Job::Tell(breach_notice(tenant, device)));
                    }
                }
            }
        }
        self.hold(sampled, now);
        self.seek_parks(sampled, now);
        urgent
    }

    /// What follows from a sample of a device for guards, pool, the driver's limits, and for how firmly
    /// quotas hold there.
    #[allow(clippy::too_many_lines, reason = "one step after the other")]
    fn hold(&mut self, sampled: &Sampled, now: Millis) {
        let (present, _) = self.now();
        let Some((device, rules)) = self.devices.iter().find(|(device, _)| device.uuid == sampled.uuid)
        else {
            return;
        };
        let uuid = Arc::clone(&device.uuid);
        self.wards.sample(&uuid, sampled.charges.as_deref(), now, &mut self.order);
        if self.pools.has(&uuid) {
            // Who is not there any more is known only from the kubelet and the API server.
            // Nor is it known before then whose quotas concern them.
            let synced = self.world.synced;
            let known = self.resources.at.is_some() && synced.pods && synced.namespaces;
            let demands = demands(rules, device, &self.wards, self.binds).filter(|_| known);
            let bytes = DeviceBytes::of(&device.ledger, &memory(&sampled.reading));
            let freeze = self.binds && rules.freeze().is_some();
            let pressure = Pressure { reclaim: self.binds && self.episodes.reclaims(&uuid), freeze };
            let seen = pools::Seen { at: now, device: bytes, torn: sampled.reading.torn, pressure };
            self.pools.sample(&uuid, seen, demands, present, &mut self.wards, &mut self.order);
        }
        let Some((device, rules)) = self.devices.iter_mut().find(|(device, _)| device.uuid == sampled.uuid)
        else {
            return;
        };
        let enforced = rules.enforced();
        let context = wards::context_or_default(self.wards.context(&uuid));
        let mut notices = Vec::new();
        for tenant in &mut rules.tenants {
            let pod = Arc::clone(&tenant.pod);
            let quota = enforced.and_then(|at| tenant.terms.get(at)?.quota.as_ref()).filter(|_| self.binds);
            let opted_in = pod.facts.guard;
            let view = self.wards.view(&pod.kubelet_uid, &uuid);
            let guarded = view.map_or(Guarded::Expected, |view| view.guarded);
            let outsider = view.and_then(|view| view.outsider);
            let able = match quota {
                None => Err(StrengthReason::NoPlan),
                Some(quota) if quota.kernel_limits == highwater_crds::KernelLimits::Off => {
                    Err(StrengthReason::KernelLimitsOff)
                }
                Some(_) => self.ability.on(device.partition()),
            };
            let limit = quota.filter(|_| able.is_ok()).map(|quota| quota.limit);
            if let Some(task) = self.limits.want(&pod.kubelet_uid, &uuid, limit, tenant.used, now) {
                (self.order)(Order::Limit(task));
            }
            let kernel =
                able.and_then(|()| self.limits.standing(&pod.kubelet_uid, &uuid, limit.unwrap_or(0)));
            let standing = self.pools.standing(&uuid, &pod.kubelet_uid, now);
            let pool = standing.map_or(Err(StrengthReason::NoPool), |standing| standing.holds);
            tenant.overshoot = standing.map(|standing| standing.overshoot);
            tenant.charged = view.map(|view| view.charged);
            let before = tenant.strength;
            tenant.strength =
                strength::of(Grounds { bound: quota.is_some(), kernel, opted_in, guard: guarded, pool });
            tenant.steady.step(tenant.strength, now);
            if before != tenant.strength {
                info!(device = device.label, pod = pod.facts.name, namespace = pod.facts.namespace,
                    strength = ?tenant.strength.0, reason = ?tenant.strength.1, "how firmly the quota holds");
            }
            let Some(quota) = quota else { continue };
            if opted_in == GuardOptIn::Volume {
                if let Guarded::Not(reason) = guarded
                    && let Some(note) =
                        unguarded_note(&self.wards, &pod, outsider, reason, tenant.strength.0, now)
                    && self.told.is_news(&pod.kubelet_uid, &uuid, "unguarded", now)
                {
                    notices.push(Notice::warning(&pod, "StrengthFell", "Guard", format!("{note} on {uuid}")));
                }
                if quota::below_context(quota.limit, context)
                    && self.told.is_news(&pod.kubelet_uid, &uuid, "context", now)
                {
                    let note = format!(
                        "the limit of {} on {uuid} is below what one CUDA context ({}) and 64 MiB take: no process can work under it ({})",
                        ByteSize(quota.limit).rounded(),
                        ByteSize(context).rounded(),
                        quota.provenance(),
                    );
                    notices.push(Notice::warning(&pod, "QuotaBelowContext", "Guard", note));
                }
            } else {
                let over = tenant.used.is_some_and(|used| used > quota.limit.saturating_add(TOOK));
                tenant.oversized |= over && now.since(tenant.bound) < STARTING;
            }
            let took = self.pools.of_pod(&uuid, &pod.kubelet_uid).map_or(0, |report| report.ungranted);
            if took > TOOK && !tenant.took {
                let note = format!(
                    "holds {} on {uuid} that was granted to nobody, beyond its grant: its neighbours' guarantees are not touched as long as the pool holds them",
                    ByteSize(took).rounded(),
                );
                notices.push(Notice::warning(&pod, "TookUngranted", "Measure", note));
            }
            tenant.took = took > TOOK;
        }
        for notice in notices {
            (self.submit)(Job::Tell(notice));
        }
    }

    /// The act step, and what is published of incidents.
    fn conclude(&mut self, now: Millis, wall: Timestamp) {
        self.carry_on(now);
        self.signal(now, wall);
        let moment = Moment {
            now,
            present: self.now().0,
            wall,
            node: &self.node,
            release_namespace: &self.release_namespace,
            binds: self.binds,
            pools: &self.pools,
            wards: &self.wards,
            parks: &self.parks,
            carries: &self.carries,
            evidence: &self.evidence,
            hosts: &self.hosts,
            leaks: &self.leaks,
        };
        self.episodes.step(&self.devices, &self.world, moment, &mut self.submit);
        self.act(now);
    }

    /// Shows every pod that opted in what it ought to see. What that is follows from states, not from
    /// bytes: without a change of any there is nothing to look for.
    fn signal(&mut self, now: Millis, wall: Timestamp) {
        if !std::mem::take(&mut self.restless) && !self.acts.is_due(now) {
            return;
        }
        self.acts.begin();
        let mut wanted: BTreeMap<&Arc<str>, (&Arc<Pod>, Option<Wanted>)> = BTreeMap::new();
        for (device, rules) in &self.devices {
            for tenant in rules.tenants.iter().filter(|tenant| tenant.pod.facts.signal_volume) {
                let uid = &tenant.pod.kubelet_uid;
                let beside = self.hosts.wanted(uid).into_iter().chain(self.leaks.wanted(uid));
                let here = rules.wanted(tenant, &device.uuid).into_iter().chain(beside);
                let here = if self.binds { here.max_by_key(|wanted| wanted.level) } else { None };
                let (_, most) = wanted.entry(&tenant.pod.kubelet_uid).or_insert((&tenant.pod, None));
                if here.as_ref().map(|w| w.level) > most.as_ref().map(|w| w.level) {
                    *most = here;
                }
            }
        }
        for uid in self.acts.raised() {
            if let Some(pod) = self.world.pods.get(uid) {
                wanted.entry(&pod.kubelet_uid).or_insert((pod, None));
            }
        }
        let at = At {
            now,
            wall,
            measured: self.measured.unwrap_or(now),
            hold: self.devices.iter().map(|(_, rules)| rules.longest_hold()).max().unwrap_or(0),
        };
        let mut notices = Vec::new();
        for (pod, wanted) in wanted.into_values() {
            let paused = self.world.paused(&pod.facts, &self.release_namespace);
            notices.extend(self.acts.show(pod, wanted.as_ref(), paused, at));
        }
        for notice in notices {
            (self.submit)(Job::Tell(notice));
        }
        let pods = &self.world.pods;
        self.acts.retain(|uid| pods.contains_key(uid));
    }

    /// Writes the node's object, if it is to be written.
    fn publish_node(&mut self, now: Millis, wall: Timestamp) {
        let Some(watch) = &self.watch else { return };
        if !self.world.synced.plan {
            return;
        }
        // What is stored says more than nothing.
        let known = self.last_pass.is_some() || self.devices.iter().any(|(device, _)| device.is_sampled());
        let job = if self.world.object.is_none() {
            // One that cannot be read is there.
            let node = self.world.node.as_ref().filter(|_| self.world.object_readable);
            node.as_ref().and_then(|node| self.writer.create(&node.uid, now))
        } else if *watch == Watch::On && !known {
            None
        } else {
            let facts = self.facts(watch.clone());
            let status = node_status::status(&facts, self.writer.stored(), wall);
            self.writer.step(status, now)
        };
        if let Some(job) = job {
            (self.submit)(job);
        }
    }

    /// What is known of the node.
    fn facts(&self, watch: Watch) -> Facts {
        let (mut over, mut below, mut oversized) = (Vec::new(), Vec::new(), Vec::new());
        // By pod, which may use several devices.
        let mut uncovered = BTreeSet::new();
        for (device, rules) in &self.devices {
            for tenant in &rules.tenants {
                let facts = &tenant.pod.facts;
                if tenant.oversized {
                    oversized.push(format!("{}/{}", facts.namespace, facts.name));
                }
                if tenant.steady.told().1 == Some(StrengthReason::Uncovered) {
                    uncovered.insert(format!("{}/{}", facts.namespace, facts.name));
                }
                let quota = rules.enforced_quota(tenant).filter(|_| self.binds);
                if let (Some(quota), (active, Some(reason))) = (quota, tenant.steady.told()) {
                    below.extend(node_status::below(quota, active, reason, facts, &device.uuid));
                }
            }
            for tenant in rules.tenants.iter().filter(|tenant| tenant.over) {
                let (Some(due), Some(used)) = (tenant.due(), tenant.used) else { continue };
                let pod = TopPod {
                    namespace: tenant.pod.facts.namespace.clone(),
                    name: tenant.pod.facts.name.clone(),
                    device: device.uuid.to_string(),
                    due: ByteSize(due),
                };
                over.push((used.saturating_sub(due), pod));
            }
        }
        let devices = self
            .devices
            .iter()
            .map(|(device, rules)| DeviceFacts {
                uuid: device.uuid.to_string(),
                label: device.label.clone(),
                model: node_status::model(
                    &device.info.product,
                    device.partition(),
                    device.info.total,
                    self.wards.context(&device.uuid),
                ),
                level: rules.level(),
                headroom: device.headroom,
                strengths: strengths(rules),
                pool: self.pools.facts(&device.uuid),
                pods: rules.tenants.len(),
                over: rules.tenants.iter().filter(|tenant| tenant.over).count(),
                fault: device.fault,
                freeze: if self.binds { rules.freeze() } else { None },
                parked: self.parks.count(&device.uuid),
                zombie: device.zombie.holds,
                unexplained: device.unexplained.holds.then(|| self.evidence.candidate(device, &self.world)),
            })
            .collect();
        Facts {
            observed_generation: self.plan.as_ref().and_then(|plan| plan.generation),
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            driver_version: self.driver.clone(),
            watch,
            devices,
            over,
            below,
            oversized,
            uncovered: uncovered.into_iter().collect(),
            base_strength: self.base.told().0,
            host: self.fares.as_ref().and_then(host_status::Host::status),
            no_cgroup_v2: self.asks_for_host_memory() && !self.host_memory,
        }
    }

    /// The strength that a pod without a guard would have on every device of the node.
    fn base_strength(&self, now: Millis) -> Strength {
        if !self.binds || self.devices.is_empty() {
            return Strength::Observe;
        }
        let all = |holds: &dyn Fn(&Device) -> bool| self.devices.iter().all(|(device, _)| holds(device));
        let layers = self.plan.iter().flat_map(|plan| &plan.spec.layers);
        let enforced = layers.filter(|layer| layer.mode == Mode::Enforce);
        let wanted = quota::wants_kernel_limits(enforced.flat_map(|layer| &layer.quotas));
        if wanted && all(&|device| self.ability.on(device.partition()).is_ok()) {
            Strength::Kernel
        } else if all(&|device| self.pools.is_held(&device.uuid, now)) {
            Strength::Reservation
        } else {
            Strength::Observe
        }
    }

    /// The text of all metrics. `told` is when the kubelet said last which pod has which device.
    pub(crate) fn render(&self, told: Option<tokio::time::Instant>) -> String {
        let plan_age = self.plan.as_ref().map(|plan| plan.age(self.now().0));
        let gauges = Gauges {
            plan_age,
            api_contact_age: self.since_contact(),
            pod_resources_age: told.map(|at| at.elapsed()),
            incidents_open: self.world.incidents.values().filter(|i| !episode::is_closed(i)).count(),
            signals_written: self.acts.written,
            signals_failed: self.acts.failed,
            unready: self.acts.unready(),
            reclaims: self.reclaims,
        };
        let shown = Shown {
            devices: &self.devices,
            wards: &self.wards,
            pools: &self.pools,
            parks: &self.parks,
            hooks: &self.hooks,
            carries: &self.carries,
            hosts: &self.hosts,
            leaks: &self.leaks,
            binds: self.binds,
        };
        self.metrics.render(shown, self.driver.as_deref().unwrap_or(""), gauges)
    }

    /// Whether the agent lives; else why not.
    pub(crate) fn health(&self) -> Result<(), String> {
        if let Some(blocked) = self.blocked.filter(|blocked| *blocked >= ILL_AFTER) {
            return Err(format!("the GPU driver has not answered for {} s", blocked.as_secs()));
        }
        let silent = self.last_pass.map(|(at, _)| Duration::from_millis(self.now().0.since(at)));
        match silent.filter(|silent| *silent >= ILL_AFTER) {
            Some(silent) => Err(format!("no sample for {} s", silent.as_secs())),
            None => Ok(()),
        }
    }

    /// Whether the agent does its work; else why not.
    pub(crate) fn ready(&self) -> Result<(), String> {
        match &self.watch {
            None => Err("the GPU driver has not answered yet".to_owned()),
            Some(Watch::On) if self.last_pass.is_none() => Err("no device was sampled yet".to_owned()),
            Some(_) if !self.world.synced.all() && self.plan.is_none() => {
                Err(format!("the API server has not said everything yet: {:?}", self.world.synced))
            }
            Some(_) => Ok(()),
        }
    }

    /// The API server was heard.
    fn heard(&mut self) {
        let (at, wall) = (self.clock)();
        self.contact = Some(at);
        let now = self.millis(at);
        if let Some(plan) = &mut self.plan {
            plan.confirm(now, wall);
            self.cache.save(plan);
        }
        self.check_plan(now);
    }

    /// Whether the plan has a rule on host memory, whoever it may concern.
    fn asks_for_host_memory(&self) -> bool {
        let layers = self.plan.iter().flat_map(|plan| &plan.spec.layers);
        layers.flat_map(|layer| &layer.rules).any(|rule| rule.host_memory.is_some())
    }

    fn since_contact(&self) -> Option<Duration> {
        self.contact.map(|contact| (self.clock)().0.saturating_duration_since(contact))
    }

    fn now(&self) -> (Millis, Timestamp) {
        let (at, wall) = (self.clock)();
        (self.millis(at), wall)
    }

    fn millis(&self, at: Instant) -> Millis {
        let since = at.saturating_duration_since(self.started).as_millis();
        Millis(u64::try_from(since).unwrap_or(u64::MAX))
    }
}

/// How many pods on a device have which strength.
fn strengths(rules: &Rules) -> StrengthCounts {
    let mut counts = StrengthCounts::default();
    for tenant in &rules.tenants {
        counts.add(tenant.steady.told().0);
    }
    counts
}

/// The part of a pod's memory that it preallocates by design: at most its limit in the layer that
/// binds. A pod without one declares nothing, for nothing would bound it.
fn declared_part(tenant: &Tenant, layer: usize) -> u64 {
    let declared = tenant.pod.facts.declared.map_or(0, ByteSize::bytes);
    let quota = tenant.terms.get(layer).and_then(|terms| terms.quota.as_ref());
    quota.map_or(0, |quota| declared.min(quota.limit))
}

/// What is looked at when rules are looked up.
fn place<'a>(
    plan: Option<&'a Plan>,
    world: &'a World,
    resources: &'a Snapshot,
    (wards, parks): (&'a Wards, &'a Parks),
    release_namespace: &'a str,
    now: Millis,
) -> Place<'a> {
    let plan = plan.map(|plan| &plan.spec);
    Place { plan, world, assignments: &resources.assignments, wards, parks, release_namespace, now }
}

/// What the pods on a device have a right to in its pool: those with a quota of the layer that binds.
fn demands(rules: &Rules, device: &Device, wards: &Wards, binds: bool) -> Option<Vec<PodDemand>> {
    let of = |tenant: &Tenant| {
        let quota = rules.enforced_quota(tenant)?;
        let uid = &tenant.pod.kubelet_uid;
        let ward = wards.get(uid);
        let charged = ward.and_then(|ward| Some(ward.charged(ward.ordinal(&device.uuid)?)));
        let guarded = wards.view(uid, &device.uuid).map_or(Guarded::Expected, |view| view.guarded);
        let guards = tenant.pod.facts.guard == GuardOptIn::Volume && !matches!(guarded, Guarded::Not(_));
        Some(PodDemand {
            uid: Arc::clone(uid),
            // Who goes round its guard is one without.
            kind: if guards { Kind::Elastic } else { Kind::Static },
            guarantee: quota.guarantee.unwrap_or(0),
            limit: quota.limit,
            used: tenant.used,
            charged,
            bound_at: tenant.bound,
        })
    };
    binds.then(|| rules.tenants.iter().filter_map(of).collect())
}

/// What is told of a pod that opted in and is not guarded. `None` while it is being found out.
fn unguarded_note(
    wards: &Wards,
    pod: &Pod,
    outsider: Option<u32>,
    reason: StrengthReason,
    strength: Strength,
    now: Millis,
) -> Option<String> {
    let who = match outsider {
        None => "one of its processes".to_owned(),
        Some(pid) => match wards.get(&pod.kubelet_uid)?.outsider(pid)? {
            (Some(comm), _) => format!("process {comm} ({pid})"),
            (None, since) if now.since(since) >= INSPECT_WITHIN => format!("process {pid}"),
            (None, _) => return None,
        },
    };
    let how = match reason {
        StrengthReason::GuardNotConnected => "holds memory, and no process of the pod has a guard connected",
        StrengthReason::OutsideGuard => {
            "holds memory outside the guard: a static program, a private copy of the driver's library or the like"
        }
        StrengthReason::OtherRoot => "holds memory in another root, where the guard is not",
        StrengthReason::GuardVersion => "has a guard of a version that the agent does not speak",
        StrengthReason::Mps => "is a client of MPS, in which the guard is off",
        StrengthReason::UnknownDriver => "has a guard that does not know this driver and stays out of it",
        _ => "is not guarded",
    };
    Some(format!("{who} {how}; the pod's quota holds with strength {strength:?}"))
}

fn breach_notice(tenant: &Tenant, device: &Device) -> Notice {
    let quota = tenant.terms.iter().find_map(|terms| terms.quota.as_ref());
    let limit = quota.map_or(0, |quota| quota.limit);
    let advice = if tenant.pod.facts.guard == GuardOptIn::Volume {
        ""
    } else {
        "; a program that sizes itself by what the device has needs the guard (label highwater.dev/guard), or the device for itself"
    };
    let note = format!(
        "holds {} on {}, above its limit of {} ({}){advice}",
        ByteSize(tenant.used.unwrap_or(0)).rounded(),
        device.uuid,
        ByteSize(limit).rounded(),
        quota.map(highwater_policy::quota::EffectiveQuota::provenance).unwrap_or_default(),
    );
    Notice::warning(&tenant.pod, "QuotaBreach", "Measure", note)
}

#[cfg(test)]
#[path = "engine_holding_tests.rs"]
mod holding_tests;

#[cfg(test)]
mod testing;

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, rc::Rc};

    use highwater_crds::{
        Decision, DecisionState, GpuMemoryIncident, GpuMemoryIncidentStatus, IncidentKind, Observation,
        ObservationState,
    };
    use highwater_gpu::{CallError, ErrorClass, Reading};
    use highwater_policy::{
        ledger::{Charge, Holder},
        pod::{NamespaceFacts, PodFacts},
    };
    use jiff::SignedDuration;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
    use kube::ResourceExt;
    use serde_json::{Value, json};

    mod acting;
    mod leaking;

    use super::{
        testing::{GI, charge, device, object, reset, sampled},
        *,
    };
    use crate::{
        test_clock::{TIME, clock},
        world::{Change as Set, NodeFacts},
    };

    /// A node with the devices `GPU-0` and `GPU-1` of 80 GiB.
    struct Bench {
        engine: Engine,
        jobs: Rc<RefCell<Vec<Job>>>,
        orders: Rc<RefCell<Vec<Order>>>,
        root: tempfile::TempDir,
        /// How long a sample waits for its turn, in milliseconds.
        late: u64,
    }

    fn pod(name: &str) -> PodFacts {
        PodFacts { signal_volume: true, ..testing::pod(name) }
    }

    /// A layer that restarts whoever is above 8 GiB, or the one most over when 90 % are in use.
    fn layer(mode: &str) -> Value {
        json!({"mode": mode, "rules": [{
            "product": "NVIDIA H200", "partition": "Whole", "quotaPolicies": ["serving"],
            "breakers": [{"policy": "serving", "ownerKinds": ["ReplicaSet"], "value": {
                "scope": "Device", "minimumStayMilliseconds": 2000,
                "critical": {"tripPercent": 80, "clearPercent": 75, "holdMilliseconds": 0,
                    "actions": [{"type": "Signal"}, {"type": "Freeze", "freeze": {"taintNodeWhen": "AnyDevice"}}]},
                "emergency": {"tripPercent": 90, "clearPercent": 85, "holdMilliseconds": 0,
                    "actions": [{"type": "Restart", "restart": {"gracePeriodSeconds": 10}}]}}}]}],
            "quotas": [{"policy": "serving", "ownerKinds": ["ReplicaSet"], "value": {
                "default": {"limit": "8Gi"},
                "breach": {"holdMilliseconds": 200, "actions": [{"type": "Signal"}, {"type": "Restart"}]}}}]})
    }

    impl Bench {
        fn new(layers: &Value) -> Self {
            let mut bench = Self::unsynced(layers);
            bench.sync();
            bench
        }

        fn unsynced(layers: &Value) -> Self {
            TIME.set(0);
            Self::unsynced_in(tempfile::tempdir().unwrap(), layers)
        }

        /// An agent that finds what an earlier one left in its state directory.
        fn unsynced_in(root: tempfile::TempDir, layers: &Value) -> Self {
            let jobs = Rc::new(RefCell::new(Vec::new()));
            let submitted = Rc::clone(&jobs);
            let submit = move |job| submitted.borrow_mut().push(job);
            let orders = Rc::new(RefCell::new(Vec::new()));
            let given = Rc::clone(&orders);
            let order = move |order| given.borrow_mut().push(order);
            let signals = Signals::new(root.path());
            let setup = Setup {
                node: "n1".into(),
                release_namespace: "highwater-system".into(),
                state_dir: root.path().into(),
                proc_root: "/proc".into(),
                keeper: false,
                cgroups: Err(StrengthReason::NoCgroupV2),
                host_memory: true,
                grants: crate::metrics::grant_durations("n1").unwrap(),
            };
            let mut engine = Engine::new(clock, setup, signals, submit, order).unwrap();
            let devices = vec![device("GPU-0", 0), device("GPU-1", 1)];
            engine.report(Report::Opened { version: "580".into(), devices, limits: false });
            let mut bench = Self { engine, jobs, orders, root, late: 0 };
            bench.world(WorldChange::Namespace(reset([("team".to_owned(), NamespaceFacts::default())])));
            bench.world(WorldChange::Node(reset([NodeFacts { uid: "node".into(), ..NodeFacts::default() }])));
            bench.world(WorldChange::Plan(reset([object(layers, 1)])));
            bench.world(WorldChange::Pod(reset(["a", "b", "c"].map(pod))));
            bench
        }

        fn sync(&mut self) {
            self.world(WorldChange::Incident(reset([])));
        }

        /// The operator changes the plan.
        fn plan(&mut self, layers: &Value, generation: i64) {
            self.world(WorldChange::Plan(Set::Upsert(object(layers, generation))));
        }

        fn world(&mut self, change: WorldChange) {
            self.engine.world(change);
        }

        /// Samples `GPU-0` after `after` milliseconds: these pods hold so many GiB.
        fn sample(&mut self, after: u64, held: &[(&str, u64)]) {
            let holder = |pod: &str| Holder::Container { pod: pod.into(), container: None };
            let held: Vec<_> = held.iter().map(|(pod, gib)| (holder(pod), *gib)).collect();
            self.hold(after, &held);
        }

        /// Samples `GPU-0` after `after` milliseconds: these hold so many GiB.
        fn hold(&mut self, after: u64, held: &[(Holder, u64)]) {
            let charges = held.iter().map(|(holder, gib)| Charge {
                pid: match holder {
                    Holder::Container { pod, .. } => u32::from(pod.as_bytes()[0]),
                    _ => 1,
                },
                bytes: Some(gib * GI),
                holder: holder.clone(),
            });
            self.pass(after, vec![sampled("GPU-0", charges.collect(), 0)]);
        }

        fn pass(&mut self, after: u64, devices: Vec<Sampled>) {
            TIME.set(TIME.get() + after);
            let (at, wall) = clock();
            let waited = Duration::from_millis(self.late);
            let (at, wall) = (at.checked_sub(waited).unwrap(), wall - waited);
            let pass = Pass { at, wall, late: Duration::ZERO, took: Duration::ZERO, devices };
            self.engine.report(Report::Pass(pass));
        }

        fn jobs(&self) -> Vec<Job> {
            self.jobs.take()
        }

        /// The incidents that are to be created; they are from now on.
        fn created(&mut self) -> Vec<GpuMemoryIncident> {
            let mut created = Vec::new();
            for job in self.jobs() {
                if let Job::Create(key, incident) = job {
                    created.push((*incident).clone());
                    self.engine.done(done(What::Create(key, incident)));
                }
            }
            created
        }

        /// What is to be observed; it is from now on.
        fn observed(&mut self) -> Vec<ObservationState> {
            let mut observed = Vec::new();
            for job in self.jobs() {
                if let Job::Observe(name, observation) = job {
                    observed.push(observation.state);
                    self.engine.done(done(What::Observe(name, observation)));
                }
            }
            observed
        }

        /// The operator decides about an incident, as the watch will show.
        fn decide(&mut self, incident: &GpuMemoryIncident, state: DecisionState, reason: &str) {
            let mut incident = incident.clone();
            let (_, wall) = clock();
            incident.status = Some(GpuMemoryIncidentStatus {
                observation: None,
                decision: Some(Decision {
                    state,
                    reason: reason.into(),
                    message: String::new(),
                    since: MicroTime(wall),
                    workload: None,
                    budgets: Vec::new(),
                    acted_at: (state == DecisionState::Verifying).then_some(MicroTime(wall)),
                    targets: Vec::new(),
                }),
            });
            self.world(WorldChange::Incident(Set::Upsert(incident)));
        }

        fn volume(&self, pod: &str) -> std::path::PathBuf {
            let volume =
                self.root.path().join(format!("pods/{pod}/volumes/kubernetes.io~empty-dir/highwater"));
            std::fs::create_dir_all(&volume).unwrap();
            volume
        }
    }

    fn done(what: What) -> Done {
        Done { written: true, gone: false, what }
    }

    fn subject(incident: &GpuMemoryIncident) -> Option<&str> {
        incident.spec.subject.as_ref().map(|subject| subject.name.as_str())
    }

    #[test]
    fn b12_the_pod_above_its_limit_is_reported_and_signalled_not_its_neighbour() {
        let mut bench = Bench::new(&json!([layer("Enforce")]));
        let volume = bench.volume("a");
        bench.sample(0, &[("a", 9), ("b", 8)]);
        bench.sample(199, &[("a", 9), ("b", 8)]);
        assert!(bench.created().is_empty(), "the hold is not over");
        bench.sample(1, &[("a", 9), ("b", 8)]);
        let text = std::fs::read(volume.join("pressure")).unwrap();
        let file: Value = serde_json::from_slice(&text).unwrap();
        assert_eq!((&file["level"], &file["usedBytes"]), (&json!("Critical"), &json!(9 * GI)));
        let created = bench.created();
        assert_eq!(created.len(), 1);
        let spec = &created[0].spec;
        assert_eq!(
            (spec.kind, subject(&created[0]), spec.episode),
            (IncidentKind::QuotaBreach, Some("a"), 1)
        );
        assert_eq!(spec.evidence.neighbour_bytes, [8 << 30]);
        assert_eq!(spec.evidence.at.0, clock().1, "of the sample that satisfied the hold");
        assert_eq!(created[0].metadata.namespace.as_deref(), Some("team"));
        for _ in 0..50 {
            bench.sample(100, &[("a", 9), ("b", 8)]);
        }
        assert!(bench.created().is_empty(), "one episode, one incident");
    }

    #[test]
    fn a_dry_run_is_reported_as_one_and_an_observing_policy_only_measures() {
        for (mode, expected) in [("DryRun", 1), ("Observe", 0)] {
            let mut bench = Bench::new(&json!([layer(mode)]));
            let volume = bench.volume("a");
            bench.sample(0, &[("a", 75)]);
            bench.sample(300, &[("a", 75)]);
            let created = bench.created();
            assert_eq!(created.iter().filter(|i| i.spec.kind == IncidentKind::QuotaBreach).count(), expected);
            assert!(created.iter().all(|incident| incident.spec.mode == Mode::DryRun));
            assert!(!volume.join("pressure").exists(), "a signal is an act");
        }
    }

    #[test]
    fn no_incident_is_opened_before_those_that_are_there_were_listed() {
        let mut bench = Bench::unsynced(&json!([layer("Enforce")]));
        bench.sample(0, &[("a", 9)]);
        bench.sample(300, &[("a", 9)]);
        assert!(bench.created().is_empty());
        bench.sync();
        bench.sample(100, &[("a", 9)]);
        let created = bench.created();
        assert_eq!(created.len(), 1);
        assert_eq!(
            created[0].spec.evidence.at.0,
            clock().1 - SignedDuration::from_millis(100),
            "what was seen then"
        );
    }

    #[test]
    fn after_a_restart_an_episode_that_ran_on_has_no_second_incident() {
        let mut bench = Bench::new(&json!([layer("Enforce")]));
        bench.sample(0, &[("a", 9)]);
        bench.sample(300, &[("a", 9)]);
        let incident = bench.created().remove(0);
        let mut bench = Bench::unsynced(&json!([layer("Enforce")]));
        bench.world(WorldChange::Incident(reset([incident])));
        bench.sample(0, &[("a", 9)]);
        bench.sample(300, &[("a", 9)]);
        bench.sample(300, &[("a", 9)]);
        assert!(bench.created().is_empty());
    }

    #[test]
    fn an_incident_is_observed_while_it_is_decided_and_to_its_end() {
        let mut bench = Bench::new(&json!([layer("Enforce")]));
        bench.sample(0, &[("a", 9)]);
        bench.sample(300, &[("a", 9)]);
        let incident = bench.created().remove(0);
        bench.sample(1_900, &[("a", 9)]);
        assert_eq!(bench.observed(), []);
        bench.sample(100, &[("a", 9)]);
        assert_eq!(bench.observed(), [ObservationState::Over]);
        bench.decide(&incident, DecisionState::Proposed, "BudgetExhausted");
        bench.sample(60_000, &[("a", 9)]);
        assert_eq!(bench.observed(), [], "waiting incidents cause no writes");
        bench.sample(100, &[("a", 7)]);
        assert_eq!(bench.observed(), [ObservationState::Recovered]);
        bench.sample(100, &[("a", 9)]);
        bench.sample(300, &[("a", 9)]);
        assert!(bench.observed().is_empty());
    }

    #[test]
    fn an_episode_that_ended_is_followed_by_the_next_even_if_its_incident_was_closed() {
        let mut bench = Bench::new(&json!([layer("DryRun")]));
        bench.sample(0, &[("a", 9)]);
        bench.sample(300, &[("a", 9)]);
        let mut incident = bench.created().remove(0);
        bench.decide(&incident, DecisionState::Suppressed, "DryRun");
        bench.sample(5_000, &[("a", 9)]);
        assert_eq!(bench.observed(), []);
        bench.sample(100, &[("a", 7)]);
        assert_eq!(bench.observed(), [ObservationState::Recovered]);
        incident.status = Some(GpuMemoryIncidentStatus {
            observation: Some(Observation {
                state: ObservationState::Recovered,
                bytes: None,
                at: MicroTime(clock().1),
                leak: None,
                after_act: None,
                act: None,
                hook: None,
            }),
            decision: None,
        });
        bench.world(WorldChange::Incident(Set::Upsert(incident)));
        bench.sample(100, &[("a", 9)]);
        bench.sample(900, &[("a", 9)]);
        assert_eq!(bench.created()[0].spec.episode, 2);
    }

    #[test]
    fn a_breach_while_the_end_of_the_last_is_being_written_has_an_incident_of_its_own() {
        let mut bench = Bench::new(&json!([layer("Enforce")]));
        bench.sample(0, &[("a", 9)]);
        bench.sample(300, &[("a", 9)]);
        bench.created();
        bench.sample(100, &[("a", 7)]);
        let jobs = bench.jobs();
        bench.sample(100, &[("a", 9)]);
        bench.sample(1_500, &[("a", 9)]);
        assert!(bench.created().is_empty(), "it may be the same episode");
        for job in jobs {
            if let Job::Observe(name, observation) = job {
                bench.engine.done(done(What::Observe(name, observation)));
            }
        }
        bench.sample(100, &[("a", 9)]);
        let created = bench.created();
        assert_eq!((created.len(), created[0].spec.episode), (1, 2));
    }

    #[test]
    fn an_incident_deleted_while_its_reason_holds_is_opened_anew() {
        let mut bench = Bench::new(&json!([layer("Enforce")]));
        bench.sample(0, &[("a", 9)]);
        bench.sample(300, &[("a", 9)]);
        let incident = bench.created().remove(0);
        bench.world(WorldChange::Incident(Set::Remove(incident)));
        bench.sample(100, &[("a", 9)]);
        assert_eq!(bench.created().len(), 1);
    }

    #[test]
    fn an_incident_found_in_place_of_the_new_one_that_has_ended_is_not_taken_for_it() {
        let mut bench = Bench::new(&json!([layer("Enforce")]));
        bench.sample(0, &[("a", 9)]);
        bench.sample(300, &[("a", 9)]);
        for job in bench.jobs() {
            let Job::Create(key, mut there) = job else { continue };
            let observation = Observation {
                state: ObservationState::Gone,
                bytes: None,
                at: MicroTime(clock().1),
                leak: None,
                after_act: None,
                act: None,
                hook: None,
            };
            there.status = Some(GpuMemoryIncidentStatus { observation: Some(observation), decision: None });
            bench.engine.done(done(What::Create(key, there)));
        }
        bench.sample(100, &[("a", 9)]);
        assert_eq!(bench.created()[0].spec.episode, 2);
    }

    #[test]
    fn episodes_of_one_pod_open_ever_less_often() {
        let mut bench = Bench::new(&json!([layer("Enforce")]));
        let mut opened = 0;
        for _ in 0..300 {
            for gib in [9, 9, 9, 7] {
                bench.sample(100, &[("a", gib)]);
                for job in bench.jobs() {
                    match job {
                        Job::Create(key, incident) => {
                            opened += 1;
                            bench.engine.done(done(What::Create(key, incident)));
                        }
                        Job::Observe(name, seen) => bench.engine.done(done(What::Observe(name, seen))),
                        _ => {}
                    }
                }
            }
        }
        assert!((3..=8).contains(&opened), "{opened} in 2 minutes");
    }

    #[test]
    fn a_breach_that_cannot_be_measured_any_more_begins_no_episode() {
        let mut bench = Bench::new(&json!([layer("Enforce")]));
        bench.world(WorldChange::Node(Set::Upsert(NodeFacts { uid: "node".into(), ..NodeFacts::default() })));
        let life = |bench: &mut Bench, binds| bench.engine.binds = binds;
        life(&mut bench, false);
        bench.sample(0, &[("a", 9)]);
        bench.sample(300, &[("a", 9)]);
        life(&mut bench, true);
        bench.engine.tick(&["GPU-0".into()], None);
        bench.pass(100, vec![]);
        assert!(bench.created().is_empty());
    }

    #[test]
    fn a_breaker_leaves_a_subject_about_which_nothing_is_done() {
        let mut layer = layer("Enforce");
        layer["quotas"][0]["value"]["breach"] = json!({"actions": []});
        for (state, reason, next) in [
            (DecisionState::Failed, "EvictionRefused", Some("b")),
            (DecisionState::Suppressed, "OwnerKindNotListed", Some("b")),
            (DecisionState::Suppressed, "DryRun", None),
        ] {
            let mut bench = Bench::new(&json!([layer]));
            bench.sample(0, &[("a", 40), ("b", 34)]);
            let incident = bench.created().remove(0);
            assert_eq!(subject(&incident), Some("a"));
            bench.decide(&incident, state, reason);
            bench.sample(100, &[("a", 40), ("b", 34)]);
            let created = bench.created();
            assert_eq!(created.first().and_then(subject), next, "{reason}");
            // With nobody left to turn to it stays with the last.
            if let Some(second) = created.first() {
                bench.decide(second, state, reason);
                bench.sample(100, &[("a", 40), ("b", 34)]);
                assert!(bench.created().is_empty());
            }
        }
    }

    #[test]
    fn a_restarted_agent_goes_on_with_the_breakers_episode_that_it_finds() {
        let mut layer = layer("Enforce");
        layer["quotas"][0]["value"]["breach"] = json!({"actions": []});
        let mut bench = Bench::new(&json!([layer]));
        bench.sample(0, &[("a", 40), ("b", 34)]);
        let incident = bench.created().remove(0);
        let mut bench = Bench::unsynced(&json!([layer]));
        bench.sample(0, &[("a", 34), ("b", 41)]);
        bench.world(WorldChange::Incident(reset([incident])));
        bench.sample(100, &[("a", 34), ("b", 41)]);
        bench.sample(100, &[("a", 34), ("b", 41)]);
        assert!(bench.created().is_empty(), "b is the worst now, but a was picked");
    }

    #[test]
    fn a_breakers_episode_ends_with_its_level() {
        let mut layer = layer("Enforce");
        layer["quotas"][0]["value"]["breach"] = json!({"actions": []});
        layer["rules"][0]["breakers"][0]["value"]["minimumStayMilliseconds"] = json!(60_000);
        let mut bench = Bench::new(&json!([layer]));
        bench.sample(0, &[("a", 40), ("b", 34)]);
        bench.created();
        bench.sample(100, &[("a", 32), ("b", 34)]);
        assert_eq!(bench.observed(), [ObservationState::Recovered]);
        bench.sample(5_000, &[("a", 37), ("b", 34)]);
        assert!(bench.created().is_empty(), "above the clear mark, but never again at the trip mark");
        bench.sample(100, &[("a", 39), ("b", 34)]);
        assert_eq!(bench.created().len(), 1);
    }

    #[test]
    fn memory_of_a_pod_that_is_gone_is_neither_recovered_nor_gone() {
        let mut bench = Bench::new(&json!([layer("Enforce")]));
        bench.sample(0, &[("a", 9)]);
        bench.sample(300, &[("a", 9)]);
        let incident = bench.created().remove(0);
        bench.decide(&incident, DecisionState::Verifying, "Evicted");
        bench.world(WorldChange::Pod(Set::Remove(pod("a"))));
        bench.sample(2_000, &[("a", 9)]);
        assert_eq!(bench.observed(), [ObservationState::Over]);
        // Its process is dead and still has all of it.
        bench.hold(100, &[(Holder::Gone, 9)]);
        assert_eq!(bench.observed(), [ObservationState::Unknown]);
        bench.hold(100, &[]);
        assert_eq!(bench.observed(), [ObservationState::Gone]);
    }

    #[test]
    fn the_most_incidents_of_a_node_include_those_that_are_being_created() {
        let mut bench = Bench::new(&json!([layer("Enforce")]));
        let names: Vec<String> = (0..40).map(|n| format!("{}{n}", char::from(b'A' + n))).collect();
        let mut layer = layer("Enforce");
        layer["quotas"][0]["value"]["default"]["limit"] = json!("512Mi");
        let spec = serde_json::from_value(json!({"planLifeSeconds": 600, "layers": [layer]})).unwrap();
        bench.world(WorldChange::Plan(Set::Upsert(GpuMemoryNode::new("n1", spec))));
        bench.world(WorldChange::Pod(Set::Reset {
            items: names.iter().map(|name| pod(name)).collect(),
            complete: true,
        }));
        let held: Vec<(&str, u64)> = names.iter().map(|name| (name.as_str(), 1)).collect();
        let mut creations = 0;
        for _ in 0..5 {
            bench.sample(300, &held);
            creations += bench.jobs().iter().filter(|job| matches!(job, Job::Create(..))).count();
        }
        assert_eq!(creations, episode::MAX_OPEN);
    }

    #[test]
    fn b16_a_breaker_picks_the_pod_most_over_its_due_and_another_only_once_that_is_gone() {
        let mut layer = layer("Enforce");
        layer["quotas"][0]["value"]["breach"] = json!({"actions": []});
        let mut bench = Bench::new(&json!([layer]));
        bench.sample(0, &[("a", 40), ("b", 34)]);
        let created = bench.created();
        assert_eq!((created.len(), subject(&created[0])), (1, Some("a")));
        assert_eq!(created[0].spec.evidence.level, Some(Level::Emergency));
        assert_eq!(created[0].spec.proposed.grace_period_seconds, Some(10));
        bench.sample(5_000, &[("a", 40), ("b", 34)]);
        assert!(bench.created().is_empty());
        // The device is still full when the first is gone: after a moment the next is picked.
        bench.sample(100, &[("b", 74)]);
        bench.sample(1_900, &[("b", 74)]);
        assert!(bench.created().is_empty());
        bench.sample(100, &[("b", 74)]);
        let created = bench.created();
        assert_eq!((created.len(), subject(&created[0])), (1, Some("b")));
    }

    #[test]
    fn nobody_over_its_due_is_an_incident_of_no_pod() {
        let mut layer = layer("Enforce");
        layer["quotas"] = json!([]);
        let mut bench = Bench::new(&json!([layer]));
        bench.sample(0, &[("a", 40), ("b", 34)]);
        let created = bench.created();
        assert_eq!((created.len(), subject(&created[0])), (1, None));
        assert_eq!(created[0].metadata.namespace.as_deref(), Some("highwater-system"));
    }

    #[test]
    fn memory_that_fell_back_ends_a_breakers_episode() {
        let mut layer = layer("Enforce");
        layer["quotas"][0]["value"]["breach"] = json!({"actions": []});
        let mut bench = Bench::new(&json!([layer]));
        bench.sample(0, &[("a", 40), ("b", 34)]);
        bench.created();
        bench.sample(100, &[("a", 20), ("b", 34)]);
        assert_eq!(bench.observed(), [ObservationState::Recovered]);
    }

    #[test]
    fn a_plan_that_outlived_its_life_binds_no_more() {
        let mut bench = Bench::new(&json!([layer("Enforce")]));
        let volume = bench.volume("a");
        TIME.set(601_000);
        bench.engine.tick(&[], None);
        bench.sample(0, &[("a", 75)]);
        bench.sample(300, &[("a", 75)]);
        assert!(bench.created().is_empty());
        bench.sample(12_000, &[("a", 75)]);
        let text = std::fs::read_to_string(volume.join("pressure")).unwrap();
        assert!(text.contains("Normal"), "{text}");
        assert_eq!(bench.engine.facts(Watch::On).devices[0].freeze, None);
        assert_eq!(bench.engine.facts(Watch::On).devices[0].level, Level::Emergency, "it measures on");
    }

    #[test]
    fn paused_means_no_new_signal() {
        let mut bench = Bench::new(&json!([layer("Enforce")]));
        let volume = bench.volume("a");
        let paused = NamespaceFacts { paused: true, ..NamespaceFacts::default() };
        bench.world(WorldChange::Namespace(Set::Upsert(("team".to_owned(), paused))));
        bench.sample(0, &[("a", 9)]);
        bench.sample(300, &[("a", 9)]);
        assert!(!volume.join("pressure").exists());
        assert_eq!(bench.created().len(), 1, "the incident says that it waits");
    }

    #[test]
    fn d18_a_steady_node_writes_its_status_once() {
        let mut bench = Bench::new(&json!([layer("Enforce")]));
        let mut statuses = 0;
        let mut object = bench.engine.world.object.clone().unwrap();
        for _ in 0..2_000 {
            bench.sample(100, &[("a", 5), ("b", 8)]);
            bench.engine.tick(&[], None);
            for job in bench.jobs() {
                match job {
                    Job::Status(status) => {
                        statuses += 1;
                        object.status = Some((*status).clone());
                        bench.engine.done(done(What::Status(status)));
                    }
                    Job::Probe => bench.engine.done(done(What::Probe(Some(Box::new(object.clone()))))),
                    other => panic!("{other:?}"),
                }
            }
        }
        assert_eq!(statuses, 1);
    }

    #[test]
    fn m08_a_lost_device_is_a_fault_of_its_own() {
        let mut bench = Bench::new(&json!([layer("Enforce")]));
        let errors = vec![CallError { call: "memory info", class: ErrorClass::Lost }];
        let lost = Sampled {
            uuid: "GPU-1".into(),
            reading: Reading { errors, ..Reading::default() },
            charges: None,
        };
        bench.pass(100, vec![lost]);
        bench.sample(100, &[("a", 5)]);
        let text = bench.engine.render(None);
        assert!(text.contains("highwater_device_up{device=\"1\",node=\"n1\"} 0"), "{text}");
        assert!(text.contains("highwater_device_errors_total{device=\"1\",error=\"lost\",node=\"n1\"} 1"));
        assert!(
            !text.contains("highwater_device_memory_bytes{bucket=\"free\",device=\"1\""),
            "missing, not 0"
        );
        assert!(text.contains("highwater_device_up{device=\"0\",node=\"n1\"} 1"));
        assert_eq!(bench.engine.facts(Watch::On).devices[1].fault, Some(DeviceFault::Lost));
    }

    #[test]
    fn a_device_that_does_not_answer_is_a_fault_and_its_incidents_are_of_unknown_state() {
        let mut bench = Bench::new(&json!([layer("Enforce")]));
        bench.sample(0, &[("a", 9)]);
        bench.sample(300, &[("a", 9)]);
        bench.created();
        bench.engine.tick(&["GPU-0".into()], None);
        bench.pass(100, vec![]);
        assert_eq!(bench.observed(), [ObservationState::Unknown]);
        assert_eq!(bench.engine.facts(Watch::On).devices[0].fault, Some(DeviceFault::Unresponsive));
    }

    #[test]
    fn m09_a_pod_has_series_from_the_time_on_that_it_has_a_device() {
        let mut bench = Bench::new(&json!([layer("Enforce")]));
        let mut assignments = crate::pod_resources::Assignments::default();
        let device = crate::pod_resources::ContainerDevices {
            container: "main".into(),
            devices: ["GPU-0".to_owned()].into(),
        };
        assignments.pods.entry("team".into()).or_default().insert("c".into(), vec![device]);
        bench.engine.resources(Snapshot { assignments: Arc::new(assignments), at: None });
        bench.sample(0, &[("a", 5)]);
        let text = bench.engine.render(None);
        let series = |pod: &str, value: &str| {
            format!(
                "highwater_pod_memory_used_bytes{{device=\"0\",namespace=\"team\",node=\"n1\",pod=\"{pod}\"}} {value}\n"
            )
        };
        assert!(text.contains(&series("c", "0")), "{text}");
        assert!(text.contains(&series("a", "5368709120")));
        bench.world(WorldChange::Pod(Set::Remove(pod("c"))));
        bench.sample(100, &[("a", 5)]);
        assert!(!bench.engine.render(None).contains("pod=\"c\""));
    }

    #[test]
    fn standing_down_leaves_nothing_measured() {
        let mut bench = Bench::new(&json!([layer("Enforce")]));
        bench.world(WorldChange::Node(Set::Upsert(NodeFacts { stand_down: true, ..NodeFacts::default() })));
        assert!(bench.engine.stands_down());
        bench.engine.report(Report::Closed);
        bench.engine.tick(&[], None);
        let status = bench.jobs().into_iter().find_map(|job| match job {
            Job::Status(status) => Some(status),
            _ => None,
        });
        let condition = &status.unwrap().conditions[0];
        assert_eq!((condition.status.as_str(), condition.reason.as_str()), ("False", "StandDown"));
        assert_eq!(bench.engine.ready(), Ok(()));
    }

    fn failed(what: What) -> Done {
        Done { written: false, ..done(what) }
    }

    #[test]
    fn the_age_of_what_the_kubelet_said_is_of_the_last_answer_not_of_the_last_change() {
        let mut bench = Bench::new(&json!([layer("Enforce")]));
        let now = tokio::time::Instant::now();
        bench.engine.resources(Snapshot {
            assignments: Arc::default(),
            at: now.checked_sub(Duration::from_hours(1)),
        });
        let text = bench.engine.render(Some(now));
        let age = text.lines().find(|line| line.starts_with("highwater_pod_resources_age_seconds{")).unwrap();
        assert!(age.rsplit(' ').next().unwrap().parse::<f64>().unwrap() < 1800.0, "{age}");
    }

    #[test]
    fn the_node_object_is_created_once_and_never_in_place_of_one_that_cannot_be_read() {
        for readable in [true, false] {
            let mut bench = Bench::new(&json!([layer("Enforce")]));
            bench.sample(0, &[]);
            bench.jobs();
            let object = bench.engine.world.object.take().unwrap();
            bench.world(WorldChange::Plan(Set::Reset { items: vec![], complete: readable }));
            let mut created = 0;
            for _ in 0..100 {
                bench.sample(300, &[]);
                bench.engine.tick(&[], None);
                for job in bench.jobs() {
                    if let Job::CreateNode(_) = job {
                        created += 1;
                        let object = Some(Box::new(object.clone()));
                        bench.engine.done(done(What::CreateNode(object)));
                    }
                }
            }
            assert_eq!(created, usize::from(readable));
        }
    }

    #[test]
    fn only_a_success_is_contact_and_what_a_probe_reads_is_the_plan() {
        let mut bench = Bench::new(&json!([layer("Enforce")]));
        let mut object = bench.engine.world.object.clone().unwrap();
        TIME.set(601_000);
        bench.engine.tick(&[], None);
        assert!(bench.jobs().iter().any(|job| matches!(job, Job::Probe)));
        bench.engine.done(failed(What::Probe(None)));
        bench.engine.tick(&[], None);
        assert!(!bench.engine.binds);
        object.metadata.generation = Some(7);
        bench.engine.done(done(What::Probe(Some(Box::new(object.clone())))));
        assert!(bench.engine.binds);
        assert_eq!(bench.engine.plan.as_ref().unwrap().generation, Some(7));
        // An answer that was overtaken by the watch is left aside.
        object.metadata.generation = Some(6);
        bench.engine.done(done(What::Probe(Some(Box::new(object)))));
        assert_eq!(bench.engine.plan.as_ref().unwrap().generation, Some(7));
        bench.engine.done(done(What::Probe(None)));
        assert!(!bench.engine.binds);
    }

    #[test]
    fn after_a_restart_the_level_that_was_shown_holds_on_and_nothing_is_written_before_a_sample() {
        let mut bench = Bench::new(&json!([layer("Enforce")]));
        bench.sample(0, &[("a", 5), ("b", 60)]);
        let (_, wall) = clock();
        let status = node_status::status(&bench.engine.facts(Watch::On), None, wall);
        assert_eq!(status.devices[0].level, Level::Critical);
        let mut object = bench.engine.world.object.clone().unwrap();
        object.status = Some(status);

        let mut bench = Bench::unsynced(&json!([layer("Enforce")]));
        bench.engine.levels = None;
        bench.world(WorldChange::Plan(reset([object])));
        bench.engine.tick(&[], None);
        assert!(!bench.jobs().iter().any(|job| matches!(job, Job::Status(_))));
        // Between the marks: kept if it was entered, not entered anew.
        bench.sample(0, &[("a", 5), ("b", 57)]);
        let facts = bench.engine.facts(Watch::On);
        assert_eq!((facts.devices[0].level, facts.devices[0].freeze.is_some()), (Level::Critical, true));
        bench.sample(2_000, &[("a", 5)]);
        assert_eq!(bench.engine.facts(Watch::On).devices[0].level, Level::Normal);
    }

    #[test]
    fn how_the_host_fares_is_read_every_ten_seconds_and_goes_on_from_what_was_told() {
        use highwater_crds::{GpuMemoryNodeStatus, HostMemoryBand, HostStatus};
        let told = HostStatus { memory: Some(HostMemoryBand::Below800M), ..HostStatus::default() };
        let mut bench = Bench::unsynced(&json!([layer("Enforce")]));
        bench.engine.fares = None;
        assert!(!bench.engine.asks_how_host_fares(), "what was told is not known yet");
        let mut object = object(&json!([layer("Enforce")]), 1);
        object.status = Some(GpuMemoryNodeStatus { host: Some(told), ..GpuMemoryNodeStatus::default() });
        bench.world(WorldChange::Plan(reset([object])));
        bench.sync();
        bench.sample(0, &[("a", 5)]);
        assert_eq!(bench.engine.facts(Watch::On).host, Some(told));

        let reading = host_status::Reading { memory: Some(8 * GI), ..host_status::Reading::default() };
        let mut asked = 0;
        let mut at = |bench: &mut Bench, now| {
            TIME.set(now);
            if bench.engine.asks_how_host_fares() {
                asked += 1;
                bench.engine.fares(&reading);
            }
            (asked, bench.engine.facts(Watch::On).host.and_then(|host| host.memory))
        };
        assert_eq!(at(&mut bench, 0), (1, Some(HostMemoryBand::Below800M)));
        assert_eq!(at(&mut bench, 9_999), (1, Some(HostMemoryBand::Below800M)));
        assert_eq!(at(&mut bench, 10_000), (2, Some(HostMemoryBand::Below800M)));
        assert_eq!(at(&mut bench, 300_000), (3, Some(HostMemoryBand::Above1200M)), "it has lasted");
        // A later word of the watch is the agent's own.
        bench.plan(&json!([layer("Enforce")]), 2);
        assert_eq!(at(&mut bench, 300_001), (3, Some(HostMemoryBand::Above1200M)));
    }

    #[test]
    fn a_device_described_anew_is_the_same_device() {
        let mut bench = Bench::new(&json!([layer("Enforce")]));
        bench.sample(0, &[("a", 75)]);
        let mut info = bench.engine.devices[0].0.info.clone();
        info.total = None;
        info.index = 4;
        bench.engine.report(Report::Opened { version: "580".into(), devices: vec![info], limits: false });
        let facts = bench.engine.facts(Watch::On);
        assert_eq!((facts.devices[0].level, &*facts.devices[0].label), (Level::Emergency, "4"));
        assert_eq!(bench.engine.devices[0].0.info.total, Some(80 * GI));
    }

    #[test]
    fn only_a_limit_that_binds_lets_a_pod_declare_memory() {
        let declares = PodFacts { declared: Some(ByteSize::gib(70)), ..pod("a") };
        let mut unlimited = layer("Enforce");
        unlimited["quotas"] = json!([]);
        for (layers, of) in [
            (json!([layer("Enforce")]), 72),
            (json!([unlimited]), 80),
            (json!([layer("DryRun")]), 80),
            (json!([unlimited, layer("Observe")]), 80),
        ] {
            let mut bench = Bench::new(&layers);
            bench.world(WorldChange::Pod(Set::Upsert(declares.clone())));
            bench.sample(0, &[("a", 70)]);
            bench.sample(100, &[("a", 70)]);
            let share = bench.engine.devices[0].0.ledger.level.unwrap();
            assert_eq!(share.of, of * GI, "{layers}");
        }
    }

    #[test]
    fn what_keeps_the_agent_from_standing_down_is_said() {
        let mut bench = Bench::new(&json!([layer("Enforce")]));
        bench.engine.report(Report::Closing("a call about device GPU-0 has not returned".into()));
        bench.engine.tick(&["GPU-0".into()], None);
        let status = bench.jobs().into_iter().find_map(|job| match job {
            Job::Status(status) => Some(status),
            _ => None,
        });
        let condition = &status.unwrap().conditions[0];
        assert_eq!((condition.status.as_str(), condition.reason.as_str()), ("False", "StandingDown"));
        assert!(condition.message.contains("GPU-0"));
    }

    #[test]
    fn a_question_is_answered_once_even_if_the_operators_clock_is_ahead() {
        let mut bench = Bench::new(&json!([layer("Enforce")]));
        bench.sample(0, &[("a", 9)]);
        bench.sample(300, &[("a", 9)]);
        let mut incident = bench.created().remove(0);
        for time in ["2100-01-01T00:00:00Z", "2000-01-01T00:00:00Z"] {
            incident.annotations_mut().insert(highwater_crds::names::OBSERVE.into(), time.into());
            bench.decide(&incident, DecisionState::Proposed, "BudgetExhausted");
            let mut answers = 0;
            for _ in 0..100 {
                bench.sample(100, &[("a", 9)]);
                answers += bench.observed().len();
            }
            assert_eq!(answers, 1, "{time}");
        }
    }

    #[test]
    fn a_question_is_not_answered_by_a_sample_that_was_taken_before_it() {
        let mut bench = Bench::new(&json!([layer("Enforce")]));
        bench.sample(0, &[("a", 9)]);
        bench.sample(300, &[("a", 9)]);
        let mut incident = bench.created().remove(0);
        bench.late = 50;
        incident
            .annotations_mut()
            .insert(highwater_crds::names::OBSERVE.into(), "2000-01-01T00:00:00Z".into());
        bench.decide(&incident, DecisionState::Verifying, "Evicted");
        bench.sample(100, &[]);
        assert_eq!(bench.observed(), [ObservationState::Gone], "its news is told all the same");
        bench.late = 0;
        let mut answers = 0;
        for _ in 0..100 {
            bench.sample(100, &[]);
            answers += bench.observed().len();
        }
        assert_eq!(answers, 1);
    }

    #[test]
    fn an_observation_names_the_act_that_was_known_of_before_its_sample() {
        let mut bench = Bench::new(&json!([layer("Enforce")]));
        bench.sample(0, &[("a", 9)]);
        bench.sample(300, &[("a", 9)]);
        let incident = bench.created().remove(0);
        bench.late = 50;
        bench.decide(&incident, DecisionState::Verifying, "Evicted");
        let named = |bench: &mut Bench| -> Vec<bool> {
            let mut named = Vec::new();
            for job in bench.jobs() {
                if let Job::Observe(name, observation) = job {
                    named.push(observation.after_act.is_some());
                    bench.engine.done(done(What::Observe(name, observation)));
                }
            }
            named
        };
        bench.sample(100, &[]);
        assert_eq!(named(&mut bench), [false], "it was heard of after the sample");
        bench.late = 0;
        for _ in 0..30 {
            bench.sample(100, &[]);
        }
        assert_eq!(named(&mut bench), [true]);
    }

    #[test]
    fn zombie_memory_that_is_gone_begins_no_other_episode() {
        let mut bench = Bench::new(&json!([layer("Enforce")]));
        for _ in 0..15 {
            bench.hold(1_000, &[(Holder::Gone, 9)]);
        }
        let mut incident = bench.created().remove(0);
        assert_eq!(incident.spec.kind, IncidentKind::ZombieMemory);
        bench.decide(&incident, DecisionState::Proposed, "ResetRequested");
        bench.hold(2_100, &[]);
        assert_eq!(bench.observed(), [ObservationState::Recovered]);
        let observation = Observation {
            state: ObservationState::Recovered,
            bytes: Some(0),
            at: MicroTime(clock().1),
            leak: None,
            after_act: None,
            act: None,
            hook: None,
        };
        incident.status = Some(GpuMemoryIncidentStatus { observation: Some(observation), decision: None });
        bench.world(WorldChange::Incident(Set::Upsert(incident)));
        // What the node says of it lasts for another while.
        for _ in 0..25 {
            bench.hold(500, &[]);
            assert!(bench.created().is_empty());
        }
    }

    #[test]
    fn a_breakers_subject_that_is_gone_has_no_second_incident_while_the_device_settles() {
        let mut layer = layer("Enforce");
        layer["quotas"][0]["value"]["breach"] = json!({"actions": []});
        let mut bench = Bench::new(&json!([layer]));
        bench.sample(0, &[("a", 40), ("b", 34)]);
        bench.created();
        bench.sample(100, &[("b", 74)]);
        assert_eq!(bench.observed(), [ObservationState::Gone]);
        bench.sample(100, &[("b", 74)]);
        bench.sample(1_700, &[("b", 74)]);
        assert!(bench.created().is_empty());
        bench.sample(200, &[("b", 74)]);
        assert_eq!(bench.created().iter().map(subject).collect::<Vec<_>>(), [Some("b")]);
    }
}
