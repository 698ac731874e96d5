//! Ladders: what is begun at the breakers, broken quotas and host memory of a device.

use std::{sync::Arc, time::Duration};

use highwater_crds::{
    Action, ActionType, BreakerScope, DecisionState, GpuMemoryIncident, HookAction, IncidentKind, Level,
    Mode, ParkAction,
};
use highwater_policy::{
    acts::{self, Outcome, Verdict},
    breaker, episode, park,
};

use super::{
    About, Draft, Episodes, Local, Moment, Reason, Running, is_back_within, is_spent, tell_noculprit,
};
use crate::{
    account::Device,
    act::parks::Subject,
    decide::{Concern, Held, Rules, Tenant, Watched},
    ladder::{At, Begun, Climbs, Foot, Ladder, Step, View},
    world::World,
};

/// One breaker, or one rule, of one layer on one device.
#[derive(Clone, Copy)]
pub(super) struct Stand<'a> {
    pub(super) devices: &'a [(Device, Rules)],
    pub(super) device: &'a Device,
    pub(super) rules: &'a Rules,
    /// The place of the layer.
    pub(super) layer: usize,
    pub(super) mode: Mode,
    pub(super) world: &'a World,
    pub(super) moment: Moment<'a>,
}

impl<'a> Stand<'a> {
    pub(super) fn foot(&self, at: At, pod: Option<&Tenant>) -> Foot {
        let pod = pod.map(|tenant| Arc::clone(&tenant.pod.uid));
        Foot { device: Arc::clone(&self.device.uuid), mode: self.mode, at, pod }
    }

    fn reason(&self, about: About) -> Reason {
        Reason { device: Arc::clone(&self.device.uuid), mode: self.mode, about }
    }

    /// What is known of a pod, in the words of the plan of acts.
    fn weighed(
        &self,
        tenant: &'a Tenant,
        concern: &Concern,
        level: Level,
        action: Option<&Action>,
    ) -> acts::Tenant<'a> {
        let Moment { pools, wards, .. } = self.moment;
        let (pod, device) = (&tenant.pod.kubelet_uid, &self.device.uuid);
        let quota = tenant.terms.get(self.layer).and_then(|terms| terms.quota.as_ref());
        let kept = tenant.used.unwrap_or(0).max(quota.and_then(|quota| quota.guarantee).unwrap_or(0));
        let granted = pools.of_pod(device, pod).map_or(0, |report| report.granted);
        acts::Tenant {
            pod: &tenant.pod.facts,
            used: tenant.used,
            due: quota.map(highwater_policy::quota::EffectiveQuota::due),
            idle_grant: granted.saturating_sub(kept),
            guarded: wards.view(pod, device).is_some_and(|view| view.processes > 0),
            cached: None,
            selected: concern.selected,
            restart: concern.restart,
            park: self.may_park(tenant, level, action.and_then(|action| action.park.as_ref())),
        }
    }

    /// Whether a pod may be parked here; else why not.
    pub(super) fn may_park(
        &self,
        tenant: &Tenant,
        level: Level,
        settings: Option<&ParkAction>,
    ) -> Result<u64, park::Refusal> {
        if !tenant.pod.facts.park {
            return Err(park::Refusal::NotOptedIn);
        }
        let uid = &tenant.pod.kubelet_uid;
        let elsewhere = |(other, _): &(Device, Rules)| {
            other.uuid != self.device.uuid && other.ledger.by_pod.iter().any(|held| held.pod == *uid)
        };
        let subject = Subject {
            level,
            opted_in: true,
            used: tenant.used,
            other_devices: self.devices.iter().any(elsewhere),
            managed: self.moment.evidence.uses_managed(uid),
            most: settings.and_then(|settings| settings.max_host_size).map(|size| size.0),
        };
        self.moment.parks.may(uid, &self.device.uuid, subject)
    }
}

impl Episodes {
    /// Climbs a breaker's ladders.
    pub(super) fn breaker(&mut self, stand: Stand<'_>, at: usize, wanted: &mut Vec<Reason>) {
        let Some(watched) = stand.rules.layers.get(stand.layer).and_then(|layer| layer.breakers.get(at))
        else {
            return;
        };
        if watched.rule.value.scope != BreakerScope::Pod {
            self.climb(stand, watched, at, None, wanted);
            return;
        }
        for tenant in &stand.rules.tenants {
            self.climb(stand, watched, at, Some(tenant), wanted);
        }
    }

    /// Climbs one ladder of a breaker: that of the device, or that of a pod there.
    #[allow(clippy::too_many_lines, reason = "one step after the other")]
    fn climb<'a>(
        &mut self,
        stand: Stand<'a>,
        watched: &'a Watched,
        at: usize,
        only: Option<&'a Tenant>,
        wanted: &mut Vec<Reason>,
    ) {
        let concern =
            |tenant: &'a Tenant| tenant.terms.get(stand.layer).and_then(|terms| terms.concerns.get(at));
        let standing = match only {
            None => Some(&watched.state),
            Some(only) => concern(only).map(|concern| &concern.state),
        };
        let Some(standing) = standing else { return };
        let (breaker, level) = (&watched.rule.value, standing.state.level);
        let Some(mark) = breaker::mark(breaker, level) else { return };
        let foot = stand.foot(At::Breaker(breaker.scope), only);
        let now = stand.moment.now;
        let mut ladder = self.ladders.remove(&foot).unwrap_or_default();
        let of_foot = |about: &About| matches!(about, About::Rung { scope, of, .. } if *scope == breaker.scope && *of == foot.pod);
        if !ladder.resumed && stand.world.synced.all() {
            ladder.resumed = true;
            self.resume(stand, breaker.scope, only, &mut ladder);
        }
        let climbs = match standing.reading.share {
            Some(share) => ladder.climbs(mark, standing.state.early, share, now),
            // Nothing is known: nothing is begun, and nothing is over.
            None => Climbs::Rests,
        };
        let theirs: Vec<Reason> = self
            .running
            .keys()
            .filter(|reason| {
                reason.device == foot.device && reason.mode == foot.mode && of_foot(&reason.about)
            })
            .cloned()
            .collect();
        let mut blames_nobody = false;
        for reason in theirs {
            let About::Rung { act, subject, .. } = &reason.about else { continue };
            let (act, subject) = (*act, subject.clone());
            let Some(running) = self.running.get_mut(&reason) else { continue };
            let kept = match climbs {
                Climbs::Fell => {
                    running.fell = running.fell.or(Some(now));
                    true
                }
                Climbs::Rests => true,
                Climbs::Anew => running.fell.is_none(),
                Climbs::On if subject.is_none() && act == ActionType::Restart => {
                    blames_nobody = true;
                    true
                }
                Climbs::On => match running.stays(stand, i64::from(breaker.minimum_stay_milliseconds)) {
                    Stays::On(outcome) => {
                        if let Some(outcome) = outcome {
                            ladder.conclude(act, subject.as_deref(), outcome);
                        }
                        true
                    }
                    Stays::Left => {
                        ladder.conclude(act, subject.as_deref(), Outcome::Insufficient { freed: None });
                        false
                    }
                    Stays::Over => {
                        ladder.forget(act, subject.as_deref());
                        false
                    }
                },
            };
            if kept {
                wanted.push(reason);
            } else {
                self.end(&reason, now);
            }
        }
        if !matches!(climbs, Climbs::On | Climbs::Anew) {
            self.ladders.insert(foot, ladder);
            return;
        }
        let park = breaker::action(breaker, level, ActionType::Park).map(|(.., action)| action);
        let tenants: Vec<(usize, acts::Tenant<'_>)> = stand
            .rules
            .tenants
            .iter()
            .enumerate()
            .filter(|(_, tenant)| only.is_none_or(|only| only.pod.uid == tenant.pod.uid))
            .filter_map(|(place, tenant)| Some((place, stand.weighed(tenant, concern(tenant)?, level, park))))
            .collect();
        let step = ladder.step(View {
            breaker,
            standing,
            tenants: &tenants,
            budgeted: stand.world.synced.all(),
            now,
            wall: stand.moment.wall,
        });
        for begun in &step.begin {
            let Some((_, mark, action)) = breaker::action(breaker, level, begun.action) else { continue };
            if !begun.action.is_budgeted() {
                self.local(stand, begun, action, &mut ladder, &foot);
                continue;
            }
            let tenant = begun.tenant.and_then(|place| stand.rules.tenants.get(place));
            let subject = tenant.map(|tenant| Arc::clone(&tenant.pod.uid));
            let about =
                About::Rung { scope: breaker.scope, of: foot.pod.clone(), act: begun.action, subject };
            let explanation = begun.line.clone();
            let draft = Draft { tenant, explanation, ..Draft::of(stand, action) };
            let spec = Draft {
                scope: Some(breaker.scope),
                standing: Some(standing),
                frees: Some(begun.frees.most()),
                in_place: begun.in_place,
                alternatives: step.alternatives.clone(),
                ..draft
            }
            .begin(IncidentKind::Breaker, &watched.rule.policy, Some(mark.trip_percent));
            let reason = stand.reason(about);
            wanted.push(reason.clone());
            self.running.entry(reason).or_insert_with(|| Running::new(spec));
        }
        self.blame_nobody(stand, watched, standing, &step, blames_nobody, &foot, wanted);
        self.ladders.insert(foot, ladder);
    }

    /// Where a restart is asked for and nobody is to blame, that is an incident of no pod.
    #[allow(clippy::too_many_arguments, reason = "what a ladder is about")]
    fn blame_nobody(
        &mut self,
        stand: Stand<'_>,
        watched: &Watched,
        standing: &crate::decide::Standing,
        step: &Step,
        running: bool,
        foot: &Foot,
        wanted: &mut Vec<Reason>,
    ) {
        let breaker = &watched.rule.value;
        let about = About::Rung {
            scope: breaker.scope,
            of: foot.pod.clone(),
            act: ActionType::Restart,
            subject: None,
        };
        let reason = stand.reason(about);
        let asked = breaker::action(breaker, standing.state.level, ActionType::Restart);
        let nobody = step.verdict == Verdict::NoCulprit && stand.world.synced.all();
        let Some((_, mark, action)) = asked.filter(|_| nobody) else {
            if running {
                wanted.retain(|other| *other != reason);
            }
            return;
        };
        if !wanted.contains(&reason) {
            wanted.push(reason.clone());
        }
        self.running.entry(reason).or_insert_with(|| {
            let draft = Draft {
                scope: Some(breaker.scope),
                standing: Some(standing),
                alternatives: step.alternatives.clone(),
                explanation: tell_noculprit(breaker.scope),
                ..Draft::of(stand, action)
            };
            Running::new(draft.begin(IncidentKind::Breaker, &watched.rule.policy, Some(mark.trip_percent)))
        });
    }

    /// Begins what needs nobody's leave. What is paused is not begun, and weighed again.
    fn local(&mut self, stand: Stand<'_>, begun: &Begun, action: &Action, ladder: &mut Ladder, foot: &Foot) {
        if stand.mode != Mode::Enforce {
            return;
        }
        let tenant = begun.tenant.and_then(|place| stand.rules.tenants.get(place));
        let paused = |tenant: &Tenant| stand.world.paused(&tenant.pod.facts, stand.moment.release_namespace);
        match begun.action {
            ActionType::Hook => {
                let Some(tenant) = tenant else { return };
                if paused(tenant) {
                    ladder.forget(begun.action, Some(&tenant.pod.uid));
                    return;
                }
                let milliseconds = action
                    .hook
                    .as_ref()
                    .map_or(HookAction::DEFAULT_TIMEOUT_MILLISECONDS, |hook| hook.timeout_milliseconds);
                self.locals.push(Local::Hook {
                    foot: foot.clone(),
                    pod: Arc::clone(&tenant.pod),
                    device: Arc::clone(&stand.device.uuid),
                    held: tenant.used.unwrap_or(0),
                    limit: Duration::from_millis(u64::try_from(milliseconds).unwrap_or(0)),
                    why: begun.line.clone(),
                });
            }
            ActionType::Reclaim => {
                let concerned = stand.rules.tenants.iter().filter(|other| {
                    tenant.is_none_or(|tenant| tenant.pod.uid == other.pod.uid) && !paused(other)
                });
                let pods = concerned.map(|tenant| Arc::clone(&tenant.pod.kubelet_uid)).collect();
                self.locals.push(Local::Reclaim {
                    device: Arc::clone(&stand.device.uuid),
                    pods,
                    why: begun.line.clone(),
                });
            }
            // Written as long as the level lasts: see `Rules::wanted` and `Rules::freeze`.
            _ => {}
        }
    }

    /// Goes on with what an earlier agent, or an earlier round of this one, left undecided or undone.
    fn resume(&mut self, stand: Stand<'_>, scope: BreakerScope, only: Option<&Tenant>, ladder: &mut Ladder) {
        let theirs = |incident: &&GpuMemoryIncident| {
            let spec = &incident.spec;
            let subject = spec.subject.as_ref().map(|subject| subject.uid.as_str());
            spec.kind == IncidentKind::Breaker
                && spec.mode == stand.mode
                && *spec.device == *stand.device.uuid
                && spec.evidence.scope.unwrap_or(BreakerScope::Device) == scope
                && only.is_none_or(|only| subject == Some(&*only.pod.uid))
                && !episode::has_ended(incident)
        };
        for incident in stand.world.incidents.values().filter(theirs) {
            let spec = &incident.spec;
            let act = spec.proposed.action;
            let subject = spec.subject.as_ref().map(|subject| Arc::<str>::from(subject.uid.as_str()));
            let outcome = outcome(incident).unwrap_or(Outcome::Pending);
            if subject.is_some() || act != ActionType::Restart {
                ladder.resume(act, subject.as_deref(), outcome, stand.moment.now);
            }
            if !episode::is_closed(incident) {
                let of = only.map(|only| Arc::clone(&only.pod.uid));
                let reason = stand.reason(About::Rung { scope, of, act, subject });
                self.running.entry(reason).or_insert_with(|| Running::inherited(incident));
            }
        }
    }

    /// The acts of a quota that is broken, or of host memory (`host` says how much there is), on one pod: all
    /// but `Signal`, which is shown for as long as the reason lasts.
    #[allow(clippy::too_many_arguments, reason = "what a ladder is about")]
    pub(super) fn climb_pod(
        &mut self,
        stand: Stand<'_>,
        at: At,
        kind: IncidentKind,
        policy: &str,
        place: usize,
        concern: &Concern,
        actions: &[Action],
        need: u64,
        host: Option<Held>,
        explanation: &str,
        wanted: &mut Vec<Reason>,
    ) {
        let Some(tenant) = stand.rules.tenants.get(place) else { return };
        let foot = stand.foot(at, Some(tenant));
        let mut ladder = self.ladders.remove(&foot).unwrap_or_default();
        let now = stand.moment.now;
        let pod = &tenant.pod.uid;
        let theirs: Vec<Reason> = self
            .running
            .keys()
            .filter(|reason| {
                reason.device == foot.device
                    && reason.mode == foot.mode
                    && matches!(&reason.about, About::Pod { at: of, pod: subject, .. } if *of == at && subject == pod)
            })
            .cloned()
            .collect();
        for reason in theirs {
            if let (About::Pod { act, .. }, Some(running)) = (&reason.about, self.running.get(&reason)) {
                let incident = running.incident.as_ref().and_then(|name| stand.world.incidents.get(name));
                if let Some(outcome) = incident.and_then(outcome) {
                    ladder.conclude(*act, Some(pod), outcome);
                }
            }
            wanted.push(reason);
        }
        // A pod that is ending already needs no incident to be ended.
        if need > 0 && !tenant.pod.facts.terminating {
            let park = actions.iter().find(|action| action.type_ == ActionType::Park);
            let mut weighed = stand.weighed(tenant, concern, Level::Critical, park);
            if let Some(host) = host {
                weighed.used = host.used;
                weighed.due = None;
            }
            let budgeted = stand.world.synced.all();
            let step = ladder.step_pod(actions, need, (place, weighed), budgeted, now, stand.moment.wall);
            for begun in &step.begin {
                let Some(action) = actions.iter().find(|action| action.type_ == begun.action) else {
                    continue;
                };
                if !begun.action.is_budgeted() {
                    self.local(stand, begun, action, &mut ladder, &foot);
                    continue;
                }
                let draft = Draft {
                    tenant: Some(tenant),
                    explanation: explanation.to_owned(),
                    frees: Some(need),
                    in_place: begun.in_place,
                    alternatives: step.alternatives.clone(),
                    host,
                    ..Draft::of(stand, action)
                };
                let spec = draft.begin(kind, policy, None);
                let reason = stand.reason(About::Pod { at, pod: Arc::clone(pod), act: begun.action });
                wanted.push(reason.clone());
                self.running.entry(reason).or_insert_with(|| Running::new(spec));
            }
        }
        self.ladders.insert(foot, ladder);
    }

    /// What came of a hook.
    pub(crate) fn hooked(&mut self, foot: &Foot, pod: &str, done: bool) {
        if foot.at == At::Leak {
            self.hooked_for_leak(foot, pod, done);
        }
        if let Some(ladder) = self.ladders.get_mut(foot).filter(|_| !done) {
            ladder.conclude(ActionType::Hook, Some(pod), Outcome::Failed);
        }
    }

    /// Whether idle memory of a device's pool is to be given back.
    pub(crate) fn reclaims(&self, device: &str) -> bool {
        let mut theirs = self
            .ladders
            .iter()
            .filter(|(foot, _)| *foot.device == *device && foot.mode == Mode::Enforce && foot.pod.is_none());
        theirs.any(|(_, ladder)| ladder.presses(ActionType::Reclaim))
    }
}

/// Whether an episode goes on.
enum Stays {
    /// It does, and this is known of its act.
    On(Option<Outcome>),
    /// Its subject is gone, and memory is still too high.
    Left,
    /// Its reason is over.
    Over,
}

impl Running {
    /// Whether a rung goes on with its subject: as long as that holds too much, and for a while after it is
    /// gone, since the device needs a moment to show it.
    fn stays(&mut self, stand: Stand<'_>, minimum_stay: i64) -> Stays {
        /// After a restarted pod is gone, the least time in milliseconds before another is picked.
        const SETTLE: u64 = 2_000;
        let Moment { now, parks, .. } = stand.moment;
        let incident = self.incident.as_ref().and_then(|name| stand.world.incidents.get(name));
        if self.fell.is_some() || (self.inherited && incident.is_none_or(episode::has_ended)) {
            return Stays::Over;
        }
        let outcome = incident.and_then(outcome);
        let Some(subject) = &self.draft.subject else { return Stays::On(outcome) };
        let tenant = stand.rules.tenants.iter().find(|tenant| *tenant.pod.uid == subject.uid);
        let (used, parked) = match tenant {
            Some(tenant) => {
                let uid = &tenant.pod.kubelet_uid;
                (tenant.used, parks.state(uid, &stand.device.uuid).is_some())
            }
            None => (stand.device.ledger.used_by(&subject.uid), false),
        };
        if used == Some(0) || parked {
            let vacant = *self.vacant.get_or_insert(now);
            let stay = u64::try_from(minimum_stay).unwrap_or(0).max(SETTLE);
            // A pod that is parked is not gone: its incident goes on, and others may be acted on.
            return match (now.since(vacant) < stay, parked) {
                (true, _) => Stays::On(None),
                (false, true) => Stays::On(Some(Outcome::Insufficient {
                    freed: self.draft.evidence.used_bytes.and_then(|b| u64::try_from(b).ok()),
                })),
                (false, false) => Stays::Left,
            };
        }
        self.vacant = None;
        if is_back_within(self.draft.evidence.due_bytes, self.draft.evidence.used_bytes, used) {
            return Stays::Over;
        }
        Stays::On(outcome)
    }
}

/// What came of the act of an incident whose memory is still too high, as far as was decided.
fn outcome(incident: &GpuMemoryIncident) -> Option<Outcome> {
    let decision = incident.status.as_ref()?.decision.as_ref()?;
    match decision.state {
        DecisionState::Proposed | DecisionState::Approved | DecisionState::Verifying => None,
        DecisionState::Succeeded => Some(Outcome::Insufficient { freed: None }),
        // What nothing is done about for good. Another pod may then be turned to.
        DecisionState::Suppressed | DecisionState::Failed => is_spent(incident).then_some(Outcome::Failed),
        DecisionState::Cancelled | DecisionState::Superseded => Some(Outcome::Refused),
    }
}
