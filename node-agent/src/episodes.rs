//! Episodes: which pod is to be restarted for what, and what is seen of it since.
//!
//! An episode runs while its reason holds. It has one incident, which is created once and
//! observed until its end was seen or the operator has closed it. All is derived from the
//! present state at every sample, so whatever could not be written is written later.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
};

use highwater_crds::{
    Action, ActionType, ByteSize, DecisionState, Evidence, GpuMemoryIncident, GpuMemoryIncidentSpec,
    IncidentKind, Mode, Observation, ObservationState, PlanBreaker, Proposal, Subject, Watermark, names,
};
use highwater_policy::{
    breaker,
    episode::{self, Beginning, Key, Last},
    ledger::Ledger,
    quota::EffectiveQuota,
    time::Millis,
    victim::{self, Candidate, Choice},
};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::ResourceExt;
use tracing::warn;

use crate::{
    account::Device,
    decide::{Layer, Rules, Tenant},
    publish::{Attempt, Job},
    world::World,
};

/// After a restarted pod is gone, the least time in milliseconds before another is picked.
const SETTLE: u64 = 2_000;
/// After an episode of a pod ended, the least time in milliseconds before the next is opened:
/// doubled each time, up to the second.
const PAUSE: (u64, u64) = (1_000, 300_000);
/// After so long without an end, in milliseconds, the pause is the least again.
const QUIET: u64 = 600_000;
/// Reason of a decision about a rehearsal: it says nothing against the pod.
const DRY_RUN: &str = "DryRun";
/// Neighbours that an incident lists.
const NEIGHBOURS: usize = 16;

/// Namespace and name of an incident.
pub(crate) type Name = (String, String);

/// The episodes of a node.
#[derive(Debug, Default)]
pub(crate) struct Episodes {
    running: BTreeMap<Reason, Running>,
    observing: HashMap<Name, Observing>,
    /// Whose incidents are being created.
    creating: HashSet<Key>,
    /// The ends of those whose next episode may have to wait.
    ended: HashMap<Key, Ended>,
}

/// Why somebody is to be restarted.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Reason {
    device: Arc<str>,
    mode: Mode,
    /// UID of the pod that is in breach of its quota; `None` for the device's breaker.
    breach: Option<Arc<str>>,
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
}

/// The end of an episode.
#[derive(Clone, Copy, Debug)]
struct Ended {
    at: Millis,
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
                self.reasons(device, rules, world, moment, &mut wanted);
            }
        }
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
    pub(crate) fn created(&mut self, key: &Key, name: Name, written: bool, now: Millis) {
        self.creating.remove(key);
        if let Some(running) = self.running.values_mut().find(|running| running.key == *key) {
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
        let Some(Running { key, incident: Some(_), fell, .. }) = self.running.remove(reason) else { return };
        self.ended.retain(|_, ended| now.since(ended.at) < QUIET);
        let (least, most) = PAUSE;
        let pause = self.ended.get(&key).map_or(least, |last| last.pause.saturating_mul(2).min(most));
        self.ended.insert(key, Ended { at: fell.unwrap_or(now), pause });
    }

    /// Collects the reasons that hold on a device, and begins their episodes.
    fn reasons(
        &mut self,
        device: &Device,
        rules: &Rules,
        world: &World,
        moment: Moment<'_>,
        wanted: &mut Vec<Reason>,
    ) {
        for (at, layer) in rules.layers.iter().enumerate().filter(|(_, layer)| layer.mode != Mode::Observe) {
            let reason = |breach| Reason { device: Arc::clone(&device.uuid), mode: layer.mode, breach };
            for tenant in &rules.tenants {
                let Some(terms) = tenant.terms.get(at) else { continue };
                let (Some(action), Some(quota)) = (terms.restart_for_breach(), &terms.quota) else {
                    continue;
                };
                let reason = reason(Some(Arc::clone(&tenant.pod.uid)));
                // A pod that is ending already needs no incident to be ended, and a breach that
                // cannot be measured any more begins nothing.
                let begins = !tenant.pod.facts.terminating && tenant.used.is_some_and(|u| u > quota.limit);
                if !begins && !self.running.contains_key(&reason) {
                    continue;
                }
                wanted.push(reason.clone());
                self.running.entry(reason).or_insert_with(|| {
                    let explanation = format!(
                        "holds {} of a limit of {} ({})",
                        ByteSize(tenant.used.unwrap_or(0)).rounded(),
                        ByteSize(quota.limit).rounded(),
                        quota.provenance()
                    );
                    let policy = terms.breach().map_or("", |breach| &breach.policy);
                    let draft =
                        Draft { device, rules, layer: at, tenant: Some(tenant), action, explanation, moment };
                    Running::new(draft.spec(IncidentKind::QuotaBreach, policy, None))
                });
            }
            let Some((rule, mark, action)) = tripped(layer) else { continue };
            let reason = reason(None);
            wanted.push(reason.clone());
            // Which episode it is, and whose, depends on the incidents that are there.
            if !world.synced.all() || !self.picks(&reason, device, mark, moment.now) {
                continue;
            }
            if !self.running.contains_key(&reason)
                && let Some(incident) = inherited(device, layer.mode, world)
            {
                self.running.insert(reason.clone(), Running::inherited(incident));
            }
            if self
                .running
                .get_mut(&reason)
                .is_some_and(|running| running.stays(device, rules, at, rule, world, moment))
            {
                continue;
            }
            self.end(&reason, moment.now);
            let (tenant, explanation) = match choose(device, rules, at, rule, world, moment.wall) {
                Choice::Leaving(_) => continue,
                Choice::Nobody => (None, "no pod on the device is over its due".to_owned()),
                Choice::Pod(index, why) => (rules.tenants.get(index), why),
            };
            let draft = Draft { device, rules, layer: at, tenant, action, explanation, moment };
            let spec = draft.spec(IncidentKind::Breaker, &rule.policy, Some(mark));
            self.running.insert(reason, Running::new(spec));
        }
    }

    /// Whether use stands so high that a breaker may pick somebody. Once it fell below the clear
    /// mark that is over, until it reaches the trip mark again or the level ends.
    fn picks(&mut self, reason: &Reason, device: &Device, mark: &Watermark, now: Millis) -> bool {
        let Some(share) = device.ledger.level else { return false };
        let below = share.below(mark.clear_percent);
        if let Some(running) = self.running.get_mut(reason) {
            if below {
                running.fell = running.fell.or(Some(now));
            }
            return !below && (running.fell.is_none() || share.at_least(mark.trip_percent));
        }
        !below
    }

    /// Finds or creates the incident of each episode.
    fn open(&mut self, world: &World, moment: Moment<'_>, submit: &mut impl FnMut(Job)) {
        let is_open = |incident: &&GpuMemoryIncident| !episode::is_closed(incident);
        let mut open = world.incidents.values().filter(is_open).count() + self.creating.len();
        for running in self.running.values_mut() {
            // What fell, or is gone, needs nobody to be restarted again.
            if running.fell.is_some()
                || running.vacant.is_some()
                || self.creating.contains(&running.key)
                || !running.attempt.ready(moment.now)
            {
                continue;
            }
            // It may have been of an episode that had just ended, or somebody deleted it.
            let incident = running.incident.as_ref().and_then(|name| world.incidents.get(name));
            if incident.is_some_and(|incident| !episode::has_ended(incident)) {
                continue;
            }
            let number = match episode::begin(&running.key, world.incidents.values()) {
                Beginning::Resumed(incident) => {
                    running.incident = Some(name_of(incident));
                    continue;
                }
                Beginning::New(number) => number,
            };
            let ended = self.ended.get(&running.key);
            if open >= episode::MAX_OPEN || ended.is_some_and(|e| moment.now.since(e.at) < e.pause) {
                continue;
            }
            running.incident = None;
            self.creating.insert(running.key.clone());
            open += 1;
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
            if episode::is_closed(incident) && episode::has_ended(incident) {
                continue;
            }
            if !self.observing.contains_key(name) {
                self.observing.insert(name.clone(), Observing::of(incident, moment));
            }
            let Some(observing) = self.observing.get_mut(name) else { continue };
            let Some((seen, bytes)) = see(&incident.spec, devices, world, &mut observing.held) else {
                continue;
            };
            let stored = incident.status.as_ref().and_then(|status| status.observation.as_ref());
            let question = observing.question(incident, moment.present);
            let last = Last {
                state: observing.written.as_ref().or(stored).map_or(ObservationState::Over, |o| o.state),
                age: moment.now.since(observing.said),
                answers: question.is_none() || question == observing.answered,
            };
            let Some(state) = episode::observation_due(incident, last, seen) else { continue };
            if observing.attempt.ready(moment.now) {
                observing.attempt.start();
                observing.answering = observing.answered_by(moment.now);
                let observation = Observation { state, bytes: bytes.map(signed), at: MicroTime(moment.wall) };
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
        }
    }

    /// The episode of an incident that an earlier agent opened.
    fn inherited(incident: &GpuMemoryIncident) -> Self {
        Self { incident: Some(name_of(incident)), inherited: true, ..Self::new(incident.spec.clone()) }
    }

    /// Whether a breaker's episode goes on with its subject: as long as that holds too much, and
    /// for a while after it is gone, since the device needs a moment to show it. Where nothing is
    /// done about that subject, another goes first that something can be done about.
    fn stays(
        &mut self,
        device: &Device,
        rules: &Rules,
        layer: usize,
        rule: &PlanBreaker,
        world: &World,
        moment: Moment<'_>,
    ) -> bool {
        let incident = self.incident.as_ref().and_then(|name| world.incidents.get(name));
        if self.fell.is_some() || (self.inherited && incident.is_none_or(episode::has_ended)) {
            return false;
        }
        let Some(subject) = &self.draft.subject else {
            return !matches!(choose(device, rules, layer, rule, world, moment.wall), Choice::Pod(..));
        };
        if incident.is_some_and(is_spent)
            && let Choice::Pod(index, _) = choose(device, rules, layer, rule, world, moment.wall)
            && let Some(other) = rules.tenants.get(index).filter(|other| *other.pod.uid != subject.uid)
            && other.terms.get(layer).is_some_and(|terms| terms.acceptable)
        {
            return false;
        }
        let tenant = rules.tenants.iter().find(|tenant| *tenant.pod.uid == subject.uid);
        let used = match tenant {
            Some(tenant) => tenant.used,
            None => device.ledger.used_by(&subject.uid),
        };
        if used == Some(0) {
            let vacant = *self.vacant.get_or_insert(moment.now);
            let stay = u64::try_from(rule.value.minimum_stay_milliseconds).unwrap_or(0);
            return moment.now.since(vacant) < stay.max(SETTLE);
        }
        self.vacant = None;
        !is_back_within(self.draft.evidence.due_bytes, self.draft.evidence.used_bytes, used)
    }
}

/// The mark that asks for Restart at the present level.
fn tripped(layer: &Layer) -> Option<(&PlanBreaker, &Watermark, &Action)> {
    let rule = layer.breaker.as_ref()?;
    let (_, mark, action) = breaker::action(&rule.value, layer.state.level, ActionType::Restart)?;
    Some((rule, mark, action))
}

/// The incident of a breaker's episode that an earlier agent opened and that nobody has decided.
fn inherited<'a>(device: &Device, mode: Mode, world: &'a World) -> Option<&'a GpuMemoryIncident> {
    world.incidents.values().find(|incident| {
        let spec = &incident.spec;
        spec.kind == IncidentKind::Breaker
            && spec.mode == mode
            && *spec.device == *device.uuid
            && !episode::is_closed(incident)
            && !episode::has_ended(incident)
    })
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

fn choose(
    device: &Device,
    rules: &Rules,
    layer: usize,
    rule: &PlanBreaker,
    world: &World,
    wall: Timestamp,
) -> Choice {
    let mode = rules.layers.get(layer).map(|layer| layer.mode);
    let spent = |uid: &str| {
        world.incidents.values().filter(|incident| is_spent(incident)).any(|incident| {
            let spec = &incident.spec;
            spec.kind == IncidentKind::Breaker
                && Some(spec.mode) == mode
                && *spec.device == *device.uuid
                && spec.subject.as_ref().is_some_and(|subject| subject.uid == uid)
        })
    };
    let candidates: Vec<Candidate<'_>> = rules
        .tenants
        .iter()
        .filter_map(|tenant| {
            let terms = tenant.terms.get(layer)?;
            Some(Candidate {
                pod: &tenant.pod.facts,
                used: tenant.used,
                due: terms.quota.as_ref().map(EffectiveQuota::due),
                acceptable: terms.acceptable && !spent(&tenant.pod.uid),
            })
        })
        .collect();
    victim::choose(&candidates, rule.value.when_nobody_is_over, wall)
}

/// Whether a pod that was picked for being over its due no longer is.
fn is_back_within(due: Option<i64>, used_then: Option<i64>, used: Option<u64>) -> bool {
    let Some(due) = due else { return false };
    used_then.is_some_and(|then| then > due) && used.is_some_and(|used| signed(used) <= due)
}

/// What is seen now of the reason for an incident, and what its subject holds. `None` while the
/// device has not been sampled. `held` is what the subject and nobody alive held before.
fn see(
    spec: &GpuMemoryIncidentSpec,
    devices: &[(Device, Rules)],
    world: &World,
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
    let at = rules.layers.iter().position(|layer| layer.mode == spec.mode);
    let holds = match spec.kind {
        IncidentKind::QuotaBreach => {
            let terms = at.zip(tenant).and_then(|(at, tenant)| tenant.terms.get(at));
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
        IncidentKind::Breaker => {
            let Some(share) = device.ledger.level else { return Some((Unknown, used)) };
            let rule = at.and_then(|at| rules.layers.get(at)).and_then(|layer| layer.breaker.as_ref());
            let mark = rule.and_then(|rule| {
                breaker::action(&rule.value, spec.evidence.level.unwrap_or_default(), ActionType::Restart)
            });
            mark.is_some_and(|(_, mark, _)| !share.below(mark.clear_percent))
                && !is_back_within(spec.evidence.due_bytes, spec.evidence.used_bytes, used)
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
    explanation: String,
    moment: Moment<'a>,
}

impl Draft<'_> {
    fn spec(self, kind: IncidentKind, policy: &str, mark: Option<&Watermark>) -> GpuMemoryIncidentSpec {
        let ledger = &self.device.ledger;
        let layer = self.rules.layers.get(self.layer);
        let quota = self.tenant.and_then(|t| t.terms.get(self.layer)?.quota.as_ref());
        let used = self.tenant.and_then(|tenant| tenant.used);
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
        let frees = match kind {
            IncidentKind::QuotaBreach => {
                used.zip(quota).map(|(used, quota)| used.saturating_sub(quota.limit))
            }
            IncidentKind::Breaker => used,
        };
        warn!(?kind, device = self.device.label, subject = ?subject.as_ref().map(|s| &s.name), explanation = self.explanation,
            "an episode began");
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
                level: layer.filter(|layer| layer.breaker.is_some()).map(|layer| layer.state.level),
                level_percent: ledger.level.map(highwater_policy::ledger::Share::percent),
                trip_percent: mark.map(|mark| mark.trip_percent),
                device_total_bytes: ledger.total.map(signed),
                device_free_bytes: ledger.free.map(signed),
                used_bytes: used.map(signed),
                limit_bytes: quota.map(|quota| signed(quota.limit)),
                due_bytes: quota.map(|quota| signed(quota.due())),
                quota_rule: quota.map(|quota| quota.source.rule.clone()),
                neighbour_bytes: neighbours,
                foreign_bytes: ledger.foreign.map(signed),
                unexplained_bytes: ledger.unexplained,
                strength: self.tenant.map(|tenant| tenant.strength.0),
                strength_reason: self.tenant.and_then(|tenant| tenant.strength.1),
                overshoot_bytes: self.tenant.and_then(|tenant| tenant.overshoot).map(signed),
                charged_bytes: self.tenant.and_then(|tenant| tenant.charged).map(signed),
                explanation: self.explanation.chars().take(1024).collect(),
            },
            proposed: Proposal {
                action: ActionType::Restart,
                grace_period_seconds: self
                    .action
                    .restart
                    .as_ref()
                    .and_then(|restart| restart.grace_period_seconds),
                frees_bytes: frees.map(signed),
            },
        }
    }
}

/// Namespace and name of an incident.
pub(crate) fn name_of(incident: &GpuMemoryIncident) -> Name {
    (incident.namespace().unwrap_or_default(), incident.name_any())
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}
