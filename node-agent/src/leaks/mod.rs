//! Leaks: the agent feeds the detector of `policy::leak` with what its pods hold on devices and on the
//! host, and says what is thought of them.
//!
//! Every pod has a series for each of its devices and one for its host memory, in each mode whose
//! policies say something of leaks. What is measured comes from the sampling loop, at the pace of the
//! policy; host memory and a framework's own numbers are read beside it and taken as last known.

mod lives;
mod series;
mod store;
mod told;
mod workloads;

use std::{
    collections::{BTreeMap, HashMap},
    path::Path,
    sync::Arc,
};

use highwater_crds::{ByteSize, LeakMemory, Leaks as LeaksRule, Mode, PlanLeaks};
use highwater_policy::{
    leak::{Detector, LeakMode, Numbers, Sample, Settings, Workload, capacity, one_rank},
    pod,
    time::Millis,
};
use jiff::Timestamp;
use tracing::warn;

use self::{
    lives::Life,
    series::{Of, Series, freshness},
    store::Store,
    workloads::Workloads,
};
pub(crate) use self::{
    store::{Snapshot, keep},
    told::{Seen, Suspected},
};
use crate::{
    account::Device,
    decide::{Layer, Rules, Tenant},
    framework::{Fault, Scraped, Target},
    host::Exact,
    publish::Notice,
    world::{Pod, World},
};

/// What a device, or the host, is called where no device is meant.
const HOST_PRODUCT: &str = "host";

/// The series of the node's pods.
#[derive(Debug)]
pub(crate) struct Leaks {
    pods: HashMap<Arc<str>, Watched>,
    workloads: Workloads,
    /// What the clock of the samples was when this agent's began: it goes on over restarts.
    offset: u64,
    /// When the next sample is due, on the agent's clock.
    due: Option<Millis>,
    store: Store,
    /// What was told last of a rule that makes no sense.
    fault: Option<String>,
    /// What is counted.
    pub(crate) counts: Counts,
}

/// What is counted.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    /// Samples that were fed,
    pub(crate) samples: u64,
    /// and of these those without a number.
    pub(crate) missing: u64,
    /// Findings by how far they go and by class.
    pub(crate) findings: BTreeMap<(&'static str, &'static str), u64>,
    /// Readings of frameworks' numbers by what came of them.
    pub(crate) scrapes: BTreeMap<&'static str, u64>,
}

/// By what a layer of the plan judges pods.
#[derive(Debug)]
struct Judged<'a> {
    mode: Mode,
    plan: &'a PlanLeaks,
    settings: Arc<Settings>,
    rule: Arc<LeaksRule>,
}

/// A pod that is watched.
#[derive(Debug)]
struct Watched {
    /// The pod as the API server knows it; `None` while an earlier agent's word is all there is.
    pod: Option<Arc<Pod>>,
    /// UID in the API.
    uid: Arc<str>,
    life: Life,
    series: Vec<Series>,
    host: Option<(Exact, Millis)>,
    framework: Option<(Numbers, Millis)>,
    /// People were told that its framework's numbers cannot be had.
    failing: bool,
}

impl Leaks {
    /// Goes on with what an earlier agent knew.
    pub(crate) fn open(state_dir: &Path, wall: Timestamp) -> Self {
        let (store, found) = Store::open(state_dir, wall);
        Self {
            pods: found.pods,
            workloads: found.workloads,
            offset: found.clock,
            due: None,
            store,
            fault: None,
            counts: Counts::default(),
        }
    }

    /// The time on the clock of the samples.
    fn at(&self, now: Millis) -> Millis {
        now.plus(self.offset)
    }

    /// Looks up anew whom which rule concerns. Lives of pods that ended, or whose containers were started
    /// anew, end. What was seen by a rule that is gone is forgotten.
    pub(crate) fn rule(
        &mut self,
        devices: &[(Device, Rules)],
        world: &World,
        release_namespace: &str,
        now: Millis,
        wall: Timestamp,
    ) {
        let at = self.at(now);
        for watched in self.pods.values_mut() {
            watched.series.iter_mut().for_each(|series| series.rule = None);
        }
        let mut ranks: HashMap<Arc<str>, u8> = HashMap::new();
        for (device, rules) in devices {
            let judged: Vec<Option<Judged>> = rules.layers.iter().map(|layer| self.judged(layer)).collect();
            for tenant in &rules.tenants {
                let rank = ranks.entry(Arc::clone(&tenant.pod.kubelet_uid)).or_default();
                for judged in judged.iter().flatten().filter(|_| !tenant.pod.facts.finished) {
                    let of = &tenant.pod.facts.namespace;
                    let (facts, selector) = (world.namespaces.get(of), judged.plan.namespaces.as_ref());
                    if pod::selects_namespace(selector, of, facts, release_namespace) {
                        self.watch(device, judged, tenant, *rank, (now, at, wall));
                    }
                }
                *rank = rank.saturating_add(1);
            }
        }
        self.live_on(world, at, wall);
        self.forget(devices, world, release_namespace);
        self.due = self.pods.values().filter_map(Watched::due).min();
    }

    /// Forgets what was seen by rules that are gone: one that comes back judges by what it sees itself. Whom
    /// a rule only does not find for the moment, because a device was let go of, or the API server or the
    /// kubelet has not said everything yet, it goes on with.
    fn forget(&mut self, devices: &[(Device, Rules)], world: &World, release_namespace: &str) {
        // A plan from the file may be an old one.
        if world.object.is_none() {
            return;
        }
        let stands = |pod: &Pod, of: &Of| {
            let found = devices.iter().find(|(device, _)| device.uuid == of.device);
            let (Some((_, rules)), Some(facts)) = (found, world.namespaces.get(&pod.facts.namespace)) else {
                return true;
            };
            rules.layers.iter().filter(|layer| layer.mode == of.mode).any(|layer| {
                layer.leaks.as_ref().is_some_and(|plan| {
                    let (selector, name) = (plan.namespaces.as_ref(), &pod.facts.namespace);
                    pod::selects_namespace(selector, name, Some(facts), release_namespace)
                })
            })
        };
        let mut forgot = false;
        self.pods.retain(|_, watched| {
            let Some(pod) = &watched.pod else { return true };
            let known = watched.series.len();
            watched.series.retain(|series| series.rule.is_some() || stands(pod, &series.of));
            forgot |= known != watched.series.len();
            !watched.series.is_empty()
        });
        if forgot {
            self.store.touched(true);
        }
    }

    /// By what a layer judges; `None` where it says nothing of leaks that makes sense.
    fn judged<'a>(&mut self, layer: &'a Layer) -> Option<Judged<'a>> {
        let plan = layer.leaks.as_ref()?;
        match Settings::of(&plan.value) {
            Ok(settings) => {
                let (settings, rule) = (Arc::new(settings), Arc::new(plan.value.clone()));
                Some(Judged { mode: layer.mode, plan, settings, rule })
            }
            Err(error) => {
                // The API server and the operator refuse it; only an old plan can say it.
                if self.fault.as_ref() != Some(&error) {
                    let policy = &plan.policy;
                    warn!(policy, error, "a rule on leaks makes no sense: nobody is watched by it");
                    self.fault = Some(error);
                }
                None
            }
        }
    }

    /// A rule concerns a pod on a device.
    fn watch(
        &mut self,
        device: &Device,
        judged: &Judged<'_>,
        tenant: &Tenant,
        rank: u8,
        (now, at, wall): (Millis, Millis, Timestamp),
    ) {
        let Judged { mode, settings, rule, .. } = judged;
        let pod = &tenant.pod;
        let watched = self.pods.entry(Arc::clone(&pod.kubelet_uid)).or_insert_with(|| Watched::new(pod));
        for memory in [LeakMemory::Device, LeakMemory::Host] {
            let of = Of { memory, mode: *mode, device: Arc::clone(&device.uuid) };
            let (product, rank) = match memory {
                LeakMemory::Device => (device.info.product.as_str(), rank),
                LeakMemory::Host => (HOST_PRODUCT, 0),
            };
            let known = watched.series.iter_mut().find(|series| series.of.same(&of));
            let series = match known {
                // Of several devices the first tells of host memory.
                Some(series) if memory == LeakMemory::Host && series.rule.is_some() => continue,
                Some(series) => series,
                None => {
                    let workload = Workload::of(&pod.facts, product, memory, rank, *mode);
                    let profile = self.workloads.profile(&workload, at);
                    let detector = Detector::with_profile(Arc::clone(settings), profile);
                    let mut series = Series::new(of.clone(), workload, Arc::clone(settings), detector, at);
                    series.whole = watched.life.is_young(settings, wall);
                    series.known = series.whole;
                    series.due = now;
                    watched.series.push(series);
                    let Some(series) = watched.series.last_mut() else { continue };
                    series
                }
            };
            series.of.device = of.device;
            series.set(settings, at);
            series.rule = Some(Arc::clone(rule));
        }
    }

    /// Feeds what is due. Returns whether what is thought of some pod changed.
    pub(crate) fn sample(&mut self, devices: &[(Device, Rules)], now: Millis, wall: Timestamp) -> bool {
        if self.due.is_none_or(|due| now < due) {
            return false;
        }
        let at = self.at(now);
        let (mut changed, mut due) = (false, None);
        for (uid, watched) in &mut self.pods {
            // Pods that came at different times are due at different times: few of them at any.
            let next = watched.due();
            if next.is_none_or(|next| now < next) {
                due = due.into_iter().chain(next).min();
                continue;
            }
            let Some(pod) = watched.pod.clone() else { continue };
            let only = watched.has_one_device();
            let mut fed = false;
            for series in watched.series.iter_mut().filter(|series| series.rule.is_some()) {
                if now >= series.due {
                    let pace = series.settings.sample_milliseconds;
                    let limit = freshness(&series.settings);
                    let fresh = |read: &Millis| now.since(*read) <= limit;
                    let host = watched.host.as_ref().filter(|(_, read)| fresh(read)).map(|(host, _)| *host);
                    let framework = watched.framework.as_ref().filter(|(_, read)| fresh(read));
                    let mut sample = Sample { at, ..Sample::default() };
                    match series.of.memory {
                        LeakMemory::Device => {
                            on_device(&mut sample, devices, &series.of, uid);
                            sample.host_bytes = host.and_then(|host| host.held);
                            if let Some((numbers, _)) = framework {
                                sample.framework = numbers.of_device(&series.of.device, only);
                                sample.replays = numbers.replays.filter(|_| only);
                            }
                            series.detector.declared(pod.facts.declared.map(ByteSize::bytes));
                        }
                        LeakMemory::Host => {
                            sample.bytes = host.and_then(|host| host.held);
                            sample.capacity = host.and_then(|host| host.limit);
                        }
                    }
                    sample.work = framework.and_then(|(numbers, _)| numbers.work);
                    changed |= series.take(&pod, &sample, wall, &mut self.counts);
                    fed = true;
                    series.due = series.due.plus(pace);
                    if series.due <= now {
                        series.due = now.plus(pace);
                    }
                }
                due = Some(due.map_or(series.due, |due: Millis| due.min(series.due)));
            }
            if fed {
                watched.compare();
            }
        }
        self.due = due;
        self.store.touched(changed);
        changed
    }

    /// Host memory was read.
    pub(crate) fn host(&mut self, pod: &str, read: Exact, now: Millis) {
        if let Some(watched) = self.pods.get_mut(pod) {
            watched.host = Some((read, now));
        }
    }

    /// The pods whose host memory is to be read, and how often, in milliseconds.
    pub(crate) fn host_wants(&self) -> impl Iterator<Item = (&Arc<str>, u64)> {
        self.pods.iter().filter_map(|(uid, watched)| Some((uid, watched.pace()?)))
    }

    /// The frameworks whose numbers are to be read.
    pub(crate) fn targets(&self) -> Vec<Target> {
        let of = |(uid, watched): (&Arc<str>, &Watched)| {
            let facts = &watched.pod.as_ref()?.facts;
            let endpoint = facts.metrics.as_ref()?;
            // Its address may be another's soon.
            let address = facts.pod_ip.filter(|_| !facts.terminating && !facts.finished)?;
            Some(Target {
                pod: Arc::clone(uid),
                address,
                port: endpoint.port,
                path: endpoint.path.clone(),
                every: watched.pace()?,
            })
        };
        let mut targets: Vec<Target> = self.pods.iter().filter_map(of).collect();
        targets.sort_unstable_by(|a, b| a.pod.cmp(&b.pod));
        targets
    }

    /// A framework's numbers were read, or not. Returns what there is to tell, once.
    pub(crate) fn scraped(&mut self, scraped: Scraped, now: Millis) -> Option<Notice> {
        let Scraped { target, result } = scraped;
        let outcome = result.as_ref().map_or_else(Fault::as_str, |_| "done");
        *self.counts.scrapes.entry(outcome).or_default() += 1;
        let watched = self.pods.get_mut(&target.pod)?;
        match result {
            Ok(numbers) => {
                watched.framework = Some((numbers, now));
                watched.failing = false;
                None
            }
            Err(fault) => {
                let news = !std::mem::replace(&mut watched.failing, true);
                let note = format!(
                    "GET {} on port {} for the framework's numbers: {fault}",
                    target.path, target.port
                );
                let pod = watched.pod.as_ref().filter(|_| news)?;
                Some(Notice::warning(pod, "FrameworkNumbersMissing", "Measure", note))
            }
        }
    }

    /// What is to be kept for a later agent, if it is time.
    pub(crate) fn snapshot(&mut self, now: Millis, wall: Timestamp) -> Option<Snapshot> {
        let blocks = self.pods.values().flat_map(|watched| &watched.series).map(|series| {
            let [shortest, ..] = series.settings.block_milliseconds;
            shortest
        });
        // That nobody is watched any more is written soon.
        let pace = blocks.min().unwrap_or(0);
        if self.store.is_due(pace, now) { self.close(now, wall) } else { None }
    }

    /// What is to be kept for a later agent now: this one ends.
    pub(crate) fn close(&mut self, now: Millis, wall: Timestamp) -> Option<Snapshot> {
        let at = self.at(now);
        self.store.snapshot(&self.pods, &self.workloads, at, wall, now)
    }
}

impl Watched {
    fn new(pod: &Arc<Pod>) -> Self {
        Self {
            pod: Some(Arc::clone(pod)),
            uid: Arc::clone(&pod.uid),
            life: Life::of(&pod.facts),
            series: Vec::new(),
            host: None,
            framework: None,
            failing: false,
        }
    }

    /// When something of it is sampled next; `None` where no rule concerns it, or it is not known.
    fn due(&self) -> Option<Millis> {
        let ruled = self.series.iter().filter(|series| self.pod.is_some() && series.rule.is_some());
        ruled.map(|series| series.due).min()
    }

    /// Whether rules concern it on one device alone, in however many modes.
    fn has_one_device(&self) -> bool {
        let ruled = |s: &&Series| s.of.memory == LeakMemory::Device && s.rule.is_some();
        let mut on = self.series.iter().filter(ruled).map(|series| &series.of.device);
        on.next().is_some_and(|first| on.all(|other| other == first))
    }

    /// How often something of it is sampled, in milliseconds; `None` where no rule concerns it.
    fn pace(&self) -> Option<u64> {
        let ruled = self.series.iter().filter(|series| series.rule.is_some());
        ruled.map(|series| series.settings.sample_milliseconds).min()
    }

    /// Of a pod on several devices, the one that grows alone is named where nothing else is known of it.
    fn compare(&mut self) {
        if self.series.iter().all(|series| series.finding.is_none()) {
            return;
        }
        for mode in [Mode::Enforce, Mode::DryRun, Mode::Observe] {
            let ranks: Vec<usize> = self
                .series
                .iter()
                .enumerate()
                .filter(|(_, s)| s.of.memory == LeakMemory::Device && s.of.mode == mode && s.rule.is_some())
                .map(|(place, _)| place)
                .collect();
            let slope = |place: &usize| {
                let series = self.series.get(*place);
                let finding = series.and_then(|series| series.detector.present(series.began));
                finding.map_or(0.0, |finding| finding.slope_bytes_per_hour.mid)
            };
            // Before all were seen for long enough nobody stands out.
            let unknown = |series: &Series| !series.is_known(series.sampled);
            if ranks.iter().filter_map(|place| self.series.get(*place)).any(unknown) {
                continue;
            }
            let slopes: Vec<f64> = ranks.iter().map(slope).collect();
            let Some((rank, sure)) = one_rank(&slopes) else { continue };
            let series = ranks.get(rank).and_then(|place| self.series.get_mut(*place));
            let finding = series.and_then(|series| series.finding.as_mut());
            if let Some(finding) = finding.filter(|finding| finding.mode.is_none()) {
                finding.mode = Some(LeakMode::OneRank);
                finding.mode_percent = Some(told::percent(sure));
            }
        }
    }
}

/// What a pod holds on a device, and what it can come to there. One without a process there holds
/// nothing that could be judged: it starts, is parked, or is between two processes.
fn on_device(sample: &mut Sample, devices: &[(Device, Rules)], of: &Of, uid: &str) {
    let Some((device, rules)) = devices.iter().find(|(device, _)| device.uuid == of.device) else { return };
    let ledger = &device.ledger;
    sample.bytes = ledger.used_by(uid).filter(|bytes| *bytes > 0);
    if sample.bytes.is_none() {
        return;
    }
    let own = rules.tenants.iter().find(|tenant| *tenant.pod.kubelet_uid == *uid);
    let limit = own.and_then(Tenant::quota).map(|quota| quota.limit);
    let promised =
        rules.tenants.iter().filter(|tenant| *tenant.pod.kubelet_uid != *uid).filter_map(|tenant| {
            let guarantee = tenant.quota().and_then(|quota| quota.guarantee)?;
            Some((tenant.used.unwrap_or(0), guarantee))
        });
    sample.capacity = capacity::capacity(ledger, uid, limit, promised);
}
