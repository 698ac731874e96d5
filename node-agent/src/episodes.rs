//! Episodes: what is to be done about whom, and what is seen of it since.
//!
//! An episode runs while its reason holds. What an agent does by itself has none: it is begun at once. It has one incident, which is created once and
//! observed until its end was seen or the operator has closed it. All is derived from the
//! present state at every sample, so whatever could not be written is written later.

mod climb;
mod leak;

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use highwater_crds::{
    Action, ActionType, BreakerScope, ByteSize, DecisionState, Evidence, GpuMemoryIncident,
    GpuMemoryIncidentSpec, IncidentKind, LeakFinding, LeakMemory, LeakStage, Mode, Observation,
    ObservationState, Proposal, Subject, names,
};
use highwater_policy::{
    breaker,
    episode::{self, Beginning, Key, Last},
    leak::renewal_due,
    leak_episode::Hook,
    ledger::{Ledger, Share},
    time::Millis,
};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::ResourceExt;
use tracing::warn;

use self::climb::Stand;
pub(crate) use self::leak::memory_of_leak;
use crate::{
    account::Device,
    act::{carry::Carries, parks::Parks},
    decide::{Concern, Held, Rules, Standing, Tenant},
    evidence::Evidence as Looked,
    hosts::Hosts,
    ladder::{At, Foot, Ladder},
    leaks::{Leaks, Seen},
    pools::Pools,
    publish::{Attempt, Job},
    wards::Wards,
    world::{Pod, World},
};

/// After an episode of a pod ended, the least time in milliseconds before the next is opened:
/// doubled each time, up to the second.
const PAUSE: (u64, u64) = (1_000, 300_000);
/// After so long without an end, in milliseconds, the pause is the least again.
const QUIET: u64 = 600_000;
/// Reason of a decision about a rehearsal: it says nothing against the pod.
const DRY_RUN: &str = "DryRun";
/// How long a pod may be parked where no policy says it any more, in minutes.
const MAX_PARKED_MINUTES: i32 = 60;
/// Neighbours that an incident lists.
const NEIGHBOURS: usize = 16;

/// Namespace and name of an incident.
pub(crate) type Name = (String, String);

/// The episodes of a node.
#[derive(Debug, Default)]
pub(crate) struct Episodes {
    running: BTreeMap<Reason, Running>,
    ladders: BTreeMap<Foot, Ladder>,
    /// What the agent does by itself, and has not yet.
    locals: Vec<Local>,
    observing: HashMap<Name, Observing>,
    /// Whose incidents are being created, and for which act.
    creating: HashSet<(Key, ActionType)>,
    /// The ends of those whose next episode may have to wait.
    ended: HashMap<(Key, ActionType), Ended>,
}

/// Why something is to be done that the operator must allow.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Reason {
    device: Arc<str>,
    mode: Mode,
    about: About,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum About {
    /// An act against what a breaker measures.
    Rung {
        scope: BreakerScope,
        /// UID of the pod that the breaker is about, where it is about one.
        of: Option<Arc<str>>,
        act: ActionType,
        /// UID of the pod that is acted on; `None` where that is the node, or where nobody is to blame.
        subject: Option<Arc<str>>,
    },
    /// An act on a pod for its own sake: it breaks its quota, holds too much host memory, or leaks.
    Pod { at: At, pod: Arc<str>, act: ActionType },
    /// Memory of processes that are gone.
    Zombie,
    /// A parked pod that is to be restarted instead of being restored.
    Overdue(Arc<str>),
}

/// Something that the agent does by itself.
#[derive(Clone, Debug)]
pub(crate) enum Local {
    /// Asks the engine in a pod to free what it caches.
    Hook {
        /// The ladder that asks.
        foot: Foot,
        /// The pod.
        pod: Arc<Pod>,
        /// UUID of the device.
        device: Arc<str>,
        /// Bytes that the pod holds there.
        held: u64,
        /// How long the engine may take.
        limit: Duration,
        /// Why, in a sentence.
        why: String,
    },
    /// Takes idle grants back and has guards trim the driver's pools.
    Reclaim {
        /// UUID of the device.
        device: Arc<str>,
        /// Its pods, as the kubelet knows them.
        pods: Vec<Arc<str>>,
        /// Why, in a sentence.
        why: String,
    },
}

/// An episode that runs.
#[derive(Debug)]
struct Running {
    key: Key,
    /// Its incident, but for the number of the episode.
    draft: Box<GpuMemoryIncidentSpec>,
    incident: Option<Name>,
    attempt: Attempt,
    /// Since when the subject of a breaker's episode holds nothing.
    vacant: Option<Millis>,
    /// When use of the device last fell below the breaker's clear mark.
    fell: Option<Millis>,
    /// It was an earlier agent's.
    inherited: bool,
    /// Of a leak: the incident before it in its episode, which was closed without an act,
    follows: Option<Name>,
    /// when this agent first saw that its own was closed,
    closed: Option<(Name, Millis)>,
    /// the hook that comes before a restart,
    hook: Option<Hook>,
    /// and that what earlier agents told of that is known.
    resumed: bool,
}

/// The end of an episode.
#[derive(Clone, Debug)]
struct Ended {
    at: Millis,
    /// The policy that had asked for the act. Another's has not waited for anything yet.
    policy: String,
    /// How long the next has to wait, in milliseconds.
    pause: u64,
}

/// An incident that is observed.
#[derive(Debug)]
struct Observing {
    written: Option<Observation>,
    /// When something was said last.
    said: Millis,
    /// The operator's present question, and when it was first seen.
    asked: Option<(String, Millis)>,
    /// The one that was answered last, and the one that is being answered.
    answered: Option<String>,
    answering: Option<String>,
    /// The act that was heard of last, by the time at which it was accepted, and when it was.
    act: Option<(Timestamp, Millis)>,
    attempt: Attempt,
    /// What its subject held when it last held something, and what nobody alive did then.
    held: Option<(u64, u64)>,
}

/// The moment of a sample, and the node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment<'a> {
    /// On the monotonic clock.
    pub(crate) now: Millis,
    /// What that clock says now: a sample may have waited for its turn.
    pub(crate) present: Millis,
    /// When the sample was taken.
    pub(crate) wall: Timestamp,
    /// Name of the node.
    pub(crate) node: &'a str,
    /// The release namespace.
    pub(crate) release_namespace: &'a str,
    /// Whether the plan still binds.
    pub(crate) binds: bool,
    /// The pools.
    pub(crate) pools: &'a Pools,
    /// The guarded pods.
    pub(crate) wards: &'a Wards,
    /// What is parked.
    pub(crate) parks: &'a Parks,
    /// What became of acts that the operator allowed.
    pub(crate) carries: &'a Carries,
    /// What was found of processes that are in no list.
    pub(crate) evidence: &'a Looked,
    /// The host memory of pods.
    pub(crate) hosts: &'a Hosts,
    /// What is thought of pods' growth.
    pub(crate) leaks: &'a Leaks,
}

impl Episodes {
    /// Moves on by a sample of all devices: begins and ends episodes, and says what is to be
    /// written.
    pub(crate) fn step(
        &mut self,
        devices: &[(Device, Rules)],
        world: &World,
        moment: Moment<'_>,
        mut submit: impl FnMut(Job),
    ) {
        let mut wanted = Vec::new();
        if moment.binds {
            for (device, rules) in devices {
                self.reasons(devices, device, rules, world, moment, &mut wanted);
            }
            self.overdue(devices, world, moment, &mut wanted);
        }
        self.ladders.retain(|foot, _| moment.binds && stands(foot, devices, moment.hosts));
        let over: Vec<Reason> =
            self.running.keys().filter(|reason| !wanted.contains(reason)).cloned().collect();
        for reason in over {
            self.end(&reason, moment.now);
        }
        // Before these were listed, nobody knows which episodes have an incident already.
        if world.synced.all() {
            self.open(world, moment, &mut submit);
            self.observe(devices, world, moment, &mut submit);
        }
    }

    /// An incident was, or was not, created.
    pub(crate) fn created(&mut self, key: &Key, act: ActionType, name: Name, written: bool, now: Millis) {
        let of = (key.clone(), act);
        self.creating.remove(&of);
        if let Some(running) = self.running.values_mut().find(|running| running.of() == of) {
            running.attempt.done(written, now);
            running.incident = written.then_some(name);
        }
    }

    /// An observation was, or was not, written.
    pub(crate) fn observed(&mut self, name: &Name, observation: Observation, written: bool, now: Millis) {
        if let Some(observing) = self.observing.get_mut(name) {
            observing.attempt.done(written, now);
            if written {
                observing.written = Some(observation);
                observing.said = now;
                observing.answered = observing.answering.take();
            }
        }
    }

    /// Ends an episode. The next of the same pod waits, the longer the more often that happens.
    fn end(&mut self, reason: &Reason, now: Millis) {
        let Some(running) = self.running.remove(reason).filter(|running| running.incident.is_some()) else {
            return;
        };
        self.ended.retain(|_, ended| now.since(ended.at) < QUIET);
        let (least, most) = PAUSE;
        let of = running.of();
        let policy = running.draft.policy.clone();
        let same = self.ended.get(&of).filter(|ended| ended.policy == policy);
        let pause = same.map_or(least, |ended| ended.pause.saturating_mul(2).min(most));
        self.ended.insert(of, Ended { at: running.fell.unwrap_or(now), policy, pause });
    }

    /// What the agent is to do by itself, since this was asked last.
    pub(crate) fn locals(&mut self) -> Vec<Local> {
        std::mem::take(&mut self.locals)
    }

    /// Collects the reasons that hold on a device, and begins their episodes.
    fn reasons(
        &mut self,
        devices: &[(Device, Rules)],
        device: &Device,
        rules: &Rules,
        world: &World,
        moment: Moment<'_>,
        wanted: &mut Vec<Reason>,
    ) {
        for (at, layer) in rules.layers.iter().enumerate().filter(|(_, layer)| layer.mode != Mode::Observe) {
            let stand = Stand { devices, device, rules, layer: at, mode: layer.mode, world, moment };
            for place in 0..rules.tenants.len() {
                self.breach(stand, place, wanted);
                self.host(stand, place, wanted);
                self.leak(stand, place, wanted);
            }
            for breaker in 0..layer.breakers.len() {
                self.breaker(stand, breaker, wanted);
            }
            self.zombie(stand, wanted);
        }
    }

    /// A pod above its limit.
    fn breach(&mut self, stand: Stand<'_>, place: usize, wanted: &mut Vec<Reason>) {
        let Stand { device, rules, layer, .. } = stand;
        let Some(tenant) = rules.tenants.get(place) else { return };
        let Some(terms) = tenant.terms.get(layer) else { return };
        let (Some(breach), Some(quota)) = (terms.breach().filter(|_| terms.breach.active), &terms.quota)
        else {
            return;
        };
        let explanation = || {
            format!(
                "holds {} of a limit of {} ({})",
                ByteSize(tenant.used.unwrap_or(0)).rounded(),
                ByteSize(quota.limit).rounded(),
                quota.provenance()
            )
        };
        let plain = |action: &Action| matches!(action.type_, ActionType::Signal | ActionType::Restart);
        if !breach.terms.actions.iter().all(plain) {
            // A breach concerns whom the quota concerns.
            let restart = Ok(());
            let concern = Concern { selected: true, restart, state: Standing::default() };
            let need = tenant.used.unwrap_or(0).saturating_sub(quota.limit);
            let (actions, policy) = (&breach.terms.actions, &breach.policy);
            let kind = IncidentKind::QuotaBreach;
            self.climb_pod(
                stand,
                At::Breach,
                kind,
                policy,
                place,
                &concern,
                actions,
                need,
                None,
                &explanation(),
                wanted,
            );
            return;
        }
        let Some(action) = terms.restart_for_breach() else { return };
        let about = About::Pod { at: At::Breach, pod: Arc::clone(&tenant.pod.uid), act: ActionType::Restart };
        let reason = Reason { device: Arc::clone(&device.uuid), mode: stand.mode, about };
        // A pod that is ending already needs no incident to be ended, and a breach that
        // cannot be measured any more begins nothing.
        let begins = !tenant.pod.facts.terminating && tenant.used.is_some_and(|u| u > quota.limit);
        if !begins && !self.running.contains_key(&reason) {
            return;
        }
        wanted.push(reason.clone());
        self.running.entry(reason).or_insert_with(|| {
            let in_place = action.restart.as_ref().is_some_and(|restart| restart.in_place)
                && tenant.pod.facts.restart_in_place;
            let draft = Draft {
                tenant: Some(tenant),
                in_place,
                explanation: explanation(),
                ..Draft::of(stand, action)
            };
            Running::new(draft.begin(IncidentKind::QuotaBreach, &breach.policy, None))
        });
    }

    /// A pod with too much host memory. Of one on several devices, that is told at the first.
    fn host(&mut self, stand: Stand<'_>, place: usize, wanted: &mut Vec<Reason>) {
        let rule = stand.rules.layers.get(stand.layer).and_then(|layer| layer.host_memory.as_ref());
        let Some((rule, tenant)) = rule.zip(stand.rules.tenants.get(place)) else { return };
        let Some(tripped) =
            stand.moment.hosts.tripped(&tenant.pod.kubelet_uid, stand.mode, &stand.device.uuid)
        else {
            return;
        };
        // What pressure has tripped needs acts however much is used.
        let need = highwater_policy::host_memory::need(&rule.value, &tripped.sample).unwrap_or(0).max(1);
        let (actions, policy) = (&rule.value.actions, &rule.policy);
        let held = Held { used: tripped.sample.held, limit: tripped.sample.limit };
        self.climb_pod(
            stand,
            At::Host,
            IncidentKind::HostMemory,
            policy,
            place,
            &tripped.concern,
            actions,
            need,
            Some(held),
            &tripped.why,
            wanted,
        );
    }

    /// Memory that is listed for processes that are gone: of nobody that could be acted on.
    fn zombie(&mut self, stand: Stand<'_>, wanted: &mut Vec<Reason>) {
        let Stand { device, rules, layer, .. } = stand;
        let breaker = rules.layers.get(layer).and_then(|layer| layer.breaker(BreakerScope::Device));
        // What is said of it outlasts the bytes for a while; an episode does not.
        let there = device.zombie.holds && device.ledger.zombie != Some(0);
        let Some(watched) = breaker.filter(|_| there) else { return };
        let reason = Reason { device: Arc::clone(&device.uuid), mode: stand.mode, about: About::Zombie };
        let Some(bytes) = device.ledger.zombie else {
            // What cannot be measured begins nothing, and ends nothing.
            wanted.push(reason);
            return;
        };
        let policy = &watched.rule.policy;
        let other = self.running.get(&reason).is_some_and(|running| {
            let incident = running.incident.as_ref().and_then(|name| stand.world.incidents.get(name));
            !episode::is_same_zombie(&running.draft, policy, signed(bytes))
                || incident.is_some_and(|incident| !running.is_of(incident))
        });
        if other {
            self.end(&reason, stand.moment.now);
        }
        wanted.push(reason.clone());
        self.running.entry(reason).or_insert_with(|| {
            let explanation = format!(
                "{} are in use for processes that are gone: no pod holds them",
                ByteSize(bytes).rounded()
            );
            let action = Action::of(ActionType::Drain);
            let draft = Draft { explanation, frees: Some(bytes), ..Draft::of(stand, &action) };
            Running::new(draft.begin(IncidentKind::ZombieMemory, policy, None))
        });
    }

    /// Parked pods that are to be restarted.
    fn overdue(
        &mut self,
        devices: &[(Device, Rules)],
        world: &World,
        moment: Moment<'_>,
        wanted: &mut Vec<Reason>,
    ) {
        let minutes = |uuid: &str| {
            let (_, rules) = devices.iter().find(|(device, _)| *device.uuid == *uuid)?;
            rules.park_settings().map(|park| park.max_minutes)
        };
        let wall = u64::try_from(moment.wall.as_millisecond()).unwrap_or(0);
        for overdue in moment.parks.overdue(wall, |uuid| minutes(uuid).unwrap_or(MAX_PARKED_MINUTES)) {
            let Some((device, rules)) = devices.iter().find(|(device, _)| device.uuid == overdue.device)
            else {
                continue;
            };
            let Some(layer) = rules.enforced() else { continue };
            let Some(tenant) = rules.tenants.iter().find(|tenant| tenant.pod.kubelet_uid == overdue.pod)
            else {
                continue;
            };
            let Some(watched) = rules.layers.get(layer).and_then(|layer| layer.breakers.first()) else {
                continue;
            };
            let mode = Mode::Enforce;
            let stand = Stand { devices, device, rules, layer, mode, world, moment };
            let about = About::Overdue(Arc::clone(&tenant.pod.uid));
            let reason = Reason { device: Arc::clone(&device.uuid), mode, about };
            wanted.push(reason.clone());
            self.running.entry(reason).or_insert_with(|| {
                let action = Action::of(ActionType::Restart);
                let draft = Draft {
                    tenant: Some(tenant),
                    explanation: overdue.why.clone(),
                    frees: Some(overdue.bytes),
                    ..Draft::of(stand, &action)
                };
                Running::new(draft.begin(IncidentKind::Breaker, &watched.rule.policy, None))
            });
        }
    }

    /// Finds or creates the incident of each episode.
    fn open(&mut self, world: &World, moment: Moment<'_>, submit: &mut impl FnMut(Job)) {
        let is_open = |incident: &&GpuMemoryIncident| !episode::is_closed(incident);
        let is_leak = |kind: IncidentKind| kind == IncidentKind::Leak;
        let mut open = [false, true].map(|leaks| {
            let there = world.incidents.values().filter(|i| is_open(i) && is_leak(i.spec.kind) == leaks);
            there.count() + self.creating.iter().filter(|(key, _)| is_leak(key.kind) == leaks).count()
        });
        // What is due finds a place before what is only suspected.
        let mut running: Vec<&mut Running> = self.running.values_mut().collect();
        let is_due = |leak: &LeakFinding| leak.stage == LeakStage::Act;
        running.sort_by_key(|running| !running.draft.evidence.leak.as_ref().is_some_and(is_due));
        for running in running {
            // Suspicions stand for days: they take no room from what must be acted on now.
            let [others, leaks] = &mut open;
            let (open, most) = if is_leak(running.key.kind) {
                (leaks, episode::MAX_OPEN_LEAKS)
            } else {
                (others, episode::MAX_OPEN)
            };
            // What fell, or is gone, needs nobody to be restarted again.
            if running.fell.is_some()
                || running.vacant.is_some()
                // Of two of one key the second is numbered when the first is there.
                || self.creating.iter().any(|(key, _)| *key == running.key)
                || !running.attempt.ready(moment.now)
            {
                continue;
            }
            // It may have been of an episode that had just ended, or somebody deleted it.
            let incident = running.incident.as_ref().and_then(|name| world.incidents.get(name));
            if incident.is_some_and(|incident| !episode::has_ended(incident) && running.is_of(incident)) {
                continue;
            }
            let act = running.draft.proposed.action;
            let same = world
                .incidents
                .values()
                .filter(|incident| incident.spec.proposed.action == act && running.is_of(incident));
            if let Beginning::Resumed(incident) = episode::begin(&running.key, same)
                && running.follows.as_ref() != Some(&name_of(incident))
            {
                running.incident = Some(name_of(incident));
                continue;
            }
            // Acts of one key are numbered together, since their names are made of key and number.
            let numbers = world.incidents.values().filter(|incident| Key::of(&incident.spec) == running.key);
            let number = numbers.map(|incident| incident.spec.episode).max().unwrap_or(0).saturating_add(1);
            let ended = self.ended.get(&running.of()).filter(|ended| ended.policy == running.draft.policy);
            if *open >= most || ended.is_some_and(|e| moment.now.since(e.at) < e.pause) {
                continue;
            }
            running.incident = None;
            self.creating.insert(running.of());
            *open += 1;
            running.attempt.start();
            let spec = GpuMemoryIncidentSpec { episode: number, ..(*running.draft).clone() };
            let subject = spec.subject.as_ref();
            let name = running.key.incident_name(subject.map(|s| s.name.as_str()), number);
            let namespace = subject.map_or(moment.release_namespace, |s| &s.namespace).to_owned();
            let mut incident = GpuMemoryIncident::new(&name, spec);
            incident.metadata.namespace = Some(namespace);
            // A label holds less than a node's name may have; the field `spec.node` has all of it.
            if moment.node.len() <= 63 {
                incident.labels_mut().insert(names::NODE_LABEL.to_owned(), moment.node.to_owned());
            }
            submit(Job::Create(running.key.clone(), Box::new(incident)));
        }
    }

    /// Writes what is seen of each incident, where somebody waits for it.
    fn observe(
        &mut self,
        devices: &[(Device, Rules)],
        world: &World,
        moment: Moment<'_>,
        submit: &mut impl FnMut(Job),
    ) {
        self.observing.retain(|name, _| world.incidents.contains_key(name));
        for (name, incident) in &world.incidents {
            if episode::is_closed(incident)
                && episode::has_ended(incident)
                && !moment.carries.has_news(incident)
            {
                continue;
            }
            if !self.observing.contains_key(name) {
                self.observing.insert(name.clone(), Observing::of(incident, moment));
            }
            let Some(observing) = self.observing.get_mut(name) else { continue };
            let stored = incident.status.as_ref().and_then(|status| status.observation.as_ref());
            let memory = memory_of_leak(incident, observing.written.as_ref().or(stored), world, moment.leaks);
            let read = (moment.hosts, moment.leaks, moment.now);
            let parks = Some(moment.parks);
            let Some((seen, bytes)) =
                see(&incident.spec, memory, devices, world, parks, read, &mut observing.held)
            else {
                continue;
            };
            let question = observing.question(incident, moment.present);
            observing.hear_of_act(incident, moment.present);
            let last = Last {
                state: observing.written.as_ref().or(stored).map_or(ObservationState::Over, |o| o.state),
                age: moment.now.since(observing.said),
                answers: question.is_none() || question == observing.answered,
            };
            let told = stored.and_then(|observation| observation.act.as_ref());
            let act = moment.carries.report(incident).or(told).cloned();
            let due = episode::observation_due(incident, last, seen);
            // An end is not taken back, whatever becomes of the act.
            let ended = matches!(last.state, ObservationState::Recovered | ObservationState::Gone);
            let news = (act.as_ref() != told).then_some(if ended { last.state } else { seen });
            let told_of_leak = leak::told(incident, observing.written.as_ref().or(stored));
            let leak = leak::present(incident, world, moment.leaks).or(told_of_leak).cloned();
            let grown = leak.as_ref().is_some_and(|now| renewal_due(told_of_leak, now, last.age));
            let grown = grown && !ended && !episode::is_closed(incident);
            let told_of_hook = observing.written.as_ref().or(stored).and_then(|o| o.hook);
            let running = self.running.values().find(|running| running.incident.as_ref() == Some(name));
            let hook = running.map_or(told_of_hook, |running| running.hook.map(|hook| hook.report()));
            let hooked = hook != told_of_hook && !ended && !episode::is_closed(incident);
            let Some(state) = due.or(news).or((grown || hooked).then_some(seen)) else { continue };
            if observing.attempt.ready(moment.now) {
                observing.attempt.start();
                observing.answering = observing.answered_by(moment.now);
                let observation = Observation {
                    state,
                    bytes: bytes.map(signed),
                    at: MicroTime(moment.wall),
                    after_act: observing.acted_before(moment.now).map(MicroTime),
                    leak,
                    hook,
                    act,
                };
                submit(Job::Observe(name.clone(), observation));
            }
        }
    }
}

impl Observing {
    /// An incident that is seen for the first time. What it says is of this machine's clock, which
    /// may have been set meanwhile.
    fn of(incident: &GpuMemoryIncident, moment: Moment<'_>) -> Self {
        let stored = incident.status.as_ref().and_then(|status| status.observation.as_ref());
        let said = stored.map_or(&incident.spec.evidence.at, |observation| &observation.at).0;
        let age = u64::try_from(moment.wall.duration_since(said).as_millis()).unwrap_or(0);
        Self {
            written: None,
            said: Millis(moment.now.0.saturating_sub(age)),
            asked: None,
            answered: None,
            answering: None,
            act: None,
            attempt: Attempt::default(),
            held: None,
        }
    }

    /// What the operator asks at present.
    fn question(&mut self, incident: &GpuMemoryIncident, present: Millis) -> Option<String> {
        let question = episode::question(incident);
        if question.as_ref() != self.asked.as_ref().map(|(text, _)| text) {
            self.asked = question.clone().map(|text| (text, present));
        }
        question
    }

    /// Takes note of the act that was done because of an incident.
    fn hear_of_act(&mut self, incident: &GpuMemoryIncident, present: Millis) {
        let decision = incident.status.as_ref().and_then(|status| status.decision.as_ref());
        let act = decision.and_then(|decision| decision.acted_at.as_ref()).map(|at| at.0);
        if act != self.act.map(|(at, _)| at) {
            self.act = act.map(|at| (at, present));
        }
    }

    /// The act that was known of before a sample taken at `now`.
    fn acted_before(&self, now: Millis) -> Option<Timestamp> {
        self.act.filter(|(_, since)| now >= *since).map(|(at, _)| at)
    }

    /// The question that a sample taken at `now` answers. One that was taken before the question was
    /// there says nothing of what the act has changed, and the operator passes it over.
    fn answered_by(&self, now: Millis) -> Option<String> {
        self.asked.as_ref().filter(|(_, since)| now >= *since).map(|(text, _)| text.clone())
    }
}

impl Running {
    fn new(spec: GpuMemoryIncidentSpec) -> Self {
        Self {
            key: Key::of(&spec),
            draft: Box::new(spec),
            incident: None,
            attempt: Attempt::default(),
            vacant: None,
            fell: None,
            inherited: false,
            follows: None,
            closed: None,
            hook: None,
            resumed: false,
        }
    }

    /// What it is about, and the act.
    fn of(&self) -> (Key, ActionType) {
        (self.key.clone(), self.draft.proposed.action)
    }

    /// Whether an incident of its key may be its own.
    fn is_of(&self, incident: &GpuMemoryIncident) -> bool {
        self.draft.kind != IncidentKind::ZombieMemory || episode::is_of_zombie(incident, &self.draft)
    }

    /// The episode of an incident that an earlier agent opened.
    fn inherited(incident: &GpuMemoryIncident) -> Self {
        Self { incident: Some(name_of(incident)), inherited: true, ..Self::new(incident.spec.clone()) }
    }
}

/// Whether it was decided, for good, that nothing can be done about an incident's subject.
fn is_spent(incident: &GpuMemoryIncident) -> bool {
    let decision = incident.status.as_ref().and_then(|status| status.decision.as_ref());
    !episode::has_ended(incident)
        && decision.is_some_and(|decision| {
            matches!(decision.state, DecisionState::Suppressed | DecisionState::Failed)
                && decision.reason != DRY_RUN
        })
}

/// Whether a pod that was picked for being over its due no longer is.
fn is_back_within(due: Option<i64>, used_then: Option<i64>, used: Option<u64>) -> bool {
    let Some(due) = due else { return false };
    used_then.is_some_and(|then| then > due) && used.is_some_and(|used| signed(used) <= due)
}

/// What is seen now of the reason for an incident, and what its subject holds; of a leak, of the `memory`
/// that it is in. `None` while the device has not been sampled. `held` is what the subject and nobody alive
/// held before.
#[allow(clippy::too_many_lines, reason = "one kind of incident after the other")]
pub(crate) fn see(
    spec: &GpuMemoryIncidentSpec,
    memory: LeakMemory,
    devices: &[(Device, Rules)],
    world: &World,
    parks: Option<&Parks>,
    (hosts, leaks, now): (&Hosts, &Leaks, Millis),
    held: &mut Option<(u64, u64)>,
) -> Option<(ObservationState, Option<u64>)> {
    use ObservationState::{Gone, Over, Recovered, Unknown};
    let Some((device, rules)) = devices.iter().find(|(device, _)| *device.uuid == *spec.device) else {
        // Before the driver was opened nothing is known; afterwards the device is gone.
        return (!devices.is_empty()).then_some((Unknown, None));
    };
    if !device.is_sampled() {
        return None;
    }
    let subject = spec.subject.as_ref();
    let tenant =
        subject.and_then(|subject| rules.tenants.iter().find(|tenant| *tenant.pod.uid == subject.uid));
    let used = match (subject, tenant) {
        (None, _) => None,
        (Some(_), Some(tenant)) => tenant.used,
        // Memory may outlive its pod: a static pod's processes are listed under another UID.
        (Some(subject), None) => {
            let uid = world.pods.values().find(|pod| *pod.uid == subject.uid).map(|pod| &*pod.kubelet_uid);
            device.ledger.used_by(uid.unwrap_or(&subject.uid))
        }
    };
    let at = rules.layers.iter().position(|layer| layer.mode == spec.mode);
    let terms = at.zip(tenant).and_then(|(at, tenant)| tenant.terms.get(at));
    let pod = subject.and_then(|subject| world.pods.values().find(|pod| *pod.uid == subject.uid));
    let parked = parks.zip(pod).and_then(|(parks, pod)| parks.state(&pod.kubelet_uid, &device.uuid));
    let may_be_parked = parks.zip(pod).is_some_and(|(parks, pod)| pod.facts.park && !parks.is_known());
    if may_be_parked && used == Some(0) {
        // Whether it gave its memory up, or has it on the host, only the keeper knows.
        return Some((Unknown, None));
    }
    if let Some(state) = parked {
        // It is not gone, only its memory is.
        use crate::keeper_protocol::ParkState;
        let over = spec.proposed.action != ActionType::Park || state != ParkState::Parked || used != Some(0);
        return Some((if over { Over } else { Recovered }, used));
    }
    if spec.kind == IncidentKind::HostMemory {
        let tripped = tenant.map(|tenant| hosts.is_over(&tenant.pod.kubelet_uid, spec.mode));
        return Some(match tripped {
            Some(Some((over, bytes))) => (if over { Over } else { Recovered }, bytes),
            Some(None) => (Unknown, None),
            None => (Gone, Some(0)),
        });
    }
    if spec.kind == IncidentKind::Leak {
        if let Some(tenant) = tenant {
            let uid = &tenant.pod.kubelet_uid;
            let bytes = match memory {
                LeakMemory::Device => used,
                LeakMemory::Host => leaks.held(uid, spec.mode, &spec.device, memory).used,
            };
            return Some(match leaks.seen(uid, spec.mode, &spec.device, now) {
                Some(Seen::Suspect) => (Over, bytes),
                Some(Seen::Unknown) => (Unknown, bytes),
                Some(Seen::Calm) | None => (Recovered, bytes),
            });
        }
        if memory == LeakMemory::Host {
            // It went with the pod, whatever is left on the device.
            return Some(if pod.is_some() { (Unknown, None) } else { (Gone, Some(0)) });
        }
    }
    if spec.kind == IncidentKind::ZombieMemory {
        let Some(bytes) = device.ledger.zombie else { return Some((Unknown, None)) };
        return Some((if bytes > 0 { Over } else { Recovered }, Some(bytes)));
    }
    if subject.is_some() {
        match used {
            None => return Some((Unknown, None)),
            // The pod is gone, its memory need not be.
            Some(0) if held.is_some_and(|held| is_left_behind(&device.ledger, held)) => {
                return Some((Unknown, Some(0)));
            }
            Some(0) => return Some((Gone, Some(0))),
            Some(used) => *held = Some((used, of_nobody(&device.ledger))),
        }
    }
    let holds = match spec.kind {
        IncidentKind::QuotaBreach => {
            let limit = terms.and_then(|terms| Some(terms.quota.as_ref()?.limit));
            match (tenant, limit.zip(used)) {
                (_, Some((limit, used))) => used > limit,
                (Some(_), None) => false,
                // Of a pod that is no more nobody can say what it may have: what it might have then.
                (None, None) => {
                    spec.evidence.limit_bytes.zip(used).is_none_or(|(limit, used)| signed(used) > limit)
                }
            }
        }
        IncidentKind::Breaker if spec.evidence.level.is_none() => {
            // A parked pod that was to be restarted, and is not parked any more.
            false
        }
        // The pod is gone, and its memory is not.
        IncidentKind::Leak => true,
        IncidentKind::Breaker | IncidentKind::HostMemory | IncidentKind::ZombieMemory => {
            let scope = spec.evidence.scope.unwrap_or(BreakerScope::Device);
            let layer = at.and_then(|at| rules.layers.get(at));
            let place =
                layer.and_then(|layer| layer.breakers.iter().position(|w| w.rule.value.scope == scope));
            let watched = layer.zip(place).and_then(|(layer, place)| layer.breakers.get(place));
            let share: Option<Share> = match scope {
                BreakerScope::Device => device.ledger.level,
                BreakerScope::Pool => watched.and_then(|watched| watched.state.reading.share),
                BreakerScope::Pod => {
                    terms.zip(place).and_then(|(terms, place)| terms.concerns.get(place)?.state.reading.share)
                }
            };
            let mark = watched.and_then(|watched| {
                let level = spec.evidence.level.unwrap_or_default();
                breaker::action(&watched.rule.value, level, spec.proposed.action)
            });
            let early = spec.evidence.early;
            match (mark, share) {
                (None, _) => false,
                (Some(_), None) => return Some((Unknown, used)),
                (Some((_, mark, _)), Some(share)) => {
                    // What was entered early is over with its level.
                    let level = watched.map(|watched| watched.state.state.level).unwrap_or_default();
                    let high = if early && scope != BreakerScope::Pod {
                        level >= spec.evidence.level.unwrap_or_default() || !share.below(mark.clear_percent)
                    } else {
                        !share.below(mark.clear_percent)
                    };
                    high && !is_back_within(spec.evidence.due_bytes, spec.evidence.used_bytes, used)
                }
            }
        }
    };
    Some((if holds { Over } else { Recovered }, used))
}

/// Bytes that nobody alive is known to hold.
fn of_nobody(ledger: &Ledger) -> u64 {
    ledger.zombie.unwrap_or(0).saturating_add(ledger.unusual())
}

/// Whether the memory of a subject that is gone still seems to be in use: what nobody alive holds
/// grew by most of it.
fn is_left_behind(ledger: &Ledger, (used, of_nobody_then): (u64, u64)) -> bool {
    of_nobody(ledger).saturating_sub(of_nobody_then) > used / 2
}

/// What an incident is made of.
struct Draft<'a> {
    device: &'a Device,
    rules: &'a Rules,
    layer: usize,
    tenant: Option<&'a Tenant>,
    action: &'a Action,
    /// What the breaker measures, and where it stands; absent where it is none that asks.
    scope: Option<BreakerScope>,
    standing: Option<&'a Standing>,
    /// What the act should free; absent: what the subject holds, or holds too much.
    frees: Option<u64>,
    in_place: bool,
    alternatives: Vec<String>,
    /// What the subject holds of the host's memory, where that and not the device's is what it is about.
    host: Option<Held>,
    leak: Option<LeakFinding>,
    explanation: String,
    moment: Moment<'a>,
}

impl<'a> Draft<'a> {
    /// An act about nobody yet.
    fn of(stand: Stand<'a>, action: &'a Action) -> Self {
        let Stand { device, rules, layer, moment, .. } = stand;
        Self {
            device,
            rules,
            layer,
            tenant: None,
            action,
            scope: None,
            standing: None,
            frees: None,
            in_place: false,
            alternatives: Vec::new(),
            host: None,
            leak: None,
            explanation: String::new(),
            moment,
        }
    }

    /// The evidence of an episode that begins.
    fn begin(self, kind: IncidentKind, policy: &str, trip_percent: Option<i32>) -> GpuMemoryIncidentSpec {
        warn!(?kind, act = ?self.action.type_, device = self.device.label,
            subject = ?self.tenant.map(|tenant| &tenant.pod.facts.name), explanation = self.explanation,
            "an episode began");
        self.spec(kind, policy, trip_percent)
    }

    fn spec(self, kind: IncidentKind, policy: &str, trip_percent: Option<i32>) -> GpuMemoryIncidentSpec {
        let ledger = &self.device.ledger;
        let layer = self.rules.layers.get(self.layer);
        // What is said of the subject is of the memory that it is about.
        let there = self.tenant.filter(|_| self.host.is_none());
        let quota = there.and_then(|t| t.terms.get(self.layer)?.quota.as_ref());
        let Held { used, limit } = self.host.unwrap_or_else(|| Held {
            used: there.and_then(|tenant| tenant.used),
            limit: quota.map(|quota| quota.limit),
        });
        let uid = self.tenant.map(|tenant| &tenant.pod.kubelet_uid);
        let mut neighbours: Vec<i64> = ledger
            .by_pod
            .iter()
            .filter(|held| Some(&held.pod) != uid)
            .filter_map(|held| held.bytes.map(signed))
            .collect();
        neighbours.sort_unstable_by(|a, b| b.cmp(a));
        neighbours.truncate(NEIGHBOURS);
        let subject = self.tenant.map(|tenant| Subject {
            namespace: tenant.pod.facts.namespace.clone(),
            name: tenant.pod.facts.name.clone(),
            uid: tenant.pod.uid.to_string(),
        });
        let frees = self.frees.or(match kind {
            IncidentKind::QuotaBreach => {
                used.zip(quota).map(|(used, quota)| used.saturating_sub(quota.limit))
            }
            IncidentKind::Breaker
            | IncidentKind::HostMemory
            | IncidentKind::ZombieMemory
            | IncidentKind::Leak => used,
        });
        // A breach and zombie memory tell the level of the device beside.
        let shown = layer.and_then(|layer| layer.breaker(BreakerScope::Device)).map(|watched| &watched.state);
        let told = self.standing.or(shown.filter(|_| kind != IncidentKind::Breaker));
        let share = self.standing.map_or(ledger.level, |standing| standing.reading.share);
        GpuMemoryIncidentSpec {
            kind,
            mode: layer.map(|layer| layer.mode).unwrap_or_default(),
            policy: policy.to_owned(),
            node: self.moment.node.to_owned(),
            device: self.device.uuid.to_string(),
            episode: 0,
            subject,
            evidence: Evidence {
                at: MicroTime(self.moment.wall),
                scope: self.scope.filter(|scope| *scope != BreakerScope::Device),
                level: told.map(|standing| standing.state.level),
                early: self.standing.is_some_and(|standing| standing.state.early),
                level_percent: share.map(Share::percent),
                trip_percent,
                device_total_bytes: ledger.total.map(signed),
                device_free_bytes: ledger.free.map(signed),
                used_bytes: used.map(signed),
                limit_bytes: limit.map(signed),
                due_bytes: quota.map(|quota| signed(quota.due())),
                quota_rule: quota.map(|quota| quota.source.rule.clone()),
                neighbour_bytes: neighbours,
                foreign_bytes: ledger.foreign.map(signed),
                unexplained_bytes: ledger.unexplained,
                strength: there.map(|tenant| tenant.strength.0),
                strength_reason: there.and_then(|tenant| tenant.strength.1),
                overshoot_bytes: there.and_then(|tenant| tenant.overshoot).map(signed),
                charged_bytes: there.and_then(|tenant| tenant.charged).map(signed),
                leak: self.leak,
                explanation: self.explanation.chars().take(1024).collect(),
            },
            proposed: Proposal {
                action: self.action.type_,
                grace_period_seconds: self
                    .action
                    .restart
                    .as_ref()
                    .and_then(|restart| restart.grace_period_seconds),
                in_place: self.in_place,
                frees_bytes: frees.map(signed),
                alternatives: self.alternatives,
            },
        }
    }
}

/// Whether there is still something for a ladder to stand at. Its rules are looked up anew at each sample, so
/// this is about levels.
fn stands(foot: &Foot, devices: &[(Device, Rules)], hosts: &Hosts) -> bool {
    let Some((_, rules)) = devices.iter().find(|(device, _)| device.uuid == foot.device) else {
        return false;
    };
    let Some(at) = rules.layers.iter().position(|layer| layer.mode == foot.mode) else { return false };
    let tenant = || {
        let tenant = rules.tenants.iter().find(|tenant| Some(&tenant.pod.uid) == foot.pod.as_ref());
        tenant.and_then(|tenant| tenant.terms.get(at))
    };
    match foot.at {
        At::Breaker(scope) => {
            let breakers = rules.layers.get(at).map(|layer| &layer.breakers);
            let place =
                breakers.and_then(|all| all.iter().position(|watched| watched.rule.value.scope == scope));
            let standing = match (place, &foot.pod) {
                (None, _) => None,
                (Some(place), Some(_)) => {
                    tenant().and_then(|terms| terms.concerns.get(place)).map(|c| &c.state)
                }
                (Some(place), None) => breakers.and_then(|all| all.get(place)).map(|watched| &watched.state),
            };
            standing.is_some_and(|standing| standing.state.level > highwater_crds::Level::Normal)
        }
        At::Breach => tenant().is_some_and(|terms| terms.breach.active),
        At::Host => {
            let tenant = rules.tenants.iter().find(|tenant| Some(&tenant.pod.uid) == foot.pod.as_ref());
            tenant.is_some_and(|tenant| {
                hosts.tripped(&tenant.pod.kubelet_uid, foot.mode, &foot.device).is_some()
            })
        }
        // What is done because of a leak is noted with its episode.
        At::Leak => false,
    }
}

/// Why nobody is acted on.
fn tell_noculprit(scope: BreakerScope) -> String {
    match scope {
        BreakerScope::Device => "no pod on the device is over its due",
        BreakerScope::Pool => "no pod in the device's pool is over its due",
        BreakerScope::Pod => "the pod may not be restarted",
    }
    .to_owned()
}

/// Namespace and name of an incident.
pub(crate) fn name_of(incident: &GpuMemoryIncident) -> Name {
    (incident.namespace().unwrap_or_default(), incident.name_any())
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}
