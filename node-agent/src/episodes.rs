//! Episodes: which pod is to be restarted for what, and what is seen of it since.
//!
//! An episode runs while its reason holds. It has one incident, which is created once and
//! observed until its end was seen or the operator has closed it. All is derived from the
//! present state at every sample, so whatever could not be written is written later.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use highwater_crds::{
    Action, ActionType, ByteSize, Evidence, GpuMemoryIncident, GpuMemoryIncidentSpec, IncidentKind, Mode,
    Observation, ObservationState, PlanBreaker, Proposal, Strength, Subject, Watermark, names,
};
use highwater_policy::{
    breaker,
    episode::{self, Beginning, Key},
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
/// Neighbours that an incident lists.
const NEIGHBOURS: usize = 16;

/// Namespace and name of an incident.
pub(crate) type Name = (String, String);

/// The episodes of a node.
#[derive(Debug, Default)]
pub(crate) struct Episodes {
    running: BTreeMap<Reason, Running>,
    observing: HashMap<Name, Observing>,
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
}

/// An incident that is observed.
#[derive(Debug, Default)]
struct Observing {
    written: Option<Observation>,
    attempt: Attempt,
}

/// The moment of a sample, and the node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment<'a> {
    /// On the monotonic clock.
    pub(crate) now: Millis,
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
                self.reasons(device, rules, moment, &mut wanted);
            }
        }
        self.running.retain(|reason, _| wanted.contains(reason));
        // Before these were listed, nobody knows which episodes have an incident already.
        if world.synced.all() {
            self.open(world, moment, &mut submit);
            self.observe(devices, world, moment, &mut submit);
        }
    }

    /// An incident was, or was not, created.
    pub(crate) fn created(&mut self, key: &Key, name: Name, written: bool, now: Millis) {
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
            }
        }
    }

    /// Collects the reasons that hold on a device, and begins their episodes.
    fn reasons(&mut self, device: &Device, rules: &Rules, moment: Moment<'_>, wanted: &mut Vec<Reason>) {
        for (at, layer) in rules.layers.iter().enumerate().filter(|(_, layer)| layer.mode != Mode::Observe) {
            let reason = |breach| Reason { device: Arc::clone(&device.uuid), mode: layer.mode, breach };
            for tenant in &rules.tenants {
                let Some(terms) = tenant.terms.get(at) else { continue };
                let (Some(action), Some(quota)) = (terms.restart_for_breach(), &terms.quota) else {
                    continue;
                };
                let reason = reason(Some(Arc::clone(&tenant.pod.uid)));
                // A pod that is ending already needs no incident to be ended.
                if tenant.pod.facts.terminating && !self.running.contains_key(&reason) {
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
            let Some((rule, mark, action)) = tripped(layer, device) else { continue };
            let reason = reason(None);
            wanted.push(reason.clone());
            if self
                .running
                .get_mut(&reason)
                .is_some_and(|running| running.stays(device, rules, at, rule, moment.now))
            {
                continue;
            }
            self.running.remove(&reason);
            let (tenant, explanation) = match choose(rules, at, rule) {
                Choice::Leaving(_) => continue,
                Choice::Nobody => (None, "no pod on the device is over its due".to_owned()),
                Choice::Pod(index, why) => (rules.tenants.get(index), why),
            };
            let draft = Draft { device, rules, layer: at, tenant, action, explanation, moment };
            let spec = draft.spec(IncidentKind::Breaker, &rule.policy, Some(mark));
            self.running.insert(reason, Running::new(spec));
        }
    }

    /// Finds or creates the incident of each episode.
    fn open(&mut self, world: &World, moment: Moment<'_>, submit: &mut impl FnMut(Job)) {
        let mut open = world.incidents.values().filter(|incident| !episode::is_closed(incident)).count();
        for running in self.running.values_mut() {
            if running.incident.is_some() || !running.attempt.ready(moment.now) {
                continue;
            }
            let number = match episode::begin(&running.key, world.incidents.values()) {
                Beginning::Resumed(incident) => {
                    running.incident = Some(name_of(incident));
                    continue;
                }
                Beginning::New(number) => number,
            };
            if open >= episode::MAX_OPEN {
                continue;
            }
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
            let Some((seen, bytes)) = see(&incident.spec, devices, world) else { continue };
            if !self.observing.contains_key(name) {
                self.observing.insert(name.clone(), Observing::default());
            }
            let Some(observing) = self.observing.get_mut(name) else { continue };
            let stored = incident.status.as_ref().and_then(|status| status.observation.as_ref());
            let last = [observing.written.as_ref(), stored].into_iter().flatten().max_by_key(|o| o.at.0);
            let Some(state) = episode::observation_due(incident, last, seen, moment.wall) else { continue };
            if observing.attempt.ready(moment.now) {
                observing.attempt.start();
                let observation = Observation { state, bytes: bytes.map(signed), at: MicroTime(moment.wall) };
                submit(Job::Observe(name.clone(), observation));
            }
        }
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
        }
    }

    /// Whether a breaker's episode goes on with its subject: as long as that holds too much, and
    /// for a while after it is gone, since the device needs a moment to show it.
    fn stays(
        &mut self,
        device: &Device,
        rules: &Rules,
        layer: usize,
        rule: &PlanBreaker,
        now: Millis,
    ) -> bool {
        let Some(subject) = &self.draft.subject else {
            return !matches!(choose(rules, layer, rule), Choice::Pod(..));
        };
        let tenant = rules.tenants.iter().find(|tenant| *tenant.pod.uid == subject.uid);
        let used = match tenant {
            Some(tenant) => tenant.used,
            None => device.ledger.used_by(&subject.uid),
        };
        if used == Some(0) {
            let vacant = *self.vacant.get_or_insert(now);
            let stay = u64::try_from(rule.value.minimum_stay_milliseconds).unwrap_or(0);
            return now.since(vacant) < stay.max(SETTLE);
        }
        self.vacant = None;
        !is_back_within(self.draft.evidence.due_bytes, self.draft.evidence.used_bytes, used)
    }
}

/// The mark that asks for Restart and that use has not fallen back from.
fn tripped<'a>(layer: &'a Layer, device: &Device) -> Option<(&'a PlanBreaker, &'a Watermark, &'a Action)> {
    let rule = layer.breaker.as_ref()?;
    let (_, mark, action) = breaker::action(&rule.value, layer.state.level, ActionType::Restart)?;
    let share = device.ledger.level?;
    (!share.below(mark.clear_percent)).then_some((rule, mark, action))
}

fn choose(rules: &Rules, layer: usize, rule: &PlanBreaker) -> Choice {
    let candidates: Vec<Candidate<'_>> = rules
        .tenants
        .iter()
        .filter_map(|tenant| {
            let terms = tenant.terms.get(layer)?;
            Some(Candidate {
                pod: &tenant.pod.facts,
                used: tenant.used,
                due: terms.quota.as_ref().map(EffectiveQuota::due),
                acceptable: terms.acceptable,
            })
        })
        .collect();
    victim::choose(&candidates, rule.value.when_nobody_is_over)
}

/// Whether a pod that was picked for being over its due no longer is.
fn is_back_within(due: Option<i64>, used_then: Option<i64>, used: Option<u64>) -> bool {
    let Some(due) = due else { return false };
    used_then.is_some_and(|then| then > due) && used.is_some_and(|used| signed(used) <= due)
}

/// What is seen now of the reason for an incident, and what its subject holds. `None` while the
/// device has not been sampled.
fn see(
    spec: &GpuMemoryIncidentSpec,
    devices: &[(Device, Rules)],
    world: &World,
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
            Some(0) => return Some((Gone, Some(0))),
            Some(_) => {}
        }
    }
    let at = rules.layers.iter().position(|layer| layer.mode == spec.mode);
    let holds = match spec.kind {
        IncidentKind::QuotaBreach => {
            let terms = at.zip(tenant).and_then(|(at, tenant)| tenant.terms.get(at));
            let limit = terms.and_then(|terms| Some(terms.quota.as_ref()?.limit));
            limit.zip(used).is_some_and(|(limit, used)| used > limit)
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
                strength: self.tenant.map(|_| Strength::Observe),
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
