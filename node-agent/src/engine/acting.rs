//! The part of the round that carries acts out: what the agent does by itself, what the operator allowed,
//! and what is taken back.

use std::sync::Arc;

use highwater_crds::Level;
use highwater_policy::time::Millis;
use tracing::{debug, info, warn};

use super::{Engine, Order};
use crate::{
    act::{
        carry::{Around, Effect},
        hook::Answered,
        restart,
    },
    episodes::Local,
    framework::{Scraped, Target},
    guard,
    host::{Reading, Surveyed, Want},
    ladder::At,
    link,
    publish::{Job, Notice},
    sampler::Sampled,
};

impl Engine {
    /// Carries on what the operator allowed.
    pub(super) fn carry_on(&mut self, now: Millis) {
        let around = Around {
            devices: &self.devices,
            world: &self.world,
            hosts: &self.hosts,
            leaks: &self.leaks,
            evidence: &self.evidence,
            release_namespace: &self.release_namespace,
            binds: self.binds,
            now,
        };
        let unready = self.acts.unready_pods();
        let effects = self.carries.step(around, &mut self.acts, &mut self.parks);
        self.restless |= unready != self.acts.unready_pods();
        self.effect(effects);
    }

    fn effect(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Keeper(order) => (self.order)(Order::Keeper(order)),
                Effect::Restart(order) => (self.order)(Order::Restart(order)),
                Effect::Tell(notice) => (self.submit)(Job::Tell(notice)),
            }
        }
    }

    /// Does what needs nobody's leave, and takes back what is over.
    pub(super) fn act(&mut self, now: Millis) {
        for local in self.episodes.locals() {
            match local {
                Local::Hook { foot, pod, device, held, limit, why } => {
                    if foot.at == At::Leak && self.hooks.is_asking(&pod.kubelet_uid) {
                        // A breaker has it asked just now: what that frees is what is waited for.
                        continue;
                    }
                    match self.hooks.ask(&foot, &self.world.pods, &pod, (&device, held), limit) {
                        Ok(call) => {
                            info!(
                                pod = pod.facts.name,
                                namespace = pod.facts.namespace,
                                why,
                                "a hook is called"
                            );
                            (self.order)(Order::Hook(call));
                        }
                        Err(error) => {
                            warn!(
                                pod = pod.facts.name,
                                namespace = pod.facts.namespace,
                                error,
                                "a hook is not called"
                            );
                            self.episodes.hooked(&foot, &pod.uid, false);
                            (self.submit)(Job::Tell(Notice::warning(&pod, "HookFailed", "Hook", error)));
                        }
                    }
                }
                Local::Reclaim { device, pods, why } => self.reclaim(&device, &pods, &why, now),
            }
        }
        // Without a plan that binds nothing presses any more.
        let (devices, binds) = (&self.devices, self.binds);
        let is_calm = |pod: &str, uuid: &str, held: u64| {
            let Some((device, rules)) = devices.iter().find(|(device, _)| *device.uuid == *uuid) else {
                // It is gone, and so is what presses there.
                return !devices.is_empty();
            };
            // What comes back with the engine must not be what puts it to sleep again.
            let coming = held.saturating_sub(device.ledger.used_by(pod).unwrap_or(0));
            device.is_sampled() && (!binds || (rules.is_calm() && rules.room(&device.ledger) >= coming))
        };
        for call in self.hooks.wake(&self.world.pods, is_calm, now) {
            (self.order)(Order::Hook(call));
        }
        self.restore(now);
    }

    /// Takes idle memory of a device back: grants by its pool at its next look, and what the driver keeps in
    /// its pools in pods by their guards, whenever they come by. Nobody waits for that.
    fn reclaim(&mut self, device: &Arc<str>, pods: &[Arc<str>], why: &str, now: Millis) {
        self.reclaims = self.reclaims.saturating_add(1);
        info!(%device, why, "idle memory is taken back");
        self.pools.press(device, true, now, &mut self.wards, &mut self.order);
        for pod in pods {
            let ordinal = self.wards.get(pod).and_then(|ward| ward.ordinal(device));
            if let Some(ordinal) = ordinal.and_then(|ordinal| u32::try_from(ordinal).ok()) {
                let pod = Arc::clone(pod);
                (self.order)(Order::Guard(guard::Order::Trim { pod, device: ordinal }));
            }
        }
    }

    /// Brings parked pods back where there is room, and everything back where the devices are let go of.
    fn restore(&mut self, now: Millis) {
        if self.parks.all().is_empty() {
            return;
        }
        let order = &mut self.order;
        let mut keeper = |asked: link::Order| order(Order::Keeper(asked));
        let planned = self.plan.as_ref().is_some_and(|plan| plan.spec.stand_down);
        if planned || self.world.node.as_ref().is_some_and(|node| node.stand_down) {
            self.parks.restore_all(&mut keeper);
            return;
        }
        for (device, rules) in &self.devices {
            let Some(free) = device.ledger.free else { continue };
            let pods = &self.world.pods;
            let priority = |uid: &str| pods.get(uid).map_or(0, |pod| pod.facts.priority);
            // What is granted to the one that comes back is free for it; what others were granted is theirs.
            let owed =
                self.parks.all().iter().map(|park| self.pools.owed_to_others(&device.uuid, &park.pod)).max();
            // One that would have to be parked again at once stays where it is.
            let room = if self.binds { rules.room(&device.ledger) } else { u64::MAX };
            let free = free.saturating_sub(owed.unwrap_or(0)).min(room);
            let calm = !self.binds || rules.is_calm();
            let level = if calm { Level::Normal } else { Level::Critical };
            self.parks.restore(&device.uuid, Some(free), level, priority, now, &mut keeper);
        }
    }

    /// Notes which processes of pods that might be parked there are on a device.
    pub(super) fn seek_parks(&mut self, sampled: &Sampled, now: Millis) {
        let Some((device, rules)) = self.devices.iter().find(|(device, _)| device.uuid == sampled.uuid)
        else {
            return;
        };
        let Some(charges) = &sampled.charges else { return };
        let opted_in =
            rules.tenants.iter().filter(|tenant| tenant.pod.facts.park && tenant.used.unwrap_or(0) > 0);
        let pods: Vec<Arc<str>> = opted_in.map(|tenant| Arc::clone(&tenant.pod.kubelet_uid)).collect();
        let order = &mut self.order;
        self.parks.sample(&device.uuid, charges, &pods, now, |survey| order(Order::Survey(survey)));
    }

    /// What came of a hook.
    pub(crate) fn hooked(&mut self, answered: Answered) {
        let (now, _) = self.now();
        let pod = self.world.pods.get(&answered.call.pod).map(|pod| Arc::clone(&pod.uid));
        let (foot, notice) = self.hooks.answered(answered, &self.world.pods, now);
        if let (Some((foot, done)), Some(pod)) = (foot, pod) {
            self.episodes.hooked(&foot, &pod, done);
        }
        if let Some(notice) = notice {
            (self.submit)(Job::Tell(notice));
        }
    }

    /// What came of something about processes.
    pub(crate) fn restarted(&mut self, outcome: restart::Outcome) {
        debug!(?outcome, "a restart in place goes on");
        let effects = self.carries.restarted(outcome);
        self.effect(effects);
    }

    /// What was found of a pod that might be parked.
    pub(crate) fn surveyed(&mut self, surveyed: Surveyed) {
        self.parks.surveyed(surveyed);
    }

    /// The host memory of pods was read.
    pub(crate) fn host(&mut self, readings: Vec<Reading>) {
        let (now, _) = self.now();
        for Reading { pod, exact, .. } in &readings {
            if let Some(exact) = exact {
                self.leaks.host(pod, *exact, now);
            }
        }
        self.restless |= self.hosts.read(readings, now);
    }

    /// Whether [`host_wants`](Self::host_wants) and [`framework_targets`](Self::framework_targets) may say
    /// something else than when this was asked last: they follow from who is where, not from samples.
    pub(crate) fn asks_anew(&mut self) -> bool {
        std::mem::take(&mut self.asks_anew)
    }

    /// The pods whose host memory is to be read.
    pub(crate) fn host_wants(&self) -> Vec<Want> {
        if !self.binds {
            return Vec::new();
        }
        let mut wants = if self.host_memory { self.hosts.wants() } else { Vec::new() };
        for (pod, every) in self.leaks.host_wants() {
            match wants.binary_search_by(|want| want.pod.cmp(pod)) {
                Ok(at) => wants.get_mut(at).into_iter().for_each(|want| want.exact_every = Some(every)),
                Err(at) => {
                    let want = Want { pod: Arc::clone(pod), above_percent: None, exact_every: Some(every) };
                    wants.insert(at, want);
                }
            }
        }
        wants
    }

    /// The frameworks whose numbers are to be read.
    pub(crate) fn framework_targets(&self) -> Vec<Target> {
        if self.binds { self.leaks.targets() } else { Vec::new() }
    }

    /// A framework's numbers were read, or not.
    pub(crate) fn scraped(&mut self, scraped: Scraped) {
        let (now, _) = self.now();
        let (pod, anywhere): (Arc<str>, Arc<str>) = (Arc::clone(&scraped.target.pod), "".into());
        if let Some(notice) = self.leaks.scraped(scraped, now)
            && self.told.is_news(&pod, &anywhere, "framework", now)
        {
            (self.submit)(Job::Tell(notice));
        }
    }
}
