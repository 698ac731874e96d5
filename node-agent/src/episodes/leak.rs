//! Episodes of leaks: opened at suspicion, and raised to act.

use std::{sync::Arc, time::Duration};

use highwater_crds::{
    Action, ActionType, ByteSize, Evidence, GpuMemoryIncident, HookAction, IncidentKind, LeakFinding,
    LeakMemory, LeakStage, Mode, Observation,
};
use highwater_policy::{acts::Outcome, episode, leak::recommendation};

use super::{About, Draft, Episodes, Local, Reason, Running, climb::Stand};
use crate::{
    decide::Tenant,
    ladder::{At, Ladder},
    leaks::{Leaks, Suspected},
    world::World,
};

impl Episodes {
    /// A pod that is suspected to leak. Its incident asks for the strongest act of the rule that the
    /// operator must allow; what the agent does by itself it does once an act is due.
    pub(super) fn leak(&mut self, stand: Stand<'_>, place: usize, wanted: &mut Vec<Reason>) {
        let rule = stand.rules.layers.get(stand.layer).and_then(|layer| layer.leaks.as_ref());
        let Some((rule, tenant)) = rule.zip(stand.rules.tenants.get(place)) else { return };
        let found = stand.moment.leaks.suspected(&tenant.pod.kubelet_uid, stand.mode, &stand.device.uuid);
        let Some(Suspected { finding, held }) = found else { return };
        let action = proposed(&rule.value.actions);
        let about = About::Pod { at: At::Leak, pod: Arc::clone(&tenant.pod.uid), act: action.type_ };
        let reason = Reason { device: Arc::clone(&stand.device.uuid), mode: stand.mode, about };
        // A pod that is ending already needs no incident to be ended.
        if tenant.pod.facts.terminating && !self.running.contains_key(&reason) {
            return;
        }
        wanted.push(reason.clone());
        let in_place = action.restart.as_ref().is_some_and(|restart| restart.in_place)
            && tenant.pod.facts.restart_in_place;
        let is_old =
            |old: &Running| old.incident.is_none() && old.draft.evidence.leak.as_ref() != Some(finding);
        if self.running.get(&reason).is_none_or(is_old) {
            let draft = Draft {
                tenant: Some(tenant),
                in_place,
                host: (finding.memory == LeakMemory::Host).then_some(held),
                leak: Some(finding.clone()),
                explanation: explain(finding),
                ..Draft::of(stand, &action)
            };
            match self.running.get_mut(&reason) {
                // It waits for a place: what is known when it is opened is what it says.
                Some(running) => {
                    let at = running.draft.evidence.at.clone();
                    let present = draft.spec(IncidentKind::Leak, &rule.policy, None);
                    running.draft.evidence = Evidence { at, ..present.evidence };
                    running.draft.proposed = present.proposed;
                }
                None => {
                    let spec = draft.begin(IncidentKind::Leak, &rule.policy, None);
                    self.running.insert(reason.clone(), Running::new(spec));
                }
            }
        }
        let incident = self.running.get(&reason).and_then(|running| running.incident.clone());
        if finding.stage == LeakStage::Act && stand.mode == Mode::Enforce {
            let hook = rule.value.actions.iter().find(|action| action.type_ == ActionType::Hook);
            let incident = incident.and_then(|name| stand.world.incidents.get(&name));
            self.hook_for_leak(stand, tenant, hook, finding, incident);
        }
    }

    /// Asks the engine in a pod to free what it caches: once an episode.
    fn hook_for_leak(
        &mut self,
        stand: Stand<'_>,
        tenant: &Tenant,
        hook: Option<&Action>,
        finding: &LeakFinding,
        incident: Option<&GpuMemoryIncident>,
    ) {
        let (Some(hook), Some(incident)) = (hook.filter(|_| tenant.pod.facts.hook.is_some()), incident)
        else {
            return;
        };
        let facts = &tenant.pod.facts;
        // Of host memory an engine frees nothing that way.
        let concerned = finding.memory == LeakMemory::Device && !facts.terminating;
        if !concerned || stand.world.paused(facts, stand.moment.release_namespace) {
            return;
        }
        let (now, uid) = (stand.moment.now, Some(&*tenant.pod.uid));
        let foot = stand.foot(At::Leak, Some(tenant));
        let ladder: &mut Ladder = self.ladders.entry(foot.clone()).or_default();
        if !std::mem::replace(&mut ladder.resumed, true) && told_to_act(incident) {
            // An earlier agent had asked already.
            ladder.resume(ActionType::Hook, uid, Outcome::Pending, now);
        }
        if ladder.has(ActionType::Hook, uid) {
            return;
        }
        ladder.resume(ActionType::Hook, uid, Outcome::Pending, now);
        let settings = hook.hook.as_ref();
        let limit =
            settings.map_or(HookAction::DEFAULT_TIMEOUT_MILLISECONDS, |hook| hook.timeout_milliseconds);
        self.locals.push(Local::Hook {
            foot,
            pod: Arc::clone(&tenant.pod),
            device: Arc::clone(&stand.device.uuid),
            held: tenant.used.unwrap_or(0),
            limit: Duration::from_millis(u64::try_from(limit).unwrap_or(0)),
            why: explain(finding),
        });
    }
}

/// The strongest act that the operator must allow; `Signal` where there is none.
fn proposed(actions: &[Action]) -> Action {
    let budgeted = actions.iter().filter(|action| action.type_.is_budgeted());
    budgeted.max_by_key(|action| action.type_).cloned().unwrap_or_else(|| Action::of(ActionType::Signal))
}

/// Why, and what is recommended.
fn explain(finding: &LeakFinding) -> String {
    let what = match finding.memory {
        LeakMemory::Device => "memory on the device grows",
        LeakMemory::Host => "host memory grows",
    };
    let pace = ByteSize(u64::try_from(finding.slope_bytes_per_hour.mid).unwrap_or(0)).rounded();
    format!("{what} by {pace} an hour: {}; {}", finding.reason, recommendation(finding.advice))
}

/// Whether an observation of it says that an act is due.
fn told_to_act(incident: &GpuMemoryIncident) -> bool {
    let observation = incident.status.as_ref().and_then(|status| status.observation.as_ref());
    let leak = observation.and_then(|observation| observation.leak.as_ref());
    leak.is_some_and(|leak| leak.stage == LeakStage::Act)
}

/// What is thought of the subject of an incident now.
pub(super) fn present<'a>(
    incident: &GpuMemoryIncident,
    world: &World,
    leaks: &'a Leaks,
) -> Option<&'a LeakFinding> {
    let spec = &incident.spec;
    if spec.kind != IncidentKind::Leak || episode::is_closed(incident) {
        return None;
    }
    let subject = spec.subject.as_ref()?;
    let pod = world.pods.values().find(|pod| *pod.uid == *subject.uid)?;
    leaks.suspected(&pod.kubelet_uid, spec.mode, &spec.device).map(|suspected| suspected.finding)
}

/// What was told last of the leak that an incident is about: by its observation, or else its evidence.
pub(super) fn told<'a>(
    incident: &'a GpuMemoryIncident,
    observation: Option<&'a Observation>,
) -> Option<&'a LeakFinding> {
    observation.and_then(|o| o.leak.as_ref()).or(incident.spec.evidence.leak.as_ref())
}

/// Which memory an incident is about, as far as that is a leak.
pub(crate) fn memory_of_leak(
    incident: &GpuMemoryIncident,
    observation: Option<&Observation>,
    world: &World,
    leaks: &Leaks,
) -> LeakMemory {
    let known = present(incident, world, leaks).or(told(incident, observation));
    known.map(|leak| leak.memory).unwrap_or_default()
}
