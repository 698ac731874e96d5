//! Episodes of leaks: opened at suspicion, and raised to act.

use std::{sync::Arc, time::Duration};

use highwater_crds::{
    Action, ActionType, ByteSize, Evidence, GpuMemoryIncident, HookAction, HookReport, IncidentKind,
    LeakFinding, LeakMemory, LeakStage, Leaks as Rule, Mode, Observation,
};
use highwater_policy::{
    budget::leaks,
    episode::{self, Key},
    leak::recommendation,
    leak_episode::{self, Hook},
};
use jiff::SignedDuration;

use super::{About, Draft, Episodes, Local, Name, Reason, Running, climb::Stand};
use crate::{
    decide::Tenant,
    ladder::{At, Foot},
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
        let terminating = tenant.pod.facts.terminating;
        // A pod that is ending already needs no incident to be ended.
        if terminating && !self.running.contains_key(&reason) {
            return;
        }
        wanted.push(reason.clone());
        let in_place = action.restart.as_ref().is_some_and(|restart| restart.in_place)
            && tenant.pod.facts.restart_in_place;
        let draft = || Draft {
            tenant: Some(tenant),
            in_place,
            host: (finding.memory == LeakMemory::Host).then_some(held),
            leak: Some(finding.clone()),
            explanation: explain(finding),
            ..Draft::of(stand, &action)
        };
        let new = || Running::new(draft().begin(IncidentKind::Leak, &rule.policy, None));
        let running = self.running.entry(reason).or_insert_with(new);
        let horizon = leaks::horizon(&rule.value);
        if let Some(closed) = running.due_again(stand, horizon).filter(|_| !terminating) {
            *running = Running { follows: Some(closed), hook: running.hook, ..new() };
        }
        if running.incident.is_none() && running.draft.evidence.leak.as_ref() != Some(finding) {
            // It waits for a place: what is known when it is opened is what it says.
            let at = running.draft.evidence.at.clone();
            let present = draft().spec(IncidentKind::Leak, &rule.policy, None);
            running.draft.evidence = Evidence { at, ..present.evidence };
            running.draft.proposed = present.proposed;
        }
        if stand.mode == Mode::Enforce
            && let Some(local) = running.hook_before(stand, tenant, &rule.value, finding)
        {
            self.locals.push(local);
        }
    }

    /// What came of the hook of a pod that leaks.
    pub(super) fn hooked_for_leak(&mut self, foot: &Foot, pod: &str, done: bool) {
        let of_it = |reason: &Reason| {
            reason.device == foot.device
                && reason.mode == foot.mode
                && matches!(&reason.about, About::Pod { at: At::Leak, pod: of, .. } if **of == *pod)
        };
        for (_, running) in self.running.iter_mut().filter(|(reason, _)| !done && of_it(reason)) {
            if let Some(hook) = &mut running.hook {
                hook.fail();
            }
        }
    }
}

impl Running {
    /// The incident that was closed and without an act, if it is time to open the next one.
    fn due_again(&mut self, stand: Stand<'_>, horizon: SignedDuration) -> Option<Name> {
        let Stand { world, moment, .. } = stand;
        if !world.synced.all() {
            return None;
        }
        let name = self.incident.clone()?;
        let incident = world.incidents.get(&name).filter(|incident| episode::is_closed(incident))?;
        let reported = |incident| moment.carries.report(incident);
        let theirs = world.incidents.values().filter(|other| Key::of(&other.spec) == self.key);
        let undone = theirs.filter(|other| leak_episode::is_undone(other, reported(other))).count();
        let pause = leak_episode::again_after(incident, reported(incident), undone, horizon)?;
        // When it was closed is told by another machine's clock.
        let since = match &self.closed {
            Some((of, since)) if *of == name => *since,
            _ => self.closed.insert((name.clone(), moment.now)).1,
        };
        (moment.now.since(since) >= pause).then_some(name)
    }

    /// Asks the engine in a pod to free what it caches, once an episode, and looks at what comes of it: no
    /// other act is begun before.
    fn hook_before(
        &mut self,
        stand: Stand<'_>,
        tenant: &Tenant,
        rule: &Rule,
        finding: &LeakFinding,
    ) -> Option<Local> {
        let Stand { world, moment, .. } = stand;
        if !world.synced.all() {
            return None;
        }
        let (now, facts) = (moment.now, &tenant.pod.facts);
        if !std::mem::replace(&mut self.resumed, true) && self.hook.is_none() {
            self.hook = told_of_hook(&self.key, world).map(|told| Hook::resumed(told, now));
        }
        let action = rule.actions.iter().find(|action| action.type_ == ActionType::Hook);
        // Of host memory an engine frees nothing that way.
        let can_help = action.is_some() && facts.hook.is_some() && finding.memory == LeakMemory::Device;
        if can_help && finding.stage == LeakStage::Act && self.hook.is_none() {
            self.hook = Some(Hook::due());
        }
        if !can_help {
            self.hook = self.hook.filter(|hook| !hook.is_to_be_asked());
        }
        let hook = self.hook.as_mut()?;
        hook.see(tenant.used, rule, now);
        let known = self.incident.as_ref().is_some_and(|name| world.incidents.contains_key(name));
        let held = tenant.used.filter(|_| hook.is_to_be_asked() && known && !facts.terminating)?;
        if finding.stage != LeakStage::Act || world.paused(facts, moment.release_namespace) {
            return None;
        }
        hook.ask(held, now);
        let settings = action.and_then(|action| action.hook.as_ref());
        let limit =
            settings.map_or(HookAction::DEFAULT_TIMEOUT_MILLISECONDS, |hook| hook.timeout_milliseconds);
        Some(Local::Hook {
            foot: stand.foot(At::Leak, Some(tenant)),
            pod: Arc::clone(&tenant.pod),
            device: Arc::clone(&stand.device.uuid),
            held,
            limit: Duration::from_millis(u64::try_from(limit).unwrap_or(0)),
            why: explain(finding),
        })
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

/// What an earlier agent told of the hook in the present episode.
fn told_of_hook<'a>(key: &Key, world: &'a World) -> Option<&'a HookReport> {
    let told = |incident: &'a GpuMemoryIncident| {
        let report = incident.status.as_ref()?.observation.as_ref()?.hook.as_ref()?;
        let of_it = Key::of(&incident.spec) == *key && !episode::has_ended(incident);
        of_it.then_some((incident.spec.episode, report))
    };
    world.incidents.values().filter_map(told).max_by_key(|(episode, _)| *episode).map(|(_, report)| report)
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
