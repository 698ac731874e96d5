//! Acts that the operator allowed and this agent carries out: `Unready`, `Park`, and a restart in place.
//!
//! Each is told to have begun before it begins, and begins only once that is written: whatever happens to
//! this agent, the next one knows. What lasts is taken back when its reason is over, when the operator has
//! ended it otherwise, and when nobody tells any more. An act is never begun twice.

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
    time::Duration,
};

use highwater_crds::{
    ActReport, ActState, ActionType, ByteSize, DecisionState, GpuMemoryIncident, Level, Mode,
    ObservationState,
};
use highwater_policy::{episode, time::Millis};
use tracing::{info, warn};

use super::{
    Acts,
    parks::{Parks, Subject, Undone},
    record::Record,
    restart,
};
use crate::{
    account::Device,
    decide::{Rules, Tenant},
    episodes::{memory_of_leak, see},
    evidence::Evidence,
    hosts::Hosts,
    keeper_protocol::ParkState,
    leaks::Leaks,
    link,
    publish::Notice,
    world::{Pod, World},
};

/// How long a pressure file may not be writable before the act is given up, in milliseconds.
const WRITTEN_WITHIN: u64 = 30_000;
/// The grace period of a restart in place where neither policy nor pod gives one.
const GRACE: Duration = Duration::from_secs(30);

/// The acts that are carried out, by the UID of their incident.
#[derive(Debug)]
pub(crate) struct Carries {
    running: BTreeMap<Arc<str>, Carry>,
    record: Record,
    /// How many came to what.
    pub(crate) counts: BTreeMap<(ActionType, ActState), u64>,
}

#[derive(Debug)]
struct Carry {
    act: ActionType,
    pod: Arc<Pod>,
    device: Arc<str>,
    /// How long its processes may take to end.
    grace: Duration,
    stage: Stage,
    report: Option<ActReport>,
}

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// It is being told that it begins.
    Announced,
    /// The pod is to be unready, since then.
    Holding(Millis),
    /// The pod is to be ready again.
    Releasing,
    /// The keeper was asked.
    Parking,
    /// The pod's memory is on the host.
    Parked,
    /// Its processes are being looked for.
    Finding,
    /// They are being ended.
    Ending,
    /// Nothing more is done.
    Over,
}

/// What is known when acts are carried on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Around<'a> {
    /// The devices.
    pub(crate) devices: &'a [(Device, Rules)],
    /// What the API server says.
    pub(crate) world: &'a World,
    /// The host memory of pods.
    pub(crate) hosts: &'a Hosts,
    /// What is thought of pods' growth.
    pub(crate) leaks: &'a Leaks,
    /// What was found of processes that are in no list.
    pub(crate) evidence: &'a Evidence,
    /// The release namespace.
    pub(crate) release_namespace: &'a str,
    /// Whether a plan binds.
    pub(crate) binds: bool,
    /// Now.
    pub(crate) now: Millis,
}

/// An act that is carried on: of which incident, what is known, and what it may change.
struct Case<'a> {
    uid: &'a Arc<str>,
    incident: &'a GpuMemoryIncident,
    around: Around<'a>,
    acts: &'a mut Acts,
    parks: &'a mut Parks,
    effects: &'a mut Vec<Effect>,
}

/// What is to be done elsewhere.
#[derive(Debug)]
pub(crate) enum Effect {
    /// By the keeper.
    Keeper(link::Order),
    /// About processes.
    Restart(restart::Order),
    /// An Event.
    Tell(Notice),
}

impl Carries {
    /// Nothing is known yet but what an earlier agent wrote down.
    pub(crate) fn new(record: Record) -> Self {
        Self { running: BTreeMap::new(), record, counts: BTreeMap::new() }
    }

    /// What is to be told of the act of an incident.
    pub(crate) fn report(&self, incident: &GpuMemoryIncident) -> Option<&ActReport> {
        self.running.get(incident.metadata.uid.as_deref()?)?.report.as_ref()
    }

    /// Whether what is to be told of it is not stored.
    pub(crate) fn has_news(&self, incident: &GpuMemoryIncident) -> bool {
        self.report(incident).is_some_and(|report| Some(report) != stored(incident))
    }

    /// Carries every act on. Returns what is to be done elsewhere.
    pub(crate) fn step(&mut self, around: Around<'_>, acts: &mut Acts, parks: &mut Parks) -> Vec<Effect> {
        let mut effects = Vec::new();
        // Before they were listed, nobody knows which incidents are no more.
        if !around.world.synced.incidents || !around.world.synced.pods {
            return effects;
        }
        let mut there: HashSet<&str> = HashSet::new();
        for incident in around.world.incidents.values() {
            let Some(uid) = incident.metadata.uid.as_deref() else { continue };
            there.insert(uid);
            if is_carried_here(incident) {
                let uid = &uid.into();
                self.carry(&mut Case { uid, incident, around, acts, parks, effects: &mut effects });
            }
        }
        // Somebody deleted it: what lasts is taken back all the same.
        self.running.retain(|uid, carry| {
            let stays = there.contains(&**uid);
            if !stays && carry.act == ActionType::Unready {
                acts.set_unready(&carry.pod.kubelet_uid, false);
            }
            stays
        });
        self.record.retain(|uid| there.contains(uid));
        effects
    }

    fn carry(&mut self, case: &mut Case<'_>) {
        let (uid, incident) = (case.uid, case.incident);
        if !self.running.contains_key(uid) {
            let Some(carry) = self.begin(case) else { return };
            self.running.insert(Arc::clone(uid), carry);
        }
        let Some(carry) = self.running.get_mut(uid) else { return };
        let before = carry.report.clone();
        let is_told = carry.report.as_ref() == stored(incident);
        match carry.stage {
            Stage::Announced if is_told => carry.start(case),
            Stage::Announced if !may_run(incident) => carry.undo("it was taken back before it was begun"),
            Stage::Holding(since) => carry.hold(since, case),
            Stage::Releasing if !case.acts.is_unready(&carry.pod.kubelet_uid) => {
                carry.undo("the pod is ready again");
            }
            Stage::Parking => carry.park(case.parks),
            Stage::Parked
                if case.parks.is_known()
                    && case.parks.state(&carry.pod.kubelet_uid, &carry.device).is_none() =>
            {
                carry.undo("its memory is back on the device");
            }
            Stage::Announced
            | Stage::Releasing
            | Stage::Parked
            | Stage::Finding
            | Stage::Ending
            | Stage::Over => {}
        }
        self.tell(uid, before.as_ref(), case.effects);
    }

    /// Tells people, and counts, what changed of an act.
    fn tell(&mut self, uid: &Arc<str>, before: Option<&ActReport>, effects: &mut Vec<Effect>) {
        let Some(carry) = self.running.get(uid) else { return };
        let Some(report) = carry.report.as_ref().filter(|report| Some(*report) != before) else { return };
        *self.counts.entry((carry.act, report.state)).or_default() += 1;
        effects.push(Effect::Tell(notice(&carry.pod, carry.act, report)));
    }

    /// Whether an act is carried out here, and from where on.
    fn begin(&mut self, case: &mut Case<'_>) -> Option<Carry> {
        let (uid, incident, around) = (case.uid, case.incident, case.around);
        let spec = &incident.spec;
        let act = spec.proposed.action;
        let subject = spec.subject.as_ref()?;
        let pod = around.world.pods.values().find(|pod| *pod.uid == subject.uid)?;
        let device: Arc<str> = spec.device.as_str().into();
        let told = stored(incident);
        let carry = |stage, report| Carry {
            act,
            pod: Arc::clone(pod),
            device: Arc::clone(&device),
            grace: grace(incident),
            stage,
            report,
        };
        match told.map(|report| report.state) {
            None if decision(incident) == Some(DecisionState::Approved) => {
                if around.world.paused(&pod.facts, around.release_namespace) || !around.binds {
                    return None;
                }
                let report = match may_begin(incident, pod, around, case.parks) {
                    Ok(what) => report(ActState::Begun, what),
                    Err(why) => report(ActState::Refused, why),
                };
                info!(pod = pod.facts.name, namespace = pod.facts.namespace, ?act, state = ?report.state, message = report.message, "an act that was allowed");
                let stage = if report.state == ActState::Begun { Stage::Announced } else { Stage::Over };
                let refused = stage == Stage::Over;
                let carry = carry(stage, Some(report.clone()));
                if refused {
                    *self.counts.entry((act, ActState::Refused)).or_default() += 1;
                    case.effects.push(Effect::Tell(notice(pod, act, &report)));
                }
                Some(carry)
            }
            // An earlier agent's.
            Some(ActState::Begun | ActState::Done) => {
                let report = told.cloned();
                let begun = report.as_ref().is_some_and(|report| report.state == ActState::Begun);
                Some(match act {
                    ActionType::Unready if may_run(incident) => carry(Stage::Holding(around.now), report),
                    // Its file is not renewed any more.
                    ActionType::Unready => carry(Stage::Releasing, report),
                    ActionType::Park if !case.parks.is_known() => return None,
                    ActionType::Park if begun => carry(Stage::Parking, report),
                    ActionType::Park => carry(Stage::Parked, report),
                    _ if begun => {
                        if let Some(mains) = self.record.get(uid) {
                            case.effects.push(Effect::Restart(restart::Order::End {
                                incident: Arc::clone(uid),
                                pod: Arc::clone(&pod.kubelet_uid),
                                mains: mains.to_vec(),
                                grace: grace(incident),
                            }));
                            carry(Stage::Ending, report)
                        } else {
                            let why = "an earlier agent had begun it and left no record of which processes it is about";
                            carry(Stage::Over, Some(self::report(ActState::Failed, why)))
                        }
                    }
                    _ => return None,
                })
            }
            _ => None,
        }
    }

    /// What came of something about processes.
    pub(crate) fn restarted(&mut self, outcome: restart::Outcome) -> Vec<Effect> {
        let mut effects = Vec::new();
        let (restart::Outcome::Found { incident: uid, .. } | restart::Outcome::Ended { incident: uid, .. }) =
            &outcome;
        let uid = Arc::clone(uid);
        let Some(carry) = self.running.get_mut(&uid) else { return effects };
        let before = carry.report.clone();
        match (outcome, carry.stage) {
            (restart::Outcome::Found { result: Ok(mains), .. }, Stage::Finding) => {
                match self.record.begin(&uid, mains.clone()) {
                    Ok(()) => {
                        carry.stage = Stage::Ending;
                        effects.push(Effect::Restart(restart::Order::End {
                            incident: Arc::clone(&uid),
                            pod: Arc::clone(&carry.pod.kubelet_uid),
                            mains,
                            grace: carry.grace,
                        }));
                    }
                    Err(error) => {
                        carry.fail(format!("it cannot be written down which processes it is about: {error}"));
                    }
                }
            }
            (restart::Outcome::Ended { result: Ok(killed), .. }, Stage::Ending) => {
                carry.stage = Stage::Over;
                carry.report = Some(report(
                    ActState::Done,
                    format!(
                        "its containers were ended, {killed} of them by SIGKILL; the kubelet starts them anew"
                    ),
                ));
            }
            (restart::Outcome::Found { result: Err(why), .. }, Stage::Finding)
            | (restart::Outcome::Ended { result: Err(why), .. }, Stage::Ending) => carry.fail(why),
            _ => {}
        }
        self.tell(&uid, before.as_ref(), &mut effects);
        effects
    }
}

impl Carry {
    /// It is written that it begins.
    fn start(&mut self, case: &mut Case<'_>) {
        let Case { uid, incident, around, acts, parks, effects } = case;
        // Looked at again just before: the operator may have ended it meanwhile.
        if !may_run(incident) {
            return self.undo("it was taken back before it was begun");
        }
        if around.world.paused(&self.pod.facts, around.release_namespace) {
            return;
        }
        let pod = Arc::clone(&self.pod.kubelet_uid);
        match self.act {
            ActionType::Unready => {
                acts.set_unready(&pod, true);
                self.stage = Stage::Holding(around.now);
            }
            ActionType::Park => match may_park(incident, &self.pod, *around, parks) {
                Ok(bytes) => {
                    let device = Arc::clone(&self.device);
                    match parks.park(&pod, &device, bytes, |order| effects.push(Effect::Keeper(order))) {
                        Ok(()) => self.stage = Stage::Parking,
                        Err(why) => self.fail(why),
                    }
                }
                Err(why) => self.fail(why),
            },
            _ => {
                let containers = containers(&self.pod, &self.device, *around);
                self.stage = Stage::Finding;
                effects.push(Effect::Restart(restart::Order::Find {
                    incident: Arc::clone(uid),
                    pod,
                    containers,
                }));
            }
        }
        info!(pod = self.pod.facts.name, namespace = self.pod.facts.namespace, act = ?self.act, "an act begins");
    }

    /// Keeps the pod unready while its reason lasts.
    fn hold(&mut self, since: Millis, case: &mut Case<'_>) {
        let Case { incident, around, acts, .. } = case;
        let pod = &self.pod.kubelet_uid;
        let told = incident.status.as_ref().and_then(|status| status.observation.as_ref());
        let seen = see(
            &incident.spec,
            memory_of_leak(incident, told, around.world, around.leaks),
            around.devices,
            around.world,
            None,
            (around.hosts, around.leaks, around.now),
            &mut None,
        );
        let over = !matches!(seen, Some((ObservationState::Recovered | ObservationState::Gone, _)));
        let ordered = match decision(incident) {
            Some(DecisionState::Succeeded) | None => true,
            Some(_) => may_run(incident),
        };
        if !over
            || !ordered
            || !around.binds
            || around.world.pods.get(pod).is_none_or(|there| !there.facts.unready)
        {
            acts.set_unready(pod, false);
            self.stage = Stage::Releasing;
            return;
        }
        // After a restart of the agent as well.
        acts.set_unready(pod, true);
        let is_begun = self.report.as_ref().is_some_and(|report| report.state == ActState::Begun);
        if acts.is_unready(pod) && is_begun {
            self.report = Some(report(
                ActState::Done,
                "its pressure file says that it is unready; that is renewed until memory has fallen"
                    .to_owned(),
            ));
        } else if is_begun && around.now.since(since) >= WRITTEN_WITHIN {
            acts.set_unready(pod, false);
            self.fail("its pressure file could not be written".to_owned());
        }
    }

    /// Waits for the keeper.
    fn park(&mut self, parks: &Parks) {
        let pod = &self.pod.kubelet_uid;
        let state = parks.state(pod, &self.device);
        match (parks.outcome(pod, &self.device), state) {
            (Some(Err(Undone::Lost(why))), _) => {
                self.fail(format!("the driver lost a process of it, so it is to be restarted: {why}"));
            }
            (Some(Err(Undone::Running(why))), _) => self.fail(format!("it runs as before: {why}")),
            (Some(Ok(bytes)), _) => self.parked(*bytes),
            (None, Some(ParkState::Parked)) => self.parked(parks.bytes(pod, &self.device).unwrap_or(0)),
            (None, Some(ParkState::Lost)) => {
                self.fail("the driver lost a process of it, so it is to be restarted".to_owned());
            }
            // The keeper, or an earlier agent, ended in between: it is not parked, and is not tried twice.
            (None, None) if parks.is_known() && !parks.is_moving(pod, &self.device) => {
                self.fail("it was interrupted, and the pod runs as before".to_owned());
            }
            _ => {}
        }
    }

    fn parked(&mut self, bytes: u64) {
        self.stage = Stage::Parked;
        let done = report(ActState::Done, format!("{} of it are on the host", ByteSize(bytes).rounded()));
        self.report = Some(ActReport { parked_bytes: i64::try_from(bytes).ok(), ..done });
    }

    fn fail(&mut self, why: impl Into<String>) {
        let why = why.into();
        warn!(pod = self.pod.facts.name, namespace = self.pod.facts.namespace, act = ?self.act, why, "an act failed");
        self.stage = Stage::Over;
        self.report = Some(report(ActState::Failed, why));
    }

    fn undo(&mut self, why: &str) {
        info!(pod = self.pod.facts.name, namespace = self.pod.facts.namespace, act = ?self.act, why, "an act is taken back");
        self.stage = Stage::Over;
        self.report = Some(report(ActState::Undone, why.to_owned()));
    }
}

fn report(state: ActState, message: impl Into<String>) -> ActReport {
    ActReport { state, message: message.into().chars().take(256).collect(), parked_bytes: None }
}

/// What is stored of the act of an incident.
fn stored(incident: &GpuMemoryIncident) -> Option<&ActReport> {
    incident.status.as_ref()?.observation.as_ref()?.act.as_ref()
}

fn decision(incident: &GpuMemoryIncident) -> Option<DecisionState> {
    Some(incident.status.as_ref()?.decision.as_ref()?.state)
}

/// Whether the operator allows the act still.
fn may_run(incident: &GpuMemoryIncident) -> bool {
    matches!(decision(incident), Some(DecisionState::Approved | DecisionState::Verifying))
}

/// Whether the act of an incident is one that the agent carries out.
fn is_carried_here(incident: &GpuMemoryIncident) -> bool {
    let proposed = &incident.spec.proposed;
    let ours = match proposed.action {
        ActionType::Unready | ActionType::Park => true,
        ActionType::Restart => proposed.in_place,
        _ => false,
    };
    ours && incident.spec.mode == Mode::Enforce
        && (!episode::is_closed(incident) || stored(incident).is_some())
}

/// Whether an act may begin: what begins, else why not.
fn may_begin(
    incident: &GpuMemoryIncident,
    pod: &Pod,
    around: Around<'_>,
    parks: &Parks,
) -> Result<String, String> {
    if pod.facts.terminating || pod.facts.finished {
        return Err("the pod is ending already".to_owned());
    }
    match incident.spec.proposed.action {
        ActionType::Unready if !pod.facts.unready => {
            Err("no readiness probe of the pod runs the helper on its pressure file".to_owned())
        }
        ActionType::Unready => Ok("the pod is about to be unready".to_owned()),
        ActionType::Park => {
            let bytes = may_park(incident, pod, around, parks)?;
            Ok(format!("{} are about to be moved to the host", ByteSize(bytes).rounded()))
        }
        _ if !pod.facts.restart_in_place => Err("the pod has not agreed to be restarted in place".to_owned()),
        _ if containers(pod, &incident.spec.device, around).is_empty() => {
            Err("no container of the pod is known to use the device".to_owned())
        }
        _ => Ok(format!(
            "{} of its containers are about to be ended, with {} s to do so",
            containers(pod, &incident.spec.device, around).len(),
            grace(incident).as_secs()
        )),
    }
}

/// Whether the pod of an incident may be parked now: the bytes that it has, else why not.
fn may_park(
    incident: &GpuMemoryIncident,
    pod: &Pod,
    around: Around<'_>,
    parks: &Parks,
) -> Result<u64, String> {
    let uid = &pod.kubelet_uid;
    let found = around.devices.iter().find(|(device, _)| *device.uuid == *incident.spec.device);
    let (device, rules) = found.ok_or_else(|| "the device is not there".to_owned())?;
    let tenant: Option<&Tenant> = rules.tenants.iter().find(|tenant| tenant.pod.uid == pod.uid);
    let elsewhere = |(other, _): &(Device, Rules)| {
        other.uuid != device.uuid && other.ledger.by_pod.iter().any(|held| held.pod == *uid)
    };
    let subject = Subject {
        // The level now, not the one at which it was proposed.
        level: rules.level().max(incident.spec.evidence.level.unwrap_or(Level::Normal).min(Level::Critical)),
        opted_in: pod.facts.park,
        used: tenant.and_then(|tenant| tenant.used),
        other_devices: around.devices.iter().any(elsewhere),
        managed: around.evidence.uses_managed(uid),
        most: rules.park_settings().and_then(|park| park.max_host_size).map(|size| size.0),
    };
    parks.may(uid, &device.uuid, subject).map_err(|refusal| refusal.to_string())
}

/// The containers of a pod that use a device.
fn containers(pod: &Pod, device: &str, around: Around<'_>) -> Vec<Arc<str>> {
    let device = around.devices.iter().find(|(known, _)| *known.uuid == *device);
    let held =
        device.and_then(|(device, _)| device.ledger.by_pod.iter().find(|held| held.pod == pod.kubelet_uid));
    let ids = held.into_iter().flat_map(|held| &held.containers).filter_map(|(id, _)| id.clone());
    let mut ids: Vec<Arc<str>> = ids.collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// How long the processes of a pod may take to end.
fn grace(incident: &GpuMemoryIncident) -> Duration {
    let seconds = incident.spec.proposed.grace_period_seconds.and_then(|seconds| u64::try_from(seconds).ok());
    seconds.map_or(GRACE, Duration::from_secs)
}

fn notice(pod: &Arc<Pod>, act: ActionType, report: &ActReport) -> Notice {
    let (reason, warns) = match report.state {
        ActState::Refused => ("ActRefused", true),
        ActState::Begun => ("ActBegun", true),
        ActState::Done => ("ActDone", false),
        ActState::Failed => ("ActFailed", true),
        ActState::Undone => ("ActUndone", false),
    };
    let what = match act {
        ActionType::Unready => "Unready",
        ActionType::Park => "Park",
        _ => "RestartInPlace",
    };
    let note = format!("{what}: {}", report.message);
    if warns { Notice::warning(pod, reason, what, note) } else { Notice::normal(pod, reason, what, note) }
}
