//! The decide step: breakers and quotas of each layer of the plan, on each device.

use std::sync::Arc;

use highwater_crds::{
    Action, ActionType, Breaker, BreakerScope, DeviceRule, DriverReserve, Freeze, GpuMemoryNodeSpec, Level,
    Mode, ParkAction, PlanBreaker, PlanHostMemory, PlanLayer, PlanLeaks, PlanPool, PlanQuota,
};
use highwater_policy::{
    breaker::{self, Reading, Transition},
    ledger::{Ledger, Share},
    pod,
    quota::{self, BreachChange, BreachState, EffectiveQuota},
    rise::Ring,
    time::Millis,
    victim,
};

use crate::{
    account::Device,
    act::parks::Parks,
    pod_resources::Assignments,
    strength::{Steady, Verdict},
    wards::Wards,
    world::{Pod, World},
};

/// What holds on one device, and where it stands.
#[derive(Debug, Default)]
pub(crate) struct Rules {
    /// The layers that concern the device: `Enforce` first, then `DryRun`, then `Observe`.
    pub(crate) layers: Vec<Layer>,
    /// The pods that were given the device or hold memory there.
    pub(crate) tenants: Vec<Tenant>,
    /// What policy sets aside for the driver.
    pub(crate) reserve: Option<DriverReserve>,
    /// The reservation pool of the layer that binds.
    pub(crate) pool: Option<PlanPool>,
}

/// One layer on one device.
#[derive(Debug)]
pub(crate) struct Layer {
    /// Mode of the policies that it is made of.
    pub(crate) mode: Mode,
    /// Its breakers, at most one a scope.
    pub(crate) breakers: Vec<Watched>,
    /// The rule on the host memory of the pods there.
    pub(crate) host_memory: Option<PlanHostMemory>,
    /// The rule on leaks of the pods there.
    pub(crate) leaks: Option<PlanLeaks>,
}

/// A breaker of a layer.
#[derive(Debug)]
pub(crate) struct Watched {
    /// The breaker.
    pub(crate) rule: PlanBreaker,
    /// Where it stands. One of scope `Pod` stands for each pod by itself: see [`Concern`].
    pub(crate) state: Standing,
}

/// Where a breaker stands, and what it measures.
#[derive(Clone, Debug, Default)]
pub(crate) struct Standing {
    /// Its level.
    pub(crate) state: breaker::State,
    /// What was measured last.
    pub(crate) reading: Reading,
    /// What it measured lately; empty where the rate does not matter.
    ring: Ring,
}

impl Standing {
    /// Moves on by a sample.
    fn step(&mut self, breaker: &Breaker, share: Option<Share>, now: Millis) -> Option<Transition> {
        let rate = breaker.rise.as_ref().and_then(|_| {
            self.ring.push(share.map(|share| share.used), now);
            self.ring.rate()
        });
        self.reading = Reading { share, rate };
        let (state, transition) = breaker::step(breaker, self.state, self.reading, now);
        self.state = state;
        transition
    }
}

impl Layer {
    /// The breaker of a scope.
    pub(crate) fn breaker(&self, scope: BreakerScope) -> Option<&Watched> {
        self.breakers.iter().find(|watched| watched.rule.value.scope == scope)
    }

    /// The breaker whose level is shown: of the device, else of its pool.
    fn shown(&self) -> Option<&Watched> {
        self.breaker(BreakerScope::Device).or_else(|| self.breaker(BreakerScope::Pool))
    }
}

/// A pod on a device.
#[derive(Debug)]
pub(crate) struct Tenant {
    /// The pod.
    pub(crate) pod: Arc<Pod>,
    /// What it holds there.
    pub(crate) used: Option<u64>,
    /// It counts as over its due.
    pub(crate) over: bool,
    /// Since when it has been on the device.
    pub(crate) bound: Millis,
    /// How firmly its quota holds.
    pub(crate) strength: Verdict,
    /// The same, for what is stored.
    pub(crate) steady: Steady,
    /// Without a guard, it took more than its limit while it started.
    pub(crate) oversized: bool,
    /// It holds much that was granted to nobody.
    pub(crate) took: bool,
    /// What it could take beyond its due, where there is a pool.
    pub(crate) overshoot: Option<u64>,
    /// What its guards have charged, where it has some.
    pub(crate) charged: Option<u64>,
    /// What each layer says of it, in the order of the layers.
    pub(crate) terms: Vec<Terms>,
}

/// What a layer says of a pod on a device.
#[derive(Debug)]
pub(crate) struct Terms {
    /// Its quota.
    pub(crate) quota: Option<EffectiveQuota>,
    /// Whether it is in breach.
    pub(crate) breach: BreachState,
    /// How each breaker of the layer concerns it, in their order.
    pub(crate) concerns: Vec<Concern>,
}

/// How a breaker concerns a pod.
#[derive(Clone, Debug)]
pub(crate) struct Concern {
    /// The breaker's policy concerns its namespace.
    pub(crate) selected: bool,
    /// Whether the breaker's policy may restart it; else why not.
    pub(crate) restart: Result<(), victim::Refusal>,
    /// Where a breaker of scope `Pod` stands for it.
    pub(crate) state: Standing,
}

/// What came of a sample.
#[derive(Debug, PartialEq)]
pub(crate) enum Change {
    /// A breaker changed its level: of what scope, and for which tenant (by its place) where that is a pod.
    Level(Mode, BreakerScope, Option<usize>, Transition),
    /// A tenant (by its place) went into breach or came back.
    Breach(Mode, usize, BreachChange),
}

/// What a pod holds of a memory, in bytes: on a device, or on the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Held {
    /// Held.
    pub(crate) used: Option<u64>,
    /// What it may come to.
    pub(crate) limit: Option<u64>,
}

/// What a signal names as its device where it is about host memory.
pub(crate) const HOST: &str = "host";

/// A signal that a pod ought to see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Wanted {
    /// How high memory stands for it.
    pub(crate) level: Level,
    /// UUID of the device, or [`HOST`].
    pub(crate) device: Arc<str>,
    /// What it uses there.
    pub(crate) used: Option<u64>,
    /// Its limit there.
    pub(crate) limit: Option<u64>,
    /// A restart may follow at any time.
    pub(crate) restart: bool,
    /// Why, for people.
    pub(crate) because: Because,
}

/// Why a pod is signalled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Because {
    /// It is above its limit.
    Breach,
    /// Its device, or the device's pool, is above a mark.
    Breaker,
    /// It is above a mark of its limit.
    Near,
    /// It is above a mark of its host memory.
    Host,
    /// Its memory grows and may run out soon.
    Leak,
}

/// Where the agent is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place<'a> {
    /// The plan.
    pub(crate) plan: Option<&'a GpuMemoryNodeSpec>,
    /// What the API server says.
    pub(crate) world: &'a World,
    /// What the kubelet says.
    pub(crate) assignments: &'a Assignments,
    /// What is known of guarded pods.
    pub(crate) wards: &'a Wards,
    /// What is parked.
    pub(crate) parks: &'a Parks,
    /// The release namespace.
    pub(crate) release_namespace: &'a str,
    /// The time.
    pub(crate) now: Millis,
}

impl<'a> Place<'a> {
    /// The layers of the plan that concern a device, `Enforce` first.
    fn layers(&self, device: &Device) -> Vec<(&'a PlanLayer, &'a DeviceRule)> {
        let layers = self.plan.map_or(&[][..], |plan| plan.layers.as_slice()).iter();
        let mut found: Vec<_> = layers
            .filter_map(|layer| {
                let rule = layer.rules.iter().find(|rule| {
                    rule.product == device.info.product && rule.partition == device.partition()
                })?;
                Some((layer, rule))
            })
            .collect();
        found.sort_by_key(|(layer, _)| std::cmp::Reverse(layer.mode));
        found
    }

    /// The quota of a pod on a device by one layer.
    fn quota(
        &self,
        pod: &Pod,
        device: &Device,
        layer: &PlanLayer,
        rule: &DeviceRule,
    ) -> Option<EffectiveQuota> {
        let quotas =
            layer.quotas.iter().filter(|quota: &&PlanQuota| rule.quota_policies.contains(&quota.policy));
        let namespace = self.world.namespaces.get(&pod.facts.namespace);
        let capacity = device.ledger.total.or(device.info.total);
        quota::effective(quotas, &pod.facts, namespace, self.release_namespace, capacity)
    }

    /// The quota of a pod on a device by the layer that binds, whether it uses the device or not.
    pub(crate) fn enforced_quota(&self, pod: &Pod, device: &Device) -> Option<EffectiveQuota> {
        let (layer, rule) = self.layers(device).into_iter().find(|(layer, _)| layer.mode == Mode::Enforce)?;
        self.quota(pod, device, layer, rule)
    }
}

impl Rules {
    /// What holds on a device now. States that stand for the same thing as before are taken over.
    pub(crate) fn of(device: &Device, place: Place<'_>, before: &Self) -> Self {
        let found = place.layers(device);
        let reserve =
            found.first().and_then(|(_, rule)| rule.driver_reserve.as_ref()).map(|r| r.value.clone());
        let enforced = found.iter().find(|(layer, _)| layer.mode == Mode::Enforce);
        let pool = enforced.and_then(|(_, rule)| rule.pool.clone());
        let tenants = tenants(device, place)
            .into_iter()
            .map(|pod| tenant(pod, &found, device, place, before))
            .collect();
        let layers = found
            .iter()
            .map(|(layer, rule)| {
                let old = before.layers.iter().find(|old| old.mode == layer.mode);
                let watched = |rule: &PlanBreaker| Watched {
                    rule: rule.clone(),
                    state: old
                        .and_then(|old| old.breaker(rule.value.scope))
                        .map(|old| old.state.clone())
                        .unwrap_or_default(),
                };
                Layer {
                    mode: layer.mode,
                    breakers: breakers(rule).map(watched).collect(),
                    host_memory: rule.host_memory.clone(),
                    leaks: rule.leaks.clone(),
                }
            })
            .collect();
        Self { layers, tenants, reserve, pool }
    }

    /// Goes on from the level that was shown last, by an earlier agent.
    pub(crate) fn resume(&mut self, level: Level, now: Millis) {
        let shown = self.layers.iter().find_map(|layer| Some(layer.shown()?.rule.value.scope));
        let watched = self.layers.iter_mut().flat_map(|layer| &mut layer.breakers);
        let mut watched = watched.filter(|watched| Some(watched.rule.value.scope) == shown);
        if let Some(watched) = watched.next().filter(|watched| watched.state.state.level < level) {
            watched.state.state = breaker::State::at(level, now);
        }
    }

    /// How pods are parked here by the layer that binds, if they are.
    pub(crate) fn park_settings(&self) -> Option<&ParkAction> {
        let layer = self.layers.get(self.enforced()?)?;
        let marks = layer.breakers.iter().flat_map(|watched| {
            let Breaker { warning, critical, emergency, .. } = &watched.rule.value;
            [warning, critical, emergency].into_iter().flatten()
        });
        marks.flat_map(|mark| &mark.actions).find_map(|action| action.park.as_ref())
    }

    /// Bytes that may come to the device before an enforced breaker does something about it again.
    pub(crate) fn room(&self, ledger: &Ledger) -> u64 {
        let layer = self.enforced().and_then(|at| self.layers.get(at));
        let Some(watched) = layer.and_then(|layer| layer.breaker(BreakerScope::Device)) else {
            return u64::MAX;
        };
        let Some(share) = ledger.level else { return 0 };
        breaker::room(&watched.rule.value, share).unwrap_or(u64::MAX)
    }

    /// The place of the layer that binds.
    pub(crate) fn enforced(&self) -> Option<usize> {
        self.layers.iter().position(|layer| layer.mode == Mode::Enforce)
    }

    /// The quota of a tenant by the layer that binds.
    pub(crate) fn enforced_quota<'a>(&self, tenant: &'a Tenant) -> Option<&'a EffectiveQuota> {
        tenant.terms.get(self.enforced()?)?.quota.as_ref()
    }

    /// The longest that anything the plan asks for must last before it is acted on, in
    /// milliseconds.
    pub(crate) fn longest_hold(&self) -> u64 {
        let marks = self.layers.iter().flat_map(|layer| &layer.breakers).flat_map(|watched| {
            let Breaker { warning, critical, emergency, .. } = &watched.rule.value;
            [warning, critical, emergency].into_iter().flatten().map(|mark| mark.hold_milliseconds)
        });
        let breaches = self.tenants.iter().flat_map(|tenant| &tenant.terms);
        let breaches = breaches.filter_map(|terms| Some(terms.breach()?.terms.hold_milliseconds));
        marks.chain(breaches).max().and_then(|hold| u64::try_from(hold).ok()).unwrap_or(0)
    }

    /// Moves breakers and quotas on by a sample. `pool` is what is granted of the device's pool, where it has
    /// one.
    pub(crate) fn step(&mut self, ledger: &Ledger, pool: Option<Share>, now: Millis) -> Vec<Change> {
        let mut changes = Vec::new();
        for layer in &mut self.layers {
            for watched in &mut layer.breakers {
                let Watched { rule, state } = watched;
                let share = match rule.value.scope {
                    BreakerScope::Device => ledger.level,
                    BreakerScope::Pool => pool,
                    BreakerScope::Pod => continue,
                };
                let transition = state.step(&rule.value, share, now);
                changes.extend(transition.map(|t| Change::Level(layer.mode, rule.value.scope, None, t)));
            }
        }
        for (place, tenant) in self.tenants.iter_mut().enumerate() {
            tenant.used = ledger.used_by(&tenant.pod.kubelet_uid);
            tenant.over = tenant.due().is_some_and(|due| quota::is_over_due(tenant.over, due, tenant.used));
            for (layer, terms) in self.layers.iter().zip(&mut tenant.terms) {
                let breach = terms.quota.as_ref().and_then(|q| Some((q.limit, q.breach.as_ref()?)));
                let (state, change) = match breach {
                    Some((limit, breach)) => terms.breach.step(limit, &breach.terms, tenant.used, now),
                    None => (BreachState::default(), terms.breach.active.then_some(BreachChange::Ended)),
                };
                terms.breach = state;
                changes.extend(change.map(|c| Change::Breach(layer.mode, place, c)));
                let limit = terms.quota.as_ref().map(|quota| quota.limit);
                for (watched, concern) in layer.breakers.iter().zip(&mut terms.concerns) {
                    let breaker = &watched.rule.value;
                    if breaker.scope == BreakerScope::Pod && concern.selected {
                        let share = breaker::pod_share(tenant.used, limit);
                        let transition = concern.state.step(breaker, share, now);
                        let change = |t| Change::Level(layer.mode, BreakerScope::Pod, Some(place), t);
                        changes.extend(transition.map(change));
                    }
                }
            }
        }
        changes
    }

    /// The level that is shown: of the enforced breaker, else of the first that there is.
    pub(crate) fn level(&self) -> Level {
        let shown = self.layers.iter().find_map(Layer::shown);
        shown.map_or(Level::Normal, |watched| watched.state.state.level)
    }

    /// What the enforced breakers ask of the node.
    pub(crate) fn freeze(&self) -> Option<Freeze> {
        let layer = self.layers.first().filter(|layer| layer.mode == Mode::Enforce)?;
        let asked = layer
            .breakers
            .iter()
            .filter_map(|watched| breaker::freeze(&watched.rule.value, watched.state.state.level));
        // Any device is the more that is asked for.
        asked.max_by_key(|freeze| matches!(freeze, Freeze::AnyDevice))
    }

    /// Whether the enforced breakers have nothing against more memory being used.
    pub(crate) fn is_calm(&self) -> bool {
        let enforced = self.layers.iter().filter(|layer| layer.mode == Mode::Enforce);
        enforced.flat_map(|layer| &layer.breakers).all(|watched| watched.state.state.level == Level::Normal)
    }

    /// What a tenant ought to be told by the enforced layer.
    pub(crate) fn wanted(&self, tenant: &Tenant, device: &Arc<str>) -> Option<Wanted> {
        let (layer, terms) =
            self.layers.iter().zip(&tenant.terms).find(|(layer, _)| layer.mode == Mode::Enforce)?;
        let wanted = |level, restart, because| Wanted {
            level,
            device: Arc::clone(device),
            used: tenant.used,
            limit: terms.quota.as_ref().map(|q| q.limit),
            restart,
            because,
        };
        let breach = terms.breach().filter(|_| terms.breach.active).and_then(|breach| {
            let asks = |type_| breach.terms.actions.iter().any(|action| action.type_ == type_);
            let restart = asks(ActionType::Restart);
            let level = if restart { Level::Critical } else { Level::Warning };
            asks(ActionType::Signal).then(|| wanted(level, restart, Because::Breach))
        });
        let concerned = layer.breakers.iter().zip(&terms.concerns).filter(|(_, concern)| concern.selected);
        let pressed = concerned.filter_map(|(watched, concern)| {
            let (level, because) = match watched.rule.value.scope {
                BreakerScope::Pod => (concern.state.state.level, Because::Near),
                BreakerScope::Device | BreakerScope::Pool => (watched.state.state.level, Because::Breaker),
            };
            let asks = |type_| breaker::action(&watched.rule.value, level, type_).is_some();
            asks(ActionType::Signal).then(|| wanted(level, asks(ActionType::Restart), because))
        });
        breach.into_iter().chain(pressed).max_by_key(|wanted| wanted.level)
    }
}

impl Tenant {
    /// What it is owed, by the first layer that says.
    pub(crate) fn due(&self) -> Option<u64> {
        self.quota().map(EffectiveQuota::due)
    }

    /// Its quota, by the first layer that has one.
    pub(crate) fn quota(&self) -> Option<&EffectiveQuota> {
        self.terms.iter().find_map(|terms| terms.quota.as_ref())
    }
}

impl Terms {
    /// What is asked for when the pod is above its limit.
    pub(crate) fn breach(&self) -> Option<&quota::BreachTerms> {
        self.quota.as_ref()?.breach.as_ref()
    }

    /// How it is to be restarted for being above its limit, if it is and that is asked for.
    pub(crate) fn restart_for_breach(&self) -> Option<&Action> {
        let breach = self.breach().filter(|_| self.breach.active)?;
        breach.terms.actions.iter().find(|action| action.type_ == ActionType::Restart)
    }
}

/// The pods on a device: those that the kubelet gave it, and those that hold memory there, or ask for it.
fn tenants<'a>(device: &Device, place: Place<'a>) -> Vec<&'a Arc<Pod>> {
    let holds = |pod: &Pod| device.ledger.by_pod.iter().any(|held| held.pod == pod.kubelet_uid);
    let given = |pod: &Pod| {
        let mut devices = place.assignments.devices(&pod.facts.namespace, &pod.facts.name);
        !pod.facts.finished && devices.any(|given| *given == *device.info.uuid)
    };
    let asks = |pod: &Pod| place.wards.wants(&pod.kubelet_uid, &device.uuid);
    // It is owed what it has on the host.
    let parked = |pod: &Pod| pod.facts.park && place.parks.state(&pod.kubelet_uid, &device.uuid).is_some();
    let mut pods: Vec<_> = place
        .world
        .pods
        .values()
        .filter(|pod| holds(pod) || given(pod) || asks(pod) || parked(pod))
        .collect();
    pods.sort_by(|a, b| a.kubelet_uid.cmp(&b.kubelet_uid));
    pods
}

/// The breakers of a rule: the first of each scope.
fn breakers(rule: &DeviceRule) -> impl Iterator<Item = &PlanBreaker> {
    [BreakerScope::Device, BreakerScope::Pool, BreakerScope::Pod]
        .into_iter()
        .filter_map(|scope| rule.breakers.iter().find(|breaker| breaker.value.scope == scope))
}

fn tenant(
    pod: &Arc<Pod>,
    layers: &[(&PlanLayer, &DeviceRule)],
    device: &Device,
    place: Place<'_>,
    before: &Rules,
) -> Tenant {
    let old = before.tenants.iter().find(|old| old.pod.uid == pod.uid);
    let namespace = place.world.namespaces.get(&pod.facts.namespace);
    let terms = layers
        .iter()
        .map(|(layer, rule)| {
            let quota = place.quota(pod, device, layer, rule);
            let known = before.layers.iter().position(|old| old.mode == layer.mode);
            let known = known.and_then(|at| Some((before.layers.get(at)?, old?.terms.get(at)?)));
            let concern = |breaker: &PlanBreaker| {
                let namespaces = breaker.namespaces.as_ref();
                let (of, release) = (&pod.facts.namespace, place.release_namespace);
                let selected = pod::selects_namespace(namespaces, of, namespace, release);
                let state = known.and_then(|(layer, terms)| {
                    let scope = breaker.value.scope;
                    let at = layer.breakers.iter().position(|old| old.rule.value.scope == scope)?;
                    Some(terms.concerns.get(at)?.state.clone())
                });
                Concern {
                    selected,
                    restart: victim::may_restart(&pod.facts, selected, &breaker.owner_kinds),
                    state: state.unwrap_or_default(),
                }
            };
            let concerns = breakers(rule).map(concern).collect();
            let breach = known.map(|(_, terms)| terms.breach).unwrap_or_default();
            Terms { quota, breach, concerns }
        })
        .collect();
    Tenant {
        pod: Arc::clone(pod),
        used: device.ledger.used_by(&pod.kubelet_uid),
        over: old.is_some_and(|old| old.over),
        bound: old.map_or(place.now, |old| old.bound),
        strength: old.map(|old| old.strength).unwrap_or_default(),
        steady: old.map(|old| old.steady).unwrap_or_default(),
        oversized: old.is_some_and(|old| old.oversized),
        took: old.is_some_and(|old| old.took),
        overshoot: old.and_then(|old| old.overshoot),
        charged: old.and_then(|old| old.charged),
        terms,
    }
}
